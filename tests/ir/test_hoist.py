"""HoistEpilogue: what crosses what, before and after. Each pair also shows that a second run changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.script import relax as R

from tvmfuse.graph.hoist import ANCHORS, CROSSED_ATTR, EPILOGUE_OPS, HoistEpilogue, refusals


def run(func):
    """The function after the pass, without the record, and the record."""
    mod = HoistEpilogue()(tvm.IRModule({"main": func}))
    relax.analysis.well_formed(mod)
    assert_structural_equal(HoistEpilogue()(mod), mod)
    crossed = mod["main"].attrs.get(CROSSED_ATTR, {})
    return mod["main"].without_attr(CROSSED_ATTR), {name: list(chain) for name, chain in crossed.items()}


def assert_hoists(before, expected):
    after, crossed = run(before)
    assert_structural_equal(after, expected)
    assert crossed


def op_names(func):
    return [binding.value.op.name.removeprefix("relax.") for binding in func.body.blocks[0].bindings]


def test_bias_and_relu_cross_a_split():
    @R.function(private=True)
    def before(x: R.Tensor((6, 2), "float32"), w: R.Tensor((2, 3), "float32")):
        with R.dataflow():
            lv = R.matmul(x, w)
            lv1 = R.reshape(lv, (1, 2, 3, 3))
            lv2 = R.add(lv1, R.const([1, 2, 3], "float32"))
            gv = R.nn.relu(lv2)
            R.output(gv)
        return gv

    @R.function(private=True)
    def expected(x: R.Tensor((6, 2), "float32"), w: R.Tensor((2, 3), "float32")):
        with R.dataflow():
            lv = R.matmul(x, w)
            lv2 = R.add(lv, R.const([1, 2, 3], "float32"))
            lv3 = R.nn.relu(lv2)
            gv = R.reshape(lv3, (1, 2, 3, 3))
            R.output(gv)
        return gv

    assert_hoists(before, expected)


def test_a_channel_is_followed_by_identity_where_all_extents_are_equal():
    @R.function(private=True)
    def before(x: R.Tensor((4, 2), "float32"), w: R.Tensor((2, 2), "float32")):
        with R.dataflow():
            lv = R.matmul(x, w)
            lv1 = R.reshape(lv, (1, 2, 2, 2))
            lv2 = R.permute_dims(lv1, (0, 3, 1, 2))
            gv = R.multiply(lv2, R.const([[[5]], [[7]]], "float32"))
            R.output(gv)
        return gv

    @R.function(private=True)
    def expected(x: R.Tensor((4, 2), "float32"), w: R.Tensor((2, 2), "float32")):
        with R.dataflow():
            lv = R.matmul(x, w)
            lv1 = R.multiply(lv, R.const([5, 7], "float32"))
            lv2 = R.reshape(lv1, (1, 2, 2, 2))
            gv = R.permute_dims(lv2, (0, 3, 1, 2))
            R.output(gv)
        return gv

    assert_hoists(before, expected)


def test_a_constant_on_a_part_of_a_split_axis_is_materialised_on_the_anchors_axis():
    @R.function(private=True)
    def before(x: R.Tensor((6, 2), "float32"), w: R.Tensor((2, 2), "float32")):
        with R.dataflow():
            lv = R.matmul(x, w)
            lv1 = R.reshape(lv, (2, 3, 2))
            gv = R.add(lv1, R.const([[[1], [2], [3]]], "float32"))
            R.output(gv)
        return gv

    @R.function(private=True)
    def expected(x: R.Tensor((6, 2), "float32"), w: R.Tensor((2, 2), "float32")):
        with R.dataflow():
            lv = R.matmul(x, w)
            lv1 = R.add(lv, R.const([[1], [2], [3], [1], [2], [3]], "float32"))
            gv = R.reshape(lv1, (2, 3, 2))
            R.output(gv)
        return gv

    assert_hoists(before, expected)


def test_a_constant_behind_a_layout_op_is_a_constant():
    @R.function(private=True)
    def before(x: R.Tensor((4, 2), "float32"), w: R.Tensor((2, 2), "float32")):
        with R.dataflow():
            lv = R.matmul(x, w)
            lv1 = R.reshape(lv, (2, 2, 2))
            lv2 = R.reshape(R.const([1, 2], "float32"), (1, 2, 1))
            gv = R.add(lv1, lv2)
            R.output(gv)
        return gv

    @R.function(private=True)
    def expected(x: R.Tensor((4, 2), "float32"), w: R.Tensor((2, 2), "float32")):
        with R.dataflow():
            lv = R.matmul(x, w)
            lv1 = R.add(lv, R.const([[1], [2], [1], [2]], "float32"))
            gv = R.reshape(lv1, (2, 2, 2))
            R.output(gv)
        return gv

    assert_hoists(before, expected)


def test_subtract_and_divide_keep_the_order_of_their_operands():
    @R.function(private=True)
    def before(x: R.Tensor((4, 2), "float32"), w: R.Tensor((2, 3), "float32")):
        with R.dataflow():
            lv = R.matmul(x, w)
            lv1 = R.permute_dims(lv, (1, 0))
            lv2 = R.subtract(R.const([[1], [2], [3]], "float32"), lv1)
            lv3 = R.divide(lv2, R.const([1, 2, 3, 4], "float32"))
            lv4 = R.divide(R.const(1, "float32"), lv3)
            gv = R.subtract(lv4, R.const(2, "float32"))
            R.output(gv)
        return gv

    @R.function(private=True)
    def expected(x: R.Tensor((4, 2), "float32"), w: R.Tensor((2, 3), "float32")):
        with R.dataflow():
            lv = R.matmul(x, w)
            lv2 = R.subtract(R.const([1, 2, 3], "float32"), lv)
            lv3 = R.divide(lv2, R.const([[1], [2], [3], [4]], "float32"))
            lv4 = R.divide(R.const(1, "float32"), lv3)
            lv5 = R.subtract(lv4, R.const(2, "float32"))
            gv = R.permute_dims(lv5, (1, 0))
            R.output(gv)
        return gv

    assert_hoists(before, expected)


def test_a_value_read_twice_inside_the_region_moves_with_it():
    """hardswish as TVM's importer writes it, then x + x."""

    @R.function(private=True)
    def before(x: R.Tensor((4, 2), "float32"), w: R.Tensor((2, 2), "float32")):
        with R.dataflow():
            lv = R.matmul(x, w)
            lv1 = R.reshape(lv, (2, 2, 2))
            lv2 = R.add(lv1, R.const(3, "float32"))
            lv3 = R.clip(lv2, 0, 6)
            lv4 = R.divide(lv3, R.const(6, "float32"))
            lv5 = R.multiply(lv1, lv4)
            gv = R.add(lv5, lv5)
            R.output(gv)
        return gv

    @R.function(private=True)
    def expected(x: R.Tensor((4, 2), "float32"), w: R.Tensor((2, 2), "float32")):
        with R.dataflow():
            lv = R.matmul(x, w)
            lv2 = R.add(lv, R.const(3, "float32"))
            lv3 = R.clip(lv2, 0, 6)
            lv4 = R.divide(lv3, R.const(6, "float32"))
            lv5 = R.multiply(lv, lv4)
            lv6 = R.add(lv5, lv5)
            gv = R.reshape(lv6, (2, 2, 2))
            R.output(gv)
        return gv

    assert_hoists(before, expected)


