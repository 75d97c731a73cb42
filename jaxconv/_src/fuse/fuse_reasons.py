"""Gives the reason why a chain ends in terms of layers instead of primitives.

``fuse_chain`` finds the end of a chain and names primitives. This module groups the readers at that
point: a reduction and the operations that apply its result are one reader, such as "group norm" or
"squeeze and excitation". No reason is given if the readers could not be part of an epilogue:
another convolution, a reduction, pooling, the loss, or a sum that another call computes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn, Var

from jaxconv._src import compat
from jaxconv._src.fuse.fuse_graph import REDUCTIONS, Graph, type_of

# The reasons of ``fuse_chain`` that only name readers; its other reasons are more specific.
_OF_ANY_READER = re.compile(r"its result (is|has) .*|\w+ follows")

# Equations that keep the number of elements but are not elementwise.
_NOT_ELEMENTWISE = ("conv_general_dilated", "jaxconv_", "reduce_window", "select_and", "cum")
_NOT_ELEMENTWISE += ("rev", "sort", "scan", "while", "cond", "transpose")
_SAME_ORDER = ("convert_element_type", "copy", "copy_p")
_RESHAPES = ("reshape", "squeeze", "broadcast_in_dim")

# The most equations examined after a reduction, to find out what its result is used for.
_REACH = 64


def end_reason(
    graph: Graph, end: Var, axis: int, taken: Collection[int], reason: str, *, refused: bool
) -> str:
    """Why a chain ends, in terms of layers; "" if a longer epilogue would save no pass.

    Args:
        graph: the program.
        end: the chain's last variable.
        axis: its channel axis.
        taken: positions of the equations that calls compute.
        reason: the reason of ``fuse_chain``; "" if no following operation could be part of it.
        refused: whether this reason rules out any epilogue for the convolution.
    """
    if not compat.is_constant_shape(type_of(end).shape):
        return reason
    names, norm, gains = _readers(graph, end, axis, taken)
    of_any = _OF_ANY_READER.fullmatch(reason)
    if not (gains if of_any or refused else norm or reason):
        return ""
    if reason and not of_any:
        return reason
    if end in graph.returned:
        return reason
    if len(names) == 1:
        return f"{names[0]} follows"
    return f"its result has {len(names)} uses ({', '.join(sorted(set(names)))})"


class _Reader(NamedTuple):
    """An equation that reads a value, and the shape in which it reads it.

    Attributes:
        eqn: the equation.
        operand: the value, reshaped, converted or squared.
        labels: the axes of ``operand``: "n" images, "s" positions, "g" groups, "c" channels, or
            several of these merged.
    """

    eqn: JaxprEqn
    operand: Var
    labels: tuple[str, ...]


def _readers(
    graph: Graph, value: Var, axis: int, taken: Collection[int]
) -> tuple[list[str], bool, bool]:
    """The readers of a value.

    Returns:
        Their names; whether one is a norm; whether an epilogue could save a pass over the value,
        because one is a norm or elementwise.
    """
    rank = len(type_of(value).shape)
    images = 0 if axis else 1
    labels = ("c" if i == axis else "n" if i == images else "s" for i in range(rank))
    found = list(_readers_in_any_shape(graph, value, tuple(labels), taken))
    norm, parts = _norm(graph, type_of(value).size, found)
    others = {id(r.eqn): r for r in found if id(r.eqn) not in parts}.values()
    names = [norm]
    for reader in others:
        names += [_name(graph, reader.eqn)] * reader.eqn.invars.count(reader.operand)
    is_norm = norm not in ("", _SOFTMAX)
    return [n for n in names if n], is_norm, is_norm or any(map(_elementwise, others))


def _readers_in_any_shape(
    graph: Graph, value: Var, labels: tuple[str, ...], taken: Collection[int]
) -> Iterator[_Reader]:
    """The readers of a value and of its reshaped or converted forms; for its square, reductions."""
    for position in dict.fromkeys(graph.uses(value)):
        eqn = graph.eqns[position]
        if position in taken:
            continue
        its_labels = _relabelled(eqn, labels)
        if its_labels is not None:
            yield from _readers_in_any_shape(graph, eqn.outvars[0], its_labels, taken)
            continue
        yield _Reader(eqn, value, labels)
        if _is_square(eqn):
            squared = _readers_in_any_shape(graph, eqn.outvars[0], labels, taken)
            yield from (r for r in squared if r.eqn.primitive.name in REDUCTIONS)


def _is_square(eqn: JaxprEqn) -> bool:
    name, (first, *rest) = eqn.primitive.name, eqn.invars
    return name in ("square", "integer_pow") or (name == "mul" and rest == [first])


def _elementwise(reader: _Reader) -> bool:
    if not reader.eqn.outvars:
        return False
    (out, *_) = reader.eqn.outvars
    shape = getattr(type_of(out), "shape", None)
    name = reader.eqn.primitive.name
    return shape == type_of(reader.operand).shape and not name.startswith(_NOT_ELEMENTWISE)


def _name(graph: Graph, eqn: JaxprEqn) -> str:
    """An equation's name; for a jitted function or one with custom derivatives, its own."""
    name = eqn.primitive.name
    if name == "reduce_sum" and _is_mean(graph, eqn):
        return "mean"
    called = eqn.params.get("name")
    return called if isinstance(called, str) else name


def _is_mean(graph: Graph, total: JaxprEqn) -> bool:
    (out,) = total.outvars
    unlabelled = ("",) * len(type_of(out).shape)
    return any(
        r.eqn.primitive.name == "div" for r in _readers_in_any_shape(graph, out, unlabelled, ())
    )


