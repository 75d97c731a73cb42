"""Rounds the gradient of a normalised 16-bit array once.

The moments of an array, the layers that normalise it, and the means of their results give it
gradients. JAX adds gradients in the array's dtype: with 16 bits it rounds each, and their sum. Most
programs convert the array to float32 before they compute its moments and normalise it, so that JAX
adds in float32.

Here each such call gets the array twice: as its value, without a derivative, and converted to
float32, for the derivative alone. If a convolution's call returns the array and its moments, it
also returns the conversion. Nothing reads the conversion's value, and XLA removes it.

The bias of a convolution takes the sum of its result's gradient. The convolution's derivative reads
the gradient rounded, so it is stored in 16 bits. If its computation is expensive, XLA stores it in
float32 too, and sums and rounds it from there; an optimisation barrier makes the sum read the
rounded array. Otherwise XLA sums it in the pass that rounds it, and needs no barrier. In programs
compiled for an H200, the gradients behind group norm (vectors for each example) and an activation
that does not clip are expensive, those of batch norm are not.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import JaxprEqn, Var
from jax.interpreters import ad

from jaxconv._src import compat
from jaxconv._src.conv import fused
from jaxconv._src.fuse import fuse_layers
from jaxconv._src.fuse.fuse_graph import Graph, is_float, traced, type_of
from jaxconv._src.passes import activated_sums, gated, moments, normalise
from jaxconv._src.problem.epilogue import Epilogue


@dataclasses.dataclass(frozen=True)
class _Operand:
    """An array operand of a call.

    Attributes:
        position, index: the call, and the operand's place among its operands.
        array: the array that the operand is, possibly in another shape.
        moves: the equations that bring it to the operand's shape.
    """

    position: int
    index: int
    array: Var
    moves: tuple[JaxprEqn, ...]


def rewritten(eqns: Sequence[JaxprEqn], outvars: Sequence[Any]) -> list[JaxprEqn]:
    """A program's equations; gradients that calls give to one 16-bit array are added in float32."""
    graph = Graph(eqns, outvars)
    try:
        return graph.with_replaced(_replacements(graph))
    except (TypeError, ValueError, compat.ShardingTypeError):
        return list(graph.eqns)  # arrays of types that this does not know: rounded as by JAX


def _replacements(graph: Graph) -> dict[int, list[JaxprEqn]]:
    """The calls that take or return arrays in float32 too, by the position that they replace."""
    found = [o for at in range(len(graph.eqns)) for o in _operands(graph, at)]
    counts = collections.Counter(o.array for o in found)
    by_call: dict[int, list[_Operand]] = {}
    for operand in found:
        if counts[operand.array] > 1 or _has_statistics(graph, operand.array):
            by_call.setdefault(operand.position, []).append(operand)
    wide: dict[Var, Var] = {}
    placed: dict[int, list[JaxprEqn]] = {}
    for position, of_call in by_call.items():
        placed[position] = []
        for array in (o.array for o in of_call if o.array not in wide):
            wide[array] = compat.variable(type_of(array).update(dtype=np.dtype(np.float32)))
            made = graph.index(array)
            if made is not None and _has_statistics(graph, array):
                placed[made] = _also_wide(graph, made, wide[array])
            else:
                readers = [graph.eqns[o.position] for o in found if o.array is array]
                stored = _has_bias(graph, array) and any(map(_expensive_gradient, readers))
                converted = functools.partial(_converted, stored=stored)
                placed[position] += traced(converted, [array], [wide[array]], graph, position)
        placed[position] += _with_wide(graph, of_call, wide)
    return placed


def _epilogue(graph: Graph, array: Var) -> Epilogue | None:
    """The epilogue of the convolution's call whose first result an array is, or None."""
    made = graph.producer(array)
    if made is None or made.primitive is not fused.conv_fused_p or array is not made.outvars[0]:
        return None
    return made.params["epilogue"]


def _has_statistics(graph: Graph, array: Var) -> bool:
    """Whether an array is the result of a convolution's call that also returns its statistics."""
    epilogue = _epilogue(graph, array)
    return epilogue is not None and epilogue.statistics


