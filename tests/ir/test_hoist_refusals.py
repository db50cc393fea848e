"""What HoistEpilogue leaves in place, and the reason it gives."""

from __future__ import annotations

import tvm
from tvm.ir import assert_structural_equal
from tvm.script import relax as R
from tvm.script import tirx as T

from tvmfuse.graph.hoist import HoistEpilogue, Refusal, refusals, why_not


def assert_refuses(func, *expected):
    mod = tvm.IRModule({"main": func})
    assert refusals(mod) == list(expected)
    assert_structural_equal(HoistEpilogue()(mod), mod)
    for refusal in expected:
        assert why_not(mod, refusal.op) == refusal.hint


def test_refuses_when_intermediate_has_a_second_user():
    @R.function(private=True)
    def func(x: R.Tensor((4, 2), "float32"), w: R.Tensor((2, 2), "float32")):
        with R.dataflow():
            lv = R.matmul(x, w)
            lv1 = R.reshape(lv, (2, 2, 2))
            lv2 = R.nn.relu(lv1)
            lv3 = R.nn.softmax(lv1)
            gv = R.matmul(lv2, lv3)
            R.output(gv)
        return gv

    assert_refuses(
        func,
        Refusal("lv2", "reshape (4,2)->(2,2,2)", "second user", "`lv1` is also read by nn.softmax `lv3`"),
        Refusal("lv3", "reshape (4,2)->(2,2,2)", "not an epilogue op", "nn.softmax `lv3` is not an epilogue op"),
    )


def test_refuses_when_a_value_inside_the_region_has_a_second_user():
    @R.function(private=True)
    def func(x: R.Tensor((4, 2), "float32"), w: R.Tensor((2, 2), "float32")):
        with R.dataflow():
            lv = R.matmul(x, w)
            lv1 = R.reshape(lv, (2, 2, 2))
            lv2 = R.sigmoid(lv1)
            lv3 = R.nn.softmax(lv2)
            lv4 = R.multiply(lv1, lv2)
            gv = R.matmul(lv3, lv4)
            R.output(gv)
        return gv

    blocking = "reshape (4,2)->(2,2,2)"
    assert_refuses(
        func,
        Refusal("lv2", blocking, "second user", "`lv1` is also read by multiply `lv4`"),
        Refusal("lv4", blocking, "second user", "`lv2` is also read by nn.softmax `lv3`"),
    )


def test_refuses_when_the_anchors_result_has_a_second_user():
    @R.function(private=True)
    def func(x: R.Tensor((4, 2), "float32"), w: R.Tensor((2, 2), "float32")):
        with R.dataflow():
            lv = R.matmul(x, w)
            lv1 = R.reshape(lv, (2, 2, 2))
            lv2 = R.permute_dims(lv1, (0, 2, 1))
            lv3 = R.nn.relu(lv2)
            lv4 = R.nn.softmax(lv)
            R.output(lv3, lv4)
        return (lv3, lv4)

    assert_refuses(func, Refusal("lv3", "reshape (4,2)->(2,2,2)", "second user", "`lv` is also read by nn.softmax `lv4`"))


def test_refuses_when_intermediate_is_a_graph_output():
    @R.function(private=True)
    def func(x: R.Tensor((4, 2), "float32"), w: R.Tensor((2, 2), "float32")):
        with R.dataflow():
            lv = R.matmul(x, w)
            lv1 = R.reshape(lv, (2, 2, 2))
            lv2 = R.nn.relu(lv1)
            R.output(lv1, lv2)
        return (lv1, lv2)

    assert_refuses(func, Refusal("lv2", "reshape (4,2)->(2,2,2)", "graph output", "`lv1` is a graph output"))


def test_refuses_when_intermediate_is_a_graph_output_in_another_layout():
    @R.function(private=True)
    def func(x: R.Tensor((4, 2), "float32"), w: R.Tensor((2, 2), "float32")):
        with R.dataflow():
            lv = R.matmul(x, w)
            lv1 = R.reshape(lv, (2, 2, 2))
            lv2 = R.nn.relu(lv1)
            lv3 = R.permute_dims(lv1, (0, 2, 1))
            R.output(lv2, lv3)
        return (lv2, lv3)

    assert_refuses(func, Refusal("lv2", "reshape (4,2)->(2,2,2)", "graph output", "`lv1` is a graph output, by permute_dims `lv3`"))


