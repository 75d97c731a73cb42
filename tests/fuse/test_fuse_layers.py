"""The calls that ``fuse`` makes of normalised layers in training, and of their gradients.

A test counts the calls, and the sums over activations that are left to XLA, because an unchanged
program would pass a comparison of numbers. Gradients are taken inside and around ``fuse``, which
must give the same calls.
"""

from __future__ import annotations

import collections
import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxprs import equations
from training_programs import WAYS, batch_norm, conv, draw, gradient, mean_error, on_two_devices

import jaxconv
from jaxconv._src.fuse import fuse_convolution
from jaxconv.bench.networks import NETWORKS, programs

pytestmark = pytest.mark.usefixtures("for_a_gpu_on_the_cpu")

N, H, C = 4, 8, 16

X = draw(N, H, H, C)
PARAMETERS = {
    "w": 0.1 * draw(3, 3, C, C, seed=1),
    "v": 0.1 * draw(3, 3, C, C, seed=2),
    "gain": 1 + 0.1 * draw(C, seed=3, dtype=jnp.float32),
    "offset": draw(C, seed=4, dtype=jnp.float32),
}


def normalised(p, x):
    return batch_norm(conv(x, p["w"]), p["gain"], p["offset"])


def one_branch(p, x, activation=jax.nn.relu):
    return conv(activation(normalised(p, x)), p["v"])


def residual(p, x, activation=jax.nn.relu):
    return conv(activation(normalised(p, x) + x), p["v"])


def swapped(p, x):
    return conv(jax.nn.relu(x + normalised(p, x)), p["v"])


def projection(p, x):
    shortcut = batch_norm(conv(x, p["v"]), p["offset"], p["gain"])
    return conv(jax.nn.relu(normalised(p, x) + shortcut), p["w"])


def blocks(p, x):
    """A block whose shortcut another norm scales, and two whose shortcut is the previous block."""
    x = jax.nn.relu(normalised(p, x) + batch_norm(conv(x, p["v"]), p["offset"], p["gain"]))
    for _ in range(2):
        x = jax.nn.relu(normalised(p, x) + x)
    return conv(x, p["w"])


def two_readers(p, x):
    z = jax.nn.relu(normalised(p, x))
    return conv(z, p["v"]), conv(z, p["w"])


def running(p, x, freeze=lambda p: p):
    """A norm by statistics that are parameters; ``freeze`` may stop their gradient."""
    q = freeze(p)
    wide = (conv(x, p["w"]).astype(jnp.float32) - q["offset"]) * q["gain"] + q["offset"]
    return conv(jax.nn.relu(wide.astype(x.dtype) + x), p["v"])


def frozen(p, x):
    return running(p, x, lambda p: jax.tree.map(lax.stop_gradient, p))


def relu6(u):
    return lax.clamp(jnp.zeros((), u.dtype), u, jnp.full((), 6, u.dtype))


def written_out(u):
    return u * lax.logistic(u)


def of(kind: str, function, *args) -> list:
    """The ``form`` of each call of a primitive, in the program's order."""
    found = equations(jax.make_jaxpr(function)(*args))
    return [e.params["form"] for e in found if e.primitive.name == f"jaxconv_{kind}"]


def layers(function, *args) -> list[str]:
    """For each call of ``normalise``: arrays, whether it has a shortcut, its copies and bits."""
    return [
        f"{f.arrays}{'+' * f.shortcut}{' x2' * (f.copies == 2)}{' bits' * f.bits}"
        for f in of("normalise", function, *args)
    ]


def sums(function, *args) -> list[str]:
    """For each call of ``masked_sums``: gradients, arrays, the mask's source, whether it stores."""
    return [
        f"{f.gradients} {f.arrays} {f.activation or f.masked_by}{' stored' * f.stores}"
        for f in of("masked_sums", function, *args)
    ]


def primitives(function, *args) -> list[str]:
    return [e.primitive.name for e in equations(jax.make_jaxpr(function)(*args))]


def large_sums(function, *args) -> int:
    """The number of sums over activations that XLA computes."""
    found = equations(jax.make_jaxpr(function)(*args))
    summed = [e.invars[0].aval for e in found if e.primitive.name == "reduce_sum"]
    return sum(a.ndim > 2 and a.size > H * H * C for a in summed)


def assert_gradients(actual, expected, tolerance) -> None:
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == e.dtype and mean_error(a, e) <= tolerance


# --- calls ----------------------------------------------------------------------------------------

