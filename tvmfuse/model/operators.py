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
from tvm.relax.frontend.onnx.onnx_frontend import LayerNormalization, Resize, Slice

from .fold import Graph, attributes

Operands = Sequence[Any]  # relax.Expr, or None for an absent one
Attributes = Mapping[str, Any]
Converter = Callable[[relax.BlockBuilder, Operands, Attributes], relax.Expr]


def _operand(operands: Operands, index: int) -> Any:
    return operands[index] if index < len(operands) else None


def _constant(value: relax.Expr | None) -> Any:
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
    values = [_constant(bound) for bound in bounds]
    if all(value is not None for value in values) and values[0] <= values[1]:
        return relax.op.clip(x, *(relax.prim_value(tvm.tirx.const(value.item(), dtype)) for value in values))
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


def _pow(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    """The exponent may have another type than the base, which is the result's."""
    base, exponent = operands
    dtype = base.ty.dtype.dtype
    value = _constant(exponent)
    return relax.op.power(base, relax.op.astype(exponent, dtype) if value is None else relax.const(value, dtype))


def _resize(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    """Operator set 10 has two operands and other defaults; exporters write an empty tensor for an absent operand."""
    if len(operands) == 2:
        return _upsample(bb, operands, attrs)
    present = [None if (value := _constant(operand)) is not None and value.size == 0 else operand for operand in operands]
    return Resize._impl_v18(bb, present, attrs, ({}, {}))


def _upsample(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    """Upsample and Resize-10 -> Resize with asymmetric coordinates, rounded down."""
    scales = relax.const(np.array(attrs["scales"], np.float32)) if "scales" in attrs else operands[1]
    modern = {**attrs, "coordinate_transformation_mode": b"asymmetric", "nearest_mode": b"floor"}
    return Resize._impl_v18(bb, [operands[0], None, scales], modern, ({}, {}))


def _slice(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    """Up to operator set 9 the limits are attributes; TVM reads operands only."""
    starts, ends, axes, steps = (_operand(operands, index) for index in range(1, 5))
    if "starts" in attrs:
        starts, ends = attrs["starts"], attrs["ends"]
        axes = attrs.get("axes", range(len(starts)))
        return relax.op.strided_slice(operands[0], list(axes), list(starts), list(ends))
    return Slice._impl_v13(bb, [operands[0], starts, ends, axes, steps], attrs, ({}, {}))


def _thresholded_relu(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    """TVM's multiplies by 0, which makes NaN of -inf."""
    (x,) = operands
    dtype = x.ty.dtype.dtype
    return relax.op.where(relax.op.greater(x, relax.const(attrs.get("alpha", 1.0), dtype)), x, relax.const(0.0, dtype))


def _elu(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    """x > 0 ? x : alpha * (e**x - 1). TVM's subtracts two relus, which loses NaN, and has constants of float32 only."""
    (x,) = operands
    dtype = x.ty.dtype.dtype
    below = relax.op.multiply(relax.op.subtract(relax.op.exp(x), relax.const(1.0, dtype)), relax.const(attrs.get("alpha", 1.0), dtype))
    return relax.op.where(relax.op.greater(x, relax.const(0.0, dtype)), x, below)


def _selu(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    """gamma * elu(x), with ONNX's defaults."""
    (x,) = operands
    alpha, gamma = attrs.get("alpha", 1.6732632423543772), attrs.get("gamma", 1.0507009873554805)
    return relax.op.multiply(bb.normalize(_elu(bb, operands, {"alpha": alpha})), relax.const(gamma, x.ty.dtype.dtype))


def _layer_norm(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    """TVM legalises its own for float32 and float16 only; in float64 it is written out."""
    x, scale, bias = operands[0], operands[1], _operand(operands, 2)
    dtype = x.ty.dtype.dtype
    if str(dtype) != "float64":
        return LayerNormalization._impl_v17(bb, [x, scale, bias], attrs, ({}, {}))
    rank = len(x.ty.shape)
    axes = list(range(attrs.get("axis", -1) % rank, rank))
    centred = bb.emit(relax.op.subtract(x, bb.emit(relax.op.mean(x, axes, keepdims=True))))
    variance = bb.emit(relax.op.mean(relax.op.multiply(centred, centred), axes, keepdims=True))
    spread = relax.op.sqrt(relax.op.add(variance, relax.const(attrs.get("epsilon", 1e-5), dtype)))
    normal = bb.emit(relax.op.multiply(relax.op.divide(centred, spread), scale))
    absent = relax.const(0, "float32")  # of the outputs that only training reads
    return relax.Tuple([normal if bias is None else bb.emit(relax.op.add(normal, bias)), absent, absent])


def _gather(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    """Indices from -extent to extent - 1. Others are an error in ONNX; TVM's would read whatever lies there, this the nearest element."""
    data, indices = operands
    axis = attrs.get("axis", 0)
    dtype = indices.ty.dtype.dtype
    extent = relax.const(int(data.ty.shape[axis]), dtype)
    from_end = relax.op.less(indices, relax.const(0, dtype))
    return relax.op.take(data, relax.op.where(from_end, relax.op.add(indices, extent), indices), axis, mode="clip")


CONVERTERS: dict[str, Converter] = {
    "Clip": _clip,
    "Einsum": _einsum,
    "Elu": _elu,
    "Gather": _gather,
    "Gemm": _gemm,
    "LayerNormalization": _layer_norm,
    "Max": _pairwise(relax.op.maximum),
    "Mean": _mean,
    "Min": _pairwise(relax.op.minimum),
    "Pad": _pad,
    "Pow": _pow,
    "Resize": _resize,
    "Selu": _selu,
    "Slice": _slice,
    "Sum": _pairwise(relax.op.add),
    "ThresholdedRelu": _thresholded_relu,
    "Upsample": _upsample,
}


def _why_not_resize(node: onnx.NodeProto, attrs: Attributes, graph: Graph) -> str | None:
    """TVM derives the scale from the extents, ONNX uses the scale that is given: they differ unless it leads to whole extents."""
    mode = attrs.get("coordinate_transformation_mode", b"half_pixel").decode()
    if mode in ("half_pixel_symmetric", "tf_half_pixel_for_nn"):
        return f"coordinate_transformation_mode={mode}"
    if attrs.get("antialias"):
        return "antialias=1"
    if attrs.get("axes"):
        return "it has axes"
    if attrs.get("keep_aspect_ratio_policy", b"stretch") != b"stretch":
        return f"keep_aspect_ratio_policy={attrs['keep_aspect_ratio_policy'].decode()}"
    extents = graph.shape(node.output[0]) or ()
    if mode == "align_corners" and 1 in extents[2:]:
        return "align_corners to a single element"
    name = node.input[1 if len(node.input) == 2 else 2] if len(node.input) > 1 else ""
    scales = attrs.get("scales", graph.constants.get(name, ()))
    shape = graph.shape(node.input[0]) or ()
    if len(scales):
        exact = np.multiply(shape, np.asarray(scales, np.float64))
        if np.abs(exact - np.round(exact)).max() > 1e-4:
            return f"scales {tuple(round(float(scale), 4) for scale in scales)} of {shape} lead to fractions of an element"
    return None


def _why_not_batch_norm(node: onnx.NodeProto, attrs: Attributes, graph: Graph) -> str | None:
    if attrs.get("training_mode"):
        return "training_mode=1"
    return None if attrs.get("spatial", 1) else "spatial=0"


def _why_not_pow(node: onnx.NodeProto, attrs: Attributes, graph: Graph) -> str | None:
    return "a power of integers" if "int" in (graph.dtype(node.input[0]) or "") else None


def _why_not_full_rms_norm(node: onnx.NodeProto, attrs: Attributes, graph: Graph) -> str | None:
    rank = len(graph.shape(node.input[0]) or ())
    return "it normalises over every axis" if attrs.get("axis", -1) in (0, -rank) else None


def _why_not_bool(node: onnx.NodeProto, attrs: Attributes, graph: Graph) -> str | None:
    return "a reduction of booleans" if graph.dtype(node.input[0]) == "bool" else None


REFUSALS: dict[str, Callable[[onnx.NodeProto, Attributes, Graph], str | None]] = {
    "Attention": lambda node, attrs, graph: "TVM's converter is for another operator of this name",
    "BatchNormalization": _why_not_batch_norm,
    "BitShift": lambda node, attrs, graph: "a shift by the width or more gives 0 in ONNX and is undefined in TVM",
    "ConvTranspose": lambda node, attrs, graph: "it gives output_shape instead of pads" if "output_shape" in attrs else None,
    "Dropout": lambda node, attrs, graph: "training_mode=1",
    "IsInf": lambda node, attrs, graph: "it detects one sign" if 0 in attrs.values() else None,
    "Pow": _why_not_pow,
    "ReduceMax": _why_not_bool,
    "ReduceMin": _why_not_bool,
    "Resize": _why_not_resize,
    "RMSNormalization": _why_not_full_rms_norm,
    "RoiAlign": lambda node, attrs, graph: "mode=max" if attrs.get("mode") == b"max" else None,
    "Upsample": _why_not_resize,
}


def why_not(node: onnx.NodeProto, graph: Graph) -> str | None:
    """Why this standard operator would come out wrong, or None."""
    refusal = REFUSALS.get(node.op_type)
    return refusal(node, attributes(node), graph) if refusal else None
