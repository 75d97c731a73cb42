"""The three operations by ``jax.lax``: the fallback of every platform.

The gradients are written as convolutions instead of transposed ones, because inside ``shard_map`` a
transposition would sum over devices a second time.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxconv._src.problem.spec import (
    EXPLICIT_GROWTH,
    ConvSpec,
    Op,
    dilated_extent,
    fitting_padding,
    known,
)
from jaxconv._src.sharding import explicit_mesh

PRECISION = {
    "default": lax.Precision.DEFAULT,
    "high": lax.Precision.HIGH,
    "highest": lax.Precision.HIGHEST,
}


def convolve(
    op: Op, lhs: jax.Array, rhs: jax.Array, *, spec: ConvSpec, out_dtype: np.dtype
) -> jax.Array:
    """Computes ``op`` by ``lax.conv_general_dilated``; operands and result as in the primitive."""
    sizes = spec.sizes(op, lhs.shape, rhs.shape)
    out_shape = spec.shape(op.roles[2], sizes)
    if sizes.empty or spec.crops_everything:
        return jnp.zeros(out_shape, out_dtype)
    if spec.batched:
        lhs_axis, rhs_axis, out_axis = (spec.axis(role, "batch") for role in op.roles)

        def one(a, b):
            return convolve(op, a, b, spec=spec.without_batch(), out_dtype=out_dtype)

        return jax.vmap(one, in_axes=(lhs_axis, rhs_axis), out_axes=out_axis)(lhs, rhs)
    ways: dict[Op, Callable[..., jax.Array]] = {
        Op.FPROP: _fprop,
        Op.DGRAD: _dgrad,
        Op.WGRAD: _wgrad,
    }
    compute = ways[op]
    return compute(lhs, rhs, spec, out_shape=out_shape, preferred_element_type=out_dtype)


def _numbers(axes: tuple[int, ...], batch: int, feature: int) -> tuple[int, ...]:
    """One entry of ConvDimensionNumbers from canonical axes; batch and feature index into them."""
    outer = {batch % len(axes), feature % len(axes)}
    spatial = [a for i, a in enumerate(axes) if i not in outer]
    return (axes[batch], axes[feature], *spatial)


def _convolution(
    lhs, rhs, strides, padding, lhs_dilation, rhs_dilation, numbers, spec, out_shape, **options
):
    """``lax.conv_general_dilated``, with cropping done beforehand.

    XLA:CPU (jaxlib 0.9.2 to 0.11.2) gives wrong results for negative padding with a stride, and on
    an axis that is padded on its other side.
    """
    crop = [(0, 0, 0)] * lhs.ndim
    kept, dilations = [], []
    for axis, (lo, hi), dilation in zip(numbers.lhs_spec[2:], padding, lhs_dilation, strict=True):
        if not (known(lo) and known(hi)):  # lax accepts no expressions as padding
            crop[axis] = lo, hi, dilation - 1
            lo, hi, dilation = 0, 0, 1
        elif min(lo, hi) < 0:
            # Crops the dilated axis or, if its zeros would take much memory, whole elements; the
            # zeros between the last cropped element and the next are then positive padding.
            step = 1 if dilation <= EXPLICIT_GROWTH else dilation
            cut = -(min(lo, 0) // step), -(min(hi, 0) // step)
            extent = dilated_extent(lhs.shape[axis], dilation // step)
            if known(extent) and extent <= sum(cut):
                return jnp.zeros(out_shape, options["preferred_element_type"])
            crop[axis] = -cut[0], -cut[1], dilation // step - 1
            lo, hi, dilation = lo + cut[0] * step, hi + cut[1] * step, step
        kept.append((lo, hi))
        dilations.append(dilation)
    if any(cut != (0, 0, 0) for cut in crop):
        lhs = lax.pad(lhs, jnp.zeros((), lhs.dtype), crop)
    return lax.conv_general_dilated(
        lhs,
        rhs,
        strides,
        kept,
        lhs_dilation=dilations,
        rhs_dilation=rhs_dilation,
        dimension_numbers=numbers,
        precision=PRECISION[spec.precision],
        **options,
    )


def _fprop(x, w, spec: ConvSpec, **result):
    numbers = lax.ConvDimensionNumbers(
        lhs_spec=_numbers(spec.x_axes, 0, -1),
        rhs_spec=_numbers(spec.w_axes, -1, -2),
        out_spec=_numbers(spec.y_axes, 0, -1),
    )
    return _convolution(
        x,
        w,
        spec.stride,
        spec.padding,
        spec.lhs_dilation,
        spec.dilation,
        numbers,
        spec,
        feature_group_count=spec.groups,
        **result,
    )


def _dgrad(dy, w, spec: ConvSpec, **result):
    """A convolution of dy, dilated by the stride, with the reversed, transposed filter."""
    # k is now the contracted channel: its groups go outermost into c
    w = explicit_mesh.move_groups(w, spec.axis("w", "k"), spec.axis("w", "c"), spec.groups)
    spatial = spec.w_axes[: spec.rank]
    x, window, y = spec.dilated_spatial
    padding = fitting_padding([lo for lo, _ in spec.padding], y, window, x, reflected=True)
    numbers = lax.ConvDimensionNumbers(
        lhs_spec=_numbers(spec.y_axes, 0, -1),
        rhs_spec=_numbers(spec.w_axes, -2, -1),
        out_spec=_numbers(spec.x_axes, 0, -1),
    )
    return _convolution(
        dy,
        lax.rev(w, spatial),
        spec.lhs_dilation,
        padding,
        spec.stride,
        spec.dilation,
        numbers,
        spec,
        feature_group_count=spec.groups,
        **result,
    )


def _wgrad(x, dy, spec: ConvSpec, **result):
    """A convolution whose batch is the channels of x; its filter is dy, dilated by the stride."""
    padding = fitting_padding([lo for lo, _ in spec.padding], *spec.dilated_spatial)
    numbers = lax.ConvDimensionNumbers(
        lhs_spec=_numbers(spec.x_axes, -1, 0),
        rhs_spec=_numbers(spec.y_axes, -1, 0),
        out_spec=_numbers(spec.w_axes, -2, -1),
    )
    return _convolution(
        x,
        dy,
        spec.dilation,
        padding,
        spec.lhs_dilation,
        spec.stride,
        numbers,
        spec,
        batch_group_count=spec.groups,
        **result,
    )
