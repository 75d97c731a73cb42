"""The CUDA kernel instances by name, read from ``cc/cuda/*/kernels.def``: needs no CUDA, no build.

A table has one call per design of kernel:

    KERNEL(FPROP_DGRAD, BF16_F16, 256x64x64_swap_ab, swap_ab_sm90, ...)  // 2 ops x 2 types
    PADDED(FPROP_DGRAD, BF16_F16, 256x64x64_swap_ab)  // and each with padded channels
    FUSED(FPROP, BF16_F16, 256x64x64_swap_ab)  // and these with the fused epilogue

The folder is the family. Tables of passes have other calls (cc/cuda/common/pass.h):

    PASS(masked_sums, F32_BF16_F16, bits_g1_y1, ...)  // 1 pass x 3 types
    PASS_SM90(max_pool, BF16_F16, affine_1kept_row_sm90, ...)

An instance is named ``<op>_<family>_<type>_<variant>``, and with padded
channels ``<op>_<family>_<type>_<variant>_padded``, with an epilogue ``..._fused``.
"""

from __future__ import annotations

import itertools
import pathlib
import re
from typing import NamedTuple

TABLES = pathlib.Path(__file__).resolve().parents[2] / "cc" / "cuda"
OPS = ("fprop", "dgrad", "wgrad")
TYPES = ("f32", "bf16", "f16", "s8", "u8")
# Families with packed filters and an epilogue: the call jaxconv_int8.
EXACT_INT8_FAMILIES = ("depthwise_int8", "imma_few_channels", "imma_nchw32", "imma_wgmma")
INT8_FAMILIES = (*EXACT_INT8_FAMILIES, "winograd_int8")

COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
CALL = re.compile(r"\b(KERNEL|PADDED|FUSED)\s*\(([^()]*(?:\([^()]*\)[^()]*)*)\)")
PASS = re.compile(r"^PASS(?:_SM90)?\((\w+), +(\w+), +(\w+), +\((.*)\)\)$", re.MULTILINE)
DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.MULTILINE)


class Instance(NamedTuple):
    """One kernel instance. ``source`` is its device kernel's file name without the ending."""

    op: str
    family: str
    dtype: str
    variant: str
    padded: bool
    source: str
    fused: bool = False

    @property
    def name(self) -> str:
        suffix = "_padded" * self.padded + "_fused" * self.fused
        return f"{self.op}_{self.family}_{self.dtype}_{self.variant}{suffix}"


class Pass(NamedTuple):
    """One kernel of a pass."""

    op: str
    family: str
    dtype: str
    variant: str

    @property
    def name(self) -> str:
        return f"{self.op}_{self.dtype}_{self.variant}"


def parse(family: str, text: str) -> list[Instance]:
    """The instances of one table, in its order.

    Raises:
        ValueError: there is text outside the calls, an unknown operation or type, a duplicate
            instance, or another form of an instance that does not exist.
    """
    text = DIRECTIVE.sub("", COMMENT.sub("", text))
    if rest := CALL.sub("", text).replace(";", "").strip():
        raise ValueError(f"{family}/kernels.def: neither KERNEL, PADDED nor FUSED: {rest[:80]!r}")
    found: dict[str, Instance] = {}
    for macro, arguments in CALL.findall(text):
        ops, types, variant, *rest = (a.strip() for a in arguments.split(","))
        for op, dtype in itertools.product(ops.lower().split("_"), types.lower().split("_")):
            if op not in OPS or dtype not in TYPES or not re.fullmatch(r"\w+", variant):
                raise ValueError(f"{family}/kernels.def: cannot read {macro}({arguments})")
            instance = Instance(op, family, dtype, variant, False, rest[0] if rest else "")
            if macro != "KERNEL":
                plain = instance.name
                if plain not in found:
                    raise ValueError(f"{family}/kernels.def: {macro} without KERNEL: {plain}")
                instance = instance._replace(
                    source=found[plain].source, padded=macro == "PADDED", fused=macro == "FUSED"
                )
            if instance.name in found:
                raise ValueError(f"{family}/kernels.def: twice: {instance.name}")
            found[instance.name] = instance
    return list(found.values())


def all_instances(tables: pathlib.Path = TABLES) -> list[Instance]:
    """Every CUDA instance, family by family."""
    return [
        instance
        for table in sorted(tables.glob("*/kernels.def"))
        for instance in parse(table.parent.name, PASS.sub("", table.read_text()))
    ]


def passes(tables: pathlib.Path = TABLES) -> list[Pass]:
    """Every kernel of a pass, family by family."""
    return [
        Pass(op, table.parent.name, dtype, variant)
        for table in sorted(tables.glob("*/kernels.def"))
        for op, types, variant, _ in PASS.findall(table.read_text())
        for dtype in types.lower().split("_")
    ]


def instances(tables: pathlib.Path = TABLES) -> list[Instance]:
    """Instances for problems without an epilogue, and 8-bit ones, which always have one."""
    return [instance for instance in all_instances(tables) if not instance.fused]


def fused_instances(tables: pathlib.Path = TABLES) -> list[Instance]:
    """Instances for floating-point problems with an epilogue."""
    return [instance for instance in all_instances(tables) if instance.fused]
