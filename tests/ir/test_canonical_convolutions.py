"""Conv1dToConv2d, FoldPad and TrimTaps."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import relax as R

from tvmfuse.graph.convolution import Conv1dToConv2d, FoldPad, TrimTaps
from tvmfuse.graph.rewrite import op_name, shape_of


def assert_rewrites(build: object, before: relax.Function, expected: relax.Function) -> None:
    once = build()(tvm.IRModule({"main": before}))
    tvm.ir.assert_structural_equal(once["main"], expected)
    tvm.ir.assert_structural_equal(build()(once), once)


def test_conv1d_runs_over_an_image_of_height_one() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((1, 2, 8), "float32"), w: R.Tensor((3, 2, 3), "float32")):
        with R.dataflow():
            y = R.nn.conv1d(x, w, strides=2, padding=[1, 2], dilation=2)
            R.output(y)
        return y

    @R.function(private=True)
    def expected(x: R.Tensor((1, 2, 8), "float32"), w: R.Tensor((3, 2, 3), "float32")):
        with R.dataflow():
            a = R.reshape(x, R.shape([1, 2, 1, 8]))
            b = R.reshape(w, R.shape([3, 2, 1, 3]))
            c = R.nn.conv2d(a, b, strides=[1, 2], padding=[0, 1, 0, 2], dilation=[1, 2])
            y = R.reshape(c, R.shape([1, 3, 4]))
            R.output(y)
        return y

    assert_rewrites(Conv1dToConv2d, before, expected)


def test_conv1d_transpose_keeps_its_output_padding() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((1, 4, 5), "float32"), w: R.Tensor((4, 3, 3), "float32")):
        with R.dataflow():
            y = R.nn.conv1d_transpose(x, w, strides=2, padding=[1, 1], output_padding=1, groups=2)
            R.output(y)
        return y

    @R.function(private=True)
    def expected(x: R.Tensor((1, 4, 5), "float32"), w: R.Tensor((4, 3, 3), "float32")):
        with R.dataflow():
            a = R.reshape(x, R.shape([1, 4, 1, 5]))
            b = R.reshape(w, R.shape([4, 3, 1, 3]))
            c = R.nn.conv2d_transpose(a, b, strides=[1, 2], padding=[0, 1, 0, 1], output_padding=[0, 1], groups=2)
            y = R.reshape(c, R.shape([1, 6, 10]))
            R.output(y)
        return y

    assert_rewrites(Conv1dToConv2d, before, expected)


def test_another_layout_stays() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((1, 8, 2), "float32"), w: R.Tensor((3, 2, 3), "float32")):
        with R.dataflow():
            y = R.nn.conv1d(x, w, data_layout="NWC")
            R.output(y)
        return y

    assert_rewrites(Conv1dToConv2d, before, before)


def test_zero_padding_joins_the_convolutions_own() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((1, 2, 4, 4), "float32"), w: R.Tensor((3, 2, 3, 3), "float32")):
        with R.dataflow():
            a = R.nn.pad(x, [0, 0, 0, 0, 1, 2, 3, 4])
            y = R.nn.conv2d(a, w, padding=[1, 1, 0, 0])
            R.output(y)
        return y

    @R.function(private=True)
    def expected(x: R.Tensor((1, 2, 4, 4), "float32"), w: R.Tensor((3, 2, 3, 3), "float32")):
        with R.dataflow():
            y = R.nn.conv2d(x, w, padding=[2, 4, 2, 4])
            R.output(y)
        return y

    assert_rewrites(FoldPad, before, expected)


@pytest.mark.parametrize(
    ("width", "value", "mode"),
    [
        ([0, 0, 0, 0, 1, 1, 1, 1], 1.0, "constant"),
        ([0, 0, 1, 1, 1, 1, 1, 1], 0.0, "constant"),
        ([0, 0, 0, 0, -1, 1, 0, 0], 0.0, "constant"),
        ([0, 0, 0, 0, 1, 1, 1, 1], 0.0, "reflect"),
    ],
    ids=["another value", "channels", "cropping", "reflection"],
)
def test_pad_stays(width: list[int], value: float, mode: str) -> None:
    assert names(padded_convolution(width, value, mode)) == ["nn.pad", "nn.conv2d"]


def test_pad_stays_when_it_is_a_graph_output() -> None:
    assert names(padded_convolution([0, 0, 0, 0, 1, 1, 1, 1], returned=True)) == ["nn.pad", "nn.conv2d"]


def padded_convolution(width: list[int], value: float = 0.0, mode: str = "constant", returned: bool = False) -> relax.Function:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((1, 2, 4, 4), "float32"))
    w = relax.Var("w", relax.TensorType((3, 2 + width[2] + width[3], 3, 3), "float32"))
    with builder.function("main", [x, w], private=True):
        with builder.dataflow():
            pad = relax.op.nn.pad(x, width, mode, value)
            pad = builder.emit_output(pad) if returned else builder.emit(pad)
            y = builder.emit_output(relax.op.nn.conv2d(pad, w))
        builder.emit_func_output([pad, y] if returned else y)
    return builder.get()["main"]


def names(function: relax.Function) -> list[str]:
    bindings = FoldPad()(tvm.IRModule({"main": function}))["main"].body.blocks[0].bindings
    return [op_name(binding.value) for binding in bindings if op_name(binding.value)]


def trimmed(h: int, taps: int, padding: tuple[int, int], stride: int = 1, dilation: int = 1, weight: float = 1.0) -> relax.Call:
    """The convolution that TrimTaps leaves of one along the rows, whose weights are 1, 2, ... times `weight`."""
    weights = weight * np.arange(1, taps + 1, dtype=np.float32).reshape(1, 1, taps, 1)
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((1, 1, h, 3), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            options = {"strides": (stride, 1), "dilation": (dilation, 1), "padding": (padding[0], 0, padding[1], 0)}
            y = builder.emit_output(relax.op.nn.conv2d(x, relax.const(weights), **options))
        builder.emit_func_output(y)
    mod = TrimTaps()(builder.get())
    tvm.ir.assert_structural_equal(TrimTaps()(mod), mod)
    (block,) = mod["main"].body.blocks
    assert shape_of(block.bindings[-1].value) == shape_of(y)
    return block.bindings[-1].value


@pytest.mark.parametrize(
    ("h", "taps", "padding", "options", "left", "left_padding"),
    [
        (1, 5, (4, 0), {}, [5], (0, 0)),  # causal, one step: all but the last tap read padding
        (1, 3, (1, 1), {}, [2], (0, 0)),
        (2, 5, (4, 0), {}, [4, 5], (1, 0)),
        (5, 5, (4, 0), {}, [1, 2, 3, 4, 5], (4, 0)),
        (1, 3, (4, 0), {"dilation": 2}, [3], (0, 0)),
        (2, 3, (3, 3), {"stride": 4}, [1], (3, 1)),  # the second output reads row 1 with its first tap, and rows 2 and 3 are padding
        (1, 3, (0, 2), {}, [1], (0, 0)),
    ],
)
def test_taps_that_only_meet_padding_are_trimmed(h, taps, padding, options, left, left_padding) -> None:
    call = trimmed(h, taps, padding, **options)
    assert np.ravel(np.from_dlpack(call.args[1].value)).tolist() == left
    assert tuple(int(width) for width in call.attrs.padding) == (left_padding[0], 0, left_padding[1], 0)


def test_taps_of_infinite_weights_stay() -> None:
    """Infinity times the zero of the padding is NaN."""
    assert trimmed(1, 3, (2, 0), weight=float("inf")).args[1].ty.shape[2] == 3
