"""Rewrites the sums of batch norm's backward pass, so that fewer passes over activations form them.

The gradient dz of batch norm's result is masked by the activation behind it. The program sums it
several times: for the offset, times the scale for the mean, and times the normalised value, in
factors or their order as differentiation leaves them. With vectors v, w of channels and an array u,

    sum of v dz       = v sum of dz
    sum of w dz u     = w sum of dz u

so that two sums give all of them.

The mask is a comparison of the activation's operand, which XLA computes again from what is behind
the last convolution. Where the activation is stored because a convolution reads it, the mask is a
comparison of its result too:

    one array behind the operand (y)   the sums take the mask from the result. The selection that is
                                       left has one use, the gradient of y, and becomes part of it.
    several (residual addition)        every use takes it from the result, one array and not two.

Where all that is read lies in memory, one call of ``masked_sums`` does either
(``fuse_masked_sums``).

Where only pooling reads it, XLA computes the mask as part of both passes by itself. Where calls of
kernels pool it, the gradient is masked by the places, and the sums are sums over windows, which
``masked_sums`` forms from the pooled arrays. Elsewhere the sums stay as they are: XLA stores dz as
it forms one of them, which is better than dz in a pass of its own. A barrier keeps XLA from
computing the result again from its operand.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Var

from jaxconv._src import compat
from jaxconv._src.conv import fused
from jaxconv._src.fuse import fuse_activations, fuse_convolution, fuse_masked_sums
from jaxconv._src.fuse.fuse_graph import REDUCTIONS, Graph, Vector, traced, type_of
from jaxconv._src.fuse.fuse_masked_sums import Pooled
from jaxconv._src.passes import max_pooling

_COMPARISONS = {"gt": lax.gt, "lt": lax.lt}

# Uses of an activation's result for which XLA computes it, or stores a copy. ``Graph.absorbed``
# takes another set: a window reads a number several times, so that it is computed several times;
# and an elementwise operation stores its own result, from which no mask can be taken.
_NOT_STORED = REDUCTIONS | {
    "concatenate",
    "convert_element_type",
    "reduce_window",
    "reduce_window_max",
    "reduce_window_sum",
    "select_and_gather_add",
    "select_and_scatter_add",
}

# Of an activation's operand: the most equations back to the arrays that it is computed from.
_LONGEST = 64


@dataclasses.dataclass(frozen=True)
class _Sum:
    """A sum over everything but the channels of a product.

    Attributes:
        position: of its equation.
        axis: the axis of channels.
        arrays: the factors of the summed array's shape.
        vectors: the factors of channels, each with its power, 1 or -1.
        negative: whether the product is negated.
    """

    position: int
    axis: int
    arrays: tuple[Any, ...]
    vectors: tuple[tuple[Vector, int], ...]
    negative: bool

    @property
    def alone(self) -> bool:
        """Whether it is the sum of its arrays' product."""
        return not self.vectors and not self.negative


@dataclasses.dataclass(frozen=True)
class _Mask:
    """Where a summed array is zero, told by an activation's result.

    Attributes:
        position: of the selection.
        comparisons: positions of the comparisons that make the mask.
        operand: what they compare.
        result: the activation's result.
        stored: whether a call reads it, so that it is in memory; else XLA's pooling does.
        branches: how many arrays the operand is computed from.
    """

    position: int
    comparisons: tuple[int, ...]
    operand: Var
    result: Var
    stored: bool
    branches: int


@dataclasses.dataclass(frozen=True)
class _Group:
    """Sums over an array and over its products with others.

    Attributes:
        array: the array.
        members: the sums.
        others: for each sum that is formed, what the array is multiplied by, or None.
        mask: of the array, or the pooling that it is the masked gradient of.
    """

    array: Var
    members: tuple[_Sum, ...]
    others: tuple[Any, ...]
    mask: _Mask | Pooled

    @property
    def first(self) -> int:
        return min(m.position for m in self.members)

    @property
    def own(self) -> bool:
        """Whether the sums take the mask from the result, and nothing else does."""
        return isinstance(self.mask, _Mask) and self.mask.stored and self.mask.branches == 1

    def place(self, member: _Sum) -> int:
        """Which of the sums that are formed is a member's."""
        other = _other(member, self.array)
        return next(i for i, o in enumerate(self.others) if o is other)


