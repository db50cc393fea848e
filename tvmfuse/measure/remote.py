"""Devices behind a TVM RPC tracker: who they are, and places to measure on.

Each connection is held by a process of ours (`relay`): TVM's RPC has no timeouts, and a device that is switched off never answers. A
device that runs `tvmfuse serve` says what its CPU is and measures as it is done here. TVM's own server gives a CPU's name, its vendor
and a triple; there every connection counts as a fresh process, features are those that LLVM knows of the name, caches are guessed, and
before each run operands are flushed from the caches instead of being put as the model leaves them.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvm.target import Target

from ..errors import DeviceError, DeviceLost, UsageError
from ..values import Host, Machine
from .device import Place, Runner, transfer_s
from .forkserver import START_TIMEOUT_S, ForkServer, Worker
from .host import target_features

TRACKER_TIMEOUT_S = 15.0
ACQUIRE_TIMEOUT_S = 120.0  # a small board takes half of that to end what the connection before has left, and to start anew
TRANSFER_TIMEOUT_S = 300.0  # a small board's linker takes minutes for a whole model
ANSWER_MARGIN_S = 30.0  # the device itself says when a kernel hangs; this long after that the device counts as gone
MOST_DEVICES = 256


@dataclass(frozen=True)
class Identity:
    """What a device says of itself; `complete` where `tvmfuse serve` runs."""

    host: Host
    target: Target
    processors: int
    complete: bool

    @staticmethod
    def of(said: Mapping[str, Any]) -> Identity:
        target = Target(json.loads(said["target"]))
        if "host" in said:
            host = Host(**{**said["host"], "features": tuple(said["host"]["features"])})
            return Identity(host, target, int(said["processors"]), complete=True)
        plain = Machine
        name = str(target.attrs.get("mcpu", "generic"))
        features = tuple(sorted(target_features(target)))
        return Identity(Host(said["vendor"] or "unknown", 0, 0, 0, features, plain.l1, plain.l2, plain.l3, name), target, 1, complete=False)


class RemotePlace(Place):
    """A device: a connection of ours, and the processes behind it."""

    def __init__(self, relay: Worker, said: Mapping[str, Any], label: str) -> None:
        self.identity = Identity.of(said)
        self._relay, self._label = relay, label
        self._uploaded: dict[Path, str] = {}

    def call(self, do: str, timeout_s: float, **arguments: Any) -> Any:
        """A request to the relay. Raises DeviceLost when it doesn't answer or its connection fails."""
        try:
            return self._relay.ask(do, timeout_s, **arguments)
        except DeviceError as error:
            self._relay.close()
            raise DeviceLost(f"{self._label}: {_first_line(error)}") from error

    def start(self, threads: int) -> Runner:
        if self.identity.complete:
            number = self.request({"do": "start", "threads": threads}, START_TIMEOUT_S + ANSWER_MARGIN_S)
            return _Served(self, number)
        self._uploaded.clear()  # they are the connection's
        self.call("fresh", ACQUIRE_TIMEOUT_S)
        return _Stock(self)

    def request(self, request: dict[str, Any], timeout_s: float) -> Any:
        """A request to `tvmfuse serve`. Raises DeviceError for what a process there said."""
        answer = self.call("ask", timeout_s, request=request)
        if "lost" in answer:
            raise DeviceLost(f"{self._label}: {answer['lost']}")
        if "error" in answer:
            raise _RunnerError(answer["error"], answer["alive"])
        return answer["value"]

    def put(self, path: Path) -> str:
        if path.suffix == ".npy" and not self.identity.complete:
            return str(path)  # the relay reads it, and sends a tensor
        for gone in [known for known in self._uploaded if not known.exists()]:
            self.call("remove", TRANSFER_TIMEOUT_S, name=Path(self._uploaded.pop(gone)).name)
        if path not in self._uploaded:
            self._uploaded[path] = self.call("upload", TRANSFER_TIMEOUT_S + transfer_s([path]), path=str(path), name=path.name)
        return self._uploaded[path]

    def close(self) -> None:
        self._relay.close()


class _RunnerError(DeviceError):
    """What a process on a device said, and whether it lives on."""

    def __init__(self, message: str, alive: bool) -> None:
        super().__init__(message)
        self.alive = alive


