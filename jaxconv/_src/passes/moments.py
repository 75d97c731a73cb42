"""The primitive moments: mean and sum of squared deviations of every channel.

    mean = sum of y / rows,    M = sum of (y - mean)^2,    rest = sum of (y - mean) / rows

in float32, over all positions of a channels-last array, or over those of each segment of its
leading axis. The rest is the rounding error of the mean, which derivatives in float32 need. On
NVIDIA GPUs one kernel reads the array once, in parts. The moments of parts, and of
several devices, are merged (Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm
for computing sample variances", 1979). Elsewhere and under vmap, JAX operations make two passes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from jaxconv._src.call import rules
from jaxconv._src.library import custom_call, native
from jaxconv._src.passes.masked_sums import (
    accepts_rows,
    along_segments,
    key_of_rows,
    of_segments,
    over_segments,
    type_of_sums,
)
from jaxconv._src.sharding import partition
from jaxconv._src.sharding.partition import Tensors
from jaxconv._src.sharding.split_pass import Dimensions, SplitPass, result_types

TARGET = "jaxconv_moments"

moments_p = Primitive(TARGET)


def accepts(shape: tuple[int, ...], dtype: np.dtype, segments: int = 1) -> bool:
    """Whether a kernel computes the moments of an array of this type."""
    return accepts_rows(key_of_rows("moments", shape, dtype, segments), shape)


def moments(y: jax.Array, *, segments: int = 1) -> jax.Array:
    """Mean, M and rest, float32: (3, C), or (segments, 3, C) with several segments.

    Args:
        y: a channels-last array (..., C), float32, float16 or bfloat16.
        segments: the number of equal segments into which the leading axis is divided.
    """
    return moments_p.bind(y, segments=segments)


def in_jax(y: jax.Array, *, segments: int) -> jax.Array:
    """The same in JAX operations."""
    wide = y.astype(np.float32)
    mean = over_segments(jnp.mean, wide, segments)
    deviation = wide - along_segments(mean, y.shape, segments)
    squares = over_segments(jnp.sum, deviation * deviation, segments)
    return jnp.stack([mean, squares, over_segments(jnp.mean, deviation, segments)], -2)


def tangent(y: jax.Array, found: jax.Array, dy: jax.Array, *, segments: int) -> jax.Array:
    """The tangent of the moments ``found`` of y, linear in dy."""
    deviation = y.astype(np.float32) - along_segments(found[..., 0, :], y.shape, segments)
    if y.dtype.itemsize >= 4:
        # Corrects the rounding error of the mean, which would shift all gradients of a channel by
        # the same amount. In 16 bits it is smaller than the rounding of y.
        deviation -= along_segments(found[..., 2, :], y.shape, segments)
    wide = dy.astype(np.float32)
    of_mean = over_segments(jnp.mean, wide, segments)
    of_squares = 2 * over_segments(jnp.sum, deviation * wide, segments)
    return jnp.stack([of_mean, of_squares, jnp.zeros_like(of_mean)], -2)


def _jvp(primals, tangents, *, segments: int):
    (y,), (dy,) = primals, tangents
    found = moments_p.bind(y, segments=segments)
    if isinstance(dy, ad.Zero):
        return found, ad.Zero(jax.typeof(found).to_tangent_aval())
    # jax.checkpoint: the backward pass keeps y, not its float32 deviations.
    of_moments = jax.checkpoint(functools.partial(tangent, segments=segments), prevent_cse=False)
    return found, of_moments(y, found, dy)


def _abstract_eval(y: Any, *, segments: int) -> Any:
    return result_types(_Moments(segments), [type_of_sums(y, segments, 3)], y)[0]


def counts(rows: int, plan: native.PassPlan) -> np.ndarray:
    """The number of rows in each part of a segment (cc/cuda/normalisation/moments.h)."""
    blocks, n = -(-rows // plan.block_rows), plan.parts
    found = (blocks - np.arange(n) + n - 1) // n * plan.block_rows
    found[0] -= blocks * plan.block_rows - rows
    return found


def squares_of_all(
    deviation: jax.Array, squares: jax.Array, count: Any, shift: jax.Array, total: Any, axes: Any
) -> jax.Array:
    """M of several sets together, relative to any number r instead of their mean.

        M = sum of (M_i + count_i d_i^2) - n s^2,    d_i = mean_i - r,    s = mean - r

    Its sum does not wait for the mean, so one kernel computes both.

    Args:
        deviation, squares, count: d_i, M_i, and the number of elements of a set or of each set.
        shift, total: s and n.
        axes: the axes of the sets.
    """
    found = jnp.sum(squares + deviation * deviation * count, axes) - total * shift * shift
    return jnp.maximum(found, 0)


def _merged(by_part: jax.Array, count: np.ndarray) -> jax.Array:
    """Merges the pivots, offsets and M, (..., parts, 3, C), of parts with these row counts.

    Sums are relative to the mean of the last part, so a large mean costs no accuracy. Among n rows
    that part has n / (2 parts) or more (part 0 may have a single one), so in ``squares_of_all``
    n s^2 is at most 2 parts M: the subtraction gives M a relative error of 2 parts 2^-23 at worst,
    and of 2^-23 if the parts are alike.
    """
    total = np.float32(count.sum())
    weights = (count / count.sum()).astype(np.float32)[:, None]
    pivots, offsets, squares = (by_part[..., i, :] for i in range(3))
    reference = pivots[..., -1:, :] + offsets[..., -1:, :]
    of_part = pivots - reference + offsets
    shift = jnp.sum(of_part * weights, -2)
    found = squares_of_all(
        of_part, squares, count.astype(np.float32)[:, None], shift, total, axes=-2
    )
    reference = reference[..., 0, :]
    mean = reference + shift
    of_shift = mean - reference
    rest = (reference - (mean - of_shift)) + (shift - of_shift)  # Knuth's TwoSum: exact
    return jnp.stack([mean, found, rest], -2)


@dataclasses.dataclass(frozen=True)
class _Moments(SplitPass):
    """The partition of the array over devices."""

    segments: int

    primitive = moments_p

    def tensors(self, *shapes: Sequence[int]) -> Tensors:
        dims = Dimensions(tuple(shapes[0]), self.segments)
        return [dims.array("y")], [dims.sums("moments", 3)]

    def on_part(self, parts: Callable[[str], int], *operands: jax.Array) -> list[jax.Array]:
        if self.segments == 1:
            return self.bind(*operands)
        local = self.segments // parts("n")
        found = _Moments(local).bind(*operands)
        return found if local > 1 else [found[0][None]]

    def merged(
        self, result: jax.Array, over: tuple[str, ...], parts: int, elements: int
    ) -> jax.Array:
        return partition.merge_moments(result, over, parts, elements)


def _lower(platform: str, ctx, y, *, segments: int):
    """Lowers to one custom call and the merging of its parts, or to JAX operations."""
    (aval,) = ctx.avals_in

    def by_kernel(plan: native.PassPlan) -> Sequence[Any]:
        count = counts(aval.size // aval.shape[-1] // segments, plan)
        leading = of_segments(segments)
        by_part = ShapedArray((*leading, plan.parts, 3, aval.shape[-1]), np.dtype(np.float32))
        attributes: dict[str, Any] = {"segments": np.int64(segments)} if segments > 1 else {}
        found = custom_call.lowered(
            ctx, platform, TARGET, {"y": (y, aval)}, {"moments": by_part}, **attributes
        )
        merged = mlir.lower_fun(functools.partial(_merged, count=count), multiple_results=False)
        return merged(ctx.replace(avals_in=[by_part]), found["moments"])

    in_jax_of_segments = functools.partial(_lower_in_jax, segments=segments)
    asked = key_of_rows("moments", aval.shape, aval.dtype, segments)
    return rules.lowered_pass(
        platform, ctx, [y], asked, by_kernel, in_jax_of_segments, _Moments(segments)
    )


_lower_in_jax = mlir.lower_fun(in_jax, multiple_results=False)

ad.primitive_jvps[moments_p] = _jvp
rules.register(
    moments_p,
    shapes=_abstract_eval,
    batch=rules.batched_as(in_jax),
    lower=_lower,
    elsewhere=_lower_in_jax,
)
