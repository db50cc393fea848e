"""Models that once failed, each the smallest of its kind, with their right values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx.reference
import pytest
import scipy.special

import tvmfuse
from tvmfuse.choose import Fuse
from tvmfuse.errors import UnsupportedError


def built(text: str, opset: int = 17, fuse: Fuse = "measured") -> tvmfuse.Session:
    return tvmfuse.build(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]> g {text}'), threads=1, fuse=fuse)


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def agree(text: str, feeds: dict[str, np.ndarray], wanted: list[np.ndarray], opset: int = 17, atol: float = 2e-5) -> None:
    """Fused and unfused give the same bits, and the values of a float64 reference."""
    always, never = (built(text, opset, fuse).run(None, feeds) for fuse in ("always", "never"))
    for one, other, reference in zip(always, never, wanted, strict=True):
        assert one.tobytes() == other.tobytes()
        assert one.shape == reference.shape
        np.testing.assert_allclose(one, reference, rtol=1e-5, atol=atol)


@pytest.mark.parametrize("shape", [(2, 5, 11), (2, 16, 20), (2, 16, 16)])
def test_log_softmax_over_an_axis_that_is_not_last(shape: tuple[int, ...]) -> None:
    """A strip and the overlapping one behind it bound the same names twice."""
    x = np.random.default_rng(0).standard_normal(shape, np.float32)
    size = ",".join(map(str, shape))
    (y,) = built(f"(float[{size}] x) => (float[{size}] y) {{ y = LogSoftmax<axis=1>(x) }}").run(None, {"x": x})
    np.testing.assert_allclose(y, scipy.special.log_softmax(x.astype(np.float64), axis=1), rtol=0, atol=1e-6)


def test_gather_stays_within_its_tensor() -> None:
    x = np.arange(15, dtype=np.float32).reshape(5, 3)
    session = built("(float[5,3] x, int64[4] i) => (float[4,3] y) { y = Gather(x, i) }")
    (y,) = session.run(None, {"x": x, "i": np.array([4, -5, -6, 1 << 40])})
    assert (y[:2] == x[[4, 0]]).all()
    assert np.isin(y[2:], x).all(), "an index out of range is an error in ONNX; foreign memory it must not be"


def test_erf_in_float64_is_not_a_float32_polynomial() -> None:
    x = np.random.default_rng(0).standard_normal((5, 3))
    text = "(double[5,3] x, double[3,3] w) => (double[5,3] y, double[5,3] z) { y = Erf(x) p = MatMul(x, w) z = Erf(p) }"
    y, z = built(text).run(None, {"x": x, "w": np.eye(3)})
    np.testing.assert_allclose(y, scipy.special.erf(x), rtol=1e-14)
    np.testing.assert_allclose(z, scipy.special.erf(x), rtol=1e-14)


def test_small_results_of_softplus_and_of_tanh_in_float64() -> None:
    """Where 1 was added first, or e**-2x taken from 1, nothing was left of them."""
    x = np.array([-80.0, -20.0, -9.0, -1e-9, 0.0, 1e-9, 3.0, 99.0])
    softplus = np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))
    nodes = "t = Tanh(x) s = Softplus(x) p = MatMul(x, w) z = Softplus(p)"
    text = f"(KIND[8,1] x) => (KIND[8,1] t, KIND[8,1] s, KIND[8,1] z) <KIND[1,1] w = {{1}}> {{ {nodes} }}"
    for kind, tolerance in (("float", 3e-7), ("double", 1e-15)):
        column = x.astype({"float": np.float32, "double": np.float64}[kind]).reshape(8, 1)
        found = built(text.replace("KIND", kind)).run(None, {"x": column})
        for array, wanted in zip(found, (np.tanh(x), softplus, softplus), strict=True):
            np.testing.assert_allclose(array[:, 0], wanted, rtol=tolerance)


@pytest.mark.parametrize(("dtype", "ulp"), [(np.float16, 0.51), (np.float32, 2.1), (np.float64, 2)])
def test_hyperbolic_functions_near_zero_and_near_overflow(dtype: type[np.floating], ulp: float) -> None:
    """Small results of Atanh were nothing; Sinh and Cosh were infinite up to ln 2 too early, and Sinh of 1 in float64 14 ulp off."""
    info, numbers = np.finfo(dtype), np.random.default_rng(0)
    last = np.log(info.max)
    tiny, moderate, large = (
        10 ** numbers.uniform(np.log10(info.tiny), 0, 1000),
        numbers.uniform(0, last, 1000),
        numbers.uniform(0, np.log(2), 100),
    )
    x = np.concatenate([tiny, moderate, last + large, [0, 1, np.inf, np.nan]]).astype(dtype)
    x = np.concatenate([x, -x])
    kind = {np.float16: "float16", np.float32: "float", np.float64: "double"}[dtype]
    operators = {"Atanh": np.arctanh, "Sinh": np.sinh, "Cosh": np.cosh}
    outputs, nodes = ", ".join(f"{kind}[{x.size}] {name}" for name in operators), " ".join(f"{name} = {name}(x)" for name in operators)
    found = built(f"({kind}[{x.size}] x) => ({outputs}) {{ {nodes} }}", 22).run(None, {"x": x})
    for reference, array in zip(operators.values(), found, strict=True):
        with np.errstate(all="ignore"):
            exact = reference(x.astype(np.float64))
        wanted = exact.astype(dtype)
        finite = np.isfinite(wanted)
        np.testing.assert_array_equal(array[~finite], wanted[~finite])
        np.testing.assert_array_equal(np.signbit(array[finite]), np.signbit(wanted[finite]))
        assert (np.abs(array[finite] - exact[finite]) <= ulp * np.spacing(np.abs(wanted[finite]))).all()


def test_circular_functions_and_their_inverses_are_not_the_c_librarys() -> None:
    """Their bits were another libm's on another machine; these are rounded once from float64."""
    x = np.concatenate([10 ** np.random.default_rng(0).uniform(-38, 38, 4000), [0, 1, np.inf, np.nan]]).astype(np.float32)
    x = np.concatenate([x, -x, np.linspace(-1, 1, 1999, dtype=np.float32)])
    operators = {
        **{"Sin": np.sin, "Cos": np.cos, "Tan": np.tan, "Asin": np.arcsin, "Acos": np.arccos, "Atan": np.arctan},
        **{"Asinh": np.arcsinh, "Acosh": np.arccosh},
    }
    outputs, nodes = ", ".join(f"float[{x.size}] {name}" for name in operators), " ".join(f"{name} = {name}(x)" for name in operators)
    found = built(f"(float[{x.size}] x) => ({outputs}) {{ {nodes} }}", 22).run(None, {"x": x})
    for reference, array in zip(operators.values(), found, strict=True):
        with np.errstate(all="ignore"):
            exact = reference(x.astype(np.float64))
        finite = np.isfinite(exact)
        np.testing.assert_array_equal(array[~finite], exact[~finite])
        assert (np.abs(array[finite] - exact[finite]) <= 0.501 * np.spacing(np.abs(exact[finite]).astype(np.float32))).all()


