"""GRU and LSTM: all steps of one direction in a single PrimFunc, the recurrent weights streaming from L2 once a step.

Strategy
    1. A block is a run of hidden units with all the gates that can be had from the same state. R is packed block by block, each
       (hidden, gates, units) and dense, so that one step reads it as a single stream. That stream is the bound of a small batch:
       hidden = 256 takes 0.8 MB a step.
    2. A register tile is rows of the batch by a block's gate columns, accumulated over k = hidden in ascending order.
    3. The gates' activations and the update of the state follow each block, as vectors over its units.
    4. A GRU without linear_before_reset multiplies r and h first: its candidate gate is a second phase.
    5. Threads share the blocks of a phase and meet at its end. The state has two places, read and written in turn: nobody then
       overwrites what another one still reads.
The recurrent bias is added once the reduction is done.
Rejected: schedule primitives (they refuse the loop-carried state); one call per step (0.1 us each and no gain); a parallel region per
step (1.2 us each; a barrier takes a third of that); panels of gate columns with all activations behind them (two barriers a step).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from ..errors import ScheduleRefused
from ..values import ITEM_BYTES, Candidate, Machine, Recurrent, Workload
from . import emit
from .emit import Flat, Index, RegisterTile
from .family import Buffer, Kernel, Launch, Packer
from .grain import CACHE_BYTES_PER_S, compute_seconds, threads_for
from .math import sigmoid, tanh
from .rounding import add, const, mul, sub
from .space import candidates_of, check_tile, registers_of, tile_cycles

# All tiles stream the same weights and differ by some cycles a panel: the best few are enough to choose from.
MAX_TILES = 4


def tiles(workload: Workload, machine: Machine) -> list[dict[str, int]]:
    """Units of a block, the analytically best first; where threads share a step, last the best for one thread."""
    anchor = workload.anchor
    assert isinstance(anchor, Recurrent)
    lanes = machine.isa.lanes(anchor.dtype)
    in_all = range(1, -(-anchor.hidden // lanes) + 1)
    widths = [vectors for vectors in in_all if registers_of(1, vectors * gates_at_once(anchor)) <= machine.isa.registers]

    def cycles(vectors: int) -> float:
        rows = rows_of_tile(anchor, vectors, machine)
        return sum(
            tile_cycles(
                (anchor.batch, rows), (1, 1), (len(phase) * anchor.hidden, len(phase) * vectors * lanes), anchor.hidden, lanes, machine
            )
            for phase in phases(anchor)
        )

    streamed = anchor.steps * math.prod(anchor.input_shapes()[1]) * ITEM_BYTES[anchor.dtype] / CACHE_BYTES_PER_S
    seconds = max(streamed, compute_seconds(workload, machine))
    split = threads_for(machine, seconds, meetings=anchor.steps * len(phases(anchor)))
    best = sorted(widths, key=lambda vectors: (cycles(vectors), vectors))[:MAX_TILES]
    found = [{"units": vectors * lanes, "ku": 4, "threads": split} for vectors in best]
    return found if split == 1 else [*found, found[0] | {"threads": 1}]


def rows_of_tile(anchor: Recurrent, vectors: int, machine: Machine) -> int:
    """The batch in as few and as even runs of rows as the registers allow: rows * vectors accumulators a gate, a row of R, a broadcast."""
    vectors *= gates_at_once(anchor)
    most = max(1, (machine.isa.registers - 1 - vectors) // vectors)
    return -(-anchor.batch // -(-anchor.batch // most))


def phases(anchor: Recurrent) -> tuple[tuple[int, ...], ...]:
    """The gates of each phase of a step: those that need no other gate's result of all units."""
    if anchor.kind == "gru" and not anchor.linear_before_reset:
        return (0, 1), (2,)
    return (tuple(range(anchor.gates)),)


