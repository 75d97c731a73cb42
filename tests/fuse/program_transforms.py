"""Transformations of JAX, by name, for functions of parameters and input."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

TRANSFORMS = (
    *("jit", "jit", "vmap", "vmap of both", "scan", "cond", "switch", "donation"),
    *("grad", "grad", "grad", "grad", "value_and_grad with aux", "grad of remat", "grad of vmap"),
    *("vmap of grad", "grad of scan", "custom_vjp", "jvp", "linearize", "hvp", "hvp"),
    *("linear_transpose", "grad of jit", "grad of grad", "grad of grad", "grad of jvp"),
    "jvp of jvp",
)

# Transformations that differentiate in forward mode.
FORWARD_MODE = ("jvp", "linearize", "hvp", "grad of grad", "grad of jvp", "jvp of jvp")


def weights(y: jax.Array) -> jax.Array:
    """The weights of a loss: small integers, exact in every type."""
    return jnp.asarray((np.arange(y.size) % 5 - 2).reshape(y.shape), y.dtype)


def transformed(name: str, f: Callable, inside: Callable = lambda f: f) -> Callable:
    """A transformation of ``inside(f)``; f is a function of parameters and input."""
    f = inside(f)

    def loss(p, x, f=f):
        y = f(p, x)
        wide = y.astype(jnp.float32) if y.dtype.itemsize < 4 else y
        return (wide * weights(wide)).sum()

    def two(x):
        return jnp.stack([x, -x])

    def tangents(p, x):
        return jax.tree.map(lambda a: weights(a) / 2, (p, x))

    def scanned(p, x):
        return lax.scan(lambda carry, x: (carry + 1, f(p, x)), 0, two(x))

    def custom(p, x):
        @jax.custom_vjp
        def g(p, x):
            return f(p, x)

        def forward(p, x):
            return jax.vjp(f, p, x)

        g.defvjp(forward, lambda pullback, dy: pullback(dy))
        return jax.grad(lambda p, x: loss(p, x, g), argnums=(0, 1))(p, x)

    def linearized(p, x):
        y, linear = jax.linearize(f, p, x)
        return y, linear(*tangents(p, x))

    def weighted(tree):
        wide = [a.astype(jnp.float32) if a.dtype.itemsize < 4 else a for a in jax.tree.leaves(tree)]
        return sum((a * weights(a)).sum() for a in wide)

    def tangent_of(p, x):
        return jax.jvp(f, (p, x), tangents(p, x))[1]

    def first_is_less(x):
        return x.reshape(-1)[0] < x.reshape(-1)[1]

    gradient = jax.grad(loss, argnums=(0, 1))

    def both(p, x):
        return jax.vmap(f)(jax.tree.map(lambda a: jnp.stack([a, a / 2]), p), two(x))

    match name:
        case "jit" | "donation":
            return f
        case "vmap":
            return lambda p, x: jax.vmap(f, (None, 0))(p, two(x))
        case "vmap of both":
            return both
        case "scan":
            return scanned
        case "cond":
            return lambda p, x: lax.cond(first_is_less(x), f, lambda p, x: f(p, -x), p, x)
        case "switch":
            return lambda p, x: lax.switch(
                first_is_less(x).astype(int), [f, lambda p, x: -f(p, x)], p, x
            )
        case "grad":
            return gradient
        case "grad of jit":
            return jax.grad(lambda p, x: loss(p, x, jax.jit(f)), argnums=(0, 1))
        case "value_and_grad with aux":

            def with_aux(p, x):
                return loss(p, x), {"y": f(p, x)}

            return jax.value_and_grad(with_aux, argnums=(0, 1), has_aux=True)
        case "grad of remat":
            return jax.grad(lambda p, x: loss(p, x, jax.checkpoint(f)), argnums=(0, 1))
        case "grad of vmap":
            return jax.grad(lambda p, x: loss(p, two(x), jax.vmap(f, (None, 0))), argnums=(0, 1))
        case "vmap of grad":
            return lambda p, x: jax.vmap(gradient, (None, 0))(p, two(x))
        case "grad of scan":
            return jax.grad(lambda p, x: loss(p, x, lambda *a: scanned(*a)[1]), argnums=(0, 1))
        case "custom_vjp":
            return custom
        case "jvp":
            return lambda p, x: jax.jvp(f, (p, x), tangents(p, x))
        case "linearize":
            return linearized
        case "hvp":
            return lambda p, x: jax.jvp(gradient, (p, x), tangents(p, x))
        case "grad of grad":
            return jax.grad(lambda p, x: weighted(gradient(p, x)), argnums=(0, 1))
        case "grad of jvp":
            return jax.grad(lambda p, x: weighted(tangent_of(p, x)), argnums=(0, 1))
        case "jvp of jvp":
            return lambda p, x: jax.jvp(tangent_of, (p, x), tangents(p, x))
        case "linear_transpose":

            def transpose(p, x):
                y = jax.eval_shape(f, p, x)
                dy = weights(jnp.zeros(y.shape, y.dtype))
                return jax.linear_transpose(lambda x: f(p, x), x)(dy)

            return transpose
    raise ValueError(name)
