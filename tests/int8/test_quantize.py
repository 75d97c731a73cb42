"""Quantisation in jaxconv.int8: scales, folded batch norm, calibration, fake quantisation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxconv
from jaxconv import int8
from jaxconv.bench.networks import NETWORKS, programs, resnet50, resnet50_int8

RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, np.float32)


def conv(x, w, **options):
    """lax's convolution, channels-last, in full float32 precision."""
    rank = x.ndim - 2
    axes = "DHW"[3 - rank :]
    stride = options.get("stride", 1)
    dilation = options.get("dilation", 1)
    return lax.conv_general_dilated(
        x,
        w,
        (stride,) * rank,
        options.get("padding", "SAME"),
        rhs_dilation=(dilation,) * rank,
        dimension_numbers=(f"N{axes}C", f"{axes}IO", f"N{axes}C"),
        feature_group_count=options.get("groups", 1),
        precision="highest",
    )


# --- arrays ---------------------------------------------------------------------------------------


def test_quantize_rounds_half_to_even_and_clips(platform):
    x = np.float32([0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.5, 1e9, -1e9, np.inf, np.nan])
    expected = [0, 0, 2, 2, 0, -2, 126, 127, 127, -127, 127, 0]
    q = int8.quantize(x, 1.0)
    assert q.dtype == jnp.int8 and q.tolist() == expected
    assert jax.jit(int8.quantize)(x, 1.0).tolist() == expected
    u = int8.quantize(x, np.float32(0.5), zero_point=3, dtype=jnp.uint8)
    assert u.dtype == jnp.uint8
    assert u.tolist() == [3, 4, 6, 8, 2, 0, 255, 255, 255, 0, 255, 3]
    np.testing.assert_array_equal(int8.dequantize(u[:4], 0.5, zero_point=3), x[:4])


def test_a_scale_on_the_host_gives_the_same_on_every_platform(platform):
    x, scale = normal(1000) * 40, np.float32(0.3)
    # In NumPy: one division and one product, each rounded once.
    expected = np.clip(np.round(x * (np.float32(1) / scale)), -127, 127)
    np.testing.assert_array_equal(jax.jit(lambda x: int8.quantize(x, scale))(x), expected)


@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.inf, np.float32([1, 0])])
def test_a_scale_that_is_not_positive_is_refused(scale):
    with pytest.raises(ValueError, match="scale: expected positive finite"):
        int8.quantize(np.ones(2, np.float32), scale)
    with pytest.raises(ValueError, match="scale: expected positive finite"):
        int8.fake_quantize(np.ones(2, np.float32), scale)


def test_quantize_refuses_other_dtypes():
    with pytest.raises(TypeError, match="expected int8 or uint8, got int16"):
        int8.quantize(np.ones(2, np.float32), 1.0, dtype=np.int16)


def test_max_scale_makes_the_greatest_magnitude_127():
    x = normal(4, 5, 6)
    np.testing.assert_allclose(int8.max_scale(x), np.abs(x).max() / 127, rtol=1e-6)
    np.testing.assert_allclose(int8.max_scale(x, (0, 1)), np.abs(x).max((0, 1)) / 127, rtol=1e-6)
    assert np.abs(int8.quantize(x, int8.max_scale(x))).max() == 127
    assert int8.max_scale(np.zeros(3, np.float32)) == 1
    assert int8.max_scale(np.full(3, 1e-45, np.float32)) == 1  # its reciprocal overflows
    assert np.isnan(int8.max_scale(np.float32([1, np.nan])))


