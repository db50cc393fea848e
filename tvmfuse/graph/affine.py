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
class Step:
    """x * scale + shift, both float64 and of the rank of x; None stands for 1 and for 0."""

    scale: np.ndarray | None
    shift: np.ndarray | None


@dataclass(frozen=True)
class Chain:
    """base * scale + shift, not bound yet.

    base   a bound value, or the anchor's call.
    steps  the model's own operations, each with the operand that stands for the one before.
    name   of the last step's binding, base_name of the anchor's.
    composed  whether something that is no single operation, such as a batch_norm, is among the steps.
    """

    base: Expr
    name: str
    base_name: str = ""
    scale: np.ndarray | None = None
    shift: np.ndarray | None = None
    steps: tuple[tuple[Call, Var], ...] = ()
    composed: bool = False

    def then(self, step: Step, call: Call | None, operand: Var, name: str) -> Chain:
        """The chain with one more step: `call`, in which `operand` is the chain so far; None for a batch_norm."""
        moved = self.shift if self.shift is None or step.scale is None else self.shift * step.scale
        return dataclasses.replace(
            self,
            name=name,
            scale=step.scale if self.scale is None else self.scale if step.scale is None else self.scale * step.scale,
            shift=step.shift if moved is None else moved if step.shift is None else moved + step.shift,
            steps=self.steps if call is None else (*self.steps, (call, operand)),
            composed=self.composed or call is None,
        )

    @property
    def anchored(self) -> bool:
        return isinstance(self.base, Call)

    def is_shortest(self) -> bool:
        """Whether scale and shift would take no fewer operations than the model's own do."""
        absorbed = self.anchored and self.scale is not None
        return not self.composed and not absorbed and len(self.steps) <= (self.scale is not None) + (self.shift is not None)


@as_pass
class FoldAffine(Rewriter):
    """Fold constant multiply, divide, add, subtract, negative and batch_norm into the anchor before them, or into each other."""

    def __init__(self, mod: tvm.IRModule | None = None) -> None:
        super().__init__(mod)
        # A chain isn't bound before its end is reached: each weight is multiplied once, however many steps follow.
        self._chains: dict[Var, Chain] = {}
        self._norms: dict[Var, Call] = {}

    def rewrite(self, value: Expr) -> Expr:
        if _is_constant_norm(value):
            placeholder = DataflowVar(self.name, value.ty)
            self._norms[placeholder] = value
            return placeholder
        if isinstance(value, TupleGetItem) and value.tuple_value in self._norms:
            norm = self._norms[value.tuple_value]
            if value.index:  # the running mean and variance, which inference leaves alone
                return norm.args[2 + value.index]
            return self._continued(self._extended(norm.args[0], _norm_step(norm), None), value)
        step = _step(value)
        if step is not None:
            return self._continued(self._extended(_stepped(value), step, value), value)
        if _is_anchor(value):
            return self._continued(self._anchored(value), value)
        return self._with_bound_operands(value)

    def returned(self, value: Expr) -> Expr:
        return self._bound(value)

    def _continued(self, chain: Chain, value: Expr) -> Expr:
        """Wait for the next step, if what reads `value` may be one."""
        reader = self.reader
        if reader is None or not (_is_constant_norm(reader) or _step(reader) is not None or _is_anchor(reader)):
            return self._computed(chain, dtype_of(value))
        placeholder = DataflowVar(self.name, value.ty)
        self._chains[placeholder] = chain
        return placeholder

    def _extended(self, x: Var, step: Step, call: Call | None) -> Chain:
        chain = self._chains.get(x)
        if chain is None or (chain.anchored and step.scale is not None and not _fits(chain.base, step.scale)):
            chain = Chain(self._bound(x), self.name)
        return chain.then(step, call, x, self.name)

    def _anchored(self, anchor: Call) -> Chain:
        """A scalar factor of the data is as good on the weights; Gemm's alpha comes this way."""
        data = self._chains.get(anchor.args[0])
        factor = None if data is None or data.anchored or data.shift is not None else data.scale
        if data is not None and factor is not None and factor.size == 1:
            scale = factor.reshape((1,) * len(shape_of(anchor)))
            return Chain(substitute(anchor, {anchor.args[0]: data.base}), self.name, self.name, scale=scale, composed=True)
        return Chain(self._with_bound_operands(anchor), self.name, self.name)

    def _with_bound_operands(self, value: Expr) -> Expr:
        waiting = [var for var in relax.analysis.free_vars(value) if var in self._chains or var in self._norms]
        return self._builder.normalize(substitute(value, {var: self._bound(var) for var in waiting})) if waiting else value

    def _bound(self, value: Expr) -> Expr:
        """What stands for `value` in the new block, computed now if it was waiting."""
        if value in self._norms:
            return self.emit(self._with_bound_operands(self._norms[value]))
        if value in self._chains:
            return self.emit(self._computed(self._chains[value], dtype_of(value)), self._chains[value].name)
        return value

    def _computed(self, chain: Chain, dtype: str) -> Expr:
        """The value at the chain's end; what comes before it is bound."""
        value = chain.base
        if chain.anchored and chain.scale is not None:
            value = _with_scaled_weights(chain.base, chain.scale)
        if chain.is_shortest():
            for step, operand in chain.steps:
                value = substitute(step, {operand: self.emit(value, chain.base_name)})
            return value
        if chain.scale is not None and not chain.anchored:
            value = relax.op.multiply(value, constant(chain.scale, dtype))
        if chain.shift is not None:
            value = relax.op.add(self.emit(value, chain.base_name), constant(chain.shift, dtype))
        return value


