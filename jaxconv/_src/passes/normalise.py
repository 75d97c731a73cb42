"""The primitive normalise: a centred affine function of arrays, a shortcut, an activation.

For one or two arrays y_i, channels last, and float32 vectors over channels, (C,) or (N, C) with a
row per example,

    n_i = (y_i - mean_i) * scale_i + offset_i
    t   = n_0, or n_0 + n_1, or n_0 + shortcut       summands rounded as y_0
    z   = activation(t)

in float32. The main purpose of the primitive is its derivative: if the gradients of z are stored,
one call of ``masked_sums`` computes all sums of the backward pass, including the activation's
derivative, and reads the gradients and y_i once.

The forward pass consists of JAX operations, which XLA fuses. XLA's pass over 16 bits with an
exponential is bound by instructions: there a kernel computes z on NVIDIA GPUs, if z is stored.

z may be returned several times, once for each reader, so that the call of ``masked_sums`` adds the
readers' gradients. If a shortcut is added and the derivative of the activation is a mask, the
forward pass writes the mask as bits (``normalise_add``).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from jaxconv._src import compat
from jaxconv._src.call import rules
from jaxconv._src.library import custom_call, native
from jaxconv._src.passes import masked_sums, normalise_add
from jaxconv._src.passes.derivatives import VALUES
from jaxconv._src.passes.masked_sums import MaskedBy, Sums, accepts_rows, key_of_rows
from jaxconv._src.passes.normalise_add import BlockEnd
from jaxconv._src.problem import epilogue
from jaxconv._src.sharding import explicit_mesh
from jaxconv._src.sharding.partition import Tensors
from jaxconv._src.sharding.split_pass import Dimensions, SplitPass

# The vectors of a summand, in the order of the operands.
VECTORS = ("mean", "scale", "offset")

TARGET = "jaxconv_normalise"

normalise_p = Primitive(TARGET)
normalise_p.multiple_results = True
normalise_tangent_p = Primitive(TARGET + "_tangent")
normalise_tangent_p.multiple_results = True


class Activation(Protocol):
    """An elementwise function of a program.

    Attributes:
        named: its name and slope if ``masked_sums`` can differentiate it, else None.
        mask: two bounds; the derivative is 1 between them, and 0 at the bounds and beyond. None if
            the derivative is no such mask. The second bound may be None.
        activation: the activation of an epilogue with the same values, or None.
    """

    @property
    def named(self) -> tuple[str, float] | None: ...

    @property
    def mask(self) -> tuple[float, float | None] | None: ...

    @property
    def activation(self) -> epilogue.Activation: ...

    @property
    def clips(self) -> bool:
        """Whether its values are those of a clip to the mask's bounds that keeps NaN."""

    def value(self, t: jax.Array) -> jax.Array:
        """The function of t, computed as in the program."""

    def tangent(self, value: jax.Array, dt: jax.Array) -> jax.Array:
        """The derivative at t times dt, in dt's dtype."""

    def cotangent(self, value: jax.Array, dz: jax.Array) -> jax.Array:
        """The same for dz; also works for functions with a reverse-mode derivative only."""


def derivative_with_value(act: Activation | None) -> tuple[str, float] | None:
    """The name in ``VALUES`` and the slope of a function's derivative.

    None unless kernels compute the function's value as well as this derivative.
    """
    if act is None or act.activation is None:
        return None
    known = {(0.0, None): ("relu", 0.0), (0.0, 6.0): ("relu6", 0.0)}
    found = act.named if act.mask is None else known.get(act.mask)
    name, slope = epilogue.parse_activation(act.activation)
    if found is None or VALUES.get(found[0]) != name:
        return None
    return found if name != "leaky_relu" or np.float32(found[1]) == np.float32(slope) else None


