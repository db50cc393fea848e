"""Predicting candidates before they are measured: an analytic prior, and a model learned from the tuning log.

Both only order candidates. A prediction never outranks a verdict.

Sources   the roofline, Williams et al., CACM 2009; learning ln of relative time with gradient-boosted trees: Chen et al.,
          "Learning to optimize tensor programs", NeurIPS 2018.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

import numpy as np

from ..values import PLACEMENTS, Candidate, Conv2d, Conv2dTranspose, Machine, Matmul, Workload
from .log import Conditions, Record

CORE_HZ = 3e9  # an ordinary core; only ratios matter
FMA_PORTS = 2
BYTES_PER_S = (200e9, 116e9, 95e9, 27e9)  # read from L1, L2, L3, memory by one Zen 4 core
LAUNCH_S = 0.1e-6  # one more packed call
SPILL = 1.2  # one spilled accumulator costs 20 % of a register tile's speed
MIN_MEASURED = 50  # fewer candidates than this say less than the prior
# Vector instructions for one op on one vector: divisions and roots by their throughput, the rest by the length of their polynomial.
OP_COST = {
    "div": 8, "sqrt": 9, "pow": 40, "exp": 14, "log": 18, "sigmoid": 24, "tanh": 20, "erf": 22, "softplus": 34, "leaky_relu": 2, "clip": 2,
}  # fmt: skip
FAMILIES = ("matmul", "conv2d", "depthwise", "conv2d_transpose", "recurrent", "elementwise")


class Ranker(Protocol):
    def rank(self, workload: Workload, candidates: Sequence[Candidate]) -> list[Candidate]:
        """The same candidates, the most promising first."""


def features(workload: Workload, candidate: Candidate, machine: Machine) -> dict[str, float]:
    """What a prediction may depend on; the same names in the same order for every workload and candidate.

    Units    flop and bytes as natural logarithms, costs in vector instructions an element, sizes in elements, waste as padded / useful.
    """
    anchor, steps, lanes = workload.anchor, workload.epilogue.steps, machine.isa.lanes(workload.anchor.dtype)
    knobs = dict(candidate.knobs)
    moved, elements = workload.bytes_moved(), math.prod(anchor.output_shape())
    rows, columns = _tile(knobs)
    vectors = -(-columns // lanes)
    costs = [OP_COST.get(step.op, 1) for step in steps]
    found: dict[str, float] = {
        "ln_flop": math.log1p(anchor.flop()),
        "ln_bytes": math.log1p(moved),
        "intensity": anchor.flop() / moved,
        "flop_per_output": anchor.flop() / max(1, elements),
        "ln_output_per_l1": math.log((4 * elements + 1) / machine.l1),
        "ln_output_per_l2": math.log((4 * elements + 1) / machine.l2),
        "ln_bytes_per_l3": math.log((moved + 1) / machine.l3),
        "lanes": lanes,
        "threads": machine.threads,
        "steps": len(steps),
        "cut": candidate.cut,
        "cost_in_loop": sum(costs[: candidate.cut]),
        "cost_apart": sum(costs[candidate.cut :]),
        "rows": rows,
        "columns": columns,
        "registers": (rows * vectors + vectors + 1) / machine.isa.registers,
        "waste": _waste(workload, lanes),
        "unroll": _number(knobs.get("ku", 1)),
        "split": _number(knobs.get("threads", 1)),
    }
    found |= {f"placement_{p}": float(candidate.placement == p) for p in PLACEMENTS}
    found |= {f"family_{f}": float(workload.family == f) for f in FAMILIES}
    return found


def _number(knob: int | str) -> int:
    return knob if isinstance(knob, int) else 0


def _tile(knobs: dict[str, int | str]) -> tuple[int, int]:
    """Rows and columns of the register tile; a convolution's rows are th x tw output pixels."""
    rows = math.prod(_number(knobs[name]) for name in ("mr", "th", "tw") if name in knobs)
    return rows, _number(knobs.get("nr", 1))


