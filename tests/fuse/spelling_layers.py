"""Spellings of activations and shortcuts."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from spelling_norms import Array, Norm, reshape, wide

KEPT = 0.75  # share of the examples that stochastic depth keeps


# --- activations ---


class Activation(NamedTuple):
    """A spelling of an activation.

    Attributes:
        function: the function, with its derivatives at kinks; equal for equivalent spellings.
        kernel: the function of the kernels' table with this derivative; if the table has none (as
            for other derivatives at kinks), a name of its own.
        apply: the spelling.
        kinks: the operands at which derivatives jump.
    """

    function: str
    kernel: str
    apply: Callable[[Array], Array]
    kinks: tuple[float, ...] = ()


def _custom_relu(y: Array) -> Array:
    @jax.custom_jvp
    def relu(y):
        return jnp.maximum(y, 0)

    relu.defjvps(lambda dy, out, y: lax.select(y > 0, dy, lax.full_like(dy, 0)))
    return relu(y)


def _relu_of_gradient(y: Array) -> Array:
    @jax.custom_vjp
    def relu(y):
        return jnp.maximum(y, 0)

    relu.defvjp(lambda y: (relu(y), y), lambda y, dy: (jnp.where(y > 0, dy, 0),))
    return relu(y)


def _selu(y: Array) -> Array:
    alpha, scale = 1.6732632423543772, 1.0507009873554805
    return scale * jnp.where(y > 0, y, alpha * jnp.expm1(jnp.where(y > 0, 0, y)))


_HALF = np.sqrt(0.5)
_TANH = np.sqrt(2 / np.pi)
_ZERO, _SIX, _THREE = (0.0,), (0.0, 6.0), (-3.0, 3.0)

ACTIVATIONS: dict[str, Activation] = {
    "jax.nn.relu": Activation("relu", "relu", jax.nn.relu, _ZERO),
    "custom_jvp relu": Activation("relu", "relu", _custom_relu, _ZERO),
    "custom_vjp relu": Activation("relu by vjp", "relu", _relu_of_gradient, _ZERO),
    "maximum(y, 0)": Activation("max 0", "relu", lambda y: jnp.maximum(y, 0), _ZERO),
    "maximum(0.0, y)": Activation("max 0", "relu", lambda y: jnp.maximum(0.0, y), _ZERO),
    "lax.max(y, zeros)": Activation(
        "max 0", "relu", lambda y: lax.max(y, jnp.zeros_like(y)), _ZERO
    ),
    "clip(y, 0)": Activation("max 0", "relu", lambda y: jnp.clip(y, 0), _ZERO),
    "where(y > 0, y, 0)": Activation("where > 0", "relu", lambda y: jnp.where(y > 0, y, 0), _ZERO),
    "select(y > 0, y, zeros)": Activation(
        "where > 0", "relu", lambda y: lax.select(y > 0, y, jnp.zeros_like(y)), _ZERO
    ),
    "where(y > 0.0, y, 0.0)": Activation(
        "where > 0", "relu", lambda y: jnp.where(y > 0, y, 0.0), _ZERO
    ),
    "jax.nn.relu6": Activation("relu6", "relu6", jax.nn.relu6, _SIX),
    "clip(y, 0, 6)": Activation("clip 6", "relu6", lambda y: jnp.clip(y, 0, 6), _SIX),
    "minimum(maximum(y, 0), 6)": Activation(
        "clip 6", "relu6", lambda y: jnp.minimum(jnp.maximum(y, 0), 6), _SIX
    ),
    "minimum(relu(y), 6)": Activation(
        "min 6 of relu", "min 6 of relu", lambda y: jnp.minimum(jax.nn.relu(y), 6.0), _SIX
    ),
    "clamp(0, y, 6)": Activation(
        "clamp 6",
        "relu6",
        lambda y: lax.clamp(jnp.zeros((), y.dtype), y, jnp.full((), 6, y.dtype)),
        _SIX,
    ),
    "jax.nn.silu": Activation("silu", "silu", jax.nn.silu),
    "y * sigmoid(y)": Activation("silu", "silu", lambda y: y * jax.nn.sigmoid(y)),
    "lax.logistic(y) * y": Activation("silu", "silu", lambda y: lax.logistic(y) * y),
    "y / (1 + exp(-y))": Activation("silu", "silu", lambda y: y / (1 + jnp.exp(-y))),
    "y * (tanh(y / 2) + 1) / 2": Activation(
        "silu", "silu", lambda y: y * (0.5 * (jnp.tanh(0.5 * y) + 1))
    ),
    "gelu": Activation("gelu", "gelu", lambda y: jax.nn.gelu(y, approximate=False)),
    "y / 2 * (1 + erf)": Activation(
        "gelu", "gelu", lambda y: 0.5 * y * (1 + lax.erf(y * _HALF.astype(y.dtype)))
    ),
    "y * (erfc(-y) / 2)": Activation(
        "gelu", "gelu", lambda y: y * (0.5 * lax.erfc(y * -_HALF.astype(y.dtype)))
    ),
    "gelu by tanh": Activation("gelu_tanh", "gelu_tanh", jax.nn.gelu),
    "y / 2 * (1 + tanh)": Activation(
        "gelu_tanh",
        "gelu_tanh",
        lambda y: 0.5 * y * (1 + jnp.tanh(_TANH.astype(y.dtype) * (y + 0.044715 * y * y * y))),
    ),
    "jax.nn.hard_swish": Activation("hard_swish", "hard_swish", jax.nn.hard_swish, _THREE),
    "y * relu6(y + 3) / 6": Activation(
        "hard_swish", "hard_swish", lambda y: y * jax.nn.relu6(y + 3) / 6, _THREE
    ),
    "y * (relu6(y + 3) / 6)": Activation(
        "hard_swish", "hard_swish", lambda y: y * (jax.nn.relu6(y + 3.0) * (1 / 6)), _THREE
    ),
    "y * clip(y + 3, 0, 6) / 6": Activation(
        "hard_swish by clip", "hard_swish", lambda y: y * jnp.clip(y + 3, 0, 6) / 6, _THREE
    ),
    "y * clip(y / 6 + 1 / 2, 0, 1)": Activation(
        "hard_swish by clip",
        "hard_swish",
        lambda y: y * jnp.clip(y / 6 + 0.5, 0, 1),
        _THREE,
    ),
    "jax.nn.hard_sigmoid": Activation("hard_sigmoid", "hard_sigmoid", jax.nn.hard_sigmoid, _THREE),
    "clip(y + 3, 0, 6) / 6": Activation(
        "hard_sigmoid by clip", "hard_sigmoid", lambda y: jnp.clip(y + 3, 0, 6) / 6, _THREE
    ),
    "clip(y / 6 + 1 / 2, 0, 1)": Activation(
        "hard_sigmoid by clip",
        "hard_sigmoid",
        lambda y: jnp.clip(y / 6 + 0.5, 0, 1),
        _THREE,
    ),
    "jax.nn.mish": Activation("mish", "mish", jax.nn.mish),
    "y * tanh(log1p(exp(y)))": Activation(
        "mish", "mish", lambda y: y * jnp.tanh(jnp.log1p(jnp.exp(y)))
    ),
    "jax.nn.softplus": Activation("softplus", "softplus", jax.nn.softplus),
    "logaddexp(y, 0)": Activation("softplus", "softplus", lambda y: jnp.logaddexp(y, 0)),
    "log1p(exp(y))": Activation("softplus", "softplus", lambda y: jnp.log1p(jnp.exp(y))),
    "tanh": Activation("tanh", "tanh", jnp.tanh),
    "2 sigmoid(2 y) - 1": Activation("tanh", "tanh", lambda y: 2 * jax.nn.sigmoid(2 * y) - 1),
    "sigmoid": Activation("sigmoid", "sigmoid", jax.nn.sigmoid),
    "1 / (1 + exp(-y))": Activation("sigmoid", "sigmoid", lambda y: 1 / (1 + jnp.exp(-y))),
    "jax.nn.selu": Activation("selu", "selu", jax.nn.selu, _ZERO),
    "selu by where": Activation("selu", "selu", _selu, _ZERO),
    "jax.nn.elu": Activation("elu", "elu", jax.nn.elu, _ZERO),
    "where(y > 0, y, expm1(y))": Activation(
        "elu", "elu", lambda y: jnp.where(y > 0, y, jnp.exp(jnp.where(y > 0, 0, y)) - 1), _ZERO
    ),
    "jax.nn.leaky_relu": Activation(
        "leaky >= 0", "leaky_relu", lambda y: jax.nn.leaky_relu(y, 0.1), _ZERO
    ),
    "where(y >= 0, y, 0.1 y)": Activation(
        "leaky >= 0", "leaky_relu", lambda y: jnp.where(y >= 0, y, 0.1 * y), _ZERO
    ),
    "where(y > 0, y, y * 0.1)": Activation(
        "leaky > 0", "leaky > 0", lambda y: jnp.where(y > 0, y, y * 0.1), _ZERO
    ),
    "maximum(y, 0.1 y)": Activation(
        "leaky by max", "leaky_relu", lambda y: jnp.maximum(y, 0.1 * y), _ZERO
    ),
    "square(relu(y))": Activation(
        "relu squared", "relu squared", lambda y: jnp.square(jax.nn.relu(y)), _ZERO
    ),
    "squareplus": Activation("squareplus", "squareplus", jax.nn.squareplus),
    "none": Activation("none", "none", lambda y: y),
}

KERNELS = {a.function: a.kernel for a in ACTIVATIONS.values()}


# --- shortcuts ---


class Layer(NamedTuple):
    """The layer's input and parameters, for shortcuts."""

    a: Array
    p: dict[str, Array]
    conv: Callable[[Array, Array], Array]
    norm: Norm
    c: int

    def vector(self, name: str, z: Array) -> Array:
        return reshape(self.p[name], z, self.c).astype(z.dtype)

    def projected(self, z: Array) -> Array:
        y = self.conv(self.a, self.p["w3"])
        return self.norm(y, self.p["gain3"], self.p["offset3"]).astype(z.dtype)

    def kept(self, z: Array, shape: tuple[int, ...]) -> Array:
        drawn = jax.random.uniform(jax.random.key(3), shape, np.float32)
        return drawn < KEPT


