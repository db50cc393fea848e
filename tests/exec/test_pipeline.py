"""tvmfuse inside stock TVM: as a Relax pipeline of tvm.compile, and its pass alone."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax

import tvmfuse
from tvmfuse.measure.host import host_target


def module() -> tvm.IRModule:
    """relu(reshape(x @ w) + b) with constant w and b."""
    rng = np.random.default_rng(0)
    w, b = (relax.const(rng.standard_normal(shape, np.float32)) for shape in ((8, 20), (5,)))
    x = relax.Var("x", relax.TensorType((3, 8), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            split = builder.emit(relax.op.reshape(builder.emit(relax.op.matmul(x, w)), (3, 4, 5)))
            y = builder.emit_output(relax.op.nn.relu(builder.emit(relax.op.add(split, b))))
        builder.emit_func_output(y)
    return builder.get()


def run(executable: relax.VMExecutable, x: np.ndarray) -> np.ndarray:
    return relax.VirtualMachine(executable, tvm.cpu())["main"](tvm.runtime.tensor(x)).numpy()


def test_as_a_pipeline_of_tvm_compile() -> None:
    x = np.random.default_rng(1).standard_normal((3, 8), np.float32)
    expected = run(tvm.compile(module(), tvm.target.Target({"kind": "llvm"})), x)
    target = host_target()
    executable = tvm.compile(module(), target, relax_pipeline=tvmfuse.pipeline(target))
    np.testing.assert_allclose(run(executable, x), expected, rtol=1e-5, atol=1e-6)


def test_the_pass_alone_lets_stock_tvm_fuse_across_the_reshape() -> None:
    def kernels(mod: tvm.IRModule) -> set[str]:
        target = tvm.target.Target({"kind": "llvm"})
        with target:
            lowered = relax.get_default_pipeline(target)(mod)
        return {var.name_hint for var, func in lowered.functions.items() if isinstance(func, tvm.tirx.PrimFunc)}

    assert "fused_reshape_add_relu" in kernels(module())
    assert "fused_matmul_add_relu" in kernels(tvmfuse.HoistEpilogue()(module()))
