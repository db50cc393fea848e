"""Elementary functions as vector code, and the evaluation of an epilogue's straight-line program.

TVM lowers exp, tanh, erf and the like to one libm call a lane, whose bits depend on the machine's libm. Here each is one
polynomial in explicit fma, fenced multiplies and integer operations on the exponent: branch-free, the same bits for every
number of lanes and every CPU with fused multiply-add. Errors are in units in the last place of float32, against float64.

The coefficients are own minimax fits: Remez exchange on 3,000 Chebyshev points in 40 digits, rounded to the format one at
a time, lowest degree first, the others refitted after each. The error named beside each is that of the rounded
coefficients, before evaluation. The forms are well known: Cody and Waite's argument reduction ("Software Manual for the
Elementary Functions", 1980), the rounding shift of 1.5 * 2**23, and, for float32 log, the reduction of N. Juffa's my_logf.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import tvm_ffi
from tvm import tirx
from tvm.ir import Expr, TensorLoad, Var

from ..values import Epilogue, Step
from . import rounding
from .rounding import const, copysign, div, fma, is_float, literal, mul, neg, sqrt

# Computes a value where it stands and gives back what reads it, so that using it twice does not compute it twice.
Bind: TypeAlias = Callable[[Expr], Expr]

# exp(r) for |r| <= ln 2; relative error 2**-26.0
EXP = (0.000196286885, 0.00141065626, 0.00833601411, 0.0416611582, 0.16666615, 0.500000358, 1.0, 1.0)
# expm1(r) = r + r**2 * Q(r) for |r| <= ln 2 / 2; relative error 2**-26.1
EXPM1 = (0.00138378609, 0.00836731866, 0.0416677408, 0.166665375, 0.49999997)
# log1p(f) = f + f**2 * Q(f) for |f| <= 1/3; relative error 2**-25.7
LOG1P = (-0.126063272, 0.140977398, -0.12261112, 0.139848799, -0.166743219, 0.200116575, -0.249999195, 0.333331943, -0.5)
# log1p(e) = e + e**2 * Q(e) for 0 <= e <= 1; relative error 2**-27.5
SOFTPLUS = (
    *(-0.00329046859, 0.0200862419, -0.057457231, 0.106611282, -0.153448805),
    *(0.196921021, -0.24958019, 0.333304644, -0.499999315),
)
# -log(erfc(t)) = t + t * H(t) for 0 <= t <= 4, weighted by its share in erf(t); relative error of erf 2**-27.8
ERF = (
    *(-9.38718222e-06, 0.000118855954, -0.000637349382, 0.00167565921, -0.00016949464),
    *(-0.0191478245, 0.102776304, 0.636619568, 0.128379166),
)
# float64: log2((1 + s) / (1 - s)) = s * A(s**2) for |s| <= 1/5; relative error 2**-42.4
LOG2 = (
    *(0.2908292861921828, 0.31928523204958686, 0.41222616679682095),
    *(0.5770777556855934, 0.961796694824987, 2.885390081777425),
)
# float64: 2**r for |r| <= 1/2; relative error 2**-32.0
EXP2 = (
    *(1.3359954273911717e-05, 0.00015461388477428875, 0.0013341954086444683, 0.009618056861789973),
    *(0.055504003668412426, 0.2402265092105144, 0.6931471838207927, 1.0),
)

LOG2_E = 1.4426950408889634
LN2_HIGH, LN2_LOW = 0.6931471824645996, -1.9046542121259336e-09  # float32(ln 2), and the rest of it


class Lets:
    """A Bind inside one expression, where no statement can be emitted.

    TVM's simplifier replaces a name by its definition wherever it is used, so compile time grows with every use that
    lies on top of another: a few functions deep is instant, a chain of three swishes takes minutes.
    """

    def __init__(self) -> None:
        self._named: list[tuple[tirx.Var, Expr]] = []

    def __call__(self, value: Expr) -> Expr:
        var = tirx.Var(f"t{len(self._named)}", value.ty)
        self._named.append((var, value))
        return var

    def around(self, body: Expr) -> Expr:
        for var, value in reversed(self._named):
            body = tirx.Let(var, value, body)
        return body


def elementary(float64: Callable[..., Expr]) -> Callable[[Callable[..., Expr]], Callable[..., Expr]]:
    """f(*args, bind) in float32 -> f(*args, bind=None) in float32 or float64.

    float64  TVM's intrinsic: right, not fast, and only as reproducible as the machine's libm.
    bind     for intermediate values; by default they become Let expressions.
    """

    def decorate(float32: Callable[..., Expr]) -> Callable[..., Expr]:
        @functools.wraps(float32)
        def function(*args: Expr, bind: Bind | None = None) -> Expr:
            if args[0].ty.dtype.bits == 64:
                return float64(*args)
            if bind is None:
                lets = Lets()
                return lets.around(function(*args, bind=lets))
            return float32(*(a if isinstance(a, Var | TensorLoad) else bind(a) for a in args), bind)

        return function

    return decorate


def libm(name: str) -> Callable[[Expr], Expr]:
    """libm's, a lane at a time. TVM has no log1p, its erf is a float32 polynomial for float64 too, and its tanh loses small numbers."""

    def function(x: Expr) -> Expr:
        lanes = x.ty.dtype.lanes
        if lanes == 1:
            return tirx.call_pure_extern("float64", name, x)
        each = [tirx.call_pure_extern("float64", name, tirx.Shuffle([x], [tirx.const(lane, "int32")])) for lane in range(lanes)]
        return tirx.Shuffle(each, [tirx.const(lane, "int32") for lane in range(lanes)])

    return function


