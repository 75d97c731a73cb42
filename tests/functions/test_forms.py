"""Arguments of ``conv`` and its relatives as in other libraries, compared with NumPy and lax."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from numerics import assert_exact

import jaxconv

pytestmark = pytest.mark.usefixtures("on_the_cpu")

RNG = np.random.default_rng(0)


def integers(*shape, dtype=np.float32):
    """Small integers, so that every sum is exact."""
    return RNG.integers(-3, 4, shape).astype(dtype)


def close(actual, expected):
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    assert_exact(actual, np.asarray(expected), "")


# --- batch and layout -----------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_one_example_without_a_batch(rank):
    x, w = integers(*[6] * rank, 4), integers(*[3] * rank, 2, 6)

    def conv(x, w):
        return jaxconv.conv(x, w, groups=2, stride=2)

    close(conv(x, w), conv(x[None], w)[0])
    gradients = jax.jit(jax.grad(lambda x, w: jnp.sum(conv(x, w) ** 2), (0, 1)))
    dx, dw = gradients(x, w)
    dx_of_batch, dw_of_batch = gradients(x[None], w)
    close(dx, dx_of_batch[0])
    close(dw, dw_of_batch)
    close(jax.vmap(conv, (0, None))(np.stack([x, -x]), w), conv(np.stack([x, -x]), w))


@pytest.mark.parametrize("batched", [False, True])
def test_names_of_layouts(batched):
    x, w = integers(2, 6, 5, 4), integers(3, 2, 4, 6)
    expected = jaxconv.conv(x, w)
    for name in ("NHWC", "nhwc", "channels_last", "Channels_Last"):
        close(jaxconv.conv(x, w, data_format=name), expected)
    x, w = x.transpose(0, 3, 1, 2), w.transpose(3, 2, 0, 1)
    expected = np.asarray(expected).transpose(0, 3, 1, 2)
    for name in ("NCHW", "nchw", "channels_first"):
        if batched:
            close(jaxconv.conv(x, w, data_format=name), expected)
        else:
            close(jaxconv.conv(x[1], w, data_format=name), expected[1])


# --- padding --------------------------------------------------------------------------------------


def continued(x, r, dilation, mode):
    """Rows of x continued by Flax's padding ``mode``, by index arithmetic."""
    reach = (r - 1) * dilation + 1
    at = np.arange(-((reach - 1) // 2), x.shape[1] + reach // 2)
    extent = x.shape[1]
    if mode == "CIRCULAR":
        at %= extent
    else:  # mirrored at the first and the last element
        at = at % (2 * extent - 2)
        at = np.where(at < extent, at, 2 * extent - 2 - at)
    return x[:, at]


@pytest.mark.parametrize("mode", ["CIRCULAR", "REFLECT"])
@pytest.mark.parametrize(
    ("extent", "r", "stride", "dilation"),
    [(6, 3, 1, 1), (6, 4, 2, 1), (5, 3, 3, 2), (3, 5, 1, 4), (4, 1, 1, 1), (7, 2, 1, 3)],
)
def test_continued_inputs_and_their_gradients(mode, extent, r, stride, dilation):
    """Padding may be wider than the input, which then repeats more than once."""
    x, w = integers(2, extent, 4), integers(r, 4, 3)
    options = dict(stride=stride, dilation=dilation)

    def ours(x, w):
        return jaxconv.conv(x, w, padding=mode.lower(), **options)

    def reference(x, w):
        return jaxconv.conv(continued(x, r, dilation, mode), w, padding="VALID", **options)

    @functools.partial(jax.jit, static_argnums=0)
    def with_gradients(conv, x, w):
        y, vjp = jax.vjp(conv, x, w)
        return y, *vjp(y % 3)

    found = with_gradients(ours, x, w)
    assert found[0].shape[1] == -(-extent // stride)
    for a, e in zip(found, with_gradients(reference, x, w), strict=True):
        close(a, e)


def test_circular_padding_commutes_with_shifts():
    x, w = integers(1, 6, 7, 3), integers(3, 5, 3, 2)
    y = jaxconv.conv(x, w, padding="CIRCULAR")
    shifted = jaxconv.conv(np.roll(x, (2, 3), (1, 2)), w, padding="CIRCULAR")
    close(shifted, np.roll(y, (2, 3), (1, 2)))


def test_causal_padding_looks_back_only():
    x, w = integers(1, 9, 3), integers(3, 3, 2)
    conv = lambda x: jaxconv.conv(x, w, padding="CAUSAL", dilation=2)  # noqa: E731
    jacobian = np.asarray(jax.jacobian(conv)(x))[0, :, :, 0]  # (p, k, i, c)
    depends = np.abs(jacobian).sum((1, 3)) > 0
    reached = [{i for i in (p - 4, p - 2, p) if i >= 0} for p in range(9)]
    assert [set(np.flatnonzero(row)) for row in depends] == reached


def test_flax_pads_alike():
    linen = pytest.importorskip("flax.linen")
    x = integers(2, 7, 3)
    for padding, strides, dilation in itertools.product(("CIRCULAR", "CAUSAL"), (1, 2), (2,)):
        layer = linen.Conv(
            4, (3,), strides=strides, padding=padding, kernel_dilation=dilation, use_bias=False
        )
        w = integers(3, 3, 4)
        expected = layer.apply({"params": {"kernel": jnp.asarray(w)}}, x)
        close(jaxconv.conv(x, w, padding=padding, stride=strides, dilation=dilation), expected)


# --- dtypes ---------------------------------------------------------------------------------------

PAIRS = [
    ("bfloat16", "float32"),
    ("float32", "float16"),
    ("bfloat16", "float16"),
    ("int8", "float32"),
    ("int32", "bfloat16"),
    ("int8", "int32"),
    ("float32", "complex64"),
    ("bool", "float16"),
]


@pytest.mark.parametrize(("x_dtype", "w_dtype"), PAIRS)
def test_two_dtypes_promote_as_in_jax(x_dtype, w_dtype):
    x, w = jnp.asarray(integers(2, 6, 4) % 2, x_dtype), jnp.asarray(integers(3, 4, 3) % 2, w_dtype)
    common = jnp.promote_types(x_dtype, w_dtype)
    y = jaxconv.conv(x, w)
    assert y.dtype == common
    close(y, jaxconv.conv(x.astype(common), w.astype(common)))
    with jax.numpy_dtype_promotion("strict"), pytest.raises(ValueError, match="promotion path"):
        jaxconv.conv(x, w)  # a TypePromotionError
    if jnp.issubdtype(x.dtype, jnp.floating) and jnp.issubdtype(w.dtype, jnp.floating):
        dx, dw = jax.grad(lambda x, w: jnp.sum(jaxconv.conv(x, w)).astype("float32"), (0, 1))(x, w)
        assert (dx.dtype, dw.dtype) == (x.dtype, w.dtype)
        assert dw.shape == w.shape and (dw != 0).any()


def test_lax_names_do_not_promote():
    x, w = integers(1, 6, 4), integers(3, 4, 3, dtype=np.int32)
    with pytest.raises(TypeError, match=r"rhs.*float32.*int32.*jaxconv\.conv promotes"):
        jaxconv.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))


# --- transposed convolutions ----------------------------------------------------------------------


def scattered(x, w, stride, padding, output_padding, dilation, groups):
    """The definition in PyTorch: x (N, C, I), w (C, K / groups, R) -> (N, K, P)."""
    n, c, extent = x.shape
    _, k_per_group, r = w.shape
    full = (extent - 1) * stride + (r - 1) * dilation + 1
    y = np.zeros((n, k_per_group * groups, full + output_padding))
    for i, tap, channel in itertools.product(range(extent), range(r), range(c)):
        g = channel // (c // groups)
        channels = slice(g * k_per_group, (g + 1) * k_per_group)
        y[:, channels, i * stride + tap * dilation] += x[:, channel, i, None] * w[channel, :, tap]
    return y[:, :, padding : y.shape[2] - padding].astype(np.float32)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    ("stride", "padding", "output_padding", "dilation"),
    [(1, 0, 0, 1), (2, 1, 1, 1), (3, 0, 2, 1), (2, 2, 1, 2), (1, 1, 1, 2), (3, 1, 0, 3)],
)
def test_conv_transpose_is_pytorchs(groups, stride, padding, output_padding, dilation):
    x, w = integers(2, 4, 5), integers(4, 3, 3)

    def ours(x, w):
        return jaxconv.conv_transpose(
            x,
            w,
            (stride,),
            [(padding, padding)],
            (dilation,),
            ("NCW", "OIW", "NCW"),
            transpose_kernel=True,
            use_consistent_padding=True,
            groups=groups,
            output_padding=output_padding,
        )

    @jax.jit
    def with_gradients(x, w):
        y, vjp = jax.vjp(ours, x, w)
        return y, y % 3, *vjp(y % 3)

    y, dy, dx, dw = with_gradients(
        x, w
    )  # linear in both: <dy, f(x', w)> = <dx, x'>, <dy, f(x, w')> = <dw, w'>
    options = (stride, padding, output_padding, dilation, groups)
    close(y, scattered(x, w, *options))
    for other in (integers(*x.shape), integers(*x.shape)):
        assert np.vdot(dy, scattered(other, w, *options)) == np.vdot(dx, other)
    for other in (integers(*w.shape), integers(*w.shape)):
        assert np.vdot(dy, scattered(x, other, *options)) == np.vdot(dw, other)


