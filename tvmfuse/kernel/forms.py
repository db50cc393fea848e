"""The forms in which a nest runs, chosen by strides and extents alone and never by the machine, so that no bit depends on it.

    across        the innermost spatial axis is the vector; a reduction runs in ascending order in each lane's register
    along         a reduction over a contiguous axis with nothing else to vectorise over: 16 logical lanes, then a fixed tree
    transpose     a copy whose two sides are contiguous along different axes: square tiles turned in registers
    interleave    the same where the axis written along is at most 8 long (channels of an image, groups of a channel shuffle)
    deinterleave  the same where the axis read along is
    scalar        what is left, in ascending order

Every vector is a whole one: of an axis that the lanes don't divide, the last vector overlaps the one before, or, where what is
written may share memory with what is read, gives way to shorter ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import tvm_ffi
from tvm import tirx
from tvm.ir import Expr, TensorLoad
from tvm.script.ir_builder import tirx as T

from ..values import ISA
from . import emit
from .emit import Flat
from .nests import Axis, Nest, Store, assuming, branches, step, substitute, uses

LOGICAL_LANES = 16  # of a reduction along a contiguous axis, on every machine
FEW = 8  # rows that are interleaved by picking each result's lanes from all of them

Kind = Literal["across", "along", "transpose", "interleave", "deinterleave", "scalar"]
Values = dict[tirx.Var, Expr]
Given = TypeVar("Given")


@dataclass(frozen=True)
class Form:
    """lane is the axis of the vectors; other, of a transposed copy, the one along which it reads."""

    kind: Kind
    lane: Axis | None = None
    other: Axis | None = None


def form_of(nest: Nest) -> Form:
    lane = nest.spatial[-1] if nest.spatial else None
    if lane is not None and (_branches_on(nest, lane) or any(step(s.offset, lane) != 1 for s in nest.stores)):
        lane = None
    if not nest.reduces:
        return Form("scalar") if lane is None else _copy_form(nest, lane) or Form("across", lane)
    if lane is not None and _in_step(nest, lane):
        return Form("across", lane)
    along = nest.reduction[-1] if nest.reduction else None
    if along is not None and along.extent >= LOGICAL_LANES and _in_step(nest, along) and not _branches_on(nest, along):
        if all(combination(store) is not None for store in nest.stores):
            return Form("along", along)
    return Form("scalar") if lane is None else Form("across", lane)


def _branches_on(nest: Nest, axis: Axis) -> bool:
    return any(uses(branch, axis) for s in nest.stores for branch in branches(s.value))


def _in_step(nest: Nest, axis: Axis) -> bool:
    """Whether everything is read contiguously along the axis, or is the same all along it."""
    return all(step(load.indices[0], axis) in (0, 1) for s in nest.stores for load in s.reads())


def _copy_form(nest: Nest, lane: Axis) -> Form | None:
    (store, *more) = nest.stores
    if more or not isinstance(store.value, TensorLoad):
        return None
    offset = store.value.indices[0]
    other = next((axis for axis in nest.spatial if step(offset, axis) == 1), None)
    if other is None or other is lane or step(offset, lane) is None:
        return None
    if lane.extent <= FEW:
        return Form("interleave", lane, other) if step(store.offset, other) == lane.extent else None
    if other.extent <= FEW:
        return Form("deinterleave", lane, other) if step(offset, lane) == other.extent else None
    return Form("transpose", lane, other)


def combination(store: Store) -> Callable[[Expr, Expr], Expr] | None:
    """(a, b) -> two partial results as one; None when the reduction is no sum, maximum or minimum.

    It is the reduction's own expression with the accumulator a and the element b, so that NaN is treated alike.
    """
    elements: list[tuple[type, Expr]] = []

    def visit(node: Expr) -> None:
        for accumulator, element in ((node.a, node.b), (node.b, node.a)):
            if isinstance(accumulator, TensorLoad) and accumulator.source.same_as(store.buffer):
                elements.append((type(node), element))

    tvm_ffi.structural_walk(store.value, ((tirx.Add, tirx.Max, tirx.Min), visit))
    if len(elements) != 1:
        return None
    ((kind, element),) = elements
    starts_at_zero = isinstance(store.initial, tirx.FloatImm | tirx.IntImm) and store.initial.value == 0
    if kind is tirx.Add and not (isinstance(store.value, tirx.Add) and starts_at_zero):
        return None

    def combine(a: Expr, b: Expr) -> Expr:
        def part(node: object) -> object:
            same = isinstance(node, type(element)) and tvm_ffi.structural_equal(node, element)
            return b if same else node

        return _with_loads(tvm_ffi.structural_map(store.value, (object, part), order="pre"), {store.buffer: a})

    return combine


def _with_loads(expr: Expr, values: Mapping[tirx.Var, Expr]) -> Expr:
    """With `values` in the place of loads from those buffers, wherever they load from."""
    return tvm_ffi.structural_map(expr, (TensorLoad, lambda load: values.get(load.source, load)))


# --- loops ---


def index(value: int) -> Expr:
    return tirx.const(value, "int64")


@contextlib.contextmanager
def _serial(extent: int) -> Iterator[Expr]:
    if extent == 1:
        yield index(0)
    else:
        with T.serial(0, index(extent)) as i:
            yield i


@contextlib.contextmanager
def _lanes(width: int) -> Iterator[Expr]:
    if width == 1:
        yield index(0)
    else:
        with T.vectorized(0, index(width)) as i:
            yield i


@contextlib.contextmanager
def _tiles(extent: int, size: int) -> Iterator[Expr]:
    """The start of each tile; the last may overlap the one before, without code of its own."""
    with _serial(-(-extent // size)) as i:
        yield i * size if extent % size == 0 else tirx.Min(i * size, index(extent - size))


@dataclass(frozen=True)
class Share:
    """One thread's part of the outermost loops: of each a contiguous run. Without a thread, all of it."""

    thread: Expr | None = None
    threads: int = 1

    @contextlib.contextmanager
    def loop(self, extent: int) -> Iterator[Expr]:
        if self.thread is None:
            with _serial(extent) as i:
                yield i
            return
        run = -(-extent // self.threads)
        with _serial(run) as i:
            position = self.thread * run + i
            if run * self.threads == extent:
                yield position
            else:
                with T.If(position < extent), T.Then():
                    yield position


@contextlib.contextmanager
def shares(threads: int) -> Iterator[Share]:
    """One parallel region; none at all for one thread, so that a serial kernel never wakes a pool."""
    if threads == 1:
        yield Share()
    else:
        with T.parallel(0, index(threads)) as thread:
            yield Share(thread, threads)


@contextlib.contextmanager
def _over(axes: Sequence[Axis], share: Share | None = None) -> Iterator[Values]:
    """Loops over all axes. The first is shared; where there is none, one thread does everything."""
    with contextlib.ExitStack() as stack:
        first = [stack.enter_context(share.loop(axes[0].extent if axes else 1))] if share else []
        rest = [stack.enter_context(_serial(axis.extent)) for axis in axes[len(first) :]]
        yield {axis.var: i for axis, i in zip(axes, (*first, *rest), strict=False)}


# --- emission ---


@dataclass(frozen=True)
class Emitter:
    """Emits nests over real buffers.

    views      flat placeholder -> the buffer it stands for.
    outer      values of the axes that run outside.
    temporary  placeholders for working memory: TVM may let one of them take the place of another that it is computed from.
    """

    isa: ISA
    views: Mapping[tirx.Var, Flat]
    outer: Values
    temporary: Collection[tirx.Var]
    share: Share = Share()

    def nest(self, nest: Nest) -> None:
        form = form_of(nest)
        if form.other is not None and self._in_place(nest):
            form = Form("across", form.lane)
        {
            "across": self._across,
            "along": self._along,
            "transpose": self._transpose,
            "interleave": self._interleave,
            "deinterleave": self._deinterleave,
            "scalar": self._scalar,
        }[form.kind](nest, form)

    def _in_place(self, nest: Nest) -> bool:
        """Whether what is written may share memory with what is read, so that nothing may be computed twice."""
        return any(store.buffer in self.temporary for store in nest.stores)

    def _real(self, expr: Expr, values: Values) -> Expr:
        def load(node: TensorLoad) -> Expr:
            view = self.views.get(node.source)
            return node if view is None else view.scalar(node.indices[0])

        return substitute(tvm_ffi.structural_map(expr, (TensorLoad, load)), self.outer | values)

    def _store(self, store: Store, values: Values, value: Expr) -> None:
        self.views[store.buffer].store(self._real(store.offset, values), self._real(value, values), 1)

    def _width(self, nest: Nest, *axes: Axis) -> int:
        """Lanes of vectors along `axes`: as many as the machine has and every axis fills."""
        lanes = [self.isa.lanes(str(store.buffer.dtype)) for store in nest.stores]
        return min(*lanes, *(1 << (axis.extent.bit_length() - 1) for axis in axes))

    def _strips(self, nest: Nest, axis: Axis, width: int, most: int, body: Callable[[Expr, int, int], None]) -> None:
        """body(start, vectors, lanes of each) until the axis is covered, up to `most` vectors at a time."""
        whole = axis.extent // width
        most = next((n for n in range(most, most // 2, -1) if whole % n == 0), most)  # one body instead of two
        strips, rest = divmod(whole, most)
        if strips:
            with _serial(strips) as strip:
                body(strip * (most * width), most, width)
        if rest:
            body(index(strips * most * width), rest, width)
        done = whole * width
        if done < axis.extent and not self._in_place(nest):
            body(index(axis.extent - width), 1, width)
            return
        for start, piece in powers_of_two(done, axis.extent):
            body(index(start), 1, piece)

    def _scalar(self, nest: Nest, form: Form) -> None:
        with _over(nest.spatial, self.share) as values:
            if nest.reduces:
                for store in nest.stores:
                    self._store(store, values, _initial(store))
            with _over(nest.reduction) as steps:
                for store in nest.stores:
                    self._store(store, values | steps, store.value)

    def _across(self, nest: Nest, form: Form) -> None:
        lane = _given(form.lane)
        # a quarter of the registers holds accumulators: enough to hide an addition's latency, and the reads of one step stay near
        most = max(1, self.isa.registers // 4 // len(nest.stores)) if nest.reduces else 1
        width = self._width(nest, lane)

        def strip(nest: Nest, values: Values, start: Expr, vectors: int, width: int) -> None:
            def each(body: Callable[[Values, Expr], None]) -> None:
                for number in range(vectors):
                    with _lanes(width) as i:
                        slot = index(number * width) + i
                        body(values | {lane.var: start + slot}, slot)

            def write(at: Values, _: Expr) -> None:
                for store in nest.stores:
                    self._store(store, at, store.value)

            if not nest.reduces:
                each(write)
                return
            registers = Registers(nest.stores, vectors * width)

            def begin(at: Values, slot: Expr) -> None:
                registers.set(slot, [self._real(_initial(s), at) for s in nest.stores])

            def accumulate(nest: Nest, steps: Values) -> None:
                def element(at: Values, slot: Expr) -> None:
                    registers.set(slot, [self._real(registers.read(s.value, slot), at | steps) for s in nest.stores])

                each(element)

            def finish(at: Values, slot: Expr) -> None:
                for store, result in zip(nest.stores, registers.get(slot), strict=True):
                    self._store(store, at, result)

            each(begin)
            with _over(nest.reduction) as steps:
                self._decided(nest, values | steps, (lane,), lambda nest: accumulate(nest, steps))
            each(finish)

        with _over([axis for axis in nest.spatial if axis is not lane], self.share) as values:

            def strips(nest: Nest) -> None:
                self._strips(nest, lane, width, most, lambda start, vectors, lanes: strip(nest, values, start, vectors, lanes))

            self._decided(nest, values, (lane, *nest.reduction), strips)

    def _decided(self, nest: Nest, values: Values, inside: Sequence[Axis], body: Callable[[Nest], None]) -> None:
        """body(nest) under branches on what no axis inside changes."""
        undecided = [c for s in nest.stores for c in branches(s.value) if not uses(c, *inside)]
        if not undecided:
            body(nest)
            return
        condition = undecided[0]
        emit.either(
            self._real(condition, values),
            lambda: self._decided(assuming(nest, condition, True), values, inside, body),
            lambda: self._decided(assuming(nest, condition, False), values, inside, body),
        )

    def _along(self, nest: Nest, form: Form) -> None:
        along = _given(form.lane)
        whole = along.extent // LOGICAL_LANES
        with _over(nest.spatial, self.share) as values:
            registers = Registers(nest.stores, LOGICAL_LANES)
            with _lanes(LOGICAL_LANES) as lane:
                registers.set(lane, [self._real(_initial(s), values) for s in nest.stores])

            def accumulate(steps: Values, start: Expr, slot: int, width: int) -> None:
                with _lanes(width) as i:
                    at = values | steps | {along.var: start + i}
                    registers.set(i + slot, [self._real(registers.read(s.value, i + slot), at) for s in nest.stores])

            with _over(nest.reduction[:-1]) as steps:
                with _serial(whole) as i:
                    accumulate(steps, i * LOGICAL_LANES, 0, LOGICAL_LANES)
                for start, piece in powers_of_two(whole * LOGICAL_LANES, along.extent):
                    accumulate(steps, index(start), start % LOGICAL_LANES, piece)
            for half in (8, 4, 2, 1):
                with _lanes(half) as i:
                    registers.fold(i, i + half)
            for store, result in zip(nest.stores, registers.get(index(0)), strict=True):
                self._store(store, values, result)

    def _transpose(self, nest: Nest, form: Form) -> None:
        lane, other, (store,) = _given(form.lane), _given(form.other), nest.stores
        source, target, offset = self.views[_load(store).source], self.views[store.buffer], _load(store).indices[0]
        size = self._width(nest, lane, other)

        def tile(values: Values, start: Expr, column: Expr) -> None:
            def at(i: int, j: int) -> Values:
                return values | {lane.var: start + i, other.var: column + j}

            rows = [T.bind(source.load(self._real(offset, at(i, 0)), size)) for i in range(size)]
            for j, turned in enumerate(_turned(rows)):
                target.store(self._real(store.offset, at(0, j)), turned, size)

        with _over([axis for axis in nest.spatial if axis is not lane and axis is not other], self.share) as values:
            # The longer axis inside: as few streams as a tile has rows, which prefetchers follow and whose pages are all known.
            short, long = sorted((lane, other), key=lambda axis: axis.extent)
            with _tiles(short.extent, size) as outside, _tiles(long.extent, size) as inside:
                tile(values, *((outside, inside) if short is lane else (inside, outside)))

    def _interleave(self, nest: Nest, form: Form) -> None:
        """out[j * rows + i] = row[i][j]"""
        lane, other, (store,) = _given(form.lane), _given(form.other), nest.stores
        source, target, offset, rows = self.views[_load(store).source], self.views[store.buffer], _load(store).indices[0], lane.extent

        def strip(values: Values, start: Expr, width: int) -> None:
            def at(i: int) -> Values:
                return values | {other.var: start, lane.var: index(i)}

            vectors = [T.bind(source.load(self._real(offset, at(i)), width)) for i in range(rows)]
            to = self._real(store.offset, at(0))
            for first in range(0, rows * width, width):
                target.store(to + first, _shuffle(vectors, [k % rows * width + k // rows for k in range(first, first + width)]), width)

        self._rows(nest, other, (lane, other), strip)

    def _deinterleave(self, nest: Nest, form: Form) -> None:
        """out[i][j] = run[j * rows + i]"""
        lane, other, (store,) = _given(form.lane), _given(form.other), nest.stores
        source, target, offset, rows = self.views[_load(store).source], self.views[store.buffer], _load(store).indices[0], other.extent

        def strip(values: Values, start: Expr, width: int) -> None:
            def at(i: int) -> Values:
                return values | {lane.var: start, other.var: index(i)}

            run = self._real(offset, at(0))
            vectors = [T.bind(source.load(run + first, width)) for first in range(0, rows * width, width)]
            for i in range(rows):
                target.store(self._real(store.offset, at(i)), _shuffle(vectors, [j * rows + i for j in range(width)]), width)

        self._rows(nest, lane, (lane, other), strip)

    def _rows(self, nest: Nest, long: Axis, tiled: Sequence[Axis], strip: Callable[[Values, Expr, int], None]) -> None:
        with _over([axis for axis in nest.spatial if axis not in tiled], self.share) as values:
            self._strips(nest, long, self._width(nest, long), 1, lambda start, _, width: strip(values, start, width))


class Registers:
    """Accumulators of a reduction, an array for each store; LLVM keeps them in registers, since every index is known."""

    def __init__(self, stores: Sequence[Store], size: int) -> None:
        self._stores = stores
        self._arrays = [T.alloc_buffer((size,), str(s.buffer.dtype), scope="local", align=64) for s in stores]

    def get(self, slot: Expr) -> list[Expr]:
        return [tirx.BufferLoad(array, [slot]) for array in self._arrays]

    def set(self, slot: Expr, values: Sequence[Expr]) -> None:
        for array, value in zip(self._arrays, values, strict=True):
            T.buffer_store(array, value, [slot])

    def read(self, value: Expr, slot: Expr) -> Expr:
        """`value` with the accumulators in the place of what is reduced."""
        return _with_loads(value, {s.buffer: register for s, register in zip(self._stores, self.get(slot), strict=True)})

    def fold(self, to: Expr, other: Expr) -> None:
        combine = [combination(store) for store in self._stores]
        self.set(to, [_given(c)(a, b) for c, a, b in zip(combine, self.get(to), self.get(other), strict=True)])


def _given(value: Given | None) -> Given:
    assert value is not None
    return value


def _initial(store: Store) -> Expr:
    return _given(store.initial)


def _load(store: Store) -> TensorLoad:
    assert isinstance(store.value, TensorLoad)
    return store.value


def powers_of_two(start: int, stop: int) -> list[tuple[int, int]]:
    """(start, length) of runs whose lengths are powers of two, the longest first."""
    pieces = []
    while start < stop:
        length = 1 << ((stop - start).bit_length() - 1)
        pieces.append((start, length))
        start += length
    return pieces


def _shuffle(vectors: Sequence[Expr], lanes: Sequence[int]) -> Expr:
    return T.bind(tirx.Shuffle(list(vectors), [tirx.const(lane, "int32") for lane in lanes]))


def _turned(rows: list[Expr]) -> list[Expr]:
    """Rows become columns: each stage interleaves row i with row i + size / 2, which rotates the bits of (row, lane) by one."""
    half = len(rows) // 2
    low = [lane // 2 + lane % 2 * len(rows) for lane in range(len(rows))]
    for _ in range(len(rows).bit_length() - 1):
        rows = [_shuffle((rows[i], rows[i + half]), [lane + shift for lane in low]) for i in range(half) for shift in (0, half)]
    return rows
