"""Random problems: the public function against lax and float64, and the primitives exactly.

A problem of ``conv_general_dilated`` is a function of (seed, index): rank, axis orders, window,
groups, dtype, and data. A failure prints both, and the call as one line of Python. To run one
problem alone: ``python -m pytest tests/conv/test_fuzz.py --seed SEED --problem INDEX``.
"""

from __future__ import annotations

import collections
import dataclasses
import json

import jax
import numpy as np
import pytest
from fuzz_calls import PREFERRED, draw_call
from fuzz_judge import (
    BEYOND,
    BEYOND_SHARE,
    OURS,
    Side,
    draw_primitive,
    judge,
    judge_all,
    judge_primitives,
    operands,
)
from jax import lax
from numerics import LONG_SUM
from problems import DTYPES

import jaxconv
from jaxconv._src.problem.spec import Op

# Numbers with --slow. Without it --random gives the number; a sixth are calls of overridden lax.
COUNT, OVERRIDDEN_COUNT = 2000, 500
PRIMITIVE_COUNT = (48, 480)
PER_CHUNK = 15
PER_PRIMITIVE_TEST = 8


# --- conv_general_dilated -------------------------------------------------------------------------


def pytest_generate_tests(metafunc):
    """Splits the problems into small tests, which pytest-xdist distributes over processes."""
    one = metafunc.config.getoption("problem")
    random = metafunc.config.getoption("random")
    for name, few, many, size in (
        ("chunk", random - random // 6, COUNT, PER_CHUNK),
        ("overridden_chunk", random // 6, OVERRIDDEN_COUNT, PER_CHUNK),
        ("part", *PRIMITIVE_COUNT, PER_PRIMITIVE_TEST),
    ):
        if name in metafunc.fixturenames:
            chunks = [range(at, at + size) for at in range(0, many, size)]
            if one is not None:
                chunks = [range(one, one + 1)]
            marks = [[pytest.mark.slow] * (c.start >= few and one is None) for c in chunks]
            metafunc.parametrize(
                name,
                [
                    pytest.param(c, marks=m, id=f"{c.start}-{c[-1]}")
                    for c, m in zip(chunks, marks, strict=True)
                ],
            )


def test_calls_are_reproducible_and_varied():
    calls = [draw_call(0, index) for index in range(400)]
    assert [c.line() for c in calls] == [draw_call(0, index).line() for index in range(400)]
    assert calls[0].line() != draw_call(1, 0).line()
    valid = [c for c in calls if not c.broken]
    assert {c.problem.rank for c in valid} == {0, 1, 2, 3}
    assert {c.dtype.name for c in valid} == set(PREFERRED)
    assert {c.whole for c in valid} == {True, False}
    for c in valid:
        assert c.to_canonical("x", np.zeros(c.lhs_shape)).shape == c.problem.canonical_shape("x")
        assert c.to_canonical("w", np.zeros(c.rhs_shape)).shape == c.problem.canonical_shape("w")
    forms = [c.parameters["padding"] for c in valid]
    assert {f.upper() for f in forms if isinstance(f, str)} == {"SAME", "SAME_LOWER", "VALID"}
    assert any(lo < 0 or hi < 0 for c in valid for lo, hi in c.problem.padding)
    assert any(c.problem.pads_beyond_the_window for c in valid)
    int8 = [c for c in valid if c.dtype == np.int8]
    assert any(c.problem.reduction(Op.FPROP) >= LONG_SUM for c in int8)
    assert {type(c.parameters.get("dimension_numbers")) for c in valid} == {
        type(None),
        tuple,
        lax.ConvDimensionNumbers,
    }
    assert any(c.problem.batch for c in valid) and any(c.problem.groups > 1 for c in valid)
    assert any(max(c.problem.lhs_dilation, default=1) > 1 for c in valid)
    assert any(0 in c.lhs_shape + c.rhs_shape for c in valid)
    assert len({c.broken for c in calls}) > 6


def _test_calls(side: Side, indices, seed, record_property):
    calls = [draw_call(seed, index) for index in indices]
    complaints, counts = judge_all(side, calls, jax.devices("cpu")[0])
    record_property("fuzz", json.dumps(counts))
    print(f"seed {seed}, problems {indices}: {counts}")
    assert not complaints, "\n".join(complaints)
    total = counts.get(BEYOND, 0) + counts.get("normal results within twice lax's error", 0)
    assert counts.get(BEYOND, 0) <= max(2, BEYOND_SHARE * total), f"seed {seed}: {counts}"


def test_the_judgement_sees_what_is_wrong():
    """The judge finds results off by a factor, and a refused call, on any problem."""

    def off_by(factor):
        return Side(lambda *a, **p: lax.conv_general_dilated(*a, **p) * factor)

    def refuse(*arguments, **parameters):
        raise ValueError("no")

    calls = [draw_call(0, index) for index in range(60)]
    valid = [c for c in calls if not c.broken and operands(c)[1]["y"].any()]
    for side, some in (
        (off_by(2), valid),
        (off_by(1 + 1e-5), [c for c in valid if c.dtype == np.float32 and not c.whole]),
        (Side(refuse), valid),
        (OURS, [dataclasses.replace(c, broken="really not") for c in calls if c.broken]),
    ):
        for call in some[:4]:
            complaints = judge(side, call, jax.devices("cpu")[0], collections.Counter())
            assert bool(complaints) == (side is not OURS), call.line()


@pytest.mark.filterwarnings("ignore:divide by zero")  # from lax, if a stride is 0
def test_conv_general_dilated_agrees_with_lax(native_cpu, chunk, seed, record_property):
    _test_calls(OURS, chunk, seed, record_property)


@pytest.mark.filterwarnings("ignore:divide by zero")  # from lax, if a stride is 0
def test_overridden_lax_agrees_with_lax(native_cpu, overridden_chunk, seed, record_property):
    side = Side(lax.conv_general_dilated, jaxconv.override)
    _test_calls(side, overridden_chunk, seed, record_property)


# --- primitives -----------------------------------------------------------------------------------


def test_problems_are_reproducible_and_varied():
    drawn, again = (
        [draw_primitive(0, index) for index in range(PRIMITIVE_COUNT[0])] for _ in range(2)
    )
    assert drawn == again
    assert {op for _, op, _, _ in drawn} == set(Op)
    assert {dtype for _, _, dtype, _ in drawn} == set(DTYPES)
    assert {p.rank for p, *_ in drawn} == {1, 2, 3}
    assert any(p.groups > 1 for p, *_ in drawn) and any(p.batch for p, *_ in drawn)
    assert any(min(lo for lo, _ in p.padding) < 0 for p, *_ in drawn)
    assert any(p.pads_beyond_the_window for p, *_ in drawn)
    more = [draw_primitive(0, index) for index in range(PRIMITIVE_COUNT[1])]
    long = [p for p, op, dtype, _ in more if dtype == "s8" and p.reduction(op) >= LONG_SUM]
    assert len(long) > len(more) / 50


def test_primitives_are_exact_and_repeatable(platform, part, seed):
    failures = judge_primitives(seed, part)
    assert not failures, "\n".join(failures)
