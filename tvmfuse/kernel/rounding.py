"""Float arithmetic that rounds exactly where it is written, whatever LLVM and TVM's simplifier would like.

Two parties rewrite floats behind our back. LLVM contracts `a * b + c` into an fma, depending on block structure and
instruction set (TVM's code generator invites it to: it emits llvm.fmuladd). TVM's simplifier takes floats for reals:
`x + y - x -> y`, `x - x -> 0`, `x * 0 -> 0`, `x + 0 -> x`, `0 / x -> 0`, `x == x -> True`. An `llvm.arithmetic.fence` is
opaque to all of them and becomes no instruction.

All functions take expressions of one float type, scalar or vector, and stay branch-free and vectorisable under
T.vectorized. Integers pass through `add`, `sub`, `mul`, `maximum` and `minimum` with TVM's own arithmetic.
"""

from __future__ import annotations

import math

import tvm_ffi
from tvm import tirx
from tvm.ir import Expr


def const(value: float, like: Expr) -> Expr:
    """`value` in the type of `like`, broadcast over its lanes."""
    return tirx.const(value, like.ty.dtype)


def is_float(x: Expr) -> bool:
    return str(x.ty.dtype).startswith("float")


def literal(x: Expr) -> float | None:
    """The number when `x` is a constant, or a constant in every lane."""
    scalar = x.value if isinstance(x, tirx.Broadcast) else x
    return float(scalar.value) if isinstance(scalar, tirx.FloatImm | tirx.IntImm) else None


def fence(x: Expr) -> Expr:
    """x, as a value that nothing is folded into or out of."""
    return tirx.call_llvm_pure_intrin(x.ty, "llvm.arithmetic.fence", x)


def fma(a: Expr, b: Expr, c: Expr) -> Expr:
    """a * b + c, rounded once."""
    return tirx.call_llvm_pure_intrin(a.ty, "llvm.fma", a, b, c)


def add(a: Expr, b: Expr) -> Expr:
    """a + b; adding a literal 0 still turns -0 into 0."""
    return tirx.Add(_opaque_zero(a), _opaque_zero(b))


def sub(a: Expr, b: Expr) -> Expr:
    """a - b; `a` is fenced, so that `(b + c) - b` and `b - b` keep their rounding and their NaN."""
    return tirx.Sub(fence(a) if is_float(a) else a, b)


def mul(a: Expr, b: Expr) -> Expr:
    """a * b, rounded before anything is added to it; a literal 0 still gives NaN for NaN and infinity."""
    product = tirx.Mul(_opaque_zero(a), _opaque_zero(b))
    return fence(product) if is_float(a) else product


def div(a: Expr, b: Expr) -> Expr:
    """a / b, correctly rounded. A literal power of two LLVM takes for a product, which is exact, but then to be fenced."""
    quotient = tirx.Div(_opaque_zero(a), b)
    return fence(quotient) if is_float(a) and literal(b) is not None else quotient


def sqrt(x: Expr) -> Expr:
    """Correctly rounded, an instruction on every target."""
    return tirx.call_llvm_pure_intrin(x.ty, "llvm.sqrt", x)


def neg(x: Expr) -> Expr:
    """x with its sign flipped, also that of zeros. On the bits: a product by -1 would be taken for half an fma."""
    if not is_float(x):
        return tirx.Sub(const(0, x), x)
    bits = tirx.reinterpret(_unsigned(x), x)
    return tirx.reinterpret(x.ty.dtype, bits ^ tirx.const(1 << (x.ty.dtype.bits - 1), _unsigned(x)))


def copysign(magnitude: Expr, sign: Expr) -> Expr:
    return tirx.call_llvm_pure_intrin(magnitude.ty, "llvm.copysign", magnitude, sign)


def is_number(x: Expr) -> Expr:
    """False for NaN only; a single ordered comparison, since LLVM knows that `x <= inf` asks nothing else.

    Not to be negated, no more than any comparison of floats: TVM takes `not x <= y` for `y < x` and `not x == y` for
    `x != y`, which is LLVM's ordered `one`, and all of them are False for NaN. `x == x` it folds to True.
    """
    return tirx.LE(x, const(math.inf, x))


def is_nan(x: Expr) -> Expr:
    """Decided on the bits, see `is_number`."""
    bits = magnitude_bits(x)
    infinity = 0x7FF << 52 if x.ty.dtype.bits == 64 else 0xFF << 23
    return tirx.GT(bits, const(infinity, bits))


def magnitude_bits(x: Expr) -> Expr:
    """The bits of |x| as an unsigned integer that orders as |x| does, NaN above infinity."""
    return tirx.reinterpret(_unsigned(x), tirx.abs(x))


def decided(comparison: Expr) -> Expr:
    """A comparison of floats that TVM may negate: through an integer, where `not` means what it says for NaN too."""
    integer = tvm_ffi.dtype("int32").with_lanes(comparison.ty.dtype.lanes)
    flag = tirx.Select(comparison, tirx.const(1, integer), tirx.const(0, integer))
    return tirx.GT(flag, const(0, flag))


def equal(a: Expr, b: Expr) -> Expr:
    return tirx.EQ(fence(a) if is_float(a) else a, b)


def maximum(a: Expr, b: Expr) -> Expr:
    """The larger one, NaN if either is NaN, the second operand if they compare equal (so also for 0 against -0).

    `a > b ? a : b` yields b when either is NaN; only a NaN in `a` has to be put back. A literal is taken as the first
    operand, and then a single instruction is left on x86.
    """
    return _extremum(tirx.Max, a, b)


def minimum(a: Expr, b: Expr) -> Expr:
    """As `maximum`."""
    return _extremum(tirx.Min, a, b)


def _unsigned(x: Expr) -> tvm_ffi.dtype:
    return tvm_ffi.dtype(f"uint{x.ty.dtype.bits}").with_lanes(x.ty.dtype.lanes)


def _extremum(op: type, a: Expr, b: Expr) -> Expr:
    if not is_float(a):
        return op(a, b)
    if _is_number(b):
        a, b = b, a
    return op(a, b) if _is_number(a) else tirx.Select(is_number(a), op(a, b), a)


def _is_number(x: Expr) -> bool:
    value = literal(x)
    return value is not None and not math.isnan(value)


def _opaque_zero(x: Expr) -> Expr:
    return fence(x) if is_float(x) and literal(x) == 0 else x
