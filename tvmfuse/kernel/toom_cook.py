"""The matrices of Winograd's short convolutions F(m, 3), from their evaluation points: Y = A' [ (G w) * (B' x) ], for m = 2 and 4.

Points come in pairs +a, -a, whose rows share their even and their odd half: half the operations.
Source   the transposed Toom-Cook algorithm, as in Barabasz et al., arXiv 1803.10986.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

# Evaluation points beside 0 and infinity, as pairs +a, -a. With 5/8 and 3/2, exact in float32, F(4x4) is off by 1.3e-6 of the largest
# output on 64 normal channels; with the usual 1 and 2 by 4.4e-6.
PAIRS = {2: (Fraction(1),), 4: (Fraction(5, 8), Fraction(3, 2))}


@dataclass(frozen=True)
class Half:
    """Two rows of B': those of the points +a and -a are even + a * odd and even - a * odd. At 0 there is no odd, at infinity no even.

    even, odd   input index -> coefficient; one of each is 1.
    """

    points: tuple[int, ...]
    scale: Fraction
    even: Mapping[int, Fraction]
    odd: Mapping[int, Fraction]


def _product(roots: Sequence[Fraction]) -> list[Fraction]:
    """Coefficients, lowest first, of the product of x - root."""
    found = [Fraction(1)]
    for root in roots:
        found = [a - root * b for a, b in zip([Fraction(0), *found], [*found, Fraction(0)], strict=True)]
    return found


def points(m: int) -> list[Fraction]:
    """The finite points: 0, +a, -a, +b, -b; infinity comes last."""
    return [Fraction(0), *(sign * a for a in PAIRS[m] for sign in (1, -1))]


def input_halves(m: int) -> list[Half]:
    """B': row i holds the coefficients of the product of x - y over all other finite points y, the last row of all of them."""
    finite = points(m)
    found = []
    for index in (0, *range(1, m + 1, 2), m + 1):
        row = _product([y for j, y in enumerate(finite) if j != index])
        scale = finite[index] if 0 < index <= m else Fraction(1)
        even = {k: c for k, c in enumerate(row) if c and k % 2 == 0}
        odd = {k: c / scale for k, c in enumerate(row) if c and k % 2}
        found.append(Half((index, index + 1) if 0 < index <= m else (index,), scale, even, odd))
    return found


def output_rows(m: int) -> list[dict[int, Fraction]]:
    """A' over (point 0, sum or difference of each pair, infinity): row i takes sums if i is even, else differences; i -> coefficients.

    Index 0 is point 0, index p + 1 pair p, the last one infinity.
    """
    rows = []
    for i in range(m):
        row = {p + 1: a**i for p, a in enumerate(PAIRS[m])}
        rows.append(({0: Fraction(1)} if i == 0 else {}) | row | ({len(PAIRS[m]) + 1: Fraction(1)} if i == m - 1 else {}))
    return rows


def weight_matrix(m: int) -> np.ndarray:
    """G, (m + 2, 3), in float64."""
    finite = points(m)
    scales = [math.prod((x - y for y in finite if y != x), start=Fraction(1)) for x in finite]
    return np.array([*([float(x**i / scale) for i in range(3)] for x, scale in zip(finite, scales, strict=True)), [0.0, 0.0, 1.0]])
