"""Every kernel of the build, forced by name, on every problem: exact, or refused with a reason.

test_int8_every_kernel.py covers the kernels that read packed filters, and uint8 images.
"""

from __future__ import annotations

import functools

import kernel_tables
import numpy as np
import pytest
from every_kernel import Forced, operation_call
from numerics import excess, tolerance_of
from problems import DTYPES, LAYOUTS, OF_FAMILY, PROBLEMS, REPRESENTATIVE

from jaxconv._src.conv.bilinear import select
from jaxconv._src.library import native
from jaxconv._src.problem.spec import Op


def instances() -> list:
    """(platform, instance) of every kernel: the CPU's in this build, CUDA's in the tables."""
    cpu = native.load("cpu")
    names = [] if isinstance(cpu, native.Refusal) else cpu.kernels()
    return [pytest.param("cpu", name, id=name) for name in names if not name.endswith("_u8")] + [
        pytest.param("cuda", each.name, marks=pytest.mark.gpu, id=each.name)
        for each in kernel_tables.instances()
        if each.family not in kernel_tables.INT8_FAMILIES
    ]


def test_the_cpu_kernels_of_this_build_are_complete(native_cpu):
    names = native_cpu.kernels()
    assert len(names) == len(set(names))
    for op in Op:
        assert any(name.startswith(f"{op.value}_") for name in names), f"no {op.value} kernel"
    for name in names:
        assert any(f"_{family}" in name for family in native_cpu.module.families()), name


@pytest.mark.gpu
def test_the_cuda_kernels_of_this_build_are_those_of_the_tables():
    cuda = native.load("cuda")
    assert not isinstance(cuda, native.Refusal), cuda
    assert sorted(cuda.kernels()) == sorted(each.name for each in kernel_tables.all_instances())
    passes = [[each.name, each.family, each.op] for each in kernel_tables.passes()]
    assert sorted(cuda.pass_kernels()) == sorted(passes)


@pytest.mark.parametrize(("platform_name", "instance"), instances())
def test_exact_or_refused(platform_name, instance):
    """Operands are integers whose sums are exact in any order: results are compared bit by bit."""
    op = Op(instance.split("_")[0])
    forced = Forced(platform_name, instance)
    own = (found for family, found in OF_FAMILY.items() if f"_{family}_" in f"{instance}_")
    for problem in [*PROBLEMS, *next(own, [])]:
        for dtype, types in DTYPES.items():
            for layout in LAYOUTS if problem in REPRESENTATIVE else ("last", "krsc"):
                spec = problem.spec(algorithm=instance, layout=layout)
                sizes = problem.sizes(op, spec, layout)
                chosen, line = select(platform_name, op, spec, sizes, *types)
                assert line == problem.line(op, dtype) + " krsc" * chosen.krsc
                if layout == "krsc" and not chosen.krsc:
                    continue  # the filter is transposed, as in "first"
                if forced.takes(chosen, line):
                    what = (op, problem, dtype, layout, f"{instance} ({layout}): {line}")
                    call = functools.partial(operation_call, *what, algorithm=instance)
                    forced.calls.append(call)
    forced.check()


def test_a_tolerance_admits_rounding_and_neither_nan_nor_a_missing_tap():
    tolerance = tolerance_of("fprop_winograd_f16_4x4_four_stage_64x64x64")
    expected = np.array([-200, 7, 0, 90], np.float16)
    for wrong, message in [(0.5, ""), (20, "largest error 20, allowed 3"), (np.nan, "nan")]:
        actual = expected + np.array([0, 0, wrong, 0], np.float16)
        report = excess(actual, expected, tolerance, "x")
        assert message in report and bool(report) == bool(message)
        assert bool(excess(actual, expected, 0.0, "x"))
    assert "float32" in excess(expected.astype(np.float32), expected, tolerance, "x")


@pytest.mark.parametrize(("platform_name", "instance"), instances())
def test_a_forced_kernel_that_refuses_says_why_while_tracing(platform_name, instance):
    """No kernel takes every dtype, so each has one to refuse."""
    op = Op(instance.split("_")[0])
    problem = PROBLEMS[0]
    operands = [np.zeros(problem.canonical_shape(role), np.float16) for role in op.roles[:2]]
    refused = 0
    for precision in ("default", "high", "highest"):
        for dtype in DTYPES:
            operands = [a.astype(DTYPES[dtype][0]) for a in operands]
            call = problem.operation(op, dtype, algorithm=instance, precision=precision)
            spec = problem.spec(algorithm=instance, precision=precision)
            sizes = problem.sizes(op, spec)
            chosen, line = select(platform_name, op, spec, sizes, *DTYPES[dtype])
            if chosen.instance is not None:
                call.trace(*operands)
                continue
            refused += 1
            with pytest.raises(ValueError) as raised:
                call.trace(*operands)
            message = str(raised.value)
            assert line in message and instance in message
            assert all(refusal.reason in message for refusal in chosen.refusals)
            assert "xla" in message
    assert refused
