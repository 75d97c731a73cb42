"""Kernel instances and problems that the emulator runs, and the programs that run them."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator

import pytest
from emulated import building, host_build
from kernel_tables import INT8_FAMILIES
from numerics import tolerance_of
from problems import Problem, problem

from jaxconv._src.problem.spec import Op

# The emulator runs every line of these families' tables.
WHOLE = ("block_diagonal", "depthwise", "winograd", "winograd_int8")

DEPTHWISE = [
    problem("3x3", (9, 11), 3, c=72, k=72, groups=72, padding=1),
    problem("3x3_stride2", (9, 12), 3, c=40, k=40, groups=40, padding=1, stride=2),
    problem("5x5", (8, 15), 5, c=36, k=36, groups=36, padding=((0, 4), (2, 1))),
    problem("5x5_stride2", (11, 9), 5, c=33, k=33, groups=33, padding=2, stride=2),
    problem("7x7", (7, 10), 7, c=40, k=40, groups=40, padding=3),
    problem("1x3", (2, 31), (1, 3), c=66, k=66, groups=66, padding=(0, 1)),
    problem("1x4", (1, 33), (1, 4), c=70, k=70, groups=70, padding=((0, 0), (3, 0))),
    problem("toeplitz_9", (9, 35), (7, 9), c=24, k=24, groups=24, padding=((3, 3), (4, 2))),
    problem("toeplitz_17", (10, 20), (3, 15), c=24, k=24, groups=24, padding=((0, 2), (7, 7))),
    problem("toeplitz_33", (5, 33), (5, 31), n=1, c=16, k=16, groups=16, padding=(2, 15)),
    problem("toeplitz_33_wide", (11, 67), (3, 33), n=1, c=16, k=16, groups=16, padding=(1, 16)),
    # Two products of 32 rows, three tiles for each CTA; two tiles of rows, windows of even sizes.
    problem("toeplitz_33_wgmma", (37, 20), (19, 31), n=3, c=8, k=8, groups=8, padding=(9, 15)),
    problem(
        "toeplitz_33_wgmma", (60, 13), (4, 15), c=16, k=16, groups=16, padding=((2, 1), (6, 8))
    ),
    # The filter is split into parts of 16 rows and columns; two strips; zero rows between those of
    # x.
    problem("hankel_16x16", (10, 40), (18, 17), c=16, k=16, groups=16, padding=((9, 8), (3, 13))),
    problem(
        "hankel_16x16",
        (5, 9),
        (4, 11),
        c=5,
        k=10,
        groups=5,
        padding=((5, -1), 5),
        lhs_dilation=(2, 1),
        batch=2,
    ),
    # Five images, and filters of two planes: a CTA has several tiles.
    problem("hankel_32x32", (24, 34), 31, n=5, c=8, k=8, groups=8, padding=15),
    problem(
        "hankel_32x32",
        (3, 9, 10),
        (2, 9, 20),
        c=13,
        k=13,
        groups=13,
        padding=((1, 0), (4, 4), (9, 10)),
    ),
]
# For instances that load by TMA: channels in multiples of 8, several tiles for each CTA, tiles that
# span several images, a batch of filters.
DEPTHWISE_TMA = [
    problem("3x3", (9, 31), 3, n=3, c=72, k=72, groups=72, padding=1),
    problem("3x3", 7, 3, n=3, c=40, k=40, groups=40, padding=((0, 2), (1, 1)), batch=2),
    problem("3x3_stride2", (9, 44), 3, n=3, c=72, k=72, groups=72, padding=1, stride=2),
    problem("5x5", (15, 20), 5, n=3, c=40, k=40, groups=40, padding=((0, 4), (2, 1))),
    problem("7x7", (9, 30), 7, n=5, c=40, k=40, groups=40, padding=3),
    # Windows that lie outside the image; several images and filters.
    problem("7x7", (3, 12), 7, n=9, c=40, k=40, groups=40, padding=((8, 7), (3, 2))),
    problem("5x5", (2, 70), 5, n=3, c=72, k=72, groups=72, padding=2, batch=2),
    problem("1x3", (2, 131), (1, 3), c=136, k=136, groups=136, padding=(0, 1)),
    problem("1x4", (1, 333), (1, 4), c=72, k=72, groups=72, padding=((0, 0), (3, 0))),
]
# For "walk" instances also: parts of an image's rows, windows at odd rows, a batch of filters.
DEPTHWISE_WALK = [
    problem("3x3_stride2", (37, 13), 3, c=16, k=16, groups=16, padding=(0, 1), stride=2, batch=2),
    problem("5x5_stride2", (38, 15), 5, c=40, k=40, groups=40, padding=((1, 2), 2), stride=2),
    problem("5x5_stride2", (9, 12), 5, c=24, k=24, groups=24, padding=(2, 1), stride=2, batch=2),
]
# For "pairs" instances (pairs of taps) also: tiles of two images; the last tile has only one.
DEPTHWISE_PAIRS = [problem("3x3", (20, 7), 3, n=3, c=72, k=72, groups=72, padding=1)]
# Only "any" instances accept these: dilation, two outputs for each channel, dilated inputs.
DEPTHWISE_ANY = problem(
    "any", (7, 9), (3, 2), c=34, k=68, groups=34, padding=1, dilation=(1, 2), lhs_dilation=(2, 1)
)

# A tile has 64 channels (32 in float32). The keys are the widths of a block; groups have 4 to 32
# channels, at most the block's width. Channels leave tails.
BLOCK_DIAGONAL = {
    8: [
        problem("3x3", (9, 19), 3, c=72, k=72, groups=18, padding=1),
        problem(
            "strided", (9, 8), (3, 3), c=80, k=80, groups=10, padding=((0, 2), (1, 1)), stride=2
        ),
    ],
    16: [
        problem("3x3", (9, 19), 3, c=72, k=72, groups=18, padding=1),
        problem(
            "strided", (9, 8), (3, 3), c=80, k=80, groups=5, padding=((0, 2), (1, 1)), stride=2
        ),
    ],
    32: [
        problem("3x3", (7, 20), 3, c=96, k=96, groups=3, padding=1),
        problem("strided", (9, 8), (3, 3), c=64, k=64, groups=8, padding=1, stride=(1, 2)),
    ],
}
# Tiles that consist of whole images.
BLOCK_DIAGONAL_MAPS = problem("maps", (5, 6), 3, n=24, c=72, k=72, groups=9, padding=1)
# For "7rows" and "rows" instances (TMA): tails of rows and of columns, padding that two rows share,
# batched filters.
BLOCK_DIAGONAL_RUNS = [
    problem("runs", (9, 15), 3, n=3, c=72, k=72, groups=18, padding=1),
    problem("cropped", (16, 36), 3, c=64, k=64, groups=4, padding=((0, 2), (-1, 3))),
    problem("batched", (7, 7), 3, c=64, k=64, groups=32, padding=1, batch=2),
]
# For "rows" instances (tiles of 64 pixels): two tiles of columns; tiles of several images, the last
# one partial, whose rows share their padding or do not.
BLOCK_DIAGONAL_ROWS = [
    problem("columns", (5, 70), 3, n=2, c=72, k=72, groups=9, padding=1),
    problem("images", (6, 13), 3, n=9, c=64, k=64, groups=2, padding=((1, 0), (2, 2))),
    problem("shared", (7, 7), 3, n=9, c=72, k=72, groups=36, padding=1),
]
# For "stride2" instances: the parity of the padding decides the two residue classes.
BLOCK_DIAGONAL_STRIDED = [
    problem("odd", (18, 37), 3, n=3, c=72, k=72, groups=18, padding=1, stride=2),
    problem("even", (14, 20), 3, c=64, k=64, groups=4, padding=((0, 1), (-2, 3)), stride=2),
    problem("mixed", (9, 58), 3, c=64, k=64, groups=32, padding=((2, 0), (1, 0)), stride=2),
]
# For instances with any filter size: a filter row in two parts.
BLOCK_DIAGONAL_ANY = problem("any", (7, 9), (2, 6), c=24, k=24, groups=12, padding=2, dilation=2)

WINOGRAD = [
    # Three k-blocks of 64 channels; the last has only 8.
    problem("tails", (9, 7), 3, n=1, c=136, k=40, padding=1),
    problem("groups", (5, 14), 3, n=1, c=48, k=32, groups=2, padding=((0, 2), (3, 1))),
]
# Groups of fused_row consist of whole 64-channel blocks; a cluster has a tile in each group.
WINOGRAD_ROWS = problem("rows", (5, 14), 3, n=1, c=128, k=128, groups=2, padding=((0, 2), (3, 1)))
# Pairs of tiles along V's rows (fprop) and U's (dgrad): output channels in multiples of 16.
WINOGRAD_PINGPONG = [
    problem("tails", (9, 7), 3, n=1, c=144, k=48, padding=1),
    problem("groups", (5, 14), 3, n=1, c=64, k=32, groups=2, padding=((0, 2), (3, 1))),
    problem("several_tiles", (11, 34), 3, n=7, c=80, k=272, padding=1),
]
# One full k-block of 32 channels and a partial one: V of all channels is in shared memory.
WINOGRAD_FEW = problem("tails", (9, 7), 3, n=1, c=56, k=40, padding=1)

# Partial tiles; the last problem has several GEMM tiles for each CTA.
WINOGRAD_INT8 = [
    (problem("tails", (9, 7), 3, n=2, c=96, k=160, padding=((1, 1), (0, 3))), ""),
    (problem("nchw32", (7, 18), 3, n=1, c=64, k=32, padding=((2, 2), (-1, 1))), ""),
    (problem("several_tiles", (11, 34), 3, n=5, c=32, k=288, padding=1), ""),
]

DENSE = problem("3x3", (7, 9), 3, c=24, k=40, padding=1)
# Three tiles for each consumer warpgroup.
SEVERAL_TILES = problem("3x3_tiles", (9, 11), 3, n=11, c=16, k=24, padding=1)
PADDED_TILES = problem("3x3_padded", (9, 11), 3, n=15, c=64, k=40, padding=1)
STRIDED = problem("3x3_stride2", (8, 7), 3, c=16, k=72, padding=1, stride=2)
STRIDED_WIDE = problem("3x3_stride2", (8, 7), 3, n=3, c=40, k=160, padding=1, stride=2)
POINTWISE = problem("1x1", (5, 7), 1, c=72, k=24)
# Three tiles of 256 pixels for each CTA.
POINTWISE_PIXELS = problem("1x1_pixels", (37, 35), 1, n=1, c=72, k=24)
# Several tiles for each CTA: one consumer tells the other that there are no more.
POINTWISE_TILES = problem("1x1_tiles", (15, 15), 1, n=2, c=64, k=264)
POINTWISE_GROUPS = problem("1x1_groups", (7, 9), 1, n=3, c=128, k=144, groups=2)
POINTWISE_FEW = problem("1x1_few", (15, 15), 1, n=7, c=72, k=40)
ODD = problem("odd_channels", (6, 5), 3, c=5, k=7, padding=1)
GROUPS = problem("groups", (6, 5), 3, c=16, k=32, groups=2, padding=1)
WIDE = problem("wide_groups", (6, 5), 3, c=128, k=64, groups=2, padding=1)
WIDE_TILES = problem("wide_tiles", (6, 5), 3, c=40, k=96, padding=1)
# Rows of five taps that lie apart, in parts of three; a tile without its third part.
FILTER_ROWS = problem(
    "filter_rows", (9, 12), (2, 5), n=3, c=72, k=96, padding=(1, 4), stride=(2, 1), dilation=(1, 2)
)
# Folded columns (pixels of 24 channels), and folded rows.
PATCHES = problem("patches", (8, 20), 4, c=6, k=24, stride=4)
PATCHES_MANY = problem("patches", (32, 24), (16, 8), n=40, c=3, k=136, stride=(16, 8))
IMAGE = problem("stem", (20, 24), 7, n=1, c=3, k=24, stride=2, padding=3)
# A filter row has 11 x 3 elements; some channel pairs belong to taps that lie apart.
IMAGE_WIDE = problem("stem_11x11", (32, 64), 11, n=3, c=3, k=24, stride=4, padding=((2, 2), (3, 2)))
NARROW = problem("narrow", (20, 70), (3, 2), n=2, c=72, k=3, padding=((1, 1), (0, 2)))
IMAGE_DILATED = problem("dilated", (20, 40), 3, n=2, c=2, k=24, dilation=(2, 3))
# Rows of no multiple of 16 bytes, a last tile that ends within a block, negative padding.
IMAGE_CUT = problem("stem_cut", (21, 37), 7, c=3, k=68, stride=2, padding=((-2, 0), (1, -1)))
IMAGE_ODD = problem("stem_odd", (20, 24), 7, n=1, c=3, k=37, stride=2, padding=3)
EIGHT_BIT = [
    problem("nhwc", (7, 6), 3, n=1, c=32, k=64, padding=1),
    problem("nchw32", (6, 9), 3, n=1, c=64, k=32, padding=1),
]
EIGHT_BIT_PARTIAL = problem("nhwc_partial", (6, 5), 3, n=1, c=160, k=32, padding=1)
# Several tiles for each CTA.
EIGHT_BIT_TILES = [
    problem("nhwc", (11, 10), 3, n=7, c=32, k=160, padding=1),
    problem("nchw32", (13, 22), 3, n=5, c=64, k=64, padding=1),
]
EIGHT_BIT_IMAGE = [
    problem("nhwc", (20, 24), 7, n=1, c=4, k=40, stride=2, padding=3),
    problem("nchw32", (6, 21), 3, n=2, c=4, k=32, padding=1),
]
EIGHT_BIT_DEPTHWISE = {
    "stride1": [problem("3x3", (17, 9), 3, c=80, k=80, groups=80, padding=1)],
    "stride2": [problem("5x5", (13, 19), 5, c=48, k=48, groups=48, padding=2, stride=2)],
    "any": [
        problem(
            "3d",
            (3, 5, 9),
            (2, 3, 4),
            c=16,
            k=16,
            groups=16,
            padding=((1, 0), (0, 2), (6, 0)),
            dilation=(1, 1, 2),
        )
    ],
}
TERMS = "scale bias residual relu"

OTHERS = {
    "fprop_igemm_simt_f32_128x64x8_vec": [DENSE, GROUPS],
    "dgrad_igemm_simt_f32_128x32x8_scalar": [STRIDED],
    "wgrad_igemm_simt_f16_128x32x8_scalar": [ODD],
    "fprop_igemm_wmma_f16_64x64x64_3stage": [DENSE, PATCHES],
    "dgrad_igemm_wmma_f32_64x64x32_3stage": [GROUPS, PATCHES],
    "wgrad_igemm_wmma_bf16_128x16x64_3stage_align2": [ODD, PATCHES],
    "fprop_few_channels_f16_128x64": [IMAGE],
    "fprop_few_channels_bf16_128x64_chunks": [IMAGE, IMAGE_DILATED],
    "fprop_few_channels_bf16_7x7_stride2": [IMAGE],
    "dgrad_few_channels_bf16_7x7_stride2": [IMAGE],
    "dgrad_few_channels_bf16_256x24": [IMAGE],
    "dgrad_few_channels_f16_256x40": [IMAGE_WIDE],
    "wgrad_few_channels_f16_32x64": [IMAGE],
    "wgrad_few_channels_f16_64x64_chunks": [IMAGE_DILATED],
    "wgrad_few_channels_bf16_32x64_chunks": [IMAGE],
    "fprop_few_channels_f32_128x64": [IMAGE, IMAGE_ODD, IMAGE_CUT, IMAGE_DILATED],
    "fprop_few_channels_f32_256x64": [IMAGE, IMAGE_CUT],
    "dgrad_few_channels_f32_256x24": [IMAGE],
    "wgrad_few_channels_f32_32x64": [IMAGE, IMAGE_CUT],
    "wgrad_few_channels_f32_160x64": [IMAGE],
    "fprop_few_channels_f32_256x16_narrow": [NARROW],
    "dgrad_few_channels_f32_128x64_narrow": [NARROW],
    "wgrad_few_channels_f32_160x64_narrow": [NARROW],
    "fprop_few_channels_bf16_256x16_narrow": [NARROW],
    "dgrad_few_channels_f16_128x64_narrow": [NARROW],
    "wgrad_few_channels_bf16_32x64_narrow": [NARROW],
    "wgrad_few_channels_bf16_192x64_chunks": [IMAGE_WIDE],
    "wgrad_few_channels_bf16_7x24_stride2": [IMAGE],
    "fprop_igemm_wgmma_f16_128x128x64_cooperative": [STRIDED],
    "dgrad_igemm_wgmma_bf16_128x64x64_pingpong": [STRIDED],
    "dgrad_igemm_wgmma_bf16_192x128x64_pingpong_patches": [PATCHES, PATCHES_MANY],
    "fprop_igemm_wgmma_bf16_128x128x64_pingpong": [PATCHES_MANY],
    "fprop_igemm_wgmma_f16_192x128x64_pingpong_c48": [PATCHES_MANY],
    "wgrad_igemm_wgmma_bf16_128x128x64_cooperative": [PATCHES_MANY],
    "fprop_igemm_wgmma_f32_128x64x32_pingpong": [DENSE],
    "fprop_igemm_wgmma_f16_128x128x64_pingpong_filter_row": [DENSE],
    "fprop_igemm_wgmma_bf16_256x64x64_swap_ab": [WIDE],
    "dgrad_igemm_wgmma_f16_256x64x64_swap_ab_filter_row": [DENSE],
    "fprop_igemm_wgmma_f16_128x128x64_pointwise": [POINTWISE],
    "fprop_igemm_wgmma_bf16_64x256x64_pointwise_c128": [POINTWISE_TILES],
    "fprop_igemm_wgmma_bf16_64x64x64_cluster": [DENSE],
    "wgrad_igemm_wgmma_f16_128x64x64_pingpong": [STRIDED],
    "wgrad_igemm_wgmma_bf16_192x64x128_filter_row": [DENSE],
    "wgrad_igemm_wgmma_f32_128x64x32_mma_sync": [WIDE],
    "wgrad_igemm_wgmma_f32_256x128x32_cooperative": [WIDE, STRIDED_WIDE],
    "wgrad_igemm_wgmma_f32_576x64x32_filter_row": [WIDE, FILTER_ROWS],
    # Three TF32 products of float32 (test_split_tf32.py).
    "fprop_igemm_wmma_f32_64x64x32_3stage_3xtf32": [DENSE],
    "dgrad_igemm_wmma_f32_128x64x32_3stage_3xtf32": [GROUPS, PATCHES],
    "wgrad_igemm_wmma_f32_64x64x32_3stage_3xtf32": [WIDE],
    "fprop_igemm_wgmma_f32_192x64x32_3xtf32": [SEVERAL_TILES],
    "wgrad_igemm_wgmma_f32_128x128x32_3xtf32": [WIDE_TILES],
    "wgrad_igemm_wgmma_f32_128x64x32_3xtf32": [WIDE, WIDE_TILES],
    "dgrad_igemm_wgmma_f32_128x128x32_3xtf32": [WIDE, STRIDED],
    "fprop_few_channels_f32_128x64_3xtf32": [IMAGE, IMAGE_CUT],
    "dgrad_few_channels_f32_256x24_3xtf32": [IMAGE],
    "wgrad_few_channels_f32_32x64_3xtf32": [IMAGE],
    "wgrad_few_channels_f32_160x64_3xtf32": [IMAGE, IMAGE_CUT],
    "fprop_few_channels_f32_256x16_narrow_3xtf32": [NARROW],
    "wgrad_few_channels_f32_32x64_narrow_3xtf32": [NARROW],
    "fprop_depthwise_int8_s8_64ch_stride1": EIGHT_BIT_DEPTHWISE["stride1"],
    "fprop_depthwise_int8_u8_64ch_stride2": EIGHT_BIT_DEPTHWISE["stride2"],
    "fprop_depthwise_int8_s8_64ch_any": EIGHT_BIT_DEPTHWISE["any"],
    "fprop_imma_few_channels_s8_7x32_stride2": EIGHT_BIT_IMAGE[:1],
    "fprop_imma_few_channels_u8_3x32_any": EIGHT_BIT_IMAGE[1:],
    "fprop_imma_nchw32_s8_64x64x64_4stage": EIGHT_BIT,
    "fprop_imma_wgmma_s8_128x64x128_pingpong": EIGHT_BIT[:1],
    "fprop_imma_wgmma_u8_128x128x128_pingpong_filter_row": [*EIGHT_BIT[1:], EIGHT_BIT_PARTIAL],
    "fprop_imma_wgmma_u8_96x128x128_swap_ab": EIGHT_BIT_TILES[:1],
    "fprop_imma_wgmma_s8_112x128x128_swap_ab_filter_row": EIGHT_BIT_TILES,
    "fprop_imma_wgmma_u8_224x64x128_swap_ab_weight_stationary": EIGHT_BIT_TILES[1:],
}

# With the fused epilogue. The words of the key choose among the kernel's store paths.
EPILOGUES = {
    "fprop_igemm_wgmma_bf16_128x128x64_cooperative": [
        (STRIDED, "scale bias residual relu pre", ""),
        (STRIDED, "scale bias relu6", ""),
        (DENSE, "scale bias residual leaky_relu:0x1p-2 pre", "slices=2"),
        *((DENSE, activation, "") for activation in ("gelu_tanh pre", "sigmoid", "tanh")),
    ],
    "fprop_igemm_wgmma_bf16_128x64x64_pingpong": [(SEVERAL_TILES, "statistics", "offset=1")],
    "fprop_igemm_wgmma_f16_192x128x64_pingpong": [
        (DENSE, "scale bias residual relu6", ""),
        (DENSE, "scale residual gelu pre", ""),
        (POINTWISE_TILES, "bias silu", ""),
        (POINTWISE_TILES, "statistics", "offset=2"),
    ],
    "fprop_igemm_wgmma_f32_128x64x32_pingpong": [(DENSE, "bias residual gelu", "")],
    "fprop_igemm_wgmma_f16_128x128x64_pingpong_filter_row": [(DENSE, "bias hard_swish pre", "")],
    "fprop_igemm_wgmma_bf16_256x64x64_swap_ab": [
        (WIDE, "scale bias relu6", ""),
        (WIDE, "scale residual silu pre", ""),
    ],
    "fprop_igemm_wgmma_f16_224x64x64_swap_ab_filter_row": [(DENSE, "bias residual relu", "")],
    # Pixels of the padding produce no outputs.
    "fprop_igemm_wgmma_bf16_192x64x64_swap_ab_weight_stationary": [
        (PADDED_TILES, "statistics", "offset=3"),
    ],
    "fprop_igemm_wgmma_bf16_128x128x64_pointwise": [
        (POINTWISE_TILES, "scale bias residual relu", ""),
        (POINTWISE_GROUPS, "bias residual", ""),
    ],
    "fprop_igemm_wgmma_f16_64x256x64_pointwise_c128": [
        (POINTWISE, "scale residual relu", ""),
        (POINTWISE_TILES, "scale bias residual relu6", ""),
        (POINTWISE_TILES, "scale bias relu", ""),
        (POINTWISE_TILES, "statistics", "offset=3"),
        (POINTWISE_TILES, "scale bias residual hard_swish pre", ""),
    ],
    "fprop_igemm_wgmma_f16_256x64x64_pointwise_swap_ab": [
        (POINTWISE, "scale bias", ""),
        (POINTWISE, "residual gelu", ""),
        (POINTWISE_FEW, "statistics", "offset=3"),
        (POINTWISE_PIXELS, "bias silu pre", ""),
    ],
    "fprop_igemm_wgmma_bf16_64x64x64_cluster": [
        (DENSE, "scale bias residual relu pre", "slices=1"),
        (DENSE, "scale bias residual silu pre", "slices=3"),
    ],
    "fprop_igemm_wmma_f16_64x64x64_3stage": [
        (DENSE, "scale bias residual relu pre", "slices=2"),
        (PATCHES, "scale bias residual silu", ""),
    ],
    "fprop_igemm_wmma_f32_128x64x32_3stage_3xtf32": [(GROUPS, "scale bias residual relu", "")],
    "fprop_igemm_wgmma_f32_128x128x32_3xtf32": [(DENSE, "scale bias residual relu", "")],
    "fprop_igemm_wmma_bf16_128x16x64_3stage_align2": [(ODD, "scale bias residual gelu pre", "")],
    "fprop_igemm_simt_f32_128x64x8_vec": [(GROUPS, "scale bias residual relu6 pre", "")],
    "fprop_igemm_simt_f16_128x32x8_scalar": [(ODD, "scale bias residual tanh pre", "")],
    "fprop_few_channels_f16_128x64": [(IMAGE, "scale bias relu", "")],
    "fprop_few_channels_f16_256x16_narrow": [(NARROW, "scale bias residual relu pre", "")],
    "fprop_few_channels_f16_128x64_chunks": [
        (IMAGE, "scale bias relu6", ""),
        (IMAGE, "bias residual relu", ""),
    ],
    "fprop_few_channels_f16_7x7_stride2": [
        (IMAGE, "scale bias relu6", ""),
        (IMAGE, "scale bias silu", ""),
        (IMAGE, "bias hard_swish", ""),
    ],
    "fprop_few_channels_f32_128x64": [
        (IMAGE, "scale bias relu6", ""),
        (IMAGE, "bias residual relu pre", ""),
        (IMAGE_ODD, "scale bias silu", ""),
    ],
    "fprop_few_channels_f32_128x64_3xtf32": [
        (IMAGE_CUT, "scale bias relu", ""),
        (IMAGE_CUT, "scale residual gelu", ""),
    ],
    "fprop_few_channels_bf16_128x64": [(IMAGE_ODD, "bias residual sigmoid pre", "")],
    "fprop_depthwise_bf16_64ch_3x3": [(DEPTHWISE[0], "scale bias residual relu6 pre", "")],
    "fprop_depthwise_f16_64ch_any": [(DEPTHWISE_ANY, "bias gelu", "")],
    "fprop_depthwise_bf16_64ch_3x3_tma": [(DEPTHWISE_TMA[0], "scale bias relu6", "")],
    "fprop_depthwise_f16_32ch_7x7_pairs": [
        (DEPTHWISE_TMA[4], "bias", ""),
        (DEPTHWISE_TMA[4], "scale residual silu pre", ""),
        (DEPTHWISE_TMA[4], "scale bias hard_swish", ""),
    ],
    "fprop_depthwise_f16_8ch_3x3_stride2_walk": [
        (DEPTHWISE_TMA[2], "scale bias residual relu6 pre", "")
    ],
    "fprop_depthwise_bf16_4ch_5x5_stride2_walk": [(DEPTHWISE_WALK[1], "scale residual silu", "")],
    "fprop_depthwise_f32_4ch_3x3_stride2_walk": [(DEPTHWISE_TMA[2], "bias residual relu", "")],
    "fprop_depthwise_bf16_32ch_7x7": [(DEPTHWISE[4], "scale bias relu", "")],
    "fprop_depthwise_f32_32ch_5x5_stride2": [(DEPTHWISE[3], "scale residual hard_swish", "")],
}

# 16-bit operands and float32 results, each of which igemm_wgmma stages in a way of its own, or not.
FLOAT_RESULTS = {
    "fprop_igemm_wgmma_f16_128x128x64_cooperative": DENSE,
    "fprop_igemm_wgmma_f16_192x128x64_pingpong_c48": SEVERAL_TILES,
    "fprop_igemm_wgmma_bf16_256x64x64_swap_ab": DENSE,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One instance on one problem key."""

    instance: str
    name: str
    key: str
    options: tuple[str, ...] = ()

    @property
    def eight_bit(self) -> bool:
        return host_build.forms()[self.instance][0] in INT8_FAMILIES


