"""Finds pooling in forward programs.

The gradient of max pooling goes to the position of each window's maximum. XLA searches the windows
for these positions a second time and adds with a scatter. A differentiated ``max_pool`` call also
returns the positions, so each element of the gradient is a sum over the windows that contain it.

If only the pooling reads the relu of a normalised array, the call also normalises that array, and
the activation is not stored.

Average pooling stays the program's. XLA would compute a concatenation in front of it again for
every element of every window, although its other readers need it in memory, so on a GPU a barrier
separates them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import JaxprEqn, Var

from jaxconv._src import compat
from jaxconv._src.fuse import fuse_convolution
from jaxconv._src.fuse.fuse_graph import Graph, is_float, traced, type_of
from jaxconv._src.passes import max_pooling, normalise
from jaxconv._src.passes.max_pooling import Pooling, Windows


def rewritten(
    eqns: Sequence[JaxprEqn], outvars: Sequence[Any], in_memory: Callable[[Graph, Any], bool]
) -> list[JaxprEqn]:
    """A program's equations, with each max pooling as a call, and average pooling as described.

    Args:
        eqns: the equations, in order, with calls of ``normalise``.
        outvars: the program's results.
        in_memory: returns whether an array of the program is stored in any case.
    """
    graph = Graph(eqns, outvars)
    placed: dict[int, list[JaxprEqn]] = {}
    for position, eqn in enumerate(graph.eqns):
        compute: Callable[..., list[jax.Array]]
        if _is_averaged(graph, eqn):
            compute = functools.partial(_stored, dimension=eqn.params["dimension"])
            operands = eqn.invars
        elif eqn.primitive.name == "reduce_window_max":
            dilations = *eqn.params["base_dilation"], *eqn.params["window_dilation"]
            windows = _windows(eqn, eqn.invars[0])
            if windows is None or not set(dilations) <= {1}:
                continue
            x = graph.source(eqn.invars[0])
            vectors = _normalised(graph, x, windows)
            called = bool(vectors) or in_memory(graph, x)
            form = Pooling(windows, bool(vectors), places=False, operands=False, called=called)
            compute = functools.partial(max_pooling.max_pool, form=form)
            operands = vectors or [x]
        else:
            continue
        try:
            placed[position] = traced(compute, operands, eqn.outvars, graph, position)
        except (TypeError, ValueError, compat.ShardingTypeError):
            continue  # unknown array types keep the program's pooling
    return graph.with_replaced(placed)


def _is_averaged(graph: Graph, eqn: JaxprEqn) -> bool:
    """Whether an equation is a concatenation that windows are summed of, on a GPU."""
    if eqn.primitive.name != "concatenate" or not fuse_convolution.for_cuda():
        return False
    readers = [graph.eqns[use] for use in graph.uses(eqn.outvars[0])]
    return len(readers) > 1 and any(r.primitive.name == "reduce_window_sum" for r in readers)


def _stored(*arrays: jax.Array, dimension: int) -> list[jax.Array]:
    return [lax.optimization_barrier(lax.concatenate(arrays, dimension))]


def _normalised(graph: Graph, z: Any, windows: Windows) -> list[Any]:
    """The array, mean, scale and offset if pooling normalises z itself, else an empty list."""
    made = graph.producer(z)
    if made is None or made.primitive is not normalise.normalise_p:
        return []
    form, act = made.params["form"], made.params["form"].activation
    alone = isinstance(z, Var) and z not in graph.returned and len(graph.uses(z)) == 1
    if not alone or form.summands > 1 or act is None or form.vectors[0] != normalise.VECTORS:
        return []
    y, *vectors = made.invars
    if (
        not act.clips
        or act.mask != (0.0, None)
        or type_of(y).dtype != form.dtype
        or any(len(type_of(v).shape) > 1 for v in vectors)
    ):
        return []
    return [*made.invars] if max_pooling.accepts(windows, form.dtype) else []


def _windows(eqn: JaxprEqn, operand: Any) -> Windows | None:
    """The windows of a pooling equation, or None if it stays unchanged."""
    aval, padding = type_of(operand), tuple(map(tuple, eqn.params["padding"]))
    if not is_float(aval.dtype) or not compat.is_constant_shape(aval.shape):
        return None
    if 0 in aval.shape or min(itertools.chain.from_iterable(padding), default=0) < 0:
        return None
    sizes, strides = eqn.params["window_dimensions"], eqn.params["window_strides"]
    found = Windows(aval.shape, tuple(sizes), tuple(strides), padding)
    if 0 in found.counts or math.prod(found.sizes) > max_pooling.LARGEST:
        return None
    # An axis with a single window has no overlaps, for any stride.
    one = zip(found.shape, padding, found.counts, strides, strict=True)
    found = dataclasses.replace(
        found, strides=tuple(n + sum(pad) if count == 1 else s for n, pad, count, s in one)
    )
    return found if found.places <= max_pooling.PLACES else None
