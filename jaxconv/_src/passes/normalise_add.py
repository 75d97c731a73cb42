"""The primitive normalise_add: the end of a residual block in training, with a mask.

For two channels-last arrays y_0, y_1 of one type and shape, and float32 vectors,

    n_i    = (y_i - mean_i) * scale_i + offset_i, computed in float32 and rounded
    result = n_0 + n_1, or n_0 + y_1, rounded and clipped to [0, below]
    bits   = 0 < result < below, 8 channels per byte, the first channel in the lowest bit

The backward pass reads the mask from the bits (``masked_sums``), which take 1/16 of the bytes of a
16-bit result. On NVIDIA GPUs one kernel reads every array once, on each device its part. Elsewhere
and under vmap, JAX operations compute the same.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir
from jax.sharding import NamedSharding

from jaxconv._src import compat
from jaxconv._src.call import rules
from jaxconv._src.library import custom_call, native
from jaxconv._src.passes.masked_sums import accepts_rows, key_of_rows
from jaxconv._src.sharding.explicit_mesh import given_partitions, partition_spec
from jaxconv._src.sharding.partition import Tensors
from jaxconv._src.sharding.split_pass import Dimensions, SplitPass, result_types

TARGET = "jaxconv_normalise_add"

normalise_add_p = Primitive(TARGET)
normalise_add_p.multiple_results = True

# Channels per thread, so that their mask bits fill one byte (cc/cuda/normalisation/plan.h).
_VECTOR = 8


@dataclasses.dataclass(frozen=True)
class BlockEnd:
    """The parameters of a call.

    Its operands are two arrays and, for each normalised one, mean, scale and offset (C,).

    Attributes:
        arrays: the number of normalised arrays: 1 (only y_0) or 2.
        below: the upper bound of the result, or None.
    """

    arrays: int
    below: float | None


def key(form: BlockEnd, shape: tuple[int, ...], dtype: np.dtype) -> str | None:
    """The key of the pass, or None if no call expresses it."""
    if form.below is not None and float(np.asarray(form.below, dtype)) != form.below:
        return None
    words = [f"y{form.arrays}", *["bounded"] * (form.below is not None)]
    return key_of_rows("normalise_add", shape, dtype, 1, words)


def accepts(form: BlockEnd, shape: tuple[int, ...], dtype: np.dtype) -> bool:
    """Whether a kernel computes this form for arrays of this type."""
    return accepts_rows(key(form, shape, dtype), shape, 1 <= form.arrays <= 2)


def bits_type(array: Any) -> Any:
    """The type of the bits for an array: uint8 (..., C / 8), sharded like the array if possible."""
    *spec, of_channels = given_partitions(array)
    mesh, channels = array.sharding.mesh, array.shape[-1]
    parts = math.prod(mesh.shape[axis] for axis in of_channels)
    split = partition_spec((*spec, () if channels % (_VECTOR * parts) else of_channels))
    return array.update(
        shape=(*array.shape[:-1], -(-array.shape[-1] // _VECTOR)),
        dtype=np.dtype(np.uint8),
        weak_type=False,
        sharding=NamedSharding(mesh, split),
    )


def normalise_add(*operands: jax.Array, form: BlockEnd) -> list[jax.Array]:
    """The result, in the arrays' type, and the bits (..., C / 8), uint8."""
    return normalise_add_p.bind(*compat.match_varying(*operands), form=form)


def in_jax(*operands: jax.Array, form: BlockEnd) -> list[jax.Array]:
    """The same in JAX operations."""
    result = _result(*operands, form=form)
    inside = result > 0
    if form.below is not None:
        inside = inside & (result < form.below)
    return [result, jnp.packbits(inside, axis=-1, bitorder="little")]


def _result(*operands: jax.Array, form: BlockEnd) -> jax.Array:
    first, second, *vectors = operands

    def normalised(y: jax.Array, mean: jax.Array, scale: jax.Array, offset: jax.Array) -> jax.Array:
        return ((y.astype(np.float32) - mean) * scale + offset).astype(y.dtype)

    other = normalised(second, *vectors[3:]) if form.arrays == 2 else second
    total = normalised(first, *vectors[:3]) + other
    if form.below is None:
        return jax.nn.relu(total)
    return lax.clamp(np.zeros((), total.dtype), total, np.asarray(form.below, total.dtype))


def _abstract_eval(*operands: Any, form: BlockEnd) -> list[Any]:
    results = [operands[0].update(weak_type=False), bits_type(operands[0])]
    return result_types(_NormaliseAdd(form), results, *operands)


def _jvp(primals, tangents, *, form: BlockEnd):
    tangent = rules.tangent_of(_result, primals, tangents, form=form)
    result, bits = normalise_add_p.bind(*primals, form=form)
    return [result, bits], [tangent, ad.Zero(jax.typeof(bits).to_tangent_aval())]


@dataclasses.dataclass(frozen=True)
class _NormaliseAdd(SplitPass):
    """The partition of the arrays over devices."""

    form: BlockEnd

    primitive = normalise_add_p

    def tensors(self, *shapes: Sequence[int]) -> Tensors:
        dims = Dimensions(tuple(shapes[0]), packed=True)
        arrays = [dims.array("first"), dims.array("second")]
        vectors = [dims.vector(f"vector{i}_", shape) for i, shape in enumerate(shapes[2:])]
        return [*arrays, *vectors], [dims.array("result"), dims.bits("bits")]


def _lower(platform: str, ctx, *operands, form: BlockEnd):
    """Lowers to one custom call, or to operations of JAX."""
    y = ctx.avals_in[0]

    def by_kernel(_: native.PassPlan) -> list[Any]:
        second = "y2" if form.arrays == 2 else "shortcut"
        names = ("y", second, "mean", "scale", "offset", "mean2", "scale2", "offset2")
        result, bits = ctx.avals_out
        found = custom_call.lowered(
            ctx,
            platform,
            TARGET,
            dict(zip(names, zip(operands, ctx.avals_in, strict=True), strict=False)),
            {"result": result, "bits": bits},
            below=np.float32(np.nan if form.below is None else form.below),
        )
        return [found["result"], found["bits"]]

    in_jax_of_form = functools.partial(_lower_in_jax, form=form)
    asked = key(form, y.shape, y.dtype)
    return rules.lowered_pass(
        platform, ctx, operands, asked, by_kernel, in_jax_of_form, _NormaliseAdd(form)
    )


_lower_in_jax = mlir.lower_fun(in_jax, multiple_results=True)

ad.primitive_jvps[normalise_add_p] = _jvp
rules.register(
    normalise_add_p,
    shapes=_abstract_eval,
    batch=rules.batched_as(in_jax),
    lower=_lower,
    elsewhere=_lower_in_jax,
)