@dataclasses.dataclass(frozen=True)
class Form:
    """The parameters of a call.

    Its operands are the arrays, the shortcut, and for each array those of mean, scale and offset
    that are not 0, 1 and 0.

    Attributes:
        vectors: the names of the vectors of each normalised array (one or two arrays).
        shortcut: whether an unnormalised array is added.
        activation: the function applied to the sum, or None.
        dtype: the dtype of z.
        copies: how often z is returned.
        stored: whether the arrays and the gradients of z are stored in any case.
        twice: whether the backward pass computes the gradient of t once for its sums and once for
            the arrays. XLA would store a gradient that both read, in float32.
        bits: whether the mask is a result, uint8 (..., C / 8).
    """

    vectors: tuple[tuple[str, ...], ...]
    shortcut: bool
    activation: Activation | None
    dtype: np.dtype
    copies: int = 1
    stored: bool = False
    twice: bool = False
    bits: bool = False

    @property
    def arrays(self) -> int:
        return len(self.vectors)

    @property
    def summands(self) -> int:
        return self.arrays + self.shortcut

    @property
    def names(self) -> tuple[str, ...]:
        """The operands' names, in order."""
        arrays = tuple(f"y{i}" for i in range(self.arrays)) + ("shortcut",) * self.shortcut
        return arrays + tuple(f"{v}{i}" for i, of in enumerate(self.vectors) for v in of)

    @property
    def named(self) -> tuple[str, float] | None:
        """The activation's name in ``epilogue.ACTIVATIONS`` and its slope, or None."""
        act = None if self.activation is None else self.activation.activation
        name, slope = epilogue.parse_activation(act)
        return None if name is None else (name, slope)

    @property
    def block_end(self) -> BlockEnd | None:
        """The call that computes z and the bits of a mask, or None."""
        act = self.activation
        if act is None or not act.clips or act.mask is None or act.mask[0] != 0:
            return None
        return BlockEnd(self.arrays, act.mask[1]) if self.summands == 2 else None


@dataclasses.dataclass(frozen=True)
class Tangent:
    """The parameters of a linear call: the tangents of z.

    Its operands are the given tangents, by the names in ``Form.names``, and their factors: arrays,
    vectors, and the source of the activation's derivative.

    Attributes:
        form: the differentiated function.
        given: the names of the operands with a tangent.
        source: the source of the activation's derivative: "bits" of the mask, the "result" z, the
            recomputed "operand" t, or "nothing".
    """

    form: Form
    given: tuple[str, ...]
    source: Literal["bits", "result", "operand", "nothing"]

    @property
    def kept(self) -> tuple[str, ...]:
        """The names of the operands after the tangents: the factors of the tangents.

        At least one operand, tangent or factor, has the arrays' shape.
        """
        needed = set(self.form.names) if self.source == "operand" else set()
        for i in range(self.form.arrays):
            if f"scale{i}" in self.given:
                needed |= {f"y{i}", f"mean{i}"}
            if {f"y{i}", f"mean{i}"} & set(self.given):
                needed.add(f"scale{i}")
        needed &= set(self.form.names)
        if not {"y0", "y1", "shortcut"} & (needed | set(self.given)):
            needed.add("y0")
        stored = (self.source,) if self.source in ("bits", "result") else ()
        return tuple(n for n in self.form.names if n in needed) + stored

    @property
    def sums(self) -> bool:
        """Whether a vector has a tangent."""
        return any(name[:-1] in ("mean", "scale", "offset") for name in self.given)


def normalise(*operands: jax.Array, form: Form) -> list[jax.Array]:
    """z in ``form.dtype``, ``form.copies`` times; then the bits, uint8 (..., C / 8), if asked for.

    Args:
        operands: the arrays, channels-last, and the float32 vectors, in the order of
            ``form.names``.
        form: the parameters.
    """
    return normalise_p.bind(*compat.match_varying(*operands), form=form)


def in_jax(*operands: jax.Array, form: Form) -> list[jax.Array]:
    """The same in JAX operations."""
    t = operand(dict(zip(form.names, operands, strict=True)), form)
    z = (t if form.activation is None else form.activation.value(t)).astype(form.dtype)
    bits = [jnp.packbits(_inside(z, form), axis=-1, bitorder="little")] if form.bits else []
    return [z] * form.copies + bits