def test_prelu_of_several_axes_moves_as_where():
    @R.function(private=True)
    def before(x: R.Tensor((4, 2), "float32"), w: R.Tensor((2, 2), "float32")):
        with R.dataflow():
            lv = R.matmul(x, w)
            lv1 = R.reshape(lv, (2, 2, 2))
            lv2 = R.less(lv1, R.const(0, "float32"))
            lv3 = R.multiply(lv1, R.const([[1, 2], [3, 4]], "float32"))
            gv = R.where(lv2, lv3, lv1)
            R.output(gv)
        return gv

    @R.function(private=True)
    def expected(x: R.Tensor((4, 2), "float32"), w: R.Tensor((2, 2), "float32")):
        with R.dataflow():
            lv = R.matmul(x, w)
            lv2 = R.less(lv, R.const(0, "float32"))
            lv3 = R.multiply(lv, R.const([[1, 2], [3, 4], [1, 2], [3, 4]], "float32"))
            lv4 = R.where(lv2, lv3, lv)
            gv = R.reshape(lv4, (2, 2, 2))
            R.output(gv)
        return gv

    assert_hoists(before, expected)


def test_prelu_follows_its_axis():
    @R.function(private=True)
    def before(x: R.Tensor((4, 2), "float32"), w: R.Tensor((2, 3), "float32")):
        with R.dataflow():
            lv = R.matmul(x, w)
            lv1 = R.reshape(lv, (1, 2, 2, 3))
            lv2 = R.permute_dims(lv1, (0, 3, 1, 2))
            lv3 = R.nn.prelu(lv2, R.const([1, 2, 3], "float32"), axis=-3)
            lv4 = R.nn.prelu(lv3, R.const([4, 5], "float32"), axis=2)
            gv = R.nn.prelu(lv4, R.const([6], "float32"), axis=3)
            R.output(gv)
        return gv

    @R.function(private=True)
    def expected(x: R.Tensor((4, 2), "float32"), w: R.Tensor((2, 3), "float32")):
        with R.dataflow():
            lv = R.matmul(x, w)
            lv1 = R.nn.prelu(lv, R.const([1, 2, 3], "float32"), axis=1)
            lv2 = R.nn.prelu(lv1, R.const([4, 4, 5, 5], "float32"), axis=0)
            lv3 = R.nn.prelu(lv2, R.const([6], "float32"), axis=1)
            lv4 = R.reshape(lv3, (1, 2, 2, 3))
            gv = R.permute_dims(lv4, (0, 3, 1, 2))
            R.output(gv)
        return gv

    assert_hoists(before, expected)


