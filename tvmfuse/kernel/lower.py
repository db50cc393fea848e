"""Replace each site of a module by calls of its kernels, with its constants packed for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax
from tvm.relax import Expr, Var

from ..graph.rewrite import Rewriter, array_of, constant, is_static, op_name, shape_of, substitute
from ..graph.sites import FoundSite
from ..values import Candidate, Conv2d, Machine, Workload
from . import build_kernel
from .concat import Columns, concatenations, writing
from .emit import redeclared
from .family import Kernel, Launch
from .reordered import Order, order_by, reading, reads_scalars

Choose = Callable[[Workload], Candidate]


@dataclass(frozen=True)
class Lowered:
    """mod      the module with every site replaced; what is left is for the generic schedules.
    kernels  site name -> names of its kernels in the module, in the order in which they run.
    anchors  kernel name -> (flop of one run, passes over its constants), of those that compute an anchor.
    """

    mod: tvm.IRModule
    kernels: dict[str, tuple[str, ...]]
    anchors: dict[str, tuple[int, int]]


def lower_sites(mod: tvm.IRModule, sites: Sequence[FoundSite], choose: Choose, machine: Machine) -> Lowered:
    """main: ... matmul, reshape, add, relu ...  ->  ... call_tir(matmul_add_relu), reshape ...

    Equal workloads with equal candidates share one kernel, and equal constants packed alike are held once. Where all parts of a
    concatenation are results of anchors' kernels, these write it in place (concat.py).
    """
    lowering = _Lowering(mod, sites, choose, machine)
    main = lowering.run(mod["main"])
    lowered = lowering.module(main)
    return Lowered(lowered, lowering.names, lowering.anchors)


class _Lowering(Rewriter):
    def __init__(self, mod: tvm.IRModule, sites: Sequence[FoundSite], choose: Choose, machine: Machine) -> None:
        super().__init__(mod)
        self.names: dict[str, tuple[str, ...]] = {}
        self.anchors: dict[str, tuple[int, int]] = {}
        self._sites = {site.result: site for site in sites}
        self._choose, self._machine = choose, machine
        self._kernels: dict[tuple[Workload, Candidate], Kernel] = {}
        self._functions: dict[tuple[Any, ...], tvm.ir.GlobalVar] = {}
        self._columns: dict[Var, Columns] = {}  # of the sites' results that are written into a concatenation
        for parts in concatenations(mod["main"]):
            if all(part in self._sites and self._writes_rows(self._sites[part], parts[part].width) for part in parts):
                self._columns |= parts
        self._written: dict[Var, Expr] = {}  # concatenation -> the tensor that holds what is written of it so far

    def module(self, main: relax.Function) -> tvm.IRModule:
        mod = self._builder.get()
        mod["main"] = main
        return relax.transform.DeadCodeElimination(["main"])(mod)

    def rewrite(self, value: Expr) -> Expr:
        if self.var in self._written:
            return self._written[self.var]
        site = self._sites.get(self.var)
        if site is None:
            return value
        kernel = self._kernel(site.workload)
        held = {i: self._input(substitute(expr, self.replaced), kernel, i) for i, expr in enumerate(site.inputs)}
        order = self._order(site, kernel, held[0])
        if order:
            held[0] = self.producer(held[0]).args[0]
        shapes = {i: buffer.shape for i, buffer in enumerate(kernel.buffers)} | {i: shape_of(value) for i, value in held.items()}
        if len(kernel.results) == 1:
            shapes[kernel.results[0]] = shape_of(self.var)
        names, results = [], None
        for number, launch in enumerate(kernel.launches):
            columns = self._columns.get(self.var) if launch is kernel.launches[-1] else None
            function = self._function(site.workload, launch, number, [shapes[i] for i in launch.args], columns, order)
            names.append(function.name_hint)
            if launch.flop:
                self.anchors[function.name_hint] = launch.flop, launch.passes
            inputs, outputs = launch.args[: -launch.outputs], launch.args[-launch.outputs :]
            if columns:
                results = self._into(columns, function, [held[i] for i in inputs], shape_of(self.var))
                break
            out = [relax.TensorType(shapes[i], kernel.buffers[i].dtype) for i in outputs]
            results = self.emit(relax.call_tir(function, [held[i] for i in inputs], out if len(out) > 1 else out[0]))
            held |= {outputs[0]: results} if len(out) == 1 else {}
        self.names[site.name] = tuple(names)
        assert results is not None
        return results

    def _writes_rows(self, site: FoundSite, width: int) -> bool:
        """Whether the site's only result comes from its anchor's kernel, whose innermost axis are the columns of the concatenation."""
        kernel = self._kernel(site.workload)
        innermost = kernel.buffers[kernel.results[0]].shape[-1]
        return bool(kernel.launches[-1].flop) and len(kernel.results) == 1 and innermost == width > 1

    def _into(self, columns: Columns, function: tvm.ir.GlobalVar, inputs: list[Expr], shape: tuple[int, ...]) -> Expr:
        """Have a part of a concatenation written. What stands for the part is read by nothing but the concatenation."""
        so_far, ty = self._written.get(columns.whole), relax.TensorType(columns.shape, columns.dtype)
        if so_far is None:
            call = relax.call_tir(function, inputs, ty)
        else:
            call = relax.op.call_tir_inplace(function, relax.Tuple([*inputs, so_far]), [len(inputs)], ty)
        self._written[columns.whole] = self.emit(call, columns.whole.name)
        return relax.DataflowVar(self.name, relax.TensorType(shape, columns.dtype))

    def _input(self, value: Expr, kernel: Kernel, position: int) -> Expr:
        """Packed where it is constant; else as it is stored, before any reshape."""
        array = array_of(value)
        if array is not None:
            return constant(kernel.packers[position](array)) if position in kernel.packers else value
        while op_name(producer := self.producer(value)) == "reshape" and is_static(producer.args[0]):
            value = producer.args[0]
        return value

    def _order(self, site: FoundSite, kernel: Kernel, image: Expr) -> Order | None:
        """Of what `image`, a convolution's input before any reshape, is a permutation of, if nothing else reads it and the kernels read
        single elements."""
        workload, read = site.workload, substitute(site.inputs[0], self.replaced)
        if not isinstance(workload.anchor, Conv2d) or workload.family != "conv2d":
            return None
        order = order_by(self.producer(image), workload.anchor.ci)
        if order is None or not self._alone_reads(read, image):
            return None
        readers = [launch for launch in kernel.launches if 0 in launch.args]
        return order if all(reads_scalars(launch.func, launch.args.index(0)) for launch in readers) else None

    def _alone_reads(self, value: Expr, source: Expr) -> bool:
        """Whether `value`, reshapes of `source` away, and all between have one reader."""
        while self.single_user(value) and not value.same_as(source):
            value = self.producer(value).args[0]
        return self.single_user(value)

    def _kernel(self, workload: Workload) -> Kernel:
        key = workload, self._choose(workload)
        if key not in self._kernels:
            self._kernels[key] = build_kernel(*key, self._machine)
        return self._kernels[key]

    def _function(
        self,
        workload: Workload,
        launch: Launch,
        number: int,
        shapes: Sequence[tuple[int, ...]],
        columns: Columns | None = None,
        order: Order | None = None,
    ) -> tvm.ir.GlobalVar:
        """The launch's function in the module; one for all sites of the workload that store their tensors in the same shapes and order."""
        order = order if 0 in launch.args else None
        key = workload, number, tuple(shapes), (columns.shape, columns.first) if columns else None, order
        if key not in self._functions:
            func = redeclared(launch.func, shapes)
            func = writing(func, columns) if columns else func
            func = reading(func, launch.args.index(0), order) if order else func
            name = f"{func.attrs['global_symbol']}_{workload.hash()}_{number}"
            self._functions[key] = self._builder.add_func(func.without_attr("global_symbol"), name)
        return self._functions[key]
