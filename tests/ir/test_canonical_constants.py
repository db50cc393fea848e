"""FoldConstants: what is evaluated, how it is rounded, what stays."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax
from tvm.script import relax as R

from tvmfuse.graph.constants import FoldConstants


def folded(before: relax.Function) -> relax.Function:
    once = FoldConstants()(tvm.IRModule({"main": before}))
    tvm.ir.assert_structural_equal(FoldConstants()(once), once)
    return once["main"]


def constant_result(before: relax.Function) -> np.ndarray:
    """The constant that the function adds to its argument."""
    (binding,) = folded(before).body.blocks[0].bindings
    return binding.value.args[1].value.numpy()


def test_a_float_chain_is_rounded_once() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((3,), "float32")):
        with R.dataflow():
            shifted = R.add(R.const([0.1, 0.7, 123.4], "float32"), R.const(1e-5, "float32"))
            ratio = R.divide(R.const([1.3, 0.2, 7.7], "float32"), R.sqrt(shifted))
            y = R.add(x, ratio)
            R.output(y)
        return y

    f32 = np.float32
    shifted = f32([0.1, 0.7, 123.4]).astype("float64") + f32(1e-5)
    exact = f32([1.3, 0.2, 7.7]).astype("float64") / np.sqrt(shifted)
    np.testing.assert_array_equal(constant_result(before), exact.astype("float32"))


def test_each_user_of_a_chain_gets_the_rounded_value() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((1,), "float32")):
        with R.dataflow():
            third = R.divide(R.const([1.0], "float32"), R.const([3.0], "float32"))
            a = R.add(x, third)
            y = R.add(a, R.multiply(third, R.const([3.0], "float32")))
            R.output(y)
        return y

    first, second = folded(before).body.blocks[0].bindings
    assert first.value.args[1].value.numpy() == np.float32(1 / 3)
    assert second.value.args[1].value.numpy() == np.float32(1)


def test_a_comparison_sees_what_the_model_stores() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((1,), "float32")):
        with R.dataflow():
            tenth = R.multiply(R.const([0.1], "float32"), R.const([3.0], "float32"))  # 0.30000000447 before it is rounded
            same = R.equal(tenth, R.const([0.3], "float32"))
            y = R.add(x, R.where(same, R.const([1.0], "float32"), R.const([2.0], "float32")))
            R.output(y)
        return y

    assert constant_result(before) == (1 if np.float32(0.1) * np.float32(3) == np.float32(0.3) else 2)


def test_integer_division_truncates() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((4,), "int64")):
        with R.dataflow():
            quotient = R.divide(R.const([7, -7, 7, -6], "int64"), R.const([2, 2, -2, 3], "int64"))
            y = R.add(x, quotient)
            R.output(y)
        return y

    np.testing.assert_array_equal(constant_result(before), [3, -3, -3, -2])


def test_refuses_an_integer_division_by_zero() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((1,), "int64")):
        with R.dataflow():
            lv = R.divide(R.const([7], "int64"), R.const([0], "int64"))
            y = R.add(x, lv)
            R.output(y)
        return y

    tvm.ir.assert_structural_equal(folded(before), before)


def test_movement_is_exact_for_every_type() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((2, 2), "bool")):
        with R.dataflow():
            merged = R.reshape(R.const([[True, False, False, True]], "bool"), R.shape([2, 2]))
            turned = R.permute_dims(R.flip(merged, axis=0), axes=[1, 0])
            y = R.logical_and(x, turned)
            R.output(y)
        return y

    np.testing.assert_array_equal(constant_result(before), [[False, True], [True, False]])


def test_a_slice_with_negative_strides_reaches_the_first_element() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((2,), "float32")):
        with R.dataflow():
            y = R.add(x, R.strided_slice(R.const([1.0, 2.0, 3.0, 4.0], "float32"), axes=[0], begin=[-1], end=[-5], strides=[-2]))
            R.output(y)
        return y

    np.testing.assert_array_equal(constant_result(before), [4, 2])


def test_the_shape_of_a_static_tensor_is_known() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((2, 3), "float32"), z: R.Tensor((6,), "float32")):
        with R.dataflow():
            shape = R.shape_of(x)
            y = R.reshape(z, shape)
            R.output(y)
        return y

    @R.function(private=True)
    def expected(x: R.Tensor((2, 3), "float32"), z: R.Tensor((6,), "float32")):
        with R.dataflow():
            y = R.reshape(z, R.shape([2, 3]))
            R.output(y)
        return y

    tvm.ir.assert_structural_equal(folded(before), expected)


def test_an_operator_without_a_fold_stays() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((2,), "float32")):
        with R.dataflow():
            lv = R.nn.softmax(R.const([1.0, 2.0], "float32"))
            y = R.add(x, lv)
            R.output(y)
        return y

    tvm.ir.assert_structural_equal(folded(before), before)


def test_a_function_of_several_blocks_is_left_alone() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((2,), "float32")):
        lv = R.add(R.const([1.0, 2.0], "float32"), R.const([1.0, 2.0], "float32"))
        with R.dataflow():
            y = R.add(x, lv)
            R.output(y)
        return y

    tvm.ir.assert_structural_equal(folded(before), before)
