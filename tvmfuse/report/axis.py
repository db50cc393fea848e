"""From values to places on a plot, in percent of its width or height, so that a plot has no size of its own."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

STEPS = (1, 2, 5, 10)


@dataclass(frozen=True)
class Axis:
    """low < high are the values at its ends."""

    low: float
    high: float
    log: bool = False

    @staticmethod
    def around(values: Iterable[float], log: bool = False, always: Iterable[float] = (), margin: float = 0.06) -> Axis:
        """Over all values, with some air at both ends; `always` are values that are on it anyway, such as 0 or 1."""
        found = [*values, *always]
        low, high = (min(found), max(found)) if found else (1.0, 1.0)
        if log:
            air = margin * math.log(high / low) if high > low else 0.5
            return Axis(low * math.exp(-air), high * math.exp(air), True)
        air = margin * (high - low) or abs(high) or 1.0
        return Axis(0.0 if low == 0 else low - air, high + air)

    def at(self, value: float) -> float:
        """Percent from its low end; what lies outside is put at the end."""
        if self.log:
            part = math.log(max(value, 1e-300) / self.low) / math.log(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return round(100 * min(1.0, max(0.0, part)), 3)

    def ticks(self, about: int = 5) -> list[float]:
        """Round values: decades where the axis spans some, else multiples of 1, 2 or 5 times a power of ten."""
        if self.log and self.high / self.low > 30:
            decades = range(math.ceil(math.log10(self.low)), math.floor(math.log10(self.high)) + 1)
            every = max(1, round(len(decades) / about))
            return [10.0**n for n in decades if n % every == 0]
        raw = (self.high - self.low) / about
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(s * power for s in STEPS if s * power >= raw * 0.999)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [round(n * step, 12) for n in range(first, last + 1)]