def test_circular_functions_of_each_other_are_compiled_in_moments() -> None:
    """One inside another took minutes."""
    x = np.linspace(-3, 3, 48, dtype=np.float32)
    (y,) = built("(float[48] x) => (float[48] y) { a = Sin(x) b = Cos(a) c = Tan(b) y = Atan(c) }", 22).run(None, {"x": x})
    np.testing.assert_allclose(y, np.arctan(np.tan(np.cos(np.sin(x.astype(np.float64))))), rtol=1e-6)


def test_half_precision_rounds_operators_once_that_converters_make_several_of() -> None:
    """Softplus of -7 was a unit of 1, or nothing; the squares of ReduceL2 overflowed."""
    x = np.linspace(-11.5, 11.5, 1000).astype(np.float16)
    wide = x.astype(np.float64)
    wanted = {
        "Softplus": np.maximum(wide, 0) + np.log1p(np.exp(-np.abs(wide))),
        "Elu": np.where(wide < 0, np.expm1(np.minimum(wide, 0)), wide),
        "Sinh": np.sinh(wide),
        "HardSwish": wide * np.clip(wide / 6 + 0.5, 0, 1),
        "Swish": wide / (1 + np.exp(-wide)),
        "ReduceL2": np.sqrt((wide**2).sum(keepdims=True)),
    }
    outputs = ", ".join(f"float16[{reference.size}] {operator}" for operator, reference in wanted.items())
    nodes = " ".join(f"{operator} = {operator}(x)" for operator in wanted)
    found = built(f"(float16[1000] x) => ({outputs}) {{ {nodes} }}", 24).run(None, {"x": x})
    for (operator, reference), array in zip(wanted.items(), found, strict=True):
        off = np.abs(array.astype(np.float64) - reference)
        assert (off <= 0.51 * np.spacing(np.abs(reference).astype(np.float16))).all(), operator


