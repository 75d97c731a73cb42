"""Finds normalisation layers in forward programs: an affine function, a shortcut, an activation.

Each layer becomes one call of ``normalise``, whose derivative is a rule of the primitive, so
``fuse`` need not analyse backward programs. ``fuse_affine`` reads the affine part in any spelling.
The activation is any elementwise function of one array that follows.

If a call's result has several readers, the call returns a copy of it, so that the derivative rule
receives two gradients and adds them itself. ``stored`` tells the rule whether these gradients are
in memory: convolutions and matrix products write the gradients of their operands to memory, while
XLA fuses those of elementwise operations into what reads them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
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
from jaxconv._src.passes import gated, max_pooling, moments, normalise
from jaxconv._src.passes.normalise import Form
from jaxconv._src.sharding import explicit_mesh

# Equations that may end the affine part of a layer.
_AFFINE = {"add", "add_any", "sub", "mul", "div", "neg", "convert_element_type"}
_AFFINE |= {"reshape", "transpose", "squeeze", "broadcast_in_dim"}

# Operations that read their operands from memory and write the operands' gradients to memory.
_STORING = {
    *fuse_convolution.NAMES,
    fused.conv_fused_p.name,
    "dot_general",
    max_pooling.max_pool_p.name,
}

# Operations that return their operand's elements, in any order.
MOVING = (*IDENTITIES, "reshape", "transpose", "squeeze")

# Readers that XLA fuses with the computation of their operand, so that it is not stored for them.
_FUSING = ELEMENTWISE | REDUCTIONS | {*fuse_activations.CALLS, "reduce_and", "reduce_or"}
_FUSING |= {"broadcast_in_dim", "reshape", "squeeze", "transpose"}

# Beside these, what XLA fuses into the operations that read its result.
_FUSED_RESULTS = {normalise.TARGET, gated.TARGET, "broadcast_in_dim", *fuse_activations.CALLS}

# The most equations of an activation.
_LONGEST = 40

# The copies of z that a call with several readers returns: ``masked_sums`` adds two gradients.
_COPIES = 2


@dataclasses.dataclass(frozen=True)
class _Layer:
    """A normalisation layer, which one call of ``normalise`` replaces.

    Attributes:
        position: the position of the equation that computes ``out``.
        inside: positions of the equations that the call computes.
        axis: the channel axis of the arrays.
        terms: the arrays with their coefficients, the shortcut last.
        activation: the function applied to the sum, or None.
        out: the result.
        axes: the result's axes, in digits of the arrays' axes.
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
        """The call, with the reshapes and transposes of its operands and its result."""
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
    """A program's equations, with each normalisation layer as a call.

    The replaced equations remain, without uses.

    Args:
        eqns: the equations, in order.
        outvars: what the program returns.
    """
    graph = Graph(eqns, outvars)
    axes = axes_of_channels(graph)
    reader = Reader(
        graph, lambda v: axes.get(v, usual_axis(axes, v)), functools.partial(_stored, graph)
    )
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
            continue  # unknown array types: the program's operations stay
        inside |= layer.inside
    return graph.with_replaced(placed)


def with_moments(eqns: Sequence[JaxprEqn], outvars: Sequence[Any]) -> list[JaxprEqn]:
    """A program's equations, with calls of ``moments`` for arrays in memory.

    A convolution's call with statistics has already replaced the sums over its own result.
    """
    graph = Graph(eqns, outvars)
    axes = axes_of_channels(graph)
    placed: dict[int, list[JaxprEqn]] = {}
    for array in graph.read:
        aval = type_of(array)
        rank = len(getattr(aval, "shape", ()))
        if rank < 3 or not is_float(aval.dtype) or not in_memory(graph, array):
            continue
        made = graph.producer(array)
        if made is not None and made.primitive.name == "convert_element_type":
            continue  # the conversion's operand has the same moments
        axis = axes.get(array, usual_axis(axes, array))
        found = _moments(graph, array, axis, "examples")
        found = found or _moments(graph, array, axis, "positions")
        if not found.keys() <= placed.keys():  # else another array's moments give these sums
            placed |= found
    return graph.with_replaced(placed)


