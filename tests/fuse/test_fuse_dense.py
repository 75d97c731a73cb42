"""Dense layers that nothing differentiates become pointwise convolutions with an epilogue."""

from __future__ import annotations

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jaxprs import equations

import jaxconv
from jaxconv._src.conv import fused
from jaxconv._src.fuse import fuse_convolution
from jaxconv._src.library import native

N, EXTENT, C = 2, 6, 8

ACTIVATIONS = {
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
    "leaky_relu": functools.partial(jax.nn.leaky_relu, negative_slope=0.25),
    "by hand": lambda t: 0.5 * t * (1 + lax.erf(t / np.sqrt(2).astype(t.dtype))),
}


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch, native_cpu):
    """Takes the CPU kernels for a GPU's, and predicts that they are faster."""
    monkeypatch.setattr(fuse_convolution, "for_cuda", lambda: True)
    monkeypatch.setattr(fuse_convolution, "slower", lambda *operands, **options: "")
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def values(dtype="float32", shape=(N, EXTENT, EXTENT, C)):
    rng = np.random.default_rng(5)
    c = shape[-1]
    shapes = {
        "w": (*(3,) * (len(shape) - 2), c, c),
        "first": (c, 4 * c),
        "first_bias": (4 * c,),
        "second": (4 * c, c),
        "second_bias": (c,),
        "scale": (c,),
    }
    p = {name: rng.standard_normal(s) / np.sqrt(s[0]) for name, s in shapes.items()}
    p = {name: jnp.asarray(a, dtype) for name, a in p.items()}
    return p, jnp.asarray(rng.standard_normal(shape), dtype)


def convolved(p, x):
    spatial = "HWD"[: x.ndim - 2]
    numbers = (f"N{spatial}C", f"{spatial}IO", f"N{spatial}C")
    ones = (1,) * (x.ndim - 2)
    return lax.conv_general_dilated(x, p["w"], ones, "SAME", dimension_numbers=numbers)


def block(p, x, activation="gelu"):
    """ConvNeXt's block without the norm."""
    y = convolved(p, x)
    y = ACTIVATIONS[activation](y @ p["first"] + p["first_bias"])
    y = y @ p["second"] + p["second_bias"]
    return x + y * p["scale"]


def calls(function, *operands):
    """The epilogues of ``conv_fused`` calls, and the number of products outside derivatives."""
    found = list(equations(jax.make_jaxpr(function)(*operands)))
    epilogues = [
        " ".join(e.params["epilogue"].words) for e in found if e.primitive is fused.conv_fused_p
    ]
    return epilogues, sum(e.primitive.name == "dot_general" for e in found)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_block_is_two_convolutions(activation):
    f = functools.partial(block, activation=activation)
    name = {"leaky_relu": "leaky_relu:0x1p-2", "by hand": "gelu"}.get(activation, activation)
    epilogues, products = calls(jaxconv.fuse(f), *values())
    assert epilogues == [f"bias {name}", "scale bias residual"]
    assert products == 0


@pytest.mark.parametrize("shape", [(N, 11, C), (N, 4, 5, C), (N, 3, 4, 5, C)])
@pytest.mark.parametrize("dtype, bound", [("float32", 2e-6), ("bfloat16", 2e-2)])
def test_values(shape, dtype, bound):
    p, x = values(dtype, shape)
    assert calls(jaxconv.fuse(block), p, x)[1] == 0
    expected = block(*jax.tree.map(lambda a: a.astype("float32"), (p, x)))
    actual = jax.jit(jaxconv.fuse(block))(p, x)
    assert actual.dtype == x.dtype
    np.testing.assert_allclose(actual.astype("float32"), expected, rtol=bound, atol=4 * bound)


def test_a_matrix_that_lies_transposed():
    p, x = values()
    numbers = (((x.ndim - 1,), (1,)), ((), ()))

    def f(p, x):
        y = lax.dot_general(convolved(p, x), p["first"].T.copy(), numbers)
        return jax.nn.relu(y + p["first_bias"])

    epilogues, products = calls(jaxconv.fuse(f), p, x)
    assert (epilogues, products) == (["bias relu"], 0)
    np.testing.assert_allclose(jaxconv.fuse(f)(p, x), f(p, x), rtol=1e-5, atol=1e-5)


