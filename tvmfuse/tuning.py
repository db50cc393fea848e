"""Measure a model's sites on this machine, decide, and remember."""

from __future__ import annotations

import contextlib
import math
import os
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm.target import Target

from . import kernel
from .building import Plan, Prepared, compile_model, described, plan_for, prepare
from .choose import Chooser, Fuse, first_tiles
from .compare import bound, draw
from .decide import search, verdict
from .decide.cost_model import AnalyticPrior, Learned, learn
from .decide.log import Log, Record, is_finished
from .errors import UsageError
from .measure.device import BuildKernel, Device, LocalDevice
from .measure.forkserver import ForkServer
from .measure.host import host, toolchain
from .measure.pool import Pool
from .measure.remote import Identity, connected
from .predicting import measured
from .session import Session
from .values import Candidate, Host, Machine, Numerics, Outcome, Site, Verdict, Workload

Progress = Callable[[float, str], None]
EXPECTED_GAIN = 0.05  # of a site's time, before anything is known about it; only ratios between sites matter
LEAST_GAIN = 0.01  # whatever a model says: it may be wrong
# Kept of the budget for the whole-model comparison, which compiles every site some three times.
GATE_SHARE, GATE_SITE_S, MOST_GATE_SHARE = 0.05, 0.3, 0.25
SLOW_MODEL_S = 20e-3  # a model this slow is timed once a round: an interruption is small beside it
OUTCOMES = ("decided before", "tuned", "kept default", "undecided", "too noisy", "reverted", "begun", "not reached", "without a choice")
UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Summary:
    """What one tuning run came to.

    sites      all of the model's sites, as a build would now choose them. Equal sites have one workload, which is measured once.
    matched    workloads that the log had decided before; results: those measured now; unreached: those that the budget left out.
    gate       tuned against always or never, whichever is quicker, on the whole model, when a site changed; reverted: sites that it
               turned back.
    """

    sites: tuple[Site, ...]
    matched: int
    results: tuple[search.SiteResult, ...]
    unreached: tuple[Workload, ...]
    gate: Verdict | None
    reverted: tuple[Workload, ...]
    spent_s: float

    def outcome(self, workload: Workload) -> str:
        """What this run found out about a workload, in a few words."""
        if workload in self.unreached:
            return "not reached"
        result = next((r for r in self.results if r.workload == workload), None)
        if result is None:
            decided = any(site.source == "measured" for site in self.sites if site.workload == workload)
            return "decided before" if decided else "without a choice"
        if workload in self.reverted:
            return "reverted: the whole model got slower"
        rivals = sorted((v for v in result.verdicts if v.candidate != result.choice), key=lambda v: v.ratio)
        best = f", best other {rivals[0].ratio:.3f} [{rivals[0].ci[0]:.3f}, {rivals[0].ci[1]:.3f}]" if rivals else ""
        return _outcome(result) + best + ("" if result.finished else ", the next run goes on here")

    @property
    def left(self) -> int:
        """Workloads that a further run goes on with."""
        return len(self.unreached) + sum(not result.finished for result in self.results)

    def __str__(self) -> str:
        """Of how many sites what became; of equal ones, the one that was measured counts."""
        distinct = len({site.workload for site in self.sites})
        found = Counter({"decided before": self.matched, "not reached": len(self.unreached), "reverted": len(self.reverted)})
        found.update(_outcome(result) for result in self.results if result.workload not in self.reverted)
        found["without a choice"] = distinct - found.total()
        head = f"sites: {len(self.sites)}" + (f" ({distinct} different ones, each measured once)" if distinct < len(self.sites) else "")
        became = ", ".join(f"{found[name]} {name}" for name in OUTCOMES if found[name])
        return f"{head}: {became or 'nothing to decide'}; in {self.spent_s:.0f} s"


