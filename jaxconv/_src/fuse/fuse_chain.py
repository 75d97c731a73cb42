"""Finds the chain of elementwise operations after a convolution that its epilogue can compute.

``follow`` follows the convolution's result from operation to operation while each value has one
use:

    conversions between floating-point types, reshapes that add or drop axes of extent 1
    products, quotients, sums and differences with one number a channel  -> scale and bias
    one sum with an array of the result's shape                          -> residual
    one activation                                                       -> activation

and returns the longest prefix that one ``conv_fused`` computes with no more roundings than the
program. The fused program does not compute the values inside this prefix, with one exception: the
activation's operand may have other uses, for example in its derivative. It then becomes a second
result of the call, unless all other uses are comparisons that may read the activation's result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Var

from jaxconv._src.fuse import fuse_activations, fuse_convolution, fuse_statistics
from jaxconv._src.fuse.fuse_activations import Activation
from jaxconv._src.fuse.fuse_convolution import Convolution
from jaxconv._src.fuse.fuse_graph import (
    IDENTITIES,
    Graph,
    Vector,
    is_float,
    renumbered_axis,
    type_of,
)
from jaxconv._src.fuse.fuse_statistics import Moment

_WIDTH = {"float16": 2, "bfloat16": 2, "float32": 4}

# Constants are multiplied together into one scale and one bias only while every product lies
# between 2^-64 and 2^64, half of float32's exponent range. The program applies them to its values
# one by one, so their product could overflow or underflow although none of the program's values
# does.
_COLLECTED = 2.0**64


@dataclasses.dataclass(frozen=True)
class Term:
    """One operation of the affine part.

    Attributes:
        op: mul, div, add, sub, rsub (vector - value) or neg.
        vector: the other operand; None for neg.
    """

    op: str
    vector: Vector | None


@dataclasses.dataclass(frozen=True)
class Chain:
    """A prefix of the operations after a convolution, up to the variable ``out``.

    Attributes:
        out: the variable that the call computes.
        axis: the axis of channels of ``out``.
        terms: the operations that form scale and bias, in the program's order.
        residual: an array of the result's shape, or None.
        activation: its name, or None.
        pre, activated: the activation's operand and result, or None.
        last: position of the last equation with an operand from outside the chain.
        taken: positions of the equations that the call computes.
        widened: whether the last step is a conversion to a wider type.
    """

    out: Var
    axis: int
    terms: tuple[Term, ...] = ()
    residual: Any = None
    activation: Activation | None = None
    pre: Var | None = None
    activated: Var | None = None
    last: int = 0
    taken: frozenset[int] = frozenset()
    widened: bool = False

    @property
    def useful(self) -> bool:
        return bool(self.scales or self.shifts or self.residual is not None or self.activation)

    @property
    def scales(self) -> bool:
        """Whether the terms contain a scale; an even number of sign changes is none."""
        ops = [t.op for t in self.terms]
        negative = (ops.count("neg") + ops.count("rsub")) % 2 == 1
        return negative or "mul" in ops or "div" in ops

    @property
    def shifts(self) -> bool:
        """Whether the terms contain a bias."""
        return any(t.op in ("add", "sub", "rsub") for t in self.terms)

    @property
    def rounds_more(self) -> bool:
        """Whether the call rounds more often than the program's operations.

        The call rounds after the scale, after the bias, and once for each product or quotient that
        the scale itself is computed by.
        """
        ops = [t.op for t in self.terms if t.op != "neg"]
        products, quotients = ops.count("mul"), ops.count("div")
        sums = len(ops) - products - quotients
        scale = max(products + quotients - 1, 0) if products else quotients
        return scale + (products + quotients > 0) + (sums > 0) > len(ops)


@dataclasses.dataclass(frozen=True)
class Fusion:
    """A chain that one call replaces.

    Attributes:
        conv: the convolution.
        chain: the fused operations.
        residual: the residual in the dtype of the result, or None.
        redirected: positions of comparisons of the activation's operand that may read the
            activation's result instead.
        compared: positions of comparisons of the activation's result with its operand or a value in
            between. They must read the activation of the rounded operand instead of the result.
        keeps_pre: whether the activation's operand may be a second result.
        moments: the sums over the result that follow from its statistics. If there are any, the
            call also returns statistics.
    """

    conv: Convolution
    chain: Chain
    residual: Any
    redirected: tuple[int, ...] = ()
    compared: tuple[int, ...] = ()
    keeps_pre: bool = False
    moments: tuple[Moment, ...] = ()

    @property
    def position(self) -> int:
        """The position of the equation that the call replaces; all operands exist there."""
        return max(self.chain.last, self.conv.position)


def follow(graph: Graph, conv: Convolution, taken: Set[int]) -> tuple[Fusion | None, str]:
    """The chain after a convolution, and the reason why it ends.

    Args:
        graph: the program.
        conv: the convolution.
        taken: positions of equations that belong to other calls.

    Returns:
        The fusion, or None; and the reason why the next operation is not part of it, or "" if no
        following operation could be.
    """
    (out,) = graph.eqns[conv.position].outvars
    chain = Chain(out, conv.channel_axis, last=conv.position)
    walk = [chain]
    while not isinstance(step := _step(graph, chain, taken), str):
        chain = step
        walk.append(chain)
    reason = step if not chain.useful or _elementwise(graph, chain.out) else ""
    for chain in reversed(walk):
        if not chain.useful:
            break
        fusion = _complete(graph, conv, chain)
        if not isinstance(fusion, str):
            return fusion, reason
        reason = fusion or reason
    return None, reason


def with_statistics(graph: Graph, conv: Convolution, fusion: Fusion | None) -> Fusion | None:
    """The fusion with ``moments``, or None if no sums follow from the result's statistics.

    Args:
        graph: the program.
        conv: the convolution.
        fusion: the chain after the convolution, or None for the convolution alone.
    """
    if fusion is None:
        (out,) = graph.eqns[conv.position].outvars
        if type_of(out).dtype not in (type_of(conv.x).dtype, np.float32):
            return None
        fusion = Fusion(conv, Chain(out, conv.channel_axis, last=conv.position), None)
    moments = fuse_statistics.find(graph, fusion.chain.out, fusion.chain.axis)
    return dataclasses.replace(fusion, moments=tuple(moments)) if moments else None


def _elementwise(graph: Graph, value: Var) -> bool:
    """Whether an operation that keeps the shape, and is no convolution, reads a value."""
    eqns = (graph.eqns[i] for i in graph.uses(value))
    return any(
        eqn.primitive.name not in fuse_convolution.NAMES
        and any(getattr(type_of(v), "shape", None) == type_of(value).shape for v in eqn.outvars)
        for eqn in eqns
    )


def _step(graph: Graph, chain: Chain, taken: Set[int]) -> Chain | str:
    """The chain with one more operation, or why there is none."""
    value = chain.out
    if chain.activation is None and is_float(type_of(value).dtype):
        found = fuse_activations.find(graph, value)
        if found is not None and graph.index(found[0]) not in taken:
            out, activation = found
            position = graph.index(out)
            assert position is not None
            return dataclasses.replace(
                chain,
                out=out,
                activation=activation,
                pre=value,
                activated=out,
                taken=chain.taken | {position},
                widened=False,
            )
    uses = graph.uses(value)
    if value in graph.returned:
        return f"{fuse_convolution.RETURNED} and used" if uses else fuse_convolution.RETURNED
    if not uses:
        return "its result is not used"
    if len(uses) > 1:
        names = sorted({graph.eqns[i].primitive.name for i in uses})
        return f"its result has {len(uses)} uses ({', '.join(names)})"
    if uses[0] in taken:
        return "its result is the residual of another convolution"
    rule = _RULES.get(graph.eqns[uses[0]].primitive.name)
    if rule is None:
        return f"{graph.eqns[uses[0]].primitive.name} follows"
    after = rule(graph, chain, graph.eqns[uses[0]], uses[0])
    if isinstance(after, str):
        return after
    return dataclasses.replace(after, taken=chain.taken | {uses[0]})


# --- one rule for each operation: the chain that includes it, or why it is not part of one ---


def _identity(graph: Graph, chain: Chain, eqn: JaxprEqn, position: int) -> Chain:
    return dataclasses.replace(chain, out=eqn.outvars[0])


def _convert(graph: Graph, chain: Chain, eqn: JaxprEqn, position: int) -> Chain | str:
    before, after = type_of(chain.out).dtype, type_of(eqn.outvars[0]).dtype
    if not is_float(after):
        return f"a conversion to {np.dtype(after).name} follows"
    widened = _WIDTH[np.dtype(after).name] > _WIDTH[np.dtype(before).name]
    return dataclasses.replace(chain, out=eqn.outvars[0], widened=widened)


def _reshape(graph: Graph, chain: Chain, eqn: JaxprEqn, position: int) -> Chain | str:
    (out,) = eqn.outvars
    before, after = type_of(chain.out).shape, type_of(out).shape
    axis = renumbered_axis(before, after, chain.axis)
    reordered = eqn.primitive.name == "reshape" and eqn.params["dimensions"] is not None
    if len(eqn.invars) > 1 or axis is None or reordered:
        return f"{eqn.primitive.name} follows"
    return dataclasses.replace(chain, out=out, axis=axis)


def _broadcast(graph: Graph, chain: Chain, eqn: JaxprEqn, position: int) -> Chain | str:
    places = list(eqn.params["broadcast_dimensions"])
    if len(eqn.invars) > 1 or places != sorted(places):
        return "broadcast_in_dim follows"
    return _reshape(graph, chain, eqn, position)


def _affine(graph: Graph, chain: Chain, eqn: JaxprEqn, position: int) -> Chain | str:
    """A product, quotient, sum or difference."""
    name = {"add_any": "add"}.get(eqn.primitive.name, eqn.primitive.name)
    (out,) = eqn.outvars
    if chain.activation is not None:
        return f"{name} follows the activation"
    if type_of(out).shape != type_of(chain.out).shape:
        return f"{name} with an array of another shape follows"
    first = eqn.invars[0] is chain.out
    other = eqn.invars[1] if first else eqn.invars[0]
    after = dataclasses.replace(chain, out=out, last=max(chain.last, position), widened=False)
    vector = graph.channel_vector(other, type_of(chain.out).shape, chain.axis)
    if vector is None:
        return _with_residual(after, name, other)
    if name == "div" and not first:
        return "a number divided by it follows"
    if chain.residual is not None and (name in ("mul", "div") or (name == "sub" and not first)):
        return "a scale follows the residual"
    if chain.residual is not None and type_of(chain.out).dtype == np.float32:
        return "a bias follows the residual in float32, and another order would round differently"
    op = "rsub" if name == "sub" and not first else name
    terms = (*chain.terms, Term(op, vector))
    if not _collectable(graph, terms):
        return f"{name} with a number follows whose product with the others is too large or small"
    return dataclasses.replace(after, terms=terms)


def _collectable(graph: Graph, terms: tuple[Term, ...]) -> bool:
    """Whether products of the known numbers among the terms stay within ``_COLLECTED``.

    Vectors unknown at trace time count as 1. A single product passes with any number, because the
    program computes the same product.
    """
    least = most = 1.0
    summand = 0.0
    for term in terms:
        sizes = None if term.vector is None else graph.magnitudes(term.vector.atom)
        if sizes is None:
            continue
        if term.op in ("mul", "div"):
            low, high = sizes if term.op == "mul" else (1 / sizes[1], 1 / sizes[0])
            least, most, summand = least * low, most * high, summand * high
        elif len(terms) > 1:
            summand = max(summand, sizes[1])
    alone = [t.op for t in terms if t.op in ("mul", "div")] == ["mul"] and terms[0].op == "mul"
    return alone or (least >= 1 / _COLLECTED and max(most, summand) <= _COLLECTED)


def _with_residual(after: Chain, name: str, other: Any) -> Chain | str:
    if name != "add":
        return f"{name} with an array that is no vector of channels follows"
    if type_of(other).shape != type_of(after.out).shape:
        return "a sum with an array that is neither a vector of channels nor of its shape follows"
    if after.residual is not None:
        return "a second residual follows"
    return dataclasses.replace(after, residual=other)


def _negate(graph: Graph, chain: Chain, eqn: JaxprEqn, position: int) -> Chain | str:
    if chain.activation is not None or chain.residual is not None:
        return "neg follows"
    terms = (*chain.terms, Term("neg", None))
    return dataclasses.replace(chain, out=eqn.outvars[0], terms=terms, widened=False)


_RULES: dict[str, Callable[[Graph, Chain, JaxprEqn, int], Chain | str]] = {
    **dict.fromkeys(IDENTITIES, _identity),
    "convert_element_type": _convert,
    **dict.fromkeys(("reshape", "squeeze"), _reshape),
    "broadcast_in_dim": _broadcast,
    **dict.fromkeys(("add", "add_any", "sub", "mul", "div"), _affine),
    "neg": _negate,
}


# --- whether a chain is one call ---


def _complete(graph: Graph, conv: Convolution, chain: Chain) -> Fusion | str:
    """The fusion of a chain, or why the chain must be shorter ("" if that costs nothing)."""
    operand, out = type_of(conv.x).dtype, type_of(chain.out).dtype
    if chain.widened:
        return ""  # XLA converts where the value is read; the call would write twice the bytes
    (whole,) = graph.eqns[conv.position].outvars
    if out not in (operand, np.float32):
        return f"a conversion to {np.dtype(out).name} follows"
    if _WIDTH[np.dtype(out).name] > _WIDTH[np.dtype(type_of(whole).dtype).name]:
        # XLA computes the wider part where it is read, from 16-bit values.
        return f"it goes on in {np.dtype(out).name}"
    values = [whole, *(graph.eqns[i].outvars[0] for i in chain.taken)]
    if chain.rounds_more and all(type_of(v).dtype == np.float32 for v in values):
        return "a division by a vector in float32 would be rounded once more"
    residual = chain.residual
    if residual is not None and type_of(residual).dtype != out:
        converted = graph.producer(residual)
        if converted is None or converted.primitive.name != "convert_element_type":
            converted = None
        source = converted.invars[0] if converted is not None else residual
        if type_of(source).dtype != out or type_of(residual).dtype != np.float32:
            return (
                f"the residual is {np.dtype(type_of(residual).dtype).name}, "
                f"the result {np.dtype(out).name}"
            )
        residual = source
    redirected: list[int] = []
    compared: list[int] = []
    keeps_pre = False
    if chain.pre is not None:
        pre = chain.pre
        keeps_pre = type_of(pre).dtype == out
        if keeps_pre:
            redirected = [
                i
                for i in graph.uses(pre)
                if fuse_activations.comparable(graph, i, pre, chain.activation)
            ]
            if chain.activated is chain.out:
                compared = fuse_activations.compared(graph, pre, chain.out)
        elif _kept(graph, chain):
            return (
                f"the activation's operand, {np.dtype(type_of(pre).dtype).name}, has other uses "
                f"and would be rounded to {np.dtype(out).name}"
            )
    return Fusion(conv, chain, residual, tuple(redirected), tuple(compared), keeps_pre)


def _kept(graph: Graph, chain: Chain) -> bool:
    """Whether the activation's operand, or a value inside the activation, has other uses."""
    assert chain.pre is not None
    if chain.pre in graph.returned:
        return True
    assert chain.activated is not None
    inside = _between(graph, chain.pre, chain.activated)
    return any(i not in inside for i in graph.uses(chain.pre)) or any(
        out in graph.returned or any(u not in inside for u in graph.uses(out))
        for i in inside
        for out in graph.eqns[i].outvars
        if out is not chain.activated
    )


