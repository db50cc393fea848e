"""The canonical form and the NHWC layout compute what the model computes: stock TVM runs both."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
from tvm import relax, topi

from tvmfuse.graph.canonical import canonical
from tvmfuse.graph.layout import ChannelsLast
from tvmfuse.graph.pointwise import PointwiseToMatmul
from tvmfuse.graph.simplify import Simplify

PIPELINE = tvm.transform.Sequential([canonical(), ChannelsLast(), PointwiseToMatmul(), Simplify(), relax.transform.CanonicalizeBindings()])
Body = Callable[[relax.BlockBuilder, relax.Var], relax.Expr]


def module(shape: tuple[int, ...], body: Body, dtype: str = "float32") -> tvm.IRModule:
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType(shape, dtype))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit_output(body(builder, x))
        builder.emit_func_output(y)
    return builder.get()


def transposed_in_nchw(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Stock TVM has conv2d_transpose in NCHW alone."""
    attrs = call.attrs
    if attrs.data_layout == "NCHW":
        return relax.transform.legalize_ops.nn._nn_conv2d_transpose(builder, call)

    def compute(data: tvm.te.Tensor, kernel: tvm.te.Tensor) -> tvm.te.Tensor:
        data, kernel = topi.transpose(data, (0, 3, 1, 2)), topi.transpose(kernel, (0, 3, 1, 2))
        widths = [[int(width) for width in getattr(attrs, name)] for name in ("strides", "padding", "output_padding")]
        image = topi.nn.group_conv2d_transpose_nchw(data, kernel, *widths[:2], "float32", widths[2], int(attrs.groups))
        return topi.transpose(image, (0, 2, 3, 1))

    return builder.call_te(compute, *call.args)


def run(mod: tvm.IRModule, x: np.ndarray) -> np.ndarray:
    mod = relax.transform.LegalizeOps({"relax.nn.conv2d_transpose": transposed_in_nchw})(mod)
    vm = relax.VirtualMachine(tvm.compile(mod, tvm.target.Target({"kind": "llvm", "opt-level": 0})), tvm.cpu())
    return vm["main"](tvm.runtime.tensor(x)).numpy()