def _moments(
    graph: Graph, array: Var, axis: int, over: fuse_statistics.Over
) -> dict[int, list[JaxprEqn]]:
    """By position: a call of ``moments``, and the sums that follow from it; empty if none do."""
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
    """The channel axis of each convolution's result, and of its sum with a bias."""
    found: dict[Var, int] = {}
    for eqn in graph.eqns:
        axis = _convolved(eqn)
        if axis is None and eqn.primitive.name == "add":
            axis = _convolution_with_bias(graph, eqn.outvars[0])
        if axis is not None:
            found[eqn.outvars[0]] = axis
    return found


def _convolved(eqn: JaxprEqn) -> int | None:
    """The channel axis of an equation's result if the equation is a convolution, else None."""
    convolves = eqn.primitive.name in (*fuse_convolution.NAMES, fused.conv_fused_p.name)
    if not convolves or getattr(eqn.params.get("spec"), "batched", False):
        return None
    return fuse_convolution.channel_axis(eqn)


def usual_axis(axes: Mapping[Var, int], array: Var) -> int:
    """The assumed channel axis of an array that is no convolution's result.

    Axis 1 if a convolution of the program has its channels before other axes, else the last axis.
    """
    rank = len(type_of(array).shape)
    first = any(axis < len(type_of(v).shape) - 1 for v, axis in axes.items())
    return min(1, rank - 1) if first else rank - 1


def _stored(graph: Graph, value: Var) -> bool:
    """Whether a value is stored in any case, so that its readers need not compute it again."""
    readers = [graph.eqns[i] for i in graph.uses(value)]
    if value in graph.returned or any(r.primitive.name not in _FUSING for r in readers):
        return True
    moved = [i for r in readers if r.primitive.name in MOVING for i in graph.uses(r.outvars[0])]
    return any(graph.eqns[i].primitive is moments.moments_p for i in moved)


def _find(graph: Graph, reader: Reader, axes: Mapping[Var, int], position: int) -> _Layer | None:
    """The layer whose affine part ends at an equation, or None.

    A product or sum with a constant may end the affine part or begin the activation. It ends the
    affine part if the remaining activation has a mask or a named derivative; otherwise the affine
    part ends before it.
    """
    found = None
    value: Any = graph.eqns[position].outvars[0]
    while isinstance(value, Var):
        layer = _layer_with_result(graph, reader, axes, value)
        if layer is None or (layer.activation is None and found is not None):
            break
        found = layer
        if layer.activation is None or layer.activation.mask or layer.activation.named:
            break
        value = _operand_beside_numbers(graph, value)
    return found


def _operand_beside_numbers(graph: Graph, value: Var) -> Var | None:
    """The operand of a value's affine equation if all others are constants; None if read twice."""
    made = graph.producer(value)
    if made is None or made.primitive.name not in _AFFINE:
        return None
    operands = [a for a in made.invars if isinstance(a, Var) and graph.constant(a) is None]
    if len(operands) != 1 or len(graph.uses(operands[0])) > 1 or operands[0] in graph.returned:
        return None
    return operands[0] if type_of(operands[0]).shape == type_of(value).shape else None


def _layer_with_result(
    graph: Graph, reader: Reader, axes: Mapping[Var, int], value: Var
) -> _Layer | None:
    """The layer whose affine part has the result ``value``, or None."""
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
    if type_of(value).size <= math.prod(fuse_axes.counts(affine.axes)):
        return None  # a vector over channels, or over examples and channels
    if not in_memory(graph, terms[0].array):
        return None  # XLA fuses the layer, and its derivative, into other passes
    out, function = _activated(graph, value)
    alone = len(terms) == 1 and terms[0].mean is None and terms[0].scale is None
    if alone and (function is None or not fuse_convolution.for_cuda()):
        return None  # only a vector is added, for which a call saves no pass
    activation = None
    if function is not None:
        operand = type_of(value)
        mask, named, contract = fuse_derivatives.known(function, operand)
        if operand.shape == next(iter(shapes)) and affine.axes == fuse_axes.of(operand.shape, axis):
            function, operand = _of_channels_last(function, operand, axis)
        elif explicit_mesh.mesh_of(operand) is not None:
            return None  # the call reshapes its arrays, which would change their sharding
        activation = Written(function, operand, contract, mask=mask, named=named)
    end = graph.index(out)
    assert end is not None
    inside = affine.inside | {end}
    return _Layer(end, inside, axis, tuple(terms), activation, out, affine.axes)


