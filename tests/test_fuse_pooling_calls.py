"""What ``fuse`` makes of max pooling for GPUs: calls of kernels, also where no gradient is taken.

Programs are run on the CPU, where the calls are operations of JAX; a test counts them.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxprs import equations
from training_programs import assert_close, batch_norm, conv, draw, fused_without, on_two_devices

import jaxconv
from jaxconv._src.fuse import fuse_pooling
from jaxconv._src.passes.max_pooling import Pooling, Windows
from jaxconv.bench.networks import NETWORKS, programs

pytestmark = pytest.mark.usefixtures("for_a_gpu_on_the_cpu")

N, H, C = 4, 12, 16
WINDOW = (1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), (1, 1), (1, 1), (0, 0))
WINDOWS = Windows((N, H, H, C), *WINDOW)
PLAIN = Pooling(WINDOWS, affine=False, places=False, operands=False)
CALLS = ("jaxconv_max_pool", "jaxconv_max_pool_gradient", "jaxconv_masked_sums")
OF_XLA = ("reduce_window_max", "select_and_scatter_add", "custom_jvp_call", "select_n")


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
    """The first layers of a ResNet: two convolutions read the maxima."""
    pooled = max_pool(activation(p, x))
    return conv(pooled, p["v"]) + conv(pooled, p["u"])


def gradient(forward):
    def loss(p, x):
        return sum((y.astype(jnp.float32) ** 2).mean() for y in jax.tree.leaves(forward(p, x)))

    return jax.grad(loss, argnums=(0, 1))


def primitives(function, *args, names=CALLS) -> tuple[int, ...]:
    """How many equations of each kind a program has, of arrays."""
    found = [
        e.primitive.name
        for e in equations(jax.make_jaxpr(function)(*args))
        if any(v.aval.ndim > 1 for v in e.outvars)
    ]
    return tuple(found.count(name) for name in names)


def the(function, name: str, *args):
    """The only equation of a kind in a program."""
    (found,) = (e for e in equations(jax.make_jaxpr(function)(*args)) if e.primitive.name == name)
    return found


@pytest.fixture
def without_calls(monkeypatch):
    """A function that is fused, but for the calls. The program differs from it by more: statistics
    of a convolution's call are rounded otherwise, and so are the elements that windows compare."""
    return fused_without(monkeypatch, fuse_pooling, "with_calls")


# --- a training step ------------------------------------------------------------------------------


def test_the_activation_is_not_stored():
    """The maxima's call reads y, the gradient is masked by the places, and the sums are those of
    the pooled arrays: no operation of XLA makes or reads the activation."""
    step = gradient(stem)
    assert primitives(step, PARAMETERS, X, names=OF_XLA) == (1, 1, 1, 1)
    fused = jaxconv.fuse(step)
    assert primitives(fused, PARAMETERS, X) == (1, 1, 1)
    assert primitives(fused, PARAMETERS, X, names=OF_XLA) == (0, 0, 0, 0)
    pool = the(fused, "jaxconv_max_pool", PARAMETERS, X)
    assert pool.params["form"] == Pooling(WINDOWS, affine=True, places=True, operands=True)
    maxima, places, operands = pool.outvars
    convolved = next(
        e
        for e in equations(jax.make_jaxpr(fused)(PARAMETERS, X))
        if e.outvars[0].aval.shape == X.shape
    )
    assert convolved.primitive.name in ("conv_general_dilated", "jaxconv_fused")
    # Two convolutions' gradients, places; and y and vectors, for the gradient of y itself.
    back = the(fused, "jaxconv_max_pool_gradient", PARAMETERS, X)
    assert back.params["gradients"] == 2 and len(back.invars) == 7
    assert back.invars[3].aval == X.aval
    sums = the(fused, "jaxconv_masked_sums", PARAMETERS, X)
    assert [a.aval.shape for a in sums.invars[:3]] == [maxima.aval.shape] * 3
    assert sums.invars[-1].aval.shape == maxima.aval.shape
    # Two convolutions' gradients, y at the places, its mean, and the maxima.
    assert len(sums.invars) == 5 and operands.aval == maxima.aval and places.aval.dtype == np.uint8


