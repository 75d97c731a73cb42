"""Splits over several mesh axes in any order, arrays of any layout, meshes of mixed axes."""

from __future__ import annotations

import functools
import itertools

import jax
import numpy as np
import pytest
from jax import lax
from jax.experimental.custom_partitioning import ArrayMapping
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from numerics import assert_exact, reference
from problems import problem
from sharding_tools import collectives, grid

import jaxconv
from jaxconv._src.problem.spec import Op
from jaxconv._src.sharding import halo, shardy
from jaxconv._src.sharding.device_layout import Arrangement

SAME = problem("same", 8, 3, n=2, c=4, k=4, padding=1)
NHWC = ("NHWC", "HWIO", "NHWC")


def integers(p, role, seed=0):
    rng = np.random.default_rng([seed, "xwy".index(role)])
    return rng.integers(-3, 4, p.canonical_shape(role)).astype(np.float32)


def lax_conv(x, w, numbers=NHWC, padding="SAME", **options):
    return lax.conv_general_dilated(
        x, w, (1,) * (x.ndim - 2), padding, dimension_numbers=numbers, **options
    )


def relu_of_conv(x, w):
    return jax.nn.relu(lax_conv(x, w))


def gradients_of(function):
    def step(x, w, t):
        y, pull = jax.vjp(function, x, w)
        if AxisType.Explicit in jax.typeof(y).sharding.mesh.axis_types:
            t = jax.sharding.reshard(t, jax.typeof(y).sharding)
        return (y, *pull(t))

    return step


WAYS = {
    "conv": gradients_of(jaxconv.conv),
    "override": jaxconv.override(gradients_of(lax_conv)),
    "fuse": jaxconv.override(jaxconv.fuse(gradients_of(relu_of_conv))),
    "statistics": gradients_of(lambda x, w: jaxconv.conv(x, w, statistics=True)[0]),
}


def expected_of(way, x, w, t):
    y = reference(Op.FPROP, SAME, x, w)
    if way == "fuse":
        y, t = np.maximum(y, 0), np.where(y > 0, t, 0)
    return y, reference(Op.DGRAD, SAME, t, w), reference(Op.WGRAD, SAME, x, t)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("order", ["ab", "ba"])
def test_rows_over_two_mesh_axes_in_either_order(order, way, kind):
    """``lax.ppermute`` numbers devices in mesh order, ``lax.axis_index`` in the given order."""
    x, w, t = (integers(SAME, role) for role in "xwy")
    mesh = grid(getattr(AxisType, kind), (2, 4), ("a", "b"))
    rows = NamedSharding(mesh, P(None, tuple(order)))
    with jax.set_mesh(mesh):
        operands = (jax.device_put(a, s) for a, s in ((x, rows), (w, P()), (t, rows)))
        results = jax.jit(WAYS[way])(*operands)
    for result, expected, name in zip(
        results, expected_of(way, x, w, t), ("y", "dx", "dw"), strict=True
    ):
        assert_exact(result, expected.astype(np.float32), name)


@pytest.mark.parametrize("order", list(itertools.permutations("abc")))
def test_permutes_and_indices_number_devices_alike(order):
    """Every device receives the share of its predecessor in the order of the names."""
    sizes = dict(a=2, b=2, c=2)
    mesh = grid(AxisType.Auto, (2, 2, 2), tuple("abc"))

    def local(array):
        devices = halo.Devices(order, sizes)
        pairs = [(i, i + 1) for i in range(devices.count - 1)]
        return devices.permuted(array, pairs), devices.index()[None], devices.gathered(array, 0)

    split = P(order)
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=split, out_specs=(split, split, P()), check_vma=False
    )
    permuted, index, gathered = jax.jit(mapped)(np.arange(1.0, 9))
    np.testing.assert_array_equal(permuted, np.arange(8.0))
    np.testing.assert_array_equal(index, np.arange(8))
    np.testing.assert_array_equal(gathered, np.arange(1.0, 9))


# --- the order of factors in a rule ---

LAYOUTS = ["".join(letters) for letters in itertools.permutations("NHWC")]


def lowered(function, *shapes):
    """Lowers for two devices with replicated arrays: Shardy checks the rules."""
    whole = NamedSharding(grid(AxisType.Auto, (2,), ("a",)), P())
    arguments = (jax.ShapeDtypeStruct(s, np.float32, sharding=whole) for s in shapes)
    return jax.jit(function).lower(*arguments)


