"""The instruction sets of x86-64 that the CPU kernels need, and whether this CPU has them."""

from __future__ import annotations

import pathlib
import re

import pytest


def _flags() -> set[str]:
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux, for which there are no CPU kernels
        return set()
    found = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return set(found[1].split()) if found else set()


FLAGS = _flags()
AVX512 = "avx512f" in FLAGS
VNNI = bool(FLAGS & {"avx512_vnni", "avx_vnni"})

_NEEDS_AVX512 = re.compile(r"_(depthwise|few_pixels|few_outputs|small_groups)_")
_NEEDS_VNNI = re.compile(r"_onednn_[su]8")

needs_vnni = pytest.mark.skipif(not VNNI, reason="8-bit kernels need a CPU with VNNI")


def missing(kernel: str) -> str:
    """What a CPU kernel needs and this CPU lacks, or ""; a kernel without it refuses every call."""
    if not AVX512 and _NEEDS_AVX512.search(kernel):
        return "AVX-512"
    return "VNNI" if not VNNI and _NEEDS_VNNI.search(kernel) else ""


def skip_without(kernel: str) -> None:
    """Skips a test of a CPU kernel that refuses every call here."""
    if lacks := missing(kernel):
        pytest.skip(f"{kernel} needs a CPU with {lacks}")
