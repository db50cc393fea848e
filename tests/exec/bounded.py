"""Arrays in float64 beside a bound of how far a computation in fewer bits may be from them.

Running error analysis (Higham, Accuracy and Stability of Numerical Algorithms, section 3.3): each operation takes over the errors of
its arguments and adds its own rounding. Where a value may overflow, or a divisor be zero, the bound is infinite.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray


@dataclass(frozen=True)
class Format:
    """A floating point type: half the distance of 1 to the next number, its smallest and its largest number."""

    dtype: str

    @property
    def unit(self) -> float:
        return float(np.finfo(self.dtype).eps) / 2

    @property
    def tiny(self) -> float:
        return float(np.finfo(self.dtype).smallest_subnormal)

    @property
    def largest(self) -> float:
        return float(np.finfo(self.dtype).max)


@dataclass(frozen=True)
class Bounded:
    """What is computed lies within `error` of `value`, element by element."""

    value: Array
    error: Array

    @staticmethod
    def exact(array: Array) -> Bounded:
        wide = np.asarray(array, np.float64)
        return Bounded(wide, np.zeros_like(wide))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    def moved(self, layout: Callable[[Array], Array]) -> Bounded:
        """A reshape, a permutation or the like."""
        return Bounded(layout(self.value), layout(self.error))

    def holds(self, computed: Array) -> Array:
        """Element by element, whether `computed` is right."""
        known = np.isfinite(self.error)
        with np.errstate(invalid="ignore"):
            return ~known | (np.abs(computed.astype(np.float64) - self.value) <= self.error)


def rounded(value: Array, error: Array, magnitude: Array, fmt: Format, roundings: float = 4) -> Bounded:
    """`roundings` further ones, each of at most a unit of `magnitude`."""
    magnitude = np.abs(magnitude)
    total = error + roundings * (fmt.unit * (magnitude + error) + fmt.tiny)
    known = np.isfinite(total) & np.isfinite(value) & (magnitude + total < fmt.largest)
    return Bounded(np.where(known, value, 0.0), np.where(known, total, np.inf))


def bilinear(product: Callable[[Array, Array], Array], a: Bounded, b: Bounded, terms: int, fmt: Format) -> Bounded:
    """Sums of `terms` products, with a factor folded into either side: gamma of twice the terms and some more."""
    left, right = np.abs(a.value) + a.error, np.abs(b.value) + b.error
    own = (2 * terms + 8) * fmt.unit / (1 - (2 * terms + 8) * fmt.unit)
    reach = product(left, right)
    error = reach - product(np.abs(a.value), np.abs(b.value)) + own * reach + 2 * terms * fmt.tiny
    return rounded(product(a.value, b.value), error, reach, fmt)


def added(a: Bounded, b: Bounded, fmt: Format, sign: int = 1) -> Bounded:
    value = a.value + sign * b.value
    return rounded(value, a.error + b.error, value, fmt)


def multiplied(a: Bounded, b: Bounded, fmt: Format) -> Bounded:
    value = a.value * b.value
    return rounded(value, np.abs(a.value) * b.error + np.abs(b.value) * a.error + a.error * b.error, value, fmt)


def divided(a: Bounded, b: Bounded, fmt: Format) -> Bounded:
    room = np.abs(b.value) - b.error
    safe = room > 0
    room, divisor = np.where(safe, room, 1.0), np.where(safe, b.value, 1.0)
    value = a.value / divisor
    return rounded(value, np.where(safe, (a.error + np.abs(value) * b.error) / room, np.inf), value, fmt)


def extremum(op: Any, a: Bounded, b: Bounded) -> Bounded:
    return Bounded(op(a.value, b.value), np.maximum(*np.broadcast_arrays(a.error, b.error)))


def monotone(function: Callable[[Array], Array], x: Bounded, fmt: Format, roundings: float = 8) -> Bounded:
    """A function that never falls, itself a few units in the last place off."""
    low, value, high = function(x.value - x.error), function(x.value), function(x.value + x.error)
    return rounded(value, np.maximum(high - value, value - low), np.maximum(np.abs(low), np.abs(high)), fmt, roundings)


def steep(function: Callable[[Array], Array], x: Bounded, fmt: Format, slope: float) -> Bounded:
    """A function composed of a few operations whose slope never exceeds `slope`, and that is no larger than its argument."""
    return rounded(function(x.value), slope * x.error, np.abs(x.value) + 1, fmt, 8)
