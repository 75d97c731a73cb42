"""The primitive conv_prepared: fprop with a filter prepared for Winograd.

A CUDA kernel of the family ``winograd`` computes it if one accepts the problem; otherwise, and on
other platforms, the form in JAX does. It has no derivative, because the original filter is not
available.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad

from jaxconv._src import compat
from jaxconv._src.call import call, selection
from jaxconv._src.call.call import Call, Selected
from jaxconv._src.library import custom_call, native
from jaxconv._src.problem.spec import DTYPE_NAMES, ConvSpec, Op, Sizes, key_of
from jaxconv._src.sharding import explicit_mesh, partition
from jaxconv._src.sharding.partition import Tensor
from jaxconv._src.ways import winograd_jax
from jaxconv._src.winograd.winograd_filter import LAYOUTS, PreparedFilter, checked, unpacked


def algorithm_of(algorithm: str, w: PreparedFilter) -> str:
    """The algorithm for which a filter was prepared, or a requested instance of it.

    Raises:
        ValueError: another algorithm is requested.
    """
    own = f"winograd_{w.tile}"
    algorithm = selection.WITH_WINOGRAD.get(algorithm, algorithm)
    if algorithm in (selection.AUTO, selection.NATIVE):
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
    """Checks a prepared filter against an input.

    Raises:
        TypeError: the filter was prepared from another dtype than x has.
        ValueError: its data does not have the form of ``prepare``'s result.
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
        spec: the convolution's, for the original filter; the axes of w are ignored.
        out_dtype: dtype of the result.

    Raises:
        ValueError: Winograd, or the algorithm that ``spec`` demands, does not accept the problem.
    """
    if w.groups != spec.groups:
        raise ValueError(
            f"groups: expected {w.groups}, for which w was prepared, got {spec.groups}"
        )
    algorithm = algorithm_of(spec.algorithm_of(Op.FPROP), w)
    spec = dataclasses.replace(spec, algorithm=(algorithm, algorithm, algorithm))
    without_data: Any = None  # not needed here
    prepared = dataclasses.replace(w, data=without_data)
    sizes = _sizes(spec, prepared, x.shape)
    if reason := winograd_jax.refusal(Op.FPROP, spec, sizes, x.dtype):
        raise ValueError(f"w: a filter prepared for {w.tile} cannot serve: {reason}")
    call.check(Prepared(spec, prepared, np.dtype(out_dtype)), x.shape, w.data.shape, x.dtype)
    x, data = compat.match_varying(x, w.data)
    return conv_prepared_p.bind(
        x, data, spec=spec, prepared=prepared, out_dtype=np.dtype(out_dtype)
    )


def _sizes(spec: ConvSpec, prepared: PreparedFilter, x_shape: Sequence[int]) -> Sizes:
    return Sizes(
        1,
        x_shape[spec.axis("x", "n")],
        prepared.channels * prepared.groups,
        prepared.features,
        spec.in_spatial,
        spec.filter_spatial,
        spec.out_spatial,
    )


# --- the primitive --------------------------------------------------------------------------------

conv_prepared_p = Primitive("jaxconv_prepared")


def _abstract_eval(x, data, *, spec: ConvSpec, prepared: PreparedFilter, out_dtype: np.dtype):
    shape = spec.shape("y", _sizes(spec, prepared, x.shape))
    return partition.result_type(Prepared(spec, prepared, out_dtype), shape, x, data)


def _no_derivative(*_, **__):
    raise TypeError(
        "jaxconv.conv with a prepared filter has no derivative: the filter itself is not at hand. "
        'Differentiate jaxconv.conv(x, w, algorithm="winograd"), or apply jax.lax.stop_gradient '
        "to x and to the prepared filter"
    )


def _batch(operands, mapped_axes, *, spec: ConvSpec, prepared: PreparedFilter, out_dtype):
    """Folds mapped images into n; with mapped filters, one call for each example."""
    (x, data), (of_x, of_data) = operands, mapped_axes
    one = functools.partial(conv_prepared_p.bind, spec=spec, prepared=prepared, out_dtype=out_dtype)
    if of_data is not None:
        data = jnp.moveaxis(data, of_data, 0)
        if of_x is None:
            return lax.map(lambda d: one(x, d), data), 0
        return lax.map(lambda pair: one(*pair), (jnp.moveaxis(x, of_x, 0), data)), 0
    n = spec.axis("x", "n")
    x = jnp.moveaxis(x, of_x, n)
    count, images = x.shape[n : n + 2]
    y = one(explicit_mesh.merge_axes(x, n, 2), data)
    at = spec.axis("y", "n")
    return explicit_mesh.split_axis(y, at, (count, images)), at


# --- selection, sharding, custom call -------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Prepared(Call):
    """A forward convolution with a filter prepared for Winograd."""

    spec: ConvSpec
    prepared: PreparedFilter
    out_dtype: np.dtype

    op = Op.FPROP
    primitive = conv_prepared_p
    target = custom_call.call_target(Op.FPROP)
    subject = "convolution of a prepared filter"

    @property
    def conv(self) -> ConvSpec:
        return self.spec

    def with_conv(self, conv: ConvSpec) -> Prepared:
        return dataclasses.replace(self, spec=conv)

    def sizes(self, lhs_shape: Sequence[int], rhs_shape: Sequence[int]) -> Sizes:
        return _sizes(self.spec, self.prepared, lhs_shape)

    def tensors(self, *shapes: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        """Images and positions can be split; the filter, hence all channels, stays whole."""

        def positions(role: str, shape: Sequence[int]) -> Tensor:
            found = partition.tensor(self.spec, role, shape)
            axes = [None if each and each.name in "ckg" else each for each in found.axes]
            return dataclasses.replace(found, axes=tuple(axes))

        x, data = shapes
        y = self.spec.shape("y", self.sizes(x, data))
        w = Tensor("w", tuple(data), (None,) * len(data))
        return [positions("x", x), w], [positions("y", y)]

    def select(self, platform: str, sizes: Sizes, dtype: np.dtype) -> Selected:
        """A kernel, or the form in JAX unless the algorithm is an instance's name."""
        chosen, key = self.select_kernel(platform, sizes)
        if chosen.instance is None and self.algorithm in winograd_jax.ALGORITHMS:
            spec = dataclasses.replace(self.spec, algorithm=(f"winograd_{self.prepared.tile}",) * 3)
            problem = (Op.FPROP, spec, sizes, self.prepared.dtype)
            if not sizes.empty:
                name = winograd_jax.instance(Op.FPROP, spec, self.prepared.dtype)
                memory = winograd_jax.workspace_bytes(*problem)
                return native.Selection(name, memory, in_jax=True), key
        return chosen, key

    def select_kernel(self, platform: str, sizes: Sizes) -> Selected:
        """The kernel instance, and the problem key ("" for operands that no kernel accepts)."""
        given = self.prepared
        names = [DTYPE_NAMES.get(np.dtype(d).name, "") for d in (given.dtype, self.out_dtype)]
        if not given.is_record or not all(names):
            reason = f"kernels read filters prepared from float16 and bfloat16, not {given.dtype}"
            return selection.refused(reason), ""
        if sizes.empty or self.spec.crops_everything:
            return selection.refused(selection.EMPTY if sizes.empty else selection.CROPPED), ""
        dtypes, words = (names[0], "f16", names[1]), [LAYOUTS[given.tile]]
        key = key_of(Op.FPROP, dtypes, self.spec, sizes, words)
        try:
            return selection.kernel(platform, key, self.algorithm), key
        except ValueError as error:  # not an algorithm of this platform
            return selection.refused(str(error)), key

    def definition(self, platform: str | None, in_jax: bool) -> Callable[..., jax.Array]:
        static: dict[str, Any] = dict(spec=self.spec, prepared=self.prepared)
        return functools.partial(_in_jax, **static, out_dtype=self.out_dtype)

    @property
    def names(self) -> tuple[Sequence[str], Sequence[str]]:
        return ("lhs", "rhs"), ("out",)

    def layouts(self, chosen: native.Selection) -> Mapping[str, Sequence[int]]:
        return {
            "lhs": custom_call.layout(self.spec, "x"),
            "out": custom_call.layout(self.spec, "y"),
        }

    def attributes(self) -> Mapping[str, Any]:
        of_filter = {"rhs_axes": np.zeros((1,), np.int64)}
        return custom_call.axes_attributes(Op.FPROP, self.spec) | of_filter


def _in_jax(x, data, *, spec: ConvSpec, prepared: PreparedFilter, out_dtype):
    """The same result without a kernel."""
    sizes = _sizes(spec, prepared, x.shape)
    if sizes.empty or spec.crops_everything:
        return jnp.zeros(spec.shape("y", sizes), out_dtype)
    u, scale = unpacked(dataclasses.replace(prepared, data=data))
    x = jnp.transpose(x, spec.x_axes)
    y = winograd_jax.multiply(x, u, scale, prepared.outputs, spec, out_dtype)
    return jnp.transpose(y, np.argsort(spec.y_axes).tolist())


ad.primitive_jvps[conv_prepared_p] = _no_derivative
ad.primitive_transposes[conv_prepared_p] = _no_derivative
call.register(conv_prepared_p, Prepared, shapes=_abstract_eval, batch=_batch)
