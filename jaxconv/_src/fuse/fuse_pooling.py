"""Rewrites max pooling and its gradient, so that nothing is searched twice and nothing scattered.

The gradient of the maxima of windows goes to where each window has its maximum. XLA searches the
windows for these places a second time, and adds by a scatter. Here the maxima and the places come
from one pass over the operand, a place being a number of 8 bits, and an element of the gradient is
a sum over the windows that may have taken it (``max_pooling``).

``with_calls`` is for GPUs: pooling of 16 bits with the channels last becomes calls of the kernels,
also where no gradient is taken. A call reads memory, so that its operand must be there anyway:

    an argument, or what a convolution or another call stores or reads
    the activation relu of batch norm that pooling alone reads: the call normalises y itself, and
    the gradient takes relu's mask from the places, so that the activation is stored nowhere.

Other pooling whose gradient is taken is ``rewritten`` in operations of JAX, which XLA fuses with
what is in front of them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Var

from jaxconv._src import compat
from jaxconv._src.conv import fused
from jaxconv._src.fuse import fuse_activations, fuse_convolution, fuse_masked_sums
from jaxconv._src.fuse.fuse_graph import Graph, Vector, is_float, traced, type_of
from jaxconv._src.passes import max_pooling
from jaxconv._src.passes.max_pooling import Pooling, Windows

# Maxima of an array's windows and gradients, by their positions.
_Found = dict[tuple[Var, Windows], tuple[list[int], list[int]]]


def rewritten(eqns: Sequence[JaxprEqn], outvars: Sequence[Any]) -> list[JaxprEqn]:
    """A program's equations with max pooling whose gradient is taken, and the gradient, rewritten.

    Args:
        eqns: the equations, in order.
        outvars: what the program returns.
    """
    graph = Graph(eqns, outvars)
    placed: dict[int, list[JaxprEqn]] = {}
    for (x, windows), (maxima, gradients) in _found(graph).items():
        if not gradients:
            continue
        replaced = [*maxima[:1], *gradients]
        first = min(replaced)
        dy = type_of(graph.eqns[gradients[0]].invars[0])
        largest = graph.eqns[maxima[0]].outvars[0] if maxima else compat.variable(dy)
        place = compat.variable(dy.update(dtype=np.dtype(np.uint8), weak_type=False))
        pool = functools.partial(max_pooling.pooled, windows=windows)
        made: dict[int, list[JaxprEqn]] = {position: [] for position in replaced}

        def back(*given: jax.Array, windows: Windows = windows) -> list[jax.Array]:
            return [max_pooling.gradient_in_jax(*given, windows=windows)]

        try:
            made[first] += traced(pool, (x,), (largest, place), graph, first)
            for position in gradients:
                eqn = graph.eqns[position]
                given = eqn.invars[0], place
                made[position] += traced(back, given, eqn.outvars, graph, position)
        except (TypeError, ValueError, compat.ShardingTypeError):
            continue  # arrays of types that this does not know: the program's own pooling
        placed |= made
    return graph.with_replaced(placed)


def with_calls(eqns: Sequence[JaxprEqn], outvars: Sequence[Any]) -> list[JaxprEqn]:
    """A program's equations with calls of ``max_pool`` and ``max_pool_gradient``, for a GPU."""
    graph = Graph(eqns, outvars)
    placed: dict[int, list[JaxprEqn]] = {}
    held: set[Any] = set()  # the calls' results
    for (x, windows), (maxima, gradients) in _found(graph).items():
        call = _call(graph, x, windows, maxima, gradients, held)
        if call is None:
            continue
        try:
            made = call.equations(graph)
        except (TypeError, ValueError, compat.ShardingTypeError):
            continue  # as above
        held |= {v for eqns in made.values() for e in eqns for v in e.outvars}
        placed |= made
    return graph.with_replaced(placed)


def without_unused(eqns: Sequence[JaxprEqn], outvars: Sequence[Any]) -> list[JaxprEqn]:
    """A program's equations, whose calls of ``max_pool`` store operands only where one is read."""
    graph = Graph(eqns, outvars)
    result = []
    for eqn in graph.eqns:
        if eqn.primitive is max_pooling.max_pool_p and eqn.params["form"].operands:
            operands = eqn.outvars[2]
            if not graph.uses(operands) and operands not in graph.returned:
                form = dataclasses.replace(eqn.params["form"], operands=False)
                eqn = eqn.replace(outvars=eqn.outvars[:2], params={**eqn.params, "form": form})
        result.append(eqn)
    return result


