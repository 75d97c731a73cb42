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
def test_values_and_gradients(function):
    """Equal to the unchanged program's up to the roundings of sums."""

    def loss(f):
        return lambda p, x: (f(p, x).astype(jnp.float32) ** 2).mean()

    for x in (X, X.astype(jnp.float32)):
        ours = jax.jit(jax.value_and_grad(jaxconv.fuse(loss(function))))(PARAMETERS, x)
        theirs = jax.jit(jax.value_and_grad(loss(function)))(PARAMETERS, x)
        for a, e in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
            error = 2e-2 if x.dtype == jnp.bfloat16 else 1e-3
            assert np.linalg.norm(a - e) <= error * np.linalg.norm(e)


def test_a_gradient_has_one_backward_pass():
    """The layer is normalised once: the mean's gradient joins that of the product with the gate."""

    def loss(p, x):
        return squeezed(p, x).astype(jnp.float32).sum()

    alone = calls(jax.grad(jaxconv.fuse(loss)), PARAMETERS, X)
    assert alone["jaxconv_normalise"] == 1
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
