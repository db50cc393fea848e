"""Compute what bound shapes make constant, with ONNX's own shape inference and reference implementation, one node at a time.

Folded are integers and booleans (Shape, Gather, Concat, ... of shapes), floats that are only made or moved (Constant,
ConstantOfShape, Transpose, ...), and weights stored in types that TVM doesn't take, where they become ones that it does (4 bits by
DequantizeLinear, bfloat16 by Cast). Other float *arithmetic* on weights stays in the graph: a float32 fold here would round more
often than the one float64 fold that follows. Only where a shape is computed in floats (a Resize's scales, a Cast to
integers) are operations folded that IEEE 754 rounds exactly, so that the result doesn't depend on the machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import defs, helper, inliner, numpy_helper
from onnx.checker import ValidationError
from onnx.reference import ReferenceEvaluator
from onnx.shape_inference import InferenceError, infer_node_outputs

from ..errors import ModelError, UnsupportedError
from . import unroll
from .safety import array

# Operators that copy their data operand and do no arithmetic on it. Expand and Tile are left out: they would inflate weights.
_MOVES = frozenset("Concat Constant ConstantOfShape Flatten Gather Identity Pad Reshape Slice Split Squeeze Transpose Unsqueeze".split())
_EXACT = frozenset("Abs Add Cast Ceil Div Floor Max Min Mul Neg Relu Round Sqrt Sub".split())
_WIDEN = frozenset(("Cast", "DequantizeLinear"))  # with one rounding of IEEE 754
_READ_FLOAT_SHAPES = frozenset(("Range", "Resize", "Upsample"))
# Operators that are taken apart into those that ONNX defines them by, because TVM has no converter for them or a wrong one.
BY_DEFINITION = frozenset(
    "Attention BlackmanWindow CastLike CausalConvWithState CenterCropPad HammingWindow HannWindow LinearAttention "
    "MeanVarianceNormalization NegativeLogLikelihoodLoss RotaryEmbedding SoftmaxCrossEntropyLoss SwiGLU".split()
)
_RANDOM = frozenset("Bernoulli Multinomial RandomNormal RandomNormalLike RandomUniform RandomUniformLike".split())
LARGEST = 2**31 - 1  # elements of a tensor
_SHAPE_SIZED = 1024  # elements: no shape computation needs more, and shape inference is handed no larger values


@dataclass(frozen=True)
class Graph:
    """What is left to compile: nodes in topological order over inputs and constants.

    types  of every value that ONNX could infer, for the checks that follow.
    """

    nodes: tuple[onnx.NodeProto, ...]
    inputs: tuple[onnx.ValueInfoProto, ...]
    outputs: tuple[str, ...]
    constants: Mapping[str, np.ndarray]
    types: Mapping[str, onnx.TypeProto]
    opset: int

    def shape(self, name: str) -> tuple[int, ...] | None:
        return static_shape(self.types.get(name))

    def dtype(self, name: str) -> str | None:
        elem_type = self.types[name].tensor_type.elem_type if name in self.types else 0
        return str(helper.tensor_dtype_to_np_dtype(elem_type)) if elem_type else None

    def is_numeric(self, name: str) -> bool:
        """A dense tensor of NumPy's own numbers: no string, sequence, optional, bfloat16 or 4 bit type."""
        kind = self.types[name]
        elem_type = kind.tensor_type.elem_type
        if not elem_type or elem_type == onnx.TensorProto.STRING:
            return False
        dtype = helper.tensor_dtype_to_np_dtype(elem_type)
        return dtype.isbuiltin == 1 and dtype.kind in "iubf"

    def data_dependent(self, name: str) -> bool:
        """Inputs are static, so a rank that is known with an extent that isn't comes from values."""
        return name in self.types and self.types[name].tensor_type.HasField("shape") and self.shape(name) is None


def static_shape(kind: onnx.TypeProto | None) -> tuple[int, ...] | None:
    """The extents, or None when any of them or the rank is unknown."""
    if kind is None or not kind.tensor_type.HasField("shape"):
        return None
    dims = kind.tensor_type.shape.dim
    return tuple(dim.dim_value for dim in dims) if all(dim.HasField("dim_value") for dim in dims) else None


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


