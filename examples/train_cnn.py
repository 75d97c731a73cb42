"""Trains a small convolutional network on handwritten digits, on jaxconv's kernels and on lax's.

    pip install '.[examples]'
    python examples/train_cnn.py

The data are scikit-learn's bundled digits: 1797 real scans of 8x8 pixels, nothing to download. The
network is written in Flax and uses jaxconv by passing ``jaxconv.conv_general_dilated`` to
``nnx.Conv``. The same network with the same seed is then trained with ``jax.lax``'s convolution,
and the two loss curves are compared. Exits with status 1 if the test accuracy is below 97 %.

    python examples/train_cnn.py --algorithm winograd_f4x4 --dtype bf16

uses Winograd in the forward pass and in data gradients. Because Winograd needs stride 1, the layers
then have stride 1, and max pooling follows the last two. lax's convolution remains direct.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from flax import nnx
from jax import lax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import jaxconv

REQUIRED_ACCURACY = 0.97
DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}


class CNN(nnx.Module):
    """Three 3x3 convolutions, two of them halving the image, and a linear classifier."""

    def __init__(
        self, conv_general_dilated: Callable, rngs: nnx.Rngs, dtype: str, pooled: bool = False
    ):
        """Draws the initial weights.

        Args:
            conv_general_dilated: the function that computes every convolution.
            rngs: the source of the weights.
            dtype: the type of activations, one of ``DTYPES``; parameters are float32.
            pooled: whether max pooling halves the image, instead of convolutions with stride 2.
        """

        def conv(c: int, k: int, stride: int) -> nnx.Conv:
            return nnx.Conv(
                c,
                k,
                kernel_size=(3, 3),
                strides=1 if pooled else stride,
                dtype=DTYPES[dtype],
                conv_general_dilated=conv_general_dilated,  # this line selects jaxconv
                rngs=rngs,
            )

        self.conv1 = conv(1, 32, stride=1)  # 8x8
        self.conv2 = conv(32, 64, stride=2)  # 4x4
        self.conv3 = conv(64, 64, stride=2)  # 2x2
        self.classify = nnx.Linear(2 * 2 * 64, 10, rngs=rngs)
        self.pooled = pooled

    def __call__(self, images: jax.Array) -> jax.Array:
        """Logits (N, 10) of images (N, 8, 8, 1)."""

        def halved(x: jax.Array) -> jax.Array:
            return nnx.max_pool(x, (2, 2), (2, 2)) if self.pooled else x

        x = nnx.relu(self.conv1(images))
        x = nnx.relu(halved(self.conv2(x)))
        x = nnx.relu(halved(self.conv3(x)))
        return self.classify(x.reshape(x.shape[0], -1).astype(jnp.float32))


@nnx.jit
def train_step(
    model: CNN, optimizer: nnx.Optimizer, images: jax.Array, labels: jax.Array
) -> jax.Array:
    """One step of training: forward, backward and update in one program. Returns the loss."""

    def mean_loss(model: CNN) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()

    loss, gradients = nnx.value_and_grad(mean_loss)(model)
    optimizer.update(model, gradients)
    return loss


@nnx.jit
def accuracy(model: CNN, images: jax.Array, labels: jax.Array) -> jax.Array:
    """The fraction of images whose largest logit is that of their label."""
    return jnp.mean(jnp.argmax(model(images), axis=-1) == labels)


class Data(NamedTuple):
    """Images (N, 8, 8, 1) in [0, 1] and labels (N,)."""

    train_images: np.ndarray
    test_images: np.ndarray
    train_labels: np.ndarray
    test_labels: np.ndarray


class Run(NamedTuple):
    """The outcome of a training."""

    losses: np.ndarray  # one per step
    accuracies: np.ndarray  # on the test images, one per epoch
    seconds: float  # time of all steps, without compilation and tests
    kernels: list[str]  # jaxconv's kernel instances in the training step

    @property
    def accuracy(self) -> float:
        """Accuracy on the test images after the last epoch."""
        return float(self.accuracies[-1])


def load_data(seed: int) -> Data:
    """scikit-learn's digits; a stratified fifth of them is the test set."""
    digits = load_digits()
    images = (digits.images / 16.0).astype(np.float32)[..., None]
    labels = digits.target.astype(np.int32)
    return Data(
        *train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=seed)
    )


def train(name: str, conv_general_dilated: Callable, data: Data, args: argparse.Namespace) -> Run:
    """Trains one network; the seed determines its initial weights and the order of the examples."""
    pooled = args.algorithm != "auto"
    model = CNN(conv_general_dilated, nnx.Rngs(args.seed), args.dtype, pooled)
    batches_per_epoch = len(data.train_labels) // args.batch_size
    learning_rate = optax.cosine_decay_schedule(4e-3, args.epochs * batches_per_epoch)
    optimizer = nnx.Optimizer(model, optax.adam(learning_rate), wrt=nnx.Param)
    rng = np.random.default_rng(args.seed)

    def batches():
        order = rng.permutation(len(data.train_labels))
        for chosen in np.split(order[: batches_per_epoch * args.batch_size], batches_per_epoch):
            # A shifted digit is the same digit: each batch is shifted by -1, 0 or 1 pixels.
            images = np.roll(data.train_images[chosen], rng.integers(-1, 2), axis=2)
            yield images, data.train_labels[chosen]

    # Compiles before the first step, so that the measured time is that of the steps.
    first = data.train_images[: args.batch_size], data.train_labels[: args.batch_size]
    explanation = jaxconv.explain(train_step, model, optimizer, *first)
    kernels = [c.instance for c in explanation.convolutions if c.instance]
    compiled = train_step.lower(model, optimizer, *first).compile()

    losses, accuracies, seconds = [], [], 0.0
    with tqdm(total=args.epochs * batches_per_epoch, desc=name, unit="step") as progress:
        for _ in range(args.epochs):
            start = time.perf_counter()
            for images, labels in batches():
                losses.append(compiled(model, optimizer, images, labels))
                progress.update()
            jax.block_until_ready(losses)
            seconds += time.perf_counter() - start
            accuracies.append(float(accuracy(model, data.test_images, data.test_labels)))
            progress.set_postfix(loss=f"{float(losses[-1]):.4f}", accuracy=f"{accuracies[-1]:.2%}")
    return Run(np.asarray(losses), np.asarray(accuracies), seconds, kernels)


