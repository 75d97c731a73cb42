"""The GPU fuzz's own parts, on the CPU: its problems, and that it sees what is wrong."""

from __future__ import annotations

import collections

import gpu_fuzz
import pytest

from jaxconv._src.spec import Op

CASES = [gpu_fuzz.draw(0, index, "cpu") for index in range(400)]


def test_problems_are_reproducible_and_varied():
    assert [str(case) for case in CASES] == [str(gpu_fuzz.draw(0, i, "cpu")) for i in range(400)]
    assert {case.op for case in CASES} == {None, *Op}
    assert {(case.dtype, case.precision) for case in CASES} == set(gpu_fuzz.DTYPE_CHOICES)
    assert {case.layout for case in CASES} == set(gpu_fuzz.LAYOUT_CHOICES)
    problems = [case.problem for case in CASES]
    assert {p.rank for p in problems} == {1, 2, 3}
    assert any(p.batch for p in problems) and any(p.groups > 1 for p in problems)
    assert any(p.groups == p.c > 1 for p in problems)
    assert any(min(lo for lo, _ in p.padding) < 0 for p in problems)
    wider = [lo > (p.window[0] - 1) * p.dilation[0] for p in problems for lo, _ in p.padding[:1]]
    assert any(wider)
    large = [gpu_fuzz.draw(0, i, "cuda").problem.name == "large" for i in range(400)]
    assert 20 < sum(large) < 120


@pytest.mark.parametrize("index", [0, 1, 5, 6])
def test_right_results_pass_and_wrong_ones_do_not(native_cpu, monkeypatch, index):
    case = CASES[index]
    counts, complaints = gpu_fuzz.judge(case, "cpu", None, collections.Counter())
    assert counts["results"] and not complaints
    right = gpu_fuzz.reference
    monkeypatch.setattr(gpu_fuzz, "reference", lambda *a, **b: right(*a, **b) + 1)
    counts, complaints = gpu_fuzz.judge(case, "cpu", None, collections.Counter())
    assert len(complaints) == counts["results"]
    for complaint in complaints:
        assert complaint.startswith(f"--seed 0 --problem {index} (") and "\n" not in complaint
