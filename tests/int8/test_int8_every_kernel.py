"""Every exact 8-bit kernel, forced by name, on every problem that it accepts: bit for bit.

Each problem runs in the layouts that can hold it: as plain sums, with the whole epilogue, and with
the epilogues of most layers, for which kernels have specialised code. Problems with at least three
tiles for each CTA follow from the tile in the instance's name.
"""

import dataclasses
import functools
import re

import kernel_tables
import numpy as np
import pytest
from every_kernel import Forced, Prepared
from int8_reference import (
    OUT_DTYPES,
    channels_last,
    in_layout,
    nchw32,
    operands,
    result_of,
    sums,
    terms_of,
)
from numerics import mismatch
from problems import INT8, INT8_DEPTHWISE, Problem, problem

from jaxconv._src.int8 import int8_primitive
from jaxconv._src.int8.int8_primitive import Int8Spec
from jaxconv._src.library import native

SMS = 132  # an H100 or H200 has
CPU = ("fprop_onednn_s8", "fprop_onednn_u8")
CUDA = [
    each for each in kernel_tables.instances() if each.family in kernel_tables.EXACT_INT8_FAMILIES
]
X_DTYPES = {"s8": np.dtype(np.int8), "u8": np.dtype(np.uint8)}


def instances() -> list:
    """(platform, instance, dtype of x) of every kernel."""
    cpu = native.load("cpu")
    names = [] if isinstance(cpu, native.Refusal) else CPU
    return [pytest.param("cpu", name, name[-2:], id=name) for name in names] + [
        pytest.param("cuda", each.name, each.dtype, marks=pytest.mark.gpu, id=each.name)
        for each in CUDA
    ]


def test_the_cpu_kernels_are_in_the_build(native_cpu):
    assert set(CPU) <= set(native_cpu.kernels())