@pytest.mark.parametrize(("kind", "tolerance"), [("float16", 2e-3), ("float", 1e-6), ("double", 1e-14)])
def test_elu_and_selu_keep_nan_in_every_type(kind: str, tolerance: float) -> None:
    dtype = {"float16": np.float16, "float": np.float32, "double": np.float64}[kind]
    x = np.array([-2.0, -0.5, 0.0, 1.5, np.nan, -np.inf, np.inf], dtype)
    elu, selu = built(f"({kind}[7] x) => ({kind}[7] y, {kind}[7] z) {{ y = Elu<alpha=0.5>(x) z = Selu(x) }}").run(None, {"x": x})
    wide = x.astype(np.float64)
    np.testing.assert_allclose(elu, np.where(wide <= 0, 0.5 * np.expm1(np.minimum(wide, 0)), wide), rtol=0, atol=tolerance)
    below = 1.6732632423543772 * np.expm1(np.minimum(wide, 0))
    np.testing.assert_allclose(selu, 1.0507009873554805 * np.where(wide <= 0, below, wide), rtol=0, atol=tolerance)


def test_layer_normalisation_in_float64() -> None:
    rng = np.random.default_rng(0)
    x, scale, bias = rng.standard_normal((2, 3, 8)), rng.standard_normal(8), rng.standard_normal(8)
    text = "(double[2,3,8] x, double[8] s, double[8] b) => (double[2,3,8] y) { y = LayerNormalization(x, s, b) }"
    (y,) = built(text).run(None, {"x": x, "s": scale, "b": bias})
    expected = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * scale + bias
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("operator", ["GRU", "LSTM"])
def test_half_precision_recurrent_networks_are_computed_in_single(operator: str) -> None:
    rng = np.random.default_rng(0)
    rows = {"GRU": 9, "LSTM": 12}[operator]
    half = {name: (0.5 * rng.standard_normal(shape)).astype(np.float16) for name, shape in (("w", (1, rows, 4)), ("r", (1, rows, 3)))}
    x = rng.standard_normal((5, 2, 4)).astype(np.float16)
    results = []
    for kind, dtype in ((onnx.TensorProto.FLOAT16, np.float16), (onnx.TensorProto.FLOAT, np.float32)):
        weights = [onnx.numpy_helper.from_array(array.astype(dtype), name) for name, array in half.items()]
        node = onnx.helper.make_node(operator, ["x", "w", "r"], ["y"], hidden_size=3)
        values = [onnx.helper.make_tensor_value_info(n, kind, s) for n, s in (("x", [5, 2, 4]), ("y", [5, 1, 2, 3]))]
        graph = onnx.helper.make_graph([node], "g", values[:1], values[1:], weights)
        model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)])
        results.append(tvmfuse.build(model, threads=1).run(None, {"x": x.astype(dtype)})[0])
    assert results[0].dtype == np.float16 and (results[0] == results[1].astype(np.float16)).all()