def test_weights_have_a_scale_for_each_output_channel():
    w = normal(3, 3, 8, 16) * np.geomspace(1e-3, 1e3, 16).astype(np.float32)
    w[..., 5] = 0
    q, scale = int8.quantize_weight(w)
    assert q.shape == w.shape and q.dtype == jnp.int8 and scale.shape == (16,)
    assert (np.abs(q).max((0, 1, 2))[np.arange(16) != 5] == 127).all()
    assert (np.abs(int8.dequantize(q, scale) - w) <= 0.5001 * np.asarray(scale)).all()

    q, scale = int8.quantize_weight(w, int8.max_scale(w))
    assert scale.shape == () and np.abs(q).max() == 127
    with pytest.raises(ValueError, match="w_scale"):
        int8.quantize_weight(w, np.ones(8, np.float32))
    with pytest.raises(ValueError, match="expected \\(\\*window"):
        int8.quantize_weight(w[0, 0])


# --- batch normalisation --------------------------------------------------------------------------


@pytest.mark.parametrize("with_bias", [False, True])
def test_a_folded_batch_norm_computes_the_same(with_bias):
    x, w = normal(2, 6, 6, 4), normal(3, 3, 4, 8)
    gamma, beta, mean, bias = normal(4, 8)  # gamma has both signs
    var = np.abs(normal(8)) + 0.1
    bias = bias if with_bias else None
    folded, folded_bias = int8.fold_batch_norm(w, gamma, beta, mean, var, 1e-3, bias)
    sums = np.asarray(conv(x, w), np.float64) + (0 if bias is None else bias)
    expected = (sums - mean) / np.sqrt(var.astype(np.float64) + 1e-3) * gamma + beta
    np.testing.assert_allclose(conv(x, folded) + folded_bias, expected, rtol=1e-4, atol=1e-4)


def test_a_batch_norm_of_other_channels_is_refused():
    with pytest.raises(ValueError, match=r"mean: expected shape \(8,\), got \(4,\)"):
        int8.fold_batch_norm(normal(3, 3, 4, 8), *np.ones((2, 8)), np.ones(4), np.ones(8))


# --- calibration ----------------------------------------------------------------------------------


def network(batch):
    return {"x": batch, "squares": [batch**2, jnp.zeros_like(batch)]}


def test_calibration_finds_the_greatest_magnitude_of_all_batches(platform):
    batches = [normal(8, 10), 3 * normal(8, 10), normal(8, 10)]
    scales = int8.calibrate(network, iter(batches))
    greatest = np.abs(batches).max()
    assert isinstance(scales["x"], np.float32)
    np.testing.assert_allclose(scales["x"], greatest / 127, rtol=1e-6)
    np.testing.assert_allclose(scales["squares"][0], greatest**2 / 127, rtol=1e-6)
    assert scales["squares"][1] == 1


@pytest.mark.parametrize("percentile", [50, 99, 99.9, 100])
def test_calibration_finds_a_percentile_of_all_elements(percentile, platform):
    batches = [normal(100, 50), 2 * normal(60, 50), np.zeros((10, 50), np.float32)]
    found = int8.calibrate(network, batches, percentile=percentile)["x"] * 127
    magnitudes = np.abs(np.concatenate(batches))
    expected = np.percentile(magnitudes, percentile, method="inverted_cdf")
    assert expected * (1 - 1e-6) <= found <= expected * 1.004
    # The result does not depend on the division into batches.
    again = int8.calibrate(network, [np.concatenate(batches)], percentile=percentile)["x"] * 127
    assert again == found


def test_calibration_refuses_what_it_cannot_use():
    x = normal(2, 3)
    with pytest.raises(ValueError, match="batches: expected at least one"):
        int8.calibrate(network, [])
    for percentile in (0, 100.5, -1):
        with pytest.raises(ValueError, match="percentile"):
            int8.calibrate(network, [x], percentile=percentile)
    for number in (np.inf, np.nan):
        bad = [x, np.float32([[number]])]
        for percentile in (None, 99.0):
            with pytest.raises(ValueError, match=r"activations\['squares'\]\[0\].*(inf|nan)"):
                int8.calibrate(network, bad, percentile=percentile)


# --- layers ---------------------------------------------------------------------------------------

