"""``conv_general_dilated_patches`` and ``conv_general_dilated_local`` of ``jax.lax``, by copying.

lax multiplies the input by a filter of zeros and ones, with the precision of a product. Here
windows are copied: elements are exact at every precision, and a NaN stays in its position.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jaxconv._src.functions import arguments
from jaxconv._src.functions.arguments import DimensionNumbers, PrecisionLike
from jaxconv._src.problem import operand
from jaxconv._src.problem.spec import ConvSpec
from jaxconv._src.ways import im2col


def _windows(
    lhs: jax.Array,
    filter_shape: Sequence[int],
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None,
    rhs_dilation: Sequence[int] | None,
    dimension_numbers: DimensionNumbers,
) -> tuple[jax.Array, lax.ConvDimensionNumbers]:
    """The windows of lhs, (n, *out_spatial, c * taps), channels outermost, and the axes."""
    rank = lhs.ndim - 2
    if rank < 0:
        raise ValueError(f"lhs: expected at least 2 dimensions, got shape {lhs.shape}")
    window = arguments.per_axis("filter_shape", filter_shape, rank)
    if any(r < 1 for r in window):
        raise ValueError(f"filter_shape: expected at least 1 on every axis, got {window}")
    try:
        numbers = lax.conv_dimension_numbers(lhs.shape, (1, 1, *window), dimension_numbers)
    except TypeError as error:
        raise ValueError(f"dimension_numbers: {error}") from error
    lhs_dilation = arguments.per_axis(
        "lhs_dilation", 1 if lhs_dilation is None else lhs_dilation, rank
    )
    arguments.no_padding_by_name(padding, lhs_dilation)
    parameters: dict[str, Any] = dict(
        stride=arguments.per_axis("window_strides", window_strides, rank),
        lhs_dilation=lhs_dilation,
        dilation=arguments.per_axis(
            "rhs_dilation", 1 if rhs_dilation is None else rhs_dilation, rank
        ),
        groups=1,
    )
    n, c, *spatial = (lhs.shape[a] for a in numbers.lhs_spec)
    x = jax.ShapeDtypeStruct((n, c, *spatial), lhs.dtype)
    w = jax.ShapeDtypeStruct((1, c, *window), lhs.dtype)
    order = tuple(range(rank + 2))
    spec = ConvSpec(
        **parameters,
        padding=arguments.checked_padding(
            x, w, (order, order), padding, ("lhs", "filter_shape", "groups"), **parameters
        ),
        in_spatial=tuple(spatial),
        filter_spatial=window,
        x_axes=order,
        w_axes=order,
        y_axes=order,
    )
    if 0 in spec.out_spatial:
        shape = (n, *spec.out_spatial, c * math.prod(window))
        return jnp.zeros(shape, lhs.dtype), numbers
    batch, channels, *axes = numbers.lhs_spec
    windows = im2col.columns(lax.transpose(lhs, (batch, *axes, channels)), spec)
    windows = jnp.moveaxis(windows, -1, rank + 1)
    return lax.reshape(windows, (n, *spec.out_spatial, c * math.prod(window))), numbers


def _ordered(array: jax.Array, out_spec: Sequence[int]) -> jax.Array:
    """Transposes (n, *spatial, channels) to the axis order of the result."""
    batch, channels, *spatial = out_spec
    return lax.transpose(array, tuple(int(a) for a in np.argsort([batch, *spatial, channels])))


def conv_general_dilated_patches(
    lhs: ArrayLike,
    filter_shape: Sequence[int],
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: DimensionNumbers = None,
    precision: PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
) -> jax.Array:
    """``jax.lax.conv_general_dilated_patches``: the windows of a convolution, as channels.

    Copies without multiplication: exact at every precision and for every dtype.

    Args:
        lhs: input of n + 2 dimensions, in the order of ``dimension_numbers``.
        filter_shape: the n extents of the window, in the order of the filter's axes.
        window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers: as in
            ``conv_general_dilated``; of the filter only the order of spatial axes counts.
        precision: of no effect; for lax's signature.
        preferred_element_type: dtype of the result; by default that of lhs.

    Returns:
        The windows, in the order of ``dimension_numbers``; the channels of the result run over
        those of lhs, and for each over the window, the last axis fastest.

    Raises:
        TypeError, ValueError: as ``conv_general_dilated``.
    """
    lhs = operand.array("lhs", lhs)
    arguments.precision(precision)
    windows, numbers = _windows(
        lhs, filter_shape, window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers
    )
    out_dtype = arguments.result_dtype(lhs.dtype, preferred_element_type)
    return lax.convert_element_type(_ordered(windows, numbers.out_spec), out_dtype)


def conv_general_dilated_local(
    lhs: ArrayLike,
    rhs: ArrayLike,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    filter_shape: Sequence[int],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: DimensionNumbers = None,
    precision: PrecisionLike = None,
) -> jax.Array:
    """``jax.lax.conv_general_dilated_local``: a separate filter for every output position.

    The windows are copied, and XLA multiplies them by the filters, a matrix product for each
    position.

    Args:
        lhs: input of n + 2 dimensions, in the order of ``dimension_numbers``.
        rhs: filters of n + 2 dimensions: spatial axes as in the output, and as many input channels
            as ``conv_general_dilated_patches`` has channels.
        filter_shape: the n extents of the window, in the order of the filter's axes.
        window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers, precision: as in
            ``conv_general_dilated``.

    Returns:
        The output, in the order of ``dimension_numbers``.

    Raises:
        TypeError, ValueError: as ``conv_general_dilated``.
    """
    lhs, rhs = arguments.operands("lhs", lhs, "rhs", rhs)
    arguments.precision(precision)
    windows, numbers = _windows(
        lhs, filter_shape, window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers
    )
    rank = lhs.ndim - 2
    if rhs.ndim != lhs.ndim:
        raise ValueError(f"rhs: expected {lhs.ndim} dimensions as lhs has, got shape {rhs.shape}")
    k_axis, c_axis, *spatial = numbers.rhs_spec
    expected = [rhs.shape[k_axis], windows.shape[-1], *windows.shape[1:-1]]
    if [rhs.shape[a] for a in numbers.rhs_spec] != expected:
        shape = tuple(expected[i] for i in np.argsort(numbers.rhs_spec))
        raise ValueError(
            f"rhs: expected shape {shape}: the output's spatial extents {windows.shape[1:-1]}, and "
            f"{windows.shape[-1]} elements in a window of lhs; got shape {rhs.shape}"
        )
    positions = tuple(range(1, rank + 1))
    product = lax.dot_general(
        windows,
        rhs,
        (((rank + 1,), (c_axis,)), (positions, tuple(spatial))),
        precision=precision,
    )
    return _ordered(jnp.moveaxis(product, -2, 0), numbers.out_spec)
