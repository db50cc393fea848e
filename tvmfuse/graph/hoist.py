"""Move epilogue ops above the layout ops that part them from their anchor.

    lv = matmul(x, w);  lv1 = reshape(lv, (1, 4, 2, 3));  lv2 = add(lv1, bias);  lv3 = relu(lv2)
    -> lv = matmul(x, w);  lv2 = add(lv, bias');  lv3 = relu(lv2);  lv1 = reshape(lv3, (1, 4, 2, 3))

The result is the same to the bit: ops keep their order and their operands' order, and only data is moved. From each anchor a *path* leads
down: a region of epilogue ops, a layout op, a region, and so on. A region is straight-line or a small DAG (silu is x * sigmoid(x)) that
one value leaves; it is the largest one with that property. All regions of a path move to the anchor, all its layout ops below them.

Operands: a constant is moved in NumPy, and repeated where it spans a part of an axis of the anchor. A run-time operand is read through the
inverse of the layout ops, or from before them where it stands behind equal ones; it is refused where it would have to be repeated.

The anchor computed last takes an op that joins two anchors: the other's result is then an operand like any other.

Source: own; sinking layout ops is tract's "unmerge" rewrite in the other direction.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Call, GenericConst
from tvm.relax import DataflowBlock, DataflowVar, Expr, Function, Var
from tvm.relax.expr_functor import PyExprMutator, PyExprVisitor, mutator, visitor

from .axes import LayoutOp, Shape, Step, moved, pull_back, result_shape, simplified
from .region import Flow, is_output
from .rewrite import Rewriter, array_of, constant, dtype_of, is_static, op_name, shape_of

ANCHORS = frozenset({"matmul", "einsum", "nn.conv1d", "nn.conv2d", "nn.conv1d_transpose", "nn.conv2d_transpose"})
EPILOGUE_OPS = frozenset(
    "add subtract multiply divide minimum maximum power where less greater equal isnan astype clip abs negative exp log sqrt erf floor "
    "sigmoid tanh nn.relu nn.leakyrelu nn.prelu nn.selu nn.silu nn.gelu nn.gelu_tanh nn.softplus".split()
)
LAYOUT_OPS = frozenset({"reshape", "squeeze", "expand_dims", "flatten", "nn.batch_flatten", "permute_dims", "layout_transform"})
CROSSED_ATTR = "tvmfuse.crossed"

Rule = Literal[
    "second user",  # the intermediate is read outside of the region too
    "graph output",
    "broadcasts up",
    "depends on the anchor",
    "unknown shape",
    "empty tensor",
    "not an epilogue op",
    "not a layout op",
    "part of an axis",  # a run-time operand would have to be repeated along the anchor's axis
]


@dataclass(frozen=True)
class Refusal:
    """Why one op stays below a layout op, or outside of the loop of the anchor that it follows. `hint` is for a person.

    op        name of its variable, which is the ONNX node's; blocking: what it stays below.
    culprit   the variable that the rule is about, such as the second reader; anchor: where the path starts that ends here.
    """

    op: str
    blocking: str
    rule: Rule
    hint: str
    culprit: str = field(default="", compare=False)
    anchor: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.op} stays below {self.blocking}: {self.hint}"


@dataclass(frozen=True, eq=False)
class Crossing:
    """A layout op with static shapes, as a chain of `LayoutOp`s."""

    var: Var
    call: Call
    before: Shape
    ops: tuple[LayoutOp, ...]

    @property
    def source(self) -> Expr:
        return self.call.args[0]

    def __str__(self) -> str:
        name = op_name(self.call)
        if name == "permute_dims":
            return f"{name} {_text(self.ops[0][1])}"
        return f"{name} {_text(self.before)}->{_text(result_shape(self.before, self.ops))}"


Chain = tuple[Crossing, ...]


@tvm.relax.transform.function_pass(opt_level=0, name="HoistEpilogue")
class HoistEpilogue:
    """Move epilogue ops above layout ops, up to their anchor, as an ordinary Relax pass to be run before LegalizeOps.

    The function attribute `tvmfuse.crossed` maps the name of each hoisted op's variable to the layout ops it moved across, in the model's
    order, such as ["reshape (3136,64)->(1,56,56,64)", "permute_dims (0,3,1,2)"].
    """

    def transform_function(self, func: Function, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> Function:
        if _is_opaque(func):
            return func
        hoist = _Hoist(mod, func)
        hoisted = hoist.visit_expr(relax.analysis.remove_all_unused(func))  # what nobody reads must not count as a second user
        if not hoist.crossed:
            return func
        crossed = {name: list(chain) for name, chain in func.attrs.get(CROSSED_ATTR, {}).items()} | hoist.crossed
        return relax.analysis.remove_all_unused(hoisted).with_attr(CROSSED_ATTR, crossed)


def refusals(mod: tvm.IRModule) -> list[Refusal]:
    """Every op that can't be moved above a layout op that follows an anchor, in the model's order. Nothing is rewritten."""
    found: list[Refusal] = []
    for func in mod.functions.values():
        if isinstance(func, Function) and not _is_opaque(func):
            blocks = _Blocks()
            blocks.visit_expr(relax.analysis.remove_all_unused(func))
            found += [refusal for block in blocks.found for refusal in _Analysis(block).refusals()]
    return found


def why_not(mod: tvm.IRModule, op: str) -> str | None:
    """Why the op bound to the variable named `op` stays below a layout op; None if nothing keeps it there."""
    return "; ".join(dict.fromkeys(refusal.hint for refusal in refusals(mod) if refusal.op == op)) or None


@dataclass(frozen=True)
class _Problem:
    rule: Rule
    hint: str
    culprit: Var


class _Analysis:
    """Which ops of one dataflow block move, and across what.

    hoisted   epilogue op -> the layout ops it moves across.
    exits     the last op of each path, which the path's layout ops follow.
    crossed   the layout ops of all paths.
    """

    def __init__(self, block: DataflowBlock) -> None:
        self._flow = Flow.of(block)
        self.values, self._users, self._order = self._flow.values, self._flow.users, self._flow.order
        self.hoisted: dict[Var, Chain] = {}
        self.exits: set[Var] = set()
        self.crossed: dict[Var, Crossing] = {}
        self._claimed: set[Var] = set()
        self._refused: dict[Var, Refusal] = {}
        for var in reversed(list(self.values)):
            if op_name(self.values[var]) in ANCHORS:
                self._follow(var)

    def refusals(self) -> list[Refusal]:
        return [self._refused[var] for var in sorted(self._refused, key=self._order.__getitem__) if var not in self._claimed]

    def constant(self, value: Expr) -> np.ndarray | None:
        """The elements of a constant, also of one behind layout ops; None for what is only known at run time."""
        if isinstance(value, GenericConst):
            return array_of(value)
        crossing = crossing_of(value, self.values.get(value)) if isinstance(value, Var) else None
        source = self.constant(crossing.call.args[0]) if crossing else None
        return None if crossing is None or source is None else moved(source, crossing.ops)

    def _follow(self, anchor: Var) -> None:
        """Take the path that leads down from `anchor`, and say what stops it."""
        value, chain, path = anchor, Chain(), dict[Var, Chain]()
        while True:
            moving, held = self._grow(value, chain)
            path |= dict.fromkeys(moving, chain)
            value = moving[-1] if moving else value
            users = self._users[value]
            crossing = crossing_of(users[0], self.values[users[0]]) if len(users) == 1 and not is_output(value) else None
            if crossing is None:
                break
            value, chain = crossing.var, (*chain, crossing)
        self._claimed.update(path)
        self._refuse(anchor, value, chain, held)
        hoisted = {var: crossed for var, crossed in path.items() if crossed}
        if hoisted:
            exit_ = next(reversed(hoisted))
            self.hoisted |= hoisted
            self.exits.add(exit_)
            self.crossed |= {crossing.var: crossing for crossing in hoisted[exit_]}

    def _grow(self, entry: Var, chain: Chain) -> tuple[list[Var], list[Var]]:
        """The epilogue ops over `entry` that can move above `chain` as one region, and those that one value doesn't leave any more."""
        return self._flow.grow(entry, lambda var, region: var not in self._claimed and not self._problem(var, entry, chain, region))

    def _problem(self, var: Var, entry: Var, chain: Chain, region: set[Var]) -> _Problem | None:
        """Why `var` can't be computed on the anchor's side of `chain`; `region` holds what is already there."""
        value = self.values[var]
        if op_name(value) not in EPILOGUE_OPS:
            return _Problem("not an epilogue op", f"{_name(var, value)} is not an epilogue op", var)
        below, result = _static_shape(entry), _static_shape(var)
        if below is None or result is None:
            return _Problem("unknown shape", f"the shape of {_name(var, value)} is only known at run time", var)
        if result != below:
            return _Problem("broadcasts up", f"an operand broadcasts {_text(below)} up to {_text(result)}", var)
        above = chain[0].before if chain else below
        for position, operand in enumerate(value.args):
            if not _is_tensor(operand) or operand in region:
                continue
            shape = _operand_shape(value, position)
            if shape is None:
                return _Problem("unknown shape", f"the shape of its operand {_name(operand)} is only known at run time", operand)
            if pull_back(above, _ops(chain), shape).materialises and self.constant(operand) is None:
                spans = f"its run-time operand {_name(operand)} {_text(shape)} spans only a part of an axis of {_text(above)}"
                return _Problem("part of an axis", f"{spans}; a constant would be repeated along it", operand)
        return None

    def _refuse(self, anchor: Var, value: Var, chain: Chain, held: list[Var]) -> None:
        """Record why the readers of `value`, at which the path from `anchor` ends, stay where they are."""
        for user in self._users[value]:
            name = op_name(self.values[user])
            if name in LAYOUT_OPS:
                for op in self._epilogue_ops_below(user):
                    self._record(anchor, op, self._layout_name(user), self._why_not_crossed(value, user))
            elif name in EPILOGUE_OPS:
                dependence = self._why_dependent(value, user, held)
                problem = dependence or self._problem(user, value, chain, {value, *held}) or self._why_held(value, user, held)
                self._record(anchor, user, str(chain[-1]) if chain else value.name, problem)
            elif chain and name and name not in ANCHORS and name != "call_tir":  # a call of a recurrent network, itself an anchor
                self._record(anchor, user, str(chain[-1]), self._problem(user, value, chain, {value}))

    def _record(self, anchor: Var, op: Var, blocking: str, problem: _Problem | None) -> None:
        assert problem is not None, op
        self._refused.setdefault(op, Refusal(op.name, blocking, problem.rule, problem.hint, problem.culprit.name, anchor.name))

    def _why_not_crossed(self, value: Var, layout: Var) -> _Problem:
        if shared := self._why_shared(value, layout, []):
            return shared
        before = _static_shape(value)
        if before is None or _static_shape(layout) is None:
            return _Problem("unknown shape", f"the shape of {_name(layout, self.values[layout])} is only known at run time", layout)
        if 0 in before:
            return _Problem("empty tensor", f"`{value.name}` has no elements", value)
        return _Problem("not a layout op", f"{_name(layout, self.values[layout])} does more than to permute elements", layout)

    def _why_dependent(self, value: Var, user: Var, held: list[Var]) -> _Problem | None:
        for operand in relax.analysis.free_vars(self.values[user]):
            if operand not in (value, *held) and self._depends(operand, value):
                hint = f"its operand `{operand.name}` depends on the anchor's own result `{value.name}`"
                return _Problem("depends on the anchor", hint, operand)
        return None

    def _why_held(self, value: Var, user: Var, held: list[Var]) -> _Problem:
        """Why no single value leaves the region that `user` starts."""
        for read in (value, *held):
            if read != user and (shared := self._why_shared(read, user, held)):
                return shared
        return _Problem("second user", f"no single value leaves the ops that read `{value.name}`", user)

    def _why_shared(self, value: Var, user: Var, held: list[Var]) -> _Problem | None:
        if is_output(value):
            return _Problem("graph output", f"`{value.name}` is a graph output", value)
        for other in self._users[value]:
            if other not in (user, *held):
                reader = _name(other, self.values[other])
                # A layout op there is often ours: the model has no such node that could read something else
                if is_output(other) and op_name(self.values[other]) in LAYOUT_OPS:
                    return _Problem("graph output", f"`{value.name}` is a graph output, by {reader}", other)
                return _Problem("second user", f"`{value.name}` is also read by {reader}", other)
        return None

    def _depends(self, value: Var, on: Var) -> bool:
        seen, stack = set(), [value]
        while stack:
            var = stack.pop()
            if var == on:
                return True
            if var not in seen and self._order.get(var, -1) > self._order[on]:
                seen.add(var)
                stack.extend(relax.analysis.free_vars(self.values[var]))
        return False

    def _epilogue_ops_below(self, layout: Var) -> Iterator[Var]:
        for user in self._users[layout]:
            if op_name(self.values[user]) in LAYOUT_OPS:
                yield from self._epilogue_ops_below(user)
            elif op_name(self.values[user]) in EPILOGUE_OPS:
                yield user

    def _layout_name(self, layout: Var) -> str:
        return str(crossing_of(layout, self.values[layout]) or op_name(self.values[layout]))


