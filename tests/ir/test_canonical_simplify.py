"""Simplify: what goes, what merges, and what stays because a value would change."""

from __future__ import annotations

import math

import pytest
import tvm
from tvm import relax
from tvm.script import relax as R

from tvmfuse.graph.simplify import Simplify

INFINITY = math.inf


def assert_rewrites(before: relax.Function, expected: relax.Function) -> None:
    once = Simplify()(tvm.IRModule({"main": before}))
    tvm.ir.assert_structural_equal(once["main"], expected)
    tvm.ir.assert_structural_equal(Simplify()(once), once)


def test_a_chain_of_reshapes_is_one() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((2, 3, 4), "float32")):
        with R.dataflow():
            a = R.reshape(x, R.shape([6, 4]))
            b = R.expand_dims(a, axis=0)
            c = R.squeeze(b, axis=[0])
            y = R.flatten(c)
            R.output(y)
        return y

    @R.function(private=True)
    def expected(x: R.Tensor((2, 3, 4), "float32")):
        with R.dataflow():
            y = R.reshape(x, R.shape([24]))
            R.output(y)
        return y

    assert_rewrites(before, expected)


def test_inverse_permutations_cancel() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((2, 3, 4), "float32")):
        with R.dataflow():
            a = R.permute_dims(x, axes=[1, 2, 0])
            b = R.permute_dims(a, axes=[2, 0, 1])
            y = R.nn.relu(b)
            R.output(y)
        return y

    @R.function(private=True)
    def expected(x: R.Tensor((2, 3, 4), "float32")):
        with R.dataflow():
            y = R.nn.relu(x)
            R.output(y)
        return y

    assert_rewrites(before, expected)


def test_permutations_compose() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((2, 3, 4), "float32")):
        with R.dataflow():
            a = R.permute_dims(x, axes=[1, 2, 0])
            y = R.permute_dims(a)
            R.output(y)
        return y

    @R.function(private=True)
    def expected(x: R.Tensor((2, 3, 4), "float32")):
        with R.dataflow():
            y = R.permute_dims(x, axes=[0, 2, 1])
            R.output(y)
        return y

    assert_rewrites(before, expected)


def test_moving_unit_axes_is_a_reshape() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((1, 1, 3, 4), "float32")):
        with R.dataflow():
            y = R.permute_dims(x, axes=[0, 2, 3, 1])
            R.output(y)
        return y

    @R.function(private=True)
    def expected(x: R.Tensor((1, 1, 3, 4), "float32")):
        with R.dataflow():
            y = R.reshape(x, R.shape([1, 3, 4, 1]))
            R.output(y)
        return y

    assert_rewrites(before, expected)


def test_what_gives_the_same_tensor_goes() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((2, 3), "float32")):
        with R.dataflow():
            a = R.astype(x, "float32")
            b = R.broadcast_to(a, R.shape([2, 3]))
            c = R.strided_slice(b, axes=[1], begin=[0], end=[3])
            d = R.concat((c,), axis=0)
            e = R.nn.dropout(d, rate=0.5)
            f = e[0]
            g = R.multiply(f, R.const(1.0, "float32"))
            h = R.divide(g, R.const([1.0, 1.0, 1.0], "float32"))
            i = R.subtract(h, R.const(0.0, "float32"))
            j = R.add(R.const(-0.0, "float32"), i)
            y = R.nn.relu(j)
            R.output(y)
        return y

    @R.function(private=True)
    def expected(x: R.Tensor((2, 3), "float32")):
        with R.dataflow():
            y = R.nn.relu(x)
            R.output(y)
        return y

    assert_rewrites(before, expected)


def test_clip_is_one_operator() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((2,), "float32")):
        with R.dataflow():
            low = R.maximum(x, R.const(0.0, "float32"))
            y = R.minimum(low, R.const(6.0, "float32"))
            R.output(y)
        return y

    once = Simplify()(tvm.IRModule({"main": before}))["main"]
    (binding,) = once.body.blocks[0].bindings
    assert binding.value.op.name == "relax.clip"
    assert [bound.value for bound in binding.value.args[1:]] == [0.0, 6.0]


def test_an_open_bound_is_none() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((2,), "float32")):
        with R.dataflow():
            low = R.maximum(x, R.const(0.0, "float32"))
            high = R.minimum(low, R.const(INFINITY, "float32"))
            open_ = R.maximum(high, R.const(-INFINITY, "float32"))
            y = R.nn.relu(open_)
            R.output(y)
        return y

    @R.function(private=True)
    def expected(x: R.Tensor((2,), "float32")):
        with R.dataflow():
            low = R.maximum(x, R.const(0.0, "float32"))
            y = R.nn.relu(low)
            R.output(y)
        return y

    assert_rewrites(before, expected)


@R.function(private=True)
def adds_zero(x: R.Tensor((2,), "float32")):
    with R.dataflow():
        y = R.add(x, R.const(0.0, "float32"))  # -0 + 0 is 0
        R.output(y)
    return y


@R.function(private=True)
def broadcasts_up(x: R.Tensor((1,), "float32")):
    with R.dataflow():
        y = R.multiply(x, R.const([1.0, 1.0], "float32"))
        R.output(y)
    return y


@R.function(private=True)
def divides_one(x: R.Tensor((2,), "float32")):
    with R.dataflow():
        y = R.divide(R.const(1.0, "float32"), x)
        R.output(y)
    return y


@R.function(private=True)
def runs_backwards(x: R.Tensor((2,), "float32")):
    with R.dataflow():
        y = R.strided_slice(x, axes=[0], begin=[-1], end=[-3], strides=[-1])
        R.output(y)
    return y


@R.function(private=True)
def clips_per_channel(x: R.Tensor((2,), "float32")):
    with R.dataflow():
        low = R.maximum(x, R.const([0.0, 1.0], "float32"))
        y = R.minimum(low, R.const(6.0, "float32"))
        R.output(y)
    return y


@R.function(private=True)
def bounds_in_the_wrong_order(x: R.Tensor((2,), "float32")):
    with R.dataflow():
        low = R.maximum(x, R.const(1.0, "float32"))
        y = R.minimum(low, R.const(-1.0, "float32"))
        R.output(y)
    return y


@R.function(private=True)
def lower_bound_is_returned(x: R.Tensor((2,), "float32")):
    with R.dataflow():
        low = R.maximum(x, R.const(0.0, "float32"))
        y = R.minimum(low, R.const(6.0, "float32"))
        R.output(low, y)
    return (low, y)


@pytest.mark.parametrize(
    "function",
    [adds_zero, broadcasts_up, divides_one, runs_backwards, clips_per_channel, bounds_in_the_wrong_order, lower_bound_is_returned],
    ids=lambda f: "",
)
def test_refuses(function: relax.Function) -> None:
    assert_rewrites(function, function)
