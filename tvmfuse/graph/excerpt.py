"""The part of a module that a person wants to see: the bindings around one site, as Relax script."""

from __future__ import annotations

import re
from collections.abc import Collection

from tvm import relax
from tvm.ir import GenericConst
from tvm.relax import Expr, Function, Var

from .region import Flow
from .rewrite import is_static, shape_of


def excerpt(func: Function, names: Collection[str]) -> str:
    """The bindings called `names` and those that lie between them, one a line, in program order.

    Passes keep the names of what they move, so that the same names show the same place before and after them.
    """
    (block,) = func.body.blocks
    flow = Flow.of(block)
    below: set[Var] = set()
    above: set[Var] = set()
    for var in flow.values:  # what the named ones lead to
        if var.name in names or var in below:
            below.update((var, *flow.users.get(var, ())))
    for var in reversed(list(flow.values)):  # what leads to the named ones
        if var.name in names or above.intersection(flow.users.get(var, ())):
            above.add(var)
    return "\n".join(_line(var, value) for var, value in flow.values.items() if var in below and var in above)


def _line(var: Var, value: Expr) -> str:
    """TVM's text, with the model's names in place of the identifiers made of them, and constants by their shape."""
    text = str(value).partition("\n")[0]
    for read in relax.analysis.free_vars(value):
        identifier = re.sub(r"\W", "_", read.name)
        text = re.sub(rf"\b{identifier}\b", lambda _, name=read.name: name, text)  # type: ignore[misc]
    for constant in (arg for arg in getattr(value, "args", ()) if isinstance(arg, GenericConst)):
        text = re.sub(r'metadata\["ir\.GenericConst"\]\[\d+\]', f"const{tuple(shape_of(constant))}", text, count=1)
    shape = tuple(shape_of(var)) if is_static(var) else var.ty
    return f"{var.name}: {shape} = {text}"
