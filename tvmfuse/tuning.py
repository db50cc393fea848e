"""Measure a model's sites on this machine, decide, and remember."""

from __future__ import annotations

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

from . import kernel
from .building import Plan, Prepared, compile_model, described, plan_for, prepare
from .choose import Chooser, Fuse
from .compare import bound
from .decide import search, verdict
from .decide.cost_model import AnalyticPrior, learn
from .decide.log import Conditions, Log, Record
from .errors import UsageError
from .measure.device import LocalDevice
from .measure.host import host, isa_among, toolchain
from .values import Candidate, Site, Verdict, Workload

Progress = Callable[[float, str], None]
EXPECTED_GAIN = 0.05  # of a site's time, before anything is known about it; only ratios between sites matter
GATE_SHARE = 0.1  # of the budget, kept for the whole-model comparison
UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Summary:
    """What one tuning run came to.

    sites      all of the model's sites, as a build would now choose them.
    matched    workloads that the log had decided before; results: those measured now; unreached: those that the budget left out.
    gate       tuned against always or never on the whole model, when a site changed; reverted: sites that it turned back.
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
            return "decided before"
        if workload in self.reverted:
            return "reverted: the whole model got slower"
        rivals = sorted((v for v in result.verdicts if v.candidate != result.choice), key=lambda v: v.ratio)
        best = f", best other {rivals[0].ratio:.3f} [{rivals[0].ci[0]:.3f}, {rivals[0].ci[1]:.3f}]" if rivals else ""
        return _outcome(result) + best

    def __str__(self) -> str:
        outcomes = Counter(_outcome(result) for result in self.results)
        workloads = len({site.workload for site in self.sites})
        parts = [
            f"sites: {len(self.sites)} of {workloads} workloads, matched {self.matched}",
            *(f"{name} {count}" for name, count in sorted(outcomes.items())),
        ]
        return " ".join([*parts, f"not reached {len(self.unreached)}", f"reverted {len(self.reverted)}", f"in {self.spent_s:.0f} s"])


def tune(
    model: Any,
    shapes: Mapping[str, Any] | None = None,
    threads: int | None = None,
    budget: str | float = "10m",
    logs: str | os.PathLike[str] | None = None,
    progress: Progress = lambda done, doing: None,
) -> Summary:
    """Measure every site's candidates within a time budget, the ones with the most expected gain first.

    budget    seconds, or a text such as "90s", "10m", "2h". Measuring a site that was begun may end a little later.
    logs      folder of the log that is read and written; None for the user's own, beside the shipped one.
    progress  called with the fraction of the budget that is spent and what is being done.
    Raises    UsageError for a budget that makes no sense, DeviceError when this machine can't measure.
    """
    budget_s, began = parse_budget(budget), time.monotonic()
    plan, prepared = plan_for(None, threads, "measured", logs), prepare(model, shapes)
    log = plan.chooser.log
    assert log is not None
    counts = Counter(site.workload for site in prepared.sites)
    least_s = search.LEAST_SHARE_S / (1 - GATE_SHARE)
    if budget_s < least_s:
        raise UsageError(f"a budget of {budget_s:g} s reaches no site; give at least {math.ceil(least_s)} s")
    log.check_writable(host())
    open_ = [w for w in counts if len(kernel.candidates(w, plan.machine)) > 1 and plan.chooser.choice(w).source != "measured"]
    prior = AnalyticPrior(plan.machine)
    demands = [search.Demand(w, counts[w], EXPECTED_GAIN * prior.seconds(w, kernel.candidates(w, plan.machine)[0])) for w in open_]
    comparable = (record for record in log.records() if isa_among(record.conditions.host.features) == plan.machine.isa)
    ranker = learn(comparable, plan.machine, lambda w: kernel.candidates(w, plan.machine)[0]) or prior

    results: list[search.SiteResult] = []
    with LocalDevice(kernel.build_kernel, plan.target, plan.machine, working_set(prepared)) as device:
        while demands:
            left = (1 - GATE_SHARE) * budget_s - (time.monotonic() - began)
            shares = search.plan(demands, left).shares
            if not shares:
                break
            demand, share = shares[0]
            progress(min(1.0, (time.monotonic() - began) / budget_s), str(demand.workload))
            candidates, conditions = kernel.candidates(demand.workload, plan.machine), _conditions(demand.workload, plan)
            results.append(search.tune_site(demand.workload, candidates, device, log, conditions, budget_s=share, rank=ranker.rank))
            demands.remove(demand)
    gate, reverted = _gate(prepared, plan, log, results, progress)
    now = plan_for(None, threads, "measured", logs).chooser
    return Summary(
        sites=tuple(described(site, now) for site in prepared.sites),
        matched=len(counts) - len(open_),
        results=tuple(results),
        unreached=tuple(demand.workload for demand in demands),
        gate=gate,
        reverted=tuple(reverted),
        spent_s=time.monotonic() - began,
    )


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


def _conditions(workload: Workload, plan: Plan) -> Conditions:
    """What is measured of a workload now will hold for."""
    return Conditions(host(), plan.machine.threads, toolchain(), kernel.digest(workload, plan.machine))


def _outcome(result: search.SiteResult) -> str:
    if result.verdict:
        return "tuned"
    if result.too_noisy:
        return "too noisy"
    return "kept default" if any(v.outcome == "keeps default" for v in result.verdicts) else "undecided"


def _gate(
    prepared: Prepared, plan: Plan, log: Log, results: Sequence[search.SiteResult], progress: Progress
) -> tuple[Verdict | None, list[Workload]]:
    """The whole model, tuned against always (every default) and never: while tuned is slower, the site that gained least goes back."""
    won = {result.workload: result.verdict for result in results if result.verdict}
    reverted: list[Workload] = []
    said: Verdict | None = None
    rivals: tuple[Fuse, ...] = ("always", "never")
    while won:
        progress(1.0, f"whole model, {len(won)} sites tuned")
        chosen = {workload: v.candidate for workload, v in won.items()}
        for against in rivals:
            said = compare_whole(prepared, plan, chosen, against)
            if is_slower(said):
                break
        assert said is not None
        if not is_slower(said):
            break
        weakest = max(won, key=lambda w: won[w].ratio)
        overruled = Verdict(
            "keeps default", won[weakest].candidate, said.ratio, said.ci, said.aa_noise, said.pairs, "the whole model got slower"
        )
        log.append(Record.of(weakest, overruled, _conditions(weakest, plan), kind="model_gate"))
        reverted.append(weakest)
        del won[weakest]
    return said, reverted


def is_slower(whole: Verdict) -> bool:
    """By more than the margin, with confidence: neither a win nor a tie."""
    return whole.ci[0] > 1 + max(verdict.MIN_MARGIN, verdict.MARGIN_PER_NOISE * whole.aa_noise)


def compare_whole(prepared: Prepared, plan: Plan, chosen: Mapping[Workload, Candidate], against: Fuse) -> Verdict:
    """The model with some candidates chosen, against always or never: randomised pairs with an A/A control, in this process."""
    default = compile_model(prepared, plan, Chooser(against, plan.machine))
    tuned = compile_model(prepared, plan, Chooser("always", plan.machine, tried=chosen))
    rng = np.random.default_rng(0)
    feeds = {i.name: rng.standard_normal(i.shape).astype(i.dtype) for i in default.get_inputs()}
    calls = [bound(session, feeds).call for session in (default, default, tuned)]
    repeats = max(1, round(2e-3 / _seconds(calls[0], 1)))
    order = random.Random(0)
    ratios: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(verdict.LOOKS[-1]):
        for other in ratios:
            pair = [0, other]
            order.shuffle(pair)
            taken = {which: min(_seconds(calls[which], repeats) for _ in range(2)) for which in pair}
            ratios[other].append(math.log(taken[other] / taken[0]))
    low, high = (sorted(ratios[2])[rank - 1] for rank in verdict.RANKS[verdict.LOOKS[-1]])
    noise = abs(float(np.median(ratios[1])))
    outcome = "wins" if high < 0 else "undecided"
    interval = (math.exp(low), math.exp(high))
    candidate = kernel.candidates(prepared.sites[0].workload, plan.machine)[0]
    return Verdict(outcome, candidate, math.exp(float(np.median(ratios[2]))), interval, noise, len(ratios[2]), "whole model")  # type: ignore[arg-type]


def _seconds(call: Callable[[], object], repeats: int) -> float:
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - began) / repeats