def _inside(z: jax.Array, form: Form) -> jax.Array:
    """The mask of an activation's derivative, from the activation's result."""
    assert form.activation is not None and form.activation.mask is not None
    above, below = form.activation.mask
    inside = z > jnp.asarray(above, z.dtype)
    return inside if below is None else inside & (z < jnp.asarray(below, z.dtype))


def spread(vector: jax.Array, like: Any) -> jax.Array:
    """A vector over channels, (C,) or (N, C), reshaped to broadcast to a channels-last array."""
    if vector.ndim == 1:
        return vector
    return lax.expand_dims(vector, tuple(range(1, len(like.shape) - 1)))


def centred(given: Mapping[str, jax.Array], i: int | str) -> jax.Array:
    """An array minus its mean, float32."""
    wide = given[f"y{i}"].astype(np.float32)
    mean = given.get(f"mean{i}")
    return wide if mean is None else wide - spread(mean, wide)


def times(value: jax.Array, named: Mapping[str, jax.Array], i: int | str) -> jax.Array:
    """An array or a vector times the scale of array i."""
    scale = named.get(f"scale{i}")
    if scale is None:
        return value
    return value * (spread(scale, value) if value.ndim > 2 else scale)


def operand(given: Mapping[str, jax.Array], form: Form) -> jax.Array:
    """t: float32, or rounded if it is a sum of rounded summands."""
    summands = []
    for i in range(form.arrays):
        summand = times(centred(given, i), given, i)
        if f"offset{i}" in given:
            summand = summand + spread(given[f"offset{i}"], summand)
        summands.append(summand)
    if form.summands == 1:
        return summands[0]
    summands = [n.astype(given["y0"].dtype) for n in summands]
    if form.shortcut:
        summands.append(given["shortcut"])
    return functools.reduce(jnp.add, summands)


def _abstract_eval(*operands: Any, form: Form) -> list[Any]:
    z = operands[0].update(dtype=form.dtype, weak_type=False)
    return [z] * form.copies + [normalise_add.bits_type(z)] * form.bits


def _writes_bits(form: Form, operands: Sequence[Any]) -> bool:
    """Whether one kernel computes z and the bits of its mask for operands of these types."""
    end, y = form.block_end, operands[0]
    arrays, vectors = operands[: form.summands], operands[form.summands :]
    return (
        end is not None
        and all(of == VECTORS for of in form.vectors)
        and all(a.dtype == form.dtype and a.shape == y.shape for a in arrays)
        and all(v.ndim == 1 for v in vectors)
        and normalise_add.accepts(end, y.shape, y.dtype)
    )


def _by_kernel(*operands: jax.Array, form: Form) -> list[jax.Array]:
    end = form.block_end
    assert end is not None
    z, bits = normalise_add.normalise_add(*operands, form=end)
    return [z] * form.copies + [bits]


def key(form: Form, *operands: Any) -> str | None:
    """The key of the pass that computes a stored z for operands of these types, or None."""
    y, *vectors = operands
    named = form.named
    if named is None or not form.stored or form.summands != 1 or form.bits or form.dtype != y.dtype:
        return None
    words = [f"activation:{named[0]}"]
    segments = _segments(y.shape, [v.shape for v in vectors])
    return key_of_rows("normalise", y.shape, y.dtype, segments, words)


def _segments(y: Sequence[int], vectors: Sequence[Sequence[int]]) -> int:
    """The segments of an array of this shape: its examples if a vector has a row for each."""
    return y[0] if any(len(v) == 2 for v in vectors) else 1


@dataclasses.dataclass(frozen=True)
class _Normalise(SplitPass):
    """The partition of one array over devices."""

    form: Form

    primitive = normalise_p

    def tensors(self, *shapes: Sequence[int]) -> Tensors:
        y, *vectors = shapes
        dims = Dimensions(tuple(y), _segments(y, vectors))
        named = zip(self.form.names[1:], vectors, strict=True)
        operands = [dims.array("y"), *(dims.vector(f"{name}_", of) for name, of in named)]
        return operands, [dims.array(f"z{i}_") for i in range(self.form.copies)]


