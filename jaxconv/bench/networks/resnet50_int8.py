"""ResNet-50 v1.5 in int8: batch normalisation folded, one convolution a layer, NCHW32 throughout.

The image is quantised to 4 channels, as the stem reads it. Bias, residual, ReLU and requantisation
are in the convolutions, max pooling is of int8, and the pooled features are quantised once more for
the classifier, a 1x1 convolution with float32 results.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxconv
from jaxconv import int8
from jaxconv.bench.networks import resnet50
from jaxconv.bench.networks.blocks import max_pool

if TYPE_CHECKING:  # it imports this module
    from jaxconv.bench.networks.programs import State

_EPSILON = 1e-5  # of batch normalisation, as in ``blocks``


class Layer(NamedTuple):
    """One convolution of the network.

    Attributes:
        name: of the layer and of its result.
        source: the activation that it reads.
        stride: of both axes.
        residual: the activation that it adds, or "".
        relu: whether ReLU follows.
    """

    name: str
    source: str
    stride: int = 1
    residual: str = ""
    relu: bool = True


STEM, CLASSIFIER = Layer("stem", "image", 2), Layer("logits", "pooled", relu=False)


def blocks() -> Iterator[Layer]:
    """The convolutions between the max pooling and the mean pooling, in order of execution."""
    source = "stem"  # the stem's result after max pooling
    for stage, (count, stride) in enumerate(resnet50.STAGES):
        for block in range(count):
            at, step, shortcut = f"{stage}.{block}", 1, source
            if block == 0:
                step, shortcut = stride, f"{at}.shortcut"
                yield Layer(shortcut, source, step, relu=False)
            yield Layer(f"{at}.1", source)
            yield Layer(f"{at}.2", f"{at}.1", step)
            yield Layer(f"{at}.3", f"{at}.2", residual=shortcut)
            source = f"{at}.3"


class Weights(NamedTuple):
    """A layer's filter (R, S, C, K) and bias (K,), float32, batch normalisation folded in."""

    w: jax.Array
    bias: jax.Array


def folded(state: State) -> dict[str, Weights]:
    """Every layer's weights, from the float network's parameters and running statistics."""
    parameters, statistics = iter(state.parameters), iter(state.statistics)
    weights = {}
    # The float network comes by a block's layers in this order: the shortcut is the last.
    for name in ["stem", *sorted(layer.name for layer in blocks())]:
        w, gamma, beta = (next(parameters) for _ in range(3))
        mean, variance = (next(statistics) for _ in range(2))
        weights[name] = Weights(*int8.fold_batch_norm(w, gamma, beta, mean, variance, _EPSILON))
    w, bias = parameters
    weights["logits"] = Weights(jnp.asarray(w)[None, None], jnp.asarray(bias))
    return weights


def activations(weights: dict[str, Weights], image: jax.Array) -> dict[str, jax.Array]:
    """The network in float32: every activation that the quantised one holds, and the logits."""

    def convolve(layer: Layer) -> jax.Array:
        w, bias = weights[layer.name]
        y = jaxconv.conv(of[layer.source], w, stride=layer.stride, padding=w.shape[0] // 2) + bias
        y = y + of[layer.residual] if layer.residual else y
        return jax.nn.relu(y) if layer.relu else y

    of = {"image": image.astype(jnp.float32)}
    of["stem"] = max_pool(convolve(STEM), 3, 2, pad=1)
    for layer in blocks():
        of[layer.name] = convolve(layer)
    of["pooled"] = of[layer.name].mean((1, 2), keepdims=True)
    of["logits"] = convolve(CLASSIFIER)
    return of


class Parameters(NamedTuple):
    """The quantised network's constants: a pytree, prepared once.

    Attributes:
        layers: of each layer the packed filter, the scales of requantisation and the bias.
        residual_scales: of each layer with a residual, the residual's scale over the result's.
        image_scale: the scale of the image.
        pooled_scale: the scale of the pooled features over that of the last block's result.
    """

    layers: dict[str, int8.QuantizedConv]
    residual_scales: dict[str, np.float32]
    image_scale: np.float32
    pooled_scale: np.float32


def quantized(state: State, images: list[jax.Array]) -> Parameters:
    """Quantises the float network, calibrated on batches of images (N, H, W, 3)."""
    weights = folded(state)
    scales = int8.calibrate(lambda image: activations(weights, image), images)
    layers = {
        layer.name: int8.quantize_conv(
            *weights[layer.name],
            x_scale=scales[layer.source],
            y_scale=scales[layer.name] if layer.name != "logits" else None,
            data_format="NHWC" if layer.name == "logits" else "NCHW32",
        )
        for layer in (STEM, *blocks(), CLASSIFIER)
    }
    *_, last = blocks()
    return Parameters(
        layers,
        {b.name: scales[b.residual] / scales[b.name] for b in blocks() if b.residual},
        scales["image"],
        scales["pooled"] / scales[last.name],
    )


def forward(parameters: Parameters, image: jax.Array) -> jax.Array:
    """Logits (N, 1000), float32, of images (N, H, W, 3) of any floating-point type."""

    def convolve(layer: Layer, **options) -> int8.Packed | jax.Array:
        constants = parameters.layers[layer.name]
        if layer.residual:
            options["residual"] = of[layer.residual]
            options["residual_scale"] = parameters.residual_scales[layer.name]
        return int8.conv(
            of[layer.source],
            *constants,
            stride=layer.stride,
            padding=constants.w.window[0] // 2,
            activation="relu" if layer.relu else None,
            **options,
        )

    of = {"image": int8.quantize(image, parameters.image_scale)}
    of["stem"] = _max_pool(convolve(STEM, data_format="NCHW32"))
    for layer in blocks():
        of[layer.name] = convolve(layer)
    of["pooled"] = _mean_pool(of[layer.name], parameters.pooled_scale)
    return convolve(CLASSIFIER, out_dtype=jnp.float32)[:, 0, 0]


def _max_pool(x: int8.Packed) -> int8.Packed:
    """The largest of 3x3 pixels, stride 2; the same scale holds."""
    pooled = lax.reduce_window(
        x.data,
        np.int8(-128),
        lax.max,
        window_dimensions=(1, 1, 3, 3, 1),
        window_strides=(1, 1, 2, 2, 1),
        padding=((0, 0), (0, 0), (1, 1), (1, 1), (0, 0)),
    )
    return int8.Packed(pooled, x.channels)


def _mean_pool(x: int8.Packed, scale: jax.Array) -> jax.Array:
    """The mean over all pixels, quantised: int8 (N, 1, 1, C). Sums are exact."""
    n, _, h, w, _ = x.data.shape
    sums = jnp.sum(x.data, axis=(2, 3), dtype=jnp.int32)
    return int8.quantize(sums, scale * (h * w)).reshape(n, 1, 1, -1)
