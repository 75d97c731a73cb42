"""Measures the loss of selection: times the selected kernel and all others that accept.

Each kernel instance runs the same program on the same random operands, with enough independent
convolutions that the start of the program is negligible. The regret of a kernel on a problem is
(its time / the least time of any instance) - 1.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from jaxconv._src.call.selection import AUTO, NATIVE
from jaxconv._src.library import native
from jaxconv.bench import command_layers, environment, options, report
from jaxconv.bench.additions import Additions
from jaxconv.bench.problem import Problem
from jaxconv.bench.program import (
    Program,
    elapsed,
    libraries,
    operands,
    program,
    selection,
    starts_of,
)
from jaxconv.bench.progress import Progress, each

# Bytes of operands and results in a program. Small problems have many launches, so that the start
# of the program does not hide differences between kernels.
_PROGRAM_BYTES = {"cpu": 2e8, "cuda": 2e9}
_MOST_COPIES = 64

# A kernel is not run again if its first run takes this many times as long as the best one's.
_HOPELESS = 3.0


@dataclasses.dataclass
class Regret:
    """The time of every accepting instance on one problem, in seconds for one convolution."""

    problem: Problem
    chosen: str | None  # None, with no seconds, if no kernel takes the problem
    seconds: dict[str, float]

    @property
    def best(self) -> str:
        return min(self.seconds, key=self.seconds.__getitem__)

    @property
    def value(self) -> float:
        """The time of the chosen instance over the least time, minus 1."""
        return self.seconds[self.chosen] / self.seconds[self.best] - 1.0

    def as_json(self) -> dict[str, Any]:
        problem = self.problem
        return {
            "layer": problem.name,
            "problem": dataclasses.asdict(problem.layer),
            "op": problem.op.value,
            "dtype": problem.dtype,
            "precision": problem.precision,
            "chosen": self.chosen,
            "best": self.best,
            "regret": self.value,
            "seconds": self.seconds,
        }


def accepting(problem: Problem, platform: str) -> tuple[str | None, list[str]]:
    """The instance that selection chooses, and all that take the problem.

    ``problem.algorithm`` limits both to a family. XLA's own convolution is no candidate.
    """
    kernels = native.load(platform)
    if isinstance(kernels, native.Refusal):
        return None, []

    def chosen(algorithm: str) -> str | None:
        demanded = dataclasses.replace(problem, algorithm=algorithm)
        try:
            return selection(demanded, platform).instance
        except ValueError:
            if not problem.requantized:
                raise
            return None  # int8.conv raises where the kernel does not take the problem

    every = problem.algorithm in (AUTO, NATIVE)
    prefix = f"{problem.op.value}_" + ("" if every else problem.algorithm)
    names = [name for name in kernels.kernels() if name.startswith(prefix) and chosen(name) == name]
    return chosen(NATIVE if every else problem.algorithm), names


def measure_regret(
    problem: Problem, *, repetitions: int = 10, seed: int = 0, threads: int = 1
) -> Regret:
    """Times every instance that accepts the problem, in turn, on JAX's default device.

    Args:
        problem: the problem.
        repetitions: runs of each program.
        seed: the seed of the random operands.
        threads: the number of programs that compile at the same time.
    """
    platform = environment.kernel_platform()
    chosen, names = accepting(problem, platform)
    if chosen is None:
        return Regret(problem, None, {})
    copies = _PROGRAM_BYTES[platform] / problem.footprint
    pairs = operands(problem, int(np.clip(copies, 2, _MOST_COPIES)), seed)

    def forced(instance: str) -> Program:
        demanded = dataclasses.replace(problem, algorithm=instance)
        return program(libraries(demanded)["jaxconv"], pairs)

    with ThreadPoolExecutor(threads) as pool:
        programs = dict(zip(names, pool.map(forced, names), strict=True))
    first = {}
    for name, run in programs.items():
        elapsed(run)  # loads the code
        first[name] = elapsed(run, 2)
    least = min(first.values())
    starts = starts_of(platform, least)
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(repetitions):
        for name, run in programs.items():
            if first[name] <= _HOPELESS * least:
                times[name].append(elapsed(run, starts))
    seconds = {name: float(np.median(t or first[name])) / len(pairs) for name, t in times.items()}
    return Regret(problem, chosen, seconds)


def line(regret: Regret) -> str:
    """One line of the report."""
    problem, seconds = regret.problem, regret.seconds
    if not seconds:
        return f"{problem.name:34} {problem.op.value} {problem.dtype_label:5} no kernel takes it"
    return (
        f"{problem.name:34} {problem.op.value} {problem.dtype_label:5} "
        f"{seconds[regret.chosen] * 1e6:9.1f} us {regret.chosen}, regret {regret.value:6.1%}"
        + ("" if regret.chosen == regret.best else f" to {regret.best}")
    )


def summary(regrets: Iterable[Regret]) -> str:
    """The geometric mean of time over least time, minus 1, and the worst problem."""
    found = list(regrets)
    if not found:
        return "regret: no kernel took any problem"
    mean = report.geometric_mean([1.0 + regret.value for regret in found]) - 1.0
    worst = max(found, key=lambda regret: regret.value)
    return (
        f"regret over {len(found)} problems: geometric mean {mean:.1%}, worst {worst.value:.1%} "
        f"({worst.problem.name} {worst.problem.op.value})"
    )


_ADDITIONS = Additions(
    program="python tools/bench",
    options=lambda add: add("--regret", action="store_true", help="this comparison"),
)


def main(argv: Sequence[str]) -> int:
    """Runs the comparisons that the command line asks for; returns the exit status."""
    parser = command_layers.make_parser(_ADDITIONS)
    arguments = parser.parse_args(argv)
    for option in ("peer", "plot", "resume", "device_time", "seconds"):
        if getattr(arguments, option):
            parser.error(f"--regret: takes no --{option.replace('_', '-')}")
    platform = environment.kernel_platform()
    command_layers.check(parser, arguments, platform)
    problems = command_layers.problems_of(arguments, platform, _ADDITIONS)
    if not problems:
        parser.error("no layer, operation and dtype fit these options")
    facts = environment.describe()
    print("\n".join(f"{name}: {value}" for name, value in facts.items()), end="\n\n")
    one = functools.partial(
        measure_regret,
        repetitions=arguments.reps or 10,
        seed=arguments.seed,
        threads=environment.threads(),
    )
    found = each(Progress(len(problems)), problems, command_layers.label, one, line)
    regrets = [result for result in found if result.seconds]
    if arguments.json:
        rows = [result.as_json() for result in regrets]
        content = {"environment": facts, "command": list(argv), "rows": rows}
        options.write_json(arguments.json, content)
    print("\n" + summary(regrets))
    return 0 if regrets else 1
