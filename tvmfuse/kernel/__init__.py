"""A site becomes TensorIR: one module for each anchor family, each with its space of candidates beside its schedule."""

from __future__ import annotations

import functools
import hashlib

from ..values import Candidate, Machine, Workload
from . import conv2d, conv2d_transpose, depthwise, elementwise, matmul, recurrent
from .family import Family, Kernel

FAMILIES: dict[str, Family] = {
    "matmul": matmul,
    "conv2d": conv2d,
    "depthwise": depthwise,
    "conv2d_transpose": conv2d_transpose,
    "recurrent": recurrent,
    "elementwise": elementwise,
}


def candidates(workload: Workload, machine: Machine) -> tuple[Candidate, ...]:
    """Every legal candidate of a workload, the default first."""
    return FAMILIES[workload.family].candidates(workload, machine)


def build_kernel(workload: Workload, candidate: Candidate, machine: Machine) -> Kernel:
    """Raises ScheduleRefused, with the reason, when the candidate is not legal."""
    return FAMILIES[workload.family].kernel(workload, candidate, machine)


@functools.lru_cache(maxsize=4096)
def digest(workload: Workload, machine: Machine) -> str:
    """Of the code that the family emits for a workload: one candidate of each placement on the default tile.

    A release that doesn't change a family keeps its digests, and with them the records measured under them.
    """
    default = candidates(workload, machine)[0]
    whole = len(workload.epilogue.steps)
    places = [default, Candidate("tile", whole, default.knobs), Candidate("separate", 0, default.knobs)] if whole else [default]
    texts = [launch.func.script() for place in places for launch in build_kernel(workload, place, machine).launches]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]
