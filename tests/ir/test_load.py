"""What a loaded module looks like: static, one dataflow block, weights inside, named after the model, shapes folded away."""

from __future__ import annotations

import gc

import numpy as np
import onnx
import pytest
import tvm
from onnx import helper, numpy_helper, parser
from tvm import relax

from tvmfuse.errors import ModelError, UnsupportedError, UsageError
from tvmfuse.model import operators
from tvmfuse.model.load import Loaded, load
from tvmfuse.values import TensorInfo


def onnx_model(graph: str, opset: int = 13, ir_version: int = 8) -> onnx.ModelProto:
    return parser.parse_model(f'<ir_version: {ir_version}, opset_import: ["" : {opset}, "com.example" : 1]> {graph}')


def bindings(loaded: Loaded) -> list[relax.Binding]:
    (block,) = loaded.mod["main"].body.blocks
    assert isinstance(block, relax.DataflowBlock)
    return list(block.bindings)


def ops(loaded: Loaded) -> list[str]:
    calls = [binding.value for binding in bindings(loaded) if isinstance(binding.value, tvm.ir.Call)]
    return [call.op.name.removeprefix("relax.") if isinstance(call.op, tvm.ir.Op) else call.op.name_hint for call in calls]


def constants(loaded: Loaded) -> list[np.ndarray]:
    found = []
    relax.analysis.post_order_visit(
        loaded.mod["main"], lambda node: found.append(node.value.numpy()) if isinstance(node, tvm.ir.GenericConst) else None
    )
    return found


def test_names_shapes_and_types_are_the_models():
    model = onnx_model("g (float[N,3] x, float[3,2] w) => (float[N,2] p, float[N,3] q) { p = MatMul(x, w) q = Relu(x) }")
    model.graph.input[0].name = model.graph.node[0].input[0] = model.graph.node[1].input[0] = "gpu_0/feat.x:0"
    loaded = load(model, {"N": 4})
    assert loaded.inputs == (TensorInfo("gpu_0/feat.x:0", (4, 3), "float32"), TensorInfo("w", (3, 2), "float32"))
    assert loaded.outputs == (TensorInfo("p", (4, 2), "float32"), TensorInfo("q", (4, 3), "float32"))
    assert [tuple(map(int, field.shape)) for field in loaded.mod["main"].ret_ty.fields] == [(4, 2), (4, 3)]


def test_one_output_is_no_tuple():
    assert isinstance(load(onnx_model("g (float[2] x) => (float[2] y) { y = Relu(x) }")).mod["main"].ret_ty, relax.TensorType)


def test_bindings_are_called_as_their_nodes():
    model = onnx_model("g (float[2] x) => (float[2] y) { a = Relu(x) b = Exp(a) y = Neg(b) }")
    model.graph.node[0].name = "/encoder/act/Relu"
    model.graph.node[2].name = "/encoder/act/Relu"  # ONNX lets names repeat
    assert [binding.var.name for binding in bindings(load(model))][:3] == ["/encoder/act/Relu", "b", "y"]


def test_initializers_that_are_listed_as_inputs_are_weights():
    graph = "g (float[1,2] x, float[2,2] w) => (float[1,2] y) <float[2,2] w = {1, 2, 3, 4}> { y = MatMul(x, w) }"
    loaded = load(onnx_model(graph, opset=9, ir_version=3))
    assert [info.name for info in loaded.inputs] == ["x"]
    assert constants(loaded)[0].tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize("from_file", [False, True])
def test_weights_that_are_not_inputs_too_are_no_fault_in_ir_version_3(from_file, tmp_path):
    """As in ONNX Runtime's own mul_1.onnx; the checker says "W in initializer but not in graph input"."""
    model = onnx_model("g (float[2] x) => (float[2] y) <float[2] w = {1, 2}> { y = Mul (x, w) }", opset=7, ir_version=3)
    onnx.save(model, tmp_path / "mul.onnx")
    loaded = load(tmp_path / "mul.onnx" if from_file else model)
    assert [info.name for info in loaded.inputs] == ["x"]
    assert constants(loaded)[0].tolist() == [1, 2]
    assert model.ir_version == 3


