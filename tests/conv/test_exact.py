"""The operations with algorithm "auto": exact on integers, and adjoint to each other."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import (
    assert_error_ratio,
    assert_exact,
    error,
    error_in_order,
    exact_operands,
    into_poison,
    normal_operands,
    reference,
)
from problems import BY_NAME, DTYPES, PROBLEMS, REPRESENTATIVE, Problem
from problems import problem as make_problem

import jaxconv
from jaxconv._src.conv.bilinear import select
from jaxconv._src.problem.spec import Op


def run(op, problem, dtype, lhs, rhs, layout="last", **options):
    """Compiles and runs the operation on channels-last arrays, converted to ``layout`` for it."""
    out = into_poison(
        problem.operation(op, dtype, layout=layout, **options),
        problem.to_layout(op.roles[0], lhs, layout),
        problem.to_layout(op.roles[1], rhs, layout),
    )
    return problem.to_canonical(op.roles[2], out, layout)


def names(problems):
    return [problem.name for problem in problems]


def test_the_problems_have_unique_names_and_no_empty_tensor():
    assert len(BY_NAME) == len(PROBLEMS)
    for problem in PROBLEMS:
        assert all(0 not in problem.canonical_shape(role) for role in "xwy"), problem


def test_the_reference_agrees_with_the_definition_summed_by_hand():
    """Seven loops over one small problem that uses every parameter check the reference."""
    problem = Problem(
        "by_hand",
        spatial=(4, 5),
        window=(2, 3),
        n=2,
        c=4,
        k=2,
        stride=(2, 1),
        padding=((1, 0), (-1, 3)),
        lhs_dilation=(2, 1),
        dilation=(1, 2),
        groups=2,
    )
    x, w, y = exact_operands(Op.FPROP, problem, "f32")
    by_hand = np.zeros_like(y)
    for n, p, q, k in np.ndindex(*y.shape):
        group = k // (problem.k // problem.groups)
        for r, s, c in np.ndindex(*w.shape[:3]):
            i, j = p * 2 + r - 1, q + s * 2 + 1
            if i % 2 == 0 and 0 <= i // 2 < 4 and 0 <= j < 5:
                by_hand[n, p, q, k] += x[n, i // 2, j, group * 2 + c] * w[r, s, c, k]
    assert np.any(by_hand)
    np.testing.assert_array_equal(y, by_hand)
    # The gradients are the transposes of the same map, linear in x and in w.
    dy = np.random.default_rng(0).integers(-3, 4, y.shape)
    dx, dw = reference(Op.DGRAD, problem, dy, w), reference(Op.WGRAD, problem, x, dy)
    assert (dx * x).sum() == (dy * y).sum() == (dw * w).sum() != 0


@pytest.mark.parametrize("problem", PROBLEMS, ids=names(PROBLEMS))
def test_every_problem_in_float32(platform, problem):
    for op in Op:
        lhs, rhs, expected = exact_operands(op, problem, "f32")
        assert_exact(run(op, problem, "f32", lhs, rhs), expected, problem.line(op, "f32"))


@pytest.mark.parametrize("dtype", ["bf16", "f16", "s8"])
@pytest.mark.parametrize("problem", REPRESENTATIVE, ids=names(REPRESENTATIVE))
def test_narrow_dtypes(platform, problem, dtype):
    """int8 operands have the full range, -128 included; int32 sums do not saturate."""
    for op in Op:
        lhs, rhs, expected = exact_operands(op, problem, dtype)
        assert_exact(run(op, problem, dtype, lhs, rhs), expected, problem.line(op, dtype))


@pytest.mark.parametrize("problem", REPRESENTATIVE, ids=names(REPRESENTATIVE))
def test_channels_first(platform, problem):
    for op in Op:
        lhs, rhs, expected = exact_operands(op, problem, "f32")
        actual = run(op, problem, "f32", lhs, rhs, layout="first")
        assert_exact(actual, expected, f"channels first: {problem.line(op, 'f32')}")


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("problem", PROBLEMS, ids=names(PROBLEMS))
def test_filters_with_output_channels_first(platform, problem, dtype):
    """Filters as OHWI and the like: kernels read these directly, or XLA transposes them."""
    if platform == "cpu" and problem not in REPRESENTATIVE:
        pytest.skip("no CPU kernel reads them")
    for op in Op:
        lhs, rhs, expected = exact_operands(op, problem, dtype)
        actual = run(op, problem, dtype, lhs, rhs, layout="krsc")
        assert_exact(actual, expected, f"K first: {problem.line(op, dtype)}")


@pytest.mark.parametrize("problem", REPRESENTATIVE, ids=names(REPRESENTATIVE))
def test_adjoint_identity(platform, problem):
    """<conv(x, w), dy> = <x, dgrad(dy, w)> = <w, wgrad(x, dy)> relates all three kernels."""
    rng = np.random.default_rng(1)
    x, w, dy = (
        rng.integers(-4, 5, problem.canonical_shape(role)).astype(np.float32) for role in "xwy"
    )
    y = run(Op.FPROP, problem, "f32", x, w)
    dx = run(Op.DGRAD, problem, "f32", dy, w)
    dw = run(Op.WGRAD, problem, "f32", x, dy)

    def inner(a, b):
        return int((np.asarray(a, np.int64) * np.asarray(b, np.int64)).sum())

    assert inner(y, dy) == inner(x, dx) == inner(w, dw) != 0, problem.line(Op.FPROP, "f32")


# Rounding two operands to 11 bits gives a relative error of sqrt(2) * 2^-11 / sqrt(3) for a
# product; times 0.72 for the mean of a mantissa, this is 2.9e-4, as measured for cuDNN.
# igemm_wmma's rounding has 1.12 times that variance. On a GPU float32 at DEFAULT is TF32, but cuDNN
# does not always use TF32 on small layers.
TF32_ERROR = 3.5e-4

ERROR_PROBLEMS = [
    BY_NAME[name] for name in ("plain", "stride_and_tail", "groups_with_tails", "5x5", "3d_strided")
]


@pytest.mark.parametrize("dtype", ["f32", "f32 highest", "bf16", "f16"])
@pytest.mark.parametrize("problem", ERROR_PROBLEMS, ids=names(ERROR_PROBLEMS))
def test_error_is_at_most_twice_that_of_lax(platform, problem, dtype):
    dtype, _, precision = dtype.partition(" ")
    precision = precision or "default"
    for op in Op:
        lhs, rhs = normal_operands(op, problem, dtype)
        exact = reference(op, problem, lhs, rhs)
        ours = run(op, problem, dtype, lhs, rhs, precision=precision)
        lax = run(op, problem, dtype, lhs, rhs, precision=precision, algorithm="xla")
        # On small problems cuDNN splits its sums into more parts; igemm_simt sums in sequence.
        least = error_in_order(problem.reduction(op)) if platform == "cuda" else 0.0
        if platform == "cuda" and dtype == "f32" and precision == "default":
            least = TF32_ERROR
        assert_error_ratio(ours, lax, exact, problem.line(op, dtype, precision), least=least)


def test_highest_precision_is_float32_accurate(platform):
    """HIGHEST excludes TF32 (error 3e-4) and sums of two bfloat16 products (1e-5)."""
    problem = BY_NAME["plain"]
    for op in Op:
        lhs, rhs = normal_operands(op, problem, "f32")
        exact = reference(op, problem, lhs, rhs)
        measured = error(run(op, problem, "f32", lhs, rhs, precision="highest"), exact)
        assert measured < 2e-6, problem.line(op, "f32", "highest")


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_reach_what_they_touch_and_nothing_else(platform, value, dtype):
    for problem in (BY_NAME["stride_and_tail"], BY_NAME["groups_with_tails"]):
        for op in Op:
            lhs, rhs, _ = exact_operands(op, problem, dtype)
            lhs = np.array(lhs)
            # One element in the middle and one in a corner: at least one meets no padding.
            lhs[tuple(e // 2 for e in lhs.shape)] = value
            lhs[(0,) * lhs.ndim] = value
            rhs = np.where(rhs == 0, 1, rhs).astype(rhs.dtype)  # no zeros: Inf * 0 is NaN
            with np.errstate(invalid="ignore"):
                expected = reference(op, problem, lhs, rhs)
            line = f"{value} in {op.roles[0]}: {problem.line(op, dtype)}"
            assert (~np.isfinite(expected)).any() and np.isfinite(expected).any(), line
            actual = run(op, problem, dtype, lhs, rhs)
            assert_exact(actual, expected.astype(actual.dtype), line)


@pytest.mark.parametrize("problem", REPRESENTATIVE, ids=names(REPRESENTATIVE))
def test_the_same_inputs_give_the_same_bits(platform, problem):
    """One program runs twice, and is compiled again: every sum has a fixed order."""
    for op in Op:
        lhs, rhs = normal_operands(op, problem, "f32")
        once = run(op, problem, "f32", lhs, rhs)
        call = problem.operation(op, "f32")
        for _ in range(2):
            again = np.asarray(call(lhs, rhs))
            assert np.array_equal(
                np.ascontiguousarray(once).view(np.uint32), again.view(np.uint32)
            ), problem.line(op, "f32")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("op", "tile", "c", "k"),
    [
        (Op.FPROP, "64x256x64_pointwise_c128", 64, 256),
        (Op.DGRAD, "64x256x64_pointwise_c128", 256, 64),
        (Op.FPROP, "256x64x64_pointwise_swap_ab", 256, 64),
        (Op.DGRAD, "256x64x64_pointwise_swap_ab", 64, 256),
        (Op.FPROP, "128x128x64_pointwise", 256, 128),
        (Op.DGRAD, "128x128x64_pointwise", 128, 256),
    ],
)
def test_dynamically_scheduled_tiles(op, tile, c, k):
    """128 images with 257 MB of activations or more: the workspace holds only the tile counters."""
    instance = f"{op.value}_igemm_wgmma_bf16_{tile}"
    large = make_problem("large", 56, 1, n=128, c=c, k=k)
    spec = large.spec(algorithm=instance)
    sizes = spec.sizes(op, *(large.canonical_shape(role) for role in op.roles[:2]))
    chosen, _ = select("cuda", op, spec, sizes, *DTYPES["bf16"])
    if chosen.instance is None and "compute capability" in str(chosen.refusals):
        pytest.skip("the device is not of sm_90")
    assert (chosen.instance, chosen.workspace_bytes) == (instance, 64), chosen.refusals
    keys = jax.random.split(jax.random.key(0))
    lhs, w = (
        jax.random.randint(key, large.canonical_shape(role), -2, 3).astype(jnp.bfloat16)
        for key, role in zip(keys, op.roles[:2], strict=True)
    )
    matrix = w[0, 0].astype(jnp.float32)
    expected = jnp.matmul(
        lhs.astype(jnp.float32),
        matrix if op is Op.FPROP else matrix.T,
        precision=jax.lax.Precision.HIGHEST,
    ).astype(jnp.bfloat16)
    call = large.operation(op, "bf16", algorithm=instance)
    for _ in range(3):
        assert jnp.array_equal(call(lhs, w), expected), instance


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", ["auto", "igemm_simt", "igemm_wmma", "igemm_wgmma"])
@pytest.mark.parametrize("op", list(Op), ids=[op.value for op in Op])
def test_tensors_of_more_than_2_to_the_31_elements(op, algorithm):
    """Offsets beyond 32 bits: compares the first and last rows of an image of 2.2e9 elements."""
    device = jax.devices()[0]
    if (device.memory_stats() or {}).get("bytes_limit", 0) < 30e9:
        pytest.skip("the device has less than 30 GB")
    extent, rows = 3360, 4
    large = make_problem("large", extent, 3, n=3, c=64, k=64, padding=1)
    ends = {"first": (0, slice(rows)), "last": (large.n - 1, slice(extent - rows, None))}
    shape = large.canonical_shape("x")
    assert np.prod(shape) > 2**31 and shape == large.canonical_shape("y")
    bits = jax.jit(lambda key: jax.random.bits(key, shape, jnp.uint8))
    whole = jax.jit(lambda bits: (bits % 5).astype(jnp.bfloat16) - 2)(
        bits(jax.random.key(0, impl="rbg"))
    )
    try:
        call = large.operation(op, "bf16", algorithm=algorithm)
        if op is Op.WGRAD:
            # A few nonzero gradients, at both ends, so that sums stay small integers.
            at = [(0, 0, 0, 5), (0, 1, extent - 1, 9), (2, extent - 1, extent - 1, 63)]
            at += [(2, extent - 2, column, column % 64) for column in range(7, 900, 100)]
            dy = jnp.zeros(shape, jnp.bfloat16).at[tuple(np.transpose(at))].set(1)
            actual = np.asarray(call(whole, dy), np.float64)
        else:
            w = np.random.default_rng(1).integers(-2, 3, large.canonical_shape("w"))
            w = w * (np.random.default_rng(2).random(w.shape) < 0.2)
            actual = call(whole, jnp.asarray(w, jnp.bfloat16))
    except ValueError as refused:
        assert algorithm != "auto"
        pytest.skip(f"refused: {refused}")
    if op is Op.WGRAD:
        expected = np.zeros(large.canonical_shape("w"))
        for image, row, column, k in at:
            for r, s in np.ndindex(3, 3):
                i, j = row + r - 1, column + s - 1
                if 0 <= i < extent and 0 <= j < extent:
                    expected[r, s, :, k] += np.asarray(whole[image, i, j], np.float64)
        np.testing.assert_array_equal(actual, expected)
        return
    # The reference convolves a strip of rows alone; only its row away from the cut is compared.
    strip = make_problem("strip", (rows, extent), 3, n=1, c=64, k=64, padding=1)
    for name, (image, strip_rows) in ends.items():
        expected = reference(op, strip, np.asarray(whole[image, strip_rows], np.float64)[None], w)[
            0
        ]
        inner = slice(rows - 1) if name == "first" else slice(1, None)
        found = np.asarray(actual[image, strip_rows], np.float64)[inner]
        assert np.abs(expected).max() < 256  # integers that bfloat16 holds
        np.testing.assert_array_equal(found, expected[inner], err_msg=f"{name} rows")


def test_fresh_allocations_are_poisoned():
    """If fresh memory were zero, exact tests would miss elements that no kernel writes."""
    import jax_settings

    if not jax_settings.POISONED:
        pytest.skip("memory is poisoned through glibc only")
    fresh = np.empty(1 << 20, np.uint8)
    assert (fresh == jax_settings.POISON_BYTE).all()


def test_dtype_table_covers_every_name_in_the_problem_key():
    from jaxconv._src.problem.spec import DTYPE_NAMES

    used = {DTYPE_NAMES[d.name] for pair in DTYPES.values() for d in pair}
    assert used == set(DTYPE_NAMES.values())


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(
    ("extent", "window", "stride", "padding"),
    [(3, 3, 2, (2, -1)), (4, 4, 3, (3, -1)), (5, 4, 3, (3, -2)), (5, 5, 2, (4, -1))],
)
def test_windows_that_leave_more_than_a_stride(native_cpu, extent, window, stride, padding, axis):
    """Windows begin in the padding, and none reads the last rows, at least a stride of them."""
    shape, taps, steps, pads = [6, 6], [1, 1], [1, 1], [(0, 0), (0, 0)]
    shape[axis], taps[axis], steps[axis], pads[axis] = extent, window, stride, padding
    cropped = make_problem(
        "cropped", tuple(shape), tuple(taps), c=8, k=2, stride=tuple(steps), padding=tuple(pads)
    )
    with jax.default_device(jax.devices("cpu")[0]):
        for op in Op:
            lhs, rhs, expected = exact_operands(op, cropped, "f32", seed=0)
            actual = run(op, cropped, "f32", lhs, rhs)
            assert_exact(actual, expected, cropped.line(op, "f32"))


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_taps_that_meet_padding_alone_have_no_gradient(native_cpu, dtype):
    """oneDNN's bfloat16 kernel leaves the gradients of these taps unwritten."""
    which = make_problem(
        "padding_alone",
        (3, 1, 1),
        (2, 3, 1),
        n=2,
        c=40,
        k=40,
        groups=8,
        padding=((1, 0), (1, 1), (0, 0)),
        lhs_dilation=(1, 2, 1),
    )
    lhs, rhs, expected = exact_operands(Op.WGRAD, which, dtype)
    actual = into_poison(which.operation(Op.WGRAD, dtype, algorithm="onednn"), lhs, rhs)
    assert_exact(actual, expected, which.line(Op.WGRAD, dtype))


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(
    "wrong",
    [
        make_problem("blocks", (53,), (7,), c=7, k=5, stride=2, padding=((15, 11),), dilation=3),
        make_problem("wide", (149,), (24,), c=1, k=1, stride=2, padding=((23, 12),)),
        make_problem(
            "front_then_back",
            (6, 1, 4),
            (6, 1, 5),
            n=4,
            c=1,
            k=2,
            stride=(2, 1, 1),
            padding=((3, 1), (0, 0), (0, 2)),
        ),
    ],
    ids=lambda problem: problem.name,
)
def test_weight_gradients_of_windows_far_in_the_padding(native_cpu, wrong, dtype):
    """oneDNN's direct kernels miscount the taps in the padding."""
    lhs, rhs, expected = exact_operands(Op.WGRAD, wrong, dtype)
    actual = into_poison(wrong.operation(Op.WGRAD, dtype, algorithm="onednn"), lhs, rhs)
    assert_exact(actual, expected, wrong.line(Op.WGRAD, dtype))


