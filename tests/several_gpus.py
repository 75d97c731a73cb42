"""Spatial axes split over the GPUs of this machine: the same bits as on one, and what it costs.

    python tests/several_gpus.py

Every case of test_halo.py runs with its rows over all GPUs, forward and both gradients, for
automatic and explicit axes, in float32 on small integers: results are exact, and rows travel by
collective permutes alone. Then a layer of a segmentation network is timed, on lax's convolution
and on this library's. Exit status 1: a result differs or activations are gathered.
`--platform cpu` tries the script on virtual devices.
"""

from __future__ import annotations

import argparse
import collections
import functools
import os
import sys
import time

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as Spec
from problems import problem
from sharding_tools import collectives
from test_halo import CASES, conv, gradients, lax_conv, placed, tensors

TIMED = problem("3x3", (512, 512), 3, n=2, c=128, k=128, padding=1)


def mesh_of(kind: AxisType, devices: list) -> Mesh:
    return Mesh(np.array(devices), ("rows",), axis_types=(kind,))


def wrong_results(kind: AxisType, devices: list) -> list[str]:
    """What differs, one line each."""
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
    """A step's time, forward and both gradients, bfloat16."""
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--platform", default="gpu")
    devices = jax.devices(parser.parse_args().platform)
    if len(devices) < 2:
        print(f"{len(devices)} device: this needs two")
        return 1
    print(f"{len(devices)} x {devices[0].device_kind}, jax {jax.__version__}")
    kinds = (AxisType.Auto, AxisType.Explicit)
    wrong = [line for kind in kinds for line in wrong_results(kind, devices)]
    for name, convolve in (("lax", lax_conv), ("jaxconv", conv)):
        took = milliseconds(convolve, devices)
        print(f"{TIMED.spatial} 128 -> 128 3x3 bf16, {name}: {took:.3f} ms a step")
    print(*wrong, f"{2 * len(CASES)} cases, {len(wrong)} wrong", sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
