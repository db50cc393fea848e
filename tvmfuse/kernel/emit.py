"""Loops, vectors and register tiles: the few forms from which every kernel of ours is emitted.

Kernels are written as explicit vector code through TVM's IRBuilder, with their loops in place. Tails are masked loads
and stores on a tile of the remaining size: a scalar loop never appears, and each output element stays in one lane.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import tvm_ffi
from tvm import tirx
from tvm.ir import Expr, PointerType, PrimType
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from . import rounding
from .family import Buffer

Index: TypeAlias = Expr | int
Tile: TypeAlias = tuple[Index, int]  # first element, elements

EVEN = 8  # turns a thread: one more or less of them is an eighth at most


def strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Of a dense row-major tensor, in elements."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


class Flat:
    """A dense buffer addressed by one linear element offset, in vectors of any length."""

    def __init__(self, buffer: tirx.Buffer, shape: Sequence[int], dtype: str) -> None:
        self.shape, self.dtype, self.strides = tuple(shape), dtype, strides(shape)
        self._buffer = buffer

    def reshaped(self, shape: Sequence[int]) -> Flat:
        return Flat(self._buffer, shape, self.dtype)

    def scalar(self, offset: Index) -> Expr:
        return tirx.BufferLoad(self._buffer, [offset])

    def load(self, offset: Index, lanes: int, valid: int | None = None, stride: int = 1) -> Expr:
        """`lanes` elements from `offset`; those from `valid` on are not read."""
        if lanes == 1:
            return self.scalar(offset)
        index = tirx.Ramp(_int(offset), _int(stride), lanes)
        if valid is None or valid >= lanes:
            return tirx.BufferLoad(self._buffer, [index])
        if stride == 1:
            return T.masked_load(vector_type(self.dtype, lanes), self._buffer, index, mask(lanes, valid))
        lane = tirx.Min(tirx.Ramp(_int(0), _int(1), lanes), splat(_int(valid - 1), lanes))
        return tirx.BufferLoad(self._buffer, [splat(_int(offset), lanes) + lane * splat(_int(stride), lanes)])

    def store(self, offset: Index, value: Expr, lanes: int, valid: int | None = None) -> None:
        """Lanes from `valid` on leave memory untouched."""
        index = tirx.Ramp(_int(offset), _int(1), lanes) if lanes > 1 else offset
        if valid is None or valid >= lanes:
            T.buffer_store(self._buffer, value, [index])
        else:
            T.evaluate(T.masked_store(self._buffer, value, index, mask(lanes, valid)))


def _int(value: Index) -> Expr:
    return tirx.const(value, "int32") if isinstance(value, int) else value


def vector_type(dtype: str, lanes: int) -> str:
    return dtype if lanes == 1 else f"{dtype}x{lanes}"


def lanes_for(width: int, lanes: int) -> int:
    """Lanes of the vectors that hold `width` columns: fewer than the widest where one such vector, a power of two, holds them all.

    Half a 512-bit vector costs half as much on CPUs that split one over two units, and never more elsewhere.
    """
    return min(lanes, 1 << (width - 1).bit_length())


def padded(width: int, nr: int, lanes: int) -> int:
    """Columns that `width` come to in panels of nr, the last of which is only as wide as its own vectors."""
    whole, rest = width // nr * nr, width % nr
    own = lanes_for(rest, lanes) if rest else 1
    return whole + -(-rest // own) * own


def mask(lanes: int, valid: int) -> Expr:
    """True in the first `valid` lanes; both are known here, so LLVM sees a constant."""
    return tirx.Ramp(_int(0), _int(1), lanes) < tirx.Broadcast(_int(valid), lanes)


def splat(value: Expr, lanes: int) -> Expr:
    return tirx.Broadcast(value, lanes) if lanes > 1 else value


def constant(value: float, dtype: str, lanes: int) -> Expr:
    return splat(tirx.const(value, dtype), lanes)


def function(name: str, buffers: Sequence[Buffer], body: Callable[..., None]) -> tirx.PrimFunc:
    """A PrimFunc over dense buffers; `body` gets a `Flat` for each.

    Buffers may be unaligned: align is the element's size, since three in four NumPy arrays aren't 64-byte aligned and an
    aligned AVX-512 access to them faults. Unaligned accesses that happen to be aligned cost nothing. The body stands in a root
    block, without which RewriteDataflowReshape refuses a function whose input and output are equally large.
    """
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name(name)
        T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
        declared = [T.arg(f"p{i}", T.buffer(b.shape, b.dtype, align=_bytes(b.dtype))) for i, b in enumerate(buffers)]
        with T.sblock("root"):
            body(*(Flat(_linear(arg, b), b.shape, b.dtype) for arg, b in zip(declared, buffers, strict=True)))
    return builder.get()


def redeclared(func: tirx.PrimFunc, shapes: Sequence[Sequence[int]]) -> tirx.PrimFunc:
    """The same kernel, its buffers declared in other shapes of the same sizes: how a reshape beside a kernel comes to cost nothing."""
    own = [tuple(int(extent) for extent in param.ty.shape) for param in func.params]
    if own == [tuple(shape) for shape in shapes]:
        return func
    assert [math.prod(shape) for shape in own] == [math.prod(shape) for shape in shapes]
    new = {
        param: tirx.decl_buffer(shape, param.ty.dtype, name=param.name, data_alignment=param.ty.data_alignment)
        for param, shape in zip(func.params, shapes, strict=True)
    }
    body = tvm_ffi.structural_map(func.body, (tirx.Var, lambda var: new.get(var, var)))
    return tirx.PrimFunc(list(new.values()), body, func.ret_type, attrs=func.attrs)


def _linear(declared: tirx.Buffer, buffer: Buffer) -> tirx.Buffer:
    return T.decl_buffer((math.prod(buffer.shape),), buffer.dtype, data=declared.data, align=_bytes(buffer.dtype))


def _bytes(dtype: str) -> int:
    return {"bool": 1, "int8": 1, "uint8": 1, "float16": 2, "int32": 4, "float32": 4}.get(dtype, 8)


def scratch(size: int, dtype: str) -> Flat:
    """Working memory inside a kernel, private to the thread that reaches it."""
    return Flat(T.alloc_buffer((size,), dtype, scope="global", align=64), (size,), dtype)


def registers(size: int, dtype: str) -> Flat:
    """Accumulators: LLVM keeps them in registers as long as every offset into them is a constant.

    They are bytes of the stack, which LLVM does away with. What T.alloc_buffer gives is a block of a pool to it, be it of scope
    "local": at a tile's end its accumulators are stored there, to be read by nobody, and stay alive through the loops of the next one
    (12544x96x16 in 28x16 tiles: 627 us, 403 without).
    """
    words = -(-size * _bytes(dtype) // 8)
    data = T.bind(tirx.call_intrin(PointerType(PrimType(dtype)), "tirx.tvm_stack_alloca", "shape", words))  # "shape": in words of 8 bytes
    return Flat(T.decl_buffer((size,), dtype, data=data, align=_bytes(dtype)), (size,), dtype)


def held(value: Expr) -> Expr:
    """value, computed once: stored to a cell of its own and read back. LLVM keeps the cell in a register.

    A name doesn't do (T.bind): TVM's simplifier and its code generator replace it by its definition at every use, and
    mish as an epilogue takes 3 s to compile instead of 0.03.
    """
    lanes = value.ty.dtype.lanes
    cell = scratch(lanes, str(value.ty.dtype.with_lanes(1)))
    cell.store(0, value, lanes)
    return cell.load(0, lanes)


@contextlib.contextmanager
def loop(extent: int) -> Iterator[Index]:
    """A serial loop; one step emits none."""
    if extent == 1:
        yield 0
    else:
        with T.serial(0, extent) as index:
            yield index


@contextlib.contextmanager
def each_thread(threads: int) -> Iterator[Callable[[int], contextlib.AbstractContextManager[Index]]]:
    """A parallel region of so many threads, in which run(extent) loops over a thread's own part of 0 .. extent - 1.

    Parts are contiguous and even. With one thread no parallel region is emitted at all, so that a serial kernel never wakes a pool.
    """
    if threads == 1:
        yield loop
        return
    with T.parallel(0, threads) as thread:

        @contextlib.contextmanager
        def own_run(extent: int) -> Iterator[Index]:
            run = -(-extent // threads)
            with T.serial(0, run) as step:
                index = thread * run + step
                if extent % threads:
                    with T.If(index < extent), T.Then():
                        yield index
                else:
                    yield index

        yield own_run


@contextlib.contextmanager
def shared_loop(extent: int, threads: int) -> Iterator[Index]:
    """A loop whose steps are spread over at most `threads` threads."""
    with each_thread(min(threads, extent)) as own_run, own_run(extent) as index:
        yield index


def team(threads: int) -> contextlib.AbstractContextManager[object]:
    """One parallel region around several shared loops and the serial ones that they stand in, which every thread runs through.

    Each shared loop in it is a `phase`. A barrier costs a third of another region, and what a thread holds in its caches stays with it.
    """
    return T.attr(0, "pragma_parallel_launch_point", 1) if threads > 1 else contextlib.nullcontext()


def phase(threads: int) -> contextlib.AbstractContextManager[object]:
    """A shared loop of a team, whose threads wait for each other at its end."""
    return T.attr(0, "pragma_parallel_barrier_when_finish", 1) if threads > 1 else contextlib.nullcontext()


def reduce_over(extent: int, unroll: int, step: Callable[[Index], None]) -> None:
    """step(0), step(1), ... in ascending order, `unroll` of them to a loop body."""
    whole = extent // unroll
    if whole:
        with loop(whole) as outer:
            for inner in range(unroll):
                step(outer * unroll + inner)
    for rest in range(whole * unroll, extent):
        step(rest)


def with_tail(tile: Index, extent: int, size: int, body: Callable[[int], None]) -> None:
    """body(size) for whole tiles, body(extent % size) for the last one when it is smaller."""
    whole, rest = divmod(extent, size)
    if not rest:
        body(size)
    elif not whole:
        body(rest)
    else:
        either(tile < whole, lambda: body(size), lambda: body(rest))


@dataclass(frozen=True)
class Tiling:
    """An axis of `extent` elements in tiles of `size`; the last tile has what is left."""

    extent: int
    size: int = 1

    @property
    def count(self) -> int:
        return -(-self.extent // self.size)

    def each(self, body: Callable[[Index, int], None]) -> None:
        """body(first, size) for whole tiles in a loop, then for the last one when it is smaller.

        Which size a tile has is not asked in the loop: on 12544x96x16 in 9x48 tiles that costs 54 of 417 us.
        """
        whole, rest = divmod(self.extent, self.size)
        if whole:
            with loop(whole) as tile:
                body(tile * self.size, self.size)
        if rest:
            body(whole * self.size, rest)

    def at(self, index: Index, body: Callable[[Index, int], None]) -> None:
        """body(first, size) for tile number `index`, whose size is asked for."""
        with_tail(index, self.extent, self.size, lambda size: body(index * self.size, size))


def shared_tiles(axes: Sequence[Tiling], threads: int, body: Callable[..., None], preferred: Sequence[tuple[int, ...]] = ()) -> None:
    """body((first, size) of each axis) for all tiles; the last axis moves fastest.

    Threads share the tiles of neighbouring axes, and each loops over the others on its own: the first of `preferred`, tuples of their
    numbers, that come out even, else as many outer axes as do. Preferred are those that cut the output into runs of rows: a thread then
    finds rows that it wrote as its input in the next kernel, in its own caches (ShuffleNet on two threads takes 0.88 to 0.98 of the time
    that it does where panels of columns are shared, ResNet-50 0.95).
    """
    if threads == 1:
        _tiles([axis.each for axis in axes], body)
        return
    counts = [axis.count for axis in axes]
    outer = [tuple(range(some)) for some in range(1, len(axes) + 1)]
    work = {some: math.prod(counts[axis] for axis in some) for some in (*preferred, *outer)}
    shared = next((some for some in work if work[some] >= EVEN * threads), outer[-1])
    start, stop = shared[0], shared[-1] + 1
    with each_thread(min(threads, work[shared])) as own_run:

        def own_tiles(*before: Tile) -> None:
            with own_run(work[shared]) as position:
                own = [partial(axis.at, index) for axis, index in zip(axes[start:stop], unravel(position, counts[start:stop]), strict=True)]
                _tiles([*own, *(axis.each for axis in axes[stop:])], partial(body, *before))

        _tiles([axis.each for axis in axes[:start]], own_tiles)


def _tiles(axes: Sequence[Callable[[Callable[[Index, int], None]], None]], body: Callable[..., None]) -> None:
    """body((first, size) of each axis), where an axis calls what it is given with its tiles."""
    if axes:
        axes[0](lambda first, size: _tiles(axes[1:], partial(body, (first, size))))
    else:
        body()


def unravel(position: Index, shape: Sequence[int]) -> list[Index]:
    """The index in `shape` of the element at linear `position`."""
    index: list[Index] = []
    for extent in reversed(shape):
        index.append(position % extent if extent > 1 else 0)
        position = position // extent
    return index[::-1]


def either(condition: Expr, yes: Callable[[], None], no: Callable[[], None]) -> None:
    with T.If(condition):
        with T.Then():
            yes()
        with T.Else():
            no()


def when(condition: Expr, body: Callable[[], None]) -> None:
    with T.If(condition), T.Then():
        body()


class RegisterTile:
    """rows x vectors accumulators that LLVM keeps in registers: every index into them is a constant.

    `valid` is how many elements of the tile's width are real; the last vector is masked when they don't fill it.
    """

    def __init__(self, rows: int, width: int, lanes: int, dtype: str) -> None:
        self.rows, self.lanes, self.dtype, self.width = rows, lanes, dtype, width
        self.vectors = -(-width // lanes)
        self._registers = registers(rows * self.vectors * lanes, dtype)
        for row in range(rows):
            for vector in range(self.vectors):
                self.set(row, vector, constant(0.0, dtype, lanes))

    def valid(self, vector: int) -> int:
        return min(self.lanes, self.width - vector * self.lanes)

    def set(self, row: int, vector: int, value: Expr) -> None:
        self._registers.store((row * self.vectors + vector) * self.lanes, value, self.lanes)

    def __getitem__(self, at: tuple[int, int]) -> Expr:
        row, vector = at
        return self._registers.load((row * self.vectors + vector) * self.lanes, self.lanes)

    def accumulate(self, row: int, vector: int, a: Expr, b: Expr) -> None:
        """accumulator += a * b, rounded once."""
        self.set(row, vector, rounding.fma(a, b, self[row, vector]))


def each_vector(count: int, lanes: int, body: Callable[[Index, int], None]) -> None:
    """body(offset, valid) for whole vectors in a loop, then for what is left."""
    whole, rest = divmod(count, lanes)
    if whole:
        with loop(whole) as step:
            body(step * lanes, lanes)
    if rest:
        body(whole * lanes, rest)


def fill(target: Flat, offset: Index, count: int, lanes: int) -> None:
    """Zeros."""
    zero = constant(0.0, target.dtype, lanes)
    each_vector(count, lanes, lambda at, valid: target.store(offset + at, zero, lanes, valid))


def copy(target: Flat, to: Index, source: Flat, start: Index, count: int, lanes: int) -> None:
    each_vector(count, lanes, lambda at, valid: target.store(to + at, source.load(start + at, lanes, valid), lanes, valid))
