"""GRU and LSTM: all steps of one direction in a single PrimFunc, the recurrent weights streaming from L2 once a step.

Strategy
    1. R is packed as a constant B of a matmul: panels of nr gate columns, each (hidden, width) and dense, so that one step reads
       them as a single stream. That stream is the bound of a small batch: hidden = 256 takes 0.8 MB a step.
    2. A register tile is rows of the batch by nr gate columns, accumulated over k = hidden in ascending order.
    3. The gates' activations and the update of the state are vectors over hidden, after all columns of a step are done.
    4. A GRU without linear_before_reset multiplies r and h first: its candidate gate is packed and accumulated apart.
The state lives in the results Y_h and Y_c themselves; the recurrent bias is added once the reduction is done.
Rejected: schedule primitives (they refuse the loop-carried state); one call per step (0.1 us each and no gain).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from ..errors import ScheduleRefused
from ..values import Candidate, Machine, Matmul, Recurrent, Workload
from . import emit, matmul
from .emit import Flat, Index, RegisterTile
from .family import Buffer, Kernel, Launch
from .grain import compute_seconds, threads_for
from .math import sigmoid, tanh
from .rounding import add, const, mul, sub
from .space import candidates_of, check_tile, tile_cycles

# All tiles stream the same weights and differ by some cycles a panel: the best few are enough to choose from.
MAX_TILES = 4


def tiles(workload: Workload, machine: Machine) -> list[dict[str, int]]:
    """Panel widths, the analytically best first. Every step of a parallel kernel is a parallel region and has to pay for it."""
    anchor = workload.anchor
    assert isinstance(anchor, Recurrent)
    lanes = machine.isa.lanes(anchor.dtype)
    in_parts = [-(-columns // lanes) for _, columns in parts(anchor)]
    widths = [vectors for vectors in range(1, machine.isa.registers // 2) if vectors <= max(in_parts)]

    def cycles(vectors: int) -> float:
        rows = rows_of_tile(anchor, vectors, machine)
        return sum(
            tile_cycles((anchor.batch, rows), (1, 1), (columns, vectors * lanes), anchor.hidden, lanes, machine)
            for _, columns in parts(anchor)
        )

    one_step = Workload(dataclasses.replace(anchor, steps=1))
    split = threads_for(machine, compute_seconds(one_step, machine))
    best = sorted(widths, key=lambda vectors: (cycles(vectors), vectors))[:MAX_TILES]
    return [{"nr": vectors * lanes, "ku": 4, "threads": split} for vectors in best]


def rows_of_tile(anchor: Recurrent, vectors: int, machine: Machine) -> int:
    """The batch in as few and as even runs of rows as the registers allow: rows * vectors accumulators, a row of R, a broadcast."""
    most = (machine.isa.registers - 1 - vectors) // vectors
    return -(-anchor.batch // -(-anchor.batch // most))


def parts(anchor: Recurrent) -> tuple[tuple[int, int], ...]:
    """(first gate column, columns) of what one step can accumulate without waiting for a gate of its own."""
    hidden, columns = anchor.hidden, anchor.gates * anchor.hidden
    if anchor.kind == "gru" and not anchor.linear_before_reset:
        return (0, 2 * hidden), (2 * hidden, hidden)
    return ((0, columns),)


def candidates(workload: Workload, machine: Machine) -> tuple[Candidate, ...]:
    return candidates_of(workload, tiles(workload, machine))


def kernel(workload: Workload, candidate: Candidate, machine: Machine) -> Kernel:
    """Y, Y_h[, Y_c] as ONNX's GRU and LSTM define them; each op rounds once.

        GRU   z, r = sigmoid(x + (h R^T + b));  n = tanh(xn + r * (h Rn^T + bn)), or tanh(xn + ((r * h) Rn^T + bn)) when not
              linear_before_reset;  h' = (1 - z) * n + z * h
        LSTM  i, o, f = sigmoid(x + (h R^T + b));  c' = f * c + i * tanh(xc + (h Rc^T + bc));  h' = o * tanh(c')

    Shapes   projections (steps,batch,gates*hidden), R packed flat, b (gates*hidden,), h0 and c0 (batch,hidden); Y (steps,batch,hidden),
             Y_h and Y_c (batch,hidden).
    Raises   ScheduleRefused when the tile doesn't fit the registers, or for an epilogue: the state is read back before it could run.
    """
    anchor = workload.anchor
    assert isinstance(anchor, Recurrent)
    if workload.epilogue.steps or candidate.placement != "register":
        raise ScheduleRefused("a recurrent anchor has no epilogue: its result is the next step's input")
    lanes = machine.isa.lanes(anchor.dtype)
    nr = candidate["nr"]
    check_tile(1, nr, machine, anchor.dtype)
    projections, _, bias, *initial = (Buffer(shape, anchor.dtype) for shape in anchor.input_shapes())
    packed = Buffer((anchor.hidden * sum(_packed_columns(anchor, nr, lanes)),), anchor.dtype)
    buffers = (projections, packed, bias, *initial, Buffer(anchor.output_shape(), anchor.dtype), *initial)
    rows = rows_of_tile(anchor, nr // lanes, machine)
    func = emit.function(anchor.kind, buffers, lambda *views: _body(anchor, candidate, rows, lanes, *views))
    inputs, results = 3 + len(initial), 1 + len(initial)
    launch = Launch(func, tuple(range(len(buffers))), results, anchor.flop(), anchor.steps)
    packers = {1: lambda array: pack(anchor, array, nr, lanes)}
    return Kernel(buffers, inputs, tuple(range(inputs, len(buffers))), (launch,), packers)


def _packed_columns(anchor: Recurrent, nr: int, lanes: int) -> list[int]:
    return [matmul.packed_columns(_product(anchor, columns), nr, lanes) for _, columns in parts(anchor)]


def _product(anchor: Recurrent, columns: int) -> Matmul:
    """h R^T for some of the gate columns."""
    return Matmul(1, anchor.batch, columns, anchor.hidden, b="nk", dtype=anchor.dtype)


def pack(anchor: Recurrent, array: np.ndarray, nr: int, lanes: int) -> np.ndarray:
    """R (gates * hidden, hidden) -> each part's flat panels of gate columns, one part after the other."""
    rows = ((array[first : first + columns], columns) for first, columns in parts(anchor))
    return np.concatenate([matmul.pack(_product(anchor, columns), part, nr, lanes) for part, columns in rows])


def _body(
    anchor: Recurrent, candidate: Candidate, mr: int, lanes: int, projections: Flat, weights: Flat, bias: Flat, *states: Flat
) -> None:
    hidden, columns = anchor.hidden, anchor.gates * anchor.hidden
    initial, (sequence, *results) = states[: len(states) // 2], states[len(states) // 2 :]
    h = results[0]
    sums = emit.scratch(anchor.batch * columns, anchor.dtype)
    reset = emit.scratch(anchor.batch * hidden, anchor.dtype) if len(parts(anchor)) > 1 else h

    def product(part: int, state: Flat) -> None:
        """sums[batch, columns of the part] = state x R^T."""
        first, extent = parts(anchor)[part]
        nr = candidate["nr"]
        start = hidden * sum(_packed_columns(anchor, nr, lanes)[:part])

        def micro(row0: Index, rows: int, panel: Index, width: int) -> None:
            tile = RegisterTile(rows, width, emit.lanes_for(width, lanes), anchor.dtype)

            def step(k: Index) -> None:
                at = start + panel * (nr * hidden) + k * (tile.vectors * tile.lanes)
                row_of_r = [weights.load(at + vector * tile.lanes, tile.lanes) for vector in range(tile.vectors)]
                for row in range(rows):
                    value = emit.splat(state.scalar((row0 + row) * hidden + k), tile.lanes)
                    for vector in range(tile.vectors):
                        tile.accumulate(row, vector, value, row_of_r[vector])

            emit.reduce_over(hidden, candidate["ku"], step)
            for row in range(rows):
                for vector in range(tile.vectors):
                    at = (row0 + row) * columns + first + panel * nr + vector * tile.lanes
                    sums.store(at, tile[row, vector], tile.lanes, tile.valid(vector))

        panels, row_tiles = -(-extent // nr), -(-anchor.batch // mr)
        # A function of its own: LLVM else keeps the activations' coefficients in registers here, and spills the accumulators (3.4x).
        with T.attr(0, "compute_scope", f"product{part}"), emit.shared_loop(panels * row_tiles, candidate["threads"]) as work:
            panel, row_tile = work // row_tiles, work % row_tiles

            def with_width(width: int) -> None:
                emit.with_tail(row_tile, anchor.batch, mr, lambda rows: micro(row_tile * mr, rows, panel, width))

            emit.with_tail(panel, extent, nr, with_width)

    def each(body: Callable[[Index, Index, int], None]) -> None:
        """body(row, first of a vector of hidden units, valid) for all of the state."""
        with emit.loop(anchor.batch) as row:
            emit.each_vector(hidden, lanes, lambda at, valid: body(row, at, valid))

    def update(t: Index) -> None:
        def recurrent(gate: int, row: Index, at: Index, valid: int) -> Expr:
            """The gate's reduction and its bias."""
            column = gate * hidden + at
            return T.bind(add(sums.load(row * columns + column, lanes, valid), bias.load(column, lanes, valid)))

        def projected(gate: int, row: Index, at: Index, valid: int) -> Expr:
            return projections.load(t * (anchor.batch * columns) + row * columns + gate * hidden + at, lanes, valid)

        def before(gate: int, *where: Index) -> Expr:
            return T.bind(add(projected(gate, *where), recurrent(gate, *where)))

        def gru(row: Index, at: Index, valid: int) -> None:
            where = row, at, valid
            old = T.bind(h.load(row * hidden + at, lanes, valid))
            z = T.bind(sigmoid(before(0, *where), bind=T.bind))
            if anchor.linear_before_reset:
                r = T.bind(sigmoid(before(1, *where), bind=T.bind))
                n = T.bind(add(projected(2, *where), mul(r, recurrent(2, *where))))
            else:
                n = before(2, *where)
            n = T.bind(tanh(n, bind=T.bind))
            write(h, add(mul(sub(const(1, z), z), n), mul(z, old)), *where)

        def gated_reset(row: Index, at: Index, valid: int) -> None:
            r = T.bind(sigmoid(before(1, row, at, valid), bind=T.bind))
            reset.store(row * hidden + at, mul(r, h.load(row * hidden + at, lanes, valid)), lanes, valid)

        def lstm(row: Index, at: Index, valid: int) -> None:
            where, c = (row, at, valid), results[1]
            i, o, f = (T.bind(sigmoid(before(gate, *where), bind=T.bind)) for gate in range(3))
            cell = T.bind(tanh(before(3, *where), bind=T.bind))
            new = T.bind(add(mul(f, c.load(row * hidden + at, lanes, valid)), mul(i, cell)))
            c.store(row * hidden + at, new, lanes, valid)
            write(h, mul(o, T.bind(tanh(new, bind=T.bind))), *where)

        def write(state: Flat, value: Expr, row: Index, at: Index, valid: int) -> None:
            value = T.bind(value)
            state.store(row * hidden + at, value, lanes, valid)
            sequence.store(t * (anchor.batch * hidden) + row * hidden + at, value, lanes, valid)

        if reset is not h:
            each(gated_reset)
            product(1, reset)
        each(gru if anchor.kind == "gru" else lstm)

    for source, state in zip(initial, results, strict=True):
        emit.copy(state, 0, source, 0, anchor.batch * hidden, lanes)
    with emit.loop(anchor.steps) as step:
        product(0, h)
        update(anchor.steps - 1 - step if anchor.reverse else step)
