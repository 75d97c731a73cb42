"""Derivatives of fused programs equal those of the activation as written, also at ties.

Every element of a result is exact, so derivatives are compared exactly: at the corners of an
activation, where spellings of one function differ, and next to them.
"""

from __future__ import annotations

import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jaxprs import equations

import jaxconv
from jaxconv._src.fuse import fuse_derivatives
from jaxconv._src.fuse.fuse_activations import Written

pytestmark = pytest.mark.usefixtures("on_the_cpu")

NHWC = ("NHWC", "HWIO", "NHWC")
W = jnp.ones((1, 1, 1, 1))


def conv(x, w=W):
    return lax.conv_general_dilated(x, w.astype(x.dtype), (1, 1), "SAME", dimension_numbers=NHWC)


@jax.custom_jvp
def relu_with_derivative_1_at_0(y):
    return jnp.maximum(y, 0)


relu_with_derivative_1_at_0.defjvp(
    lambda primals, tangents: (
        relu_with_derivative_1_at_0(*primals),
        jnp.where(primals[0] >= 0, *tangents, 0),
    )
)


@jax.custom_jvp
def relu_of_the_identity(y):
    """Its derivative differs from relu's everywhere."""
    return jnp.maximum(y, 0)


relu_of_the_identity.defjvp(lambda primals, tangents: (relu_of_the_identity(*primals), *tangents))


@jax.custom_vjp
def leaky_backwards(y):
    return jnp.maximum(y, 0)


leaky_backwards.defvjp(
    lambda y: (jnp.maximum(y, 0), y), lambda y, dz: (jnp.where(y > 0, dz, dz / 4),)
)


def clamped(y):
    return lax.clamp(jnp.zeros((), y.dtype), y, jnp.full((), 6, y.dtype))


WRITTEN = {
    "max": lambda y: jnp.maximum(y, 0),
    "max on the left": lambda y: lax.max(jnp.zeros_like(y), y),
    "clip": lambda y: jnp.clip(y, 0, 6),
    "clamp": clamped,
    "min of max": lambda y: jnp.minimum(jnp.maximum(y, 0), 6),
    "where above 0": lambda y: jnp.where(y > 0, y, y / 4),
    "where from 0 on": lambda y: jnp.where(y >= 0, y, y / 4),
    "max of a multiple": lambda y: jnp.maximum(y, y / 4),
    "hard_swish": lambda y: y * jnp.clip(y + 3, 0, 6) / 6,
    "jax.nn.relu": jax.nn.relu,
    "jax.nn.relu6": jax.nn.relu6,
    "jax.nn.leaky_relu": lambda y: jax.nn.leaky_relu(y, 0.25),
    "jax.nn.hard_swish": jax.nn.hard_swish,
    "custom_jvp at 0": relu_with_derivative_1_at_0,
    "custom_jvp": relu_of_the_identity,
    "custom_vjp": leaky_backwards,
}

# The corners of all these functions, and numbers between them.
VALUES = np.array([-4, -3, -1, 0, 1, 3, 5, 6, 7], np.float32).reshape(1, 3, 3, 1)


def fused_words(function, *args) -> list[str]:
    program = jax.make_jaxpr(function)(*args)
    calls = [e for e in equations(program) if e.primitive.name == "jaxconv_fused"]
    return [" ".join(e.params["epilogue"].words) for e in calls]