# --- what there is ---


def _found(graph: Graph) -> _Found:
    """Positions of the maxima of an array's windows, and of the gradients."""
    found: dict[tuple[Any, Windows], tuple[list[int], list[int]]] = {}
    for position, eqn in enumerate(graph.eqns):
        name = eqn.primitive.name
        if name == "reduce_window_max":
            dilations = *eqn.params["base_dilation"], *eqn.params["window_dilation"]
            windows = _windows(eqn, eqn.invars[0])
            if windows is not None and set(dilations) <= {1}:
                key = graph.source(eqn.invars[0]), windows
                found.setdefault(key, ([], []))[0].append(position)
        elif name == "select_and_scatter_add" and eqn.params["select_prim"] is lax.ge_p:
            windows = _windows(eqn, eqn.invars[1])
            if windows is not None and windows.counts == type_of(eqn.invars[0]).shape:
                key = graph.source(eqn.invars[1]), windows
                found.setdefault(key, ([], []))[1].append(position)
    return {key: each for key, each in found.items() if isinstance(key[0], Var)}


def _windows(eqn: JaxprEqn, operand: Any) -> Windows | None:
    """The windows of an equation that pools, or None where they stay what they are."""
    aval, padding = type_of(operand), tuple(map(tuple, eqn.params["padding"]))
    if not is_float(aval.dtype) or not compat.is_constant_shape(aval.shape):
        return None
    if 0 in aval.shape or min(itertools.chain.from_iterable(padding), default=0) < 0:
        return None
    sizes, strides = eqn.params["window_dimensions"], eqn.params["window_strides"]
    found = Windows(aval.shape, tuple(sizes), tuple(strides), padding)
    if 0 in found.counts or math.prod(found.sizes) > max_pooling.LARGEST:
        return None
    # An axis with a single window has no overlaps, whatever the stride is.
    one = zip(found.shape, padding, found.counts, strides, strict=True)
    found = dataclasses.replace(
        found, strides=tuple(n + sum(pad) if count == 1 else s for n, pad, count, s in one)
    )
    return found if found.places <= max_pooling.PLACES else None


# --- calls ---

# What makes arrays that are in memory, and what reads them there.
_CALLS = fuse_masked_sums.STORED | {max_pooling.max_pool_p.name}
_READERS = {*fuse_convolution.NAMES, fused.conv_fused_p.name, "dot_general"}


@dataclasses.dataclass(frozen=True)
class _Gradient:
    """A gradient of pooling.

    Attributes:
        position: of its equation.
        last: of the equation whose result the call gives: of relu's mask, or itself.
        gradients: one of the maxima, or two that are added.
    """

    position: int
    last: int
    gradients: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class _Pooled:
    """Calls in place of maxima and gradients.

    Attributes:
        form: of the maxima's.
        x: the operand.
        vectors: mean, scale and offset of an affine form.
        maxima: the position of the program's maxima, if it has them.
        gradients: those of the same windows.
    """

    form: Pooling
    x: Var
    vectors: tuple[Vector, ...]
    maxima: int | None
    gradients: tuple[_Gradient, ...]

    def equations(self, graph: Graph) -> dict[int, list[JaxprEqn]]:
        """The calls by the position of an equation that they replace; none for the others."""
        form, x = self.form, type_of(self.x)
        at = [g.position for g in self.gradients]
        first = min(at if self.maxima is None else [self.maxima, *at])
        pooled = x.update(shape=form.windows.counts, weak_type=False)
        result = (
            compat.variable(pooled) if self.maxima is None else graph.eqns[self.maxima].outvars[0]
        )
        place = compat.variable(pooled.update(dtype=np.dtype(np.uint8)))
        results = [result, *[place] * form.places]
        results += [compat.variable(pooled) for _ in range(form.operands)]

        def pool(x: jax.Array, given: list[Any]) -> list[jax.Array]:
            pairs = zip(self.vectors, given, strict=True)
            vectors = [vector.read(array, x.shape[-1]) for vector, array in pairs]
            return max_pooling.max_pool(x, *vectors, form=form)

        def back(gradients: list[jax.Array], place: jax.Array) -> list[jax.Array]:
            return [max_pooling.max_pool_gradient(gradients, place, windows=form.windows)]

        vectors = [v.atom for v in self.vectors]
        made = {first: traced(pool, (self.x, vectors), results, graph, first)}
        if self.maxima is not None:
            made.setdefault(self.maxima, [])
        for gradient in self.gradients:
            given = list(gradient.gradients), place
            out = graph.eqns[gradient.last].outvars
            made.setdefault(gradient.last, [])
            made.setdefault(gradient.position, []).extend(
                traced(back, given, out, graph, gradient.position)
            )
        return made


