"""Sliding windows over NHWC images, or over planes as images of one channel: spatial tiles, and the zeros around the image.

Padding is either a zero-bordered copy of the input, made first ("copy"), or taken into account where the window leaves the image
("inline"). In both, a tap outside of the image multiplies a real 0, so that the bits don't depend on the choice.
"""

from __future__ import annotations

from collections.abc import Callable

from . import emit
from .emit import Flat, Index

# Tiles that cross the left or right border are emitted one by one with their position known; beyond this many, copying is the better way.
MAX_BORDER_TILES = 4


def border_tiles(extent: int, tile: int, crosses: Callable[[int, int], bool]) -> tuple[range, list[int]]:
    """(the longest run of whole tiles inside the image, the other tiles). crosses(first, count) says if those outputs read outside."""
    total, whole = -(-extent // tile), extent // tile
    clear = [t for t in range(whole) if not crosses(t * tile, tile)]
    inside = range(clear[0], clear[-1] + 1) if clear else range(0)
    return inside, [t for t in range(total) if t not in inside]


def over_tiles(index: Index, extent: int, tile: int, crosses: Callable[[int, int], bool], body: Callable[[Index, int], None]) -> None:
    """body(first output, outputs) for tile number `index`; the first output is a Python int wherever the window may leave the image."""
    inside, others = border_tiles(extent, tile, crosses)

    def special(remaining: list[int]) -> None:
        position, *rest = remaining
        size = min(tile, extent - position * tile)
        if rest:
            emit.either(index == position, lambda: body(position * tile, size), lambda: special(rest))
        else:
            body(position * tile, size)

    if not others:
        body(index * tile, tile)
    elif not inside:
        special(others)
    elif isinstance(index, int):
        body(index * tile, min(tile, extent - index * tile))
    else:
        within = (index >= inside.start) & (index < inside.stop)
        emit.either(within, lambda: body(index * tile, tile), lambda: special(others))


def each_tile(extent: int, tile: int, crosses: Callable[[int, int], bool], body: Callable[[Index, int], None]) -> None:
    """As `over_tiles` for all tiles in order: those inside the image in a loop, which asks nothing."""
    inside, others = border_tiles(extent, tile, crosses)

    def special(remaining: list[int]) -> None:
        for position in remaining:
            body(position * tile, min(tile, extent - position * tile))

    special([t for t in others if not inside or t < inside.start])
    if inside:
        with emit.loop(len(inside)) as step:
            body((step + inside.start) * tile, tile)
        special([t for t in others if t >= inside.stop])


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
