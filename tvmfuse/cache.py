"""Compiled models in the user's cache folder, each under the digest of all that it was made of.

The unit is the whole artifact: passes over the graph take as long as the compiler's back end, and only what is keyed by a build's
inputs saves both. Equal kernels of one model are compiled once anyway. What is found is mapped, so that processes share its weights.
TVMFUSE_CACHE moves the folder, or switches the cache off ("off").
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import mmap
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import platformdirs

from . import artifact
from .artifact import Program
from .errors import ModelError, TargetMismatch, UsageError
from .measure.host import host, toolchain

VARIABLE = "TVMFUSE_CACHE"
OFF = "off"
LIMIT_BYTES = 2 << 30
ABANDONED_S = 3600.0  # a file that is still being written after that belongs to a process that was killed


def folder() -> Path | None:
    """Where compiled models are kept; None when the cache is switched off."""
    chosen = os.environ.get(VARIABLE)
    if chosen and chosen.lower() == OFF:
        return None
    return (Path(chosen) if chosen else platformdirs.user_cache_path("tvmfuse")) / "models"


def key(model: Any, shapes: Mapping[str, Any] | None, *made_of: object) -> str | None:
    """Of a build for this CPU: its arguments, this machine, the toolchain and this package's source. None for what can't be told apart."""
    content = _content(model)
    if content is None or folder() is None:
        return None
    bound = sorted((shapes or {}).items())
    return hashlib.sha256(repr((content, bound, made_of, host().key, toolchain(), _source())).encode()).hexdigest()[:32]


def find(key: str) -> Program | None:
    """The program under a key, if a whole one is there."""
    with contextlib.suppress(ModelError, TargetMismatch, OSError):
        program = artifact.load(path := _path(key))
        os.utime(path)
        return program
    return None


def keep(program: Program, key: str) -> Program | None:
    """Put a program under a key and map it from there; None, with a warning, when the folder can't be written, or is full.

    A program with NaN among its weights isn't kept either: building it warns of them each time.
    """
    if any(array.dtype.kind == "f" and np.isnan(array).any() for array in program.weights):
        return None
    try:
        _path(key).parent.mkdir(parents=True, exist_ok=True)
        artifact.save(program, _path(key))
        _evict(_path(key))
    except (UsageError, OSError) as error:
        warnings.warn(
            f"the compiled model isn't kept for the next build: {error}; {VARIABLE} names another folder, or is {OFF}", stacklevel=3
        )
        return None
    return find(key)


def _path(key: str) -> Path:
    chosen = folder()
    assert chosen is not None
    return chosen / f"{key}.tvmfuse"


def _evict(newest: Path) -> None:
    """Remove what was used longest ago until the rest is within the limit, and what was never finished."""
    total = 0
    for path, state in sorted(_states(newest.parent), key=lambda entry: -entry[1].st_mtime):
        total += state.st_size
        unfinished = path.suffix == ".part" and state.st_mtime < time.time() - ABANDONED_S
        if unfinished or (total > LIMIT_BYTES and path.suffix == ".tvmfuse" and path != newest):
            path.unlink(missing_ok=True)


def _states(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process evicts too
            yield path, path.stat()


def _content(model: Any) -> str | None:
    """A digest of a model's file or proto; None for what has none that is cheap: a Relax module, or weights in further files."""
    if isinstance(model, onnx.ModelProto):
        try:
            return hashlib.sha256(model.SerializeToString(deterministic=True)).hexdigest()
        except Exception:  # over 2 GiB, which protobuf's releases refuse with different errors
            return None
    if not isinstance(model, str | os.PathLike) or not os.path.isfile(model):
        return None
    try:
        with open(model, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return None if content.find(b"location") >= 0 else hashlib.sha256(content).hexdigest()
    except (OSError, ValueError):  # absent, a folder, empty: building it says so
        return None


@functools.cache
def _source() -> str:
    """Of this package, which decides what a model becomes."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
