"""The operations that ``fuse`` makes of max pooling and of its gradient.

A test counts the remaining operations, because an unchanged program would pass a comparison of
numbers.
"""

from __future__ import annotations

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxprs import equations

import jaxconv

pytestmark = pytest.mark.usefixtures("on_the_cpu")

POOLING = ("reduce_window_max", "select_and_scatter_add", "select_and_gather_add")


def left(function, *args) -> tuple[int, ...]:
    """The number of operations of each kind in ``POOLING`` that a program has."""
    count = collections.Counter(
        e.primitive.name for e in equations(jax.make_jaxpr(function)(*args))
    )
    return tuple(count[name] for name in POOLING)


def integers(*shape: int, seed: int = 0, dtype=jnp.bfloat16) -> jax.Array:
    """Few different integers, so that windows have several maxima, and sums are exact."""
    return jnp.asarray(np.random.default_rng(seed).integers(-2, 3, shape), dtype)


def max_pool(x, sizes, strides, padding="SAME", **dilations):
    return lax.reduce_window(x, -jnp.inf, lax.max, sizes, strides, padding, **dilations)


def convolved(x):
    """Adds a convolution, because ``fuse`` only rewrites programs that have one."""
    flat = x.reshape(-1, 1, x.shape[-1])
    w = jnp.ones((1, x.shape[-1], 1), x.dtype)
    return lax.conv_general_dilated(flat, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))


def step(pool, x, dy):
    """Maxima, their gradient, and a convolution that is not differentiated."""
    (y, z), back = jax.vjp(lambda x: (pool(x), convolved(x)), x)
    return y, back((dy(y) if callable(dy) else dy, jnp.zeros_like(z)))[0], z


def assert_same(actual, expected) -> None:
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == e.dtype
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(e, np.float32))


NHWC = 2, 13, 10, 3
WINDOWS = {
    "3x3 stride 2": (NHWC, (1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), (1, 1), (1, 1), (0, 0))),
    "3x3 stride 1": (NHWC, (1, 3, 3, 1), (1, 1, 1, 1), "SAME"),
    "2x2 stride 2": (NHWC, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
    "NCHW": ((2, 3, 13, 10), (1, 1, 3, 2), (1, 1, 2, 2), "SAME"),
    "sizes, strides and padding that differ": (
        NHWC,
        (1, 5, 2, 1),
        (1, 2, 3, 1),
        ((0, 0), (4, 0), (0, 1), (0, 0)),
    ),
    "windows of padding alone": (
        NHWC,
        (1, 2, 2, 1),
        (1, 2, 2, 1),
        ((0, 0), (3, 2), (0, 4), (0, 0)),
    ),
    "all positions": ((2, 7, 7, 3), (1, 7, 7, 1), (1, 1, 1, 1), "VALID"),
    "one window along an axis": (NHWC, (1, 2, 3, 1), (1, 12, 2, 1), "VALID"),
    "one axis, and examples too": ((4, 15, 3), (2, 5, 1), (1, 2, 1), "SAME"),
    "three axes": ((1, 6, 7, 5, 3), (1, 3, 2, 2, 1), (1, 2, 2, 2, 1), "SAME"),
}


def case(name: str, dtype=jnp.bfloat16):
    """(pooling, its operand, a gradient of its result)."""
    shape, sizes, strides, padding = WINDOWS[name]
    pool = functools.partial(max_pool, sizes=sizes, strides=strides, padding=padding)
    x = integers(*shape, dtype=dtype)
    return pool, x, integers(*jax.eval_shape(pool, x).shape, seed=1, dtype=dtype)