def _of_channels_last(
    function: Callable[[jax.Array], jax.Array], operand: Any, axis: int
) -> tuple[Callable[[jax.Array], jax.Array], Any]:
    """The same elementwise function for channels-last arrays, and its operand's type."""
    if axis == len(operand.shape) - 1:
        return function, operand

    def moved(t: jax.Array) -> jax.Array:
        return jnp.moveaxis(function(jnp.moveaxis(t, -1, axis)), axis, -1)

    return moved, jax.make_jaxpr(lambda t: jnp.moveaxis(t, axis, -1))(operand).out_avals[0]


def _within_activations(graph: Graph) -> set[int]:
    """Positions of the equations inside activations that read their operand several times.

    Affine equations among them end no layer.
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
    """The sort key of terms: arrays with a mean first, the shortcut last."""
    return term.plain, term.mean is None


def _varies(affine: Affine) -> bool:
    """Whether a coefficient depends on an array of the program."""
    return any(c.atoms for t in affine.terms for c in t.coefficients)


def _centred(graph: Graph, term: Term) -> Term:
    """The same term with its array's mean subtracted first, if a call computes the mean."""
    found = moments_of(graph, term.array)
    if term.plain or found is None:
        return term
    statistics, of_examples = found

    def mean(values: Sequence[Any]) -> Any:
        return values[0][..., 0, :]

    return term.around(Coefficient((statistics,), of_examples, mean))


def moments_of(graph: Graph, array: Any) -> tuple[Var, bool] | None:
    """The moments of an array that a call computes, and whether each example has its own."""
    if not isinstance(array, Var):
        return None
    for use in graph.uses(array):
        eqn = graph.eqns[use]
        if eqn.primitive.name == "transpose":
            found = moments_of(graph, eqn.outvars[0])
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


def before_moves(graph: Graph, array: Any) -> tuple[Any, tuple[JaxprEqn, ...]]:
    """The array of which an atom is a copy in any order, and the equations that move it."""
    moves: list[JaxprEqn] = []
    while (made := graph.producer(array)) is not None and made.primitive.name in MOVING:
        moves.insert(0, made)
        array = made.invars[0]
    return array, tuple(moves)


def moved(array: jax.Array, moves: Sequence[JaxprEqn]) -> jax.Array:
    """An array after the equations of ``before_moves``."""
    for move in moves:
        array = move.primitive.bind(array, **move.params)
    return array


def _activated(graph: Graph, operand: Var) -> tuple[Var, Callable[..., Any] | None]:
    """The longest elementwise function that is the only reader of an array, and its result."""
    reached: list[Var] = [operand]
    pending = sorted(set(graph.uses(operand)))
    ends: list[Var] = []
    while pending and len(reached) <= _LONGEST:
        position = pending.pop(0)
        out = _elementwise_result(graph, position, operand, reached)
        if out is None:
            continue
        reached.append(out)
        if _has_no_other_reader(graph, operand, reached, out):
            ends.append(out)
        pending = sorted({*pending, *graph.uses(out)})
    for out in reversed(ends):
        if type_of(out).dtype.itemsize > type_of(operand).dtype.itemsize or _widened(graph, out):
            continue  # readers convert a narrower result to the wider type themselves
        function = graph.function(out, operand)
        if function is not None:
            return out, function
    return operand, None


