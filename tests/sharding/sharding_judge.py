"""Judges random sharded programs: results by definition, failures and collectives by lax.

XLA's own sharded program is no reference: for many splits its results are wrong, and for some it
crashes, so lax runs in another process. If its result is right, collectives are compared.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import logging
import math
import pathlib
import re
import subprocess
import sys
from collections.abc import Sequence

import jax
import numpy as np
import sharding_cases
from sharding_cases import Case

COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
_INSTRUCTION = re.compile(rf"= (.*?) ({'|'.join(COLLECTIVES)})(?:-start)?\(")
_ARRAY = re.compile(r"(?:pred|[a-z]+)(\d*)\[([\d,]*)\]")
_KEY = re.compile(
    r"^(\w+) \S+ \w+ b(\d+) n(\d+) g(\d+) c(\d+) k(\d+) "
    r"i(\S+) f(\S+) o(\S+) s(\S+) l(\S+) d(\S+) p(\S+)"
)


@dataclasses.dataclass
class Side:
    """The outcome of a program.

    Attributes:
        refused: the reason why there are no results.
        wrong: the results that differ from the definition.
        moved: how often each collective occurs in the compiled program.
        bytes: the bytes of the collectives' results on one device.
        flops: the operations of the convolutions on one device, without products with padding.
        operations: the operations (fprop, dgrad, wgrad) that compute our convolutions.
    """

    refused: str = ""
    wrong: str = ""
    moved: dict[str, int] = dataclasses.field(default_factory=dict)
    bytes: int = 0
    flops: int = 0
    operations: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Judgement:
    """The judgement of one case: counts, and at most one failure."""

    case: Case
    counts: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    failure: str = ""

    def fail(self, reason: str) -> None:
        self.failure = f"{self.case.line()}: {reason}"


class Lowered(logging.Handler):
    """Sums up the work of the local convolutions that the library logs."""

    def __init__(self):
        super().__init__(logging.DEBUG)
        self.flops = 0
        self.operations: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if not (found := _KEY.search(record.getMessage())):
            return
        operation, *sizes = found.groups()[:6]
        batch, n, groups, c, k = map(int, sizes)
        axes = zip(*(each.split("x") for each in found.groups()[6:]), strict=True)
        taps = math.prod(_taps(*map(int, rest), int(pad.split("_")[0])) for *rest, pad in axes)
        self.operations.append(operation)
        self.flops += 2 * batch * n * c // groups * k * taps


def _taps(extent, window, out, stride, lhs_dilation, dilation, low) -> int:
    """The number of (output, filter element) pairs that meet an element of the input."""
    at = np.arange(out)[:, None] * stride + np.arange(window) * dilation - low
    return int(((at >= 0) & (at % lhs_dilation == 0) & (at // lhs_dilation < extent)).sum())


def run(case: Case, ours: bool) -> Side:
    """Compiles and runs one side of a case."""
    arrays, expected = sharding_cases.draw_arrays(case)
    mesh, handler, logger = case.mesh(), Lowered(), logging.getLogger("jaxconv")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        with jax.set_mesh(mesh):
            operands = sharding_cases.placed(case, arrays, mesh)
            function = sharding_cases.mapped(case, sharding_cases.program(case, ours), mesh)
            compiled = jax.jit(function).lower(*operands).compile()
            results = jax.device_get(compiled(*operands))
    except Exception as error:  # any error: lax decides whether it is right
        return Side(refused=f"{type(error).__name__}: {' '.join(str(error).split())[:160]}")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    flops = handler.flops if ours else (compiled.cost_analysis() or {}).get("flops", 0)
    wrong, moved = _wrong(case, results, expected), _moved(compiled.as_text())
    return Side("", wrong, *moved, int(flops), sorted(handler.operations))


def _moved(text: str) -> tuple[dict[str, int], int]:
    counts, total = collections.Counter(), 0
    for result, kind in _INSTRUCTION.findall(text):
        counts[kind] += 1
        for bits, extents in _ARRAY.findall(result):
            total += int(bits or 8) // 8 * int(np.prod([int(e) for e in extents.split(",") if e]))
    return dict(counts), total


def _wrong(case: Case, results: dict, expected: dict[str, np.ndarray]) -> str:
    for name in case.wanted:
        actual = case.canonical(name, np.asarray(results[name]).astype(np.float64))
        off = np.abs(actual - expected[name])
        if name in ("mean", "variance"):  # the division rounds
            size = np.abs(expected[name]) + np.sqrt(expected["variance"])
            off = np.where(off <= 1e-5 * size, 0, off)
        if (bad := ~(off == 0)).any():
            return f"{name}: {bad.sum()} of {off.size} wrong, by up to {np.nanmax(off):g}"
    return ""


def judge(seed: int, indices: Sequence[int]) -> list[Judgement]:
    """Judges cases by the definition, and by lax if ours fails or communicates."""
    found, sides = {}, {}
    for index in indices:
        case = sharding_cases.draw_case(seed, index)
        found[index], sides[index] = Judgement(case), run(case, True)
    # A program without a convolution of ours, on a CPU without 8-bit kernels, is lax's own.
    laxs = {i for i, s in sides.items() if s.wrong and not s.operations}
    asked = [i for i, s in sides.items() if s.refused or (s.moved and not s.wrong) or i in laxs]
    theirs = by_lax(seed, asked)
    for index, judgement in found.items():
        case, ours = judgement.case, sides[index]
        kinds = " and ".join(sorted(set(case.kinds)))
        judgement.counts[f"{kinds} mesh of {len(case.shape)} axes"] += 1
        judgement.counts.update(f"results {name}" for name in case.wanted)
        if index in laxs and theirs[index].wrong == ours.wrong:
            judgement.counts["no convolution of ours: wrong as by lax"] += 1
        elif ours.wrong:
            judgement.fail(ours.wrong)
        elif index in theirs:
            _compare(judgement, ours, theirs[index])
        else:
            judgement.counts["no collective"] += 1
    return list(found.values())


def _compare(judgement: Judgement, ours: Side, theirs: Side) -> None:
    if ours.refused:
        if theirs.refused:
            judgement.counts["refused by us, and by lax"] += 1
        elif "which does not divide the" in ours.refused and _by_position(judgement.case):
            judgement.counts["refused by us alone: the result's positions do not divide"] += 1
        else:
            judgement.fail(f"lax runs, ours does not: {ours.refused}")
    elif theirs.refused:
        judgement.counts["collectives: lax does not run"] += 1
    elif theirs.wrong:
        judgement.counts["collectives: lax is wrong"] += 1
    elif sum(ours.moved.values()) <= sum(theirs.moved.values()):
        judgement.counts["collectives: no more than lax"] += 1
    elif reason := _reason(judgement.case, ours, theirs):
        judgement.counts[f"collectives: more than lax, {reason}"] += 1
    else:
        judgement.fail(
            f"more collectives than lax: {ours.moved} of {ours.bytes} B, {ours.flops} flops; "
            f"{ours.operations}; lax {theirs.moved} of {theirs.bytes} B, {theirs.flops} flops"
        )


def _reason(case: Case, ours: Side, theirs: Side) -> str:
    """A reason why more collectives than lax's are acceptable, or ""."""
    if ours.bytes <= theirs.bytes:
        return "of no more bytes"
    if ours.flops < theirs.flops:
        return "for less computation on a device"
    gives = {"fprop": {"y", "dx"}, "dgrad": {"dx"}, "wgrad": {"dw"}}
    natural = all(gives[operation] & set(case.wanted) for operation in ours.operations)
    natural = natural and ("y" not in case.wanted or "fprop" in ours.operations)
    if not natural or ours.operations.count("wgrad") != ("dw" in case.wanted):
        # Only that operation has a kernel, or the result is no larger than the filter.
        return "as another operation"
    if len(set(case.kinds)) > 1:
        return "at the border of a region that is manual in part"
    if sharding_cases.uneven(case):
        return "uneven or narrow shares"
    if sharding_cases.conflicting(case):
        return "one mesh axis for two dimensions, of which ours leaves the activation in place"
    if sharding_cases.disputed(case):
        return "operands that are split in different ways"
    if _by_position(case):
        return "for a result of which lax splits another axis"
    return ""