def _has_bias(graph: Graph, array: Var) -> bool:
    """Whether an array is the sum of a convolution and a bias, from one call."""
    epilogue = _epilogue(graph, array)
    if epilogue is None or epilogue.residual or epilogue.activation is not None:
        return False
    return epilogue.bias


def _expensive_gradient(reader: JaxprEqn) -> bool:
    """Whether XLA computes the gradient of a call's arrays once for all its readers."""
    if reader.primitive is not normalise.normalise_p:
        return False
    form = reader.params["form"]
    vectors = reader.invars[form.summands :]
    clips = form.activation is None or form.activation.mask is not None
    return not clips and any(len(type_of(v).shape) == 2 for v in vectors)


def _operands(graph: Graph, position: int) -> list[_Operand]:
    """The 16-bit arrays whose moments or sums an equation computes, or which it normalises."""
    eqn = graph.eqns[position]
    if eqn.primitive in (moments.moments_p, activated_sums.activated_sums_p, gated.gated_p):
        count = 1
    elif eqn.primitive is normalise.normalise_p:
        count = eqn.params["form"].arrays
    else:
        return []
    found = []
    for index, array in enumerate(eqn.invars[:count]):
        array, moves = fuse_layers.before_moves(graph, array)
        aval = type_of(array)
        if isinstance(array, Var) and is_float(aval.dtype) and aval.dtype.itemsize == 2:
            found.append(_Operand(position, index, array, moves))
    return found


def _converted(array: jax.Array, stored: bool) -> list[jax.Array]:
    """The array in float32; ``stored``: its readers find the gradient rounded, in memory."""
    return [(lax.optimization_barrier(array) if stored else array).astype(np.float32)]


def _with_wide(graph: Graph, arrays: Sequence[_Operand], wide: Mapping[Var, Var]) -> list[JaxprEqn]:
    """A call whose derivative by some of its operands goes through float32 arrays."""
    position = arrays[0].position
    eqn = graph.eqns[position]

    def bound(*operands: jax.Array) -> list[jax.Array]:
        results = eqn.primitive.bind(*operands, **eqn.params)
        return results if eqn.primitive.multiple_results else [results]

    @jax.custom_jvp
    def call(wide: list[jax.Array], operands: list[jax.Array]) -> list[jax.Array]:
        return bound(*operands)

    @functools.partial(call.defjvp, symbolic_zeros=True)
    def jvp(primals: Any, tangents: Any) -> Any:
        of_wide, of_operands = tangents
        given = list(of_operands)
        for array, tangent in zip(arrays, of_wide, strict=True):
            given[array.index] = tangent
        rule = ad.primitive_jvps[eqn.primitive]
        results, found = rule(primals[1], zeros(given), **eqn.params)
        if not eqn.primitive.multiple_results:
            results, found = [results], [found]
        return results, [ad.instantiate_zeros(t) for t in found]

    def computed(wide: list[jax.Array], operands: list[jax.Array]) -> list[jax.Array]:
        pairs = zip(wide, arrays, strict=True)
        return call([fuse_layers.moved(value, array.moves) for value, array in pairs], operands)

    given = [wide[a.array] for a in arrays], list(eqn.invars)
    return traced(computed, given, eqn.outvars, graph, position)


def _also_wide(graph: Graph, position: int, wide: Var) -> list[JaxprEqn]:
    """A convolution's call that also returns its first result in float32, with its derivative."""
    eqn = graph.eqns[position]

    def with_wide(results: Sequence[Any]) -> list[Any]:
        return [*results, results[0].astype(np.float32)]

    @jax.custom_jvp
    def call(*operands: jax.Array) -> list[jax.Array]:
        return with_wide(fused.conv_fused_p.bind(*operands, **eqn.params))

    @functools.partial(call.defjvp, symbolic_zeros=True)
    def jvp(primals: Any, tangents: Any) -> Any:
        results, found = fused.linearized(primals, zeros(tangents), **eqn.params)
        return with_wide(results), [*fused.rounded(found, results), found[0]]

    return traced(call, tuple(eqn.invars), [*eqn.outvars, wide], graph, position)


def zeros(tangents: Sequence[Any]) -> list[Any]:
    """Tangents as a primitive's rule takes them."""
    return [ad.Zero(t.aval) if isinstance(t, SymbolicZero) else t for t in tangents]
