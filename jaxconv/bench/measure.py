"""Measures one problem: correctness first, then both libraries alternating in one process.

Each library runs the same program: several independent convolutions with separate random inputs in
one jit, so that operands are not in a cache and the convolutions share the cost of one dispatch. On
a GPU the program is started several times before its results are awaited, as in a training loop.
This excludes the time that a sleeping host needs to wake up, which is up to a millisecond. With
``device_time`` the times come from the profiler and exclude the host.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jaxconv.bench import trace
from jaxconv.bench.compiled import Ahead, compile_one, norms, reference_result
from jaxconv.bench.environment import kernel_platform
from jaxconv.bench.problem import Library, Problem, Row, Side
from jaxconv.bench.program import (
    Program,
    elapsed,
    libraries,
    operands,
    program,
    selection,
    starts_of,
)

# Bytes of operands and results that one measurement may hold: a part of the smallest usual device.
_MEMORY = {"cpu": 1.5e9, "cuda": 8e9}

# The largest L2 cache of the GPUs in use: an H200 has 50 MB, an RTX 4090 72 MB, a B200 126 MB.
_L2_BYTES = 126e6

# How often a program is started in one trace.
_TRACED_STARTS = 4

# A program this long is repeated only three times, and where a single convolution takes half as
# long, a program holds one.
_LONG_SECONDS = 1.0


def relative_error(
    result: jax.Array, reference: jax.Array, compiled: Callable | None = None
) -> float:
    """||result - reference|| / ||reference||, in the dtype of the reference."""
    with jax.enable_x64(reference.dtype == np.float64):
        difference, scale = (compiled or norms)(result, reference)
        return float(difference) / max(float(scale), np.finfo(np.float32).tiny)


def copies_of(problem: Problem, platform: str, device_time: bool = False) -> int:
    """How many independent convolutions one program holds."""
    each = problem.footprint
    if platform == "cpu":
        # Enough that operands leave the cache between uses; not more, because each takes
        # milliseconds.
        wanted = np.clip(64e6 / each, 1, 4)
    elif device_time:
        # Enough that operands leave the cache; neither host nor dispatch counts.
        wanted = np.clip(_L2_BYTES * 4 / each, 8, 64)
    else:
        # Eight share a dispatch and exceed an L2 cache of 50 MB several times.
        wanted = 8 if 8 * each > 5e8 else 16
    return int(np.clip(_MEMORY.get(platform, 8e9) / each, 1, wanted))


def first_line(error: BaseException) -> str:
    """An error's type and the first line of its message."""
    text = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text.strip()}"


def _check(
    row: Row, compared: dict[str, Library], operands: tuple[jax.Array, ...], ahead: Ahead | None
) -> float:
    """Compiles one convolution per library and compares the results with the reference.

    Returns:
        The seconds that the slower one's first run took.
    """
    problem, results, longest = row.problem, {}, 0.0
    for name, library in compared.items():
        side = row.sides[name] = Side()
        try:
            prepared = jax.block_until_ready(library.prepare(*operands))
            if ahead is None:
                one = compile_one(problem, library, prepared, row.platform)
                side.compile_s = one.seconds
            else:  # beside other threads: its seconds say nothing
                one = ahead.libraries[name].result()[0]
            side.temporary_bytes = one.temporary_bytes
            if name == "jaxconv":
                row.kernel, row.reason, row.slices = one.kernel, one.reason, one.slices
            start = time.perf_counter()
            result = jax.block_until_ready(one.run(*prepared))
            longest = max(longest, time.perf_counter() - start)
            results[name] = library.finish(result)
        except Exception as error:  # shown in the row, whatever a library or device raises
            side.failure = first_line(error)
            row.refused |= (
                name == "jaxconv" and problem.algorithm != "auto" and isinstance(error, ValueError)
            )
    if not results:
        return longest
    try:
        reference = reference_result(problem, operands, ahead and ahead.reference.result)
        for name, result in results.items():
            compiled = ahead.norms.result() if ahead else None
            row.sides[name].error = relative_error(result, reference, compiled)
    except Exception as error:
        row.sides["jaxconv"].failure = f"no reference to compare with: {first_line(error)}"
    return longest


