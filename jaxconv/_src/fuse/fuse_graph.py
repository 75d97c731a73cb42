"""A def-use graph of a jaxpr's equations, with constants and per-channel vectors."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from jaxconv._src import compat

# Operations whose result is their operand.
IDENTITIES = ("copy", "copy_p")

# Operations that only move or repeat their operand's elements, in order.
SPREADING = ("broadcast_in_dim", "reshape", "squeeze", "pvary", "pcast")

# Reductions and elementwise operations: XLA fuses the computation of their operands into them. Not
# additions, whose operand may become the residual of another convolution's call, which reads it
# from memory.
REDUCTIONS = frozenset(("reduce_sum", "reduce_max", "reduce_min"))
_ABSORBING = REDUCTIONS | {
    *("sub", "mul", "div", "neg", "max", "min", "abs", "sign", "square"),
    *("integer_pow", "pow", "sqrt", "rsqrt", "exp", "exp2", "log", "log1p", "expm1", "tanh"),
    *("logistic", "erf", "erfc", "select_n", "clamp", "convert_element_type"),
    *("eq", "ne", "lt", "le", "gt", "ge"),
}
ELEMENTWISE = (_ABSORBING - REDUCTIONS) | {"add", "add_any"}


def is_float(dtype: Any) -> bool:
    """Whether a convolution with an epilogue computes and stores this type."""
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return False  # random keys
    return np.dtype(dtype).name in ("float16", "bfloat16", "float32")


def type_of(atom: Any) -> Any:
    """An atom's type, with its shape and dtype (JAX annotates ``aval`` as a class without them)."""
    return atom.aval


