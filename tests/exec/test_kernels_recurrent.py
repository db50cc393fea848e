"""Recurrent kernels: near ONNX's equations in float64, and the same bits however they are tiled."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.exec.kernel_runner import HOST, RUNNABLE, assert_same_bits, inputs_of, run, with_knobs
from tvmfuse.errors import ScheduleRefused
from tvmfuse.kernel import candidates, recurrent
from tvmfuse.values import AVX2, AVX512, ISA, NEON, Candidate, Epilogue, Machine, Recurrent, Step, Workload

ANCHORS = [
    Recurrent("gru", 4, 1, 32),
    Recurrent("gru", 3, 2, 21, reverse=True),
    Recurrent("gru", 3, 1, 19, linear_before_reset=False),
    Recurrent("gru", 2, 5, 16, reverse=True, linear_before_reset=False),
    Recurrent("gru", 1, 1, 1),
    Recurrent("lstm", 4, 1, 32),
    Recurrent("lstm", 3, 5, 19, reverse=True),
]
# Whole vectors and a tail, whole tiles of rows and a smaller one, on every ISA.
RAGGED = [
    Workload(Recurrent("gru", 2, 5, 37)),
    Workload(Recurrent("gru", 2, 5, 37, linear_before_reset=False)),
    Workload(Recurrent("lstm", 2, 5, 37)),
]
each_kind = pytest.mark.parametrize("workload", RAGGED, ids=str)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def reference(anchor: Recurrent, *inputs: np.ndarray) -> list[np.ndarray]:
    """The equations of ONNX's GRU and LSTM in float64."""
    projections, weights, bias, h, *c = (array.astype(np.float64) for array in inputs)
    sequence = np.empty(anchor.output_shape())
    for t in range(anchor.steps)[:: -1 if anchor.reverse else 1]:
        x, sums = np.split(projections[t], anchor.gates, axis=1), np.split(h @ weights.T + bias, anchor.gates, axis=1)
        if anchor.kind == "lstm":
            i, o, f = (sigmoid(x[gate] + sums[gate]) for gate in range(3))
            c = [f * c[0] + i * np.tanh(x[3] + sums[3])]
            h = o * np.tanh(c[0])
        else:
            z, r = (sigmoid(x[gate] + sums[gate]) for gate in range(2))
            if anchor.linear_before_reset:
                n = np.tanh(x[2] + r * sums[2])
            else:
                n = np.tanh(x[2] + ((r * h) @ weights[2 * anchor.hidden :].T + bias[2 * anchor.hidden :]))
            h = (1 - z) * n + z * h
        sequence[t] = h
    return [sequence, h, *c]


def contracting_inputs(anchor: Recurrent) -> list[np.ndarray]:
    """Weights so small that a step makes an error in its state less than twice as large."""
    projections, weights, *rest = inputs_of(Workload(anchor))
    return [projections, weights / np.float32(2 * anchor.hidden), *rest]


def assert_near(results: list[np.ndarray], anchor: Recurrent, inputs: list[np.ndarray]) -> None:
    """Within the error that each step adds, doubled by every step that follows.

    A sum of `hidden` fma and two additions is off by at most gamma(hidden + 2) of its magnitude; sigmoid and tanh have slopes of at
    most 1 and are themselves at most 2 ulp off; |h| and |c| grow by at most 1 a step.
    """
    projections, weights, bias, *states = (np.abs(array.astype(np.float64)) for array in inputs)
    reach = anchor.steps + max(state.max() for state in states)
    gates = projections.max() + bias.max() + weights.sum(axis=1).max() * reach
    unit = np.finfo(np.float32).eps / 2
    bound = 2**anchor.steps * ((anchor.hidden + 2) * unit * gates + 10 * unit) * reach
    for result, wanted in zip(results, reference(anchor, *inputs), strict=True):
        assert np.abs(result - wanted).max() <= bound


@pytest.mark.parametrize("anchor", ANCHORS, ids=str)
def test_results_are_onnx_equations(anchor: Recurrent) -> None:
    workload, inputs = Workload(anchor), contracting_inputs(anchor)
    (results,) = run(workload, candidates(workload, HOST)[:1], HOST, inputs)
    assert_near(results, anchor, inputs)


@pytest.mark.parametrize("reverse", [False, True])
def test_last_state_is_the_last_step_that_was_taken(reverse: bool) -> None:
    workload = Workload(Recurrent("gru", 3, 1, 5, reverse))
    ((sequence, h),) = run(workload, candidates(workload, HOST)[:1], HOST, inputs_of(workload))
    assert (sequence[0 if reverse else -1] == h).all()


@each_kind
def test_bits_are_the_same_for_every_tile_and_unrolling(workload: Workload) -> None:
    default = candidates(workload, HOST)[0]
    lanes = HOST.isa.lanes()
    chosen = [default, with_knobs(default, units=lanes), with_knobs(default, units=3 * lanes, ku=1)]
    for results in zip(*run(workload, chosen, HOST, inputs_of(workload)), strict=True):
        assert_same_bits(results, chosen)


