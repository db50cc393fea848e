"""Convolution over images that are stored plane by plane (NCHW): the lanes are neighbouring pixels of a row.

For few output channels a group, which leave the lanes of an NHWC kernel empty, of an image that the model hands over in planes: it
needs no transposition then.

Strategy
    1. mr output channels by nr pixels of a row live in registers over the whole reduction, which ascends in kh, kw, ci.
    2. Each step loads the pixels of one input plane once and multiplies them by the mr channels' weights, which are scalars.
    3. Rows above and below the image are taken into account where the kernel leaves it ("inline"); columns beside it need a
       zero-bordered copy ("copy"). In both, a tap outside multiplies a real 0.
Source    the register tile is the matmul's, with weights as A and a row of pixels as B.
"""

from __future__ import annotations

from ..errors import ScheduleRefused
from ..values import Candidate, Epilogue, Machine, PlanarConv2d, Workload
from . import conv2d, emit, window
from .emit import Flat, Index, RegisterTile
from .family import Buffer, Kernel, Launch, Packer
from .grain import compute_seconds, threads_for
from .placement import store_tile
from .space import assemble, candidates_of, check_tile, registers_of, tile_cycles, unroll


def tiles(workload: Workload, machine: Machine) -> list[dict[str, int | str]]:
    """Legal register tiles with their padding mode, the analytically best first."""
    anchor = workload.anchor
    assert isinstance(anchor, PlanarConv2d)
    lanes, per_group = machine.isa.lanes(anchor.dtype), anchor.co // anchor.groups
    reduction = anchor.kh * anchor.kw * (anchor.ci // anchor.groups)
    found = []
    for vectors in range(1, min(8, -(-anchor.ow // lanes)) + 1):
        for rows in range(1, per_group + 1):
            if registers_of(rows, vectors) > machine.isa.registers:
                break
            extents = (per_group, rows), (anchor.oh, 1), (anchor.ow, vectors * lanes)
            found.append((tile_cycles(*extents, reduction, lanes, machine), rows, vectors))
    split = threads_for(machine, compute_seconds(workload, machine))
    return [
        {"mr": rows, "nr": vectors * lanes, "ku": unroll(rows * vectors, vectors, 2, machine), "pad": mode, "threads": split}
        for _, rows, vectors in sorted(found)
        for mode in _padding_modes(anchor)
    ]


def _padding_modes(anchor: PlanarConv2d) -> tuple[str, ...]:
    if not any(anchor.padding):
        return ("none",)
    return ("copy",) if anchor.padding[1] or anchor.padding[3] else ("inline", "copy")


def candidates(workload: Workload, machine: Machine) -> tuple[Candidate, ...]:
    return candidates_of(workload, tiles(workload, machine))


def kernel(workload: Workload, candidate: Candidate, machine: Machine) -> Kernel:
    """Y = conv(X, W) with the epilogue where the candidate places it.

    Shapes   X (N,CI,H,W), W packed flat (groups, KH, KW, CI / groups, CO / groups), operands as stored, Y (N,CO,OH,OW).
    Raises   ScheduleRefused when the tile doesn't fit the registers, its padding mode doesn't go with the padding, or rows have a stride.
    """
    anchor = workload.anchor
    assert isinstance(anchor, PlanarConv2d)
    lanes = machine.isa.lanes(anchor.dtype)
    if anchor.stride[1] != 1:
        raise ScheduleRefused(f"stride {anchor.stride}: neighbouring lanes have to be neighbouring pixels")
    check_tile(candidate["mr"], candidate["nr"], machine, anchor.dtype)
    if candidate["pad"] not in _padding_modes(anchor):
        raise ScheduleRefused(f"padding {anchor.padding} doesn't go with {candidate['pad']!r}; legal: {', '.join(_padding_modes(anchor))}")
    image, weights = (Buffer(shape, anchor.dtype) for shape in anchor.input_shapes())
    packed = Buffer((anchor.co * anchor.kh * anchor.kw * (anchor.ci // anchor.groups),), weights.dtype)

    def compute(epilogue: Epilogue, operands: tuple[Buffer, ...], dtype: str) -> Launch:
        buffers = (image, packed, *operands, Buffer(anchor.output_shape(), dtype))
        body = lambda x, w, *rest: _body(anchor, candidate, lanes, epilogue, x, w, rest[:-1], rest[-1])  # noqa: E731
        return Launch(emit.function("planar_conv2d", buffers, body), ())

    packers = {1: Packer(conv2d.pack, (anchor, anchor.co // anchor.groups, 1))}  # one panel a group, of single weights
    return assemble(workload, candidate, machine, (image, packed), compute, packers)


def _body(
    anchor: PlanarConv2d,
    candidate: Candidate,
    lanes: int,
    epilogue: Epilogue,
    x: Flat,
    w: Flat,
    operands: tuple[Flat, ...],
    out: Flat,
) -> None:
    mr, nr, threads = candidate["mr"], candidate["nr"], candidate["threads"]
    per_group, channels = anchor.co // anchor.groups, anchor.ci // anchor.groups
    inline = candidate["pad"] == "inline"
    planes = x.reshaped((anchor.n * anchor.ci, anchor.h, anchor.w, 1))
    padded = window.pad(planes, anchor.padding, lanes, threads) if candidate["pad"] == "copy" else planes
    image = padded.reshaped((anchor.n, anchor.ci, *padded.shape[1:3]))
    top = anchor.padding[0] if inline else 0

    def micro(n: Index, group: Index, y: Index, first: Index, rows: int, x0: Index, width: int) -> None:
        tile = RegisterTile(rows, width, emit.lanes_for(width, lanes), anchor.dtype)

        def row_of_taps(kh: Index, blank: bool) -> None:
            ih = y * anchor.stride[0] + kh * anchor.dilation[0] - top
            start = n * image.strides[0] + group * channels * image.strides[1] + ih * image.strides[2] + x0

            with emit.loop(anchor.kw) as kw:
                taps = ((group * anchor.kh + kh) * anchor.kw + kw) * channels

                def step(ci: Index) -> None:
                    at = start + kw * anchor.dilation[1] + ci * image.strides[1]
                    pixels = [
                        emit.constant(0.0, anchor.dtype, tile.lanes)
                        if blank
                        else image.load(at + v * tile.lanes, tile.lanes, tile.valid(v))
                        for v in range(tile.vectors)
                    ]
                    for row in range(rows):
                        weight = emit.splat(w.scalar((taps + ci) * per_group + first + row), tile.lanes)
                        for v in range(tile.vectors):
                            tile.accumulate(row, v, pixels[v], weight)

                emit.reduce_over(channels, candidate["ku"], step)

        with emit.loop(anchor.kh) as kh:
            if inline:
                ih = y * anchor.stride[0] + kh * anchor.dilation[0] - top
                emit.either((ih >= 0) & (ih < anchor.h), lambda: row_of_taps(kh, False), lambda: row_of_taps(kh, True))
            else:
                row_of_taps(kh, False)
        store_tile(tile, candidate.placement, epilogue, operands, out, lambda row: [n, group * per_group + first + row, y, x0])

    row_tiles, column_tiles = -(-per_group // mr), -(-anchor.ow // nr)
    with emit.shared_loop(anchor.n * anchor.groups * column_tiles * anchor.oh * row_tiles, threads) as work:
        n, group, column_tile, y, row_tile = emit.unravel(work, (anchor.n, anchor.groups, column_tiles, anchor.oh, row_tiles))

        def with_width(width: int) -> None:
            emit.with_tail(row_tile, per_group, mr, lambda rows: micro(n, group, y, row_tile * mr, rows, column_tile * nr, width))

        emit.with_tail(column_tile, anchor.ow, nr, with_width)
