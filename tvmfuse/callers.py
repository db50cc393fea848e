"""Which operating system thread starts a model's parallel loops.

TVM gives each thread that starts one a pool of workers, for the life of the process: 200 short-lived callers left 523 threads and a
busy core. So there are two such threads at most: the first that comes calls its models itself, at no cost; all others hand their calls
to one thread that is kept for them, which takes some 20 us and makes them take turns. They would want the same cores anyway.
"""

from __future__ import annotations

import concurrent.futures
import os
import threading
from collections.abc import Callable


class _Role(threading.local):
    starts_loops = False


_role = _Role()
_lock = threading.Lock()
_came = False
_kept: concurrent.futures.ThreadPoolExecutor | None = None


def call(function: Callable[[], object]) -> None:
    """`function()`, which has parallel loops, in a thread that may start them."""
    if _role.starts_loops:
        function()
        return
    kept = _claim()
    if kept is None:
        function()
    else:
        kept.submit(function).result()


def _claim() -> concurrent.futures.Executor | None:
    """Make the caller the thread that starts loops, if none came before it (None); else who does it instead."""
    global _came, _kept
    with _lock:
        if not _came:
            _came = _role.starts_loops = True
            return None
        if _kept is None:
            _kept = concurrent.futures.ThreadPoolExecutor(1, "tvmfuse", lambda: setattr(_role, "starts_loops", True))
        return _kept


def _forked() -> None:
    """The child has no workers, not even those of the thread that lives on in it: a new thread is kept for its calls."""
    global _lock, _kept
    _lock, _kept, _role.starts_loops = threading.Lock(), None, False


os.register_at_fork(after_in_child=_forked)
