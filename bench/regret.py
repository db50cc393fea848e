"""What a choice costs: always, never, default, tuned and an oracle, each model whole and in one interleaved run, with A/A beside.

    python -m bench.regret --models dfn3_df_dec_s1 --logs tuning_logs
    python -m bench.regret --target '{"kind": "llvm", "mcpu": "x86-64-v3"}' --tune 600 --logs narrow_logs

A target that this machine can run is tuned here with --tune, and recorded for this CPU with only that target's features.
The oracle keeps each site's tuned tile and takes the placement and cut of lowest median among all that there are, measured here and now in
the way of a tuning run; what it wins over the tuned choice is that site's regret, and its median still holds the luck of the draw.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tvmfuse import compare, kernel
from tvmfuse.building import Plan, Prepared, compile_model, plan_for, prepare
from tvmfuse.choose import Chooser
from tvmfuse.decide import search
from tvmfuse.decide.cost_model import AnalyticPrior
from tvmfuse.decide.log import Log, is_finished
from tvmfuse.errors import TargetMismatch
from tvmfuse.kernel.space import candidates_of
from tvmfuse.measure.device import LocalDevice
from tvmfuse.measure.host import host, required_features, toolchain
from tvmfuse.tuning import working_set
from tvmfuse.values import Candidate, Machine, Workload

from . import models


@dataclass(frozen=True)
class SiteRegret:
    """ratio: the oracle's time over the tuned choice's, 1 where they are the same; ci its interval."""

    workload: str
    count: int
    source: str
    tuned: str
    oracle: str
    ratio: float
    ci: tuple[float, float]
    outcome: str


def plan_here(target: Any, threads: int, logs: str | None) -> Plan:
    """For a target that this machine can run: its records are those of this CPU with only the target's features."""
    plan = plan_for(target, threads, "measured", logs)
    if target is None:
        return plan
    needed, here = set(required_features(plan.target)), host()
    if lacking := needed - set(here.features):
        raise TargetMismatch(f"this CPU can't run code for {target}: it lacks {', '.join(sorted(lacking))}")
    narrow = replace(here, features=tuple(f for f in here.features if f in needed))
    machine = Machine(plan.machine.isa, here.l1, here.l2, here.l3, threads)
    return Plan(plan.target, machine, Chooser("measured", machine, plan.chooser.log, narrow, toolchain()))


def tune(prepared: Prepared, plan: Plan, seconds: float) -> None:
    """The sites of a model for a plan's target, as `tvmfuse.tune` does for this CPU, without the comparison of the whole model."""
    log, prior = plan.chooser.log, AnalyticPrior(plan.machine)
    assert log is not None
    counts = Counter(site.workload for site in prepared.sites)
    open_ = [w for w in counts if not is_finished(log.history(w, plan.chooser.conditions(w)))]
    demands = [search.Demand(w, counts[w], prior.seconds(w, kernel.candidates(w, plan.machine)[0])) for w in open_]
    with LocalDevice(kernel.build_kernel, plan.target, plan.machine, working_set(prepared)) as device:

        def tune_one(demand: search.Demand, share: float) -> search.SiteResult:
            print(f"tuning {demand.workload}", file=sys.stderr)
            workload = demand.workload
            candidates, conditions = plan.chooser.contest(workload)
            return search.tune_site(workload, candidates, device, log, conditions, budget_s=share, rank=prior.rank)

        search.spend([d for d in demands if len(kernel.candidates(d.workload, plan.machine)) > 1], seconds, tune_one)


