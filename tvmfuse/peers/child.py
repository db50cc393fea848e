"""The process that holds one runtime with one model, and answers its parent over a pipe; only plain values and arrays cross."""

from __future__ import annotations

import importlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import psutil

from .. import compare
from .runtimes import RUNTIMES, Job, Ready

MAX_ERROR = 300  # characters: some compilers print their whole module


# What a runtime's code in `runtimes` imports, where it isn't called as the runtime is.
MODULES = {"float64": "tvmfuse.building", "iree": "iree.runtime", "mnn": "MNN", "tvm": "tvm.relax", "tvmfuse": "tvmfuse.building"}


class Held:
    """What the process keeps between questions; each public method is one."""

    ready: Ready

    def load(self, runtime: str, **job: Any) -> dict[str, float]:
        """Seconds until the first outputs are there, and bytes by which the process then has grown since the runtime was imported."""
        importlib.import_module(MODULES.get(runtime, runtime))
        before, began = _resident(), time.perf_counter()
        self.ready = RUNTIMES[runtime](Job(**job))
        self.ready.call()
        return {"load_s": time.perf_counter() - began, "memory_bytes": _resident() - before}

    def outputs(self) -> dict[str, np.ndarray]:
        return dict(self.ready.outputs())

    def time(self, repeats: int, warm: bool) -> Sequence[float]:
        """Seconds of each of `repeats` calls; `warm` makes one more before them, which brings back what others drove out of the caches."""
        return compare.timer(self.ready.call, time.perf_counter)(repeats, warm)

    def throughput(self, callers: int, seconds: float) -> float:
        """Calls a second of that many threads at a time, each with buffers of its own."""
        assert self.ready.another is not None
        calls = [self.ready.another() for _ in range(callers)]
        counts, barrier = [0] * callers, threading.Barrier(callers + 1)

        def repeat(i: int) -> None:
            calls[i]()
            barrier.wait()
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                calls[i]()
                counts[i] += 1

        threads = [threading.Thread(target=repeat, args=(i,)) for i in range(callers)]
        for thread in threads:
            thread.start()
        barrier.wait()
        began = time.perf_counter()
        for thread in threads:
            thread.join()
        return sum(counts) / (time.perf_counter() - began)


def main(pipe: Connection, log: str, threads: int) -> None:
    """Answer (method, arguments) with (value, None) or (None, error) until the parent hangs up. All that is printed goes to `log`."""
    os.setpgid(0, 0)  # so that it ends together with the compilers that it has started
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted too, and ends this process
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    target = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(target, 1)
    os.dup2(target, 2)
    # Read when a runtime's library is loaded, or at its first parallel call.
    os.environ.update(TVM_NUM_THREADS=str(threads), TVM_BIND_THREADS="0", OMP_NUM_THREADS=str(threads))
    held = Held()
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        answer: tuple[Any, str | None]
        try:
            answer = getattr(held, method)(**arguments), None
        except Exception as error:  # whatever a runtime raises is its result
            answer = None, f"{type(error).__name__}: {' '.join(str(error).split())}"[:MAX_ERROR]
        pipe.send(answer)


def _end_with_parent() -> None:
    """A killed parent hangs up, but what is busy for hours wouldn't hear it. (What is stopped the system ends: its group is an orphan.)"""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)


def _resident() -> int:
    return int(psutil.Process().memory_info().rss)
