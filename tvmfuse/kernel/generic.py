"""Everything that isn't a site: legalised, fused by TVM, and run as vector code with one fixed order of each reduction.

LegalizeOps, FuseOps and FuseTIR say what is computed. Then, function by function,
    1. producers are inlined with the schedule primitive where that repeats no arithmetic;
    2. each block is read as a `Nest` and partitioned where its conditions change, so that no element of a concatenation or
       a padding is looked at to find where it comes from (nests.py);
    3. blocks that share their leading axes (softmax, normalisation, average pooling) run together, row by row;
    4. each nest runs in the form that its strides call for (forms.py), its outermost axis shared among the threads.
Rejected: schedule primitives for the loops themselves. A split that doesn't divide leaves a guard that scalarises its
vector loop, `loop_partition` breaks the block structure that later primitives need, and nothing transposes in registers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Sequence

import tvm
import tvm_ffi
from tvm import IRModule, relax, s_tir, te, tirx
from tvm.ir import Call, Expr
from tvm.s_tir.stmt import SBlock, SBlockRealize

from ..values import Machine
from . import emit, nests
from .emit import Flat
from .family import Buffer
from .forms import Emitter, Form, form_of, index, shares
from .grain import CORE_HZ, STREAM_BYTES_PER_S, threads_for
from .math import softplus
from .nests import Axis, Nest, NotANest, conditions, is_spatial, loads, moves_only, nest_of, shape_of, stores_of, uses
from .rounding import is_float

logger = logging.getLogger(__name__)

CIRCULAR = frozenset(f"tirx.{name}" for name in ("sin", "cos", "tan", "asin", "acos", "atan", "asinh", "acosh"))
OPAQUE = 8  # TVM's OpPatternKind.kOpaque
LINE = 16  # elements: what threads share is cut at multiples of it, so that two of them hardly ever write to one cache line
WIDE = 64  # elements of an innermost axis that make the few at its ends cheap

Rewrite = Callable[[str, tirx.PrimFunc], tirx.PrimFunc]


def inlined(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """With each producer computed where it is read, if that repeats no arithmetic. Raises NotANest."""
    if not isinstance(func.body, SBlockRealize):
        raise NotANest("no root block")
    sch = s_tir.Schedule(func)
    for producer in reversed(sch.get_child_blocks(sch.get_sblock(func.body.block.name_hint))):
        consumers = [sch.get(consumer) for consumer in sch.get_consumers(producer)]
        if consumers and _pays_to_inline(sch.get(producer), consumers):
            with contextlib.suppress(s_tir.ScheduleError):
                sch.compute_inline(producer)
    return sch.mod["main"]


def _pays_to_inline(producer: SBlock, consumers: Sequence[SBlock]) -> bool:
    (store, *more), initial = stores_of(producer)
    if initial or more:
        return False
    if moves_only(store.value):
        # under a reduction the elements around a condition's change run one by one; with few others a copy is faster
        short = [Axis(i, n) for i, n in zip(store.indices, shape_of(store.buffer), strict=True) if n > 1][-1:]
        beside = any(uses(c, axis) for c in conditions(store.value) for axis in short if axis.extent < WIDE)
        return not (beside and any(_reduces(consumer) for consumer in consumers))
    (consumer, *others) = consumers
    if others or _points(consumer) > _points(producer):
        return False
    reads = [load.indices for s in stores_of(consumer)[0] for load in loads(s.value) if load.source.same_as(store.buffer)]
    return all(tvm_ffi.structural_equal(read, reads[0]) for read in reads)


def _reduces(block: SBlock) -> bool:
    return not all(is_spatial(axis) for axis in block.iter_vars)


def _points(block: SBlock) -> int:
    return math.prod(int(axis.dom.extent) for axis in block.iter_vars)


def scheduled(name: str, func: tirx.PrimFunc, machine: Machine) -> tirx.PrimFunc:
    """The function as vector code. Raises NotANest, with the reason, when a block of it is no nest."""
    func = inlined(func)
    blocks = nests.blocks_of(func)
    written = {store.buffer for block in blocks for store in stores_of(block)[0]}
    temporary = [buffer for buffer in func.body.block.alloc_buffers if buffer in written]
    placeholders: dict[tirx.Var, tirx.Var] = {}

    def view(buffer: tirx.Var) -> tirx.Var:
        if buffer not in placeholders:
            placeholders[buffer] = tirx.decl_buffer((math.prod(shape_of(buffer)),), buffer.dtype, buffer.name)
        return placeholders[buffer]

    together = _shared_axes(blocks, temporary, view) if temporary else 0
    outer = tuple(Axis(tirx.Var(axis.var.name, "int64"), int(axis.dom.extent)) for axis in blocks[0].iter_vars[:together])
    rows = math.prod(axis.extent for axis in outer)
    read = [nest_of(block, view, outer, lambda buffer: together if buffer in temporary else 0) for block in blocks]
    stages = [stage for nest in read for stage in nests.stages(nest)]
    threads = threads_for(machine, _seconds(func, read, machine))

    def body(*params: Flat) -> None:
        views = {view(param): flat for param, flat in zip(func.params, params, strict=True)}
        hidden = {view(buffer) for buffer in temporary}

        def allocate() -> None:
            views.update({view(b): emit.scratch(math.prod(shape_of(b)[together:]), str(b.dtype)) for b in temporary})

        if rows == 1:
            allocate()
            for stage in stages:
                with shares(threads) as share:
                    for nest in stage:
                        for part in _divided(nest, threads):
                            Emitter(machine.isa, views, {axis.var: index(0) for axis in outer}, hidden, share).nest(part)
            return
        with shares(threads) as share:
            allocate()
            with share.loop(rows) as row:
                position = emit.unravel(row, [axis.extent for axis in outer])
                at = {axis.var: index(i) if isinstance(i, int) else i for axis, i in zip(outer, position, strict=True)}
                for stage in stages:
                    for nest in stage:
                        Emitter(machine.isa, views, at, hidden).nest(nest)

    return emit.function(name, [Buffer(shape_of(param), str(param.dtype)) for param in func.params], body)


def _shared_axes(blocks: Sequence[SBlock], temporary: Sequence[tirx.Var], view: Callable[[tirx.Var], tirx.Var]) -> int:
    """How many leading axes all blocks have in common, so that what one leaves for the next stays in cache."""
    count = min(_leading(block, form_of(nest_of(block, view, (), lambda _: 0))) for block in blocks)
    for block in blocks:
        stores, initial = stores_of(block)
        accesses = [(s.buffer, s.indices) for s in (*stores, *initial)]
        accesses += [(load.source, load.indices) for s in (*stores, *initial) for load in loads(s.value)]
        inside = [indices for buffer, indices in accesses if buffer in temporary]

        def shared(position: int, block: SBlock = block, inside: Sequence[Sequence[Expr]] = inside) -> bool:
            axis, first = block.iter_vars[position], blocks[0].iter_vars[position]
            follows = all(len(indices) > position and indices[position].same_as(axis.var) for indices in inside)
            return follows and int(axis.dom.extent) == int(first.dom.extent)

        count = next((position for position in range(count) if not shared(position)), count)
    return count


def _leading(block: SBlock, form: Form) -> int:
    """How many of the block's first axes are spatial and not needed inside for its vectors."""
    tiled = [axis.var for axis in (form.lane, form.other) if axis is not None]
    for position, axis in enumerate(block.iter_vars):
        if not is_spatial(axis) or any(axis.var.same_as(var) for var in tiled):
            return position
    return len(block.iter_vars)