@elementary(tirx.exp)
def exp(x: Expr, bind: Bind) -> Expr:
    """e**x, at most 1.6 ulp off; overflows to infinity and passes through the denormals to 0."""
    # exp(89) overflows and exp(-104) rounds to 0, both by the scaling itself.
    return _exp(bind(tirx.Max(const(-104, x), tirx.Min(const(89, x), x))), bind)


@elementary(tirx.sigmoid)
def sigmoid(x: Expr, bind: Bind) -> Expr:
    """1 / (1 + e**-x), at most 2 ulp off: m - m * e / (1 + e) with e = e**-|x| and m = e below 0, else 1.

    That keeps small results precise, and the quotient's error counts only e times. The plain quotients m / (1 + e) are
    up to 2.9 ulp off: with 1 + e just above 1 and the result just below a power of two, its rounding counts double.
    """
    one = const(1, x)
    e = bind(_exp_of_negative_magnitude(x, bind))
    m = bind(tirx.Select(tirx.LT(x, const(0, x)), e, one))
    return fma(neg(m), div(e, tirx.Add(one, e)), m)


@elementary(libm("tanh"))
def tanh(x: Expr, bind: Bind) -> Expr:
    """(1 - e) / (1 + e) with e = e**(-2|x|) and the sign of x, at most 2 ulp off; both terms are rounded once from exact parts.

    The same with e**(2|x|) has a divisor just above 2 for small x, twice as coarse as just below it (2.4 ulp).
    """
    scale, q = _expm1_parts(bind(tirx.Max(const(-20, x), mul(tirx.abs(x), const(-2, x)))), bind)  # tanh(10) rounds to 1
    one = const(1, x)
    return copysign(div(fma(neg(scale), q, tirx.Sub(one, scale)), fma(scale, q, tirx.Add(one, scale))), x)


@elementary(libm("erf"))
def erf(x: Expr, bind: Bind) -> Expr:
    """1 - exp(log(erfc(|x|))) with the sign of x, at most 2 ulp off."""
    t = bind(tirx.Min(const(4, x), tirx.abs(x)))  # erf(4) rounds to 1
    scale, q = _expm1_parts(bind(neg(fma(t, horner(t, ERF), t))), bind)
    return copysign(fma(neg(scale), q, tirx.Sub(const(1, x), scale)), x)


