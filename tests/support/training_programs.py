"""Training programs in 16 bits, on which tests check what ``fuse`` makes for GPUs.

They run on the CPU, under the fixture ``for_a_gpu_on_the_cpu``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxconv

AXES = (0, 1, 2)  # batch norm's statistics reduce over these


def draw(*shape: int, seed: int = 0, dtype=jnp.bfloat16) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def conv(x, w):
    return lax.conv_general_dilated(
        x, w.astype(x.dtype), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def batch_norm(y, gain, offset):
    wide = y.astype(jnp.float32)
    mean = wide.mean(AXES)
    variance = (wide * wide).mean(AXES) - mean * mean
    return ((wide - mean) * (gain * lax.rsqrt(variance + 1e-5)) + offset).astype(y.dtype)


def assert_close(actual, expected, tolerance=0.02) -> None:
    """Equal up to rounding errors of sums, relative to the largest element."""
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        assert np.abs(a - e).max() <= tolerance * np.abs(e).max()


def mean_error(actual, expected) -> float:
    """The root mean square of the difference, over that of ``expected``."""
    a, e = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return float(np.sqrt(((a - e) ** 2).mean() / max((e**2).mean(), 1e-12)))


def loss(forward: Callable, p, x):
    """The sum of the mean squares of a function's results."""
    return sum((y.astype(jnp.float32) ** 2).mean() for y in jax.tree.leaves(forward(p, x)))


def gradient(forward: Callable) -> Callable:
    """(parameters, x) -> the gradients of ``loss`` by both."""
    return jax.grad(functools.partial(loss, forward), argnums=(0, 1))


# The gradient is taken inside or around ``fuse``.
WAYS = {
    "inside": lambda forward: jaxconv.fuse(gradient(forward)),
    "around": lambda forward: gradient(jaxconv.fuse(forward)),
}


def on_two_devices(gradient: Callable, fuse: Callable) -> Callable:
    """A fused step on two devices; each has its own part of x and its own batch norm.

    Args:
        gradient: (parameters, x) -> the parameters' gradients and others.
        fuse: the transformation.
    """
    devices = jax.devices("cpu")[:2]
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,), devices=devices)

    def step(p, x):
        return jax.tree.map(lambda g: lax.psum(g, "d"), gradient(p, x)[0])

    return jax.shard_map(fuse(step), mesh=mesh, in_specs=(P(), P("d")), out_specs=P())
