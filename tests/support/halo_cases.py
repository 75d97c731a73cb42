"""Convolutions whose split rows need a halo exchange, and the numbers of permutes."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from numerics import reference
from problems import Problem, problem

import jaxconv
from jaxconv._src.problem.spec import Op

CASES = [  # problem; collective permutes of the forward pass, and of the gradients
    (problem("same", (16, 3), 3, padding=1), 2, 4),
    (problem("strided", (16, 3), 3, padding=((0, 1), (1, 1)), stride=2), 1, 2),
    (problem("stem", (32, 3), (7, 3), padding=((2, 3), (1, 1)), stride=2), 2, 4),
    (problem("atrous", (16, 3), 3, padding=2, dilation=2), 2, 4),
    (problem("pointwise", (16, 3), 1, stride=(2, 1)), 0, 0),
    (problem("patches", (16, 3), (4, 3), stride=(4, 1)), 0, 0),
    (problem("grouped", (16, 3), 3, padding=1, groups=4), 2, 4),
    (problem("even_window", (16, 3), 2, padding=((1, 0), (1, 0))), 1, 2),
    (problem("transposed", (16, 3), 3, padding=((1, 2), (1, 1)), lhs_dilation=(2, 1)), 1, 2),
    (problem("two_neighbours", (8, 3), (4, 1), padding=((3, 0), (0, 0))), 2, 4),
]


def convolution(convolve: Callable, p: Problem, x, w):
    return convolve(
        x,
        w,
        p.stride,
        p.padding,
        p.lhs_dilation,
        p.dilation,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=p.groups,
    )


conv = functools.partial(convolution, jaxconv.conv_general_dilated)
lax_conv = functools.partial(convolution, lax.conv_general_dilated)


def tensors(p: Problem):
    """x, w and a cotangent of y; and the expected y, dx and dw."""
    rng = np.random.default_rng(0)
    x, w, t = (rng.integers(-3, 4, p.canonical_shape(r)).astype(np.float32) for r in "xwy")
    results = (
        reference(Op.FPROP, p, x, w),
        reference(Op.DGRAD, p, t, w),
        reference(Op.WGRAD, p, x, t),
    )
    return (x, w, t), [r.astype(np.float32) for r in results]


def gradients(p: Problem, convolve=conv):
    return lambda x, w, t: jax.vjp(functools.partial(convolve, p), x, w)[1](t)


def placed(mesh, arrays, *specs):
    return [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays, specs, strict=True)]