@pytest.mark.parametrize("groups", [1, 2])
def test_groups_of_a_filter_in_laxs_form(groups):
    """Without transpose_kernel: the convolution of the dilated input, with the usual groups."""
    x, w = integers(2, 5, 4, 4), integers(3, 2, 4 // groups, 6)
    y = jaxconv.conv_transpose(x, w, (2, 3), "SAME", groups=groups)
    parts = [
        lax.conv_transpose(xs, ws, (2, 3), "SAME")
        for xs, ws in zip(np.split(x, groups, 3), np.split(w, groups, 3), strict=True)
    ]
    close(y, np.concatenate(parts, 3))


def test_a_grouped_transpose_costs_no_copy():
    """The filter is converted to lax's form and back, which must not appear in the program."""
    x, w = integers(2, 8, 8, 8), integers(3, 3, 4, 8)

    def ours(x, w):
        return jaxconv.conv_transpose(x, w, (2, 2), "SAME", transpose_kernel=True, groups=2)

    text = jax.jit(ours).lower(x, w).compile().as_text()
    assert "jaxconv_dgrad" in text
    assert " transpose(" not in text and " copy(" not in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(output_padding=2), ["output_padding", "less than the stride", "(2, 2)"]),
        (dict(output_padding=-1), ["output_padding", "(-1, -1)"]),
        (dict(output_padding=(1,)), ["output_padding", "2", "(1,)"]),
        (dict(groups=3), ["groups", "3", "4 input channels"]),
        (dict(groups=3, transpose_kernel=True), ["groups", "3", "rhs"]),
        (dict(groups=0), ["groups", "at least 1"]),
    ],
)
def test_conv_transpose_refuses(options, words):
    x, w = integers(1, 5, 5, 4), integers(3, 3, 4, 4)
    with pytest.raises(ValueError) as raised:
        jaxconv.conv_transpose(x, w, (2, 2), "SAME", **options)
    assert all(word in str(raised.value) for word in words), raised.value


