"""Expresses values between convolutions as centred affine functions of a few arrays.

    value = sum over arrays i of (y_i - mean_i) * scale_i + offset_i

with coefficients that vary over channels, or over examples and channels. The program may contain
any products, quotients, sums, conversions, broadcasts and reshapes. A coefficient stays an
expression in the program's own vectors; ``Coefficient.value`` computes it in float32.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal, Var

from jaxconv._src.fuse import fuse_axes
from jaxconv._src.fuse.fuse_axes import CHANNELS, EXAMPLES, POSITIONS, Axes
from jaxconv._src.fuse.fuse_graph import IDENTITIES, Graph, is_float, type_of

# Coefficients absorb constant factors between 1 / _LARGEST and _LARGEST.
_LARGEST = 2.0**24

# The maximum recursion depth over nested operations.
_DEEPEST = 64


# --- coefficients ---


@dataclasses.dataclass(frozen=True)
class Coefficient:
    """One number for each channel, or for each example and channel.

    Attributes:
        atoms: the program's arrays from which the coefficient is computed.
        examples: whether the coefficient varies over examples.
        compute: its float32 value from these arrays: a scalar, (C,) or (N, C).
        number: its value if it is a constant number of the program, else None.
    """

    atoms: tuple[Any, ...]
    examples: bool
    compute: Callable[[Sequence[Any]], Any]
    number: float | None = None

    def value(self, arrays: Mapping[Any, Any]) -> Any:
        """The coefficient, from the values of variables."""
        return self.compute([a.val if isinstance(a, Literal) else arrays[a] for a in self.atoms])


def number(value: float) -> Coefficient:
    return Coefficient((), False, lambda values: np.float32(value), value)


def combined(function: Callable[..., Any], *operands: Coefficient) -> Coefficient:
    """A coefficient that is a function of others."""
    numbers = [o.number for o in operands if o.number is not None]
    if len(numbers) == len(operands):
        with np.errstate(all="ignore"), jax.ensure_compile_time_eval():
            return number(float(function(*map(np.float32, numbers))))
    ends: list[int] = [0]
    atoms: list[Any] = []
    for operand in operands:
        atoms += operand.atoms
        ends.append(len(atoms))

    def compute(values: Sequence[Any]) -> Any:
        parts = zip(operands, ends, ends[1:], strict=False)
        return function(*(o.compute(values[start:end]) for o, start, end in parts))

    return Coefficient(tuple(atoms), any(o.examples for o in operands), compute)


def _sum(a: Coefficient | None, b: Coefficient | None) -> Coefficient | None:
    if a is None or b is None:
        return a if b is None else b
    found = combined(lambda x, y: x + y, a, b)
    return None if found.number == 0 else found


def _product(a: Coefficient | None, b: Coefficient | None) -> Coefficient | None:
    """A product; None stands for 1."""
    if a is None or b is None:
        return a if b is None else b
    found = combined(lambda x, y: x * y, a, b)
    return None if found.number == 1 else found


MINUS_ONE = number(-1.0)


# Elementwise operations inside a coefficient, for programs that broadcast vectors first and then
# compute with the full arrays.
_OF_COEFFICIENTS: dict[str, Callable[..., Any]] = {
    "add": lax.add,
    "sub": lax.sub,
    "mul": lax.mul,
    "div": lax.div,
    "neg": lax.neg,
    "rsqrt": lax.rsqrt,
    "sqrt": lax.sqrt,
}


def coefficient(
    graph: Graph, atom: Any, axes: Axes, counts: tuple[int, int], depth: int = 0
) -> Coefficient | None:
    """An operand with these axes as a coefficient, or None if it varies over positions.

    Args:
        graph: the program.
        atom: the operand.
        axes: the operand's axes.
        counts: the numbers of examples and channels.
        depth: the recursion depth.
    """
    known = graph.constant(atom)
    if known is not None:
        return number(known)
    casts: list[np.dtype] = []
    size = math.prod(fuse_axes.shape_of(axes))
    if len(type_of(atom).shape) != len(axes):
        return None
    # Axes of extent 1 are broadcast.
    axes = tuple(() if e == 1 else axis for e, axis in zip(type_of(atom).shape, axes, strict=True))
    while (made := graph.producer(atom)) is not None:
        name, operand = made.primitive.name, made.invars[0] if made.invars else None
        if name == "convert_element_type" and is_float(type_of(operand).dtype):
            casts.append(np.dtype(made.params["new_dtype"]))
        elif reshapes(made):
            before = fuse_axes.reshaped(axes, type_of(operand).shape)
            if before is None:
                return None
            axes = before
        elif name == "transpose":
            axes = fuse_axes.untransposed(axes, made.params["permutation"])
        elif name == "broadcast_in_dim" and len(made.invars) == 1:
            places = made.params["broadcast_dimensions"]
            axes = tuple(
                () if extent == 1 else axes[place]
                for extent, place in zip(type_of(operand).shape, places, strict=True)
            )
        else:
            break
        atom = operand
    atom = graph.source(atom)
    if not is_float(getattr(type_of(atom), "dtype", bool)):
        return None
    if all(d.what != POSITIONS for axis in axes for d in axis) and type_of(atom).size < size:
        return _leaf(atom, axes, tuple(reversed(casts)), counts)
    function = None if made is None else _OF_COEFFICIENTS.get(made.primitive.name)
    if made is None or function is None or depth > _DEEPEST or casts:
        return None
    operands = [coefficient(graph, a, axes, counts, depth + 1) for a in made.invars]
    found = [o for o in operands if o is not None]
    return combined(function, *found) if len(found) == len(operands) else None


def reshapes(eqn: JaxprEqn) -> bool:
    """Whether an equation only changes its operand's shape, not the order of elements."""
    name = eqn.primitive.name
    if len(eqn.invars) > 1 or (name == "reshape" and eqn.params["dimensions"] is not None):
        return False
    if name == "broadcast_in_dim":
        places = list(eqn.params["broadcast_dimensions"])
        same = type_of(eqn.invars[0]).size == type_of(eqn.outvars[0]).size
        return same and places == sorted(places)
    return name in ("reshape", "squeeze")