def test_the_callers_model_is_left_alone():
    model = onnx_model("g (float[N] x) => (float[N] y) { a = Identity(x) y = Relu(a) }")
    before = model.SerializeToString()
    load(model, {"N": 3})
    assert model.SerializeToString() == before


SHAPE_OF_X = """g (float[1,N,4] x) => (float[a,b] y) <int64[1] zero = {0}, int64[1] minus = {-1}, int64 one = {1}> {
    s = Shape(x)  n = Gather<axis = 0>(s, one)  n1 = Unsqueeze(n, zero)  t = Concat<axis = 0>(n1, minus)  y = Reshape(x, t) }"""


def test_a_computed_shape_folds_away():
    loaded = load(onnx_model(SHAPE_OF_X), {"N": 6})
    assert ops(loaded) == ["reshape"]
    assert loaded.outputs[0].shape == (6, 4)


def test_a_shape_that_is_computed_in_floats_folds_away():
    loaded = load(
        onnx_model(
            """g (float[1,2,4,N] x) => (float[a,b,c,d] y)
            <float[1] two = {2}, int64[1] two_i = {2}, int64[1] four = {4}, float[0] none = {}> {
            s = Shape(x)  hw = Slice(s, two_i, four)  f = Cast<to = 1>(hw)  g = Mul(f, two)  h = Floor(g)  size = Cast<to = 7>(h)
            zero = Constant<value_ints = [0]>()  nc = Slice(s, zero, two_i)  sizes = Concat<axis = 0>(nc, size)
            y = Resize<mode = "nearest">(x, none, none, sizes) }"""
        ),
        {"N": 6},
    )
    assert ops(loaded) == ["image.resize2d"]
    assert loaded.outputs[0].shape == (1, 2, 8, 12)


def test_a_scale_that_is_computed_in_floats_reaches_resize():
    loaded = load(
        onnx_model(
            """g (float[1,2,4,6] x) => (float[a,b,c,d] y)
            <float[2] ones = {1, 1}, float[2] size = {8, 12}, int64[1] two = {2}, int64[1] four = {4}> {
            s = Shape(x)  hw = Slice(s, two, four)  f = Cast<to = 1>(hw)  ratio = Div(size, f)  scales = Concat<axis = 0>(ones, ratio)
            y = Resize<mode = "linear">(x, , scales) }"""
        )
    )
    assert loaded.outputs[0].shape == (1, 2, 8, 12)


def test_float_arithmetic_on_weights_stays_in_the_graph():
    model = onnx_model(
        """g (float[2] x) => (float[2] y) <float[2] a = {1, 2}, float[2] b = {3, 4}> {
        e = Exp(a)  s = Sqrt(b)  w = Mul(e, s)  y = Mul(x, w) }"""
    )
    assert sorted(ops(load(model))) == ["exp", "multiply", "multiply", "sqrt"]


def test_float_weights_that_are_only_moved_fold():
    model = onnx_model(
        """g (float[1,4] x) => (float[1,2] y) <float[2,2] a = {1, 2, 3, 4}, int64[2] s = {2, 2}> {
        z = ConstantOfShape<value = float[1] {7}>(s)  t = Transpose(a)  w = Concat<axis = 0>(t, z)  y = MatMul(x, w) }"""
    )
    loaded = load(model)
    assert ops(loaded) == ["matmul"]
    assert constants(loaded)[0].tolist() == [[1, 3], [2, 4], [7, 7], [7, 7]]


def test_dropout_and_identity_vanish():
    loaded = load(onnx_model("g (float[2] x) => (float[2] y) { a = Identity(x) b, mask = Dropout(a) c = Identity(b) y = Relu(c) }"))
    assert ops(loaded) == ["nn.relu"]


