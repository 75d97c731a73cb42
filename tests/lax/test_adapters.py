"""Layers of other libraries on this library's kernels: by hooks, ``install`` and ``override``.

Every test compares a layer's output and gradients, by its parameters and its input, with those
without jaxconv, and asks ``explain`` whether kernels computed the convolutions, because a hook that
falls back to XLA would pass a comparison of numbers. Libraries that are not installed are skipped.
"""

from __future__ import annotations

import functools
import importlib
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import on_cpu

import jaxconv

HOOK = {"conv_general_dilated": jaxconv.conv_general_dilated}
OPS = ["dgrad", "fprop", "wgrad"]

# Relative to the largest element. Both sides add the same products in float32 in different orders.
# The longest sums here have 1440 terms (wgrad of 6 images of 12 x 20), and two orders of T random
# terms differ by about sqrt(T) * 2**-24 of the sum's own size, 2e-6. In bfloat16 both sides round
# such sums once to 8 bits: neighbouring results differ by one unit, at most 2**-7.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2**-7}

pytestmark = pytest.mark.usefixtures("native_kernels")


def library(name: str):
    """The module; skips the test if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"{name} cannot be imported: {error}")


@pytest.fixture(autouse=True)
def float32_arithmetic(platform):
    """On a GPU the default precision may be TF32; tests compare float32 sums."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture
def installed():
    jaxconv.install()
    try:
        yield
    finally:
        jaxconv.uninstall()


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def filled(shapes):
    """Random parameters of these shapes, because libraries initialise biases with zero."""
    leaves, tree = jax.tree.flatten(shapes)
    drawn = [draw(*leaf.shape, seed=i).astype(leaf.dtype) for i, leaf in enumerate(leaves, 2)]
    return jax.tree.unflatten(tree, drawn)


def value_and_gradients(apply):
    """A function of (parameters, x): ``apply``'s output, and both gradients of a functional."""

    def evaluate(parameters, x):
        y, pullback = jax.vjp(apply, parameters, x)
        return y, *pullback(jnp.asarray(draw(*y.shape, seed=1), y.dtype))

    return evaluate


def assert_same(ours, lax, parameters, x) -> None:
    """Compares output and gradients of two functions; lax's runs without jaxconv.

    lax's side runs on the CPU, which has every convolution. In bfloat16 both sides run on the same
    device, because other sums of a layer, for example of a bias' gradient, round differently on
    each device.
    """
    actual = jax.jit(value_and_gradients(ours))(parameters, x)
    narrow = actual[0].dtype == jnp.bfloat16
    with jaxconv.override(False):
        evaluate = value_and_gradients(lax)
        expected = (jax.jit(evaluate) if narrow else functools.partial(on_cpu, evaluate))(
            parameters, x
        )
    tolerance = TOLERANCE[expected[0].dtype.name]
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), e in zip(
        jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True
    ):
        assert (a.shape, a.dtype) == (e.shape, e.dtype)
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        deviation = np.abs(a - e).max() / np.abs(e).max()
        assert deviation <= tolerance, f"{jax.tree_util.keystr(path)}: {deviation:.1e}"


def assert_on_kernels(apply, parameters, x, ops=OPS):
    """Checks that kernels compute each convolution of the gradients, as ``ops`` of one problem."""
    explanation = jaxconv.explain(value_and_gradients(apply), parameters, x)
    found = explanation.convolutions
    assert sorted(c.op for c in found) == ops, f"\n{explanation}"
    assert explanation.on_kernels == len(ops), f"\n{explanation}"
    assert all(c.instance.startswith(f"{c.op}_") for c in found)
    # The three operations of a problem have the same number of FLOP. More FLOP would mean products
    # with the zeros of a dilated array, or with an image's pixels taken for a filter.
    assert len({c.flops for c in found}) == 1, f"\n{explanation}"
    return explanation


# --- Flax -----------------------------------------------------------------------------------------

