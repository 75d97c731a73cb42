"""The 3-D U-Net: Cicek et al. 2016; with padding, so that the result has the input's extent."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxconv.bench.networks.blocks import Pass, max_pool

# Channels of the first convolution at each resolution; the second has twice as many.
CHANNELS = (32, 64, 128, 256)
CLASSES = 3


def twice(net: Pass, x: jax.Array, first: int, second: int) -> jax.Array:
    """Two 3x3x3 convolutions, each with batch normalisation and ReLU."""
    x = jax.nn.relu(net.conv_norm(x, first, 3))
    return jax.nn.relu(net.conv_norm(x, second, 3))


def forward(net: Pass, x: jax.Array) -> jax.Array:
    """Logits (N, D, H, W, 3) of volumes (N, D, H, W, 3), extents multiples of 8."""
    skipped = []
    for level, c in enumerate(CHANNELS):
        if level:
            skipped.append(x)
            x = max_pool(x, 2, 2)
        x = twice(net, x, c, 2 * c)
    for c in reversed(CHANNELS[1:]):
        x = net.conv_transpose(x, x.shape[-1], 2)
        x = twice(net, jnp.concatenate([skipped.pop(), x], axis=-1), c, c)
    return net.conv(x, CLASSES, 1, bias=True)