def test_refuses_when_the_anchors_result_is_a_graph_output():
    @R.function(private=True)
    def func(x: R.Tensor((4, 2), "float32"), w: R.Tensor((2, 2), "float32")):
        with R.dataflow():
            lv = R.matmul(x, w)
            lv1 = R.reshape(lv, (2, 2, 2))
            lv2 = R.nn.relu(lv1)
            R.output(lv, lv2)
        return (lv, lv2)

    assert_refuses(func, Refusal("lv2", "reshape (4,2)->(2,2,2)", "graph output", "`lv` is a graph output"))


def test_refuses_when_a_value_inside_the_region_is_a_graph_output():
    @R.function(private=True)
    def func(x: R.Tensor((4, 2), "float32"), w: R.Tensor((2, 2), "float32")):
        with R.dataflow():
            lv = R.matmul(x, w)
            lv1 = R.reshape(lv, (2, 2, 2))
            lv2 = R.sigmoid(lv1)
            lv3 = R.multiply(lv1, lv2)
            R.output(lv2, lv3)
        return (lv2, lv3)

    blocking = "reshape (4,2)->(2,2,2)"
    assert_refuses(
        func,
        Refusal("lv2", blocking, "graph output", "`lv3` is a graph output"),
        Refusal("lv3", blocking, "graph output", "`lv2` is a graph output"),
    )


def test_refuses_an_operand_that_broadcasts_the_result_up():
    @R.function(private=True)
    def func(x: R.Tensor((1, 2), "float32"), w: R.Tensor((2, 4), "float32")):
        with R.dataflow():
            lv = R.matmul(x, w)
            lv1 = R.reshape(lv, (4, 1))
            gv = R.add(lv1, R.const([1, 2], "float32"))
            R.output(gv)
        return gv

    assert_refuses(func, Refusal("gv", "reshape (1,4)->(4,1)", "broadcasts up", "an operand broadcasts (4,1) up to (4,2)"))


def test_refuses_an_operand_that_depends_on_the_anchors_own_result():
    """Squeeze-and-excitation: the gate is a reduction of what it scales."""

    @R.function(private=True)
    def func(x: R.Tensor((4, 2), "float32"), w: R.Tensor((2, 2), "float32")):
        with R.dataflow():
            lv = R.matmul(x, w)
            lv1 = R.reshape(lv, (2, 2, 2))
            lv2 = R.mean(lv1, axis=[1], keepdims=True)
            lv3 = R.sigmoid(lv2)
            gv = R.multiply(lv1, lv3)
            R.output(gv)
        return gv

    blocking = "reshape (4,2)->(2,2,2)"
    assert_refuses(
        func,
        Refusal("lv2", blocking, "not an epilogue op", "mean `lv2` is not an epilogue op"),
        Refusal("gv", blocking, "depends on the anchor", "its operand `lv3` depends on the anchor's own result `lv1`"),
    )


def test_refuses_a_shape_that_is_only_known_at_run_time():
    @R.function(private=True)
    def func(x: R.Tensor(("s", 2), "float32"), w: R.Tensor((2, 2), "float32")):
        s = T.int64()
        with R.dataflow():
            lv = R.matmul(x, w)
            lv1 = R.reshape(lv, (1, s, 2))
            gv = R.nn.relu(lv1)
            R.output(gv)
        return gv

    assert_refuses(func, Refusal("gv", "reshape", "unknown shape", "the shape of reshape `lv1` is only known at run time"))


def test_refuses_an_operand_whose_shape_is_only_known_at_run_time():
    @R.function(private=True)
    def func(x: R.Tensor((4, 2), "float32"), w: R.Tensor((2, 2), "float32"), b: R.Tensor("float32", ndim=1)):
        with R.dataflow():
            lv = R.matmul(x, w)
            lv1 = R.reshape(lv, (2, 2, 2))
            gv = R.add(lv1, b)
            R.output(gv)
        return gv

    assert_refuses(func, Refusal("gv", "reshape (4,2)->(2,2,2)", "unknown shape", "the shape of add `gv` is only known at run time"))


def test_refuses_an_op_outside_the_list():
    @R.function(private=True)
    def func(x: R.Tensor((4, 2), "float32"), w: R.Tensor((2, 2), "float32")):
        with R.dataflow():
            lv = R.matmul(x, w)
            lv1 = R.reshape(lv, (2, 2, 2))
            gv = R.sin(lv1)
            R.output(gv)
        return gv

    assert_refuses(func, Refusal("gv", "reshape (4,2)->(2,2,2)", "not an epilogue op", "sin `gv` is not an epilogue op"))


