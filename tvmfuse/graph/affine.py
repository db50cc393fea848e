"""FoldAffine: per-channel constants after a convolution or matmul move into its weights and one bias.

Rewrite  batch_norm(conv2d(x, W) + b)  ->  conv2d(x, W * s) + t
         matmul(x * scalar, W)         ->  matmul(x, W * scalar)
         batch_norm(x) * m + a         ->  x * s + t                 where no anchor is adjacent
Numerics s and t are composed in float64; the new weights and the new bias are each rounded once.
Refuses  to look through a value that has a second user or is a graph output; constants that aren't finite; a scale that
         varies along another axis than the anchor's output channel. Without an anchor, operations merge only where fewer
         are left: (x - mean) / std stays as it is.
Source   batch normalisation folding: Jacob et al., arXiv 1712.05877, section 3.2; the composition of whole chains is own.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Call
from tvm.relax import DataflowVar, Expr, TupleGetItem, Var

from .rewrite import Rewriter, array_of, as_pass, constant, dtype_of, is_float, op_name, shape_of, substitute

CONVOLUTIONS = ("nn.conv1d", "nn.conv2d", "nn.conv1d_transpose", "nn.conv2d_transpose")


@dataclass(frozen=True)
class Chain:
    """base * scale + shift, not bound yet. scale and shift are float64 and of the value's rank; None stands for 1 and for 0.

    base   a bound value, or the anchor's call.
    steps  the model's own operations, each with the operand that stands for the one before; a batch_norm is none of them.
    name   of the last step's binding, base_name of the anchor's.
    """

    base: Expr
    name: str
    base_name: str = ""
    scale: np.ndarray | None = None
    shift: np.ndarray | None = None
    steps: tuple[tuple[Call, Var], ...] = ()
    composed: bool = False

    def then(self, scale: np.ndarray | None, shift: np.ndarray | None) -> Chain:
        moved = self.shift if self.shift is None or scale is None else self.shift * scale
        return dataclasses.replace(
            self,
            scale=scale if self.scale is None else self.scale if scale is None else self.scale * scale,
            shift=shift if moved is None else moved if shift is None else moved + shift,
        )

    @property
    def anchored(self) -> bool:
        return isinstance(self.base, Call)

    def is_scalar_factor(self) -> bool:
        return self.shift is None and self.scale is not None and self.scale.size == 1

    def is_shortest(self) -> bool:
        """Whether scale and shift would take no fewer operations than the model's own do."""
        absorbed = self.anchored and self.scale is not None
        return not self.composed and not absorbed and len(self.steps) <= (self.scale is not None) + (self.shift is not None)


@as_pass
class FoldAffine(Rewriter):
    """Fold constant multiply, divide, add, subtract, negative and batch_norm into the anchor before them, or into each other."""

    def __init__(self, mod: tvm.IRModule) -> None:
        super().__init__(mod)
        # Binding is put off until something else reads the value: each weight is multiplied once, however long its chain.
        self._chains: dict[Var, Chain] = {}
        self._norms: dict[Var, Call] = {}
        self._bound: dict[Var, Expr] = {}

    def rewrite(self, value: Expr) -> Expr:
        if _is_constant_norm(value):
            return self._later(value, self._norms, value)
        if isinstance(value, TupleGetItem) and value.tuple_value in self._norms:
            return self._norm_output(self._norms[value.tuple_value], value)
        if is_float(value):
            for x, scale, shift in _steps(value):
                return self._later(value, self._chains, self._extended(x, scale, shift, value))
            if _is_anchor(value):
                return self._later(value, self._chains, self._anchored(value))
        return self._with_bound_operands(value)

    def returned(self, value: Expr) -> Expr:
        return self._bind(value)

    def _later(self, value: Expr, waiting: dict[Var, Chain] | dict[Var, Call], what: Chain | Call) -> Var:
        placeholder = DataflowVar(self.name, value.ty)
        waiting[placeholder] = what  # type: ignore[assignment]
        return placeholder

    def _norm_output(self, norm: Call, value: TupleGetItem) -> Expr:
        if value.index:  # the running mean and variance, which inference leaves alone
            return norm.args[2 + value.index]
        return self._later(value, self._chains, self._extended(norm.args[0], *_norm_step(norm), None))

    def _extended(self, x: Var, scale: np.ndarray | None, shift: np.ndarray | None, step: Call | None) -> Chain:
        chain = self._chains.get(x)
        fits = chain is None or not chain.anchored or scale is None or _fits(chain.base, scale)
        if chain is None or not fits or not self.single_user(x):
            chain = Chain(self._bind(x), self.name)
        chain = dataclasses.replace(chain.then(scale, shift), name=self.name)
        return dataclasses.replace(chain, composed=True) if step is None else dataclasses.replace(chain, steps=(*chain.steps, (step, x)))

    def _anchored(self, anchor: Call) -> Chain:
        """A scalar factor of the data is as good on the weights; Gemm's alpha comes this way."""
        data = self._chains.get(anchor.args[0])
        if data is not None and not data.anchored and self.single_user(anchor.args[0]) and data.is_scalar_factor():
            scale = data.scale.reshape((1,) * len(shape_of(anchor)))
            return Chain(substitute(anchor, {anchor.args[0]: data.base}), self.name, self.name, scale=scale, composed=True)
        return Chain(self._with_bound_operands(anchor), self.name, self.name)

    def _with_bound_operands(self, value: Expr) -> Expr:
        waiting = [var for var in relax.analysis.free_vars(value) if var in self._chains or var in self._norms]
        return self._builder.normalize(substitute(value, {var: self._bind(var) for var in waiting}))

    def _bind(self, value: Expr) -> Expr:
        """What stands for `value` in the new block, computed there if it was put off."""
        if value not in self._bound and value in self._norms:
            self._bound[value] = self.emit(self._with_bound_operands(self._norms[value]))
        elif value not in self._bound and value in self._chains:
            self._bound[value] = self._computed(self._chains[value], dtype_of(value))
        return self._bound.get(value, value)

    def _computed(self, chain: Chain, dtype: str) -> Expr:
        value = chain.base
        if chain.anchored:
            scaled = chain.base if chain.scale is None else _with_scaled_weights(chain.base, chain.scale)
            value = self.emit(scaled, chain.base_name)
        if chain.is_shortest():
            for step, operand in chain.steps:
                value = self.emit(substitute(step, {operand: value}), chain.name)
            return value
        if chain.scale is not None and not chain.anchored:
            value = self.emit(relax.op.multiply(value, constant(chain.scale, dtype)))
        if chain.shift is not None:
            value = self.emit(relax.op.add(value, constant(chain.shift, dtype)), chain.name)
        return value


