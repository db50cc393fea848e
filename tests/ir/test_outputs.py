"""Where results are written: by kernels that take them as parameters, as early as can be."""

from __future__ import annotations

from tvm import relax

from tvmfuse.kernel import emit
from tvmfuse.kernel.family import Buffer
from tvmfuse.kernel.outputs import outputs_as_parameters


def test_a_result_is_written_as_soon_as_what_it_reads_is_there():
    kind = relax.TensorType((8,), "float32")
    bb = relax.BlockBuilder()
    x = relax.Var("x", kind)
    copy = bb.add_func(emit.function("copy", [Buffer((8,))] * 2, lambda x, y: emit.copy(y, 0, x, 0, 8, 8)), "copy")

    def copied(value: relax.Expr) -> relax.Call:
        return relax.call_tir(copy, (value,), kind)

    with bb.function("main", [x]):
        with bb.dataflow():
            a = bb.emit(copied(x), "a")
            b = bb.emit(copied(a), "b")
            late = bb.emit_output(copied(b), "late")
            of_a = bb.emit_output(copied(a), "of_a")
            of_that = bb.emit_output(copied(of_a), "of_that")
        bb.emit_func_output(relax.Tuple([late, of_a, of_that]))
    (block,) = outputs_as_parameters(bb.get())["main"].body.blocks
    assert [binding.var.name for binding in block.bindings] == ["a", "of_a", "of_that", "b", "late"]


def test_any_number_of_results_may_read_one_another():
    kind = relax.TensorType((8,), "float32")
    bb = relax.BlockBuilder()
    x = relax.Var("x", kind)
    copy = bb.add_func(emit.function("copy", [Buffer((8,))] * 2, lambda x, y: emit.copy(y, 0, x, 0, 8, 8)), "copy")
    results: list[relax.Expr] = [x]
    with bb.function("main", [x]):
        with bb.dataflow():
            for _ in range(1200):  # more than Python calls itself
                results.append(bb.emit_output(relax.call_tir(copy, (results[-1],), kind)))
        bb.emit_func_output(relax.Tuple(results[:0:-1]))
    before, after = bb.get(), outputs_as_parameters(bb.get())
    names = [[binding.var.name for binding in mod["main"].body.blocks[0].bindings] for mod in (before, after)]
    assert names[0] == names[1]
