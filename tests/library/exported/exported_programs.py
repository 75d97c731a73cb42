"""Programs that one version of jaxconv exports and later versions run.

Operands are small integers, so that every order of summation gives the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxconv

Program = tuple[Callable[..., Any], Sequence[Any]]  # a function and its arguments


def integers(*shape: int, dtype: Any = np.float32, largest: int = 2) -> np.ndarray:
    rng = np.random.default_rng(sum(shape))
    return rng.integers(-largest, largest, shape, endpoint=True).astype(dtype)


def _step(conv: Callable, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """A result and its gradients."""
    y, pull = jax.vjp(conv, *operands)
    return y, *pull(jnp.sign(y))


def _fused(x, w, scale, bias, residual, activation="relu"):
    return jaxconv.conv(
        x, w, scale=scale, bias=bias, residual=residual, activation=activation, padding=1
    )


def _statistics(x, w, bias):
    return jaxconv.conv(x, w, bias=bias, padding=1, statistics=True)


def _int8(x, w, scale, bias, residual):
    return jaxconv.int8.conv(x, w, scale, bias, residual, activation="relu")


def _int8_blocked(x, w, scale, bias):
    y = jaxconv.int8.conv(jaxconv.int8.pack(x), w, scale, bias, data_format="NCHW32")
    return jaxconv.int8.unpack(jaxconv.int8.conv(y, w, scale, bias, y))


def _lax(x, w):
    return lax.conv_general_dilated(
        x, w, (2, 2), "SAME", dimension_numbers=("NCHW", "OIHW", "NCHW")
    )


def _batch_norm(y, gain, offset):
    wide = y.astype(jnp.float32)
    mean = wide.mean((0, 1, 2))
    variance = (wide * wide).mean((0, 1, 2)) - mean * mean
    return ((wide - mean) * (gain * lax.rsqrt(variance + 1e-5)) + offset).astype(y.dtype)


def _network(p, x):
    """The structure of a ResNet: a stem with max pooling, two residual blocks and a mean."""

    def conv(x, w):
        return lax.conv_general_dilated(
            x, w.astype(x.dtype), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    x = jax.nn.relu(_batch_norm(conv(x, p["u"]), p["gain"], p["offset"]))
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    for _ in range(2):
        y = jax.nn.relu(_batch_norm(conv(x, p["v"]), p["gain"], p["offset"]))
        x = jax.nn.relu(_batch_norm(conv(y, p["w"]), p["gain"], p["offset"]) + x)
    return conv(x, p["u"]).astype(jnp.float32).mean()


def _vectors(k: int) -> tuple[np.ndarray, np.ndarray]:
    return np.exp2(integers(k)), integers(k, largest=8)


def programs() -> dict[str, Program]:
    """The programs by name. Results are exact, except for those in ``ROUNDED``."""
    found: dict[str, Program] = {}
    for name, dtype in (("f32", np.float32), ("bf16", jnp.bfloat16), ("f16", np.float16)):
        x, w = integers(2, 9, 7, 8, dtype=dtype), integers(3, 3, 8, 16, dtype=dtype)
        residual = integers(2, 9, 7, 16, dtype=dtype)
        found[f"conv_{name}"] = functools.partial(_step, jaxconv.conv), (x, w)
        found[f"fused_{name}"] = _fused, (x, w, *_vectors(16), residual)
        found[f"statistics_{name}"] = _statistics, (x, w, _vectors(16)[1])
    silu = functools.partial(_fused, activation="silu")
    found["fused_gradient"] = functools.partial(_step, silu), found["fused_f32"][1]
    x, w = integers(2, 7, 7, 7, dtype=jnp.bfloat16), integers(3, 3, 7, 5, dtype=jnp.bfloat16)
    found["conv_odd"] = functools.partial(_step, jaxconv.conv), (x, w)
    x, w = integers(2, 8, 9, 9), integers(16, 8, 3, 3)
    found["lax"] = jaxconv.override(functools.partial(_step, _lax)), (x, w)
    x, w = (integers(*s, dtype=np.int8, largest=127) for s in ((1, 6, 6, 64), (3, 3, 64, 64)))
    scale, bias = np.full(64, 2.0**-9, np.float32), integers(64, largest=8)
    found["int8"] = _int8, (x, w, scale, bias, x)
    found["int8_blocked"] = _int8_blocked, (x, w, scale, bias)
    long = integers(1, 5, 5, 160, dtype=np.int8, largest=127)
    taps = integers(3, 3, 160, 32, dtype=np.int8, largest=127)
    sums = functools.partial(jaxconv.conv, preferred_element_type=np.int32)
    found["int8_sums"] = sums, (long, taps)
    p = {name: integers(3, 3, 16, 16) / 8 for name in "uvw"}
    p |= {"gain": np.ones(16, np.float32), "offset": np.zeros(16, np.float32)}
    x = integers(4, 8, 8, 16, dtype=jnp.bfloat16)
    found["training_step"] = jaxconv.fuse(jax.value_and_grad(_network)), (p, x)
    return found


# Programs in which XLA rounds sums that are not integers.
ROUNDED = ("statistics", "fused_gradient", "training_step")