@pytest.mark.parametrize("operator", ["GRU", "LSTM"])
def test_double_precision_recurrent_networks(operator: str) -> None:
    rng = np.random.default_rng(0)
    gates = {"GRU": 3, "LSTM": 4}[operator]
    w, r, b = (0.5 * rng.standard_normal(shape) for shape in ((1, 3 * gates, 4), (1, 3 * gates, 3), (1, 6 * gates)))
    x = rng.standard_normal((5, 2, 4))
    weights = [onnx.numpy_helper.from_array(array, name) for name, array in (("w", w), ("r", r), ("b", b))]
    node = onnx.helper.make_node(operator, ["x", "w", "r", "b"], ["y"], hidden_size=3)
    values = [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.DOUBLE, s) for n, s in (("x", [5, 2, 4]), ("y", [5, 1, 2, 3]))]
    model = onnx.helper.make_model(
        onnx.helper.make_graph([node], "g", values[:1], values[1:], weights), opset_imports=[onnx.helper.make_opsetid("", 17)]
    )
    (y,) = tvmfuse.build(model, threads=1).run(None, {"x": x})
    h, c = np.zeros((2, 3)), np.zeros((2, 3))
    for t in range(5):
        given = x[t] @ w[0].T + b[0, : 3 * gates]
        recurrent = h @ r[0].T + b[0, 3 * gates :]
        if operator == "GRU":
            z, reset = (scipy.special.expit(given[:, i : i + 3] + recurrent[:, i : i + 3]) for i in (0, 3))
            candidate = np.tanh(given[:, 6:] + (reset * h) @ r[0, 6:].T + b[0, 15:])
            h = (1 - z) * candidate + z * h
        else:
            i, o, f = (scipy.special.expit((given + recurrent)[:, k : k + 3]) for k in (0, 3, 6))
            c = f * c + i * np.tanh((given + recurrent)[:, 9:])
            h = o * np.tanh(c)
        np.testing.assert_allclose(y[t, 0], h, rtol=0, atol=1e-14)


def test_of_reversed_bounds_the_upper_one_binds_outside_of_a_site_too() -> None:
    values = "(float[2,3] x) => (float[2,3] y, float[2,1] m) <float low = {1}, float high = {-1}>"
    session = built(values + " { y = Clip(x, low, high) m = ReduceMax<axes=[1]>(y) }")
    y, largest = session.run(None, {"x": np.array([[1, -2, 3], [0, np.nan, -5]], np.float32)})
    np.testing.assert_array_equal(y, [[-1, -1, -1], [-1, np.nan, -1]])
    np.testing.assert_array_equal(largest, [[-1], [np.nan]])


def test_grouped_pointwise_convolution_and_a_positional_constant() -> None:
    x, w, p = noise(1, 136, 28, 28), noise(136, 34, 1, 1), noise(1, 136, 28, 28)
    text = """(float[1,136,28,28] x, float[136,34,1,1] w, float[1,136,28,28] p) => (float[1,136,28,28] y) {
        c = Conv<group=4>(x, w) s = Add(c, p) y = Relu(s) }"""
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> g {text}')
    for array, name in ((w, "w"), (p, "p")):
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    del model.graph.input[1:]
    product = np.einsum("gokx,gkp->gop", w.astype(np.float64).reshape(4, 34, 34, 1), x.astype(np.float64).reshape(4, 34, 784))
    wanted = np.maximum(product.reshape(1, 136, 28, 28) + p, 0)
    results = [tvmfuse.build(model, threads=1, fuse=fuse).run(None, {"x": x})[0] for fuse in ("always", "never")]
    assert results[0].tobytes() == results[1].tobytes()
    np.testing.assert_allclose(results[0], wanted, rtol=1e-5, atol=1e-4)


