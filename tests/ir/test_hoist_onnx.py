"""Activations as TVM's ONNX importer writes them, as one op or as a small DAG, cross a reshape whole."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tvm.relax.frontend.onnx import from_onnx

from tvmfuse.graph.hoist import HoistEpilogue, refusals


def reshaped_matmul_then(op, attrs, operands, opset):
    constants = {f"c{at}": np.asarray(value, "float32") for at, value in enumerate(operands)}
    tensors = {"w": np.ones((4, 6), "float32"), "shape": np.array([1, 4, 2, 3]), **constants}
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["t"]),
            helper.make_node("Reshape", ["t", "shape"], ["r"]),
            helper.make_node(op, ["r", *constants], ["y"], **attrs),
        ],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4, 2, 3])],
        [numpy_helper.from_array(value, name) for name, value in tensors.items()],
    )
    return from_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8))


@pytest.mark.parametrize(
    ("op", "attrs", "operands", "opset", "steps"),
    [
        ("Relu", {}, [], 14, ["nn.relu"]),
        ("LeakyRelu", {}, [], 16, ["nn.leakyrelu"]),
        ("Gelu", {}, [], 20, ["nn.gelu"]),
        ("Gelu", {"approximate": "tanh"}, [], 20, ["nn.gelu_tanh"]),
        ("HardSwish", {}, [], 14, ["add", "clip", "divide", "multiply"]),
        ("HardSigmoid", {}, [], 14, ["multiply", "add", "clip"]),
        ("Mish", {}, [], 18, ["exp", "add", "log", "tanh", "multiply"]),
        ("Elu", {}, [], 14, ["exp", "subtract", "nn.relu", "multiply", "nn.relu", "add"]),
        ("Selu", {}, [], 14, ["exp", "subtract", "nn.relu", "multiply", "nn.relu", "add", "multiply"]),
        ("Softplus", {}, [], 14, ["maximum", "abs", "negative", "exp", "add", "log", "add"]),
        ("Softsign", {}, [], 14, ["abs", "add", "divide"]),
        ("ThresholdedRelu", {}, [], 14, ["greater", "astype", "multiply"]),
        ("Pow", {}, [2.0], 13, ["power"]),
        ("PRelu", {}, [[0.5]], 16, ["nn.prelu"]),
        ("PRelu", {}, [np.ones((4, 1, 1))], 16, ["nn.prelu"]),
        ("PRelu", {}, [np.ones((4, 2, 3))], 16, ["less", "multiply", "where"]),
        ("Cast", {"to": TensorProto.DOUBLE}, [], 13, ["astype"]),
    ],
)
def test_crosses_a_reshape_whole(op, attrs, operands, opset, steps):
    mod = reshaped_matmul_then(op, attrs, operands, opset)
    after = HoistEpilogue()(mod)["main"].body.blocks[0].bindings
    assert [binding.value.op.name.removeprefix("relax.") for binding in after] == ["matmul", *steps, "reshape"]
    assert refusals(mod) == []


def test_the_importer_is_told_the_opset():
    """Guards the parameters above: an opset that is too old would silently select another converter."""
    assert onnx.defs.onnx_opset_version() >= 20
