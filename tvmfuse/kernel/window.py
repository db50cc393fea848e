"""Sliding windows over NHWC images, or over planes as images of one channel: spatial tiles, and the zeros around the image.

Padding is either a zero-bordered copy of the input, made first ("copy"), or taken into account where the window leaves the image
("inline"). In both, a tap outside of the image multiplies a real 0, so that the bits don't depend on the choice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from . import emit
from .emit import Flat, Index, Tiling

# Tiles that cross the left or right border are emitted one by one with their position known; beyond this many, copying is the better way.
MAX_BORDER_TILES = 4


def border_tiles(extent: int, tile: int, crosses: Callable[[int, int], bool]) -> tuple[range, list[int]]:
    """(the longest run of whole tiles inside the image, the other tiles). crosses(first, count) says if those outputs read outside."""
    total, whole = -(-extent // tile), extent // tile
    clear = [t for t in range(whole) if not crosses(t * tile, tile)]
    inside = range(clear[0], clear[-1] + 1) if clear else range(0)
    return inside, [t for t in range(total) if t not in inside]


def never(first: int, count: int) -> bool:
    """Of windows that all lie inside the image, because it has no border or a copied one."""
    return False


@dataclass(frozen=True)
class Windows(Tiling):
    """Outputs of a row in tiles, of which those that read outside of the image are emitted apart, their first output a Python int."""

    crosses: Callable[[int, int], bool] = never

    def each(self, body: Callable[[Index, int], None]) -> None:
        inside, others = border_tiles(self.extent, self.size, self.crosses)
        for tile in others:
            if not inside or tile < inside.start:
                self._apart(tile, body)
        if inside:
            with emit.loop(len(inside)) as step:
                body((step + inside.start) * self.size, self.size)
        for tile in others:
            if inside and tile >= inside.stop:
                self._apart(tile, body)

    def at(self, index: Index, body: Callable[[Index, int], None]) -> None:
        inside, others = border_tiles(self.extent, self.size, self.crosses)

        def special(remaining: list[int]) -> None:
            tile, *rest = remaining
            if rest:
                emit.either(index == tile, lambda: self._apart(tile, body), lambda: special(rest))
            else:
                self._apart(tile, body)

        if not others:
            body(index * self.size, self.size)
        elif not inside:
            special(others)
        else:
            within = (index >= inside.start) & (index < inside.stop)
            emit.either(within, lambda: body(index * self.size, self.size), lambda: special(others))

    def _apart(self, tile: int, body: Callable[[Index, int], None]) -> None:
        body(tile * self.size, min(self.size, self.extent - tile * self.size))


def pad(source: Flat, padding: tuple[int, int, int, int], lanes: int, threads: int) -> Flat:
    """A zero-bordered copy of an NHWC image in working memory. padding is (top, left, bottom, right)."""
    n, h, w, c = source.shape
    top, left, bottom, right = padding
    height, row = h + top + bottom, (w + left + right) * c
    target = emit.scratch(n * height * row, source.dtype).reshaped((n, height, w + left + right, c))
    with emit.shared_loop(n * height, threads) as line:
        image, y = line // height, line % height

        def blank() -> None:
            emit.fill(target, line * row, row, lanes)

        def copied() -> None:
            emit.fill(target, line * row, left * c, lanes)
            emit.copy(target, line * row + left * c, source, (image * h + y - top) * (w * c), w * c, lanes)
            emit.fill(target, line * row + (left + w) * c, right * c, lanes)

        if top == bottom == 0:
            copied()
        else:
            emit.either((y >= top) & (y < top + h), copied, blank)
    return target
