"""The set "winograd": variants of Winograd beside the direct kernel and lax.

A variant is a CUDA kernel instance of the family. If no instance accepts the problem with a tile,
the variant is the implementation in JAX. In fprop each variant also runs with a prepared filter. On
a GPU the variants are those with the shortest predicted times and, for the layers "seed_*", one of
each form, or all. Variants have rows of their own: lax, peers and the direct kernel are in the row
before them. For quantised layers (dtype int8_nhwc or int8_nchw32) the variants are the tiles of
``jaxconv.int8.conv``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from jaxconv._src.conv import bilinear
from jaxconv._src.int8 import int8_winograd
from jaxconv._src.library import native
from jaxconv._src.problem.spec import Op
from jaxconv._src.ways import winograd_jax
from jaxconv._src.winograd.winograd_filter import LAYOUTS
from jaxconv.bench import prepared_filters
from jaxconv.bench.problem import Problem, Row

# The numbers of kernels with the shortest predictions to take: with the filter transformed in the
# call, and with a prepared filter.
_FASTEST, _FASTEST_PREPARED = 2, 1

# The forms of the seed's paper (docs/winograd.md), and those for Hopper: one variant for each,
# unless the variants differ much.
_FORMS = re.compile(
    r"_[24]x[24]_(elementwise_\w+|four_stage_128x128x64(_pingpong)?|chunked_\w+|sync_free_\w+"
    r"|pkf_\w+)$|_[24]x3_fused_row_\w+$"
)


def of(problem: Problem, platform: str, every: bool = False) -> Iterator[Problem]:
    """The problem with the direct kernel, and with each variant that accepts it.

    Args:
        problem: has the algorithm of the "direct" kernel.
        platform: "cpu" or "cuda"; on any other there are only the implementations in JAX.
        every: whether to take all variants. Otherwise, of kernels with a predicted time, takes
            those with the shortest, and for layers named "seed_*" one of each form.
    """
    yield problem
    layer, op = problem.layer, problem.op
    if problem.requantized:
        spec = layer.spec()
        for name in int8_winograd.ALGORITHMS:
            if not int8_winograd.refusal(spec, problem.operand_dtype, name):
                yield dataclasses.replace(problem, algorithm=name, variant=True)
    if op not in winograd_jax.OPS or problem.operand_dtype == np.int8:
        return
    dtypes = problem.operand_dtype, problem.out_dtype
    short = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}[dtypes[0].name]
    kernels = native.load(platform) if platform in native.PLATFORMS else None
    names = kernels.kernels() if isinstance(kernels, native.Platform) else []
    taken, predicted = [], {}
    for name in names:
        if name.startswith(f"{op.value}_winograd_{short}_"):
            spec = layer.spec(problem.precision, name)
            chosen = bilinear.select(platform, op, spec, layer.sizes, *dtypes)[0]
            if chosen.instance:
                taken.append(name)
                predicted[name] = chosen.microseconds
    for tile in winograd_jax.TILES:
        spec = layer.spec(problem.precision, f"winograd_{tile}")
        in_a_kernel = any(winograd_jax.tile_named(name) == tile for name in taken)
        if not in_a_kernel and not winograd_jax.refusal(op, spec, layer.sizes, dtypes[0]):
            taken.append(f"winograd_{tile}")
    prepared = {}
    for name in taken:
        if op is Op.FPROP and winograd_jax.tile_named(name) in LAYOUTS:
            variant = dataclasses.replace(problem, algorithm=name, variant=True, prepared=True)
            chosen = prepared_filters.selection(variant, platform) if name in names else None
            if chosen is None or chosen.instance:
                prepared[name] = chosen.microseconds if chosen else 0.0
    shown = taken if every else _fastest(predicted, taken, _FASTEST)
    if not every and problem.name.startswith("seed_"):
        shown = [name for name in taken if name in shown or _FORMS.search(name)]
    ready = list(prepared) if every else _fastest(prepared, prepared, _FASTEST_PREPARED)
    for name in taken:
        variant = dataclasses.replace(problem, algorithm=name, variant=True)
        if name in shown:
            yield variant
        if name in ready:
            yield dataclasses.replace(variant, prepared=True)


def _fastest(predicted: dict[str, float], names: Iterable[str], count: int) -> list[str]:
    """The ``count`` names with the shortest predictions, and names without a prediction."""
    known = sorted((name for name in names if predicted.get(name)), key=predicted.__getitem__)
    return [*known[:count], *(name for name in names if not predicted.get(name))]


def _seconds(row: Row, side: str = "jaxconv") -> float | None:
    found = row.sides.get(side)
    return found.median_s if found is not None and not row.wrong else None


def _groups(rows: Sequence[Row]) -> Iterator[tuple[Row, list[Row]]]:
    """Each row of the direct kernel, with the rows of its variants."""
    found: dict[Problem, list[Row]] = {}
    for row in rows:
        key = dataclasses.replace(row.problem, algorithm="", variant=False, prepared=False)
        found.setdefault(key, []).append(row)
    for group in found.values():
        variants = [row for row in group if row.problem.variant]
        direct = next((row for row in group if not row.problem.variant), None)
        if variants and direct is not None:
            yield direct, variants


def _ratio(numerator: float | None, denominator: float | None) -> str:
    return f"{numerator / denominator:.2f}x" if numerator and denominator else "-"


def summary(rows: Sequence[Row]) -> list[str]:
    """The variants of every problem, the fastest first, beside the direct kernel and lax.

    TF/s counts the multiplications of a direct convolution.
    """
    header = ("variant", "us", "direct/it", "lax/it", "TF/s", "error", "temp MB")
    lines: list[str] = []
    for direct, variants in _groups(rows):
        problem = direct.problem
        lax = _seconds(direct, "lax")
        table = [header]
        ordered = sorted([direct, *variants], key=lambda row: _seconds(row) or float("inf"))
        for row in ordered:
            seconds, side = _seconds(row), row.sides["jaxconv"]
            rate = row.rate(problem.layer.flops)
            memory = side.temporary_bytes
            table.append(
                (
                    row.kernel + " prepared" * row.problem.prepared,
                    f"{seconds * 1e6:.1f}" if seconds else "wrong" if row.wrong else "refused",
                    _ratio(_seconds(direct), seconds),
                    _ratio(lax, seconds),
                    f"{rate / 1e12:.3g}" if rate and seconds else "-",
                    "-" if side.error is None else f"{side.error:.1e}",
                    "-" if memory is None else f"{memory / 1e6:.3g}",
                )
            )
        for name in direct.sides.keys() - {"jaxconv", "lax"}:
            if seconds := _seconds(direct, name):
                rate = f"{problem.layer.flops / seconds / 1e12:.3g}"
                ratios = _ratio(_seconds(direct), seconds), _ratio(lax, seconds)
                table.append((name, f"{seconds * 1e6:.1f}", *ratios, rate, "-", "-"))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        label = f"{problem.name} {problem.layer} {problem.op.value} {problem.dtype_label}"
        lines += ["", label]
        for first, *rest in table:
            cells = [first.ljust(widths[0])]
            cells += [c.rjust(width) for c, width in zip(rest, widths[1:], strict=True)]
            lines.append(("  " + "  ".join(cells)).rstrip())
    return lines


def overview(rows: Sequence[Row]) -> list[str]:
    """A line for each problem: the direct kernel, lax and peers, and the fastest variants.

    Ratios are the time of the fastest of the direct kernel, lax and the peers over the variant's;
    TF/s counts the multiplications of a direct convolution.
    """
    groups = list(_groups(rows))
    if not groups:
        return []
    peers = list(dict.fromkeys(name for direct, _ in groups for name in direct.sides))
    peers.remove("jaxconv")
    title = ("layer", "direct us", *(f"{name} us" for name in peers))
    table = [(*title, "us", "ratio", "TF/s", "prepared us", "ratio", "fastest variant, prepared")]
    for direct, variants in groups:
        problem = direct.problem
        others = [_seconds(direct, name) for name in direct.sides]
        least = min((seconds for seconds in others if seconds), default=None)
        found = []
        for prepared in (False, True):
            timed = [(s, row) for row in variants if (s := _seconds(row))]
            found.append(
                min(
                    (entry for entry in timed if entry[1].problem.prepared is prepared),
                    key=lambda entry: entry[0],
                    default=(None, None),
                )
            )
        (seconds, fastest), (ready_seconds, ready) = found
        times = [_seconds(direct), *(_seconds(direct, name) for name in peers), seconds]
        rate = problem.layer.flops / seconds / 1e12 if seconds else None
        kernels = [
            row.kernel.partition("_winograd_")[2] or row.kernel for row in (fastest, ready) if row
        ]
        table.append(
            (
                f"{problem.name} {problem.layer} {problem.op.value} {problem.dtype_label}",
                *("-" if s is None else f"{s * 1e6:.1f}" for s in times),
                _ratio(least, seconds),
                "-" if rate is None else f"{rate:.3g}",
                "-" if ready_seconds is None else f"{ready_seconds * 1e6:.1f}",
                _ratio(least, ready_seconds),
                ", ".join(kernels),
            )
        )
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for first, *middle, last in table:
        cells = [c.rjust(width) for c, width in zip(middle, widths[1:-1], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells, last]).rstrip())
    return ["", "the fastest variant; ratio: the fastest of direct, lax and peers / it", *lines]
