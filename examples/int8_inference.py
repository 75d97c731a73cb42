"""Quantises a small convolutional network on handwritten digits to int8, and compares both.

    pip install '.[examples]'
    python examples/int8_inference.py          # quantisation after training
    python examples/int8_inference.py --qat    # and quantisation-aware training

The data are those of train_cnn.py. This network also has batch normalisation after each
convolution, and a residual connection, which quantisation folds and fuses.

1. The network is trained in float32, with Flax, on jaxconv's kernels.
2. Batch normalisation is folded into the filters, and the greatest magnitude of each activation on
   training images becomes its scale.
3. From the first to the last layer the activations of the quantised network are int8 in NCHW32.
   Bias, residual, ReLU and requantisation are part of each convolution. The classifier is also a
   convolution, with float32 results.

Sums are exact and the rounding is specified, so every platform gives the same logits, bit for bit;
if JAX has a GPU, the program compares it with the CPU. Exits with status 1 if int8 loses more than
0.5 points of test accuracy, or if two platforms differ.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm
from train_cnn import Data, load_data

import jaxconv
from jaxconv import int8

ACCEPTED_LOSS = 0.5  # percentage points


class Shape(NamedTuple):
    """One convolution: input channels, output channels, window, stride and padding."""

    c: int
    k: int
    window: int = 3
    stride: int = 1
    padding: str = "SAME"


SHAPES = {
    "conv1": Shape(1, 32),  # 8x8
    "conv2": Shape(32, 64, stride=2),  # 4x4
    "conv3": Shape(64, 64),
    "conv4": Shape(64, 64, stride=2),  # 2x2
    "classify": Shape(64, 10, window=2, padding="VALID"),  # 1x1
}
LAST = "classify"
# The input of each layer: the images, or the layer before.
INPUT = dict(zip(SHAPES, ["images", *SHAPES], strict=False))

Layer = Callable[..., Any]
Weights = dict[str, tuple[jax.Array, jax.Array]]  # filter and bias of each layer
Scales = dict[str, np.float32]  # scales of the images, and of each layer's result


def network(layer: Layer, images: Any) -> Any:
    """The network, with any implementation of a layer.

    Args:
        layer: (name, x, residual=False) -> y: convolution, bias, with ``residual`` the sum with x,
            and ReLU except in the last layer.
        images: the input of the first layer.

    Returns:
        Logits (N, 10).
    """
    x = layer("conv1", images)
    x = layer("conv2", x)
    x = layer("conv3", x, residual=True)
    x = layer("conv4", x)
    return layer(LAST, x)[:, 0, 0]


# --- training in float32 --------------------------------------------------------------------------


class CNN(nnx.Module):
    """The network in Flax, with batch normalisation after every convolution but the last."""

    def __init__(self, rngs: nnx.Rngs):
        """Draws the initial weights."""
        for name, shape in SHAPES.items():
            conv = nnx.Conv(
                shape.c,
                shape.k,
                kernel_size=(shape.window, shape.window),
                strides=shape.stride,
                padding=shape.padding,
                use_bias=name == LAST,
                conv_general_dilated=jaxconv.conv_general_dilated,
                rngs=rngs,
            )
            setattr(self, name, conv)
            if name != LAST:
                setattr(self, f"{name}_norm", nnx.BatchNorm(shape.k, momentum=0.9, rngs=rngs))

    def __call__(self, images: jax.Array) -> jax.Array:
        """Logits (N, 10) of images (N, 8, 8, 1)."""

        def layer(name: str, x: jax.Array, residual: bool = False) -> jax.Array:
            y = getattr(self, name)(x)
            if name == LAST:
                return y
            y = getattr(self, f"{name}_norm")(y)
            return nnx.relu(y + x if residual else y)

        return network(layer, images)


def mean_loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The cross-entropy with the labels."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def batches(data: Data, size: int, epochs: int, seed: int, what: str) -> Iterator[tuple]:
    """Batches of training images and labels in random order, with a progress bar."""
    rng, count = np.random.default_rng(seed), len(data.train_labels) // size
    with tqdm(total=epochs * count, desc=what, unit="step") as progress:
        for _ in range(epochs):
            order = rng.permutation(len(data.train_labels))
            for chosen in np.split(order[: count * size], count):
                # A digit that is shifted sideways is the same digit.
                images = np.roll(data.train_images[chosen], rng.integers(-1, 2), axis=2)
                yield images, data.train_labels[chosen]
                progress.update()


def train(data: Data, args: argparse.Namespace) -> CNN:
    """Trains the float32 network."""
    model = CNN(nnx.Rngs(args.seed))
    steps = args.epochs * (len(data.train_labels) // args.batch_size)
    schedule = optax.cosine_decay_schedule(4e-3, steps)
    optimizer = nnx.Optimizer(model, optax.adam(schedule), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, images, labels):
        gradients = nnx.grad(lambda model: mean_loss(model(images), labels))(model)
        optimizer.update(model, gradients)

    for images, labels in batches(data, args.batch_size, args.epochs, args.seed, "float32"):
        step(model, optimizer, images, labels)
    return model


# --- quantisation ---------------------------------------------------------------------------------


def folded(model: CNN) -> Weights:
    """The filters and biases with folded batch normalisation."""
    weights = {}
    for name in SHAPES:
        conv = getattr(model, name)
        if name == LAST:
            weights[name] = conv.kernel[...], conv.bias[...]
            continue
        norm = getattr(model, f"{name}_norm")
        statistics = norm.scale[...], norm.bias[...], norm.mean[...], norm.var[...]
        weights[name] = int8.fold_batch_norm(conv.kernel[...], *statistics, norm.epsilon)
    return weights


def float_network(weights: Weights, images: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Logits in float32, and every activation that the quantised network rounds to int8."""
    activations = {"images": images}

    def layer(name: str, x: jax.Array, residual: bool = False) -> jax.Array:
        w, bias = weights[name]
        shape = SHAPES[name]
        y = jaxconv.conv(x, w, stride=shape.stride, padding=shape.padding) + bias
        if name == LAST:
            return y
        activations[name] = nnx.relu(y + x if residual else y)
        return activations[name]

    return network(layer, images), activations


