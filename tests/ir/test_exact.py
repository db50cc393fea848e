"""ExactRounding: what it rewrites, what it leaves alone, and that schedules still work on the result."""

from __future__ import annotations

import pytest
import tvm
import tvm_ffi
from tvm import relax, te, tirx
from tvm.ir import Call, Op
from tvm.s_tir import Schedule

from tests.exec.kernel_runner import HOST, target_for
from tests.exec.llvm_scan import contractible
from tvmfuse.kernel import rounding
from tvmfuse.kernel.exact import ExactRounding


def function(expression, inputs: int = 2, dtype: str = "float32", **attrs) -> tirx.PrimFunc:
    placeholders = [te.placeholder((64,), dtype, f"p{i}") for i in range(inputs)]
    func = te.create_prim_func([*placeholders, te.compute((64,), lambda i: expression(*(p(i) for p in placeholders)), "result")])
    for key, value in attrs.items():
        func = func.with_attr(key, value)
    return func


def exact(func: tirx.PrimFunc) -> tirx.PrimFunc:
    return ExactRounding()(tvm.IRModule({"main": func}))["main"]


def calls_in(func: tirx.PrimFunc) -> set[str]:
    names: set[str] = set()

    def record(call: Call) -> Call:
        if isinstance(call.op, Op):
            names.add(call.op.name)
        return call

    tvm_ffi.structural_map(func.body, (Call, record))
    return names


def legalized(build, *shapes: tuple[int, ...]) -> tirx.PrimFunc:
    """The kernel that TVM makes of one operator."""
    builder = relax.BlockBuilder()
    args = [relax.Var(f"x{i}", relax.TensorType(shape, "float32")) for i, shape in enumerate(shapes)]
    with builder.function("main", args):
        with builder.dataflow():
            result = builder.emit_output(builder.emit(build(*args)))
        builder.emit_func_output(result)
    mod = relax.transform.LegalizeOps()(builder.get())
    (func,) = (f for f in mod.functions.values() if isinstance(f, tirx.PrimFunc))
    return func.with_attr("global_symbol", "main")


def test_product_before_a_sum_is_fenced():
    before = function(lambda x, y: x * y + x)
    expected = function(lambda x, y: tirx.Add(rounding.fence(tirx.Mul(x, y)), x))
    tvm.ir.assert_structural_equal(exact(before), expected)


def test_difference_is_fenced_against_the_simplifier():
    before = function(lambda x, y: tirx.Sub(x, y))
    expected = function(lambda x, y: tirx.Sub(rounding.fence(x), y))
    tvm.ir.assert_structural_equal(exact(before), expected)


@pytest.mark.parametrize("name", ["exp", "log", "sigmoid", "tanh", "erf", "sqrt", "isnan"])
def test_no_function_of_tvm_is_left(name: str):
    op = getattr(tirx, name)
    before = function(lambda x: tirx.Select(op(x), x, rounding.const(1, x)) if name == "isnan" else op(x), inputs=1)
    assert f"tirx.{name}" in calls_in(before)
    assert f"tirx.{name}" not in calls_in(exact(before))


def test_power_is_ours():
    before = function(tirx.pow)
    assert "tirx.pow" in calls_in(before) and "tirx.pow" not in calls_in(exact(before))


def test_scheduled_kernels_are_left_alone():
    before = function(lambda x, y: x * y + x, **{"tirx.is_scheduled": True})
    tvm.ir.assert_structural_equal(exact(before), before)


@pytest.mark.parametrize("dtype", ["int32", "int64", "float16"])
def test_other_types_are_left_alone(dtype: str):
    before = function(lambda x, y: tirx.Max(x * y + x, y), dtype=dtype)
    tvm.ir.assert_structural_equal(exact(before), before)


def test_a_second_output_of_the_same_module_is_rewritten_too():
    both = ExactRounding()(tvm.IRModule({"a": function(lambda x, y: x * y + x), "b": function(lambda x, y: x - x * y)}))
    assert all("tirx.call_llvm_pure_intrin" in calls_in(both[name]) for name in ("a", "b"))


@pytest.mark.parametrize(
    ("build", "shapes"),
    [
        (lambda x: relax.op.nn.softmax(x), [(4, 64)]),
        (lambda x, g, b: relax.op.nn.layer_norm(x, g, b, axes=[-1]), [(4, 64), (64,), (64,)]),
        (lambda x, y: relax.op.matmul(x, y), [(4, 8), (8, 64)]),
        (lambda x: relax.op.nn.gelu(x), [(4, 64)]),
        (lambda x: relax.op.nn.gelu_tanh(x), [(4, 64)]),
        (lambda x: relax.op.nn.avg_pool2d(x, (2, 2)), [(1, 4, 8, 8)]),
        (lambda x: relax.op.variance(x, axis=[1]), [(4, 64)]),
    ],
    ids=["softmax", "layer_norm", "matmul", "gelu", "gelu_tanh", "avg_pool", "variance"],
)
def test_nothing_contractible_is_left_in_legalised_kernels(build, shapes):
    func = legalized(build, *shapes)
    llvm = tvm.compile(tvm.IRModule({"main": exact(func).with_attr("global_symbol", "main")}), target_for(HOST.isa)).mod.inspect_source(
        "ll"
    )
    assert not contractible(llvm)


def test_reductions_can_still_be_decomposed_and_vectorised():
    sch = Schedule(exact(legalized(lambda x, y: relax.op.matmul(x, y), (4, 8), (8, 64))))
    (block,) = sch.get_child_blocks(sch.get_sblock("root"))
    i, j, k = sch.get_loops(block)
    outer, lane = sch.split(j, [None, 16])
    sch.reorder(i, outer, k, lane)
    sch.vectorize(lane)
    sch.decompose_reduction(block, k)
    executable = tvm.compile(sch.mod, target_for(HOST.isa))
    assert "<16 x float>" in executable.mod.inspect_source("ll")
