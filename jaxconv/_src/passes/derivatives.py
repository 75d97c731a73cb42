"""Derivatives of activations as functions of their operand, float32, computed as in the kernels."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxconv._src.problem.epilogue import activate, differential


def _mish(u: jax.Array, slope: float) -> jax.Array:
    # tanh(log(1 + e)) = n / (n + 2) with e = exp(u), n = e (e + 2)
    clipped = jnp.clip(u, -80.0, 20.0)
    e = jnp.exp(clipped)
    n = e * (e + 2)
    finite = (n + 4 * clipped * e * (1 + e) / (n + 2)) / (n + 2)
    return finite + 0 * u  # NaN at infinity, as in jax.nn.mish


def _clipped(u: jax.Array, low: float, high: float) -> jax.Array:
    """The derivative of jnp.clip."""
    at_ends = jnp.where((u == low) | (u == high), np.float32(0.5), np.float32(0))
    return jnp.where((u > low) & (u < high), np.float32(1), at_ends)


def _clip_hard_swish(u: jax.Array, slope: float) -> jax.Array:
    # u * c(u) with the clipped factor c: c plus u times the derivative of c.
    inner = jnp.where(jnp.abs(u) <= 3, u / 6, 0)
    return jnp.clip(u, -3, 3) / 6 + 0.5 + inner * _clipped(u, -3, 3)


def _leaky_maximum(u: jax.Array, slope: float) -> jax.Array:
    """The derivative of jnp.maximum(u, slope * u), whose operands are equal at infinity too."""
    of_sign = jnp.where(u > 0, 1, jnp.where(u < 0, slope, np.float32(0)))
    return jnp.where(u == slope * u, np.float32(0.5 + slope / 2), of_sign)


def _from_y(name: str) -> Callable[[jax.Array, float], jax.Array]:
    return lambda u, slope: differential(name, slope, activate(u, name), jnp.ones_like(u))


def _from_operand(name: str) -> Callable[[jax.Array, float], jax.Array]:
    return lambda u, slope: differential(name, slope, u, jnp.ones_like(u))


# By the names of the custom call's attribute (cc/cuda/normalisation/derivative.h). At corners the
# values are those of jax.nn; from "maximum" on they are the mean of both sides, as in jnp.maximum
# and jnp.clip.
DERIVATIVES: dict[str, Callable[[jax.Array, float], jax.Array]] = {
    "leaky_relu": _from_operand("leaky_relu"),
    "elu": lambda u, slope: jnp.where(u > 0, 1, slope * jnp.exp(jnp.minimum(u, 0))),
    "hard_sigmoid": lambda u, slope: jnp.where((u > -3) & (u < 3), np.float32(1 / 6), 0),
    "hard_swish": lambda u, slope: jnp.where(
        u <= -3, 0, jnp.where(u >= 3, np.float32(1), u / 3 + 0.5)
    ),
    "sigmoid": _from_y("sigmoid"),
    "silu": _from_operand("silu"),
    "tanh": _from_y("tanh"),
    "gelu": _from_operand("gelu"),
    "gelu_tanh": _from_operand("gelu_tanh"),
    "softplus": lambda u, slope: lax.logistic(u),
    "mish": _mish,
    "maximum": lambda u, slope: jnp.where(u > 0, 1, jnp.where(u == 0, np.float32(0.5), 0)),
    "clip6": lambda u, slope: _clipped(u, 0, 6),
    "leaky_maximum": _leaky_maximum,
    "clip_hard_sigmoid": lambda u, slope: _clipped(u, -3, 3) * np.float32(1 / 6),
    "clip_hard_swish": _clip_hard_swish,
}


# Derivatives that are masks, which ``masked_sums`` also takes as bounds.
_MASKS = {name: _from_operand(name) for name in ("relu", "relu6")}

# Derivatives that the program takes by a select: where they are 0, a gradient of NaN or infinity
# becomes 0.
_SELECTS = ("hard_sigmoid", *_MASKS)

# The activation of an epilogue with this derivative, for the derivatives that kernels compute
# together with the activation's value (cc/cuda/normalisation/derivative.h).
VALUES = {name: name for name in (*_MASKS, "leaky_relu", "hard_swish", "sigmoid", "silu", "tanh")}
VALUES |= {"gelu": "gelu", "gelu_tanh": "gelu_tanh"}
VALUES |= {"maximum": "relu", "clip6": "relu6", "leaky_maximum": "leaky_relu"}


def times_derivative(activation: str, slope: float, u: jax.Array, dt: jax.Array) -> jax.Array:
    """The derivative at u times dt, float32."""
    of_u = derivative(activation, slope, u)
    product = of_u * dt.astype(np.float32)
    return jnp.where(of_u == 0, np.float32(0), product) if activation in _SELECTS else product


def derivative(activation: str, slope: float, u: jax.Array) -> jax.Array:
    """An activation's derivative at u, float32; ``slope`` is that of leaky_relu and elu."""
    return (DERIVATIVES | _MASKS)[activation](u.astype(np.float32), slope)


def value(activation: str, slope: float, u: jax.Array) -> jax.Array:
    """The activation of ``VALUES`` with this derivative at u, float32."""
    return activate(u.astype(np.float32), VALUES[activation], slope)
