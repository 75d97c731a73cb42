"""Statistics from a convolution's call: ``conv(statistics=True)``, and ``fuse``.

A test counts calls and the operations left beside them, as in ``test_fuse``.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_programs import NHWC, assert_close, check, draw, epilogues, reasons
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from numerics import assert_exact
from sharding_tools import collectives

import jaxconv
from jaxconv.bench import networks
from jaxconv.bench.networks import programs

pytestmark = pytest.mark.usefixtures("on_the_cpu")

X, W = draw(4, 6, 5, 4), draw(3, 3, 4, 8, seed=1)
BIAS = draw(8, seed=2)


def exact(y, axis=-1) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance of every channel in float64."""
    channels = np.moveaxis(np.asarray(y).astype(np.float64), axis, 0).reshape(y.shape[axis], -1)
    return channels.mean(1), channels.var(1)


def assert_statistics(results, axis=-1, rtol=1e-6) -> None:
    y, mean, variance = results
    expected = exact(y, axis)
    assert mean.shape == variance.shape == (y.shape[axis],)
    assert mean.dtype == variance.dtype == np.float32
    deviation = np.sqrt(expected[1]) + 1e-30
    assert (np.abs(mean - expected[0]) <= rtol * (np.abs(expected[0]) + deviation)).all()
    assert (np.abs(variance - expected[1]) <= rtol * expected[1] + 1e-12).all()


counted = functools.partial(jaxconv.conv, statistics=True)


# --- conv(statistics=True) ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        pytest.param({}, "float32", id="alone"),
        pytest.param({}, "bfloat16", id="alone in bfloat16"),
        pytest.param(dict(bias=BIAS + 1000, activation="silu"), "float32", id="large mean"),
        pytest.param(dict(bias=BIAS + 1000, activation="silu"), "float16", id="in float16"),
        pytest.param(dict(groups=2, stride=2, data_format="NCHW"), "bfloat16", id="format"),
        pytest.param(dict(algorithm="xla", bias=BIAS), "float32", id="xla"),
        pytest.param(dict(algorithm="winograd_f2x2"), "bfloat16", id="winograd"),
    ],
)
def test_mean_and_variance(native_cpu, options, dtype):
    """Statistics of the rounded result; a large mean does not reduce the variance's accuracy."""
    axis, x, w = -1, X, W
    if "data_format" in options:
        axis, x, w = 1, X.transpose(0, 3, 1, 2), W.transpose(3, 2, 0, 1)[:, :2]
    f = functools.partial(counted, **options)
    results = jax.jit(f)(x.astype(dtype), w.astype(dtype))
    assert_statistics(results, axis, rtol=3e-6)
    without = functools.partial(jaxconv.conv, **options)
    assert_exact(results[0], np.asarray(jax.jit(without)(x.astype(dtype), w.astype(dtype))), "y")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rest", ["", "bias relu"])
def test_on_every_platform(platform, dtype, rest):
    """With the rest of the epilogue in the call; computed by XLA if no kernel has statistics."""
    x, w = draw(4, 14, 14, 16).astype(dtype), draw(3, 3, 16, 32, seed=1).astype(dtype)
    terms = dict(bias=draw(32, seed=2), activation="relu") if rest else {}
    f = functools.partial(counted, algorithm="native", **terms)
    assert_statistics(jax.jit(f)(x, w), rtol=1e-5)
    (called,) = jaxconv.explain(f, x, w)
    assert called.instance is not None
    expected = f"{rest} statistics".strip()
    hopper = platform == "cuda" and jax.devices("gpu")[0].compute_capability == "9.0"
    if platform == "cpu" or (hopper and dtype == "bfloat16" and not rest):
        assert called.epilogue == expected and not called.apart
    else:
        assert called.epilogue == rest
        assert any("no statistics" in reason for _, reason in called.apart)


