"""A float32 model in float64: what its outputs would be with next to no rounding."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, TensorProto, helper, numpy_helper

# Inputs that ONNX wants in float32 whatever the data's type is.
FLOAT32_ONLY = {"Resize": (2,), "Upsample": (1,)}


def double(model: ModelProto) -> ModelProto:
    """A copy in which every float32 tensor, constant, cast and value is float64."""
    copy = ModelProto()
    copy.CopyFrom(model)
    _spell_out_lrn(copy)
    kept = {
        node.input[i]
        for graph in _graphs(copy.graph)
        for node in graph.node
        for i in FLOAT32_ONLY.get(node.op_type, ())
        if i < len(node.input)
    }
    for graph in _graphs(copy.graph):
        for tensor in graph.initializer:
            if tensor.name not in kept:
                _widen(tensor)
        for value in (*graph.input, *graph.output, *graph.value_info):
            if value.type.tensor_type.elem_type == TensorProto.FLOAT and value.name not in kept:
                value.type.tensor_type.elem_type = TensorProto.DOUBLE
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.TENSOR and not kept.intersection(node.output):
                    _widen(attribute.t)
                elif node.op_type == "Cast" and attribute.name == "to" and attribute.i == TensorProto.FLOAT:
                    attribute.i = TensorProto.DOUBLE
    return copy


def _spell_out_lrn(model: ModelProto) -> None:
    """LRN as ops that TVM's importer takes in float64.

    Rewrite  y = LRN(x)  ->  y = x / (k + alpha / size * Conv(x * x, band)) ** beta,  band (C, C, 1, 1) ones over the window's channels
    """
    if not any(node.op_type == "LRN" for node in model.graph.node):
        return
    inferred = onnx.shape_inference.infer_shapes(model).graph
    channels = {v.name: v.type.tensor_type.shape.dim[1].dim_value for v in (*inferred.input, *inferred.value_info) if _rank(v) > 1}
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        if node.op_type != "LRN":
            nodes.append(node)
            continue
        given = {"alpha": 1e-4, "beta": 0.75, "bias": 1.0} | {a.name: helper.get_attribute_value(a) for a in node.attribute}
        x, y, size = node.input[0], node.output[0], given["size"]
        offset = np.subtract.outer(np.arange(channels[x]), np.arange(channels[x]))
        band = (offset <= (size - 1) // 2) & (-offset <= size // 2)
        constants = {"band": band[..., None, None], "scale": given["alpha"] / size, "bias": given["bias"], "beta": given["beta"]}
        model.graph.initializer.extend(numpy_helper.from_array(np.asarray(v, np.float32), f"{y}/{name}") for name, v in constants.items())
        steps = (("Mul", x, x), ("Conv", 0, "band"), ("Mul", 1, "scale"), ("Add", 2, "bias"), ("Pow", 3, "beta"), ("Div", x, 4))
        for i, (op, first, second) in enumerate(steps):
            reads = [f"{y}/{read}" if read in constants or isinstance(read, int) else read for read in (first, second)]
            nodes.append(helper.make_node(op, reads, [y if i == len(steps) - 1 else f"{y}/{i}"]))
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def _rank(value: onnx.ValueInfoProto) -> int:
    return len(value.type.tensor_type.shape.dim)


def _widen(tensor: TensorProto) -> None:
    if tensor.data_type == TensorProto.FLOAT:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name))


def _graphs(graph: GraphProto) -> Iterator[GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*attribute.graphs, *([attribute.g] if attribute.type == onnx.AttributeProto.GRAPH else [])):
                yield from _graphs(inner)