# The calls of ``normalise``; and of ``masked_sums``, from the last layer to the first.
TRAINING = {
    "relu": (one_branch, ["1"], ["1 1 affine"]),
    "relu6": (functools.partial(one_branch, activation=jax.nn.relu6), ["1"], ["1 1 affine"]),
    "a clamp": (functools.partial(one_branch, activation=relu6), ["1"], ["1 1 affine"]),
    "maximum": (
        functools.partial(one_branch, activation=lambda u: jnp.maximum(u, 0)),
        ["1"],
        ["1 1 maximum"],
    ),
    "clip": (
        functools.partial(one_branch, activation=lambda u: jnp.clip(u, 0, 6)),
        ["1"],
        ["1 1 clip6"],
    ),
    "silu": (functools.partial(one_branch, activation=jax.nn.silu), ["1"], ["1 1 silu"]),
    "silu, written out": (
        functools.partial(one_branch, activation=written_out),
        ["1"],
        ["1 1 silu"],
    ),
    "two convolutions read it": (two_readers, ["1 x2"], ["2 1 affine"]),
    "a shortcut": (residual, ["1+ bits"], ["1 1 bits stored"]),
    "a shortcut, added to": (swapped, ["1+ bits"], ["1 1 bits stored"]),
    "a shortcut and relu6": (
        functools.partial(residual, activation=jax.nn.relu6),
        ["1+ bits"],
        ["1 1 bits stored"],
    ),
    # XLA multiplies by the derivative and stores the product; the call sums it.
    "a shortcut and maximum": (
        functools.partial(residual, activation=lambda u: jnp.maximum(u, 0)),
        ["1+"],
        ["1 1 none"],
    ),
    "a shortcut and silu": (
        functools.partial(residual, activation=jax.nn.silu),
        ["1+"],
        ["1 1 none"],
    ),
    "a projection": (projection, ["2 bits"], ["1 2 bits stored"]),
    "blocks": (
        blocks,
        ["2 x2 bits", "1+ x2 bits", "1+ bits"],
        ["1 1 bits stored", "2 1 bits stored", "2 2 bits stored"],
    ),
    "running statistics": (running, ["1+ bits"], ["1 1 bits stored"]),
    "frozen": (frozen, ["1+ bits"], []),
}


# In float32 the convolution's call computes the layer, because nothing is rounded in between.
IN_A_CHAIN = ("running statistics", "frozen")


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", TRAINING)
def test_calls_of_a_training_step(name, way, dtype):
    """Every sum over activations is in a call, except the loss's own sums."""
    forward, of_layers, of_sums = TRAINING[name]
    step, x = WAYS[way](forward), X.astype(dtype)
    if name in IN_A_CHAIN and dtype == jnp.float32:
        assert layers(step, PARAMETERS, x) == []
        return
    assert layers(step, PARAMETERS, x) == of_layers
    assert sums(step, PARAMETERS, x) == of_sums
    of_loss = len(jax.tree.leaves(jax.eval_shape(forward, PARAMETERS, x)))
    assert large_sums(step, PARAMETERS, x) == (of_loss if way == "around" else 0)
    assert ("jaxconv_moments" in primitives(step, PARAMETERS, x)) == (name not in IN_A_CHAIN)


@pytest.mark.parametrize("name", TRAINING)
def test_gradients_are_the_programs(name):
    forward, *_ = TRAINING[name]
    in_16_bits = name in ("blocks", "silu", *IN_A_CHAIN)
    x, tolerance = (X, 0.1) if in_16_bits else (X.astype(jnp.float32), 2e-3)
    expected = jax.jit(gradient(forward))(PARAMETERS, x)
    actual = jax.jit(WAYS["inside"](forward))(PARAMETERS, x)
    assert_gradients(actual, expected, tolerance)


@pytest.mark.parametrize("for_cuda", [True, False])
def test_a_gradient_that_is_not_stored_is_computed_twice(for_cuda, monkeypatch):
    """Behind a gate XLA would store the gradient of the activation's operand in float32."""
    monkeypatch.setattr(fuse_convolution, "for_cuda", lambda: for_cuda)

    def gated(p, x):
        z = jax.nn.silu(normalised(p, x))
        gate = jax.nn.sigmoid(z.mean((1, 2), keepdims=True))
        return conv(z * gate, p["v"])

    x = X.astype(jnp.float32)
    (form,) = {f for f in of("normalise", gradient(jaxconv.fuse(gated)), PARAMETERS, x)}
    assert form.twice == for_cuda and not form.stored
    found = primitives(WAYS["inside"](gated), PARAMETERS, x)
    assert found.count("optimization_barrier") == for_cuda
    expected = jax.jit(gradient(gated))(PARAMETERS, x)
    actual = jax.jit(WAYS["inside"](gated))(PARAMETERS, x)
    assert_gradients(actual, expected, 2e-3)