def test_an_output_may_be_an_input_or_a_constant():
    outputs = "(float[2] y, float[2] z, int64[1] s)"
    loaded = load(onnx_model(f"g (float[2] x) => {outputs} <float[2] w = {{1, 2}}> {{ y = Identity(x) z = Identity(w) s = Shape(x) }}"))
    assert [info.name for info in loaded.outputs] == ["y", "z", "s"]
    assert loaded.outputs[2].dtype == "int64"


def test_unused_outputs_and_nodes_are_dropped():
    model = onnx_model(
        """g (float[1,2,3] x) => (float[1,2,3] y) <float[2] c = {1, 1}> {
        y, mean, var, saved_mean, saved_var = BatchNormalization(x, c, c, c, c)  unused = Exp(x) }""",
        opset=7,
    )
    assert ops(load(model)) == ["nn.batch_norm"]


@pytest.mark.parametrize(("taken", "op"), [(True, "exp"), (False, "negative")])
def test_an_if_whose_condition_is_known_is_its_branch(taken, op):
    """Both Ifs call what is inside of their branches "a", as exporters may."""
    x, y, a = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2]) for name in "xya")

    def branches(operand):
        return {
            f"{name}_branch": helper.make_graph([helper.make_node(kind, [operand], ["a"])], name, [], [a])
            for name, kind in (("then", "Exp"), ("else", "Neg"))
        }

    nodes = [
        helper.make_node("If", ["c"], ["b"], **branches("x")),
        helper.make_node("If", ["c"], ["d"], **branches("x")),
        helper.make_node("Sub", ["b", "d"], ["y"]),
    ]
    graph = helper.make_graph(nodes, "g", [x], [y], [numpy_helper.from_array(np.array(taken), "c")])
    loaded = load(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8))
    assert ops(loaded) == [op, op, "subtract"]
    difference = bindings(loaded)[2].value
    assert difference.args[0].name != difference.args[1].name


def test_a_loop_of_known_length_is_its_steps():
    """Inner names repeat at each step and outside; what is captured keeps its name."""
    loop = """s, all = Loop(n, yes, x) <body = body (int64 i, bool go, float[2] a) => (bool on, float[2] b, float[2] c) {
        on = Identity(go)  e = Exp(a)  b = Mul(e, w)  c = Neg(b) }>"""
    graph = f"g (float[2] x) => (float[2] s, float[3,2] all) <int64 n = {{3}}, bool yes = {{1}}, float[2] w = {{1, 2}}> {{ {loop} }}"
    loaded = load(onnx_model(graph))
    assert ops(loaded).count("exp") == ops(loaded).count("multiply") == ops(loaded).count("negative") == 3
    assert [info.shape for info in loaded.outputs] == [(2,), (3, 2)]


def test_a_scan_is_its_steps():
    scan = """f, all = Scan<num_scan_inputs = 1, scan_input_directions = [1],
        body = body (float[2] a, float[2] r) => (float[2] b, float[2] c) { b = Add(a, r)  c = Exp(b) }>(x, y)"""
    loaded = load(onnx_model(f"g (float[2] x, float[4,2] y) => (float[2] f, float[4,2] all) {{ {scan} }}"))
    assert sorted(ops(loaded)) == sorted(["take", "add", "exp", "expand_dims"] * 4 + ["concat"])
    assert [info.shape for info in loaded.outputs] == [(2,), (4, 2)]


@pytest.mark.parametrize(("steps", "condition"), [("k", "yes"), ("many", "yes"), ("n", "more")])
def test_a_loop_of_unknown_or_great_length_is_refused(steps, condition):
    body = "body (int64 i, bool go, float[2] a) => (bool on, float[2] b) { on = Identity(go)  b = Exp(a) }"
    inputs = "float[2] x, int64 k, bool more"
    with pytest.raises(UnsupportedError, match="Loop: how many steps it takes isn't known, or it takes too many"):
        load(
            onnx_model(
                f"""g ({inputs}) => (float[2] y) <int64 n = {{3}}, int64 many = {{100000}}, bool yes = {{1}}> {{
                y = Loop({steps}, {condition}, x) <body = {body}> }}"""
            )
        )


