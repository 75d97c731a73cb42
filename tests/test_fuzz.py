"""Random problems, each from its own seed: exact against the definition, and bitwise repeatable.

A failure prints the seed and the problem's one line. Rerun it alone with
``python -m pytest tests/test_fuzz.py --seed SEED -k 0-cpu``.
"""

from __future__ import annotations

import jax
import numpy as np
from numerics import exact_operands, mismatch
from problems import DTYPES, LAYOUTS, Problem

from jaxconv._src.spec import Op

PROBLEMS_BY_LEVEL = {"default": 48, "rigorous": 480}
PER_TEST = 8


def draw(seed: int) -> tuple[Problem, Op, str, str]:
    """A random small problem with a non-empty output, an operation, a dtype and a layout."""
    rng = np.random.default_rng(seed)
    while True:
        rank = int(rng.choice([1, 2, 2, 2, 3]))
        largest = {1: 40, 2: 16, 3: 8}[rank]

        def ints(low, high, size=rank):
            return tuple(int(v) for v in rng.integers(low, high, size, endpoint=True))

        groups = int(rng.choice([1, 1, 1, 2, 3, 8]))
        c, k = ints(1, 24 // groups, 2)
        window = ints(1, 5)
        problem = Problem(
            name=f"seed{seed}",
            spatial=ints(1, largest),
            window=window,
            n=int(rng.integers(1, 5)),
            c=groups * c,
            k=groups * k,
            stride=ints(1, 3),
            padding=tuple(
                (int(rng.integers(-2, r + 1)), int(rng.integers(-2, r + 1))) for r in window
            ),
            lhs_dilation=ints(1, 3) if rng.random() < 0.25 else (1,) * rank,
            dilation=ints(1, 3),
            groups=groups,
            batch=int(rng.integers(1, 4)) if rng.random() < 0.2 else None,
        )
        choice = Op(rng.choice([op.value for op in Op])), str(rng.choice(list(DTYPES)))
        if all(problem.out_spatial):
            return problem, *choice, str(rng.choice(LAYOUTS))


def test_draws_are_reproducible_and_varied():
    drawn = [draw(seed) for seed in range(PROBLEMS_BY_LEVEL["default"])]
    assert drawn == [draw(seed) for seed in range(PROBLEMS_BY_LEVEL["default"])]
    assert {op for _, op, _, _ in drawn} == set(Op)
    assert {dtype for _, _, dtype, _ in drawn} == set(DTYPES)
    assert {p.rank for p, *_ in drawn} == {1, 2, 3}
    assert any(p.groups > 1 for p, *_ in drawn) and any(p.batch for p, *_ in drawn)
    assert any(min(lo for lo, _ in p.padding) < 0 for p, *_ in drawn)


def pytest_generate_tests(metafunc):
    if "part" in metafunc.fixturenames:
        count = PROBLEMS_BY_LEVEL[metafunc.config.getoption("level")]
        metafunc.parametrize("part", range(count // PER_TEST))


def test_random_problems(platform, part, seed):
    failures = []
    for one in range(seed + part * PER_TEST, seed + (part + 1) * PER_TEST):
        problem, op, dtype, layout = draw(one)
        if platform == "cuda" and dtype == "s8":
            continue  # numerics.NO_INTEGERS_ON_GPU
        lhs, rhs, expected = exact_operands(op, problem, dtype, seed=one)
        arrays = [
            problem.to_layout(role, a, layout)
            for role, a in zip(op.roles[:2], (lhs, rhs), strict=True)
        ]
        call = problem.operation(op, dtype, layout=layout)
        once, twice = (problem.to_canonical(op.roles[2], call(*arrays), layout) for _ in range(2))
        repro = f"seed {one}, {layout}, {jax.default_backend()}: {problem.line(op, dtype)}"
        failures.append(mismatch(once, expected, repro))
        failures.append(mismatch(twice, once, f"second run, {repro}"))
    failures = [failure for failure in failures if failure]
    assert not failures, "\n".join(failures)
