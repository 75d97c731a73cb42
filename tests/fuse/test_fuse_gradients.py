"""Derivatives inside ``fuse``: JAX differentiates the fused function, but only there.

The reference is the same step with the loss fused by hand: ``jax.grad(fuse(loss))``. ``fuse`` of
the step must make the same calls; the unfused step gives the expected values.
"""

from __future__ import annotations

import functools
import logging
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_programs import calls, conv
from gradient_programs import PARAMETERS, X, assert_close, layer, loss
from jax import lax

import jaxconv
from jaxconv._src import compat
from jaxconv._src.fuse import differentiate

pytestmark = pytest.mark.usefixtures("on_the_cpu")


# --- what takes derivatives -----------------------------------------------------------------------


def rematerialised(loss):
    return jax.value_and_grad(jax.checkpoint(loss))


def with_auxiliary(loss):
    def both(p, x):
        value = loss(p, x)
        return value, {"double": 2 * value, "name": "loss", "count": np.int32(3)}

    def step(p, x):
        (value, auxiliary), gradient = jax.value_and_grad(both, has_aux=True)(p, x)
        assert auxiliary["name"] == "loss" and int(auxiliary["count"]) == 3
        return value, auxiliary["double"], gradient

    return step


def of_the_gradients_norm(loss):
    def norm(x, p):
        return sum((g**2).sum() for g in jax.tree.leaves(jax.grad(loss)(p, x)))

    return lambda p, x: jax.value_and_grad(norm)(x, p)


def closed_over(loss):
    def step(p, x):
        double = 2 * x  # traced, but no argument of the differentiated function
        return jax.grad(lambda gain: loss({**p, "gain": gain}, double))(p["gain"])

    return step


def closed_over_twice(loss):
    def step(p, x):
        def outer(x):
            return jax.grad(lambda gain: loss({**p, "gain": gain}, x))(p["gain"]).sum()

        return jax.grad(outer)(x)

    return step


def by_integers(loss):
    def scaled(p, x, n):
        return loss(p, x) * n

    return lambda p, x: jax.grad(scaled, (0, 2), allow_int=True)(p, x, jnp.int32(3))


def pulled_back(loss):
    def step(p, x):
        y, pull = jax.vjp(loss, p, x)
        return y, pull(jnp.ones_like(y))

    return step


def linearized(loss):
    def step(p, x):
        y, push = jax.linearize(loss, p, x)
        return y, push(p, x)

    return step


def of_a_row(loss):
    return lambda p, x: jax.jacrev(lambda p: loss(p, x)[None])(p)


def of_each_example(loss):
    return lambda p, x: jax.vmap(jax.value_and_grad(loss), (None, 0))(p, x[:, None])


def jitted(loss):
    return jax.jit(jax.value_and_grad(loss, (0, 1)), donate_argnums=1)


def in_a_loop(loss):
    def descend(p, x):
        return jax.tree.map(lambda a, g: a - 0.1 * g, p, jax.grad(loss)(p, x)), None

    return lambda p, x: lax.scan(descend, p, jnp.stack([x, x]))[0]


def in_a_branch(loss):
    return lambda p, x: lax.cond(x.sum() > 0, jax.grad(loss), lambda p, x: p, p, x)


def with_a_rule(loss):
    """A custom derivative after the convolutions; its backward pass differentiates."""

    @jax.custom_vjp
    def squared(value):
        return value**2

    def forward(value):
        return jax.vjp(lambda v: v**2, value)

    squared.defvjp(forward, lambda pull, cotangent: pull(cotangent))
    return jax.value_and_grad(lambda p, x: squared(loss(p, x)))


def by_keyword(loss):
    return lambda p, x: jax.value_and_grad(lambda p, *, x: loss(p, x))(p, x=x)


STEPS = {
    "value_and_grad": jax.value_and_grad,
    "argnums": functools.partial(jax.grad, argnums=(0, 1)),
    "has_aux": with_auxiliary,
    "keywords": by_keyword,
    "a gradient's gradient": of_the_gradients_norm,
    "closed over": closed_over,
    "closed over twice": closed_over_twice,
    "allow_int": by_integers,
    "vjp": pulled_back,
    "linearize": linearized,
    "jacrev": of_a_row,
    "vmap": of_each_example,
    "jit": jitted,
    "checkpoint": rematerialised,
    "scan": in_a_loop,
    "cond": in_a_branch,
    "custom_vjp": with_a_rule,
}


