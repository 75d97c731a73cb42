"""Judges random programs: compares results under ``override`` and ``fuse`` with those of lax.

The required agreement between our results and lax's depends on the numbers:

- every result: the positions of NaN and of each infinity, in every type. For derivatives only the
  positions that are not finite, because the order of the chain rule's sums decides whether two
  infinities meet;
- results of integers that float64 reproduces exactly, by steps that round none of them: every bit,
  including zeros and ties;
- other results: the error against float64 is at most a few times lax's, or the change of lax's own
  results if every operand changes by one rounding. In 16 bits ``fuse`` omits roundings, so its
  error may be smaller.

Derivatives jump at the kinks of activations. If an activation's operand is inexact and lies within
its rounding error of a kink, the last two criteria do not apply to derivatives, nor does the first
at a few positions. Such programs are counted but not judged. With normal numbers in 16 bits nearly
every program has a few such elements, so the norm of the error and the share of elements that are 0
are judged.
"""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import spelling_calls
from jaxprs import equations
from program_draw import EXTREME, KINKS, Program, apply, arrays
from program_transforms import transformed

import jaxconv
from jaxconv._src.fuse import fuse_means

# The largest ratio of our error to lax's, for the maximum over an array and for norms.
RATIO = 4.0
# An error allowed in addition, in roundings of the largest number. It covers other orders of
# summation; OF_FORMULAS covers activations that two formulas compute in float32 (the derivative of
# XLA's gelu by tanh is off by up to 30 roundings).
ROUNDINGS = 8.0
OF_FORMULAS = 64.0
# For 16-bit derivatives at kinks: the allowed norm of the error, and share of zeros.
JUMPS = 0.15
ZEROS = 0.06

# Parts of the names of steps that round small integers.
INEXACT = (
    *("hard_swish", "clip(y", "sigmoid", "exp(", "gelu", "tanh", "softplus", "silu", "mish"),
    *("relu6(y + 3)", "logistic", "erf", "selu", "nn.elu", "expm1", "nn.leaky_relu", "squareplus"),
    *("norm", "training", "0.1", "0.3", "mean(", "/ scale", "average", "squeeze"),
)
# Steps that multiply or divide by a scale, which is 1e5 or 1e-25 beside large numbers.
SCALED = ("y * scale", "y / scale", "batch norm", "batch norm, affine", "input + y * scale")

# How often lax runs with slightly changed operands, until a run explains an error.
DRAWS = 16

FUSED = "programs with a fused call"  # a call with more than a convolution

MODES = ("override", "fuse outside", "fuse inside")
_DERIVATIVES = ("grad", "vjp", "jvp", "linearize", "hvp")


@contextlib.contextmanager
def _target(name: str) -> Iterator[None]:
    """Lowers for an architecture, and takes means of arrays of any size by calls."""
    least, fuse_means.LEAST_BYTES = fuse_means.LEAST_BYTES, 0
    try:
        with spelling_calls.target(name):
            yield
    finally:
        fuse_means.LEAST_BYTES = least


def _of(program: Program, dtype: str, parameters, x) -> tuple[Callable, Any, Any]:
    """The program as a function, its parameters ({} if they are constants), and its input."""
    given = {name: jnp.asarray(a, dtype) for name, a in parameters.items()}

    def f(p, x):
        values = given if program.constants else p
        return apply(program, lambda name, *_: values[name], x)

    return f, {} if program.constants else given, jnp.asarray(x, dtype)


