"""Computes the functions of a program's parameters that calls read, by one kernel.

A filter converted to bfloat16, and the scale and bias computed from a batch norm's vectors, depend
on the program's arguments only. Each is a small array, and the operand of a custom call, which
reads it from memory. XLA would launch one kernel for each. Calls of ``elementwise`` at the
program's start compute them together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Var

from jaxconv._src import compat
from jaxconv._src.fuse import fuse_convolution
from jaxconv._src.fuse.fuse_graph import IDENTITIES, Graph, is_float, live, traced, type_of
from jaxconv._src.passes import elementwise, normalise
from jaxconv._src.passes.elementwise import Function, Result
from jaxconv._src.sharding import explicit_mesh

# Operations that return their operand's elements, in order.
_MOVING = (*IDENTITIES, "reshape", "squeeze")

# The name in ``elementwise.STEPS`` of each primitive.
_STEPS = {"add": "add", "add_any": "add", "sub": "sub", "mul": "mul", "div": "div"}
_STEPS |= {"max": "max", "min": "min", "neg": "neg", "rsqrt": "rsqrt", "sqrt": "sqrt"}

# The most elements of a result. For larger arrays the launch is a small part of the time.
MOST_ELEMENTS = 1 << 20

# A value of a function under construction: its kind, and its index among the values of this kind.
_Value = tuple[int, int]
_OPERAND, _CONSTANT, _STEP = range(3)

# The fewest results for which a call saves a launch.
_FEWEST = 2

# Primitives of this library that are lowered to operations which XLA fuses with their operands.
_BY_XLA = (normalise.normalise_p, normalise.normalise_tangent_p)


def rewritten(eqns: Sequence[JaxprEqn], outvars: Sequence[Any]) -> list[JaxprEqn]:
    """A program's equations, with one call for the functions of its arguments that calls read."""
    graph = Graph(eqns, outvars)
    if not fuse_convolution.for_cuda():
        return graph.eqns
    read: dict[Var, _Written] = {}
    for eqn in filter(_reads_memory, graph.eqns):
        for atom in eqn.invars:
            if isinstance(atom, Var) and atom not in read:
                written = _written(graph, atom)
                if written is not None:
                    read[atom] = written
    if len(read) < _FEWEST:
        return graph.eqns
    computed = {atom: compat.variable(type_of(atom)) for atom in read}
    try:
        calls = [call for part in _parts(read) for call in _call(graph, read, part, computed)]
    except (TypeError, ValueError, compat.ShardingTypeError):
        return graph.eqns
    rest = [
        eqn.replace(invars=[computed.get(a, a) if isinstance(a, Var) else a for a in eqn.invars])
        if _reads_memory(eqn)
        else eqn
        for eqn in graph.eqns
    ]
    return live([*calls, *rest], outvars)


class _Written:
    """A function of a program's arguments under construction.

    Attributes:
        operands: the arguments.
        constants: the numbers that the function contains.
        steps: names in ``elementwise.STEPS``, with the values that each reads.
    """

    def __init__(self) -> None:
        self.operands: list[Var] = []
        self.constants: list[float] = []
        self.steps: list[tuple[str, tuple[_Value, ...]]] = []

    @property
    def function(self) -> Function:
        """The finished function, which numbers operands, constants and steps consecutively."""
        operands, constants = len(self.operands), len(self.constants)
        first = (0, operands, operands + constants)  # by kind
        steps = [(name, tuple(first[k] + at for k, at in read)) for name, read in self.steps]
        return Function(operands, tuple(self.constants), tuple(steps))


def _written(graph: Graph, atom: Var) -> _Written | None:
    """The function of a program's arguments that computes an atom, or None."""
    aval = type_of(atom)
    size = math.prod(getattr(aval, "shape", ()))
    if not is_float(getattr(aval, "dtype", bool)) or not 1 < size <= MOST_ELEMENTS:
        return None
    if explicit_mesh.mesh_of(aval) is not None:
        return None
    written = _Written()
    known: dict[Any, _Value | None] = {}
    value = _value(graph, atom, size, written, known)
    if value is None or not written.operands or not written.steps:
        return None  # no function, a constant, or an argument, perhaps in another shape
    # A final rounding to the result's dtype is superfluous, because the store rounds.
    last, read = written.steps[-1]
    alone = len(written.steps) == 1 and read == ((_OPERAND, 0),) and not written.constants
    of_previous = read == ((_STEP, len(written.steps) - 2),)
    if last == np.dtype(aval.dtype).name and (alone or of_previous):
        written.steps.pop()
    return written


