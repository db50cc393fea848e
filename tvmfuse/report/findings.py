"""What a report shows. Plain values: nothing here knows TVM or HTML."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ..values import Roofline


@dataclass(frozen=True)
class Timing:
    """The whole model in one way of fusing. Seconds a call: lower quartile, median, upper quartile.

    ratio  to the first timing's, formed within a round where both met the same machine; quartiles again.
    """

    label: str
    seconds: tuple[float, float, float]
    ratio: tuple[float, float, float]


@dataclass(frozen=True)
class SiteLine:
    """One site. rivals: (candidate, ratio to the default, interval) of everything measured here, the chosen one apart.

    state     "fused", "separate", "bare" (nothing follows the anchor).
    decided   whether measuring here came to a decision; blocked: what stays out of its loop, each as a sentence.
    """

    name: str
    anchor: str
    epilogue: str
    crossed: str
    placement: str
    state: str
    decided: bool
    why: str
    hint: str | None
    ratio: float | None
    ci: tuple[float, float] | None
    rivals: tuple[tuple[str, float, tuple[float, float]], ...]
    predicted_s: float
    bound_s: float | None
    bytes_saved: int
    blocked: tuple[str, ...]


@dataclass(frozen=True)
class KernelLine:
    """One kernel over all its launches in a call of the model. bytes: each tensor read or written once."""

    name: str
    sites: tuple[str, ...]
    launches: int
    time_s: float
    flop: int
    bytes: int
    bound_s: float


@dataclass(frozen=True)
class Findings:
    """Everything that one report shows.

    noise         half of the A/A pairs' ratios lie within these bounds.
    environment   (what, value) pairs.
    """

    model: str
    timings: Sequence[Timing]
    noise: tuple[float, float]
    rounds: int
    sites: Sequence[SiteLine]
    kernels: Sequence[KernelLine]
    roofline: Roofline
    environment: Sequence[tuple[str, str]]

    def counts(self) -> dict[str, int]:
        states = Counter(site.state for site in self.sites)
        return {
            "found": len(self.sites),
            "fused": states["fused"],
            "separate": states["separate"],
            "refused": sum(bool(site.blocked) for site in self.sites),
            "undecided": sum((site.state != "bare" or bool(site.rivals)) and not site.decided for site in self.sites),
        }
