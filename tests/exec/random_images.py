"""Random image networks: what convolutions, pools and concatenations make of each other.

Images of one column, groups of one channel, pads of another width on each side, dilation with stride, several images at once;
concatenations of parts that are read again, returned, equal or concatenations themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from tests.exec.bounded import Bounded, added, bilinear, rounded
from tests.exec.random_models import Author, Pair, Value, convolved

LARGEST = 30_000  # elements


class ImageAuthor(Author):
    """Draws one network of images, channels first."""

    def image(self, x: Value) -> Value:
        return self.any_conv(x) if self.chance(50) else self.pool(x)

    def any_conv(self, x: Value) -> Value:
        channels, (h, w) = x.shape[1], x.shape[2:]
        kernel = self.one_of((1, 1), (1, 1), (3, 3), (3, 3), (1, 3), (2, 1), (5, 5))
        dilations = self.one_of((1, 1), (1, 1), (1, 1), (2, 2), (1, 2))
        reach = [d * (k - 1) + 1 for d, k in zip(dilations, kernel, strict=True)]
        pads = self.pads(reach, (h, w))
        strides = self.one_of((1, 1), (1, 1), (2, 2), (2, 1), (1, 2))
        groups = self.one_of(1, 1, channels, *(g for g in (2, 3, 4) if channels % g == 0))
        return self.convolution(
            x, groups * self.one_of(*((1, 2) if groups > 4 else (1, 3, 8, 17))), kernel, groups, strides, pads, dilations
        )

    def pads(self, reach: Sequence[int], extents: Sequence[int]) -> tuple[int, ...]:
        """Of any width below the window's, at least so wide that one output is left."""
        before = [self.draw_below(size) for size in reach]
        after = [max(self.draw_below(size), size - extent - first) for size, extent, first in zip(reach, extents, before, strict=True)]
        return (*before, *after)

    def draw_below(self, size: int) -> int:
        return self.one_of(*range(min(size, 4)), 0, (size - 1) // 2)

    def convolution(
        self,
        x: Value,
        channels: int,
        kernel: Pair,
        groups: int = 1,
        strides: Pair = (1, 1),
        pads: Sequence[int] = (0, 0, 0, 0),
        dilations: Pair = (1, 1),
    ) -> Value:
        per_group = x.shape[1] // groups
        terms = per_group * math.prod(kernel)
        weight = self.net.constant(self.array((channels, per_group, *kernel), 1 / math.sqrt(terms)))

        def product(image: np.ndarray, filters: np.ndarray) -> np.ndarray:
            return convolved(image, filters, strides, pads, dilations, groups)

        result, inputs = bilinear(product, x.is_, weight.is_, terms, self.fmt), [x, weight]
        if self.chance(60):
            inputs.append(self.net.constant(self.array((channels,))))
            result = added(result, inputs[-1].is_.moved(lambda b: b.reshape(-1, 1, 1)), self.fmt)
        return self.net.emit("Conv", inputs, result, strides=strides, pads=pads, dilations=dilations, group=groups)

    def pool(self, x: Value) -> Value:
        kernel = self.one_of((3, 3), (2, 2), (1, 3), (2, 1))
        strides = self.one_of((1, 1), (2, 2), (2, 1))
        pads = self.pads(kernel, x.shape[2:])
        return self.pooled(x, self.one_of("MaxPool", "AveragePool"), kernel, strides, pads, self.one_of(0, 1))

    def pooled(self, x: Value, op: str, kernel: Pair, strides: Pair, pads: Sequence[int], include: int = 0) -> Value:
        """Pads are narrower than the window, so that none lies in them alone."""
        widths = ((0, 0), (0, 0), (pads[0], pads[2]), (pads[1], pads[3]))

        def windows(array: np.ndarray, fill: float) -> np.ndarray:
            padded = np.pad(array, widths, constant_values=fill)
            return np.lib.stride_tricks.sliding_window_view(padded, kernel, (2, 3))[:, :, :: strides[0], :: strides[1]]

        value, error = windows(x.is_.value, 0.0), windows(x.is_.error, 0.0)
        inside = windows(np.ones(x.shape), 0.0)
        if op == "MaxPool":
            result = Bounded(np.where(inside > 0, value, -np.inf).max((4, 5)), error.max((4, 5)))
            return self.net.emit(op, [x], result, kernel_shape=kernel, strides=strides, pads=pads)
        count = float(math.prod(kernel)) if include else inside.sum((4, 5))
        mean, off, reach = (a.sum((4, 5)) / count for a in (value, error, np.abs(value)))
        result = rounded(mean, off, reach, self.fmt, math.prod(kernel) + 4)
        return self.net.emit(op, [x], result, kernel_shape=kernel, strides=strides, pads=pads, count_include_pad=include)

    def concat(self, parts: Sequence[Value], axis: int = 1) -> Value:
        result = Bounded(*(np.concatenate([getattr(part.is_, of) for part in parts], axis) for of in ("value", "error")))
        return self.net.emit("Concat", parts, result, axis=axis)

    def beside_others(self, x: Value, values: Sequence[Value]) -> Value:
        """A concatenation of values that there are; one may stand in it twice."""
        axis = self.one_of(1, 1, 1, 0, 2, 3)
        fitting = [v for v in values if [*v.shape[:axis], *v.shape[axis + 1 :]] == [*x.shape[:axis], *x.shape[axis + 1 :]]]
        parts = [self.one_of(*fitting) for _ in range(self.one_of(1, 2))]
        return self.concat([x, *parts] if self.chance(50) else [*parts, x], axis)

    def branches(self, x: Value) -> Value:
        """Inception's block: every branch keeps the image's size."""
        parts = []
        for _ in range(self.one_of(2, 2, 3)):
            kind = self.one_of("pointwise", "wide", "wide", "pool", "depthwise", "itself")
            width = self.one_of(1, 2, 5, 8, 17)
            if kind == "pointwise":
                parts.append(self.convolution(x, width, (1, 1)))
            elif kind == "wide":
                parts.append(self.convolution(x, width, (3, 3), pads=(1, 1, 1, 1)))
            elif kind == "pool":
                parts.append(self.convolution(self.pooled(x, "MaxPool", (3, 3), (1, 1), (1, 1, 1, 1)), width, (1, 1)))
            elif kind == "depthwise":
                parts.append(self.convolution(x, x.shape[1], (3, 3), x.shape[1], pads=(1, 1, 1, 1)))
            else:
                parts.append(x)
            if self.chance(50):
                parts[-1] = self.unary(parts[-1])
            if self.chance(10):
                self.net.outputs[parts[-1].name] = parts[-1].is_
        if self.chance(15):
            parts.append(self.one_of(*parts))
        return self.concat(parts)

    def shuffle(self, x: Value) -> Value:
        """ShuffleNet's: channels as a matrix, transposed."""
        (n, c, h, w), groups = x.shape, self.one_of(2, 3)
        if c % groups:
            return self.part(x)
        steps: list[tuple[str, Callable[[np.ndarray], np.ndarray], tuple[int, ...]]] = [
            ("Reshape", lambda a: a.reshape(n, groups, c // groups, h, w), (n, groups, c // groups, h, w)),
            ("Transpose", lambda a: a.transpose(0, 2, 1, 3, 4), (0, 2, 1, 3, 4)),
            ("Reshape", lambda a: a.reshape(n, c, h, w), (n, c, h, w)),
        ]
        for op, layout, given in steps:
            inputs = [x, self.net.constant(np.array(given, np.int64))] if op == "Reshape" else [x]
            x = self.net.emit(op, inputs, x.is_.moved(layout), **({"perm": given} if op == "Transpose" else {}))
        return x

    def part(self, x: Value) -> Value:
        axis = self.one_of(1, 1, 2, 3)
        extent = x.shape[axis]
        first = self.one_of(*range(min(extent, 3)))
        step = self.one_of(1, 1, 2)
        given = [self.net.constant(np.array([number], np.int64)) for number in (first, extent, axis, step)]
        along = tuple(slice(first, None, step) if at == axis else slice(None) for at in range(4))
        return self.net.emit("Slice", [x, *given], x.is_.moved(lambda a: a[along]))

    def graph(self) -> None:
        extents = [self.one_of(1, 2, 3, 5, 9, 14) for _ in range(2)]
        values = [self.net.parameter(self.array((self.one_of(1, 1, 2, 3), self.one_of(1, 2, 3, 4, 6, 9, 16), *extents)))]
        for _ in range(self.one_of(2, 3, 4, 5, 6, 7)):
            small = [value for value in values if math.prod(value.shape) <= LARGEST]
            x = small[-self.one_of(*(at for at in (1, 1, 1, 2, 3) if at <= len(small)))]
            step = self.one_of(
                *[self.any_conv] * 4, *[self.branches] * 2, self.pool, self.shuffle, self.part, self.unary, self.unary, self.clip,
                self.normalised, lambda x: self.binary(x, values), *[lambda x: self.beside_others(x, values)] * 2,
            )  # fmt: skip
            values.append(step(x))
        self.returned(values[1:])
