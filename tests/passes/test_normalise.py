"""The primitive normalise: its value, its derivatives, and the calls that its derivatives make.

Values are compared with the definition in float64, derivatives with JAX's for the same program in
plain operations.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import ShapedArray
from jax.test_util import check_grads
from jaxprs import equations

from jaxconv._src.fuse import fuse_derivatives
from jaxconv._src.fuse.fuse_activations import Written
from jaxconv._src.passes import normalise
from jaxconv._src.passes.masked_sums import Sums
from jaxconv._src.passes.normalise import VECTORS, Form

pytestmark = pytest.mark.usefixtures("on_the_cpu")

SHAPE = 2, 3, 5, 8

ACTIVATIONS = {
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "where": lambda t: jnp.where(t > 0, t, 0),
    "maximum": lambda t: jnp.maximum(t, 0),
    "clip": lambda t: jnp.clip(t, 0, 6),
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "leaky_relu": functools.partial(jax.nn.leaky_relu, negative_slope=2.0**-6),
    "sin": jnp.sin,
}

SUMMANDS = {
    "one array": ((VECTORS,), False),
    "a shortcut": ((VECTORS,), True),
    "two arrays": ((VECTORS, VECTORS), False),
    "no mean": ((("scale", "offset"),), False),
    "a scale alone": ((("scale",),), True),
    "an offset alone": ((("offset",),), False),
    "a mean alone": ((("mean",),), True),
    "two arrays of other vectors": ((("offset",), ("mean", "scale")), False),
}


def form_of(summands, activation=None, dtype=np.float32, shape=SHAPE, **others) -> Form:
    vectors, shortcut = SUMMANDS[summands]
    written = None
    if activation is not None:
        function = ACTIVATIONS[activation]
        operand = ShapedArray(shape, np.dtype(dtype))
        mask, named, contract = fuse_derivatives.known(function, operand)
        written = Written(function, operand, contract, mask=mask, named=named)
    return Form(vectors, shortcut, written, np.dtype(dtype), **others)


def drawn(form: Form, examples=False, integers=False, seed=0) -> list[jax.Array]:
    """Operands; vectors belong to each example (``examples``), or are shared by all."""
    rng = np.random.default_rng(seed)

    def draw(name):
        array = name.startswith("y") or name == "shortcut"
        shape = SHAPE if array else (SHAPE[0],) * examples + SHAPE[-1:]
        values = rng.integers(-2, 3, shape) if integers else rng.standard_normal(shape)
        return jnp.asarray(values, form.dtype if array else np.float32)

    return [draw(name) for name in form.names]


def program(*operands, form: Form) -> list[jax.Array]:
    """The same program in plain operations, whose derivatives are JAX's."""
    given = dict(zip(form.names, operands, strict=True))

    def along(name):
        vector = given[name]
        return vector if vector.ndim == 1 else vector[:, None, None]

    summands = []
    for i, names in enumerate(form.vectors):
        n = given[f"y{i}"].astype(jnp.float32)
        n = n - along(f"mean{i}") if "mean" in names else n
        n = n * along(f"scale{i}") if "scale" in names else n
        n = n + along(f"offset{i}") if "offset" in names else n
        summands.append(n)
    if form.summands == 2:
        summands = [n.astype(given["y0"].dtype) for n in summands]
    summands += [given["shortcut"]] if form.shortcut else []
    t = functools.reduce(jnp.add, summands).astype(form.dtype)
    z = t if form.activation is None else form.activation.function(t)
    return [z.astype(form.dtype)] * form.copies


def defined(operands, form: Form) -> np.ndarray:
    """z by its definition, in float64."""
    given = {n: np.asarray(o, np.float64) for n, o in zip(form.names, operands, strict=True)}
    t = given.get("shortcut", 0.0)
    for i, names in enumerate(form.vectors):
        of = {"mean": 0.0, "scale": 1.0, "offset": 0.0}
        of |= {n: given[f"{n}{i}"].reshape(-1, 1, 1, SHAPE[-1]) for n in names}
        with np.errstate(invalid="ignore"):
            t = t + (given[f"y{i}"] - of["mean"]) * of["scale"] + of["offset"]
    if form.activation is None:
        return t
    with jax.enable_x64(True):
        return np.asarray(form.activation.function(t))


