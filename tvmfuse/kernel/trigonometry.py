"""Circular functions, their inverses, and the inverse hyperbolic functions, as vector code for float32.

They compute in float64 and round once at the end, at most 0.51 ulp off: plain series are precise enough there, and none of these is where
a model's time goes. Bits are the same everywhere, as those of math.py are.

Sources   reduction of large arguments: M. Payne and R. Hanek, "Radian reduction for trigonometric functions", 1983, in integers as in
          N. Juffa's trig_red_slowpath_f; of others: Cody and Waite, with an fma that is exact.
"""

from __future__ import annotations

import math

from tvm import tirx
from tvm.ir import Expr

from .math import LOG2, Bind, elementary, horner, libm, typed
from .rounding import const, copysign, div, fma, mul, sqrt

# pi / 2 as float64, and the rest of it
HALF_PI_HIGH, HALF_PI_LOW = 1.5707963267948966, 6.123233995736766e-17
# 2 / pi after the binary point, 32 bits each
TWO_OVER_PI = (0xA2F9836E, 0x4E441529, 0xFC2757D1, 0xF534DDC0, 0xDB629599, 0x3C439041, 0xFE5163AB)
LARGE = 2.0**28  # from here on, what float64 leaves of n * pi / 2 is too coarse beside a remainder of 2**-29, the least there is
ROUNDING = 1.5 * 2.0**52  # added and subtracted, it leaves the nearest integer

# For |r| <= pi / 4: sin(r) / r and cos(r) in r**2, relative errors 2**-37 and 2**-41: their series, the highest degree first.
SINE = tuple((-1) ** k / math.factorial(2 * k + 1) for k in range(5, -1, -1))
COSINE = tuple((-1) ** k / math.factorial(2 * k) for k in range(6, -1, -1))
# atan(t) / t in t**2 for |t| <= tan(pi / 8); relative error 2**-37
ARCTANGENT = tuple((-1) ** k / (2 * k + 1) for k in range(13, -1, -1))


def _double(x: Expr, bind: Bind) -> Expr:
    return bind(tirx.Cast(typed("float64", x), x))


def _single(x: Expr) -> Expr:
    return tirx.Cast(typed("float32", x), x)


def _reduced(x: Expr, bind: Bind) -> tuple[Expr, Expr]:
    """(r, q) with |x| = r + q * pi / 2 modulo 2 pi and |r| <= pi / 4; of the uint64 q the last two bits count. Anything for infinities."""
    exact = bind(tirx.abs(_double(x, bind)))
    shifted = bind(fma(exact, const(2 / math.pi, exact), const(ROUNDING, exact)))
    n = bind(tirx.Sub(shifted, const(ROUNDING, exact)))
    near = fma(n, const(-HALF_PI_LOW, n), fma(n, const(-HALF_PI_HIGH, n), exact))
    far, turns = _reduced_far(x, bind)
    is_far = tirx.GE(exact, const(LARGE, exact))
    quarters = tirx.reinterpret(typed("uint64", x), shifted)
    return bind(tirx.Select(is_far, far, near)), bind(tirx.Select(is_far, turns, quarters))


