"""The RFC's question: when should an epilogue move into the loop? The best one-line gate that the records allow, and what it loses.

    python -m bench.gate --logs tuning_logs
    python -m bench.gate --standing            # epilogue ops left standing before and after hoisting

For every measured site: "always" has the whole epilogue in registers, "never" all of it apart, on the tile on which both were measured
and the quicker is quickest; "best" is the quickest placement and cut on that tile. A gate fuses where one feature is below, or above,
a threshold. Regret is ln(time / time of best), averaged over sites; a gate's is also given with each site left out of its own fit, as the
cost model's is with each quarter of the workloads. "tuned" is what the verdicts chose, with their margin. The sample is
of screened and confirmed times relative to the default: whatever is below 1 % is noise.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from tvmfuse.building import prepare
from tvmfuse.decide.cost_model import FOLDS, Examples, examples, features, fold_of, learn
from tvmfuse.decide.log import Log, Record
from tvmfuse.measure.host import isa_among
from tvmfuse.values import AVX2, AVX512, ISA, NEON, Candidate, Machine

from . import models

GATED = {
    "arithmetic intensity, flop per byte": "intensity",
    "epilogue cost, vector instructions per element": "cost_in_loop",
    "register pressure, of all registers": "registers",
    "epilogue cost per flop of an output": "cost_per_flop",
    "output over L2, ln": "ln_output_per_l2",
}


@dataclass(frozen=True)
class Site:
    """ln time over the default's of each way to place one site's epilogue, and what a gate may look at (of "always")."""

    examples: Examples
    always: Candidate
    never: Candidate
    best: float
    tuned: float
    features: dict[str, float]

    def ln(self, candidate: Candidate) -> float:
        return self.examples.log_ratios[candidate]


def sites_of(records: Sequence[Record], isa: ISA) -> list[Site]:
    """Measured sites with an epilogue, both of whose ends were measured on one tile."""
    found = []
    for site in examples(records, Machine(isa)):
        whole = len(site.workload.epilogue.steps)
        ln = site.log_ratios
        tiles = {c.knobs for c in ln}
        ends = [(Candidate("register", whole, tile), Candidate("separate", 0, tile)) for tile in tiles]
        ends = [(fused, apart) for fused, apart in ends if whole and fused in ln and apart in ln]
        if not ends:
            continue
        always, never = min(ends, key=lambda pair: min(ln[pair[0]], ln[pair[1]]))
        best = min(x for c, x in ln.items() if c.knobs == always.knobs)
        won = [r for r in records if r.workload == site.workload and r.verdict and r.verdict.outcome == "wins" and r.kind == "verdict"]
        on_tile = [r.candidate for r in sorted(won, key=lambda r: r.verdict.ratio if r.verdict else 1) if r.candidate.knobs == always.knobs]
        seen = features(site.workload, always, site.machine)
        seen["cost_per_flop"] = seen["cost_in_loop"] / max(1.0, seen["flop_per_output"])
        tuned = ln[on_tile[0]] if on_tile and on_tile[0] in ln else ln[always]
        found.append(Site(site, always, never, best, tuned, seen))
    return found


@dataclass(frozen=True)
class Gate:
    """Fuse where sign * feature <= sign * threshold."""

    feature: str
    threshold: float
    sign: int

    def fuses(self, site: Site) -> bool:
        return self.sign * site.features[self.feature] <= self.sign * self.threshold

    def ln(self, site: Site) -> float:
        return site.ln(site.always if self.fuses(site) else site.never)

    def __str__(self) -> str:
        return f"fuse where {self.feature} {'<=' if self.sign > 0 else '>='} {self.threshold:.4g}"


def fit(sites: Sequence[Site], feature: str) -> Gate:
    """The threshold and direction of least regret; a threshold beyond all sites is "always" or "never"."""
    values = sorted({site.features[feature] for site in sites})
    between = [(a + b) / 2 for a, b in zip(values, values[1:], strict=False)]
    gates = [Gate(feature, threshold, sign) for sign in (1, -1) for threshold in (-math.inf, *between, math.inf)]
    return min(gates, key=lambda gate: regret(sites, gate.ln))


def regret(sites: Sequence[Site], ln: Callable[[Site], float]) -> float:
    return float(np.mean([ln(site) - site.best for site in sites]))


def left_out(sites: Sequence[Site], feature: str) -> float:
    """Regret of gates that were fitted without the workload that they are asked about."""
    return float(np.mean([fit([s for s in sites if s is not site], feature).ln(site) - site.best for site in sites]))


def model_regret(sites: Sequence[Site], isa: ISA) -> float | None:
    """Of the cost model's pick among the placements and cuts of the tile, trained on the other quarters of the workloads."""
    lost = []
    for fold in range(FOLDS):
        model = learn([s.examples for s in sites if fold_of(s.examples.workload) != fold], Machine(isa))
        if model is None:
            return None
        for site in (s for s in sites if fold_of(s.examples.workload) == fold):
            places = [site.always, *(c for c in site.examples.log_ratios if c.knobs == site.always.knobs and c != site.always)]
            ratios = dict(zip(places, model.log_ratios(site.examples.workload, places), strict=True))
            lost.append(site.ln(min(ratios, key=ratios.__getitem__)) - site.best)
    return float(np.mean(lost))


