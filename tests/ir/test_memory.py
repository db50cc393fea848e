"""Weights and workspace as parameters of main: what is left of main, and what its parameters are."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from tvmfuse.building import lowered_pipeline
from tvmfuse.kernel.memory import memory_as_parameters
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
