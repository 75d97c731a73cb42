"""Problems of the GPU fuzz that resemble layers of networks, for specialised kernels.

Random extents seldom fit a kernel for one filter, stride, number of groups or of channels. A kind
fixes these for one operation and operand type, and draws the rest. Problems cycle through the
kinds, so that each has its share of a run.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable

import numpy as np
from fuzz_problems import Draw
from problems import DEPTHWISE_WINDOWS, Problem

Form = Callable[[Draw], dict]

BITS_16 = ("bf16", "f16")
FLOATS = (*BITS_16, "f32")
OPS = ("fprop", "dgrad", "wgrad")
# Paddings of kinds. "wide" (wider than the filter) and "mixed" (also negative) are rare, because
# kernels are not specialised for them. The NumPy reference judges them: XLA:CPU is wrong there
# (docs/notes/xla.md).
PADDINGS = (*("same",) * 5, *("near",) * 3, "wide", "mixed")
FUSED, INT8 = "fused", "int8"  # fprop with an epilogue, and with 8-bit operands


@dataclasses.dataclass(frozen=True)
class Kind:
    form: Form
    op: str  # one of OPS, FUSED or INT8
    dtype: str


# --- forms: window, stride, channels and groups; two spatial axes ---------------------------------


def _depthwise(draw: Draw, window: tuple[int, int], stride: int) -> dict:
    """Depthwise; mostly channels in multiples of 8, which 16-byte copies take."""
    c = 8 * draw.integer(1, 18) - (draw.integer(1, 7) if draw.chance(0.1) else 0)
    k = 2 * c if draw.chance(0.1) else c
    return dict(window=window, stride=(stride, stride), c=c, k=k, groups=c)


def _long_depthwise(draw: Draw, low: int, high: int) -> dict:
    """Depthwise with ``low`` to ``high`` taps in a filter row (Toeplitz and Hankel matrices)."""
    c = 8 * draw.integer(1, 6)
    window = (draw.one_of(1, 5, 9, 17, 31), draw.integer(low, high))
    return dict(window=window, c=c, k=c, groups=c)


def _small_groups(draw: Draw, widths: tuple[int, ...], stride: int) -> dict:
    """Groups with equally few input and output channels; mostly 3x3 filters."""
    width = draw.one_of(*widths)
    least = max(2, 8 // width)  # groups; their channels are a multiple of 8
    groups = least * draw.integer(1, max(1, 200 // (least * width)))
    window = (3, 3) if draw.chance(0.85) else (draw.integer(1, 5), draw.integer(1, 7))
    c = width * groups
    return dict(window=window, stride=(stride, stride), c=c, k=c, groups=groups)


def _image(
    draw: Draw,
    elements: int = 48,
    window: int | None = None,
    stride: int | None = None,
) -> dict:
    """A stem: a few input channels, mostly rows of whole 16 bytes.

    Args:
        draw: draws what is not given.
        elements: the largest number of elements in a row of the window, unless ``window`` is given.
        window, stride: for both axes.
    """
    c = draw.one_of(1, 2, 3, 3, 4)
    columns = max(1, min(15, elements // c))
    drawn = (draw.one_of(1, 3, 5, 7), draw.one_of(columns, draw.integer(1, columns)))
    strides = (draw.one_of(1, 2, 2, 4) if stride is None else stride,) * 2
    windows = drawn if window is None else (window, window)
    k = 8 * draw.integer(1, 20 if window is None else 10)
    return dict(window=windows, stride=strides, c=c, k=k, even=True)


def _narrow(draw: Draw, elements: int) -> dict:
    """Many input and a few output channels, stride 1."""
    k = draw.one_of(1, 2, 3, 3, 4)
    columns = max(1, min(15, elements // k))
    window = (draw.one_of(1, 3, 5), draw.one_of(columns, draw.integer(1, columns)))
    return dict(window=window, c=8 * draw.integer(1, 16), k=k)


def _patches(draw: Draw) -> dict:
    """Windows that do not overlap; their rows have whole 16 bytes."""
    window, c = draw.one_of(
        ((2, 2), 4 * draw.integer(1, 16)),
        ((4, 4), 2 * draw.integer(1, 8)),
        ((2, 3), 8 * draw.integer(1, 6)),
        ((16, 16), draw.one_of(1, 3)),
    )
    return dict(window=window, stride=window, c=c, k=8 * draw.integer(1, 20), padding="none")


def _winograd(draw: Draw) -> dict:
    """3x3, stride 1; channels in multiples of 8, mostly of 16; some in groups."""
    unit, groups = draw.one_of(8, 16, 16), draw.one_of(1, 1, 1, 2, 3)
    c, k = (groups * unit * draw.integer(1, 96 // unit) for _ in range(2))
    return dict(window=(3, 3), c=c, k=k, groups=groups)


def _channels(draw: Draw, padded: bool) -> dict:
    """Channels with aligned rows, or with rows that need padding."""
    if padded:
        return {name: draw.integer(5, 120) for name in "ck"}
    return {name: 8 * draw.one_of(1, 4, 6, 8, 8, 9, 16, 17, 24) for name in "ck"}


def _pointwise(draw: Draw) -> dict:
    return dict(window=(1, 1)) | _channels(draw, False)


def _rows(draw: Draw, padded: bool) -> dict:
    """Filters of a few taps, the small ones of which fit in shared memory."""
    window = draw.one_of((1, 2), (1, 3), (3, 3), (3, 3), (2, 3))
    return dict(window=window) | _channels(draw, padded)


def _int8_depthwise(draw: Draw, stride: int) -> dict:
    c = 16 * draw.integer(1, 12)
    window = draw.one_of((3, 3), (5, 5), (draw.integer(1, 5), draw.integer(1, 7)))
    return dict(window=window, stride=(stride, stride), c=c, k=c, groups=c)


def _int8_image(draw: Draw, window: int, stride: int) -> dict:
    """Images of 4 channels."""
    return dict(window=(window, window), stride=(stride, stride), c=4, k=32 * draw.integer(1, 6))


def _int8_small(draw: Draw) -> dict:
    """Filters that fit in shared memory."""
    window = draw.one_of((3, 3), (1, 3), (2, 2))
    return dict(window=window, c=32 * draw.integer(1, 3), k=32 * draw.integer(1, 2))


def _int8_winograd(draw: Draw) -> dict:
    """3x3, stride 1; operands that Winograd transforms without rounding."""
    c, k = (32 * draw.integer(1, 5) for _ in range(2))
    return dict(window=(3, 3), c=c, k=k, sparse=True)


# --- the kinds ------------------------------------------------------------------------------------


def _kinds() -> list[Kind]:
    def each(form: Form, ops: tuple[str, ...], dtypes: tuple[str, ...], times: int = 1):
        return [Kind(form, *pair) for pair in itertools.product(ops, dtypes)] * times

    of = functools.partial
    found = []
    for window, stride in DEPTHWISE_WINDOWS:
        form = of(_depthwise, window=window, stride=stride)
        found += each(form, OPS, (*BITS_16, *FLOATS))
        found += each(form, (FUSED,), (*BITS_16, *FLOATS)) * (window[0] > 1)
    for low, high in ((8, 9), (10, 17), (18, 33)):
        found += each(of(_long_depthwise, low=low, high=high), OPS, BITS_16)
    for stride in (1, 2):
        for widths in ((2, 4, 8, 16), (32,)):
            found += each(of(_small_groups, widths=widths, stride=stride), OPS, BITS_16, 2)
        found += each(of(_small_groups, widths=(4, 16, 32), stride=stride), (FUSED,), FLOATS)
    for elements in (16, 24, 40, 48):
        found += each(of(_image, elements=elements), ("dgrad",), BITS_16)
    found += each(of(_image, elements=48), ("fprop", "wgrad", FUSED), BITS_16, 3)
    found += each(of(_image, window=3, stride=2), ("fprop", FUSED), BITS_16, 2)
    found += each(of(_image, window=7, stride=2), ("fprop", "dgrad", FUSED), BITS_16, 2)
    found += each(of(_image, window=11, stride=4), ("fprop", FUSED), BITS_16, 2)
    for elements in (16, 48):
        found += each(of(_narrow, elements=elements), (*OPS, FUSED), BITS_16)
    found += each(_patches, ("fprop", "wgrad", FUSED), BITS_16) + each(
        _patches, ("dgrad",), BITS_16, 3
    )
    found += each(_winograd, ("fprop", "dgrad"), BITS_16, 10)
    found += each(_winograd, ("fprop", "dgrad"), ("f32",), 3)
    found += each(_pointwise, ("fprop", "dgrad", FUSED), BITS_16, 4)
    found += each(of(_rows, padded=False), (*OPS, FUSED), FLOATS, 4)
    found += each(of(_rows, padded=True), OPS, BITS_16, 2)
    found += each(of(_int8_depthwise, stride=1), (INT8,), ("s8", "u8"), 5)
    found += each(of(_int8_depthwise, stride=2), (INT8,), ("s8", "u8"), 5)
    for window, stride in ((3, 1), (3, 2), (5, 2), (7, 1), (7, 2)):
        found += each(of(_int8_image, window=window, stride=stride), (INT8,), ("s8", "u8"))
    found += each(_int8_winograd, (INT8,), ("s8",), 3)
    return found + each(_int8_small, (INT8,), ("s8", "u8"), 3)


KINDS = _kinds()


def kind_of(seed: int, turn: int) -> Kind:
    """The kind of this turn. The seed decides the order of the kinds."""
    return KINDS[_order(seed)[turn % len(KINDS)]]


@functools.lru_cache(maxsize=1)
def _order(seed: int) -> np.ndarray:
    return np.random.default_rng([seed, 7]).permutation(len(KINDS))


def draw_kind(draw: Draw, form: Form, pixels: int) -> Problem:
    """A problem of the form; with ``pixels``, one of about so many outputs or more."""
    drawn = {"stride": (1, 1), "groups": 1, "padding": draw.one_of(*PADDINGS)}
    drawn |= form(draw)
    window, stride = drawn["window"], drawn["stride"]
    if pixels:
        n = draw.one_of(1, 3, 8, 32)
        extent = (pixels * float(draw.rng.uniform(1, 2)) / n) ** 0.5
        out = [max(1, round(extent * float(draw.rng.uniform(0.8, 1.25)))) for _ in stride]
    else:
        n, most = draw.integer(1, 5), draw.one_of(8, 16, 33)
        out = [draw.integer(1, most) for _ in stride]
    spatial = [e * s for e, s in zip(out, stride, strict=True)]
    if drawn["padding"] != "none":  # otherwise the windows cover the input
        spatial = [max(1, e - draw.integer(0, s - 1)) for e, s in zip(spatial, stride, strict=True)]
    if drawn.get("even") and draw.chance(0.6):  # rows of whole 16 bytes
        spatial[1] = -(-spatial[1] // 8) * 8
    padding = {
        "same": lambda r: (r // 2, (r - 1) // 2),
        "near": lambda r: (draw.integer(-1, r), draw.integer(-1, r)),
        "wide": lambda r: (draw.integer(0, 2 * r + 3), draw.integer(0, 2 * r + 3)),
        "mixed": lambda r: (draw.integer(-3, 2 * r), draw.integer(-3, 2 * r)),
        "none": lambda r: (0, 0),
    }[drawn["padding"]]
    return Problem(
        name="sparse_" * bool(drawn.get("sparse")) + ("large" if pixels else "small"),
        spatial=tuple(spatial),
        window=window,
        n=n,
        c=drawn["c"],
        k=drawn["k"],
        stride=stride,
        padding=tuple(padding(r) for r in window),
        lhs_dilation=(1, 1),
        dilation=(1, 1),
        groups=drawn["groups"],
    )
