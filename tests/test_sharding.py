"""Eight virtual CPU devices: shard_map with its type checks on, automatic sharding, collectives."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as Spec
from numerics import assert_exact, reference
from problems import problem

import jaxconv
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


def conv(p, x, w):
    return jaxconv.conv(x, w, stride=p.stride, padding=p.padding, groups=p.groups)


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


@pytest.mark.parametrize("p", CASES, ids=NAMES)
def test_jit_over_a_sharded_batch_is_right(mesh, p):
    """Automatic partitioning may gather, but never changes the numbers."""
    x, w, t, expected = tensors(p)
    batch, whole = (NamedSharding(mesh, spec) for spec in (Spec("data"), Spec()))
    x, t, w = jax.device_put(x, batch), jax.device_put(t, batch), jax.device_put(w, whole)

    @jax.jit
    def step(x, w, t):
        return jax.value_and_grad(lambda x, w: jnp.sum(conv(p, x, w) * t), argnums=(0, 1))(x, w)

    value, (dx, dw) = step(x, w, t)
    assert float(value) == float((expected["y"] * np.asarray(t)).sum())
    assert_exact(dx, expected["dx"], p.name)
    assert_exact(dw, expected["dw"], p.name)


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
