"""ResNet-50 in plain JAX: the same source on lax's convolutions and, installed, on jaxconv's.

    python examples/resnet50.py                       # inference, bfloat16, 256 images
    python examples/resnet50.py --train               # the training step as well

ResNet-50 v1.5 (He et al. 2015; the stride in the 3x3 convolution), channels-last, every convolution
``jax.lax.conv_general_dilated``; no line of the model knows of jaxconv. Each program is compiled
twice, once inside ``jaxconv.override()``, checked against the other, and timed in turns on random
images. Exits with status 1 where the two disagree.
"""

from __future__ import annotations

import argparse
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxconv

# Blocks, width of the 3x3 convolution, stride of the first block.
STAGES = ((3, 64, 1), (4, 128, 2), (6, 256, 2), (3, 512, 2))
CLASSES = 1000
EXPANSION = 4
MOMENTUM, LEARNING_RATE = 0.9, 0.01
# Runs between two waits, so that the host's share overlaps with the device's, as in a loop.
IN_A_ROW = 4


def _conv(key, window: int, c: int, k: int) -> dict:
    """A filter (R, S, C, K) by He's rule, and its batch normalisation."""
    deviation = (2 / (window * window * c)) ** 0.5
    return {
        "filter": deviation * jax.random.normal(key, (window, window, c, k)),
        "scale": jnp.ones(k),
        "offset": jnp.zeros(k),
        "mean": jnp.zeros(k),
        "variance": jnp.ones(k),
    }


def initial_parameters(seed: int = 0) -> dict:
    """All parameters, float32."""
    keys = iter(jax.random.split(jax.random.key(seed), 64))
    parameters = {"stem": _conv(next(keys), 7, 3, 64)}
    c = 64
    for stage, (blocks, width, _) in enumerate(STAGES):
        for block in range(blocks):
            layers = {
                "reduce": _conv(next(keys), 1, c, width),
                "conv": _conv(next(keys), 3, width, width),
                "expand": _conv(next(keys), 1, width, EXPANSION * width),
            }
            if block == 0:
                layers["shortcut"] = _conv(next(keys), 1, c, EXPANSION * width)
            parameters[f"stage{stage}.{block}"] = layers
            c = EXPANSION * width
    parameters["classify"] = {
        "weights": jax.random.normal(next(keys), (c, CLASSES)) / c**0.5,
        "offset": jnp.zeros(CLASSES),
    }
    return parameters


def _convolve(x, layer: dict, stride: int, train: bool):
    """Convolution and batch normalisation; the window is centred on the pixel it writes."""
    pad = layer["filter"].shape[0] // 2
    y = lax.conv_general_dilated(
        x,
        layer["filter"].astype(x.dtype),
        (stride, stride),
        [(pad, pad)] * 2,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    mean, variance = layer["mean"], layer["variance"]
    if train:
        wide = y.astype(jnp.float32)
        mean = wide.mean((0, 1, 2))
        variance = jnp.maximum((wide * wide).mean((0, 1, 2)) - mean * mean, 0)
    scale = layer["scale"] * lax.rsqrt(variance + 1e-5)
    offset = layer["offset"] - mean * scale
    return y * scale.astype(y.dtype) + offset.astype(y.dtype)


def logits(parameters: dict, images, train: bool = False):
    """Logits (N, 1000), float32, of images (N, H, W, 3)."""
    x = jax.nn.relu(_convolve(images, parameters["stem"], 2, train))
    x = lax.reduce_window(
        x,
        -jnp.inf,
        lax.max,
        (1, 3, 3, 1),
        (1, 2, 2, 1),
        [(0, 0), (1, 1), (1, 1), (0, 0)],
    )
    for stage, (blocks, _, stage_stride) in enumerate(STAGES):
        for block in range(blocks):
            layers = parameters[f"stage{stage}.{block}"]
            stride = stage_stride if block == 0 else 1
            y = jax.nn.relu(_convolve(x, layers["reduce"], 1, train))
            y = jax.nn.relu(_convolve(y, layers["conv"], stride, train))
            y = _convolve(y, layers["expand"], 1, train)
            if "shortcut" in layers:
                x = _convolve(x, layers["shortcut"], stride, train)
            x = jax.nn.relu(x + y)
    features = x.astype(jnp.float32).mean((1, 2))
    return features @ parameters["classify"]["weights"] + parameters["classify"]["offset"]


def training_step(parameters: dict, velocity: dict, images, labels):
    """One step of gradient descent with momentum: new parameters, new velocity, the loss."""

    def loss(parameters):
        chances = jax.nn.log_softmax(logits(parameters, images, train=True))
        return -jnp.take_along_axis(chances, labels[:, None], 1).mean()

    value, gradients = jax.value_and_grad(loss)(parameters)
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, gradients)
    parameters = jax.tree.map(lambda p, v: p - LEARNING_RATE * v, parameters, velocity)
    return parameters, velocity, value


def _compare(name: str, function, arguments: tuple, result_of, repetitions: int) -> bool:
    """Prints both sides' times; whether their results agree."""
    programs = {}
    start = time.perf_counter()
    programs["lax"] = jax.jit(function).lower(*arguments).compile()
    compile_s = {"lax": time.perf_counter() - start}
    with jaxconv.override():  # for this program; jaxconv.install() is for a whole process
        start = time.perf_counter()
        programs["jaxconv"] = jax.jit(function).lower(*arguments).compile()
        compile_s["jaxconv"] = time.perf_counter() - start
    results = {side: np.asarray(result_of(run(*arguments))) for side, run in programs.items()}
    scale = np.abs(results["lax"]).max()
    error = np.abs(results["jaxconv"] - results["lax"]).max() / scale
    times: dict[str, list[float]] = {side: [] for side in programs}
    for _ in range(repetitions):
        for side, run in programs.items():
            start = time.perf_counter()
            for _ in range(IN_A_ROW):
                outputs = run(*arguments)
            jax.block_until_ready(outputs)
            times[side].append((time.perf_counter() - start) / IN_A_ROW)
    median = {side: float(np.median(values)) for side, values in times.items()}
    for side, seconds in median.items():
        memory = programs[side].memory_analysis()
        print(
            f"{name} {side:8} {seconds * 1e3:8.2f} ms, compiled in {compile_s[side]:.1f} s"
            + (f", temporaries {memory.temp_size_in_bytes / 1e9:.2f} GB" if memory else "")
        )
    ratio = median["lax"] / median["jaxconv"]
    print(f"{name} lax / jaxconv {ratio:.2f}, largest difference {error:.1e} of the largest value")
    return bool(error < 0.05)


def main() -> int:
    """Measures what the command line asks for; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--size", type=int, default=224, help="rows and columns of an image")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--train", action="store_true", help="measure the training step as well")
    parser.add_argument("--repetitions", type=int, default=20)
    arguments = parser.parse_args()

    device = jax.devices()[0].device_kind
    size = f"{arguments.size}x{arguments.size}"
    print(f"{device}, {arguments.batch} images of {size}, {arguments.dtype}")
    parameters = initial_parameters()
    shape = (arguments.batch, arguments.size, arguments.size, 3)
    images = jax.random.normal(jax.random.key(1), shape, arguments.dtype)
    agree = _compare("inference", logits, (parameters, images), lambda y: y, arguments.repetitions)
    if arguments.train:
        labels = jax.random.randint(jax.random.key(2), (arguments.batch,), 0, CLASSES)
        velocity = jax.tree.map(jnp.zeros_like, parameters)
        state = (parameters, velocity, images, labels)
        agree &= _compare(
            "training step", training_step, state, lambda r: r[2], arguments.repetitions
        )
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
