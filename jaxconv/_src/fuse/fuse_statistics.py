"""Finds the sums over a convolution's result that its statistics answer: those of batch norm.

With M the squared deviations of y from its mean, summed over all n examples and positions of a
channel, and a, b vectors of channels,

    sum of (y - a)            = n (mean - a)
    sum of (y - a) (y - b)    = M + n (mean - a) (mean - b)
    E[y y] - E[y] E[y]        = M / n

so that the call's mean and M give each of these sums, whatever the program subtracts, and neither
formula of the variance cancels. A sum may be made in steps, with factors between them: Equinox
averages over positions, then over examples.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Var

from jaxconv._src.fuse.fuse_graph import (
    IDENTITIES,
    Graph,
    Vector,
    is_float,
    renumbered_axis,
    type_of,
)

_RESHAPES = ("reshape", "squeeze", "expand_dims", "broadcast_in_dim")

# A factor of the program is 1 / n where it differs by no more than so many roundings of it.
_ROUNDINGS = 4


@dataclasses.dataclass(frozen=True)
class Moment:
    """A variable that the statistics answer.

    Attributes:
        out: the variable, of as many elements as channels.
        factor: what the sum is multiplied by.
        shifts: the vectors of a first (one) or second (two) moment; None for zeros.
        central: M alone, times the factor.
    """

    out: Var
    factor: float
    shifts: tuple[Vector | None, ...]
    central: bool = False

    @property
    def atoms(self) -> list[Any]:
        """The vectors' arrays, which ``value`` takes."""
        return [s.atom for s in self.shifts if s is not None]

    def value(self, statistics: Any, vectors: list[Any], count: int) -> Any:
        """The variable, from the statistics (2, channels) of ``count`` numbers a channel."""
        mean, squares = statistics[0], statistics[1]
        channels, arrays = mean.shape[0], iter(vectors)
        offsets = [
            mean if s is None else mean - s.read(next(arrays), channels) for s in self.shifts
        ]
        if self.central:
            total = squares
        elif len(offsets) == 1:
            total = count * offsets[0]
        else:
            total = squares + count * (offsets[0] * offsets[1])
        if self.factor != 1:
            total = total * self.factor
        aval = type_of(self.out)
        return total.astype(aval.dtype).reshape(aval.shape)


@dataclasses.dataclass(frozen=True)
class _Value:
    """What a variable is: product of (y - shift) over the shifts, summed over some axes.

    Attributes:
        axis: the axis of channels.
        shifts: as of ``Moment``.
        summed: whether anything is summed: products are taken before.
        factor: what it is multiplied by.
        precision: the relative error of the factor, from the types on the way.
    """

    axis: int
    shifts: tuple[Vector | None, ...] = (None,)
    summed: bool = False
    factor: float = 1.0
    precision: float = 0.0


def find(graph: Graph, y: Var, axis: int) -> list[Moment]:
    """The sums over y that the statistics answer; none where no second moment is among them.

    Args:
        graph: the program.
        y: the call's result.
        axis: its axis of channels.
    """
    shape = type_of(y).shape
    count = math.prod(shape) // max(shape[axis], 1)
    if shape[axis] == 1 or count <= 1:
        return []
    values: dict[Var, _Value] = {y: _Value(axis)}
    moments: dict[Var, Moment] = {}
    pending = sorted(set(graph.uses(y)))
    while pending:
        position = pending.pop(0)
        eqn = graph.eqns[position]
        (out, *more) = eqn.outvars
        if more or not is_float(getattr(type_of(out), "dtype", bool)):
            continue
        operands = [values.get(a) if isinstance(a, Var) else None for a in eqn.invars]
        value = _made(graph, eqn, operands)
        if value is not None:
            values[out] = value
            pending = sorted({*pending, *graph.uses(out)})
            known = [(a, v) for a, v in zip(eqn.invars, operands, strict=True) if v is not None]
            if _complete(out, value) and not any(_complete(a, v) for a, v in known):
                moments[out] = Moment(out, value.factor, value.shifts)
        elif _is_variance(graph, eqn, values, count):
            moments[out] = Moment(out, 1 / count, (), central=True)
    if not any(len(m.shifts) == 2 for m in moments.values()):
        return []
    return list(moments.values())


def _complete(var: Any, value: _Value) -> bool:
    """Whether a variable is a sum over everything but the channels."""
    shape = type_of(var).shape
    return value.summed and all(e == 1 for i, e in enumerate(shape) if i != value.axis)


