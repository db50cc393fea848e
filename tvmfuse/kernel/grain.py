"""When a kernel is long enough for more than one thread.

Threads never share a reduction, so that the answer changes the time and not the bits.
"""

from __future__ import annotations

import math

from ..values import Machine, Workload

# Waking a parallel region costs some microseconds (about 5 seen on TVM's pool): below four times that, a second thread loses.
SPLIT_PAYS_S = 20e-6
# Only for that decision: a core of 3 GHz with two FMA ports, and 8 GB/s to and from memory.
CORE_HZ, FMA_PORTS, STREAM_BYTES_PER_S = 3e9, 2, 8e9


def threads_for(machine: Machine, seconds: float) -> int:
    """Of a kernel that one thread runs in about `seconds`."""
    return machine.threads if seconds > SPLIT_PAYS_S else 1


def compute_seconds(workload: Workload, machine: Machine, flop: int | None = None) -> float:
    """An anchor bound by its multiply-adds; flop: of an algorithm that has others than the anchor."""
    return (flop or workload.anchor.flop()) / (2 * FMA_PORTS * machine.isa.lanes(workload.anchor.dtype) * CORE_HZ)


def stream_seconds(workload: Workload) -> float:
    """An anchor bound by memory: its inputs and its output once."""
    elements = sum(math.prod(shape) for shape in (*workload.anchor.input_shapes(), workload.anchor.output_shape()))
    return 4 * elements / STREAM_BYTES_PER_S