def tune(
    model: Any,
    shapes: Mapping[str, Any] | None = None,
    threads: int | None = None,
    budget: str | float = "10m",
    logs: str | os.PathLike[str] | None = None,
    progress: Progress = lambda done, doing: None,
    numerics: Numerics = "exact",
    rpc: str | None = None,
) -> Summary:
    """Measure every site's candidates within a time budget, the ones with the most expected gain first.

    budget    seconds, or a text such as "90s", "10m", "2h". What was begun when it ends is kept; the next run goes on there.
    logs      folder of the log that is read and written; None for the user's own, beside the shipped one.
    progress  called with the fraction of the budget that is spent and what is being done.
    numerics  as for `build`. Where a site has relaxed candidates, what is decided with "relaxed" holds for such builds alone.
    rpc       "host:port/key" of a TVM RPC tracker: compile here, measure on all free devices that have registered there under that key
              with the CPU of the first. Records hold for that CPU. The whole model isn't compared then.
    Raises    UsageError for a budget that makes no sense, DeviceError when this machine can't measure, DeviceLost when no device is left.
    """
    began = time.monotonic()
    decided: dict[Workload, search.SiteResult] = {}
    with contextlib.ExitStack() as stack:
        if rpc is None:
            job = _job(model, shapes, threads, budget, logs, numerics)
            device: Device = stack.enter_context(LocalDevice(*job.measuring))
        else:
            server = stack.enter_context(ForkServer())
            places = stack.enter_context(connected(rpc, server))
            job = _job(model, shapes, threads, budget, logs, numerics, places[0].identity)
            device = stack.enter_context(Device(*job.measuring, Pool(places), server))
        plan, prepared = job.plan, job.prepared
        job.log.check_writable(job.host)

        def tune_one(demand: search.Demand, share: float) -> search.SiteResult:
            done = min(1.0, (time.monotonic() - began) / job.budget_s)
            progress(done, f"{_so_far(decided, len(job.demands))}; {demand.workload.anchor}")
            candidates, conditions = plan.chooser.candidates(demand.workload), plan.chooser.conditions(demand.workload)
            result = search.tune_site(demand.workload, candidates, device, job.log, conditions, budget_s=share, rank=job.rank)
            decided[demand.workload] = result
            return result

        results, left = search.spend(job.demands, job.sites_s - (time.monotonic() - began), tune_one)
    gate, reverted = (None, []) if rpc else _gate(prepared, plan, job.log, results, progress, began + job.budget_s)
    now = plan_for(None, threads, "measured", logs, numerics, job.identity).chooser
    return Summary(
        sites=tuple(described(site, now) for site in prepared.sites),
        matched=job.matched,
        results=tuple(results),
        unreached=tuple(demand.workload for demand in left),
        gate=gate,
        reverted=tuple(reverted),
        spent_s=time.monotonic() - began,
    )


def _so_far(decided: Mapping[Workload, search.SiteResult], sites: int) -> str:
    best = min((result.verdict.ratio for result in decided.values() if result.verdict), default=1.0)
    return f"{len(decided)} of {sites} sites" + (f", best gain {1 - best:.1%}" if best < 1 else "")


def dry_run(
    model: Any,
    shapes: Mapping[str, Any] | None = None,
    threads: int | None = None,
    budget: str | float = "10m",
    logs: str | os.PathLike[str] | None = None,
    numerics: Numerics = "exact",
) -> search.Allotment:
    """What `tune` with these arguments would do: sites in order with their seconds, and those that it wouldn't reach. Measures nothing."""
    job = _job(model, shapes, threads, budget, logs, numerics)
    return search.allot(job.demands, job.sites_s)


@dataclass(frozen=True)
class _Job:
    """What there is to tune, and in which order. sites_s: the part of the budget that sites may use, the whole-model comparison's apart."""

    plan: Plan
    prepared: Prepared
    log: Log
    budget_s: float
    sites_s: float
    demands: list[search.Demand]
    matched: int
    rank: Callable[[Workload, Sequence[Candidate]], Sequence[Candidate]]
    identity: Identity | None

    @property
    def host(self) -> Host:
        """Of the CPU that is measured."""
        return self.identity.host if self.identity else host()

    @property
    def measuring(self) -> tuple[BuildKernel, Target, Machine, int]:
        """What a device needs to know of the model."""
        return kernel.build_kernel, self.plan.target, self.plan.machine, working_set(self.prepared)


