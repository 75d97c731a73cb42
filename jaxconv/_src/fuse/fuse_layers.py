"""Finds layers of normalisation in forward programs: an affine function, a shortcut, an activation.

Each becomes one call of ``normalise``, whose derivative is a rule, so that backward programs need
not be read. ``fuse_affine`` reads the affine part, however it is written. The activation is
whatever elementwise function of one array follows.

A call's result has a copy for a second reader, so that the derivative's rule receives both
gradients. It also knows whether they lie in memory when it is called for (``stored``): a
convolution and a product of matrices store the gradients of their operands, while XLA computes
those of elementwise operations where they are read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Var

from jaxconv._src import compat
from jaxconv._src.conv import fused
from jaxconv._src.fuse import (
    fuse_activations,
    fuse_affine,
    fuse_axes,
    fuse_convolution,
    fuse_derivatives,
    fuse_statistics,
)
from jaxconv._src.fuse.fuse_activations import Written
from jaxconv._src.fuse.fuse_affine import Affine, Coefficient, Reader, Term
from jaxconv._src.fuse.fuse_axes import Axes
from jaxconv._src.fuse.fuse_graph import (
    ELEMENTWISE,
    IDENTITIES,
    REDUCTIONS,
    Graph,
    is_float,
    traced,
    type_of,
)
from jaxconv._src.passes import max_pooling, moments, normalise
from jaxconv._src.passes.normalise import Form
from jaxconv._src.sharding import explicit_mesh

# Equations that may end the affine part of a layer.
_AFFINE = {"add", "add_any", "sub", "mul", "div", "neg", "convert_element_type"}
_AFFINE |= {"reshape", "transpose", "squeeze", "expand_dims", "broadcast_in_dim"}

# Operations that read their operands from memory and store the operands' gradients.
_STORING = {
    *fuse_convolution.NAMES,
    fused.conv_fused_p.name,
    "dot_general",
    max_pooling.max_pool_p.name,
}

# Operations that give their operand's elements.
MOVING = (*IDENTITIES, "reshape", "transpose", "squeeze", "expand_dims")

# The most equations of an activation.
_LONGEST = 40

# Results of a call that are z: ``masked_sums`` adds two gradients.
_COPIES = 2


@dataclasses.dataclass(frozen=True)
class _Layer:
    """A call in the place of some equations.

    Attributes:
        position: of the equation whose result the call gives.
        inside: positions of the equations that the call computes.
        axis: that of the arrays' channels.
        terms: the arrays with their coefficients, the shortcut last.
        activation: the function behind the sum.
        out: the result.
        axes: its axes, in the arrays' digits.
    """

    position: int
    inside: frozenset[int]
    axis: int
    terms: tuple[Term, ...]
    activation: Written | None
    out: Var
    axes: Axes

    @property
    def form(self) -> Form:
        vectors = [
            tuple(n for n in ("mean", "scale", "offset") if getattr(term, n) is not None)
            for term in self.terms
        ]
        shortcut = not vectors[-1]
        return Form(
            tuple(vectors[:-1] if shortcut else vectors),
            shortcut,
            self.activation,
            np.dtype(type_of(self.out).dtype),
        )

    def equations(self, graph: Graph) -> list[JaxprEqn]:
        """The call with what brings its operands and its result to their shapes."""
        coefficients = [c for term in self.terms for c in term.coefficients]
        atoms = list({a: None for c in coefficients for a in c.atoms if isinstance(a, Var)})
        arrays = [term.array for term in self.terms]
        shape = type_of(arrays[0]).shape
        counts = shape[0], shape[self.axis]

        def call(arrays: list[jax.Array], given: list[jax.Array]) -> list[jax.Array]:
            values = dict(zip(atoms, given, strict=True))
            vectors = []
            for coefficient in coefficients:
                wanted = counts if coefficient.examples else counts[1:]
                vectors.append(jnp.broadcast_to(coefficient.value(values), wanted))
            last = [jnp.moveaxis(a, self.axis, -1) for a in arrays]
            (z,) = normalise.normalise(*last, *vectors, form=self.form)
            z = jnp.moveaxis(z, -1, self.axis)
            return [fuse_axes.arranged(z, fuse_axes.of(shape, self.axis), self.axes)]

        return traced(call, (arrays, atoms), [self.out], graph, self.position)


def rewritten(eqns: Sequence[JaxprEqn], outvars: Sequence[Any]) -> list[JaxprEqn]:
    """A program's equations with its layers of normalisation as calls.

    What becomes superfluous stays, without uses.

    Args:
        eqns: the equations, in order.
        outvars: what the program returns.
    """
    graph = Graph(eqns, outvars)
    axes = axes_of_channels(graph)
    reader = Reader(graph, lambda v: axes.get(v, usual_axis(axes, v)), _Stops(graph))
    placed: dict[int, list[JaxprEqn]] = {}
    inside = _within_activations(graph)
    for position in reversed(range(len(graph.eqns))):
        if position in inside or graph.eqns[position].primitive.name not in _AFFINE:
            continue
        layer = _find(graph, reader, axes, position)
        if layer is None or layer.position in placed:
            continue
        try:
            placed[layer.position] = layer.equations(graph)
        except (TypeError, ValueError, compat.ShardingTypeError):
            continue  # arrays of types that this does not know: the program's own operations
        inside |= layer.inside
    return graph.with_replaced(placed)


def with_moments(eqns: Sequence[JaxprEqn], outvars: Sequence[Any]) -> list[JaxprEqn]:
    """A program's equations with the moments of arrays in memory by calls.

    Those of convolutions whose calls give statistics are not among them.
    """
    graph = Graph(eqns, outvars)
    axes = axes_of_channels(graph)
    placed: dict[int, list[JaxprEqn]] = {}
    arrays = dict.fromkeys(
        graph.source(a) for eqn in graph.eqns for a in eqn.invars if isinstance(a, Var)
    )
    for array in arrays:
        aval = type_of(array)
        rank = len(getattr(aval, "shape", ()))
        if rank < 3 or not is_float(aval.dtype) or not in_memory(graph, array):
            continue
        made = graph.producer(array)
        if made is not None and made.primitive.name == "convert_element_type":
            continue  # its operand has the same moments
        axis = axes.get(array, usual_axis(axes, array))
        found = _moments(graph, array, axis, "examples")
        found = found or _moments(graph, array, axis, "positions")
        if not found.keys() <= placed.keys():  # not those of another array already
            placed |= found
    return graph.with_replaced(placed)


def _moments(
    graph: Graph, array: Var, axis: int, over: fuse_statistics.Over
) -> dict[int, list[JaxprEqn]]:
    """An array's moments by a call, and what they answer, by position; or nothing."""
    found = fuse_statistics.find(graph, array, axis, over)
    aval = type_of(array)
    segments = aval.shape[0] if over == "positions" else 1
    last = (*aval.shape[:axis], *aval.shape[axis + 1 :], aval.shape[axis])
    if not found or not moments.accepts(last, aval.dtype, segments):
        return {}

    def call(array: jax.Array) -> list[jax.Array]:
        return [moments.moments(jnp.moveaxis(array, axis, -1), segments=segments)]

    count = aval.size // (segments * last[-1])
    return fuse_statistics.by_call(graph, found, call, [array], count)


