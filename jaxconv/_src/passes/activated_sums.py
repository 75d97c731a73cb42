"""The primitive activated_sums: sums over positions of a normalised array that is not stored.

For a channels-last array y and vectors, as for a ``normalise`` call with y as its only summand,

    u    = (y - mean) * scale + offset
    sums = sum of activation(u) over the positions of each segment of the leading axis, float32

as in squeeze and excitation. On NVIDIA GPUs one kernel reads y once, on each device its part, and
computes in float32; XLA's sums over leading axes reach about half of the memory's bandwidth.
Elsewhere and under vmap, JAX operations compute the same. No activation is rounded before the sum.

The tangent is

    sum of activation'(u) scale dy  +  doffset S + dscale T - scale dmean S,
    S = sum of activation'(u),  T = sum of activation'(u) (y - mean)

with S and T from the call itself, so the gradients of the vectors need no pass over y. The gradient
of y is elementwise, and XLA computes it in the pass that adds y's gradients.
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
from jaxconv._src.passes import normalise
from jaxconv._src.passes.derivatives import derivative
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


def key(
    form: Form, shape: tuple[int, ...], dtype: np.dtype, segments: int, derivatives: bool = False
) -> str | None:
    """The key of the pass, or None if no call expresses it."""
    named = form.named
    differentiated = normalise.derivative_with_value(form.activation)
    if named is None or form.summands != 1 or form.dtype != dtype:
        return None
    words = [f"activation:{named[0]}"]
    if derivatives:
        if differentiated is None:
            return None
        words.append(f"derivative:{differentiated[0]}")
    return key_of_rows("activated_sums", shape, dtype, segments, words)


def accepts(form: Form, shape: tuple[int, ...], dtype: np.dtype, segments: int) -> bool:
    """Whether a kernel computes the sums of this form for an array of this type."""
    return accepts_rows(key(form, shape, dtype, segments), shape)


def activated_sums(
    y: jax.Array, *vectors: jax.Array, form: Form, segments: int, derivatives: bool = False
) -> jax.Array:
    """The sums, float32: (1, C), or (segments, 1, C) with several segments.

    Args:
        y: the normalised array, float32, float16 or bfloat16.
        vectors: those of mean, scale and offset that ``form`` names, float32, (C,); with one
            segment for each example also (N, C).
        form: the parameters of a ``normalise`` call with the same operands.
        segments: the number of equal segments into which the leading axis is divided.
        derivatives: whether S and T follow as further rows.
    """
    operands = compat.match_varying(y, *vectors)
    return activated_sums_p.bind(*operands, form=form, segments=segments, derivatives=derivatives)


def in_jax(*operands: jax.Array, form: Form, segments: int, derivatives: bool) -> jax.Array:
    """The same in JAX operations.

    The activations that kernels know are computed by name, because a device's part of the array has
    another shape than the program's activation.
    """
    named = dict(zip(form.names, operands, strict=True))
    u, by_name = normalise.operand(named, form), form.named
    assert form.activation is not None, "an activation"
    z = form.activation.value(u) if by_name is None else epilogue.activate(u, *by_name)
    terms = [z.astype(np.float32)]
    if derivatives:
        known = normalise.derivative_with_value(form.activation)
        slope = _slope(u, form) if known is None else derivative(*known, u)
        terms += [slope, slope * normalise.centred(named, 0)]
    return jnp.stack([over_segments(jnp.sum, t, segments) for t in terms], -2)


def _slope(u: jax.Array, form: Form) -> jax.Array:
    """activation'(u) of the program, float32."""
    assert form.activation is not None, "an activation"
    return form.activation.cotangent(u, jnp.ones_like(u))


def _abstract_eval(*operands: Any, form: Form, segments: int, derivatives: bool) -> Any:
    call = _ActivatedSums(form, segments, derivatives)
    return result_types(call, [type_of_sums(operands[0], segments, call.rows)], *operands)[0]


