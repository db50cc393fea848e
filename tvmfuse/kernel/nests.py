"""Loop nests with flat addresses: what the blocks of a TensorIR function compute, apart from how their loops run.

A block of a legalised operator is read as a `Nest`: axes, and stores at linear element offsets. On that form a few exact
rewrites bring very different operators to the same few shapes, which forms.py knows how to run:

    split_div_mod   x[v % 3 * 80 + v // 3], v < 240   ->  x[i * 80 + o], v = o * 3 + i
    partition       v < 64 ? x[v] : y[v - 64]         ->  x[v] for v < 64, then y[v] for the rest     (concat, pad, slices)
    merge           x[a * 64 + b], a < 56, b < 64     ->  x[m], m < 3584

Only offsets and conditions, which are integers, are ever simplified: TVM's simplifier takes floats for reals.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import sym, tirx
from tvm.ir import Call, Expr, Range, TensorLoad
from tvm.s_tir.stmt import SBlock, SBlockRealize

from . import emit

MAX_PARTS = 64  # of one nest: code grows with each
SHORT = 16  # elements: instead of shorter runs of a constant here and there, everything is filled with it first


class NotANest(Exception):
    """A function that isn't plain stores over rectangular constant axes, with the reason."""


@dataclass(frozen=True)
class Axis:
    var: tirx.Var
    extent: int


@dataclass(frozen=True)
class Store:
    """buffer[offset] = value. In a reduction `value` reads buffer[offset], and `initial` is what it finds there first."""

    buffer: tirx.Var
    offset: Expr
    value: Expr
    initial: Expr | None = None

    def map(self, rewrite: Callable[[Expr], Expr]) -> Store:
        return Store(self.buffer, rewrite(self.offset), rewrite(self.value), None if self.initial is None else rewrite(self.initial))

    def reads(self) -> list[TensorLoad]:
        """Of other buffers."""
        return [load for load in loads(self.value) if not load.source.same_as(self.buffer)]


@dataclass(frozen=True)
class Nest:
    """for spatial: { stores = initial; for reduction: stores }. Axes are ordered slowest first; none has extent 1.

    outer  axes that run outside, around several nests.
    """

    spatial: tuple[Axis, ...]
    reduction: tuple[Axis, ...]
    stores: tuple[Store, ...]
    outer: tuple[Axis, ...] = ()

    @property
    def axes(self) -> tuple[Axis, ...]:
        return self.spatial + self.reduction

    @property
    def reduces(self) -> bool:
        return any(store.initial is not None for store in self.stores)

    def points(self) -> int:
        return math.prod(axis.extent for axis in (*self.outer, *self.axes))


def substitute(expr: Expr, values: Mapping[tirx.Var, Expr]) -> Expr:
    """expr with variables replaced. Names that it binds are bound anew: TVM refuses one variable with two values in a function."""

    def value_of(var: tirx.Var) -> Expr:
        return values.get(var, var)

    def renamed(let: tirx.Let) -> tirx.Let:
        name = tirx.Var(let.var.name, let.var.ty)
        return tirx.Let(name, let.value, tvm_ffi.structural_map(let.body, (tirx.Var, lambda var: name if var.same_as(let.var) else var)))

    return tvm_ffi.structural_map(tvm_ffi.structural_map(expr, (tirx.Let, renamed)), (tirx.Var, value_of))


def loads(expr: Expr) -> list[TensorLoad]:
    found: list[TensorLoad] = []
    tvm_ffi.structural_walk(expr, (TensorLoad, found.append))
    return found


def uses(expr: Expr, *axes: Axis) -> bool:
    found: list[tirx.Var] = []
    tvm_ffi.structural_walk(expr, (tirx.Var, found.append))
    return any(var.same_as(axis.var) for var in found for axis in axes)


def step(offset: Expr, axis: Axis) -> int | None:
    """How many elements further one step along `axis` is; None when that isn't one constant."""
    linear = sym.detect_linear_equation(offset, [axis.var])
    return int(linear[0]) if linear and isinstance(linear[0], tirx.IntImm) else None


def branches(expr: Expr) -> list[Expr]:
    """Conditions of every if_then_else in `expr`: it evaluates one side only, so that lanes can't differ on it."""
    found: list[Expr] = []

    def call(node: Call) -> None:
        if _is_if_then_else(node):
            found.append(node.args[0])

    tvm_ffi.structural_walk(expr, (Call, call))
    return found


def conditions(expr: Expr) -> list[Expr]:
    """Of every if_then_else and select in `expr`."""
    found = branches(expr)
    tvm_ffi.structural_walk(expr, (tirx.Select, lambda node: found.append(node.condition)))
    return found


