"""Dot products: a reduction whose results have nothing to vectorise over.

    acc[l] = sum over k = l, l + 16, ... of a[k] * b[k], ascending;  result = acc folded: 16 -> 8 -> 4 -> 2 -> 1

The 16 lanes and the tree are the same on every instruction set, which splits them over as many vectors as it needs.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm.ir import Expr

from . import emit, rounding
from .emit import Index, RegisterTile
from .forms import LOGICAL_LANES, powers_of_two


class DotTile:
    """rows dot products at a time, all with one vector."""

    def __init__(self, rows: int, dtype: str) -> None:
        self._rows, self._lanes = rows, emit.registers(rows * LOGICAL_LANES, dtype)
        for row in range(rows):
            self._lanes.store(row * LOGICAL_LANES, emit.constant(0.0, dtype, LOGICAL_LANES), LOGICAL_LANES)

    def accumulate(self, length: int, a: Callable[[int, Index, int], Expr], b: Callable[[Index, int], Expr]) -> None:
        """Add `length` products. a(row, k, lanes) and b(k, lanes) are `lanes` elements from k on."""

        def step(k: Index, lanes: int, lane: int = 0) -> None:
            vector = b(k, lanes)
            for row in range(self._rows):
                start = row * LOGICAL_LANES + lane
                self._lanes.store(start, rounding.fma(a(row, k, lanes), vector, self._lanes.load(start, lanes)), lanes)

        whole = length // LOGICAL_LANES * LOGICAL_LANES
        if whole:
            with emit.loop(whole // LOGICAL_LANES) as run:
                step(run * LOGICAL_LANES, LOGICAL_LANES)
        for start, lanes in powers_of_two(whole, length):
            step(start, lanes, start - whole)

    def folded(self) -> RegisterTile:
        """The results as a tile of one column."""
        lanes, tile = self._lanes, RegisterTile(self._rows, 1, 1, self._lanes.dtype)
        for row in range(self._rows):
            start, half = row * LOGICAL_LANES, LOGICAL_LANES // 2
            while half:
                lanes.store(start, rounding.add(lanes.load(start, half), lanes.load(start + half, half)), half)
                half //= 2
            tile.set(row, 0, lanes.scalar(start))
        return tile
