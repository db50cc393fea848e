"""Which candidate a site gets: forced, measured, predicted or the default."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from . import kernel
from .decide.cost_model import Learned
from .decide.log import Conditions, Log, Match
from .errors import UsageError
from .values import NUMERICS, Candidate, Host, Machine, Numerics, Source, Workload

Fuse = Literal["measured", "always", "never"]
PREDICTED_TILES = 24
FUSE: tuple[Fuse, ...] = ("measured", "always", "never")


@dataclass(frozen=True)
class Choice:
    """A candidate and where it comes from.

    ratio    to the default's time, as measured (then with its interval) or as predicted.
    relative_error  measured of a relaxed candidate; None before that.
    """

    candidate: Candidate
    source: Source
    ratio: float | None = None
    ci: tuple[float, float] | None = None
    relative_error: float | None = None


@dataclass
class Chooser:
    """choose(workload) for one build.

    fuse  "always": the whole epilogue in registers; "never": all of it apart, on the same tile; "measured": what the log says for this
          host and toolchain, else what a model trained on it predicts to be better by more than its error, else the default. `log`
          is None when nothing is known, `host` when nothing can be matched, as for a foreign target.
    predict  the trained model, or None when the log holds too little; called once, for the first workload that has no verdict.
    tried  candidates that go before all that, as while a tuned model is compared with its default.
    numerics  "relaxed": an analytic prior chooses the default among algorithms, also the exact one. Where the log has no decision, that
          stands as predicted if it is relaxed; if it is exact, what is known of exact candidates holds.
    """

    fuse: Fuse
    machine: Machine
    log: Log | None = None
    host: Host | None = None
    toolchain: Mapping[str, str] = field(default_factory=dict)
    predict: Callable[[Log, Machine], Learned | None] = lambda log, machine: None
    tried: Mapping[Workload, Candidate] = field(default_factory=dict)
    numerics: Numerics = "exact"
    _made: dict[Workload, Choice] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.fuse not in FUSE:
            raise UsageError(f"fuse={self.fuse!r} is none of {', '.join(FUSE)}")
        if self.numerics not in NUMERICS:
            raise UsageError(f"numerics={self.numerics!r} is none of {', '.join(NUMERICS)}")

    def __call__(self, workload: Workload) -> Candidate:
        return self.choice(workload).candidate

    def choice(self, workload: Workload) -> Choice:
        if workload not in self._made:
            choice = self._choose(workload)
            if self.log is not None and (algorithm := choice.candidate.algorithm):
                choice = replace(choice, relative_error=self.log.relative_error(workload, algorithm))
            self._made[workload] = choice
        return self._made[workload]

    def candidates(self, workload: Workload) -> tuple[Candidate, ...]:
        """What this build may choose among, the default first."""
        return kernel.candidates(workload, self.machine, self.numerics)

    def conditions(self, workload: Workload) -> Conditions:
        """Under which what is measured of these candidates is recorded; only where there is a host.

        The default is that of the log's records, if they still hold: they go on when a release would begin with another one.
        """
        assert self.host is not None
        known = self.log and self.log.default(workload, *self._here, self._digest(workload, self.numerics))
        default = known or self.candidates(workload)[0]
        digest = kernel.digest(workload, self.machine, default, self.numerics)
        assert digest is not None
        return Conditions(*self._here, digest, default)

    def contest(self, workload: Workload) -> tuple[tuple[Candidate, ...], Conditions]:
        """What tuning measures, the default first, and under which conditions."""
        conditions = self.conditions(workload)
        assert conditions.default is not None
        return tuple(dict.fromkeys((conditions.default, *self.candidates(workload)))), conditions

    def _choose(self, workload: Workload) -> Choice:
        if workload in self.tried:
            return Choice(self.tried[workload], "measured")
        default = self.candidates(workload)[0]
        untuned = Choice(default, "predicted" if default.algorithm else "default")
        if not workload.epilogue.steps and self.fuse != "measured":
            return untuned
        if self.fuse == "always":
            return Choice(default, "forced")
        if self.fuse == "never":
            return Choice(Candidate("separate", 0, default.knobs), "forced")
        match = self.match(workload)
        if match is None or match.kind != "use":
            return untuned if default.algorithm else self._predicted(workload) or untuned
        verdict = match.record.verdict
        assert verdict is not None
        if match.candidate is None:
            return Choice(match.record.conditions.default or default, "measured")
        return Choice(match.candidate, "measured", verdict.ratio, verdict.ci)

    def match(self, workload: Workload) -> Match | None:
        """What the log has on a workload: a verdict to use, or a hint."""
        found = self._match(workload, self.numerics)
        if self.numerics == "relaxed" and (found is None or found.kind != "use") and not self.candidates(workload)[0].algorithm:
            return self._match(workload, "exact") or found
        return found

    def _match(self, workload: Workload, numerics: Numerics) -> Match | None:
        if self.log is None or self.host is None:
            return None
        why_not = functools.partial(kernel.why_not, workload, machine=self.machine)
        return self.log.best(workload, *self._here, self._digest(workload, numerics), numerics, why_not)

    @property
    def _here(self) -> tuple[Host, int, Mapping[str, str]]:
        assert self.host is not None
        return self.host, self.machine.threads, self.toolchain

    def _digest(self, workload: Workload, numerics: Numerics) -> Callable[[Candidate], str | None]:
        """Of today's kernels, for a default; it takes as long as some kernels."""
        return lambda default: kernel.digest(workload, self.machine, default, numerics)

    def _predicted(self, workload: Workload) -> Choice | None:
        candidates = first_tiles(kernel.candidates(workload, self.machine))
        if len(candidates) < 2 or self._model is None:
            return None
        picked = self._model.pick(workload, candidates)
        return Choice(picked[0], "predicted", picked[1]) if picked else None

    @functools.cached_property
    def _model(self) -> Learned | None:
        return self.predict(self.log, self.machine) if self.log else None


def first_tiles(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those of the PREDICTED_TILES tiles that the family lists first: a model errs most on tiles that nobody ever liked."""
    tiles = list(dict.fromkeys(c.knobs for c in candidates))[:PREDICTED_TILES]
    return [c for c in candidates if c.knobs in tiles]
