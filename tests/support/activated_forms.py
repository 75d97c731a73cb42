"""Parameters of ``normalise`` calls with an activation, as ``fuse`` finds them in a program."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxconv._src.fuse import fuse_derivatives
from jaxconv._src.fuse.fuse_activations import Written
from jaxconv._src.passes.normalise import VECTORS, Form

FUNCTIONS = {
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "silu": jax.nn.silu,
    "hard_swish": jax.nn.hard_swish,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
    "leaky_relu": functools.partial(jax.nn.leaky_relu, negative_slope=0.25),
}


def form(shape, dtype, activation="silu", vectors=VECTORS) -> Form:
    """A call with one array and an activation in ``FUNCTIONS``, computed in float32."""
    operand = jax.core.ShapedArray(shape, np.dtype(dtype))

    def function(t: jax.Array) -> jax.Array:
        return FUNCTIONS[activation](t.astype(np.float32)).astype(t.dtype)

    mask, named, known = fuse_derivatives.known(function, operand)
    written = Written(function, operand, known, mask=mask, named=named)
    return Form((vectors,), False, written, np.dtype(dtype))
