"""Describes the axes of an array by examples, positions and channels.

Programs give a layer's values many shapes: with flattened positions, with channels split into
groups, with axes of extent 1. Each axis of such an array is a mixed-radix number with digits. Digit
(c, s, e) takes e values and steps through the channels with stride s; digits of examples (n) and
positions (s) are alike. A reshape regroups digits and splits some of them, so every value between
two convolutions has axes made of the digits of the convolution's result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax

EXAMPLES, POSITIONS, CHANNELS = "n", "s", "c"


class Digit(NamedTuple):
    """A factor of an axis.

    Attributes:
        what: EXAMPLES, POSITIONS or CHANNELS.
        stride: the number of examples, positions or channels from one digit value to the next.
        extent: the number of digit values.
    """

    what: str
    stride: int
    extent: int


# For each axis its digits, the most significant first. An axis of extent 1 has none.
Axes = tuple[tuple[Digit, ...], ...]


def of(shape: Sequence[int], channels: int) -> Axes:
    """The axes of an array with the examples first and the channels at axis ``channels``."""
    axes = []
    for axis, extent in enumerate(shape):
        what = CHANNELS if axis == channels else EXAMPLES if axis == 0 else POSITIONS
        within = [e for a, e in enumerate(shape) if a > axis and a != channels]
        stride = math.prod(within) if what == POSITIONS else 1
        axes.append((Digit(what, stride, extent),) if extent != 1 else ())
    return tuple(axes)


def extent(axis: Sequence[Digit]) -> int:
    return math.prod(d.extent for d in axis)


def shape_of(axes: Axes) -> tuple[int, ...]:
    return tuple(map(extent, axes))


def counts(axes: Axes) -> tuple[int, int]:
    """The numbers of examples and of channels in an array with these axes."""
    examples, channels = (
        math.prod(d.extent for axis in axes for d in axis if d.what == what)
        for what in (EXAMPLES, CHANNELS)
    )
    return examples, channels


def reshaped(axes: Axes, shape: Sequence[int]) -> Axes | None:
    """The axes of the same elements in another shape, or None if a digit does not divide."""
    pending = [d for axis in axes for d in axis][::-1]
    result: list[tuple[Digit, ...]] = []
    for wanted in shape:
        axis: list[Digit] = []
        while wanted > 1:
            if not pending:
                return None
            digit = pending.pop()
            common = math.gcd(digit.extent, wanted)
            if common == digit.extent:
                axis.append(digit)
            elif common == wanted:
                rest = digit.extent // wanted
                axis.append(Digit(digit.what, digit.stride * rest, wanted))
                pending.append(Digit(digit.what, digit.stride, rest))
                common = wanted
            else:
                return None
            wanted //= common
        result.append(_joined(axis))
    return None if pending else tuple(result)


def _joined(axis: Sequence[Digit]) -> tuple[Digit, ...]:
    """The same axis, with adjacent digits joined where together they are one digit."""
    result: list[Digit] = []
    for digit in axis:
        last = result[-1] if result else None
        count = digit.stride * digit.extent
        if last is not None and (last.what, last.stride) == (digit.what, count):
            result[-1] = Digit(digit.what, digit.stride, last.extent * digit.extent)
        else:
            result.append(digit)
    return tuple(result)


def transposed(axes: Axes, permutation: Sequence[int]) -> Axes:
    """The axes of a transposed array."""
    return tuple(axes[i] for i in permutation)


def untransposed(axes: Axes, permutation: Sequence[int]) -> Axes:
    """The axes of an array whose transpose has these axes."""
    before = dict(zip(permutation, axes, strict=True))
    return tuple(before[i] for i in range(len(axes)))


def in_order(digits: Iterable[Digit]) -> list[Digit]:
    """The digits sorted: examples before channels, each by decreasing stride."""
    return sorted(digits, key=lambda d: (d.what != EXAMPLES, -d.stride))


def arranged(array: jax.Array, before: Axes, after: Axes) -> jax.Array:
    """An array with the axes ``before``, reshaped and transposed to the axes ``after``.

    Each digit of ``after`` is a part of one digit of ``before``.
    """
    wanted = [d for axis in after for d in axis]
    extents: list[int] = []
    places: dict[Digit, int] = {}
    for digit in (d for axis in before for d in axis):
        end = digit.stride * digit.extent
        parts = [d for d in wanted if d.what == digit.what and digit.stride <= d.stride < end]
        for part in sorted(parts, key=lambda d: -d.stride):
            places[part] = len(extents)
            extents.append(part.extent)
    order = [places[d] for d in wanted]
    if order != sorted(order):
        array = array.reshape(extents).transpose(order)
    return array.reshape(shape_of(after))


def refined(digits: Sequence[Digit], count: int) -> list[int]:
    """Extents that factor ``count`` so that each digit is an axis: gap, digit, gap, ..., gap.

    Args:
        digits: digits of one kind, by decreasing stride.
        count: the total number of examples, positions or channels.
    """
    extents, above = [], count
    for digit in digits:
        extents += [above // (digit.stride * digit.extent), digit.extent]
        above = digit.stride
    return [*extents, above]
