"""Judges random problems: calls are compared with lax and float64, primitives exactly."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from every_kernel import Prepared, operation_call, wrong_results
from fuzz_calls import Call
from fuzz_problems import SMALL, Draw, draw_problem, with_long_sums
from jax import lax
from numerics import (
    EXACT_LIMIT,
    eight_bits,
    error,
    error_in_order,
    excessive_error,
    mismatch,
    reference,
)
from problems import DTYPES, LAYOUTS, Problem, xla_aborts

import jaxconv
from jaxconv._src.problem.spec import Op

THREADS = 2  # XLA compiles without the GIL; more threads gain nothing on two cores
# One partition of the LLVM module: for such small programs, more only cost time. The numbers do not
# change.
COMPILER_OPTIONS = {"xla_cpu_parallel_codegen_split_count": 1}
# The count of results whose error exceeds twice lax's, but not that of a sum in sequence.
BEYOND = "normal results beyond that, within the error of a sum in order"
BEYOND_SHARE = 0.05
# A relative error above this is no rounding error: the result is wrong.
GROSS_ERROR = 0.1


def operands(call: Call) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(arrays x, w and cotangent y in the call's axis order, float64 results y, x, w canonical).

    For int8 there is only the result, because JAX does not differentiate integers.
    """
    rng = call.rng
    dtypes = {"x": call.dtype, "w": call.dtype, "y": call.result_dtype}
    if not call.whole:
        arrays = {
            role: rng.standard_normal(call.array_shape(role)).astype(dtype)
            for role, dtype in dtypes.items()
        }
        return arrays, _results(call, arrays)
    if call.dtype == np.int8:
        drawn = eight_bits(rng, *(call.array_shape(role) for role in "xw"))
        arrays = dict(zip("xw", drawn, strict=True))
        return arrays, _results(call, arrays)
    largest = 8 if call.dtype == np.float32 else 3
    limits = {role: EXACT_LIMIT[_short_name(dtype)] for role, dtype in dtypes.items()}
    density = 1.0
    while True:
        arrays = {
            role: np.where(
                rng.random(call.array_shape(role)) < density,
                rng.integers(-largest, largest, call.array_shape(role), endpoint=True),
                0,
            ).astype(dtype)
            for role, dtype in dtypes.items()
        }
        # The same on magnitudes: if these are exact, no partial sum rounds in any order.
        bounds = _results(call, {role: np.abs(array) for role, array in arrays.items()})
        if all(bound.max(initial=0) <= limits[role] for role, bound in bounds.items()):
            return arrays, _results(call, arrays)
        density /= 2


def _short_name(dtype: np.dtype) -> str:
    return next(name for name, (operand, _) in DTYPES.items() if operand == dtype)


