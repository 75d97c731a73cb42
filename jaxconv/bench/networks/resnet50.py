"""ResNet-50 v1.5: He et al. 2015, with the stride in the 3x3 convolution."""

from __future__ import annotations

import jax

from jaxconv.bench.networks.blocks import Pass, max_pool, mean_pool

# Blocks and stride of each stage.
STAGES = ((3, 1), (4, 2), (6, 2), (3, 2))


def bottleneck(
    net: Pass, x: jax.Array, k: int, stride: int, width: int, groups: int = 1
) -> jax.Array:
    """A residual block of 1x1, 3x3 and 1x1 convolutions, ``width`` channels inside."""
    y = jax.nn.relu(net.conv_norm(x, width, 1))
    y = jax.nn.relu(net.conv_norm(y, width, 3, stride=stride, groups=groups))
    y = net.conv_norm(y, k, 1)
    if x.shape != y.shape:
        x = net.conv_norm(x, k, 1, stride=stride)
    return jax.nn.relu(x + y)


def forward(net: Pass, x: jax.Array, groups: int = 1, width: int = 64) -> jax.Array:
    """Logits (N, 1000) of images (N, H, W, 3); ``width`` channels inside the first stage."""
    x = jax.nn.relu(net.conv_norm(x, 64, 7, stride=2))
    x = max_pool(x, 3, 2, pad=1)
    for stage, (blocks, stride) in enumerate(STAGES):
        for block in range(blocks):
            first = stride if block == 0 else 1
            x = bottleneck(net, x, 256 << stage, first, width << stage, groups)
    return net.dense(mean_pool(x), 1000)