def test_prelu_slopes_broadcast_to_the_last_axis() -> None:
    """[W] is the last axis in ONNX, not the channels, also where C equals W."""
    shapes = ("", "4,1,1", "1,1", "4,4,4", "4", "1,4,4,4")
    x, w = noise(1, 3, 4, 4), noise(4, 3, 1, 1)
    slopes = [noise(*map(int, filter(None, shape.split(",")))) for shape in shapes]
    declared = ", ".join(f"float[{shape}] s{i}" if shape else f"float s{i}" for i, shape in enumerate(shapes))
    text = f"""(float[1,3,4,4] x, float[4,3,1,1] w, {declared}) => ({", ".join(f"float[1,4,4,4] y{i}" for i in range(len(shapes)))}) {{
        {" ".join(f"c{i} = Conv(x, w) y{i} = PRelu(c{i}, s{i})" for i in range(len(shapes)))} }}"""
    product = np.einsum("oi,nihw->nohw", w[:, :, 0, 0].astype(np.float64), x)
    wanted = [np.where(product < 0, product * slope, product) for slope in slopes]
    agree(text, {"x": x, "w": w} | {f"s{i}": slope for i, slope in enumerate(slopes)}, wanted)


@pytest.mark.parametrize(
    ("target", "attributes", "shape"),
    [
        ("0, -1", "", (2, 12)),
        ("-1, 0", "", (8, 3)),
        ("0, 0, -1, 2", "", (2, 3, 2, 2)),
        ("4, 6", "<allowzero=1>", (4, 6)),
        ("-1", "<allowzero=1>", (24,)),
    ],
)
def test_reshape_targets(target: str, attributes: str, shape: tuple[int, ...]) -> None:
    x = noise(2, 3, 4)
    rank = len(shape)
    text = f"""(float[2,3,4] x) => (float[{",".join(f"d{i}" for i in range(rank))}] y) <int64[{rank}] t = {{{target}}}> {{
        r = Reshape{attributes}(x, t) y = Relu(r) }}"""
    agree(text, {"x": x}, [np.maximum(x, 0).reshape(shape)])


def test_a_zero_extent_is_kept_by_allowzero_and_refused_as_an_output() -> None:
    text = "(float[2,0,3] x) => (float[a,b] y) <int64[2] t = {0, 6}> { y = Reshape<allowzero=1>(x, t) }"
    with pytest.raises(UnsupportedError, match=r"output 'y' has no elements: its shape is \(0, 6\)"):
        built(text)


def test_what_has_no_elements_adds_nothing() -> None:
    x = noise(2, 3)
    text = """(float[2,3] x, float[0,3] n) => (float[2,3] y, float[2,3] z, float[3] s) <int64[1] zero = {0}> {
        c = Concat<axis=0>(n, x, n) y = Relu(c) e = CastLike(x, n) z = Neg(e) s = ReduceSum<keepdims=0>(n, zero) }"""
    session = built(text)
    y, z, s = session.run(None, {"x": x, "n": np.empty((0, 3), np.float32)})
    assert (y == np.maximum(x, 0)).all() and (z == -x).all() and s.tolist() == [0, 0, 0]


def test_batch_normalisation_after_height_and_width_were_merged() -> None:
    x, w = noise(1, 3, 4, 5), noise(6, 3, 1, 1)
    scale, bias, mean, variance = noise(6), noise(6) + 1, noise(6) - 1, np.abs(noise(6)) + 0.5
    text = """(float[1,3,4,5] x, float[6,3,1,1] w, float[6] s, float[6] b, float[6] m, float[6] v) => (float[1,6,20] y)
        <int64[3] t = {1, 6, 20}> { c = Conv(x, w) r = Reshape(c, t) n = BatchNormalization(r, s, b, m, v) y = Relu(n) }"""
    product = np.einsum("oi,nihw->nohw", w[:, :, 0, 0].astype(np.float64), x).reshape(1, 6, 20)
    normal = (product - mean[:, None]) / np.sqrt(variance.astype(np.float64)[:, None] + 1e-5) * scale[:, None] + bias[:, None]
    agree(text, {"x": x, "w": w, "s": scale, "b": bias, "m": mean, "v": variance}, [np.maximum(normal, 0)])


