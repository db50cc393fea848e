"""Which candidate a site gets: forced, measured or the default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from . import kernel
from .decide.log import Log
from .errors import UsageError
from .values import Candidate, Host, Machine, Source, Workload

Fuse = Literal["measured", "always", "never"]
FUSE: tuple[Fuse, ...] = ("measured", "always", "never")


@dataclass(frozen=True)
class Choice:
    """A candidate and where it comes from; ratio and interval when it was measured against the default."""

    candidate: Candidate
    source: Source
    ratio: float | None = None
    ci: tuple[float, float] | None = None


@dataclass
class Chooser:
    """choose(workload) for one build.

    fuse  "always": the whole epilogue in registers; "never": all of it apart, on the same tile; "measured": what the log says for this
          host and toolchain, else the default. `log` and `host` are None when there is nothing to match, as for a foreign target.
    tried  candidates that go before all that, as while a tuned model is compared with its default.
    """

    fuse: Fuse
    machine: Machine
    log: Log | None = None
    host: Host | None = None
    toolchain: Mapping[str, str] = field(default_factory=dict)
    tried: Mapping[Workload, Candidate] = field(default_factory=dict)
    _made: dict[Workload, Choice] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.fuse not in FUSE:
            raise UsageError(f"fuse={self.fuse!r} is none of {', '.join(FUSE)}")

    def __call__(self, workload: Workload) -> Candidate:
        return self.choice(workload).candidate

    def choice(self, workload: Workload) -> Choice:
        if workload not in self._made:
            self._made[workload] = self._choose(workload)
        return self._made[workload]

    def _choose(self, workload: Workload) -> Choice:
        if workload in self.tried:
            return Choice(self.tried[workload], "measured")
        default = kernel.candidates(workload, self.machine)[0]
        if not workload.epilogue.steps and self.fuse != "measured":
            return Choice(default, "default")
        if self.fuse == "always":
            return Choice(default, "forced")
        if self.fuse == "never":
            return Choice(Candidate("separate", 0, default.knobs), "forced")
        if self.log is None or self.host is None:
            return Choice(default, "default")
        match = self.log.best(workload, self.host, self.machine.threads, self.toolchain, kernel.digest(workload, self.machine))
        if match is None or match.kind != "use":
            return Choice(default, "default")
        verdict = match.record.verdict
        assert verdict is not None
        if match.candidate is None:
            return Choice(default, "measured")
        return Choice(match.candidate, "measured", verdict.ratio, verdict.ci)