def _is_if_then_else(call: Call) -> bool:
    return getattr(call.op, "name", "") == "prim.if_then_else"


def _map_choices(expr: Expr, choose: Callable[[Expr, Expr, Expr, Callable[..., Expr]], Expr]) -> Expr:
    """choose(condition, yes, no, rebuild) for every if_then_else and select."""

    def select(node: tirx.Select) -> Expr:
        return choose(node.condition, node.true_value, node.false_value, tirx.Select)

    def call(node: Call) -> Expr:
        if not _is_if_then_else(node):
            return node
        condition, yes, no = node.args
        return choose(condition, yes, no, tirx.if_then_else)

    return tvm_ffi.structural_map(expr, ((tirx.Select, select), (Call, call)))


def moves_only(value: Expr) -> bool:
    """Whether the value is chosen among what was stored and constants, without arithmetic."""
    if isinstance(value, tirx.Select):
        return moves_only(value.true_value) and moves_only(value.false_value)
    if isinstance(value, Call) and _is_if_then_else(value):
        return moves_only(value.args[1]) and moves_only(value.args[2])
    return isinstance(value, TensorLoad | tirx.FloatImm | tirx.IntImm)


def _boundless(initial: Expr) -> Expr:
    """Infinity where TVM starts a maximum or minimum at the largest finite number, which then wins over infinities."""
    if isinstance(initial, tirx.FloatImm) and abs(initial.value) == float(tirx.max_value(initial.ty.dtype).value):
        return tirx.const(math.copysign(math.inf, initial.value), initial.ty.dtype)
    return initial


def shape_of(buffer: tirx.Var) -> tuple[int, ...]:
    """Raises NotANest when the shape is symbolic or the parameter is no buffer."""
    if not tirx.is_buffer_var(buffer) or not all(isinstance(extent, tirx.IntImm) for extent in buffer.ty.shape):
        raise NotANest(f"{buffer.name} is no buffer of constant shape")
    return tuple(int(extent) for extent in buffer.ty.shape)


# --- from blocks ---


def blocks_of(func: tirx.PrimFunc) -> list[SBlock]:
    """The blocks of a function in order, each under plain loops over its axes. Raises NotANest."""
    if not isinstance(func.body, SBlockRealize):
        raise NotANest("no root block")
    body = func.body.block.body
    found = []
    for stmt in body.seq if isinstance(body, tirx.SeqStmt) else [body]:
        loops = []
        while isinstance(stmt, tirx.For):
            loops.append(stmt.loop_var)
            stmt = stmt.body
        if not isinstance(stmt, SBlockRealize):
            raise NotANest(f"a {type(stmt).__name__} where a block is expected")
        moving = [v for v, axis in zip(stmt.iter_values, stmt.block.iter_vars, strict=True) if not isinstance(v, tirx.IntImm)]
        if len(moving) != len(loops) or not all(value.same_as(loop) for value, loop in zip(moving, loops, strict=True)):
            raise NotANest("axes that aren't the loops'")
        found.append(stmt.block)
    return found


def stores_of(block: SBlock) -> tuple[list[tirx.BufferStore], list[tirx.BufferStore]]:
    """(the block's stores with its local names resolved, its initial stores). Raises NotANest."""
    return _resolved(block.body), _resolved(block.init) if block.init is not None else []


def _resolved(body: tirx.Stmt) -> list[tirx.BufferStore]:
    names: dict[tirx.Var, Expr] = {}
    stores: list[tirx.BufferStore] = []
    for stmt in body.seq if isinstance(body, tirx.SeqStmt) else [body]:
        if isinstance(stmt, tirx.Bind):
            names[stmt.var] = substitute(stmt.value, names)
        elif isinstance(stmt, tirx.BufferStore):
            value = substitute(stmt.value, names)
            if any(load.source.same_as(before.buffer) for load in loads(value) for before in stores):
                raise NotANest("a store that reads what another one of its block writes")
            stores.append(tirx.BufferStore(stmt.buffer, value, list(stmt.indices)))
        else:
            raise NotANest(f"a {type(stmt).__name__} in a block")
    return stores


def is_spatial(axis: tirx.IterVar) -> bool:
    return axis.iter_type == tirx.IterVar.DataPar