def assert_equal(actual, expected) -> None:
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(e, np.float32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", WRITTEN)
def test_the_derivative_is_that_of_what_was_written(name, dtype, native_cpu):
    activation = WRITTEN[name]
    x = jnp.asarray(VALUES, dtype)

    def f(x):
        return activation(conv(x / 2) * 2).astype(jnp.float32).sum()

    (words,) = fused_words(jaxconv.fuse(f), x)
    assert words.startswith("scale ")
    images = jnp.stack([x, -x])

    @jax.jit
    def written(x, images):
        return jax.grad(f)(x), jax.vmap(jax.grad(f))(images)

    @jax.jit
    def fused(x, images):
        return (
            (jax.grad(jaxconv.fuse(f))(x), jaxconv.fuse(jax.grad(f))(x)),
            jax.vmap(jax.grad(jaxconv.fuse(f)))(images),
            jax.grad(lambda x: jax.vmap(jaxconv.fuse(f))(x).sum())(images),
        )

    expected, of_two = written(x, images)
    assert_equal(fused(x, images), ((expected, expected), of_two, of_two))


@pytest.mark.parametrize("name", [n for n in WRITTEN if n != "custom_vjp"])
def test_forward_and_second_derivatives(name):
    activation = WRITTEN[name]

    def f(x):
        return (activation(conv(x) * 2) ** 2).sum()

    def products(f):
        def computed(x, t):
            return jax.jvp(jax.grad(f), (x,), (t,)), jax.jvp(f, (x,), (t,))

        return jax.tree.leaves(jax.jit(computed)(VALUES / 2, np.ones_like(VALUES)))

    for a, e in zip(products(jaxconv.fuse(f)), products(f), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-6)


def test_what_the_result_answers_is_not_kept():
    """The result of jax.nn.relu also decides its mask, so the backward pass keeps no operand."""

    def kept(activation):
        def f(x):
            return activation(conv(x) * 2)

        y, pullback = jax.vjp(jax.jit(jaxconv.fuse(f)), VALUES)
        arrays = [a for a in jax.tree.leaves(pullback) if a.shape == y.shape]
        return [bool((a == y).all()) for a in arrays]

    assert kept(jax.nn.relu) == [True]
    assert kept(lambda y: jax.nn.leaky_relu(y, 0.25)) == [True]
    assert kept(clamped) == [True]
    assert kept(lambda y: jnp.maximum(y, 0)) == [False]


def test_a_batched_convolution_has_the_activations_derivative():
    """A batched convolution computes its epilogue separately. relu's derivative at 0 stays 0."""
    x = np.zeros((2, 1, 3, 3, 1), np.float32)
    w = np.ones((2, 3, 3, 1, 1), np.float32)

    def f(x, w):
        return jaxconv.conv(x, w, padding="SAME", activation="relu").sum()

    assert not np.any(jax.grad(lambda x: jax.vmap(f)(x, w).sum())(x))


# --- in 16 bits ---


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("slope", [0.1, 0.25, 0.75])
def test_no_gradient_vanishes_behind_a_max(slope, dtype, native_cpu):
    """The derivative compares both operands of ``max`` with the rounded result."""
    rng = np.random.default_rng(0)
    x, r = (jnp.asarray(rng.standard_normal((2, 8, 8, 16)), dtype) for _ in range(2))
    w = jnp.asarray(0.2 * rng.standard_normal((3, 3, 16, 16)), dtype)

    def f(x, r):
        y = conv(x, w) + r
        return jnp.maximum(y, slope * y).astype("float32").sum()

    step = jaxconv.fuse(jax.grad(f, argnums=1))
    assert any("leaky_relu" in words and "pre" in words for words in fused_words(step, x, r))
    gradient = np.asarray(jax.jit(step)(x, r), np.float32)
    assert set(np.unique(gradient)) <= {np.float32(jnp.asarray(slope, dtype)), np.float32(1)}


# --- numbers that are collected ---

COLLECTED = {
    "overflow": (lambda y: y * 1e30 / 1e30 * 1e30 / 1e30, 1.0),
    "overflow of a summand": (lambda y: (y - 1e20) * 1e20, 1e20),
    "underflow": (lambda y: y * 1e-30 * 1e-30 * 1e30 * 1e30, 1e38),
    "a quotient": (lambda y: y / 1e-39 * 1e-39, 1e-38),
    "a constant array": (lambda y: (y - jnp.full(1, 1e20)) * jnp.full(1, 1e20), 1e20),
}


@pytest.mark.parametrize("name", COLLECTED)
def test_numbers_whose_product_overflows_are_not_collected(name):
    function, value = COLLECTED[name]

    def f(x):
        return function(conv(x))

    x = np.full((1, 2, 2, 1), value, np.float32)
    # Not jitted, because XLA folds such constants itself.
    np.testing.assert_array_equal(jaxconv.fuse(f)(x), f(x))
    assert len(fused_words(jaxconv.fuse(f), x)) == 1 or "quotient" in name


def test_one_number_is_collected_whatever_its_size():
    for number in (1e30, 1e-30):
        words = fused_words(jaxconv.fuse(lambda x, n=number: conv(x) * n + 1), VALUES)
        assert words == ["scale bias"]


# --- transformations ---


def test_linear_transpose():
    rng = np.random.default_rng(0)
    x, r = (rng.integers(-4, 5, (1, 4, 4, 2)).astype(np.float32) for _ in range(2))
    w = rng.integers(-4, 5, (3, 3, 2, 2)).astype(np.float32)
    scale = np.array([2, -4], np.float32)
    functions = {
        "of x": (lambda x: conv(x, w) * 2, x),
        "of x twice": (lambda x: x - conv(x, w) * scale, x),
        "of w": (lambda w: conv(x, w) * scale + 0.0, w),
        "of the scale": (lambda s: conv(x, w) * s, scale),
        "of both summands": (lambda v: conv(x, w) * 0 + v[0] + v[1], (scale, x)),
    }
    for name, (f, operand) in functions.items():
        assert fused_words(jaxconv.fuse(f), operand), name
        for transform in (lambda f: f, jax.jit):
            expected = jax.linear_transpose(f, operand)(r)
            actual = jax.linear_transpose(transform(jaxconv.fuse(f)), operand)(r)
            assert_equal(actual, expected)


def test_linear_transpose_of_what_is_not_linear():
    for f in (lambda x: jax.nn.relu(conv(x) * 2), lambda x: conv(x, x[:, :1, :1]) * 2.0):
        with pytest.raises(TypeError, match="linear"):
            jax.linear_transpose(jaxconv.fuse(f), VALUES)(VALUES)


def test_a_linear_solve():
    """The parameters of a linear solve hold programs in a named tuple."""
    w = np.full((3, 3, 1, 1), 0.05, np.float32)

    def f(b):
        return jax.scipy.sparse.linalg.cg(lambda u: u + conv(u, w) * 0.5, b, maxiter=9)[0]

    for solve in (jaxconv.fuse(f), jax.jit(jaxconv.fuse(f))):
        np.testing.assert_allclose(solve(VALUES), f(VALUES), rtol=1e-5)
    gradient = jax.grad(lambda b: (jaxconv.fuse(f)(b) ** 2).sum())(VALUES)
    np.testing.assert_allclose(gradient, jax.grad(lambda b: (f(b) ** 2).sum())(VALUES), rtol=1e-4)


@pytest.fixture
def small_heap():
    """Hides the objects of other tests from gc.collect(), which the leak check calls often."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("small_heap")
@pytest.mark.parametrize(
    "transform",
    [
        lambda f: f,
        jax.jit,
        jax.grad,
        lambda f: jax.jit(jax.grad(f)),
        lambda f: lambda x: jax.vmap(f)(x[None]),
        lambda f: lambda x: jax.jvp(f, (x,), (x,)),
    ],
)
def test_no_tracer_leaks(transform):
    def f(x):
        return jax.nn.relu(conv(x) * 2 + 1).sum()

    with jax.check_tracer_leaks():
        outside, inside = transform(jaxconv.fuse(f))(VALUES), jaxconv.fuse(transform(f))(VALUES)
    assert_equal(outside, inside)


def test_results_that_are_no_arrays_pass():
    result = jaxconv.fuse(lambda x: {"y": conv(x) * 2, "name": "layer", "none": None})(VALUES)
    assert (
        result["name"] == "layer" and result["none"] is None and result["y"].shape == (1, 3, 3, 1)
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "name, function",
    [
        ("gelu", functools.partial(jax.nn.gelu, approximate=False)),
        ("gelu_tanh", functools.partial(jax.nn.gelu, approximate=True)),
        ("silu", jax.nn.silu),
        ("sigmoid", jax.nn.sigmoid),
        ("tanh", jnp.tanh),
        ("hard_swish", jax.nn.hard_swish),
    ],
)
def test_activations_are_told_apart(name, function, dtype):
    """Both forms of gelu differ by less than a 16-bit rounding of 1."""
    _, named, activation = fuse_derivatives.known(function, jax.core.ShapedArray((4,), dtype))
    assert activation == name and named is not None and named[0] == name


def test_a_gradient_of_nan_is_dropped_where_the_program_selects():
    operand = jax.core.ShapedArray((4,), np.float32)
    _, named, contract = fuse_derivatives.known(jax.nn.hard_sigmoid, operand)
    written = Written(jax.nn.hard_sigmoid, operand, contract, named=named)
    t = jnp.array([np.nan, np.inf, -5, 1], np.float32)
    dt = jnp.array([np.nan, np.inf, np.nan, 6], np.float32)
    expected = jax.jvp(jax.nn.hard_sigmoid, (t,), (dt,))[1]
    assert named is not None
    np.testing.assert_allclose(written.tangent(t, dt), expected, rtol=1e-6)
    np.testing.assert_allclose(written.cotangent(t, dt), expected, rtol=1e-6)


def test_the_tangent_of_a_function_with_a_reverse_mode_rule_only():
    """vmap asks for it: it computes tangents that JAX transposes afterwards."""

    @jax.custom_vjp
    def relu(y):
        return jnp.maximum(y, 0)

    relu.defvjp(lambda y: (relu(y), y), lambda y, g: (jnp.where(y > 0, g, 0),))
    y, dy = jnp.array([-1.0, 0.0, 2.0]), jnp.array([3.0, 4.0, 5.0])
    written = Written(relu, jax.typeof(y), None)
    np.testing.assert_array_equal(written.tangent(y, dy), [0, 0, 5])
    np.testing.assert_array_equal(written.cotangent(y, dy), [0, 0, 5])
