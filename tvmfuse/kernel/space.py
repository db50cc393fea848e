"""What all anchor families share: placements x cuts x tiles as candidates, and the launches that a candidate comes to."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from ..errors import ScheduleRefused
from ..values import Candidate, Elementwise, Epilogue, Machine, Workload
from . import elementwise, emit
from .family import Buffer, Kernel, Launch, Packer

# Register tiles on offer for one workload, the analytically best. Tuning screens tiles before it screens placements, so that a tile costs
# one kernel to compile and not one for each placement and cut: nearly all there are can be on offer.
TILES = 64


def tile_cycles(
    rows: tuple[int, int], columns: tuple[int, int], width: tuple[int, int], reduction: int, lanes: int, machine: Machine
) -> float:
    """Cycles of all register tiles, the first three each an (extent, tile) pair: the analytic prior of broadcast-times-vector kernels.

    Per step of the reduction a tile of r rows x v vectors issues r * v FMAs and r + v loads. Two of each a cycle, one where vectors
    have 64 bytes; no accumulator is updated more often than every 4 cycles, an FMA's latency. The last term breaks ties for square
    tiles, which load least. Smaller tiles at the edges count with their own cost. width and lanes in elements.

    A tile's end takes a cycle for each accumulator, more where few registers are left: the next tile's start then can't overlap with it
    (12544x96x16: 9x48 leaves one and takes 442 us, 6x64 three and 358).
    """
    cycles = 0.0
    for row_tiles, r in _parts(*rows):
        for column_tiles, c in _parts(*columns):
            for panels, elements in _parts(*width):
                own = emit.lanes_for(elements, lanes)
                v, each = -(-elements // own), 1.0 if own == lanes and machine.isa.vector_bytes == 64 else 0.5
                step = max(r * c * v * each, r * c / 2 + v * each, 4.0) + (r * c + v) / 50
                spare = max(1, machine.isa.registers - registers_of(r * c, v))
                cycles += row_tiles * column_tiles * panels * (reduction * step + r * c * v * (1 + 2 / spare) + 10)
    return round(cycles, 3)  # equal tiles tie


def registers_of(rows: int, vectors: int) -> int:
    """That a register tile needs: its accumulators, a row of weights and one broadcast."""
    return (rows + 1) * vectors + 1


def eviction(rows: int, row_bytes: int, machine: Machine) -> float:
    """By how much `rows` rows, read side by side, slow a tile down when their lines fall into too few sets of the L1 to stay there.

    A way of an L1 is a page, 4096 bytes, on every CPU that looks its L1 up by virtual address; two ways are left to the other operand.
    Of 14 rows of 4096 bytes: 89 GFLOP/s against 117 with 6 rows, on an L1 of 8 ways.
    """
    way = 4096
    per_set = rows * math.gcd(row_bytes, way) / way
    return max(1.0, 1 + (per_set / (machine.l1 / way - 2) - 1) / 4)


def _parts(extent: int, tile: int) -> list[tuple[int, int]]:
    """(how many, how large): the whole tiles and the rest."""
    return [(count, size) for count, size in ((extent // tile, tile), (1, extent % tile)) if count and size]


def unroll(accumulators: int, vectors: int, most: int, machine: Machine) -> int:
    """Steps of the reduction to a loop body: as many as leave a register for each of their vectors.

    LLVM loads the next steps' vectors ahead of their use: 14x32 on 32 registers spills with two steps (120 us on 14x14x272, g4), 7x32
    doesn't (73 us).
    """
    return max(1, min(most, (machine.isa.registers - 1 - accumulators) // vectors))


def check_tile(rows: int, nr: int, machine: Machine, dtype: str) -> None:
    """Raises ScheduleRefused unless `rows` x `nr` accumulators, a row of weights and one broadcast fit the registers."""
    lanes, isa = machine.isa.lanes(dtype), machine.isa
    if nr % lanes:
        raise ScheduleRefused(f"nr={nr} is not a multiple of {lanes}, the lanes of {isa.name}")
    needed = registers_of(rows, nr // lanes)
    if needed > isa.registers:
        raise ScheduleRefused(f"a {rows}x{nr} tile needs {needed} registers, {isa.name} has {isa.registers}")


def candidates_of(workload: Workload, tiles: Sequence[Mapping[str, int | str]]) -> tuple[Candidate, ...]:
    """The default first: the whole epilogue in registers on the best tile; then tile by tile, every placement and cut."""
    epilogue = workload.epilogue
    whole = len(epilogue.steps)
    found = []
    for tile in tiles[:TILES]:
        knobs = tuple(sorted(tile.items()))
        found.append(Candidate("register", whole, knobs))
        if not whole:
            continue
        cuts = [cut for cut in epilogue.legal_cuts() if cut]
        found += [Candidate("tile", cut, knobs) for cut in reversed(cuts)]
        found += [Candidate("register", cut, knobs) for cut in reversed(cuts) if cut != whole]
        found.append(Candidate("separate", 0, knobs))
    return tuple(found)


def assemble(
    workload: Workload,
    candidate: Candidate,
    machine: Machine,
    anchor_buffers: tuple[Buffer, ...],
    compute: Callable[[Epilogue, tuple[Buffer, ...], str], Launch],
    packers: Mapping[int, Packer],
    prepare: tuple[Launch, Buffer, int] | None = None,
) -> Kernel:
    """The anchor with the first part of the epilogue, then the rest of it as an elementwise pass.

    compute   (epilogue, its operand buffers, output dtype) -> the anchor's launch, its arguments still to be bound; without flop those of
              the anchor hold.
    prepare   (launch, result, input): a first launch that turns anchor input `input` into `result`, which then stands in its place.
    """
    anchor, epilogue = workload.anchor, workload.epilogue
    if (candidate.placement == "separate") != (candidate.cut == 0 and bool(epilogue.steps)):
        raise ScheduleRefused(f"placement {candidate.placement!r} doesn't go with cut {candidate.cut}")
    if candidate.cut not in epilogue.legal_cuts():
        raise ScheduleRefused(f"cut {candidate.cut} leaves more than one value live; legal: {epilogue.legal_cuts()}")
    head, tail = epilogue.split(candidate.cut)
    head_order, tail_order = epilogue.operand_order(candidate.cut)
    operands = tuple(Buffer(o.shape, o.dtype) for o in epilogue.operands)
    buffers = [*anchor_buffers, *operands]
    inputs, first_operand = len(buffers), len(anchor_buffers)
    anchor_args, launches = list(range(first_operand)), []
    if prepare is not None:
        launch, result, source = prepare
        launches.append(Launch(launch.func, (source, len(buffers))))
        anchor_args[source] = len(buffers)
        buffers.append(result)
    dtype = head.steps[-1].dtype if head.steps else anchor.dtype
    shape = anchor.output_shape()
    launch = compute(head, tuple(operands[i] for i in head_order), dtype)
    arguments = (*anchor_args, *(first_operand + i for i in head_order), len(buffers))
    launches.append(Launch(launch.func, arguments, flop=launch.flop or anchor.flop()))
    buffers.append(Buffer(shape, dtype))
    if tail.steps:
        second = Workload(Elementwise(shape, dtype), tail)
        (after,) = elementwise.kernel(second, elementwise.candidates(second, machine)[0], machine).launches
        launches.append(Launch(after.func, (len(buffers) - 1, *(first_operand + i for i in tail_order), len(buffers))))
        buffers.append(Buffer(shape, workload.output_dtype))
    return Kernel(tuple(buffers), inputs, (len(buffers) - 1,), tuple(launches), packers)
