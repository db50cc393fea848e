"""ChannelsLast: what runs in NHWC, what is carried through, and where a permutation is left."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import relax as R

from tvmfuse.graph.layout import ChannelsLast, merge_groups
from tvmfuse.graph.rewrite import op_name
from tvmfuse.graph.simplify import Simplify


def laid_out(before: relax.Function) -> relax.Function:
    passes = tvm.transform.Sequential([ChannelsLast(), Simplify(), relax.transform.CanonicalizeBindings()])
    once = passes(tvm.IRModule({"main": before}))
    tvm.ir.assert_structural_equal(passes(once), once)
    return once["main"]


def assert_rewrites(before: relax.Function, expected: relax.Function) -> None:
    tvm.ir.assert_structural_equal(laid_out(before), expected)


def calls(function: relax.Function) -> list[tvm.ir.Call]:
    return [binding.value for binding in function.body.blocks[0].bindings if op_name(binding.value)]


def names(function: relax.Function) -> list[str]:
    return [op_name(call) for call in calls(function)]


def test_only_the_edge_is_permuted() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((1, 2, 4, 4), "float32"), w: R.Tensor((3, 2, 3, 3), "float32"), v: R.Tensor((3, 1, 3, 3), "float32")):
        with R.dataflow():
            a = R.nn.conv2d(x, w, padding=1)
            b = R.nn.relu(a)
            c = R.nn.conv2d(b, v, padding=1, groups=3)
            y = R.add(b, c)
            R.output(y)
        return y

    @R.function(private=True)
    def expected(x: R.Tensor((1, 2, 4, 4), "float32"), w: R.Tensor((3, 2, 3, 3), "float32"), v: R.Tensor((3, 1, 3, 3), "float32")):
        with R.dataflow():
            x1 = R.permute_dims(x, axes=[0, 2, 3, 1])
            w1 = R.permute_dims(w, axes=[0, 2, 3, 1])
            a = R.nn.conv2d(x1, w1, padding=1, data_layout="NHWC", kernel_layout="OHWI")
            b = R.nn.relu(a)
            v1 = R.reshape(v, R.shape([3, 3, 3, 1]))
            c = R.nn.conv2d(b, v1, padding=1, groups=3, data_layout="NHWC", kernel_layout="OHWI")
            d = R.add(b, c)
            y = R.permute_dims(d, axes=[0, 3, 1, 2])
            R.output(y)
        return y

    assert_rewrites(before, expected)


def convolved(x: tuple[int, ...], w: tuple[int, ...], stride: int = 1, groups: int = 1, dtype: str = "float32", known: bool = True):  # noqa: ANN201
    """Names of the operators, with the layout that each convolution runs in."""
    builder = relax.BlockBuilder()
    data, weights = relax.Var("x", relax.TensorType(x, dtype)), relax.Var("w", relax.TensorType(w, dtype))
    with builder.function("main", [data, weights]):
        with builder.dataflow():
            taps = relax.const(tvm.runtime.tensor(np.ones(w, dtype))) if known else weights
            y = builder.emit_output(relax.op.nn.conv2d(data, taps, strides=stride, groups=groups))
        builder.emit_func_output(y)
    main = ChannelsLast()(builder.get())["main"]
    return [str(call.attrs.data_layout) if "conv2d" in op_name(call) else op_name(call) for call in calls(main)]


def test_few_channels_of_planes_are_convolved_as_they_lie() -> None:
    assert convolved((1, 64, 9, 96), (10, 32, 5, 1), groups=2) == ["NCHW"]


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({"w": (10, 64, 3, 1)}, id="many channels"),
        pytest.param({"stride": 2}, id="stride"),
        pytest.param({"x": (1, 8, 9, 96), "w": (7, 8, 3, 1)}, id="large result"),
        pytest.param({"x": (1, 64, 9, 6)}, id="narrow image"),
        pytest.param({"w": (32, 1, 1, 1), "groups": 32, "x": (1, 32, 9, 96)}, id="depthwise"),
        pytest.param({"dtype": "float64"}, id="float64"),
        pytest.param({"known": False}, id="run-time weights"),
    ],
)
def test_others_run_in_nhwc(arguments: dict[str, Any]) -> None:
    assert "NHWC" in convolved(**({"x": (1, 64, 9, 96), "w": (5, 64, 1, 1)} | arguments))


def test_an_image_that_a_convolution_leaves_in_nhwc_stays_there() -> None:
    builder = relax.BlockBuilder()
    data = relax.Var("x", relax.TensorType((1, 8, 9, 96), "float32"))
    with builder.function("main", [data]):
        with builder.dataflow():
            wide = builder.emit(relax.op.nn.conv2d(data, relax.const(np.ones((64, 8, 1, 1), "float32"))))
            y = builder.emit_output(relax.op.nn.conv2d(wide, relax.const(np.ones((5, 64, 1, 1), "float32"))))
        builder.emit_func_output(y)
    layouts = [str(call.attrs.data_layout) for call in calls(laid_out(builder.get()["main"])) if "conv2d" in op_name(call)]
    assert layouts == ["NHWC", "NHWC"]


def test_a_transposed_convolution_has_weights_ihwo() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((1, 4, 2, 2), "float32"), w: R.Tensor((4, 3, 2, 2), "float32")):
        with R.dataflow():
            y = R.nn.conv2d_transpose(x, w, strides=2, output_padding=1, groups=2)
            R.output(y)
        return y

    @R.function(private=True)
    def expected(x: R.Tensor((1, 4, 2, 2), "float32"), w: R.Tensor((4, 3, 2, 2), "float32")):
        with R.dataflow():
            x1 = R.permute_dims(x, axes=[0, 2, 3, 1])
            w1 = R.permute_dims(w, axes=[0, 2, 3, 1])
            a = R.nn.conv2d_transpose(
                x1, w1, strides=2, output_padding=1, groups=2, data_layout="NHWC", kernel_layout="IHWO", out_layout="NHWC"
            )
            y = R.permute_dims(a, axes=[0, 3, 1, 2])
            R.output(y)
        return y

    assert_rewrites(before, expected)


def test_global_pooling_and_flatten_need_no_permutation() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((1, 1, 4, 4), "float32"), w: R.Tensor((3, 1, 3, 3), "float32")):
        with R.dataflow():
            a = R.nn.conv2d(x, w)
            b = R.mean(a, axis=[2, 3], keepdims=True)
            y = R.reshape(b, R.shape([1, 3]))
            R.output(y)
        return y

    @R.function(private=True)
    def expected(x: R.Tensor((1, 1, 4, 4), "float32"), w: R.Tensor((3, 1, 3, 3), "float32")):
        with R.dataflow():
            x1 = R.reshape(x, R.shape([1, 4, 4, 1]))
            w1 = R.reshape(w, R.shape([3, 3, 3, 1]))
            a = R.nn.conv2d(x1, w1, data_layout="NHWC", kernel_layout="OHWI")
            b = R.mean(a, axis=[1, 2], keepdims=True)
            y = R.reshape(b, R.shape([1, 3]))
            R.output(y)
        return y

    assert_rewrites(before, expected)


def test_a_channel_shuffle_stays_in_nhwc() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((1, 6, 2, 2), "float32")):
        with R.dataflow():
            a = R.nn.max_pool2d(x)
            b = R.reshape(a, R.shape([1, 3, 2, 2, 2]))
            c = R.permute_dims(b, axes=[0, 2, 1, 3, 4])
            d = R.reshape(c, R.shape([1, 6, 2, 2]))
            y = R.nn.max_pool2d(d)
            R.output(y)
        return y

    @R.function(private=True)
    def expected(x: R.Tensor((1, 6, 2, 2), "float32")):
        with R.dataflow():
            x1 = R.permute_dims(x, axes=[0, 2, 3, 1])
            a = R.nn.max_pool2d(x1, layout="NHWC", out_layout="NHWC")
            b = R.reshape(a, R.shape([1, 2, 2, 3, 2]))
            c = R.permute_dims(b, axes=[0, 1, 2, 4, 3])
            d = R.reshape(c, R.shape([1, 2, 2, 6]))
            e = R.nn.max_pool2d(d, layout="NHWC", out_layout="NHWC")
            y = R.permute_dims(e, axes=[0, 3, 1, 2])
            R.output(y)
        return y

    assert_rewrites(before, expected)


def test_a_flatten_that_mixes_channels_and_pixels_is_in_the_models_order() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((1, 3, 2, 2), "float32")):
        with R.dataflow():
            a = R.nn.max_pool2d(x)
            y = R.reshape(a, R.shape([1, 12]))
            R.output(y)
        return y

    assert names(laid_out(before)) == ["permute_dims", "nn.max_pool2d", "permute_dims", "reshape"]


def carried(build: object, shape: tuple[int, ...] = (1, 4, 2, 3)) -> list[tvm.ir.Call]:
    """The calls between two pools that `build` is put between; no permutation may be there."""
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType(shape, "float32"))
    with builder.function("main", [x], private=True):
        with builder.dataflow():
            middle = build(builder, builder.emit(relax.op.nn.max_pool2d(x)))
            y = builder.emit_output(relax.op.nn.max_pool2d(middle))
        builder.emit_func_output(y)
    between = calls(laid_out(builder.get()["main"]))
    assert [op_name(between[at]) for at in (0, 1, -2, -1)] == ["permute_dims", "nn.max_pool2d", "nn.max_pool2d", "permute_dims"]
    return between[2:-2]


def test_constants_are_laid_out_again() -> None:
    channels = relax.const(np.arange(4, dtype="float32").reshape(4, 1, 1))
    (add,) = carried(lambda builder, x: builder.emit(relax.op.add(x, channels)))
    np.testing.assert_array_equal(add.args[1].value.numpy(), np.arange(4).reshape(1, 1, 1, 4))


def test_scalars_stay_scalars() -> None:
    (add,) = carried(lambda builder, x: builder.emit(relax.op.add(x, relax.const(2.0))))
    assert add.args[1].ty.ndim == 0


def test_a_run_time_operand_of_fewer_axes_is_brought_to_nhwc() -> None:
    def gated(builder: relax.BlockBuilder, x: relax.Var) -> relax.Var:
        gate = builder.emit(relax.op.mean(x, axis=[0, 2, 3], keepdims=False))
        return builder.emit(relax.op.multiply(x, builder.emit(relax.op.reshape(gate, (4, 1, 1)))))

    assert [op_name(call) for call in carried(gated)] == ["mean", "reshape", "multiply"]


@pytest.mark.parametrize("axis", [1, -3])
def test_concat_runs_along_the_stored_axis(axis: int) -> None:
    (concat,) = carried(lambda builder, x: builder.emit(relax.op.concat([x, x], axis=axis)))
    assert concat.attrs.axis == 3


def test_softmax_runs_along_the_stored_axis() -> None:
    (softmax,) = carried(lambda builder, x: builder.emit(relax.op.nn.softmax(x, axis=1)))
    assert softmax.attrs.axis == 3


def test_split_runs_along_the_stored_axis() -> None:
    def second_half(builder: relax.BlockBuilder, x: relax.Var) -> relax.Var:
        return builder.emit(relax.TupleGetItem(builder.emit(relax.op.split(x, 2, axis=1)), 1))

    (split,) = carried(second_half)
    assert split.attrs.axis == 3


def test_padding_follows_its_axes() -> None:
    (pad,) = carried(lambda builder, x: builder.emit(relax.op.nn.pad(x, [0, 0, 1, 2, 3, 4, 5, 6])))
    assert list(pad.attrs.pad_width) == [0, 0, 3, 4, 5, 6, 1, 2]


def test_a_slice_follows_its_axes() -> None:
    (part,) = carried(lambda builder, x: builder.emit(relax.op.strided_slice(x, [1], [0], [2])))
    assert [int(axis) for axis in part.args[1].fields] == [3]


def test_resizing_takes_nhwc() -> None:
    (resize,) = carried(lambda builder, x: builder.emit(relax.op.image.resize2d(x, (4, 6), layout="NCHW")))
    assert resize.attrs.layout == "NHWC"


def test_inverse_permutations_of_the_model_vanish() -> None:
    def there_and_back(builder: relax.BlockBuilder, x: relax.Var) -> relax.Var:
        y = builder.emit(relax.op.nn.relu(builder.emit(relax.op.permute_dims(x, [0, 2, 3, 1]))))
        return builder.emit(relax.op.permute_dims(y, [0, 3, 1, 2]))

    assert [op_name(call) for call in carried(there_and_back)] == ["nn.relu"]


def test_a_window_along_the_channels_is_one_along_the_last_axis() -> None:
    def local_response(builder: relax.BlockBuilder, x: relax.Var) -> relax.Var:
        image = builder.emit(relax.op.reshape(x, (1, 1, 4, 2, 3)))
        pooled = relax.op.nn.avg_pool3d(image, (5, 1, 1), (1, 1, 1), (2, 0, 0, 2, 0, 0), count_include_pad=True)
        return builder.emit(relax.op.reshape(builder.emit(pooled), (1, 4, 2, 3)))

    reshape, pool, back = carried(local_response)
    assert (op_name(reshape), op_name(pool), op_name(back)) == ("reshape", "nn.avg_pool3d", "reshape")
    assert (list(pool.attrs.pool_size), list(pool.attrs.padding)) == ([1, 1, 5], [0, 0, 2, 0, 0, 2])


def test_what_no_rule_knows_gets_the_models_order() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((1, 3, 2, 2), "float32"), w: R.Tensor((2, 5), "float32")):
        with R.dataflow():
            a = R.nn.max_pool2d(x)
            y = R.matmul(a, w)
            R.output(y)
        return y

    assert names(laid_out(before)) == ["permute_dims", "nn.max_pool2d", "permute_dims", "matmul"]


def test_two_readers_in_the_models_order_share_one_permutation() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((1, 3, 2, 2), "float32"), w: R.Tensor((2, 5), "float32")):
        with R.dataflow():
            a = R.nn.max_pool2d(x)
            y = R.matmul(a, w)
            z = R.matmul(a, w)
            R.output(y, z)
        return (y, z)

    assert names(laid_out(before)).count("permute_dims") == 2


def test_a_returned_split_is_in_the_models_order() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((1, 4, 2, 2), "float32")):
        with R.dataflow():
            a = R.nn.max_pool2d(x)
            y = R.split(a, 2, axis=1)
            R.output(y)
        return y

    function = laid_out(before)
    assert names(function) == ["permute_dims", "nn.max_pool2d", "split", "permute_dims", "permute_dims"]
    tvm.ir.assert_structural_equal(function.ret_ty, before.ret_ty)


def test_a_model_without_images_is_left_alone() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((2, 3), "float32"), w: R.Tensor((3, 5), "float32")):
        with R.dataflow():
            a = R.matmul(x, w)
            b = R.add(a, R.const([1.0, 2.0, 3.0, 4.0, 5.0], "float32"))
            y = R.nn.softmax(b, axis=-1)
            R.output(y)
        return y

    assert names(laid_out(before)) == names(before)


@pytest.mark.parametrize(
    ("before", "after", "groups"),
    [
        ((2, 3, 4), (6, 4), [([0, 1], [0]), ([2], [1])]),
        ((6, 1, 4), (2, 3, 4), [([0], [0, 1]), ([2], [2])]),
        ((4, 6), (3, 8), [([0, 1], [0, 1])]),
        ((1, 1), (1,), []),
    ],
)
def test_merge_groups(before: tuple[int, ...], after: tuple[int, ...], groups: list[tuple[list[int], list[int]]]) -> None:
    assert merge_groups(before, after) == groups
