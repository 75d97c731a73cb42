"""``jaxconv.int8.conv``: checks and pads its arguments and converts them for the primitive."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jaxconv._src import compat
from jaxconv._src.functions import arguments
from jaxconv._src.functions.arguments import Padding
from jaxconv._src.int8 import int8_layout
from jaxconv._src.int8.int8_layout import FEW, OUT_DTYPES, Packed, PackedFilter
from jaxconv._src.int8.int8_primitive import Int8Spec, bind, canonical_conv
from jaxconv._src.problem import epilogue, layouts, operand
from jaxconv._src.problem.epilogue import Activation
from jaxconv._src.problem.spelling import knows, renamed

_ACTIVATIONS = (None, "relu", "relu6")


@knows(
    **arguments.OF_WINDOW,
    **arguments.OF_EPILOGUE,
    **dict.fromkeys(
        ("groups", "feature_group_count"),
        "an array w has C / groups input channels, and jaxconv.int8.pack_filter takes groups",
    ),
    preferred_element_type="out_dtype",
    dtype="out_dtype",
    x_zero_point="zero_point",
)
def conv(
    x: Packed | ArrayLike,
    w: PackedFilter | ArrayLike,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    residual: Packed | ArrayLike | None = None,
    *,
    residual_scale: ArrayLike = 1.0,
    stride: int | Sequence[int] = 1,
    padding: Padding = "SAME",
    dilation: int | Sequence[int] = 1,
    activation: Activation = None,
    out_dtype: DTypeLike | None = None,
    data_format: str | None = None,
    zero_point: int = 0,
    out_zero_point: int = 0,
    algorithm: str = "auto",
    layout: str | None = None,
) -> Packed | jax.Array:
    """Convolves 8-bit images with int8 filters, exactly, and requantises the sums in one kernel.

    With the sums acc[n, p, k] = sum over r and c of (x[n, i, c] - zero_point) * w[r, c, k] in
    int32,

        t = fma(float32(acc), scale[k], bias[k])
        t = fma(residual_scale, float32(residual[n, p, k]), t)
        t = activation(t)

    in float32, each line rounded once; absent terms are omitted. An int8 or uint8 result is t
    rounded to the nearest integer, ties to even, plus ``out_zero_point``, saturated (NaN gives 0);
    int32 is the same without a zero point; a float result is t rounded to its dtype. The bits are
    the same on every device. Without a ``scale`` the result is the sums in ``out_dtype``, which is
    then required: as int32, rounded to a float dtype, or their low 8 bits as in ``jax.lax``.

    For y = s_y * y_q with real values x = s_x * x_q, w = s_w * w_q, z = s_z * z_q: scale is s_x *
    s_w / s_y, bias is b / s_y, residual_scale is s_z / s_y. Negative scales, from a folded batch
    normalisation, are allowed.

    An int32 sum cannot overflow up to C / groups * R * S = 131,071 terms with int8 images and
    65,793 with uint8; beyond, it wraps around. There is no derivative: see ``fake_quant_conv``.

    Source: MegEngine's int8 tensor core convolution (NCHW32, scale, bias, residual, activation and
    rounding in the epilogue), with a scale for each channel.

    Args:
        x: int8 or uint8 images: a ``Packed``, or an array (N, *spatial, C) with one to three
            spatial axes.
        w: int8 filters: a ``PackedFilter``, or an array (*window, C / groups, K), which every call
            packs again; groups are then C divided by its input channels.
        scale: float32 scalar, (K,), or (N, K) for one scale per image.
        bias: float32 (K,), in units of the result.
        residual: added before the activation; like the result a ``Packed`` or an array, with its
            shape and dtype.
        residual_scale: float32 scalar.
        stride: step of the window, one number or one for each spatial axis.
        padding: as in ``jaxconv.conv``; pads with ``zero_point``.
        dilation: step between the taps of a filter, one number or one for each spatial axis.
        activation: None, "relu" or "relu6", as in ``jaxconv.conv``.
        out_dtype: int8, uint8, int32, float32, bfloat16 or float16; with a ``scale`` int8 by
            default.
        data_format: the result's format, in any case: "channels_last" for an array ("NWC", "NHWC"
            or "NDHWC", by its axes), or "NCHW32" for a ``Packed``; by default that of x. An image
            with at most 4 channels needs no conversion for either. "channels_first" ("NCW", "NCHW"
            or "NCDHW") means that the arrays x, residual and result have the channels before the
            positions; XLA transposes them, and cancels opposite transposes between layers.
        zero_point: the value of x that represents 0.
        out_zero_point: the value of an int8 or uint8 result that represents 0.
        algorithm: "auto", "native", a kernel family, an instance, or "xla", as in ``jaxconv.conv``;
            or "winograd_f2x2" or "winograd_f4x4" for int8 images, 3x3 filters, stride 1 and one
            group. Winograd is not exact: docs/winograd.md defines its sums and states their error.
        layout: the deprecated name of ``data_format``; it warns.

    Returns:
        (N, *out_spatial, K), channels first (N, K, *out_spatial), or a ``Packed`` of K channels.

    Raises:
        TypeError: an operand has the wrong dtype, or is packed where an array is required or the
            reverse.
        ValueError: shapes, channels, formats or window parameters do not fit; a scale, bias or
            residual_scale has the wrong shape, or is known and not finite; there are other terms,
            or no ``out_dtype``, without a scale; or the demanded algorithm cannot compute the
            problem.
    """
    data_format = renamed("layout", layouts.from_layout(layout), "data_format", data_format)
    if data_format is not None:
        rank = 2 if isinstance(x, Packed) else np.ndim(x) - 2
        data_format = layouts.int8_format(data_format, min(max(rank, 1), 3))
    channels_first = data_format == "NCHW"
    if channels_first:
        x = _channels_last("x", x)
        residual = residual if residual is None else _channels_last("residual", residual)
        data_format = "NHWC"
    images = _Images(x, w, data_format)
    filters = images.filters
    n, k, out_layout = images.n, filters.features, images.out_layout
    rank = len(images.spatial)
    unsaid = out_dtype is None
    out_dtype = _out_dtype(jnp.int8 if out_dtype is None else out_dtype)
    zero_point = _zero_point("zero_point", zero_point, images.data.dtype)
    out_zero_point = _out_zero_point(out_zero_point, out_dtype)
    activation, _ = epilogue.parse_activation(activation)
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation: expected None, 'relu' or 'relu6', got {activation!r}")
    if scale is None:
        for name, present in (
            ("bias", bias is not None),
            ("residual", residual is not None),
            ("activation", activation is not None),
            ("out_zero_point", out_zero_point != 0),
        ):
            if present:
                raise ValueError(f"{name}: needs a scale; give scale=1.0 for sums as they are")
        if unsaid:
            raise ValueError(
                "scale: int8 does not hold the sums. Give the scale that makes them int8, "
                "out_dtype=jnp.int32 for the sums as they are, or out_dtype=jnp.int8 for their low "
                "8 bits, as jax.lax gives them"
            )
    window = dict(
        stride=arguments.per_axis("stride", stride, rank),
        dilation=arguments.per_axis("dilation", dilation, rank),
    )
    for name, values in window.items():
        if any(v < 1 for v in values):
            raise ValueError(f"{name}: expected at least 1 on every axis, got {values}")
    first = 2 if images.kernel_layout == "nchw32" else 1
    spatial = range(first, first + rank)
    data, padding = arguments.continued(
        images.data, spatial, padding, filters.window, window["dilation"]
    )
    in_spatial = tuple(data.shape[axis] for axis in spatial)
    pairs = arguments.padding_pairs(
        padding, in_spatial, filters.window, window["stride"], window["dilation"]
    )
    for extent, (lo, hi) in zip(in_spatial, pairs, strict=True):
        if extent + lo + hi < 0:
            raise ValueError(f"padding: {(lo, hi)} crops more than {extent}, all of x")
    if zero_point and any(pair != (0, 0) for pair in pairs):
        data, in_spatial = _padded(data, images.kernel_layout, pairs, zero_point)
        pairs = ((0, 0),) * rank
    spec = Int8Spec(
        conv=canonical_conv(
            **window,
            padding=pairs,
            groups=filters.groups_stored,
            in_spatial=in_spatial,
            window=filters.window,
            algorithm=arguments.algorithms(algorithm)[0],
        ),
        layout=images.kernel_layout,
        out_dtype=out_dtype,
        activation=activation,
        zero_point=out_zero_point,
        offset=scale is not None and zero_point != 0,
        bias=bias is not None,
        residual=residual is not None,
        scale="" if scale is None else "image_scale" if np.ndim(scale) == 2 else "scale",
    )
    stored = filters.features_stored
    terms = {}
    if zero_point:
        of_filters = jnp.sum(filters.data, axis=1, dtype=np.int32)
        terms["offset"] = np.int32(-zero_point) * of_filters
    if scale is not None:
        scale = _float32("scale", scale, ((), (k,), (n, k)))
        scale = jnp.broadcast_to(scale, (k,)) if scale.ndim == 0 else scale
        terms["scale"] = int8_layout.pad_axis(scale, scale.ndim - 1, stored)
    if bias is not None:
        terms["bias"] = int8_layout.pad_axis(_float32("bias", bias, ((k,),)), 0, stored)
    if residual is not None:
        shape = (n, *spec.conv.out_spatial, k)
        terms["residual"] = _residual(residual, shape, out_dtype, out_layout, spec.layout)
        terms["residual_scale"] = _float32("residual_scale", residual_scale, ((),)).reshape(1)
    if zero_point and scale is None:
        sums = bind(_sums_of(spec), data, filters.data)
        blocked = spec.layout == "nchw32"
        offset = terms["offset"]
        offset = offset.reshape(stored // 32, 1, 1, 32) if blocked else offset
        y = _of_sums(sums + offset, out_dtype)
    else:
        y = bind(spec, data, filters.data, **terms)
    result = _result(y, spec.layout, out_layout, k)
    if not channels_first or isinstance(result, Packed):
        return result
    return jnp.moveaxis(result, -1, 1)


def _channels_last(name: str, value) -> jax.Array:
    """An array (N, C, *spatial) as (N, *spatial, C)."""
    if isinstance(value, Packed):
        raise TypeError(
            f"{name}: expected an array (N, C, *spatial) for channels_first, got Packed"
        )
    array = int8_layout.array_of(name, value)
    return jnp.moveaxis(array, 1, -1) if array.ndim > 2 else array


class _Images:
    """Checked operands: x in the layout of the kernel, w packed for it.

    Attributes:
        data: int8 or uint8, in ``kernel_layout``, with as many channels as ``filters`` stores.
        n, spatial: the number of images and their extents.
        filters: a ``PackedFilter``.
        kernel_layout: "nhwc" or "nchw32".
        out_layout: "NHWC" or "NCHW32", of the result.
    """

    def __init__(self, x, w, layout: str | None):
        packed = isinstance(x, Packed)
        self.out_layout = layout or ("NCHW32" if packed else "NHWC")
        if packed:
            x = int8_layout.checked_packed("x", x, np.int8, np.uint8)
            self.data, channels = x.data, x.channels
            self.n, _, *spatial, _ = x.data.shape
        else:
            self.data = int8_layout.array_of("x", x)
            if not 3 <= self.data.ndim <= 5:
                raise ValueError(
                    f"x: expected 3 to 5 dimensions (N, *spatial, C), got shape {self.data.shape}"
                )
            self.n, *spatial, channels = self.data.shape
        self.spatial = tuple(spatial)
        self.filters = _filters(w, packed, self.spatial, channels)
        few = self.filters.channels_stored == FEW
        blocked = packed or (few and self.out_layout == "NCHW32")
        self.kernel_layout = "nchw32" if blocked else "nhwc"
        if packed and few:
            self.data = lax.slice_in_dim(self.data, 0, FEW, axis=4)
        elif not packed:
            stored = self.filters.channels_stored * self.filters.groups_stored
            self.data = int8_layout.pad_axis(self.data, len(spatial) + 1, stored)
            if blocked:
                self.data = int8_layout.to_nchw32(self.data)


def _filters(w, packed: bool, spatial: tuple[int, ...], channels: int) -> PackedFilter:
    """w as a ``PackedFilter`` that fits images with these extents and channels."""
    rank, layout = len(spatial), "NCHW32" if packed else "channels_last"
    if isinstance(w, PackedFilter):
        w = int8_layout.checked_filter("w", w)
        if (w.layout == "NCHW32") != packed and w.channels_stored != FEW:
            hint = (
                "pack it with data_format='NCHW32'"
                if packed
                else "pack x with jaxconv.int8.pack, or w with data_format='NHWC'"
            )
            raise ValueError(
                f"w: packed for {w.layout} images, x is {'a Packed' if packed else 'an array'}; "
                f"{hint}"
            )
    else:
        w = int8_layout.array_of("w", w, np.int8)
        if w.ndim != rank + 2:
            raise ValueError(
                f"w: expected {rank + 2} dimensions, (*window, C / groups, K), got shape {w.shape}"
            )
        groups = max(1, channels // max(1, w.shape[-2]))
        if w.shape[-2] * groups != channels:
            raise ValueError(
                f"w: expected input channels that divide the {channels} of x, got {w.shape[-2]} in "
                f"shape {w.shape}"
            )
        letters = {1: "W", 2: "HW", 3: "DHW"}[rank]
        w = int8_layout.pack_filter(
            w, groups=groups, data_format=layout, filter_format=f"{letters}IO"
        )
    if len(w.window) != rank:
        raise ValueError(f"w: packed for windows {w.window}, x has {rank} spatial axes {spatial}")
    if w.channels * w.groups != channels:
        raise ValueError(
            f"w: packed for {w.channels * w.groups} input channels in {w.groups} groups, x has "
            f"{channels}"
        )
    return w


def _out_dtype(dtype: DTypeLike) -> np.dtype:
    try:
        found = np.dtype(dtype)
    except TypeError as error:
        raise TypeError(f"out_dtype: {error}") from error
    if found not in OUT_DTYPES:
        names = ", ".join(d.name for d in OUT_DTYPES)
        raise TypeError(f"out_dtype: expected one of {names}, got {found.name}")
    return found


def _zero_point(name: str, value: int, dtype: np.dtype) -> int:
    value = arguments.integer(name, value)
    limits = jnp.iinfo(dtype)
    if not limits.min <= value <= limits.max:
        raise ValueError(
            f"{name}: expected {limits.min} to {limits.max}, a value of {dtype.name}, got {value}"
        )
    return value


def _out_zero_point(value: int, dtype: np.dtype) -> int:
    if dtype.itemsize == 1:
        return _zero_point("out_zero_point", value, dtype)
    if arguments.integer("out_zero_point", value):
        raise ValueError(
            f"out_zero_point: expected 0 for a result of {dtype.name}, got {value}; only int8 and "
            "uint8 have one"
        )
    return 0


def _float32(name: str, value: ArrayLike, shapes: Sequence[tuple[int, ...]]) -> jax.Array:
    """A term of the epilogue, checked to have one of these shapes and, if known, to be finite."""
    array = operand.array(name, value)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise TypeError(f"{name}: expected float32, got {array.dtype.name}")
    if not compat.is_traced(value) and not np.all(np.isfinite(np.asarray(value))):
        raise ValueError(f"{name}: expected finite numbers, got {_first_not_finite(value)}")
    value = array
    if value.shape not in shapes:
        expected = " or ".join(str(shape) if shape else "a scalar" for shape in shapes)
        raise ValueError(f"{name}: expected {expected}, got shape {value.shape}")
    return value.astype(np.float32)


def _first_not_finite(value: ArrayLike) -> float:
    flat = np.asarray(value).reshape(-1).astype(np.float64)
    return float(flat[~np.isfinite(flat)][0])


def _padded(data: jax.Array, layout: str, pairs, value: int) -> tuple[jax.Array, tuple[int, ...]]:
    """Images padded on their spatial axes, and the resulting extents."""
    first = 2 if layout == "nchw32" else 1
    config = [(0, 0, 0)] * data.ndim
    for axis, (lo, hi) in enumerate(pairs):
        config[first + axis] = (lo, hi, 0)
    data = lax.pad(data, jnp.asarray(value, data.dtype), config)
    return data, data.shape[first : first + len(pairs)]


def _residual(residual, shape, dtype: np.dtype, out_layout: str, layout: str) -> jax.Array:
    """The residual with padded channels, in the layout of the kernel."""
    k = shape[-1]
    if out_layout == "NCHW32":
        if not isinstance(residual, Packed):
            raise TypeError(
                f"residual: expected a Packed, as the result is, got {type(residual).__name__}; "
                "jaxconv.int8.pack makes one"
            )
        data = int8_layout.checked_packed("residual", residual, dtype).data
        found = residual.shape
    else:
        data = int8_layout.array_of("residual", residual, dtype)
        found = data.shape
    if found != shape:
        raise ValueError(f"residual: expected shape {shape}, that of the result, got {found}")
    if out_layout == "NCHW32":
        return data if layout == "nchw32" else int8_layout.to_nhwc(data)
    data = int8_layout.pad_axis(data, len(shape) - 1, int8_layout.padded_channels(k))
    return data if layout == "nhwc" else int8_layout.to_nchw32(data)


def _sums_of(spec: Int8Spec) -> Int8Spec:
    return Int8Spec(conv=spec.conv, layout=spec.layout, out_dtype=np.dtype(np.int32))


def _of_sums(sums: jax.Array, dtype: np.dtype) -> jax.Array:
    """The result of int32 sums without a scale."""
    if jnp.issubdtype(dtype, jnp.integer):
        return sums.astype(dtype)
    return sums.astype(np.float32).astype(dtype)


def _result(y: jax.Array, layout: str, out_layout: str, k: int) -> Packed | jax.Array:
    """The kernel's result, its channels cropped or packed."""
    if out_layout == "NCHW32":
        return Packed(y if layout == "nchw32" else int8_layout.to_nchw32(y), k)
    y = int8_layout.to_nhwc(y) if layout == "nchw32" else y
    return int8_layout.crop_axis(y, y.ndim - 1, k)