def rewritten(eqns: Sequence[JaxprEqn], outvars: Sequence[Any]) -> list[JaxprEqn]:
    """A program's equations with the sums of backward passes formed from as few as there are.

    Args:
        eqns: the equations, in order.
        outvars: what the program returns.
    """
    graph = Graph(eqns, outvars)
    placed: dict[int, list[JaxprEqn]] = {}
    by_selection: dict[int, list[_Group]] = {}  # two groups may sum what one selection gives
    for group in _groups(graph):
        by_selection.setdefault(group.mask.position, []).append(group)
    held: set[Any] = set()  # masked gradients that are stored
    for position, groups in sorted(by_selection.items()):
        try:
            replacements = _by_call(graph, groups, held) or _by_xla(graph, groups)
        except (TypeError, ValueError, compat.ShardingTypeError):
            continue  # arrays of types that this does not know: the program's own sums
        held |= {v for e in replacements.get(position, ()) for v in e.outvars}
        for at, made in replacements.items():
            placed.setdefault(at, []).extend(made)
    result: list[JaxprEqn] = []
    replaced = {v for made in placed.values() for e in made for v in e.outvars}
    for position, eqn in enumerate(graph.eqns):
        result += placed.get(position, [])
        if not any(v in replaced for v in eqn.outvars):
            result.append(eqn)
    return result


# --- what there is ---


def _groups(graph: Graph) -> list[_Group]:
    """Sums of which some are computed from others, or from a product with another array."""
    sums = [s for i in range(len(graph.eqns)) if (s := _sum(graph, i)) is not None]
    members: dict[tuple[Var, int], list[_Sum]] = {}
    for s in sums:
        if len(s.arrays) == 1:
            members.setdefault((s.arrays[0], s.axis), []).append(s)
    for s in sums:
        if len(s.arrays) == 2:
            # Where both are summed alone, the gradient, which is made later.
            keys = [(a, s.axis) for a in s.arrays if (a, s.axis) in members]
            if keys:
                members[max(keys, key=lambda k: graph.index(k[0]) or 0)].append(s)
    groups = []
    for (array, _), found in members.items():
        first = min(s.position for s in found)
        found = [s for s in found if _before(graph, _other(s, array), first)]
        others: list[Any] = []
        for s in found:
            if not any(o is _other(s, array) for o in others):
                others.append(_other(s, array))
        # Batch norm's are more than the sum of the array alone.
        mask = _mask(graph, array, first) if len(others) > 1 else None
        if mask is not None:
            groups.append(_Group(array, tuple(found), tuple(others), mask))
    return groups


def _other(s: _Sum, array: Var) -> Any:
    """What a sum multiplies an array by, None for nothing."""
    if len(s.arrays) == 1:
        return None
    return s.arrays[1] if s.arrays[0] is array else s.arrays[0]


def _before(graph: Graph, atom: Any, position: int) -> bool:
    index = graph.index(atom)
    return index is None or index < position


def _sum(graph: Graph, position: int) -> _Sum | None:
    """A float32 sum over all axes but one, of a product of at most two arrays and of vectors."""
    eqn = graph.eqns[position]
    if eqn.primitive.name != "reduce_sum" or eqn.params.get("out_sharding") is not None:
        return None
    (summed,) = eqn.invars
    aval = type_of(summed)
    kept = [a for a in range(len(aval.shape)) if a not in eqn.params["axes"]]
    if aval.dtype != np.float32 or len(kept) != 1 or len(aval.shape) < 3:
        return None
    (axis,) = kept
    if aval.shape[axis] in (1, aval.size):
        return None
    arrays: list[Any] = []
    vectors: list[tuple[Vector, int]] = []
    negative = False
    pending = [(summed, 1)]
    while pending:
        atom, power = pending.pop()
        vector = graph.channel_vector(atom, aval.shape, axis)
        if vector is not None:
            if type_of(vector.atom).dtype != np.float32 and not vector.casts:
                return None
            vectors.append((vector, power))
            continue
        made = graph.producer(atom)
        name = "" if made is None else made.primitive.name
        if made is not None and name == "neg":
            negative = not negative
            pending.append((made.invars[0], power))
        elif made is not None and name == "mul" and power == 1:
            pending += [(a, 1) for a in made.invars]
        elif made is not None and name == "div" and power == 1:
            divisor = made.invars[1]
            if graph.channel_vector(divisor, aval.shape, axis) is None:
                arrays.append(graph.source(atom))
            else:
                pending += [(made.invars[0], 1), (divisor, -1)]
        else:
            arrays.append(graph.source(atom))
    if not 1 <= len(arrays) <= 2 or any(type_of(a).shape != aval.shape for a in arrays):
        return None
    if len(arrays) == 2 and arrays[0] is arrays[1]:
        return None
    return _Sum(position, axis, tuple(arrays), tuple(vectors), negative)


