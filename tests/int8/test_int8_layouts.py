"""NCHW32 and packed filters: the position of every element, and refused arguments."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from int8_reference import nchw32, nhwc, rows

from jaxconv import int8
from jaxconv._src.int8 import int8_layout


def images(shape, dtype=np.int8):
    limits = np.iinfo(dtype)
    rng = np.random.default_rng(0)
    return rng.integers(limits.min, limits.max, shape, endpoint=True, dtype=dtype)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
@pytest.mark.parametrize("c", [1, 3, 32, 40, 96])
def test_pack_puts_32_channels_side_by_side(dtype, c):
    x = images((2, 3, 5, c), dtype)
    packed = int8.pack(x)
    expected = nchw32(np.pad(x, [(0, 0)] * 3 + [(0, -c % 32)]))
    np.testing.assert_array_equal(packed.data, expected)
    assert packed.data.dtype == packed.dtype == dtype
    assert packed.channels == c and packed.shape == x.shape
    np.testing.assert_array_equal(nhwc(np.asarray(packed.data), c), x)


@pytest.mark.parametrize("data_format", ["NHWC", "NCHW"])
@pytest.mark.parametrize("c", [3, 32, 40])
def test_unpack_undoes_pack(data_format, c):
    x = images((2, 3, 5, c))
    given = x if data_format == "NHWC" else x.transpose(0, 3, 1, 2)
    packed = int8.pack(given, data_format)
    np.testing.assert_array_equal(packed.data, int8.pack(x).data)
    np.testing.assert_array_equal(int8.unpack(packed, data_format), given)


@pytest.mark.parametrize("spatial", [(7,), (6, 5), (3, 4, 5)])
def test_arrays_with_the_channels_first(spatial):
    """Channels-first arrays give the same numbers, and no transpose between two layers."""
    x, w = images((2, *spatial, 32)), images((*[3] * len(spatial), 32, 32))
    scale = np.full(32, 1e-3, np.float32)

    def layers(x, layout, to):
        y = int8.conv(to(x), w, scale, activation="relu", data_format=layout)
        return int8.conv(y, w, scale, residual=y, residual_scale=0.5, data_format=layout)

    expected = layers(x, "channels_last", lambda a: a)
    first = functools.partial(layers, layout="channels_first", to=lambda a: jnp.moveaxis(a, -1, 1))
    np.testing.assert_array_equal(jax.jit(first)(x), np.moveaxis(expected, -1, 1))
    text = jax.jit(first).lower(x).compile().as_text()
    moved = [line for line in text.splitlines() if " transpose(" in line and "s8[2," in line]
    assert len(moved) <= 2, moved  # those of x and of the result


def test_a_packed_operand_is_no_array_with_the_channels_first():
    x, w = images((1, 4, 4, 32)), images((3, 3, 32, 32))
    with pytest.raises(TypeError, match=r"x: expected an array .* got Packed"):
        int8.conv(int8.pack(x), w, 1.0, data_format="NCHW")
    with pytest.raises(TypeError, match=r"residual: expected an array .* got Packed"):
        int8.conv(x.transpose(0, 3, 1, 2), w, 1.0, residual=int8.pack(x), data_format="NCHW")


def test_pack_fills_with_a_value():
    packed = int8.pack(images((1, 2, 2, 40), np.uint8), value=128)
    np.testing.assert_array_equal(packed.data[:, 1, :, :, 8:], np.full((1, 2, 2, 24), 128))


@pytest.mark.parametrize("layout", ["NHWC", "NCHW32"])
@pytest.mark.parametrize(("c", "k"), [(32, 32), (96, 64), (40, 10), (3, 64), (4, 32)])
def test_a_packed_filter_holds_each_reduction_as_a_row(layout, c, k):
    w = images((3, 2, c, k))
    packed = int8.pack_filter(w, data_format=layout)
    stored = 4 if c <= 4 else c + -c % 32
    padded = np.pad(w, [(0, 0), (0, 0), (0, stored - c), (0, -k % 32)])
    np.testing.assert_array_equal(packed.data, rows(padded, layout.lower()))
    assert packed.data.shape[1] % 32 == 0
    assert (packed.window, packed.channels, packed.features) == ((3, 2), c, k)
    assert (packed.channels_stored, packed.features_stored) == (stored, k + -k % 32)
    unpacked = int8_layout.unpack_rows(packed.data, (3, 2), stored, layout.lower())
    np.testing.assert_array_equal(np.moveaxis(unpacked, 0, -1), padded)


def test_few_channels_lie_the_same_for_both_layouts():
    w = images((7, 7, 3, 64))
    packed = [int8.pack_filter(w, data_format=layout).data for layout in ("NHWC", "NCHW32")]
    np.testing.assert_array_equal(*packed)


@pytest.mark.parametrize("filter_format", ["HWIO", "OHWI", "OIHW", "IOHW"])
def test_filter_formats(filter_format):
    w = images((3, 2, 32, 64))
    given = w.transpose(["HWIO".index(letter) for letter in filter_format])
    packed = int8.pack_filter(given, filter_format=filter_format)
    np.testing.assert_array_equal(packed.data, int8.pack_filter(w).data)


@pytest.mark.parametrize(
    ("shape", "filter_format"), [((5, 32, 64), "WIO"), ((2, 3, 1, 32, 64), "DHWIO")]
)
def test_filters_of_one_and_three_spatial_axes(shape, filter_format):
    w = images(shape)
    packed = int8.pack_filter(w, data_format="channels_last", filter_format=filter_format)
    np.testing.assert_array_equal(packed.data, rows(w, "nhwc"))


def test_grouped_filters():
    w = images((3, 3, 32, 64))
    packed = int8.pack_filter(w, groups=2)
    np.testing.assert_array_equal(packed.data, rows(w, "nchw32"))
    assert (packed.groups, packed.channels, packed.channels_stored) == (2, 32, 32)


def test_both_are_pytrees():
    packed = int8.pack(images((2, 3, 5, 40)))
    filters = int8.pack_filter(images((3, 3, 40, 10)))
    for value in (packed, filters):
        (leaf,) = jax.tree.leaves(value)
        assert leaf is value.data
        moved = jax.tree.map(lambda a: a + 1, value)
        assert isinstance(moved, type(value))
        assert jax.tree.structure(moved) == jax.tree.structure(value)
    doubled = jax.jit(lambda p: jax.tree.map(lambda a: a * 2, p))(packed)
    assert isinstance(doubled, int8.Packed) and doubled.channels == 40
    shape = jax.eval_shape(lambda x: int8.pack(x), images((2, 3, 5, 40)))
    assert shape.data.shape == (2, 2, 3, 5, 32)


def test_packing_compiles_and_maps():
    x = images((4, 2, 3, 5, 40))
    packed = jax.jit(jax.vmap(int8.pack))(x)
    for i in range(4):
        np.testing.assert_array_equal(packed.data[i], int8.pack(x[i]).data)


X, W = np.zeros((1, 4, 4, 32), np.int8), np.zeros((3, 3, 32, 32), np.int8)
REFUSED = {
    "float images": (lambda: int8.pack(X.astype(np.float32)), TypeError, "x: expected int8"),
    "images of 3 dimensions": (lambda: int8.pack(X[0]), ValueError, "x: expected 4 dimensions"),
    "no channels": (lambda: int8.pack(X[..., :0]), ValueError, "at least 1 channel"),
    "packed twice": (lambda: int8.pack(int8.pack(X)), TypeError, "x: .* got a Packed"),
    "a format": (lambda: int8.pack(X, "CHWN"), ValueError, "data_format: expected"),
    "a value beyond the dtype": (lambda: int8.pack(X, value=128), ValueError, "value: expected"),
    "an array unpacked": (lambda: int8.unpack(X), TypeError, "expected a Packed"),
    "data of another shape": (
        lambda: int8.unpack(int8.Packed(jnp.zeros((1, 2, 4, 4, 32), jnp.int8), 20)),
        ValueError,
        "packed.data: expected shape",
    ),
    "float filters": (lambda: int8.pack_filter(W.astype(np.float32)), TypeError, "w: expected"),
    "uint8 filters": (lambda: int8.pack_filter(W.astype(np.uint8)), TypeError, "got uint8"),
    "filters of 3 dimensions": (lambda: int8.pack_filter(W[0]), ValueError, "w: expected 4"),
    "an empty window": (lambda: int8.pack_filter(W[:0]), ValueError, "no empty dimension"),
    "an unknown format": (
        lambda: int8.pack_filter(W, data_format="CHWN"),
        ValueError,
        "data_format: expected",
    ),
    "an unknown filter format": (
        lambda: int8.pack_filter(W, filter_format="HWCK"),
        ValueError,
        "filter_format: expected",
    ),
    "a filter format of one axis for NCHW32": (
        lambda: int8.pack_filter(W[0], filter_format="WIO"),
        ValueError,
        "two spatial axes",
    ),
    "groups that do not divide": (
        lambda: int8.pack_filter(W, groups=3),
        ValueError,
        "groups: 3 does not divide",
    ),
    "narrow groups": (
        lambda: int8.pack_filter(W[:, :, :16], groups=2),
        ValueError,
        "multiples of 32, got 16 and 16",
    ),
    "a filter packed twice": (
        lambda: int8.pack_filter(int8.pack_filter(W)),
        TypeError,
        "got a PackedFilter",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    call, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        call()