@pytest.mark.parametrize("shape", [(3, 37, 41, 4, 600), (2, 9, 7, 4, 3), (1, 1, 1, 4, 8)])
def test_many_channels_and_pixels(native_cpu, shape):
    """Several tasks with several regions, in parts of channels and of pixels."""
    *sizes, c, k = shape
    x, w = draw(*sizes, c), draw(1, 1, c, k, seed=1)
    f = functools.partial(counted, algorithm="native", bias=draw(k, seed=2) + 3e4)
    explanation = jaxconv.explain(f, x, w)
    assert explanation[0].epilogue == "bias statistics"
    results = jax.jit(f)(x, w)
    assert_statistics(results)
    again = jax.jit(f)(x, w)
    for a, b in zip(results, again, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_derivatives():
    """Derivatives of all results, forward and reverse, to the second order, in float64."""
    x, w, bias = X[:1, :3, :3, :2], W[:2, :2, :2, :2], BIAS[:2]
    with jax.enable_x64(True):
        given = [np.asarray(a, np.float64) for a in (x, w, bias)]

        def f(x, w, bias):
            return counted(x, w, bias=bias, activation="silu")

        check_grads(jax.jit(f), given, order=2, modes=["fwd", "rev"], eps=1e-5)


def test_vmap_symbolic_shapes_and_one_example(native_cpu):
    f = functools.partial(counted, bias=BIAS, activation="relu")
    for axes in ((0, None), (None, 0), (0, 0)):
        given = [
            a if axis is None else jnp.stack([a, -2 * a])
            for a, axis in zip((X, W), axes, strict=True)
        ]
        results = jax.jit(jax.vmap(f, axes))(*given)
        for i in range(2):
            assert_statistics([r[i] for r in results], rtol=5e-6)
    batch = jax.export.symbolic_shape("b")[0]
    x = jax.ShapeDtypeStruct((batch, *X.shape[1:]), np.float32)
    checks = jaxconv.export.disabled_checks()
    for argument in (x, X):
        exported = jax.export.export(jax.jit(f), platforms=["cpu"], disabled_checks=checks)
        again = jax.export.deserialize(exported(argument, W).serialize())
        assert_statistics(again.call(X, W), rtol=5e-6)
    y, mean, variance = f(X[0], W)
    assert y.shape == (6, 5, 8)
    assert_statistics((y, mean, variance))
    assert np.isnan(f(X[:0], W)[2]).all(), "of nothing"


@pytest.mark.parametrize("groups", [1, 2])
def test_vmap_over_filters_is_one_call(native_cpu, groups):
    w = jnp.stack([W, 3 * W, -W], 1)[:, :, :, : 4 // groups]
    biases = draw(3, 8, seed=5)

    def f(w, bias):
        return counted(X, w, groups=groups, bias=bias, activation="relu")

    together = jax.vmap(f, (1, 0))
    program = str(jax.make_jaxpr(together)(w, biases))
    assert program.count("jaxconv_fused[") == 1 and "statistics=True" in program
    results = jax.jit(together)(w, biases)
    for i in range(3):
        assert_statistics([r[i] for r in results])
        assert_exact(results[0][i], np.asarray(f(w[:, i], biases[i])[0]), str(i))


@pytest.mark.parametrize("spec", [P("a"), P(None, "a"), P("a", "b"), P(None, None, None, "b")])
def test_of_split_arrays_are_of_the_whole(native_cpu, spec):
    mesh = Mesh(np.array(jax.devices("cpu")[:4]).reshape(2, 2), ("a", "b"))
    f = functools.partial(counted, bias=BIAS)
    placed = jax.device_put(X, NamedSharding(mesh, spec))
    y, mean, variance = jax.jit(f)(placed, W)
    whole = f(X, W)
    for a, b in zip((y, mean, variance), whole, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P("a"), P()), out_specs=(P("a"), P("a"), P("a"))
    )
    def parts(x, w):
        return f(x, w)

    y, mean, variance = jax.jit(parts)(X, W)
    for i, half in enumerate((slice(0, 2), slice(2, 4))):
        assert_statistics((y[half], mean[8 * i :][:8], variance[8 * i :][:8]))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [P("a"), P(None, "a"), P(("a", "b")), P("a", "b")])
def test_of_split_arrays_do_not_cancel(native_cpu, spec, kind):
    """Devices exchange one sum. The mean is 3000 deviations, and parts differ.

    There, rounding a part's mean to float32 changes the variance by 4e-4, and a float32 sum of
    squares has no correct digit of it.
    """
    mesh = jax.make_mesh((2, 2), ("a", "b"), (kind,) * 2, devices=jax.devices("cpu")[:4])
    rising = X + np.arange(4, dtype=np.float32)[:, None, None, None]
    f = jax.jit(functools.partial(counted, bias=BIAS + 3e4))
    with jax.set_mesh(mesh):
        results = f(
            *(jax.device_put(a, NamedSharding(mesh, s)) for a, s in ((rising, spec), (W, P())))
        )
    assert_statistics(results, rtol=4e-4)
    constant = np.full_like(X, 3e4 / 7)
    with jax.set_mesh(mesh):
        placed = jax.device_put(constant, NamedSharding(mesh, spec))
        _, mean, variance = f(placed, jax.device_put(0 * W, NamedSharding(mesh, P())))
    np.testing.assert_array_equal(mean, BIAS + np.float32(3e4))
    np.testing.assert_array_equal(variance, 0)


