"""Meshes that the lowering gets late or not at all; explicit meshes; the choice of splits."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as Spec
from numerics import assert_exact
from problems import problem
from sharding_tools import (
    AXES,
    DEVICES,
    GRID,
    PROBLEMS,
    assert_gradients_with_one_sum,
    collectives,
    conv,
    gradients,
    grid,
    placed,
    tensors,
)

import jaxconv
from jaxconv._src import compat
from jaxconv._src.problem.spec import Op
from jaxconv._src.sharding import explicit_mesh, partition

# --- meshes that a lowering learns of in other ways, or not at all ---


def test_a_constraint_is_the_only_thing_that_shards(mesh):
    p = PROBLEMS["dense"]
    x, w, _, expected = tensors(p)

    @jax.jit
    def constrained(x, w):
        return conv(p, jax.lax.with_sharding_constraint(x, Spec("data")), w)

    with jax.set_mesh(mesh):
        compiled = constrained.lower(x, w).compile()
    assert_exact(compiled(x, w), expected["y"], p.name)
    assert collectives(compiled) == {}


@pytest.mark.parametrize("axis", ["data", "model"])
def test_six_devices(axis):
    """The mesh is reconstructed from prime factors, in the order that the shardings need."""
    for shape in ((2, 3), (3, 2)):
        mesh = grid(shape=shape)
        p, split = problem("six", 5, 3, n=6, c=4, k=6, padding=1), {"n": axis}
        *arrays, expected = tensors(p)
        operands = placed(mesh, p, split, arrays)
        assert_gradients_with_one_sum(jax.jit(gradients(p)), p, operands, expected)


def test_two_meshes_in_one_program():
    p = PROBLEMS["dense"]
    x, w, _, expected = tensors(p)
    other = grid(shape=(DEVICES,), axes=("all",))
    x, w, _ = placed(grid(), p, {"n": AXES}, (x, w, expected["y"]))
    out = NamedSharding(other, Spec("all"))
    compiled = (
        jax.jit(lambda x, w: jax.lax.with_sharding_constraint(conv(p, x, w), out))
        .lower(x, w)
        .compile()
    )
    assert_exact(compiled(x, w), expected["y"], p.name)
    assert collectives(compiled) == {}


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("manual", AXES)
def test_shard_map_over_one_axis_and_jit_over_the_other(manual, kind):
    """Two sums of the weight gradient: one for shard_map's types, one for the split batch."""
    p = PROBLEMS["dense"]
    *arrays, expected = tensors(p)
    mesh = grid(getattr(jax.sharding.AxisType, kind))
    (rest,) = set(AXES) - {manual}
    step = jax.jit(
        jax.shard_map(
            gradients(p),
            mesh=mesh,
            in_specs=(Spec(manual), Spec(), Spec(manual)),
            out_specs=(Spec(manual), Spec()),
            axis_names={manual},
        )
    )
    with jax.set_mesh(mesh):
        operands = placed(mesh, p, {"n": (manual, rest)}, arrays)
        compiled = step.lower(*operands).compile()
        dx, dw = compiled(*operands)
    assert_exact(dx, expected["dx"], p.name)
    assert_exact(dw, expected["dw"], p.name)
    found = collectives(compiled)
    assert found["all-reduce"] == 2
    if kind == "Auto":  # JAX itself gathers around a partly manual, explicit region
        assert set(found) == {"all-reduce"}


def test_explicit_and_automatic_axes_side_by_side():
    p, split = PROBLEMS["dense"], {"n": "data", "k": "model"}
    *arrays, expected = tensors(p)
    kinds = (jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto)
    mesh = jax.make_mesh(GRID, AXES, kinds, devices=jax.devices("cpu"))
    with jax.set_mesh(mesh):
        operands = placed(mesh, p, split, arrays)
        compiled = jax.jit(gradients(p)).lower(*operands).compile()
        dx, dw = compiled(*operands)
    assert_exact(dx, expected["dx"], p.name)
    assert_exact(dw, expected["dw"], p.name)
    assert collectives(compiled) == {"all-reduce": 2}


