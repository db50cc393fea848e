"""Elementary functions against float64, and epilogues against NumPy, which rounds each operation once as well."""

from __future__ import annotations

import functools
import re

import numpy as np
import pytest
import scipy.special
from tvm import tirx

from tests.exec.kernel_runner import HOST, RUNNABLE
from tests.exec.llvm_scan import contractible
from tests.exec.vector_runner import assert_same, call, emitted, evaluated, vectorized
from tvmfuse.kernel import emit, math, trigonometry
from tvmfuse.kernel.rounding import const
from tvmfuse.values import VOCABULARY, Epilogue, Step

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def sigmoid(x: np.ndarray) -> np.ndarray:
    e = np.exp(-np.abs(x))
    return np.where(x < 0, e, 1) / (1 + e)


def softplus(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


# Largest errors found in units in the last place, over every float of the ranges where they can occur.
FUNCTIONS = {
    "exp": (math.exp, np.exp, 1.58),
    "sigmoid": (math.sigmoid, sigmoid, 1.65),
    "tanh": (math.tanh, np.tanh, 1.91),
    "erf": (math.erf, scipy.special.erf, 1.82),
    "log": (math.log, np.log, 0.90),
    "softplus": (math.softplus, softplus, 1.87),
    "atanh": (math.atanh, np.arctanh, 2.10),
    "sin": (trigonometry.sin, np.sin, 0.51),
    "cos": (trigonometry.cos, np.cos, 0.51),
    "tan": (trigonometry.tan, np.tan, 0.51),
    "asin": (trigonometry.asin, np.arcsin, 0.51),
    "acos": (trigonometry.acos, np.arccos, 0.51),
    "atan": (trigonometry.atan, np.arctan, 0.51),
    "asinh": (trigonometry.asinh, np.arcsinh, 0.51),
    "acosh": (trigonometry.acosh, np.arccosh, 0.51),
}
LEGALISED = {"atanh", "sin", "cos", "tan", "asin", "acos", "atan", "asinh", "acosh"}  # what only kernels that TVM legalises have
each_function = pytest.mark.parametrize("name", FUNCTIONS)
# Every 1,999th float, of all exponents and both signs.
SAMPLE = np.arange(0, 1 << 32, 1999, dtype=np.uint32)[: -(-(1 << 32) // 1999) // 16 * 16].view(np.float32)
SPECIAL = np.array(
    [
        0.0,
        -0.0,
        np.inf,
        -np.inf,
        np.nan,
        1e-45,
        -1e-45,
        1e-39,
        -1e-39,
        1.1754944e-38,
        -1.1754944e-38,
        3.4e38,
        -3.4e38,
        88.72284,
        -103.9,
        -100.0,
    ],
    np.float32,
)


def assert_within(result: np.ndarray, exact: np.ndarray, ulp: float) -> None:
    """`exact` in float64. Infinities, NaN and the signs of zeros have to agree; a result may overflow only where rounding does."""
    rounded = exact.astype(np.float32)
    np.testing.assert_array_equal(np.isnan(result), np.isnan(exact))
    np.testing.assert_array_equal(np.isinf(result), np.isinf(rounded))
    numbers = np.isfinite(rounded)
    spacing = np.spacing(np.maximum(np.abs(rounded[numbers]), np.finfo(np.float32).tiny))
    error = np.abs(result[numbers] - exact[numbers]) / spacing
    assert error.max() <= ulp, f"{error.max():.3f} ulp"
    zero = exact == 0
    np.testing.assert_array_equal(np.signbit(result[zero]), np.signbit(exact[zero]))


@each_function
def test_error_over_all_floats(name: str):
    function, reference, ulp = FUNCTIONS[name]
    assert_within(evaluated(function, SAMPLE), reference(SAMPLE.astype(np.float64)), ulp)


@each_function
def test_special_values(name: str):
    function, reference, ulp = FUNCTIONS[name]
    assert_within(evaluated(function, SPECIAL), reference(SPECIAL.astype(np.float64)), ulp)


def test_small_results_are_denormal():
    x = np.linspace(-103, -88, 64, dtype=np.float32)
    for name in ("exp", "sigmoid", "softplus"):
        result = evaluated(getattr(math, name), x)
        assert ((result > 0) & (result < np.finfo(np.float32).tiny)).all()


@each_function
def test_same_bits_for_every_width_and_instruction_set(name: str):
    x = np.concatenate([SPECIAL, SAMPLE[::97][: 1024 - SPECIAL.size]])
    function, *_ = FUNCTIONS[name]
    results = [call(make(function, [x], lanes, isa), [x]) for isa in RUNNABLE for lanes in (1, 4, 8, 16) for make in (emitted, vectorized)]
    for result in results:
        assert_same(result, results[0])


@pytest.mark.parametrize("name", [*FUNCTIONS, "pow"])
@pytest.mark.parametrize("make", [emitted, vectorized])
def test_nothing_is_scalar_nor_left_to_contraction(name: str, make):
    inputs = [SAMPLE[:256]] * (2 if name == "pow" else 1)
    function = math.pow if name == "pow" else FUNCTIONS[name][0]
    llvm = make(function, inputs, 16, HOST.isa).mod.inspect_source("ll")
    assert not contractible(llvm)
    assert not re.search(r"call float @(?!llvm\.fabs)|f(mul|div|sub|add) float", llvm)  # TVM's own conversion of halves takes fabs


def test_pow_follows_c_for_special_values():
    edge = [
        0,
        -0.0,
        1,
        -1,
        2,
        -2,
        3,
        -3,
        0.5,
        -0.5,
        np.inf,
        -np.inf,
        np.nan,
        1e-45,
        -1e-45,
        1e38,
        -1e38,
        2.5,
        2**24,
        -(2**24) - 2,
        16777215,
        128,
    ]
    x, y = (np.resize(side, 496).astype(np.float32) for side in np.meshgrid(edge, edge))
    assert_within(evaluated(math.pow, x, y), np.power(x.astype(np.float64), y), 0.51)


def test_pow_error():
    random = np.random.default_rng(1)
    x = np.exp2(random.uniform(-149, 128, 1 << 16)).astype(np.float32)
    y = (random.uniform(-150, 129, x.size) / np.log2(x)).astype(np.float32)
    near_one = random.uniform(0.9, 1.1, x.size).astype(np.float32)
    for base, exponent in ((x, y), (near_one, y * np.float32(10)), (-x, np.round(y))):
        assert_within(evaluated(math.pow, base, exponent), np.power(base.astype(np.float64), exponent), 0.51)


def test_first_power_is_the_value():
    assert_same(evaluated(math.pow, SAMPLE[:4096], np.ones(4096, np.float32)), SAMPLE[:4096])


LITERAL = [(0.0, 0.0), (1.0, 0.0), (-1.0, 0.5), (2.0, 0.5), (0.5, 0.5), (0.75, 1.7), (3.0, 1.5), (2.5, 0.51)]


@pytest.mark.parametrize(("exponent", "ulp"), LITERAL)
def test_pow_with_a_literal_exponent(exponent: float, ulp: float):
    x = np.concatenate([SPECIAL, SAMPLE[:: 1 << 6]])[: 1 << 15]
    assert_within(evaluated(lambda v: math.pow(v, const(exponent, v)), x), np.power(x.astype(np.float64), np.full(x.shape, exponent)), ulp)


def test_three_quarters_of_every_mantissa():
    """16**0.75 is 8: what is true from 1 to 16 is true of every other normal or denormal number."""
    chunks = np.arange(0x3F800000, 0x41800000, dtype=np.uint32).view(np.float32).reshape(8, -1)
    power = vectorized(lambda v: math.pow(v, const(0.75, v)), [chunks[0]], 16, HOST.isa)
    for x in chunks:
        root = np.sqrt(x.astype(np.float64))
        assert_within(call(power, [x]), root * np.sqrt(root), 1.7)


def test_float64_takes_tvms_functions():
    x = np.linspace(0.5, 4, 16)
    for function, reference, _ in FUNCTIONS.values():
        np.testing.assert_allclose(evaluated(function, x, lanes=1), reference(x), rtol=1e-14)


# --- evaluate ---

X = np.concatenate([SPECIAL, np.linspace(-4, 4, 112, dtype=np.float32)])
Y = np.random.default_rng(2).permutation(X)

NUMPY = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "min": lambda x, y: np.where(x == y, y, np.minimum(x, y)),
    "max": lambda x, y: np.where(x == y, y, np.maximum(x, y)),
    "prelu": lambda x, y: np.where(x >= 0, x, x * y),
    "less": np.less,
    "greater": np.greater,
    "equal": np.equal,
    "relu": lambda x: np.where(x < 0, np.float32(0), x),
    "sqrt": np.sqrt,
    "abs": np.abs,
    "neg": np.negative,
    "floor": np.floor,
    "isnan": np.isnan,
    "cast": lambda x: x,
    "clip": lambda x: np.clip(x, np.float32(-1), np.float32(0.1)),
    "leaky_relu": lambda x: np.where(x >= 0, x, x * np.float32(0.1)),
}
PARAMETERS = {"clip": (-1.0, 0.1), "leaky_relu": (0.1,)}


def applied(epilogue: Epilogue, *inputs: np.ndarray, lanes: int = 16) -> np.ndarray:
    """The first input as the anchor's result, the others as operands."""
    dtype = epilogue.steps[-1].dtype
    return evaluated(lambda x, *rest: math.evaluate(epilogue, x, rest, emit.held), *inputs, dtype=dtype, lanes=lanes)


def test_vocabulary_is_covered():
    assert set(math.OPS) == set(VOCABULARY) == {*NUMPY, *FUNCTIONS, "pow", "where"} - LEGALISED
    assert all(math.cost(op) >= 1 for op in VOCABULARY)


@pytest.mark.parametrize("lanes", [1, 16])
@pytest.mark.parametrize("op", NUMPY)
def test_op_rounds_as_numpy(op: str, lanes: int):
    compares = op in ("less", "greater", "equal", "isnan")
    binary = VOCABULARY[op][0] == 2
    step = Step(op, ("%0", "$0") if binary else ("%0",), PARAMETERS.get(op, ()), "bool" if compares else "float32")
    got = applied(Epilogue((step,)), X, Y, lanes=lanes)
    want = NUMPY[op](X, Y) if binary else NUMPY[op](X)
    assert got.dtype == want.dtype
    assert_same(got, want)


def test_where_takes_a_condition_and_literals():
    epilogue = Epilogue((Step("less", ("%0", "$0"), dtype="bool"), Step("where", ("%1", 7.0, "$0"))))
    assert_same(applied(epilogue, X, Y), np.where(X < Y, np.float32(7), Y))


def test_where_reads_a_mask():
    mask = np.arange(X.size) % 3 == 0
    assert_same(applied(Epilogue((Step("where", ("$0", "%0", 1.0)),)), X, mask), np.where(mask, X, np.float32(1)))


def test_float16_steps_round_at_each_result():
    steps = (Step("cast", ("%0",), dtype="float16"), Step("mul", ("%1", 0.1), dtype="float16"), Step("add", ("%2", "%1"), dtype="float16"))
    x = np.linspace(-300, 300, 256, dtype=np.float32)
    half = x.astype(np.float16)
    assert_same(applied(Epilogue(steps), x), half * np.float16(0.1) + half)


def test_cast_to_integers_saturates():
    x = np.array([np.nan, np.inf, -np.inf, 3e9, -3e9, 2.7, -2.7, 0.0] * 2, np.float32)
    want = [0, 2**31 - 1, -(2**31), 2**31 - 1, -(2**31), 2, -2, 0] * 2
    for lanes in (1, 16):
        np.testing.assert_array_equal(applied(Epilogue((Step("cast", ("%0",), dtype="int32"),)), x, lanes=lanes), want)


def test_cast_to_and_from_bool():
    steps = (Step("cast", ("%0",), dtype="bool"), Step("cast", ("%1",)))
    assert_same(applied(Epilogue(steps), X), X.astype(bool).astype(np.float32))


def test_value_used_twice_is_held_once():
    held = []

    def record(value):
        held.append(value)
        return tirx.Var("v", value.ty)

    swish = Epilogue((Step("add", ("%0", 1.0)), Step("neg", ("%1",)), Step("mul", ("%1", "%2"))))
    math.evaluate(swish, tirx.Var("x", "float32"), [], record)
    assert len(held) == 1 and isinstance(held[0], tirx.Add)


def test_long_chains_stay_small():
    """30 times x + x is 2**30 terms to whoever writes out its values where they are used."""
    doubled = Epilogue(tuple(Step("add", (f"%{i}", f"%{i}")) for i in range(30)))
    assert_same(applied(doubled, X), functools.reduce(lambda v, _: v + v, range(30), X))


def test_swish_after_swish():
    swish = tuple(step for i in (0, 2, 4) for step in (Step("sigmoid", (f"%{i}",)), Step("mul", (f"%{i}", f"%{i + 1}"))))
    want = functools.reduce(lambda v, _: v * sigmoid(v), range(3), np.linspace(-4, 4, 128))
    np.testing.assert_allclose(applied(Epilogue(swish), np.linspace(-4, 4, 128, dtype=np.float32)), want, rtol=2e-6)


def test_default_is_one_expression():
    """Without a place for statements: Let expressions, the same bits."""
    swish = Epilogue((Step("sigmoid", ("%0",)), Step("mul", ("%0", "%1"))))
    in_lets = call(vectorized(lambda x: math.evaluate(swish, x, []), [X], 16, HOST.isa), [X])
    assert_same(in_lets, applied(swish, X))
