"""What each kernel of a lowered module has to do at least."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import tvm
from tvm import relax
from tvm.relax import Call

from ..graph.rewrite import array_of, op_name
from ..values import ITEM_BYTES, Cost
from .concat import WRITTEN_ATTR


def launches(mod: tvm.IRModule) -> Iterator[Call]:
    """The kernel calls of one run of main, in order; reshapes are views and launch nothing."""
    (block,) = mod["main"].body.blocks
    return (b.value for b in block.bindings if op_name(b.value) in ("call_tir", "call_tir_inplace"))


def costs(mod: tvm.IRModule, anchors: Mapping[str, tuple[int, int]]) -> list[tuple[str, Cost]]:
    """(kernel's name, its cost) for every launch of main.

    anchors  (flop, passes over the constants) of the kernels that compute one; any other is bound by the memory that it touches, of a
             concatenation the columns that it writes.
    """
    found = []
    for call in launches(mod):
        name, written = call.args[0].name_hint, (mod[call.args[0]].attrs or {}).get(WRITTEN_ATTR)
        found.append((name, _cost(call, *anchors.get(name, (0, 1)), written=None if written is None else int(written))))
    return found


def _cost(call: Call, flop: int, passes: int, written: int | None) -> Cost:
    arguments = list(call.args[1].fields)
    results = [call.ty] if op_name(call) == "call_tir" else []  # an in-place call's results are among its arguments
    if written is not None:  # of the whole that it writes into, its result or its last argument
        arguments, results = arguments if results else arguments[:-1], []
    constants = sum(_bytes(x.ty) for x in arguments if array_of(x) is not None)
    moved = sum(_bytes(x.ty) for x in arguments) + sum(_bytes(ty) for result in results for ty in getattr(result, "fields", [result]))
    moved += written or 0
    return Cost(flop, moved - constants, constants, passes)


def _bytes(ty: relax.TensorType) -> int:
    return math.prod(int(extent) for extent in ty.shape.values) * ITEM_BYTES.get(str(ty.dtype), 4)
