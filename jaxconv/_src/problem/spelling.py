"""Suggestions for argument names that a function does not have."""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable)

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))


def knows(**others: str) -> Callable[[_Function], _Function]:
    """Decorates a function so that its errors suggest the intended argument.

    Args:
        others: maps names in other libraries to its own arguments, or to a text that says what to
            write.
    """

    def decorate(function: Any) -> Any:
        parameters = inspect.signature(function).parameters
        positional = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            if len(args) > len(positional):
                rest = [name for name in parameters if name not in positional]
                raise TypeError(
                    f"{function.__name__}: expected {', '.join(positional)} and all else by name, "
                    f"such as {rest[0]}=; got {len(args)} arguments without a name"
                )
            for name in kwargs:
                if name not in parameters:
                    raise TypeError(f"{function.__name__}: no argument {name!r}{meant(name)}")
            return function(*args, **kwargs)

        def meant(name: str) -> str:
            other = others.get(name, "")
            near = difflib.get_close_matches(name, parameters, 1)
            if other in parameters:
                return f"; it is {other!r} here"
            if other:
                return f"; {other}"
            return f"; {near[0]!r} is one" if near else f" among {', '.join(parameters)}"

        return checked

    return decorate


def renamed(before: str, its_value: Any, name: str, value: Any) -> Any:
    """The value of a renamed argument; the old name still works and warns.

    Raises:
        TypeError: it is given by both names.
    """
    if its_value is None:
        return value
    if value is not None:
        raise TypeError(f"{before}: is {name!r} now; got both")
    warnings.warn(f"{before}= is called {name}= now", DeprecationWarning, stacklevel=_outside())
    return its_value


def _outside() -> int:
    """The stack level of the user's call, seen from ``renamed``."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE + os.sep):
        frame, level = frame.f_back, level + 1
    return level