@elementary(lambda x: tirx.Max(const(0, x), x) + libm("log1p")(tirx.exp(neg(tirx.abs(x)))))
def softplus(x: Expr, bind: Bind) -> Expr:
    """log(1 + e**x) = max(0, x) + log1p(e**-|x|), at most 2 ulp off."""
    e = bind(_exp_of_negative_magnitude(x, bind))
    return tirx.Add(tirx.Max(const(0, x), x), fma(mul(e, e), horner(e, SOFTPLUS), e))


@elementary(tirx.log)
def log(x: Expr, bind: Bind) -> Expr:
    """Natural logarithm, at most 1 ulp off: NaN below 0, -infinity at either 0."""
    mantissa, exponent = _split(x, bind)
    f = bind(tirx.Sub(mantissa, const(1, x)))
    finite = _log(f, exponent)
    not_positive = tirx.Select(tirx.EQ(x, const(0, x)), const(-math.inf, x), const(math.nan, x))
    unbounded = tirx.Select(tirx.LT(x, const(math.inf, x)), finite, x)
    return tirx.Select(tirx.GT(x, const(0, x)), unbounded, not_positive)


@elementary(libm("atanh"))
def atanh(x: Expr, bind: Bind) -> Expr:
    """log1p(t) / 2 with t = 2|x| / (1 - |x|) and the sign of x, at most 2.1 ulp off: infinite at 1, NaN beyond. TVM's subtracts two
    logarithms, which leaves nothing of small x.

    With 1 + t = m * 2**e and s = 2**-e, m - 1 = t * s + (s - 1) is rounded once, as in N. Juffa's my_log1pf.
    """
    one = const(1, x)
    magnitude = bind(tirx.abs(x))
    t = bind(div(tirx.Add(magnitude, magnitude), tirx.Sub(one, magnitude)))
    exponent = bind(_exponent(tirx.reinterpret(typed("int32", x), tirx.Add(one, t))))
    s = bind(tirx.reinterpret(x.ty.dtype, (tirx.const(127, exponent.ty.dtype) - exponent) << tirx.const(23, exponent.ty.dtype)))
    f = bind(fma(t, s, tirx.Sub(s, one)))
    finite = mul(_log(f, tirx.Cast(x.ty.dtype, exponent)), const(0.5, x))
    beyond = tirx.Select(tirx.EQ(magnitude, one), const(math.inf, x), const(math.nan, x))
    return copysign(tirx.Select(tirx.LT(magnitude, one), finite, beyond), x)


@elementary(tirx.pow)
def _power(x: Expr, y: Expr, bind: Bind) -> Expr:
    """2**(y * log2|x|) in float64, rounded once to float32; C's rules for zeros, infinities, NaN and negative bases."""
    magnitude = bind(tirx.abs(x))
    mantissa, exponent = _split(magnitude, bind)
    mantissa = bind(tirx.Cast(typed("float64", x), mantissa))
    one = const(1, mantissa)
    s = bind(div(tirx.Sub(mantissa, one), tirx.Add(mantissa, one)))
    log2 = fma(s, horner(bind(mul(s, s)), LOG2), tirx.Cast(typed("float64", x), exponent))
    log2 = tirx.Select(tirx.LT(magnitude, const(math.inf, x)), log2, tirx.Cast(typed("float64", x), magnitude))
    log2 = tirx.Select(tirx.EQ(x, const(0, x)), const(-math.inf, one), log2)
    # 1**infinity is 1
    z = tirx.Select(tirx.EQ(magnitude, const(1, x)), const(0, one), mul(tirx.Cast(typed("float64", x), y), log2))
    z = bind(tirx.Max(const(-1000, one), tirx.Min(const(1000, one), z)))
    n, scale = _power_of_two(z, 1.0, bind)
    r = bind(tirx.Sub(z, n))
    result = bind(tirx.Cast(typed("float32", x), mul(horner(r, EXP2), scale)))

    half = bind(mul(y, const(0.5, y)))
    whole = tirx.EQ(tirx.floor(y), y)
    odd = tirx.And(whole, tirx.NE(tirx.floor(half), half))
    signed = bind(tirx.Select(odd, copysign(result, x), result))
    finite_negative = tirx.And(tirx.LT(x, const(0, x)), tirx.GT(x, const(-math.inf, x)))
    real = tirx.Select(whole, signed, tirx.Select(finite_negative, const(math.nan, x), signed))
    return tirx.Select(tirx.Or(tirx.EQ(x, const(1, x)), tirx.EQ(y, const(0, y))), const(1, x), real)


