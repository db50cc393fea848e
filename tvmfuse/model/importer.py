"""TVM's ONNX importer with names, refusals, corrections and recurrent networks added. The only module that calls it."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable

import onnx
import tvm
from onnx import defs
from tvm import relax
from tvm.relax.frontend.onnx.onnx_frontend import ONNXGraphImporter, _get_convert_map

from ..errors import UnsupportedError
from . import operators, recurrent
from .fold import Graph

_RECURRENT = ("GRU", "LSTM", "RNN")


def import_graph(graph: Graph) -> tvm.IRModule:
    """A Relax module whose `main` takes the graph's inputs and returns its outputs, constants embedded, one dataflow block.

    A binding is called as its ONNX node is (as its first output, if the node has no name of its own): `binding.var.name`.
    Raises  UnsupportedError listing every operator that can't be compiled.
    """
    refused = [(node, reason) for node in graph.nodes if (reason := why_not(node, graph))]
    if refused:
        raise UnsupportedError(listing(refused))
    importer = _Importer(graph)
    proto = onnx.GraphProto(node=_named(graph.nodes), input=graph.inputs, output=[onnx.ValueInfoProto(name=name) for name in graph.outputs])
    try:
        mod = importer.from_onnx(proto, graph.opset)
    except BaseException:  # Ctrl-C too
        importer.bb._end_block()  # a builder that dies with an open block writes to stderr
        raise
    return relax.transform.DeadCodeElimination(["main"])(mod)


def why_not(node: onnx.NodeProto, graph: Graph) -> str | None:
    """Why this node can't be compiled, or None."""
    if node.domain not in ("", "ai.onnx"):
        return f"operators of domain {node.domain} aren't known"
    if node.op_type in ("Loop", "Scan"):
        return "how many steps it takes isn't known, or it takes too many"
    converted = node.op_type in operators.CONVERTERS or node.op_type in _RECURRENT or node.op_type in _get_convert_map()
    if not (converted and defs.has(node.op_type, graph.opset, "")):
        return "no converter"
    since = defs.get_schema(node.op_type, graph.opset, "").since_version
    if since > operators.SINCE.get(node.op_type, operators.KNOWN_OPSET):
        return f"its meaning since operator set {since} isn't known"
    values = [name for name in (*node.input, *node.output) if name in graph.types]
    if not all(graph.is_numeric(name) for name in values):
        return "it works on something else than tensors of numbers"
    if any(0 in (graph.shape(name) or ()) for name in values if name not in graph.constants):
        return "a tensor with no elements"
    if node.op_type in _RECURRENT:
        return recurrent.why_not(node, graph)
    if any(graph.data_dependent(name) for name in node.output):
        return "the shape of its output depends on data"
    return operators.why_not(node, graph)


def listing(refused: Iterable[tuple[onnx.NodeProto, str]]) -> str:
    """One line per operator and reason, with the nodes."""
    nodes: dict[tuple[str, str], list[str]] = {}
    for node, reason in refused:
        domain = node.domain or "ai.onnx"
        nodes.setdefault((f"{domain}::{node.op_type}", reason), []).append(node.name or node.output[0])
    lines = [f"  {operator}: {reason} (nodes {', '.join(names)})" for (operator, reason), names in nodes.items()]
    return "these operators can't be compiled; export the model without them:\n" + "\n".join(lines)


def _named(nodes: Iterable[onnx.NodeProto]) -> list[onnx.NodeProto]:
    named, taken = [], set()
    for original in nodes:
        node = onnx.NodeProto()
        node.CopyFrom(original)
        if not node.name or node.name in taken:
            node.name = next(name for name in node.output if name)
        taken.add(node.name)
        named.append(node)
    return named


class _Importer(ONNXGraphImporter):
    def __init__(self, graph: Graph) -> None:
        super().__init__(shape_dict={}, dtype_dict={}, sanitize=False)
        self.graph = graph

    def _parse_graph_initializers(self, graph: onnx.GraphProto) -> None:
        self._nodes |= {name: relax.const(value, str(value.dtype)) for name, value in self.graph.constants.items()}

    def _check_for_unsupported_ops(self, graph: onnx.GraphProto) -> None:
        """`import_graph` has done it: the base class ignores domains and doesn't name nodes."""

    def _construct_nodes(self, graph: onnx.GraphProto) -> None:
        for node in graph.node:
            try:
                with contextlib.redirect_stdout(io.StringIO()):  # the base class prints what it raises
                    super()._construct_nodes(onnx.GraphProto(node=[node]))
                for output in filter(None, node.output):
                    self._nodes[output] = self._checked(node, output, self._nodes[output])
            except UnsupportedError:
                raise
            except Exception as error:  # converters raise whatever Python, NumPy or TVM does
                reason = str(error).strip().splitlines() or [type(error).__name__]
                raise UnsupportedError(listing([(node, f"TVM's importer fails: {reason[-1]}")])) from error

    def _checked(self, node: onnx.NodeProto, output: str, value: relax.Expr) -> relax.Expr:
        if isinstance(value, tvm.ir.Call):
            value = self.bb.emit(value, node.name)
        kind = value.ty
        shape = getattr(kind, "shape", None)
        if shape is None or not all(isinstance(extent, tvm.tirx.IntImm) for extent in shape):
            raise UnsupportedError(listing([(node, "the shape of its output depends on data")]))
        found = tuple(int(extent) for extent in shape), str(kind.dtype.dtype)
        wanted = self.graph.shape(output), self.graph.dtype(output)
        if None not in wanted and found != wanted:
            raise UnsupportedError(listing([(node, f"TVM's importer makes {output!r} {found}, ONNX {wanted}")]))
        return value

    def _convert_operator(self, op_name: str, inputs: list, attrs: dict, opset: int) -> relax.Expr:
        if op_name in operators.COMPOSED and any(_is_half(value) for value in inputs):
            wide = [self.bb.emit(relax.op.astype(value, "float32")) if _is_half(value) else value for value in inputs]
            return relax.op.astype(self.bb.emit(self._converted(op_name, wide, attrs, opset)), "float16")
        return self._converted(op_name, inputs, attrs, opset)

    def _converted(self, op_name: str, inputs: list, attrs: dict, opset: int) -> relax.Expr:
        if op_name in _RECURRENT:
            return recurrent.convert(op_name, self.bb, inputs, attrs)
        if op_name in operators.CONVERTERS:
            attrs["tvm_custom"]["opset"] = opset
            return operators.CONVERTERS[op_name](self.bb, inputs, attrs)
        return super()._convert_operator(op_name, inputs, attrs, opset)


def _is_half(value: relax.Expr | None) -> bool:
    return value is not None and isinstance(value.ty, relax.TensorType) and str(value.ty.dtype.dtype) == "float16"