def _call(
    graph: Graph,
    x: Var,
    windows: Windows,
    maxima: list[int],
    gradients: list[int],
    held: set[Any],
) -> _Pooled | None:
    """The calls for an array's windows, or None where there are none.

    Args:
        graph: the program.
        x, windows: the array, and its windows.
        maxima, gradients: positions of their maxima and of its gradients.
        held: the results of other calls.
    """
    if not max_pooling.accepts(windows, type_of(x).dtype) or len(maxima) > 1:
        return None
    if any(type_of(x).sharding.spec):
        return None  # an explicit mesh: XLA partitions the operations
    at = maxima[0] if maxima else None
    places = bool(gradients)
    if x in held or _stored(graph, x):
        found = [_Gradient(g, g, _gradients(graph, g)) for g in gradients]
        return _Pooled(Pooling(windows, False, places, False), x, (), at, tuple(found))
    activation = _normalised(graph, x)
    if activation is None or x in graph.returned:
        return None
    if any(i not in (*maxima, *gradients) for i in graph.uses(x)):
        return None
    operand, y, vectors = activation
    found = []
    for position in gradients:
        last = _masked(graph, position, operand)
        if last is None:
            return None
        found.append(_Gradient(position, last, _gradients(graph, position)))
    return _Pooled(Pooling(windows, True, places, places), y, vectors, at, tuple(found))


def _stored(graph: Graph, x: Var) -> bool:
    """Whether an array is in memory, whatever reads it."""
    made = graph.producer(x)
    if made is None or made.primitive.name in _CALLS:
        return True
    return any(graph.eqns[i].primitive.name in _READERS for i in graph.uses(x))


def _normalised(graph: Graph, z: Var) -> tuple[Var, Var, tuple[Vector, ...]] | None:
    """Where an array is relu of batch norm: relu's operand, batch norm's, and the vectors."""
    made = graph.producer(z)
    for atom in () if made is None else made.invars:
        if not isinstance(atom, Var) or not compat.same_type(type_of(atom), type_of(z)):
            continue
        if fuse_activations.classify(graph, z, atom) == "relu":
            found = fuse_masked_sums.normalised(graph, atom)
            return None if found is None else (atom, *found)
    return None


def _masked(graph: Graph, position: int, operand: Var) -> int | None:
    """The position of the selection by relu's mask that alone reads a gradient, or None."""
    (gradient,) = graph.eqns[position].outvars
    uses = graph.uses(gradient)
    if len(uses) != 1 or gradient in graph.returned:
        return None
    eqn = graph.eqns[uses[0]]
    if eqn.primitive.name != "select_n" or len(eqn.invars) != 3:
        return None
    mask, on_false, on_true = eqn.invars
    made = graph.index(graph.source(mask))
    if on_true is not gradient or graph.constant(on_false) != 0.0 or made is None:
        return None
    compared = [graph.source(a) for a in graph.eqns[made].invars]
    if not any(a is operand for a in compared):
        return None
    return uses[0] if fuse_activations.comparable(graph, made, operand, "relu") else None


def _gradients(graph: Graph, position: int) -> tuple[Any, ...]:
    """The gradients of the maxima that a gradient of pooling is of: two that only it adds."""
    dy = graph.eqns[position].invars[0]
    if isinstance(dy, Var) and len(graph.uses(dy)) == 1 and dy not in graph.returned:
        summands = fuse_masked_sums.summands(graph, dy)
        same = all(
            isinstance(a, Var) and compat.same_type(type_of(a), type_of(dy)) for a in summands
        )
        if same and all(fuse_masked_sums.in_memory(graph, a) for a in summands):
            return tuple(summands)
    return (dy,)
