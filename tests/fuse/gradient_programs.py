"""A fused layer and its loss, for tests of derivatives inside ``fuse``."""

from __future__ import annotations

import jax
import numpy as np
from fused_programs import conv, draw

X = draw(2, 6, 6, 4)
PARAMETERS = {
    "w": draw(3, 3, 4, 4, seed=1),
    "gain": draw(4, seed=2),
    "offset": draw(4, seed=3),
    "mean": draw(4, seed=4),
}


def layer(p, x):
    """Its derivative by the gain needs an operand that the fused forward pass does not keep."""
    return jax.nn.silu((conv(x, p["w"]) - p["mean"]) * p["gain"] + p["offset"])


def loss(p, x):
    return (layer(p, x) ** 2).mean()


def assert_close(actual, expected) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        if getattr(e, "dtype", None) == jax.dtypes.float0:
            assert a.dtype == e.dtype and a.shape == e.shape
            continue
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        assert np.abs(a - e).max() <= 2e-5 * max(np.abs(e).max(), 1e-2)
