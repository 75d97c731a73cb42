"""``fuse``: computes a convolution and the operations after it by one call."""

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
    """Returns an equivalent function whose convolution calls include the operations after them.

    After each convolution of ``jax.lax`` or of this library, a chain of

        scale and bias per channel (batch norm with running statistics too), one sum with an array
        of the result's shape, an activation, and conversions between floating-point types

    becomes part of the convolution's call, ``conv(x, w, scale=, bias=, residual=, activation=)``,
    if each intermediate value has one use. For batch norm in training the call also returns the
    mean and variance of its result (``statistics=True``), if a kernel computes them. Normalisation
    and max pooling layers become calls whose derivatives make fewer passes over the activations and
    use no scatter. The epilogue is computed in float32 and rounded once at the end, so 16-bit
    results are more accurate than the program's. docs/fusing.md lists the recognised operations.

        logits = jax.jit(jaxconv.fuse(model.apply))(variables, images)
        step = jax.jit(jaxconv.fuse(train_step), donate_argnums=0)

    A gradient may be taken outside (``jax.grad(fuse(f))``) or inside (``fuse(train_step)``): JAX
    differentiates the fused function in both. Convolutions of lax without a chain stay unchanged;
    ``install`` and ``override`` apply to them as usual. ``jaxconv.explain(fuse(f), *args)`` shows
    what each call computes, and why its chain ends.

    ``with jaxconv.override(fuse=False)`` excludes a part of a function, and the environment
    variable JAXCONV_FUSE=0 all functions of a process.

    Args:
        fun: a function of arrays in pytrees. It must not change its arguments in place; split
            stateful modules as for ``jax.grad``. Arguments that are no arrays are constants.
        fold: multiplies scales into filters if both are constants of the program (arrays that
            ``fun`` captures, not arguments). This saves the multiplication; the filter is rounded
            to its dtype once more.
        gradients: if ``fun`` takes a derivative, by ``jax.grad``, ``vjp``, ``linearize``, ``jvp``
            or a function based on these, JAX differentiates ``fuse`` of the function. A function
            that cannot be traced apart from ``fun`` stays unchanged. With False, JAX differentiates
            the function, and ``fuse`` sees the resulting program.

    Returns:
        The function. Every call traces ``fun`` again, so use it inside ``jax.jit``.

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
        fun: the function, as in ``fuse``; every call traces it, so array arguments are tracers.
        argnums: the positional arguments by which to differentiate.
        has_aux: whether ``fun`` returns a pair; only its first part is differentiated.
        holomorphic: the caller's promise that ``fun`` is holomorphic.
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
        holomorphic: the caller's promise that it is holomorphic.
        allow_int: whether to differentiate by integers.

    Returns:
        A function of ``fun``'s arguments that returns its gradient; with ``has_aux``, the gradient
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
    """The objects in a pytree other than Python's containers, each with its leaves.

    A function that assigns to a dictionary changes its own copy, as under ``jax.jit``; a module
    that it changes in place (Flax nnx) belongs to the caller.
    """
    objects = jax.tree.leaves(tree, is_leaf=lambda n: not isinstance(n, dict | list | tuple))
    return [
        (o, jax.tree.leaves(o)) for o in objects if o is not None and not fuse_trace.is_array(o)
    ]


def _check_unchanged(before: list[tuple[Any, list[Any]]]) -> None:
    """Raises an error if a function has replaced arrays in an object."""
    for module, leaves in before:
        after = jax.tree.leaves(module)
        if len(after) != len(leaves) or any(
            a is not b for a, b in zip(after, leaves, strict=True) if fuse_trace.is_array(a)
        ):
            raise ValueError(
                f"fun: it changes an argument in place, a {type(module).__name__}. Split it into "
                "arrays and structure outside (nnx.split), and return the arrays that change."
            )
