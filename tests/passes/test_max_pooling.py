"""The primitives max_pool and max_pool_gradient: operations in JAX, calls, and CUDA kernels.

The operations are compared with lax, and the kernels with the operations.
``test_emulated_kernels`` runs the kernels without a GPU.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jaxconv
from jaxconv._src.library import native
from jaxconv._src.passes import max_pool_gradient, max_pooling
from jaxconv._src.passes.max_pooling import NO_PLACE, Pooling, Windows

NONE = (0, 0)
WINDOWS = {
    "3x3 stride 2": Windows(
        (2, 13, 10, 24), (1, 3, 3, 1), (1, 2, 2, 1), (NONE, (1, 1), (1, 1), NONE)
    ),
    "3x3 stride 1": Windows(
        (3, 9, 7, 64), (1, 3, 3, 1), (1, 1, 1, 1), (NONE, (1, 1), (1, 1), NONE)
    ),
    "2x2 stride 2": Windows((2, 12, 9, 16), (1, 2, 2, 1), (1, 2, 2, 1), (NONE,) * 4),
    "5x4": Windows((1, 11, 9, 8), (1, 5, 4, 1), (1, 2, 3, 1), (NONE, (2, 2), (1, 0), NONE)),
    "all positions": Windows((2, 7, 7, 2048), (1, 7, 7, 1), (1, 7, 7, 1), (NONE,) * 4),
    "one axis": Windows((1, 23, 40), (1, 5, 1), (1, 4, 1), (NONE, (3, 0), NONE)),
    "three axes": Windows(
        (2, 6, 7, 5, 8), (1, 3, 2, 3, 1), (1, 2, 2, 1, 1), (NONE, (1, 0), NONE, (1, 1), NONE)
    ),
    "windows of padding alone": Windows(
        (1, 5, 6, 8), (1, 2, 2, 1), (1, 2, 2, 1), (NONE, (3, 4), (2, 4), NONE)
    ),
    "a walk of several windows": Windows(
        (64, 56, 28, 64), (1, 3, 3, 1), (1, 2, 2, 1), (NONE, (1, 1), (1, 1), NONE)
    ),
}
SMALL = [name for name in WINDOWS if name != "a walk of several windows"]
DTYPES = [jnp.bfloat16, jnp.float16, np.float32]


@pytest.fixture
def on_the_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.fixture
def for_a_gpu(on_the_cpu, cuda_calls):
    """Lowers programs as if the CUDA kernels were loaded."""


def integers(*shape: int, seed: int = 0, dtype=jnp.bfloat16) -> jax.Array:
    """Few different integers, so that windows have several maxima, and sums are exact."""
    return jnp.asarray(np.random.default_rng(seed).integers(-2, 3, shape), dtype)


def with_nan(x: jax.Array) -> jax.Array:
    drawn = np.random.default_rng(5).random(x.shape)
    return jnp.where(drawn < 0.1, np.nan, jnp.where(drawn < 0.3, -np.inf, x)).astype(x.dtype)


def vectors(channels: int) -> list[jax.Array]:
    """Vectors for the mean, scale and offset."""
    return [integers(channels, seed=seed, dtype=np.float32) for seed in (1, 2, 3)]


def activated(x, mean, scale, offset):
    return jax.nn.relu(((x.astype(np.float32) - mean) * scale + offset).astype(x.dtype))


def by_lax(z: jax.Array, windows: Windows) -> jax.Array:
    return lax.reduce_window(z, -jnp.inf, lax.max, windows.sizes, windows.strides, windows.padding)


def assert_equal(actual, expected) -> None:
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == e.dtype
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(e, np.float32))


def pooled_and_back(x, dy, given, windows: Windows):
    """Computes the maxima and the gradient by the primitives."""
    form = Pooling(windows, bool(given), True, bool(given))
    maxima, places, *operands = max_pooling.max_pool(x, *given, form=form)
    return (
        maxima,
        max_pool_gradient.max_pool_gradient([dy], places, windows=windows),
        places,
        operands,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SMALL)
def test_operations_of_jax(name, dtype, on_the_cpu):
    """Maxima and gradients equal lax's, also for ties, NaN and infinities."""
    windows = WINDOWS[name]
    x = integers(*windows.shape, dtype=dtype)
    if dtype != np.float32:  # XLA:CPU loses some NaN in float32
        x = with_nan(x)
    dy = integers(*windows.counts, seed=1, dtype=dtype)
    assert max_pooling.accepts(windows, np.dtype(dtype))
    pool = functools.partial(by_lax, windows=windows)
    expected, back = jax.vjp(pool, x)
    maxima, dx, places, _ = pooled_and_back(x, dy, [], windows)
    assert_equal((maxima, dx), (expected, *back(dy)))
    assert places.dtype == np.uint8
    (alone,) = max_pooling.max_pool(x, form=Pooling(windows, False, False, False))
    assert_equal(alone, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SMALL)
