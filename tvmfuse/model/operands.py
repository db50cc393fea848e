"""What a converter is given: an operator's operands, some absent or constant, and its attributes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tvm
from tvm import relax

Operands = Sequence[Any]  # relax.Expr, or None for an absent one
Attributes = Mapping[str, Any]
Converter = Callable[[relax.BlockBuilder, Operands, Attributes], relax.Expr]


def operand(operands: Operands, index: int) -> Any:
    return operands[index] if index < len(operands) else None


def constant(value: relax.Expr | None) -> Any:
    """The array of a constant; None for anything else."""
    return value.value.numpy() if isinstance(value, tvm.ir.GenericConst) else None


def extents(value: relax.Expr) -> tuple[int, ...]:
    return tuple(int(extent) for extent in value.ty.shape)


def dtype_of(value: relax.Expr) -> str:
    return str(value.ty.dtype.dtype)
