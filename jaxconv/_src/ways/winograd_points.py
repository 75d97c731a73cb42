"""Winograd's minimal filtering F(m, 3) from interpolation points, in exact rationals.

    y = A^T ((G g) * (B^T d))        d: m + 2 inputs, g: 3 taps, y: m outputs

``*`` is the elementwise product. The matrices are those of ``cc/core/winograd.h``, which explains
their construction (Toom and Cook; Lavin and Gray, "Fast algorithms for convolutional neural
networks", 2015). A row of B^T or G is scaled by the power of two that brings the sum of its
magnitudes into (1/2, 1], and A^T's column by the inverse: no element of the transformed input or
filter exceeds the largest element of the input or filter.
"""

from __future__ import annotations

import functools
from fractions import Fraction
from typing import NamedTuple

# Taps of a filter along an axis.
TAPS = 3

# The finite points of F(m, 3), as in cc/core/winograd.h; the last point is infinity.
POINTS = {
    2: (Fraction(0), Fraction(1), Fraction(-1)),
    4: (Fraction(0), Fraction(1), Fraction(-1), Fraction(1, 2), Fraction(-2)),
    6: (
        *(Fraction(0), Fraction(1), Fraction(-1), Fraction(2), Fraction(-2)),
        *(Fraction(1, 2), Fraction(-1, 2)),
    ),
}

Matrix = tuple[tuple[Fraction, ...], ...]


class Matrices(NamedTuple):
    """B^T (m + 2, m + 2), G (m + 2, 3) and A^T (m, m + 2)."""

    bt: Matrix
    g: Matrix
    at: Matrix


def balanced(row: list[Fraction]) -> tuple[Fraction, tuple[Fraction, ...]]:
    """The power of two that brings the row's 1-norm into (1/2, 1], and the row times it."""
    norm, scale = sum(map(abs, row)), Fraction(1)
    while norm * scale > 1:
        scale /= 2
    while norm * scale <= Fraction(1, 2):
        scale *= 2
    return scale, tuple(entry * scale for entry in row)


@functools.cache
def matrices(m: int) -> Matrices:
    """The matrices of F(m, 3), m = 2, 4 or 6."""
    finite = POINTS[m]
    bt, g, columns = [], [], []
    for i in range(len(finite) + 1):
        others = [p for l, p in enumerate(finite) if l != i]
        product = [Fraction(1)]  # coefficients of the product of (x - p), lowest first
        for p in others:
            shifted, scaled = [Fraction(0), *product], [*(p * c for c in product), Fraction(0)]
            product = [a - b for a, b in zip(shifted, scaled, strict=True)]
        product += [Fraction(0)] * (m + TAPS - 1 - len(product))
        if i < len(finite):
            distance = Fraction(1)
            for p in others:
                distance *= finite[i] - p
            taps = [finite[i] ** k / distance for k in range(TAPS)]
            column = [finite[i] ** k for k in range(m)]
        else:
            taps = [Fraction(k == TAPS - 1) for k in range(TAPS)]
            column = [Fraction(k == m - 1) for k in range(m)]
        input_scale, row = balanced(product)
        filter_scale, row_of_g = balanced(taps)
        bt.append(row)
        g.append(row_of_g)
        columns.append([c / input_scale / filter_scale for c in column])
    return Matrices(tuple(bt), tuple(g), tuple(zip(*columns, strict=True)))