def run(
    program: Program, mode: str, draw: int | None = None, calls: set[str] | None = None
) -> list[np.ndarray]:
    """The results in a mode, in the program's types; in mode "float64" in float64.

    With ``draw``, each operand changes by one rounding or not at all. The names of the library's
    primitives in the program are added to ``calls``.
    """
    parameters, x = arrays(program)
    if draw is not None:
        rng, eps = np.random.default_rng(draw), float(jnp.finfo(program.dtype).eps)
        moved = [a * (1 + eps * rng.integers(-1, 2, a.shape)) for a in (x, *parameters.values())]
        x, parameters = moved[0], dict(zip(parameters, moved[1:], strict=True))
    wide = mode == "float64"
    with jax.enable_x64(True) if wide else contextlib.nullcontext():
        dtype = "float64" if wide else program.dtype
        f, p, x = _of(program, dtype, parameters, x)
        fused = mode.startswith("fuse")
        inside = jaxconv.fuse if mode == "fuse inside" else lambda f: f
        g = transformed(program.transform, f, inside)
        if mode == "fuse outside":
            g = jaxconv.fuse(g)
        donated = dict(donate_argnums=1) if program.transform == "donation" else {}
        with (
            jaxconv.override() if mode == "override" else contextlib.nullcontext(),
            _target(program.target if fused else ""),
        ):
            traced = jax.jit(g, **donated).trace(p, x)
            if calls is not None:
                names = {eqn.primitive.name for eqn in equations(traced.jaxpr)}
                calls |= {name for name in names if name.startswith("jaxconv_")}
            results = traced.lower().compile()(p, x)
        return [np.asarray(r, np.float64) for r in jax.tree.leaves(results)]


def _operands(program: Program, dtype: str) -> list[tuple[str, np.ndarray]]:
    """The operands of the program's activations with kinks, for inputs x and -x."""
    parameters, x = arrays(program)
    names: list[str] = []

    def operands(values, x):
        names.clear()
        found: list[jax.Array] = []

        def seen(name, y):
            names.append(name)
            found.append(y)

        for each in (x, -x):
            apply(program, lambda name, *_: values[name], each, seen)
        return found

    rounded = {"xla_allow_excess_precision": False}  # rounds every value as the program says
    with jax.enable_x64(dtype == "float64"):
        values = {name: jnp.asarray(a, dtype) for name, a in parameters.items()}
        found = jax.jit(operands, compiler_options=rounded)(values, jnp.asarray(x, dtype))
    return [(name, np.asarray(y, np.float64)) for name, y in zip(names, found, strict=True)]


def beside_a_kink(program: Program) -> bool:
    """Whether an activation's operand is inexact and within its rounding error of a kink.

    If all operands are exact in the program's type, both programs decide alike at a kink, and the
    results are judged.
    """
    exact, rounded = _operands(program, "float64"), _operands(program, program.dtype)
    eps = float(jnp.finfo(program.dtype).eps)
    for (name, y), (_, in_type) in zip(exact, rounded, strict=True):
        if np.array_equal(y, in_type, equal_nan=True):
            continue
        finite = y[np.isfinite(y)]
        distance = np.abs(finite[:, None] - np.asarray(KINKS[name]))
        if finite.size and distance.min() <= 1e3 * eps * max(1.0, np.abs(finite).max()):
            return True
    return False


def patterns(got: np.ndarray, expected: np.ndarray, derivative: bool) -> bool:
    """Whether NaN and each infinity (for derivatives: any of them) have the same positions."""
    if derivative:
        return bool((np.isfinite(got) == np.isfinite(expected)).all())
    return not _differs(got, expected).any()


