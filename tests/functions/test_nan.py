"""NaN and Inf on the CPU: they go where docs/precision.md says."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxconv

NHWC = ("NHWC", "HWIO", "NHWC")


class Layer(NamedTuple):
    c: int
    k: int
    groups: int = 1
    stride: int = 1
    dilation: int = 1


LAYERS = {
    "dense": Layer(16, 16),
    "strided": Layer(16, 16, stride=2),
    "dilated": Layer(16, 16, dilation=2),
    "depthwise": Layer(16, 16, groups=16),
    "grouped": Layer(32, 32, groups=4),
    "few channels": Layer(3, 8),
    "few outputs": Layer(64, 3),
}
EXTENT = 9


def convolve(layer: Layer, x, w, **options):
    return jaxconv.conv(
        x,
        w,
        stride=layer.stride,
        dilation=layer.dilation,
        groups=layer.groups,
        padding=layer.dilation,
        **options,
    )


def with_gradients(f, x, w, dy):
    y, vjp = jax.vjp(f, x, w)
    return {"y": y, **dict(zip(("dx", "dw"), vjp(dy), strict=True))}


@functools.partial(jax.jit, static_argnums=(0, 1))
def meets(layer: Layer, padded: bool, bad: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Which results have a product with a bad element, found by counting with lax.

    With ``padded``, padding counts as elements of x, so that a bad element of the filter meets it,
    and so does one of dy.
    """
    pad = [(layer.dilation,) * 2] * 2
    f = functools.partial(
        lax.conv_general_dilated,
        window_strides=(layer.stride,) * 2,
        padding="VALID",
        rhs_dilation=(layer.dilation,) * 2,
        dimension_numbers=NHWC,
        feature_group_count=layer.groups,
        precision="highest",
    )
    frame = ((0, 0), *pad, (0, 0))
    everywhere = {name: jnp.ones_like(a) for name, a in bad.items()}
    everywhere["x"] = jnp.pad(everywhere["x"], frame, constant_values=float(padded))
    bad = {**bad, "x": jnp.pad(bad["x"], frame)}
    x, w, dy = (everywhere[name] for name in ("x", "w", "dy"))
    all_dy = jnp.ones_like(f(x, w))  # outputs outside dy count as padding does
    counts = {
        "y": f(bad["x"], w) + f(x, bad["w"]),
        "dx": jax.vjp(lambda a: f(a, w), x)[1](bad["dy"])[0]
        + jax.vjp(lambda a: f(a, bad["w"]), x)[1](all_dy)[0],
        "dw": jax.vjp(lambda a: f(bad["x"], a), w)[1](dy)[0]
        + jax.vjp(lambda a: f(x, a), w)[1](bad["dy"])[0],
    }
    inside = slice(layer.dilation, -layer.dilation)
    counts["dx"] = counts["dx"][:, inside, inside]
    if padded:  # a gradient's window also meets the outputs outside dy
        channels = jnp.where(bad["w"].any(), counts["dx"].any((0, 1, 2)), False)
        counts["dx"] += channels
    return {name: count > 0 for name, count in counts.items()}


