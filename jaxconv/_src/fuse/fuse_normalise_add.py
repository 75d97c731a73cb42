"""Finds the ends of residual blocks whose masks the backward pass reads, and writes masks as bits.

    result = activation(normalised + shortcut),   masked_sums(..., result)

becomes one call of ``normalise_add``, which gives the result and a bit for each of its elements;
``masked_sums`` reads the bits. XLA computes the forward pass in as few passes, but does not write
bits at the speed of memory.

The call reads memory: its operands must be there anyway, and no other operation may need what lies
between them and the result. The result's other uses keep it. Where one of them is elementwise or a
reduction, there is no call: XLA may compute that operation in the pass that the call replaces.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Set
from typing import Any

import jax
from jax.extend.core import JaxprEqn, Var

from jaxconv._src import compat
from jaxconv._src.conv import fused, primitives
from jaxconv._src.fuse import fuse_activations, fuse_convolution, fuse_masked_sums
from jaxconv._src.fuse.fuse_activations import Activation
from jaxconv._src.fuse.fuse_graph import IDENTITIES, Graph, Vector, traced, type_of
from jaxconv._src.passes import normalise_add
from jaxconv._src.passes.masked_sums import Sums, masked_sums_p

_CONVOLUTIONS = {
    *fuse_convolution.NAMES,
    fused.conv_fused_p.name,
    *(p.name for p in primitives.PRIMITIVES.values()),
}
# Uses of a result that read it from memory: another block's shortcut is one.
_READ = _CONVOLUTIONS | {masked_sums_p.name, "add"}

# The largest number of an activation's result, by its name.
_BELOW: dict[Activation | None, float | None] = {"relu": None, "relu6": 6.0}


@dataclasses.dataclass(frozen=True)
class _Sum:
    """The end of a residual block.

    Attributes:
        position: of the activation.
        form: what the call computes.
        arrays: the normalised one, then the other or the shortcut.
        vectors: mean, scale and offset of each array that is normalised.
    """

    position: int
    form: normalise_add.BlockEnd
    arrays: tuple[Any, Any]
    vectors: tuple[Vector, ...]

    def equations(self, graph: Graph, result: Var, bits: Var) -> list[JaxprEqn]:
        """The call, for an activation's result and its bits."""
        channels = type_of(result).shape[-1]

        def call(arrays: list[jax.Array], given: list[Any]) -> list[jax.Array]:
            read = [v.read(a, channels) for v, a in zip(self.vectors, given, strict=True)]
            return normalise_add.normalise_add(*arrays, *read, form=self.form)

        operands = list(self.arrays), [v.atom for v in self.vectors]
        return traced(call, operands, [result, bits], graph, self.position)


def rewritten(eqns: Sequence[JaxprEqn], outvars: Sequence[Any]) -> list[JaxprEqn]:
    """A program's equations with bits for masks behind residual additions.

    What becomes superfluous stays, without uses.

    Args:
        eqns: the equations, in order, with calls of ``masked_sums``.
        outvars: what the program returns.
    """
    graph = Graph(eqns, outvars)
    by_result: dict[Any, list[int]] = {}
    for position, eqn in enumerate(graph.eqns):
        if eqn.primitive is masked_sums_p and eqn.params["form"].masked_by == "result":
            by_result.setdefault(graph.source(eqn.invars[-1]), []).append(position)
    replaced: dict[int, list[JaxprEqn]] = {}
    for result, positions in by_result.items():
        masks = [graph.eqns[i].params["form"] for i in positions]
        held = {graph.source(a) for i in positions for a in graph.eqns[i].invars}
        found = _find(graph, result, masks, held)
        if found is None:
            continue
        bits = compat.variable(normalise_add.bits_type(type_of(result)))
        try:
            replaced[found.position] = found.equations(graph, result, bits)
        except (TypeError, ValueError, compat.ShardingTypeError):
            continue  # arrays of types that this does not know
        for position in positions:
            replaced[position] = [_by_bits(graph.eqns[position], bits)]
    return graph.with_replaced(replaced)


def _by_bits(eqn: JaxprEqn, bits: Var) -> JaxprEqn:
    """A call of ``masked_sums`` that takes the mask from bits."""
    form = dataclasses.replace(eqn.params["form"], masked_by="bits")
    operands = [*eqn.invars[:-1], bits]
    return eqn.replace(invars=operands, params={**eqn.params, "form": form})


def _find(graph: Graph, result: Any, masks: Sequence[Sums], held: Set[Any]) -> _Sum | None:
    """The end of a residual block, if it is one.

    Args:
        graph: the program.
        result: an activation's.
        masks: the forms of the calls that take their masks from the result.
        held: arrays that are in memory for other reasons.
    """
    position = graph.index(result)
    if position is None:
        return None
    if not all(graph.eqns[i].primitive.name in _READ for i in graph.uses(result)):
        return None
    aval = type_of(result)
    for operand in graph.eqns[position].invars:
        activation = fuse_activations.classify(graph, result, operand)
        if activation not in _BELOW or not _only_use(graph, operand):
            continue
        below = _BELOW[activation]
        added = graph.producer(operand)
        if added is None or added.primitive.name != "add":
            return None
        normalised = [_normalised(graph, a) for a in added.invars]
        at = 0 if normalised[0] is not None else 1
        first, second, shortcut = normalised[at], normalised[1 - at], added.invars[1 - at]
        if first is None:
            return None
        other = graph.source(shortcut) if second is None else second[0]
        form = normalise_add.BlockEnd(1 if second is None else 2, below)
        if (
            all((m.above, m.below) == (0.0, below) for m in masks)
            and all(_in_memory(graph, a, held) for a in (first[0], other))
            and normalise_add.accepts(form, aval.shape, aval.dtype)
        ):
            vectors = *first[1], *(() if second is None else second[1])
            return _Sum(position, form, (first[0], other), vectors)
    return None


def _normalised(graph: Graph, atom: Any) -> tuple[Var, tuple[Vector, ...]] | None:
    """What an atom is the normalisation of, where nothing else needs what lies between."""
    found = fuse_masked_sums.normalised(graph, atom)
    if found is None:
        return None
    shape = type_of(found[0]).shape
    while (made := graph.producer(atom)) is not None and made.primitive.name != "sub":
        if not _only_use(graph, atom):
            return None
        atom = next(
            a for a in made.invars if graph.channel_vector(a, shape, len(shape) - 1) is None
        )
    # Elementwise operations compute the centred array from the array again.
    return found if _only_use(graph, atom) or graph.absorbed(graph.source(atom)) else None


def _only_use(graph: Graph, atom: Any) -> bool:
    """Whether an atom, and what it is a copy of, has one use."""
    while isinstance(atom, Var) and atom not in graph.returned and len(graph.uses(atom)) == 1:
        index = graph.index(atom)
        if index is None or graph.eqns[index].primitive.name not in IDENTITIES:
            return True
        atom = graph.eqns[index].invars[0]
    return False


def _in_memory(graph: Graph, atom: Any, held: Set[Any]) -> bool:
    """Whether an array is stored: by what makes it, or for what reads it."""
    if not isinstance(atom, Var):
        return False
    read = {graph.eqns[i].primitive.name for i in graph.uses(atom)}
    return not read.isdisjoint(_CONVOLUTIONS) or fuse_masked_sums.in_memory(graph, atom, held)
