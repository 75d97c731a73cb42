"""Finds normalised layers whose result is multiplied by a gate, as in squeeze and excitation.

If a ``normalise`` call's result is only multiplied by a factor for each example and channel, the
product becomes a call of ``gated``, whose derivative sums in one pass. The mean of the result, from
which the program computes the gate, is a call of ``activated_sums`` and does not read the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Var

from jaxconv._src import compat
from jaxconv._src.fuse import fuse_affine, fuse_axes, fuse_convolution, fuse_layers
from jaxconv._src.fuse.fuse_affine import Affine
from jaxconv._src.fuse.fuse_graph import Graph, traced, type_of
from jaxconv._src.passes import gated, normalise

# Equations between a layer's result and its product with the gate, and that product.
_LEADING = (*fuse_layers.MOVING, "broadcast_in_dim", "convert_element_type", "mul", "div")


def rewritten(eqns: Sequence[JaxprEqn], outvars: Sequence[Any]) -> list[JaxprEqn]:
    """A program's equations, with the products of layers and gates as calls, on a GPU.

    The replaced equations remain, without uses.
    """
    graph = Graph(eqns, outvars)
    placed: dict[int, list[JaxprEqn]] = {}
    for eqn in graph.eqns if fuse_convolution.for_cuda() else ():
        product = _product(graph, eqn) if eqn.primitive is normalise.normalise_p else None
        if product is None:
            continue
        out, value = product
        position = graph.index(out)
        assert position is not None, "an equation computes the product"
        try:
            placed[position] = _call(graph, eqn, out, value, position)
        except (TypeError, ValueError, compat.ShardingTypeError):
            continue  # unknown array types: the program's operations stay
    return graph.with_replaced(placed)


def _product(graph: Graph, layer: JaxprEqn) -> tuple[Var, Affine] | None:
    """The product of a layer's result with a gate, and the product as a function of the result."""
    z, form = layer.outvars[0], layer.params["form"]
    shape, y = type_of(z).shape, type_of(layer.invars[0])
    if len(layer.outvars) > 1 or not fuse_layers.in_memory(graph, layer.invars[0]):
        return None
    reader = fuse_affine.Reader(graph, lambda _: len(shape) - 1, lambda value: value is z)
    found, value = None, z
    while value not in graph.returned and len(uses := graph.uses(value)) == 1:
        eqn = graph.eqns[uses[0]]
        if eqn.primitive.name not in _LEADING:
            break
        (value,) = eqn.outvars
        if type_of(value).dtype != form.dtype or type_of(value).size != type_of(z).size:
            continue
        affine = reader.read(value)
        if _gates(affine, z):
            found = value, affine
    if found is None or not gated.accepts(form, shape, y.dtype):
        return None
    # The derivative sums the gradient that the product's reader writes to memory.
    readers = fuse_layers.readers_of(graph, found[0])
    alone = len(readers) == 1 and fuse_layers.writes_gradient(graph, readers[0])
    return found if alone else None


def _gates(affine: Affine, z: Var) -> bool:
    """Whether a value is z times a factor that varies over examples."""
    if len(affine.terms) != 1:
        return False
    (term,) = affine.terms
    factor = term.scale
    scaled = term.array is z and term.mean is None and term.offset is None
    return scaled and factor is not None and factor.examples


def _call(graph: Graph, layer: JaxprEqn, out: Var, value: Affine, position: int) -> list[JaxprEqn]:
    """The equations of a call, with the reshapes and transposes of its result."""
    factor = value.terms[0].scale
    assert factor is not None, "a gate"
    atoms = list(dict.fromkeys(a for a in factor.atoms if isinstance(a, Var)))
    shape = type_of(layer.outvars[0]).shape

    def call(operands: list[jax.Array], given: list[jax.Array]) -> list[jax.Array]:
        gate = factor.value(dict(zip(atoms, given, strict=True)))
        gate = jnp.broadcast_to(gate, (shape[0], shape[-1]))
        r = gated.gated(*operands, gate, form=layer.params["form"])
        return [fuse_axes.arranged(r, fuse_axes.of(shape, len(shape) - 1), value.axes)]

    return traced(call, (list(layer.invars), atoms), [out], graph, position)
