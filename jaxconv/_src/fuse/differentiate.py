"""Derivatives inside ``fuse``: JAX differentiates the fused function.

``jax.grad(fuse(loss))`` differentiates fused calls by their rules. ``fuse(train_step)`` leads to
the same calls: while ``fuse`` traces, JAX differentiates ``fuse`` of each function instead of the
function itself. Fusing after differentiation would find fewer chains, because in the program of a
derivative a convolution's result has additional uses.

``compat.replace_differentiated`` installs this in JAX once per process. Each derivative reads
``fuse_trace.options_in_force``, which is thread-local and None outside the traces of ``fuse``;
derivatives are then JAX's own.

A function stays unfused if it cannot be traced separately from its caller: it branches on the
differentiated value, or the rule of a custom derivative inside it uses one of its traced values.
"""

from __future__ import annotations

import functools
import logging
import threading
import warnings
from collections.abc import Callable
from typing import Any

import jax

from jaxconv._src import compat
from jaxconv._src.fuse import fuse_trace

_log = logging.getLogger("jaxconv")


def _fused(function: Callable) -> Callable:
    """The function that JAX differentiates instead of ``function`` in the current trace."""
    options = fuse_trace.options_in_force()
    if options is None or not options.gradients:
        return function

    @functools.wraps(function)
    def fused(*args: Any) -> Any:
        try:
            return _evaluated(function, args, options)
        except _LeftError as left:
            _log.info("fuse leaves a differentiated function: %s", left)
        return function(*args)

    return fused


class _LeftError(Exception):
    """A function cannot be traced separately from its caller."""


def _evaluated(function: Callable, args: tuple[Any, ...], options: fuse_trace.Options) -> Any:
    try:
        traced = fuse_trace.traced(function, args, {}, options)
    except Exception as error:  # if tracing did not cause it, the unfused function raises it again
        raise _LeftError(str(error).partition("\n")[0]) from error
    compat.end_trace(traced.trace)
    try:
        return traced.evaluate()
    except jax.errors.UnexpectedTracerError as error:  # a custom derivative's rule needs a value
        raise _LeftError(str(error).partition("\n")[0]) from error


_placing = threading.Lock()
_placed: bool | None = None  # None before the first `fuse`


def place() -> None:
    """Replaces the functions that JAX differentiates, once per process; warns if that fails."""
    global _placed
    with _placing:
        if _placed is None:
            _placed = _place()


def _place() -> bool:
    seen = threading.Event()

    def replaced(function: Callable) -> Callable:
        seen.set()
        return _fused(function)

    try:
        compat.replace_differentiated(replaced)
        jax.eval_shape(lambda x: jax.vjp(lambda x: x, x)[0], 0.0)
    except AttributeError:
        pass
    if not seen.is_set():
        warnings.warn(
            f"jaxconv.fuse does not know how JAX {jax.__version__} differentiates: it sees the "
            "derivatives that a function takes, and fuses less. Use jaxconv.value_and_grad, or "
            "jax.value_and_grad(jaxconv.fuse(loss)).",
            RuntimeWarning,
            stacklevel=2,
        )
    return seen.is_set()
