"""This library's kernels for all lax convolutions: ``install``, ``uninstall``, ``override``."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any, Never, TypeVar, overload

import numpy as np

from jaxconv._src import compat
from jaxconv._src.call import override_state
from jaxconv._src.functions import arguments
from jaxconv._src.functions.arguments import Algorithm
from jaxconv._src.lax import lax_lowering
from jaxconv._src.problem.spec import Op

# The global value; JAX only returns the value in this thread.
_global: tuple[str, str, str] | None = None
_changing = threading.Lock()

_Function = TypeVar("_Function", bound=Callable)


def _set_global(algorithms: tuple[str, str, str] | None) -> tuple[str, str, str] | None:
    """Sets the algorithms of all threads, and returns the previous ones."""
    global _global
    with _changing:
        previous, _global = _global, algorithms
        compat.set_global(override_state.override_in_force, algorithms)
    return previous


class Installation:
    """The result of ``install``. As the context of a ``with`` statement it ends with the body."""

    def __init__(
        self, algorithms: tuple[str, str, str], previous: tuple[str, str, str] | None
    ) -> None:
        self._algorithms = algorithms
        self._previous = previous

    def __repr__(self) -> str:
        """The algorithms, by direction."""
        return f"<jaxconv installed: {_by_direction(self._algorithms)}>"

    def __enter__(self) -> None:
        """Begins the body; the setting has been in force since the call of ``install``."""

    def __exit__(self, *_: object) -> None:
        """Restores the previous setting."""
        _set_global(self._previous)


def _by_direction(algorithms: tuple[str, str, str]) -> dict[str, str]:
    return dict(zip((op.value for op in Op), algorithms, strict=True))


def install(*misplaced: Never, algorithm: Algorithm = "auto") -> Installation:
    """Computes every ``jax.lax`` convolution of this process with this library's kernels.

    Flax, Equinox, Haiku, Keras and plain JAX all call ``lax.conv_general_dilated``. Its lowering is
    replaced on CPU and CUDA devices. Gradients and ``vmap`` stay lax's; their convolutions are
    recognised as forward pass, data gradient or weight gradient. Explicit zero padding before a
    convolution becomes the convolution's padding. XLA computes convolutions that no kernel accepts
    (``jaxconv.explain`` says which and why).

        jaxconv.install()  # until the process ends, or uninstall()

        with jaxconv.install():  # for the body, in all threads
            train()

    The setting is part of JAX's cache keys, so functions compiled before are compiled again at
    their next call. It may be called any number of times, from any thread; the last call counts.
    ``override`` does the same for one thread.

    Args:
        algorithm: as in ``jaxconv.conv``. With "auto", XLA computes a convolution if no kernel
            accepts it or XLA is predicted to be faster than every kernel; with "native", only if no
            kernel accepts it (the environment variable JAXCONV_ALGORITHM=native gives "auto" this
            meaning). If another algorithm, such as "winograd", does not accept a convolution,
            "auto" computes it; ``jaxconv.explain`` shows why.

    Returns:
        A context manager that restores the previous setting at the end of its body. Without a
        ``with`` statement it has no effect.

    Raises:
        TypeError, ValueError: the algorithm does not exist.
    """
    if misplaced:
        raise TypeError(f"install: expected no argument without a name{_hint(misplaced[0])}")
    algorithms = arguments.algorithms(algorithm)
    lax_lowering.register()
    return Installation(algorithms, _set_global(algorithms))


def _hint(given: Any) -> str:
    """The suggestion for a misplaced argument of ``install``."""
    if isinstance(given, bool | np.bool_):
        return "; jaxconv.uninstall() undoes it" if not given else ", install() does it"
    if callable(given):
        return "; a function is decorated with jaxconv.override"
    return f", got {given!r}; an algorithm is install(algorithm={given!r})"


def uninstall() -> None:
    """Undoes ``install``: convolutions compiled from now on are XLA's again."""
    _set_global(None)


def installed() -> dict[str, str] | None:
    """Whether ``jax.lax``'s convolutions use this library's kernels in this thread, now.

    Returns:
        The algorithm of each direction, such as ``{"fprop": "auto", "dgrad": "auto", "wgrad":
        "auto"}``, under ``install`` and this thread's ``override``; None if they are lax's own.
    """
    algorithms = override_state.algorithms_of_lax()
    return None if algorithms is None else _by_direction(algorithms)