def test_an_operator_that_onnx_defines_by_others_is_taken_apart():
    """Under names of its own, however often a node's name repeats."""
    nodes = "[norm] a = MeanVarianceNormalization<axes = [0]>(x)  [norm] y = MeanVarianceNormalization<axes = [1]>(a)"
    loaded = load(onnx_model(f"g (float[2,3] x) => (float[2,3] y) {{ {nodes} }}"))
    assert ops(loaded) == ["mean", "power", "power", "mean", "subtract", "sqrt", "subtract", "add", "divide"] * 2


def test_local_functions_are_inlined():
    model = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 13, "local" : 1]> g (float[2] x) => (float[2] y) { y = local.twice(x) }
        <domain: "local", opset_import: ["" : 13]> twice (a) => (b) { c = Exp(a) b = Exp(c) }"""
    )
    assert ops(load(model)) == ["exp", "exp"]


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        ("y = Sum(x, x, x)", ["add", "add"]),
        ("y = Max(x, x)", ["maximum"]),
        ("y = Clip(x, low, high)", ["clip"]),
        ("y = Clip(x, , high)", ["minimum"]),
        ("y = Clip(x, low)", ["maximum"]),
        ("y = Clip(x, high, low)", ["maximum", "minimum"]),
        ("y = Gemm<alpha = 0.5, transB = 1>(x, x, x)", ["permute_dims", "matmul", "multiply", "add"]),
        ('y = Einsum<equation = "ij,jk->ik">(x, x)', ["einsum"]),
        ("y = Pad(x, pads)", ["nn.pad"]),
    ],
)
def test_operators_stay_visible_to_relax_passes(node, expected):
    weights = "float low = {0}, float high = {6}, int64[4] pads = {0, 0, 0, 0}"
    assert ops(load(onnx_model(f"g (float[2,2] x) => (float[2,2] y) <{weights}> {{ {node} }}"))) == expected


def test_every_unsupported_operator_is_listed_with_its_nodes():
    model = onnx_model(
        """g (float[2,3] x) => (float[2,3] y, float[2,3] z) {
        [first] a = com.example.Relu(x)  [second] b = com.example.Relu(a)  [odd] y = Det(b)  [fine] z = Relu(x) }"""
    )
    with pytest.raises(UnsupportedError) as error:
        load(model)
    assert str(error.value).splitlines()[1:] == [
        "  com.example::Relu: operators of domain com.example aren't known (nodes first, second)",
        "  ai.onnx::Det: no converter (nodes odd)",
    ]


@pytest.mark.parametrize("raised", [KeyboardInterrupt, UnsupportedError("why")])
def test_an_import_that_ends_early_says_nothing_of_its_own(raised, monkeypatch, capfd):
    """TVM's block builder complains on stderr when it goes with a block begun."""

    def convert(*_):
        raise raised

    monkeypatch.setitem(operators.CONVERTERS, "Relu", convert)
    with pytest.raises((KeyboardInterrupt, UnsupportedError)):
        load(onnx_model("g (float[2] x) => (float[2] y) { y = Relu(x) }"))
    gc.collect()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        ("a = NonZero(x) y = Cast<to = 1>(a)", "NonZero: the shape of its output depends on data"),
        ("y, m = Dropout(x, ratio, yes)", "Dropout: training_mode=1"),
        ('y = Resize<mode = "linear", coordinate_transformation_mode = "align_corners">(x, , scales)', "lead to fractions of an element"),
        ('y = Resize<coordinate_transformation_mode = "tf_half_pixel_for_nn">(x, , scales)', "coordinate_transformation_mode=tf_half"),
        ("a = SequenceConstruct(x) y = SequenceAt(a, at)", "something else than tensors of numbers"),
        ("y = Slice(x, at1, at1)", r"output 'y' has no elements: its shape is \(0, 2, 5, 5\)"),
        ('y = ConvTranspose<strides = [2, 2], auto_pad = "SAME_LOWER">(x, w)', "TVM's importer makes"),
        ("i = Cast<to = 7>(x) j = Pow(i, ratio) y = Cast<to = 1>(j)", "a power of integers by a fraction"),
    ],
)
def test_what_would_come_out_wrong_is_refused_with_the_reason(node, reason):
    weights = "float ratio = {0.5}, bool yes = {1}, float[4] scales = {1, 1, 1.1, 1.1}, int64 at = {0}, int64[1] at1 = {1}"
    weights += ", float[2,2,1,1] w = {1, 2, 3, 4}"
    with pytest.raises(UnsupportedError, match=reason):
        load(onnx_model(f"g (float[1,2,5,5] x) => (float[p,q,r,s] y) <{weights}> {{ {node} }}"))


