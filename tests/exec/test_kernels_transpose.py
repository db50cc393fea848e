"""Transposed convolution kernels: within the error bound of an fma chain, and the same bits however they are tiled and padded."""

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
from tvmfuse.kernel import candidates, conv2d_transpose
from tvmfuse.values import ISA, Candidate, Conv2dTranspose, Machine, Workload

SHAPES = [
    Conv2dTranspose(1, 3, 4, 5, 18, 3, 3),
    Conv2dTranspose(2, 3, 4, 8, 12, 2, 2, (2, 2)),
    Conv2dTranspose(1, 3, 4, 5, 7, 3, 3, (2, 2), (1, 1, 1, 1), (1, 1)),
    Conv2dTranspose(1, 3, 4, 6, 10, 4, 4, (2, 2), (1, 1, 1, 1), groups=2),
    Conv2dTranspose(1, 3, 4, 4, 6, 3, 2, (3, 2), (0, 1, 2, 0), (2, 0), (2, 3)),
    Conv2dTranspose(1, 3, 4, 4, 6, 3, 3, (2, 2), (0, 2, 1, 0), (0, 0), (2, 2)),
    Conv2dTranspose(1, 3, 4, 5, 6, 1, 1, (2, 3), output_padding=(1, 2)),
    Conv2dTranspose(1, 1, 1, 5, 3, 7, 7, (4, 4), (1, 2, 3, 0)),
    Conv2dTranspose(1, 1, 1, 1, 1, 1, 1),
    Conv2dTranspose(1, 2, 2, 3, 5, 2, 2, (4, 4), (3, 3, 1, 1)),
]
DEPTHWISE = [
    Conv2dTranspose(1, 1, 8, 64, 64, 1, 3, (1, 2), (0, 1, 0, 1), (0, 1), groups=64),
    Conv2dTranspose(2, 3, 4, 20, 20, 3, 3, (2, 2), (1, 1, 1, 1), groups=20),
    Conv2dTranspose(1, 3, 3, 5, 5, 5, 5, padding=(2, 2, 2, 2), groups=5),
    Conv2dTranspose(1, 3, 4, 3, 9, 3, 3, (2, 2), groups=3),  # a channel multiplier: three outputs of one input
]
PADDED = chained(Conv2dTranspose(1, 3, 5, 3, 19, 3, 4, (1, 2), (1, 1, 0, 2)))
CHANNELS = chained(Conv2dTranspose(1, 3, 5, 21, 21, 3, 3, (2, 2), (0, 1, 1, 1), (1, 1), groups=21))
DEFAULT = candidates(PADDED, HOST)[0]


def reference(anchor: Conv2dTranspose) -> Callable[..., np.ndarray]:
    """By scattering: each input pixel times all of the kernel, cut to the output."""
    (top, left, bottom, right), (sh, sw), (dh, dw) = anchor.padding, anchor.stride, anchor.dilation
    channels, per_group = anchor.ci // anchor.groups, anchor.co // anchor.groups

    def chain(x: np.ndarray, w: np.ndarray, factor: np.ndarray, bias: np.ndarray) -> np.ndarray:
        sums = np.zeros((anchor.n, anchor.oh + top + bottom, anchor.ow + left + right, anchor.co))
        for kh, kw, group in itertools.product(range(anchor.kh), range(anchor.kw), range(anchor.groups)):
            inputs, outputs = slice(group * channels, (group + 1) * channels), slice(group * per_group, (group + 1) * per_group)
            rows, columns = slice(kh * dh, kh * dh + (anchor.h - 1) * sh + 1, sh), slice(kw * dw, kw * dw + (anchor.w - 1) * sw + 1, sw)
            sums[:, rows, columns, outputs] += x[..., inputs] @ w[inputs, kh, kw]
        return after_chain(sums[:, top : top + anchor.oh, left : left + anchor.ow], factor, bias)

    return chain


