"""The calls that ``fuse`` makes for GPUs of max pooling after normalised layers.

Programs run on the CPU, where calls are operations of JAX; a test counts the calls.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxprs import equations
from training_programs import WAYS, batch_norm, conv, draw, gradient, mean_error, on_two_devices

import jaxconv
from jaxconv._src.fuse import fuse_convolution

pytestmark = pytest.mark.usefixtures("for_a_gpu_on_the_cpu")

N, H, C = 4, 12, 16
WINDOW = (1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), (1, 1), (1, 1), (0, 0))
CALLS = ("jaxconv_max_pool", "jaxconv_max_pool_gradient", "jaxconv_masked_sums")
OF_XLA = ("reduce_window_max", "select_and_scatter_add", "custom_jvp_call", "jaxconv_normalise")

X = draw(N, H, H, C)
PARAMETERS = {
    "w": 0.1 * draw(3, 3, C, C, seed=1),
    "v": 0.1 * draw(3, 3, C, C, seed=2),
    "u": 0.1 * draw(1, 1, C, C, seed=3),
    "gain": 1 + 0.5 * draw(C, seed=4, dtype=jnp.float32),
    "offset": draw(C, seed=5, dtype=jnp.float32),
}


def max_pool(z, window=WINDOW):
    return lax.reduce_window(z, -jnp.inf, lax.max, *window)


def normalised(p, x):
    return batch_norm(conv(x, p["w"]), p["gain"], p["offset"])


def activation(p, x):
    return jax.nn.relu(normalised(p, x))


def stem(p, x):
    """The first layers of a ResNet; two convolutions read the maxima."""
    pooled = max_pool(activation(p, x))
    return conv(pooled, p["v"]) + conv(pooled, p["u"])


def found(function, *args) -> list:
    return [
        e
        for e in equations(jax.make_jaxpr(function)(*args))
        if any(v.aval.ndim > 1 for v in e.outvars)
    ]


def counts(function, *args, names=CALLS) -> tuple[int, ...]:
    """The number of equations of each kind whose results are arrays."""
    primitives = [e.primitive.name for e in found(function, *args)]
    return tuple(primitives.count(name) for name in names)


def forms(function, *args) -> list:
    """For each ``max_pool`` call: whether it normalises, gives places; its operands and copies."""
    of = [e.params["form"] for e in found(function, *args) if e.primitive.name == CALLS[0]]
    return [(f.affine, f.places, f.operands, f.copies) for f in of]


def the(function, name: str, *args):
    """The only equation of a kind in a program; fails if there are several."""
    (equation,) = (e for e in found(function, *args) if e.primitive.name == name)
    return equation


def assert_gradients(actual, expected, tolerance) -> None:
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == e.dtype and mean_error(a, e) <= tolerance


# --- a training step ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("way", WAYS)
def test_the_activation_is_not_stored(way, dtype):
    """No operation of XLA makes or reads the activation.

    The maxima's call reads y, places mask the gradient, and sums run over the pooled arrays.
    """
    step, x = WAYS[way](stem), X.astype(dtype)
    assert counts(step, PARAMETERS, x) == (1, 1, 1)
    assert counts(step, PARAMETERS, x, names=OF_XLA) == (0, 0, 0, 0)
    assert forms(step, PARAMETERS, x) == [(True, True, True, 2)]
    maxima, _, places, operands = the(step, CALLS[0], PARAMETERS, x).outvars
    assert operands.aval == maxima.aval and places.aval.dtype == jnp.uint8
    # The gradients of two convolutions, and the places.
    back = the(step, CALLS[1], PARAMETERS, x)
    assert back.params["gradients"] == 2
    with_moments = dtype == jnp.bfloat16
    assert [v.aval.shape for v in back.invars[3:]] == [X.shape, (C,), (C,), (C,)] * with_moments
    # The gradients of two convolutions, y at the places, its mean, and the maxima.
    sums = the(step, CALLS[2], PARAMETERS, x)
    assert [a.aval.shape for a in sums.invars[:3]] == [maxima.aval.shape] * 3
    assert sums.invars[-1].aval.shape == maxima.aval.shape and len(sums.invars) == 5


@pytest.mark.parametrize("dtype, tolerance", [(jnp.bfloat16, 0.1), (jnp.float32, 2e-3)])
def test_the_gradients_are_the_programs(dtype, tolerance):
    x = X.astype(dtype)
    expected = jax.jit(gradient(stem))(PARAMETERS, x)
    for way in WAYS.values():
        assert_gradients(jax.jit(way(stem))(PARAMETERS, x), expected, tolerance)


def channels_first(p, x):
    y = batch_norm(conv(x, p["w"]), p["gain"], p["offset"])
    z = jax.nn.relu(jnp.moveaxis(y, -1, 1))
    pooled = lax.reduce_window(z, -jnp.inf, lax.max, *((w[0], w[3], w[1], w[2]) for w in WINDOW))
    return conv(jnp.moveaxis(pooled, 1, -1), p["v"])


def running(p, x):
    """The moments also determine results, with gradients of their own."""
    y = conv(x, p["w"]).astype(jnp.float32)
    mean, var = y.mean((0, 1, 2)), y.var((0, 1, 2))
    z = (y - mean) * lax.rsqrt(var + 1e-5) * p["gain"] + p["offset"]
    return conv(max_pool(jax.nn.relu(z.astype(x.dtype))), p["v"]), 40 * mean, 20 * var


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("forward", [stem, channels_first, running])
def test_one_call_adds_the_gradients_of_the_maxima_and_the_moments(forward, way):
    """Its result is the gradient of the convolution's result, which nothing adds to."""
    step = WAYS[way](forward)
    (gradient_of_y,) = the(step, CALLS[1], PARAMETERS, X).outvars
    readers = [
        e.primitive.name for e in found(step, PARAMETERS, X) for v in e.invars if v is gradient_of_y
    ]
    assert readers and not {*readers} & {"add", "add_any", "mul"}
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), (PARAMETERS, X))
    exact = jax.tree.leaves(jax.jit(gradient(forward))(*wide))
    programs = jax.tree.leaves(jax.jit(gradient(forward))(PARAMETERS, X))
    fused = jax.tree.leaves(jax.jit(step)(PARAMETERS, X))
    for actual, program, e in zip(fused, programs, exact, strict=True):
        assert actual.dtype == program.dtype
        assert mean_error(actual, e) <= 1.2 * mean_error(program, e) + 1e-3


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_some_gradients_of_a_layer_with_moments(kept):
    """Only the maxima, only the mean, or only the variance are differentiated."""

    def one(p, x):
        return running(p, x)[kept]

    expected = jax.jit(gradient(one))(PARAMETERS, X)
    assert_gradients(jax.jit(WAYS["inside"](one))(PARAMETERS, X), expected, 0.05)


