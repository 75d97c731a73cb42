"""Winograd convolution of int8 operands: V and U in 8 bits, one scale per row and point.

    V8 = round(V / v_scale)    v_scale: of each tile and point, over its channels
    U8 = round(U / u_scale)    u_scale: of each output channel and point
    Y  = A^T ((U8 V8) u_scale v_scale) A

V and U are exact before quantisation: B^T and G are dyadic, and G's odd denominators are moved to
A^T. A scale is max(max / 127, unit), with the unit of the point: a row whose largest magnitude is
at most 127 units is not rounded. The products are exact int32 sums; times u_scale they are rounded
to float16, whose error is negligible relative to that of 8 bits. Y is rounded to integers, like the
sums of a direct convolution, and passes through the same epilogue.

A result depends only on its tile and on its output channel's filter, not on the rest of the batch.
Sources: Lavin and Gray 2015; Li et al., "LANCE", ICASSP 2020, and Andri et al., MICRO 2022, for
scales in the Winograd domain.

The kernels of the family ``winograd_int8`` compute this on a GPU; elsewhere XLA operations do.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxconv._src.library import native
from jaxconv._src.problem.spec import ConvSpec, Sizes
from jaxconv._src.ways import im2col, winograd_jax
from jaxconv._src.ways.winograd_points import TAPS, Matrix, balanced, matrices

# Maps an algorithm to the outputs of a tile along an axis.
ALGORITHMS = {"winograd_f2x2": 2, "winograd_f4x4": 4}

# Sums of this many products are exact in float32, for which XLA has fast matrix products.
_EXACT_CHANNELS = 2**24 // 128**2

# Products times their power of two are below 2^15, hence below float16's largest number.
_HALF_EXPONENT = 15


class IntegerMatrices(NamedTuple):
    """F(m, 3) for integers; a row of B^T or G times integers is a multiple of its unit."""

    bt: Matrix
    g: Matrix
    at: Matrix
    input_unit: tuple[Fraction, ...]
    filter_unit: tuple[Fraction, ...]


def _unit(row: tuple[Fraction, ...]) -> Fraction:
    """The largest power of two, at most 1, that divides every coefficient."""
    unit = Fraction(1)
    while any((factor / unit).denominator > 1 for factor in row):
        unit /= 2
    return unit


@functools.cache
def integer_matrices(m: int) -> IntegerMatrices:
    """The matrices of F(m, 3), m = 2 or 4, B^T and G dyadic."""
    exact = matrices(m)
    g, factors = [], []
    for row in exact.g:
        denominator = math.lcm(*(tap.denominator for tap in row))
        odd = denominator // (denominator & -denominator)
        scale, dyadic = balanced([tap * odd for tap in row])
        g.append(dyadic)
        factors.append(scale * odd)
    at = tuple(tuple(a / f for a, f in zip(row, factors, strict=True)) for row in exact.at)
    return IntegerMatrices(
        exact.bt, tuple(g), at, tuple(map(_unit, exact.bt)), tuple(_unit(row) for row in g)
    )


def refusal(spec: ConvSpec, x_dtype: np.dtype, algorithm: str) -> str:
    """Why Winograd does not accept a quantised convolution, or ""."""
    if algorithm not in ALGORITHMS:
        return f"Winograd of int8 operands has the tiles {' and '.join(ALGORITHMS)}"
    if np.dtype(x_dtype) != np.int8:
        return f"images of {np.dtype(x_dtype).name}; Winograd takes int8"
    if spec.groups > 1:
        return f"{spec.groups} groups; Winograd of int8 operands takes one"
    return winograd_jax.window_refusal(spec)


def select(
    algorithm: str, sizes: Sizes, by_kernel: Callable[[str], native.Selection]
) -> native.Selection:
    """The kernel of an algorithm if one accepts the problem, otherwise the form in JAX.

    Args:
        algorithm: one of ``ALGORITHMS``.
        sizes: extents; channels include padding.
        by_kernel: selects an instance by name.

    Returns:
        A selection with an instance.
    """
    m = ALGORITHMS[algorithm]
    name = f"fprop_winograd_int8_s8_{m}x{m}"
    try:
        chosen = by_kernel(f"{name}_four_stage")
    except ValueError:  # not a kernel of this platform
        chosen = native.Selection(None)
    if chosen.instance is not None:
        return chosen
    points = (m + TAPS - 1) ** 2
    tiles = sizes.n * math.prod(-(-extent // m) for extent in sizes.out_spatial)
    memory = points * (tiles * (sizes.c + 2 * sizes.k) + sizes.c * sizes.k)
    return native.Selection(f"{name}_jax", memory, in_jax=True)


def _quantised(values: jax.Array, axis: int, units: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """``values`` rounded to float16 and then int8, and their scales (extent 1 along ``axis``)."""
    values = winograd_jax.rounded(values, np.dtype(np.float16)).astype(np.float32)
    largest = jnp.max(jnp.abs(values), axis=axis, keepdims=True)
    # If the scale is the point's unit, it is a power of two, and both quotients are exact.
    bound = jnp.maximum(largest, np.float32(127) * units)
    factor = np.float32(127) / bound
    return jnp.round(values * factor).astype(np.int8), bound / np.float32(127)


def _units(of_rows: tuple[Fraction, ...], shape: tuple[int, ...]) -> np.ndarray:
    row = np.array([float(unit) for unit in of_rows], np.float32)
    return np.outer(row, row).reshape(shape)


def sums(x: jax.Array, w: jax.Array, spec: ConvSpec, algorithm: str) -> jax.Array:
    """Winograd's counterpart of the direct convolution's int32 sums.

    Args:
        x: int8 (n, h, w, c).
        w: int8 (3, 3, c, k).
        spec: the window of the convolution; axis orders are ignored.
        algorithm: one of ``ALGORITHMS``.

    Returns:
        int32 (n, p, q, k).
    """
    m = ALGORITHMS[algorithm]
    of, alpha, wide = integer_matrices(m), m + TAPS - 1, np.dtype(np.float32)
    (n, _, _, c), k, out = x.shape, w.shape[-1], spec.out_spatial
    tiles = tuple(-(-extent // m) for extent in out)
    pads = tuple(
        (lo, count * m + TAPS - 1 - extent - lo)
        for (lo, _), count, extent in zip(spec.padding, tiles, spec.in_spatial, strict=True)
    )
    overlapping = dataclasses.replace(
        spec, filter_spatial=(alpha, alpha), stride=(m, m), padding=pads
    )
    v = im2col.columns(x, overlapping).astype(wide)  # (n, tiles, tiles, points, points, c)
    u = w.astype(wide)  # (points, points, c, k)
    for axis in range(2):
        v = winograd_jax.transform(of.bt, v, 3 + axis)
        u = winograd_jax.transform(of.g, u, axis)
    v8, v_scale = _quantised(v, 5, _units(of.input_unit, (alpha, alpha, 1)))
    u8, u_scale = _quantised(u, 2, _units(of.filter_unit, (alpha, alpha, 1, 1)))
    products = sum(
        jnp.einsum(
            "nhwabc,abck->nhwabk",
            v8[..., first : first + _EXACT_CHANNELS].astype(wide),
            u8[:, :, first : first + _EXACT_CHANNELS].astype(wide),
            precision="highest",
        ).astype(np.int32)
        for first in range(0, c, _EXACT_CHANNELS)
    )
    assert not isinstance(products, int), "there are channels"
    exponent = max(0, math.ceil(math.log2(128 * 128 * c)) - _HALF_EXPONENT)
    scale = u_scale[:, :, 0] * np.float32(2.0**-exponent)
    rounded = winograd_jax.rounded(products.astype(wide) * scale, np.dtype(np.float16))
    y = rounded.astype(wide) * (v_scale * np.float32(2.0**exponent))
    for axis in range(2):
        y = winograd_jax.transform(of.at, y, 3 + axis)
    y = jnp.transpose(y, (0, 1, 3, 2, 4, 5)).reshape(n, tiles[0] * m, tiles[1] * m, k)
    return jnp.round(y[:, : out[0], : out[1]]).astype(np.int32)
