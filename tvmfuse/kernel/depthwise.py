"""Depthwise convolution in NHWC: one vector of channels is multiplied elementwise at each tap.

Strategy
    1. tw output pixels by nr channels live in registers; a row's taps are unrolled, so that neighbouring pixels share their loads.
    2. Padding is inline, see window.py: a copy costs more than the convolution (26-68 against 100-110 GFLOP/s on 3x3).
    3. Rows are the outer loop: the KH rows of input that a row of output reads stay in L1 or L2. Channels are the inner one: a large
       image is read and written in whole lines, once (372 us with channels outside on 112x112x96 s2, 190 inside).
"""

from __future__ import annotations

from functools import partial

import numpy as np

from ..values import Candidate, Conv2d, Epilogue, Machine, Workload
from . import emit, window
from .conv2d import crosses
from .emit import Flat, Index, RegisterTile, Tiling
from .family import Buffer, Kernel, Launch, Packer
from .grain import stream_seconds, threads_for
from .placement import store_tile
from .space import assemble, candidates_of, check_tile


def tiles(workload: Workload, machine: Machine) -> list[dict[str, int]]:
    """Legal tiles: enough accumulators to hide an FMA's latency, few enough for the registers."""
    anchor = workload.anchor
    assert isinstance(anchor, Conv2d)
    lanes = machine.isa.lanes(anchor.dtype)
    vectors_in_all = -(-anchor.co // lanes)
    split = threads_for(machine, stream_seconds(workload))
    # What comes from beyond the L1 wants small tiles, since the next ones' loads are under way before this one is done (4x16 takes 100 us
    # on 56x56x144, 14x16 147), unless a tile is a whole row, where every border is known (14x14x384: 17 us with 14x16, 20 with 5x16).
    streams = workload.bytes_moved() > machine.l2 // 2
    found = []
    for vectors in range(1, min(4, vectors_in_all) + 1):
        for tw in range(1, min(anchor.ow, 14) + 1):
            held = tw * vectors
            pixels = (tw - 1) * anchor.stride[1] + (anchor.kw - 1) * anchor.dilation[1] + 1
            # LLVM keeps the inputs that a row's taps share in registers too: 7x32 spills on 3x3 (24 us on 14x14x384), 14x16 doesn't (16 us)
            shared = pixels * vectors if anchor.kw > 1 else 1
            registers = min(machine.isa.registers, 16) if streams and tw < anchor.ow else machine.isa.registers
            if tw > 1 and held + shared + vectors > registers:
                continue
            tiles_in_row = -(-anchor.ow // tw) * -(-vectors_in_all // vectors)
            # loads of one row of taps: each input pixel once, each weight once; 8 FMAs must be in flight to cover their latency
            step = max(held * anchor.kw, (min(pixels, tw * anchor.kw) + anchor.kw) * vectors, 4 * anchor.kw)
            found.append((tiles_in_row * (anchor.kh * step + held + 8), tw, vectors, len(_borders(anchor, tw))))
    most_borders = max(window.MAX_BORDER_TILES, min(borders for *_, borders in found))  # wide kernels have more with any tile
    return [{"tw": tw, "nr": vectors * lanes, "threads": split} for _, tw, vectors, borders in sorted(found) if borders <= most_borders]


def _borders(anchor: Conv2d, tw: int) -> list[int]:
    return window.border_tiles(anchor.ow, tw, partial(crosses, anchor))[1]


def candidates(workload: Workload, machine: Machine) -> tuple[Candidate, ...]:
    return candidates_of(workload, tiles(workload, machine))


def kernel(workload: Workload, candidate: Candidate, machine: Machine) -> Kernel:
    """Y[n,oh,ow,c] = sum over kh, kw of X[n,ih,iw,c] * W[kh,kw,c] with the epilogue where the candidate places it.

    Shapes   X (N,H,W,C), W packed (KH,KW,C), operands as stored, Y (N,OH,OW,C).
    Raises   ScheduleRefused when the tile doesn't fit the registers.
    """
    anchor = workload.anchor
    assert isinstance(anchor, Conv2d)
    lanes = machine.isa.lanes(anchor.dtype)
    check_tile(candidate["tw"], candidate["nr"], machine, anchor.dtype)
    inputs = (Buffer(anchor.input_shapes()[0], anchor.dtype), Buffer((anchor.kh, anchor.kw, anchor.co), anchor.dtype))

    def compute(epilogue: Epilogue, operands: tuple[Buffer, ...], dtype: str) -> Launch:
        buffers = (*inputs, *operands, Buffer(anchor.output_shape(), dtype))
        return Launch(
            emit.function("depthwise", buffers, lambda x, w, *rest: _body(anchor, candidate, lanes, epilogue, x, w, rest[:-1], rest[-1])),
            (),
        )

    return assemble(workload, candidate, machine, inputs, compute, {1: Packer(pack)})


def _body(
    anchor: Conv2d, candidate: Candidate, lanes: int, epilogue: Epilogue, x: Flat, w: Flat, operands: tuple[Flat, ...], out: Flat
) -> None:
    tw, nr = candidate["tw"], candidate["nr"]
    top, left, bottom, _ = anchor.padding

    def micro(n: Index, oh: Index, ow0: Index, columns: int, channel0: Index, width: int) -> None:
        tile = RegisterTile(columns, width, emit.lanes_for(width, lanes), anchor.dtype)

        def row_of_taps(kh: Index, blank: bool) -> None:
            for kw in range(anchor.kw):
                weights = [
                    w.load((kh * anchor.kw + kw) * anchor.co + channel0 + vector * tile.lanes, tile.lanes, tile.valid(vector))
                    for vector in range(tile.vectors)
                ]
                for dx in range(columns):
                    ih = oh * anchor.stride[0] - top + kh * anchor.dilation[0]
                    iw = (ow0 + dx) * anchor.stride[1] - left + kw * anchor.dilation[1]
                    outside = blank or (isinstance(iw, int) and not 0 <= iw < anchor.w)
                    at = n * x.strides[0] + ih * x.strides[1] + iw * x.strides[2] + channel0
                    for vector in range(tile.vectors):
                        if outside:
                            value = emit.constant(0.0, anchor.dtype, tile.lanes)
                        else:
                            value = x.load(at + vector * tile.lanes, tile.lanes, tile.valid(vector))
                        tile.accumulate(dx, vector, value, weights[vector])

        def taps(kh: Index) -> None:
            ih = oh * anchor.stride[0] - top + kh * anchor.dilation[0]
            if not (top or bottom):
                row_of_taps(kh, False)
            elif isinstance(ih, int):
                row_of_taps(kh, not 0 <= ih < anchor.h)
            else:
                emit.either((ih >= 0) & (ih < anchor.h), lambda: row_of_taps(kh, False), lambda: row_of_taps(kh, True))

        with emit.loop(anchor.kh) as kh:
            taps(kh)
        store_tile(tile, candidate.placement, epilogue, operands, out, lambda row: [n, oh, ow0 + row, channel0])

    with emit.shared_loop(anchor.n * anchor.oh, candidate["threads"]) as line:
        n, oh = line // anchor.oh, line % anchor.oh
        window.Windows(anchor.ow, tw, partial(crosses, anchor)).each(
            lambda first, count: Tiling(anchor.co, nr).each(lambda channel0, width: micro(n, oh, first, count, channel0, width))
        )


def pack(array: np.ndarray) -> np.ndarray:
    """(C, KH, KW, 1) -> (KH, KW, C)."""
    return np.ascontiguousarray(np.moveaxis(array[..., 0], 0, 2))
