"""The tuning loop of one site: check the bits, screen, confirm against the default, decide; and how sites share a time budget.

Nothing here knows TVM or a clock: what measures, what remembers and what tells the time are arguments, so that the whole loop
runs in milliseconds on a simulated machine.

Sources   screening by successive halving: Jamieson and Talwalkar, AISTATS 2016; strategy, runner and record apart: kernel_tuner.
"""

from __future__ import annotations

import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from ..errors import DeviceError
from ..values import Candidate, Measurement, Verdict, Workload
from . import verdict as rule
from .log import Conditions, Log, Record

BATCH = 16  # candidates checked and screened before the budget is looked at again
SCREEN_SHARE = 0.5  # of a site's budget; the rest confirms
SCREEN_ROUNDS = 3  # each on half of what is left, so that the promising are timed three times
KEPT = 3  # finalists of each placement and cut
CONFIRMED_TOGETHER = 8  # finalists that share a process and its control
PROCESSES_PER_LOOK = 3
LEAST_SHARE_S = 8.0  # less doesn't pay for the processes that a site's first look starts


class Process(Protocol):
    """A fresh process that holds some kernels side by side."""

    def pair(self, first: int, second: int) -> tuple[float, float]:
        """Seconds of kernel `first`, then of kernel `second`: indices into what the process was opened with.

        Raises DeviceError when a kernel crashes or hangs; the process is gone then.
        """


class Measurer(Protocol):
    """A device that builds and times candidates. candidates[0] is always the default."""

    def check(self, workload: Workload, candidates: Sequence[Candidate]) -> list[str | None]:
        """For each candidate why it can't be used, or None: it doesn't build, it crashes, its bits are not the default's."""

    def screen(self, workload: Workload, candidates: Sequence[Candidate]) -> list[Measurement]:
        """One quick sample of each checked candidate; a failure is a Measurement with an error."""

    def open_process(self, workload: Workload, candidates: Sequence[Candidate]) -> AbstractContextManager[Process]:
        """Kernels may repeat: the default twice makes an A/A control."""


@dataclass(frozen=True)
class SiteResult:
    """What tuning found out about one site.

    choice      the default unless a candidate won.
    failures    candidates that are out for good, each with its error.
    unreached   how many candidates the budget left unmeasured or unconfirmed.
    """

    workload: Workload
    default: Candidate
    choice: Candidate
    verdicts: tuple[Verdict, ...]
    failures: tuple[Measurement, ...]
    unreached: int
    spent_s: float

    @property
    def too_noisy(self) -> bool:
        """The control was too unsteady and nothing was decided."""
        return any(v.outcome == "too noisy" for v in self.verdicts) and self.choice == self.default

    @property
    def verdict(self) -> Verdict | None:
        """The verdict on the choice, when it is not the default."""
        return next((v for v in self.verdicts if v.candidate == self.choice and v.outcome == "wins"), None)


def tune_site(
    workload: Workload,
    candidates: Sequence[Candidate],
    measurer: Measurer,
    log: Log,
    conditions: Conditions,
    *,
    budget_s: float = math.inf,
    rank: Callable[[Workload, Sequence[Candidate]], Sequence[Candidate]] | None = None,
    clock: Callable[[], float] = time.monotonic,
    seed: int = 0,
) -> SiteResult:
    """Measure a site's candidates against its default, candidates[0], and decide.

    Every measurement, failure and verdict is in the log before the next one is taken. A candidate that failed under the same
    conditions is not tried again. When the budget ends, what has no verdict keeps the default.

    rank     orders the candidates, so that a short budget reaches the promising ones; None keeps the family's order.
    Raises   DeviceError when the default itself fails: there is nothing to compare with then.
    """
    tuning = _Tuning(workload, tuple(candidates), measurer, log, conditions, budget_s, clock, random.Random(f"{seed} {workload.hash()}"))
    return tuning.run(rank(workload, candidates) if rank else candidates)


