"""The primitive conv_fused: a forward floating-point convolution with its epilogue.

The operands are x, w and the present terms, in the order scale, bias, residual; the results are y
and, on request, pre and the statistics (``epilogue`` has the definition). Arrays have the axis
order of a ``ConvSpec``, as in the three bilinear primitives.

If no kernel computes both, the plain convolution returns its sums in the accumulator's dtype, and
XLA computes the epilogue from them (``apart``). If no kernel computes the statistics, a call
computes the rest of the epilogue, and XLA reads y again.

Derivatives consist of the three bilinear primitives and XLA's elementwise operations. Let d =
activation'(t). It follows from y for relu, relu6, leaky_relu with a positive slope, sigmoid and
tanh; for the others from pre, a second result of the same call. Then

    dt = fprop(dx, w) * scale + fprop(x, dw * scale + w * dscale) + dbias + dresidual
    dy = d * dt

So the gradient of scale is a sum over the filter's weight gradient, without a pass over
activations; the gradients of bias and residual are a reduction and a copy of d * dy in XLA.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad
from jax.sharding import NamedSharding, PartitionSpec

from jaxconv._src import compat
from jaxconv._src.call import call, selection
from jaxconv._src.call.call import Call, Selected
from jaxconv._src.conv import bilinear, primitives
from jaxconv._src.library import custom_call, native
from jaxconv._src.problem.epilogue import (
    Epilogue,
    accumulator_dtype,
    along_channels,
    finish,
    moments,
    moments_tangent,
)
from jaxconv._src.problem.spec import ConvSpec, Op, Sizes, check_size
from jaxconv._src.sharding import explicit_mesh, partition
from jaxconv._src.sharding.partition import SPATIAL, Part, Tensor

TARGET = "jaxconv_fused"

conv_fused_p = Primitive("jaxconv_fused")
conv_fused_p.multiple_results = True


def bind(
    x: jax.Array,
    w: jax.Array,
    terms: Mapping[str, jax.Array],
    *,
    spec: ConvSpec,
    epilogue: Epilogue,
    out_dtype: np.dtype,
) -> list[jax.Array]:
    """All results of a convolution with an epilogue that ``epilogue.checked`` has accepted.

    Raises:
        ValueError: as in ``primitives.bind``.
    """
    if epilogue.plain:
        return [primitives.bind(Op.FPROP, x, w, spec, out_dtype)]
    out_shape = spec.shape("y", spec.sizes(Op.FPROP, x.shape, w.shape))
    check_size("result", out_shape, out_dtype)
    common = compat.wider_dtype(x.dtype, w.dtype)
    kernel_dtype = np.dtype(compat.wider_dtype(common, out_dtype))
    wide = accumulator_dtype(kernel_dtype)
    call.check(Fused(spec, epilogue, kernel_dtype), x.shape, w.shape, common)
    dtypes = {"x": common, "w": common, "scale": wide, "bias": wide, "residual": kernel_dtype}
    given = {"x": x, "w": w, **terms}
    in_order = [(given[name], dtypes[name]) for name in ("x", "w", *epilogue.terms)]
    operands = [
        a if a.dtype == dtype else lax.convert_element_type(a, dtype) for a, dtype in in_order
    ]
    operands = compat.match_varying(*operands)
    y, *rest = conv_fused_p.bind(*operands, spec=spec, epilogue=epilogue, out_dtype=kernel_dtype)
    return [y if kernel_dtype == out_dtype else lax.convert_element_type(y, out_dtype), *rest]


def apart(*operands, spec: ConvSpec, epilogue: Epilogue, out_dtype: np.dtype) -> list[jax.Array]:
    """All results, from the plain convolution and XLA's elementwise operations.

    For an epilogue with statistics, from a call without them and XLA's sums of y.
    """
    x, w, *rest = operands
    if epilogue.statistics:
        form = epilogue.without_statistics()
        if form.plain:
            results = [primitives.bind(Op.FPROP, x, w, spec, out_dtype)]
        else:
            results = conv_fused_p.bind(*operands, spec=spec, epilogue=form, out_dtype=out_dtype)
        y = results[0]
        return [*results, moments(y, spec.axis("y", "k"), accumulator_dtype(out_dtype))]
    acc = primitives.bind(Op.FPROP, x, w, spec, accumulator_dtype(out_dtype))
    terms = dict(zip(epilogue.terms, rest, strict=True))
    return finish(acc, terms, spec.axis("y", "k"), epilogue, out_dtype)


def _abstract_eval(*operands, spec: ConvSpec, epilogue: Epilogue, out_dtype: np.dtype):
    x, w, *_ = operands
    shape = spec.shape("y", spec.sizes(Op.FPROP, x.shape, w.shape))
    y = partition.result_type(Fused(spec, epilogue, out_dtype), shape, *operands)
    results = [y] * (1 + epilogue.pre)
    if epilogue.statistics:
        results.append(moments_type(spec, y, accumulator_dtype(out_dtype)))
    return results


def moments_type(spec: ConvSpec, y: jax.core.ShapedArray, dtype: np.dtype) -> jax.core.ShapedArray:
    """The type of the statistics of y, with this dtype."""
    at, axes = spec.axis("y", "k"), tuple(y.sharding.spec)
    split = PartitionSpec(None, axes[at] if at < len(axes) else None)
    return y.update(
        shape=(2, y.shape[at]),
        dtype=dtype,
        weak_type=False,
        sharding=NamedSharding(y.sharding.mesh, split),
    )


# --- differentiation ---


def _jvp(primals, tangents, **parameters):
    results, found = linearized(primals, tangents, **parameters)
    return results, rounded(found, results)


def rounded(tangents: Sequence[jax.Array], results: Sequence[jax.Array]) -> list[jax.Array]:
    """The tangents of ``linearized`` in the dtypes of the results."""
    return [t.astype(r.dtype) for r, t in zip(results, tangents, strict=True)]


def linearized(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    spec: ConvSpec,
    epilogue: Epilogue,
    out_dtype: np.dtype,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """The results and their tangents, these in the accumulator's dtype."""
    names = ("x", "w", *epilogue.terms)
    value = dict(zip(names, primals, strict=True))
    tangent = {
        name: t for name, t in zip(names, tangents, strict=True) if not isinstance(t, ad.Zero)
    }
    form = epilogue.with_derivative()
    results = conv_fused_p.bind(*primals, spec=spec, epilogue=form, out_dtype=out_dtype)
    y, wide = results[0], accumulator_dtype(out_dtype)
    dt = functools.reduce(jnp.add, _tangents_of_t(value, tangent, spec, out_dtype))
    if dt.shape != y.shape:
        dt = dt * jnp.ones_like(y, dtype=wide)
    dt = explicit_mesh.like(dt, jax.typeof(y))  # a bias may be split if y is not
    dy = dt
    if form.activation is not None:
        # jax.checkpoint: the backward pass then keeps y or pre, not a float32 function of it.
        times_derivative = jax.checkpoint(form.tangent, prevent_cse=False)
        dy = times_derivative(y if form.differentiates_from_y else results[1], dt)
    out, out_tangents = [y], [dy]
    if epilogue.pre:
        out.append(results[1])
        out_tangents.append(dt)
    if epilogue.statistics:
        out.append(results[-1])
        of_moments = jax.checkpoint(
            functools.partial(moments_tangent, spec.axis("y", "k")), prevent_cse=False
        )
        out_tangents.append(of_moments(y, results[-1], dy))
    return out, out_tangents


