"""Winograd convolution of 3x3 filters at stride 1, written in JAX.

    V = B^T d B         of tiles d of (m + 2) x (m + 2) inputs that overlap by two
    U = G w G^T         of the filter
    M = sum over the channels of U V, a matrix product at each of the (m + 2)^2 points
    Y = A^T M A         tiles of m x m outputs

The tiles "f2x3" and "f4x3" transform along W only: V is computed from rows, and M also sums over
the filter's rows. dgrad is the same on dy, with the filter rotated by 180 degrees and its channels
swapped.

For 16-bit operands U and V are float16, computed in float32 and rounded once, and products are
summed in float32; for float32 and float64 operands they have the operands' type. bfloat16 operands
are scaled by a power of two that brings their largest magnitude into [2^13, 2^14), within float16's
range; the CUDA kernels do the same for float32 operands at precision DEFAULT.

It runs on every platform of JAX, for problems that no kernel of the family ``winograd`` accepts,
with the same points, domain and scales. Sources: Lavin and Gray 2015; for 1-D tiles Zhang et al.,
"Im2col-Winograd", ICPP 2024.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxconv._src.problem.spec import ConvSpec, Op, Sizes, as_fprop
from jaxconv._src.sharding import explicit_mesh
from jaxconv._src.ways import im2col
from jaxconv._src.ways.winograd_points import TAPS, Matrix, matrices
from jaxconv._src.ways.xla import PRECISION

# Without wgrad, which is a convolution with a filter as large as the output.
OPS = frozenset({Op.FPROP, Op.DGRAD})


class Tile(NamedTuple):
    """Outputs of a tile along H and W; an axis with 1 is not transformed."""

    h: int
    w: int

    @property
    def points(self) -> tuple[int, int]:
        """Points along H and W; the filter's rows or columns along an untransformed axis."""
        return self.h + TAPS - 1, self.w + TAPS - 1


TILES = {
    "f2x2": Tile(2, 2),
    "f4x4": Tile(4, 4),
    "f6x6": Tile(6, 6),
    "f2x3": Tile(1, 2),
    "f4x3": Tile(1, 4),
}

# The family, whose tile depends on the problem, and one name for each tile.
ALGORITHMS = ("winograd", *(f"winograd_{name}" for name in TILES))

# Maps the operands' dtype to that of U and V.
DOMAINS: dict[str, Any] = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}


def window_refusal(spec: ConvSpec) -> str:
    """Why Winograd does not accept a window, or ""."""
    if spec.rank != 2:
        return f"{spec.rank} spatial axes; Winograd takes 2"
    for name, values, expected in (
        ("filter", spec.filter_spatial, TAPS),
        ("stride", spec.stride, 1),
        ("dilation", spec.dilation, 1),
        ("input dilation", spec.lhs_dilation, 1),
    ):
        if values != (expected, expected):
            return f"{name} {values[0]}x{values[1]}; Winograd takes {expected}x{expected}"
    return ""


def refusal(op: Op, spec: ConvSpec, sizes: Sizes, dtype: np.dtype) -> str:
    """Why Winograd does not accept a problem, or ""."""
    if reason := window_refusal(spec):
        return reason
    name = np.dtype(dtype).name
    if name not in DOMAINS:
        return f"operands of {name}; Winograd takes {', '.join(DOMAINS)}"
    if spec.precision == "highest" and name in ("float32", "float64"):
        return f"precision highest: Winograd's error in {name} is above the direct convolution's"
    if not all(isinstance(e, int) for e in (sizes.n, sizes.c, sizes.k, *sizes.in_spatial)):
        return "symbolic shape; Winograd takes known extents"
    return ""


def domain(dtype: np.dtype) -> np.dtype:
    """The dtype of U and V for operands of ``dtype``."""
    return DOMAINS[np.dtype(dtype).name]