class _Served:
    """A process that `tvmfuse serve` has started."""

    def __init__(self, place: RemotePlace, number: int) -> None:
        self._place, self._number = place, number
        self.alive = True

    def ask(self, do: str, timeout_s: float, **arguments: Any) -> Any:
        request = {"do": "ask", "runner": self._number, "timeout_s": timeout_s, "request": {"do": do, **arguments}}
        try:
            return self._place.request(request, timeout_s + ANSWER_MARGIN_S)
        except _RunnerError as error:
            self.alive = error.alive
            raise

    def close(self) -> None:
        with contextlib.suppress(DeviceError, DeviceLost):  # whoever asks next notices
            self._place.request({"do": "close", "runner": self._number}, ANSWER_MARGIN_S)
        self.alive = False


class _Stock:
    """A connection to TVM's own server, which forked a process for it. A kernel that kills it takes the server along."""

    def __init__(self, place: RemotePlace) -> None:
        self._place = place
        self.alive = True

    def ask(self, do: str, timeout_s: float, **arguments: Any) -> Any:
        return self._place.call("stock", timeout_s + ANSWER_MARGIN_S, request={"do": do, **arguments})

    def close(self) -> None:
        self.alive = False


def parse_rpc(rpc: str) -> tuple[str, int, str]:
    """ "host:port/key" -> its parts. Raises UsageError."""
    parsed = re.fullmatch(r"([^/]+):(\d+)/(.+)", rpc)
    if not parsed or not 0 < int(parsed[2]) < 1 << 16:
        raise UsageError(f"rpc {rpc!r} is not a tracker and a key: write it like '127.0.0.1:9190/pi4'")
    return parsed[1], int(parsed[2]), parsed[3]


@contextlib.contextmanager
def connected(rpc: str, server: ForkServer, most: int | None = None) -> Iterator[list[RemotePlace]]:
    """All free devices, or at most so many, that have registered under a key and whose CPU is the same as the first one's.

    rpc     "host:port/key" of a TVM tracker.
    Raises  DeviceLost when there is no tracker, no device with that key, or none that becomes free in time.
    """
    host, port, key = parse_rpc(rpc)
    with contextlib.ExitStack() as stack:

        def relay() -> tuple[Worker, dict[str, int]]:
            worker = server.start(threads=1, relay=True)
            stack.callback(worker.close)
            try:
                return worker, worker.ask("open", TRACKER_TIMEOUT_S, host=host, port=port, key=key)
            except DeviceError as error:
                raise DeviceLost(f"no RPC tracker at {host}:{port}: {_first_line(error)}") from error

        first, keys = relay()
        registered = min(keys.get(key, 0), most or MOST_DEVICES)
        if not registered:
            there = ", ".join(sorted(keys)) or "nothing"
            raise DeviceLost(f"no device has registered as {key!r} with the tracker at {host}:{port}; there is {there}")
        relays = [first, *(relay()[0] for _ in range(registered - 1))]
        with ThreadPoolExecutor(registered) as executor:
            found = list(executor.map(_acquired, relays, [f"device {i} of {rpc}" for i in range(registered)]))
        places = [place for place in found if isinstance(place, RemotePlace)]
        if not places:
            raise DeviceLost(f"none of {registered} devices that have registered as {key!r} at {host}:{port} is to be had: {found[0]}")
        alike = [place for place in places if place.identity.host == places[0].identity.host]
        for place in places:
            if place not in alike:
                place.close()
        yield alike


def _acquired(relay: Worker, label: str) -> RemotePlace | DeviceError:
    """The error when no device became free for it."""
    try:
        return RemotePlace(relay, relay.ask("acquire", ACQUIRE_TIMEOUT_S), label)
    except DeviceError as error:
        relay.close()
        return DeviceError(_first_line(error))


def identify(rpc: str) -> Identity:
    """What a device behind a tracker says of itself. Raises as `connected`."""
    with ForkServer() as server, connected(rpc, server, most=1) as places:
        return places[0].identity


def _first_line(error: Exception) -> str:
    """TVM's messages carry a stack trace."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