def test_gemm_in_all_its_forms() -> None:
    a, b = noise(3, 4), noise(4, 5)
    biases = {
        "": None,
        "float c": noise(),
        "float[1] c": noise(1),
        "float[5] c": noise(5),
        "float[3,1] c": noise(3, 1),
        "float[3,5] c": noise(3, 5),
    }
    product = a.astype(np.float64) @ b
    for alpha, beta, transposed_a, transposed_b in ((1.0, 1.0, 0, 0), (0.5, 2.0, 1, 1)):
        feeds: dict[str, np.ndarray] = {"a": a.T.copy() if transposed_a else a, "b": b.T.copy() if transposed_b else b}
        inputs, nodes, outputs, wanted = [f"float[{_written(feeds['a'])}] a", f"float[{_written(feeds['b'])}] b"], [], [], []
        for i, (declared, bias) in enumerate(biases.items()):
            if bias is not None:
                inputs.append(f"{declared}{i}")
                feeds[f"c{i}"] = bias
            operands = f"a, b, c{i}" if bias is not None else "a, b"
            attributes = f"alpha={alpha}, beta={beta}, transA={transposed_a}, transB={transposed_b}"
            nodes.append(f"g{i} = Gemm<{attributes}>({operands}) y{i} = Relu(g{i})")
            outputs.append(f"float[3,5] y{i}")
            wanted.append(np.maximum(alpha * product + (0 if bias is None else beta * bias.astype(np.float64)), 0))
        agree(f"({', '.join(inputs)}) => ({', '.join(outputs)}) {{ {' '.join(nodes)} }}", feeds, wanted)


def _written(array: np.ndarray) -> str:
    return ",".join(map(str, array.shape))


def test_relu_then_a_clip_that_reaches_below_zero() -> None:
    x, w = noise(3, 4), noise(4, 5)
    text = """(float[3,4] x, float[4,5] w) => (float[3,5] y) <float low = {-1}, float high = {1}> {
        p = MatMul(x, w) r = Relu(p) y = Clip(r, low, high) }"""
    agree(text, {"x": x, "w": w}, [np.clip(np.maximum(x.astype(np.float64) @ w, 0), -1, 1)])


def test_clip_with_a_missing_a_nan_and_reversed_bounds() -> None:
    """A NaN bound doesn't bind, as in ONNX Runtime; where the lower is above the upper, all becomes the upper."""
    x, w = noise(3, 4), noise(4, 5)
    text = """(float[3,4] x, float[4,5] w, float none) => (float[3,5] a, float[3,5] b, float[3,5] c)
        <float low = {-0.5}, float high = {0.25}> {
        p = MatMul(x, w) a = Clip(p, , high) b = Clip(p, low) c = Clip(p, high, low) }"""
    product = x.astype(np.float64) @ w
    agree(text, {"x": x, "w": w, "none": np.float32(np.nan)}, [np.minimum(product, 0.25), np.maximum(product, -0.5), np.full((3, 5), -0.5)])


def test_whole_numbers_are_clipped_by_maximum_and_minimum() -> None:
    x = np.arange(-8, 8, dtype=np.int32)
    text = "(int32[16] x) => (int32[16] y) <int32 low = {-3}, int32 high = {5}> { m = Max(x, low) y = Min(m, high) }"
    assert (built(text).run(None, {"x": x})[0] == np.clip(x, -3, 5)).all()


def test_maxima_keep_nan() -> None:
    x = noise(1, 2, 4, 4)
    x[0, 1, 2, 1] = np.nan
    text = """(float[1,2,4,4] x) => (float[1,2,2,2] p, float[1,2,4,4] m, float[1,2,4,4] n, float[1,2] r) <float zero = {0}> {
        p = MaxPool<kernel_shape=[2,2], strides=[2,2]>(x) m = Max(x, zero) n = Max(zero, x) r = ReduceMax<axes=[2,3], keepdims=0>(x) }"""
    maximum = np.maximum(x, np.float32(0))
    pooled = x.reshape(1, 2, 2, 2, 2, 2).max(axis=(3, 5))
    agree(text, {"x": x}, [pooled, maximum, maximum, x.max(axis=(2, 3))])


