"""Quantised operators, in integers: differences from the zero points are multiplied and summed in int32, which can't round.

    MatMulInteger(a, b, za, zb)      ->  matmul(int32(a) - za, int32(b) - zb)
    QLinearMatMul                    ->  the same, then saturate(round(float32(sum) * (sa * sb / sy)) + zy), ties to even
    QuantizeLinear(x, s, z)          ->  saturate(round(x / s) + z)
    DequantizeLinear(x, s, z)        ->  float(x - z) * s

TVM's own take neither blocks nor a scale for each row, and multiply in the type of the scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from tvm import relax
from tvm.relax.frontend.onnx.onnx_frontend import Conv

from .operands import Attributes, Operands, dtype_of, extents, operand


def quantize(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    x, scale, zero_point = operands[0], operands[1], operand(operands, 2)
    named = str(onnx.helper.tensor_dtype_to_np_dtype(attrs["output_dtype"])) if attrs.get("output_dtype") else "uint8"
    dtype = named if zero_point is None else dtype_of(zero_point)
    spread = _spread(bb, _as(bb, scale, "float32"), x, attrs)
    zero = None if zero_point is None else _spread(bb, _as(bb, zero_point, "float32"), x, attrs)
    return _saturated(bb, bb.emit(relax.op.divide(_as(bb, x, "float32"), spread)), zero, dtype)


def dequantize(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    x, scale, zero_point = operands[0], operands[1], operand(operands, 2)
    dtype = str(onnx.helper.tensor_dtype_to_np_dtype(attrs["output_dtype"])) if attrs.get("output_dtype") else dtype_of(scale)
    difference = _as(bb, x, "int32")
    if zero_point is not None:
        difference = bb.emit(relax.op.subtract(difference, _spread(bb, _as(bb, zero_point, "int32"), x, attrs)))
    product = relax.op.multiply(_as(bb, difference, "float32"), _spread(bb, _as(bb, scale, "float32"), x, attrs))
    return _as(bb, bb.emit(product), dtype)


def matmul_integer(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    a, b = operands[:2]
    return relax.op.matmul(_difference(bb, a, _rows(bb, operand(operands, 2))), _difference(bb, b, _single(bb, operand(operands, 3))))


def qlinear_matmul(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    a, scale_a, zero_a, b, scale_b, zero_b, scale, zero = operands
    total = bb.emit(relax.op.matmul(_difference(bb, a, _rows(bb, zero_a)), _difference(bb, b, _single(bb, zero_b))))
    scales = [_as(bb, s, "float32") for s in (_rows(bb, scale_a), _single(bb, scale_b), _single(bb, scale))]
    return _requantized(bb, total, scales, _single(bb, zero), dtype_of(zero))


def conv_integer(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    x, w = operands[:2]
    return _conv(bb, _difference(bb, x, _single(bb, operand(operands, 2))), w, operand(operands, 3), attrs)


def qlinear_conv(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    x, scale_x, zero_x, w, scale_w, zero_w, scale, zero = operands[:8]
    total = bb.emit(_conv(bb, _difference(bb, x, _single(bb, zero_x)), w, zero_w, attrs))
    bias = operand(operands, 8)
    rank = len(extents(x))
    if bias is not None:
        total = bb.emit(relax.op.add(total, bb.emit(relax.op.reshape(bias, _on_axis(-1, 1, rank)))))
    scale_w = _single(bb, scale_w)
    if extents(scale_w):
        scale_w = bb.emit(relax.op.reshape(scale_w, _on_axis(-1, 1, rank)))
    scales = [_as(bb, s, "float32") for s in (_single(bb, scale_x), scale_w, _single(bb, scale))]
    return _requantized(bb, total, scales, _single(bb, zero), dtype_of(zero))


def _conv(bb: relax.BlockBuilder, x: relax.Expr, w: relax.Expr, zero_point: Any, attrs: Attributes) -> relax.Expr:
    zero = _single(bb, zero_point)
    if zero is not None and extents(zero):  # one for each output channel
        zero = bb.emit(relax.op.reshape(zero, _on_axis(-1, 0, len(extents(w)))))
    return Conv._impl_v11(bb, [x, _difference(bb, w, zero), None], dict(attrs), ({}, {}))


def _requantized(bb: relax.BlockBuilder, total: relax.Expr, scales: Sequence[relax.Expr], zero: relax.Expr, dtype: str) -> relax.Expr:
    left, right, scale = scales
    factor = bb.emit(relax.op.divide(bb.emit(relax.op.multiply(left, right)), scale))
    return _saturated(bb, bb.emit(relax.op.multiply(_as(bb, total, "float32"), factor)), _as(bb, zero, "float32"), dtype)


def _saturated(bb: relax.BlockBuilder, value: relax.Expr, zero: relax.Expr | None, dtype: str) -> relax.Expr:
    limits = np.iinfo(dtype)
    rounded = bb.emit(relax.op.round(value))
    moved = rounded if zero is None else bb.emit(relax.op.add(rounded, zero))
    low, high = (relax.const(float(limit), "float32") for limit in (limits.min, limits.max))
    return relax.op.astype(bb.emit(relax.op.minimum(bb.emit(relax.op.maximum(moved, low)), high)), dtype)


def _as(bb: relax.BlockBuilder, value: relax.Expr, dtype: str) -> relax.Expr:
    return value if dtype_of(value) == dtype else bb.emit(relax.op.astype(value, dtype))


def _difference(bb: relax.BlockBuilder, value: relax.Expr, zero: relax.Expr | None) -> relax.Expr:
    wide = _as(bb, value, "int32")
    return wide if zero is None else bb.emit(relax.op.subtract(wide, _as(bb, zero, "int32")))


def _single(bb: relax.BlockBuilder, value: relax.Expr | None) -> relax.Expr | None:
    """One number as a tensor of rank 0, however it is written."""
    return bb.emit(relax.op.reshape(value, ())) if value is not None and extents(value) == (1,) else value


def _rows(bb: relax.BlockBuilder, value: relax.Expr | None) -> relax.Expr | None:
    """A number for each row of a matrix, as a column."""
    value = _single(bb, value)
    return bb.emit(relax.op.expand_dims(value, -1)) if value is not None and len(extents(value)) == 1 else value


def _spread(bb: relax.BlockBuilder, value: relax.Expr, x: relax.Expr, attrs: Attributes) -> relax.Expr:
    """A scale or zero point of the tensor, of each slice of an axis, or of each block of one, to broadcast over x."""
    shape, value = extents(x), _single(bb, value)
    if not extents(value):
        return value
    axis = attrs.get("axis", 1) % len(shape)
    if block := attrs.get("block_size"):
        repeated = bb.emit(relax.op.repeat(value, block, axis))
        return bb.emit(relax.op.strided_slice(repeated, [axis], [0], [shape[axis]]))
    return bb.emit(relax.op.reshape(value, _on_axis(-1, axis, len(shape)))) if len(extents(value)) == 1 else value


def _on_axis(extent: int, axis: int, rank: int) -> tuple[int, ...]:
    return tuple(extent if position == axis else 1 for position in range(rank))