def sum_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype of M, and of the computation of U, V and Y."""
    return np.dtype(np.float64 if np.dtype(dtype) == np.float64 else np.float32)


def counts(tile: Tile, out_spatial: Sequence[int]) -> tuple[int, int]:
    """The number of tiles that cover the output along H and W."""
    along_h, along_w = (-(-extent // m) for extent, m in zip(out_spatial, tile, strict=True))
    return along_h, along_w


def name_of(tile: Tile) -> str:
    """The name of a tile, such as "f4x4"."""
    return next(name for name, each in TILES.items() if each == tile)


def tile_named(algorithm: str) -> str:
    """The tile in the name of an algorithm or an instance, such as "f4x4"; or ""."""
    found = re.search(r"winograd_(?:\w+?_)??f?(\dx\d)(?:_|$)", algorithm)
    return f"f{found[1]}" if found else ""


def tile_of(op: Op, spec: ConvSpec) -> Tile:
    """The tile in the algorithm's name; for the family, that with the fewest multiplications.

    The candidates are F(2x2) and F(4x4), because F(6x6) has 3 times the error of F(4x4). With equal
    counts F(2x2) is taken, which has the smaller error.
    """
    tile = TILES.get(spec.algorithm_of(op).removeprefix("winograd_"))
    if tile is not None:
        return tile
    out = as_fprop(op, spec).out_spatial
    return min(
        (TILES["f2x2"], TILES["f4x4"]),
        key=lambda tile: math.prod(counts(tile, out)) * math.prod(tile.points),
    )


def instance(op: Op, spec: ConvSpec, dtype: np.dtype) -> str:
    """The name of this algorithm for a problem, in the form of a kernel's name."""
    short = {"float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64"}
    tile = name_of(tile_of(op, spec)).removeprefix("f")
    return f"{op.value}_winograd_{short[np.dtype(dtype).name]}_{tile}_jax"


