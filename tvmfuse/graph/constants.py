"""FoldConstants: what depends on constants alone is computed now.

Rewrite  divide(const gamma, sqrt(add(const var, const eps)))  ->  const
Numerics integers, booleans and data movement are exact. Floating arithmetic is done in float64 through the whole chain and
         rounded once to the result's type, so that the constants don't depend on the machine that builds (NumPy's
         float32 transcendentals do).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.ir import Call, GenericConst
from tvm.relax import Expr, ShapeExpr

from .rewrite import Rewriter, array_of, as_pass, constant, dtype_of, is_float, is_static, op_name, shape_of

Fold = Callable[..., Any]


def _ints(value: Expr) -> list[int]:
    return [int(field) for field in value.fields]


def _reshaped(call: Call, x: np.ndarray, *_: np.ndarray) -> np.ndarray:
    return x.reshape(shape_of(call))


def _strided_slice(call: Call, x: np.ndarray) -> np.ndarray:
    axes, begin, end, *strides = (_ints(arg) for arg in call.args[1:])
    index = [slice(None)] * x.ndim
    for axis, first, last, step in zip(axes, begin, end, *(strides or [[1] * len(axes)]), strict=True):
        # A negative stride's end of -1 or less means "before the first element", which a Python slice spells None.
        index[axis] = slice(first, None if step < 0 and last < -x.shape[axis] else last, step)
    return x[tuple(index)]


def _take(call: Call, x: np.ndarray, indices: np.ndarray) -> np.ndarray:
    axis = call.attrs.axis
    return np.take(x, indices, None if axis is None else int(axis))


# Elements only change place: exact for every type, and float64 values of a longer chain pass through.
MOVEMENT: dict[str, Fold] = {
    "reshape": _reshaped,
    "expand_dims": _reshaped,
    "squeeze": _reshaped,
    "flatten": _reshaped,
    "permute_dims": lambda call, x: x.transpose(None if call.attrs.axes is None else [int(axis) for axis in call.attrs.axes]),
    "broadcast_to": lambda call, x: np.broadcast_to(x, shape_of(call)),
    "concat": lambda call, *xs: np.concatenate(xs, int(call.attrs.axis or 0)),
    "flip": lambda call, x: np.flip(x, int(call.attrs.axis)),
    "strided_slice": _strided_slice,
    "take": _take,
    "where": lambda call, condition, x, y: np.where(condition, x, y),
}

# Results are continuous in their operands: a float operand is the unrounded one.
ARITHMETIC: dict[str, Fold] = {
    "add": lambda call, x, y: x + y,
    "subtract": lambda call, x, y: x - y,
    "multiply": lambda call, x, y: x * y,
    "divide": lambda call, x, y: x / y if x.dtype.kind == "f" else _truncated_quotient(x, y),
    "minimum": lambda call, x, y: np.minimum(x, y),
    "maximum": lambda call, x, y: np.maximum(x, y),
    "negative": lambda call, x: -x,
    "abs": lambda call, x: np.abs(x),
}
FLOAT_ARITHMETIC: dict[str, Fold] = {
    "power": lambda call, x, y: np.power(x, y),
    "sqrt": lambda call, x: np.sqrt(x),
    "rsqrt": lambda call, x: 1 / np.sqrt(x),
    "exp": lambda call, x: np.exp(x),
    "log": lambda call, x: np.log(x),
    "tanh": lambda call, x: np.tanh(x),
    "sigmoid": lambda call, x: 1 / (1 + np.exp(-x)),
}

# Results jump where an operand crosses a bound: the operand is what the model stores, rounded.
DISCRETE: dict[str, Fold] = {
    "astype": lambda call, x: x.astype(dtype_of(call)),
    "isnan": lambda call, x: np.isnan(x),
    "floor": lambda call, x: np.floor(x),
    "ceil": lambda call, x: np.ceil(x),
    "round": lambda call, x: np.round(x),
    "less": lambda call, x, y: x < y,
    "less_equal": lambda call, x, y: x <= y,
    "greater": lambda call, x, y: x > y,
    "greater_equal": lambda call, x, y: x >= y,
    "equal": lambda call, x, y: x == y,
    "not_equal": lambda call, x, y: x != y,
    "logical_not": lambda call, x: ~x,
    "logical_and": lambda call, x, y: x & y,
    "logical_or": lambda call, x, y: x | y,
}


def _truncated_quotient(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    quotient = np.floor_divide(x, y)
    return quotient + ((quotient < 0) & (quotient * y != x))


@as_pass
class FoldConstants(Rewriter):
    """Evaluate calls whose operands are constants, and shapes of static tensors. What no table knows stays."""

    def __init__(self, mod: tvm.IRModule | None = None) -> None:
        super().__init__(mod)
        self._unrounded: dict[GenericConst, np.ndarray] = {}

    def rewrite(self, value: Expr) -> Expr:
        shape = _as_shape(value)
        if shape is not None:
            return shape
        if not isinstance(value, Call) or not is_static(value):
            return value
        name, operands = op_name(value), _tensor_operands(value)
        if name == "shape_to_tensor" and isinstance(value.args[0], ShapeExpr):
            return constant(np.array([int(extent) for extent in value.args[0].values], "int64"))
        if not operands or any(array_of(operand) is None for operand in operands):
            return value
        if name in DISCRETE:
            return constant(DISCRETE[name](value, *(array_of(operand) for operand in operands)))
        if name in MOVEMENT:
            return self._constant(value, MOVEMENT[name](value, *(self._exact(operand) for operand in operands)))
        fold = ARITHMETIC.get(name) or (FLOAT_ARITHMETIC.get(name) if is_float(value) else None)
        if fold is None or (name == "divide" and not is_float(value) and not np.all(array_of(operands[1]))):
            return value
        wide = [self._exact(operand) for operand in operands]
        if is_float(value):
            wide = [operand.astype("float64") for operand in wide]
        with np.errstate(all="ignore"):
            return self._constant(value, fold(value, *wide))

    def _exact(self, operand: Expr) -> np.ndarray:
        return self._unrounded[operand] if operand in self._unrounded else array_of(operand)

    def _constant(self, call: Call, array: np.ndarray) -> GenericConst:
        result = constant(array, dtype_of(call))
        if str(array.dtype) != dtype_of(call):
            self._unrounded[result] = array
        return result


def _tensor_operands(call: Call) -> list[Expr]:
    args = [field for arg in call.args for field in (arg.fields if isinstance(arg, relax.Tuple) else [arg])]
    return [arg for arg in args if isinstance(arg.ty, relax.TensorType)]


def _as_shape(value: Expr) -> ShapeExpr | None:
    """The shape that `shape_of(static tensor)` or `tensor_to_shape(constant)` stands for."""
    if op_name(value) == "shape_of" and is_static(value.args[0]):
        return value.args[0].ty.shape
    if op_name(value) == "tensor_to_shape" and array_of(value.args[0]) is not None:
        return ShapeExpr([tirx.IntImm("int64", int(extent)) for extent in array_of(value.args[0])])
    return None
