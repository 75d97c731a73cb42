"""Layers that the built-in networks are made of: channels-last, plain JAX on lax's convolution.

A network is one function ``forward(net, x) -> y`` of a ``Pass`` and its input. The same function
lists the network's parameters, computes its inference and its training step. No line of it knows
of jaxconv.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# What is left of batch normalisation's running statistics after one training step.
_DECAY = 0.9


class Declared(NamedTuple):
    """A parameter: its shape, and mean and standard deviation of its initial values."""

    shape: tuple[int, ...]
    mean: float
    deviation: float


class Pass:
    """One pass through a network.

    Layers take their parameters, and batch normalisation its running mean and variance, from two
    lists, in the order in which the network comes by them.

    Args:
        parameters: the parameters, float32; None to list them in ``declared`` instead.
        statistics: alternating running means and variances.
        train: whether batch normalisation takes the batch's mean and variance.

    Attributes:
        declared: the parameters that the network asked for.
        statistics: after the pass, the running statistics that it leaves.
    """

    def __init__(
        self,
        parameters: list[jax.Array] | None = None,
        statistics: list[jax.Array] | None = None,
        train: bool = False,
    ):
        self._parameters: Iterator[jax.Array] | None = None
        if parameters is not None:
            self._parameters = iter(parameters)
        self._running = iter(statistics or [])
        self.train = train
        self.declared: list[Declared] = []
        self.statistics: list[jax.Array] = []

    def parameter(
        self, shape: tuple[int, ...], mean: float = 0.0, deviation: float = 0.0
    ) -> jax.Array:
        """The next parameter."""
        self.declared.append(Declared(shape, mean, deviation))
        if self._parameters is None:
            return jnp.full(shape, mean)
        return next(self._parameters)

    def conv(
        self,
        x: jax.Array,
        k: int,
        window: int,
        *,
        stride: int = 1,
        groups: int = 1,
        dilation: int = 1,
        padding: tuple[int, int] | None = None,
        bias: bool = False,
    ) -> jax.Array:
        """Convolution to ``k`` channels; ``window`` and the rest hold for every spatial axis.

        Without ``padding``, (before, after), the window is centred on the pixel it writes.
        """
        rank, c = x.ndim - 2, x.shape[-1] // groups
        deviation = (2 / (window**rank * c)) ** 0.5  # He et al. 2015
        w = self.parameter((window,) * rank + (c, k), deviation=deviation)
        centred = dilation * (window - 1) // 2
        y = self.convolve(
            x,
            w,
            window_strides=(stride,) * rank,
            padding=[padding or (centred, centred)] * rank,
            rhs_dilation=(dilation,) * rank,
            feature_group_count=groups,
        )
        return y + self.parameter((k,)).astype(y.dtype) if bias else y

    def convolve(self, x: jax.Array, w: jax.Array, **window) -> jax.Array:
        """The convolution of a layer; ``window`` holds lax's arguments."""
        axes = "DHW"[5 - x.ndim :]
        return lax.conv_general_dilated(
            x,
            w.astype(x.dtype),
            dimension_numbers=(f"N{axes}C", f"{axes}IO", f"N{axes}C"),
            **window,
        )

    def conv_transpose(self, x: jax.Array, k: int, window: int) -> jax.Array:
        """Transposed convolution whose stride is its window: windows do not overlap."""
        rank, c = x.ndim - 2, x.shape[-1]
        w = self.parameter((window,) * rank + (c, k), deviation=(2 / c) ** 0.5)
        axes = "DHW"[3 - rank :]
        return lax.conv_transpose(
            x,
            w.astype(x.dtype),
            (window,) * rank,
            "VALID",
            dimension_numbers=(f"N{axes}C", f"{axes}IO", f"N{axes}C"),
        )

    def dense(self, x: jax.Array, k: int, deviation: float | None = None) -> jax.Array:
        """Matrix product to ``k`` channels, and a bias."""
        c = x.shape[-1]
        w = self.parameter((c, k), deviation=c**-0.5 if deviation is None else deviation)
        return x @ w.astype(x.dtype) + self.parameter((k,)).astype(x.dtype)

    def batch_norm(self, x: jax.Array, epsilon: float = 1e-5) -> jax.Array:
        """Batch normalisation; in training by the batch's own mean and variance."""
        c = x.shape[-1]
        scale, offset = self.parameter((c,), mean=1.0), self.parameter((c,))
        mean, variance = next(self._running, jnp.zeros(c)), next(self._running, jnp.ones(c))
        wide = x.astype(jnp.float32)
        if self.train:
            axes = tuple(range(x.ndim - 1))
            running = mean, variance
            mean = wide.mean(axes)
            variance = jnp.maximum((wide * wide).mean(axes) - mean * mean, 0)
            self.statistics += [
                _DECAY * before + (1 - _DECAY) * now
                for before, now in zip(running, (mean, variance), strict=True)
            ]
        else:
            self.statistics += [mean, variance]
        return self.affine(wide, mean, scale * lax.rsqrt(variance + epsilon), offset).astype(
            x.dtype
        )

    def affine(
        self, x: jax.Array, mean: jax.Array, scale: jax.Array, offset: jax.Array
    ) -> jax.Array:
        """The result of batch normalisation, float32, from vectors."""
        return (x - mean) * scale + offset

    def conv_norm(self, x: jax.Array, k: int, window: int, **options) -> jax.Array:
        """Convolution without bias and batch normalisation."""
        return self.batch_norm(self.conv(x, k, window, **options))

    def layer_norm(self, x: jax.Array, epsilon: float = 1e-6) -> jax.Array:
        """Normalisation of each pixel over its channels."""
        return self._gain_and_offset(_normalised(x, (-1,), epsilon), x.dtype)

    def group_norm(self, x: jax.Array, groups: int, epsilon: float = 1e-5) -> jax.Array:
        """Normalisation of each example over the pixels and channels of a group."""
        split = x.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)
        axes = (*range(1, x.ndim - 1), -1)
        return self._gain_and_offset(_normalised(split, axes, epsilon).reshape(x.shape), x.dtype)

    def _gain_and_offset(self, wide: jax.Array, dtype: jnp.dtype) -> jax.Array:
        c = wide.shape[-1]
        return (wide * self.parameter((c,), mean=1.0) + self.parameter((c,))).astype(dtype)


