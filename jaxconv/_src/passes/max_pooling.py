"""The primitive max_pool: window maxima, and their places.

    z         = x, or relu((x - mean) * scale + offset), computed in float32 and rounded before relu
    maxima    = max of z over each window, with -inf in the padding
    places    = the position of the maximum within its window, as an 8-bit number
    operands  = x at the maximum

The window is searched in row-major order. An element replaces the current maximum unless the
maximum is greater or equal, so the first of equal elements wins, and NaN propagates as in the
program. After relu, a maximum that is not above 0 has the place NO_PLACE and the operand 0, because
relu has no gradient there.

On NVIDIA GPUs one kernel computes it in one pass; examples and channels may be sharded. Elsewhere
and under vmap, JAX operations compute the same: one strided slice of x for each position in the
window, and the maximum over these.

The derivative is a linear call of its own. Its transpose adds the gradient of x at the places
(``max_pool_gradient``). If x's moments determine the vectors, the same call has the tangent of the
moments, and its transpose adds both gradients of x in one pass.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from jaxconv._src.passes import masked_sums, moments
from jaxconv._src.passes.masked_sums import Sums
from jaxconv._src.passes.max_pool_gradient import max_pool_gradient
from jaxconv._src.passes.windows import Windows
from jaxconv._src.sharding.partition import Tensors
from jaxconv._src.sharding.split_pass import Dimensions, SplitPass, result_types

TARGET = "jaxconv_max_pool"

max_pool_p = Primitive(TARGET)
max_pool_p.multiple_results = True
max_pool_tangent_p = Primitive(TARGET + "_tangent")
max_pool_tangent_p.multiple_results = True

# Places are 8-bit numbers.
PLACES = 256

# The place of a window without gradient. Kernels use smaller numbers for positions.
NO_PLACE = 255

# The most elements of a window, 7x7. In JAX operations each element takes several operations: with
# 49 XLA compiles for 4 s; with several hundred it splits them into kernels that store whole arrays.
LARGEST = 49

# Channels per thread of a kernel, and the kernels' bounds on the number of such vectors and on
# padded extents (cc/cuda/pooling/plan.cc).
_VECTOR, _MOST_VECTORS, _MOST_ELEMENTS = 8, 2**31, 2**30


@dataclasses.dataclass(frozen=True)
class Pooling:
    """The parameters of ``max_pool``.

    Its operands are x and, if ``affine``, mean, scale and offset, float32 (C,). Its results are the
    maxima, and the places and operands on request.

    Attributes:
        windows: the windows over x.
        affine: whether z is batch norm and relu of x; otherwise z is x.
        places: whether the places are a result.
        operands: whether the operands at the places are a result; requires places.
        copies: how often the maxima are returned, once for each reader.
        stored: whether the gradients of the maxima are stored in any case.
        called: whether x is stored in any case, so that a kernel can read it.
    """

    windows: Windows
    affine: bool
    places: bool
    operands: bool
    copies: int = 1
    stored: bool = False
    called: bool = True

    def with_places(self) -> Pooling:
        """The same with the results that the derivative needs."""
        return dataclasses.replace(self, places=True, operands=self.operands or self.affine)


def accepts(windows: Windows, dtype: np.dtype) -> bool:
    """Whether kernels exist for arrays of this type, channels last, and these windows."""
    asked = windows.key("max_pool", dtype, ["places"])
    plan = None if asked is None else rules.planned(asked)
    if asked is None or plan is not None:
        return plan is not None and plan.kernel is not None
    shape, strides = windows.shape, windows.strides
    low = [pad for pad, _ in windows.padding]
    extents = [n + sum(pad) for n, pad in zip(shape, windows.padding, strict=True)]
    grid = [-(-(n + p) // s) for n, p, s in zip(shape, low, strides, strict=True)]
    vectors = shape[0] * shape[-1] // _VECTOR
    return (
        shape[-1] % _VECTOR == 0
        and math.prod(windows.sizes) <= LARGEST
        and windows.place(size - 1 for size in windows.sizes) < NO_PLACE
        and max(extents) < _MOST_ELEMENTS
        and vectors * math.prod(grid[1:-1]) < _MOST_VECTORS
        and vectors * math.prod(windows.counts[1:-1]) < _MOST_VECTORS
    )


def max_pool(*operands: jax.Array, form: Pooling) -> list[jax.Array]:
    """The maxima (x's dtype) ``form.copies`` times, and on request places (uint8) and operands.

    Args:
        operands: x, channels-last, float32, float16 or bfloat16; and if ``form.affine``, mean,
            scale and offset, float32 (C,).
        form: the parameters.
    """
    return max_pool_p.bind(*compat.match_varying(*operands), form=form)


# --- in JAX operations ---


def in_jax(*operands: jax.Array, form: Pooling) -> list[jax.Array]:
    """``max_pool`` in JAX operations."""
    x, z = operands[0], _activated(*operands)
    if not form.places:
        return [_maxima(z, form.windows)] * form.copies
    largest, place, taken = _search(z, x if form.operands else z, form.windows)
    if form.affine:
        above = largest > 0
        place = lax.select(above, place, jnp.full_like(place, NO_PLACE))
        taken = lax.select(above, taken, jnp.zeros_like(taken))
    return [*[largest] * form.copies, place, *[taken] * form.operands]


def _activated(x: jax.Array, *vectors: jax.Array) -> jax.Array:
    if not vectors:
        return x
    mean, scale, offset = vectors
    return jax.nn.relu(((x.astype(np.float32) - mean) * scale + offset).astype(x.dtype))


def _maxima(z: jax.Array, windows: Windows) -> jax.Array:
    low = np.array(-np.inf, z.dtype)
    return lax.reduce_window(z, low, lax.max, windows.sizes, windows.strides, windows.padding)


def _search(z: jax.Array, x: jax.Array, windows: Windows) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The maxima of z's windows, their places, and x at these places."""
    largest: Any = None
    taken: Any = None
    place: Any = None
    operand: Any = None
    same = x is z
    pairs = zip(_elements(z, windows), _elements(x, windows), strict=True)
    for (number, element), (_, other) in pairs:
        if largest is None:
            largest = taken = element
            operand = other
            place = jnp.full_like(element, number, np.uint8)
            continue
        keeps = taken >= element  # false for NaN
        taken = lax.select(keeps, taken, element)
        operand = taken if same else lax.select(keeps, operand, other)
        place = lax.select(keeps, place, jnp.full_like(place, number))
        largest = lax.max(largest, element)
    return largest, place, taken if same else operand


def _elements(x: jax.Array, windows: Windows) -> Iterator[tuple[int, jax.Array]]:
    """The elements at each window position, in row-major order, with the position's place."""
    x = lax.pad(x, np.array(-np.inf, x.dtype), [(low, high, 0) for low, high in windows.padding])
    counts, strides = windows.counts, windows.strides
    for position in itertools.product(*map(range, windows.sizes)):
        axes = zip(position, counts, strides, strict=True)
        ends = [start + (count - 1) * step + 1 for start, count, step in axes]
        yield windows.place(position), lax.slice(x, position, ends, strides)


# --- rules ---


def _abstract_eval(x: Any, *vectors: Any, form: Pooling) -> list[Any]:
    maxima = x.update(shape=form.windows.counts, weak_type=False)
    places = maxima.update(dtype=np.dtype(np.uint8))
    results = [*[maxima] * form.copies, *[places] * form.places, *[maxima] * form.operands]
    return result_types(_MaxPool(form), results, x, *vectors)


def _jvp(primals, tangents, *, form: Pooling):
    """Takes the derivative at the places, which the forward pass then returns."""
    pairs = zip(("x", *_VECTORS), tangents, strict=False)
    given = {name: t for name, t in pairs if not isinstance(t, ad.Zero)}
    results = max_pool_p.bind(*primals, form=form.with_places())
    place, *operands = results[form.copies :]
    of_maxima = tangents_of_maxima(given, primals, results, MaximaTangent(form, tuple(given)))
    found = [*results[: form.copies], *[place] * form.places, *operands[: form.operands]]
    zeros: list[Any] = [ad.Zero(jax.typeof(place).to_tangent_aval())] * form.places
    if form.operands:  # only a second derivative differentiates these
        of_x = given.get("x", jnp.zeros_like(primals[0]))
        zeros.append(_at_places(of_x, place, form.windows))
    return found, [*of_maxima, *zeros]


@dataclasses.dataclass(frozen=True)
class _MaxPool(SplitPass):
    """The partition of ``max_pool``'s arrays over devices."""

    form: Pooling

    primitive = max_pool_p
    pools = True

    def tensors(self, *shapes: Sequence[int]) -> Tensors:
        form = self.form
        dims = Dimensions(form.windows.shape)
        vectors = map(dims.vector, _VECTORS, shapes[1:])
        names = [*(f"maxima{i}_" for i in range(form.copies)), *["places"] * form.places]
        names += ["operands"] * form.operands
        pooled = [dims.array(name, form.windows.counts) for name in names]
        return [dims.array("x"), *vectors], pooled

    def on_part(self, parts: Callable[[str], int], *operands: jax.Array) -> list[jax.Array]:
        windows = self.form.windows.of_part(parts)
        return _MaxPool(dataclasses.replace(self.form, windows=windows)).bind(*operands)


def _lower(platform: str, ctx, *operands, form: Pooling):
    """Lowers to one custom call, or to JAX operations."""
    if not form.called:
        return _lower_in_jax(ctx, *operands, form=form)

    def by_kernel(_: native.PassPlan) -> list[Any]:
        given = zip(operands, ctx.avals_in, strict=True)
        avals = ctx.avals_out[form.copies - 1 :]
        results = dict(zip(("maxima", "places", "operands"), avals, strict=False))
        found = custom_call.lowered(
            ctx,
            platform,
            TARGET,
            dict(zip(("x", "mean", "scale", "offset"), given, strict=False)),
            results,
            **form.windows.attributes(),
        )
        return [found["maxima"]] * (form.copies - 1) + [found[name] for name in results]

    words = [n for n in ("affine", "places", "operands") if getattr(form, n)]
    asked = form.windows.key("max_pool", ctx.avals_in[0].dtype, words)
    in_jax_of_form = functools.partial(_lower_in_jax, form=form)
    return rules.lowered_pass(
        platform, ctx, operands, asked, by_kernel, in_jax_of_form, _MaxPool(form)
    )


_lower_in_jax = mlir.lower_fun(in_jax, multiple_results=True)

ad.primitive_jvps[max_pool_p] = _jvp
rules.register(
    max_pool_p,
    shapes=_abstract_eval,
    batch=rules.batched_as(in_jax),
    lower=_lower,
    elsewhere=_lower_in_jax,
)


# --- the derivative of max_pool ---

_VECTORS = ("mean", "scale", "offset")


@dataclasses.dataclass(frozen=True)
class MaximaTangent:
    """The parameters of a linear call: the tangents of the maxima.

    Attributes:
        form: the differentiated function.
        given: which of x, mean, scale and offset have a tangent; each is an operand.
        wide: whether the tangents are float32, to be added to those of another call.
        moments: whether the tangent of x's moments is the last result; only x is given then, a
            16-bit array, and ``wide`` is set.
    """

    form: Pooling
    given: tuple[str, ...]
    wide: bool = False
    moments: bool = False

    @property
    def kept(self) -> tuple[str, ...]:
        """The names of the operands after the tangents: the factors of the tangents."""
        if self.moments:
            return ("scale", "y", "moments", "place")
        affine = ("mean", "scale", "maxima", "operands") if self.form.affine else ()
        return (*affine, "place")


def tangents_of_maxima(
    given: Mapping[str, jax.Array],
    primals: Sequence[jax.Array],
    results: Sequence[jax.Array],
    form: MaximaTangent,
    statistics: jax.Array | None = None,
) -> list[jax.Array]:
    """The tangents of the maxima, and of the moments of x on request.

    Args:
        given: the tangents in ``form.given``.
        primals: x and the vectors.
        results: those of ``max_pool`` with places.
        form: the parameters.
        statistics: the moments of x if ``form.moments``, float32 (2, C) or (3, C): mean, sum of
            squared deviations, and in the latter case the rest (``moments``).
    """
    named = dict(zip(("y", *_VECTORS), primals, strict=False)) | {"moments": statistics}
    named |= dict(zip(("place", "operands"), results[form.form.copies :], strict=False))
    named["maxima"] = results[0]
    operands = compat.match_varying(*given.values(), *(named[name] for name in form.kept))
    return max_pool_tangent_p.bind(*operands, form=form)


def _at_places(x: jax.Array, place: jax.Array, windows: Windows) -> jax.Array:
    """The elements of x at the places of its windows, 0 for no place."""
    total: Any = jnp.zeros(windows.counts, x.dtype)
    for number, element in _elements(x, windows):
        total = lax.select(place == np.uint8(number), element, total)
    return total


def tangent_in_jax(*operands: jax.Array, form: MaximaTangent) -> list[jax.Array]:
    """``max_pool_tangent`` in JAX operations."""
    count = len(form.given)
    given = dict(zip(form.given, operands[:count], strict=True))
    named = dict(zip(form.kept, operands[count:], strict=True))
    place = named["place"]
    affine, total = form.form.affine, []
    if "x" in given:
        taken = _at_places(given["x"], place, form.form.windows)
        total.append(taken.astype(np.float32) * named["scale"] if affine else taken)
    if "mean" in given:
        total.append(-given["mean"] * named["scale"])
    if "scale" in given:
        total.append((named["operands"].astype(np.float32) - named["mean"]) * given["scale"])
    if "offset" in given:
        total.append(given["offset"])
    of_z = functools.reduce(jnp.add, total)
    if affine:
        of_z = jnp.broadcast_to(of_z, place.shape)
        of_z = lax.select(place != NO_PLACE, of_z, jnp.zeros_like(of_z))
        of_z = of_z if form.wide else of_z.astype(named["maxima"].dtype)
    of_moments = []
    if form.moments:
        found = named["moments"]
        of_moments = [moments.tangent(named["y"], found, given["x"], segments=1)[: len(found)]]
    return [*[of_z] * form.form.copies, *of_moments]


def _tangent_abstract_eval(*operands: Any, form: MaximaTangent) -> list[Any]:
    named = dict(zip((*form.given, *form.kept), operands, strict=True))
    dtype = (
        np.dtype(np.float32) if form.wide else named["maxima" if "maxima" in named else "x"].dtype
    )
    of_maxima = named["place"].update(dtype=dtype, weak_type=False)
    of_moments = [named["moments"]] if form.moments else []
    return [*[of_maxima] * form.form.copies, *of_moments]


def _tangent_jvp(primals, tangents, *, form: MaximaTangent):
    tangent = rules.tangent_of(tangent_in_jax, primals, tangents, form=form)
    return max_pool_tangent_p.bind(*primals, form=form), tangent


def _tangent_transpose(cotangents, *operands, form: MaximaTangent):
    """The gradient of x is added at the places; the gradients of vectors are sums over windows."""
    count, copies = len(form.given), form.form.copies
    types = dict(zip(form.given, (o.aval for o in operands[:count]), strict=True))
    named = dict(zip(form.kept, operands[count:], strict=True))
    others = [None] * len(form.kept)
    if all(isinstance(c, ad.Zero) for c in cotangents):
        return [ad.Zero(t) for t in types.values()] + others
    gradients = [c for c in cotangents[:copies] if not isinstance(c, ad.Zero)]
    if form.wide:  # conversions of 16-bit gradients
        gradients = [g.astype(named["y" if form.moments else "maxima"].dtype) for g in gradients]
    if len(gradients) > 1:
        gradients = [gradients[0], functools.reduce(jnp.add, gradients[1:])]
    if form.moments and not isinstance(cotangents[-1], ad.Zero):
        return [_gradient_with_moments(gradients, cotangents[-1], named, form), *others]
    found: dict[str, Any] = {}
    if form.form.affine and types.keys() - {"x"}:
        sums = Sums(len(gradients), 1, "result", stores=False, above=0.0, below=None)
        arrays = *gradients, named["operands"], named["mean"], named["maxima"]
        first = gradients[0]
        accepted = masked_sums.accepts(sums, first.shape, first.dtype) and form.form.stored
        summed = masked_sums.masked_sums if accepted else masked_sums.in_jax
        (totals,) = summed(*arrays, form=sums)
        found = {"offset": totals[0], "scale": totals[1], "mean": -totals[0] * named["scale"]}
    if "x" in types:
        dx = max_pool_gradient(gradients, named["place"], windows=form.form.windows)
        if form.form.affine:
            dx = (dx.astype(np.float32) * named["scale"]).astype(types["x"].dtype)
        found["x"] = dx
    return [found[name] for name in types] + others


def _gradient_with_moments(
    gradients: Sequence[jax.Array],
    of_moments: jax.Array,
    named: Mapping[str, jax.Array],
    form: MaximaTangent,
) -> jax.Array:
    """The gradient of y, from the gradients of the maxima and of y's moments, in one pass."""
    y, mean = named["y"], named["moments"][0]
    of_mean, y_scale = of_moments[0] / (y.size // y.shape[-1]), 2 * of_moments[1]
    if not gradients:
        return ((y.astype(np.float32) - mean) * y_scale + of_mean).astype(y.dtype)
    vectors = named["scale"], y_scale, of_mean - mean * y_scale
    return max_pool_gradient(gradients, named["place"], y, *vectors, windows=form.form.windows)


ad.primitive_jvps[max_pool_tangent_p] = _tangent_jvp
ad.primitive_transposes[max_pool_tangent_p] = _tangent_transpose
_lower_tangent = mlir.lower_fun(tangent_in_jax, multiple_results=True)
rules.register(
    max_pool_tangent_p,
    shapes=_tangent_abstract_eval,
    batch=rules.batched_as(tangent_in_jax),
    lower=lambda platform, ctx, *operands, form: _lower_tangent(ctx, *operands, form=form),
    elsewhere=_lower_tangent,
)