X1, X2, X3 = (2, 20, 4), (2, 12, 10, 4), (2, 6, 5, 7, 4)

# Arguments that linen and nnx share, and the shape of the input.
FLAX_CONVS = {
    "same": (dict(kernel_size=(3, 3)), X2),
    "strided_same": (dict(kernel_size=(3, 3), strides=2), X2),
    "strided_valid": (dict(kernel_size=(3, 2), strides=(2, 1), padding="VALID"), X2),
    "pairs": (dict(kernel_size=(3, 3), padding=((2, 0), (1, 3))), X2),
    "number": (dict(kernel_size=(5, 3), padding=1), X2),
    "circular": (dict(kernel_size=(3, 3), padding="CIRCULAR", strides=2), X2),
    "reflect": (dict(kernel_size=(3, 3), padding="REFLECT"), X2),
    "dilated": (dict(kernel_size=(3, 3), kernel_dilation=(2, 3)), X2),
    "input_dilated": (
        dict(kernel_size=(3, 3), input_dilation=2, padding=((1, 2), (1, 2))),
        X2,
    ),
    "grouped": (dict(kernel_size=(3, 3), feature_group_count=2), X2),
    "depthwise": (dict(kernel_size=(3, 3), feature_group_count=4), X2),
    "masked": (dict(kernel_size=(3, 3), mask=np.triu(np.ones((3, 3)))[..., None, None]), X2),
    "no_bias": (dict(kernel_size=(1, 1), use_bias=False), X2),
    "bfloat16": (dict(kernel_size=(3, 3), dtype=jnp.bfloat16), X2),
    "causal_1d": (dict(kernel_size=(4,), padding="CAUSAL", kernel_dilation=2), X1),
    "3d": (dict(kernel_size=(3, 2, 3), strides=(1, 2, 1)), X3),
    "no_batch": (dict(kernel_size=(3, 3)), X2[1:]),
    "two_batch_axes": (dict(kernel_size=(3, 3)), (3, *X2)),
}
FEATURES = 8


def of_mask(arguments: dict, kernel_shape: tuple[int, ...]) -> dict:
    """The arguments with their mask broadcast to the filter's shape."""
    if "mask" not in arguments:
        return arguments
    return {**arguments, "mask": np.broadcast_to(arguments["mask"], kernel_shape)}


def linen_layer(kind: str, arguments: dict, x: np.ndarray):
    """A layer as a function of (parameters, x), and its parameters."""
    linen = library("flax.linen")
    kernel_shape = (*arguments["kernel_size"], x.shape[-1], FEATURES)
    layer = getattr(linen, kind)(FEATURES, **of_mask(arguments, kernel_shape))
    return layer.apply, filled(jax.eval_shape(layer.init, jax.random.key(0), x))


def nnx_layer(kind: str, arguments: dict, x: np.ndarray):
    nnx = library("flax.nnx")
    kernel_shape = (*arguments["kernel_size"], x.shape[-1], FEATURES)
    arguments = of_mask(arguments, kernel_shape)
    layer = nnx.eval_shape(
        lambda: getattr(nnx, kind)(x.shape[-1], FEATURES, **arguments, rngs=nnx.Rngs(0))
    )
    graph, shapes = nnx.split(layer)
    return lambda parameters, x: nnx.merge(graph, parameters)(x), filled(shapes)


FLAX = {"linen": linen_layer, "nnx": nnx_layer}
flax = pytest.mark.parametrize("layer", FLAX.values(), ids=FLAX)


@flax
@pytest.mark.parametrize("name", FLAX_CONVS)
def test_flax_conv_given_our_convolution(layer, name):
    arguments, shape = FLAX_CONVS[name]
    x = draw(*shape)
    ours, parameters = layer("Conv", {**arguments, **HOOK}, x)
    theirs, _ = layer("Conv", arguments, x)
    assert_same(ours, theirs, parameters, x)
    assert_on_kernels(ours, parameters, x)


