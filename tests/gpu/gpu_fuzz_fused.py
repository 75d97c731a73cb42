"""Epilogues of the GPU fuzz: a random one for a problem, its operands, and the right results.

Scales are powers of two and the other terms multiples of a quarter, so that t is exact in float32,
and the activations are those that are exact too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from problems import DTYPES, Problem

from jaxconv._src.conv.fused import Fused, bind
from jaxconv._src.library import native
from jaxconv._src.problem.epilogue import Epilogue
from jaxconv._src.problem.spec import Op

SHARE = 0.15  # of the problems
SLOPES = (0.25, 0.5, -0.5)


def draw(rng: np.random.Generator) -> Epilogue:
    """One that is not plain."""
    while True:
        scale, bias, residual, pre = (bool(rng.random() < 0.5) for _ in range(4))
        activation = str(rng.choice(["", "relu", "relu6", "leaky_relu"])) or None
        form = Epilogue(
            scale=scale,
            bias=bias,
            residual=residual,
            activation=activation,
            slope=float(rng.choice(SLOPES)) if activation == "leaky_relu" else 0.0,
            pre=pre and activation is not None,
        )
        if not form.plain:
            return form


def terms(p: Problem, form: Epilogue, dtype: str, seed: list[int]) -> dict[str, np.ndarray]:
    """The operands after x and w, canonical, by name in the order of the call."""
    rng = np.random.default_rng(seed)
    drawn = {
        "scale": (2.0 ** rng.integers(-2, 2, p.k)).astype(np.float32),
        "bias": (rng.integers(-12, 13, p.k) / 4).astype(np.float32),
        "residual": (rng.integers(-16, 17, p.canonical_shape("y")) / 2).astype(DTYPES[dtype][1]),
    }
    return {name: drawn[name] for name in form.terms}


def results(form: Epilogue, given: dict[str, np.ndarray], sums: np.ndarray) -> list[np.ndarray]:
    """y and, where it is asked for, pre, in float32 before the rounding to the result's dtype."""
    t = sums.astype(np.float64)
    if form.scale:
        t = t * given["scale"]
    for name in ("bias", "residual"):
        t = t + given[name].astype(np.float64) if name in given else t
    y = {
        None: lambda: t,
        "relu": lambda: np.maximum(t, 0),
        "relu6": lambda: np.clip(t, 0, 6),
        "leaky_relu": lambda: np.where(t < 0, t * form.slope, t),
    }[form.activation]()
    return [a.astype(np.float32) for a in (y, *[t] * form.pre)]


def accepting(
    p: Problem, form: Epilogue, dtype: str, precision: str, layout: str, platform: str
) -> list[str]:
    """What computes the problem with its epilogue: "native", if it does, and instances by name."""
    spec = p.spec(precision=precision, layout=layout)
    shapes = [p.to_layout(r, np.empty(p.canonical_shape(r)), layout).shape for r in "xw"]
    sizes = spec.sizes(Op.FPROP, *shapes)
    names = [name for name in native.load(platform).kernels() if name.startswith("fprop_")]
    return [
        algorithm
        for algorithm in ("native", *names)
        if _takes(platform, spec, sizes, algorithm, form, dtype)
    ]


def _takes(platform: str, spec, sizes, algorithm: str, form: Epilogue, dtype: str) -> bool:
    forced = dataclasses.replace(spec, algorithm=(algorithm,) * 3)
    chosen, _ = Fused(forced, form, DTYPES[dtype][1]).select(platform, sizes, DTYPES[dtype][0])
    return bool(chosen.instance) and algorithm in ("native", chosen.instance)


def calls(
    p: Problem, form: Epilogue, dtype: str, precision: str, layout: str, algorithms
) -> Callable:
    """(x, w, *terms, *poison) -> the results of every algorithm."""

    def function(x, w, *rest):
        given = dict(zip(form.terms, rest, strict=False))
        return tuple(
            result
            for algorithm in algorithms
            for result in bind(
                x,
                w,
                given,
                spec=p.spec(algorithm=algorithm, precision=precision, layout=layout),
                epilogue=form,
                out_dtype=DTYPES[dtype][1],
            )
        )

    return function