def axes_of_channels(graph: Graph) -> dict[Var, int]:
    """The axis of channels of each convolution's result, with a bias too."""
    found: dict[Var, int] = {}
    for eqn in graph.eqns:
        axis = _convolved(eqn)
        if axis is None and eqn.primitive.name == "add":
            axis = _convolution_with_bias(graph, eqn.outvars[0])
        if axis is not None:
            found[eqn.outvars[0]] = axis
    return found


def _convolved(eqn: JaxprEqn) -> int | None:
    """The axis of channels of a convolution's result; None of another equation."""
    convolves = eqn.primitive.name in (*fuse_convolution.NAMES, fused.conv_fused_p.name)
    if not convolves or getattr(eqn.params.get("spec"), "batched", False):
        return None
    return fuse_convolution.channel_axis(eqn)


def usual_axis(axes: Mapping[Var, int], array: Var) -> int:
    """The axis of channels of an array that no convolution gives: where the program has them."""
    rank = len(type_of(array).shape)
    first = any(axis < len(type_of(v).shape) - 1 for v, axis in axes.items())
    return min(1, rank - 1) if first else rank - 1


class _Stops:
    """Whether a value lies in memory, so that what reads it need not compute it again."""

    def __init__(self, graph: Graph):
        self._graph = graph
        self._computed = ELEMENTWISE | REDUCTIONS | {"broadcast_in_dim", "reshape", "squeeze"}
        self._computed |= {
            "expand_dims",
            "transpose",
            "reduce_and",
            "reduce_or",
            *fuse_activations.CALLS,
        }

    def __call__(self, value: Var) -> bool:
        uses = [self._graph.eqns[i] for i in self._graph.uses(value)]
        if value in self._graph.returned:
            return True
        if any(eqn.primitive.name not in self._computed for eqn in uses):
            return True
        moved = [eqn.outvars[0] for eqn in uses if eqn.primitive.name in MOVING]
        return any(_read_by_moments(self._graph, v) for v in moved)


