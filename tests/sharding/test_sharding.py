"""Eight virtual CPU devices: shard_map with type checks, automatic and explicit sharding.

The cost of a program is the number of each collective in its compiled text.
"""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as Spec
from numerics import assert_exact, on_cpu, reference
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
    received,
    specs,
    tensors,
)

import jaxconv
from jaxconv._src.problem.spec import Op

CASES = [
    problem("dense", 6, 3, n=16, c=4, k=6, padding=1),
    problem("grouped", 6, 3, n=16, c=4, k=6, padding=1, groups=2),
    problem("strided", (7, 6), 3, n=8, c=3, k=4, stride=2, padding=1),
]
NAMES = [p.name for p in CASES]


@pytest.mark.parametrize("p", CASES, ids=NAMES)
def test_forward_inside_shard_map(mesh, p):
    x, w, _, expected = tensors(p)
    sharded = jax.jit(
        jax.shard_map(
            lambda x, w: conv(p, x, w),
            mesh=mesh,
            in_specs=(Spec("data"), Spec()),
            out_specs=Spec("data"),
        )
    )
    assert_exact(sharded(x, w), expected["y"], p.name)
    assert collectives(sharded.lower(x, w).compile()) == {}


@pytest.mark.parametrize("p", CASES, ids=NAMES)
def test_gradient_of_the_replicated_filter_taken_inside(mesh, p):
    """A data-parallel step: shard_map's types insert the sum over devices exactly once."""
    x, w, t, expected = tensors(p)

    def gradients(x, w, t):
        return jax.grad(lambda x, w: jnp.sum(conv(p, x, w) * t), argnums=(0, 1))(x, w)

    step = jax.jit(
        jax.shard_map(
            gradients,
            mesh=mesh,
            in_specs=(Spec("data"), Spec(), Spec("data")),
            out_specs=(Spec("data"), Spec()),
            check_vma=True,
        )
    )
    assert_gradients_with_one_sum(step, p, (x, w, t), expected)


@pytest.mark.parametrize("p", CASES, ids=NAMES)
def test_gradient_of_the_replicated_filter_taken_outside(mesh, p):
    x, w, t, expected = tensors(p)

    def loss(x, w, t):
        return jax.lax.psum(jnp.sum(conv(p, x, w) * t), "data")

    mapped = jax.shard_map(
        loss,
        mesh=mesh,
        in_specs=(Spec("data"), Spec(), Spec("data")),
        out_specs=Spec(),
        check_vma=True,
    )
    step = jax.jit(jax.grad(mapped, argnums=(0, 1)))
    # The filter's gradient is summed. The loss itself is not needed, so it is not.
    assert_gradients_with_one_sum(step, p, (x, w, t), expected)


def test_second_derivative_inside_shard_map(mesh):
    """Operands of dgrad and wgrad have different varying types."""
    p = CASES[0]
    x, w, _, _ = tensors(p)
    v = np.random.default_rng(1).integers(-2, 3, w.shape).astype(np.float32)

    def hvp(x, w, v):
        def loss(w):
            return jax.lax.psum(jnp.sum(conv(p, x, w) ** 2), "data")

        return jax.jvp(jax.grad(loss), (w,), (v,))[1]

    specs = (Spec("data"), Spec(), Spec())
    sharded = jax.jit(
        jax.shard_map(hvp, mesh=mesh, in_specs=specs, out_specs=Spec(), check_vma=True)
    )
    expected = 2 * reference(Op.WGRAD, p, x, reference(Op.FPROP, p, x, v))
    assert_exact(sharded(x, w, v), expected.astype(np.float32), p.name)


def test_filter_sharded_by_output_channels_inside_shard_map(mesh):
    """Model parallel: the only sum is that of the replicated input's gradient."""
    p = problem("wide", 6, 3, n=2, c=4, k=16, padding=1)
    x, w, t, expected = tensors(p)

    def gradients(x, w, t):
        return jax.grad(lambda x, w: jnp.sum(conv(p, x, w) * t), argnums=(0, 1))(x, w)

    last = Spec(None, None, None, "data")
    step = jax.jit(
        jax.shard_map(
            gradients,
            mesh=mesh,
            in_specs=(Spec(), last, last),
            out_specs=(Spec(), last),
            check_vma=True,
        )
    )
    assert_gradients_with_one_sum(step, p, (x, w, t), expected)


