"""Some cases of ``sharding_fuzz``, and errors that its judgement must find."""

from __future__ import annotations

import collections
import dataclasses
import json

import jax.numpy as jnp
import pytest
import sharding_cases
import sharding_judge
from sharding_cases import draw_case
from sharding_judge import Judgement, Side, judge

PROBLEMS = 120


def test_random_shardings(native_cpu, seed, record_property):
    judgements = judge(seed, range(PROBLEMS))
    counts = sum((judgement.counts for judgement in judgements), collections.Counter())
    record_property("fuzz", json.dumps(counts))
    failures = [judgement.failure for judgement in judgements if judgement.failure]
    assert not failures, "\n".join(["tests/sharding/sharding_fuzz.py with", *failures])


@pytest.mark.parametrize("form", sharding_cases.FORMS)
def test_a_wrong_number_is_seen(native_cpu, monkeypatch, form):
    index = next(i for i in range(100) if draw_case(0, i).form == form)
    original = sharding_cases.program

    def off_by_one(case, ours):
        program = original(case, ours)
        return lambda **operands: {n: v + jnp.ones_like(v) for n, v in program(**operands).items()}

    index = next(
        i
        for i in range(index, 200)
        if draw_case(0, i).form == form and not judge(0, [i])[0].counts["refused by us, and by lax"]
    )
    monkeypatch.setattr(sharding_cases, "program", off_by_one)
    (judgement,) = judge(0, [index])
    largest = 255 if form == "quantised" else 1  # 127 + 1 is -128 in 8 bits
    assert f"wrong, by up to {largest}" in judgement.failure
    assert judgement.failure.startswith(f"--seed 0 --problem {index}: {form}")


def test_a_program_that_lax_alone_runs_is_a_failure(monkeypatch):
    def refusing(case, ours):
        raise ValueError("no")

    index = next(i for i in range(100) if set(draw_case(0, i).kinds) == {"auto"})
    monkeypatch.setattr(sharding_cases, "program", refusing)
    (judgement,) = judge(0, [index])
    assert "lax runs, ours does not: ValueError: no" in judgement.failure


@pytest.mark.parametrize(
    ("moved", "size", "flops", "counted"),
    [
        ({"all-gather": 1}, 9, 9, "no more than lax"),
        ({"collective-permute": 2}, 7, 9, "more than lax, of no more bytes"),
        ({"all-gather": 2}, 9, 7, "more than lax, for less computation on a device"),
        ({"all-gather": 2}, 9, 9, ""),
    ],
)
def test_more_collectives_need_a_reason(moved, size, flops, counted):
    plain = dict(kinds=("auto",), shape=(2,), wanted=("y",), specs={"x": (("a",), (), (), ())})
    case = dataclasses.replace(draw_case(0, 0), **plain)
    judgement, theirs = Judgement(case), Side(moved={"all-gather": 1}, bytes=8, flops=8)
    ours = Side(moved=moved, bytes=size, flops=flops, operations=["fprop"])
    sharding_judge._compare(judgement, ours, theirs)
    assert judgement.counts[f"collectives: {counted}"] == bool(counted)
    assert ("more collectives than lax" in judgement.failure) == (not counted)


def test_a_process_that_ends_is_a_refusal_of_that_case_alone(monkeypatch):
    sides = [Side(bytes=1), Side(bytes=2)]

    def run(command, **_):
        left = len(command) - command.index("--lax") - 1
        lines = {3: 1, 1: 1}[left]
        text = "".join(json.dumps(dataclasses.asdict(sides.pop(0))) + "\n" for _ in range(lines))
        return type("Done", (), {"stdout": text, "returncode": -6 if left == 3 else 0})

    monkeypatch.setattr(sharding_judge.subprocess, "run", run)
    found = sharding_judge.by_lax(0, [4, 5, 6])
    assert (found[4].bytes, found[5].refused) == (1, "ends the process by signal 6")
    assert found[6].bytes == 2