def _read_by_moments(graph: Graph, array: Var) -> bool:
    return any(graph.eqns[i].primitive is moments.moments_p for i in graph.uses(array))


def _find(graph: Graph, reader: Reader, axes: Mapping[Var, int], position: int) -> _Layer | None:
    """The layer whose affine part an equation ends, or None.

    What multiplies by numbers or adds them may belong to the affine part or to the activation: to
    the affine part where the activation's derivative has a name then, to the activation elsewhere.
    """
    found = None
    value: Any = graph.eqns[position].outvars[0]
    while isinstance(value, Var):
        layer = _ended(graph, reader, axes, value)
        if layer is None or (layer.activation is None and found is not None):
            break
        found = layer
        if layer.activation is None or layer.activation.mask or layer.activation.named:
            break
        value = _operand_beside_numbers(graph, value)
    return found


def _operand_beside_numbers(graph: Graph, value: Var) -> Var | None:
    """The one operand of an elementwise equation that is no number, if nothing else reads it."""
    made = graph.producer(value)
    if made is None or made.primitive.name not in _AFFINE:
        return None
    operands = [a for a in made.invars if isinstance(a, Var) and graph.constant(a) is None]
    if len(operands) != 1 or len(graph.uses(operands[0])) > 1 or operands[0] in graph.returned:
        return None
    return operands[0] if type_of(operands[0]).shape == type_of(value).shape else None


def _ended(graph: Graph, reader: Reader, axes: Mapping[Var, int], value: Var) -> _Layer | None:
    """The layer whose affine part gives a value, or None."""
    if not is_float(getattr(type_of(value), "dtype", bool)) or len(type_of(value).shape) < 2:
        return None
    affine = reader.read(value)
    if not 1 <= len(affine.terms) <= 2 or not _varies(affine):
        return None
    terms = sorted((_centred(graph, t) for t in affine.terms), key=_order)
    shapes = {type_of(t.array).shape for t in terms}
    channels = {axes.get(t.array, usual_axis(axes, t.array)) for t in terms}
    if len(shapes) > 1 or len(channels) > 1 or len(next(iter(shapes))) < 3:
        return None
    if any(not is_float(type_of(t.array).dtype) for t in terms):
        return None
    (axis,) = channels
    counts = reader.counts(affine.axes)
    if type_of(value).size <= counts[0] * counts[1]:
        return None  # vectors
    if not in_memory(graph, terms[0].array):
        return None  # XLA computes the layer, and its derivative, in the passes that it has
    out, function = _activated(graph, value)
    alone = len(terms) == 1 and terms[0].mean is None and terms[0].scale is None
    if alone and (function is None or not fuse_convolution.for_cuda()):
        return None  # a vector is added, and no kernel sums its gradient
    activation = None
    if function is not None:
        operand = type_of(value)
        mask, named, contract = fuse_derivatives.known(function, operand)
        if operand.shape == next(iter(shapes)) and affine.axes == fuse_axes.of(operand.shape, axis):
            function, operand = _of_channels_last(function, operand, axis)
        elif explicit_mesh.mesh_of(operand) is not None:
            return None  # the call's arrays have other axes, which a reshape would not split alike
        activation = Written(function, operand, contract, mask=mask, named=named)
    end = graph.index(out)
    assert end is not None
    inside = affine.inside | {end}
    return _Layer(end, inside, axis, tuple(terms), activation, out, affine.axes)


def _of_channels_last(
    function: Callable[[jax.Array], jax.Array], operand: Any, axis: int
) -> tuple[Callable[[jax.Array], jax.Array], Any]:
    """An elementwise function with the axis of channels as the last one, and its operand's type."""
    if axis == len(operand.shape) - 1:
        return function, operand

    def moved(t: jax.Array) -> jax.Array:
        return jnp.moveaxis(function(jnp.moveaxis(t, -1, axis)), axis, -1)

    return moved, jax.make_jaxpr(lambda t: jnp.moveaxis(t, axis, -1))(operand).out_avals[0]


