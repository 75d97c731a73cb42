"""Random programs of convolutions, as plain data; each is a function of (seed, index).

A program has 1 to 4 layers. A layer is a convolution followed by a chain of steps, each in one of
the spellings that occur in programs. ``apply`` computes a program on arrays that ``arrays`` draws.
``program_transforms`` has the transformations of JAX.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import spelling_groups
import spelling_layers
import spelling_norms
from fuzz_problems import Draw
from jax import lax
from program_transforms import FORWARD_MODE, TRANSFORMS
from spelling_norms import Parts, batch_norm

DTYPES = ("float32", "float32", "float32", "bfloat16", "bfloat16", "float16")
DATA = ("normal", "normal", "normal", "integers", "integers", "integers", "special", "large")
LAYOUTS = {"NHWC": ("NHWC", "HWIO", "NHWC"), "NCHW": ("NCHW", "OIHW", "NCHW")}


@dataclasses.dataclass(frozen=True)
class Conv:
    """One convolution. ``groups`` divides the numbers of input and output channels."""

    k: int
    window: int = 3
    stride: int = 1
    dilation: int = 1
    groups: int = 1
    expansion: int = 1  # dilation of x; above 1 a transposed convolution
    padding: str = "SAME"


@dataclasses.dataclass(frozen=True)
class Layer:
    conv: Conv
    steps: tuple[str, ...] = ()
    wide: bool = False  # the steps compute in float32


@dataclasses.dataclass(frozen=True)
class Program:
    """A program. Its ``repr`` is the repro for a person."""

    seed: int
    index: int
    dtype: str
    data: str
    layout: str
    shape: tuple[int, int, int]  # n, spatial, c
    layers: tuple[Layer, ...]
    transform: str
    constants: bool = False
    target: str = ""  # JAXCONV_TARGET while ``fuse`` rewrites it

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

ACTIVATIONS: dict[str, Callable] = {
    **{name: a.apply for name, a in spelling_layers.ACTIVATIONS.items() if name != "none"},
    "leaky_relu of 0.25": lambda y: jax.nn.leaky_relu(y, 0.25),
    "max(y, 0.75 y)": lambda y: jnp.maximum(y, 0.75 * y),
    "where(y >= 0, y, 0.5 y)": lambda y: jnp.where(y >= 0, y, 0.5 * y),
    "abs": jnp.abs,
}
# This activation has no forward-mode derivative.
_REVERSE_ONLY = "custom_vjp relu"

# The operands at which derivatives of these activations jump, by spelling.
KINKS: dict[str, tuple[float, ...]] = {
    **{name: a.kinks for name, a in spelling_layers.ACTIVATIONS.items() if a.kinks},
    **dict.fromkeys(("leaky_relu of 0.25", "max(y, 0.75 y)", "where(y >= 0, y, 0.5 y)"), (0.0,)),
    "abs": (0.0,),
}

# The norms, except spellings that alone give NaN: sqrt at 0, and 0 times another group's NaN.
_VARIANCES = ("jnp.std ** 2",)
NORMS = (
    *(name for name in spelling_groups.GROUP_FORMS if name != "group norm, by products"),
    *spelling_groups.INSTANCE_FORMS,
)
SQUEEZES = tuple(
    name for name, (meaning, _) in spelling_groups.SQUEEZES.items() if "hard" not in meaning
)


def norm_step(parts: Parts) -> str:
    """The step of a batch norm that has these parts."""
    return f"norm({'; '.join(map(str, dataclasses.astuple(parts)))})"


def parts_of(step: str) -> Parts:
    """The parts of a norm's step."""
    *names, early = step.removeprefix("norm(").removesuffix(")").split("; ")
    return Parts(*names, early == "True")


Get = Callable[..., jax.Array]  # (name, number of elements or shape, kind) -> array