def _waste(workload: Workload, lanes: int) -> float:
    """Lanes computed for each one that is needed: the last tile of a row is as narrow as it can be, in whole vectors."""
    anchor = workload.anchor
    columns = anchor.n if isinstance(anchor, Matmul) else anchor.co if isinstance(anchor, Conv2d | Conv2dTranspose) else 0
    return -(-columns // lanes) * lanes / columns if columns else 1.0


@dataclass(frozen=True)
class AnalyticPrior:
    """A roofline with the epilogue's own work and traffic on top."""

    machine: Machine

    def seconds(self, workload: Workload, candidate: Candidate) -> float:
        f = features(workload, candidate, self.machine)
        elements, split = math.prod(workload.anchor.output_shape()), max(1.0, f["split"])
        per_s = FMA_PORTS * f["lanes"] * CORE_HZ * split
        # Loads and FMAs go two a cycle each, and an accumulator waits 4 cycles for its last FMA.
        accumulators = max(1.0, f["rows"] * -(-f["columns"] // f["lanes"]))
        starved = max(1.0, 4.0 * FMA_PORTS / accumulators, 1 / max(1.0, f["rows"]) + 1 / max(1.0, f["columns"] / f["lanes"]))
        spilled = SPILL if f["registers"] > 1 else 1.0
        compute = workload.anchor.flop() / 2 * f["waste"] * starved * spilled / per_s
        epilogue = (f["cost_in_loop"] + f["cost_apart"]) * elements / per_s
        stored = 4 * elements
        traffic, launches = 0.0, 1
        if candidate.placement == "tile":
            traffic += 2 * stored / BYTES_PER_S[0]
        if candidate.cut < f["steps"]:
            traffic += 2 * stored / self._bandwidth(stored)
            launches += 1
        moved = workload.bytes_moved()
        return max(compute, moved / self._bandwidth(moved)) + epilogue + traffic / split + launches * LAUNCH_S

    def _bandwidth(self, size: int) -> float:
        levels = (self.machine.l1, self.machine.l2, self.machine.l3)
        return next((speed for level, speed in zip(levels, BYTES_PER_S, strict=False) if size <= level), BYTES_PER_S[-1])

    def rank(self, workload: Workload, candidates: Sequence[Candidate]) -> list[Candidate]:
        return sorted(candidates, key=lambda candidate: self.seconds(workload, candidate))


@dataclass(frozen=True)
class LearnedRanker:
    """Gradient-boosted trees that predict ln(time / default's time) from `features`."""

    machine: Machine
    booster: Any

    def log_ratios(self, workload: Workload, candidates: Sequence[Candidate]) -> list[float]:
        import xgboost

        rows = np.array([list(features(workload, c, self.machine).values()) for c in candidates], "float32")
        return [float(x) for x in self.booster.predict(xgboost.DMatrix(rows, nthread=1))]

    def rank(self, workload: Workload, candidates: Sequence[Candidate]) -> list[Candidate]:
        if not candidates:
            return []
        predicted = self.log_ratios(workload, candidates)
        return [candidates[i] for i in sorted(range(len(candidates)), key=predicted.__getitem__)]


def learn(records: Iterable[Record], machine: Machine, default_of: Callable[[Workload], Candidate]) -> LearnedRanker | None:
    """Train on what was measured under this ISA, or None when that is fewer than MIN_MEASURED candidates beside their defaults.

    records      of any host: the caller leaves out those of another ISA; their cache sizes and threads are taken from the records.
    default_of   each workload's default, whose own measurement under the same conditions is the unit of time.
    The same records give the same ranker: one thread, a fixed seed, nothing sampled.
    """
    times: dict[tuple[object, ...], dict[Candidate, list[float]]] = defaultdict(lambda: defaultdict(list))
    conditions_of: dict[tuple[object, ...], tuple[Workload, Conditions]] = {}
    for record in records:
        if record.kind == "measurement" and record.times_s:
            there = record.conditions
            site: tuple[object, ...] = record.workload, there.host.key, there.threads, there.kernel_digest
            times[site][record.candidate].append(min(record.times_s))
            conditions_of[site] = record.workload, there
    rows, targets = [], []
    for site, measured in times.items():
        workload, there = conditions_of[site]
        default = default_of(workload)
        if default not in measured:
            continue
        measured_on = Machine(machine.isa, there.host.l1, there.host.l2, there.host.l3, there.threads)
        unit = median(measured[default])
        for candidate, seconds in measured.items():
            rows.append(list(features(workload, candidate, measured_on).values()))
            targets.append(math.log(median(seconds) / unit))
    if len(rows) < MIN_MEASURED:
        return None
    import xgboost

    data = xgboost.DMatrix(np.array(rows, "float32"), np.array(targets, "float32"), nthread=1)
    parameters = {"objective": "reg:squarederror", "max_depth": 5, "eta": 0.1, "seed": 0, "nthread": 1, "verbosity": 0}
    return LearnedRanker(machine, xgboost.train(parameters, data, num_boost_round=150))