LAYERS = {
    "3x3": ((2, 9, 9, 32), (3, 3, 32, 64), {}),
    "strided": ((2, 9, 8, 64), (3, 3, 64, 40), {"stride": 2}),
    "dilated": ((1, 9, 9, 32), (3, 3, 32, 32), {"dilation": 2}),
    "groups": ((1, 6, 6, 64), (3, 3, 32, 64), {"groups": 2}),
    "image": ((2, 8, 8, 3), (5, 5, 3, 32), {"stride": 2}),
    "1-D": ((2, 20, 32), (3, 32, 32), {}),
    "3-D": ((1, 4, 5, 5, 32), (3, 3, 3, 32, 32), {}),
}


@pytest.mark.parametrize("layout", ["NHWC", "NCHW32"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_quantised_layer_is_as_close_as_its_steps(name, layout, platform):
    x_shape, w_shape, options = LAYERS[name]
    if layout == "NCHW32" and len(x_shape) != 4:
        pytest.skip("NCHW32 has two spatial axes")
    x, w, bias = normal(*x_shape), normal(*w_shape) / w_shape[-2], normal(w_shape[-1])
    expected = np.maximum(conv(x, w, **options) + bias, 0)
    x_scale, y_scale = np.asarray([int8.max_scale(x), int8.max_scale(expected)])
    groups = options.get("groups", 1)
    data_format = "NCHW32" if layout == "NCHW32" else "channels_last"
    layer = int8.quantize_conv(
        w, bias, x_scale=x_scale, y_scale=y_scale, groups=groups, data_format=data_format
    )
    q = int8.quantize(x, x_scale)
    window = {key: value for key, value in options.items() if key != "groups"}
    few = x_shape[-1] <= 4
    image = int8.pack(q) if layout == "NCHW32" and not few else q
    y = int8.conv(image, *layer, **window, activation="relu", data_format=data_format)
    y = int8.unpack(y) if layout == "NCHW32" else y
    # Rounding errors: of x and w 1 / 254 of their maximum, in every product; of y once.
    terms = np.prod(w_shape[:-1]) ** 0.5
    products = np.abs(x).max() * np.abs(w).max() / 254
    error = np.abs(int8.dequantize(y, y_scale) - expected).max()
    assert error < 0.51 * y_scale + 4 * terms * products

    float_layer = int8.quantize_conv(
        w, bias, x_scale=x_scale, groups=groups, data_format="channels_last"
    )
    sums = int8.conv(q, *float_layer, **window, activation="relu", out_dtype=jnp.float32)
    unsaturated = np.minimum(sums, 127 * y_scale)
    np.testing.assert_allclose(int8.dequantize(y, y_scale), unsaturated, atol=0.5001 * y_scale)


def test_a_residual_is_added_in_units_of_the_result():
    x, w, z = normal(1, 6, 6, 32), normal(3, 3, 32, 32) / 32, normal(1, 6, 6, 32)
    expected = conv(x, w) + z
    x_scale, z_scale, y_scale = map(int8.max_scale, (x, z, expected))
    layer = int8.quantize_conv(w, x_scale=x_scale, y_scale=y_scale)
    assert layer.bias is None
    y = int8.conv(
        int8.pack(int8.quantize(x, x_scale)),
        *layer,
        residual=int8.pack(int8.quantize(z, z_scale)),
        residual_scale=z_scale / y_scale,
    )
    error = np.abs(int8.dequantize(int8.unpack(y), y_scale) - expected).max()
    assert error < 0.05 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (ValueError, "y_scale: expected positive finite", {"y_scale": 0.0}),
        (ValueError, "x_scale: expected a scalar", {"x_scale": np.ones(2)}),
        (ValueError, "w_scale: expected positive finite", {"w_scale": np.nan}),
        (ValueError, r"bias: expected shape \(32,\), got \(3,\)", {"bias": np.ones(3)}),
        (ValueError, "data_format: expected", {"data_format": "CHWN"}),
        (TypeError, "w: expected a floating-point filter", {"w": np.ones((1, 1, 32, 32), np.int8)}),
    ],
)
def test_quantize_conv_refuses_what_does_not_fit(error, message, change):
    arguments = {"w": np.ones((1, 1, 32, 32), np.float32), "x_scale": 1.0, "y_scale": 1.0}
    with pytest.raises(error, match=message):
        int8.quantize_conv(**{**arguments, **change})