def _stepped(call: Call) -> Expr:
    """The operand of a step that isn't its constant."""
    return next(arg for arg in call.args if isinstance(arg, Var))


def _step(value: Expr) -> Step | None:
    """What `value` does to its only operand that isn't constant, if it is affine and keeps the shape."""
    name = op_name(value)
    if name not in ("negative", "add", "subtract", "multiply", "divide") or not is_float(value):
        return None
    if name == "negative":
        return Step(-np.ones((1,) * len(shape_of(value))), None) if isinstance(value.args[0], Var) else None
    swapped = not isinstance(value.args[0], Var)
    x, elements = value.args[swapped], array_of(value.args[not swapped])
    if elements is None or not isinstance(x, Var) or shape_of(x) != shape_of(value) or not np.isfinite(elements).all():
        return None
    wide = elements.astype("float64").reshape((1,) * (len(shape_of(value)) - elements.ndim) + elements.shape)
    match name, swapped:
        case "add", _:
            return Step(None, wide)
        case "multiply", _:
            return Step(wide, None)
        case "subtract", False:
            return Step(None, -wide)
        case "subtract", True:
            return Step(-np.ones((1,) * wide.ndim), wide)
        case "divide", False if wide.all():
            return Step(1 / wide, None)
    return None


def _is_constant_norm(value: Expr) -> bool:
    if op_name(value) != "nn.batch_norm" or value.attrs.training or not isinstance(value.args[0], Var):
        return False
    params = [array_of(arg) for arg in value.args[1:]]
    return is_float(value.args[0]) and all(param is not None and np.isfinite(param).all() for param in params)


def _norm_step(norm: Call) -> Step:
    """Scale and shift of (x - mean) / sqrt(variance + epsilon) * gamma + beta, along the norm's axis."""
    gamma, beta, mean, variance = (array_of(arg).astype("float64") for arg in norm.args[1:])
    scale = (gamma if norm.attrs.scale else 1.0) / np.sqrt(variance + float(norm.attrs.epsilon))
    shift = (beta if norm.attrs.center else 0.0) - mean * scale
    along = [1] * len(shape_of(norm.args[0]))
    along[int(norm.attrs.axis)] = -1
    return Step(scale.reshape(along), shift.reshape(along))


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
