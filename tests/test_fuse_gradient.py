"""What ``fuse`` makes of the sums of batch norm's backward pass.

A test counts the sums over activations, and the calls that form them: a program that stays as it is
would pass a comparison of numbers.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jaxprs import equations
from training_programs import (
    AXES,
    assert_close,
    batch_norm,
    conv,
    draw,
    fused_without,
    on_two_devices,
)

import jaxconv
from jaxconv._src.fuse import fuse_gradient

pytestmark = pytest.mark.usefixtures("for_a_gpu_on_the_cpu")

N, H, C = 4, 8, 16


X = draw(N, H, H, C)
PARAMETERS = {
    "w": 0.1 * draw(3, 3, C, C, seed=1),
    "v": 0.1 * draw(3, 3, C, C, seed=2),
    "gain": 1 + 0.1 * draw(C, seed=3, dtype=jnp.float32),
    "offset": draw(C, seed=4, dtype=jnp.float32),
}


def normalised(p, x):
    return batch_norm(conv(x, p["w"]), p["gain"], p["offset"])


def one_branch(p, x, activation=jax.nn.relu):
    return conv(activation(normalised(p, x)), p["v"])


def residual(p, x, activation=jax.nn.relu):
    return conv(activation(normalised(p, x) + x), p["v"])


def clamped(p, x):
    return one_branch(
        p, x, lambda u: lax.clamp(jnp.zeros((), u.dtype), u, jnp.full((), 6, u.dtype))
    )


def two_norms(p, x):
    shortcut = batch_norm(conv(x, p["v"]), p["offset"], p["gain"])
    return conv(jax.nn.relu(normalised(p, x) + shortcut), p["w"])


def pooled(p, x, window=(1, 3, 3, 1)):
    z = jax.nn.relu(normalised(p, x))
    return lax.reduce_window(z, -jnp.inf, lax.max, window, (1, 2, 2, 1), "SAME")


def pooled_by_xla(p, x):
    """Its window has more elements than the kernels take."""
    return pooled(p, x, (1, 8, 7, 1))


def loss(forward, p, x):
    return (forward(p, x).astype(jnp.float32) ** 2).mean()


def gradient(forward):
    return jax.grad(functools.partial(loss, forward), argnums=(0, 1))


def counts(function, *args) -> tuple[int, int, int]:
    """How many sums over activations a program has, barriers of them, and calls of sums."""
    found = list(equations(jax.make_jaxpr(function)(*args)))
    summed = [e.invars[0].aval for e in found if e.primitive.name == "reduce_sum"]
    barriers = [e.invars[0].aval for e in found if e.primitive.name == "optimization_barrier"]
    return (
        sum(a.ndim > 2 and a.size > H * H * C for a in summed),
        sum(jnp.issubdtype(a.dtype, jnp.floating) for a in barriers),  # not of pooling's places
        sum(e.primitive.name == "jaxconv_masked_sums" for e in found),
    )


@pytest.fixture
def sums_as_they_are(monkeypatch):
    """A function that is fused but for the sums of the backward pass."""
    return fused_without(monkeypatch, fuse_gradient)


@pytest.fixture(params=["by a call", "by XLA"])
def by_call(request, monkeypatch) -> bool:
    """Whether calls of ``masked_sums`` form the sums, or operations that XLA fuses."""
    from jaxconv._src.fuse import fuse_masked_sums

    if request.param == "by XLA":
        monkeypatch.setattr(fuse_masked_sums, "find", lambda *arguments: None)
        monkeypatch.setattr(fuse_masked_sums, "of_pooled", lambda *arguments: None)
    return request.param == "by a call"


@pytest.mark.parametrize(
    "forward, barriers, norms, called",
    [
        (one_branch, 1, 1, True),
        (clamped, 1, 1, True),
        (residual, 1, 1, True),
        (two_norms, 1, 2, True),
        (pooled, 0, 1, True),
        (pooled_by_xla, 0, 1, False),
    ],
)
def test_two_sums_give_three(forward, barriers, norms, called, by_call, sums_as_they_are):
    """And the gradients are those of three, of the same masks. One call serves two norms."""
    step = gradient(forward)
    before, *none = counts(sums_as_they_are(step), PARAMETERS, X)
    by_xla = before - norms, barriers, 0
    expected = (before - 3 * norms, 0, 1) if by_call and called else by_xla
    assert counts(jaxconv.fuse(step), PARAMETERS, X) == expected and none == [0, 0]
    actual = jax.jit(jaxconv.fuse(step))(PARAMETERS, X)
    assert_close(actual, jax.jit(sums_as_they_are(step))(PARAMETERS, X), 0.01)


@pytest.mark.parametrize("by_call", ["by XLA"], indirect=True)
def test_the_mask_of_a_residual_addition_is_of_the_stored_result(by_call):
    """No comparison of the sum of two arrays is left."""
    found = list(equations(jax.make_jaxpr(jaxconv.fuse(gradient(residual)))(PARAMETERS, X)))
    made = {v: e.primitive.name for e in found for v in e.outvars}
    compared = [e.invars[0] for e in found if e.primitive.name == "gt" and e.invars[0].aval.ndim]
    assert [made[v] for v in compared] == ["optimization_barrier"]


LEFT = {
    "float32": (one_branch, jnp.float32),
    "silu": (functools.partial(one_branch, activation=jax.nn.silu), jnp.bfloat16),
    "a clip by minimum and maximum": (
        functools.partial(residual, activation=lambda x: jnp.clip(x, 0, 6)),
        jnp.bfloat16,
    ),
    "what reads it is neither a convolution nor pooling": (
        lambda p, x: jax.nn.relu(normalised(p, x)).transpose(3, 1, 2, 0),
        jnp.bfloat16,
    ),
    "no batch norm": (lambda p, x: conv(jax.nn.relu(conv(x, p["w"])), p["v"]), jnp.bfloat16),
}


@pytest.mark.parametrize("name", LEFT)
def test_other_sums_stay(name, sums_as_they_are):
    forward, dtype = LEFT[name]
    step, x = gradient(forward), X.astype(dtype)
    before = counts(sums_as_they_are(step), PARAMETERS, x)
    assert counts(jaxconv.fuse(step), PARAMETERS, x) == before
    assert before[1:] == (0, 0)


# Programs of which XLA forms the sums: a call would have to wait for its operands to be stored.
NO_CALL = {
    "channels are no multiple of 8": lambda w: (w[..., :12, :12], X[..., :12]),
    "the gradient is an elementwise operation's": lambda w: (w, X),
}


@pytest.mark.parametrize("name", NO_CALL)
def test_sums_without_a_call(name):
    w, x = NO_CALL[name](PARAMETERS["w"])
    gain = jnp.ones(x.shape[-1], jnp.float32)

    def forward(w, x):
        z = jax.nn.relu(batch_norm(conv(x, w), gain, gain))
        return conv(z, w) if "channels" in name else (conv(z, w), z * x)

    def squares(w, x):
        return sum((y.astype(jnp.float32) ** 2).sum() for y in jax.tree.leaves(forward(w, x)))

    step = jax.grad(squares, argnums=(0, 1))
    sums, _, calls = counts(jaxconv.fuse(step), w, x)
    assert calls == 0
    assert sums < counts(step, w, x)[0] if "channels" in name else True


def hand_written(shortcut, x, w, dz, gain, mean):
    """Every form of a sum's factors, of integers: any order of additions gives the same bits."""
    y = conv(x, w)
    operand = y * gain.astype(y.dtype) - mean.astype(y.dtype)
    if shortcut:
        operand = operand + x
    z = jax.nn.relu(operand)
    centred = y.astype(jnp.float32) - mean
    d = jnp.where(operand > 0, dz, 0).astype(jnp.float32)
    sums = [
        d.sum(AXES),
        (-d).sum(AXES),
        (gain * (d * 2)).sum(AXES),
        (d / gain).sum(AXES),
        (d * centred).sum(AXES),
        (centred * gain * -d).sum(AXES),
        ((centred / gain) * d).sum(AXES),
        d.sum(AXES),
    ]
    return conv(z, w), sums, (d * gain).astype(y.dtype)


