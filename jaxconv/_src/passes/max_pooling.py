"""The primitives max_pool and max_pool_gradient: window maxima, their places, and the gradient.

    z         = x, or relu((x - mean) * scale + offset), computed in float32 and rounded before relu
    maxima    = max of z over each window, with -inf in the padding
    places    = the position of the maximum within its window, as an 8-bit number
    operands  = x at the maximum
    gradient  = dz, or dz * scale + y * y_scale + offset for batch norm's operand y, where dz at an
                element is the sum of dy over the windows whose place is this element

The window is searched in row-major order. An element replaces the current maximum unless the
maximum is greater or equal, so the first of equal elements wins, and NaN propagates as in the
program. After relu, a maximum that is not above 0 has the place NO_PLACE and the operand 0, because
relu has no gradient there.

An element of the gradient is a float32 sum in a fixed order, rounded once.

On NVIDIA GPUs one kernel computes each primitive in one pass; examples and channels may be sharded.
Elsewhere and under vmap, JAX operations compute the same:

    forwards    one strided slice of x for each position in the window, and the maximum over these
    backwards   at most ceil(size / stride) windows along each axis contain an element. For each of
                them the pooled arrays are upsampled by the stride, and the gradient is selected
                where the place is the element's position.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from jaxconv._src.passes import masked_sums
from jaxconv._src.passes.masked_sums import Sums
from jaxconv._src.passes.windows import Windows
from jaxconv._src.problem.spec import DTYPE_NAMES
from jaxconv._src.sharding.partition import Tensors
from jaxconv._src.sharding.split_pass import Dimensions, SplitPass, result_types

TARGET, GRADIENT_TARGET = "jaxconv_max_pool", "jaxconv_max_pool_gradient"

max_pool_p = Primitive(TARGET)
max_pool_p.multiple_results = True
max_pool_gradient_p = Primitive(GRADIENT_TARGET)
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


def key(
    name: str, windows: Windows, dtype: np.dtype, words: Iterable[str] = ("places",)
) -> str | None:
    """The key of the pass, or None if no call expresses it."""
    shape, spatial = windows.shape, slice(1, -1)
    short = DTYPE_NAMES.get(dtype.name) if jnp.issubdtype(dtype, jnp.floating) else None
    extents = all(isinstance(n, int) and n > 0 for n in shape) and 3 <= len(shape) <= 5
    if short is None or not extents:
        return None
    for axis in (0, len(shape) - 1):
        whole = windows.sizes[axis], windows.strides[axis], windows.padding[axis]
        if whole != (1, 1, (0, 0)):
            return None
    if min(itertools.chain.from_iterable(windows.padding)) < 0:
        return None
    low = [pad for pad, _ in windows.padding]
    by_axis = {"i": shape, "f": windows.sizes, "o": windows.counts, "s": windows.strides, "p": low}
    axes = [letter + "x".join(map(str, each[spatial])) for letter, each in by_axis.items()]
    return " ".join([name, short, f"b{shape[0]}", f"c{shape[-1]}", *axes, *words])


def accepts(windows: Windows, dtype: np.dtype) -> bool:
    """Whether kernels exist for arrays of this type, channels last, and these windows."""
    asked = key("max_pool", windows, dtype)
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


def max_pool_gradient(
    gradients: Sequence[jax.Array],
    place: jax.Array,
    *normalised: jax.Array,
    windows: Windows,
) -> jax.Array:
    """The gradient of x, in the gradients' type.

    Args:
        gradients: one gradient of the maxima, or two, which are added and rounded.
        place: the places, uint8.
        normalised: empty, or y with x's dtype and shape, and scale, y_scale and offset, float32
            (C,).
        windows: the windows over x.
    """
    given = compat.match_varying(*gradients, place, *normalised)
    return max_pool_gradient_p.bind(*given, windows=windows, gradients=len(gradients))


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


def gradient_in_jax(*operands: jax.Array, windows: Windows, gradients: int = 1) -> jax.Array:
    """``max_pool_gradient`` in JAX operations."""
    dy = functools.reduce(jnp.add, operands[:gradients])
    place, *normalised = operands[gradients:]
    strides, overlaps, weights = windows.strides, windows.overlaps, windows.weights
    low = [pad for pad, _ in windows.padding]
    # An element at stride * i + a lies in window i and in windows that begin before it.
    grid = [-(-(p + n) // s) for p, n, s in zip(low, windows.shape, strides, strict=True)]
    edges = [(m - 1, g - n, 0) for m, g, n in zip(overlaps, grid, dy.shape, strict=True)]
    # Makes XLA read the stored places; it would otherwise recompute them, with a bounds check for
    # each read.
    place = lax.optimization_barrier(place)
    if any(map(any, edges)):
        dy = lax.pad(dy, np.array(0, dy.dtype), edges)
        place = lax.pad(place, np.array(0, place.dtype), edges)
        dy, place = lax.optimization_barrier((dy, place))
    repeated: list[int] = []  # the extents of the grid, each followed by its stride
    axes: list[int] = []
    within: Any = np.uint8(0)  # an element's place in the window that begins at stride * i
    for extent, step in zip(grid, strides, strict=True):
        axes.append(len(repeated))
        repeated += [extent] if step == 1 else [extent, step]
    for axis, step, weight in zip(axes, strides, weights, strict=True):
        if step > 1:
            along = lax.broadcasted_iota(np.uint8, repeated, axis + 1)
            within = within + along * np.uint8(weight)

    def spread(array: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(array, repeated, axes)

    total: Any = 0.0
    for before in itertools.product(*map(range, overlaps)):
        starts = [m - 1 - j for m, j in zip(overlaps, before, strict=True)]
        ends = [start + g for start, g in zip(starts, grid, strict=True)]
        number = windows.place(j * s for j, s in zip(before, strides, strict=True))
        here = spread(lax.slice(place, starts, ends)) == within + np.uint8(number)
        source = spread(lax.slice(dy, starts, ends)).astype(np.float32)
        total = total + lax.select(here, source, jnp.zeros_like(source))
    dx = total if normalised else total.astype(dy.dtype)
    for axis, step in enumerate(strides):
        if step > 1:  # one axis at a time: a reshape of a sharded array can merge only two axes
            dx = dx.reshape((*dx.shape[:axis], dx.shape[axis] * step, *dx.shape[axis + 2 :]))
    dx = lax.slice(dx, low, [p + n for p, n in zip(low, windows.shape, strict=True)])
    if not normalised:
        return dx
    y, scale, y_scale, offset = normalised
    return (dx * scale + (y.astype(np.float32) * y_scale + offset)).astype(dy.dtype)


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
    with_places = dataclasses.replace(form, places=True, operands=form.operands or form.affine)
    results = max_pool_p.bind(*primals, form=with_places)
    place, *operands = results[form.copies :]
    vectors = dict(zip(_VECTORS, primals[1:], strict=False))
    linear = MaximaTangent(with_places, tuple(given))
    named = vectors | {"place": place} | dict(zip(("operands",), operands, strict=False))
    named["maxima"] = results[0]
    kept = [named[name] for name in linear.kept]
    of_maxima = max_pool_tangent_p.bind(*compat.match_varying(*given.values(), *kept), form=linear)
    found = [*results[: form.copies], *[place] * form.places, *operands[: form.operands]]
    zeros: list[Any] = [ad.Zero(jax.typeof(place).to_tangent_aval())] * form.places
    if form.operands:  # only a second derivative differentiates these
        of_x = given.get("x", jnp.zeros_like(primals[0]))
        zeros.append(_at_places(of_x, place, form.windows))
    return found, [*of_maxima, *zeros]


def _attributes(windows: Windows) -> dict[str, Any]:
    spatial = slice(1, -1)
    low = [pad for pad, _ in windows.padding]
    named = {"sizes": windows.sizes, "strides": windows.strides, "padding": low}
    return {name: np.asarray(each[spatial], np.int64) for name, each in named.items()}


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
            **_attributes(form.windows),
        )
        return [found["maxima"]] * (form.copies - 1) + [found[name] for name in results]

    words = [n for n in ("affine", "places", "operands") if getattr(form, n)]
    asked = key("max_pool", form.windows, ctx.avals_in[0].dtype, words)
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
        form: the differentiated function, with places, and with operands if it is affine.
        given: which of x, mean, scale and offset have a tangent; each is an operand.
    """

    form: Pooling
    given: tuple[str, ...]

    @property
    def kept(self) -> tuple[str, ...]:
        """The names of the operands after the tangents: the factors of the tangents."""
        affine = ("mean", "scale", "maxima", "operands") if self.form.affine else ()
        return (*affine, "place")


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
        of_z = of_z.astype(named["maxima"].dtype)
    return [of_z] * form.form.copies


