"""MobileNetV2: Sandler et al. 2018; inverted residuals with depthwise convolutions."""

from __future__ import annotations

import jax

from jaxconv.bench.networks.blocks import Pass, mean_pool, relu6

# Expansion, channels, blocks and stride of each stage.
STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


def inverted_residual(net: Pass, x: jax.Array, expansion: int, k: int, stride: int) -> jax.Array:
    """1x1 to more channels, 3x3 on each channel by itself, 1x1 to ``k`` channels."""
    c = expansion * x.shape[-1]
    y = relu6(net.conv_norm(x, c, 1)) if expansion > 1 else x
    y = relu6(net.conv_norm(y, c, 3, stride=stride, groups=c))
    y = net.conv_norm(y, k, 1)
    return x + y if x.shape == y.shape else y


def forward(net: Pass, x: jax.Array) -> jax.Array:
    """Logits (N, 1000) of images (N, H, W, 3)."""
    x = relu6(net.conv_norm(x, 32, 3, stride=2))
    for expansion, k, blocks, stride in STAGES:
        for block in range(blocks):
            x = inverted_residual(net, x, expansion, k, stride if block == 0 else 1)
    x = relu6(net.conv_norm(x, 1280, 1))
    return net.dense(mean_pool(x), 1000)