def test_bad_input():
    with pytest.raises(TypeError, match="statistics: expected True or False, got 1"):
        jaxconv.conv(X, W, statistics=1)
    with pytest.raises(TypeError, match="statistics: expected floating-point x and w"):
        jaxconv.conv(X.astype(np.int8), W.astype(np.int8), statistics=True)


def test_where_no_kernel_has_statistics_xla_reads_the_result(monkeypatch, native_cpu):
    """The rest of the epilogue stays in the call; ``explain`` gives the reason."""
    from jaxconv._src.call import selection
    from jaxconv._src.conv.fused import Fused

    select = Fused.select

    def without(call, *problem):
        if call.epilogue.statistics:
            return selection.refused("has no statistics of its result"), ""
        return select(call, *problem)

    monkeypatch.setattr(Fused, "select", without)
    jax.clear_caches()
    f = functools.partial(counted, bias=BIAS, activation="relu", algorithm="native")
    explanation = jaxconv.explain(f, X, W)
    assert explanation[0].epilogue == "bias relu"
    text = str(explanation)
    assert "epilogue apart, in XLA:" in text and "has no statistics of its result" in text
    assert_statistics(f(X, W), rtol=5e-6)

    def block(x):
        return normalised(conv(x) + BIAS)

    assert epilogues(block, X) == ["bias"]
    assert "no kernel computes bias statistics here" in reasons(block, X)
    jax.clear_caches()


# --- fuse -----------------------------------------------------------------------------------------


def conv(x, w=W):
    with jaxconv.override(algorithm="native"):
        return lax.conv_general_dilated(
            x, w.astype(x.dtype), (1, 1), "SAME", dimension_numbers=NHWC
        )


AXES = (0, 1, 2)


def of_squares(y):
    """The variance as E[y y] - E[y] E[y] in float32."""
    wide = y.astype(jnp.float32)
    mean = wide.mean(AXES)
    return mean, jnp.maximum(0, (wide * wide).mean(AXES) - mean * mean)


def two_passes(y):
    wide = y.astype(jnp.float32)
    mean = wide.mean(AXES, keepdims=True)
    return mean.reshape(-1), ((wide - mean) ** 2).mean(AXES)


def library(y):
    wide = y.astype(jnp.float32)
    return wide.mean(AXES), wide.var(AXES)


def in_steps(y):
    """Means over positions, then over examples."""
    wide = y.astype(jnp.float32)
    mean = wide.mean((1, 2)).mean(0)
    return mean, (jnp.square(wide).mean((1, 2)).mean(0)) - jnp.square(mean)


def of_sums(y):
    """Sums times a factor other than 1 / n."""
    wide = y.astype(jnp.float32)
    count = wide.size // wide.shape[-1]
    mean = lax.reduce_sum_p.bind(wide, axes=AXES, out_sharding=None) / count
    return mean, jnp.sum(wide * wide, AXES) * np.float32(1 / count) - mean**2


def about_another(y):
    """Squared deviations from a vector that is not the mean."""
    wide = y.astype(jnp.float32)
    around = ((wide - BIAS) * (wide - 2 * BIAS)).mean(AXES)
    mean = wide.mean(AXES)
    return mean, around - (mean - BIAS) * (mean - 2 * BIAS)


FORMULAS = [of_squares, two_passes, library, in_steps, of_sums, about_another]


