"""``jaxconv.fuse`` on the layers of Flax linen, Flax nnx, Equinox and Haiku, and on training steps.

Every layer has random statistics and parameters. A test names the calls, and compares results and
gradients with the unfused program's. Libraries that are not installed are skipped.
"""

from __future__ import annotations

import functools
import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_programs import assert_close, draw, epilogues
from jaxprs import equations

import jaxconv

pytestmark = pytest.mark.usefixtures("on_the_cpu")


X = draw(2, 6, 6, 4, seed=9)
DTYPES = [pytest.param(d, id=jnp.dtype(d).name) for d in (jnp.float32, jnp.bfloat16)]


def library(name: str):
    """The module; skips the test if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"{name} cannot be imported: {error}")


def filled(tree):
    """Fills a pytree's arrays with random positive numbers, because variances must be positive."""
    leaves, structure = jax.tree.flatten(tree)
    values = [
        0.5 + jnp.abs(draw(*np.shape(leaf), seed=i, dtype=leaf.dtype))
        if jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
        else leaf
        for i, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(structure, values)


def linen_block(dtype, *, activation=jax.nn.relu, bias=False):
    """(function of (variables, x), variables) of Conv, BatchNorm, a residual and an activation."""
    linen = library("flax.linen")

    class Block(linen.Module):
        @linen.compact
        def __call__(self, x):
            y = linen.Conv(4, (3, 3), dtype=dtype, use_bias=bias)(x)
            y = linen.BatchNorm(use_running_average=True, dtype=dtype)(y)
            return activation(y + x)

    module = Block()
    variables = filled(module.init(jax.random.key(0), X))
    return module.apply, variables


def nnx_block(dtype):
    nnx = library("flax.nnx")

    class Block(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.conv = nnx.Conv(4, 4, (3, 3), rngs=rngs, dtype=dtype)
            self.norm = nnx.BatchNorm(4, rngs=rngs, dtype=dtype, use_running_average=True)

        def __call__(self, x):
            return nnx.silu(self.norm(self.conv(x)) + x)

    graph, state = nnx.split(Block())
    return lambda state, x: nnx.merge(graph, state)(x), filled(state)


def equinox_block(dtype):
    eqx = library("equinox")
    conv = eqx.nn.Conv2d(4, 4, 3, padding=1, key=jax.random.key(0), dtype=dtype)
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(
        4, axis_name="batch", mode="ema", dtype=dtype
    )
    arrays, static = eqx.partition((conv, eqx.nn.inference_mode(norm)), eqx.is_array)

    def apply(arrays, x):
        conv, norm = eqx.combine(arrays, static)

        def one(x):
            return jax.nn.relu(norm(conv(x), state)[0] + x)

        return jax.vmap(one, axis_name="batch")(x)

    return apply, filled(arrays)


def haiku_block(dtype):
    haiku = library("haiku")

    def forward(x):
        y = haiku.Conv2D(4, 3, with_bias=False)(x)
        y = haiku.BatchNorm(True, True, 0.9)(y, is_training=False, test_local_stats=False)
        return jax.nn.gelu(y + x)

    def initial(x):
        y = haiku.Conv2D(4, 3, with_bias=False)(x)
        return haiku.BatchNorm(True, True, 0.9)(y, is_training=True)

    variables = filled(haiku.transform_with_state(initial).init(jax.random.key(0), X))
    variables = jax.tree.map(lambda a: a.astype(dtype) if a.ndim == 4 else a, variables)
    module = haiku.transform_with_state(forward)
    return lambda v, x: module.apply(*v, None, x)[0], variables


BLOCKS = {
    "linen": (linen_block, "scale bias residual relu"),
    "linen bias": (functools.partial(linen_block, bias=True), "scale bias residual relu"),
    "linen silu": (
        functools.partial(linen_block, activation=jax.nn.silu),
        "scale bias residual silu",
    ),
    "nnx": (nnx_block, "scale bias residual silu"),
    "equinox": (equinox_block, "scale bias residual relu"),
    "haiku": (haiku_block, "scale bias residual gelu_tanh"),
}


def image(name, dtype):
    return (X.transpose(0, 3, 1, 2) if name == "equinox" else X).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BLOCKS)
def test_inference_is_one_call(name, dtype, native_cpu):
    make, words = BLOCKS[name]
    apply, variables = make(dtype)
    x = image(name, dtype)
    assert epilogues(apply, variables, x) == [words]
    fused = jaxconv.fuse(apply)
    y = jax.jit(fused)(variables, x)
    assert_close(y, jax.jit(apply)(variables, x))
    # The call is the only operation on arrays of the result's size.
    assert [
        eqn.primitive.name
        for eqn in jax.make_jaxpr(fused)(variables, x).eqns
        if any(atom.aval.size >= x.size for atom in eqn.invars)
        and eqn.primitive.name not in ("reshape", "broadcast_in_dim")
    ] == ["jaxconv_fused"]


def calls(function, *args) -> dict[str, int]:
    """The custom calls of a compiled program, counted by name."""
    with jaxconv.override(algorithm="native"):
        text = jax.jit(function).lower(*args).compile().as_text()
    found = re.findall(r'custom_call_target="jaxconv_(\w+)"', text)
    return {name: found.count(name) for name in sorted(set(found))}


@pytest.mark.parametrize(
    ("activation", "dtype"),
    [
        (jax.nn.relu, jnp.float32),
        (jax.nn.relu6, jnp.bfloat16),
        (jax.nn.silu, jnp.float32),
        (jax.nn.gelu, jnp.bfloat16),
    ],
)
def test_a_gradient_outside_and_inside(activation, dtype, native_cpu):
    """``grad(fuse(f))`` and ``fuse(grad(f))`` make the same calls."""
    linen = library("flax.linen")

    class Block(linen.Module):
        @linen.compact
        def __call__(self, x):
            y = activation(linen.Conv(4, (3, 3), dtype=dtype)(x))
            return activation(linen.Conv(4, (3, 3), dtype=dtype)(y) + x)

    module = Block()
    variables = filled(module.init(jax.random.key(0), X))
    x = X.astype(dtype)

    def loss(variables, x):
        return (module.apply(variables, x).astype(jnp.float32) ** 2).mean()

    outside = jax.grad(jaxconv.fuse(loss), argnums=(0, 1))
    inside = jaxconv.fuse(jax.grad(loss, argnums=(0, 1)))
    assert fused_words(outside, variables, x) == fused_words(inside, variables, x)
    assert len(fused_words(inside, variables, x)) == 2
    assert calls(outside, variables, x) == calls(inside, variables, x)
    expected = jax.jit(jax.grad(loss, argnums=(0, 1)))(variables, x)
    assert_close(jax.jit(outside)(variables, x), expected)
    assert_close(jax.jit(inside)(variables, x), expected)


def fused_words(function, *args) -> list[str]:
    return [
        " ".join(e.params["epilogue"].words)
        for e in equations(jax.make_jaxpr(function)(*args))
        if e.primitive.name == "jaxconv_fused"
    ]


def linen_training(dtype, of_squares=True):
    """(function of (variables, x) -> (y, new statistics), variables)."""
    linen = library("flax.linen")

    class Block(linen.Module):
        @linen.compact
        def __call__(self, x):
            y = linen.Conv(4, (3, 3), dtype=dtype)(x)
            norm = linen.BatchNorm(
                use_running_average=False, dtype=dtype, use_fast_variance=of_squares
            )
            return jax.nn.relu(norm(y) + x)

    module = Block()
    variables = filled(module.init(jax.random.key(0), X))
    return lambda v, x: module.apply(v, x, mutable=["batch_stats"]), variables


def nnx_training(dtype):
    nnx = library("flax.nnx")

    class Block(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.conv = nnx.Conv(4, 4, (3, 3), rngs=rngs, dtype=dtype)
            self.norm = nnx.BatchNorm(4, rngs=rngs, dtype=dtype)

        def __call__(self, x):
            return nnx.silu(self.norm(self.conv(x)) + x)

    graph, state = nnx.split(Block())

    def apply(state, x):
        module = nnx.merge(graph, state, copy=True)
        return module(x), nnx.state(module)

    return apply, filled(state)


def equinox_training(dtype, mode="ema"):
    eqx = library("equinox")
    conv = eqx.nn.Conv2d(4, 4, 3, padding=1, key=jax.random.key(0), dtype=dtype)
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(
        4, axis_name="batch", mode=mode, dtype=dtype
    )
    arrays, static = eqx.partition((conv, norm), eqx.is_array)

    def apply(arrays, x):
        conv, norm = eqx.combine(arrays, static)

        def one(x, state):
            y, state = norm(conv(x), state)
            return jax.nn.relu(y + x), state

        return jax.vmap(one, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)

    return apply, filled(arrays)


def haiku_training(dtype):
    haiku = library("haiku")

    def forward(x):
        y = haiku.Conv2D(4, 3, with_bias=False)(x)
        return jax.nn.gelu(haiku.BatchNorm(True, True, 0.9)(y, is_training=True) + x)

    module = haiku.transform_with_state(forward)
    variables = filled(module.init(jax.random.key(0), X))
    variables = jax.tree.map(lambda a: a.astype(dtype) if a.ndim == 4 else a, variables)
    return lambda v, x: module.apply(*v, None, x), variables


TRAINING = {
    "linen": (linen_training, "bias statistics"),
    "linen two passes": (functools.partial(linen_training, of_squares=False), "bias statistics"),
    "nnx": (nnx_training, "bias statistics"),
    "equinox": (equinox_training, "bias statistics"),
    "equinox batch": (functools.partial(equinox_training, mode="batch"), "bias statistics"),
    "haiku": (haiku_training, "statistics"),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", TRAINING)
def test_training_takes_the_statistics_from_the_call(name, dtype, native_cpu):
    """The result and the new running statistics use the call's; no sum over activations is left."""
    make, words = TRAINING[name]
    apply, variables = make(dtype)
    x = image(name.split()[0], dtype)
    assert epilogues(apply, variables, x) == [words]
    fused = jaxconv.fuse(apply)
    assert_close(jax.jit(fused)(variables, x), jax.jit(apply)(variables, x))
    program = jax.make_jaxpr(fused)(variables, x)
    assert [e for e in equations(program) if e.primitive.name in ("reduce_sum", "psum")] == []
    explanation = jaxconv.explain(fused, variables, x)
    assert explanation[0].chain_end == "what follows takes the statistics of the whole result"
    assert not explanation.missed and "not fused" not in str(explanation)


@pytest.mark.parametrize("name", ["linen", "equinox"])
def test_a_gradient_through_batch_norm(name, native_cpu):
    """``grad(fuse(f))`` and ``fuse(grad(f))`` make the same calls."""
    apply, variables = TRAINING[name][0](jnp.float32)
    x = image(name, jnp.float32)

    def loss(variables, x):
        y = apply(variables, x)[0]
        return (y * jnp.cos(jnp.arange(y.size).reshape(y.shape))).mean()

    outside = jax.grad(jaxconv.fuse(loss), argnums=(0, 1), allow_int=True)
    inside = jaxconv.fuse(jax.grad(loss, argnums=(0, 1), allow_int=True))
    assert fused_words(outside, variables, x) == fused_words(inside, variables, x)
    assert fused_words(inside, variables, x) == ["bias statistics"]
    assert calls(outside, variables, x) == calls(inside, variables, x)
    expected = jax.jit(jax.grad(loss, argnums=(0, 1), allow_int=True))(variables, x)
    largest = max(np.abs(e).max() for e in jax.tree.leaves(expected))
    for f in (outside, inside):
        actual = jax.tree.leaves(jax.jit(f)(variables, x))
        for a, e in zip(actual, jax.tree.leaves(expected), strict=True):
            assert np.abs(a - e).max() <= 1e-5 * largest


def test_a_training_step(native_cpu):
    apply, variables = linen_block(jnp.float32, bias=True)

    def step(variables, x):
        def loss(params):
            return (apply({**variables, "params": params}, x) ** 2).mean()

        value, gradients = jax.value_and_grad(loss)(variables["params"])
        params = jax.tree.map(lambda p, g: p - 0.01 * g, variables["params"], gradients)
        return {**variables, "params": params}, value

    fused = jax.jit(jaxconv.fuse(step))
    state, expected = variables, variables
    for _ in range(3):
        state, value = fused(state, X)
        expected, unfused = jax.jit(step)(expected, X)
    assert_close((state, value), (expected, unfused))


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("loop", ["scan", "remat"])
def test_gradients_through_scan_and_remat(loop, inside):
    kernels = 0.2 * draw(3, 3, 3, 4, 4, seed=4)

    def layer(x, w):
        y = jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jax.nn.relu(y + 0.1 + x), None

    def loss(kernels):
        if loop == "scan":
            return (jax.lax.scan(layer, X, kernels)[0] ** 2).mean()
        x = X
        for w in kernels:
            x = jax.checkpoint(lambda x, w: layer(x, w)[0])(x, w)
        return (x**2).mean()

    function = jaxconv.fuse(jax.grad(loss)) if inside else jax.grad(jaxconv.fuse(loss))
    words = fused_words(function, kernels)
    assert words.count("bias residual relu") >= (1 if loop == "scan" else 3)
    assert_close(jax.jit(function)(kernels), jax.jit(jax.grad(loss))(kernels))


def test_a_module_that_changes_is_refused():
    nnx = library("flax.nnx")
    norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="changes an argument in place, a BatchNorm"):
        jaxconv.fuse(lambda norm, x: norm(x))(norm, X)
    still = nnx.BatchNorm(4, rngs=nnx.Rngs(0), use_running_average=True)
    assert_close(jaxconv.fuse(lambda norm, x: norm(x))(still, X), still(X))