def _lower(platform: str, ctx, *operands, form: Form):
    """Lowers to one custom call, or to JAX operations."""
    if form.bits and _writes_bits(form, ctx.avals_in):
        return mlir.lower_fun(_by_kernel, multiple_results=True)(ctx, *operands, form=form)
    y, *vectors = ctx.avals_in

    def by_kernel(_: native.PassPlan) -> list[Any]:
        named, segments = form.named, _segments(y.shape, [v.shape for v in vectors])
        assert named is not None, "the activation of the key"
        attributes: dict[str, Any] = {"segments": np.int64(segments)} if segments > 1 else {}
        found = custom_call.lowered(
            ctx,
            platform,
            TARGET,
            {n[:-1]: (o, t) for n, o, t in zip(form.names, operands, ctx.avals_in, strict=True)},
            {"z": ctx.avals_out[0]},
            activation=named[0],
            **attributes,
        )
        return [found["z"]] * form.copies

    asked, in_jax = key(form, *ctx.avals_in), functools.partial(_lower_in_jax, form=form)
    if platform != "cuda" or not accepts_rows(asked, y.shape, otherwise=False):
        return in_jax(ctx, *operands)  # without a row in ``explain``: XLA is as fast
    return rules.lowered_pass(platform, ctx, operands, asked, by_kernel, in_jax, _Normalise(form))


_lower_in_jax = mlir.lower_fun(in_jax, multiple_results=True)

rules.register(
    normalise_p,
    shapes=_abstract_eval,
    batch=rules.batched_as(in_jax),
    lower=_lower,
    elsewhere=_lower_in_jax,
)


# --- differentiation ---


def _jvp(primals, tangents, *, form: Form):
    named = dict(zip(form.names, primals, strict=True))
    pairs = zip(form.names, tangents, strict=True)
    given = {name: t for name, t in pairs if not isinstance(t, ad.Zero)}
    act = form.activation
    with_bits = form.stored and _writes_bits(form, [jax.typeof(p) for p in primals])
    computed = dataclasses.replace(form, bits=form.bits or with_bits)
    results = normalise_p.bind(*primals, form=computed)
    source: Any = "nothing"
    if act is not None:
        source = "operand"
        if form.summands == 2 and act.mask is not None:
            source = "bits" if computed.bits else "result"
    linear = Tangent(dataclasses.replace(form, bits=False), tuple(given), source)
    named |= {"bits": results[-1], "result": results[0]}
    operands = compat.match_varying(*given.values(), *(named[name] for name in linear.kept))
    of_z = normalise_tangent_p.bind(*operands, form=linear)
    kept = results[: form.copies + form.bits]
    return kept, [*of_z, *(ad.Zero(jax.typeof(b).to_tangent_aval()) for b in kept[form.copies :])]


def _differentiated(
    named: Mapping[str, jax.Array], dt: jax.Array, form: Tangent, backwards: bool = False
) -> jax.Array:
    """The activation's derivative times dt, in dt's dtype."""
    act = form.form.activation
    if act is None:
        return dt
    match form.source:
        case "operand":
            differentiate = act.cotangent if backwards else act.tangent
            return differentiate(operand(named, form.form), dt)
        case "result":
            inside = _inside(named["result"], form.form)
        case _:
            bits = jnp.unpackbits(named["bits"], axis=-1, count=dt.shape[-1], bitorder="little")
            inside = bits.astype(bool)
    dt = explicit_mesh.like(dt, jax.typeof(inside))  # the type of z
    return lax.select(inside, dt, jnp.zeros_like(dt))


def _like(named: Mapping[str, Any]) -> Any:
    """One of the operands that have the arrays' shape."""
    return next(named[name] for name in ("y0", "y1", "shortcut") if name in named)


