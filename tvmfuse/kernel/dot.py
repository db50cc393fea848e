"""Dot products: a reduction whose results have nothing to vectorise over.

    acc[l] = sum over k = l, l + 16, ... of a[k] * b[k], ascending;  result = acc folded: 16 -> 8 -> 4 -> 2 -> 1

The 16 lanes and the tree are the same on every instruction set, which splits them over as many vectors as it needs.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm.ir import Expr

from . import emit, rounding
from .emit import RegisterTile
from .forms import LOGICAL_LANES


class DotTile:
    """rows dot products at a time, all with one vector."""

    def __init__(self, rows: int, dtype: str) -> None:
        self._lanes = RegisterTile(rows, LOGICAL_LANES, LOGICAL_LANES, dtype)

    def accumulate(self, length: int, a: Callable[[int, emit.Index, int], Expr], b: Callable[[emit.Index, int], Expr]) -> None:
        """Add `length` products. a(row, k, valid) and b(k, valid) are 16 elements from k on, zeros from `valid` on."""

        def step(k: emit.Index, valid: int) -> None:
            vector = b(k, valid)
            for row in range(self._lanes.rows):
                self._lanes.accumulate(row, 0, a(row, k, valid), vector)

        emit.each_vector(length, LOGICAL_LANES, step)

    def folded(self) -> RegisterTile:
        """The results as a tile of one column."""
        rows, dtype = self._lanes.rows, self._lanes.dtype
        cells, tile = emit.scratch(rows * LOGICAL_LANES, dtype), RegisterTile(rows, 1, 1, dtype)
        for row in range(rows):
            start, half = row * LOGICAL_LANES, LOGICAL_LANES // 2
            cells.store(start, self._lanes[row, 0], LOGICAL_LANES)
            while half:
                cells.store(start, rounding.add(cells.load(start, half), cells.load(start + half, half)), half)
                half //= 2
            tile.set(row, 0, cells.scalar(start))
        return tile
