"""Random ONNX graphs around anchors, drawn by hypothesis, each value with its reference and the bound of its error.

An anchor, a chain of layout and epilogue operations, residuals, values with several users, outputs in the middle, two anchors that feed
one operation, constants and run-time operands of every shape that broadcasts. Extents are small, and no multiples of a vector.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import scipy.special
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from tests.exec.bounded import Bounded, Format, added, bilinear, divided, extremum, monotone, multiplied, rounded, steep

OPSET = 20
Pair = tuple[int, int]
Draw = Callable[[st.SearchStrategy[Any]], Any]


@dataclass(frozen=True)
class Value:
    """A tensor of the model, and what its elements have to be for the model's own inputs."""

    name: str
    is_: Bounded

    @property
    def shape(self) -> tuple[int, ...]:
        return self.is_.shape


@dataclass
class Network:
    """Several independent graphs as one model, with inputs for it."""

    fmt: Format
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: list[onnx.TensorProto] = field(default_factory=list)
    feeds: dict[str, np.ndarray] = field(default_factory=dict)
    outputs: dict[str, Bounded] = field(default_factory=dict)
    count: int = 0

    def model(self) -> onnx.ModelProto:
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(self.fmt.dtype))
        inputs = [helper.make_tensor_value_info(name, kind, array.shape) for name, array in self.feeds.items()]
        outputs = [helper.make_tensor_value_info(name, kind, bounded.shape) for name, bounded in self.outputs.items()]
        graph = helper.make_graph(self.nodes, "random", inputs, outputs, self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=9)

    def __repr__(self) -> str:
        return onnx.printer.to_text(self.model())

    def fresh(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def emit(self, op: str, inputs: Sequence[Value | str], result: Bounded, **attributes: Any) -> Value:
        names = [value if isinstance(value, str) else value.name for value in inputs]
        value = Value(self.fresh(), result)
        self.nodes.append(helper.make_node(op, names, [value.name], name=value.name, **attributes))
        return value

    def constant(self, array: np.ndarray) -> Value:
        name = self.fresh()
        stored = array.astype(self.fmt.dtype) if array.dtype.kind == "f" else array
        self.weights.append(numpy_helper.from_array(stored, name))
        return Value(name, Bounded.exact(stored))

    def parameter(self, array: np.ndarray) -> Value:
        name = self.fresh()
        self.feeds[name] = array.astype(self.fmt.dtype)
        return Value(name, Bounded.exact(self.feeds[name]))


class Author:
    """Draws one graph into a network."""

    def __init__(self, draw: Draw, network: Network) -> None:
        self.draw, self.net, self.fmt = draw, network, network.fmt
        self.numbers = np.random.default_rng(draw(st.integers(0, 1 << 32)))

    def one_of(self, *options: Any) -> Any:
        return self.draw(st.sampled_from(options))

    def chance(self, percent: int) -> bool:
        return self.draw(st.integers(0, 99)) < percent

    def array(self, shape: Sequence[int], scale: float = 1.0) -> np.ndarray:
        return scale * self.numbers.standard_normal(shape)

    def data(self, array: np.ndarray) -> Value:
        return self.net.constant(array) if self.chance(60) else self.net.parameter(array)

    # anchors

    def matmul(self, shape: tuple[int, int]) -> Value:
        (m, n), k = shape, self.one_of(1, 2, 3, 7, 16, 19)
        a = self.net.parameter(self.array((m, k)))
        b = self.data(self.array((k, n), 1 / math.sqrt(k)))
        return self.net.emit("MatMul", [a, b], bilinear(np.matmul, a.is_, b.is_, k, self.fmt))

    def batched(self, shape: tuple[int, int]) -> Value:
        (m, n), k, batch = shape, self.one_of(1, 5, 16), self.one_of(1, 2, 3)
        a = self.net.parameter(self.array((batch, m, k)))
        b = self.data(self.array(self.one_of((k, n), (batch, k, n), (1, k, n)), 1 / math.sqrt(k)))
        return self.net.emit("MatMul", [a, b], bilinear(np.matmul, a.is_, b.is_, k, self.fmt))

    def gemm(self, shape: tuple[int, int]) -> Value:
        (m, n), k = shape, self.one_of(1, 3, 16)
        flags = {
            "transA": self.one_of(0, 1),
            "transB": self.one_of(0, 1),
            "alpha": self.one_of(1.0, 0.5, -1.25),
            "beta": self.one_of(1.0, 2.0),
        }
        a = self.net.parameter(self.array((k, m) if flags["transA"] else (m, k)))
        b = self.data(self.array((n, k) if flags["transB"] else (k, n), 1 / math.sqrt(k)))
        turned = [x.is_.moved(np.transpose) if flags[flag] else x.is_ for x, flag in ((a, "transA"), (b, "transB"))]
        left = multiplied(turned[0], Bounded.exact(np.array(flags["alpha"])), self.fmt)
        product = bilinear(np.matmul, left, turned[1], k, self.fmt)
        if self.chance(25):
            return self.net.emit("Gemm", [a, b], product, **flags)
        c = self.data(self.array(self.one_of((), (1,), (n,), (1, n), (m, 1), (m, n), (1, 1))))
        scaled = multiplied(c.is_, Bounded.exact(np.array(flags["beta"])), self.fmt)
        return self.net.emit("Gemm", [a, b, c], added(product, scaled, self.fmt), **flags)

    def conv(self, shape: tuple[int, int]) -> Value:
        """Channels as many as columns; an image of about as many pixels as rows."""
        rows, channels = shape
        groups = self.one_of(1, 1, *(g for g in (2, 3, channels) if channels % g == 0))
        per_group = self.one_of(1, 3) if groups < channels else 1
        kh, kw = self.one_of((1, 1), (1, 1), (3, 3), (1, 3), (2, 1))
        strides, dilations = self.one_of((1, 1), (1, 1), (2, 1)), self.one_of((1, 1), (1, 1), (1, 2))
        pads = tuple(self.one_of(0, 1) for _ in range(4)) if (kh, kw) != (1, 1) else (0, 0, 0, 0)
        h, w = 1 + dilations[0] * (kh - 1) + (rows - 1) // 3, 1 + dilations[1] * (kw - 1) + 2
        x = self.net.parameter(self.array((self.one_of(1, 1, 2), groups * per_group, h, w)))
        terms = per_group * kh * kw
        weight = self.net.constant(self.array((channels, per_group, kh, kw), 1 / math.sqrt(terms)))

        def product(image: np.ndarray, filters: np.ndarray) -> np.ndarray:
            return convolved(image, filters, strides, pads, dilations, groups)

        result, inputs = bilinear(product, x.is_, weight.is_, terms, self.fmt), [x, weight]
        if self.chance(60):
            bias = self.net.constant(self.array((channels,)))
            inputs.append(bias)
            result = added(result, bias.is_.moved(lambda b: b.reshape(-1, 1, 1)), self.fmt)
        return self.net.emit("Conv", inputs, result, strides=strides, pads=pads, dilations=dilations, group=groups)

    def transposed(self, shape: tuple[int, int]) -> Value:
        rows, channels = shape
        groups = self.one_of(1, *(g for g in (2, channels) if channels % g == 0))
        ci, per_group = groups * self.one_of(1, 2), channels // groups
        kh, kw = self.one_of((1, 1), (2, 2), (3, 3), (1, 3))
        strides = self.one_of((1, 1), (2, 2), (1, 2))
        pads = tuple(self.one_of(0, 1) if k > 1 else 0 for k in (kh, kw, kh, kw))
        x = self.net.parameter(self.array((1, ci, (rows - 1) // 4 + 2, 3)))
        weight = self.net.constant(self.array((ci, per_group, kh, kw), 1 / math.sqrt(kh * kw)))

        def product(image: np.ndarray, filters: np.ndarray) -> np.ndarray:
            return scattered(image, filters, strides, pads, groups)

        result, inputs = bilinear(product, x.is_, weight.is_, ci // groups * kh * kw, self.fmt), [x, weight]
        if self.chance(60):
            bias = self.net.constant(self.array((channels,)))
            inputs.append(bias)
            result = added(result, bias.is_.moved(lambda b: b.reshape(-1, 1, 1)), self.fmt)
        return self.net.emit("ConvTranspose", inputs, result, strides=strides, pads=pads, group=groups)

    def einsum(self, shape: tuple[int, int]) -> Value:
        (m, n), k, b = shape, self.one_of(1, 3, 16), self.one_of(1, 2)
        equation, left, right = self.one_of(
            ("mk,kn->mn", (m, k), (k, n)),
            ("bmk,kn->bmn", (b, m, k), (k, n)),
            ("bkm,nk->bmn", (b, k, m), (n, k)),
            ("mbk,bkn->mbn", (m, b, k), (b, k, n)),
            ("bmk,bnk->bmn", (b, m, k), (b, n, k)),
        )
        a, w = self.net.parameter(self.array(left)), self.data(self.array(right, 1 / math.sqrt(k)))
        result = bilinear(lambda x, y: np.einsum(equation, x, y), a.is_, w.is_, k, self.fmt)
        return self.net.emit("Einsum", [a, w], result, equation=equation)

    # layout

    def reshape(self, x: Value) -> Value:
        shape = self.factored(math.prod(x.shape))
        told = list(shape)
        if self.chance(30):
            told[self.draw(st.integers(0, len(told) - 1))] = -1
        elif self.chance(30):
            told = [0 if at < len(x.shape) and extent == x.shape[at] else extent for at, extent in enumerate(shape)]
        return self.net.emit("Reshape", [x, self.net.constant(np.array(told, np.int64))], x.is_.moved(lambda a: a.reshape(shape)))

    def factored(self, total: int) -> tuple[int, ...]:
        """A shape of `total` elements, of up to five axes."""
        factors = self.draw(st.permutations([1, *primes(total)]))
        shape = [1] * self.draw(st.integers(1, min(4, len(factors))))
        for factor in factors:
            shape[self.draw(st.integers(0, len(shape) - 1))] *= factor
        if self.chance(25):
            shape.insert(self.draw(st.integers(0, len(shape))), 1)
        return tuple(shape)

    def transpose(self, x: Value) -> Value:
        axes = self.draw(st.permutations(range(len(x.shape))))
        return self.net.emit("Transpose", [x], x.is_.moved(lambda a: a.transpose(axes)), perm=axes)

    def unsqueeze(self, x: Value) -> Value:
        axis = self.draw(st.integers(0, len(x.shape)))
        axes = self.net.constant(np.array([axis], np.int64))
        return self.net.emit("Unsqueeze", [x, axes], x.is_.moved(lambda a: np.expand_dims(a, axis)))

    def squeeze(self, x: Value) -> Value:
        single = [axis for axis, extent in enumerate(x.shape) if extent == 1]
        if not single:
            return self.unsqueeze(x)
        axis = self.one_of(*single)
        axes = self.net.constant(np.array([axis], np.int64))
        return self.net.emit("Squeeze", [x, axes], x.is_.moved(lambda a: np.squeeze(a, axis)))

    def flatten(self, x: Value) -> Value:
        axis = self.draw(st.integers(0, len(x.shape)))
        shape = math.prod(x.shape[:axis]), math.prod(x.shape[axis:])
        return self.net.emit("Flatten", [x], x.is_.moved(lambda a: a.reshape(shape)), axis=axis)

    # epilogue

    def unary(self, x: Value) -> Value:
        op, attributes, function, slope = self.one_of(*UNARY)
        fmt = max(self.fmt, Format("float32"), key=lambda f: f.unit) if op in SHORT_PARAMETERS else self.fmt
        result = steep(function, x.is_, fmt, slope) if slope else monotone(function, x.is_, fmt)
        return self.net.emit(op, [x], result, **attributes)

    def clip(self, x: Value) -> Value:
        low, high = self.one_of((-0.5, 0.75), (0.0, 6.0), (None, 0.5), (0.25, None), (-1.0, None), (1.0, -1.0))
        bounds = ["" if bound is None else self.net.constant(np.array(bound)) for bound in (low, high)]
        function = lambda a: np.minimum(np.maximum(a, -np.inf if low is None else low), np.inf if high is None else high)  # noqa: E731
        return self.net.emit("Clip", [x, *bounds], monotone(function, x.is_, self.fmt))

    def prelu(self, x: Value) -> Value:
        slope = self.data(self.array(self.beside(x.shape), 0.5))
        factor = np.broadcast_to(slope.is_.value, x.shape)
        error = np.maximum(1, np.abs(factor)) * x.is_.error
        value = np.where(x.is_.value < 0, x.is_.value * factor, x.is_.value)
        reach = np.maximum(1, np.abs(factor)) * np.abs(x.is_.value)
        return self.net.emit("PRelu", [x, slope], rounded(value, error, reach, self.fmt))

    def half(self, x: Value) -> Value:
        """Through float16 and back."""
        narrow = monotone(lambda a: a, x.is_, Format("float16"), 1)
        once = self.net.emit("Cast", [x], narrow, to=onnx.TensorProto.FLOAT16)
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(self.fmt.dtype))
        return self.net.emit("Cast", [once], narrow, to=kind)

    def square(self, x: Value) -> Value:
        two = self.net.constant(np.array(2.0))
        return self.net.emit("Pow", [x, two], multiplied(x.is_, x.is_, self.fmt))

    def normalised(self, x: Value) -> Value:
        """Batch normalisation over axis 1, in the form that a converter leaves."""
        if len(x.shape) < 2:
            return self.unary(x)
        channels = x.shape[1]
        scale, bias, mean = (self.array((channels,)) for _ in range(3))
        variance = 0.5 + self.numbers.random(channels)
        given = [self.net.constant(a) for a in (scale, bias, mean, variance)]
        along = (-1, *(1,) * (len(x.shape) - 2))
        s, b, m, v = (g.is_.value.reshape(along) for g in given)
        factor = s / np.sqrt(v + float(np.float32(1e-5)))  # attributes are float32
        reach = np.abs(factor) * (np.abs(x.is_.value) + np.abs(m)) + np.abs(b)
        result = rounded((x.is_.value - m) * factor + b, np.abs(factor) * x.is_.error, reach, self.fmt, 12)
        return self.net.emit("BatchNormalization", [x, *given], result, epsilon=1e-5)

    def binary(self, x: Value, others: Sequence[Value]) -> Value:
        """With a constant, a run-time operand or an earlier value, on either side."""
        same = [other for other in others if other.shape == x.shape]
        op = self.one_of("Add", "Add", "Add", "Sub", "Mul", "Mul", "Div", "Max", "Min")
        if same and self.chance(40):
            y = self.one_of(*same)
        else:
            y = self.data(self.away(self.array(self.beside(x.shape))) if op == "Div" else self.array(self.beside(x.shape)))
        a, b = (y, x) if self.chance(35) else (x, y)
        if op in ("Max", "Min"):
            result = extremum(np.maximum if op == "Max" else np.minimum, a.is_, b.is_)
        else:
            how: Mapping[str, Callable[..., Bounded]] = {
                "Add": added, "Sub": lambda p, q, f: added(p, q, f, -1), "Mul": multiplied, "Div": divided,
            }  # fmt: skip
            result = how[op](a.is_, b.is_, self.fmt)
        return self.net.emit(op, [a, b], result)

    @staticmethod
    def away(array: np.ndarray) -> np.ndarray:
        """From zero, as a divisor should be."""
        return np.sign(array) * (np.abs(array) + 0.5)

    def beside(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A shape that broadcasts to `shape`."""
        kept = tuple(extent if self.chance(60) else 1 for extent in shape)
        return kept[self.draw(st.integers(0, len(kept))) if self.chance(50) else 0 :]

    def up(self, x: Value) -> Value:
        """An operand that makes the result larger than the anchor's."""
        y = self.data(self.array((2, *(3 if extent == 1 else 1 for extent in x.shape))))
        return self.net.emit("Add", [x, y], added(x.is_, y.is_, self.fmt))

    def mean(self, x: Value) -> Value:
        """A reader that is no part of a chain."""
        value, error, reach = (a.mean(-1, keepdims=True) for a in (x.is_.value, x.is_.error, np.abs(x.is_.value)))
        result = rounded(value, error, reach, self.fmt, x.shape[-1] + 8)
        axes = self.net.constant(np.array([-1], np.int64))
        return self.net.emit("ReduceMean", [x, axes], result, keepdims=1)

    def graph(self) -> None:
        anchors = [self.matmul, self.matmul, self.batched, self.gemm, self.conv, self.conv, self.transposed, self.einsum]
        shape = self.one_of(1, 3, 6, 13), self.one_of(1, 3, 4, 8, 17, 24, 33)
        values = [self.one_of(*anchors)(shape)]
        if self.chance(30):
            values.append(self.one_of(*anchors)(shape))
        steps = [
            *[self.reshape] * 3, *[self.transpose] * 2, self.unsqueeze, self.squeeze, self.flatten,
            *[self.unary] * 4, self.clip, self.prelu, self.normalised, self.square, self.half, self.up, self.mean,
        ]  # fmt: skip
        for _ in range(self.draw(st.integers(1, 8))):
            x = values[-self.one_of(*(at for at in (1, 1, 1, 1, 2, 3) if at <= len(values)))]
            if self.chance(40) or math.prod(x.shape) > 20_000:
                values.append(self.binary(x, values))
            else:
                values.append(self.one_of(*steps)(x))
        self.returned(values)

    def returned(self, values: Sequence[Value]) -> None:
        """The last of them, and some in the middle."""
        for value in values[:-1]:
            if self.chance(12):
                self.net.outputs[value.name] = value.is_
        self.net.outputs[values[-1].name] = values[-1].is_


def sigmoid(x: np.ndarray) -> np.ndarray:
    return scipy.special.expit(x)


# Operator, attributes, function, and its largest slope where it isn't monotone.
UNARY: list[tuple[str, dict[str, Any], Callable[[np.ndarray], np.ndarray], float | None]] = [
    ("Relu", {}, lambda x: np.maximum(x, 0), None),
    ("Sigmoid", {}, sigmoid, None),
    ("Tanh", {}, np.tanh, None),
    ("Erf", {}, scipy.special.erf, None),
    ("Exp", {}, np.exp, None),
    ("Softplus", {}, lambda x: np.logaddexp(0, x), None),
    ("LeakyRelu", {"alpha": 0.125}, lambda x: np.where(x < 0, 0.125 * x, x), None),
    ("HardSigmoid", {"alpha": 0.25, "beta": 0.5}, lambda x: np.clip(0.25 * x + 0.5, 0, 1), 0.25),
    ("HardSwish", {}, lambda x: x * np.clip(x / 6 + 0.5, 0, 1), 1.5),
    ("Elu", {"alpha": 0.5}, lambda x: np.where(x < 0, 0.5 * np.expm1(np.minimum(x, 0)), x), 1.0),
    ("Selu", {}, lambda x: 1.0507009873554805 * np.where(x < 0, 1.6732632423543772 * np.expm1(np.minimum(x, 0)), x), 1.76),
    ("Gelu", {}, lambda x: 0.5 * x * (1 + scipy.special.erf(x / math.sqrt(2))), 1.13),
    ("Mish", {}, lambda x: x * np.tanh(np.logaddexp(0, x)), 1.1),
    ("Neg", {}, np.negative, 1.0),
    ("Abs", {}, np.abs, 1.0),
]  # fmt: skip


# Their parameters have eight digits in some converters and sixteen in others.
SHORT_PARAMETERS = {"Selu", "HardSwish"}


def primes(number: int) -> list[int]:
    found, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            found.append(divisor)
            number //= divisor
        divisor += 1
    return found


def convolved(
    x: np.ndarray, w: np.ndarray, strides: Sequence[int], pads: Sequence[int], dilations: Sequence[int], groups: int
) -> np.ndarray:
    """ONNX's Conv of NCHW images."""
    top, left, bottom, right = pads
    padded = np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right)))
    reach = [d * (k - 1) + 1 for d, k in zip(dilations, w.shape[2:], strict=True)]
    windows = np.lib.stride_tricks.sliding_window_view(padded, reach, (2, 3))
    windows = windows[:, :, :: strides[0], :: strides[1], :: dilations[0], :: dilations[1]]
    parts = zip(np.split(windows, groups, 1), np.split(w, groups, 0), strict=True)
    return np.concatenate([np.einsum("nchwij,ocij->nohw", image, filters) for image, filters in parts], 1)


def scattered(x: np.ndarray, w: np.ndarray, strides: Pair, pads: Sequence[int], groups: int) -> np.ndarray:
    """ONNX's ConvTranspose of NCHW images."""
    (n, _, h, width), (_, _, kh, kw) = x.shape, w.shape
    parts = []
    for image, filters in zip(np.split(x, groups, 1), np.split(w, groups, 0), strict=True):
        out = np.zeros((n, filters.shape[1], (h - 1) * strides[0] + kh, (width - 1) * strides[1] + kw))
        for i in range(kh):
            for j in range(kw):
                rows, columns = slice(i, i + (h - 1) * strides[0] + 1, strides[0]), slice(j, j + (width - 1) * strides[1] + 1, strides[1])
                out[:, :, rows, columns] += np.einsum("nchw,co->nohw", image, filters[:, :, i, j])
        parts.append(out)
    whole = np.concatenate(parts, 1)
    return whole[:, :, pads[0] : whole.shape[2] - pads[2], pads[1] : whole.shape[3] - pads[3]]