@overload
def override(
    enabled: bool | None = None, *, algorithm: Algorithm | None = None, fuse: bool | None = None
) -> Override: ...


@overload
def override(enabled: _Function) -> _Function: ...


def override(
    enabled: bool | Callable | None = None,
    *,
    algorithm: Algorithm | None = None,
    fuse: bool | None = None,
) -> Any:
    """Like ``install``, for the calling thread and a ``with`` body or a function.

        with jaxconv.override():
            y = model(x)

        @jaxconv.override(algorithm="native")
        def step(params, batch): ...

    Inside a function that JAX traces, it applies to the convolutions traced meanwhile and to their
    gradients. Elsewhere it applies to functions that are called (or lowered) meanwhile, no matter
    where they were defined or wrapped in ``jit``. It nests, and the innermost counts:
    ``override(False)`` leaves convolutions to XLA inside an installed program, and a traced
    function's override takes precedence over its caller's.

    Args:
        enabled: whether lax convolutions go to our kernels meanwhile; True unless ``fuse`` is the
            only argument, which leaves this as it is. Or the function to decorate, as
            ``@jaxconv.override`` without parentheses has it.
        algorithm: as in ``install``; "auto" unless given.
        fuse: False leaves the convolutions that are traced meanwhile out of ``jaxconv.fuse``, each
            a call or an operation of its own. True takes them again, inside of an override that
            leaves them out.

    Raises:
        TypeError, ValueError: the algorithm does not exist, or ``enabled`` or ``fuse`` has another
            value.
    """
    if fuse is not None and not isinstance(fuse, bool | np.bool_):
        raise TypeError(f"fuse: expected True or False, got {arguments.described(fuse)}")
    if enabled is None and (fuse is None or algorithm is not None):
        enabled = True
    algorithm = "auto" if algorithm is None else algorithm
    if enabled is None or isinstance(enabled, bool | np.bool_):
        return Override(enabled, algorithm, fuse)
    if callable(enabled) and not isinstance(enabled, type):
        return Override(True, algorithm, fuse)(enabled)
    hint = f"; an algorithm is override(algorithm={enabled!r})" if isinstance(enabled, str) else ""
    raise TypeError(f"enabled: expected True or False, got {arguments.described(enabled)}{hint}")


class Override(contextlib.AbstractContextManager):
    """The result of ``override``: a context manager and a decorator of functions.

    It may be entered again, also within itself, by any thread.
    """

    def __init__(self, enabled: bool | None, algorithm: Algorithm, fuse: bool | None):
        algorithms = arguments.algorithms(algorithm)
        lax_lowering.register()
        self._algorithms = algorithms if enabled else None
        self._enabled = enabled
        self._fuse = fuse
        self._entered = threading.local()

    def __enter__(self) -> None:
        with contextlib.ExitStack() as stack:
            # A program is lowered after this context has ended, so traced operations are marked.
            tracing = compat.is_tracing()
            if self._enabled is not None:
                stack.enter_context(override_state.override_in_force(self._algorithms))
                if tracing:
                    stack.enter_context(override_state.marked(self._algorithms))
            if self._fuse is not None:
                stack.enter_context(override_state.fuse_in_force(bool(self._fuse)))
                if tracing:
                    stack.enter_context(override_state.marked_for_fuse(bool(self._fuse)))
            self._entered.__dict__.setdefault("stacks", []).append(stack.pop_all())

    def __exit__(self, *error: object) -> None:
        self._entered.stacks.pop().__exit__(*error)

    def __call__(self, function: _Function) -> _Function:
        """Decorates a function: overrides its calls and, if it is jitted, its ``lower``."""

        def within(function: Callable) -> Callable:
            @functools.wraps(function)
            def overridden(*args: Any, **kwargs: Any) -> Any:
                with self:
                    return function(*args, **kwargs)

            return overridden

        decorated: Any = within(function)
        if callable(lower := getattr(function, "lower", None)):
            decorated.lower = within(lower)
        return decorated