# --- axes ---


def _relabelled(eqn: JaxprEqn, labels: tuple[str, ...]) -> tuple[str, ...] | None:
    """The labels of a result that is its operand reshaped, transposed or converted, else None."""
    name = eqn.primitive.name
    if name in _SAME_ORDER:
        return labels
    if name == "transpose":
        return tuple(labels[axis] for axis in eqn.params["permutation"])
    if name not in _RESHAPES or len(eqn.invars) > 1:
        return None
    before, after = type_of(eqn.invars[0]).shape, type_of(eqn.outvars[0]).shape
    if math.prod(before) != math.prod(after):
        return None
    return _reshaped(before, after, labels)


def _reshaped(
    before: Sequence[int], after: Sequence[int], labels: tuple[str, ...]
) -> tuple[str, ...]:
    """The labels of an array's axes after a reshape."""
    found: list[str] = []
    first = last = 0  # the axes of `before` that become some of `after`
    while len(found) < len(after):
        start, last = len(found) + 1, min(last + 1, len(before))
        while (inner := math.prod(before[first:last])) != (
            outer := math.prod(after[len(found) : start])
        ):
            start, last = (start, last + 1) if inner < outer else (start + 1, last)
        merged = "".join(dict.fromkeys("".join(labels[first:last])))
        parts = [merged] * (start - len(found))
        if len(parts) > 1 and merged.startswith("c"):
            parts[0] = "g"
        found += parts
        first = last
    return tuple(found)


# --- norms ---

_SOFTMAX = "softmax"


def _norm(graph: Graph, size: int, readers: Sequence[_Reader]) -> tuple[str, set[int]]:
    """The name of the layer to which reductions among the readers belong, and the layer's readers.

    Readers are given by the ``id`` of their equation. "" and no readers if there is no such layer.
    """
    reductions = [r for r in readers if r.eqn.primitive.name in REDUCTIONS]
    operations, spread = _uses_of([r.eqn.outvars[0] for r in reductions], graph, size)
    given = (r for r in readers if r.eqn.outvars)  # a callback may have no result
    applied = [r for r in given if any(isinstance(a, Var) and a in spread for a in r.eqn.invars)]
    parts = {id(r.eqn) for r in (*reductions, *applied)}
    if not applied:
        return "", set()
    for reader in applied:  # the variance, after the mean was subtracted
        centred = _readers_in_any_shape(graph, reader.eqn.outvars[0], reader.labels, ())
        again = [r.eqn.outvars[0] for r in centred if r.eqn.primitive.name in REDUCTIONS]
        operations |= _uses_of(again, graph, size)[0]
    if operations & {"rsqrt", "sqrt"}:
        kinds = [kind for r in reductions if (kind := _kind_of_norm(r))]
        same = (r for r in readers if _is_square(r.eqn) or _is_scaled(graph, r.eqn, size))
        return (kinds[0], parts | {id(r.eqn) for r in same}) if kinds else ("", set())
    if any(r.eqn.primitive.name == "reduce_max" for r in reductions):
        return _SOFTMAX, parts
    excites = all(r.eqn.primitive.name == "mul" for r in applied)
    squeezes = all(_reduced(r)[0] == "s" for r in reductions)
    return ("squeeze and excitation", parts) if squeezes and excites else ("", set())


def _is_scaled(graph: Graph, eqn: JaxprEqn, size: int) -> bool:
    """Whether an equation multiplies by a broadcast smaller array, as a norm's gradient does."""
    if eqn.primitive.name != "mul":
        return False
    factors = [type_of(atom).size for atom in eqn.invars]
    makers = [made for atom in eqn.invars if (made := graph.producer(atom)) is not None]
    spread = (m for m in makers if m.primitive.name == "broadcast_in_dim")
    return min(*factors, *(type_of(m.invars[0]).size for m in spread)) < size


def _uses_of(start: list[Any], graph: Graph, size: int) -> tuple[set[str], set[Any]]:
    """Follows small arrays, such as means, to their use on a large array.

    Args:
        start: the small arrays.
        graph: the program.
        size: the number of elements of the large array.

    Returns:
        The names of the primitives that compute with the small arrays, and all arrays reached:
        small ones, and those broadcast to the large array's size.
    """
    names: set[str] = set()
    spread: set[Any] = set()
    pending, seen = list(start), 0
    while pending and seen < _REACH:
        array = pending.pop(0)
        if type_of(array).size < size:
            spread.add(array)
        for position in graph.uses(array):
            eqn = graph.eqns[position]
            seen += 1
            if not eqn.outvars:
                continue
            (out, *_) = eqn.outvars
            if getattr(type_of(out), "size", size) < size:
                names.add(eqn.primitive.name)
                pending.append(out)
            elif eqn.primitive.name in ("broadcast_in_dim", *_SAME_ORDER):
                spread.add(out)
                pending.append(out)
    return names, spread


def _reduced(reader: _Reader) -> tuple[str, str]:
    """The sorted labels of the axes that a reduction sums, and of those that it keeps."""
    axes = reader.eqn.params["axes"]
    labels = enumerate(reader.labels)
    sides: tuple[set[str], set[str]] = set(), set()
    for axis, label in labels:
        if type_of(reader.operand).shape[axis] > 1:
            sides[axis not in axes].update(label)
    return "".join(sorted(sides[0])), "".join(sorted(sides[1]))


def _kind_of_norm(reader: _Reader) -> str:
    over, kept = _reduced(reader)
    if "n" in over:
        return "" if "c" in over else "batch norm"
    if "c" in over:
        return "group norm" if "g" in kept else "layer norm"
    return "instance norm" if over == "s" else ""
