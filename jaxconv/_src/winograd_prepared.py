"""The primitive conv_prepared: fprop of a filter that was prepared for Winograd.

A CUDA kernel of the family ``winograd`` computes it where one takes the problem; elsewhere, and on
other platforms, the form in JAX. It has no derivative, because the filter itself is not at hand.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
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
    int8_partition,
    lowering,
    native,
    partition,
    record,
    rules,
    winograd_jax,
)
from jaxconv._src.spec import DTYPE_NAMES, ConvSpec, Op, Sizes, flops, key_of
from jaxconv._src.winograd_filter import LAYOUTS, PreparedFilter, checked, unpacked

_log = logging.getLogger("jaxconv")


def algorithm_of(algorithm: str, w: PreparedFilter) -> str:
    """The algorithm that a filter was prepared for, or an instance of it that was asked for.

    Raises:
        ValueError: another algorithm is asked for.
    """
    own = f"winograd_{w.tile}"
    algorithm = lowering.WITH_WINOGRAD.get(algorithm, algorithm)
    if algorithm in (lowering.AUTO, lowering.NATIVE):
        return own
    if algorithm in ("winograd", own):
        return algorithm
    if algorithm.startswith("fprop_winograd_"):
        return algorithm
    raise ValueError(
        f"algorithm {algorithm!r}: w is a filter prepared for {own!r}; expected that, 'auto', "
        "'winograd' or the name of an instance that reads it, or the filter itself"
    )


def check(x: jax.Array, w: PreparedFilter) -> PreparedFilter:
    """Checks a prepared filter beside an input.

    Raises:
        TypeError: the filter was prepared from another dtype than x has.
        ValueError: its data is not what ``prepare`` made.
    """
    if x.dtype != w.dtype:
        raise TypeError(
            f"w: expected a filter prepared from the dtype of x, {x.dtype.name}, got one from "
            f"{np.dtype(w.dtype).name}"
        )
    return checked("w", w)


def bind(x: jax.Array, w: PreparedFilter, spec: ConvSpec, out_dtype: np.dtype) -> jax.Array:
    """Computes fprop.

    Args:
        x: the input, in any order of axes.
        w: a filter that ``check`` has accepted.
        spec: of the convolution of the filter itself; the axes of w mean nothing.
        out_dtype: dtype of the result.

    Raises:
        ValueError: Winograd, or the algorithm that ``spec`` demands, does not take the problem.
    """
    if w.groups != spec.groups:
        raise ValueError(
            f"groups: expected {w.groups}, for which w was prepared, got {spec.groups}"
        )
    algorithm = algorithm_of(spec.algorithm_of(Op.FPROP), w)
    spec = dataclasses.replace(spec, algorithm=(algorithm, algorithm, algorithm))
    without_data: Any = None  # of which nothing is asked here
    prepared = dataclasses.replace(w, data=without_data)
    sizes = _sizes(spec, prepared, x.shape)
    if reason := winograd_jax.refusal(Op.FPROP, spec, sizes, x.dtype):
        raise ValueError(f"w: a filter prepared for {w.tile} cannot serve: {reason}")
    if algorithm not in winograd_jax.ALGORITHMS:
        refusals = [select(each, spec, prepared, sizes, out_dtype) for each in native.PLATFORMS]
        if not any(chosen.instance for chosen, _ in refusals):
            reasons = [r for chosen, _ in refusals for r in chosen.refusals]
            raise ValueError(f"algorithm {algorithm!r} cannot serve: {lowering.reasons(reasons)}")
    x, data = compat.match_varying(x, w.data)
    return conv_prepared_p.bind(
        x, data, spec=spec, prepared=prepared, out_dtype=np.dtype(out_dtype)
    )


def _sizes(spec: ConvSpec, prepared: PreparedFilter, x_shape: tuple[int, ...]) -> Sizes:
    return Sizes(
        1,
        x_shape[spec.axis("x", "n")],
        prepared.channels * prepared.groups,
        prepared.features,
        spec.in_spatial,
        spec.filter_spatial,
        spec.out_spatial,
    )


def select(
    platform: str, spec: ConvSpec, prepared: PreparedFilter, sizes: Sizes, out_dtype: np.dtype
) -> tuple[native.Selection, str]:
    """The kernel instance, and the problem key ("" of operands that no kernel takes).

    With no instance the form in JAX computes it, if the algorithm is no instance's name.
    """
    names = [DTYPE_NAMES.get(np.dtype(d).name, "") for d in (prepared.dtype, out_dtype)]
    if not prepared.is_record or not all(names):
        reason = f"kernels read filters prepared from float16 and bfloat16, not {prepared.dtype}"
        return lowering.refused(reason), ""
    if sizes.empty or spec.crops_everything:
        return lowering.refused(lowering.EMPTY if sizes.empty else lowering.CROPPED), ""
    words = [LAYOUTS[prepared.tile]]
    key = key_of(Op.FPROP, (names[0], "f16", names[1]), spec, sizes, words)
    kernels = native.load(platform)
    if isinstance(kernels, native.Refusal):
        return native.Selection(None, refusals=(kernels,)), key
    try:
        return kernels.select(key, spec.algorithm_of(Op.FPROP), native.target()), key
    except ValueError as error:  # not an algorithm of this platform, or numbers too large for it
        return lowering.refused(str(error)), key


def choose(
    platform: str, spec: ConvSpec, prepared: PreparedFilter, sizes: Sizes, out_dtype: np.dtype
) -> tuple[native.Selection, str]:
    """``select``, and the form in JAX where no kernel takes the problem.

    Raises:
        ValueError: an instance is demanded that does not take it.
    """
    chosen, key = select(platform, spec, prepared, sizes, out_dtype)
    algorithm = spec.algorithm_of(Op.FPROP)
    if chosen.instance is None and algorithm not in winograd_jax.ALGORITHMS:
        raise ValueError(f"algorithm {algorithm!r}: {lowering.reasons(chosen.refusals)}")
    if chosen.instance is None and not sizes.empty:
        spec = dataclasses.replace(spec, algorithm=(f"winograd_{prepared.tile}",) * 3)
        name = winograd_jax.instance(Op.FPROP, spec, prepared.dtype)
        memory = winograd_jax.workspace_bytes(Op.FPROP, spec, sizes, prepared.dtype)
        chosen = native.Selection(name, memory, in_jax=True)
    return chosen, key


# --- the primitive --------------------------------------------------------------------------------

conv_prepared_p = Primitive("jaxconv_prepared")


def _factors(spec: ConvSpec, prepared: PreparedFilter) -> tuple[int8_partition.Factors, ...]:
    """Only the images can be split over devices: of x, the filter's data and the result."""
    x, y = (
        tuple("n" if axis == spec.axis(role, "n") else None for axis in range(spec.rank + 2))
        for role in ("x", "y")
    )
    return x, (None,) * len(prepared.data_type.shape), y


