"""Winograd convolution F(m x m, 3 x 3) in NHWC, m = 2 or 4: fewer multiplications for bits of its own, so of the relaxed class.

    Y = A' [ (G W G') * (B' X B) ] A     for each m x m tile of outputs, from (m + 2) x (m + 2) inputs; "*" sums over channels

Strategy
    1. The weights' part is computed when the model is compiled, in float64, rounded once, and packed point by point in panels.
    2. A block of tiles is transformed, multiplied at each of the (m + 2)^2 points and transformed back while it is in the L2.
    3. The multiplication is matmul's register tile, rows being tiles: k ascends over all input channels.
    4. Transforms are vectors of channels. Both share the even and the odd half of a pair of points +a, -a: half the operations.
    5. The epilogue stands in the output transform. Outputs beyond the image are not stored, inputs beyond it are zeros.
    6. With fewer blocks than threads, output channels are shared out too, each thread transforming the inputs for itself.
Bits        each sum has one fixed order and every product is part of an fma or fenced, so they depend on m alone.
Rejected    three passes over the whole image (transformed tensors are 2.25 to 4 times the image, out to memory and back).
Source      Lavin and Gray, arXiv 1509.09308; points as in Barabasz et al., arXiv 1803.10986: their spread decides the error.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

import numpy as np
from tvm.ir import Expr

from ..errors import ScheduleRefused
from ..values import WINOGRAD, Candidate, Conv2d, Epilogue, Machine, PlanarConv2d, Workload
from . import conv2d, emit, rounding
from .emit import Flat, Index, RegisterTile
from .family import Buffer, Kernel, Launch, Packer
from .grain import compute_seconds, threads_for
from .placement import store_tile
from .space import assemble, candidates_of, check_tile, registers_of, tile_cycles, unroll
from .toom_cook import PAIRS, Half, input_halves, output_rows, weight_matrix

TILES = 8  # on offer for each algorithm
LINE_BYTES = 64
# Cycles of either transform for one vector at one point, and bytes a core streams in a cycle from L3 and from memory.
TRANSFORM_CYCLES = 4.0
IN_L2 = 0.75  # of an L2 of 1 MB: 56x56x64 takes 0.77 ms in blocks of 0.4 MB and 0.84 ms in blocks of 0.9 MB
NARROW = 1.3  # 14x14x256: 58 GFLOP/s with tiles of 16 x 1 vectors, 79 with 8 x 2
EVICTED = 1.1  # 25 rows of 512 channels don't stay in an L1 of 32 KiB beside the weights: 75 against 83 GFLOP/s with 13 rows
L3_BYTES, MEMORY_BYTES = 25.0, 8.0


def why_not(workload: Workload) -> str | None:
    """Why a workload has no Winograd candidates."""
    anchor = workload.anchor
    if not isinstance(anchor, Conv2d) or isinstance(anchor, PlanarConv2d):
        return "Winograd is for convolutions in NHWC"
    if (anchor.kh, anchor.kw) != (3, 3):
        return f"Winograd needs a 3x3 kernel, this one is {anchor.kh}x{anchor.kw}"
    if anchor.stride != (1, 1):
        return f"Winograd needs stride 1, this one is {anchor.stride}"
    if anchor.dilation != (1, 1):
        return f"Winograd needs dilation 1, this one is {anchor.dilation}"
    if anchor.groups != 1:
        return f"Winograd needs one group, there are {anchor.groups}"
    if anchor.dtype != "float32":
        return f"Winograd is offered for float32, this is {anchor.dtype}"
    return None


def flop(anchor: Conv2d, m: int) -> int:
    """Of the multiplication."""
    return 2 * anchor.winograd_products(m) * anchor.ci * anchor.co


def pack(array: np.ndarray, anchor: Conv2d, m: int, nr: int, lanes: int) -> np.ndarray:
    """(CO, 3, 3, CI) -> G W G', flat: for each point panels, each (CI, width), zero-padded to the lanes."""
    g = weight_matrix(m)
    at_points = np.einsum("pi,oijc,qj->pqco", g, array.astype(np.float64), g, optimize=True).astype(array.dtype)
    columns = _columns(anchor, lanes)
    padded = np.zeros(((m + 2) ** 2, anchor.ci, columns), array.dtype)
    padded[:, :, : anchor.co] = at_points.reshape(-1, anchor.ci, anchor.co)
    panels = [padded[:, :, start : start + nr].reshape(len(padded), -1) for start in range(0, columns, nr)]
    return np.ascontiguousarray(np.concatenate(panels, axis=1)).reshape(-1)