def test_eight_bit_filters_of_eight_taps_for_eight_channels(native_cpu):
    """oneDNN's compensation for signed operands is wrong for exactly this shape."""
    rng = np.random.default_rng(0)
    x, w = (
        rng.integers(-128, 128, shape).astype(np.int8)
        for shape in ((2, 8, 5, 5, 3), (8, 1, 2, 2, 2))
    )
    with jax.default_device(jax.devices("cpu")[0]):
        y = jaxconv.conv_general_dilated(
            x, w, (1, 1, 1), "VALID", feature_group_count=8, preferred_element_type=np.int32
        )
    windows = np.lib.stride_tricks.sliding_window_view(x.astype(np.int32), (2, 2, 2), (2, 3, 4))
    np.testing.assert_array_equal(y, np.einsum("ncdhwrst,crst->ncdhw", windows, w[:, 0]))


def test_rows_behind_the_last_window_are_zero(native_cpu):
    """On AMX, oneDNN's data gradient leaves these rows unwritten if x has more than 16 columns."""
    problem = make_problem(
        "rows_behind_the_last_window",
        (22, 9, 19),
        (3, 1, 2),
        n=4,
        c=1,
        k=5,
        stride=(3, 3, 1),
        padding=((1, 0), (0, 0), (0, 0)),
        dilation=(1, 1, 2),
    )
    dy, w, expected = exact_operands(Op.DGRAD, problem, "bf16", seed=0)
    assert not expected[:, 20:].any()
    dx = into_poison(problem.operation(Op.DGRAD, "bf16", algorithm="onednn"), dy, w)
    assert_exact(dx, expected, problem.line(Op.DGRAD, "bf16"))
