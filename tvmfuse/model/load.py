"""A model becomes a Relax module with static shapes and embedded weights."""

from __future__ import annotations

import os
from dataclasses import dataclass

import onnx
import tvm
from onnx import helper
from tvm import relax, tirx

from ..errors import ModelError, UnsupportedError, UsageError
from ..values import TensorInfo
from . import safety
from .fold import fold, static_shape
from .importer import import_graph
from .shapes import Dim, Shapes, bind


@dataclass(frozen=True)
class Loaded:
    """`mod["main"]` has one dataflow block, static shapes and its weights as constants; a single output is no tuple."""

    mod: tvm.IRModule
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]


def load(model: str | os.PathLike[str] | onnx.ModelProto | tvm.IRModule, shapes: Shapes | None = None) -> Loaded:
    """Read, check, bind and import.

    model   path to .onnx, onnx.ModelProto, or tvm.IRModule (Relax).
    shapes  binds free dimensions by name, {"S": 1}, or whole inputs, {"x": (1, 3, 224, 224)}.
    Raises  ModelError (damaged, or a dimension stays free), UsageError (`shapes` doesn't fit), UnsupportedError (operators).
    """
    if isinstance(model, tvm.IRModule):
        return _load_relax(model, shapes)
    if not isinstance(model, str | os.PathLike | onnx.ModelProto):
        raise UsageError(f"a model is a path, an onnx.ModelProto or a tvm.IRModule, not {type(model).__name__}")
    proto = safety.read(model)
    weights = {tensor.name for tensor in proto.graph.initializer}
    declared = {}
    for value in proto.graph.input:
        if not value.type.HasField("tensor_type"):
            raise UnsupportedError(f"input {value.name!r} is a {value.type.WhichOneof('value')}, not a tensor")
        if value.name not in weights:  # IR version 3 lists weights among the inputs
            declared[value.name] = _declared(value.type.tensor_type)
    called = "model" if isinstance(model, onnx.ModelProto) else f'"{os.fspath(model)}"'
    graph = fold(proto, bind(declared, shapes, called))
    for value in graph.inputs:
        if not graph.is_numeric(value.name):
            kind = onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type)
            raise UnsupportedError(f"input {value.name!r} is a tensor of {kind}; numbers of 8 to 64 bits and bool are supported")
    mod = import_graph(graph)
    inputs = tuple(
        TensorInfo(value.name, static_shape(value.type) or (), str(helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)))
        for value in graph.inputs
    )
    return Loaded(mod, inputs, _outputs(mod, graph.outputs))


def _declared(kind: onnx.TypeProto.Tensor) -> tuple[Dim, ...] | None:
    if not kind.HasField("shape"):
        return None
    return tuple(_declared_dim(dim) for dim in kind.shape.dim)


def _declared_dim(dim: onnx.TensorShapeProto.Dimension) -> Dim:
    """-1 and "?", which no variable can be called, are how exporters write a dimension without a name."""
    if dim.HasField("dim_value") and dim.dim_value >= 0:
        return dim.dim_value
    return dim.dim_param if dim.dim_param not in ("", "?") else None


def _load_relax(mod: tvm.IRModule, shapes: Shapes | None) -> Loaded:
    names = {var.name_hint for var in mod.get_global_vars()}
    if "main" not in names or not isinstance(mod["main"], relax.Function):
        raise ModelError(f"the module has no Relax function main; it has {', '.join(sorted(names)) or 'none'}")
    if mod["main"].attrs and "params" in mod["main"].attrs:
        mod, params = relax.frontend.detach_params(mod)
        weights = dict(zip(mod["main"].params[-len(params["main"]) :], params["main"], strict=True))
        mod = relax.transform.BindParams("main", weights)(mod)
    for var in mod["main"].params:
        if not isinstance(var.ty, relax.TensorType) or var.ty.shape is None:
            raise UnsupportedError(f"input {var.name!r} is {var.ty}, not a tensor of known rank")
    declared = {var.name: tuple(_dim(extent) for extent in var.ty.shape) for var in mod["main"].params}
    bound = bind(declared, shapes, "module")
    symbols = {var.name for var in relax.analysis.defined_symbolic_vars(mod["main"])}
    values = {dim: extent for name, dims in declared.items() for dim, extent in zip(dims, bound[name], strict=True) if dim in symbols}
    mod = relax.transform.BindSymbolicVars(values, "main")(mod) if values else mod
    mod = tvm.transform.Sequential([relax.transform.Normalize(), relax.transform.ConvertToDataflow(1)])(mod)
    main = mod["main"]
    if len(main.body.blocks) != 1 or not isinstance(main.body.blocks[0], relax.DataflowBlock):
        raise UnsupportedError("main isn't one dataflow block: it has control flow or impure calls")
    for var in [*main.params, *(binding.var for binding in main.body.blocks[0].bindings)]:
        if not _is_static(var.ty):
            raise UnsupportedError(f"the shape of {var.name!r} depends on data: {var.ty}")
    for var in main.params:
        if _extents(var) != bound[var.name]:
            raise UsageError(f"shapes gives {var.name!r} {bound[var.name]}, but its other dimensions make it {_extents(var)}")
    inputs = tuple(TensorInfo(var.name, _extents(var), str(var.ty.dtype.dtype)) for var in main.params)
    count = len(main.ret_ty.fields) if isinstance(main.ret_ty, relax.TupleType) else 1
    return Loaded(mod, inputs, _outputs(mod, [f"output_{i}" for i in range(count)]))


def _is_static(kind: tvm.ir.Type) -> bool:
    if isinstance(kind, relax.TupleType):
        return all(_is_static(field) for field in kind.fields)
    return not isinstance(kind, relax.TensorType) or (
        kind.shape is not None and all(isinstance(extent, tirx.IntImm) for extent in kind.shape)
    )


def _dim(extent: tirx.Expr) -> Dim:
    return int(extent) if isinstance(extent, tirx.IntImm) else str(extent)


def _extents(value: relax.Expr) -> tuple[int, ...]:
    return tuple(int(extent) for extent in value.ty.shape)


def _outputs(mod: tvm.IRModule, names: list[str] | tuple[str, ...]) -> tuple[TensorInfo, ...]:
    kind = mod["main"].ret_ty
    fields = kind.fields if isinstance(kind, relax.TupleType) else [kind]
    infos = tuple(
        TensorInfo(name, tuple(int(extent) for extent in field.shape), str(field.dtype.dtype))
        for name, field in zip(names, fields, strict=True)
    )
    for info in infos:
        if 0 in info.shape:
            raise UnsupportedError(f"output {info.name!r} has no elements: its shape is {info.shape}")
    return infos
