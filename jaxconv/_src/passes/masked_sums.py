"""The primitive masked_sums: the sums of a normalisation's backward pass, and masked gradients.

For one or two gradients and up to two arrays y_i, all channels-last and of one type and shape, and
float32 vectors,

    g       = the gradient, or the sum of the two, rounded
    dz      = g where above < a < below, else 0; or g * activation'(u), rounded; or g
    sums[0] = sum of dz,    sums[1 + i] = sum of dz * (y_i - mean_i)

where a is the activation's result, or u = (y_0 - mean_0) * scale + offset rounded to the arrays'
type. The mask may also be given as bits. The sums are over all positions, or over the positions of
each segment of the leading axis.

For a layer whose result is multiplied by a gate (``gated``), a last row is the sum of the gradient
times activation(u). Then neither u nor dz is rounded.

On NVIDIA GPUs one kernel reads every array once, on each device its part. Elsewhere and under vmap,
JAX operations compute the same.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
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
from jaxconv._src.library import custom_call, native
from jaxconv._src.passes import derivatives
from jaxconv._src.passes.derivatives import DERIVATIVES, VALUES, times_derivative
from jaxconv._src.problem.spec import DTYPE_NAMES
from jaxconv._src.sharding import explicit_mesh
from jaxconv._src.sharding.partition import Tensors
from jaxconv._src.sharding.split_pass import Dimensions, SplitPass, result_types

TARGET = "jaxconv_masked_sums"

masked_sums_p = Primitive(TARGET)
masked_sums_p.multiple_results = True

# Channels per thread, so that their mask bits fill one byte (cc/cuda/normalisation/plan.h).
_VECTOR = 8

# The source of the mask; see ``Sums``.
MaskedBy = Literal["result", "affine", "bits", "none"]


@dataclasses.dataclass(frozen=True)
class Sums:
    """The parameters of a call.

    Its operands are the gradients, the arrays, their means, and the source of the mask. Vectors are
    float32, (C,), or (segments, C) with several segments.

    Attributes:
        gradients: the number of gradients, 1 or 2.
        arrays: the number of arrays y_i, 0 to 2.
        masked_by: "result": the activation's result, an operand. "affine": u, from the operands
            scale and offset. "bits": the bits of ``normalise_add``, uint8 (..., C / 8), an operand.
            "none": dz is the gradient.
        stores: whether dz is the first result.
        above, below: the bounds of the mask; None: no bound.
        activation: with "affine", the activation whose derivative multiplies the gradient: "relu",
            "relu6" or a name in ``DERIVATIVES``; None: a mask with the bounds above and below.
        slope: the slope of leaky_relu and elu.
        segments: the number of equal segments into which the leading axis is divided.
        values: whether the last row is the sum of the gradient times the activation's value. The
            activation is a name in ``VALUES``, with one gradient and one array.
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
    values: bool = False

    def split(self, operands: Iterable[Any]) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
        """The operands as gradients, arrays, means, and the source of the mask."""
        given = list(operands)
        arrays, means = self.gradients, self.gradients + self.arrays
        rest = means + self.arrays
        return given[:arrays], given[arrays:means], given[means:rest], given[rest:]

    @property
    def bounds(self) -> tuple[float | None, float | None]:
        """The bounds of the mask; (None, None) if there is none."""
        if self.activation in ("relu", "relu6"):
            return 0.0, 6.0 if self.activation == "relu6" else None
        return self.above, self.below

    @property
    def derivative(self) -> str | None:
        """The activation whose derivative multiplies the gradient, unless bounds give it."""
        if self.activation in ("relu", "relu6") and not self.values:
            return None
        return self.activation

    @property
    def rows(self) -> int:
        """The number of sums of each channel."""
        return 1 + self.arrays + self.values


def key(form: Sums, shape: tuple[int, ...], dtype: np.dtype) -> str | None:
    """The key of the pass, or None if no call expresses it."""
    if form.activation is not None and form.masked_by != "affine":
        return None
    words = [f"g{form.gradients}", f"y{form.arrays}"]
    words += [form.masked_by] * (form.masked_by != "none")
    words += [f"activation:{form.derivative}"] * (form.derivative is not None)
    words += ["values"] * form.values
    words += ["stores"] * form.stores
    return key_of_rows("masked_sums", shape, dtype, form.segments, words)


def accepts(form: Sums, shape: tuple[int, ...], dtype: np.dtype) -> bool:
    """Whether a kernel computes this form for arrays of this type."""
    least = 0 if form.masked_by == "none" else 1
    most = 1 if form.derivative else 2
    takes_form = (
        1 <= form.gradients <= 2
        and least <= form.arrays <= most
        and (form.derivative is None or form.derivative in (VALUES if form.values else DERIVATIVES))
    )
    if form.values:
        alone = form.gradients == 1 and form.derivative is not None and not form.stores
        takes_form = takes_form and alone
    return accepts_rows(key(form, shape, dtype), shape, takes_form)


