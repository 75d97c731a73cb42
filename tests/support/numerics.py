"""References: the definition in float64 NumPy, exact comparison, and errors relative to lax's.

``reference`` calls neither jaxconv nor lax.
"""

from __future__ import annotations

import functools
import itertools
import math
import pathlib
import re
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from problems import DTYPES, Problem

from jaxconv._src.problem.spec import Op

# Integers up to this magnitude are exact in the result's dtype (2 ** (mantissa bits + 1)). For
# int32 sums the limit excludes overflow.
EXACT_LIMIT = {"f32": 2**24, "bf16": 2**8, "f16": 2**11, "s8": 2**31 - 1}

# The number of calls that are compiled as one program, because compiling takes longer than
# computing. From 5 on, XLA would make a CUDA graph of them.
TOGETHER = 4


def _taps(problem: Problem):
    """Yields for every filter tap the output positions that use it, and the input positions.

    Follows from i * lhs_dilation = p * stride + r * dilation - pad_lo, one slice for each axis.
    """
    for tap in itertools.product(*map(range, problem.window)):
        outs, ins = [], []
        for axis, r in enumerate(tap):
            p = np.arange(problem.out_spatial[axis])
            position = (
                p * problem.stride[axis] + r * problem.dilation[axis] - problem.padding[axis][0]
            )
            i, rest = np.divmod(position, problem.lhs_dilation[axis])
            hit = (rest == 0) & (i >= 0) & (i < problem.spatial[axis])
            outs.append(_as_slice(p[hit]))
            ins.append(_as_slice(i[hit]))
        yield tap, outs, ins


