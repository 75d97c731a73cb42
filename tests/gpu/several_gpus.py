"""Programs over the GPUs of this machine: the same results as on one, and their times.

    python tests/gpu/several_gpus.py
    python tests/gpu/several_gpus.py --network resnet50

Every case of halo_cases.py runs with its rows split over all GPUs, forward and both gradients, for
automatic and explicit axes, in float32 on small integers: results must be exact, and collective
permutes must be the only exchange of rows. Also measures a layer of a segmentation network, on
lax's convolution and on this library's. Exit status 1: a result differs or activations are
gathered.

With ``--network`` a built-in network trains under ``fuse``, data parallel by ``jit``. The step on
all GPUs must have the same calls as the step of one GPU on all examples, and no more collectives
than lax's. Its time is printed beside that of one GPU on its share of the examples. Exit status 1:
the calls or the losses differ, or there are more collectives.

``--platform cpu`` runs the script on virtual devices, for example with ``--batch 2 --size 64``.
"""

from __future__ import annotations

import argparse
import collections
import functools
import os
import pathlib
import re
import sys
import time
from collections.abc import Callable

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "support"))

import jax
import jax.numpy as jnp
import numpy as np
from halo_cases import CASES, conv, gradients, lax_conv, placed, tensors
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec
from problems import problem
from sharding_tools import collectives

import jaxconv
from jaxconv.bench.networks import NETWORKS, programs

TIMED = problem("3x3", (512, 512), 3, n=2, c=128, k=128, padding=1)


def mesh_of(kind: AxisType, devices: list) -> Mesh:
    return Mesh(np.array(devices), ("rows",), axis_types=(kind,))


def wrong_results(kind: AxisType, devices: list) -> list[str]:
    """The differences between results, one line each."""
    mesh, wrong = mesh_of(kind, devices), []
    for p, *_ in CASES:
        arrays, expected = tensors(p)
        with jax.set_mesh(mesh):
            operands = placed(mesh, arrays, Spec(None, "rows"), Spec(), Spec(None, "rows"))
            run = jax.jit(functools.partial(conv, p)).lower(*operands[:2]).compile()
            step = jax.jit(gradients(p)).lower(*operands).compile()
            results = run(*operands[:2]), *step(*operands)
        moved = collections.Counter(collectives(run)) + collections.Counter(collectives(step))
        if moved["all-gather"] or moved["all-to-all"]:
            wrong.append(f"{p.name} {kind}: {dict(moved)}")
        for name, actual, exact in zip(("y", "dx", "dw"), results, expected, strict=True):
            if not np.array_equal(np.asarray(actual), exact):
                wrong.append(f"{p.name} {kind}: {name} differs")
        print(f"{p.name:16} {kind.name:9} {dict(moved)}", flush=True)
    return wrong


def milliseconds(convolve, devices: list) -> float:
    """The time of a step, forward and both gradients, in bfloat16."""
    mesh = mesh_of(AxisType.Auto, devices)
    rng = np.random.default_rng(0)
    arrays = [
        jnp.asarray(rng.normal(size=TIMED.canonical_shape(role)), jnp.bfloat16) for role in "xwy"
    ]
    operands = placed(mesh, arrays, Spec(None, "rows"), Spec(), Spec(None, "rows"))
    step = jax.jit(gradients(TIMED, convolve))
    jax.block_until_ready(step(*operands))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready([step(*operands) for _ in range(20)])
        times.append((time.perf_counter() - start) / 20 * 1e3)
    return sorted(times)[2]


# --- data-parallel training -----------------------------------------------------------------------

LOSSES = 1e-2  # largest accepted difference of first losses; lax on several devices reaches it, too


