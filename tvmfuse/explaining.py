"""What would be done with a model, and why, without compiling it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import kernel
from .building import Plan, Prepared, described, plan_for, prepare
from .choose import Choice, Fuse
from .decide.cost_model import AnalyticPrior
from .decide.log import Match, Record
from .errors import UsageError
from .graph.excerpt import excerpt
from .graph.hoist import Rule, refusals
from .graph.sites import FoundSite
from .values import ITEM_BYTES, Candidate, Cost, Matmul, Numerics, Recurrent, Roofline, Site, Verdict, Workload

# What a person who owns the model could do about each rule.
REMEDIES: dict[Rule, str] = {
    "second user": "let what else reads it read the epilogue's result instead, or leave that output out of the export",
    "graph output": "leave this value out of the graph's outputs if nobody needs it",
    "broadcasts up": "give the operand the shape of the anchor's result or less, or broadcast behind the epilogue",
    "depends on the anchor": "nothing: it needs the whole result before its first element",
    "unknown shape": "bind the model's free dimensions",
    "empty tensor": "nothing: there is nothing to compute",
    "not an epilogue op": "nothing in the model; CONTRIBUTING.md says how an op is added",
    "not a layout op": "nothing: it does more than to move elements",
    "part of an axis": "make the operand a constant (an initializer): that is repeated along the axis at no cost",
}
WHY: dict[str, str] = {
    "measured": "measured, default kept",
    "undecided": "measured, undecided, default kept",
    "predicted": "predicted from what was measured of other sites, not measured here yet",
    "default": "default: not measured here yet",
    "forced": "forced by fuse",
}


@dataclass(frozen=True)
class Blocked:
    """An op that stays out of a site's loop: `op` and `node` are ONNX nodes, `node` the one that the rule is about."""

    op: str
    node: str
    rule: str
    why: str
    remedy: str
    anchor: str

    def __str__(self) -> str:
        return f"{self.why} [{self.rule}: {self.node}]; what could be done: {self.remedy}"


@dataclass(frozen=True)
class Option:
    """One candidate of a site: the default, the chosen one, or one that was measured.

    predicted_s     by the analytic prior; predicted_ratio is that over the default's.
    verdict         the newest that was measured here, against the default.
    """

    candidate: Candidate
    predicted_s: float
    predicted_ratio: float
    verdict: Verdict | None = None


@dataclass(frozen=True)
class Explained:
    """One site with its prediction.

    why              what decided; hint: a record of another CPU, toolchain or kernel, to be measured again, in words.
    undecided        it was measured, and whether another candidate is faster stayed open.
    predicted_s      seconds of the chosen candidate by the analytic prior.
    predicted_ratio  the same over the default's, or what the model trained on the log says where that chose.
    bytes_saved      what fusing the epilogue doesn't write and read again.
    bound_s          least seconds that this machine's limits allow; None when they weren't given.
    options          the candidates that are known of. blocked: the ops that stay out of its loop.
    """

    site: Site
    why: str
    undecided: bool
    hint: str | None
    predicted_s: float
    predicted_ratio: float
    bytes_saved: int
    bound_s: float | None
    options: tuple[Option, ...]
    blocked: tuple[Blocked, ...]


@dataclass(frozen=True)
class Report:
    """Sites in program order, and every op that stays below a layout op or out of the loop that it follows."""

    sites: tuple[Explained, ...]
    refusals: tuple[Blocked, ...]
    _prepared: Prepared = field(repr=False)

    def site(self, name: str) -> Explained:
        """By its name, or by a part of it that no other site has. Raises UsageError, listing the names."""
        named = [e for e in self.sites if e.site.name == name] or [e for e in self.sites if name in e.site.name]
        if len(named) != 1:
            known = ", ".join(e.site.name for e in named or self.sites) or "none"
            raise UsageError(f"{'several sites are' if named else 'no site is'} called {name!r}; there are: {known}")
        return named[0]

    def before_after(self, name: str) -> tuple[str, str]:
        """The Relax IR around a site, before and after hoisting."""
        at = self.sites.index(self.site(name))
        found = self._prepared.sites[at]
        names = {*found.members, found.result.name}
        return excerpt(self._prepared.hoistable["main"], names), excerpt(self._prepared.mod["main"], names)


def explain(
    model: Any,
    shapes: Mapping[str, Any] | None = None,
    target: Any = None,
    threads: int | None = None,
    fuse: Fuse = "measured",
    logs: str | os.PathLike[str] | None = None,
    roofline: Callable[[int], Roofline] | None = None,
    numerics: Numerics = "exact",
) -> Report:
    """The sites of a model with reason, prediction and measurement. Other arguments as for `build`; compiles nothing.

    roofline  measures the limits of this machine at so many threads, as `tvmfuse.measure.roofline.roofline` does in a second or two;
              every site then has its bound.
    """
    plan = plan_for(target, threads, fuse, logs, numerics)
    prepared = prepare(model, shapes)
    blocked = tuple(Blocked(r.op, r.culprit, r.rule, str(r), REMEDIES[r.rule], r.anchor) for r in refusals(prepared.hoistable))
    touched = sum(found.workload.bytes_moved() for found in prepared.sites)
    limits = roofline(plan.machine.threads) if roofline else None
    return Report(tuple(_explained(found, plan, blocked, limits, touched) for found in prepared.sites), blocked, prepared)


