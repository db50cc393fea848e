"""Models that once failed, each the smallest of its kind, with their right values."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest
import scipy.special

import tvmfuse


def built(text: str, opset: int = 17) -> tvmfuse.Session:
    return tvmfuse.build(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]> g {text}'), threads=1)


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