def pow(x: Expr, y: Expr, bind: Bind | None = None) -> Expr:
    """x**y, at most 1 ulp off (1.5 for the cube, 1.7 for 0.75); the literal exponents 0, 1, -1, 2, 3, 0.5 and 0.75 are plain arithmetic."""
    match literal(y):
        case 0:
            return const(1, x)
        case 1:
            return x
        case -1:
            return div(const(1, x), x)
        case 2:
            return mul(x, x)
        case 3:
            return mul(mul(x, x), x)
        case 0.5:  # the root of -0 is -0 and of -infinity NaN, but their powers are 0 and infinity
            return tirx.Select(tirx.EQ(x, const(-math.inf, x)), const(math.inf, x), sqrt(rounding.add(x, const(0, x))))
        case 0.75:  # local response normalisation's
            return _three_quarters(x, bind=bind)
    return _power(x, y, bind=bind)


@elementary(lambda x: tirx.pow(x, const(0.75, x)))
def _three_quarters(x: Expr, bind: Bind) -> Expr:
    """x**0.75, at most 1.7 ulp off: r * q with r = sqrt(x) and q = sqrt(r), where the error of q, known exactly as r - q * q, is put right.

    What is left is the rounding of r, which counts 1.5 times, and one of the result. r * q alone is up to 2.3 ulp off.
    """
    root = bind(sqrt(rounding.add(x, const(0, x))))
    fourth = bind(sqrt(root))
    error = fma(neg(fourth), fourth, root)
    power = fma(root, fourth, mul(fourth, mul(error, const(0.5, x))))
    return tirx.Select(tirx.EQ(tirx.abs(x), const(math.inf, x)), const(math.inf, x), power)


def typed(dtype: str, like: Expr) -> str:
    return str(tvm_ffi.dtype(dtype).with_lanes(like.ty.dtype.lanes))


def horner(x: Expr, coefficients: Sequence[float]) -> Expr:
    """The polynomial in x, its coefficients given from the highest degree down."""
    value = const(coefficients[0], x)
    for coefficient in coefficients[1:]:
        value = fma(value, x, const(coefficient, x))
    return value


def _power_of_two(x: Expr, factor: float, bind: Bind, extra: int = 0) -> tuple[Expr, Expr]:
    """n = the integer nearest x * factor, as a float, and 2**(n + extra).

    Adding 1.5 * 2**p, p the bits of the fraction, leaves n in the low bits. Adding the exponent's bias as well leaves
    the biased exponent there, to be shifted into place.
    """
    fraction, bias, bits = (52, 1023, "uint64") if x.ty.dtype.bits == 64 else (23, 127, "uint32")
    rounded = bind(fma(x, const(factor, x), const(1.5 * 2**fraction + bias + extra, x)))
    exponent = tirx.reinterpret(typed(bits, x), rounded) << tirx.const(fraction, typed(bits, x))
    return tirx.Sub(rounded, const(1.5 * 2**fraction + bias + extra, x)), tirx.reinterpret(x.ty.dtype, exponent)


def _remainder(x: Expr, n: Expr, multiple: int, bind: Bind) -> Expr:
    """x - n * multiple * ln 2. The first step is exact: both its terms are multiples of 2**-24, and so is the result."""
    return bind(fma(n, const(-LN2_LOW * multiple, x), fma(n, const(-LN2_HIGH * multiple, x), x)))


def _exp(x: Expr, bind: Bind) -> Expr:
    """exp for -104 <= x <= 89: n = round(x / (2 ln 2)) and 2**n applied twice, so that each factor is a normal number."""
    n, scale = _power_of_two(x, LOG2_E / 2, bind)
    r = _remainder(x, n, 2, bind)
    return mul(tirx.Mul(horner(r, EXP), scale), scale)


