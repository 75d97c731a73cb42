"""Convolution with an epilogue: scale, bias, residual and activation in one call."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from epilogue_reference import activated
from fused_reference import TERMS, before_activation, fused, operands
from jax.test_util import check_grads
from numerics import assert_exact
from problems import Problem, problem

import jaxconv
from jaxconv._src.conv.fused import bind
from jaxconv._src.problem import epilogue

PROBLEMS = [
    problem("dense", (6, 5), 3, n=2, c=4, k=8, padding=1),
    problem("strided", (7, 6), 3, n=2, c=3, k=5, stride=2, padding=1),
    problem("grouped", (6, 5), 3, n=2, c=4, k=6, padding=1, groups=2),
    problem("pointwise", (6, 5), 1, n=2, c=16, k=24),
    problem("one axis", (9,), 3, n=2, c=4, k=8, padding=1),
]
SLOPES = (("leaky_relu", 0.125), ("leaky_relu", -0.5))
ACTIVATIONS = (None, *(a for a in epilogue.ACTIVATIONS if a != "leaky_relu"), *SLOPES)


def name_of(activation) -> str:
    if activation is ACTIVATIONS:
        return "all"
    return "-".join(map(str, activation)) if isinstance(activation, tuple) else str(activation)


def subsets() -> list[tuple[str, ...]]:
    return [s for n in range(4) for s in itertools.combinations(TERMS, n)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("p", PROBLEMS, ids=[p.name for p in PROBLEMS])
def test_terms_are_exact_on_integers(platform, p, dtype):
    values = operands(p, jnp.dtype(dtype))
    exact_activations = (None, "relu", "relu6", ("leaky_relu", 0.5))
    cases = [c for c in itertools.product(subsets(), exact_activations) if c != ((), None)]

    @jax.jit
    def program(values):
        return [
            fused(p, activation)(**{name: values[name] for name in ("x", "w", *terms)})
            for terms, activation in cases
        ]

    for (terms, activation), y in zip(cases, program(values), strict=True):
        expected = activated(activation, before_activation(p, values, terms))
        assert y.dtype == dtype
        rounded = np.asarray(expected.astype(np.float32)).astype(jnp.dtype(dtype))
        assert_exact(y, rounded, f"{p.name} {terms} {activation} {dtype}")


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=name_of)
def test_activations_are_accurate(platform, activation):
    """A pointwise convolution with the unit matrix: the activation's argument t is x."""
    magnitudes = np.concatenate([np.zeros(8), np.geomspace(1e-6, 10, 504)]).astype(np.float32)
    x = np.concatenate([magnitudes, -magnitudes]).reshape(8, 8, 16)
    w = np.eye(16, dtype=np.float32)[None, None]
    # TF32 products round t in its last bits; igemm_simt does not.
    algorithm = "igemm_simt" if platform == "cuda" else "native"
    call = functools.partial(jaxconv.conv, activation=activation, algorithm=algorithm)
    y = np.asarray(jax.jit(call)(x[None], w)[0]).astype(np.float64)
    exact = activated(activation, x.astype(np.float64))
    allowed = 1e-6 * np.abs(exact)
    if platform == "cuda":  # exp magnifies the error of a large negative argument
        allowed += 2e-7 * np.minimum(np.abs(x), np.exp(-np.abs(x)))
    assert (np.abs(y - exact) <= allowed).all()


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=name_of)
def test_nan_stays(platform, activation):
    x = np.zeros((1, 4, 4, 16), np.float32)
    x[0, 1, 2, 3] = np.nan
    w = np.eye(16, dtype=np.float32)[None, None]
    bias = np.zeros(16, np.float32)
    y = np.asarray(jax.jit(functools.partial(jaxconv.conv, activation=activation))(x, w, bias=bias))
    # The matrix product sums over all channels of the pixel, so NaN reaches all of them.
    assert np.isnan(y[0, 1, 2]).all()
    assert np.isfinite(y[0, 0]).all()


# Infinities, arguments whose square or cube overflows, and numbers that are not normal.
EXTREMES = np.array(
    [
        *(
            sign * v
            for v in (np.inf, 3.4e38, 1e38, 1e20, 1e13, 105, 89, 16, 1e-30)
            for sign in (1, -1)
        ),
        *(np.nan, 0.0),
    ],
    np.float32,
)
EXTREME_ACTIVATIONS = (*ACTIVATIONS[1:], ("leaky_relu", 0.0))


def in_jax(activation):
    if isinstance(activation, tuple):
        return lambda t: jax.nn.leaky_relu(t, activation[1])
    exact = functools.partial(jax.nn.gelu, approximate=False)
    return {"gelu": exact, "gelu_tanh": jax.nn.gelu}.get(activation) or getattr(jax.nn, activation)


