"""Spellings of batch norm in training: part by part, and as in libraries.

``batch_norm`` composes a norm of ``Parts``, which vary independently: the formulas of its mean,
variance and affine part, how vectors broadcast, where it computes in float32, and what it is mapped
over. ``NORMS`` has the norms of Flax, Equinox, Haiku and Keras, and others.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from fuzz_problems import Draw
from jax import lax

EPSILON = 1e-3

Array = jax.Array
Norm = Callable[[Array, Array, Array], Array]  # of y, gain and offset


def wide(dtype: Any) -> np.dtype:
    """The type in which a program computes statistics: float32, or float64 for float64."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


# --- a batch norm's parts; c is the channels' axis, None where a function is mapped over it ---


@dataclasses.dataclass(frozen=True)
class Parts:
    """A batch norm by the names of its parts.

    With ``early``, vectors are broadcast before the arithmetic on them.
    """

    mean: str = "mean"
    variance: str = "squares, clipped"
    affine: str = "(y - m) * (rsqrt * g) + b"
    spread: str = "implicit"
    converts: str = "float32"
    frame: str = "whole"
    early: bool = False

    @property
    def narrow(self) -> bool:
        """Whether squares or summands are rounded to the layer's type."""
        of_dtype = self.mean == "mean of dtype" or self.variance == "jnp.var of dtype"
        return self.converts == "narrow" or of_dtype


def others(y: Array, c: int | None) -> tuple[int, ...]:
    return tuple(a for a in range(y.ndim) if a != c)


def _count(y: Array, c: int | None) -> int:
    return y.size // (1 if c is None else y.shape[c])


def _positions(y: Array, c: int | None) -> tuple[int, ...]:
    return tuple(a for a in others(y, c) if a != 0)


def _letters(y: Array, c: int | None) -> str:
    return "".join("c" if a == c else "nhwd"[a] for a in range(y.ndim))


def _rows(y: Array, c: int | None) -> Array:
    return jnp.moveaxis(y, c, -1).reshape(-1, y.shape[c])


def _axis_by_axis(y: Array, c: int | None) -> Array:
    for axis in reversed(others(y, c)):
        y = y.mean(axis)
    return y


def _with_ones(y: Array, c: int | None) -> Array:
    axes = others(y, c)
    ones = jnp.full([y.shape[a] for a in axes], 1 / _count(y, c), y.dtype)
    over = tuple(range(len(axes))), axes
    return lax.dot_general(ones, y, (over, ((), ())), precision="highest")


def _ones_by_einsum(y: Array, c: int | None) -> Array:
    letters = _letters(y, c)
    ones = jnp.ones([y.shape[a] for a in others(y, c)], y.dtype)
    both = f"{letters},{letters.replace('c', '')}->c"
    return jnp.einsum(both, y, ones, precision="highest") / _count(y, c)


def _average_pool(y: Array, c: int | None) -> Array:
    window = [y.shape[a] if a in _positions(y, c) else 1 for a in range(y.ndim)]
    sums = lax.reduce_window(y, np.zeros((), y.dtype), lax.add, window, window, "VALID")
    return (sums / np.prod(window).astype(y.dtype)).mean(others(y, c))


def _reduced(y: Array, c: int | None) -> Array:
    return lax.reduce(y, np.zeros((), y.dtype), lax.add, others(y, c)) / _count(y, c)


