"""Random programs of convolutions: each a function of (seed, index), as plain data.

A program is 1 to 4 layers. A layer is a convolution and a chain of steps behind it, in one of the
spellings that programs have. ``apply`` computes a program on arrays that ``arrays`` draws; a
transformation of JAX, by name, makes a function of parameters and input of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from fuzz_calls import Draw
from jax import lax

DTYPES = ("float32", "float32", "float32", "bfloat16", "bfloat16", "float16")
DATA = ("normal", "normal", "normal", "integers", "integers", "integers", "special", "large")
LAYOUTS = {"NHWC": ("NHWC", "HWIO", "NHWC"), "NCHW": ("NCHW", "OIHW", "NCHW")}


@dataclasses.dataclass(frozen=True)
class Conv:
    """One convolution; ``groups`` divides its input channels, and ``k`` is a multiple of it."""

    k: int
    window: int = 3
    stride: int = 1
    dilation: int = 1
    groups: int = 1
    expansion: int = 1  # of x, which makes it a transposed convolution
    padding: str = "SAME"


@dataclasses.dataclass(frozen=True)
class Layer:
    conv: Conv
    steps: tuple[str, ...] = ()
    wide: bool = False  # the steps compute in float32


@dataclasses.dataclass(frozen=True)
class Program:
    """A program; ``repr`` of it is the repro that a person reads."""

    seed: int
    index: int
    dtype: str
    data: str
    layout: str
    shape: tuple[int, int, int]  # n, spatial, c
    layers: tuple[Layer, ...]
    transform: str
    constants: bool = False
    target: str = ""  # JAXCONV_TARGET while it is fused

    def __str__(self) -> str:
        n, extent, c = self.shape
        layers = []
        for layer in self.layers:
            default = Conv(layer.conv.k)
            said = [
                f"{field.name}={getattr(layer.conv, field.name)}"
                for field in dataclasses.fields(Conv)
                if field.name == "k"
                or getattr(layer.conv, field.name) != getattr(default, field.name)
            ]
            wide = ["float32:"] if layer.wide else []
            layers.append(" | ".join([f"conv({', '.join(said)})", *wide, *layer.steps]))
        x = f"{self.dtype}[{n},{extent},{extent},{c}] {self.data} {self.layout}"
        how = self.transform + " constants" * self.constants + f" {self.target}" * bool(self.target)
        return f"{how} of {x}: {' -> '.join(layers)}"


# --- the steps, in all their spellings ---


def _custom_relu():
    @jax.custom_jvp
    def relu(y):
        return jnp.maximum(y, 0)

    relu.defjvps(lambda dy, out, y: lax.select(y > 0, dy, lax.full_like(dy, 0)))
    return relu


ACTIVATIONS: dict[str, Callable] = {
    "max(y, 0)": lambda y: jnp.maximum(y, 0),
    "lax.max(0, y)": lambda y: lax.max(jnp.zeros_like(y), y),
    "relu": jax.nn.relu,
    "custom_jvp relu": lambda y: _custom_relu()(y),
    "where(y > 0, y, 0)": lambda y: jnp.where(y > 0, y, 0),
    "select(y > 0, y, 0)": lambda y: lax.select(y > 0, y, jnp.zeros_like(y)),
    "relu6": jax.nn.relu6,
    "clip(y, 0, 6)": lambda y: jnp.clip(y, 0, 6),
    "clamp(0, y, 6)": lambda y: lax.clamp(jnp.zeros((), y.dtype), y, jnp.full((), 6, y.dtype)),
    "leaky_relu": lambda y: jax.nn.leaky_relu(y, 0.25),
    "max(y, 0.1 y)": lambda y: jnp.maximum(y, 0.1 * y),
    "max(y, 0.75 y)": lambda y: jnp.maximum(y, 0.75 * y),
    "where(y > 0, y, 0.1 y)": lambda y: jnp.where(y > 0, y, 0.1 * y),
    "where(y >= 0, y, 0.5 y)": lambda y: jnp.where(y >= 0, y, 0.5 * y),
    "silu": jax.nn.silu,
    "y sigmoid(y)": lambda y: y * jax.nn.sigmoid(y),
    "y / (1 + exp(-y))": lambda y: y / (1 + jnp.exp(-y)),
    "gelu": lambda y: jax.nn.gelu(y, approximate=False),
    "gelu by tanh": jax.nn.gelu,
    "gelu by erf": lambda y: 0.5 * y * (1 + lax.erf(y * np.sqrt(0.5).astype(y.dtype))),
    "hard_swish": jax.nn.hard_swish,
    "y clip(y + 3, 0, 6) / 6": lambda y: y * jnp.clip(y + 3, 0, 6) / 6,
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
    "softplus": jax.nn.softplus,
    "abs": jnp.abs,
}

# Where the derivatives of these jump, by the spelling of what they rectify.
KINKS = {
    **dict.fromkeys((a for a in ACTIVATIONS if "6" in a), (0.0, 6.0)),
    "hard_swish": (-3.0, 3.0),
    "y clip(y + 3, 0, 6) / 6": (-3.0, 3.0),
}
_SMOOTH = ("silu", "y sigmoid(y)", "y / (1 + exp(-y))", "sigmoid", "tanh", "softplus")
for _name in ACTIVATIONS:
    if _name not in KINKS and _name not in _SMOOTH and "gelu" not in _name:
        KINKS[_name] = (0.0,)

Get = Callable[..., jax.Array]  # an array by its name, number of elements or shape, and kind


class Steps:
    """The other steps: y, and a way to get arrays, to the next y."""

    def __init__(self, get: Get, channels: int, axis: int, image: jax.Array):
        self.get, self.channels, self.axis, self.image = get, channels, axis, image

    def vector(self, y, name: str, kind: str):
        shape = [1] * y.ndim
        shape[self.axis] = self.channels
        return self.get(name, (self.channels,), kind).astype(y.dtype).reshape(shape)

    def moments(self, y):
        axes = tuple(a for a in range(y.ndim) if a != self.axis)
        return axes, y.mean(axes, keepdims=True)

    def step(self, name: str, y, number: str):
        def vector(kind: str):
            return self.vector(y, f"{kind}{number}", kind)

        def trained(mean, variance):
            return (y - mean) * (lax.rsqrt(variance + 1e-3) * vector("scale")) + vector("bias")

        match name:
            case "y * 2":
                return y * 2
            case "y * 0.3":
                return 0.3 * y
            case "-y":
                return -y
            case "y / 2":
                return y / 2
            case "y + 1":
                return y + 1
            case "1 - y":
                return 1 - y
            case "y * 1e20 / 1e20":
                return y * 1e20 / 1e20
            case "(y - 1e20) * 1e20":
                return (y - 1e20) * 1e20
            case "y * 1e-30 * 1e30":
                return y * 1e-30 * 1e30
            case "y * scale":
                return y * vector("scale")
            case "y / scale":
                return y / vector("scale")
            case "y + bias":
                return y + vector("bias")
            case "bias - y":
                return vector("bias") - y
            case "batch norm":
                return (y - vector("mean")) * (
                    lax.rsqrt(vector("variance") + 1e-3) * vector("scale")
                ) + vector("bias")
            case "batch norm, affine":
                scale = vector("scale") / jnp.sqrt(vector("variance") + 1e-3)
                return y * scale + (vector("bias") - vector("mean") * scale)
            case "training, squares":
                axes, mean = self.moments(y)
                return trained(mean, (y * y).mean(axes, keepdims=True) - mean * mean)
            case "training, centred":
                axes, mean = self.moments(y)
                return trained(mean, jnp.square(y - mean).mean(axes, keepdims=True))
            case "training, var":
                axes, mean = self.moments(y)
                return trained(mean, y.var(axes, keepdims=True))
            case "training, affine":
                axes, mean = self.moments(y)
                variance = jnp.maximum(0, (y * y).mean(axes, keepdims=True) - mean * mean)
                scale = lax.rsqrt(variance + 1e-3) * vector("scale")
                return y * scale + (vector("bias") - mean * scale)
            case "y + r":
                return y + self.get(f"r{number}", y.shape, "array").astype(y.dtype)
            case "r + y":
                return self.get(f"r{number}", y.shape, "array").astype(y.dtype) + y
            case "y + input":
                return y + self.image.astype(y.dtype) if self.image.shape == y.shape else y
            case "y + y / 2":
                return y + y / 2
            case "y * mean(y)":
                return y * self.moments(y)[1]
            case "max pool":
                return self.pooled(y, -jnp.inf, lax.max)
            case "average pool":
                return self.pooled(y, 0.0, lax.add) / 4
        return ACTIVATIONS[name](y)

    def pooled(self, y, start: float, reduce: Callable):
        size = [1 if a in (0, self.axis) else 2 for a in range(y.ndim)]
        return lax.reduce_window(y, np.array(start, y.dtype), reduce, size, size, "VALID")


LINEAR = ("y * 2", "y * 0.3", "-y", "y / 2", "y * scale", "y / scale", "y + input", "y + y / 2")
AFFINE = (
    *LINEAR,
    *("y + 1", "1 - y", "y + bias", "y + bias", "bias - y", "batch norm", "batch norm, affine"),
)
TRAINED = ("training, squares", "training, centred", "training, var", "training, affine")
SUMS = ("y + r", "y + r", "r + y", "y + input", "y + input")
EXTREME = ("y * 1e20 / 1e20", "(y - 1e20) * 1e20", "y * 1e-30 * 1e30")


def apply(program: Program, get: Get, x: jax.Array, seen: Callable | None = None) -> jax.Array:
    """The program's result. ``seen`` is told each activation's spelling and its operand."""
    numbers, y = LAYOUTS[program.layout], x
    axis = program.layout.index("C")
    for at, layer in enumerate(program.layers):
        conv, image = layer.conv, y
        c = y.shape[axis]
        window = (conv.window, conv.window, c // conv.groups, conv.k)
        if program.layout == "NCHW":
            window = (conv.k, c // conv.groups, conv.window, conv.window)
        w = get(f"w{at}", window, "filter")
        padding: Any = conv.padding
        if conv.expansion > 1:
            padding = [(conv.window - 1, conv.window - 1)] * 2
        y = lax.conv_general_dilated(
            y,
            w,
            (conv.stride, conv.stride),
            padding,
            lhs_dilation=(conv.expansion, conv.expansion),
            rhs_dilation=(conv.dilation, conv.dilation),
            dimension_numbers=numbers,
            feature_group_count=conv.groups,
            precision="highest",
        )
        before, steps = y.dtype, Steps(get, conv.k, axis, image)
        if layer.wide:
            y = y.astype(jnp.float32 if before.itemsize < 4 else before)
        for number, name in enumerate(layer.steps):
            if seen is not None and name in KINKS:
                seen(name, y)
            y = steps.step(name, y, f"{at}_{number}")
        y = y.astype(before)
    return y


# --- drawing ---

TRANSFORMS = (
    *("jit", "jit", "vmap", "vmap of both", "scan", "cond", "switch", "donation"),
    *("grad", "grad", "grad", "grad", "value_and_grad with aux", "grad of remat", "grad of vmap"),
    *("vmap of grad", "grad of scan", "custom_vjp", "jvp", "linearize", "hvp", "hvp"),
    *("linear_transpose", "grad of jit"),
)


def draw(seed: int, index: int) -> Program:
    """The program with this number."""
    d = Draw(seed, index, 2)
    dtype, data = d.one_of(*DTYPES), d.one_of(*DATA)
    transform = d.one_of(*TRANSFORMS)
    if dtype == "float16" and data == "large":
        data = "normal"
    shape = d.integer(1, 3), d.integer(3, 6), d.one_of(1, 2, 3, 4, 4, 5, 8)
    c, layers = shape[2], []
    for _ in range(d.one_of(1, 1, 1, 2, 2, 3, 4)):
        kind = d.one_of("dense", "dense", "dense", "dense", "pointwise", "depthwise", "other")
        k = d.one_of(1, 2, 3, 4, 4, 5, 8)
        if kind == "depthwise":
            conv = Conv(c * d.one_of(1, 1, 2), groups=c)
        elif kind == "pointwise":
            conv = Conv(k, window=1)
        elif kind == "dense":
            conv = Conv(c if d.chance(0.4) else k)
        else:
            groups = d.one_of(*(g for g in (1, 2, 4) if c % g == 0))
            conv = Conv(
                groups * d.integer(1, 3),
                window=d.one_of(1, 2, 3),
                stride=d.integer(1, 2),
                dilation=d.integer(1, 2),
                groups=groups,
                expansion=d.one_of(1, 1, 2),
            )
        steps, wide = _steps(d, data, transform), d.chance(0.3)
        if dtype != "float32" and not set(steps).isdisjoint(TRAINED):
            wide = True  # as libraries do: in 16 bits the variance of few numbers has no digit
        layers.append(Layer(conv, steps, wide))
        c = conv.k
    return Program(
        seed,
        index,
        dtype,
        data,
        d.one_of("NHWC", "NHWC", "NCHW"),
        shape,
        tuple(layers),
        transform,
        constants=d.chance(0.3),
        target="sm_90a" if d.chance(0.25) else "",
    )


def _steps(d: Draw, data: str, transform: str) -> tuple[str, ...]:
    if transform == "linear_transpose":
        return tuple(d.one_of(*LINEAR) for _ in range(d.integer(1, 3)))
    steps = [d.one_of(*AFFINE) for _ in range(d.integer(0, 2))]
    if data == "large" and d.chance(0.5):
        steps.append(d.one_of(*EXTREME))
    if data != "large" and d.chance(0.3):
        steps.append(d.one_of(*TRAINED))
    if d.chance(0.4):
        steps.append(d.one_of(*SUMS))
    if d.chance(0.75):
        steps.append(d.one_of(*ACTIVATIONS))
    if d.chance(0.15):
        steps.append(d.one_of("max pool", "max pool", "average pool"))
    if data != "large" and d.chance(0.1):
        steps.append(d.one_of("y * mean(y)", "y + y / 2"))
    return tuple(steps)


# --- arrays ---


def arrays(program: Program) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The parameters by name, and the input: float64 numbers that the program's dtype has."""
    rng = np.random.default_rng([program.seed, program.index, 3])
    n, extent, c = program.shape
    shape = (n, extent, extent, c) if program.layout == "NHWC" else (n, c, extent, extent)
    integers = program.data == "integers"
    large = 1e30 if program.data == "large" else 1.0
    wanted: dict[str, tuple[tuple[int, ...], str]] = {}

    def get(name, shape, kind):
        wanted[name] = tuple(shape), kind
        return jnp.zeros(shape, np.float32)

    jax.eval_shape(lambda x: apply(program, get, x), jax.ShapeDtypeStruct(shape, np.float32))

    def drawn(shape: tuple[int, ...], kind: str) -> np.ndarray:
        if integers:
            match kind:
                case "scale" | "variance":
                    numbers = rng.choice([0.5, 1.0, 1.0, 2.0], shape)
                    return numbers * rng.choice([1, 1, -1], shape) if kind == "scale" else numbers
                case "filter":
                    return rng.integers(-1, 2, shape).astype(float)
            return rng.integers(-2, 3, shape).astype(float)
        normal = rng.standard_normal(shape)
        match kind:
            case "filter":
                # In XLA, not in our kernels, products with no element of x count as zeros too.
                inner = shape[0] * shape[1] * shape[2] if program.layout == "NHWC" else 0
                inner = inner or shape[1] * shape[2] * shape[3]
                return normal / np.sqrt(inner)
            case "scale":
                return (1 + 0.3 * normal) * (rng.choice([1, 1e-25, 1e5]) if large > 1 else 1)
            case "variance":
                return rng.uniform(0.5, 2, shape)
            case "bias" | "mean":
                return 0.5 * normal * large
        return normal * large

    def rounded(a: np.ndarray) -> np.ndarray:
        return np.asarray(jnp.asarray(a, program.dtype)).astype(np.float64)

    x = drawn(shape, "array")
    parameters = {name: rounded(drawn(*each)) for name, each in wanted.items()}
    if program.data == "special":
        places = rng.integers(0, x.size, 2)
        x.flat[places] = rng.choice([np.nan, np.inf, -np.inf], 2)
    return parameters, rounded(x)