def key_of_rows(
    name: str, shape: tuple[int, ...], dtype: np.dtype, segments: int, words: Iterable[str] = ()
) -> str | None:
    """The key of a pass over rows of channels, or None if its call does not accept the array."""
    short = DTYPE_NAMES.get(dtype.name) if jnp.issubdtype(dtype, jnp.floating) else None
    extents = all(isinstance(n, int) and n > 0 for n in shape) and 2 <= len(shape) <= 7
    if short is None or not extents or segments < 1 or shape[0] % segments:
        return None
    rows = math.prod(shape[:-1]) // segments
    sizes = [f"s{segments}", f"r{rows}", f"c{shape[-1]}"]
    return " ".join([name, short, *sizes, *words])


def accepts_rows(key: str | None, shape: tuple[int, ...], otherwise: bool = True) -> bool:
    """Whether a kernel accepts a pass.

    The plan decides. Without the CUDA library, as when lowering for another machine, ``otherwise``
    says whether kernels accept the form, and the channels must be a multiple of 8.
    """
    plan = None if key is None else rules.planned(key)
    if plan is not None:
        return plan.kernel is not None
    return key is not None and shape[-1] % _VECTOR == 0 and otherwise


def masked_sums(*operands: jax.Array, form: Sums) -> list[jax.Array]:
    """Computes dz, in the gradient's type, if ``form`` stores it, and the sums.

    Args:
        operands: gradients and arrays (..., C), float32, float16 or bfloat16; vectors, float32; in
            the order of ``Sums``.
        form: the parameters.

    Returns:
        dz if ``form.stores``, then the sums, float32: (rows, C), or (segments, rows, C) with
        several segments.
    """
    return masked_sums_p.bind(*compat.match_varying(*operands), form=form)


def in_jax(*operands: jax.Array, form: Sums) -> list[jax.Array]:
    """The same in JAX operations."""
    gradients, arrays, means, of_mask = form.split(operands)
    gradient = functools.reduce(jnp.add, gradients)
    centred = [
        y.astype(np.float32) - along_segments(mean, y.shape, form.segments)
        for y, mean in zip(arrays, means, strict=True)
    ]
    if form.values:
        assert form.activation is not None, "the activation whose values are summed"
        scale, offset = (along_segments(v, gradient.shape, form.segments) for v in of_mask)
        named, u = (form.activation, form.slope), centred[0] * scale + offset
        masked = times_derivative(*named, u, gradient)
        values = [gradient.astype(np.float32) * derivatives.value(*named, u)]
    else:
        masked, values = _masked(gradient, centred, of_mask, form), []
    wide = masked.astype(np.float32)
    products = wide, *(wide * c for c in centred), *values
    sums = [over_segments(jnp.sum, p, form.segments) for p in products]
    return [*[masked.astype(gradient.dtype)] * form.stores, jnp.stack(sums, -2)]


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
        # Makes XLA read the stored result; it would otherwise recompute it, or store the mask too.
        a = lax.optimization_barrier(of_mask[0])
    else:
        scale, offset = (along_segments(v, gradient.shape, form.segments) for v in of_mask)
        a = (centred[0] * scale + offset).astype(gradient.dtype)
    if form.derivative is not None:
        return times_derivative(form.derivative, form.slope, a, gradient).astype(gradient.dtype)
    above, below = form.bounds
    kept = a > jnp.asarray(-np.inf if above is None else above, a.dtype)
    if below is not None:
        kept = kept & (a < jnp.asarray(below, a.dtype))
    return lax.select(kept, gradient, nothing)