def _reduced_far(x: Expr, bind: Bind) -> tuple[Expr, Expr]:
    """The same for LARGE <= |x|, which is m * 2**e with a whole m of 24 bits.

    Bits of 2 / pi that 2**e lifts above 2 make whole turns. The 96 that follow, times m, are the quarters with 62 bits of their fraction.
    """
    u64 = typed("uint64", x)

    def whole(value: int) -> Expr:
        return tirx.const(value, u64)

    bits = bind(tirx.Cast(u64, tirx.reinterpret(typed("uint32", x), x)))
    exponent = (bits >> whole(23)) & whole(255)
    skipped = bind(tirx.Max(exponent, whole(152)) - whole(152))  # e - 2
    word, shift = bind(skipped >> whole(5)), bind(whole(32) - (skipped & whole(31)))

    def at(offset: int) -> Expr:
        last = len(TWO_OVER_PI) - 4
        value = whole(TWO_OVER_PI[last + offset])
        for number in range(last - 1, -1, -1):
            value = tirx.Select(tirx.EQ(word, whole(number)), whole(TWO_OVER_PI[number + offset]), value)
        return bind(value)

    words = [at(offset) for offset in range(4)]
    high, middle, low = ((((a << whole(32)) | b) >> shift) & whole(0xFFFFFFFF) for a, b in zip(words, words[1:], strict=False))
    m = bind((bits & whole(0x7FFFFF)) | whole(0x800000))
    quarters = ((m * high) << whole(32)) + m * middle + ((m * low) >> whole(32))
    rounded = bind(quarters + whole(1 << 61))  # what overflows here and above are whole turns
    fraction = tirx.reinterpret(typed("int64", x), (rounded & whole((1 << 62) - 1)) - whole(1 << 61))
    r = tirx.Cast(typed("float64", x), fraction)
    return mul(r, const(HALF_PI_HIGH * 2.0**-62, r)), rounded >> whole(62)


def _sine_and_cosine(r: Expr, bind: Bind) -> tuple[Expr, Expr]:
    square = bind(mul(r, r))
    return bind(mul(r, horner(square, SINE))), bind(horner(square, COSINE))


def _is_odd(q: Expr) -> Expr:
    one = tirx.const(1, q.ty.dtype)
    return tirx.EQ(q & one, one)


def _circular(x: Expr, magnitude: Expr, sign: Expr) -> Expr:
    """The float64 magnitude as float32, its sign flipped where the highest bit of `sign` is set; of infinity there is no value.

    Flipped, not chosen: TVM's simplifier takes time for each use of a value, see math.Lets.
    """
    highest = tirx.const(1 << 31, sign.ty.dtype)
    flipped = tirx.reinterpret(sign.ty.dtype, _single(magnitude)) ^ (sign & highest)
    return tirx.Select(tirx.LT(tirx.abs(x), const(math.inf, x)), tirx.reinterpret(x.ty.dtype, flipped), const(math.nan, x))


def _sign_bits(x: Expr) -> Expr:
    return tirx.reinterpret(typed("uint32", x), x)


def _highest(q: Expr, bit: int) -> Expr:
    """A bit of q as the highest one of a uint32."""
    low = tirx.Cast(typed("uint32", q), q)
    return low << tirx.const(31 - bit, low.ty.dtype)


@elementary(libm("sin"))
def sin(x: Expr, bind: Bind) -> Expr:
    r, q = _reduced(x, bind)
    sine, cosine = _sine_and_cosine(r, bind)
    return _circular(x, tirx.Select(_is_odd(q), cosine, sine), _sign_bits(x) ^ _highest(q, 1))


@elementary(libm("cos"))
def cos(x: Expr, bind: Bind) -> Expr:
    """sin(|x| + pi / 2)"""
    r, q = _reduced(x, bind)
    sine, cosine = _sine_and_cosine(r, bind)
    return _circular(x, tirx.Select(_is_odd(q), sine, cosine), _highest(q + tirx.const(1, q.ty.dtype), 1))


@elementary(libm("tan"))
def tan(x: Expr, bind: Bind) -> Expr:
    """sin / cos, a quarter further on -cos / sin."""
    r, q = _reduced(x, bind)
    sine, cosine = _sine_and_cosine(r, bind)
    odd = _is_odd(q)
    quotient = div(tirx.Select(odd, cosine, sine), tirx.Select(odd, sine, cosine))
    return _circular(x, quotient, _sign_bits(x) ^ _highest(q, 0))


