"""Convolution kernels: within the error bound of an fma chain, and the same bits however they are tiled and padded."""

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
from tvmfuse.kernel import candidates, conv2d
from tvmfuse.values import AVX512, ISA, Candidate, Conv2d, Machine, Workload

SHAPES = [
    Conv2d(1, 6, 7, 5, 20, 3, 3),
    Conv2d(2, 5, 6, 8, 12, 3, 3, padding=(1, 1, 1, 1)),
    Conv2d(1, 9, 11, 3, 17, 3, 3, (2, 2), (0, 1, 1, 0)),
    Conv2d(1, 8, 9, 4, 5, 3, 2, (1, 3), (2, 0, 1, 2), (2, 3)),
    Conv2d(1, 6, 6, 12, 10, 3, 3, padding=(1, 1, 1, 1), groups=2),
    Conv2d(1, 4, 5, 6, 12, 1, 3, padding=(0, 1, 0, 1), groups=6),
    Conv2d(1, 1, 1, 5, 7, 3, 3, padding=(1, 1, 1, 1)),
    Conv2d(1, 1, 1, 5, 7, 1, 1, (2, 2), (1, 1, 0, 0)),
    Conv2d(1, 2, 3, 5, 7, 5, 7, padding=(2, 3, 2, 3)),
    Conv2d(1, 5, 5, 1, 1, 1, 1),
    Conv2d(1, 6, 7, 20, 1, 3, 3, padding=(1, 1, 1, 1)),  # one channel: dot products
    Conv2d(1, 3, 9, 64, 1, 1, 3, padding=(0, 1, 0, 1)),
]
PADDED = chained(Conv2d(1, 5, 9, 5, 19, 3, 3, padding=(1, 1, 0, 2)))
DEFAULT = candidates(PADDED, HOST)[0]
NARROW = chained(Conv2d(2, 5, 4, 3, 21, 3, 3, (2, 1), (1, 1, 1, 1)))


def reference(anchor: Conv2d) -> Callable[..., np.ndarray]:
    (top, left, bottom, right), (sh, sw), (dh, dw) = anchor.padding, anchor.stride, anchor.dilation
    channels, per_group = anchor.ci // anchor.groups, anchor.co // anchor.groups

    def chain(x: np.ndarray, w: np.ndarray, factor: np.ndarray, bias: np.ndarray) -> np.ndarray:
        x = np.pad(x, ((0, 0), (top, bottom), (left, right), (0, 0)))
        sums = np.zeros(anchor.output_shape())
        for kh, kw, group in itertools.product(range(anchor.kh), range(anchor.kw), range(anchor.groups)):
            seen = x[:, kh * dh :: sh, kw * dw :: sw, group * channels : (group + 1) * channels][:, : anchor.oh, : anchor.ow]
            outputs = slice(group * per_group, (group + 1) * per_group)
            sums[..., outputs] += seen @ w[outputs, kh, kw].T
        return after_chain(sums, factor, bias)

    return chain


