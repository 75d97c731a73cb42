"""Finds where one call of ``masked_sums`` masks a gradient and forms the sums of batch norm.

The call reads memory: its operands must be there anyway. A gradient that is another elementwise
operation's result would be stored for it, which costs more than the call saves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Var

from jaxconv._src.conv import fused
from jaxconv._src.fuse.fuse_graph import Graph, Vector, traced, type_of
from jaxconv._src.passes import masked_sums, max_pooling
from jaxconv._src.passes.masked_sums import MaskedBy, Sums

# What makes gradients that are in memory.
STORED = {
    "conv_general_dilated",
    "dot_general",
    "jaxconv_dgrad",
    "jaxconv_fprop",
    fused.conv_fused_p.name,
    max_pooling.max_pool_gradient_p.name,
}


@dataclasses.dataclass(frozen=True)
class Call:
    """A call in place of a selection and of the sums over it.

    Attributes:
        position: of the selection.
        form: what the call computes.
        arrays: the gradients, then the arrays that the masked gradient is multiplied by.
        vectors: the arrays' means, then scale and offset of an affine form.
        result: the activation's.
    """

    position: int
    form: Sums
    arrays: tuple[Any, ...]
    vectors: tuple[Vector, ...]
    result: Var

    def equations(self, graph: Graph, sums: Sequence[tuple[int, Var]]) -> list[JaxprEqn]:
        """The call, for sums by their number, and the selection's result where it is stored."""
        selected = graph.eqns[self.position].outvars
        channels = type_of(selected[0]).shape[-1]
        form, vectors = self.form, self.vectors

        def call(arrays: list[jax.Array], given: list[Any], result: jax.Array) -> list[Any]:
            read = [v.read(a, channels) for v, a in zip(vectors, given, strict=True)]
            of_mask = [result] * (form.masked_by == "result")
            found = masked_sums.masked_sums(*arrays, *read, *of_mask, form=form)
            parts = [lax.index_in_dim(found[-1], i, 0, keepdims=False) for i, _ in sums]
            return [*found[:-1], *parts]

        operands = list(self.arrays), [v.atom for v in vectors], self.result
        results = [*selected * form.stores, *(v for _, v in sums)]
        return traced(call, operands, results, graph, self.position)


def find(
    graph: Graph,
    position: int,
    comparisons: Sequence[int],
    operand: Var,
    result: Var,
    others: Sequence[Any],
    stores: bool,
    held: set[Any],
) -> Call | None:
    """The call for a selection, or None where there is none.

    Args:
        graph: the program.
        position: of the selection between an array and zeros, of 16 bits.
        comparisons: positions of the comparisons whose conjunction it selects by.
        operand: what they compare, an activation's operand.
        result: the activation's result, which is in memory.
        others: what the selected array is multiplied by, an array in float32 for each sum.
        stores: whether the selected array is used besides.
        held: arrays that are in memory for other reasons.
    """
    _, on_false, gradient = graph.eqns[position].invars
    aval = type_of(gradient)
    bounds = _bounds(graph, comparisons, operand)
    if bounds is None or graph.constant(on_false) != 0.0:
        return None
    gradients = summands(graph, gradient)
    if not all(in_memory(graph, g, held) for g in gradients):
        return None
    centred = [_centred(graph, other, aval) for other in others]
    if any(c is None for c in centred):
        return None
    arrays, means = zip(*[c for c in centred if c is not None], strict=True)
    affine: tuple[Vector, ...] = ()
    if not stores and len(gradients) == len(arrays) == 1:
        affine = _affine(graph, operand, others[0], aval)
    masked_by: MaskedBy = "affine" if affine else "result"
    form = Sums(len(gradients), len(arrays), masked_by, stores, *bounds)
    vectors = *means, *affine
    read = [*gradients, *arrays, *(v.atom for v in vectors), result]
    made = [graph.index(a) for a in read]
    if any(at is not None and at >= position for at in made):
        return None
    if not masked_sums.accepts(form, aval.shape, aval.dtype):
        return None
    return Call(position, form, (*gradients, *arrays), vectors, result)


@dataclasses.dataclass(frozen=True)
class Pooled:
    """The gradient of pooling behind batch norm and relu, which a call of kernels computes.

    An element is not 0 only where windows have their places, so that its sums over positions are
    sums over the windows, of smaller arrays.

    Attributes:
        position: of the call of ``max_pool_gradient``.
        gradients: of the maxima.
        y: batch norm's operand.
        operands: y at the places.
        maxima: where they are not above 0, the window has no place.
    """

    position: int
    gradients: tuple[Any, ...]
    y: Any
    operands: Var
    maxima: Var