# --- fake quantisation ----------------------------------------------------------------------------


def test_fake_quantize_gives_what_int8_stands_for(platform):
    x = normal(50, 60)
    for scale in (0.01, int8.max_scale(x), int8.max_scale(x, 0)):
        expected = int8.dequantize(int8.quantize(x, scale), scale)
        np.testing.assert_array_equal(int8.fake_quantize(x, scale), expected)
    assert int8.fake_quantize(x.astype(jnp.bfloat16), 0.01).dtype == jnp.bfloat16


def test_the_gradient_of_fake_quantize_passes_straight_through():
    x = np.float32([0.3, -2.6, 126.9, 127.1, 127.6, -127.0, -400.0])
    scale = np.float32(1)
    gradient = jax.grad(lambda x: jnp.sum(int8.fake_quantize(x, scale) * jnp.arange(1.0, 8)))
    np.testing.assert_array_equal(gradient(x), [1, 2, 3, 4, 0, 6, 0])
    # The scale's gradient is the rounding error in steps inside the range, and the limit outside.
    of_scale = jax.vmap(jax.grad(int8.fake_quantize, argnums=1), (0, None))(x, scale)
    np.testing.assert_allclose(of_scale, [-0.3, -0.4, 0.1, -0.1, 127, 0, -127], atol=1e-5)
    _, tangent = jax.jvp(lambda x: int8.fake_quantize(x, scale), (x,), (np.ones_like(x),))
    np.testing.assert_array_equal(tangent, [1, 1, 1, 1, 0, 1, 0])


def sums_of(x, w, x_scale, w_scale, **options):
    """The exact integer convolution of the quantised operands, times both scales."""
    x, w = (np.asarray(int8.quantize(a, s), np.float32) for a, s in ((x, x_scale), (w, w_scale)))
    with jax.default_device(jax.devices("cpu")[0]):  # on a GPU cuDNN might use Winograd
        sums = conv(x, w, **options)  # below 2^24: exact
    return np.asarray(sums) * (np.float32(x_scale) * np.asarray(w_scale, np.float32))


@pytest.mark.parametrize("name", LAYERS)
def test_fake_quant_conv_runs_the_integer_convolution(name, platform):
    x_shape, w_shape, options = LAYERS[name]
    x, w = normal(*x_shape), normal(*w_shape)
    x_scale = np.float32(np.abs(x).max() / 100)
    w_scale = np.asarray(int8.quantize_weight(w)[1])
    expected = sums_of(x, w, x_scale, w_scale, **options)
    y = int8.fake_quant_conv(x, w, x_scale, w_scale, **options)
    np.testing.assert_array_equal(y, expected)
    inside = jax.jit(lambda x, w: int8.fake_quant_conv(x, w, x_scale, **options))
    np.testing.assert_allclose(inside(x, w), expected, rtol=1e-3, atol=1e-2)
    assert "jaxconv_int8" in str(jax.make_jaxpr(inside)(x, w))