def test_prelu_whose_axis_was_merged_is_written_out():
    @R.function(private=True)
    def before(x: R.Tensor((2, 2), "float32"), w: R.Tensor((2, 2), "float32")):
        with R.dataflow():
            lv = R.matmul(x, w)
            lv1 = R.flatten(lv)
            lv2 = R.nn.prelu(lv1, R.const([1, 2, 3, 4], "float32"), axis=0)
            gv = R.nn.prelu(lv2, lv2, axis=0)
            R.output(gv)
        return gv

    @R.function(private=True)
    def expected(x: R.Tensor((2, 2), "float32"), w: R.Tensor((2, 2), "float32")):
        with R.dataflow():
            lv = R.matmul(x, w)
            lv1 = R.greater(lv, R.const(0, "float32"))
            lv2 = R.multiply(lv, R.const([[1, 2], [3, 4]], "float32"))
            lv3 = R.where(lv1, lv, lv2)
            lv4 = R.greater(lv3, R.const(0, "float32"))
            lv5 = R.multiply(lv3, lv3)
            lv6 = R.where(lv4, lv3, lv5)
            gv = R.flatten(lv6)
            R.output(gv)
        return gv

    assert_hoists(before, expected)


def test_a_residual_is_read_through_the_inverse_layout_and_moved_once():
    @R.function(private=True)
    def before(x: R.Tensor((4, 2), "float32"), w: R.Tensor((2, 3), "float32"), r: R.Tensor((1, 3, 2, 2), "float32")):
        with R.dataflow():
            lv = R.matmul(x, w)
            lv1 = R.reshape(lv, (1, 2, 2, 3))
            lv2 = R.permute_dims(lv1, (0, 3, 1, 2))
            lv3 = R.add(lv2, r)
            gv = R.multiply(r, lv3)
            R.output(gv)
        return gv

    @R.function(private=True)
    def expected(x: R.Tensor((4, 2), "float32"), w: R.Tensor((2, 3), "float32"), r: R.Tensor((1, 3, 2, 2), "float32")):
        with R.dataflow():
            lv = R.matmul(x, w)
            r_1 = R.permute_dims(r, (0, 2, 3, 1))
            r_2 = R.reshape(r_1, (4, 3))
            lv3 = R.add(lv, r_2)
            lv4 = R.multiply(r_2, lv3)
            lv5 = R.reshape(lv4, (1, 2, 2, 3))
            gv = R.permute_dims(lv5, (0, 3, 1, 2))
            R.output(gv)
        return gv

    assert_hoists(before, expected)


