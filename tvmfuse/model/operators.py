"""Where TVM's converters are replaced or refused, and why.

CONVERTERS  ours, used instead of TVM's. Most of TVM's that are replaced call `emit_te`: the operator is then a PrimFunc of its
            own, invisible to every Relax pass that follows.
REFUSALS    conditions under which TVM's converter gives another result than ONNX, found by comparing it with ONNX's node tests.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import tvm
from tvm import relax

from .fold import Graph, attributes

Operands = Sequence[relax.Expr | None]
Attributes = Mapping[str, Any]
Converter = Callable[[relax.BlockBuilder, Operands, Attributes], relax.Expr]


def _operand(operands: Operands, index: int) -> relax.Expr | None:
    return operands[index] if index < len(operands) else None


def _constant(value: relax.Expr | None) -> np.ndarray | None:
    return value.value.numpy() if isinstance(value, tvm.ir.GenericConst) else None


def _pairwise(op: Callable[[relax.Expr, relax.Expr], relax.Expr]) -> Converter:
    """TVM's stacks all operands and reduces, which hides a residual Sum from the passes that fuse it."""

    def convert(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
        return functools.reduce(lambda left, right: bb.emit(op(left, right)), operands)

    return convert


def _mean(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    total = _pairwise(relax.op.add)(bb, operands, attrs)
    return relax.op.divide(total, relax.const(len(operands), total.ty.dtype.dtype))


def _clip(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    """Bounds are attributes up to operator set 10, then operands. A NaN bound doesn't bind."""
    x = operands[0]
    dtype = x.ty.dtype.dtype
    bounds = []
    for index, name in ((1, "min"), (2, "max")):
        bound = relax.const(attrs[name], dtype) if name in attrs else _operand(operands, index)
        value = _constant(bound)
        bounds.append(None if value is not None and np.isnan(value) else bound)
    low, high = bounds
    if all(isinstance(bound, tvm.ir.GenericConst) for bound in bounds):
        return relax.op.clip(x, *(relax.prim_value(tvm.tirx.const(_constant(bound).item(), dtype)) for bound in bounds))
    if low is not None:
        x = bb.emit(relax.op.maximum(x, low))
    return x if high is None else relax.op.minimum(x, high)


def _einsum(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    return relax.op.einsum(tuple(operands), attrs["equation"].decode())


def _gemm(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    """alpha scales the product, where an epilogue can absorb it; TVM's scales A, a pass of its own."""
    a, b, c = operands[0], operands[1], _operand(operands, 2)
    a = relax.op.permute_dims(a, (1, 0)) if attrs.get("transA") else a
    b = relax.op.permute_dims(b, (1, 0)) if attrs.get("transB") else b
    dtype = a.ty.dtype.dtype if hasattr(a.ty, "dtype") else operands[0].ty.dtype.dtype
    result = bb.emit(relax.op.matmul(a, b), attrs["tvm_custom"]["name"])
    if attrs.get("alpha", 1.0) != 1.0:
        result = bb.emit(relax.op.multiply(result, relax.const(attrs["alpha"], dtype)))
    if c is None:
        return result
    if attrs.get("beta", 1.0) != 1.0:
        c = bb.emit(relax.op.multiply(c, relax.const(attrs["beta"], dtype)))
    return relax.op.add(result, c)


def _pad(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    """Pads are attributes up to operator set 10, then operands; axes came with 18."""
    x = operands[0]
    rank = len(x.ty.shape)
    pads = attrs.get("pads") or _constant(_operand(operands, 1)).tolist()
    axes = _constant(_operand(operands, 3))
    axes = list(range(rank)) if axes is None else [int(axis) % rank for axis in axes]
    widths = [0] * (2 * rank)
    for position, axis in enumerate(axes):
        widths[2 * axis : 2 * axis + 2] = pads[position], pads[position + len(axes)]
    mode = {"constant": "constant", "reflect": "reflect", "edge": "replicate", "wrap": "circular"}[attrs.get("mode", b"constant").decode()]
    value = _constant(_operand(operands, 2))
    if min(widths) < 0:
        ends = [int(extent) + min(after, 0) for extent, after in zip(x.ty.shape, widths[1::2], strict=True)]
        begins = [max(-before, 0) for before in widths[::2]]
        x = bb.emit(relax.op.strided_slice(x, list(range(rank)), begins, ends))
        widths = [max(width, 0) for width in widths]
    return relax.op.nn.pad(x, widths, mode, attrs.get("value", 0.0) if value is None else value.item())


def _thresholded_relu(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    """TVM's multiplies by 0, which makes NaN of -inf."""
    (x,) = operands
    dtype = x.ty.dtype.dtype
    return relax.op.where(relax.op.greater(x, relax.const(attrs.get("alpha", 1.0), dtype)), x, relax.const(0.0, dtype))


CONVERTERS: dict[str, Converter] = {
    "Clip": _clip,
    "Einsum": _einsum,
    "Gemm": _gemm,
    "Max": _pairwise(relax.op.maximum),
    "Mean": _mean,
    "Min": _pairwise(relax.op.minimum),
    "Pad": _pad,
    "Sum": _pairwise(relax.op.add),
    "ThresholdedRelu": _thresholded_relu,
}

Refusal = Callable[[Mapping[str, Any], onnx.NodeProto, Graph], str | None]


def _always(reason: str) -> Refusal:
    return lambda attrs, node, graph: reason


def _when(attribute: str, values: tuple[Any, ...], reason: str) -> Refusal:
    return lambda attrs, node, graph: reason if attrs.get(attribute) in values else None


REFUSALS: dict[str, Refusal] = {}


def why_not(node: onnx.NodeProto, graph: Graph) -> str | None:
    """Why this standard operator would come out wrong, or None."""
    refusal = REFUSALS.get(node.op_type)
    return refusal(attributes(node), node, graph) if refusal else None
