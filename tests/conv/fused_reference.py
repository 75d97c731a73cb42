"""The definition of a convolution with an epilogue, in float64."""

from __future__ import annotations

import epilogue_reference
import numpy as np
from numerics import reference
from problems import Problem

import jaxconv
from jaxconv._src.problem.spec import Op

TERMS = ("scale", "bias", "residual")


def operands(p: Problem, dtype=np.float32, seed: int = 0) -> dict[str, np.ndarray]:
    """Small integers, and powers of two as scales: all sums are exact."""
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
    """The problem as a function of x, w and the epilogue's terms by name."""

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
    sums = reference(Op.FPROP, p, *(values[r].astype(np.float64) for r in "xw"))
    return epilogue_reference.before_activation(sums, {name: values[name] for name in terms})
