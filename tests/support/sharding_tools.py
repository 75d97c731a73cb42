"""Meshes, problems and collectives of a program, shared by the tests of sharding."""

from __future__ import annotations

import math
import re

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as Spec
from numerics import assert_exact, reference
from problems import problem

import jaxconv
from jaxconv._src.problem.spec import Op

DEVICES = 8
GRID = (4, 2)
AXES = ("data", "model")

PROBLEMS = {
    p.name: p
    for p in (
        problem("dense", 5, 3, n=8, c=4, k=8, padding=1),
        problem("strided", (7, 6), 3, n=8, c=4, k=8, stride=2, padding=1),
        problem("one_dimensional", 9, 3, n=8, c=4, k=8, padding=1),
        problem("grouped", 5, 3, n=8, c=8, k=16, padding=1, groups=4),
        problem("depthwise", 5, 3, n=8, c=8, k=8, padding=1, groups=8),
        problem("of_groups", 5, 3, n=8, c=8, k=16, padding=1, groups=8),
    )
}


def collectives(compiled) -> dict[str, int]:
    """How often each collective occurs in the compiled program."""
    kinds = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
    text = compiled.as_text()
    # An instruction has the form "%name = type kind(operands)"; asynchronous ones are -start and
    # -done.
    return {
        kind: count for kind in kinds if (count := len(re.findall(rf" {kind}(?:-start)?\(", text)))
    }


def received(compiled) -> int:
    """The bytes of the results of all collectives in the compiled program; loops count once."""
    kinds = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    results = re.findall(rf" = (.*?) (?:{kinds})\(", compiled.as_text())
    arrays = [array for result in results for array in re.findall(r"\w*?(\d+)\[([\d,]*)\]", result)]
    return sum(
        int(bits) // 8 * math.prod(int(extent) for extent in shape.split(",") if extent)
        for bits, shape in arrays
    )


def conv(p, x, w, **options):
    return jaxconv.conv(x, w, stride=p.stride, padding=p.padding, groups=p.groups, **options)


def tensors(p):
    rng = np.random.default_rng(0)
    x, w, t = (rng.integers(-3, 4, p.canonical_shape(r)).astype(np.float32) for r in "xwy")
    expected = {
        "y": reference(Op.FPROP, p, x, w),
        "dx": reference(Op.DGRAD, p, t, w),
        "dw": reference(Op.WGRAD, p, x, t),
    }
    return x, w, t, {name: a.astype(np.float32) for name, a in expected.items()}


def assert_gradients_with_one_sum(step, p, operands, expected):
    """Checks that the step's (dx, dw) are exact, and that an all-reduce is the only collective."""
    dx, dw = step(*operands)
    assert_exact(dx, expected["dx"], p.name)
    assert_exact(dw, expected["dw"], p.name)
    assert collectives(step.lower(*operands).compile()) == {"all-reduce": 1}


def grid(kind=jax.sharding.AxisType.Auto, shape=GRID, axes=AXES):
    count = np.prod(shape)
    return jax.make_mesh(shape, axes, (kind,) * len(shape), devices=jax.devices("cpu")[:count])


def specs(p, split) -> dict[str, Spec]:
    """The partition specs of x, w and y, channels last."""
    inner = (None,) * len(p.spatial)
    n, c, k, g = (split.get(name) for name in "nckg")
    return {
        "x": Spec(n, *inner, c or g),
        "w": Spec(*inner, c, k or g),
        "y": Spec(n, *inner, k or g),
    }


def gradients(p, **options):
    def of(x, w, t):
        return jax.vjp(lambda x, w: conv(p, x, w, **options), x, w)[1](t)

    return of


def placed(mesh, p, split, arrays):
    return [
        jax.device_put(a, NamedSharding(mesh, specs(p, split)[role]))
        for a, role in zip(arrays, "xwy", strict=True)
    ]