def fake_quant_network(weights: Weights, scales: Scales, images: jax.Array) -> jax.Array:
    """Logits of the quantised network, simulated on float32 weights, with gradients."""

    def layer(name: str, x: jax.Array, residual: bool = False) -> jax.Array:
        w, bias = weights[name]
        shape, scale = SHAPES[name], scales[INPUT[name]]
        y = int8.fake_quant_conv(x, w, scale, stride=shape.stride, padding=shape.padding) + bias
        if residual:
            y += int8.fake_quantize(x, scale)
        return y if name == LAST else nnx.relu(y)

    return network(layer, images)


def quantized(weights: Weights, scales: Scales) -> dict[str, int8.QuantizedConv]:
    """The quantised network's constants: packed filters, requantisation scales, biases."""
    return {
        name: int8.quantize_conv(
            *weights[name],
            x_scale=scales[INPUT[name]],
            y_scale=None if name == LAST else scales[name],
        )
        for name in SHAPES
    }


def int8_network(
    layers: dict[str, int8.QuantizedConv], scales: Scales, images: jax.Array
) -> jax.Array:
    """Logits of the quantised network, in float32."""

    def layer(name: str, x: jax.Array | int8.Packed, residual: bool = False):
        shape, last = SHAPES[name], name == LAST
        added = {}
        if residual:
            added = dict(residual=x, residual_scale=scales[INPUT[name]] / scales[name])
        return int8.conv(
            x,
            *layers[name],
            **added,
            stride=shape.stride,
            padding=shape.padding,
            activation=None if last else "relu",
            out_dtype=jnp.float32 if last else jnp.int8,
            data_format="NHWC" if last else "NCHW32",
        )

    # The first layer reads images of one channel unpacked, and writes NCHW32.
    return network(layer, int8.quantize(images, scales["images"]))