@each_kind
def test_bits_are_the_same_for_every_thread_count(workload: Workload) -> None:
    chosen = [with_knobs(candidates(workload, HOST)[0], units=HOST.isa.lanes(), threads=threads) for threads in (1, 2, 3)]
    for results in zip(*run(workload, chosen, HOST, inputs_of(workload)), strict=True):
        assert_same_bits(results, chosen)


@each_kind
def test_tails_are_right_and_bits_the_same_on_every_isa(workload: Workload) -> None:
    inputs = contracting_inputs(workload.anchor)
    per_isa = [run(workload, candidates(workload, Machine(isa))[:1], Machine(isa), inputs)[0] for isa in RUNNABLE]
    assert_near(per_isa[0], workload.anchor, inputs)
    for results in zip(*per_isa, strict=True):
        assert_same_bits(results, RUNNABLE)


def test_bits_of_a_row_do_not_depend_on_the_batch_around_it() -> None:
    batch = RAGGED[0]
    alone = Workload(dataclasses.replace(batch.anchor, batch=1))
    projections, weights, bias, h = inputs_of(batch)
    ((batched, _),) = run(batch, candidates(batch, HOST)[:1], HOST, [projections, weights, bias, h])
    ((single, _),) = run(alone, candidates(alone, HOST)[:1], HOST, [projections[:, 4:], weights, bias, h[4:]])
    assert_same_bits([np.ascontiguousarray(batched[:, 4:]), single], ["in a batch", "alone"])


def test_blocks_of_the_default_are_even_and_hide_the_latency_of_an_fma() -> None:
    found = candidates(Workload(Recurrent("gru", 100, 1, 256)), Machine(AVX512))
    assert len(found) == recurrent.MAX_TILES
    assert 3 * found[0]["units"] >= 8 * 16 and 256 % found[0]["units"] == 0


@pytest.mark.parametrize("isa", [AVX512, AVX2, NEON], ids=lambda isa: isa.name)
@pytest.mark.parametrize(
    "anchor",
    [
        Recurrent("gru", 2, 1, 256),
        Recurrent("gru", 2, 3, 128, linear_before_reset=False),
        Recurrent("lstm", 2, 1, 128),
        Recurrent("lstm", 2, 7, 200),
    ],
    ids=str,
)
def test_every_tile_on_offer_fits_the_registers(anchor: Recurrent, isa: ISA) -> None:
    machine = Machine(isa, threads=2)
    found = candidates(Workload(anchor), machine)
    assert found and all(recurrent.kernel(Workload(anchor), candidate, machine).launches for candidate in found)


def test_steps_too_short_for_a_barrier_stay_on_one_thread() -> None:
    machine = Machine(HOST.isa, threads=2)
    assert candidates(Workload(Recurrent("gru", 1000, 1, 64)), machine)[0]["threads"] == 1
    assert candidates(Workload(Recurrent("gru", 100, 1, 256)), machine)[0]["threads"] == 2
    assert candidates(Workload(Recurrent("gru", 1, 1, 4096)), machine)[0]["threads"] == 2
    assert candidates(Workload(Recurrent("gru", 100, 1, 256)), Machine(HOST.isa, threads=32))[0]["threads"] == 1
    assert candidates(Workload(Recurrent("gru", 100, 1, 256)), Machine(HOST.isa, threads=2, pool=64))[0]["threads"] == 1


def test_a_step_of_one_tile_leaves_the_other_threads_nothing() -> None:
    workload = Workload(Recurrent("gru", 2, 1, 5))
    one = candidates(workload, HOST)[0]
    results = run(workload, [one, with_knobs(one, threads=4)], HOST, inputs_of(workload))
    for result in zip(*results, strict=True):
        assert_same_bits(result, ["1 thread", "4 threads"])


def refused(candidate: Candidate, workload: Workload = RAGGED[0]) -> str:
    with pytest.raises(ScheduleRefused) as refusal:
        recurrent.kernel(workload, candidate, HOST)
    return str(refusal.value)


def test_refuses_an_epilogue() -> None:
    workload = Workload(RAGGED[0].anchor, Epilogue((Step("relu", ("%0",)),)))
    assert "its result is the next step's input" in refused(candidates(RAGGED[0], HOST)[0], workload)


def test_refuses_another_placement() -> None:
    assert "has no epilogue" in refused(dataclasses.replace(candidates(RAGGED[0], HOST)[0], placement="separate"))


def test_refuses_a_tile_that_does_not_fit_the_registers() -> None:
    candidate = with_knobs(candidates(RAGGED[0], HOST)[0], units=HOST.isa.registers * HOST.isa.lanes())
    assert f"{HOST.isa.name} has {HOST.isa.registers}" in refused(candidate)