def bound(form: Form):
    return functools.partial(normalise.normalise, form=form)


def calls(function, *args) -> list[Sums]:
    """The forms of ``masked_sums`` calls in a program."""
    found = equations(jax.make_jaxpr(function)(*args))
    return [e.params["form"] for e in found if e.primitive.name == "jaxconv_masked_sums"]


def assert_close(actual, expected, tolerance=2e-5) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == e.dtype and a.shape == e.shape
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        largest = np.nanmax(np.abs(e), initial=1.0)
        np.testing.assert_allclose(a, e, rtol=0, atol=tolerance * largest)


def cotangents(form: Form, seed=7) -> list[jax.Array]:
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(SHAPE), form.dtype) for _ in range(form.copies)]


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("examples", [False, True])
@pytest.mark.parametrize("activation", [None, "relu", "silu"])
@pytest.mark.parametrize("summands", SUMMANDS)
def test_the_definition(summands, activation, examples):
    form = form_of(summands, activation, copies=2)
    operands = drawn(form, examples)
    for z in jax.jit(bound(form))(*operands):
        np.testing.assert_allclose(z, defined(operands, form), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("summands", SUMMANDS)
def test_16_bits(summands):
    """Integers, so that nothing is rounded."""
    form = form_of(summands, "relu6", jnp.bfloat16)
    operands = drawn(form, integers=True)
    (z,) = bound(form)(*operands)
    assert z.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(z, np.float64), defined(operands, form))