@pytest.mark.parametrize("name", TRAINING)
def test_inference_has_no_bits(name):
    forward, of_layers, _ = TRAINING[name]
    expected = [each.replace(" bits", "") for each in of_layers]
    assert layers(jaxconv.fuse(forward), PARAMETERS, X) == expected
    assert sums(jaxconv.fuse(forward), PARAMETERS, X) == []


def returned(p, x):
    z = jax.nn.relu(normalised(p, x))
    return z, conv(z, p["v"])


def reduced(p, x):
    z = jax.nn.relu(normalised(p, x))
    return conv(z, p["v"]), z.astype(jnp.float32).mean((1, 2))


def multiplied(p, x):
    z = jax.nn.relu(normalised(p, x) + x)
    return conv(z, p["v"]) * z


def few_channels(p, x):
    p = {name: a[..., :12] if a.ndim == 1 else a[..., :12, :12] for name, a in p.items()}
    return one_branch(p, x[..., :12])


NO_CALL = {
    "the result is returned": returned,
    "a reduction reads it": reduced,
    "an elementwise operation reads it": multiplied,
    "12 channels": few_channels,
    "an activation without a kernel": functools.partial(one_branch, activation=jnp.sin),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NO_CALL)
def test_gradients_that_are_not_stored(name, way):
    """XLA computes the sums with the gradient; stored bits would have no reader."""
    forward = NO_CALL[name]
    step = WAYS[way](forward)
    (layer,) = layers(step, PARAMETERS, X)
    assert layer in ("1", "1+") and sums(step, PARAMETERS, X) == []
    expected = jax.jit(gradient(forward))(PARAMETERS, X)
    assert_gradients(jax.jit(step)(PARAMETERS, X), expected, 0.1)


def test_frozen_vectors_have_no_sums():
    """If only the vectors of a projection have gradients, the call reads one array."""

    def forward(p, x):
        q = jax.tree.map(lax.stop_gradient, p)
        y = conv(x, p["w"]).astype(jnp.float32)
        n = ((y - q["offset"]) * q["gain"] + q["offset"]).astype(x.dtype)
        m = ((conv(x, p["v"]).astype(jnp.float32) - q["offset"]) * p["gain"]).astype(x.dtype)
        return conv(jax.nn.relu(n + m), p["v"])

    for way in WAYS.values():
        (found,) = sums(way(forward), PARAMETERS, X)
        assert found in ("1 1 bits stored", "1 1 result stored")


def test_lowered_for_cuda(cuda_calls):
    """The bits are a call's second result; the sums read them in place of the first."""
    for way in WAYS.values():
        traced = jax.jit(way(blocks)).trace(PARAMETERS, X)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        made = re.findall(r"(%\d+):2 = stablehlo.custom_call @jaxconv_normalise_add", text)
        read = re.findall(r"custom_call @jaxconv_masked_sums\((.*?)\).*? : \((.*?)\) ->", text)
        assert len(made) == len(read) == 3
        assert text.count("custom_call @jaxconv_moments(") == 4
        for operands, operand_types in read:
            _, _, result, bits, *_ = operands.split(", ")
            _, _, result_type, bits_type, *_ = operand_types.split(", ")
            assert result_type == "tensor<0xf32>" and "#" not in result
            assert bits_type == f"tensor<{N}x{H}x{H}x{C // 8}xui8>"
            made.remove(bits.removesuffix("#1"))


# --- transformations ------------------------------------------------------------------------------


def scanned(p, x):
    """A loop of two blocks, each of which ends in a convolution."""
    return lax.scan(lambda x, _: (residual(p, x).astype(x.dtype), None), x, length=2)[0]


def carried(p, x):
    """A loop that carries the blocks' results."""

    def body(x, p):
        return jax.nn.relu(normalised(p, x) + x), None

    return lax.scan(body, x, jax.tree.map(lambda a: jnp.stack([a, a]), p))[0]