def oracle(prepared: Prepared, plan: Plan, seconds: float) -> tuple[dict[Workload, Candidate], list[SiteRegret]]:
    """The best placement and cut of every site on the tile that it has, and what that wins."""
    best: dict[Workload, Candidate] = {}
    found = []
    workloads = list(dict.fromkeys(site.workload for site in prepared.sites))
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalDevice(kernel.build_kernel, plan.target, plan.machine, working_set(prepared)) as device,
    ):
        log = Log([folder])
        for workload in workloads:
            choice = plan.chooser.choice(workload)
            tuned = best[workload] = choice.candidate
            rivals = [c for c in candidates_of(workload, [dict(tuned.knobs)]) if c != tuned]
            if not rivals:
                continue
            conditions = plan.chooser.conditions(workload)
            print(f"{workload}: {len(rivals)} rivals", file=sys.stderr)
            result = search.tune_site(workload, [tuned, *rivals], device, log, conditions, budget_s=seconds)
            count = sum(site.workload == workload for site in prepared.sites)
            quickest = min(result.verdicts, key=lambda v: v.ratio, default=None)
            if quickest is None and not result.finished:
                found.append(SiteRegret(str(workload), count, choice.source, str(tuned), "?", 1.0, (1.0, 1.0), "not reached"))
            elif quickest is not None and quickest.ratio < 1:
                best[workload] = quickest.candidate
                said = quickest.ratio, quickest.ci, quickest.outcome
                found.append(SiteRegret(str(workload), count, choice.source, str(tuned), str(quickest.candidate), *said))
            else:
                found.append(SiteRegret(str(workload), count, choice.source, str(tuned), str(tuned), 1.0, (1.0, 1.0), "same"))
    return best, found


def regret(
    name: str, target: Any, threads: int, logs: str | None, tune_seconds: float, site_seconds: float, seconds: float
) -> dict[str, Any]:
    """Rows of the whole model, the first of them tuned, and each site's regret."""
    prepared = prepare(models.load(name), models.shapes(name))
    if tune_seconds:
        tune(prepared, plan_here(target, threads, logs), tune_seconds)
    plan = plan_here(target, threads, logs)
    best, sites = oracle(prepared, plan, site_seconds)
    choosers: Mapping[str, Chooser] = {
        "tuned": plan.chooser,
        "always": Chooser("always", plan.machine),
        "never": Chooser("never", plan.machine),
        "default": Chooser("measured", plan.machine),
        "oracle": Chooser("always", plan.machine, tried=best),
    }
    feeds = models.inputs(name)
    runners = {how: compare.bound(compile_model(prepared, plan, chooser), feeds) for how, chooser in choosers.items()}
    return {"rows": compare.compare(name, runners, seconds, time.perf_counter, threads), "sites": sites}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.regret", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=models.ZOO, default=list(models.ZOO), metavar="NAME", help=" ".join(models.ZOO))
    parser.add_argument("--target", type=json.loads, help="TVM target as JSON that this machine can run; by default this CPU")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--logs", help="folder of tuning records; by default the shipped ones and your own")
    parser.add_argument("--tune", type=float, default=0, help="seconds to tune each model for before (default: 0)")
    parser.add_argument("--site-seconds", type=float, default=30, help="at most, for each site's oracle (default: 30)")
    parser.add_argument("--seconds", type=float, default=10, help="of timing for each model (default: 10)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    os.environ["TVM_NUM_THREADS"] = str(args.threads)
    found = {name: regret(name, args.target, args.threads, args.logs, args.tune, args.site_seconds, args.seconds) for name in args.models}
    if args.json:
        plain = {name: {key: [dataclasses.asdict(x) for x in values] for key, values in of.items()} for name, of in found.items()}
        print(json.dumps(plain))
        return
    print(compare.table([row for of in found.values() for row in of["rows"]]))
    for name, of in found.items():
        print(f"\n{name}: sites where another placement or cut has a lower median than the tuned choice")
        for site in of["sites"]:
            if site.oracle not in (site.tuned, "?"):
                low, high = site.ci
                interval, moved = f"{site.ratio:.3f} [{low:.3f}, {high:.3f}]", f"{site.tuned} -> {site.oracle}"
                print(f"{interval} {site.outcome}: {moved} ({site.count}x {site.workload})")


if __name__ == "__main__":
    main()
