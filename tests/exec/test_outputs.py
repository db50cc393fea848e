"""Results are written where the caller wants them, whatever they are to the graph."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import tvmfuse
from tvmfuse.errors import UsageError


def run(nodes: list[onnx.NodeProto], outputs: dict[str, tuple[int, list[int]]], x: np.ndarray) -> list[np.ndarray]:
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, list(x.shape))]
    results = [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in outputs.items()]
    model = helper.make_model(helper.make_graph(nodes, "g", inputs, results), opset_imports=[helper.make_opsetid("", 17)])
    session = tvmfuse.build(model, threads=1)
    buffers = {name: np.empty(shape, helper.tensor_dtype_to_np_dtype(kind)) for name, (kind, shape) in outputs.items()}
    session.bind({"x": x}, buffers)()
    got = session.run(None, {"x": x})
    for array, bound in zip(got, buffers.values(), strict=True):
        assert array.tobytes() == bound.tobytes()
        assert not np.shares_memory(array, x)
    return got


@pytest.fixture
def x() -> np.ndarray:
    return np.arange(12, dtype=np.float32).reshape(3, 4) - 5


def test_an_input_returned_is_a_copy(x: np.ndarray) -> None:
    (y,) = run([helper.make_node("Identity", ["x"], ["y"])], {"y": (TensorProto.FLOAT, [3, 4])}, x)
    assert (y == x).all()


def test_a_reshape_returned_is_a_copy(x: np.ndarray) -> None:
    y = run([helper.make_node("Flatten", ["x"], ["y"], axis=0)], {"y": (TensorProto.FLOAT, [1, 12])}, x)[0]
    assert (y == x.reshape(1, 12)).all()


def test_one_value_returned_twice(x: np.ndarray) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Identity", ["y"], ["z"])]
    y, z = run(nodes, {"y": (TensorProto.FLOAT, [3, 4]), "z": (TensorProto.FLOAT, [3, 4])}, x)
    assert (y == np.maximum(x, 0)).all() and (z == y).all()


def test_fields_of_a_tuple(x: np.ndarray) -> None:
    y, z = run(
        [helper.make_node("Split", ["x"], ["y", "z"], axis=1)], {"y": (TensorProto.FLOAT, [3, 2]), "z": (TensorProto.FLOAT, [3, 2])}, x
    )
    assert (y == x[:, :2]).all() and (z == x[:, 2:]).all()


def test_results_that_overlap_are_refused_by_bind(x: np.ndarray) -> None:
    text = '<ir_version: 8, opset_import: ["": 17]> g (float[3, 4] x) => (float[3, 4] y, float[3, 4] z) { y = Relu(x) z = Neg(x) }'
    session, both = tvmfuse.build(onnx.parser.parse_model(text), threads=1), np.empty(13, np.float32)
    with pytest.raises(UsageError, match="output 'z' can't be bound: its buffer overlaps that of 'y'"):
        session.bind({"x": x}, {"y": both[:12].reshape(3, 4), "z": both[1:].reshape(3, 4)})


def test_a_result_that_is_read_further_on(x: np.ndarray) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Softmax", ["y"], ["s"]), helper.make_node("Neg", ["s"], ["z"])]
    y, z = run(nodes, {"y": (TensorProto.FLOAT, [3, 4]), "z": (TensorProto.FLOAT, [3, 4])}, x)
    assert (y == np.maximum(x, 0)).all()
    e = np.exp(y - y.max(1, keepdims=True))
    np.testing.assert_allclose(z, -e / e.sum(1, keepdims=True), rtol=1e-6)


def test_results_of_other_types(x: np.ndarray) -> None:
    nodes = [helper.make_node("Cast", ["x"], ["y"], to=TensorProto.INT64), helper.make_node("Less", ["x", "x"], ["z"])]
    y, z = run(nodes, {"y": (TensorProto.INT64, [3, 4]), "z": (TensorProto.BOOL, [3, 4])}, x)
    assert (y == x.astype(np.int64)).all() and not z.any()