def gates_at_once(anchor: Recurrent) -> int:
    """Those of a block that has the most."""
    return max(len(phase) for phase in phases(anchor))


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
    lanes, units = machine.isa.lanes(anchor.dtype), candidate["units"]
    check_tile(1, units * gates_at_once(anchor), machine, anchor.dtype)
    projections, _, bias, *initial = (Buffer(shape, anchor.dtype) for shape in anchor.input_shapes())
    packed = Buffer((sum(_packed_sizes(anchor, units, lanes)),), anchor.dtype)
    buffers = (projections, packed, bias, *initial, Buffer(anchor.output_shape(), anchor.dtype), *initial)
    rows = rows_of_tile(anchor, units // lanes, machine)
    func = emit.function(anchor.kind, buffers, lambda *views: _body(anchor, candidate, rows, lanes, *views))
    inputs, results = 3 + len(initial), 1 + len(initial)
    launch = Launch(func, tuple(range(len(buffers))), results, anchor.flop(), anchor.steps)
    packers = {1: Packer(pack, (anchor, units, lanes))}
    return Kernel(buffers, inputs, tuple(range(inputs, len(buffers))), (launch,), packers)


def _packed_sizes(anchor: Recurrent, units: int, lanes: int) -> list[int]:
    """Elements of each phase's blocks."""
    return [anchor.hidden * len(phase) * emit.padded(anchor.hidden, units, lanes) for phase in phases(anchor)]


def pack(array: np.ndarray, anchor: Recurrent, units: int, lanes: int) -> np.ndarray:
    """R (gates * hidden, hidden) -> flat blocks (hidden, gates of the phase, units), one after the other; the last one's units padded."""
    gates = array.reshape(anchor.gates, anchor.hidden, anchor.hidden).transpose(2, 0, 1)
    blocks = []
    for phase in phases(anchor):
        for first in range(0, anchor.hidden, units):
            block = gates[:, phase, first : first + units]
            width = block.shape[2]
            blocks.append(np.pad(block, ((0, 0), (0, 0), (0, emit.padded(width, units, lanes) - width))).reshape(-1))
    return np.concatenate(blocks)


def _body(
    anchor: Recurrent, candidate: Candidate, mr: int, lanes: int, projections: Flat, weights: Flat, bias: Flat, *states: Flat
) -> None:
    hidden, columns = anchor.hidden, anchor.gates * anchor.hidden
    initial, (sequence, *results) = states[: len(states) // 2], states[len(states) // 2 :]
    blocks, row_tiles = emit.Tiling(hidden, candidate["units"]), emit.Tiling(anchor.batch, mr)
    threads = min(candidate["threads"], blocks.count * row_tiles.count)
    starts = list(itertools.accumulate(_packed_sizes(anchor, blocks.size, lanes), initial=0))
    sums = emit.scratch(anchor.batch * columns, anchor.dtype)
    h = emit.scratch(2 * anchor.batch * hidden, anchor.dtype)
    reset = emit.scratch(anchor.batch * hidden, anchor.dtype) if len(phases(anchor)) > 1 else h

    def phase(number: int, state: Flat, of_state: Index, update: Callable[[Index, Index, int], None]) -> None:
        """sums[batch, the phase's gates] = state x R^T, and update(row, first of a vector of units, valid) as soon as they are there."""
        gates = phases(anchor)[number]

        def block_of_rows(row0: Index, rows: int, first: Index, width: int) -> None:
            own = emit.lanes_for(width, lanes)
            tiles = [RegisterTile(rows, width, own, anchor.dtype) for _ in gates]
            vectors = tiles[0].vectors
            start = starts[number] + first * (len(gates) * hidden)

            def step(k: Index) -> None:
                at = start + k * (len(gates) * vectors * own)
                of_r = [weights.load(at + vector * own, own) for vector in range(len(gates) * vectors)]
                for row in range(rows):
                    value = emit.splat(state.scalar(of_state + (row0 + row) * hidden + k), own)
                    for i, r in enumerate(of_r):
                        tiles[i // vectors].accumulate(row, i % vectors, value, r)

            emit.reduce_over(hidden, candidate["ku"], step)
            for gate, tile in zip(gates, tiles, strict=True):
                for row in range(rows):
                    for vector in range(vectors):
                        at = (row0 + row) * columns + gate * hidden + first + vector * own
                        sums.store(at, tile[row, vector], own, tile.valid(vector))
            with emit.loop(rows) as row:
                emit.each_vector(width, lanes, lambda at, valid: update(row0 + row, first + at, valid))

        with emit.phase(threads):
            emit.shared_tiles((blocks, row_tiles), threads, lambda units, rows: block_of_rows(*rows, *units))

    def step(t: Index, now: Index, then: Index) -> None:
        """From the state at h + now to that at h + then."""

        def recurrent(gate: int, row: Index, at: Index, valid: int) -> Expr:
            """The gate's reduction and its bias."""
            column = gate * hidden + at
            return T.bind(add(sums.load(row * columns + column, lanes, valid), bias.load(column, lanes, valid)))

        def projected(gate: int, row: Index, at: Index, valid: int) -> Expr:
            return projections.load(t * (anchor.batch * columns) + row * columns + gate * hidden + at, lanes, valid)

        def before(gate: int, *where: Index) -> Expr:
            return T.bind(add(projected(gate, *where), recurrent(gate, *where)))

        def old(row: Index, at: Index, valid: int) -> Expr:
            return T.bind(h.load(now + row * hidden + at, lanes, valid))

        def gru(*where: Index) -> None:
            z = T.bind(sigmoid(before(0, *where), bind=T.bind))
            if anchor.linear_before_reset:
                r = T.bind(sigmoid(before(1, *where), bind=T.bind))
                n = T.bind(add(projected(2, *where), mul(r, recurrent(2, *where))))
            else:
                n = before(2, *where)
            n = T.bind(tanh(n, bind=T.bind))
            write(add(mul(sub(const(1, z), z), n), mul(z, old(*where))), *where)

        def gated_reset(row: Index, at: Index, valid: int) -> None:
            r = T.bind(sigmoid(before(1, row, at, valid), bind=T.bind))
            reset.store(row * hidden + at, mul(r, old(row, at, valid)), lanes, valid)

        def lstm(*where: Index) -> None:
            row, at, valid = where
            i, o, f = (T.bind(sigmoid(before(gate, *where), bind=T.bind)) for gate in range(3))
            cell = T.bind(tanh(before(3, *where), bind=T.bind))
            c = results[1]
            new = T.bind(add(mul(f, c.load(row * hidden + at, lanes, valid)), mul(i, cell)))
            c.store(row * hidden + at, new, lanes, valid)
            write(mul(o, T.bind(tanh(new, bind=T.bind))), *where)

        def write(value: Expr, row: Index, at: Index, valid: int) -> None:
            value = T.bind(value)
            h.store(then + row * hidden + at, value, lanes, valid)
            sequence.store(t * (anchor.batch * hidden) + row * hidden + at, value, lanes, valid)

        update = gru if anchor.kind == "gru" else lstm
        if reset is not h:
            phase(0, h, now, gated_reset)
            phase(1, reset, 0, update)
        else:
            phase(0, h, now, update)

    size = anchor.batch * hidden
    for source, state in zip(initial, (h, *results[1:]), strict=True):
        emit.copy(state, 0, source, 0, size, lanes)
    with emit.team(threads), emit.loop(anchor.steps) as number:
        now = number % 2 * size
        step(anchor.steps - 1 - number if anchor.reverse else number, now, size - now)
    emit.copy(results[0], 0, h, anchor.steps % 2 * size, size, lanes)
