"""Programs, found by random programs, whose calls and shapes ``fuse`` must not change."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxconv
from jaxconv._src.fuse import fuse_affine

X = jnp.asarray(np.random.default_rng(1).standard_normal((2, 4, 4, 3)), "float32")


@pytest.fixture(autouse=True)
def on_the_cpu(native_cpu):
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def conv(x, k=3):
    w = jnp.asarray(np.random.default_rng(2).standard_normal((1, 1, x.shape[-1], k)), x.dtype)
    return lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), precision="highest"
    )


def pooled(x):
    window = (1, 2, 2, 1)
    return conv(lax.reduce_window(conv(x), -jnp.inf, lax.max, window, window, "VALID"))


def one_channel_of_pixels(x):
    y = conv(x, 1).reshape(2, 16, 1)
    y = (y - y.mean((0, 1))) * lax.rsqrt(y.var((0, 1)) + 1e-3)
    return conv(jax.nn.silu(y * 2 + 1).reshape(2, 4, 4, 1))


def large_factors(x):
    return jnp.where((y := (conv(x) + 1e25) * 1e20 / 1e20) > 0, y, 0)


@pytest.mark.parametrize("function", [pooled, one_channel_of_pixels, large_factors])
def test_derivatives_of_fused_programs(function):
    def tangent(f):
        return jax.jvp(f, (X,), (X,))

    for fused in (jaxconv.fuse(lambda: tangent(function)), lambda: tangent(jaxconv.fuse(function))):
        for a, b in zip(jax.jit(fused)(), jax.jit(lambda: tangent(function))(), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_reads_grow_with_the_depth_of_a_residual_stream(monkeypatch):
    """Every block normalises the stream and adds to it, so each value of it has several readers."""

    def normalised(x, scale, bias):
        mean = jnp.mean(x, (1, 2), keepdims=True)
        variance = jnp.var(x, (1, 2), keepdims=True)
        return (x - mean) * lax.rsqrt(variance + 1e-5) * scale + bias

    def network(x, scale, bias, blocks):
        for _ in range(blocks):
            x = x + normalised(conv(normalised(x, scale, bias), 3), scale, bias)
        return x

    count = 0
    read = fuse_affine.Reader.read

    def counted(*args, **options):
        nonlocal count
        count += 1
        return read(*args, **options)

    monkeypatch.setattr(fuse_affine.Reader, "read", counted)
    counts = []
    for blocks in (4, 8):
        count = 0
        jax.jit(jaxconv.fuse(lambda *a, n=blocks: network(*a, n))).trace(
            X, jnp.ones(3), jnp.ones(3)
        )
        counts.append(count)
    assert 0 < counts[1] < 3 * counts[0]
