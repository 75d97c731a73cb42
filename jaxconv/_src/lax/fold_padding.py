"""Turns zero padding that a program writes explicitly into padding of its convolutions.

    conv(lax.pad(x, 0, ...))            the convolution pads x itself
    lax.pad(conv(x), ..., negative)     the convolution computes what is left, and no more

Keras's ``ZeroPadding2D`` and Flax's ``padding="CAUSAL"`` write the first. Its gradient is the
second: the data gradient of the padded array, cropped to x. Operations that keep the order of
elements along the padded axes may lie between pad and convolution (conversions, and the transposes
and reshapes of ``vmap``), and so may the sum of several data gradients.

A pad is removed only if every reader of the padded array is a convolution that can absorb it.
Otherwise it stays for all readers, because the padded array is stored in any case. The rules for
one side of a spatial axis:

- A convolution adds the pad's zeros to its own padding. Where it crops (negative padding), it crops
  zeros first, as it does now.
- The new padding is at most the window's reach, so that every window reads an element of x or of
  the axis beside it. Kernels skip no window that reads zeros alone.
- A crop takes at most the padding that the convolution has.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import JaxprEqn, Var

from jaxconv._src import compat
from jaxconv._src.call import override_state, selection
from jaxconv._src.lax.inlining import JITTED, inlined
from jaxconv._src.problem.spec import Op, dilated_extents, known

# Maps an array axis to the elements at its low and high side.
_Sides = dict[int, tuple[int, int]]

# Maps the position of an equation to its replacement.
_Placed = dict[int, JaxprEqn]

_PAD, _LAX, _FUSED = "pad", "conv_general_dilated", "jaxconv_fused"
_SUMS = ("add", "add_any")

# Parameters that hold the result's shape (for a slice of the whole array).
_SHAPED = {"reshape": "new_sizes", "broadcast_in_dim": "shape", "slice": "limit_indices"}

# Operations on one array that keep the order of elements along an axis.
_AXIS_BY_AXIS = ("convert_element_type", "copy", "copy_p", "pvary", "pcast")
_VIEWS = (*_AXIS_BY_AXIS, "transpose", "squeeze", "reshape", "broadcast_in_dim", "slice")

# The operations in jnp.pad and its derivatives.
_OF_PADDING = frozenset((_PAD, *_VIEWS))


def before_lowering(jaxpr: Any) -> Any:
    """A program to be lowered, folded if ``install`` or ``override`` is in force.

    Args:
        jaxpr: the program, not closed. Functions that only pad (such as ``jnp.pad``) count as parts
            of it.
    """
    if not any(eqn.primitive.name == _PAD or _only_pads(eqn) for eqn in jaxpr.eqns):
        return jaxpr
    eqns, outvars = inlined(jaxpr, _only_pads)
    after = folded(eqns, outvars, takes=_is_overridden)
    return jaxpr if len(after) == len(eqns) else jaxpr.replace(eqns=after, outvars=outvars)


def _only_pads(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name not in JITTED or not compat.inlinable(eqn):
        return False
    called = compat.open_jaxpr(eqn.params["jaxpr"])
    names = {inner.primitive.name for inner in called.eqns}
    return _PAD in names and names <= _OF_PADDING and not called.constvars


def _is_overridden(eqn: JaxprEqn) -> bool:
    with compat.located_at(eqn):
        return override_state.algorithms_of_lax() is not None


def folded(
    eqns: Sequence[JaxprEqn],
    outvars: Sequence[Any],
    constants: Mapping[Var, Any] | None = None,
    takes: Callable[[JaxprEqn], bool] = lambda eqn: True,
) -> list[JaxprEqn]:
    """The equations of a program without the pads and crops that convolutions absorb.

    Args:
        eqns: the equations; functions that they call stay unchanged.
        outvars: the program's results.
        constants: known values of variables.
        takes: whether a convolution may be changed.
    """
    program = _Program(eqns, outvars, constants or {}, takes)
    # The pad next to the convolution is removed first.
    for order in reversed(range(len(eqns))), range(len(eqns)):
        for position in order:
            eqn = program.eqns[position]
            if eqn is not None and eqn.primitive.name == _PAD:
                program.fold(position, eqn)
    return [eqn for eqn in program.eqns if eqn is not None]


class _Program:
    """A program whose equations are replaced one by one.

    Attributes:
        eqns: the equations by position, None for a removed one.
    """

    def __init__(
        self,
        eqns: Sequence[JaxprEqn],
        outvars: Sequence[Any],
        constants: Mapping[Var, Any],
        takes: Callable[[JaxprEqn], bool],
    ):
        self.eqns: list[JaxprEqn | None] = list(eqns)
        self._returned = {v for v in outvars if isinstance(v, Var)}
        self._constants = constants
        self._takes = takes
        self._index()

    def _index(self) -> None:
        self._maker: dict[Var, tuple[int, JaxprEqn]] = {}
        self._readers: dict[Var, list[tuple[int, JaxprEqn]]] = {}
        for position, eqn in enumerate(self.eqns):
            if eqn is not None:
                self._maker.update(dict.fromkeys(eqn.outvars, (position, eqn)))
                for atom in eqn.invars:
                    if isinstance(atom, Var):
                        self._readers.setdefault(atom, []).append((position, eqn))

    def fold(self, position: int, pad: JaxprEqn) -> None:
        """Removes one pad if convolutions can absorb it."""
        (array, value), (out,) = pad.invars, pad.outvars
        config = pad.params["padding_config"]
        shapes = _shape(array), _shape(out)
        if not all(compat.is_constant_shape(s) and 0 not in s for s in shapes):
            return
        if any(interior for *_, interior in config):
            return
        sides = {a: (int(lo), int(hi)) for a, (lo, hi, _) in enumerate(config) if lo or hi}
        ends = [end for pair in sides.values() for end in pair]
        placed: _Placed | None = None
        if min(ends, default=-1) >= 0 and self._is_zero(value):
            placed = self._padded_by_readers(out, array, sides)
        elif max(ends, default=1) <= 0:
            crops = {axis: (-lo, -hi) for axis, (lo, hi) in sides.items()}
            placed = self._cropped_by_maker(array, out, crops)
        if placed is not None:
            self.eqns[position] = None
            for at, eqn in placed.items():
                self.eqns[at] = eqn
            self._index()

    def _is_zero(self, atom: Any) -> bool:
        while isinstance(atom, Var) and atom not in self._constants:
            _, maker = self._maker.get(atom, (0, None))
            if maker is None or maker.primitive.name not in _VIEWS:
                return False
            atom = maker.invars[0]
        value = self._constants[atom] if isinstance(atom, Var) else atom.val
        return not np.any(np.asarray(value))

    def _padded_by_readers(self, padded: Var, array: Any, sides: _Sides) -> _Placed | None:
        """The readers of a padded array, as readers of the array, or None if that fails for one."""
        if padded in self._returned:
            return None
        placed: _Placed = {}
        for at, eqn in self._readers.get(padded, []):
            operands = [array if atom is padded else atom for atom in eqn.invars]
            if (view := _view(eqn, sides)) is not None:
                (whole,), out = eqn.outvars, compat.variable(_without(eqn.outvars[0], view.sides))
                rest = self._padded_by_readers(whole, out, view.sides)
                if rest is None:
                    return None
                placed |= rest
                placed[at] = eqn.replace(invars=operands, outvars=[out], params=view.params)
                continue
            window = _window(eqn) if self._takes(eqn) else None
            if window is None or padded in eqn.invars[1:]:
                return None
            params = window.with_left_padded(sides)
            if params is None:
                return None
            placed[at] = eqn.replace(invars=operands, params=params)
        return placed

    def _cropped_by_maker(self, whole: Any, cropped: Var, crops: _Sides) -> _Placed | None:
        """The equations that make an array, changed to make the cropped one, or None."""
        if whole not in self._maker or whole in self._returned or len(self._readers[whole]) > 1:
            return None
        at, eqn = self._maker[whole]
        if eqn.primitive.name in _SUMS:
            parts = [(atom, crops) for atom in eqn.invars]
            params: dict[str, Any] | None = eqn.params
        elif (view := _view(eqn, crops, backwards=True)) is not None:
            parts, params = [(eqn.invars[0], view.sides)], view.params
        else:
            window = _window(eqn) if self._takes(eqn) else None
            parts, params = [], None if window is None else window.with_result_cropped(crops)
        if params is None:
            return None
        placed: _Placed = {}
        operands = list(eqn.invars)
        for i, (part, its_crops) in enumerate(parts):
            operands[i] = its = compat.variable(_without(part, its_crops))
            rest = self._cropped_by_maker(part, its, its_crops)
            if rest is None:
                return None
            placed |= rest
        placed[at] = eqn.replace(invars=operands, outvars=[cropped], params=params)
        return placed


def _shape(atom: Any) -> tuple[int, ...]:
    return atom.aval.shape


def _without(atom: Any, sides: _Sides) -> Any:
    """The type of an array without these elements at its sides."""
    shape = (e - sum(sides.get(axis, ())) for axis, e in enumerate(_shape(atom)))
    return atom.aval.update(shape=tuple(shape))


# --- operations that keep the order of elements ---


class _View(NamedTuple):
    """An operation on one array, applied to an array with fewer elements along some axes.

    Attributes:
        params: its new parameters.
        sides: the elements that its result (backwards: its operand) lacks.
    """

    params: dict[str, Any]
    sides: _Sides


def _view(eqn: JaxprEqn, sides: _Sides, backwards: bool = False) -> _View | None:
    """An equation as a view, or None if it is none along these axes.

    Args:
        eqn: the equation.
        sides: the elements that the operand (``backwards``: the result) lacks.
        backwards: follows the axes from the result to the operand.
    """
    name = eqn.primitive.name
    if name not in _VIEWS or len(eqn.invars) > 1:
        return None
    if name in _SHAPED and eqn.params.get("sharding") is not None:
        return None
    axes = _kept_axes(eqn)
    follow = {out: operand for operand, out in axes.items()} if backwards else axes
    if not sides.keys() <= follow.keys():
        return None
    others = {follow[axis]: pair for axis, pair in sides.items()}
    shape = _without(eqn.outvars[0], sides if backwards else others).shape
    params = dict(eqn.params)
    if name in _SHAPED:
        params[_SHAPED[name]] = shape
    return _View(params, others)


def _kept_axes(eqn: JaxprEqn) -> dict[int, int]:
    """The axes of an operand that the result also has, with their positions there."""
    name, params = eqn.primitive.name, eqn.params
    before, after = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    if name in _AXIS_BY_AXIS or (name == "slice" and before == after):
        return {axis: axis for axis in range(len(before))}
    if name == "transpose":
        return {axis: place for place, axis in enumerate(params["permutation"])}
    if name == "squeeze":
        kept = (a for a in range(len(before)) if a not in params["dimensions"])
        return {axis: place for place, axis in enumerate(kept)}
    if name == "broadcast_in_dim":
        places = enumerate(params["broadcast_dimensions"])
        return {axis: place for axis, place in places if before[axis] == after[place]}
    if name == "slice":
        return {}
    order = params["dimensions"] or range(len(before))  # a reshape may transpose before
    before = [before[axis] for axis in order]
    outside = {(math.prod(after[:place]), e): place for place, e in enumerate(after)}
    keys = {axis: (math.prod(before[:i]), before[i]) for i, axis in enumerate(order)}
    return {axis: outside[key] for axis, key in keys.items() if key in outside}


# --- convolutions ---


class _Steps(NamedTuple):
    """The change of a convolution's padding with the extent of one of its arrays.

    Attributes:
        axes: the array's spatial axes.
        padding: the elements of padding, by axis, that replace one element at a side of the array;
            negative if removing the element reduces the padding.
    """

    axes: Sequence[int]
    padding: Sequence[int]


@dataclasses.dataclass(frozen=True)
class _Window:
    """A convolution's padding, and the arrays that it pads or crops.

    Attributes:
        padding: the sides of each spatial axis.
        reach: the window's dilated extent along each axis, minus one.
        left, result: the change of the padding with the left operand and with the result, or None.
        with_padding: returns the parameters for another padding and the elements that x then lacks.
    """

    padding: Sequence[tuple[int, int]]
    reach: Sequence[int]
    left: _Steps | None
    result: _Steps | None
    with_padding: Callable[[list[tuple[int, int]], _Sides], dict[str, Any]]

    def with_left_padded(self, sides: _Sides) -> dict[str, Any] | None:
        """The parameters for a left operand without these zeros, or None."""
        return self._changed(self.left, sides)

    def with_result_cropped(self, sides: _Sides) -> dict[str, Any] | None:
        """The parameters for a result without these elements, or None."""
        return self._changed(self.result, sides)

    def _changed(self, steps: _Steps | None, sides: _Sides) -> dict[str, Any] | None:
        if steps is None or not sides.keys() <= set(steps.axes):
            return None
        padding = list(self.padding)
        less: _Sides = {}
        for i, (axis, step) in enumerate(zip(steps.axes, steps.padding, strict=True)):
            pair = sides.get(axis, (0, 0))
            less[i] = pair if step > 0 else (0, 0)
            ends = [end + step * count for end, count in zip(padding[i], pair, strict=True)]
            for end, count in zip(ends, pair, strict=True):
                if count and not (end <= self.reach[i] if step > 0 else end >= 0):
                    return None
            padding[i] = (ends[0], ends[1])
        return self.with_padding(padding, less)


def _window(eqn: JaxprEqn) -> _Window | None:
    """A convolution's window; None for other equations and for unknown extents."""
    name = eqn.primitive.name
    if name == _LAX:
        return _of_lax(eqn)
    if name == _FUSED or name in _OWN:
        return _of_this_library(eqn)
    return None