def _exp_of_negative_magnitude(x: Expr, bind: Bind) -> Expr:
    """e**-|x|; 2**n is applied as 2**(n + 64) * 2**-64: n goes down to -150."""
    x = bind(tirx.Max(const(-104, x), neg(tirx.abs(x))))
    n, scale = _power_of_two(x, LOG2_E, bind, extra=64)
    r = _remainder(x, n, 1, bind)
    return mul(tirx.Mul(horner(r, (*EXPM1, 1.0, 1.0)), scale), const(2.0**-64, x))


def _expm1_parts(x: Expr, bind: Bind) -> tuple[Expr, Expr]:
    """(2**n, q) with e**x = 2**n * (1 + q) for -80 <= x <= 80; q is relatively exact near 0 and |q| <= 0.42."""
    n, scale = _power_of_two(x, LOG2_E, bind)
    r = _remainder(x, n, 1, bind)
    return scale, bind(fma(mul(r, r), horner(r, EXPM1), r))


def _split(x: Expr, bind: Bind) -> tuple[Expr, Expr]:
    """(m, e), both float32, with x = m * 2**e and 2/3 <= m < 4/3; x > 0, also denormal."""
    integer = typed("int32", x)
    denormal = tirx.LT(x, const(2.0**-126, x))
    bits = bind(tirx.reinterpret(integer, tirx.Select(denormal, mul(x, const(2.0**23, x)), x)))
    exponent = bind(_exponent(bits))
    mantissa = tirx.reinterpret(x.ty.dtype, bits - (exponent << tirx.const(23, integer)))
    shifted = tirx.Add(tirx.Cast(x.ty.dtype, exponent), tirx.Select(denormal, const(-23, x), const(0, x)))
    return bind(mantissa), bind(shifted)


def _exponent(bits: Expr) -> Expr:
    """e with x = m * 2**e and 2/3 <= m < 4/3 of the bits of a positive normal x, as int32."""
    return (bits - tirx.const(0x3F2AAAAB, bits.ty.dtype)) >> tirx.const(23, bits.ty.dtype)  # 0x3F2AAAAB is 2/3


def _log(f: Expr, exponent: Expr) -> Expr:
    """log((1 + f) * 2**exponent) for |f| <= 1/3."""
    return fma(exponent, const(LN2_HIGH, f), fma(mul(f, f), horner(f, LOG1P), f))


def relu(x: Expr) -> Expr:
    """max(0, x); NaN stays NaN and -0 stays -0."""
    return tirx.Max(const(0, x), x)


def clip(x: Expr, low: float, high: float) -> Expr:
    """min(high, max(low, x)); NaN stays NaN."""
    return rounding.minimum(rounding.maximum(x, const(low, x)), const(high, x))


def prelu(x: Expr, slope: Expr) -> Expr:
    return tirx.Select(tirx.GE(x, const(0, x)), x, mul(slope, x))


def leaky_relu(x: Expr, alpha: float) -> Expr:
    return prelu(x, const(alpha, x))


def cast(x: Expr, dtype: str) -> Expr:
    """Float to float rounds to nearest; float to integer truncates, saturates and turns NaN into 0, the same on every CPU."""
    target = typed(dtype, x)
    if x.ty.dtype == target:
        return x
    if x.ty.dtype == typed("bool", x):
        return tirx.Select(x, tirx.const(1, target), tirx.const(0, target))
    if dtype == "bool":
        bits = rounding.magnitude_bits(x) if is_float(x) else x
        return tirx.NE(bits, const(0, bits))
    if is_float(x) and not dtype.startswith("float"):
        return tirx.call_llvm_pure_intrin(target, f"llvm.fpto{'ui' if dtype.startswith('uint') else 'si'}.sat", x)
    return tirx.Cast(target, x)


def _direct(op: Callable[..., Expr]) -> Callable[..., Expr]:
    """An op that names no intermediate values."""
    return lambda *args, bind: op(*args)


