"""A model writes its results where its caller wants them.

    main(x): y = call_tir(f, x); return y   ->   main(x, out): y = call_tir_inplace(f, (x, out)) into out; return y

So a call allocates nothing for its results and copies nothing out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

import tvm
from tvm import relax
from tvm.relax import Expr, Function, Var, VarBinding

from ..graph.rewrite import array_of, dtype_of, op_name, substitute


def own_outputs(mod: tvm.IRModule) -> tvm.IRModule:
    """Give each result an operator and a variable of its own, to be run before legalisation.

    A result that is an input, a constant, a field of a tuple, or returned twice is copied (a cast to its own type): no kernel would
    write it, or not to one place only.
    """
    main = mod["main"]
    bound = {binding.var: binding.value for block in main.body.blocks for binding in block.bindings}

    def origin(value: Expr) -> Expr:
        while isinstance(bound.get(value), Var):
            value = bound[value]
        return value

    results = [origin(result) for result in _results(main, bound)]
    builder = relax.BlockBuilder()
    with builder.function("main", list(main.params), attrs=dict(main.attrs)):
        with builder.dataflow():
            replaced: dict[Var, Expr] = {}
            own: list[Expr] = []
            for var, value in bound.items():
                if isinstance(value, Var):
                    replaced[var] = replaced.get(value, value)
                elif var.same_as(main.body.body) and isinstance(value, relax.Tuple):
                    continue  # what gathers the results
                elif var in results and op_name(value) and isinstance(var.ty, relax.TensorType):
                    replaced[var] = builder.emit_output(substitute(value, replaced), var.name)
                else:
                    replaced[var] = builder.emit(substitute(value, replaced), var.name)
            for result in results:
                value = replaced.get(result, result)
                is_output = isinstance(value, Var) and not isinstance(value, relax.DataflowVar) and value not in main.params
                if not is_output or value in own:
                    value = builder.emit_output(_copied(value))
                own.append(value)
        builder.emit_func_output(relax.Tuple(own))
    return _with_main(mod, builder.get()["main"])


def _copied(value: Expr) -> Expr:
    """An operator that writes the value elsewhere. TVM legalises the cast of a constant of rank 0 to that constant."""
    array = array_of(value)
    if array is not None and array.ndim == 0:
        return relax.op.full((), value, dtype_of(value))
    return relax.op.astype(value, dtype_of(value))


def outputs_as_parameters(mod: tvm.IRModule) -> tvm.IRModule:
    """Further parameters of main, one for each result in order, which the kernels of the results write.

    They run as soon as what they read is there: a result permuted at the end would be read from memory that the cache has lost by then.
    """
    main = mod["main"]
    (block,) = main.body.blocks
    results = _results(main, {})
    targets = {result: Var(f"out{position}", result.ty) for position, result in enumerate(results)}
    builder = relax.BlockBuilder()
    with builder.function("main", [*main.params, *targets.values()], attrs=dict(main.attrs)):
        with builder.dataflow():
            replaced: dict[Var, Expr] = {}
            for binding in _results_first(block.bindings, targets):
                value = substitute(binding.value, replaced)
                if binding.var in targets:
                    function, inputs = value.args
                    arguments = relax.Tuple([*inputs.fields, targets[binding.var]])
                    value = relax.op.call_tir_inplace(function, arguments, [len(inputs.fields)], binding.var.ty)
                    replaced[binding.var] = builder.emit_output(value, binding.var.name)
                else:
                    replaced[binding.var] = builder.emit(value, binding.var.name)
        builder.emit_func_output(relax.Tuple([replaced[result] for result in results]))
    return _with_main(mod, builder.get()["main"])


def _results_first(bindings: Sequence[VarBinding], results: Collection[Var]) -> Iterator[VarBinding]:
    """The bindings, each of a result right after the last one that it reads; first those of results that read none."""
    waiting = {binding.var: binding for binding in bindings}
    missing = {result: set(relax.analysis.free_vars(waiting[result].value)) & waiting.keys() for result in results}
    readers: dict[Var, list[Var]] = defaultdict(list)
    for result, reads in missing.items():
        for var in reads:
            readers[var].append(result)
    for first in (*(result for result, reads in missing.items() if not reads), *(binding.var for binding in bindings)):
        ready = [first]
        while ready:
            var = ready.pop()
            if var in waiting:
                yield waiting.pop(var)
                for result in readers[var]:
                    missing[result].discard(var)
                ready += [result for result in reversed(readers[var]) if not missing[result]]


def _results(main: Function, bound: dict[Var, Expr]) -> list[Expr]:
    """What main returns, one by one."""
    body = bound.get(main.body.body, main.body.body)
    return list(body.fields) if isinstance(body, relax.Tuple) else [main.body.body]


def _with_main(mod: tvm.IRModule, main: Function) -> tvm.IRModule:
    mod = mod.clone()
    mod["main"] = main
    return mod