def test_a_residual_behind_an_equal_layout_is_read_before_it():
    @R.function(private=True)
    def before(x: R.Tensor((4, 2), "float32"), w: R.Tensor((2, 3), "float32"), r: R.Tensor((4, 3), "float32")):
        with R.dataflow():
            lv = R.reshape(r, (1, 2, 2, 3))
            lv1 = R.permute_dims(lv, (0, 3, 1, 2))
            lv2 = R.matmul(x, w)
            lv3 = R.reshape(lv2, (1, 2, 2, 3))
            lv4 = R.permute_dims(lv3, (0, 3, 1, 2))
            gv = R.add(lv1, lv4)
            R.output(gv)
        return gv

    @R.function(private=True)
    def expected(x: R.Tensor((4, 2), "float32"), w: R.Tensor((2, 3), "float32"), r: R.Tensor((4, 3), "float32")):
        with R.dataflow():
            lv = R.matmul(x, w)
            lv1 = R.add(r, lv)
            lv2 = R.reshape(lv1, (1, 2, 2, 3))
            gv = R.permute_dims(lv2, (0, 3, 1, 2))
            R.output(gv)
        return gv

    assert_hoists(before, expected)


def test_the_anchor_computed_last_takes_the_op_that_joins_two():
    @R.function(private=True)
    def before(x: R.Tensor((4, 2), "float32"), w: R.Tensor((2, 3), "float32")):
        with R.dataflow():
            lv = R.matmul(x, w)
            lv1 = R.reshape(lv, (2, 2, 3))
            lv2 = R.nn.relu(lv1)
            lv3 = R.matmul(x, w)
            lv4 = R.reshape(lv3, (2, 2, 3))
            lv5 = R.add(lv2, lv4)
            gv = R.tanh(lv5)
            R.output(gv)
        return gv

    @R.function(private=True)
    def expected(x: R.Tensor((4, 2), "float32"), w: R.Tensor((2, 3), "float32")):
        with R.dataflow():
            lv = R.matmul(x, w)
            lv2 = R.nn.relu(lv)
            lv3 = R.matmul(x, w)
            lv5 = R.add(lv2, lv3)
            lv6 = R.tanh(lv5)
            gv = R.reshape(lv6, (2, 2, 3))
            R.output(gv)
        return gv

    assert_hoists(before, expected)


def test_an_anchor_keeps_the_op_that_needs_no_move():
    """The sum follows the second matmul already: the first one's relu moves, the sum doesn't."""

    @R.function(private=True)
    def before(x: R.Tensor((4, 2), "float32"), w: R.Tensor((2, 2), "float32"), y: R.Tensor((2, 4), "float32")):
        with R.dataflow():
            lv = R.matmul(x, w)
            lv1 = R.permute_dims(lv, (1, 0))
            lv2 = R.nn.relu(lv1)
            lv3 = R.matmul(w, y)
            gv = R.add(lv2, lv3)
            R.output(gv)
        return gv

    @R.function(private=True)
    def expected(x: R.Tensor((4, 2), "float32"), w: R.Tensor((2, 2), "float32"), y: R.Tensor((2, 4), "float32")):
        with R.dataflow():
            lv = R.matmul(x, w)
            lv1 = R.nn.relu(lv)
            lv2 = R.permute_dims(lv1, (1, 0))
            lv3 = R.matmul(w, y)
            gv = R.add(lv2, lv3)
            R.output(gv)
        return gv

    assert_hoists(before, expected)


def test_run_time_operands_whose_axes_survive():
    @R.function(private=True)
    def before(
        x: R.Tensor((4, 2), "float32"), w: R.Tensor((2, 3), "float32"), bias: R.Tensor((3,), "float32"), r: R.Tensor((2, 2, 1), "float32")
    ):
        with R.dataflow():
            lv = R.matmul(x, w)
            lv1 = R.reshape(lv, (2, 2, 3))
            lv2 = R.reshape(bias, (1, 1, 3))
            lv3 = R.add(lv1, lv2)
            gv = R.multiply(r, lv3)
            R.output(gv)
        return gv

    @R.function(private=True)
    def expected(
        x: R.Tensor((4, 2), "float32"), w: R.Tensor((2, 3), "float32"), bias: R.Tensor((3,), "float32"), r: R.Tensor((2, 2, 1), "float32")
    ):
        with R.dataflow():
            lv = R.matmul(x, w)
            lv3 = R.add(lv, bias)
            r_1 = R.reshape(r, (4, 1))
            lv4 = R.multiply(r_1, lv3)
            gv = R.reshape(lv4, (2, 2, 3))
            R.output(gv)
        return gv

    assert_hoists(before, expected)