def complaint(
    program: Program,
    got: list[np.ndarray],
    expected: list[np.ndarray],
    exactly: Callable[[], list[np.ndarray]],
    beside: Callable[[], bool],
    moved: Callable[[], Iterable[list[np.ndarray]]],
    counts: collections.Counter,
) -> str:
    """What is wrong with the results of a mode, or ""."""
    if [g.shape for g in got] != [e.shape for e in expected]:
        return f"shapes {[g.shape for g in got]}, lax {[e.shape for e in expected]}"
    eps = float(jnp.finfo(program.dtype).eps)
    derivative = any(word in program.transform for word in _DERIVATIVES)
    kinks = any(name in KINKS for layer in program.layers for name in layer.steps)
    largest = functools.cache(lambda: max(1.0, *(_largest(f) for f in exactly())))
    steps = [name for layer in program.layers for name in layer.steps]
    rounds = any(part in name for name in steps for part in INEXACT)
    roundings = OF_FORMULAS if rounds and eps < 1e-6 else ROUNDINGS
    # In 16 bits, rounding may move the maximum of a window to another element.
    elsewhere = "max pool" in steps and rounds and eps > 1e-6
    overflows = _factors_overflow(program)
    exponential = any("exp(" in name or "1 + exp" in name for name in steps)
    for number, (g, e) in enumerate(zip(got, expected, strict=True)):
        if np.array_equal(g, e, equal_nan=True):
            counts["results equal"] += 1
            continue
        if not patterns(g, e, derivative):
            if overflows and derivative:  # inf - inf and 0 * inf depend on the chain rule's order
                counts["derivatives of what overflows on the way, not judged"] += 1
                continue
            if derivative and _of_a_filter(program, e.shape):
                counts["filter gradients with NaN, not judged"] += 1
                continue
            if exponential and np.isfinite(g[np.isfinite(g) != np.isfinite(e)]).all():
                counts["results finite where an exponential overflows in lax"] += 1
                continue
            if _overflows(program, g, e, exactly()[number]):
                counts["results that overflow in 16 bits or nearly"] += 1
                continue
            few = _differs(g, e).sum() <= 0.01 * g.size + 1
            if few and eps > 1e-6 and overflows:
                counts["results that overflow in 16 bits or nearly"] += 1  # of sums that cancel
                continue
            if derivative and kinks and few and beside():  # a mask either passes NaN or not
                counts["results with NaN beside a kink, not judged"] += 1
                continue
            return f"result {number}: NaN or Inf elsewhere, {_places(g, e)}"
        finite = np.isfinite(e) & np.isfinite(g)
        g, e, f = g[finite], e[finite], exactly()[number][finite]
        if not g.size or not np.isfinite(f).all():
            counts["results that are not finite, in lax's type or float64"] += 1
            continue
        jumps = derivative and ((kinks and beside()) or elsewhere)
        allowed = roundings * eps * largest() if rounds else 0.0
        # Other numbers are exact in lax by chance: XLA may omit a rounding, and terms may cancel.
        exact = program.data == "integers" and np.array_equal(e, f)
        if exact and not jumps and np.abs(g - f).max() > allowed:
            return f"result {number}: not exact, {_worst(g, f)}, lax is"
        ours, theirs = np.abs(g - f), np.abs(e - f)
        near = ours.max() <= RATIO * theirs.max() + roundings * eps * largest()
        if not jumps:
            if not near:
                others = (each[number][finite] for each in moved())
                near = any(ours.max() <= RATIO * _largest(o - e) for o in others)
            if not near and overflows:  # an activation with bounds hides the infinity
                counts["results of what overflows on the way, not judged"] += 1
                continue
            if not near:
                return f"result {number}: {_worst(g, f)}, lax's error {theirs.max():.3g}"
            counts["results near"] += 1
            continue
        if eps < 1e-6 or program.data != "normal":
            counts["results beside a kink, not judged"] += 1
            continue
        rounding = eps * largest()  # smaller numbers are remainders of sums that cancel
        norm = np.linalg.norm(f) + rounding * np.sqrt(f.size)
        of_ours = np.linalg.norm(g - f) / norm
        of_lax = np.linalg.norm(e - f) / norm
        near = of_ours <= RATIO * of_lax + JUMPS or g.size < 32
        if not near:
            others = (np.linalg.norm(each[number][finite] - e) / norm for each in moved())
            near = any(of_ours <= RATIO * other + JUMPS for other in others)
        if not near:
            return f"result {number}: norm of the error {of_ours:.3f}, lax's {of_lax:.3f}"

        def zeros_beside(values: np.ndarray, e=e, f=f, rounding=rounding) -> int:
            return ((values == 0) & (e != 0) & (np.abs(f) > rounding)).sum()

        zeros = zeros_beside(g)
        others = (zeros_beside(each[number][finite]) for each in moved())
        if zeros > ZEROS * g.size + 2 and not any(2 * other >= zeros for other in others):
            return f"result {number}: {zeros} of {g.size} are 0, and not lax's"
        counts["results near, by norm"] += 1
    return ""


