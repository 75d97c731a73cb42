"""The definition of the fused epilogue in float64, and terms on which it is exact in float32."""

from __future__ import annotations

import math

import numpy as np
from problems import DTYPES, Problem

from jaxconv._src.problem.epilogue import Epilogue

erfc = np.vectorize(math.erfc)


def activated(activation: str | tuple[str, float] | None, t: np.ndarray) -> np.ndarray:
    """The activation of t; leaky_relu comes with its slope."""
    if isinstance(activation, tuple):
        return np.where(t < 0, activation[1] * t, t)
    cubic = math.sqrt(8 / math.pi) * (t + 0.044715 * t**3)
    with np.errstate(over="ignore"):
        return {
            None: t,
            "relu": np.maximum(t, 0),
            "relu6": np.clip(t, 0, 6),
            "gelu": t / 2 * erfc(-t * math.sqrt(0.5)),
            "gelu_tanh": t / (1 + np.exp(-cubic)),
            "silu": t / (1 + np.exp(-t)),
            "sigmoid": 1 / (1 + np.exp(-t)),
            "tanh": np.tanh(t),
            "hard_swish": t * (np.clip(t + 3, 0, 6) / 6),
        }[activation]


def before_activation(sums: np.ndarray, terms: dict[str, np.ndarray]) -> np.ndarray:
    """The activation's argument t: the sums with those of scale, bias and residual that exist."""
    t = sums.astype(np.float64) * terms.get("scale", 1.0)
    for name in ("bias", "residual"):
        t = t + terms[name].astype(np.float64) if name in terms else t
    return t


def exact_terms(p: Problem, form: Epilogue, dtype: str, seed: object) -> dict[str, np.ndarray]:
    """The operands after x and w in canonical layout, in the order of the call.

    Scales are powers of two and the other terms multiples of a quarter, so that t is exact in
    float32.
    """
    rng = np.random.default_rng(seed)
    drawn = {
        "scale": (2.0 ** rng.integers(-2, 2, p.k)).astype(np.float32),
        "bias": (rng.integers(-12, 13, p.k) / 4).astype(np.float32),
        "residual": (rng.integers(-16, 17, p.canonical_shape("y")) / 2).astype(DTYPES[dtype][1]),
    }
    return {name: drawn[name] for name in form.terms}


def results(form: Epilogue, terms: dict[str, np.ndarray], sums: np.ndarray) -> list[np.ndarray]:
    """y and, if the epilogue stores it, t ("pre"), in float64."""
    t = before_activation(sums, terms)
    leaky = form.activation == "leaky_relu"
    y = activated(("leaky_relu", form.slope) if leaky else form.activation, t)
    return [y, t] if form.pre else [y]


def rounded(exact: np.ndarray, dtype: str) -> np.ndarray:
    """Rounds to ``dtype`` through float32, as a kernel does."""
    return exact.astype(np.float32).astype(DTYPES[dtype][1])
