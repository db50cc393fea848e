"""`tvmfuse serve`."""

from __future__ import annotations

import os
import signal
import sys
from typing import Annotated, NoReturn

import typer

from ..errors import TvmfuseError, UsageError
from .output import say


def serve(
    tracker: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="The TVM RPC tracker to register with.")] = None,
    key: Annotated[str, typer.Option(help="The name under which tuning runs find this device.")] = "tvmfuse",
    host: Annotated[str, typer.Option(help="The address to listen on. Whoever reaches it can run anything here.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="The first port to try.")] = 9090,
) -> None:
    """Let others measure on this machine, until interrupted.

    TVM's RPC runs whatever it is sent, without asking who sends it. So it listens on this machine's own address alone: reach it through
    a tunnel (ssh -R), or name another address on a network where everybody may run everything here.
    """
    from ..measure.serve import DeviceServer  # brings in TVM, which --help doesn't wait for

    address, separator, number = (tracker or "").rpartition(":")
    if tracker and not (separator and address and number.isdigit() and 0 < int(number) < 1 << 16):
        raise UsageError(f"--tracker takes HOST:PORT; not {tracker!r}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with DeviceServer(host, port, (address, int(number)) if tracker else None, key) as server:
            registered = f", registered with {tracker} as {key!r}" if tracker else ""
            say(f"measuring for whoever reaches {host}:{server.port}{registered}; Ctrl-C ends it")
            server.wait()
    except KeyboardInterrupt:
        _end("ended", 130)
    except TvmfuseError as error:
        _end(f"tvmfuse: {error}", error.exit_code)


def _end(said: str, status: int) -> NoReturn:
    """At once: TVM's listening thread would keep the process."""
    say(said)
    sys.stderr.flush()
    os._exit(status)