def _jvp(primals, tangents, *, form: Form, segments: int, derivatives: bool):
    bound = functools.partial(activated_sums_p.bind, form=form, segments=segments)
    given = {
        name.rstrip("0"): t
        for name, t in zip(form.names, tangents, strict=True)
        if not isinstance(t, ad.Zero)
    }
    if derivatives or not given:
        found = bound(*primals, derivatives=derivatives)
        if not given:
            return found, ad.Zero(jax.typeof(found).to_tangent_aval())
        plain = functools.partial(in_jax, form=form, segments=segments, derivatives=True)
        return found, rules.tangent_of(plain, primals, tangents)
    found = bound(*primals, derivatives=bool(given.keys() - {"y"}))
    terms = []
    if "y" in given:
        # jax.checkpoint: the backward pass keeps y, not the float32 derivative of the activation.
        of_array = functools.partial(_tangent_by_array, form=form, segments=segments)
        of_array = jax.checkpoint(of_array, prevent_cse=False)
        terms.append(of_array(given["y"], *primals))
    if "mean" in given:
        named = dict(zip(form.names, primals, strict=True))
        terms.append(-found[..., 1, :] * normalise.times(given["mean"], named, 0))
    if "scale" in given:
        terms.append(found[..., 2, :] * given["scale"])
    if "offset" in given:
        terms.append(found[..., 1, :] * given["offset"])
    sums, total = found[..., :1, :], functools.reduce(jnp.add, terms)
    return sums, total if total.ndim == sums.ndim else jnp.expand_dims(total, -2)


def _tangent_by_array(dy: jax.Array, *operands: jax.Array, form: Form, segments: int) -> jax.Array:
    named = dict(zip(form.names, operands, strict=True))
    factor = normalise.times(_slope(normalise.operand(named, form), form), named, 0)
    return over_segments(jnp.sum, factor * dy.astype(np.float32), segments)


@dataclasses.dataclass(frozen=True)
class _ActivatedSums(SplitPass):
    """The partition of the array over devices."""

    form: Form
    segments: int
    derivatives: bool

    primitive = activated_sums_p

    @property
    def rows(self) -> int:
        return 3 if self.derivatives else 1

    def tensors(self, *shapes: Sequence[int]) -> Tensors:
        dims = Dimensions(tuple(shapes[0]), self.segments)
        named = zip(self.form.names[1:], shapes[1:], strict=True)
        vectors = [dims.vector(name, shape) for name, shape in named]
        return [dims.array("y"), *vectors], [dims.sums("sums", self.rows)]

    def on_part(self, parts: Callable[[str], int], *operands: jax.Array) -> list[jax.Array]:
        if self.segments == 1:
            return self.bind(*operands)
        local = dataclasses.replace(self, segments=self.segments // parts("n"))
        if local.segments > 1:
            return local.bind(*operands)
        y, *vectors = operands
        vectors = [v[0] if v.ndim == 2 else v for v in vectors]
        (sums,) = local.bind(y, *vectors)
        return [sums[None]]


def _lower(platform: str, ctx, *operands, form: Form, segments: int, derivatives: bool):
    """Lowers to one custom call and the sum of its parts, or to JAX operations."""
    y, sums = ctx.avals_in[0], ctx.avals_out[0]
    split = _ActivatedSums(form, segments, derivatives)

    def by_kernel(plan: native.PassPlan) -> Sequence[Any]:
        leading = of_segments(segments)
        by_part = ShapedArray((*leading, plan.parts, split.rows, y.shape[-1]), np.dtype(np.float32))
        names = [name.rstrip("0") for name in form.names]
        given = dict(zip(names, zip(operands, ctx.avals_in, strict=True), strict=True))
        named = form.named
        of_call = normalise.derivative_with_value(form.activation)
        assert named is not None, "a plan of a pass with an activation"
        attributes: dict[str, Any] = dict(activation=named[0], slope=np.float32(named[1]))
        # Exported programs of earlier versions lack the following ones.
        if segments > 1:
            attributes |= dict(segments=np.int64(segments))
        if derivatives:
            assert of_call is not None, "a plan of a pass with a derivative"
            attributes |= dict(derivative=of_call[0])
        found = custom_call.lowered(ctx, platform, TARGET, given, {"sums": by_part}, **attributes)
        return sum_of_parts(ctx, found["sums"], by_part, sums)

    plain = functools.partial(_lower_in_jax, form=form, segments=segments, derivatives=derivatives)
    asked = key(form, y.shape, y.dtype, segments, derivatives)
    return rules.lowered_pass(platform, ctx, operands, asked, by_kernel, plain, split)


_lower_in_jax = mlir.lower_fun(in_jax, multiple_results=False)

ad.primitive_jvps[activated_sums_p] = _jvp
rules.register(
    activated_sums_p,
    shapes=_abstract_eval,
    batch=rules.batched_as(in_jax),
    lower=_lower,
    elsewhere=_lower_in_jax,
)