@pytest.mark.parametrize("name", LAYERS)
def test_the_gradient_of_fake_quant_conv_is_that_of_what_it_multiplies(name, platform):
    x_shape, w_shape, options = LAYERS[name]
    x, w = normal(*x_shape), normal(*w_shape)
    x_scale = np.float32(np.abs(x).max() / 127 * 0.5)  # clips some values
    y_bar = normal(*np.shape(conv(x, w, **options)))

    def loss(convolve):
        return lambda x, w: jnp.sum(convolve(x, w) * y_bar)

    ours = jax.grad(loss(lambda x, w: int8.fake_quant_conv(x, w, x_scale, **options)), (0, 1))
    q = int8.fake_quantize(x, x_scale), int8.fake_quantize(w, int8.quantize_weight(w)[1])
    theirs = jax.grad(loss(lambda x, w: conv(x, w, **options)), (0, 1))
    expected_x, expected_w = theirs(*q)
    expected_x = np.where(np.abs(np.round(x / x_scale)) <= 127, expected_x, 0)
    assert (expected_x == 0).any()
    tolerance = 2e-3 if platform == "cuda" else 1e-4  # TF32
    for found, expected in zip(jax.jit(ours)(x, w), (expected_x, expected_w), strict=True):
        assert found.dtype == np.float32
        scale = np.abs(expected).max()
        np.testing.assert_allclose(found, expected, atol=tolerance * scale)


def test_fake_quant_conv_differentiates_given_scales_only():
    x, w = normal(1, 5, 5, 32), normal(3, 3, 32, 32)
    w_scale = int8.quantize_weight(w)[1]

    def loss(x, x_scale=None, w_scale=None):
        return jnp.sum(jnp.tanh(int8.fake_quant_conv(x, w, x_scale, w_scale) / 10))

    x_scale = int8.max_scale(x) * 0.7
    by_x = jax.grad(loss)(x)
    given = jax.grad(loss)(x, int8.max_scale(x), w_scale)
    np.testing.assert_allclose(by_x, given, rtol=1e-5, atol=1e-6)  # no gradient through the maximum
    of_x, of_w = jax.grad(loss, (1, 2))(x, x_scale, w_scale)
    assert of_x.shape == () and of_w.shape == (32,)
    assert np.isfinite(of_x) and np.isfinite(of_w).all() and of_x != 0


def test_fake_quant_conv_takes_a_scale_for_each_image(platform):
    x, w = normal(3, 6, 6, 32) * np.float32([1, 10, 100])[:, None, None, None], normal(3, 3, 32, 32)
    scales = np.abs(x).max((1, 2, 3)) / np.float32(127)
    y = int8.fake_quant_conv(x, w, scales)
    for n in range(3):
        np.testing.assert_array_equal(y[n], int8.fake_quant_conv(x[n : n + 1], w, scales[n])[0])
    gradient = jax.grad(lambda s: jnp.sum(int8.fake_quant_conv(x, w, s)))(scales)
    assert gradient.shape == (3,) and np.isfinite(gradient).all()


@pytest.mark.parametrize("mapped", [(0, None), (None, 0), (0, 0)])
def test_vmap_of_fake_quant_conv_is_a_loop(mapped, platform):
    xs, ws = normal(3, 2, 6, 6, 32), normal(3, 3, 3, 32, 32)
    x, w = xs if mapped[0] == 0 else xs[0], ws if mapped[1] == 0 else ws[0]

    def loss(x, w):
        return jnp.sum(jnp.tanh(int8.fake_quant_conv(x, w, 0.02)))

    step = jax.value_and_grad(loss, (0, 1))
    # With TF32 the gradients of a batch and of single examples may round differently.
    with jax.default_matmul_precision("highest"):
        found = jax.jit(jax.vmap(step, mapped))(x, w)
        ones = [
            jax.jit(step)(x[i] if mapped[0] == 0 else x, w[i] if mapped[1] == 0 else w)
            for i in range(3)
        ]
    for i, one in enumerate(ones):
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(one), strict=True):
            np.testing.assert_allclose(a[i], b, rtol=1e-4, atol=1e-4 * np.abs(b).max())


