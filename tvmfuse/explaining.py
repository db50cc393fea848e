"""What would be done with a model, and why, without compiling it."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .building import described, plan_for, prepare
from .choose import Fuse
from .decide.cost_model import AnalyticPrior
from .graph.hoist import Refusal, refusals
from .values import ITEM_BYTES, Site


@dataclass(frozen=True)
class Explained:
    """One site with its prediction.

    predicted_s  seconds of the chosen candidate by the analytic prior. bytes_saved: what fusing the epilogue doesn't write and read again.
    """

    site: Site
    predicted_s: float
    bytes_saved: int


@dataclass(frozen=True)
class Report:
    """Sites in program order, and the ops that stay below a layout op, each with its reason."""

    sites: tuple[Explained, ...]
    refusals: tuple[Refusal, ...]


def explain(
    model: Any,
    shapes: Mapping[str, Any] | None = None,
    target: Any = None,
    threads: int | None = None,
    fuse: Fuse = "measured",
    logs: str | os.PathLike[str] | None = None,
) -> Report:
    """The sites of a model with reason, prediction and measurement. Arguments as for `build`; compiles nothing."""
    plan = plan_for(target, threads, fuse, logs)
    prepared = prepare(model, shapes)
    prior = AnalyticPrior(plan.machine)
    sites = []
    for found in prepared.sites:
        workload = found.workload
        candidate = plan.chooser(workload)
        size = math.prod(workload.anchor.output_shape()) * ITEM_BYTES.get(workload.output_dtype, 4)
        saved = 2 * size if candidate.cut and candidate.cut == len(workload.epilogue.steps) else 0
        sites.append(Explained(described(found, plan.chooser), prior.seconds(workload, candidate), saved))
    return Report(tuple(sites), tuple(refusals(prepared.hoistable)))
