"""Spatial axes split over eight virtual CPU devices: only halo rows are exchanged.

The collectives of the compiled program are compared with those of lax's convolution under XLA's own
partitioner.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from halo_cases import CASES, conv, gradients, lax_conv, placed, tensors
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as Spec
from numerics import assert_exact, reference
from problems import Problem, problem
from sharding_tools import collectives, grid

import jaxconv
from jaxconv._src import compat
from jaxconv._src.problem.spec import Op
from jaxconv._src.sharding import halo

# --- the plan, by NumPy -----------------------------------------------------------------------


def random_axis(rng) -> Problem:
    spatial, window = (int(rng.integers(1, 24)),), (int(rng.integers(1, 6)),)
    return problem(
        "axis",
        spatial,
        window,
        n=1,
        c=2,
        k=2,
        stride=int(rng.integers(1, 4)),
        padding=(tuple(map(int, rng.integers(-2, 6, 2))),),
        lhs_dilation=int(rng.choice([1, 1, 2, 3])),
        dilation=int(rng.integers(1, 3)),
    )


def rows(array: np.ndarray, start: int, count: int) -> np.ndarray:
    """Rows of (n, rows, channels), with zeros outside the array."""
    padded = np.pad(array, ((0, 0), (max(0, -start), max(0, start + count)), (0, 0)))
    at = start + max(0, -start)
    return padded[:, at : at + count]


def on_every_device(op: Op, p: Problem, plan: halo.HaloPlan, lhs, rhs) -> np.ndarray:
    """The combined results of all devices, from the rows that the plan lets them read.

    Rows that a device does not receive are NaN. For wgrad they are 0, because rows of dy beyond the
    end count as zeros, and 0 * NaN is NaN.
    """
    parts = []
    for device in range(plan.parts):
        begin = device * plan.share
        held = slice(begin - plan.before[device], begin + plan.share + plan.after[device])
        given = np.full_like(lhs, 0 if op is Op.WGRAD else np.nan)
        given[:, held] = lhs[:, held]
        read = rows(given, plan.first[device], plan.count)
        local = dataclasses.replace(p, spatial=(plan.in_extent,), padding=(plan.padding,))
        begin = device * plan.result
        if op is Op.WGRAD:
            parts.append(reference(op, local, read, rows(rhs, begin, plan.result)))
        else:
            result = reference(op, local, read, rhs)
            parts.append(result[:, plan.skip[device] :][:, : plan.result])
    if op is Op.WGRAD:
        return np.sum(parts, axis=0)
    return np.concatenate(parts, axis=1)[:, : plan.result_extent]


def test_plans_of_random_axes(seed):
    rng = np.random.default_rng(seed)
    planned = 0
    while planned < 500:
        p, parts = random_axis(rng), int(rng.integers(2, 9))
        if not p.out_spatial[0]:
            continue
        tensors = {r: rng.integers(-3, 4, p.canonical_shape(r)).astype(np.float64) for r in "xwy"}
        for op in Op:
            plan = halo.plan(op, p.spec(), 0, parts)
            if plan is None:
                result = p.spatial[0] if op is Op.DGRAD else p.out_spatial[0]
                idle = (parts - 1) * math.ceil(result / parts) >= result
                zeros_differ = p.lhs_dilation[0] > math.gcd(p.lhs_dilation[0], p.stride[0])
                assert idle or (op is Op.WGRAD and zeros_differ), f"{op} {p} {parts}"
                continue
            lhs, rhs = (tensors[role] for role in op.roles[:2])
            actual = on_every_device(op, p, plan, lhs, rhs)
            np.testing.assert_array_equal(actual, reference(op, p, lhs, rhs), f"{op} {p} {parts}")
            planned += 1


@pytest.mark.parametrize(
    ("op", "problem", "expected"),
    [
        # 32 rows on 4 devices: one row from each side; the last device reads padding.
        (Op.FPROP, problem("same", (32,), 3, padding=1), ((0, 1, 1, 1), (1, 1, 1, 0))),
        (Op.DGRAD, problem("same", (32,), 3, padding=1), ((0, 1, 1, 1), (1, 1, 1, 0))),
        (Op.WGRAD, problem("same", (32,), 3, padding=1), ((0, 1, 1, 1), (1, 1, 1, 0))),
        (
            Op.FPROP,
            problem("strided", (32,), 3, padding=((0, 1),), stride=2),
            ((0,) * 4, (1, 1, 1, 0)),
        ),
        (
            Op.FPROP,
            problem("dilated", (32,), 3, padding=2, dilation=2),
            ((0, 2, 2, 2), (2, 2, 2, 0)),
        ),
        (Op.FPROP, problem("patches", (32,), 4, stride=4), ((0,) * 4, (0,) * 4)),
        (Op.FPROP, problem("1x1", (32,), 1, stride=2), ((0,) * 4, (0,) * 4)),
        # Shares of one row and windows of five: two neighbours on either side.
        (Op.FPROP, problem("wide", (4,), 5, padding=2), ((0, 1, 2, 2), (2, 2, 1, 0))),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_rows_that_devices_lack(op, problem, expected):
    plan = halo.plan(op, problem.spec(), 0, 4)
    assert (plan.before, plan.after) == expected


# --- compiled programs --------------------------------------------------------------------------

# Both gradients of a transposed convolution read rows of the same array. Only on an explicit mesh,
# where the exchange is a separate operation, do they share it.
SHARED = {("transposed", "Explicit"): 1}


def moved(compiled) -> tuple[dict[str, int], dict[str, int]]:
    """The number of each collective, and the bytes of its results on one device."""
    sizes: dict[str, int] = {}
    results = re.findall(r"= f32\[([\d,]*)\]\S* ([a-z-]+)(?:-start)?\(", compiled.as_text())
    for shape, kind in results:
        if kind in collectives(compiled):
            count = math.prod(int(e) for e in shape.split(",") if e)
            sizes[kind] = sizes.get(kind, 0) + 4 * count
    return collectives(compiled), sizes


def some(permutes: int, **others: int) -> dict[str, int]:
    found = {"collective-permute": permutes} if permutes else {}
    return found | {kind.replace("_", "-"): count for kind, count in others.items()}


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize(("p", "forward", "backward"), CASES, ids=lambda v: getattr(v, "name", ""))
def test_rows_are_exchanged(p, forward, backward, kind):
    """Results and gradients are exact and split like x; beside the rows, dw needs one sum."""
    arrays, expected = tensors(p)
    mesh = grid(getattr(jax.sharding.AxisType, kind), (4,), ("rows",))
    with jax.set_mesh(mesh):
        x, w, t = placed(mesh, arrays, Spec(None, "rows"), Spec(), Spec(None, "rows"))
        run = jax.jit(functools.partial(conv, p)).lower(x, w).compile()
        step = jax.jit(gradients(p)).lower(x, w, t).compile()
        y, dx, dw = run(x, w), *step(x, w, t)
    assert collectives(run) == some(forward)
    assert collectives(step) == some(SHARED.get((p.name, kind), backward), all_reduce=1)
    for actual, exact, name in zip((y, dx, dw), expected, ("y", "dx", "dw"), strict=True):
        assert_exact(actual, exact, f"{p.name} {name}")
    for array in (y, dx):
        assert array.sharding.is_equivalent_to(x.sharding, 4)


@pytest.mark.parametrize("name", ["same", "strided", "stem"])
def test_no_more_is_moved_than_by_lax(name):
    (p,) = (p for p, *_ in CASES if p.name == name)
    mesh = grid(shape=(4,), axes=("rows",))
    arrays, _ = tensors(p)
    operands = placed(mesh, arrays, Spec(None, "rows"), Spec(), Spec(None, "rows"))
    ours, theirs = (
        moved(jax.jit(gradients(p, convolve)).lower(*operands).compile())
        for convolve in (conv, lax_conv)
    )
    assert ours == theirs


BOTH = problem("both_axes", (8, 8), 3, n=4, padding=1)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize(
    ("x", "w", "y", "forward", "backward"),
    [
        # Corners take two steps: the columns sent second contain the rows received first.
        ((None, "a", "b"), (), (None, "a", "b"), some(4), some(8, all_reduce=1)),
        ((None, ("a", "b")), (), (None, ("a", "b")), some(2), some(4, all_reduce=1)),
        (("b", "a"), (), ("b", "a"), some(2), some(4, all_reduce=1)),
        (
            (None, "a"),
            (None, None, None, "b"),
            (None, "a", None, "b"),
            some(2),
            some(4, all_reduce=2),
        ),
        (
            (None, "a", None, "b"),
            (None, None, "b"),
            (None, "a"),
            some(2, all_reduce=1),
            some(4, all_reduce=1),
        ),
    ],
    ids=["rows_and_columns", "rows_over_two_axes", "batch", "output_channels", "input_channels"],
)
def test_together_with_other_axes(x, w, y, forward, backward, kind):
    arrays, expected = tensors(BOTH)
    mesh = grid(getattr(jax.sharding.AxisType, kind), (2, 2), ("a", "b"))
    with jax.set_mesh(mesh):
        operands = placed(mesh, arrays, Spec(*x), Spec(*w), Spec(*y))
        run = jax.jit(functools.partial(conv, BOTH)).lower(*operands[:2]).compile()
        step = jax.jit(gradients(BOTH)).lower(*operands).compile()
        results = run(*operands[:2]), *step(*operands)
    assert collectives(run) == forward
    assert collectives(step) == backward
    for actual, exact in zip(results, expected, strict=True):
        assert_exact(actual, exact, str(x))


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize(
    "p", [p for p, *_ in CASES if p.lhs_dilation == (1, 1)], ids=lambda p: p.name
)
def test_rows_of_a_whole_operand_are_not_exchanged(p, kind):
    """Every device has x; the split of the residual splits y, and with it the weight gradient.

    On an explicit mesh the weight gradient belongs to a convolution whose type is that of x.
    """
    arrays, (y, _, dw) = tensors(p)
    mesh = grid(getattr(jax.sharding.AxisType, kind), (4,), ("rows",))

    def layer(x, w, residual):
        options = dict(stride=p.stride, padding=p.padding, dilation=p.dilation, groups=p.groups)
        return jaxconv.conv(x, w, residual=residual, **options)

    def weight_gradient(x, w, t):
        return jax.vjp(lambda w: layer(x, w, t), w)[1](t)

    with jax.set_mesh(mesh):
        operands = placed(mesh, arrays, Spec(), Spec(), Spec(None, "rows"))
        run, gradient = (jax.jit(f).lower(*operands).compile() for f in (layer, weight_gradient))
        actual, (actual_dw,) = run(*operands), gradient(*operands)
    assert collectives(run) == {}
    assert collectives(gradient) == {"all-reduce" if kind == "Auto" else "all-gather": 1}
    assert_exact(actual, y + arrays[2], "y")
    assert_exact(actual_dw, dw, "dw")
    assert actual.sharding.is_equivalent_to(operands[2].sharding, 4)


# XLA pads these to equal shares on every device, for example 13 = 4 + 4 + 4 + 1 rows.
UNEVEN = [
    problem("same", (13, 3), 3, n=1, padding=1),
    problem("valid", (16, 3), 3, n=1),
    problem("strided", (15, 3), 3, n=1, stride=2, padding=1),
    problem("few_rows", (8, 3), 3, n=1, stride=3),  # 2 rows of y on 4 devices
    # dx has shares of 5 rows: windows of dy, 2 apart, begin differently on every device.
    problem("odd_shares", (20, 3), 4, n=1, stride=2, padding=1),
]


@pytest.mark.parametrize("p", UNEVEN, ids=lambda p: p.name)
def test_extents_that_do_not_divide(p):
    """Padding rows do not affect results. A preceding layer with a bias fills them with garbage."""
    arrays, _ = tensors(p)
    mesh = grid(shape=(4,), axes=("rows",))
    rows = NamedSharding(mesh, Spec(None, "rows"))
    constrain = functools.partial(lax.with_sharding_constraint, shardings=rows)

    def step(convolve, split, x, w, t):
        y, pullback = jax.vjp(functools.partial(convolve, p), split(split(x) + 1), w)
        dx, dw = pullback(split(split(t) - 2))
        return split(y), split(dx), dw

    whole = NamedSharding(mesh, Spec())
    ours = jax.jit(functools.partial(step, conv, constrain), out_shardings=whole)
    compiled = ours.lower(*arrays).compile()
    expected = jax.jit(functools.partial(step, lax_conv, lambda a: a))(*arrays)
    for actual, exact in zip(compiled(*arrays), expected, strict=True):
        assert_exact(actual, exact, p.name)
    found = collectives(compiled)
    assert found["collective-permute"] > 0 and found["all-reduce"] == 1
    # The results y and dx are gathered, but no operand.
    assert found["all-gather"] <= 2


def test_second_order():
    p = problem("second", (8, 3), 3, n=1, c=4, k=4, padding=1)
    (x, w, t), _ = tensors(p)
    mesh = grid(shape=(4,), axes=("rows",))

    def hessian_product(convolve, x, w, t):
        def loss(x, w):
            return jnp.sum(convolve(p, x, w) ** 2 * t)

        return jax.jvp(jax.grad(loss, (0, 1)), (x, w), (x + 1, w - 1))[1]

    expected = jax.jit(functools.partial(hessian_product, lax_conv))(x, w, t)
    operands = placed(mesh, (x, w, t), Spec(None, "rows"), Spec(), Spec(None, "rows"))
    ours = jax.jit(functools.partial(hessian_product, conv)).lower(*operands).compile()
    for actual, exact in zip(ours(*operands), expected, strict=True):
        assert_exact(actual, exact, p.name)
    assert set(collectives(ours)) == {"collective-permute", "all-reduce"}


def test_narrow_shares_are_gathered_and_the_work_is_split():
    """Each device reads every row. One all-gather moves as little as permutes, in one step."""
    p = problem("narrow", (8, 3), (15, 1), padding=((7, 7), (0, 0)))
    arrays, expected = tensors(p)
    mesh = grid(shape=(8,), axes=("rows",))
    operands = placed(mesh, arrays, Spec(None, "rows"), Spec(), Spec(None, "rows"))
    compiled = jax.jit(gradients(p)).lower(*operands).compile()
    dx, dw = compiled(*operands)
    assert collectives(compiled) == {"all-gather": 2, "all-reduce": 1}
    assert_exact(dx, expected[1], "dx")
    assert_exact(dw, expected[2], "dw")
    assert dx.sharding.is_equivalent_to(operands[0].sharding, 4)


def test_the_weight_gradient_of_a_dilated_input_is_gathered():
    """The zeros between the rows of x begin differently on every device."""
    p = problem("dilated", (10, 3), 3, padding=1, lhs_dilation=(2, 1))  # 19 rows: shares of 10
    p = dataclasses.replace(p, lhs_dilation=(3, 1), spatial=(4, 3))  # 10 rows: shares of 5
    assert halo.plan(Op.WGRAD, p.spec(), 0, 2) is None
    arrays, expected = tensors(p)
    mesh = grid(shape=(2,), axes=("rows",))
    x, w, t = placed(mesh, arrays, Spec(None, "rows"), Spec(), Spec(None, "rows"))
    dw = jax.jit(lambda x, w, t: gradients(p)(x, w, t)[1])(x, w, t)
    assert_exact(dw, expected[2], "dw")


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_under_override(kind):
    """lax's convolutions exchange rows as well, also in the gradients' forms."""
    p = problem("lax", (16, 3), 3, padding=((0, 1), (1, 1)), stride=2)
    arrays, expected = tensors(p)
    mesh = grid(getattr(jax.sharding.AxisType, kind), (4,), ("rows",))
    with jax.set_mesh(mesh), jaxconv.override():
        operands = placed(mesh, arrays, Spec(None, "rows"), Spec(), Spec(None, "rows"))
        step = jax.jit(gradients(p, lax_conv)).lower(*operands).compile()
        dx, dw = step(*operands)
        explained = jaxconv.explain(gradients(p, lax_conv), *operands)
    assert explained.on_kernels == 2
    assert collectives(step) == some(2, all_reduce=1)
    assert_exact(dx, expected[1], "dx")
    assert_exact(dw, expected[2], "dw")


def test_positions_that_an_explicit_mesh_cannot_split():
    """An explicit type cannot have uneven shares: refused, as by lax."""
    p = problem("valid", (16, 3), 3)
    arrays, _ = tensors(p)
    mesh = grid(jax.sharding.AxisType.Explicit, (4,), ("rows",))
    with jax.set_mesh(mesh):
        x, w = placed(mesh, arrays[:2], Spec(None, "rows"), Spec())
        with pytest.raises(compat.ShardingTypeError, match=r"4 ways, .* the 14 positions"):
            conv(p, x, w)


def test_shard_map_stays_manual():
    """Inside shard_map an array belongs to one device, and nothing is exchanged."""
    p = problem("manual", (16, 3), (3, 1), padding=0)
    (x, w, _), _ = tensors(p)
    mesh = grid(shape=(4,), axes=("rows",))

    def device(x, w):
        return conv(dataclasses.replace(p, spatial=(4, 3)), x, w)

    rows = Spec(None, "rows")
    mapped = jax.jit(jax.shard_map(device, mesh=mesh, in_specs=(rows, Spec()), out_specs=rows))
    alone = [lax_conv(p, part, w) for part in np.split(x, 4, axis=1)]
    assert_exact(mapped(x, w), np.concatenate(alone, axis=1), "manual")
    assert collectives(mapped.lower(x, w).compile()) == {}
