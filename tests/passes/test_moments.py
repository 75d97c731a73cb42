"""The primitive moments: its operations in JAX and its CUDA kernel, compared with float64.

``test_emulated_kernels`` runs the kernel without a GPU.
"""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxconv._src.library import native
from jaxconv._src.passes import moments

# Fewer rows than a CTA has, several parts, a partial last slice of channels.
SHAPES = [(3, 5, 7, 8), (700, 72), (4, 32, 32, 16), (5, 3, 3, 264), (2, 7, 7, 2048), (3, 91, 536)]


def drawn(shape: tuple[int, ...], dtype, mean: float = 0.0, seed: int = 0) -> jax.Array:
    """Normal numbers, with means of up to ``mean``."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal(shape) + mean * rng.uniform(-1, 1, shape[-1]), dtype)


def defined(y, segments: int) -> np.ndarray:
    split = np.asarray(y, np.float64).reshape(segments, -1, y.shape[-1])
    mean = split.mean(1)
    rest = mean - mean.astype(np.float32)
    found = np.stack([mean, ((split - mean[:, None]) ** 2).sum(1), rest], 1)
    return found if segments > 1 else found[0]


def assert_close(actual, expected, error: float = 2e-6) -> None:
    """Compares means within a few units in the last place, and M relatively.

    The means together with their rounding errors are accurate relative to the deviations, which are
    about 1.
    """
    mean, squares, rest = (np.asarray(actual, np.float64)[..., i, :] for i in range(3))
    np.testing.assert_allclose(mean, expected[..., 0, :], rtol=error, atol=error)
    np.testing.assert_allclose(squares, expected[..., 1, :], rtol=4 * error)
    np.testing.assert_allclose(mean + rest, expected[..., 0, :], rtol=1e-12, atol=2e-6)


@pytest.mark.parametrize("segments", [1, 2, 4])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, np.float32])
def test_operations_of_jax(dtype, segments):
    y = drawn((4, 9, 7, 24), dtype, 1000)
    with jax.default_device(jax.devices("cpu")[0]):
        found = moments.moments(y, segments=segments)
        assert_close(found, defined(y, segments), 1e-5)
        mapped = jax.vmap(functools.partial(moments.moments, segments=segments), 1)
        (of_second,) = mapped(jnp.stack([y, 2 * y], 1))[1:]
        assert_close(of_second, defined(2 * y, segments), 1e-5)


@pytest.mark.parametrize("segments", [1, 3])
def test_derivative(segments):
    """Equals the derivative of both sums, in forward and reverse mode and to second order."""
    y, dy = drawn((3, 4, 8), np.float32), drawn((3, 4, 8), np.float32, seed=1)
    bind = functools.partial(moments.moments, segments=segments)
    plain = functools.partial(moments.in_jax, segments=segments)
    with jax.default_device(jax.devices("cpu")[0]):
        close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
        jax.tree.map(close, jax.jvp(bind, (y,), (dy,)), jax.jvp(plain, (y,), (dy,)))
        ct = jax.random.normal(jax.random.key(0), bind(y).shape)
        (found,), (expected,) = (jax.vjp(f, y)[1](ct) for f in (bind, plain))
        close(found, expected)

        def squares(f):
            return jax.hessian(lambda y: (f(y) ** 2).sum())(y)

        close(squares(bind), squares(plain))
        tangent = jax.linearize(bind, y.astype(jnp.bfloat16))[1](dy.astype(jnp.bfloat16))
        assert tangent.dtype == np.float32


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float32])
@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_merged_parts(shape, segments, dtype):
    """Parts as a kernel makes them, computed in float64, merge into the moments of all rows."""
    y = drawn(shape, dtype, 100)
    segments = shape[0] if segments else 1
    split = np.asarray(y, np.float64).reshape(segments, -1, shape[-1])
    found = merged(split, min(3, -(-split.shape[1] // 8)))
    assert_close(found if segments > 1 else found[0], defined(y, segments), 5e-6)


@pytest.mark.parametrize("kind", ["trend", "outlier of the last part", "outlier of one row"])
def test_merged_parts_that_differ(kind):
    """Part 0 has one row. The bounds are those of ``_merged``."""
    parts, rows = 64, 63 * 8 + 1
    y = np.asarray(drawn((rows, 16), np.float32), np.float64)
    y += np.linspace(0, 1000, rows)[:, None] if kind == "trend" else 1000
    if kind != "trend":
        y[0 if kind == "outlier of one row" else -1] = 1e5
    y = y.astype(np.float32).astype(np.float64)
    mean, squares, rest = np.asarray(merged(y[None], parts)[0], np.float64)
    expected, of_squares, _ = defined(y, 1)
    assert abs(squares / of_squares - 1).max() < 2 * parts * 2.0**-23
    assert (abs(mean + rest - expected) / np.sqrt(of_squares / rows)).max() < 1e-6


def merged(split: np.ndarray, parts: int) -> jax.Array:
    """The merged moments of float64 segments, (segments, rows, C), in blocks of 8 rows."""
    counts = moments.counts(split.shape[1], native.PassPlan("kernel", "", parts, 8, 1.0))
    assert len(counts) == parts and counts.min() > 0
    assert counts.sum() == split.shape[1]
    ends = np.cumsum(counts)[:-1]

    def of_part(rows: np.ndarray) -> np.ndarray:
        mean, squares, _ = defined(rows, 1)
        return np.stack([rows[0], mean - rows[0], squares])

    by_part = [[of_part(part) for part in np.split(s, ends)] for s in split]
    return moments._merged(jnp.asarray(by_part, np.float32), counts)


@pytest.mark.parametrize(
    "shape, dtype, segments",
    [
        ((4, 12), jnp.bfloat16, 1),
        ((4, 8), np.float64, 1),
        ((0, 8), np.float32, 1),
        ((4, 8), np.float32, 3),
    ],
)
def test_what_the_kernel_does_not_take(shape, dtype, segments):
    assert not moments.accepts(shape, np.dtype(dtype), segments)


def test_lowering_for_a_gpu(cuda_calls):
    for segments, result in ((1, "tensor<1x3x24xf32>"), (4, "tensor<4x1x3x24xf32>")):
        bind = jax.jit(functools.partial(moments.moments, segments=segments))
        y = drawn((4, 6, 24), jnp.bfloat16)
        text = bind.trace(y).lower(lowering_platforms=("cuda",)).as_text()
        (types,) = re.findall(r"custom_call @jaxconv_moments.* : (\(.*\) -> .*)", text)
        assert types.startswith(f"(tensor<4x6x24xbf16>) -> {result}")
        assert ("segments" in text) == (segments > 1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, np.float32])
@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel(shape, segments, dtype):
    segments = shape[0] if segments else 1
    bind = jax.jit(functools.partial(moments.moments, segments=segments))
    y = drawn(shape, dtype, 1000)
    assert 'custom_call_target="jaxconv_moments"' in bind.lower(y).compile().as_text()
    first = np.asarray(bind(y))
    assert_close(first, defined(y, segments), 1e-5)
    np.testing.assert_array_equal(first, np.asarray(bind(y)))