class Graph:
    """The equation that makes each variable, and those that use it.

    Attributes:
        eqns: the equations, in the program's order.
        returned: variables that the program returns.
        known: the values of constants, by variable.
    """

    def __init__(
        self,
        eqns: Sequence[JaxprEqn],
        outvars: Iterable[Any],
        known: Mapping[Var, Any] | None = None,
    ):
        self.eqns = list(eqns)
        self.returned = {v for v in outvars if isinstance(v, Var)}
        self.known = known or {}
        self._made_by: dict[Var, int] = {}
        self._used_by: dict[Var, list[int]] = collections.defaultdict(list)
        for index, eqn in enumerate(self.eqns):
            for var in eqn.outvars:
                self._made_by[var] = index
            for atom in eqn.invars:
                if isinstance(atom, Var):
                    self._used_by[atom].append(index)

    def index(self, atom: Any) -> int | None:
        """The position of the equation that makes an atom; None for an argument or a literal."""
        return self._made_by.get(atom) if isinstance(atom, Var) else None

    @property
    def read(self) -> list[Var]:
        """The variables that equations read, copies skipped."""
        atoms = (a for eqn in self.eqns for a in eqn.invars if isinstance(a, Var))
        return list(dict.fromkeys(map(self.source, atoms)))

    def producer(self, atom: Any) -> JaxprEqn | None:
        """The equation that makes an atom, copies skipped."""
        index = self.index(self.source(atom))
        return None if index is None else self.eqns[index]

    def source(self, atom: Any) -> Any:
        """The atom of which an atom is a copy."""
        while (index := self.index(atom)) is not None:
            if self.eqns[index].primitive.name not in IDENTITIES:
                break
            atom = self.eqns[index].invars[0]
        return atom

    def with_replaced(self, placed: Mapping[int, Sequence[JaxprEqn]]) -> list[JaxprEqn]:
        """The program's equations, with replacements at some positions."""
        return [e for at, eqn in enumerate(self.eqns) for e in placed.get(at, [eqn])]

    def uses(self, var: Var) -> list[int]:
        """Positions of the equations that use a variable, one entry for each use."""
        return self._used_by.get(var, [])

    def absorbed(self, var: Var) -> bool:
        """Whether XLA computes a variable inside its uses and does not store it."""
        uses = self.uses(var)
        return (
            bool(uses)
            and var not in self.returned
            and all(self.eqns[i].primitive.name in _ABSORBING for i in uses)
        )

    def computed_for_one_use(self, atom: Any, stored: Collection[Var]) -> bool:
        """Whether an elementwise operation makes an atom, and a single operation reads it.

        Args:
            atom: the atom; conversions are skipped.
            stored: variables that are stored in any case, for which the answer is False.
        """
        while (made := self.producer(atom)) is not None:
            uses = self.uses(atom) if isinstance(atom, Var) else []
            if atom in stored or atom in self.returned or len(uses) > 1:
                return False
            if made.primitive.name != "convert_element_type":
                return made.primitive.name in ELEMENTWISE
            atom = made.invars[0]
        return False

    def computed_from(self, atom: Any, start: Any) -> list[int] | None:
        """Positions of the equations on which an atom depends, without those that make ``start``.

        None if it depends on an argument of the program or on an effect.
        """
        found: set[int] = set()
        pending = [atom]
        while pending:
            atom = pending.pop()
            if isinstance(atom, Literal) or atom is start or atom in self.known:
                continue
            position = self.index(atom)
            if position is None or self.eqns[position].effects:
                return None
            if position not in found:
                found.add(position)
                pending += self.eqns[position].invars
        return sorted(found)

    def function(self, atom: Any, start: Var | None = None) -> Callable[..., Any] | None:
        """An atom as a function of ``start``, or of nothing; None if it depends on anything else.

        The function runs the program's equations, so its derivatives are also the program's.
        """
        positions = self.computed_from(atom, start)
        if positions is None:
            return None
        eqns = [self.eqns[i] for i in positions]
        read = [a for a in (atom, *(a for eqn in eqns for a in eqn.invars)) if isinstance(a, Var)]
        constants = {a: self.known[a] for a in read if a in self.known}

        def function(*given: Any) -> Any:
            values = constants | ({} if start is None else {start: given[0]})
            compute(eqns, values)
            return jnp.asarray(atom.val if isinstance(atom, Literal) else values[atom])

        return function

    def magnitudes(self, atom: Any) -> tuple[float, float] | None:
        """The smallest nonzero and the largest magnitude in a known array, or None."""
        atom = self.source(atom)
        while (made := self.producer(atom)) is not None:
            if made.primitive.name not in (*SPREADING, "convert_element_type"):
                return None
            atom = self.source(made.invars[0])
        value = atom.val if isinstance(atom, Literal) else self.known.get(atom)
        if value is None or not jnp.issubdtype(jnp.result_type(value), jnp.number):
            return None
        sizes = np.abs(np.asarray(value).astype(np.float64))
        sizes = sizes[sizes > 0]  # ignores NaN, which stays NaN in every product and sum
        return (float(sizes.min()), float(sizes.max())) if sizes.size else (1.0, 1.0)

    def constant(self, atom: Any) -> float | None:
        """The known value of a scalar or of an array of one number."""
        atom = self.source(atom)
        if isinstance(atom, Literal):
            value = atom.val
        elif atom in self.known:
            value = self.known[atom]
        else:
            eqn = self.producer(atom)
            if eqn is not None and eqn.primitive.name in SPREADING and len(eqn.invars) == 1:
                return self.constant(eqn.invars[0])
            if eqn is None or eqn.primitive.name != "convert_element_type":
                return None
            number = self.constant(eqn.invars[0])
            if number is None:
                return None
            if not jnp.issubdtype(type_of(eqn.outvars[0]).dtype, jnp.floating):
                return None
            return float(np.asarray(number).astype(type_of(eqn.outvars[0]).dtype))
        if np.size(value) != 1 or not jnp.issubdtype(jnp.result_type(value), jnp.number):
            return None
        if jnp.issubdtype(jnp.result_type(value), jnp.complexfloating):
            return None
        return float(np.asarray(value).reshape(()))

    def channel_vector(self, atom: Any, shape: tuple[int, ...], axis: int) -> Vector | None:
        """An operand of an elementwise operation as one number per channel.

        Args:
            atom: the operand, with the shape ``shape`` or broadcast to it.
            shape: the other operand's shape.
            axis: the other operand's channel axis.

        Returns:
            The vector, or None if the operand also varies along another axis.
        """
        casts: list[np.dtype] = []
        while True:
            aval = type_of(atom)
            if aval.shape == () or math.prod(aval.shape) == 1:
                return Vector(atom, tuple(reversed(casts)))
            if len(aval.shape) == len(shape):
                extended = [i for i, extent in enumerate(aval.shape) if extent > 1]
                if extended == [axis]:
                    return Vector(atom, tuple(reversed(casts)))
            eqn = self.producer(atom)
            if eqn is None:
                return None
            if eqn.primitive.name == "convert_element_type":
                casts.append(np.dtype(eqn.params["new_dtype"]))
                atom = eqn.invars[0]
            elif eqn.primitive.name == "broadcast_in_dim":
                (atom, *dynamic) = eqn.invars
                places = eqn.params["broadcast_dimensions"]
                extended = [p for p, e in zip(places, type_of(atom).shape, strict=True) if e > 1]
                if dynamic or extended not in ([], [axis]):
                    return None
                return Vector(atom, tuple(reversed(casts)))
            else:
                return None


