"""GRU and LSTM, in every variant that is taken, compute what ONNX Runtime computes; the others are refused with the reason."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from tests.exec.against_onnxruntime import assert_matches, random_feeds, run
from tvmfuse.errors import UnsupportedError
from tvmfuse.model.load import load
from tvmfuse.values import Recurrent

STEPS, BATCH, INPUT, HIDDEN = 3, 2, 4, 5
GATES = {"GRU": 3, "LSTM": 4}


def recurrent(operator, outputs=("Y", "Y_h", "Y_c"), bias=True, initial=None, lengths=None, peepholes=None, **attrs):
    """A model of one node. initial: None, "constant" or "input"."""
    rng = np.random.default_rng(1)
    rows, ways = GATES[operator] * HIDDEN, 2 if attrs.get("direction") == "bidirectional" else 1
    batch_first = attrs.get("layout", 0)
    state = (BATCH, ways, HIDDEN) if batch_first else (ways, BATCH, HIDDEN)
    weights = {"W": (ways, rows, INPUT), "R": (ways, rows, HIDDEN)} | ({"B": (ways, 2 * rows)} if bias else {})
    arrays = {name: rng.standard_normal(shape).astype("float32") for name, shape in weights.items()}
    inputs = [helper.make_tensor_value_info("X", TensorProto.FLOAT, (BATCH, STEPS, INPUT) if batch_first else (STEPS, BATCH, INPUT))]
    names = ["X", "W", "R", "B" if bias else "", ""]
    if lengths is not None:
        arrays["lengths"] = np.array(lengths, np.int32)
        names[4] = "lengths"
    for name in ("h0", "c0")[: 2 if operator == "LSTM" else 1]:
        names.append(name if initial else "")
        if initial == "constant":
            arrays[name] = rng.standard_normal(state).astype("float32")
        elif initial == "input":
            inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, state))
    if peepholes is not None:
        arrays["P"] = np.full((ways, 3 * HIDDEN), peepholes, np.float32)
        names.append("P")
    kept = [name for name in outputs if operator == "LSTM" or name != "Y_c"]
    ranks = {"Y": 4, "Y_h": 3, "Y_c": 3}
    node = helper.make_node(operator, names, kept, name="/enc/rnn", hidden_size=HIDDEN, **attrs)
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * ranks[name]) for name in kept if name]
    constants = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    graph = helper.make_graph([node], "g", inputs, results, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)


VARIANTS = [
    {},
    {"direction": "reverse"},
    {"direction": "bidirectional"},
    {"direction": "bidirectional", "initial": "constant"},
    {"direction": "bidirectional", "initial": "input"},
    {"direction": "reverse", "initial": "input"},
    {"bias": False},
    {"initial": "constant", "bias": False},
    {"lengths": [STEPS] * BATCH},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("linear_before_reset", [0, 1])
def test_gru(variant, linear_before_reset):
    assert_matches(recurrent("GRU", linear_before_reset=linear_before_reset, **variant))


@pytest.mark.parametrize("variant", [*VARIANTS, {"peepholes": 0.0}], ids=str)
def test_lstm(variant):
    assert_matches(recurrent("LSTM", **variant))


@pytest.mark.parametrize("outputs", [("Y",), ("", "Y_h"), ("", "", "Y_c"), ("Y", "", "Y_c")], ids=str)
@pytest.mark.parametrize("operator", ["GRU", "LSTM"])
def test_any_output_may_be_unused(operator, outputs):
    if operator == "LSTM" or outputs[:2] != ("", ""):
        assert_matches(recurrent(operator, outputs))


@pytest.mark.parametrize("operator", ["GRU", "LSTM"])
def test_batch_first_is_the_same_network_transposed(operator):
    """ONNX Runtime has no layout 1, and ONNX's reference only one step of it: compare with layout 0."""
    steps_first, batch_first = recurrent(operator, initial="constant"), recurrent(operator, initial="constant", layout=1)
    for tensor in batch_first.graph.initializer:
        if tensor.name in ("h0", "c0"):
            source = next(other for other in steps_first.graph.initializer if other.name == tensor.name)
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(source).swapaxes(0, 1), tensor.name))
    loaded = load(steps_first)
    feeds = random_feeds(loaded)
    wanted = run(loaded, feeds)
    got = run(load(batch_first), {"X": feeds["X"].swapaxes(0, 1).copy()})
    np.testing.assert_array_equal(got[0], wanted[0].transpose(2, 0, 1, 3))
    for state, want in zip(got[1:], wanted[1:], strict=True):
        np.testing.assert_array_equal(state, want.swapaxes(0, 1))