def _tangents_of_t(value, tangent, spec: ConvSpec, out_dtype: np.dtype) -> list[jax.Array]:
    """The terms of the tangent of t, with its shape or (K,), in the accumulator's dtype.

    Convolutions have the result's dtype, so that their transposes read cotangents in that dtype.
    """
    wide = accumulator_dtype(out_dtype)
    y_rank, y_channels = len(spec.y_axes), spec.axis("y", "k")

    def fprop(x, w):
        return primitives.bind(Op.FPROP, x, w, spec, out_dtype).astype(wide)

    def by_filter(vector):
        return along_channels(vector, len(spec.w_axes), spec.axis("w", "k"))

    sums, terms = [], []
    scale = value.get("scale")
    if "x" in tangent:
        sums.append(fprop(tangent["x"], value["w"]))
    if "w" in tangent and "scale" not in tangent:
        sums.append(fprop(value["x"], tangent["w"]))
    if sums:
        total = functools.reduce(jnp.add, sums)
        terms.append(total if scale is None else total * along_channels(scale, y_rank, y_channels))
    if "scale" in tangent:
        w = value["w"]
        scaled = w.astype(wide) * by_filter(tangent["scale"])
        if "w" in tangent:
            scaled = scaled + tangent["w"].astype(wide) * by_filter(scale)
        terms.append(fprop(value["x"], scaled.astype(w.dtype)))
    if "bias" in tangent:
        terms.append(along_channels(tangent["bias"], y_rank, y_channels))
    if "residual" in tangent:
        terms.append(tangent["residual"].astype(wide))
    return terms


