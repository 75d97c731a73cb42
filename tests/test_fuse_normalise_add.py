"""What ``fuse`` makes of the ends of residual blocks: the mask of the backward pass as bits."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxprs import equations
from test_fuse_gradient import (
    PARAMETERS,
    C,
    H,
    N,
    X,
    gradient,
    loss,
    normalised,
    one_branch,
    residual,
    two_norms,
)
from training_programs import (
    AXES,
    assert_close,
    batch_norm,
    conv,
    fused_without,
    on_two_devices,
)

import jaxconv
from jaxconv._src.fuse import fuse_normalise_add
from jaxconv.bench.networks import NETWORKS, programs

pytestmark = pytest.mark.usefixtures("for_a_gpu_on_the_cpu")


def clamped(p, x):
    def relu6(u):
        return lax.clamp(jnp.zeros((), u.dtype), u, jnp.full((), 6, u.dtype))

    return residual(p, x, relu6)


def swapped(p, x):
    return conv(jax.nn.relu(x + normalised(p, x)), p["v"])


def blocks(p, x):
    """A block whose shortcut another norm scales, and two whose shortcut is the block before."""
    x = jax.nn.relu(normalised(p, x) + batch_norm(conv(x, p["v"]), p["offset"], p["gain"]))
    for _ in range(2):
        x = jax.nn.relu(normalised(p, x) + x)
    return conv(x, p["w"])


def calls(function, *args) -> list[tuple[int, str]]:
    """Of each call of ``normalise_add``, then of ``masked_sums``: arrays, and what masks them."""
    found = list(equations(jax.make_jaxpr(function)(*args)))
    forms = [
        [e.params["form"] for e in found if e.primitive.name == f"jaxconv_{name}"]
        for name in ("normalise_add", "masked_sums")
    ]
    return [(f.arrays, "") for f in forms[0]] + [(f.arrays, f.masked_by) for f in forms[1]]


@pytest.fixture
def without_bits(monkeypatch):
    """A function that is fused with masks of stored results."""
    return fused_without(monkeypatch, fuse_normalise_add)


FORWARD = {
    "a shortcut": (residual, [(1, ""), (1, "bits")]),
    "a shortcut, added to": (swapped, [(1, ""), (1, "bits")]),
    "bounded": (clamped, [(1, ""), (1, "bits")]),
    "a projection": (two_norms, [(2, ""), (2, "bits")]),
    "blocks": (
        blocks,
        [(2, ""), (1, ""), (1, ""), (1, "bits"), (1, "bits"), (2, "bits")],
    ),
    "no addition": (one_branch, [(1, "affine")]),
}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", FORWARD)
def test_masks_behind_additions_are_bits(name, dtype, without_bits):
    """One call in the forward pass for each, and the gradients of masks that are stored results."""
    forward, expected = FORWARD[name]
    step, x = gradient(forward), X.astype(dtype)
    assert calls(jaxconv.fuse(step), PARAMETERS, x) == expected
    assert all(masked_by != "bits" for _, masked_by in calls(without_bits(step), PARAMETERS, x))
    actual = jax.jit(jaxconv.fuse(step))(PARAMETERS, x)
    assert_close(actual, jax.jit(without_bits(step))(PARAMETERS, x), 0.01)
    # Of single numbers that a rounding masks, the largest differences; so in the mean of squares.
    expected = jax.jit(step)(PARAMETERS, x)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        assert ((a - e) ** 2).mean() <= 0.05**2 * (e**2).mean()


def test_nothing_large_is_left_between(without_bits):
    """What the call computes is computed nowhere else."""

    def large(function):
        found = equations(jax.make_jaxpr(function)(PARAMETERS, X))
        return sum(
            e.primitive.name in ("mul", "sub", "add", "gt") and e.outvars[0].aval.shape == X.shape
            for e in found
        )

    for forward, operations in ((residual, 4), (two_norms, 7)):
        step = gradient(forward)
        assert large(jaxconv.fuse(step)) == large(without_bits(step)) - operations


def test_lowered_for_a_gpu(cuda_calls):
    """The bits are a call's second result, and an operand of the sums, which lack the result."""
    traced = jax.jit(jaxconv.fuse(gradient(blocks))).trace(PARAMETERS, X)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    made = re.findall(r"(%\d+):2 = stablehlo.custom_call @jaxconv_normalise_add", text)
    read = re.findall(r"custom_call @jaxconv_masked_sums\((.*?)\).*? : \((.*?)\) ->", text)
    assert len(made) == len(read) == 3
    for operands, operand_types in read:
        _, _, result, bits, *_ = operands.split(", ")
        _, _, result_type, bits_type, *_ = operand_types.split(", ")
        assert (result_type, bits_type) == ("tensor<0xf32>", f"tensor<{N}x{H}x{H}x{C // 8}xui8>")
        made.remove(bits.removesuffix("#1"))
        assert "#" not in result


