"""float32 as three TF32 products: the error of float32, and Inf, NaN, huge and tiny operands.

Runs in the emulator and, by instance name, on a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import jax
import kernel_tables
import numpy as np
import pytest
from emulated import computed
from emulated_cases import CASES
from numerics import error, normal_operands, reference
from problems import Problem, problem

from jaxconv._src.problem.spec import Op

# Reductions over 104 or 96 channels, or over 210 pixels: multiples of 32 and a tail. There is no
# padding, because its zeros times Inf give NaN.
POINTWISE = problem("1x1", (15, 7), 1, n=2, c=104, k=96)
# For kernels with few channels on the side that is not reduced.
FEW = {
    "dgrad_few_channels": problem("1x1_few", (15, 7), 1, n=2, c=8, k=104),
    "fprop_few_channels": problem("1x1_narrow", (15, 7), 1, n=2, c=104, k=8),
}
LARGEST = float(np.finfo(np.float32).max)


def layer(instance: str) -> Problem:
    """For block_diagonal, groups are as wide as its blocks, because zeros times Inf give NaN."""
    if "_block_diagonal_" not in instance:
        few = (p for start, p in FEW.items() if instance.startswith(start) and "_256x" in instance)
        return next(few, POINTWISE)
    channels = int(re.search(r"_(\d+)ch_", instance)[1])
    return problem(
        "blocks",
        (15, 7),
        3,
        n=2,
        c=96,
        k=96,
        groups=96 // channels,
        stride=2 if "_stride2" in instance else 1,
        padding=2 if instance.startswith("dgrad_") else 0,
    )


SPLIT = [each.name for each in kernel_tables.instances() if each.name.endswith("_3xtf32")]
EMULATED = list(dict.fromkeys(c.instance for c in CASES if c.instance.endswith("_3xtf32")))

Run = Callable[[np.ndarray, np.ndarray], np.ndarray]
Check = Callable[[Op, Problem, Run], None]


@pytest.fixture
def emulated(request, tmp_path, programs):
    """(operation, layer, function that runs an instance on two operands in the emulator)."""
    op, instance = Op(request.param.partition("_")[0]), request.param
    of = layer(instance)

    def run(lhs: np.ndarray, rhs: np.ndarray) -> np.ndarray:
        key = of.line(op, "f32", "highest")
        out = computed(programs[False], instance, key, lhs, rhs, np.float32, tmp_path)
        return out.reshape(of.canonical_shape(op.roles[2]))

    return op, of, run


def on_gpu(instance: str) -> tuple[Op, Problem, Run]:
    op, of = Op(instance.partition("_")[0]), layer(instance)
    call = of.operation(op, "f32", algorithm=instance, precision="highest")
    return op, of, lambda lhs, rhs: np.asarray(jax.jit(call)(lhs, rhs))


# --- the checks -----------------------------------------------------------------------------------


def has_the_error_of_float32(op: Op, of: Problem, run: Run) -> None:
    """One TF32 product has an error of 3e-4; two, without one of the corrections, have 2e-4."""
    lhs, rhs = normal_operands(op, of, "f32")
    exact = reference(op, of, lhs, rhs)
    assert 0 < error(run(lhs, rhs), exact) < 2.5e-7


def keeps_inf_and_nan(op: Op, of: Problem, run: Run) -> None:
    """Inf and NaN propagate as in float32, and other results stay accurate."""
    rng = np.random.default_rng(3)
    lhs, rhs = (np.array(a) for a in normal_operands(op, of, "f32"))
    rhs.flat[::7] = np.where(rhs.flat[::7] < 0, -1, 1)  # their small parts are zeros
    for operand in (lhs, rhs):
        bad = np.array([np.inf, -np.inf, np.nan, -np.nan], np.float32)
        operand.flat[rng.choice(operand.size, 4, replace=False)] = bad
    # A NaN without the upper bits of its mantissa is Inf to a tensor core.
    lhs.view(np.uint32).flat[rng.choice(lhs.size)] = 0x7F800001
    lhs.flat[rng.choice(lhs.size, 5, replace=False)] = 2.0**-20
    with np.errstate(invalid="ignore"):
        exact = reference(op, of, lhs, rhs)
    actual = run(lhs, rhs)
    finite = np.isfinite(exact)
    assert 0.1 < finite.mean() < 0.98 and np.isinf(exact).any() and np.isnan(exact).any()
    np.testing.assert_array_equal(actual[~finite], exact[~finite])
    assert error(actual[finite], exact[finite]) < 2.5e-7


def keeps_the_largest_floats_finite(op: Op, of: Problem, run: Run) -> None:
    """Rounded to 11 bits they would be Inf. Results beyond the largest float are Inf, not NaN."""
    lhs, rhs = (np.array(a) for a in normal_operands(op, of, "f32"))
    rhs = rhs * np.float32(2.0**-9)
    large = np.array([1, -1, 1 - 2.0**-13, 2.0**-11 - 1], np.float64) * LARGEST
    step = lhs.size // 40 + 1  # a sum has at most one, over pixels or channels
    lhs.flat[::step] = np.resize(large, lhs.flat[::step].shape)
    exact = reference(op, of, lhs, rhs)
    assert np.abs(exact).max() < LARGEST and np.abs(exact).max() > LARGEST / 2**9
    assert error(run(lhs, rhs), exact) < 2.5e-7
    rhs *= np.float32(2.0**23)  # products far exceed the largest float
    exact = reference(op, of, lhs, rhs)
    actual = run(lhs, rhs)
    beyond = np.abs(exact) > 2.0**132
    assert beyond.any() and not np.isfinite(actual[beyond]).any()
    one = np.count_nonzero(beyond) - np.count_nonzero(np.isnan(actual[beyond]))
    assert one > 0  # NaN only if overflowing products have both signs, as in float32


def loses_only_the_last_bits_of_tiny_operands(op: Op, of: Problem, run: Run) -> None:
    """Operands of 2^-100 lose nothing; subnormal operands lose only their bits below 2^-136."""
    lhs, rhs = (np.array(a) for a in normal_operands(op, of, "f32"))
    tiny, large = lhs * np.float32(2.0**-100), rhs * np.float32(2.0**100)
    exact = reference(op, of, tiny, large)
    assert error(run(tiny, large), exact) < 2.5e-7
    tiny = (lhs.astype(np.float64) * 2.0**-128).astype(np.float32)
    exact = reference(op, of, tiny, large)
    bound = 2.0**-136 * reference(op, of, np.ones_like(lhs), np.abs(large))
    assert (np.abs(run(tiny, large) - exact) <= bound).all()


CHECKS: dict[str, Check] = {
    check.__name__: check
    for check in (
        has_the_error_of_float32,
        keeps_inf_and_nan,
        keeps_the_largest_floats_finite,
        loses_only_the_last_bits_of_tiny_operands,
    )
}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("emulated", EMULATED, indirect=True)
def test_in_the_emulator(emulated, check):
    CHECKS[check](*emulated)


@pytest.mark.gpu
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("instance", SPLIT)
def test_on_a_gpu(instance, check):
    CHECKS[check](*on_gpu(instance))


def test_every_operation_is_split():
    assert {name.partition("_")[0] for name in SPLIT} == {op.value for op in Op}
