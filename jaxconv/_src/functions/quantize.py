"""Quantisation on plain arrays: scales, int8 weights, folded batch norm, fake quantisation.

A quantised array q represents the numbers scale * q. Scales are float32 and positive; int8 is used
symmetrically, from -127 to 127, so that zero is exact and products need no zero point.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jaxconv._src.conv import canonical, primitives
from jaxconv._src.functions import arguments, int8_conv
from jaxconv._src.functions.arguments import Padding
from jaxconv._src.int8 import int8_layout, int8_primitive
from jaxconv._src.problem import layouts
from jaxconv._src.problem.spec import ConvSpec, Op
from jaxconv._src.problem.spelling import knows, renamed

# Least and greatest quantised value.
_RANGE: dict[np.dtype, tuple[int, int]] = {
    np.dtype(np.int8): (-127, 127),
    np.dtype(np.uint8): (0, 255),
}
_LIMIT = 127

# Below this maximum, the scale or its reciprocal is not a normal float32 number.
_LEAST_MAX = _LIMIT * float(np.finfo(np.float32).tiny)

# A histogram of magnitudes counts float32 numbers by their upper bits: sign (always 0), 8 of
# exponent, 8 of mantissa. A bin is then at most 1 / 256 of its lower edge wide.
_BIN_SHIFT = 15
_BINS = 1 << (32 - 1 - _BIN_SHIFT)


def quantize(
    x: ArrayLike, scale: ArrayLike, *, zero_point: int = 0, dtype: DTypeLike = jnp.int8
) -> jax.Array:
    """Quantises an array: ``round(x / scale) + zero_point``, rounded half to even and clipped.

    The quotient is the float32 product with 1 / scale. Where ``scale`` is a NumPy array or a
    number, its reciprocal is taken on the host, and the result is the same on every platform.

    Args:
        x: floating-point array of any shape.
        scale: positive float32, broadcast against x; a scalar for a whole tensor.
        zero_point: what stands for 0.
        dtype: int8 (clipped to -127 ... 127) or uint8 (0 ... 255).

    Returns:
        Array of ``dtype`` and x's shape. NaN gives 0 before the zero point is added.

    Raises:
        TypeError: ``dtype`` is neither int8 nor uint8.
        ValueError: a scale that is not traced is not positive and finite.
    """
    dtype = np.dtype(dtype)
    if dtype not in _RANGE:
        raise TypeError(f"dtype: expected int8 or uint8, got {dtype.name}")
    rounded = jnp.round(jnp.asarray(x).astype(jnp.float32) * _reciprocal("scale", scale))
    rounded = jnp.where(jnp.isnan(rounded), 0, rounded) + zero_point
    return jnp.clip(rounded, *_RANGE[dtype]).astype(dtype)


def dequantize(q: ArrayLike, scale: ArrayLike, *, zero_point: int = 0) -> jax.Array:
    """The float32 numbers that a quantised array represents: ``scale * (q - zero_point)``.

    Args:
        q: integer array of any shape.
        scale: float32, broadcast against q.
        zero_point: what stands for 0.
    """
    return (jnp.asarray(q).astype(jnp.float32) - zero_point) * jnp.asarray(scale, jnp.float32)


def max_scale(x: ArrayLike, axis: int | Sequence[int] | None = None) -> jax.Array:
    """The scale that maps the greatest magnitude to 127: ``max(abs(x)) / 127``.

    Args:
        x: floating-point array.
        axis: the axes to reduce; all of them by default, which gives a scalar.

    Returns:
        float32; 1 where all elements are 0.
    """
    greatest = jnp.max(jnp.abs(jnp.asarray(x).astype(jnp.float32)), axis, initial=0)
    return jnp.where(greatest <= _LEAST_MAX, _LIMIT, greatest) / _LIMIT


def quantize_weight(
    w: ArrayLike, scale: ArrayLike | None = None
) -> tuple[jax.Array, jax.Array | np.ndarray]:
    """Quantises a filter, by default with one scale for each output channel.

    Args:
        w: floating-point filter (*window, C / groups, K).
        scale: positive float32, () or (K,); by default ``max_scale`` of each output channel.

    Returns:
        The int8 filter, in w's shape, and the scale as a float32 array.
    """
    w = jnp.asarray(w)
    if not 3 <= w.ndim <= 5:
        raise ValueError(f"w: expected (*window, C / groups, K), got shape {w.shape}")
    scale = _weight_scale(w, scale)
    return quantize(w, scale), scale


def fold_batch_norm(
    w: ArrayLike,
    gamma: ArrayLike,
    beta: ArrayLike,
    mean: ArrayLike,
    var: ArrayLike,
    eps: float = 1e-5,
    bias: ArrayLike | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Folds the batch normalisation after a convolution into its filter and a bias.

    With the running statistics, ``gamma * (conv(x, w) + bias - mean) / sqrt(var + eps) + beta``
    equals ``conv(x, folded) + folded_bias``.

    Args:
        w: filter (*window, C / groups, K).
        gamma, beta: scale and offset of the normalisation, (K,).
        mean, var: its running mean and variance, (K,).
        eps: its addend to the variance: 1e-5 in Flax, PyTorch and Haiku, 1e-3 in Keras.
        bias: the convolution's own bias, (K,); none by default.

    Returns:
        The folded filter, float32 of w's shape, and the folded bias, float32 (K,).

    Raises:
        ValueError: a vector does not have K elements.
    """
    w = jnp.asarray(w, jnp.float32)
    vectors = {"gamma": gamma, "beta": beta, "mean": mean, "var": var}
    if bias is not None:
        vectors["bias"] = bias
    vectors = {name: jnp.asarray(value, jnp.float32) for name, value in vectors.items()}
    for name, value in vectors.items():
        if value.shape != w.shape[-1:]:
            raise ValueError(f"{name}: expected shape {w.shape[-1:]}, got {value.shape}")
    factor = vectors["gamma"] * lax.rsqrt(vectors["var"] + eps)
    shift = vectors.get("bias", 0.0) - vectors["mean"]
    return w * factor, vectors["beta"] + shift * factor