def at_extremes(activation, dtype, bias):
    """The activations of the bias, because all sums are zero."""
    x, w = np.zeros((1, 2, 2, 8), dtype), np.zeros((1, 1, 8, EXTREMES.size), dtype)
    y = jaxconv.conv(x, w, bias=bias, activation=activation, algorithm="native")
    return y[0, 1, 1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("activation", EXTREME_ACTIVATIONS, ids=name_of)
def test_extremes(platform, activation, dtype):
    """Infinite and NaN exactly where jax.nn is in float32; elsewhere close to the definition."""
    y = jax.jit(functools.partial(at_extremes, activation, dtype))(EXTREMES)
    expected = jax.jit(in_jax(activation))(EXTREMES).astype(dtype)
    got, expected = (np.asarray(a).astype(np.float64) for a in (y, expected))
    rtol = {"float32": 2e-5, "bfloat16": 1e-2, "float16": 2e-3}[dtype]
    np.testing.assert_allclose(got, expected, rtol=rtol, atol=1e-36, err_msg=str(EXTREMES))


@pytest.mark.parametrize("activation", EXTREME_ACTIVATIONS, ids=name_of)
def test_derivatives_at_extremes(platform, activation):
    """Derivatives are those of jax.nn, which gives NaN for gelu and silu of infinity."""

    def derivative(f):
        return jax.jit(lambda t: jax.vjp(f, t)[1](jnp.ones_like(t))[0])(EXTREMES)

    got = derivative(functools.partial(at_extremes, activation, np.float32))
    expected = derivative(in_jax(activation))
    # XLA's tanh(16) is one unit in the last place below 1.
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-6, err_msg=str(EXTREMES))


# --- derivatives ---


def apart(p: Problem, activation):
    """The plain convolution and the epilogue by jax.numpy, in float32."""
    convolve = fused(p)

    def call(x, w, scale, bias, residual):
        acc = convolve(x, w, preferred_element_type=jnp.float32)
        t = acc * scale + bias + residual.astype(np.float32)
        name, slope = epilogue.parse_activation(activation)
        return epilogue.activate(t, name, slope).astype(x.dtype)

    return call


def normal(p: Problem, dtype=np.float32, seed: int = 0) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    shapes = {
        "x": p.canonical_shape("x"),
        "w": p.canonical_shape("w"),
        "scale": (p.k,),
        "bias": (p.k,),
        "residual": p.canonical_shape("y"),
    }
    return {
        n: jnp.asarray(rng.standard_normal(s), np.float32 if n in ("scale", "bias") else dtype)
        * 0.5
        for n, s in shapes.items()
    }


TINY = problem("tiny", (3, 4), 2, n=2, c=2, k=4, groups=2, stride=(1, 2))


@pytest.mark.parametrize("activations", [ACTIVATIONS, ("relu",), ("silu",)], ids=name_of)
def test_gradients(activations):
    """Gradients of all operands, forward and reverse, in float64, where no kernel rounds.

    Second order for an activation whose derivative follows from y, and for one that stores `pre`.
    """
    order = 2 if len(activations) == 1 else 1
    with jax.enable_x64(True):
        values = {n: a.astype(np.float64) for n, a in normal(TINY).items()}
        f = jax.jit(lambda v: [fused(TINY, activation)(**v) for activation in activations])
        check_grads(f, (values,), order=order, modes=["fwd", "rev"], eps=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activation", [None, "relu", "silu"], ids=name_of)
def test_gradients_are_those_of_the_parts(platform, activation, dtype):
    p = PROBLEMS[0]
    values = normal(p, jnp.dtype(dtype))
    together, parts = fused(p, activation), apart(p, activation)

    def loss(f, values):
        y = f(**values).astype(np.float32)
        return jnp.sum(y * jnp.cos(jnp.arange(y.size).reshape(y.shape)))

    with jax.default_matmul_precision("highest"):  # a GPU's float32 would be TF32
        got = jax.jit(jax.grad(functools.partial(loss, together)))(values)
        wanted = jax.jit(jax.grad(functools.partial(loss, parts)))(values)
    tolerance = 1e-5 if dtype == "float32" else 3e-2
    for name, gradient in got.items():
        assert gradient.dtype == values[name].dtype
        a, b = (np.asarray(g).astype(np.float64) for g in (gradient, wanted[name]))
        assert np.abs(a - b).max() <= tolerance * np.abs(b).max(), name


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=name_of)
def test_the_backward_pass_keeps_one_activation(activation):
    """The backward pass keeps the result or the activation's argument, in the result's dtype."""
    p = PROBLEMS[0]
    values = normal(p, jnp.bfloat16)
    f = functools.partial(fused(p, activation), bias=values["bias"], residual=values["residual"])
    y, pullback = jax.vjp(f, values["x"], values["w"])
    kept = [a for a in jax.tree.leaves(pullback) if a.shape == y.shape]
    assert [a.dtype for a in kept] == [y.dtype] * (activation is not None)
    if activation in ("relu", "relu6", "sigmoid", "tanh", SLOPES[0]):
        assert_exact(kept[0], np.asarray(y), name_of(activation))


