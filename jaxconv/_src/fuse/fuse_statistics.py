"""Finds sums over an array that follow from its moments, as in batch, group and instance norm.

Let mean and M be each channel's mean and sum of squared deviations over n positions (and examples).
For numbers a, b of each channel,

    sum of (y - a)            = n (mean - a)
    sum of (y - a) (y - b)    = M + n (mean - a) (mean - b)
    E[y y] - E[y] E[y]        = M / n

So the moments give each of these sums for any a and b that the program subtracts, and the variance
is computed without cancellation by either formula. Sums over a group of channels are sums of these.
A program may compute a sum in steps with factors between them: Equinox averages over positions,
then over examples.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from typing import Literal as OneOf

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from jaxconv._src import compat
from jaxconv._src.fuse import fuse_affine, fuse_axes
from jaxconv._src.fuse.fuse_affine import Coefficient
from jaxconv._src.fuse.fuse_axes import CHANNELS, EXAMPLES, POSITIONS, Axes
from jaxconv._src.fuse.fuse_graph import IDENTITIES, Graph, is_float, traced, type_of
from jaxconv._src.passes.moments import squares_of_all

# A factor counts as 1 / n if it differs by at most this multiple of its accumulated rounding error.
_ROUNDINGS = 4

# Moments over all examples and positions, or over the positions of each example.
Over = OneOf["examples", "positions"]


@dataclasses.dataclass(frozen=True)
class Moment:
    """A variable that follows from the moments: factor * sum of the product of (y - shift).

    Attributes:
        out: the variable.
        axes: its axes: channels, and examples if each example has its own moments.
        counts: the numbers of examples and channels of the array.
        factor: the factor of the sum.
        shifts: the values subtracted from y, one in a first and two in a second moment; None: 0.
        central: if True, ``shifts`` is ignored: the sum is of squared deviations from the mean over
            everything that is summed, a whole group of channels in group norm.
    """

    out: Var
    axes: Axes
    counts: tuple[int, int]
    factor: float
    shifts: tuple[Coefficient | None, ...]
    central: bool = False

    @property
    def atoms(self) -> list[Any]:
        """The variables that ``value`` reads."""
        return [a for s in self.shifts if s is not None for a in s.atoms if isinstance(a, Var)]

    def value(self, statistics: Any, arrays: Mapping[Any, Any], count: int) -> Any:
        """The variable's value.

        Args:
            statistics: means and M, (2, C) or (N, 2, C).
            arrays: the values of ``atoms``.
            count: how many elements of y each mean is taken over.
        """
        mean, squares = statistics[..., 0, :], statistics[..., 1, :]
        if self.central:
            total = self._of_groups(mean, squares, count)
        else:
            shifts = [0.0 if s is None else s.value(arrays) for s in self.shifts]
            total = count * (mean - shifts[0])
            if len(shifts) == 2:
                total = squares + total * (mean - shifts[1])
            total, within = self._by_group(total)
            total = jnp.sum(total, within) if within else total
        if self.factor != 1:
            total = total * self.factor
        aval = type_of(self.out)
        digits = [d for axis in self.axes for d in axis]
        total = total.reshape([d.extent for d in fuse_axes.in_order(digits)])
        before = tuple((d,) for d in fuse_axes.in_order(digits))
        return fuse_axes.arranged(total, before, self.axes).astype(aval.dtype)

    def _of_groups(self, mean: Any, squares: Any, count: int) -> Any:
        """M of each group, from each channel's mean and M.

        The sums are relative to the mean of one channel, on which M does not depend.
        """
        (mean, within), (squares, _) = map(self._by_group, (mean, squares))
        if not within:
            return squares
        first = jax.lax.stop_gradient(mean)
        for axis in within:
            first = jax.lax.slice_in_dim(first, 0, 1, axis=axis)
        deviation = mean - first
        shift = jnp.mean(deviation, within)
        total = count * (mean.size // shift.size)
        return squares_of_all(deviation, squares, count, shift, total, within)

    def _by_group(self, array: Any) -> tuple[Any, tuple[int, ...]]:
        """(..., C) with the channels of each group along axes of their own, and these axes."""
        digits = fuse_axes.in_order(d for axis in self.axes for d in axis)
        kept = [d for d in digits if d.what == CHANNELS]
        if math.prod(d.extent for d in kept) == self.counts[1]:
            return array, ()
        extents = fuse_axes.refined(kept, self.counts[1])
        split = array.reshape((*array.shape[:-1], *extents))
        return split, tuple(range(array.ndim - 1, split.ndim, 2))


@dataclasses.dataclass(frozen=True)
class _Value:
    """A variable as factor * the product of (y - shift) over the shifts, summed over some axes.

    Attributes:
        axes: the remaining axes.
        shifts: as in ``Moment``.
        factor: the factor.
        precision: the bound of the factor's relative rounding error.
        absolute: whether the variable is the absolute value of the difference.
        of_means: whether y stands for the mean of each example minus the mean over all examples.
    """

    axes: Axes
    shifts: tuple[Coefficient | None, ...] = (None,)
    factor: float = 1.0
    precision: float = 0.0
    absolute: bool = False
    of_means: bool = False

    @property
    def single(self) -> bool:
        """Whether the variable is y minus a vector, summed or not."""
        return len(self.shifts) == 1 and not self.absolute


@dataclasses.dataclass(frozen=True)
class _Stack:
    """Values stacked along a new axis; None for an entry that is no ``_Value``."""

    axis: int
    parts: tuple[_Value | None, ...]

    def each(self, change: Callable[[_Value], _Value | None]) -> _Stack:
        return _Stack(self.axis, tuple(None if p is None else change(p) for p in self.parts))


class _Finder:
    """Finds the sums over one array.

    Args:
        graph: the program.
        y: the array.
        axis: its channel axis.
        over: which moments are computed.
    """

    def __init__(self, graph: Graph, y: Var, axis: int, over: Over):
        self.graph, self.y, self.over = graph, y, over
        self.axes = fuse_axes.of(type_of(y).shape, axis)
        self.size = type_of(y).size
        self.counts = fuse_axes.counts(self.axes)

    def found(self) -> list[Moment]:
        """The sums, each at the first variable that is summed over all axes of the moments."""
        values: dict[Var, _Value] = {self.y: _Value(self.axes)}
        stacks: dict[Var, _Stack] = {}
        moments: dict[Var, Moment] = {}
        pending = sorted(set(self.graph.uses(self.y)))
        while pending:
            position = pending.pop(0)
            eqn = self.graph.eqns[position]
            types = [getattr(type_of(v), "dtype", bool) for v in eqn.outvars]
            if not types or not all(map(is_float, types)):
                continue
            operands = [values.get(a) if isinstance(a, Var) else None for a in eqn.invars]
            of_stacks = [stacks[a] for a in eqn.invars if isinstance(a, Var) and a in stacks]
            stacked = of_stacks[0] if len(of_stacks) == 1 else None
            known = [v for v in operands if v is not None]
            made = self._parts(eqn, stacked) if stacked else self._results(eqn, operands)
            if made is not None:
                for out, value in zip(eqn.outvars, made, strict=True):
                    if isinstance(value, _Stack):
                        stacks[out] = value
                        pending = sorted({*pending, *self.graph.uses(out)})
                    elif value is not None:
                        values[out] = value
                        pending = sorted({*pending, *self.graph.uses(out)})
                        if self._complete(value) and not any(map(self._complete, known)):
                            moments[out] = Moment(
                                out, value.axes, self.counts, value.factor, value.shifts
                            )
                continue
            if len(eqn.outvars) != 1:
                continue
            (out,) = eqn.outvars
            averages = self._variance(eqn, values) or self._total_variance(eqn, values)
            if averages is not None:
                factor = self._share(averages.axes)
                moments[out] = Moment(out, averages.axes, self.counts, factor, (), central=True)
        return list(moments.values())

    def _results(
        self, eqn: JaxprEqn, operands: list[_Value | None]
    ) -> Sequence[_Value | _Stack | None] | None:
        """The results of an equation as values, or None."""
        name = eqn.primitive.name
        if name == "reduce":
            found = [_sum(v, eqn.params["dimensions"]) if v else None for v in operands]
            found = found[: len(eqn.outvars)]
            # An equation with several results is replaced only as a whole.
            return found if _adds(eqn) and all(v and self._complete(v) for v in found) else None
        if len(eqn.outvars) > 1:
            return None
        if name == "stack":
            return [_Stack(eqn.params["axis"], tuple(operands))]
        if name == "concatenate":
            axis = eqn.params["dimension"]
            if any(type_of(a).shape[axis] != 1 for a in eqn.invars):
                return None
            parts = [v and dataclasses.replace(v, axes=_without(v.axes, axis)) for v in operands]
            return [_Stack(axis, tuple(parts))]
        value = self._made(eqn, operands)
        return None if value is None else [value]

    def _parts(self, eqn: JaxprEqn, stack: _Stack) -> Sequence[_Value | _Stack | None] | None:
        """The result of an equation on a stack: applied to the parts, or a selection of them."""
        name, params, axis = eqn.primitive.name, eqn.params, stack.axis

        def kept(value: _Value | None) -> _Value | None:
            if value is None:
                return None
            return dataclasses.replace(value, axes=(*value.axes[:axis], (), *value.axes[axis:]))

        if name in IDENTITIES or name == "convert_element_type":
            return [stack]
        if name == "reduce_sum" and axis not in params["axes"]:
            axes = [a - (a > axis) for a in params["axes"]]
            after = axis - sum(a < axis for a in params["axes"])
            return [_Stack(after, stack.each(lambda v: _sum(v, axes)).parts)]
        if name in ("mul", "div"):
            numbers = [self.graph.constant(a) for a in eqn.invars]
            number, dtype = numbers[1] or numbers[0], type_of(eqn.outvars[0]).dtype
            if not number or not math.isfinite(number) or (name == "div" and numbers[0]):
                return None
            factor = number if name == "mul" else 1 / number
            return [stack.each(lambda v: _scaled(v, factor, dtype) if self._summed(v) else None)]
        if name == "slice" and params["limit_indices"][axis] - params["start_indices"][axis] == 1:
            others = [e for a, e in enumerate(type_of(eqn.outvars[0]).shape) if a != axis]
            of_stack = [e for a, e in enumerate(type_of(eqn.invars[0]).shape) if a != axis]
            part = stack.parts[params["start_indices"][axis]]
            return [kept(part)] if others == of_stack else None
        if name == "unstack" and params["axis"] == axis:
            return stack.parts
        if name == "split" and params["axis"] == axis and set(params["sizes"]) == {1}:
            return [kept(v) for v in stack.parts]
        return None

    def _summed(self, value: _Value) -> bool:
        """Whether a value is summed over at least one axis."""
        size = math.prod(self.counts) if value.of_means else self.size
        return math.prod(fuse_axes.shape_of(value.axes)) < size

    def _share(self, axes: Axes) -> float:
        """1 / n for the n elements of y that are summed to a value with these axes."""
        return math.prod(fuse_axes.shape_of(axes)) / self.size

    def _complete(self, value: _Value) -> bool:
        """Whether a value is a sum over all axes that the moments are taken over."""
        examples, channels = fuse_axes.counts(value.axes)
        if not self._summed(value) or value.absolute or value.of_means:
            return False
        if any(d.what == POSITIONS for axis in value.axes for d in axis):
            return False
        if self.over == "examples":
            if any(s is not None and s.examples for s in value.shifts):
                return False
            return (examples, channels) == (1, self.counts[1])
        return self.counts[0] > 1 and examples == self.counts[0]

    def _made(self, eqn: JaxprEqn, operands: list[_Value | None]) -> _Value | None:
        """The result of an equation on values, or None."""
        name = eqn.primitive.name
        if name in ("sub", "mul", "div"):
            return self._combined(eqn, operands)
        if name == "dot_general":
            return self._contracted(eqn, operands)
        if name == "select_n" and type_of(eqn.invars[0]).shape == ():
            number = self._number(eqn.invars[0])
            return None if number is None else operands[1 + int(number)]
        if not operands or (value := operands[0]) is None:
            return None
        if name in IDENTITIES or name == "convert_element_type":
            return value
        if fuse_affine.reshapes(eqn):
            axes = fuse_axes.reshaped(value.axes, type_of(eqn.outvars[0]).shape)
            return None if axes is None else dataclasses.replace(value, axes=axes)
        if name == "transpose":
            axes = fuse_axes.transposed(value.axes, eqn.params["permutation"])
            return dataclasses.replace(value, axes=axes)
        if name == "abs" and not self._summed(value) and len(value.shifts) == 1:
            return dataclasses.replace(value, absolute=True)
        if _squares(eqn) and not self._summed(value) and len(value.shifts) == 1:
            return dataclasses.replace(value, shifts=value.shifts * 2, absolute=False)
        if name == "reduce_window_sum":
            return _pooled(eqn, value)
        if name == "reduce_sum" and eqn.params.get("out_sharding") is None:
            return _sum(value, eqn.params["axes"])
        # A sum over an axis name of vmap: the batching rule has made the name an axis number.
        if name == "psum" and eqn.params.get("axis_index_groups") is None:
            return _sum(value, eqn.params["axes"])
        return None

    def _combined(self, eqn: JaxprEqn, operands: list[_Value | None]) -> _Value | None:
        """A product of two differences, y minus a vector, or a sum times a constant; else None."""
        name, (out,) = eqn.primitive.name, eqn.outvars
        left, right = operands
        if name == "sub" and left is not None and self._of_examples(left):
            of_all = right is not None and right.shifts == (None,) and self._averages(right)
            if not of_all or type_of(out).shape != type_of(eqn.invars[0]).shape:
                return None
            return _Value(left.axes, of_means=True)
        if name == "sub" and left is not None and right is not None and self._summed(right):
            right = None  # a mean, which is subtracted like any vector
        if left is not None and right is not None:
            return self._product(left, right) if name == "mul" else None
        value = left if left is not None else right
        if value is None:
            return None
        own, other = eqn.invars if left is not None else reversed(eqn.invars)
        if type_of(out).shape != type_of(own).shape:
            return None
        if self._summed(value):
            number = self._number(other)
            if name not in ("mul", "div") or number is None or (name == "div" and left is None):
                return None
            if not number or not math.isfinite(number):
                return None
            return _scaled(value, number if name == "mul" else 1 / number, type_of(out).dtype)
        if name != "sub" or left is None or value.shifts != (None,) or value.absolute:
            return None
        shift = fuse_affine.coefficient(self.graph, other, value.axes, self.counts)
        return None if shift is None else dataclasses.replace(value, shifts=(shift,))

    def _product(self, left: _Value, right: _Value) -> _Value | None:
        single = all(not self._summed(v) and v.single for v in (left, right))
        if left == right and left.absolute and len(left.shifts) == 1:
            single, left = not self._summed(left), dataclasses.replace(left, absolute=False)
        if not single or left.axes != right.axes or left.of_means != right.of_means:
            return None
        return dataclasses.replace(left, shifts=left.shifts + right.shifts)

    def _contracted(self, eqn: JaxprEqn, operands: list[_Value | None]) -> _Value | None:
        """A matrix product that is a sum: with an array of ones, or of two values per channel."""
        (sums, batches), (left, right) = eqn.params["dimension_numbers"], operands
        if left is not None and right is not None:
            value = self._product(left, right)
            if value is None or sums[0] != sums[1] or batches[0] != batches[1]:
                return None
            if len(sums[0]) + len(batches[0]) != len(value.axes):
                return None
            return dataclasses.replace(value, axes=tuple(value.axes[a] for a in batches[0]))
        own = 0 if left is not None else 1
        value, ones = operands[own], eqn.invars[1 - own]
        contracted = sums[1 - own]
        number = self.graph.constant(ones)
        if value is None or not number or not math.isfinite(number) or batches[0]:
            return None
        if any(e > 1 for a, e in enumerate(type_of(ones).shape) if a not in contracted):
            return None
        found = _sum(value, sums[own])
        axes = fuse_axes.reshaped(found.axes, type_of(eqn.outvars[0]).shape) if found else None
        if found is None or axes is None:
            return None
        value = dataclasses.replace(found, axes=axes)
        return value if number == 1 else _scaled(value, number, type_of(ones).dtype)

    def _variance(self, eqn: JaxprEqn, values: dict[Var, _Value]) -> _Value | None:
        """The mean of y if an equation is E[y y] - E[y] E[y], else None."""
        if eqn.primitive.name != "sub":
            return None
        of_squares, of_mean = eqn.invars
        made = self.graph.producer(of_mean)
        if made is None or not (_squares(made) or made.primitive.name == "mul"):
            return None
        if not self._average(of_squares, values, (None, None)):
            return None
        if not all(self._average(a, values, (None,)) for a in made.invars):
            return None
        mean = made.invars[0]
        return values[mean] if isinstance(mean, Var) else None

    def _average(self, atom: Any, values: dict[Var, _Value], shifts: tuple) -> bool:
        """Whether an atom is the mean of y (shifts: one None) or of its squares (two None)."""
        value = values.get(atom) if isinstance(atom, Var) else None
        return value is not None and value.shifts == shifts and self._averages(value)

    def _averages(self, value: _Value) -> bool:
        """Whether a value is a mean over all axes that the moments are taken over."""
        return self._complete(value) and self._has_factor(value, self._share(value.axes))

    def _has_factor(self, value: _Value, factor: float) -> bool:
        return abs(value.factor / factor - 1) <= _ROUNDINGS * value.precision

    def _of_examples(self, value: _Value) -> bool:
        """Whether a value is the mean of each example, while the moments are over all examples."""
        digits = [d for axis in value.axes for d in axis]
        whole = {(EXAMPLES, self.counts[0]), (CHANNELS, self.counts[1])}
        return (
            self.over == "examples"
            and value.shifts == (None,)
            and {(d.what, d.extent) for d in digits} == whole
            and self._has_factor(value, self._share(value.axes))
        )

    def _total_variance(self, eqn: JaxprEqn, values: dict[Var, _Value]) -> _Value | None:
        """The variance over all examples, from an equation that adds two parts, or None.

        The parts are the mean of the examples' variances and the variance of the examples' means.
        """
        if eqn.primitive.name not in ("add", "add_any") or self.over != "examples":
            return None
        known = [values.get(a) if isinstance(a, Var) else None for a in eqn.invars]
        if known[0] is None or known[1] is None or known[0].of_means == known[1].of_means:
            return None
        between, within = sorted(known, key=lambda v: not (v and v.of_means))
        assert between is not None and within is not None
        shift, *others = within.shifts
        if others != [shift] or shift is None or not shift.examples or len(shift.atoms) != 1:
            return None
        means, shape = values.get(shift.atoms[0]), fuse_axes.shape_of(within.axes)
        shapes = {math.prod(shape), math.prod(fuse_axes.shape_of(between.axes)), self.counts[1]}
        if means is None or not self._of_examples(means) or len(shapes) > 1:
            return None
        if between.shifts != (None, None) or between.absolute or within.absolute:
            return None
        right = self._has_factor(between, 1 / self.counts[0])
        return within if right and self._has_factor(within, self._share(within.axes)) else None

    def _number(self, atom: Any) -> float | None:
        """The value of an atom that is a constant number or computed from constants, or None."""
        number = self.graph.constant(atom)
        if number is not None or math.prod(type_of(atom).shape) != 1:
            return number
        compute = self.graph.function(atom)
        if compute is None:
            return None
        with jax.ensure_compile_time_eval():
            return float(compute().reshape(()))


def _scaled(value: _Value, number: float, dtype: np.dtype) -> _Value:
    """A sum times a constant, whose rounding adds to the factor's error."""
    precision = value.precision + float(jnp.finfo(dtype).eps)
    return dataclasses.replace(value, factor=value.factor * number, precision=precision)


