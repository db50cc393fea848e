"""A model's weights and its workspace come from whoever calls it.

    main(x, out): s = alloc_storage(8192); t = alloc_tensor(s, 0, (16, 64)); conv(x, const, t); ...
    ->  main(x, out, w0, t0): conv(x, w0, t0); ...

To be run on a main that is lowered to VM code. A library that holds constants holds them twice once it is loaded, and a virtual
machine allocates, views and frees each intermediate anew in every call. As parameters, weights are held once, in a file that is
mapped, and one workspace serves all calls. The checks of main's own parameters go too: a session checks what it is given.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
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
    lifting = _Lifting(workspace_too=all(numpy_has(dtype_of(tensor)) for tensor in tensors))
    blocks = [relax.BindingBlock([b for binding in block.bindings for b in lifting.rewrite(binding)]) for block in main.body.blocks]
    body = relax.SeqExpr(blocks, substitute(main.body.body, lifting.replaced))
    mod = mod.clone()
    mod["main"] = relax.Function([*main.params, *lifting.params.values()], body, main.ret_ty, main.is_pure, main.attrs)
    return mod, Memory(tuple(lifting.params), tuple(array for _, array in lifting.weights.values()), lifting.workspace)


class _Lifting:
    """workspace_too  unless it holds a type that NumPy doesn't have: then main allocates in each call."""

    def __init__(self, workspace_too: bool) -> None:
        self._workspace_too = workspace_too
        self.params: dict[View, Var] = {}
        self.weights: dict[str, tuple[int, np.ndarray]] = {}  # by content: equal ones are held once
        self.workspace = 0
        self.replaced: dict[Var, Expr] = {}
        self._storage: dict[Var, int] = {}
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
            case "vm.alloc_storage" if self._workspace_too:
                self._storage[binding.var] = self.workspace
                self.workspace += aligned(math.prod(int(extent) for extent in value.args[0].values))
                return []
            case "vm.alloc_tensor" if value.args[0] in self._storage:
                offset = self._storage[value.args[0]] + int(value.args[1])
                self.replaced[binding.var] = self._param(View(None, offset, shape_of(binding.var), dtype_of(binding.var)))
                return []
            case "vm.kill_object" if value.args[0] in self._storage or value.args[0] in self._views:
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