def test_ops_between_layout_ops_keep_the_models_order():
    @R.function(private=True)
    def before(x: R.Tensor((4, 2), "float32"), w: R.Tensor((2, 3), "float32")):
        with R.dataflow():
            lv = R.matmul(x, w)
            lv1 = R.abs(lv)
            lv2 = R.reshape(lv1, (2, 2, 3))
            lv3 = R.nn.relu(lv2)
            lv4 = R.permute_dims(lv3, (2, 0, 1))
            lv5 = R.sqrt(lv4)
            lv6 = R.expand_dims(lv5, 0)
            lv7 = R.nn.softmax(lv6)
            R.output(lv7)
        return lv7

    @R.function(private=True)
    def expected(x: R.Tensor((4, 2), "float32"), w: R.Tensor((2, 3), "float32")):
        with R.dataflow():
            lv = R.matmul(x, w)
            lv1 = R.abs(lv)
            lv3 = R.nn.relu(lv1)
            lv5 = R.sqrt(lv3)
            lv2 = R.reshape(lv5, (2, 2, 3))
            lv4 = R.permute_dims(lv2, (2, 0, 1))
            lv6 = R.expand_dims(lv4, 0)
            lv7 = R.nn.softmax(lv6)
            R.output(lv7)
        return lv7

    assert_hoists(before, expected)
    assert run(before)[1] == {"lv3": ["reshape (4,3)->(2,2,3)"], "lv5": ["reshape (4,3)->(2,2,3)", "permute_dims (2,0,1)"]}


def test_the_largest_part_that_one_value_leaves_moves():
    """relu moves, though the sum behind it is read by softmax too."""

    @R.function(private=True)
    def before(x: R.Tensor((4, 2), "float32"), w: R.Tensor((2, 2), "float32")):
        with R.dataflow():
            lv = R.matmul(x, w)
            lv1 = R.reshape(lv, (2, 2, 2))
            lv2 = R.nn.relu(lv1)
            lv3 = R.exp(lv2)
            lv4 = R.nn.softmax(lv3)
            lv5 = R.add(lv2, lv3)
            gv = R.add(lv4, lv5)
            R.output(gv)
        return gv

    @R.function(private=True)
    def expected(x: R.Tensor((4, 2), "float32"), w: R.Tensor((2, 2), "float32")):
        with R.dataflow():
            lv = R.matmul(x, w)
            lv1 = R.nn.relu(lv)
            lv2 = R.reshape(lv1, (2, 2, 2))
            lv3 = R.exp(lv2)
            lv4 = R.nn.softmax(lv3)
            lv5 = R.add(lv2, lv3)
            gv = R.add(lv4, lv5)
            R.output(gv)
        return gv

    assert_hoists(before, expected)


def test_a_cast_moves_and_the_layout_op_then_moves_the_cast_type():
    @R.function(private=True)
    def before(x: R.Tensor((4, 2), "float32"), w: R.Tensor((2, 2), "float32")):
        with R.dataflow():
            lv = R.matmul(x, w)
            lv1 = R.reshape(lv, (2, 2, 2))
            gv = R.astype(lv1, "float16")
            R.output(gv)
        return gv

    @R.function(private=True)
    def expected(x: R.Tensor((4, 2), "float32"), w: R.Tensor((2, 2), "float32")):
        with R.dataflow():
            lv = R.matmul(x, w)
            lv1 = R.astype(lv, "float16")
            gv = R.reshape(lv1, (2, 2, 2))
            R.output(gv)
        return gv

    assert_hoists(before, expected)


def test_a_user_that_nobody_reads_does_not_count():
    @R.function(private=True)
    def before(x: R.Tensor((4, 2), "float32"), w: R.Tensor((2, 2), "float32")):
        with R.dataflow():
            lv = R.matmul(x, w)
            lv1 = R.reshape(lv, (2, 2, 2))
            _unread = R.nn.softmax(lv1)
            gv = R.nn.relu(lv1)
            R.output(gv)
        return gv

    @R.function(private=True)
    def expected(x: R.Tensor((4, 2), "float32"), w: R.Tensor((2, 2), "float32")):
        with R.dataflow():
            lv = R.matmul(x, w)
            lv1 = R.nn.relu(lv)
            gv = R.reshape(lv1, (2, 2, 2))
            R.output(gv)
        return gv

    assert_hoists(before, expected)


