"""Random problems for all fuzzes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np
from numerics import LONG_SUM
from problems import Problem


class Draw:
    """Draws plain Python values for problems and parameters."""

    def __init__(self, *seed: int):
        self.rng = np.random.default_rng(seed)

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def one_of(self, *values):
        return values[int(self.rng.integers(len(values)))]

    def by_share(self, shares: Mapping[str, float]) -> str:
        return str(self.rng.choice(list(shares), p=list(shares.values())))

    def integer(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high, endpoint=True))

    def integers(self, low: int, high: int, size: int) -> tuple[int, ...]:
        return tuple(self.integer(low, high) for _ in range(size))

    def sequence(self, values: tuple) -> tuple | list:
        return self.one_of(tuple, list)(values)

    def permutation(self, size: int) -> tuple[int, ...]:
        return tuple(int(i) for i in self.rng.permutation(size))


@dataclasses.dataclass(frozen=True)
class Limits:
    """The problems that a fuzz draws.

    Attributes:
        ranks: numbers of spatial axes; repetitions are weights.
        windows: the widest filter, by rank.
        extents: the possible largest extents, by rank.
        channels: about the most channels of all groups; a quarter of it with many pixels.
        units: channels are usually a small multiple of one of these, to which kernels align.
        odd_units: otherwise they are a small multiple of one of these.
        odd: the share of problems with odd_units.
        forms: shares of dense, depthwise, grouped and batched problems.
    """

    ranks: tuple[int, ...]
    windows: Mapping[int, int]
    extents: Mapping[int, tuple[int, ...]]
    channels: int
    units: tuple[int, ...]
    odd_units: tuple[int, ...]
    odd: float
    forms: Mapping[str, float]


# For lax's function, which has no groups of batched problems.
CALLS = Limits(
    ranks=(0, *(1,) * 6, *(2,) * 8, *(3,) * 5),
    windows={0: 1, 1: 7, 2: 4, 3: 3},
    extents={0: (1,), 1: (32,), 2: (10,), 3: (6,)},
    channels=32,
    units=(4, 8, 16),
    odd_units=(1,),
    odd=0.75,
    forms={"dense": 0.5, "groups": 0.1, "narrow groups": 0.1, "depthwise": 0.2, "batched": 0.1},
)
_FORMS = {
    "dense": 0.45,
    "groups": 0.1,
    "narrow groups": 0.1,
    "depthwise": 0.2,
    "batched": 0.1,
    "batched groups": 0.05,
}
# For primitives on a CPU.
SMALL = Limits(
    ranks=(1, 2, 2, 2, 3),
    windows={1: 5, 2: 5, 3: 5},
    extents={1: (40,), 2: (16,), 3: (8,)},
    channels=32,
    units=(8, 16),
    odd_units=(1, 2),
    odd=0.6,
    forms=_FORMS,
)
# For any form on a GPU.
WIDE = Limits(
    ranks=(1, 2, 2, 2, 3),
    windows={1: 9, 2: 5, 3: 3},
    extents={1: (40, 300), 2: (9, 24), 3: (5, 9)},
    channels=512,
    units=(8, 16, 32, 64),
    odd_units=(1, 1, 2, 4),
    odd=0.4,
    forms=_FORMS,
)
# "wide" is wider than the filter. "same" keeps the extents at stride 1.
_PADDINGS = {"none": 0.2, "same": 0.25, "any": 0.15, "wide": 0.2, "cropping": 0.1, "mixed": 0.1}


def draw_problem(draw: Draw, name: str, limits: Limits, pixels: int = 0) -> Problem:
    """A problem, perhaps without outputs; with ``pixels``, one of about so many outputs or more."""
    rank = draw.one_of(*limits.ranks)
    ones = (1,) * rank
    window = ones if draw.chance(0.25) else draw.integers(1, limits.windows[rank], rank)
    stride = draw.integers(1, 4, rank) if draw.chance(0.35) else ones
    dilation = draw.integers(1, 3, rank) if draw.chance(0.3) else ones
    lhs_dilation = draw.integers(1, 3, rank) if draw.chance(0.15) else ones
    form = draw.by_share(limits.forms)
    batch = draw.integer(2, 4) if "batched" in form else None
    groups = draw.one_of(2, 3, 4, 8) if "groups" in form else 1
    if form == "depthwise" and draw.chance(0.5):  # filters of networks, and long ones
        length = draw.one_of(3, 5, 7, 9, 13, 31)
        longest = {0: 1, 1: 31, 2: 31, 3: 3}[rank]
        window = (min(length, longest),) * rank
        stride = (draw.one_of(1, 1, 2),) * rank
        dilation = lhs_dilation = ones
    units = limits.odd_units if draw.chance(limits.odd) else limits.units
    most = limits.channels // (4 * groups if pixels else groups)
    c, k = (groups * _channels(draw, units, most) for _ in range(2))
    if form == "depthwise":
        groups, k = c, c * draw.one_of(1, 1, 2, 3)
    elif form == "narrow groups":
        width = draw.one_of(*(w for w in (2, 4, 8, 16, 32) if 2 * w <= limits.channels))
        groups = draw.integer(2, max(2, min(16, limits.channels // width)))
        c = k = groups * width
    elif groups == 1 and draw.chance(0.2):  # channels of an image
        c = draw.integer(1, 4)
    if pixels:
        n = draw.one_of(1, 3, 8, 32)
        extent = (pixels * float(draw.rng.uniform(1, 3)) / n) ** (1 / rank)
        spatial = tuple(
            max(1, round(extent * s / ld * float(draw.rng.uniform(0.8, 1.25))))
            for s, ld in zip(stride, lhs_dilation, strict=True)
        )
    else:
        n = draw.integer(1, 5)
        spatial = draw.integers(1, draw.one_of(*limits.extents[rank]), rank)
    return Problem(
        name=name,
        spatial=spatial,
        window=window,
        n=n,
        c=c,
        k=k,
        stride=stride,
        padding=_padding(draw, window, dilation),
        lhs_dilation=lhs_dilation,
        dilation=dilation,
        groups=groups,
        batch=batch,
    )


def _channels(draw: Draw, units: tuple[int, ...], most: int) -> int:
    """A small multiple of one of the units."""
    unit = draw.one_of(*units)
    return unit * draw.integer(1, max(1, min(most // unit, 12)))


def _padding(draw: Draw, window: tuple[int, ...], dilation: tuple[int, ...]):
    kind, padding = draw.by_share(_PADDINGS), []
    for r, d in zip(window, dilation, strict=True):
        reach = (r - 1) * d
        low, high = {
            "none": (0, 0),
            "same": (reach // 2, reach - reach // 2),
            "any": (-1, reach),
            "wide": (0, 2 * reach + 4),
            "cropping": (-4, 1),
            "mixed": (-4, reach + 4),
        }[kind]
        padding.append((low, high) if kind == "same" else draw.integers(low, high, 2))
    return tuple(padding)


def with_long_sums(draw: Draw, p: Problem) -> Problem:
    """The problem with so many channels that float32 cannot hold sums of 8-bit extremes exactly."""
    groups = min(p.groups, 2)
    c = LONG_SUM // max(1, math.prod(p.window)) + draw.integer(1, 40)
    return dataclasses.replace(p, groups=groups, c=groups * c, k=groups * draw.integer(1, 9))