def test_forward_derivative_of_a_layer_with_moments():
    tangents = jax.tree.map(jnp.ones_like, PARAMETERS)
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), (PARAMETERS, tangents, X))

    def derivative(forward, p, t, x):
        return jax.jvp(functools.partial(forward, x=x), (p,), (t,))[1]

    expected = jax.jit(functools.partial(derivative, running))(*wide)
    for fused in (
        jax.jit(functools.partial(derivative, jaxconv.fuse(running))),
        jax.jit(jaxconv.fuse(functools.partial(derivative, running))),
    ):
        assert_gradients(
            fused(PARAMETERS, tangents, X),
            jax.tree.map(lambda e, p: e.astype(p.dtype), expected, running(PARAMETERS, X)),
            0.03,
        )


def test_lowered_for_cuda(cuda_calls):
    """Each is one custom call if the CUDA kernels are loaded."""
    for way in WAYS.values():
        traced = jax.jit(way(stem)).trace(PARAMETERS, X)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert [text.count(f"custom_call @{name}(") for name in CALLS] == [1, 1, 1]


@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_flax(library):
    flax = pytest.importorskip(f"flax.{library}")
    window = dict(window_shape=(3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
    if library == "linen":

        class Stem(flax.Module):
            @flax.compact
            def __call__(self, x):
                y = flax.Conv(C, (3, 3), use_bias=False, dtype=x.dtype)(x)
                y = flax.relu(flax.BatchNorm(use_running_average=False, dtype=x.dtype)(y))
                return flax.Conv(C, (1, 1), dtype=x.dtype)(flax.max_pool(y, **window))

        module = Stem()
        variables = module.init(jax.random.key(0), X)

        def forward(p, x):
            return module.apply({**variables, "params": p}, x, mutable=["batch_stats"])[0]

        parameters = variables["params"]
    else:
        linen = pytest.importorskip("flax.linen")
        options = dict(use_bias=False, dtype=X.dtype, rngs=flax.Rngs(0))
        convs = [flax.Conv(C, C, (3, 3), **options), flax.Conv(C, C, (1, 1), **options)]
        norm = flax.BatchNorm(C, dtype=X.dtype, rngs=flax.Rngs(0))
        structure, parameters, rest = flax.split((convs, norm), flax.Param, ...)

        def forward(p, x):
            convs, norm = flax.merge(structure, p, jax.tree.map(jnp.array, rest))
            return convs[1](linen.max_pool(flax.relu(norm(convs[0](x))), **window))

    expected = jax.jit(gradient(forward))(parameters, X)
    for way in WAYS.values():
        assert counts(way(forward), parameters, X) == (1, 1, 1)
        assert_gradients(jax.jit(way(forward))(parameters, X), expected, 0.1)


# --- other readers and other operands -------------------------------------------------------------


def twice_read(p, x):
    """An elementwise operation also reads the maxima: XLA sums the gradients into one."""
    pooled = max_pool(activation(p, x))
    return conv(pooled, p["v"]), pooled * 2


def read_besides(p, x):
    """A convolution also reads the activation, which is therefore stored."""
    z = activation(p, x)
    return conv(z, p["v"]), max_pool(z)


def shortcut(p, x):
    return conv(max_pool(jax.nn.relu(normalised(p, x) + x)), p["v"])


def silu(p, x):
    return conv(max_pool(jax.nn.silu(normalised(p, x))), p["v"])


def where(p, x):
    z = normalised(p, x)
    return conv(max_pool(jnp.where(z > 0, z, 0)), p["v"])


def frozen(p, x):
    q = {**p, "gain": lax.stop_gradient(p["gain"]), "offset": lax.stop_gradient(p["offset"])}
    wide = (conv(x, p["w"]).astype(jnp.float32) - q["offset"]) * q["gain"] + q["offset"]
    return conv(max_pool(jax.nn.relu(wide.astype(x.dtype))), p["v"])


OTHERS = {
    "an elementwise reader": (twice_read, (True, True, True, 1), (1, 1, 0)),
    "a reader of the activation": (read_besides, (False, True, False, 1), (1, 1, 1)),
    "a shortcut": (shortcut, (False, True, False, 1), (1, 1, 1)),
    "silu": (silu, (False, True, False, 1), (1, 1, 1)),
    "where": (where, (False, True, False, 1), (1, 1, 1)),
    "frozen vectors": (frozen, (True, True, True, 1), (1, 1, 0)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OTHERS)
def test_other_readers_and_operands(name, way):
    forward, form, of_calls = OTHERS[name]
    step = WAYS[way](forward)
    assert forms(step, PARAMETERS, X) == [form]
    assert counts(step, PARAMETERS, X) == of_calls
    x = X.astype(jnp.float32)
    expected = jax.jit(gradient(forward))(PARAMETERS, x)
    assert_gradients(jax.jit(WAYS[way](forward))(PARAMETERS, x), expected, 2e-3)


@pytest.mark.parametrize("forward", [stem, where])
def test_nan_is_what_the_program_makes_of_it(forward):
    parameters = {**PARAMETERS, "gain": PARAMETERS["gain"].at[0].set(jnp.nan)}
    expected = jax.jit(forward)(parameters, X.astype(jnp.float32))
    actual = jax.jit(jaxconv.fuse(forward))(parameters, X.astype(jnp.float32))
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
    assert np.isnan(expected).any() == (forward is stem)


@pytest.mark.parametrize("for_cuda", [True, False])
def test_a_concatenation_is_stored_before_its_average(for_cuda, monkeypatch):
    monkeypatch.setattr(fuse_convolution, "for_cuda", lambda: for_cuda)

    def block(p, x):
        both = jnp.concatenate([activation(p, x), x], -1)
        sums = lax.reduce_window(both, 0.0, lax.add, (1, 3, 3, 1), (1, 1, 1, 1), "SAME")
        return (both[..., :8] * 2).sum(), sums

    x = X.astype(jnp.float32)
    jaxpr = jax.make_jaxpr(jaxconv.fuse(block))(PARAMETERS, x)
    found = [e.primitive.name for e in equations(jaxpr)]
    assert found.count("optimization_barrier") == for_cuda
    expected = jax.jit(jax.grad(lambda *a: block(*a)[0]))(PARAMETERS, x)
    actual = jax.jit(jax.grad(lambda *a: jaxconv.fuse(block)(*a)[0]))(PARAMETERS, x)
    assert_gradients(actual, expected, 2e-3)
    np.testing.assert_allclose(
        jax.jit(jaxconv.fuse(block))(PARAMETERS, x)[1], block(PARAMETERS, x)[1], 1e-4, 1e-4
    )


def test_inference_has_no_places():
    """Pooling of an argument, of batch norm with the batch's statistics, and of other maxima."""

    def forward(p, x):
        return max_pool(x), max_pool(max_pool(activation(p, x)))

    fused = jaxconv.fuse(forward)
    assert counts(fused, PARAMETERS, X) == (3, 0, 0)
    assert sorted(forms(fused, PARAMETERS, X)) == [
        (False, False, False, 1),
        (False, False, False, 1),
        (True, False, False, 1),
    ]
    actual, expected = jax.jit(fused)(PARAMETERS, X), jax.jit(forward)(PARAMETERS, X)
    assert_gradients(actual, expected, 0.02)


def test_no_calls_without_a_convolution():
    assert counts(jaxconv.fuse(lambda p, x: max_pool(x)), PARAMETERS, X) == (0, 0, 0)


# --- transformations ------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_rematerialised(way):
    """The forward pass runs again, and nothing else normalises."""
    forward = jax.checkpoint(stem)
    step = WAYS[way](forward)
    assert counts(step, PARAMETERS, X, names=OF_XLA) == (0, 0, 0, 0)
    assert counts(step, PARAMETERS, X) == (2, 1, 1)
    expected = jax.jit(gradient(forward))(PARAMETERS, X)
    assert_gradients(jax.jit(step)(PARAMETERS, X), expected, 0.1)


@pytest.mark.parametrize("dtype, tolerance", [(jnp.bfloat16, 0.1), (jnp.float32, 5e-3)])
def test_derivatives_of_the_gradient(dtype, tolerance):
    x = X.astype(dtype)

    def squares(step, p):
        return sum((g**2).sum() for g in jax.tree.leaves(step(p, x)))

    expected = jax.jit(jax.grad(functools.partial(squares, gradient(stem))))(PARAMETERS)
    for way in WAYS.values():
        actual = jax.jit(jax.grad(functools.partial(squares, way(stem))))(PARAMETERS)
        assert_gradients(actual, expected, tolerance)


@pytest.mark.parametrize("dtype, tolerance", [(jnp.bfloat16, 0.1), (jnp.float32, 2e-3)])
def test_under_vmap(dtype, tolerance):
    xs = jnp.stack([X, 2 * X]).astype(dtype)
    mapped = functools.partial(jax.vmap, in_axes=(None, 0))
    expected = jax.jit(mapped(gradient(stem)))(PARAMETERS, xs)
    for step in (mapped(jaxconv.fuse(gradient(stem))), jaxconv.fuse(mapped(gradient(stem)))):
        assert_gradients(jax.jit(step)(PARAMETERS, xs), expected, tolerance)


def test_under_shard_map():
    fused = on_two_devices(gradient(stem), jaxconv.fuse)
    assert counts(fused, PARAMETERS, X) == (1, 1, 1)
    expected = jax.jit(on_two_devices(gradient(stem), lambda f: f))(PARAMETERS, X)
    assert_gradients(jax.jit(fused)(PARAMETERS, X), expected, 0.1)


@pytest.mark.parametrize("dtype, tolerance", [(jnp.bfloat16, 0.1), (jnp.float32, 2e-3)])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_over_devices(kind, dtype, tolerance):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(kind,), devices=jax.devices("cpu")[:2])
    with jax.set_mesh(mesh):
        x = jax.device_put(X.astype(dtype), NamedSharding(mesh, P("d")))
        p = jax.device_put(PARAMETERS, NamedSharding(mesh, P()))
        expected = jax.jit(gradient(stem))(p, x)
        for way in WAYS.values():
            assert_gradients(jax.jit(way(stem))(p, x), expected, tolerance)
