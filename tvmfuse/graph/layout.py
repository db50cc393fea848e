"""ChannelsLast: convolutions and pools run in NHWC, and permutations stay where the model's edge needs them.

Rewrite  conv2d NCHW, OIHW            ->  conv2d NHWC, OHWI           (depthwise and grouped too)
         conv2d NCHW, OIHW            ->  conv2d NCHW, OHWI           (few channels a group, of an image that lies in planes)
         conv2d_transpose NCHW, IOHW  ->  conv2d_transpose NHWC, IHWO: weights (ci, kh, kw, co / groups)
         pools NC + spatial axes      ->  spatial axes + C
         permute_dims                 ->  nothing, until something needs the elements in that very order
Method   One forward walk. A value is known by the tensor that stores it and the order of its axes there; an operator that
         can works on the stored order, with its axes, constants and attributes mapped, and hands its order on. Reshapes
         are carried too, where the axes that they merge lie next to each other in memory or can be brought there: a
         channel shuffle is one permutation of the innermost axes.
         Everything else (matmul, call_tir, what is returned) gets its operands in the model's order.
Choice   an operator of several operands works in the order that moves the fewest elements.
Source   own; that permutations sink below elementwise operators is common to all layout passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tvm
from tvm import relax
from tvm.ir import Call, GenericConst
from tvm.relax import DataflowVar, Expr, TupleGetItem, Var

from .rewrite import (
    Rewriter,
    array_of,
    as_pass,
    dtype_of,
    is_static,
    moves_nothing,
    op_name,
    permute,
    reshape,
    shape_of,
    substitute,
    with_attrs,
)
from .simplify import permute_axes

Order = tuple[int, ...]
NHWC: Order = (0, 3, 1, 2)
NARROW = 8  # output channels of a group: fewer leave more than half of a vector empty on every CPU with 64-byte vectors

ELEMENTWISE = frozenset(
    """abs acos acosh add asin asinh astype atan atan2 atanh ceil clip cos cosh divide equal erf exp floor floor_divide floor_mod
    greater greater_equal isfinite isinf isnan less less_equal log logical_and logical_not logical_or logical_xor maximum
    minimum mod multiply negative not_equal power round rsqrt sigmoid sign sin sinh sqrt square subtract tan tanh trunc where
    nn.gelu nn.gelu_tanh nn.leakyrelu nn.relu nn.relu6 nn.selu nn.silu nn.softplus""".split()
)
REDUCTIONS = frozenset("max mean min prod std sum variance".split())
ONE_AXIS = frozenset("concat nn.softmax nn.log_softmax nn.prelu".split())
POOLS = frozenset(f"nn.{kind}_pool{rank}d" for kind in ("max", "avg", "adaptive_avg") for rank in (1, 2, 3))


@dataclass(frozen=True)
class Stored:
    """A value's logical axis i is axis order[i] of the tensor `tensor`."""

    tensor: Expr
    order: Order

    def moved(self, axes: Sequence[int]) -> Order:
        """The order after a permute_dims by `axes`."""
        return tuple(self.order[axis] for axis in axes)


def _identity(value: Expr) -> Order:
    return tuple(range(len(shape_of(value))))


def channels_last(rank: int) -> Order:
    return (0, rank - 1, *range(1, rank - 1))


def inverse(order: Sequence[int]) -> Order:
    """The logical axis that each stored axis holds."""
    return tuple(sorted(range(len(order)), key=order.__getitem__))


