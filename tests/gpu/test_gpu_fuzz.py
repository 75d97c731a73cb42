"""The parts of the GPU fuzz on the CPU: its problems, and its detection of errors."""

from __future__ import annotations

import collections
import itertools
import queue

import cpu_features
import epilogue_reference
import gpu_fuzz
import gpu_fuzz_kinds
import gpu_fuzz_problems
import gpus
import pytest
from int8_reference import OUT_DTYPES

from jaxconv._src.problem.spec import Op

CASES = [gpu_fuzz_problems.draw_case(0, index, "cpu") for index in range(400)]


FLOAT = [case for case in CASES if not case.int8]
FUSED = [case for case in CASES if case.fused]
INT8 = [case for case in CASES if case.int8]


def whole(cases: list, count: int) -> list:
    """The first cases without negative padding, which oneDNN does not take."""
    return [c for c in cases if min(min(pair) for pair in c.problem.padding) >= 0][:count]


def test_problems_are_reproducible_and_varied():
    assert [str(case) for case in CASES] == [
        str(gpu_fuzz_problems.draw_case(0, i, "cpu")) for i in range(400)
    ]
    assert {case.op for case in FLOAT} == {None, *Op}
    assert {(case.dtype, case.precision) for case in FLOAT} == set(gpu_fuzz_problems.DTYPE_CHOICES)
    assert {case.layout for case in FLOAT} == set(gpu_fuzz_problems.LAYOUT_CHOICES)
    problems = [case.problem for case in FLOAT]
    assert {p.rank for p in problems} == {1, 2, 3}
    assert any(p.batch for p in problems) and any(p.groups > 1 for p in problems)
    assert any(p.groups == p.c > 1 for p in problems)
    assert any(min(lo for lo, _ in p.padding) < 0 for p in problems)
    assert any(p.pads_beyond_the_window for p in problems)
    large = [gpu_fuzz_problems.draw_case(0, i, "cuda").problem.name == "large" for i in range(400)]
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
    assert any(p.groups == p.c for p in problems)
    # Problems with terms that kernels with swapped operands accept; one group of many channels.
    swapped = [
        case
        for case in INT8
        if case.int8.scale == "scale"
        and not (case.int8.residual or case.int8.offset or case.int8.zero_point)
        and case.int8.out_dtype.itemsize == 1
        and case.problem.groups == 1
        and case.problem.c % 32 == 0
    ]
    assert len(swapped) > len(INT8) / 10
    assert all(
        p.c % 16 == 0
        if p.groups == p.c
        else p.c == 4 or p.c // p.groups % 32 == 0 == p.k // p.groups % 32
        for p in problems
    )
    assert any(max(p.stride) > 1 for p in problems) and any(max(p.dilation) > 1 for p in problems)
    assert any(lo != hi for p in problems for lo, hi in p.padding)
    assert any(min(pair) < 0 for p in problems for pair in p.padding)
    assert any(p.pads_beyond_the_window for p in problems)


def test_kinds_have_their_turn():
    """Among enough problems for 20,000 results, each kind occurs at least twice."""
    counts: collections.Counter[tuple] = collections.Counter()
    groups, padded = collections.Counter(), collections.Counter()
    for index in range(2800):
        case = gpu_fuzz_problems.draw_case(1, index, "cuda")
        p, form = case.problem, (case.fused is not None, case.int8 is not None)
        counts[(case.op, case.dtype, *form, p.window, p.stride, p.groups == p.c > 1)] += 1
        least = min(min(pair) for pair in p.padding)
        padded[(*form, p.pads_beyond_the_window, least < 0)] += 1
        groups["depthwise" if p.groups == p.c > 1 else "grouped" if p.groups > 1 else "one"] += 1
    for form in ((False, False), (True, False), (False, True)):  # plain, fused, 8 bits
        for wide, negative in ((True, False), (True, True), (False, True)):
            assert padded[(*form, wide, negative)] > 10
    assert groups["depthwise"] > 600 and groups["depthwise"] + groups["grouped"] > 2800 / 3
    for op, dtype in itertools.product(Op, ("f32", "bf16", "f16")):
        for window, stride in (((3, 3), 1), ((3, 3), 2), ((5, 5), 1), ((5, 5), 2), ((1, 4), 1)):
            assert counts[(op, dtype, False, False, window, (stride,) * 2, True)] >= 2
    orders = [[gpu_fuzz_kinds.kind_of(seed, turn) for turn in range(400)] for seed in (1, 2)]
    assert orders[0] != orders[1]
    assert set(gpu_fuzz_kinds.KINDS) == {
        gpu_fuzz_kinds.kind_of(1, turn) for turn in range(len(gpu_fuzz_kinds.KINDS))
    }


