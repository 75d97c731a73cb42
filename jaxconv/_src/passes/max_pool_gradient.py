"""The primitive max_pool_gradient: the gradient of window maxima (``max_pooling``).

    gradient  = dz, or dz * scale + y * y_scale + offset for batch norm's operand y, where dz at an
                element is the sum of dy over the windows whose place is this element

An element of the gradient is a float32 sum in a fixed order, rounded once.

On NVIDIA GPUs one kernel computes it in one pass; examples and channels may be sharded. Elsewhere
and under vmap, JAX operations compute the same: at most ceil(size / stride) windows along each axis
contain an element. For each of them the pooled arrays are upsampled by the stride, and the gradient
is selected where the place is the element's position.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from jaxconv._src import compat
from jaxconv._src.call import rules
from jaxconv._src.library import custom_call, native
from jaxconv._src.passes.windows import Windows
from jaxconv._src.sharding.partition import Tensors
from jaxconv._src.sharding.split_pass import Dimensions, SplitPass, result_types

TARGET = "jaxconv_max_pool_gradient"

max_pool_gradient_p = Primitive(TARGET)


def max_pool_gradient(
    gradients: Sequence[jax.Array],
    place: jax.Array,
    *normalised: jax.Array,
    windows: Windows,
) -> jax.Array:
    """The gradient of x, in the gradients' type.

    Args:
        gradients: one gradient of the maxima, or two, which are added and rounded.
        place: the places, uint8.
        normalised: empty, or y with x's dtype and shape, and scale, y_scale and offset, float32
            (C,).
        windows: the windows over x.
    """
    given = compat.match_varying(*gradients, place, *normalised)
    return max_pool_gradient_p.bind(*given, windows=windows, gradients=len(gradients))


def in_jax(*operands: jax.Array, windows: Windows, gradients: int = 1) -> jax.Array:
    """``max_pool_gradient`` in JAX operations."""
    dy = functools.reduce(jnp.add, operands[:gradients])
    place, *normalised = operands[gradients:]
    strides, overlaps, weights = windows.strides, windows.overlaps, windows.weights
    low = [pad for pad, _ in windows.padding]
    # An element at stride * i + a lies in window i and in windows that begin before it.
    grid = [-(-(p + n) // s) for p, n, s in zip(low, windows.shape, strides, strict=True)]
    edges = [(m - 1, g - n, 0) for m, g, n in zip(overlaps, grid, dy.shape, strict=True)]
    # Makes XLA read the stored places; it would otherwise recompute them, with a bounds check for
    # each read.
    place = lax.optimization_barrier(place)
    if any(map(any, edges)):
        dy = lax.pad(dy, np.array(0, dy.dtype), edges)
        place = lax.pad(place, np.array(0, place.dtype), edges)
        dy, place = lax.optimization_barrier((dy, place))
    repeated: list[int] = []  # the extents of the grid, each followed by its stride
    axes: list[int] = []
    within: Any = np.uint8(0)  # an element's place in the window that begins at stride * i
    for extent, step in zip(grid, strides, strict=True):
        axes.append(len(repeated))
        repeated += [extent] if step == 1 else [extent, step]
    for axis, step, weight in zip(axes, strides, weights, strict=True):
        if step > 1:
            along = lax.broadcasted_iota(np.uint8, repeated, axis + 1)
            within = within + along * np.uint8(weight)

    def spread(array: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(array, repeated, axes)

    total: Any = 0.0
    for before in itertools.product(*map(range, overlaps)):
        starts = [m - 1 - j for m, j in zip(overlaps, before, strict=True)]
        ends = [start + g for start, g in zip(starts, grid, strict=True)]
        number = windows.place(j * s for j, s in zip(before, strides, strict=True))
        here = spread(lax.slice(place, starts, ends)) == within + np.uint8(number)
        source = spread(lax.slice(dy, starts, ends)).astype(np.float32)
        total = total + lax.select(here, source, jnp.zeros_like(source))
    dx = total if normalised else total.astype(dy.dtype)
    for axis, step in enumerate(strides):
        if step > 1:  # one axis at a time: a reshape of a sharded array can merge only two axes
            dx = dx.reshape((*dx.shape[:axis], dx.shape[axis] * step, *dx.shape[axis + 2 :]))
    dx = lax.slice(dx, low, [p + n for p, n in zip(low, windows.shape, strict=True)])
    if not normalised:
        return dx
    y, scale, y_scale, offset = normalised
    return (dx * scale + (y.astype(np.float32) * y_scale + offset)).astype(dy.dtype)


# --- rules ---


def _abstract_eval(dy: Any, *operands: Any, windows: Windows, gradients: int) -> Any:
    dx = dy.update(shape=windows.shape, weak_type=False)
    return result_types(_MaxPoolGradient(windows, gradients), [dx], dy, *operands)[0]


def _jvp(primals, tangents, *, windows: Windows, gradients: int):
    form = dict(windows=windows, gradients=gradients)
    out = max_pool_gradient_p.bind(*primals, **form)
    return out, rules.tangent_of(in_jax, primals, tangents, **form)


@dataclasses.dataclass(frozen=True)
class _MaxPoolGradient(SplitPass):
    """The partition of ``max_pool_gradient``'s arrays over devices."""

    windows: Windows
    gradients: int

    primitive = max_pool_gradient_p
    pools = True

    def tensors(self, *shapes: Sequence[int]) -> Tensors:
        dims = Dimensions(self.windows.shape)
        names = [*(f"dy{i}_" for i in range(self.gradients)), "places"]
        operands = [dims.array(name, self.windows.counts) for name in names]
        if len(shapes) > len(operands):
            operands.append(dims.array("y"))
            names = ["scale", "y_scale", "offset"]
            operands += map(dims.vector, names, shapes[len(operands) :])
        return operands, [dims.array("dx")]

    def on_part(self, parts: Callable[[str], int], *operands: jax.Array) -> list[jax.Array]:
        return _MaxPoolGradient(self.windows.of_part(parts), self.gradients).bind(*operands)


def _lower(platform: str, ctx, *operands, windows: Windows, gradients: int):
    """Lowers to one custom call, or to JAX operations."""

    def by_kernel(_: native.PassPlan) -> list[Any]:
        names = [*("dy", "dy2")[:gradients], "places", "y", "scale", "y_scale", "offset"]
        given = zip(operands, ctx.avals_in, strict=True)
        found = custom_call.lowered(
            ctx,
            platform,
            TARGET,
            dict(zip(names, given, strict=False)),
            {"dx": ctx.avals_out[0]},
            **windows.attributes(),
        )
        return [found["dx"]]

    words = [f"g{gradients}", *["affine"] * (len(operands) > gradients + 1)]
    asked = windows.key("max_pool_gradient", ctx.avals_in[0].dtype, words)
    in_jax_of_windows = functools.partial(_lower_in_jax, windows=windows, gradients=gradients)
    call = _MaxPoolGradient(windows, gradients)
    return rules.lowered_pass(platform, ctx, operands, asked, by_kernel, in_jax_of_windows, call)


_lower_in_jax = mlir.lower_fun(in_jax, multiple_results=False)

ad.primitive_jvps[max_pool_gradient_p] = _jvp
rules.register(
    max_pool_gradient_p,
    shapes=_abstract_eval,
    batch=rules.batched_as(in_jax),
    lower=_lower,
    elsewhere=_lower_in_jax,
)
