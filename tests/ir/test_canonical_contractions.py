"""EinsumToMatmul and CanonicalizeMatmul: the shapes that reach the matmul, and what stays an einsum."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import relax as R

from tvmfuse.graph.einsum import EinsumToMatmul
from tvmfuse.graph.matmul import CanonicalizeMatmul
from tvmfuse.graph.rewrite import op_name, shape_of
from tvmfuse.graph.simplify import Simplify


def assert_rewrites(build: object, before: relax.Function, expected: relax.Function) -> None:
    once = build()(tvm.IRModule({"main": before}))
    tvm.ir.assert_structural_equal(once["main"], expected)
    tvm.ir.assert_structural_equal(build()(once), once)


def einsum(subscripts: str, *shapes: tuple[int, ...], constant: tuple[int, ...] = ()) -> relax.Function:
    """An einsum whose operands numbered in `constant` are constants."""
    builder = relax.BlockBuilder()
    operands = [
        relax.const(np.ones(shape, "float32")) if i in constant else relax.Var(f"x{i}", relax.TensorType(shape, "float32"))
        for i, shape in enumerate(shapes)
    ]
    with builder.function("main", [x for x in operands if isinstance(x, relax.Var)], private=True):
        with builder.dataflow():
            y = builder.emit_output(relax.op.einsum(operands, subscripts))
        builder.emit_func_output(y)
    return builder.get()["main"]


def lowered(function: relax.Function) -> list[relax.Expr]:
    simplified = tvm.transform.Sequential([EinsumToMatmul(), Simplify(), relax.transform.CanonicalizeBindings()])
    once = simplified(tvm.IRModule({"main": function}))
    tvm.ir.assert_structural_equal(simplified(once), once)
    return [binding.value for binding in once["main"].body.blocks[0].bindings]


def test_a_grouped_linear_layer() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((2, 3, 4, 5), "float32"), w: R.Tensor((4, 5, 6), "float32")):
        with R.dataflow():
            y = R.einsum((x, w), subscripts="btgi,gih->btgh")
            R.output(y)
        return y

    @R.function(private=True)
    def expected(x: R.Tensor((2, 3, 4, 5), "float32"), w: R.Tensor((4, 5, 6), "float32")):
        with R.dataflow():
            a = R.reshape(x, R.shape([6, 4, 5]))
            b = R.permute_dims(a, axes=[1, 0, 2])
            c = R.matmul(b, w)
            d = R.permute_dims(c, axes=[1, 0, 2])
            y = R.reshape(d, R.shape([2, 3, 4, 6]))
            R.output(y)
        return y

    assert_rewrites(EinsumToMatmul, before, expected)


@pytest.mark.parametrize(
    ("subscripts", "shapes", "operators"),
    [
        ("ij,jk->ik", ((2, 3), (3, 4)), ["matmul"]),
        ("ij,jk", ((2, 3), (3, 4)), ["matmul"]),
        ("bij,bjk->bik", ((2, 3, 4), (2, 4, 5)), ["matmul"]),
        ("ij,kj->ik", ((2, 3), (4, 3)), ["permute_dims", "matmul"]),
        ("ab,cd->abcd", ((2, 3), (4, 5)), ["reshape", "reshape", "matmul", "reshape"]),
        ("abc,cba->", ((2, 3, 4), (4, 3, 2)), ["reshape", "permute_dims", "reshape", "matmul", "reshape"]),
        ("ijk,jl->il", ((2, 3, 4), (3, 5)), ["sum", "matmul"]),
        ("i,i->i", ((3,), (3,)), ["reshape", "reshape", "matmul", "reshape"]),
    ],
)
def test_operators_of(subscripts: str, shapes: tuple[tuple[int, ...], ...], operators: list[str]) -> None:
    assert [op_name(value) for value in lowered(einsum(subscripts, *shapes))] == operators


def test_a_constant_operand_becomes_the_right_hand_side_and_is_permuted_now() -> None:
    values = lowered(einsum("hgi,btgi->btgh", (6, 4, 5), (2, 3, 4, 5), constant=(0,)))
    assert [op_name(value) for value in values] == ["reshape", "permute_dims", "matmul", "permute_dims", "reshape"]
    assert [shape_of(arg) for arg in values[2].args] == [(4, 6, 5), (4, 5, 6)]


@pytest.mark.parametrize(
    ("subscripts", "shapes"),
    [
        ("ij->ji", ((2, 3),)),
        ("ij,jk,kl->il", ((2, 2), (2, 2), (2, 2))),
        ("iij,jk->ik", ((2, 2, 3), (3, 4))),
        ("ij,jk->ik", ((2, 1), (3, 4))),
    ],
    ids=["one operand", "three operands", "diagonal", "broadcast"],
)
def test_einsum_stays(subscripts: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    assert [op_name(value) for value in lowered(einsum(subscripts, *shapes))] == ["einsum"]


def test_batch_axes_of_the_data_merge_into_m() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((2, 3, 4), "float32"), w: R.Tensor((4, 5), "float32")):
        with R.dataflow():
            y = R.matmul(x, w)
            R.output(y)
        return y

    @R.function(private=True)
    def expected(x: R.Tensor((2, 3, 4), "float32"), w: R.Tensor((4, 5), "float32")):
        with R.dataflow():
            a = R.reshape(x, R.shape([6, 4]))
            b = R.matmul(a, w)
            y = R.reshape(b, R.shape([2, 3, 5]))
            R.output(y)
        return y

    assert_rewrites(CanonicalizeMatmul, before, expected)


def test_batch_axes_of_both_sides_merge_into_one() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((2, 3, 4, 5), "float32"), w: R.Tensor((3, 5, 6), "float32")):
        with R.dataflow():
            y = R.matmul(x, w)
            R.output(y)
        return y

    @R.function(private=True)
    def expected(x: R.Tensor((2, 3, 4, 5), "float32"), w: R.Tensor((3, 5, 6), "float32")):
        with R.dataflow():
            b = R.broadcast_to(w, R.shape([2, 3, 5, 6]))
            a = R.reshape(x, R.shape([6, 4, 5]))
            c = R.reshape(b, R.shape([6, 5, 6]))
            d = R.matmul(a, c)
            y = R.reshape(d, R.shape([2, 3, 4, 6]))
            R.output(y)
        return y

    assert_rewrites(CanonicalizeMatmul, before, expected)


def test_vectors_get_a_unit_axis() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((3,), "float32"), w: R.Tensor((3,), "float32")):
        with R.dataflow():
            y = R.matmul(x, w)
            R.output(y)
        return y

    @R.function(private=True)
    def expected(x: R.Tensor((3,), "float32"), w: R.Tensor((3,), "float32")):
        with R.dataflow():
            a = R.reshape(x, R.shape([1, 3]))
            b = R.reshape(w, R.shape([3, 1]))
            c = R.matmul(a, b)
            y = R.reshape(c, R.shape([]))
            R.output(y)
        return y

    assert_rewrites(CanonicalizeMatmul, before, expected)


def test_one_batch_is_no_batch() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((1, 2, 3), "float32"), w: R.Tensor((1, 3, 4), "float32")):
        with R.dataflow():
            y = R.matmul(x, w)
            R.output(y)
        return y

    @R.function(private=True)
    def expected(x: R.Tensor((1, 2, 3), "float32"), w: R.Tensor((1, 3, 4), "float32")):
        with R.dataflow():
            a = R.reshape(x, R.shape([2, 3]))
            b = R.reshape(w, R.shape([3, 4]))
            c = R.matmul(a, b)
            y = R.reshape(c, R.shape([1, 2, 4]))
            R.output(y)
        return y

    assert_rewrites(CanonicalizeMatmul, before, expected)


def test_an_empty_matmul_stays() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((2, 0, 4), "float32"), w: R.Tensor((4, 5), "float32")):
        with R.dataflow():
            y = R.matmul(x, w)
            R.output(y)
        return y

    assert_rewrites(CanonicalizeMatmul, before, before)
