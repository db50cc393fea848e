"""ExactRounding: kernels that TVM legalises, with the arithmetic of ours, so that their bits don't depend on the CPU either.

Rewrite  a * b + c                       ->  fence(a * b) + c: LLVM can't contract it
         exp, log, sigmoid, tanh, erf    ->  our polynomials: libm differs between platforms and takes one lane at a time
         pow, sqrt                       ->  ours
         max(a, b), min(a, b)            ->  those that keep a NaN of either side; TVM's keeps it on one
To be run before scheduling: expressions are scalar then, and vectorise as the rest does.
"""

from __future__ import annotations

from collections.abc import Callable

import tvm
import tvm_ffi
from tvm import IRModule, tirx
from tvm.ir import Call, Expr, Op

from . import math, rounding

FUNCTIONS: dict[str, Callable[..., Expr]] = {
    "tirx.exp": math.exp,
    "tirx.log": math.log,
    "tirx.sigmoid": math.sigmoid,
    "tirx.tanh": math.tanh,
    "tirx.erf": math.erf,
    "tirx.pow": math.pow,
    "tirx.sqrt": rounding.sqrt,
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
    body = tvm_ffi.structural_map(
        func.body,
        (
            ((tirx.Add, tirx.Sub), _sum),
            ((tirx.Max, tirx.Min), _extremum),
            (Call, _call),
        ),
    )
    return func if body.same_as(func.body) else func.with_body(body)


def _sum(node: Expr) -> Expr:
    if not _is_single_or_double(node):
        return node
    a, b = (rounding.fence(side) if isinstance(side, tirx.Mul) else side for side in (node.a, node.b))
    return node if a.same_as(node.a) and b.same_as(node.b) else type(node)(a, b)


def _extremum(node: Expr) -> Expr:
    if not _is_single_or_double(node):
        return node
    return (rounding.maximum if isinstance(node, tirx.Max) else rounding.minimum)(node.a, node.b)


def _call(node: Call) -> Expr:
    function = FUNCTIONS.get(node.op.name) if isinstance(node.op, Op) else None
    return function(*node.args) if function and _is_single_or_double(node) else node


def _is_single_or_double(node: Expr) -> bool:
    return str(node.ty.dtype) in ("float32", "float64")
