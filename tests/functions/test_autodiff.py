"""Derivatives of the public functions: any order, both modes, inside every transformation."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.test_util import check_grads
from numerics import assert_exact, on_cpu, reference
from problems import BY_NAME, REPRESENTATIVE, Problem

import jaxconv
from jaxconv._src.problem.spec import Op

CASES = [problem for problem in REPRESENTATIVE if problem.batch is None]
NAMES = [problem.name for problem in CASES]
ANY_RANK = {1: ("NWC", "WIO", "NWC"), 2: ("NHWC", "HWIO", "NHWC"), 3: ("NDHWC", "DHWIO", "NDHWC")}


def general(problem: Problem, convolve=jaxconv.conv_general_dilated):
    """The problem as a call of ``conv_general_dilated``, of this library or of lax."""
    return functools.partial(
        convolve,
        window_strides=problem.stride,
        padding=problem.padding,
        lhs_dilation=problem.lhs_dilation,
        rhs_dilation=problem.dilation,
        dimension_numbers=ANY_RANK[problem.rank],
        feature_group_count=problem.groups,
        precision="highest",
    )


def integers(seed: int, *shapes) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(-4, 5, shape).astype(np.float32) for shape in shapes]


def operands(problem: Problem, roles: str = "xw") -> list[np.ndarray]:
    return integers(0, *(problem.canonical_shape(role) for role in roles))


@pytest.mark.parametrize("problem", CASES, ids=NAMES)
def test_vjp_is_dgrad_and_wgrad(platform, problem):
    x, w, dy = operands(problem, "xwy")
    dx, dw = jax.jit(lambda x, w, dy: jax.vjp(general(problem), x, w)[1](dy))(x, w, dy)
    for op, actual, pair in ((Op.DGRAD, dx, (dy, w)), (Op.WGRAD, dw, (x, dy))):
        expected = reference(op, problem, *pair).astype(np.float32)
        assert_exact(actual, expected, problem.line(op, "f32"))


@pytest.mark.parametrize("problem", CASES, ids=NAMES)
def test_jvp_is_bilinear(platform, problem):
    x, w, tx, tw = integers(1, *(problem.canonical_shape(role) for role in "xwxw"))
    y, ty = jax.jit(lambda *a: jax.jvp(general(problem), a[:2], a[2:]))(x, w, tx, tw)
    line = problem.line(Op.FPROP, "f32")
    assert_exact(y, reference(Op.FPROP, problem, x, w).astype(np.float32), line)
    expected = reference(Op.FPROP, problem, tx, w) + reference(Op.FPROP, problem, x, tw)
    assert_exact(ty, expected.astype(np.float32), line)


SMALL = Problem(
    "small",
    spatial=(5, 4),
    window=(3, 2),
    n=2,
    c=4,
    k=6,
    stride=(2, 1),
    padding=((1, 2), (-1, 1)),
    lhs_dilation=(1, 2),
    dilation=(1, 2),
    groups=2,
)
SMALL_1D = Problem(
    "small_1d",
    spatial=(7,),
    window=(3,),
    n=2,
    c=2,
    k=3,
    stride=(2,),
    padding=((2, 1),),
    lhs_dilation=(1,),
    dilation=(1,),
    groups=1,
)


@pytest.mark.parametrize("problem", [SMALL, SMALL_1D], ids=["small", "small_1d"])
@pytest.mark.parametrize("modes", ["fwd", "rev"])
def test_check_grads_to_second_order(platform, problem, modes):
    x, w = (a / 4 for a in operands(problem))
    check_grads(jax.jit(general(problem)), (x, w), order=2, modes=(modes,), atol=0.05, rtol=0.05)


def test_check_grads_to_third_order(platform):
    """The loss is cubic, so that the third derivative is not zero."""
    x, w = (a / 4 for a in operands(SMALL_1D))

    def loss(x, w):
        return jnp.sum(general(SMALL_1D)(x, w) ** 3) / 16

    check_grads(jax.jit(loss), (x, w), order=3, modes=("rev",), atol=0.2, rtol=0.2)


@pytest.mark.parametrize("op", Op)
def test_check_grads_of_every_primitive(platform, op):
    """dgrad and wgrad are differentiated in both operands, too."""
    lhs, rhs = (a / 4 for a in integers(2, *(SMALL.canonical_shape(r) for r in op.roles[:2])))
    call = SMALL.operation(op, "f32", precision="highest")
    check_grads(call, (lhs, rhs), order=2, modes=("fwd", "rev"), atol=0.05, rtol=0.05)


def primitives_of(jaxpr) -> set[str]:
    """Names of all primitives of a jaxpr, nested ones included."""
    found = set()
    for equation in jaxpr.eqns:
        found.add(equation.primitive.name)
        for parameter in equation.params.values():
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                found |= primitives_of(inner)
    return found


def test_second_derivatives_stay_inside_the_three_primitives():
    x, w = operands(SMALL)

    def loss(x, w):
        return jnp.sum(general(SMALL)(x, w) ** 2)

    def gradient_norm(x, w):
        return sum(jnp.sum(g**2) for g in jax.grad(loss, argnums=(0, 1))(x, w))

    found = primitives_of(jax.make_jaxpr(jax.grad(gradient_norm, argnums=(0, 1)))(x, w).jaxpr)
    ours = {name for name in found if "conv" in name and name != "convert_element_type"}
    assert ours == {"jaxconv_fprop", "jaxconv_dgrad", "jaxconv_wgrad"}


@pytest.mark.parametrize("problem", [SMALL, SMALL_1D], ids=["small", "small_1d"])
def test_hessian_vector_product_is_that_of_lax(platform, problem):
    """On integers, where both libraries are exact."""
    x, w, v = integers(3, *(problem.canonical_shape(role) for role in "xww"))

    def hvp(convolve):
        def loss(w):
            return jnp.sum(general(problem, convolve)(x, w) ** 2)

        return lambda w, v: jax.jvp(jax.grad(loss), (w,), (v,))[1]

    expected = on_cpu(hvp(lax.conv_general_dilated), w, v)
    assert np.any(expected)
    actual = jax.jit(hvp(jaxconv.conv_general_dilated))(w, v)
    assert_exact(actual, expected, problem.line(Op.FPROP, "f32"))


def test_full_hessian_is_that_of_lax(platform):
    x, w = operands(SMALL_1D)

    def hessian(convolve):
        def loss(x, w):
            return jnp.sum(general(SMALL_1D, convolve)(x, w) ** 2)

        return jax.hessian(loss, argnums=(0, 1))

    ours = jax.jit(hessian(jaxconv.conv_general_dilated))(x, w)
    theirs = on_cpu(hessian(lax.conv_general_dilated), x, w)
    jax.tree.map(lambda a, b: assert_exact(a, b, "hessian"), ours, theirs)


def test_linear_transpose_in_each_operand(platform):
    x, w, dy = operands(SMALL, "xwy")
    (dx,) = jax.linear_transpose(lambda x: general(SMALL)(x, w), x)(dy)
    (dw,) = jax.linear_transpose(lambda w: general(SMALL)(x, w), w)(dy)
    assert_exact(dx, reference(Op.DGRAD, SMALL, dy, w).astype(np.float32), "dx")
    assert_exact(dw, reference(Op.WGRAD, SMALL, x, dy).astype(np.float32), "dw")


def test_remat_and_scan_over_layers(platform):
    """Three residual layers with stacked filters: a loop, a scan, and a scan with remat."""
    x, w = integers(4, (2, 6, 6, 4), (3, 3, 3, 4, 4))
    x, w = np.sign(x), np.sign(w)

    def layer(x, w):
        return x + jaxconv.conv(x, w, padding="SAME", precision="highest"), None

    def loop(w, x):
        for one in w:
            x, _ = layer(x, one)
        return x.sum()

    def scanned(body):
        return lambda w, x: lax.scan(body, x, w)[0].sum()

    expected = jax.jit(jax.value_and_grad(loop))(w, x)
    for body in (layer, jax.checkpoint(layer)):
        actual = jax.jit(jax.value_and_grad(scanned(body)))(w, x)
        jax.tree.map(lambda a, b: assert_exact(a, b, "scan"), actual, expected)


def test_gradient_dtypes_with_a_wide_result(platform):
    """bfloat16 operands, float32 result: the gradients are bfloat16, as in lax."""
    problem = BY_NAME["channel_tail"]
    x, w = (a.astype(jnp.bfloat16) for a in map(np.sign, operands(problem)))

    def loss(x, w):
        y = jaxconv.conv(x, w, padding=1, preferred_element_type=jnp.float32)
        assert y.dtype == jnp.float32
        return y.sum()

    dx, dw = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, w)
    assert dx.dtype == dw.dtype == jnp.bfloat16
    dy = np.ones(problem.canonical_shape("y"))
    for op, actual, pair in ((Op.DGRAD, dx, (dy, w)), (Op.WGRAD, dw, (x, dy))):
        expected = reference(op, problem, *pair)
        assert np.abs(expected).max() <= 256
        assert_exact(actual, expected.astype(jnp.bfloat16), problem.line(op, "bf16"))


def test_algorithm_by_direction_reaches_its_direction(platform):
    """``algorithm`` as a mapping: only the weight gradient is computed by XLA."""
    x, w = operands(SMALL_1D)

    def loss(w):
        algorithm = {"wgrad": "xla"}
        return jaxconv.conv(x, w, padding="VALID", algorithm=algorithm).sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss))(w)
    specs = {
        e.primitive.name: e.params["spec"] for e in jaxpr.eqns if "jaxconv" in str(e.primitive)
    }
    assert {name: spec.algorithm for name, spec in specs.items()} == {
        "jaxconv_fprop": ("auto", "auto", "xla"),
        "jaxconv_wgrad": ("auto", "auto", "xla"),
    }
    assert specs["jaxconv_wgrad"].algorithm_of(Op.WGRAD) == "xla"
