"""The primitive conv_int8: a forward convolution of 8-bit operands with its epilogue.

The operands are x, w and the present terms of the epilogue, in the order of ``TERMS``;
``cc/core/epilogue.h`` defines the epilogue. Arrays are in canonical order:

    x                x (n, *spatial, c), or in the layout nchw32 (n, c / 32, h, w, 32), and
                     (n, 1, h, w, 4) where c is 4
    w                int8 (k, L), packed as ``int8_layout.pack_rows`` packs it for the layout
    scale            float32 (k,), or (n, k) where the spec says "image_scale"
    offset           int32 (k,), added to the sums
    bias             float32 (k,)
    residual         as the result
    residual_scale   float32 (1,)

It has no derivative, because rounding to 8 bits has none.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from jaxconv._src import compat
from jaxconv._src.call import call, selection
from jaxconv._src.call.call import Call, Selected
from jaxconv._src.int8 import int8_winograd
from jaxconv._src.int8.int8_layout import (
    BLOCK,
    to_nchw32,
    to_nhwc,
    unpack_rows,
)
from jaxconv._src.library import custom_call, native
from jaxconv._src.problem.spec import DTYPE_NAMES, ConvSpec, Op, Sizes, key_of
from jaxconv._src.sharding import explicit_mesh, partition
from jaxconv._src.sharding.partition import SPATIAL, Factor, Tensor
from jaxconv._src.ways import exact, winograd_jax

TARGET = "jaxconv_int8"
# Algorithms that request XLA operations: a matrix product of all windows.
BY_XLA = (selection.XLA, selection.IM2COL)

TERMS = ("scale", "offset", "bias", "residual", "residual_scale")

_DTYPE_NAMES = {**DTYPE_NAMES, "uint8": "u8"}


@dataclasses.dataclass(frozen=True)
class Int8Spec:
    """Everything about a quantised convolution that is not an array.

    Attributes:
        conv: the window, the groups and the algorithm; all axis orders are canonical.
        layout: "nhwc" (channels last, 1 to 3 spatial axes) or "nchw32".
        out_dtype: int8, uint8, int32, float32, bfloat16 or float16.
        scale: "", "scale" (one for each output channel) or "image_scale" (for each image too).
        offset, bias, residual: whether these terms are present; they require a scale.
        activation: None, "relu" or "relu6".
        zero_point: the zero point of an int8 or uint8 result.
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
        """The end of the problem key: layouts and terms."""
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
    """The ``ConvSpec`` of a convolution whose arrays are in canonical order."""
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


# --- the primitive ---

conv_int8_p = Primitive("jaxconv_int8")


def bind(spec: Int8Spec, x: jax.Array, w: jax.Array, **terms: jax.Array) -> jax.Array:
    """Computes a quantised convolution; ``terms`` are the operands named in ``spec.terms``.

    Raises:
        ValueError: the algorithm that ``spec`` demands does not accept this problem.
    """
    call.check(Quantised(spec), x.shape, w.shape, x.dtype)
    operands = compat.match_varying(x, w, *(terms[name] for name in spec.terms))
    return conv_int8_p.bind(*operands, spec=spec)


def _abstract_eval(x, w, *terms, spec: Int8Spec):
    shape = spec.out_shape(x.shape, w.shape)
    return partition.result_type(Quantised(spec), shape, x, w, *terms)


def _no_derivative(*_, **__):
    raise TypeError(
        "jaxconv.int8.conv has no derivative: its result is rounded to integers. For "
        "quantisation-aware training use jaxconv.int8.fake_quant_conv, whose gradient passes "
        "straight through the rounding; elsewhere apply jax.lax.stop_gradient to the operands"
    )


def _merged(array: jax.Array) -> jax.Array:
    return explicit_mesh.merge_axes(array, 0, 2)


def _batch(operands, mapped_axes, *, spec: Int8Spec):
    """Folds mapped images into n; with a mapped w, calls once for each example."""
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
    return explicit_mesh.split_axis(out, 0, (count, n)), 0


# --- selection, sharding, custom call ---


