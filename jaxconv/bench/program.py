"""The programs that are measured: several independent convolutions in one jitted function."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxconv
from jaxconv._src.call.selection import PLATFORMS
from jaxconv._src.conv import bilinear
from jaxconv._src.library import native
from jaxconv._src.problem.spec import Op
from jaxconv.bench import int8_layers, prepared_filters
from jaxconv.bench.problem import Library, Problem

Convolution = Callable[..., jax.Array]

# On a GPU a program is started so often in a row that one measurement takes about this long.
_MEASUREMENT_SECONDS = 0.01
_MOST_STARTS = 32

# A program's runs: so many in a row, returning when the last one's results are there.
Program = Callable[[int], Any]


def operation(problem: Problem, convolution: Convolution) -> Convolution:
    """The problem's operation as a function of its two operands.

    Args:
        problem: what to compute.
        convolution: ``lax.conv_general_dilated`` or a function with its signature; gradients are
            taken through it with ``jax.vjp``.

    Returns:
        (x, w) -> y, (dy, w) -> dx or (x, dy) -> dw, all channels-last.
    """
    layer = problem.layer
    axes = "DHW"[3 - layer.rank :]
    convolve = functools.partial(
        convolution,
        window_strides=layer.stride,
        padding=[(p, p) for p in layer.padding],
        rhs_dilation=layer.dilation,
        dimension_numbers=(f"N{axes}C", f"{axes}IO", f"N{axes}C"),
        feature_group_count=layer.groups,
        precision=None if problem.precision == "default" else problem.precision,
        preferred_element_type=np.int32 if problem.dtype.startswith("int8") else None,
    )

    # A gradient of a bilinear function does not depend on the operand it is taken in: only the
    # shape of that operand matters, and jit removes the forward pass.
    def dgrad(dy: jax.Array, w: jax.Array) -> jax.Array:
        x = jnp.zeros(layer.shape("x"), dy.dtype)
        return jax.vjp(lambda x: convolve(x, w), x)[1](dy)[0]

    def wgrad(x: jax.Array, dy: jax.Array) -> jax.Array:
        w = jnp.zeros(layer.shape("w"), x.dtype)
        return jax.vjp(lambda w: convolve(x, w), w)[1](dy)[0]

    return {Op.FPROP: convolve, Op.DGRAD: dgrad, Op.WGRAD: wgrad}[problem.op]


def libraries(problem: Problem, im2col: bool = False) -> dict[str, Library]:
    """The libraries that are compared, this one first; im2col is the textbook's convolution."""
    ours = jaxconv.conv_general_dilated
    if problem.requantized:
        sums = operation(problem, lax.conv_general_dilated)
        return {"jaxconv": int8_layers.ours(problem), "lax": int8_layers.requantize_by_xla(sums)}
    if problem.prepared:
        return {"jaxconv": prepared_filters.library(problem)}
    compared = {
        "jaxconv": functools.partial(ours, algorithm=problem.algorithm),
        "lax": lax.conv_general_dilated,
    }
    if problem.variant:
        compared.pop("lax")
    elif im2col:
        compared["im2col"] = functools.partial(ours, algorithm="im2col")
    return {name: Library(operation(problem, each)) for name, each in compared.items()}


def draw_operands(problem: Problem) -> Callable[[jax.Array], tuple[jax.Array, ...]]:
    """A jitted function: a key -> the random operands of one convolution."""
    shapes = [problem.layer.shape(role) for role in problem.op.roles[:2]]
    dtype = problem.operand_dtype

    @jax.jit
    def draw(key):
        keys = jax.random.split(key)
        if jnp.issubdtype(dtype, jnp.integer):
            drawn = tuple(
                jax.random.randint(k, shape, -127, 128, dtype)
                for k, shape in zip(keys, shapes, strict=True)
            )
            if problem.requantized:
                drawn += int8_layers.scale_and_bias(problem.layer, jax.random.fold_in(key, 1))
            return drawn
        return tuple(
            jax.random.normal(k, shape, dtype) for k, shape in zip(keys, shapes, strict=True)
        )

    return draw


