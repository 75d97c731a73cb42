"""Tests that memory stays constant over calls with ever changing shapes and ``jax.clear_caches()``.

    python tests/conv/memory_flat.py --calls 20000

Each call has a random shape. A program has five calls, and every third program also their
gradients, so that everything that grows with the number of shapes is visible: plans, selections,
compiled code, buffers. After every period the caches of JAX are cleared, and the resident memory of
the process is sampled. Memory is constant if its median over the last third of the periods exceeds
that over the middle third by less than the limit. The first third fills the bounded caches (256
plans, 1,024 primitives of oneDNN, 4,096 selections, and 4,096 problems with brgemm kernels, which
oneDNN never frees). With ``--repeat`` every period has the same shapes, and a few periods fill the
caches. ``--side lax`` measures lax's convolution, to find JAX's own growth. ``--keep-caches``
clears nothing, and JAX keeps up to 4,096 programs.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "support"))

import jax
import jax.numpy as jnp
import jax_settings  # noqa: F401
import numpy as np
from jax import lax

import jaxconv

LIMIT_MB = 8.0
PER_PROGRAM = 5


def resident_mb() -> float:
    """Resident memory in MB, after unused pages have been returned to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096 / 1e6


def of_lax(x, w, *, stride: int, groups: int):
    spatial = "DHW"[-(x.ndim - 2) :]
    return lax.conv_general_dilated(
        x,
        w,
        (stride,) * len(spatial),
        "SAME",
        dimension_numbers=(f"N{spatial}C", f"{spatial}IO", f"N{spatial}C"),
        feature_group_count=groups,
    )


SIDES = {"jaxconv": functools.partial(jaxconv.conv, padding="SAME"), "lax": of_lax}


def draw(convolve: Callable, rng: np.random.Generator) -> tuple[Callable, np.ndarray, np.ndarray]:
    """A convolution of a random shape, and its operands."""
    rank = int(rng.integers(1, 3))
    groups = int(rng.choice([1, 1, 1, 2]))
    spatial = tuple(rng.integers(4, 65 if rank == 1 else 17, rank))
    window = tuple(rng.integers(1, 5, rank))
    n, c, k = (int(v) for v in rng.integers(1, (4, 9, 9)))
    x = np.ones((n, *spatial, groups * c), np.float32)
    w = np.ones((*window, c, groups * k), np.float32)
    return functools.partial(convolve, stride=int(rng.integers(1, 3)), groups=groups), x, w


def one_program(convolve: Callable, rng: np.random.Generator, gradients: bool) -> None:
    """Compiles and runs a few calls together, which takes less time than one by one."""
    functions, xs, ws = zip(*(draw(convolve, rng) for _ in range(PER_PROGRAM)), strict=True)

    def forward(xs, ws):
        return [f(x, w) for f, x, w in zip(functions, xs, ws, strict=True)]

    def loss(xs, ws):
        return sum(jnp.sum(y) for y in forward(xs, ws))

    function = jax.grad(loss, (0, 1)) if gradients else forward
    jax.block_until_ready(jax.jit(function)(xs, ws))


def samples(
    convolve: Callable, calls: int, period: int, seed: int, repeat: bool, clear: bool
) -> Iterator[float]:
    """Resident memory in MB after every period."""
    rng = np.random.default_rng(seed)
    for begin in range(0, calls, period):
        rng = np.random.default_rng(seed) if repeat else rng
        for at in range(begin, min(begin + period, calls), PER_PROGRAM):
            one_program(convolve, rng, gradients=at // PER_PROGRAM % 3 == 2)
        if clear:
            jax.clear_caches()
        yield resident_mb()


def growth_mb(found: list[float]) -> float:
    """The median of the last third minus that of the middle third."""
    third = len(found) // 3
    return statistics.median(found[-third:]) - statistics.median(found[third : 2 * third])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--period", type=int, default=200, help="calls between clearings")
    parser.add_argument("--repeat", action="store_true", help="the same shapes in every period")
    parser.add_argument("--keep-caches", action="store_true", help="do not clear JAX's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--side", choices=SIDES, default="jaxconv")
    parser.add_argument("--limit", type=float, default=LIMIT_MB, help="MB")
    options = parser.parse_args()
    if options.calls < 6 * options.period:
        parser.error("expected at least six periods")
    found, began = [], time.time()
    with jax.default_device(jax.devices("cpu")[0]):
        for mb in samples(
            SIDES[options.side],
            options.calls,
            options.period,
            options.seed,
            options.repeat,
            not options.keep_caches,
        ):
            found.append(round(mb, 1))
            if len(found) % 10 == 0:
                calls = len(found) * options.period
                print(f"{time.time() - began:6.0f} s, {calls} calls, {mb:.1f} MB", flush=True)
    growth = growth_mb(found)
    result = {
        "side": options.side,
        "calls": options.calls,
        "period": options.period,
        "repeat": options.repeat,
        "cleared": not options.keep_caches,
        "seed": options.seed,
        "jax": jax.__version__,
        "first_mb": found[0],
        "last_mb": found[-1],
        "greatest_mb": max(found),
        "growth_mb": round(growth, 1),
    }
    print(json.dumps(result))
    return int(growth > options.limit)


if __name__ == "__main__":
    sys.exit(main())
