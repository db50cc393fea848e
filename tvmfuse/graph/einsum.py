"""EinsumToMatmul: a contraction of two tensors becomes a matmul between reshapes and permutations.

Rewrite  einsum("btgi,gih->btgh", x, W)
         ->  x: reshape (bt,g,i), permute (g,bt,i);  matmul with W (g,i,h);  permute (bt,g,h), reshape (b,t,g,h)
Axes     b: in both operands and the result;  k: in both operands only;  m, n: in the result and one operand;
         an axis of one operand alone is summed first.
Order    adjacent axes are merged before the permutation, so that it moves as few and as long runs as it can. A constant
         operand becomes the right-hand side, where weights stand.
Refuses  one or more than two operands, repeated subscripts (diagonals), an ellipsis, extents that broadcast: these stay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tvm import relax
from tvm.ir import Call, GenericConst
from tvm.relax import Expr

from .rewrite import Rewriter, as_pass, is_static, op_name, permute, reshape, shape_of

Extents = Mapping[str, int]


@as_pass
class EinsumToMatmul(Rewriter):
    """Lower every two-operand einsum to matmul."""

    def rewrite(self, value: Expr) -> Expr:
        if op_name(value) != "einsum" or not isinstance(value.args[0], relax.Tuple) or not is_static(value):
            return value
        return self._lowered(value, list(value.args[0].fields))

    def _lowered(self, call: Call, operands: list[Expr]) -> Expr:
        parsed = _subscripts(str(call.attrs.subscripts), operands)
        if parsed is None:
            return call
        *inputs, out = parsed
        extents = dict(zip(inputs[0] + inputs[1], shape_of(operands[0]) + shape_of(operands[1]), strict=True))
        if isinstance(operands[0], GenericConst) and not isinstance(operands[1], GenericConst):
            operands.reverse()
            inputs.reverse()
        for side, other in ((0, 1), (1, 0)):
            alone = [axis for axis, label in enumerate(inputs[side]) if label not in inputs[other] + out]
            if alone:
                operands[side] = self.emit(relax.op.sum(operands[side], alone))
                inputs[side] = "".join(label for axis, label in enumerate(inputs[side]) if axis not in alone)
        left, right = inputs
        b = [label for label in out if label in left and label in right]
        m = [label for label in left if label in out and label not in right]
        n = [label for label in right if label in out and label not in left]
        k = [label for label in left if label in right and label not in out]
        batch = [b] if b else []
        a = self._arranged(operands[0], left, [*batch, m, k], extents)
        c = self.emit(relax.op.matmul(a, self._arranged(operands[1], right, [*batch, k, n], extents)), self.name)
        return self._spread(c, [*batch, m, n], out, extents)

    def _arranged(self, x: Expr, labels: str, groups: Sequence[Sequence[str]], extents: Extents) -> Expr:
        """Bring `x`, with one axis for each of `labels`, to one axis for each group."""
        runs = _runs(labels, groups)
        x = self.emit(reshape(x, [_extent(run, extents) for run in runs]))
        order = [run for group in groups for run in _runs(group, runs)]
        x = self.emit(permute(x, [runs.index(run) for run in order]))
        return self.emit(reshape(x, [_extent(group, extents) for group in groups]))

    def _spread(self, x: Expr, groups: Sequence[Sequence[str]], out: str, extents: Extents) -> Expr:
        """The inverse: one axis for each group becomes one for each of `out`."""
        runs = _runs(out, groups)
        order = [run for group in groups for run in _runs(group, runs)]
        x = self.emit(reshape(x, [_extent(run, extents) for run in order]))
        x = self.emit(permute(x, [order.index(run) for run in runs]))
        return reshape(x, [extents[label] for label in out])


def _subscripts(text: str, operands: Sequence[Expr]) -> list[str] | None:
    """Labels of both operands and of the result; None for what isn't a plain contraction of two."""
    inputs, arrow, out = text.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if len(terms) != 2 or len(operands) != 2 or "." in text:
        return None
    if not arrow:  # NumPy's rule: what appears once, in alphabetical order
        out = "".join(sorted(label for label in set("".join(terms)) if "".join(terms).count(label) == 1))
    extents: dict[str, int] = {}
    for labels, x in zip(terms, operands, strict=True):
        if len(set(labels)) != len(labels) or len(labels) != len(shape_of(x)):
            return None
        if any(extents.setdefault(label, extent) != extent for label, extent in zip(labels, shape_of(x), strict=True)):
            return None
    return [*terms, out] if set(out) <= set(extents) and len(set(out)) == len(out) else None


def _runs(labels: Sequence[str], groups: Sequence[Sequence[str]]) -> list[str]:
    """Cut `labels` where two neighbours aren't neighbours, in this order, in any of `groups`."""
    follows = {(first, second) for group in groups for first, second in zip(group, group[1:], strict=False)}
    runs: list[str] = []
    for label in labels:
        if runs and (runs[-1][-1], label) in follows:
            runs[-1] += label
        else:
            runs.append(label)
    return runs


def _extent(labels: Sequence[str], extents: Extents) -> int:
    return math.prod(extents[label] for label in labels)
