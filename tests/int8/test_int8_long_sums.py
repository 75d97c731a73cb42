"""8-bit sums beyond 2^24, which float32 does not represent exactly: exact on every path.

On a CPU with VNNI the kernels compute them, elsewhere XLA; the first test checks which.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from int8_reference import requantized, sums, terms
from jax import lax
from numerics import assert_exact, into_poison
from problems import Problem, problem

import jaxconv
from jaxconv import int8

# Odd numbers of terms, so that sums of equal products are odd. Taps meet padding on every axis,
# padding is wider than the filter, rows are cropped, windows reach beyond both sides of the input.
PROBLEMS = [
    problem("pixel", 1, 1, n=1, c=1201, k=32),
    problem("pointwise", (7, 5), 1, c=1401, k=24),
    problem("pointwise_strided", (7, 5), 1, c=1203, k=24, stride=2),
    problem("3x3", (6, 7), 3, c=1000, k=32, padding=1),
    problem("same_of_stride_2", (9, 8), 3, c=501, k=40, padding=((0, 1), (1, 0)), stride=2),
    problem("dilated", (11, 9), 3, c=301, k=17, padding=((2, 3), (5, 0)), dilation=2),
    problem("odd_groups", (6, 5), 5, c=2 * 101, k=2 * 9, groups=2, padding=2),
    problem("groups", (6, 5), 5, c=2 * 96, k=2 * 32, groups=2, padding=2),
    problem("wide_padding", (4, 3), 3, n=3, c=401, k=8, padding=((5, 4), (3, 7)), stride=(1, 2)),
    problem("cropped", (9, 8), 3, c=401, k=8, padding=((-2, 1), (1, 2))),
    problem("wider_than_x", (2, 3), 5, c=201, k=8, padding=4),
    problem("1d", (40,), (9,), c=129, k=20, padding=((8, 3),), stride=3),
    problem("3d", (3, 5, 4), (3, 3, 3), c=65, k=12, padding=1),
    problem("many_channels_out", (3, 4), 3, n=1, c=129, k=1030, padding=1),
    problem("depthwise", (36, 35), 33, c=16, k=16, groups=16, padding=2),
    problem("few_channels", 27, 23, c=3, k=8, padding=3),
    problem("dilated_input", 5, 3, c=1401, k=8, padding=1, lhs_dilation=2),
]
X_DTYPES = {"s8": np.int8, "u8": np.uint8}


def extreme(p: Problem, x_dtype, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Operands with the largest sums, which are odd, or with random signs."""
    rng = np.random.default_rng(0)
    limits = np.iinfo(x_dtype)
    x = np.full(p.canonical_shape("x"), limits.max, x_dtype)
    w = np.full(p.canonical_shape("w"), 127, np.int8)
    if kind == "signs":
        few = rng.random(x.shape) < 0.01
        x = np.where(few, limits.min, x)
        w = w * np.where(rng.random(w.shape) < 0.01, -1, 1).astype(np.int8)
        w[..., 1::2] *= -1
    if kind == "least":
        x = (x - rng.integers(0, 2, x.shape)).astype(x_dtype)
        w = -w - rng.integers(0, 2, w.shape).astype(np.int8)
    return x, w


def as_lax_writes_it(convolve, p: Problem, x, w):
    return convolve(
        x,
        w,
        p.stride,
        p.padding,
        p.lhs_dilation,
        p.dilation,
        dimension_numbers={
            1: ("NWC", "WIO", "NWC"),
            2: ("NHWC", "HWIO", "NHWC"),
            3: ("NDHWC", "DHWIO", "NDHWC"),
        }[p.rank],
        feature_group_count=p.groups,
        preferred_element_type=jnp.int32,
    )


def test_kernels_compute_them_on_a_cpu_with_vnni(native_cpu):
    p = PROBLEMS[0]
    x, w = extreme(p, np.int8, "most")
    with jax.default_device(jax.devices("cpu")[0]):
        call = functools.partial(as_lax_writes_it, jaxconv.conv_general_dilated, p)
        (row,) = jaxconv.explain(call, x, w).convolutions
    reasons = [refusal.reason for refusal in row.refusals]
    if any("VNNI" in reason for reason in reasons):
        pytest.skip(f"kernels did not run: {reasons}")
    assert row.instance == "fprop_onednn_s8"


@pytest.mark.parametrize("kind", ["most", "signs", "least"])
@pytest.mark.parametrize("p", PROBLEMS, ids=lambda p: p.name)
def test_sums_by_every_path(platform, p, kind):
    x, w = extreme(p, np.int8, kind)
    expected = sums(p, x, w)
    assert abs(expected.astype(np.int64)).max() > 2**24
    ours = functools.partial(as_lax_writes_it, jaxconv.conv_general_dilated, p)
    assert_exact(into_poison(ours, x, w), expected, f"{p.name} {kind}, conv_general_dilated")
    with jaxconv.override():
        overridden = functools.partial(as_lax_writes_it, lax.conv_general_dilated, p)
        assert_exact(into_poison(overridden, x, w), expected, f"{p.name} {kind}, override")
    if set(p.lhs_dilation) == {1} and p.name != "odd_groups":
        for name, x_dtype in X_DTYPES.items():
            x, w = extreme(p, x_dtype, kind)
            actual = into_poison(functools.partial(int8_sums, p), x, w)
            assert_exact(actual, sums(p, x, w), f"{p.name} {kind}, int8.conv of {name}")


def int8_sums(p: Problem, x, w, **options):
    options = {"out_dtype": jnp.int32, "data_format": "channels_last"} | options
    return int8.conv(
        x,
        int8.pack_filter(
            w,
            groups=p.groups,
            data_format="channels_last",
            filter_format={1: "WIO", 2: "HWIO", 3: "DHWIO"}[p.rank],
        ),
        stride=p.stride,
        padding=p.padding,
        dilation=p.dilation,
        **options,
    )


@pytest.mark.parametrize("out", [np.int8, np.uint8, np.float32])
@pytest.mark.parametrize("name", ["same_of_stride_2", "groups", "cropped", "1d"])
def test_requantised_sums(platform, name, out):
    p = next(p for p in PROBLEMS if p.name == name)
    x, w = extreme(p, np.int8, "signs")
    given = terms(p, out)
    # The scale is so small that results between the extremes depend on the last bits of a sum.
    given["scale"] = np.full(p.k, 1.7e-6 if np.dtype(out).kind != "f" else 1.0, np.float32)
    expected = requantized(sums(p, x, w), out, activation="relu", **given)
    assert len(np.unique(expected)) > 10
    options = dict(given, out_dtype=out, activation="relu")
    assert_exact(into_poison(functools.partial(int8_sums, p, **options), x, w), expected, name)


def test_independent_convolutions(platform):
    """Each convolution has its own filter and its own terms."""
    p = problem("mapped", (5, 6), 3, n=1, c=201, k=16, padding=1)
    x, w = extreme(p, np.int8, "signs")
    xs, ws = np.stack([x, -x - 1, x]), np.stack([w, w, -w])
    actual = jax.jit(jax.vmap(functools.partial(int8_sums, p)))(xs, ws)
    expected = [sums(p, x, w) for x, w in zip(xs, ws, strict=True)]
    assert_exact(np.asarray(actual), np.stack(expected), "vmap")
