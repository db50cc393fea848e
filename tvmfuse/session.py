"""A compiled model: call it, profile it, save it, load it."""

from __future__ import annotations

import functools
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm_ffi
from numpy import ndarray

from . import artifact, callers
from .artifact import Program
from .errors import UsageError
from .runtime import tensor_in, virtual_machine
from .values import Cost, Roofline, Site, TensorInfo, View


@dataclass(frozen=True)
class KernelTime:
    """One kernel's part of a call of the model, over all its launches.

    time_s   median over the calls watched; bound_s: least seconds by the roofline. sites: those that it computes.
    cost     of one launch of it; where a kernel is launched on several tensors, of the first.
    """

    kernel: str
    sites: tuple[str, ...]
    launches: int
    time_s: float
    cost: Cost
    bound_s: float


class Session:
    """A model compiled for one CPU. Safe to call from several threads: each gets a virtual machine of its own, weights are shared."""

    def __init__(self, program: Program) -> None:
        self.manifest = program.manifest
        self.program = program
        self._inputs = [(info.name, info.shape, np.dtype(info.dtype), info) for info in program.manifest.inputs]
        self._shapes = [info.shape for info in program.manifest.outputs]
        self._dtypes = [np.dtype(info.dtype) for info in program.manifest.outputs]
        self._threads = program.manifest.threads
        self._names = [info.name for info in program.manifest.outputs]
        self._own = _OfThread(program)

    @property
    def sites(self) -> tuple[Site, ...]:
        return self.manifest.sites

    @property
    def kernel_count(self) -> int:
        """Kernels that one call launches."""
        return len(self.manifest.costs)

    def get_inputs(self) -> list[TensorInfo]:
        return list(self.manifest.inputs)

    def get_outputs(self) -> list[TensorInfo]:
        return list(self.manifest.outputs)

    def run(self, output_names: Sequence[str] | None, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """ONNX Runtime's calling convention. Raises UsageError for a wrong name, shape or dtype, saying which and what was expected."""
        if output_names is not None:
            output_names = [output_names] if isinstance(output_names, str) else list(output_names)
            _refuse_unknown(output_names, self._names, "output")
        arguments = self._arguments(feeds)
        outputs = list(map(np.empty, self._shapes, self._dtypes))
        if self._threads == 1:
            self._own.main(*arguments, *outputs)
        else:
            callers.call(lambda: self._own.main(*arguments, *outputs))
        return outputs if output_names is None else [outputs[self._names.index(name)] for name in output_names]

    def bind(self, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> Callable[[], None]:
        """A call on the caller's own buffers: it reads `inputs` as they are at that time and writes `outputs`; nothing is copied.

        Outputs that aren't given go to a buffer that nobody reads. It has a workspace of its own; to be called by one thread at a time.
        Raises UsageError when a buffer can't be used in place: wrong name, shape or dtype, strided, byte-swapped, read-only, or an
        output's that overlaps another one: results are written while inputs are still to be read.
        """
        _refuse_no_mapping(inputs, "inputs")
        _refuse_no_mapping(outputs, "outputs")
        _refuse_unknown(inputs, [info.name for info in self.manifest.inputs], "input")
        _refuse_unknown(outputs, self._names, "output")
        buffers = [_named(inputs, info) for info in self.manifest.inputs]
        for info in self.manifest.outputs:
            buffers.append(_named(outputs, info) if info.name in outputs else np.empty(info.shape, info.dtype))
        for info, buffer in zip((*self.manifest.inputs, *self.manifest.outputs), buffers, strict=True):
            if not (buffer.flags.c_contiguous and buffer.flags.writeable and buffer.dtype.isnative):
                raise UsageError(f"{info.name!r} can't be bound: it is strided, read-only or in foreign byte order; pass a plain copy")
        named = [(info.name, buffer) for info, buffer in zip((*self.manifest.inputs, *self.manifest.outputs), buffers, strict=True)]
        for i, (name, buffer) in enumerate(named[len(self._inputs) :], len(self._inputs)):
            for other, other_buffer in named[:i]:
                if np.may_share_memory(buffer, other_buffer):
                    raise UsageError(f"output {name!r} can't be bound: its buffer overlaps that of {other!r}; pass one of its own")
        call = bound_function(self.program, virtual_machine(self.program.module), "main", buffers)
        if self._threads == 1:
            return call
        return lambda: callers.call(call)

    def trace(self, feeds: Mapping[str, np.ndarray], repeats: int = 1) -> list[list[tuple[str, float]]]:
        """For each of `repeats` calls the kernels that really ran, in order, with the seconds of each."""
        calls: list[list[tuple[str, float]]] = []
        began = [0.0]

        def watch(_func: Any, name: str, before_run: bool, _result: Any, *_args: Any) -> None:
            if before_run:
                began[0] = time.perf_counter()
            elif not name.startswith("vm."):
                calls[-1].append((name, time.perf_counter() - began[0]))

        outputs = list(map(np.empty, self._shapes, self._dtypes))
        vm = virtual_machine(self.program.module)
        call = bound_function(self.program, vm, "traced", [*self._arguments(feeds), *outputs])

        def run() -> None:
            call()
            vm["set_instrument"](watch)
            for _ in range(repeats):
                calls.append([])
                call()

        if self._threads == 1:
            run()
        else:
            callers.call(run)
        return calls

    def profile(self, feeds: Mapping[str, np.ndarray], repeats: int = 20, roofline: Roofline | None = None) -> list[KernelTime]:
        """Where one call of the model spends its time, and what the machine would need at least; the longest first.

        roofline  limits of the machine; None measures them, which takes about a second, once a process.
        Raises    UsageError as `run` does.
        """
        if roofline is None:
            from .measure.roofline import roofline as measured  # compiles its kernels

            roofline = measured(self.manifest.threads)
        spent: dict[str, list[float]] = {}
        for call in self.trace(feeds, repeats):
            totals: dict[str, float] = {}
            for kernel, seconds in call:
                totals[kernel] = totals.get(kernel, 0.0) + seconds
            for kernel, total in totals.items():
                spent.setdefault(kernel, []).append(total)
        costs = self.manifest.costs
        touched = sum(cost.constant_bytes for _, cost in costs) + max((cost.activation_bytes for _, cost in costs), default=0)
        times = []
        for kernel, samples in spent.items():
            own = [cost for name, cost in costs if name == kernel]
            sites = tuple(site for site, kernels in self.manifest.kernels.items() if kernel in kernels)
            bound = sum(roofline.bound_s(cost, touched) for cost in own)
            times.append(KernelTime(kernel, sites, len(own), float(np.median(samples)), own[0], bound))
        return sorted(times, key=lambda time: -time.time_s)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one file that `tvmfuse.load` reads; it appears whole or not at all. Needs a C++ compiler that links for the target.

        Raises UsageError when that fails or the file can't be written.
        """
        artifact.save(self.program, path)

    def _arguments(self, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """The inputs in order, shared with the caller where they can be; read-only, strided and byte-swapped arrays are copied.

        What every call does comes first, and cheaply: behind a model that has filled the caches each step takes twice what it does alone.
        """
        try:
            if len(feeds) > len(self._inputs):
                _refuse_unknown(feeds, [info.name for info in self.manifest.inputs], "input")
            arguments = []
            for name, shape, dtype, info in self._inputs:
                array = feeds.get(name)
                if type(array) is ndarray and array.dtype is dtype and array.shape == shape and array.flags.carray:
                    arguments.append(array)
                else:
                    _refuse_unknown(feeds, [info.name for info in self.manifest.inputs], "input")
                    arguments.append(_plain(_named(feeds, info)))
            return arguments
        except (TypeError, AttributeError):
            _refuse_no_mapping(feeds, "inputs")
            raise


class _OfThread(threading.local):
    """What each thread that calls a session has of its own."""

    def __init__(self, program: Program) -> None:
        self._program = program

    @functools.cached_property
    def main(self) -> Callable[..., None]:
        """The model's entry in this thread's virtual machine: main(*inputs, *outputs)."""
        return bound_function(self._program, virtual_machine(self._program.module), "main", [])


def bound_function(program: Program, vm: tvm_ffi.Module, name: str, arguments: Sequence[np.ndarray]) -> Callable[..., None]:
    """A function of the program with parameters bound: `arguments`, which come first, and last the weights and a workspace of its own.

    It is also vm["call"], where TVM's own tools find it.
    """
    size = program.manifest.workspace
    workspace = np.empty(size + mmap.PAGESIZE, np.uint8)  # on a page: which cache sets its tensors fall into is then always the same
    workspace = workspace[-workspace.ctypes.data % mmap.PAGESIZE :][:size]

    def tensor(view: View) -> Any:
        memory = workspace if view.weight is None else program.weights[view.weight].reshape(-1).view(np.uint8)
        return tensor_in(memory, view.offset, view.shape, view.dtype)

    vm["save_function"](name, "call", False, *map(tvm_ffi.from_dlpack, arguments), *map(tensor, program.manifest.views))
    return vm["call"]


def load(path: str | os.PathLike[str]) -> Session:
    """Open a saved model, after checking that it is whole and that this CPU and toolchain can run it.

    An artifact is machine code: loading one runs what its author wrote. The digest shows damage, not an ill intent.
    Raises   ModelError when the file is absent, damaged or no artifact; TargetMismatch when this machine can't run it.
    """
    return Session(artifact.load(path))


def _refuse_no_mapping(arrays: object, what: str) -> None:
    if not isinstance(arrays, Mapping):
        raise UsageError(f"{what} are given by name, as {{'name': array, ...}}, not as {type(arrays).__name__}")


def _refuse_unknown(names: Iterable[str], known: Sequence[str], kind: str) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(f"no {kind} named {unknown[0]!r}; the model has {', '.join(known)}")


def _named(arrays: Mapping[str, np.ndarray], info: TensorInfo) -> np.ndarray:
    if info.name not in arrays:
        missing = f"input {info.name!r} of shape {info.shape} and dtype {info.dtype} is missing"
        raise UsageError(missing, f"{missing}; --input {info.name}=FILE.npy gives it, --random 0 draws it")
    array = np.asarray(arrays[info.name])
    if tuple(array.shape) != tuple(info.shape):
        raise UsageError(f"{info.name!r} has shape {tuple(array.shape)}, expected {tuple(info.shape)}")
    if array.dtype.newbyteorder("=") != np.dtype(info.dtype):
        found = f"{info.name!r} has dtype {array.dtype}, expected {info.dtype}; "
        raise UsageError(f"{found}pass array.astype({info.dtype!r})", f"{found}convert the file")
    return array


def _plain(array: np.ndarray) -> np.ndarray:
    """Native, dense and writable, as DLPack wants it; a copy if it has to be."""
    native = np.asarray(array, dtype=array.dtype.newbyteorder("="), order="C")
    return native if native.flags.writeable else native.copy()