@pytest.mark.parametrize("name", STEPS)
def test_both_orders_reach_the_same_calls(name):
    step = STEPS[name](loss)
    by_hand = calls(STEPS[name](jaxconv.fuse(loss)), PARAMETERS, X)
    assert "scale bias silu pre" in by_hand
    assert calls(jaxconv.fuse(step), PARAMETERS, X) == by_hand
    assert not calls(step, PARAMETERS, X)
    assert calls(jaxconv.fuse(step, gradients=False), PARAMETERS, X) != by_hand
    copies = jax.tree.map(jnp.copy, (PARAMETERS, X))  # one step donates X
    assert_close(jax.jit(jaxconv.fuse(step))(*copies), step(PARAMETERS, jnp.copy(X)))


@pytest.mark.parametrize("transform", [jax.hessian, jax.jacfwd, jax.jacrev])
def test_jacobians(transform):
    def step(gain, x):
        return transform(lambda gain: loss({**PARAMETERS, "gain": gain}, x))(gain)

    assert "scale bias silu pre" in calls(jaxconv.fuse(step), PARAMETERS["gain"], X)
    actual = jax.jit(jaxconv.fuse(step))(PARAMETERS["gain"], X)
    assert_close(actual, step(PARAMETERS["gain"], X))


def test_forward_mode():
    def step(p, x):
        return jax.jvp(lambda p: loss(p, x), (p,), (p,))

    assert "scale bias silu pre" in calls(jaxconv.fuse(step), PARAMETERS, X)
    assert_close(jax.jit(jaxconv.fuse(step))(PARAMETERS, X), step(PARAMETERS, X))


def test_a_loop_over_layers():
    stacked = jax.tree.map(lambda a: 0.5 * jnp.stack([a, a, a]), PARAMETERS)

    def deep(p, x):
        return (lax.scan(lambda x, p: (layer(p, x), None), x, p)[0] ** 2).mean()

    step = jax.value_and_grad(deep)
    found = calls(jaxconv.fuse(step), stacked, X)
    assert found == calls(jax.value_and_grad(jaxconv.fuse(deep)), stacked, X)
    assert found == ["scale bias silu pre"]
    assert_close(jax.jit(jaxconv.fuse(step))(stacked, X), jax.jit(step)(stacked, X))


def test_a_holomorphic_function_stays():
    def step(z):
        return jax.grad(lambda z: (z**3).sum(), holomorphic=True)(z)

    z = jnp.asarray([1 + 2j, 3 - 1j], jnp.complex64)
    np.testing.assert_allclose(jaxconv.fuse(step)(z), step(z), rtol=1e-6)


def test_filters_are_folded_in_derivatives_too():
    scale = jnp.arange(1.0, 5)

    def step(x):
        return jax.grad(lambda x: jnp.tanh(conv(x, PARAMETERS["w"]) * scale + 1.0).sum())(x)

    assert calls(jaxconv.fuse(step), X) == ["scale bias tanh"]
    assert calls(jaxconv.fuse(step, fold=True), X) == ["bias tanh"]
    assert_close(jax.jit(jaxconv.fuse(step, fold=True))(X), step(X))


def test_nothing_is_done_twice():
    """Chains that the inner ``fuse`` has rejected are not fused by the outer one."""
    twice = jaxconv.fuse(lambda p, x: jax.value_and_grad(jaxconv.fuse(loss))(p, x))
    once = jaxconv.fuse(jax.value_and_grad(loss))
    assert calls(twice, PARAMETERS, X) == calls(once, PARAMETERS, X)
    assert_close(jax.jit(twice)(PARAMETERS, X), jax.jit(once)(PARAMETERS, X))

    def with_auxiliary(x):
        y = conv(x, PARAMETERS["w"])
        return (jax.nn.relu(2 * y) ** 2).sum(), y

    def step(x):  # y has no further use, but the inner trace cannot know that
        return jax.grad(with_auxiliary, has_aux=True)(x)[0]

    assert calls(jaxconv.fuse(step, gradients=False), X) == ["scale relu"]
    assert calls(jaxconv.fuse(step), X) == []
    text = str(jaxconv.explain(jaxconv.fuse(step), X))
    assert "multiply follows" in text


def test_a_returned_convolution_may_be_fused_outside():
    """The differentiated function returns a convolution; the activation follows outside."""

    def step(x):
        y, pull = jax.vjp(lambda x: conv(x, PARAMETERS["w"]), x)
        return jax.nn.relu(y), pull(X)

    assert calls(jaxconv.fuse(step), X) == ["relu"]
    assert_close(jax.jit(jaxconv.fuse(step))(X), step(X))