def _within_activations(graph: Graph) -> set[int]:
    """Positions of the equations of activations whose operand is read several times.

    What is affine among them ends no layer.
    """
    found: set[int] = set()
    for position, eqn in enumerate(graph.eqns):
        if position in found or eqn.primitive.name not in _AFFINE:
            continue
        (out,) = eqn.outvars
        if len(graph.uses(out)) < 2 or not is_float(getattr(type_of(out), "dtype", bool)):
            continue
        end, function = _activated(graph, out)
        if function is not None:
            found |= {i for i in graph.computed_from(end, out) or () if i != position}
    return found


def _order(term: Term) -> tuple[bool, bool]:
    """Arrays around a mean first, the shortcut last, however the sum of them is written."""
    return term.plain, term.mean is None


def _varies(affine: Affine) -> bool:
    """Whether an array of the program is among the coefficients."""
    return any(c.atoms for t in affine.terms for c in t.coefficients)


def _centred(graph: Graph, term: Term) -> Term:
    """A term around the mean of its array, where the program knows that."""
    found = _statistics(graph, term.array)
    if term.plain or found is None:
        return term
    statistics, of_examples = found

    def mean(values: Sequence[Any]) -> Any:
        return values[0][..., 0, :]

    return term.around(Coefficient((statistics,), of_examples, mean))


def _statistics(graph: Graph, array: Var) -> tuple[Var, bool] | None:
    """Moments of an array that the program has, and whether each example has its own."""
    for use in graph.uses(array):
        eqn = graph.eqns[use]
        if eqn.primitive.name == "transpose":
            (array,) = eqn.outvars
            found = _statistics(graph, array)
            if found is not None:
                return found
        if eqn.primitive is moments.moments_p:
            return eqn.outvars[0], eqn.params["segments"] > 1
    made = graph.producer(array)
    while made is not None and made.primitive.name == "reshape":
        made = graph.producer(made.invars[0])
    if made is None or made.primitive is not fused.conv_fused_p:
        return None
    return (made.outvars[-1], False) if made.params["epilogue"].statistics else None


def _activated(graph: Graph, operand: Var) -> tuple[Var, Callable[..., Any] | None]:
    """The result of the elementwise function that alone reads an array, and the function."""
    reached: list[Var] = [operand]
    pending = sorted(set(graph.uses(operand)))
    ends: list[Var] = []
    while pending and len(reached) <= _LONGEST:
        position = pending.pop(0)
        out = _of_operand(graph, position, operand, reached)
        if out is None:
            continue
        reached.append(out)
        # All that is read elsewhere depends on the operand through this one.
        if _alone(graph, operand, reached, out):
            ends.append(out)
        pending = sorted({*pending, *graph.uses(out)})
    for out in reversed(ends):
        if type_of(out).dtype.itemsize > type_of(operand).dtype.itemsize or _widened(graph, out):
            continue  # what reads it converts by itself
        function = graph.function(out, operand)
        if function is not None:
            return out, function
    return operand, None


def _widened(graph: Graph, out: Var) -> bool:
    """Whether a value is another one of fewer bits, converted."""
    made = graph.producer(out)
    if made is None or made.primitive.name != "convert_element_type":
        return False
    return type_of(made.invars[0]).dtype.itemsize < type_of(out).dtype.itemsize


def _of_operand(graph: Graph, position: int, operand: Var, reached: Sequence[Var]) -> Var | None:
    """The result of an elementwise equation of an array and of numbers, or None."""
    eqn = graph.eqns[position]
    named = ELEMENTWISE | {*fuse_activations.CALLS, "and", "or", "not"}
    if len(eqn.outvars) != 1 or eqn.primitive.name not in named:
        return None
    (out,) = eqn.outvars
    if getattr(type_of(out), "shape", None) != type_of(operand).shape or eqn.effects:
        return None
    for atom in eqn.invars:
        if isinstance(atom, Var) and atom not in reached and graph.constant(atom) is None:
            return None
    return out


def _alone(graph: Graph, operand: Var, reached: Sequence[Var], out: Var) -> bool:
    """Whether nothing but ``out`` is read of what is computed from an array on the way to it."""
    if not is_float(type_of(out).dtype):
        return False
    positions = set(graph.computed_from(out, operand) or ())
    inside = {operand, *(v for i in positions for v in graph.eqns[i].outvars)} - {out}
    inside &= set(reached)
    return all(
        v not in graph.returned and all(i in positions for i in graph.uses(v)) for v in inside
    )


# --- the gradients of a call's result ---


