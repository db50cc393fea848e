"""The limits of this machine, measured by kernels of ours: fused multiply-adds a second, and bytes a second from each level of memory.

Source   Williams, Waterman and Patterson, "Roofline: an insightful visual performance model", CACM 2009.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator

import numpy as np
import tvm
from tvm import tirx

from ..kernel import emit
from ..kernel.emit import Flat, RegisterTile
from ..kernel.family import Buffer
from ..values import Level, Machine, Roofline
from .host import host_target, machine

# Accumulators in flight: enough to hide an FMA's latency on every port, few enough for 16 registers.
IN_FLIGHT = 12
STEPS = 1 << 17  # a millisecond: what a parallel region costs to start no longer shows
SAMPLES, LIMIT_S = 10, 0.15  # a batch of calls, and how long batches go on for one limit


@functools.cache
def roofline(threads: int = 1) -> Roofline:
    """Of this CPU with `threads` threads at work; takes about a second, once a process."""
    here = machine(host_target(), threads)
    levels = tuple(_level(here, *level) for level in _levels(here))
    return Roofline(_peak(here), levels, threads)


def _levels(here: Machine) -> Iterator[tuple[str, float, int]]:
    """(name, bytes it holds, bytes that one thread reads to measure it): few enough to stay in it beside what else runs."""
    yield "L1", here.l1, here.l1 // 2
    yield "L2", here.l2, here.l2 // 2
    if here.l3 > here.l2:
        yield "L3", here.l3, max(2 * here.l2, here.l3 // (4 * here.threads))
    yield "DRAM", float("inf"), 4 * max(here.l2, here.l3) // here.threads


def _peak(here: Machine) -> float:
    """flop/s of independent multiply-adds that touch no memory."""
    lanes = here.isa.lanes()

    def body(source: Flat, sink: Flat) -> None:
        with emit.shared_loop(here.threads, here.threads) as thread:
            tile = RegisterTile(IN_FLIGHT, lanes, lanes, "float32")
            factor = source.load(0, lanes)
            with emit.loop(STEPS):
                for row in range(IN_FLIGHT):
                    tile.accumulate(row, 0, factor, factor)
            _keep(tile, sink, thread)

    flop = 2 * IN_FLIGHT * lanes * STEPS * here.threads
    return flop / _seconds(emit.function("peak", (Buffer((lanes,)), _sink(here)), body), [lanes, _sink(here).shape[0]])


def _level(here: Machine, name: str, holds: float, size: int) -> Level:
    """Bandwidth of reading `size` bytes a thread over and over."""
    lanes = here.isa.lanes()
    step = IN_FLIGHT * lanes
    rounds = max(1, size // (4 * step))
    passes = max(1, (1 << 20) // size)

    def body(source: Flat, sink: Flat) -> None:
        with emit.shared_loop(here.threads, here.threads) as thread:
            tile = RegisterTile(IN_FLIGHT, lanes, lanes, "float32")
            one = emit.constant(1.0, "float32", lanes)
            with emit.loop(passes), emit.loop(rounds) as at:
                for row in range(IN_FLIGHT):
                    tile.accumulate(row, 0, source.load((thread * rounds + at) * step + row * lanes, lanes), one)
            _keep(tile, sink, thread)

    elements = here.threads * rounds * step
    seconds = _seconds(emit.function("read", (Buffer((elements,)), _sink(here)), body), [elements, _sink(here).shape[0]])
    return Level(name, holds, 4 * elements * passes / seconds)


def _sink(here: Machine) -> Buffer:
    return Buffer((here.threads * IN_FLIGHT * here.isa.lanes(),))


def _keep(tile: RegisterTile, sink: Flat, thread: emit.Index) -> None:
    """Store the accumulators: what nobody reads, LLVM doesn't compute."""
    for row in range(tile.rows):
        sink.store((thread * tile.rows + row) * tile.lanes, tile[row, 0], tile.lanes)


def _seconds(func: tirx.PrimFunc, sizes: list[int]) -> float:
    """The fastest of many single calls: on a busy machine a sample of several would hold a stretch in which another process ran."""
    name = str(func.attrs["global_symbol"])
    executable = tvm.compile(tvm.IRModule({name: func}), host_target())
    arguments = [tvm.runtime.tensor(np.zeros(size, np.float32)) for size in sizes]
    timer = executable.mod.time_evaluator(name, tvm.cpu(), number=1, repeat=SAMPLES)
    end = time.perf_counter() + LIMIT_S
    fastest = min(timer(*arguments).results)
    while time.perf_counter() < end:
        fastest = min(fastest, *timer(*arguments).results)
    return float(fastest)
