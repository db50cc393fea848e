"""What one sample is: kernels put side by side in a module, the cache conditioned before each run, the minimum of several runs.

Before each run the cache is put into the state in which the rest of the model leaves it: a stream over as many bytes as the model
touches between two runs of the site, then a touch of the site's activations, which a producer has just written. Conditioning once a
sample would make the minimum a hot run: 82 us instead of 170 for a 1x1008x1280 layer.

Sources   the minimum as estimator: Chen and Revels, arXiv 1608.04295.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import filelock
import tvm
import tvm_ffi
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from ..errors import DeviceError
from ..kernel.family import Kernel
from ..values import ITEM_BYTES, Machine, Workload

LINE_BYTES = 64
LANES_APART = 32  # a sink element for each thread, two lines apart
RUNS = 5
RUNS_OF_SLOW = 3  # a run this long is seldom interrupted less than its neighbours: more of them buy little
SLOW_S = 1e-3
HOT_RUN_S = 20e-6  # the clock ticks every 10 ns: a hot sample repeats its kernel until that is 0.05 %
MAX_HOT_RUNS = 1000


def stream_bytes(workload: Workload, machine: Machine, working_set: int) -> int:
    """How much to stream over before each run, for a model that touches `working_set` bytes; 0 means that the site runs hot.

    Twice the last-level cache replaces all of it; less than an L1 changes nothing that the next run notices.
    """
    others = min(working_set - workload.bytes_moved(), 2 * max(machine.l2, machine.l3))
    return others if others > machine.l1 else 0


@dataclass(frozen=True)
class Timed:
    """Kernels in one module: `run_i` makes kernel i's launches; its function conditions[i] prepares the cache for it.

    Both take kernel i's buffers, then `stream` (max(streamed, 64) bytes of float32) and `sink` (32 float32 a thread).
    """

    module: tvm.IRModule
    conditions: tuple[str, ...]


def timed_module(kernels: Sequence[Kernel], activations: Sequence[int], streamed: int, threads: int) -> Timed:
    """activations: inputs that a producer has just written."""
    alike: dict[int, list[tuple[tirx.PrimFunc, str]]] = {}
    functions: dict[str, tirx.PrimFunc] = {}

    def named(kind: str, func: tirx.PrimFunc) -> str:
        """One copy of functions that candidates share, such as conditioning and the second pass of every separate placement."""
        known = alike.setdefault(tvm_ffi.structural_hash(func), [])
        name = next((name for other, name in known if tvm_ffi.structural_equal(func, other)), None)
        if name is None:
            name = f"{kind}_{len(functions)}"
            known.append((func, name))
            functions[name] = func.with_attr("global_symbol", name)
        return name

    conditions = []
    for i, kernel in enumerate(kernels):
        calls = [(named("launch", launch.func), launch.args) for launch in kernel.launches]
        functions[f"run_{i}"] = _function(kernel, (), streamed, threads, _run(calls), f"run_{i}")  # the launches check their arguments
        conditions.append(named("condition", _function(kernel, activations, streamed, threads, _condition(activations, streamed, threads))))
    return Timed(tvm.IRModule(functions), tuple(conditions))


def conditioning_shapes(streamed: int, threads: int) -> tuple[int, int]:
    """Elements of `stream` and `sink`."""
    return max(streamed, LINE_BYTES) // 4, LANES_APART * threads


def _function(
    kernel: Kernel, read: Collection[int], streamed: int, threads: int, body: Callable[..., None], name: str = "condition"
) -> tirx.PrimFunc:
    """Of all buffers, but a buffer that isn't `read` is an opaque handle: its shape makes no difference then."""
    with IRBuilder() as builder, T.prim_func():
        T.func_name(name)
        T.func_attr({"global_symbol": name, "tirx.noalias": True, "tirx.is_scheduled": True})
        buffers = [T.arg(f"p{i}", T.buffer(b.shape, b.dtype) if i in read else T.handle()) for i, b in enumerate(kernel.buffers)]
        extents = conditioning_shapes(streamed, threads)
        body(buffers, *(T.arg(label, T.buffer((extent,), "float32")) for label, extent in zip(("stream", "sink"), extents, strict=True)))
    return builder.get()


def _run(calls: Sequence[tuple[str, tuple[int, ...]]]) -> Callable[..., None]:
    def body(buffers: Sequence[tirx.Buffer], stream: tirx.Buffer, sink: tirx.Buffer) -> None:
        for name, args in calls:
            T.evaluate(T.call_cpacked(name, *(buffers[i] for i in args)))

    return body


def _condition(activations: Sequence[int], streamed: int, threads: int) -> Callable[..., None]:
    """Read one element of each cache line, every thread its share, so that private caches are conditioned too."""

    def body(buffers: Sequence[tirx.Buffer], stream: tirx.Buffer, sink: tirx.Buffer) -> None:
        read = [(stream, conditioning_shapes(streamed, threads)[0], "float32")] if streamed else []
        for index in activations:
            size, dtype = math.prod(int(extent) for extent in buffers[index].shape), str(buffers[index].dtype)
            read.append((T.decl_buffer((size,), dtype, data=buffers[index].data), size, dtype))
        with T.parallel(0, threads) if threads > 1 else T.serial(0, 1) as thread:
            T.buffer_store(sink, tirx.const(0.0, "float32"), [thread * LANES_APART])
            for buffer, extent, dtype in read:
                step = LINE_BYTES // ITEM_BYTES.get(dtype, 4)
                share = -(-extent // (step * threads))
                with T.serial(0, share) as line:
                    at = tirx.Min((thread * share + line) * step, tirx.const(extent - 1, "int32"))
                    value = tirx.BufferLoad(sink, [thread * LANES_APART]) + tirx.BufferLoad(buffer, [at]).astype("float32")
                    T.buffer_store(sink, value, [thread * LANES_APART])

    return body


class Stopwatch:
    """Samples of one kernel of a `timed_module`, here or in any process that has loaded the module."""

    def __init__(self, module: tvm.runtime.Module, index: int, condition: str, arguments: Sequence[tvm.runtime.Tensor], hot: bool) -> None:
        self._run, self._arguments = module[f"run_{index}"], arguments
        # Registered as the native function that it is: no interpreter runs between conditioning and kernel.
        tvm_ffi.register_global_func("tvmfuse.condition", module[condition], override=True)
        timed = functools.partial(module.time_evaluator, f"run_{index}", tvm.cpu(), f_preproc="tvmfuse.condition")
        once_s = min(timed(number=1, repeat=RUNS_OF_SLOW if hot else 1)(*arguments).results)
        number = max(1, min(MAX_HOT_RUNS, math.ceil(HOT_RUN_S / max(once_s, 1e-9)))) if hot else 1
        self._sampler = timed(number=number, repeat=RUNS if once_s < SLOW_S else RUNS_OF_SLOW)

    def run(self) -> None:
        self._run(*self._arguments)

    def sample(self) -> float:
        """Seconds of one run: the minimum of several, each of them conditioned."""
        return min(self._sampler(*self._arguments).results)


@contextlib.contextmanager
def quiet_machine() -> Iterator[None]:
    """Nobody else of us compiles or measures on this machine meanwhile. Raises DeviceError when somebody does."""
    path = Path(tempfile.gettempdir()) / f"tvmfuse-{os.getuid()}.lock"
    try:
        with filelock.FileLock(path, timeout=0):
            yield
    except filelock.Timeout:
        raise DeviceError(f"another process is measuring on this machine (it holds {path}): two would spoil both") from None
