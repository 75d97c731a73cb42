"""Convolution with this library's kernels: ``conv``, and what ``jax.lax`` calls its own."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jaxconv._src import canonical, compat, partition
from jaxconv._src.lowering import IM2COL, XLA, families
from jaxconv._src.spec import Op, dilated_extent, output_extent

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
            an instance name, "im2col" for the textbook's windows in a matrix and XLA's matrix
            product, "xla" for XLA's own convolution, or a mapping with such an entry for some of
            the directions "fprop", "dgrad" and "wgrad".
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
        out_sharding: None, or the sharding of the result on a mesh with explicit axes: a
            ``NamedSharding`` or a ``PartitionSpec``.
        algorithm: as in ``conv``.

    Returns:
        The output, in the order of ``dimension_numbers``.

    Raises:
        TypeError: operand dtypes differ, or cannot give ``preferred_element_type``.
        ValueError: shapes, groups or window parameters do not fit.
    """
    lhs, rhs, numbers = _lax_operands(lhs, rhs, dimension_numbers)
    rank = lhs.ndim - 2
    lhs_dilation = _per_axis("lhs_dilation", 1 if lhs_dilation is None else lhs_dilation, rank)
    if isinstance(padding, str) and any(d > 1 for d in lhs_dilation):
        raise ValueError(
            f"padding: {padding!r} has no meaning where lhs_dilation is {lhs_dilation}; give pairs "
            "(low, high), or use conv_transpose"
        )
    y = _convolve(
        lhs,
        rhs,
        numbers=numbers,
        stride=_per_axis("window_strides", window_strides, rank),
        padding=padding,
        lhs_dilation=lhs_dilation,
        dilation=_per_axis("rhs_dilation", 1 if rhs_dilation is None else rhs_dilation, rank),
        groups=feature_group_count,
        batch_groups=batch_group_count,
        precision=precision,
        algorithm=algorithm,
        preferred_element_type=preferred_element_type,
        names=("lhs", "rhs", "feature_group_count"),
    )
    return partition.with_out_sharding(y, out_sharding)