def test_one_trace():
    traces = 0

    def counted(p, x):
        nonlocal traces
        traces += 1
        return loss(p, x)

    jax.make_jaxpr(jaxconv.fuse(jax.value_and_grad(counted)))(PARAMETERS, X)
    assert traces == 1


# --- where it is in force -------------------------------------------------------------------------


def test_eager_code_sees_values():
    """A loss that branches on a value works outside a trace, also after ``fuse`` was used."""
    jax.make_jaxpr(jaxconv.fuse(jax.grad(loss)))(PARAMETERS, X)

    def branching(p, x):
        value = loss(p, x)
        return value if value > 0 else -value

    assert_close(jax.grad(branching)(PARAMETERS, X), jax.grad(loss)(PARAMETERS, X))

    def step(p, x):
        with jax.ensure_compile_time_eval():
            constant = jax.grad(branching)(PARAMETERS, X)
        return jax.tree.map(jnp.add, jax.grad(loss)(p, x), constant)

    expected = jax.tree.map(lambda a: 2 * a, jax.grad(loss)(PARAMETERS, X))
    assert_close(jax.jit(jaxconv.fuse(step))(PARAMETERS, X), expected)


def test_what_cannot_be_traced_apart_stays(caplog):
    """The function branches on its argument's value, so it cannot be traced separately."""

    def step(p, x):
        def scaled(s):
            return s * loss(p, x) if s else 0.0

        return jax.grad(scaled)(2.0), jax.grad(loss)(p, x)

    with caplog.at_level(logging.INFO, "jaxconv"):
        found = calls(jaxconv.fuse(step), PARAMETERS, X)
    assert "scale bias silu pre" in found  # the other derivative is fused
    assert "fuse leaves a differentiated function" in caplog.text
    assert_close(jax.jit(jaxconv.fuse(step))(PARAMETERS, X), step(PARAMETERS, X))


def test_errors_are_those_of_the_function():
    def wrong(p, x):
        raise KeyError("no such parameter")

    with pytest.raises(KeyError, match="no such parameter") as raised:
        jaxconv.fuse(jax.grad(wrong))(PARAMETERS, X)
    assert raised.value.__context__ is None or isinstance(raised.value.__context__, KeyError)
    with pytest.raises(TypeError, match="scalar-output functions"):
        jaxconv.fuse(jax.grad(layer))(PARAMETERS, X)


def test_values_left_in_objects():
    """Haiku's random keys: code after the differentiated function uses a key made inside it."""

    def step(x, key):
        keys = [key]

        def noisy(x):
            keys[0], own = jax.random.split(keys[0])
            return (jax.nn.silu(conv(x, PARAMETERS["w"])) * jax.random.normal(own, x.shape)).sum()

        return jax.grad(noisy)(x), jax.random.normal(keys[0])

    key = jax.random.key(0)
    assert_close(jax.jit(jaxconv.fuse(step))(X, key), step(X, key))
    around = jaxconv.fuse(lambda x, key: jax.grad(lambda x: (step(x, key)[0] ** 2).sum())(x))
    expected = jax.grad(lambda x: (step(x, key)[0] ** 2).sum())(X)
    assert_close(jax.jit(around)(X, key), expected)


def test_a_rule_that_needs_a_value_of_the_caller():
    """A ``custom_vjp`` rule is called after the trace of its function has ended."""

    def step(p, x):
        def value(p, n):
            weight = 1.0 + jnp.sin(n)

            @jax.custom_vjp
            def weighted(y):
                return y * weight

            weighted.defvjp(lambda y: (y * weight, None), lambda _, dy: (dy * weight,))
            return weighted(loss(p, x))

        return jax.grad(value)(p, jnp.float32(2)), jax.grad(loss)(p, x)

    assert_close(jax.jit(jaxconv.fuse(step))(PARAMETERS, X), jax.jit(step)(PARAMETERS, X))


def test_effects_happen_once():
    told = []

    def step(p, x):
        def value(p):
            y = loss(p, x)
            jax.debug.callback(lambda y: told.append(float(y)), y)
            return y

        return jax.grad(value)(p)

    jax.block_until_ready(jax.jit(jaxconv.fuse(step))(PARAMETERS, X))
    jax.effects_barrier()
    assert len(told) == 1 and np.isclose(told[0], loss(PARAMETERS, X))


