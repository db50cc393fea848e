"""ExactRounding: kernels that TVM legalises, with the arithmetic of ours, so that their bits don't depend on the CPU either.

Rewrite  a * b + c, a - b, a / b, ...    ->  rounding's: LLVM can't contract them, TVM's simplifier can't fold them
         exp, log, tanh, erf, sin, ...    ->  our polynomials: libm differs between platforms and takes one lane at a time
         pow, sqrt, isnan                ->  ours
         max(a, b), min(a, b)            ->  those that keep a NaN of either side; TVM's keeps it on one
         a and b, a or b, not b          ->  int8(b) != 0 for what is loaded: TVM's vectors of it have eight bits, those of comparisons one
         a < b, a == b, a != b, ...      ->  decided through an integer: TVM takes `not a < b` for `b <= a`
To be run before scheduling: expressions are scalar then, and vectorise as the rest does. What TVM has folded while it built
an expression, such as `not a < b` inside one te.compute, is folded for good.
"""

from __future__ import annotations

from collections.abc import Callable

import tvm
import tvm_ffi
from tvm import IRModule, tirx
from tvm.ir import Call, Expr, Op, TensorLoad

from . import math, rounding
from .trigonometry import acos, acosh, asin, asinh, atan, cos, sin, tan

OPERATORS: dict[type, Callable[[Expr, Expr], Expr]] = {
    tirx.Add: rounding.add,
    tirx.Sub: rounding.sub,
    tirx.Mul: rounding.mul,
    tirx.Div: rounding.div,
    tirx.Max: rounding.maximum,
    tirx.Min: rounding.minimum,
    tirx.LT: lambda a, b: rounding.decided(tirx.LT(a, b)),
    tirx.LE: lambda a, b: rounding.decided(tirx.LE(a, b)),
    tirx.GT: lambda a, b: rounding.decided(tirx.GT(a, b)),
    tirx.GE: lambda a, b: rounding.decided(tirx.GE(a, b)),
    tirx.EQ: lambda a, b: rounding.decided(rounding.equal(a, b)),
    tirx.NE: lambda a, b: tirx.Not(rounding.decided(rounding.equal(a, b))),
}
FUNCTIONS: dict[str, Callable[..., Expr]] = {
    "tirx.exp": math.exp,
    "tirx.log": math.log,
    "tirx.sigmoid": math.sigmoid,
    "tirx.tanh": math.tanh,
    "tirx.erf": math.erf,
    "tirx.atanh": math.atanh,
    **{f"tirx.{f.__name__}": f for f in (sin, cos, tan, asin, acos, atan, asinh, acosh)},
    "tirx.pow": math.pow,
    "tirx.sqrt": rounding.sqrt,
    "tirx.isnan": rounding.is_nan,
}


@tvm.transform.module_pass(opt_level=0, name="ExactRounding")
class ExactRounding:
    """Every PrimFunc that no schedule of ours has made, in arithmetic that rounds where it is written."""

    def transform_module(self, mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        changed = {
            var: rewritten(func)
            for var, func in mod.functions.items()
            if isinstance(func, tirx.PrimFunc) and "tirx.is_scheduled" not in (func.attrs or {})
        }
        mod = mod.clone()
        for var, func in changed.items():
            mod.update_func(var, func)
        return mod


def rewritten(func: tirx.PrimFunc) -> tirx.PrimFunc:
    body = tvm_ffi.structural_map(func.body, ((tuple(OPERATORS), _operator), (Call, _call), ((tirx.And, tirx.Or, tirx.Not), _logical)))
    return func if body.same_as(func.body) else func.with_body(body)


def _operator(node: Expr) -> Expr:
    return OPERATORS[type(node)](node.a, node.b) if _is_single_or_double(node.a) else node


def _call(node: Call) -> Expr:
    function = FUNCTIONS.get(node.op.name) if isinstance(node.op, Op) else None
    return function(*node.args) if function and _is_single_or_double(node.args[0]) else node


def _logical(node: tirx.And | tirx.Or | tirx.Not) -> Expr:
    operands = [node.a] if isinstance(node, tirx.Not) else [node.a, node.b]
    return type(node)(*map(_bit, operands)) if any(isinstance(x, TensorLoad) for x in operands) else node


def _bit(x: Expr) -> Expr:
    return rounding.decided(tirx.NE(tirx.Cast("int8", x), tirx.const(0, "int8"))) if isinstance(x, TensorLoad) else x


def _is_single_or_double(value: Expr) -> bool:
    return str(value.ty.dtype) in ("float32", "float64")