def tangent_in_jax(*operands: jax.Array, form: Tangent) -> list[jax.Array]:
    """``normalise_tangent`` in JAX operations."""
    count = len(form.given)
    given = dict(zip(form.given, operands[:count], strict=True))
    named = dict(zip(form.kept, operands[count:], strict=True))
    like = _like(given | named)
    summands = []
    for name, dt in given.items():
        kind, i = name[:-1], name[-1]
        wide = dt.astype(np.float32)
        if name == "shortcut":
            summands.append(wide)
        elif kind == "y":
            summands.append(times(wide, named, i))
        elif kind == "mean":
            summands.append(spread(-times(wide, named, i), like))
        elif kind == "scale":
            summands.append(centred(named, i) * spread(wide, like))
        else:
            summands.append(spread(wide, like))
    du = functools.reduce(jnp.add, summands)
    if du.shape != like.shape:
        du = du + jnp.zeros_like(like, dtype=np.float32)
    dz = _differentiated(named, du, form).astype(form.form.dtype)
    return [dz] * form.form.copies


def _tangent_abstract_eval(*operands: Any, form: Tangent) -> list[Any]:
    like = _like(dict(zip((*form.given, *form.kept), operands, strict=True)))
    return [like.update(dtype=form.form.dtype, weak_type=False)] * form.form.copies


def _tangent_jvp(primals, tangents, *, form: Tangent):
    tangent = rules.tangent_of(tangent_in_jax, primals, tangents, form=form)
    return normalise_tangent_p.bind(*primals, form=form), tangent


def _transpose(cotangents, *operands, form: Tangent):
    """The cotangents of the differentiated operands: masked, scaled, and summed."""
    count = len(form.given)
    types = dict(zip(form.given, (o.aval for o in operands[:count]), strict=True))
    others = [None] * (len(operands) - count)
    gradients = [c for c in cotangents if not isinstance(c, ad.Zero)]
    if not gradients:
        return [ad.Zero(t) for t in types.values()] + others
    first, *rest = gradients
    gradients = [first, functools.reduce(jnp.add, rest)] if rest else [first]
    named = dict(zip(form.kept, operands[count:], strict=True))
    masked, sums = _backward(gradients, named, types, form)
    wide = masked.astype(np.float32)
    found: list[Any] = []
    for name, aval in types.items():
        kind, i = name[:-1], name[-1]
        if name == "shortcut":
            ct = masked
        elif kind == "y":
            ct = times(wide, named, i)
        elif kind == "scale":
            ct = sums[name]
        else:
            ct = sums["offset"] if kind == "offset" else -times(sums["offset"], named, i)
        if ct.ndim > len(aval.shape):
            ct = ct.sum(0)  # for a vector that all examples share
        found.append(explicit_mesh.like(ct.astype(aval.dtype), aval))
    return found + others


