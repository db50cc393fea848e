"""Measure a model's sites on this machine, decide, and remember."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvm.target import Target

from . import kernel
from .building import Plan, Prepared, described, plan_for, prepare
from .choose import first_tiles
from .decide import search
from .decide.cost_model import AnalyticPrior, Learned, learn
from .decide.log import Log, is_finished
from .errors import UsageError
from .gate import Comparison, OnDevice, Trial, in_this_process, revert_while_slower
from .graph.rewrite import array_of
from .linking import linker
from .measure.device import BuildKernel, Device, LocalDevice, Place
from .measure.forkserver import ForkServer
from .measure.host import host, is_foreign
from .measure.pool import Pool
from .measure.remote import Identity, connected
from .predicting import measured
from .values import Candidate, Host, Machine, Numerics, Site, Workload

Progress = Callable[[float, str], None]
EXPECTED_GAIN = 0.05  # of a site's time, before anything is known about it; only ratios between sites matter
LEAST_GAIN = 0.01  # whatever a model says: it may be wrong
# Kept of the budget for the whole-model comparison, which compiles every site some three times.
GATE_SHARE, GATE_SITE_S, MOST_GATE_SHARE = 0.05, 0.3, 0.25
OUTCOMES = ("decided before", "tuned", "kept default", "undecided", "too noisy", "reverted", "begun", "not reached", "without a choice")
UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Summary:
    """What one tuning run came to.

    sites      all of the model's sites, as a build would now choose them. Equal sites have one workload, which is measured once.
    matched    workloads that the log had decided before; results: those measured now; unreached: those that the budget left out.
    gate       tuned against always or never, whichever is quicker, on the whole model, when a site changed; reverted: sites that it
               turned back; gate_failure: why it couldn't be made, or ended early, as when the last device was lost.
    """

    sites: tuple[Site, ...]
    matched: int
    results: tuple[search.SiteResult, ...]
    unreached: tuple[Workload, ...]
    gate: Comparison | None
    reverted: tuple[Workload, ...]
    spent_s: float
    gate_failure: str | None = None

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
        return _outcome(result) + best + ("" if result.finished else ", a later run goes on with it")

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
        said = f"{head}: {became or 'nothing to decide'}; in {self.spent_s:.0f} s"
        if self.gate:
            said += f"; {self.gate.why}: {self.gate.ratio:.3f} [{self.gate.ci[0]:.3f}, {self.gate.ci[1]:.3f}]"
        return said + (f"; the whole model could not be compared: {self.gate_failure}" if self.gate_failure else "")


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
              with the CPU of the first; the whole model on one of them. Records hold for that CPU.
    Raises    UsageError for a budget that makes no sense or without a C++ compiler; DeviceError when this machine can't measure;
              DeviceLost when no device is left before every site had its turn: what was measured is in the log. A device lost later is
              `Summary.gate_failure`. WrongBits when the whole model's output bits depend on its placements: this run's sites keep their
              default.
    """
    began = time.monotonic()
    decided: dict[Workload, search.SiteResult] = {}
    with contextlib.ExitStack() as stack:
        if rpc is None:
            linker()  # every candidate needs it
            job = _job(model, shapes, threads, budget, logs, numerics)
            device: Device = stack.enter_context(LocalDevice(*job.measuring))
            trial: Trial = functools.partial(in_this_process, same_bits=numerics == "exact")
        else:
            server = stack.enter_context(ForkServer())
            places = stack.enter_context(connected(rpc, server))
            began = time.monotonic()  # to wait for a device costs nothing of the budget
            job, pool = _job(model, shapes, threads, budget, logs, numerics, places[0].identity), Pool[Place](places)
            if not is_foreign(job.plan.target):
                linker()  # as above; for another architecture the device links
            device = stack.enter_context(Device(*job.measuring, pool, server))
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tvmfuse-"))
            trial = OnDevice(pool, job.plan, Path(folder))
        plan, prepared = job.plan, job.prepared
        job.log.check_writable(job.host)

        def tune_one(demand: search.Demand, share: float) -> search.SiteResult:
            done = min(1.0, (time.monotonic() - began) / job.budget_s)
            progress(done, f"{_so_far(decided, len(job.demands))}; {demand.name}")
            candidates, conditions = plan.chooser.contest(demand.workload)
            result = search.tune_site(demand.workload, candidates, device, job.log, conditions, budget_s=share, rank=job.rank)
            decided[demand.workload] = result
            return result

        results, left = search.spend(job.demands, job.sites_s - (time.monotonic() - began), tune_one)
        passage = revert_while_slower(prepared, plan, job.log, results, trial, progress, began + job.budget_s)
    now = plan_for(None, threads, "measured", logs, numerics, job.identity).chooser
    return Summary(
        sites=tuple(described(site, now) for site in prepared.sites),
        matched=job.matched,
        results=tuple(results),
        unreached=tuple(demand.workload for demand in left),
        gate=passage.comparison,
        reverted=passage.reverted,
        spent_s=time.monotonic() - began,
        gate_failure=passage.failure,
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
    names = {site.workload: site.name for site in reversed(prepared.sites)}
    sites_s = budget_s - min(GATE_SHARE * budget_s + GATE_SITE_S * len(counts), MOST_GATE_SHARE * budget_s)
    if sites_s < search.LEAST_SHARE_S:
        raise UsageError(f"a budget of {budget_s:g} s reaches no site; give at least {math.ceil(least_budget_s(len(counts)))} s")
    ranker = _ranker(log, plan.machine) if numerics == "exact" else AnalyticPrior(plan.machine)
    demands = []
    for workload, count in counts.items():
        candidates, conditions = plan.chooser.contest(workload)
        history = log.history(workload, conditions)
        if len(candidates) > 1 and not is_finished(history):
            noisy = sum(record.verdict is not None and record.verdict.outcome == "too noisy" for record in history)
            gain_s = _expected_gain_s(workload, candidates, plan.machine, ranker) / (1 + noisy)
            demands.append(search.Demand(workload, count, gain_s, names[workload]))
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
    """Bytes that one call of the model touches: all weights, and the activations of the site that has most of them.

    Activations take turns in one workspace, which is little more than that; what lies between sites is small beside them.
    """
    weights = [sum(array.nbytes for x in site.inputs if (array := array_of(x)) is not None) for site in prepared.sites]
    activations = (site.workload.bytes_moved() - own for site, own in zip(prepared.sites, weights, strict=True))
    return sum(weights) + max(activations, default=0)


def _outcome(result: search.SiteResult) -> str:
    if result.verdict:
        return "tuned"
    if result.too_noisy:
        return "too noisy"
    if not result.finished:
        return "begun"
    decided = any(v.outcome == "keeps default" for v in result.verdicts)
    return "kept default" if decided or not result.verdicts else "undecided"  # no verdicts: nothing was near enough to be confirmed
