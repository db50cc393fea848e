"""GRU, LSTM and RNN: one matmul over all steps for the input projections, then one call per direction that walks the steps.

    Y, Y_h[, Y_c] = GRU|LSTM|RNN(X, W, R, B, -, h0[, c0])
    -> P = X @ W^T + Wb;  Y, h[, c] = call_tir(walk, P, R, Rb, h0[, c0])   for each direction, then stacked

`walk` is a plain loop nest with the function attribute "tvmfuse.recurrent": the json text of a `values.Recurrent`. It runs as
it is; a kernel that is faster may take its place. The equations and the order of the gates are those of ONNX's operators.
"""

# mypy: disable-error-code="valid-type"
# TVMScript's parameter annotations are calls.

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import onnx
import tvm
from tvm import relax, tirx
from tvm.script import tirx as T

from ..values import Recurrent
from .fold import Graph, attributes

ATTRIBUTE = "tvmfuse.recurrent"
_ACTIVATIONS = {"GRU": ["sigmoid", "tanh"], "LSTM": ["sigmoid", "tanh", "tanh"], "RNN": ["tanh"]}
_STATES = {"GRU": 1, "LSTM": 2, "RNN": 1}


def why_not(node: onnx.NodeProto, graph: Graph) -> str | None:
    """Why this network can't be compiled, or None."""
    given = attributes(node)
    inputs = dict(enumerate(node.input))
    shape = graph.shape(node.input[0])
    if shape is None:
        return "the shape of X isn't known"
    directions = 2 if given.get("direction") == b"bidirectional" else 1
    activations = [name.decode().lower() for name in given.get("activations", ())]
    if activations and activations != _ACTIVATIONS[node.op_type] * directions:
        return f"activations {', '.join(activations)} instead of the default"
    if given.get("clip"):
        return f"clip={given['clip']:g}"
    if given.get("input_forget"):
        return "input_forget=1"
    if inputs.get(4):
        lengths = graph.constants.get(inputs[4])
        steps = shape[1 if given.get("layout") else 0]
        if lengths is None or (lengths != steps).any():
            return f"sequence_lens isn't constant at the full length {steps}"
    if node.op_type == "LSTM" and inputs.get(7) and (inputs[7] not in graph.constants or graph.constants[inputs[7]].any()):
        return "peephole weights that aren't zero"
    return None