def _transpose(cotangents, *operands, spec: ConvSpec, epilogue: Epilogue, out_dtype: np.dtype):
    """The transpose, for linear dependence on x, on w and scale, or on the summands.

    Without activation and statistics, t is linear in each of these and equals its tangent.
    """
    if epilogue.activation is not None or epilogue.statistics:
        raise TypeError(
            f"jaxconv_fused: expected a linear function to transpose, got one with "
            f"{' '.join(epilogue.words)}; jax.vjp transposes its derivative"
        )
    names = ("x", "w", *epilogue.terms)
    given = dict(zip(names, operands, strict=True))
    linear = {n: a.aval for n, a in given.items() if ad.is_undefined_primal(a)}
    if len(linear.keys() & {"x", "w", "scale"}) > 1:
        raise TypeError(f"jaxconv_fused: it is not linear in {' and '.join(linear)} together")
    value = {n: a for n, a in given.items() if n not in linear}
    y = spec.shape("y", spec.sizes(Op.FPROP, *(_aval(given[n]).shape for n in ("x", "w"))))

    def of_t(tangent):
        dt = functools.reduce(jnp.add, _tangents_of_t(value, tangent, spec, out_dtype))
        return [jnp.broadcast_to(dt, y).astype(out_dtype)] * (1 + epilogue.pre)

    types = {n: jax.ShapeDtypeStruct(a.shape, a.dtype) for n, a in linear.items()}
    (found,) = jax.linear_transpose(of_t, types)([ad.instantiate_zeros(c) for c in cotangents])
    return [found.get(name) for name in names]


def _aval(operand):
    return operand.aval if ad.is_undefined_primal(operand) else jax.typeof(operand)


# --- batching ---


def _batch(operands, mapped_axes, *, spec: ConvSpec, epilogue: Epilogue, out_dtype: np.dtype):
    """Folds the mapped axis into N or K; all other cases are vmap of ``apart``.

    The other cases: both operands of the convolution are mapped, which makes it a batched one; the
    epilogue is mapped but the convolution is not, or along another axis; the mapped images have
    separate statistics.
    """
    names = ("x", "w", *epilogue.terms)
    axes = {n: a for n, a in zip(names, mapped_axes, strict=True) if a is not None}
    by_channel = axes.keys() & {"w", "scale", "bias"}
    static: dict[str, Any] = dict(spec=spec, epilogue=epilogue, out_dtype=out_dtype)
    in_k = "w" in axes and "x" not in axes
    in_n = "x" in axes and not by_channel and not epilogue.statistics
    if not (in_k or in_n):
        results = jax.vmap(functools.partial(apart, **static), in_axes=mapped_axes)(*operands)
        return results, [0] * len(results)
    values = dict(zip(names, operands, strict=True))
    main = "w" if in_k else "x"
    count = values[main].shape[axes[main]]
    name = "k" if in_k else "n"
    groups = spec.groups if in_k else 1
    places = {main: spec.axis(main, name)}
    if "residual" in values:
        places["residual"] = spec.axis("y", name)
    if in_k:
        places |= {term: 0 for term in epilogue.terms if term != "residual"}

    def mapped(name: str) -> tuple[jax.Array, int]:
        """The operand with the mapped axis, repeated if it has none."""
        if name in axes:
            return values[name], axes[name]
        return jnp.broadcast_to(values[name], (count, *values[name].shape)), 0

    given = {name: mapped(name) for name in places}
    inside = any([primitives.goes_inside(*given[n], at, groups) for n, at in places.items()])
    folded = {n: primitives.fold(*given[n], at, groups, inside) for n, at in places.items()}
    operands = compat.match_varying(*({**values, **folded}[n] for n in names))
    results = conv_fused_p.bind(*operands, **static)
    at = [spec.axis("y", name)] * (1 + epilogue.pre) + [1] * epilogue.statistics
    extent = results[0].shape[at[0]] // count
    unfolded = [
        primitives.unfold(r, count, axis, extent, groups, inside)
        for r, axis in zip(results, at, strict=True)
    ]
    return [r for r, _ in unfolded], [axis for _, axis in unfolded]


# --- selection, sharding, custom call ---


