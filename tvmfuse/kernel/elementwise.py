"""An epilogue over a stored tensor: the second pass of a separate placement, and chains that have no anchor at all.

Strategy
    1. Neighbouring axes that every operand walks through in step are merged, so that vectors run over long rows.
    2. Rows are cut into chunks of a few L1 lines; chunks are what threads share.
    3. A chunk is whole vectors and one masked tail.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from ..values import Candidate, Elementwise, Machine, Operand, Workload
from . import emit
from .emit import Flat
from .family import Buffer, Kernel, Launch
from .grain import STREAM_BYTES_PER_S, threads_for
from .placement import apply

CHUNK = 2048  # elements of the innermost axis that one step of the shared loop handles: 8 KiB of float32, a quarter of an L1


def tiles(workload: Workload, machine: Machine) -> list[dict[str, int]]:
    """Rows have no tile: a single entry."""
    anchor = workload.anchor
    assert isinstance(anchor, Elementwise)
    moved = math.prod(anchor.shape) * (8 + sum(4 for o in workload.epilogue.operands if math.prod(o.shape) > 1))
    return [{"threads": threads_for(machine, moved / STREAM_BYTES_PER_S)}]


def candidates(workload: Workload, machine: Machine) -> tuple[Candidate, ...]:
    (tile,) = tiles(workload, machine)
    return (Candidate("register", len(workload.epilogue.steps), tuple(tile.items())),)


def kernel(workload: Workload, candidate: Candidate, machine: Machine) -> Kernel:
    """out[i] = f(x[i], operands at i). Shapes: x and out as the anchor says, operands as stored."""
    anchor = workload.anchor
    assert isinstance(anchor, Elementwise)
    shape, operands = merge_axes(anchor.shape, workload.epilogue.operands)
    epilogue = dataclasses.replace(workload.epilogue, operands=operands)
    lanes = machine.isa.lanes("float32")
    *outer, inner = shape
    chunks = -(-inner // CHUNK)

    def body(x: Flat, *rest: Flat) -> None:
        *operand_views, out = rest
        views = [view.reshaped(operand.shape) for view, operand in zip(operand_views, operands, strict=True)]

        def vector(row: emit.Index, at: Sequence[emit.Index], valid: int) -> None:
            offset = row * inner + at[-1]
            out.store(offset, apply(epilogue, x.load(offset, lanes, valid), views, at, lanes, valid), lanes, valid)

        with emit.shared_loop(math.prod(outer) * chunks, candidate["threads"]) as work:
            row, chunk = work // chunks, work % chunks
            index = emit.unravel(row, outer)

            def run(size: int) -> None:
                whole, rest = divmod(size, lanes)
                if whole:
                    with emit.loop(whole) as step:
                        vector(row, [*index, chunk * CHUNK + step * lanes], lanes)
                if rest:
                    vector(row, [*index, chunk * CHUNK + whole * lanes], rest)

            emit.with_tail(chunk, inner, CHUNK, run)

    buffers = (
        Buffer(anchor.shape, anchor.dtype),
        *(Buffer(o.shape, o.dtype) for o in workload.epilogue.operands),
        Buffer(anchor.shape, workload.output_dtype),
    )
    func = emit.function("elementwise", buffers, body)
    last = len(buffers) - 1
    return Kernel(buffers, last, (last,), (Launch(func, tuple(range(len(buffers)))),))


def merge_axes(shape: tuple[int, ...], operands: Sequence[Operand]) -> tuple[tuple[int, ...], tuple[Operand, ...]]:
    """Fewest axes over which the same elements are read in the same order.

    (56, 56, 64) with an operand (64,) on axis 2  ->  (3136, 64) with (64,) on axis 1.
    """
    groups: list[list[int]] = []
    for axis, extent in enumerate(shape):
        if groups and (extent == 1 or all(_in_step(o, groups[-1], axis, shape) for o in operands)):
            groups[-1].append(axis)
        else:
            groups.append([axis])
    merged = tuple(math.prod(shape[a] for a in group) for group in groups) or (1,)
    return merged, tuple(_merged(o, groups, shape) for o in operands)


def _in_step(operand: Operand, group: Sequence[int], axis: int, shape: Sequence[int]) -> bool:
    """Whether the operand walks over `axis` as the continuation of `group`: contiguously, or not at all over both."""
    real = [a for a in group if shape[a] > 1]
    if not real:
        return True
    walks, walked = axis in operand.axes, real[-1] in operand.axes
    if not walks or not walked:
        return walks == walked
    between = operand.axes[operand.axes.index(real[-1]) + 1 : operand.axes.index(axis)]
    after = operand.axes.index(axis) > operand.axes.index(real[-1])
    return after and all(a is None or shape[a] == 1 for a in between)


def _merged(operand: Operand, groups: Sequence[Sequence[int]], shape: Sequence[int]) -> Operand:
    extents: list[int] = []
    axes: list[int | None] = []
    for extent, axis in zip(operand.shape, operand.axes, strict=True):
        if axis is None or shape[axis] == 1:
            continue
        position = next(i for i, group in enumerate(groups) if axis in group)
        if axes and axes[-1] == position:
            extents[-1] *= extent
        else:
            extents.append(extent)
            axes.append(position)
    return dataclasses.replace(operand, shape=tuple(extents), axes=tuple(axes))
