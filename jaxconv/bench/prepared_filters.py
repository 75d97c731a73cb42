"""Rows whose filter is prepared for Winograd before the measurement."""

from __future__ import annotations

import jax

import jaxconv
from jaxconv import winograd
from jaxconv._src.library import native
from jaxconv._src.ways import winograd_jax
from jaxconv._src.winograd import winograd_prepared
from jaxconv._src.winograd.winograd_filter import PreparedFilter
from jaxconv.bench.problem import Library, Problem


def library(problem: Problem) -> Library:
    """``jaxconv.conv`` on a prepared filter, which is made before the measurement."""
    layer, tile = problem.layer, winograd_jax.tile_named(problem.algorithm)

    @jax.jit
    def prepare(x: jax.Array, w: jax.Array) -> tuple[jax.Array, PreparedFilter]:
        return x, winograd.prepare(w, tile, groups=layer.groups)

    def compute(x: jax.Array, w: PreparedFilter) -> jax.Array:
        padding = [(p, p) for p in layer.padding]
        return jaxconv.conv(x, w, padding=padding, groups=layer.groups, algorithm=problem.algorithm)

    return Library(compute, prepare)


def selection(problem: Problem, platform: str) -> native.Selection:
    """What computes a problem with a prepared filter on a platform."""
    layer = problem.layer
    filter_ = PreparedFilter(
        None,
        winograd_jax.tile_named(problem.algorithm),
        problem.operand_dtype,
        layer.c // layer.groups,
        layer.k,
        layer.groups,
    )
    spec = layer.spec(problem.precision, problem.algorithm)
    call = winograd_prepared.Prepared(spec, filter_, problem.out_dtype)
    return call.select(platform, layer.sizes, problem.operand_dtype)[0]
