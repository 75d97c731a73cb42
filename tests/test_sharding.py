"""Eight virtual CPU devices: shard_map with its type checks on, automatic and explicit sharding.

What a program costs is read off its compiled text, as the number of each collective in it.
"""

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
from numerics import assert_exact, on_cpu, reference
from problems import problem

import jaxconv
from jaxconv._src import compat, partition
from jaxconv._src.spec import Op

DEVICES = 8


@pytest.fixture
def mesh():
    devices = jax.devices("cpu")
    assert len(devices) == DEVICES, "conftest.py asks for eight virtual CPU devices"
    with jax.default_device(devices[0]):
        yield jax.make_mesh((DEVICES,), ("data",), (jax.sharding.AxisType.Auto,), devices=devices)


def collectives(compiled) -> dict[str, int]:
    """How often each collective occurs in the compiled program."""
    kinds = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
    text = compiled.as_text()
    # An instruction reads "%name = type kind(operands)"; asynchronous ones have -start and -done.
    return {
        kind: count for kind in kinds if (count := len(re.findall(rf" {kind}(?:-start)?\(", text)))
    }


CASES = [
    problem("dense", 6, 3, n=16, c=4, k=6, padding=1),
    problem("grouped", 6, 3, n=16, c=4, k=6, padding=1, groups=2),
    problem("strided", (7, 6), 3, n=8, c=3, k=4, stride=2, padding=1),
]
NAMES = [p.name for p in CASES]


def conv(p, x, w, **options):
    return jaxconv.conv(x, w, stride=p.stride, padding=p.padding, groups=p.groups, **options)


def tensors(p):
    rng = np.random.default_rng(0)
    x, w, t = (rng.integers(-3, 4, p.canonical_shape(r)).astype(np.float32) for r in "xwy")
    expected = {
        "y": reference(Op.FPROP, p, x, w),
        "dx": reference(Op.DGRAD, p, t, w),
        "dw": reference(Op.WGRAD, p, x, t),
    }
    return x, w, t, {name: a.astype(np.float32) for name, a in expected.items()}


def assert_gradients_with_one_sum(step, p, operands, expected):
    """The step's (dx, dw) are exact, and cost one all-reduce and nothing else."""
    dx, dw = step(*operands)
    assert_exact(dx, expected["dx"], p.name)
    assert_exact(dw, expected["dw"], p.name)
    assert collectives(step.lower(*operands).compile()) == {"all-reduce": 1}


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
    """The data-parallel step: shard_map's types make the sum over devices appear exactly once."""
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
    # Of the filter's gradient. The loss itself is not needed, and so not summed.
    assert_gradients_with_one_sum(step, p, (x, w, t), expected)


def test_second_derivative_inside_shard_map(mesh):
    """dgrad and wgrad with operands of different varying types."""
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
    """Model parallel: the gradient of the replicated input is the one sum."""
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
    """Per-example gradients of a sharded batch: nothing is summed over the devices."""
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

GRID = (4, 2)
AXES = ("data", "model")

PROBLEMS = {
    p.name: p
    for p in (
        problem("dense", 5, 3, n=8, c=4, k=8, padding=1),
        problem("strided", (7, 6), 3, n=8, c=4, k=8, stride=2, padding=1),
        problem("one_dimensional", 9, 3, n=8, c=4, k=8, padding=1),
        problem("grouped", 5, 3, n=8, c=8, k=16, padding=1, groups=4),
        problem("depthwise", 5, 3, n=8, c=8, k=8, padding=1, groups=8),
        problem("of_groups", 5, 3, n=8, c=8, k=16, padding=1, groups=8),
    )
}
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


def grid(kind=jax.sharding.AxisType.Auto, shape=GRID, axes=AXES):
    count = np.prod(shape)
    return jax.make_mesh(shape, axes, (kind,) * len(shape), devices=jax.devices("cpu")[:count])


def specs(p, split) -> dict[str, Spec]:
    """How x, w and y are split, channels last."""
    inner = (None,) * len(p.spatial)
    n, c, k, g = (split.get(name) for name in "nckg")
    return {
        "x": Spec(n, *inner, c or g),
        "w": Spec(*inner, c, k or g),
        "y": Spec(n, *inner, k or g),
    }


def sums(split) -> dict[str, dict[str, int]]:
    """The collectives that the split costs: a sum where the factor is contracted."""
    forward = "c" in split
    backward = ("k" in split) + ("n" in split)  # of dx, of dw
    return {
        "forward": {"all-reduce": 1} if forward else {},
        "backward": {"all-reduce": backward} if backward else {},
    }


def gradients(p, **options):
    def of(x, w, t):
        return jax.vjp(lambda x, w: conv(p, x, w, **options), x, w)[1](t)

    return of


