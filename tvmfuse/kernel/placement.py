"""Where an epilogue is computed: on the accumulators, on an L1-sized tile, or in a pass of its own.

    register   for tile: { reduce into registers; store f(registers) }
    tile       for tile: { reduce into registers; buffer = registers; for row, vector: store f(buffer) }
    separate   for tile: { reduce into registers; store registers };  for all: store f(load)

All three evaluate the same expression on the same values, each op rounded once, so their bits are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm.ir import Expr

from ..values import Epilogue, Operand, Placement
from . import emit
from .emit import Flat, Index, RegisterTile
from .math import evaluate


def read(operand: Operand, view: Flat, at: Sequence[Index], lanes: int, valid: int) -> Expr:
    """The operand's elements that belong to the vector of output elements starting at index `at`."""
    offset: Index = 0
    vector_stride = 0
    for axis, stride in zip(operand.axes, view.strides, strict=True):
        if axis is None:
            continue
        offset = offset + at[axis] * stride
        if axis == len(at) - 1:
            vector_stride = stride
    if vector_stride == 0:
        return emit.splat(view.scalar(offset), lanes)
    return view.load(offset, lanes, valid, vector_stride)


def apply(epilogue: Epilogue, value: Expr, operands: Sequence[Flat], at: Sequence[Index], lanes: int, valid: int) -> Expr:
    """f(value) for one vector of output elements."""
    reads = [read(operand, view, at, lanes, valid) for operand, view in zip(epilogue.operands, operands, strict=True)]
    return evaluate(epilogue, value, reads, bind=emit.held)


def store_tile(
    tile: RegisterTile,
    placement: Placement,
    epilogue: Epilogue,
    operands: Sequence[Flat],
    out: Flat,
    index: Callable[[Index], Sequence[Index]],
) -> None:
    """Write a finished register tile.

    index  row of the tile -> the output index of its first element; rows may be run-time values for placement "tile".
    """

    def store(value: Expr, row: Index, vector: Index, valid: int) -> None:
        *outer, inner = index(row)
        at = [*outer, inner + vector * tile.lanes]
        offset: Index = 0
        for position, stride in zip(at, out.strides, strict=True):
            offset = offset + position * stride
        out.store(offset, apply(epilogue, value, operands, at, tile.lanes, valid), tile.lanes, valid)

    if placement != "tile" or not epilogue.steps:
        for row in range(tile.rows):
            for vector in range(tile.vectors):
                store(tile[row, vector], row, vector, tile.valid(vector))
        return
    lanes, vectors = tile.lanes, tile.vectors
    buffer = emit.scratch(tile.rows * vectors * lanes, tile.dtype)
    for row in range(tile.rows):
        for vector in range(vectors):
            buffer.store((row * vectors + vector) * lanes, tile[row, vector], lanes)
    full = tile.width // lanes
    with emit.loop(tile.rows) as row:
        if full:
            with emit.loop(full) as vector:
                store(buffer.load((row * vectors + vector) * lanes, lanes), row, vector, lanes)
        if full < vectors:
            store(buffer.load((row * vectors + full) * lanes, lanes), row, full, tile.valid(full))