def branched(p, x):
    return lax.cond(x[0, 0, 0, 0] > 0, residual, residual, p, x)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "forward, of_layers, of_sums",
    [
        (jax.checkpoint(residual), ["1+ bits"] * 2, ["1 1 bits stored"]),
        (jax.jit(residual), ["1+ bits"], ["1 1 bits stored"]),
        (scanned, ["1+ bits"], ["1 1 bits stored"]),
        (carried, ["1+"], []),
        (branched, ["1+ bits"] * 2, ["1 1 bits stored"] * 2),
    ],
    ids=["remat", "jit", "scan", "scan of the results", "cond"],
)
def test_inside_of_other_functions(forward, of_layers, of_sums, way):
    step = WAYS[way](forward)
    assert layers(step, PARAMETERS, X) == of_layers
    assert sums(step, PARAMETERS, X) == of_sums
    expected = jax.jit(gradient(forward))(PARAMETERS, X)
    assert_gradients(jax.jit(step)(PARAMETERS, X), expected, 0.1)


@pytest.mark.parametrize("forward", [carried, blocks], ids=["scan", "blocks"])
def test_no_layer_of_a_backward_pass(forward):
    """Where a loop or vmap separates them from calls, its operations look like layers."""
    inside = jaxconv.fuse(jax.vmap(gradient(forward), (None, 0)))
    xs = jnp.stack([X, 2 * X])
    assert layers(inside, PARAMETERS, xs) == [] or forward is carried
    assert layers(WAYS["inside"](carried), PARAMETERS, X) == ["1+"]


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_vmap(where):
    xs = jnp.stack([X, 2 * X]).astype(jnp.float32)
    mapped = functools.partial(jax.vmap, in_axes=(None, 0))
    fuse = jaxconv.fuse
    step = fuse(mapped(gradient(blocks))) if where == "inside" else mapped(fuse(gradient(blocks)))
    assert sums(step, PARAMETERS, xs) == []
    expected = jax.jit(mapped(gradient(blocks)))(PARAMETERS, xs)
    assert_gradients(jax.jit(step)(PARAMETERS, xs), expected, 2e-3)


def test_derivatives_of_the_gradient():
    x = X.astype(jnp.float32)

    def squares(step, p):
        return sum((g**2).sum() for g in jax.tree.leaves(step(p, x)))

    for forward in (one_branch, residual, projection):
        expected = jax.jit(jax.grad(functools.partial(squares, gradient(forward))))(PARAMETERS)
        step = WAYS["inside"](forward)
        actual = jax.jit(jax.grad(functools.partial(squares, step)))(PARAMETERS)
        assert_gradients(actual, expected, 5e-3)
    actual = jax.jit(jaxconv.fuse(jax.grad(functools.partial(squares, gradient(projection)))))
    assert_gradients(actual(PARAMETERS), expected, 5e-3)


def test_forward_derivatives():
    x, t = X.astype(jnp.float32), draw(*X.shape, seed=9, dtype=jnp.float32)

    def push(forward):
        return jax.jit(lambda t: jax.jvp(functools.partial(forward, PARAMETERS), (x,), (t,)))(t)

    assert_gradients(push(jaxconv.fuse(blocks)), push(blocks), 2e-3)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_over_devices(kind):
    """XLA partitions the calls as operations of JAX."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(kind,), devices=jax.devices("cpu")[:2])
    with jax.set_mesh(mesh):
        x = jax.device_put(X.astype(jnp.float32), NamedSharding(mesh, P("d")))
        p = jax.device_put(PARAMETERS, NamedSharding(mesh, P()))
        expected = jax.jit(gradient(blocks))(p, x)
        for way in WAYS.values():
            assert sums(way(blocks), p, x) == TRAINING["blocks"][2]
            assert_gradients(jax.jit(way(blocks))(p, x), expected, 2e-3)


def test_under_shard_map():
    """Each device has its own calls, which vary over the mesh as the program's results do."""
    fused = on_two_devices(gradient(blocks), jaxconv.fuse)
    around = on_two_devices(gradient(jaxconv.fuse(blocks)), lambda f: f)
    expected = jax.jit(on_two_devices(gradient(blocks), lambda f: f))(PARAMETERS, X)
    for step in (fused, around):
        assert layers(step, PARAMETERS, X) == TRAINING["blocks"][1]
        assert sums(step, PARAMETERS, X) == TRAINING["blocks"][2]
        assert_gradients(jax.jit(step)(PARAMETERS, X), expected, 0.1)


