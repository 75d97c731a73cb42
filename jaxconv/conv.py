"""Convolution with this library's kernels: ``conv`` and ``conv_general_dilated``."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jaxconv._src import compat, primitives
from jaxconv._src.lowering import XLA, families
from jaxconv._src.spec import ConvSpec, Op

Algorithm = str | Mapping[Literal["fprop", "dgrad", "wgrad"], str]
Padding = str | int | Sequence[int | tuple[int, int]]

# Channel-last formats pair with filters (*spatial, C / groups, K), channel-first formats with
# (K, C / groups, *spatial), as TensorFlow and PyTorch do.
_FORMATS = {
    "NWC": ("NWC", "WIO", "NWC"),
    "NHWC": ("NHWC", "HWIO", "NHWC"),
    "NDHWC": ("NDHWC", "DHWIO", "NDHWC"),
    "NCW": ("NCW", "OIW", "NCW"),
    "NCHW": ("NCHW", "OIHW", "NCHW"),
    "NCDHW": ("NCDHW", "OIDHW", "NCDHW"),
}


def conv(
    x: ArrayLike,
    w: ArrayLike,
    *,
    stride: int | Sequence[int] = 1,
    padding: Padding = "SAME",
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    data_format: str | None = None,
    precision: Any = None,
    algorithm: Algorithm = "auto",
    preferred_element_type: DTypeLike | None = None,
) -> jax.Array:
    """Convolves a batch of 1-D, 2-D or 3-D signals with a bank of filters.

    With i = p * stride + r * dilation - pad_lo on every spatial axis,

        y[n, p, k] = sum over r and c of x[n, i, c] * w[r, c, k]

    (cross-correlation, as everywhere in deep learning; c runs over the channels of k's group).
    Works inside jit, grad, jvp, vmap, scan and shard_map, and differentiates to any order.

    Args:
        x: input, (N, *spatial, C) or, in channel-first formats, (N, C, *spatial).
        w: filters, (*window, C / groups, K) or, in channel-first formats,
            (K, C / groups, *window). Same dtype as x.
        stride: step of the window, one number or one per spatial axis.
        padding: "SAME", "SAME_LOWER", "VALID", one number for all sides, or per spatial axis a
            number or a pair (low, high). Negative padding crops.
        dilation: step between the taps of a filter, one number or one per spatial axis.
        groups: number of independent slices of the channels; divides C and K. ``groups=C`` is a
            depthwise convolution.
        data_format: "NWC", "NHWC" or "NDHWC" (the default, by the rank of x), or "NCW", "NCHW",
            "NCDHW".
        precision: least accuracy for float32 operands, in any form that ``jax.lax`` takes.
        algorithm: "auto" (selection by predicted cost), a kernel family ("igemm_simt", "onednn"),
            an instance name, "xla" for XLA's own convolution, or a mapping with such an entry
            for some of the directions "fprop", "dgrad" and "wgrad".
        preferred_element_type: dtype of the result; by default that of the operands. int8 operands
            accumulate exactly into int32.

    Returns:
        (N, *out_spatial, K), or (N, K, *out_spatial) in channel-first formats.

    Raises:
        TypeError: operand dtypes differ, or cannot give ``preferred_element_type``.
        ValueError: ranks, channels, groups, window parameters or format do not fit, or the
            demanded algorithm cannot serve the problem (the message says why, and which can).
    """
    x, w = _operands("x", x, "w", w)
    rank = x.ndim - 2
    if data_format is None:
        if not 1 <= rank <= 3:
            raise ValueError(f"x: expected 3 to 5 dimensions, got shape {x.shape}")
        data_format = ("NWC", "NHWC", "NDHWC")[rank - 1]
    if data_format not in _FORMATS:
        raise ValueError(f"data_format: expected one of {', '.join(_FORMATS)}, got {data_format!r}")
    if x.ndim != len(data_format):
        raise ValueError(
            f"x: expected {len(data_format)} dimensions, data_format is {data_format}; got shape "
            f"{x.shape}"
        )
    if w.ndim != x.ndim:
        raise ValueError(f"w: expected {x.ndim} dimensions as x has, got shape {w.shape}")
    return _convolve(
        x,
        w,
        numbers=lax.conv_dimension_numbers(x.shape, w.shape, _FORMATS[data_format]),
        stride=_per_axis("stride", stride, rank),
        padding=padding,
        lhs_dilation=(1,) * rank,
        dilation=_per_axis("dilation", dilation, rank),
        groups=groups,
        precision=precision,
        algorithm=algorithm,
        preferred_element_type=preferred_element_type,
        names=("x", "w", "groups"),
    )


def conv_general_dilated(
    lhs: ArrayLike,
    rhs: ArrayLike,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: Any = None,
    *,
    algorithm: Algorithm = "auto",
) -> jax.Array:
    """``jax.lax.conv_general_dilated`` on this library's kernels, with the same parameters.

    Args:
        lhs: input of n + 2 dimensions, in the order of ``dimension_numbers``.
        rhs: filters of n + 2 dimensions; same dtype as lhs.
        window_strides: n strides.
        padding: "SAME", "SAME_LOWER", "VALID" or n pairs (low, high); negative padding crops.
        lhs_dilation: n dilations of the input (transposed convolution), default 1.
        rhs_dilation: n dilations of the filter, default 1.
        dimension_numbers: as in ``jax.lax``: None, three strings or ``ConvDimensionNumbers``.
        feature_group_count: groups of channels.
        batch_group_count: groups of the batch; each convolves with its own slice of the output
            channels.
        precision: least accuracy for float32 operands, in any form that ``jax.lax`` takes.
        preferred_element_type: dtype of the result; by default that of the operands.
        out_sharding: must be None.
        algorithm: as in ``conv``.

    Returns:
        The output, in the order of ``dimension_numbers``.

    Raises:
        TypeError: operand dtypes differ, or cannot give ``preferred_element_type``.
        ValueError: shapes, groups or window parameters do not fit.
    """
    lhs, rhs = _operands("lhs", lhs, "rhs", rhs)
    if lhs.ndim != rhs.ndim:
        raise ValueError(f"rhs: expected {lhs.ndim} dimensions as lhs has, got shape {rhs.shape}")
    if lhs.ndim < 2:
        raise ValueError(f"lhs: expected at least 2 dimensions, got shape {lhs.shape}")
    if out_sharding is not None:
        raise ValueError(f"out_sharding: only None is supported, got {out_sharding!r}")
    rank = lhs.ndim - 2
    try:
        numbers = lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    except TypeError as error:
        raise ValueError(f"dimension_numbers: {error}") from error
    arguments = dict(
        numbers=numbers,
        stride=_per_axis("window_strides", window_strides, rank),
        padding=padding,
        lhs_dilation=_per_axis("lhs_dilation", lhs_dilation or 1, rank),
        dilation=_per_axis("rhs_dilation", rhs_dilation or 1, rank),
        groups=feature_group_count,
        precision=precision,
        algorithm=algorithm,
        preferred_element_type=preferred_element_type,
        names=("lhs", "rhs", "feature_group_count"),
    )
    if batch_group_count == 1:
        return _convolve(lhs, rhs, **arguments)
    return _batch_grouped(lhs, rhs, batch_group_count, **arguments)


def _batch_grouped(lhs, rhs, count: int, *, numbers, **arguments) -> jax.Array:
    """Batch groups are independent convolutions: slice g of the batch with filter slice g."""
    batch, features, out_features = numbers.lhs_spec[0], numbers.rhs_spec[0], numbers.out_spec[1]
    if count < 1 or lhs.shape[batch] % count or rhs.shape[features] % count:
        raise ValueError(
            f"batch_group_count: {count} does not divide the batch {lhs.shape[batch]} of lhs and "
            f"the {rhs.shape[features]} output channels of rhs"
        )
    if arguments["groups"] != 1:
        raise ValueError(
            f"batch_group_count: {count} together with feature_group_count "
            f"{arguments['groups']}; at most one may exceed 1"
        )

    def split(a, axis):
        return a.reshape(*a.shape[:axis], count, a.shape[axis] // count, *a.shape[axis + 1 :])

    def one(a, b):
        return _convolve(a, b, numbers=numbers, **arguments)

    y = jax.vmap(one, in_axes=(batch, features), out_axes=out_features)(
        split(lhs, batch), split(rhs, features)
    )
    shape = list(y.shape)
    shape[out_features : out_features + 2] = [shape[out_features] * shape[out_features + 1]]
    return y.reshape(shape)


def _convolve(
    x,
    w,
    *,
    numbers: lax.ConvDimensionNumbers,
    stride: tuple[int, ...],
    padding: Padding,
    lhs_dilation: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
    precision: Any,
    algorithm: Algorithm,
    preferred_element_type: DTypeLike | None,
    names: tuple[str, str, str],
) -> jax.Array:
    """Checks what every entry point has in common and binds fprop."""
    x_name, w_name, groups_name = names
    lhs_spec, rhs_spec, out_spec = numbers
    in_spatial = tuple(x.shape[a] for a in lhs_spec[2:])
    filter_spatial = tuple(w.shape[a] for a in rhs_spec[2:])
    groups = _integer(groups_name, groups, at_least=1)
    c, c_per_group, k = x.shape[lhs_spec[1]], w.shape[rhs_spec[1]], w.shape[rhs_spec[0]]
    if c % groups or k % groups:
        raise ValueError(
            f"{groups_name}: {groups} does not divide the {c} input channels of {x_name} "
            f"{x.shape} and the {k} output channels of {w_name} {w.shape}"
        )
    if c_per_group != c // groups:
        raise ValueError(
            f"{w_name}: expected {c // groups} input channels per group ({x_name} has {c}, "
            f"{groups_name} is {groups}), got {c_per_group} in shape {w.shape}"
        )
    for name, values in (
        ("stride", stride),
        ("lhs dilation", lhs_dilation),
        ("dilation", dilation),
    ):
        if any(v < 1 for v in values):
            raise ValueError(f"{name}: expected at least 1 on every axis, got {values}")
    pairs = _padding(padding, in_spatial, filter_spatial, stride, dilation)
    for extent, (lo, hi) in zip(in_spatial, pairs, strict=True):
        if min(lo, 0) + min(hi, 0) + extent < 0:
            raise ValueError(f"padding: {(lo, hi)} crops more than the extent {extent} of {x_name}")
    out_dtype = _result_dtype(x.dtype, preferred_element_type)
    spec = ConvSpec(
        stride=stride,
        padding=pairs,
        lhs_dilation=lhs_dilation,
        dilation=dilation,
        groups=groups,
        in_spatial=in_spatial,
        filter_spatial=filter_spatial,
        x_axes=(lhs_spec[0], *lhs_spec[2:], lhs_spec[1]),
        w_axes=(*rhs_spec[2:], rhs_spec[1], rhs_spec[0]),
        y_axes=(out_spec[0], *out_spec[2:], out_spec[1]),
        precision=_precision(precision),
        algorithm=_algorithm(algorithm),
    )
    return primitives.bind(Op.FPROP, x, w, spec, out_dtype)


def _operands(x_name: str, x: ArrayLike, w_name: str, w: ArrayLike) -> tuple[jax.Array, jax.Array]:
    x, w = jnp.asarray(x), jnp.asarray(w)
    if x.dtype != w.dtype:
        raise TypeError(
            f"{w_name}: expected the dtype of {x_name}, {x.dtype.name}, got {w.dtype.name}"
        )
    if x.dtype == bool:
        raise TypeError(f"{x_name}: expected a numeric dtype, got bool")
    return x, w


def _integer(name: str, value: Any, at_least: int | None = None) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an integer, got {value!r}") from None
    if at_least is not None and number < at_least:
        raise ValueError(f"{name}: expected at least {at_least}, got {number}")
    return number


def _per_axis(name: str, value: int | Sequence[int], rank: int) -> tuple[int, ...]:
    if isinstance(value, (str, bytes)):
        raise TypeError(f"{name}: expected integers, got {value!r}")
    if not isinstance(value, Sequence) and np.ndim(value) == 0:
        return (_integer(name, value),) * rank
    values = tuple(_integer(name, v) for v in value)
    if len(values) != rank:
        raise ValueError(f"{name}: expected one number or {rank}, got {values}")
    return values


def _padding(
    padding: Padding,
    in_spatial: tuple[int, ...],
    filter_spatial: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
) -> tuple[tuple[int, int], ...]:
    """Every form of padding as pairs (low, high), one per spatial axis."""
    rank = len(in_spatial)
    if isinstance(padding, str):
        name = padding.upper()
        if name == "VALID":
            return ((0, 0),) * rank
        if name not in ("SAME", "SAME_LOWER"):
            raise ValueError(
                "padding: expected 'SAME', 'SAME_LOWER', 'VALID', a number or pairs, "
                f"got {padding!r}"
            )
        pairs = []
        for i, r, s, d in zip(in_spatial, filter_spatial, stride, dilation, strict=True):
            # ceil(i / s) outputs; an odd rest goes to the high side, for SAME_LOWER to the low one
            reach = (r - 1) * d + 1 if r else 0
            total = max(0, (-(-i // s) - 1) * s + reach - i)
            less, more = total // 2, total - total // 2
            pairs.append((less, more) if name == "SAME" else (more, less))
        return tuple(pairs)
    if not isinstance(padding, Sequence) and np.ndim(padding) == 0:
        padding = (_integer("padding", padding),) * rank
    entries = list(padding)
    if len(entries) != rank:
        raise ValueError(f"padding: expected {rank} entries, one per axis, got {padding!r}")
    pairs = []
    for entry in entries:
        if np.ndim(entry) == 0:
            entry = (entry, entry)
        if len(entry) != 2:
            raise ValueError(f"padding: expected a pair (low, high), got {entry!r}")
        pairs.append((_integer("padding", entry[0]), _integer("padding", entry[1])))
    return tuple(pairs)


def _result_dtype(operand: np.dtype, preferred: DTypeLike | None) -> np.dtype:
    """The dtype of the result; it may widen the operands', not change their kind."""
    if preferred is None:
        return np.dtype(operand)
    result = jax.dtypes.canonicalize_dtype(preferred)
    same_kind = any(
        jnp.issubdtype(operand, kind) and jnp.issubdtype(result, kind)
        for kind in (jnp.floating, jnp.complexfloating, jnp.signedinteger, jnp.unsignedinteger)
    )
    if not same_kind or result.itemsize < np.dtype(operand).itemsize:
        raise TypeError(
            f"preferred_element_type: expected a dtype of the kind of {operand.name} and at least "
            f"as wide, got {result.name}"
        )
    return result


def _precision(precision: Any) -> str:
    """The higher of the two operands' precisions: there is one kernel for both."""
    pair = compat.canonicalize_precision(precision)
    if pair is None:
        return "default"
    if not isinstance(pair, tuple) or not all(isinstance(p, lax.Precision) for p in pair):
        raise ValueError(f"precision: expected lax.Precision or its names, got {precision!r}")
    return max(pair, key=lambda level: level.value).name.lower()


def _algorithm(algorithm: Algorithm) -> tuple[str, str, str]:
    """The demand for each direction, its names checked against this build."""
    directions = [op.value for op in Op]
    if isinstance(algorithm, str):
        chosen = dict.fromkeys(directions, algorithm)
    elif isinstance(algorithm, Mapping):
        unknown = set(algorithm) - set(directions)
        if unknown:
            raise ValueError(
                f"algorithm: expected the keys {', '.join(directions)}, got {sorted(unknown)}"
            )
        chosen = {**dict.fromkeys(directions, "auto"), **algorithm}
    else:
        raise TypeError(f"algorithm: expected a string or a mapping, got {algorithm!r}")
    for name in chosen.values():
        if name in ("auto", XLA):
            continue
        known = {family for names in families().values() for family in names}
        if not any(family == name or f"_{family}_" in name for family in known):
            raise ValueError(
                f"algorithm: {name!r} is not in this build; expected 'auto', 'xla', "
                f"{', '.join(sorted(known)) or '(no kernels built)'} or an instance name"
            )
    return tuple(chosen[d] for d in directions)
