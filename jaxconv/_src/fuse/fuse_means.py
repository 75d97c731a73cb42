"""Computes the means over each example's positions by kernels.

Squeeze and excitation and the pooling before a classifier use these means. XLA's sums over leading
axes reach about half of the memory's bandwidth. ``masked_sums`` computes the means of an array in
memory. The result of a ``normalise`` call is not in memory; for its means ``activated_sums`` reads
the operand of the call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Var

from jaxconv._src.fuse import fuse_convolution, fuse_layers, fuse_statistics
from jaxconv._src.fuse.fuse_graph import Graph, is_float, type_of
from jaxconv._src.passes import activated_sums, masked_sums, normalise
from jaxconv._src.passes.masked_sums import Sums

# The fewest bytes of an array whose sums are faster by a kernel: below, launching the kernel takes
# longer than the sums.
LEAST_BYTES = 4_000_000


def rewritten(eqns: Sequence[JaxprEqn], outvars: Sequence[Any]) -> list[JaxprEqn]:
    """A program's equations, with the means over each example's positions by calls."""
    graph = Graph(eqns, outvars)
    axes = fuse_layers.axes_of_channels(graph)
    placed: dict[int, list[JaxprEqn]] = {}
    for array in graph.read:
        aval = type_of(array)
        if len(getattr(aval, "shape", ())) < 3 or not is_float(aval.dtype):
            continue
        if aval.size * aval.dtype.itemsize < LEAST_BYTES:
            continue
        found = _means(graph, array, axes.get(array, fuse_layers.usual_axis(axes, array)))
        if not found.keys() & placed.keys():
            placed |= found
    return graph.with_replaced(placed)


def _sums(graph: Graph, array: Var, axis: int) -> tuple[list[Any], Callable[..., Any]] | None:
    """A call that sums an array over each example's positions, after its operands; or None."""
    aval = type_of(array)
    segments = aval.shape[0]
    made, z = graph.producer(array), array
    while made is not None and made.primitive.name in fuse_layers.MOVING:
        (z,) = made.invars
        made = graph.producer(z)
    if made is not None and made.primitive is normalise.normalise_p:
        form, of_z = made.params["form"], type_of(z)
        taken = of_z.shape[0] == segments and of_z.shape[-1] == aval.shape[axis]
        taken = taken and fuse_convolution.for_cuda()
        taken = taken and activated_sums.accepts(form, of_z.shape, of_z.dtype, segments)
        if not taken or fuse_layers.in_memory(graph, z):
            return None
        call = functools.partial(activated_sums.activated_sums, form=form, segments=segments)
        return list(made.invars), call
    form = Sums(1, 0, "none", stores=False, above=None, below=None, segments=segments)
    last = (*aval.shape[:axis], *aval.shape[axis + 1 :], aval.shape[axis])
    if z is not array or not fuse_layers.in_memory(graph, array):
        return None
    if not masked_sums.accepts(form, last, aval.dtype):
        return None
    return [array], lambda y: masked_sums.masked_sums(jnp.moveaxis(y, axis, -1), form=form)[0]


def _means(graph: Graph, array: Var, axis: int) -> dict[int, list[JaxprEqn]]:
    """By position: a call that sums an array, and the means that follow; empty if none do."""
    found = fuse_statistics.means(graph, array, axis)
    of_call = _sums(graph, array, axis) if found else None
    if of_call is None:
        return {}
    operands, sums = of_call
    aval = type_of(array)
    segments, channels = aval.shape[0], aval.shape[axis]
    count = aval.size // (segments * channels)

    def call(*operands: jax.Array) -> list[jax.Array]:
        mean = sums(*operands).reshape(segments, channels) / count
        return [jnp.stack([mean, jnp.zeros_like(mean)], 1)]  # moments with 0 for the unused M

    return fuse_statistics.by_call(graph, found, call, operands, count)
