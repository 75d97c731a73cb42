"""The epilogue of a floating-point convolution: parameters, words, and definition.

Let ``acc`` be the sum of one output element (image n, pixel, output channel k). Then

    t = acc * scale[k] + bias[k] + residual[n, pixel, k]
    y = activation(t)

in float32 (float64 if the result is), rounded once to the dtype of the result. Absent terms are
omitted. ``pre`` is t, rounded, as a second result. ``statistics`` is a third one, (2, K) in the
accumulator's dtype: for every channel of the rounded y, the mean over images and pixels, and the
sum of squared deviations from it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jaxconv._src.problem.operand import array

ACTIVATIONS = (
    "relu",
    "relu6",
    "leaky_relu",
    "gelu",
    "gelu_tanh",
    "silu",
    "sigmoid",
    "tanh",
    "hard_swish",
)
Activation = str | tuple[str, float] | Callable[[jax.Array], jax.Array] | None

# Other names of these, and of no activation, written without underscores.
_SPELLINGS: dict[str, str | None] = {name.replace("_", ""): name for name in ACTIVATIONS}
_SPELLINGS |= {"swish": "silu", "hardsilu": "hard_swish", "logistic": "sigmoid"}
_SPELLINGS |= dict.fromkeys(("none", "linear", "identity"))
_DEFAULT_SLOPE = 0.01  # that of jax.nn.leaky_relu
_FUNCTIONS: dict[Any, Any] = {
    jax.nn.relu: "relu",
    jax.nn.relu6: "relu6",
    jax.nn.leaky_relu: ("leaky_relu", _DEFAULT_SLOPE),
    jax.nn.gelu: "gelu_tanh",
    jax.nn.silu: "silu",
    jax.nn.sigmoid: "sigmoid",
    jax.nn.hard_swish: "hard_swish",
    jax.nn.tanh: "tanh",
    jnp.tanh: "tanh",
    lax.tanh: "tanh",
    lax.logistic: "sigmoid",
    jax.nn.identity: None,
}

# The derivative of these follows from y; that of the others from t.
_KNOWN_FROM_Y = ("relu", "relu6", "sigmoid", "tanh")


class Written(Protocol):
    """An activation in a program's operations, with their derivative, also at corners."""

    @property
    def differentiates_from_y(self) -> bool:
        """As in ``Epilogue``."""

    def tangent(self, value: jax.Array, dt: jax.Array) -> jax.Array:
        """The derivative at ``value`` (y if that determines it, else t) times dt, in dt's dtype."""


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """The terms of an epilogue.

    Attributes:
        scale, bias, residual: whether these operands are present.
        activation: None or one of ``ACTIVATIONS``.
        slope: the slope of leaky_relu, a float32 number.
        pre, statistics: whether these are results in addition to y.
        written: the activation as written in a program, if its derivative must be used; None for
            the derivative of ``differential``. Kernels ignore it.
    """

    scale: bool = False
    bias: bool = False
    residual: bool = False
    activation: str | None = None
    slope: float = 0.0
    pre: bool = False
    statistics: bool = False
    written: Written | None = dataclasses.field(default=None, repr=False)

    @property
    def plain(self) -> bool:
        return self == Epilogue()

    @property
    def terms(self) -> tuple[str, ...]:
        """Names of the operands after x and w."""
        return tuple(n for n in ("scale", "bias", "residual") if getattr(self, n))

    @property
    def words(self) -> list[str]:
        """The end of the problem key."""
        activation = [self.activation] if self.activation else []
        if self.activation == "leaky_relu":
            activation = [f"leaky_relu:{_c_hex(self.slope)}"]
        results = [n for n in ("pre", "statistics") if getattr(self, n)]
        return [*self.terms, *activation, *results]

    @property
    def differentiates_from_y(self) -> bool:
        """Whether y determines the activation's derivative, so that t need not be kept."""
        if self.written is not None:
            return self.written.differentiates_from_y
        if self.activation == "leaky_relu":
            return self.slope > 0
        return self.activation is None or self.activation in _KNOWN_FROM_Y

    def tangent(self, value: jax.Array, dt: jax.Array) -> jax.Array:
        """The activation's derivative times the tangent ``dt``, in the dtype of dt.

        ``value`` is y if that determines the derivative, else t.
        """
        if self.written is not None:
            return self.written.tangent(value, dt)
        return differential(self.activation, self.slope, value, dt)

    def activated(self, t: jax.Array, out_dtype: np.dtype) -> jax.Array:
        """y as a function of t, with this epilogue's derivative.

        The backward pass keeps y, or t in y's dtype, instead of a function of t in t's dtype.
        """

        if self.activation is None:
            return t.astype(out_dtype)

        @jax.custom_jvp
        def activated(t):
            return activate(t, self.activation, self.slope).astype(out_dtype)

        @activated.defjvp
        def jvp(primals, tangents):
            (t,), (dt,) = primals, tangents
            y = activated(t)
            value = y if self.differentiates_from_y else t.astype(out_dtype)
            return y, jax.checkpoint(self.tangent, prevent_cse=False)(value, dt).astype(out_dtype)

        return activated(t)

    def without_statistics(self) -> Epilogue:
        return dataclasses.replace(self, statistics=False)

    def as_computed(self) -> Epilogue:
        """The same without the fields that affect only the derivative."""
        return dataclasses.replace(self, written=None)

    def with_derivative(self) -> Epilogue:
        """The same with additional results that its derivative needs."""
        return self if self.differentiates_from_y else dataclasses.replace(self, pre=True)


