"""Maximum pools: with paddings that keep the size resolved as ONNX does, and with the places of the maxima.

    MaxPool(x) -> y, places   =>   for each tap of the window: new = strided slice of the padded x
                                   places = where(new > y, the tap's elements, places); y = maximum(y, new)

TVM's has no second result, takes the smaller size for SAME_LOWER, and pads by negative widths where steps are wider than the window.
"""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
from tvm import relax
from tvm.relax.frontend.onnx.onnx_frontend import MaxPool

from .operands import Attributes, Operands, dtype_of, extents


def convert(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    resolved = {**attrs, "auto_pad": b"NOTSET", "pads": _pads(extents(operands[0])[2:], attrs)}
    if attrs["tvm_custom"]["num_outputs"] == 1:
        return MaxPool._impl_v1(bb, operands, resolved, ({}, {}))
    return _with_places(bb, operands[0], resolved)


def _geometry(attrs: Attributes) -> tuple[list[int], list[int], list[int]]:
    """Strides, dilations and how far the window reaches, for each axis."""
    kernel = attrs["kernel_shape"]
    strides, dilations = attrs.get("strides", [1] * len(kernel)), attrs.get("dilations", [1] * len(kernel))
    return list(strides), list(dilations), [d * (k - 1) + 1 for k, d in zip(kernel, dilations, strict=True)]


def _pads(spatial: tuple[int, ...], attrs: Attributes) -> list[int]:
    """begin..., end..."""
    mode = attrs.get("auto_pad", b"NOTSET")
    if mode in (b"NOTSET", b"VALID"):
        return list(attrs.get("pads", [0] * 2 * len(spatial))) if mode == b"NOTSET" else [0] * 2 * len(spatial)
    strides, _, reach = _geometry(attrs)
    total = [max(0, (-(-i // s) - 1) * s + r - i) for i, s, r in zip(spatial, strides, reach, strict=True)]
    less, more = [width // 2 for width in total], [width - width // 2 for width in total]
    return less + more if mode == b"SAME_UPPER" else more + less


def _with_places(bb: relax.BlockBuilder, x: relax.Expr, attrs: Attributes) -> relax.Expr:
    """Places count the elements of the whole x in its order; storage_order=1 counts the first spatial axis fastest."""
    n, c, *spatial = extents(x)
    rank, dtype = len(spatial), dtype_of(x)
    strides, dilations, reach = _geometry(attrs)
    before, after = attrs["pads"][:rank], attrs["pads"][rank:]
    counts = []
    for i, b, a, r, s in zip(spatial, before, after, reach, strides, strict=True):
        count = (i + b + a - r) // s + 1
        if attrs.get("ceil_mode") and (i + b + a - r) % s and count * s < i + b:  # a window that starts behind the image is none
            count += 1
        counts.append(count)
    behind = [max(0, (o - 1) * s + r - i - b) for o, s, r, i, b in zip(counts, strides, reach, spatial, before, strict=True)]
    lowest = -math.inf if "float" in dtype else np.iinfo(dtype).min
    widths = [0, 0, 0, 0, *(width for pair in zip(before, behind, strict=True) for width in pair)]
    padded = bb.emit(relax.op.nn.pad(x, widths, "constant", lowest)) if any(widths) else x
    order = reversed(range(rank)) if attrs.get("storage_order") else range(rank)
    weight, elements = [0] * rank, 1
    for axis in reversed(list(order)):
        weight[axis], elements = elements, elements * spatial[axis]
    best = places = None
    found = np.zeros(counts, bool)
    for tap in itertools.product(*(range(0, r, d) for r, d in zip(reach, dilations, strict=True))):
        ends = [t + (o - 1) * s + 1 for t, o, s in zip(tap, counts, strides, strict=True)]
        new = bb.emit(relax.op.strided_slice(padded, list(range(2, rank + 2)), list(tap), ends, strides))
        at = [t - b + s * np.arange(o) for t, b, s, o in zip(tap, before, strides, counts, strict=True)]
        inside = functools.reduce(np.logical_and.outer, [(0 <= a) & (a < i) for a, i in zip(at, spatial, strict=True)])
        here = relax.const(functools.reduce(np.add.outer, [a * w for a, w in zip(at, weight, strict=True)]), "int64")
        if best is None:
            best, places, found = new, here, inside
            continue
        greater = bb.emit(relax.op.greater(new, best))
        if "float" in dtype:  # a NaN is the maximum, the first of them its place
            comes = bb.emit(relax.op.logical_and(relax.op.isnan(new), relax.op.logical_not(relax.op.isnan(best))))
            greater = bb.emit(relax.op.logical_or(greater, comes))
        here_first = relax.const(inside & ~found)  # whatever it holds, the padding's was no place
        found |= inside
        places = bb.emit(relax.op.where(bb.emit(relax.op.logical_or(greater, here_first)), here, places))
        best = bb.emit(relax.op.maximum(best, new))
    images = np.arange(n * c).reshape(n, c, *[1] * rank) * math.prod(spatial)
    return relax.Tuple([best, bb.emit(relax.op.add(places, relax.const(images, "int64")))])
