"""``algorithm="im2col"``, the textbook baseline: correct, and as much memory as documented."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import assert_exact, exact_operands, into_poison, on_cpu
from problems import BASIC, BATCHED, BY_NAME, DTYPES, EDGE, REPRESENTATIVE

import jaxconv
from jaxconv._src.problem.spec import Op
from jaxconv._src.ways import im2col


@pytest.mark.parametrize("op", Op)
@pytest.mark.parametrize("problem", [*BASIC, *EDGE, *BATCHED], ids=lambda p: p.name)
def test_exact(platform, op, problem):
    lhs, rhs, expected = exact_operands(op, problem, "f32")
    run = problem.operation(op, "f32", algorithm="im2col", precision="highest")
    assert_exact(into_poison(run, lhs, rhs), expected, f"im2col {problem.line(op, 'f32')}")


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != "f32"])
@pytest.mark.parametrize("layout", ["last", "first"])
@pytest.mark.parametrize("op", Op)
def test_dtypes_and_layouts(op, dtype, layout):
    failures = []
    for problem in REPRESENTATIVE:
        lhs, rhs, expected = exact_operands(op, problem, dtype)
        run = problem.operation(op, dtype, algorithm="im2col", layout=layout)
        with jax.default_device(jax.devices("cpu")[0]):
            actual = into_poison(
                run,
                problem.to_layout(op.roles[0], lhs, layout),
                problem.to_layout(op.roles[1], rhs, layout),
            )
        if not np.array_equal(problem.to_canonical(op.roles[2], actual, layout), expected):
            failures.append(problem.line(op, dtype))
    assert not failures, "\n".join(failures)


def test_gradients_of_any_order_and_vmap(platform):
    rng = np.random.default_rng(0)
    x, w = (rng.integers(-2, 3, s).astype(np.float32) for s in ((3, 2, 5, 5, 4), (3, 3, 3, 2, 4)))

    def loss(algorithm, x, w):
        conv = functools.partial(
            jaxconv.conv, groups=2, algorithm=algorithm, precision="highest", stride=2
        )
        return jnp.sum(jax.vmap(conv)(x, w) ** 2)

    def second(algorithm):
        first = jax.grad(functools.partial(loss, algorithm), (0, 1))
        return lambda x, w: jax.jvp(first, (x, w), (x, w))[1]

    expected = on_cpu(second("xla"), x, w)
    for a, b in zip(jax.jit(second("im2col"))(x, w), expected, strict=True):
        assert_exact(a, b, "second derivative")


@pytest.mark.parametrize("op", Op)
@pytest.mark.parametrize("name", ["5x5", "dilation", "stride_and_tail", "groups"])
def test_memory_is_that_of_the_formula(op, name):
    """Memory for the matrix of windows, and for assembling it or adding it up (dgrad)."""
    problem = BY_NAME[name]
    spec = problem.spec(algorithm="im2col")
    lhs, rhs, _ = exact_operands(op, problem, "f32")
    formula = im2col.workspace_bytes(op, spec, spec.sizes(op, lhs.shape, rhs.shape), lhs.dtype)
    rows = problem.n * np.prod(problem.out_spatial)
    assert formula == 4 * rows * np.prod(problem.window) * problem.c
    with jax.default_device(jax.devices("cpu")[0]):
        compiled = problem.operation(op, "f32", algorithm="im2col").lower(lhs, rhs).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert formula <= temporary, "the matrix is made"
    assert temporary <= 4 * formula, (temporary, formula)


@pytest.mark.parametrize("seed", range(8))
def test_cropping(seed):
    """Negative padding with strides and dilations, compared with XLA's convolution."""
    rng = np.random.default_rng(seed)
    extent, window, stride, lhs_dilation, dilation = rng.integers(1, (7, 4, 4, 4, 3), (2, 5)).T
    low = rng.integers(-4, 4, 2)
    high = np.maximum(rng.integers(-4, 4, 2), -low - (extent - 1) * lhs_dilation - 1)
    x, w = (rng.integers(-2, 3, s).astype(np.float32) for s in ((2, *extent, 2), (*window, 2, 3)))

    def with_gradients(algorithm, x, w):
        y, vjp = jax.vjp(
            functools.partial(
                jaxconv.conv_general_dilated,
                window_strides=stride,
                padding=np.stack([low, high], 1),
                lhs_dilation=lhs_dilation,
                rhs_dilation=dilation,
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
                algorithm=algorithm,
            ),
            x,
            w,
        )
        return y, *vjp(y)

    with jax.default_device(jax.devices("cpu")[0]):
        a, b = (
            jax.jit(functools.partial(with_gradients, algorithm))(x, w)
            for algorithm in ("im2col", "xla")
        )
    for ours, theirs in zip(a, b, strict=True):
        assert_exact(ours, theirs, f"seed {seed}")


@pytest.mark.parametrize(
    ("x_shape", "padding"),
    [((0, 4, 4, 4), 1), ((2, 4, 4, 4), (-2, (0, 0))), ((2, 1, 4, 4), 0), ((2, 0, 4, 4), 2)],
)
def test_nothing_to_compute(platform, x_shape, padding):
    x, w = np.ones(x_shape, np.float32), np.ones((2, 2, 4, 3), np.float32)

    def with_gradients(algorithm):
        conv = functools.partial(jaxconv.conv, padding=padding, algorithm=algorithm)
        y, vjp = jax.vjp(conv, x, w)
        return y, *vjp(y)

    for a, b in zip(with_gradients("im2col"), with_gradients("xla"), strict=True):
        assert_exact(a, b, f"{x_shape} padding {padding}")


def test_explain_names_it(platform):
    x, w = np.zeros((2, 8, 8, 4), np.float32), np.zeros((3, 3, 4, 8), np.float32)
    conv = functools.partial(jaxconv.conv, algorithm="im2col")
    (c,) = jaxconv.explain(conv, x, w).convolutions
    assert c.instance == "fprop_im2col" and c.workspace_bytes == 4 * (2 * 8 * 8) * (3 * 3 * 4)
    text = jax.jit(conv).lower(x, w).as_text()
    assert "dot_general" in text and "custom_call" not in text and "convolution" not in text


def test_other_dtypes_and_more_axes():
    rng = np.random.default_rng(1)
    x, w = (rng.integers(-2, 3, s).astype(np.int16) for s in ((2, 5, 5, 4), (3, 3, 4, 4)))
    with jax.default_device(jax.devices("cpu")[0]):
        a, b = (jaxconv.conv(x, w, algorithm=algorithm) for algorithm in ("im2col", "xla"))
        assert_exact(a, b, "int16")
        x, w = (
            rng.integers(-2, 3, s).astype(np.float32)
            for s in ((1, 2) + (4,) * 4, (3, 2) + (2,) * 4)
        )
        a, b = (
            jaxconv.conv_general_dilated(x, w, (1,) * 4, "SAME", algorithm=algorithm)
            for algorithm in ("im2col", "xla")
        )
        assert_exact(a, b, "four spatial axes")