def _made(graph: Graph, eqn: JaxprEqn, operands: list[_Value | None]) -> _Value | None:
    """What an equation makes of such values, or None."""
    name = eqn.primitive.name
    if name in ("sub", "mul", "div"):
        return _combined(graph, eqn, operands)
    if not operands or (value := operands[0]) is None:
        return None
    if name in IDENTITIES or name == "convert_element_type":
        return value
    if name in _RESHAPES:
        return _reshaped(eqn, value)
    if _squares(eqn) and not value.summed and len(value.shifts) == 1:
        return dataclasses.replace(value, shifts=value.shifts * 2)
    if name == "reduce_sum" and eqn.params.get("out_sharding") is None:
        return _sum(value, eqn.params["axes"])
    # Over an axis that vmap has named: its rule makes the name a position.
    if name == "psum" and eqn.params.get("axis_index_groups") is None:
        return _sum(value, eqn.params["axes"])
    return None


def _sum(value: _Value, axes: Sequence[Any]) -> _Value | None:
    if value.axis in axes or not all(isinstance(a, int | np.integer) for a in axes):
        return None
    axis = value.axis - sum(a < value.axis for a in axes)
    return dataclasses.replace(value, axis=axis, summed=True)


def _reshaped(eqn: JaxprEqn, value: _Value) -> _Value | None:
    (out,) = eqn.outvars
    before, after = type_of(eqn.invars[0]).shape, type_of(out).shape
    reordered = eqn.primitive.name == "reshape" and eqn.params["dimensions"] is not None
    if len(eqn.invars) > 1 or reordered:
        return None
    places = list(eqn.params.get("broadcast_dimensions", ()))
    axis = renumbered_axis(before, after, value.axis)
    if axis is None or places != sorted(places):
        return None
    return dataclasses.replace(value, axis=axis)


def _combined(graph: Graph, eqn: JaxprEqn, operands: list[_Value | None]) -> _Value | None:
    """A product of two differences; a difference with a vector; a sum times a number."""
    name, (out,) = eqn.primitive.name, eqn.outvars
    left, right = operands
    if name == "sub" and left is not None and right is not None and right.summed:
        right = None  # the mean, as a vector
    if left is not None and right is not None:
        single = all(not v.summed and len(v.shifts) == 1 for v in (left, right))
        if name != "mul" or not single or left.axis != right.axis:
            return None
        return dataclasses.replace(left, shifts=left.shifts + right.shifts)
    value = left if left is not None else right
    if value is None:
        return None
    own, other = eqn.invars if left is not None else reversed(eqn.invars)
    if type_of(out).shape != type_of(own).shape:
        return None
    if value.summed:
        number = graph.constant(other)
        if name not in ("mul", "div") or number is None or (name == "div" and left is None):
            return None
        if not number or not math.isfinite(number):
            return None
        factor = value.factor * (number if name == "mul" else 1 / number)
        precision = value.precision + float(jnp.finfo(type_of(out).dtype).eps)
        return dataclasses.replace(value, factor=factor, precision=precision)
    if name != "sub" or left is None or value.shifts != (None,):
        return None
    vector = graph.channel_vector(other, type_of(own).shape, value.axis)
    return None if vector is None else dataclasses.replace(value, shifts=(vector,))


def _is_variance(graph: Graph, eqn: JaxprEqn, values: dict[Var, _Value], count: int) -> bool:
    """Whether an equation is E[y y] - E[y] E[y]."""
    if eqn.primitive.name != "sub":
        return False
    of_squares, of_mean = eqn.invars
    made = graph.producer(of_mean)
    return (
        made is not None
        and (_squares(made) or made.primitive.name == "mul")
        and _is_average(of_squares, values, (None, None), count)
        and all(_is_average(a, values, (None,), count) for a in made.invars)
    )


def _squares(eqn: JaxprEqn) -> bool:
    name = eqn.primitive.name
    return name == "square" or (name == "integer_pow" and eqn.params["y"] == 2)


def _is_average(atom: Any, values: dict[Var, _Value], shifts: tuple, count: int) -> bool:
    """Whether an atom is the mean of y, or of its squares."""
    value = values.get(atom) if isinstance(atom, Var) else None
    if value is None or value.shifts != shifts or not _complete(atom, value):
        return False
    return abs(value.factor * count - 1) <= _ROUNDINGS * value.precision
