"""The CUDA kernel of the primitive normalise, compared with float64, and when it is asked for.

``test_emulated_kernels`` runs the kernel without a GPU; ``test_normalise`` has the primitive.
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
from jax import lax

import jaxconv
from jaxconv._src.call import rules
from jaxconv._src.passes import normalise
from jaxconv._src.passes.normalise import Form
from jaxconv._src.problem import epilogue

NHWC = ("NHWC", "HWIO", "NHWC")
EXPONENTIAL = ("silu", "sigmoid", "gelu", "gelu_tanh", "tanh")

# At least four million elements: several slices of channels, rows that fill no block.
SHAPES = [(4, 64, 64, 264), (7, 33, 35, 520), (503, 8200)]


def stored(shape, dtype, activation: str = "silu", **changes) -> Form:
    """A layer whose readers read z from memory."""
    return dataclasses.replace(form(shape, dtype, activation), stored=True, **changes)


def drawn(shape, dtype, examples: bool = False) -> list[jax.Array]:
    """An array, and vectors of its channels or of every example's channels."""
    rng = np.random.default_rng(0)
    of_vectors = (shape[0], shape[-1]) if examples else shape[-1:]
    y = rng.standard_normal(shape).astype(np.float32)
    y.flat[[0, y.size // 2, y.size - 1]] = np.nan, np.inf, -np.inf
    vectors = [jnp.asarray(rng.standard_normal(of_vectors), np.float32) for _ in range(3)]
    return [jnp.asarray(y, dtype), *vectors]


def types(shape, dtype, *vectors) -> list[jax.ShapeDtypeStruct]:
    return [
        jax.ShapeDtypeStruct(shape, dtype),
        *(jax.ShapeDtypeStruct(v, np.float32) for v in vectors),
    ]


def kernel(of: Form, *operands) -> str | None:
    key = normalise.key(of, *operands)
    plan = None if key is None else rules.planned(key)
    return None if plan is None else plan.kernel


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("activation", EXPONENTIAL)
def test_the_kernel_takes_exponentials_in_16_bits(cuda_selection, activation, dtype):
    shape = (8, 64, 64, 128)
    for vector in ((128,), (8, 128)):
        operands = types(shape, dtype, *[vector] * 3)
        found = kernel(stored(shape, dtype, activation), *operands)
        assert found == f"normalise_{'bf16' if dtype == jnp.bfloat16 else 'f16'}_y1"


@pytest.mark.parametrize(
    "shape, dtype, changes",
    [
        ((8, 64, 64, 128), jnp.bfloat16, {"activation": "relu"}),
        ((8, 64, 64, 128), jnp.bfloat16, {"activation": "hard_swish"}),
        ((8, 64, 64, 128), np.float32, {}),
        ((8, 64, 64, 128), jnp.bfloat16, {"dtype": np.dtype(np.float32)}),
        ((8, 64, 64, 128), jnp.bfloat16, {"stored": False}),
        ((8, 64, 64, 130), jnp.bfloat16, {}),
        ((8, 8, 8, 1280), jnp.bfloat16, {}),
    ],
)
def test_the_kernel_leaves_these_layers_to_xla(cuda_selection, shape, dtype, changes):
    activation = changes.pop("activation", "silu")
    of = dataclasses.replace(stored(shape, dtype, activation), **changes)
    assert kernel(of, *types(shape, dtype, *[shape[-1:]] * 3)) is None


def test_lowering_for_a_gpu(cuda_calls):
    shape = (8, 64, 64, 128)
    for vector, segments in (((128,), False), ((8, 128), True)):
        operands = types(shape, jnp.bfloat16, *[vector] * 3)
        function = functools.partial(normalise.normalise, form=stored(shape, jnp.bfloat16))
        traced = jax.jit(function).trace(*operands)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        (found,) = re.findall(r"custom_call @jaxconv_normalise\(.* : (\(.*\) -> .*)", text)
        vectors = ", ".join([f"tensor<{'x'.join(map(str, vector))}xf32>"] * 3)
        assert found.startswith(
            f"(tensor<8x64x64x128xbf16>, {vectors}) -> tensor<8x64x64x128xbf16>"
        )
        assert ("segments = 8" in text) == segments and 'activation = "silu"' in text


@pytest.mark.gpu
@pytest.mark.parametrize("activation", EXPONENTIAL)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("examples", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel(shape, examples, dtype, activation):
    operands = drawn(shape, dtype, examples)
    function = jax.jit(
        functools.partial(normalise.normalise, form=stored(shape, dtype, activation))
    )
    text = function.lower(*operands).compile().as_text()
    assert 'custom_call_target="jaxconv_normalise"' in text
    (z,) = function(*operands)
    y, mean, scale, offset = (np.asarray(o, np.float64) for o in operands)
    if examples:
        of = (slice(None), *[None] * (len(shape) - 2))
        mean, scale, offset = mean[of], scale[of], offset[of]
    with jax.enable_x64(True):
        expected = np.asarray(epilogue.activate((y - mean) * scale + offset, activation))
    # Half an ulp of the result, and the activation's and the operand's own errors.
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(z, np.float64), expected, rtol=eps / 2 + 5e-5, atol=1e-5)


@pytest.mark.gpu
def test_kernel_without_vectors():
    shape = (8, 64, 64, 128)
    y = drawn(shape, jnp.bfloat16)[0]
    of = stored(shape, jnp.bfloat16, vectors=((),), copies=2)
    function = jax.jit(functools.partial(normalise.normalise, form=of))
    assert 'custom_call_target="jaxconv_normalise"' in function.lower(y).compile().as_text()
    for z in function(y):
        expected = np.asarray(jax.nn.silu(y.astype(np.float32)))
        np.testing.assert_allclose(np.asarray(z, np.float32), expected, rtol=2**-8 + 1e-4)


def layers(w, x):
    """Two convolutions with a batch norm and silu between them."""
    y = lax.conv_general_dilated(x, w[0], (1, 1), "SAME", dimension_numbers=NHWC)
    wide = y.astype(np.float32)
    mean, variance = wide.mean((0, 1, 2)), wide.var((0, 1, 2))
    z = jax.nn.silu((wide - mean) * lax.rsqrt(variance + 1e-3) * w[1] + w[2]).astype(x.dtype)
    return lax.conv_general_dilated(z, w[0], (1, 1), "SAME", dimension_numbers=NHWC)


@pytest.mark.gpu
def test_fuse_calls_the_kernel():
    """Values and gradients are lax's up to the roundings of bfloat16."""
    keys = jax.random.split(jax.random.key(0), 4)
    filters = jax.random.normal(keys[0], (3, 3, 64, 64), jnp.bfloat16) / 24
    w = [filters, *(1 + jax.random.normal(k, (64,)) / 4 for k in keys[1:3])]
    x = jax.random.normal(keys[3], (32, 56, 56, 64), jnp.bfloat16)

    def loss(w, x):
        return (layers(w, x).astype(np.float32) ** 2).mean()

    fused = jax.jit(jaxconv.value_and_grad(loss))
    assert 'custom_call_target="jaxconv_normalise"' in fused.lower(w, x).compile().as_text()
    value, gradient = fused(w, x)
    expected, of_lax = jax.jit(jax.value_and_grad(loss))(w, x)
    np.testing.assert_allclose(value, expected, rtol=1e-2)
    for ours, theirs in zip(gradient, of_lax, strict=True):
        ours, theirs = np.asarray(ours, np.float32), np.asarray(theirs, np.float32)
        assert np.linalg.norm(ours - theirs) <= 2e-2 * np.linalg.norm(theirs)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "at, change, said",
    [
        (0, lambda a: a.astype(np.int32), "y: expected dtype"),
        (1, lambda a: a[:-1], "mean: expected shape"),
        (2, lambda a: jnp.ones((3, 8)), "scale: expected shape"),
    ],
)
def test_a_handler_names_the_buffer_that_does_not_match(at, change, said, registered_cuda_kernels):
    given = [jnp.ones((4, 5, 8), jnp.bfloat16), *[jnp.ones(8)] * 3]
    given[at] = change(given[at])
    call = jax.ffi.ffi_call(normalise.TARGET, jax.ShapeDtypeStruct((4, 5, 8), jnp.bfloat16))
    with pytest.raises(Exception, match=said):
        jax.block_until_ready(jax.jit(lambda *a: call(*a, activation="silu"))(*given))