class ProductPass(Pass):
    """A pass whose batch normalisation multiplies x itself, as many write it."""

    def affine(
        self, x: jax.Array, mean: jax.Array, scale: jax.Array, offset: jax.Array
    ) -> jax.Array:
        """The same as of ``Pass``, not centred."""
        return x * scale + (offset - mean * scale)


# Passes by how they write batch normalisation: (x - mean) * scale + offset, or the other way.
PASSES = {"centred": Pass, "product": ProductPass}


def _normalised(x: jax.Array, axes: tuple[int, ...], epsilon: float) -> jax.Array:
    """``x`` in float32, with mean 0 and variance 1 over ``axes``."""
    wide = x.astype(jnp.float32)
    mean = wide.mean(axes, keepdims=True)
    variance = jnp.maximum((wide * wide).mean(axes, keepdims=True) - mean * mean, 0)
    return (wide - mean) * lax.rsqrt(variance + epsilon)


def relu6(x: jax.Array) -> jax.Array:
    """The rectifier of mobile networks."""
    return jnp.clip(x, 0, 6)


def max_pool(x: jax.Array, window: int, stride: int, pad: int = 0) -> jax.Array:
    """The largest value of each window."""
    rank = x.ndim - 2
    return lax.reduce_window(
        x,
        -jnp.inf,
        lax.max,
        (1, *(window,) * rank, 1),
        (1, *(stride,) * rank, 1),
        [(0, 0), *[(pad, pad)] * rank, (0, 0)],
    )


def mean_pool(x: jax.Array) -> jax.Array:
    """The mean over all spatial axes, summed in float32."""
    axes = tuple(range(1, x.ndim - 1))
    return x.astype(jnp.float32).mean(axes).astype(x.dtype)