def in_layout(layout: str, **extents) -> tuple[int, ...]:
    return tuple(extents[letter] for letter in layout)


def squares(convolve):
    return jax.grad(lambda x, w: (convolve(x, w) ** 2).sum(), (0, 1))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_images_lowers_for_several_devices(layout):
    numbers = (layout, "HWIO", layout)
    x = in_layout(layout, N=2, H=6, W=6, C=4)
    step = squares(lambda x, w: lax_conv(x, w, numbers))
    lowered(jaxconv.override(step), x, (3, 3, 4, 8))
    lowered(jaxconv.fuse(lambda x, w: jax.nn.relu(lax_conv(x, w, numbers))), x, (3, 3, 4, 8))


@pytest.mark.parametrize("layout", ["".join(p) for p in itertools.permutations("OIHW")])
def test_every_layout_of_filters_lowers_for_several_devices(layout):
    for groups in (1, 2, 4):
        w = in_layout(layout, O=8, I=4 // groups, H=3, W=3)
        step = squares(
            lambda x, w, g=groups: lax_conv(x, w, ("HWNC", layout, "NHWC"), feature_group_count=g)
        )
        lowered(jaxconv.override(step), (6, 6, 2, 4), w)


@pytest.mark.parametrize(
    ("x", "w", "options"),
    [
        pytest.param(
            (2, 8, 8, 4),
            (3, 3, 4, 8),
            dict(window_strides=(2, 2), padding=[(-1, 1), (1, 1)]),
            id="cropped",
        ),
        pytest.param(
            (2, 5, 5, 4),
            (3, 3, 4, 8),
            dict(window_strides=(1, 1), padding=[(1, 1)] * 2, lhs_dilation=(2, 2)),
            id="dilated",
        ),
        pytest.param(
            (1, 6, 6, 4),
            (3, 3, 1, 4),
            dict(window_strides=(1, 1), padding="SAME", feature_group_count=4),
            id="depthwise of one image",
        ),
        pytest.param(
            (2, 8, 8, 4),
            (3, 3, 4, 8),
            dict(window_strides=(1, 2), padding=[(-1, 0), (2, -1)]),
            id="strided and cropped",
        ),
    ],
)
def test_derivatives_in_other_forms_lower_for_several_devices(x, w, options):
    convolve = functools.partial(lax.conv_general_dilated, dimension_numbers=NHWC, **options)
    lowered(jaxconv.override(squares(convolve)), x, w)


def test_a_rule_names_factors_in_the_order_of_their_first_appearance():
    mappings = [ArrayMapping("a", "b", "c"), ArrayMapping("d", "c", "e"), ArrayMapping("e", "a")]
    rule = shardy.rule(mappings, 2, {}, whole=["d", "b"], reduced=["c", "c"])
    assert rule.need_replication_factors == ("b", "d")
    assert rule.reduction_factors == ("c",)
    more = shardy.with_operand(rule, "more", 1)
    assert [tuple(m) for m in more.operand_mappings] == [*map(tuple, mappings[:2]), ("more0",)]
    assert (more.need_replication_factors, more.reduction_factors) == (("b", "d"), ("c",))


# --- manual axes beside others ---


@pytest.mark.parametrize("manual", "abc")
@pytest.mark.parametrize("held", ["first", "last", "last and first"])
@pytest.mark.parametrize("way", ["conv", "fuse"])
def test_automatic_axes_around_a_manual_one(manual, held, way):
    """XLA numbers the devices of automatic axes in the order of a result's split."""
    x, w, t = (integers(SAME, role) for role in "xwy")
    mesh = grid(AxisType.Auto, (2, 2, 2), tuple("abc"))
    first, last = sorted(set("abc") - {manual})
    axes = {"first": (first,), "last": (last,), "last and first": (last, first)}[held]
    rows = NamedSharding(mesh, P(manual, axes))
    mapped = jax.shard_map(
        WAYS[way],
        mesh=mesh,
        in_specs=(P(manual), P(), P(manual)),
        out_specs=(P(manual), P(manual), P()),
        axis_names={manual},
    )
    with jax.set_mesh(mesh):
        operands = (jax.device_put(a, s) for a, s in ((x, rows), (w, P()), (t, rows)))
        results = jax.jit(mapped)(*operands)
    for result, expected in zip(results, expected_of(way, x, w, t), strict=True):
        np.testing.assert_array_equal(result, expected)


def test_a_sum_in_16_bits_beside_an_automatic_axis():
    """XLA:CPU aborts on a bfloat16 sum there."""
    x, w, t = (integers(SAME, role).astype("bfloat16") for role in "xwy")
    mesh = jax.make_mesh(
        (2, 2), ("a", "b"), (AxisType.Explicit, AxisType.Auto), devices=jax.devices("cpu")[:4]
    )
    images = NamedSharding(mesh, P("a", "b"))
    with jax.set_mesh(mesh):
        operands = (jax.device_put(a, s) for a, s in ((x, images), (w, P()), (t, images)))
        *_, dw = jax.jit(WAYS["conv"])(*operands)
    assert_exact(dw, reference(Op.WGRAD, SAME, x, t).astype("bfloat16"), "dw")


def test_the_order_of_automatic_axes_is_read_off_their_numbers():
    among = Arrangement(((2, False), (3, True), (4, False)))
    (layout,) = among.layouts()
    assert layout.split.axis_names == ("d0_0", "d2_0", "d2_1")
    numbers = np.arange(8).reshape(2, 2, 2).transpose(1, 2, 0)  # axis 2's outer part comes first
    (layout,) = Arrangement(among.axes, tuple(numbers.ravel().tolist())).layouts()
    assert layout.split.axis_names == ("d2_1", "d0_0", "d2_0")
    assert layout.whole.axis_names == ("d0_0", "d1_0", "d2_0", "d2_1")
    assert not list(Arrangement(among.axes, (0, 1, 2, 4, 3, 5, 6, 7)).layouts())


# --- the forms of lax's convolutions ---


def test_a_weight_gradient_of_rows_on_an_explicit_mesh():
    """Its filter is dy, split along the window; XLA's own program gives wrong numbers."""
    numbers = ("CHWN", "IHWO", "WHNC")
    p = problem("rows", (4, 6), (3, 1), n=2, c=3, k=3, padding=((1, 1), (0, 0)))
    x, w, t = (integers(p, role) for role in "xwy")
    given = (x.transpose(3, 1, 2, 0), w.transpose(2, 0, 1, 3), t.transpose(2, 1, 0, 3))
    convolve = functools.partial(lax_conv, numbers=numbers, padding=p.padding)
    step = jaxconv.override(lambda *arrays: gradients_of(convolve)(*arrays)[2])
    mesh = grid(AxisType.Explicit, (2,), ("a",))
    rows = NamedSharding(mesh, P(None, "a"))
    with jax.set_mesh(mesh):
        operands = [jax.device_put(a, s) for a, s in zip(given, (rows, P(), rows), strict=True)]
        compiled = jax.jit(step).lower(*operands).compile()
        dw = np.asarray(compiled(*operands)).transpose(1, 2, 0, 3)
    assert_exact(dw, reference(Op.WGRAD, p, x, t).astype(np.float32), "dw")
    assert collectives(compiled) == {"collective-permute": 2, "all-reduce": 1}


@pytest.mark.parametrize("layout", ["NHWC", "HWCN", "CHWN"])
def test_rows_of_images_in_any_layout_cost_two_permutes(layout):
    """If channels come before images, a forward pass has the axis order of a weight gradient."""
    mesh = grid(AxisType.Auto, (2,), ("a",))
    rows = NamedSharding(mesh, P(*("a" if letter == "H" else None for letter in layout)))
    to = ["NHWC".index(letter) for letter in layout]
    x, w = integers(SAME, "x"), integers(SAME, "w")
    given = jax.device_put(x.transpose(to), rows)
    step = jax.jit(jaxconv.override(lambda x, w: lax_conv(x, w, (layout, "HWIO", layout))))
    compiled = step.lower(given, w).compile()
    expected = reference(Op.FPROP, SAME, x, w).transpose(to)
    np.testing.assert_array_equal(compiled(given, w), expected)
    assert collectives(compiled) == {"collective-permute": 2}


def test_a_strided_data_gradient_is_sent_only_what_it_reads():
    """Device 1 of two has rows from 8 on. Its sums begin at row 6, but it needs no other rows."""
    p = problem("strided", (16,), 3, stride=3, padding=1, n=1, c=1, k=1)
    plan = halo.plan(Op.DGRAD, p.spec(), 0, 2)
    assert plan is not None and any(plan.skip)
    assert (plan.before, plan.after) == ((0, 0), (0, 0))