def measure(
    problem: Problem,
    *,
    repetitions: int | None = None,
    seconds: float = 0.4,
    seed: int = 0,
    device_time: bool = False,
    im2col: bool = False,
    peers: dict[str, Callable[[Problem, int], Program]] | None = None,
    ahead: Ahead | None = None,
) -> Row:
    """Checks and times one problem on JAX's default device.

    Args:
        problem: what to measure.
        repetitions: least number of runs of each library, 10 by default and three where a run takes
            over a second; with ``device_time`` the number of traces, 3 by default.
        seconds: time to spend on each library, within 100 runs.
        seed: of the random operands.
        device_time: take times from the profiler, as the union of the intervals in which the
            device executes kernels; needs a GPU.
        im2col: measure ``algorithm="im2col"`` too.
        peers: further libraries: name -> function of the problem and the number of convolutions in
            a program that returns the program.
        ahead: the row's functions, where they are compiled already, for ``copies_of`` convolutions.

    Returns:
        The row; failures are recorded in it, not raised.
    """
    platform = kernel_platform()
    row = Row(problem, platform, copies=copies_of(problem, platform, device_time))
    try:
        pairs = operands(problem, row.copies, seed, ahead.draw.result() if ahead else None)
    except Exception as error:
        row.sides["jaxconv"] = Side(failure=f"operands: {first_line(error)}")
        return row
    if problem.algorithm == "native" and not problem.variant:
        by_auto = selection(dataclasses.replace(problem, algorithm="auto"), platform)
        row.left_to_xla = not by_auto.instance
    compared = libraries(problem, im2col)
    longest = _check(row, compared, pairs[0], ahead)
    if row.wrong or row.refused:
        return row
    if longest > _LONG_SECONDS / 2:
        # The program that is compiled ahead holds several.
        ahead = ahead if row.copies == 1 else None
        row.copies = 1
        pairs = pairs[:1]

    programs: dict[str, Program] = {}
    makers = {
        name: functools.partial(
            program, library, pairs, ahead.libraries[name].result()[1] if ahead else None
        )
        for name, library in compared.items()
        if not row.sides[name].failure
    }
    for name, peer in ({} if problem.variant else peers or {}).items():
        row.sides[name] = Side()
        makers[name] = functools.partial(peer, problem, row.copies)
    lengths = {}
    for name, make in makers.items():
        try:
            run = make()
            length = elapsed(run)  # the first run is a warm-up, and may load code
            once = device_time or length > _LONG_SECONDS
            lengths[name] = length if once else elapsed(run)
            programs[name] = run
        except Exception as error:
            row.sides[name].failure = first_line(error)

    if programs and device_time:
        _time_on_device(row, programs, repetitions or 3)
    elif programs:
        _time_by_the_clock(row, programs, lengths, repetitions or 10, seconds)
    return row


def _time_by_the_clock(
    row: Row,
    programs: dict[str, Program],
    lengths: dict[str, float],
    repetitions: int,
    seconds: float,
) -> None:
    """Fills in times by the host's clock; ``lengths`` are the seconds of one run of each."""
    starts = {name: starts_of(row.platform, length) for name, length in lengths.items()}
    if max(lengths.values()) > _LONG_SECONDS:
        row.repetitions = 3
    else:
        each = sum(length * starts[name] for name, length in lengths.items())
        affordable = int(seconds * len(lengths) / each)
        row.repetitions = max(repetitions, min(affordable, 100))
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(row.repetitions):
        for name, run in programs.items():
            times[name].append(elapsed(run, starts[name]) / row.copies)
    for name, values in times.items():
        _set_times(row.sides[name], values)


def _time_on_device(row: Row, programs: dict[str, Program], repetitions: int) -> None:
    """Fills in times by the device's clock, and the kernels that ran."""
    row.repetitions = repetitions
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(repetitions):
        for name, run in programs.items():
            events = trace.device_events(functools.partial(run, _TRACED_STARTS))
            times[name].append(trace.union_seconds(events) / _TRACED_STARTS / row.copies)
            row.sides[name].kernels = sorted({event.name for event in events})
    for name, values in times.items():
        _set_times(row.sides[name], values)
    if row.other_kernel_ran:
        ran = ", ".join(row.sides["jaxconv"].kernels) or "nothing"
        row.sides["jaxconv"].failure = f"{row.kernel} was selected, but the trace shows {ran}"


def _set_times(side: Side, seconds: Sequence[float]) -> None:
    side.p20_s, side.median_s, side.p80_s = map(float, np.percentile(seconds, (20, 50, 80)))
