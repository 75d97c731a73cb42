"""The convolutional part of Stable Diffusion's U-Net: Rombach et al. 2022.

Residual blocks, skip connections, and the changes of resolution, at the channels of version 1.
Attention and the embeddings of time and text are left out: no convolution is in them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxconv.bench.networks.blocks import Pass

CHANNELS = (320, 640, 1280, 1280)
BLOCKS = 2  # of each resolution on the way down; one more on the way up
GROUPS = 32


def residual(net: Pass, x: jax.Array, k: int) -> jax.Array:
    """Two 3x3 convolutions, each after group normalisation and SiLU."""
    y = net.conv(jax.nn.silu(net.group_norm(x, GROUPS)), k, 3, bias=True)
    y = net.conv(jax.nn.silu(net.group_norm(y, GROUPS)), k, 3, bias=True)
    if x.shape != y.shape:
        x = net.conv(x, k, 1, bias=True)
    return x + y


def upsample(net: Pass, x: jax.Array) -> jax.Array:
    """Every pixel twice along both axes, and a 3x3 convolution."""
    x = jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)
    return net.conv(x, x.shape[-1], 3, bias=True)


def forward(net: Pass, x: jax.Array) -> jax.Array:
    """The noise (N, H, W, 4) in latents of that shape; H and W are multiples of 8."""
    x = net.conv(x, CHANNELS[0], 3, bias=True)
    skipped = [x]
    for level, c in enumerate(CHANNELS):
        if level:
            x = net.conv(x, x.shape[-1], 3, stride=2, bias=True)
            skipped.append(x)
        for _ in range(BLOCKS):
            x = residual(net, x, c)
            skipped.append(x)
    x = residual(net, residual(net, x, x.shape[-1]), x.shape[-1])
    for level, c in reversed(list(enumerate(CHANNELS))):
        for _ in range(BLOCKS + 1):
            x = residual(net, jnp.concatenate([x, skipped.pop()], axis=-1), c)
        if level:
            x = upsample(net, x)
    return net.conv(jax.nn.silu(net.group_norm(x, GROUPS)), 4, 3, bias=True)
