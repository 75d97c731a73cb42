"""Traces a function for ``fuse``, and evaluates the rewritten program in its place."""

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
    """What ``fuse`` is asked for.

    Attributes:
        fold: multiply scales into filters where both are constants.
        gradients: the derivatives that the function takes are of fused functions.
    """

    fold: bool
    gradients: bool


# The options of the `fuse` that traces in this thread, or None. JAX has them in the keys of its
# caches: a jitted function that is traced meanwhile is traced again for calls from elsewhere.
_in_force = jax.make_user_context(None)


def options_in_force() -> Options | None:
    """The options of the ``fuse`` that traces what is called here; None where none does."""
    return _in_force.value if compat.is_tracing() else None


@dataclasses.dataclass(frozen=True)
class Traced:
    """A traced function with its arguments."""

    trace: weakref.ref

    closed: Any
    arrays: list[Any]
    fold: bool
    # The structure of the results, those that are no arrays, and the places of those that are.
    out_tree: Any
    constants: list[Any]
    places: list[int]

    def evaluate(self) -> Any:
        """The results, of the program that ``fuse`` makes."""
        jaxpr, extra = fuse_program.rewritten(self.closed, self.fold)
        with _in_force(None):  # rules of primitives differentiate functions that nobody sees
            outs = compat.eval_jaxpr(jaxpr, [*self.closed.consts, *extra], *self.arrays)
        results = list(self.constants)
        for place, out in zip(self.places, outs, strict=True):
            results[place] = out
        return jax.tree.unflatten(self.out_tree, results)


def traced(
    fun: Callable, args: Sequence[Any], kwargs: Mapping[str, Any], options: Options
) -> Traced:
    """A function with its arguments, as a program.

    What JAX differentiates may leave values in objects, as Haiku's modules leave random keys and
    parameters, that the caller then uses: values that do not depend on what it is differentiated by
    belong to the caller's trace. As a program of its own it would keep them. Its caller is traced
    once more then, with derivatives as they are.

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
        # What outlives the trace holds none of its arrays.
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
    """Whether an argument is an array of the program, and no constant."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)
