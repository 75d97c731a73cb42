"""Differentiates a pooled layer and its array's moments together.

A call of ``max_pool`` that normalises its array y takes vectors that the program computes from y's
moments. Both the maxima and the moments give y a gradient. As derivatives of two calls, one kernel
would write the gradient of the maxima, and XLA would add that of the moments in a pass over three
arrays of y's size. One kernel (``max_pool_gradient``) computes the sum and reads y once.

Therefore the call, the computation of its vectors, and the moments become one function with its own
derivative. It takes the moments as values without a derivative, and also returns them, with the
derivative.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import JaxprEqn, Var
from jax.interpreters import ad

from jaxconv._src import compat
from jaxconv._src.fuse import fuse_graph, fuse_layers, fuse_rounding
from jaxconv._src.fuse.fuse_graph import Graph, is_float, traced, type_of
from jaxconv._src.passes import max_pooling
from jaxconv._src.passes.max_pooling import MaximaTangent, Pooling


@dataclasses.dataclass(frozen=True)
class _Layer:
    """A pooled layer of an array whose moments a call returns.

    Attributes:
        position: the position of the call of ``max_pool``.
        made: the position of the call that returns the moments.
        array: y, possibly before transposes and reshapes.
        moves: these.
        moments: the moments.
        inside: the equations that compute the pooling's vectors.
        given: their operands beside the moments.
    """

    position: int
    made: int
    array: Var
    moves: tuple[JaxprEqn, ...]
    moments: Var
    inside: tuple[JaxprEqn, ...]
    given: tuple[Var, ...]


def rewritten(eqns: Sequence[JaxprEqn], outvars: Sequence[Any]) -> list[JaxprEqn]:
    """A program's equations, with each pooled layer and its moments as one function."""
    graph = Graph(eqns, outvars)
    placed: dict[int, list[JaxprEqn]] = {}
    for position, eqn in enumerate(graph.eqns):
        if eqn.primitive is not max_pooling.max_pool_p:
            continue
        layer = _find(graph, position)
        if layer is None or layer.made in placed:
            continue
        try:
            placed |= _replacements(graph, layer)
        except (TypeError, ValueError, compat.ShardingTypeError):
            continue  # unknown array types: JAX adds the two gradients
    return graph.with_replaced(placed)


def _find(graph: Graph, position: int) -> _Layer | None:
    """The layer of a pooling call, or None."""
    eqn = graph.eqns[position]
    form: Pooling = eqn.params["form"]
    if not form.affine or form.places or type_of(eqn.invars[0]).dtype.itemsize != 2:
        return None
    array, moves = fuse_layers.before_moves(graph, eqn.invars[0])
    found = fuse_layers.moments_of(graph, array)
    if found is None or found[1]:
        return None
    moments = found[0]
    made = graph.index(moments)
    assert made is not None, "a call returns them"
    inside, given = _between(graph, eqn.invars[1:], made)
    if moments not in given or any(e.effects for e in inside):
        return None
    given.remove(moments)
    vectors = *given, *(v for e in inside for v in e.outvars)
    if any(type_of(v).size > type_of(moments).size for v in vectors):
        return None
    if not all(is_float(type_of(v).dtype) for v in given):
        return None
    return _Layer(position, made, array, moves, moments, inside, tuple(given))


def _between(
    graph: Graph, atoms: Sequence[Any], start: int
) -> tuple[tuple[JaxprEqn, ...], list[Var]]:
    """The equations after a position on which atoms depend, and what they read from before it."""
    inside: set[int] = set()
    given: dict[Var, None] = {}
    pending = [a for a in atoms if isinstance(a, Var)]
    while pending:
        atom = pending.pop()
        at = graph.index(atom)
        if at is None or at <= start:
            given[atom] = None
        elif at not in inside:
            inside.add(at)
            pending += [a for a in graph.eqns[at].invars if isinstance(a, Var)]
    return tuple(graph.eqns[at] for at in sorted(inside)), list(given)


def _replacements(graph: Graph, layer: _Layer) -> dict[int, list[JaxprEqn]]:
    """The equations that replace the two calls, by position."""
    pool, producer = graph.eqns[layer.position], graph.eqns[layer.made]

    def vectors(moments: jax.Array, given: Sequence[jax.Array]) -> list[jax.Array]:
        values = dict(zip((layer.moments, *layer.given), (moments, *given), strict=True))
        fuse_graph.compute(layer.inside, values)
        return [values[a] if isinstance(a, Var) else a.val for a in pool.invars[1:]]

    def computed(y: jax.Array, moments: jax.Array, given: list[jax.Array]) -> list[jax.Array]:
        call = _differentiated_together(vectors, pool.params["form"])
        return call(fuse_layers.moved(y, layer.moves), moments, given)

    alone = compat.variable(type_of(layer.moments))
    atoms = layer.array, alone, list(layer.given)
    together = traced(computed, atoms, [*pool.outvars, layer.moments], graph, layer.position)
    renamed = [alone if v is layer.moments else v for v in producer.outvars]
    return {layer.made: [producer.replace(outvars=renamed), *together], layer.position: []}


def _differentiated_together(
    vectors: Callable[..., list[jax.Array]], form: Pooling
) -> Callable[..., list[jax.Array]]:
    """The maxima and the moments, as a function of y, the moments, and what else vectors need."""

    @jax.custom_jvp
    def call(y: jax.Array, moments: jax.Array, given: list[jax.Array]) -> list[jax.Array]:
        return [*max_pooling.max_pool(y, *vectors(moments, given), form=form), moments]

    @functools.partial(call.defjvp, symbolic_zeros=True)
    def jvp(primals: Any, tangents: Any) -> Any:
        y, moments, given = primals
        of_y, _, of_given = tangents
        operands = y, *vectors(moments, given)
        results = max_pooling.max_pool(*operands, form=form.with_places())
        found: list[list[jax.Array]] = []
        of_moments = jax.numpy.zeros_like(moments)
        if not isinstance(of_y, SymbolicZero):
            linear = MaximaTangent(form, ("x",), wide=True, moments=True)
            *of_maxima, of_moments = max_pooling.tangents_of_maxima(
                {"x": of_y}, operands, results, linear, moments
            )
            found.append(of_maxima)
        of_given = [ad.instantiate_zeros(t) for t in fuse_rounding.zeros(of_given)]
        _, of_vectors = jax.jvp(vectors, (moments, given), (of_moments, of_given))
        names = ("mean", "scale", "offset")
        linear = MaximaTangent(form, names, wide=True)
        of_vectors = dict(zip(names, of_vectors, strict=True))
        found.append(max_pooling.tangents_of_maxima(of_vectors, operands, results, linear))
        maxima = results[: form.copies]
        summed = [sum(each[1:], each[0]) for each in zip(*found, strict=True)]
        rounded = [t.astype(np.dtype(maxima[0].dtype)) for t in summed]
        return [*maxima, moments], [*rounded, of_moments]

    return call
