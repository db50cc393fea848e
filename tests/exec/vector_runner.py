"""Expressions compiled at a number of lanes, in both ways that vector code comes about, and run on arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tvm
from tvm import te
from tvm.ir import Expr
from tvm.s_tir import Schedule

from tests.exec.kernel_runner import HOST, target_for
from tvmfuse.kernel import emit
from tvmfuse.kernel.family import Buffer
from tvmfuse.values import ISA

Expression = Callable[..., Expr]


def emitted(expression: Expression, inputs: Sequence[np.ndarray], lanes: int, isa: ISA, dtype: str | None = None) -> tvm.runtime.Executable:
    """In vectors from the start, as our kernels are. Arrays are as long as a multiple of `lanes`."""
    buffers = [Buffer(array.shape, str(array.dtype)) for array in inputs]
    out = Buffer(inputs[0].shape, dtype or buffers[0].dtype)

    def body(*views: emit.Flat) -> None:
        with emit.loop(inputs[0].size // lanes) as step:
            views[-1].store(step * lanes, expression(*(view.load(step * lanes, lanes) for view in views[:-1])), lanes)

    return tvm.compile(tvm.IRModule({"main": emit.function("main", [*buffers, out], body)}), target_for(isa))


def vectorized(expression: Expression, inputs: Sequence[np.ndarray], lanes: int, isa: ISA) -> tvm.runtime.Executable:
    """Scalar until a schedule vectorises it, as TVM's operators are."""
    placeholders = [te.placeholder(array.shape, str(array.dtype), f"p{i}") for i, array in enumerate(inputs)]
    result = te.compute(inputs[0].shape, lambda i: expression(*(p(i) for p in placeholders)), "result")
    sch = Schedule(te.create_prim_func([*placeholders, result]))
    (i,) = sch.get_loops("result")
    if lanes > 1:
        sch.vectorize(sch.split(i, [None, lanes])[1])
    return tvm.compile(sch.mod, target_for(isa))


def call(executable: tvm.runtime.Executable, inputs: Sequence[np.ndarray], dtype: str | None = None) -> np.ndarray:
    out = tvm.runtime.tensor(np.zeros(inputs[0].shape, dtype or inputs[0].dtype))
    executable(*(tvm.runtime.tensor(array) for array in inputs), out)
    return out.numpy()


def evaluated(expression: Expression, *inputs: np.ndarray, dtype: str | None = None, lanes: int = 16, isa: ISA = HOST.isa) -> np.ndarray:
    return call(emitted(expression, inputs, lanes, isa, dtype), inputs, dtype)


def assert_same(got: np.ndarray, want: np.ndarray) -> None:
    """To the bit, signs of zeros included; NaN in the same places."""
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_array_equal(got, want)
    numbers = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(got[numbers]), np.signbit(want[numbers]))