def calibrate(
    activations: Callable[[Any], Any],
    batches: Iterable[Any],
    *,
    percentile: float | None = None,
) -> Any:
    """Determines the scales of activations by running a network on examples.

    Args:
        activations: maps a batch to a pytree of the floating-point arrays to quantise. ``jax.jit``
            traces it.
        batches: inputs of ``activations``, at least one; each is used once.
        percentile: None takes the greatest magnitude, so that nothing is clipped. A number from 50
            to 100, usually 99.9 to 99.999, takes the magnitude that this percentage of all elements
            of all batches does not exceed, and clips the others. It comes from a histogram of
            65,536 bins with widths proportional to the magnitude, and is at most 0.4 % too large.

    Returns:
        A pytree of the same structure: for each array one scale, a float32 NumPy scalar, that maps
        this magnitude to 127; 1 where all elements were 0.

    Raises:
        TypeError: the percentile is no number.
        ValueError: there is no batch, the percentile is out of range, or an activation has an
            infinity or a NaN (the message has its path in the pytree).
    """
    if percentile is not None:
        percentile = _percentile(percentile)
    # For each array the greatest magnitude, and with a percentile the histogram.
    measured = _greatest if percentile is None else _histogram

    @jax.jit
    def measure(batch):
        return jax.tree.map(measured, activations(batch))

    total = None
    for batch in batches:
        found = jax.tree_util.tree_map_with_path(
            _checked, jax.device_get(measure(batch)), is_leaf=_is_magnitudes
        )
        if total is not None:
            found = jax.tree.map(_Magnitudes.merged, total, found, is_leaf=_is_magnitudes)
        total = found
    if total is None:
        raise ValueError("batches: expected at least one, got none")

    def scale(magnitudes: _Magnitudes) -> np.float32:
        greatest = magnitudes.limit(100.0 if percentile is None else percentile)
        return np.float32(1.0 if greatest <= _LEAST_MAX else greatest / _LIMIT)

    return jax.tree.map(scale, total, is_leaf=_is_magnitudes)