@dataclasses.dataclass(frozen=True)
class Vector:
    """One number per channel: an array with one element, or one for each channel.

    Attributes:
        atom: the array, of any rank.
        casts: dtypes to which the program converts it, in order.
    """

    atom: Any
    casts: tuple[np.dtype, ...]

    def read(self, array: Any, channels: int) -> Any:
        """The vector as float32 (channels,), from the array's value."""
        array = jnp.asarray(array)
        for dtype in self.casts:
            array = array.astype(dtype)
        array = array.astype(jnp.float32)
        if array.size == channels:
            return array.reshape((channels,))
        return jnp.broadcast_to(array.reshape((1,)), (channels,))


def compute(eqns: Sequence[JaxprEqn], values: dict[Any, Any]) -> None:
    """Evaluates equations in order; ``values`` has their operands, and receives their results."""
    for eqn in eqns:
        operands = [a.val if isinstance(a, Literal) else values[a] for a in eqn.invars]
        with compat.located_at(eqn):
            results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
        results = results if eqn.primitive.multiple_results else [results]
        values.update(zip(eqn.outvars, results, strict=True))


def live(
    eqns: Sequence[Any],
    outvars: Iterable[Any],
    trimmed: Callable[[Any, Collection[Var]], Any] = lambda eqn, needed: eqn,
) -> list[Any]:
    """The equations on which results or effects depend.

    Args:
        eqns: equations, or objects with ``invars``, ``outvars`` and ``effects``.
        outvars: the results.
        trimmed: returns an equation reduced to the needed results; it may not add operands.
    """
    needed = {v for v in outvars if isinstance(v, Var)}
    kept = []
    for eqn in reversed(eqns):
        if eqn.effects or any(v in needed for v in eqn.outvars):
            eqn = trimmed(eqn, needed)
            needed |= {a for a in eqn.invars if isinstance(a, Var)}
            kept.append(eqn)
    return kept[::-1]


def renumbered_axis(before: tuple[int, ...], after: tuple[int, ...], axis: int) -> int | None:
    """The new number of an axis if a reshape only adds or drops axes of extent 1, else None."""
    if [e for e in before if e > 1] != [e for e in after if e > 1] or before[axis] == 1:
        return None
    rank = sum(e > 1 for e in before[:axis])
    return [i for i, e in enumerate(after) if e > 1][rank]


def traced(
    function: Callable, operands: Any, outvars: Sequence[Var], graph: Graph, position: int
) -> list[JaxprEqn]:
    """Traces a function into equations that read atoms of a program and write its variables.

    Args:
        function: takes arrays for the atoms in ``operands`` and returns a list of results.
        operands: pytrees of variables and literals.
        outvars: the variables that the equations write, one for each result.
        graph, position: the program, and the equation whose source location the new ones get.

    Raises:
        TypeError: a result has another type than its variable.
    """
    leaves, tree = jax.tree.flatten(operands, is_leaf=lambda a: isinstance(a, Var | Literal))
    atoms = [a for a in leaves if isinstance(a, Var)]

    def of_atoms(*arrays: Any) -> Any:
        values = dict(zip(atoms, arrays, strict=True))
        given = [values[a] if isinstance(a, Var) else a.val for a in leaves]
        return function(*jax.tree.unflatten(tree, given))

    types = [type_of(a) for a in atoms]
    with compat.located_at(graph.eqns[position]), compat.varying(*types):
        closed = jax.make_jaxpr(of_atoms)(*types)
    jaxpr = compat.open_jaxpr(closed)
    if jaxpr.constvars or any(
        not compat.same_type(type_of(v), type_of(o))
        for v, o in zip(jaxpr.outvars, outvars, strict=True)
    ):
        raise TypeError("the call's results have another type")
    names: dict[Any, Any] = dict(zip(jaxpr.invars, atoms, strict=True))
    names |= dict(zip(jaxpr.outvars, outvars, strict=True))
    return [
        eqn.replace(
            invars=[names.get(a, a) if isinstance(a, Var) else a for a in eqn.invars],
            outvars=[names.get(v, v) for v in eqn.outvars],
        )
        for eqn in jaxpr.eqns
    ]