def test_duplicate_names_are_made_unique_in_the_record():
    x, w = (relax.Var(name, relax.TensorType((4, 4), "float32")) for name in "xw")
    mm, lay, out = (relax.DataflowVar("lv", relax.TensorType(s, "float32")) for s in ((4, 4), (2, 8), (2, 8)))
    gv = relax.Var("gv", relax.TensorType((2, 8), "float32"))
    values = [relax.op.matmul(x, w), relax.op.reshape(mm, (2, 8)), relax.op.nn.relu(lay), relax.op.tanh(out)]
    block = relax.DataflowBlock([relax.VarBinding(var, value) for var, value in zip([mm, lay, out, gv], values, strict=True)])
    func = relax.Function([x, w], relax.SeqExpr([block], gv), gv.ty)
    after, crossed = run(relax.BlockBuilder().normalize(func))
    assert op_names(after) == ["matmul", "nn.relu", "tanh", "reshape"]
    assert list(crossed) == ["lv_1", "gv"]
    assert [binding.var.name for binding in after.body.blocks[0].bindings] == ["lv", "lv_1", "gv", "lv_2"]


def test_every_dataflow_block_of_every_function_is_seen():
    builder = relax.BlockBuilder()
    for name in ("main", "other"):
        value = relax.Var("x", relax.TensorType((4, 4), "float32"))
        with builder.function(name, [value]):
            for _ in range(2):
                with builder.dataflow():
                    reshaped = builder.emit(relax.op.reshape(builder.emit(relax.op.matmul(value, value)), (2, 8)))
                    out = builder.emit_output(relax.op.nn.relu(reshaped))
                value = builder.emit(relax.op.reshape(out, (4, 4)))
            builder.emit_func_output(value)
    after = HoistEpilogue()(builder.get())
    for func in after.functions.values():
        blocks = [block for block in func.body.blocks if isinstance(block, relax.DataflowBlock)]
        assert [[binding.value.op.name for binding in block.bindings] for block in blocks] == [
            ["relax.matmul", "relax.nn.relu", "relax.reshape"]
        ] * 2
        assert len(func.attrs[CROSSED_ATTR]) == 2


def test_an_earlier_record_is_kept():
    func = matmul_reshaped_then(lambda _, x: relax.op.nn.relu(x)).with_attr(CROSSED_ATTR, {"earlier": ["flatten (2,2)->(4)"]})
    assert run(func)[1] == {"earlier": ["flatten (2,2)->(4)"], "gv": ["reshape (4,4)->(2,2,4)"]}


@pytest.mark.parametrize("attr", ["Primitive", "Composite", "Codegen"])
def test_a_function_that_is_somebody_elses_is_left_alone(attr):
    func = matmul_reshaped_then(lambda _, x: relax.op.sin(x)).with_attr(attr, 1)
    assert refusals(tvm.IRModule({"main": func})) == []
    func = matmul_reshaped_then(lambda _, x: relax.op.nn.relu(x)).with_attr(attr, 1)
    assert op_names(run(func)[0]) == ["matmul", "reshape", "nn.relu"]


def matmul_reshaped_then(epilogue):
    """matmul (4, 4), reshape to (2, 2, 4), and what `epilogue` builds of the builder and the reshaped value."""
    builder = relax.BlockBuilder()
    x, w = (relax.Var(name, relax.TensorType((4, 4), "float32")) for name in "xw")
    with builder.function("main", [x, w], private=True):
        with builder.dataflow():
            reshaped = builder.emit(relax.op.reshape(builder.emit(relax.op.matmul(x, w)), (2, 2, 4)))
            out = builder.emit_output(epilogue(builder, reshaped))
        builder.emit_func_output(out)
    return builder.finalize()["main"]


SPECIAL = {
    "where": lambda builder, x: relax.op.where(builder.emit(relax.op.isnan(x)), x, x),
    "isnan": lambda builder, x: relax.op.isnan(x),
    "astype": lambda builder, x: relax.op.astype(x, "float64"),
    "clip": lambda builder, x: relax.op.clip(x, 0, 6),
    "nn.prelu": lambda builder, x: relax.op.nn.prelu(x, relax.const(np.ones(4, "float32")), 2),
}
BINARY = {"add", "subtract", "multiply", "divide", "minimum", "maximum", "power", "less", "greater", "equal"}