def lines_of(family: str) -> list[str]:
    """One instance of every line of a table. Operations and types alternate."""
    lines: dict[tuple[str, ...], list[str]] = {}
    for name, (of, _, _, *line) in host_build.forms().items():
        if of == family and not name.endswith("_fused"):
            lines.setdefault(tuple(line), []).append(name)
    # Takes names alternately from the front and the back: neighbours differ in operation and type.
    return [names[(-i if i % 2 else i) % len(names)] for i, names in enumerate(lines.values())]


def problems_of_depthwise(instance: str) -> Iterator[tuple[Problem, str]]:
    op, _, _, _, filter_and_stride = instance.split("_", 4)
    if filter_and_stride.endswith("_tma"):
        of_name = filter_and_stride.removesuffix("_tma")
        yield from ((p, "") for p in DEPTHWISE_TMA if p.name == of_name)
        return
    if filter_and_stride.endswith("_pairs"):
        of_name = filter_and_stride.removesuffix("_pairs")
        yield from ((p, "") for p in DEPTHWISE_TMA + DEPTHWISE_PAIRS if p.name == of_name)
        return
    if filter_and_stride.endswith("_walk"):
        of_name = filter_and_stride.removesuffix("_walk")
        yield from ((p, "") for p in DEPTHWISE_TMA + DEPTHWISE_WALK if p.name == of_name)
        return
    for p in [*DEPTHWISE, DEPTHWISE_ANY]:
        # A strided dgrad also runs on stride-1 kernels, which dilate dy with zeros.
        names = {p.name, p.name.removesuffix("_stride2") if op == "dgrad" else p.name}
        long = p.name.startswith(("toeplitz", "hankel"))
        general = filter_and_stride == "any" and p.window != (3, 3) and not long
        if filter_and_stride in names or general:
            yield p, " krsc" if long and op == "dgrad" else ""


