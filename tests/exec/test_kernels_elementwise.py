"""Elementwise passes: operands of every legal shape and order are read where they belong."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.exec.kernel_runner import HOST, assert_same_bits, inputs_of, run_default
from tvmfuse.kernel.elementwise import merge_axes
from tvmfuse.values import Elementwise, Epilogue, Machine, Operand, Step, Workload


@st.composite
def shapes_and_operands(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[Operand, ...]]:
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    operands = []
    for _ in range(draw(st.integers(0, 2))):
        axes = draw(st.permutations(range(len(shape))))[: draw(st.integers(0, len(shape)))]
        operands.append(Operand(tuple(shape[axis] for axis in axes), tuple(axes)))
    return shape, tuple(operands)


def as_output(operand: Operand, stored: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The operand broadcast to the output: axis by axis, by NumPy."""
    kept = [axis for axis in operand.axes if axis is not None]
    dense = stored.reshape([extent for extent, axis in zip(operand.shape, operand.axes, strict=True) if axis is not None])
    ordered = dense.transpose(np.argsort(kept)) if kept else dense
    return np.broadcast_to(ordered.reshape([extent if axis in kept else 1 for axis, extent in enumerate(shape)]), shape)


@given(shapes_and_operands())
@settings(max_examples=300)
def test_merged_axes_read_the_same_elements(case: tuple[tuple[int, ...], tuple[Operand, ...]]) -> None:
    shape, operands = case
    merged, fewer = merge_axes(shape, operands)
    assert len(merged) <= max(1, len(shape))
    for operand, same in zip(operands, fewer, strict=True):
        stored = np.arange(np.prod(operand.shape, dtype=int)).reshape(operand.shape)
        np.testing.assert_array_equal(
            as_output(operand, stored, shape).reshape(merged), as_output(same, stored.reshape(same.shape), merged)
        )


def test_a_bias_along_the_last_axis_leaves_two_axes() -> None:
    assert merge_axes((1, 56, 56, 64), (Operand((64,), (3,)),)) == ((3136, 64), (Operand((64,), (1,)),))


def test_a_permuted_operand_keeps_its_axes_apart() -> None:
    operand = Operand((4, 3), (1, 0))
    assert merge_axes((3, 4), (operand,)) == ((3, 4), (operand,))


@pytest.mark.parametrize(
    ("shape", "operand"),
    [
        ((3, 5000), Operand((3, 5000), (0, 1))),
        ((2, 3, 40), Operand((40,), (2,))),
        ((2, 3, 40), Operand((3,), (1,))),
        ((7, 19), Operand((19, 7), (1, 0))),
        ((2, 3, 1, 5), Operand((2, 1, 5), (0, None, 3))),
        ((1,), Operand((), ())),
    ],
)
def test_values_are_exact_with_one_thread_and_two(shape: tuple[int, ...], operand: Operand) -> None:
    workload = Workload(Elementwise(shape), Epilogue((Step("sub", ("$0", "%0")),), (operand,)))
    x, stored = inputs_of(workload)
    expected = as_output(operand, stored, shape) - x
    for threads in (1, 2):
        machine = Machine(HOST.isa, threads=threads)
        assert_same_bits([np.ascontiguousarray(expected), run_default(workload, machine, [x, stored])], ["NumPy", f"{threads} threads"])