def _leaf(
    atom: Any, axes: Axes, casts: tuple[np.dtype, ...], counts: tuple[int, int]
) -> Coefficient | None:
    """An array of the program as a coefficient."""
    given = [d for axis in axes for d in axis]
    digits = fuse_axes.in_order(given)
    kinds = [[d for d in digits if d.what == what] for what in (EXAMPLES, CHANNELS)]
    of_examples = bool(kinds[0])
    extents: list[int] = []
    for kind, count in zip(kinds, counts, strict=True):
        if kind is not kinds[0] or of_examples:
            extents += fuse_axes.refined(kind, count)
    # ``refined`` alternates gaps between digits with digits; the array is repeated in the gaps.
    ends = [len(fuse_axes.refined(k, 1)) for k in (kinds if of_examples else kinds[1:])]
    repeated = [i % 2 == 0 for end in ends for i in range(end)]
    shape = (*counts,) if of_examples else counts[1:]

    def compute(values: Sequence[Any]) -> Any:
        array = jnp.asarray(values[0])
        for dtype in casts:
            array = array.astype(dtype)
        array = array.astype(np.float32)
        if not digits:
            return array.reshape(())
        order = [given.index(d) for d in digits]
        if order != sorted(order):
            array = array.reshape([d.extent for d in given]).transpose(order)
        apart = [1 if again else e for again, e in zip(repeated, extents, strict=True)]
        return jnp.broadcast_to(array.reshape(apart), extents).reshape(shape)

    return Coefficient((atom,), of_examples, compute)


# --- values ---


@dataclasses.dataclass(frozen=True)
class Term:
    """A summand (array - mean) * scale + offset; None stands for mean 0, scale 1 and offset 0."""

    array: Var
    mean: Coefficient | None = None
    scale: Coefficient | None = None
    offset: Coefficient | None = None

    @property
    def plain(self) -> bool:
        """Whether the summand is the array itself."""
        return self.mean is None and self.scale is None and self.offset is None

    @property
    def coefficients(self) -> tuple[Coefficient, ...]:
        given = (self.mean, self.scale, self.offset)
        return tuple(c for c in given if c is not None)

    def shifted(self, by: Coefficient) -> Term:
        return dataclasses.replace(self, offset=_sum(self.offset, by))

    def centred(self, by: Coefficient) -> Term:
        """The summand minus ``by``, as a mean if the summand is the array itself."""
        if self.plain:
            return dataclasses.replace(self, mean=by)
        return self.shifted(combined(lambda x: -x, by))

    def scaled(self, by: Coefficient) -> Term:
        offset = None if self.offset is None else _product(self.offset, by)
        return dataclasses.replace(self, scale=_product(self.scale, by), offset=offset)

    def around(self, mean: Coefficient) -> Term:
        """The same value with this mean subtracted first: a large mean would otherwise cancel."""
        if self.mean is not None:
            return self
        product = mean if self.scale is None else combined(lambda m, s: m * s, mean, self.scale)
        return dataclasses.replace(self, mean=mean, offset=_sum(self.offset, product))


@dataclasses.dataclass(frozen=True)
class Affine:
    """A value as a sum of terms.

    Attributes:
        axes: the value's axes, in digits of the arrays' axes (``fuse_axes``).
        terms: one for each array.
        inside: positions of the equations that compute the value from the arrays.
    """

    axes: Axes
    terms: tuple[Term, ...]
    inside: frozenset[int] = frozenset()

    def each(self, change: Callable[[Term], Term]) -> Affine:
        return dataclasses.replace(self, terms=tuple(map(change, self.terms)))