def test_the_precision_is_the_products():
    def f(p, x):
        return jax.nn.relu(jnp.matmul(x, p["first"], precision="highest") + p["first_bias"])

    program = jax.make_jaxpr(jaxconv.fuse(lambda p, x: f(p, convolved(p, x))))(*values())
    specs = [e.params["spec"] for e in equations(program) if e.primitive is fused.conv_fused_p]
    assert [s.precision for s in specs if s.filter_spatial == (1, 1)] == ["highest"]


def loss(f, p, x):
    return (f(p, x).astype("float32") ** 2).sum()


@pytest.mark.parametrize("faster", [True, False])
@pytest.mark.parametrize("order", ["outside", "inside"])
def test_a_gradient_is_that_of_the_product(order, faster, monkeypatch):
    """A differentiated call keeps the activation's operand, or is a product again."""
    slower = fuse_convolution.slower

    def slower_if_kept(spec, types, form, *options, **named):
        if form.pre and not faster:
            return "it is"
        return slower(spec, types, form, *options, **named)

    monkeypatch.setattr(fuse_convolution, "slower", slower_if_kept)
    p, x = values()
    if order == "outside":
        gradient = jax.grad(functools.partial(loss, jaxconv.fuse(block)))
    else:
        gradient = jaxconv.fuse(jax.grad(functools.partial(loss, block)))
    epilogues, products = calls(gradient, p, x)
    assert (epilogues, products) == ((["bias gelu pre"], 5) if faster else ([], 6))
    expected = jax.grad(functools.partial(loss, block))(p, x)
    for name, actual in gradient(p, x).items():
        np.testing.assert_allclose(actual, expected[name], rtol=1e-4, atol=1e-4, err_msg=name)


def test_a_gradient_by_some_operands_alone():
    p, x = values()

    def of_scale(f, scale):
        return loss(f, p | {"scale": scale}, x)

    actual = jax.grad(functools.partial(of_scale, jaxconv.fuse(block)))(p["scale"])
    expected = jax.grad(functools.partial(of_scale, block))(p["scale"])
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def test_transformations():
    p, x = values()
    f, g = jaxconv.fuse(block), block
    dx = jnp.ones_like(x)

    def hvp(f):
        gradient = jax.grad(lambda x: loss(f, p, x))
        return jax.jvp(gradient, (x,), (dx,))[1]

    pairs = [
        (jax.jvp(lambda x: f(p, x), (x,), (dx,)), jax.jvp(lambda x: g(p, x), (x,), (dx,))),
        (jax.vmap(f, (None, 0))(p, x[:, None]), jax.vmap(g, (None, 0))(p, x[:, None])),
        (hvp(f), hvp(g)),
        (jax.checkpoint(f)(p, x), g(p, x)),
        (jax.linearize(lambda x: f(p, x), x)[1](dx), jax.jvp(lambda x: g(p, x), (x,), (dx,))[1]),
    ]
    for actual, expected in pairs:
        for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)


def one(p, y):
    return jax.nn.relu(y @ p["first"] + p["first_bias"])


def batched(p, y):
    w = jnp.stack([p["first"]] * N)
    numbers = (((y.ndim - 1,), (1,)), ((0,), (0,)))
    return jax.nn.relu(lax.dot_general(y, w, numbers) + p["first_bias"])


def read_twice(p, y):
    product = y @ p["first"]
    return jax.nn.relu(product + p["first_bias"]), product


def emulated(p, y):
    precision = lax.DotAlgorithmPreset.BF16_BF16_F32_X3
    return jax.nn.relu(jnp.matmul(y, p["first"], precision=precision) + p["first_bias"])


def unknown(p, y):
    return jnp.cos(y @ p["first"] + p["first_bias"])


def forbidden(p, y):
    with jaxconv.override(fuse=False):
        return one(p, y)


@pytest.mark.parametrize("layer", [batched, read_twice, emulated, unknown, forbidden])
def test_other_products_stay(layer):
    p, x = values()
    epilogues, products = calls(jaxconv.fuse(lambda p, x: layer(p, convolved(p, x))), p, x)
    assert not [e for e in epilogues if e] and products == 1