def test_the_reference_agrees_too():
    model = recurrent("GRU", linear_before_reset=1)
    loaded = load(model)
    feeds = random_feeds(loaded)
    for got, want in zip(run(loaded, feeds), ReferenceEvaluator(model).run(None, feeds), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("operator", "states"), [("GRU", 1), ("LSTM", 2)])
def test_each_direction_is_a_matmul_and_a_marked_function(operator, states):
    loaded = load(recurrent(operator, direction="bidirectional"))
    anchors = [
        Recurrent(**json.loads(func.attrs["tvmfuse.recurrent"]))
        for func in loaded.mod.functions.values()
        if isinstance(func, tvm.tirx.PrimFunc)
    ]
    forward = Recurrent(operator.lower(), STEPS, BATCH, HIDDEN, linear_before_reset=False)
    assert sorted(anchors, key=lambda anchor: anchor.reverse) == [forward, Recurrent(operator.lower(), STEPS, BATCH, HIDDEN, True, False)]
    calls = [binding.value for binding in loaded.mod["main"].body.blocks[0].bindings if isinstance(binding.value, tvm.ir.Call)]
    projections = [call for call in calls if call.op.name == "relax.matmul"]
    assert [tuple(map(int, call.ty.shape)) for call in projections] == [(STEPS, BATCH, GATES[operator] * HIDDEN)] * 2
    walks = [call for call in calls if call.op.name == "relax.call_tir"]
    assert [tuple(tuple(map(int, arg.ty.shape)) for arg in call.args[1].fields) for call in walks] == [forward.input_shapes()] * 2
    assert all(len(call.ty.fields) == 1 + states for call in walks)


def test_equal_layers_share_one_function():
    model = recurrent("GRU", linear_before_reset=1)
    again = onnx.NodeProto()
    again.CopyFrom(model.graph.node[0])
    again.name = "/dec/rnn"
    again.output[:] = ["Y2", "Y_h2"]
    model.graph.node.append(again)
    model.graph.output.append(helper.make_tensor_value_info("Y2", TensorProto.FLOAT, [None] * 4))
    loaded = load(model)
    assert sum(isinstance(func, tvm.tirx.PrimFunc) for func in loaded.mod.functions.values()) == 1


def test_bindings_are_called_as_the_node():
    loaded = load(recurrent("GRU", direction="bidirectional"))
    names = [binding.var.name for binding in loaded.mod["main"].body.blocks[0].bindings]
    assert {"/enc/rnn/forward", "/enc/rnn/forward/walk", "/enc/rnn/backward", "/enc/rnn/backward/walk"} <= set(names)


@pytest.mark.parametrize(
    ("operator", "variant", "reason"),
    [
        ("GRU", {"activations": ["Sigmoid", "Relu"]}, "activations sigmoid, relu instead of the default"),
        ("GRU", {"clip": 2.0}, "clip=2"),
        ("LSTM", {"input_forget": 1}, "input_forget=1"),
        ("LSTM", {"initial": "constant", "peepholes": 0.5}, "peephole weights that aren't zero"),
        ("GRU", {"lengths": [STEPS, STEPS - 1]}, f"sequence_lens isn't constant at the full length {STEPS}"),
    ],
)
def test_other_variants_are_refused(operator, variant, reason):
    with pytest.raises(UnsupportedError, match=f"{operator}: {reason}"):
        load(recurrent(operator, **variant))


def test_default_activations_may_be_written_out():
    load(recurrent("LSTM", activations=["sigmoid", "Tanh", "tanh"]))
