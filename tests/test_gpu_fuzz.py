"""The GPU fuzz's own parts, on the CPU: its problems, and that it sees what is wrong."""

from __future__ import annotations

import collections

import gpu_fuzz
import gpu_fuzz_problems
import pytest
from int8_reference import OUT_DTYPES

from jaxconv._src.spec import Op

CASES = [gpu_fuzz_problems.draw(0, index, "cpu") for index in range(400)]


FLOAT = [case for case in CASES if not case.int8]
FUSED = [case for case in CASES if case.fused]
INT8 = [case for case in CASES if case.int8]


def test_problems_are_reproducible_and_varied():
    assert [str(case) for case in CASES] == [
        str(gpu_fuzz_problems.draw(0, i, "cpu")) for i in range(400)
    ]
    assert {case.op for case in FLOAT} == {None, *Op}
    assert {(case.dtype, case.precision) for case in FLOAT} == set(gpu_fuzz_problems.DTYPE_CHOICES)
    assert {case.layout for case in FLOAT} == set(gpu_fuzz_problems.LAYOUT_CHOICES)
    problems = [case.problem for case in FLOAT]
    assert {p.rank for p in problems} == {1, 2, 3}
    assert any(p.batch for p in problems) and any(p.groups > 1 for p in problems)
    assert any(p.groups == p.c > 1 for p in problems)
    assert any(min(lo for lo, _ in p.padding) < 0 for p in problems)
    wider = [lo > (p.window[0] - 1) * p.dilation[0] for p in problems for lo, _ in p.padding[:1]]
    assert any(wider)
    large = [gpu_fuzz_problems.draw(0, i, "cuda").problem.name == "large" for i in range(400)]
    assert 20 < sum(large) < 120


def test_8_bit_problems_are_varied():
    problems, specs = [case.problem for case in INT8], [case.int8 for case in INT8]
    ranks = {("nhwc", 1), ("nhwc", 2), ("nhwc", 3), ("nchw32", 2)}
    assert {(case.layout, case.problem.rank) for case in INT8} == ranks
    assert {case.dtype for case in INT8} == {"s8", "u8"}
    assert {spec.out_dtype for spec in specs} == set(OUT_DTYPES.values())
    assert {spec.scale for spec in specs} == {"", "scale", "image_scale"}
    assert {spec.activation for spec in specs} == {None, "relu", "relu6"}
    for present in ("offset", "bias", "residual", "zero_point"):
        assert {bool(getattr(spec, present)) for spec in specs} == {False, True}
    assert any(p.groups > 1 for p in problems) and any(p.c == 4 for p in problems)
    assert all(p.c == 4 or p.c // p.groups % 32 == 0 == p.k // p.groups % 32 for p in problems)
    assert any(max(p.stride) > 1 for p in problems) and any(max(p.dilation) > 1 for p in problems)
    assert any(lo != hi for p in problems for lo, hi in p.padding)
    assert any(min(pair) < 0 for p in problems for pair in p.padding)
    wider = [lo > (p.window[0] - 1) * p.dilation[0] for p in problems for lo, _ in p.padding[:1]]
    assert any(wider)


def test_epilogues_are_varied():
    forms = [case.fused for case in FUSED]
    assert len(forms) > 30 and not any(form.plain for form in forms)
    for part in ("scale", "bias", "residual", "pre"):
        assert {getattr(form, part) for form in forms} == {False, True}
    assert {form.activation for form in forms} == {None, "relu", "relu6", "leaky_relu"}
    assert {case.dtype for case in FUSED} == {"f32", "bf16", "f16"}
    assert all(case.op is Op.FPROP and case.problem.batch is None for case in FUSED)


@pytest.mark.parametrize("case", FUSED[:4], ids=[str(case.index) for case in FUSED[:4]])
def test_results_with_an_epilogue(native_cpu, monkeypatch, case):
    counts, complaints = gpu_fuzz.judge(case, "cpu", 1, collections.Counter())
    assert counts["results"] and not complaints
    right = gpu_fuzz.gpu_fuzz_fused.results
    monkeypatch.setattr(gpu_fuzz.gpu_fuzz_fused, "results", lambda *a: [r + 1 for r in right(*a)])
    counts, complaints = gpu_fuzz.judge(case, "cpu", 1, collections.Counter())
    assert len(complaints) == counts["results"]


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


@pytest.mark.parametrize("case", INT8[:6], ids=[str(case.index) for case in INT8[:6]])
def test_8_bit_results(native_cpu, monkeypatch, case):
    counts, complaints = gpu_fuzz.judge(case, "cpu", None, collections.Counter())
    assert counts["results"] == counts["form int8"] >= 2 and not complaints
    assert counts["poisoned results"] == counts["results"]
    right = gpu_fuzz.gpu_fuzz_int8.arrays

    def wrong(*arguments):
        """One bit of one element."""
        operands, expected = right(*arguments)
        expected.view(f"u{expected.itemsize}").flat[-1] ^= 1
        return operands, expected

    monkeypatch.setattr(gpu_fuzz.gpu_fuzz_int8, "arrays", wrong)
    counts, complaints = gpu_fuzz.judge(case, "cpu", None, collections.Counter())
    assert len(complaints) == counts["results"]
    for complaint in complaints:
        assert complaint.startswith(f"--seed 0 --problem {case.index} (int8, ")
        assert "1 of" in complaint and "\n" not in complaint
