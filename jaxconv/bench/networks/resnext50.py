"""ResNeXt-50 32x4d: Xie et al. 2016; ResNet-50 with 32 groups in its 3x3 convolutions."""

from __future__ import annotations

import jax

from jaxconv.bench.networks import resnet50
from jaxconv.bench.networks.blocks import Pass


def forward(net: Pass, x: jax.Array) -> jax.Array:
    """Logits (N, 1000) of images (N, H, W, 3)."""
    return resnet50.forward(net, x, groups=32, width=128)
