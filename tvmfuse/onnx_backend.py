"""ONNX's backend interface, so that whoever can drive an `onnx.backend` can drive tvmfuse, ONNX's own test suite first.

    import tvmfuse.onnx_backend as backend
    rep = backend.prepare(model)
    outputs = rep.run([x, y])          # a named tuple, in the order of the model's outputs

tvmfuse compiles for fixed shapes, while ONNX lets some operators read a shape, or how many steps to take, from an input of the model
(Reshape's second operand, Slice's limits, Tile's repeats). Such inputs, and dimensions that the model leaves open, are bound to what
`run` is called with: the model is compiled at the first call, and again when one of them changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import defs, helper, numpy_helper
from onnx.backend.base import Backend, BackendRep, Device, DeviceType, namedtupledict

from .building import build
from .errors import UnsupportedError, UsageError
from .model.load import load
from .session import Session

# Operands whose values decide on the shape of a result or on what is computed, by operator.
READ_BY_VALUE: dict[str, tuple[int, ...]] = {
    **dict.fromkeys("BlackmanWindow ConstantOfShape HammingWindow HannWindow If".split(), (0,)),
    **dict.fromkeys(
        "AffineGrid CenterCropPad CumProd CumSum Expand OneHot Reshape Split Squeeze Tile TopK Trilu Unsqueeze Upsample".split(), (1,)
    ),
    **{f"Reduce{kind}": (1,) for kind in "L1 L2 LogSum LogSumExp Max Mean Min Prod Sum SumSquare".split()},
    **dict.fromkeys("GRU LSTM RNN".split(), (4,)),
    "Col2Im": (1, 2),
    "DFT": (1, 2),
    "Dropout": (2,),
    "Loop": (0, 1),
    "Pad": (1, 3),
    "Range": (0, 1, 2),
    "Resize": (1, 2, 3),
    "STFT": (1, 3),
    "Slice": (1, 2, 3, 4),
}


class TvmfuseRep(BackendRep):
    """A model ready to run. One `Session` for each set of shapes and of values that shapes depend on."""

    def __init__(self, model: onnx.ModelProto, **options: Any) -> None:
        self._model, self._options = model, options
        weights = {tensor.name for tensor in model.graph.initializer}
        self._inputs = [value for value in model.graph.input if value.name not in weights]
        self._by_value = _read_by_value(model.graph)
        self._sessions: dict[Any, Session] = {}
        if not self._by_value and all(_is_static(value) for value in self._inputs):
            self._session({})

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """inputs  a sequence in the model's order, a mapping by name, or the only array. Raises what `Session.run` and `build` raise."""
        feeds = self._feeds(inputs)
        session = self._session(feeds)
        needed = {info.name for info in session.get_inputs()}
        results = session.run(None, {name: array for name, array in feeds.items() if name in needed})
        return namedtupledict("Outputs", [info.name for info in session.get_outputs()])(*results)

    def _feeds(self, inputs: Any) -> dict[str, Any]:
        if isinstance(inputs, Mapping):
            return dict(inputs)
        arrays = list(inputs) if isinstance(inputs, Sequence) else [inputs]
        if len(arrays) > len(self._inputs):
            raise UsageError(f"{len(arrays)} inputs are given, the model has {', '.join(value.name for value in self._inputs) or 'none'}")
        return {value.name: array for value, array in zip(self._inputs, arrays, strict=False)}

    def _session(self, feeds: Mapping[str, Any]) -> Session:
        values = {name: np.asarray(feeds[name]) for name in sorted(self._by_value) if name in feeds}
        open_ = [value.name for value in self._inputs if value.name in feeds and value.name not in values and not _is_static(value)]
        shapes = {name: np.shape(feeds[name]) for name in open_}
        for name, shape in shapes.items():
            if 0 in shape:
                raise UnsupportedError(f"input {name!r} has no elements: its shape is {shape}")
        key = tuple(shapes.items()), tuple((name, value.tobytes(), value.shape, value.dtype.str) for name, value in values.items())
        if key not in self._sessions:
            self._sessions[key] = build(_with_constants(self._model, values), shapes=shapes, **self._options)
        return self._sessions[key]