def _c_hex(value: float) -> str:
    """A number in C's ``%a`` format."""
    return re.sub(r"\.?0*p", "p", float(value).hex())


def parse_activation(activation: Activation) -> tuple[str | None, float]:
    """Name and slope of an activation in any form that users may write.

    Raises:
        TypeError, ValueError: it is no activation.
    """
    slope = None
    name: Any = _of_function(activation) if callable(activation) else activation
    if isinstance(name, tuple | list) and len(name) == 2:
        name, slope = name
    known = name is None
    if isinstance(name, str):
        squashed = name.lower().replace("_", "").replace("-", "")
        known, name = squashed in _SPELLINGS, _SPELLINGS.get(squashed)
    if not known or (slope is not None) != (name == "leaky_relu"):
        raise ValueError(
            'activation: expected None, ("leaky_relu", slope) or one of '
            f"{', '.join(n for n in ACTIVATIONS if n != 'leaky_relu')}; got {activation!r}"
            + (f"; jax.nn's is {_FUNCTIONS[jax.nn.leaky_relu]}" if name == "leaky_relu" else "")
        )
    if slope is None:
        return name, 0.0
    try:
        with np.errstate(over="ignore"):
            slope = float(np.float32(slope))
    except (TypeError, ValueError, jax.errors.ConcretizationTypeError) as error:
        raise TypeError(
            f"activation: expected the slope of leaky_relu as a number, got {slope!r}"
        ) from error
    if not math.isfinite(slope):
        raise ValueError(f"activation: expected a finite slope of leaky_relu, got {activation!r}")
    return name, slope


def _of_function(function: Callable) -> Any:
    """The activation of a function of ``jax.nn`` or ``jax.numpy``.

    Raises:
        ValueError: it is another function.
    """
    inner, options = function, {}
    if isinstance(function, functools.partial) and not function.args:
        inner, options = function.func, function.keywords
    try:
        found = _FUNCTIONS.get(inner, "")
    except TypeError:  # it is not hashable
        found = ""
    if inner is jax.nn.gelu and options.keys() <= {"approximate"}:
        return "gelu_tanh" if options.get("approximate", True) else "gelu"
    if inner is jax.nn.leaky_relu and options.keys() <= {"negative_slope"}:
        return ("leaky_relu", options.get("negative_slope", _DEFAULT_SLOPE))
    if found == "" or options:
        name = getattr(inner, "__name__", type(inner).__name__)
        raise ValueError(
            f"activation: the function {name} is none of {', '.join(ACTIVATIONS)} as jax.nn has "
            "them. Apply it to the result; jaxconv.fuse makes what it knows a part of the call"
        )
    return found


def accumulator_dtype(out_dtype: np.dtype) -> np.dtype:
    """The dtype of sums, and of scale and bias."""
    return np.dtype(np.float64 if np.dtype(out_dtype) == np.float64 else np.float32)