def _explained(found: FoundSite, plan: Plan, blocked: tuple[Blocked, ...], limits: Roofline | None, touched: int) -> Explained:
    workload, choice = found.workload, plan.chooser.choice(found.workload)
    match = plan.chooser.match(workload)
    options = _options(workload, plan, choice.candidate)
    chosen = next(option for option in options if option.candidate == choice.candidate)
    undecided = _is_undecided(choice, options)
    size = math.prod(workload.anchor.output_shape()) * ITEM_BYTES.get(workload.output_dtype, 4)
    return Explained(
        site=described(found, plan.chooser),
        why=_why(choice, match, undecided),
        undecided=undecided,
        hint=_hint(match) if match and match.kind == "hint" else None,
        predicted_s=chosen.predicted_s,
        predicted_ratio=choice.ratio if choice.source == "predicted" and choice.ratio else chosen.predicted_ratio,
        bytes_saved=2 * size if choice.candidate.cut and choice.candidate.cut == len(workload.epilogue.steps) else 0,
        bound_s=limits.bound_s(cost(workload, choice.candidate), touched) if limits else None,
        options=options,
        blocked=tuple(b for b in blocked if b.anchor == found.members[0]),
    )


def cost(workload: Workload, candidate: Candidate) -> Cost:
    """The least that a site has to do by a candidate's algorithm: weights and constant operands are constants, the rest activations."""
    anchor = workload.anchor
    first, *rest = (math.prod(shape) * ITEM_BYTES.get(anchor.dtype, 4) for shape in anchor.input_shapes())
    runtime = isinstance(anchor, Matmul) and not anchor.constant_b
    states = sum(rest[2:]) if isinstance(anchor, Recurrent) else 0
    operands = sum(math.prod(o.shape) * ITEM_BYTES.get(o.dtype, 4) for o in workload.epilogue.operands if o.constant)
    constants = operands + (0 if runtime else sum(rest) - states)
    return Cost(kernel.flop(workload, candidate), workload.bytes_moved() - constants, constants)


def _options(workload: Workload, plan: Plan, chosen: Candidate) -> tuple[Option, ...]:
    """The default, what was chosen, and what was measured here."""
    prior, chooser = AnalyticPrior(plan.machine), plan.chooser
    history: Sequence[Record] = ()
    if chooser.log is None or chooser.host is None:
        default, *_ = chooser.candidates(workload)
    else:
        (default, *_), conditions = chooser.contest(workload)
        history = chooser.log.history(workload, conditions)
    base = prior.seconds(workload, default)
    verdicts: dict[Candidate, Verdict | None] = {default: None, chosen: None}
    verdicts |= {r.candidate: r.verdict for r in history if r.verdict and r.kind != "site"}
    predicted = {candidate: prior.seconds(workload, candidate) for candidate in verdicts}
    return tuple(Option(c, predicted[c], predicted[c] / base, verdict) for c, verdict in verdicts.items())


def _is_undecided(choice: Choice, options: tuple[Option, ...]) -> bool:
    outcomes = {option.verdict.outcome for option in options if option.verdict}
    return choice.source == "measured" and choice.ci is None and "undecided" in outcomes and "keeps default" not in outcomes


def _why(choice: Choice, match: Match | None, undecided: bool) -> str:
    source = choice.source
    if source == "predicted" and choice.candidate.algorithm:
        return "predicted from the multiplications that it saves, not measured here yet"
    if source == "measured" and match and match.skipped:
        passed_over = "; ".join(f"{candidate} won but can't be replayed: {reason}" for candidate, reason in match.skipped)
        return f"measured, where {passed_over}"
    if source == "measured" and match and match.record.verdict:
        verdict = match.record.verdict
        if match.candidate:
            return f"measured: {verdict.why}"
        subject = "" if match.record.kind == "site" else f"{verdict.candidate.placement} "
        return f"{WHY['undecided' if undecided else source]}: {subject}{verdict.why}"
    return WHY[source]


def _hint(match: Match) -> str:
    there, verdict = match.record.conditions, match.record.verdict
    assert verdict is not None
    chose = f"{match.candidate.placement}@{match.candidate.cut}" if match.candidate else "the default"
    return (
        f"{chose} was best on {there.host.name or there.host.key}, tvm {there.toolchain.get('tvm')}:"
        f" {verdict.ratio:.3f} [{verdict.ci[0]:.3f}, {verdict.ci[1]:.3f}]; measure again here"
    )
