"""The random problems of ``gpu_fuzz.py``: each a function of (seed, index)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import gpu_fuzz_fused
import gpu_fuzz_int8
import gpu_fuzz_kinds
import numpy as np
from problems import DTYPES, Problem, problem, xla_aborts

from jaxconv._src.int8.int8_primitive import Int8Spec
from jaxconv._src.problem.epilogue import Epilogue
from jaxconv._src.problem.spec import Op, explicit_input

# Multiplications and additions that the reference may take: 5 ms, and half a second.
SMALL_FLOPS, LARGE_FLOPS = 1e8, 8e9
# Tiles of 128 pixels in a large problem, at least: three for each of an H200's 132 SMs.
LARGE_PIXELS = 400 * 128

DTYPE_CHOICES = (
    *(("f32", "default"),) * 3,
    ("f32", "high"),
    *(("f32", "highest"),) * 2,
    *(("bf16", "default"),) * 5,
    *(("f16", "default"),) * 4,
)
LAYOUT_CHOICES = ("last", "last", "krsc", "first")
INT8_SHARE, LARGE_SHARE = 0.2, 0.15  # of the problems
OF_A_KIND, EVERY = 3, 5  # so many of so many problems are of the kinds of gpu_fuzz_kinds.py


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem with the way to compute it."""

    seed: int
    index: int
    problem: Problem
    op: Op | None  # the primitive; None: a convolution and its gradients
    under_lax: bool  # in that form: lax's convolution under override, or this library's
    dtype: str
    result: str  # the primitive's result type
    precision: str
    layout: str
    int8: Int8Spec | None = None  # a quantised convolution, of x of ``dtype``
    fused: Epilogue | None = None  # of fprop

    @property
    def ops(self) -> tuple[Op, ...]:
        return tuple(Op) if self.op is None else (self.op,)

    @property
    def result_dtype(self) -> np.dtype:
        return DTYPES[self.result][1]

    def __str__(self) -> str:
        if self.int8:
            line = gpu_fuzz_int8.line(self.problem, self.int8, self.dtype)
            return f"--seed {self.seed} --problem {self.index} (int8, {self.layout}): {line}"
        form = self.op.value if self.op else f"vjp of {'lax' if self.under_lax else 'jaxconv'}"
        line = self.problem.line(self.op or Op.FPROP, self.dtype, self.precision)
        line = " ".join([line, *(self.fused.words if self.fused else [])])
        result = f" -> {self.result}" * (self.result != self.dtype)
        return f"--seed {self.seed} --problem {self.index} ({form}, {self.layout}{result}): {line}"


# Gave a wrong result once.
FIXED = [
    problem("wide_padding_groups", (148,), 3, n=3, c=384, k=128, padding=((4, 0),), groups=2),
    problem("wide_padding", (92,), 3, n=1, c=72, k=128, padding=((3, 1),)),
]