@pytest.mark.parametrize("algorithm", ["native", "im2col"])
@pytest.mark.parametrize("name", LAYERS)
def test_where_nan_and_inf_go(native_cpu, name, algorithm):
    """Results with a bad factor are bad; others only if it meets padding there."""
    layer = LAYERS[name]
    rng = np.random.default_rng(0)
    shapes = {
        "x": (2, EXTENT, EXTENT, layer.c),
        "w": (3, 3, layer.c // layer.groups, layer.k),
        "dy": (2, *(-(-EXTENT // layer.stride),) * 2, layer.k),
    }
    at = {"x": [(0, 0, 0, 1), (1, 4, 4, 2)], "w": [(0, 0, 0, 1)], "dy": [(0, 0, 0, 1)]}
    f = functools.partial(convolve, layer, algorithm=algorithm)
    with jax.default_device(jax.devices("cpu")[0]):
        ours = jax.jit(functools.partial(with_gradients, f))
        for dtype in ("float32", "bfloat16")[: 2 if algorithm == "native" else 1]:
            for bad_operand in ("x", "w", "dy"):
                bad = {operand: np.zeros(shape, np.float32) for operand, shape in shapes.items()}
                for place in at[bad_operand]:
                    bad[bad_operand][place] = 1
                least, most = (
                    jax.tree.map(np.asarray, meets(layer, padded, bad)) for padded in (False, True)
                )
                for number in (np.nan, np.inf):
                    operands = {}
                    for operand, shape in shapes.items():
                        drawn = rng.uniform(0.5, 1, shape).astype(np.float32)
                        drawn = np.where(bad[operand] > 0, number, drawn)
                        operands[operand] = jnp.asarray(drawn, dtype)
                    for result, found in ours(**operands).items():
                        found = ~np.isfinite(np.asarray(found, np.float32))
                        note = f"{dtype}, {number} in {bad_operand}, {result}"
                        assert not (least[result] & ~found).any(), f"{note} is lost"
                        assert not (found & ~most[result]).any(), f"{note} reaches other results"


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("channels", [1, 2, 3, 5, 17, 33])
def test_an_element_stays_within_its_windows(native_cpu, channels, groups):
    """For any number of summed channels: no kernel reads the next pixel's channels."""
    rng = np.random.default_rng(0)
    for window, stride, summed_by in (
        (1, 1, "y"),
        (3, 1, "y"),
        (3, 2, "y"),
        (1, 1, "dx"),
        (3, 1, "dx"),
    ):
        other = int(rng.choice([1, 4, 16]))
        c, k = (channels, other) if summed_by == "y" else (other, channels)
        shapes = (2, 6, 7, groups * c), (window, window, c, groups * k)

        def convolve(x, w, stride=stride, padding=window // 2):
            return jaxconv.conv(
                x, w, stride=stride, padding=padding, groups=groups, algorithm="native"
            )

        def result(x, w, dy, convolve=convolve, summed_by=summed_by):
            if summed_by == "y":
                return convolve(x, w)
            return jax.vjp(lambda x: convolve(x, w), x)[1](dy)[0]

        x, w = (np.ones(shape, np.float32) for shape in shapes)
        y = np.ones(jax.eval_shape(convolve, x, w).shape, np.float32)
        operand = {"y": x, "dx": y}[summed_by]
        with jax.default_device(jax.devices("cpu")[0]):
            compiled = jax.jit(result)
            for number in (np.nan, np.inf):
                for pixel in (
                    (0, 0, 0),
                    (0, 2, 3),
                    (1, 1, 0),
                    tuple(n - 1 for n in operand.shape[:3]),
                ):
                    channel = int(rng.choice(groups)) * channels  # a pair would reach the next one
                    bad = np.zeros_like(operand)
                    bad[*pixel, channel] = 1
                    given = {"y": (bad, w, y), "dx": (x, w, bad)}[summed_by]
                    expected = np.asarray(compiled(*given)) > 0
                    bad = np.where(bad > 0, number, 1).astype(np.float32)
                    given = {"y": (bad, w, y), "dx": (x, w, bad)}[summed_by]
                    for dtype in ("float32", "bfloat16", "float16"):
                        found = compiled(*(jnp.asarray(each, dtype) for each in given))
                        found = ~np.isfinite(np.asarray(found, np.float32))
                        note = f"{dtype}, {number} at {pixel}, {window}x{window}, {summed_by}"
                        np.testing.assert_array_equal(found, expected, f"{note} of {c} to {k}")


def test_the_sets_differ_where_a_filter_meets_padding():
    """Otherwise the test above could not tell allowed results from others."""
    layer = LAYERS["dense"]
    bad = {
        "x": np.zeros((1, EXTENT, EXTENT, 16), np.float32),
        "w": np.zeros((3, 3, 16, 16), np.float32),
        "dy": np.zeros((1, EXTENT, EXTENT, 16), np.float32),
    }
    bad["w"][0, 0, 0, 1] = 1
    least, most = (meets(layer, padded, bad) for padded in (False, True))
    assert least["y"].sum() == (EXTENT - 1) ** 2 and most["y"].sum() == EXTENT**2
    assert least["dx"].sum() == (EXTENT - 1) ** 2 and most["dx"].sum() == EXTENT**2
    bad["w"][0, 0, 0, 1] = 0
    bad["x"][0, 4, 4, 2] = 1
    least, most = (meets(layer, padded, bad) for padded in (False, True))
    assert least["y"].sum() == most["y"].sum() == 9 * 16
    assert least["dw"].sum() == most["dw"].sum() == 9 * 16


def test_patches_and_continued_inputs_keep_a_nan_in_its_place(native_cpu):
    x = np.ones((1, 6, 6, 1), np.float32)
    x[0, 0, 0, 0] = np.nan
    w = np.ones((3, 3, 1, 1), np.float32)
    with jax.default_device(jax.devices("cpu")[0]):
        y = np.isnan(jaxconv.conv(x, w, padding="CIRCULAR"))[0, :, :, 0]
    rows = np.isin(np.arange(6), [5, 0, 1])
    assert (y == rows[:, None] & rows[None]).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize(("stride", "expansion"), [(1, 1), (1, 2), (2, 2), (2, 1)])
def test_an_infinity_stays_one_under_override(stride, expansion, k, dtype):
    """Also in the last of an odd number of channels, and where the forward pass has other forms."""
    x = jnp.ones((1, 5, 5, k), dtype).at[0, 2, 1, k - 1].set(jnp.inf)
    w = jnp.ones((3, 3, k, 2), dtype)

    def conv(x, w):
        return jax.lax.conv_general_dilated(
            x,
            w,
            (stride, stride),
            [(2, 2), (2, 2)],
            lhs_dilation=(expansion, expansion),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )

    def results(x, w, dy):
        return conv(x, w), *jax.vjp(conv, x, w)[1](dy)

    dy = jnp.ones(jax.eval_shape(conv, x, w).shape, dtype).at[0, 1, 2, 1].set(jnp.inf)
    with jax.default_device(jax.devices("cpu")[0]):
        expected = jax.jit(results)(x, w, dy)
        with jaxconv.override():
            found = jax.jit(lambda *operands: results(*operands))(x, w, dy)
    for ours, theirs in zip(found[:2], expected[:2], strict=True):
        np.testing.assert_array_equal(np.asarray(ours, np.float32), np.asarray(theirs, np.float32))