def report(records: Iterable[Record], isa: ISA) -> dict[str, object] | None:
    """Regrets in percent, the gates' twice: on the sites that they were fitted to, and on sites left out."""
    sites = sites_of(list(records), isa)
    if len(sites) < 3:
        return None
    fused_loses = [site for site in sites if site.ln(site.never) < site.ln(site.always)]
    rows = {
        "always": (regret(sites, lambda s: s.ln(s.always)),) * 2,
        "never": (regret(sites, lambda s: s.ln(s.never)),) * 2,
        "tuned": (regret(sites, lambda s: s.tuned),) * 2,
        "best": (0.0, 0.0),
    }
    model = model_regret(sites, isa)
    if model is not None:
        rows["cost model, of workloads left out"] = (model, model)
    for name, feature in GATED.items():
        rows[f"{name}: {fit(sites, feature)}"] = regret(sites, fit(sites, feature).ln), left_out(sites, feature)
    percent = {name: [round(100 * math.expm1(x), 2) for x in pair] for name, pair in sorted(rows.items(), key=lambda row: row[1][1])}
    return {"isa": isa.name, "sites": len(sites), "fusing loses at": len(fused_loses), "regret %, fitted and left out": percent}


def standing(name: str) -> dict[str, int]:
    """Epilogue ops of a model, and what becomes of them.

    in the model      Add, Mul, Relu, Clip, BatchNormalization, ... nodes and the biases of Conv and Gemm, in the ONNX file.
    canonical         bias, activation and residual ops once batch normalisation is folded into weights, as Relax ops.
    across a layout   those that a reshape or a transposition keeps from their anchor until they are hoisted.
    others            what would stand if these alone were moved. The RFC counts 98 -> 44 for MobileNetV2 and 49 -> 18 for SqueezeNet: its
                      rewrite reaches pointwise convolutions, and leaves k x k and depthwise ones and residual additions as they were.
    after             those that no anchor's kernel has taken in. 0 here: every anchor family computes epilogues, residual ones too.
    """
    model = models.load(name)
    elementwise = {
        "Add",
        "Sum",
        "Sub",
        "Mul",
        "Div",
        "Relu",
        "Clip",
        "Sigmoid",
        "Tanh",
        "LeakyRelu",
        "PRelu",
        "Softplus",
        "Erf",
        "BatchNormalization",
    }
    biased = sum(node.op_type in ("Conv", "Gemm", "ConvTranspose") and len(node.input) > 2 for node in model.graph.node)
    prepared = prepare(model, models.shapes(name))
    fused = sum(len(site.workload.epilogue.steps) for site in prepared.sites if site.workload.family != "elementwise")
    apart = sum(len(site.workload.epilogue.steps) for site in prepared.sites if site.workload.family == "elementwise")
    crossed = sum(len(site.workload.epilogue.steps) for site in prepared.sites if site.crossed and site.workload.family != "elementwise")
    return {
        "in the model": biased + sum(node.op_type in elementwise for node in model.graph.node),
        "canonical": fused + apart,
        "across a layout": crossed,
        "others": fused + apart - crossed,
        "after": apart,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logs", nargs="+", help="folders or files of tuning records; by default the shipped ones and your own")
    parser.add_argument(
        "--standing", nargs="*", choices=models.ZOO, metavar="NAME", help="count epilogue ops (default: mobilenetv2 squeezenet)"
    )
    args = parser.parse_args()
    if args.standing is not None:
        print(json.dumps({name: standing(name) for name in args.standing or ("mobilenetv2", "squeezenet")}, indent=2))
        return
    log = Log(args.logs) if args.logs else Log.shipped_and_own()
    records = [record for record in log.records() if record.candidate.numerics == "exact"]
    for isa in (AVX512, AVX2, NEON):
        alike = [record for record in records if isa_among(record.conditions.host.features) == isa]
        print(json.dumps(report(alike, isa) or {"isa": isa.name, "sites": 0}, indent=2))


if __name__ == "__main__":
    main()