def test_vmap_with_a_mapped_mesh_axis(mesh):
    """Per-example gradients of a sharded batch need no sum over the devices."""
    p = problem("single", 6, 3, n=1, c=4, k=6, padding=1)
    rng = np.random.default_rng(0)
    x = rng.integers(-3, 4, (16, *p.canonical_shape("x"))).astype(np.float32)
    w = rng.integers(-3, 4, p.canonical_shape("w")).astype(np.float32)
    t = rng.integers(-3, 4, (16, *p.canonical_shape("y"))).astype(np.float32)

    def per_example(x, w, t):
        w = jax.lax.pcast(w, ("data",), to="varying")
        return jax.vmap(jax.grad(lambda w, x, t: jnp.sum(conv(p, x, w) * t)), (None, 0, 0))(w, x, t)

    specs = (Spec("data"), Spec(), Spec("data"))
    sharded = jax.jit(
        jax.shard_map(
            per_example, mesh=mesh, in_specs=specs, out_specs=Spec("data"), check_vma=True
        )
    )
    expected = np.stack([reference(Op.WGRAD, p, a, b) for a, b in zip(x, t, strict=True)])
    assert_exact(sharded(x, w, t), expected.astype(np.float32), p.name)
    assert collectives(sharded.lower(x, w, t).compile()) == {}


# --- every split, under every way of sharding ---

# Name -> mesh axes of each factor.
SPLITS = {
    "batch": {"n": "data"},
    "batch over all": {"n": AXES},
    "output channels": {"k": "model"},
    "output channels over all": {"k": AXES},
    "batch and output channels": {"n": "data", "k": "model"},
    "input channels": {"c": "data"},
    "groups": {"g": "data"},
    "batch and groups": {"n": "model", "g": "data"},
}
SPLIT_PROBLEMS = [
    pytest.param(p, split, id=f"{p.name}-{name.replace(' ', '_')}")
    for p in PROBLEMS.values()
    for name, split in SPLITS.items()
    if (p.groups > 1 or "g" not in split) and (p.groups == 1 or not {"c", "k"} & set(split))
]


def sums(split) -> dict[str, dict[str, int]]:
    """The collectives that a split costs: a sum if the split factor is contracted."""
    forward = "c" in split
    backward = ("k" in split) + ("n" in split)  # dx, and dw
    return {
        "forward": {"all-reduce": 1} if forward else {},
        "backward": {"all-reduce": backward} if backward else {},
    }


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize(("p", "split"), SPLIT_PROBLEMS)
def test_jit_moves_nothing_but_sums(p, split, kind):
    """Outputs and gradients are exact, and sharded like the operands."""
    *arrays, expected = tensors(p)
    mesh = grid(getattr(jax.sharding.AxisType, kind))
    with jax.set_mesh(mesh):
        x, w, t = placed(mesh, p, split, arrays)
        forward = jax.jit(lambda x, w: conv(p, x, w)).lower(x, w).compile()
        assert collectives(forward) == sums(split)["forward"]
        y = forward(x, w)
        assert_exact(y, expected["y"], p.name)
        backward = jax.jit(gradients(p)).lower(x, w, t).compile()
        assert collectives(backward) == sums(split)["backward"]
        dx, dw = backward(x, w, t)
        assert_exact(dx, expected["dx"], p.name)
        assert_exact(dw, expected["dw"], p.name)
        assert y.sharding.is_equivalent_to(t.sharding, y.ndim)
        assert dx.sharding.is_equivalent_to(x.sharding, x.ndim)
        assert dw.sharding.is_equivalent_to(w.sharding, w.ndim)


