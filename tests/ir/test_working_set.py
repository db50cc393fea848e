"""How many bytes a model touches between two runs of a site."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from tvmfuse.building import prepare
from tvmfuse.tuning import working_set


def test_weights_add_up_and_activations_take_turns() -> None:
    weights = [numpy_helper.from_array(np.ones(shape, np.float32), name) for name, shape in (("v", (64, 16)), ("w", (16, 32)))]
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "v"], ["a"]), helper.make_node("MatMul", ["a", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (100, 64))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (100, 32))],
        weights,
    )
    prepared = prepare(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))
    assert working_set(prepared) == 4 * (64 * 16 + 16 * 32) + 4 * (100 * 64 + 100 * 16)