def _pooled(eqn: JaxprEqn, value: _Value) -> _Value | None:
    """The sum over windows that each cover some axes completely."""
    params = eqn.params
    extents = fuse_axes.shape_of(value.axes)
    window = params["window_dimensions"]
    whole = all(w in (1, e) for w, e in zip(window, extents, strict=True))
    same = [s for w, s in zip(window, params["window_strides"], strict=True) if w == 1]
    dilations = (*params["base_dilation"], *params["window_dilation"])
    if not whole or any(map(any, params["padding"])) or {*same, *dilations} - {1}:
        return None
    kept = [() if w == e else axis for w, e, axis in zip(window, extents, value.axes, strict=True)]
    return dataclasses.replace(value, axes=tuple(kept))


def _sum(value: _Value, axes: Sequence[Any]) -> _Value | None:
    if not all(isinstance(a, int | np.integer) for a in axes):
        return None
    kept = tuple(axis for at, axis in enumerate(value.axes) if at not in axes)
    return dataclasses.replace(value, axes=kept)


def _without(axes: Axes, axis: int) -> Axes:
    return (*axes[:axis], *axes[axis + 1 :])


def _adds(eqn: JaxprEqn) -> bool:
    """Whether a reduction sums each of its operands."""
    inner, count = eqn.params["jaxpr"], len(eqn.outvars)
    inner = compat.open_jaxpr(inner)
    made = {e.outvars[0]: e for e in inner.eqns if e.primitive.name == "add"}
    zeros = all(isinstance(a, Literal) and not np.any(a.val) for a in eqn.invars[count:])
    return zeros and all(
        isinstance(v, Var)
        and v in made
        and {id(a) for a in made[v].invars} == {id(inner.invars[i]), id(inner.invars[i + count])}
        for i, v in enumerate(inner.outvars)
    )


