"""The process that compiles, or that runs kernels: told what to do in JSON lines on a socket, it answers there.

    {"do": "load", "slot": 1, ...}  ->  {"value": null}  or  {"error": "ValueError: ..."}

It knows nothing of its parent but plain data, since kernels may crash it: the parent then starts another one.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import secrets
import socket
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm.runtime.vm import VirtualMachine

from ..runtime import tensor_in
from .clock import Stopwatch, conditioning_shapes

GUARD_BYTES = 64  # also the alignment of what lies between
SCATTERED_PAGES = 64
SHIFT_PAGES = 1 << 18
GUARD = 0xC3
REFERENCE_POISON, POISON = 0xA5, 0x5A  # different, so that an element that neither writes shows
MAX_ERROR = 2000  # characters: TVM's messages carry a stack trace
SPECIALS = (math.nan, math.inf, -math.inf, -0.0, 1e-40, 3e38)


class Memory:
    """A dense array, 64-byte aligned, between guards that show whether a kernel wrote outside.

    It starts a random number of pages into a mapping of its own. Forked processes share their heap's addresses, and two kernels' relative
    speed can hang on where buffers lie: each process has to draw anew.
    """

    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        size = math.prod(shape) * np.dtype(dtype).itemsize
        skipped = secrets.randbelow(SCATTERED_PAGES) * mmap.PAGESIZE
        raw = np.frombuffer(mmap.mmap(-1, skipped + size + 2 * GUARD_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
        self._raw = raw[skipped:]
        self._raw[:] = GUARD
        self._start, self._end = GUARD_BYTES, GUARD_BYTES + size
        self.bytes = self._raw[self._start : self._end]
        self.array = self.bytes.view(dtype).reshape(shape)
        self.tensor = tvm_ffi.from_dlpack(self.array)

    def view(self, offset: int, shape: tuple[int, ...], dtype: str) -> Any:
        """A tensor that lies in it."""
        return tensor_in(self.bytes, offset, shape, dtype)

    def push(self) -> None:
        """What was written to `array` is where kernels read it."""

    def pull(self) -> None:
        """What kernels have written is in `array`."""

    def intact(self) -> bool:
        return bool((self._raw[: self._start] == GUARD).all() and (self._raw[self._end :] == GUARD).all())


class ModelStopwatch:
    """Samples of a whole model in a virtual machine, here or on a device.

    Its arguments go with each call: a virtual machine that is told to keep them takes copies of those that come over RPC.
    """

    def __init__(self, module: tvm.runtime.Module, arguments: list[Any], device: Any) -> None:
        self._module, self._arguments, self._device = module, arguments, device

    def run(self) -> None:
        self._module["main"](*self._arguments)

    def sample(self, repeats: int, tries: int) -> float:
        return min(self._module.time_evaluator("main", self._device, number=repeats, repeat=tries)(*self._arguments).results)


@dataclass
class Slot:
    """A loaded kernel or model: its buffers in their order, which of them are its results, and what times it."""

    buffers: list[Any]
    results: list[Any]
    stopwatch: Any


@dataclass
class Bench:
    """What one process keeps between requests. Activations, results and scratch are allocated once and shared by all kernels' slots."""

    device: Any = field(default_factory=tvm.cpu)
    streamed: int = 0
    threads: int = 1
    seed: int = 0
    hot: bool = False
    slots: dict[int, Slot] = field(default_factory=dict)
    modules: dict[str, tvm.runtime.Module] = field(default_factory=dict)
    shared: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    references: dict[str, dict[bool, list[np.ndarray]]] = field(default_factory=dict)
    precise: list[np.ndarray] = field(default_factory=list)
    constants: weakref.WeakValueDictionary[str, Any] = field(default_factory=weakref.WeakValueDictionary)
    drawn: dict[tuple[Any, ...], np.ndarray] = field(default_factory=dict)

    # where it runs

    def memory(self, shape: tuple[int, ...], dtype: str) -> Any:
        return Memory(shape, dtype)

    def open_library(self, library: str) -> tvm.runtime.Module:
        return tvm.runtime.load_module(library)

    def stopwatch(self, module: tvm.runtime.Module, index: int, condition: str, arguments: list[Any]) -> Any:
        return Stopwatch(module, index, condition, arguments, self.hot)

    # requests

    def compile(self, module: str, library: str) -> None:
        """Build the (module, target) saved at `module` into a shared library."""
        mod, target = tvm.ir.load_json(Path(module).read_text())
        tvm.compile(mod, target).export_library(library)

    def open(self, streamed: int, threads: int, seed: int) -> None:
        self.streamed, self.threads, self.seed, self.hot = streamed, threads, seed, streamed == 0
        extents = conditioning_shapes(streamed, threads)
        self.conditioning = [self.allocate(("conditioning", i), (extent,), "float32") for i, extent in enumerate(extents)]
        for memory in self.conditioning:
            memory.bytes[:] = 0

    def allocate(self, role: tuple[Any, ...], shape: tuple[int, ...], dtype: str) -> Any:
        key = (*role, shape, dtype)
        if key not in self.shared:
            self.shared[key] = self.memory(shape, dtype)
        return self.shared[key]

    def load(
        self,
        slot: int,
        library: str,
        index: int,
        condition: str,
        buffers: list[Any],
        inputs: int,
        results: list[int],
        constants: dict[str, list[str]],
    ) -> None:
        """Put kernel `index` of a library, and the function that conditions the cache for it, into a slot and run it.

        buffers    (shape, dtype) of each. constants: input -> (file, digest); equal digests share their memory.
        """
        self.slots.pop(slot, None)
        if library not in self.modules:
            self.modules[library] = self.open_library(library)
        memories = []
        for i, (shape, dtype) in enumerate(buffers):
            if str(i) in constants:
                memories.append(self.constant(*constants[str(i)]))
            else:
                role = ("input", i) if i < inputs else ("result", results.index(i)) if i in results else ("scratch", i)
                memories.append(self.allocate(role, tuple(shape), dtype))
                if i < inputs:
                    self.fill(memories[-1], i, special=False)
        arguments = [memory.tensor for memory in (*memories, *self.conditioning)]
        stopwatch = self.stopwatch(self.modules[library], index, condition, arguments)
        self.slots[slot] = Slot(memories, [memories[i] for i in results], stopwatch)

    def constant(self, path: str, digest: str) -> Any:
        memory = self.constants.get(digest)
        if memory is None:
            array = np.load(path)
            memory = self.memory(array.shape, array.dtype.name)
            memory.array[...] = array
            memory.push()
            self.constants[digest] = memory
        return memory

    def load_model(
        self,
        slot: int,
        library: str,
        inputs: list[Any],
        outputs: list[Any],
        weights: list[list[str]],
        views: list[dict[str, Any]],
        workspace: int,
    ) -> int:
        """Put main(*inputs, *outputs, *views) of a compiled model into a slot, with buffers of its own, and run it; weights are shared.

        inputs, outputs  (shape, dtype) of each. weights: (file of its bytes, digest). views: as `values.View`.
        Returns how many elements of its outputs differ from those of the model that came first.
        """
        if library not in self.modules:
            self.modules[library] = self.open_library(library)
        buffers = [self.memory(tuple(shape), dtype) for shape, dtype in (*inputs, *outputs)]
        for i, memory in enumerate(buffers[: len(inputs)]):
            self.fill(memory, i, special=False)
            memory.push()
        held, space = [self.constant(*weight) for weight in weights], self.memory((max(workspace, 1),), "uint8")

        def tensor(weight: int | None, offset: int, shape: list[int], dtype: str) -> Any:
            return (space if weight is None else held[weight]).view(offset, tuple(shape), dtype)

        arguments = [*(memory.tensor for memory in buffers), *(tensor(**view) for view in views)]
        stopwatch = ModelStopwatch(VirtualMachine(self.modules[library], self.device).module, arguments, self.device)
        stopwatch.run()
        results = buffers[len(inputs) :]
        for memory in results:
            memory.pull()
        first = self.references.setdefault("models", {False: [memory.array.copy() for memory in results]})[False]
        self.slots[slot] = Slot([*buffers, *held, space], results, stopwatch)
        return sum(count_differing(memory.array, want) for memory, want in zip(results, first, strict=True))

    def time_model(self, slot: int, repeats: int, tries: int) -> float:
        """Seconds of a call of the model in a slot: the least of `tries` means over `repeats`, after one call that isn't timed."""
        return self.slots[slot].stopwatch.sample(repeats, tries)

    def fill(self, memory: Any, index: int, special: bool) -> None:
        """The same activations in every process: normal, with a few special values if asked for."""
        key = (index, special, memory.array.shape, memory.array.dtype.name)
        if key not in self.drawn:  # to draw them anew would take longer than most kernels
            self.drawn[key] = drawn(np.random.default_rng((self.seed, index)), memory.array.shape, memory.array.dtype, special)
        memory.array[...] = self.drawn[key]

    def prepare(self, special: bool, poison: int) -> None:
        """Fill the inputs, and poison what is to be written."""
        for (role, index, *_), memory in self.shared.items():
            if role == "input":
                self.fill(memory, index, special)
            elif role in ("result", "scratch"):
                memory.bytes[:] = poison

    def outputs(self, slot: int, special: bool, poison: int) -> list[np.ndarray]:
        self.prepare(special, poison)
        self.slots[slot].stopwatch.run()
        return [memory.array.copy() for memory in self.slots[slot].results]

    def reference(self, slot: int, algorithm: str) -> None:
        """Take this slot's results, for plain and for special values, as what others of its algorithm are compared with."""
        self.references[algorithm] = {special: self.outputs(slot, special, REFERENCE_POISON) for special in (False, True)}
        self.check_guards(slot)

    def take_precise(self, slot: int) -> None:
        """Take this slot's results, for plain values, as what errors are relative to."""
        self.precise = self.outputs(slot, False, REFERENCE_POISON)

    def relative_error(self, slot: int) -> float:
        """Largest |difference| to the precise results over their largest |value|, the worst result's."""
        results = self.outputs(slot, False, POISON)
        self.check_guards(slot)
        return max(
            float(np.abs(got - want).max() / max(float(np.abs(want).max()), 1e-300)) if want.size else 0.0
            for got, want in zip(results, self.precise, strict=True)
        )

    def compare(self, slot: int, algorithm: str) -> str | None:
        """How a slot's results differ from the reference of its algorithm; None when they don't."""
        references = self.references[algorithm]
        results = {special: self.outputs(slot, special, POISON) for special in references}
        self.check_guards(slot)
        for special, expected in references.items():
            for result, (got, want) in enumerate(zip(results[special], expected, strict=True)):
                if differing := count_differing(got, want):
                    inputs = "with NaN, infinities and denormals among its inputs, " if special else ""
                    return f"wrong bits: {inputs}{differing} of {want.size} elements of result {result} differ from the default's"
        return None

    def check_guards(self, slot: int) -> None:
        written = [i for i, memory in enumerate(self.slots[slot].buffers) if not memory.intact()]
        if written:
            raise MemoryError(f"the kernel wrote outside of its buffers {written}")

    def time(self, slot: int) -> float:
        return self.slots[slot].stopwatch.sample()

    def pair(self, first: int, second: int) -> tuple[float, float]:
        return self.time(first), self.time(second)


