"""The bench's networks: their sizes and layers; both libraries compute the same results."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxconv
from jaxconv.bench import networks
from jaxconv.bench.networks import NETWORKS, programs
from jaxconv.bench.networks.blocks import Pass

pytestmark = pytest.mark.usefixtures("on_the_cpu")

# Published parameter counts: torchvision's (exact), and the 3-D U-Net's from its paper (19.07 M).
PARAMETERS = {
    "resnet50": 25_557_032,
    "resnext50": 25_028_904,
    "mobilenet_v2": 3_504_872,
    "efficientnet_b0": 5_288_548,
    "convnext_t": 28_589_128,
    "unet3d": 19_072_291,
}

# A few layers with every kind of block of a network, because most of a test's time is compiling.
SHALLOW = {
    "resnet50": (networks.resnet50, {"STAGES": ((2, 2),)}),
    "resnext50": (networks.resnet50, {"STAGES": ((1, 2),)}),
    "mobilenet_v2": (networks.mobilenet, {"STAGES": ((6, 24, 2, 2),)}),
    "efficientnet_b0": (networks.efficientnet_b0, {"STAGES": ((6, 24, 2, 2, 5),)}),
    "convnext_t": (networks.convnext_t, {"STAGES": ((1, 32), (1, 64))}),
    "unet": (networks.unet, {"CHANNELS": (32, 64), "BLOCKS": 1}),
    "unet3d": (networks.unet3d, {"CHANNELS": (8, 16)}),
    "wavenet": (networks.wavenet, {"DILATIONS": (1, 2), "RESIDUAL": 16, "SKIP": 32}),
}

# Extents of the inputs. The last activations have enough pixels for a variance.
SIZES = {"unet": 8, "unet3d": 8, "wavenet": 64}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_network_has_as_many_parameters_as_published(name):
    network = NETWORKS[name]
    x = jax.ShapeDtypeStruct(programs.input_shape(network, batch=1), jnp.float32)
    declared = programs.signature(network, x).parameters
    assert sum(math.prod(p.shape) for p in declared) == PARAMETERS[name]


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_gives_what_it_promises(name):
    network = NETWORKS[name]
    x = jax.ShapeDtypeStruct(programs.input_shape(network), jnp.bfloat16)
    y = programs.signature(network, x).y
    images = {2: (1000,), 3: (128, 128, 128, 3)}
    expected = {"unet": (64, 64, 4), "unet3d": images[3], "wavenet": (16384, 256)}
    assert y.shape == (network.batch, *expected.get(name, images[2]))
    assert y.dtype == jnp.bfloat16


def relative(ours, theirs) -> float:
    """||ours - theirs|| / ||theirs|| over all arrays."""
    ours, theirs = (
        np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])
        for tree in (ours, theirs)
    )
    assert np.isfinite(theirs).all()
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def compiled(function, *arguments):
    """Compiles the function without optimisation, which takes half the time."""
    options = {"xla_backend_optimization_level": 0}
    return jax.jit(function).lower(*arguments).compile(compiler_options=options)


def check_both_libraries(name: str, batch: int, size: int) -> None:
    """Inference and training in float32: both libraries agree, and the loss falls."""
    network = NETWORKS[name]
    shape = programs.input_shape(network, batch, size)
    state = programs.initial_state(network, jax.ShapeDtypeStruct(shape, jnp.float32))
    state, examples = jax.device_put(state), programs.random_examples(network, shape, jnp.float32)
    found = {}
    for library in ("lax", "jaxconv"):
        with jaxconv.override(library == "jaxconv"):
            infer = compiled(programs.inference(network), state, examples.x)
            step = compiled(programs.training_step(network), state, examples)
        found[library] = infer(state, examples.x), *step(state, examples)
        if library == "lax":
            signs = jax.random.rademacher(jax.random.key(0), shape, jnp.float32)
            rounded = examples._replace(x=examples.x * (1 + np.finfo(np.float32).eps * signs))
            sensitivity = relative(step(state, rounded)[0].velocity, found["lax"][1].velocity)
    (y, after, loss), (lax_y, lax_after, lax_loss) = found["jaxconv"], found["lax"]
    assert relative(y, lax_y) < 1e-4
    assert relative(loss, lax_loss) < 1e-4
    # The first step's velocity is the gradient. It may differ by more than the results: a sum close
    # to zero may have another sign in the other library and then passes a ReLU, and gradients of
    # deep networks amplify rounding. A change of the input's last bit moves ResNet-50's by 2 %.
    assert relative(after.velocity, lax_after.velocity) < max(1e-2, 4 * sensitivity)
    if state.statistics:
        assert relative(after.statistics, lax_after.statistics) < 1e-4
        assert relative(after.statistics, state.statistics) > 1e-3
    for _ in range(10):
        after, later = step(after, examples)
    assert later < loss


@pytest.mark.parametrize("name", NETWORKS)
def test_a_shallow_network_is_the_same_on_both_libraries(name, monkeypatch):
    module, constants = SHALLOW[name]
    for constant, value in constants.items():
        monkeypatch.setattr(module, constant, value)
    check_both_libraries(name, batch=2, size=SIZES.get(name, 32))


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_is_the_same_on_both_libraries(name, monkeypatch):
    if name == "unet":  # its half a billion parameters take gigabytes
        monkeypatch.setattr(networks.unet, "CHANNELS", (32, 64, 128, 128))
    check_both_libraries(name, batch=8, size=SIZES.get(name, 64))


def test_a_size_that_a_network_cannot_halve_is_refused():
    with pytest.raises(ValueError, match="multiple of 8"):
        programs.input_shape(NETWORKS["unet"], 1, 12)


def test_a_network_sees_no_later_sample(monkeypatch):
    module, constants = SHALLOW["wavenet"]
    for constant, value in constants.items():
        monkeypatch.setattr(module, constant, value)
    network = NETWORKS["wavenet"]
    shape = programs.input_shape(network, 1, 16)
    state = programs.initial_state(network, jax.ShapeDtypeStruct(shape, jnp.float32))
    x = programs.random_examples(network, shape, jnp.float32).x
    infer = jax.jit(programs.inference(network))
    change = jnp.abs(infer(state, x.at[0, 9].add(1.0)) - infer(state, x)).max(-1)[0]
    assert not change[:9].any() and change[9:13].all()


# --- layers ---------------------------------------------------------------------------------------


def pass_with(parameters, statistics=(), train=False) -> Pass:
    return Pass([jnp.asarray(p) for p in parameters], [jnp.asarray(s) for s in statistics], train)


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(1.0, 2.0, shape).astype(np.float32)


def test_batch_norm_trains_on_the_batch_and_infers_by_what_it_has_seen():
    x, scale, offset = random(4, 3, 3, 8), random(8), random(2, 8)[1]
    mean, variance = random(3, 8)[2], np.abs(random(4, 8)[3]) + 0.5
    net = pass_with([scale, offset], [mean, variance], train=True)
    of_batch = x.mean((0, 1, 2)), x.var((0, 1, 2))
    expected = (x - of_batch[0]) / np.sqrt(of_batch[1] + 1e-5) * scale + offset
    np.testing.assert_allclose(net.batch_norm(jnp.asarray(x)), expected, atol=1e-4)
    for after, before, now in zip(net.statistics, (mean, variance), of_batch, strict=True):
        np.testing.assert_allclose(after, 0.9 * before + 0.1 * now, rtol=1e-4)

    net = pass_with([scale, offset], [mean, variance])
    expected = (x - mean) / np.sqrt(variance + 1e-5) * scale + offset
    np.testing.assert_allclose(net.batch_norm(jnp.asarray(x)), expected, atol=1e-4)
    assert all(map(np.array_equal, net.statistics, (mean, variance)))


def test_layer_norm_and_group_norm():
    x, scale, offset = random(2, 3, 3, 8), random(8), random(2, 8)[1]
    normalised = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    y = pass_with([scale, offset]).layer_norm(jnp.asarray(x))
    np.testing.assert_allclose(y, normalised * scale + offset, atol=1e-4)

    split = x.reshape(2, 3, 3, 4, 2)
    axes = {"axis": (1, 2, 4), "keepdims": True}
    normalised = (split - split.mean(**axes)) / np.sqrt(split.var(**axes) + 1e-5)
    y = pass_with([scale, offset]).group_norm(jnp.asarray(x), groups=4)
    np.testing.assert_allclose(y, normalised.reshape(x.shape) * scale + offset, atol=1e-4)


def test_squeeze_excite_scales_channels():
    x, narrow, wide = random(2, 3, 3, 8), random(8, 2) / 8, random(2, 8)
    net = pass_with([narrow, np.zeros(2, np.float32), wide, np.zeros(8, np.float32)])
    squeezed = x.mean((1, 2)) @ narrow
    factors = 1 / (1 + np.exp(-(squeezed / (1 + np.exp(-squeezed))) @ wide))
    y = networks.efficientnet_b0.squeeze_excite(net, jnp.asarray(x), 2)
    np.testing.assert_allclose(y, x * factors[:, None, None, :], rtol=1e-4)


def test_a_transposed_convolution_writes_each_window_once():
    x, w = random(1, 2, 2, 3), random(2, 2, 3, 4)
    y = pass_with([w]).conv_transpose(jnp.asarray(x), 4, 2)
    # In lax the window is that of the convolution of the dilated input.
    expected = np.einsum("nhwc,rsck->nhrwsk", x, w[::-1, ::-1]).reshape(1, 4, 4, 4)
    np.testing.assert_allclose(y, expected, rtol=1e-4)
