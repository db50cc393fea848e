"""The decision rule for one candidate, as pure functions of paired log ratios.

A pair times the candidate and the default next to each other, so that drift cancels in r = ln(time_candidate / time_default).
An A/A pair times the default against itself: what its ratios show is noise by construction.

Sources   order-statistic intervals and repetition over processes: Kalibera and Jones, "Rigorous benchmarking in reasonable time";
          pairs: duet benchmarking, arXiv 2001.05811; a control sets the margin: own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from ..values import Candidate, Verdict

# pairs seen -> ranks (from 1) of the order statistics that bound the median. The three tails hold 0.10 + 0.14 + 0.27 % < 1 %.
RANKS: dict[int, tuple[int, int]] = {15: (2, 14), 30: (7, 24), 60: (19, 42)}
LOOKS: tuple[int, ...] = tuple(RANKS)
# pairs seen -> margins that the median gain has to reach, or more pairs are not worth their time: half of what is equal ends at the
# first look, and of true gains of two margins, in noise of three, 2 % there and 7 % at the second.
PROMISING: dict[int, float] = {15: 0.0, 30: 1.0}
MIN_MARGIN = 0.01  # a gain below 1 % is worth no change
MARGIN_PER_NOISE = 2.0  # the margin is at least twice what the control shows between equal things
MAX_NOISE = 0.05  # a control off by more than 5 % says that the machine can't be measured on now
# Where a buffer lies can flatter one side for the life of a process. If either side has two speeds, three processes in a row flatter
# the candidate in 1.6 % of all cases and six in 0.02 %: equals would win too often.
MIN_PROCESSES = 6


def margin(noise: float) -> float:
    """What a gain or a loss has to exceed, where equal things differ by `noise`."""
    return max(MIN_MARGIN, MARGIN_PER_NOISE * noise)


def look(candidate: Candidate, processes: Sequence[Sequence[float]], control: Sequence[float]) -> Verdict | None:
    """What the pairs seen so far say, or None when more are needed and may be worth it.

    processes  ln(time_candidate / time_default) of each pair, grouped by the process that measured it.
    control    ln(time / time) of the A/A pairs taken in between.
    Raises     ValueError when the number of pairs is not one of LOOKS: a look in between would cost confidence.
    """
    ratios = sorted(r for process in processes for r in process)
    pairs = len(ratios)
    if pairs not in LOOKS:
        raise ValueError(f"{pairs} pairs: looks are allowed after {', '.join(map(str, LOOKS))}")
    low, high = (ratios[rank - 1] for rank in RANKS[pairs])
    noise = abs(median(control))
    least = margin(noise)

    def verdict(outcome: str, why: str) -> Verdict:
        interval = (math.exp(low), math.exp(high))
        return Verdict(outcome, candidate, math.exp(median(ratios)), interval, noise, pairs, why)  # type: ignore[arg-type]

    if noise > MAX_NOISE:
        return verdict("too noisy", f"the default differs from itself by {noise:.1%}, more than {MAX_NOISE:.0%}")
    if high < -least:
        medians = [median(process) for process in processes if process]
        if len(medians) >= MIN_PROCESSES and all(m < 0 for m in medians):
            return verdict("wins", f"at least {-math.expm1(high):.1%} faster, margin {least:.1%}, in {len(medians)} processes")
        doubt = f"only {len(medians)} processes" if len(medians) < MIN_PROCESSES else "the processes disagree in sign"
    elif low > -least:
        found = f"at most {-math.expm1(low):.1%} faster" if low < 0 else f"at least {math.expm1(low):.1%} slower"
        return verdict("keeps default", f"{found}, margin {least:.1%}")
    else:
        doubt = f"the interval {math.expm1(low):+.1%} .. {math.expm1(high):+.1%} holds the margin {-least:.1%}"
    if pairs < LOOKS[-1]:
        middle = median(ratios)
        if middle <= -least * PROMISING[pairs]:
            return None
        doubt = f"a median of {math.expm1(middle):+.1%} after {pairs} pairs promises no gain of {least:.1%}"
    return verdict("undecided", doubt)


def choose(verdicts: Sequence[Verdict], default: Candidate) -> Candidate:
    """The winner with the lowest median ratio; the earlier one when equal, the default when nobody wins."""
    winners = [v for v in verdicts if v.outcome == "wins"]
    return min(winners, key=lambda v: v.ratio).candidate if winners else default
