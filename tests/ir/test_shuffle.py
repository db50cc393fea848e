"""SinkShuffle: which shuffles of channels move below a depthwise convolution, and what becomes of its weights."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import BlockBuilder, Expr

from tvmfuse.graph.rewrite import op_name
from tvmfuse.graph.shuffle import Shuffle, SinkShuffle, is_depthwise, shuffle_by

CHANNELS = 6
GROUPED = np.ones((4, 1, 1, 3), "float32")
Step = Callable[[BlockBuilder, Expr], Expr]


def convolution(weights: np.ndarray, groups: int, **attrs: object) -> Step:
    layouts = {"data_layout": "NHWC", "kernel_layout": "OHWI", "out_layout": "NHWC"}
    return lambda builder, x: builder.emit(relax.op.nn.conv2d(x, relax.const(weights), groups=groups, **layouts, **attrs))


def shuffle(split: tuple[int, ...] = (3, 2), axes: tuple[int, ...] = (1, 0)) -> Step:
    def step(builder: BlockBuilder, x: Expr) -> Expr:
        n, h, w, c = (int(extent) for extent in x.ty.shape.values)
        factors = builder.emit(relax.op.reshape(x, (n, h, w, *split)))
        permuted = builder.emit(relax.op.permute_dims(factors, [0, 1, 2, *(3 + axis for axis in axes)]))
        return builder.emit(relax.op.reshape(permuted, (n, h, w, c)))

    return step


def bias(builder: BlockBuilder, x: Expr) -> Expr:
    return builder.emit(relax.op.add(x, relax.const(np.arange(CHANNELS, dtype="float32"))))


def taps(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((CHANNELS, 3, 3, 1), np.float32)


DEPTHWISE = convolution(taps(), CHANNELS, padding=1, strides=2)
READER = convolution(GROUPED, 2)


def module(*steps: Step, returned: int | None = None) -> tvm.IRModule:
    """x through each step; `returned` is the step whose result is returned too."""
    builder = BlockBuilder()
    value: Expr = relax.Var("x", relax.TensorType((2, 5, 4, CHANNELS), "float32"))
    with builder.function("main", [value], private=True):
        with builder.dataflow():
            also = None
            for number, step in enumerate(steps):
                value = step(builder, value)
                also = value if number == returned else also
            result = builder.emit_output(value if also is None else relax.Tuple([value, also]))
        builder.emit_func_output(result)
    return builder.get()


def names(mod: tvm.IRModule) -> list[str]:
    return [op_name(binding.value) for binding in mod["main"].body.blocks[0].bindings if op_name(binding.value)]


def test_a_shuffle_moves_below_a_depthwise_convolution() -> None:
    # a channel of the result is channel sources[i] of x
    sources = np.arange(CHANNELS).reshape(3, 2).T.ravel()
    own = np.empty_like(taps())
    own[sources] = taps()

    before = module(shuffle(), DEPTHWISE, bias, READER)
    expected = module(convolution(own, CHANNELS, padding=1, strides=2), shuffle(), bias, READER)

    after = SinkShuffle()(before)
    tvm.ir.assert_structural_equal(after, expected)
    tvm.ir.assert_structural_equal(SinkShuffle()(after), after)


def test_a_shuffle_may_have_any_factors() -> None:
    split, axes = (1, 3, 2), (2, 0, 1)
    after = SinkShuffle()(module(shuffle(split, axes), DEPTHWISE, READER))
    assert names(after) == ["nn.conv2d", "reshape", "permute_dims", "reshape", "nn.conv2d"]
    (weights,) = [b.value.args[1].value.numpy() for b in after["main"].body.blocks[0].bindings if is_depthwise(b.value)]
    np.testing.assert_array_equal(weights[Shuffle(split, axes).sources], taps())


def doubled(builder: BlockBuilder, x: Expr) -> Expr:
    return builder.emit(relax.op.add(x, x))


def residual(builder: BlockBuilder, x: Expr) -> Expr:
    return builder.emit(relax.op.add(x, builder.emit(relax.op.abs(x))))


def pixels_too(builder: BlockBuilder, x: Expr) -> Expr:
    return builder.emit(relax.op.reshape(builder.emit(relax.op.permute_dims(x, [0, 3, 1, 2])), (2, 5, 4, CHANNELS)))


@pytest.mark.parametrize(
    ("steps", "returned"),
    [
        ((shuffle(), DEPTHWISE), None),
        ((shuffle(), DEPTHWISE, bias, READER), 0),
        ((shuffle(), DEPTHWISE, bias, READER), 1),
        ((shuffle(), DEPTHWISE, bias, READER), 2),
        ((shuffle(), DEPTHWISE, residual, READER), None),
        ((shuffle(), DEPTHWISE, convolution(taps(1), CHANNELS)), None),
        ((shuffle(), convolution(np.ones((6, 3, 3, 2), "float32"), 3), READER), None),
        ((shuffle(), convolution(np.ones((12, 1, 1, 1), "float32"), 6), convolution(np.ones((4, 1, 1, 6), "float32"), 2)), None),
        ((pixels_too, DEPTHWISE, READER), None),
        ((bias, DEPTHWISE, READER), None),
    ],
    ids=["returned", "shuffle returned", "depthwise returned", "bias returned", "residual", "depthwise again", "groups", "more channels",
         "pixels move", "no shuffle"],
)  # fmt: skip
def test_refuses(steps: tuple[Step, ...], returned: int | None) -> None:
    before = module(*steps, returned=returned)
    tvm.ir.assert_structural_equal(SinkShuffle()(before), before)


def test_a_shuffle_of_a_tensor_whose_extents_are_not_known_starts_where_they_are() -> None:
    builder, rows = BlockBuilder(), tvm.tirx.Var("rows", "int64")
    x = relax.Var("x", relax.TensorType((rows, 120), "float32"))
    with builder.function("main", [x], private=True):
        with builder.dataflow():
            image = builder.emit(relax.op.reshape(x, (2, 5, 4, 3, 2)))
            permuted = builder.emit(relax.op.permute_dims(image, [0, 1, 2, 4, 3]))
            shuffled = builder.emit(relax.op.reshape(permuted, (2, 5, 4, CHANNELS)))
            result = builder.emit_output(READER(builder, DEPTHWISE(builder, shuffled)))
        builder.emit_func_output(result)
    after = SinkShuffle()(builder.get())
    assert names(after) == ["reshape", "reshape", "nn.conv2d", "reshape", "permute_dims", "reshape", "nn.conv2d"]


def test_functions_without_a_dataflow_block_are_left_alone() -> None:
    builder, x = BlockBuilder(), relax.Var("x", relax.TensorType((2, 3), "float32"))
    with builder.function("main", [x], private=True):
        builder.emit_func_output(builder.emit(relax.op.abs(x)))
    before = builder.get()
    tvm.ir.assert_structural_equal(SinkShuffle()(before), before)


@pytest.mark.parametrize(
    ("shape", "axes", "wanted"),
    [
        ((2, 5, 3, 2), (0, 1, 3, 2), Shuffle((3, 2), (1, 0))),
        ((10, 3, 2), (0, 2, 1), Shuffle((3, 2), (1, 0))),
        ((10, 1, 3, 2), (0, 3, 1, 2), Shuffle((1, 3, 2), (2, 0, 1))),
        ((2, 5, 3, 2), (1, 0, 3, 2), None),
        ((2, 5, 3, 2), (0, 2, 1, 3), None),
        ((6, 5, 2), (0, 2, 1), None),
    ],
)
def test_shuffle_by(shape: tuple[int, ...], axes: tuple[int, ...], wanted: Shuffle | None) -> None:
    builder = BlockBuilder()
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    assert shuffle_by(builder.normalize(relax.op.permute_dims(x, list(axes))), CHANNELS) == wanted