def assert_same_values(mod: tvm.IRModule, tolerance: float = 1e-5) -> None:
    (x,) = mod["main"].params
    data = values([int(extent) for extent in x.ty.shape], 0).astype(str(x.ty.dtype))
    expected, actual = run(mod, data), run(PIPELINE(mod), data)
    assert (expected.shape, expected.dtype) == (actual.shape, actual.dtype)
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def values(shape: list[int] | tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


def c(shape: tuple[int, ...], seed: int, dtype: str = "float32") -> relax.Expr:
    return relax.const(values(shape, seed).astype(dtype))


def positive(size: int, seed: int) -> relax.Expr:
    return relax.const(np.abs(values((size,), seed)) + np.float32(0.1))


def normalised(builder: relax.BlockBuilder, x: relax.Expr, channels: int) -> relax.Expr:
    gamma, beta, mean = (c((channels,), seed) for seed in (91, 92, 93))
    norm = relax.op.nn.batch_norm(x, gamma, beta, mean, positive(channels, 94), axis=1, training=False)
    return builder.emit(relax.TupleGetItem(builder.emit(norm), 0))


def biased(builder: relax.BlockBuilder, x: relax.Expr, channels: int, axes: int = 2) -> relax.Expr:
    return builder.emit(relax.op.add(builder.emit(x), c((1, channels, *(1,) * axes), 95)))


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_convolution_with_bias_and_batch_norm(groups: int) -> None:
    def body(builder, x):
        convolution = relax.op.nn.conv2d(x, c((8, 4 // groups, 3, 2), 1), strides=(2, 1), padding=(1, 0, 2, 1), groups=groups)
        return relax.op.nn.relu(normalised(builder, biased(builder, convolution, 8), 8))

    assert_same_values(module((2, 4, 7, 6), body))


@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_convolution_with_batch_norm(groups: int) -> None:
    def body(builder, x):
        weights = c((4, 6 // groups, 3, 2), 1)
        convolution = relax.op.nn.conv2d_transpose(x, weights, strides=(2, 1), padding=(1, 0, 1, 1), output_padding=(1, 0), groups=groups)
        return relax.op.nn.relu(normalised(builder, biased(builder, convolution, 6), 6))

    assert_same_values(module((1, 4, 5, 6), body))


def test_one_dimensional_convolutions() -> None:
    def body(builder, x):
        a = biased(builder, relax.op.nn.conv1d(x, c((6, 4, 3), 1), strides=2, padding=(2, 1), dilation=2), 6, axes=1)
        b = relax.op.nn.conv1d_transpose(a, c((6, 2, 3), 2), strides=2, padding=(1, 1), output_padding=1, groups=2)
        return biased(builder, b, 4, axes=1)

    assert_same_values(module((2, 4, 11), body))


def test_batch_norms_in_a_row_behind_a_concat() -> None:
    def body(builder, x):
        both = builder.emit(relax.op.concat([x, builder.emit(relax.op.nn.relu(x))], axis=1))
        scaled = builder.emit(relax.op.multiply(normalised(builder, both, 4), c((4, 1, 1), 5)))
        return relax.op.nn.relu(builder.emit(relax.op.add(scaled, c((4, 1, 1), 6))))

    assert_same_values(module((1, 2, 3, 3), body))


@pytest.mark.parametrize(
    ("subscripts", "shapes"),
    [
        ("btgi,gih->btgh", ((2, 3, 4, 5), (4, 5, 6))),
        ("gih,btgi->btgh", ((4, 5, 6), (2, 3, 4, 5))),
        ("abc,cbd->db", ((2, 3, 4), (4, 3, 5))),
        ("ab,cd->dbca", ((2, 3), (4, 5))),
        ("abcd,dcab->", ((2, 3, 4, 5), (5, 4, 2, 3))),
        ("ijk,kjl", ((2, 3, 4), (4, 3, 5))),
        ("xayb,bzya->zyx", ((2, 3, 4, 5), (5, 6, 4, 3))),
        ("i,i->i", ((4,), (4,))),
    ],
)
@pytest.mark.parametrize("constant", [0, 1])
def test_einsum_is_numpys(subscripts: str, shapes: tuple[tuple[int, ...], ...], constant: int) -> None:
    arrays = [values(shape, seed) for seed, shape in enumerate(shapes)]

    def body(builder, x):
        operands = [x, x]
        operands[constant] = relax.const(arrays[constant])
        return relax.op.einsum(operands, subscripts)

    mod = PIPELINE(module(shapes[1 - constant], body))
    np.testing.assert_allclose(run(mod, arrays[1 - constant]), np.einsum(subscripts, *arrays), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("a", "b"), [((2, 3, 4), (4, 5)), ((3, 4), (2, 4, 5)), ((2, 1, 3, 4), (6, 4, 5)), ((4,), (2, 4, 5)), ((2, 3, 4), (4,)), ((4,), (4,))]
)
def test_matmul_of_every_rank_is_numpys(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    mod = PIPELINE(module(a, lambda builder, x: relax.op.matmul(x, c(b, 1))))
    np.testing.assert_allclose(run(mod, values(a, 0)), np.matmul(values(a, 0), values(b, 1)), rtol=1e-5, atol=1e-5)


def test_a_channel_shuffle_between_grouped_convolutions() -> None:
    def body(builder, x):
        a = builder.emit(relax.op.nn.conv2d(x, c((6, 2, 1, 1), 1), groups=2))
        split = builder.emit(relax.op.reshape(a, (1, 2, 3, 4, 5)))
        shuffled = builder.emit(relax.op.reshape(builder.emit(relax.op.permute_dims(split, [0, 2, 1, 3, 4])), (1, 6, 4, 5)))
        b = builder.emit(relax.op.nn.conv2d(shuffled, c((6, 1, 3, 3), 2), padding=1, groups=6))
        halves = builder.emit(relax.op.split(b, 2, axis=1))
        return relax.op.concat([builder.emit(relax.TupleGetItem(halves, 1)), builder.emit(relax.TupleGetItem(halves, 0))], axis=1)

    assert_same_values(module((1, 4, 4, 5), body))


def test_attention_over_pixels_and_a_gate_over_channels() -> None:
    def body(builder, x):
        image = builder.emit(relax.op.nn.conv2d(x, c((4, 3, 3, 3), 1), padding=1))
        gate = builder.emit(relax.op.sigmoid(builder.emit(relax.op.mean(image, axis=[2, 3], keepdims=True))))
        gated = builder.emit(relax.op.multiply(gate, image))
        pixels = builder.emit(relax.op.reshape(gated, (1, 4, 30)))
        scores = builder.emit(relax.op.matmul(builder.emit(relax.op.permute_dims(pixels, [0, 2, 1])), pixels))
        mixed = builder.emit(relax.op.matmul(pixels, builder.emit(relax.op.nn.softmax(scores, axis=-1))))
        return relax.op.subtract(gated, builder.emit(relax.op.reshape(mixed, (1, 4, 5, 6))))

    assert_same_values(module((1, 3, 5, 6), body))


def test_a_window_along_the_channels() -> None:
    def body(builder, x):
        a = builder.emit(relax.op.nn.conv2d(x, c((6, 2, 1, 1), 1)))
        image = builder.emit(relax.op.reshape(a, (2, 1, 6, 3, 4)))
        pool = builder.emit(relax.op.nn.avg_pool3d(image, (3, 1, 1), (1, 1, 1), (1, 0, 0, 1, 0, 0), count_include_pad=True))
        return relax.op.divide(a, builder.emit(relax.op.add(builder.emit(relax.op.reshape(pool, (2, 6, 3, 4))), relax.const(10.0))))

    assert_same_values(module((2, 2, 3, 4), body))


def test_pool_resize_pad_slice_and_flatten() -> None:
    def body(builder, x):
        a = builder.emit(relax.op.nn.conv2d(builder.emit(relax.op.nn.pad(x, [0, 0, 0, 0, 1, 1, 2, 0])), c((3, 2, 3, 3), 1)))
        b = builder.emit(relax.op.nn.max_pool2d(a, (2, 2), (2, 2)))
        nearest = {"method": "nearest_neighbor", "coordinate_transformation_mode": "asymmetric"}
        d = builder.emit(relax.op.image.resize2d(b, (6, 6), layout="NCHW", **nearest))
        e = builder.emit(relax.op.nn.pad(d, [0, 0, 1, 0, 0, 0, 0, 2], pad_value=1.5))
        f = builder.emit(relax.op.strided_slice(e, [1, 3], [1, 0], [4, 7]))
        return relax.op.reshape(f, (1, 3 * 6 * 7))

    assert_same_values(module((1, 2, 6, 8), body))


def test_half_is_numpys_single_rounded_to_half() -> None:
    weights, bias = values((4, 3), 1).astype("float16"), values((3,), 2).astype("float16")

    def body(builder, x):
        product = builder.emit(relax.op.matmul(x, relax.const(weights)))
        return relax.op.nn.relu(builder.emit(relax.op.add(product, relax.const(bias))))

    x = values((5, 4), 0).astype("float16")
    product = (x.astype("float32") @ weights.astype("float32")).astype("float16")
    expected = np.maximum((product.astype("float32") + bias.astype("float32")).astype("float16"), 0)
    np.testing.assert_allclose(run(PIPELINE(module((5, 4), body, "float16")), x), expected, rtol=1e-3, atol=1e-3)


def test_folding_is_as_close_to_float64_as_one_rounding() -> None:
    """A pointwise convolution of one channel is one product and one sum: what folding rounds shows directly."""
    w, b, gamma, beta, mean, var = values((6, 1000), 3)
    var = np.abs(var) + np.float32(1e-3)

    def body(builder, x):
        a = builder.emit(relax.op.nn.conv2d(x, relax.const(w.reshape(1000, 1, 1, 1))))
        a = builder.emit(relax.op.add(a, relax.const(b.reshape(1, 1000, 1, 1))))
        params = [relax.const(param) for param in (gamma, beta, mean, var)]
        return relax.TupleGetItem(builder.emit(relax.op.nn.batch_norm(a, *params, axis=1, training=False)), 0)

    x = np.float32([[[[0.7]]]])
    actual = run(PIPELINE(module((1, 1, 1, 1), body)), x).ravel()
    wide = [array.astype("float64") for array in (w, b, gamma, beta, mean, var)]
    slope = wide[2] / np.sqrt(wide[5] + 1e-5)
    weights, bias = wide[0] * slope, (wide[1] - wide[4]) * slope + wide[3]
    # Weights, bias, product and sum are rounded: half a unit in the last place each.
    error = np.abs(actual - (np.float64(x.item()) * weights + bias))
    bound = 2.0**-24 * (2 * np.abs(0.7 * weights) + np.abs(bias) + np.abs(actual)) * (1 + 1e-6)
    assert (error <= bound).all()