@pytest.mark.parametrize(("p", "split"), SPLIT_PROBLEMS)
def test_shard_map_moves_nothing_but_sums(p, split):
    *arrays, expected = tensors(p)
    of, mesh = specs(p, split), grid()
    parts = dict(zip(AXES, GRID, strict=True)).get(split.get("g"), 1)
    local = dataclasses.replace(p, groups=p.groups // parts)

    def device(x, w, t):
        def forward(x, w):
            y = conv(local, x, w)
            return jax.lax.psum(y, split["c"]) if "c" in split else y

        y, pullback = jax.vjp(forward, x, w)
        return y, *pullback(t)

    step = jax.jit(
        jax.shard_map(
            device,
            mesh=mesh,
            in_specs=tuple(of[role] for role in "xwy"),
            out_specs=tuple(of[role] for role in "yxw"),
            check_vma=True,
        )
    )
    for result, name in zip(step(*arrays), ("y", "dx", "dw"), strict=True):
        assert_exact(result, expected[name], f"{p.name} {name}")
    total = sum(count.get("all-reduce", 0) for count in sums(split).values())
    found = collectives(step.lower(*arrays).compile())
    assert found == ({"all-reduce": total} if total else {})


@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("way", ["Auto", "Explicit", "shard_map"])
def test_two_device_weight_gradient_is_summed_once(count, way):
    """If both the type system and the partitioner summed, the gradient would double."""
    p, split = PROBLEMS["dense"], {"n": "data"}
    *arrays, expected = tensors(p)
    kind = jax.sharding.AxisType.Explicit if way == "Explicit" else jax.sharding.AxisType.Auto
    mesh = grid(kind, (count,), ("data",))
    step = gradients(p)
    if way == "shard_map":
        x, w, y = (specs(p, split)[role] for role in "xwy")
        step = jax.shard_map(step, mesh=mesh, in_specs=(x, w, y), out_specs=(x, w), check_vma=True)
    with jax.set_mesh(mesh):
        assert_gradients_with_one_sum(jax.jit(step), p, placed(mesh, p, split, arrays), expected)


def summed_arrays(compiled) -> int:
    """The number of arrays that all-reduces sum; XLA may combine several in one."""
    results = re.findall(r"= (\([^=]*\)|\S+) all-reduce(?:-start)?\(", compiled.as_text())
    return sum(len(re.findall(r"\w+\[[\d,]*\]", result)) for result in results)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_two_layers_with_a_residual_sum_their_parameters_only(kind):
    """Data parallel: one sum for each parameter and for the loss, and no other collective."""
    mesh = grid(getattr(jax.sharding.AxisType, kind), (DEVICES,), ("data",))
    rng = np.random.default_rng(0)
    x = rng.standard_normal((16, 5, 5, 4)).astype(np.float32)
    w = rng.standard_normal((2, 3, 3, 4, 4)).astype(np.float32)
    b = rng.standard_normal((2, 4)).astype(np.float32)
    layers = [(w[0], b[0]), (w[1], b[1])]

    def loss(layers, x):
        (w0, b0), (w1, b1) = layers
        h = jax.nn.relu(jaxconv.conv(x, w0) + b0)
        return jnp.mean((x + jaxconv.conv(h, w1) + b1) ** 2)

    step = jax.jit(jax.value_and_grad(loss))
    expected = on_cpu(step, layers, x)
    with jax.set_mesh(mesh):
        whole, batch = NamedSharding(mesh, Spec()), NamedSharding(mesh, Spec("data"))
        compiled = step.lower(jax.device_put(layers, whole), jax.device_put(x, batch)).compile()
        actual = compiled(jax.device_put(layers, whole), jax.device_put(x, batch))
    assert set(collectives(compiled)) == {"all-reduce"}
    assert summed_arrays(compiled) == 5
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5), actual, expected
    )


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_output_channels_of_one_layer_are_input_channels_of_the_next(kind):
    """Pairs of model-parallel layers: one sum of the second output, one of the first gradient."""
    mesh = grid(getattr(jax.sharding.AxisType, kind))
    rng = np.random.default_rng(0)
    x, w0, w1 = (
        rng.integers(-2, 3, shape).astype(np.float32)
        for shape in ((2, 5, 5, 4), (3, 3, 4, 8), (3, 3, 8, 4))
    )

    def net(x, w0, w1):
        return jaxconv.conv(jaxconv.conv(x, w0), w1)

    def step(x, w0, w1):
        y, pullback = jax.vjp(net, x, w0, w1)
        return y, *pullback(y)

    expected = on_cpu(step, x, w0, w1)
    with jax.set_mesh(mesh):
        operands = [
            jax.device_put(a, NamedSharding(mesh, spec))
            for a, spec in (
                (x, Spec()),
                (w0, Spec(None, None, None, "data")),
                (w1, Spec(None, None, "data")),
            )
        ]
        assert collectives(jax.jit(net).lower(*operands).compile()) == {"all-reduce": 1}
        compiled = jax.jit(step).lower(*operands).compile()
        assert collectives(compiled) == {"all-reduce": 2}
        for a, e in zip(compiled(*operands), expected, strict=True):
            np.testing.assert_array_equal(a, e)