@pytest.mark.parametrize("opset", [6, 99])
def test_operator_sets_outside_of_what_is_covered_are_refused(opset):
    with pytest.raises(UnsupportedError, match=f"operator set {opset}; 7 to "):
        load(onnx_model("g (float[2] x) => (float[2] y) { y = Relu(x) }", opset))


def test_an_operator_that_the_importer_chokes_on_names_the_node(capsys):
    model = onnx_model("g (int32[2,2] x) => (float[2,2] y) { [eye] y = EyeLike<dtype = 1>(x) }")
    with pytest.raises(UnsupportedError, match=r"EyeLike: TVM's importer fails: .* \(nodes eye\)"):
        load(model)
    assert capsys.readouterr().out == ""


def test_shapes_that_do_not_fit_together_name_the_node():
    node = {"MatMul": "y = MatMul(x, w)", "Reshape": "y = Reshape(x, s)"}
    for operator, written in node.items():
        model = onnx_model(f"g (float[N,3] x) => (float[4,3] y) <float[2,1] w = {{0, 0}}, int64[2] s = {{4, 3}}> {{ [a] {written} }}")
        with pytest.raises(ModelError, match=rf"{operator} 'a' doesn't fit its inputs x \(3, 3\)"):
            load(model, {"N": 3})


def test_a_path_is_named_in_the_call_that_binds(tmp_path):
    path = tmp_path / "enc.onnx"
    onnx.save(onnx_model("g (float[1,S] x) => (float[1,S] y) { y = Relu(x) }"), path)
    with pytest.raises(ModelError, match=r'enc.onnx", shapes=\{"S": 1\}\)'):
        load(path)
    assert load(str(path), {"S": 2}).inputs[0].shape == (1, 2)


def test_a_relax_module_is_bound_and_made_one_dataflow_block():
    n = tvm.tirx.Var("n", "int64")
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((n, 3), "float32"))
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(relax.op.nn.relu(x)))
    module = builder.get()
    with pytest.raises(ModelError, match=r'tvmfuse.build\(module, shapes=\{"n": 1\}\)'):
        load(module)
    for shapes in ({"n": 4}, {"x": (4, 3)}):
        loaded = load(module, shapes)
        assert ops(loaded) == ["nn.relu"]
        assert (loaded.inputs, loaded.outputs) == ((TensorInfo("x", (4, 3), "float32"),), (TensorInfo("output_0", (4, 3), "float32"),))


def test_a_relax_module_keeps_its_attached_params_as_constants():
    from tvm.relax.frontend.onnx import from_onnx

    model = onnx_model("g (float[1,2] x) => (float[1,2] y) <float[2,2] w = {1, 2, 3, 4}> { y = MatMul(x, w) }")
    loaded = load(from_onnx(model, keep_params_in_input=True))
    assert [info.name for info in loaded.inputs] == ["x"]
    assert constants(loaded)[0].tolist() == [[1, 2], [3, 4]]


def test_a_module_without_main_and_other_types_are_refused():
    with pytest.raises(ModelError, match="no Relax function main"):
        load(tvm.IRModule({}))
    with pytest.raises(UsageError, match="not int"):
        load(3)