def _mask(graph: Graph, array: Var, first: int) -> _Mask | Pooled | None:
    """The mask of a converted selection between an array and zeros, or what has masked it."""
    converted = graph.producer(array)
    if converted is None or converted.primitive.name != "convert_element_type":
        return None
    pooled = fuse_masked_sums.pooled(graph, converted.invars[0])
    if pooled is not None:
        return pooled
    selected = graph.producer(converted.invars[0])
    if selected is None or selected.primitive.name != "select_n" or len(selected.invars) != 3:
        return None
    if all(graph.constant(a) != 0.0 for a in selected.invars[1:]):
        return None
    comparisons = _comparisons(graph, selected.invars[0])
    if comparisons is None:
        return None
    compared = {a for i in comparisons for a in graph.eqns[i].invars if graph.constant(a) is None}
    if len(compared) != 1 or not isinstance(operand := compared.pop(), Var):
        return None
    found = fuse_activations.find(graph, operand)
    if found is None:
        return None
    result, activation = found
    reads = (*fuse_convolution.NAMES, fused.conv_fused_p.name, max_pooling.max_pool_p.name)
    position = graph.index(selected.outvars[0])
    assert position is not None
    if not all(fuse_activations.comparable(graph, i, operand, activation) for i in comparisons):
        return None
    uses = {graph.eqns[i].primitive.name for i in graph.uses(result)}
    stored = not uses.isdisjoint(reads) and _before(graph, result, min(position, first))
    if not stored and not uses <= _NOT_STORED:
        return None
    branches = len(_branches(graph, operand))
    return _Mask(position, comparisons, operand, result, stored, branches)


def _comparisons(graph: Graph, mask: Any) -> tuple[int, ...] | None:
    """Positions of the comparisons whose conjunction a mask is, or None."""
    made = graph.producer(mask)
    if made is None:
        return None
    if made.primitive.name == "and":
        parts = [_comparisons(graph, a) for a in made.invars]
        return None if None in parts else tuple(i for p in parts for i in p or ())
    position = graph.index(made.outvars[0])
    return (position,) if position is not None and made.primitive.name in _COMPARISONS else None


def _branches(graph: Graph, operand: Var) -> set[Any]:
    """The arrays of an operand's shape that it is computed from by elementwise operations."""
    shape, pending = type_of(operand).shape, [operand]
    found: set[Any] = set()
    seen: set[Any] = set()
    while pending and len(seen) < _LONGEST:
        atom = graph.source(pending.pop())
        if atom in seen or getattr(type_of(atom), "shape", None) != shape:
            continue
        seen.add(atom)
        made = graph.producer(atom)
        name = "" if made is None else made.primitive.name
        elementwise = name in ("add", "sub", "mul", "div", "neg", "convert_element_type")
        if made is not None and elementwise:
            pending += [a for a in made.invars if isinstance(a, Var)]
        elif name not in ("broadcast_in_dim", "reshape"):
            found.add(atom)
    return found


# --- what becomes of it ---


def _by_call(
    graph: Graph, groups: list[_Group], held: set[Any]
) -> dict[int, list[JaxprEqn]] | None:
    """Equations by a call of ``masked_sums``, or None where there is none.

    By the position in front of which they come, as those of ``_by_xla``.
    """
    mask = groups[0].mask
    others = [o for g in groups for o in g.others if o is not None]
    if isinstance(mask, Pooled):
        call = fuse_masked_sums.of_pooled(graph, mask, others)
    elif mask.stored:
        own = len(groups) == 1 and groups[0].own
        call = fuse_masked_sums.find(
            graph, mask.position, mask.comparisons, mask.operand, mask.result, others, not own, held
        )
    else:
        return None
    if call is None:
        return None
    made: list[tuple[int, Var]] = []
    placed: dict[int, list[JaxprEqn]] = {}
    for group in groups:
        sums = _sum_variables(graph, group)
        for other, variable in zip(group.others, sums, strict=True):
            made.append((0 if other is None else 1 + others.index(other), variable))
        _finish(graph, group, sums, placed)
    placed.setdefault(mask.position, []).extend(call.equations(graph, made))
    return placed