def test_linen_conv_given_a_factory():
    x = draw(*X2)
    factory = {"conv_general_dilated_cls": lambda: jaxconv.conv_general_dilated}
    ours, parameters = linen_layer("Conv", {"kernel_size": (3, 3), **factory}, x)
    theirs, _ = linen_layer("Conv", {"kernel_size": (3, 3)}, x)
    assert_same(ours, theirs, parameters, x)
    assert_on_kernels(ours, parameters, x)


def test_nnx_conv_with_a_wider_result():
    arguments = dict(
        kernel_size=(3, 3), dtype=jnp.bfloat16, preferred_element_type=jnp.float32, use_bias=False
    )
    x = draw(*X2)
    ours, parameters = nnx_layer("Conv", {**arguments, **HOOK}, x)
    theirs, _ = nnx_layer("Conv", arguments, x)
    forward = jaxconv.explain(ours, parameters, x)
    assert forward.on_kernels == len(forward.convolutions) == 1
    assert forward.convolutions[0].result.startswith("f32")
    actual, expected = ours(parameters, x), on_cpu(theirs, parameters, x)
    assert actual.dtype == expected.dtype == jnp.float32
    np.testing.assert_allclose(actual, expected, atol=1e-5 * np.abs(expected).max())


def test_a_sharding_of_none_is_the_default():
    x, w = draw(2, 8, 6, 5), draw(7, 8, 3, 1)
    actual = jaxconv.conv_general_dilated(x, w, (1, 1), "SAME", out_sharding=None)
    np.testing.assert_array_equal(actual, jaxconv.conv_general_dilated(x, w, (1, 1), "SAME"))


def test_linen_conv_local_given_our_convolution():
    """The layer calls its hook only for the output's shape; lax computes the convolution."""
    x = draw(*X2)
    arguments = {"kernel_size": (3, 3), "strides": (2, 1)}
    ours, parameters = linen_layer("ConvLocal", {**arguments, **HOOK}, x)
    theirs, their_parameters = linen_layer("ConvLocal", arguments, x)
    assert jax.tree.map(jnp.shape, parameters) == jax.tree.map(jnp.shape, their_parameters)
    assert_same(ours, theirs, parameters, x)
    assert jaxconv.explain(ours, parameters, x).on_kernels == 0


def test_linen_conv_local_installed(installed):
    """Patches are a convolution with a constant filter, so there is no weight gradient."""
    x = draw(*X2)
    apply, parameters = linen_layer("ConvLocal", {"kernel_size": (3, 3), "strides": (2, 1)}, x)
    assert_same(apply, apply, parameters, x)
    assert_on_kernels(apply, parameters, x, ops=["dgrad", "fprop"])


FLAX_TRANSPOSES = {
    "same": (dict(kernel_size=(3, 3), strides=(2, 2)), X2),
    "valid": (dict(kernel_size=(3, 2), strides=(2, 3), padding="VALID"), X2),
    "pairs": (dict(kernel_size=(3, 3), strides=(2, 2), padding=((1, 2), (2, 1))), X2),
    "unstrided": (dict(kernel_size=(3, 3)), X2),
    "dilated": (dict(kernel_size=(3, 3), strides=(2, 2), kernel_dilation=(2, 2)), X2),
    "circular": (dict(kernel_size=(3, 3), strides=(2, 2), padding="CIRCULAR"), X2),
    "bfloat16": (dict(kernel_size=(3, 3), strides=(2, 2), dtype=jnp.bfloat16), X2),
    "1d": (dict(kernel_size=(4,), strides=(2,)), X1),
    "3d": (dict(kernel_size=(3, 2, 3), strides=(1, 2, 2)), X3),
}


