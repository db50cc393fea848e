"""Direct k x k convolution in NHWC as an implicit matmul: no im2col buffer, stride, dilation, padding and groups.

Strategy
    1. Weights are packed per group into panels of nr output channels, each (KH, KW, CI / groups, width) and dense.
    2. A th x tw block of output pixels by nr channels lives in registers over the whole reduction, which ascends in kh, kw, ci.
    3. Small images take several rows to a tile, so that 7x7 fills the registers as 56x56 does.
    4. Padding is a zero-bordered copy or inline, see window.py.
    5. A single output channel is a dot product over each tap's input channels, see dot.py.
Rejected: im2col (writes KH * KW times the input); NCHW (its taps can't be one vector across output
channels; where these are few, see planar_conv2d.py).
Source    direct convolution with register blocking over pixels and channels: Zhang, Franchetti and Low, ICML 2018.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
from tvm.ir import Expr

from ..errors import ScheduleRefused
from ..values import Candidate, Conv2d, Epilogue, Machine, Workload
from . import emit, window
from .dot import DotTile
from .emit import Flat, Index, RegisterTile, Tile, Tiling
from .family import Buffer, Kernel, Launch, Packer
from .forms import LOGICAL_LANES
from .grain import compute_seconds, threads_for
from .matmul import panelled
from .placement import store_tile
from .space import assemble, candidates_of, check_tile, registers_of, tile_cycles, unroll

# Steps of a reduction that LLVM unrolls whole, with the weights of the next steps loaded ahead.
UNROLLED = 18
# Columns of taps that tiles at the border are written out for by default: with 31 LLVM takes 25 s for a kernel, 0.2 s after a copy.
WRITTEN_OUT = 7


def tiles(workload: Workload, machine: Machine) -> list[dict[str, int | str]]:
    """Legal register tiles with their padding mode, the analytically best first."""
    anchor = workload.anchor
    assert isinstance(anchor, Conv2d)
    lanes = machine.isa.lanes(anchor.dtype)
    per_group = anchor.co // anchor.groups
    channels = anchor.ci // anchor.groups
    split = threads_for(machine, compute_seconds(workload, machine))
    found = []
    for vectors in range(1, min(8, -(-per_group // lanes)) + 1):
        for th, tw in _blocks(anchor, vectors, machine):
            found.append((_tile_cycles(anchor, th, tw, vectors * lanes, machine), th, tw, vectors))
    steps = channels if channels <= 4 else 2
    return [
        {"th": th, "tw": tw, "nr": vectors * lanes, "ku": unroll(th * tw * vectors, vectors, steps, machine), "pad": mode, "threads": split}
        for _, th, tw, vectors in sorted(found)
        for mode in _padding_modes(anchor, th, tw, vectors, machine)
    ]


def is_dot(anchor: Conv2d) -> bool:
    """Whether there is nothing but the input channels to vectorise over."""
    return anchor.co == 1


def _tile_cycles(anchor: Conv2d, th: int, tw: int, nr: int, machine: Machine) -> float:
    """Of one image and group. The last panel, row of tiles and column of tiles may be smaller; each counts with its own cost."""
    channels, lanes = anchor.ci // anchor.groups, machine.isa.lanes(anchor.dtype)
    if is_dot(anchor):
        steps = anchor.kh * anchor.kw * -(-channels // LOGICAL_LANES)
        return tile_cycles((anchor.oh, th), (anchor.ow, tw), (LOGICAL_LANES, LOGICAL_LANES), steps, lanes, machine)
    reduction = anchor.kh * anchor.kw * channels
    return tile_cycles((anchor.oh, th), (anchor.ow, tw), (anchor.co // anchor.groups, nr), reduction, lanes, machine)


def cycles(workload: Workload, candidate: Candidate, machine: Machine) -> float:
    """Of the whole convolution by the analytic prior, on the threads that the candidate uses."""
    anchor = workload.anchor
    assert isinstance(anchor, Conv2d)
    one = _tile_cycles(anchor, candidate["th"], candidate["tw"], candidate["nr"], machine)
    return anchor.n * anchor.groups * one / candidate["threads"]


def _blocks(anchor: Conv2d, vectors: int, machine: Machine) -> Iterator[tuple[int, int]]:
    # 12x32 spills on 100x96x2->64 in 2 groups (178 us), 11x32 doesn't (108 us)
    ahead = 3 if anchor.kh * anchor.kw * (anchor.ci // anchor.groups) <= UNROLLED else 0
    each = max(1, LOGICAL_LANES // machine.isa.lanes(anchor.dtype)) if is_dot(anchor) else 1  # vectors of an accumulator
    for tw in range(1, min(anchor.ow, 28) + 1):
        for th in range(1, anchor.oh + 1):
            if th > 1 and tw < anchor.ow:
                break  # several rows only where one row can't fill the registers
            needed = registers_of(th * tw + (ahead if th * tw > 1 else 0), vectors * each)  # a single pixel is always on offer
            if needed > machine.isa.registers:
                break
            yield th, tw


def _padding_modes(anchor: Conv2d, th: int, tw: int, vectors: int, machine: Machine) -> tuple[str, ...]:
    """The better one first. Inline saves the copy (5 % of 224x224x64), but has each row of taps in a loop of its own, which loads ahead:
    a tile that leaves few registers then spills, sooner where channels are few and LLVM unrolls them (7x7 stem in 12x32 tiles: 2,469 us
    against 2,188 with a copy, in 5x64 tiles 2,070 against 2,172; 11x32 tiles of 100x32x1->64 43 against 37).
    """
    if not any(anchor.padding):
        return ("none",)
    if th > 1 or not _few_borders(anchor, tw):
        return ("copy",)
    channels = anchor.ci // anchor.groups
    needed = registers_of(th * tw, vectors) + (2 if channels > 4 else 6)
    inline_first = anchor.kh * anchor.kw * channels > UNROLLED and needed < machine.isa.registers and anchor.kw <= WRITTEN_OUT
    return ("inline", "copy") if inline_first else ("copy", "inline")


def _few_borders(anchor: Conv2d, tw: int) -> bool:
    return len(window.border_tiles(anchor.ow, tw, partial(crosses, anchor))[1]) <= window.MAX_BORDER_TILES


def crosses(anchor: Conv2d, first: int, count: int) -> bool:
    """Whether outputs first .. first + count - 1 of a row read left or right of the image."""
    left = first * anchor.stride[1] - anchor.padding[1]
    right = (first + count - 1) * anchor.stride[1] - anchor.padding[1] + (anchor.kw - 1) * anchor.dilation[1]
    return left < 0 or right >= anchor.w


def candidates(workload: Workload, machine: Machine) -> tuple[Candidate, ...]:
    return candidates_of(workload, tiles(workload, machine))


def kernel(workload: Workload, candidate: Candidate, machine: Machine) -> Kernel:
    """Y = conv(X, W) with the epilogue where the candidate places it.

    Shapes   X (N,H,W,CI), W packed flat, operands as stored, Y (N,OH,OW,CO).
    Raises   ScheduleRefused when the tile doesn't fit the registers or its padding mode doesn't go with it.
    """
    anchor = workload.anchor
    assert isinstance(anchor, Conv2d)
    lanes = machine.isa.lanes(anchor.dtype)
    th, tw, nr = candidate["th"], candidate["tw"], candidate["nr"]
    check_tile(th * tw, nr, machine, anchor.dtype)
    if candidate["pad"] == "none" and any(anchor.padding):
        raise ScheduleRefused(f"padding {anchor.padding} has to be copied or inline")
    if candidate["pad"] == "inline" and (th > 1 or not _few_borders(anchor, tw)):
        raise ScheduleRefused("inline padding needs tiles of one row of which few cross the border")
    weights = Buffer(
        (anchor.groups * emit.padded(anchor.co // anchor.groups, nr, lanes) * anchor.kh * anchor.kw * (anchor.ci // anchor.groups),),
        anchor.dtype,
    )

    def compute(epilogue: Epilogue, operands: tuple[Buffer, ...], dtype: str) -> Launch:
        buffers = (Buffer(anchor.input_shapes()[0], anchor.dtype), weights, *operands, Buffer(anchor.output_shape(), dtype))
        return Launch(
            emit.function("conv2d", buffers, lambda x, w, *rest: _body(anchor, candidate, lanes, epilogue, x, w, rest[:-1], rest[-1])), ()
        )

    inputs = (Buffer(anchor.input_shapes()[0], anchor.dtype), weights)
    return assemble(workload, candidate, machine, inputs, compute, {1: Packer(pack, (anchor, nr, lanes))})


def _body(
    anchor: Conv2d, candidate: Candidate, lanes: int, epilogue: Epilogue, x: Flat, w: Flat, operands: tuple[Flat, ...], out: Flat
) -> None:
    th, tw, nr, threads = candidate["th"], candidate["tw"], candidate["nr"], candidate["threads"]
    per_group, channels = anchor.co // anchor.groups, anchor.ci // anchor.groups
    inline = candidate["pad"] == "inline"
    top, left = anchor.padding[:2] if inline else (0, 0)
    image = window.pad(x, anchor.padding, lanes, threads) if candidate["pad"] == "copy" else x
    taps = anchor.kh * anchor.kw * channels
    row_stride, pixel_stride = image.strides[1], image.strides[2]

    def micro(n: Index, group: Index, channel0: Index, width: int, oh0: Index, rows: int, ow0: Index, columns: int) -> None:
        tile = RegisterTile(rows * columns, width, emit.lanes_for(width, lanes), anchor.dtype)
        products = DotTile(rows * columns, anchor.dtype) if is_dot(anchor) else None
        panel_width = tile.vectors * tile.lanes
        weights = (group * emit.padded(per_group, nr, lanes) + channel0) * taps

        def first_channel(pixel: int, kh: Index, kw: Index) -> Index | None:
            """Where the channels that a tap of an output pixel reads begin; None outside of the image."""
            dy, dx = divmod(pixel, columns)
            ih = (oh0 + dy) * anchor.stride[0] - top + kh * anchor.dilation[0]
            iw = (ow0 + dx) * anchor.stride[1] - left + kw * anchor.dilation[1]
            if isinstance(iw, int) and not 0 <= iw < image.shape[2]:
                return None
            return n * image.strides[0] + ih * row_stride + iw * pixel_stride + group * channels

        def accumulate(kh: Index, kw: Index, blank: bool) -> None:
            starts = [None if blank else first_channel(pixel, kh, kw) for pixel in range(rows * columns)]
            start_of_w = weights + (kh * anchor.kw + kw) * (channels * panel_width)

            def step(ci: Index) -> None:
                at = start_of_w + ci * panel_width
                row_of_w = [w.load(at + vector * tile.lanes, tile.lanes) for vector in range(tile.vectors)]
                for pixel, start in enumerate(starts):
                    if start is None:
                        value = emit.constant(0.0, anchor.dtype, tile.lanes)
                    else:
                        value = emit.splat(image.scalar(start + ci), tile.lanes)
                    for vector in range(tile.vectors):
                        tile.accumulate(pixel, vector, value, row_of_w[vector])

            def run_of_x(pixel: int, ci: Index, count: int) -> Expr:
                start = starts[pixel]
                if start is None:
                    return emit.constant(0.0, anchor.dtype, count)
                return image.load(start + ci, count)

            if products is None:
                emit.reduce_over(channels, candidate["ku"], step)
            else:
                products.accumulate(channels, run_of_x, lambda ci, count: w.load(start_of_w + ci, count))

        def row_of_taps(kh: Index, blank: bool) -> None:
            if inline and isinstance(ow0, int):  # which taps are outside depends on kw: it has to be known
                for kw in range(anchor.kw):
                    accumulate(kh, kw, blank)
            else:
                with emit.loop(anchor.kw) as kw:
                    accumulate(kh, kw, blank)

        with emit.loop(anchor.kh) as kh:
            if inline and (anchor.padding[0] or anchor.padding[2]):
                ih = oh0 * anchor.stride[0] - top + kh * anchor.dilation[0]
                emit.either((ih >= 0) & (ih < anchor.h), lambda: row_of_taps(kh, False), lambda: row_of_taps(kh, True))
            else:
                row_of_taps(kh, False)
        store_tile(
            tile if products is None else products.folded(),
            candidate.placement,
            epilogue,
            operands,
            out,
            lambda row: [n, oh0 + row // columns, ow0 + row % columns, group * per_group + channel0],
        )

    axes = (
        Tiling(anchor.groups),
        Tiling(per_group, nr),
        Tiling(anchor.n),
        Tiling(anchor.oh, th),
        window.Windows(anchor.ow, tw, partial(crosses, anchor) if inline else window.never),
    )

    def body(group: Tile, channels: Tile, n: Tile, rows: Tile, columns: Tile) -> None:
        micro(n[0], group[0], *channels, *rows, *columns)

    emit.shared_tiles(axes, threads, body, preferred=[(2, 3)])


def pack(array: np.ndarray, anchor: Conv2d, nr: int, lanes: int) -> np.ndarray:
    """(CO, KH, KW, CI / groups) -> flat panels per group, each (KH, KW, CI / groups, width), zero-padded to the lanes."""
    taps = np.moveaxis(array.reshape(anchor.groups, anchor.co // anchor.groups, -1), 1, 2)
    return panelled(taps, nr, lanes)