def problems_of_block_diagonal(instance: str) -> Iterator[tuple[Problem, str]]:
    op, _, _, _, block, form = instance.removesuffix("_3xtf32").split("_", 5)
    of_form = {
        "stride2": BLOCK_DIAGONAL_STRIDED,
        "7rows": BLOCK_DIAGONAL_RUNS,
        "rows": BLOCK_DIAGONAL_RUNS + BLOCK_DIAGONAL_ROWS,
    }
    if form in of_form:
        for p in of_form[form]:
            # A block of 16 channels has no groups of 32.
            if p.c // p.groups <= int(block.removesuffix("ch")):
                yield p, ""
    if form == "stride2":
        return
    if form in of_form:
        if block == "32ch":
            yield BLOCK_DIAGONAL[32][0], ""
        if form == "7rows":
            yield BLOCK_DIAGONAL_MAPS, ""
        return
    for p in BLOCK_DIAGONAL[int(block.removesuffix("ch"))]:
        yield p, " krsc" if op == "dgrad" else ""
    yield BLOCK_DIAGONAL_MAPS, ""
    if form != "3x3":
        yield BLOCK_DIAGONAL_ANY, ""


def problems_of_winograd(instance: str) -> Iterator[tuple[Problem, str]]:
    if "_pingpong" in instance:
        # A problem of several tiles takes a second, so it runs for one tile only.
        several = "_4x4_four_stage_128x128" in instance and "_f32_" not in instance
        for p in WINOGRAD_PINGPONG if several else WINOGRAD_PINGPONG[:2]:
            yield p, ""
        return
    yield WINOGRAD_FEW if "_4x4_pkf_shmem_" in instance else WINOGRAD[0], ""
    if "_fused_row_" in instance:
        yield WINOGRAD_ROWS, " krsc"
    else:
        yield WINOGRAD[1], " krsc" if "_64x64x64" in instance else ""


