"""Quantised convolutions on eight virtual CPU devices: most splits need no collective."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from int8_reference import operands, requantized, sums, terms
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as Spec
from problems import problem
from sharding_tools import AXES, DEVICES, collectives, grid

from jaxconv import int8
from jaxconv._src import compat

P = problem("layer", (6, 5), 3, n=8, c=32, k=256, padding=1)

# Name -> mesh axes of images and of output channels.
SPLITS = {
    "batch": ("data", None),
    "batch over all": (AXES, None),
    "output channels": (None, "model"),
    "output channels over all": (None, AXES),
    "batch and output channels": ("data", "model"),
}


def case(of_image: bool = False):
    x, w = operands(P, np.int8)
    given = terms(P, np.int8, of_image=of_image)
    return x, w, given, requantized(sums(P, x, w), np.int8, activation="relu", **given)


def layer(x, w, scale, bias, residual, residual_scale, stride=1, **options):
    return int8.conv(
        x,
        w,
        scale,
        bias,
        residual,
        residual_scale=residual_scale,
        activation="relu",
        padding=1,
        stride=stride,
        **options,
    )


def specs(n, k, layout: str, of_image: bool) -> tuple:
    """Specs of x, w, scale, bias, residual and residual_scale, then of the result."""
    y = Spec(n, None, None, k) if layout == "NHWC" else Spec(n, k)
    return (Spec(n), Spec(k), Spec(n, k) if of_image else Spec(k), Spec(k), y, Spec(), y)


def arrays(layout: str, x, w, given) -> list:
    packed = layout == "NCHW32"
    pack = int8.pack if packed else lambda a: jnp.asarray(a)
    return [
        pack(x),
        int8.pack_filter(w, data_format=layout),
        given["scale"],
        given["bias"],
        pack(given["residual"]),
        given["residual_scale"],
    ]


def result(y):
    return np.asarray(int8.unpack(y) if isinstance(y, int8.Packed) else y)


def placed(mesh, values, of):
    return [
        jax.tree.map(lambda a, s=s: jax.device_put(a, NamedSharding(mesh, s)), v)
        for v, s in zip(values, of, strict=True)
    ]


@pytest.mark.parametrize("of_image", [False, True], ids=["channel", "image"])
@pytest.mark.parametrize("layout", ["NHWC", "NCHW32"])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("split", SPLITS)
def test_jit_moves_nothing(split, kind, layout, of_image):
    x, w, given, expected = case(of_image)
    *of, out = specs(*SPLITS[split], layout, of_image)
    mesh = grid(getattr(jax.sharding.AxisType, kind))
    with jax.set_mesh(mesh):
        values = placed(mesh, arrays(layout, x, w, given), of)
        compiled = jax.jit(layer).lower(*values).compile()
        y = compiled(*values)
        assert collectives(compiled) == {}
        data = jax.tree.leaves(y)[0]
        assert data.sharding.is_equivalent_to(NamedSharding(mesh, out), data.ndim)
    np.testing.assert_array_equal(result(jax.device_get(y)), expected)


@pytest.mark.parametrize("layout", ["NHWC", "NCHW32"])
def test_shard_map_moves_nothing(layout):
    """The filter is replicated and the batch split, so operands have different varying types."""
    x, w, given, expected = case()
    mesh = grid(shape=(DEVICES,), axes=("data",))
    *of, out = specs("data", None, layout, False)
    values = arrays(layout, x, w, given)
    mapped = jax.jit(jax.shard_map(layer, mesh=mesh, in_specs=tuple(of), out_specs=out))
    assert collectives(mapped.lower(*values).compile()) == {}
    np.testing.assert_array_equal(result(mapped(*values)), expected)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_a_chain_of_layers_moves_nothing(kind):
    p = problem("chain", 6, 3, n=8, c=32, k=32, padding=1)
    x, w = operands(p, np.int8)
    scale = terms(p, np.int8)["scale"]

    def chain(y, w):
        for _ in range(3):
            y = int8.conv(y, w, scale, activation="relu")
        return y

    expected = chain(int8.pack(x), int8.pack_filter(w)).data
    mesh = grid(getattr(jax.sharding.AxisType, kind))
    with jax.set_mesh(mesh):
        y, filters = placed(mesh, [int8.pack(x), int8.pack_filter(w)], [Spec(AXES), Spec()])
        compiled = jax.jit(chain).lower(y, filters).compile()
        assert collectives(compiled) == {}
        np.testing.assert_array_equal(compiled(y, filters).data, expected)


def test_groups_split_over_the_batch():
    p = problem("groups", 6, 3, n=8, c=64, k=64, padding=1, groups=2)
    x, w = operands(p, np.int8)
    scale = terms(p, np.int8)["scale"]
    filters = int8.pack_filter(w, groups=2)
    expected = requantized(sums(p, x, w), np.int8, scale=scale)
    mesh = grid()
    packed, filters = placed(mesh, [int8.pack(x), filters], [Spec(AXES), Spec()])
    call = jax.jit(lambda x, w: int8.conv(x, w, scale)).lower(packed, filters).compile()
    assert collectives(call) == {}
    np.testing.assert_array_equal(result(call(packed, filters)), expected)


@pytest.mark.parametrize("algorithm", ["auto", "xla"])
def test_what_does_not_divide_stays_whole(algorithm):
    """Three images over four devices, 96 channels over two."""
    p = problem("odd", 6, 3, n=3, c=32, k=96, padding=1)
    x, w = operands(p, np.int8)
    scale = terms(p, np.int8)["scale"]
    expected = requantized(sums(p, x, w), np.int8, scale=scale)
    mesh = grid()
    (filters,) = placed(mesh, [int8.pack_filter(w, data_format="NHWC")], [Spec("model")])
    call = jax.jit(lambda x, w: int8.conv(x, w, scale, algorithm=algorithm))
    np.testing.assert_array_equal(call(x, filters), expected)


def test_the_fallback_is_split_alike():
    x, w, given, expected = case()
    *of, _ = specs("data", "model", "NHWC", False)
    mesh = grid()
    values = placed(mesh, arrays("NHWC", x, w, given), of)

    by_xla = functools.partial(layer, algorithm="xla")
    compiled = jax.jit(by_xla).lower(*values).compile()
    assert collectives(compiled) == {}
    np.testing.assert_array_equal(compiled(*values), expected)


def test_vmap_of_split_images():
    p = problem("mapped", 6, 3, n=2, c=32, k=64, padding=1)
    x, w = operands(p, np.int8)
    x = np.stack([np.roll(x, i, 2) for i in range(8)])
    scale = terms(p, np.int8)["scale"]
    expected = np.stack([requantized(sums(p, a, w), np.int8, scale=scale) for a in x])
    mesh = grid()
    (split,) = placed(mesh, [x], [Spec(AXES)])
    call = jax.jit(jax.vmap(lambda x: int8.conv(x, w, scale))).lower(split).compile()
    assert collectives(call) == {}
    np.testing.assert_array_equal(call(split), expected)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("layout", ["NHWC", "NCHW32"])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_split_positions_exchange_rows(kind, layout, stride):
    """Rows over four devices and columns over two; residual and result are not moved."""
    p = problem("positions", (8, 4), 3, n=2, c=32, k=64, padding=1, stride=stride)
    x, w = operands(p, np.int8)
    given = terms(p, np.int8)
    expected = requantized(sums(p, x, w), np.int8, activation="relu", **given)
    of = Spec(None, "data", "model") if layout == "NHWC" else Spec(None, None, "data", "model")
    mesh = grid(getattr(jax.sharding.AxisType, kind))
    with jax.set_mesh(mesh):
        each = [of, Spec(), Spec(), Spec(), of, Spec()]
        values = placed(mesh, arrays(layout, x, w, given), each)
        strided = functools.partial(layer, stride=stride)
        compiled = jax.jit(strided).lower(*values).compile()
        y = compiled(*values)
        assert collectives(compiled).keys() == {"collective-permute"}
        data = jax.tree.leaves(y)[0]
        assert data.sharding.is_equivalent_to(NamedSharding(mesh, of), data.ndim)
    np.testing.assert_array_equal(result(jax.device_get(y)), expected)


@pytest.mark.parametrize(
    ("x_spec", "why"),
    [
        (Spec(None, "data"), "axis 1 of x is split 4 ways, which does not divide the 10 positions"),
        (Spec(None, None, None, "data"), "axis 3 of x cannot be split"),
    ],
    ids=["rows", "channels"],
)
def test_explicit_shardings_that_are_refused(x_spec, why):
    x, w, *_ = case()
    mesh = grid(jax.sharding.AxisType.Explicit, (4,), ("data",))
    with jax.set_mesh(mesh):
        x = jax.device_put(np.concatenate([x, x], axis=1), NamedSharding(mesh, x_spec))
        with pytest.raises(compat.ShardingTypeError, match=f"int8 convolution: {why}"):
            jax.jit(lambda x: int8.conv(x, w, np.float32(0.1), padding="VALID")).trace(x)
