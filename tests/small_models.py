"""Models of one layer and of two, from which tests of tuning, its gate and its devices start."""

from __future__ import annotations

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper


def one_layer() -> ModelProto:
    """relu(x @ w + b)."""
    nodes = [helper.make_node("Gemm", ["x", "w", "b"], ["p"]), helper.make_node("Relu", ["p"], ["y"])]
    return _model(nodes, [8, 32], [8, 48], {"w": (32, 48), "b": (48,)})


def two_layers() -> ModelProto:
    """tanh(x @ w + b), and a second layer."""
    nodes = [
        helper.make_node("Gemm", ["x", "w", "b"], ["p"], name="first"),
        helper.make_node("Tanh", ["p"], ["t"]),
        helper.make_node("Gemm", ["t", "v", "c"], ["q"], name="second"),
        helper.make_node("Relu", ["q"], ["y"]),
    ]
    return _model(nodes, [40, 64], [40, 32], {"w": (64, 48), "b": (48,), "v": (48, 32), "c": (32,)})


def _model(nodes: list, before: list[int], after: list[int], shapes: dict[str, tuple[int, ...]]) -> ModelProto:
    rng = np.random.default_rng(0)
    weights = [numpy_helper.from_array(rng.standard_normal(shape, np.float32), name) for name, shape in shapes.items()]
    x, y = helper.make_tensor_value_info("x", TensorProto.FLOAT, before), helper.make_tensor_value_info("y", TensorProto.FLOAT, after)
    return helper.make_model(helper.make_graph(nodes, "g", [x], [y], weights), opset_imports=[helper.make_opsetid("", 17)])