@visitor
class _Blocks(PyExprVisitor):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[DataflowBlock] = []

    def visit_dataflow_block_(self, block: DataflowBlock) -> None:
        self.found.append(block)
        super().visit_dataflow_block_(block)


@mutator
class _Hoist(PyExprMutator):
    """Carries out each block's analysis. Epilogue ops and layout ops keep their names, wherever they stand.

    crossed   name of each hoisted op's variable -> what it crossed.
    """

    def __init__(self, mod: tvm.IRModule, func: Function) -> None:
        super().__init__(mod)
        self.crossed: dict[str, list[str]] = {}
        self._analysis = _Analysis(DataflowBlock([]))
        self._names = Counter(var.name for var in relax.analysis.all_vars(func))
        self._above: dict[Var, Expr] = {}  # a value below the layout ops of the path under way -> the same value above them
        self._moved: dict[tuple[Expr, Step], Expr] = {}  # what `_apply` has bound in this block

    def visit_dataflow_block_(self, block: DataflowBlock) -> relax.BindingBlock:
        outer = self._analysis, self._moved
        self._analysis, self._moved = _Analysis(block), {}
        block = super().visit_dataflow_block_(block)
        self._analysis, self._moved = outer
        return block

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        var, analysis = binding.var, self._analysis
        if var in analysis.crossed:
            source = analysis.crossed[var].source
            self._above[var] = self._above[source] if source in self._above else self.visit_expr(source)
        elif var in analysis.hoisted:
            self._raise(var, binding.value, analysis.hoisted[var])
        else:
            super().visit_var_binding_(binding)

    def _raise(self, var: Var, call: Call, chain: Chain) -> None:
        """Bind `call` above `chain` and, when it is its path's last op, the chain below it."""
        args = [self._operand(call, position, chain) if _is_tensor(arg) else arg for position, arg in enumerate(call.args)]
        if op_name(call) == "nn.prelu":
            value = self._prelu(var, *args)
        else:
            value = Call(call.op, args, call.attrs, call.ty_args)
        above = self._bind(self._kept(var), value)
        self.crossed[above.name] = [str(crossing) for crossing in chain]
        if var not in self._analysis.exits:
            self._above[var] = above
            return
        for crossing in chain:
            lowered = Call(crossing.call.op, [above, *crossing.call.args[1:]], crossing.call.attrs, crossing.call.ty_args)
            above = self._bind(self._kept(crossing.var), lowered, type(var) if crossing is chain[-1] else DataflowVar)
        self.set_var_remap(var, above)

    def _operand(self, call: Call, position: int, chain: Chain) -> Expr:
        """What the op reads above the layout ops instead of `call.args[position]`."""
        operand = call.args[position]
        if operand in self._above:
            return self._above[operand]
        shape = _operand_shape(call, position)
        assert shape is not None, operand  # or the analysis would have refused
        relayout = pull_back(chain[0].before, _ops(chain), shape)
        steps = simplified(shape_of(operand), (("reshape", shape), *relayout.steps))
        array = self._analysis.constant(operand)
        if array is not None:
            unchanged = isinstance(operand, GenericConst) and not steps
            return operand if unchanged else constant(moved(array, steps), dtype_of(operand))
        below = value = self.visit_expr(operand)
        longer = steps
        while crossing := crossing_of(below, self.lookup_binding(below) if isinstance(below, Var) else None):
            below, longer = crossing.source, (*crossing.ops, *longer)
            shorter = simplified(crossing.before, longer)
            if len(shorter) < len(steps):
                value, steps = below, shorter
        return self._apply(value, steps, _hint(operand))

    def _apply(self, value: Expr, steps: tuple[Step, ...], name: str) -> Expr:
        for step in steps:
            if (value, step) not in self._moved:
                kind, argument = step
                op = relax.op.reshape if kind == "reshape" else relax.op.permute_dims
                self._moved[value, step] = self._bind(self._fresh(name), op(value, argument))
            value = self._moved[value, step]
        return value

    def _prelu(self, var: Var, data: Expr, slope: Expr) -> Expr:
        """prelu knows slopes along one axis; others take its definition, which TVM evaluates to the same bits."""
        rank, shape = len(shape_of(data)), shape_of(slope)
        spanned = [axis for axis, extent in enumerate(shape) if extent != 1]
        if rank and len(spanned) < 2:
            axis = rank - len(shape) + spanned[0] if spanned else rank - 1
            flat = (shape[spanned[0]] if spanned else 1,)
            array = array_of(slope)
            if array is not None:
                slope = constant(array.reshape(flat))
            elif shape != flat:
                slope = self._apply(slope, (("reshape", flat),), _hint(slope))
            return relax.op.nn.prelu(data, slope, axis)
        positive = self._bind(self._fresh(var.name), relax.op.greater(data, relax.const(0, dtype_of(data))))
        scaled = self._bind(self._fresh(var.name), relax.op.multiply(data, slope))
        return relax.op.where(positive, data, scaled)

    def _bind(self, name: str, value: Expr, kind: type[Var] = DataflowVar) -> Var:
        value = self.builder_.normalize(value)
        var = kind(name, value.ty)
        self.builder_.emit_normalized(relax.VarBinding(var, value))
        return var

    def _kept(self, var: Var) -> str:
        return var.name if self._names[var.name] == 1 else self._fresh(var.name)

    def _fresh(self, name: str) -> str:
        fresh = next(fresh for at in itertools.count(1) if (fresh := f"{name}_{at}") not in self._names)
        self._names[fresh] = 1
        return fresh