def _abstract_eval(x, data, *, spec: ConvSpec, prepared: PreparedFilter, out_dtype: np.dtype):
    shape = spec.shape("y", _sizes(spec, prepared, x.shape))
    sharding = int8_partition.result_sharding(
        _factors(spec, prepared), (x, data), shape, "convolution of a prepared filter"
    )
    # Derived from an operand's type, so that mesh axes it varies over are kept (shard_map).
    return x.update(shape=shape, dtype=out_dtype, weak_type=False, sharding=sharding or x.sharding)


def _no_derivative(*_, **__):
    raise TypeError(
        "jaxconv.conv with a prepared filter has no derivative: the filter itself is not at hand. "
        'Differentiate jaxconv.conv(x, w, algorithm="winograd"), or apply jax.lax.stop_gradient '
        "to x and to the prepared filter"
    )


def _batch(operands, mapped_axes, *, spec: ConvSpec, prepared: PreparedFilter, out_dtype):
    """Maps over images, which fold into n; over filters one call for each example."""
    (x, data), (of_x, of_data) = operands, mapped_axes
    call = functools.partial(
        conv_prepared_p.bind, spec=spec, prepared=prepared, out_dtype=out_dtype
    )
    if of_data is not None:
        data = jnp.moveaxis(data, of_data, 0)
        if of_x is None:
            return lax.map(lambda d: call(x, d), data), 0
        return lax.map(lambda pair: call(*pair), (jnp.moveaxis(x, of_x, 0), data)), 0
    n = spec.axis("x", "n")
    x = jnp.moveaxis(x, of_x, n)
    count, images = x.shape[n : n + 2]
    y = call(partition.merge_axes(x, n, 2), data)
    at = spec.axis("y", "n")
    return partition.split_axis(y, at, (count, images)), at


