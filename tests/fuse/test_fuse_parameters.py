"""The barrier of ``fuse`` behind what calls read of a program's parameters."""

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
from jaxconv._src.passes.together import together, together_p

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


def barriers(function, *args) -> list[int]:
    """The number of operands of each barrier."""
    found = equations(jax.make_jaxpr(function)(*args))
    return [len(e.invars) for e in found if e.primitive is together_p]


def test_one_barrier_for_all_operands():
    assert barriers(jaxconv.fuse(network), parameters(), X) == [9]
    program = jax.make_jaxpr(jaxconv.fuse(network))(parameters(), X)
    names = [e.primitive.name for e in program.jaxpr.eqns]
    first = names.index("together")
    assert "convert_element_type" not in names[first:] and "rsqrt" not in names[first:]


def test_what_is_not_computed_from_parameters_alone_stays():
    """Parameters as they are, one operand alone, large filters, and what depends on the input."""
    p = parameters()

    def as_they_are(p, x):
        return conv(conv(x, p[0]["w"]), p[1]["w"])

    assert barriers(jaxconv.fuse(as_they_are), p, X.astype(jnp.float32)) == []
    assert barriers(jaxconv.fuse(network), parameters()[:0], X) == []

    def one(p, x):
        return conv(x, p[0]["w"].astype(x.dtype))

    assert barriers(jaxconv.fuse(one), p, X) == []

    def large(p, x):
        return conv(conv(x, p[0].astype(x.dtype)), p[1].astype(x.dtype))

    wide = [jnp.zeros((3, 3, 256, 256))] * 2
    assert barriers(jaxconv.fuse(large), wide, draw(2, 8, 8, 256)) == []

    def by_input(p, x):
        for of in p:
            x = conv(x, (of["w"] * x[0, 0, 0, 0].astype(jnp.float32)).astype(x.dtype))
        return x

    assert barriers(jaxconv.fuse(by_input), p, X) == []


def test_no_barrier_for_other_platforms(monkeypatch):
    monkeypatch.setenv("JAXCONV_TARGET", "")
    assert barriers(jaxconv.fuse(network), parameters(), X) == []


def loss(p, x):
    return (network(p, x).astype(jnp.float32) ** 2).sum()


def test_values_and_gradients_are_the_same():
    p = parameters()
    fused, plain = (jax.jit(jax.value_and_grad(f))(p, X) for f in (jaxconv.fuse(loss), loss))
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-2), fused, plain)


@pytest.mark.parametrize("order", ["outside", "inside"])
def test_gradients_pass_no_barrier(order):
    """A barrier behind the gradients would keep all of them until the last one is computed."""
    grad = jax.grad(jaxconv.fuse(loss)) if order == "outside" else jaxconv.fuse(jax.grad(loss))
    found = collections.Counter(barriers(grad, parameters(), X))
    assert found == {9: 1}


def test_together_is_the_identity():
    arrays = [draw(3, seed=i, dtype=jnp.float32) for i in range(2)]

    def same(actual, expected):
        for a, e in zip(actual, expected, strict=True):
            np.testing.assert_array_equal(a, e)

    same(together(*arrays), arrays)
    primals, tangents = jax.jvp(together, arrays, arrays[::-1])
    same([*primals, *tangents], [*arrays, *arrays[::-1]])
    same(jax.linear_transpose(together, *arrays)(arrays[::-1]), arrays[::-1])
    mapped = jax.vmap(together, (0, None), [0, None])(*arrays)
    same(mapped, arrays)
    text = jax.jit(together).lower(*arrays).as_text()
    assert text.count("optimization_barrier") == 1
