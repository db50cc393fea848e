"""Images in another order that the convolution after them reads through.

    y = permute_dims(x (n, h, w, 4, 17), (0, 1, 2, 4, 3)); z = call_tir(f, y, w)        shuffled channels
    y = permute_dims(x (1, 3, h, w), (0, 2, 3, 1)); z = call_tir(f, y, w)               planes, as a model's input has them
    ->  z = call_tir(f', x, w)

f loads one channel of one pixel at a time, which costs the same wherever that is: f' loads it from where x has it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import tvm_ffi
from tvm import tirx
from tvm.ir import Call, Expr, TensorLoad

from ..graph.shuffle import Shuffle, permuted, shuffle_by
from . import emit
from .concat import split_rows, view_of


@dataclass(frozen=True)
class Planes:
    """Every channel's pixels, one channel after the other."""

    channels: int
    pixels: int


Order: TypeAlias = Shuffle | Planes


def order_by(call: Any, channels: int) -> Order | None:
    """Where a permute_dims to pixels of so many channels has them from; None if that is neither a shuffle nor planes of one image."""
    return shuffle_by(call, channels) or _planes_by(call, channels)


def _planes_by(call: Any, channels: int) -> Planes | None:
    if (permutation := permuted(call)) is None:
        return None
    extents, every = permutation
    axes = [axis for axis in every if extents[axis] > 1]
    stored = sorted(axes)
    for first in range(1, len(axes)):
        if axes == stored[first:] + stored[:first] and math.prod(extents[axis] for axis in stored[:first]) == channels:
            return Planes(channels, math.prod(extents[axis] for axis in stored[first:]))
    return None


def reads_scalars(func: tirx.PrimFunc, position: int) -> bool:
    """Whether the kernel loads this parameter one element at a time, and doesn't store to it."""
    view = view_of(func, func.params[position])
    others: list[Any] = []

    def loaded(node: TensorLoad) -> None:
        if node.source.same_as(view) and node.indices[0].ty.dtype.lanes > 1:
            others.append(node)

    def stored(node: tirx.BufferStore) -> None:
        if node.buffer.same_as(view):
            others.append(node)

    def called(call: Call) -> None:
        if any(arg.same_as(view) for arg in call.args):
            others.append(call)

    tvm_ffi.structural_walk(func.body, ((TensorLoad, loaded), (tirx.BufferStore, stored), (Call, called)))
    return not others


def reading(func: tirx.PrimFunc, position: int, order: Order) -> tirx.PrimFunc:
    """A kernel for which `reads_scalars` holds, on an image in the order before the permutation.

    Every axis outside the channels has to be addressed by a product with its stride: a term of the offset is a pixel if it is a
    multiple of the number of channels, and else a channel.
    """
    view = view_of(func, func.params[position])

    def moved(offset: Expr) -> Expr:
        if isinstance(order, Planes):
            pixel, channel = split_rows(offset, order.channels)
            return channel * order.pixels + pixel
        channels, strides = len(order.sources), emit.strides(order.extents)
        pixel, channel = split_rows(offset, channels)
        index = emit.unravel(channel, [order.extents[axis] for axis in order.axes])
        return pixel * channels + sum(at * strides[axis] for at, axis in zip(index, order.axes, strict=True))

    def load(node: TensorLoad) -> Expr:
        return tirx.BufferLoad(view, [moved(node.indices[0])]) if node.source.same_as(view) else node

    body = tvm_ffi.structural_map(func.body, (TensorLoad, load))
    return tirx.PrimFunc(func.params, body, func.ret_type, attrs=func.attrs)