@dataclass
class _Tuning:
    workload: Workload
    candidates: tuple[Candidate, ...]
    measurer: Measurer
    log: Log
    conditions: Conditions
    budget_s: float
    clock: Callable[[], float]
    rng: random.Random
    failed: dict[Candidate, str] = field(default_factory=dict)
    unreached: int = 0

    def run(self, ranked: Sequence[Candidate]) -> SiteResult:
        self.start, self.default = self.clock(), self.candidates[0]
        # The default is tried even if it failed once: without it nothing can be decided.
        known = self.log.failures(self.workload, self.conditions)
        self.failed = {c: known[c] for c in self.candidates[1:] if c in known}
        finalists = self.finalists(self.screen([c for c in ranked if c != self.default and c not in self.failed]))
        decided: dict[Candidate, Verdict] = {}
        for group in _batches(finalists, CONFIRMED_TOGETHER):
            decided |= {v.candidate: v for v in self.confirm(group)}
        winners = [c for c, v in decided.items() if v.outcome == "wins"]
        if len(finalists) > CONFIRMED_TOGETHER and len(winners) > 1:
            # A kernel can have two speeds, each for the life of a process (32 and 41 us seen): only ratios of the same processes compare.
            decided |= {v.candidate: v for v in self.confirm(winners)}
        verdicts = tuple(decided[c] for c in self.candidates if c in decided)
        failures = tuple(Measurement(c, error=error) for c, error in self.failed.items())
        self.unreached += sum(1 for c in finalists if c not in decided and c not in self.failed)
        choice = rule.choose(verdicts, self.default)
        return SiteResult(self.workload, self.default, choice, verdicts, failures, self.unreached, self.spent_s())

    def spent_s(self) -> float:
        return self.clock() - self.start

    def record(self, *found: Measurement | Verdict) -> None:
        self.log.append(*(Record.of(self.workload, x, self.conditions) for x in found))
        failures = {x.candidate: x.error for x in found if isinstance(x, Measurement) and x.error is not None}
        if self.default in failures:
            raise DeviceError(f"{self.workload}: the default {self.default} failed: {failures[self.default]}")
        self.failed |= failures

    # screening

    def screen(self, todo: Sequence[Candidate]) -> dict[Candidate, float]:
        """The quickest sample in seconds of each sound candidate that the budget reaches."""
        best_s: dict[Candidate, float] = {}
        for batch in _batches(todo, BATCH):
            if best_s and self.spent_s() > SCREEN_SHARE * self.budget_s:
                break
            self.sample(self.checked([self.default, *batch]), best_s)
        self.unreached = sum(1 for c in todo if c not in best_s and c not in self.failed)
        for _ in range(SCREEN_ROUNDS - 1):
            if self.spent_s() > SCREEN_SHARE * self.budget_s:
                break
            left = _best_of_each(best_s, lambda size: max(KEPT, size // 2))
            self.sample([self.default, *(c for c in left if c != self.default)], best_s)
            best_s = {c: best_s[c] for c in (self.default, *left) if c in best_s}
        return best_s

    def checked(self, batch: Sequence[Candidate]) -> list[Candidate]:
        errors = self.measurer.check(self.workload, batch)
        self.record(*(Measurement(c, error=error) for c, error in zip(batch, errors, strict=True) if error is not None))
        return [c for c, error in zip(batch, errors, strict=True) if error is None]

    def sample(self, batch: Sequence[Candidate], best_s: dict[Candidate, float]) -> None:
        measured = self.measurer.screen(self.workload, batch)
        self.record(*measured)
        for measurement in measured:
            if measurement.error is None:
                best_s[measurement.candidate] = min(*measurement.times_s, best_s.get(measurement.candidate, math.inf))
            else:
                best_s.pop(measurement.candidate, None)

    def finalists(self, best_s: dict[Candidate, float]) -> list[Candidate]:
        return [c for c in _best_of_each(best_s, lambda _: KEPT) if c != self.default]

    # confirmation

    def confirm(self, group: Sequence[Candidate]) -> Iterator[Verdict]:
        """Verdicts on finalists that are measured together, as soon as there is one."""
        active = list(group)
        ratios: dict[Candidate, list[list[float]]] = defaultdict(list)
        control: list[float] = []
        for before, pairs in pairwise((0, *rule.LOOKS)):
            for share in _shares(pairs - before, PROCESSES_PER_LOOK):
                if not active or self.spent_s() > self.budget_s:
                    return
                for candidate, found in self.in_fresh_process(active, share).items():
                    if candidate == self.default:
                        control += found
                    else:
                        ratios[candidate].append(found)
            for candidate in tuple(active):
                verdict = rule.look(candidate, ratios[candidate], control)
                if verdict:
                    self.record(verdict)
                    active.remove(candidate)
                    yield verdict

    def in_fresh_process(self, active: list[Candidate], pairs: int) -> dict[Candidate, list[float]]:
        """ln(time / default's time) of `pairs` AB/BA pairs for each active candidate, and under the default those of the A/A control.

        A candidate that fails leaves `active`, and a new process starts from the beginning with the others.
        """
        while active:
            kernels = [self.default, self.default, *active]
            times: dict[int, list[tuple[float, float]]] = defaultdict(list)
            with self.measurer.open_process(self.workload, kernels) as process:
                order = [slot for _ in range(pairs) for slot in self.rng.sample(range(1, len(kernels)), len(kernels) - 1)]
                failed = next((slot for slot in order if not self.take(process, slot, kernels[slot], times[slot])), None)
            if failed is None:
                self.record(
                    *(Measurement(c, tuple(t for _, t in times[slot])) for slot, c in enumerate(kernels) if slot > 1),
                    Measurement(self.default, tuple(t for taken in times.values() for t, _ in taken)),
                )
                return {kernels[slot]: [math.log(t / t_default) for t_default, t in taken] for slot, taken in times.items()}
            active.remove(kernels[failed])
        return {}

    def take(self, process: Process, slot: int, candidate: Candidate, times: list[tuple[float, float]]) -> bool:
        """One pair of kernel 0 and kernel `slot` in random order; False when it failed, which is recorded."""
        try:
            if self.rng.random() < 0.5:
                default_s, seconds = process.pair(0, slot)
            else:
                seconds, default_s = process.pair(slot, 0)
        except DeviceError as error:
            self.record(Measurement(candidate, error=str(error)))
            return False
        times.append((default_s, seconds))
        return True


def _best_of_each(best_s: dict[Candidate, float], keep: Callable[[int], int]) -> list[Candidate]:
    """The quickest `keep(group size)` candidates of each placement and cut, the quickest of all first."""
    groups: dict[tuple[str, int], list[Candidate]] = defaultdict(list)
    for candidate in best_s:
        groups[candidate.placement, candidate.cut].append(candidate)
    kept = [c for group in groups.values() for c in sorted(group, key=best_s.__getitem__)[: keep(len(group))]]
    return sorted(kept, key=best_s.__getitem__)


def _batches(items: Sequence[Candidate], size: int) -> Iterator[Sequence[Candidate]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _shares(total: int, parts: int) -> list[int]:
    return [total // parts + (i < total % parts) for i in range(parts)]


@dataclass(frozen=True)
class Demand:
    """A site that wants to be tuned: how often the model runs it, and what each run may gain in seconds."""

    workload: Workload
    count: int
    gain_s: float


@dataclass(frozen=True)
class Plan:
    """Seconds for each site that is reached, the most valuable first; and the sites that the budget does not reach."""

    shares: tuple[tuple[Demand, float], ...]
    unreached: tuple[Demand, ...]


def plan(demands: Sequence[Demand], budget_s: float, least_s: float = LEAST_SHARE_S) -> Plan:
    """Share a budget among sites by expected gain x count; each site that is reached gets at least `least_s`.

    Sites seldom need all of their share: plan the sites that are left again with the budget that is left.
    """
    ordered = sorted(demands, key=lambda d: d.gain_s * d.count, reverse=True)
    if math.isinf(budget_s):
        return Plan(tuple((d, math.inf) for d in ordered), ())
    reached = ordered[: max(0, int(budget_s // least_s))]
    weights = [d.gain_s * d.count for d in reached]
    spare, total = budget_s - least_s * len(reached), sum(weights) or 1.0
    shares = tuple((d, least_s + spare * weight / total) for d, weight in zip(reached, weights, strict=True))
    return Plan(shares, tuple(ordered[len(reached) :]))
