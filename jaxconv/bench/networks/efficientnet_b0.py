"""EfficientNet-B0: Tan and Le 2019; inverted residuals with squeeze-and-excitation.

Without stochastic depth and dropout, so that a step is the same in every run.
"""

from __future__ import annotations

import jax

from jaxconv.bench.networks.blocks import Pass, mean_pool

# Expansion, channels, blocks, stride and window of each stage.
STAGES = (
    (1, 16, 1, 1, 3),
    (6, 24, 2, 2, 3),
    (6, 40, 2, 2, 5),
    (6, 80, 3, 2, 3),
    (6, 112, 3, 1, 5),
    (6, 192, 4, 2, 5),
    (6, 320, 1, 1, 3),
)
EPSILON = 1e-3  # of batch normalisation


def conv_norm(net: Pass, x: jax.Array, k: int, window: int, **options) -> jax.Array:
    """Convolution and batch normalisation."""
    return net.batch_norm(net.conv(x, k, window, **options), EPSILON)


def squeeze_excite(net: Pass, x: jax.Array, squeezed: int) -> jax.Array:
    """Scales each channel by a factor that depends on the means of all of them."""
    factors = jax.nn.silu(net.dense(mean_pool(x), squeezed))
    factors = jax.nn.sigmoid(net.dense(factors, x.shape[-1]))
    return x * factors[:, None, None, :]


def mbconv(net: Pass, x: jax.Array, expansion: int, k: int, stride: int, window: int) -> jax.Array:
    """1x1 to more channels, a depthwise convolution, squeeze-and-excitation, 1x1 to ``k``."""
    c = expansion * x.shape[-1]
    y = jax.nn.silu(conv_norm(net, x, c, 1)) if expansion > 1 else x
    y = jax.nn.silu(conv_norm(net, y, c, window, stride=stride, groups=c))
    y = squeeze_excite(net, y, x.shape[-1] // 4)
    y = conv_norm(net, y, k, 1)
    return x + y if x.shape == y.shape else y


def forward(net: Pass, x: jax.Array) -> jax.Array:
    """Logits (N, 1000) of images (N, H, W, 3)."""
    x = jax.nn.silu(conv_norm(net, x, 32, 3, stride=2))
    for expansion, k, blocks, stride, window in STAGES:
        for block in range(blocks):
            x = mbconv(net, x, expansion, k, stride if block == 0 else 1, window)
    x = jax.nn.silu(conv_norm(net, x, 1280, 1))
    return net.dense(mean_pool(x), 1000)
