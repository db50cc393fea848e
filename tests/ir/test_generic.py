"""What becomes of the operators beside the sites: which functions are touched, and into which loops they turn."""

from __future__ import annotations

import logging
import math

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.relax import op
from tvm.script import tirx as T

from tvmfuse.kernel import emit, generic, nests
from tvmfuse.kernel.family import Buffer
from tvmfuse.kernel.forms import combination, form_of
from tvmfuse.values import AVX2, AVX512, NEON, Machine

MACHINE = Machine(AVX512)


def module(shapes, build) -> tvm.IRModule:
    """A Relax function of float32 inputs whose dataflow block `build(bb, *inputs)` fills."""
    bb = relax.BlockBuilder()
    inputs = [relax.Var(f"x{i}", relax.TensorType(shape, "float32")) for i, shape in enumerate(shapes)]
    with bb.function("main", inputs):
        with bb.dataflow():
            result = bb.emit_output(build(bb, *inputs))
        bb.emit_func_output(result)
    return bb.get()


def fused(shapes, build) -> tirx.PrimFunc:
    """The one function that TVM makes of some operators."""
    passes = (relax.transform.LegalizeOps, relax.transform.AnnotateTIROpPattern, relax.transform.FuseOps, relax.transform.FuseTIR)
    mod = tvm.transform.Sequential([p() for p in passes])(module(shapes, lambda bb, *x: build(*x)))
    (func,) = [f for _, f in mod.functions_items() if isinstance(f, tirx.PrimFunc)]
    return func


def read(shapes, build) -> list[nests.Nest]:
    """The nests of a function's blocks, each with its axes in place."""
    views: dict[tirx.Var, tirx.Var] = {}

    def view(buffer):
        return views.setdefault(buffer, tirx.decl_buffer((math.prod(nests.shape_of(buffer)),), buffer.dtype, buffer.name))

    return [nests.nest_of(block, view, (), lambda _: 0) for block in nests.blocks_of(generic.inlined(fused(shapes, build)))]


def count(func: tirx.PrimFunc, kind: type, when=lambda node: True) -> int:
    found: list[object] = []
    tvm_ffi.structural_walk(func.body, (kind, lambda node: found.append(node) if when(node) else None))
    return len(found)


def loops(func: tirx.PrimFunc, kind: tirx.ForKind) -> int:
    return count(func, tirx.For, lambda loop: loop.kind == kind)


def vectorised(func: tirx.PrimFunc) -> bool:
    return loops(func, tirx.ForKind.VECTORIZED) > 0


def copying(shape) -> tirx.PrimFunc:
    return emit.function("mine", [Buffer(shape), Buffer(shape)], lambda x, y: emit.copy(y, 0, x, 0, math.prod(shape), 8))


# --- nests ---


def test_contiguous_axes_become_one():
    (nest,) = read([(1, 5, 7, 9), (1, 5, 7, 9)], op.add)
    assert [axis.extent for axis in nests.merge(nest).spatial] == [5 * 7 * 9]


def test_axes_that_an_operand_is_broadcast_over_stay_apart_from_the_others():
    (nest,) = read([(1, 5, 7, 9), (9,)], op.add)
    assert [axis.extent for axis in nests.merge(nest).spatial] == [5 * 7, 9]


def test_channel_shuffle_is_a_plain_transpose_once_its_axis_is_split():
    def shuffle(x):
        return op.reshape(op.permute_dims(op.reshape(x, (6, 3, 10)), [0, 2, 1]), (6, 30))

    (nest,) = read([(6, 30)], shuffle)
    split = nests.merge(nests.split_div_mod(nest))
    assert [axis.extent for axis in split.spatial] == [6, 10, 3]
    assert [nests.step(split.stores[0].value.indices[0], axis) for axis in split.spatial] == [30, 1, 10]


def test_concatenation_is_one_copy_for_each_input():
    (nest,) = read([(4, 5), (4, 7), (4, 2)], lambda *x: op.concat(list(x), 1))
    ((*parts,),) = nests.stages(nest)
    assert [part.spatial[-1].extent for part in parts] == [5, 7, 2]
    assert not any(nests.conditions(part.stores[0].value) for part in parts)


def test_padding_in_short_runs_fills_everything_first():
    (nest,) = read([(4, 6, 8)], lambda x: op.nn.pad(x, [0, 0, 1, 1, 2, 2]))
    (fill,), (copy,) = nests.stages(nest)
    assert fill.points() == 4 * 8 * 12 and copy.points() == 4 * 6 * 8


