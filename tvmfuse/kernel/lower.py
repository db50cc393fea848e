"""Replace each site of a module by calls of its kernels, with its constants packed for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tvm
from tvm import relax
from tvm.relax import Expr, Var

from ..graph.rewrite import Rewriter, array_of, constant, reshape, substitute
from ..graph.sites import FoundSite
from ..values import Candidate, Machine, Workload
from . import FAMILIES
from .family import Kernel

Choose = Callable[[Workload], Candidate]


@dataclass(frozen=True)
class Lowered:
    """mod      the module with every site replaced; what is left is for the generic schedules.
    kernels  site name -> names of its kernels in the module, in the order in which they run.
    """

    mod: tvm.IRModule
    kernels: dict[str, tuple[str, ...]]


def lower_sites(mod: tvm.IRModule, sites: Sequence[FoundSite], choose: Choose, machine: Machine) -> Lowered:
    """main: ... matmul, reshape, add, relu ...  ->  ... call_tir(matmul_add_relu), reshape ...

    Equal workloads with equal candidates share one kernel, and equal constants packed alike are held once.
    """
    lowering = _Lowering(mod, sites, choose, machine)
    main = lowering.run(mod["main"])
    lowered = lowering.module(main)
    return Lowered(lowered, lowering.names)


class _Lowering(Rewriter):
    def __init__(self, mod: tvm.IRModule, sites: Sequence[FoundSite], choose: Choose, machine: Machine) -> None:
        super().__init__(mod)
        self.names: dict[str, tuple[str, ...]] = {}
        self._sites = {site.result: site for site in sites}
        self._choose, self._machine = choose, machine
        self._kernels: dict[tuple[Workload, Candidate], tuple[Kernel, tuple[tvm.ir.GlobalVar, ...]]] = {}

    def module(self, main: relax.Function) -> tvm.IRModule:
        mod = self._builder.get()
        mod["main"] = main
        return relax.transform.DeadCodeElimination(["main"])(mod)

    def rewrite(self, value: Expr) -> Expr:
        site = self._sites.get(self.var)
        if site is None:
            return value
        kernel, functions = self._kernel(site.workload)
        self.names[site.name] = tuple(function.name_hint for function in functions)
        held: dict[int, Expr] = {}
        for position, expr in enumerate(site.inputs):
            held[position] = self._input(substitute(expr, self.replaced), kernel, position)
        results: Expr | None = None
        for launch, function in zip(kernel.launches, functions, strict=True):
            arguments = [held[i] for i in launch.args[: -launch.outputs]]
            out = [relax.TensorType(kernel.buffers[i].shape, kernel.buffers[i].dtype) for i in launch.args[-launch.outputs :]]
            results = self.emit(relax.call_tir(function, arguments, out if len(out) > 1 else out[0]))
            if launch.outputs == 1:
                held[launch.args[-1]] = results
        assert results is not None
        return results if launch.outputs > 1 else reshape(results, _shape(self.var))

    def _input(self, value: Expr, kernel: Kernel, position: int) -> Expr:
        array = array_of(value)
        if position in kernel.packers and array is not None:
            return constant(kernel.packers[position](array))
        return self.emit(reshape(value, kernel.buffers[position].shape))

    def _kernel(self, workload: Workload) -> tuple[Kernel, tuple[tvm.ir.GlobalVar, ...]]:
        candidate = self._choose(workload)
        key = workload, candidate
        if key not in self._kernels:
            kernel = FAMILIES[workload.family].kernel(workload, candidate, self._machine)
            functions = tuple(
                self._builder.add_func(
                    launch.func.without_attr("global_symbol"), f"{launch.func.attrs['global_symbol']}_{workload.hash()}_{i}"
                )
                for i, launch in enumerate(kernel.launches)
            )
            self._kernels[key] = kernel, functions
        return self._kernels[key]


def _shape(var: Var) -> tuple[int, ...]:
    return tuple(int(extent) for extent in var.ty.shape.values)