def test_processes_take_the_gpus_in_turn(monkeypatch):
    assert gpus.visible({"CUDA_VISIBLE_DEVICES": "2, GPU-a"}) == ["2", "GPU-a"]
    assert gpus.visible({"CUDA_VISIBLE_DEVICES": ""}) == []
    for worker, names, seen in (
        ("gw3", "0,1", "1"),
        ("gw4", "5,7,9", "7"),
        ("gw1", "6", "6"),
        ("master", "0,1", "0,1"),
    ):
        environment = {"CUDA_VISIBLE_DEVICES": names, "PYTEST_XDIST_WORKER": worker}
        gpus.spread_workers(environment)
        assert environment["CUDA_VISIBLE_DEVICES"] == seen
    started = []

    class Process:
        stdout: tuple = ()

        def __init__(self, command, env, **options):
            started.append((command, env))

        def wait(self):
            pass

    monkeypatch.setattr(gpu_fuzz.subprocess, "Popen", Process)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    options = gpu_fuzz.arguments(["--processes", "5"])
    workers = [gpu_fuzz.Worker(options, i, 0.0, queue.Queue()) for i in range(5)]
    assert [env["CUDA_VISIBLE_DEVICES"] for _, env in started] == ["0", "1", "0", "1", "0"]
    assert {env["XLA_PYTHON_CLIENT_MEM_FRACTION"] for _, env in started} == {"0.300"}
    workers[1].spawn(6)  # replaces a worker that ended
    assert started[-1][1]["CUDA_VISIBLE_DEVICES"] == "1"
    assert gpu_fuzz.arguments(["--gpus", "3"]).gpus == ["3"]
    assert gpu_fuzz.arguments(["--platform", "cpu"]).gpus == []


def test_epilogues_are_varied():
    forms = [case.fused for case in FUSED]
    assert len(forms) > 30 and not any(form.plain for form in forms)
    for part in ("scale", "bias", "residual", "pre"):
        assert {getattr(form, part) for form in forms} == {False, True}
    assert {form.activation for form in forms} == {None, "relu", "relu6", "leaky_relu"}
    assert {case.dtype for case in FUSED} == {"f32", "bf16", "f16"}
    assert all(case.op is Op.FPROP and case.problem.batch is None for case in FUSED)


@pytest.mark.parametrize("case", whole(FUSED, 4), ids=lambda case: str(case.index))
def test_results_with_an_epilogue(native_cpu, monkeypatch, case):
    counts, complaints = gpu_fuzz.judge(case, "cpu", 1, collections.Counter())
    assert counts["results"] and not complaints
    right = epilogue_reference.results
    monkeypatch.setattr(epilogue_reference, "results", lambda *a: [r + 1 for r in right(*a)])
    counts, complaints = gpu_fuzz.judge(case, "cpu", 1, collections.Counter())
    assert len(complaints) == counts["results"]


@pytest.mark.parametrize(
    "case",
    [each for op in (None, *Op) for each in whole([c for c in FLOAT if c.op is op], 1)],
    ids=lambda case: str(case.index),
)
def test_right_results_pass_and_wrong_ones_do_not(native_cpu, monkeypatch, case):
    counts, complaints = gpu_fuzz.judge(case, "cpu", None, collections.Counter())
    assert counts["results"] and not complaints
    right = gpu_fuzz.reference
    monkeypatch.setattr(gpu_fuzz, "reference", lambda *a, **b: right(*a, **b) + 1)
    counts, complaints = gpu_fuzz.judge(case, "cpu", None, collections.Counter())
    assert len(complaints) == counts["results"]
    for complaint in complaints:
        assert complaint.startswith(f"--seed 0 --problem {case.index} (") and "\n" not in complaint


@cpu_features.needs_vnni
@pytest.mark.parametrize("case", whole(INT8, 6), ids=lambda case: str(case.index))
def test_8_bit_results(native_cpu, monkeypatch, case):
    counts, complaints = gpu_fuzz.judge(case, "cpu", None, collections.Counter())
    assert counts["results"] == counts["form int8"] >= 2 and not complaints
    assert counts["poisoned results"] == counts["results"]
    right = gpu_fuzz.gpu_fuzz_int8.arrays

    def wrong(*arguments):
        """Flips one bit of one element."""
        operands, expected = right(*arguments)
        expected.view(f"u{expected.itemsize}").flat[-1] ^= 1
        return operands, expected

    monkeypatch.setattr(gpu_fuzz.gpu_fuzz_int8, "arrays", wrong)
    counts, complaints = gpu_fuzz.judge(case, "cpu", None, collections.Counter())
    assert len(complaints) == counts["results"]
    for complaint in complaints:
        assert complaint.startswith(f"--seed 0 --problem {case.index} (int8, ")
        assert "1 of" in complaint and "\n" not in complaint


def test_what_does_not_fit_is_counted_and_no_failure():
    case = gpu_fuzz.draw_case(1, 2, "cpu")
    counts, complaints = gpu_fuzz.failed(case, RuntimeError("RESOURCE_EXHAUSTED: Out of memory"))
    assert list(counts.values()) == [1] and not complaints
    counts, complaints = gpu_fuzz.failed(case, RuntimeError("illegal memory access"))
    assert not counts and "illegal memory access" in complaints[0]