def checked(
    scale: ArrayLike | None,
    bias: ArrayLike | None,
    residual: ArrayLike | None,
    activation: Activation,
    *,
    operand_dtype: np.dtype,
    channels: int,
    out_shape: tuple[int, ...],
    out_dtype: np.dtype,
    statistics: bool = False,
) -> tuple[Epilogue, dict[str, jax.Array]]:
    """The parameters of an epilogue, and its operands by name (scale, bias as accumulators).

    Args:
        scale, bias, residual, activation, statistics: as in ``jaxconv.conv``.
        operand_dtype: of x and w.
        channels: K.
        out_shape, out_dtype: of the result.

    Raises:
        TypeError, ValueError: one of them does not fit.
    """
    if not isinstance(statistics, bool | np.bool_):
        raise TypeError(f"statistics: expected True or False, got {statistics!r}")
    name, slope = parse_activation(activation)
    given = scale is not None, bias is not None, residual is not None
    form = Epilogue(*given, name, slope, statistics=bool(statistics))
    if form.plain:
        return form, {}
    if not jnp.issubdtype(operand_dtype, jnp.floating):
        asked = [*form.terms, *["activation"] * (name is not None), "statistics"]
        raise TypeError(
            f"{asked[0]}: expected floating-point x and w beside it, got "
            f"{np.dtype(operand_dtype)}; of 8-bit operands, jaxconv.int8.conv has an epilogue"
        )
    terms: dict[str, jax.Array] = {}
    for what, value in (("scale", scale), ("bias", bias)):
        if value is None:
            continue
        vector = array(what, value)
        if vector.shape != (channels,):
            raise ValueError(
                f"{what}: expected shape ({channels},), a number for each output channel, got "
                f"shape {vector.shape}"
            )
        if not jnp.issubdtype(vector.dtype, jnp.floating):
            raise TypeError(f"{what}: expected floating-point numbers, got dtype {vector.dtype}")
        terms[what] = vector.astype(accumulator_dtype(out_dtype))
    if residual is not None:
        added = array("residual", residual)
        if added.shape != out_shape:
            raise ValueError(
                f"residual: expected shape {out_shape}, the result's, got shape {added.shape}"
            )
        if added.dtype != out_dtype:
            raise ValueError(
                f"residual: expected dtype {np.dtype(out_dtype)}, the result's, got {added.dtype}"
            )
        terms["residual"] = added
    return form, terms


def activate(t: jax.Array, activation: str | None, slope: float = 0.0) -> jax.Array:
    """The activation's value; NaN stays NaN, and results are finite where jax.nn's are."""
    one = jnp.ones((), t.dtype)
    match activation:
        case None:
            return t
        case "relu":
            return jnp.where(t < 0, 0 * one, t)
        case "relu6":
            return jnp.where(t < 0, 0 * one, jnp.where(t > 6, 6 * one, t))
        case "leaky_relu":
            return jnp.where(t < 0, t * (slope * one), t)
        case "gelu":  # 1 + erf would cancel below 0
            return 0.5 * t * lax.erfc(-t * math.sqrt(0.5))
        case "gelu_tanh":  # t / 2 (1 + tanh(u)) = t sigmoid(2 u)
            return t * lax.logistic(2 * math.sqrt(2 / math.pi) * (t + 0.044715 * t * t * t))
        case "silu":
            return t * lax.logistic(t)
        case "sigmoid":
            return lax.logistic(t)
        case "tanh":
            return lax.tanh(t)
        case "hard_swish":
            return t * (activate(t + 3, "relu6") / 6)
    raise ValueError(f"activation: {activation!r}")


def differential(
    activation: str | None, slope: float, value: jax.Array, dt: jax.Array
) -> jax.Array:
    """The derivative of an activation times the tangent ``dt``, in the dtype of dt.

    ``value`` is y if that determines the derivative, else t (``Epilogue.differentiates_from_y``).
    At the corners of piecewise linear activations the derivative is that of the flatter side; for
    leaky_relu and hard_swish, of the right side.
    """
    v = value.astype(dt.dtype)
    zero, one = jnp.zeros((), dt.dtype), jnp.ones((), dt.dtype)
    match activation:
        case None:
            return dt
        case "relu":
            return jnp.where(v > 0, dt, zero)
        case "relu6":
            return jnp.where((v > 0) & (v < 6), dt, zero)
        case "leaky_relu":
            return jnp.where(v >= 0, dt, slope * dt)
        case "sigmoid":
            return dt * (v * (1 - v))
        case "tanh":
            return dt * (1 - v * v)
        case "gelu":
            density = jnp.exp(-0.5 * v * v) / math.sqrt(2 * math.pi)
            return dt * (0.5 * lax.erfc(-v * math.sqrt(0.5)) + v * density)
        case "gelu_tanh":
            factor = 2 * math.sqrt(2 / math.pi)
            s = lax.logistic(factor * (v + 0.044715 * v * v * v))
            return dt * (s + v * s * (1 - s) * factor * (1 + 3 * 0.044715 * v * v))
        case "silu":
            s = lax.logistic(v)
            return dt * (s + v * s * (1 - s))
        case "hard_swish":
            inside = jnp.where(v < -3, zero, v / 3 + 0.5)
            return dt * jnp.where(v >= 3, one, inside)
    raise ValueError(f"activation: {activation!r}")