def _widened(graph: Graph, out: Var) -> bool:
    """Whether a value is converted from a type of fewer bits."""
    made = graph.producer(out)
    if made is None or made.primitive.name != "convert_element_type":
        return False
    return type_of(made.invars[0]).dtype.itemsize < type_of(out).dtype.itemsize


def _elementwise_result(
    graph: Graph, position: int, operand: Var, reached: Sequence[Var]
) -> Var | None:
    """The result of an elementwise equation of ``reached`` variables and constants, or None."""
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


def _has_no_other_reader(graph: Graph, operand: Var, reached: Sequence[Var], out: Var) -> bool:
    """Whether no value between an operand and ``out`` has a reader outside this computation."""
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
    """A program's equations, with ``stored`` and ``copies`` set in the calls' parameters."""
    graph = Graph(eqns, outvars)
    result = list(graph.eqns)
    for position in reversed(range(len(result))):
        eqn = result[position]
        if eqn.primitive not in (normalise.normalise_p, max_pooling.max_pool_p):
            continue
        if len(eqn.outvars) > 1:
            continue  # a call in a derivative, whose copies are set already
        readers = readers_of(graph, eqn.outvars[0])
        form = eqn.params["form"]
        arrays: list[Any] = []
        if isinstance(form, Form):  # a kernel that writes a mask's bits reads the shortcut too
            arrays = eqn.invars[: form.arrays if form.block_end is None else form.summands]
        stored = all(in_memory(graph, a) for a in arrays)
        stored = stored and bool(readers) and all(writes_gradient(graph, r) for r in readers)
        form = dataclasses.replace(form, stored=stored)
        if isinstance(form, Form) and form.activation is not None and form.summands == 1:
            form = dataclasses.replace(form, twice=fuse_convolution.for_cuda() and not stored)
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


def readers_of(graph: Graph, array: Var) -> list[tuple[int, Var]]:
    """Equations that read an array, and the variable by which they read it, perhaps reshaped.

    Empty if the program returns the array, or a reshaped one.
    """
    if array in graph.returned:
        return []
    found: list[tuple[int, Var]] = []
    for use in graph.uses(array):
        eqn = graph.eqns[use]
        if eqn.primitive.name in MOVING:
            inner = readers_of(graph, eqn.outvars[0])
            if not inner:
                return []
            found += inner
        else:
            found.append((use, array))
    return found


def writes_gradient(graph: Graph, reader: tuple[int, Var]) -> bool:
    """Whether the gradient that a reader returns is written to memory."""
    position, array = reader
    eqn = graph.eqns[position]
    if eqn.primitive.name in _STORING:
        return True
    if eqn.primitive is not normalise.normalise_p:
        return False
    # A shortcut's gradient equals the gradient of the sum, which several operations read.
    form = eqn.params["form"]
    return form.shortcut and eqn.invars[form.arrays] is array


def in_memory(graph: Graph, array: Any) -> bool:
    """Whether an array is in memory: XLA fuses elementwise results into what reads them."""
    made = graph.producer(array)
    while made is not None and made.primitive.name in MOVING:
        made = graph.producer(made.invars[0])
    if made is None:
        return True
    name = made.primitive.name
    if name not in ELEMENTWISE | _FUSED_RESULTS:
        return True
    return isinstance(array, Var) and (
        _read_from_memory(graph, array) or _convolution_with_bias(graph, array) is not None
    )


def _convolution_with_bias(graph: Graph, array: Any) -> int | None:
    """The channel axis of an array that is a convolution's result plus a bias, else None.

    XLA's convolutions add the bias and store the sum.
    """
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
    """Whether an operation that needs its operands in memory reads an array, perhaps reshaped."""
    for use in graph.uses(array):
        eqn = graph.eqns[use]
        # A product with an array of one number is a sum, which XLA fuses with its operand.
        summed = eqn.primitive.name == "dot_general" and any(
            graph.constant(a) is not None for a in eqn.invars
        )
        if eqn.primitive.name in _STORING and not summed:
            return True
        if eqn.primitive.name in MOVING and _read_from_memory(graph, eqn.outvars[0]):
            return True
    return False
