"""Squeeze and excitation: the layer, its mean and the product with the gate that ``fuse`` calls."""

from __future__ import annotations

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jaxprs import equations
from training_programs import WAYS, batch_norm, conv, draw, gradient

import jaxconv

pytestmark = pytest.mark.usefixtures("for_a_gpu_on_the_cpu")

# Activations of 4 MB, the smallest whose means are calls.
N, H, C = 4, 128, 32

X = draw(N, H, H, C)
PARAMETERS = {
    "w": 0.1 * draw(3, 3, C, C, seed=1, dtype=jnp.float32),
    "v": 0.1 * draw(1, 1, C, C, seed=2, dtype=jnp.float32),
    "down": 0.3 * draw(C, 8, seed=3, dtype=jnp.float32),
    "up": draw(8, C, seed=4, dtype=jnp.float32),
    "gain": 1 + 0.1 * draw(C, seed=5, dtype=jnp.float32),
    "offset": 0.1 * draw(C, seed=6, dtype=jnp.float32),
}


def gate_of(p, mean):
    """The gate (N, C), float32."""
    return jax.nn.sigmoid(jax.nn.silu(mean.astype(jnp.float32) @ p["down"]) @ p["up"])


def narrow(z, gate):
    return z * gate[:, None, None].astype(z.dtype)


def wide(z, gate):
    return (z.astype(jnp.float32) * gate[:, None, None]).astype(z.dtype)


def of_two_factors(z, gate):
    return z * gate.reshape(N, 1, 1, C).astype(z.dtype) * 0.5


def gate_first(z, gate):
    return gate.astype(z.dtype).reshape(N, 1, 1, C) * z


def divided(z, gate):
    return (z / (1 + jnp.exp(-gate))[:, None, None, :]).astype(z.dtype)


def flat(z, gate):
    product = z.reshape(N, H * H, C) * gate[:, None, :].astype(z.dtype)
    return product.reshape(z.shape)


def transposed(z, gate):
    product = z.transpose(0, 3, 1, 2) * gate[:, :, None, None].astype(z.dtype)
    return product.transpose(0, 2, 3, 1)


def repeated(z, gate):
    return z * jnp.broadcast_to(gate[:, None, None], z.shape).astype(z.dtype)


def grouped(z, gate):
    product = z.reshape(N, H, H, 4, C // 4) * gate.reshape(N, 1, 1, 4, C // 4).astype(z.dtype)
    return product.reshape(z.shape)


PRODUCTS = {
    f.__name__: f
    for f in (
        narrow,
        wide,
        of_two_factors,
        gate_first,
        divided,
        flat,
        transposed,
        repeated,
        grouped,
    )
}


def block(product=narrow, activation=jax.nn.silu, norm=batch_norm):
    def function(p, x):
        z = activation(norm(conv(x, p["w"]), p["gain"], p["offset"])).astype(x.dtype)
        return conv(product(z, gate_of(p, z.mean((1, 2)))), p["v"])

    return function


def channels_first(p, x):
    numbers = ("NCHW", "HWIO", "NCHW")

    def convolved(x, w):
        return lax.conv_general_dilated(
            x, w.astype(x.dtype), (1, 1), "SAME", dimension_numbers=numbers
        )

    y = convolved(x.transpose(0, 3, 1, 2), p["w"]).astype(jnp.float32)
    mean, variance = y.mean((0, 2, 3), keepdims=True), y.var((0, 2, 3), keepdims=True)
    n = (y - mean) * lax.rsqrt(variance + 1e-5)
    n = n * p["gain"][:, None, None] + p["offset"][:, None, None]
    z = jax.nn.silu(n.astype(x.dtype))
    gate = gate_of(p, z.mean((2, 3))).astype(z.dtype)
    return convolved(z * gate[:, :, None, None], p["v"])


def instance_norm(y, gain, offset):
    wide = y.astype(jnp.float32)
    mean, variance = wide.mean((1, 2), keepdims=True), wide.var((1, 2), keepdims=True)
    return ((wide - mean) * lax.rsqrt(variance + 1e-3) * gain + offset).astype(y.dtype)


def calls(function, *args) -> collections.Counter:
    program = jax.make_jaxpr(function)(*args)
    return collections.Counter(e.primitive.name for e in equations(program))


def assert_one_pass(function, x=X) -> None:
    """The backward pass has one call for all sums, and no other sum over an array of y's size."""
    for way in WAYS.values():
        program = jax.make_jaxpr(way(function))(PARAMETERS, x)
        found = collections.Counter(e.primitive.name for e in equations(program))
        assert found["jaxconv_gated"] == found["jaxconv_activated_sums"] == 1, found
        assert found["jaxconv_masked_sums"] == 1, found
        assert not found["jaxconv_normalise"], found
        sums = [
            e
            for e in equations(program)
            if e.primitive.name == "reduce_sum"
            and e.invars[0].aval.size >= x.size
            and e.outvars[0].aval.shape  # not the loss
        ]
        assert not sums, sums


def errors(function, reference, x) -> dict[str, float]:
    """The relative errors of the gradients, compared with those in float32."""
    found = jax.jit(gradient(function))(PARAMETERS, x)
    exact = jax.jit(gradient(reference))(PARAMETERS, x.astype(jnp.float32))
    result = {}
    for (path, a), e in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(exact), strict=True):
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        result[jax.tree_util.keystr(path)] = np.linalg.norm(a - e) / np.linalg.norm(e)
    return result


