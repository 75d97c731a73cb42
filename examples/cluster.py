"""Trains a small convolutional network data parallel in several processes, on jaxconv's kernels.

    pip install '.[examples]'
    srun python examples/cluster.py            # on a cluster: one process for each task
    python examples/cluster.py --processes 2   # here: two on the CPU, compared with one

Every process runs this program and computes with its own devices. The batch is split over the
devices of all processes; parameters are replicated. ``jax.jit`` makes one program of the step, in
which the weight gradients and the sums of batch norm are all-reduces between the processes. Only
``jaxconv.install()`` and ``jaxconv.fuse`` refer to jaxconv.

The data are scikit-learn's bundled digits. With ``--processes`` the exit status is 1 if the
processes disagree, or if the losses differ from those of one process.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

import jaxconv

LIMIT = 1e-5  # of the relative difference of losses, which is due to the order of summation


class CNN(nnx.Module):
    """Three 3x3 convolutions with batch norm, two of them halving the image, and a classifier."""

    def __init__(self, rngs: nnx.Rngs):
        """Draws the initial weights."""
        widths, strides = (1, 32, 64, 64), (1, 2, 2)
        self.layers = nnx.List(
            nnx.Sequential(
                nnx.Conv(c, k, (3, 3), stride, use_bias=False, rngs=rngs),
                nnx.BatchNorm(k, rngs=rngs),
                nnx.silu,  # smooth, so that rounding errors stay small
            )
            for c, k, stride in zip(widths[:-1], widths[1:], strides, strict=True)
        )
        self.classify = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Logits (N, 10) of images (N, 8, 8, 1)."""
        x = images
        for layer in self.layers:
            x = layer(x)
        return self.classify(x.mean((1, 2)))


class State(NamedTuple):
    """The values that a step replaces."""

    parameters: nnx.State
    statistics: nnx.State  # batch norm's running statistics
    momenta: optax.OptState


class Run(NamedTuple):
    """The outcome of a training, the same in every process."""

    losses: list[float]
    program: str  # a digest of the step's text, before it is compiled
    parameters: str  # a digest of the parameters' bits
    calls: dict[str, int]  # calls of jaxconv's kernels by one device in a step
    collectives: dict[str, int]  # collectives that it takes part in


OPTIMIZER = optax.sgd(0.05, momentum=0.9)


def made() -> tuple[Callable, State]:
    """The training step and the initial state, the same in every process."""
    graph, parameters, statistics = nnx.split(CNN(nnx.Rngs(0)), nnx.Param, nnx.BatchStat)

    def step(state: State, images: jax.Array, labels: jax.Array) -> tuple[State, jax.Array]:
        def loss(parameters: nnx.State) -> tuple[jax.Array, nnx.State]:
            model = nnx.merge(graph, parameters, state.statistics, copy=True)
            each = optax.softmax_cross_entropy_with_integer_labels(model(images), labels)
            return each.mean(), nnx.state(model, nnx.BatchStat)

        (value, statistics), slopes = jax.value_and_grad(loss, has_aux=True)(state.parameters)
        updates, momenta = OPTIMIZER.update(slopes, state.momenta)
        return State(optax.apply_updates(state.parameters, updates), statistics, momenta), value

    return step, State(parameters, statistics, OPTIMIZER.init(parameters))


COLLECTIVE = r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
CALL = r'custom_call_target="jaxconv_(\w+)"'


def counted(pattern: str, compiled: jax.stages.Compiled) -> dict[str, int]:
    """How often a compiled program contains each operation that matches the pattern."""
    return dict(collections.Counter(re.findall(pattern, compiled.as_text())))


def train(devices: Sequence[jax.Device], steps: int, batch: int) -> Run:
    """Trains on the digits; batches are split over the devices of all processes."""
    mesh = jax.make_mesh((len(devices),), ("data",), (AxisType.Auto,), devices=devices)
    split, replicated = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    train_step, initial = made()
    state = jax.device_put(jax.tree.map(np.asarray, initial), replicated)

    digits = load_digits()
    pixels = (digits.images / 16.0).astype(np.float32)[..., None]
    classes = digits.target.astype(np.int32)
    processes = len({device.process_index for device in devices})
    share = batch // processes
    rng = np.random.default_rng(0)  # the same order in every process

    def batches():
        for _ in range(steps):
            chosen = rng.choice(len(classes), batch, replace=False)
            mine = chosen[jax.process_index() * share :][:share]
            # Each process supplies its own examples; together they form one array of the whole
            # batch.
            yield tuple(
                jax.make_array_from_process_local_data(split, part[mine], (batch, *part.shape[1:]))
                for part in (pixels, classes)
            )

    step = jax.jit(jaxconv.fuse(train_step), donate_argnums=0)
    lowered = compiled = None
    losses = []
    for images, labels in batches():
        if compiled is None:
            lowered = step.lower(state, images, labels)
            compiled = lowered.compile()
        state, loss = compiled(state, images, labels)
        losses.append(loss)
    parameters = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state.parameters))
    return Run(
        [float(loss) for loss in losses],
        hashlib.sha256(lowered.as_text().encode()).hexdigest(),
        hashlib.sha256(parameters).hexdigest(),
        counted(CALL, compiled),
        counted(COLLECTIVE, compiled),
    )