# --- transformations ---


def weights(y: jax.Array) -> jax.Array:
    """Of a loss: small integers, exact in every type."""
    return jnp.asarray((np.arange(y.size) % 5 - 2).reshape(y.shape), y.dtype)


def transformed(name: str, f: Callable, inside: Callable = lambda f: f) -> Callable:
    """A transformation of ``inside(f)``; f is a function of parameters and input."""
    f = inside(f)

    def loss(p, x, f=f):
        y = f(p, x)
        wide = y.astype(jnp.float32) if y.dtype.itemsize < 4 else y
        return (wide * weights(wide)).sum()

    def two(x):
        return jnp.stack([x, -x])

    def tangents(p, x):
        return jax.tree.map(lambda a: weights(a) / 2, (p, x))

    def scanned(p, x):
        return lax.scan(lambda carry, x: (carry + 1, f(p, x)), 0, two(x))

    def custom(p, x):
        @jax.custom_vjp
        def g(p, x):
            return f(p, x)

        def forward(p, x):
            return jax.vjp(f, p, x)

        g.defvjp(forward, lambda pullback, dy: pullback(dy))
        return jax.grad(lambda p, x: loss(p, x, g), argnums=(0, 1))(p, x)

    def linearized(p, x):
        y, linear = jax.linearize(f, p, x)
        return y, linear(*tangents(p, x))

    def first_is_less(x):
        return x.reshape(-1)[0] < x.reshape(-1)[1]

    gradient = jax.grad(loss, argnums=(0, 1))

    def both(p, x):
        return jax.vmap(f)(jax.tree.map(lambda a: jnp.stack([a, a / 2]), p), two(x))

    match name:
        case "jit" | "donation":
            return f
        case "vmap":
            return lambda p, x: jax.vmap(f, (None, 0))(p, two(x))
        case "vmap of both":
            return both
        case "scan":
            return scanned
        case "cond":
            return lambda p, x: lax.cond(first_is_less(x), f, lambda p, x: f(p, -x), p, x)
        case "switch":
            return lambda p, x: lax.switch(
                first_is_less(x).astype(int), [f, lambda p, x: -f(p, x)], p, x
            )
        case "grad":
            return gradient
        case "grad of jit":
            return jax.grad(lambda p, x: loss(p, x, jax.jit(f)), argnums=(0, 1))
        case "value_and_grad with aux":

            def with_aux(p, x):
                return loss(p, x), {"y": f(p, x)}

            return jax.value_and_grad(with_aux, argnums=(0, 1), has_aux=True)
        case "grad of remat":
            return jax.grad(lambda p, x: loss(p, x, jax.checkpoint(f)), argnums=(0, 1))
        case "grad of vmap":
            return jax.grad(lambda p, x: loss(p, two(x), jax.vmap(f, (None, 0))), argnums=(0, 1))
        case "vmap of grad":
            return lambda p, x: jax.vmap(gradient, (None, 0))(p, two(x))
        case "grad of scan":
            return jax.grad(lambda p, x: loss(p, x, lambda *a: scanned(*a)[1]), argnums=(0, 1))
        case "custom_vjp":
            return custom
        case "jvp":
            return lambda p, x: jax.jvp(f, (p, x), tangents(p, x))
        case "linearize":
            return linearized
        case "hvp":
            return lambda p, x: jax.jvp(gradient, (p, x), tangents(p, x))
        case "linear_transpose":

            def transpose(p, x):
                y = jax.eval_shape(f, p, x)
                dy = weights(jnp.zeros(y.shape, y.dtype))
                return jax.linear_transpose(lambda x: f(p, x), x)(dy)

            return transpose
    raise ValueError(name)