def test_batch_norm_and_relu_in_front(name, dtype, on_the_cpu):
    """The gradient is masked by relu; the operand is x at the place."""
    windows = WINDOWS[name]
    x, given = integers(*windows.shape, dtype=dtype), vectors(windows.shape[-1])
    dy = integers(*windows.counts, seed=4, dtype=dtype)
    z = activated(x, *given)
    expected, back = jax.vjp(functools.partial(by_lax, windows=windows), z)
    maxima, dx, places, (operands,) = pooled_and_back(x, dy, given, windows)
    assert_equal((maxima, dx), (expected, jnp.where(z > 0, *back(dy), 0).astype(dtype)))
    np.testing.assert_array_equal(places == NO_PLACE, ~(np.asarray(maxima, np.float32) > 0))
    assert_equal(jnp.where(maxima > 0, activated(operands, *given), 0), jnp.maximum(maxima, 0))
    # The sums of the masked gradient, and of its products with x, equal sums over the windows.
    of_windows = jnp.where(maxima > 0, dy, 0).astype(np.float32)
    for other, there in ((1, 1), (x.astype(np.float32), operands.astype(np.float32))):
        axes = tuple(range(x.ndim - 1))
        assert_equal((of_windows * there).sum(axes), (dx.astype(np.float32) * other).sum(axes))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SMALL)
def test_the_gradient_of_batch_norms_operand(name, dtype, on_the_cpu):
    windows = WINDOWS[name]
    x, given = integers(*windows.shape, dtype=dtype), vectors(windows.shape[-1])
    dy = integers(*windows.counts, seed=4, dtype=dtype)
    _, places = max_pooling.max_pool(x, form=Pooling(windows, False, True, False))
    gradient = functools.partial(max_pool_gradient.max_pool_gradient, windows=windows)
    scale, y_scale, offset = given
    dz, y = gradient([dy], places).astype(np.float32), x.astype(np.float32)
    expected = (dz * scale + y * y_scale + offset).astype(dtype)
    assert_equal(gradient([dy], places, x, *given), expected)


def test_two_gradients_are_added_as_the_program_adds_them(on_the_cpu):
    windows = WINDOWS["3x3 stride 2"]
    x = integers(*windows.shape)
    _, places = max_pooling.max_pool(x, form=Pooling(windows, False, True, False))
    key = jax.random.key(0)
    dy, dy2 = jax.random.normal(key, (2, *windows.counts), jnp.bfloat16)
    gradient = functools.partial(max_pool_gradient.max_pool_gradient, windows=windows)
    assert_equal(gradient([dy, dy2], places), gradient([dy + dy2], places))