def test_an_array_that_is_written_in_place():
    make = getattr(jax, "new_ref", None)
    if make is None:
        pytest.skip("this JAX has no jax.new_ref")

    def step(p, x):
        kept = make(jnp.float32(0))

        def value(p):
            y = loss(p, x)
            kept[...] = lax.stop_gradient(y)
            return y

        return jax.grad(value)(p), kept[...]

    assert_close(jax.jit(jaxconv.fuse(step))(PARAMETERS, X), jax.jit(step)(PARAMETERS, X))
    assert "scale bias silu pre" in calls(jaxconv.fuse(step), PARAMETERS, X)


@pytest.mark.parametrize("inside_first", [True, False])
def test_caches_of_inner_functions(inside_first):
    """A jitted function has one program for calls inside, and another for calls outside."""
    inner = jax.jit(jax.value_and_grad(lambda p, x: loss(p, x)))
    body = jax.jit(lambda p, x: lax.scan(lambda p, x: (inner(p, x)[1], None), p, x[None])[0])

    def step(p, x):
        return inner(p, x), body(p, x)

    for inside in (inside_first, not inside_first, inside_first):
        found = calls(jaxconv.fuse(step) if inside else step, PARAMETERS, X)
        assert found == ["scale bias silu pre"] * 2 * inside
    assert calls(jaxconv.fuse(step, gradients=False), PARAMETERS, X) != ["scale bias silu pre"] * 2
    assert_close(inner(PARAMETERS, X), jax.value_and_grad(loss)(PARAMETERS, X))


def test_threads():
    """Threads trace at once: fused, unfused, and eager code that branches on values."""
    meeting = threading.Barrier(3, timeout=60)
    results: dict[str, object] = {}

    def met(p, x):
        meeting.wait()
        value = loss(p, x)
        meeting.wait()
        return value

    def branching(p, x):
        value = met(p, x)
        return value if value > 0 else -value

    threads = {
        "fused": lambda: calls(jaxconv.fuse(jax.grad(met)), PARAMETERS, X),
        "plain": lambda: calls(jax.grad(met), PARAMETERS, X),
        "eager": lambda: jax.grad(branching)(PARAMETERS, X),
    }

    def run(name):
        with jax.default_device(jax.devices("cpu")[0]):
            results[name] = threads[name]()

    started = [threading.Thread(target=run, args=(name,)) for name in threads]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join(120)
    assert results["fused"] == ["scale bias silu pre"] and results["plain"] == []
    assert_close(results["eager"], jax.grad(loss)(PARAMETERS, X))


def test_an_unknown_jax_is_told_once(monkeypatch):
    monkeypatch.setattr(differentiate, "_placed", None)
    monkeypatch.setattr(compat, "_DIFFERENTIATION", ((compat, "no_such_function"),))
    step = jaxconv.fuse(jax.grad(loss))
    with pytest.warns(RuntimeWarning, match="jaxconv.value_and_grad"):
        step(PARAMETERS, X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(PARAMETERS, X)


def test_a_jax_that_differentiates_elsewhere_is_told(monkeypatch):
    monkeypatch.setattr(differentiate, "_placed", None)
    monkeypatch.setattr(compat, "unused", lambda function: None, raising=False)
    monkeypatch.setattr(compat, "_DIFFERENTIATION", ((compat, "unused"),))
    with pytest.warns(RuntimeWarning, match="jaxconv.value_and_grad"):
        differentiate.place()


# --- without it -----------------------------------------------------------------------------------


def test_grad_and_value_and_grad():
    expected = calls(jax.value_and_grad(jaxconv.fuse(loss)), PARAMETERS, X)
    assert calls(jaxconv.value_and_grad(loss), PARAMETERS, X) == expected
    assert calls(jaxconv.grad(loss, argnums=1), PARAMETERS, X)
    assert_close(
        jax.jit(jaxconv.value_and_grad(loss, (0, 1)))(PARAMETERS, X),
        jax.value_and_grad(loss, (0, 1))(PARAMETERS, X),
    )
    auxiliary = jaxconv.grad(lambda p, x: (loss(p, x), {"x": x}), has_aux=True)(PARAMETERS, X)
    assert_close(auxiliary, (jax.grad(loss)(PARAMETERS, X), {"x": X}))
    assert jaxconv.grad(loss).__name__ == "loss" == jaxconv.value_and_grad(loss).__name__
    integers = jaxconv.grad(lambda n, x: x * n, allow_int=True)(jnp.int32(3), 2.0)
    assert integers.dtype == jax.dtypes.float0
    z = jnp.complex64(1 + 2j)
    np.testing.assert_allclose(jaxconv.grad(lambda z: z**2, holomorphic=True)(z), 2 * z, rtol=1e-6)
    with pytest.raises(TypeError, match="fun: expected a function"):
        jaxconv.grad(X)