def operands(
    problem: Problem, copies: int, seed: int = 0, draw: Callable | None = None
) -> list[tuple[jax.Array, ...]]:
    """Random operands, drawn on the device: normal, or over the whole range of an integer type.

    A requantised layer has scale and bias as well. ``draw`` is ``draw_operands``, if compiled.
    """
    draw = draw or draw_operands(problem)
    # "rbg" draws several times faster than the default generator.
    return [draw(key) for key in jax.random.split(jax.random.key(seed, impl="rbg"), copies)]


def instances(text: str) -> list[str]:
    """The kernel instances named in a lowered or compiled program, in order of appearance."""
    return re.findall(r'\binstance\\*"?\s*[=:]\s*\\*"([^"\\]+)', text)


def selection(problem: Problem, platform: str) -> native.Selection:
    """What is selected for the problem on a platform: an instance, or why none.

    Raises:
        ValueError: the demanded algorithm does not take the problem.
    """
    if problem.requantized:
        return int8_layers.selection(problem, platform)
    if problem.prepared:
        return prepared_filters.selection(problem, platform)
    layer = problem.layer
    spec = layer.spec(problem.precision, problem.algorithm)
    dtypes = problem.operand_dtype, problem.out_dtype
    return bilinear.select(platform, problem.op, spec, layer.sizes, *dtypes)[0]


def slices_of(lowered: jax.stages.Lowered) -> int:
    """The slices of the instance in a program of one operation."""
    found = re.search(r"\bslices = (\d+)", lowered.as_text())
    return int(found[1]) if found else 1


def kernel_of(
    problem: Problem, lowered: jax.stages.Lowered, compiled: jax.stages.Compiled, platform: str
) -> tuple[str, str]:
    """The instance that a program of one operation runs; or "XLA", and why."""
    if found := instances(lowered.as_text()) or instances(compiled.as_text()):
        return found[0], ""
    if platform not in PLATFORMS:
        return "XLA", f"no kernels for the platform {platform}"
    try:
        chosen = selection(problem, platform)
    except ValueError as error:
        return "XLA", str(error)
    if chosen.in_jax:
        return chosen.instance, ""
    if chosen.instance:
        return "XLA", f"{chosen.instance} was selected, but is not in the compiled program"
    return "XLA", "; ".join(f"{kernel}: {reason}" for kernel, reason in chosen.refusals)


def compile_program(library: Library, prepared: Sequence[tuple]) -> Callable[..., Any]:
    """Compiles a program of several convolutions, for operands that are prepared, or their shapes.

    It takes a list with the prepared operands of each.
    """
    one = jax.jit(library.compute)  # lowered once and called for all operands
    several = jax.jit(lambda prepared: [one(*each) for each in prepared])
    return several.lower([*prepared]).compile()


def program(
    library: Library, operands: Sequence[tuple], compiled: Callable[..., Any] | None = None
) -> Program:
    """Several convolutions, each with its operands, in one program; ``compiled``, where it is."""
    prepared = [library.prepare(*each) for each in operands]
    compiled = compiled or compile_program(library, prepared)

    def run(starts: int):
        for _ in range(starts):
            results = compiled(prepared)
        return jax.block_until_ready(results)

    return run


def elapsed(run: Program, starts: int = 1) -> float:
    """Seconds for one run of a program, of so many in a row."""
    start = time.perf_counter()
    run(starts)
    return (time.perf_counter() - start) / starts


def starts_of(platform: str, seconds: float) -> int:
    """How often a program that takes ``seconds`` is started before its results are awaited."""
    if platform == "cpu":  # the host computes: nothing runs ahead of it
        return 1
    return int(np.clip(_MEASUREMENT_SECONDS / seconds, 1, _MOST_STARTS))
