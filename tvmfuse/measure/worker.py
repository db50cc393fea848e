"""The process that compiles, or that runs kernels: told what to do in JSON lines on its standard input, it answers on its output.

    {"do": "load", "slot": 1, ...}  ->  {"value": null}  or  {"error": "ValueError: ..."}

It knows nothing of its parent but plain data, since kernels may crash it: the parent then starts another one.
"""

from __future__ import annotations

import json
import math
import os
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tvm
import tvm_ffi

from .clock import Stopwatch, conditioning_shapes

ALIGNMENT = 64
GUARD_BYTES = 64
GUARD = 0xC3
REFERENCE_POISON, POISON = 0xA5, 0x5A  # different, so that an element that neither writes shows
MAX_ERROR = 2000  # characters: TVM's messages carry a stack trace
SPECIALS = (math.nan, math.inf, -math.inf, -0.0, 1e-40, 3e38)


class Memory:
    """A dense array, 64-byte aligned, between guards that show whether a kernel wrote outside."""

    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        size = math.prod(shape) * np.dtype(dtype).itemsize
        self._raw = np.full(size + 2 * GUARD_BYTES + ALIGNMENT, GUARD, np.uint8)
        self._start = GUARD_BYTES + -(self._raw.ctypes.data + GUARD_BYTES) % ALIGNMENT
        self._end = self._start + size
        self.bytes = self._raw[self._start : self._end]
        self.array = self.bytes.view(dtype).reshape(shape)
        self.tensor = tvm_ffi.from_dlpack(self.array)

    def intact(self) -> bool:
        return bool((self._raw[: self._start] == GUARD).all() and (self._raw[self._end :] == GUARD).all())


@dataclass
class Slot:
    """A loaded kernel: its buffers in their order, and which of them are its results."""

    buffers: list[Memory]
    results: list[Memory]
    stopwatch: Stopwatch


@dataclass
class Bench:
    """What one process keeps between requests. Activations, results and scratch are allocated once and shared by all slots."""

    streamed: int = 0
    threads: int = 1
    seed: int = 0
    hot: bool = False
    slots: dict[int, Slot] = field(default_factory=dict)
    modules: dict[str, tvm.runtime.Module] = field(default_factory=dict)
    shared: dict[tuple[Any, ...], Memory] = field(default_factory=dict)
    references: dict[str, dict[bool, list[np.ndarray]]] = field(default_factory=dict)
    precise: list[np.ndarray] = field(default_factory=list)
    constants: weakref.WeakValueDictionary[str, Memory] = field(default_factory=weakref.WeakValueDictionary)

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

    def allocate(self, role: tuple[Any, ...], shape: tuple[int, ...], dtype: str) -> Memory:
        key = (*role, shape, dtype)
        if key not in self.shared:
            self.shared[key] = Memory(shape, dtype)
        return self.shared[key]

    def load(
        self, slot: int, library: str, index: int, buffers: list[Any], inputs: int, results: list[int], constants: dict[str, list[str]]
    ) -> None:
        """Put kernel `index` of a library into a slot and run it.

        buffers    (shape, dtype) of each. constants: input -> (file, digest); equal digests share their memory.
        """
        self.slots.pop(slot, None)
        if library not in self.modules:
            self.modules[library] = tvm.runtime.load_module(library)
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
        stopwatch = Stopwatch(self.modules[library], index, arguments, self.hot)
        self.slots[slot] = Slot(memories, [memories[i] for i in results], stopwatch)

    def constant(self, path: str, digest: str) -> Memory:
        memory = self.constants.get(digest)
        if memory is None:
            array = np.load(path)
            memory = Memory(array.shape, array.dtype.name)
            memory.array[...] = array
            self.constants[digest] = memory
        return memory

    def fill(self, memory: Memory, index: int, special: bool) -> None:
        """The same activations in every process: normal, with a few special values if asked for."""
        rng = np.random.default_rng((self.seed, index))
        memory.array[...] = draw(rng, memory.array.shape, memory.array.dtype.name)
        if special and memory.array.dtype.kind == "f" and memory.array.size:
            values = np.array(SPECIALS[: memory.array.size])
            memory.array.reshape(-1)[rng.choice(memory.array.size, len(values), replace=False)] = values.astype(memory.array.dtype)

    def outputs(self, slot: int, special: bool, poison: int) -> list[np.ndarray]:
        for (role, index, *_), memory in self.shared.items():
            if role == "input":
                self.fill(memory, index, special)
            elif role in ("result", "scratch"):
                memory.bytes[:] = poison
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

    def ready(self) -> None:
        """Answers once this process has started."""

    def pair(self, first: int, second: int) -> tuple[float, float]:
        return self.time(first), self.time(second)


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


def main() -> None:
    """Answer requests until the parent closes the pipe. What kernels or compilers print goes to stderr, not among the answers."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    bench = Bench()
    with open(0, closefd=False) as requests:
        for line in requests:
            request = json.loads(line)
            try:
                answer = {"value": getattr(bench, request.pop("do"))(**request)}
            except Exception as error:  # whatever a candidate raises is its result
                answer = {"error": f"{type(error).__name__}: {error}"[:MAX_ERROR]}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
