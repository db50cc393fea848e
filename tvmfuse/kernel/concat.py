"""Concatenations that their producers write in place: each its own columns of every row of the whole.

    a = call_tir(f, x); b = call_tir(g, y); c = concat((a, b), axis=-1)
    ->  part = call_tir(f', x); c = call_tir_inplace(g', (y, part), [1])

f' and g' store to where their elements are in c and leave the others alone, so that nothing is copied.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import relax, tirx
from tvm.ir import Call, Expr
from tvm.relax import Function, Var

from ..graph.region import Flow, is_output
from ..graph.rewrite import dtype_of, is_static, op_name, shape_of
from ..values import ITEM_BYTES

WRITTEN_ATTR = "tvmfuse.written"  # bytes that a kernel writes of its last parameter, where that isn't all of it


@dataclass(frozen=True)
class Columns:
    """What one part is of a concatenation along the innermost axis.

    whole  the concatenation's variable; shape, dtype: its own. first: the part's first column; width: how many it has.
    """

    whole: Var
    shape: tuple[int, ...]
    dtype: str
    first: int
    width: int


def concatenations(main: Function) -> Iterator[dict[Var, Columns]]:
    """For each concatenation along the innermost axis, of variables that it alone reads: what each of them is of it."""
    for block in main.body.blocks:
        flow = Flow.of(block)
        for whole, call in flow.values.items():
            if op_name(call) != "concat" or not is_static(call) or call.attrs.axis is None:
                continue
            if is_output(whole) or not all(isinstance(flow.values[user], Call) for user in flow.users.get(whole, ())):
                continue  # it is returned: written to the caller's buffer by one kernel
            shape, parts = shape_of(call), list(call.args[0].fields) if isinstance(call.args[0], relax.Tuple) else []
            if int(call.attrs.axis) % len(shape) != len(shape) - 1:
                continue
            read_here = all(isinstance(part, Var) and part in flow.values and flow.readers(part) == 1 for part in parts)
            if parts and read_here and len(set(parts)) == len(parts):
                widths = [shape_of(part)[-1] for part in parts]
                firsts = [sum(widths[:position]) for position in range(len(parts))]
                yield {
                    part: Columns(whole, shape, dtype_of(whole), first, width)
                    for part, first, width in zip(parts, firsts, widths, strict=True)
                }


def writing(func: tirx.PrimFunc, columns: Columns) -> tirx.PrimFunc:
    """A kernel that stores its last parameter, of rows of `columns.width` elements, to its columns of the whole.

    The width has to be the extent of its result's innermost axis and more than 1, and every outer axis to be addressed by a product with
    its stride, as `store_tile` does: so a term of the offset is a row if it is a multiple of the width, and else a column.
    """
    old, size = func.params[-1], math.prod(columns.shape)
    new = tirx.decl_buffer(columns.shape, columns.dtype, name=old.name, data_alignment=old.ty.data_alignment)
    view = view_of(func, old)
    whole = tirx.decl_buffer((size,), columns.dtype, name=view.name, data_alignment=view.ty.data_alignment)

    def moved(index: Expr) -> Expr:
        if isinstance(index, tirx.Ramp):
            return tirx.Ramp(moved(index.base), index.stride, index.lanes)
        rows, column = split_rows(index, columns.width)
        return rows * columns.shape[-1] + column + columns.first

    def store(node: tirx.BufferStore) -> tirx.BufferStore:
        return tirx.BufferStore(node.buffer, node.value, [moved(node.indices[0])]) if node.buffer.same_as(view) else node

    def masked(call: Call) -> Call:
        if op_name(call) != "tirx.masked_store" or not call.args[0].same_as(view):
            return call
        buffer, value, index, mask = call.args
        return Call(call.op, [buffer, value, moved(index), mask], call.attrs, call.ty_args)

    body = tvm_ffi.structural_map(func.body, ((tirx.BufferStore, store), (Call, masked)))
    replaced = {old: new, view: whole}
    body = tvm_ffi.structural_map(body, (Var, lambda var: replaced.get(var, var)))
    written = size // columns.shape[-1] * columns.width * ITEM_BYTES.get(columns.dtype, 4)
    return tirx.PrimFunc([*func.params[:-1], new], body, func.ret_type, attrs=func.attrs).with_attr(WRITTEN_ATTR, written)


def view_of(func: tirx.PrimFunc, param: Var) -> Var:
    """The linear view through which a kernel of ours addresses one of its parameters."""
    views: list[Var] = []

    def declared(declaration: tirx.DeclBuffer) -> None:
        if isinstance(declaration.data, Call) and declaration.data.args[0].same_as(param):
            views.append(declaration.buffer)

    tvm_ffi.structural_walk(func.body, ((tirx.DeclBuffer,), declared))
    (view,) = views
    return view


def split_rows(offset: Expr, width: int) -> tuple[Any, Any]:
    """(row, column) of a linear offset, a sum of products, in rows of `width`."""
    match offset:
        case tirx.IntImm():
            return divmod(int(offset.value), width)
        case tirx.Add():
            (row, column), (more_rows, more_columns) = split_rows(offset.a, width), split_rows(offset.b, width)
            return row + more_rows, column + more_columns
        case tirx.Mul(b=tirx.IntImm()) if int(offset.b.value) % width == 0:
            return offset.a * (int(offset.b.value) // width), 0
    return 0, offset