def _channels(rng: np.random.Generator, units: list[int], most: int) -> int:
    """A small multiple of one of the units."""
    unit = int(rng.choice(units))
    return unit * int(rng.integers(1, max(1, min(most // unit, 12)), endpoint=True))


def _draw_problem(rng: np.random.Generator, large: bool) -> Problem:
    def chance(probability: float) -> bool:
        return bool(rng.random() < probability)

    def integers(low: int, high: int) -> tuple[int, ...]:
        return tuple(int(v) for v in rng.integers(low, high, rank, endpoint=True))

    rank = int(rng.choice([1, 2, 2, 2, 3]))
    ones = (1,) * rank
    window = ones if chance(0.25) else integers(1, {1: 9, 2: 5, 3: 3}[rank])
    stride = integers(1, 4) if chance(0.35) else ones
    dilation = integers(1, 3) if chance(0.3) else ones
    lhs_dilation = integers(1, 3) if chance(0.15) else ones
    form = rng.choice(
        ["dense", "groups", "narrow groups", "depthwise", "batched", "batched groups"],
        p=[0.45, 0.1, 0.1, 0.2, 0.1, 0.05],
    )
    batch = int(rng.integers(2, 4, endpoint=True)) if "batched" in form else None
    groups = int(rng.choice([2, 3, 4, 8])) if "groups" in form else 1
    if form == "depthwise" and chance(0.5):  # filters that networks have, and long ones
        length = int(rng.choice([3, 5, 7, 9, 13, 31]))
        window = tuple(min(length, {1: 31, 2: 31, 3: 3}[rank]) for _ in range(rank))
        stride = (int(rng.choice([1, 1, 2])),) * rank
        dilation = lhs_dilation = ones
    most = (128 if large else 512) // groups
    units = [8, 16, 32, 64] if chance(0.6) else [1, 1, 2, 4]  # what kernels align to, or tails
    c, k = (groups * _channels(rng, units, most) for _ in range(2))
    if form == "depthwise":
        groups, k = c, c * int(rng.choice([1, 1, 2, 3]))
    elif form == "narrow groups":
        groups = int(rng.integers(2, 16, endpoint=True))
        c = k = groups * int(rng.choice([2, 4, 8, 16, 32]))
    elif groups == 1 and chance(0.2):  # an image
        c = int(rng.integers(1, 4, endpoint=True))
    reach = [(r - 1) * d for r, d in zip(window, dilation, strict=True)]
    padding = []
    kinds = ["none", "same", "any", "wide", "cropping", "mixed"]
    kind = rng.choice(kinds, p=[0.2, 0.25, 0.15, 0.2, 0.1, 0.1])
    for r in reach:
        low, high = {
            "none": (0, 0),
            "same": (r // 2, r - r // 2),
            "any": (-1, r),
            "wide": (0, 2 * r + 4),
            "cropping": (-4, 1),
            "mixed": (-4, r + 4),
        }[kind]
        pair = (low, high) if kind == "same" else rng.integers(low, high, 2, endpoint=True)
        padding.append((int(pair[0]), int(pair[1])))
    if large:
        n = int(rng.choice([1, 3, 8, 32]))
        extent = (LARGE_PIXELS * float(rng.uniform(1, 3)) / n) ** (1 / rank)
        spatial = tuple(
            max(1, round(extent * s / ld * float(rng.uniform(0.8, 1.25))))
            for s, ld in zip(stride, lhs_dilation, strict=True)
        )
    else:
        n = int(rng.integers(1, 5, endpoint=True))
        spatial = integers(1, int(rng.choice({1: (40, 300), 2: (9, 24), 3: (5, 9)}[rank])))
    return Problem(
        name="large" if large else "small",
        spatial=spatial,
        window=window,
        n=n,
        c=c,
        k=k,
        stride=stride,
        padding=tuple(padding),
        lhs_dilation=lhs_dilation,
        dilation=dilation,
        groups=groups,
        batch=batch,
    )


def _flops(p: Problem) -> int:
    positions = (p.batch or 1) * p.n * math.prod(p.out_spatial) * math.prod(p.window)
    return 2 * positions * p.c * p.k // p.groups


def draw(seed: int, index: int, platform: str) -> Case:
    """The problem of this number, the same on every machine."""
    if index < 2 * len(FIXED):  # as a gradient through lax, and as the primitive
        fixed, op = FIXED[index // 2], None if index % 2 == 0 else Op.DGRAD
        return Case(seed, index, fixed, op, True, "bf16", "bf16", "default", "krsc")
    turn = index // EVERY * OF_A_KIND + index % EVERY
    kind = gpu_fuzz_kinds.kind_of(seed, turn) if index % EVERY < OF_A_KIND else None
    share = np.random.default_rng([seed, index, 8]).random()
    if kind.op == gpu_fuzz_kinds.INT8 if kind else share < INT8_SHARE:
        return _draw_int8(seed, index, platform, kind)
    fused = np.random.default_rng([seed, index, 9])
    share = fused.random()
    if kind.op == gpu_fuzz_kinds.FUSED if kind else share < gpu_fuzz_fused.SHARE:
        return _draw_fused(seed, index, platform, gpu_fuzz_fused.draw(fused), kind)
    rng = np.random.default_rng([seed, index])
    dtype, precision = _draw_dtype(rng, kind)
    op = None if rng.random() < (0.1 if kind else 0.4) else Op(rng.choice([o.value for o in Op]))
    if op and kind:
        op = Op(kind.op)
    under_lax = bool(rng.random() < 0.75)
    result = "f32" if op and rng.random() < (0.05 if kind else 0.2) else dtype
    layout = str(rng.choice(LAYOUT_CHOICES))
    p = _draw_float(rng, platform, kind)
    return Case(seed, index, p, op, under_lax, dtype, result, precision, layout)


def _draw_fused(
    seed: int, index: int, platform: str, form: Epilogue, kind: gpu_fuzz_kinds.Kind | None
) -> Case:
    rng = np.random.default_rng([seed, index])
    dtype, precision = _draw_dtype(rng, kind)
    layout = str(rng.choice(("last", "last", "first")))
    p = dataclasses.replace(_draw_float(rng, platform, kind), batch=None)
    return Case(seed, index, p, Op.FPROP, False, dtype, dtype, precision, layout, fused=form)


def _draw_dtype(rng: np.random.Generator, kind: gpu_fuzz_kinds.Kind | None) -> tuple[str, str]:
    """(dtype, precision)"""
    of_kind = [pair for pair in DTYPE_CHOICES if kind is None or pair[0] == kind.dtype]
    return of_kind[rng.integers(len(of_kind))]


def _draw_float(
    rng: np.random.Generator, platform: str, kind: gpu_fuzz_kinds.Kind | None
) -> Problem:
    large = platform == "cuda" and bool(rng.random() < LARGE_SHARE)

    def one() -> Problem:
        if kind is None:
            return _draw_problem(rng, large)
        return gpu_fuzz_kinds.draw(rng, kind.form, LARGE_PIXELS if large else None)

    return _draw_fitting(large, one)


def _draw_int8(seed: int, index: int, platform: str, kind: gpu_fuzz_kinds.Kind | None) -> Case:
    rng = np.random.default_rng([seed, index])
    large = platform == "cuda" and bool(rng.random() < LARGE_SHARE)

    def one() -> Problem:
        if kind:
            return gpu_fuzz_kinds.draw(rng, kind.form, LARGE_PIXELS if large else None)
        return gpu_fuzz_int8.draw_channels(rng, _draw_problem(rng, large), 128 if large else 512)

    p = _draw_fitting(large, one)
    spec, dtype = gpu_fuzz_int8.draw_call(rng, p)
    dtype = kind.dtype if kind else dtype
    result = spec.out_dtype.name
    return Case(seed, index, p, Op.FPROP, False, dtype, result, "default", spec.layout, spec)


def _draw_fitting(large: bool, one: Callable[[], Problem]) -> Problem:
    """The first problem of the wanted size that JAX and the library can express."""
    least, most = (LARGE_PIXELS, LARGE_FLOPS) if large else (1, SMALL_FLOPS)
    while True:
        p = one()
        if (
            all(p.out_spatial)
            and p.n * math.prod(p.out_spatial) >= least
            and _flops(p) <= most
            and min(explicit_input(p.spec()).in_spatial) >= 1
            and not xla_aborts(p)
        ):
            return p