def hand_written(projected, x, w, dz, vectors, shortcut):
    """A block's end and the sums of its gradient, of integers: any order gives the same bits."""
    y = conv(x, w)

    def norm(y, mean, scale, offset):
        centred = y.astype(jnp.float32) - mean
        return centred, (centred * scale + offset).astype(y.dtype)

    arrays = [norm(y, *vectors)]
    if projected:
        arrays.append(norm(conv(shortcut, w), *vectors[::-1]))
        shortcut = arrays[1][1]
    operand = arrays[0][1] + shortcut
    z = jax.nn.relu(operand)
    masked = jnp.where(operand > 0, dz, 0)
    d = masked.astype(jnp.float32)
    sums = [d.sum(AXES), *((d * centred).sum(AXES) for centred, _ in arrays)]
    return z, conv(z, w), sums, masked


@pytest.mark.parametrize("nan", [False, True])
@pytest.mark.parametrize("projected", [False, True])
def test_integers_are_exact(projected, nan):
    rng = np.random.default_rng(0)

    def integers(*shape, dtype=jnp.bfloat16):
        return jnp.asarray(rng.integers(-2, 3, shape), dtype)

    x, w, dz = integers(N, H, H, C), integers(1, 1, C, C), integers(N, H, H, C)
    vectors = [integers(C, dtype=jnp.float32) for _ in range(3)]
    shortcut = integers(N, H, H, C)
    if nan:
        shortcut = shortcut.at[1, 2, 3, 4].set(np.nan)
    arguments = x, w, dz, vectors, shortcut
    function = functools.partial(hand_written, projected)
    expected = [(1 + projected, ""), (1 + projected, "bits")]
    assert calls(jaxconv.fuse(function), *arguments) == expected
    actual = jax.jit(jaxconv.fuse(function))(*arguments)
    for a, e in zip(
        jax.tree.leaves(actual), jax.tree.leaves(jax.jit(function)(*arguments)), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(e, np.float32))
    assert bool(jnp.isnan(actual[0]).any()) == nan


def and_besides(forward):
    """The gradients of the first result of a function, and the second one."""

    def step(p, x):
        def first(p, x):
            y, besides = forward(p, x)
            return (y.astype(jnp.float32) ** 2).mean(), besides

        return jax.grad(first, argnums=(0, 1), has_aux=True)(p, x)

    return step


def result_read(reader):
    """A block whose result ``reader`` reads too."""

    def forward(p, x):
        z = jax.nn.relu(normalised(p, x) + x)
        return conv(z, p["v"]), reader(lax.stop_gradient(z))

    return and_besides(forward)


def normalised_read(p, x):
    norm = normalised(p, x)
    return conv(jax.nn.relu(norm + x), p["v"]), conv(lax.stop_gradient(norm), p["w"])


def sum_read(p, x):
    total = normalised(p, x) + x
    return conv(jax.nn.relu(total), p["v"]), jnp.where(lax.stop_gradient(total) > 1, x, 0)


def centred_stored(p, x):
    centred = conv(x, p["w"]).astype(jnp.float32) - p["offset"]
    norm = (centred * p["gain"] + p["offset"]).astype(x.dtype)
    return conv(jax.nn.relu(norm + x), p["v"]), lax.stop_gradient(centred)


def computed_shortcut(p, x):
    return conv(jax.nn.relu(normalised(p, x) + (x * x + 1)), p["v"])


def other_bounds(p, x):
    """A mask that is not that of the activation's bounds."""
    centred = conv(x, p["w"]).astype(jnp.float32) - p["offset"]
    operand = (centred * p["gain"] + p["offset"]).astype(x.dtype) + x
    z = lax.clamp(jnp.zeros((), x.dtype), operand, jnp.full((), 6, x.dtype))
    masked = jnp.where(operand > 0, conv(x, p["v"]), 0)
    d = masked.astype(jnp.float32)
    return conv(z, p["v"]), d.sum(AXES), (d * centred).sum(AXES), masked


LEFT = {
    "a reduction reads the result": result_read(lambda z: z.astype(jnp.float32).mean(AXES)),
    "an elementwise operation reads the result": result_read(jnp.exp),
    "an elementwise operation makes the shortcut": gradient(computed_shortcut),
    "a convolution reads the normalised array": and_besides(normalised_read),
    "an elementwise operation reads the sum": and_besides(sum_read),
    "the centred array is stored": and_besides(centred_stored),
    "the mask has other bounds": other_bounds,
}


@pytest.mark.parametrize("name", LEFT)
def test_other_masks_stay(name, without_bits):
    """A call of ``masked_sums`` that reads the result is there, and stays."""
    found = calls(jaxconv.fuse(LEFT[name]), PARAMETERS, X)
    assert found == calls(without_bits(LEFT[name]), PARAMETERS, X)
    assert any(masked_by == "result" for _, masked_by in found)
    assert not any(masked_by in ("", "bits") for _, masked_by in found)


