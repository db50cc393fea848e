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
from collections.abc import Callable, Sequence

import tvm_ffi
from tvm import tirx
from tvm.ir import Expr

from ..values import Epilogue
from .rounding import add, const, copysign, div, equal, fma, is_float, is_number, literal, maximum, minimum, mul, neg, sqrt, sub

# Gives a value a name, so that using it twice does not compute it twice.
Bind = Callable[[Expr], Expr]

# exp(r) = 1 + r * (1 + r * Q(r)) for |r| <= ln 2; relative error 2**-26.0
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
# float64: log2((1 + s) / (1 - s)) = s * A(s**2) for |s| <= 1/5; relative error 2**-43
LOG2 = ()
# float64: 2**r for |r| <= 1/2; relative error 2**-39.8
EXP2 = (
    *(1.3195717316422143e-06, 1.5308990878247973e-05, 0.0001540371437035943, 0.0013333455292721234),
    *(0.009618128868158028, 0.05550410936270158, 0.24022650696214973, 0.6931471805459279, 1.0),
)

LOG2_E = 1.4426950408889634
LN2_HIGH, LN2_LOW = 0.693147182464599609375, -1.904654299957767e-09  # float32(ln 2), and the rest of it
