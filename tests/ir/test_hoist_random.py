"""Random graphs mean the same before and after HoistEpilogue, by a NumPy reading of their Relax.

Everything is small integers in float64, so that every op is exact and equality is to the bit.
"""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax
from tvm.ir import GenericConst, assert_structural_equal

from tvmfuse.graph.hoist import CROSSED_ATTR, HoistEpilogue, refusals

OP = relax.op
BINARY = {"add": np.add, "subtract": np.subtract, "maximum": np.maximum, "minimum": np.minimum}
UNARY = {"negative": np.negative, "abs": np.abs, "nn.relu": lambda x: np.maximum(x, 0)}
SHAPES = [(2, 3, 4), (6, 4), (4, 6), (1, 24), (2, 3, 2, 2), (12, 1, 2), (24,), (8, 3), (1, 6, 1, 4)]


def evaluated(func, arrays):
    env = dict(zip(func.params, arrays, strict=True))

    def read(value):
        return np.from_dlpack(value.value) if isinstance(value, GenericConst) else env[value]

    for block in func.body.blocks:
        for binding in block.bindings:
            call, name = binding.value, binding.value.op.name.removeprefix("relax.")
            if name == "matmul":
                result = np.matmul(*map(read, call.args))
            elif name == "permute_dims":
                result = read(call.args[0]).transpose([int(axis) for axis in call.attrs.axes])
            elif name == "reshape":
                result = read(call.args[0]).reshape([int(extent) for extent in call.args[1].values])
            elif name == "sum":
                result = read(call.args[0]).sum(axis=-1, keepdims=True)
            elif name == "nn.prelu":
                x, slope = map(read, call.args)
                result = np.where(x > 0, x, x * slope.reshape(-1, *(1,) * (x.ndim - 1 - int(call.attrs.axis))))
            elif name == "where":
                result = np.where(*map(read, call.args))
            elif name in ("greater", "multiply"):
                result = getattr(np, name)(*map(read, call.args))
            else:
                result = (BINARY | UNARY)[name](*map(read, call.args))
            env[binding.var] = result
    out = func.body.body
    return [env[field] for field in (out.fields if isinstance(out, relax.Tuple) else [out])]


@st.composite
def graphs(draw):
    """Up to two matmuls and some ops on any earlier values: DAGs with second users, dead ends and several outputs."""
    builder = relax.BlockBuilder()
    shapes = [(6, 2), (2, 4), (24,), (4,)]
    params = [relax.Var(f"p{at}", relax.TensorType(shape, "float64")) for at, shape in enumerate(shapes)]
    rng = np.random.default_rng(draw(st.integers(0, 99)))

    def const(shape):
        return relax.const(rng.integers(-4, 5, shape), "float64")

    def shape_of(value):
        return tuple(int(extent) for extent in value.ty.shape)

    with builder.function("main", params):
        with builder.dataflow():
            values = [builder.emit(OP.matmul(*params[:2])) for _ in range(draw(st.integers(1, 2)))]
            for _ in range(draw(st.integers(2, 9))):
                # Mostly the newest values, or hardly anything would form a chain.
                value = values[-draw(st.sampled_from([at for at in (1, 1, 1, 1, 2, 3) if at <= len(values)]))]
                shape = shape_of(value)
                kind = draw(st.sampled_from(["reshape", "permute", "unary", "constant", "run-time", "value", "prelu", "layout", "sum"]))
                if kind == "reshape" and math.prod(shape) == 24:
                    call = OP.reshape(value, draw(st.sampled_from(SHAPES)))
                elif kind == "permute":
                    call = OP.permute_dims(value, draw(st.permutations(range(len(shape)))))
                elif kind == "unary":
                    name = draw(st.sampled_from(sorted(UNARY)))
                    call = OP.nn.relu(value) if name == "nn.relu" else getattr(OP, name)(value)
                elif kind == "prelu":
                    axis = draw(st.integers(0, len(shape) - 1))
                    call = OP.nn.prelu(value, const((shape[axis],)), axis)
                elif kind == "sum":
                    call = OP.sum(value, axis=-1, keepdims=True)
                else:
                    same = [other for other in values if shape_of(other) == shape]
                    if kind == "constant":
                        kept = draw(st.lists(st.booleans(), min_size=len(shape), max_size=len(shape)))
                        aligned = [extent if keep else 1 for extent, keep in zip(shape, kept, strict=True)]
                        other = const(tuple(aligned[draw(st.integers(0, len(shape))) :]))
                    elif kind == "run-time" and shape[-1] == 4:
                        other = params[3]
                    elif kind == "layout" and math.prod(shape) == 24:
                        other = builder.emit(OP.reshape(draw(st.sampled_from([params[2], *values[:1]])), shape))
                    else:
                        other = draw(st.sampled_from(same))
                    call = getattr(OP, draw(st.sampled_from(sorted(BINARY))))(*draw(st.permutations([value, other])))
                values.append(builder.emit(call))
            extra = [value for value in values[:-1] if draw(st.integers(0, 9)) == 0]
            outs = [builder.emit_output(OP.negative(value)) for value in (*extra, values[-1])]
        builder.emit_func_output(relax.Tuple(outs) if len(outs) > 1 else outs[0])
    return builder.get(), [rng.integers(-4, 5, shape).astype("float64") for shape in shapes]


@settings(max_examples=150, deadline=None)
@given(graphs())
def test_random_graphs_keep_their_meaning(graph):
    mod, arrays = graph
    hoisted = HoistEpilogue()(mod)
    relax.analysis.well_formed(hoisted)
    assert_structural_equal(HoistEpilogue()(hoisted), hoisted)
    for before, after in zip(evaluated(mod["main"], arrays), evaluated(hoisted["main"], arrays), strict=True):
        np.testing.assert_array_equal(before, after)
    moved = set(hoisted["main"].attrs.get(CROSSED_ATTR, {}))
    assert moved.isdisjoint(refusal.op for refusal in refusals(mod))
    live = {binding.var.name for block in hoisted["main"].body.blocks for binding in block.bindings}
    assert moved <= live


@settings(max_examples=100, deadline=None)
@given(graphs())
def test_hoisting_takes_no_reason_away_and_adds_none(graph):
    mod, _ = graph
    assert said(HoistEpilogue()(mod)) == said(mod)


# An op that another reader of its value held back may be free once that reader is hoisted to its side, and what follows it held back.
HELD_BY_ANOTHER_READER = ("second user", "graph output", "depends on the anchor")


def said(mod):
    """Each op that is refused for what it is, with its rule."""
    return [(r.op, r.rule) for r in refusals(mod) if r.rule not in HELD_BY_ANOTHER_READER]