LEFT = {
    "channels": Windows((2, 8, 8, 12), (1, 2, 2, 1), (1, 2, 2, 1), (NONE,) * 4),
    "channels first": Windows((2, 8, 8, 16), (1, 1, 2, 2), (1, 1, 2, 2), (NONE,) * 4),
    "examples": Windows((4, 8, 8, 16), (2, 2, 2, 1), (2, 2, 2, 1), (NONE,) * 4),
    "no spatial axis": Windows((4, 16), (1, 1), (1, 1), (NONE,) * 2),
    "four spatial axes": Windows((2, 4, 4, 4, 4, 8), (1,) * 6, (1,) * 6, (NONE,) * 6),
    "a large window": Windows((2, 20, 20, 8), (1, 10, 5, 1), (1, 5, 5, 1), (NONE,) * 4),
    "numbers of places": Windows((1, 32, 32, 8), (1, 16, 2, 1), (1, 16, 20, 1), (NONE,) * 4),
    "a long axis": Windows((1, 2**30, 8), (1, 2, 1), (1, 2, 1), (NONE,) * 3),
    "too many elements": Windows((2**14, 2**10, 2**9, 8), (1, 2, 2, 1), (1, 2, 2, 1), (NONE,) * 4),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_the_kernels_do_not_take(name):
    assert not max_pooling.accepts(LEFT[name], np.dtype(jnp.bfloat16))


def test_float64_is_left():
    windows = WINDOWS["3x3 stride 2"]
    assert not max_pooling.accepts(windows, np.dtype(np.float64))


# --- calls ----------------------------------------------------------------------------------------


def lowered(function, *args) -> str:
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def calls(text: str) -> tuple[int, int]:
    """The number of calls for maxima and for gradients in a lowered program."""
    return text.count("@jaxconv_max_pool("), text.count("@jaxconv_max_pool_gradient(")


def operands(windows: Windows) -> tuple:
    x, dy = integers(*windows.shape), integers(*windows.counts)
    return x, dy, vectors(windows.shape[-1])


@pytest.mark.parametrize("name", WINDOWS)
def test_one_call_each(name, for_a_gpu):
    windows = WINDOWS[name]
    text = lowered(functools.partial(pooled_and_back, windows=windows), *operands(windows))
    assert calls(text) == (1, 1)
    assert "reduce_window" not in text and "stablehlo.pad" not in text


def test_a_call_with_every_operand(for_a_gpu):
    windows = WINDOWS["3x3 stride 2"]
    x, dy, given = operands(windows)

    def function(dy, x, places, given):
        gradients = [dy, 2 * dy]
        return max_pool_gradient.max_pool_gradient(gradients, places, x, *given, windows=windows)

    text = lowered(function, dy, x, jnp.zeros(dy.shape, np.uint8), given)
    assert calls(text) == (0, 1) and "tensor<0xf32>" not in text


def test_the_attributes_of_a_call(for_a_gpu):
    windows = WINDOWS["5x4"]
    text = lowered(functools.partial(pooled_and_back, windows=windows), *operands(windows))
    for name, numbers in (("sizes", "5, 4"), ("strides", "2, 3"), ("padding", "2, 1")):
        assert text.count(f"{name} = dense<[{numbers}]> : tensor<2xi64>") == 2


def test_no_calls_without_the_kernels(on_the_cpu, monkeypatch):
    refusal = native.Refusal("jaxconv[cuda]", "not built")
    monkeypatch.setattr(native, "load", lambda name: refusal)
    windows = WINDOWS["3x3 stride 2"]
    text = lowered(functools.partial(pooled_and_back, windows=windows), *operands(windows))
    assert calls(text) == (0, 0)


def test_no_calls_under_vmap(for_a_gpu):
    windows = WINDOWS["3x3 stride 2"]
    function = functools.partial(pooled_and_back, windows=windows)
    x, dy, given = operands(windows)
    both = jnp.stack([x, -x])
    mapped = jax.vmap(function, in_axes=(0, None, None))
    assert calls(lowered(mapped, both, dy, given)) == (0, 0)
    for i in range(2):
        actual = jax.tree.map(lambda a, i=i: a[i], mapped(both, dy, given))
        assert_equal(actual, function(both[i], dy, given))


def test_under_sharding(for_a_gpu):
    """Under shard_map a device calls the kernels; XLA splits other programs when it compiles."""
    windows = WINDOWS["3x3 stride 2"]
    devices = jax.devices("cpu")[:2]
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,), devices=devices)
    x, dy, given = operands(windows)
    function = functools.partial(pooled_and_back, windows=windows)
    local = functools.partial(
        pooled_and_back, windows=dataclasses.replace(windows, shape=(1, *windows.shape[1:]))
    )
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P("d"), P("d"), P()), out_specs=P("d"))
    assert calls(lowered(mapped, x, dy, given)) == (1, 1)
    assert_equal(jax.jit(mapped)(x, dy, given), function(x, dy, given))
    split = jax.sharding.NamedSharding(mesh, P("d"))
    whole = jax.sharding.NamedSharding(mesh, P())
    jitted = jax.jit(function, in_shardings=(split, split, whole))
    traced = jitted.trace(x, dy, given).lower(lowering_platforms=("cuda",))
    assert calls(traced.as_text()) == (0, 0)
    assert_equal(jitted(x, dy, given), function(x, dy, given))


def test_exported(for_a_gpu):
    windows = WINDOWS["2x2 stride 2"]
    function = jax.jit(functools.partial(pooled_and_back, windows=windows))
    exported = jax.export.export(
        function, platforms=["cuda"], disabled_checks=jaxconv.export.disabled_checks()
    )(*operands(windows))
    assert calls(exported.mlir_module()) == (1, 1)


# --- derivatives ----------------------------------------------------------------------------------


