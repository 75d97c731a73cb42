"""Identifies elementwise functions and their derivatives by their values, in any spelling.

The equations of a function and of its derivative are evaluated in float64 at about 6000 numbers,
including the points at which tabulated derivatives jump. If a derivative equals a tabulated one at
all of them, it gets that one's name. So the values at jumps, and custom derivatives of the program,
are compared too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import scipy.special  # type: ignore[import-untyped]
from jax.extend.core import Literal

from jaxconv._src import compat
from jaxconv._src.fuse.fuse_graph import IDENTITIES, SPREADING
from jaxconv._src.passes.derivatives import DERIVATIVES
from jaxconv._src.problem.epilogue import ACTIVATIONS, activate

# A mask: the bounds between which the derivative is 1; outside it is 0 (normalise.Activation).
Mask = tuple[float, float | None]

# From -12 to 12 in steps of 1 / 256, and distant numbers.
_NEAR = np.arange(-12 * 256, 12 * 256 + 1) / 256
_NUMBERS = np.concatenate([_NEAR, [-80.0, -40.0, -20.0, 20.0, 40.0, 80.0]])  # _NEAR comes first

# The numbers at which a derivative must be finite; elsewhere the program's operations may overflow.
_FINITE = np.abs(_NUMBERS) <= 8

# Derivatives whose values are constants of the program, so that they are compared exactly.
_EXACT = ("maximum", "clip6", "leaky_relu", "leaky_maximum")

# Derivatives that are never named: at infinity the program gives NaN where the table gives 1.
_UNNAMED = ("clip_hard_swish",)

# The number at which each derivative with a slope equals the slope.
_SLOPES = {"leaky_relu": -1.0, "elu": 0.0, "leaky_maximum": -1.0}

# The name of an epilogue's activation, or the name and a slope.
Activation = str | tuple[str, float]

_MASKS: tuple[Mask, ...] = ((0.0, None), (0.0, 6.0))


class _UnknownError(Exception):
    """An operation that this module does not evaluate."""


def known(
    function: Callable[[jax.Array], jax.Array], operand: Any
) -> tuple[Mask | None, tuple[str, float] | None, Activation | None]:
    """Identifies an elementwise function.

    Args:
        function: the function.
        operand: the type of its operand.

    Returns:
        The derivative as a mask; the derivative as a name in ``DERIVATIVES`` and a slope; the
        epilogue activation with the same values as the function. Each is None if there is none.
    """

    def both(t: jax.Array) -> tuple[jax.Array, jax.Array]:
        y, back = jax.vjp(function, t)
        # exp(y - y): ones with y's type, sharding and varying mesh axes.
        return y, back(jax.numpy.exp(y - y))[0]

    try:
        with compat.varying(operand):
            closed = jax.make_jaxpr(both)(operand)
        numbers = np.append(_NUMBERS, np.nan)
        jaxpr = compat.open_jaxpr(closed)
        if any(e.primitive.name == _RESHARD and e.outvars[0].aval.shape for e in jaxpr.eqns):
            raise _UnknownError(_RESHARD)  # kernels need not accept arrays that move
        y, derivative = _computed(jaxpr, closed.consts, [numbers])
    except (_UnknownError, TypeError, ValueError):
        return None, None, None
    y, derivative = (np.broadcast_to(a, numbers.shape) for a in (y, derivative))
    keeps_nan = bool(np.isnan(y[-1]))  # as the epilogue's activations; where(y > 0, y, 0) does not
    y, derivative = y[:-1], derivative[:-1]
    eps = float(jax.numpy.finfo(operand.dtype).eps)
    activation = _activation(y, eps) if keeps_nan else None
    return _mask(y, derivative), _name(derivative, eps), activation


def _activation(y: np.ndarray, eps: float) -> Activation | None:
    """The nearest epilogue activation, among those that differ only by rounding, or None.

    In 16 bits the two forms of gelu differ by less than a rounding of 1.
    """
    finite = np.isfinite(y)
    if not finite[_FINITE].all():
        return None
    found: dict[Activation, float] = {}
    for name in ACTIVATIONS:
        slope = -float(y[np.searchsorted(_NEAR, -1.0)]) if name == "leaky_relu" else 0.0
        apart = np.abs(y - _activated(name, slope))[finite] / np.maximum(1, np.abs(y[finite]))
        if apart.max() <= max(eps, 1e-6):
            found[(name, slope) if name == "leaky_relu" else name] = apart.max()
    return min(found, key=found.__getitem__) if found else None


def _mask(y: np.ndarray, derivative: np.ndarray) -> Mask | None:
    """The bounds to which a function clips, if its derivative is 1 strictly between, or None."""
    for low, high in _MASKS:
        above = np.inf if high is None else high
        inside = np.clip(_NUMBERS, low, above) == _NUMBERS
        inside &= ~np.isin(_NUMBERS, (low, above))
        if (derivative == inside).all() and (y == np.clip(_NUMBERS, low, above)).all():
            return low, high
    return None


def _name(derivative: np.ndarray, eps: float) -> tuple[str, float] | None:
    """The nearest tabulated derivative, among those that differ only by rounding."""
    finite = np.isfinite(derivative)
    if not finite[_FINITE].all():
        return None
    found: dict[tuple[str, float], float] = {}
    for name in DERIVATIVES:
        if name in _UNNAMED:
            continue
        slope = 0.0
        if name in _SLOPES:
            slope = float(derivative[np.searchsorted(_NEAR, _SLOPES[name])])
            if slope == 0:
                continue
        apart = np.abs(derivative - _tabulated(name, slope))[finite].max()
        # The program's constants are rounded to its dtype.
        if apart <= (0 if name in _EXACT else max(eps, 1e-6)):
            found[name, slope] = apart
    return min(found, key=found.__getitem__) if found else None


@functools.lru_cache(64)
def _tabulated(name: str, slope: float) -> np.ndarray:
    return _at_numbers(lambda u: DERIVATIVES[name](u, slope))


@functools.lru_cache(64)
def _activated(name: str, slope: float) -> np.ndarray:
    return _at_numbers(lambda u: activate(u, name, slope))


def _at_numbers(function: Callable[[jax.Array], jax.Array]) -> np.ndarray:
    one = jax.ShapeDtypeStruct(_NUMBERS.shape, np.float32)
    closed = jax.make_jaxpr(function)(one)
    (found,) = _computed(compat.open_jaxpr(closed), closed.consts, [_NUMBERS])
    return np.broadcast_to(found, _NUMBERS.shape)


# --- operations in float64 ---


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "add_any": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "neg": np.negative,
    "max": np.maximum,
    "min": np.minimum,
    "abs": np.abs,
    "sign": np.sign,
    "square": np.square,
    "one_minus_square": lambda x: 1 - x * x,
    "pow": np.power,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "exp": np.exp,
    "exp2": np.exp2,
    "log": np.log,
    "log1p": np.log1p,
    "expm1": np.expm1,
    "tanh": np.tanh,
    "logistic": scipy.special.expit,
    "erf": scipy.special.erf,
    "erfc": scipy.special.erfc,
    "is_finite": np.isfinite,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "and": np.logical_and,
    "or": np.logical_or,
    "xor": np.logical_xor,
    "not": np.logical_not,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "select_n": lambda which, *cases: np.choose(np.asarray(which, np.int8), cases),
}

# JAX adds it to constants of a program whose arrays are on a mesh.
_RESHARD = "reshard"

# Functions of JAX that compute with the bits of numbers, by name.
_NAMED: dict[str, Callable[..., Any]] = {"exp_neg_sq": lambda x: np.exp(-x * x)}

# Parameters that hold an operation's function.
_CALLED = ("jaxpr", "call_jaxpr", "fun_jaxpr")


def _computed(jaxpr: Any, consts: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    """The results of a function at all numbers; results that do not depend on them are scalars.

    Raises:
        _UnknownError: an operation is not elementwise, or not known here.
    """
    values: dict[Any, Any] = dict(zip(jaxpr.invars, given, strict=True))
    values |= dict(zip(jaxpr.constvars, map(_scalar, consts), strict=True))

    def value(atom: Any) -> Any:
        return _scalar(atom.val) if isinstance(atom, Literal) else values[atom]

    for eqn in jaxpr.eqns:
        with np.errstate(all="ignore"):
            results = _results(eqn, [value(a) for a in eqn.invars])
        values.update(zip(eqn.outvars, results, strict=True))
    return [value(a) for a in jaxpr.outvars]


def _results(eqn: Any, operands: list[Any]) -> list[Any]:
    name = eqn.primitive.name
    if name in _OPERATIONS:
        return [_OPERATIONS[name](*operands)]
    if name in (*IDENTITIES, *SPREADING, _RESHARD):
        return operands[:1]
    if name == "integer_pow":
        return [operands[0] ** float(eqn.params["y"])]
    if name == "convert_element_type":
        return [_converted(operands[0], np.dtype(eqn.params["new_dtype"]))]
    inner = next((eqn.params[p] for p in _CALLED if eqn.params.get(p) is not None), None)
    if inner is None:
        raise _UnknownError(name)
    called = compat.open_jaxpr(inner)
    if (of_name := _NAMED.get(called.debug_info.func_name)) is not None:
        return [of_name(*operands)]
    return _computed(called, getattr(inner, "consts", ()), operands)


def _converted(value: Any, dtype: np.dtype) -> Any:
    if dtype.kind in "biu":
        return np.asarray(value).astype(dtype)
    # Constants are rounded as in the program; the evaluated function stays in float64.
    return _scalar(np.asarray(value).astype(dtype)) if np.ndim(value) == 0 else value.astype(float)


def _scalar(value: Any) -> Any:
    """The number that all elements of an array equal.

    Raises:
        _UnknownError: the array is traced or empty, or its elements differ.
    """
    if compat.is_traced(value) or not np.size(value):
        raise _UnknownError("no number")
    flat = np.asarray(value).reshape(-1)
    if (flat != flat[0]).any():
        raise _UnknownError("several numbers")
    first = flat[0]
    return (
        first if flat.dtype == bool or np.issubdtype(flat.dtype, np.integer) else np.float64(first)
    )
