"""When a kernel is long enough for more than one thread.

Threads never share a reduction, so that the answer changes the time and not the bits.

What is parallel, and where it stops scaling. A model's kernels run one after the other, each cut into one even run a thread: of rows of the
output, or of tiles of it where rows are few, with a barrier at its end. So n threads are held back by
    - kernels that stay on the caller: what is too short to pay for a parallel region;
    - recurrences: their threads share each step and meet at its end, which pays for some 200 hidden units and a few threads;
    - uneven runs: T tiles take ceil(T / n) turns, 7x7x512 in 7x64 tiles has 56 of them: all of 28 threads are used and 7/8 of 32;
    - the barrier: microseconds, more with each thread and across sockets; 100 kernels of 50 us leave 2 of 3 ms to 16 threads;
    - bandwidth: a kernel bound by DRAM is as fast with 4 to 8 cores as with all, one that reads weights from a private L2 scales.
An image network is worth 8 to 16 threads by this, a recurrent one 1 or 2. A server with more cores gains more from several sessions
of a few threads, each kept on cores of one L3, than from one session of many.
"""

from __future__ import annotations

import math

from ..values import Machine, Workload

# Starting a parallel region, and a meeting of its threads within it, for each thread: 1.2 us and 0.3 to 1 us were seen with two. Split
# work pays from four times that: what the other threads wrote before lies in their caches, as far away as memory.
REGION_S, MEETING_S = 0.6e-6, 0.25e-6
# Only for that decision: a core of 3 GHz with two FMA ports, 8 GB/s to and from memory, and 64 from its own caches.
CORE_HZ, FMA_PORTS, STREAM_BYTES_PER_S, CACHE_BYTES_PER_S = 3e9, 2, 8e9, 64e9


def threads_for(machine: Machine, seconds: float, meetings: int = 0) -> int:
    """Of a kernel that one thread runs in about `seconds`, and in which several would meet so many times."""
    costs_s = machine.threads * REGION_S + max(machine.threads, machine.pool) * MEETING_S * meetings
    return machine.threads if seconds > 4 * costs_s else 1


def compute_seconds(workload: Workload, machine: Machine, flop: int | None = None) -> float:
    """An anchor bound by its multiply-adds; flop: of an algorithm that has others than the anchor."""
    return (flop or workload.anchor.flop()) / (2 * FMA_PORTS * machine.isa.lanes(workload.anchor.dtype) * CORE_HZ)


def stream_seconds(workload: Workload) -> float:
    """An anchor bound by memory: its inputs and its output once."""
    elements = sum(math.prod(shape) for shape in (*workload.anchor.input_shapes(), workload.anchor.output_shape()))
    return 4 * elements / STREAM_BYTES_PER_S