def test_the_gradients_are_the_programs(without_calls):
    step = gradient(stem)
    actual = jax.jit(jaxconv.fuse(step))(PARAMETERS, X)
    assert_close(actual, jax.jit(without_calls(step))(PARAMETERS, X), 0.01)
    assert_close(actual, jax.jit(step)(PARAMETERS, X), 0.15)


def test_lowered_for_cuda(cuda_calls):
    """One custom call for each, where the CUDA kernels are loaded."""
    fused = jax.jit(jaxconv.fuse(gradient(stem)))
    text = fused.trace(PARAMETERS, X).lower(lowering_platforms=("cuda",)).as_text()
    assert [text.count(f"custom_call @{name}(") for name in CALLS] == [1, 1, 1]


@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_flax(library, without_calls):
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

    step = gradient(forward)
    assert primitives(jaxconv.fuse(step), parameters, X) == (1, 1, 1)
    assert len(the(jaxconv.fuse(step), CALLS[1], parameters, X).invars) == 6
    actual = jax.jit(jaxconv.fuse(step))(parameters, X)
    assert_close(actual, jax.jit(without_calls(step))(parameters, X), 0.01)


def test_one_gradient_of_the_maxima(without_calls):
    """An elementwise operation's sum is one array: the call would read what nothing stores."""

    def forward(p, x):
        pooled = max_pool(activation(p, x))
        return conv(pooled, p["v"]), pooled * 2

    fused = jaxconv.fuse(gradient(forward))
    assert primitives(fused, PARAMETERS, X) == (1, 1, 1)
    assert the(fused, "jaxconv_max_pool_gradient", PARAMETERS, X).params["gradients"] == 1
    actual = jax.jit(fused)(PARAMETERS, X)
    assert_close(actual, jax.jit(without_calls(gradient(forward)))(PARAMETERS, X), 0.01)


STORED = {
    "it is returned": lambda dz, y, gain: (dz, dz * gain),
    "a product with itself": lambda dz, y, gain: dz * dz + y * gain,
    "a product with another array": lambda dz, y, gain: dz * y,
    "two results": lambda dz, y, gain: (jnp.sin(dz * gain), dz * gain + y),
    "many sums": lambda dz, y, gain: functools.reduce(lambda d, _: d + d * gain, range(40), dz) + y,
}


@pytest.mark.parametrize("name", STORED)
def test_a_gradient_that_is_stored(name, without_calls):
    """No sum of products with vectors alone is computed from it, or not only."""

    def function(p, x, dy):
        y = conv(x, p["w"])
        operand = batch_norm(y, p["gain"], p["offset"])
        pooled, back = jax.vjp(max_pool, jax.nn.relu(operand))
        dz = jnp.where(operand > 0, *back(dy), 0).astype(jnp.float32)
        return conv(pooled, p["v"]), STORED[name](dz, y.astype(jnp.float32), p["gain"] / 4)

    dy = draw(*WINDOWS.counts, seed=6)
    fused = jaxconv.fuse(function)
    assert primitives(fused, PARAMETERS, X, dy) == (1, 1, 0)
    assert len(the(fused, CALLS[1], PARAMETERS, X, dy).invars) == 2
    actual = jax.jit(fused)(PARAMETERS, X, dy)
    assert_close(actual, jax.jit(without_calls(function))(PARAMETERS, X, dy), 0.01)


LINEAR = {
    "the mean's gradient": lambda dz, y, gain: (dz - gain) * gain - y / gain,
    "negated": lambda dz, y, gain: -(gain * dz) + 3.0,
    "roundings": lambda dz, y, gain: (dz * gain).astype(jnp.bfloat16) + y.astype(jnp.bfloat16),
}


