"""The derivative rule of the primitive max_pool equals JAX's derivative of lax's pooling."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.test_util import check_grads
from jaxprs import equations

from jaxconv._src.passes import max_pooling
from jaxconv._src.passes.masked_sums import Sums
from jaxconv._src.passes.max_pooling import Pooling, Windows

pytestmark = pytest.mark.usefixtures("on_the_cpu")

WINDOWS = Windows((2, 7, 6, 8), (1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), (1, 1), (1, 0), (0, 0)))


def form_of(affine: bool, copies: int = 2, stored: bool = True) -> Pooling:
    return Pooling(WINDOWS, affine, False, False, copies, stored)


def program(x, *vectors, form: Pooling):
    if vectors:
        mean, scale, offset = vectors
        x = jax.nn.relu(((x.astype(np.float32) - mean) * scale + offset).astype(x.dtype))
    low = np.array(-np.inf, x.dtype)
    windows = form.windows
    z = lax.reduce_window(x, low, lax.max, windows.sizes, windows.strides, windows.padding)
    return [z] * form.copies


def drawn(affine: bool, dtype=np.float32, integers=True, seed=0) -> list[jax.Array]:
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return rng.integers(-2, 3, shape) if integers else rng.standard_normal(shape)

    vectors = [jnp.asarray(draw(8), np.float32) for _ in range(3)]
    return [jnp.asarray(draw(*WINDOWS.shape), dtype), *(vectors if affine else [])]


def cotangents(form: Pooling, dtype=np.float32) -> list[jax.Array]:
    rng = np.random.default_rng(5)
    return [jnp.asarray(rng.integers(-2, 3, WINDOWS.counts), dtype) for _ in range(form.copies)]


def assert_same(actual, expected) -> None:
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == e.dtype
        np.testing.assert_array_equal(np.asarray(a, np.float64), np.asarray(e, np.float64))


def both(function, operands, tangents, dz):
    pushed = jax.jit(lambda o, t: jax.jvp(function, o, t))(operands, tangents)
    return pushed, jax.jit(lambda o, d: jax.vjp(function, *o)[1](d))(operands, dz)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_ties(affine, stored, dtype):
    """Integers, so that windows have several maxima, and maxima lie at relu's corner."""
    form = form_of(affine, stored=stored)
    given = drawn(affine, dtype), drawn(affine, dtype, seed=1), cotangents(form, dtype)
    actual, expected = (
        both(functools.partial(f, form=form), *given) for f in (max_pooling.max_pool, program)
    )
    assert_same(actual, expected)


def test_nan():
    """If a window's maximum is NaN, its gradient has the same place as in lax's program."""
    form = form_of(False)
    (x,) = drawn(False)
    x = jnp.where(np.random.default_rng(2).random(x.shape) < 0.2, np.nan, x)
    given = [x], drawn(False, seed=1), cotangents(form)
    (primals, _), back = both(functools.partial(max_pooling.max_pool, form=form), *given)
    (of_lax, _), back_of_lax = both(functools.partial(program, form=form), *given)
    assert jnp.isnan(primals[0]).any()
    assert_same((primals, back), (of_lax, back_of_lax))


@pytest.mark.parametrize("affine", [False, True])
def test_to_second_order(affine):
    form, rng = form_of(affine), np.random.default_rng(0)
    # Numbers that differ by more than the steps of numerical derivatives.
    x = jnp.asarray(rng.permutation(np.prod(WINDOWS.shape)).reshape(WINDOWS.shape) / 40, np.float32)
    vectors = [jnp.asarray(rng.uniform(0.5, 1, 8), np.float32) for _ in range(3)] * affine

    def squares(*operands):
        first, second = max_pooling.max_pool(*operands, form=form)
        return first * first + jnp.sin(second)

    check_grads(squares, (x, *vectors), 2, ["fwd", "rev"], eps=4e-3, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("affine", [False, True])
def test_linearized_twice(affine):
    form = form_of(affine, copies=1)
    operands, tangents = drawn(affine), drawn(affine, seed=1)

    def twice(function):
        def once(*operands):
            (z,) = jax.linearize(functools.partial(function, form=form), *operands)[1](*tangents)
            return z

        value, push = jax.linearize(once, *operands)
        return value, push(*tangents)

    assert_same(twice(max_pooling.max_pool), twice(program))


def test_operands_without_tangents():
    form, operands = form_of(True, copies=1), drawn(True)
    dz = cotangents(form)
    for free in ([0], [1], [2, 3], [0, 3]):

        def back(function, free=free):
            def of_free(*given):
                values = dict(enumerate(operands)) | dict(zip(free, given, strict=True))
                return function(*(values[i] for i in range(4)), form=form)

            return jax.vjp(of_free, *(operands[i] for i in free))[1](dz)

        assert_same(back(max_pooling.max_pool), back(program))
        found = [e.primitive.name for e in equations(jax.make_jaxpr(lambda: back(_pool))())]
        assert found.count("jaxconv_masked_sums") == (free != [0])
        assert found.count("jaxconv_max_pool_gradient") == (0 in free)


def _pool(*operands, form):
    return max_pooling.max_pool(*operands, form=form)


@pytest.mark.parametrize("stored", [False, True])
def test_the_sums_of_windows(stored):
    form = form_of(True, stored=stored)

    def back(*operands):
        return jax.vjp(functools.partial(_pool, form=form), *operands)[1](cotangents(form))

    found = equations(jax.make_jaxpr(back)(*drawn(True)))
    calls = [e.params["form"] for e in found if e.primitive.name == "jaxconv_masked_sums"]
    assert calls == [Sums(2, 1, "result", False, 0.0, None)] * stored


@pytest.mark.parametrize("affine", [False, True])
def test_vmap(affine):
    form = form_of(affine, copies=1)
    several = [jnp.stack(o) for o in zip(*(drawn(affine, seed=s) for s in range(3)), strict=True)]
    dz = cotangents(form)

    def all_of(*operands):
        value, push = jax.linearize(functools.partial(_pool, form=form), *operands)
        return (
            value,
            push(*operands),
            jax.vjp(functools.partial(_pool, form=form), *operands)[1](dz),
        )

    found = jax.jit(jax.vmap(all_of))(*several)
    one_by_one = [all_of(*(o[n] for o in several)) for n in range(3)]
    assert_same(found, jax.tree.map(lambda *leaves: jnp.stack(leaves), *one_by_one))