def _results(call: Call, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The float64 result, by role, of every operation whose operands are in ``arrays``."""
    canonical = {role: call.to_canonical(role, array) for role, array in arrays.items()}
    return {
        op.roles[2]: reference(op, call.problem, *(canonical[role] for role in op.roles[:2]))
        for op in Op
        if set(op.roles[:2]) <= set(canonical)
    }


class Lowerings(logging.Handler):
    """Counts the library's log messages: a kernel instance, or XLA and the reason."""

    def __init__(self):
        super().__init__(logging.DEBUG)
        self.chosen = collections.Counter()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        problem, to_xla, reason = text.partition(" goes to XLA: ")
        if not to_xla:
            self.chosen[text.rpartition(": ")[2]] += 1
        elif "no elements" in reason:
            self.chosen["XLA: a tensor has no elements"] += 1
        else:
            self.chosen[f"XLA: {problem.partition(' ')[0]}"] += 1


@dataclasses.dataclass
class Outcome:
    """The outcome of a convolution function on a call."""

    runs: list[dict[str, np.ndarray]] = dataclasses.field(default_factory=list)  # by role, twice
    refused: str = ""  # the error of tracing, if the call is refused
    properly: bool = True  # whether a refusal is a proper error
    failed: str = ""  # the error of compiling or running it

    def __str__(self) -> str:
        return self.refused or self.failed or "a result"


class Side(NamedTuple):
    """A convolution function, and the context in which it is traced, lowered and compiled."""

    convolve: Callable
    scope: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext


LAX = Side(lax.conv_general_dilated)
OURS = Side(jaxconv.conv_general_dilated)


def evaluate(side: Side, call: Call, arrays: dict[str, np.ndarray], device) -> Outcome:
    """Traces and compiles a call, with its gradients if there is a cotangent, and runs it twice."""

    def forward(x, w):
        return side.convolve(x, w, **call.parameters)

    def with_gradients(x, w, cotangent):
        y, vjp = jax.vjp(forward, x, w)
        return y, *vjp(cotangent)

    function = with_gradients if "y" in arrays else forward
    with jax.default_device(device), side.scope():  # both apply to this thread
        try:
            traced = jax.jit(function).trace(*arrays.values())
        except Exception as error:  # lax refuses some calls by RuntimeError
            properly = isinstance(error, (TypeError, ValueError))
            return Outcome(refused=repr(error), properly=properly)
        try:
            program = traced.lower().compile(compiler_options=COMPILER_OPTIONS)
            runs = [jax.tree.leaves(program(*arrays.values())) for _ in range(2)]
            runs = [dict(zip("yxw", map(np.asarray, run), strict=False)) for run in runs]
        except Exception as error:  # XLA raises various types
            return Outcome(failed=f"{type(error).__name__}: {str(error).partition(chr(10) * 2)[0]}")
    return Outcome(runs)


def judge(side: Side, call: Call, device, counts: collections.Counter) -> list[str]:
    """Judges ``side`` on one call: returns complaints, and adds statistics to ``counts``."""
    if call.broken:
        # Some of these changes leave the call valid: lax decides.
        arrays = {
            "x": np.ones(call.lhs_shape, call.dtype),
            "w": np.ones(call.rhs_shape, call.dtype),
        }
        exact = {}
    else:
        arrays, exact = operands(call)
    by_lax = evaluate(LAX, call, arrays, device)
    ours = evaluate(side, call, arrays, device)
    if by_lax.refused and not call.broken and call.result_dtype != call.dtype:
        # jax 0.9.2 cannot differentiate a wider result. Ours can; there is nothing to compare with.
        counts["lax cannot differentiate"] += 1
        forward = {role: arrays[role] for role in "xw"}
        by_lax = evaluate(LAX, call, forward, device)
        ours = evaluate(side, call, forward, device) if ours.refused else ours
    # lax finds some errors only in XLA's verifier, at lowering; ours may refuse these earlier.
    lax_gives = not by_lax.refused and not by_lax.failed
    we_give = not ours.refused and not ours.failed
    # The verifier also refuses windows without elements, though these calls are valid.
    broken = call.broken and 0 not in call.rhs_shape
    agree = lax_gives == we_give or not (lax_gives or by_lax.refused or broken)
    properly = ours.properly or side.convolve is LAX.convolve  # overridden lax raises lax's errors
    if not agree or not properly:
        what = f"invalid {call.broken}, " if call.broken else ""
        return [f"{what}{call.line()}\n  lax: {by_lax}\n  ours: {ours}"]
    if call.broken:
        counts[f"invalid: {'taken' if lax_gives else 'refused'} by lax and by us"] += 1
        return []
    if by_lax.refused:
        return [f"{call.line()}\n  meant to be valid, but lax: {by_lax}"]
    counts[f"{call.dtype.name} {'integers' if call.whole else 'normal'}"] += 1
    counts[f"rank {call.problem.rank}"] += 1
    if by_lax.failed:
        counts[f"XLA cannot: {' '.join(by_lax.failed.split())[:120]}"] += 1
    if not we_give:
        return []
    complaints = []
    for role in ours.runs[0]:
        expected = exact[role]
        op = next(op for op in Op if op.roles[2] == role)
        line = f"{op.value} of {call.line()}"
        counts[f"{op.value} results"] += 1
        first, second = (run[role] for run in ours.runs)
        dtype = call.result_dtype if role == "y" else call.dtype
        if first.shape != call.array_shape(role) or first.dtype != dtype:
            wanted = f"{dtype}{call.array_shape(role)}"
            complaints.append(f"{line}\n  expected {wanted}, got {first.dtype}{first.shape}")
            continue
        complaints.append(mismatch(second, first, f"second run, {line}"))
        theirs = None if by_lax.failed else by_lax.runs[0].get(role)
        theirs = None if theirs is None else call.to_canonical(role, theirs)
        judge_numbers = _judge_integers if call.whole else _judge_rounding
        complaints.append(
            judge_numbers(
                call, op, arrays, call.to_canonical(role, first), theirs, expected, line, counts
            )
        )
    return [complaint for complaint in complaints if complaint]


def _judge_integers(call: Call, op: Op, arrays, ours, theirs, exact, line: str, counts) -> str:
    if call.dtype == np.int8:
        exact = exact.astype(np.int64)  # sums wrap in the result's dtype
    expected = exact.astype(ours.dtype)
    if theirs is not None and mismatch(theirs, expected, line):
        counts[f"lax is wrong: {line}"] += 1
    complaint = mismatch(ours, expected, line)
    if complaint and op is not Op.FPROP and jnp.issubdtype(call.dtype, jnp.floating):
        # lax's gradients are converted to the result's dtype first; see `_judge_rounding`.
        converted = exact.astype(call.result_dtype).astype(ours.dtype)
        return mismatch(ours, converted, line) and complaint
    return complaint


def _judge_rounding(call: Call, op: Op, arrays, ours, theirs, exact, line: str, counts) -> str:
    lax_error = math.inf if theirs is None else error(theirs, exact)
    lax_is_wrong = theirs is not None and not lax_error <= GROSS_ERROR  # also for NaN
    counts[f"lax is wrong: {line}"] += lax_is_wrong
    lax_is_right = theirs is not None and not lax_is_wrong
    if lax_is_right and not excessive_error(ours, lax_error, exact, line):
        counts["normal results within twice lax's error"] += 1
        return ""
    if not exact.any():  # sums without terms, or no elements
        return excessive_error(ours, 0.0, exact, line)
    # On a small result lax may be better by luck. An error within three standard deviations of a
    # sum in sequence is accepted; `_test_calls` limits how often.
    squares = (
        call.to_canonical(role, arrays[role]).astype(np.float64) ** 2 for role in op.roles[:2]
    )
    variance = reference(op, call.problem, *squares).mean()
    deviation = error_in_order(call.problem.reduction(op))
    least = 3 * deviation * math.sqrt(variance / np.mean(exact**2))
    # Without lax's error, the coarser of two dtypes is the measure: under ``override`` lax's rule
    # for gradients still converts operands and result to the result's dtype.
    mixed = call.result_dtype != call.dtype and max(
        float(jnp.finfo(dtype).eps) for dtype in (call.result_dtype, call.dtype)
    )
    fair = lax_error if lax_is_right else mixed / 4
    complaint = excessive_error(ours, fair, exact, line, least=least)
    counts[BEYOND] += lax_is_right and not complaint
    return complaint


def judge_all(side: Side, calls: list[Call], device) -> tuple[list[str], dict[str, int]]:
    """Judges calls on a few threads. Returns (complaints, counts)."""
    logger, lowerings = logging.getLogger("jaxconv"), Lowerings()
    level, propagate = logger.level, logger.propagate
    logger.addHandler(lowerings)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False  # keeps them out of pytest's report of a failure
    each = [collections.Counter() for _ in calls]
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            judged = list(
                pool.map(lambda call, counts: judge(side, call, device, counts), calls, each)
            )
    finally:
        logger.setLevel(level)
        logger.propagate = propagate
        logger.removeHandler(lowerings)
    counts = sum(each, collections.Counter()) + lowerings.chosen
    return [complaint for of_one in judged for complaint in of_one], dict(sorted(counts.items()))


def draw_primitive(seed: int, index: int) -> tuple[Problem, Op, str, str]:
    """A random small problem with a non-empty output, an operation, a dtype and a layout."""
    draw = Draw(seed, index)
    while True:
        op, dtype = draw.one_of(*Op), draw.one_of(*DTYPES)
        problem = draw_problem(draw, f"{seed}-{index}", SMALL)
        if (op, dtype) == (Op.FPROP, "s8") and draw.chance(0.5):
            problem = with_long_sums(draw, problem)
        # XLA computes the primitives that no kernel takes.
        if all(problem.out_spatial) and not xla_aborts(problem):
            return problem, op, dtype, draw.one_of(*LAYOUTS)


def judge_primitives(seed: int, indices: Sequence[int]) -> list[str]:
    """Runs operations on small integers twice on the default device; returns complaints."""
    return wrong_results([functools.partial(_primitive, seed, index) for index in indices], runs=2)


def _primitive(seed: int, index: int) -> Prepared:
    problem, op, dtype, layout = draw_primitive(seed, index)
    where = f"{layout}, {jax.default_backend()}"
    repro = f"--seed {seed} --problem {index} ({where}): {problem.line(op, dtype)}"
    return operation_call(op, problem, dtype, layout, repro, seed=index)
