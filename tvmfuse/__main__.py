"""Where the command starts, also as `python -m tvmfuse`: from here on Ctrl-C ends it with 130, whatever it is doing."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

interrupts: list[int] = []  # the signals that `interrupt` met


def main() -> None:
    """Run the command line; exits with its code."""
    heeds = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not in the background of a script, which has it ignored
    if heeds:
        signal.signal(signal.SIGINT, end)
    from .cli import main as command

    if heeds:
        signal.signal(signal.SIGINT, interrupt)
    try:
        command(lambda: bool(interrupts))
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        if heeds:
            signal.signal(signal.SIGINT, end)


def end(number: int, frame: FrameType | None) -> None:
    """Where there is nothing to clean up: while modules are imported, and after a command."""
    os._exit(130)


def interrupt(number: int, frame: FrameType | None) -> None:
    """Let the command clean up, except where it waits for TVM's import: an exception out of that is a segmentation fault."""
    loading = (module.__spec__ for name, module in list(sys.modules.items()) if name.partition(".")[0] in ("tvm", "tvm_ffi"))
    if any(getattr(spec, "_initializing", False) for spec in loading):
        end(number, frame)
    interrupts.append(number)
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