@pytest.mark.parametrize("way", WAYS)
def test_effects_and_random_keys_beside_a_layer(way):
    """A callback has no results, and a key has no NumPy type."""

    def forward(p, x):
        y = conv(x, p["w"])
        jax.debug.callback(lambda *_: None, y, y.astype(jnp.float32).mean())
        z = jax.nn.relu(batch_norm(y, p["gain"], p["offset"]))
        jax.debug.callback(lambda _: None, z)
        kept = jax.random.bernoulli(jax.random.fold_in(jax.random.key(0), 1), 0.5, z.shape)
        return conv(jnp.where(kept, z, 0), p["v"])

    step = WAYS[way](forward)
    assert "1" in layers(step, PARAMETERS, X)
    expected = jax.jit(gradient(forward))(PARAMETERS, X)
    assert_gradients(jax.jit(step)(PARAMETERS, X), expected, 0.1)


# --- libraries and networks -----------------------------------------------------------------------


def linen_blocks():
    flax = pytest.importorskip("flax.linen")

    class Bottleneck(flax.Module):
        @flax.compact
        def __call__(self, x, width=C):
            def conv_norm(x, k, window):
                y = flax.Conv(k, (window, window), use_bias=False, dtype=x.dtype)(x)
                return flax.BatchNorm(use_running_average=False, dtype=x.dtype)(y)

            y = flax.relu(conv_norm(x, width, 1))
            y = flax.relu(conv_norm(y, width, 3))
            shortcut = x if x.shape[-1] == 2 * width else conv_norm(x, 2 * width, 1)
            return flax.relu(conv_norm(y, 2 * width, 1) + shortcut)

    class Layers(flax.Module):
        @flax.compact
        def __call__(self, x):
            for _ in range(3):
                x = Bottleneck()(x)
            return flax.Conv(C, (1, 1), dtype=x.dtype)(x)

    module = Layers()
    variables = module.init(jax.random.key(0), X)

    def forward(p, x):
        return module.apply({**variables, "params": p}, x, mutable=["batch_stats"])[0]

    return forward, variables["params"]


def nnx_blocks():
    flax = pytest.importorskip("flax.nnx")
    options = dict(dtype=X.dtype, rngs=flax.Rngs(0))

    def conv_norm(c, k, window):
        conv = flax.Conv(c, k, (window, window), use_bias=False, **options)
        return flax.Sequential(conv, flax.BatchNorm(k, **options))

    layers = [
        [conv_norm(c, C, 1), conv_norm(C, C, 3), conv_norm(C, 2 * C, 1), conv_norm(c, 2 * C, 1)]
        for c in (C, 2 * C, 2 * C)
    ]
    last = flax.Conv(2 * C, C, (1, 1), **options)
    structure, parameters, rest = flax.split((layers, last), flax.Param, ...)

    def forward(p, x):
        layers, last = flax.merge(structure, p, jax.tree.map(jnp.array, rest))
        for reduce, window, expand, shortcut in layers:
            y = expand(flax.relu(window(flax.relu(reduce(x)))))
            x = flax.relu(y + (x if x.shape == y.shape else shortcut(x)))
        return last(x)

    return forward, parameters


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("library", [linen_blocks, nnx_blocks])
def test_flax(library, way):
    """Bottlenecks with a projection and without, followed by another one."""
    forward, parameters = library()
    step = WAYS[way](forward)
    found = sums(step, parameters, X)
    assert [c for c in found if "bits" in c] == TRAINING["blocks"][2]
    assert [c for c in found if "bits" not in c] == ["1 1 affine"] * 6
    expected = jax.jit(gradient(forward))(parameters, X)
    assert_gradients(jax.jit(step)(parameters, X), expected, 0.1)


def test_resnet50():
    """All of its 16 blocks but the last, whose gradient is that of a mean."""
    network = NETWORKS["resnet50"]
    shape = programs.input_shape(network, 2, 64)
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    state = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, programs.initial_state(network, x)))
    examples = jax.eval_shape(lambda: programs.random_examples(network, shape, jnp.bfloat16))
    step = jaxconv.fuse(programs.training_step(network))
    assert collections.Counter(layers(step, state, examples)) == {
        "1": 32,
        "1+ x2 bits": 11,
        "2 x2 bits": 4,
        "1+": 1,
    }
    assert collections.Counter(sums(step, state, examples)) == {
        "1 1 affine": 32,
        "2 1 bits stored": 11,
        "2 2 bits stored": 4,
        "2 1 result": 1,  # the stem: sums over the windows of max pooling
    }
    assert "select_and_scatter_add" not in primitives(step, state, examples)