class TvmfuseBackend(Backend):
    """The class that `onnx.backend.test.BackendTest` takes. Options are those of `tvmfuse.build`."""

    @classmethod
    def is_compatible(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> bool:
        """Whether every operator can be compiled, as far as that shows without the inputs."""
        if _read_by_value(model.graph) or not all(_is_static(value) for value in model.graph.input):
            return True
        try:
            load(model)
        except UnsupportedError:
            return False
        return True

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> TvmfuseRep:
        """Raises  UnsupportedError naming the operators or the device that aren't supported, ModelError for a damaged model."""
        if not cls.supports_device(device):
            raise UnsupportedError(f"device {device!r} isn't supported; 'CPU' is")
        return TvmfuseRep(model, **kwargs)

    @classmethod
    def run_node(
        cls, node: onnx.NodeProto, inputs: Any, device: str = "CPU", outputs_info: Sequence[tuple[Any, Any]] | None = None, **kwargs: Any
    ) -> tuple[Any, ...]:
        """Run one operator. `opset_version` among the options says of which operator set it is; the newest, if absent."""
        arrays = [np.asarray(array) for array in (inputs if isinstance(inputs, Sequence) else [inputs])]
        names = [name for name in node.input if name]
        values = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
            for name, array in zip(names, arrays, strict=True)
        ]
        outputs = [onnx.ValueInfoProto(name=name) for name in node.output if name]
        for output, (dtype, shape) in zip(outputs, outputs_info or (), strict=False):
            output.type.CopyFrom(helper.make_tensor_type_proto(helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape))
        opset = helper.make_opsetid(node.domain, kwargs.pop("opset_version", defs.onnx_opset_version()))
        model = helper.make_model(helper.make_graph([node], "node", values, outputs), opset_imports=[opset])
        return cls.prepare(onnx.shape_inference.infer_shapes(model), device, **kwargs).run(arrays)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        try:
            return Device(device).type == DeviceType.CPU
        except (AttributeError, ValueError):
            return False


is_compatible = TvmfuseBackend.is_compatible
prepare = TvmfuseBackend.prepare
run_model = TvmfuseBackend.run_model
run_node = TvmfuseBackend.run_node
supports_device = TvmfuseBackend.supports_device


def _is_static(value: onnx.ValueInfoProto) -> bool:
    """Also what is no tensor at all: to be refused at once, not when it is run."""
    kind = value.type.tensor_type
    return not value.type.HasField("tensor_type") or (kind.HasField("shape") and all(dim.HasField("dim_value") for dim in kind.shape.dim))


def _read_by_value(graph: onnx.GraphProto) -> set[str]:
    """The graph's inputs from whose values a shape is computed, however many nodes lie between."""
    nodes = list(_nodes(graph))
    wanted = {node.input[i] for node in nodes for i in READ_BY_VALUE.get(node.op_type, ()) if i < len(node.input)}
    for node in reversed(nodes):
        if wanted & set(node.output) and node.op_type not in ("Shape", "Size"):
            wanted.update(node.input)
            wanted.update(output.name for subgraph in _subgraphs(node) for output in subgraph.output)
    return wanted & {value.name for value in graph.input if value.type.HasField("tensor_type")}


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        for subgraph in _subgraphs(node):
            yield from _nodes(subgraph)
        yield node


def _subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        yield from (attribute.g, *attribute.graphs)


def _with_constants(model: onnx.ModelProto, values: Mapping[str, np.ndarray]) -> onnx.ModelProto:
    """The model with these inputs as weights."""
    if not values:
        return model
    bound = onnx.ModelProto()
    bound.CopyFrom(model)
    kept = [value for value in bound.graph.input if value.name not in values]
    del bound.graph.input[:]
    bound.graph.input.extend(kept)
    bound.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in values.items())
    return bound
