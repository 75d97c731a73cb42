"""Runs a kernel, forced by name, on every problem that it accepts.

The tests of plain, fused and 8-bit kernels supply the calls and their expected results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import cpu_features
import jax
from numerics import TOGETHER, exact_operands, excess, mismatch, poisoned, tolerance_of
from problems import Problem

from jaxconv._src.library import native
from jaxconv._src.problem.spec import Op

# A function, its operands, and a function that returns complaints about the results of its runs.
Prepared = tuple[Callable, Sequence, Callable[..., Iterable[str]]]

# A kernel that accepts fewer problems fails: it could otherwise pass by refusing them.
LEAST_ACCEPTED = 4


def wrong_results(calls: Sequence[Callable[[], Prepared]], runs: int = 1) -> list[str]:
    """Complaints about the results of calls; each program consists of ``TOGETHER`` calls.

    Results are filled with NaN before each of the ``runs``.
    """
    found: list[str] = []
    for at in range(0, len(calls), TOGETHER):
        some = [call() for call in calls[at : at + TOGETHER]]
        functions, operands, judges = zip(*some, strict=True)

        def together(*operands, functions=functions):
            return [call(*each) for call, each in zip(functions, operands, strict=True)]

        program = poisoned(together, *operands)
        for judge, *results in zip(judges, *(program() for _ in range(runs)), strict=True):
            found += filter(None, judge(*results))
    return found


class Forced:
    """The calls of one kernel, forced by name."""

    def __init__(self, platform: str, instance: str):
        self.instance = instance
        self.device = jax.devices({"cpu": "cpu", "cuda": "gpu"}[platform])[0]
        self.calls: list[Callable[[], Prepared]] = []
        self.failures: list[str] = []

    def takes(self, chosen: native.Selection, line: str) -> bool:
        """Whether the kernel takes a problem. If not, it must say why; no other may be chosen."""
        if chosen.instance is None:
            if not chosen.refusals or not all(r.reason.strip() for r in chosen.refusals):
                self.failures.append(f"{line}\n  refused without a reason: {chosen.refusals}")
        elif chosen.instance != self.instance:
            self.failures.append(f"{line}\n  asked {self.instance}, got {chosen.instance}")
        return chosen.instance == self.instance

    def check(self, least: int = LEAST_ACCEPTED) -> None:
        """Runs the calls; fails if a result or a refusal is wrong, or if there are few calls."""
        with jax.default_device(self.device):
            self.failures += wrong_results(self.calls)
        assert not self.failures, "\n".join(self.failures)
        if self.device.platform == "cpu" and not self.calls:
            cpu_features.skip_without(self.instance)
        assert len(self.calls) >= least, f"{self.instance} took only {len(self.calls)} problems"


def operation_call(
    op: Op, problem: Problem, dtype: str, layout: str, repro: str, *, seed: int = 0, **options: Any
) -> Prepared:
    """An operation on integers whose sums are exact in any order: results have the same bits.

    Args:
        op, problem, dtype, layout: the operation.
        repro: the beginning of a report.
        seed: the seed of the operands.
        options: options of the problem's spec.
    """
    *sides, expected = exact_operands(op, problem, dtype, seed=seed)
    roles = op.roles[:2]
    operands = [problem.to_layout(*each, layout) for each in zip(roles, sides, strict=True)]
    tolerance = tolerance_of(options.get("algorithm", ""))

    def judge(*results: jax.Array) -> list[str]:
        first, *others = (problem.to_canonical(op.roles[2], y, layout) for y in results)
        again = [mismatch(other, first, f"second run, {repro}") for other in others]
        return [excess(first, expected, tolerance, repro), *again]

    return problem.operation(op, dtype, layout=layout, **options), operands, judge