def _arctangent(t: Expr, bind: Bind) -> Expr:
    """Of a float64 from 0 to infinity: atan(t) = pi / 4 + atan((t - 1) / (t + 1)) = pi / 2 - atan(1 / t)."""
    one, zero = const(1, t), const(0, t)
    steep, middling = tirx.GT(t, const(1 + math.sqrt(2), t)), tirx.GT(t, const(math.sqrt(2) - 1, t))
    above = tirx.Select(steep, const(-1, t), tirx.Select(middling, tirx.Sub(t, one), t))
    below = tirx.Select(steep, t, tirx.Select(middling, tirx.Add(t, one), one))
    reduced = bind(div(above, below))
    offset = tirx.Select(steep, const(math.pi / 2, t), tirx.Select(middling, const(math.pi / 4, t), zero))
    return fma(reduced, horner(bind(mul(reduced, reduced)), ARCTANGENT), offset)


@elementary(libm("atan"))
def atan(x: Expr, bind: Bind) -> Expr:
    return copysign(_single(_arctangent(bind(tirx.abs(_double(x, bind))), bind)), x)


@elementary(libm("asin"))
def asin(x: Expr, bind: Bind) -> Expr:
    """atan(x / sqrt(1 - x**2)): NaN beyond 1."""
    one = const(1, magnitude := bind(tirx.abs(_double(x, bind))))
    other = sqrt(mul(tirx.Sub(one, magnitude), tirx.Add(one, magnitude)))
    return copysign(_single(_arctangent(bind(div(magnitude, other)), bind)), x)


@elementary(libm("acos"))
def acos(x: Expr, bind: Bind) -> Expr:
    """2 atan(sqrt((1 - x) / (1 + x))): NaN beyond 1."""
    one = const(1, exact := _double(x, bind))
    half = bind(_arctangent(bind(sqrt(div(tirx.Sub(one, exact), tirx.Add(one, exact)))), bind))
    return _single(tirx.Add(half, half))


def _log1p(u: Expr, bind: Bind) -> Expr:
    """log(1 + u) of a float64 from 0 to 2**1000, or NaN: log2((1 + s) / (1 - s)) of s = u / (2 + u), or of 1 + u's mantissa."""
    integer = typed("int64", u)
    one = const(1, u)
    bits = bind(tirx.reinterpret(integer, tirx.Add(one, u)))
    exponent = bind((bits - tirx.const(0x3FE5555555555555, integer)) >> tirx.const(52, integer))  # of a mantissa from 2 / 3 to 4 / 3
    mantissa = bind(tirx.reinterpret(u.ty.dtype, bits - (exponent << tirx.const(52, integer))))
    small = tirx.LE(u, const(1 / 3, u))
    above, below = tirx.Select(small, u, tirx.Sub(mantissa, one)), tirx.Select(small, tirx.Add(u, const(2, u)), tirx.Add(mantissa, one))
    s = bind(div(above, below))
    power = tirx.Select(small, const(0, u), tirx.Cast(u.ty.dtype, exponent))
    return mul(fma(s, horner(bind(mul(s, s)), LOG2), power), const(math.log(2), u))


@elementary(libm("asinh"))
def asinh(x: Expr, bind: Bind) -> Expr:
    """log1p(t + t**2 / (1 + sqrt(1 + t**2))) of t = |x|, with the sign of x."""
    t = bind(tirx.abs(_double(x, bind)))
    one, square = const(1, t), bind(mul(t, t))
    u = bind(tirx.Add(t, div(square, tirx.Add(one, sqrt(tirx.Add(one, square))))))
    return copysign(_unbounded(x, _log1p(u, bind)), x)


@elementary(libm("acosh"))
def acosh(x: Expr, bind: Bind) -> Expr:
    """log1p(t + sqrt(t * (t + 2))) of t = x - 1: NaN below 1."""
    t = bind(tirx.Sub(exact := _double(x, bind), const(1, exact)))
    u = bind(tirx.Add(t, sqrt(mul(t, tirx.Add(t, const(2, t))))))
    return tirx.Select(tirx.GE(x, const(1, x)), _unbounded(x, _log1p(u, bind)), const(math.nan, x))


def _unbounded(x: Expr, result: Expr) -> Expr:
    """The logarithm of infinity and of NaN is itself: bits that _log1p takes apart."""
    return tirx.Select(tirx.LT(tirx.abs(x), const(math.inf, x)), _single(result), tirx.abs(x))