def with_readers(eqns: Sequence[JaxprEqn], outvars: Sequence[Any]) -> list[JaxprEqn]:
    """A program's equations whose calls know who reads their results."""
    graph = Graph(eqns, outvars)
    result = list(graph.eqns)
    for position in reversed(range(len(result))):
        eqn = result[position]
        if eqn.primitive not in (normalise.normalise_p, max_pooling.max_pool_p):
            continue
        if len(eqn.outvars) > 1:
            continue  # it is part of a derivative, and has copies already if it needs them
        readers = _readers(graph, eqn.outvars[0])
        form = eqn.params["form"]
        arrays: list[Any] = []
        if isinstance(form, Form):  # a kernel that writes a mask's bits reads the shortcut too
            arrays = eqn.invars[: form.arrays if form.block_end is None else form.summands]
        stored = all(in_memory(graph, a) for a in arrays)
        stored = stored and bool(readers) and all(_stores(graph, r) for r in readers or ())
        form = dataclasses.replace(form, stored=stored)
        z = eqn.outvars[0]
        uses = sorted(set(graph.uses(z)))
        if len(uses) < 2 or not stored:
            result[position] = eqn.replace(params={**eqn.params, "form": form})
            continue
        form = dataclasses.replace(form, copies=_COPIES)
        copy = compat.variable(type_of(z))
        for use in uses[1:]:
            reader = result[use]
            result[use] = reader.replace(invars=[copy if a is z else a for a in reader.invars])
        result[position] = eqn.replace(outvars=[z, copy], params={**eqn.params, "form": form})
    return result


def _readers(graph: Graph, array: Var) -> list[tuple[int, Var]] | None:
    """Equations that read an array, as it is or in another shape, and as what; None: it is kept."""
    if array in graph.returned:
        return []
    found: list[tuple[int, Var]] = []
    for use in graph.uses(array):
        eqn = graph.eqns[use]
        if eqn.primitive.name in MOVING:
            inner = _readers(graph, eqn.outvars[0])
            if not inner:
                return []
            found += inner
        else:
            found.append((use, array))
    return found


def _stores(graph: Graph, reader: tuple[int, Var]) -> bool:
    """Whether a reader's gradient lies in memory."""
    position, array = reader
    eqn = graph.eqns[position]
    if eqn.primitive.name in _STORING:
        return True
    if eqn.primitive is not normalise.normalise_p:
        return False
    # A shortcut's gradient is that of the sum, which has several readers.
    form = eqn.params["form"]
    return form.shortcut and eqn.invars[form.arrays] is array


def in_memory(graph: Graph, array: Any) -> bool:
    """Whether an array is stored; XLA computes elementwise results where it reads them."""
    made = graph.producer(array)
    while made is not None and made.primitive.name in MOVING:
        made = graph.producer(made.invars[0])
    if made is None:
        return True
    name = made.primitive.name
    if name not in ELEMENTWISE | {normalise.TARGET, "broadcast_in_dim", *fuse_activations.CALLS}:
        return True
    return isinstance(array, Var) and (
        _read_from_memory(graph, array) or _convolution_with_bias(graph, array) is not None
    )


def _convolution_with_bias(graph: Graph, array: Any) -> int | None:
    """The axis of channels of a convolution's result and a vector, which XLA's convolutions add."""
    made = graph.producer(array)
    if made is None or made.primitive.name != "add":
        return None
    shape = type_of(array).shape
    left, right = made.invars
    for own, other in ((left, right), (right, left)):
        conv = graph.producer(own)
        axis = None if conv is None else _convolved(conv)
        if axis is None or not isinstance(own, Var) or len(graph.uses(own)) > 1:
            continue
        axes = fuse_axes.of(shape, axis)
        by = fuse_affine.coefficient(graph, other, axes, (shape[0], shape[axis]))
        return None if by is None or by.examples else axis
    return None


def _read_from_memory(graph: Graph, array: Var) -> bool:
    """Whether an operation that stores what it reads reads an array, in any shape."""
    for use in graph.uses(array):
        eqn = graph.eqns[use]
        # A product with a number is a sum of elements, which XLA computes where it reads them.
        summed = eqn.primitive.name == "dot_general" and any(
            graph.constant(a) is not None for a in eqn.invars
        )
        if eqn.primitive.name in _STORING and not summed:
            return True
        if eqn.primitive.name in MOVING and _read_from_memory(graph, eqn.outvars[0]):
            return True
    return False