def assert_right(anchor: Conv2d, machine: Machine = HOST) -> None:
    workload = chained(anchor)
    inputs = inputs_of(workload)
    first_of_padding = {candidate["pad"]: candidate for candidate in reversed(candidates(workload, machine)) if candidate.cut == 3}
    results = [result for (result,) in run(workload, first_of_padding.values(), machine, inputs)]
    roundings = roundings_of_chain(anchor.kh * anchor.kw * anchor.ci // anchor.groups)
    assert_within_rounding(results[0], reference(anchor), inputs, roundings)
    assert_same_bits(results, list(first_of_padding))


@pytest.mark.parametrize("anchor", SHAPES, ids=str)
def test_result_is_within_the_bound_of_its_reduction(anchor: Conv2d) -> None:
    assert_right(anchor)


@each_isa
def test_tails_are_right_on_every_isa(isa: ISA) -> None:
    assert_right(PADDED.anchor, Machine(isa))


@each_isa
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_one_pixel_of_many_channels_is_right_on_every_isa(isa: ISA, dtype: str) -> None:
    assert_right(Conv2d(1, 1, 1, 3, 70, 3, 3, padding=(1, 1, 1, 1), dtype=dtype), Machine(isa))


def test_float64() -> None:
    assert_right(Conv2d(1, 4, 5, 3, 11, 3, 3, padding=(1, 1, 1, 1), dtype="float64"))


@pytest.mark.parametrize("workload", [PADDED, NARROW], ids=["columns to a tile", "rows to a tile"])
def test_bits_are_the_same_in_every_placement_cut_and_tile(workload: Workload) -> None:
    placements, tiles = each_placement(workload, HOST), some_tiles(workload, HOST, 4)
    assert (len(placements), len(set(tiles))) == (7, 4)
    results = run(workload, [*placements, *tiles], HOST, inputs_of(workload))
    assert_same_bits([result for (result,) in results], [*placements, *tiles])


@pytest.mark.parametrize("tw", [1, 3, 4, 10])
def test_bits_are_the_same_whether_padding_is_copied_or_inline(tw: int) -> None:
    chosen = [with_knobs(DEFAULT, th=1, tw=tw, nr=HOST.isa.lanes(), pad=pad) for pad in ("copy", "inline")]
    assert_same_bits([result for (result,) in run(PADDED, chosen, HOST, inputs_of(PADDED))], chosen)


@pytest.mark.parametrize("pad", ["copy", "inline"])
def test_a_tap_outside_multiplies_a_real_zero(pad: str) -> None:
    workload = chained(Conv2d(1, 3, 3, 1, 1, 3, 3, padding=(1, 1, 1, 1)))
    x, w, *operands = inputs_of(workload)
    w[0, 0, 0, 0] = np.inf
    ((result,),) = run(workload, [with_knobs(candidates(workload, HOST)[0], th=1, pad=pad)], HOST, [x, w, *operands])
    outside = np.zeros((3, 3), bool)
    outside[0, :] = outside[:, 0] = True  # where the first tap is
    assert (np.isnan(result[0, :, :, 0]) == outside).all()


def test_bits_are_the_same_for_every_thread_count() -> None:
    whole = [c for c in each_placement(PADDED, HOST) if c.cut in (0, 3)]
    chosen = [with_knobs(candidate, threads=threads) for candidate in whole for threads in (1, 2)]
    assert_same_bits([result for (result,) in run(PADDED, chosen, HOST, inputs_of(PADDED))], chosen)


@pytest.mark.parametrize("pad", ["copy", "inline"])
def test_bits_are_the_same_when_threads_share_rows_of_several_images(pad: str) -> None:
    workload = chained(Conv2d(3, 7, 5, 4, 2 * (HOST.isa.lanes() + 3), 3, 3, padding=(1, 1, 1, 1), groups=2))
    default = candidates(workload, HOST)[0]
    chosen = [with_knobs(default, th=1, tw=2, nr=HOST.isa.lanes(), pad=pad, threads=threads) for threads in (1, 2, 3)]
    assert_same_bits([result for (result,) in run(workload, chosen, HOST, inputs_of(workload))], chosen)


@pytest.mark.parametrize("workload", [PADDED, chained(Conv2d(1, 4, 7, 20, 1, 3, 3, padding=(1, 1, 1, 1)))], ids=["padded", "dot"])
def test_bits_are_the_same_on_every_isa(workload: Workload) -> None:
    inputs = inputs_of(workload)
    assert_same_bits([run_default(workload, Machine(isa), inputs) for isa in RUNNABLE], RUNNABLE)


@pytest.mark.parametrize("anchor", SHAPES, ids=str)
def test_default_is_all_in_registers_and_comes_first(anchor: Conv2d) -> None:
    first, *others = candidates(chained(anchor), HOST)
    assert (first.placement, first.cut) == ("register", 3)
    assert first not in others


@pytest.mark.parametrize(("kw", "pad"), [(7, "inline"), (31, "copy")])
def test_wide_kernels_are_padded_by_a_copy(kw: int, pad: str) -> None:
    """For a kernel 31 wide in tiles that are all emitted apart LLVM takes 25 s."""
    workload = chained(Conv2d(1, 1, 64, 32, 72, 1, kw, padding=(0, kw // 2, 0, kw // 2)))
    assert candidates(workload, Machine(AVX512))[0]["pad"] == pad


def refused(candidate: Candidate, workload: Workload = PADDED) -> str:
    with pytest.raises(ScheduleRefused) as refusal:
        conv2d.kernel(workload, candidate, HOST)
    return str(refusal.value)


def test_refuses_a_tile_that_does_not_fit_the_registers() -> None:
    candidate = with_knobs(DEFAULT, th=4, tw=9, nr=HOST.isa.lanes())
    assert f"needs 38 registers, {HOST.isa.name} has {HOST.isa.registers}" in refused(candidate)


def test_refuses_to_leave_out_padding() -> None:
    assert "padding (1, 1, 0, 2) has to be copied or inline" in refused(with_knobs(DEFAULT, pad="none"))


def test_refuses_inline_padding_of_several_rows() -> None:
    assert "inline padding needs tiles of one row" in refused(with_knobs(DEFAULT, th=2, tw=3, nr=HOST.isa.lanes(), pad="inline"))


def test_refuses_inline_padding_when_many_tiles_cross_the_border() -> None:
    workload = chained(Conv2d(1, 1, 20, 3, 5, 1, 7, padding=(0, 3, 0, 3)))
    candidate = with_knobs(candidates(workload, HOST)[0], th=1, tw=1, pad="inline")
    assert "of which few cross the border" in refused(candidate, workload)
