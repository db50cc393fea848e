"""One walk over a dataflow block, in which a pass replaces one binding's value at a time.

A forward walk lets a rule look *up*, at the already rewritten producers of its operands, so that chains collapse in one
linear pass without a fixpoint.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.ir import Call, GenericConst
from tvm.ir.transform import Pass, PassContext
from tvm.relax import Expr, ShapeExpr, TupleGetItem, Var

Leaf = Var | GenericConst | ShapeExpr


def op_name(value: Expr | None) -> str:
    """`"nn.conv2d"` for a call of `relax.nn.conv2d`, `""` for what isn't a call of an operator."""
    return value.op.name.removeprefix("relax.") if isinstance(value, Call) and isinstance(value.op, tvm.ir.Op) else ""


def shape_of(value: Expr) -> tuple[int, ...]:
    """The extents of a tensor for which `is_static` holds."""
    return tuple(int(extent) for extent in value.ty.shape.values)


def is_static(value: Expr) -> bool:
    """Whether `value` is a tensor of known extents and element type."""
    ty = value.ty
    return (
        isinstance(ty, relax.TensorType)
        and ty.dtype is not None
        and isinstance(ty.shape, ShapeExpr)
        and all(isinstance(extent, tirx.IntImm) for extent in ty.shape.values)
    )


def dtype_of(value: Expr) -> str:
    return str(value.ty.dtype)


def is_float(value: Expr) -> bool:
    return is_static(value) and dtype_of(value) in ("float16", "float32", "float64")


def numpy_has(dtype: str) -> bool:
    """Types that further packages add to NumPy, such as bfloat16, don't travel through DLPack."""
    return dtype in np.sctypeDict and np.dtype(dtype).isbuiltin == 1


def array_of(value: Expr) -> Any:
    """The elements of a constant as NumPy sees them in place; None when `value` is no constant or of a type that NumPy doesn't have."""
    if not isinstance(value, GenericConst) or not is_static(value) or not numpy_has(dtype_of(value)):
        return None
    return np.from_dlpack(value.value)


def constant(array: np.ndarray, dtype: str | None = None) -> GenericConst:
    """A constant that holds `array`, rounded to `dtype`; what is beyond its range becomes an infinity."""
    dtype = dtype or str(array.dtype)
    with np.errstate(over="ignore"):
        return relax.const(tvm.runtime.tensor(np.ascontiguousarray(array, dtype).reshape(array.shape)))


def with_attrs(call: Call, args: Sequence[Expr], **changes: Any) -> Call:
    """`call` on other arguments and with some of its attributes changed."""
    info = type(call.attrs).__tvm_ffi_type_info__
    fields = {field.name: getattr(call.attrs, field.name) for field in info.fields}
    return Call(call.op, args, tvm.ir.make_node(info.type_key, **(fields | changes)), call.ty_args)


def moves_nothing(shape: Sequence[int], axes: Sequence[int]) -> bool:
    """Whether permuting a tensor of `shape` by `axes` leaves every element where it is: only unit axes move."""
    moved = [axis for axis in axes if shape[axis] != 1]
    return math.prod(shape) == 0 or moved == sorted(moved)


def reshape(value: Expr, shape: Sequence[int]) -> Expr:
    """`value` itself where it has this shape already; constants are reshaped at once."""
    if shape_of(value) == tuple(shape):
        return value
    array = array_of(value)
    return relax.op.reshape(value, tuple(shape)) if array is None else constant(array.reshape(tuple(shape)))


def permute(value: Expr, axes: Sequence[int]) -> Expr:
    """`value` itself where `axes` is the identity; constants are permuted at once."""
    if list(axes) == list(range(len(axes))):
        return value
    array = array_of(value)
    return relax.op.permute_dims(value, list(axes)) if array is None else constant(array.transpose(axes))