def test_a_tensor_added_to_itself_after_a_reshape() -> None:
    x, w = noise(6, 4), noise(4, 5)
    text = "(float[6,4] x, float[4,5] w) => (float[2,3,5] y) <int64[3] t = {2, 3, 5}> { p = MatMul(x, w) r = Reshape(p, t) y = Add(r, r) }"
    agree(text, {"x": x, "w": w}, [2 * (x.astype(np.float64) @ w).reshape(2, 3, 5)])


def test_one_element_is_added_to_a_scalar() -> None:
    x = noise(7)
    text = "(float[7] x, float[1] b) => (float[1] y, float z) { d = MatMul(x, x) y = Add(d, b) z = Relu(d) }"
    dot = x.astype(np.float64) @ x
    agree(text, {"x": x, "b": np.array([-2.5], np.float32)}, [np.array([dot - 2.5]), np.array(max(dot, 0))])


def test_a_residual_whose_producer_has_two_users() -> None:
    x, w, v = noise(6, 4), noise(4, 4), noise(4, 4)
    text = """(float[6,4] x, float[4,4] w, float[4,4] v) => (float[6,4] y, float[6,4] z) {
        h = MatMul(x, w) a = Relu(h) p = MatMul(a, v) s = Add(p, h) y = Relu(s) z = Neg(h) }"""
    hidden = x.astype(np.float64) @ w
    agree(text, {"x": x, "w": w, "v": v}, [np.maximum(np.maximum(hidden, 0) @ v + hidden, 0), -hidden])


def test_an_output_that_is_an_intermediate_too() -> None:
    x, w = noise(6, 4), noise(4, 5)
    text = """(float[6,4] x, float[4,5] w) => (float[6,5] p, float[2,3,5] r, float[2,3,5] y) <int64[3] t = {2, 3, 5}> {
        p = MatMul(x, w) r = Reshape(p, t) y = Tanh(r) }"""
    product = x.astype(np.float64) @ w
    agree(text, {"x": x, "w": w}, [product, product.reshape(2, 3, 5), np.tanh(product.reshape(2, 3, 5))])


def test_a_function_called_fused() -> None:
    """TVM's FuseTIR fails on nested tuples in a function of that name; ours may call anything anything."""
    x = noise(2, 6)
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17, "local": 1]> fused (float[2,6] x) => (float[2,3] y) { y = local.fused(x) }
        <domain: "local", opset_import: ["": 17]> fused (x) => (y) { [fused] a, b = Split<axis=1>(x) [main] s = Add(a, b) y = Relu(s) }"""
    )
    for fuse in ("always", "never"):
        (y,) = tvmfuse.build(model, threads=1, fuse=fuse).run(None, {"x": x})
        assert (y == np.maximum(x[:, :3] + x[:, 3:], 0)).all()


@pytest.mark.parametrize("constant", [True, False])
def test_transposed_convolution_with_bias_and_two_groups(constant: bool) -> None:
    x, w, b = noise(1, 4, 3, 3), noise(4, 3, 3, 2), noise(6)
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> g (float[1,4,3,3] x, float[4,3,3,2] w, float[6] b) => (float[1,6,c,d] y) {
        t = ConvTranspose<group=2, strides=[2,1], pads=[1,0,0,1], output_padding=[1,0]>(x, w, b) y = Relu(t) }"""
    )
    feeds = {"x": x, "w": w, "b": b}
    if constant:
        model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in feeds.items() if name != "x")
        del model.graph.input[1:]
        feeds = {"x": x}
    whole = np.zeros((6, 7, 4))
    for group in range(2):
        for i in range(3):
            for j in range(3):
                block = np.einsum("c,cokl->okl", x[0, 2 * group : 2 * group + 2, i, j].astype(np.float64), w[2 * group : 2 * group + 2])
                whole[3 * group : 3 * group + 3, 2 * i : 2 * i + 3, j : j + 2] += block
    padded = np.pad(whole, ((0, 0), (0, 1), (0, 0)))[:, 1:, :-1]
    wanted = np.maximum(padded + b[:, None, None], 0)[None]
    results = [tvmfuse.build(model, threads=1, fuse=fuse).run(None, feeds)[0] for fuse in ("always", "never")]
    assert results[0].tobytes() == results[1].tobytes()
    np.testing.assert_allclose(results[0], wanted, rtol=1e-5, atol=1e-5)