def _value(
    graph: Graph, atom: Any, size: int, written: _Written, known: dict[Any, _Value | None]
) -> _Value | None:
    """Extends a function by what computes an atom, and returns the atom's value, or None."""
    number = graph.constant(atom)
    if number is not None:
        if number not in written.constants:
            if len(written.constants) == elementwise.MOST_CONSTANTS:
                return None
            written.constants.append(number)
        return _CONSTANT, written.constants.index(number)
    if atom not in known:
        known[atom] = _computed(graph, atom, size, written, known)
    return known[atom]


def _computed(
    graph: Graph, atom: Any, size: int, written: _Written, known: dict[Any, _Value | None]
) -> _Value | None:
    aval = type_of(atom)
    elements = math.prod(aval.shape)
    if not is_float(aval.dtype) or elements not in (1, size):
        return None
    made = graph.producer(atom)
    if made is None:
        atom = graph.source(atom)
        if atom not in written.operands:
            if len(written.operands) == elementwise.MOST_OPERANDS:
                return None
            written.operands.append(atom)
        return _OPERAND, written.operands.index(atom)
    name = made.primitive.name
    spreads = name == "broadcast_in_dim" and len(made.invars) == 1
    if spreads:
        spreads = math.prod(type_of(made.invars[0]).shape) in (1, elements)
    if name in _MOVING or spreads:
        return _value(graph, made.invars[0], size, written, known)
    if name == "convert_element_type":
        value = _value(graph, made.invars[0], size, written, known)
        from_dtype = getattr(type_of(made.invars[0]), "dtype", None)
        if value is None or from_dtype is None or not is_float(from_dtype):
            return None
        return _rounded(value, aval, written)
    if name not in _STEPS:
        return None
    values = [_value(graph, a, size, written, known) for a in made.invars]
    if None in values:
        return None
    step = _step(_STEPS[name], tuple(v for v in values if v is not None), written)
    return step if step is None else _rounded(step, aval, written)


def _rounded(value: _Value, aval: Any, written: _Written) -> _Value | None:
    if aval.dtype == np.float32:
        return value
    return _step(np.dtype(aval.dtype).name, (value,), written)


def _step(name: str, values: tuple[_Value, ...], written: _Written) -> _Value | None:
    if len(written.steps) == elementwise.MOST_STEPS:
        return None
    written.steps.append((name, values))
    return _STEP, len(written.steps) - 1


def _parts(read: dict[Var, _Written]) -> list[list[Var]]:
    """The atoms, divided into calls within the limits of ``elementwise``."""
    parts: list[list[Var]] = [[]]
    functions: set[Function] = set()
    for atom, written in read.items():
        functions.add(written.function)
        full = len(parts[-1]) == elementwise.MOST_RESULTS
        if full or len(functions) > elementwise.MOST_FUNCTIONS:
            parts.append([])
            functions = {written.function}
        parts[-1].append(atom)
    return parts


def _call(
    graph: Graph, read: dict[Var, _Written], part: Sequence[Var], computed: dict[Var, Var]
) -> list[JaxprEqn]:
    """The call that computes some atoms and writes them to the variables ``computed``."""
    operands = list(dict.fromkeys(a for atom in part for a in read[atom].operands))
    results = tuple(
        Result(
            read[atom].function,
            tuple(map(operands.index, read[atom].operands)),
            type_of(atom).shape,
            np.dtype(type_of(atom).dtype),
        )
        for atom in part
    )

    def call(*arrays: jax.Array) -> list[jax.Array]:
        return elementwise.elementwise(*arrays, results=results)

    return traced(call, tuple(operands), [computed[atom] for atom in part], graph, 0)


def _reads_memory(eqn: JaxprEqn) -> bool:
    """Whether an equation is a custom call or convolution, which reads its operands from memory."""
    name = eqn.primitive.name
    calls = name.startswith("jaxconv_") and eqn.primitive not in _BY_XLA
    return calls or name in fuse_convolution.NAMES