MEANS: dict[str, Callable[[Array, int | None], Array]] = {
    "mean": lambda y, c: y.mean(others(y, c)),
    "mean, keepdims": lambda y, c: jnp.mean(y, others(y, c), keepdims=True),
    "mean of dtype": lambda y, c: jnp.mean(y, others(y, c), dtype=wide(y.dtype)),
    "sum / n": lambda y, c: y.sum(others(y, c)) / _count(y, c),
    "sum * (1 / n)": lambda y, c: jnp.sum(y, others(y, c)) * (1 / _count(y, c)),
    "average": lambda y, c: jnp.average(y, others(y, c)),
    "positions, then examples": lambda y, c: y.mean(_positions(y, c)).mean(0),
    "examples, then positions": lambda y, c: y.mean(0, keepdims=True).mean(others(y, c)),
    "axis by axis": _axis_by_axis,
    "einsum": lambda y, c: jnp.einsum(f"{_letters(y, c)}->c", y) / _count(y, c),
    "einsum with ones": _ones_by_einsum,
    "ones @ rows": lambda y, c: (
        jnp.matmul(jnp.ones(_count(y, c), y.dtype), _rows(y, c), precision="highest") / _count(y, c)
    ),
    "dot_general with ones": _with_ones,
    "rows": lambda y, c: _rows(y, c).mean(0),
    "transposed": lambda y, c: _rows(y, c).T.mean(1),
    "examples as rows": lambda y, c: (
        jnp.moveaxis(y, c, -1).reshape(y.shape[0], -1, y.shape[c]).mean((0, 1))
    ),
    "lax.reduce": _reduced,
    "average pool": _average_pool,
    "vmap over channels": lambda y, c: jax.vmap(jnp.mean, c)(y),
}


class _Moments(NamedTuple):
    """The arguments of a variance's formula: y, its mean, functions for means and broadcasting."""

    y: Array
    m: Array
    c: int | None
    mean: Callable[[Array], Array]
    array: Callable[[Array], Array]  # a vector as an array that broadcasts against y

    @property
    def centred(self) -> Array:
        return self.y - self.array(self.m)


def _of_examples(s: _Moments) -> Array:
    """The mean of the examples' variances plus the variance of their means."""
    positions = _positions(s.y, s.c)
    return s.y.var(positions).mean(0) + s.y.mean(positions).var(0)


def _shifted(s: _Moments) -> Array:
    """The variance of y minus a constant vector, such as the running mean."""
    channels = 1 if s.c is None else s.y.shape[s.c]
    shift = jnp.asarray(np.linspace(0.5, 1.5, channels), s.y.dtype)
    less = s.y - (shift[0] if s.c is None else reshape(shift, s.y, s.c))
    return s.mean(less * less) - lax.square(s.mean(less))


def _by_einsum(s: _Moments) -> Array:
    letters = _letters(s.y, s.c)
    squares = jnp.einsum(f"{letters},{letters}->c", s.y, s.y, precision="highest")
    return squares / _count(s.y, s.c) - lax.square(s.m.reshape(squares.shape))


def _variadic(s: _Moments) -> Array:
    """One variadic reduction computes both sums."""
    zero = np.zeros((), s.y.dtype)

    def both(a, b):
        return a[0] + b[0], a[1] + b[1]

    sums = lax.reduce((s.y, s.y * s.y), (zero, zero), both, others(s.y, s.c))
    m, squares = (each / _count(s.y, s.c) for each in sums)
    return squares - m * m


def _stacked(s: _Moments) -> Array:
    """One reduction of a stacked array computes both means."""
    axes = tuple(a + 1 for a in others(s.y, s.c))
    m, squares = jnp.stack([s.y, lax.square(s.y)]).mean(axes)
    return jnp.maximum(squares - m * m, 0)


VARIANCES: dict[str, Callable[[_Moments], Array]] = {
    "squares": lambda s: s.mean(s.y * s.y) - s.m * s.m,
    "squares, clipped": lambda s: jnp.maximum(s.mean(lax.square(s.y)) - lax.square(s.m), 0),
    "squares, clip": lambda s: jnp.clip(s.mean(jnp.square(s.y)) - jnp.square(s.m), 0),
    "squares, by powers": lambda s: jax.nn.relu(s.mean(s.y**2) - s.m**2),
    "squares, -(m m - s)": lambda s: -(s.m * s.m - s.mean(s.y * s.y)),
    "two passes": lambda s: s.mean(lax.square(s.centred)),
    "two passes, product": lambda s: s.mean(s.centred * s.centred),
    "two passes, power, clipped": lambda s: jnp.maximum(s.mean(s.centred**2), 0.0),
    "two passes, abs": lambda s: s.mean(jnp.abs(s.centred) ** 2),
    "two passes, y (y - m)": lambda s: s.mean(s.y * s.centred),
    "jnp.var": lambda s: jnp.var(s.y, others(s.y, s.c)),
    "jnp.var, keepdims": lambda s: s.y.var(others(s.y, s.c), keepdims=True),
    "jnp.var of dtype": lambda s: jnp.var(s.y, others(s.y, s.c), dtype=wide(s.y.dtype)),
    "jnp.std ** 2": lambda s: jnp.std(s.y, others(s.y, s.c)) ** 2,
    "of examples": _of_examples,
    "shifted": _shifted,
    "einsum": _by_einsum,
    "variadic reduce": _variadic,
    "stacked": _stacked,
    "vmap over channels": lambda s: jax.vmap(jnp.var, s.c)(s.y),
}


