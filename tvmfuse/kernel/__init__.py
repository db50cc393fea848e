"""A site becomes TensorIR: one module for each anchor family, each with its space of candidates beside its schedule."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Iterable
from dataclasses import replace

import tvm_ffi

from ..errors import ScheduleRefused
from ..values import WINOGRAD, Candidate, Conv2d, Machine, Numerics, Workload
from . import conv2d, conv2d_transpose, depthwise, elementwise, matmul, planar_conv2d, recurrent, winograd
from .family import Family, Kernel, Tile

Way = tuple[tuple[str, str], ...]
# Above what any family offers: more is no record of ours, and a thousand unrolled steps take 20 s to emit.
MOST, MOST_OF_OTHERS = {"ku": 16}, 1024

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


def why_not(workload: Workload, candidate: Candidate, machine: Machine) -> str | None:
    """Why a recorded candidate can't be replayed; None when it can, even where the analytic prior ranks it too low to be listed."""
    if candidate in candidates(workload, machine, candidate.numerics):
        return None
    ways = _ways(workload, machine, candidate.numerics)
    alike = [tile for tile in ways.values() if tile.keys() == dict(candidate.knobs).keys()]
    if not alike or _way(candidate.knobs) not in ways:
        return f"{workload.family} knows no such knobs"
    for name, value in candidate.knobs:
        most = MOST.get(name, MOST_OF_OTHERS)
        if isinstance(value, int) and not 0 < value <= most:
            return f"{name} is not between 1 and {most}"
    try:
        build_kernel(workload, candidate, machine)
    except ScheduleRefused as refusal:
        return str(refusal)
    return None


@functools.lru_cache(maxsize=4096)
def digest(workload: Workload, machine: Machine, default: Candidate, numerics: Numerics = "exact") -> str | None:
    """Of the code that the family emits for a workload; None when `default` is no candidate any more.

    That is the code of the default that rivals were measured against, with its epilogue in each placement, and of one tile for every
    other way that the family has (loop order, padding, algorithm): the same tile where it goes with that, else the least. No analytic
    prior has a say in it. So a release that prefers other tiles, or doesn't change a family, keeps the records, and one that emits
    other code doesn't. Where there are relaxed candidates, their records have another digest than exact ones.
    """
    if why_not(workload, default, machine):
        return None
    whole, ways = len(workload.epilogue.steps), _ways(workload, machine, numerics)
    chosen = [default, *([Candidate("tile", whole, default.knobs), Candidate("separate", 0, default.knobs)] if whole else [])]
    kernels = [build_kernel(workload, place, machine) for place in chosen]
    kernels += [_in_way(workload, default, least, machine) for way, least in ways.items() if way != _way(default.knobs)]
    hashes = [tvm_ffi.structural_hash(launch.func) for built in kernels for launch in built.launches]  # as text it takes ten times as long
    return hashlib.sha256(repr(hashes).encode()).hexdigest()[:16]


def _ways(workload: Workload, machine: Machine, numerics: Numerics) -> dict[Way, Tile]:
    """The knobs that aren't numbers, as all legal tiles have them -> the least tile that has them so."""
    tiles = list(FAMILIES[workload.family].tiles(workload, machine))
    if numerics == "relaxed" and not why_not_relaxed(workload):
        tiles += [tile for m in WINOGRAD.values() for _, tile in winograd.tiles(workload, m, machine)]
    found: dict[Way, Tile] = {}
    for tile in sorted(tiles, key=lambda tile: sorted(tile.items(), key=lambda knob: knob[0]), reverse=True):
        found[_way(tile.items())] = tile
    return dict(sorted(found.items()))


def _in_way(workload: Workload, default: Candidate, least: Tile, machine: Machine) -> Kernel:
    """The default's tile the way of `least`, or that one where they don't go together."""
    own = dict(default.knobs)
    if own.keys() == least.keys():
        with contextlib.suppress(ScheduleRefused):
            return build_kernel(workload, replace(default, knobs=tuple(sorted({**own, **dict(_way(least.items()))}.items()))), machine)
    return build_kernel(workload, replace(default, knobs=tuple(sorted({**least, "threads": own["threads"]}.items()))), machine)


def _way(knobs: Iterable[tuple[str, int | str]]) -> Way:
    return tuple(sorted((name, value) for name, value in knobs if isinstance(value, str)))