@pytest.mark.parametrize("name", WINDOWS)
def test_ties_go_where_the_program_puts_them(name):
    pool, *arguments = case(name)
    function = functools.partial(step, pool)
    assert left(function, *arguments) == (1, 1, 0)
    assert left(jaxconv.fuse(function), *arguments) == (0, 0, 0)
    assert_same(jax.jit(jaxconv.fuse(function))(*arguments), jax.jit(function)(*arguments))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_infinities_and_nan(dtype):
    """If a window's maximum is NaN, its gradient has the same place as in the unfused program."""
    pool, x, dy = case("3x3 stride 2", dtype)
    drawn = np.random.default_rng(2).random(x.shape)
    x = jnp.where(drawn < 0.2, np.nan, jnp.where(drawn < 0.5, -np.inf, x)).astype(dtype)
    x = x.at[1, :, :, 0].set(-np.inf)
    dy = dy.at[0].set(np.inf)
    function = functools.partial(step, pool)
    actual, expected = jax.jit(jaxconv.fuse(function))(x, dy), jax.jit(function)(x, dy)
    assert_same(actual[:2], expected[:2])
    assert jnp.isnan(actual[0]).any() and not jnp.isnan(actual[1]).any()


def test_sums_are_rounded_once():
    """Sums are float32, so that in 16 bits accuracy does not depend on the number of windows."""
    pool, x, _ = case("3x3 stride 1")
    dy = jnp.asarray(np.random.default_rng(3).standard_normal(x.shape), x.dtype)
    function = jax.jit(jaxconv.fuse(functools.partial(step, pool)))
    _, exact, _ = jax.jit(functools.partial(step, pool))(
        x.astype(jnp.float32), dy.astype(jnp.float32)
    )
    difference = jnp.abs(function(x, dy)[1].astype(jnp.float32) - exact)
    assert (difference <= jnp.abs(exact) * 2.0**-8 + 1e-6).all()


def test_two_gradients_of_one_pooling():
    """Both gradients use the places from one pass over the operand."""
    pool, x, dy = case("2x2 stride 2")

    def function(x, dy):
        (y, z), back = jax.vjp(lambda x: (pool(x), convolved(x)), x)
        none = jnp.zeros_like(z)
        return y, back((dy, none)), back((dy * y, none)), z

    assert left(function, x, dy) == (1, 2, 0)
    assert left(jaxconv.fuse(function), x, dy) == (0, 0, 0)
    assert_same(jax.jit(jaxconv.fuse(function))(x, dy), jax.jit(function)(x, dy))


def test_rematerialised_pooling():
    """The rematerialised program has no maxima, but the gradient."""
    _, x, _ = case("3x3 stride 2")

    @jax.checkpoint
    def layers(x):
        return jnp.sin(max_pool(x * convolved(x).mean(), (1, 3, 3, 1), (1, 2, 2, 1)))

    function = jax.grad(lambda x: layers(x).sum())
    assert left(function, x)[1] == 1
    assert left(jaxconv.fuse(function), x)[1] == 0
    x = x.astype(jnp.float32)
    actual, expected = jax.jit(jaxconv.fuse(function))(x), jax.jit(function)(x)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