def fold(model: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]]) -> Graph:
    """Bind the inputs' `shapes` and fold.

    Rewrite  Shape(x) -> Gather -> Concat(., -1) -> Reshape(y, .)   =>   Reshape(y, constant)
             Dropout(x), Identity(x)   =>   x
             If(constant)              =>   the branch that is taken
    Raises   ModelError when the bound shapes don't fit together, naming the node; UnsupportedError for a tensor too large to hold.
    """
    if model.functions:
        model = inliner.inline_local_functions(model)
    return _Fold(model, shapes).graph()


class _Fold:
    def __init__(self, model: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.opsets = list(model.opset_import)
        self.opset = next((entry.version for entry in self.opsets if entry.domain in ("", "ai.onnx")), 1)
        self.source = model.graph
        self.constants: dict[str, np.ndarray] = {}
        self.tentative: dict[str, np.ndarray] = {}  # known floats that stay in the graph unless a shape reads them
        self.types: dict[str, onnx.TypeProto] = {}
        self.aliases: dict[str, str] = {}
        self.kept: list[onnx.NodeProto] = []
        self.outputs = {output.name for output in model.graph.output}
        self.inputs = []
        for declared in model.graph.input:
            if declared.name in shapes:
                kind = helper.make_tensor_type_proto(declared.type.tensor_type.elem_type, shapes[declared.name])
                self.inputs.append(helper.make_value_info(declared.name, kind))
                self._type(declared.name, kind)

    def graph(self) -> Graph:
        for tensor in self.source.initializer:
            self._know(tensor.name, array(tensor))
        for node in self.source.node:
            self._visit(node)
        needed = set(self.outputs)
        nodes: list[onnx.NodeProto] = []
        for node in reversed(self.kept):
            if needed & (set(node.output) - self.constants.keys()):
                self._forget_unused(node, needed)
                needed.update(node.input)
                nodes.append(node)
        return Graph(
            nodes=tuple(reversed(nodes)),
            inputs=tuple(self.inputs),
            outputs=tuple(output.name for output in self.source.output),
            constants={name: value for name, value in self.constants.items() if name in needed},
            types=self.types,
            opset=self.opset,
        )

    @staticmethod
    def _forget_unused(node: onnx.NodeProto, needed: set[str]) -> None:
        outputs = [name if name in needed else "" for name in node.output]
        while outputs[-1] == "":
            outputs.pop()
        node.output[:] = outputs

    def _type(self, name: str, kind: onnx.TypeProto) -> None:
        """What has no elements is known as soon as its shape is."""
        self.types[name] = kind
        shape = static_shape(kind)
        if shape is not None and math.prod(shape) > LARGEST:
            raise UnsupportedError(f"{name!r} of shape {shape} has more than {LARGEST} elements")
        if shape is not None and 0 in shape and _numpy_kind(kind) in "iubf":
            self._know(name, np.zeros(shape, helper.tensor_dtype_to_np_dtype(kind.tensor_type.elem_type)))

    def _know(self, name: str, value: np.ndarray) -> None:
        self.constants[name] = value
        self.types[name] = helper.make_tensor_type_proto(helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)

    def _visit(self, original: onnx.NodeProto) -> None:
        node = onnx.NodeProto()
        node.CopyFrom(original)
        node.input[:] = [self.aliases.get(name, name) for name in original.input]
        if node.domain not in ("", "ai.onnx"):
            self.kept.append(node)
        elif node.op_type == "Identity" or (node.op_type == "Dropout" and not self._trains(node)):
            self._rename(node.output[0], node.input[0])
            for mask in node.output[1:]:
                self._know(mask, np.ones(static_shape(self.types.get(node.input[0])) or (), bool))
        elif node.op_type == "If" and node.input[0] in self.constants:
            self._take_branch(node)
        elif body := self._unrolled(node):
            for name, result in zip(node.output, self._inlined(body, next(filter(None, node.output))), strict=True):
                self._rename(name, result)
        elif body := self._by_definition(node):
            for name, result in zip(filter(None, node.output), self._inlined(body, next(filter(None, node.output))), strict=True):
                self._rename(name, result)
        else:
            if node.op_type == "Concat":  # nothing comes of what has no elements
                solid = [name for name in node.input if 0 not in (static_shape(self.types.get(name)) or ())]
                node.input[:] = solid or node.input[:1]
            elif node.op_type == "Range":
                node.input[:] = [self._scalar(name) for name in node.input]
            self._infer(node)
            if not self._folded(node):
                self.kept.append(node)

    def _trains(self, node: onnx.NodeProto) -> bool:
        return len(node.input) > 2 and bool(self.constants.get(node.input[2], True))

    def _rename(self, name: str, source: str) -> None:
        """Let `name` mean `source` from here on. A graph output keeps its name: it gets a node of its own."""
        if name in self.outputs:
            self.kept.append(helper.make_node("Identity", [source], [name]))
            self._type(name, self.types.get(source, onnx.TypeProto()))
        else:
            self.aliases[name] = source

    def _take_branch(self, node: onnx.NodeProto) -> None:
        branch = attributes(node)["then_branch" if self.constants[node.input[0]].item() else "else_branch"]
        for name, result in zip(node.output, self._inlined(branch, node.output[0]), strict=True):
            self._rename(name, result)

    def _inlined(self, body: onnx.GraphProto, place: str) -> list[str]:
        """Put a subgraph's nodes here and return what its outputs are called now. Its names are put under `place`, which makes them its
        own: branches of different Ifs may use equal ones."""
        for tensor in body.initializer:
            self.aliases[tensor.name] = f"{place}/{tensor.name}"
            self._know(self.aliases[tensor.name], array(tensor))
        for inner in body.node:
            renamed = onnx.NodeProto()
            renamed.CopyFrom(inner)
            renamed.output[:] = [name and f"{place}/{name}" for name in inner.output]
            self._visit(renamed)
            self.aliases |= {old: self.aliases.get(new, new) for old, new in zip(inner.output, renamed.output, strict=True) if old}
        return [self.aliases.get(output.name, output.name) for output in body.output]

    def _unrolled(self, node: onnx.NodeProto) -> onnx.GraphProto | None:
        """A Scan or Loop of a known number of steps as the nodes of all of them, under names of their own; else None."""
        if node.op_type == "Scan":
            return unroll.scan(node, [static_shape(self.types.get(name)) for name in node.input], self.opset)
        return unroll.loop(node, self.constants, self.opset) if node.op_type == "Loop" else None

    def _by_definition(self, node: onnx.NodeProto) -> onnx.GraphProto | None:
        """The operator's body in simpler ones as ONNX defines it for these operands, or None."""
        if node.op_type not in BY_DEFINITION or any(name and name not in self.types for name in node.input):
            return None
        schema: Any = defs.get_schema(node.op_type, self.opset, "")  # onnx's type stubs don't know all of it
        call = onnx.NodeProto()
        call.CopyFrom(node)
        given = attributes(node)
        call.attribute.extend(
            attribute.default_value for name, attribute in schema.attributes.items() if name not in given and attribute.default_value.name
        )
        if schema.context_dependent_function_opset_versions:
            version = max(since for since in schema.context_dependent_function_opset_versions if since <= self.opset)
            types = [self.types.get(name, onnx.TypeProto()).SerializeToString() for name in node.input]
            text = schema.get_context_dependent_function_with_opset_version(version, call.SerializeToString(), types)
        else:
            text = schema.get_function_with_opset_version(max(since for since in schema.function_opset_versions if since <= self.opset))
        if not text:  # it has no such body for these operands
            return None
        function = onnx.FunctionProto()
        function.ParseFromString(text)
        del function.opset_import[:]
        function.opset_import.extend(self.opsets)
        function.domain = call.domain = "definition"
        operands = [helper.make_value_info(name, self.types[name]) for name in dict.fromkeys(filter(None, node.input))]
        results = [onnx.ValueInfoProto(name=name) for name in filter(None, node.output)]
        imports = [*self.opsets, helper.make_opsetid("definition", 1)]
        graph = helper.make_graph([call], "definition", operands, results)
        return inliner.inline_local_functions(helper.make_model(graph, opset_imports=imports, functions=[function])).graph

    def _infer(self, node: onnx.NodeProto) -> None:
        if any(name and name not in self.types for name in node.input) or node.op_type in ("If", "Loop", "Scan"):
            return
        try:
            schema = defs.get_schema(node.op_type, self.opset, "")
        except defs.SchemaError:
            return
        known = {
            name: numpy_helper.from_array(np.asarray(value), name)
            for name in node.input
            if name and (value := self._value(name)) is not None and value.size <= _SHAPE_SIZED
        }
        kinds = {name: self.types[name] for name in node.input if name}
        operands = ", ".join(f"{name} {static_shape(kind)}" for name, kind in kinds.items())
        try:
            inferred = infer_node_outputs(schema, node, kinds, known, opset_imports=self.opsets)
        except (InferenceError, ValidationError, ValueError) as error:
            raise ModelError(f"{described(node)} doesn't fit its inputs {operands}: {error}") from error
        for name, kind in inferred.items():
            self._type(name, kind)
        shapes = {name: shape for name in node.output if (shape := static_shape(self.types.get(name))) is not None}
        source = static_shape(kinds[node.input[0]]) if node.op_type == "Reshape" else None  # inference takes a full target as it is
        if any(extent < 0 for shape in shapes.values() for extent in shape) or (
            source is not None and any(math.prod(shape) != math.prod(source) for shape in shapes.values())
        ):
            raise ModelError(f"{described(node)} doesn't fit its inputs {operands}: it would make {shapes}. Are the shapes bound right?")

    def _scalar(self, name: str) -> str:
        """ONNX's own AffineGrid hands tensors of one element to Range, which wants them to have no axis."""
        value = self._value(name)
        if value is None or value.shape != (1,):
            return name
        self._know(f"{name}/scalar", value.reshape(()))
        return f"{name}/scalar"

    def _value(self, name: str) -> np.ndarray | None:
        return self.constants.get(name, self.tentative.get(name))

    def _folded(self, node: onnx.NodeProto) -> bool:
        """Compute the node if the rules above allow; True when it is no longer needed."""
        names = [name for name in node.input if name]
        outputs = [name for name in node.output if name]
        if node.op_type in _RANDOM:
            return False
        if all(name in self.constants for name in outputs):  # they have no elements
            return True
        if node.op_type in ("Shape", "Size"):
            extents = static_shape(self.types.get(names[0]))
            values = {} if extents is None else {names[0]: np.broadcast_to(np.zeros((), np.float32), extents)}
        else:
            values = {name: value for name in names if (value := self._value(name)) is not None}
        if node.op_type in _READ_FLOAT_SHAPES:
            self.constants |= {name: self.tentative[name] for name in names if name in self.tentative}
        if len(values) < len(set(names)) or any(name not in self.types for name in outputs):
            return False
        kinds = {_numpy_kind(self.types[name]) for name in outputs}
        certain = all(name in self.constants or node.op_type in ("Shape", "Size") for name in names)
        of_nothing = any(value.size == 0 for value in values.values())  # a sum over no elements, a padding of none
        widened = node.op_type in _WIDEN and values[names[0]].dtype.isbuiltin != 1  # such a type is none of NumPy's own
        if kinds <= set("iub") or (kinds <= set("iubf") and (node.op_type in _MOVES or of_nothing or widened) and certain):
            results = self._evaluate(node, values, outputs)
            for name, value in results.items():
                self._know(name, value)
            return bool(results)
        if kinds == {"f"} and node.op_type in _EXACT | _MOVES and max(value.size for value in values.values()) <= _SHAPE_SIZED:
            self.tentative |= self._evaluate(node, values, outputs)
        return False

    def _evaluate(self, node: onnx.NodeProto, values: Mapping[str, np.ndarray], outputs: list[str]) -> dict[str, np.ndarray]:
        """The outputs by name; empty when ONNX's reference doesn't implement the operator."""
        infos = [[helper.make_value_info(name, onnx.TypeProto()) for name in names] for names in (values, outputs)]
        alone = helper.make_model(helper.make_graph([node], "fold", infos[0], infos[1]), opset_imports=self.opsets)
        try:
            results = ReferenceEvaluator(alone).run(None, dict(values))
        except NotImplementedError:
            return {}
        except Exception as error:  # the reference raises whatever NumPy does
            raise ModelError(f"{described(node)} can't be computed from its constant inputs: {error}") from error
        return {name: np.asarray(value) for name, value in zip(outputs, results, strict=True)}


def _numpy_kind(kind: onnx.TypeProto) -> str:
    elem_type = kind.tensor_type.elem_type
    return helper.tensor_dtype_to_np_dtype(elem_type).kind if elem_type and elem_type != onnx.TensorProto.STRING else "?"


def described(node: onnx.NodeProto) -> str:
    """The node as messages call it: operator, with its domain if it has one, and name."""
    operator = f"{node.domain}::{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type
    return f"{operator} {node.name or node.output[0]!r}"
