"""The means of examples that ``fuse`` computes by calls: squeeze and excitation, the last layer."""

from __future__ import annotations

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jaxprs import equations
from training_programs import conv, draw

import jaxconv

pytestmark = pytest.mark.usefixtures("for_a_gpu_on_the_cpu")

# Activations of 4 MB and more.
N, H, C = 4, 128, 32

X = draw(N, H, H, C)
PARAMETERS = {
    "w": 0.1 * draw(3, 3, C, C, seed=1),
    "v": 0.1 * draw(1, 1, C, C, seed=2),
    "down": 0.1 * draw(C, 8, seed=3, dtype=jnp.float32),
    "up": draw(8, C, seed=4, dtype=jnp.float32),
    **{name: 1 + 0.1 * draw(C, seed=5, dtype=jnp.float32) for name in ("mean", "gain", "offset")},
}


def layer(p, x, activation):
    y = conv(x, p["w"]).astype(jnp.float32)
    return activation((y - p["mean"]) * p["gain"] + p["offset"]).astype(x.dtype)


def gate(p, mean):
    return jax.nn.sigmoid(jax.nn.silu(mean.astype(jnp.float32) @ p["down"]) @ p["up"])


def squeezed(p, x, activation=jax.nn.hard_swish, mean=lambda z: z.mean((1, 2))):
    z = layer(p, x, activation)
    return conv(z * gate(p, mean(z))[:, None, None].astype(z.dtype), p["v"])


def pooled(p, x):
    """The mean of a convolution's result, as before a classifier."""
    return conv(x, p["w"]).astype(jnp.float32).mean((1, 2)) @ p["down"]


def calls(function, *args) -> collections.Counter:
    program = jax.make_jaxpr(function)(*args)
    return collections.Counter(e.primitive.name for e in equations(program))


MEANS = {
    "mean": lambda z: z.mean((1, 2)),
    "float32": lambda z: z.astype(jnp.float32).mean((1, 2)).astype(z.dtype),
    "sum": lambda z: z.sum((1, 2), dtype=jnp.float32) * (1 / (H * H)),
    "two steps": lambda z: z.astype(jnp.float32).mean(1).mean(1),
    "keepdims": lambda z: z.mean((1, 2), keepdims=True).reshape(N, C),
}


@pytest.mark.parametrize("spelling", MEANS)
@pytest.mark.parametrize("activation", [jax.nn.hard_swish, jax.nn.relu, jax.nn.relu6])
def test_a_squeeze_is_one_call(activation, spelling):
    def function(p, x):
        return squeezed(p, x, activation, MEANS[spelling])

    fused = calls(jaxconv.fuse(function), PARAMETERS, X)
    assert fused["jaxconv_activated_sums"] == 1 and fused["reduce_sum"] == 0, fused


def test_an_array_in_memory_is_read_itself():
    fused = calls(jaxconv.fuse(pooled), PARAMETERS, X)
    assert fused["jaxconv_masked_sums"] == 1 and fused["reduce_sum"] == 0, fused


@pytest.mark.parametrize("function", [squeezed, pooled])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_values_and_gradients(function, dtype):
    """At most 1.2 times as inexact as those of the unchanged program."""

    def loss(f):
        return lambda p, x: (f(p, x).astype(jnp.float32) ** 2).mean()

    def computed(f, dtype):
        found = jax.jit(jax.value_and_grad(loss(f)))(PARAMETERS, X.astype(dtype))
        return [np.asarray(a, np.float64) for a in jax.tree.leaves(found)]

    results = computed(jaxconv.fuse(function), dtype), computed(function, dtype)
    least = 2e-3 if dtype == jnp.bfloat16 else 1e-4  # of w, which is bfloat16
    for ours, theirs, exact in zip(*results, computed(function, jnp.float32), strict=True):
        size = np.linalg.norm(exact)
        error = np.linalg.norm(theirs - exact)
        assert np.linalg.norm(ours - exact) <= max(1.2 * error, least * size)


def test_a_gradient_has_one_backward_pass():
    """One call sums for the layer and its gate; the mean has its vectors' gradients already."""

    def loss(p, x):
        return squeezed(p, x).astype(jnp.float32).sum()

    alone = calls(jax.grad(jaxconv.fuse(loss)), PARAMETERS, X)
    assert alone["jaxconv_gated"] == 1 and not alone["jaxconv_normalise"]
    assert alone["jaxconv_masked_sums"] == 1
    inside = calls(jaxconv.fuse(jax.grad(loss)), PARAMETERS, X)
    assert inside["jaxconv_activated_sums"] == alone["jaxconv_activated_sums"] == 1


@pytest.mark.parametrize("case", ["small", "over channels"])
def test_what_stays(case):
    """Small sums, and sums over channels."""
    x = draw(2, 8 if case == "small" else 200, 200, C)

    def function(p, x):
        z = layer(p, x, jax.nn.relu)
        return z * z.mean(3 if case == "over channels" else (1, 2), keepdims=True)

    fused = calls(jaxconv.fuse(function), PARAMETERS, x)
    assert not fused["jaxconv_activated_sums"] and fused["reduce_sum"] == 1, fused


def test_silu():
    fused = calls(jaxconv.fuse(lambda p, x: squeezed(p, x, jax.nn.silu)), PARAMETERS, X)
    assert fused["jaxconv_activated_sums"] == 1 and fused["reduce_sum"] == 0, fused


def test_channels_first():
    """The call of the layer has its channels last; the program has them first."""

    def function(p, x):
        numbers = ("NCHW", "HWIO", "NCHW")
        y = lax.conv_general_dilated(x, p["w"], (1, 1), "SAME", dimension_numbers=numbers)
        spread = {name: p[name][:, None, None] for name in ("mean", "gain", "offset")}
        wide = (y.astype(jnp.float32) - spread["mean"]) * spread["gain"] + spread["offset"]
        z = jax.nn.hard_swish(wide).astype(x.dtype)
        return z * z.mean((2, 3), keepdims=True)

    x = X.transpose(0, 3, 1, 2)
    fused = calls(jaxconv.fuse(function), PARAMETERS, x)
    assert fused["jaxconv_activated_sums"] == 1 and fused["reduce_sum"] == 0, fused
    ours, theirs = (jax.jit(f)(PARAMETERS, x) for f in (jaxconv.fuse(function), function))
    np.testing.assert_allclose(
        ours.astype(np.float32), theirs.astype(np.float32), rtol=3e-2, atol=3e-2
    )
