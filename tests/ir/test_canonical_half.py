"""ComputeHalfInSingle: where float16 is widened, and where it isn't touched."""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.script import relax as R

from tvmfuse.graph.half import ComputeHalfInSingle


def assert_rewrites(before: relax.Function, expected: relax.Function) -> None:
    once = ComputeHalfInSingle()(tvm.IRModule({"main": before}))
    tvm.ir.assert_structural_equal(once["main"], expected)
    tvm.ir.assert_structural_equal(ComputeHalfInSingle()(once), once)


def test_each_operation_is_rounded_to_half() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((2,), "float16")):
        with R.dataflow():
            a = R.multiply(x, R.const([2.0, 3.0], "float16"))
            y = R.nn.relu(a)
            R.output(y)
        return y

    @R.function(private=True)
    def expected(x: R.Tensor((2,), "float16")):
        with R.dataflow():
            wide = R.astype(x, "float32")
            product = R.multiply(wide, R.const([2.0, 3.0], "float32"))
            a = R.astype(product, "float16")
            again = R.astype(a, "float32")
            rectified = R.nn.relu(again)
            y = R.astype(rectified, "float16")
            R.output(y)
        return y

    assert_rewrites(before, expected)


def test_a_matmul_that_names_its_result_names_the_wide_one() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((2, 2), "float16")):
        with R.dataflow():
            y = R.matmul(x, x, out_dtype="float16")
            R.output(y)
        return y

    @R.function(private=True)
    def expected(x: R.Tensor((2, 2), "float16")):
        with R.dataflow():
            a = R.astype(x, "float32")
            b = R.astype(x, "float32")
            c = R.matmul(a, b, out_dtype="float32")
            y = R.astype(c, "float16")
            R.output(y)
        return y

    assert_rewrites(before, expected)


def test_a_comparison_keeps_its_type() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((2,), "float16")):
        with R.dataflow():
            y = R.greater(x, R.const(0.0, "float16"))
            R.output(y)
        return y

    @R.function(private=True)
    def expected(x: R.Tensor((2,), "float16")):
        with R.dataflow():
            wide = R.astype(x, "float32")
            y = R.greater(wide, R.const(0.0, "float32"))
            R.output(y)
        return y

    assert_rewrites(before, expected)


def test_movement_stays_in_half() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((2, 3), "float16")):
        with R.dataflow():
            a = R.permute_dims(x, axes=[1, 0])
            b = R.concat((a, a), axis=0)
            y = R.reshape(b, R.shape([12]))
            R.output(y)
        return y

    assert_rewrites(before, before)


def test_other_types_are_left_alone() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((2,), "float64"), z: R.Tensor((2,), "float32")):
        with R.dataflow():
            a = R.add(x, x)
            y = R.add(z, z)
            R.output(a, y)
        return (a, y)

    assert_rewrites(before, before)
