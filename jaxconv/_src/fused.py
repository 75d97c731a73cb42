"""The primitive conv_fused: a forward convolution of floating-point operands with its epilogue.

The operands are x, w and the terms that are present, in the order scale, bias, residual; the
results are y and, where asked for, pre and the statistics (``epilogue`` has the definition). Arrays
have the axis order of a ``ConvSpec``, as the three bilinear primitives take them.

Where no kernel computes both, the plain convolution gives its sums in the accumulator's dtype, and
XLA computes the epilogue from them: ``apart``. Of statistics that no kernel computes, XLA reads y
again, which a call with the rest of the epilogue gives.

Derivatives are written in the three bilinear primitives and XLA's elementwise operations. With
d = activation'(t), which y alone tells of relu, relu6, leaky_relu with a positive slope, sigmoid
and tanh, and pre of the others, where it is a second result of the same call,

    dt = fprop(dx, w) * scale + fprop(x, dw * scale + w * dscale) + dbias + dresidual
    dy = d * dt

So the gradient of scale is a sum over the filter's weight gradient, and no pass over activations;
the gradients of bias and of residual are a reduction and a copy of d * dy in XLA.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from jaxconv._src import (
    compat,
    custom_call,
    fused_partition,
    lowering,
    native,
    partition,
    primitives,
    record,
    rules,
)
from jaxconv._src.epilogue import (
    Activation,
    Epilogue,
    accumulator_dtype,
    along_channels,
    checked,
    finish,
    moments,
    moments_tangent,
)
from jaxconv._src.spec import ConvSpec, Op, check_size, flops

TARGET = "jaxconv_fused"

conv_fused_p = Primitive("jaxconv_fused")
conv_fused_p.multiple_results = True

_log = logging.getLogger("jaxconv")


def conv_fused(
    x: jax.Array,
    w: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    spec: ConvSpec,
    activation: Activation = None,
    out_dtype: np.dtype,
) -> jax.Array:
    """activation(scale * fprop(x, w) + bias + residual), rounded once.

    Args:
        x, w: floating-point operands in the axis order of ``spec``; two dtypes are computed at the
            wider one.
        scale, bias: (K,) floating-point numbers, or None.
        residual: of the result's shape and dtype, or None.
        spec: the convolution; not batched.
        activation: as in ``jaxconv.conv``.
        out_dtype: dtype of the result.

    Raises:
        TypeError, ValueError: an operand or the activation does not fit; the algorithm that
            ``spec`` demands does not take this problem.
    """
    sizes = spec.sizes(Op.FPROP, x.shape, w.shape)
    form, terms = checked(
        scale,
        bias,
        residual,
        activation,
        operand_dtype=compat.wider_dtype(x.dtype, w.dtype),
        channels=sizes.k,
        out_shape=spec.shape("y", sizes),
        out_dtype=out_dtype,
    )
    return bind(x, w, terms, spec=spec, epilogue=form, out_dtype=out_dtype)[0]


def bind(
    x: jax.Array,
    w: jax.Array,
    terms: Mapping[str, jax.Array],
    *,
    spec: ConvSpec,
    epilogue: Epilogue,
    out_dtype: np.dtype,
) -> list[jax.Array]:
    """All results of an epilogue that ``epilogue.checked`` has accepted.

    Raises:
        ValueError: as ``primitives.bind``.
    """
    if epilogue.plain:
        return [primitives.bind(Op.FPROP, x, w, spec, out_dtype)]
    out_shape = spec.shape("y", spec.sizes(Op.FPROP, x.shape, w.shape))
    check_size("result", out_shape, out_dtype)
    common = compat.wider_dtype(x.dtype, w.dtype)
    kernel_dtype = np.dtype(compat.wider_dtype(common, out_dtype))
    wide = accumulator_dtype(kernel_dtype)
    _check_algorithm(spec, epilogue, x.shape, w.shape, common, kernel_dtype)
    dtypes = {"x": common, "w": common, "scale": wide, "bias": wide, "residual": kernel_dtype}
    operands = [
        a if a.dtype == dtypes[name] else lax.convert_element_type(a, dtypes[name])
        for name, a in {"x": x, "w": w, **terms}.items()
    ]
    operands = compat.match_varying(*operands)
    y, *rest = conv_fused_p.bind(*operands, spec=spec, epilogue=epilogue, out_dtype=kernel_dtype)
    return [y if kernel_dtype == out_dtype else lax.convert_element_type(y, out_dtype), *rest]


def _check_algorithm(
    spec: ConvSpec,
    epilogue: Epilogue,
    x_shape: tuple[int, ...],
    w_shape: tuple[int, ...],
    operand_dtype: np.dtype,
    out_dtype: np.dtype,
) -> None:
    """``lowering.check_algorithm`` of a call that computes the epilogue, or of the parts.

    An instance with an epilogue takes no plain convolution, and the reverse.
    """
    if spec.algorithm_of(Op.FPROP) in lowering.UNCONDITIONAL:
        return
    sizes = spec.sizes(Op.FPROP, x_shape, w_shape)
    problem = (spec, sizes, operand_dtype, epilogue, out_dtype)
    if any(select(platform, *problem)[0].instance for platform in lowering.PLATFORMS):
        return
    if epilogue.statistics:  # apart, behind a call with the rest
        rest = epilogue.without_statistics()
        _check_algorithm(spec, rest, x_shape, w_shape, operand_dtype, out_dtype)
        return
    wide = out_dtype if epilogue.plain else accumulator_dtype(out_dtype)
    lowering.check_algorithm(Op.FPROP, spec, x_shape, w_shape, operand_dtype, wide)


def apart(*operands, spec: ConvSpec, epilogue: Epilogue, out_dtype: np.dtype) -> list[jax.Array]:
    """All results by the plain convolution and XLA's elementwise operations.

    Of an epilogue with statistics, by a call without them and XLA's sums of y.
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


