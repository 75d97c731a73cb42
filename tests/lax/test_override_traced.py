"""``override`` entered while JAX traces, and as a decorator: it applies there and nowhere else."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from numerics import assert_exact

import jaxconv

pytestmark = pytest.mark.usefixtures("native_cpu", "on_the_cpu")

RNG = np.random.default_rng(0)
X, W = (RNG.integers(-2, 3, s).astype(np.float32) for s in ((2, 6, 6, 4), (3, 3, 4, 4)))
NHWC = ("NHWC", "HWIO", "NHWC")


def layer(x, w):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC)


def inside(x, w):
    with jaxconv.override():
        return layer(x, w)


def calls(f, *arguments) -> int:
    """The number of custom calls of the compiled program."""
    return f.lower(*arguments).as_text().count("custom_call @jaxconv_")


def loss(f):
    return lambda x, w: jnp.sum(f(x, w) ** 2)


def mapped(x, w):
    with jaxconv.override():
        return jax.vmap(layer)(x[None], w[None])


def in_a_loop(x, w):
    with jaxconv.override():
        return lax.scan(lambda a, _: (layer(a, w), None), x, None, 3)[0]


def in_a_branch(x, w):
    with jaxconv.override():
        return lax.cond(jnp.sum(x) > 0, lambda: layer(x, w), lambda: x)


def jitted_inside(x, w):
    with jaxconv.override():
        return jax.jit(layer)(x, w)


decorated = jaxconv.override(layer)
with_parentheses = jaxconv.override()(layer)

ONE_CALL = {
    "a block": inside,
    "vmap": mapped,
    "scan": in_a_loop,
    "cond": in_a_branch,
    "jit": jitted_inside,
    "a decorated function": decorated,
    "a decorated function, with parentheses": with_parentheses,
    "checkpoint": jax.checkpoint(inside),
}


@pytest.mark.parametrize("name", ONE_CALL)
def test_a_traced_override_is_in_force(name):
    f = jax.jit(ONE_CALL[name])
    assert calls(f, X, W) == 1
    expected = {"scan": lambda: layer(layer(layer(X, W), W), W), "vmap": lambda: layer(X, W)[None]}
    if name != "cond":
        assert_exact(f(X, W), np.asarray(expected.get(name, lambda: layer(X, W))()), name)
    assert calls(jax.jit(layer), X, W) == 0  # calls traced outside stay lax's


@pytest.mark.parametrize("name", ["a block", "a decorated function", "jit", "checkpoint"])
def test_gradients_belong_to_it(name):
    gradients = jax.jit(jax.grad(loss(ONE_CALL[name]), (0, 1)))
    assert calls(gradients, X, W) == 3
    explanation = jaxconv.explain(gradients, X, W)
    assert explanation.on_kernels == 3
    assert {"fprop", "dgrad", "wgrad"} == {c.op for c in explanation.convolutions}
    for a, e in zip(gradients(X, W), jax.grad(loss(layer), (0, 1))(X, W), strict=True):
        assert_exact(a, np.asarray(e), name)


def test_gradients_without_jit_belong_to_it():
    """The backward pass runs after the block has ended."""
    _, vjp = jax.vjp(inside, X, W)
    assert calls(jax.jit(vjp), X) == 2


def test_the_innermost_counts():
    def f(x, w):
        with jaxconv.override(False):
            x = layer(x, w)  # 1
            with jaxconv.override(algorithm="im2col"):
                x = layer(x, w)  # 2
            with jaxconv.override(algorithm="onednn"):
                x = layer(x, w)  # 3
        return layer(x, w)  # 4

    instances = [c.instance for c in jaxconv.explain(f, X, W).convolutions]
    assert instances == [None, "fprop_im2col", "fprop_onednn_f32", None]
    with jaxconv.override():
        instances = [c.instance for c in jaxconv.explain(jax.jit(f), X, W).convolutions]
    assert instances == [None, "fprop_im2col", "fprop_onednn_f32", "fprop_onednn_f32"]


def test_what_a_traced_function_says_outlasts_its_caller():
    assert calls(jax.jit(inside), X, W) == 1
    with jaxconv.override(False):
        assert calls(jax.jit(inside), X, W) == 1
    traced = jax.jit(inside).trace(X, W)
    with jaxconv.override(False):
        assert "jaxconv_fprop" in traced.lower().as_text()


def test_outside_of_tracing_programs_carry_no_mark():
    with jaxconv.override():
        text = jax.jit(layer).lower(X, W).as_text()
    assert "jaxconv_fprop" in text and "jaxconv_override" not in text


@pytest.mark.parametrize("dtype", ["float64", "int16"])
def test_what_no_kernel_takes_is_left_to_lax(dtype):
    with jax.enable_x64(True):
        x, w = X.astype(dtype), W.astype(dtype)
        assert calls(jax.jit(inside), x, w) == 0
        assert_exact(jax.jit(inside)(x, w), np.asarray(layer(x, w)), dtype)
        (convolution,) = jaxconv.explain(inside, x, w).convolutions
        assert dtype in str(convolution.refusals)


def test_a_decorated_jitted_function():
    """Calls and ``lower`` are inside the override; the undecorated function is not."""
    jitted = jax.jit(layer)
    both = jaxconv.override()(jitted)
    assert calls(both, X, W) == 1 and calls(jitted, X, W) == 0
    assert jaxconv.explain(both, X, W).on_kernels == 1
    assert_exact(both(X, W), np.asarray(layer(X, W)), "")
    assert both.__name__ == "layer"

    class Model:
        @jaxconv.override(algorithm="native")
        def apply(self, x):
            return layer(x, W)

    assert calls(jax.jit(Model().apply), X) == 1


def test_one_override_is_entered_again_and_by_threads():
    one = jaxconv.override()
    found = []

    def count():
        with one:
            found.append(jaxconv.explain(layer, X, W).on_kernels)

    with one:
        with one:
            thread = threading.Thread(target=count)
            thread.start()
            thread.join()
        count()
    found.append(jaxconv.explain(layer, X, W).on_kernels)
    assert found == [1, 1, 0]
    with pytest.raises(ZeroDivisionError), one:
        1 / 0  # noqa: B018
    assert jaxconv.explain(layer, X, W).on_kernels == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(([1],), "enabled.*\\[1\\]"), (("native",), "algorithm='native'"), ((int,), "enabled.*int")],
)
def test_anything_else_is_refused(arguments, words):
    with pytest.raises(TypeError, match=words):
        jaxconv.override(*arguments)