@pytest.mark.parametrize("name", LINEAR)
def test_a_gradient_of_the_operand_in_any_form(name, without_calls):
    def function(p, x, dy):
        y = conv(x, p["w"])
        operand = batch_norm(y, p["gain"], p["offset"])
        pooled, back = jax.vjp(max_pool, jax.nn.relu(operand))
        dz = jnp.where(operand > 0, *back(dy), 0).astype(jnp.float32)
        dx = LINEAR[name](dz, y.astype(jnp.float32), p["gain"])
        return conv(pooled, p["v"]), conv(dx.astype(y.dtype), p["w"])

    dy = draw(*WINDOWS.counts, seed=6)
    fused = jaxconv.fuse(function)
    assert len(the(fused, CALLS[1], PARAMETERS, X, dy).invars) == 6
    actual = jax.jit(fused)(PARAMETERS, X, dy)
    assert_close(actual, jax.jit(without_calls(function))(PARAMETERS, X, dy), 0.01)


def test_an_activation_that_is_stored(without_calls):
    """A convolution reads it too: the maxima's call reads it, and its mask is taken from it."""

    def forward(p, x):
        z = activation(p, x)
        return conv(z, p["v"]), max_pool(z)

    fused = jaxconv.fuse(gradient(forward))
    assert primitives(fused, PARAMETERS, X)[:2] == (1, 1)
    assert the(fused, CALLS[0], PARAMETERS, X).params["form"] == Pooling(
        WINDOWS, False, True, False
    )
    actual = jax.jit(fused)(PARAMETERS, X)
    assert_close(actual, jax.jit(without_calls(gradient(forward)))(PARAMETERS, X), 0.01)


def test_pooling_of_a_convolutions_result(without_calls):
    def forward(p, x):
        return conv(max_pool(jax.nn.relu(conv(x, p["w"]) + p["offset"].astype(x.dtype))), p["v"])

    with jaxconv.override(algorithm="native"):
        fused = jaxconv.fuse(gradient(forward))
        calls = primitives(fused, PARAMETERS, X)
        actual = jax.jit(fused)(PARAMETERS, X)
    assert calls[2] == 0 and calls[0] == calls[1]
    assert_close(actual, jax.jit(without_calls(gradient(forward)))(PARAMETERS, X), 0.01)


def test_rematerialised(without_calls):
    """The program that computes the activation again has no maxima, but the gradient."""
    step = gradient(jax.checkpoint(stem))
    fused = jaxconv.fuse(step)
    assert primitives(fused, PARAMETERS, X, names=OF_XLA)[:2] == (0, 0)
    assert primitives(fused, PARAMETERS, X)[1] == 1
    assert_close(jax.jit(fused)(PARAMETERS, X), jax.jit(without_calls(step))(PARAMETERS, X), 0.01)


# --- inference ------------------------------------------------------------------------------------


def test_maxima_alone():
    """Of an argument, of batch norm with the batch's statistics, and of maxima."""

    def forward(p, x):
        return max_pool(x), max_pool(max_pool(activation(p, x)))

    fused = jaxconv.fuse(forward)
    assert primitives(fused, PARAMETERS, X) == (3, 0, 0)
    forms = [
        e.params["form"]
        for e in equations(jax.make_jaxpr(fused)(PARAMETERS, X))
        if e.primitive.name == CALLS[0]
    ]
    assert sorted(f.affine for f in forms) == [False, False, True]
    assert not any(f.places for f in forms)
    assert_close(jax.jit(fused)(PARAMETERS, X), jax.jit(forward)(PARAMETERS, X), 0.01)


# --- what stays -----------------------------------------------------------------------------------

CHANNELS_FIRST = (1, 1, 3, 3), (1, 1, 2, 2), ((0, 0), (0, 0), (1, 1), (1, 1))
LEFT = {
    "the activation is returned": lambda p, x: (max_pool(z := activation(p, x)), z),
    "another activation": lambda p, x: max_pool(jax.nn.silu(normalised(p, x))),
    "a shortcut": lambda p, x: max_pool(jax.nn.relu(normalised(p, x) + x)),
    "channels first": lambda p, x: (max_pool(x, CHANNELS_FIRST), conv(x, p["w"])),
    "float32": lambda p, x: (max_pool(x.astype(jnp.float32)), conv(x, p["w"])),
    "no convolution": lambda p, x: max_pool(x),
}