@dataclasses.dataclass(frozen=True)
class Fused(Call):
    """A forward convolution with its epilogue."""

    spec: ConvSpec
    epilogue: Epilogue
    out_dtype: np.dtype

    op = Op.FPROP
    fused = True
    primitive = conv_fused_p
    target = TARGET

    @property
    def conv(self) -> ConvSpec:
        return self.spec

    def with_conv(self, conv: ConvSpec) -> Fused:
        return dataclasses.replace(self, spec=conv)

    @property
    def words(self) -> Sequence[str]:
        return self.epilogue.words

    @property
    def even(self) -> bool:
        return self.epilogue.statistics  # statistics are merged from parts of equal counts

    def tensors(self, *shapes: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        names = ("x", "w", *self.epilogue.terms)
        roles = {"x": "x", "w": "w", "residual": "y"}
        y = self.spec.shape("y", self.sizes(*shapes[:2]))
        channels = partition.channel(self.spec, "y", y[self.spec.axis("y", "k")])
        operands = [
            partition.tensor(self.spec, roles[name], shape, name)
            if name in roles
            else Tensor(name, tuple(shape), (channels,))
            for name, shape in zip(names, shapes, strict=True)
        ]
        images = ["y", *["pre"] * self.epilogue.pre]
        results = [partition.tensor(self.spec, "y", y, name) for name in images]
        if self.epilogue.statistics:
            shape = (2, y[self.spec.axis("y", "k")])
            results.append(Tensor("statistics", shape, (None, channels)))
        return operands, results

    def on_device(self, part: Part, *operands: jax.Array) -> list[jax.Array]:
        """As in ``Call``; the epilogue in JAX operations if it cannot follow the device's own sums.

        This is the case if the input channels are split and, with statistics, if the device
        computes rows of y that it drops.
        """
        if part.summed or (self.epilogue.statistics and part.computes_more):
            x, w, *rest = operands
            wide = accumulator_dtype(self.out_dtype)
            acc = part.own(primitives.bind(Op.FPROP, x, w, part.conv, wide))
            acc = partition.sum_over(acc, part.summed)
            given = zip(self.epilogue.terms, compat.match_varying(*rest, acc), strict=False)
            channels = self.spec.axis("y", "k")
            results = finish(acc, dict(given), channels, self.epilogue, self.out_dtype)
        else:
            results = part.compute(*operands)
        over = [axis for name in ("n", *SPATIAL) for axis in part.split.get(name, ())]
        if self.epilogue.statistics and over:
            count = results[0].size // results[-1].shape[1]
            parts = part.parts("n", *SPATIAL)
            results[-1] = partition.merge_moments(results[-1], tuple(over), parts, count)
        return results

    def select(self, platform: str, sizes: Sizes, dtype: np.dtype) -> Selected:
        """The instance that computes convolution and epilogue, or the reason why none does.

        A demanded algorithm without an epilogue computes only the convolution.
        """
        if self.algorithm in selection.IN_JAX and selection.applies(self.algorithm, Op.FPROP):
            return selection.refused(f'algorithm="{self.algorithm}" has no epilogue'), ""
        problem = (platform, Op.FPROP, self.spec, sizes, dtype, self.out_dtype)
        try:
            return bilinear.select_kernel(*problem, epilogue=self.words)
        except ValueError as error:  # not an algorithm of this platform
            return selection.refused(str(error)), ""

    def without_epilogue(self) -> Call:
        if self.epilogue.statistics:  # separately, after a call with the rest
            rest = self.epilogue.without_statistics()
            if not rest.plain:
                return dataclasses.replace(self, epilogue=rest)
            return bilinear.Bilinear(Op.FPROP, self.spec, self.out_dtype)
        return bilinear.Bilinear(Op.FPROP, self.spec, accumulator_dtype(self.out_dtype))

    def apart(self, *operands: jax.Array) -> list[jax.Array]:
        static: dict[str, Any] = dict(spec=self.spec, epilogue=self.epilogue)
        return apart(*operands, **static, out_dtype=self.out_dtype)

    def definition(self, platform: str | None, in_jax: bool):
        return self.apart

    @property
    def names(self) -> tuple[Sequence[str], Sequence[str]]:
        results = ["y", *["pre"] * self.epilogue.pre, *["statistics"] * self.epilogue.statistics]
        return ("x", "w", *self.epilogue.terms), results

    def layouts(self, chosen: native.Selection) -> Mapping[str, Sequence[int]]:
        like_y = (*["residual"] * self.epilogue.residual, "y", *["pre"] * self.epilogue.pre)
        return {
            "x": custom_call.layout(self.spec, "x"),
            "w": custom_call.layout(self.spec, "w", chosen.krsc),
            **dict.fromkeys(like_y, custom_call.layout(self.spec, "y")),
        }

    def attributes(self) -> Mapping[str, Any]:
        return custom_call.axes_attributes(Op.FPROP, self.spec)


def _lowered(*, epilogue: Epilogue, **static: Any) -> Fused:
    return Fused(epilogue=epilogue.as_computed(), **static)


ad.primitive_jvps[conv_fused_p] = _jvp
ad.primitive_transposes[conv_fused_p] = _transpose
call.register(conv_fused_p, _lowered, shapes=_abstract_eval, batch=_batch)