def rsqrt(v: Array) -> Array:
    return lax.rsqrt(v + EPSILON)


def _std(v: Array) -> Array:
    return jnp.sqrt(v + EPSILON)


def _product(y, m, v, g, b, a):
    scale = rsqrt(v) * g
    return y * a(scale) + a(b - m * scale)


def _of_keras(y, m, v, g, b, a):
    inverse = rsqrt(v) * g
    return jnp.add(y * a(inverse), a(-m * inverse + b))


def _distributed(y, m, v, g, b, a):
    scale = a(g * rsqrt(v))
    return y * scale - a(m) * scale + a(b)


# Functions of y, the vectors m, v, g, b, and the function that broadcasts a vector.
AFFINES: dict[str, Callable[..., Array]] = {
    "(y - m) * (rsqrt * g) + b": lambda y, m, v, g, b, a: (y - a(m)) * a(rsqrt(v) * g) + a(b),
    "(y - m) * rsqrt * g + b": lambda y, m, v, g, b, a: (y - a(m)) * a(rsqrt(v)) * a(g) + a(b),
    "(y - m) / sqrt * g + b": lambda y, m, v, g, b, a: (y - a(m)) / a(_std(v)) * a(g) + a(b),
    "y * scale + (b - m * scale)": _product,
    "y * a - m * a + b": _distributed,
    "g * ((y - m) / std) + b": lambda y, m, v, g, b, a: a(g) * ((y - a(m)) / a(_std(v))) + a(b),
    "g * (y - m) / std + b": lambda y, m, v, g, b, a: a(g) * (y - a(m)) / a(_std(v)) + a(b),
    "(y - m) * (g / std) + b": lambda y, m, v, g, b, a: (y - a(m)) * a(g / _std(v)) + a(b),
    "(y - m) * power * g + b": lambda y, m, v, g, b, a: (
        (y - a(m)) * a((v + EPSILON) ** -0.5) * a(g) + a(b)
    ),
    "y * inv + (-m * inv + b)": _of_keras,
    "b + (1 / std) * g * (y - m)": lambda y, m, v, g, b, a: (
        a(b) + a(1 / _std(v)) * a(g) * (y - a(m))
    ),
    "(y / std - m / std) * g + b": lambda y, m, v, g, b, a: (
        (y / a(_std(v)) - a(m / _std(v))) * a(g) + a(b)
    ),
    "b - (m - y) * scale": lambda y, m, v, g, b, a: a(b) - (a(m) - y) * a(g * rsqrt(v)),
    "(y * g - m * g) * rsqrt + b": lambda y, m, v, g, b, a: (
        (y * a(g) - a(m * g)) * a(rsqrt(v)) + a(b)
    ),
    "(y + -m) * rsqrt * g + b": lambda y, m, v, g, b, a: (y + a(-m)) * a(rsqrt(v)) * a(g) + a(b),
    "((y - m) * rsqrt + b / g) * g": lambda y, m, v, g, b, a: (
        ((y - a(m)) * a(rsqrt(v)) + a(b / g)) * a(g)
    ),
}


def reshape(vector: Array, y: Array, c: int) -> Array:
    shape = [1] * y.ndim
    shape[c] = y.shape[c]
    return vector.reshape(shape)


