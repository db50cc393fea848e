"""Simplify: what leaves every value as it is goes, and what is left of data movement has one form.

Rewrites (each exact for every value, NaN and signed zero included)
    flatten, squeeze, expand_dims       ->  reshape
    reshape(reshape(x))                 ->  reshape(x)
    permute_dims(permute_dims(x))       ->  permute_dims(x)
    permute_dims that moves unit axes   ->  reshape
    reshape, permute_dims, astype, broadcast_to, strided_slice to the same  ->  x
    dropout(x)[0], concat((x,))         ->  x
    x * 1, x / 1, x - 0, x + -0         ->  x     (but x + 0 turns -0 into 0, so it stays)
    maximum(x, -inf), minimum(x, inf)   ->  x
    minimum(maximum(x, low), high)      ->  clip(x, low, high), for scalar constants low <= high
"""

from __future__ import annotations

import numpy as np
from tvm import relax, tirx
from tvm.ir import Call
from tvm.relax import Expr, TupleGetItem

from .rewrite import Rewriter, array_of, as_pass, dtype_of, is_float, is_static, moves_nothing, op_name, permute, reshape, shape_of

RESHAPES = ("reshape", "flatten", "squeeze", "expand_dims")
# Result equals the operand wherever type and shape do: each element keeps its place, or all of them are taken.
IDENTITIES = ("astype", "broadcast_to", "strided_slice")

# op -> (value of the other operand that makes it an identity, whether the sides may be swapped).
NEUTRAL: dict[str, tuple[float, bool]] = {
    "multiply": (1.0, True),
    "divide": (1.0, False),
    "subtract": (0.0, False),
    "add": (-0.0, True),
    "maximum": (-np.inf, True),
    "minimum": (np.inf, True),
}


@as_pass
class Simplify(Rewriter):
    """Drop what changes nothing; reshape and permute_dims are the only data movement of a single operand that is left."""

    def rewrite(self, value: Expr) -> Expr:
        if isinstance(value, TupleGetItem):
            whole = self.producer(value.tuple_value)
            return whole.args[0] if op_name(whole) == "nn.dropout" and value.index == 0 else value
        if not isinstance(value, Call) or not is_static(value):
            return value
        name, x = op_name(value), value.args[0] if value.args else None
        if name in RESHAPES:
            return self._reshaped(x, shape_of(value))
        if name == "permute_dims":
            return self._permuted(x, permute_axes(value))
        if name in IDENTITIES:
            return x if shape_of(x) == shape_of(value) and dtype_of(x) == dtype_of(value) and _keeps_order(value) else value
        if name == "concat":
            return x.fields[0] if isinstance(x, relax.Tuple) and len(x.fields) == 1 else value
        if name in NEUTRAL and is_float(value):
            return self._arithmetic(value)
        return value

    def _reshaped(self, x: Expr, shape: tuple[int, ...]) -> Expr:
        above = self.producer(x)
        return reshape(above.args[0] if op_name(above) == "reshape" else x, shape)

    def _permuted(self, x: Expr, axes: list[int]) -> Expr:
        above = self.producer(x)
        if op_name(above) == "permute_dims":
            inner = permute_axes(above)
            x, axes = above.args[0], [inner[axis] for axis in axes]
        if axes == list(range(len(axes))):
            return x
        if moves_nothing(shape_of(x), axes):
            return self._reshaped(x, tuple(shape_of(x)[axis] for axis in axes))
        return permute(x, axes)

    def _arithmetic(self, value: Call) -> Expr:
        name = op_name(value)
        neutral, commutes = NEUTRAL[name]
        for x, other in ((0, 1), (1, 0))[: 1 + commutes]:
            elements = array_of(value.args[other])
            if elements is None:
                continue
            if shape_of(value.args[x]) == shape_of(value) and _all_are(elements, neutral):
                return value.args[x]
            if name == "minimum" and elements.ndim == 0:
                return self._clipped(value, value.args[x], float(elements))
        return value

    def _clipped(self, value: Call, x: Expr, high: float) -> Expr:
        above = self.producer(x)
        if op_name(above) != "maximum" or not self.single_user(x):
            return value
        for inner, other in ((0, 1), (1, 0)):
            low = array_of(above.args[other])
            # Of bounds in the wrong order the upper one binds, where TVM computes a clip of its own the lower one.
            if low is not None and low.ndim == 0 and float(low) <= high and shape_of(above.args[inner]) == shape_of(value):
                bounds = (tirx.FloatImm(dtype_of(value), float(bound)) for bound in (low, high))
                return relax.op.clip(above.args[inner], *bounds)
        return value


def permute_axes(call: Call) -> list[int]:
    rank = len(shape_of(call))
    return list(reversed(range(rank))) if call.attrs.axes is None else [int(axis) % rank for axis in call.attrs.axes]


def _keeps_order(call: Call) -> bool:
    """A slice of full extent may still run backwards."""
    return op_name(call) != "strided_slice" or len(call.args) < 5 or all(int(stride) > 0 for stride in call.args[4].fields)


def _all_are(elements: np.ndarray, neutral: float) -> bool:
    return bool(np.all(elements == neutral) and (neutral != 0 or np.all(np.signbit(elements) == np.signbit(neutral))))