@dataclasses.dataclass(frozen=True)
class Quantised(Call):
    """A convolution of 8-bit operands with its epilogue."""

    spec: Int8Spec

    primitive = conv_int8_p
    op = Op.FPROP
    target = TARGET
    subject = "int8 convolution"
    demands = (selection.AUTO, selection.NATIVE, *BY_XLA)

    @property
    def conv(self) -> ConvSpec:
        return self.spec.conv

    @property
    def out_dtype(self) -> np.dtype:  # type: ignore[override]
        return self.spec.out_dtype

    def with_conv(self, conv: ConvSpec) -> Quantised:
        return Quantised(dataclasses.replace(self.spec, conv=conv))

    def sizes(self, lhs_shape: Sequence[int], rhs_shape: Sequence[int]) -> Sizes:
        return self.spec.sizes(lhs_shape, rhs_shape)

    def tensors(self, *shapes: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        """Output channels of a single group can be split, in blocks; others stay whole."""
        k, n = shapes[1][0], Factor("n")
        whole = self.conv.groups > 1 or k % BLOCK or k == BLOCK
        of_k = None if whole else Factor("k", BLOCK, "k_of_block")
        blocks = None if whole else Factor("k")
        rows = tuple(map(Factor, SPATIAL[: self.conv.rank]))
        if self.spec.layout == "nhwc":
            x, y = (n, *rows, None), (n, *rows, of_k)
        else:
            x, y = (n, None, *rows, None), (n, blocks, *rows, None)
        terms = {
            "scale": (n, of_k) if self.spec.scale == "image_scale" else (of_k,),
            "offset": (of_k,),
            "bias": (of_k,),
            "residual": y,
            "residual_scale": (None,),
        }
        axes = {"x": x, "w": (of_k, None), **{name: terms[name] for name in self.spec.terms}}
        given = zip(axes.items(), shapes, strict=True)
        operands = [Tensor(name, tuple(shape), along) for (name, along), shape in given]
        return operands, [Tensor("y", self.spec.out_shape(*shapes[:2]), y)]

    def select(self, platform: str, sizes: Sizes, dtype: np.dtype) -> Selected:
        """The kernel instance; on the CPU that of the call in NHWC."""
        spec, algorithm = self.spec, self.algorithm
        if reason := self._out_of_question(sizes, dtype):
            return selection.refused(reason), ""
        names = [_DTYPE_NAMES[np.dtype(d).name] for d in (dtype, np.int8, spec.out_dtype)]
        in_nhwc = spec.words("krsc", "nhwc")
        words = in_nhwc if platform == "cpu" else spec.words("packed", spec.layout)
        key = key_of(Op.FPROP, names, spec.conv, sizes, words)
        by_kernel = functools.partial(selection.kernel, platform, key)
        if algorithm not in int8_winograd.ALGORITHMS:
            return by_kernel(algorithm), key
        chosen = int8_winograd.select(algorithm, sizes, by_kernel)
        return chosen, "" if chosen.in_jax else key

    def _out_of_question(self, sizes: Sizes, dtype: np.dtype) -> str:
        """Why no kernel of any platform is a candidate, or ""."""
        if self.algorithm in BY_XLA:
            return f'algorithm="{self.algorithm}" was asked for'
        reason = selection.out_of_question(self.conv, sizes)
        if not reason and self.algorithm in winograd_jax.ALGORITHMS:
            return int8_winograd.refusal(self.conv, dtype, self.algorithm)
        return reason

    @property
    def in_64_bits(self) -> bool:
        return bool(self.spec.scale)  # to round a fused multiply-add once

    def definition(self, platform: str | None, in_jax: bool) -> Callable[..., jax.Array]:
        return functools.partial(_in_xla, spec=self.spec)

    @property
    def names(self) -> tuple[Sequence[str], Sequence[str]]:
        return ("x", "w", *self.spec.terms), ("y",)

    def emit(self, platform: str, ctx, chosen: native.Selection, key: str, operands: Sequence):
        emitted = functools.partial(self._emitted, platform, chosen, key)
        return mlir.lower_fun(emitted, multiple_results=False)(ctx, *operands)

    def _emitted(self, platform: str, chosen: native.Selection, key: str, *operands: jax.Array):
        """The custom call; on the CPU with conversions to and from NHWC, which XLA may fuse."""
        spec = self.spec
        values = dict(zip(self.names[0], operands, strict=True))
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


def _in_xla(*operands, spec: Int8Spec):
    """The same result without a kernel."""
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


ad.primitive_jvps[conv_int8_p] = _no_derivative
ad.primitive_transposes[conv_int8_p] = _no_derivative
call.register(conv_int8_p, Quantised, shapes=_abstract_eval, batch=_batch)