def _abstract_eval(x, w, *terms, spec: ConvSpec, epilogue: Epilogue, out_dtype: np.dtype):
    sizes = spec.sizes(Op.FPROP, x.shape, w.shape)
    sharding = partition.result_sharding(Op.FPROP, spec, x, w) or x.sharding
    # Derived from an operand's type, so that mesh axes it varies over are kept (shard_map).
    y = x.update(shape=spec.shape("y", sizes), dtype=out_dtype, weak_type=False, sharding=sharding)
    results = [y] * (1 + epilogue.pre)
    if epilogue.statistics:
        results.append(fused_partition.moments_type(spec, y, accumulator_dtype(out_dtype)))
    return results


# --- differentiation ---


def _jvp(primals, tangents, *, spec: ConvSpec, epilogue: Epilogue, out_dtype: np.dtype):
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
    dy = dt
    if form.activation is not None:
        # jax.checkpoint: y or pre is what the backward pass keeps, not a function of it in float32.
        times_derivative = jax.checkpoint(form.tangent, prevent_cse=False)
        dy = times_derivative(y if form.differentiates_from_y else results[1], dt)
    out, out_tangents = [y], [dy.astype(out_dtype)]
    if epilogue.pre:
        out.append(results[1])
        out_tangents.append(dt.astype(out_dtype))
    if epilogue.statistics:
        out.append(results[-1])
        of_moments = jax.checkpoint(
            functools.partial(moments_tangent, spec.axis("y", "k")), prevent_cse=False
        )
        out_tangents.append(of_moments(y, results[-1], dy))
    return out, out_tangents


