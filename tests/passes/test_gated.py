"""The primitive gated: its values and derivatives, compared with float64."""

from __future__ import annotations

import functools
import re

import activated_forms
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxconv._src.fuse.fuse_activations import Written
from jaxconv._src.passes import gated, masked_sums, normalise
from jaxconv._src.passes.normalise import VECTORS, Form
from jaxconv._src.problem import epilogue

N, C = 3, 8
SHAPE = (N, 5, 7, C)


def form(dtype, activation="silu", vectors=VECTORS, shape=SHAPE) -> Form:
    return activated_forms.form(shape, dtype, activation, vectors)


def drawn(dtype, of_examples=(), vectors=VECTORS, shape=SHAPE) -> list[jax.Array]:
    """The array, its vectors, some with a row for each example, and the gate."""
    rng = np.random.default_rng(0)
    n, c = shape[0], shape[-1]
    shapes = [(n, c) if name in of_examples else (c,) for name in vectors]
    y = jnp.asarray(rng.standard_normal(shape), dtype)
    given = [jnp.asarray(rng.standard_normal(s), np.float32) for s in shapes]
    return [y, *given, jnp.asarray(rng.uniform(0, 1, (n, c)), np.float32)]


def defined(operands, names, activation="silu"):
    """The product, differentiable, in the operands' dtype."""
    y, *vectors, gate = operands
    spread = [
        v.reshape(v.shape[:-1] + (1,) * (y.ndim - 2) * (v.ndim == 2) + v.shape[-1:])
        for v in vectors
    ]
    named = dict(zip(names, spread, strict=True))
    u = (y - named.get("mean", 0)) * named.get("scale", 1) + named.get("offset", 0)
    return epilogue.activate(u, activation) * gate.reshape(N, 1, 1, C)


def wide(operands) -> list[jax.Array]:
    return [jnp.asarray(np.asarray(o, np.float64)) for o in operands]


@pytest.fixture(autouse=True)
def on_the_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def assert_close(actual, expected, error) -> None:
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, e = np.asarray(a, np.float64), np.asarray(e)
        assert a.shape == e.shape
        np.testing.assert_allclose(a, e, rtol=error, atol=error * max(1, abs(e).max()))


CASES = {
    "channels": ((), VECTORS),
    "examples": (VECTORS, VECTORS),
    "a mean of examples": (("mean",), VECTORS),
    "scale and offset": ((), ("scale", "offset")),
    "offset": ((), ("offset",)),
    "no vectors": ((), ()),
}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, np.float32])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case, dtype):
    of_examples, names = CASES[case]
    operands = drawn(dtype, of_examples, names)
    found, back = jax.vjp(
        functools.partial(gated.gated, form=form(dtype, vectors=names)), *operands
    )
    ct = jax.random.normal(jax.random.key(1), SHAPE, dtype)
    with jax.enable_x64(True):
        of = functools.partial(defined, names=names)
        expected, back_defined = jax.vjp(lambda *o: of(o), *wide(operands))
        gradients = back_defined(wide([ct])[0])
    ulp = float(jnp.finfo(dtype).eps)
    assert found.dtype == dtype
    assert_close(found, expected, 4 * ulp)
    assert_close(back(ct), gradients, 4 * ulp)


@pytest.mark.parametrize("activation", activated_forms.FUNCTIONS)
def test_activations(activation):
    of = form(np.float32, activation)
    operands = drawn(np.float32)
    assert gated.accepts(of, SHAPE, np.dtype(np.float32))

    def plain(*operands):
        (z,) = normalise.in_jax(*operands[:-1], form=of)
        return z * operands[-1][:, None, None]

    ct = jax.random.normal(jax.random.key(1), SHAPE)
    expected, back = jax.vjp(plain, *operands)
    found, ours = jax.vjp(functools.partial(gated.gated, form=of), *operands)
    assert_close(found, expected, 1e-6)
    assert_close(ours(ct), back(ct), 2e-5)