def _tangent_abstract_eval(*operands: Any, form: MaximaTangent) -> list[Any]:
    named = dict(zip((*form.given, *form.kept), operands, strict=True))
    like = named["maxima" if "maxima" in named else "x"]
    return [named["place"].update(dtype=like.dtype, weak_type=False)] * form.form.copies


def _tangent_jvp(primals, tangents, *, form: MaximaTangent):
    tangent = rules.tangent_of(tangent_in_jax, primals, tangents[:-1], form=form)  # but for place
    return max_pool_tangent_p.bind(*primals, form=form), tangent


def _tangent_transpose(cotangents, *operands, form: MaximaTangent):
    """The gradient of x is added at the places; the gradients of vectors are sums over windows."""
    count = len(form.given)
    types = dict(zip(form.given, (o.aval for o in operands[:count]), strict=True))
    named = dict(zip(form.kept, operands[count:], strict=True))
    gradients = [c for c in cotangents if not isinstance(c, ad.Zero)]
    if not gradients:
        return [ad.Zero(t) for t in types.values()] + [None] * len(form.kept)
    first, *rest = gradients
    gradients = [first, functools.reduce(jnp.add, rest)] if rest else [first]
    found: dict[str, Any] = {}
    if form.form.affine and types.keys() - {"x"}:
        sums = Sums(len(gradients), 1, "result", stores=False, above=0.0, below=None)
        arrays = *gradients, named["operands"], named["mean"], named["maxima"]
        accepted = masked_sums.accepts(sums, first.shape, first.dtype) and form.form.stored
        summed = masked_sums.masked_sums if accepted else masked_sums.in_jax
        (totals,) = summed(*arrays, form=sums)
        found = {"offset": totals[0], "scale": totals[1], "mean": -totals[0] * named["scale"]}
    if "x" in types:
        dx = max_pool_gradient(gradients, named["place"], windows=form.form.windows)
        if form.form.affine:
            dx = (dx.astype(np.float32) * named["scale"]).astype(types["x"].dtype)
        found["x"] = dx
    return [found[name] for name in types] + [None] * len(form.kept)


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