def _of_lax(eqn: JaxprEqn) -> _Window | None:
    params = eqn.params
    numbers, padding = params["dimension_numbers"], params["padding"]
    rhs, out = _shape(eqn.invars[1]), _shape(eqn.outvars[0])
    dilation, strides = params["rhs_dilation"], params["window_strides"]
    extents = dilated_extents([rhs[axis] for axis in numbers.rhs_spec[2:]], dilation)
    if numbers.lhs_spec[0] > numbers.lhs_spec[1]:  # in a weight gradient, the result is the window
        extents = dilated_extents([out[axis] for axis in numbers.out_spec[2:]], strides)
    if not all(map(known, (*extents, *(end for pair in padding for end in pair)))):
        return None
    return _Window(
        padding=padding,
        reach=[e - 1 for e in extents],
        left=_Steps(numbers.lhs_spec[2:], params["lhs_dilation"]),
        result=_Steps(numbers.out_spec[2:], [-s for s in strides]),
        with_padding=lambda padding, _: {**params, "padding": tuple(padding)},
    )


# This library's convolutions by primitive.
_OWN = {f"jaxconv_{op.value}": op for op in Op}


def _of_this_library(eqn: JaxprEqn) -> _Window | None:
    params, op = eqn.params, _OWN.get(eqn.primitive.name, Op.FPROP)
    spec = params["spec"]
    # A named algorithm accepted this problem at trace time, and may not accept another one.
    if spec.symbolic or spec.algorithm_of(op) not in selection.PREDICTED:
        return None
    first = 1 + spec.batched
    x = _Steps(spec.x_axes[first:-1], spec.lhs_dilation)
    y = _Steps(spec.y_axes[first:-1], [-s for s in spec.stride])
    crops_y = eqn.primitive.name != _FUSED and op is Op.FPROP

    def with_padding(padding: list[tuple[int, int]], less: _Sides) -> dict[str, Any]:
        extents = (e - sum(less[i]) for i, e in enumerate(spec.in_spatial))
        changed = dataclasses.replace(spec, padding=tuple(padding), in_spatial=tuple(extents))
        return {**params, "spec": changed}

    return _Window(
        padding=spec.padding,
        reach=[e - 1 for e in spec.dilated_spatial[1]],
        left=None if op is Op.DGRAD else x,
        result=x if op is Op.DGRAD else y if crops_y else None,
        with_padding=with_padding,
    )
