"""The primitive activated_sums: its operations in JAX and its CUDA kernel, compared with float64.

``test_emulated_kernels`` runs the kernel without a GPU.
"""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from activated_forms import form

from jaxconv._src.fuse.fuse_activations import Written
from jaxconv._src.passes import activated_sums, normalise
from jaxconv._src.passes.normalise import Form
from jaxconv._src.problem import epilogue

# Fewer rows than a CTA has, several parts, a partial last slice of channels.
SHAPES = [(3, 5, 7, 8), (700, 72), (4, 32, 32, 16), (5, 3, 3, 264), (2, 7, 7, 2048), (3, 91, 536)]


def drawn(shape, dtype, vectors=3, rows: int = 0) -> list[jax.Array]:
    """An array, and vectors of its channels or, with ``rows``, one of each for every example."""
    rng = np.random.default_rng(0)
    of_vectors = (rows, shape[-1]) if rows else shape[-1:]
    y = jnp.asarray(3 + rng.standard_normal(shape), dtype)
    mean = jnp.asarray(3 + 0.1 * rng.standard_normal(of_vectors), np.float32)
    others = [jnp.asarray(rng.standard_normal(of_vectors), np.float32) for _ in range(2)]
    return [y, mean, *others][: 1 + vectors]


def bound(of: Form, segments: int, derivatives: bool = False):
    return functools.partial(
        activated_sums.activated_sums, form=of, segments=segments, derivatives=derivatives
    )


def defined(operands, activation: str, segments: int, derivatives: bool = False) -> np.ndarray:
    """The sums in float64."""
    y, *vectors = (np.asarray(o, np.float64) for o in operands)
    mean, scale, offset = (v[:, None, None] if v.ndim == 2 else v for v in vectors)
    with jax.enable_x64(True):
        u = (y - mean) * scale + offset
        z = np.asarray(epilogue.activate(u, activation))
        slope = np.asarray(epilogue.differential(activation, 0.0, u, np.ones_like(u)))
        if activation in ("sigmoid", "tanh"):
            slope = np.asarray(epilogue.differential(activation, 0.0, z, np.ones_like(u)))
    terms = [z, slope, slope * (y - mean)] if derivatives else [z]
    found = np.stack([t.reshape(segments, -1, y.shape[-1]).sum(1) for t in terms], 1)
    return found if segments > 1 else found[0]


def assert_close(actual, expected, rows: int, ulp: float) -> None:
    """Compares sums of rows whose terms are off by an ulp, relatively."""
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=ulp, atol=ulp * rows**0.5)


@pytest.mark.parametrize("segments", [1, 2, 4])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, np.float32])
def test_operations_of_jax(dtype, segments):
    operands = drawn((4, 9, 7, 24), dtype)
    function = bound(form((4, 9, 7, 24), dtype), segments)
    with jax.default_device(jax.devices("cpu")[0]):
        found = function(*operands)
        assert found.dtype == np.float32
        ulp, rows = float(jnp.finfo(dtype).eps), 4 * 9 * 7 // segments
        assert_close(found, defined(operands, "silu", segments), rows, 4 * ulp)
        mapped = jax.vmap(function, (1, None, None, None))
        (second,) = mapped(jnp.stack([operands[0], 2 * operands[0]], 1), *operands[1:])[1:]
        doubled = [2 * operands[0], *operands[1:]]
        assert_close(second, defined(doubled, "silu", segments), rows, 4 * ulp)


@pytest.mark.parametrize("activation", ["relu", "relu6", "silu", "hard_swish", "gelu", "tanh"])
@pytest.mark.parametrize("segments", [1, 4])
def test_sums_of_derivatives(segments, activation):
    operands = drawn((4, 9, 7, 24), np.float32)
    with jax.default_device(jax.devices("cpu")[0]):
        found = bound(form((4, 9, 7, 24), np.float32, activation), segments, True)(*operands)
    assert_close(found, defined(operands, activation, segments, True), 252 // segments, 2e-6)


@pytest.mark.parametrize("vectors", [3, 1])
@pytest.mark.parametrize("segments, rows", [(3, 0), (3, 3), (1, 0)])
def test_derivative(segments, rows, vectors):
    """That of a sum of the normalised array, in both modes and to second order."""
    operands = drawn((3, 4, 8), np.float32, vectors, rows)
    of = form((3, 4, 8), np.float32, vectors=("mean", "scale", "offset")[:vectors])
    ours = bound(of, segments)

    def plain(*operands):
        (z,) = normalise.in_jax(*operands, form=of)
        return z.reshape(segments, -1, 8).sum(1).reshape(ours(*operands).shape)

    with jax.default_device(jax.devices("cpu")[0]):
        close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)
        tangents = [jnp.ones_like(o) for o in operands]
        jax.tree.map(close, jax.jvp(ours, operands, tangents), jax.jvp(plain, operands, tangents))
        ct = jax.random.normal(jax.random.key(0), ours(*operands).shape)
        jax.tree.map(close, jax.vjp(ours, *operands)[1](ct), jax.vjp(plain, *operands)[1](ct))

        def squares(f):
            return jax.hessian(lambda *o: (f(*o) ** 2).sum(), argnums=(0, 1))(*operands)

        close = functools.partial(close, rtol=1e-3, atol=1e-3)
        jax.tree.map(close, squares(ours), squares(plain))