def _kept_factor(z: Array, layer: Layer) -> Array:
    return layer.kept(z, (z.shape[0], 1, 1, 1)).astype(z.dtype)


def _kept_select(z: Array, layer: Layer) -> Array:
    mask = jnp.broadcast_to(layer.kept(z, (z.shape[0], 1, 1, 1)), z.shape)
    return lax.select(mask, z / KEPT, jnp.zeros_like(z))


# Name -> (meaning, function that adds the shortcut to the norm's result z).
SHORTCUTS: dict[str, tuple[str, Callable[[Array, Layer], Array]]] = {
    "none": ("none", lambda z, s: z),
    "z + a": ("plain", lambda z, s: z + s.a.astype(z.dtype)),
    "a + z": ("plain", lambda z, s: s.a.astype(z.dtype) + z),
    "in float32": (
        "plain",
        lambda z, s: (z.astype(wide(z.dtype)) + s.a.astype(wide(z.dtype))).astype(z.dtype),
    ),
    "z - (-a)": ("plain", lambda z, s: z - (-s.a.astype(z.dtype))),
    "z + projection": ("projection", lambda z, s: z + s.projected(z)),
    "projection + z": ("projection", lambda z, s: s.projected(z) + z),
    "a + z * kept / p": (
        "stochastic depth",
        lambda z, s: s.a + z * (_kept_factor(z, s) / KEPT),
    ),
    "z / p * kept + a": (
        "stochastic depth",
        lambda z, s: z / KEPT * _kept_factor(z, s) + s.a,
    ),
    "(z * kept[:, None, None, None]) / p + a": (
        "stochastic depth",
        lambda z, s: (
            (z * s.kept(z, (z.shape[0],)).astype(z.dtype)[:, None, None, None]) / KEPT + s.a
        ),
    ),
    "a + where(kept, z / p, 0)": (
        "stochastic depth by select",
        lambda z, s: s.a + jnp.where(s.kept(z, (z.shape[0], 1, 1, 1)), z / KEPT, 0),
    ),
    "select(kept, z / p, zeros) + a": (
        "stochastic depth by select",
        lambda z, s: _kept_select(z, s) + s.a,
    ),
    "a + z * layer scale": ("layer scale", lambda z, s: s.a + z * s.vector("scale", z)),
    "layer scale * z + a": ("layer scale", lambda z, s: s.vector("scale", z) * z + s.a),
    "layer scale in float32": (
        "layer scale",
        lambda z, s: (
            s.a + (z.astype(wide(z.dtype)) * reshape(s.p["scale"], z, s.c)).astype(z.dtype)
        ),
    ),
    "z + (a * scale + shift)": (
        "affine",
        lambda z, s: z + (s.a * s.vector("scale", z) + s.vector("shift", z)),
    ),
    "a * scale + z + shift": (
        "affine",
        lambda z, s: s.a * s.vector("scale", z) + z + s.vector("shift", z),
    ),
}