def test_saved_loaded_and_run_twice(tmp_path: Path) -> None:
    x, y = noise(6, 4), noise(7, 4)[:6]
    session = built("(float[6,4] x) => (float[4,6] y) { t = Transpose(x) r = Relu(t) y = Exp(r) }")
    session.save(tmp_path / "m.tvmfuse")
    loaded = tvmfuse.load(tmp_path / "m.tvmfuse")
    for feed in (x, y, x):
        assert loaded.run(None, {"x": feed})[0].tobytes() == session.run(None, {"x": feed})[0].tobytes()


def test_a_model_of_constants_alone() -> None:
    y, n = built("(float[3,4] x) => (int64[2] y, int64 n) { y = Shape(x) n = Size(x) }").run(None, {"x": noise(3, 4)})
    assert y.tolist() == [3, 4] and n == 12


def test_booleans_are_compared() -> None:
    a, b = np.random.default_rng(0).random((2, 4, 16)) < 0.5
    text = "(bool[4,16] a, bool[4,16] b) => (bool[4,16] y, bool[4,16] z) { y = Equal(a, b) z = Not(y) }"
    y, z = built(text).run(None, {"a": a, "b": b})
    assert (y == (a == b)).all() and (z == (a != b)).all()


def test_an_inverted_boolean_beside_one_for_a_whole_row() -> None:
    """Inverted in eight bits, it met one of a single bit: LLVM refused the code."""
    session = built("(bool[5,1] x, bool[8] y) => (bool[5,8] z) { n = Not(y) z = Or(n, x) }")
    x, y = (np.arange(5) % 2 == 0).reshape(5, 1), np.arange(8) % 3 == 0
    assert (session.run(None, {"x": x, "y": y})[0] == (~y | x)).all()


def test_recurrent_weights_may_be_inputs() -> None:
    """As constants they are packed, as inputs they are read in place: the same numbers."""
    for operator, gates in (("GRU", 3), ("LSTM", 4), ("RNN", 1)):
        arrays = {"x": noise(5, 2, 4), "w": noise(2, 3 * gates, 4), "r": noise(2, 3 * gates, 3), "b": noise(2, 6 * gates)}
        node = onnx.helper.make_node(operator, list(arrays), ["y"], hidden_size=3, direction="bidirectional")
        values = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, array.shape) for name, array in arrays.items()]
        output = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, (5, 2, 2, 3))
        opset = [onnx.helper.make_opsetid("", 17)]
        given = onnx.helper.make_model(onnx.helper.make_graph([node], "g", values, [output]), opset_imports=opset, ir_version=8)
        weights = [onnx.numpy_helper.from_array(array, name) for name, array in arrays.items() if name != "x"]
        fixed = onnx.helper.make_model(
            onnx.helper.make_graph([node], "g", values[:1], [output], weights), opset_imports=opset, ir_version=8
        )
        (one,) = tvmfuse.build(given, threads=1).run(None, arrays)
        (other,) = tvmfuse.build(fixed, threads=1).run(None, {"x": arrays["x"]})
        (reference,) = onnx.reference.ReferenceEvaluator(fixed).run(None, {"x": arrays["x"]})
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
        np.testing.assert_allclose(one, reference, rtol=0, atol=1e-5)