@pytest.mark.parametrize("name", sorted(EPILOGUE_OPS))
def test_each_epilogue_op_crosses_a_reshape(name):
    op = relax.op
    for part in name.split("."):
        op = getattr(op, part)
    if name in SPECIAL:
        epilogues = [SPECIAL[name]]
    elif name in BINARY:
        bias = relax.const(np.ones(4, "float32"))
        epilogues = [lambda _, x: op(x, bias), lambda _, x: op(bias, x), lambda _, x: op(x, x)]
    else:
        epilogues = [lambda _, x: op(x)]
    for epilogue in epilogues:
        after, _ = run(matmul_reshaped_then(epilogue))
        assert op_names(after)[-2:] == [name, "reshape"]


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (lambda x: relax.op.reshape(x, (1, 8, 1, 2)), "reshape (1,4,4)->(1,8,1,2)"),
        (lambda x: relax.op.permute_dims(x), "permute_dims (2,1,0)"),
        (lambda x: relax.op.permute_dims(x, (0, -1, 1)), "permute_dims (0,2,1)"),
        (lambda x: relax.op.squeeze(x, [0]), "squeeze (1,4,4)->(4,4)"),
        (lambda x: relax.op.expand_dims(x, [1]), "expand_dims (1,4,4)->(1,1,4,4)"),
        (lambda x: relax.op.flatten(x), "flatten (1,4,4)->(16)"),
        (lambda x: relax.op.nn.batch_flatten(x), "nn.batch_flatten (1,4,4)->(1,16)"),
        (lambda x: relax.op.layout_transform(x, lambda n, h, w: (n, w // 2, h, w % 2)), "layout_transform (1,4,4)->(1,2,4,2)"),
        (lambda x: relax.op.layout_transform(x, lambda n, h, w: (h // 2 % 2, n, h % 2, w)), "layout_transform (1,4,4)->(2,1,2,4)"),
    ],
)
def test_each_layout_op_is_crossed(layout, text):
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((1, 4, 4), "float32"))
    with builder.function("main", [x], private=True):
        with builder.dataflow():
            moved = builder.emit(layout(builder.emit(relax.op.matmul(x, x))))
            out = builder.emit_output(relax.op.multiply(moved, relax.const(positions(moved))))
        builder.emit_func_output(out)
    after, crossed = run(builder.finalize()["main"])
    assert list(crossed.values()) == [[text]]
    assert op_names(after) == ["matmul", "multiply", text.split()[0]]


def positions(value):
    shape = [int(extent) for extent in value.ty.shape]
    return np.arange(np.prod(shape), dtype="float32").reshape(shape)


@pytest.mark.parametrize(
    ("name", "anchor", "shape"),
    [
        ("matmul", lambda x: relax.op.matmul(x, x), (4, 4)),
        ("einsum", lambda x: relax.op.einsum((x, x), "ij,jk->ik"), (4, 4)),
        ("nn.conv1d", lambda x: relax.op.nn.conv1d(x, x), (4, 4, 1)),
        ("nn.conv2d", lambda x: relax.op.nn.conv2d(x, x), (4, 4, 1, 1)),
        ("nn.conv1d_transpose", lambda x: relax.op.nn.conv1d_transpose(x, x), (4, 4, 1)),
        ("nn.conv2d_transpose", lambda x: relax.op.nn.conv2d_transpose(x, x), (4, 4, 1, 1)),
    ],
)
def test_each_anchor_attracts_its_epilogue(name, anchor, shape):
    assert name in ANCHORS
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    with builder.function("main", [x], private=True):
        with builder.dataflow():
            out = builder.emit_output(relax.op.nn.relu(builder.emit(relax.op.reshape(builder.emit(anchor(x)), (2, 8)))))
        builder.emit_func_output(out)
    assert op_names(run(builder.finalize()["main"])[0]) == [name, "nn.relu", "reshape"]


def test_without_an_anchor_nothing_moves():
    @R.function(private=True)
    def before(x: R.Tensor((4, 2), "float32")):
        with R.dataflow():
            lv = R.reshape(x, (2, 4))
            gv = R.nn.relu(lv)
            R.output(gv)
        return gv

    after, crossed = run(before)
    assert_structural_equal(after, before)
    assert not crossed
    assert refusals(tvm.IRModule({"main": before})) == []
