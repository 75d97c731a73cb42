"""Traces a function for ``fuse``, and evaluates the rewritten program instead."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxconv._src import compat
from jaxconv._src.fuse import fuse_program


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of ``fuse``.

    Attributes:
        fold: multiplies scales into filters if both are constants.
        gradients: differentiates fused functions where the function takes derivatives.
    """

    fold: bool
    gradients: bool


# The options of the `fuse` that traces in this thread, or None. They are part of JAX's cache keys,
# so JAX keeps separate traces of a jitted function for calls inside and outside of `fuse`.
_in_force = jax.make_user_context(None)


def options_in_force() -> Options | None:
    """The options of the ``fuse`` whose trace is running, or None."""
    return _in_force.value if compat.is_tracing() else None


@dataclasses.dataclass(frozen=True)
class Traced:
    """A traced function with its arguments.

    Attributes:
        trace: a weak reference to JAX's trace.
        closed: the program, a closed jaxpr.
        arrays: its arguments.
        fold: as in ``Options``.
        out_tree: the tree structure of the results.
        constants: the leaves of the results, None for arrays.
        places: the indices of the arrays among these leaves.
    """

    trace: weakref.ref
    closed: Any
    arrays: list[Any]
    fold: bool
    out_tree: Any
    constants: list[Any]
    places: list[int]

    def evaluate(self) -> Any:
        """The results of the fused program."""
        jaxpr, extra = fuse_program.rewritten(self.closed, self.fold)
        with _in_force(None):  # derivative rules of primitives differentiate internal functions
            outs = compat.eval_jaxpr(jaxpr, [*self.closed.consts, *extra], *self.arrays)
        results = list(self.constants)
        for place, out in zip(self.places, outs, strict=True):
            results[place] = out
        return jax.tree.unflatten(self.out_tree, results)


def traced(
    fun: Callable, args: Sequence[Any], kwargs: Mapping[str, Any], options: Options
) -> Traced:
    """Traces a function with its arguments.

    A differentiated function may store values in objects that its caller then uses, as Haiku's
    modules store random keys and parameters. When JAX differentiates, such values belong to the
    caller's trace; traced as a separate program, the function would leak them. The caller is then
    traced a second time, with derivatives unchanged.

    Raises:
        What ``fun`` raises.
    """
    try:
        return _traced(fun, args, kwargs, options)
    except jax.errors.UnexpectedTracerError:
        if not options.gradients:
            raise
    return _traced(fun, args, kwargs, dataclasses.replace(options, gradients=False))


def _traced(
    fun: Callable, args: Sequence[Any], kwargs: Mapping[str, Any], options: Options
) -> Traced:
    leaves, tree = jax.tree.flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if is_array(leaf)]
    rest: list[Any] = []

    def program(arrays: Sequence[jax.Array]) -> list[Any]:
        values = list(leaves)
        for i, array in zip(places, arrays, strict=True):
            values[i] = array
        args, kwargs = jax.tree.unflatten(tree, values)
        results, out_tree = jax.tree.flatten(fun(*args, **kwargs))
        traced = [i for i, r in enumerate(results) if isinstance(r, jax.Array)]
        # Objects that outlive the trace must not hold its arrays.
        constants = [None if i in traced else result for i, result in enumerate(results)]
        rest[:] = [compat.current_trace(), out_tree, constants, traced]
        return [results[i] for i in traced]

    arrays = [leaves[i] for i in places]
    with _in_force(options):
        closed = jax.make_jaxpr(program)(arrays)
    compat.check_alive(closed.consts)
    trace, *results = rest
    return Traced(trace, closed, arrays, options.fold, *results)


def is_array(leaf: Any) -> bool:
    """Whether an argument is an array of the program rather than a constant."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)
