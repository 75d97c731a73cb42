"""The primitive masked_sums: the sums of batch norm's backward pass, and the masked gradient.

With one or two gradients, one or two arrays y_i, and an activation's result a, all of one 16-bit
type and shape, channels last,

    dz      = (the gradient, or the sum of two, rounded) where above < a < below, else 0
    sums[0] = sum of dz,    sums[1 + i] = sum of dz * (y_i - mean_i)

On NVIDIA GPUs one kernel reads every array once; in place of a it reads a bit for each element, or
computes a from y_0, where it may. Elsewhere, under vmap and where XLA partitions the program, it is
the same in operations of JAX.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir
from jax.sharding import NamedSharding, PartitionSpec

from jaxconv._src import compat
from jaxconv._src.call import rules
from jaxconv._src.library import custom_call

TARGET = "jaxconv_masked_sums"

masked_sums_p = Primitive(TARGET)
masked_sums_p.multiple_results = True

# Channels of a thread, the most threads along the channels, and the threads of a CTA
# (cc/cuda/batch_norm/masked_sums.cu).
_VECTOR, _LANES, _THREADS = 8, 32, 256

# CTAs of a launch, two to an SM of an H200, and the fewest rows that each of their threads adds.
# The bits of the sums depend on them, so they are the same on every device.
_CTAS, _LEAST_ROWS = 264, 8


# What a kernel tells the mask from.
MaskedBy = Literal["result", "affine", "bits"]


@dataclasses.dataclass(frozen=True)
class Sums:
    """What a call computes, and of what.

    Its operands are the gradients, the arrays, their means (C,), what tells the mask, and the
    activation's result, which the operations of JAX always take the mask from. Vectors are float32.

    Attributes:
        gradients: 1 or 2.
        arrays: how many are multiplied by dz, 1 or 2.
        masked_by: "result": the activation's result. "affine": its operand, which is
            (y_0 - mean_0) * scale + offset, rounded as the gradient's type; scale and offset (C,)
            are operands. "bits": those of ``normalise_add``, uint8 (..., C / 8), an operand.
        stores: whether dz is a result, in front of the sums.
        above, below: between what the activation's result is where dz is not 0; below may be None.
    """

    gradients: int
    arrays: int
    masked_by: MaskedBy
    stores: bool
    above: float
    below: float | None

    def split(self, operands: Iterable[Any]) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
        """The operands as gradients, arrays, means, and what tells the mask."""
        given = list(operands)
        arrays, means = self.gradients, self.gradients + self.arrays
        rest = means + self.arrays
        return given[:arrays], given[arrays:means], given[means:rest], given[rest:]


def accepts(form: Sums, shape: tuple[int, ...], dtype: np.dtype) -> bool:
    """Whether a kernel computes this form of arrays of this type."""
    return (
        dtype in (jnp.bfloat16, np.float16)
        and 2 <= len(shape) <= 7
        and shape[-1] % _VECTOR == 0
        and 0 not in shape
        and (form.masked_by != "affine" or form.gradients == form.arrays == 1)
        and 1 <= form.gradients <= 2
        and 1 <= form.arrays <= 2
    )


def masked_sums(*operands: jax.Array, form: Sums) -> list[jax.Array]:
    """dz of the gradient's type, where ``form`` stores it, and the sums (1 + arrays, C)."""
    return masked_sums_p.bind(*compat.match_varying(*operands), form=form)


def in_jax(*operands: jax.Array, form: Sums) -> list[jax.Array]:
    """The same in operations of JAX."""
    gradients, arrays, means, of_mask = form.split(operands)
    gradient = functools.reduce(jnp.add, gradients)
    centred = [y.astype(np.float32) - mean for y, mean in zip(arrays, means, strict=True)]
    # XLA would compute it again from its operand, or store the mask of its own.
    result = lax.optimization_barrier(of_mask[-1])
    kept = result > jnp.asarray(form.above, result.dtype)
    if form.below is not None:
        kept = kept & (result < jnp.asarray(form.below, result.dtype))
    masked = lax.select(kept, gradient, jnp.zeros_like(gradient))
    wide = masked.astype(np.float32)
    axes = tuple(range(gradient.ndim - 1))
    sums = jnp.stack([p.sum(axes) for p in (wide, *(wide * c for c in centred))])
    return [masked, sums] if form.stores else [sums]


def _abstract_eval(*operands: Any, form: Sums) -> list[Any]:
    gradient = operands[0]
    sums = gradient.update(
        shape=(1 + form.arrays, gradient.shape[-1]),
        dtype=np.dtype(np.float32),
        weak_type=False,
        sharding=NamedSharding(gradient.sharding.mesh, PartitionSpec()),
    )
    return [gradient, sums] if form.stores else [sums]


def _jvp(primals, tangents, *, form: Sums):
    tangents = [ad.instantiate_zeros(t) if isinstance(t, ad.Zero) else t for t in tangents]
    _, out = jax.jvp(functools.partial(in_jax, form=form), tuple(primals), tuple(tangents))
    return masked_sums_p.bind(*primals, form=form), out


def _batch(operands, mapped_axes, *, form: Sums):
    mapped = jax.vmap(functools.partial(in_jax, form=form), in_axes=mapped_axes)
    results = mapped(*operands)
    return results, [0] * len(results)


def parts(shape: tuple[int, ...]) -> int:
    """Into how many parts the kernel cuts the rows of an array."""
    vectors = shape[-1] // _VECTOR
    lanes = min(vectors, _LANES)
    rows = int(np.prod(shape[:-1]))
    at_most = rows // (_LEAST_ROWS * (_THREADS // lanes))
    return max(1, min(_CTAS // -(-vectors // lanes), at_most))


def _lower(platform: str, ctx, *operands, form: Sums):
    """Lowers to one custom call and the sum of its parts, or to operations of JAX."""
    gradient = ctx.avals_in[0]
    if not accepts(form, gradient.shape, gradient.dtype) or not rules.calls_cuda(platform, ctx):
        return _lower_in_jax(ctx, *operands, form=form)
    gradients, arrays, means, of_mask = form.split(zip(operands, ctx.avals_in, strict=True))
    of_mask = of_mask if form.masked_by == "result" else of_mask[:-1]
    mask_names = {"result": ["result"], "affine": ["scale", "offset"], "bits": ["bits"]}
    given = dict(zip(mask_names[form.masked_by], of_mask, strict=True))
    for name, each in (("gradient", gradients), ("y", arrays), ("mean", means)):
        given |= zip((name, f"{name}2"), each, strict=False)
    sums = ctx.avals_out[-1]
    by_part = ShapedArray((parts(gradient.shape), *sums.shape), sums.dtype)
    found = custom_call.lowered(
        ctx,
        platform,
        TARGET,
        given,
        {"sums": by_part} | ({"masked": gradient} if form.stores else {}),
        above=np.float32(form.above),
        below=np.float32(np.nan if form.below is None else form.below),
    )
    added = mlir.lower_fun(lambda s: lax.reduce_sum(s, (0,)), multiple_results=False)(
        ctx.replace(avals_in=[by_part], avals_out=[sums]), found["sums"]
    )
    return [*[found["masked"]] * form.stores, *added]


_lower_in_jax = mlir.lower_fun(in_jax, multiple_results=True)

ad.primitive_jvps[masked_sums_p] = _jvp
rules.register(
    masked_sums_p, shapes=_abstract_eval, batch=_batch, lower=_lower, elsewhere=_lower_in_jax
)
