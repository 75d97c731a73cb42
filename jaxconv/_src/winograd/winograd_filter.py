"""Filters prepared for Winograd: U = G w G^T, computed once, in the kernels' order.

For float16 and bfloat16 filters it is the vector that ``cc/core/conv_problem.h`` defines: a record
of 256 bytes, then U in float16. The record begins with two powers of two as float32: the factor of
the filter, and the factor by which kernels scale products that they round. For float32 and float64
filters, which no CUDA kernel accepts, it is U alone.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jaxconv._src.problem.spec import Op
from jaxconv._src.ways import winograd_jax
from jaxconv._src.ways.winograd_jax import TILES, Tile
from jaxconv._src.ways.winograd_points import TAPS

# The words for the layouts in problem keys, by tile.
LAYOUTS = {"f2x2": "winograd2", "f4x4": "winograd4", "f6x6": "winograd6", "f4x3": "winograd4x3"}

# The float16 elements before U.
_RECORD = 128

# Larger scales have the bits of a float16 NaN, which a copy may change.
_LARGEST_SCALE = np.float32(2.0**120)

# Columns and reduction of a block in cc/cuda/winograd/row_filter.h.
_COLUMNS, _REDUCTION = 128, 32


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["data"],
    meta_fields=["tile", "dtype", "channels", "features", "groups"],
)
@dataclasses.dataclass(frozen=True)
class PreparedFilter:
    """A 3x3 filter transformed for Winograd: a pytree, made by ``prepare``.

    Attributes:
        data: the kernels' operand, in an order private to this build. It has the size of U: points
            / 9 times the filter's elements (16 points for "f2x2", then 36, 64, and 18 for "f4x3").
        tile: "f2x2", "f4x4", "f6x6" or "f4x3".
        dtype: dtype of the filter and of the inputs that it convolves.
        channels: input channels of one group.
        features: all output channels.
        groups: groups of channels.
    """

    data: jax.Array
    tile: str
    dtype: np.dtype
    channels: int
    features: int
    groups: int

    @property
    def instead_of_an_array(self) -> str:
        """As in ``operand.array``."""
        return f"a filter prepared for {self.tile}; those are the argument w of jaxconv.conv"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(3, 3, C / groups, K), the shape of the filter."""
        return (TAPS, TAPS, self.channels, self.features)

    def shape_in(self, filter_format: str) -> tuple[int, ...]:
        """The same in another order of axes, such as "OIHW"."""
        extents = dict(zip("HWIO", self.shape, strict=True))
        return tuple(extents[axis] for axis in filter_format if axis in extents)

    @property
    def outputs(self) -> Tile:
        """Outputs of a tile along H and W."""
        return TILES[self.tile]

    @property
    def is_record(self) -> bool:
        """Whether ``data`` is a vector for CUDA kernels."""
        return np.dtype(self.dtype).itemsize == 2

    @property
    def data_type(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of ``data``."""
        domain, points = winograd_jax.domain(self.dtype), self.outputs.points
        if not self.is_record:
            return jax.ShapeDtypeStruct((*points, self.features, self.channels), domain)
        k, c = self.features // self.groups, self.channels
        if self.outputs.h == 1:
            k, c = _up(k, _COLUMNS), _up(c, _REDUCTION)
        return jax.ShapeDtypeStruct((_RECORD + math.prod(points) * self.groups * k * c,), domain)


def _up(extent: int, multiple: int) -> int:
    return -(-extent // multiple) * multiple


def prepare(
    w: ArrayLike, tile: str, *, groups: int = 1, filter_format: str = "HWIO"
) -> PreparedFilter:
    """Transforms a filter for Winograd once, before the calls that use it.

    ``jaxconv.conv(x, prepare(w, "f4x4"))`` equals ``jaxconv.conv(x, w, algorithm="winograd_f4x4")``
    without the filter's transform in every call. It is for inference and has no derivative.

    Args:
        w: filters, (3, 3, C / groups, K) in the order ``filter_format``; float16, bfloat16, float32
            or float64.
        tile: outputs of a tile, "f2x2", "f4x4", "f6x6", or "f4x3" (four along W, filter rows
            summed).
        groups: groups of channels of the convolution.
        filter_format: the letters H, W, I and O in the order of w's axes.

    Returns:
        The transformed filter, a pytree that may be an argument of jitted functions.

    Raises:
        TypeError: w has another dtype.
        ValueError: tile, shape, format or groups do not fit.

    Source: Lavin and Gray, "Fast algorithms for convolutional neural networks", 2015.
    """
    if tile not in LAYOUTS:
        raise ValueError(f"tile: expected one of {', '.join(LAYOUTS)}, got {tile!r}")
    if isinstance(w, PreparedFilter):
        raise TypeError(f"w: expected an array, got a filter prepared for {w.tile}")
    if sorted(filter_format) != sorted("HWIO"):
        raise ValueError(f"filter_format: expected H, W, I and O, got {filter_format!r}")
    w = jnp.asarray(w)
    if w.dtype.name not in winograd_jax.DOMAINS:
        expected = ", ".join(winograd_jax.DOMAINS)
        raise TypeError(f"w: expected one of {expected}, got {w.dtype.name}")
    if w.ndim != 4:
        raise ValueError(f"w: expected 4 dimensions, {filter_format}; got shape {w.shape}")
    axes = [filter_format.index(letter) for letter in "HWIO"]
    if w.shape[axes[0]] != TAPS or w.shape[axes[1]] != TAPS or 0 in w.shape:
        raise ValueError(f"w: expected a 3x3 filter, {filter_format}; got shape {w.shape}")
    w = jnp.transpose(w, axes)
    *_, channels, features = w.shape
    if groups < 1 or features % groups:
        raise ValueError(f"groups: {groups} does not divide the {features} output channels of w")
    rows = winograd_jax.as_rows(Op.FPROP, w, groups)
    u, scale = winograd_jax.filter_transform(rows, TILES[tile], largest_scale=_LARGEST_SCALE)
    made = PreparedFilter(u, tile, np.dtype(w.dtype), channels, features, groups)
    return dataclasses.replace(made, data=_record(made, w, scale)) if made.is_record else made


def _record(u: PreparedFilter, w: jax.Array, scale: jax.Array | None) -> jax.Array:
    """The kernels' vector, from U (points along H, along W, k, c / groups).

    ``scale``: the factor of U's filter w.
    """
    one = jnp.ones((), np.float32)
    scales = (one, winograd_jax.scale_of(w)) if scale is None else (scale, one)
    halves = lax.bitcast_convert_type(jnp.stack(scales), np.float16)  # the lower half first
    front = lax.pad(halves.ravel(), np.zeros((), np.float16), [(0, _RECORD - 4, 0)])
    return jnp.concatenate([front, _row_order(u).ravel() if u.outputs.h == 1 else u.data.ravel()])


def _row_order(u: PreparedFilter) -> jax.Array:
    """U of "f4x3" in the order of cc/cuda/winograd/row_filter.h, padded with zeros.

    In this order, output channel 8 t + 2 j + e of 32 is column 8 j + 2 t + e.
    """
    rows, points = u.outputs.points
    k, c = u.features // u.groups, u.channels
    array = u.data.reshape(rows, points, u.groups, k, c)
    fill = [(0, 0, 0)] * 3 + [(0, _up(k, _COLUMNS) - k, 0), (0, _up(c, _REDUCTION) - c, 0)]
    array = lax.pad(array, np.zeros((), array.dtype), fill)
    #                     0     1        2     3   4  5  6  7   8  9  10
    array = array.reshape(rows, points, u.groups, -1, 4, 4, 4, 2, _up(c, _REDUCTION) // 32, 4, 8)
    return jnp.transpose(array, (2, 3, 8, 0, 1, 4, 6, 9, 5, 7, 10))


def unpacked(w: PreparedFilter) -> tuple[jax.Array, jax.Array | None]:
    """U (points along H, along W, k, c / groups) and its scale, for ``multiply``."""
    if not w.is_record:
        return w.data, None
    scaled = np.dtype(w.dtype) == jnp.bfloat16
    scale = lax.bitcast_convert_type(w.data[:2], np.float32) if scaled else None
    u, points = w.data[_RECORD:], w.outputs.points
    if w.outputs.h > 1:
        return u.reshape(*points, w.features, w.channels), scale
    k, c = w.features // w.groups, w.channels
    columns, reduction = _up(k, _COLUMNS) // _COLUMNS, _up(c, _REDUCTION) // _REDUCTION
    u = u.reshape(w.groups, columns, reduction, *points, 4, 4, 4, 4, 2, 8)
    u = jnp.transpose(u, np.argsort((2, 3, 8, 0, 1, 4, 6, 9, 5, 7, 10)).tolist())
    u = u.reshape(*points, w.groups, columns * _COLUMNS, reduction * _REDUCTION)
    return u[..., :k, :c].reshape(*points, w.features, c), scale


def checked(name: str, w: PreparedFilter) -> PreparedFilter:
    """``w``, checked that its data has the shape and dtype given by its other attributes.

    Raises:
        ValueError: its data has another shape or dtype.
    """
    expected = w.data_type
    if (np.shape(w.data), w.data.dtype) != (expected.shape, expected.dtype):
        raise ValueError(
            f"{name}.data: expected {expected.dtype.name}{list(expected.shape)} of a filter "
            f"{w.shape} prepared for {w.tile}, got {w.data.dtype.name}{list(np.shape(w.data))}"
        )
    return w
