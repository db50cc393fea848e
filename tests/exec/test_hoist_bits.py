"""A hoisted module computes the same bits as the module that it was made from, both compiled by TVM alone."""

from __future__ import annotations

import math

import numpy as np
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax

from tvmfuse.graph.hoist import CROSSED_ATTR, HoistEpilogue

OP = relax.op


def outputs(mod, arrays):
    vm = relax.VirtualMachine(tvm.compile(mod, tvm.target.Target("llvm")), tvm.cpu())
    return vm["main"](*map(tvm.runtime.tensor, arrays)).numpy()


def assert_same_bits(mod, arrays, moves=True):
    hoisted = HoistEpilogue()(mod)
    assert (CROSSED_ATTR in hoisted["main"].attrs) == moves
    before, after = outputs(mod, arrays), outputs(hoisted, arrays)
    assert before.dtype == after.dtype
    np.testing.assert_array_equal(before.view(f"u{before.itemsize}"), after.view(f"u{after.itemsize}"))


def module(shapes, body):
    """A module of one dataflow block; `body` gets the builder's emit and the parameters."""
    builder = relax.BlockBuilder()
    params = [relax.Var(f"p{at}", relax.TensorType(shape, "float32")) for at, shape in enumerate(shapes)]
    with builder.function("main", params):
        with builder.dataflow():
            out = builder.emit_output(body(builder.emit, *params))
        builder.emit_func_output(out)
    return builder.get()


def normals(*shapes):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype("float32") for shape in shapes]


def const(*shape):
    return relax.const(np.linspace(-2, 3, math.prod(shape), dtype="float32").reshape(shape))


def test_decomposed_hardswish():
    def body(emit, x, w):
        value = emit(OP.add(emit(OP.reshape(emit(OP.matmul(x, w)), (1, 2, 3, 5))), const(2, 1, 5)))
        gate = emit(OP.divide(emit(OP.clip(emit(OP.add(value, relax.const(3.0, "float32"))), 0, 6)), relax.const(6.0, "float32")))
        return OP.multiply(value, gate)

    assert_same_bits(module([(6, 7), (7, 5)], body), normals((6, 7), (7, 5)))


def test_residual_behind_a_permutation():
    def body(emit, x, w, r):
        value = emit(OP.permute_dims(emit(OP.reshape(emit(OP.matmul(x, w)), (1, 2, 3, 5))), (0, 3, 1, 2)))
        return OP.nn.relu(emit(OP.subtract(r, emit(OP.multiply(value, const(5, 1, 1))))))

    shapes = [(6, 7), (7, 5), (1, 5, 2, 3)]
    assert_same_bits(module(shapes, body), normals(*shapes))


def test_prelu_with_a_slope_along_two_axes_of_the_anchor():
    def body(emit, x, w):
        return OP.nn.prelu(emit(OP.reshape(emit(OP.matmul(x, w)), (12,))), const(12), 0)

    x, w = normals((4, 2), (2, 3))
    x[1] = 0  # a zero times a negative slope is -0
    assert_same_bits(module([(4, 2), (2, 3)], body), [x, w])


def test_convolution_and_a_cast():
    def body(emit, x, w):
        value = emit(OP.permute_dims(emit(OP.nn.conv2d(x, w)), (0, 2, 3, 1)))
        return OP.astype(emit(OP.tanh(emit(OP.add(value, const(4))))), "float16")

    shapes = [(1, 2, 4, 4), (4, 2, 3, 3)]
    assert_same_bits(module(shapes, body), normals(*shapes))


BINARY = (OP.add, OP.subtract, OP.multiply, OP.divide, OP.maximum, OP.minimum)
UNARY = (OP.nn.relu, OP.sigmoid, OP.abs, OP.negative)


@st.composite
def chains(draw):
    """Reshapes, permutations, unary ops, and binary ops with constants, parameters, earlier values and the value itself."""
    return draw(st.lists(st.sampled_from(["reshape", "permute", "unary", "constant", "residual", "self"]), min_size=3, max_size=7))


@settings(max_examples=4, deadline=None)
@given(st.data())
def test_random_chains(data):
    def body(emit, x, w, *residuals):
        value = emit(OP.matmul(x, w))
        left = list(residuals)
        for kind in data.draw(chains()):
            shape = tuple(int(extent) for extent in value.ty.shape)
            if kind == "reshape":
                value = emit(OP.reshape(value, data.draw(st.sampled_from([(2, 3, 4), (6, 4), (4, 6), (1, 24), (2, 3, 2, 2), (12, 1, 2)]))))
            elif kind == "permute":
                value = emit(OP.permute_dims(value, data.draw(st.permutations(range(len(shape))))))
            elif kind == "unary":
                value = emit(data.draw(st.sampled_from(UNARY))(value))
            else:
                if kind == "constant":
                    other = const(*(extent if data.draw(st.booleans()) else 1 for extent in shape))
                elif kind == "residual" and left:
                    other = emit(OP.reshape(left.pop(), shape))
                else:
                    other = emit(OP.sigmoid(value)) if data.draw(st.booleans()) else value
                operands = data.draw(st.permutations([value, other]))
                value = emit(data.draw(st.sampled_from(BINARY))(*operands))
        return OP.nn.relu(value)

    shapes = [(6, 3), (3, 4), (24,), (24,)]
    mod = module(shapes, body)
    assert_same_bits(mod, normals(*shapes), CROSSED_ATTR in HoistEpilogue()(mod)["main"].attrs)