def test_transformations_of_the_rewritten_program():
    """Derivatives of the gradient, vmap, and a gradient inside of remat."""
    step = gradient(blocks)

    def squares(step, p):
        return sum((g.astype(jnp.float32) ** 2).sum() for g in jax.tree.leaves(step(p, X)))

    actual, expected = (
        jax.jit(jax.grad(functools.partial(squares, f)))(PARAMETERS)
        for f in (jaxconv.fuse(step), step)
    )
    assert_close(actual, expected, 0.2)
    xs = jnp.stack([X, 2 * X])
    actual = jax.jit(jax.vmap(jaxconv.fuse(step), in_axes=(None, 0)))(PARAMETERS, xs)
    assert_close(actual, jax.jit(jax.vmap(step, in_axes=(None, 0)))(PARAMETERS, xs), 0.1)
    rematerialised = gradient(jax.checkpoint(lambda p, x: blocks(p, x)))  # traced afresh
    # The forward pass outside of it has no sums, and keeps its operations.
    found = calls(jaxconv.fuse(rematerialised), PARAMETERS, X)
    assert sorted(found) == sorted(FORWARD["blocks"][1])
    actual = jax.jit(jaxconv.fuse(rematerialised))(PARAMETERS, X)
    assert_close(actual, jax.jit(rematerialised)(PARAMETERS, X), 0.1)


def test_a_backward_pass_in_another_program():
    """A scan has its forward and its backward pass in programs of their own."""

    def scanned(p, x):
        def body(x, _):
            return conv(jax.nn.relu(normalised(p, x) + x), p["v"]).astype(x.dtype), None

        return lax.scan(body, x, length=2)[0]

    step = gradient(scanned)
    assert all(
        masked_by not in ("", "bits") for _, masked_by in calls(jaxconv.fuse(step), PARAMETERS, X)
    )
    assert_close(jax.jit(jaxconv.fuse(step))(PARAMETERS, X), jax.jit(step)(PARAMETERS, X), 0.1)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_over_devices(kind, without_bits):
    """Partitioned by XLA, as operations of JAX."""
    devices = jax.devices("cpu")[:2]
    mesh = jax.make_mesh((2,), ("d",), axis_types=(kind,), devices=devices)
    step = gradient(blocks)
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("d")))
        p = jax.device_put(PARAMETERS, NamedSharding(mesh, P()))
        assert calls(jaxconv.fuse(step), p, x) == FORWARD["blocks"][1]
        compiled = jax.jit(jaxconv.fuse(step)).lower(p, x).compile()
        actual, expected = compiled(p, x), jax.jit(without_bits(step))(p, x)
    assert_close(actual, expected, 0.02)


def test_under_shard_map(without_bits):
    """Each device's own call, which varies over the devices as the program's result does."""
    distributed = functools.partial(on_two_devices, gradient(blocks))
    assert calls(distributed(jaxconv.fuse), PARAMETERS, X) == FORWARD["blocks"][1]
    actual, expected = (
        jax.jit(distributed(f))(PARAMETERS, X) for f in (jaxconv.fuse, without_bits)
    )
    assert_close(actual, expected, 0.01)


@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_flax(library, without_bits):
    """Bottlenecks with a projection and without, in front of another one."""
    flax = pytest.importorskip(f"flax.{library}")

    if library == "linen":

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
        parameters = variables["params"]

        def forward(p, x):
            return module.apply({**variables, "params": p}, x, mutable=["batch_stats"])[0]

    else:
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

    step = jax.grad(functools.partial(loss, forward))
    found = calls(jaxconv.fuse(step), parameters, X)
    assert [c for c in found if c[1] != "affine"] == FORWARD["blocks"][1]
    assert sum(c[1] == "affine" for c in found) == 6
    actual = jax.jit(jaxconv.fuse(step))(parameters, X)
    assert_close(actual, jax.jit(without_bits(step))(parameters, X), 0.02)


def test_resnet50():
    """14 of its 16 blocks: elementwise operations make the last two's gradients, all or in part."""
    network = NETWORKS["resnet50"]
    shape = programs.input_shape(network, 2, 64)
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    state = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, programs.initial_state(network, x)))
    examples = jax.eval_shape(lambda: programs.random_examples(network, shape, jnp.bfloat16))
    found = calls(jaxconv.fuse(programs.training_step(network)), state, examples)
    assert [c for c, masked_by in found if masked_by == ""] == [
        2,
        1,
        1,
        2,
        *[1] * 3,
        2,
        *[1] * 5,
        2,
    ]
    assert sum(masked_by == "bits" for _, masked_by in found) == 14
    # The sums behind pooling, of windows.
    assert sum(masked_by == "result" for _, masked_by in found) == 1