def crossing_of(var: Expr, value: Expr | None) -> Crossing | None:
    """The layout op that `var` is bound to; None for anything else, for shapes that aren't static and for empty tensors."""
    name = op_name(value)
    if not isinstance(value, Call) or name not in LAYOUT_OPS:
        return None
    before, after = _static_shape(value.args[0]), _static_shape(var)
    if before is None or after is None or 0 in before:
        return None
    ops: tuple[LayoutOp, ...] | None
    if name == "layout_transform":
        ops = _index_map_ops(value.attrs.index_map, before, after)
    elif name == "permute_dims":
        rank = len(before)
        axes = range(rank)[::-1] if value.attrs.axes is None else value.attrs.axes
        ops = (("permute", tuple(int(axis) % rank for axis in axes)),)
    else:
        ops = (("reshape", after),)
    return None if ops is None else Crossing(var, value, before, ops)


def _index_map_ops(index_map: tvm.tirx.IndexMap, before: Shape, after: Shape) -> tuple[LayoutOp, ...] | None:
    """A layout transform whose indices are digits of the source's, as a split of its axes and a permutation; None for any other."""
    digits = [digit for index in index_map.final_indices if (digit := _digit(index))]
    if len(digits) < len(after):
        return None
    split: list[tuple[int, int]] = []  # (axis of the result, extent) of each digit, slowest first
    for variable, extent in zip(index_map.initial_indices, before, strict=True):
        weights = [(weight, axis) for axis, (of, weight) in enumerate(digits) if of.same_as(variable)]
        for weight, axis in sorted(weights, reverse=True):
            split.append((axis, extent // weight))
            extent = weight
    stored = [axis for axis, _ in split]
    permutation = tuple(stored.index(axis) for axis in range(len(after)))
    ops: tuple[LayoutOp, ...] = ("reshape", tuple(extent for _, extent in split)), ("permute", permutation)
    return ops if result_shape(before, ops) == after else None  # unequal where it pads


def _digit(index: tvm.ir.Expr) -> tuple[Var, int] | None:
    """(variable, weight) where `index` is variable // weight, perhaps modulo something."""
    if isinstance(index, tvm.tirx.FloorMod) and isinstance(index.b, tvm.tirx.IntImm):
        return _digit(index.a)
    if isinstance(index, tvm.tirx.FloorDiv) and isinstance(index.b, tvm.tirx.IntImm):
        inner = _digit(index.a)
        return inner and (inner[0], inner[1] * int(index.b))
    return (index, 1) if isinstance(index, tvm.tirx.Var) else None


def _operand_shape(call: Call, position: int) -> Shape | None:
    """The shape as which an operand is broadcast against the op's result; prelu's slope lies along the axis that it names."""
    shape = _static_shape(call.args[position])
    if shape is None or op_name(call) != "nn.prelu" or position == 0:
        return shape
    rank = len(shape_of(call.args[0]))
    return shape + (1,) * (rank - 1 - int(call.attrs.axis) % rank)


def _is_opaque(func: Function) -> bool:
    return any(attr in func.attrs for attr in Rewriter.skipped)


def _static_shape(value: Expr) -> Shape | None:
    return shape_of(value) if is_static(value) else None


def _ops(chain: Chain) -> tuple[LayoutOp, ...]:
    return tuple(op for crossing in chain for op in crossing.ops)


def _is_tensor(value: Expr) -> bool:
    return isinstance(value.ty, relax.TensorType)


def _hint(value: Expr) -> str:
    return value.name if isinstance(value, Var) else "operand"


def _name(var: Expr, value: Expr | None = None) -> str:
    return f"{op_name(value)} `{_hint(var)}`".lstrip()


def _text(shape: Shape) -> str:
    return f"({','.join(map(str, shape))})"
