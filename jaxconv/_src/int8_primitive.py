"""The primitive conv_int8: a forward convolution of 8-bit operands with its epilogue.

The operands are x, w and the terms of the epilogue that are present, in the order of ``TERMS``; the
epilogue is defined in ``cc/core/epilogue.h``. Arrays are in canonical order:

    x                x (n, *spatial, c), or in the layout nchw32 (n, c / 32, h, w, 32), and
                     (n, 1, h, w, 4) where c is 4
    w                int8 (k, L), packed as ``int8_layout.pack_rows`` packs it for the layout
    scale            float32 (k,), or (n, k) where the spec says "image_scale"
    offset           int32 (k,), added to the sums
    bias             float32 (k,)
    residual         as the result
    residual_scale   float32 (1,)

It has no derivative: rounding to 8 bits has none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from jaxconv._src import (
    compat,
    custom_call,
    exact,
    int8_partition,
    int8_winograd,
    native,
    partition,
    record,
    rules,
    winograd_jax,
)
from jaxconv._src.int8_layout import (
    BLOCK,
    to_nchw32,
    to_nhwc,
    unpack_rows,
)
from jaxconv._src.spec import DTYPE_NAMES, ConvSpec, Op, Sizes, explicit_input, flops, key_of

TARGET = "jaxconv_int8"
# Algorithms that ask for XLA's operations, which are a matrix product of all windows.
BY_XLA = ("xla", "im2col")
_UNCONDITIONAL = ("auto", "native", *BY_XLA)

TERMS = ("scale", "offset", "bias", "residual", "residual_scale")

_DTYPE_NAMES = {**DTYPE_NAMES, "uint8": "u8"}

_log = logging.getLogger("jaxconv")


@dataclasses.dataclass(frozen=True)
class Int8Spec:
    """Everything about a quantised convolution that is not an array.

    Attributes:
        conv: the window, the groups and the algorithm; all axis orders are canonical.
        layout: "nhwc" (channels last, 1 to 3 spatial axes) or "nchw32".
        out_dtype: int8, uint8, int32, float32, bfloat16 or float16.
        scale: "", "scale" (one for each output channel) or "image_scale" (for each image too).
        offset, bias, residual: which of the other terms are present; with a scale only.
        activation: None, "relu" or "relu6".
        zero_point: of an int8 or uint8 result.
    """

    conv: ConvSpec
    layout: str
    out_dtype: np.dtype
    scale: str = ""
    offset: bool = False
    bias: bool = False
    residual: bool = False
    activation: str | None = None
    zero_point: int = 0

    @property
    def terms(self) -> tuple[str, ...]:
        """Names of the operands after x and w."""
        present = (self.scale, self.offset, self.bias, self.residual, self.residual)
        return tuple(name for name, has in zip(TERMS, present, strict=True) if has)

    @property
    def algorithm(self) -> str:
        return self.conv.algorithm_of(Op.FPROP)

    def sizes(self, x_shape: Sequence[int], w_shape: Sequence[int]) -> Sizes:
        """Extents; channels include padding."""
        conv = self.conv
        c = x_shape[-1] if self.layout == "nhwc" else x_shape[1] * x_shape[-1]
        return Sizes(
            1, x_shape[0], c, w_shape[0], conv.in_spatial, conv.filter_spatial, conv.out_spatial
        )

    def out_shape(self, x_shape: Sequence[int], w_shape: Sequence[int]) -> tuple[int, ...]:
        n, k = x_shape[0], w_shape[0]
        if self.layout == "nhwc":
            return (n, *self.conv.out_spatial, k)
        return (n, k // BLOCK, *self.conv.out_spatial, BLOCK)

    def words(self, filter_layout: str, layout: str) -> list[str]:
        """The end of the problem key, which tells layouts and terms."""
        words = [
            filter_layout,
            layout if layout != "nhwc" else "",
            self.scale,
            *("offset" * self.offset, "bias" * self.bias, "residual" * self.residual),
            self.activation or "",
            f"z{self.zero_point}" if self.zero_point else "",
        ]
        return [word for word in words if word]


def canonical_conv(
    *,
    stride: tuple[int, ...],
    padding: tuple[tuple[int, int], ...],
    dilation: tuple[int, ...],
    groups: int,
    in_spatial: tuple[int, ...],
    window: tuple[int, ...],
    algorithm: str = "auto",
) -> ConvSpec:
    """The ``ConvSpec`` of a convolution of arrays in canonical order."""
    order = tuple(range(len(stride) + 2))
    return ConvSpec(
        stride=stride,
        padding=padding,
        lhs_dilation=(1,) * len(stride),
        dilation=dilation,
        groups=groups,
        in_spatial=in_spatial,
        filter_spatial=window,
        x_axes=order,
        w_axes=order,
        y_axes=order,
        algorithm=(algorithm, algorithm, algorithm),
    )


# --- selection ---


def _no_kernel(spec: Int8Spec, sizes: Sizes, x_dtype: np.dtype) -> str:
    """Why no kernel of any platform comes into question, or ""."""
    if spec.algorithm in BY_XLA:
        return f'algorithm="{spec.algorithm}" was asked for'
    if not all(isinstance(e, int) for e in (sizes.n, sizes.c, sizes.k, *sizes.in_spatial)):
        return "symbolic shape; kernels are selected for known extents"
    if sizes.empty:
        return "a tensor has no elements"
    if not 1 <= spec.conv.rank <= 3:
        return f"{spec.conv.rank} spatial axes; kernels take 1 to 3"
    if spec.conv.crops_everything:
        return "negative padding crops the whole input"
    if spec.algorithm in winograd_jax.ALGORITHMS:
        return int8_winograd.refusal(spec.conv, x_dtype, spec.algorithm)
    return ""


def select(
    platform: str,
    spec: Int8Spec,
    sizes: Sizes,
    x_dtype: np.dtype,
) -> tuple[native.Selection, str]:
    """Chooses the kernel instance on one platform; on the CPU for the call in NHWC.

    Returns:
        The selection, and the problem key ("" where no kernel comes into question).

    Raises:
        ValueError: the demanded algorithm is not known on this platform.
    """
    if reason := _no_kernel(spec, sizes, x_dtype):
        return native.Selection(None, refusals=(native.Refusal("jaxconv", reason),)), ""
    names = [_DTYPE_NAMES[np.dtype(d).name] for d in (x_dtype, np.int8, spec.out_dtype)]
    words = spec.words("krsc", "nhwc") if platform == "cpu" else spec.words("packed", spec.layout)
    key = key_of(Op.FPROP, names, spec.conv, sizes, words)
    kernels = native.load(platform)
    algorithm = spec.algorithm
    if algorithm in int8_winograd.ALGORITHMS:

        def by_kernel(name: str) -> native.Selection:
            if isinstance(kernels, native.Refusal):
                return native.Selection(None)
            return kernels.select(key, name, native.target())

        chosen = int8_winograd.select(algorithm, sizes, by_kernel)
        return chosen, "" if chosen.in_jax else key
    if isinstance(kernels, native.Refusal):
        return native.Selection(None, refusals=(kernels,)), key
    if algorithm == "auto":
        algorithm = native.automatic()
    try:
        return kernels.select(key, algorithm, native.target()), key
    except ValueError as error:
        if algorithm not in ("auto", "native"):
            raise
        # A problem that JAX accepts and the library does not: its numbers are too large.
        return native.Selection(None, refusals=(native.Refusal("jaxconv", str(error)),)), key


def _reasons(refusals: Sequence[native.Refusal]) -> str:
    return "; ".join(f"{kernel}: {reason}" for kernel, reason in refusals)


def _check_algorithm(spec: Int8Spec, sizes: Sizes, x_dtype: np.dtype) -> None:
    """Refuses, while tracing, a demanded algorithm that no platform could run.

    Raises:
        ValueError: with every kernel's reason.
    """
    if spec.algorithm in _UNCONDITIONAL:
        return
    refusals: list[native.Refusal] = []
    for platform in native.PLATFORMS:
        try:
            chosen, key = select(platform, spec, sizes, x_dtype)
        except ValueError as error:  # not an algorithm of this platform
            refusals.append(native.Refusal(platform, str(error)))
            continue
        if chosen.instance:
            return
        refusals += [
            r._replace(reason=f"{r.reason} ({key})") if key else r for r in chosen.refusals
        ]
    refusals = list(dict.fromkeys(refusals))
    raise ValueError(
        f"algorithm {spec.algorithm!r} cannot serve this int8 convolution: {_reasons(refusals)}"
    )


# --- the primitive ---

conv_int8_p = Primitive("jaxconv_int8")


def bind(spec: Int8Spec, x: jax.Array, w: jax.Array, **terms: jax.Array) -> jax.Array:
    """Computes a quantised convolution; ``terms`` are the operands that ``spec.terms`` names.

    Raises:
        ValueError: the algorithm that ``spec`` demands does not take this problem.
    """
    _check_algorithm(spec, spec.sizes(x.shape, w.shape), x.dtype)
    operands = compat.match_varying(x, w, *(terms[name] for name in spec.terms))
    return conv_int8_p.bind(*operands, spec=spec)


def _factors(spec: Int8Spec, k: int) -> tuple[int8_partition.Factors, ...]:
    """Which axes of the operands and the result can be split over devices."""
    inner = (None,) * spec.conv.rank
    whole = spec.conv.groups > 1 or k % BLOCK or k == BLOCK
    of_k = None if whole else "k"
    blocks = None if whole else "k_blocks"
    out = ("n", *inner, of_k) if spec.layout == "nhwc" else ("n", blocks, None, None, None)
    x = ("n", *(None,) * (spec.conv.rank + 1 + (spec.layout == "nchw32")))
    terms = {
        "scale": ("n", of_k) if spec.scale == "image_scale" else (of_k,),
        "offset": (of_k,),
        "bias": (of_k,),
        "residual": out,
        "residual_scale": (None,),
    }
    return (x, (of_k, None), *(terms[name] for name in spec.terms), out)


def _abstract_eval(x, w, *terms, spec: Int8Spec):
    shape = spec.out_shape(x.shape, w.shape)
    factors = _factors(spec, w.shape[0])
    sharding = int8_partition.result_sharding(factors, (x, w, *terms), shape)
    # Derived from an operand's type, so that mesh axes it varies over are kept (shard_map).
    return x.update(
        shape=shape, dtype=spec.out_dtype, weak_type=False, sharding=sharding or x.sharding
    )


def _no_derivative(*_, **__):
    raise TypeError(
        "jaxconv.int8.conv has no derivative: its result is rounded to integers. For "
        "quantisation-aware training use jaxconv.int8.fake_quant_conv, whose gradient passes "
        "straight through the rounding; elsewhere apply jax.lax.stop_gradient to the operands"
    )


def _merged(array: jax.Array) -> jax.Array:
    return partition.merge_axes(array, 0, 2)


def _batch(operands, mapped_axes, *, spec: Int8Spec):
    """Maps over images, which fold into n, or calls once for each example where w is mapped."""
    names = ("x", "w", *spec.terms)
    values = dict(zip(names, operands, strict=True))
    axes = {n: a for n, a in zip(names, mapped_axes, strict=True) if a is not None}
    moved = {name: jnp.moveaxis(values[name], axis, 0) for name, axis in axes.items()}
    if axes.keys() & {"w", "offset", "bias", "residual_scale"}:

        def one(example):
            return bind(spec, **{**values, **example})

        return lax.map(one, moved), 0
    count = next(iter(moved.values())).shape[0]

    def each(name):
        """The operand with the mapped axis first."""
        array = values[name]
        return moved.get(name, jnp.broadcast_to(array, (count, *array.shape)))

    folded: dict[str, jax.Array] = {
        name: _merged(each(name)) for name in ("x", "residual") if name in values
    }
    n = folded["x"].shape[0] // count
    if spec.scale == "scale" and "scale" in moved:
        scale = moved["scale"]
        folded["scale"] = _merged(jnp.broadcast_to(scale[:, None], (count, n, scale.shape[1])))
        spec = dataclasses.replace(spec, scale="image_scale")
    elif spec.scale == "image_scale":
        folded["scale"] = _merged(each("scale"))
    out = bind(spec, **{**values, **folded})
    return partition.split_axis(out, 0, (count, n)), 0


# --- lowering ---


def _call(platform: str, chosen: native.Selection, key: str, *operands, spec: Int8Spec):
    """The custom call; on the CPU between conversions to NHWC and back, which XLA may fuse."""
    values = dict(zip(("x", "w", *spec.terms), operands, strict=True))
    x, w = values["x"], values["w"]
    shape = spec.out_shape(x.shape, w.shape)
    unpacked = platform == "cpu" and spec.layout == "nchw32"
    if platform == "cpu":
        c = spec.sizes(x.shape, w.shape).c // spec.conv.groups
        values["w"] = unpack_rows(w, spec.conv.filter_spatial, c, spec.layout)
    if unpacked:
        shape = (shape[0], *shape[2:4], shape[1] * BLOCK)
        for name in values.keys() & {"x", "residual"}:
            values[name] = to_nhwc(values[name])
    if spec.scale == "image_scale":
        values["scale"] = values["scale"].reshape(-1)
    results = custom_call.called(
        platform,
        TARGET,
        values,
        {"y": jax.ShapeDtypeStruct(shape, spec.out_dtype)} | custom_call.workspace(chosen),
        **custom_call.plan_attributes(chosen, key),
    )
    return to_nchw32(results["y"]) if unpacked else results["y"]


def _select_cropped(platform: str, spec: Int8Spec, sizes: Sizes, x_dtype: np.dtype):
    """``select`` for the same convolution of images that negative padding has cropped before."""
    explicit = explicit_input(spec.conv)
    if explicit == spec.conv or spec.conv.crops_everything:
        return native.Selection(None), ""
    sizes = dataclasses.replace(sizes, in_spatial=explicit.in_spatial)
    return select(platform, dataclasses.replace(spec, conv=explicit), sizes, x_dtype)


def _call_cropped(platform: str, chosen: native.Selection, key: str, x, *rest, spec: Int8Spec):
    first = 2 if spec.layout == "nchw32" else 1
    config = [(0, 0, 0)] * x.ndim
    for axis, (lo, hi) in enumerate(spec.conv.padding, first):
        config[axis] = (min(lo, 0), min(hi, 0), 0)
    x = lax.pad(x, np.zeros((), x.dtype), config)
    spec = dataclasses.replace(spec, conv=explicit_input(spec.conv))
    return _call(platform, chosen, key, x, *rest, spec=spec)


def _in_xla(*operands, spec: Int8Spec):
    """The same numbers without a kernel."""
    terms = dict(zip(("x", "w", *spec.terms), operands, strict=True))
    x, w = terms.pop("x"), terms.pop("w")
    sizes, conv = spec.sizes(x.shape, w.shape), spec.conv
    if sizes.empty and not math.prod(spec.out_shape(x.shape, w.shape)):
        return jnp.zeros(spec.out_shape(x.shape, w.shape), spec.out_dtype)
    if spec.layout == "nchw32":
        x = to_nhwc(x)
        if "residual" in terms:
            terms["residual"] = to_nhwc(terms["residual"])
    c = sizes.c // conv.groups
    w = jnp.moveaxis(unpack_rows(w, conv.filter_spatial, c, spec.layout), 0, -1)
    if spec.algorithm in int8_winograd.ALGORITHMS:
        acc = int8_winograd.sums(x, w, conv, spec.algorithm)
    else:
        acc = exact.sums(x, w, conv)
    if spec.scale:
        y = exact.requantize(
            acc,
            spec.out_dtype,
            activation=spec.activation,
            zero_point=spec.zero_point,
            **terms,
        )
    elif jnp.issubdtype(spec.out_dtype, jnp.integer):
        y = acc.astype(spec.out_dtype)
    else:
        y = acc.astype(np.float32).astype(spec.out_dtype)
    return to_nchw32(y) if spec.layout == "nchw32" else y


def _lower_to_xla(ctx, *operands, spec: Int8Spec):
    # 64-bit types, for the one rounding of a fused multiply-add.
    wide = jax.enable_x64(True) if spec.scale else contextlib.nullcontext()
    with record.paused(), wide:
        return mlir.lower_fun(functools.partial(_in_xla, spec=spec), multiple_results=False)(
            ctx, *operands
        )


def _lower(platform: str, ctx, *operands, spec: Int8Spec):
    """Lowers to one custom call on the chosen instance, or to XLA's operations, saying why."""
    x, w = ctx.avals_in[:2]
    sizes = spec.sizes(x.shape, w.shape)
    chosen, key = select(platform, spec, sizes, x.dtype)

    def recorded(chosen, results, key=key):
        total, precision = flops(spec.conv, sizes), spec.conv.precision
        return record.emit(ctx, Op.FPROP.value, key, precision, platform, total, chosen, results)

    factors = _factors(spec, w.shape[0])
    with record.paused():  # the parts on every device are this one convolution
        split = int8_partition.lower(ctx, conv_int8_p, factors, operands, spec=spec)
    if split is not None:
        return recorded(chosen, split)
    if chosen.in_jax:
        _log.debug("int8 on %s: %s", platform, chosen.instance)
        return recorded(chosen, _lower_to_xla(ctx, *operands, spec=spec))
    if chosen.instance is None:
        beforehand, its_key = _select_cropped(platform, spec, sizes, x.dtype)
        if beforehand.instance is not None:
            call = functools.partial(_call_cropped, platform, beforehand, its_key, spec=spec)
            results = mlir.lower_fun(call, multiple_results=False)(ctx, *operands)
            return recorded(beforehand, results, its_key)
        if spec.algorithm not in _UNCONDITIONAL and not sizes.empty:
            raise ValueError(
                f"algorithm {spec.algorithm!r} cannot serve {key}: {_reasons(chosen.refusals)}"
            )
        _log.info("%s on %s goes to XLA: %s", key or "int8", platform, _reasons(chosen.refusals))
        return recorded(chosen, _lower_to_xla(ctx, *operands, spec=spec))
    _log.debug("%s on %s: %s", key, platform, chosen.instance)
    call = functools.partial(_call, platform, chosen, key, spec=spec)
    return recorded(chosen, mlir.lower_fun(call, multiple_results=False)(ctx, *operands))


ad.primitive_jvps[conv_int8_p] = _no_derivative
ad.primitive_transposes[conv_int8_p] = _no_derivative
rules.register(
    conv_int8_p, shapes=_abstract_eval, batch=_batch, lower=_lower, elsewhere=_lower_to_xla
)
