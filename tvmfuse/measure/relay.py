"""The process here that holds a connection to a device. It may block for ever, as TVM's RPC does; whoever asks it kills it then."""

from __future__ import annotations

import gc
import json
import math
import socket
from typing import Any

import numpy as np
import tvm
import tvm.rpc

from .serve import ASK, CONNECT_TIMEOUT_S
from .worker import Bench

RUNS = 5
FLUSH = "cache_flush_cpu_non_first_arg"


class Relay:
    """Answers as a `worker.main` does, from a device: with `tvmfuse serve` there by passing on, else by TVM's functions alone."""

    def open(self, host: str, port: int, key: str) -> dict[str, int]:
        """Connect to the tracker. Key -> how many devices have registered with it."""
        socket.create_connection((host, port), CONNECT_TIMEOUT_S).close()  # TVM would go on trying for a minute
        self._tracker, self._key = tvm.rpc.connect_tracker(host, port), key
        keys: dict[str, int] = {}
        for info in self._tracker.summary()["server_info"]:
            name = info["key"].removeprefix("server:")
            keys[name] = keys.get(name, 0) + 1
        return keys

    def acquire(self) -> dict[str, Any]:
        """Wait for a device of one's own; what it says of itself. Without `tvmfuse serve` a target and a vendor."""
        self._session = self._tracker.request(self._key, max_retry=1)
        self._stock: StockBench | None = None
        try:
            self._ask = self._session.get_function(ASK)
        except (AttributeError, RuntimeError, ValueError, tvm.error.RPCError):
            self._ask = None
        if self._ask is not None:
            return json.loads(self._ask(json.dumps({"do": "describe"})))["value"]
        functions = (self._session.get_function(f"target.llvm_get_system_{what}") for what in ("cpu", "triple", "x86_vendor"))
        cpu, triple, vendor = (str(function()) for function in functions)
        return {"target": json.dumps({"kind": "llvm", "mcpu": cpu, "mtriple": triple}), "vendor": vendor}

    def fresh(self) -> None:
        """A new process on a device without `tvmfuse serve`: a connection of its own."""
        self._stock = None
        self._session = None
        gc.collect()
        self.acquire()
        self._stock = StockBench(self._session)

    def upload(self, path: str, name: str) -> str:
        """What processes on the device call this file; a .tar of objects is linked there."""
        self._session.upload(path, name)
        if name.endswith(".tar"):
            self._session.get_function("tvm.rpc.server.download_linked_module")(name)
            name += ".so"
        return name if self._ask is None else self._session.get_function("tvm.rpc.server.workpath")(name)

    def remove(self, name: str) -> None:
        self._session.remove(name)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        return json.loads(self._ask(json.dumps(request)))

    def stock(self, request: dict[str, Any]) -> Any:
        """A request of `worker`'s, on a device without `tvmfuse serve`."""
        return getattr(self._stock, request.pop("do"))(**request)


class RemoteMemory:
    """A dense array on a device, and its copy here. Guards would be out of sight."""

    def __init__(self, shape: tuple[int, ...], dtype: str, device: Any) -> None:
        self.array = np.zeros(shape, dtype)
        self.bytes = self.array.reshape(-1).view(np.uint8)
        self.tensor = tvm.runtime.empty(shape, dtype, device)
        self._device = device
        self._parts: dict[tuple[int, int], Any] = {}

    def view(self, offset: int, shape: tuple[int, ...], dtype: str) -> Any:
        """As in `Memory`, but what is smaller lies by itself: kernels take no tensor with an offset, and TVM's server makes no other.

        Views of equal offset and size share their memory, as those do that show one tensor in two shapes.
        """
        size = math.prod(shape) * np.dtype(dtype).itemsize
        if size == self.bytes.nbytes:
            return self.tensor._create_view(shape, dtype)
        if (offset, size) not in self._parts:
            self._parts[offset, size] = tvm.runtime.empty((size,), "uint8", self._device)
        return self._parts[offset, size]._create_view(shape, dtype)

    def push(self) -> None:
        self.tensor.copyfrom(self.array)

    def pull(self) -> None:
        self.array[...] = self.tensor.numpy()

    def intact(self) -> bool:
        return True


class RemoteStopwatch:
    """Samples by TVM's own time evaluator. Before each run it flushes the operands from the caches; nothing there can do more."""

    def __init__(self, module: tvm.runtime.Module, index: int, arguments: list[Any], hot: bool, device: Any) -> None:
        self._run, self._arguments = module[f"run_{index}"], arguments
        preparation = {} if hot else {"f_preproc": FLUSH}
        self._sampler = module.time_evaluator(f"run_{index}", device, number=1, repeat=RUNS, **preparation)

    def run(self) -> None:
        self._run(*self._arguments)

    def sample(self) -> float:
        return min(self._sampler(*self._arguments).results)


class StockBench(Bench):
    """What a worker does, from here, by calls that TVM's own server answers."""

    def __init__(self, session: Any) -> None:
        super().__init__(session.cpu())
        self._session = session

    def open_library(self, library: str) -> tvm.runtime.Module:
        return self._session.load_module(library)

    def memory(self, shape: tuple[int, ...], dtype: str) -> Any:
        return RemoteMemory(shape, dtype, self.device)

    def stopwatch(self, module: tvm.runtime.Module, index: int, condition: str, arguments: list[Any]) -> Any:
        self._push()
        return RemoteStopwatch(module, index, arguments, self.hot, self.device)

    def outputs(self, slot: int, special: bool, poison: int) -> list[np.ndarray]:
        self.prepare(special, poison)
        self._push()
        self.slots[slot].stopwatch.run()
        for memory in self.slots[slot].results:
            memory.pull()
        return [memory.array.copy() for memory in self.slots[slot].results]

    def _push(self) -> None:
        for memory in self.shared.values():
            memory.push()