class Rewriter:
    """Base of a pass over functions that are one dataflow block; other functions are left alone.

    A subclass's `rewrite` gets each binding's value with its operands already replaced, and returns the value to bind
    instead. A variable or constant as result makes the binding vanish. `skipped` are function attributes that mark what no
    pass may look into.
    """

    skipped: ClassVar[tuple[str, ...]] = ("Primitive", "Composite", "Codegen")

    def __init__(self, mod: tvm.IRModule | None = None) -> None:
        self.mod = mod or tvm.IRModule()
        self.name = ""  # of the binding that is being rewritten
        self.reader: Expr | None = None  # the one value that reads it, not rewritten yet; None if there are several
        self.var: Var | None = None  # its variable in the old block
        self.replaced: dict[Var, Expr] = {}  # old variable -> what stands for it in the new block
        self._builder = relax.BlockBuilder(self.mod)
        self._users: Counter[Var] = Counter()

    def rewrite(self, value: Expr) -> Expr:
        raise NotImplementedError

    def returned(self, value: Expr) -> Expr:
        """What a graph output is bound to; a pass that puts off binding overrides it."""
        return value

    def emit(self, value: Expr, name: str = "") -> Expr:
        """Bind `value`, and before it the calls nested in it."""
        return value if isinstance(value, Leaf) else self._builder.emit(value, name)

    def producer(self, value: Expr) -> Any:
        """What a variable of the new block is bound to; None for a parameter or a constant."""
        return self._builder.lookup_binding(value) if isinstance(value, Var) else None

    def single_user(self, value: Expr) -> bool:
        """Whether one binding reads `value`, once or several times, and the graph doesn't return it."""
        return isinstance(value, Var) and self._users[value] == 1

    def run(self, func: relax.Function) -> relax.Function:
        if any(attr in func.attrs for attr in self.skipped) or not isinstance(func.body, relax.SeqExpr):
            return func
        if len(func.body.blocks) != 1 or not isinstance(func.body.blocks[0], relax.DataflowBlock):
            return func
        bindings = func.body.blocks[0].bindings
        readers: defaultdict[Var, list[Expr]] = defaultdict(list)
        for value in [*(binding.value for binding in bindings), func.body.body]:
            for var in relax.analysis.free_vars(value):
                readers[var].append(value)
        self._users.update({param: len(readers[param]) for param in func.params})

        self._builder.begin_scope(list(func.params))
        self._builder._begin_dataflow_block()
        for binding in bindings:
            users = readers[binding.var]
            self.var, self.name = binding.var, binding.var.name
            self.reader = users[0] if len(users) == 1 else None
            old = self._builder.normalize(substitute(binding.value, self.replaced))
            if isinstance(binding, relax.MatchCast):
                new = self._builder.match_cast(self.returned(old), binding.ty)
            else:
                new = self.rewrite(old)
            if not isinstance(binding.var, relax.DataflowVar):
                new = self._builder.emit_output(self.returned(new), self.name)
            new = self.emit(new, self.name)
            if isinstance(new, Var):
                passed_on = new in relax.analysis.free_vars(old)
                self._users[new] += len(users) - passed_on
            self.replaced[binding.var] = new
        block = self._builder._end_block()
        body = self._builder.normalize(relax.SeqExpr([block], substitute(func.body.body, self.replaced)))
        self._builder.end_scope()
        return relax.analysis.remove_all_unused(relax.Function(func.params, body, func.ret_ty, func.is_pure, func.attrs))


def as_pass(rewriter: type[Rewriter]) -> Callable[[], Pass]:
    """Make a Rewriter an ordinary Relax pass: `Name()` builds it. Each function is walked by a fresh rewriter."""

    def transform(func: relax.Function, mod: tvm.IRModule, _ctx: PassContext) -> relax.Function:
        return rewriter(mod).run(func)

    def build() -> Pass:
        return relax.transform.function_pass(transform, opt_level=0, name=rewriter.__name__)

    build.__name__ = build.__qualname__ = rewriter.__name__
    build.__doc__, build.__module__ = rewriter.__doc__, rewriter.__module__
    return build


def substitute(value: Expr, replaced: dict[Var, Expr]) -> Expr:
    """`value` with its variables replaced; the same object when none was."""
    if isinstance(value, Var):
        return replaced.get(value, value)
    if isinstance(value, relax.Tuple):
        fields = [substitute(field, replaced) for field in value.fields]
        return value if _same(fields, value.fields) else relax.Tuple(fields)
    if isinstance(value, TupleGetItem):
        whole = substitute(value.tuple_value, replaced)
        return value if whole.same_as(value.tuple_value) else TupleGetItem(whole, value.index)
    if isinstance(value, Call):
        args = [substitute(arg, replaced) for arg in value.args]
        return value if _same(args, value.args) else Call(value.op, args, value.attrs, value.ty_args)
    return value


def _same(new: Sequence[Expr], old: Sequence[Expr]) -> bool:
    return all(a.same_as(b) for a, b in zip(new, old, strict=True))
