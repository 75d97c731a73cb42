"""The gradients of an array that is normalised: ``fuse`` adds them in float32 and rounds once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import equations
from training_programs import conv, draw

import jaxconv

pytestmark = pytest.mark.usefixtures("for_a_gpu_on_the_cpu")

N, H, C = 4, 64, 32

ORDERS = {
    "outside": lambda loss: jax.grad(jaxconv.fuse(loss)),
    "inside": lambda loss: jaxconv.fuse(jax.grad(loss)),
}


def parameters() -> dict[str, jax.Array]:
    return {
        "w": 0.1 * draw(3, 3, C, C, seed=1, dtype=jnp.float16),
        "v": 0.1 * draw(3, 3, C, C, seed=2, dtype=jnp.float16),
        "gain": 1 + 0.1 * draw(C, seed=3, dtype=jnp.float32),
        "offset": 0.1 * draw(C, seed=4, dtype=jnp.float32),
    }


def instance_norm(p, y, activation=jax.nn.silu):
    """Converts once, so that JAX adds the gradients of y in float32."""
    wide = y.astype(jnp.float32)
    mean, variance = wide.mean((1, 2), keepdims=True), wide.var((1, 2), keepdims=True)
    n = (wide - mean) * jax.lax.rsqrt(variance + 1e-3) * p["gain"] + p["offset"]
    return activation(n).astype(y.dtype)


def channels_first(p, y):
    moved = jnp.moveaxis(y, -1, 1)
    wide = moved.astype(jnp.float32)
    mean, variance = wide.mean((2, 3), keepdims=True), wide.var((2, 3), keepdims=True)
    n = (wide - mean) * jax.lax.rsqrt(variance + 1e-3)
    n = n * p["gain"][:, None, None] + p["offset"][:, None, None]
    return jnp.moveaxis(jax.nn.silu(n).astype(y.dtype), 1, -1)


def loss(p, x, norm=instance_norm):
    z = norm(p, conv(x, p["w"]))
    return conv(z, p["v"]).astype(jnp.float32).mean()


def batch_norm_of_two(p, x):
    """The sum of two normalised arrays, which one call computes."""
    left, right = conv(x, p["w"]), conv(x, p["v"])
    summands = []
    for y in (left, right):
        wide = y.astype(jnp.float32)
        n = (wide - wide.mean((0, 1, 2))) * jax.lax.rsqrt(wide.var((0, 1, 2)) + 1e-3)
        summands.append((n * p["gain"] + p["offset"]).astype(y.dtype))
    return conv(jax.nn.relu(sum(summands)), p["v"]).astype(jnp.float32).mean()


LOSSES = {
    "instance norm": loss,
    "channels first": lambda p, x: loss(p, x, channels_first),
    "two arrays": batch_norm_of_two,
}


def narrow_sums(program) -> list[str]:
    """Sums of two 16-bit arrays of the activations' size."""
    return [
        str(eqn)
        for eqn in equations(program)
        if eqn.primitive.name == "add_any"
        and all(a.aval.dtype.itemsize == 2 and a.aval.size >= N * H * H * C for a in eqn.invars)
    ]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["instance norm", "channels first"])
def test_gradients_of_an_array_are_added_in_float32(name, order):
    p, x = parameters(), draw(N, H, H, C, dtype=jnp.float16)
    program = jax.make_jaxpr(ORDERS[order](LOSSES[name]))(p, x)
    calls = {eqn.primitive.name for eqn in equations(program)}
    assert {"jaxconv_moments", "jaxconv_masked_sums"} <= calls
    assert not narrow_sums(program)


@pytest.mark.parametrize("name", LOSSES)
def test_no_array_is_kept_in_float32(name):
    p, x = parameters(), draw(N, H, H, C, dtype=jnp.float16)
    fused = jaxconv.fuse(LOSSES[name])
    residuals = jax.tree.leaves(jax.eval_shape(lambda p, x: jax.vjp(fused, p, x)[1], p, x))
    kept = [aval for aval in residuals if aval.size >= N * H * H * C]
    assert kept and all(aval.dtype == np.float16 for aval in kept)
    # x, y and z; of two arrays also the other y
    assert len(kept) <= (4 if name == "two arrays" else 3)


def batch_norm(p, y):
    wide = y.astype(jnp.float32)
    n = (wide - wide.mean((0, 1, 2))) * jax.lax.rsqrt(wide.var((0, 1, 2)) + 1e-3)
    return jax.nn.silu(n * p["gain"] + p["offset"]).astype(y.dtype)


# Norms behind a convolution with a bias, and whether XLA would store the gradient of the
# convolution's result in float32 for the bias.
BEHIND_A_BIAS = {
    "instance norm, silu": (instance_norm, True),
    "instance norm, relu": (lambda p, y: instance_norm(p, y, jax.nn.relu), False),
    "batch norm, silu": (batch_norm, False),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", BEHIND_A_BIAS)
def test_a_bias_sums_the_gradient_that_is_stored(name, order):
    norm, stored = BEHIND_A_BIAS[name]
    p, x = parameters(), draw(N, H, H, C, dtype=jnp.float16)
    p["bias"] = draw(C, seed=5, dtype=jnp.float16)

    def biased(p, x):
        z = norm(p, jaxconv.conv(x, p["w"], bias=p["bias"]))
        return conv(z, p["v"]).astype(jnp.float32).mean()

    barriers = {
        eqn.outvars[0].aval.dtype
        for eqn in equations(jax.make_jaxpr(ORDERS[order](biased))(p, x))
        if eqn.primitive is jax.lax.optimization_barrier_p and eqn.outvars[0].aval.shape == x.shape
    }
    assert barriers == ({np.dtype(np.float16)} if stored else set())
