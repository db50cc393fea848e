"""Depthwise convolution kernels: within the error bound of an fma chain, and the same bits however they are tiled."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from tests.exec.kernel_runner import (
    HOST,
    RUNNABLE,
    after_chain,
    assert_same_bits,
    assert_within_rounding,
    chained,
    each_isa,
    each_placement,
    inputs_of,
    roundings_of_chain,
    run,
    run_default,
    some_tiles,
    with_knobs,
)
from tvmfuse.errors import ScheduleRefused
from tvmfuse.kernel import candidates, depthwise
from tvmfuse.values import ISA, Conv2d, Machine


def depthwise_anchor(h: int, w: int, channels: int, kh: int, kw: int, *rest: tuple, n: int = 1, dtype: str = "float32") -> Conv2d:
    stride, padding, dilation = (*rest, *((1, 1), (0, 0, 0, 0), (1, 1))[len(rest) :])
    return Conv2d(n, h, w, channels, channels, kh, kw, stride, padding, dilation, channels, dtype)


SHAPES = [
    depthwise_anchor(5, 7, 20, 3, 3),
    depthwise_anchor(5, 6, 33, 3, 3, (1, 1), (1, 1, 1, 1), n=2),
    depthwise_anchor(7, 9, 16, 3, 3, (2, 2), (0, 0, 1, 1)),
    depthwise_anchor(6, 9, 18, 3, 2, (1, 3), (2, 0, 1, 2), (2, 3)),
    depthwise_anchor(1, 32, 64, 1, 3, (1, 2), (0, 1, 0, 1)),
    depthwise_anchor(1, 1, 5, 3, 3, (1, 1), (1, 1, 1, 1)),
    depthwise_anchor(1, 1, 5, 1, 1, (2, 2), (1, 1, 0, 0)),
    depthwise_anchor(2, 3, 5, 5, 7, (1, 1), (2, 3, 2, 3)),
    depthwise_anchor(4, 4, 2, 1, 1),
]
PADDED = chained(depthwise_anchor(5, 10, 37, 3, 3, (1, 1), (1, 1, 0, 2)))


def reference(anchor: Conv2d) -> Callable[..., np.ndarray]:
    (top, left, bottom, right), (sh, sw), (dh, dw) = anchor.padding, anchor.stride, anchor.dilation

    def chain(x: np.ndarray, w: np.ndarray, factor: np.ndarray, bias: np.ndarray) -> np.ndarray:
        x = np.pad(x, ((0, 0), (top, bottom), (left, right), (0, 0)))
        sums = np.zeros(anchor.output_shape())
        for kh, kw in itertools.product(range(anchor.kh), range(anchor.kw)):
            sums += x[:, kh * dh :: sh, kw * dw :: sw][:, : anchor.oh, : anchor.ow] * w[:, kh, kw, 0]
        return after_chain(sums, factor, bias)

    return chain


def assert_right(anchor: Conv2d, machine: Machine = HOST) -> None:
    workload = chained(anchor)
    inputs = inputs_of(workload)
    assert_within_rounding(run_default(workload, machine, inputs), reference(anchor), inputs, roundings_of_chain(anchor.kh * anchor.kw))


@pytest.mark.parametrize("anchor", SHAPES, ids=str)
def test_result_is_within_the_bound_of_its_reduction(anchor: Conv2d) -> None:
    assert_right(anchor)


@each_isa
def test_tails_are_right_on_every_isa(isa: ISA) -> None:
    assert_right(PADDED.anchor, Machine(isa))


def test_float64() -> None:
    assert_right(depthwise_anchor(4, 5, 11, 3, 3, (1, 1), (1, 1, 1, 1), dtype="float64"))


def test_bits_are_the_same_in_every_placement_cut_and_tile() -> None:
    placements, tiles = each_placement(PADDED, HOST), some_tiles(PADDED, HOST, 4)
    assert (len(placements), len(set(tiles))) == (7, 4)
    results = run(PADDED, [*placements, *tiles], HOST, inputs_of(PADDED))
    assert_same_bits([result for (result,) in results], [*placements, *tiles])


def test_a_tap_outside_multiplies_a_real_zero() -> None:
    workload = chained(depthwise_anchor(3, 3, 1 + HOST.isa.lanes(), 3, 3, (1, 1), (1, 1, 1, 1)))
    x, w, *operands = inputs_of(workload)
    w[:, 0, 0, 0] = np.inf
    result = run_default(workload, HOST, [x, w, *operands])
    outside = np.zeros((3, 3), bool)
    outside[0, :] = outside[:, 0] = True  # where the first tap is
    assert (np.isnan(result[0]) == outside[..., None]).all()


def test_bits_are_the_same_for_every_thread_count() -> None:
    whole = [c for c in each_placement(PADDED, HOST) if c.cut in (0, 3)]
    chosen = [with_knobs(candidate, threads=threads) for candidate in whole for threads in (1, 2)]
    assert_same_bits([result for (result,) in run(PADDED, chosen, HOST, inputs_of(PADDED))], chosen)


def test_bits_are_the_same_on_every_isa() -> None:
    inputs = inputs_of(PADDED)
    assert_same_bits([run_default(PADDED, Machine(isa), inputs) for isa in RUNNABLE], RUNNABLE)


@pytest.mark.parametrize("anchor", SHAPES, ids=str)
def test_default_is_all_in_registers_and_comes_first(anchor: Conv2d) -> None:
    first, *others = candidates(chained(anchor), HOST)
    assert (first.placement, first.cut) == ("register", 3)
    assert first not in others


def test_no_tile_on_offer_holds_more_than_the_registers_with_the_inputs_its_taps_share() -> None:
    lanes = HOST.isa.lanes()
    for candidate in candidates(chained(depthwise_anchor(56, 56, 96, 3, 3)), HOST):
        assert (2 * candidate["tw"] + 1) * candidate["nr"] // lanes + 1 <= HOST.isa.registers


def test_a_kernel_so_wide_that_many_tiles_cross_the_border_has_candidates() -> None:
    assert candidates(chained(depthwise_anchor(1, 100, 5, 1, 65, (1, 1), (0, 32, 0, 32))), HOST)


def test_refuses_a_tile_that_does_not_fit_the_registers() -> None:
    candidate = with_knobs(candidates(PADDED, HOST)[0], tw=HOST.isa.registers, nr=HOST.isa.lanes())
    with pytest.raises(ScheduleRefused, match=f"needs {HOST.isa.registers + 2} registers"):
        depthwise.kernel(PADDED, candidate, HOST)