@pytest.mark.parametrize("name", LEFT)
def test_no_calls(name):
    for function in (LEFT[name], gradient(LEFT[name])):
        fused = jaxconv.fuse(function)
        assert primitives(fused, PARAMETERS, X)[:2] == (0, 0)
        assert_close(jax.jit(fused)(PARAMETERS, X), jax.jit(function)(PARAMETERS, X), 0.15)


def test_no_calls_for_a_cpu(monkeypatch):
    monkeypatch.delenv("JAXCONV_TARGET")
    assert primitives(jaxconv.fuse(gradient(stem)), PARAMETERS, X) == (0, 0, 0)
    assert primitives(jaxconv.fuse(stem), PARAMETERS, X) == (0, 0, 0)


# --- transformations of the rewritten program -----------------------------------------------------


def test_derivatives_of_the_gradient(without_calls):
    step = gradient(stem)

    def squares(step, p):
        return sum((g.astype(jnp.float32) ** 2).sum() for g in jax.tree.leaves(step(p, X)))

    actual, expected = (
        jax.jit(jax.grad(functools.partial(squares, f)))(PARAMETERS)
        for f in (jaxconv.fuse(step), without_calls(step))
    )
    assert_close(actual, expected, 0.03)


def test_a_gradient_outside():
    actual = jax.jit(gradient(jaxconv.fuse(stem)))(PARAMETERS, X)
    assert_close(actual, jax.jit(gradient(stem))(PARAMETERS, X), 0.15)


def test_under_vmap(without_calls):
    step, xs = gradient(stem), jnp.stack([X, 2 * X])
    actual, expected = (
        jax.jit(jax.vmap(f, in_axes=(None, 0)))(PARAMETERS, xs)
        for f in (jaxconv.fuse(step), without_calls(step))
    )
    assert_close(actual, expected, 0.01)


def test_under_shard_map(without_calls):
    distributed = functools.partial(on_two_devices, gradient(stem))
    assert primitives(distributed(jaxconv.fuse), PARAMETERS, X) == (1, 1, 1)
    actual, expected = (
        jax.jit(distributed(f))(PARAMETERS, X) for f in (jaxconv.fuse, without_calls)
    )
    assert_close(actual, expected, 0.01)


def test_no_calls_on_an_explicit_mesh(without_calls):
    devices = jax.devices("cpu")[:2]
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Explicit,), devices=devices)
    with jax.set_mesh(mesh):
        x = jax.device_put(X, jax.sharding.NamedSharding(mesh, P("d")))
        step = gradient(lambda p, x: (max_pool(x), jaxconv.conv(x, p["w"])))
        assert primitives(jaxconv.fuse(step), PARAMETERS, x)[:2] == (0, 0)
        actual = jax.jit(jaxconv.fuse(step))(PARAMETERS, x)
        assert_close(actual, jax.jit(without_calls(step))(PARAMETERS, x), 0.01)


def test_resnet50():
    """Its only pooling, in training: of two convolutions' gradients, up to that of the stem."""
    network = NETWORKS["resnet50"]
    shape = programs.input_shape(network, 2, 64)
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    state = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, programs.initial_state(network, x)))
    examples = jax.eval_shape(lambda: programs.random_examples(network, shape, jnp.bfloat16))
    fused = jaxconv.fuse(programs.training_step(network))
    found = list(equations(jax.make_jaxpr(fused)(state, examples)))
    (pool,) = (e for e in found if e.primitive.name == CALLS[0])
    (back,) = (e for e in found if e.primitive.name == CALLS[1])
    assert pool.params["form"].affine and pool.params["form"].operands
    assert back.params["gradients"] == 2 and len(back.invars) == 7
    assert sum(e.primitive.name == CALLS[2] and e.invars[0] is back.invars[0] for e in found) == 1
