"""Whole models side by side in a fresh process on a device, each with buffers of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from ..errors import WrongBits
from ..values import View
from .device import SEED, Place, stored, transfer_s

LOAD_TIMEOUT_S = 120.0
TIMEOUT_S = 300.0
Sample = Callable[[int, int, int], float]
"""sample(slot, repeats, tries): seconds of a call of the model in a slot, the least of `tries` means over `repeats` calls."""


@dataclass(frozen=True)
class Model:
    """A compiled model in files.

    library          has main(*inputs, *outputs, *views). inputs, outputs: (shape, dtype) of each.
    weights          (bytes as .npy, digest) of each. views, workspace: as `kernel.memory.Memory` has them.
    """

    library: Path
    inputs: tuple[tuple[tuple[int, ...], str], ...]
    outputs: tuple[tuple[tuple[int, ...], str], ...]
    weights: tuple[tuple[Path, str], ...]
    views: tuple[View, ...]
    workspace: int


def stored_bytes(weight: np.ndarray, folder: Path) -> tuple[Path, str]:
    """As `stored`: views take parts of a weight as what they are; models share it."""
    return stored(np.ascontiguousarray(weight).reshape(-1).view(np.uint8), folder)


@contextlib.contextmanager
def opened(place: Place, models: Sequence[Model], threads: int, same_bits: bool) -> Iterator[Sample]:
    """A fresh process with these models in slots 0, 1, ...; models may repeat, and share no more than their weights.

    same_bits  whether their outputs have to be equal on the same input before anything is timed.
    Raises     WrongBits when they differ, DeviceError when a model crashes or hangs, DeviceLost when the place is gone.
    """
    place.end_screening()
    with contextlib.closing(place.start(threads)) as runner:
        runner.ask("open", LOAD_TIMEOUT_S, streamed=0, threads=threads, seed=SEED)
        for slot, model in enumerate(models):
            weights = [(place.put(path), digest) for path, digest in model.weights]
            timeout_s = LOAD_TIMEOUT_S + transfer_s(path for path, _ in model.weights)
            differing = runner.ask(
                "load_model", timeout_s, slot=slot, library=place.put(model.library), inputs=model.inputs, outputs=model.outputs,
                weights=weights, views=[asdict(view) for view in model.views], workspace=model.workspace,
            )  # fmt: skip
            if same_bits:
                refuse_differing(differing)
        yield lambda slot, repeats, tries: runner.ask("time_model", TIMEOUT_S, slot=slot, repeats=repeats, tries=tries)


def refuse_differing(elements: int) -> None:
    """Raises WrongBits when any elements of two models' outputs differ."""
    if elements:
        raise WrongBits(f"wrong bits: {elements} elements of the whole model's outputs depend on its placements; report this")