@pytest.mark.parametrize("nan", [False, True])
@pytest.mark.parametrize("shortcut", [False, True])
def test_sums_of_integers_are_exact(shortcut, nan, by_call):
    rng = np.random.default_rng(0)

    def integers(*shape, dtype=jnp.bfloat16):
        return jnp.asarray(rng.integers(-2, 3, shape), dtype)

    x, w, dz = integers(N, H, H, C), integers(1, 1, C, C), integers(N, H, H, C)
    if nan:
        x = x.at[1, 2, 3, 4].set(np.nan)
    gain = jnp.asarray(rng.choice([-2.0, 0.5, 1.0, 4.0], C), jnp.float32)
    arguments = x, w, dz, gain, integers(C, dtype=jnp.float32)
    function = functools.partial(hand_written, shortcut)
    fused = jaxconv.fuse(function)
    assert counts(function, *arguments) == (8, 0, 0)
    assert counts(fused, *arguments) == ((0, 0, 1) if by_call else (2, 1, 0))
    actual, expected = jax.jit(fused)(*arguments), jax.jit(function)(*arguments)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(e, np.float32))
    assert bool(jnp.isnan(actual[1][4]).any()) == nan


def test_sums_for_a_cpu_stay(monkeypatch, sums_as_they_are):
    monkeypatch.delenv("JAXCONV_TARGET")
    step = gradient(one_branch)
    before = counts(sums_as_they_are(step), PARAMETERS, X)
    assert counts(jaxconv.fuse(step), PARAMETERS, X) == before