def test_other_derivatives():
    """Forward mode, second derivatives, and vmap along any axis."""
    operands = drawn(np.float32)
    ours = functools.partial(gated.gated, form=form(np.float32))

    def plain(*operands):
        return defined(operands, VECTORS)

    tangents = [jax.random.normal(jax.random.key(i), o.shape) for i, o in enumerate(operands)]
    assert_close(jax.jvp(ours, operands, tangents), jax.jvp(plain, operands, tangents), 1e-5)

    def along(f, at):
        def of_one(o):
            return f(*operands[:at], o, *operands[at + 1 :])

        return jax.jvp(of_one, operands[at : at + 1], tangents[at : at + 1])

    for at in range(len(operands)):
        assert_close(along(ours, at), along(plain, at), 1e-5)

    def gradients(f, *operands):
        return jax.grad(lambda *o: (f(*o) ** 2).sum(), argnums=tuple(range(5)))(*operands)

    for f in (
        lambda f: jax.jvp(functools.partial(gradients, f), operands, tangents),
        lambda f: jax.grad(lambda *o: sum((g**2).sum() for g in gradients(f, *o)), (0, 1, 4))(
            *operands
        ),
    ):
        assert_close(f(ours), f(plain), 1e-4)
    stacked = [jnp.stack([o, 2 * o], o.ndim // 2) for o in operands]
    axes = tuple(o.ndim // 2 for o in operands)
    for f in (lambda f: f, lambda f: functools.partial(gradients, f)):
        assert_close(*(jax.vmap(f(g), axes)(*stacked) for g in (ours, plain)), 2e-5)


def test_a_gate_alone_has_a_transpose():
    operands = drawn(np.float32)
    given, gate = operands[:-1], operands[-1]
    ours = functools.partial(gated.gated, *given, form=form(np.float32))
    ct = jax.random.normal(jax.random.key(1), SHAPE)
    (found,) = jax.linear_transpose(ours, gate)(ct)
    (expected,) = jax.vjp(lambda g: defined([*given, g], VECTORS), gate)[1](ct)
    assert_close(found, expected, 1e-5)


def test_gradients_by_one_call(cuda_calls):
    """Sums of examples, with the activation's values; no other sum reads the array."""
    operands = drawn(jnp.bfloat16, shape=SHAPE)
    function = functools.partial(gated.gated, form=form(jnp.bfloat16))
    gradient = jax.jit(lambda ct, *o: jax.vjp(function, *o)[1](ct))
    lowered = gradient.trace(operands[0], *operands).lower(lowering_platforms=("cuda",))
    (call,) = re.findall(r"custom_call @jaxconv_masked_sums.*", lowered.as_text())
    assert f"x3x{C}xf32>" in call and "values = 1" in call and f"segments = {N}" in call
    kept = [
        a for a in jax.tree.leaves(jax.vjp(function, *operands)[1]) if a.size >= operands[0].size
    ]
    assert [a.dtype for a in kept] == [jnp.bfloat16]


def test_one_example():
    shape = (1, 4, 4, 8)
    operands, of = drawn(np.float32, shape=shape), form(np.float32, shape=shape)

    def plain(*operands):
        return normalise.in_jax(*operands[:-1], form=of)[0] * operands[-1][:, None, None]

    back, expected = (
        jax.vjp(f, *operands)[1](jnp.ones(shape))
        for f in (functools.partial(gated.gated, form=of), plain)
    )
    assert_close(back, expected, 1e-5)


def test_what_kernels_do_not_take():
    dtype = np.dtype(jnp.bfloat16)
    assert gated.accepts(form(dtype), SHAPE, dtype)
    assert not gated.accepts(form(dtype), (*SHAPE[:-1], 12), dtype)
    assert not gated.accepts(form(np.float32), SHAPE, dtype)
    unnamed = form(dtype).activation
    unnamed = Written(unnamed.function, unnamed.operand, "silu")
    assert not gated.accepts(Form((VECTORS,), False, unnamed, dtype), SHAPE, dtype)
    assert masked_sums.accepts(gated._sums(form(dtype), 3), SHAPE, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["relu", "silu", "hard_swish", "gelu"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, np.float32])
@pytest.mark.parametrize("shape", [(3, 5, 7, 8), (4, 40, 40, 72), (6, 7, 7, 1152)], ids=str)
def test_gradients_by_the_kernel(shape, dtype, activation):
    """Those of the JAX operations, but for the order of sums and the roundings of activations."""
    operands = drawn(dtype, shape=shape)
    function = functools.partial(gated.gated, form=form(dtype, activation, shape=shape))
    y, mean, scale, offset, _ = operands
    u = (y.astype(np.float32) - mean) * scale + offset
    beside_kinks = (jnp.abs(u) < 0.1) | (jnp.abs(jnp.abs(u) - 3) < 0.1)
    ct = jax.random.normal(jax.random.key(1), shape, dtype)
    ct = jnp.where(beside_kinks, 0, ct)  # roundings of u decide the derivative there
    gradient = jax.jit(lambda ct, *o: jax.vjp(function, *o)[1](ct))
    expected = gradient(ct, *operands)
    device = jax.devices("gpu")[0]
    moved = jax.device_put((ct, *operands), device)
    text = gradient.lower(*moved).compile().as_text()
    assert 'custom_call_target="jaxconv_masked_sums"' in text
    error = 1e-4 if dtype == np.float32 else 4 * float(jnp.finfo(dtype).eps)
    assert_close(gradient(*moved), expected, error)