def assert_transpose_overridden(layer, name: str, reversed_filter: bool) -> None:
    arguments, shape = FLAX_TRANSPOSES[name]
    x = draw(*shape)
    arguments = {**arguments, "transpose_kernel": reversed_filter}
    apply, parameters = layer("ConvTranspose", arguments, x)
    with jaxconv.override():
        assert_same(apply, apply, parameters, x)
        assert_on_kernels(apply, parameters, x)


@pytest.mark.parametrize("reversed_filter", [False, True], ids=["filter", "transposed_filter"])
@pytest.mark.parametrize("name", FLAX_TRANSPOSES)
def test_linen_conv_transpose_overridden(name, reversed_filter):
    assert_transpose_overridden(linen_layer, name, reversed_filter)


@pytest.mark.parametrize("name", ["same", "circular", "bfloat16"])
def test_nnx_conv_transpose_overridden(name):
    assert_transpose_overridden(nnx_layer, name, reversed_filter=True)


@pytest.mark.parametrize("name", FLAX_CONVS)
def test_linen_conv_installed(name, installed):
    """Without the hook. The nnx layer makes the same call of lax."""
    arguments, shape = FLAX_CONVS[name]
    x = draw(*shape)
    apply, parameters = linen_layer("Conv", arguments, x)
    assert_same(apply, apply, parameters, x)
    assert_on_kernels(apply, parameters, x)


# --- Equinox --------------------------------------------------------------------------------------

EQUINOX = {
    "conv1d": ("Conv1d", dict(kernel_size=4, stride=2), (4, 21)),
    "conv2d": ("Conv2d", dict(kernel_size=3), (4, 12, 10)),
    "conv2d_same": ("Conv2d", dict(kernel_size=3, padding="SAME"), (4, 12, 10)),
    # No window reaches the last row and column.
    "conv2d_uncovered": ("Conv2d", dict(kernel_size=3, stride=2), (4, 12, 10)),
    "conv2d_strided": ("Conv2d", dict(kernel_size=3, stride=2, padding=1), (4, 12, 10)),
    "conv2d_dilated": ("Conv2d", dict(kernel_size=(3, 2), dilation=2), (4, 12, 10)),
    "conv2d_grouped": ("Conv2d", dict(kernel_size=3, groups=2), (4, 12, 10)),
    "conv2d_depthwise": ("Conv2d", dict(kernel_size=3, groups=4), (4, 12, 10)),
    "conv2d_circular": (
        "Conv2d",
        dict(kernel_size=3, padding="SAME", padding_mode="CIRCULAR"),
        (4, 12, 10),
    ),
    "conv3d": (
        "Conv3d",
        dict(kernel_size=(3, 2, 3), padding=((1, 0), (0, 1), (1, 1))),
        (4, 6, 5, 7),
    ),
    "transpose1d": ("ConvTranspose1d", dict(kernel_size=4, stride=2), (4, 12)),
    "transpose2d": ("ConvTranspose2d", dict(kernel_size=3), (4, 12, 10)),
    "transpose2d_strided": (
        "ConvTranspose2d",
        dict(kernel_size=3, stride=2, padding=1, output_padding=1),
        (4, 12, 10),
    ),
    "transpose2d_grouped": (
        "ConvTranspose2d",
        dict(kernel_size=3, stride=2, groups=2),
        (4, 12, 10),
    ),
    "transpose3d": ("ConvTranspose3d", dict(kernel_size=3, stride=(1, 2, 1)), (4, 6, 5, 7)),
}