# Functions of a vector, y and c: an array that broadcasts against y.
SPREADS: dict[str, Callable[[Array, Array, int], Array]] = {
    "implicit": lambda v, y, c: v if c == y.ndim - 1 else v.reshape(-1, *[1] * (y.ndim - 1 - c)),
    "reshape": reshape,
    "expand_dims": lambda v, y, c: jnp.expand_dims(v, others(y, c)),
    "[None, None, None, :]": lambda v, y, c: v[
        tuple(slice(None) if a == c else None for a in range(y.ndim))
    ],
    "broadcast_to": lambda v, y, c: jnp.broadcast_to(reshape(v, y, c), y.shape),
    "broadcast_in_dim": lambda v, y, c: lax.broadcast_in_dim(v, y.shape, (c,)),
}

CONVERTS = (
    "float32",  # the norm computes in float32 and rounds once
    "promoted",  # float32 moments; y is promoted by float32 vectors
    "float32 moments",  # float32 moments; all else in y's type
    "rounded between",  # y normalised in float32, gain and offset in y's type
    "narrow",  # all of it in y's type
    "float32 to the end",  # also the shortcut and the activation
)

FRAMES = (
    "whole",
    "jit",
    "rows",  # (N H W, C)
    "pixels",  # (N, H W, C)
    "examples",  # mapped over examples, with lax.pmean
    "examples and channels",  # mapped over examples, and inside over channels (Equinox)
    "channels",
)

# The formulas that can be mapped over examples, or over channels.
_MEANS_OF_EXAMPLES = ("mean", "mean, keepdims", "sum / n", "axis by axis", "einsum", "lax.reduce")
_OF_MEANS = tuple(name for name in VARIANCES if name.startswith(("squares", "two passes")))
_MEANS_OF_CHANNELS = ("mean", "sum / n", "lax.reduce")


def valid(parts: Parts, layout: str) -> bool:
    """Whether the parts can be combined."""
    by_means = parts.variance in _OF_MEANS
    match parts.frame:
        case "channels":
            return parts.mean in _MEANS_OF_CHANNELS and (by_means or parts.variance == "jnp.var")
        case "examples":
            return parts.mean in _MEANS_OF_EXAMPLES and by_means
        case "examples and channels":
            return parts.mean in _MEANS_OF_CHANNELS and by_means
        case "rows":
            return "pixels" not in parts.mean and parts.mean != "average pool"
    return parts.mean != "average pool" or layout == "NHWC"


def drawn(d: Draw, layout: str) -> Parts:
    """Random parts that can be combined."""
    while True:
        parts = Parts(
            d.one_of(*MEANS),
            d.one_of(*VARIANCES),
            d.one_of(*AFFINES),
            d.one_of(*SPREADS),
            d.one_of(*CONVERTS[:3], *CONVERTS),
            d.one_of("whole", "whole", *FRAMES),
            d.chance(0.5),
        )
        if valid(parts, layout):
            return parts


