"""ComputeHalfInSingle: float16 is a storage type; arithmetic on it is done in float32 and rounded once per operation.

Rewrite  y: float16 = op(a, b)  ->  y = astype(op(astype(a, "float32"), astype(b, "float32")), "float16")
Movement of elements stays in float16, and so does what needs no arithmetic: a conversion. Constants are widened now, exactly.
"""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.ir import Call
from tvm.relax import Expr, TupleGetItem

from .constants import MOVEMENT
from .rewrite import Rewriter, array_of, as_pass, constant, op_name, with_attrs

NARROW, WIDE = "float16", "float32"
IN_STORAGE = (*MOVEMENT, "astype", "split", "tile", "repeat", "stack", "gather_elements", "gather_nd", "scatter_elements", "scatter_nd")


@as_pass
class ComputeHalfInSingle(Rewriter):
    """Widen the operands and narrow the results of every float16 operation; float32 and float64 stay as they are."""

    def rewrite(self, value: Expr) -> Expr:
        name = op_name(value)
        if not name or name in IN_STORAGE or name.startswith("call_") or not any(_is_half(arg) for arg in value.args):
            return value
        args = [self._widened(arg) for arg in value.args]
        return self._narrowed(self._builder.normalize(_with_wide_result(value, args)), value.ty)

    def _widened(self, value: Expr) -> Expr:
        if not _is_half(value):
            return value
        if isinstance(value, relax.Tuple):
            return relax.Tuple([self._widened(field) for field in value.fields])
        elements = array_of(value)
        return self.emit(relax.op.astype(value, WIDE)) if elements is None else constant(elements, WIDE)

    def _narrowed(self, value: Expr, ty: tvm.ir.Type) -> Expr:
        """Round what is float16 in `ty`; an output of another type, such as a comparison's, is passed on."""
        if isinstance(ty, relax.TupleType):
            whole = self.emit(value, self.name)
            fields = [self.emit(TupleGetItem(whole, index)) for index in range(len(ty.fields))]
            return relax.Tuple([self.emit(self._narrowed(field, kind)) for field, kind in zip(fields, ty.fields, strict=True)])
        if ty.dtype != NARROW or value.ty.dtype == NARROW:
            return value
        return relax.op.astype(self.emit(value, self.name), NARROW)


def _is_half(value: Expr) -> bool:
    if isinstance(value, relax.Tuple):
        return any(_is_half(field) for field in value.fields)
    return isinstance(value.ty, relax.TensorType) and value.ty.dtype == NARROW


def _with_wide_result(call: Call, args: list[Expr]) -> Call:
    """`call` on wide operands; an operator that names its result's type names the wide one."""
    if str(getattr(call.attrs, "out_dtype", None)) == NARROW:
        return with_attrs(call, args, out_dtype=WIDE)
    return Call(call.op, args, call.attrs, call.ty_args)
