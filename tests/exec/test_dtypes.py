"""float16 and float64 models are right: float16 computes in float32 and rounds each op's result once."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.reference
import onnxruntime
import pytest
from onnx import TensorProto, helper

import tvmfuse


def network(kind: int) -> onnx.ModelProto:
    """Convolution, bias, relu, pointwise convolution, residual, pooling, linear layer, softmax."""
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    rng = np.random.default_rng(0)
    shapes = {"w1": (24, 3, 3, 3), "b1": (24,), "w2": (24, 24, 1, 1), "b2": (24,), "w3": (24, 10), "b3": (10,)}
    weights = [onnx.numpy_helper.from_array((0.3 * rng.standard_normal(shape)).astype(dtype), name) for name, shape in shapes.items()]
    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["c1"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c1"], ["r1"]),
        helper.make_node("Conv", ["r1", "w2", "b2"], ["c2"]),
        helper.make_node("Add", ["c2", "r1"], ["s"]),
        helper.make_node("Tanh", ["s"], ["t"]),
        helper.make_node("GlobalAveragePool", ["t"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("Gemm", ["f", "w3", "b3"], ["g"]),
        helper.make_node("Softmax", ["g"], ["y"]),
    ]
    x, y = helper.make_tensor_value_info("x", kind, [1, 3, 9, 11]), helper.make_tensor_value_info("y", kind, [1, 10])
    return helper.make_model(helper.make_graph(nodes, "g", [x], [y], weights), opset_imports=[helper.make_opsetid("", 17)])


@pytest.mark.parametrize(("kind", "tolerance"), [(TensorProto.FLOAT16, 4e-3), (TensorProto.FLOAT, 1e-6), (TensorProto.DOUBLE, 1e-13)])
def test_values_are_right_and_every_placement_gives_the_same_bits(kind: int, tolerance: float) -> None:
    model = network(kind)
    x = np.random.default_rng(1).standard_normal((1, 3, 9, 11)).astype(helper.tensor_dtype_to_np_dtype(kind))
    if kind == TensorProto.DOUBLE:  # ONNX Runtime has no float64 convolution
        (expected,) = onnx.reference.ReferenceEvaluator(model).run(None, {"x": x})
    else:
        (expected,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    found = [tvmfuse.build(model, fuse=fuse, threads=threads).run(None, {"x": x})[0] for fuse in ("always", "never") for threads in (1, 2)]
    assert len({y.tobytes() for y in found}) == 1
    assert found[0].dtype == expected.dtype
    assert float(np.abs(found[0].astype(np.float64) - expected).max()) <= tolerance


def test_half_precision_rounds_each_op_once() -> None:
    """x @ w + b in float32, rounded to float16 after the product and after the sum; a sum kept in float32 differs."""
    rng = np.random.default_rng(0)
    x, w, b = (rng.standard_normal(shape).astype(np.float16) for shape in ((5, 64), (64, 20), (20,)))
    weights = [onnx.numpy_helper.from_array(w, "w"), onnx.numpy_helper.from_array(b, "b")]
    nodes = [helper.make_node("MatMul", ["x", "w"], ["p"]), helper.make_node("Add", ["p", "b"], ["y"])]
    inputs, outputs = (helper.make_tensor_value_info(n, TensorProto.FLOAT16, s) for n, s in (("x", [5, 64]), ("y", [5, 20])))
    model = helper.make_model(helper.make_graph(nodes, "g", [inputs], [outputs], weights), opset_imports=[helper.make_opsetid("", 17)])
    accumulator = np.zeros((5, 20), np.float32)
    for k in range(64):  # ascending k, each step one fma: exact in float64, since the factors have 11 bits
        accumulator = np.float32(np.float64(accumulator) + np.float64(x[:, k : k + 1]) * np.float64(w[k]))
    product = accumulator.astype(np.float16)
    expected = (product.astype(np.float32) + b.astype(np.float32)).astype(np.float16)
    for fuse in ("always", "never"):
        assert tvmfuse.build(model, fuse=fuse, threads=1).run(None, {"x": x})[0].tobytes() == expected.tobytes()


@pytest.mark.parametrize("kind", ["INT4", "UINT4", "INT2", "FLOAT8E4M3FN", "BFLOAT16"])
def test_weights_stored_in_few_bits_are_widened(kind: str) -> None:
    number = getattr(TensorProto, kind)
    stored = np.random.default_rng(0).integers(0 if kind[0] == "U" else -2, 2, (6, 5)).astype(helper.tensor_dtype_to_np_dtype(number))
    scale = np.array([[0.25] * 5, [3.0] * 5], np.float32)
    weights = [onnx.numpy_helper.from_array(stored, "w"), onnx.numpy_helper.from_array(scale, "s")]
    if kind == "BFLOAT16":
        nodes, wide = [helper.make_node("Cast", ["w"], ["d"], to=TensorProto.FLOAT)], stored.astype(np.float32)
    else:
        nodes = [helper.make_node("DequantizeLinear", ["w", "s"], ["d"], axis=0, block_size=3)]
        wide = stored.astype(np.float32) * np.repeat(scale, 3, 0)
    nodes.append(helper.make_node("MatMul", ["x", "d"], ["y"]))
    inputs, outputs = (helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", [6, 6]), ("y", [6, 5])))
    opset = helper.make_opsetid("", 25)
    model = helper.make_model(helper.make_graph(nodes, "g", [inputs], [outputs], weights[: len(nodes[0].input)]), opset_imports=[opset])
    session = tvmfuse.build(model, threads=1)
    assert session.kernel_count == 1
    np.testing.assert_array_equal(session.run(None, {"x": np.eye(6, dtype=np.float32)})[0], wide)


def test_softplus_in_double_precision_keeps_small_results_in_an_epilogue() -> None:
    random = np.random.default_rng(0)
    x, w = random.standard_normal((7, 20)) * 6, random.standard_normal((20, 19))
    nodes = [helper.make_node("MatMul", ["x", "w"], ["p"]), helper.make_node("Softplus", ["p"], ["y"])]
    inputs, outputs = (helper.make_tensor_value_info(n, TensorProto.DOUBLE, s) for n, s in (("x", [7, 20]), ("y", [7, 19])))
    graph = helper.make_graph(nodes, "g", [inputs], [outputs], [onnx.numpy_helper.from_array(w, "w")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    found = [tvmfuse.build(model, fuse=fuse, threads=1).run(None, {"x": x})[0] for fuse in ("always", "never")]
    np.testing.assert_allclose(found[0], np.logaddexp(0.0, x @ w), rtol=1e-12)
    assert found[0].tobytes() == found[1].tobytes()
