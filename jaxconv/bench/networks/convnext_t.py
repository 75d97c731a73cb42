"""ConvNeXt-T: Liu et al. 2022; 7x7 depthwise convolutions and channel-wise matrix products.

Without stochastic depth, so that a step is the same in every run.
"""

from __future__ import annotations

import jax

from jaxconv.bench.networks.blocks import Pass, mean_pool

# Blocks and channels of each stage.
STAGES = ((3, 96), (3, 192), (9, 384), (3, 768))
# The initial scale of a block's result. The paper's 1e-6 would hide the blocks from the comparison
# of two convolutions: in bfloat16 x + 1e-6 y is x.
LAYER_SCALE = 0.1


def block(net: Pass, x: jax.Array) -> jax.Array:
    """7x7 on each channel by itself, then two matrix products on each pixel."""
    c = x.shape[-1]
    y = net.layer_norm(net.conv(x, c, 7, groups=c, bias=True))
    y = net.dense(jax.nn.gelu(net.dense(y, 4 * c), approximate=False), c)
    return x + y * net.parameter((c,), mean=LAYER_SCALE).astype(y.dtype)


def forward(net: Pass, x: jax.Array) -> jax.Array:
    """Logits (N, 1000) of images (N, H, W, 3)."""
    for stage, (blocks, c) in enumerate(STAGES):
        if stage == 0:
            x = net.layer_norm(net.conv(x, c, 4, stride=4, padding=(0, 0), bias=True))
        else:
            x = net.conv(net.layer_norm(x), c, 2, stride=2, padding=(0, 0), bias=True)
        for _ in range(blocks):
            x = block(net, x)
    return net.dense(net.layer_norm(mean_pool(x)), 1000)
