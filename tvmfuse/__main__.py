"""Where the command starts, also as `python -m tvmfuse`: from here on Ctrl-C, or SIGTERM, ends it with 130, whatever it is doing."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from types import FrameType

AGAIN_S = 0.2
interrupts: list[int] = []  # the signals that `interrupt` met


def main() -> None:
    """Run the command line; exits with its code."""
    # A signal that is ignored stays so: the shell ignores Ctrl-C for what a script has in the background.
    heeded = [n for n, d in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)) if signal.getsignal(n) is d]
    _meet(heeded, end)
    atexit.register(_meet, heeded, signal.SIG_IGN)  # all is done: from there on Python would let a signal kill it
    _set_stderr_apart()
    from .cli import main as command

    _meet(heeded, interrupt)
    try:
        command(lambda: bool(interrupts))
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        _meet(heeded, end)


def end(number: int, frame: FrameType | None) -> None:
    """Where there is nothing to clean up: while modules are imported, and after a command."""
    os._exit(130)


def interrupt(number: int, frame: FrameType | None) -> None:
    """Let the command clean up, except where it waits for TVM's import: an exception out of that is a segmentation fault."""
    loading = (module.__spec__ for name, module in list(sys.modules.items()) if name.partition(".")[0] in ("tvm", "tvm_ffi"))
    if any(getattr(spec, "_initializing", False) for spec in loading):
        end(number, frame)
    interrupts.append(number)
    if sys.stderr is not None:  # else that number may be any file's
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # TVM complains of each block builder that an exception leaves unfinished
    sys.unraisablehook = lambda _: None  # what a finalizer swallows
    signal.signal(signal.SIGALRM, again)
    signal.setitimer(signal.ITIMER_REAL, AGAIN_S, AGAIN_S)
    raise KeyboardInterrupt


def again(number: int, frame: FrameType | None) -> None:
    """Finalizers and some of TVM's callbacks swallow an exception: it is lost where nothing that runs is handling one.

    So who ends the process without raising it further has to do so in the very handler.
    """
    if sys.exc_info()[0] is None:
        raise KeyboardInterrupt


def _meet(signals: list[signal.Signals], handler: signal._HANDLER) -> None:
    for number in signals:
        signal.signal(number, handler)


def _set_stderr_apart() -> None:
    """So that `interrupt` can silence what native code writes, and nothing else."""
    if sys.stderr is not None:
        kept = sys.stderr
        sys.stderr = open(os.dup(2), "w", encoding=kept.encoding, errors=kept.errors, buffering=1)  # noqa: SIM115


if __name__ == "__main__":
    main()