def _squares(eqn: JaxprEqn) -> bool:
    name = eqn.primitive.name
    return name == "square" or (name == "integer_pow" and eqn.params["y"] == 2)


def find(graph: Graph, y: Var, axis: int, over: Over = "examples") -> list[Moment]:
    """The sums over y that follow from its moments; empty unless a second moment is among them.

    Args:
        graph: the program.
        y: an array, with the examples along its first axis.
        axis: its channel axis.
        over: which moments are computed.
    """
    found = _found(graph, y, axis, over)
    return found if any(m.central or len(m.shifts) == 2 for m in found) else []


def means(graph: Graph, y: Var, axis: int) -> list[Moment]:
    """The sums of y over each example's positions; these follow from the means alone."""
    found = _found(graph, y, axis, "positions")
    return [m for m in found if not m.central and len(m.shifts) == 1]


def _found(graph: Graph, y: Var, axis: int, over: Over) -> list[Moment]:
    finder = _Finder(graph, y, axis, over)
    if 1 in (finder.counts[1], finder.size // max(finder.counts[1], 1)):
        return []
    return finder.found()


def answered(graph: Graph, moment: Moment, statistics: Var, count: int) -> list[JaxprEqn]:
    """The equations that compute a sum from the moments of ``count`` elements per channel.

    Raises:
        TypeError, ValueError: the result has another type than the variable.
    """

    def compute(statistics: Any, given: list[Any]) -> list[Any]:
        return [moment.value(statistics, dict(zip(moment.atoms, given, strict=True)), count)]

    position = graph.index(moment.out)
    assert position is not None
    operands = statistics, moment.atoms
    eqns = traced(compute, operands, [moment.out], graph, position)
    return [compat.within(graph.eqns[position], e) for e in eqns]


def by_call(
    graph: Graph,
    found: Sequence[Moment],
    call: Callable[..., list[Any]],
    operands: Sequence[Any],
    count: int,
) -> dict[int, list[JaxprEqn]]:
    """By position: a call that computes moments, and the sums that follow from them.

    The call stands at the first of the sums. Empty if the program has unknown array types.

    Args:
        graph: the program.
        found: the sums.
        call: a function of ``operands`` that returns a list of one array, the moments.
        operands: the atoms that the call reads.
        count: how many elements of a channel are summed.
    """
    positions = [graph.index(m.out) for m in found]
    first = min(p for p in positions if p is not None)
    try:
        (like,) = jax.make_jaxpr(call)(*map(type_of, operands)).out_avals
        statistics = compat.variable(like)
        made = {first: traced(call, tuple(operands), [statistics], graph, first)}
        for moment, position in zip(found, positions, strict=True):
            assert position is not None
            made[position] = [*made.get(position, []), *answered(graph, moment, statistics, count)]
    except (TypeError, ValueError, compat.ShardingTypeError):
        return {}
    return made
