"""Resize and Upsample: by TVM where its formula is ONNX's, else one matmul by a constant matrix of weights, or one gather, for each axis.

TVM derives the scale from the extents, ONNX uses the scale that is given: they differ unless it leads to whole extents. TVM resizes all
spatial axes, and knows neither antialiasing nor half_pixel_symmetric. Each of ONNX's modes is linear in the elements and works on one axis
after the other, so the weights of an axis are a matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from tvm import relax
from tvm.relax.frontend.onnx.onnx_frontend import Resize

from .fold import Graph
from .operands import Attributes, Operands, constant, extents

TVM_MODES = ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric", "tf_crop_and_resize")


@dataclass(frozen=True)
class Resampling:
    """For each axis its extent, its scale, its new extent and, for tf_crop_and_resize, the part of it that is looked at."""

    shape: tuple[int, ...]
    scales: tuple[float, ...]
    result: tuple[int, ...]
    roi: tuple[tuple[float, float], ...]

    @staticmethod
    def of(shape: tuple[int, ...], scales: Any, sizes: Any, roi: Any, attrs: Attributes) -> Resampling:
        """scales and sizes: one of them an array, one number for each axis of `axes`."""
        axes = [axis % len(shape) for axis in attrs.get("axes") or range(len(shape))]
        factors, result = [1.0] * len(shape), list(shape)
        window = [(0.0, 1.0)] * len(shape)
        policy = attrs.get("keep_aspect_ratio_policy", b"stretch").decode()
        if sizes is not None:
            ratios = [int(size) / shape[axis] for size, axis in zip(sizes, axes, strict=True)]
            if policy != "stretch":
                one = (min if policy == "not_larger" else max)(ratios)
                sizes = [int(shape[axis] * one + 0.5) for axis in axes]
                ratios = [one] * len(axes)
            for axis, size, ratio in zip(axes, sizes, ratios, strict=True):
                result[axis], factors[axis] = int(size), ratio
        else:
            for axis, scale in zip(axes, scales, strict=True):
                result[axis], factors[axis] = int(np.floor(np.float32(shape[axis]) * np.float32(scale))), float(scale)
        if roi is not None and len(roi) == 2 * len(axes):
            for position, axis in enumerate(axes):
                window[axis] = float(roi[position]), float(roi[position + len(axes)])
        return Resampling(shape, tuple(factors), tuple(result), tuple(window))

    def is_whole(self) -> bool:
        """Whether the scales lead to whole extents, so that they are the extents' ratios."""
        return all(abs(n * scale - m) < 1e-4 for n, scale, m in zip(self.shape, self.scales, self.result, strict=True))


def _coordinates(attrs: Attributes) -> str:
    return attrs.get("coordinate_transformation_mode", b"half_pixel").decode()


def _by_tvm(resampling: Resampling, attrs: Attributes) -> bool:
    mode = _coordinates(attrs)
    spatial = all(n == m for n, m in zip(resampling.shape[:2], resampling.result[:2], strict=True)) and 3 <= len(resampling.shape) <= 5
    single = mode == "align_corners" and 1 in resampling.result[2:]
    return spatial and resampling.is_whole() and not attrs.get("antialias") and mode in TVM_MODES and not single


def why_not(node: onnx.NodeProto, attrs: Attributes, graph: Graph) -> str | None:
    shape, modern = graph.shape(node.input[0]), len(node.input) > 2
    names = dict(zip(("roi", "scales", "sizes") if modern else ("scales",), node.input[1:], strict=False))
    given = {what: name for what, name in names.items() if name}
    if shape is None or any(name not in graph.constants for name in given.values()):
        return "its shape or its scales aren't constant"
    mode = "asymmetric" if not modern else _coordinates(attrs)
    if mode == "tf_half_pixel_for_nn":
        return "coordinate_transformation_mode=tf_half_pixel_for_nn"
    values = {what: graph.constants[name] for what, name in given.items()}
    resampling = _resampling(shape, values.get("scales", attrs.get("scales")), values.get("sizes"), values.get("roi"), attrs)
    if mode == "align_corners" and not resampling.is_whole():
        return f"align_corners, where scales of {shape} lead to fractions of an element"
    if mode == "tf_crop_and_resize" and not _by_tvm(resampling, attrs):
        return "tf_crop_and_resize of other axes than the spatial ones, or to fractions of an element"
    return None


def _resampling(shape: tuple[int, ...], scales: Any, sizes: Any, roi: Any, attrs: Attributes) -> Resampling:
    sizes = sizes if sizes is not None and len(sizes) else None
    return Resampling.of(shape, scales, sizes, roi, attrs)


