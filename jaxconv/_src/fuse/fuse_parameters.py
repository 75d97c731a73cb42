"""Computes what calls read of a program's parameters by one kernel.

A convolution's filter in bfloat16, and the scale and bias that follow from a batch norm's vectors,
depend on the program's arguments alone. Each is an elementwise function of few numbers and the
operand of a call, which reads it from memory, so XLA would launch a kernel for each. Calls of
``elementwise`` at the program's start compute them together.
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

# Operations that give their operand's elements, in order.
_MOVING = (*IDENTITIES, "reshape", "squeeze", "expand_dims")

# Operations of two numbers, and of one, by the steps' names.
_STEPS = {"add": "add", "add_any": "add", "sub": "sub", "mul": "mul", "div": "div"}
_STEPS |= {"max": "max", "min": "min", "neg": "neg", "rsqrt": "rsqrt", "sqrt": "sqrt"}

# The most elements of an array for which a launch takes a large part of the time.
MOST_ELEMENTS = 1 << 20

# A value of a function that is being built: its kind, and its position among those of the kind.
_Value = tuple[int, int]
_OPERAND, _CONSTANT, _STEP = range(3)

# The fewest results that are worth a call.
_FEWEST = 2

# Primitives of this library that XLA fuses with what computes their operands.
_BY_XLA = (normalise.normalise_p, normalise.normalise_tangent_p)


def rewritten(eqns: Sequence[JaxprEqn], outvars: Sequence[Any]) -> list[JaxprEqn]:
    """A program's equations, the small functions of its arguments that calls read in one call."""
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
    behind = {atom: compat.variable(type_of(atom)) for atom in read}
    try:
        calls = [call for part in _parts(read) for call in _call(graph, read, part, behind)]
    except (TypeError, ValueError, compat.ShardingTypeError):
        return graph.eqns
    rest = [
        eqn.replace(invars=[behind.get(a, a) if isinstance(a, Var) else a for a in eqn.invars])
        if _reads_memory(eqn)
        else eqn
        for eqn in graph.eqns
    ]
    return live([*calls, *rest], outvars)


class _Written:
    """The function of a program's arguments that gives an atom.

    Attributes:
        operands: the arguments.
        constants: numbers.
        steps: names of ``elementwise.STEPS``, with the values that each reads.
    """

    def __init__(self) -> None:
        self.operands: list[Var] = []
        self.constants: list[float] = []
        self.steps: list[tuple[str, tuple[_Value, ...]]] = []

    @property
    def function(self) -> Function:
        """The function, with its values numbered."""
        operands, constants = len(self.operands), len(self.constants)
        first = (0, operands, operands + constants)  # by kind
        steps = [(name, tuple(first[k] + at for k, at in read)) for name, read in self.steps]
        return Function(operands, tuple(self.constants), tuple(steps))


def _written(graph: Graph, atom: Var) -> _Written | None:
    """The function of a program's arguments that gives an atom, or None."""
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
    last, read = written.steps[-1]
    alone = len(written.steps) == 1 and read == ((_OPERAND, 0),) and not written.constants
    behind_another = read == ((_STEP, len(written.steps) - 2),)
    if last == np.dtype(aval.dtype).name and (alone or behind_another):
        written.steps.pop()  # the store rounds
    return written


def _value(
    graph: Graph, atom: Any, size: int, written: _Written, known: dict[Any, _Value | None]
) -> _Value | None:
    """An atom's value in a function, which this extends, or None."""
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
    """The results of each call, within its limits."""
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
    graph: Graph, read: dict[Var, _Written], part: Sequence[Var], behind: dict[Var, Var]
) -> list[JaxprEqn]:
    """The call that computes some atoms as the variables ``behind`` them."""
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

    return traced(call, tuple(operands), [behind[atom] for atom in part], graph, 0)


def _reads_memory(eqn: JaxprEqn) -> bool:
    """Whether an equation is a call of a kernel that XLA fuses nothing into."""
    name = eqn.primitive.name
    calls = name.startswith("jaxconv_") and eqn.primitive not in _BY_XLA
    return calls or name in fuse_convolution.NAMES
