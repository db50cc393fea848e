"""PointwiseToMatmul: which convolutions are matmuls."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

from tvmfuse.graph.pointwise import PointwiseToMatmul
from tvmfuse.graph.rewrite import op_name, shape_of


def values(
    image: tuple[int, ...], kernel: tuple[int, ...], constant: bool = True, layout: str = "NHWC", **attrs: object
) -> list[tvm.ir.Call]:
    builder = relax.BlockBuilder()
    x, w = relax.Var("x", relax.TensorType(image, "float32")), relax.Var("w", relax.TensorType(kernel, "float32"))
    weights = relax.const(np.arange(np.prod(kernel), dtype="float32").reshape(kernel)) if constant else w
    with builder.function("main", [x] if constant else [x, w], private=True):
        with builder.dataflow():
            kernel_layout = "OHWI" if layout == "NHWC" else "OIHW"
            y = builder.emit_output(relax.op.nn.conv2d(x, weights, data_layout=layout, kernel_layout=kernel_layout, **attrs))
        builder.emit_func_output(y)
    once = PointwiseToMatmul()(builder.get())
    tvm.ir.assert_structural_equal(PointwiseToMatmul()(once), once)
    return [binding.value for binding in once["main"].body.blocks[0].bindings]


def test_a_one_by_one_convolution_is_a_matmul_over_pixels() -> None:
    flat, product, image = values((2, 3, 5, 4), (6, 1, 1, 4), dilation=2)
    assert [op_name(call) for call in (flat, product, image)] == ["reshape", "matmul", "reshape"]
    assert (shape_of(flat), shape_of(product), shape_of(image)) == ((30, 4), (30, 6), (2, 3, 5, 6))
    np.testing.assert_array_equal(product.args[1].value.numpy(), np.arange(24).reshape(6, 4).T)


def test_a_stride_over_one_pixel_is_no_stride() -> None:
    assert [op_name(call) for call in values((1, 1, 1, 4), (6, 1, 1, 4), strides=2)][1:] == ["matmul", "reshape"]


def test_a_window_as_large_as_the_image_is_a_matmul() -> None:
    flat, product, image = values((2, 3, 2, 4), (6, 3, 2, 4))
    assert (shape_of(flat), shape_of(product), shape_of(image)) == ((2, 24), (2, 6), (2, 1, 1, 6))
    np.testing.assert_array_equal(product.args[1].value.numpy(), np.arange(144).reshape(6, 24).T)


@pytest.mark.parametrize(
    ("image", "kernel", "more"),
    [
        ((1, 4, 4, 4), (6, 1, 1, 4), {"strides": 2}),
        ((1, 4, 4, 4), (6, 1, 1, 4), {"padding": 1}),
        ((1, 4, 4, 4), (6, 1, 1, 2), {"groups": 2}),
        ((1, 4, 4, 4), (6, 3, 1, 4), {}),
        ((1, 3, 3, 4), (6, 3, 3, 4), {"padding": 1}),
        ((1, 4, 4, 4), (6, 1, 1, 4), {"constant": False}),
        ((1, 4, 4, 4), (6, 4, 1, 1), {"layout": "NCHW"}),
    ],
    ids=["stride", "padding", "groups", "window", "padded window", "run-time weights", "NCHW"],
)
def test_convolution_stays(image: tuple[int, ...], kernel: tuple[int, ...], more: dict[str, object]) -> None:
    assert [op_name(call) for call in values(image, kernel, **more)] == ["nn.conv2d"]