def _job(
    model: Any,
    shapes: Mapping[str, Any] | None,
    threads: int | None,
    budget: str | float,
    logs: str | os.PathLike[str] | None,
    numerics: Numerics,
    identity: Identity | None = None,
) -> _Job:
    budget_s = parse_budget(budget)
    plan, prepared = plan_for(None, threads, "measured", logs, numerics, identity), prepare(model, shapes)
    log = plan.chooser.log
    assert log is not None
    counts = Counter(site.workload for site in prepared.sites)
    sites_s = budget_s - min(GATE_SHARE * budget_s + GATE_SITE_S * len(counts), MOST_GATE_SHARE * budget_s)
    if sites_s < search.LEAST_SHARE_S:
        raise UsageError(f"a budget of {budget_s:g} s reaches no site; give at least {math.ceil(least_budget_s(len(counts)))} s")
    ranker = _ranker(log, plan.machine) if numerics == "exact" else AnalyticPrior(plan.machine)
    demands = []
    for workload, count in counts.items():
        candidates, history = plan.chooser.candidates(workload), log.history(workload, plan.chooser.conditions(workload))
        if len(candidates) > 1 and not is_finished(history):
            noisy = sum(record.verdict is not None and record.verdict.outcome == "too noisy" for record in history)
            demands.append(search.Demand(workload, count, _expected_gain_s(workload, candidates, plan.machine, ranker) / (1 + noisy)))
    matched = sum(len(plan.chooser.candidates(w)) > 1 for w in counts) - len(demands)
    return _Job(plan, prepared, log, budget_s, sites_s, demands, matched, ranker.rank, identity)


def least_budget_s(workloads: int) -> float:
    """The least that reaches a site of a model with so many workloads."""
    least = (search.LEAST_SHARE_S + GATE_SITE_S * workloads) / (1 - GATE_SHARE)
    return min(least, search.LEAST_SHARE_S / (1 - MOST_GATE_SHARE))


def _ranker(log: Log, machine: Machine) -> AnalyticPrior | Learned:
    return learn(measured(log, machine), machine) or AnalyticPrior(machine)


def _expected_gain_s(workload: Workload, candidates: Sequence[Candidate], machine: Machine, ranker: AnalyticPrior | Learned) -> float:
    """Seconds of one run of a site: what it takes by the analytic prior, times what a trained model hopes for."""
    gain = EXPECTED_GAIN
    if isinstance(ranker, Learned):
        gain = max(LEAST_GAIN, -math.expm1(min(ranker.log_ratios(workload, first_tiles(candidates)))))
    return gain * AnalyticPrior(machine).seconds(workload, candidates[0])


def parse_budget(budget: str | float) -> float:
    """Seconds. Raises UsageError for what is not a positive time."""
    parsed = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh]?)\s*", str(budget))
    seconds = float(parsed[1]) * UNITS[parsed[2]] if parsed else 0.0
    if not (seconds > 0 and math.isfinite(seconds)):
        raise UsageError(f"budget {budget!r} is not a time; write it like '90s', '10m' or '2h'")
    return seconds


def working_set(prepared: Prepared) -> int:
    """Bytes that one call of the model touches: each site's inputs and outputs. What lies between sites is small beside them."""
    return sum(site.workload.bytes_moved() for site in prepared.sites)


def _outcome(result: search.SiteResult) -> str:
    if result.verdict:
        return "tuned"
    if result.too_noisy:
        return "too noisy"
    if not result.finished:
        return "begun"
    return "kept default" if any(v.outcome == "keeps default" for v in result.verdicts) else "undecided"


