"""A site becomes TensorIR: one module for each anchor family, each with its space of candidates beside its schedule."""

from __future__ import annotations

import functools
import hashlib

from ..values import WINOGRAD, Candidate, Conv2d, Machine, Numerics, Workload
from . import conv2d, conv2d_transpose, depthwise, elementwise, matmul, planar_conv2d, recurrent, winograd
from .family import Family, Kernel

FAMILIES: dict[str, Family] = {
    "matmul": matmul,
    "conv2d": conv2d,
    "planar_conv2d": planar_conv2d,
    "depthwise": depthwise,
    "conv2d_transpose": conv2d_transpose,
    "recurrent": recurrent,
    "elementwise": elementwise,
}


def candidates(workload: Workload, machine: Machine, numerics: Numerics = "exact") -> tuple[Candidate, ...]:
    """Every legal candidate of a workload, the default first.

    With numerics "relaxed" also those of other algorithms; the default is then of the algorithm that the analytic priors like best.
    """
    exact = FAMILIES[workload.family].candidates(workload, machine)
    if numerics == "exact" or why_not_relaxed(workload):
        return exact
    return winograd.beside(workload, exact, machine)


def why_not_relaxed(workload: Workload) -> str | None:
    """Why a workload has exact candidates only, whatever is asked for; None when it has others."""
    return winograd.why_not(workload)


def flop(workload: Workload, candidate: Candidate) -> int:
    """That a candidate's anchor really takes."""
    anchor, algorithm = workload.anchor, candidate.algorithm
    return winograd.flop(anchor, WINOGRAD[algorithm]) if algorithm and isinstance(anchor, Conv2d) else anchor.flop()


def build_kernel(workload: Workload, candidate: Candidate, machine: Machine) -> Kernel:
    """Raises ScheduleRefused, with the reason, when the candidate is not legal."""
    family = winograd if candidate.algorithm else FAMILIES[workload.family]
    return family.kernel(workload, candidate, machine)


@functools.lru_cache(maxsize=4096)
def digest(workload: Workload, machine: Machine, numerics: Numerics = "exact") -> str:
    """Of the code that the family emits for a workload: one candidate of each placement on the default tile.

    A release that doesn't change a family keeps its digests, and with them the records measured under them. Where there are relaxed
    candidates, their records have another digest than exact ones.
    """
    whole = len(workload.epilogue.steps)
    default = FAMILIES[workload.family].candidates(workload, machine)[0]
    chosen = [default, Candidate("tile", whole, default.knobs), Candidate("separate", 0, default.knobs)] if whole else [default]
    found = candidates(workload, machine, numerics)
    chosen += {c.algorithm: c for c in reversed(found) if c.algorithm}.values()
    texts = [launch.func.script() for place in chosen for launch in build_kernel(workload, place, machine).launches]
    texts += [f"default {found[0]}"] if found[0].algorithm else []
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]
