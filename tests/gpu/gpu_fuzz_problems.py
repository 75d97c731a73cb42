"""The random problems of ``gpu_fuzz.py``: each a function of (seed, index)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import gpu_fuzz_fused
import gpu_fuzz_int8
import gpu_fuzz_kinds
import numpy as np
from fuzz_problems import WIDE, Draw, draw_problem
from problems import DTYPES, Problem, problem, xla_aborts

from jaxconv._src.int8.int8_primitive import Int8Spec
from jaxconv._src.problem.epilogue import Epilogue
from jaxconv._src.problem.spec import Op, explicit_input

# The reference's limits of operations: 5 ms, and half a second.
SMALL_FLOPS, LARGE_FLOPS = 1e8, 8e9
# The least outputs of a large problem: about three tiles of 128 pixels for each of 132 SMs.
LARGE_PIXELS = 400 * 128

DTYPE_CHOICES = (
    *(("f32", "default"),) * 3,
    ("f32", "high"),
    *(("f32", "highest"),) * 2,
    *(("bf16", "default"),) * 5,
    *(("f16", "default"),) * 4,
)
LAYOUT_CHOICES = ("last", "last", "krsc", "first")
LARGE_SHARE = 0.15  # of the problems
# Shares among problems without a kind.
FORM_SHARES = {"plain": 0.68, gpu_fuzz_kinds.FUSED: 0.12, gpu_fuzz_kinds.INT8: 0.2}
OF_A_KIND, EVERY = 3, 5  # so many of so many problems take a kind of gpu_fuzz_kinds.py


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem and the way to compute it."""

    seed: int
    index: int
    problem: Problem
    op: Op | None  # the primitive; None: a convolution and its gradients
    under_lax: bool  # if op is None: whether it is lax's under override
    dtype: str
    result: str  # the primitive's result type
    precision: str
    layout: str
    int8: Int8Spec | None = None  # a quantised convolution; ``dtype`` is the type of x
    fused: Epilogue | None = None  # fprop's epilogue

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


# Regressions: problems that had wrong results.
FIXED = [
    problem("wide_padding_groups", (148,), 3, n=3, c=384, k=128, padding=((4, 0),), groups=2),
    problem("wide_padding", (92,), 3, n=1, c=72, k=128, padding=((3, 1),)),
]


def _flops(p: Problem) -> int:
    positions = (p.batch or 1) * p.n * math.prod(p.out_spatial) * math.prod(p.window)
    return 2 * positions * p.c * p.k // p.groups


def draw_case(seed: int, index: int, platform: str) -> Case:
    """The problem of (seed, index), the same on every machine."""
    if index < 2 * len(FIXED):  # each through lax's gradient, and as the primitive
        fixed, op = FIXED[index // 2], None if index % 2 == 0 else Op.DGRAD
        return Case(seed, index, fixed, op, True, "bf16", "bf16", "default", "krsc")
    turn = index // EVERY * OF_A_KIND + index % EVERY
    kind = gpu_fuzz_kinds.kind_of(seed, turn) if index % EVERY < OF_A_KIND else None
    draw = Draw(seed, index)
    large = platform == "cuda" and draw.chance(LARGE_SHARE)
    form = kind.op if kind else draw.by_share(FORM_SHARES)
    if form == gpu_fuzz_kinds.INT8:
        p = _draw_fitting(draw, large, kind, gpu_fuzz_int8.draw_channels)
        spec, dtype = gpu_fuzz_int8.draw_call(draw, p)
        dtype, result = kind.dtype if kind else dtype, spec.out_dtype.name
        return Case(seed, index, p, Op.FPROP, False, dtype, result, "default", spec.layout, spec)
    pairs = [pair for pair in DTYPE_CHOICES if kind is None or pair[0] == kind.dtype]
    dtype, precision = draw.one_of(*pairs)
    p = _draw_fitting(draw, large, kind)
    if form == gpu_fuzz_kinds.FUSED:
        p, layout = dataclasses.replace(p, batch=None), draw.one_of("last", "last", "first")
        epilogue = gpu_fuzz_fused.draw_epilogue(draw)
        what = (Op.FPROP, False, dtype, dtype, precision, layout)
        return Case(seed, index, p, *what, fused=epilogue)
    op = Op(kind.op) if kind else draw.one_of(*Op)
    op = None if draw.chance(0.1 if kind else 0.4) else op
    result = "f32" if op and draw.chance(0.05 if kind else 0.2) else dtype
    layout = draw.one_of(*LAYOUT_CHOICES)
    return Case(seed, index, p, op, draw.chance(0.75), dtype, result, precision, layout)


def _draw_fitting(
    draw: Draw,
    large: bool,
    kind: gpu_fuzz_kinds.Kind | None,
    change: Callable[[Draw, Problem, int], Problem] = lambda draw, p, channels: p,
) -> Problem:
    """The first drawn problem of the wanted size that JAX and the library can express.

    ``change`` is applied to problems without a kind; its last argument limits the channels.
    """
    least, most = (LARGE_PIXELS, LARGE_FLOPS) if large else (1, SMALL_FLOPS)
    pixels = LARGE_PIXELS if large else 0
    channels = WIDE.channels // 4 if large else WIDE.channels
    while True:
        if kind:
            p = gpu_fuzz_kinds.draw_kind(draw, kind.form, pixels)
        else:
            p = draw_problem(draw, "large" if large else "small", WIDE, pixels)
            p = change(draw, p, channels)
        if (
            all(p.out_spatial)
            and p.n * math.prod(p.out_spatial) >= least
            and _flops(p) <= most
            and min(explicit_input(p.spec()).in_spatial) >= 1
            and not xla_aborts(p)
        ):
            return p