def run_processes(
    commands: Sequence[Sequence[str]], seconds: float, environment: dict[str, str] | None = None
) -> list[str]:
    """Runs processes at the same time, and returns the standard output of each.

    All processes have ended when this returns or raises: it kills them if one fails, or after the
    time limit.

    Raises:
        RuntimeError: a process failed or took too long; the message has the errors of all.
    """
    with tempfile.TemporaryDirectory() as folder:
        names = [os.path.join(folder, str(i)) for i in range(len(commands))]
        children: list[subprocess.Popen] = []
        end, late = time.monotonic() + seconds, False
        try:
            for command, name in zip(commands, names, strict=True):
                with open(f"{name}.out", "w") as out, open(f"{name}.err", "w") as err:
                    children.append(
                        subprocess.Popen(command, stdout=out, stderr=err, env=environment)
                    )
            while None in (codes := [child.poll() for child in children]) and not any(codes):
                if late := time.monotonic() > end:
                    break
                time.sleep(0.05)
        finally:
            for child in children:
                child.kill()  # has no effect on ended processes
                child.wait()

        def said(ending: str) -> list[str]:
            texts = []
            for name in names:
                with open(name + ending) as file:
                    texts.append(file.read())
            return texts

        if late or any(codes):
            why = f"not done after {seconds:g} s" if late else "a process failed"
            errors = "\n".join(f"--- process {i}\n{e}" for i, e in enumerate(said(".err")))
            raise RuntimeError(f"{why}, exit codes {codes}\n{errors}")
        return said(".out")


def run_group(processes: int, steps: int, batch: int, seconds: float = 300) -> list[Run]:
    """Trains in a group of processes on this machine's CPU; returns each one's outcome."""
    with socket.socket() as probe:  # a port that is free now, for process 0 to listen on
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    one_device = "--xla_force_host_platform_device_count=1"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {one_device}".strip()
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    options = ["--steps", str(steps), "--batch-size", str(batch), "--json"]
    group = ["--coordinator", address, "--processes", str(processes)]
    script = [sys.executable, os.path.abspath(__file__), *options, *group, "--process"]
    printed = run_processes([[*script, str(i)] for i in range(processes)], seconds, environment)
    return [Run(**json.loads(text.splitlines()[-1])) for text in printed]


def differences(runs: Sequence[Run], one: Run) -> list[str]:
    """The differences between the processes of a group, and from a single process."""
    found = []
    for field in ("program", "parameters"):
        if len({getattr(run, field) for run in runs}) > 1:
            found.append(f"{field}: not the same in all processes")
    for i, run in enumerate(runs):
        far = np.max(np.abs(np.divide(run.losses, one.losses) - 1))
        if not far <= LIMIT:  # also if it is NaN
            found.append(f"losses of process {i} are off by {far:.1e} from those of one process")
    return found


def told(run: Run) -> str:
    """The summary of a training in one line."""
    operations = ", ".join(f"{n} {name}" for name, n in (run.calls | run.collectives).items())
    return f"loss {run.losses[0]:.6f} -> {run.losses[-1]:.6f}; a step has {operations}"


def compare(args: argparse.Namespace) -> int:
    """Compares a group of processes on this machine with one process; returns the exit status."""
    runs = run_group(args.processes, args.steps, args.batch_size)
    (one,) = run_group(1, args.steps, args.batch_size)
    for name, run in ((f"{args.processes} processes", runs[0]), ("one process", one)):
        print(f"{name:12} {told(run)}")
    found = differences(runs, one)
    print("\n".join(found) or "the same parameters in every process, the losses of one process")
    return int(bool(found))


def main() -> int:
    """Trains as one process of a group; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--steps", type=int, default=40, help="of training (default: 40)")
    add("--batch-size", type=int, default=128, help="examples, of all processes (default: 128)")
    add("--processes", type=int, help="how many there are; without --coordinator: start them here")
    add("--coordinator", metavar="HOST:PORT", help="where process 0 listens; a cluster's by itself")
    add("--process", type=int, metavar="I", help="which of them this is, from 0 on")
    add("--json", action="store_true", help="print the result in this form")
    args = parser.parse_args()
    if args.processes and not args.coordinator:
        return compare(args)
    # Must precede anything that asks for devices. Slurm, Open MPI and Kubernetes supply the rest.
    jax.distributed.initialize(args.coordinator, args.processes, args.process)
    jaxconv.install()
    run = train(jax.devices(), args.steps, args.batch_size)
    if args.json:
        print(json.dumps(run._asdict()))
    elif jax.process_index() == 0:
        print(f"{jax.process_count()} processes with {jax.device_count()} devices", end=", ")
        print(told(run))
    return 0


if __name__ == "__main__":
    sys.exit(main())