def nest_of(block: SBlock, view: Callable[[tirx.Var], tirx.Var], outer: Sequence[Axis], dropped: Callable[[tirx.Var], int]) -> Nest:
    """Read a block, of which the first axes run outside, as `outer`. Raises NotANest.

    view     the flat buffer that stands for one of the function's.
    dropped  how many leading axes of a buffer are indexed by `outer` alone and not stored.
    """
    spatial: list[Axis] = []
    reduction: list[Axis] = []
    values: dict[tirx.Var, Expr] = {axis.var: run.var for axis, run in zip(block.iter_vars, outer, strict=False)}
    for axis in block.iter_vars[len(outer) :]:
        if not isinstance(axis.dom.extent, tirx.IntImm) or int(axis.dom.min) != 0:
            raise NotANest(f"axis {axis.var.name} of unknown extent")
        if int(axis.dom.extent) == 1:
            values[axis.var] = tirx.const(0, axis.var.ty.dtype)
        else:
            (spatial if is_spatial(axis) else reduction).append(Axis(axis.var, int(axis.dom.extent)))

    def flat(buffer: tirx.Var, indices: Sequence[Expr]) -> Expr:
        first = dropped(buffer)
        offset: Expr = tirx.const(0, "int64")
        for index, stride in zip(indices[first:], emit.strides(shape_of(buffer)[first:]), strict=True):
            offset = offset + index.astype("int64") * stride
        return offset

    def flattened(expr: Expr) -> Expr:
        def load(node: TensorLoad) -> Expr:
            return tirx.BufferLoad(view(node.source), [flat(node.source, node.indices)])

        return tvm_ffi.structural_map(expr, (TensorLoad, load))

    body, initial = stores_of(block)
    stores = []
    for store in body:
        first = next((_boundless(flattened(s.value)) for s in initial if s.buffer.same_as(store.buffer)), None)
        if initial and first is None:
            raise NotANest("a reduction without an initial value")
        found = Store(view(store.buffer), flat(store.buffer, store.indices), flattened(store.value), first)
        stores.append(found.map(lambda expr: substitute(expr, values)))
    return simplified(Nest(tuple(spatial), tuple(reduction), tuple(stores), tuple(outer)))


# --- rewrites ---


def simplified(nest: Nest) -> Nest:
    """With every offset and condition in its simplest form, and decided conditions gone."""
    analyzer = sym.Analyzer()
    for axis in (*nest.outer, *nest.axes):
        analyzer.bind(axis.var, Range(0, axis.extent))

    def load(node: TensorLoad) -> Expr:
        return tirx.BufferLoad(node.source, [analyzer.simplify(node.indices[0])])

    def choose(condition: Expr, yes: Expr, no: Expr, rebuild: Callable[..., Expr]) -> Expr:
        known = condition if loads(condition) else analyzer.simplify(condition)
        if isinstance(known, tirx.IntImm):
            return yes if int(known) else no
        return rebuild(known, yes, no)

    def shorter(store: Store) -> Store:
        value = _map_choices(tvm_ffi.structural_map(store.value, (TensorLoad, load)), choose)
        return dataclasses.replace(store, offset=analyzer.simplify(store.offset), value=value)

    return dataclasses.replace(nest, stores=tuple(shorter(store) for store in nest.stores))


def assuming(nest: Nest, condition: Expr, holds: bool) -> Nest:
    """The nest where `condition` is known."""

    def choose(other: Expr, yes: Expr, no: Expr, rebuild: Callable[..., Expr]) -> Expr:
        if tvm_ffi.structural_equal(other, condition):
            return yes if holds else no
        return rebuild(other, yes, no)

    return dataclasses.replace(nest, stores=tuple(dataclasses.replace(s, value=_map_choices(s.value, choose)) for s in nest.stores))


def replaced(nest: Nest, axis: Axis, value: Expr, axes: Sequence[Axis]) -> Nest:
    """The nest with `axes` in the place of `axis`, whose variable is now `value`."""
    ones: dict[tirx.Var, Expr] = {new.var: tirx.const(0, new.var.ty.dtype) for new in axes if new.extent == 1}
    values = {axis.var: substitute(value, ones)}

    def swapped(old: tuple[Axis, ...]) -> tuple[Axis, ...]:
        return tuple(new for a in old for new in (axes if a is axis else (a,)) if new.extent > 1)

    stores = tuple(store.map(lambda expr: substitute(expr, values)) for store in nest.stores)
    return simplified(Nest(swapped(nest.spatial), swapped(nest.reduction), stores, nest.outer))


def _like(axis: Axis, extent: int) -> Axis:
    return Axis(tirx.Var(axis.var.name, axis.var.ty.dtype), extent)


