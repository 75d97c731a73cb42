"""Programs that ``fuse`` rewrites, the resulting calls, and comparisons of results."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxprs import equations

import jaxconv

N, H, C, K = 2, 6, 4, 4
NHWC = ("NHWC", "HWIO", "NHWC")


def draw(*shape: int, seed: int = 0, dtype=np.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


X, W = draw(N, H, H, C), draw(3, 3, C, K, seed=1)


def conv(x, w=W, numbers=NHWC, **options):
    return lax.conv_general_dilated(
        x, w.astype(x.dtype), (1, 1), "SAME", dimension_numbers=numbers, **options
    )


def calls(function, *args) -> list[str]:
    """The epilogues of a program's fused calls, in the program's order."""
    return [
        " ".join(e.params["epilogue"].words)
        for e in equations(jax.make_jaxpr(function)(*args))
        if e.primitive.name == "jaxconv_fused"
    ]


def epilogues(function, *args) -> list[str]:
    """The epilogue of every fused call of ``fuse(function)``, in the program's order."""
    return calls(jaxconv.fuse(function), *args)


def reasons(function, *args) -> str:
    """The reasons why ``fuse`` ended its chains."""
    return "\n".join(c.chain_end for c in jaxconv.explain(jaxconv.fuse(function), *args))


def assert_close(actual, expected) -> None:
    """Equal up to the order of sums and, in 16 bits, up to roundings that ``fuse`` omits."""
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (e.shape, e.dtype)
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        tolerance = 1e-5 if expected_wide(expected) else 0.03
        assert np.abs(a - e).max() <= tolerance * max(np.abs(e).max(), 1e-3)


def expected_wide(tree) -> bool:
    return all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(tree))


def check(function, *args, gives: list[str]) -> None:
    """``fuse`` makes the calls ``gives``, and the result stays the same."""
    assert epilogues(function, *args) == gives
    assert_close(jax.jit(jaxconv.fuse(function))(*args), jax.jit(function)(*args))