def batch_norm(parts: Parts, c: int) -> Norm:
    """The norm with these parts; ``c`` is the channel axis."""

    def core(y: Array, g: Array, b: Array, c: int | None, axis_name: str = "") -> Array:
        dtype, of_moments = y.dtype, wide(y.dtype)
        spread = SPREADS[parts.spread]

        def array(vector: Array) -> Array:
            is_vector = c is not None and vector.ndim == 1 and vector.size == y.shape[c]
            return spread(vector, y, c) if is_vector and vector.ndim < y.ndim + 1 else vector

        def mean(values: Array) -> Array:
            m = MEANS[parts.mean](values, c)
            return lax.pmean(m, axis_name) if axis_name else m

        value = y if parts.narrow else y.astype(of_moments)
        m = mean(value)
        v = VARIANCES[parts.variance](_Moments(value, m, c, mean, array))
        match parts.converts:
            case "float32" | "float32 to the end":
                value = y.astype(of_moments)
            case "promoted":
                value = y
            case "float32 moments" | "narrow":
                value = y
                m, v, g, b = (vector.astype(dtype) for vector in (m, v, g, b))
            case "rounded between":
                value = ((value - array(m)) * array(rsqrt(v))).astype(dtype)
                return value * array(g.astype(dtype)) + array(b.astype(dtype))
        if parts.early or m.ndim > 1 or v.ndim > 1:
            m, v, g, b = (array(vector) for vector in (m, v, g, b))
            array = _same
        z = AFFINES[parts.affine](value, m, v, g, b, array)
        return z if parts.converts == "float32 to the end" else z.astype(dtype)

    def norm(y: Array, g: Array, b: Array) -> Array:
        match parts.frame:
            case "jit":
                return jax.jit(functools.partial(core, c=c))(y, g, b)
            case "rows":
                rows = core(_rows(y, c), g, b, 1)
                moved = jnp.moveaxis(y, c, -1).shape
                return jnp.moveaxis(rows.reshape(moved), -1, c)
            case "pixels":
                last = jnp.moveaxis(y, c, -1)
                pixels = core(last.reshape(y.shape[0], -1, y.shape[c]), g, b, 2)
                return jnp.moveaxis(pixels.reshape(last.shape), -1, c)
            case "examples":
                one = functools.partial(core, c=c - 1, axis_name="batch")
                return jax.vmap(one, (0, None, None), axis_name="batch")(y, g, b)
            case "examples and channels":
                one = functools.partial(core, c=None, axis_name="batch")
                each = jax.vmap(one, (c - 1, 0, 0), c - 1)
                return jax.vmap(each, (0, None, None), axis_name="batch")(y, g, b)
            case "channels":
                return jax.vmap(functools.partial(core, c=None), (c, 0, 0), c)(y, g, b)
        return core(y, g, b, c)

    return norm


def _same(vector: Array) -> Array:
    return vector


# --- other norms ---


def _standardized(algorithm: str, c: int) -> Norm:
    def norm(y, g, b):
        value = y.astype(wide(y.dtype))
        z = jax.nn.standardize(value, others(y, c), epsilon=EPSILON, algorithm=algorithm)
        return (z * reshape(g, y, c) + reshape(b, y, c)).astype(y.dtype)

    return norm


def _centred_once(c: int) -> Norm:
    """Computes the variance and the result from the same centred array."""

    def norm(y, g, b):
        value = y.astype(wide(y.dtype))
        centred = value - value.mean(others(y, c), keepdims=True)
        variance = (centred * centred).mean(others(y, c), keepdims=True)
        z = centred * lax.rsqrt(variance + EPSILON)
        return (z * reshape(g, y, c) + reshape(b, y, c)).astype(y.dtype)

    return norm


def _epsilon_outside(c: int) -> Norm:
    def norm(y, g, b):
        value = y.astype(wide(y.dtype))
        mean, std = value.mean(others(y, c)), value.std(others(y, c))
        of_y = functools.partial(reshape, y=y, c=c)
        z = (value - of_y(mean)) / (of_y(std) + EPSILON) * of_y(g) + of_y(b)
        return z.astype(y.dtype)

    return norm


def _without_affine(c: int) -> Norm:
    """Has neither gain nor offset."""

    def norm(y, g, b):
        value = y.astype(wide(y.dtype))
        axes = others(y, c)
        z = (value - value.mean(axes, keepdims=True)) * rsqrt(value.var(axes, keepdims=True))
        return z.astype(y.dtype)

    return norm


def _with_running_statistics(c: int) -> Norm:
    """Uses a mixture of the batch's statistics and earlier ones, as Equinox does first."""

    def norm(y, g, b):
        value, momentum = y.astype(wide(y.dtype)), 0.25
        axes = others(y, c)
        mean = (1 - momentum) * value.mean(axes) + momentum * 0.5
        variance = (1 - momentum) * value.var(axes) + momentum
        of_y = functools.partial(reshape, y=y, c=c)
        z = (value - of_y(mean)) * of_y(rsqrt(variance) * g) + of_y(b)
        return z.astype(y.dtype)

    return norm


def _linen(c: int, **options) -> Norm:
    def norm(y, g, b):
        linen = importlib.import_module("flax.linen")
        module = linen.BatchNorm(
            use_running_average=False, axis=c, epsilon=EPSILON, dtype=y.dtype, **options
        )
        statistics = {"mean": jnp.zeros_like(g), "var": jnp.ones_like(g)}
        variables = {"params": {"scale": g, "bias": b}, "batch_stats": statistics}
        return module.apply(variables, y, mutable=["batch_stats"])[0]

    return norm


