"""Puts the gradient of batch norm's operand into the call of pooling's gradient.

Behind pooling, relu and batch norm, the program computes from the masked gradient dz and batch
norm's operand y

    dy = a dz + b y + c

with vectors of channels a, b and c, in products and sums that differentiation leaves in any order.
Where dz has no other use, the call of ``max_pool_gradient`` reads y and writes dy, and dz is stored
nowhere. It computes in float32 and rounds once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Var

from jaxconv._src import compat
from jaxconv._src.fuse import fuse_masked_sums
from jaxconv._src.fuse.fuse_graph import Graph, Vector, is_float, traced, type_of
from jaxconv._src.passes import max_pooling

# Operations of which dy may consist.
_LINEAR = {"add", "add_any", "sub", "neg", "mul", "div", "convert_element_type"}

# The most products of vectors that a, b and c are summed from, and arrays on the way from dz to dy.
_MOST_TERMS, _MOST_ARRAYS = 64, 128


@dataclasses.dataclass(frozen=True)
class _Term:
    """A product of vectors, each with its power, 1 or -1."""

    sign: int
    factors: tuple[tuple[Vector, int], ...]

    def times(self, vector: Vector, power: int) -> _Term:
        return _Term(self.sign, (*self.factors, (vector, power)))


@dataclasses.dataclass(frozen=True)
class _Linear:
    """Terms that dz and y are multiplied by, and others."""

    of_dz: tuple[_Term, ...] = ()
    of_y: tuple[_Term, ...] = ()
    alone: tuple[_Term, ...] = ()

    @property
    def terms(self) -> tuple[_Term, ...]:
        return (*self.of_dz, *self.of_y, *self.alone)

    def each(self, change: Any) -> _Linear:
        return _Linear(*(tuple(map(change, t)) for t in (self.of_dz, self.of_y, self.alone)))

    def plus(self, other: _Linear) -> _Linear:
        return _Linear(self.of_dz + other.of_dz, self.of_y + other.of_y, self.alone + other.alone)

    def negated(self) -> _Linear:
        return self.each(lambda t: _Term(-t.sign, t.factors))

    def times(self, vector: Vector, power: int) -> _Linear:
        return self.each(lambda t: t.times(vector, power))


_ONE = (_Term(1, ()),)


def rewritten(eqns: Sequence[JaxprEqn], outvars: Sequence[Any]) -> list[JaxprEqn]:
    """A program's equations with such gradients of batch norm's operand by the calls.

    Args:
        eqns: the equations, in order.
        outvars: what the program returns.
    """
    graph = Graph(eqns, outvars)
    placed: dict[int, list[JaxprEqn]] = {}
    for eqn in graph.eqns:
        if eqn.primitive is max_pooling.max_pool_gradient_p:
            pooled = fuse_masked_sums.pooled(graph, eqn.outvars[0])
            if pooled is not None and len(eqn.invars) == len(pooled.gradients) + 1:
                placed |= _by_call(graph, pooled)
    return graph.with_replaced(placed)


def _by_call(graph: Graph, pooled: fuse_masked_sums.Pooled) -> dict[int, list[JaxprEqn]]:
    """The call's equations in place of the one that gives dy, or nothing."""
    eqn = graph.eqns[pooled.position]
    (dz,) = eqn.outvars
    dy = _result(graph, dz)
    position = graph.index(dy)
    if dy is None or position is None or not compat.same_type(type_of(dy), type_of(dz)):
        return {}
    form = _linear(graph, dy, dz, {dz: _Linear(of_dz=_ONE), pooled.y: _Linear(of_y=_ONE)})
    if form is None:
        return {}
    channels = type_of(dz).shape[-1]
    vectors = [v for t in form.terms for v, _ in t.factors]

    def call(gradients: list[jax.Array], place: Any, y: jax.Array, given: list[Any]) -> list[Any]:
        arrays = iter(given)

        def total(terms: tuple[_Term, ...]) -> jax.Array:
            products = []
            for term in terms:
                product: Any = np.float32(term.sign)
                for vector, power in term.factors:
                    v = vector.read(next(arrays), channels)
                    product = product * v if power == 1 else product / v
                products.append(jnp.broadcast_to(product, (channels,)))
            return functools.reduce(jnp.add, products or [jnp.zeros((channels,), np.float32)])

        normalised = total(form.of_dz), total(form.of_y), total(form.alone)
        windows = eqn.params["windows"]
        return [max_pooling.max_pool_gradient(gradients, place, y, *normalised, windows=windows)]

    place = eqn.invars[len(pooled.gradients)]
    operands = list(pooled.gradients), place, pooled.y, [v.atom for v in vectors]
    try:
        return {position: traced(call, operands, [dy], graph, position)}
    except (TypeError, ValueError, compat.ShardingTypeError):
        return {}  # arrays of types that this does not know: the program's own operations


def _result(graph: Graph, dz: Var) -> Var | None:
    """The only array that other than linear operations take of what is computed from dz."""
    seen, pending = {dz}, [dz]
    results = set()
    while pending:
        var = pending.pop()
        if var in graph.returned:
            results.add(var)
        for at in graph.uses(var):
            out = graph.eqns[at].outvars[0]
            linear = graph.eqns[at].primitive.name in _LINEAR and is_float(type_of(out).dtype)
            if not linear or type_of(out).shape != type_of(dz).shape:
                results.add(var)
            elif out not in seen:
                seen.add(out)
                pending.append(out)
    return results.pop() if len(results) == 1 and dz not in results else None


def _linear(graph: Graph, atom: Any, dz: Var, known: dict[Any, _Linear | None]) -> _Linear | None:
    """An array as a sum of products of dz, y and vectors, or None where it is another.

    Args:
        graph: the program.
        atom: the array.
        dz: of the same shape, the channels last.
        known: arrays that are such sums, or None; takes those that are found.
    """
    atom = graph.source(atom)
    vector = graph.channel_vector(atom, type_of(dz).shape, len(type_of(dz).shape) - 1)
    if vector is not None:
        return _Linear(alone=(_Term(1, ((vector, 1),)),))
    if atom not in known:
        known[atom] = None  # until it is found
        if len(known) < _MOST_ARRAYS:
            known[atom] = _combined(graph, atom, dz, known)
    return known[atom]


def _combined(graph: Graph, atom: Var, dz: Var, known: dict[Any, _Linear | None]) -> _Linear | None:
    """What makes an array as such a sum."""
    made, axis = graph.producer(atom), len(type_of(dz).shape) - 1
    name = "" if made is None else made.primitive.name
    if made is None or name not in _LINEAR or not is_float(type_of(atom).dtype):
        return None
    if name in ("mul", "div"):
        array, by = made.invars
        vector = graph.channel_vector(by, type_of(dz).shape, axis)
        if vector is None and name == "mul":
            array, by = by, array
            vector = graph.channel_vector(by, type_of(dz).shape, axis)
        scaled = None if vector is None else _linear(graph, array, dz, known)
        if scaled is None or vector is None:
            return None
        return scaled.times(vector, 1 if name == "mul" else -1)
    given = [_linear(graph, a, dz, known) for a in made.invars]
    first, *rest = (g or _Linear() for g in given)
    for other in rest:
        first = first.plus(other.negated() if name == "sub" else other)
    found = first.negated() if name == "neg" else first
    return None if None in given or len(found.terms) > _MOST_TERMS else found
