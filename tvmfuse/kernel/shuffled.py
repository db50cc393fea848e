"""Channel shuffles that the convolution after them reads through.

    y = permute_dims(x (n, h, w, 4, 17), (0, 1, 2, 4, 3)); z = call_tir(f, y, w)
    ->  z = call_tir(f', x, w)

f loads one channel of one pixel at a time, which costs the same wherever that is: f' loads it from where x has it.
"""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.ir import Call, Expr, TensorLoad

from ..graph.shuffle import Shuffle
from . import emit
from .concat import split_rows, view_of


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


def reading(func: tirx.PrimFunc, position: int, shuffle: Shuffle) -> tirx.PrimFunc:
    """A kernel for which `reads_scalars` holds, on pixels whose channels are those before the shuffle.

    Every axis outside the channels has to be addressed by a product with its stride: a term of the offset is a pixel if it is a
    multiple of the number of channels, and else a channel.
    """
    view = view_of(func, func.params[position])
    channels = len(shuffle.sources)
    extents = [shuffle.extents[axis] for axis in shuffle.axes]
    strides = emit.strides(shuffle.extents)

    def moved(offset: Expr) -> Expr:
        pixel, channel = split_rows(offset, channels)
        index = emit.unravel(channel, extents)
        return pixel * channels + sum(at * strides[axis] for at, axis in zip(index, shuffle.axes, strict=True))

    def load(node: TensorLoad) -> Expr:
        return tirx.BufferLoad(view, [moved(node.indices[0])]) if node.source.same_as(view) else node

    body = tvm_ffi.structural_map(func.body, (TensorLoad, load))
    return tirx.PrimFunc(func.params, body, func.ret_type, attrs=func.attrs)
