"""The list of convolution problems that all tests draw from.

A ``Problem`` has readable sizes; ``spec`` and ``line`` return the library's forms. Sizes are small,
because errors appear in tails, strides and odd extents.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxconv._src.conv import primitives
from jaxconv._src.problem.spec import ConvSpec, Op, problem_key
from jaxconv.bench.layers import LAYERS as BENCH_LAYERS
from jaxconv.bench.layers import Layer

Pairs = tuple[tuple[int, int], ...]

# Name -> dtypes of the operands and of the result.
DTYPES = {
    "f32": (np.dtype(np.float32), np.dtype(np.float32)),
    "bf16": (np.dtype(jnp.bfloat16), np.dtype(jnp.bfloat16)),
    "f16": (np.dtype(np.float16), np.dtype(np.float16)),
    "s8": (np.dtype(np.int8), np.dtype(np.int32)),
}

# The position of the channel axis: "last", "first" with filters (K, C, ...), or "krsc": last with
# filters (K, ..., C).
LAYOUTS = ("last", "first", "krsc")


@dataclasses.dataclass(frozen=True)
class Problem:
    name: str
    spatial: tuple[int, ...]
    window: tuple[int, ...]
    n: int
    c: int
    k: int
    stride: tuple[int, ...]
    padding: Pairs
    lhs_dilation: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    batch: int | None = None  # number of independent convolutions, each with its own filter

    @property
    def rank(self) -> int:
        return len(self.spatial)

    @property
    def out_spatial(self) -> tuple[int, ...]:
        """The number of positions at which the whole window fits, found by counting."""
        counts = []
        for axis in range(self.rank):
            lo, hi = self.padding[axis]
            extent = (self.spatial[axis] - 1) * self.lhs_dilation[axis] + 1 + lo + hi
            reach = (self.window[axis] - 1) * self.dilation[axis] + 1
            counts.append(len(range(0, extent - reach + 1, self.stride[axis])))
        return tuple(counts)

    @property
    def pads_beyond_the_window(self) -> bool:
        """Whether some window covers only padding."""
        reach = [(r - 1) * d for r, d in zip(self.window, self.dilation, strict=True)]
        return any(max(pair) > r for pair, r in zip(self.padding, reach, strict=True))

    def reduction(self, op: Op) -> int:
        """The number of terms in an output's sum, padding included."""
        taps = math.prod(self.window)
        return {
            Op.FPROP: taps * self.c // self.groups,
            Op.DGRAD: taps * self.k // self.groups,
            Op.WGRAD: self.n * math.prod(self.out_spatial),
        }[op]

    def canonical_shape(self, role: str) -> tuple[int, ...]:
        """(batch?, n, *spatial, c), (batch?, *window, c / groups, k) or (batch?, n, *out, k)."""
        shape = {
            "x": (self.n, *self.spatial, self.c),
            "w": (*self.window, self.c // self.groups, self.k),
            "y": (self.n, *self.out_spatial, self.k),
        }[role]
        return shape if self.batch is None else (self.batch, *shape)

    def axes(self, role: str, layout: str) -> tuple[int, ...]:
        """The array axis of every canonical axis."""
        rank = self.rank
        if layout == "last" or (layout == "krsc" and role != "w"):
            axes = tuple(range(rank + 2))
        elif layout == "krsc":  # canonical (*window, c, k), array (k, *window, c)
            axes = (*range(1, rank + 2), 0)
        elif role == "w":  # canonical (*window, c, k), array (k, c, *window)
            axes = (*range(2, rank + 2), 1, 0)
        else:  # canonical (n, *spatial, c), array (n, c, *spatial)
            axes = (0, *range(2, rank + 2), 1)
        return axes if self.batch is None else (0, *(a + 1 for a in axes))

    def sizes(self, op: Op, spec: ConvSpec, layout: str = "last"):
        """The spec's sizes for an operation on operands in a layout."""
        shapes = []
        for role in op.roles[:2]:
            extents = self.canonical_shape(role)
            shapes.append(tuple(extents[axis] for axis in np.argsort(self.axes(role, layout))))
        return spec.sizes(op, *shapes)

    def to_layout(self, role: str, canonical: np.ndarray, layout: str) -> np.ndarray:
        return np.ascontiguousarray(np.transpose(canonical, np.argsort(self.axes(role, layout))))

    def to_canonical(self, role: str, array: np.ndarray, layout: str) -> np.ndarray:
        return np.transpose(np.asarray(array), self.axes(role, layout))

    def spec(
        self, *, algorithm: str = "auto", precision: str = "default", layout: str = "last"
    ) -> ConvSpec:
        return ConvSpec(
            stride=self.stride,
            padding=self.padding,
            lhs_dilation=self.lhs_dilation,
            dilation=self.dilation,
            groups=self.groups,
            in_spatial=self.spatial,
            filter_spatial=self.window,
            x_axes=self.axes("x", layout),
            w_axes=self.axes("w", layout),
            y_axes=self.axes("y", layout),
            batched=self.batch is not None,
            precision=precision,
            algorithm=(algorithm,) * 3,
        )

    def line(self, op: Op, dtype: str, precision: str = "default") -> str:
        """The problem key of an operation, which is also the repro."""
        spec = self.spec(precision=precision)
        return problem_key(op, spec, self.sizes(op, spec), *DTYPES[dtype])

    def operation(self, op: Op, dtype: str, **spec_options):
        """The primitive as a function (lhs, rhs) -> result."""
        return jax.jit(
            functools.partial(
                primitives.bind, op, spec=self.spec(**spec_options), out_dtype=DTYPES[dtype][1]
            )
        )


def problem(
    name: str,
    spatial: int | tuple[int, ...],
    window: int | tuple[int, ...],
    *,
    n: int = 2,
    c: int = 8,
    k: int = 16,
    stride: int | tuple[int, ...] = 1,
    padding: int | Pairs = 0,
    lhs_dilation: int | tuple[int, ...] = 1,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
    batch: int | None = None,
) -> Problem:
    """A Problem from abbreviated sizes: one number stands for both of two spatial axes."""
    spatial = (spatial,) * 2 if isinstance(spatial, int) else spatial

    def each(value):
        return (value,) * len(spatial) if isinstance(value, int) else tuple(value)

    pairs = tuple((p, p) if isinstance(p, int) else p for p in each(padding))
    return Problem(
        name=name,
        spatial=spatial,
        window=each(window),
        n=n,
        c=c,
        k=k,
        stride=each(stride),
        padding=pairs,
        lhs_dilation=each(lhs_dilation),
        dilation=each(dilation),
        groups=groups,
        batch=batch,
    )


def xla_aborts(problem: Problem) -> bool:
    """Whether XLA would abort on this convolution or a gradient of it in lax's form.

    If the window is wider than the input on one axis, XLA (jaxlib 0.9.2 to 0.11.2) exchanges the
    two, except on an axis that it takes for groups: the input is dilated by the window's extent,
    and the stride is one less. If the two extents differ there, a check fails in
    algebraic_simplifier.cc. Example in lax: an input of 3 x 4, a window of 4 x 2, padding (1, 1),
    (0, 0), lhs_dilation (1, 2).
    """

    def aborts(inputs, window, stride, padding, base_dilation, dilation):
        axes = list(zip(inputs, window, stride, padding, base_dilation, dilation, strict=True))
        return any(w > i for i, w, *_ in axes) and any(
            b == w > 1 and s == max(1, w - 1) and pair == (0, 0) and d == 1 and i != w
            for i, w, s, pair, b, d in axes
        )

    p, back, across = problem, [], []
    for axis, (lo, _) in enumerate(p.padding):
        dilated = (p.spatial[axis] - 1) * p.lhs_dilation[axis] + 1
        reach = (p.window[axis] - 1) * p.dilation[axis]
        span = (p.out_spatial[axis] - 1) * p.stride[axis] + 1
        back.append((reach - lo, dilated - span + lo))
        across.append((lo, span - dilated + reach - lo))
    return (
        aborts(p.spatial, p.window, p.stride, p.padding, p.lhs_dilation, p.dilation)
        or aborts(p.out_spatial, p.window, p.lhs_dilation, back, p.stride, p.dilation)
        or aborts(p.spatial, p.out_spatial, p.dilation, across, p.lhs_dilation, p.stride)
    )


# One shape of each kind: plain, with partial channel blocks, strided with tails.
BASIC = [
    problem("plain", 14, 3, c=32, k=64, padding=1),
    problem("channel_tail", 14, 3, c=13, k=29, padding=1),
    problem("stride_and_tail", (15, 14), 3, c=21, k=18, stride=2, padding=1),
    problem("pointwise", 9, 1, c=40, k=24),
    problem("pointwise_strided", 9, 1, c=24, k=40, stride=2),
    problem("5x5", 11, 5, c=12, k=20, padding=2),
]

EDGE = [
    problem("one_pixel", 1, 1, n=1, c=7, k=5),
    problem("one_pixel_3x3", 1, 3, n=3, c=16, k=16, padding=1),
    problem("prime_extents", (27, 37), 3, n=1, c=23, k=19, padding=1),
    problem("filter_larger_than_input", (4, 5), (7, 9), c=8, k=8, padding=4),
    problem("filter_covers_input", 7, 7, n=5, c=16, k=12),
    problem("negative_padding", (12, 13), 3, padding=((-1, 2), (0, -3))),
    problem("cropped_past_the_window", 10, 3, padding=((-4, 0), (-2, -2)), stride=2),
    problem("asymmetric_padding", (11, 9), (3, 4), padding=((0, 3), (2, 1)), stride=(2, 3)),
    problem("uneven_stride", (17, 16), (3, 5), padding=((1, 1), (2, 2)), stride=(1, 2)),
    problem("stride_beyond_window", 16, 2, stride=3, c=16, k=16),
    problem("dilation", 13, 3, dilation=2, padding=2, c=16, k=16),
    problem("uneven_dilation", (17, 14), 3, dilation=(3, 1), padding=((3, 3), (1, 1)), c=9, k=10),
    problem("dilation_over_one_row", (1, 8), 2, dilation=3, padding=((2, 1), (0, 3)), c=16, k=16),
    problem("dilation_and_stride", 15, 3, dilation=2, stride=2, padding=2, c=16, k=8),
    problem("lhs_dilation", (7, 6), 3, lhs_dilation=2, padding=1, c=16, k=8),
    problem("lhs_dilation_and_stride", 8, 3, lhs_dilation=3, stride=2, padding=((2, 1), (1, 3))),
    problem("both_dilations", 7, 3, lhs_dilation=(2, 1), dilation=(1, 2), padding=2),
    problem("groups", 10, 3, groups=4, c=32, k=16, padding=1),
    problem("groups_with_tails", 9, 3, groups=3, c=15, k=21, stride=2, padding=1),
    problem("pointwise_groups", 8, 1, groups=2, c=16, k=32),
    problem("depthwise", 11, 3, groups=24, c=24, k=24, padding=1),
    problem("depthwise_5x5_strided", 13, 5, groups=19, c=19, k=19, stride=2, padding=2),
    problem("depthwise_long", (20, 41), (5, 31), n=1, groups=8, c=8, k=8, padding=(2, 15)),
    problem("depthwise_1d_causal", (70,), 4, groups=40, c=40, k=40, padding=((3, 0),)),
    problem("depthwise_3d", (4, 9, 8), (2, 3, 3), n=1, groups=16, c=16, k=16, padding=1),
    problem("depth_multiplier", 10, 3, groups=6, c=6, k=18, padding=1),
    problem("one_input_channel", 12, 5, c=1, k=16, padding=2),
    problem("three_input_channels", 19, 7, c=3, k=16, stride=2, padding=3),
    problem("patches", (9, 20), (3, 4), c=6, k=24, stride=(3, 4)),
    problem("patches_3d", (4, 6, 8), 2, n=1, c=4, k=16, stride=2),
    problem("one_output_channel", 9, 3, c=16, k=1, padding=1),
    problem("one_image", 8, 3, n=1, padding=1),
    problem("many_images", 3, 3, n=17, padding=1),
    problem("1d", (31,), 5, c=12, k=20, padding=2),
    problem("1d_causal", (23,), 3, c=8, k=8, padding=((4, 0),), dilation=2),
    problem("1d_grouped_strided", (29,), 4, c=16, k=16, groups=4, stride=2, padding=1),
    problem("3d", (5, 6, 7), 3, n=1, c=8, k=12, padding=1),
    problem(
        "3d_strided",
        (6, 7, 9),
        (2, 3, 3),
        c=5,
        k=7,
        stride=(1, 2, 2),
        padding=((0, 1), (1, 1), (1, 0)),
    ),
    problem("tall_window", (16, 6), (5, 1), c=16, k=16, padding=((2, 2), (0, 0))),
    # Channels in whole 128-byte lines: kernels read filters (K, ..., C) without a copy.
    problem("lines_strided", (9, 8), 3, c=64, k=128, stride=2, padding=1),
    problem(
        "lines_dilated_asymmetric", (9, 7), 3, c=32, k=64, dilation=2, padding=((1, 3), (2, 1))
    ),
    problem("lines_lhs_dilation", (5, 4), 3, c=32, k=64, lhs_dilation=2, padding=1),
    problem("lines_pointwise", 7, 1, c=96, k=40),
    problem("lines_1d", (21,), 5, c=32, k=64, padding=2),
    problem("lines_3d", (3, 4, 5), 3, n=1, c=32, k=64, padding=1),
    problem("lines_groups", 6, 3, c=64, k=128, groups=2, padding=1),
    problem("wide_pointwise", 9, 1, c=40, k=96),
    problem("wide_pointwise_1d", (37,), 1, c=24, k=64),
    # Padding before the innermost axis that is wider than the window: dgrad's own is negative.
    problem("padding_beyond_the_window_1d", (92,), 3, n=1, c=72, k=128, padding=((3, 1),)),
    problem(
        "padding_beyond_the_window_groups", (45,), 3, n=3, c=128, k=128, padding=((4, 0),), groups=2
    ),
    problem("padding_beyond_the_window", (6, 13), 3, c=32, k=64, padding=((1, 1), (5, 1))),
    problem(
        "padding_beyond_the_dilated_window",
        (9, 14),
        3,
        c=32,
        k=64,
        dilation=2,
        padding=((2, 2), (5, 4)),
    ),
    problem(
        "padding_beyond_the_window_3d",
        (3, 4, 11),
        3,
        n=1,
        c=32,
        k=64,
        padding=((1, 1), (1, 1), (3, 0)),
    ),
]


# Windows and strides for which family depthwise has special kernels, except the long ones.
DEPTHWISE_WINDOWS = (
    ((3, 3), 1),
    ((3, 3), 2),
    ((5, 5), 1),
    ((5, 5), 2),
    ((7, 7), 1),
    ((1, 3), 1),
    ((1, 4), 1),
)


def _depthwise_problems() -> list[Problem]:
    """Six problems for every window with special kernels."""
    found = []
    for window, stride in (*DEPTHWISE_WINDOWS, ((11, 17), 1)):
        pads = tuple((r // 2, (r - 1) // 2) for r in window)
        name = "depthwise_{}x{}_stride{}".format(*window, stride)
        make = functools.partial(problem, window=window, stride=stride, padding=pads)
        found += [
            make(f"{name}_vectors", (17, 31), c=72, k=72, groups=72),
            make(f"{name}_odd_channels", (9, 34), c=35, k=35, groups=35),
            make(f"{name}_multiplier", (11, 12), c=6, k=12, groups=6),
            make(f"{name}_batched", (10, 13), n=1, c=8, k=8, groups=8, batch=3),
            # Several tiles of channels; a tile spans several images.
            make(f"{name}_wide", (5, 40), n=1, c=136, k=136, groups=136),
            make(f"{name}_small_maps", (6, 7), n=5, c=16, k=16, groups=16),
        ]
    return found


# Only for kernels of depthwise convolutions.
DEPTHWISE = _depthwise_problems()

# For CPU kernels of windows that cover the input, and of few output channels.
FEW_PIXELS = [
    problem("whole_7x7", 7, 7, n=4, c=40, k=33),
    problem("whole_1d", (9,), 9, n=3, c=17, k=100),
    problem("whole_3d", (2, 3, 2), (2, 3, 2), n=1, c=6, k=48),
    problem("whole_strided", (5, 4), (5, 4), n=8, c=8, k=16, stride=3, padding=((0, 1), (0, 2))),
    problem("whole_batched", 3, 3, n=2, c=9, k=20, batch=3),
    problem("pointwise_on_one_pixel", 1, 1, n=5, c=130, k=70),
    problem("pixels_strided", (9, 7), (4, 3), n=4, c=70, k=40, stride=2, padding=((2, 0), (0, 1))),
    problem("pixels_batched", 4, 3, n=2, c=130, k=36, padding=1, batch=2),
]
FEW_OUTPUTS = [
    problem("outputs_1", (9, 40), 3, c=64, k=1, padding=1),
    problem("outputs_3", (10, 21), 7, c=37, k=3, padding=3),
    problem("outputs_2_strided", (11, 20), (3, 5), c=16, k=2, stride=2, padding=(1, 2)),
    problem("outputs_4_dilated", (9, 30), 3, c=33, k=4, padding=4, dilation=2),
    problem("outputs_5_1d", (70,), 9, c=20, k=5, padding=((8, 0),)),
    problem("outputs_6_3d", (3, 5, 9), 3, n=1, c=18, k=6, padding=1),
    problem("outputs_8_batched", (6, 9), 2, n=1, c=48, k=8, batch=2),
    problem("outputs_7_padded", (4, 5), 3, c=16, k=7, padding=5),
]
# Windows that do not overlap; their rows have whole 16 bytes.
PATCHES = [
    problem("patches_2x2", (8, 10), 2, c=8, k=40, stride=2),
    problem("patches_4x4", (12, 16), 4, c=4, k=72, stride=4),
    problem("patches_2x3", (6, 15), (2, 3), n=3, c=16, k=136, stride=(2, 3)),
    problem("patches_16x16", (32, 48), 16, n=2, c=3, k=24, stride=16),
]
# Many input and up to 16 output channels, stride 1.
NARROW = [
    problem("narrow_3x3", (9, 21), 3, c=24, k=3, padding=1),
    problem("narrow_1x1", (8, 19), 1, c=40, k=2),
    problem("narrow_5x3", (11, 18), (5, 3), n=3, c=64, k=1, padding=((2, 2), (0, 2))),
    problem("narrow_wide", (7, 33), 3, c=48, k=8, padding=1),
]

# Images with up to 4 channels, and rows of whole 16 bytes: strips of 64 to 128 columns.
STEMS = [
    problem("stem_7x7", (18, 24), 7, c=3, k=40, stride=2, padding=3),
    problem("stem_7x7_strips", (12, 240), 7, n=1, c=3, k=64, stride=2, padding=3),
    problem("stem_7x7_even", (21, 40), 7, c=4, k=24, stride=2, padding=((2, 3), (4, 2))),
    problem("stem_7x7_cut", (17, 32), 7, c=1, k=72, stride=2, padding=((-1, 2), (3, 3))),
    problem("stem_7x7_batched", (19, 28), 7, n=1, c=2, k=16, stride=2, padding=3, batch=2),
    problem("stem_3x3", (15, 24), 3, c=3, k=40, stride=2, padding=1),
    problem("stem_3x3_strips", (10, 232), 3, n=1, c=1, k=72, stride=2, padding=((0, 1), (0, 1))),
    problem("stem_3x3_narrow", (9, 20), 3, c=2, k=24, stride=2, padding=1),
    problem("stem_3x3_batched", (8, 14), 3, c=4, k=8, stride=2, padding=1, batch=2),
    problem("stem_3x3_dense", (9, 136), 3, c=3, k=72, padding=1),
    problem("stem_3x3_dense_strips", (7, 232), 3, n=1, c=4, k=40, padding=((0, 2), (2, 1))),
    problem("stem_3x3_dense_one", (12, 24), 3, n=3, c=1, k=8, padding=((1, 0), (0, 0))),
    problem("stem_3x3_dense_batched", (8, 20), 3, c=2, k=24, padding=1, batch=2),
    problem("stem_4x4", (15, 40), 4, c=3, k=136, stride=4, padding=((0, 1), (2, 2))),
    problem("stem_4x4_strips", (12, 488), 4, n=1, c=4, k=40, stride=4),
    problem("stem_4x4_batched", (16, 24), 4, c=2, k=8, stride=4, padding=1, batch=2),
    problem("stem_4x4_cut", (18, 32), 4, n=3, c=1, k=24, stride=4, padding=((-1, 0), (1, 2))),
    problem("stem_11x11", (31, 40), 11, c=3, k=40, stride=4, padding=2),
    problem("stem_11x11_strips", (18, 240), 11, n=1, c=1, k=72, stride=4, padding=((3, 2), (4, 1))),
    problem("stem_11x11_cut", (27, 36), 11, c=2, k=64, stride=4, padding=((-2, 0), (-1, 3))),
    problem("stem_11x11_batched", (19, 22), 11, c=4, k=8, stride=4, padding=5, batch=2),
]

# Only for kernels of groups with few channels: 2 to 32 channels, partial tiles of 64.
SMALL_GROUPS = [
    problem("groups_of_2", (9, 20), 3, c=40, k=40, groups=20, padding=1),
    problem("groups_of_4", (17, 19), 3, c=72, k=72, groups=18, padding=1),
    problem("groups_of_8_strided", (15, 16), 3, c=80, k=80, groups=10, stride=2, padding=1),
    problem("groups_of_16", (7, 33), 3, c=144, k=144, groups=9, padding=((0, 2), (1, 1))),
    problem("groups_of_32", (8, 12), 3, c=96, k=96, groups=3, padding=1),
    problem("groups_of_32_strided", (11, 12), 3, n=1, c=64, k=64, groups=2, stride=2, padding=1),
    problem("groups_even", (14, 30), 3, c=64, k=64, groups=16, stride=2, padding=((0, 1), (0, 1))),
    problem("groups_mixed", (13, 57), 3, c=24, k=24, groups=12, stride=2, padding=((1, 0), (2, 0))),
    problem("groups_two", (7, 8), 3, n=1, c=32, k=32, groups=8, stride=2, padding=1, batch=2),
    problem("groups_pointwise", (6, 7), 1, c=64, k=64, groups=16),
    problem("groups_5x7", (9, 10), (5, 7), c=24, k=24, groups=6, padding=(2, 3)),
    problem("groups_dilated", (9, 10), 3, c=32, k=32, groups=4, padding=2, dilation=2),
    problem("groups_1d", (50,), 9, c=64, k=64, groups=8, padding=((8, 0),)),
    problem("groups_3d", (4, 6, 7), 3, n=1, c=16, k=16, groups=4, padding=1),
    problem("groups_batched", (7, 8), 3, n=1, c=32, k=32, groups=8, padding=1, batch=2),
]

# Only for kernels of Winograd: partial tiles along H and W, partial blocks of tiles, k-blocks and
# blocks of columns; channels that fit in shared memory, and more.
WINOGRAD = [
    problem("winograd_tails", (9, 13), 3, n=3, c=40, k=56, padding=1),
    problem("winograd_long_reduction", (10, 7), 3, c=328, k=136, padding=((0, 2), (2, 1))),
    problem("winograd_many_tiles", (45, 50), 3, n=3, c=24, k=96),
    problem("winograd_groups", (8, 9), 3, c=72, k=120, groups=3, padding=2),
    problem("winograd_wide_groups", (7, 30), 3, c=128, k=128, groups=2, padding=((1, 1), (2, 0))),
    problem("winograd_cropped", (15, 14), 3, c=48, k=32, padding=((-2, 1), (0, -3))),
    # Channels in multiples of 16: clusters pair blocks of tiles, or of columns.
    problem("winograd_pairs_of_tiles", (35, 46), 3, c=144, k=16, padding=1),
    problem("winograd_pairs_of_columns", (9, 13), 3, c=80, k=272, padding=1),
]

# Both operands have a batch axis: per-example filters, and the form of per-example gradients.
BATCHED = [
    problem("batched", 8, 3, batch=3, n=1, c=8, k=8, padding=1),
    problem("batched_strided_tails", (9, 7), 3, batch=2, c=5, k=7, stride=2, padding=1),
    problem("batched_groups", 7, 3, batch=3, c=8, k=12, groups=4, padding=1),
    problem("batched_1d", (15,), 3, batch=4, c=6, k=6, dilation=2, padding=2),
]


def scaled(name: str, layer: Layer) -> Problem:
    """A benchmark layer with its window, stride, padding and grouping, but small sizes."""
    # Residues modulo 16 stay, so that an aligned layer stays aligned and a tail stays a tail.
    c, k = (v if v <= 16 else 16 + v % 16 for v in (layer.c, layer.k))
    groups = layer.groups
    if groups == layer.c:
        groups, k = c, c * (layer.k // layer.c)
    elif groups > 1:
        groups = 4
    return problem(
        name,
        tuple(
            min(i, (r - 1) * d + 6)
            for i, r, d in zip(layer.spatial, layer.window, layer.dilation, strict=True)
        ),
        layer.window,
        n=min(layer.n, 2),
        c=c,
        k=k,
        stride=layer.stride,
        padding=layer.padding,
        dilation=layer.dilation,
        groups=groups,
    )


# Layers that become equal by scaling count once.
_distinct: dict[Problem, Problem] = {}
for _name, _layer in BENCH_LAYERS.items():
    _scaled = scaled(_name, _layer)
    _distinct.setdefault(dataclasses.replace(_scaled, name=""), _scaled)
LAYERS = list(_distinct.values())

# 8-bit problems: channels of a group in multiples of 32, or 4 input channels, as the packed layouts
# require.
INT8 = [
    problem("int8", 14, 3, c=32, k=64, padding=1),
    problem("int8_blocks", (9, 8), 3, c=96, k=160, padding=1),
    problem("int8_pointwise", (9, 7), 1, c=64, k=96),
    problem("int8_pointwise_strided", (9, 8), 1, c=32, k=32, stride=2),
    problem("int8_strided", (15, 14), 3, c=64, k=32, stride=2, padding=1),
    problem("int8_5x5", 11, 5, c=32, k=32, padding=2),
    problem("int8_long", (5, 4), 3, n=1, c=512, k=64, padding=1),
    problem("int8_one_pixel", 1, 1, n=1, c=128, k=32),
    problem("int8_one_pixel_3x3", 1, 3, n=3, c=32, k=64, padding=1),
    problem("int8_prime_extents", (27, 37), 3, n=1, c=32, k=96, padding=1),
    problem("int8_filter_larger_than_input", (4, 5), (7, 9), c=32, k=32, padding=4),
    problem("int8_filter_covers_input", 7, 7, n=5, c=32, k=32),
    problem(
        "int8_asymmetric", (11, 9), (3, 4), c=32, k=64, padding=((0, 3), (2, 1)), stride=(2, 3)
    ),
    problem("int8_negative_padding", (12, 13), 3, c=64, k=32, padding=((-1, 2), (0, -3))),
    problem("int8_past_the_window", (6, 7), 2, c=32, k=64, padding=((3, 1), (0, 4))),
    problem("int8_stride_beyond_window", 16, 2, c=32, k=32, stride=3),
    problem("int8_dilation", (13, 12), 3, c=64, k=64, dilation=2, padding=2),
    problem("int8_uneven_dilation", (17, 14), 3, c=32, k=32, dilation=(3, 1), padding=(3, 1)),
    problem("int8_many_images", 3, 3, n=17, c=32, k=64, padding=1),
    problem("int8_groups", 9, 3, c=64, k=128, groups=2, padding=1),
    problem("int8_groups_strided", (9, 8), 3, c=96, k=96, groups=3, stride=2, padding=1),
    problem("int8_groups_pointwise", 7, 1, c=128, k=64, groups=2),
    problem("int8_few", 14, 3, c=4, k=32, padding=1),
    problem("int8_stem", (23, 21), 7, c=4, k=64, stride=2, padding=3),
    problem("int8_few_strided", (14, 36), 3, c=4, k=64, stride=2, padding=1),
    problem(
        "int8_few_dilated", (12, 9), (3, 5), c=4, k=96, dilation=(2, 1), padding=((1, 2), (0, 3))
    ),
    problem("int8_few_pointwise", (6, 7), 1, n=3, c=4, k=32),
    problem("int8_1d", (31,), 5, c=64, k=64, padding=2),
    problem("int8_1d_causal", (23,), 3, c=32, k=96, padding=((4, 0),), dilation=2),
    problem("int8_1d_few", (37,), 7, c=4, k=32, stride=2, padding=3),
    problem("int8_3d", (5, 6, 7), 3, n=1, c=32, k=64, padding=1),
    problem(
        "int8_3d_strided",
        (6, 7, 9),
        (2, 3, 3),
        c=64,
        k=32,
        stride=(1, 2, 2),
        padding=((0, 1), (1, 1), (1, 0)),
    ),
    problem("int8_3d_few", (4, 5, 6), 3, c=4, k=32, padding=1),
]
# Only for NHWC.
INT8_DEPTHWISE = [
    problem("int8_depthwise", (9, 19), 3, c=80, k=80, groups=80, padding=1),
    problem("int8_depthwise_5x5", (8, 15), 5, n=1, c=48, k=48, groups=48, padding=2),
    problem("int8_depthwise_strided", (11, 19), 3, c=144, k=144, groups=144, padding=1, stride=2),
    problem(
        "int8_depthwise_5x5_strided", (9, 12), 5, c=32, k=32, groups=32, padding=2, stride=(1, 2)
    ),
    problem(
        "int8_depthwise_dilated",
        (9, 16),
        (4, 7),
        c=32,
        k=32,
        groups=32,
        padding=((4, 1), (0, 3)),
        dilation=(2, 1),
        stride=(1, 3),
    ),
    problem("int8_depthwise_1d", (37,), 4, c=16, k=16, groups=16, padding=((3, 0),)),
    problem("int8_depthwise_3d", (3, 5, 9), (2, 3, 3), n=1, c=16, k=16, groups=16, padding=1),
]
INT8_BY_NAME = {p.name: p for p in INT8}

PROBLEMS = [*BASIC, *EDGE, *BATCHED, *LAYERS]
BY_NAME = {p.name: p for p in PROBLEMS}

# For costly checks: problems that reach every kind of code path once.
REPRESENTATIVE = [
    BY_NAME[name]
    for name in (
        "channel_tail",
        "stride_and_tail",
        "dilation_and_stride",
        "lhs_dilation_and_stride",
        "negative_padding",
        "groups_with_tails",
        "depth_multiplier",
        "1d_causal",
        "3d_strided",
        "batched_groups",
    )
]

# Problems for the kernels of one family, or for kernels with this part in their names.
OF_FAMILY = {
    "depthwise": DEPTHWISE,
    "block_diagonal": SMALL_GROUPS,
    "small_groups": SMALL_GROUPS,
    "winograd": WINOGRAD,
    "few_pixels": FEW_PIXELS,
    "few_outputs": FEW_OUTPUTS,
    "patches": PATCHES,
    "narrow": NARROW,
    "few_channels": STEMS,  # except narrow instances
}
