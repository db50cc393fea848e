"""The decision rule on thousands of simulated runs: how often it is wrong, under noise of several shapes.

Noise is the standard deviation of a pair's ln ratio, 3 % unless said. A run is what the tuner takes: pairs from fresh processes before
each look, the control's pairs between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from tvmfuse.decide import verdict as rule
from tvmfuse.values import Candidate

PAIRS, PROCESSES = rule.LOOKS[-1], 3 * len(rule.LOOKS)
RUNS = 1500
NOISE = 0.03
CANDIDATE = Candidate("tile", 1)
# (runs, pairs) ln times of one kernel, as the machine lets it look at the moments of the candidate's and of the default's samples
Machine = Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]


def process_of_pair() -> np.ndarray:
    """The pairs that each process takes: a third of what the next look lacks."""
    lengths = [(now - before) // 3 for before, now in zip((0, *rule.LOOKS), rule.LOOKS, strict=False) for _ in range(3)]
    return np.repeat(np.arange(PROCESSES), lengths)


def gaussian(rng: np.random.Generator, runs: int) -> tuple[np.ndarray, np.ndarray]:
    return tuple(rng.normal(0, NOISE / math.sqrt(2), (2, runs, PAIRS)))  # type: ignore[return-value]


def drift(rng: np.random.Generator, runs: int) -> tuple[np.ndarray, np.ndarray]:
    """The clock goes down by a third while measuring, in steps, some of which fall between the halves of a pair."""
    first = np.sort(rng.uniform(0, 0.4, (runs, 2 * PAIRS)), axis=1)[:, rng.permuted(np.arange(2 * PAIRS).reshape(PAIRS, 2), axis=1)]
    candidate, default = gaussian(rng, runs)
    return candidate + first[..., 0], default + first[..., 1]


def preempted(rng: np.random.Generator, runs: int) -> tuple[np.ndarray, np.ndarray]:
    """Bursts: for some pairs in a row, samples of either side lose up to half of the processor."""
    candidate, default = gaussian(rng, runs)
    burst = (rng.random((runs, PAIRS // 5)) < 0.3).repeat(5, axis=1)
    for side in (candidate, default):
        side += np.where(burst & (rng.random((runs, PAIRS)) < 0.5), rng.uniform(0, 0.7, (runs, PAIRS)), 0)
    return candidate, default


def two_speeds(rng: np.random.Generator, runs: int) -> tuple[np.ndarray, np.ndarray]:
    """Where a buffer lies decides its speed, 15 % apart, for the life of a process; each kernel has its own buffers."""
    candidate, default = gaussian(rng, runs)
    candidate += 0.15 * (rng.random((runs, PROCESSES)) < 0.5)[:, process_of_pair()]
    default += 0.15 * (rng.random((runs, PROCESSES)) < 0.5)[:, process_of_pair()]
    return candidate, default


def heavy_tailed(rng: np.random.Generator, runs: int) -> tuple[np.ndarray, np.ndarray]:
    """Student's t with 2 degrees of freedom: its variance is infinite."""
    return tuple(NOISE / 2 * rng.standard_t(2, (2, runs, PAIRS)))  # type: ignore[return-value]


MACHINES = {f.__name__: f for f in (gaussian, drift, preempted, two_speeds, heavy_tailed)}


def outcomes(ratio: float, machine: Machine, runs: int = RUNS, control_bias: float = 0.0) -> dict[str, int]:
    """How often each outcome is the last word."""
    rng = np.random.default_rng(11)
    candidate, default = machine(rng, runs)
    a, b = machine(rng, runs)
    ratios, control = candidate - default + math.log(ratio), a - b + control_bias
    groups, found = process_of_pair(), dict.fromkeys(("wins", "keeps default", "undecided", "too noisy"), 0)
    bounds = [int(np.flatnonzero(groups == process)[-1]) + 1 for process in range(PROCESSES)]
    for run, beside in zip(ratios.tolist(), control.tolist(), strict=True):
        for pairs in rule.LOOKS:
            ends = [end for end in bounds if end <= pairs]
            said = rule.look(CANDIDATE, [run[begin:end] for begin, end in zip([0, *ends], ends, strict=False)], beside[:pairs])
            if said:
                found[said.outcome] += 1
                break
    return found


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_equals_win_at_most_once_in_a_hundred(machine: Machine) -> None:
    assert outcomes(1.0, machine)["wins"] <= 0.01 * RUNS


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_slower_candidates_never_win(machine: Machine) -> None:
    assert outcomes(1.05, machine)["wins"] <= 0.001 * RUNS


@pytest.mark.parametrize("machine", [gaussian, drift, heavy_tailed], ids=lambda f: f.__name__)
def test_five_percent_win_in_three_percent_noise(machine: Machine) -> None:
    assert outcomes(0.95, machine)["wins"] >= 0.95 * RUNS


@pytest.mark.parametrize("ratio", [0.8, 0.95, 1.0, 1.2])
def test_control_that_is_off_is_too_noisy_whatever_the_ratio(ratio: float) -> None:
    for bias in (-0.1, 0.1):
        assert outcomes(ratio, gaussian, 200, bias)["too noisy"] == 200
