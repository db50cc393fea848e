"""This machine as a measuring device for others: TVM's RPC server, with functions that say what it is and run our processes.

    tvmfuse.ask(request) -> answer, both JSON
    {"do": "describe"}                                           ->  {"value": {"host": ..., "target": ..., "processors": 4, ...}}
    {"do": "start", "threads": 2}                                ->  {"value": 0}, the number of a fresh process
    {"do": "ask", "runner": 0, "timeout_s": 60, "request": ...}  ->  what `worker` answers, or {"error": ..., "alive": false}
    {"do": "close", "runner": 0}                                 ->  {"value": null}

TVM forks a process for each client, and these functions run in it; kernels run in children of that, so that one that crashes is an
answer and not the end of the connection. What a client sends is run as it is: there is no protection but who can reach the port.
"""

from __future__ import annotations

import json
import signal
import socket
from dataclasses import asdict
from typing import Any

import psutil
import tvm_ffi
from tvm.rpc.server import PopenRPCServerState
from tvm.target import Target, codegen

from ..errors import DeviceError, DeviceLost
from ..processors import default_threads
from .forkserver import ForkServer, Worker
from .host import host, host_target, toolchain

PORTS = 100  # tried from the given one on
CONNECT_TIMEOUT_S = 5.0
ASK = "tvmfuse.ask"


class _Client:
    """What one connection has started; it ends with the connection's process."""

    def __init__(self) -> None:
        self._server: ForkServer | None = None
        self._runners: dict[int, Worker] = {}

    def describe(self) -> dict[str, Any]:
        return describe()

    def start(self, threads: int) -> int:
        self._server = self._server or ForkServer()
        number = max(self._runners, default=-1) + 1
        self._runners[number] = self._server.start(threads)
        return number

    def ask(self, runner: int, timeout_s: float, request: dict[str, Any]) -> Any:
        return self._runners[runner].ask(request.pop("do"), timeout_s, **request)

    def alive(self, runner: int) -> bool:
        return runner in self._runners and self._runners[runner].alive

    def close(self, runner: int) -> None:
        self._runners.pop(runner).close()


def describe() -> dict[str, Any]:
    """What a client has to know to compile for this machine."""
    target = Target({**json.loads(str(host_target())), "mtriple": str(codegen.llvm_get_system_triple())})
    return {"host": asdict(host()), "target": str(target), "processors": default_threads(), "toolchain": toolchain()}


def answer_clients() -> None:
    """Register `tvmfuse.ask` in this process and those that TVM's server forks from it."""
    client = _Client()

    def ask(request: str) -> str:
        wanted = json.loads(request)
        try:
            return json.dumps({"value": getattr(client, wanted.pop("do"))(**wanted)})
        except DeviceError as error:
            return json.dumps({"error": str(error), "alive": client.alive(wanted["runner"])})
        except DeviceLost as error:
            return json.dumps({"lost": str(error)})

    tvm_ffi.register_global_func(ASK, ask, override=True)


class DeviceServer:
    """A running server, to be waited for; as a context manager it leaves no process behind.

    host, port  where it listens: the first free port from this one on. tracker: (host, port) to register with, under `key`.
    Raises      DeviceLost when there is no tracker, or no free port.
    """

    def __init__(self, host: str, port: int, tracker: tuple[str, int] | None, key: str) -> None:
        if tracker:
            try:
                socket.create_connection(tracker, CONNECT_TIMEOUT_S).close()
            except OSError as error:
                raise DeviceLost(f"no RPC tracker at {tracker[0]}:{tracker[1]}: {error.strerror or error}") from error
        answer_clients()
        try:
            self._state = PopenRPCServerState(host, port, port + PORTS, tracker_addr=tracker, key=key, silent=True)
        except (OSError, ValueError) as error:
            raise DeviceLost(f"can't listen on {host}:{port}: {error}") from error

    @property
    def port(self) -> int:
        return self._state.port

    def __enter__(self) -> DeviceServer:
        return self

    def __exit__(self, *_: object) -> None:
        for child in psutil.Process().children(recursive=True):
            child.send_signal(signal.SIGKILL)

    def wait(self) -> None:
        """Serve until interrupted. Raises DeviceLost when TVM's server ends by itself, as it does when a client's process is killed."""
        while self._state.thread.is_alive():
            self._state.thread.join(0.5)
        raise DeviceLost("TVM's RPC server ended: the process of one connection was killed, or the tracker is gone")
