"""Integer convolution and requantisation in JAX, with the same bits as the kernels.

The fallback of every platform. XLA:GPU has no general integer convolution, but integer matrix
products, so the sums are a product with the matrix of windows (``im2col``). XLA has no fused
multiply-add, and may or may not fuse a product with a sum. The epilogue's two fused multiply-adds
are therefore computed in float64, where the product of two float32 numbers is exact, and rounded
once. Barriers keep XLA from joining two conversions (int32 or float64 to float32, then to float64),
which would omit the rounding between them; its excess-precision mode allows this.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxconv._src import compat
from jaxconv._src.problem.spec import ConvSpec, Op
from jaxconv._src.ways import im2col


def convolve(
    op: Op, lhs: jax.Array, rhs: jax.Array, *, spec: ConvSpec, out_dtype: np.dtype
) -> jax.Array:
    """Computes ``op`` on integers as a matrix product; int8 operands have int32 sums.

    An integer result holds the sum's low bits, a float result the rounded sum.
    """
    wide = np.dtype(np.int32) if lhs.dtype.itemsize < 4 else lhs.dtype
    if jnp.issubdtype(out_dtype, jnp.integer):
        wide = compat.wider_dtype(wide, out_dtype)
    # Operands in the sums' dtype: with int8 operands, XLA:GPU of jax 0.11.2 computed products twice
    # too large for some groups and gradients.
    lhs, rhs = lhs.astype(wide), rhs.astype(wide)
    return im2col.convolve(op, lhs, rhs, spec=spec, out_dtype=wide).astype(out_dtype)


def sums(x: jax.Array, w: jax.Array, spec: ConvSpec) -> jax.Array:
    """The int32 sums of x int8 or uint8 (n, *spatial, c) and w int8 (*window, c / groups, k)."""
    if x.dtype == np.int8:
        return convolve(Op.FPROP, x, w, spec=spec, out_dtype=np.dtype(np.int32))
    # sum of x w = sum of (x - 128) w + 128 * sum of w, where padding holds -128.
    x = lax.bitcast_convert_type(x ^ jnp.uint8(128), np.int8)
    config = [(0, 0, 0), *((lo, hi, 0) for lo, hi in spec.padding), (0, 0, 0)]
    x = lax.pad(x, jnp.int8(-128), config)
    spatial = x.shape[1:-1]
    spec = _without_padding(spec, spatial)
    of_w = jnp.sum(w, axis=tuple(range(w.ndim - 1)), dtype=np.int32)
    return convolve(Op.FPROP, x, w, spec=spec, out_dtype=np.dtype(np.int32)) + 128 * of_w


def _without_padding(spec: ConvSpec, in_spatial: tuple[int, ...]) -> ConvSpec:
    return dataclasses.replace(spec, in_spatial=in_spatial, padding=((0, 0),) * spec.rank)


def fma(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    """a * b + c for float32 arrays, rounded once.

    The product is exact in float64. The float64 sum is rounded to odd (its last bit is set if it is
    inexact), so that rounding it to float32 rounds the exact sum.
    """
    product = a.astype(np.float64) * b.astype(np.float64)
    addend = lax.broadcast_in_dim(c, product.shape, range(product.ndim - c.ndim, product.ndim))
    addend = addend.astype(np.float64)
    total = product + addend
    rest = total - product
    error = (product - (total - rest)) + (addend - rest)  # total + error is exact
    bits = lax.bitcast_convert_type(total, np.int64)
    one = lax.full_like(bits, 1)
    away_from_zero = (error > 0) == (total > 0)
    odd = bits + lax.select(away_from_zero, one, -one)
    inexact = lax.is_finite(total) & (error != 0) & (bits & one == 0)
    odd = lax.bitcast_convert_type(lax.select(inexact, odd, bits), np.float64)
    return lax.optimization_barrier(odd.astype(np.float32))


def requantize(
    acc: jax.Array,
    out_dtype: np.dtype,
    *,
    scale: jax.Array,
    offset: jax.Array | None = None,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    residual_scale: jax.Array | None = None,
    activation: str | None = None,
    zero_point: int = 0,
) -> jax.Array:
    """The epilogue of ``cc/core/epilogue.h``; needs 64-bit types.

    Args:
        acc: int32 (n, *out_spatial, k).
        out_dtype: dtype of the result.
        scale: float32 (k,) or (n, k).
        offset: int32 (k,).
        bias: float32 (k,).
        residual: shape and dtype of the result.
        residual_scale: float32 (1,).
        activation: None, "relu" or "relu6".
        zero_point: the zero point of an integer result.
    """
    if offset is not None:
        acc = acc + offset
    if scale.ndim == 2:
        n, k = scale.shape
        scale = scale.reshape(n, *(1,) * (acc.ndim - 2), k)
    bias = jnp.zeros((), np.float32) if bias is None else bias
    t = fma(lax.optimization_barrier(acc.astype(np.float32)), scale, bias)
    if residual is not None and residual_scale is not None:
        z = lax.optimization_barrier(residual.astype(np.float32))
        t = fma(residual_scale.reshape(()), z, t)
    if activation is not None:
        t = lax.select(t < 0, lax.full_like(t, 0), t)
    if activation == "relu6":
        t = lax.select(t > 6, lax.full_like(t, 6), t)
    if not jnp.issubdtype(out_dtype, jnp.integer):
        return t.astype(out_dtype)
    rounded = lax.select(t != t, lax.full_like(t, 0), t)
    rounded = lax.round(rounded, lax.RoundingMethod.TO_NEAREST_EVEN).astype(np.float64)
    # 2^31 and more exceed every type, and float64 represents every integer in between.
    integer = lax.clamp(np.float64(-(2**31)), rounded, np.float64(2**31 - 1)) + zero_point
    limits = jnp.iinfo(out_dtype)
    return lax.clamp(np.float64(limits.min), integer, np.float64(limits.max)).astype(out_dtype)
