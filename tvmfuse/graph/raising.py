"""RaiseTensorIR: the ONNX importer's TensorIR for Clip, Pad and Einsum becomes Relax operators again.

The importer emits those operators as `call_tir` of a fresh PrimFunc, which no Relax pass can see through. A function is
recognised by the one element that it computes, never by its name.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tvm_ffi
from tvm import relax, tirx, topi
from tvm.ir import Call, TensorLoad
from tvm.relax import Expr
from tvm.relax.utils import gen_call_tir_inputs
from tvm.s_tir.stmt import SBlockRealize

from .rewrite import Rewriter, as_pass, constant, is_static, op_name, shape_of


@dataclass(frozen=True)
class Element:
    """output[axes[:rank]] = value; a value that reads the output sums over axes[rank:]."""

    output: tirx.Var
    inputs: tuple[tirx.Var, ...]
    rank: int
    axes: tuple[tirx.Var, ...]
    value: Expr


@as_pass
class RaiseTensorIR(Rewriter):
    """call_tir(max(x, c))  ->  maximum(x, c);  likewise minimum, nn.pad with a constant, einsum of sums of products.

    A function that computes anything else keeps its call_tir.
    """

    def rewrite(self, value: Expr) -> Expr:
        if op_name(value) != "call_tir" or not isinstance(value.args[1], relax.Tuple) or not is_static(value):
            return value
        func, operands = self.mod[value.args[0]], list(value.args[1].fields)
        element = _element(func, len(operands))
        if element is None or not all(is_static(operand) for operand in operands):
            return value
        for raised in (_extremum(element, operands), _einsum(element, operands), _pad(func, element, operands, shape_of(value))):
            if raised is not None:
                return raised
        return value


def _element(func: tirx.PrimFunc, inputs: int) -> Element | None:
    """What a function with one loop nest over its one output stores."""
    if not isinstance(func, tirx.PrimFunc) or len(func.params) != inputs + 1:
        return None
    nest = func.body.block.body if isinstance(func.body, SBlockRealize) else func.body
    while isinstance(nest, tirx.For):
        nest = nest.body
    if not isinstance(nest, SBlockRealize) or not isinstance(nest.block.body, tirx.BufferStore):
        return None
    store, axes = nest.block.body, tuple(axis.var for axis in nest.block.iter_vars)
    rank, (*sources, output) = len(store.indices), func.params
    if not store.buffer.same_as(output) or not _follows(store.indices, axes[:rank]):
        return None
    return Element(output, tuple(sources), rank, axes, store.value)


def _follows(indices: Sequence[Expr], axes: Sequence[Expr]) -> bool:
    return len(indices) == len(axes) and all(index.same_as(axis) for index, axis in zip(indices, axes, strict=True))


def _extremum(element: Element, operands: list[Expr]) -> Expr | None:
    """max(x[i, j], c) with c a literal or another operand that broadcasts."""
    op = {tirx.Max: relax.op.maximum, tirx.Min: relax.op.minimum}.get(type(element.value))
    if op is None:
        return None
    sides = [_broadcast_operand(side, element, operands) for side in (element.value.a, element.value.b)]
    return None if None in sides else op(*sides)


def _broadcast_operand(value: Expr, element: Element, operands: list[Expr]) -> Expr | None:
    if isinstance(value, tirx.FloatImm | tirx.IntImm):
        return constant(np.array(value.value, str(value.ty.dtype)))
    if not isinstance(value, TensorLoad):
        return None
    number = next((i for i, tensor in enumerate(element.inputs) if tensor.same_as(value.source)), None)
    if number is None or len(value.indices) > len(element.axes):
        return None
    axes = element.axes[len(element.axes) - len(value.indices) :]
    aligned = all(
        index.same_as(axis) or (extent == 1 and isinstance(index, tirx.IntImm))
        for index, axis, extent in zip(value.indices, axes, shape_of(operands[number]), strict=True)
    )
    return operands[number] if aligned else None


def _einsum(element: Element, operands: list[Expr]) -> Expr | None:
    """C[i, j] = C[i, j] + A[i, k] * B[k, j]  or, with nothing to sum over, A[i] * B[j]."""
    value = element.value
    if len(element.axes) > element.rank:
        if not isinstance(value, tirx.Add) or not _reads(value.a, element.output):
            return None
        value = value.b
    letters = dict(zip(element.axes, string.ascii_letters, strict=False))
    factors = _factors(value)
    if len(factors) != len(operands) or len(element.axes) > len(letters):
        return None
    subscripts = []
    for factor, tensor in zip(factors, element.inputs, strict=True):
        if not _reads(factor, tensor) or any(index not in letters for index in factor.indices):
            return None
        subscripts.append("".join(letters[index] for index in factor.indices))
    out = "".join(letters[axis] for axis in element.axes[: element.rank])
    return relax.op.einsum(operands, f"{','.join(subscripts)}->{out}")


def _factors(value: Expr) -> list[Expr]:
    return [*_factors(value.a), value.b] if isinstance(value, tirx.Mul) else [value]


def _reads(value: Expr, tensor: tirx.Var) -> bool:
    return isinstance(value, TensorLoad) and value.source.same_as(tensor)


def _pad(func: tirx.PrimFunc, element: Element, operands: list[Expr], padded: tuple[int, ...]) -> Expr | None:
    """if_then_else(inside, x[i - before], c): the widths are read off, and emitting that padding again must give this very function."""
    value = element.value
    if len(operands) != 1 or not isinstance(value, Call) or op_name(value) != "prim.if_then_else":
        return None
    _, inside, outside = value.args
    if not _reads(inside, element.inputs[0]) or not isinstance(outside, tirx.FloatImm | tirx.IntImm):
        return None
    extents = shape_of(operands[0])
    before = [_offset(axis, index) for axis, index in zip(element.axes, inside.indices, strict=True)]
    after = [wide - width - extent for wide, width, extent in zip(padded, before, extents, strict=True)]
    again, _, _ = gen_call_tir_inputs(topi.nn.pad, operands[0], before, after, outside.value)
    if not tvm_ffi.structural_equal(again.body, func.body, map_free_vars=True):
        return None
    widths = [width for pair in zip(before, after, strict=True) for width in pair]
    return relax.op.nn.pad(operands[0], widths, pad_value=float(outside.value))


def _offset(axis: tirx.Var, index: Expr) -> int:
    """How far `index` lags behind `axis`; 0 when it isn't axis - n at all."""
    sign = {tirx.Sub: 1, tirx.Add: -1}.get(type(index), 0)
    return sign * index.b.value if sign and index.a.same_as(axis) and isinstance(index.b, tirx.IntImm) else 0