def _columns(anchor: Conv2d, lanes: int) -> int:
    return -(-anchor.co // lanes) * lanes


# --- the space ---


def tiles(workload: Workload, m: int, machine: Machine) -> list[tuple[float, dict[str, int | str]]]:
    """Legal register tiles and blocks with their cycles by the analytic prior, the best first."""
    return sorted(_tiles(workload, m, machine), key=lambda found: found[0])


def _tiles(workload: Workload, m: int, machine: Machine) -> Iterator[tuple[float, dict[str, int | str]]]:
    anchor = workload.anchor
    assert isinstance(anchor, Conv2d)
    lanes = machine.isa.lanes(anchor.dtype)
    total, vectors_out, vectors_in = _count(anchor, m), _columns(anchor, lanes) // lanes, -(-anchor.ci // lanes)
    split = threads_for(machine, compute_seconds(workload, machine, flop(anchor, m)))
    panel_bytes = 4 * (m + 2) ** 2 * anchor.ci * vectors_out * lanes
    streamed = MEMORY_BYTES if panel_bytes > machine.l3 // 2 else L3_BYTES
    for vectors in range(1, min(8, vectors_out) + 1):
        for rows in range(1, min(28, total) + 1):
            if registers_of(rows, vectors) > machine.isa.registers:
                break
            steps = unroll(rows * vectors, vectors, 4 if rows * vectors <= 8 else 2, machine)
            for block in _blocks(anchor, m, rows, machine):
                blocks = -(-total // block)
                chunk = vectors_out if blocks >= split else -(-vectors_out // -(-split // blocks) // vectors) * vectors
                chunks = -(-vectors_out // chunk)
                multiply = (m + 2) ** 2 * tile_cycles(
                    (total, rows), (1, 1), (vectors_out * lanes, vectors * lanes), anchor.ci, lanes, machine
                )
                multiply *= EVICTED if 4 * rows * anchor.ci > machine.l1 else 1.0
                multiply *= NARROW if vectors == 1 else 1.0
                elements = (m + 2) ** 2 * (anchor.ci + anchor.co)  # of one tile, transformed
                spill = 2 * 4 * elements * total / L3_BYTES if 4 * elements * block > IN_L2 * machine.l2 else 0.0
                stream = blocks * panel_bytes / streamed if panel_bytes > machine.l2 // 2 else 0.0
                transform = TRANSFORM_CYCLES * (m + 2) ** 2 * total * (chunks * vectors_in + vectors_out)
                work = -(-blocks * chunks // split) / (blocks * chunks)  # the busiest thread's share
                yield (
                    (max(multiply, stream) + stream / 3 + spill + transform) * work,
                    {
                        "algorithm": f"winograd{m}", "mr": rows, "nr": vectors * lanes, "ku": steps,
                        "tiles": block, "channels": chunk * lanes, "threads": split,
                    },
                )  # fmt: skip


def _count(anchor: Conv2d, m: int) -> int:
    return anchor.n * -(-anchor.oh // m) * -(-anchor.ow // m)


def _blocks(anchor: Conv2d, m: int, rows: int, machine: Machine) -> list[int]:
    """Tiles to a block: as many whole register tiles as half the L2 holds with their products, or some times as many."""
    total = _count(anchor, m)
    held = max(1, machine.l2 // 2 // (4 * (m + 2) ** 2 * (anchor.ci + anchor.co) * rows))
    return sorted({min(total, count * rows) for count in (held, 2 * held, 4 * held)})


def candidates(workload: Workload, m: int, machine: Machine) -> tuple[Candidate, ...]:
    return candidates_of(workload, [tile for _, tile in tiles(workload, m, machine)[:TILES]])


def beside(workload: Workload, exact: tuple[Candidate, ...], machine: Machine) -> tuple[Candidate, ...]:
    """The exact candidates and ours, algorithm by algorithm, the one that the analytic priors like best on one thread first.

    On one thread, however many there are: the algorithm decides the bits, and threads must not.
    """
    alone = dataclasses.replace(machine, threads=1)
    ways = [(conv2d.cycles(workload, conv2d.candidates(workload, alone)[0], alone), exact)]
    for m in WINOGRAD.values():
        ways.append((tiles(workload, m, alone)[0][0], candidates(workload, m, machine)))
    return tuple(candidate for _, way in sorted(ways, key=lambda way: way[0]) for candidate in way)


# --- the kernel ---


def kernel(workload: Workload, candidate: Candidate, machine: Machine) -> Kernel:
    """Y = conv(X, W) by F(m x m, 3 x 3) with the epilogue where the candidate places it.

    Shapes   X (N,H,W,CI), W transformed and packed flat, operands as stored, Y (N,OH,OW,CO).
    Raises   ScheduleRefused for another convolution than 3x3 with stride 1, and when the tile doesn't fit the registers.
    """
    anchor = workload.anchor
    if reason := why_not(workload):
        raise ScheduleRefused(reason)
    assert isinstance(anchor, Conv2d)
    m, lanes, nr = WINOGRAD[candidate["algorithm"]], machine.isa.lanes(anchor.dtype), candidate["nr"]
    check_tile(candidate["mr"], nr, machine, anchor.dtype)
    if candidate["channels"] % nr and candidate["channels"] < _columns(anchor, lanes):
        raise ScheduleRefused(f"channels={candidate['channels']} is not a multiple of nr={nr}")
    weights = Buffer(((m + 2) ** 2 * _columns(anchor, lanes) * anchor.ci,), anchor.dtype)

    def compute(epilogue: Epilogue, operands: tuple[Buffer, ...], dtype: str) -> Launch:
        buffers = (Buffer(anchor.input_shapes()[0], anchor.dtype), weights, *operands, Buffer(anchor.output_shape(), dtype))
        body = _Body(anchor, candidate, m, lanes)
        func = emit.function("winograd", buffers, lambda x, u, *rest: body.emit(epilogue, x, u, rest[:-1], rest[-1]))
        return Launch(func, (), flop=flop(anchor, m))

    inputs = (Buffer(anchor.input_shapes()[0], anchor.dtype), weights)
    return assemble(workload, candidate, machine, inputs, compute, {1: Packer(pack, (anchor, m, nr, lanes))})


class _Body:
    def __init__(self, anchor: Conv2d, candidate: Candidate, m: int, lanes: int) -> None:
        self.anchor, self.candidate, self.m, self.lanes = anchor, candidate, m, lanes
        self.size, self.dtype = m + 2, anchor.dtype
        self.grid = anchor.n, -(-anchor.oh // m), -(-anchor.ow // m)
        self.total, self.block = math.prod(self.grid), min(candidate["tiles"], math.prod(self.grid))
        self.columns = _columns(anchor, lanes)
        self.chunk = min(candidate["channels"], self.columns)

    def emit(self, epilogue: Epilogue, x: Flat, u: Flat, operands: tuple[Flat, ...], out: Flat) -> None:
        blocks, chunks = -(-self.total // self.block), -(-self.columns // self.chunk)
        row_of_v, row_of_m = self._row(self.anchor.ci), self._row(self.chunk)
        with emit.shared_loop(chunks * blocks, self.candidate["threads"]) as work:
            chunk, block = emit.unravel(work, (chunks, blocks))
            v = emit.scratch(self.size**2 * self.block * row_of_v, self.dtype).reshaped((self.size**2, self.block, row_of_v))
            products = emit.scratch(self.size**2 * self.block * row_of_m, self.dtype).reshaped((self.size**2, self.block, row_of_m))
            patch = emit.scratch(self.size**2 * self.lanes, self.dtype)

            def with_count(count: int) -> None:
                with emit.loop(count) as t:
                    self._transform_input(x, v, patch, t, emit.unravel(block * self.block + t, self.grid))
                emit.with_tail(chunk, self.columns, self.chunk, lambda width: self._multiply(v, u, products, count, chunk, width))
                with emit.loop(count) as t:
                    tile = emit.unravel(block * self.block + t, self.grid)
                    emit.with_tail(
                        chunk,
                        self.anchor.co,
                        self.chunk,
                        lambda width: self._transform_output(products, t, tile, chunk, width, epilogue, operands, out),
                    )

            emit.with_tail(block, self.total, self.block, with_count)

    def _row(self, channels: int) -> int:
        """Elements from one tile to the next: an odd number of lines, for tiles at powers of two would evict each other from the L1."""
        line = max(self.lanes, LINE_BYTES // 4)
        return (-(-channels // line) | 1) * line

    # input

    def _transform_input(self, x: Flat, v: Flat, patch: Flat, t: Index, tile: list[Index]) -> None:
        n, y0, x0 = tile[0], tile[1] * self.m - self.anchor.padding[0], tile[2] * self.m - self.anchor.padding[1]
        size, h, w = self.size, self.anchor.h, self.anchor.w
        start = n * x.strides[0] + y0 * x.strides[1] + x0 * x.strides[2]

        def at(row: Index, column: Index) -> Index:
            return start + row * x.strides[1] + column * x.strides[2]

        def inside(offset: Index, valid: int) -> None:
            self._to_points(lambda row, column: x.load(at(row, column) + offset, self.lanes, valid), v, t, offset)

        def border(offset: Index, valid: int) -> None:
            with emit.loop(size) as row, emit.loop(size) as column:
                to = (row * size + column) * self.lanes
                emit.either(
                    (y0 + row >= 0) & (y0 + row < h) & (x0 + column >= 0) & (x0 + column < w),
                    lambda: patch.store(to, x.load(at(row, column) + offset, self.lanes, valid), self.lanes),
                    lambda: emit.fill(patch, to, self.lanes, self.lanes),
                )
            self._to_points(lambda row, column: patch.load((row * size + column) * self.lanes, self.lanes), v, t, offset)

        emit.either(
            (y0 >= 0) & (y0 + size <= h) & (x0 >= 0) & (x0 + size <= w),
            lambda: emit.each_vector(self.anchor.ci, self.lanes, inside),
            lambda: emit.each_vector(self.anchor.ci, self.lanes, border),
        )

    def _to_points(self, load: Callable[[int, int], Expr], v: Flat, t: Index, offset: Index) -> None:
        """B' d B, rows first: two rows of points at a time are held in registers."""
        halves = input_halves(self.m)
        for vertical in halves:
            columns = [self._of_half(vertical, [load(row, column) for row in range(self.size)]) for column in range(self.size)]
            for point, row_of_points in zip(vertical.points, zip(*columns, strict=True), strict=True):
                for horizontal in halves:
                    for value, other in zip(self._of_half(horizontal, row_of_points), horizontal.points, strict=True):
                        v.store((point * self.size + other) * v.strides[0] + t * v.strides[1] + offset, value, self.lanes)

    def _of_half(self, half: Half, values: Sequence[Expr]) -> list[Expr]:
        parts = [self._weighted([(c, values[k]) for k, c in part.items()]) for part in (half.even, half.odd) if part]
        if len(parts) == 1:
            return parts
        even, odd = parts
        return [self._weighted([(Fraction(1), even), (sign * half.scale, odd)]) for sign in (1, -1)]

    def _weighted(self, terms: Sequence[tuple[Fraction, Expr]]) -> Expr:
        """Sum of coefficient * value, from a term whose coefficient is 1 if there is one; each step rounds once."""
        ordered = sorted(terms, key=lambda term: term[0] != 1)
        coefficient, total = ordered[0]
        if coefficient != 1:
            total = rounding.mul(emit.constant(float(coefficient), self.dtype, self.lanes), total)
        for coefficient, value in ordered[1:]:
            if coefficient == 1:
                total = rounding.add(total, value)
            elif coefficient == -1:
                total = rounding.sub(total, value)
            else:
                total = rounding.fma(emit.constant(float(coefficient), self.dtype, self.lanes), value, total)
        return emit.held(total)

    # products

    def _multiply(self, v: Flat, u: Flat, products: Flat, count: int, chunk: Index, width: int) -> None:
        mr, nr, ci = self.candidate["mr"], self.candidate["nr"], self.anchor.ci
        panels, row_tiles = -(-width // nr), -(-count // mr)

        def micro(point: Index, panel: Index, columns: int, row0: Index, rows: int) -> None:
            tile = RegisterTile(rows, columns, self.lanes, self.dtype)
            start = (point * self.columns + chunk * self.chunk + panel * nr) * ci
            rows_of_v = point * v.strides[0] + row0 * v.strides[1]

            def step(k: Index) -> None:
                row_of_u = [u.load(start + k * columns + vector * self.lanes, self.lanes) for vector in range(tile.vectors)]
                for row in range(rows):
                    value = emit.splat(v.scalar(rows_of_v + row * v.strides[1] + k), self.lanes)
                    for vector in range(tile.vectors):
                        tile.accumulate(row, vector, value, row_of_u[vector])

            emit.reduce_over(ci, self.candidate["ku"], step)
            for row in range(rows):
                to = point * products.strides[0] + (row0 + row) * products.strides[1] + panel * nr
                for vector in range(tile.vectors):
                    products.store(to + vector * self.lanes, tile[row, vector], self.lanes)

        with emit.loop(self.size**2) as point, emit.loop(panels) as panel, emit.loop(row_tiles) as row_tile:
            emit.with_tail(
                panel,
                width,
                nr,
                lambda columns: emit.with_tail(row_tile, count, mr, lambda rows: micro(point, panel, columns, row_tile * mr, rows)),
            )

    # output

    def _transform_output(
        self,
        products: Flat,
        t: Index,
        tile: list[Index],
        chunk: Index,
        width: int,
        epilogue: Epilogue,
        operands: tuple[Flat, ...],
        out: Flat,
    ) -> None:
        m, (n, ty, tx) = self.m, tile

        def with_columns(columns: int) -> None:
            emit.each_vector(width, self.lanes, lambda offset, valid: vector(columns, offset, valid))

        def vector(columns: int, offset: Index, valid: int) -> None:
            def load(row: int, column: int) -> Expr:
                at = (row * self.size + column) * products.strides[0] + t * products.strides[1] + offset
                return products.load(at, self.lanes)

            for parity in (0, 1):
                above = [self._outputs(parity, [load(row, column) for row in range(self.size)]) for column in range(self.size)]
                for row, sums in zip(range(parity, m, 2), zip(*above, strict=True), strict=True):
                    halves = [self._outputs(half, sums) for half in (0, 1)]
                    values = [halves[column % 2][column // 2] for column in range(columns)]
                    write = functools.partial(store, row, values, offset, valid)
                    if self.anchor.oh % m:
                        emit.when(ty * m + row < self.anchor.oh, write)
                    else:
                        write()

        def store(row: int, values: list[Expr], offset: Index, valid: int) -> None:
            registers = RegisterTile(len(values), valid, self.lanes, self.dtype)
            for column, value in enumerate(values):
                registers.set(column, 0, value)
            first = chunk * self.chunk + offset
            store_tile(
                registers, self.candidate.placement, epilogue, operands, out, lambda column: [n, ty * m + row, tx * m + column, first]
            )

        emit.with_tail(tx, self.anchor.ow, m, with_columns)

    def _outputs(self, parity: int, values: Sequence[Expr]) -> list[Expr]:
        """The even or the odd rows of A' M."""
        combine = rounding.sub if parity else rounding.add
        pairs = [emit.held(combine(values[2 * p + 1], values[2 * p + 2])) for p in range(len(PAIRS[self.m]))]
        terms = [values[0], *pairs, values[self.m + 1]]
        return [self._weighted([(c, terms[index]) for index, c in row.items()]) for row in output_rows(self.m)[parity::2]]
