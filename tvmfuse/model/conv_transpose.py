"""Transposed convolutions: with their padding resolved, and as convolutions of a spread input where TVM has no loops for them.

    conv_transpose(x, w, stride s)  ->  conv(x with s - 1 zeros between its elements, w with its axes reversed)

TVM lowers weights that are constant, in one or two dimensions and in one piece; of others it has no legalisation in our layouts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from tvm import relax
from tvm.relax.frontend.onnx.onnx_frontend import ConvTranspose

from .operands import Attributes, Operands, constant, extents, operand

CONVOLUTIONS = (relax.op.nn.conv1d, relax.op.nn.conv2d, relax.op.nn.conv3d)


def convert(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    x, w, bias = operands[0], operands[1], operand(operands, 2)
    rank = len(extents(x)) - 2
    ones = [1] * rank
    strides, dilations = attrs.get("strides", ones), attrs.get("dilations", ones)
    given = attrs.get("output_padding", [0] * rank)
    pads, more = _pads(extents(x)[2:], extents(w)[2:], strides, dilations, given, attrs)
    if rank < 3 and constant(w) is not None:
        resolved = {name: value for name, value in attrs.items() if name not in ("auto_pad", "output_shape")}
        resolved |= {"pads": pads, "output_padding": more}
        return ConvTranspose._impl_v1(bb, [x, w, bias], resolved, ({}, {}))
    result = transposed(bb, x, w, strides, dilations, pads, more, attrs.get("group", 1))
    return result if bias is None else relax.op.add(bb.emit(result), bb.emit(relax.op.reshape(bias, (1, -1, *ones))))


def transposed(
    bb: relax.BlockBuilder,
    x: relax.Expr,
    w: relax.Expr,
    strides: Sequence[int],
    dilations: Sequence[int],
    pads: Sequence[int],
    more: Sequence[int],
    groups: int,
) -> relax.Expr:
    """x (n, c, *spatial), w (c, m / groups, *kernel) -> (n, m, *spatial); pads begin..., end..., more: elements behind the end."""
    n, c, *spatial = extents(x)
    rank = len(spatial)
    _, m, *kernel = extents(w)
    if any(stride > 1 for stride in strides):
        between = [extent for i in spatial for extent in (i, 1)]
        spread = [0, 0] * 2 + [width for stride in strides for width in (0, 0, 0, stride - 1)]
        x = bb.emit(relax.op.nn.pad(bb.emit(relax.op.reshape(x, (n, c, *between))), spread))
        x = bb.emit(relax.op.reshape(x, (n, c, *(i * s for i, s in zip(spatial, strides, strict=True)))))
    reach = [(k - 1) * d for k, d in zip(kernel, dilations, strict=True)]
    before = [r - p for r, p in zip(reach, pads[:rank], strict=True)]
    surplus = [s - 1 for s in strides]  # zeros behind the last element
    behind = [r - p + o - s for r, p, o, s in zip(reach, pads[rank:], more, surplus, strict=True)]
    now = extents(x)[2:]
    if min(*before, *behind) < 0:
        ends = [i + min(b, 0) for i, b in zip(now, behind, strict=True)]
        x = bb.emit(relax.op.strided_slice(x, list(range(2, rank + 2)), [max(-b, 0) for b in before], ends))
    widths = [max(width, 0) for pair in zip(before, behind, strict=True) for width in pair]
    x = bb.emit(relax.op.nn.pad(x, [0, 0, 0, 0, *widths])) if any(widths) else x
    for axis in range(2, rank + 2):
        w = bb.emit(relax.op.flip(w, axis))
    w = bb.emit(relax.op.reshape(w, (groups, c // groups, m, *kernel)))
    w = bb.emit(relax.op.permute_dims(w, (0, 2, 1, *range(3, rank + 3))))
    w = bb.emit(relax.op.reshape(w, (groups * m, c // groups, *kernel)))
    return CONVOLUTIONS[rank - 1](x, w, strides=1, padding=0, dilation=list(dilations), groups=groups)


def col2im(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    """Each column is a block that is added to the image: a transposed convolution whose weights are an identity."""
    x, image, kernel = operands[0], constant(operands[1]).tolist(), constant(operands[2]).tolist()
    n, rows, _ = extents(x)
    rank, size = len(kernel), math.prod(kernel)
    ones = [1] * rank
    strides, dilations = attrs.get("strides", ones), attrs.get("dilations", ones)
    pads = attrs.get("pads", [0] * (2 * rank))
    room = [i + p + q - (k - 1) * d - 1 for i, p, q, k, d in zip(image, pads[:rank], pads[rank:], kernel, dilations, strict=True)]
    grid = [r // s + 1 for r, s in zip(room, strides, strict=True)]
    weights = np.tile(np.eye(size).reshape(size, 1, *kernel), (rows // size, *[1] * (rank + 1)))
    blocks = bb.emit(relax.op.reshape(x, (n, rows, *grid)))
    more = [r % s for r, s in zip(room, strides, strict=True)]
    return transposed(bb, blocks, relax.const(weights, x.ty.dtype.dtype), strides, dilations, pads, more, rows // size)


def _pads(
    spatial: Sequence[int], kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int], more: Sequence[int], attrs: Attributes
) -> tuple[list[int], list[int]]:
    """What is cut off at each end and what is added behind it: as given, or so much that the output has the size that is asked for."""
    rank, auto = len(spatial), attrs.get("auto_pad", b"NOTSET").decode()
    wanted = attrs.get("output_shape") or ([i * s for i, s in zip(spatial, strides, strict=True)] if auto.startswith("SAME") else None)
    if wanted is None:
        return list(attrs.get("pads", [0] * (2 * rank))) if auto == "NOTSET" else [0] * (2 * rank), list(more)
    whole = [(i - 1) * s + o + (k - 1) * d + 1 for i, s, o, k, d in zip(spatial, strides, more, kernel, dilations, strict=True)]
    totals = [out - w for out, w in zip(whole, wanted[-rank:], strict=True)]
    smaller, larger = [max(total, 0) // 2 for total in totals], [max(total, 0) - max(total, 0) // 2 for total in totals]
    ends = [*smaller, *larger] if auto == "SAME_UPPER" else [*larger, *smaller]
    return ends, [o + max(-total, 0) for o, total in zip(more, totals, strict=True)]