def running_mean(values: np.ndarray, width: int) -> np.ndarray:
    """The mean of each value and up to ``width - 1`` before it."""
    sums = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - width, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def plot(ours: Run, theirs: Run, path: str) -> None:
    """Draws both loss curves, the accuracies, and the difference of the losses."""
    matplotlib.use("Agg")  # draws into a file; needs no display
    from matplotlib import pyplot as plt

    figure, (top, middle, bottom) = plt.subplots(
        3, 1, sharex=True, figsize=(7, 7), height_ratios=(3, 1.5, 1.5), layout="constrained"
    )
    steps = np.arange(1, len(ours.losses) + 1)
    epoch = len(steps) // len(ours.accuracies)
    # lax's curve is wide, because ours often coincides with it.
    for name, run, color, width in (("lax", theirs, "0.6", 4), ("jaxconv", ours, "C0", 1.5)):
        top.semilogy(steps, run.losses, color=color, linewidth=0.5, alpha=0.4)
        label = f"{name}, {run.seconds:.1f} s"
        top.semilogy(steps, running_mean(run.losses, epoch), color=color, lw=width, label=label)
        middle.plot(
            steps[epoch - 1 :: epoch], run.accuracies, color=color, lw=width, marker=".", label=name
        )
    top.set_ylabel("training loss, mean of an epoch")
    top.set_title(
        f"Digits on {jax.devices()[0].device_kind}: test accuracy {ours.accuracy:.2%} with "
        f"jaxconv, {theirs.accuracy:.2%} with lax",
        fontsize=10,
    )
    top.legend()
    middle.axhline(REQUIRED_ACCURACY, color="0.3", linewidth=0.8, linestyle=":")
    middle.set_ylabel("test accuracy")
    middle.set_ylim(min(0.9, *ours.accuracies, *theirs.accuracies), 1.0)
    difference = np.abs(ours.losses - theirs.losses)
    equal = difference == 0
    if not equal.all():
        bottom.semilogy(steps[~equal], difference[~equal], ".", color="C3", markersize=2)
    if equal.any():
        # A logarithmic axis has no zero: such points are marked on its lower edge.
        edge = bottom.get_xaxis_transform()
        label = f"equal to the last bit: {equal.sum()} of {len(steps)} steps"
        zeros = np.zeros(equal.sum())
        bottom.plot(
            steps[equal], zeros, "|", color="C2", transform=edge, clip_on=False, label=label
        )
        bottom.legend(fontsize=8)
    bottom.set_ylabel("|difference of losses|")
    bottom.set_xlabel("step")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> int:
    """Trains with both convolutions and compares; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=30, help="passes over the data (default: 30)")
    parser.add_argument("--batch-size", type=int, default=64, help="examples a step (default: 64)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, split and order")
    parser.add_argument("--dtype", choices=DTYPES, default="f32", help="activations (default: f32)")
    parser.add_argument(
        "--algorithm", default="auto", help='jaxconv\'s, such as "winograd_f4x4" (default: auto)'
    )
    parser.add_argument("--plot", metavar="PATH", default="train_cnn.png", help="where to draw")
    args = parser.parse_args()
    data = load_data(args.seed)
    if args.epochs < 1 or not 1 <= args.batch_size <= len(data.train_labels):
        parser.error(f"expected epochs >= 1 and a batch size of 1 to {len(data.train_labels)}")
    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}, jaxconv {jaxconv.__version__}")

    convolution = functools.partial(jaxconv.conv_general_dilated, algorithm=args.algorithm)
    ours = train("jaxconv", convolution, data, args)
    theirs = train("lax", lax.conv_general_dilated, data, args)

    kernels = ", ".join(ours.kernels) or "none: XLA's convolution, see `python -m jaxconv.doctor`"
    print(f"kernels of a training step: {kernels}")
    for name, run in (("jaxconv", ours), ("lax", theirs)):
        print(
            f"{name:8} {run.seconds:5.1f} s, loss {run.losses[-1]:.2e}, "
            f"test accuracy {run.accuracy:.2%}"
        )
    difference = np.abs(ours.losses - theirs.losses).max()
    print(f"largest difference of the loss curves: {difference:.1e}")
    plot(ours, theirs, args.plot)
    print(f"plot: {args.plot}")
    if ours.accuracy < REQUIRED_ACCURACY:
        print(f"test accuracy {ours.accuracy:.2%} is below {REQUIRED_ACCURACY:.0%}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