def split(nest: Nest, axis: Axis, inner: int) -> tuple[Nest, Axis]:
    """(the nest with v = outer * inner + i in the place of axis v, the axis `outer`). inner divides the extent."""
    halves = _like(axis, axis.extent // inner), _like(axis, inner)
    return replaced(nest, axis, halves[0].var * inner + halves[1].var, halves), halves[0]


def cut_at(nest: Nest, axis: Axis, at: int) -> tuple[Nest, Nest]:
    """The parts below and from `at` on."""
    below, above = _like(axis, at), _like(axis, axis.extent - at)
    return replaced(nest, axis, below.var, (below,)), replaced(nest, axis, above.var + at, (above,))


def _div_mods(nest: Nest) -> list[Expr]:
    found: list[Expr] = []
    for store in nest.stores:
        for expr in (store.offset, store.value):
            tvm_ffi.structural_walk(expr, ((tirx.FloorDiv, tirx.FloorMod), found.append))
    return found


def split_div_mod(nest: Nest) -> Nest:
    """Split the axes of which quotients and remainders are taken, as long as that makes them fewer."""
    for node in _div_mods(nest):
        for axis in nest.axes:
            inner = int(node.b) if isinstance(node.b, tirx.IntImm) else 1
            if 1 < inner < axis.extent and axis.extent % inner == 0 and uses(node.a, axis):
                candidate, _ = split(nest, axis, inner)
                if len(_div_mods(candidate)) < len(_div_mods(nest)):
                    return split_div_mod(candidate)
    return nest


def merge(nest: Nest) -> Nest:
    """Merge neighbouring axes that every access walks through in step: what would need a quotient stays apart."""
    for axes in (nest.spatial, nest.reduction):
        for outer, inner in zip(axes, axes[1:], strict=False):
            both = _like(inner, outer.extent * inner.extent)
            half = replaced(nest, outer, both.var // inner.extent, (both,))
            candidate = replaced(half, inner, both.var % inner.extent, ())
            if len(_div_mods(candidate)) <= len(_div_mods(nest)):
                return merge(candidate)
    return nest


def partition(nest: Nest) -> list[Nest]:
    """Cut spatial axes where conditions on them alone change, slowest first; each part has decided them.

    The innermost axis is also cut where the conditions of a window change, so that inside nothing is left to decide.
    """
    parts: list[Nest] = []
    waiting = [nest]
    while waiting:
        whole = waiting.pop(0)
        cut = next(_cuts(whole), None) if len(parts) + len(waiting) < MAX_PARTS else None
        if cut is None:
            parts.append(whole)
        else:
            waiting = [*cut_at(whole, *cut), *waiting]
    return parts


def _cuts(nest: Nest) -> Iterator[tuple[Axis, int]]:
    comparisons: list[Expr] = []
    for store in nest.stores:
        for condition in conditions(store.value):
            if not loads(condition):
                tvm_ffi.structural_walk(condition, ((tirx.LT, tirx.LE, tirx.GT, tirx.GE), comparisons.append))
    for axis in nest.spatial:
        windows = nest.reduction if axis is nest.spatial[-1] else ()
        others = [other for other in (*nest.outer, *nest.axes) if other is not axis and other not in windows]
        for node in comparisons:
            moving = [(window.var, window.extent - 1) for window in windows if uses(node, window)]
            if not uses(node, axis) or uses(node, *others) or any(step(node.a - node.b, a) is None for a in (axis, *windows)):
                continue
            for ends in itertools.product((0, 1), repeat=len(moving)):
                values = {var: tirx.const(last * end, var.ty.dtype) for (var, last), end in zip(moving, ends, strict=True)}
                at = _threshold(substitute(node, values), axis)
                if at is not None:
                    yield axis, at


def _threshold(comparison: Expr, axis: Axis) -> int | None:
    """The first value of the axis at which a linear comparison differs from its value at 0; None if it never does."""
    analyzer = sym.Analyzer()

    def holds(at: int) -> bool | None:
        value = analyzer.simplify(substitute(comparison, {axis.var: tirx.const(at, axis.var.ty.dtype)}))
        return bool(int(value)) if isinstance(value, tirx.IntImm) else None

    low, high = 0, axis.extent - 1
    first = holds(low)
    if first is None or first == holds(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) == first else (low, middle)
    return high


def stages(nest: Nest) -> list[list[Nest]]:
    """Nests that together do what `nest` does, partitioned and merged. Those of one stage touch different elements."""
    parts = [merge(part) for whole in partition(nest) for part in partition(split_div_mod(whole))]
    blank = [part for part in parts if _is_constant(part)]
    values = {str(part.stores[0].value) for part in blank}
    if len(values) != 1 or all(part.spatial and part.spatial[-1].extent >= SHORT for part in blank):
        return [parts]
    everywhere = dataclasses.replace(nest.stores[0], value=blank[0].stores[0].value)
    filled = merge(dataclasses.replace(nest, stores=(everywhere,)))
    return [[filled], [part for part in parts if not _is_constant(part)]]


def _is_constant(nest: Nest) -> bool:
    return not nest.reduces and len(nest.stores) == 1 and isinstance(nest.stores[0].value, tirx.FloatImm)