def along_segments(vector: jax.Array, shape: tuple[int, ...], segments: int) -> jax.Array:
    """A vector (C,) or (segments, C), reshaped to broadcast to an array's shape."""
    if vector.ndim == 1:
        return lax.expand_dims(vector, range(len(shape) - 1))
    if segments < shape[0]:
        repeated = [jnp.expand_dims(vector, 1)] * (shape[0] // segments)
        vector = explicit_mesh.merge_axes(jnp.concatenate(repeated, 1), 0, 2)
    return lax.expand_dims(vector, range(1, len(shape) - 1))


def over_segments(reduce: Callable[..., jax.Array], array: jax.Array, segments: int) -> jax.Array:
    """A reduction over all positions to (C,), or over those of each segment to (segments, C)."""
    if segments == 1:
        return reduce(array, tuple(range(array.ndim - 1)))
    split = explicit_mesh.split_axis(array, 0, (segments, array.shape[0] // segments))
    return reduce(split, tuple(range(1, split.ndim - 1)))


def _abstract_eval(*operands: Any, form: Sums) -> list[Any]:
    gradient = operands[0]
    sums = type_of_sums(gradient, form.segments, form.rows)
    results = [gradient, sums] if form.stores else [sums]
    return result_types(_MaskedSums(form), results, *operands)


def _jvp(primals, tangents, *, form: Sums):
    tangent = rules.tangent_of(in_jax, primals, tangents, form=form)
    return masked_sums_p.bind(*primals, form=form), tangent


def type_of_sums(array: Any, segments: int, count: int) -> Any:
    """The type of ``count`` sums over an array's positions, or over those of each segment."""
    return array.update(
        shape=(*of_segments(segments), count, array.shape[-1]),
        dtype=np.dtype(np.float32),
        weak_type=False,
        sharding=NamedSharding(array.sharding.mesh, PartitionSpec()),
    )


def of_segments(segments: int) -> tuple[int, ...]:
    """The leading axis of sums: one entry for each segment if there are several."""
    return (segments,) if segments > 1 else ()


def sum_of_parts(ctx, parts: Any, type_of_parts: ShapedArray, sums: ShapedArray) -> Any:
    """Lowers the sum of a kernel's partial sums over their axis, the one before the last two."""
    add = mlir.lower_fun(lambda s: lax.reduce_sum(s, (s.ndim - 3,)), multiple_results=False)
    return add(ctx.replace(avals_in=[type_of_parts], avals_out=[sums]), parts)


@dataclasses.dataclass(frozen=True)
class _MaskedSums(SplitPass):
    """The partition of the arrays over devices."""

    form: Sums

    primitive = masked_sums_p

    def tensors(self, *shapes: Sequence[int]) -> Tensors:
        form = self.form
        gradients, arrays, means, of_mask = form.split(shapes)
        dims = Dimensions(tuple(shapes[0]), form.segments, packed=form.masked_by == "bits")
        operands = [
            *(dims.array(f"gradient{i}_") for i in range(len(gradients))),
            *(dims.array(f"y{i}_") for i in range(len(arrays))),
            *(dims.vector(f"mean{i}_", shape) for i, shape in enumerate(means)),
        ]
        match form.masked_by:
            case "result":
                operands.append(dims.array("result"))
            case "bits":
                operands.append(dims.bits("bits"))
            case "affine":
                names = ("scale", "offset")
                operands += map(dims.vector, names, of_mask)
        masked = [dims.array("masked")] * form.stores
        return operands, [*masked, dims.sums("sums", form.rows)]

    def on_part(self, parts: Callable[[str], int], *operands: jax.Array) -> list[jax.Array]:
        form = self.form
        if form.segments == 1:
            return self.bind(*operands)
        local = dataclasses.replace(form, segments=form.segments // parts("n"))
        if local.segments > 1:
            return _MaskedSums(local).bind(*operands)
        gradients, arrays, means, of_mask = form.split(operands)
        vectors = [*means, *(of_mask if form.masked_by == "affine" else ())]
        rest = of_mask if form.masked_by != "affine" else []
        vectors = [v[0] if v.ndim == 2 else v for v in vectors]
        *masked, sums = _MaskedSums(local).bind(*gradients, *arrays, *vectors, *rest)
        return [*masked, sums[None]]


def _lower(platform: str, ctx, *operands, form: Sums):
    """Lowers to one custom call and the sum of its parts, or to JAX operations."""
    gradient, sums = ctx.avals_in[0], ctx.avals_out[-1]

    def by_kernel(plan: native.PassPlan) -> list[Any]:
        gradients, arrays, means, of_mask = form.split(zip(operands, ctx.avals_in, strict=True))
        names = {"result": ["result"], "affine": ["scale", "offset"], "bits": ["bits"]}
        given = dict(zip(names.get(form.masked_by, ()), of_mask, strict=True))
        for name, each in (("gradient", gradients), ("y", arrays), ("mean", means)):
            given |= zip((name, f"{name}2"), each, strict=False)
        leading = of_segments(form.segments)
        by_part = ShapedArray((*leading, plan.parts, *sums.shape[len(leading) :]), sums.dtype)
        above, below = form.bounds
        # Exported programs of earlier versions have only these two; the others are optional.
        attributes: dict[str, Any] = dict(
            above=np.float32(-np.inf if above is None else above),
            below=np.float32(np.nan if below is None else below),
        )
        if form.derivative is not None:
            attributes |= dict(activation=form.derivative, slope=np.float32(form.slope))
        if form.segments > 1:
            attributes |= dict(segments=np.int64(form.segments))
        if form.values:
            attributes |= dict(values=np.int64(1))
        found = custom_call.lowered(
            ctx,
            platform,
            TARGET,
            given,
            {"sums": by_part} | ({"masked": gradient} if form.stores else {}),
            **attributes,
        )
        added = sum_of_parts(ctx, found["sums"], by_part, sums)
        return [*[found["masked"]] * form.stores, *added]

    in_jax_of_form = functools.partial(_lower_in_jax, form=form)
    asked = key(form, gradient.shape, gradient.dtype)
    return rules.lowered_pass(
        platform, ctx, operands, asked, by_kernel, in_jax_of_form, _MaskedSums(form)
    )


_lower_in_jax = mlir.lower_fun(in_jax, multiple_results=True)

ad.primitive_jvps[masked_sums_p] = _jvp
rules.register(
    masked_sums_p,
    shapes=_abstract_eval,
    batch=rules.batched_as(in_jax),
    lower=_lower,
    elsewhere=_lower_in_jax,
)