def equinox_layer(kind: str, arguments: dict):
    equinox = library("equinox")
    make = getattr(equinox.nn, kind)
    layer = equinox.filter_eval_shape(make, 4, FEATURES, **arguments, key=jax.random.key(0))
    shapes, rest = equinox.partition(layer, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    return lambda parameters, x: equinox.combine(parameters, rest)(x), filled(shapes)


def batch_n_and_groups(convolution) -> tuple[int, ...]:
    """The part of a problem key after its dtypes and precision; a batch is of problems."""
    return tuple(map(int, re.search(r" b(\d+) n(\d+) g(\d+) ", convolution.problem).groups()))


@pytest.mark.parametrize("name", EQUINOX)
def test_equinox_layer_installed(name, installed):
    """The layer takes one example; vmap adds the batch."""
    kind, arguments, shape = EQUINOX[name]
    one, parameters = equinox_layer(kind, arguments)
    apply = jax.vmap(one, (None, 0))
    x = draw(6, *shape)
    assert_same(apply, apply, parameters, x)
    explanation = assert_on_kernels(apply, parameters, x)
    for convolution in explanation.convolutions:
        batch, n, groups = batch_n_and_groups(convolution)
        assert (n, batch * groups) == (6, arguments.get("groups", 1)), convolution.problem


@pytest.mark.parametrize("name", ["conv2d", "transpose2d_strided"])
def test_equinox_layer_on_one_example(name, installed):
    kind, arguments, shape = EQUINOX[name]
    apply, parameters = equinox_layer(kind, arguments)
    x = draw(*shape)
    assert_same(apply, apply, parameters, x)
    explanation = assert_on_kernels(apply, parameters, x)
    assert {batch_n_and_groups(c) for c in explanation.convolutions} == {(1, 1, 1)}


@pytest.mark.parametrize("name", ["conv2d", "conv2d_strided", "conv2d_grouped"])
def test_an_ensemble_of_equinox_layers_is_one_batched_call(name, installed):
    """Filters and inputs are mapped: independent convolutions, not feature groups."""
    kind, arguments, shape = EQUINOX[name]
    one, parameters = equinox_layer(kind, arguments)
    members = jax.tree.map(lambda a: np.stack([a, -a, 2 * a]), parameters)
    apply = jax.vmap(jax.vmap(one, (None, 0)))
    x = draw(3, 6, *shape)
    assert_same(apply, apply, members, x)
    explanation = assert_on_kernels(apply, members, x)
    for convolution in explanation.convolutions:
        batch, n, groups = batch_n_and_groups(convolution)
        # If the layer has groups, three times as many groups compute the same.
        assert batch == 3 or "groups" in arguments, convolution.problem
        assert (n, batch * groups) == (6, 3 * arguments.get("groups", 1)), convolution.problem


# --- Haiku ----------------------------------------------------------------------------------------

HAIKU = {
    "conv1d": ("Conv1D", dict(output_channels=8, kernel_shape=3, padding="VALID"), X1),
    "conv2d": ("Conv2D", dict(output_channels=8, kernel_shape=3), X2),
    "conv2d_strided": ("Conv2D", dict(output_channels=8, kernel_shape=3, stride=2), X2),
    "conv2d_valid": (
        "Conv2D",
        dict(output_channels=8, kernel_shape=3, stride=2, padding="VALID"),
        X2,
    ),
    "conv2d_dilated": ("Conv2D", dict(output_channels=8, kernel_shape=3, rate=2), X2),
    "conv2d_pairs": (
        "Conv2D",
        dict(output_channels=8, kernel_shape=3, padding=((1, 2), (0, 1))),
        X2,
    ),
    "conv2d_grouped": (
        "Conv2D",
        dict(output_channels=8, kernel_shape=3, feature_group_count=2),
        X2,
    ),
    "conv2d_masked": (
        "Conv2D",
        dict(
            output_channels=8,
            kernel_shape=3,
            mask=np.broadcast_to(np.triu(np.ones((3, 3)))[..., None, None], (3, 3, 4, 8)),
        ),
        X2,
    ),
    "conv2d_channels_first": (
        "Conv2D",
        dict(output_channels=8, kernel_shape=3, stride=2, data_format="NCHW"),
        (2, 4, 12, 10),
    ),
    "conv3d": ("Conv3D", dict(output_channels=8, kernel_shape=(3, 2, 3)), X3),
    "depthwise": ("DepthwiseConv2D", dict(channel_multiplier=2, kernel_shape=3), X2),
    "transpose1d": ("Conv1DTranspose", dict(output_channels=8, kernel_shape=4, stride=2), X1),
    "transpose2d": ("Conv2DTranspose", dict(output_channels=8, kernel_shape=3, stride=2), X2),
    "transpose2d_valid": (
        "Conv2DTranspose",
        dict(output_channels=8, kernel_shape=3, stride=2, padding="VALID"),
        X2,
    ),
    "transpose2d_channels_first": (
        "Conv2DTranspose",
        dict(output_channels=8, kernel_shape=3, stride=2, data_format="NCHW"),
        (2, 4, 12, 10),
    ),
}


@pytest.mark.parametrize("name", HAIKU)
def test_haiku_layer_installed(name, installed):
    haiku = library("haiku")
    kind, arguments, shape = HAIKU[name]
    x = draw(*shape)
    transformed = haiku.without_apply_rng(
        haiku.transform(lambda x: getattr(haiku, kind)(**arguments)(x))
    )
    parameters = filled(jax.eval_shape(transformed.init, jax.random.key(0), x))
    assert_same(transformed.apply, transformed.apply, parameters, x)
    assert_on_kernels(transformed.apply, parameters, x)


# --- JAX itself -----------------------------------------------------------------------------------

PLAIN = {
    "jnp.convolve": (jnp.convolve, (7,), (40,)),
    "jnp.correlate": (jnp.correlate, (7,), (40,)),
    "scipy.convolve": (lambda w, x: jax.scipy.signal.convolve(x, w, "same"), (3, 5), (20, 30)),
    "scipy.correlate2d": (
        lambda w, x: jax.scipy.signal.correlate2d(x, w, "valid"),
        (3, 5),
        (20, 30),
    ),
    "lax.conv": (lambda w, x: jax.lax.conv(x, w, (2, 1), "SAME"), (8, 4, 3, 3), (2, 4, 12, 10)),
    "lax.conv_transpose": (
        lambda w, x: jax.lax.conv_transpose(x, w, (2, 2), "SAME"),
        (3, 3, 4, 8),
        X2,
    ),
}


@pytest.mark.parametrize("name", PLAIN)
def test_functions_of_jax_installed(name, installed):
    apply, w_shape, x_shape = PLAIN[name]
    w, x = draw(*w_shape), draw(*x_shape)
    assert_same(apply, apply, w, x)
    assert_on_kernels(apply, w, x)


def test_patches_installed(installed):
    def apply(scale, x):
        return jax.lax.conv_general_dilated_patches(scale * x, (3, 3), (2, 1), "SAME")

    scale, x = np.float32(2), draw(2, 4, 12, 10)
    assert_same(apply, apply, scale, x)
    assert_on_kernels(apply, scale, x, ops=["dgrad", "fprop"])


# --- which setting counts -------------------------------------------------------------------------


def test_a_compiled_layer_follows_the_setting_it_is_called_under():
    """One jitted function works for both, because the setting is part of the cache's key."""
    x = draw(*X2)
    apply, parameters = linen_layer("Conv", {"kernel_size": (3, 3)}, x)
    step = jax.jit(apply)

    def on_kernels() -> bool:
        return "jaxconv_fprop" in step.lower(parameters, x).compile().as_text()

    assert not on_kernels()
    with jaxconv.override():
        assert on_kernels()
        with jaxconv.override(False):
            assert not on_kernels()
    assert not on_kernels()


def test_a_layer_runs_on_our_kernels_in_every_thread_of_an_installed_program(installed):
    x = draw(*X2)
    apply, parameters = linen_layer("Conv", {"kernel_size": (3, 3)}, x)
    found = []
    thread = threading.Thread(
        target=lambda: found.append(jaxconv.explain(apply, parameters, x).on_kernels)
    )
    thread.start()
    thread.join()
    assert found == [1]