def workspace_bytes(op: Op, spec: ConvSpec, sizes: Sizes, dtype: np.dtype) -> int:
    """Size of U, V and M."""
    tile = tile_of(op, spec)
    red, cols = (sizes.c, sizes.k) if op is Op.FPROP else (sizes.k, sizes.c)
    tiles = sizes.batch * sizes.n * math.prod(counts(tile, as_fprop(op, spec).out_spatial))
    points = int(np.prod(tile.points))
    summed = tile.points[1] if tile.h == 1 else points
    narrow, wide = domain(dtype).itemsize, sum_dtype(dtype).itemsize
    filters = sizes.batch * points * cols * (red // spec.groups)
    return narrow * (filters + points * tiles * red) + wide * summed * tiles * cols


# --- the stated error -----------------------------------------------------------------------------

# The rms error against float64 divided by the result's standard deviation: the larger of the values
# for C = 256 and C = 1280 in docs/winograd.md, from ``python -m jaxconv.bench --winograd-errors``.
# The TF32 entry is for float32 operands with U and V rounded to 11 bits, as in the CUDA kernels. A
# float32 result of float16 operands, whose V often needs no rounding, is more accurate.
_RMS_ERROR = {
    "f16": {"2x2": 4.6e-4, "2x3": 3.5e-4, "4x3": 6.4e-4, "4x4": 1.7e-3, "6x6": 5.0e-3},
    "bf16": {"2x2": 1.7e-3, "2x3": 1.7e-3, "4x3": 1.7e-3, "4x4": 2.4e-3, "6x6": 5.2e-3},
    "f32": {"2x2": 5.6e-7, "2x3": 4.2e-7, "4x3": 8.8e-7, "4x4": 2.3e-6, "6x6": 6.8e-6},
    "tf32": {"2x2": 4.3e-4, "2x3": 3.5e-4, "4x3": 6.5e-4, "4x4": 1.7e-3, "6x6": 5.1e-3},
    "int8_s8": {"2x2": 1.4e-2, "4x4": 6.7e-2},  # against the exact sums
}

# The same for CUDA instances that also round M to float16 (``*_half``), emulated at C = 1280.
_RMS_ERROR_HALF_PRODUCTS = {
    "f16": {"4x4": 2.3e-3, "6x6": 6.7e-3},
    "bf16": {"4x4": 2.9e-3, "6x6": 7.0e-3},
    "tf32": {"4x4": 2.3e-3},
}


def largest_rms_error(operands: str, tile: str, precision: str) -> float:
    """An error bound for results on every platform; 0 without a tile.

    Args:
        operands: "f16", "bf16", "f32", or a type of quantised layers ("int8_nhwc").
        tile: from ``tile_named``; a tile without a stated error has that of F(m x m).
        precision: the precision of float32 operands.
    """
    if not tile:
        return 0.0
    operands = "tf32" if (operands, precision) == ("f32", "default") else operands
    operands = "int8_s8" if operands.startswith("int8_") else operands
    stated = {**_RMS_ERROR[operands], **_RMS_ERROR_HALF_PRODUCTS.get(operands, {})}
    return stated.get(tile[1:], stated[f"{tile[1]}x{tile[1]}"])


def rms_error(instance: str, platform: str, precision: str) -> float | None:
    """The stated error of an instance of the family, kernel or not; None without one."""
    found = re.search(r"_winograd_(\w+?)_(\dx\d)_", instance)
    if found is None:
        return None
    operands, tile = found.groups()
    if operands == "f32" and platform == "cuda" and precision == "default":
        operands = "tf32"
    stated = _RMS_ERROR_HALF_PRODUCTS if instance.endswith("_half") else _RMS_ERROR
    return stated.get(operands, {}).get(tile)


# --- scales ---------------------------------------------------------------------------------------


def scale_of(array: jax.Array) -> jax.Array:
    """The float32 power of two that brings the largest finite magnitude into [2^13, 2^14).

    1 where that is 0. At most 2^126, so that its inverse is a normal number.
    """
    magnitudes = jnp.abs(array.astype(np.float32))
    finite = jnp.where(jnp.isfinite(magnitudes), magnitudes, 0)
    largest = jnp.max(finite, initial=0)
    exponent = lax.bitcast_convert_type(largest, np.int32) >> 23  # biased by 127
    power = jnp.minimum(127 + 13 + 127 - exponent, 127 + 126)
    scale = lax.bitcast_convert_type(power << 23, np.float32)
    return jnp.where(largest == 0, np.float32(1), scale)


def _unscaled(y: jax.Array, scales: tuple[jax.Array, ...]) -> jax.Array:
    """Divides by every scale.

    The largest comes first: y is of the order of 2^26, so its product with 2^-126 is normal, while
    its product with the inverse of a scale of 2^-115 alone would overflow.
    """
    inverses = [1 / scale for scale in scales]
    if len(inverses) == 2:
        a, b = inverses
        inverses = [jnp.minimum(a, b), jnp.maximum(a, b)]
    for inverse in inverses:
        y = y * inverse
    return y


# --- transformations ------------------------------------------------------------------------------


def transform(matrix: Matrix, array: jax.Array, axis: int) -> jax.Array:
    """Multiplies one axis of an array by a matrix, adding terms in the axis' order.

    It adds scaled slices, which XLA fuses; a matrix product would round to TF32 on a GPU. For rows
    of G with thirds or fifths, it sums multiples by powers of two, and divides once by the odd
    denominator. Cancelling terms then leave exactly 0, whether or not the compiler contracts a
    product and a sum (a GPU's compiler does, and the residue of 2^-24 would be representable in
    float16).
    """
    parts = [lax.index_in_dim(array, j, axis, keepdims=False) for j in range(array.shape[axis])]
    rows: list[Any] = []
    for row in matrix:
        odd = _odd(math.lcm(*(factor.denominator for factor in row)))
        total: jax.Array | None = None
        for factor, part in zip(row, parts, strict=True):
            if factor:
                term = part * np.asarray(float(factor * odd), array.dtype)
                total = term if total is None else total + term
        if odd > 1:
            assert total is not None
            total = total * np.asarray(1 / odd, array.dtype)
        rows.append(total)
    return jnp.stack(rows, axis)


def _odd(number: int) -> int:
    """A positive number without its factors of two."""
    return number // (number & -number)


def rounded(array: jax.Array, dtype: np.dtype) -> jax.Array:
    """``array`` in the domain's dtype, rounded to its 11 bits on every platform.

    If a product widens float16 operands, XLA may omit a rounding to float16 and back; it keeps
    ``reduce_precision``. The exponent keeps float32's bits, because otherwise float16's subnormal
    numbers would be flushed to zero.
    """
    if dtype == np.float16:
        array = lax.reduce_precision(array, exponent_bits=8, mantissa_bits=10)
    return array.astype(dtype)


def filter_transform(
    w: jax.Array, tile: Tile, largest_scale: np.float32 | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """U of a filter, and its scale if the domain needs one.

    Args:
        w: (3, 3, *rest).
        tile: the tile.
        largest_scale: a power of two.

    Returns:
        (points along H, points along W, *rest) in the domain's dtype; the scale for bfloat16.
    """
    scale = scale_of(w) if w.dtype == jnp.bfloat16 else None
    if scale is not None and largest_scale is not None:
        scale = jnp.minimum(scale, largest_scale)
    u = w.astype(sum_dtype(w.dtype))
    u = u if scale is None else u * scale
    for axis, m in enumerate(tile):
        if m > 1:
            u = transform(matrices(m).g, u, axis)
    return rounded(u, domain(w.dtype)), scale


def as_rows(op: Op, w: jax.Array, groups: int) -> jax.Array:
    """A filter (3, 3, c / groups, k) as (3, 3, columns, reduction of a group), for fprop or dgrad.

    For dgrad it is rotated by 180 degrees, and its rows are the input channels.
    """
    if op is Op.DGRAD:
        w = explicit_mesh.move_groups(lax.rev(w, (0, 1)), 3, 2, groups)
        return w
    return jnp.swapaxes(w, 2, 3)


def multiply(
    x: jax.Array,
    u: jax.Array,
    scale: jax.Array | None,
    tile: Tile,
    spec: ConvSpec,
    out_dtype: np.dtype,
) -> jax.Array:
    """The forward convolution from a transformed filter.

    Args:
        x: (n, h, w, c).
        u: (points along H, points along W, k, c / groups), as ``filter_transform`` returns it.
        scale: the scale of U.
        tile: the tile.
        spec: window and groups of the forward convolution; axis orders are ignored.
        out_dtype: dtype of the result.

    Returns:
        (n, p, q, k).
    """
    groups, wide, narrow = spec.groups, sum_dtype(x.dtype), domain(x.dtype)
    n, _, _, c = x.shape
    k = u.shape[2]
    tiles, out = counts(tile, spec.out_spatial), spec.out_spatial
    scales = () if scale is None else (scale, scale_of(x))
    pads = tuple(
        (lo, count * m + TAPS - 1 - extent - lo)
        for (lo, _), count, m, extent in zip(
            spec.padding, tiles, tile, spec.in_spatial, strict=True
        )
    )
    overlapping = dataclasses.replace(spec, filter_spatial=tile.points, stride=tile, padding=pads)
    v = im2col.columns(x, overlapping).astype(wide)  # (n, tiles, tiles, points, points, c)
    v = v * scales[1] if scales else v
    for axis, m in enumerate(tile):
        if m > 1:
            v = transform(matrices(m).bt, v, 3 + axis)
    v = rounded(v, narrow).reshape(*v.shape[:5], groups, c // groups)
    u = u.reshape(*u.shape[:2], groups, k // groups, c // groups)
    # Untransformed rows are part of the sum.
    rows = "a" if tile.h > 1 else ""
    m_of_points = jnp.einsum(
        f"nhwabgc,abgkc->{rows}bgnhwk",
        v,
        u,
        precision=PRECISION[spec.precision],
        preferred_element_type=wide,
    )
    axes = [m for m in tile if m > 1]
    y = m_of_points
    for axis, m in enumerate(axes):
        y = transform(matrices(m).at, y, axis)
    y = y.reshape(*tile, *y.shape[len(axes) :])  # (i, j, g, n, h, w, k)
    y = _unscaled(y, scales).astype(out_dtype)
    y = jnp.transpose(y, (3, 4, 0, 5, 1, 2, 6))
    y = y.reshape(n, tiles[0] * tile.h, tiles[1] * tile.w, k)
    return y[:, : out[0], : out[1], :]


def convolve(
    op: Op, lhs: jax.Array, rhs: jax.Array, *, spec: ConvSpec, out_dtype: np.dtype
) -> jax.Array:
    """Computes ``op``, fprop or dgrad; operands and result as in the primitive."""
    lhs_role, rhs_role, out_role = op.roles
    sizes = spec.sizes(op, lhs.shape, rhs.shape)
    if sizes.empty or spec.crops_everything:
        return jnp.zeros(spec.shape(out_role, sizes), out_dtype)
    tile, forward = tile_of(op, spec), as_fprop(op, spec)

    def one(x, w):
        u, scale = filter_transform(as_rows(op, w, spec.groups), tile)
        return multiply(x, u, scale, tile, forward, out_dtype)

    f = jax.vmap(one) if spec.batched else one
    out = f(jnp.transpose(lhs, spec.axes(lhs_role)), jnp.transpose(rhs, spec.axes(rhs_role)))
    return jnp.transpose(out, np.argsort(spec.axes(out_role)).tolist())