def _percentile(value: Any) -> float:
    """Checks that a value is a plausible percentile.

    Raises:
        TypeError, ValueError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(f"percentile: expected a number from 50 to 100, or None, got {value!r}")
    if not 50 <= value <= 100:
        hint = f"; a fraction of {value} is percentile={100 * value:.6g}" if 0 < value <= 1 else ""
        raise ValueError(f"percentile: expected per cent, from 50 to 100, got {value}{hint}")
    return float(value)


class _Magnitudes(NamedTuple):
    """The magnitudes of an array: the greatest, and the count in each bin."""

    greatest: Any  # float32
    counts: Any  # (_BINS,) integers, or None

    def merged(self, other: _Magnitudes) -> _Magnitudes:
        counts = None if self.counts is None else self.counts + other.counts
        return _Magnitudes(np.maximum(self.greatest, other.greatest), counts)

    def limit(self, percentile: float) -> float:
        """The magnitude that this percentage of the elements does not exceed."""
        if self.counts is None or percentile == 100:
            return float(self.greatest)
        below = np.cumsum(self.counts)
        found = int(np.searchsorted(below, percentile / 100 * below[-1]))
        edge = np.uint32((found + 1) << _BIN_SHIFT).view(np.float32)
        return float(min(edge, self.greatest))


def _checked(path: Any, magnitudes: _Magnitudes) -> _Magnitudes:
    """One batch's magnitudes, to be merged with those of others.

    Raises:
        ValueError: there was an infinity or a NaN.
    """
    greatest, counts = magnitudes
    if not np.isfinite(greatest):
        where = jax.tree_util.keystr(path)
        raise ValueError(f"activations{where}: expected finite numbers, got {greatest}")
    # The counts of one batch fit in 32 bits; those of all batches may not.
    return _Magnitudes(greatest, None if counts is None else counts.astype(np.int64))


def _is_magnitudes(tree: Any) -> bool:
    return isinstance(tree, _Magnitudes)


def _greatest(x: jax.Array) -> _Magnitudes:
    return _Magnitudes(jnp.max(jnp.abs(x.astype(jnp.float32)), initial=0), None)


def _histogram(x: jax.Array) -> _Magnitudes:
    magnitudes = jnp.abs(x.astype(jnp.float32)).ravel()
    bins = lax.bitcast_convert_type(magnitudes, jnp.uint32) >> _BIN_SHIFT
    counts = jnp.zeros(_BINS, jnp.int32).at[bins].add(1)
    return _Magnitudes(_greatest(x).greatest, counts)


class QuantizedConv(NamedTuple):
    """The constants of a quantised convolution, in the order of ``int8.conv``'s arguments.

        y = int8.conv(x, *layer, activation="relu")

    Attributes:
        w: the packed int8 filter.
        scale: (K,) float32; scale times the sum is the result in units of the result's scale.
        bias: (K,) float32 in the same units, or None.
    """

    w: int8_layout.PackedFilter
    scale: jax.Array
    bias: jax.Array | None


@knows(x="x_scale", y="y_scale", feature_group_count="groups", b="bias")
def quantize_conv(
    w: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    x_scale: ArrayLike,
    y_scale: ArrayLike | None = None,
    w_scale: ArrayLike | None = None,
    groups: int = 1,
    data_format: str | None = None,
    layout: str | None = None,
) -> QuantizedConv:
    """Quantises a convolution's constants for given scales of its input and output.

    The int32 sum represents x_scale * w_scale[k] * sum. So the requantisation scale is ``x_scale *
    w_scale / y_scale`` and the bias ``bias / y_scale``; a residual with the scale z_scale needs
    ``residual_scale = z_scale / y_scale``.

    Args:
        w: floating-point filter (*window, C / groups, K).
        bias: (K,), or None.
        x_scale: scale of the input, ().
        y_scale: scale of the int8 output, (); None for a floating-point output.
        w_scale: scale of the filter, () or (K,); by default ``max_scale`` of each output channel.
        groups: groups of the convolution.
        data_format: the format of the convolution's input, as in ``pack_filter``; "NCHW32" by
            default.
        layout: the deprecated name of ``data_format``; it warns.

    Raises:
        TypeError: the filter is not floating-point.
        ValueError: shapes do not fit, or a scale that is not traced is not positive and finite.
    """
    w = jnp.asarray(w)
    if not jnp.issubdtype(w.dtype, jnp.floating):
        raise TypeError(f"w: expected a floating-point filter, got {w.dtype.name}")
    k = w.shape[-1:]
    if bias is not None and np.shape(bias) != k:
        raise ValueError(f"bias: expected shape {k}, got {np.shape(bias)}")
    y_scale = np.float32(1) if y_scale is None else y_scale
    for name, value in (("x_scale", x_scale), ("y_scale", y_scale)):
        if np.shape(value) != ():
            raise ValueError(f"{name}: expected a scalar, got shape {np.shape(value)}")
        _check_positive(name, value)
    if w_scale is not None:
        _check_positive("w_scale", w_scale)
    data_format = renamed("layout", layouts.from_layout(layout), "data_format", data_format)
    given = (w, bias, x_scale, y_scale, w_scale)
    return _quantize_conv(*given, groups=groups, data_format=data_format)


@functools.partial(jax.jit, static_argnames=("groups", "data_format"))
def _quantize_conv(w, bias, x_scale, y_scale, w_scale, *, groups, data_format) -> QuantizedConv:
    q, w_scale = quantize_weight(w, w_scale)
    x_scale, y_scale = (jnp.asarray(s, jnp.float32) for s in (x_scale, y_scale))
    scale = jnp.broadcast_to(x_scale * w_scale / y_scale, q.shape[-1:])
    if bias is not None:
        bias = jnp.asarray(bias, jnp.float32) / y_scale
    form = "DHW"[5 - q.ndim :] + "IO"
    packed = int8_layout.pack_filter(q, groups=groups, data_format=data_format, filter_format=form)
    return QuantizedConv(packed, scale, bias)


def fake_quantize(x: ArrayLike, scale: ArrayLike) -> jax.Array:
    """Rounds numbers to int8 multiples of the scale: ``scale * clip(round(x / scale), -127, 127)``.

    The gradient uses the straight-through estimator (Bengio et al. 2013, arXiv:1308.3432): for x it
    passes where x / scale rounds to -127 ... 127, and is 0 where x is clipped. The gradient of the
    scale is that of learned step sizes (Esser et al. 2020, arXiv:1902.08153), without its gradient
    scaling factor; apply ``lax.stop_gradient`` to keep the scale fixed.

    Args:
        x: floating-point array.
        scale: positive float32, broadcast against x.

    Returns:
        Array of x's shape and dtype.
    """
    x = jnp.asarray(x)
    steps = x.astype(jnp.float32) * _reciprocal("scale", scale)
    whole = jnp.round(steps)
    # Half a step beyond the limit still rounds to it: the greatest magnitude, divided by its own
    # scale, may be 127 plus an ulp.
    passed = jnp.where(jnp.abs(whole) <= _LIMIT, steps, _LIMIT * jnp.sign(steps))
    # Exact: the difference is at most 1/2, and the sum is the rounded number.
    rounded = passed + lax.stop_gradient(jnp.clip(whole, -_LIMIT, _LIMIT) - passed)
    return (rounded * jnp.asarray(scale, jnp.float32)).astype(x.dtype)


@knows(**arguments.OF_WINDOW)
def fake_quant_conv(
    x: ArrayLike,
    w: ArrayLike,
    x_scale: ArrayLike | None = None,
    w_scale: ArrayLike | None = None,
    *,
    stride: int | Sequence[int] = 1,
    padding: Padding = "SAME",
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> jax.Array:
    """A convolution for quantisation-aware training: int8 forward, straight-through gradients.

    The forward pass quantises both operands, runs ``int8.conv`` and multiplies the sums by both
    scales, so that training sees the arithmetic of inference. The backward pass is that of the
    convolution of ``fake_quantize(x, x_scale)`` and ``fake_quantize(w, w_scale)`` in x's dtype: an
    operand's gradient is 0 where the operand was clipped, and float32 gradients have the precision
    of ``jax_default_matmul_precision``. It works inside jit, grad and vmap, in reverse mode.

    Args:
        x: float32, bfloat16 or float16 array (N, *spatial, C), of 1 to 3 spatial axes.
        w: floating-point filter (*window, C / groups, K).
        x_scale: positive float32, () or (N,), one for each image; by default ``max_scale(x)``,
            without a gradient.
        w_scale: positive float32, () or (K,); by default ``max_scale`` of each output channel,
            without a gradient.
        stride, padding, dilation: as in ``jaxconv.conv``.
        groups: groups of channels; several groups need multiples of 32 channels each in both
            operands.

    Returns:
        (N, *out_spatial, K) in x's dtype.

    Raises:
        TypeError: an operand has no floating-point type to which int8 sums can be rounded.
        ValueError: ranks, channels, scales or window parameters do not fit.
    """
    x, w = jnp.asarray(x), jnp.asarray(w)
    _check_operands(x, w)
    step = arguments.per_axis("dilation", dilation, x.ndim - 2)
    x, padding = arguments.continued(x, range(1, x.ndim - 1), padding, w.shape[:-2], step)
    spec = _spec(x, w, stride, padding, dilation, groups)
    spec = dataclasses.replace(spec, precision=canonical.precision_name(None))  # of gradients
    if x_scale is None:
        x_scale = lax.stop_gradient(max_scale(x))
    if np.shape(x_scale) not in ((), (x.shape[0],)):
        raise ValueError(f"x_scale: expected shape () or {x.shape[:1]}, got {np.shape(x_scale)}")
    scales = jnp.asarray(x_scale, jnp.float32), jnp.asarray(_weight_scale(w, w_scale))
    return _fake_quant_conv(x, w, *scales, spec)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _fake_quant_conv(x, w, x_scale, w_scale, spec: ConvSpec) -> jax.Array:
    # A scale for each image needs an axis in addition to the channels.
    scale = x_scale[:, None] * w_scale if x_scale.ndim else x_scale * w_scale
    if x_scale.ndim:
        scale = jnp.broadcast_to(scale, (x.shape[0], w.shape[-1]))
    result: Any = int8_conv.conv(
        quantize(x, _per_image(x_scale, x.ndim)),
        quantize(w, w_scale),
        scale,
        stride=spec.stride,
        padding=spec.padding,
        dilation=spec.dilation,
        out_dtype=x.dtype,
    )
    return result


def _fake_quant_conv_fwd(x, w, x_scale, w_scale, spec: ConvSpec):
    return _fake_quant_conv(x, w, x_scale, w_scale, spec), (x, w, x_scale, w_scale)


def _fake_quant_conv_bwd(spec: ConvSpec, operands, dy):
    def convolve(x, w, x_scale, w_scale):
        x = fake_quantize(x, _per_image(x_scale, x.ndim))
        w = fake_quantize(w, w_scale).astype(x.dtype)
        return primitives.bind(Op.FPROP, x, w, spec, x.dtype)

    return jax.vjp(convolve, *operands)[1](dy)


_fake_quant_conv.defvjp(_fake_quant_conv_fwd, _fake_quant_conv_bwd)


def _per_image(scale: jax.Array, rank: int) -> jax.Array:
    return scale.reshape(scale.shape + (1,) * (rank - 1)) if scale.ndim else scale


def _weight_scale(w: jax.Array, scale: ArrayLike | None) -> jax.Array | np.ndarray:
    """The scale of a filter, () or (K,); by default one for each output channel."""
    if scale is None:
        return lax.stop_gradient(max_scale(w, tuple(range(w.ndim - 1))))
    if np.shape(scale) not in ((), w.shape[-1:]):
        raise ValueError(f"w_scale: expected shape () or {w.shape[-1:]}, got {np.shape(scale)}")
    return jnp.asarray(scale, jnp.float32) if _on_device(scale) else np.asarray(scale, np.float32)


def _on_device(value: Any) -> bool:
    return isinstance(value, jax.Array)


def _reciprocal(name: str, scale: ArrayLike) -> jax.Array | np.ndarray:
    """1 / scale in float32, computed on the host if the scale is a host value."""
    _check_positive(name, scale)
    if isinstance(scale, jax.core.Tracer):
        return 1 / scale.astype(jnp.float32)
    return np.float32(1) / np.asarray(scale, np.float32)


def _check_positive(name: str, scale: ArrayLike) -> None:
    """Refuses a known scale that is not positive and finite."""
    if isinstance(scale, jax.core.Tracer):
        return
    values = np.asarray(scale, np.float32)
    if not (np.isfinite(values) & (values > 0)).all():
        raise ValueError(f"{name}: expected positive finite numbers, got {scale}")


def _check_operands(x: jax.Array, w: jax.Array) -> None:
    if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise TypeError(f"x: expected float32, bfloat16 or float16, got {x.dtype.name}")
    if not jnp.issubdtype(w.dtype, jnp.floating):
        raise TypeError(f"w: expected a floating-point filter, got {w.dtype.name}")
    if not 3 <= x.ndim <= 5:
        raise ValueError(f"x: expected 3 to 5 dimensions, got shape {x.shape}")
    if w.ndim != x.ndim:
        raise ValueError(f"w: expected {x.ndim} dimensions as x has, got shape {w.shape}")


def _spec(x, w, stride, padding, dilation, groups) -> ConvSpec:
    """The convolution of two channels-last operands."""
    rank = x.ndim - 2
    lhs, rhs = (0, rank + 1, *range(1, rank + 1)), (rank + 1, rank, *range(rank))
    window: dict[str, Any] = dict(
        stride=arguments.per_axis("stride", stride, rank),
        dilation=arguments.per_axis("dilation", dilation, rank),
        groups=arguments.integer("groups", groups, at_least=1),
    )
    pairs = arguments.checked_padding(
        x, w, (lhs, rhs), padding, ("x", "w", "groups"), lhs_dilation=(1,) * rank, **window
    )
    return int8_primitive.canonical_conv(
        **window, padding=pairs, in_spatial=x.shape[1:-1], window=w.shape[:-2]
    )
