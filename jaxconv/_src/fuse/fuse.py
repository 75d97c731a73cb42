"""``fuse``: a function with its convolutions and what follows them in one call each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import jax
import numpy as np

from jaxconv._src import compat
from jaxconv._src.fuse import fuse_program

_Function = TypeVar("_Function", bound=Callable)


@overload
def fuse(fun: _Function, *, fold: bool = False) -> _Function: ...


@overload
def fuse(fun: None = None, *, fold: bool = False) -> Callable[[_Function], _Function]: ...


def fuse(fun: Callable | None = None, *, fold: bool = False) -> Callable:
    """A function that computes the same, with elementwise operations in the convolutions' calls.

    Behind each convolution, of ``jax.lax`` or of this library, a chain of

        scale and bias per channel (batch norm with running statistics too), one sum with an array
        of the result's shape, an activation, and conversions between floating-point types

    becomes part of the convolution's call, ``conv(x, w, scale=, bias=, residual=, activation=)``,
    where each value on the way has one use. Mean and variance of its result, which batch norm in
    training takes, come from the call too (``statistics=True``) where a kernel forms them, and in
    16 bits its backward pass takes fewer passes over the activations. The gradient of max pooling
    scatters nothing; for GPUs, in 16 bits, kernels pool. The arithmetic is float32, rounded once at
    the end, so that in 16 bits results are more accurate than the program's; scale and bias are
    collected in float32. docs/fusing.md lists what is recognised.

        logits = jax.jit(jaxconv.fuse(model.apply))(variables, images)
        step = jax.jit(jaxconv.fuse(train_step), donate_argnums=0)

    A gradient may be taken outside (``jax.grad(fuse(f))``) or inside (``fuse(train_step)``). The
    convolutions that are left as they are stay lax's where they are; ``install`` and ``override``
    serve them as usual. ``jaxconv.explain(fuse(f), *args)`` shows what each call computes, and why
    its chain ends where it does.

    Args:
        fun: a function of arrays in pytrees. Its program must not depend on values that it changes
            in place; stateful modules are split as for ``jax.grad``. Arguments that are no arrays
            are constants.
        fold: multiply scales into the filters where both are constants of the program (arrays that
            ``fun`` captures, not arguments). It saves the multiplication; the filter is rounded
            once more to its dtype.

    Returns:
        The function. Every call traces ``fun`` again, so that it belongs inside ``jax.jit``.

    Raises:
        TypeError: ``fun`` cannot be called.
        ValueError: ``fun`` changes an argument in place.
    """
    if fun is None:
        return functools.partial(fuse, fold=fold)
    if not callable(fun):
        raise TypeError(f"fun: expected a function, got {fun!r}")

    @functools.wraps(fun)
    def fused_function(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]
        rest: list[Any] = []

        def program(arrays: Sequence[jax.Array]) -> list[Any]:
            values = list(leaves)
            for i, array in zip(places, arrays, strict=True):
                values[i] = array
            args, kwargs = jax.tree.unflatten(tree, values)
            given = _mutable((args, kwargs))
            out = fun(*args, **kwargs)
            _check_unchanged(given)
            results, out_tree = jax.tree.flatten(out)
            traced = [i for i, result in enumerate(results) if _is_array(result)]
            # What outlives the trace holds none of its arrays.
            constants = [None if i in traced else result for i, result in enumerate(results)]
            rest[:] = [out_tree, constants, traced]
            return [results[i] for i in traced]

        closed = jax.make_jaxpr(program)([leaves[i] for i in places])
        jaxpr, extra = fuse_program.rewritten(closed, fold)
        outs = compat.eval_jaxpr(jaxpr, [*closed.consts, *extra], *(leaves[i] for i in places))
        out_tree, results, traced = rest
        for i, out in zip(traced, outs, strict=True):
            results[i] = out
        return jax.tree.unflatten(out_tree, results)

    return fused_function


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def _mutable(tree: Any) -> list[tuple[Any, list[Any]]]:
    """The objects in a pytree that are no containers of Python's, each with its leaves.

    A function that assigns to a dictionary changes its own copy, as under ``jax.jit``. A module
    that it changes in place (Flax's nnx) is the caller's.
    """
    objects = jax.tree.leaves(tree, is_leaf=lambda n: not isinstance(n, dict | list | tuple))
    return [(o, jax.tree.leaves(o)) for o in objects if o is not None and not _is_array(o)]


def _check_unchanged(before: list[tuple[Any, list[Any]]]) -> None:
    """Refuses a function that left other arrays in an object."""
    for module, leaves in before:
        after = jax.tree.leaves(module)
        if len(after) != len(leaves) or any(
            a is not b for a, b in zip(after, leaves, strict=True) if _is_array(a)
        ):
            raise ValueError(
                f"fun: it changes an argument in place, a {type(module).__name__}. Split it into "
                "arrays and structure outside (nnx.split), and return the arrays that change."
            )
