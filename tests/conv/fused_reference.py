"""Convolution with an epilogue by its definition, in float64."""

from __future__ import annotations

import math

import numpy as np
from numerics import reference
from problems import Problem

import jaxconv
from jaxconv._src.problem.spec import Op

erf = np.vectorize(math.erf)
erfc = np.vectorize(math.erfc)
TERMS = ("scale", "bias", "residual")


def defined(activation, t: np.ndarray) -> np.ndarray:
    """The activations in float64."""
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


def operands(p: Problem, dtype=np.float32, seed: int = 0) -> dict[str, np.ndarray]:
    """Small whole numbers, and powers of two as scales: all sums are exact."""
    rng = np.random.default_rng(seed)
    drawn = {r: rng.integers(-2, 3, p.canonical_shape(r)).astype(dtype) for r in "xwy"}
    return {
        "x": drawn["x"],
        "w": drawn["w"],
        "scale": (2.0 ** rng.integers(-3, 2, p.k)).astype(np.float32),
        "bias": rng.integers(-4, 5, p.k).astype(np.float32),
        "residual": drawn["y"],
    }


def fused(p: Problem, activation=None, **options):
    """The problem as a function of x, w and named terms."""

    def call(x, w, **terms):
        return jaxconv.conv(
            x,
            w,
            stride=p.stride,
            padding=p.padding,
            dilation=p.dilation,
            groups=p.groups,
            activation=activation,
            **options,
            **terms,
        )

    return call


def before_activation(p: Problem, values: dict, terms) -> np.ndarray:
    t = reference(Op.FPROP, p, *(values[r].astype(np.float64) for r in "xw"))
    t = t * values["scale"] if "scale" in terms else t
    t = t + values["bias"] if "bias" in terms else t
    return t + values["residual"].astype(np.float64) if "residual" in terms else t
