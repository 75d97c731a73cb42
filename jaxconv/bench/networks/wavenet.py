"""WaveNet: van den Oord et al. 2016; dilated causal convolutions over one axis."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxconv.bench.networks.blocks import Pass

DILATIONS = tuple(1 << i for i in range(10)) * 3
RESIDUAL, SKIP = 128, 256
CLASSES = 256


def causal(net: Pass, x: jax.Array, k: int, dilation: int = 1) -> jax.Array:
    """Convolution of two taps: this time step and the one ``dilation`` earlier."""
    return net.conv(x, k, 2, dilation=dilation, padding=(dilation, 0), bias=True)


def forward(net: Pass, x: jax.Array) -> jax.Array:
    """Logits (N, T, 256) of one-hot samples (N, T, 256); each sees its own and earlier steps."""
    x = causal(net, x, RESIDUAL)
    skipped = 0.0
    for layer, dilation in enumerate(DILATIONS, 1):
        filtered, gate = jnp.split(causal(net, x, 2 * RESIDUAL, dilation), 2, axis=-1)
        y = jnp.tanh(filtered) * jax.nn.sigmoid(gate)
        skipped = skipped + net.conv(y, SKIP, 1, bias=True)
        if layer < len(DILATIONS):
            x = x + net.conv(y, RESIDUAL, 1, bias=True)
    y = net.conv(jax.nn.relu(skipped), SKIP, 1, bias=True)
    return net.conv(jax.nn.relu(y), CLASSES, 1, bias=True)


def one_hot_samples(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """Random samples (N, T, 256), each a one among zeros."""
    return jax.nn.one_hot(jax.random.randint(key, shape[:-1], 0, shape[-1]), shape[-1], dtype=dtype)
