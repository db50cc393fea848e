"""Discrete Fourier transforms as matmuls by constant matrices of sines and cosines, rounded once from float64."""

from __future__ import annotations

import numpy as np
import onnx
from tvm import relax

from .fold import Graph
from .operands import Attributes, Operands, constant, dtype_of, extents, operand

LONGEST = 4096  # its two matrices of float32 take 128 MiB


def why_not_dft(node: onnx.NodeProto, attrs: Attributes, graph: Graph) -> str | None:
    for name in node.input[1:]:
        if name and name not in graph.constants:
            return "its length or axis isn't constant"
    return None if max(graph.shape(node.input[0]) or (0,)) <= LONGEST else f"a transform of more than {LONGEST} elements"


def why_not_stft(node: onnx.NodeProto, attrs: Attributes, graph: Graph) -> str | None:
    given = dict(enumerate(node.input))
    if any(given.get(index) and given[index] not in graph.constants for index in (1, 3)):
        return "its step or its frames' length isn't constant"
    shape = graph.shape(node.output[0])
    return "the shape of its output isn't known" if shape is None else None if shape[2] <= LONGEST else f"frames of more than {LONGEST}"


def dft(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    """x (..., n, ..., 1 or 2), the last axis holding real and imaginary part."""
    x = operands[0]
    rank, given = len(extents(x)), constant(operand(operands, 2))
    if attrs["tvm_custom"]["opset"] < 20:
        axis = attrs.get("axis", 1)
    else:
        axis = -2 if given is None else int(given.item())
    axis %= rank
    length = constant(operand(operands, 1))
    inverse, onesided = bool(attrs.get("inverse")), bool(attrs.get("onesided"))
    present = extents(x)[axis]
    n = (2 * (present - 1) if inverse and onesided else present) if length is None else int(length.item())
    bins = n // 2 + 1 if onesided else n
    read = bins if inverse and onesided else n
    order = [a for a in range(rank) if a not in (axis, rank - 1)] + [axis]
    parts = []
    for part in range(extents(x)[-1]):
        plane = bb.emit(relax.op.strided_slice(x, [rank - 1], [part], [part + 1]))
        plane = bb.emit(relax.op.permute_dims(plane, [*order, rank - 1]))
        plane = bb.emit(relax.op.reshape(plane, extents(plane)[:-1]))
        if present > read:
            plane = bb.emit(relax.op.strided_slice(plane, [rank - 2], [0], [read]))
        elif present < read:
            plane = bb.emit(relax.op.nn.pad(plane, [0] * (2 * (rank - 2)) + [0, read - present]))
        parts.append(plane)
    transformed = _transform(bb, parts, n, read, n if inverse else bins, inverse, real=inverse and onesided)
    back = [order.index(a) if a != rank - 1 else rank - 1 for a in range(rank)]
    return relax.op.permute_dims(transformed, back)


def stft(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    """signal (b, n[, 1 or 2]) -> (b, frames, bins, 2)."""
    signal, step, window = operands[0], int(constant(operands[1]).item()), operand(operands, 2)
    given = constant(operand(operands, 3))
    length = int(given.item()) if given is not None else extents(window)[0]
    batch, samples, *components = extents(signal)
    frames = (samples - length) // step + 1
    at = np.arange(frames)[:, None] * step + np.arange(length)
    parts = []
    for part in range(components[0] if components else 1):
        plane = bb.emit(relax.op.strided_slice(signal, [2], [part], [part + 1])) if components else signal
        plane = bb.emit(relax.op.reshape(plane, (batch, samples)))
        frame = bb.emit(relax.op.take(plane, relax.const(at, "int64"), axis=1))
        parts.append(frame if window is None else bb.emit(relax.op.multiply(frame, window)))
    bins = length // 2 + 1 if attrs.get("onesided", 1) else length
    return _transform(bb, parts, length, length, bins, inverse=False, real=False)


def _transform(bb: relax.BlockBuilder, parts: list[relax.Expr], n: int, read: int, made: int, inverse: bool, real: bool) -> relax.Expr:
    """The last axis, of `read` elements, becomes `made` elements of a transform of n, and (real, imaginary) a new last axis."""
    dtype = dtype_of(parts[0])
    angle = 2 * np.pi * (np.outer(np.arange(read), np.arange(made)) % n) / n
    scale = np.full((read, 1), 1 / n if inverse else 1.0)
    if real:  # bins that are left out are the conjugates of those that are there
        scale[1 : (n + 1) // 2] *= 2
    cosine, sine = np.cos(angle) * scale, np.sin(angle) * scale * (1 if inverse else -1)

    def times(part: relax.Expr, matrix: np.ndarray) -> relax.Expr:
        return bb.emit(relax.op.matmul(part, relax.const(matrix, dtype)))

    re, im = parts[0], parts[1] if len(parts) > 1 else None
    result = [times(re, cosine)] + ([] if real else [times(re, sine)])
    if im is not None:
        result[0] = bb.emit(relax.op.subtract(result[0], times(im, sine)))
        if not real:
            result[1] = bb.emit(relax.op.add(result[1], times(im, cosine)))
    return bb.emit(relax.op.stack(result, axis=-1))
