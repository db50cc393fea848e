"""SinkShuffle: a shuffle of channels moves below a depthwise convolution, to the convolution that can read through it.

Rewrite  conv2d(shuffle(x), W (c, kh, kw, 1), groups=c)  ->  shuffle(conv2d(x, W'), groups=c))   W' has W's channels in the order of x
         where shuffle(x) = reshape(permute_dims(reshape(x, (n, h, w, a, b)), (0, 1, 2, 4, 3)), (n, h, w, c)), or of more factors of c
Refuses  unless nothing else reads what lies between, and elementwise operators of constants alone lie between the depthwise
         convolution and one that isn't: elsewhere the shuffle would only be copied later, or keep an epilogue from its anchor.
Why      what follows it of the epilogue is hoisted above the shuffle then, and the copy goes (kernel/reordered.py).
Source   ShuffleNet's units, Zhang et al., CVPR 2018; the rewrite is own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import relax
from tvm.ir import Call
from tvm.relax import Expr, Var

from .hoist import EPILOGUE_OPS
from .region import Flow
from .rewrite import Rewriter, array_of, as_pass, constant, is_static, op_name, permute, reshape, shape_of
from .simplify import permute_axes


@dataclass(frozen=True)
class Shuffle:
    """A permutation of the channels of each pixel: they are split into `extents`, and these axes permuted by `axes`."""

    extents: tuple[int, ...]
    axes: tuple[int, ...]

    @property
    def sources(self) -> np.ndarray:
        """For each channel of the result, which one of the source it is."""
        return np.arange(math.prod(self.extents)).reshape(self.extents).transpose(self.axes).ravel()


def permuted(call: Any) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """(extents of what a permute_dims reads, its axes in the order of the result), where they are known."""
    if op_name(call) != "permute_dims" or not is_static(call) or not is_static(call.args[0]):
        return None
    return shape_of(call.args[0]), tuple(permute_axes(call))


def shuffle_by(call: Any, channels: int) -> Shuffle | None:
    """What a permute_dims does to pixels of so many channels; None if it doesn't leave each pixel where it is."""
    if (permutation := permuted(call)) is None:
        return None
    extents, axes = permutation
    for first in range(len(axes)):
        if axes[first] != first or math.prod(extents[first:]) == channels:
            break
    if math.prod(extents[first:]) != channels or min(axes[first:]) < first:
        return None
    return Shuffle(extents[first:], tuple(axis - first for axis in axes[first:]))


def is_depthwise(call: Expr) -> bool:
    """Whether it is a convolution in NHWC of one channel a group, with constant weights."""
    if op_name(call) != "nn.conv2d" or not is_static(call) or array_of(call.args[1]) is None:
        return False
    layouts = (call.attrs.data_layout, call.attrs.kernel_layout, call.attrs.out_layout)
    return layouts == ("NHWC", "OHWI", "NHWC") and int(call.attrs.groups) == shape_of(call.args[0])[3] == shape_of(call)[3] > 1


@as_pass
class SinkShuffle(Rewriter):
    """Permute the weights of a depthwise convolution instead of the image that it reads."""

    def run(self, func: relax.Function) -> relax.Function:
        blocks = func.body.blocks if isinstance(func.body, relax.SeqExpr) else []
        self._flow = Flow.of(blocks[0]) if blocks and isinstance(blocks[0], relax.DataflowBlock) else Flow({}, {})
        return super().run(func)

    def rewrite(self, value: Expr) -> Expr:
        if not is_depthwise(value) or not self.single_user(value.args[0]):
            return value
        data, weights = value.args
        merged, (n, h, w, c) = self.producer(data), shape_of(data)
        if op_name(merged) != "reshape" or not self.single_user(merged.args[0]) or not self._reaches_convolution():
            return value
        moved_image = self.producer(merged.args[0])
        shuffle = shuffle_by(moved_image, c)
        if shuffle is None:
            return value
        own = array_of(weights)[np.argsort(shuffle.sources)]
        source = moved_image.args[0]
        while op_name(split := self.producer(source)) == "reshape" and is_static(split.args[0]):
            source = split.args[0]
        image = self.emit(reshape(source, (n, h, w, c)))
        result = self.emit(Call(value.op, [image, constant(own)], value.attrs, value.ty_args), self.name)
        pixels = shape_of(value)[:3]
        factors = self.emit(reshape(result, (*pixels, *shuffle.extents)))
        moved = self.emit(permute(factors, (*range(3), *(3 + axis for axis in shuffle.axes))))
        return reshape(moved, (*pixels, c))

    def _reaches_convolution(self) -> bool:
        """Whether this value and what is computed of it by constants goes to one convolution, which isn't depthwise."""
        var: Var | None = self.var
        while var is not None and self._flow.readers(var) == len(self._flow.users.get(var, ())) == 1:
            (user,) = self._flow.users[var]
            call = self._flow.values[user]
            if op_name(call) == "nn.conv2d":
                return not is_depthwise(call) and call.attrs.data_layout == "NHWC" and call.args[0].same_as(var)
            alone = list(relax.analysis.free_vars(call)) == [var]
            var = user if alone and op_name(call) in EPILOGUE_OPS else None
        return False
