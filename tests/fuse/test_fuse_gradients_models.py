"""Derivatives inside ``fuse`` as model libraries take them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_programs import calls
from gradient_programs import PARAMETERS, X, assert_close, loss

import jaxconv

pytestmark = pytest.mark.usefixtures("on_the_cpu")


def same(step, *args) -> list[str]:
    """Checks that a fused step computes the same; returns its calls."""
    assert_close(jax.jit(jaxconv.fuse(step))(*args), jax.jit(step)(*args))
    return calls(jaxconv.fuse(step), *args)


@pytest.mark.parametrize("whole", [True, False])
def test_nnx(whole):
    nnx = pytest.importorskip("flax.nnx")

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(4, 4, (3, 3), rngs=rngs)
            self.norm = nnx.BatchNorm(4, use_running_average=True, rngs=rngs)

        def __call__(self, x):
            return nnx.silu(self.norm(self.conv(x)))

    graph, parameters, rest = nnx.split(Block(nnx.Rngs(0)), nnx.Param, ...)

    def step(parameters, rest, x):
        model = nnx.merge(graph, parameters, rest)
        if whole:
            value, gradient = nnx.value_and_grad(lambda m, x: (m(x) ** 2).mean())(model, x)
            return value, gradient
        return nnx.grad(lambda m: (m(x) ** 2).mean())(model)

    assert same(step, parameters, rest, X) == ["scale bias silu pre"]


def test_nnx_updates_statistics():
    """Training updates the running statistics in place, inside the differentiated function."""
    nnx = pytest.importorskip("flax.nnx")

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(4, 4, (3, 3), rngs=rngs)
            self.norm = nnx.BatchNorm(4, rngs=rngs)
            self.last = nnx.Conv(4, 4, (3, 3), rngs=rngs)

        def __call__(self, x):
            return nnx.silu(self.last(nnx.relu(self.norm(self.conv(x)))))

    graph, state = nnx.split(Block(nnx.Rngs(0)))

    def step(state, x):
        model = nnx.merge(graph, jax.tree.map(jnp.copy, state))
        value, gradient = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
        return value, gradient, nnx.state(model)

    assert "bias silu pre" in same(step, state, X)


@pytest.mark.parametrize("of", ["filter_grad", "filter_value_and_grad"])
def test_equinox(of):
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.Conv2d(4, 4, 3, padding=1, key=jax.random.key(0))

    def value(model, x, flag):
        return (jax.nn.silu(jax.vmap(model)(x)) ** 2).mean() if flag else 0.0

    def step(model, x):
        return eqx.filter(getattr(eqx, of)(value)(model, x, True), eqx.is_array)

    assert same(step, model, X.transpose(0, 3, 1, 2)) == ["bias silu pre"]


def test_haiku():
    hk = pytest.importorskip("haiku")

    def model(x):
        x = jax.nn.silu(hk.Conv2D(4, 3)(x))
        return hk.dropout(hk.next_rng_key(), 0.1, jax.nn.silu(hk.Conv2D(4, 3)(x)))

    transformed = hk.transform(model)
    parameters, key = transformed.init(jax.random.key(0), X), jax.random.key(1)

    def step(parameters, key, x):
        return jax.value_and_grad(lambda p: (transformed.apply(p, key, x) ** 2).mean())(parameters)

    assert same(step, parameters, key, X) == ["bias silu pre"] * 2

    def energies_gradient(x):  # parameters are created inside the differentiated function
        return jax.grad(lambda x: jax.nn.silu(hk.Conv2D(4, 3)(x)).sum())(x)

    forces = hk.without_apply_rng(hk.transform(energies_gradient))
    made = jax.jit(jaxconv.fuse(forces.init))(key, X)
    assert_close(made, forces.init(key, X))
    assert same(forces.apply, made, X) == ["bias silu pre"]


def test_optax():
    optax = pytest.importorskip("optax")
    optimizer = optax.adam(1e-2)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(p, state, x):
        value, gradient = jax.value_and_grad(loss)(p, x)
        updates, state = optimizer.update(gradient, state, p)
        return optax.apply_updates(p, updates), state, value

    def run(step):
        p = jax.tree.map(jnp.copy, PARAMETERS)
        state = optimizer.init(p)
        for _ in range(3):
            p, state, value = step(p, state, X)
        return p, value

    arguments = PARAMETERS, optimizer.init(PARAMETERS), X
    assert calls(jaxconv.fuse(step), *arguments) == ["scale bias silu pre"]
    actual = run(jax.jit(jaxconv.fuse(step), donate_argnums=(0, 1)))
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(run(step)), strict=True):
        np.testing.assert_allclose(a, e, atol=1e-4)