def test_padding_in_long_runs_is_written_once():
    (nest,) = read([(4, 6, 32)], lambda x: op.nn.pad(x, [0, 0, 1, 1, 0, 0]))
    (parts,) = nests.stages(nest)
    assert sum(part.points() for part in parts) == 4 * 8 * 32


@pytest.mark.parametrize(
    ("shapes", "build", "kind"),
    [
        ([(8, 100)], lambda x: op.sum(x, 1), "along"),
        ([(8, 15)], lambda x: op.sum(x, 1), "across"),
        ([(8, 100)], lambda x: op.sum(x, 0), "across"),
        ([(1, 100)], lambda x: op.argmax(x, 1), "scalar"),
        ([(8, 100)], lambda x: op.argmax(x, 0), "across"),
        ([(40, 50)], lambda x: op.permute_dims(x, [1, 0]), "transpose"),
        ([(3, 50)], lambda x: op.permute_dims(x, [1, 0]), "interleave"),
        ([(50, 3)], lambda x: op.permute_dims(x, [1, 0]), "deinterleave"),
    ],
)
def test_form(shapes, build, kind):
    assert form_of(nests.merge(read(shapes, build)[0])).kind == kind


def test_maximum_that_keeps_nan_is_still_known_to_be_associative():
    x, y = tirx.decl_buffer((4,), "float32", "x"), tirx.decl_buffer((4,), "float32", "y")
    old, element = y[0], x[1] * T.float32(2)
    inf = tirx.const(math.inf, "float32")
    store = nests.Store(y, tirx.const(0, "int64"), tirx.Select(old <= inf, tirx.Max(old, element), old), tirx.const(-math.inf, "float32"))
    a, b = x[2], x[3]
    tvm.ir.assert_structural_equal(combination(store)(a, b), tirx.Select(a <= inf, tirx.Max(a, b), a))


def test_sum_that_does_not_start_at_zero_runs_in_order():
    x, y = tirx.decl_buffer((4,), "float32", "x"), tirx.decl_buffer((4,), "float32", "y")
    store = nests.Store(y, tirx.const(0, "int64"), y[0] + x[1], tirx.const(1.0, "float32"))
    assert combination(store) is None


# --- functions ---


def test_elementwise_chain_is_one_pass_without_working_memory():
    func = fused([(6, 20), (20,)], lambda x, b: op.nn.relu(op.multiply(op.add(x, b), b)))
    out = generic.scheduled("chain", func, MACHINE)
    assert vectorised(out) and count(out, tirx.AllocBuffer) == 0


def test_what_is_computed_once_for_many_readers_stays_apart():
    func = fused([(6, 20)], lambda x: op.nn.softmax(x, -1))
    assert len(nests.blocks_of(generic.inlined(func))) == 4


def test_concatenation_branches_nowhere():
    func = fused([(4, 5), (4, 7)], lambda x, y: op.nn.relu(op.concat([x, y], 1)))
    out = generic.scheduled("concat", func, MACHINE)
    assert count(out, tirx.IfThenElse) == 0 and "if_then_else" not in out.script()