def placed(mesh, p, split, arrays):
    return [
        jax.device_put(a, NamedSharding(mesh, specs(p, split)[role]))
        for a, role in zip(arrays, "xwy", strict=True)
    ]


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize(("p", "split"), SPLIT_PROBLEMS)
def test_jit_moves_nothing_but_sums(p, split, kind):
    """Outputs and gradients are exact, their shardings follow the operands'."""
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
    """A lowering that leaves the sum to both the type system and the partitioner doubles it."""
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
    """How many arrays the program's all-reduces sum; XLA may combine several in one."""
    results = re.findall(r"= (\([^=]*\)|\S+) all-reduce(?:-start)?\(", compiled.as_text())
    return sum(len(re.findall(r"\w+\[[\d,]*\]", result)) for result in results)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_two_layers_with_a_residual_sum_their_parameters_only(kind):
    """Data parallel: one sum for each parameter and the loss, and no other collective."""
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
    """Model parallel in pairs: one sum of the second output, one of the first layer's gradient."""
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
    """The mapped axis goes inside the batch, which is split."""
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
    """XLA's own partitioning gathers the batch of a grouped convolution; here it never sees it."""
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
    """Three channels over two devices, two groups over four: right, whatever it costs."""
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
        # JAX 0.9 cannot say of a result that it is split over a part of a mesh axis.
        whole = NamedSharding(mesh, Spec())
        dx, dw = jax.jit(gradients(p), out_shardings=whole)(x, arrays[1], t)
        assert_exact(dx, expected["dx"], p.name)
        assert_exact(dw, expected["dw"], p.name)


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
    """The mesh is rebuilt from prime factors, in the order that the shardings need."""
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
    """Two sums of the weight gradient: one that the types ask for, one that the split costs."""
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
    if kind == "Auto":  # JAX itself gathers at the border of a partly manual, explicit region
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
    """JAX's rule for explicit meshes: nothing is moved without being asked for."""
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
    """Fully sharded data parallel: the filter travels, the activations stay."""
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
            y = partition.with_out_sharding(conv(p, x, w), sharding)
            assert jax.typeof(y).sharding.spec == demanded
            assert_exact(y, expected["y"], p.name)
        assert partition.with_out_sharding(y, None) is y


def test_out_sharding_elsewhere_does_what_lax_does(mesh):
    y = jnp.zeros((8, 5, 5, 8))
    with pytest.raises(ValueError, match="not under a mesh context"):
        partition.with_out_sharding(y, Spec("data"))
    with pytest.raises(TypeError, match="out_sharding"):
        partition.with_out_sharding(y, "data")
    with jax.set_mesh(mesh):
        assert partition.with_out_sharding(y, Spec()) is y
        with pytest.raises(ValueError, match="Auto"):
            partition.with_out_sharding(y, Spec("data"))


# --- the algebra ---


def test_every_factor_is_free_in_two_operations_and_contracted_in_one():
    dense, grouped = PROBLEMS["dense"].spec(), PROBLEMS["grouped"].spec()
    assert [partition.contracted(op, dense) for op in Op] == [("c",), ("k",), ("n", "s0", "s1")]
    assert [partition.contracted(op, grouped) for op in Op] == [(), (), ("n", "s0", "s1")]
    assert partition.factors(grouped, "w") == {"g": 3}
    for op in Op:
        held = [set(partition.factors(dense, role)) for role in op.roles]
        assert held[0] ^ held[1] == held[2]


@pytest.mark.parametrize(
    ("op", "lhs", "rhs", "out", "expected"),
    [
        # A mesh axis serves one factor: batch before the filter's channels, which are gathered.
        (Op.FPROP, {"n": "a"}, {"c": "a"}, None, {"n": ("a",)}),
        (Op.FPROP, {"n": "a"}, {"k": "a"}, None, {"n": ("a",)}),
        # Input channels that x holds before output channels: no activation is gathered.
        (Op.FPROP, {"c": "a"}, {"k": "a"}, {"k": "a"}, {"c": ("a",)}),
        (Op.FPROP, {}, {"c": "a"}, {"k": "a"}, {"k": ("a",)}),
        # The finer split; what does not divide is left out.
        (Op.FPROP, {"n": "a"}, {}, {"n": "ab"}, {"n": ("a", "b")}),
        (Op.FPROP, {"n": "ab", "c": "d"}, {}, None, {"n": ("a", "b")}),
        (Op.WGRAD, {"n": "a"}, {"n": "b"}, {"k": "b"}, {"n": ("a",), "k": ("b",)}),
        (Op.DGRAD, {"k": "b"}, {"k": "b", "c": "a"}, None, {"k": ("b",), "c": ("a",)}),
    ],
)
def test_the_choice_between_splits(op, lhs, rhs, out, expected):
    spec = PROBLEMS["dense"].spec()
    given = [
        None if split is None else partition.partitions(spec, role, dict(split))
        for role, split in zip(op.roles, (lhs, rhs, out), strict=True)
    ]
    given = [None if g is None else tuple(tuple(axes) for axes in g) for g in given]
    mesh = {"a": 4, "b": 2, "d": 3}
    extents = {"batch": 1, "n": 8, "g": 1, "c": 4, "k": 8}
    assert partition.choose(op, spec, extents, mesh, given) == expected