# --- transformations ---


def test_vmap_over_any_operands(seed):
    p = PROBLEMS[2]
    values = operands(p, seed=seed)
    mapped = {n: np.stack([a, 2 * a, -a]).astype(a.dtype) for n, a in values.items()}

    def f(*given):
        return fused(p, "relu")(**dict(zip(values, given, strict=True)))

    one = jax.jit(f)
    for axes in itertools.product((None, 0), repeat=5):
        if not any(a == 0 for a in axes):
            continue
        given = [(values if a is None else mapped)[n] for n, a in zip(values, axes, strict=True)]
        y = jax.jit(jax.vmap(f, axes))(*given)
        for i in range(3):
            key = tuple(None if a is None else i for a in axes)
            example = [g if k is None else g[k] for g, k in zip(given, key, strict=True)]
            expected = one(*example)
            assert_exact(y[i], np.asarray(expected), f"{axes} {i}")


def test_vmap_folds_into_one_call(native_kernels):
    """Images fold into N, filters into K; there is one fused call and no plain one."""
    p = PROBLEMS[0]
    values = operands(p)
    images = {n: np.stack([values[n]] * 3) for n in ("x", "residual")}
    filters = {n: np.stack([values[n]] * 3) for n in ("w", "scale", "bias")}
    f = fused(p, "relu")
    for mapped in (images, filters):
        given = {**values, **mapped}
        axes = {n: 0 if n in mapped else None for n in given}
        jaxpr = str(jax.make_jaxpr(jax.vmap(lambda v: f(**v), (axes,)))(given))
        assert jaxpr.count("jaxconv_fused") == 1 and "jaxconv_fprop" not in jaxpr


def test_under_scan_remat_and_policies():
    p = problem("square", (5, 5), 3, n=1, c=4, k=4, padding=1)
    values = operands(p)
    f = functools.partial(fused(p, "silu"), w=values["w"] * 0.1, bias=values["bias"])

    def layers(x, step):
        return jax.lax.scan(lambda x, _: (step(x), None), x, None, length=3)[0].sum()

    plain = jax.jit(jax.grad(lambda x: layers(x, f)))(values["x"])
    policy = jaxconv.checkpoint_policies.convs_saveable
    for step in (jax.checkpoint(f), jax.checkpoint(f, policy=policy)):
        again = jax.jit(jax.grad(lambda x, step=step: layers(x, step)))(values["x"])
        np.testing.assert_allclose(again, plain, rtol=1e-6)


def test_symbolic_shapes_and_export():
    p = PROBLEMS[0]
    values = operands(p)
    f = functools.partial(fused(p, "relu"), **{n: values[n] for n in ("w", "scale", "bias")})
    batch = jax.export.symbolic_shape("b")[0]
    x = jax.ShapeDtypeStruct((batch, *values["x"].shape[1:]), np.float32)
    checks = jaxconv.export.disabled_checks()
    symbolic = jax.export.export(jax.jit(f), platforms=["cpu"])(x)
    fixed = jax.export.export(jax.jit(f), platforms=["cpu"], disabled_checks=checks)(values["x"])
    expected = np.maximum(before_activation(p, values, ("scale", "bias")), 0).astype(np.float32)
    for exported in (symbolic, fixed):
        again = jax.export.deserialize(exported.serialize())
        with jax.default_device(jax.devices("cpu")[0]):
            assert_exact(again.call(values["x"]), expected, "exported")


def test_one_example_and_formats(platform):
    p = PROBLEMS[0]
    values = operands(p)
    expected = np.maximum(before_activation(p, values, TERMS), 0).astype(np.float32)
    terms = {n: values[n] for n in ("scale", "bias")}
    y = fused(p, "relu")(values["x"][0], values["w"], residual=values["residual"][0], **terms)
    assert_exact(y, expected[0], "one example")
    first = np.moveaxis(values["residual"], -1, 1)
    y = fused(p, "relu", data_format="NCHW")(
        np.moveaxis(values["x"], -1, 1),
        np.transpose(values["w"], (3, 2, 0, 1)),
        residual=first,
        **terms,
    )
    assert_exact(y, np.moveaxis(expected, -1, 1), "NCHW")


