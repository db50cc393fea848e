"""CanonicalizeMatmul: every matmul becomes (m, k) x (k, n) or (b, m, k) x (b, k, n).

Rewrite  matmul(x (b, t, k), W (k, n))        ->  reshape(matmul(reshape(x, (b*t, k)), W), (b, t, n))
         matmul(q (b, h, m, k), k (b, h, k, n)) ->  the same with one batch axis b*h
Batch axes that broadcast are repeated; a vector operand gets a unit axis.
"""

from __future__ import annotations

import math

import numpy as np
from tvm import relax
from tvm.ir import Call
from tvm.relax import Expr

from .rewrite import Rewriter, array_of, as_pass, constant, is_static, op_name, reshape, shape_of

Shape = tuple[int, ...]


@as_pass
class CanonicalizeMatmul(Rewriter):
    """Give every static matmul two or three axes."""

    def rewrite(self, value: Expr) -> Expr:
        if op_name(value) != "matmul" or not is_static(value) or not all(is_static(arg) for arg in value.args):
            return value
        a, b = value.args
        shape_a, shape_b = shape_of(a), shape_of(b)
        if math.prod(shape_a) * math.prod(shape_b) == 0 or _is_canonical(shape_a, shape_b):
            return value
        (m, k), n = ((1,) * (len(shape_a) == 1) + shape_a)[-2:], 1 if len(shape_b) == 1 else shape_b[-1]
        batch_a, batch_b = shape_a[:-2], shape_b[:-2]
        if math.prod(batch_b) == 1:
            a, b = reshape(a, (math.prod(batch_a) * m, k)), reshape(b, (k, n))
        else:
            batch = np.broadcast_shapes(batch_a, batch_b)
            a, b = self._batched(a, batch, (m, k)), self._batched(b, batch, (k, n))
        product = self.emit(Call(value.op, [self.emit(a), self.emit(b)], value.attrs), self.name)
        return reshape(product, shape_of(value))

    def _batched(self, x: Expr, batch: Shape, matrix: Shape) -> Expr:
        """`x` repeated along the batch axes that it lacks, which are then merged; a vector is one row or column."""
        x = self.emit(reshape(x, (*shape_of(x)[:-2], *matrix)))
        if math.prod(shape_of(x)) != math.prod(batch + matrix):
            elements = array_of(x)
            x = relax.op.broadcast_to(x, batch + matrix) if elements is None else constant(np.broadcast_to(elements, batch + matrix))
        return reshape(self.emit(x), (math.prod(batch), *matrix))


def _is_canonical(a: Shape, b: Shape) -> bool:
    return len(a) == len(b) == 2 or (len(a) == len(b) == 3 and a[0] == b[0] > 1)