def pooled(graph: Graph, array: Any) -> Pooled | None:
    """What gives an array, where that is such a gradient."""
    made = graph.producer(array)
    if made is None or made.primitive is not max_pooling.max_pool_gradient_p:
        return None
    gradients = made.invars[: made.params["gradients"]]
    pool = graph.producer(made.invars[len(gradients)])
    if pool is None or pool.primitive is not max_pooling.max_pool_p:
        return None
    if not (pool.params["form"].affine and pool.params["form"].operands):
        return None
    maxima, _, operands = pool.outvars
    position = graph.index(made.outvars[0])
    assert position is not None
    return Pooled(position, tuple(gradients), graph.source(pool.invars[0]), operands, maxima)


def of_pooled(graph: Graph, gradient: Pooled, others: Sequence[Any]) -> Call | None:
    """The call that forms a pooled gradient's sums, or None where there is none.

    Args:
        graph: the program.
        gradient: what is summed.
        others: what it is multiplied by, an array in float32 for each sum.
    """
    if len(others) != 1:
        return None
    centred = _centred(graph, others[0], type_of(gradient.y))
    if centred is None or centred[0] is not gradient.y:
        return None
    form = Sums(len(gradient.gradients), 1, "result", stores=False, above=0.0, below=None)
    aval = type_of(gradient.maxima)
    if not masked_sums.accepts(form, aval.shape, aval.dtype):
        return None
    made = graph.index(centred[1].atom)
    if made is not None and made >= gradient.position:
        return None
    arrays = *gradient.gradients, gradient.operands
    return Call(gradient.position, form, arrays, (centred[1],), gradient.maxima)


def _bounds(
    graph: Graph, comparisons: Sequence[int], operand: Var
) -> tuple[float, float | None] | None:
    """Between what an operand is where all comparisons hold: one from below, at most one more."""
    above: list[float] = []
    below: list[float] = []
    for position in comparisons:
        eqn = graph.eqns[position]
        left, right = eqn.invars
        number = graph.constant(right if left is operand else left)
        if number is None:
            return None
        greater = (eqn.primitive.name == "gt") == (left is operand)
        (above if greater else below).append(number)
    if len(above) != 1 or len(below) > 1:
        return None
    return above[0], below[0] if below else None


def summands(graph: Graph, gradient: Any) -> list[Any]:
    """The two gradients that one is the sum of, or itself."""
    made = graph.producer(gradient)
    if made is not None and made.primitive.name in ("add", "add_any"):
        summands = [graph.source(a) for a in made.invars]
        if all(type_of(a).shape == type_of(gradient).shape for a in summands):
            return summands
    return [graph.source(gradient)]


def in_memory(graph: Graph, atom: Any, held: Container[Any] = ()) -> bool:
    """Whether an array is, in any program, or among those that are in this one."""
    made = graph.producer(atom)
    return made is None or atom in held or made.primitive.name in STORED


def _centred(graph: Graph, other: Any, like: Any) -> tuple[Any, Vector] | None:
    """The array and the vector whose difference, in float32, an array is."""
    made = graph.producer(other)
    if made is None or made.primitive.name != "sub":
        return None
    wide, subtracted = made.invars
    mean = graph.channel_vector(subtracted, like.shape, len(like.shape) - 1)
    converted = graph.producer(wide)
    if mean is None or converted is None or converted.primitive.name != "convert_element_type":
        return None
    array = graph.source(converted.invars[0])
    aval = type_of(array)
    if (aval.shape, aval.dtype) != (like.shape, like.dtype) or not isinstance(array, Var):
        return None
    return array, mean


def _affine(graph: Graph, operand: Any, centred: Any, like: Any) -> tuple[Vector, ...]:
    """Scale and offset with operand = centred * scale + offset, computed in float32, or ()."""
    found = _scaled(graph, operand, like)
    return found[1] if found and graph.source(found[0]) is graph.source(centred) else ()


def _scaled(graph: Graph, operand: Any, like: Any) -> tuple[Any, tuple[Vector, ...]] | None:
    """An array, scale and offset with operand = array * scale + offset, computed in float32."""
    converted = graph.producer(operand)
    if converted is None or converted.primitive.name != "convert_element_type":
        return None
    found: list[Vector] = []
    atom = converted.invars[0]
    for name in ("add", "mul"):
        made = graph.producer(atom)
        if made is None or made.primitive.name != name:
            return None
        if type_of(made.outvars[0]).dtype != np.float32:
            return None
        read = [graph.channel_vector(a, like.shape, len(like.shape) - 1) for a in made.invars]
        vector = read[1] or read[0]
        if vector is None:
            return None
        found.insert(0, vector)
        atom = made.invars[0] if read[1] else made.invars[1]
    return atom, tuple(found)


def normalised(graph: Graph, operand: Any) -> tuple[Var, tuple[Vector, ...]] | None:
    """Where an array of 16 bits is batch norm of one: that one, and mean, scale and offset.

    It is (array - mean) * scale + offset, computed in float32, channels last.
    """
    aval = type_of(operand)
    found = _scaled(graph, operand, aval)
    centred = None if found is None else _centred(graph, found[0], aval)
    if found is None or centred is None:
        return None
    array, mean = centred
    return array, (mean, *found[1])
