"""Scan and Loop become the nodes of all their steps, where the number of steps is known.

y = Scan(x) {body}   ->   x0 = Gather(x, 0); y0 = body(x0); x1 = Gather(x, 1); y1 = body(x1); ...; y = Concat(y0, y1, ...)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper

NODES = 4096  # compiling takes milliseconds for each: no more than this many for one Scan or Loop


def scan(node: onnx.NodeProto, shapes: Sequence[tuple[int, ...] | None], opset: int) -> onnx.GraphProto | None:
    """A graph with the Scan's operands as its inputs and its results as its outputs; None when it has too many steps or none.

    shapes  of the operands.
    """
    given = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    body, scanned = given["body"], given["num_scan_inputs"]
    states = len(node.input) - scanned
    slots = len(body.output) - states
    axes = given.get("scan_input_axes") or [0] * scanned
    backward = given.get("scan_input_directions") or [0] * scanned
    if opset < 9 or any(shape is None for shape in shapes[states:]):
        return None
    extents = {shape[axis] for shape, axis in zip(shapes[states:], axes, strict=True) if shape}
    if len(extents) != 1:
        return None
    (steps,) = extents
    if not 0 < steps * len(body.node) <= NODES:
        return None
    unrolling = _Unrolling(node, body, opset, states)
    for step in range(steps):
        for name, formal, axis, back in zip(node.input[states:], body.input[states:], axes, backward, strict=True):
            unrolling.take(name, formal.name, axis, steps - 1 - step if back else step, step)
        unrolling.step(step)
    axes = given.get("scan_output_axes") or [0] * slots
    backward = given.get("scan_output_directions") or [0] * slots
    return unrolling.graph(axes, backward)


def loop(node: onnx.NodeProto, values: Mapping[str, np.ndarray], opset: int) -> onnx.GraphProto | None:
    """As `scan`, for a Loop whose number of steps is constant and whose condition is true throughout."""
    (body,) = (attribute.g for attribute in node.attribute if attribute.name == "body")
    trips, condition = node.input[0], node.input[1] if len(node.input) > 1 else ""
    passed = {inner.output[0]: inner.input[0] for inner in body.node if inner.op_type == "Identity"}
    stays = passed.get(body.output[0].name, body.output[0].name) == body.input[1].name
    if trips not in values or (condition and (condition not in values or not values[condition].item())) or not stays:
        return None
    steps = values[trips].item()
    if not 0 < steps * len(body.node) <= NODES:
        return None
    unrolling = _Unrolling(node, body, opset, 0)
    unrolling.now |= {formal.name: name for formal, name in zip(body.input[2:], node.input[2:], strict=True)}
    unrolling.states = [formal.name for formal in body.input[2:]]
    unrolling.results = [output.name for output in body.output[1:]]
    unrolling.constant(f"{node.output[0]}/goes on", np.array(True))
    unrolling.now[body.input[1].name] = f"{node.output[0]}/goes on"
    for step in range(steps):
        unrolling.constant(f"{node.output[0]}/step/{step}", np.array(step, np.int64))
        unrolling.now[body.input[0].name] = f"{node.output[0]}/step/{step}"
        unrolling.step(step)
    slots = len(unrolling.results) - len(unrolling.states)
    return unrolling.graph([0] * slots, [0] * slots)


class _Unrolling:
    def __init__(self, node: onnx.NodeProto, body: onnx.GraphProto, opset: int, states: int) -> None:
        self.node, self.body, self.opset = node, body, opset
        self.place = next(name for name in node.output if name)
        self.nodes: list[onnx.NodeProto] = []
        self.constants = [*body.initializer]
        self.states = [formal.name for formal in body.input[:states]]
        self.results = [output.name for output in body.output]
        self.now = dict(zip(self.states, node.input[:states], strict=True))  # what the body's names stand for at this step
        self.collected: list[list[str]] = []

    def constant(self, name: str, value: np.ndarray) -> None:
        self.constants.append(numpy_helper.from_array(value, name))

    def take(self, source: str, formal: str, axis: int, position: int, step: int) -> None:
        self.now[formal] = f"{self.place}/{formal}/{step}"
        self.constant(f"{self.now[formal]}/at", np.array(position, np.int64))
        self.nodes.append(helper.make_node("Gather", [source, f"{self.now[formal]}/at"], [self.now[formal]], axis=axis))

    def step(self, step: int) -> None:
        for inner in self.body.node:
            self.now |= {name: f"{self.place}/{name}/{step}" for name in inner.output if name}
            self.nodes.append(_renamed(inner, self.now))
        after = [self.now.get(name, name) for name in self.results]
        self.collected.append(after[len(self.states) :])
        self.now |= dict(zip(self.states, after, strict=False))

    def graph(self, axes: Sequence[int], backward: Sequence[int]) -> onnx.GraphProto:
        outputs = [self.now[name] for name in self.states]
        for slot, (axis, back) in enumerate(zip(axes, backward, strict=True)):
            parts = [self._unsqueezed(values[slot], axis, f"{self.place}/scan/{slot}/{step}") for step, values in enumerate(self.collected)]
            outputs.append(f"{self.place}/scan/{slot}")
            self.nodes.append(helper.make_node("Concat", parts[::-1] if back else parts, [outputs[-1]], axis=axis))
        return helper.make_graph(self.nodes, "unrolled", [], [onnx.ValueInfoProto(name=name) for name in outputs], self.constants)

    def _unsqueezed(self, name: str, axis: int, result: str) -> str:
        if self.opset < 13:
            self.nodes.append(helper.make_node("Unsqueeze", [name], [result], axes=[axis]))
        else:
            self.constant(f"{result}/axes", np.array([axis], np.int64))
            self.nodes.append(helper.make_node("Unsqueeze", [name, f"{result}/axes"], [result]))
        return result


def _renamed(node: onnx.NodeProto, names: Mapping[str, str]) -> onnx.NodeProto:
    """With the names that it reads and binds replaced, also where subgraphs read them."""
    renamed = onnx.NodeProto()
    renamed.CopyFrom(node)
    renamed.input[:] = [names.get(name, name) for name in node.input]
    renamed.output[:] = [names.get(name, name) for name in node.output]
    for attribute in renamed.attribute:
        for subgraph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
            own = {value.name for value in (*subgraph.input, *subgraph.initializer)} | {n for inner in subgraph.node for n in inner.output}
            outer = {name: new for name, new in names.items() if name not in own}
            nodes = [_renamed(inner, outer) for inner in subgraph.node]
            del subgraph.node[:]
            subgraph.node.extend(nodes)
            for output in subgraph.output:
                output.name = outer.get(output.name, output.name)
    return renamed