class Reader:
    """Expresses the values of a program as affine functions.

    Args:
        graph: the program.
        channels: returns the channel axis of an array.
        stops: returns whether a value is one of the arrays, however it is computed.
    """

    def __init__(self, graph: Graph, channels: Callable[[Var], int], stops: Callable[[Var], bool]):
        self.graph = graph
        self._channels = channels
        self._stops = stops

    def read(self, value: Var, root: bool = True, depth: int = 0) -> Affine:
        """A value as an affine function; if nothing else is found, of the value itself."""
        position = self.graph.index(value)
        if position is None or depth > _DEEPEST:
            return self.array(value)
        # Checked before the operands are read. In a chain of residual blocks each value has two
        # readers, and the recursion would double its work with every block.
        if not root and (self._stops(value) or self._computed_once(position, value)):
            return self.array(value)
        found = self._made(self.graph.eqns[position], depth)
        if found is None:
            return self.array(value)
        return dataclasses.replace(found, inside=found.inside | {position})

    def _computed_once(self, position: int, value: Var) -> bool:
        """Whether a value is computed once for several readers, as an activation's operand is."""
        eqn = self.graph.eqns[position]
        moves = eqn.primitive.name in (*IDENTITIES, "convert_element_type") or reshapes(eqn)
        return not moves and len(self.graph.uses(value)) > 1

    def array(self, value: Var) -> Affine:
        """A value as one array."""
        return Affine(fuse_axes.of(type_of(value).shape, self._channels(value)), (Term(value),))

    def _made(self, eqn: JaxprEqn, depth: int) -> Affine | None:
        if len(eqn.outvars) != 1:
            return None
        name, (out,) = eqn.primitive.name, eqn.outvars
        if not is_float(getattr(type_of(out), "dtype", bool)):
            return None
        if name in IDENTITIES or (
            name == "convert_element_type" and is_float(type_of(eqn.invars[0]).dtype)
        ):
            return self._operand(eqn.invars[0], depth)
        if reshapes(eqn):
            value = self._operand(eqn.invars[0], depth)
            axes = None if value is None else fuse_axes.reshaped(value.axes, type_of(out).shape)
            return None if axes is None or value is None else dataclasses.replace(value, axes=axes)
        if name == "transpose":
            value = self._operand(eqn.invars[0], depth)
            if value is None:
                return None
            axes = fuse_axes.transposed(value.axes, eqn.params["permutation"])
            return dataclasses.replace(value, axes=axes)
        if name == "neg":
            value = self._operand(eqn.invars[0], depth)
            return None if value is None else value.each(lambda t: t.scaled(MINUS_ONE))
        if name in ("add", "add_any", "sub", "mul", "div"):
            left, right = eqn.invars
            return self._combined(name, left, right, type_of(out).shape, depth)
        return None

    def _operand(self, atom: Any, depth: int) -> Affine | None:
        return self.read(atom, False, depth + 1) if isinstance(atom, Var) else None

    def _combined(
        self, name: str, left: Any, right: Any, shape: tuple[int, ...], depth: int
    ) -> Affine | None:
        """A product or quotient with a coefficient, a sum or difference."""
        values: dict[Var, Affine | None] = {}

        def value_of(own: Var) -> Affine | None:
            if own not in values:
                values[own] = self._operand(own, depth)
            return values[own]

        for own, other, turned in ((left, right, False), (right, left, True)):
            if not isinstance(own, Var) or (name == "div" and turned):
                continue
            if type_of(own).shape != shape or _spreads(self.graph, own):
                continue
            value = value_of(own)
            if value is None:
                continue
            by = coefficient(self.graph, other, value.axes, fuse_axes.counts(value.axes))
            if by is None:
                continue
            if name in ("mul", "div"):
                if by.number is not None and not 1 / _LARGEST <= abs(by.number) <= _LARGEST:
                    return None  # its product with another coefficient may overflow
                factor = by if name == "mul" else combined(lambda x: 1 / x, by)
                return dataclasses.replace(
                    value, terms=tuple(t.scaled(factor) for t in value.terms)
                )
            if name == "sub" and turned:
                value, name = value.each(lambda t: t.scaled(MINUS_ONE)), "add"
            first, *rest = value.terms
            changed = first.centred(by) if name == "sub" else first.shifted(by)
            return dataclasses.replace(value, terms=(changed, *rest))
        if name in ("mul", "div") or not (isinstance(left, Var) and isinstance(right, Var)):
            return None
        if type_of(left).shape != type_of(right).shape:
            return None
        first, second = value_of(left), value_of(right)
        if first is None or second is None:
            return None
        if first.axes != second.axes:
            # An operand that is only a transposed or reshaped array becomes the array itself: the
            # channel axis of an array that no convolution gives is a guess (``usual_axis``).
            first, second = (
                self.array(a) if isinstance(a, Var) and v.terms[0].plain else v
                for a, v in ((left, first), (right, second))
            )
        if first.axes != second.axes:
            return None
        if name == "sub":
            second = second.each(lambda t: t.scaled(MINUS_ONE))
        arrays = [t.array for t in (*first.terms, *second.terms)]
        if len(set(arrays)) != len(arrays):
            return None
        return Affine(first.axes, first.terms + second.terms, first.inside | second.inside)


def _spreads(graph: Graph, atom: Var) -> bool:
    """Whether an array is a smaller array, broadcast."""
    while (made := graph.producer(atom)) is not None:
        if made.primitive.name == "broadcast_in_dim" and not reshapes(made):
            return True
        if made.primitive.name != "convert_element_type" and not reshapes(made):
            return False
        atom = made.invars[0]
        if not isinstance(atom, Var):
            return True
    return False