def _by_xla(graph: Graph, groups: list[_Group]) -> dict[int, list[JaxprEqn]]:
    """Equations of the sums of groups, and of a selection that takes its mask from the result."""
    placed: dict[int, list[JaxprEqn]] = {}
    for group in groups:
        _sums_formed(graph, group, placed)
    mask = groups[0].mask
    if isinstance(mask, _Mask) and mask.stored and not all(g.own for g in groups):
        placed[mask.position] = _selection(graph, mask)
    return placed


def _sum_variables(graph: Graph, group: _Group) -> list[Var]:
    """Where the sums that are formed go. A member that is such a sum is that one."""
    # Every member has the same type, which its sum takes.
    out = type_of(graph.eqns[group.first].outvars[0])
    sums = [compat.variable(out) for _ in group.others]
    for member in group.members:
        if member.alone:
            sums[group.place(member)] = graph.eqns[member.position].outvars[0]
    return sums


def _sums_formed(graph: Graph, group: _Group, placed: dict[int, list[JaxprEqn]]) -> None:
    """Adds the equations of a group's sums."""
    mask, first = group.mask, group.first
    own = mask if isinstance(mask, _Mask) and group.own else None
    shape, axis = type_of(group.array).shape, group.members[0].axis
    axes = tuple(a for a in range(len(shape)) if a != axis)
    dtype = type_of(group.array).dtype
    summed = group.array if own is None else _operands(graph, own)

    def form(summed: Any, others: list[Any]) -> list[Any]:
        if own is not None:
            summed = _selected(graph, own, *summed).astype(dtype)
        given = iter(others)
        products = [summed if o is None else summed * next(given) for o in group.others]
        return [lax.reduce_sum(p, axes) for p in products]

    sums = _sum_variables(graph, group)
    others = [o for o in group.others if o is not None]
    made = traced(form, (summed, others), sums, graph, first)
    placed.setdefault(first, []).extend(made)
    _finish(graph, group, sums, placed)


def _finish(
    graph: Graph, group: _Group, sums: list[Var], placed: dict[int, list[JaxprEqn]]
) -> None:
    """Adds the equations of a group's members from the sums that are formed."""
    channels = type_of(sums[0]).shape[0]
    for member in group.members:
        at = member.position
        if graph.eqns[at].outvars[0] in sums:
            continue

        def finish(total: Any, vectors: list[Any], member: _Sum = member) -> list[Any]:
            for (vector, power), array in zip(member.vectors, vectors, strict=True):
                v = vector.read(array, channels)
                total = total * v if power == 1 else total / v
            # Not the operand itself, which no equation would make a result.
            return [-total if member.negative else jnp.copy(total) if member.alone else total]

        given = sums[group.place(member)], [v.atom for v, _ in member.vectors]
        made = traced(finish, given, graph.eqns[at].outvars, graph, at)
        placed.setdefault(at, []).extend(made)


def _selection(graph: Graph, mask: _Mask) -> list[JaxprEqn]:
    """The equations of a selection, of the activation's result."""
    out = graph.eqns[mask.position].outvars

    def select(*given: Any) -> list[Any]:
        return [_selected(graph, mask, *given)]

    return traced(select, _operands(graph, mask), out, graph, mask.position)


def _operands(graph: Graph, mask: _Mask) -> tuple[Any, list[Any], list[Any]]:
    """What ``_selected`` takes: the result, all that it is compared with, and the cases."""
    others = []
    for position in mask.comparisons:
        left, right = graph.eqns[position].invars
        others.append(right if left is mask.operand else left)
    return mask.result, others, list(graph.eqns[mask.position].invars[1:])


def _selected(
    graph: Graph, mask: _Mask, result: jax.Array, others: list[Any], cases: list[Any]
) -> jax.Array:
    """A selection by comparisons of the activation's result instead of its operand."""
    result = lax.optimization_barrier(result)
    conditions = []
    for position, other in zip(mask.comparisons, others, strict=True):
        eqn = graph.eqns[position]
        other = jnp.asarray(other, result.dtype)
        pair = (result, other) if eqn.invars[0] is mask.operand else (other, result)
        conditions.append(_COMPARISONS[eqn.primitive.name](*jnp.broadcast_arrays(*pair)))
    condition = functools.reduce(lax.bitwise_and, conditions)
    return lax.select_n(condition, *(jnp.broadcast_to(c, result.shape) for c in cases))