def _gate(
    prepared: Prepared, plan: Plan, log: Log, results: Sequence[search.SiteResult], progress: Progress, deadline: float
) -> tuple[Verdict | None, list[Workload]]:
    """The whole model, tuned against always (every default) and never: while tuned is slower, the site that gained least goes back.

    Sites that were decided before count with what they were decided to be; only this run's go back. After `deadline`, by the monotonic
    clock, all of them do at once.
    """
    numerics = plan.chooser.numerics
    before = Chooser("measured", plan.machine, log, host(), toolchain(), numerics=numerics)
    won = {result.workload: result.verdict for result in results if result.verdict}
    chosen = {site.workload: before(site.workload) for site in prepared.sites if before.choice(site.workload).source == "measured"}
    reverted: list[Workload] = []
    said: Verdict | None = None
    rivals: dict[Fuse, Session] = {}
    while won:
        progress(1.0, f"whole model, {len(won)} sites tuned")
        if not rivals:
            rivals = {fuse: compile_model(prepared, plan, Chooser(fuse, plan.machine, numerics=numerics)) for fuse in ("always", "never")}
        tuned = compile_model(prepared, plan, Chooser("always", plan.machine, tried=chosen, numerics=numerics))
        said = compare_whole(tuned, rivals, deadline - time.monotonic(), kernel.candidates(prepared.sites[0].workload, plan.machine)[0])
        if not is_slower(said):
            break
        weakest_first = sorted(won, key=lambda w: won[w].ratio, reverse=True)
        for workload in weakest_first[:1] if time.monotonic() < deadline else weakest_first:
            why = "the whole model got slower"
            overruled = Verdict("keeps default", won[workload].candidate, said.ratio, said.ci, said.aa_noise, said.pairs, why)
            log.append(Record.of(workload, overruled, plan.chooser.conditions(workload), kind="model_gate"))
            reverted.append(workload)
            del won[workload], chosen[workload]
    return said, reverted


def is_slower(whole: Verdict) -> bool:
    """By more than the margin, with confidence: neither a win nor a tie."""
    return whole.ci[0] > 1 + max(verdict.MIN_MARGIN, verdict.MARGIN_PER_NOISE * whole.aa_noise)


def compare_whole(tuned: Session, rivals: Mapping[Fuse, Session], seconds: float, default: Candidate) -> Verdict:
    """The tuned model against the rival that is hardest on it: randomised rounds with an A/A control of the first, in this process.

    seconds  after which no more rounds are taken than the next look needs.
    """
    rng = np.random.default_rng(0)
    feeds = {i.name: draw(rng, i.shape, i.dtype) for i in tuned.get_inputs()}
    first = next(iter(rivals.values()))
    calls = [bound(session, feeds) for session in (tuned, first, first, *list(rivals.values())[1:])]
    for call in calls:
        call()
    once_s = _seconds(calls[0], 1)
    repeats, tries = max(1, round(2e-3 / once_s)), 2 if once_s < SLOW_MODEL_S else 1
    order, end = random.Random(0), time.monotonic() + seconds
    rounds: list[list[float]] = []
    while len(rounds) < verdict.LOOKS[-1] and not (len(rounds) in verdict.LOOKS and time.monotonic() > end):
        slots = order.sample(range(len(calls)), len(calls))
        taken = {slot: math.log(min(_seconds(calls[slot], repeats) for _ in range(tries))) for slot in slots}
        rounds.append([taken[slot] for slot in range(len(calls))])
    log_s = np.array(rounds)
    noise = abs(float(np.median(log_s[:, 2] - log_s[:, 1])))
    found = []
    for slot, name in zip((1, *range(3, len(calls))), rivals, strict=True):
        ratios = sorted(log_s[:, 0] - log_s[:, slot])
        low, high = (ratios[rank - 1] for rank in verdict.RANKS[len(ratios)])
        outcome: Outcome = "wins" if high < 0 else "undecided"
        interval, why = (math.exp(low), math.exp(high)), f"whole model against {name}"
        found.append(Verdict(outcome, default, math.exp(float(np.median(ratios))), interval, noise, len(ratios), why))
    return max(found, key=lambda said: said.ratio)


def _seconds(call: Callable[[], object], repeats: int) -> float:
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - began) / repeats