def cases() -> Iterator[Case]:
    """Every case, in the order of the tables."""
    whole = [name for family in WHOLE for name in lines_of(family)]
    for instance in [*whole, *OTHERS]:
        family, op, dtype, *_ = host_build.forms()[instance]
        options: tuple[str, ...] = ()
        if family == "depthwise":
            chosen = problems_of_depthwise(instance)
        elif family == "block_diagonal":
            chosen = problems_of_block_diagonal(instance)
        elif family == "winograd":
            chosen = problems_of_winograd(instance)
            options = (f"tolerance={tolerance_of(instance)}",)
        elif family == "winograd_int8":
            chosen = WINOGRAD_INT8
        else:
            chosen = ((p, "") for p in OTHERS[instance])
        for p, words in chosen:
            if family in INT8_FAMILIES:
                layout = " nchw32" if p.name == "nchw32" else ""
                key = p.line(Op(op), "s8").replace("s8:s8:s32", f"{dtype}:s8:{dtype}")
                words = "scale bias relu" if "_swap_ab" in instance else TERMS
                key = f"{key} packed{layout} {words}"
            else:
                key = p.line(Op(op), dtype) + words
            yield Case(instance, p.name, key, options)
    for instance, p in FLOAT_RESULTS.items():
        _, op, dtype, *_ = host_build.forms()[instance]
        key = p.line(Op(op), dtype).replace(f"{dtype}:{dtype}:{dtype}", f"{dtype}:{dtype}:f32")
        yield Case(instance, f"{p.name}_f32", key)
    for instance, of_instance in EPILOGUES.items():
        dtype = host_build.forms()[instance][2]
        for p, words, option in of_instance:
            key = f"{p.line(Op.FPROP, dtype)} {words}"
            name = f"{p.name} {words}".replace(" ", "_")
            yield Case(f"{instance}_fused", name, key, (option,) if option else ())