def _between(graph: Graph, start: Var, end: Var) -> set[int]:
    """Positions of the equations that compute ``end`` from ``start``."""
    first, found, stack = graph.index(start), set(), [end]
    while stack:
        position = graph.index(stack.pop())
        if position is None or position in found or (first is not None and position <= first):
            continue
        eqn = graph.eqns[position]
        found.add(position)
        stack += [a for a in eqn.invars if isinstance(a, Var) and a is not start]
    return found


# --- the call ---


def affine(
    terms: tuple[Term, ...], vectors: list[Any], channels: int
) -> tuple[jax.Array | None, jax.Array | None]:
    """Combines terms into scale and bias, float32 (channels,); None for scale 1 or bias 0.

    Args:
        terms: the operations, in the program's order.
        vectors: the arrays of the terms that have a vector.
        channels: the number of channels.
    """
    product: Any = None
    quotient: Any = None
    bias: Any = None
    negative = False
    arrays = iter(vectors)

    def times(a: Any, b: Any) -> Any:
        return b if a is None else a * b

    for term in terms:
        if term.op in ("neg", "rsub"):
            negative = not negative
            bias = None if bias is None else -bias
        if term.vector is None:
            continue
        v = term.vector.read(next(arrays), channels)
        if term.op == "mul":
            product = times(product, v)
            bias = None if bias is None else bias * v
        elif term.op == "div":
            quotient = times(quotient, v)
            bias = None if bias is None else bias / v
        elif term.op == "sub":
            bias = -v if bias is None else bias - v
        else:
            bias = v if bias is None else bias + v
    scale = product
    if quotient is not None:
        scale = (1.0 if product is None else product) / quotient
    if negative:
        scale = -jnp.ones(channels, jnp.float32) if scale is None else -scale
    return scale, bias