class Steps:
    """The other steps. Each takes y and returns the next y; it gets arrays by ``get``."""

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
            case "y + projection":
                return self.projected(y, number)
            case "y * kept":
                return y * self.kept(y, number)
            case _ if "input" in name:
                return self.with_input(name, y, number) if self.image.shape == y.shape else y
            case "y + y / 2":
                return y + y / 2
            case "y * mean(y)":
                return y * self.moments(y)[1]
            case "max pool":
                return self.pooled(y, -jnp.inf, lax.max)
            case "average pool":
                return self.pooled(y, 0.0, lax.add) / 4
            case "y @ w":
                return self.mixed(y, number)
        if name in ACTIVATIONS:
            return ACTIVATIONS[name](y)
        if name in spelling_groups.SQUEEZES:
            return self.squeezed(name, y, number)
        return self.normalised(name, y, number)

    def normalised(self, name: str, y, number: str):
        gain, offset = (
            self.get(f"{kind}{number}", (self.channels,), kind) for kind in ("scale", "bias")
        )
        if name.startswith("norm("):
            norm = batch_norm(parts_of(name), self.axis)
        elif name in spelling_groups.INSTANCE_FORMS:
            norm = spelling_groups.INSTANCE_FORMS[name](self.axis)
        else:
            groups = next(g for g in (4, 2, 1) if self.channels % g == 0)
            norm = spelling_groups.GROUP_FORMS[name](groups, self.axis)
        return norm(y, gain, offset)

    def squeezed(self, name: str, y, number: str):
        inner = max(1, self.channels // 2)
        shapes = {
            "squeeze": (self.channels, inner),
            "squeeze_bias": (inner,),
            "excite": (inner, self.channels),
            "excite_bias": (self.channels,),
        }
        p = {
            each: self.get(f"{each}{number}", shape, "bias" if len(shape) == 1 else "matrix")
            for each, shape in shapes.items()
        }
        with jax.default_matmul_precision("highest"):
            return spelling_groups.SQUEEZES[name][1](y, p, self.axis).astype(y.dtype)

    def mixed(self, y, number: str):
        """A dense layer: each position's channels times a matrix."""
        w = self.get(f"dense{number}", (self.channels, self.channels), "matrix").astype(y.dtype)
        last = jnp.moveaxis(y, self.axis, -1)
        return jnp.moveaxis(jnp.matmul(last, w, precision="highest"), -1, self.axis)

    def kept(self, y, number: str):
        """A factor of 0 or 2 for each example."""
        return self.get(f"kept{number}", (y.shape[0], 1, 1, 1), "kept").astype(y.dtype)

    def projected(self, y, number: str):
        """Adds a pointwise convolution of the layer's input, if that has y's spatial extents."""
        c, outer = self.image.shape[self.axis], (self.channels,)
        spatial = [a for a in (1, 2, 3) if a != self.axis]
        if any(self.image.shape[a] != y.shape[a] for a in spatial):
            return y
        shape = (1, 1, c, *outer) if self.axis == 3 else (*outer, c, 1, 1)
        w = self.get(f"w{number}", shape, "filter")
        numbers = LAYOUTS["NHWC" if self.axis == 3 else "NCHW"]
        shortcut = lax.conv_general_dilated(
            self.image, w, (1, 1), "SAME", dimension_numbers=numbers, precision="highest"
        )
        return y + shortcut.astype(y.dtype)

    def with_input(self, name: str, y, number: str):
        """Adds the layer's input, which has y's shape."""
        image = self.image.astype(y.dtype)
        match name:
            case "y + input":
                return y + image
            case "y - -input":
                return y - -image
            case "input + y * scale":
                return image + y * self.vector(y, f"scale{number}", "scale")
            case "y + (input * scale + bias)":
                scale, bias = (self.vector(y, f"{k}{number}", k) for k in ("scale", "bias"))
                return y + (image * scale + bias)
            case "input + y * kept":
                return image + y * self.kept(y, number)
            case "select(kept, 2 y, 0) + input":
                mask = jnp.broadcast_to(self.kept(y, number) > 0, y.shape)
                return lax.select(mask, 2 * y, jnp.zeros_like(y)) + image
        raise ValueError(name)

    def pooled(self, y, start: float, reduce: Callable):
        size = [1 if a in (0, self.axis) else 2 for a in range(y.ndim)]
        return lax.reduce_window(y, np.array(start, y.dtype), reduce, size, size, "VALID")


LINEAR = (
    *("y * 2", "y * 0.3", "-y", "y / 2", "y * scale", "y / scale", "y + input", "y + y / 2"),
    *("y * kept", "y + projection", "input + y * kept"),
)
AFFINE = (
    *LINEAR[:8],
    *("y + 1", "1 - y", "y + bias", "y + bias", "bias - y", "batch norm", "batch norm, affine"),
)
TRAINED = ("training, squares", "training, centred", "training, var", "training, affine")
SUMS = (
    *("y + r", "y + r", "r + y", "y + input", "y + input", "y - -input", "y + projection"),
    *("input + y * scale", "y + (input * scale + bias)"),
    *("input + y * kept", "select(kept, 2 y, 0) + input"),
)
EXTREME = ("y * 1e20 / 1e20", "(y - 1e20) * 1e20", "y * 1e-30 * 1e30")


def apply(program: Program, get: Get, x: jax.Array, seen: Callable | None = None) -> jax.Array:
    """Computes the program. Calls ``seen`` with each activation's spelling and operand."""
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


def draw(seed: int, index: int) -> Program:
    """The program of (seed, index)."""
    d = Draw(seed, index, 2)
    dtype, data = d.one_of(*DTYPES), d.one_of(*DATA)
    transform, layout = d.one_of(*TRANSFORMS), d.one_of("NHWC", "NHWC", "NCHW")
    if dtype == "float16" and data == "large":
        data = "normal"
    if transform == "grad of grad" and data == "special":
        data = "normal"  # filter gradients have NaN at places of XLA's choice and reach all results
    shape = d.integer(1, 3), d.integer(3, 6), d.one_of(1, 2, 3, 4, 4, 5, 8)
    c, layers = shape[2], []
    for _ in range(d.one_of(1, 1, 1, 2, 2, 3, 4)):
        kind = d.one_of("dense", "dense", "dense", "dense", "pointwise", "depthwise", "other")
        k = d.one_of(1, 2, 3, 4, 4, 5, 8, 8)
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
        steps, wide = _steps(d, data, transform, layout, kind), d.chance(0.3)
        if dtype != "float32" and any(map(_takes_narrow_moments, steps)):
            wide = True  # as in libraries: a 16-bit variance of few numbers has no correct digit
        layers.append(Layer(conv, steps, wide))
        c = conv.k
    return Program(
        seed,
        index,
        dtype,
        data,
        layout,
        shape,
        tuple(layers),
        transform,
        constants=d.chance(0.3),
        target="sm_90a" if d.chance(0.25) else "",
    )


def _takes_narrow_moments(step: str) -> bool:
    return step in TRAINED or (step.startswith("norm(") and parts_of(step).narrow)


def _norm(d: Draw, layout: str) -> str:
    """A norm's step; usually a batch norm."""
    if d.chance(0.15):
        return d.one_of(*TRAINED)
    if d.chance(0.2):
        return d.one_of(*NORMS)
    while True:
        parts = spelling_norms.drawn(d, layout)
        if parts.variance not in _VARIANCES:
            return norm_step(parts)


def _steps(d: Draw, data: str, transform: str, layout: str, kind: str) -> tuple[str, ...]:
    if transform == "linear_transpose":
        return tuple(d.one_of(*LINEAR) for _ in range(d.integer(1, 3)))
    steps: list[str] = []
    normalised = data != "large" and d.chance(0.6 if kind == "depthwise" else 0.4)
    if normalised:
        steps += [d.one_of("y + bias", *AFFINE)] * d.chance(0.2)
        steps.append(_norm(d, layout))
    else:
        steps += [d.one_of(*AFFINE) for _ in range(d.integer(0, 2))]
    if data == "large" and d.chance(0.5):
        steps.append(d.one_of(*EXTREME))
    if d.chance(0.4):
        steps.append(d.one_of(*SUMS))
    if d.chance(0.75):
        steps.append(_activation(d, transform))
    if data != "large" and d.chance(0.15):
        steps += ["y @ w", "y + bias"]
        steps += [_activation(d, transform)] * d.chance(0.6)
        steps += [d.one_of("y + r", "y + input", "input + y * scale")] * d.chance(0.4)
    if data != "large" and d.chance(0.1):
        steps.append(d.one_of(*SQUEEZES))
    if d.chance(0.15):
        steps.append(d.one_of("max pool", "max pool", "average pool"))
    if data != "large" and d.chance(0.1):
        steps.append(d.one_of("y * mean(y)", "y + y / 2"))
    return tuple(steps)


def _activation(d: Draw, transform: str) -> str:
    activation = d.one_of(*ACTIVATIONS)
    differentiates = activation != _REVERSE_ONLY or transform not in FORWARD_MODE
    return activation if differentiates else "jax.nn.relu"


# --- arrays ---


def arrays(program: Program) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The parameters by name, and the input: float64 numbers that the program's dtype holds."""
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
        if kind == "kept":
            return rng.choice([0.0, 2.0, 2.0], shape)
        if integers:
            match kind:
                case "scale" | "variance":
                    numbers = rng.choice([0.5, 1.0, 1.0, 2.0], shape)
                    return numbers * rng.choice([1, 1, -1], shape) if kind == "scale" else numbers
                case "filter" | "matrix":
                    return rng.integers(-1, 2, shape).astype(float)
            return rng.integers(-2, 3, shape).astype(float)
        normal = rng.standard_normal(shape)
        match kind:
            case "filter":
                # The fan-in, which includes products with zeros of the padding and of dilation.
                inner = shape[0] * shape[1] * shape[2] if program.layout == "NHWC" else 0
                inner = inner or shape[1] * shape[2] * shape[3]
                return normal / np.sqrt(inner)
            case "scale":
                return (1 + 0.3 * normal) * (rng.choice([1, 1e-25, 1e5]) if large > 1 else 1)
            case "variance":
                return rng.uniform(0.5, 2, shape)
            case "matrix":
                return normal / np.sqrt(shape[0])
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
