"""A fused layer and its loss, for tests of derivatives inside of ``fuse``."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxprs import equations


def draw(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


X = draw(2, 6, 6, 4)
PARAMETERS = {
    "w": draw(3, 3, 4, 4, seed=1),
    "gain": draw(4, seed=2),
    "offset": draw(4, seed=3),
    "mean": draw(4, seed=4),
}


def conv(x, w):
    return lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def layer(p, x):
    """Its derivative by the gain needs what is multiplied: not part of a fused forward pass."""
    return jax.nn.silu((conv(x, p["w"]) - p["mean"]) * p["gain"] + p["offset"])


def loss(p, x):
    return (layer(p, x) ** 2).mean()


def calls(function, *args) -> list[str]:
    """The epilogues of the calls in a program, in its order."""
    return [
        " ".join(e.params["epilogue"].words)
        for e in equations(jax.make_jaxpr(function)(*args))
        if e.primitive.name == "jaxconv_fused"
    ]


def assert_close(actual, expected) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        if getattr(e, "dtype", None) == jax.dtypes.float0:
            assert a.dtype == e.dtype and a.shape == e.shape
            continue
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        assert np.abs(a - e).max() <= 2e-5 * max(np.abs(e).max(), 1e-2)