def assert_right(anchor: Conv2dTranspose, machine: Machine = HOST) -> None:
    workload = chained(anchor)
    inputs = inputs_of(workload)
    first_of_padding = {candidate["pad"]: candidate for candidate in reversed(candidates(workload, machine)) if candidate.cut == 3}
    results = [result for (result,) in run(workload, first_of_padding.values(), machine, inputs)]
    roundings = roundings_of_chain(anchor.kh * anchor.kw * anchor.ci // anchor.groups)
    assert_within_rounding(results[0], reference(anchor), inputs, roundings)
    assert_same_bits(results, list(first_of_padding))


@pytest.mark.parametrize("anchor", [*SHAPES, *DEPTHWISE], ids=str)
def test_result_is_within_the_bound_of_its_reduction(anchor: Conv2dTranspose) -> None:
    assert_right(anchor)


@each_isa
def test_tails_are_right_on_every_isa(isa: ISA) -> None:
    assert_right(PADDED.anchor, Machine(isa))


def test_float64() -> None:
    assert_right(Conv2dTranspose(1, 2, 3, 3, 11, 2, 2, (2, 2), (1, 0, 0, 1), dtype="float64"))


@pytest.mark.parametrize("workload", [PADDED, CHANNELS], ids=["dense", "depthwise"])
def test_bits_are_the_same_in_every_placement_cut_and_tile(workload: Workload) -> None:
    placements, tiles = each_placement(workload, HOST), some_tiles(workload, HOST, 3)
    assert (len(placements), len(set(tiles))) == (7, 3)
    results = run(workload, [*placements, *tiles], HOST, inputs_of(workload))
    assert_same_bits([result for (result,) in results], [*placements, *tiles])


@pytest.mark.parametrize("tw", [2, 3, 5])
def test_bits_are_the_same_whether_padding_is_copied_or_inline(tw: int) -> None:
    chosen = [with_knobs(DEFAULT, th=1, tw=tw, nr=HOST.isa.lanes(), pad=pad) for pad in ("copy", "inline")]
    assert_same_bits([result for (result,) in run(PADDED, chosen, HOST, inputs_of(PADDED))], chosen)


@pytest.mark.parametrize("pad", ["copy", "inline"])
def test_a_tap_outside_multiplies_a_real_zero(pad: str) -> None:
    workload = chained(Conv2dTranspose(1, 1, 2, 1, 1, 1, 3))  # taps 0 1 2 reach the four outputs, of which the first has tap 0 inside
    x, w, *operands = inputs_of(workload)
    w[0, 0, 2, 0] = np.inf
    ((result,),) = run(workload, [with_knobs(candidates(workload, HOST)[0], th=1, pad=pad)], HOST, [x, w, *operands])
    assert np.isnan(result[0, 0, :, 0]).tolist() == [True, True, False, False]


def test_an_output_that_no_tap_reaches_is_the_epilogue_of_zero() -> None:
    workload = chained(Conv2dTranspose(1, 2, 2, 3, 5, 1, 1, (2, 2)))
    inputs = inputs_of(workload)
    bias = np.maximum(inputs[-1], 0)
    assert (run_default(workload, HOST, inputs)[0, 1] == bias).all()


@pytest.mark.parametrize("workload", [PADDED, CHANNELS], ids=["dense", "depthwise"])
def test_bits_are_the_same_for_every_thread_count(workload: Workload) -> None:
    whole = [c for c in each_placement(workload, HOST) if c.cut == 3]
    chosen = [with_knobs(candidate, threads=threads) for candidate in whole for threads in (1, 2)]
    assert_same_bits([result for (result,) in run(workload, chosen, HOST, inputs_of(workload))], chosen)


def test_bits_are_the_same_on_every_isa() -> None:
    inputs = inputs_of(PADDED)
    assert_same_bits([run_default(PADDED, Machine(isa), inputs) for isa in RUNNABLE], RUNNABLE)


@pytest.mark.parametrize("anchor", [*SHAPES, *DEPTHWISE], ids=str)
def test_default_is_all_in_registers_and_comes_first(anchor: Conv2dTranspose) -> None:
    first, *others = candidates(chained(anchor), HOST)
    assert (first.placement, first.cut) == ("register", 3)
    assert first not in others


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("anchor", [*SHAPES, *DEPTHWISE], ids=str)
def test_phases_partition_the_outputs_and_list_the_taps_that_reach_them(anchor: Conv2dTranspose, axis: int) -> None:
    kernel, extent = (anchor.kh, anchor.kw)[axis], (anchor.oh, anchor.ow)[axis]
    stride, dilation, before = anchor.stride[axis], anchor.dilation[axis], anchor.padding[axis]
    found = {
        phase.start + q * stride: {(phase.first + i * phase.step, q + phase.offset - i * phase.drop) for i in range(phase.count)}
        for phase in conv2d_transpose.phases(anchor, axis)
        for q in range(phase.outputs)
    }
    by_definition = {
        out: {
            (k, i) for k in range(kernel) for i in range(-kernel * dilation, extent + before) if i * stride + k * dilation - before == out
        }
        for out in range(extent)
    }
    assert found == by_definition


def refused(candidate: Candidate, workload: Workload = PADDED) -> str:
    with pytest.raises(ScheduleRefused) as refusal:
        conv2d_transpose.kernel(workload, candidate, HOST)
    return str(refusal.value)


def test_refuses_a_tile_that_does_not_fit_the_registers() -> None:
    candidate = with_knobs(DEFAULT, th=6, tw=6, nr=HOST.isa.lanes())
    assert f"needs 38 registers, {HOST.isa.name} has {HOST.isa.registers}" in refused(candidate)


def test_refuses_to_leave_out_padding() -> None:
    assert "taps reach (1, 1, 2, 0) beyond the image" in refused(with_knobs(DEFAULT, pad="none"))


def test_refuses_inline_padding_of_several_rows() -> None:
    assert "inline padding needs tiles of one row" in refused(with_knobs(DEFAULT, th=2, tw=3, nr=HOST.isa.lanes(), pad="inline"))


def test_refuses_inline_padding_when_many_tiles_cross_the_border() -> None:
    workload = chained(Conv2dTranspose(1, 1, 20, 3, 5, 1, 7))
    candidate = with_knobs(candidates(workload, HOST)[0], th=1, tw=1, pad="inline")
    assert "of which few cross the border" in refused(candidate, workload)
