"""Arrays as files: what `tvmfuse run` reads, draws, writes and says of them."""

from __future__ import annotations

import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..compare import draw
from ..errors import UsageError
from ..files import written

if TYPE_CHECKING:
    from ..values import TensorInfo


def read(texts: Sequence[str]) -> dict[str, np.ndarray]:
    """["x=a.npy"] -> {"x": the array}. Raises UsageError for what is no such text, or no file that holds an array."""
    feeds: dict[str, np.ndarray] = {}
    for text in texts:
        name, _, path = text.partition("=")
        if not path:
            raise UsageError(f"--input takes NAME=FILE.npy; not {text!r}")
        if name in feeds:
            raise UsageError(f"--input is given twice for {name!r}: keep one of them")
        feeds[name] = _read(name, path)
    return feeds


def _read(name: str, path: str) -> np.ndarray:
    prefix = np.lib.format.MAGIC_PREFIX
    try:
        with open(path, "rb") as file:
            found = file.read(len(prefix))
            file.seek(0)
            if found == prefix:
                return np.lib.format.read_array(file, allow_pickle=False)
        why = "is not a .npy file"
    except OSError as error:
        why = f"can't be read: {(error.strerror or str(error)).lower()}"
    except Exception:  # NumPy's parser of headers has no error of its own
        why = "is damaged, cut short or holds Python objects, which are never unpickled"
    raise UsageError(f"--input {name}: {path} {why}; write an array there with numpy.save")


def drawn(inputs: Sequence[TensorInfo], seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {info.name: draw(rng, info.shape, info.dtype) for info in inputs}


def described(x: np.ndarray) -> dict[str, Any]:
    """Shape, type and extremes; None for what is not a finite number: JSON has no NaN."""
    found = {"min": x.min(), "mean": x.mean(), "max": x.max()} if x.size else dict.fromkeys(("min", "mean", "max"), np.nan)
    extremes = {name: float(value) if np.isfinite(value) else None for name, value in found.items()}
    return {"shape": x.shape, "dtype": str(x.dtype), **extremes}


def write(folder: Path, results: Mapping[str, np.ndarray]) -> None:
    """One .npy each, named after the output with what a file name can't hold percent-encoded; each appears whole or not at all."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"can't write to {folder}: {error.strerror or error}") from error
    for name, value in results.items():
        with written(folder / f"{urllib.parse.quote(name, safe='')}.npy") as partial, partial.open("wb") as file:
            np.save(file, value)