def _gradient_abstract_eval(dy: Any, *operands: Any, windows: Windows, gradients: int) -> Any:
    dx = dy.update(shape=windows.shape, weak_type=False)
    return result_types(_MaxPoolGradient(windows, gradients), [dx], dy, *operands)[0]


def _gradient_jvp(primals, tangents, *, windows: Windows, gradients: int):
    form = dict(windows=windows, gradients=gradients)
    out = max_pool_gradient_p.bind(*primals, **form)
    return out, rules.tangent_of(gradient_in_jax, primals, tangents, **form)


@dataclasses.dataclass(frozen=True)
class _MaxPoolGradient(SplitPass):
    """The partition of ``max_pool_gradient``'s arrays over devices."""

    windows: Windows
    gradients: int

    primitive = max_pool_gradient_p
    pools = True

    def tensors(self, *shapes: Sequence[int]) -> Tensors:
        dims = Dimensions(self.windows.shape)
        names = [*(f"dy{i}_" for i in range(self.gradients)), "places"]
        operands = [dims.array(name, self.windows.counts) for name in names]
        if len(shapes) > len(operands):
            operands.append(dims.array("y"))
            names = ["scale", "y_scale", "offset"]
            operands += map(dims.vector, names, shapes[len(operands) :])
        return operands, [dims.array("dx")]

    def on_part(self, parts: Callable[[str], int], *operands: jax.Array) -> list[jax.Array]:
        return _MaxPoolGradient(self.windows.of_part(parts), self.gradients).bind(*operands)


def _gradient_lower(platform: str, ctx, *operands, windows: Windows, gradients: int):
    """Lowers to one custom call, or to JAX operations."""

    def by_kernel(_: native.PassPlan) -> list[Any]:
        names = [*("dy", "dy2")[:gradients], "places", "y", "scale", "y_scale", "offset"]
        given = zip(operands, ctx.avals_in, strict=True)
        found = custom_call.lowered(
            ctx,
            platform,
            GRADIENT_TARGET,
            dict(zip(names, given, strict=False)),
            {"dx": ctx.avals_out[0]},
            **_attributes(windows),
        )
        return [found["dx"]]

    words = [f"g{gradients}", *["affine"] * (len(operands) > gradients + 1)]
    asked = key("max_pool_gradient", windows, ctx.avals_in[0].dtype, words)
    in_jax_of_windows = functools.partial(
        _gradient_lower_in_jax, windows=windows, gradients=gradients
    )
    call = _MaxPoolGradient(windows, gradients)
    return rules.lowered_pass(platform, ctx, operands, asked, by_kernel, in_jax_of_windows, call)


_gradient_lower_in_jax = mlir.lower_fun(gradient_in_jax, multiple_results=False)

ad.primitive_jvps[max_pool_gradient_p] = _gradient_jvp
rules.register(
    max_pool_gradient_p,
    shapes=_gradient_abstract_eval,
    batch=rules.batched_as(gradient_in_jax),
    lower=_gradient_lower,
    elsewhere=_gradient_lower_in_jax,
)