def _divided(nest: Nest, threads: int) -> list[Nest]:
    """The nest, or two, with an outermost axis that the threads can share and that isn't needed whole for vectors."""
    form = form_of(nest)
    free = [axis for axis in nest.spatial if axis is not form.lane and axis is not form.other]
    if threads == 1 or not nest.spatial or (free and free[0].extent >= threads):
        return [nest]
    longest = max(nest.spatial, key=lambda axis: axis.extent)
    run = longest.extent // threads // LINE * LINE
    if not run:
        return [nest]
    position = nest.spatial.index(longest)
    parts = nests.cut_at(nest, longest, run * threads) if run * threads < longest.extent else (nest,)
    halves, first = nests.split(parts[0], parts[0].spatial[position], run)
    rest = tuple(axis for axis in halves.spatial if axis is not first)
    return [dataclasses.replace(halves, spatial=(first, *rest)), *parts[1:]]


def _seconds(func: tirx.PrimFunc, read: Sequence[Nest], machine: Machine) -> float:
    """Of one thread, from bytes and float operations; only to decide whether a second one pays."""
    moved = sum(math.prod(shape_of(param)) * _bytes(param) for param in func.params)
    operations = 0
    for nest in read:
        nodes: list[Expr] = []
        for store in nest.stores:
            tvm_ffi.structural_walk(store.value, ((tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Max, tirx.Min, Call), nodes.append))
        operations += nest.points() * sum(is_float(node) for node in nodes)
    return max(moved / STREAM_BYTES_PER_S, operations / (machine.isa.lanes() * CORE_HZ))


