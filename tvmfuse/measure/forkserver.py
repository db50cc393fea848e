"""Processes that start in milliseconds: forked from one that has imported TVM and done nothing else.

A fresh interpreter needs over a second to import TVM, and a look at one site takes three processes. A forked one has a heap, thread
pool and caches of its own, and `worker` maps its kernels and buffers at addresses of its own. The server outlives neither its parent nor
what it has forked: when the parent is gone, it kills its children, also those that hang in a kernel.

    {"threads": 2, "relay": false} and a socket  ->  {"pid": 4711}    a child answers on that socket, as `worker` says
    {"reap": 4711}                               ->  {"status": -11}  exit status as subprocess has it; null while it runs
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from ..errors import DeviceError, DeviceLost

START_TIMEOUT_S = 180.0  # the server itself, which imports TVM: two seconds here, a minute on a small board that does other things too
DEATH_TIMEOUT_S = 5.0
MAX_REQUEST = 4096


class ForkServer:
    """The parent's end. Usable from several threads; close it, or use it as a context manager.

    Raises DeviceLost, on a start, when the server didn't come up or is gone.
    """

    def __init__(self) -> None:
        environment = os.environ | {
            "TVM_BIND_THREADS": "0",  # TVM would pin its workers, not the main thread: every second process would be slow
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",  # NumPy's: a process that has threads can't be forked
            "PYTHONPATH": os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")))),
        }
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.forkserver"],
                stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment,
            )  # fmt: skip

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, threads: int, relay: bool = False) -> Worker:
        """A process that nothing has run in, whose kernels may use so many threads; a relay holds a connection to a device instead."""
        ours, theirs = socket.socketpair()
        with theirs:
            answer = self._ask({"threads": threads, "relay": relay}, START_TIMEOUT_S, theirs.fileno())
        return Worker(self, int(answer["pid"]), ours)

    def reap(self, pid: int) -> int | None:
        return self._ask({"reap": pid}, 2 * DEATH_TIMEOUT_S)["status"]

    def _ask(self, request: dict[str, Any], timeout_s: float, *fds: int) -> dict[str, Any]:
        with self._lock:
            self._control.settimeout(timeout_s)
            try:
                socket.send_fds(self._control, [json.dumps(request).encode()], fds)
                answer = self._control.recv(MAX_REQUEST)
            except OSError as error:
                raise DeviceLost(f"the process that starts measuring processes doesn't answer: {error}") from error
            if not answer:
                raise DeviceLost("the process that starts measuring processes died")
        return json.loads(answer)

    def close(self) -> None:
        """The server kills what it has forked, and ends."""
        self._control.close()
        try:
            self._process.wait(DEATH_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Worker:
    """The parent's end of a forked process; what that can't survive becomes a DeviceError here, and it is gone."""

    def __init__(self, server: ForkServer, pid: int, connection: socket.socket) -> None:
        self._server, self.pid, self._connection = server, pid, connection
        self._received = b""
        self.alive = True

    def ask(self, do: str, timeout_s: float, **arguments: Any) -> Any:
        """Raises DeviceError when the request fails, or when the process dies, is dead or doesn't answer in time."""
        if not self.alive:
            raise DeviceError("the process is gone")
        try:
            self._connection.settimeout(timeout_s)
            self._connection.sendall(json.dumps({"do": do, **arguments}).encode() + b"\n")
            answer = json.loads(self._line(timeout_s))
        except TimeoutError:
            self.close()
            raise DeviceError(f"no answer within {timeout_s:.0f} s") from None
        except (OSError, EOFError):
            raise DeviceError(f"the process died: {self._cause_of_death()}") from None
        if "error" in answer:
            raise DeviceError(answer["error"])
        return answer["value"]

    def _line(self, timeout_s: float) -> bytes:
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._received:
            self._connection.settimeout(max(1e-3, deadline - time.monotonic()))
            chunk = self._connection.recv(1 << 16)
            if not chunk:
                raise EOFError
            self._received += chunk
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _cause_of_death(self) -> str:
        status = self._server.reap(self.pid)
        if status is None:
            self.close()
            return "it closed its connection and stayed"
        self._forget()
        if status >= 0:
            return f"exit status {status}"
        memory = " (out of memory?)" if -status == signal.SIGKILL else ""
        return f"{signal.Signals(-status).name}{memory}"

    def close(self) -> None:
        """Kill the process. It is a child of the server, and a zombie until reaped: its number can't be another's."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            with contextlib.suppress(DeviceLost):
                self._server.reap(self.pid)
            self._forget()

    def _forget(self) -> None:
        self._connection.close()
        self.alive = False


# the server


def main() -> None:
    """Fork on request until the parent is gone."""
    from . import worker  # what is slow to import, once for all children

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group: the parent decides
    control = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a child that held the socket would hide from the parent that the server is gone
    gc.freeze()  # a collection in a child would copy every page that it looks at
    children: set[int] = set()
    try:
        while True:
            message, fds, _, _ = socket.recv_fds(control, MAX_REQUEST, 1)
            if not message:
                return
            request = json.loads(message)
            if "reap" in request:
                answer = {"status": _reap(request["reap"], children)}
            else:
                pid = os.fork()
                if pid == 0:
                    children.clear()
                    control.close()
                    worker.main(socket.socket(fileno=fds[0]), request["threads"], _relay() if request["relay"] else worker.Bench())
                    os._exit(0)
                os.close(fds[0])
                children.add(pid)
                answer = {"pid": pid}
            control.sendall(json.dumps(answer).encode())
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)


def _relay() -> object:
    from .relay import Relay  # brings in RPC, which few processes need

    return Relay()


def _reap(pid: int, children: set[int]) -> int | None:
    deadline = time.monotonic() + DEATH_TIMEOUT_S
    while pid in children and time.monotonic() < deadline:
        reaped, status = os.waitpid(pid, os.WNOHANG)
        if reaped:
            children.remove(pid)
            return os.waitstatus_to_exitcode(status)
        time.sleep(1e-3)
    return None


if __name__ == "__main__":
    main()
