"""The primitive gated: a normalised array times a gate for each example and channel.

For a channels-last array y and vectors, as for a ``normalise`` call with y as its only summand, and
a float32 gate (N, C),

    u = (y - mean) * scale + offset
    r = activation(u) * gate,    the activation rounded to r's dtype

as in squeeze and excitation. The forward pass consists of JAX operations, which XLA fuses. The
purpose of the primitive is its derivative: one call of ``masked_sums`` reads the gradient g of r
and y once, and computes for each example the sums over positions

    A = sum of g activation'(u)
    B = sum of g activation'(u) (y - mean)
    G = sum of g activation(u)

All gradients but that of y follow, because the gate is constant over positions: G is the gate's,
and the sums over examples of gate A and gate B are those of offset and scale. Without the
primitive, the gradient of activation(u) is a sum of two arrays that XLA does not store, so XLA
reads g and y once for the gate and again for the vectors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from jaxconv._src import compat
from jaxconv._src.call import rules
from jaxconv._src.passes import masked_sums, normalise
from jaxconv._src.passes.masked_sums import Sums
from jaxconv._src.passes.normalise import Form
from jaxconv._src.sharding import explicit_mesh

TARGET = "jaxconv_gated"

gated_p = Primitive(TARGET)
gated_p.multiple_results = True
gated_tangent_p = Primitive(TARGET + "_tangent")
gated_tangent_p.multiple_results = True

_GATE = "gate"


def accepts(form: Form, shape: tuple[int, ...], dtype: np.dtype) -> bool:
    """Whether a kernel computes the sums of the derivative for an array of this type."""
    sums = _sums(form, shape[0])
    plain = form.summands == 1 and form.dtype == dtype
    return plain and sums is not None and masked_sums.accepts(sums, shape, dtype)


def gated(*operands: jax.Array, form: Form) -> jax.Array:
    """r in ``form.dtype``.

    Args:
        operands: y, the vectors in the order of ``form.names``, and the gate, float32 (N, C).
        form: the parameters of a ``normalise`` call with the same operands but for the gate.
    """
    return gated_p.bind(*compat.match_varying(*operands), form=form)[0]


def in_jax(*operands: jax.Array, form: Form) -> list[jax.Array]:
    """The same in JAX operations."""
    return [(_activated(operands[:-1], form) * _spread(operands)).astype(form.dtype)]


def _activated(operands: Sequence[jax.Array], form: Form) -> jax.Array:
    """The rounded activation, in float32."""
    (z,) = normalise.in_jax(*operands, form=dataclasses.replace(form, copies=1, bits=False))
    return z.astype(np.float32)


def _spread(operands: Sequence[jax.Array]) -> jax.Array:
    """The gate, the last operand, reshaped to broadcast to y, the first."""
    return normalise.spread(operands[-1], operands[0])


def _sums(form: Form, examples: int) -> Sums | None:
    """The sums of the derivative, or None if kernels do not know the activation."""
    named = normalise.derivative_with_value(form.activation)
    if named is None:
        return None
    return Sums(1, 1, "affine", False, None, None, *named, examples, values=True)


def _abstract_eval(y: Any, *others: Any, form: Form) -> list[Any]:
    return [y.update(dtype=form.dtype, weak_type=False)]


ad.primitive_transposes[gated_p] = rules.transposed_as(in_jax)
_lower = mlir.lower_fun(in_jax, multiple_results=True)
rules.register(
    gated_p,
    shapes=_abstract_eval,
    batch=rules.batched_as(in_jax),
    lower=lambda platform, ctx, *operands, form: _lower(ctx, *operands, form=form),
    elsewhere=_lower,
)


# --- differentiation ---


def _jvp(primals, tangents, *, form: Form):
    pairs = zip((*form.names, _GATE), tangents, strict=True)
    given = {name: t for name, t in pairs if not isinstance(t, ad.Zero)}
    operands = compat.match_varying(*given.values(), *primals)
    of_r = gated_tangent_p.bind(*operands, form=form, given=tuple(given))
    return gated_p.bind(*primals, form=form), of_r


def tangent_in_jax(*operands: jax.Array, form: Form, given: tuple[str, ...]) -> list[jax.Array]:
    """The tangent of r; the operands are the tangents ``given`` by name, and those of ``gated``."""
    tangents = dict(zip(given, operands[: len(given)], strict=True))
    primals = operands[len(given) :]
    of_gate = tangents.pop(_GATE, None)
    named = dict(zip(form.names, primals, strict=False))
    terms = []
    if tangents:
        linear = normalise.Tangent(
            dataclasses.replace(form, copies=1, bits=False), tuple(tangents), "operand"
        )
        kept = (named[name] for name in linear.kept)
        (dz,) = normalise.tangent_in_jax(*tangents.values(), *kept, form=linear)
        terms.append(dz.astype(np.float32) * _spread(primals))
    if of_gate is not None:
        activated = _activated(primals[:-1], form)
        terms.append(activated * normalise.spread(of_gate, primals[0]))
    return [sum(terms[1:], terms[0]).astype(form.dtype)]


def _tangent_abstract_eval(*operands: Any, form: Form, given: tuple[str, ...]) -> list[Any]:
    return _abstract_eval(*operands[len(given) :], form=form)


def _tangent_jvp(primals, tangents, *, form: Form, given: tuple[str, ...]):
    tangent = rules.tangent_of(tangent_in_jax, primals, tangents, form=form, given=given)
    return gated_tangent_p.bind(*primals, form=form, given=given), tangent


def _transpose(cotangents, *operands, form: Form, given: tuple[str, ...]):
    types = dict(zip(given, (o.aval for o in operands[: len(given)]), strict=True))
    primals = operands[len(given) :]
    others = [None] * len(primals)
    (gradient,) = cotangents
    if isinstance(gradient, ad.Zero):
        return [ad.Zero(t) for t in types.values()] + others
    named = dict(zip((*form.names, _GATE), primals, strict=True))
    found = _gradients_by_sums(gradient, named, form) if types.keys() - {"y0"} else {}
    if "y0" in types:
        of_z = gradient.astype(np.float32) * _spread(primals)
        assert form.activation is not None, "the activation whose derivative is known"
        of_u = form.activation.cotangent(normalise.operand(named, form), of_z)
        found["y0"] = normalise.times(of_u, named, 0)
    results = []
    for name, aval in types.items():
        ct = found[name]
        if ct.ndim > len(aval.shape):
            ct = ct.sum(0)  # of a vector that all examples share
        results.append(explicit_mesh.like(ct.astype(aval.dtype), aval))
    return results + others


def _gradients_by_sums(
    gradient: jax.Array, named: Mapping[str, jax.Array], form: Form
) -> dict[str, jax.Array]:
    """The gradients of the gate and of each example's vectors, (N, C), from the sums of a call."""
    y, gate = named["y0"], named[_GATE]
    sums_form = _sums(form, y.shape[0])
    assert sums_form is not None, "an activation that kernels know"
    absent = dict(mean0=0.0, scale0=1.0, offset0=0.0)
    vectors = [
        named.get(name, jnp.full(y.shape[-1:], number, np.float32))
        for name, number in absent.items()
    ]
    (sums,) = masked_sums.masked_sums(gradient, y, *vectors, form=sums_form)
    sums = sums.reshape(y.shape[0], 3, y.shape[-1])
    of_offset = gate * sums[:, 0]
    return {
        "offset0": of_offset,
        "scale0": gate * sums[:, 1],
        "mean0": -normalise.times(of_offset, named, 0),
        _GATE: sums[:, 2],
    }


ad.primitive_jvps[gated_p] = _jvp
ad.primitive_jvps[gated_tangent_p] = _tangent_jvp
ad.primitive_transposes[gated_tangent_p] = _transpose
_lower_tangent = mlir.lower_fun(tangent_in_jax, multiple_results=True)
rules.register(
    gated_tangent_p,
    shapes=_tangent_abstract_eval,
    batch=rules.batched_as(tangent_in_jax),
    lower=lambda platform, ctx, *operands, **parameters: _lower_tangent(
        ctx, *operands, **parameters
    ),
    elsewhere=_lower_tangent,
)