def _bytes(buffer: tirx.Var) -> int:
    return max(1, buffer.dtype.bits // 8)


def _for_any_array(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Parameters aligned to their elements only, as NumPy's arrays are."""

    def declared(param: tirx.Var) -> tirx.Var:
        if not tirx.is_buffer_var(param):
            return param
        return tirx.decl_buffer(param.ty.shape, param.dtype, param.name, data_alignment=_bytes(param))

    params = {param: declared(param) for param in func.params}
    return tirx.PrimFunc(list(params.values()), nests.substitute(func.body, params), func.ret_type, func.attrs)


# --- passes ---


def _is_scheduled(func: tirx.PrimFunc) -> bool:
    return bool(func.attrs.get("tirx.is_scheduled", False))


def _rewritten(mod: IRModule, rewrite: Rewrite, of_scheduled: bool = False) -> IRModule:
    functions = {
        var: rewrite(var.name_hint, func) if isinstance(func, tirx.PrimFunc) and _is_scheduled(func) == of_scheduled else func
        for var, func in mod.functions_items()
    }
    return IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


def _or_same(rewrite: Rewrite) -> Rewrite:
    """The rewrite where it succeeds: whatever TVM refuses on an operator never seen here must not fail a build."""

    def attempt(name: str, func: tirx.PrimFunc) -> tirx.PrimFunc:
        try:
            return rewrite(name, func)
        except Exception as error:
            logger.debug("%s stays as it is: %s", name, str(error).partition("\n")[0])
            return func

    return attempt


@tvm.transform.module_pass(opt_level=0, name="InlineProducers")
class InlineProducers:
    """Fused functions compute each producer where it is read, so that a chain of reshapes is seen to be one view."""

    def transform_module(self, mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        return _rewritten(mod, _or_same(lambda _, func: inlined(func)))


@tvm.transform.module_pass(opt_level=0, name="ScheduleGeneric")
class ScheduleGeneric:
    """Every PrimFunc without the attribute tirx.is_scheduled becomes vector code, or keeps its plain loops where that can't be done."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def transform_module(self, mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        vectorised = _or_same(lambda name, func: scheduled(name, func, self.machine))

        def rewrite(name: str, func: tirx.PrimFunc) -> tirx.PrimFunc:
            result = vectorised(name, func)
            return _for_any_array(result).with_attr("tirx.is_scheduled", True) if result is func else result

        return _rewritten(mod, rewrite)


@tvm.transform.module_pass(opt_level=0, name="KeepScheduledApart")
class KeepScheduledApart:
    """Scheduled functions are opaque to FuseOps: AnnotateTIROpPattern takes loops without blocks for an elementwise op."""

    def transform_module(self, mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        return _rewritten(mod, lambda _, func: func.with_attr("op_pattern", OPAQUE), of_scheduled=True)


@tvm.transform.module_pass(opt_level=0, name="KeepCircularApart")
class KeepCircularApart:
    """Circular functions are opaque to FuseOps: of one inside another TVM's simplifier expands every use of every value, for minutes."""

    def transform_module(self, mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        def rewrite(_: str, func: tirx.PrimFunc) -> tirx.PrimFunc:
            calls: list[Call] = []
            tvm_ffi.structural_walk(func.body, (Call, calls.append))
            return func.with_attr("op_pattern", OPAQUE) if any(getattr(call.op, "name", "") in CIRCULAR for call in calls) else func

        return _rewritten(mod, rewrite)


def _softplus(bb: relax.BlockBuilder, call: Call) -> Expr:
    """A site's function. TVM's adds 1 to e**x before it takes the logarithm, which leaves nothing of small ones."""
    if float(call.attrs.beta) != 1.0:
        return call.op.get_attr("FLegalize")(bb, call)

    def computed(x: te.Tensor) -> te.Tensor:
        return te.compute(x.shape, lambda *at: softplus(x(*at)), "softplus")

    return bb.call_te(computed, call.args[0], primfunc_name_hint="softplus")


def lower_generic(mod: IRModule, machine: Machine) -> IRModule:
    """Every operator beside the sites, which are call_tir of scheduled functions already, becomes vector code or a view.

    FoldConstant is left out: it would run float arithmetic on the machine that builds.
    """
    from .exact import ExactRounding

    lowering = tvm.transform.Sequential(
        [
            KeepScheduledApart(),
            relax.backend.DispatchSortScan(),
            relax.transform.LegalizeOps({"relax.nn.softplus": _softplus}),
            relax.transform.AnnotateTIROpPattern(),
            KeepCircularApart(),
            relax.transform.FuseOps(),
            relax.transform.FuseTIR(),
            InlineProducers(),
            relax.transform.RewriteDataflowReshape(),
            relax.transform.DeadCodeElimination(),
            ExactRounding(),
            ScheduleGeneric(machine),
        ]
    )
    with tvm.target.Target({"kind": "llvm"}):  # DispatchSortScan asks for its kind
        return lowering(mod)