def drawn(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any], special: bool) -> np.ndarray:
    array = draw(rng, shape, dtype.name)
    if special and dtype.kind == "f" and array.size:
        values = np.array(SPECIALS[: array.size])
        array.reshape(-1)[rng.choice(array.size, len(values), replace=False)] = values.astype(dtype)
    return array


def draw(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Standard normal numbers, or small integers."""
    if np.dtype(dtype).kind == "f":
        return rng.standard_normal(shape, np.float32).astype(dtype)
    return rng.integers(0, 2 if dtype == "bool" else 8, shape).astype(dtype)


def count_differing(got: np.ndarray, want: np.ndarray) -> int:
    """Elements whose bits differ; a NaN equals any NaN."""
    bits = f"u{got.dtype.itemsize}"
    differ = got.view(bits) != want.view(bits)
    if got.dtype.kind == "f":
        differ &= ~(np.isnan(got) & np.isnan(want))
    return int(differ.sum())


def main(connection: socket.socket, threads: int, bench: object) -> None:
    """Call the methods of `bench` that are asked for until the parent closes the connection. Kernels may use so many threads."""
    os.environ["TVM_NUM_THREADS"] = str(threads)
    # Whatever is mapped from now on, libraries too, lies elsewhere in each process, as it would if each were started anew.
    kept = mmap.mmap(-1, (1 + secrets.randbelow(SHIFT_PAGES)) * mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0)
    with connection, kept, connection.makefile("rw") as stream:
        for line in stream:
            request = json.loads(line)
            try:
                answer = {"value": getattr(bench, request.pop("do"))(**request)}
            except Exception as error:  # whatever a candidate raises is its result
                answer = {"error": f"{type(error).__name__}: {error}"[:MAX_ERROR]}
            stream.write(json.dumps(answer) + "\n")
            stream.flush()
