"""The layouts of quantised arrays: NCHW32 activations, and filters packed for the kernels.

NCHW32 stores 32 channels of a pixel side by side: (N, C / 32, H, W, 32). A kernel reads them as two
16-byte vectors, and a tile of output channels is stored as it is computed. Source: MegEngine's
int8 tensor core convolution (NCHW32 with a filter reordered once, before the first call).
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jaxconv._src.problem import layouts, operand
from jaxconv._src.problem.spelling import knows, renamed

# Contiguous channels in NCHW32; a packed filter's row is a multiple of this many bytes.
BLOCK = 32
# An image with at most this many channels is padded to this number; both layouts are then equal.
FEW = 4

_EIGHT_BITS = (np.dtype(np.int8), np.dtype(np.uint8))
# The dtypes of a convolution's result.
OUT_DTYPES: tuple[np.dtype, ...] = (
    *_EIGHT_BITS,
    *(np.dtype(dtype) for dtype in (np.int32, np.float32, jnp.bfloat16, np.float16)),
)


def padded_channels(count: int) -> int:
    """The next multiple of 32."""
    return -(-count // BLOCK) * BLOCK


@functools.partial(jax.tree_util.register_dataclass, data_fields=["data"], meta_fields=["channels"])
@dataclasses.dataclass(frozen=True)
class Packed:
    """A batch of images in NCHW32: a pytree that layers pass on without conversion.

    Attributes:
        data: (N, ceil(C / 32), H, W, 32), int8 or uint8 as a layer's input.
        channels: C. Further channels of ``data`` hold zeros, the ``value`` of ``pack``, or the zero
            point of the layer that wrote them; packed filters are zero there.
    """

    data: jax.Array
    channels: int

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the data."""
        return self.data.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, H, W, C) of the images, for any layout."""
        n, _, h, w, _ = self.data.shape
        return (n, h, w, self.channels)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["data"],
    meta_fields=["window", "channels", "features", "groups", "layout"],
)
@dataclasses.dataclass(frozen=True)
class PackedFilter:
    """An int8 filter in the kernels' order of reduction: a pytree, made by ``pack_filter``.

    Attributes:
        data: int8 (K', L). Row k holds the weights of output channel k in the order (R, S, C') or,
            in NCHW32, (C' / 32, R, S, 32), and zeros up to L, the next multiple of 32. C' and K'
            are ``channels`` and ``features`` rounded up to multiples of 32, but C' is 4 for at most
            4 channels, and 1 for a depthwise filter; additional weights are zero.
        window: extents of the window, such as (R, S).
        channels: input channels of one group.
        features: all output channels.
        groups: groups of channels.
        layout: "NHWC" or "NCHW32", the layout of the activations. With at most 4 input channels
            both orders are equal, and the filter serves both.
    """

    data: jax.Array
    window: tuple[int, ...]
    channels: int
    features: int
    groups: int
    layout: str

    @property
    def depthwise(self) -> bool:
        """Whether it has one filter per channel; then C' is 1, and the channels are padded."""
        return self.groups > 1 and self.channels == 1 and self.groups == self.features

    @property
    def channels_stored(self) -> int:
        """C': input channels of one group, padding included."""
        if self.depthwise:
            return 1
        few = self.groups == 1 and self.channels <= FEW
        return FEW if few else padded_channels(self.channels)

    @property
    def groups_stored(self) -> int:
        """Groups, for a depthwise filter including padding."""
        return self.features_stored if self.depthwise else self.groups

    @property
    def features_stored(self) -> int:
        """K': output channels, padding included."""
        return padded_channels(self.features)


def array_of(name: str, array: ArrayLike, *dtypes: DTypeLike) -> jax.Array:
    """An argument as an array of one of ``dtypes``, by default int8 or uint8.

    Raises:
        TypeError: it has another dtype, or is a ``Packed`` or ``PackedFilter``.
    """
    expected = tuple(np.dtype(dtype) for dtype in dtypes) or _EIGHT_BITS
    names = " or ".join(dtype.name for dtype in expected)
    if isinstance(array, (Packed, PackedFilter)):
        raise TypeError(f"{name}: expected a {names} array, got a {type(array).__name__}")
    array = operand.array(name, array)
    if array.dtype not in expected:
        raise TypeError(f"{name}: expected {names}, got {array.dtype.name}")
    return array


def pad_axis(array: jax.Array, axis: int, extent: int, value: int = 0) -> jax.Array:
    """``array`` with one axis padded at its end to ``extent``."""
    missing = extent - array.shape[axis]
    if not missing:
        return array
    config = [(0, 0, 0)] * array.ndim
    config[axis] = (0, missing, 0)
    return lax.pad(array, jnp.asarray(value, array.dtype), config)


def crop_axis(array: jax.Array, axis: int, extent: int) -> jax.Array:
    """``array`` with one axis cropped to ``extent``."""
    if array.shape[axis] == extent:
        return array
    return lax.slice_in_dim(array, 0, extent, axis=axis)


def to_nchw32(x: jax.Array) -> jax.Array:
    """(N, H, W, C) -> (N, C / 32, H, W, 32); C is a multiple of 32, or 4, one block of 4."""
    n, h, w, c = x.shape
    block = FEW if c == FEW else BLOCK
    return lax.transpose(x.reshape(n, h, w, c // block, block), (0, 3, 1, 2, 4))


def to_nhwc(x: jax.Array) -> jax.Array:
    """(N, C / 32, H, W, 32) -> (N, H, W, C)."""
    n, blocks, h, w, block = x.shape
    return lax.transpose(x, (0, 2, 3, 1, 4)).reshape(n, h, w, blocks * block)


def pack_rows(w: jax.Array, layout: str) -> jax.Array:
    """(K, *window, C / groups) -> (K, L) in the kernels' order of reduction.

    With the layout "nchw32", C / groups is 4 or a multiple of 32.
    """
    k, *window, c = w.shape
    if layout == "nchw32" and c != FEW:
        order = (0, len(window) + 1, *range(1, len(window) + 1), len(window) + 2)
        w = lax.transpose(w.reshape(k, *window, c // BLOCK, BLOCK), order)
    terms = math.prod(window) * c
    return pad_axis(w.reshape(k, terms), 1, padded_channels(terms))


def unpack_rows(rows: jax.Array, window: tuple[int, ...], channels: int, layout: str) -> jax.Array:
    """Undoes ``pack_rows``; ``channels`` are those of one group."""
    k = rows.shape[0]
    rows = crop_axis(rows, 1, math.prod(window) * channels)
    if layout == "nhwc" or channels == FEW:
        return rows.reshape(k, *window, channels)
    w = rows.reshape(k, channels // BLOCK, *window, BLOCK)
    w = lax.transpose(w, (0, *range(2, len(window) + 2), 1, len(window) + 2))
    return w.reshape(k, *window, channels)


def pack(x: ArrayLike, data_format: str = "NHWC", value: int = 0) -> Packed:
    """Packs images into NCHW32, for use once before the first layer.

    Args:
        x: int8 or uint8 images, (N, H, W, C) or (N, C, H, W).
        data_format: "NHWC" or "NCHW".
        value: the content of the channels that pad C to a multiple of 32.

    Returns:
        The images as (N, ceil(C / 32), H, W, 32).

    Raises:
        TypeError: x is not int8 or uint8.
        ValueError: x does not have 4 dimensions, or the format is unknown.
    """
    x = array_of("x", x)
    _check_format(data_format)
    if x.ndim != 4:
        raise ValueError(f"x: expected 4 dimensions, {data_format}; got shape {x.shape}")
    channels = x.shape[data_format.index("C")]
    if channels < 1:
        raise ValueError(f"x: expected at least 1 channel, got shape {x.shape}")
    if not jnp.iinfo(x.dtype).min <= value <= jnp.iinfo(x.dtype).max:
        raise ValueError(f"value: expected one of {x.dtype.name}, got {value}")
    if data_format == "NCHW":
        n, _, h, w = x.shape
        x = pad_axis(x, 1, padded_channels(channels), value)
        data = lax.transpose(x.reshape(n, -1, BLOCK, h, w), (0, 1, 3, 4, 2))
    else:
        data = to_nchw32(pad_axis(x, 3, padded_channels(channels), value))
    return Packed(data, channels)


def unpack(packed: Packed, data_format: str = "NHWC") -> jax.Array:
    """Undoes ``pack``, for use once after the last layer.

    Args:
        packed: images in NCHW32.
        data_format: the result's format, "NHWC" or "NCHW".

    Returns:
        (N, H, W, C) or (N, C, H, W), with the dtype of its data.

    Raises:
        TypeError: the argument is not a ``Packed``.
        ValueError: its data does not have the shape of NCHW32, or the format is unknown.
    """
    checked_packed("packed", packed, *OUT_DTYPES)
    _check_format(data_format)
    if data_format == "NCHW":
        n, blocks, h, w, _ = packed.data.shape
        x = lax.transpose(packed.data, (0, 1, 4, 2, 3)).reshape(n, blocks * BLOCK, h, w)
        return crop_axis(x, 1, packed.channels)
    return crop_axis(to_nhwc(packed.data), 3, packed.channels)


def _check_format(data_format: str) -> None:
    if data_format not in ("NHWC", "NCHW"):
        raise ValueError(f"data_format: expected 'NHWC' or 'NCHW', got {data_format!r}")


def checked_packed(name: str, packed: Packed, *dtypes: DTypeLike) -> Packed:
    """``packed``, checked to have the shape of NCHW32 and one of ``dtypes``.

    Raises:
        TypeError: it is not a ``Packed``, or has another dtype.
        ValueError: its data has another shape.
    """
    if not isinstance(packed, Packed):
        raise TypeError(
            f"{name}: expected a Packed, which jaxconv.int8.pack makes, got {type(packed).__name__}"
        )
    data = array_of(f"{name}.data", packed.data, *dtypes)
    blocks = -(-packed.channels // BLOCK)
    if data.ndim != 5 or data.shape[1] != blocks or data.shape[4] != BLOCK:
        raise ValueError(
            f"{name}.data: expected shape (N, {blocks}, H, W, {BLOCK}) for {packed.channels} "
            f"channels, got {data.shape}"
        )
    return Packed(data, packed.channels)


@knows(feature_group_count="groups", order="filter_format", format="data_format")
def pack_filter(
    w: ArrayLike,
    *,
    groups: int = 1,
    data_format: str | None = None,
    filter_format: str = "HWIO",
    layout: str | None = None,
) -> PackedFilter:
    """Packs a filter for ``conv``, for use once before all calls.

    Args:
        w: int8 filters in the order ``filter_format``: (R, S, C / groups, K) for "HWIO";
            NHWC layers with one or three spatial axes have "WIO" and "DHWIO".
        groups: groups of channels; with several, C / groups and K / groups must be multiples of 32
            or, for NHWC, both 1.
        data_format: the activations' format, as in ``conv``: "NCHW32" (the default), or any array
            format; filters for all array formats are packed alike.
        filter_format: the letters I and O, and the spatial letters in the order D, H, W.
        layout: the deprecated name of ``data_format``; it warns.

    Returns:
        The filter as an int8 matrix. Input channels are padded with zeros to a multiple of 32, or
        to 4 if there are at most 4 and one group; output channels to a multiple of 32.

    Raises:
        TypeError: w is not int8.
        ValueError: shape, formats or groups do not fit.
    """
    w = array_of("w", w, np.int8)
    data_format = renamed("layout", layouts.from_layout(layout), "data_format", data_format)
    spatial = "".join(letter for letter in filter_format if letter not in "IO")
    if sorted(filter_format) != sorted("IO" + spatial) or spatial not in ("W", "HW", "DHW"):
        raise ValueError(
            "filter_format: expected I, O and the axes W, HW or DHW in any order, such as 'HWIO', "
            f"got {filter_format!r}"
        )
    if w.ndim != len(filter_format):
        raise ValueError(
            f"w: expected {len(filter_format)} dimensions, filter_format is {filter_format}; got "
            f"shape {w.shape}"
        )
    if 0 in w.shape:
        raise ValueError(f"w: expected no empty dimension, got shape {w.shape}")
    layout = layouts.int8_format(data_format or "NCHW32", len(spatial))
    layout = "NHWC" if layout == "NCHW" else layout
    w = lax.transpose(w, [filter_format.index(letter) for letter in f"O{spatial}I"])
    k, *window, c = w.shape
    if groups < 1 or k % groups:
        raise ValueError(f"groups: {groups} does not divide the {k} output channels of w")
    made = PackedFilter(w, tuple(window), c, k, groups, layout)
    whole = c % BLOCK == 0 and (k // groups) % BLOCK == 0
    if groups > 1 and not whole and not (made.depthwise and layout == "NHWC"):
        raise ValueError(
            f"w: expected input and output channels of a group in multiples of {BLOCK}, got {c} "
            f"and {k // groups}, groups is {groups}; of NHWC one of each is taken too"
        )
    w = pad_axis(pad_axis(w, len(window) + 1, made.channels_stored), 0, made.features_stored)
    return dataclasses.replace(made, data=pack_rows(w, layout.lower()))


def checked_filter(name: str, w: PackedFilter) -> PackedFilter:
    """``w``, checked that its data has the shape given by its other attributes.

    Raises:
        TypeError: its data is not int8.
        ValueError: its data has another shape.
    """
    data = array_of(f"{name}.data", w.data, np.int8)
    terms = padded_channels(math.prod(w.window) * w.channels_stored)
    if data.shape != (w.features_stored, terms):
        raise ValueError(
            f"{name}.data: expected shape {(w.features_stored, terms)} for {w.features} filters of "
            f"window {w.window} and {w.channels} input channels, got {data.shape}"
        )
    return dataclasses.replace(w, data=data)