def _by_position(case: Case) -> bool:
    """Whether lax's rule for explicit meshes differs from the meaning of the axes.

    The rule splits axis i of the result like axis i of lhs, whatever these axes mean.
    """
    return case.explicit and case.call.numbers.lhs_spec != case.call.numbers.out_spec


def by_lax(seed: int, indices: Sequence[int]) -> dict[int, Side]:
    """Lax's side of cases, from other processes: if one dies, the next one continues after it."""
    found: dict[int, Side] = {}
    left = list(indices)
    while left:
        program = pathlib.Path(__file__).with_name("sharding_fuzz.py")
        command = [sys.executable, program, "--seed", str(seed), "--lax", *map(str, left)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        lines = done.stdout.splitlines()
        found |= {i: Side(**json.loads(line)) for i, line in zip(left, lines, strict=False)}
        left = left[len(lines) :]
        if left and done.returncode > 0:
            raise RuntimeError(f"{command}: exit {done.returncode}")
        if left:
            found[left.pop(0)] = Side(refused=f"ends the process by signal {-done.returncode}")
    return found


def print_lax(seed: int, indices: Sequence[int]) -> None:
    """Prints lax's side of cases, one line each."""
    for index in indices:
        case = sharding_cases.draw_case(seed, index)
        print(json.dumps(dataclasses.asdict(run(case, False))), flush=True)
