"""Matrix multiplication, batched or not, with M from 1 upwards: packed B, a register tile, k ascending.

Strategy
    1. B is packed into panels of nr columns, each (K, width) and dense; the last panel is as wide as what is left.
    2. Each mr x nr tile of C lives in registers for the whole k loop: one broadcast of A against the panel's row.
    3. Tiles are ordered panel by panel, so that a panel stays in cache while the rows of A pass, or row by row, so that A and C pass
       through the cache once (1,370 us and 1,120 for 3136x256x64 with a residual).
    4. Rows and columns that don't fill a tile get a smaller tile of their own.
    5. One column alone is a dot product, see dot.py.
Rejected: splitting k over accumulators or threads (bits would depend on it); padding M (wasted work on tall, thin A).
Source    the register-tile form is BLIS's micro-kernel (Van Zee and van de Geijn, TOMS 2015, section 4).
"""

from __future__ import annotations

import numpy as np
from tvm import tirx
from tvm.ir import Expr

from ..values import ITEM_BYTES, Candidate, Epilogue, Machine, Matmul, Workload
from . import emit
from .dot import DotTile
from .emit import Flat, Index, RegisterTile, Tiling
from .family import Buffer, Kernel, Launch, Packer
from .forms import LOGICAL_LANES
from .grain import compute_seconds, threads_for
from .placement import store_tile
from .space import assemble, candidates_of, check_tile, eviction, registers_of, tile_cycles, unroll

# Of so many of the best tiles both orders are on offer.
BOTH_ORDERS = 6


def packed_columns(anchor: Matmul, nr: int, lanes: int) -> int:
    return emit.padded(anchor.n, nr, lanes)


def is_dot(anchor: Matmul) -> bool:
    """Whether there is nothing but k to vectorise over, along which A has to be dense."""
    return anchor.n == 1 and anchor.a.endswith("k")


