"""Each runtime at work in a process of its own, stopped whenever it isn't its turn.

A stopped process can't spin: some runtimes keep their threads awake for a while after a call, in what would be the next one's time.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Mapping
from multiprocessing import resource_tracker
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from ..errors import DeviceError
from . import ANSWER_TIMEOUT_S
from .child import MAX_ERROR, main


class Process:
    """One runtime with one model, loaded in a process of its own, which runs only while it is asked something.

    Use it as a context manager. What fails in the process, or ends it, is a DeviceError here.
    """

    def __init__(
        self, runtime: str, model: str, feeds: Mapping[str, np.ndarray], outputs: tuple[str, ...], threads: int = 1, **options: Any
    ) -> None:
        """Arguments as `runtimes.Job` has them."""
        job = {"model": model, "feeds": dict(feeds), "outputs": outputs, "threads": threads, "options": options}
        self._threads, self._load = threads, {"runtime": runtime, **job}

    def __enter__(self) -> Process:
        self._closed = False
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        descriptor, self._log = tempfile.mkstemp(prefix="tvmfuse-", suffix=".log")
        os.close(descriptor)
        self._process = spawn.Process(target=main, args=(theirs, self._log, self._threads), daemon=True)
        resource_tracker.ensure_running()  # which lets interrupts through again once it has started
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the process has it blocked until it ignores it
        try:
            self._process.start()
        except BaseException:  # Ctrl-C: a block that isn't entered isn't left either
            self.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        theirs.close()
        return self

    def __exit__(self, _type: type[BaseException] | None, _value: BaseException | None, _traceback: TracebackType | None) -> None:
        self.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def close(self) -> None:
        """End the process and what it has started; may be called again."""
        if self._closed:
            return
        self._closed = True
        if self._process.pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # its group is not there before it has come that far
                os.killpg(self.pid, signal.SIGKILL)
            self._process.kill()
            self._process.join()
        self._pipe.close()
        Path(self._log).unlink(missing_ok=True)

    def load(self, patience_s: float = ANSWER_TIMEOUT_S) -> dict[str, float]:
        """`load_s` until the first outputs are there, and `memory_bytes` by which the process has grown since it imported the runtime."""
        return self._ask("load", patience_s, **self._load)

    def outputs(self) -> dict[str, np.ndarray]:
        return self._ask("outputs")

    def time(self, repeats: int, warm: bool = True) -> list[float]:
        """Seconds of each of `repeats` calls, after one that is not timed if `warm`."""
        return self._ask("time", repeats=repeats, warm=warm)

    def throughput(self, callers: int, seconds: float) -> float:
        """Calls a second of `callers` threads at a time, each with buffers of its own."""
        return self._ask("throughput", callers=callers, seconds=seconds)

    def _ask(self, method: str, patience_s: float = ANSWER_TIMEOUT_S, /, **arguments: Any) -> Any:
        try:
            os.kill(self.pid, signal.SIGCONT)
            self._pipe.send((method, arguments))
            if not self._pipe.poll(patience_s):
                raise DeviceError(f"no answer within {patience_s:.0f} s")
            value, error = self._pipe.recv()
            os.kill(self.pid, signal.SIGSTOP)
        except (EOFError, OSError):
            raise DeviceError(f"the process died{self._last_words()}") from None
        if error is not None:
            raise DeviceError(error)
        return value

    def _last_words(self) -> str:
        self._process.join(5)
        status = self._process.exitcode
        ended = f" with {signal.Signals(-status).name}" if status and status < 0 else f" with exit status {status}"
        with contextlib.suppress(OSError):
            lines = Path(self._log).read_text(errors="replace").strip().splitlines()
            return f"{ended}: {lines[-1][:MAX_ERROR]}" if lines else ended
        return ended
