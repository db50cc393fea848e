"""The decision rule, case by case; how often it is wrong is in test_verdict_noise.py."""

from __future__ import annotations

import math
import random

import pytest

from tvmfuse.decide import verdict as rule
from tvmfuse.values import Candidate, Verdict

CANDIDATE, DEFAULT, OTHER = Candidate("tile", 1), Candidate("register", 1), Candidate("separate", 0)


def test_drift_cancels_in_pairs() -> None:
    """The machine slows down by half while measuring: both halves of each pair feel it."""
    rng = random.Random(3)
    times = [(1.0 + 0.5 * i / 60) * math.exp(rng.gauss(0, 0.005)) for i in range(120)]
    ratios = [math.log(0.95 * times[2 * i + 1] / times[2 * i]) for i in range(60)]
    found = rule.look(CANDIDATE, [ratios[start : start + 10] for start in range(0, 60, 10)], [0.0] * 60)
    assert found is not None and found.outcome == "wins"


def test_margin_is_twice_the_controls_bias() -> None:
    gain, noise = [[-0.05] * 5] * 6, [0.03] * 30
    found = rule.look(CANDIDATE, gain, noise)
    assert found is not None and found.outcome == "keeps default"
    assert rule.look(CANDIDATE, gain, [0.02] * 30).outcome == "wins"  # type: ignore[union-attr]


def test_gain_below_one_percent_keeps_default() -> None:
    found = rule.look(CANDIDATE, [[-0.009] * 5] * 3, [0.0] * 15)
    assert found is not None and found.outcome == "keeps default"


def test_one_process_of_the_other_sign_forbids_winning() -> None:
    ratios = [[-0.2] * 12] * 4 + [[-0.2] * 11, [0.1]]
    found = rule.look(CANDIDATE, ratios, [0.0] * 60)
    assert found is not None and (found.outcome, found.why) == ("undecided", "the processes disagree in sign")


def test_five_processes_are_too_few_to_win() -> None:
    assert rule.look(CANDIDATE, [[-0.2] * 6] * 5, [0.0] * 30) is None
    found = rule.look(CANDIDATE, [[-0.2] * 12] * 5, [0.0] * 60)
    assert found is not None and (found.outcome, found.why) == ("undecided", "only 5 processes")


def test_what_promises_no_gain_gets_no_more_pairs() -> None:
    """Neither look decides: intervals of +-3 % around the median hold the margin."""
    spread = [0.03 * i / 7 for i in range(-7, 8)]

    def outcome(median_gain: float, processes: int) -> str | None:
        found = rule.look(CANDIDATE, [[x - median_gain for x in spread[i::3]] for i in range(3)] * (processes // 3), [0.0] * 15)
        return found.outcome if found else None

    assert outcome(0.002, 3) is None and outcome(-0.002, 3) == "undecided"
    assert outcome(0.012, 6) is None and outcome(0.008, 6) == "undecided"


def test_interval_ranks_are_those_documented() -> None:
    for pairs, (low, high) in {15: (2, 14), 30: (7, 24), 60: (19, 42)}.items():
        ratios = [float(i) for i in range(1, pairs + 1)]
        random.Random(0).shuffle(ratios)
        found = rule.look(CANDIDATE, [ratios[0::3], ratios[1::3], ratios[2::3]], [0.0])
        assert found is not None
        assert tuple(round(math.log(x)) for x in found.ci) == (low, high)


def test_tails_of_all_looks_stay_below_one_percent() -> None:
    tails = 0.0
    for pairs, (low, high) in rule.RANKS.items():
        outside = [*range(low), *range(high, pairs + 1)]  # how many of the pairs lie below the true median when the interval misses it
        tails += sum(math.comb(pairs, k) for k in outside) / 2**pairs
    assert tails < 0.01


def test_look_between_the_allowed_ones_is_refused() -> None:
    with pytest.raises(ValueError, match="16 pairs"):
        rule.look(CANDIDATE, [[0.0] * 16], [0.0])


def test_choose_takes_the_lowest_median_and_breaks_ties_by_order() -> None:
    def won(candidate: Candidate, ratio: float, outcome: str = "wins") -> Verdict:
        return Verdict(outcome, candidate, ratio, (ratio, ratio), 0.0, 15, "")  # type: ignore[arg-type]

    assert rule.choose([won(CANDIDATE, 0.9), won(OTHER, 0.8)], DEFAULT) == OTHER
    assert rule.choose([won(CANDIDATE, 0.8), won(OTHER, 0.8)], DEFAULT) == CANDIDATE
    assert rule.choose([won(OTHER, 0.5, "undecided"), won(CANDIDATE, 0.5, "keeps default")], DEFAULT) == DEFAULT
    assert rule.choose([], DEFAULT) == DEFAULT
