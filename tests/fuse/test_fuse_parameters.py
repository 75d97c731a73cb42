"""The calls in which ``fuse`` computes what other calls read of a program's parameters."""

from __future__ import annotations

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jaxprs import equations
from training_programs import conv, draw

import jaxconv
from jaxconv._src.fuse import fuse_parameters
from jaxconv._src.passes import elementwise

pytestmark = pytest.mark.usefixtures("for_a_gpu_on_the_cpu")

C = 16
X = draw(2, 8, 8, C)


def parameters(layers=3):
    def layer(seed):
        vectors = {n: 1 + 0.1 * draw(C, seed=seed, dtype=jnp.float32) for n in "gbmv"}
        return {"w": 0.1 * draw(3, 3, C, C, seed=seed, dtype=jnp.float32), **vectors}

    return [layer(seed) for seed in range(layers)]


def network(p, x):
    """Filters are converted, scale and bias follow from vectors; their calls read all of them."""
    for of in p:
        scale = of["g"] * lax.rsqrt(of["v"] + 1e-3)
        w = of["w"].astype(x.dtype)
        bias = of["b"] - of["m"] * scale
        x = jaxconv.conv(x, w, padding="SAME", scale=scale, bias=bias, activation="relu")
    return x


def made(function, *args) -> list[elementwise.Result]:
    """The results of all calls."""
    found = equations(jax.make_jaxpr(function)(*args))
    of_calls = [e.params["results"] for e in found if e.primitive is elementwise.elementwise_p]
    return [result for results in of_calls for result in results]


def test_one_call_for_all_operands():
    program = jax.make_jaxpr(jaxconv.fuse(network))(parameters(), X)
    names = [e.primitive.name for e in program.jaxpr.eqns]
    assert names[0] == "jaxconv_elementwise" and names.count("jaxconv_elementwise") == 1
    assert not {"convert_element_type", "rsqrt", "mul", "sub"} & set(names)
    found = made(jaxconv.fuse(network), parameters(), X)
    assert len(found) == 9 and len({r.function for r in found}) == 3
    assert collections.Counter(r.dtype.name for r in found) == {"bfloat16": 3, "float32": 6}


SPELLINGS = {
    "division": lambda of: of["g"] / jnp.sqrt(of["v"] + 1e-3),
    "bounded": lambda of: of["g"] * lax.rsqrt(jnp.maximum(of["v"], 1e-3)),
    "rounded": lambda of: (of["g"].astype(jnp.bfloat16) * 2).astype(jnp.float32),
    "reshaped": lambda of: (-of["g"]).reshape(1, 1, C).reshape(C),
    "scalar": lambda of: of["g"] * of["m"][:1],
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_values(spelling):
    """As the program's, with what it rounds in between."""

    def function(p, x):
        for of in p:
            x = jaxconv.conv(x, of["w"], padding="SAME", scale=SPELLINGS[spelling](of))
        return x

    x = X.astype(jnp.float32)
    if spelling == "scalar":  # a slice is no function of elements
        assert not made(jaxconv.fuse(function), parameters(), x)
        return
    assert len(made(jaxconv.fuse(function), parameters(), x)) == 3
    fused, plain = (jax.jit(f)(parameters(), x) for f in (jaxconv.fuse(function), function))
    np.testing.assert_allclose(fused, plain, rtol=1e-5)


def test_what_stays(monkeypatch):
    """Parameters as they are, one operand alone, large filters, and what depends on the input."""
    p = parameters()

    def as_they_are(p, x):
        return conv(conv(x, p[0]["w"]), p[1]["w"])

    assert not made(jaxconv.fuse(as_they_are), p, X.astype(jnp.float32))

    def one(p, x):
        return conv(x, p[0]["w"].astype(x.dtype))

    assert not made(jaxconv.fuse(one), p, X)

    def by_input(p, x):
        for of in p:
            x = conv(x, (of["w"] * x[0, 0, 0, 0].astype(jnp.float32)).astype(x.dtype))
        return x

    assert not made(jaxconv.fuse(by_input), p, X)
    monkeypatch.setattr(fuse_parameters, "MOST_ELEMENTS", 9 * C * C - 1)
    assert all(r.shape == (C,) for r in made(jaxconv.fuse(network), p, X))
    monkeypatch.setenv("JAXCONV_TARGET", "")
    assert not made(jaxconv.fuse(network), p, X)


def test_calls_have_limits(monkeypatch):
    """Many results and many functions are divided among calls."""
    monkeypatch.setattr(elementwise, "MOST_RESULTS", 4)
    monkeypatch.setattr(elementwise, "MOST_FUNCTIONS", 2)
    found = equations(jax.make_jaxpr(jaxconv.fuse(network))(parameters(), X))
    calls = [e.params["results"] for e in found if e.primitive is elementwise.elementwise_p]
    assert sum(map(len, calls)) == 9 and max(map(len, calls)) <= 4
    assert all(len({r.function for r in results}) <= 2 for results in calls)


def loss(p, x):
    return (network(p, x).astype(jnp.float32) ** 2).sum()


@pytest.mark.parametrize("order", ["outside", "inside"])
def test_gradients(order):
    p = parameters()
    value_and_grad = (
        jax.value_and_grad(jaxconv.fuse(loss))
        if order == "outside"
        else jaxconv.fuse(jax.value_and_grad(loss))
    )
    assert len(made(value_and_grad, p, X)) >= 9
    ours, theirs = (jax.jit(f)(p, X) for f in (value_and_grad, jax.value_and_grad(loss)))
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=2e-2), ours, theirs)


def test_linear_transpose():
    def function(w):
        return jaxconv.conv(X, w.astype(X.dtype)).astype(jnp.float32)

    def two(w, v):
        return function(w) + function(v)

    w = jnp.zeros((3, 3, C, C))
    ct = jnp.ones(jax.eval_shape(function, w).shape)
    found = jax.linear_transpose(jaxconv.fuse(two), w, w)(ct)
    for a, e in zip(found, jax.linear_transpose(two, w, w)(ct), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-6)