def test_refuses_a_run_time_operand_on_a_part_of_a_split_axis():
    @R.function(private=True)
    def func(x: R.Tensor((6, 2), "float32"), w: R.Tensor((2, 2), "float32"), b: R.Tensor((3, 1), "float32")):
        with R.dataflow():
            lv = R.matmul(x, w)
            lv1 = R.reshape(lv, (2, 3, 2))
            gv = R.add(lv1, b)
            R.output(gv)
        return gv

    hint = "its run-time operand `b` (3,1) spans only a part of an axis of (6,2); a constant would be repeated along it"
    assert_refuses(func, Refusal("gv", "reshape (6,2)->(2,3,2)", "part of an axis", hint))


def test_refuses_a_run_time_slope_on_a_part_of_a_split_axis():
    @R.function(private=True)
    def func(x: R.Tensor((6, 2), "float32"), w: R.Tensor((2, 2), "float32"), slope: R.Tensor((3,), "float32")):
        with R.dataflow():
            lv = R.matmul(x, w)
            lv1 = R.reshape(lv, (2, 3, 2))
            gv = R.nn.prelu(lv1, slope, axis=1)
            R.output(gv)
        return gv

    hint = "its run-time operand `slope` (3,1) spans only a part of an axis of (6,2); a constant would be repeated along it"
    assert_refuses(func, Refusal("gv", "reshape (6,2)->(2,3,2)", "part of an axis", hint))


def test_refuses_an_empty_tensor():
    """A literal 0 in a reshape's target means "copy": another source would change it."""

    @R.function(private=True)
    def func(x: R.Tensor((0, 2), "float32"), w: R.Tensor((2, 2), "float32")):
        with R.dataflow():
            lv = R.matmul(x, w)
            lv1 = R.expand_dims(lv, 0)
            gv = R.nn.relu(lv1)
            R.output(gv)
        return gv

    assert_refuses(func, Refusal("gv", "expand_dims", "empty tensor", "`lv` has no elements"))


def test_refuses_a_layout_transform_that_pads():
    @R.function(private=True)
    def func(x: R.Tensor((4, 2), "float32"), w: R.Tensor((2, 3), "float32")):
        with R.dataflow():
            lv = R.matmul(x, w)
            lv1 = R.layout_transform(lv, index_map=lambda m, n: (m, n // 2, n % 2), pad_value=0.0)
            gv = R.exp(lv1)
            R.output(gv)
        return gv

    hint = "layout_transform `lv1` does more than to permute elements"
    assert_refuses(func, Refusal("gv", "layout_transform", "not a layout op", hint))


def test_refuses_a_layout_transform_that_computes_an_index():
    @R.function(private=True)
    def func(x: R.Tensor((4, 2), "float32"), w: R.Tensor((2, 3), "float32")):
        with R.dataflow():
            lv = R.matmul(x, w)
            lv1 = R.layout_transform(lv, index_map=lambda m, n: (m * 3 + n,))
            gv = R.exp(lv1)
            R.output(gv)
        return gv

    hint = "layout_transform `lv1` does more than to permute elements"
    assert_refuses(func, Refusal("gv", "layout_transform", "not a layout op", hint))


def test_an_op_that_moves_has_no_refusal():
    @R.function(private=True)
    def func(x: R.Tensor((4, 2), "float32"), w: R.Tensor((2, 2), "float32")):
        with R.dataflow():
            lv = R.matmul(x, w)
            lv1 = R.reshape(lv, (2, 2, 2))
            lv2 = R.nn.relu(lv1)
            lv3 = R.nn.softmax(lv2)
            R.output(lv3)
        return lv3

    mod = tvm.IRModule({"main": func})
    assert why_not(mod, "lv2") is None
    assert why_not(mod, "lv3") == "nn.softmax `lv3` is not an epilogue op"


def test_a_refusal_reads_as_a_sentence():
    refusal = Refusal("lv2", "reshape (4,2)->(2,2,2)", "graph output", "`lv1` is a graph output")
    assert str(refusal) == "lv2 stays below reshape (4,2)->(2,2,2): `lv1` is a graph output"