SMALL = (1, 2, 2, 1)
LEFT = {
    "no convolution": jax.grad(lambda x: max_pool(x, SMALL, SMALL).sum()),
    "minima": functools.partial(
        step,
        lambda x: lax.reduce_window(x, jnp.inf, lax.min, SMALL, SMALL, "SAME"),
        dy=jnp.ones_like,
    ),
    "a gradient of pooling alone": lambda x: (
        jax.value_and_grad(lambda x: max_pool(x, SMALL, SMALL).astype(jnp.float32).sum())(x),
        convolved(x),
    ),
    "a large window": functools.partial(
        step, lambda x: max_pool(x, (1, 10, 5, 1), (1, 1, 1, 1)), dy=jnp.ones_like
    ),
    "strides that 8 bits do not count": functools.partial(
        step, lambda x: max_pool(x, SMALL, (1, 11, 8, 3), "VALID"), dy=jnp.ones_like
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_other_pooling_stays(name):
    function, x = LEFT[name], integers(*NHWC)
    before = left(function, x)
    assert sum(before) > 0
    assert left(jaxconv.fuse(function), x) == before


def test_a_gradient_outside():
    def loss(x):
        return (max_pool(x, SMALL, SMALL).sum() + convolved(x).sum()).astype(jnp.float32)

    x = integers(*NHWC)
    assert left(jax.grad(loss), x)[1] == 1
    for function in (jax.grad(jaxconv.fuse(loss)), jaxconv.fuse(jax.grad(loss))):
        assert left(function, x) == (0, 0, 0)
        assert_same(jax.jit(function)(x), jax.jit(jax.grad(loss))(x))


def test_forward_derivatives():
    pool, x, _ = case("3x3 stride 2")

    def function(x):
        return jax.jvp(lambda x: (pool(x), convolved(x)), (x,), (-x,))

    assert left(function, x)[2] == 1 and left(jaxconv.fuse(function), x) == (0, 0, 0)
    assert_same(jax.jit(jaxconv.fuse(function))(x), jax.jit(function)(x))


def test_maxima_alone():
    """Without a derivative there are no places to find, so XLA computes the maxima."""

    def function(x):
        return max_pool(x, SMALL, SMALL), convolved(x)

    x = integers(*NHWC)
    found = [e.primitive.name for e in equations(jax.make_jaxpr(jaxconv.fuse(function))(x))]
    assert found.count("jaxconv_max_pool") == 1
    text = jax.jit(jaxconv.fuse(function)).lower(x).as_text()
    assert text.count("reduce_window") == 1 and "ui8" not in text
    assert_same(jax.jit(jaxconv.fuse(function))(x), jax.jit(function)(x))


def test_transformations_of_the_rewritten_program():
    """Derivatives equal the unfused program's, also at ties; vmap works."""
    pool, x, dy = case("3x3 stride 2", jnp.float32)
    function = functools.partial(step, pool)

    def squares(function, x, dy):
        return sum((a**2).sum() for a in function(x, dy))

    for transformed in (
        lambda f: jax.grad(functools.partial(squares, f), argnums=(0, 1)),
        lambda f: lambda x, dy: jax.jvp(f, (x, dy), (x, dy)),
        lambda f: lambda x, dy: jax.vmap(f, in_axes=(0, None))(jnp.stack([x, -x]), dy),
    ):
        actual = jax.jit(transformed(jaxconv.fuse(function)))(x, dy)
        assert_same(actual, jax.jit(transformed(function))(x, dy))


def test_under_shard_map():
    pool, x, dy = case("3x3 stride 2")
    devices = jax.devices("cpu")[:2]
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,), devices=devices)

    def with_convolution(x, dy):
        y, dx, z = step(pool, x, dy)
        return y, dx + 0 * z.sum()

    def whole(fuse):
        function = fuse(with_convolution)
        return jax.shard_map(function, mesh=mesh, in_specs=P("d"), out_specs=P("d"))

    assert left(whole(jaxconv.fuse), x, dy) == (0, 0, 0)
    assert_same(jax.jit(whole(jaxconv.fuse))(x, dy), jax.jit(whole(lambda f: f))(x, dy))


def test_flax():
    """A training step of a convolution and Flax's max pooling."""
    linen = pytest.importorskip("flax.linen")

    class Layers(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = linen.relu(linen.Conv(8, (3, 3))(x))
            x = linen.max_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
            return linen.Dense(1)(linen.max_pool(x, (2, 2), strides=(2, 2)))

    module, x = Layers(), integers(2, 16, 16, 3, dtype=jnp.float32)
    variables = module.init(jax.random.key(0), x)

    def train(variables, x):
        return jax.value_and_grad(lambda v: (module.apply(v, x) ** 2).mean())(variables)

    assert left(train, variables, x) == (2, 2, 0)
    assert left(jaxconv.fuse(train), variables, x) == (0, 0, 0)
    actual, expected = jax.jit(jaxconv.fuse(train))(variables, x), jax.jit(train)(variables, x)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5)