def test_the_derivative_reads_the_array_once(cuda_calls):
    """The forward pass's call has the sums for the vectors; only y is kept."""
    operands = drawn((4, 6, 24), jnp.bfloat16)
    function = bound(form((4, 6, 24), jnp.bfloat16), 4)
    _, back = jax.vjp(function, *operands)
    kept = [a for a in jax.tree.leaves(back) if a.size >= operands[0].size]
    assert [a.dtype for a in kept] == [jnp.bfloat16]
    grad = jax.jit(jax.grad(lambda y, *v: function(y, *v).sum(), argnums=(1, 2, 3)))
    text = grad.trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    (call,) = re.findall(r"custom_call @jaxconv_activated_sums.*", text)
    assert "-> tensor<4x1x3x24xf32>" in call and 'derivative = "silu"' in call


@pytest.mark.parametrize(
    "shape, dtype, segments, changes",
    [
        ((4, 12), jnp.bfloat16, 1, {}),
        ((4, 8), np.float64, 1, {}),
        ((0, 8), np.float32, 1, {}),
        ((4, 8), np.float32, 3, {}),
        ((4, 8), np.float32, 1, dict(activation=None)),
        ((4, 8), np.float32, 1, dict(shortcut=True)),
        ((4, 8), jnp.bfloat16, 1, dict(dtype=np.dtype(np.float32))),
    ],
)
def test_what_the_kernel_does_not_take(shape, dtype, segments, changes):
    of = dataclasses.replace(form(shape, dtype), **changes)
    assert not activated_sums.accepts(of, shape, np.dtype(dtype), segments)


def test_a_derivative_that_kernels_do_not_know():
    """The sums of derivatives of a function whose derivative has no name are JAX operations."""
    of, known = (form((4, 8), np.float32, name) for name in ("gelu", "silu"))
    unnamed = Written(known.activation.function, known.activation.operand, "silu")
    other = dataclasses.replace(of, activation=unnamed)
    assert activated_sums.key(other, (4, 8), np.dtype(np.float32), 1)
    assert activated_sums.key(other, (4, 8), np.dtype(np.float32), 1, True) is None


def test_lowering_for_a_gpu(cuda_calls):
    for segments, result in ((1, "tensor<1x1x24xf32>"), (4, "tensor<4x1x1x24xf32>")):
        operands = drawn((4, 6, 24), jnp.bfloat16)
        function = jax.jit(bound(form((4, 6, 24), jnp.bfloat16), segments))
        text = function.trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
        (types,) = re.findall(r"custom_call @jaxconv_activated_sums.* : (\(.*\) -> .*)", text)
        vectors = ", ".join(["tensor<24xf32>"] * 3)
        assert types.startswith(f"(tensor<4x6x24xbf16>, {vectors}) -> {result}")
        assert ("segments" in text) == (segments > 1) and 'activation = "silu"' in text
        assert "derivative" not in text  # as in earlier versions


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["relu", "silu", "hard_swish", "gelu"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, np.float32])
@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("derivatives", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel(shape, derivatives, segments, dtype, activation):
    segments = shape[0] if segments else 1
    operands = drawn(shape, dtype)
    function = jax.jit(bound(form(shape, dtype, activation), segments, derivatives))
    text = function.lower(*operands).compile().as_text()
    assert 'custom_call_target="jaxconv_activated_sums"' in text
    first = np.asarray(function(*operands))
    rows = operands[0].size // (segments * shape[-1])
    # The errors of derivatives are multiplied by y - mean.
    error = 1e-4 if derivatives else 1e-5
    assert_close(first, defined(operands, activation, segments, derivatives), rows, error)
    np.testing.assert_array_equal(first, np.asarray(function(*operands)))


@pytest.mark.gpu
def test_kernel_with_vectors_of_examples():
    operands = drawn((3, 20, 20, 40), jnp.bfloat16, rows=3)
    function = jax.jit(bound(form((3, 20, 20, 40), jnp.bfloat16), 3))
    assert_close(function(*operands), defined(operands, "silu", 3), 400, 1e-5)