def test_transformations_of_the_rewritten_program(by_call):
    """Derivatives of the gradient, vmap, and a gradient inside of remat and of scan."""
    step = gradient(one_branch)

    def squares(step, p):
        return sum((g.astype(jnp.float32) ** 2).sum() for g in jax.tree.leaves(step(p, X)))

    actual, expected = (
        jax.jit(jax.grad(functools.partial(squares, f)))(PARAMETERS)
        for f in (jaxconv.fuse(step), step)
    )
    assert_close(actual, expected, 0.1)
    xs = jnp.stack([X, 2 * X])
    actual = jax.jit(jax.vmap(jaxconv.fuse(step), in_axes=(None, 0)))(PARAMETERS, xs)
    assert_close(actual, jax.jit(jax.vmap(step, in_axes=(None, 0)))(PARAMETERS, xs), 0.06)
    rematerialised = gradient(jax.checkpoint(lambda p, x: one_branch(p, x)))  # traced afresh
    sums, *made = counts(jaxconv.fuse(rematerialised), PARAMETERS, X)
    assert sums < counts(rematerialised, PARAMETERS, X)[0] and made[by_call] > 0
    actual = jax.jit(jaxconv.fuse(rematerialised))(PARAMETERS, X)
    assert_close(actual, jax.jit(rematerialised)(PARAMETERS, X), 0.06)


def test_under_shard_map(sums_as_they_are):
    """Each device's own batch norm; the sums vary over the devices as the program's do."""
    distributed = functools.partial(on_two_devices, gradient(one_branch))
    before = counts(distributed(sums_as_they_are), PARAMETERS, X)
    assert counts(distributed(jaxconv.fuse), PARAMETERS, X) == (before[0] - 3, 0, 1)
    actual, expected = (
        jax.jit(distributed(f))(PARAMETERS, X) for f in (jaxconv.fuse, sums_as_they_are)
    )
    assert_close(actual, expected, 0.01)


@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_flax(library, sums_as_they_are):
    """Two batch norms, one in front of a residual addition."""
    flax = pytest.importorskip(f"flax.{library}")

    if library == "linen":

        class Layers(flax.Module):
            @flax.compact
            def __call__(self, x):
                y = x
                for shortcut in (0, x):
                    y = flax.Conv(C, (3, 3), use_bias=False, dtype=x.dtype)(y)
                    norm = flax.BatchNorm(use_running_average=False, dtype=x.dtype)
                    y = flax.relu(norm(y) + shortcut)
                return flax.Conv(C, (3, 3), dtype=x.dtype)(y)

        module = Layers()
        variables = module.init(jax.random.key(0), X)

        def forward(p, x):
            return module.apply({**variables, "params": p}, x, mutable=["batch_stats"])[0]

        parameters = variables["params"]
    else:
        options = dict(use_bias=False, dtype=X.dtype, rngs=flax.Rngs(0))
        convs = [flax.Conv(C, C, (3, 3), **options) for _ in range(3)]
        norms = [flax.BatchNorm(C, dtype=X.dtype, rngs=flax.Rngs(0)) for _ in range(2)]
        structure, parameters, rest = flax.split((convs, norms), flax.Param, ...)

        def forward(p, x):
            convs, norms = flax.merge(structure, p, jax.tree.map(jnp.array, rest))
            y = flax.relu(norms[0](convs[0](x)))
            return convs[2](flax.relu(norms[1](convs[1](y)) + x))

    step = jax.grad(functools.partial(loss, forward))
    before, *_ = counts(sums_as_they_are(step), parameters, X)
    assert counts(jaxconv.fuse(step), parameters, X) == (before - 6, 0, 2)
    actual = jax.jit(jaxconv.fuse(step))(parameters, X)
    assert_close(actual, jax.jit(sums_as_they_are(step))(parameters, X), 0.02)
