"""The tuning loop of one site: check the bits, screen, confirm against the default, decide; and how sites share a time budget.

Nothing here knows TVM or a clock: what measures, what remembers and what tells the time are arguments, so that the whole loop
runs in milliseconds on a simulated machine.

Sources   screening by successive halving: Jamieson and Talwalkar, AISTATS 2016; strategy, runner and record apart: kernel_tuner.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Protocol

from ..errors import DeviceError
from ..values import Candidate, Measurement, Verdict, Workload
from . import verdict as rule
from .log import DECIDED, Conditions, Kind, Log, Record

BATCH = 16  # candidates checked and screened before the budget is looked at again
EXPLORED = 3  # of a batch, drawn from those that the ranking likes least: a ranker that is wrong must be able to notice
TILES_SHARE = 0.35  # of a site's budget goes to its tiles ...
SCREEN_SHARE = 0.55  # ... and so much at most to all screening; the rest confirms
SCREEN_ROUNDS = 3  # each on half of what is left, so that the promising are timed three times
TILES_KEPT = 3  # the best of them, and the default's, are tried in other placements and cuts
NEAR_PLACE = 1.05  # all of them on the quickest tile; on the others those that are hardly behind the best one there
KEPT = 3  # finalists of each placement and cut:
NEAR = 1.10  # the best, and others that are at most a tenth behind the quickest of all
HOPELESS = 1.03  # a quickest sample so far behind the default's isn't confirmed: no winner of 250 had one over 1.01
CONFIRMED_TOGETHER = 8  # finalists that share a process and its control
PROCESSES_PER_LOOK = 3
PROCESS_S = 1.0  # what a fresh process takes, until one was seen
SITE_S = 12.0  # what a small site takes to its verdicts: a budget goes to as many sites as it can finish
LEAST_SHARE_S = 5.0  # what is left over begins another one if it is at least this


class Process(Protocol):
    """A fresh process that holds some kernels side by side."""

    def pair(self, first: int, second: int) -> tuple[float, float]:
        """Seconds of kernel `first`, then of kernel `second`: indices into what the process was opened with.

        Raises DeviceError when a kernel crashes or hangs; the process is gone then.
        """


class Measurer(Protocol):
    """A device that builds and times candidates. candidates[0] is always the default."""

    def check(self, workload: Workload, candidates: Sequence[Candidate]) -> list[str | None]:
        """For each candidate why it can't be used, or None: it doesn't build, it crashes, its bits are not those of its algorithm."""

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
    finished    nothing is left to do: a later run doesn't come back to this site.
    """

    workload: Workload
    default: Candidate
    choice: Candidate
    verdicts: tuple[Verdict, ...]
    failures: tuple[Measurement, ...]
    unreached: int
    spent_s: float
    finished: bool = True

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

    Tiles are screened first, each with the first candidate that the family lists for it, in the ranking's order until a batch, part of
    which is drawn from the ranking's end, brings no new best; the quickest then with every placement and cut, and what is good there
    with the other good tiles. Which tile is best hardly depends on where the epilogue is, so that the space need not be their product.
    Every measurement, failure and verdict is in the log before the next one is taken, and what the log has of this site under the same
    conditions counts: candidates that failed are not tried again, samples and pairs are not taken twice. When the budget ends, what has
    no verdict keeps the default, and the next run goes on there.

    rank     orders the candidates, so that a short budget reaches the promising ones; None keeps the family's order.
    Raises   DeviceError when the default itself fails: there is nothing to compare with then.
    """
    tuning = _Tuning(workload, tuple(candidates), measurer, log, conditions, budget_s, clock, random.Random(f"{seed} {workload.hash()}"))
    return tuning.run(rank or (lambda _, order: order))


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
    screened: dict[Candidate, float] = field(default_factory=dict)  # quickest sample over the default's in the same batch
    pairs: dict[Candidate, list[list[float]]] = field(default_factory=lambda: defaultdict(list))  # ln ratios since the last verdict
    control: list[float] = field(default_factory=list)
    decided: dict[Candidate, Verdict] = field(default_factory=dict)
    usable: set[Candidate] = field(default_factory=set)  # compiled and compared in this run
    passed_over: set[Candidate] = field(default_factory=set)  # tiles ranked behind a batch that brought no new best
    step_s: dict[str, float] = field(default_factory=lambda: {"screen": 0.0, "process": PROCESS_S})

    def run(self, rank: Callable[[Workload, Sequence[Candidate]], Sequence[Candidate]]) -> SiteResult:
        self.start, self.default = self.clock(), self.candidates[0]
        self.resume()
        ready = bool(self.pairs or self.decided) or self.screen(rank)
        finalists = self.finalists() if ready else []
        for group in _batches(finalists, CONFIRMED_TOGETHER):
            self.confirm([c for c in group if c not in self.decided])
        winners = [c for c, v in self.decided.items() if v.outcome == "wins"]
        together = len(finalists) <= CONFIRMED_TOGETHER or len(winners) < 2
        if not together:
            # A kernel can have two speeds, each for the life of a process (32 and 41 us seen): only ratios of the same processes compare.
            together = self.confirm(winners)
        verdicts = tuple(self.decided[c] for c in self.candidates if c in self.decided)
        waiting = [c for c in finalists if c not in self.decided and c not in self.failed]
        finished = ready and together and not waiting and not any(v.outcome == "too noisy" for v in verdicts)
        if finished:
            self.close(verdicts)
        known = {*self.screened, *self.failed, *self.decided, *self.passed_over}
        unreached = len(waiting) + sum(1 for c in self.tiles()[1:] if c not in known)
        failures = tuple(Measurement(c, error=error) for c, error in self.failed.items())
        choice = rule.choose(verdicts, self.default)
        return SiteResult(self.workload, self.default, choice, verdicts, failures, unreached, self.spent_s(), finished)

    def resume(self) -> None:
        """Take up what earlier runs found out under the same conditions."""
        listed = set(self.candidates)
        for record in self.log.history(self.workload, self.conditions):
            candidate, verdict = record.candidate, record.verdict
            if candidate not in listed or record.kind == "site":
                continue
            if record.error is not None and candidate != self.default:  # without the default nothing can be decided: it is tried again
                self.failed[candidate] = record.error
            elif verdict is not None:
                self.pairs.pop(candidate, None)
                if verdict.outcome in DECIDED:
                    self.decided[candidate] = verdict
                elif verdict.outcome == "too noisy":
                    self.pairs.clear()
                    self.control.clear()
            elif record.default_s and record.kind == "screening":
                self.rate(candidate, record.times_s, record.default_s)
            elif record.default_s:
                self.take_up(candidate, [math.log(t / d) for t, d in zip(record.times_s, record.default_s, strict=True)])

    def take_up(self, candidate: Candidate, ratios: list[float]) -> None:
        if candidate == self.default:
            self.control += ratios
        elif ratios:
            self.pairs[candidate].append(ratios)

    def spent_s(self) -> float:
        return self.clock() - self.start

    @contextlib.contextmanager
    def step(self, kind: str) -> Iterator[None]:
        """Remember how long the last step of each kind took: the next one is begun only if it fits into what is left."""
        began = self.clock()
        yield
        self.step_s[kind] = self.clock() - began

    def fits(self, kind: str, share: float = 1.0) -> bool:
        return self.spent_s() + self.step_s[kind] <= share * self.budget_s

    def record(self, *found: Measurement | Verdict, kind: Kind | None = None) -> None:
        self.log.append(*(Record.of(self.workload, x, self.conditions, kind) for x in found))
        failures = {x.candidate: x.error for x in found if isinstance(x, Measurement) and x.error is not None}
        if self.default in failures:
            raise DeviceError(f"{self.workload}: the default {self.default} failed: {failures[self.default]}")
        self.failed |= failures
        for candidate in failures:
            self.screened.pop(candidate, None)

    def close(self, verdicts: Sequence[Verdict]) -> None:
        """Say in the log that this site is finished, with the control as what the default came to."""
        low, high = min(self.control, default=0.0), max(self.control, default=0.0)
        wins = sum(v.outcome == "wins" for v in verdicts)
        why = f"{len(verdicts)} rivals confirmed, {wins} won"
        noise = max((v.aa_noise for v in verdicts), default=0.0)
        closing = Verdict("keeps default", self.default, 1.0, (math.exp(low), math.exp(high)), noise, len(self.control), why)
        self.record(closing, kind="site")

    # screening

    def tiles(self) -> list[Candidate]:
        """The first candidate of each tile, in the family's order: the whole epilogue in registers."""
        first: dict[object, Candidate] = {}
        for candidate in self.candidates:
            first.setdefault(candidate.knobs, candidate)
        return list(first.values())

    def screen(self, rank: Callable[[Workload, Sequence[Candidate]], Sequence[Candidate]]) -> bool:
        """Tiles, then placements and cuts of the best ones; whether the budget reached these."""
        tiles = [c for c in self.tiles() if c not in self.failed]
        todo = list(rank(self.workload, [c for c in tiles if c not in self.screened and c != self.default]))
        while todo and (not self.screened or self.fits("screen", TILES_SHARE)):
            favoured, rest = todo[: BATCH - EXPLORED], todo[BATCH - EXPLORED :]
            batch = favoured + self.rng.sample(rest, min(EXPLORED, len(rest)))
            todo = [c for c in todo if c not in batch]
            quickest = min(self.screened.values(), default=math.inf)
            self.sample(batch)
            sampled = [self.screened[c] for c in batch if c in self.screened]  # none where the whole batch failed
            if sampled and quickest <= min(sampled):
                self.passed_over = set(todo)
                break
        for _ in range(SCREEN_ROUNDS - 1):
            left = sorted((c for c in tiles if c in self.screened), key=self.screened.__getitem__)
            tiles = left[: max(TILES_KEPT, len(left) // 2)]
            if self.fits("screen", SCREEN_SHARE):
                self.sample(tiles)
        best = sorted((c for c in tiles if c in self.screened), key=self.screened.__getitem__)[:TILES_KEPT]
        return self.screen_places([c.knobs for c in sorted([self.default, *best], key=lambda c: self.screened.get(c, 1.0))])

    def screen_places(self, tiles: Sequence[object]) -> bool:
        """Every placement and cut on the first of some tiles, the good ones on all; whether the budget reached them."""
        before = set(self.screened)
        first = [c for c in self.candidates if c.knobs == tiles[0]]
        if not self.sample_fresh(first):
            return False
        ratios = {(c.placement, c.cut): self.screened.get(c, 1.0) for c in first if c in self.screened or c == self.default}
        good = {place for place, ratio in ratios.items() if ratio <= NEAR_PLACE * min(ratios.values())}
        if not self.sample_fresh([c for c in self.candidates if c.knobs in tiles and (c.placement, c.cut) in good]):
            return False
        if before != set(self.screened) and self.fits("screen", SCREEN_SHARE):
            self.sample([c for c in self.finalists() if c.knobs in tiles])
        return True

    def sample_fresh(self, wanted: Sequence[Candidate]) -> bool:
        """Those that have no sample yet; whether the budget reached all."""
        for batch in _batches([c for c in wanted if c != self.default and c not in self.failed and c not in self.screened], BATCH):
            if not self.fits("screen"):
                return False
            self.sample(batch)
        return True

    def sample(self, batch: Sequence[Candidate]) -> None:
        """One quick sample of each sound candidate, between two of the default."""
        with self.step("screen"):
            sound = self.checked(batch)
            measured = self.measurer.screen(self.workload, [self.default, *sound, self.default])
            default_s = min((t for m in (measured[0], measured[-1]) for t in m.times_s), default=math.nan)
            found = [replace(m, default_s=(default_s,) * len(m.times_s)) for m in measured[1:-1]]
            self.record(measured[0], *found, measured[-1], kind="screening")
            for measurement in found:
                if measurement.error is None:
                    self.rate(measurement.candidate, measurement.times_s, measurement.default_s)

    def rate(self, candidate: Candidate, times_s: Sequence[float], default_s: Sequence[float]) -> None:
        ratio = min(t / d for t, d in zip(times_s, default_s, strict=True))
        self.screened[candidate] = min(ratio, self.screened.get(candidate, math.inf))

    def checked(self, wanted: Sequence[Candidate]) -> list[Candidate]:
        """Those of `wanted`, without the default, that build, run and have the right bits."""
        asked = [c for c in dict.fromkeys(wanted) if c != self.default and c not in self.failed]
        todo = [c for c in (self.default, *asked) if c not in self.usable]
        if todo:
            batch = list(dict.fromkeys((self.default, *todo)))
            errors = self.measurer.check(self.workload, batch)
            self.record(*(Measurement(c, error=error) for c, error in zip(batch, errors, strict=True) if error is not None))
            self.usable |= {c for c, error in zip(batch, errors, strict=True) if error is None}
        return [c for c in asked if c in self.usable]

    def finalists(self) -> list[Candidate]:
        """Of each placement and cut the best, and up to two more near the quickest of all, hopeless ones aside; the quickest first."""
        rated = sorted((c for c, ratio in self.screened.items() if c != self.default and ratio <= HOPELESS), key=self.screened.__getitem__)
        groups: dict[tuple[str, int], list[Candidate]] = defaultdict(list)
        for candidate in rated:
            group = groups[candidate.placement, candidate.cut]
            if len(group) < (KEPT if self.screened[candidate] <= NEAR * min(1.0, self.screened[rated[0]]) else 1):
                group.append(candidate)
        return [c for c in rated if c in groups[c.placement, c.cut]]

    # confirmation

    def confirm(self, group: Sequence[Candidate]) -> bool:
        """Verdicts on finalists that are measured together; whether the budget reached all."""
        if not group:
            return True
        with self.step("screen"):
            active = self.checked(group)
        for before, pairs in pairwise((0, *rule.LOOKS)):
            end = before
            for share in _shares(pairs - before, PROCESSES_PER_LOOK):
                end += share
                due = {c: end - sum(map(len, self.pairs[c])) for c in active}
                due = {c: lacking for c, lacking in due.items() if lacking > 0}
                if due and not self.fits("process"):
                    return False
                with self.step("process"):
                    self.in_fresh_process(due)
                active = [c for c in active if c not in self.failed]
            for candidate in [c for c in active if sum(map(len, self.pairs[c])) == pairs]:  # an earlier run may have looked here
                verdict = rule.look(candidate, self.pairs[candidate], self.control)
                if verdict:
                    self.record(verdict)
                    self.decided[candidate] = verdict
                    del self.pairs[candidate]
                    active.remove(candidate)
        return True

    def in_fresh_process(self, due: Mapping[Candidate, int]) -> None:
        """As many AB/BA pairs of each candidate as are due, in one process, and as many of the A/A control as of the neediest.

        A candidate that fails is out, and a new process takes what the others lack.
        """
        left = dict(due)
        while left:
            kernels = [self.default, self.default, *left]
            times: dict[int, list[tuple[float, float]]] = defaultdict(list)
            wanted = [0, max(left.values()), *left.values()]
            try:
                with self.measurer.open_process(self.workload, kernels) as process:
                    failed = next((slot for slot in self.order(wanted) if not self.take(process, slot, kernels[slot], times[slot])), None)
            finally:  # an interruption too keeps what was measured
                taken = {slot: pairs for slot, pairs in times.items() if pairs}
                for slot, found in taken.items():
                    self.take_up(kernels[slot], [math.log(t / default_s) for default_s, t in found])
                self.record(*(Measurement(kernels[i], tuple(t for _, t in p), default_s=tuple(d for d, _ in p)) for i, p in taken.items()))
            if failed is None:
                return
            del left[kernels[failed]]
            left = {c: lacking for slot, (c, n) in enumerate(due.items(), 2) if c in left and (lacking := n - len(times[slot])) > 0}

    def order(self, wanted: Sequence[int]) -> Iterator[int]:
        """Slots in rounds, each round in random order, until every slot came as often as wanted."""
        for taken in range(max(wanted)):
            slots = [slot for slot, n in enumerate(wanted) if n > taken]
            yield from self.rng.sample(slots, len(slots))

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


def _batches(items: Sequence[Candidate], size: int) -> Iterator[Sequence[Candidate]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _shares(total: int, parts: int) -> list[int]:
    return [total // parts + (i < total % parts) for i in range(parts)]


@dataclass(frozen=True)
class Demand:
    """A site that wants to be tuned: how often the model runs it, what each run may gain in seconds, and what the first is called."""

    workload: Workload
    count: int
    gain_s: float
    name: str = ""


@dataclass(frozen=True)
class Allotment:
    """Seconds for each site that is reached, the most valuable first; and the sites that the budget does not reach."""

    shares: tuple[tuple[Demand, float], ...]
    unreached: tuple[Demand, ...]


def allot(demands: Sequence[Demand], budget_s: float, site_s: float = SITE_S) -> Allotment:
    """Share a budget among sites by expected gain x count; each site that is reached gets at least `site_s`, or all there is.

    Sites seldom need all of their share: allot to the sites that are left again the budget that is left.
    """
    ordered = sorted(demands, key=lambda d: d.gain_s * d.count, reverse=True)
    if math.isinf(budget_s):
        return Allotment(tuple((d, math.inf) for d in ordered), ())
    reached = ordered[: max(int(budget_s // site_s), int(budget_s >= LEAST_SHARE_S))]
    least_s = min(site_s, budget_s)
    weights = [d.gain_s * d.count for d in reached]
    spare, total = budget_s - least_s * len(reached), sum(weights) or 1.0
    shares = tuple((d, least_s + spare * weight / total) for d, weight in zip(reached, weights, strict=True))
    return Allotment(shares, tuple(ordered[len(reached) :]))


def spend(
    demands: Sequence[Demand], budget_s: float, tune_one: Callable[[Demand, float], SiteResult], clock: Callable[[], float] = time.monotonic
) -> tuple[list[SiteResult], list[Demand]]:
    """Tune what a budget reaches, the most valuable first; what a site leaves of its share goes to the others. Results, and the rest.

    Where a share was too little to finish a site, the others get half as much again: of a slow model fewer sites are begun, and finished.
    """
    left, results, end, site_s = list(demands), [], clock() + budget_s, SITE_S
    while shares := allot(left, end - clock(), site_s).shares:
        demand, share = shares[0]
        results.append(tune_one(demand, share))
        left.remove(demand)
        if not results[-1].finished:
            site_s = max(site_s, 1.5 * share)
    return results, left
