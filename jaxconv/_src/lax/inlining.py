"""Inlines functions that a program calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jax.extend.core import JaxprEqn, Var

from jaxconv._src import compat

# Primitives that call a jitted function.
JITTED = ("jit", "pjit")


def inlined(jaxpr: Any, becomes_part: Callable[[JaxprEqn], bool]) -> tuple[list[JaxprEqn], list]:
    """The equations and the results of a program with calls replaced by their functions.

    Args:
        jaxpr: the program, not closed.
        becomes_part: whether a call is replaced; its function captures no constants.
    """
    eqns: list[JaxprEqn] = []
    substitution: dict[Var, Any] = {}

    def renamed(atom: Any, names: Mapping[Var, Any]) -> Any:
        return names.get(atom, atom) if isinstance(atom, Var) else atom

    def visit(inner: Any, names: dict[Var, Any], callers: tuple[JaxprEqn, ...]) -> None:
        for eqn in inner.eqns:
            invars = [renamed(a, names) for a in eqn.invars]
            if becomes_part(eqn):
                called = compat.open_jaxpr(eqn.params["jaxpr"])
                own = dict(zip(called.invars, invars, strict=True))
                visit(called, own, (*callers, eqn))
                for var, atom in zip(eqn.outvars, called.outvars, strict=True):
                    names[var] = renamed(atom, own)
                continue
            outvars = eqn.outvars
            if callers:
                outvars = [compat.variable(v.aval) for v in eqn.outvars]
                names.update(zip(eqn.outvars, outvars, strict=True))
                for caller in reversed(callers):
                    eqn = compat.within(caller, eqn)
            eqns.append(eqn.replace(invars=invars, outvars=outvars))

    visit(jaxpr, substitution, ())
    return eqns, [renamed(atom, substitution) for atom in jaxpr.outvars]
