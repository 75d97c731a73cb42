"""``fuse``: a function with its convolutions and what follows them in one call each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import jax
import numpy as np

from jaxconv._src.functions import arguments
from jaxconv._src.fuse import differentiate, fuse_trace
from jaxconv._src.library import native

_Function = TypeVar("_Function", bound=Callable)


@overload
def fuse(fun: _Function, *, fold: bool = False, gradients: bool = True) -> _Function: ...


@overload
def fuse(
    fun: None = None, *, fold: bool = False, gradients: bool = True
) -> Callable[[_Function], _Function]: ...


def fuse(fun: Callable | None = None, *, fold: bool = False, gradients: bool = True) -> Callable:
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

    A gradient may be taken outside (``jax.grad(fuse(f))``) or inside (``fuse(train_step)``): JAX
    differentiates the fused function in both. The convolutions that are left as they are stay lax's
    where they are; ``install`` and ``override`` serve them as usual. ``jaxconv.explain(fuse(f),
    *args)`` shows what each call computes, and why its chain ends where it does.

    ``with jaxconv.override(fuse=False)`` leaves a part of a function as it is, and the environment
    variable JAXCONV_FUSE=0 all functions of a process.

    Args:
        fun: a function of arrays in pytrees. Its program must not depend on values that it changes
            in place; stateful modules are split as for ``jax.grad``. Arguments that are no arrays
            are constants.
        fold: multiply scales into the filters where both are constants of the program (arrays that
            ``fun`` captures, not arguments). It saves the multiplication; the filter is rounded
            once more to its dtype.
        gradients: where ``fun`` takes a derivative, by ``jax.grad``, ``vjp``, ``linearize``,
            ``jvp`` and what is made of these, JAX differentiates ``fuse`` of the function. A
            function that cannot be traced apart from ``fun`` stays as it is. False leaves
            derivatives to JAX: ``fuse`` sees their programs.

    Returns:
        The function. Every call traces ``fun`` again, so that it belongs inside ``jax.jit``.

    Raises:
        TypeError: ``fun`` cannot be called, or an option is neither True nor False.
        ValueError: ``fun`` changes an argument in place.
    """
    options = fuse_trace.Options(_flag("fold", fold), _flag("gradients", gradients))
    if fun is None:
        return functools.partial(fuse, fold=fold, gradients=gradients)
    if not callable(fun):
        raise TypeError(
            f"fun: expected a function, got {arguments.described(fun)}. Where f is the function, "
            "write fuse(f)(x), not fuse(f(x))"
        )

    def checked(*args: Any, **kwargs: Any) -> Any:
        given = _mutable((args, kwargs))
        out = fun(*args, **kwargs)
        _check_unchanged(given)
        return out

    @functools.wraps(fun)
    def fused_function(*args: Any, **kwargs: Any) -> Any:
        if not native.fusing():
            return fun(*args, **kwargs)
        if options.gradients:
            differentiate.place()
        return fuse_trace.traced(checked, args, kwargs, options).evaluate()

    return fused_function


def value_and_grad(
    fun: Callable,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[..., tuple[Any, Any]]:
    """``jax.value_and_grad`` of the fused function: ``jax.value_and_grad(fuse(fun), ...)``.

    ``fuse(train_step)`` does the same for the gradients that a training step takes.

        loss, gradients = jax.jit(jaxconv.value_and_grad(loss_fn))(params, batch)

    Args:
        fun: the function, as in ``fuse``: every call traces it, so that values of its arguments
            that are arrays are not known in it.
        argnums: by which positional arguments to differentiate.
        has_aux: whether ``fun`` returns a pair, of which the first part is differentiated.
        holomorphic: whether ``fun`` is promised to be holomorphic.
        allow_int: whether to differentiate by integers, with gradients of dtype float0.

    Returns:
        A function of ``fun``'s arguments that returns its value and its gradient.

    Raises:
        TypeError: ``fun`` cannot be called.
    """
    return jax.value_and_grad(fuse(fun), argnums, has_aux, holomorphic, allow_int)


def grad(
    fun: Callable,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable:
    """``jax.grad`` of the fused function: ``jax.grad(fuse(fun), ...)``.

    Args:
        fun: the function, as in ``fuse``.
        argnums: as in ``value_and_grad``, like all that follow.
        has_aux: whether ``fun`` returns a pair.
        holomorphic: whether it is promised to be holomorphic.
        allow_int: whether to differentiate by integers.

    Returns:
        A function of ``fun``'s arguments that returns its gradient; with ``has_aux`` the gradient
        and the second part of the pair.

    Raises:
        TypeError: ``fun`` cannot be called.
    """
    return jax.grad(fuse(fun), argnums, has_aux, holomorphic, allow_int)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name}: expected True or False, got {arguments.described(value)}")
    return bool(value)


def _mutable(tree: Any) -> list[tuple[Any, list[Any]]]:
    """The objects in a pytree that are no containers of Python's, each with its leaves.

    A function that assigns to a dictionary changes its own copy, as under ``jax.jit``. A module
    that it changes in place (Flax's nnx) is the caller's.
    """
    objects = jax.tree.leaves(tree, is_leaf=lambda n: not isinstance(n, dict | list | tuple))
    return [
        (o, jax.tree.leaves(o)) for o in objects if o is not None and not fuse_trace.is_array(o)
    ]


def _check_unchanged(before: list[tuple[Any, list[Any]]]) -> None:
    """Refuses a function that left other arrays in an object."""
    for module, leaves in before:
        after = jax.tree.leaves(module)
        if len(after) != len(leaves) or any(
            a is not b for a, b in zip(after, leaves, strict=True) if fuse_trace.is_array(a)
        ):
            raise ValueError(
                f"fun: it changes an argument in place, a {type(module).__name__}. Split it into "
                "arrays and structure outside (nnx.split), and return the arrays that change."
            )
