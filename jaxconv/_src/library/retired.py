"""Kernel instances of former versions, whose names occur in exported programs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple


class Retired(NamedTuple):
    """The replacement of a removed instance.

    Attributes:
        since: the first version without it.
        instead: the instances for its problems.
    """

    since: str
    instead: str


# Variants of depthwise and of winograd's tiles in bf16 and f16, fprop and dgrad, and the variants
# for their problems.
_DEPTHWISE = {
    "32ch_3x3_tma": "32ch_3x3_pairs",
    "32ch_5x5_tma": "32ch_5x5_pairs",
    "64ch_3x3_stride2_tma": "8ch_3x3_stride2_walk",
}
_PINGPONG, _PORTABLE = "four_stage_128x128x64_pingpong", "four_stage_128x128x64"
_ON_WGMMA = {"four_stage_128x128x64_wgmma": _PINGPONG, "chunked_128x128x64_wgmma": _PINGPONG}
_WINOGRAD = {
    "2x2": (
        *("elementwise_8x16", "pkf_llc_16x64", "pkf_llc_32x64"),
        *(f"sync_free_32x64_{shape}" for shape in ("16x16x16", "32x8x16", "8x32x16")),
        "four_stage_64x64x64",
    ),
    "4x4": (
        *("elementwise_8x16", "pkf_llc_16x64", "pkf_llc_32x32"),
        *(f"sync_free_32x32_{shape}" for shape in ("16x16x16", "32x8x16", "8x32x16")),
    ),
    "6x6": (),
}
# Variants of igemm_simt in bf16 and f16, of every operation.
_SIMT = {"128x128x8_vec_wide": "128x128x8_vec", "128x64x8_vec_wide": "128x64x8_vec"}
# Single names.
_ALONE = {
    "wgrad_igemm_wgmma_f32_128x256x32_mma_sync": "wgrad_igemm_wgmma_f32_128x128x32_cooperative",
    "wgrad_igemm_wgmma_f32_256x128x32_mma_sync": "wgrad_igemm_wgmma_f32_256x128x32_cooperative",
    "fprop_imma_nchw32_s8_256x128x128_3stage": "fprop_imma_nchw32_s8_128x128x128_3stage",
    "fprop_imma_nchw32_u8_256x128x128_3stage": "fprop_imma_nchw32_u8_128x128x128_3stage",
}
# They stay as references (cc/cuda/winograd/kernels.def).
_KEPT = {
    f"fprop_winograd_f16_2x2_{form}"
    for form in ("elementwise_8x16", "pkf_llc_32x64", "sync_free_32x64_16x16x16")
}


def _since_0_2() -> Iterator[tuple[str, str]]:
    """Names, and those that take their place."""
    for op, dtype in itertools.product(("fprop", "dgrad"), ("bf16", "f16")):
        for name, instead in _DEPTHWISE.items():
            for suffix in ("", "_fused") if op == "fprop" else ("",):
                of = f"{op}_depthwise_{dtype}_"
                yield f"{of}{name}{suffix}", f"{of}{instead}{suffix}"
        for tile, portable in _WINOGRAD.items():
            of = f"{op}_winograd_{dtype}_{tile}_"
            for form, instead in {**dict.fromkeys(portable, _PORTABLE), **_ON_WGMMA}.items():
                yield of + form, of + instead
    for op, dtype in itertools.product(("fprop", "dgrad", "wgrad"), ("bf16", "f16")):
        for name, instead in _SIMT.items():
            yield f"{op}_igemm_simt_{dtype}_{name}", f"{op}_igemm_simt_{dtype}_{instead}"
    yield from _ALONE.items()


# By name. An instance of a published version must be added here when it is deleted.
RETIRED: dict[str, Retired] = {
    name: Retired("0.2.0", instead) for name, instead in _since_0_2() if name not in _KEPT
}


def advice(instance: str) -> str:
    """Advice for a program with an instance name that this version lacks."""
    what = "The program was exported by another version of jaxconv"
    if instance in RETIRED:
        since, instead = RETIRED[instance]
        what += f"; since {since} {instead} takes the place of this kernel"
    return f"{what}. Run it with the version that exported it, or export it again with this one."
