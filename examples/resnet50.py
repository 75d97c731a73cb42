"""Trains a ResNet-50 with lax's convolutions and with jaxconv's, and compares the loss curves.

    pip install '.[examples]'
    python examples/resnet50.py --fuse
    python examples/resnet50.py --fuse --size 224 --batch-size 256    # on a GPU

The network is written in Flax as users write it: convolutions of ``nnx.Conv``, batch norm in
training mode, bfloat16 activations over float32 parameters. Only the compilation of the step uses
jaxconv: ``jaxconv.override()`` runs every convolution on its kernels, and with ``--fuse``
``jaxconv.fuse`` moves the statistics of batch norm into the convolutions' calls. The data are
scikit-learn's bundled digits, enlarged; nothing is downloaded.

Two trainings of one network differ by their rounding, and training amplifies the difference. To
measure this, lax trains again with the examples of every batch in other orders, which changes only
the order of summands, and with float32 activations, which changes how often they are rounded to 16
bits. Exits with status 1 if jaxconv's loss curve is more than three times as far from lax's as the
farthest of these.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits
from tqdm import tqdm

import jaxconv

ALLOWED = 3.0  # times the largest distance between lax's first curve and its others
SMOOTHED = 10  # steps in the running mean of a loss curve
STAGES = ((3, 1), (4, 2), (6, 2), (3, 2))  # blocks and stride of each
DTYPES = {"bf16": jnp.bfloat16, "f32": jnp.float32}


class ConvNorm(nnx.Module):
    """A convolution without bias, and batch norm."""

    def __init__(
        self, c: int, k: int, window: int, stride: int, dtype, rngs: nnx.Rngs, gain: float = 1.0
    ):
        """``c`` channels to ``k``, "SAME" padding; ``gain`` is the norm's initial scale."""
        self.conv = nnx.Conv(
            c, k, (window, window), strides=stride, use_bias=False, dtype=dtype, rngs=rngs
        )
        self.norm = nnx.BatchNorm(
            k, dtype=dtype, scale_init=nnx.initializers.constant(gain), rngs=rngs
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """(N, H, W, c) to (N, H/stride, W/stride, k)."""
        return self.norm(self.conv(x))


class Bottleneck(nnx.Module):
    """1x1, 3x3 and 1x1 convolutions, to whose result the block's input is added."""

    def __init__(self, c: int, width: int, stride: int, dtype, rngs: nnx.Rngs):
        """``c`` channels to ``4 width``."""
        self.reduce = ConvNorm(c, width, 1, 1, dtype, rngs)
        self.window = ConvNorm(width, width, 3, stride, dtype, rngs)
        # Goyal et al. 2017: each block initially equals its shortcut.
        self.expand = ConvNorm(width, 4 * width, 1, 1, dtype, rngs, gain=0.0)
        narrow = c != 4 * width or stride != 1
        self.shortcut = ConvNorm(c, 4 * width, 1, stride, dtype, rngs) if narrow else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """(N, H, W, c) to (N, H/stride, W/stride, 4 width)."""
        y = nnx.relu(self.window(nnx.relu(self.reduce(x))))
        return nnx.relu(self.expand(y) + (self.shortcut(x) if self.shortcut else x))


class ResNet50(nnx.Module):
    """The network of He et al. 2015, with the stride in the 3x3 convolution."""

    def __init__(self, classes: int, dtype, rngs: nnx.Rngs):
        """Draws the initial weights."""
        self.stem = ConvNorm(3, 64, 7, 2, dtype, rngs)
        blocks, c = [], 64
        for stage, (count, stride) in enumerate(STAGES):
            for block in range(count):
                width = 64 << stage
                blocks.append(Bottleneck(c, width, 1 if block else stride, dtype, rngs))
                c = 4 * width
        self.blocks = nnx.Sequential(*blocks)
        self.classify = nnx.Linear(c, classes, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Logits (N, classes), float32, of images (N, H, W, 3)."""
        x = nnx.max_pool(nnx.relu(self.stem(images)), (3, 3), (2, 2), "SAME")
        return self.classify(self.blocks(x).mean((1, 2), dtype=jnp.float32))


class Program(NamedTuple):
    """A compiled step."""

    step: Callable  # (state, images, labels) -> (state, loss); the state is donated
    state: nnx.State  # the initial state, in host memory
    seconds: float  # time of compilation
    summary: str  # jaxconv's kernels in the step, as text


class Run(NamedTuple):
    """The outcome of a training."""

    losses: np.ndarray  # one for each step
    milliseconds: float  # time of a step

    @property
    def curve(self) -> np.ndarray:
        """The running mean of the losses."""
        return np.convolve(self.losses, np.full(SMOOTHED, 1 / SMOOTHED), "valid")

    def distance(self, other: Run) -> float:
        """The root mean square difference of two curves."""
        return float(np.sqrt(np.mean((self.curve - other.curve) ** 2)))


def draw_batches(args: argparse.Namespace) -> list[tuple[np.ndarray, np.ndarray]]:
    """Images (N, 8, 8) in [-1, 1] and labels (N,) of each step."""
    digits = load_digits()
    rng, count = np.random.default_rng(args.seed), len(digits.target)
    drawn = (rng.choice(count, args.batch_size, args.batch_size > count) for _ in range(args.steps))
    return [((digits.images[i] / 8 - 1).astype(np.float32), digits.target[i]) for i in drawn]


def training_step(args: argparse.Namespace) -> tuple[Callable, nnx.State]:
    """The step (state, images, labels) -> (state, loss), and the initial state."""
    dtype = DTYPES[args.dtype]
    model = ResNet50(10, dtype, nnx.Rngs(args.seed))
    rate = optax.warmup_cosine_decay_schedule(0.0, 0.02, max(args.steps // 10, 1), args.steps)
    optimizer = nnx.Optimizer(model, optax.sgd(rate, 0.9, nesterov=True), wrt=nnx.Param)
    # fuse and donation need a function of arrays, but modules change in place.
    graph, state = nnx.split((model, optimizer))

    def step(state: nnx.State, images: jax.Array, labels: jax.Array):
        model, optimizer = nnx.merge(graph, state, copy=True)
        shape = (len(images), args.size, args.size)
        images = jax.image.resize(images, shape, "linear")[..., None].repeat(3, -1).astype(dtype)

        def mean_loss(model: ResNet50) -> jax.Array:
            logits = model(images)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        loss, gradients = nnx.value_and_grad(mean_loss)(model)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), loss

    return step, state


def summarised(explanation: jaxconv.Explanation) -> str:
    """The number of the step's convolutions on jaxconv's kernels, and the steps fused into them."""
    everything = sum(c.count for c in explanation)
    beside = collections.Counter()
    for c in explanation:
        if c.epilogue:
            beside[c.epilogue] += c.count
    line = f"{explanation.on_kernels} of {everything} convolutions on jaxconv's kernels"
    return "; ".join([line, *(f"{count} with {what}" for what, count in beside.most_common())])


def compile_step(name: str, args: argparse.Namespace, batch: tuple) -> Program:
    """Compiles a step; ``name`` is "lax", which runs without jaxconv, or the name of ours."""
    step, state = training_step(args)
    on_lax = name == "lax"
    if args.fuse and not on_lax:
        step = jaxconv.fuse(step)
    with contextlib.nullcontext() if on_lax else jaxconv.override():
        summary = "" if on_lax else summarised(jaxconv.explain(step, state, *batch))
        start = time.perf_counter()
        compiled = jax.jit(step, donate_argnums=0).lower(state, *batch).compile()
        seconds = time.perf_counter() - start
    return Program(compiled, jax.device_get(state), seconds, summary)


def train(name: str, program: Program, batches: list, order: np.ndarray) -> Run:
    """Trains from the initial weights; ``order`` permutes the examples of each batch."""
    losses, ends = [], []
    state = jax.device_put(program.state)
    for images, labels in tqdm(batches, desc=name, unit="step"):
        state, loss = program.step(state, images[order], labels[order])
        losses.append(float(loss))  # waits for the step
        ends.append(time.perf_counter())
    return Run(np.asarray(losses), 1e3 * float(np.median(np.diff(ends))))


def main() -> int:
    """Trains and compares; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--fuse", action="store_true", help="jaxconv.fuse on the whole step")
    add("--steps", type=int, default=100, help="of training (default: 100)")
    add("--batch-size", type=int, default=32, help="examples a step (default: 32)")
    add("--size", type=int, default=64, help="height and width of the images (default: 64)")
    add("--dtype", choices=DTYPES, default="bf16", help="activations (default: bf16)")
    add("--orders", type=int, default=1, help="further trainings on lax (default: 1)")
    add("--seed", type=int, default=0, help="of weights, batches and orders")
    args = parser.parse_args()
    if args.steps < SMOOTHED or args.batch_size < 2 or args.size < 32 or args.orders < 1:
        parser.error(
            f"expected at least {SMOOTHED} steps, 2 examples a step, 32 pixels and one order"
        )
    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}, jaxconv {jaxconv.__version__}")

    batches = draw_batches(args)
    as_drawn, rng = np.arange(args.batch_size), np.random.default_rng(args.seed)
    orders = [as_drawn[::-1], *(rng.permutation(as_drawn) for _ in range(1, args.orders))]
    lax = compile_step("lax", args, batches[0])
    first = train("lax", lax, batches, as_drawn)
    again = [train("lax, another order", lax, batches, order) for order in orders]
    if args.dtype != "f32":
        wide = argparse.Namespace(**{**vars(args), "dtype": "f32"})
        again.append(
            train("lax, float32", compile_step("lax", wide, batches[0]), batches, as_drawn)
        )
    ours_name = "fused" if args.fuse else "jaxconv"
    ours = compile_step(ours_name, args, batches[0])
    run = train(ours_name, ours, batches, as_drawn)
    print(ours.summary)
    for name, program, each in (("lax", lax, first), (ours_name, ours, run)):
        took = f"{each.milliseconds:8.2f} ms a step, compiled in {program.seconds:5.1f} s"
        print(f"{name:14} {took}, loss {each.losses[0]:.3f} to {each.curve[-1]:.3f}")
    return 0 if alike(first, again, run, ours_name) else 1


def alike(lax: Run, again: list[Run], ours: Run, ours_name: str) -> bool:
    """Whether our loss curve is as close to lax's as those of lax's further trainings are."""
    noise, distance = [run.distance(lax) for run in again], ours.distance(lax)
    shown = ", ".join(f"{each:.2e}" for each in sorted(noise))
    print(f"distance from lax's loss curve (rms): lax again {shown}; {ours_name} {distance:.2e}")
    if distance <= ALLOWED * max(noise):
        return True
    print(f"{ours_name} is more than {ALLOWED:g} times as far from lax as lax from itself")
    return False


if __name__ == "__main__":
    sys.exit(main())
