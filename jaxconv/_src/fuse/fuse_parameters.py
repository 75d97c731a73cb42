"""Computes what calls read of a program's parameters in few kernels.

A convolution's filter in bfloat16, and the scale and bias that follow from a batch norm's vectors,
depend on the program's arguments alone. Each is an elementwise function of few numbers, and the
operand of a call, which reads it from memory: XLA launches a kernel for each. If one barrier reads
them all (``together``), XLA's horizontal fusion computes them in a few kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn, Var

from jaxconv._src import compat
from jaxconv._src.fuse import fuse_convolution
from jaxconv._src.fuse.fuse_graph import ELEMENTWISE, IDENTITIES, Graph, traced, type_of
from jaxconv._src.passes import normalise, together

# Platforms on which a kernel's launch takes longer than the work on a vector.
_PLATFORMS = ("cuda",)

# Operations that compute nothing.
_MOVING = (*IDENTITIES, "reshape", "squeeze", "expand_dims", "broadcast_in_dim")

# The most elements of an array that XLA's horizontal fusion takes.
_MOST_ELEMENTS = 128 * 2048

# The fewest arrays that are worth a barrier.
_FEWEST = 2

# Primitives of this library that XLA fuses with what computes their operands.
_BY_XLA = (normalise.normalise_p, normalise.normalise_tangent_p)


def rewritten(eqns: Sequence[JaxprEqn], outvars: Sequence[Any]) -> list[JaxprEqn]:
    """A program's equations with a barrier behind what calls read of its arguments."""
    graph = Graph(eqns, outvars)
    if not set(fuse_convolution.platforms()[:1]) <= set(_PLATFORMS):
        return graph.eqns
    early, computed = _of_arguments(graph)
    read = {
        atom: None
        for eqn in graph.eqns
        if _reads_memory(eqn)
        for atom in eqn.invars
        if isinstance(atom, Var) and atom in computed and _small(type_of(atom))
    }
    if len(read) < _FEWEST:
        return graph.eqns
    behind = {atom: compat.variable(type_of(atom)) for atom in read}
    needed = {i for atom in read for i in _before(graph, atom, early)}
    first = [graph.eqns[i] for i in sorted(needed)]
    try:
        barrier = traced(together.together, tuple(read), list(behind.values()), graph, max(needed))
    except (TypeError, ValueError, compat.ShardingTypeError):
        return graph.eqns
    rest = [
        eqn.replace(invars=[_looked_up(behind, a) for a in eqn.invars])
        if _reads_memory(eqn)
        else eqn
        for i, eqn in enumerate(graph.eqns)
        if i not in needed
    ]
    return [*first, *barrier, *rest]


def _looked_up(behind: dict[Var, Var], atom: Any) -> Any:
    return behind.get(atom, atom) if isinstance(atom, Var) else atom


def _of_arguments(graph: Graph) -> tuple[set[int], set[Var]]:
    """Elementwise equations of arguments alone, and the results of those that compute something."""
    early: set[int] = set()
    computed: set[Var] = set()
    for position, eqn in enumerate(graph.eqns):
        moves = eqn.primitive.name in _MOVING
        if eqn.effects or not (moves or eqn.primitive.name in ELEMENTWISE):
            continue
        made = [graph.index(a) for a in eqn.invars]
        if not all(i is None or i in early for i in made):
            continue
        if not all(_small(type_of(v)) for v in eqn.outvars):
            continue
        early.add(position)
        if not moves or any(isinstance(a, Var) and a in computed for a in eqn.invars):
            computed |= set(eqn.outvars)
    return early, computed


def _before(graph: Graph, atom: Any, early: set[int]) -> set[int]:
    """Positions of the equations that compute an atom from arguments."""
    found: set[int] = set()
    pending = [atom]
    while pending:
        position = graph.index(pending.pop())
        if position is not None and position not in found:
            assert position in early
            found.add(position)
            pending += graph.eqns[position].invars
    return found


def _reads_memory(eqn: JaxprEqn) -> bool:
    """Whether an equation is a call of a kernel that XLA fuses nothing into."""
    name = eqn.primitive.name
    by_xla = eqn.primitive in _BY_XLA
    calls = name.startswith("jaxconv_") and not by_xla
    return calls or name in (*fuse_convolution.NAMES, "dot_general")


def _small(aval: Any) -> bool:
    return math.prod(getattr(aval, "shape", ())) <= _MOST_ELEMENTS
