"""The primitive masked_sums: the sums of a normalisation's backward pass, and the masked gradient.

With one or two gradients and up to two arrays y_i, all of one type and shape, channels last, and
float32 vectors,

    g       = the gradient, or the sum of two, rounded
    dz      = g where above < a < below, else 0; or g * activation'(u), rounded; or g
    sums[0] = sum of dz,    sums[1 + i] = sum of dz * (y_i - mean_i)

The mask's a is an activation's result, or u = (y_0 - mean_0) * scale + offset, rounded as the
arrays' type, or bits tell the mask. The sums are over all positions, or over those of each segment
of the leading axis.

On NVIDIA GPUs one kernel reads every array once. Elsewhere, under vmap and where XLA partitions the
program, it is the same in operations of JAX.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
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
from jaxconv._src.passes.derivatives import DERIVATIVES, derivative

TARGET = "jaxconv_masked_sums"

masked_sums_p = Primitive(TARGET)
masked_sums_p.multiple_results = True

# Channels of a thread, the most threads along the channels, and the threads of a CTA
# (cc/cuda/batch_norm/plan.h).
_VECTOR, _LANES, _THREADS = 8, 32, 256

# CTAs of a launch, of one segment and of several, and the fewest rows that each of their threads
# adds. The bits of the sums depend on them, so they are the same on every device.
_CTAS, _CTAS_OF_SEGMENTS, _LEAST_ROWS = 264, 1056, 8


# What tells the mask.
MaskedBy = Literal["result", "affine", "bits", "none"]


@dataclasses.dataclass(frozen=True)
class Sums:
    """What a call computes, and of what.

    Its operands are the gradients, the arrays, their means, and what tells the mask. Vectors are
    float32, (C,), or (segments, C) where there are several segments.

    Attributes:
        gradients: 1 or 2.
        arrays: how many are multiplied by dz, 0 to 2.
        masked_by: "result": the activation's result, an operand. "affine": u, by the operands scale
            and offset. "bits": those of ``normalise_add``, uint8 (..., C / 8), an operand. "none":
            dz is the gradient.
        stores: whether dz is a result, in front of the sums.
        above, below: between what a is where dz is not 0; None: no bound.
        activation: with "affine", the activation whose derivative the gradient is multiplied by, of
            ``DERIVATIVES``, "relu" or "relu6"; None: a mask by above and below.
        slope: of leaky_relu and elu.
        segments: of the leading axis, evenly.
    """

    gradients: int
    arrays: int
    masked_by: MaskedBy
    stores: bool
    above: float | None
    below: float | None
    activation: str | None = None
    slope: float = 0.0
    segments: int = 1

    def split(self, operands: Iterable[Any]) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
        """The operands as gradients, arrays, means, and what tells the mask."""
        given = list(operands)
        arrays, means = self.gradients, self.gradients + self.arrays
        rest = means + self.arrays
        return given[:arrays], given[arrays:means], given[means:rest], given[rest:]

    @property
    def bounds(self) -> tuple[float | None, float | None]:
        """Those of the mask, where it is one."""
        if self.activation in ("relu", "relu6"):
            return 0.0, 6.0 if self.activation == "relu6" else None
        return self.above, self.below

    @property
    def derivative(self) -> str | None:
        """The activation whose derivative takes the place of a mask."""
        return None if self.activation in ("relu", "relu6") else self.activation


def accepts(form: Sums, shape: tuple[int, ...], dtype: np.dtype) -> bool:
    """Whether a kernel computes this form of arrays of this type."""
    least = 0 if form.masked_by == "none" else 1
    most = 1 if form.derivative else 2
    return (
        accepts_rows(shape, dtype, form.segments)
        and 1 <= form.gradients <= 2
        and (least <= form.arrays <= most)
        and (form.activation is None or form.masked_by == "affine")
        and (form.derivative is None or form.derivative in DERIVATIVES)
    )


def accepts_rows(shape: tuple[int, ...], dtype: np.dtype, segments: int = 1) -> bool:
    """Whether the kernels over rows of channels take an array."""
    return (
        dtype in (jnp.bfloat16, np.float16, np.float32)
        and 2 <= len(shape) <= 7
        and shape[-1] % _VECTOR == 0
        and 0 not in shape
        and segments >= 1
        and shape[0] % segments == 0
    )


def masked_sums(*operands: jax.Array, form: Sums) -> list[jax.Array]:
    """dz of the gradient's type, where ``form`` stores it, and the sums.

    They are (1 + arrays, C), or (segments, 1 + arrays, C) where there are several segments.
    """
    return masked_sums_p.bind(*compat.match_varying(*operands), form=form)


def in_jax(*operands: jax.Array, form: Sums) -> list[jax.Array]:
    """The same in operations of JAX."""
    gradients, arrays, means, of_mask = form.split(operands)
    gradient = functools.reduce(jnp.add, gradients)
    centred = [
        y.astype(np.float32) - along_segments(mean, y.shape, form.segments)
        for y, mean in zip(arrays, means, strict=True)
    ]
    masked = _masked(gradient, centred, of_mask, form)
    wide = masked.astype(np.float32)
    sums = [over_segments(jnp.sum, p, form.segments) for p in (wide, *(wide * c for c in centred))]
    return [*[masked] * form.stores, jnp.stack(sums, -2)]


def _masked(
    gradient: jax.Array, centred: list[jax.Array], of_mask: list[jax.Array], form: Sums
) -> jax.Array:
    if form.masked_by == "none":
        return gradient
    nothing = jnp.zeros_like(gradient)
    if form.masked_by == "bits":
        channels = gradient.shape[-1]
        kept = jnp.unpackbits(of_mask[0], axis=-1, count=channels, bitorder="little")
        return lax.select(kept.astype(bool), gradient, nothing)
    if form.masked_by == "result":
        # XLA would compute it again from its operand, or store the mask of its own.
        a = lax.optimization_barrier(of_mask[0])
    else:
        scale, offset = (along_segments(v, gradient.shape, form.segments) for v in of_mask)
        a = (centred[0] * scale + offset).astype(gradient.dtype)
    if form.derivative is not None:
        factor = derivative(form.derivative, form.slope, a)
        return (gradient.astype(np.float32) * factor).astype(gradient.dtype)
    above, below = form.bounds
    kept = a > jnp.asarray(-np.inf if above is None else above, a.dtype)
    if below is not None:
        kept = kept & (a < jnp.asarray(below, a.dtype))
    return lax.select(kept, gradient, nothing)


def along_segments(vector: jax.Array, shape: tuple[int, ...], segments: int) -> jax.Array:
    """A vector (C,) or (segments, C), to be broadcast to an array's shape."""
    if vector.ndim == 1:
        return lax.expand_dims(vector, range(len(shape) - 1))
    vector = jnp.repeat(vector, shape[0] // segments, 0, total_repeat_length=shape[0])
    return lax.expand_dims(vector, range(1, len(shape) - 1))


def over_segments(reduce: Callable[..., jax.Array], array: jax.Array, segments: int) -> jax.Array:
    """A reduction over positions, (C,), or over those of each segment, (segments, C)."""
    if segments == 1:
        return reduce(array, tuple(range(array.ndim - 1)))
    split = array.reshape((segments, array.shape[0] // segments, *array.shape[1:]))
    return reduce(split, tuple(range(1, split.ndim - 1)))


def _abstract_eval(*operands: Any, form: Sums) -> list[Any]:
    gradient = operands[0]
    sums = gradient.update(
        shape=(*of_segments(form.segments), 1 + form.arrays, gradient.shape[-1]),
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


def of_segments(segments: int) -> tuple[int, ...]:
    """The leading extents of what is formed for each segment."""
    return (segments,) if segments > 1 else ()


def threads(channels: int) -> tuple[int, int]:
    """How many slices of channels have CTAs of their own, and the rows of a CTA's threads."""
    vectors = channels // _VECTOR
    lanes = min(vectors, _LANES)
    return -(-vectors // lanes), _THREADS // lanes


def parts(shape: tuple[int, ...], segments: int = 1) -> int:
    """Into how many parts the kernels cut the rows of a segment of an array."""
    slices, steps = threads(shape[-1])
    rows = int(np.prod(shape[:-1])) // segments
    ctas = _CTAS if segments == 1 else _CTAS_OF_SEGMENTS
    return max(1, min(ctas // (slices * segments), rows // (_LEAST_ROWS * steps)))


def _lower(platform: str, ctx, *operands, form: Sums):
    """Lowers to one custom call and the sum of its parts, or to operations of JAX."""
    gradient = ctx.avals_in[0]
    if not accepts(form, gradient.shape, gradient.dtype) or not rules.calls_cuda(platform, ctx):
        return _lower_in_jax(ctx, *operands, form=form)
    gradients, arrays, means, of_mask = form.split(zip(operands, ctx.avals_in, strict=True))
    mask_names = {"result": ["result"], "affine": ["scale", "offset"], "bits": ["bits"], "none": []}
    given = dict(zip(mask_names[form.masked_by], of_mask, strict=True))
    for name, each in (("gradient", gradients), ("y", arrays), ("mean", means)):
        given |= zip((name, f"{name}2"), each, strict=False)
    sums = ctx.avals_out[-1]
    leading = of_segments(form.segments)
    shape = (*leading, parts(gradient.shape, form.segments), *sums.shape[len(leading) :])
    by_part = ShapedArray(shape, sums.dtype)
    above, below = form.bounds
    # Programs of earlier versions have the first two alone.
    attributes: dict[str, Any] = dict(
        above=np.float32(-np.inf if above is None else above),
        below=np.float32(np.nan if below is None else below),
    )
    if form.derivative is not None:
        attributes |= dict(activation=form.derivative, slope=np.float32(form.slope))
    if form.segments > 1:
        attributes |= dict(segments=np.int64(form.segments))
    found = custom_call.lowered(
        ctx,
        platform,
        TARGET,
        given,
        {"sums": by_part} | ({"masked": gradient} if form.stores else {}),
        **attributes,
    )
    added = mlir.lower_fun(lambda s: lax.reduce_sum(s, (len(leading),)), multiple_results=False)(
        ctx.replace(avals_in=[by_part], avals_out=[sums]), found["sums"]
    )
    return [*[found["masked"]] * form.stores, *added]


_lower_in_jax = mlir.lower_fun(in_jax, multiple_results=True)

ad.primitive_jvps[masked_sums_p] = _jvp
rules.register(
    masked_sums_p, shapes=_abstract_eval, batch=_batch, lower=_lower, elsewhere=_lower_in_jax
)
