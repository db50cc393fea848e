"""A model's weights and its workspace come from whoever calls it.

    main(x, out): s = alloc_storage(8192); t = alloc_tensor(s, 0, (16, 64)); conv(x, const, t); ...
    ->  main(x, out, w0, t0): conv(x, w0, t0); ...

To be run on a main that is lowered to VM code. A library that holds constants holds them twice once it is loaded, and a virtual
machine allocates, views and frees each intermediate anew in every call. As parameters, weights are held once, in a file that is
mapped, and one workspace serves all calls. The checks of main's own parameters go too: a session checks what it is given.

Which tensors share memory is decided here as well: TVM's plan gives each tensor a whole block that another one no longer needs
(MobileNetV2: 8.6 MB of blocks, 6.0 MB in use at most), and what a model touches beyond the caches it has to fetch in every call.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Call, GenericConst
from tvm.relax import Expr, Var

from ..graph.rewrite import array_of, dtype_of, numpy_has, op_name, shape_of, substitute
from ..values import View, aligned

CHECKS = ("vm.builtin.check_tensor_info", "vm.builtin.match_shape")


@dataclass(frozen=True)
class Memory:
    """views  of main's last parameters, in their order. weights: distinct ones. workspace: its size in bytes."""

    views: tuple[View, ...]
    weights: tuple[np.ndarray, ...]
    workspace: int


def memory_as_parameters(mod: tvm.IRModule) -> tuple[tvm.IRModule, Memory]:
    """The module with the new main, and what its last parameters have to be."""
    main = mod["main"]
    bindings = [binding for block in main.body.blocks for binding in block.bindings]
    tensors = [b.var for b in bindings if isinstance(b.value, Call) and _callee(b.value) == "vm.alloc_tensor"]
    places, workspace = packed(tensors_in(bindings, main.body.body)) if all(numpy_has(dtype_of(tensor)) for tensor in tensors) else ({}, 0)
    lifting = _Lifting(places)
    blocks = [relax.BindingBlock([b for binding in block.bindings for b in lifting.rewrite(binding)]) for block in main.body.blocks]
    body = relax.SeqExpr(blocks, substitute(main.body.body, lifting.replaced))
    mod = mod.clone()
    mod["main"] = relax.Function([*main.params, *lifting.params.values()], body, main.ret_ty, main.is_pure, main.attrs)
    return mod, Memory(tuple(lifting.params), tuple(array for _, array in lifting.weights.values()), workspace)


@dataclass(frozen=True)
class Tensor:
    """size  in bytes. first, last: the steps between which its content counts, both included."""

    size: int
    first: int
    last: int


def tensors_in(bindings: Sequence[relax.VarBinding], result: Expr) -> dict[Var, Tensor]:
    """What straight-line code allocates. Whatever is made from a tensor, a view or a tuple, keeps it alive."""
    made_of: dict[Var, set[Var]] = {}
    found: dict[Var, Tensor] = {}

    def use(value: Expr, step: int) -> set[Var]:
        owners = set().union(*(made_of.get(var, ()) for var in relax.analysis.free_vars(value)))
        for owner in owners:
            found[owner] = replace(found[owner], last=step)
        return owners

    for step, binding in enumerate(bindings):
        match _callee(binding.value) if isinstance(binding.value, Call) else None:
            case "vm.alloc_tensor":
                size = math.prod(shape_of(binding.var)) * np.dtype(dtype_of(binding.var)).itemsize
                made_of[binding.var] = {binding.var}
                found[binding.var] = Tensor(aligned(size), step, step)
            case "vm.kill_object":
                pass
            case _:
                made_of[binding.var] = use(binding.value, step)
    use(result, len(bindings))
    return found


def packed(tensors: Mapping[Var, Tensor]) -> tuple[dict[Var, int], int]:
    """An offset for each, such that none overlaps another of the same time, and the size of the whole.

    The largest first, each into the smallest gap that holds it: Pisarchyk and Lee, Efficient Memory Management for Deep Neural Net
    Inference, 2020, section 5.2.
    """
    offsets: dict[Var, int] = {}
    for var, tensor in sorted(tensors.items(), key=lambda item: -item[1].size):
        beside = [other for other in offsets if tensors[other].first <= tensor.last and tensor.first <= tensors[other].last]
        gaps, end = [], 0
        for start, stop in sorted((offsets[other], offsets[other] + tensors[other].size) for other in beside):
            if start - end >= tensor.size:
                gaps.append((start - end, end))
            end = max(end, stop)
        offsets[var] = min(gaps)[1] if gaps else end
    return offsets, max((offsets[var] + tensor.size for var, tensor in tensors.items()), default=0)


class _Lifting:
    """places  byte offsets in the workspace; a tensor that has none stays with the virtual machine, which allocates it in each call."""

    def __init__(self, places: Mapping[Var, int]) -> None:
        self._places = places
        self.params: dict[View, Var] = {}
        self.weights: dict[str, tuple[int, np.ndarray]] = {}  # by content: equal ones are held once
        self.replaced: dict[Var, Expr] = {}
        self._views: dict[Var, View] = {}  # by the parameter that stands for it

    def rewrite(self, binding: relax.VarBinding) -> list[relax.VarBinding]:
        """What is left of a binding: itself with its operands replaced, or nothing."""
        value = substitute(binding.value, self.replaced)
        if isinstance(value, Var):
            self.replaced[binding.var] = value
            return []
        if not isinstance(value, Call):
            return [relax.VarBinding(binding.var, value)]
        match _callee(value):
            case "vm.alloc_storage" if self._places:
                return []
            case "vm.alloc_tensor" if binding.var in self._places:
                view = View(None, self._places[binding.var], shape_of(binding.var), dtype_of(binding.var))
                self.replaced[binding.var] = self._param(view)
                return []
            case "vm.kill_object" if self._places:
                return []
            case "vm.builtin.reshape" if value.args[0] in self._views:
                whole = self._views[value.args[0]]
                view = View(whole.weight, whole.offset, shape_of(binding.var), dtype_of(binding.var))
                self.replaced[binding.var] = self._param(view)
                return []
            case name if name in CHECKS:
                return []
        args = [self._lifted(arg) for arg in value.args]
        return [relax.VarBinding(binding.var, Call(value.op, args, value.attrs, value.ty_args))]

    def _lifted(self, value: Expr) -> Expr:
        array = array_of(value) if isinstance(value, GenericConst) else None
        if array is None:
            return value
        content = hashlib.sha256(array.reshape(-1).view(np.uint8)).hexdigest()
        number, _ = self.weights.setdefault(content, (len(self.weights), array))
        return self._param(View(number, 0, array.shape, str(array.dtype)))

    def _param(self, view: View) -> Var:
        if view not in self.params:
            var = Var(f"held{len(self.params)}", relax.TensorType(view.shape, view.dtype))
            self.params[view], self._views[var] = var, view
        return self.params[view]


def _callee(call: Call) -> Any:
    return str(call.op.global_symbol) if isinstance(call.op, relax.ExternFunc) else op_name(call)
