"""Spellings of group norm, instance norm, and squeeze and excitation."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from spelling_norms import EPSILON, Array, Named, Norm, others, reshape, rsqrt, wide

GROUPS = 4  # groups=0: one group for each channel

Moments = Callable[[Array, tuple[int, ...]], tuple[Array, Array]]  # mean and variance, axes kept


# --- group norm and instance norm ---


def _split(y: Array, groups: int, c: int) -> tuple[Array, tuple[int, ...]]:
    """y in float32 with the channel axis split in two, and the axes to reduce for a group."""
    value = y.astype(wide(y.dtype))
    shape = (*y.shape[:c], groups or y.shape[c], -1, *y.shape[c + 1 :])
    return value.reshape(shape), tuple(a for a in range(1, y.ndim + 1) if a != c)


def _group_norm(moments: Moments, groups: int, c: int) -> Norm:
    """Splits the channel axis, and normalises over the axes of a group."""

    def norm(y, g, b):
        split, axes = _split(y, groups, c)
        mean, variance = moments(split, axes)
        z = ((split - mean) * rsqrt(variance)).reshape(y.shape)
        return (z * reshape(g, y, c) + reshape(b, y, c)).astype(y.dtype)

    return norm


def _of_keras(groups: int, c: int) -> Norm:
    """Applies gain and offset to the split array."""

    def norm(y, g, b):
        split, axes = _split(y, groups, c)
        mean, variance = _by_var(split, axes)
        shape = [1] * split.ndim
        shape[c : c + 2] = split.shape[c : c + 2]
        inverse = rsqrt(variance) * g.reshape(shape)
        offset = -mean * inverse + b.reshape(shape)
        return (split * inverse + offset).reshape(y.shape).astype(y.dtype)

    return norm


def _of_squares(y: Array, axes: tuple[int, ...]) -> tuple[Array, Array]:
    mean = y.mean(axes, keepdims=True)
    return mean, jnp.maximum((y * y).mean(axes, keepdims=True) - mean * mean, 0)


def _by_var(y: Array, axes: tuple[int, ...]) -> tuple[Array, Array]:
    return y.mean(axes, keepdims=True), y.var(axes, keepdims=True)


def _in_two_steps(y: Array, axes: tuple[int, ...]) -> tuple[Array, Array]:
    """Sums over positions first, then over the channels of a group."""
    *positions, channel = axes if axes[-1] == y.ndim - 1 else (*axes[1:], axes[0])

    def mean(value):
        return value.mean(positions, keepdims=True).mean(channel, keepdims=True)

    m = mean(y)
    return m, mean(y * y) - m * m


def _of_each_channel(groups: int, c: int) -> Norm:
    """Computes moments of each channel, then of groups, then coefficients for each channel."""

    def norm(y, g, b):
        value = y.astype(wide(y.dtype))
        positions = tuple(a for a in others(y, c) if a)
        first, second = value.mean(positions), lax.square(value).mean(positions)

        def of_group(each):
            n, channels = each.shape
            split = each.reshape(n, groups or channels, -1)
            mean = split.mean(-1, keepdims=True)
            return jnp.broadcast_to(mean, split.shape).reshape(n, channels)

        mean, squares = of_group(first), of_group(second)
        scale = rsqrt(squares - mean * mean) * g
        shape = [y.shape[a] if a in (0, c) else 1 for a in range(y.ndim)]
        z = value * scale.reshape(shape) + (b - mean * scale).reshape(shape)
        return z.astype(y.dtype)

    return norm


def _rows_of_examples(groups: int, c: int) -> Norm:
    """Reshapes to (N, G, everything else), as in PyTorch."""

    def norm(y, g, b):
        first = jnp.moveaxis(y, c, 1)
        value = first.astype(wide(y.dtype)).reshape(y.shape[0], groups or y.shape[c], -1)
        mean = jnp.mean(value, -1, keepdims=True)
        variance = jnp.var(value, -1, keepdims=True)
        z = ((value - mean) / jnp.sqrt(variance + EPSILON)).reshape(first.shape)
        z = z * g[None, :, None, None] + b[None, :, None, None]
        return jnp.moveaxis(z, 1, c).astype(y.dtype)

    return norm


def _mapped_over_examples(groups: int, c: int) -> Norm:
    def norm(y, g, b):
        def one(y):
            value = y.astype(wide(y.dtype))
            split = value.reshape(*y.shape[: c - 1], groups, -1, *y.shape[c:])
            axes = tuple(a for a in range(split.ndim) if a != c - 1)
            mean, variance = _by_var(split, axes)
            z = ((split - mean) * rsqrt(variance)).reshape(y.shape)
            return (z * reshape(g, y, c - 1) + reshape(b, y, c - 1)).astype(y.dtype)

        return jax.vmap(one)(y)

    return norm


def _by_products_with_groups(groups: int, c: int) -> Norm:
    """Sums over groups by a product with a 0-1 matrix of channels and groups."""

    def norm(y, g, b):
        value = y.astype(wide(y.dtype))
        channels = y.shape[c]
        same = np.kron(np.eye(groups), np.ones((channels // groups,) * 2))
        average = jnp.asarray(same / same.sum(0), value.dtype)
        positions = tuple(a for a in others(y, c) if a)

        def of_group(values):
            return jnp.matmul(values.mean(positions), average, precision="highest")

        mean = of_group(value)
        variance = of_group(value * value) - mean * mean
        one = [y.shape[a] if a in (0, c) else 1 for a in range(y.ndim)]
        z = (value - mean.reshape(one)) * rsqrt(variance).reshape(one)
        return (z * reshape(g, y, c) + reshape(b, y, c)).astype(y.dtype)

    return norm


def _linen(groups: int, c: int) -> Norm:
    def norm(y, g, b):
        linen = importlib.import_module("flax.linen")
        module = linen.GroupNorm(groups, epsilon=EPSILON, dtype=y.dtype)
        last = module.apply({"params": {"scale": g, "bias": b}}, jnp.moveaxis(y, c, -1))
        return jnp.moveaxis(last, -1, c)

    return norm


def _linen_instances(c: int) -> Norm:
    def norm(y, g, b):
        linen = importlib.import_module("flax.linen")
        module = linen.InstanceNorm(epsilon=EPSILON, dtype=y.dtype, feature_axes=c)
        return module.apply({"params": {"scale": g, "bias": b}}, y)

    return norm


def _nnx(groups: int, c: int) -> Norm:
    def norm(y, g, b):
        nnx = importlib.import_module("flax.nnx")
        options = dict(epsilon=EPSILON, dtype=y.dtype, param_dtype=g.dtype, rngs=nnx.Rngs(0))
        module = nnx.GroupNorm(g.size, groups, **options)
        module.scale, module.bias = nnx.Param(g), nnx.Param(b)
        return jnp.moveaxis(module(jnp.moveaxis(y, c, -1)), -1, c)

    return norm


def _equinox(groups: int, c: int) -> Norm:
    def norm(y, g, b):
        eqx = importlib.import_module("equinox")
        module = eqx.nn.GroupNorm(groups, g.size, eps=EPSILON, dtype=wide(y.dtype))
        module = eqx.tree_at(lambda m: (m.weight, m.bias), module, (g, b))
        return jnp.moveaxis(jax.vmap(module)(jnp.moveaxis(y, c, 1)), 1, c)

    return norm


def _haiku(groups: int, c: int) -> Norm:
    def norm(y, g, b):
        haiku = importlib.import_module("haiku")
        pure = haiku.transform(lambda y: haiku.GroupNorm(groups, eps=EPSILON)(y))
        value = jnp.moveaxis(y, c, -1).astype(wide(y.dtype))
        parameters = {"group_norm": {"scale": g, "offset": b}}
        return jnp.moveaxis(pure.apply(parameters, None, value), -1, c).astype(y.dtype)

    return norm


def _instance_norm(moments: Moments, c: int) -> Norm:
    """Normalises each channel of each example by its own mean and variance."""

    def norm(y, g, b):
        value = y.astype(wide(y.dtype))
        mean, variance = moments(value, tuple(a for a in others(y, c) if a))
        z = (value - mean) * rsqrt(variance)
        return (z * reshape(g, y, c) + reshape(b, y, c)).astype(y.dtype)

    return norm


# Functions of the number of groups and the channel axis.
GROUP_FORMS: dict[str, Callable[[int, int], Norm]] = {
    "group norm, squares": functools.partial(_group_norm, _of_squares),
    "group norm, jnp.var": functools.partial(_group_norm, _by_var),
    "group norm, positions first": functools.partial(_group_norm, _in_two_steps),
    "group norm of keras": _of_keras,
    "group norm, channels first": _of_each_channel,
    "group norm, (N, G, -1)": _rows_of_examples,
    "group norm, vmap": _mapped_over_examples,
    "group norm, by products": _by_products_with_groups,
}

_OF_LIBRARIES = {"flax.linen": _linen, "flax.nnx": _nnx, "equinox": _equinox, "haiku": _haiku}

# Functions of the channel axis.
INSTANCE_FORMS: dict[str, Callable[[int], Norm]] = {
    "instance norm, squares": functools.partial(_instance_norm, _of_squares),
    "instance norm, jnp.var": functools.partial(_instance_norm, _by_var),
    "instance norm, (N, C, -1)": functools.partial(_rows_of_examples, 0),
    "instance norm as groups of 1": functools.partial(_group_norm, _by_var, 0),
    "instance norm, channels first": functools.partial(_of_each_channel, 0),
}


def _groups(of_groups: Callable[[int, int], Norm], library: str = "") -> Named:
    return Named(f"group {GROUPS}", library, functools.partial(of_groups, GROUPS))


GROUP_NORMS: dict[str, Named] = {
    **{name: _groups(form) for name, form in GROUP_FORMS.items()},
    **{f"group norm of {name}": _groups(form, name) for name, form in _OF_LIBRARIES.items()},
    **{name: Named("instance", "", form) for name, form in INSTANCE_FORMS.items()},
    "instance norm of flax.linen": Named("instance", "flax.linen", _linen_instances),
}


# --- squeeze and excitation ---


def _positions_of(c: int) -> tuple[int, int]:
    return (1, 2) if c == 3 else (2, 3)


def _excited(squeezed: Array, p: dict[str, Array]) -> Array:
    """(N, C) -> (N, C): two dense layers with SiLU between."""
    inner = squeezed @ p["squeeze"].astype(squeezed.dtype) + p["squeeze_bias"].astype(
        squeezed.dtype
    )
    return jax.nn.silu(inner) @ p["excite"].astype(squeezed.dtype) + p["excite_bias"].astype(
        squeezed.dtype
    )


def _as_factors(s: Array, a: Array, c: int) -> Array:
    return s.reshape([a.shape[i] if i in (0, c) else 1 for i in range(a.ndim)])


def _squeeze(mean: Callable[[Array, int], Array], gate: Callable, swapped: bool = False):
    def squeeze(a: Array, p: dict[str, Array], c: int) -> Array:
        s = gate(_excited(mean(a, c), p))
        s = _as_factors(s, a, c)
        return s * a if swapped else a * s

    return squeeze


def _squeeze_by_convolutions(a: Array, p: dict[str, Array], c: int) -> Array:
    """Dense layers as pointwise convolutions of one pixel, as in Flax and Keras."""
    s = jnp.mean(a, _positions_of(c), keepdims=True)
    layout = "NHWC" if c == 3 else "NCHW"

    def dense(s: Array, name: str) -> Array:
        w = p[name].astype(s.dtype)[None, None]
        numbers = (layout, "HWIO", layout)
        y = lax.conv_general_dilated(s, w, (1, 1), "SAME", dimension_numbers=numbers)
        return y + reshape(p[f"{name}_bias"], y, c).astype(y.dtype)

    return a * jax.nn.sigmoid(dense(jax.nn.silu(dense(s, "squeeze")), "excite"))


def _squeeze_by_vmap(a: Array, p: dict[str, Array], c: int) -> Array:
    def one(a):
        s = jax.nn.sigmoid(_excited(a.mean([i - 1 for i in _positions_of(c)]), p))
        return a * reshape(s, a, c - 1)

    return jax.vmap(one)(a)


def _mean_wide(a: Array, c: int) -> Array:
    return a.astype(wide(a.dtype)).mean(_positions_of(c)).astype(a.dtype)


def _mean_by_einsum(a: Array, c: int) -> Array:
    letters = "nhwc" if c == 3 else "nchw"
    return jnp.einsum(f"{letters}->nc", a) / (a.size // (a.shape[0] * a.shape[c]))


def _mean_by_pool(a: Array, c: int) -> Array:
    window = [a.shape[i] if i in _positions_of(c) else 1 for i in range(4)]
    sums = lax.reduce_window(a, np.zeros((), a.dtype), lax.add, window, window, "VALID")
    return (sums / np.prod(window).astype(a.dtype)).reshape(a.shape[0], a.shape[c])


def _mean_of_pixels(a: Array, c: int) -> Array:
    return jnp.moveaxis(a, c, -1).reshape(a.shape[0], -1, a.shape[c]).mean(1)


_SQUEEZE, _HARD_SQUEEZE = "squeeze", "squeeze, hard"

# Name -> (meaning, function of a, the parameters and the channel axis).
SQUEEZES: dict[str, tuple[str, Callable[[Array, dict[str, Array], int], Array]]] = {
    "squeeze, mean in float32": (_SQUEEZE, _squeeze(_mean_wide, jax.nn.sigmoid)),
    "squeeze, mean": (
        _SQUEEZE,
        _squeeze(lambda a, c: a.mean(_positions_of(c)), jax.nn.sigmoid),
    ),
    "squeeze, einsum": (_SQUEEZE, _squeeze(_mean_by_einsum, jax.nn.sigmoid)),
    "squeeze, average pool": (_SQUEEZE, _squeeze(_mean_by_pool, jax.nn.sigmoid)),
    "squeeze, pixels": (_SQUEEZE, _squeeze(_mean_of_pixels, jax.nn.sigmoid, swapped=True)),
    "squeeze, 1 / (1 + exp)": (
        _SQUEEZE,
        _squeeze(_mean_wide, lambda s: 1 / (1 + jnp.exp(-s))),
    ),
    "squeeze, convolutions": (_SQUEEZE + " by convolutions", _squeeze_by_convolutions),
    "squeeze, vmap": (_SQUEEZE, _squeeze_by_vmap),
    "squeeze, hard_sigmoid": (_HARD_SQUEEZE, _squeeze(_mean_wide, jax.nn.hard_sigmoid)),
    "squeeze, clip": (
        _HARD_SQUEEZE,
        _squeeze(_mean_by_pool, lambda s: jnp.clip(s / 6 + 0.5, 0, 1), swapped=True),
    ),
}