def convert(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    """Operator set 10 has two operands and other defaults; exporters write an empty tensor for an absent operand."""
    if len(operands) == 2:
        return upsample(bb, operands, attrs)
    roi, scales, sizes = (constant(operand) for operand in (*operands[1:], None, None)[:3])
    return _resized(bb, operands[0], _resampling(extents(operands[0]), scales, sizes, roi, attrs), attrs)


def upsample(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    """Upsample and Resize-10 -> Resize with asymmetric coordinates, rounded down."""
    scales = attrs["scales"] if "scales" in attrs else constant(operands[1])
    modern = {**attrs, "coordinate_transformation_mode": b"asymmetric", "nearest_mode": b"floor"}
    return _resized(bb, operands[0], Resampling.of(extents(operands[0]), scales, None, None, modern), modern)


def _resized(bb: relax.BlockBuilder, x: relax.Expr, resampling: Resampling, attrs: Attributes) -> relax.Expr:
    if _by_tvm(resampling, attrs):
        roi = None
        if _coordinates(attrs) == "tf_crop_and_resize":
            roi = relax.const(np.array([begin for begin, _ in resampling.roi] + [end for _, end in resampling.roi], np.float32))
        given = {name: value for name, value in attrs.items() if name not in ("axes", "keep_aspect_ratio_policy")}
        return Resize._impl_v18(bb, [x, roi, None, relax.const(np.array(resampling.result, np.int64))], given, ({}, {}))
    rank = len(resampling.shape)
    for axis, (n, m, scale) in enumerate(zip(resampling.shape, resampling.result, resampling.scales, strict=True)):
        if n == m and scale == 1:
            continue
        at = _positions(n, m, scale, _coordinates(attrs))
        if attrs.get("mode", b"nearest") == b"nearest":
            x = bb.emit(relax.op.take(x, relax.const(_nearest(at, n, attrs), "int64"), axis))
            continue
        weights = relax.const(_weights(at, n, scale, attrs).T.copy(), x.ty.dtype.dtype)
        order = [*(a for a in range(rank) if a != axis), axis]
        product = bb.emit(relax.op.matmul(bb.emit(relax.op.permute_dims(x, order)), weights))
        x = bb.emit(relax.op.permute_dims(product, np.argsort(order).tolist()))
    return x


def _positions(n: int, m: int, scale: float, mode: str) -> np.ndarray:
    """Where the elements of the result lie among those of the input."""
    i = np.arange(m, dtype=np.float64)
    if mode == "align_corners":
        return i * (n - 1) / (m - 1) if m > 1 else i
    if mode == "asymmetric":
        return i / scale
    if mode == "pytorch_half_pixel" and m == 1:
        return i * 0
    at = (i + 0.5) / scale - 0.5
    return at + n / 2 * (1 - m / (scale * n)) if mode == "half_pixel_symmetric" else at


def _nearest(at: np.ndarray, n: int, attrs: Attributes) -> np.ndarray:
    rounding = attrs.get("nearest_mode", b"round_prefer_floor").decode()
    rounded = {
        "round_prefer_floor": np.ceil(at - 0.5),
        "round_prefer_ceil": np.floor(at + 0.5),
        "floor": np.floor(at),
        "ceil": np.ceil(at),
    }[rounding]
    return np.clip(rounded, 0, n - 1).astype(np.int64)


def _weights(at: np.ndarray, n: int, scale: float, attrs: Attributes) -> np.ndarray:
    """(m, n): what each element of the input counts for each of the result."""
    cubic = attrs["mode"] == b"cubic"
    a = attrs.get("cubic_coeff_a", -0.75)
    shrink = min(scale, 1.0) if attrs.get("antialias") else 1.0
    reach = int(np.ceil((2 if cubic else 1) / shrink))
    taps = np.floor(at).astype(np.int64)[:, None] + np.arange(-reach, reach + 2)
    distance = np.abs(taps - at[:, None]) * shrink
    if cubic:
        near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
        far = ((distance - 5) * distance + 8) * distance * a - 4 * a
        weight = np.where(distance <= 1, near, np.where(distance < 2, far, 0))
    else:
        weight = np.maximum(1 - distance, 0)
    if attrs.get("exclude_outside"):
        weight = np.where((taps < 0) | (taps >= n), 0, weight)
    weight /= weight.sum(axis=1, keepdims=True)
    matrix = np.zeros((len(at), n))
    np.add.at(matrix, (np.arange(len(at))[:, None], np.clip(taps, 0, n - 1)), weight)
    return matrix
