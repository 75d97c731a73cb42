"""The primitive activated_sums: sums over positions of a normalised array that is not stored.

For a channels-last array y and z, the result of a ``normalise`` call with y as its only summand,

    z    = activation((y - mean) * scale + offset)
    sums = sum of z over the positions of each segment of the leading axis, float32

as in squeeze and excitation. On NVIDIA GPUs one kernel reads y once, on each device its part, and
computes z in float32; XLA's sums over leading axes reach about half of the memory's bandwidth. The
derivative is that of a sum of z. Elsewhere and under vmap, JAX operations sum z, which is rounded
to its dtype.
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

from jaxconv._src import compat
from jaxconv._src.call import rules
from jaxconv._src.library import custom_call, native
from jaxconv._src.passes.masked_sums import (
    accepts_rows,
    key_of_rows,
    of_segments,
    over_segments,
    sum_of_parts,
    type_of_sums,
)
from jaxconv._src.passes.normalise import Form
from jaxconv._src.problem import epilogue
from jaxconv._src.sharding.partition import Tensors
from jaxconv._src.sharding.split_pass import Dimensions, SplitPass, result_types

TARGET = "jaxconv_activated_sums"

activated_sums_p = Primitive(TARGET)


def key(form: Form, shape: tuple[int, ...], dtype: np.dtype, segments: int) -> str | None:
    """The key of the pass, or None if no call expresses it."""
    named = _activation(form)
    if named is None or form.summands != 1 or form.dtype != dtype:
        return None
    return key_of_rows("activated_sums", shape, dtype, segments, [f"activation:{named[0]}"])


def _activation(form: Form) -> tuple[str, float] | None:
    """The activation's name in ``epilogue.ACTIVATIONS`` and its slope, or None."""
    if form.activation is None or form.activation.activation is None:
        return None
    name, slope = epilogue.parse_activation(form.activation.activation)
    return None if name is None else (name, slope)


def accepts(form: Form, shape: tuple[int, ...], dtype: np.dtype, segments: int) -> bool:
    """Whether a kernel computes the sums of this form for an array of this type."""
    return accepts_rows(key(form, shape, dtype, segments), shape)


def activated_sums(
    z: jax.Array, y: jax.Array, *vectors: jax.Array, form: Form, segments: int
) -> jax.Array:
    """The sums, float32: (1, C), or (segments, 1, C) with several segments.

    Args:
        z: the result of ``normalise(y, *vectors, form=form)``; a kernel does not read it.
        y: the normalised array, float32, float16 or bfloat16.
        vectors: those of mean, scale and offset that ``form`` names, float32, (C,); with one
            segment for each example also (N, C).
        form: the parameters of the ``normalise`` call.
        segments: the number of equal segments into which the leading axis is divided.
    """
    operands = compat.match_varying(z, y, *vectors)
    return activated_sums_p.bind(*operands, form=form, segments=segments)


def in_jax(z: jax.Array, *operands: jax.Array, form: Form, segments: int) -> jax.Array:
    """The same in JAX operations."""
    return over_segments(jnp.sum, z.astype(np.float32), segments)[..., None, :]


def _abstract_eval(*operands: Any, form: Form, segments: int) -> Any:
    sums = type_of_sums(operands[1], segments, 1)
    return result_types(_ActivatedSums(form, segments), [sums], *operands)[0]


def _jvp(primals, tangents, *, form: Form, segments: int):
    sums = activated_sums_p.bind(*primals, form=form, segments=segments)
    dz = tangents[0]
    if isinstance(dz, ad.Zero):
        return sums, ad.Zero(jax.typeof(sums).to_tangent_aval())
    return sums, in_jax(dz, form=form, segments=segments)


@dataclasses.dataclass(frozen=True)
class _ActivatedSums(SplitPass):
    """The partition of the arrays over devices."""

    form: Form
    segments: int

    primitive = activated_sums_p

    def tensors(self, *shapes: Sequence[int]) -> Tensors:
        dims = Dimensions(tuple(shapes[0]), self.segments)
        named = zip(self.form.names[1:], shapes[2:], strict=True)
        vectors = [dims.vector(name, shape) for name, shape in named]
        return [dims.array("z"), dims.array("y"), *vectors], [dims.sums("sums", 1)]

    def on_part(self, parts: Callable[[str], int], *operands: jax.Array) -> list[jax.Array]:
        if self.segments == 1:
            return self.bind(*operands)
        local = self.segments // parts("n")
        if local > 1:
            return _ActivatedSums(self.form, local).bind(*operands)
        z, y, *vectors = operands
        vectors = [v[0] if v.ndim == 2 else v for v in vectors]
        (sums,) = _ActivatedSums(self.form, local).bind(z, y, *vectors)
        return [sums[None]]


def _lower(platform: str, ctx, *operands, form: Form, segments: int):
    """Lowers to one custom call and the sum of its parts, or to JAX operations."""
    y, sums = ctx.avals_in[1], ctx.avals_out[0]

    def by_kernel(plan: native.PassPlan) -> Sequence[Any]:
        leading = of_segments(segments)
        by_part = ShapedArray((*leading, plan.parts, 1, y.shape[-1]), np.dtype(np.float32))
        names = [name.rstrip("0") for name in form.names]
        of_call = zip(operands[1:], ctx.avals_in[1:], strict=True)
        given = dict(zip(names, of_call, strict=True))
        named = _activation(form)
        assert named is not None, "a plan of a pass with an activation"
        attributes: dict[str, Any] = dict(activation=named[0], slope=np.float32(named[1]))
        if segments > 1:
            attributes |= dict(segments=np.int64(segments))
        found = custom_call.lowered(ctx, platform, TARGET, given, {"sums": by_part}, **attributes)
        return sum_of_parts(ctx, found["sums"], by_part, sums)

    plain = functools.partial(_lower_in_jax, form=form, segments=segments)
    asked = key(form, y.shape, y.dtype, segments)
    return rules.lowered_pass(
        platform, ctx, operands, asked, by_kernel, plain, _ActivatedSums(form, segments)
    )


_lower_in_jax = mlir.lower_fun(in_jax, multiple_results=False)

ad.primitive_jvps[activated_sums_p] = _jvp
rules.register(
    activated_sums_p,
    shapes=_abstract_eval,
    batch=rules.batched_as(in_jax),
    lower=_lower,
    elsewhere=_lower_in_jax,
)