def test_a_program_on_an_explicit_mesh_keeps_its_products():
    kind = jax.sharding.AxisType.Explicit
    mesh = jax.make_mesh((1,), ("a",), axis_types=(kind,), devices=jax.devices("cpu")[:1])
    p, x = values()
    with jax.set_mesh(mesh):
        x = jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.P("a")))
        _, products = calls(jaxconv.fuse(lambda p, x: one(p, convolved(p, x))), p, x)
    assert products == 1


@pytest.mark.parametrize("for_cuda", [True, False])
def test_kernels_that_are_no_faster_are_not_chosen(for_cuda, monkeypatch):
    """The matrices are so small that calls take longer than separate operations."""
    monkeypatch.undo()
    monkeypatch.setattr(fuse_convolution, "for_cuda", lambda: for_cuda)
    assert calls(jaxconv.fuse(block), *values()) == ([], 2)


def test_a_function_of_nan_that_is_a_number_is_no_activation():
    """``where(y > 0, y, 0)`` is 0 there, the epilogue's relu NaN."""
    p, x = values()
    x = x.at[0, 0, 0, 0].set(np.nan)

    def dense(p, x):
        y = convolved(p, x) @ p["first"] + p["first_bias"]
        return jnp.where(y > 0, y, 0)

    np.testing.assert_array_equal(jaxconv.fuse(dense)(p, x), dense(p, x))


@pytest.mark.parametrize("for_cuda, layers", [(True, 2), (False, 1)])
def test_a_bias_and_an_activation_alone_are_left_to_a_cpu(for_cuda, layers, monkeypatch):
    """A call would compute the activation again in the backward pass; the shortcut has a call."""
    monkeypatch.undo()
    monkeypatch.setattr(fuse_convolution, "for_cuda", lambda: for_cuda)
    fused = jaxconv.fuse(lambda p, x: block(p, convolved(p, x)))
    program = jax.make_jaxpr(jax.grad(lambda p, x: fused(p, x).sum()))(*values())
    names = [eqn.primitive.name for eqn in equations(program)]
    assert names.count("jaxconv_normalise") == layers


@pytest.mark.parametrize(
    "kernel, xla, of_bias, faster",
    [
        (47.5, 45.8, 133.5, True),
        (89.0, 45.8, 133.5, True),
        (90.0, 45.8, 133.5, False),
        (0, 0, 0, True),
    ],
)
def test_a_plain_convolution_may_take_the_pass_that_it_saves(
    kernel, xla, of_bias, faster, monkeypatch
):
    """The times are those of 384 to 1536 channels on 128 images of 14x14; 0 is unknown."""

    def selecting(**times):
        chosen = native.Selection("kernel", **times)
        return lambda *_: types.SimpleNamespace(select=lambda *_: (chosen, ""))

    plain = selecting(microseconds=kernel, xla_microseconds=xla)
    monkeypatch.setattr(fuse_convolution, "Bilinear", plain)
    monkeypatch.setattr(fuse_convolution, "Fused", selecting(xla_microseconds=of_bias))
    monkeypatch.setattr(fuse_convolution, "slower", lambda *operands, **options: "it is")
    p, x = values()
    program = jax.make_jaxpr(jaxconv.fuse(block))(p, x)
    bound = [e.params["spec"] for e in equations(program) if e.primitive.name == "jaxconv_fprop"]
    assert [spec.algorithm[0] for spec in bound] == ["native"] * faster


def test_a_function_of_several_reads_follows_a_plain_convolution(monkeypatch):
    monkeypatch.setattr(fuse_convolution, "slower", lambda *operands, **options: "it is")
    monkeypatch.setattr(fuse_convolution, "by_kernel", lambda *operands: True)
    p, x = values()
    f = jaxconv.fuse(lambda p, x: one(p, convolved(p, x)))
    assert calls(f, p, x) == ([], 1)  # relu reads the product once
    f = jaxconv.fuse(block)
    assert calls(f, p, x) == ([], 1)
    np.testing.assert_allclose(f(p, x), block(p, x), rtol=1e-5, atol=1e-5)
