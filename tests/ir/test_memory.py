"""Weights and workspace as parameters of main: what is left of main, and what its parameters are."""

from __future__ import annotations

import itertools

import numpy as np
import tvm
from hypothesis import given
from hypothesis import strategies as st
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from tvmfuse.building import lowered_pipeline
from tvmfuse.kernel.memory import Tensor, memory_as_parameters, packed, tensors_in
from tvmfuse.values import View

ONES = np.ones(4, np.float32)


@I.ir_module
class Doubled:
    @T.prim_func
    def add(x: T.Buffer((4,), "float32"), w: T.Buffer((4,), "float32"), y: T.Buffer((4,), "float32")):
        for i in range(4):
            y[i] = x[i] + w[i]


def lifted(steps: int, dtype: str = "float32") -> tuple[relax.Function, object]:
    """main(x, out): `steps` additions, each of a constant of its own, the first through a reshape there and back."""
    mod = Doubled.clone()
    add = mod.get_global_var("add")
    builder = relax.BlockBuilder(mod)
    x, out = relax.Var("x", R.Tensor((4,), "float32")), relax.Var("out0", R.Tensor((4,), "float32"))
    with builder.function("main", [x, out]):
        with builder.dataflow():
            value: relax.Expr = x
            for _ in range(steps):
                constant = relax.const(tvm.runtime.tensor(ONES.copy()))
                value = builder.emit(relax.call_tir(add, [value, constant], R.Tensor((4,), "float32")))
            value = builder.emit(relax.op.reshape(relax.op.reshape(value, (2, 2)), (4,)))
            value = builder.emit(relax.op.astype(relax.op.astype(value, dtype), "float32")) if dtype != "float32" else value
            constant = relax.const(tvm.runtime.tensor(2 * ONES))
            inplace = relax.op.call_tir_inplace(add, relax.Tuple([value, constant, out]), [2], R.Tensor((4,), "float32"))
            value = builder.emit_output(inplace)
        builder.emit_func_output(value)
    mod = relax.transform.LegalizeOps()(builder.get())
    with tvm.target.Target({"kind": "llvm"}):
        return memory_as_parameters(lowered_pipeline()(mod))


def callees(main: relax.Function) -> list[str]:
    values = [binding.value for block in main.body.blocks for binding in block.bindings]
    return [str(v.op.name_hint if isinstance(v.op, tvm.ir.GlobalVar) else v.op) for v in values if isinstance(v, tvm.ir.Call)]


def test_main_is_nothing_but_kernel_calls() -> None:
    mod, _ = lifted(2)
    assert [name for name in callees(mod["main"]) if "null_value" not in name] == ["add"] * 3


def test_equal_weights_are_held_once_and_reshapes_are_views() -> None:
    mod, memory = lifted(2)
    assert [array.tobytes() for array in memory.weights] == [ONES.tobytes(), (2 * ONES).tobytes()]
    assert len(mod["main"].params) == 2 + len(memory.views)
    assert View(0, 0, (4,), "float32") in memory.views and View(1, 0, (4,), "float32") in memory.views
    inside = [view for view in memory.views if view.weight is None]
    assert {view.shape for view in inside} == {(4,), (2, 2)}
    assert all(view.offset % 64 == 0 and view.offset + 16 <= memory.workspace for view in inside)


def test_a_type_that_numpy_lacks_stays_with_the_virtual_machine() -> None:
    mod, memory = lifted(1, "bfloat16")
    assert memory.workspace == 0 and len(memory.weights) == 2
    assert any("alloc_tensor" in name for name in callees(mod["main"]))


spans = st.tuples(st.integers(1, 6), st.integers(0, 8), st.integers(0, 4))


@given(st.lists(spans, max_size=10))
def test_tensors_of_the_same_time_never_overlap(drawn: list[tuple[int, int, int]]) -> None:
    tensors = {relax.Var(f"t{i}"): Tensor(64 * size, first, first + length) for i, (size, first, length) in enumerate(drawn)}
    offsets, workspace = packed(tensors)
    for step in range(14):
        alive = sorted((offsets[var], offsets[var] + t.size) for var, t in tensors.items() if t.first <= step <= t.last)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(alive))
        assert all(end <= workspace for _, end in alive)


def test_small_tensors_of_other_times_share_the_place_of_a_large_one() -> None:
    large, before, after = (relax.Var(name) for name in ("large", "before", "after"))
    offsets, workspace = packed({before: Tensor(64, 0, 1), large: Tensor(256, 1, 2), after: Tensor(128, 3, 4)})
    assert (offsets[large], offsets[before], offsets[after], workspace) == (0, 256, 0, 320)


def test_a_tensor_lives_as_long_as_what_is_made_of_it() -> None:
    tensor = R.Tensor((4,), "float32")
    a, b, view = (relax.Var(name, tensor) for name in ("a", "b", "view"))
    pair = relax.Var("pair", R.Tuple(tensor, tensor))
    allocated = tvm.ir.Call(tvm.ir.Op.get("relax.vm.alloc_tensor"), [relax.Var("storage")])
    values = {a: allocated, b: allocated, pair: relax.Tuple([a, b]), view: relax.TupleGetItem(pair, 0), relax.Var("last", tensor): view}
    found = tensors_in([relax.VarBinding(var, value) for var, value in values.items()], relax.const(0))
    assert [(found[var].first, found[var].last) for var in (a, b)] == [(0, 4), (1, 4)]