@as_pass
class ChannelsLast(Rewriter):
    """Run convolutions, pools and what lies between them in NHWC."""

    def __init__(self, mod: tvm.IRModule | None = None) -> None:
        super().__init__(mod)
        self._stored: dict[Var, Stored] = {}
        self._parts: dict[Var, list[Expr]] = {}
        self._copies: dict[tuple[Expr, Order], Expr] = {}
        self._rules: dict[str, Callable[[Call], Expr | None]] = {
            "nn.conv2d": self._convolution,
            "nn.conv2d_transpose": self._convolution,
            "permute_dims": self._permute_dims,
            "reshape": self._reshape,
            "strided_slice": self._strided_slice,
            "split": self._split,
            "nn.pad": self._pad,
            "image.resize2d": self._resize,
            **dict.fromkeys(POOLS, self._pool),
            **dict.fromkeys(ELEMENTWISE, self._elementwise),
            **dict.fromkeys(REDUCTIONS, self._reduction),
            **dict.fromkeys(ONE_AXIS, self._one_axis),
        }

    def rewrite(self, value: Expr) -> Expr:
        if isinstance(value, TupleGetItem) and value.tuple_value in self._parts:
            return self._parts[value.tuple_value][value.index]
        rule = self._rules.get(op_name(value))
        mapped = rule(value) if rule is not None else None
        if mapped is not None:
            return mapped
        waiting = [var for var in relax.analysis.free_vars(value) if var in self._stored or var in self._parts]
        return substitute(value, {var: self.returned(var) for var in waiting})

    def returned(self, value: Expr) -> Expr:
        """`value` as the model has it."""
        if value in self._parts:
            return self.emit(relax.Tuple([self.returned(part) for part in self._parts[value]]))
        return self._in_order(value, _identity(value)) if value in self._stored else value

    def _where(self, value: Expr) -> Stored:
        return self._stored[value] if value in self._stored else Stored(value, _identity(value))

    def _in_order(self, value: Expr, order: Order) -> Expr:
        """The tensor that stores `value` in `order`; made once."""
        stored = self._where(value)
        if stored.order == order:
            return stored.tensor
        if (value, order) not in self._copies:
            at = inverse(order)
            axes, shape = stored.moved(at), tuple(shape_of(value)[axis] for axis in at)
            moved = reshape(stored.tensor, shape) if moves_nothing(shape_of(stored.tensor), axes) else permute(stored.tensor, axes)
            self._copies[value, order] = self.emit(moved, value.name if isinstance(value, Var) else "")
        return self._copies[value, order]

    def _as(self, value: Expr, tensor: Expr, order: Order) -> Expr:
        """`tensor`, which stores `value` in `order`, as a value of the walk."""
        tensor = self.emit(tensor, self.name)
        if order == _identity(value):
            return tensor
        placeholder = DataflowVar(self.name, value.ty)
        self._stored[placeholder] = Stored(tensor, order)
        return placeholder

    def _cheapest(self, operands: Sequence[Expr]) -> Order:
        """Of the orders in which `operands` are stored, the one that moves the fewest elements of the others."""

        def moved(order: Order) -> int:
            return sum(
                math.prod(shape_of(operand))
                for operand in operands
                if not moves_nothing(shape_of(self._where(operand).tensor), self._where(operand).moved(inverse(order)))
            )

        return min(dict.fromkeys(self._where(operand).order for operand in operands), key=moved)

    def _convolution(self, call: Call) -> Expr | None:
        transposed = "transpose" in op_name(call)
        layouts = (call.attrs.data_layout, call.attrs.kernel_layout, call.attrs.out_layout)
        if layouts != ("NCHW", "IOHW" if transposed else "OIHW", "NCHW") or not is_static(call):
            return None
        if not transposed and self._stays_planar(call):
            data, weights = call.args
            mapped = with_attrs(call, [self._where(data).tensor, self._in_order(weights, NHWC)], kernel_layout="OHWI")
            return self._as(call, mapped, _identity(call))
        kernel_layout = "IHWO" if transposed else "OHWI"
        args = [self._in_order(arg, NHWC) for arg in call.args]
        mapped = with_attrs(call, args, data_layout="NHWC", kernel_layout=kernel_layout, out_layout="NHWC")
        return self._as(call, mapped, NHWC)

    def _stays_planar(self, call: Call) -> bool:
        """Whether a row of pixels fills vectors better than the few output channels of a group, on an image that lies in planes already."""
        data, weights = call.args
        if self._where(data).order != _identity(data) or array_of(weights) is None or dtype_of(call) != "float32":
            return False
        groups, per_step = int(call.attrs.groups), shape_of(weights)[1]
        per_group, width, stride = shape_of(weights)[0] // groups, shape_of(call)[3], int(call.attrs.strides[1])
        shrinks = 2 * math.prod(shape_of(call)) <= math.prod(shape_of(data))  # what may have to be permuted after it
        return per_step > 1 and stride == 1 and per_group < NARROW <= width and shrinks

    def _pool(self, call: Call) -> Expr | None:
        x, layout = call.args[0], str(call.attrs.layout)
        if not layout.startswith("NC") or call.attrs.out_layout != layout or not is_static(x):
            return None
        if shape_of(x)[1] == 1 and "adaptive" not in op_name(call):
            return self._pool_of_one_channel(call)
        order, last = channels_last(len(layout)), layout.replace("C", "") + "C"
        return self._as(call, with_attrs(call, [self._in_order(x, order)], layout=last, out_layout=last), order)

    def _pool_of_one_channel(self, call: Call) -> Expr:
        """A pool over any order of its spatial axes: LRN's window lies along what were channels."""
        spatial = [axis for axis in inverse(self._where(call.args[0]).order) if axis > 1]
        order = inverse((0, 1, *spatial))
        rank = len(spatial)

        def mapped(widths: Sequence[int]) -> list[int]:
            return [widths[side + axis - 2] for side in range(0, len(widths), rank) for axis in spatial]

        names = ("pool_size", "strides", "dilation", "padding")
        attrs = {name: mapped([int(width) for width in getattr(call.attrs, name)]) for name in names}
        return self._as(call, with_attrs(call, [self._in_order(call.args[0], order)], **attrs), order)

    def _elementwise(self, call: Call) -> Expr | None:
        if not is_static(call):
            return None
        whole = [arg for arg in call.args if isinstance(arg, Var) and shape_of(arg) == shape_of(call)]
        if not whole:
            return None
        order = self._cheapest(whole)
        args = [self._aligned(arg, order) if isinstance(arg.ty, relax.TensorType) else arg for arg in call.args]
        return self._as(call, Call(call.op, args, call.attrs, call.ty_args), order)

    def _aligned(self, operand: Expr, order: Order) -> Expr:
        """An operand that may broadcast against a value stored in `order`."""
        shape = shape_of(operand)
        if order == tuple(range(len(order))) or not shape:
            return self.returned(operand)
        if len(shape) < len(order):
            operand = self.emit(reshape(self.returned(operand), (1,) * (len(order) - len(shape)) + shape))
        return self._in_order(operand, order)

    def _one_axis(self, call: Call) -> Expr | None:
        if not is_static(call) or call.attrs.axis is None:
            return None
        operand, *rest = call.args
        parts = list(operand.fields) if isinstance(operand, relax.Tuple) else [operand]
        if not all(isinstance(part, Var | GenericConst) for part in parts):
            return None
        order = self._cheapest([part for part in parts if isinstance(part, Var)] or parts)
        tensors = [self._in_order(part, order) for part in parts]
        axis = order[int(call.attrs.axis) % len(order)]
        first = relax.Tuple(tensors) if isinstance(operand, relax.Tuple) else tensors[0]
        return self._as(call, with_attrs(call, [first, *rest], axis=axis), order)

    def _reduction(self, call: Call) -> Expr | None:
        if not is_static(call) or call.attrs.axis is None:
            return None
        stored = self._where(call.args[0])
        axes = [int(axis) % len(stored.order) for axis in call.attrs.axis]
        mapped = with_attrs(call, [stored.tensor], axis=sorted(stored.order[axis] for axis in axes))
        if call.attrs.keepdims:
            return self._as(call, mapped, stored.order)
        kept = [at for axis, at in enumerate(stored.order) if axis not in axes]
        return self._as(call, mapped, tuple(sorted(kept).index(at) for at in kept))

    def _strided_slice(self, call: Call) -> Expr | None:
        if not is_static(call) or not all(isinstance(arg, relax.Tuple) for arg in call.args[1:]):
            return None
        stored = self._where(call.args[0])
        axes = relax.Tuple([tvm.tirx.IntImm("int64", stored.order[int(axis) % len(stored.order)]) for axis in call.args[1].fields])
        return self._as(call, Call(call.op, [stored.tensor, axes, *call.args[2:]], call.attrs, call.ty_args), stored.order)

    def _split(self, call: Call) -> Expr | None:
        stored = self._where(call.args[0])
        parts = self.emit(with_attrs(call, [stored.tensor], axis=stored.order[int(call.attrs.axis) % len(stored.order)]), self.name)
        whole = DataflowVar(self.name, call.ty)
        self._parts[whole] = [
            self._as(TupleGetItem(call, index), TupleGetItem(parts, index), stored.order) for index in range(len(call.ty.fields))
        ]
        return whole

    def _pad(self, call: Call) -> Expr | None:
        if not is_static(call):
            return None
        stored, widths = self._where(call.args[0]), [int(width) for width in call.attrs.pad_width]
        mapped = [widths[2 * axis + side] for axis in inverse(stored.order) for side in (0, 1)]
        return self._as(call, with_attrs(call, [stored.tensor], pad_width=mapped), stored.order)

    def _resize(self, call: Call) -> Expr | None:
        if not is_static(call) or call.attrs.layout != "NCHW":
            return None
        return self._as(call, with_attrs(call, [self._in_order(call.args[0], NHWC), *call.args[1:]], layout="NHWC"), NHWC)

    def _permute_dims(self, call: Call) -> Expr | None:
        if not is_static(call) or not isinstance(call.args[0], Var):
            return None
        stored = self._where(call.args[0])
        return self._as(call, stored.tensor, stored.moved(permute_axes(call)))

    def _reshape(self, call: Call) -> Expr | None:
        x = call.args[0]
        if not is_static(call) or x not in self._stored or 0 in shape_of(x):
            return None
        groups = merge_groups(shape_of(x), shape_of(call))
        order, target = self._where(x).order, shape_of(call)
        # Merged axes have to be neighbours; the group goes where its innermost axis already is.
        groups.sort(key=lambda group: max((order[axis] for axis in group[0]), default=-1))
        before = [axis for merged, _ in groups for axis in merged]
        units = [axis for axis in range(len(order)) if axis not in before]
        source = self._in_order(x, inverse((*units, *before)))
        after = [axis for _, split in groups for axis in split]
        units = [axis for axis in range(len(target)) if axis not in after]
        for axis in units:  # next to the axis before it, so that a model's order is kept where it can be
            after.insert(after.index(axis - 1) + 1 if axis else 0, axis)
        return self._as(call, reshape(source, [target[axis] for axis in after]), inverse(after))


def merge_groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The finest partition of both shapes' axes, unit axes left out, into groups of equal extent: [(axes before, axes after)]."""
    old = [axis for axis, extent in enumerate(before) if extent != 1]
    new = [axis for axis, extent in enumerate(after) if extent != 1]
    groups: list[tuple[list[int], list[int]]] = []
    while old:
        merged, split = [old.pop(0)], [new.pop(0)]
        left, right = before[merged[0]], after[split[0]]
        while left != right:
            if left < right:
                merged.append(old.pop(0))
                left *= before[merged[-1]]
            else:
                split.append(new.pop(0))
                right *= after[split[-1]]
        groups.append((merged, split))
    return groups