class Training:
    """A network's compiled training step on some devices.

    Attributes:
        calls: how often a device calls each kernel of this library.
        collectives: how often a device takes part in each collective.
        loss: the loss of the first step.
    """

    def __init__(self, name: str, make: Callable, devices: list, examples: programs.Examples):
        network = NETWORKS[name]
        mesh = Mesh(np.array(devices), ("data",))
        whole, split = NamedSharding(mesh, Spec()), NamedSharding(mesh, Spec("data"))
        x = jax.ShapeDtypeStruct(examples.x.shape, examples.x.dtype)
        self._state = jax.device_put(programs.initial_state(network, x), whole)
        self._examples = jax.device_put(examples, split)
        step = jax.jit(make(programs.training_step(network)), donate_argnums=0)
        self._compiled = step.lower(self._state, self._examples).compile()
        targets = re.findall(r'custom_call_target="(jaxconv_\w+)"', self._compiled.as_text())
        self.calls = collections.Counter(targets)
        self.collectives = collectives(self._compiled)

    @functools.cached_property
    def loss(self) -> float:
        return float(self.run(1))

    def run(self, steps: int) -> jax.Array:
        for _ in range(steps):
            self._state, loss = self._compiled(self._state, self._examples)
        return jax.block_until_ready(loss)

    def milliseconds(self, steps: int) -> float:
        """The time of a step, the median of five rounds."""
        times = []
        for _ in range(5):
            start = time.perf_counter()
            self.run(steps)
            times.append((time.perf_counter() - start) / steps * 1e3)
        return sorted(times)[2]


def train(name: str, devices: list, batch: int | None, size: int | None, steps: int) -> list[str]:
    """Prints calls, collectives and times; returns complaints, one line each."""
    network = NETWORKS[name]
    shape = programs.input_shape(network, batch, size)
    whole = (shape[0] * len(devices), *shape[1:])
    examples = programs.random_examples(network, whole, jnp.bfloat16)
    of_one = jax.tree.map(lambda a: a[: shape[0]], examples)
    with jaxconv.override():
        one = Training(name, jaxconv.fuse, devices[:1], of_one)
        # While tracing, fuse sees the whole batch, and decides by its size.
        expected = Training(name, jaxconv.fuse, devices[:1], examples).calls
        several = Training(name, jaxconv.fuse, devices, examples)
    with jaxconv.override(False):
        lax = Training(name, lambda step: step, devices, examples)
    print(f"{name}, {shape} bfloat16 on each of {len(devices)} devices, training, fuse")
    print(f"calls a device: {several.calls.total()}, on one with all examples {expected.total()}")
    for target in sorted(expected | several.calls):
        print(f"  {target:28} {several.calls[target]:4} {expected[target]:4}")
    print(f"collectives: {several.collectives}, lax's own program {lax.collectives}")
    print(f"losses: {several.loss:.5f}, lax's own program {lax.loss:.5f}")
    alone, together, lax_together = (t.milliseconds(steps) for t in (one, several, lax))
    print(
        f"step: {together:.3f} ms, of one device {alone:.3f} ms ({together / alone - 1:+.1%}), "
        f"lax on {len(devices)} devices {lax_together:.3f} ms"
    )
    wrong = []
    if several.calls != expected:
        wrong.append("the calls differ")
    if any(n > lax.collectives.get(kind, 0) for kind, n in several.collectives.items()):
        wrong.append("there are more collectives")
    if not abs(several.loss - lax.loss) <= LOSSES * abs(lax.loss):
        wrong.append("the losses differ")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--platform", default="gpu")
    parser.add_argument("--network", choices=NETWORKS, help="train this one instead")
    parser.add_argument("--batch", type=int, help="examples on a device")
    parser.add_argument("--size", type=int, help="extent of every spatial axis")
    parser.add_argument("--steps", type=int, default=20, help="of a round that is timed")
    args = parser.parse_args()
    devices = jax.devices(args.platform)
    if len(devices) < 2:
        print(f"{len(devices)} device: this needs two")
        return 1
    print(f"{len(devices)} x {devices[0].device_kind}, jax {jax.__version__}")
    if args.network:
        wrong = train(args.network, devices, args.batch, args.size, args.steps)
        print(*wrong, f"{len(wrong)} wrong", sep="\n")
        return bool(wrong)
    kinds = (AxisType.Auto, AxisType.Explicit)
    wrong = [line for kind in kinds for line in wrong_results(kind, devices)]
    for name, convolve in (("lax", lax_conv), ("jaxconv", conv)):
        took = milliseconds(convolve, devices)
        print(f"{TIMED.spatial} 128 -> 128 3x3 bf16, {name}: {took:.3f} ms a step")
    print(*wrong, f"{2 * len(CASES)} cases, {len(wrong)} wrong", sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