def convert(operator: str, bb: relax.BlockBuilder, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> relax.Expr:
    """The tuple (Y, Y_h) or (Y, Y_h, Y_c), as ONNX shapes it, of a node that `why_not` has let pass."""
    site, batch_first = attrs["tvm_custom"]["name"], attrs.get("layout", 0)
    dtype = inputs[0].ty.dtype.dtype
    operands: list[Any] = [*(_single(bb, value) for value in inputs), *[None] * (8 - len(inputs))]
    x, states = operands[0], operands[5 : 5 + _STATES[operator]]
    if batch_first:
        x = bb.emit(relax.op.permute_dims(x, (1, 0, 2)))
        states = [None if state is None else bb.emit(relax.op.permute_dims(state, (1, 0, 2))) for state in states]
    computed = "float64" if str(dtype) == "float64" else "float32"
    directions, rows, hidden = (int(extent) for extent in operands[2].ty.shape)
    b = relax.const(np.zeros((directions, 2 * rows)), computed) if operands[3] is None else operands[3]
    steps, batch, _ = (int(extent) for extent in x.ty.shape)
    way = attrs.get("direction", b"forward").decode()
    linear = operator == "GRU" and bool(attrs.get("linear_before_reset", 0))
    kind: Literal["gru", "lstm"] = "lstm" if operator == "LSTM" else "gru"
    anchor = Recurrent(kind, steps, batch, hidden, way == "reverse", linear, computed)

    results = []
    for d in range(directions):
        name = f"{site}/{('forward', 'backward')[d]}" if directions == 2 else site
        one = dataclasses.replace(anchor, reverse=anchor.reverse or d == 1)
        w, r, both = (_direction(bb, value, d, computed) for value in (operands[1], operands[2], b))
        input_bias, bias = _biases(bb, both, operator, one)
        product = bb.emit(relax.op.matmul(x, _transposed(bb, w)), name)
        biased = not isinstance(input_bias, tvm.ir.GenericConst) or input_bias.value.numpy().any()
        projections = bb.emit(relax.op.add(product, input_bias), f"{name}/bias") if biased else product
        initial = [_initial(bb, state, d, one) for state in states]
        types = [relax.TensorType(shape, one.dtype) for shape in (one.output_shape(), *[(batch, hidden)] * len(states))]
        function = _rnn(one) if operator == "RNN" else _walk(one)
        if not isinstance(r, tvm.ir.GenericConst) or not isinstance(bias, tvm.ir.GenericConst):
            function = function.without_attr(ATTRIBUTE)  # the kernels that may take its place pack their weights
        walk = bb.add_func(function, operator.lower())
        call = bb.emit(relax.call_tir(walk, [projections, r, bias, *initial], types), f"{name}/walk")
        results.append([bb.emit(relax.TupleGetItem(call, i)) for i in range(len(types))])

    axes = (2, 1, 1) if batch_first else (1, 0, 0)
    outputs = []
    for axis, parts in zip(axes, zip(*results, strict=True), strict=False):
        if axis == 2:  # Y is (steps, batch, hidden); layout 1 wants (batch, steps, directions, hidden)
            parts = tuple(bb.emit(relax.op.permute_dims(part, (1, 0, 2))) for part in parts)
        whole = bb.emit(relax.op.expand_dims(parts[0], axis) if directions == 1 else relax.op.stack(parts, axis))
        outputs.append(whole if str(dtype) == computed else bb.emit(relax.op.astype(whole, dtype)))
    return relax.Tuple(outputs)


def _single(bb: relax.BlockBuilder, value: relax.Expr | None) -> relax.Expr | None:
    """A float16 network is computed in float32 over all of its steps and rounded once at its results."""
    is_half = value is not None and str(value.ty.dtype.dtype) == "float16" and not isinstance(value, tvm.ir.GenericConst)
    return bb.emit(relax.op.astype(value, "float32")) if is_half else value


def _direction(bb: relax.BlockBuilder, value: relax.Expr, direction: int, dtype: str) -> relax.Expr:
    """The weights of one direction."""
    if isinstance(value, tvm.ir.GenericConst):
        return relax.const(np.ascontiguousarray(value.value.numpy()[direction], dtype), dtype)
    if int(value.ty.shape[0]) > 1:
        value = bb.emit(relax.op.strided_slice(value, [0], [direction], [direction + 1]))
    return bb.emit(relax.op.reshape(value, [int(extent) for extent in value.ty.shape][1:]))


def _transposed(bb: relax.BlockBuilder, w: relax.Expr) -> relax.Expr:
    if isinstance(w, tvm.ir.GenericConst):
        return relax.const(np.ascontiguousarray(w.value.numpy().T), w.ty.dtype.dtype)
    return bb.emit(relax.op.permute_dims(w, (1, 0)))


def _biases(bb: relax.BlockBuilder, both: relax.Expr, operator: str, anchor: Recurrent) -> tuple[relax.Expr, relax.Expr]:
    """Input bias and recurrent bias. Without linear_before_reset the candidate gate adds both outside of r, so they are one."""
    rows = int(both.ty.shape[0]) // 2
    joined = operator == "GRU" and not anchor.linear_before_reset
    if isinstance(both, tvm.ir.GenericConst):
        elements = both.value.numpy()
        input_bias, bias = elements[:rows].copy(), elements[rows:].copy()
        if joined:
            input_bias[-anchor.hidden :] += bias[-anchor.hidden :]
            bias[-anchor.hidden :] = 0
        return relax.const(input_bias, anchor.dtype), relax.const(bias, anchor.dtype)
    first, second = (bb.emit(relax.op.strided_slice(both, [0], [begin], [begin + rows])) for begin in (0, rows))
    if joined:
        candidate = relax.const(np.arange(rows) >= rows - anchor.hidden)
        zero = relax.const(0, anchor.dtype)
        first = bb.emit(relax.op.add(first, bb.emit(relax.op.where(candidate, second, zero))))
        second = bb.emit(relax.op.where(candidate, zero, second))
    return first, second


def _initial(bb: relax.BlockBuilder, state: relax.Expr | None, direction: int, anchor: Recurrent) -> relax.Expr:
    shape = (anchor.batch, anchor.hidden)
    if state is None:
        return relax.const(np.zeros(shape, anchor.dtype), anchor.dtype)
    if isinstance(state, tvm.ir.GenericConst):
        return relax.const(np.ascontiguousarray(state.value.numpy()[direction], anchor.dtype), anchor.dtype)
    if int(state.ty.shape[0]) > 1:
        state = bb.emit(relax.op.strided_slice(state, [0], [direction], [direction + 1]))
    return bb.emit(relax.op.reshape(state, shape))


def _walk(anchor: Recurrent) -> tirx.PrimFunc:
    return (_gru if anchor.kind == "gru" else _lstm)(anchor)


def _gru(anchor: Recurrent) -> tirx.PrimFunc:
    dtype, one = anchor.dtype, tirx.const(1, anchor.dtype)
    steps, batch, hidden = anchor.steps, anchor.batch, anchor.hidden
    fields = json.dumps(dataclasses.asdict(anchor))
    reverse, linear = anchor.reverse, anchor.linear_before_reset

    @T.prim_func(private=True, s_tir=True)
    def walk(
        P: T.Buffer((steps, batch, 3 * hidden), dtype),
        R: T.Buffer((3 * hidden, hidden), dtype),
        b: T.Buffer((3 * hidden,), dtype),
        h0: T.Buffer((batch, hidden), dtype),
        Y: T.Buffer((steps, batch, hidden), dtype),
        Y_h: T.Buffer((batch, hidden), dtype),
    ):
        T.func_attr({ATTRIBUTE: fields, "tirx.noalias": True})
        G = T.sblock_alloc_buffer((batch, 3 * hidden), dtype)
        for i, j in T.grid(batch, hidden):
            Y_h[i, j] = h0[i, j]
        for s in range(steps):
            t: T.let = steps - 1 - s if reverse else s
            for i, g in T.grid(batch, 3 * hidden if linear else 2 * hidden):
                G[i, g] = b[g]
                for k in range(hidden):
                    G[i, g] = G[i, g] + Y_h[i, k] * R[g, k]
            for i, j in T.grid(batch, 2 * hidden):
                G[i, j] = T.sigmoid(P[t, i, j] + G[i, j])
            for i, j in T.grid(batch, hidden):
                if linear:
                    G[i, 2 * hidden + j] = G[i, hidden + j] * G[i, 2 * hidden + j]
                else:
                    G[i, 2 * hidden + j] = b[2 * hidden + j]
                    for k in range(hidden):
                        G[i, 2 * hidden + j] = G[i, 2 * hidden + j] + G[i, hidden + k] * Y_h[i, k] * R[2 * hidden + j, k]
                Y[t, i, j] = (one - G[i, j]) * T.tanh(P[t, i, 2 * hidden + j] + G[i, 2 * hidden + j]) + G[i, j] * Y_h[i, j]
            for i, j in T.grid(batch, hidden):
                Y_h[i, j] = Y[t, i, j]

    return walk


def _rnn(anchor: Recurrent) -> tirx.PrimFunc:
    """h = tanh(P + (h R^T + b)). It has no faster kernel."""
    dtype = anchor.dtype
    steps, batch, hidden = anchor.steps, anchor.batch, anchor.hidden
    reverse = anchor.reverse

    @T.prim_func(private=True, s_tir=True)
    def walk(
        P: T.Buffer((steps, batch, hidden), dtype),
        R: T.Buffer((hidden, hidden), dtype),
        b: T.Buffer((hidden,), dtype),
        h0: T.Buffer((batch, hidden), dtype),
        Y: T.Buffer((steps, batch, hidden), dtype),
        Y_h: T.Buffer((batch, hidden), dtype),
    ):
        T.func_attr({"tirx.noalias": True})
        G = T.sblock_alloc_buffer((batch, hidden), dtype)
        for i, j in T.grid(batch, hidden):
            Y_h[i, j] = h0[i, j]
        for s in range(steps):
            t: T.let = steps - 1 - s if reverse else s
            for i, j in T.grid(batch, hidden):
                G[i, j] = b[j]
                for k in range(hidden):
                    G[i, j] = G[i, j] + Y_h[i, k] * R[j, k]
            for i, j in T.grid(batch, hidden):
                Y_h[i, j] = T.tanh(P[t, i, j] + G[i, j])
                Y[t, i, j] = Y_h[i, j]

    return walk


def _lstm(anchor: Recurrent) -> tirx.PrimFunc:
    dtype = anchor.dtype
    steps, batch, hidden = anchor.steps, anchor.batch, anchor.hidden
    fields = json.dumps(dataclasses.asdict(anchor))
    reverse = anchor.reverse

    @T.prim_func(private=True, s_tir=True)
    def walk(
        P: T.Buffer((steps, batch, 4 * hidden), dtype),
        R: T.Buffer((4 * hidden, hidden), dtype),
        b: T.Buffer((4 * hidden,), dtype),
        h0: T.Buffer((batch, hidden), dtype),
        c0: T.Buffer((batch, hidden), dtype),
        Y: T.Buffer((steps, batch, hidden), dtype),
        Y_h: T.Buffer((batch, hidden), dtype),
        Y_c: T.Buffer((batch, hidden), dtype),
    ):
        T.func_attr({ATTRIBUTE: fields, "tirx.noalias": True})
        G = T.sblock_alloc_buffer((batch, 4 * hidden), dtype)
        for i, j in T.grid(batch, hidden):
            Y_h[i, j] = h0[i, j]
            Y_c[i, j] = c0[i, j]
        for s in range(steps):
            t: T.let = steps - 1 - s if reverse else s
            for i, g in T.grid(batch, 4 * hidden):
                G[i, g] = b[g]
                for k in range(hidden):
                    G[i, g] = G[i, g] + Y_h[i, k] * R[g, k]
                G[i, g] = P[t, i, g] + G[i, g]
            for i, j in T.grid(batch, hidden):
                Y_c[i, j] = T.sigmoid(G[i, 2 * hidden + j]) * Y_c[i, j] + T.sigmoid(G[i, j]) * T.tanh(G[i, 3 * hidden + j])
                Y_h[i, j] = T.sigmoid(G[i, hidden + j]) * T.tanh(Y_c[i, j])
                Y[t, i, j] = Y_h[i, j]

    return walk