# --- lax's further names --------------------------------------------------------------------------

PATCHES = [
    dict(filter_shape=(3, 2), window_strides=(1, 1), padding="SAME"),
    dict(filter_shape=(3, 2), window_strides=(2, 3), padding="VALID"),
    dict(filter_shape=(2, 3), window_strides=(2, 1), padding=((1, -1), (0, 2))),
    dict(filter_shape=(2, 2), window_strides=(1, 2), padding=((2, 1), (0, 0)), lhs_dilation=(2, 1)),
    dict(filter_shape=(3, 3), window_strides=(1, 1), padding="SAME", rhs_dilation=(1, 2)),
    dict(filter_shape=(1, 1), window_strides=(1, 1), padding="SAME_LOWER"),
    dict(filter_shape=(7, 9), window_strides=(1, 1), padding="VALID"),
]
NUMBERS = [None, ("NHWC", "HWIO", "NHWC"), ("HNWC", "OWIH", "CWNH"), ("NHWC", "WHIO", "NWHC")]


CASES = [(options, NUMBERS[i % 4]) for i, options in enumerate(PATCHES)]


@pytest.mark.parametrize(("options", "numbers"), CASES)
def test_patches(options, numbers):
    x = integers(4, 6, 5, 3)

    @functools.partial(jax.jit, static_argnums=0)
    def with_gradient(patches, x):
        y, vjp = jax.vjp(lambda x: patches(x, **options, dimension_numbers=numbers), x)
        return y, vjp(y % 3)[0]

    ours = with_gradient(jaxconv.conv_general_dilated_patches, x)
    expected = with_gradient(lax.conv_general_dilated_patches, x)
    for a, e in zip(ours, expected, strict=True):
        close(a, e)


@pytest.mark.parametrize(("options", "numbers"), CASES[:4])
def test_local(options, numbers):
    x = integers(4, 6, 5, 3)
    options = {**options, "dimension_numbers": numbers}
    like = jax.eval_shape(lambda x: lax.conv_general_dilated_patches(x, **options), x)
    axes = lax.conv_dimension_numbers(x.shape, (1, 1, *options["filter_shape"]), numbers)
    shape = [0] * 4
    extents = [like.shape[a] for a in axes.out_spec]
    for axis, extent in zip(axes.rhs_spec, (2, *extents[1:]), strict=True):
        shape[axis] = extent
    w = integers(*shape)
    options["precision"] = lax.Precision.HIGHEST
    ours, theirs = (
        jax.jit(functools.partial(of.conv_general_dilated_local, **options))
        for of in (jaxconv, lax)
    )
    close(ours(x, w), theirs(x, w))
    with pytest.raises(ValueError, match=r"rhs: expected shape .*elements in a window"):
        ours(x, np.delete(w, 0, axes.rhs_spec[1]))


def test_patches_copy():
    """Patches are copied, not multiplied: NaN reaches no other element, wide integers are exact."""
    x = integers(1, 4, 4, 2)
    x[0, 1, 2, 0] = np.nan
    options = dict(
        filter_shape=(2, 2),
        window_strides=(1, 1),
        padding="VALID",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    patches = jaxconv.conv_general_dilated_patches(x, **options)
    assert np.isnan(patches).sum() == 4  # once in each of the four windows over it
    large = np.full((1, 4, 4, 2), 2**31 - 1, np.int32)
    assert (jaxconv.conv_general_dilated_patches(large, **options) == 2**31 - 1).all()


def test_general_padding():
    x, w = integers(2, 3, 8, 7), integers(4, 3, 3, 2)
    for arguments in (((2, 1), "SAME", None, None), ((1, 1), ((1, 2), (0, -1)), (1, 2), (2, 1))):
        ours = jaxconv.conv_with_general_padding(x, w, *arguments)
        close(ours, lax.conv_with_general_padding(x, w, *arguments))
