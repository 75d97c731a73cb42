"""The kernels of stems in the emulator: exact results; NaN and Inf reach only their windows."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
from emulated import building, computed, host_build, run
from problems import DTYPES, problem

from jaxconv._src.problem.spec import Op

INSTANCES = [
    "fprop_few_channels_bf16_7x7_stride2",
    "fprop_few_channels_f16_3x3_stride2",
    "dgrad_few_channels_bf16_7x7_stride2",
    "fprop_few_channels_bf16_11x11_stride4",
    "fprop_few_channels_f32_128x64",
    "fprop_few_channels_f32_128x64_3xtf32",
    "wgrad_few_channels_bf16_7x24_stride2",
    "wgrad_few_channels_f16_3x16_stride2",
    "wgrad_few_channels_bf16_4x16_stride4",
    "wgrad_few_channels_bf16_3x16_stride1",
]
# Strips, batches, and parts of 64 output channels; even, odd and negative padding.
BATCHED = problem(
    "batched", (18, 24), 7, n=2, c=4, k=56, stride=2, padding=((2, 3), (4, 2)), batch=2
)
STRIPS = problem("strips", (12, 240), 7, n=1, c=3, k=64, stride=2, padding=3)
CASES = [
    (INSTANCES[0], BATCHED),
    (INSTANCES[0], STRIPS),
    (INSTANCES[0], problem("parts", (15, 64), 7, n=1, c=1, k=136, stride=2, padding=3)),
    (INSTANCES[0], problem("cut", (21, 36), 7, c=2, k=64, stride=2, padding=((-2, 0), (-1, -1)))),
    (
        INSTANCES[1],
        problem("3x3", (22, 232), 3, n=1, c=3, k=72, stride=2, padding=((0, 1), (0, 1))),
    ),
    (INSTANCES[0], problem("bands", (28, 232), 7, c=2, stride=2, padding=((0, 1), 0), batch=2)),
    (INSTANCES[1], problem("bands", (28, 232), 3, n=3, c=2, stride=2, padding=((1, 0), (1, 0)))),
    (INSTANCES[2], problem("bands", (28, 232), 7, n=3, c=1, stride=2, k=8, padding=(3, (2, 3)))),
    (
        INSTANCES[3],
        problem("bands", (71, 236), 11, n=2, c=2, stride=4, k=64, padding=((-2, 0), -1)),
    ),
    (
        INSTANCES[3],
        problem("11x11", (31, 232), 11, n=3, c=3, k=136, stride=4, padding=((2, 2), (3, 3))),
    ),
    (INSTANCES[3], problem("batched", (70, 500), 11, n=3, c=4, k=8, stride=4, padding=2, batch=2)),
    (INSTANCES[2], BATCHED),
    (INSTANCES[2], STRIPS),
    (INSTANCES[2], problem("cut", (21, 36), 7, c=2, k=64, stride=2, padding=((-2, 0), (-1, -1)))),
    (INSTANCES[6], STRIPS),
    # Rows of y of three strips, the last of 22 pixels; many rows in one image.
    (INSTANCES[6], problem("wide", (12, 608), 7, n=1, c=3, k=72, stride=2, padding=3)),
    (INSTANCES[6], problem("long", (61, 40), 7, c=1, n=3, k=8, stride=2, padding=3)),
    (INSTANCES[6], problem("cut", (21, 40), 7, c=1, k=136, stride=2, padding=((-2, 0), (-1, -1)))),
    (
        INSTANCES[6],
        problem(
            "batched", (18, 24), 7, n=2, c=3, k=56, stride=2, padding=((2, 3), (4, 2)), batch=2
        ),
    ),
    (INSTANCES[7], problem("3x3", (22, 232), 3, n=1, c=3, k=72, stride=2, padding=((0, 1), 1))),
    # Filter rows of 12 elements; columns that are three apart.
    (INSTANCES[7], problem("4ch", (28, 264), 3, n=2, c=4, k=32, stride=2, padding=1)),
    (INSTANCES[7], problem("row", (9, 40), (3, 5), c=3, k=8, stride=(2, 3), padding=(1, 0))),
    (INSTANCES[8], problem("two_parts", (31, 232), 4, c=3, k=136, stride=4, padding=(2, 1))),
    # Windows that are an odd number of elements apart.
    (INSTANCES[9], problem("wide", (14, 136), 3, n=3, c=3, k=72, padding=1)),
    (
        INSTANCES[9],
        problem("short", (23, 24), 3, n=2, c=5, k=40, padding=((0, 1), (2, 1)), batch=2),
    ),
    (INSTANCES[8], problem("one_part", (32, 64), 4, n=3, c=3, k=96, stride=4)),
]


@pytest.fixture(scope="module")
def program() -> pathlib.Path:
    """run_kernels, built with INSTANCES."""
    with building() as folder:
        return host_build.build(INSTANCES, folder)


@pytest.mark.parametrize("instance, of", CASES, ids=lambda c: c if isinstance(c, str) else c.name)
def test_rows_are_exact(program, instance, of):
    """CTAs take bands of rows with any first and last row; their ring buffers wrap around."""
    key = of.line(Op(instance[:5]), instance.split("_")[3])
    for seed, sms in ((1, 2), (1, 9), (2, 20)):
        run(program, instance, key, f"seed={seed}", f"sms={sms}")


@pytest.mark.parametrize(
    "instance, size, window, stride, pad",
    [
        ("fprop_few_channels_bf16_7x7_stride2", (20, 24), 7, 2, 3),
        ("fprop_few_channels_f16_3x3_stride2", (20, 24), 3, 2, 1),
        ("dgrad_few_channels_bf16_7x7_stride2", (20, 24), 7, 2, 3),
        ("dgrad_few_channels_bf16_7x7_stride2", (19, 26), 7, 2, 2),
        ("fprop_few_channels_bf16_11x11_stride4", (20, 24), 11, 4, 5),
        # x is copied in 16-byte chunks or in words; the reduction ends within a k-block.
        ("fprop_few_channels_f32_128x64", (20, 24), 7, 2, 3),
        ("fprop_few_channels_f32_128x64", (20, 23), 3, 1, 1),
        ("fprop_few_channels_f32_128x64_3xtf32", (20, 23), 7, 2, 3),
    ],
)
def test_nan_and_infinity_stay_in_their_windows(
    program, instance, size, window, stride, pad, tmp_path
):
    """No NaN beside a window meets a zero of the filter, no infinite weight the padding of dy."""
    fprop, dtype = instance.startswith("fprop"), instance.split("_")[3]
    of = problem("nan", size, window, c=3, k=16, stride=stride, padding=pad)
    rng = np.random.default_rng(3)
    x, w, y = (np.zeros(of.canonical_shape(role)) for role in "xwy")
    source, out = (x, y) if fprop else (y, x)
    w[...] = rng.integers(-2, 3, w.shape)
    w[1, 2, 0, 5] = np.inf
    source[...] = rng.integers(1, 3, source.shape)
    source[0, 0, 0, 0], source[-1, -1, -1, -1], source[1, 4, 7, 1] = np.inf, np.nan, np.nan
    given = source.copy()
    for r, s, p, q in np.ndindex(window, window, *y.shape[1:3]):
        h, v = stride * p + r - pad, stride * q + s - pad
        inside = 0 <= h < size[0] and 0 <= v < size[1]
        with np.errstate(invalid="ignore"):
            if fprop:
                pixel = given[:, h, v] if inside else np.zeros((2, 3))
                out[:, p, q] += (pixel[:, :, None] * w[r, s]).sum(1)
            elif inside:
                out[:, h, v] += (given[:, p, q, None] * w[r, s]).sum(2)
    element, key = DTYPES[dtype][0], of.line(Op(instance[:5]), dtype)
    operands = given.astype(element), w.astype(element)
    actual = computed(program, instance, key, *operands, element, tmp_path, "sms=3")
    np.testing.assert_array_equal(actual.reshape(out.shape).astype(float), out)


@pytest.mark.parametrize(
    "instance, window, stride",
    [
        (i, w, s)
        for i, w, s in (
            (INSTANCES[6], 7, 2),
            (INSTANCES[7], 3, 2),
            (INSTANCES[8], 4, 4),
            (INSTANCES[9], 3, 1),
        )
    ],
)
def test_nan_of_x_reaches_only_the_taps_that_multiply_it(
    program, instance, window, stride, tmp_path
):
    """Also in columns behind the last window, and in pixels of a strip beyond y."""
    of = problem("nan", (20, 24), window, c=3, k=16, stride=stride)
    rng = np.random.default_rng(3)
    x, dy, dw = (np.zeros(of.canonical_shape(role)) for role in "xyw")
    x[...], dy[...] = rng.integers(-2, 3, x.shape), rng.integers(-2, 3, dy.shape)
    x[0, -1, -1], x[1, 5, 8, 1], x[0, 0, 3, 2] = np.nan, np.nan, np.inf
    with np.errstate(invalid="ignore"):
        for r, s, p, q in np.ndindex(window, window, *dy.shape[1:3]):
            pixel = x[:, stride * p + r, stride * q + s]
            dw[r, s] += (pixel[:, :, None] * dy[:, p, q, None]).sum(0)
    dtype = instance.split("_")[3]
    element, key = DTYPES[dtype][0], of.line(Op.WGRAD, dtype)
    operands = x.astype(element), dy.astype(element)
    actual = computed(program, instance, key, *operands, element, tmp_path, "sms=3")
    np.testing.assert_array_equal(actual.reshape(dw.shape).astype(float), dw)
