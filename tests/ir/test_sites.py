"""Which bindings become a site, and which permutations a matmul takes in."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from tvmfuse.graph.sites import find_sites


def texts(mod: object) -> list[str]:
    return [str(site.workload) for site in find_sites(mod["main"])]  # type: ignore[index]


def test_silu_is_one_epilogue_of_two_steps() -> None:
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((4, 8), "float32"), w: R.Tensor((8, 6), "float32")):
            with R.dataflow():
                y = R.matmul(x, w)
                s = R.sigmoid(y)
                z = R.multiply(y, s)
                R.output(z)
            return z

    assert texts(Before) == ["matmul 4x6x8 mk,kn->mn | sigmoid(%0) mul(%0, %1)"]


def test_chain_ends_where_a_value_is_read_outside() -> None:
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((4, 8), "float32"), w: R.Tensor((8, 6), "float32")):
            with R.dataflow():
                y = R.matmul(x, w)
                a = R.nn.relu(y)
                b = R.tanh(a)
                z = R.nn.softmax(a)
                out = (b, z)
                R.output(out)
            return out

    assert texts(Before) == ["matmul 4x6x8 mk,kn->mn | relu(%0)"]


def test_graph_output_in_the_middle_ends_the_chain() -> None:
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((4, 8), "float32"), w: R.Tensor((8, 6), "float32")):
            with R.dataflow():
                y = R.matmul(x, w)
                a = R.nn.relu(y)
                b = R.tanh(a)
                R.output(a, b)
            return (a, b)

    assert texts(Before) == ["matmul 4x6x8 mk,kn->mn | relu(%0)"]


def test_the_later_of_two_anchors_takes_their_sum() -> None:
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((4, 8), "float32"), v: R.Tensor((8, 6), "float32"), w: R.Tensor((8, 6), "float32")):
            with R.dataflow():
                a = R.matmul(x, v)
                b = R.matmul(x, w)
                z = R.add(a, b)
                R.output(z)
            return z

    assert texts(Before) == ["matmul 4x6x8 mk,kn->mn", "matmul 4x6x8 mk,kn->mn | add($0, %0)"]


def test_operand_keeps_its_side_of_a_subtraction_and_scalars_are_literals() -> None:
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((4, 8), "float32"), w: R.Tensor((8, 6), "float32"), r: R.Tensor((6,), "float32")):
            with R.dataflow():
                y = R.matmul(x, w)
                a = R.subtract(r, y)
                z = R.divide(R.const(1.5, "float32"), a)
                R.output(z)
            return z

    (site,) = find_sites(Before["main"])
    assert str(site.workload) == "matmul 4x6x8 mk,kn->mn | sub($0, %0) div(1.5, %1)"
    assert [(o.shape, o.axes, o.constant) for o in site.workload.epilogue.operands] == [((6,), (1,), False)]


def test_matmul_takes_in_the_permutations_around_it() -> None:
    """A grouped linear layer: (t, g, i) -> (g, t, i) @ (g, i, h) -> (t, g, h), its residual stored as (t, g, h) too."""

    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((5, 2, 8), "float32"), w: R.Tensor((2, 8, 6), "float32"), r: R.Tensor((5, 2, 6), "float32")):
            with R.dataflow():
                p = R.permute_dims(x, axes=[1, 0, 2])
                y = R.matmul(p, w)
                q = R.permute_dims(r, axes=[1, 0, 2])
                a = R.add(y, q)
                s = R.permute_dims(a, axes=[1, 0, 2])
                z = R.reshape(s, R.shape([5, 12]))
                R.output(z)
            return z

    (site,) = find_sites(Before["main"])
    assert str(site.workload) == "matmul 2x5x6x8 mbk,bkn->mbn | add(%0, $0)"
    (residual,) = site.workload.epilogue.operands
    assert (residual.shape, residual.axes) == ((5, 2, 6), (0, 1, 2)), "read as stored"
    assert site.result.name == "z", "the reshape is a view, and stored at once"


def test_a_permutation_that_others_read_stays() -> None:
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((5, 2, 8), "float32"), w: R.Tensor((2, 8, 6), "float32")):
            with R.dataflow():
                p = R.permute_dims(x, axes=[1, 0, 2])
                y = R.matmul(p, w)
                z = R.nn.softmax(p)
                out = (y, z)
                R.output(out)
            return out

    assert texts(Before) == ["matmul 2x5x6x8 bmk,bkn->bmn"]


def test_result_with_n_not_last_stays() -> None:
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((4, 8), "float32"), w: R.Tensor((8, 6), "float32")):
            with R.dataflow():
                y = R.matmul(x, w)
                z = R.permute_dims(y, axes=[1, 0])
                R.output(z)
            return z

    assert texts(Before) == ["matmul 4x6x8 mk,kn->mn"]


def test_half_and_integer_matmuls_are_no_anchors() -> None:
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((4, 8), "int32"), w: R.Tensor((8, 6), "int32")):
            with R.dataflow():
                y = R.matmul(x, w)
                R.output(y)
            return y

    assert texts(Before) == []


def test_operand_that_differs_from_the_output_ends_the_chain_with_a_reason() -> None:
    constant = R.const(np.ones((2, 4, 6), "float32"))
    from tvm import relax

    x, w = relax.Var("x", relax.TensorType((4, 8), "float32")), relax.Var("w", relax.TensorType((8, 6), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, w]):
        with builder.dataflow():
            y = builder.emit(relax.op.matmul(x, w))
            z = builder.emit_output(relax.op.add(y, constant))
        builder.emit_func_output(z)
    assert texts(builder.get()) == ["matmul 4x6x8 mk,kn->mn"]


@pytest.mark.parametrize(("strides", "out_layout", "found"), [(1, "NCHW", 1), ((2, 1), "NCHW", 1), ((1, 2), "NCHW", 0), (1, "NHWC", 0)])
def test_lanes_over_planes_want_no_stride_along_rows(strides: int | tuple[int, int], out_layout: str, found: int) -> None:
    builder = relax.BlockBuilder()
    data = relax.Var("x", relax.TensorType((1, 8, 9, 96), "float32"))
    with builder.function("main", [data]):
        with builder.dataflow():
            weights = relax.const(np.ones((5, 3, 1, 8), "float32"))
            call = relax.op.nn.conv2d(data, weights, strides=strides, kernel_layout="OHWI", out_layout=out_layout)
            y = builder.emit_output(call)
        builder.emit_func_output(y)
    sites = find_sites(builder.get()["main"])
    assert [site.workload.family for site in sites] == ["planar_conv2d"] * found
