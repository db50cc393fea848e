"""What every anchor family offers: its legal candidates, and the kernel for one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from tvm import tirx

from ..values import Candidate, Machine, Workload

Tile = Mapping[str, int | str]


@dataclass(frozen=True)
class Buffer:
    """A dense row-major tensor that a kernel reads or writes."""

    shape: tuple[int, ...]
    dtype: str = "float32"


@dataclass(frozen=True)
class Launch:
    """One call of a PrimFunc. `args` index Kernel.buffers, in the order of the function's parameters; outputs come last.

    flop    of the anchor, where this launch computes it.
    passes  how often it reads its constants.
    """

    func: tirx.PrimFunc
    args: tuple[int, ...]
    outputs: int = 1
    flop: int = 0
    passes: int = 1


@dataclass(frozen=True)
class Packer:
    """How a canonical constant array becomes the packed one: pack(array, *how). Equal ones make equal arrays of equal arrays."""

    pack: Callable[..., np.ndarray]
    how: tuple[Any, ...] = ()

    def __call__(self, array: np.ndarray) -> np.ndarray:
        return self.pack(array, *self.how)


@dataclass(frozen=True)
class Kernel:
    """A workload made executable.

    buffers   the anchor's inputs, then the epilogue's operands, then whatever `launches` need between and as results.
              A constant input is listed in its packed shape.
    inputs    how many of them come from outside (anchor inputs + operands).
    results   which of them are the site's results.
    packers   of the constant inputs, by their index.
    """

    buffers: tuple[Buffer, ...]
    inputs: int
    results: tuple[int, ...]
    launches: tuple[Launch, ...]
    packers: Mapping[int, Packer] = field(default_factory=dict)


class Family(Protocol):
    """One anchor family, one module."""

    def tiles(self, workload: Workload, machine: Machine) -> Sequence[Tile]:
        """All legal tiles with their modes, in the order of the analytic prior. Which there are doesn't depend on that."""

    def candidates(self, workload: Workload, machine: Machine) -> tuple[Candidate, ...]:
        """Every legal candidate, the default first, then in the order of the analytic prior."""

    def kernel(self, workload: Workload, candidate: Candidate, machine: Machine) -> Kernel:
        """Raises ScheduleRefused, with the reason, when the candidate is not legal for the workload."""