def test_a_wider_result_and_operands_of_two_dtypes(platform):
    p = PROBLEMS[0]
    values = operands(p, jnp.bfloat16)
    expected = before_activation(p, values, ("bias",)).astype(np.float32)
    wide = fused(p, preferred_element_type=np.float32)
    assert_exact(wide(values["x"], values["w"], bias=values["bias"]), expected, "f32 of bf16")
    y = fused(p)(values["x"], values["w"].astype(np.float32), bias=values["bias"])
    assert_exact(y, expected, "bf16 and f32")


def test_winograd_with_an_epilogue():
    """Winograd has no epilogue: it computes the convolution, XLA the epilogue."""
    p = PROBLEMS[0]
    values = {n: a for n, a in operands(p).items() if n != "scale"}
    expected = np.maximum(before_activation(p, operands(p), ("bias", "residual")), 0)
    for algorithm in ("winograd_f2x2", "im2col", "xla"):
        y = jax.jit(fused(p, "relu", algorithm=algorithm))(**values)
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transposed_convolution(platform, dtype):
    """Exact on integers; gradients equal those of the convolution and a separate epilogue."""
    rng = np.random.default_rng(0)
    x, w, residual, ct = (
        rng.integers(-2, 3, shape).astype(jnp.dtype(dtype))
        for shape in ((2, 5, 4, 6), (3, 3, 6, 4), (2, 10, 8, 4), (2, 10, 8, 4))
    )
    terms = {"scale": np.float32([1, 2, 0.5, 1]), "bias": np.float32([3, -1, 0, 2])}
    convolve = functools.partial(jaxconv.conv_transpose, strides=(2, 2), padding="SAME")

    def together(x, w, residual, terms):
        return convolve(x, w, residual=residual, activation="relu", **terms)

    def parts(x, w, residual, terms):
        acc = convolve(x, w, preferred_element_type=np.float32)
        return jax.nn.relu(acc * terms["scale"] + terms["bias"] + residual).astype(dtype)

    results = []
    for f in (together, parts):
        y, pullback = jax.vjp(jax.jit(f), x, w, residual, terms)
        results.append((y, pullback(ct)))
    (y, gradients), (expected, of_parts) = results
    assert_exact(y, np.asarray(expected), dtype)
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(of_parts), strict=True):
        a, b = (np.asarray(g).astype(np.float64) for g in (a, b))
        assert np.abs(a - b).max() <= (1e-6 if dtype == "float32" else 2e-2) * np.abs(b).max()
    text = str(jax.make_jaxpr(jax.grad(lambda x: together(x, w, residual, terms).sum()))(x))
    assert text.count("jaxconv_dgrad") == 1 and text.count("jaxconv_fprop") == 1


def test_terms_are_taken_by_name():
    """Scale and bias have one shape and type, so the order of the arguments does not decide."""
    p = PROBLEMS[0]
    values = operands(p)
    spec, form = spec_of(p, values), epilogue.Epilogue(scale=True, bias=True, residual=True)
    for order in itertools.permutations(TERMS):
        terms = {name: jnp.asarray(values[name]) for name in order}
        y, *_ = bind(
            values["x"], values["w"], terms, spec=spec, epilogue=form, out_dtype=np.float32
        )
        assert_exact(y, before_activation(p, values, TERMS).astype(np.float32), str(order))


def test_statistics():
    """Mean and sum of squared deviations of the rounded y, and their gradient."""
    p = PROBLEMS[0]
    values = normal(p, jnp.bfloat16)
    spec = spec_of(p, values)
    form = epilogue.Epilogue(bias=True, activation="silu", statistics=True)

    def f(x, w, bias):
        return bind(x, w, {"bias": bias}, spec=spec, epilogue=form, out_dtype=x.dtype)

    y, moments = jax.jit(f)(values["x"], values["w"], values["bias"] + 40)
    assert moments.shape == (2, p.k) and moments.dtype == np.float32
    exact = np.asarray(y).astype(np.float64).reshape(-1, p.k)
    mean = exact.mean(0)
    squares = ((exact - mean) ** 2).sum(0)
    np.testing.assert_allclose(moments[0], mean, rtol=1e-6)
    np.testing.assert_allclose(moments[1], squares, rtol=1e-4)
    with jax.enable_x64(True):
        wide = [values[n].astype(np.float64) for n in ("x", "w", "bias")]
        check_grads(lambda *a: f(*a)[1], wide, order=1, modes=["fwd", "rev"], eps=1e-5)


def spec_of(p: Problem, values):
    """The ConvSpec that ``conv`` makes, taken from its jaxpr."""
    jaxpr = jax.make_jaxpr(lambda x, w: fused(p)(x, w))(values["x"], values["w"])
    return next(e for e in jaxpr.eqns if "spec" in e.params).params["spec"]
