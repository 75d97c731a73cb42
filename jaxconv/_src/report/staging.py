"""Traces any function of a user, including what it changes in place."""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxconv._src import compat


def trace(fun: Callable, args: tuple, kwargs: dict[str, Any]) -> jax.stages.Traced:
    """Traces ``fun(*args, **kwargs)``, without running it.

    Args:
        fun: any function. A function jitted by ``jax.jit``, or by a wrapper such as ``nnx.jit``,
            has its own static arguments, and returns what it changes in place. In other functions,
            arguments that are no arrays are constants.
        args, kwargs: its arguments; arrays may be ``jax.ShapeDtypeStruct``.

    Returns:
        The traced program. Its results are everything that ``fun`` returns or stores in its
        arguments, in captured objects or in the object of a method; the user's objects stay
        unchanged.
    """
    return _staged(fun, args, kwargs) or _plain(fun, args, kwargs)


def _staged(fun: Callable, args: tuple, kwargs: dict[str, Any]) -> jax.stages.Traced | None:
    """The program of a jitted function, or None."""
    while isinstance(fun, functools.partial | types.MethodType):
        if isinstance(fun, functools.partial):
            args, kwargs, fun = (*fun.args, *args), {**fun.keywords, **kwargs}, fun.func
        else:
            args, fun = (fun.__self__, *args), fun.__func__
    if not isinstance(fun, jax.stages.Wrapped):
        return None
    traced = fun.trace(*args, **kwargs)
    inner = getattr(traced, "traced", traced)  # nnx.jit also returns a wrapper
    return inner if isinstance(inner, jax.stages.Traced) else None


def _plain(fun: Callable, args: tuple, kwargs: dict[str, Any]) -> jax.stages.Traced:
    """The program of a function that is not jitted, or is jitted by a wrapper without ``trace``."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    arrays = {str(i): leaf for i, leaf in enumerate(leaves) if _is_array(leaf)}

    def program(arrays):
        values = [arrays.get(str(i), leaf) for i, leaf in enumerate(leaves)]
        args, kwargs = jax.tree.unflatten(tree, values)
        own, captured = _with_own_state(fun)
        out = own(*args, **kwargs)
        results = (out, args, kwargs, *captured())
        return [array for result in results for array in _computed(result)]

    return jax.jit(program).trace(arrays)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic)


def _flatten(value: Any) -> tuple[list[Any], Any]:
    """``jax.tree.flatten``; an object that cannot be flattened (unusual keys) is a leaf."""
    try:
        return jax.tree.flatten(value)
    except Exception:
        return jax.tree.flatten(0, is_leaf=lambda _: True)


def _computed(value: Any) -> list[jax.Array]:
    """The traced arrays in a pytree, and in the attributes of leaves that are no pytrees."""
    leaves, _ = _flatten(value)
    parts = [part for leaf in leaves for part in (leaf, *_attributes(leaf))]
    return [array for part in parts for array in _flatten(part)[0] if compat.is_traced(array)]


def _attributes(value: Any) -> list[Any]:
    if isinstance(value, types.ModuleType | type) or callable(value) or _is_array(value):
        return []
    return list(getattr(value, "__dict__", {}).values())


def _copied(value: Any) -> Any:
    """A copy of a pytree that contains arrays, such as a module; other objects themselves."""
    leaves, tree = _flatten(value)
    if jax.tree_util.treedef_is_leaf(tree) or not any(map(_is_array, leaves)):
        return value
    return jax.tree.unflatten(tree, leaves)


def _with_own_state(fun: Callable) -> tuple[Callable, Callable[[], list[Any]]]:
    """A copy of a function, method or module with copies of the pytrees that it captures.

    A step may change a captured module in place. If the user's module were changed while tracing,
    it would hold tracers afterwards; Flax also refuses to change a module made outside.

    Returns:
        The copy, and a function that returns all that it captures.
    """
    if isinstance(fun, types.MethodType):
        method, of_method = _with_own_state(fun.__func__)
        owner = _copied_object(fun.__self__)
        return types.MethodType(method, owner), lambda: [
            *getattr(owner, "__dict__", {}).values(),
            *of_method(),
        ]
    if not inspect.isfunction(fun):
        module = _copied(fun)
        return module, lambda: [module]
    known = fun.__globals__
    names = _names(fun.__code__) & known.keys()
    globals_ = {**known, **{name: _copied(known[name]) for name in names}}
    cells = tuple(map(_copied_cell, fun.__closure__ or ()))
    own = types.FunctionType(fun.__code__, globals_, fun.__name__, fun.__defaults__, cells)
    own.__kwdefaults__ = fun.__kwdefaults__

    def captured() -> list[Any]:
        return [*map(globals_.get, names), *map(_contents, cells)]

    return own, captured


def _names(code: types.CodeType) -> set[str]:
    """Names of the globals that a function, or a function inside it, may read."""
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _copied_object(owner: Any) -> Any:
    """A copy of the object that a method belongs to, with copies of the pytrees in it."""
    own = _copied(owner)
    if own is not owner or inspect.isclass(owner) or not hasattr(owner, "__dict__"):
        return own
    try:
        own = copy.copy(owner)
    except Exception:  # a class may forbid copies
        return owner
    vars(own).update({name: _copied(value) for name, value in vars(owner).items()})
    return own


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _copied_cell(cell: types.CellType) -> types.CellType:
    value = _contents(cell)
    copied = _copied(value)
    return cell if copied is value else types.CellType(copied)