def _nnx(c: int) -> Norm:
    def norm(y, g, b):
        nnx = importlib.import_module("flax.nnx")
        module = nnx.BatchNorm(
            g.size, axis=c, epsilon=EPSILON, dtype=y.dtype, param_dtype=g.dtype, rngs=nnx.Rngs(0)
        )
        module.scale, module.bias = nnx.Param(g), nnx.Param(b)
        return module(y)

    return norm


def _equinox(c: int) -> Norm:
    """Equinox's mode "batch", for examples (C, H, W); parameters and statistics have y's type."""

    def norm(y, g, b):
        eqx = importlib.import_module("equinox")
        module, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(
            g.size, axis_name="batch", eps=EPSILON, mode="batch", dtype=wide(y.dtype)
        )
        module = eqx.tree_at(lambda m: (m.weight, m.bias), module, (g, b))

        def one(x):
            return module(jnp.moveaxis(x.astype(wide(y.dtype)), c - 1, 0), state)[0]

        mapped = jax.vmap(one, axis_name="batch")(y)
        return jnp.moveaxis(mapped, 1, c).astype(y.dtype)

    return norm


def _haiku(c: int) -> Norm:
    def norm(y, g, b):
        haiku = importlib.import_module("haiku")
        layout = "channels_last" if c == y.ndim - 1 else "channels_first"

        def forward(y):
            module = haiku.BatchNorm(True, True, 0.9, eps=EPSILON, data_format=layout)
            return module(y, is_training=True)

        pure = haiku.transform_with_state(forward)
        value = y.astype(wide(y.dtype))
        _, types = jax.eval_shape(pure.init, jax.random.key(0), value)
        state = jax.tree.map(lambda t: jnp.zeros(t.shape, t.dtype), types)
        parameters = {"scale": reshape(g, y, c), "offset": reshape(b, y, c)}
        return pure.apply({"batch_norm": parameters}, state, None, value)[0].astype(y.dtype)

    return norm


def _keras(c: int) -> Norm:
    """``keras.ops.moments`` and ``keras.ops.batch_normalization`` as implemented for JAX."""

    def norm(y, g, b):
        value = y.astype(wide(y.dtype))
        axes = others(y, c)
        mean = jnp.squeeze(jnp.mean(value, axes, keepdims=True), axes)
        variance = jnp.squeeze(jnp.var(value, axis=axes, keepdims=True), axes)
        mean, variance = reshape(mean, y, c), reshape(variance, y, c)
        inverse = jax.lax.rsqrt(variance + EPSILON) * reshape(g, y, c)
        offset = -mean * inverse + reshape(b, y, c)
        return jnp.add(value * inverse, offset).astype(y.dtype)

    return norm


class Named(NamedTuple):
    """A norm by name: its meaning, the library it needs, and the norm as a function of the axis."""

    meaning: str
    library: str
    of_axis: Callable[[int], Norm]


def _batch(of_axis: Callable[[int], Norm], library: str = "") -> Named:
    return Named("batch", library, of_axis)


NORMS: dict[str, Named] = {
    "jax.nn.standardize, fast": _batch(functools.partial(_standardized, "fast")),
    "jax.nn.standardize, stable": _batch(functools.partial(_standardized, "stable")),
    "centred once": _batch(_centred_once),
    "flax.linen": _batch(_linen, "flax.linen"),
    "flax.linen, two passes": _batch(
        functools.partial(_linen, use_fast_variance=False), "flax.linen"
    ),
    "flax.nnx": _batch(_nnx, "flax.nnx"),
    "equinox": _batch(_equinox, "equinox"),
    "haiku": _batch(_haiku, "haiku"),
    "keras.ops": _batch(_keras),
    "epsilon outside": _batch(_epsilon_outside),
    "no gain, no offset": Named("batch, standardised", "", _without_affine),
    "mixed statistics": _batch(_with_running_statistics),
}