def _tangents_of_t(value, tangent, spec: ConvSpec, out_dtype: np.dtype) -> list[jax.Array]:
    """The terms of the tangent of t, of its shape or (K,), in the accumulator's dtype.

    Convolutions give the result's dtype, so that their transposes read cotangents of that dtype.
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
    """The transpose of the linear function of x, of w and scale, and of the summands.

    Without activation and statistics t is one. Its tangents are the function itself.
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
    """Folds the mapped axis into N or K; everything else is vmap of ``apart``.

    Apart are two mapped operands of the convolution, which make it a batched one, an epilogue that
    is mapped where its convolution is not, or along another axis, and statistics of images of which
    each has its own.
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
        """The operand with the mapped axis, repeated where it has none."""
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


# --- lowering ---


def select(platform: str, spec: ConvSpec, sizes, operand_dtype, epilogue: Epilogue, out_dtype):
    """The instance that computes convolution and epilogue, or why none does, and the problem key.

    An algorithm that is demanded and has no epilogue computes the convolution alone.
    """
    algorithm = spec.algorithm_of(Op.FPROP)
    if algorithm in lowering.IN_JAX and lowering.applies(algorithm, Op.FPROP):
        return lowering.refused(f'algorithm="{algorithm}" has no epilogue'), ""
    problem = (platform, Op.FPROP, spec, sizes, operand_dtype, out_dtype)
    try:
        return lowering.select_kernel(*problem, epilogue=epilogue.words)
    except ValueError as error:  # no algorithm of this platform
        return lowering.refused(str(error)), ""


def _lower(platform: str, ctx, *operands, spec: ConvSpec, epilogue: Epilogue, out_dtype: np.dtype):
    """Lowers to one custom call, or to the convolution and XLA's elementwise operations."""
    epilogue = epilogue.as_computed()
    x, w = ctx.avals_in[:2]
    sizes = spec.sizes(Op.FPROP, x.shape, w.shape)
    chosen, key = select(platform, spec, sizes, x.dtype, epilogue, out_dtype)
    static: dict[str, Any] = dict(spec=spec, epilogue=epilogue, out_dtype=out_dtype)
    if chosen.instance is None:
        _log.info(
            "epilogue of %s on %s goes to XLA: %s",
            key or "fprop",
            platform,
            lowering.reasons(chosen.refusals),
        )
        with record.located(ctx, apart=chosen.refusals):
            return mlir.lower_fun(functools.partial(apart, **static), multiple_results=True)(
                ctx, *operands
            )
    recorded = functools.partial(
        record.emit,
        ctx,
        Op.FPROP.value,
        key,
        spec.precision,
        platform,
        flops(spec, sizes),
        chosen,
        epilogue=" ".join(epilogue.words),
    )
    with record.paused():  # the parts on every device are this one convolution
        split = fused_partition.lower(
            ctx, ctx.primitive, operands, spec=spec, form=epilogue, out_dtype=out_dtype
        )
    if split is not None:
        return recorded(split)
    _log.debug("%s on %s: %s", key, platform, chosen.instance)
    return recorded(_call(platform, ctx, chosen, key, operands, spec, epilogue))


def _call(
    platform: str,
    ctx,
    chosen: native.Selection,
    key: str,
    operands,
    spec: ConvSpec,
    epilogue: Epilogue,
):
    """The custom call; the workspace is dropped."""
    y = lowering.layout(spec, "y")
    given = zip(operands, ctx.avals_in, strict=True)
    names = ["y", *["pre"] * epilogue.pre, *["statistics"] * epilogue.statistics]
    results = custom_call.lowered(
        ctx,
        platform,
        TARGET,
        dict(zip(("x", "w", *epilogue.terms), given, strict=True)),
        dict(zip(names, ctx.avals_out, strict=True)) | custom_call.workspace(chosen),
        {
            "x": lowering.layout(spec, "x"),
            "w": lowering.layout(spec, "w", chosen.krsc),
            **({"residual": y} if epilogue.residual else {}),
            **dict.fromkeys(names[: 1 + epilogue.pre], y),
        },
        **custom_call.plan_attributes(chosen, key),
        **lowering.axes_attributes(Op.FPROP, spec),
    )
    return [results[name] for name in names]


ad.primitive_jvps[conv_fused_p] = _jvp
ad.primitive_transposes[conv_fused_p] = _transpose
rules.register(
    conv_fused_p,
    shapes=_abstract_eval,
    batch=_batch,
    lower=_lower,
    elsewhere=mlir.lower_fun(apart, multiple_results=True),
)
