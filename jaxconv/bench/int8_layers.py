"""Quantised layers: int8 to int8, with scale, bias, ReLU and rounding in the convolution.

    t = max(0, sum * scale[k] + bias[k])          y = t, rounded half to even, saturated to int8

Scales and biases are chosen so that the results fill int8's range and a few saturate. This library
gets packed operands, as in a quantised network.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxconv import int8
from jaxconv._src.int8 import int8_primitive
from jaxconv._src.library import native
from jaxconv._src.problem.spec import Op
from jaxconv.bench.layers import Layer
from jaxconv.bench.problem import Library, Problem

# Standard deviation of the product of two integers that are uniform over -127 ... 127.
_DEVIATION = 127 * 128 / 3

# The standard deviation of the results before ReLU, and the largest bias.
_SPREAD, _BIAS = 48.0, 24.0

# Channels in a block of NCHW32, and in an image that is read without packing.
_BLOCK, _FEW = 32, 4


def possible(dtype: str, op: Op, layer: Layer) -> bool:
    """Whether int8 has the problem: no gradients; NCHW32 in 2-D; one group or whole blocks."""
    if not dtype.startswith("int8"):
        return True
    if op is not Op.FPROP or dtype == "int8":
        return op is Op.FPROP
    blocks = not (layer.c // layer.groups % _BLOCK or layer.k // layer.groups % _BLOCK)
    if dtype == "int8_nhwc":
        return layer.groups == 1 or blocks or layer.groups == layer.c == layer.k
    return (layer.groups == 1 or blocks) and layer.rank == 2


def scale_and_bias(layer: Layer, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Random scale and bias, float32 (K,) each."""
    terms = np.prod(layer.window) * layer.c / layer.groups
    scale_key, bias_key = jax.random.split(key)
    scale = jax.random.uniform(scale_key, (layer.k,), minval=0.5, maxval=1.5)
    bias = jax.random.uniform(bias_key, (layer.k,), minval=-_BIAS, maxval=_BIAS)
    return scale * (_SPREAD / (_DEVIATION * terms**0.5)), bias


def ours(problem: Problem) -> Library:
    """``jaxconv.int8.conv`` on packed operands."""
    layer, nchw32 = problem.layer, problem.dtype == "int8_nchw32"
    data_format = "NCHW32" if nchw32 else "channels_last"
    form = "DHW"[3 - layer.rank :] + "IO"

    def prepare(x, w, scale, bias):
        if layer.groups == 1 and layer.c < _FEW:  # an image is stored with four channels
            missing = [(0, 0)] * layer.rank + [(0, _FEW - layer.c)]
            x, w = jnp.pad(x, [(0, 0), *missing]), jnp.pad(w, [*missing, (0, 0)])
        given = dict(groups=layer.groups, data_format=data_format, filter_format=form)
        packed = int8.pack_filter(w, **given)
        return int8.pack(x) if nchw32 and layer.c > _FEW else x, packed, scale, bias

    def compute(x, w, scale, bias):
        return int8.conv(
            x,
            w,
            scale,
            bias,
            stride=layer.stride,
            padding=[(p, p) for p in layer.padding],
            dilation=layer.dilation,
            activation="relu",
            data_format=data_format,
            algorithm=problem.algorithm,
        )

    return Library(compute, jax.jit(prepare), int8.unpack if nchw32 else lambda y: y)


def selection(problem: Problem, platform: str) -> native.Selection:
    """The selection of ``int8.conv`` on a platform: an instance, or a reason for none.

    Raises:
        ValueError: the demanded algorithm does not take the problem.
    """
    layer, library = problem.layer, ours(problem)
    shapes = [jax.ShapeDtypeStruct(layer.shape(role), np.int8) for role in problem.op.roles[:2]]
    shapes += [jax.ShapeDtypeStruct((layer.k,), np.float32)] * 2
    jaxpr = jax.make_jaxpr(library.compute)(*jax.eval_shape(library.prepare, *shapes))
    (found,) = (e for e in jaxpr.eqns if e.primitive is int8_primitive.conv_int8_p)
    x, w = (operand.aval for operand in found.invars[:2])
    spec = found.params["spec"]
    return int8_primitive.Quantised(spec).select(platform, spec.sizes(x.shape, w.shape), x.dtype)[0]


def requantize_by_xla(sums: Callable[..., jax.Array]) -> Library:
    """The same on int32 sums, as elementwise operations that XLA fuses."""

    def compute(x, w, scale, bias):
        t = jax.nn.relu(sums(x, w).astype(jnp.float32) * scale + bias)
        return jnp.clip(jnp.round(t), -128, 127).astype(jnp.int8)

    return Library(compute)


def requantize_exactly(sums: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    """The same on exact sums in float64: the reference."""
    # float32(sum) times scale is exact in float64. The sum with the bias is rounded to float64 and
    # then to float32: one in 2^29 differs from a fused multiply-add, in float32's last bit.
    rounded = sums.astype(jnp.float32).astype(jnp.float64)
    t = (rounded * scale.astype(jnp.float64) + bias.astype(jnp.float64)).astype(jnp.float32)
    return jnp.clip(jnp.round(jax.nn.relu(t)), -128, 127).astype(jnp.float64)