# --- vmap ---


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize(
    ("axes", "x_spec", "w_spec", "per_example"),
    [
        pytest.param((0, 0), Spec("data"), Spec("data"), False, id="both_mapped"),
        pytest.param((0, 0), Spec(None, "data"), Spec(), False, id="batch_of_both_mapped"),
        pytest.param((None, 0), Spec("data"), Spec(), False, id="filters_mapped"),
        pytest.param((None, 0), Spec("data"), Spec("model"), False, id="filters_mapped_and_split"),
        pytest.param((0, None), Spec("data"), Spec(), False, id="inputs_mapped"),
        pytest.param((0, None), Spec("data"), Spec(), True, id="per_example_gradients"),
    ],
)
@pytest.mark.parametrize("groups", [1, 4])
def test_vmap_moves_nothing(kind, axes, x_spec, w_spec, per_example, groups):
    if groups > 1 and w_spec == Spec("model"):
        pytest.skip("in groups, the mapped axis is not outermost: refused, or gathers the filter")
    rng = np.random.default_rng(0)
    x = rng.integers(-2, 3, ((8,) if axes[0] == 0 else ()) + (4, 5, 5, 4)).astype(np.float32)
    w = rng.integers(-2, 3, ((8,) if axes[1] == 0 else ()) + (3, 3, 4 // groups, 8))
    w = w.astype(np.float32)

    def one(x, w):
        return jaxconv.conv(x, w, groups=groups)

    if per_example:
        one = jax.grad(lambda x, w: jnp.sum(jaxconv.conv(x, w, groups=groups) ** 2), argnums=1)
    mapped = jax.jit(jax.vmap(one, axes))
    expected = mapped(x, w)
    mesh = grid(getattr(jax.sharding.AxisType, kind))
    with jax.set_mesh(mesh):
        x, w = (jax.device_put(a, NamedSharding(mesh, s)) for a, s in ((x, x_spec), (w, w_spec)))
        compiled = mapped.lower(x, w).compile()
        np.testing.assert_array_equal(compiled(x, w), expected)
    assert collectives(compiled) == {}


def test_vmap_of_a_split_batch_on_an_explicit_mesh():
    """vmap puts the mapped axis inside the batch axis, which is split."""
    x = np.random.default_rng(0).integers(-2, 3, (3, 8, 5, 5, 4)).astype(np.float32)
    w = np.ones((3, 3, 4, 8), np.float32)
    mapped = jax.jit(jax.vmap(jaxconv.conv, (0, None)))
    expected = mapped(x, w)
    mesh = grid(jax.sharding.AxisType.Explicit)
    with jax.set_mesh(mesh):
        x = jax.device_put(x, NamedSharding(mesh, Spec(None, "data")))
        y = mapped(x, jax.device_put(w, NamedSharding(mesh, Spec())))
        assert jax.typeof(y).sharding.spec == Spec(None, "data", None, None, None)
        np.testing.assert_array_equal(y, expected)


# --- what has no kernel ---


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("name", ["dense", "grouped"])
@pytest.mark.parametrize(
    ("dtype", "algorithm"),
    [(np.float32, "xla"), (np.complex64, "auto"), (np.float64, "auto")],
    ids=["xla", "complex64", "float64"],
)
def test_the_fallback_is_split_alike(name, dtype, algorithm, kind):
    """XLA would gather the batch of a grouped convolution; the library partitions it instead."""
    p, split = PROBLEMS[name], {"n": "data"}
    with jax.enable_x64(True):
        *arrays, expected = tensors(p)
        mesh = grid(getattr(jax.sharding.AxisType, kind))
        with jax.set_mesh(mesh):
            operands = placed(mesh, p, split, [a.astype(dtype) for a in arrays])
            step = jax.jit(gradients(p, algorithm=algorithm)).lower(*operands).compile()
            dx, dw = step(*operands)
        np.testing.assert_array_equal(dx, expected["dx"])
        np.testing.assert_array_equal(dw, expected["dw"])
    assert collectives(step) == {"all-reduce": 1}


def test_extents_that_do_not_divide_stay_whole():
    """Three channels over two devices, two groups over four: results are right, at any cost."""
    for p in (
        problem("odd", 5, 3, n=8, c=3, k=5, padding=1),
        problem("few_groups", 5, 3, n=8, c=8, k=8, padding=1, groups=2),
        problem("many_devices", 5, 3, n=4, c=8, k=8, padding=1),
    ):
        *arrays, expected = tensors(p)
        mesh = grid()
        spec = {
            "odd": Spec(AXES),
            "few_groups": Spec(None, None, None, AXES),
            "many_devices": Spec("data", None, None, "model"),
        }[p.name]
        x, t = (
            jax.device_put(a, NamedSharding(mesh, spec)) if a.shape[-1] == 8 else a
            for a in (arrays[0], arrays[2])
        )
        # JAX 0.9 has no type for a result that is split over a part of a mesh axis.
        whole = NamedSharding(mesh, Spec())
        dx, dw = jax.jit(gradients(p), out_shardings=whole)(x, arrays[1], t)
        assert_exact(dx, expected["dx"], p.name)
        assert_exact(dw, expected["dw"], p.name)


# --- a loop of layers -----------------------------------------------------------------------------


@pytest.mark.parametrize("remat", [False, True], ids=["", "remat"])
@pytest.mark.parametrize("split", ["c", "k"])
def test_a_loop_of_layers_moves_what_lax_moves(native_cpu, split, remat):
    """The carry is split over channels, the axis that a layer both reads and writes."""
    mesh = grid(shape=(4,), axes=("a",))
    spec = Spec(None, None, None, *{"c": ("a", None), "k": (None, "a")}[split])
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(s).astype(np.float32) for s in ((2, 6, 6, 8), (3, 3, 3, 8, 8)))
    w *= 0.1  # so that tanh does not saturate
    operands = jax.device_put((w, x), (NamedSharding(mesh, spec), NamedSharding(mesh, Spec())))

    def step(layer):
        def loss(w, x):
            body = jax.checkpoint(layer) if remat else layer
            return (jax.lax.scan(body, x, w)[0] ** 2).sum()

        def update(w, x):
            dw, dx = jax.grad(loss, (0, 1))(w, x)
            return w - dw, x - dx

        return jax.jit(update)

    def of_lax(x, w):
        y = jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jnp.tanh(y), None

    def with_epilogue(x, w):
        return jaxconv.conv(x, w, activation="tanh"), None

    reference = step(of_lax)
    expected, compiled = reference(w, x), reference.lower(*operands).compile()
    for layer in (jaxconv.override(of_lax), with_epilogue):
        ours = step(layer).lower(*operands).compile()
        assert collectives(ours) == collectives(compiled)
        assert received(ours) <= received(compiled)
        for actual, exact in zip(ours(*operands), expected, strict=True):
            np.testing.assert_allclose(actual, exact, rtol=1e-4, atol=1e-4)
