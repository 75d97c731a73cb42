"""Rewrites max pooling and its gradient, so that both are elementwise operations.

The gradient of the maxima of windows goes to where each window has its maximum. XLA searches the
windows for these places a second time, and adds by a scatter. Here the maxima and the places come
from one pass over the operand, a place being a number of 8 bits, and an element of the gradient is
a sum over the windows that may have taken it:

    forwards    maximum and place of a window, from the operand's slices, one for each position in
                the window
    backwards   an element's own windows are ceil(size / stride) along each axis. The pooled arrays
                are repeated over the stride, once for each of them, and compared by place.

Of equal elements the first in row-major order is taken, and of a window with NaN what the program
takes there: an element is left for a later one unless it is greater or equal.

An element of the gradient is summed in float32, in the same order in every run, and rounded once.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Var

from jaxconv._src import compat
from jaxconv._src.fuse_graph import Graph, is_float, traced, type_of

# Places are numbers below it.
_PLACES = 256

# The most elements of a window, 7x7: each is some operations, which take XLA's compiler 4 s at 49
# and at several hundred become several kernels that pass whole arrays on.
_LARGEST = 49


@dataclasses.dataclass(frozen=True)
class _Windows:
    """How windows lie on an array, by axes.

    Attributes:
        shape: the array's extents.
        sizes: of a window.
        strides: from window to window; along an axis with a single one, the padded extent.
        padding: elements in front and behind, of the lowest value.
    """

    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """The extents of the pooled array."""
        axes = zip(self.shape, self.sizes, self.strides, self.padding, strict=True)
        return tuple((n + sum(pad) - size) // step + 1 for n, size, step, pad in axes)

    @property
    def overlaps(self) -> tuple[int, ...]:
        """How many windows an element may lie in."""
        return tuple(-(-size // s) for size, s in zip(self.sizes, self.strides, strict=True))

    @property
    def weights(self) -> tuple[int, ...]:
        """Of a position in a window, whose product with them is the number of the place."""
        # Of windows extended to whole strides, so that a position is stride * j + a, all a and j.
        extended = [m * s for m, s in zip(self.overlaps, self.strides, strict=True)]
        return tuple(math.prod(extended[axis + 1 :]) for axis in range(len(extended)))

    @property
    def places(self) -> int:
        return math.prod(m * s for m, s in zip(self.overlaps, self.strides, strict=True))

    def place(self, position: Iterable[int]) -> int:
        """The number of a position in a window."""
        return sum(p * w for p, w in zip(position, self.weights, strict=True))


def rewritten(eqns: Sequence[JaxprEqn], outvars: Sequence[Any]) -> list[JaxprEqn]:
    """A program's equations with max pooling whose gradient is taken, and the gradient, rewritten.

    Args:
        eqns: the equations, in order.
        outvars: what the program returns.
    """
    graph = Graph(eqns, outvars)
    placed: dict[int, list[JaxprEqn]] = {}
    for (x, windows), (maxima, gradients) in _found(graph).items():
        replaced = [*maxima[:1], *gradients]
        first = min(replaced)
        dy = type_of(graph.eqns[gradients[0]].invars[0])
        largest = graph.eqns[maxima[0]].outvars[0] if maxima else compat.variable(dy)
        place = compat.variable(dy.update(dtype=np.dtype(np.uint8), weak_type=False))
        pool = functools.partial(_pooled, windows=windows)
        back = functools.partial(_gradient, windows=windows)
        made: dict[int, list[JaxprEqn]] = {position: [] for position in replaced}
        try:
            made[first] += traced(pool, (x,), (largest, place), graph, first)
            for position in gradients:
                eqn = graph.eqns[position]
                given = eqn.invars[0], place
                made[position] += traced(back, given, eqn.outvars, graph, position)
        except (TypeError, ValueError, compat.ShardingTypeError):
            continue  # arrays of types that this does not know: the program's own pooling
        placed |= made
    result: list[JaxprEqn] = []
    for position, eqn in enumerate(graph.eqns):
        result += placed.get(position, [eqn])
    return result


def _found(graph: Graph) -> dict[tuple[Var, _Windows], tuple[list[int], list[int]]]:
    """Positions of the maxima of an array's windows, and of the gradients that there are."""
    maxima: dict[tuple[Any, _Windows], list[int]] = {}
    gradients: dict[tuple[Any, _Windows], list[int]] = {}
    for position, eqn in enumerate(graph.eqns):
        name = eqn.primitive.name
        if name == "reduce_window_max":
            dilations = *eqn.params["base_dilation"], *eqn.params["window_dilation"]
            windows = _windows(eqn, eqn.invars[0])
            if windows is not None and set(dilations) <= {1}:
                key = graph.source(eqn.invars[0]), windows
                maxima.setdefault(key, []).append(position)
        elif name == "select_and_scatter_add" and eqn.params["select_prim"] is lax.ge_p:
            windows = _windows(eqn, eqn.invars[1])
            if windows is not None and windows.counts == type_of(eqn.invars[0]).shape:
                key = graph.source(eqn.invars[1]), windows
                gradients.setdefault(key, []).append(position)
    return {
        key: (maxima.get(key, []), positions)
        for key, positions in gradients.items()
        if isinstance(key[0], Var)
    }


