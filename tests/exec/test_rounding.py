"""Each operation rounds where it is written, whatever LLVM and TVM's simplifier know of real numbers."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import tvm
from tvm import te, tirx
from tvm.s_tir import Schedule

from tests.exec.kernel_runner import HOST, each_isa, target_for
from tests.exec.llvm_scan import contractible
from tests.exec.vector_runner import assert_same, call, emitted, evaluated, vectorized
from tvmfuse.kernel import rounding
from tvmfuse.kernel.exact import ExactRounding
from tvmfuse.kernel.rounding import const
from tvmfuse.values import ISA

SPECIAL = np.array(
    [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 3e38, -3e38, 1.1754944e-38, 0.1, 3.0, 2.5, -7.0], np.float32
)
PAIRS = tuple(np.array(side, np.float32) for side in zip(*itertools.product(SPECIAL, SPECIAL), strict=True))
RANDOM = tuple(np.random.default_rng(0).standard_normal((3, 4096)).astype(np.float32))

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def fenced(a, b, c):
    return rounding.add(rounding.mul(a, b), c)


def test_scan_finds_an_unfenced_product():  # TVM makes it llvm.fmuladd
    executable = emitted(lambda a, b, c: tirx.Add(tirx.Mul(a, b), c), RANDOM, 16, HOST.isa)
    assert contractible(executable.mod.inspect_source("ll"))


def test_scan_sees_through_a_negation():
    assert contractible("define void @f() {\n  %1 = fmul float %a, %b\n  %2 = fneg float %1\n  %3 = fadd float %2, %c\n}")
    assert contractible("define void @f() {\n  %1 = fmul float %a, %b\n  %2 = fsub float %c, %1\n}")
    assert not contractible("define void @f() {\n  %1 = fmul float %a, %b\n}\ndefine void @g() {\n  %3 = fadd float %1, %c\n}")


@each_isa
@pytest.mark.parametrize("make", [emitted, vectorized])
def test_product_is_rounded_before_the_sum(make, isa: ISA):
    executable = make(fenced, RANDOM, 16, isa)
    assert not contractible(executable.mod.inspect_source("ll"))
    assert_same(call(executable, RANDOM), RANDOM[0] * RANDOM[1] + RANDOM[2])


def test_fma_rounds_once():
    a, b, c = RANDOM
    exact = (a.astype(np.float64) * b + c).astype(np.float32)  # 48 bits of product and a sum of like size fit in float64's 53 but rarely
    result = evaluated(rounding.fma, a, b, c)
    assert np.mean(result == exact) > 0.999 and np.mean(a * b + c == exact) < 0.9


@pytest.mark.parametrize("divisor", [3.0, 6.0, 49.0, 0.1, 4.0])
def test_division_by_a_constant_is_a_division(divisor: float):
    assert_same(evaluated(lambda x: rounding.div(x, const(divisor, x)), RANDOM[0]), RANDOM[0] / np.float32(divisor))


def test_division_by_a_power_of_two_is_no_free_product():
    executable = emitted(lambda a, b, c: rounding.add(rounding.div(a, const(64, a)), b), RANDOM, 16, HOST.isa)
    assert not contractible(executable.mod.inspect_source("ll"))


# What TVM's simplifier makes of these for real numbers: y, 0, 0, x, 0, True.
@pytest.mark.parametrize("make", [emitted, vectorized])
@pytest.mark.parametrize(
    ("expression", "reference"),
    [
        (lambda x, y: rounding.sub(rounding.add(x, y), x), lambda x, y: (x + y) - x),
        (lambda x, y: rounding.sub(x, x), lambda x, y: x - x),
        (lambda x, y: rounding.mul(x, const(0, x)), lambda x, y: x * np.float32(0)),
        (lambda x, y: rounding.add(x, const(0, x)), lambda x, y: x + np.float32(0)),
        (lambda x, y: rounding.div(const(0, x), x), lambda x, y: np.float32(0) / x),
        (lambda x, y: tirx.Select(rounding.equal(x, x), y, const(5, x)), lambda x, y: np.where(np.isnan(x), np.float32(5), y)),
    ],
    ids=["(x+y)-x", "x-x", "x*0", "x+0", "0/x", "x==x"],
)
def test_floats_are_not_folded_as_reals(make, expression, reference):
    assert_same(call(make(expression, PAIRS, 16, HOST.isa), PAIRS), reference(*PAIRS))


@each_isa
@pytest.mark.parametrize("make", [emitted, vectorized])
@pytest.mark.parametrize(("op", "reference"), [(rounding.maximum, np.maximum), (rounding.minimum, np.minimum)])
def test_extremum_keeps_nan_of_either_side(make, op, reference, isa: ISA):
    a, b = PAIRS
    want = np.where(a == b, b, reference(a, b))  # of zeros that compare equal the second
    assert_same(call(make(op, PAIRS, 16, isa), PAIRS), want)


@pytest.mark.parametrize(("op", "reference"), [(rounding.maximum, np.maximum), (rounding.minimum, np.minimum)])
@pytest.mark.parametrize("lit", [0.0, 6.0, -math.inf])
def test_extremum_with_a_literal_is_one_operation(op, reference, lit: float):
    want = np.where(lit == SPECIAL, SPECIAL, reference(np.float32(lit), SPECIAL))
    for expression in (lambda x: op(x, const(lit, x)), lambda x: op(const(lit, x), x)):
        executable = emitted(expression, [SPECIAL], 16, HOST.isa)
        assert_same(call(executable, [SPECIAL]), want)
        assert "fcmp ord" not in executable.mod.inspect_source("ll")


def test_extremum_with_a_nan_literal_is_nan():
    assert np.isnan(evaluated(lambda x: rounding.maximum(x, const(math.nan, x)), SPECIAL)).all()


def test_integers_take_their_own_arithmetic():
    a, b = np.arange(-8, 8, dtype=np.int32), np.full(16, 3, np.int32)
    for op, reference in ((rounding.add, np.add), (rounding.sub, np.subtract), (rounding.mul, np.multiply), (rounding.maximum, np.maximum)):
        np.testing.assert_array_equal(evaluated(op, a, b), reference(a, b))


@pytest.mark.parametrize("make", [emitted, vectorized])
def test_nan_is_seen_and_its_negation_too(make):
    flag = {
        np.isnan: lambda x: tirx.Select(rounding.is_nan(x), const(1, x), const(0, x)),
        lambda x: ~np.isnan(x): lambda x: tirx.Select(tirx.Not(rounding.is_nan(x)), const(1, x), const(0, x)),
        lambda x: x < 1: lambda x: tirx.Select(rounding.decided(x < const(1, x)), const(1, x), const(0, x)),
        lambda x: ~(x < 1): lambda x: tirx.Select(tirx.Not(rounding.decided(x < const(1, x))), const(1, x), const(0, x)),
    }
    for reference, expression in flag.items():
        np.testing.assert_array_equal(call(make(expression, [SPECIAL], 16, HOST.isa), [SPECIAL]), reference(SPECIAL))


def test_signs_and_roots():
    x, y = PAIRS
    assert_same(evaluated(rounding.neg, SPECIAL), -SPECIAL)
    assert_same(evaluated(rounding.copysign, x, y)[~np.isnan(y)], np.copysign(x, y)[~np.isnan(y)])
    assert_same(evaluated(rounding.sqrt, SPECIAL), np.sqrt(SPECIAL))


def test_polynomials_inlined_twice_keep_their_names_apart():
    """The names inside one Let expression are bound to two values once it stands in two places."""
    a = te.placeholder((65,), "float32", "a")
    b = te.compute((65,), lambda i: tirx.exp(a(i)), "b")
    func = te.create_prim_func([a, te.compute((64,), lambda i: b(i) - b(i + 1), "c")])
    sch = Schedule(ExactRounding()(tvm.IRModule({"main": func})))
    sch.compute_inline("b")
    x = np.linspace(-2, 2, 65, dtype=np.float32)
    out = tvm.runtime.tensor(np.zeros(64, np.float32))
    tvm.compile(sch.mod, target_for(HOST.isa))(tvm.runtime.tensor(x), out)
    np.testing.assert_allclose(out.numpy(), np.exp(x[:-1]) - np.exp(x[1:]), rtol=1e-5, atol=1e-6)
