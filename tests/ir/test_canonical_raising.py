"""RaiseTensorIR on what the ONNX importer emits, and on functions that only look like it."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper
from tvm import relax, te, topi
from tvm.relax.frontend.onnx import from_onnx

from tvmfuse.graph.canonical import canonical
from tvmfuse.graph.raising import RaiseTensorIR
from tvmfuse.graph.rewrite import op_name


def imported(node: onnx.NodeProto, shapes: dict[str, tuple[int, ...]], constants: dict[str, np.ndarray], opset: int) -> tvm.IRModule:
    def info(name: str, shape: tuple[int, ...] | None) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

    tensors = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph([node], "graph", [info(*item) for item in shapes.items()], [info("y", None)], tensors)
    return from_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)]))


def calls(mod: tvm.IRModule) -> list[tvm.ir.Call]:
    return [binding.value for binding in mod["main"].body.blocks[0].bindings if op_name(binding.value)]


BOUNDS = {"low": np.float32(0), "high": np.float32(6)}


@pytest.mark.parametrize(
    ("node", "constants", "opset"),
    [
        (helper.make_node("Clip", ["x"], ["y"], min=0.0, max=6.0), {}, 6),
        (helper.make_node("Clip", ["x", "low", "high"], ["y"]), BOUNDS, 11),
        (helper.make_node("Clip", ["x", "low", "high"], ["y"]), BOUNDS, 13),
    ],
)
def test_clip_of_every_opset_is_clip(node: onnx.NodeProto, constants: dict[str, np.ndarray], opset: int) -> None:
    (call,) = calls(canonical()(imported(node, {"x": (2, 3)}, constants, opset)))
    assert op_name(call) == "clip"
    assert [bound.value for bound in call.args[1:]] == [0.0, 6.0]


def test_a_nan_bound_is_no_bound() -> None:
    node = helper.make_node("Clip", ["x", "low", "high"], ["y"])
    (call,) = calls(canonical()(imported(node, {"x": (2,)}, {"low": np.float32(np.nan), "high": np.float32(6)}, 13)))
    assert op_name(call) == "minimum"


@pytest.mark.parametrize(
    ("equation", "shapes", "raised"),
    [
        ("btgi,gih->btgh", ((2, 3, 4, 5), (4, 5, 6)), "abce,ced->abcd"),
        ("i,j->ij", ((2,), (3,)), "a,b->ab"),
        ("iij->j", ((2, 2, 3),), "bba->a"),
        ("ij,jk,kl->il", ((2, 3), (3, 4), (4, 5)), "ac,cd,db->ab"),
    ],
)
def test_einsum_is_einsum(equation: str, shapes: tuple[tuple[int, ...], ...], raised: str) -> None:
    inputs = dict(zip("abc", shapes, strict=False))
    mod = imported(helper.make_node("Einsum", list(inputs), ["y"], equation=equation), inputs, {}, 12)
    (call,) = calls(RaiseTensorIR()(mod))
    assert op_name(call) == "einsum"
    assert sorted(call.attrs.subscripts) == sorted(raised)
    assert call.attrs.subscripts.count(",") == len(shapes) - 1


@pytest.mark.parametrize("widths", [(0, 0, 1, 2, 0, 0, 3, 4), (0, 1, -1, 0, 0, 0, 2, -2), (0, 0, 0, 0, 0, 0, 0, 5)])
def test_constant_padding_is_pad(widths: tuple[int, ...]) -> None:
    node = helper.make_node("Pad", ["x", "widths", "value"], ["y"])
    mod = imported(node, {"x": (1, 2, 6, 6)}, {"widths": np.array(widths, "int64"), "value": np.float32(1.5)}, 13)
    (call,) = calls(RaiseTensorIR()(mod))
    assert op_name(call) == "nn.pad"
    assert [int(width) for width in call.attrs.pad_width] == [widths[side * 4 + axis] for axis in range(4) for side in (0, 1)]
    assert float(call.attrs.pad_value) == 1.5


def test_other_padding_keeps_its_tensor_ir() -> None:
    node = helper.make_node("Pad", ["x", "widths"], ["y"], mode="reflect")
    mod = imported(node, {"x": (1, 1, 4, 4)}, {"widths": np.array([0, 0, 1, 1, 0, 0, 1, 1], "int64")}, 13)
    assert [op_name(call) for call in calls(RaiseTensorIR()(mod))] == ["call_tir"]


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: te.compute(x.shape, lambda i, j: te.max(x[j, i], tvm.tirx.const(0.0, "float32"))),
        lambda x: te.compute(x.shape, lambda i, j: x[i, j] + tvm.tirx.const(1.0, "float32"), name="T_maximum"),
        lambda x: te.compute(x.shape, lambda i, j: te.max(x[i, j] * x[i, j], tvm.tirx.const(0.0, "float32"))),
        lambda x: topi.sum(x * x + x, axis=0),
    ],
    ids=["transposed", "named like one", "of an expression", "no product"],
)
def test_a_function_that_computes_something_else_stays(compute: object) -> None:
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType((2, 2), "float32"))
    with builder.function("main", [x], private=True):
        with builder.dataflow():
            y = builder.emit_output(builder.call_te(compute, x))
        builder.emit_func_output(y)
    mod = builder.get()
    tvm.ir.assert_structural_equal(RaiseTensorIR()(mod)["main"], mod["main"])
