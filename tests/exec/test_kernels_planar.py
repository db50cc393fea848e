"""Convolution kernels over planes: within the error bound of an fma chain, and the bits of the NHWC kernel on the same image."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.exec.kernel_runner import (
    HOST,
    RUNNABLE,
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
from tests.exec.test_kernels_conv2d import reference
from tvmfuse.errors import ScheduleRefused
from tvmfuse.kernel import candidates, planar_conv2d
from tvmfuse.values import ISA, Conv2d, Epilogue, Machine, Operand, PlanarConv2d, Step, Workload

SHAPES = [
    PlanarConv2d(1, 6, 37, 5, 3, 3, 3),
    PlanarConv2d(2, 5, 19, 8, 6, 3, 1, padding=(2, 0, 0, 0), groups=2),
    PlanarConv2d(1, 9, 11, 3, 4, 3, 3, (2, 1), (0, 1, 1, 0)),
    PlanarConv2d(1, 8, 21, 4, 5, 3, 2, (1, 1), (2, 0, 1, 2), (2, 3)),
    PlanarConv2d(1, 1, 5, 6, 2, 1, 1),
]
PADDED = chained(PlanarConv2d(1, 5, 23, 6, 10, 3, 3, padding=(1, 1, 0, 2), groups=2))
TALL = chained(PlanarConv2d(1, 5, 23, 6, 10, 4, 1, padding=(3, 0, 1, 0), groups=2))


def in_nhwc(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(np.moveaxis(array, 1, 3))


@pytest.mark.parametrize("anchor", SHAPES, ids=str)
def test_result_is_within_the_bound_of_its_reduction(anchor: PlanarConv2d) -> None:
    assert_right(anchor)


@each_isa
def test_tails_are_right_on_every_isa(isa: ISA) -> None:
    assert_right(PADDED.anchor, Machine(isa))


def assert_right(anchor: PlanarConv2d, machine: Machine = HOST) -> None:
    workload = chained(anchor)
    inputs = inputs_of(workload)
    result = run_default(workload, machine, inputs)
    x, w, factor, bias = inputs
    # over NHWC the bias of a plane's columns is one of the whole image
    over_nhwc = [in_nhwc(x), w, in_nhwc(factor), in_nhwc(np.broadcast_to(bias, anchor.output_shape()))]
    beside = Conv2d(**{field.name: getattr(anchor, field.name) for field in dataclasses.fields(anchor)})
    assert_within_rounding(
        in_nhwc(result), reference(beside), over_nhwc, roundings_of_chain(anchor.kh * anchor.kw * anchor.ci // anchor.groups)
    )


@pytest.mark.parametrize("workload", [PADDED, TALL], ids=["columns", "rows"])
def test_bits_are_those_of_the_nhwc_kernel(workload: Workload) -> None:
    anchor = workload.anchor
    assert isinstance(anchor, PlanarConv2d)
    beside = Conv2d(**{field.name: getattr(anchor, field.name) for field in dataclasses.fields(anchor)})
    steps = (Step("add", ("%0", "$0")),)
    planar = Workload(anchor, Epilogue(steps, (Operand((anchor.co,), (1,)),)))
    nhwc = Workload(beside, Epilogue(steps, (Operand((anchor.co,), (3,)),)))
    x, w, bias = inputs_of(planar)
    results = [in_nhwc(run_default(planar, HOST, [x, w, bias])), run_default(nhwc, HOST, [in_nhwc(x), w, bias])]
    assert_same_bits(results, ["planar", "NHWC"])


@pytest.mark.parametrize("workload", [PADDED, TALL], ids=["columns", "rows"])
def test_bits_are_the_same_in_every_placement_cut_tile_and_padding(workload: Workload) -> None:
    chosen = [*each_placement(workload, HOST), *some_tiles(workload, HOST, 6)]
    assert {c["pad"] for c in chosen} == ({"copy"} if workload is PADDED else {"copy", "inline"})
    assert_same_bits([result for (result,) in run(workload, chosen, HOST, inputs_of(workload))], chosen)


@pytest.mark.parametrize("pad", ["copy", "inline"])
def test_a_tap_outside_multiplies_a_real_zero(pad: str) -> None:
    workload = chained(PlanarConv2d(1, 3, 4, 1, 1, 2, 1, padding=(1, 0, 0, 0)))
    x, w, *operands = inputs_of(workload)
    w[0, 0, 0, 0] = np.inf
    ((result,),) = run(workload, [with_knobs(candidates(workload, HOST)[0], pad=pad)], HOST, [x, w, *operands])
    assert (np.isnan(result[0, 0]) == [[True] * 4, [False] * 4, [False] * 4]).all()


def test_bits_are_the_same_for_every_thread_count() -> None:
    chosen = [with_knobs(c, threads=threads) for c in each_placement(PADDED, HOST) if c.cut == 3 for threads in (1, 2)]
    assert_same_bits([result for (result,) in run(PADDED, chosen, HOST, inputs_of(PADDED))], chosen)


def test_bits_are_the_same_on_every_isa() -> None:
    inputs = inputs_of(PADDED)
    assert_same_bits([run_default(PADDED, Machine(isa), inputs) for isa in RUNNABLE], RUNNABLE)


def test_refuses_padding_that_needs_a_copy() -> None:
    with pytest.raises(ScheduleRefused, match="padding .* doesn't go with 'inline'; legal: copy"):
        planar_conv2d.kernel(PADDED, with_knobs(candidates(PADDED, HOST)[0], pad="inline"), HOST)


def test_refuses_a_tile_that_does_not_fit_the_registers() -> None:
    with pytest.raises(ScheduleRefused, match="registers"):
        planar_conv2d.kernel(PADDED, with_knobs(candidates(PADDED, HOST)[0], mr=5, nr=16 * HOST.isa.lanes()), HOST)