@pytest.mark.parametrize("affine", [False, True])
def test_derivatives_of_the_maxima(affine, on_the_cpu):
    """Derivatives equal the program's, also if windows have several maxima."""
    windows = WINDOWS["3x3 stride 2"]
    x, dy, given = operands(windows)
    given = given if affine else []
    form = Pooling(windows, affine, True, affine)

    def ours(x, *given):
        return max_pooling.max_pool(x, *given, form=form)[0]

    def program(x, *given):
        return by_lax(activated(x, *given) if given else x, windows)

    (actual, back), (expected, expected_back) = (jax.vjp(f, x, *given) for f in (ours, program))
    assert_equal(actual, expected)
    assert_equal(back(dy), expected_back(dy))


def test_derivatives_to_second_order(on_the_cpu):
    windows = Windows((1, 5, 4, 8), (1, 3, 2, 1), (1, 2, 1, 1), (NONE, (1, 1), NONE, NONE))
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.permutation(np.prod(windows.shape)).reshape(windows.shape), np.float32) / 40
    given = [jnp.asarray(rng.uniform(0.5, 1, 8), np.float32) for _ in range(3)]
    form = Pooling(windows, True, True, True)

    def function(x, *given):
        maxima, places, taken = max_pooling.max_pool(x, *given, form=form)
        pooled = [maxima**2, taken], places
        back = max_pool_gradient.max_pool_gradient(*pooled, windows=windows)
        return (
            maxima,
            taken,
            back,
            max_pool_gradient.max_pool_gradient(*pooled, x, *given, windows=windows),
        )

    check_grads(function, (x, *given), order=2, atol=2e-2, rtol=2e-2)


# --- kernels --------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WINDOWS)
def test_kernels(name, dtype, affine):
    """Maxima, places and operands have the bits of the JAX operations, as do the gradients.

    Gradients of normal numbers round equally, too, because the order of additions is the same.
    """
    windows = WINDOWS[name]
    x = integers(*windows.shape, dtype=dtype)
    given = vectors(windows.shape[-1]) if affine else []
    x = x if affine else with_nan(x)
    form = Pooling(windows, affine, True, affine)
    pool = jax.jit(functools.partial(max_pooling.max_pool, form=form))
    assert 'custom_call_target="jaxconv_max_pool"' in pool.lower(x, *given).compile().as_text()
    found = pool(x, *given)
    assert_equal(found, jax.jit(functools.partial(max_pooling.in_jax, form=form))(x, *given))
    alone = Pooling(windows, affine, False, False)
    assert_equal(jax.jit(functools.partial(max_pooling.max_pool, form=alone))(x, *given), found[:1])
    dy, dy2 = jax.random.normal(jax.random.key(0), (2, *windows.counts), dtype)
    whole = integers(*windows.counts, seed=7, dtype=dtype)
    for gradients, normalised in (
        ([dy], []),
        ([dy, dy2], []),
        ([whole], [x, *given] if affine else []),
        ([whole, whole], [x, *given] if affine else []),
    ):
        back = jax.jit(functools.partial(max_pool_gradient.max_pool_gradient, windows=windows))
        defined = functools.partial(
            max_pool_gradient.in_jax, windows=windows, gradients=len(gradients)
        )
        assert_equal(
            back(gradients, found[1], *normalised),
            jax.jit(defined)(*gradients, found[1], *normalised),
        )


@pytest.mark.gpu
@pytest.mark.parametrize(
    "at, change, said",
    [
        (0, lambda a: a.astype(np.int32), "x: expected dtype"),
        (1, lambda a: jnp.ones(8), "scale: expected shape"),
    ],
)
def test_a_handler_names_the_buffer_that_does_not_match(at, change, said, registered_cuda_kernels):
    given = [jnp.ones((2, 4, 4, 8), jnp.bfloat16), *[jnp.zeros(0)] * 3]
    given[at] = change(given[at])
    pooled = jax.ShapeDtypeStruct((2, 2, 2, 8), jnp.bfloat16)
    none = jax.ShapeDtypeStruct((0,), np.float32)
    call = jax.ffi.ffi_call(max_pooling.TARGET, (pooled, none, none))
    two = np.array([2, 2], np.int64)
    attributes = dict(sizes=two, strides=two, padding=0 * two)
    with pytest.raises(Exception, match=said):
        jax.block_until_ready(jax.jit(lambda *a: call(*a, **attributes))(*given))