def _as_slice(positions: np.ndarray) -> slice:
    """Evenly spaced positions as a slice."""
    if not positions.size:
        return slice(0, 0)
    first, last = int(positions[0]), int(positions[-1])
    return slice(first, last + 1, (last - first) // (positions.size - 1) if last > first else 1)


def reference(
    op: Op,
    problem: Problem,
    lhs: np.ndarray,
    rhs: np.ndarray,
    dtype: type = np.float64,
    sums: type | None = None,
) -> np.ndarray:
    """The result of ``op`` by its definition, channels last.

    It is exact if absolute products sum to less than 2 ** 53; in float32, which takes half the
    time, to less than 2 ** 24. ``sums`` is the type in which taps are summed (default: ``dtype``):
    the limits hold for a single tap in ``dtype``, and for all taps in ``sums``.
    """
    lhs, rhs, sums = np.asarray(lhs, dtype), np.asarray(rhs, dtype), sums or dtype
    if problem.batch is None:
        return _reference(op, problem, lhs, rhs, sums)
    return np.stack([_reference(op, problem, a, b, sums) for a, b in zip(lhs, rhs, strict=True)])


def _by_group(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """(m, g, t), (t, g, n) -> (m, g, n): a matrix product in each group."""
    if a.shape[2] == 1:
        return a * b
    return np.matmul(a.transpose(1, 0, 2), b.transpose(1, 0, 2)).transpose(1, 0, 2)


def _reference(
    op: Op, problem: Problem, lhs: np.ndarray, rhs: np.ndarray, sums: type
) -> np.ndarray:
    n, g = problem.n, problem.groups
    c, k = problem.c // g, problem.k // g
    shapes = {
        "x": (n, *problem.spatial, g, c),
        "w": (*problem.window, c, g, k),
        "y": (n, *problem.out_spatial, g, k),
    }
    tensors = dict(zip(op.roles, (lhs, rhs, np.zeros(1)), strict=True))
    x, w, y = (
        np.zeros(shapes[role], sums) if role == op.roles[2] else tensors[role].reshape(shapes[role])
        for role in "xwy"
    )
    for tap, outs, ins in _taps(problem):
        at_x, at_y = x[:, *ins], y[:, *outs]
        rows = math.prod(at_y.shape[:-2])  # numpy refuses -1 beside a 0
        if op is Op.FPROP:
            at_y += _by_group(at_x.reshape(rows, g, c), w[tap]).reshape(at_y.shape)
        elif op is Op.DGRAD:
            turned = w[tap].transpose(2, 1, 0)
            at_x += _by_group(at_y.reshape(rows, g, k), turned).reshape(at_x.shape)
        else:
            pixels = at_x.reshape(rows, g, c).transpose(2, 1, 0)
            w[tap] += _by_group(pixels, at_y.reshape(rows, g, k))
    result = {"x": x, "w": w, "y": y}[op.roles[2]]
    unbatched = {
        "x": (n, *problem.spatial, problem.c),
        "w": (*problem.window, c, problem.k),
        "y": (n, *problem.out_spatial, problem.k),
    }
    return result.reshape(unbatched[op.roles[2]])


# Sums of so many 8-bit products need not be exact in float32: 1040 * 127^2 is less than 2^24.
LONG_SUM = 1041


def eight_bits(rng: np.random.Generator, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    """int8 arrays: the full range, only the largest number, or extremes with random signs.

    Products of the full range cancel: their sums stay far below those of the other arrays.
    """
    kind = rng.integers(4)
    arrays = []
    for shape in shapes:
        if kind < 2:
            array = rng.integers(-128, 127, shape, endpoint=True)
        else:
            negative = rng.random(shape) < (0 if kind == 2 else rng.choice([0.02, 0.5]))
            array = np.where(negative, -128, 127)
        arrays.append(array.astype(np.int8))
    return arrays


@functools.lru_cache(maxsize=1024)
def exact_operands(
    op: Op, problem: Problem, dtype: str, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random small integers with a representable result: (lhs, rhs, expected), channels last.

    On these every correct kernel gives the same bits, whatever the order of its sums.
    """
    operand, result = DTYPES[dtype]
    rng = np.random.default_rng([seed, list(Op).index(op), list(DTYPES).index(dtype)])
    shapes = [problem.canonical_shape(role) for role in op.roles[:2]]
    largest = 8 if dtype == "f32" else 2
    density = 1.0
    while True:
        if dtype == "s8":
            drawn = eight_bits(rng, *shapes)
        else:
            drawn = [rng.integers(-largest, largest, s, endpoint=True) for s in shapes]
        lhs, rhs = (np.where(rng.random(d.shape) < density, d, 0) for d in drawn)
        expected = reference(op, problem, lhs, rhs)
        if np.abs(expected).max(initial=0) <= EXACT_LIMIT[dtype]:
            return lhs.astype(operand), rhs.astype(operand), expected.astype(result)
        density /= 2


def integer_operands(problem: Problem, ops: Iterable[Op], seed: object) -> dict[str, np.ndarray]:
    """x, w and y (dy), canonical: integers whose absolute products sum to less than 2^24.

    Every partial sum in float32 is exact, so ``reference`` may sum in float32, and kernels give the
    same result, rounded once.
    """
    rng = np.random.default_rng(seed)
    terms = max(problem.reduction(op) for op in ops)
    largest = min(8, math.isqrt((2**24 - 1) // terms))
    return {
        role: rng.integers(-largest, largest, problem.canonical_shape(role), endpoint=True)
        for role in "xwy"
    }


def normal_operands(
    op: Op, problem: Problem, dtype: str, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Standard normal operands, rounded to the dtype."""
    rng = np.random.default_rng([seed, list(Op).index(op)])
    lhs, rhs = (rng.standard_normal(problem.canonical_shape(role)) for role in op.roles[:2])
    return lhs.astype(DTYPES[dtype][0]), rhs.astype(DTYPES[dtype][0])


def mismatch(actual, expected, repro: str) -> str:
    """A report with a coordinate, or "" if the arrays agree exactly (NaN agrees with NaN)."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        types = [f"{a.dtype}{a.shape}" for a in (expected, actual)]
        return f"{repro}\n  expected {types[0]}, got {types[1]}"
    if np.array_equal(actual, expected):
        return ""
    # float64 holds every value of every dtype compared here.
    a, e = (
        t.astype(np.complex128 if np.iscomplexobj(t) else np.float64) for t in (actual, expected)
    )
    wrong = ~((a == e) | (np.isnan(a) & np.isnan(e)))
    if not wrong.any():
        return ""
    at = tuple(int(i[0]) for i in np.nonzero(wrong))
    return (
        f"{repro}\n  {wrong.sum()} of {wrong.size} elements differ, first at {at}: "
        f"expected {expected[at]}, got {actual[at]}"
    )


_STATED = (pathlib.Path(__file__).resolve().parents[1] / "cc" / "stated_error.h").read_text()
_WINOGRAD_ERRORS = {m: float(error) for m, error in re.findall(r"\{'(\d)', ([\d.]+)\}", _STATED)}
_HALF_FACTOR = float(re.search(r"kHalfFactor = ([\d.]+);", _STATED)[1])


def tolerance_of(instance: str) -> float:
    """The error bound of a kernel instance on integers, relative to the largest result.

    ``cc/stated_error.h`` defines and explains it.
    """
    if "_winograd_" not in instance or "_winograd_int8_" in instance:
        return 0.0
    tolerance = _WINOGRAD_ERRORS[instance.split("_")[3][0]]
    return tolerance * (_HALF_FACTOR if instance.endswith("_half") else 1)


def excess(actual, expected, tolerance: float, repro: str) -> str:
    """``mismatch``, but "" if no error exceeds ``tolerance`` times the largest expected magnitude.

    A tolerance of 0 requires equality.
    """
    report = mismatch(actual, expected, repro)
    if not report or tolerance == 0 or actual.shape != expected.shape:
        return report
    exact = expected.astype(np.float64)
    errors = np.abs(np.asarray(actual).astype(np.float64) - exact)
    allowed = tolerance * np.abs(exact).max(initial=0)
    if actual.dtype == expected.dtype and (errors <= allowed).all():  # NaN fails
        return ""
    return f"{report}\n  largest error {errors.max():.3g}, allowed {allowed:.3g}"


def assert_exact(actual, expected, repro: str) -> None:
    report = mismatch(actual, expected, repro)
    assert not report, report


def poison(shapes: Iterable) -> list[np.ndarray]:
    """Arrays of these shapes and dtypes filled with NaN, or with -1 for integers."""
    return [
        np.full(s.shape, np.nan if jnp.issubdtype(s.dtype, jnp.inexact) else -1).astype(s.dtype)
        for s in shapes
    ]


def into_poison(function, *operands):
    """Compiles and calls ``function(*operands)``; its result buffers contain NaN beforehand."""
    return poisoned(function, *operands)()


def poisoned(function: Callable, *operands) -> Callable[[], Any]:
    """Compiles ``function(*operands)``; each call of the result stores into NaN-filled buffers.

    Without this, an element that a kernel does not store could go unnoticed, because GPU memory may
    still contain the right result of another call.
    """
    count = len(operands)
    shapes = jax.tree.leaves(jax.eval_shape(function, *operands))
    program = jax.jit(
        lambda *arrays: function(*arrays[:count]),
        donate_argnums=range(count, count + len(shapes)),
        keep_unused=True,
    )
    return lambda: program(*operands, *jax.device_put(poison(shapes)))


def on_cpu(function, *arguments):
    """Compiles and runs on the CPU, where lax is exact on integers: no TF32, no Winograd."""
    with jax.default_device(jax.devices("cpu")[0]):
        return jax.jit(function)(*arguments)


def error(actual, exact: np.ndarray) -> float:
    """The root mean square error against the float64 reference, over the reference's."""
    deviation = np.asarray(actual).astype(np.float64) - exact
    if not deviation.any():  # also for empty arrays, or zeros
        return 0.0
    size = np.sqrt(np.mean(exact**2))
    return float(np.sqrt(np.mean(deviation**2)) / size) if size else math.inf


def error_in_order(terms: int) -> float:
    """Expected relative error of a float32 sum of ``terms`` random products in sequence.

    After k terms of unit variance the partial sum has variance k, and the next addition has a
    rounding error of at most 2^-24 of it: over all terms 2^-24 * sqrt(terms^2 / 2), relative to a
    result of sqrt(terms).
    """
    return 2.0**-24 * math.sqrt(terms / 2)


def excessive_error(
    actual, theirs: float, exact: np.ndarray, repro: str, ratio: float = 2.0, least: float = 0.0
) -> str:
    """A complaint, or "" if our error is at most ``ratio`` times that of lax, or at most ``least``.

    Half a unit in the last place of the result, the error of rounding, is always allowed: lax may
    be exact by luck on a sum of few terms.
    """
    ours = error(actual, exact)
    floor = float(jnp.finfo(np.asarray(actual).dtype).eps) / 2
    if ours <= max(ratio * theirs + floor, least):
        return ""
    return (
        f"{repro}\n  relative rms error {ours:.3g}, lax {theirs:.3g}, allowed "
        f"{ratio} times that + {floor:.3g}, or {least:.3g}"
    )


def assert_error_ratio(
    actual, by_lax, exact: np.ndarray, repro: str, ratio: float = 2.0, least: float = 0.0
) -> None:
    """Asserts ``excessive_error`` against lax's result for the same dtypes."""
    report = excessive_error(actual, error(by_lax, exact), exact, repro, ratio, least)
    assert not report, report
