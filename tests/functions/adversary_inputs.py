"""Operands and expected outcomes for the cases of ``adversary.py``."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from adversary import Answer, Refused
from jax import lax

NHWC = ("NHWC", "HWIO", "NHWC")
RNG = np.random.default_rng(0)


def draw(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    """Small integers, so that every sum is exact."""
    return RNG.integers(-2, 3, shape).astype(dtype)


X, W = draw(2, 5, 6, 4), draw(3, 2, 4, 6)
DY = draw(2, 5, 6, 6)


def value(*words: str) -> Refused:
    return Refused(ValueError, words)


def kind(*words: str) -> Refused:
    return Refused(TypeError, words)


def in_lax(x: Any = X, w: Any = W, stride=(1, 1), padding="SAME", **options: Any) -> Answer:
    """Expects the result of lax for the same call."""
    options = {"dimension_numbers": NHWC, "precision": "highest", **options}
    return Answer(
        lambda: lax.conv_general_dilated(jnp.asarray(x), jnp.asarray(w), stride, padding, **options)
    )


def written(given: Any) -> str:
    text = " ".join(repr(given).split())
    return text if len(text) < 60 else f"{text[:57]}..."
