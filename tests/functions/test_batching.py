"""vmap: every subset of mapped operands, in and out axes, nested, with and without groups."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import assert_exact, reference
from problems import Problem

import jaxconv
from jaxconv._src.problem.spec import Op

COUNT = 3


def case(groups: int) -> Problem:
    return Problem(
        f"groups{groups}",
        spatial=(5, 6),
        window=(3, 2),
        n=2,
        c=4,
        k=6,
        stride=(1, 2),
        padding=((1, 1), (0, 1)),
        lhs_dilation=(1, 1),
        dilation=(2, 1),
        groups=groups,
    )


def integers(seed: int, shape) -> np.ndarray:
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float32)


def stacked(op: Op, problem: Problem, lhs, rhs, mapped) -> np.ndarray:
    """The equivalent loop: the stacked results of each example."""
    parts = [
        reference(op, problem, lhs[i] if mapped[0] else lhs, rhs[i] if mapped[1] else rhs)
        for i in range(COUNT)
    ]
    return np.stack(parts).astype(np.float32)


@pytest.mark.parametrize("layout", ["last", "first"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("mapped", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("op", Op)
def test_every_subset_of_operands(platform, op, mapped, groups, layout):
    """The batch axis is first, last or between, in operands and result."""
    problem = case(groups)
    call = problem.operation(op, "f32", layout=layout)
    shapes = [problem.canonical_shape(role) for role in op.roles[:2]]
    lhs, rhs = (
        integers(i, (COUNT, *shape) if m else shape)
        for i, (shape, m) in enumerate(zip(shapes, mapped, strict=True))
    )
    expected = stacked(op, problem, lhs, rhs, mapped)

    def arranged(role, array, is_mapped, axis):
        if not is_mapped:
            return problem.to_layout(role, array, layout)
        each = np.stack([problem.to_layout(role, a, layout) for a in array])
        return np.moveaxis(each, 0, axis)

    expected = arranged(op.roles[2], expected, True, 0)
    for in_axis, out_axis in ((0, 0), (4, 2), (2, 4)):
        in_axes = tuple(in_axis if m else None for m in mapped)
        actual = jax.vmap(call, in_axes=in_axes, out_axes=out_axis)(
            arranged(op.roles[0], lhs, mapped[0], in_axis),
            arranged(op.roles[1], rhs, mapped[1], in_axis),
        )
        assert_exact(
            actual,
            np.moveaxis(expected, 0, out_axis),
            f"vmap in {in_axes} out {out_axis}: {problem.line(op, 'f32')}",
        )


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("op", Op)
def test_operands_mapped_along_different_axes(platform, op, groups):
    problem = case(groups)
    lhs, rhs = (
        integers(i, (COUNT, *problem.canonical_shape(role))) for i, role in enumerate(op.roles[:2])
    )
    expected = stacked(op, problem, lhs, rhs, (True, True))
    actual = jax.vmap(problem.operation(op, "f32"), in_axes=(1, 3), out_axes=1)(
        np.moveaxis(lhs, 0, 1), np.moveaxis(rhs, 0, 3)
    )
    assert_exact(np.moveaxis(np.asarray(actual), 1, 0), expected, problem.line(op, "f32"))


SUBSETS = [(True, False), (False, True), (True, True)]


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("outer", "inner"), list(itertools.product(SUBSETS, SUBSETS)))
@pytest.mark.parametrize("op", Op)
def test_nested(platform, op, outer, inner, groups):
    """Two levels of vmap; in particular over one operand of a batched convolution."""
    problem = case(groups)
    call = problem.operation(op, "f32")
    counts, arrays = (2, 3), []
    for i, role in enumerate(op.roles[:2]):
        leading = [count for count, m in zip(counts, (outer[i], inner[i]), strict=True) if m]
        arrays.append(integers(i, (*leading, *problem.canonical_shape(role))))

    def axes(mapped):
        return tuple(0 if m else None for m in mapped)

    actual = jax.vmap(jax.vmap(call, in_axes=axes(inner)), in_axes=axes(outer))(*arrays)
    for i, j in np.ndindex(*counts):
        pair = []
        for array, outer_mapped, inner_mapped in zip(arrays, outer, inner, strict=True):
            array = array[i] if outer_mapped else array
            pair.append(array[j] if inner_mapped else array)
        expected = reference(op, problem, *pair).astype(np.float32)
        assert_exact(
            actual[i, j], expected, f"nested {outer} {inner} at {i, j}: {problem.line(op, 'f32')}"
        )


@pytest.mark.parametrize("groups", [1, 2])
def test_per_example_gradients(platform, groups):
    """vmap of grad: examples share the filter, but not its gradient."""
    problem = case(groups)
    x, w = (
        integers(0, (COUNT, *problem.canonical_shape("x"))),
        integers(1, problem.canonical_shape("w")),
    )
    t = integers(2, (COUNT, *problem.canonical_shape("y")))
    conv = functools.partial(
        jaxconv.conv, stride=(1, 2), padding=problem.padding, dilation=(2, 1), groups=groups
    )

    def loss(w, x, t):
        return jnp.sum(conv(x, w) * t)

    actual = jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, 0, 0)))(w, x, t)
    expected = stacked(Op.WGRAD, problem, x, t, (True, True))
    assert_exact(actual, expected, problem.line(Op.WGRAD, "f32"))


def test_per_example_filters_and_their_gradient(platform):
    """grad of vmap: each example has its own filter, as from a hypernetwork."""
    problem = case(1)
    x, w, t = (integers(i, (COUNT, *problem.canonical_shape(role))) for i, role in enumerate("xwy"))
    conv = functools.partial(jaxconv.conv, stride=(1, 2), padding=problem.padding, dilation=(2, 1))

    def loss(w, x):
        return jnp.sum(jax.vmap(conv)(x, w) * t)

    dw, dx = jax.jit(jax.grad(loss, argnums=(0, 1)))(w, x)
    assert_exact(dw, stacked(Op.WGRAD, problem, x, t, (True, True)), "dw")
    assert_exact(dx, stacked(Op.DGRAD, problem, t, w, (True, True)), "dx")


def test_a_mapped_axis_without_entries(platform):
    problem = case(2)
    x, w = (np.zeros((0, *problem.canonical_shape(role)), np.float32) for role in "xw")
    call = problem.operation(Op.FPROP, "f32")
    shape = problem.canonical_shape("y")
    assert jax.vmap(call)(x, w).shape == (0, *shape)
    assert jax.vmap(call, in_axes=(0, None))(x, np.zeros(w.shape[1:], np.float32)).shape == (
        0,
        *shape,
    )
    assert jax.vmap(call, in_axes=(None, 0))(np.zeros(x.shape[1:], np.float32), w).shape == (
        0,
        *shape,
    )


def test_vmap_of_a_while_loop_carries_the_convolution(platform):
    problem = case(1)
    x, w = integers(0, (COUNT, 1, 4, 4, 2)), integers(1, (3, 3, 2, 2))
    steps = np.array([1, 3, 2])

    def repeat(x, count):
        def body(state):
            i, x = state
            return i + 1, jnp.sign(jaxconv.conv(x, w))

        return jax.lax.while_loop(lambda state: state[0] < count, body, (0, x))[1]

    actual = jax.jit(jax.vmap(repeat))(x, steps)
    for i, count in enumerate(steps):
        expected = x[i]
        for _ in range(count):
            expected = jnp.sign(jaxconv.conv(expected, w))
        assert_exact(actual[i], expected, problem.name)