def tiles(workload: Workload, machine: Machine) -> list[dict[str, int | str]]:
    """Legal register tiles, the analytically best first.

    A tile needs rows * vectors accumulators, a row of B and one broadcast.
    """
    anchor = workload.anchor
    assert isinstance(anchor, Matmul)
    lanes = machine.isa.lanes(anchor.dtype)
    row_bytes = _axis_strides(anchor.a, anchor)["m"] * ITEM_BYTES[anchor.dtype]
    found: dict[tuple[int, int], float] = {}
    each = max(1, LOGICAL_LANES // lanes) if is_dot(anchor) else 1  # vectors of an accumulator
    for vectors in range(1, 17):
        if vectors > -(-anchor.n // lanes):
            break
        for rows in range(1, 29):
            if rows > anchor.m or registers_of(rows, vectors * each) > machine.isa.registers:
                continue
            width, steps = (LOGICAL_LANES, -(-anchor.k // LOGICAL_LANES)) if is_dot(anchor) else (anchor.n, anchor.k)
            cycles = tile_cycles((anchor.m, rows), (1, 1), (width, vectors * each * lanes), steps, lanes, machine)
            found[rows, vectors] = eviction(rows, row_bytes, machine) * cycles
    split = threads_for(machine, compute_seconds(workload, machine))
    # Rows outside read and write A and C once and in whole lines, but all of B for each row of tiles: it has to stay in the L2.
    b_stays = anchor.k * anchor.n * ITEM_BYTES[anchor.dtype] <= machine.l2 // 2
    orders = ("rows", "panels") if b_stays else ("panels", "rows")
    return [
        {
            "mr": rows,
            "nr": vectors * lanes,
            "ku": unroll(rows * vectors, vectors, 4 if rows * vectors <= 8 else 2, machine),
            "order": order,
            "threads": split,
        }
        for rank, (rows, vectors) in enumerate(sorted(found, key=lambda tile: (found[tile], tile)))
        for order in orders[: 2 if rank < BOTH_ORDERS else 1]
    ]


def candidates(workload: Workload, machine: Machine) -> tuple[Candidate, ...]:
    return candidates_of(workload, tiles(workload, machine))


def kernel(workload: Workload, candidate: Candidate, machine: Machine) -> Kernel:
    """C = A x B with the epilogue where the candidate places it.

    Shapes   A and B as the anchor says, a constant B packed flat (batch * K * columns,), operands as stored, C in the anchor's order.
    Raises   ScheduleRefused when the tile doesn't fit the registers or B would have to be packed at run time by the caller.
    """
    anchor = workload.anchor
    assert isinstance(anchor, Matmul)
    lanes = machine.isa.lanes(anchor.dtype)
    nr = candidate["nr"]
    check_tile(candidate["mr"], nr, machine, anchor.dtype)
    a_shape, b_shape = anchor.input_shapes()
    panel = b_packed = Buffer((anchor.batch * anchor.k * packed_columns(anchor, nr, lanes),), anchor.dtype)
    packs_here = not anchor.constant_b and not (anchor.b.endswith("n"))
    direct = not anchor.constant_b and not packs_here

    def compute(epilogue: Epilogue, operand_buffers: tuple[Buffer, ...], dtype: str) -> Launch:
        buffers = (
            Buffer(a_shape, anchor.dtype),
            Buffer(b_shape, anchor.dtype) if direct else b_packed,
            *operand_buffers,
            Buffer(anchor.output_shape(), dtype),
        )
        func = emit.function(
            "matmul", buffers, lambda a, b, *rest: _body(anchor, candidate, lanes, direct, epilogue, a, b, rest[:-1], rest[-1])
        )
        return Launch(func, ())

    first = Buffer(b_shape, anchor.dtype) if not anchor.constant_b else panel
    packers = {1: Packer(pack, (anchor, nr, lanes))} if anchor.constant_b else {}
    prepare = (Launch(_pack_function(anchor, nr, lanes), ()), b_packed, 1) if packs_here else None
    return assemble(workload, candidate, machine, (Buffer(a_shape, anchor.dtype), first), compute, packers, prepare)


def _axis_strides(order: str, anchor: Matmul) -> dict[str, int]:
    shape = [anchor.extent(axis) for axis in order]
    return {"b": 0, **dict(zip(order, emit.strides(shape), strict=True))}


def _body(
    anchor: Matmul,
    candidate: Candidate,
    lanes: int,
    direct: bool,
    epilogue: Epilogue,
    a: Flat,
    b: Flat,
    operands: tuple[Flat, ...],
    out: Flat,
) -> None:
    mr, nr, unroll = candidate["mr"], candidate["nr"], candidate["ku"]
    a_stride, b_stride = _axis_strides(anchor.a, anchor), _axis_strides(anchor.b, anchor)
    packed = packed_columns(anchor, nr, lanes)

    def dot(batch: Index, row0: Index, rows: int) -> RegisterTile:
        start_of_b = batch * (b_stride["b"] if direct else anchor.k)

        def row_of_a(row: int, k: Index, count: int) -> Expr:
            return a.load(batch * a_stride["b"] + (row0 + row) * a_stride["m"] + k, count)

        products = DotTile(rows, anchor.dtype)
        products.accumulate(anchor.k, row_of_a, lambda k, count: b.load(start_of_b + k, count))
        return products.folded()

    def product(batch: Index, row0: Index, rows: int, column0: Index, width: int) -> RegisterTile:
        tile = RegisterTile(rows, width, emit.lanes_for(width, lanes), anchor.dtype)
        panel_width = tile.vectors * tile.lanes

        def step(k: Index) -> None:
            if direct:
                start = batch * b_stride["b"] + k * b_stride["k"] + column0
            else:
                start = batch * (anchor.k * packed) + column0 * anchor.k + k * panel_width
            row_of_b = [
                b.load(start + vector * tile.lanes, tile.lanes, tile.valid(vector) if direct else None) for vector in range(tile.vectors)
            ]
            for row in range(rows):
                value = emit.splat(a.scalar(batch * a_stride["b"] + (row0 + row) * a_stride["m"] + k * a_stride["k"]), tile.lanes)
                for vector in range(tile.vectors):
                    tile.accumulate(row, vector, value, row_of_b[vector])

        emit.reduce_over(anchor.k, unroll, step)
        return tile

    def micro(batch: Index, row0: Index, rows: int, column0: Index, width: int) -> None:
        tile = dot(batch, row0, rows) if is_dot(anchor) else product(batch, row0, rows, column0, width)
        position = {"b": batch, "n": column0}
        store_tile(
            tile,
            candidate.placement,
            epilogue,
            operands,
            out,
            lambda row: [row0 + row if axis == "m" else position[axis] for axis in anchor.c],
        )

    batch, rows, columns = Tiling(anchor.batch), Tiling(anchor.m, mr), Tiling(anchor.n, nr)
    if candidate["order"] == "rows":
        emit.shared_tiles((batch, rows, columns), candidate["threads"], lambda b, m, n: micro(b[0], *m, *n))
    else:
        emit.shared_tiles((batch, columns, rows), candidate["threads"], lambda b, n, m: micro(b[0], *m, *n), preferred=[(0,), (2,)])


def pack(array: np.ndarray, anchor: Matmul, nr: int, lanes: int) -> np.ndarray:
    """B in its stored order -> flat panels, each (K, width) with width a multiple of its own lanes, zero-padded."""
    order = [anchor.b.index(axis) for axis in ("b", "k", "n") if axis in anchor.b]
    dense = np.transpose(array, order).reshape(anchor.batch if "b" in anchor.b else 1, anchor.k, anchor.n)
    return panelled(dense, nr, lanes)


def panelled(dense: np.ndarray, nr: int, lanes: int) -> np.ndarray:
    """(groups, K, N) -> the flat panels of each group, one after the other."""
    groups, depth, width = dense.shape
    columns = emit.padded(width, nr, lanes)
    whole = np.zeros((groups, depth, columns), dense.dtype)
    whole[:, :, :width] = dense
    panels = [whole[:, :, start : min(start + nr, columns)].reshape(groups, -1) for start in range(0, columns, nr)]
    return np.ascontiguousarray(np.concatenate(panels, axis=1)).reshape(-1)


def _pack_function(anchor: Matmul, nr: int, lanes: int) -> tirx.PrimFunc:
    """The run-time twin of `pack`, for a B that is computed by the model and whose columns aren't contiguous."""
    stride, columns = _axis_strides(anchor.b, anchor), packed_columns(anchor, nr, lanes)
    size = anchor.batch * anchor.k * columns

    def body(b: Flat, packed: Flat) -> None:
        with emit.loop(anchor.batch) as batch, emit.loop(anchor.k) as k:
            for panel in range(0, anchor.n, nr):
                width = min(nr, anchor.n - panel)
                own = emit.lanes_for(width, lanes)
                for column in range(0, width, own):
                    source = batch * stride["b"] + k * stride["k"] + (panel + column) * stride["n"]
                    target = batch * (anchor.k * columns) + panel * anchor.k + k * min(nr, columns - panel) + column
                    packed.store(target, b.load(source, own, width - column, stride["n"]), own)

    shape = tuple(anchor.extent(axis) for axis in anchor.b)
    return emit.function("pack", (Buffer(shape, anchor.dtype), Buffer((size,), anchor.dtype)), body)
