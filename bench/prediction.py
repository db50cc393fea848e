"""Prediction without measuring, one model of the zoo left out at a time: default, predicted and tuned, whole and interleaved.

    python -m bench.prediction --logs tuning_logs [--models mobilenetv2]

The cost model is trained on the records of all sites but the left-out model's, and picks tile, placement and cut for these; what is
within its error stays the default, as in a build. "tuned" takes the records' verdicts. With --offline nothing is compiled: of
the picks that happen to be measured, the recorded ratios are told.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from tvmfuse import compare, kernel, predicting
from tvmfuse.building import Plan, Prepared, compile_model, plan_for, prepare
from tvmfuse.choose import Chooser, first_tiles
from tvmfuse.decide.cost_model import Examples, Learned, learn_with_error
from tvmfuse.values import Candidate, Workload

from . import models


def predictions(prepared: Prepared, plan: Plan, model: Learned | None) -> dict[Workload, tuple[Candidate, float]]:
    """Picks that promise more than the model's error, with their predicted ratio."""
    found = {}
    for workload in {site.workload for site in prepared.sites}:
        candidates = first_tiles(kernel.candidates(workload, plan.machine))
        if model is not None and len(candidates) > 1 and (picked := model.pick(workload, candidates)):
            found[workload] = picked
    return found


def offline(picked: Mapping[Workload, tuple[Candidate, float]], measured: Mapping[Workload, Examples]) -> dict[str, Any]:
    """How the picks that were measured did, as ratios to the default; the best measured candidate's beside them."""
    known = {w: measured[w].log_ratios for w in picked if w in measured and picked[w][0] in measured[w].log_ratios}

    def mean(logs: list[float]) -> float | None:
        return round(math.exp(float(np.mean(logs))), 4) if logs else None

    return {
        "picks": len(picked),
        "of them measured": len(known),
        "predicted ratio": mean([math.log(picked[w][1]) for w in known]),
        "measured ratio": mean([ratios[picked[w][0]] for w, ratios in known.items()]),
        "best measured ratio": mean([min(ratios.values()) for ratios in known.values()]),
        "worst pick": round(math.exp(max((ratios[picked[w][0]] for w, ratios in known.items()), default=0.0)), 4),
    }


def left_out(name: str, plan: Plan, sites: list[Examples], seconds: float, only_offline: bool) -> tuple[dict[str, Any], list[compare.Row]]:
    prepared = prepare(models.load(name), models.shapes(name))
    own = {site.workload for site in prepared.sites}
    model = learn_with_error([site for site in sites if site.workload not in own], plan.machine)
    picked = predictions(prepared, plan, model)
    said = offline(picked, {site.workload: site for site in sites if site.workload in own})
    told = {"model": name, "workloads": len(own), "error": round(model.error, 4) if model else None, **said}
    if only_offline:
        return told, []
    choosers = {
        "tuned": Chooser("measured", plan.machine, plan.chooser.log, plan.chooser.host, plan.chooser.toolchain),
        "predicted": Chooser("always", plan.machine, tried={w: candidate for w, (candidate, _) in picked.items()}),
        "default": Chooser("measured", plan.machine),
    }
    feeds = models.inputs(name)
    runners = {how: compare.bound(compile_model(prepared, plan, chooser), feeds) for how, chooser in choosers.items()}
    return told, compare.compare(name, runners, seconds, time.perf_counter)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.prediction", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=models.ZOO, default=list(models.ZOO), metavar="NAME", help=" ".join(models.ZOO))
    parser.add_argument("--logs", help="folder of tuning records; by default the shipped ones and your own")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=10, help="of timing for each model (default: 10)")
    parser.add_argument("--offline", action="store_true", help="compile and time nothing")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    os.environ["TVM_NUM_THREADS"] = str(args.threads)
    plan = plan_for(None, args.threads, "measured", args.logs)
    assert plan.chooser.log is not None
    sites = predicting.measured(plan.chooser.log, plan.machine)
    told, rows = [], []
    for name in args.models:
        print(name, file=sys.stderr)
        said, timed = left_out(name, plan, sites, args.seconds, args.offline)
        told.append(said)
        rows += timed
    if args.json:
        print(json.dumps({"sites": told, "rows": [dataclasses.asdict(row) for row in rows]}))
        return
    for said in told:
        print(json.dumps(said))
    if rows:
        print(compare.table(rows))


if __name__ == "__main__":
    main()
