"""tvmfuse inside stock TVM: as a Relax pipeline of tvm.compile, and its pass alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax.frontend import nn

import tvmfuse
from tvmfuse import graph, kernel
from tvmfuse.choose import Chooser
from tvmfuse.decide.log import Log, Record
from tvmfuse.graph.sites import find_sites, recurrences
from tvmfuse.measure.host import host, host_target, machine, toolchain
from tvmfuse.values import Verdict


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


class Head(nn.Module):
    """silu(relu(reshape(x @ up + bias)) @ down), in TVM's own front end."""

    def __init__(self) -> None:
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 10, bias=False)

    def main(self, x: nn.Tensor) -> nn.Tensor:
        hidden = nn.op.relu(nn.op.reshape(self.up(x), (4, 2, 12)))
        return nn.op.silu(self.down(nn.op.reshape(hidden, (4, 24))))


def compiled(mod: tvm.IRModule) -> relax.VMExecutable:
    target = host_target()
    return tvm.compile(mod, target, relax_pipeline=tvmfuse.pipeline(target))


def test_a_module_of_the_nn_front_end() -> None:
    mod, params = Head().export_tvm({"main": {"x": nn.spec.Tensor((4, 16), "float32")}})
    rng = np.random.default_rng(2)
    weights = {name: rng.standard_normal(param.shape).astype("float32") for name, param in params}
    bound = relax.transform.BindParams("main", {name: tvm.runtime.tensor(w) for name, w in weights.items()})(mod)
    x = rng.standard_normal((4, 16)).astype("float32")
    hidden = np.maximum(x @ weights["up.weight"].T + weights["up.bias"], 0)
    last = hidden @ weights["down.weight"].T
    np.testing.assert_allclose(run(compiled(bound), x), last / (1 + np.exp(-last)), rtol=1e-5, atol=1e-5)


def exported() -> tuple[tvm.IRModule, np.ndarray, np.ndarray]:
    """As the PyTorch and StableHLO front ends write a module: NCHW, layout ops between, a tuple of results. Its weights and bias."""
    rng = np.random.default_rng(3)
    weights, bias = rng.standard_normal((6, 3, 1, 1)).astype("float32"), rng.standard_normal((1, 6, 1)).astype("float32")
    x = relax.Var("x", relax.TensorType((1, 3, 4, 5), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            pointwise = builder.emit(relax.op.nn.conv2d(x, relax.const(weights)))
            flat = builder.emit(relax.op.reshape(pointwise, (1, 6, 20)))
            biased = builder.emit(relax.op.add(flat, relax.const(bias)))
            rows = builder.emit(relax.op.permute_dims(builder.emit(relax.op.nn.relu(biased)), (0, 2, 1)))
            results = builder.emit_output(relax.Tuple([rows, builder.emit(relax.op.reshape(rows, (20, 6)))]))
        builder.emit_func_output(results)
    return builder.get(), weights, bias


def test_a_module_as_the_pytorch_front_end_writes_it() -> None:
    mod, weights, bias = exported()
    x = np.random.default_rng(4).standard_normal((1, 3, 4, 5)).astype("float32")
    expected = np.maximum(np.einsum("oi,bihw->bohw", weights[:, :, 0, 0], x).reshape(1, 6, 20) + bias, 0).transpose(0, 2, 1)
    first, second = relax.VirtualMachine(compiled(mod), tvm.cpu())["main"](tvm.runtime.tensor(x))
    np.testing.assert_allclose(first.numpy(), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(second.numpy(), expected[0], rtol=1e-5, atol=1e-5)


def kernels(executable: relax.VMExecutable, x: np.ndarray) -> list[str]:
    """Those that a call launches."""
    vm, launched = relax.VirtualMachine(executable, tvm.cpu()), list[str]()

    def watch(_func: object, name: str, before_run: bool, *_: object) -> None:
        if before_run and not name.startswith("vm."):
            launched.append(name)

    vm.set_instrument(watch)
    vm["main"](tvm.runtime.tensor(x))
    return launched


def from_stablehlo() -> tvm.IRModule:
    """relu((x @ w).reshape(3, 4, 5) + b) of JAX, as TVM's StableHLO front end writes it: each broadcast is an op of its own."""
    rng = np.random.default_rng(6)
    w, b = (relax.const(rng.standard_normal(shape, np.float32)) for shape in ((8, 20), (5,)))
    x = relax.Var("arg0", relax.TensorType((3, 8), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            split = builder.emit(relax.op.reshape(builder.emit(relax.op.matmul(x, w)), (3, 4, 5)))
            once = builder.emit(relax.op.broadcast_to(b, (1, 1, 5)))
            biased = builder.emit(relax.op.add(split, builder.emit(relax.op.broadcast_to(once, (3, 4, 5)))))
            zero = builder.emit(relax.op.broadcast_to(relax.const(0.0, "float32"), (3, 4, 5)))
            y = builder.emit_output(builder.emit(relax.op.maximum(biased, zero)))
        builder.emit_func_output(y)
    return builder.get()


def test_a_module_as_the_stablehlo_front_end_writes_it_is_one_kernel() -> None:
    x = np.random.default_rng(7).standard_normal((3, 8), np.float32)
    executable = compiled(from_stablehlo())
    expected = run(tvm.compile(from_stablehlo(), tvm.target.Target({"kind": "llvm"})), x)
    np.testing.assert_allclose(run(executable, x), expected, rtol=1e-5, atol=1e-6)
    assert len(kernels(executable, x)) == 1


@pytest.mark.parametrize("made", [module, from_stablehlo])
def test_what_was_measured_here_decides_also_for_a_target_that_names_this_cpu(made: Callable[[], tvm.IRModule], tmp_path: Path) -> None:
    mod, target = made(), host_target()
    for _, phase in graph.PHASES:
        mod = phase()(mod)
    (site,) = find_sites(mod["main"], recurrences(mod))
    here = machine(target, 1)
    apart = next(c for c in kernel.candidates(site.workload, here) if c.placement == "separate")
    won = Verdict("wins", apart, 0.9, (0.88, 0.93), 0.001, 15, "for this test")
    conditions = Chooser("measured", here, host=host(), toolchain=toolchain()).conditions(site.workload)
    Log([tmp_path]).append(Record.of(site.workload, won, conditions))
    x = np.random.default_rng(8).standard_normal((3, 8), np.float32)
    measured = tvm.compile(made(), target, relax_pipeline=tvmfuse.pipeline(target, logs=tmp_path))
    plain = tvm.compile(made(), target, relax_pipeline=tvmfuse.pipeline(target, fuse="always"))
    assert (len(kernels(measured, x)), len(kernels(plain, x))) == (2, 1)
    assert run(measured, x).tobytes() == run(plain, x).tobytes()


def test_the_pass_alone_keeps_what_the_module_computes() -> None:
    x = np.random.default_rng(5).standard_normal((3, 8), np.float32)
    target = tvm.target.Target({"kind": "llvm"})
    plain, hoisted = (run(tvm.compile(mod, target), x) for mod in (module(), tvmfuse.HoistEpilogue()(module())))
    assert plain.tobytes() == hoisted.tobytes()