# --- lowering -------------------------------------------------------------------------------------


def _in_jax(x, data, *, spec: ConvSpec, prepared: PreparedFilter, out_dtype):
    """The same numbers without a kernel."""
    sizes = _sizes(spec, prepared, x.shape)
    if sizes.empty or spec.crops_everything:
        return jnp.zeros(spec.shape("y", sizes), out_dtype)
    u, scale = unpacked(dataclasses.replace(prepared, data=data))
    x = jnp.transpose(x, spec.x_axes)
    y = winograd_jax.multiply(x, u, scale, prepared.outputs, spec, out_dtype)
    return jnp.transpose(y, np.argsort(spec.y_axes).tolist())


def _lower_to_xla(ctx, *operands, **params):
    wide = jax.enable_x64(np.dtype(params["out_dtype"]) == np.float64 or jax.config.x64_enabled)
    with lowering.override_in_force(None), record.paused(), wide:
        in_jax = functools.partial(_in_jax, **params)
        return mlir.lower_fun(in_jax, multiple_results=False)(ctx, *operands)


def _lower(platform: str, ctx, x, data, **params):
    """Lowers to one custom call on the chosen instance, or to XLA's operations."""
    spec, prepared, out_dtype = (params[name] for name in ("spec", "prepared", "out_dtype"))
    sizes = _sizes(spec, prepared, ctx.avals_in[0].shape)
    chosen, key = choose(platform, spec, prepared, sizes, out_dtype)
    recorded = functools.partial(
        record.emit, ctx, "fprop", key, spec.precision, platform, flops(spec, sizes), chosen
    )
    with record.paused():  # the parts on every device are this one convolution
        factors = _factors(spec, prepared)
        split = int8_partition.lower(ctx, conv_prepared_p, factors, (x, data), **params)
    if split is not None:
        return recorded(split)
    if chosen.instance is None or chosen.in_jax:
        return recorded(_lower_to_xla(ctx, x, data, **params))
    _log.debug("%s on %s: %s", key, platform, chosen.instance)
    results = custom_call.lowered(
        ctx,
        platform,
        lowering.call_target(Op.FPROP),
        {"lhs": (x, ctx.avals_in[0]), "rhs": (data, ctx.avals_in[1])},
        {"out": ctx.avals_out[0]} | custom_call.workspace(chosen),
        {"lhs": lowering.layout(spec, "x"), "out": lowering.layout(spec, "y")},
        **custom_call.plan_attributes(chosen, key),
        **lowering.axes_attributes(Op.FPROP, spec) | {"rhs_axes": np.zeros((1,), np.int64)},
    )
    return recorded([results["out"]])


ad.primitive_jvps[conv_prepared_p] = _no_derivative
ad.primitive_transposes[conv_prepared_p] = _no_derivative
rules.register(
    conv_prepared_p, shapes=_abstract_eval, batch=_batch, lower=_lower, elsewhere=_lower_to_xla
)