def _windows(eqn: JaxprEqn, operand: Any) -> _Windows | None:
    """The windows of an equation that pools, or None where they stay what they are."""
    aval, padding = type_of(operand), tuple(map(tuple, eqn.params["padding"]))
    if not is_float(aval.dtype) or not compat.is_constant_shape(aval.shape):
        return None
    if 0 in aval.shape or min(itertools.chain.from_iterable(padding), default=0) < 0:
        return None
    sizes, strides = eqn.params["window_dimensions"], eqn.params["window_strides"]
    found = _Windows(aval.shape, tuple(sizes), tuple(strides), padding)
    if 0 in found.counts or math.prod(found.sizes) > _LARGEST:
        return None
    # An axis with a single window has no overlaps, whatever the stride is.
    one = zip(found.shape, padding, found.counts, strides, strict=True)
    found = dataclasses.replace(
        found, strides=tuple(n + sum(pad) if count == 1 else s for n, pad, count, s in one)
    )
    return found if found.places <= _PLACES else None


# --- what becomes of it ---


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _pooled(x: jax.Array, windows: _Windows) -> tuple[jax.Array, jax.Array]:
    """The maxima of windows, and the places of the elements that are taken, uint8."""
    largest: Any = None
    taken: Any = None
    place: Any = None
    for number, element in _elements(x, windows):
        if largest is None:
            largest = taken = element
            place = jnp.full_like(element, number, np.uint8)
            continue
        keeps = taken >= element  # no NaN does
        taken = lax.select(keeps, taken, element)
        place = lax.select(keeps, place, jnp.full_like(place, number))
        largest = lax.max(largest, element)
    return largest, place


@_pooled.defjvp
def _pooled_jvp(windows: _Windows, primals: Any, tangents: Any) -> Any:
    """The derivative of the program's own pooling, to any order."""

    def pool(x: jax.Array) -> jax.Array:
        low = np.array(-np.inf, x.dtype)
        return lax.reduce_window(x, low, lax.max, windows.sizes, windows.strides, windows.padding)

    largest, place = _pooled(*primals, windows)
    _, tangent = jax.jvp(pool, primals, tangents)
    return (largest, place), (tangent, np.zeros(place.shape, jax.dtypes.float0))


def _elements(x: jax.Array, windows: _Windows) -> Iterator[tuple[int, jax.Array]]:
    """The elements at each position of all windows in row-major order, and its place's number."""
    x = lax.pad(x, np.array(-np.inf, x.dtype), [(low, high, 0) for low, high in windows.padding])
    counts, strides = windows.counts, windows.strides
    for position in itertools.product(*map(range, windows.sizes)):
        axes = zip(position, counts, strides, strict=True)
        ends = [start + (count - 1) * step + 1 for start, count, step in axes]
        yield windows.place(position), lax.slice(x, position, ends, strides)


def _gradient(dy: jax.Array, place: jax.Array, windows: _Windows) -> list[jax.Array]:
    """The gradient of the operand: dy at each window's place, summed."""
    strides, overlaps, weights = windows.strides, windows.overlaps, windows.weights
    low = [pad for pad, _ in windows.padding]
    # An element lies in the stride of a window, and in the windows before it.
    grid = [-(-(p + n) // s) for p, n, s in zip(low, windows.shape, strides, strict=True)]
    edges = [(m - 1, g - n, 0) for m, g, n in zip(overlaps, grid, dy.shape, strict=True)]
    # In memory as they are: XLA would form the places once more here, and test each read for the
    # edges.
    place = lax.optimization_barrier(place)
    if any(map(any, edges)):
        dy = lax.pad(dy, np.array(0, dy.dtype), edges)
        place = lax.pad(place, np.array(0, place.dtype), edges)
        dy, place = lax.optimization_barrier((dy, place))
    repeated: list[int] = []  # the extents, each stride's behind its axis
    axes: list[int] = []
    within: Any = np.uint8(0)  # the number of a place in the window that begins with its stride
    for extent, step in zip(grid, strides, strict=True):
        axes.append(len(repeated))
        repeated += [extent] if step == 1 else [extent, step]
    for axis, step, weight in zip(axes, strides, weights, strict=True):
        if step > 1:
            along = lax.broadcasted_iota(np.uint8, repeated, axis + 1)
            within = within + along * np.uint8(weight)

    def spread(array: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(array, repeated, axes)

    total: Any = 0.0
    for before in itertools.product(*map(range, overlaps)):
        starts = [m - 1 - j for m, j in zip(overlaps, before, strict=True)]
        ends = [start + g for start, g in zip(starts, grid, strict=True)]
        number = windows.place(j * s for j, s in zip(before, strides, strict=True))
        here = spread(lax.slice(place, starts, ends)) == within + np.uint8(number)
        source = spread(lax.slice(dy, starts, ends)).astype(np.float32)
        total = total + lax.select(here, source, jnp.zeros_like(source))
    dx = total.astype(dy.dtype)
    for axis, step in enumerate(strides):
        if step > 1:  # one axis at a time: a reshape of sharded arrays merges no more
            dx = dx.reshape((*dx.shape[:axis], dx.shape[axis] * step, *dx.shape[axis + 2 :]))
    return [lax.slice(dx, low, [p + n for p, n in zip(low, windows.shape, strict=True)])]