def test_gradients_of_fake_quant_conv_have_the_default_precision():
    x, w = normal(2, 6, 6, 32), normal(3, 3, 32, 32)

    def loss(x, w):
        return jnp.sum(int8.fake_quant_conv(x, w, 0.02) ** 2)

    for precision in ("default", "highest"):
        with jax.default_matmul_precision(precision):
            found = jaxconv.explain(jax.grad(loss, (0, 1)), x, w).convolutions
        assert [c.precision for c in found if c.op != "fprop"] == [precision] * 2


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_fake_quant_conv_keeps_the_dtype_of_x(dtype, platform):
    x, w = normal(2, 6, 6, 32).astype(dtype), normal(3, 3, 32, 32)
    y, gradients = jax.value_and_grad(
        lambda x, w: jnp.mean(int8.fake_quant_conv(x, w, 0.03).astype(jnp.float32)), (0, 1)
    )(x, w)
    assert int8.fake_quant_conv(x, w, 0.03).dtype == dtype
    assert [g.dtype for g in gradients] == [dtype, jnp.float32]
    assert np.isfinite(y)


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (TypeError, "x: expected float32, bfloat16 or float16, got int8", {"x": np.int8}),
        (TypeError, "w: expected a floating-point filter, got int8", {"w": np.int8}),
        (ValueError, "x: expected 3 to 5 dimensions", {"x": (2, 32)}),
        (ValueError, "w: expected 4 dimensions", {"w": (3, 32, 32)}),
        (ValueError, "w: expected 32 input channels", {"w": (3, 3, 16, 32)}),
        (ValueError, r"x_scale: expected shape \(\) or \(2,\), got \(3,\)", {"x_scale": (3,)}),
        (ValueError, r"w_scale: expected shape \(\) or \(32,\), got \(2,\)", {"w_scale": (2,)}),
        (ValueError, "scale: expected positive finite", {"x_scale": -1.0}),
    ],
)
def test_fake_quant_conv_refuses_what_does_not_fit(error, message, change):
    arguments = {"x": np.ones((2, 6, 6, 32), np.float32), "w": np.ones((3, 3, 32, 32), np.float32)}
    for name, value in change.items():
        if isinstance(value, tuple):
            arguments[name] = np.ones(value, np.float32)
        elif isinstance(value, float):
            arguments[name] = value
        else:
            arguments[name] = arguments[name].astype(value)
    with pytest.raises(error, match=message):
        int8.fake_quant_conv(**arguments)


# --- a network ------------------------------------------------------------------------------------


def test_resnet50_in_int8_is_close_to_the_float_network(monkeypatch, platform):
    monkeypatch.setattr(resnet50, "STAGES", ((2, 1), (1, 2)))  # with and without a projection
    net, shape = NETWORKS["resnet50"], (2, 32, 32, 3)
    state = programs.initial_state(net, jax.ShapeDtypeStruct(shape, jnp.float32))
    # Running statistics as after training, different from the initial 0 and 1.
    running = [
        (np.abs(s + 0.3 * normal(*s.shape)) + 0.1) if i % 2 else 0.3 * normal(*s.shape)
        for i, s in enumerate(state.statistics)
    ]
    state = state._replace(statistics=running)
    x = programs.random_examples(net, shape, jnp.float32).x
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(programs.inference(net))(state, x)
        of = jax.jit(resnet50_int8.activations)(resnet50_int8.folded(state), x)
    folded = of["logits"][:, 0, 0]
    np.testing.assert_allclose(folded, expected, atol=1e-4 * np.abs(expected).max())
    parameters = net.quantized.parameters(state, [x])
    y = jax.jit(net.quantized.forward)(parameters, x)
    assert y.dtype == jnp.float32
    assert np.linalg.norm(y - expected) < 0.1 * np.linalg.norm(expected)
    explanation = jaxconv.explain(net.quantized.forward, parameters, x)
    assert sum(c.count for c in explanation.convolutions) == 1 + 4 + 3 + 4 + 1
