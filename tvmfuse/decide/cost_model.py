"""Predicting candidates before they are measured: an analytic prior, and a model learned from the tuning log.

Both order candidates for the tuner; the learned one also picks for a build that has no verdict. A prediction never outranks a verdict.

Sources   the roofline, Williams et al., CACM 2009; learning ln of relative time with gradient-boosted trees: Chen et al.,
          "Learning to optimize tensor programs", NeurIPS 2018.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from ..values import PLACEMENTS, WINOGRAD, Candidate, Conv2d, Conv2dTranspose, Machine, Matmul, PlanarConv2d, Workload
from .log import Conditions, Record

CORE_HZ = 3e9  # an ordinary core; only ratios matter
FMA_PORTS = 2
BYTES_PER_S = (200e9, 116e9, 95e9, 27e9)  # read from L1, L2, L3, memory by one Zen 4 core
LAUNCH_S = 0.1e-6  # one more packed call
SPILL = 1.2  # one spilled accumulator costs 20 % of a register tile's speed
TRANSFORM_OPS = 8  # vector instructions for one element of a Winograd transform: loads and stores, mostly
MIN_MEASURED, MIN_RANKED_SITES = 50, 5  # fewer candidates, or of fewer workloads, say less than the prior
MIN_SITES = 20  # fewer workloads than this say nothing about another one
FOLDS = 4
ERRORS = 2.0  # picks are extremes: with one error alone, pure noise of any size was taken for a gain
PARAMETERS = {
    "objective": "reg:squarederror", "max_depth": 6, "min_child_weight": 5, "eta": 0.2, "max_bin": 64, "tree_method": "hist",
    "seed": 0, "nthread": 1, "verbosity": 0,
}  # fmt: skip
ROUNDS = 60
# Vector instructions for one op on one vector: divisions and roots by their throughput, the rest by the length of their polynomial.
OP_COST = {
    "div": 8, "sqrt": 9, "pow": 40, "exp": 14, "log": 18, "sigmoid": 24, "tanh": 20, "erf": 22, "softplus": 34, "leaky_relu": 2, "clip": 2,
}  # fmt: skip
FAMILIES = ("matmul", "conv2d", "depthwise", "conv2d_transpose", "recurrent", "elementwise", "planar_conv2d")


def features(workload: Workload, candidate: Candidate, machine: Machine) -> dict[str, float]:
    """What a prediction may depend on; the same names in the same order for every workload and candidate.

    Units    flop and bytes as natural logarithms, costs in vector instructions an element, sizes in elements, waste as padded / useful,
             tails as the share of a tile that its last row or column of tiles fills, 0 when it is whole.
    """
    return _site_features(workload, machine) | _candidate_features(workload, candidate, machine)


def _site_features(workload: Workload, machine: Machine) -> dict[str, float]:
    anchor, steps, lanes = workload.anchor, workload.epilogue.steps, machine.isa.lanes(workload.anchor.dtype)
    moved, elements = workload.bytes_moved(), math.prod(anchor.output_shape())
    rows, columns = _extents(workload)
    found: dict[str, float] = {
        "ln_flop": math.log1p(anchor.flop()),
        "ln_bytes": math.log1p(moved),
        "intensity": anchor.flop() / moved,
        "flop_per_output": anchor.flop() / max(1, elements),
        "ln_output_per_l1": math.log((4 * elements + 1) / machine.l1),
        "ln_output_per_l2": math.log((4 * elements + 1) / machine.l2),
        "ln_bytes_per_l3": math.log((moved + 1) / machine.l3),
        "extent_rows": rows,
        "extent_columns": columns,
        "lanes": lanes,
        "threads": machine.threads,
        "steps": len(steps),
        "waste": -(-columns // lanes) * lanes / columns if columns else 1.0,
    }
    return found | {f"family_{f}": float(workload.family == f) for f in FAMILIES}


def _candidate_features(workload: Workload, candidate: Candidate, machine: Machine) -> dict[str, float]:
    knobs, lanes = dict(candidate.knobs), machine.isa.lanes(workload.anchor.dtype)
    costs = [OP_COST.get(step.op, 1) for step in workload.epilogue.steps]
    rows, columns = _tile(knobs)
    vectors = -(-columns // lanes)
    of_rows, of_columns = _extents(workload)
    products, transforms = _work(workload, candidate)
    return {
        "cut": candidate.cut,
        "cost_in_loop": sum(costs[: candidate.cut]),
        "cost_apart": sum(costs[candidate.cut :]),
        "rows": rows,
        "columns": columns,
        "registers": (rows * vectors + vectors + 1) / machine.isa.registers,
        "starved": _starved(rows, vectors),
        "tail_rows": of_rows % rows / rows,
        "tail_columns": of_columns % columns / columns,
        "unroll": _number(knobs.get("ku", 1)),
        "split": _number(knobs.get("threads", 1)),
        "inline": float(knobs.get("pad") == "inline"),
        "products": products,
        "transforms": transforms,
        **{f"placement_{p}": float(candidate.placement == p) for p in PLACEMENTS},
    }


def _work(workload: Workload, candidate: Candidate) -> tuple[float, float]:
    """(products as the share of the direct computation's, elements that Winograd transforms for each output element)."""
    anchor, algorithm = workload.anchor, candidate.algorithm
    if algorithm is None or not isinstance(anchor, Conv2d):
        return 1.0, 0.0
    pairs = anchor.winograd_products(WINOGRAD[algorithm])
    return 2 * pairs * anchor.ci * anchor.co / anchor.flop(), pairs * (anchor.ci + anchor.co) / math.prod(anchor.output_shape())


def _rows_of(workload: Workload, candidates: Sequence[Candidate], machine: Machine) -> list[list[float]]:
    site = list(_site_features(workload, machine).values())
    return [site + list(_candidate_features(workload, candidate, machine).values()) for candidate in candidates]


def _starved(rows: float, vectors: float) -> float:
    """Loads and FMAs go two a cycle each, and an accumulator waits 4 cycles for its last FMA: how much slower a tile is for it."""
    return max(1.0, 4.0 * FMA_PORTS / max(1.0, rows * vectors), 1 / max(1.0, rows) + 1 / max(1.0, vectors))


def _number(knob: int | str) -> int:
    return knob if isinstance(knob, int) else 0


def _tile(knobs: dict[str, int | str]) -> tuple[int, int]:
    """Rows and columns of the register tile; a convolution's rows are th x tw output pixels."""
    rows = math.prod(_number(knobs[name]) for name in ("mr", "th", "tw") if name in knobs)
    return max(1, rows), max(1, _number(knobs.get("nr", 1)))


def _extents(workload: Workload) -> tuple[int, int]:
    """How many rows and columns there are to tile: of a matrix, of an image's row and its channels, or of channels and a
    row of a plane; 0 where nothing is tiled."""
    anchor = workload.anchor
    if isinstance(anchor, Matmul):
        return anchor.m, anchor.n
    if isinstance(anchor, PlanarConv2d):
        return anchor.co // anchor.groups, anchor.ow
    return (anchor.ow, anchor.co) if isinstance(anchor, Conv2d | Conv2dTranspose) else (0, 0)


@dataclass(frozen=True)
class AnalyticPrior:
    """A roofline with the epilogue's own work and traffic on top."""

    machine: Machine

    def seconds(self, workload: Workload, candidate: Candidate) -> float:
        f = features(workload, candidate, self.machine)
        elements, split = math.prod(workload.anchor.output_shape()), max(1.0, f["split"])
        per_s = FMA_PORTS * f["lanes"] * CORE_HZ * split
        spilled = SPILL if f["registers"] > 1 else 1.0
        compute = workload.anchor.flop() / 2 * f["products"] * f["waste"] * f["starved"] * spilled / per_s
        compute += TRANSFORM_OPS * f["transforms"] * elements / per_s
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
class Learned:
    """Gradient-boosted trees that predict from `features` how a candidate's ln time differs from its site's median.

    error   of a predicted ln ratio to the default, for the candidate that looks best on a site outside of the training (root of the
            mean square); infinite when there were too few sites to tell.
    """

    machine: Machine
    booster: Any
    error: float = math.inf

    def log_ratios(self, workload: Workload, candidates: Sequence[Candidate]) -> list[float]:
        """Of each candidate's time to that of the first, the default."""
        predicted = _predict(self.booster, np.array(_rows_of(workload, candidates, self.machine), "float32"))
        return [float(x) for x in predicted - predicted[0]]

    def rank(self, workload: Workload, candidates: Sequence[Candidate]) -> list[Candidate]:
        if not candidates:
            return []
        predicted = self.log_ratios(workload, candidates)
        return [candidates[i] for i in sorted(range(len(candidates)), key=predicted.__getitem__)]

    def pick(self, workload: Workload, candidates: Sequence[Candidate]) -> tuple[Candidate, float] | None:
        """The candidate that looks best and its predicted ratio to the default, candidates[0].

        None when it is the default, or when it promises less than ERRORS times what this model is usually wrong by.
        """
        predicted = self.log_ratios(workload, candidates)
        best = min(range(len(candidates)), key=predicted.__getitem__)
        return (candidates[best], math.exp(predicted[best])) if best and predicted[best] < -ERRORS * self.error else None


@dataclass(frozen=True)
class Examples:
    """What was measured of one site under one set of conditions: ln(time / default's time) of each candidate, the default's 0 first."""

    workload: Workload
    machine: Machine
    log_ratios: Mapping[Candidate, float]


def examples(records: Iterable[Record], machine: Machine) -> list[Examples]:
    """Measured sites, in the order of the records.

    records   of any host with this ISA: the caller leaves out others; cache sizes and threads are taken from the records. Sites whose
              default isn't named, by a sample of its own or a closing record, are left out: a release may have another default.
    """
    found: dict[tuple[object, ...], dict[Candidate, list[float]]] = defaultdict(lambda: defaultdict(list))
    conditions_of: dict[tuple[object, ...], tuple[Workload, Conditions]] = {}
    defaults: dict[tuple[object, ...], Candidate] = {}
    for record in records:
        there = record.conditions
        site: tuple[object, ...] = record.workload, there.host.key, there.threads, there.kernel_digest
        if record.default_s:
            ratios = (math.log(t / d) for t, d in zip(record.times_s, record.default_s, strict=True))
            found[site][record.candidate].append(median(ratios))
        elif record.kind == "site" or record.times_s:  # nothing but the default is timed without the default beside it
            defaults[site] = record.candidate
        conditions_of[site] = record.workload, there
    sites = []
    for site, default in defaults.items():
        workload, there = conditions_of[site]
        measured_on = Machine(machine.isa, there.host.l1, there.host.l2, there.host.l3, there.threads)
        others = {c: median(ratios) for c, ratios in found[site].items() if c != default}
        sites.append(Examples(workload, measured_on, {default: 0.0} | others))
    return sites


def learn(sites: Sequence[Examples], machine: Machine) -> Learned | None:
    """Train on measured sites, or None when they come to fewer than MIN_MEASURED candidates of MIN_RANKED_SITES workloads.

    The same sites give the same model: one thread, a fixed seed, nothing sampled.
    """
    if sum(len(site.log_ratios) for site in sites) < MIN_MEASURED or len({site.workload for site in sites}) < MIN_RANKED_SITES:
        return None
    return Learned(machine, _train(sites, [_rows(site) for site in sites]))


def learn_with_error(sites: Sequence[Examples], machine: Machine) -> Learned | None:
    """As `learn`, with the error estimated on sites that a model of the others has not seen. None also below MIN_SITES workloads."""
    if len({site.workload for site in sites}) < MIN_SITES or (learned := learn(sites, machine)) is None:
        return None
    rows, folds = [_rows(site) for site in sites], [fold_of(site.workload) for site in sites]
    off: list[float] = []
    for fold in set(folds):
        inside, outside = ([i for i, f in enumerate(folds) if (f == fold) == out] for out in (False, True))
        if not inside:
            continue
        booster = _train([sites[i] for i in inside], [rows[i] for i in inside])
        predicted = np.split(_predict(booster, np.concatenate([rows[i] for i in outside])), np.cumsum([len(rows[i]) for i in outside])[:-1])
        for i, found in zip(outside, predicted, strict=True):
            best = int(np.argmin(found))
            off.append(list(sites[i].log_ratios.values())[best] - float(found[best] - found[0]))
    return replace(learned, error=math.sqrt(sum(x * x for x in off) / len(off)) if off else math.inf)


def fold_of(workload: Workload) -> int:
    return int(workload.hash(), 16) % FOLDS


def _rows(site: Examples) -> np.ndarray:
    return np.array(_rows_of(site.workload, list(site.log_ratios), site.machine), "float32")


def _train(sites: Sequence[Examples], rows: Sequence[np.ndarray]) -> Any:
    import xgboost

    targets = [np.array(list(site.log_ratios.values())) - median(site.log_ratios.values()) for site in sites]
    data = xgboost.DMatrix(np.concatenate(rows), np.concatenate(targets).astype("float32"), nthread=1)
    return xgboost.train(PARAMETERS, data, num_boost_round=ROUNDS)


def _predict(booster: Any, rows: np.ndarray) -> np.ndarray:
    import xgboost

    return booster.predict(xgboost.DMatrix(rows, nthread=1))