@functools.lru_cache(maxsize=256)
def case(p: Problem, x_dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    x, w = operands(p, X_DTYPES[x_dtype])
    return x, w, sums(p, x, w)


def layouts(p: Problem) -> tuple[str, ...]:
    packs = p.rank == 2 and p.groups != p.c and p.k % 32 == 0
    return ("nhwc", "nchw32") if packs else ("nhwc",)


def spec_of(p: Problem, instance: str, layout: str, out: str, which: str, *, of_image=False):
    """The call with the terms "none", "whole", or those of most layers ("straight", "residual")."""
    eight_bit = out in ("s8", "u8")
    whole, some = which == "whole", which != "none"
    return Int8Spec(
        conv=p.spec(algorithm=instance),
        layout=layout,
        out_dtype=OUT_DTYPES[out],
        scale=("image_scale" if of_image else "scale") if some else "",
        offset=whole,
        bias=some,
        residual=which in ("whole", "residual"),
        activation="relu6" if whole and not eight_bit else "relu" if some else None,
        zero_point=(3 if out == "u8" else -5) if whole and eight_bit else 0,
    )


def chosen_of(platform: str, p: Problem, spec: Int8Spec, x_dtype: str):
    """The result of ``select`` for the whole problem."""
    x = np.broadcast_to(np.int8(0), p.canonical_shape("x"))
    one = nchw32(x[:1, :1, :1]) if spec.layout == "nchw32" else x
    sizes = dataclasses.replace(spec.sizes(one.shape, (p.k, 0)), n=p.n)
    return int8_primitive.Quantised(spec).select(platform, sizes, X_DTYPES[x_dtype])


def add_calls(forced: Forced, platform: str, p: Problem, specs: list[Int8Spec], x_dtype: str):
    """Adds the calls of a problem that the forced instance takes."""
    for spec in specs:
        chosen, key = chosen_of(platform, p, spec, x_dtype)
        if forced.takes(chosen, key):
            what = (p, spec, x_dtype, f"{chosen.instance} {key}")
            forced.calls.append(functools.partial(quantised_call, *what))


def quantised_call(p: Problem, spec: Int8Spec, x_dtype: str, repro: str) -> Prepared:
    x, w, acc = case(p, x_dtype)
    given = terms_of(p, spec)

    def call(x, w, *rest):
        return int8_primitive.bind(spec, x, w, **dict(zip(spec.terms, rest, strict=True)))

    def judge(y):
        return [mismatch(channels_last(p, spec, y), result_of(spec, acc, given), repro)]

    return call, in_layout(spec, x, w, given), judge


@pytest.mark.parametrize(("platform_name", "instance", "x_dtype"), instances())
def test_exact_or_refused(platform_name, instance, x_dtype):
    forced = Forced(platform_name, instance)
    for number, p in enumerate([*INT8, *INT8_DEPTHWISE]):
        # Over the problems, all result types and both kinds of scales.
        outs = [
            ("s32", "none", False),
            ("s8", "whole", number % 2 == 1),
            (list(OUT_DTYPES)[number % len(OUT_DTYPES)], "whole", number % 2 == 0),
            (("s8", "u8")[number % 2], "residual" if number % 3 == 0 else "straight", False),
        ]
        specs = [
            spec_of(p, instance, layout, out, which, of_image=of_image)
            for layout in layouts(p)
            for out, which, of_image in outs
        ]
        add_calls(forced, platform_name, p, specs, x_dtype)
    forced.check()


def tile(instance: str) -> tuple[int, int]:
    """(tile_m, tile_n), the first numbers of the variant's name."""
    m, n = re.search(r"_(\d+)x(\d+)x\d+_", instance).groups()
    return int(m), int(n)


def steady(instance: str) -> list[Problem]:
    """At least three tiles a CTA, with tails; two tiles along n, or one if it holds the filter."""
    if "_depthwise_int8_" in instance:
        stride = 2 if instance.endswith("_stride2") else 1
        make = functools.partial(problem, n=14, c=272, k=272, groups=272, stride=stride)
        extents = 35 * stride, 75 * stride  # at least twelve tiles; five tiles of channels
        return [make("3x3", extents, 3, padding=1), make("5x4", extents, (5, 4), padding=2)]
    if "_imma_few_channels_" in instance:
        stride = 2 if instance.endswith("_stride2") else 1
        make = functools.partial(problem, n=20, c=4, stride=stride)
        extents = 60 * stride, 150 * stride  # 15 x 2 tiles for each image and part
        return [
            make("3x3", extents, 3, k=72, padding=1),
            make("3x3_nchw32", (extents[0], extents[1] + 1), 3, k=96, padding=1),
        ]
    tile_m, tile_n = tile(instance)
    width, images = 61, 3
    height = -(-(3 * SMS + 10) // 2 * tile_m // (images * width))
    make = functools.partial(problem, n=images, k=tile_n + 32)
    if instance.endswith("_few"):
        return [make("few", (height, width), 3, c=4, padding=1)]
    return [
        make("row", (height, width), (1, 3), c=96, padding=((0, 0), (1, 1))),
        make("long_row", (height, width), (1, 3), c=256, padding=((0, 0), (1, 1))),
        make("square", (height, width), 3, c=64, padding=1),
        make("pointwise", (height, width), 1, c=416),
        make("strided", (2 * height, 2 * width), 3, c=32, stride=2, padding=1),
        make("groups", (height, width), (2, 2), c=64, k=2 * (tile_n + 32), groups=2),
        make("one_tile_wide", (2 * height, width), 3, c=64, k=tile_n, padding=1),
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("each", CUDA, ids=[each.name for each in CUDA])
def test_three_tiles_a_cta(each):
    """Pipelines beyond their first tile, in both layouts."""
    forced = Forced("cuda", each.name)
    for p in steady(each.name):
        specs = [
            spec_of(p, each.name, layout, out, which, of_image=p.name == "row" and which == "whole")
            for layout in layouts(p)
            for out, which in [("s8", "whole"), ("u8", "straight")]
        ]
        add_calls(forced, "cuda", p, specs, each.dtype)
    forced.check(least=2)
    case.cache_clear()


@pytest.mark.gpu
def test_every_problem_has_a_kernel():
    """On a GPU, no 8-bit problem is left to XLA."""
    without = []
    for p in INT8:
        for layout in layouts(p):
            spec = spec_of(p, "native", layout, "s8", "whole")
            x = np.empty(p.canonical_shape("x"), np.int8)
            shape = nchw32(x).shape if layout == "nchw32" else x.shape
            sizes = spec.sizes(shape, (p.k, 0))
            call = int8_primitive.Quantised(spec)
            chosen, key = call.select("cuda", sizes, np.dtype(np.int8))
            without += [] if chosen.instance else [f"{key}: {chosen.refusals[-1:]}"]
    assert not without, "\n".join(without)