def train_quantized(
    weights: Weights, scales: Scales, data: Data, args: argparse.Namespace
) -> Weights:
    """Quantisation-aware training: a few epochs of ``fake_quant_network`` with fixed scales."""
    epochs = max(1, args.epochs // 4)
    steps = epochs * (len(data.train_labels) // args.batch_size)
    optimizer = optax.adam(optax.cosine_decay_schedule(2e-5, steps))

    @jax.jit
    def step(weights, state, images, labels):
        def loss(weights):
            return mean_loss(fake_quant_network(weights, scales, images), labels)

        updates, state = optimizer.update(jax.grad(loss)(weights), state)
        return optax.apply_updates(weights, updates), state

    state = optimizer.init(weights)
    for images, labels in batches(data, args.batch_size, epochs, args.seed + 1, "int8, QAT"):
        weights, state = step(weights, state, images, labels)
    return weights


# --- comparison -----------------------------------------------------------------------------------


class Result(NamedTuple):
    """The outcome of a network on the test images."""

    logits: np.ndarray
    milliseconds: float  # for all test images, the minimum of several runs
    kilobytes: float  # size of its constants

    def accuracy(self, labels: np.ndarray) -> float:
        """Accuracy in per cent."""
        return float(np.mean(self.logits.argmax(-1) == labels)) * 100


def run(infer: Callable, constants: Any, images: np.ndarray, device: jax.Device) -> Result:
    """Compiles and times ``infer(constants, images)`` on a device."""
    constants, images = jax.device_put((constants, images), device)
    compiled = jax.jit(infer).lower(constants, images).compile()
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        logits = jax.block_until_ready(compiled(constants, images))
        seconds.append(time.perf_counter() - start)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(constants))
    return Result(np.asarray(logits), min(seconds) * 1e3, size / 1e3)


def main() -> int:
    """Trains, quantises and compares; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=16, help="passes over the data (default: 16)")
    parser.add_argument("--batch-size", type=int, default=64, help="examples a step (default: 64)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, split and order")
    parser.add_argument("--percentile", type=float, help="clip activations there (default: never)")
    parser.add_argument("--qat", action="store_true", help="add quantisation-aware training")
    args = parser.parse_args()
    data = load_data(args.seed)
    if args.epochs < 1 or not 1 <= args.batch_size <= len(data.train_labels):
        parser.error(f"expected epochs >= 1 and a batch size of 1 to {len(data.train_labels)}")
    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}, jaxconv {jaxconv.__version__}")

    weights = folded(train(data, args))
    # Every training image, in batches of one size.
    calibration = np.array_split(data.train_images, 8)
    scales = int8.calibrate(
        lambda images: float_network(weights, images)[1], calibration, percentile=args.percentile
    )
    print("scales: " + ", ".join(f"{name} {scale:.4g}" for name, scale in scales.items()))

    def infer_int8(layers, images):
        return int8_network(layers, scales, images)

    device = jax.devices()[0]
    on_test_images = data.test_images, device
    results = {"float32": run(lambda w, x: float_network(w, x)[0], weights, *on_test_images)}
    networks = {"int8": quantized(weights, scales)}
    if args.qat:
        networks["int8, QAT"] = quantized(train_quantized(weights, scales, data, args), scales)
    for name, layers in networks.items():
        results[name] = run(infer_int8, layers, *on_test_images)

    print(f"{len(data.test_labels)} test images  accuracy %  constants kB  milliseconds")
    accuracies = {name: result.accuracy(data.test_labels) for name, result in results.items()}
    for name, result in results.items():
        print(
            f"{name:15}  {accuracies[name]:10.2f}  {result.kilobytes:12.1f}  "
            f"{result.milliseconds:12.2f}"
        )
    status = 0
    if device.platform != "cpu":
        for name, layers in networks.items():
            on_cpu = run(infer_int8, layers, data.test_images, jax.devices("cpu")[0])
            same = np.array_equal(on_cpu.logits, results[name].logits)
            print(f"{name}: logits on {device.platform} and cpu {'equal' if same else 'DIFFER'}")
            status |= not same
    for name in networks:
        loss = accuracies["float32"] - accuracies[name]
        print(f"{name}: {loss:+.2f} points of accuracy lost")
        status |= loss > ACCEPTED_LOSS
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