@pytest.mark.parametrize("summands", ["a shortcut", "two arrays"])
@pytest.mark.parametrize("activation", ["relu", "relu6"])
def test_bits(summands, activation):
    """Bits are set where the activation's derivative is 1."""
    form = form_of(summands, activation, jnp.float16, bits=True)
    operands = drawn(form, integers=True)
    z, bits = jax.jit(bound(form))(*operands)
    exact = defined(operands, form)
    inside = (exact > 0) & (exact < (6 if activation == "relu6" else np.inf))
    assert bits.dtype == np.uint8 and bits.shape == (*SHAPE[:-1], SHAPE[-1] // 8)
    np.testing.assert_array_equal(np.asarray(z, np.float64), exact)
    np.testing.assert_array_equal(bits, np.packbits(inside, axis=-1, bitorder="little"))


# --- derivatives ----------------------------------------------------------------------------------


# Every form with a mask, and every activation with the usual vectors.
DERIVATIVES = [(s, a) for s in SUMMANDS for a in (None, "relu")]
DERIVATIVES += [(s, a) for s in ("one array", "a shortcut") for a in ACTIVATIONS if a != "relu"]


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("examples", [False, True])
@pytest.mark.parametrize("summands, activation", DERIVATIVES)
def test_derivatives_are_the_programs(summands, activation, examples, stored):
    form = form_of(summands, activation, copies=2, stored=stored)
    operands = drawn(form, examples)
    tangents, dz = drawn(form, examples, seed=1), cotangents(form)

    def both(function):
        function = functools.partial(function, form=form)
        pushed = jax.jit(lambda o, t: jax.jvp(function, o, t)[1])(operands, tangents)
        return pushed, jax.jit(lambda o, d: jax.vjp(function, *o)[1](d))(operands, dz)

    assert_close(both(normalise.normalise), both(program))


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("activation", ["relu", "silu", "sin"])
@pytest.mark.parametrize("summands", ["one array", "a shortcut", "two arrays"])
def test_derivatives_to_second_order(summands, activation, stored):
    form = form_of(summands, activation, copies=2, stored=stored)
    operands = drawn(form)
    # Operands keep away from corners, so that numerical derivatives cross none.
    t = defined(operands, dataclasses.replace(form, activation=None))
    while (np.abs(t) < 0.1).any():
        operands[0] = jnp.where(np.abs(t) < 0.1, operands[0] + 0.5, operands[0])
        t = defined(operands, dataclasses.replace(form, activation=None))
    check_grads(bound(form), operands, 2, ["fwd", "rev"], eps=5e-3, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("activation", ["relu", "relu6", "maximum", "clip", "leaky_relu"])
@pytest.mark.parametrize("summands", ["one array", "a shortcut", "two arrays"])
def test_corners_and_nan(summands, activation, dtype):
    """The derivative is that of the operations in the program."""
    form = form_of(summands, activation, dtype, stored=True)
    operands = drawn(form, integers=True)
    operands[0] = operands[0].at[0, 0, 0, :3].set(jnp.asarray([np.nan, np.inf, -np.inf], dtype))
    t = defined(operands, dataclasses.replace(form, activation=None))
    assert (t == 0).any() and (t == 6).any()
    (dz,) = cotangents(form)
    dz = jnp.round(dz * 2)

    def gradients(function):
        return jax.vjp(functools.partial(function, form=form), *operands)[1]([dz])

    for a, e in zip(gradients(normalise.normalise), gradients(program), strict=True):
        assert a.dtype == e.dtype
        np.testing.assert_array_equal(np.asarray(a, np.float64), np.asarray(e, np.float64))


@pytest.mark.parametrize("frozen", ["y0", "scale0", "mean0", "offset0 scale0 mean0", "shortcut"])
def test_operands_without_tangents(frozen):
    form = form_of("a shortcut", "relu", stored=True)
    operands, tangents, (dz,) = drawn(form), drawn(form, seed=1), cotangents(form)
    free = [i for i, name in enumerate(form.names) if name not in frozen.split()]

    def both(function):
        def of_free(*given):
            values = list(operands)
            for i, value in zip(free, given, strict=True):
                values[i] = value
            return function(*values, form=form)[0]

        given = [operands[i] for i in free]
        return (
            jax.jvp(of_free, given, [tangents[i] for i in free])[1],
            jax.vjp(of_free, *given)[1](dz),
        )

    assert_close(both(normalise.normalise), both(program))


def test_no_sums_without_a_vectors_tangent():
    form = form_of("two arrays", "relu", stored=True)
    first, second, *vectors = drawn(form)
    (dz,) = cotangents(form)

    def back(*arrays):
        return jax.vjp(lambda *a: bound(form)(*a, *vectors)[0], *arrays)[1](dz)

    assert calls(back, first, second) == []


def test_a_copy_without_a_gradient():
    form = form_of("one array", "relu", copies=2, stored=True)
    operands, (dz, _) = drawn(form), cotangents(form)

    def back(function, at):
        return jax.vjp(lambda *o: function(*o, form=form)[at], *operands)[1](dz)

    for at in range(2):
        assert_close(back(normalise.normalise, at), back(program, at))
        (sums,) = calls(lambda at=at: back(normalise.normalise, at))
        assert sums.gradients == 1


@pytest.mark.parametrize("summands", ["one array", "a shortcut", "two arrays"])
def test_linearized_twice(summands):
    form = form_of(summands, "silu", stored=True)
    operands, tangents = drawn(form), drawn(form, seed=1)

    def twice(function):
        def once(*operands):
            return jax.linearize(functools.partial(function, form=form), *operands)[1](*tangents)

        value, push = jax.linearize(once, *operands)
        return value, push(*tangents)

    assert_close(twice(normalise.normalise), twice(program))


@pytest.mark.parametrize("summands", ["one array", "two arrays"])
def test_the_hessian_through_a_call_of_sums(summands):
    form = form_of(summands, "relu", stored=True)
    operands, (dz,) = drawn(form), cotangents(form)

    def of_scale(function):
        at = form.names.index("scale0")

        def squares(scale):
            (z,) = function(*operands[:at], scale, *operands[at + 1 :], form=form)
            return (z * z * dz).sum()

        return jax.jit(jax.jacrev(jax.grad(squares)))(operands[at])

    assert_close(of_scale(normalise.normalise), of_scale(program), 1e-4)


# --- what a transposed call computes --------------------------------------------------------------

# The ``masked_sums`` call for two gradients of z, with operands and gradients in memory.
CALLS = {
    ("one array", None): Sums(2, 1, "none", False, None, None),
    ("one array", "relu"): Sums(2, 1, "affine", False, 0.0, None),
    ("one array", "relu6"): Sums(2, 1, "affine", False, 0.0, 6.0),
    ("one array", "maximum"): Sums(2, 1, "affine", False, None, None, "maximum"),
    ("one array", "clip"): Sums(2, 1, "affine", False, None, None, "clip6"),
    ("one array", "silu"): Sums(2, 1, "affine", False, None, None, "silu"),
    ("one array", "leaky_relu"): Sums(2, 1, "affine", False, None, None, "leaky_relu", 2.0**-6),
    ("a shortcut", None): Sums(2, 1, "none", True, None, None),
    ("a shortcut", "relu"): Sums(2, 1, "bits", True, 0.0, None),
    ("a shortcut", "relu6"): Sums(2, 1, "bits", True, 0.0, 6.0),
    ("two arrays", "relu"): Sums(2, 2, "bits", True, 0.0, None),
    ("two arrays", None): Sums(2, 2, "none", True, None, None),
    # The call with bits would keep NaN, for which the program has 0.
    ("a shortcut", "where"): Sums(2, 1, "result", True, 0.0, None),
    ("one array", "where"): Sums(2, 1, "affine", False, 0.0, None),
    # XLA masks the gradient; the call sums the stored gradient.
    ("a shortcut", "maximum"): Sums(1, 1, "none", False, None, None),
    ("a shortcut", "silu"): Sums(1, 1, "none", False, None, None),
    ("two arrays", "sin"): Sums(1, 2, "none", False, None, None),
    # Without a mean and a shift there is no call with bits: the result decides the mask.
    ("a scale alone", "relu"): Sums(2, 1, "result", True, 0.0, None),
    ("no mean", "relu"): Sums(2, 1, "affine", False, 0.0, None),
}


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("summands, activation", CALLS)
def test_stored_gradients_are_read_once(summands, activation, dtype):
    form = form_of(summands, activation, dtype, copies=2, stored=True)
    operands, dz = drawn(form), cotangents(form)

    def back(*operands):
        return jax.vjp(bound(form), *operands)[1](dz)

    assert calls(back, *operands) == [CALLS[summands, activation]]
    found = [e.primitive.name for e in equations(jax.make_jaxpr(back)(*operands))]
    assert found.count("reduce_sum") == 0


def test_each_example_has_its_sums():
    form = form_of("one array", "relu", copies=1, stored=True)
    operands, dz = drawn(form, examples=True), cotangents(form)
    (sums,) = calls(lambda *o: jax.vjp(bound(form), *o)[1](dz), *operands)
    assert sums == Sums(1, 1, "affine", False, 0.0, None, segments=SHAPE[0])


@pytest.mark.parametrize(
    "form",
    [
        form_of("one array", "relu"),
        form_of("one array", "sin", stored=True),
        form_of("a shortcut", "relu", shape=(2, 3, 5, 12)),
    ],
    ids=["the gradient is not stored", "no kernel differentiates it", "not stored, 12 channels"],
)
def test_sums_of_xla(form):
    operands, dz = drawn(form), cotangents(form)
    assert calls(lambda *o: jax.vjp(bound(form), *o)[1](dz), *operands) == []


# --- vmap -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["relu", "silu"])
@pytest.mark.parametrize("summands", ["one array", "a shortcut", "two arrays"])
def test_vmap(summands, activation):
    """Values and derivatives equal those of a loop, whichever operands are mapped."""
    form = form_of(summands, activation, copies=2, stored=True)
    several = [jnp.stack(o) for o in zip(*(drawn(form, seed=s) for s in range(3)), strict=True)]
    dz = cotangents(form)

    def all_of(*operands):
        value, push = jax.linearize(bound(form), *operands)
        return value, push(*operands), jax.vjp(bound(form), *operands)[1](dz)

    for mapped in ({*range(len(several))}, {0}, {len(several) - 1}):
        axes = tuple(0 if i in mapped else None for i in range(len(several)))
        given = [o if i in mapped else o[0] for i, o in enumerate(several)]
        found = jax.jit(jax.vmap(all_of, axes))(*given)
        one_by_one = [
            all_of(*(o[n] if i in mapped else o for i, o in enumerate(given))) for n in range(3)
        ]
        assert_close(found, jax.tree.map(lambda *leaves: jnp.stack(leaves), *one_by_one))