CASES = list(cases())

# Instances that read prepared filters: one for each tile, and the fused form.
READERS = [
    next(n for n in host_build.forms() if n.startswith("fprop_winograd_") and part in n)
    for part in (
        "_bf16_2x2_four_stage_128x128x64",
        "_f16_4x4_four_stage_64",
        "_bf16_6x6_four_stage_64",
        "_f16_4x3_",
        "_f16_2x2_pkf_shmem_16",
        "_f16_4x4_four_stage_128x128x64_pingpong_half",
    )
]

# This instance scales bfloat16 operands by constants.
ASSUMING = "fprop_winograd_bf16_4x4_four_stage_128x160x64_pingpong_half"


@pytest.fixture(scope="session")
def programs() -> dict[bool | str, pathlib.Path]:
    """The programs by kind: 8-bit instances (True), other instances (False), passes ("passes")."""
    sources: list[tuple[bool | str, pathlib.Path, list[str]]] = [
        ("passes", host_build.TESTS / "cc" / "pass_check.cu", []),
        (True, host_build.TESTS / "cc" / "int8_check.cu", []),
        (False, host_build.EMULATOR / "run_kernels.cc", [*READERS, ASSUMING]),
    ]
    with building() as folder:
        return {
            kind: host_build.build(
                list(dict.fromkeys([*(c.instance for c in CASES if c.eight_bit == kind), *others])),
                folder,
                source,
            )
            for kind, source, others in sources
        }
