"""Transposed convolution in NHWC, gathered: each output pixel sums the taps that reach it, ascending in kh, kw, ci.

Strategy
    1. Output pixels whose row and column have the same remainder modulo the stride (a phase) are reached by the same taps, and
       neighbours among them read neighbouring inputs: every phase is a convolution of stride 1 with its own subset of the taps.
    2. A th x tw block of pixels of one phase by nr output channels lives in registers over the whole reduction. Which taps it
       has is known when it is emitted; no multiplication by an inserted zero is ever made.
    3. Weights are packed per group into panels of nr output channels, each (KH, KW, CI / groups, width) and dense. A depthwise
       one is a single group with one input channel to the reduction, whose input is a vector of channels instead of a broadcast.
    4. All phases of a block of rows follow each other, so that its input stays in cache. Borders as in window.py.
Rejected: scattering each input pixel (outputs are read and written KH * KW times, and threads collide); inserting zeros into the
          input and convolving that (multiplies stride**2 times as much).
Source    the split into phases is the sub-pixel view of transposed convolution: Shi et al., arXiv 1609.07009.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from tvm.ir import Expr

from ..errors import ScheduleRefused
from ..values import Candidate, Conv2dTranspose, Epilogue, Machine, Workload
from . import emit, window
from .emit import Flat, Index, RegisterTile, Tiling
from .family import Buffer, Kernel, Launch, Packer
from .grain import compute_seconds, stream_seconds, threads_for
from .matmul import panelled
from .placement import store_tile
from .space import assemble, candidates_of, check_tile, registers_of, tile_cycles, unroll


@dataclass(frozen=True)
class Phase:
    """The outputs start, start + stride, ... of one axis, and the taps that reach them.

    Tap i of output start + q * stride multiplies weight first + i * step by input q + offset - i * drop.
    """

    start: int
    outputs: int
    count: int
    first: int = 0
    step: int = 0
    offset: int = 0
    drop: int = 0

    def reads(self, first: int, outputs: int) -> tuple[int, int]:
        """The lowest and the highest input that outputs number first .. first + outputs - 1 read."""
        return first + self.offset - max(self.count - 1, 0) * self.drop, first + outputs - 1 + self.offset


def phases(anchor: Conv2dTranspose, axis: int) -> tuple[Phase, ...]:
    """Along the rows (axis 0) or the columns (axis 1)."""
    kernel, outputs = (anchor.kh, anchor.kw)[axis], (anchor.oh, anchor.ow)[axis]
    stride, dilation, before = anchor.stride[axis], anchor.dilation[axis], anchor.padding[axis]
    step = stride // math.gcd(stride, dilation)
    found = []
    for start in range(min(stride, outputs)):
        taps = [k for k in range(kernel) if (start + before - k * dilation) % stride == 0]
        progression = (taps[0], step, (start + before - taps[0] * dilation) // stride, step * dilation // stride) if taps else ()
        found.append(Phase(start, -(-(outputs - start) // stride), len(taps), *progression))
    return tuple(found)


def border(anchor: Conv2dTranspose) -> tuple[int, int, int, int]:
    """How far the taps reach beyond the image: (top, left, bottom, right)."""
    beyond = []
    for axis, extent in enumerate((anchor.h, anchor.w)):
        reads = [phase.reads(0, phase.outputs) for phase in phases(anchor, axis) if phase.count]
        beyond.append((max([0, *(-low for low, _ in reads)]), max([0, *(high - extent + 1 for _, high in reads)])))
    (top, bottom), (left, right) = beyond
    return top, left, bottom, right


def is_depthwise(anchor: Conv2dTranspose) -> bool:
    return anchor.groups == anchor.ci == anchor.co


def _split(anchor: Conv2dTranspose) -> tuple[int, int, int]:
    """(groups, input channels of the reduction, output channels of a group)."""
    if is_depthwise(anchor):
        return 1, 1, anchor.co
    return anchor.groups, anchor.ci // anchor.groups, anchor.co // anchor.groups


def tiles(workload: Workload, machine: Machine) -> list[dict[str, int | str]]:
    """Legal register tiles with their padding mode, the analytically best first."""
    anchor = workload.anchor
    assert isinstance(anchor, Conv2dTranspose)
    lanes = machine.isa.lanes(anchor.dtype)
    _, channels, per_group = _split(anchor)
    vectors_in_group = -(-per_group // lanes)
    seconds = stream_seconds(workload) if is_depthwise(anchor) else compute_seconds(workload, machine)
    split = threads_for(machine, seconds)
    found = []
    for vectors in range(1, min(8, vectors_in_group) + 1):
        for th, tw in _blocks(anchor, vectors, machine):
            cycles = sum(
                tile_cycles((y.outputs, th), (x.outputs, tw), (per_group, vectors * lanes), y.count * x.count * channels, lanes, machine)
                for y in phases(anchor, 0)
                for x in phases(anchor, 1)
            )
            found.append((cycles, th, tw, vectors))
    steps = channels if channels <= 4 else 2
    return [
        {"th": th, "tw": tw, "nr": vectors * lanes, "ku": unroll(th * tw * vectors, vectors, steps, machine), "pad": mode, "threads": split}
        for _, th, tw, vectors in sorted(found)
        for mode in _padding_modes(anchor)
        if mode != "inline" or (th == 1 and _few_borders(anchor, tw))
    ]


def _blocks(anchor: Conv2dTranspose, vectors: int, machine: Machine) -> Iterator[tuple[int, int]]:
    rows, columns = (phases(anchor, axis)[0].outputs for axis in (0, 1))
    for tw in range(1, min(columns, 28) + 1):
        for th in range(1, rows + 1):
            if th > 1 and (tw < columns or is_depthwise(anchor)):
                break  # several rows only where one row can't fill the registers, and only for taps that they share
            if registers_of(th * tw, vectors) > machine.isa.registers:
                break
            yield th, tw


def _padding_modes(anchor: Conv2dTranspose) -> tuple[str, ...]:
    """A copy is read KH * KW times by every panel of a dense kernel; a depthwise one is done in the time that it takes."""
    if not any(border(anchor)):
        return ("none",)
    return ("inline", "copy") if is_depthwise(anchor) else ("copy", "inline")


def _few_borders(anchor: Conv2dTranspose, tw: int) -> bool:
    others = (window.border_tiles(phase.outputs, tw, partial(crosses, anchor, phase))[1] for phase in phases(anchor, 1))
    return all(len(tiles) <= window.MAX_BORDER_TILES for tiles in others)


def crosses(anchor: Conv2dTranspose, phase: Phase, first: int, count: int) -> bool:
    """Whether outputs first .. first + count - 1 of a column phase read left or right of the image."""
    low, high = phase.reads(first, count)
    return phase.count > 0 and (low < 0 or high >= anchor.w)


def candidates(workload: Workload, machine: Machine) -> tuple[Candidate, ...]:
    return candidates_of(workload, tiles(workload, machine))


def kernel(workload: Workload, candidate: Candidate, machine: Machine) -> Kernel:
    """Y[oh] = sum of X[ih] * W[kh] over ih * stride + kh * dilation - padding = oh, with the epilogue where the candidate places it.

    Shapes   X (N,H,W,CI), W packed flat, operands as stored, Y (N,OH,OW,CO).
    Raises   ScheduleRefused when the tile doesn't fit the registers or its padding mode doesn't go with it.
    """
    anchor = workload.anchor
    assert isinstance(anchor, Conv2dTranspose)
    lanes = machine.isa.lanes(anchor.dtype)
    th, tw, nr = candidate["th"], candidate["tw"], candidate["nr"]
    check_tile(th * tw, nr, machine, anchor.dtype)
    if candidate["pad"] == "none" and any(border(anchor)):
        raise ScheduleRefused(f"taps reach {border(anchor)} beyond the image and need padding")
    if candidate["pad"] == "inline" and (th > 1 or not _few_borders(anchor, tw)):
        raise ScheduleRefused("inline padding needs tiles of one row of which few cross the border")
    groups, channels, per_group = _split(anchor)
    weights = Buffer((groups * emit.padded(per_group, nr, lanes) * anchor.kh * anchor.kw * channels,), anchor.dtype)
    inputs = (Buffer(anchor.input_shapes()[0], anchor.dtype), weights)

    def compute(epilogue: Epilogue, operands: tuple[Buffer, ...], dtype: str) -> Launch:
        buffers = (*inputs, *operands, Buffer(anchor.output_shape(), dtype))

        def body(x: Flat, w: Flat, *rest: Flat) -> None:
            _body(anchor, candidate, lanes, epilogue, x, w, rest[:-1], rest[-1])

        return Launch(emit.function("conv2d_transpose", buffers, body), ())

    return assemble(workload, candidate, machine, inputs, compute, {1: Packer(pack, (anchor, nr, lanes))})


def _body(
    anchor: Conv2dTranspose,
    candidate: Candidate,
    lanes: int,
    epilogue: Epilogue,
    x: Flat,
    w: Flat,
    operands: tuple[Flat, ...],
    out: Flat,
) -> None:
    th, tw, nr, threads = candidate["th"], candidate["tw"], candidate["nr"], candidate["threads"]
    groups, channels, per_group = _split(anchor)
    depthwise, inline = is_depthwise(anchor), candidate["pad"] == "inline"
    top, left = border(anchor)[:2] if candidate["pad"] == "copy" else (0, 0)
    image = window.pad(x, border(anchor), lanes, threads) if candidate["pad"] == "copy" else x
    taps = anchor.kh * anchor.kw * channels

    def micro(
        n: Index, group: Index, channel0: Index, width: int, y: Phase, y0: Index, rows: int, x: Phase, x0: Index, columns: int
    ) -> None:
        tile = RegisterTile(rows * columns, width, emit.lanes_for(width, lanes), anchor.dtype)
        panel_width = tile.vectors * tile.lanes
        weights = (group * emit.padded(per_group, nr, lanes) + channel0) * taps

        def input_row(i: Index) -> Index:
            return y0 + (y.offset + top) - i * y.drop

        def accumulate(i: Index, j: Index, blank: bool) -> None:
            kh, kw = y.first + i * y.step, x.first + j * x.step

            def step(ci: Index) -> None:
                at_weights = weights + ((kh * anchor.kw + kw) * channels + ci) * panel_width
                row_of_w = [w.load(at_weights + vector * tile.lanes, tile.lanes) for vector in range(tile.vectors)]
                for row in range(tile.rows):
                    dy, dx = divmod(row, columns)
                    iw = x0 + (dx + x.offset + left) - j * x.drop
                    outside = blank or (isinstance(iw, int) and not 0 <= iw < image.shape[2])
                    pixel = n * image.strides[0] + (input_row(i) + dy) * image.strides[1] + iw * image.strides[2]
                    for vector in range(tile.vectors):
                        tile.accumulate(row, vector, zero if outside else read(pixel, ci, vector), row_of_w[vector])

            def read(pixel: Index, ci: Index, vector: int) -> Expr:
                if depthwise:
                    return image.load(pixel + channel0 + vector * tile.lanes, tile.lanes, tile.valid(vector))
                return emit.splat(image.scalar(pixel + group * channels + ci), tile.lanes)

            zero = emit.constant(0.0, anchor.dtype, tile.lanes)
            emit.reduce_over(channels, candidate["ku"], step)

        def row_of_taps(i: Index, blank: bool) -> None:
            if depthwise or (
                inline and isinstance(x0, int)
            ):  # neighbouring pixels share their loads; which taps are outside has to be known
                for j in range(x.count):
                    accumulate(i, j, blank)
            else:
                with emit.loop(x.count) as j:
                    accumulate(i, j, blank)

        low, high = y.reads(0, y.outputs)
        with emit.loop(y.count) as i:
            ih = input_row(i)
            if not inline or (low >= 0 and high < anchor.h):
                row_of_taps(i, False)
            elif isinstance(ih, int):
                row_of_taps(i, not 0 <= ih < anchor.h)
            else:
                emit.either((ih >= 0) & (ih < anchor.h), lambda: row_of_taps(i, False), lambda: row_of_taps(i, True))

        def index(row: Index) -> list[Index]:
            oh, ow = (y0 + row // columns) * anchor.stride[0] + y.start, (x0 + row % columns) * anchor.stride[1] + x.start
            return [n, oh, ow, group * per_group + channel0]

        store_tile(tile, candidate.placement, epilogue, operands, out, index)

    row_tiles = Tiling(phases(anchor, 0)[0].outputs, th).count

    def all_phases(n: Index, row_tile: Index, group: Index, channel0: Index, width: int) -> None:
        for y in phases(anchor, 0):
            rows = Tiling(y.outputs, th)
            with_rows = partial(columns, n, group, channel0, width, y)
            if rows.count < row_tiles:  # the last output rows don't reach this phase
                emit.when(row_tile < rows.count, partial(rows.at, row_tile, with_rows))
            else:
                rows.at(row_tile, with_rows)

    def columns(n: Index, group: Index, channel0: Index, width: int, y: Phase, y0: Index, rows: int) -> None:
        for x in phases(anchor, 1):
            crossing = partial(crosses, anchor, x) if inline else window.never
            window.Windows(x.outputs, tw, crossing).each(partial(micro, n, group, channel0, width, y, y0, rows, x))

    image_axes, channel_axes = (Tiling(anchor.n), Tiling(row_tiles)), (Tiling(groups), Tiling(per_group, nr))
    if depthwise:  # there is little of its weights, so the image stays in cache while they pass
        emit.shared_tiles(
            (*image_axes, *channel_axes), threads, lambda n, row_tile, group, panel: all_phases(n[0], row_tile[0], group[0], *panel)
        )
    else:  # a panel of weights stays while the image passes
        emit.shared_tiles(
            (*channel_axes, *image_axes), threads, lambda group, panel, n, row_tile: all_phases(n[0], row_tile[0], group[0], *panel)
        )


def pack(array: np.ndarray, anchor: Conv2dTranspose, nr: int, lanes: int) -> np.ndarray:
    """(CI, KH, KW, CO / groups) -> flat panels per group, each (KH, KW, CI / groups, width), zero-padded to the lanes."""
    groups, channels, per_group = _split(anchor)
    taps = array.reshape(groups, -1, anchor.kh, anchor.kw, anchor.co // anchor.groups)
    axes = (0, 2, 3, 4, 1) if is_depthwise(anchor) else (0, 2, 3, 1, 4)
    taps = np.transpose(taps, axes).reshape(groups, -1, per_group)
    return panelled(taps, nr, lanes)
