"""Problems with at least three tiles for each CTA of persistent kernels.

Every problem has at least two tiles along m and n, and tails in each; kernels that keep the filter
in shared memory have one tile along n. Extents follow from the tile in the instance's name.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

import jax
import numpy as np
import pytest
from kernel_tables import Instance
from numerics import integer_operands, reference
from problems import DTYPES, Problem, problem

from jaxconv._src.problem.spec import Op

SMS = 132  # an H100 or H200 has
TILES = 3 * SMS + 10
FEW_CTAS = 5  # few_channels: resident CTAs an SM, at most (2 if dgrad's z has 40 or 48 columns)
HALO_BOX = ("depthwise", "block_diagonal")  # families of common/halo_box.cuh


def tile(each: Instance) -> tuple[int, int]:
    """(tile_m, tile_n), the first numbers of the variant's name."""
    m, n = re.match(r"(\d+)x(\d+)", each.variant).groups()
    return int(m), int(n)


def k_block(each: Instance) -> int:
    """The channels of a k-block of 128 bytes."""
    return 32 if each.dtype == "f32" else 64


def keeps_the_filter(each: Instance) -> bool:
    """Whether the kernel keeps its whole filter in shared memory: there is one tile along n."""
    return "weight_stationary" in each.variant or "pointwise_swap_ab" in each.variant


def contracted(each: Instance, k_blocks: int) -> int:
    """A number of channels with so many k-blocks, the last one partial (also if padded to 16)."""
    return k_blocks * k_block(each) - (21 if each.padded else 8)


