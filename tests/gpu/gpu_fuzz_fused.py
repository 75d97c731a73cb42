"""Epilogues of the GPU fuzz: draws one with an exact activation, and makes its calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from fuzz_problems import Draw
from problems import DTYPES, Problem

from jaxconv._src.conv.fused import Fused, bind
from jaxconv._src.library import native
from jaxconv._src.problem.epilogue import Epilogue
from jaxconv._src.problem.spec import Op

SLOPES = (0.25, 0.5, -0.5)


def draw_epilogue(draw: Draw) -> Epilogue:
    """A random epilogue with at least one term."""
    while True:
        scale, bias, residual, pre = (draw.chance(0.5) for _ in range(4))
        activation = draw.one_of(None, "relu", "relu6", "leaky_relu")
        slope = draw.one_of(*SLOPES) if activation == "leaky_relu" else 0.0
        pre = pre and activation is not None
        form = Epilogue(scale, bias, residual, activation, slope, pre=pre)
        if not form.plain:
            return form


def accepting(
    p: Problem, form: Epilogue, dtype: str, precision: str, layout: str, platform: str
) -> list[str]:
    """The algorithms that compute problem and epilogue: "native" if it can, and instances."""
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
