"""The built-in networks: plain JAX on lax's convolutions, one module each.

``NETWORKS`` maps a name to a ``Network``; ``programs`` makes the inference and the training step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxconv.bench.networks import (
    convnext_t,
    efficientnet_b0,
    mobilenet,
    resnet50,
    resnet50_int8,
    resnext50,
    unet,
    unet3d,
    wavenet,
)
from jaxconv.bench.networks.blocks import Pass


class Quantized(NamedTuple):
    """A network in int8.

    Attributes:
        parameters: (state of the float network, batches of inputs to calibrate with) -> a pytree.
        forward: (that pytree, x) -> y, float32.
    """

    parameters: Callable[[Any, list[jax.Array]], Any]
    forward: Callable[[Any, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Network:
    """A network and the input at which it is usually measured.

    Attributes:
        about: what it is, in a few words.
        forward: (pass, x) -> y, see ``blocks``.
        batch: examples in one step.
        spatial: spatial extents of the input.
        channels: channels of the input.
        multiple: what every spatial extent must be a multiple of.
        draw: (key, shape, dtype) -> a random input.
        quantized: the network in int8, for inference, where it has been written.
        regression: whether the loss is the squared error to a target of the output's shape, and
            not the cross-entropy with a label for each pixel of the output.
    """

    about: str
    forward: Callable[[Pass, jax.Array], jax.Array]
    batch: int
    spatial: tuple[int, ...] = (224, 224)
    channels: int = 3
    multiple: int = 1
    draw: Callable[..., jax.Array] = jax.random.normal
    regression: bool = False
    quantized: Quantized | None = None


NETWORKS: dict[str, Network] = {
    "resnet50": Network(
        "ResNet-50 v1.5, images",
        resnet50.forward,
        256,
        quantized=Quantized(resnet50_int8.quantized, resnet50_int8.forward),
    ),
    "resnext50": Network("ResNeXt-50 32x4d, images: grouped", resnext50.forward, 128),
    "mobilenet_v2": Network("MobileNetV2, images: depthwise", mobilenet.forward, 256),
    "efficientnet_b0": Network(
        "EfficientNet-B0, images: depthwise, squeeze-excite", efficientnet_b0.forward, 128
    ),
    "convnext_t": Network(
        "ConvNeXt-T, images: 7x7 depthwise", convnext_t.forward, 128, multiple=32
    ),
    "unet": Network(
        "Stable Diffusion's U-Net without attention, latents",
        unet.forward,
        8,
        spatial=(64, 64),
        channels=4,
        multiple=8,
        regression=True,
    ),
    "unet3d": Network("3-D U-Net, volumes", unet3d.forward, 2, spatial=(128, 128, 128), multiple=8),
    "wavenet": Network(
        "WaveNet, samples of sound: 1-D, dilated",
        wavenet.forward,
        8,
        spatial=(16384,),
        channels=256,
        draw=wavenet.one_hot_samples,
    ),
}