@pytest.mark.parametrize("shape", [(64, 320), (320, 64)])
def test_transpose_walks_along_its_longer_axis(shape):
    out = generic.scheduled("transpose", fused([shape], lambda x: op.permute_dims(x, [1, 0])), MACHINE)
    extents: list[int] = []
    tvm_ffi.structural_walk(out.body, (tirx.For, lambda loop: extents.append(int(loop.extent))), order="pre")
    assert extents == [64 // 16, 320 // 16]


def test_one_thread_has_no_parallel_region():
    func = fused([(1000, 1000)], op.nn.relu)
    assert loops(generic.scheduled("relu", func, Machine(AVX512, threads=1)), tirx.ForKind.PARALLEL) == 0


def test_small_function_has_no_parallel_region():
    func = fused([(10, 100)], op.nn.relu)
    assert loops(generic.scheduled("relu", func, Machine(AVX512, threads=2)), tirx.ForKind.PARALLEL) == 0


def test_large_function_is_shared_in_as_many_runs_as_threads():
    func = fused([(1000, 1000)], op.nn.relu)
    out = generic.scheduled("relu", func, Machine(AVX512, threads=2))
    assert count(out, tirx.For, lambda loop: loop.kind == tirx.ForKind.PARALLEL and int(loop.extent) == 2) == 1


def test_reduction_along_an_axis_has_sixteen_lanes_on_every_machine():
    func = fused([(8, 160)], lambda x: op.sum(x, 1))
    outs = [generic.scheduled("sum", func, Machine(isa)) for isa in (AVX512, AVX2, NEON)]
    for out in outs[1:]:
        tvm.ir.assert_structural_equal(out, outs[0])


def test_parameters_ask_for_no_more_than_an_element_of_alignment():
    func = fused([(8, 16)], op.nn.relu)
    assert {param.ty.data_alignment for param in generic.scheduled("relu", func, MACHINE).params} == {4}


# --- passes ---


def test_function_that_is_no_nest_keeps_its_loops_and_is_logged(caplog):
    legal = relax.backend.DispatchSortScan()
    with tvm.target.Target({"kind": "llvm"}), caplog.at_level(logging.DEBUG, "tvmfuse.kernel.generic"):
        mod = relax.transform.LegalizeOps()(legal(module([(4, 10)], lambda bb, x: op.cumsum(x, 1))))
        out = generic.ScheduleGeneric(MACHINE)(mod)
    assert "cumsum stays as it is" in caplog.text
    assert out["cumsum"].attrs["tirx.is_scheduled"]
    assert {param.ty.data_alignment for param in out["cumsum"].params} == {4}


def test_scheduled_function_is_left_alone():
    mine = copying((4, 8))
    assert generic.ScheduleGeneric(MACHINE)(tvm.IRModule({"mine": mine}))["mine"].same_as(mine)


def test_second_run_changes_nothing():
    mod = generic.ScheduleGeneric(MACHINE)(tvm.IRModule({"relu": fused([(8, 16)], op.nn.relu)}))
    tvm.ir.assert_structural_equal(generic.ScheduleGeneric(MACHINE)(mod), mod)


def call(bb, func, x, shape=(4, 8)):
    return bb.emit(relax.call_tir(bb.add_func(func, "mine"), (x,), relax.TensorType(shape, "float32")))


def test_scheduled_function_is_not_fused_with_its_neighbours():
    """Without the attribute AnnotateTIROpPattern calls a function without blocks elementwise, and FuseTIR fails on it."""
    mine = copying((4, 8))
    mod = module([(4, 8)], lambda bb, x: op.nn.relu(call(bb, mine, bb.emit(op.nn.relu(x)))))
    out = generic.lower_generic(mod, MACHINE)
    assert sorted(var.name_hint for var in out.functions) == ["main", "mine", "relu"]
    tvm.ir.assert_structural_equal(out["mine"].body, mine.body)


def test_reshapes_between_sites_stay_one_view():
    def build(bb, x):
        first = call(bb, copying((4, 8)), x)
        return call(bb, copying((4, 8)), bb.emit(op.reshape(bb.emit(op.expand_dims(bb.emit(op.reshape(first, (32,))), 0)), (4, 8))))

    out = generic.lower_generic(module([(4, 8)], build), MACHINE)
    assert sorted(var.name_hint for var in out.functions) == ["main", "mine"]
    values = [binding.value for binding in out["main"].body.blocks[0].bindings]
    assert [value.op.name for value in values] == ["relax.call_tir", "relax.reshape", "relax.call_tir"]


def test_reshape_disappears_in_the_pass_that_reads_it():
    out = generic.lower_generic(module([(4, 8)], lambda bb, x: op.nn.relu(bb.emit(op.reshape(bb.emit(op.nn.relu(x)), (32,))))), MACHINE)
    assert len(out["main"].body.blocks[0].bindings) == 1


def test_every_function_is_scheduled():
    out = generic.lower_generic(module([(4, 8)], lambda bb, x: bb.emit(op.nn.softmax(bb.emit(op.sum(x, 0)), 0))), MACHINE)
    funcs = [f for _, f in out.functions_items() if isinstance(f, tirx.PrimFunc)]
    assert funcs and all(f.attrs["tirx.is_scheduled"] for f in funcs)


def test_lower_generic_folds_no_float_constant():
    mod = module([(4,)], lambda bb, x: op.add(x, bb.emit(op.exp(relax.const(np.ones(4, "float32"))))))
    assert "exp" in generic.lower_generic(mod, MACHINE).script()