PARTITIONER_CALL = "CustomSPMDPartitioning"


def test_one_device_is_lowered_as_it_stands():
    x, w, _, _ = tensors(PROBLEMS["dense"])
    text = (
        jax.jit(gradients(PROBLEMS["dense"])).lower(x, w, conv(PROBLEMS["dense"], x, w)).as_text()
    )
    assert PARTITIONER_CALL not in text


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_lowered_for_devices_that_are_not_here(platform):
    mesh = jax.sharding.AbstractMesh((64,), ("data",), (jax.sharding.AxisType.Auto,))
    x, w = (
        jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in (((64, 5, 5, 4), Spec("data")), ((3, 3, 4, 8), Spec()))
    )
    lowered = jax.jit(jaxconv.conv).trace(x, w).lower(lowering_platforms=(platform,))
    assert PARTITIONER_CALL in lowered.as_text()


def test_an_exported_program_holds_no_call_into_this_process(mesh):
    p = PROBLEMS["dense"]
    x, w, t, expected = tensors(p)
    x, w, _ = placed(mesh, p, {"n": "data"}, (x, w, t))
    checks = [jax.export.DisabledSafetyCheck.custom_call("jaxconv_fprop")]
    exported = jax.export.export(
        jax.jit(functools.partial(conv, p)), platforms=["cpu"], disabled_checks=checks
    )(x, w)
    assert PARTITIONER_CALL not in exported.mlir_module()
    assert_exact(jax.jit(exported.call)(x, w), expected["y"], p.name)


def test_the_partitioner_before_shardy(mesh):
    if not hasattr(jax.config, "jax_use_shardy_partitioner"):
        pytest.skip("this JAX has Shardy only")
    p = PROBLEMS["dense"]
    *arrays, expected = tensors(p)
    operands = placed(mesh, p, {"n": "data"}, arrays)
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        assert_gradients_with_one_sum(jax.jit(gradients(p)), p, operands, expected)
    finally:
        jax.config.update("jax_use_shardy_partitioner", before)


# --- explicit meshes ---