def normalised(y, formula=of_squares):
    mean, variance = formula(y)
    return ((y - mean) * lax.rsqrt(variance + 1e-5)).astype(y.dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("formula", FORMULAS)
def test_formulas(native_cpu, formula, dtype):
    def block(x):
        return jax.nn.relu(normalised(conv(x) + BIAS.astype(dtype), formula)), formula(conv(x))

    x = X.astype(dtype)
    check(block, x, gives=["bias statistics", "statistics"])
    program = str(jax.make_jaxpr(jaxconv.fuse(block))(x))
    assert "reduce_sum" not in program


@pytest.mark.parametrize("formula", [of_squares, two_passes, in_steps])
def test_no_formula_cancels(native_cpu, formula):
    """With a mean of 3000 deviations, E[y y] - E[y] E[y] has no correct digit in float32."""
    y, mean, variance = jax.jit(jaxconv.fuse(lambda x: ((y := conv(x) + 3e4), *formula(y))))(X)
    assert_statistics((y, mean, variance))


def test_a_network(native_cpu):
    """Every batch norm of a training step whose gradient is inside ``fuse``."""
    network = networks.NETWORKS["mobilenet_v2"]
    x = jax.ShapeDtypeStruct(programs.input_shape(network, batch=2, size=64), jnp.bfloat16)
    state = jax.eval_shape(lambda: programs.initial_state(network, x))
    examples = jax.eval_shape(lambda: programs.random_examples(network, x.shape, x.dtype))
    with jaxconv.override(algorithm="native"):
        given = epilogues(programs.training_step(network), state, examples)
    assert given == ["statistics"] * 52


LEFT = {
    "the mean alone": lambda y: y - y.mean(AXES),
    "layer norm": lambda y: normalised(y, lambda y: (y.mean(-1)[..., None], y.var(-1)[..., None])),
    "group norm": lambda y: y * lax.rsqrt((y * y).mean((1, 2), keepdims=True)),
    "all": lambda y: y * lax.rsqrt((y * y).mean()),
    "cubes": lambda y: y * (y**3).mean(AXES),
    "of another": lambda y: y * (y * jnp.cos(y)).mean(AXES),
    "weighted": lambda y: y * (y * y * jnp.arange(5.0)[:, None]).mean(AXES),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left(native_cpu, name):
    check(lambda x: LEFT[name](conv(x)), X, gives=[])


def test_a_tracked_value_is_used_otherwise(native_cpu):
    """Squares, deviations and the average of squares have other uses, which remain."""

    def block(x):
        y = conv(x)
        squares, mean = y * y, y.mean(AXES)
        average = squares.mean(AXES)
        variance = average - mean * mean
        return squares, average, (y - mean) * lax.rsqrt(variance + 1e-5), y

    check(block, X, gives=["statistics"])


@pytest.mark.parametrize("formula", [of_squares, two_passes])
def test_a_gradient_outside_and_inside(native_cpu, formula):
    def loss(x, w):
        return (jax.nn.relu(normalised(conv(x, w), formula)) * jnp.cos(jnp.arange(8.0))).sum()

    expected = jax.jit(jax.grad(loss, (0, 1)))(X, W)
    for f in (jax.grad(jaxconv.fuse(loss), (0, 1)), jaxconv.fuse(jax.grad(loss, (0, 1)))):
        assert "statistics=True" in str(jax.make_jaxpr(f)(X, W))
        for a, b in zip(jax.jit(f)(X, W), expected, strict=True):
            assert np.abs(a - b).max() <= 1e-4 * np.abs(b).max()


def test_split_arrays_and_scan(native_cpu):
    mesh = Mesh(np.array(jax.devices("cpu")[:2]), ("a",))
    w = draw(3, 3, 4, 4, seed=1)

    def layers(x, axis=None):
        def layer(x, _):
            y = conv(x, w)
            mean, square = y.mean(AXES), (y * y).mean(AXES)
            if axis:
                mean, square = lax.pmean((mean, square), axis)
            return jax.nn.relu((y - mean) * lax.rsqrt(square - mean**2 + 1e-5)), None

        return lax.scan(layer, x, None, length=2)[0]

    expected = jax.jit(layers)(X)
    split = functools.partial(jax.shard_map, mesh=mesh, in_specs=P("a"), out_specs=P("a"))
    placed = jax.device_put(X, NamedSharding(mesh, P("a")))
    for f, x in ((layers, placed), (split(functools.partial(layers, axis="a")), X)):
        assert epilogues(f, x) == ["statistics"]
        assert_close(jax.jit(jaxconv.fuse(f))(x), expected)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_split_batch_costs_one_sum_a_layer(native_cpu, kind):
    """As with lax: one sum for mean and squares together, and one for both in the gradient."""
    mesh = jax.make_mesh((4,), ("a",), (kind,), devices=jax.devices("cpu")[:4])
    weights = [draw(3, 3, 4, 4, seed=i) for i in range(4)]

    def loss(weights, x):
        for w in weights:
            x = jax.nn.relu(normalised(conv(x, w)))
        return (x * jnp.cos(jnp.arange(4.0))).sum()

    with jax.set_mesh(mesh):
        operands = (
            jax.device_put(weights, NamedSharding(mesh, P())),
            jax.device_put(X, NamedSharding(mesh, P("a"))),
        )
        for function, sums in ((loss, 5), (jax.value_and_grad(loss), 9)):
            assert "statistics=True" in str(jax.make_jaxpr(jaxconv.fuse(function))(*operands))
            plain, fused = (
                jax.jit(f).lower(*operands).compile() for f in (function, jaxconv.fuse(function))
            )
            assert collectives(plain) == collectives(fused) == {"all-reduce": sums}
            assert_close(fused(*operands), plain(*operands))
