"""The textbook algorithm: copies every window to a matrix, then one matrix product by XLA.

    fprop   y  = columns(x) W
    dgrad   dx = columns^T(dy W^T)          (col2im: overlapping windows add up)
    wgrad   dw = columns(x)^T dy

with columns(x) of N * P * Q rows and R * S * C columns; groups make it a batched product. The
matrix needs ``workspace_bytes``, R * S times the input at stride 1. Source: Chellapilla, Puri and
Simard, "High performance convolutional neural networks for document processing", 2006.

It is the baseline for implicit GEMM, and runs on every platform of JAX.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxconv._src import compat
from jaxconv._src.problem.spec import ConvSpec, Op, Sizes, check_size, dilated_extent
from jaxconv._src.ways.xla import PRECISION

OPS = frozenset(Op)


def refusal(op: Op, spec: ConvSpec, sizes: Sizes, dtype: np.dtype) -> str:
    """Accepts every problem."""
    return ""


def instance(op: Op, spec: ConvSpec, dtype: np.dtype) -> str:
    """The name of this algorithm for a problem, in the form of a kernel's name."""
    return f"{op.value}_im2col"


def workspace_bytes(op: Op, spec: ConvSpec, sizes: Sizes, dtype: np.dtype) -> int:
    """Size of the matrix of windows; dgrad, which adds windows, keeps it in the sums' dtype."""
    itemsize = np.dtype(_sum_dtype(dtype) if op is Op.DGRAD else dtype).itemsize
    rows = sizes.batch * sizes.n * math.prod(sizes.out_spatial)
    return rows * math.prod(sizes.filter_spatial) * sizes.c * itemsize


def _sum_dtype(dtype) -> np.dtype:
    """float32 for products of 8- and 16-bit floats, int32 for products of 8-bit integers."""
    integers = jnp.issubdtype(dtype, jnp.integer)
    wide = {1: jnp.int32} if integers else {1: jnp.float32, 2: jnp.float32}
    return np.dtype(wide.get(np.dtype(dtype).itemsize, dtype))


def columns(x: jax.Array, spec: ConvSpec) -> jax.Array:
    """The windows of x, (n, *out_spatial, *filter_spatial, c), from (n, *in_spatial, c).

    One axis at a time: the number of slices is the sum of the window's extents, not their product.
    """
    rank = spec.rank
    padded = [
        dilated_extent(extent, dilation) + lo + hi
        for extent, dilation, (lo, hi) in zip(
            spec.in_spatial, spec.lhs_dilation, spec.padding, strict=True
        )
    ]
    check_size("padded input", (*padded, x.shape[0], x.shape[-1]), x.dtype)
    windows = (x.shape[0], *spec.out_spatial, *spec.filter_spatial, x.shape[-1])
    check_size("windows", windows, x.dtype)
    pads = [
        (lo, hi, dilation - 1)
        for (lo, hi), dilation in zip(spec.padding, spec.lhs_dilation, strict=True)
    ]
    x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *pads, (0, 0, 0)])
    for axis in range(rank):
        stride, dilation = spec.stride[axis], spec.dilation[axis]
        extent = spec.out_spatial[axis]
        x = jnp.stack(
            [
                lax.slice_in_dim(
                    x, tap * dilation, tap * dilation + (extent - 1) * stride + 1, stride, axis + 1
                )
                for tap in range(spec.filter_spatial[axis])
            ],
            axis=rank + 1 + axis,
        )
    return x


def convolve(
    op: Op, lhs: jax.Array, rhs: jax.Array, *, spec: ConvSpec, out_dtype: np.dtype
) -> jax.Array:
    """Computes ``op``; operands and result as in the primitive."""
    lhs_role, rhs_role, out_role = op.roles
    sizes = spec.sizes(op, lhs.shape, rhs.shape)
    if sizes.empty or spec.crops_everything:
        return jnp.zeros(spec.shape(out_role, sizes), out_dtype)

    def one(a, b):
        return _convolve(op, a, b, spec, out_dtype)

    f = jax.vmap(one) if spec.batched else one
    out = f(jnp.transpose(lhs, spec.axes(lhs_role)), jnp.transpose(rhs, spec.axes(rhs_role)))
    return jnp.transpose(out, np.argsort(spec.axes(out_role)).tolist())


def _convolve(op: Op, lhs, rhs, spec: ConvSpec, out_dtype):
    """One convolution on arrays in canonical axis order."""
    groups, precision = spec.groups, PRECISION[spec.precision]
    sums = compat.wider_dtype(_sum_dtype(lhs.dtype), out_dtype)

    def grouped(array, axis):
        """Splits the channel axis, counted from the end, into (groups, rest)."""
        axis %= array.ndim
        shape = array.shape
        return array.reshape(*shape[:axis], groups, shape[axis] // groups, *shape[axis + 1 :])

    def product(subscripts, a, b):
        return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=sums)

    def rows(matrix):  # (n, *out_spatial, *filter_spatial, c) -> (n * out, window, g, c / g)
        taps = math.prod(spec.filter_spatial)
        return grouped(matrix.reshape(-1, taps, matrix.shape[-1]), -1)

    if op is Op.WGRAD:
        dy = grouped(rhs.reshape(-1, rhs.shape[-1]), -1)
        dw = product("mtgc,mgk->tcgk", rows(columns(lhs, spec)), dy)
        shape = (*spec.filter_spatial, lhs.shape[-1] // groups, rhs.shape[-1])
        return dw.reshape(shape).astype(out_dtype)
    taps, (c_per_group, k) = math.prod(spec.filter_spatial), rhs.shape[-2:]
    w = grouped(rhs.reshape(taps, c_per_group, k), -1)
    if op is Op.FPROP:
        y = product("mtgc,tcgk->mgk", rows(columns(lhs, spec)), w)
        return y.reshape(lhs.shape[0], *spec.out_spatial, k).astype(out_dtype)
    n, c = lhs.shape[0], c_per_group * groups
    dy = grouped(lhs.reshape(-1, k), -1)
    matrix = product("mgk,tcgk->mtgc", dy, w)
    matrix = matrix.reshape(n, *spec.out_spatial, *spec.filter_spatial, c)
    x = jax.ShapeDtypeStruct((n, *spec.in_spatial, c), sums)
    (dx,) = jax.linear_transpose(lambda x: columns(x, spec), x)(matrix)
    return dx.astype(out_dtype)