def _steps(value: Expr) -> list[tuple[Var, np.ndarray | None, np.ndarray | None]]:
    """value = x * scale + shift, as [(x, scale, shift)]; [] for anything else."""
    name = op_name(value)
    if name == "negative":
        return [(value.args[0], -np.ones((1,) * len(shape_of(value))), None)] if isinstance(value.args[0], Var) else []
    if name not in ("add", "subtract", "multiply", "divide"):
        return []
    left, right = value.args
    swapped = not isinstance(left, Var)
    x, elements = (right, array_of(left)) if swapped else (left, array_of(right))
    if elements is None or shape_of(x) != shape_of(value) or (name == "divide" and (swapped or not elements.all())):
        return []
    wide = elements.astype("float64").reshape((1,) * (len(shape_of(value)) - elements.ndim) + elements.shape)
    if not np.isfinite(wide).all():
        return []
    match name, swapped:
        case "add", _:
            return [(x, None, wide)]
        case "multiply", _:
            return [(x, wide, None)]
        case "divide", _:
            return [(x, 1 / wide, None)]
        case "subtract", False:
            return [(x, None, -wide)]
        case _:
            return [(x, -np.ones((1,) * wide.ndim), wide)]


def _is_constant_norm(value: Expr) -> bool:
    if op_name(value) != "nn.batch_norm" or value.attrs.training or not isinstance(value.args[0], Var):
        return False
    params = [array_of(arg) for arg in value.args[1:]]
    return is_float(value.args[0]) and all(param is not None and np.isfinite(param).all() for param in params)


def _norm_step(norm: Call) -> tuple[np.ndarray, np.ndarray]:
    """Scale and shift of (x - mean) / sqrt(variance + epsilon) * gamma + beta, along the norm's axis."""
    gamma, beta, mean, variance = (array_of(arg).astype("float64") for arg in norm.args[1:])
    scale = (gamma if norm.attrs.scale else 1.0) / np.sqrt(variance + float(norm.attrs.epsilon))
    shift = (beta if norm.attrs.center else 0.0) - mean * scale
    along = [1] * len(shape_of(norm.args[0]))
    along[int(norm.attrs.axis)] = -1
    return scale.reshape(along), shift.reshape(along)


def _is_anchor(value: Expr) -> bool:
    if op_name(value) not in (*CONVOLUTIONS, "matmul") or not isinstance(value.args[0], Var):
        return False
    data, weights = value.args
    deep_enough = op_name(value) != "matmul" or min(len(shape_of(data)), len(shape_of(weights))) >= 2
    return array_of(weights) is not None and dtype_of(weights) == dtype_of(value) and deep_enough


def _fits(anchor: Call, scale: np.ndarray) -> bool:
    """Whether `scale`, of the result's rank, is constant along every axis that the weights don't have."""
    if op_name(anchor) == "matmul":
        batch = shape_of(anchor.args[1])[:-2]
        aligned = (1,) * (scale.ndim - 2 - len(batch)) + batch
        return scale.shape[-2] == 1 and all(extent in (1, own) for extent, own in zip(scale.shape[:-2], aligned, strict=True))
    channel = anchor.attrs.out_layout.index("C")
    return scale.size == scale.shape[channel]


def _with_scaled_weights(anchor: Call, scale: np.ndarray) -> Call:
    data, weights = anchor.args
    wide = array_of(weights).astype("float64")
    if op_name(anchor) == "matmul":
        wide *= scale.reshape(scale.shape[scale.ndim - wide.ndim :])
    elif scale.size == 1:
        wide *= scale.item()
    elif "transpose" in op_name(anchor):
        # The output channels of group g are g * co/groups ... and meet the input channels of group g only.
        grouped = np.moveaxis(wide, [anchor.attrs.kernel_layout.index(axis) for axis in "IO"], (0, 1))
        grouped = grouped.reshape(int(anchor.attrs.groups), -1, *grouped.shape[1:])
        grouped *= scale.reshape(grouped.shape[0], 1, grouped.shape[2], *(1,) * (grouped.ndim - 3))
    else:
        along = [1] * wide.ndim
        along[anchor.attrs.kernel_layout.index("O")] = -1
        wide *= scale.reshape(along)
    return Call(anchor.op, [data, constant(wide, dtype_of(weights))], anchor.attrs, anchor.ty_args)
