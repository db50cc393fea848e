"""Our code for a model beside that of other runtimes: latency, throughput, memory and error, in one interleaved run."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import platformdirs
from onnx import ModelProto

from . import compare
from .errors import DeviceError
from .files import written
from .peers import ANSWER_TIMEOUT_S, PEERS
from .peers.process import Process

Arrays = Mapping[str, np.ndarray]
Progress = Callable[[str], None]
THROUGHPUT_S = 1.0
LOADING = 2  # processes that load at a time; nothing is timed meanwhile


@dataclasses.dataclass(frozen=True, eq=False)
class Entry:
    """A runner to enter: a runtime of `peers.runtimes`, its threads, and its options.

    reason  why it can't be entered. patience_s: how long it may take to load.
    """

    name: str
    runtime: str
    threads: int = 1
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    reason: str | None = None
    patience_s: float = ANSWER_TIMEOUT_S


def ours(name: str, threads: int, **options: Any) -> list[Entry]:
    """tvmfuse twice: the second is the control, in a process of its own, since a process can be slow for life."""
    return [Entry(label, "tvmfuse", threads, options) for label in (name, f"{name} (A/A)")]


def others(names: Sequence[str], threads: int) -> list[Entry]:
    """Peers on one thread and, where they can, on `threads`; a peer that isn't installed is there with its reason."""
    found = []
    for name in names:
        peer = PEERS[name]
        for count in dict.fromkeys((1, threads if peer.threaded else 1)):
            found.append(Entry(name, peer.runtime or name, count, peer.options, peer.absent(), peer.patience_s))
    return found


def bench(
    title: str,
    model: ModelProto,
    feeds: Arrays,
    entries: Sequence[Entry],
    seconds: float,
    *,
    reference: bool = True,
    callers: int = 0,
    progress: Progress = lambda _: None,
) -> list[compare.Row]:
    """A row for each entry, in their order; all that could be loaded are timed in one interleaved run.

    model      any free dimension is bound by the shapes of `feeds`.
    seconds    of timing. reference: state each runner's error against a float64 run, which is kept in the user's cache folder.
    callers    measure the throughput of our rows with that many threads calling at a time; 0 for none.
    progress   told what is being done.
    """
    outputs = tuple(value.name for value in model.graph.output)
    feeds = {value.name: np.ascontiguousarray(feeds[value.name]) for value in model.graph.input if value.name in feeds}
    rows = {entry: compare.Row(title, entry.name, entry.threads, reason=entry.reason) for entry in entries}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tvmfuse-")))
        path = str(folder / "model.onnx")
        onnx.save(static(model, feeds), path)
        exact = float64(path, feeds, outputs, progress) if reference else None

        def load(entry: Entry) -> tuple[Process, compare.Row] | str:
            process = stack.enter_context(Process(entry.runtime, path, feeds, outputs, entry.threads, **entry.options))
            try:
                loaded = process.load(entry.patience_s)
                found = process.outputs()
            except DeviceError as failure:
                process.close()
                return str(failure)
            error = compare.difference(exact, found) if exact is not None else None
            bits = " ".join(compare.digest(found[name])[:16] for name in outputs)
            return process, dataclasses.replace(rows[entry], error=error, bits=bits, **loaded)  # type: ignore[arg-type]

        timed: dict[Entry, Process] = {}
        progress("loading")
        wanted = [entry for entry in entries if entry.reason is None]
        # Left after the processes, so that an interrupt doesn't wait for one that takes long to load
        pool = stack.enter_context(ThreadPoolExecutor(LOADING))
        for entry, result in zip(wanted, pool.map(load, wanted), strict=True):
            if isinstance(result, str):
                rows[entry] = dataclasses.replace(rows[entry], reason=result)
            else:
                timed[entry], rows[entry] = result
        progress("timing")
        times = _times(rows, timed, seconds)
        for entry, measured in times.items():
            first = next(iter(times.values()))
            rows[entry] = dataclasses.replace(
                rows[entry],
                median_s=statistics.median(measured.samples),
                ratio=compare.ratio(first.samples, measured.samples),
                percentiles_s=compare.percentiles(measured.calls),
                samples_s=measured.samples,
            )
            if callers and entry.runtime == "tvmfuse":
                rows[entry] = dataclasses.replace(rows[entry], calls_per_s=timed[entry].throughput(callers, THROUGHPUT_S))
    return list(rows.values())


def _times(rows: dict[Entry, compare.Row], timed: dict[Entry, Process], seconds: float) -> dict[Entry, compare.Times]:
    """Times of all that keep running; one that fails meanwhile is put aside with its reason, and the others start again."""
    while timed:
        failed: list[Entry] = []
        named = {str(i): entry for i, entry in enumerate(timed)}
        timers = {key: _timer(entry, timed[entry], rows, failed) for key, entry in named.items()}
        try:
            found = compare.interleave(timers, seconds, time.perf_counter)
            return {named[key]: measured for key, measured in found.items()}
        except DeviceError:
            for entry in failed:
                del timed[entry]
    return {}


def _timer(entry: Entry, process: Process, rows: dict[Entry, compare.Row], failed: list[Entry]) -> compare.Timer:
    def time(repeats: int, warm: bool) -> list[float]:
        try:
            return process.time(repeats, warm)
        except DeviceError as failure:
            rows[entry] = dataclasses.replace(rows[entry], reason=str(failure))
            failed.append(entry)
            raise

    return time


def static(model: ModelProto, feeds: Arrays) -> ModelProto:
    """A copy whose inputs have the shapes of `feeds`; of the outputs and of what is in between, free dimensions stay unnamed."""
    copy = ModelProto()
    copy.CopyFrom(model)
    del copy.graph.value_info[:]
    bound: dict[str, int] = {}
    for value in copy.graph.input:
        if value.name in feeds:
            for dim, extent in zip(value.type.tensor_type.shape.dim, feeds[value.name].shape, strict=True):
                if dim.dim_param:
                    bound[dim.dim_param] = extent
                dim.dim_value = extent
    for value in copy.graph.output:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in bound:
                dim.dim_value = bound[dim.dim_param]
            elif not dim.HasField("dim_value"):
                dim.Clear()
    return copy


def float64(model: str, feeds: Arrays, outputs: tuple[str, ...], progress: Progress) -> dict[str, np.ndarray] | None:
    """The outputs of a float64 run, computed once for a model and its feeds; None where it can't be compiled in float64."""
    digest = hashlib.sha256(Path(model).read_bytes())
    for name, x in feeds.items():
        digest.update(name.encode() + x.tobytes())
    kept = platformdirs.user_cache_path("tvmfuse") / "float64" / f"{digest.hexdigest()[:32]}.npz"
    if kept.exists():
        with np.load(kept) as file:
            return {name: file[f"{i}"] for i, name in enumerate(outputs)}
    progress("computing in float64")
    with Process("float64", model, feeds, outputs, threads=2) as process:
        try:
            process.load()
            exact = process.outputs()
        except DeviceError as failure:
            progress(f"no float64 run: {failure}")
            return None
    kept.parent.mkdir(parents=True, exist_ok=True)
    with written(kept) as partial, partial.open("wb") as file:
        np.savez(file, **{f"{i}": exact[name] for i, name in enumerate(outputs)})  # type: ignore[arg-type]
    return exact
