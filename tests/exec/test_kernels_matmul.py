"""Matrix multiplication kernels: within the error bound of an fma chain, and the same bits however they are scheduled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from tests.exec.kernel_runner import (
    HOST,
    RUNNABLE,
    SILU,
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
from tvmfuse.kernel import candidates, matmul
from tvmfuse.values import AVX512, ISA, Candidate, Machine, Matmul, Workload

SHAPES = [
    Matmul(1, 1, 1, 1),
    Matmul(1, 1, 7, 5),
    Matmul(1, 1, 300, 33),
    Matmul(1, 23, 1, 9),  # one column: dot products
    Matmul(3, 11, 1, 37),
    Matmul(2, 3, 1, 40, "mbk", "bnk", "bmn", constant_b=False),
    Matmul(1, 6, 1, 21, "km", "kn", "mn"),
    Matmul(1, 31, 50, 17),
    Matmul(1, 64, 64, 64),
]
LAYOUTS = [
    Matmul(3, 5, 20, 9, "mbk", "bkn", "mbn"),
    Matmul(3, 5, 20, 9, "bkm", "bnk", "bmn"),
    Matmul(1, 5, 20, 9, "bmk", "kn", "bmn"),
    Matmul(1, 5, 20, 9, "bmk", "nk", "mbn"),
    Matmul(2, 5, 20, 9, "bmk", "kbn", "bmn"),
]
RAGGED = chained(Matmul(2, 13, 39, 11, "mbk", "bkn", "mbn"))


def reference(anchor: Matmul) -> Callable[..., np.ndarray]:
    def chain(a: np.ndarray, b: np.ndarray, factor: np.ndarray, bias: np.ndarray) -> np.ndarray:
        return after_chain(np.einsum(f"{anchor.a},{anchor.b}->{anchor.c}", a, b), factor, bias)

    return chain


def assert_right(anchor: Matmul, machine: Machine = HOST) -> None:
    workload = chained(anchor)
    inputs = inputs_of(workload)
    assert_within_rounding(run_default(workload, machine, inputs), reference(anchor), inputs, roundings_of_chain(anchor.k))


@pytest.mark.parametrize("anchor", SHAPES, ids=str)
def test_result_is_within_the_bound_of_its_reduction(anchor: Matmul) -> None:
    assert_right(anchor)


@pytest.mark.parametrize("constant", [True, False], ids=["packed", "computed"])
@pytest.mark.parametrize("anchor", LAYOUTS, ids=str)
def test_every_layout_is_read_in_its_stored_order(anchor: Matmul, constant: bool) -> None:
    assert_right(dataclasses.replace(anchor, constant_b=constant))


@each_isa
def test_tails_are_right_on_every_isa(isa: ISA) -> None:
    assert_right(RAGGED.anchor, Machine(isa))


@each_isa
def test_float64(isa: ISA) -> None:
    assert_right(Matmul(1, 5, 13, 9, dtype="float64"), Machine(isa))


def test_bits_are_the_same_in_every_placement_cut_and_tile() -> None:
    placements, tiles = each_placement(RAGGED, HOST), some_tiles(RAGGED, HOST, 4)
    assert (len(placements), len(set(tiles))) == (7, 4)
    results = run(RAGGED, [*placements, *tiles], HOST, inputs_of(RAGGED))
    assert_same_bits([result for (result,) in results], [*placements, *tiles])


def test_bits_are_the_same_in_every_cut_of_a_chain_that_reads_a_value_twice() -> None:
    workload = Workload(Matmul(1, 9, 20, 5), SILU)
    chosen = each_placement(workload, HOST)
    assert {candidate.cut for candidate in chosen} == {0, 1, 3}
    assert_same_bits([result for (result,) in run(workload, chosen, HOST, inputs_of(workload))], chosen)


def test_bits_are_the_same_for_every_unrolling() -> None:
    default = candidates(RAGGED, HOST)[0]
    chosen = [with_knobs(default, ku=unroll) for unroll in (1, 4, 16)]
    assert_same_bits([result for (result,) in run(RAGGED, chosen, HOST, inputs_of(RAGGED))], chosen)


def test_bits_are_the_same_for_every_thread_count() -> None:
    whole = [c for c in each_placement(RAGGED, HOST) if c.cut in (0, 3)]
    chosen = [with_knobs(candidate, threads=threads) for candidate in whole for threads in (1, 2)]
    assert_same_bits([result for (result,) in run(RAGGED, chosen, HOST, inputs_of(RAGGED))], chosen)


@pytest.mark.parametrize("order", ["rows", "panels"])
def test_bits_are_the_same_when_threads_share_whole_rows_of_tiles(order: str) -> None:
    workload = chained(Matmul(2, 75, 75 * HOST.isa.lanes() // 8 + 3, 5))
    default = candidates(workload, HOST)[0]
    chosen = [with_knobs(default, mr=4, nr=HOST.isa.lanes(), order=order, threads=threads) for threads in (1, 2, 3)]
    inputs = inputs_of(workload)
    results = [result for (result,) in run(workload, chosen, HOST, inputs)]
    assert np.isfinite(results[0]).all()
    assert_same_bits(results, chosen)


@pytest.mark.parametrize("workload", [RAGGED, chained(Matmul(1, 11, 1, 37)), chained(Matmul(1, 9, 34, 7))], ids=["ragged", "dot", "narrow"])
def test_bits_are_the_same_on_every_isa(workload: Workload) -> None:
    inputs = inputs_of(workload)
    assert_same_bits([run_default(workload, Machine(isa), inputs) for isa in RUNNABLE], RUNNABLE)


@pytest.mark.parametrize("layout", ["bkn", "bnk"])
def test_bits_are_the_same_whether_b_is_constant_or_computed(layout: str) -> None:
    constant = chained(Matmul(2, 5, 23, 9, b=layout))
    computed = chained(dataclasses.replace(constant.anchor, constant_b=False))
    inputs = inputs_of(constant)
    assert_same_bits([run_default(workload, HOST, inputs) for workload in (constant, computed)], ["constant", "computed"])


@pytest.mark.parametrize("anchor", [*SHAPES, *LAYOUTS], ids=str)
def test_default_is_all_in_registers_and_comes_first(anchor: Matmul) -> None:
    first, *others = candidates(chained(anchor), HOST)
    assert (first.placement, first.cut) == ("register", 3)
    assert first not in others


@each_isa
def test_every_tile_on_offer_is_legal(isa: ISA) -> None:
    workload, machine = Workload(Matmul(1, 9, 70, 5)), Machine(isa)
    for candidate in candidates(workload, machine):
        matmul.kernel(workload, candidate, machine)


def refused(candidate: Candidate, workload: Workload = RAGGED) -> str:
    with pytest.raises(ScheduleRefused) as refusal:
        matmul.kernel(workload, candidate, HOST)
    return str(refusal.value)


def test_default_takes_few_rows_where_they_would_evict_each_other_from_the_l1() -> None:
    """Rows of 4096 bytes all start in one set of 8 ways; rows of 4096 + 64 bytes spread over all sets."""
    machine = Machine(AVX512, l1=32 << 10)
    together, apart = (candidates(Workload(Matmul(1, 196, 32, k, "mk", "kn", "mn")), machine)[0]["mr"] for k in (1024, 1040))
    assert together <= 6 < apart


def test_refuses_a_tile_that_does_not_fit_the_registers() -> None:
    lanes = HOST.isa.lanes()
    candidate = with_knobs(candidates(RAGGED, HOST)[0], mr=HOST.isa.registers, nr=lanes)
    assert f"needs {HOST.isa.registers + 2} registers, {HOST.isa.name} has {HOST.isa.registers}" in refused(candidate)


def test_refuses_a_tile_of_part_of_a_vector() -> None:
    assert f"multiple of {HOST.isa.lanes()}" in refused(with_knobs(candidates(RAGGED, HOST)[0], nr=HOST.isa.lanes() + 1))


def test_refuses_a_cut_across_two_live_values() -> None:
    workload = Workload(Matmul(1, 9, 20, 5), SILU)
    assert "cut 2 leaves more than one value live" in refused(dataclasses.replace(candidates(workload, HOST)[0], cut=2), workload)


@pytest.mark.parametrize(("placement", "cut"), [("separate", 1), ("register", 0), ("tile", 0)])
def test_refuses_a_placement_that_contradicts_its_cut(placement: str, cut: int) -> None:
    candidate = dataclasses.replace(candidates(RAGGED, HOST)[0], placement=placement, cut=cut)
    assert f"placement {placement!r} doesn't go with cut {cut}" in refused(candidate)