def conv_transpose(
    lhs: ArrayLike,
    rhs: ArrayLike,
    strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    transpose_kernel: bool = False,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    use_consistent_padding: bool = False,
    *,
    algorithm: Algorithm = "auto",
) -> jax.Array:
    """``jax.lax.conv_transpose`` on this library's kernels, with the same parameters.

    The transpose of a convolution is its data gradient, and is computed as one: no zeros are
    inserted or multiplied.

    Args:
        lhs: input of n + 2 dimensions.
        rhs: filters of n + 2 dimensions; same dtype as lhs.
        strides: n fractional strides: every axis grows by about this factor.
        padding: "SAME" or "VALID", as of the convolution that this one transposes, or n pairs
            (low, high) that pad the dilated input; with ``use_consistent_padding``, the pairs too
            are the other convolution's, as in PyTorch.
        rhs_dilation: n dilations of the filter, default 1.
        dimension_numbers: as in ``conv_general_dilated``, by default channels last: ("NHWC",
            "HWIO", "NHWC") for two spatial axes.
        transpose_kernel: reverses the window and exchanges the filter's channel axes, which makes
            the result the data gradient of a convolution with this filter, as in Keras.
        precision, preferred_element_type, algorithm: as in ``conv_general_dilated``; the algorithm
            is that of the direction "dgrad".
        use_consistent_padding: see ``padding``.

    Returns:
        The output, in the order of ``dimension_numbers``.

    Raises:
        TypeError, ValueError: as ``conv_general_dilated``.
    """
    if dimension_numbers is None:
        channels_last = {2: "", 3: "H", 4: "HW", 5: "HWD"}
        if np.ndim(lhs) not in channels_last:
            raise ValueError(f"dimension_numbers: no default for {np.ndim(lhs)} dimensions")
        spatial = channels_last[np.ndim(lhs)]
        dimension_numbers = (f"N{spatial}C", f"{spatial}IO", f"N{spatial}C")
    lhs, rhs, numbers = _lax_operands(lhs, rhs, dimension_numbers)
    rank = lhs.ndim - 2
    strides = _per_axis("strides", strides, rank)
    dilation = _per_axis("rhs_dilation", 1 if rhs_dilation is None else rhs_dilation, rank)
    reach = [
        (rhs.shape[a] - 1) * d + 1 for a, d in zip(numbers.rhs_spec[2:], dilation, strict=True)
    ]
    if padding in ("SAME", "VALID"):
        pads = []
        for r, s in zip(reach, strides, strict=True):
            if padding == "VALID":
                total, low = r + s - 2 + max(r - s, 0), r - 1
            else:
                total = r + s - 2
                low = r - 1 if s > r - 1 else -(-total // 2)
            pads.append((low, total - low))
    elif use_consistent_padding:
        pairs = _padding(padding, (0,) * rank, (0,) * rank, strides, dilation)
        pads = [(r - 1 - lo, r - 1 - hi) for r, (lo, hi) in zip(reach, pairs, strict=True)]
    else:
        pads = padding
    if transpose_kernel:
        out_features, in_features, *window = numbers.rhs_spec
        numbers = numbers._replace(rhs_spec=(in_features, out_features, *window))
    return _convolve(
        lhs,
        rhs,
        numbers=numbers,
        stride=(1,) * rank,
        padding=pads,
        lhs_dilation=strides,
        dilation=dilation,
        groups=1,
        transposed=True,
        filter_reversed=transpose_kernel,
        precision=precision,
        algorithm=algorithm,
        preferred_element_type=preferred_element_type,
        names=("lhs", "rhs", "groups"),
    )


def _lax_operands(lhs: ArrayLike, rhs: ArrayLike, dimension_numbers: Any):
    """Checks what lax's own entry points take: operands of any axis order, 0-D and up."""
    lhs, rhs = _operands("lhs", lhs, "rhs", rhs)
    if lhs.ndim != rhs.ndim:
        raise ValueError(f"rhs: expected {lhs.ndim} dimensions as lhs has, got shape {rhs.shape}")
    if lhs.ndim < 2:
        raise ValueError(f"lhs: expected at least 2 dimensions, got shape {lhs.shape}")
    try:
        return lhs, rhs, lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    except TypeError as error:
        raise ValueError(f"dimension_numbers: {error}") from error


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
    batch_groups: int = 1,
    transposed: bool = False,
    filter_reversed: bool = False,
) -> jax.Array:
    """Checks what every entry point has in common and binds fprop, or dgrad.

    ``transposed`` asks for dgrad, which is also what a dilated input is read as. With
    ``filter_reversed``, w is then the filter of the convolution that this one transposes.
    """
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
    n, batch_groups = x.shape[lhs_spec[0]], _integer("batch_group_count", batch_groups, at_least=1)
    if n % batch_groups or k % batch_groups:
        raise ValueError(
            f"batch_group_count: {batch_groups} does not divide the batch {n} of {x_name} and the "
            f"{k} output channels of {w_name}"
        )
    if batch_groups > 1 and groups > 1:
        raise ValueError(
            f"batch_group_count: {batch_groups} together with {groups_name} {groups}; at most one "
            "may exceed 1"
        )
    for name, values in (
        ("stride", stride),
        ("lhs dilation", lhs_dilation),
        ("dilation", dilation),
    ):
        if any(v < 1 for v in values):
            raise ValueError(f"{name}: expected at least 1 on every axis, got {values}")
    pairs = _padding(padding, in_spatial, filter_spatial, stride, dilation)
    for extent, ld, (lo, hi) in zip(in_spatial, lhs_dilation, pairs, strict=True):
        dilated = dilated_extent(extent, ld)
        if dilated + lo + hi < 0:
            raise ValueError(f"padding: {(lo, hi)} crops more than {dilated}, all of {x_name}")
    out_dtype = _result_dtype(x.dtype, preferred_element_type)
    convolution = canonical.LaxConvolution(
        window_strides=stride,
        padding=pairs,
        lhs_dilation=lhs_dilation,
        rhs_dilation=dilation,
        lhs_spec=tuple(lhs_spec),
        rhs_spec=tuple(rhs_spec),
        out_spec=tuple(out_spec),
        feature_group_count=groups,
        batch_group_count=batch_groups,
        precision=canonical.precision_name(precision),
        algorithm=_algorithm(algorithm),
    )
    window = zip(in_spatial, filter_spatial, stride, lhs_dilation, dilation, pairs, strict=True)
    out_spatial = [output_extent(i, r, s, ld, d, lo, hi) for i, r, s, ld, d, (lo, hi) in window]
    out_shape = [0] * x.ndim
    for axis, extent in zip(out_spec, (n // batch_groups, k, *out_spatial), strict=True):
        out_shape[axis] = extent
    transposed |= any(d > 1 for d in lhs_dilation) and all(s == 1 for s in stride)
    if 0 in (*x.shape, *w.shape, *out_shape):
        transposed = False  # dgrad's padding is not defined, and the result is empty or zero
    op = Op.DGRAD if transposed else Op.FPROP
    reading = canonical.read(convolution, op, x.shape, w.shape, out_shape)
    return reading.apply(x, w, out_dtype, filter_reversed=filter_reversed)


def _operands(x_name: str, x: ArrayLike, w_name: str, w: ArrayLike) -> tuple[jax.Array, jax.Array]:
    x, w = jnp.asarray(x), jnp.asarray(w)
    if x.dtype != w.dtype:
        raise TypeError(
            f"{w_name}: expected the dtype of {x_name}, {x.dtype.name}, got {w.dtype.name}"
        )
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
    """The dtype of the result: what lax allows, which is to widen, and integers to floats."""
    if preferred is None:
        return np.dtype(operand)
    result = jax.dtypes.canonicalize_dtype(preferred)
    try:
        compat.validate_preferred_element_type(operand, result)
    except TypeError as error:
        raise TypeError(
            f"preferred_element_type: {result.name} for operands of {operand.name}: {error}"
        ) from error
    return np.dtype(result)


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
        if name in ("auto", XLA, IM2COL):
            continue
        known = {family for names in families().values() for family in names}
        if not any(family == name or f"_{family}_" in name for family in known):
            raise ValueError(
                f"algorithm: {name!r} is not in this build; expected 'auto', 'xla', 'im2col', "
                f"{', '.join(sorted(known)) or '(no kernels built)'} or an instance name"
            )
    return tuple(chosen[d] for d in directions)