def _backward(
    gradients: list[jax.Array],
    named: Mapping[str, jax.Array],
    types: Mapping[str, Any],
    form: Tangent,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The gradient of t, and its sums over positions.

    Args:
        gradients: one or two gradients of z.
        named: the kept arrays and vectors, by name.
        types: the types of the tangents, by name.
        form: the linear call.

    Returns:
        The gradient; its sum "offset"; and "scale0" and "scale1", its sums with the centred arrays
        whose scales have tangents. Sums are (C,), or (N, C) if a vector is.
    """

    def masked(named: Mapping[str, jax.Array] = named) -> jax.Array:
        return _differentiated(named, functools.reduce(jnp.add, gradients), form, backwards=True)

    if not form.sums:
        return masked(), {}
    vectors = [v for n, v in (*types.items(), *named.items()) if n[:-1] in VECTORS]
    examples = any(len(v.shape) == 2 for v in vectors)
    summed = [i for i in range(form.form.arrays) if f"scale{i}" in types]
    # The gradient of t is stored if it is the gradient of an operand: of a shortcut, or of an
    # unscaled array.
    unscaled = any("scale" not in of and "mean" not in of for of in form.form.vectors)
    stores = form.source != "nothing" or len(gradients) == 2
    stores = stores and (form.form.summands == 2 or unscaled)
    by = _derivative_for_sums(form)
    result = None
    if form.form.stored and by is None and stores:
        # One pass computes the gradient, which is stored in any case, another one the sums.
        result = masked()
        gradients, stores, by = [result], False, _Derivative("none")
    if form.form.stored and by is not None:
        summed_arrays = by.arrays or summed
        arrays = [named[f"y{i}"] for i in summed_arrays]
        zeros = jnp.zeros(gradients[0].shape[-1:], np.float32)
        means = [named.get(f"mean{i}", zeros) for i in summed_arrays]
        segments = gradients[0].shape[0] if examples else 1
        call = Sums(
            len(gradients), len(arrays), by.masked_by, stores, *by.mask, *by.named, segments
        )
        same = all(a.dtype == gradients[0].dtype for a in (*gradients, *arrays))
        if same and masked_sums.accepts(call, gradients[0].shape, gradients[0].dtype):
            of_mask = [named[n] if n in named else zeros + (n == "scale0") for n in by.operands]
            *stored, sums = masked_sums.masked_sums(
                *gradients, *arrays, *means, *of_mask, form=call
            )
            found = {f"scale{i}": sums[..., 1 + at, :] for at, i in enumerate(summed_arrays)}
            found["offset"] = sums[..., 0, :]
            return next(iter(stored), result if result is not None else masked()), found
    result = masked() if result is None else result
    of_sums = result
    if form.form.twice:
        names = [n for n in named if n.startswith("y")]
        again = lax.optimization_barrier([named[n] for n in names])
        named = {**named, **dict(zip(names, again, strict=True))}
        of_sums = masked(named)
    wide = of_sums.astype(np.float32)
    axes = tuple(range(1 if examples else 0, result.ndim - 1))
    found = {"offset": wide.sum(axes)}
    for i in summed:
        found[f"scale{i}"] = (wide * centred(named, i)).sum(axes)
    return result, found


@dataclasses.dataclass(frozen=True)
class _Derivative:
    """How a call of ``masked_sums`` computes the activation's derivative.

    Attributes:
        masked_by: as in ``Sums``.
        mask: the bounds between which the derivative is 1, as in ``Activation``.
        named: the activation's name, or None, and its slope.
        operands: the names of the operands from which the call computes the derivative.
        arrays: the indices of the arrays from which the call computes the derivative.
    """

    masked_by: MaskedBy
    mask: tuple[float | None, float | None] = (None, None)
    named: tuple[str | None, float] = (None, 0.0)
    operands: tuple[str, ...] = ()
    arrays: tuple[int, ...] = ()


def _derivative_for_sums(form: Tangent) -> _Derivative | None:
    """How ``masked_sums`` computes the activation's derivative, or None if it cannot."""
    act = form.form.activation
    if act is None:
        return _Derivative("none")
    if form.source == "bits" or form.source == "result":
        assert act.mask is not None
        return _Derivative(form.source, act.mask, operands=(form.source,))
    if form.form.summands == 2:
        return None
    of_operand = _Derivative("affine", operands=("scale0", "offset0"), arrays=(0,))
    if act.mask is not None:
        return dataclasses.replace(of_operand, mask=act.mask)
    return None if act.named is None else dataclasses.replace(of_operand, named=act.named)


ad.primitive_jvps[normalise_p] = _jvp
ad.primitive_transposes[normalise_p] = rules.transposed_as(in_jax)
ad.primitive_jvps[normalise_tangent_p] = _tangent_jvp
ad.primitive_transposes[normalise_tangent_p] = _transpose
_lower_tangent = mlir.lower_fun(tangent_in_jax, multiple_results=True)
rules.register(
    normalise_tangent_p,
    shapes=_tangent_abstract_eval,
    batch=rules.batched_as(tangent_in_jax),
    lower=lambda platform, ctx, *operands, form: _lower_tangent(ctx, *operands, form=form),
    elsewhere=_lower_tangent,
)
