"""Convolutions in one form: two spatial axes, their zero padding their own.

Conv1dToConv2d  conv1d(x (n, c, w), W (o, i, k))  ->  reshape(conv2d(reshape(x, (n, c, 1, w)), W (o, i, 1, k)), (n, o, w'))
FoldPad         conv2d(pad(x, zeros))             ->  conv2d(x) with the padding in its attributes
TrimTaps        conv2d(x (n, c, 1, w), W (o, i, 5, k), padding=(4, 0, 0, 0))  ->  conv2d(x, W[:, :, 4:], padding=0)
"""

from __future__ import annotations

import numpy as np
from tvm import relax
from tvm.relax import Expr

from .rewrite import Rewriter, array_of, as_pass, constant, is_static, op_name, reshape, shape_of, with_attrs


@as_pass
class Conv1dToConv2d(Rewriter):
    """Run conv1d and conv1d_transpose in NCW as their two-dimensional counterparts over an image of height 1."""

    def rewrite(self, value: Expr) -> Expr:
        name = op_name(value)
        if name not in ("nn.conv1d", "nn.conv1d_transpose") or not is_static(value):
            return value
        attrs, transposed = value.attrs, name == "nn.conv1d_transpose"
        kernel_layout = "IOW" if transposed else "OIW"
        if (attrs.data_layout, attrs.kernel_layout, attrs.out_layout) != ("NCW", kernel_layout, "NCW"):
            return value
        data, weights = (self.emit(reshape(arg, (*shape_of(arg)[:2], 1, shape_of(arg)[2]))) for arg in value.args)
        op = relax.op.nn.conv2d_transpose if transposed else relax.op.nn.conv2d
        left, right = (int(width) for width in attrs.padding)
        more = {"output_padding": (0, int(attrs.output_padding[0]))} if transposed else {}
        image = op(
            data,
            weights,
            strides=(1, int(attrs.strides[0])),
            padding=(0, left, 0, right),
            dilation=(1, int(attrs.dilation[0])),
            groups=int(attrs.groups),
            data_layout="NCHW",
            kernel_layout=kernel_layout.replace("W", "HW"),
            out_dtype=attrs.out_dtype,
            **more,
        )
        return reshape(self.emit(image, self.name), shape_of(value))


@as_pass
class FoldPad(Rewriter):
    """Let a conv2d do the zero padding of its input, if nothing else reads the padded tensor."""

    def rewrite(self, value: Expr) -> Expr:
        if op_name(value) != "nn.conv2d" or not self.single_user(value.args[0]):
            return value
        pad = self.producer(value.args[0])
        if op_name(pad) != "nn.pad" or pad.attrs.pad_mode != "constant" or float(pad.attrs.pad_value) != 0:
            return value
        layout = value.attrs.data_layout
        widths = [(int(before), int(after)) for before, after in zip(pad.attrs.pad_width[::2], pad.attrs.pad_width[1::2], strict=True)]
        if any(min(width) < 0 or (any(width) and axis not in "HW") for width, axis in zip(widths, layout, strict=True)):
            return value
        (above, below), (left, right) = widths[layout.index("H")], widths[layout.index("W")]
        padding = [int(own) + extra for own, extra in zip(value.attrs.padding, (above, left, below, right), strict=True)]
        return with_attrs(value, [pad.args[0], value.args[1]], padding=padding)


@as_pass
class TrimTaps(Rewriter):
    """Leave out the rows and columns of a kernel that meet nothing but padding, whatever the output: a causal network in steps of one."""

    def rewrite(self, value: Expr) -> Expr:
        if op_name(value) != "nn.conv2d" or not is_static(value) or not is_static(value.args[0]):
            return value
        attrs, weights = value.attrs, array_of(value.args[1])
        if weights is None or (attrs.data_layout, attrs.kernel_layout) != ("NCHW", "OIHW") or not np.isfinite(weights).all():
            return value
        padding = [int(width) for width in attrs.padding]
        for axis in (0, 1):
            stride, dilation = int(attrs.strides[axis]), int(attrs.dilation[axis])
            taps, extent, outputs = weights.shape[2 + axis], shape_of(value.args[0])[2 + axis], shape_of(value)[2 + axis]
            before, after = padding[axis], padding[axis + 2]
            firsts = [tap * dilation - before for tap in range(taps)]  # what the first output reads there
            read = [tap for tap, at in enumerate(firsts) if any(0 <= at + o * stride < extent for o in range(outputs))]
            if read:
                low, high = min(read[0], before // dilation), min(taps - 1 - read[-1], after // dilation)
                padding[axis], padding[axis + 2] = before - low * dilation, after - high * dilation
                weights = weights[:, :, low : taps - high] if axis == 0 else weights[:, :, :, low : taps - high]
        if weights.shape == shape_of(value.args[1]):
            return value
        return with_attrs(value, [value.args[0], constant(weights)], padding=padding)