@pytest.mark.parametrize(
    ("groups", "x_spec", "w_spec", "message"),
    [
        (1, Spec("data"), Spec(None, None, None, "data"), "conflicts with another axis"),
        (1, Spec(), Spec("model"), "axis 0 of w cannot be split"),
        (2, Spec(None, None, None, "data"), Spec(), "whole groups only, of 2"),
    ],
)
def test_explicit_shardings_that_are_refused(groups, x_spec, w_spec, message):
    """JAX's rule for explicit meshes: no data moves unless the program asks for it."""
    mesh = grid(jax.sharding.AxisType.Explicit)
    with jax.set_mesh(mesh):
        x = jax.device_put(np.ones((8, 6, 6, 8), np.float32), NamedSharding(mesh, x_spec))
        w = np.ones((4, 3, 8 // groups, 8), np.float32)
        w = jax.device_put(w, NamedSharding(mesh, w_spec))
        with pytest.raises(compat.ShardingTypeError, match=message) as raised:
            jax.eval_shape(functools.partial(jaxconv.conv, groups=groups), x, w)
    assert "jax.sharding.reshard" in str(raised.value)


@pytest.mark.parametrize(
    ("groups", "x_spec", "w_spec", "message"),
    [
        (1, Spec("data", "model"), None, "split over \\('data',\\) .* split over \\('model',\\)"),
        (4, None, Spec("data"), "an axis of 4 groups"),
    ],
)
def test_explicit_shardings_that_vmap_refuses(groups, x_spec, w_spec, message):
    mesh = grid(jax.sharding.AxisType.Explicit)
    with jax.set_mesh(mesh):
        x = np.ones((4, 8, 6, 6, 8) if x_spec else (8, 6, 6, 8), np.float32)
        w = np.ones(((4,) if w_spec else ()) + (3, 3, 8 // groups, 8), np.float32)
        x, w = (
            jax.device_put(a, NamedSharding(mesh, s or Spec()))
            for a, s in ((x, x_spec), (w, w_spec))
        )
        axes = (0 if x_spec else None, 0 if w_spec else None)
        with pytest.raises(compat.ShardingTypeError, match=message):
            jax.vmap(functools.partial(jaxconv.conv, groups=groups), axes)(x, w)


def test_a_filter_split_like_the_batch_is_gathered_and_its_gradient_split():
    """Fully sharded data parallel: filters are gathered, activations are not."""
    p = PROBLEMS["dense"]
    *arrays, expected = tensors(p)
    mesh = grid(jax.sharding.AxisType.Explicit)
    with jax.set_mesh(mesh):
        x, _, t = placed(mesh, p, {"n": "data"}, arrays)
        w = jax.device_put(arrays[1], NamedSharding(mesh, Spec(None, None, "data")))
        compiled = jax.jit(gradients(p)).lower(x, w, t).compile()
        dx, dw = compiled(x, w, t)
    assert_exact(dx, expected["dx"], p.name)
    assert_exact(dw, expected["dw"], p.name)
    assert jax.typeof(dw).sharding.spec == Spec(None, None, "data", None)
    gathered = re.findall(r"f32\[([\d,]+)\]\S* all-gather", compiled.as_text())
    assert gathered == ["3,3,4,8"]


def test_out_sharding_reshards_on_an_explicit_mesh():
    p = PROBLEMS["dense"]
    *arrays, expected = tensors(p)
    mesh = grid(jax.sharding.AxisType.Explicit)
    demanded = Spec("data", None, None, "model")
    with jax.set_mesh(mesh):
        x, w, _ = placed(mesh, p, {"n": "data"}, arrays)
        for sharding in (demanded, NamedSharding(mesh, demanded)):
            y = explicit_mesh.with_out_sharding(conv(p, x, w), sharding)
            assert jax.typeof(y).sharding.spec == demanded
            assert_exact(y, expected["y"], p.name)
        assert explicit_mesh.with_out_sharding(y, None) is y


def test_out_sharding_elsewhere_does_what_lax_does(mesh):
    y = jnp.zeros((8, 5, 5, 8))
    with pytest.raises(ValueError, match="not under a mesh context"):
        explicit_mesh.with_out_sharding(y, Spec("data"))
    with pytest.raises(TypeError, match="out_sharding"):
        explicit_mesh.with_out_sharding(y, "data")
    with jax.set_mesh(mesh):
        assert explicit_mesh.with_out_sharding(y, Spec()) is y
        with pytest.raises(ValueError, match="Auto"):
            explicit_mesh.with_out_sharding(y, Spec("data"))


# --- the algebra ---


def of_problem(name: str, op: Op, **extents: int) -> list[partition.Tensor]:
    """Both operands and the result of a problem, with extents replaced by ``extents``."""
    p = PROBLEMS[name]
    spec = p.spec()
    sizes = spec.sizes(op, *(p.canonical_shape(role) for role in op.roles[:2]))
    sizes = dataclasses.replace(sizes, **extents)
    return [partition.tensor(spec, role, spec.shape(role, sizes)) for role in op.roles]


def test_every_factor_is_free_in_two_operations_and_contracted_in_one():
    dense, grouped = PROBLEMS["dense"].spec(), PROBLEMS["grouped"].spec()

    def contracted(name: str, op: Op) -> list[str]:
        *operands, out = of_problem(name, op)
        return partition.contracted(operands, out)

    assert [contracted("dense", op) for op in Op] == [["c"], ["k"], ["n", "s0", "s1"]]
    assert [contracted("grouped", op) for op in Op] == [[], [], ["n", "s0", "s1"]]
    assert partition.factors(grouped, "w") == {"g": 3}
    for op in Op:
        held = [set(partition.factors(dense, role)) for role in op.roles]
        assert held[0] ^ held[1] == held[2]


@pytest.mark.parametrize(
    ("op", "lhs", "rhs", "out", "expected"),
    [
        # A mesh axis splits one factor: the batch, rather than the filter's channels.
        (Op.FPROP, {"n": "a"}, {"c": "a"}, None, {"n": ("a",)}),
        (Op.FPROP, {"n": "a"}, {"k": "a"}, None, {"n": ("a",)}),
        # Between c and k, the received bytes decide. Gathering x costs as much as scattering the
        # sum, but one of the two also leaves w in place; a sum that is not scattered costs twice.
        (Op.FPROP, {"c": "a"}, {"k": "a"}, {"k": "a"}, {"k": ("a",)}),
        (Op.FPROP, {"c": "a"}, {"c": "a"}, {"k": "a"}, {"c": ("a",)}),
        (Op.FPROP, {"c": "a"}, {"c": "a"}, {}, {"c": ("a",)}),
        (Op.DGRAD, {"k": "a"}, {"k": "a"}, {"c": "a"}, {"k": ("a",)}),
        (Op.DGRAD, {"k": "a"}, {"c": "a"}, {"c": "a"}, {"c": ("a",)}),
        (Op.FPROP, {}, {"c": "a"}, {"k": "a"}, {"k": ("a",)}),
        (Op.FPROP, {"c": "a"}, {"k": "a"}, None, {"k": ("a",)}),
        # The finer split wins; axes that do not divide are left out.
        (Op.FPROP, {"n": "a"}, {}, {"n": "ab"}, {"n": ("a", "b")}),
        (Op.FPROP, {"n": "ab", "c": "d"}, {}, None, {"n": ("a", "b")}),
        (Op.WGRAD, {"n": "a"}, {"n": "b"}, {"k": "b"}, {"n": ("a",), "k": ("b",)}),
        (Op.DGRAD, {"k": "b"}, {"k": "b", "c": "a"}, None, {"k": ("b",), "c": ("a",)}),
    ],
)
def test_the_choice_between_splits(op, lhs, rhs, out, expected):
    spec = PROBLEMS["dense"].spec()
    arrays = of_problem("dense", op, n=8, c=8, k=8)
    given = [
        None if split is None else tuple(tuple(axes) for axes in array.partitions(split))
        for array, split in zip(arrays, (lhs, rhs, out), strict=True)
    ]
    mesh = {"a": 4, "b": 2, "d": 3}
    assert partition.choose(op, spec, arrays, mesh, given) == expected


# --- explicit axes that an operand has and the result, or a group of the batch, has not ---


def _explicit(count: int):
    kinds = (jax.sharding.AxisType.Explicit,)
    return jax.make_mesh((count,), ("a",), axis_types=kinds, devices=jax.devices("cpu")[:count])


def test_more_devices_than_groups_of_the_batch():
    """Mesh axes that do not divide the groups are gathered."""
    x = np.arange(8 * 4 * 4 * 2, dtype=np.float32).reshape(8, 4, 4, 2) % 5
    w = np.arange(3 * 3 * 2 * 4, dtype=np.float32).reshape(3, 3, 2, 4) % 3
    layer = functools.partial(
        jaxconv.conv_general_dilated,
        window_strides=(1, 1),
        padding="SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        batch_group_count=2,
    )
    expected = np.asarray(layer(x, w))
    with jax.set_mesh(_explicit(4)):
        given = jax.device_put(x, Spec("a")), jax.device_put(w, Spec())
        assert_exact(jax.jit(layer)(*given), expected, "batch groups")


def test_gradients_with_a_bias_that_alone_is_split():
    rng = np.random.default_rng(0)
    x, w, bias = (
        rng.integers(-2, 3, shape).astype(np.float32)
        for shape in ((2, 5, 5, 4), (3, 3, 4, 8), (8,))
    )

    def loss(x, w, bias):
        return jaxconv.conv(x, w, bias=bias, activation="relu", padding=1).sum()

    gradients_of = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    expected = gradients_of(x, w, bias)
    with jax.set_mesh(_explicit(2)):
        given = [
            jax.device_put(a, s)
            for a, s in zip((x, w, bias), (Spec(), Spec(), Spec("a")), strict=True)
        ]
        found = gradients_of(*given)
    for name, f, e in zip(("dx", "dw", "dbias"), found, expected, strict=True):
        assert_exact(f, np.asarray(e), name)