def assert_as_exact(function, x=X) -> None:
    """Gradients are at most 1.2 times as inexact as those of the unchanged program."""
    ours, theirs = (errors(f, function, x) for f in (jaxconv.fuse(function), function))
    least = 2e-5 if x.dtype == jnp.float32 else 2e-3
    assert all(ours[name] <= max(1.2 * theirs[name], least) for name in ours), (ours, theirs)


@pytest.mark.parametrize("product", PRODUCTS)
def test_products(product):
    assert_one_pass(block(PRODUCTS[product]))
    assert_as_exact(block(PRODUCTS[product]))


@pytest.mark.parametrize(
    "activation",
    [
        jax.nn.relu,
        jax.nn.relu6,
        jax.nn.hard_swish,
        functools.partial(jax.nn.gelu, approximate=False),
        jax.nn.sigmoid,
        jnp.tanh,
        lambda t: jnp.maximum(t, 0),
        lambda t: jax.nn.leaky_relu(t, 0.1),
    ],
)
def test_activations(activation):
    assert_one_pass(block(activation=activation))
    assert_as_exact(block(activation=activation))


def test_channels_first():
    assert_one_pass(channels_first)
    assert_as_exact(channels_first)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
def test_types(dtype):
    x = X.astype(dtype)
    assert_one_pass(block(), x)
    assert_as_exact(block(), x)


def test_vectors_of_examples():
    assert_one_pass(block(norm=instance_norm))
    assert_as_exact(block(norm=instance_norm))


def test_constant_statistics():
    """The layer's vectors are parameters, as when batch norm is frozen."""

    def affine(y, gain, offset):
        return (y.astype(jnp.float32) * gain + offset).astype(y.dtype)

    assert_one_pass(block(norm=affine))
    assert_as_exact(block(norm=affine))


def test_gradients_of_the_array_are_added_in_float32():
    program = jax.make_jaxpr(WAYS["around"](block()))(PARAMETERS, X)
    narrow_sums = [
        eqn
        for eqn in equations(program)
        if eqn.primitive.name == "add_any"
        and all(a.aval.dtype.itemsize == 2 and a.aval.size >= X.size for a in eqn.invars)
    ]
    assert not narrow_sums


def test_no_array_is_kept_in_float32():
    """Kept are x, y, and the product, which the second convolution reads."""
    fused = jaxconv.fuse(block())
    residuals = jax.eval_shape(lambda p, x: jax.vjp(fused, p, x)[1], PARAMETERS, X)
    kept = [aval for aval in jax.tree.leaves(residuals) if aval.size >= X.size]
    assert len(kept) == 3 and all(aval.dtype == X.dtype for aval in kept), kept


def test_forward_mode():
    tangents = jax.tree.map(jnp.ones_like, PARAMETERS)
    results = [
        jax.jit(lambda p, x, f=f: jax.jvp(lambda p: f(p, x), (p,), (tangents,))[1])(PARAMETERS, X)
        for f in (jaxconv.fuse(block()), block())
    ]
    ours, theirs = (np.asarray(r, np.float64) for r in results)
    assert np.linalg.norm(ours - theirs) <= 3e-2 * np.linalg.norm(theirs)


STAYING = {
    "unknown activation": block(activation=jax.nn.elu),
    "another reader": lambda p, x: block(lambda z, gate: narrow(z, gate) + z)(p, x),
    "a gate of channels": block(lambda z, gate: z * gate.mean(0).astype(z.dtype)),
    "a gate of positions": block(lambda z, gate: z * jax.nn.sigmoid(z.mean(3, keepdims=True))),
    "no convolution": lambda p, x: block(lambda z, gate: jnp.sin(narrow(z, gate)))(p, x),
}


@pytest.mark.parametrize("case", STAYING)
def test_what_stays(case):
    found = calls(WAYS["around"](STAYING[case]), PARAMETERS, X)
    assert not found["jaxconv_gated"] and found["jaxconv_normalise"], found


def test_two_convolutions_read_the_product():
    """JAX would add their gradients in an array that only the call reads."""

    def function(p, x):
        z = jax.nn.silu(batch_norm(conv(x, p["w"]), p["gain"], p["offset"]))
        r = narrow(z, gate_of(p, z.mean((1, 2))))
        return conv(r, p["v"]), conv(r, p["w"])

    assert not calls(WAYS["around"](function), PARAMETERS, X)["jaxconv_gated"]


def test_elsewhere_nothing_changes(monkeypatch):
    monkeypatch.setattr(jaxconv._src.fuse.fuse_convolution, "for_cuda", lambda: False)
    found = calls(WAYS["around"](block()), PARAMETERS, X)
    assert not found["jaxconv_gated"] and not found["jaxconv_activated_sums"], found


def test_under_remat_and_scan():
    """Two blocks in a loop, each computed again in the backward pass."""

    def function(p, x):
        def body(x, _):
            return jax.checkpoint(block())(p, x), None

        return lax.scan(body, x, length=2)[0]

    found = calls(WAYS["around"](function), PARAMETERS, X)
    assert found["jaxconv_gated"] >= 1 and found["jaxconv_masked_sums"] == 1, found
    assert not found["jaxconv_normalise"], found


def test_lowering_for_a_gpu(cuda_calls):
    """One call sums in the forward pass and one in the backward pass."""
    for way in WAYS.values():
        # In float32, so that no call of `elementwise` converts parameters.
        traced = jax.jit(way(block())).trace(PARAMETERS, X.astype(jnp.float32))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        found = collections.Counter(re.findall(r"custom_call @(jaxconv_\w+)", text))
        assert found["jaxconv_activated_sums"] == found["jaxconv_masked_sums"] == 1, found
        assert f"tensor<{N}x" in text and 'derivative = "silu"' in text and "values = 1" in text