def gather(
    each: Instance,
    name: str,
    window: tuple[int, int],
    inner: int,
    outer: int,
    tiles_m: int,
    *,
    stride: int = 1,
    groups: int = 1,
    batch: int | None = None,
) -> Problem:
    """A problem of fprop or dgrad with ``inner`` reduced and ``outer`` result channels a group."""
    images, width = 3, 61
    height = -(-tiles_m * tile(each)[0] // (images * width))
    fprop = each.op == "fprop"
    extents = (height * stride, width * stride) if fprop else (height, width)
    c, k = (inner, outer) if fprop else (outer, inner)
    return problem(
        name,
        extents,
        window,
        n=images,
        c=c * groups,
        k=k * groups,
        stride=stride,
        padding=tuple((r // 2, (r - 1) // 2) for r in window),
        groups=groups,
        batch=batch,
    )


def _patches(each: Instance, outer: int, tiles_m: int) -> Problem:
    """A dgrad (or fprop) of 3x2 windows that do not overlap, with ``outer`` elements in a patch."""
    width = 61
    height = -(-tiles_m * tile(each)[0] // (3 * width))
    c = 8 * -(-outer // 48)
    return problem(
        "patches", (3 * height, 2 * width), (3, 2), n=3, c=c, k=k_block(each) + 8, stride=(3, 2)
    )


def gather_problems(each: Instance) -> list[Problem]:
    """Problems for fprop and dgrad of igemm_wgmma."""
    tile_n = tile(each)[1]
    wide, narrow = tile_n + (5 if each.padded else 8), tile_n - (5 if each.padded else 8)
    inner = functools.partial(contracted, each)
    make = functools.partial(gather, each)
    problems = [
        make("row", (1, 3), inner(3), wide, TILES // 2),
        make("square", (2, 2), inner(1), wide, TILES // 2),
        make("pointwise", (1, 1), inner(3), wide, TILES // 2),
        make("pointwise_short", (1, 1), inner(2), wide, TILES // 2),
        make("strided", (3, 3), inner(1), wide, TILES // 2, stride=2),
        make("groups", (1, 3), k_block(each), wide, TILES // 4, groups=2),
        make("batched", (1, 3), inner(1), wide, TILES // 4, batch=2),
        _patches(each, wide, TILES // 2),
        # Channels in whole 128-byte lines: the filter is read as krsc, too.
        make("lines", (1, 3), 2 * k_block(each), tile_n + 64, TILES // 2),
        make("pointwise_lines", (1, 1), 2 * k_block(each), tile_n + 64, TILES // 2),
    ]
    if "c48" in each.variant:
        problems.append(make("few_channels", (2, 3), 40, wide, TILES // 2))
    if keeps_the_filter(each):
        problems += [
            make("one_tile_wide", (3, 3), inner(1), narrow, TILES),
            make("one_tile_wide_long", (3, 3), inner(2), narrow, TILES),
            make("one_tile_wide_pointwise", (1, 1), inner(3), narrow, TILES),
            make("one_tile_wide_lines", (2, 2), k_block(each), tile_n, TILES),
            make("one_tile_wide_pointwise_lines", (1, 1), 2 * k_block(each), tile_n, TILES),
        ]
    return problems


def wgrad_problems(each: Instance) -> list[Problem]:
    """Problems for wgrad of igemm_wgmma: m is (tap, c), n is k; few pixels are reduced."""
    tile_m, tile_n = tile(each)
    tail = 5 if each.padded else 32 if each.dtype == "f32" else 8

    def make(
        name: str,
        window: tuple[int, int],
        *,
        spatial: tuple[int, int] = (9, 11),
        n: int = 3,
        stride: int = 1,
        groups: int = 1,
        batch: int | None = None,
    ) -> Problem:
        tiles_n = 3 if groups == 1 else 2
        rows = TILES // (tiles_n * groups * (batch or 1)) * tile_m
        k_blocks = -(-rows // (window[0] * window[1] * k_block(each))) + 1
        return problem(
            name,
            tuple(e * stride for e in spatial),
            window,
            n=n,
            c=contracted(each, k_blocks) * groups,
            k=(tile_n * (tiles_n - 1) + tail) * groups,
            stride=stride,
            padding=tuple((r // 2, (r - 1) // 2) for r in window),
            groups=groups,
            batch=batch,
        )

    return [
        make("square", (3, 3)),
        make("row", (1, 4)),
        make("pointwise", (1, 1)),
        make("strided", (2, 3), stride=2),
        make("groups", (3, 3), groups=2),
        make("batched", (3, 3), n=1, spatial=(8, 40), batch=2),  # whole k-blocks of pixels
    ]


def few_channels_problems(each: Instance) -> list[Problem]:
    """Images of few channels. A CTA takes one part of 64 output channels (wgrad: and some rows).

    For few output channels, fprop runs on dgrad's kernel and the reverse.
    """
    if "_narrow" in each.variant:
        window = (3, 15) if tile(each)[1] == 48 else (3, 5)
        tiles = -(-TILES * (2 if tile(each)[1] == 48 else FEW_CTAS) * 256 // (5 * 321))
        pads = tuple((r // 2, r // 2) for r in window)
        return [problem("narrow", (tiles, 321), window, n=5, c=72, k=3, padding=pads)]
    if "_stride" in each.variant:
        # Tiles are rows (dgrad: pairs of rows) by strips of columns; there is one CTA on each SM.
        window, stride = int(each.variant.split("x")[0]), int(each.variant[-1])
        pad = window // 2
        if each.op == "dgrad":
            make = functools.partial(problem, window=7, stride=2, k=56)
            rows = 2 * -(-TILES // 4)
            return [
                make("strips", (rows, 250), n=2, c=3, padding=3),
                make("even_padding", (rows, 225), n=2, c=4, padding=((2, 3), (4, 2))),
            ]
        # wgrad: a filter row has at most as many elements as the variant says; 128 channels a part.
        k, c = (4 * 64 + 8, 2) if each.op == "wgrad" else (2 * 64 + 8, 4)
        make = functools.partial(problem, window=window, stride=stride, k=k)
        rows = stride * -(-TILES // 12)
        return [
            make("strips", (rows, 248), n=2, c=3, padding=pad),
            make("batched", (rows, 252), n=2, c=c, padding=((0, 1), (1, 0)), batch=2),
        ]
    if each.op == "fprop":
        k, tiles = 5 * 64 + 8, TILES * FEW_CTAS // 6
        extents = (-(-tiles * 128 // (2 * 152)), 152)
        return [
            problem("3x3", extents, 3, c=4, k=k, padding=1),
            problem("7x7_strided", tuple(2 * e for e in extents), 7, c=3, k=k, stride=2, padding=3),
        ]
    if each.op == "dgrad":
        window = (3, {16: 5, 24: 7, 40: 13, 48: 15}[tile(each)[1]])
        pads = tuple((r // 2, r // 2) for r in window)
        ctas = 2 if tile(each)[1] >= 40 else FEW_CTAS
        extents = (-(-TILES * ctas * 256 // (5 * 321)), 321)
        return [
            problem("dense", extents, window, n=5, c=3, k=24, padding=pads),
            problem("strided", extents, window, n=5, c=3, k=24, stride=2, padding=pads),
        ]
    return [
        problem(
            "3x3", (-(-TILES * FEW_CTAS * 128 // (15 * 131)), 131), 3, n=5, c=3, k=136, padding=1
        ),
        problem(
            "3x3_words",
            (-(-TILES * FEW_CTAS * 128 // (15 * 132)), 132),
            3,
            n=5,
            c=2,
            k=136,
            padding=1,
        ),
        problem("5x5_strided", (330, 260), 5, n=5, c=4, k=72, stride=2, padding=2),
    ]


def depthwise_problems(each: Instance) -> list[Problem]:
    """Five tiles of channels, and images of at least six tiles; at most two CTAs share an SM.

    Wide Toeplitz strips: an image is two tiles, and there is one CTA on each SM. wgrad by Hankel
    matrices: an image is one tile, so there are three tiles of channels and many images. Walks:
    each thread takes a part of an image's rows with more steps than its ring has stages, and an
    image has several parts.
    """
    channels, form = re.match(r"(\d+)ch_(.*?)(?:_tma|_pairs|_walk)?$", each.variant).groups()
    if form.startswith("hankel"):
        window = {"hankel_16x16": (9, 13), "hankel_32x32": (17, 31)}[form]
        pads = tuple((r // 2, (r - 1) // 2) for r in window)
        make = functools.partial(
            problem, spatial=(9, 33), window=window, n=3 * 3 * SMS // 3, padding=pads
        )
        return [
            make("vectors", c=24, k=24, groups=24),
            make("multiplier", c=11, k=22, groups=11),
        ]
    windows = {
        "any": (3, 6),
        "toeplitz_9": (7, 9),
        "toeplitz_17": (3, 17),
        "toeplitz_33": (5, 33),
        "toeplitz_33_wide": (3, 31),
        "toeplitz_33_wgmma": (19, 31),
    }
    window = windows.get(form) or tuple(map(int, form.removesuffix("_stride2").split("x")))
    stride = 2 if form.endswith("_stride2") else 1
    pads = tuple((r // 2, (r - 1) // 2) for r in window)
    if form.endswith("_wgmma"):
        # An image is one tile, and there is one CTA on each SM.
        n = -(-TILES // 5)
        return [problem("vectors", (35, 60), window, n=n, c=40, k=40, groups=40, padding=pads)]
    images = -(-TILES // 10) if form.endswith("_wide") else -(-2 * TILES // 30)
    make = functools.partial(
        problem, spatial=(35 * stride, 75 * stride), window=window, stride=stride, padding=pads
    )
    c = 4 * int(channels) + 8
    problems = [make("vectors", n=images, c=c, k=c, groups=c)]
    if form == "any":
        problems.append(make("multiplier", n=images, c=c // 4, k=c // 2, groups=c // 4))
    if not form.startswith("toeplitz"):
        problems.append(make("odd_channels", n=images, c=c - 3, k=c - 3, groups=c - 3))
    return problems


def block_diagonal_problems(each: Instance) -> list[Problem]:
    """Five tiles of 64 channels, and images of at least six tiles of 256 positions."""
    block, form = each.variant.removesuffix("_3xtf32").split("ch_")
    make = functools.partial(problem, n=-(-2 * TILES // 30), c=296, k=296)
    problems = []
    if form == "rows":
        # Tiles of two images, one for each pair of warpgroups; and images whose rows have two
        # tiles.
        images = -(-2 * TILES // 5)
        problems.append(make("several", (5, 33), 3, n=images, groups=74, padding=1))
        problems.append(make("columns", (4, 70), 3, n=-(-images // 2), groups=37, padding=1))
        if block == "32":
            problems.append(make("wide", (5, 33), 3, n=images, c=288, k=288, groups=9, padding=1))
        return problems
    if form != "stride2":
        problems.append(make("3x3", (35, 45), 3, groups=37, padding=1))
    if form != "7rows":
        problems.append(make("strided", (69, 89), 3, groups=37, stride=2, padding=1))
    if block == "32":
        stride = 2 if form == "stride2" else 1
        map_ = (35 * stride, 45 * stride)
        problems.append(make("wide", map_, 3, c=288, k=288, groups=9, stride=stride, padding=1))
    if form in ("256px", "any"):
        problems.append(make("long", (35, 45), (2, 5), groups=148, padding=((0, 1), (2, 2))))
    return problems


def steady_problems(each: Instance) -> list[Problem]:
    if each.family == "few_channels":
        return few_channels_problems(each)
    if each.family == "depthwise":
        return depthwise_problems(each)
    if each.family == "block_diagonal":
        return block_diagonal_problems(each)
    return wgrad_problems(each) if each.op == "wgrad" else gather_problems(each)


def split_problem(each: Instance) -> tuple[Problem, Sequence[int]]:
    """A long reduction, and numbers of slices to try; persistent kernels then have TILES tiles.

    The workspace limits the number of slices.
    """
    if each.family == "few_channels":
        if "_narrow" in each.variant:
            return problem("split", (90, 60), 3, c=72, k=2, padding=1), range(9, 6, -1)
        if "_stride" in each.variant:
            window, stride = int(each.variant.split("x")[0]), int(each.variant[-1])
            of = functools.partial(problem, "split", (90, 64), window, c=2, k=72, stride=stride)
            return of(padding=window // 2), range(9, 6, -1)
        # x is copied in words, and in 16-byte chunks.
        return problem("split", (90, 60), 3, c=2, k=72, padding=1), range(9, 6, -1)
    if each.family in HALO_BOX:
        # 28 images of at least 6 tiles: a slice has more than 5 tiles, and slices differ in size.
        return steady_problems(each)[0], (31, 30, 29)
    tile_n = tile(each)[1]
    tail = 5 if each.padded else 32 if each.dtype == "f32" and each.op == "wgrad" else 8
    if each.op == "wgrad":
        # 321 k-blocks of 64 pixels, or 641 of 32: no slice is empty.
        return (
            problem(
                "split",
                (112, 61),
                (1, 3),
                n=3,
                c=contracted(each, 5),
                k=tile_n + tail,
                padding=((0, 0), (1, 1)),
            ),
            (65, 54, 46, 41),
        )
    if each.family == "igemm_wgmma" and "cluster" not in each.variant:
        slices = 4
        tiles_m = -(-TILES // (2 * slices))
        # Instances for at most 48 channels reach as many k-blocks by more taps.
        long = each.variant.endswith("_c48")
        window, inner = ((5, 9), 40) if long else ((3, 3), contracted(each, 6))
        return (
            gather(each, "split", window, inner, tile_n + tail, tiles_m),
            range(2 * slices, slices - 1, -1),
        )
    return (
        gather(each, "split", (3, 3), contracted(each, 3), tile_n + tail, 3),
        range(5, 1, -1),
    )


@functools.lru_cache(maxsize=3)
def exact(op: Op, which: Problem) -> tuple[dict[str, np.ndarray], np.ndarray]:
    operands = integer_operands(which, [op], 0)
    lhs, rhs = (operands[role] for role in op.roles[:2])
    return operands, reference(op, which, lhs, rhs, np.float32)


def operands_of(each: Instance, which: Problem, layout: str = "last") -> list[np.ndarray]:
    op = Op(each.op)
    arrays, _ = exact(op, which)
    return [
        which.to_layout(role, arrays[role], layout).astype(DTYPES[each.dtype][0])
        for role in op.roles[:2]
    ]


def skip_on_other_devices(each: Instance) -> None:
    device = jax.devices()[0]
    if each.family == "igemm_wgmma" and device.compute_capability != "9.0":
        pytest.skip(f"{each.family} is for compute capability 9.0")
    if device.core_count > SMS:
        pytest.fail(f"the problems fill {SMS} SMs three times, the device has {device.core_count}")