def _largest(array: np.ndarray) -> float:
    finite = np.abs(array[np.isfinite(array)])
    return float(finite.max()) if finite.size else 0.0


def _of_a_filter(program: Program, shape: tuple[int, ...]) -> bool:
    """Whether a result has the shape of a filter, or of a stack of filters.

    XLA chooses from case to case whether it multiplies NaN by zeros of the padding and of other
    groups, and so which taps of a filter's gradient are NaN.
    """
    parameters, _ = arrays(program)
    filters = [a.shape for name, a in parameters.items() if name.startswith("w")]
    return shape in filters or shape[1:] in filters


def _factors_overflow(program: Program) -> bool:
    """Whether a layer of large numbers overflows by a constant or by two scales (1e5, 1e-25)."""
    if program.data != "large":
        return False
    return any(
        not set(EXTREME).isdisjoint(layer.steps) or sum(s in SCALED for s in layer.steps) > 1
        for layer in program.layers
    )


def _overflows(program: Program, got, expected, exact) -> bool:
    """Whether all differing NaN and Inf are overflows only in lax, or almost overflows.

    In 16 bits ``fuse`` computes in float32 where lax rounds intermediate results. A program that
    multiplies by 1e20 and divides again almost overflows where its result is above 1e-20 times the
    limit.
    """
    steps = {name for layer in program.layers for name in layer.steps}
    between = 1e20 if steps & set(EXTREME) else 1.0
    with np.errstate(invalid="ignore"):
        at_the_edge = np.abs(exact) > float(jnp.finfo(program.dtype).max) / 1e3 / between
    lost = np.isfinite(exact) & (at_the_edge | (~np.isfinite(expected) & np.isfinite(got)))
    return bool(lost[_differs(got, expected)].all())


def _differs(got: np.ndarray, expected: np.ndarray) -> np.ndarray:
    infinite = np.isinf(got) | np.isinf(expected)
    return (np.isnan(got) != np.isnan(expected)) | (infinite & (got != expected))


def _places(got: np.ndarray, expected: np.ndarray) -> str:
    differs = np.argwhere(_differs(got, expected))
    at = tuple(int(i) for i in differs[0])
    return f"{len(differs)} of {got.size}, {got[at]} at {list(at)}, lax {expected[at]}"


def _worst(got: np.ndarray, exact: np.ndarray) -> str:
    at = int(np.abs(got - exact).argmax())
    return f"{got.flat[at]:.6g} for {exact.flat[at]:.6g} (largest {np.abs(exact).max():.3g})"


def judge(
    program: Program, modes: tuple[str, ...] = MODES
) -> tuple[list[str], collections.Counter]:
    """The complaints for each mode, and counts."""
    counts: collections.Counter[str] = collections.Counter()
    counts[f"{program.transform}"] += 1
    counts[f"{program.dtype} {program.data}"] += 1
    try:
        expected = run(program, "lax")
    except Exception as error:
        counts[f"lax cannot: {str(error).splitlines()[0][:80]}"] += 1
        return [], counts
    exactly = functools.cache(lambda: run(program, "float64"))
    beside = functools.cache(lambda: beside_a_kink(program))
    drawn: list[list[np.ndarray]] = []

    def moved() -> Iterator[list[np.ndarray]]:
        for draw in range(DRAWS):
            if draw == len(drawn):
                drawn.append(run(program, "lax", draw))
            yield drawn[draw]

    complaints, calls = [], set()
    for mode in modes:
        try:
            got = run(program, mode, calls=calls)
        except Exception as error:
            found = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
        else:
            found = complaint(program, got, expected, exactly, beside, moved, counts)
        if found:
            complaints.append(f"{mode}: {found}")
    counts[FUSED] += bool(calls - {"jaxconv_fprop", "jaxconv_dgrad", "jaxconv_wgrad"})
    return complaints, counts