# Called as OPS[op](*values, *parameters, bind=bind). "cast" takes its dtype as a parameter.
OPS: dict[str, Callable[..., Expr]] = {
    **{op.__name__: op for op in (exp, sigmoid, tanh, erf, softplus, log, pow)},
    "add": _direct(rounding.add),
    "sub": _direct(rounding.sub),
    "mul": _direct(mul),
    "div": _direct(div),
    "min": _direct(rounding.minimum),
    "max": _direct(rounding.maximum),
    "prelu": _direct(prelu),
    "less": _direct(tirx.LT),
    "greater": _direct(tirx.GT),
    "equal": _direct(rounding.equal),
    "relu": _direct(relu),
    "sqrt": _direct(sqrt),
    "abs": _direct(tirx.abs),
    "neg": _direct(neg),
    "floor": _direct(tirx.floor),
    "isnan": _direct(rounding.is_nan),
    "cast": _direct(cast),
    "where": _direct(tirx.Select),
    "clip": _direct(clip),
    "leaky_relu": _direct(leaky_relu),
}

# Ops whose expression holds an argument more than once.
REPEATS = frozenset({"min", "max", "prelu", "leaky_relu", "pow"})

# Instructions a vector takes on AVX-512; those not named take one. Divisions and roots count as they occupy the unit.
COST: dict[str, float] = {
    **{"div": 8, "sqrt": 8, "min": 2, "max": 2, "clip": 2, "where": 1, "prelu": 3, "leaky_relu": 3, "cast": 2},
    **{"exp": 16, "sigmoid": 28, "tanh": 28, "erf": 25, "softplus": 28, "log": 26, "pow": 110},
}


def cost(op: str) -> float:
    """About how many vector instructions `op` takes on 16 lanes of AVX-512."""
    return COST.get(op, 1)


def evaluate(epilogue: Epilogue, accumulator: Expr, operands: Sequence[Expr], bind: Bind | None = None) -> Expr:
    """The epilogue's result for one scalar or vector of the anchor's results, each step rounded once to its dtype.

    float16 steps compute in float32 and round their result.

    bind  for values that are used twice; by default the result is one nest of Let expressions.
    """
    if bind is None:
        lets = Lets()
        return lets.around(evaluate(epilogue, accumulator, operands, lets))
    uses: Counter[str | float] = Counter()
    for step in epilogue.steps:
        for arg in step.args:
            uses[arg] += 2 if step.op in REPEATS else 1
    values = [accumulator]
    for index, step in enumerate(epilogue.steps, 1):
        value = _step(step, [_value(arg, values, operands) for arg in step.args], bind)
        # TVM's simplifier fails on a named vector of bool.
        values.append(bind(value) if uses[f"%{index}"] > 1 and step.dtype != "bool" else value)
    return values[-1]


def _value(arg: str | float, values: Sequence[Expr], operands: Sequence[Expr]) -> Expr | float:
    if not isinstance(arg, str):
        return arg
    return (values if arg.startswith("%") else operands)[int(arg[1:])]


def _step(step: Step, args: Sequence[Expr | float], bind: Bind) -> Expr:
    """One op on its arguments in the type it computes in. Comparisons compute in the type of what they compare."""
    like = next(a for a in args if isinstance(a, Expr))

    def argument(arg: Expr | float, dtype: str) -> Expr:
        if not isinstance(arg, Expr):
            arg = tirx.const(np.dtype(dtype).type(arg).item(), typed(dtype, like))
        return cast(arg, _computed(dtype))

    if step.op == "cast":
        return cast(like, step.dtype)
    if step.op == "where":
        condition, *branches = args
        values = [argument(condition, "bool"), *(argument(a, step.dtype) for a in branches)]
    else:
        compared = step.op in ("less", "greater", "equal", "isnan")
        values = [argument(a, str(like.ty.dtype.with_lanes(1)) if compared else step.dtype) for a in args]
    return cast(OPS[step.op](*values, *step.params, bind=bind), step.dtype)


def _computed(dtype: str) -> str:
    return "float32" if dtype == "float16" else dtype