def along_channels(vector: jax.Array, rank: int, axis: int) -> jax.Array:
    """A vector (K,) reshaped to broadcast to an array with channels on ``axis``."""
    return lax.expand_dims(vector, [a for a in range(rank) if a != axis])


def moments(y: jax.Array, axis: int, dtype: np.dtype) -> jax.Array:
    """The statistics of y, (2, K): each channel's mean and sum of squared deviations."""
    others = tuple(a for a in range(y.ndim) if a != axis)
    wide = y.astype(dtype)
    mean = jnp.mean(wide, others)
    deviation = wide - along_channels(mean, y.ndim, axis)
    return jnp.stack([mean, jnp.sum(deviation * deviation, others)])


def moments_tangent(axis: int, y: jax.Array, moments: jax.Array, dy: jax.Array) -> jax.Array:
    """The tangent of the statistics, linear in the tangent of y."""
    others = tuple(a for a in range(y.ndim) if a != axis)
    deviation = y.astype(dy.dtype) - along_channels(moments[0], y.ndim, axis)
    if y.dtype.itemsize >= 4:
        # The mean's rounding error would shift all gradients of a channel alike (in 16 bits, y's
        # own rounding hides it).
        deviation -= jnp.mean(deviation, others, keepdims=True)
    return jnp.stack([jnp.mean(dy, others), 2 * jnp.sum(deviation * dy, others)])


def finish(
    acc: jax.Array,
    terms: Mapping[str, jax.Array],
    axis: int,
    epilogue: Epilogue,
    out_dtype: np.dtype,
) -> list[jax.Array]:
    """All results by the definition, with the derivatives of the primitive conv_fused.

    Args:
        acc: the sums, in the accumulator's dtype.
        terms: the operands named in ``epilogue.terms``.
        axis: the axis of the output channels.
        epilogue: the parameters.
        out_dtype: the dtype of y and pre.
    """
    t = acc
    if epilogue.scale:
        t = t * along_channels(terms["scale"], t.ndim, axis)
    if epilogue.bias:
        t = t + along_channels(terms["bias"], t.ndim, axis)
    if epilogue.residual:
        t = t + terms["residual"].astype(t.dtype)
    y = epilogue.activated(t, out_dtype)
    results = [y]
    if epilogue.pre:
        results.append(t.astype(out_dtype))
    if epilogue.statistics:
        results.append(moments(y, axis, acc.dtype))
    return results


def sums(
    compute: Callable[[jax.Array, jax.Array, np.dtype], jax.Array],
    lhs: jax.Array,
    rhs: jax.Array,
    out_dtype: np.dtype,
) -> jax.Array:
    """A bilinear function's result in the accumulator's dtype.

    The third argument of ``compute`` is its result's dtype. Derivatives are computed in
    ``out_dtype``, so that their transposes read cotangents in that dtype.
    """
    wide = accumulator_dtype(out_dtype)

    @jax.custom_jvp
    def accumulated(lhs, rhs):
        return compute(lhs, rhs, wide)

    def jvp(primals, tangents):
        (lhs, rhs), terms = primals, []
        for i, tangent in enumerate(tangents):
            if not isinstance(tangent, jax.custom_derivatives.SymbolicZero):
                operands = (tangent, rhs) if i == 0 else (lhs, tangent)
                terms.append(compute(*operands, out_dtype).astype(wide))
        return accumulated(lhs, rhs), functools.reduce(jnp.add, terms)

    accumulated.defjvp(jvp, symbolic_zeros=True)
    return accumulated(lhs, rhs)
