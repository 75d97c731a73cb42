"""``jaxconv.fuse``: the patterns that it fuses or leaves; results stay the same.

A test counts the ``jaxconv_fused`` calls and names their epilogues, because an unfused program
would pass a comparison of numbers.
"""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_programs import C, H, K, N, W, X, assert_close, check, conv, draw, epilogues, reasons
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxprs import equations

import jaxconv
from jaxconv._src.fuse import fuse_convolution
from jaxconv._src.library import native

pytestmark = pytest.mark.usefixtures("on_the_cpu")


SCALE, BIAS = draw(K, seed=2), draw(K, seed=3)


# --- activations ----------------------------------------------------------------------------------


@jax.custom_jvp
def own_relu(x):
    return jnp.maximum(x, 0)


own_relu.defjvp(lambda p, t: (own_relu(*p), t[0] * (p[0] > 0)))

ACTIVATIONS = {
    "relu": [jax.nn.relu, lambda x: jnp.maximum(x, 0), lambda x: lax.max(0.0, x), own_relu],
    "relu6": [jax.nn.relu6, lambda x: jnp.clip(x, 0, 6), lambda x: lax.clamp(0.0, x, 6.0)],
    "leaky_relu:0x1.333334p-2": [
        functools.partial(jax.nn.leaky_relu, negative_slope=0.3),
        lambda x: jnp.where(x > 0, x, 0.3 * x),
        lambda x: jnp.maximum(x, 0.3 * x),
    ],
    "gelu": [
        functools.partial(jax.nn.gelu, approximate=False),
        lambda x: x * 0.5 * (1 + lax.erf(x / np.float32(2**0.5))),
        lambda x: 0.5 * (x * lax.erfc(-x * np.float32(0.5**0.5))),
    ],
    "gelu_tanh": [
        jax.nn.gelu,
        lambda x: 0.5 * x * (1 + jnp.tanh(0.7978845608 * x * (1 + 0.044715 * x * x))),
    ],
    "silu": [
        jax.nn.silu,
        jax.nn.swish,
        lambda x: jax.nn.sigmoid(x) * x,
        lambda x: x / (1 + jnp.exp(-x)),
    ],
    "sigmoid": [jax.nn.sigmoid, lambda x: 1 / (1 + jnp.exp(-x))],
    "tanh": [jnp.tanh, jax.nn.tanh],
    "hard_swish": [jax.nn.hard_swish, lambda x: x * jnp.clip(x + 3, 0, 6) / 6],
}


@pytest.mark.parametrize(
    ("words", "function"),
    [
        pytest.param(words, function, id=f"{words.partition(':')[0]}-{i}")
        for words, functions in ACTIVATIONS.items()
        for i, function in enumerate(functions)
    ],
)
def test_an_activation(words, function):
    check(lambda x: function(conv(x)), X, gives=[words])


@pytest.mark.parametrize("words", ACTIVATIONS)
def test_an_activation_in_16_bits(words, native_cpu):
    function = ACTIVATIONS[words][0]
    (given,) = epilogues(lambda x: function(conv(x) + BIAS.astype(x.dtype)), X.astype(jnp.bfloat16))
    assert given.split(":")[0] == f"bias {words.partition(':')[0]}"


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jnp.where(x > 0, x, 0),  # unlike relu, NaN becomes 0
        lambda x: jnp.minimum(x, 6),
        jax.nn.softplus,
        jax.nn.elu,
        lambda x: x * jax.nn.sigmoid(1.702 * x),
        lambda x: 0.5 * x * (1 + jnp.tanh(0.8 * (x + 0.05 * x**3))),
        lambda x: jnp.where(x > 1, x, 0.3 * x),
        lambda x: jnp.where(x > 0, x, -0.3 * x),
    ],
)
def test_what_is_no_activation_stays(function):
    check(lambda x: function(conv(x)), X, gives=[])


# --- scale, bias, residual ------------------------------------------------------------------------


def broadcast(vector):
    return lax.broadcast_in_dim(vector, (N, H, H, K), (3,))


CHAINS = {
    "bias": (lambda x: conv(x) + BIAS, ["bias"]),
    "broadcast": (lambda x: lax.add(conv(x), broadcast(BIAS)), ["bias"]),
    "scale": (lambda x: SCALE * conv(x), ["scale"]),
    "both": (lambda x: conv(x) * SCALE + BIAS, ["scale bias"]),
    "numbers": (lambda x: conv(x) * 0.5 - 1.0, ["scale bias"]),
    "scalar arrays": (lambda x: conv(x) * SCALE[0] + BIAS[0], ["scale bias"]),
    "norm": (lambda x: (conv(x) - BIAS) * lax.rsqrt(SCALE**2) * SCALE + BIAS, ["scale bias"]),
    "divided norm": (lambda x: (conv(x) - BIAS) / SCALE * 3.0 + BIAS, ["scale bias"]),
    "from a vector": (lambda x: BIAS - conv(x) * SCALE, ["scale bias"]),
    "negated": (lambda x: -(conv(x) + BIAS), ["scale bias"]),
    "negated twice": (lambda x: BIAS - (SCALE - conv(x)), ["bias"]),
    "nothing at all": (lambda x: jnp.negative(-conv(x)), []),
    "residual": (lambda x: conv(x) + x, ["residual"]),
    "residual first": (lambda x: jax.nn.relu(x + conv(x)), ["residual relu"]),
    "all": (lambda x: jax.nn.relu(conv(x) * SCALE + BIAS + x), ["scale bias residual relu"]),
    "of two, the later": (
        lambda x: jax.nn.relu(conv(x) * SCALE + (conv(x, -W) + BIAS)),
        ["scale", "bias residual relu"],
    ),
    "a chain of two": (lambda x: conv(conv(x) + BIAS) + x, ["bias", "residual"]),
    "channels first": (
        lambda x: jax.nn.relu(conv(x, numbers=("NCHW", "HWIO", "NCHW")) + BIAS[:, None, None]),
        None,
    ),
    "strided axis": (
        lambda x: conv(x, numbers=("NHWC", "HWIO", "CNHW")) * SCALE[:, None, None, None],
        ["scale"],
    ),
    "groups": (lambda x: conv(x, W[:, :, :1], feature_group_count=C) + BIAS, ["bias"]),
    "jaxconv": (lambda x: jax.nn.silu(jaxconv.conv(x, W) + BIAS), ["bias silu"]),
    "reshaped": (lambda x: jax.nn.relu(conv(x)[:, None] + BIAS)[:, 0] + x, ["bias relu"]),
}


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain(name):
    function, gives = CHAINS[name]
    if name == "channels first":
        x = draw(N, C, H, H)
        check(function, x, gives=["bias relu"])
    else:
        check(function, X, gives=gives)


ENDS = {
    "used twice": (lambda x: (y := conv(x)) + y, [], "its result has 2 uses (add)"),
    "returned too": (
        lambda x: (y := conv(x), jax.nn.elu(y)),
        [],
        "its result is returned and used",
    ),
    "scale after the residual": (
        lambda x: (conv(x) + x) * SCALE,
        ["residual"],
        "a scale follows the residual",
    ),
    "bias after the residual": (
        lambda x: (conv(x) + x) + BIAS,
        ["residual"],
        "another order would round differently",
    ),
    "two residuals": (lambda x: (conv(x) + x) + x, ["residual"], "a second residual follows"),
    "per image": (
        lambda x: conv(x) * x[:, :1, :1],
        [],
        "mul with an array that is no vector of channels follows",
    ),
    "another axis": (lambda x: conv(x) + draw(H, 1), [], "neither a vector of channels nor of"),
    "a division": (lambda x: conv(x) / SCALE, [], "would be rounded once more"),
    "narrowed": (
        lambda x: (conv(x) + BIAS).astype(jnp.bfloat16),
        ["bias"],
        "a conversion to bfloat16 follows",
    ),
    "a reduction": (lambda x: conv(x).sum(), [], ""),
    "transposed": (
        lambda x: lax.conv_transpose(x, W, (2, 2), "SAME") + BIAS,
        [],
        "",
    ),
    "an algorithm": (
        lambda x: jaxconv.conv(x, W, algorithm="winograd") + BIAS,
        [],
        "algorithm='winograd' was asked for",
    ),
    "integers": (
        lambda x: conv(x.astype(jnp.int8)).astype(jnp.int32) + 1,
        [],
        "no fused kernel for int8, int8, int8",
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_chain_ends_and_says_why(name, native_cpu):
    function, gives, reason = ENDS[name]
    check(function, X, gives=gives)
    assert reason in reasons(function, X)


def test_a_program_without_convolutions_stays():
    function = jaxconv.fuse(lambda x: jax.nn.relu(x * SCALE + BIAS))
    assert (function(X) == jax.nn.relu(X * SCALE + BIAS)).all()
    assert str(jaxconv.explain(function, X)) == "no convolutions"


# --- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_the_bits_are_those_of_the_call_by_hand(dtype, native_cpu):
    x, r = X.astype(dtype), draw(N, H, H, K, seed=5, dtype=dtype)

    def program(x):
        y = (conv(x).astype(jnp.float32) * SCALE + BIAS).astype(dtype)
        return jax.nn.relu(y + r)

    def by_hand(x):
        return jaxconv.conv(
            x, W.astype(dtype), scale=SCALE, bias=BIAS, residual=r, activation="relu"
        )

    fused = jax.jit(jaxconv.fuse(program))(x)
    assert fused.dtype == dtype
    np.testing.assert_array_equal(fused, jax.jit(by_hand)(x))


def test_16_bits_are_rounded_less(native_cpu):
    """The fused chain has the smaller error against float64."""
    x, w = X.astype(jnp.bfloat16), W.astype(jnp.bfloat16)

    def program(x):
        y = (conv(x, w).astype(jnp.float32) - BIAS) * SCALE + BIAS
        return jax.nn.silu(y.astype(jnp.bfloat16) + x)

    acc = conv(x.astype(jnp.float32), w.astype(jnp.float32))
    exact = np.asarray((acc - BIAS) * SCALE + BIAS + x.astype(jnp.float32), np.float64)
    exact = exact / (1 + np.exp(-exact))

    def error(y):
        return np.sqrt(np.mean((np.asarray(y, np.float64) - exact) ** 2))

    assert epilogues(program, x) == ["scale bias residual silu"]
    assert error(jaxconv.fuse(program)(x)) < 0.8 * error(program(x))


def test_an_end_in_float32_is_not_fused(native_cpu):
    """XLA computes the float32 steps from the 16-bit result, in the operations that use them."""

    def program(x):
        y = conv(x).astype(jnp.float32) * SCALE + BIAS
        return y, y * y.mean()

    check(program, X.astype(jnp.bfloat16), gives=[])
    assert "it goes on in float32" in reasons(program, X.astype(jnp.bfloat16))


def test_a_conversion_to_float32_is_not_fused_alone(native_cpu):
    """The call would write twice as much as the conversion reads."""
    check(lambda x: conv(x).astype(jnp.float32), X.astype(jnp.bfloat16), gives=[])
    program = jaxconv.fuse(lambda x: (conv(x) + BIAS.astype(x.dtype)).astype(jnp.float32))
    eqns = list(equations(jax.make_jaxpr(program)(X.astype(jnp.bfloat16))))
    (call,) = [e for e in eqns if e.primitive.name == "jaxconv_fused"]
    assert call.outvars[0].aval.dtype == jnp.bfloat16


# --- programs -------------------------------------------------------------------------------------


def block(x, w=W):
    return jax.nn.relu(conv(x, w) * SCALE + BIAS + x)


def small(x, w=W):
    return 0.1 * block(x, w)


BLOCK = "scale bias residual relu"
MESH = jax.make_mesh((2,), ("n",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:2])


@jax.custom_vjp
def own_derivative(x):
    return block(x)


own_derivative.defvjp(lambda x: (block(x), x), lambda x, g: (g * x,))

PROGRAMS = {
    "jit": (jax.jit(block), [BLOCK]),
    "inner jit": (lambda x: jnp.sin(jax.jit(block)(x)), [BLOCK]),
    "jitted parts": (
        lambda x: jax.jit(jax.nn.relu)(jax.jit(jnp.add)(conv(x), BIAS)),
        ["bias relu"],
    ),
    "scan": (
        lambda x: lax.scan(lambda x, w: (small(x, w), None), x, jnp.stack([W, -W]))[0],
        [BLOCK],
    ),
    "while": (lambda x: lax.fori_loop(0, x.shape[0], lambda _, x: small(x), x), [BLOCK]),
    "while loop": (
        lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, small(c[1])), (0, x))[1],
        [BLOCK],
    ),
    "cond": (
        lambda x: lax.cond(x.sum() > 0, block, lambda x: conv(x) + BIAS, x),
        ["bias", BLOCK],
    ),
    "remat": (jax.checkpoint(block), [BLOCK]),
    "custom_vjp": (own_derivative, [BLOCK]),
    "vmap": (jax.vmap(lambda x: block(x[None])[0]), [BLOCK]),
    "shard_map": (
        jax.shard_map(block, mesh=MESH, in_specs=P("n"), out_specs=P("n")),
        [BLOCK],
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_seen_through(name):
    function, gives = PROGRAMS[name]
    check(function, X, gives=gives)


def test_under_install_and_alone(native_cpu):
    def two(x):
        return conv(block(x))  # nothing follows the second

    alone = jaxconv.explain(jaxconv.fuse(two), X)
    with jaxconv.install():
        installed = jaxconv.explain(jaxconv.fuse(two), X)
        check(two, X, gives=[BLOCK])
    assert [c.instance is not None for c in alone] == [True, False]
    assert [c.instance is not None for c in installed] == [True, True]
    assert "fprop_" in alone[0].instance


@pytest.mark.optimized
def test_one_custom_call_and_no_operation_on_the_result(native_cpu):
    fused = jaxconv.fuse(block)
    compiled = jax.jit(fused).lower(X).compile().as_text()
    if jaxconv.explain(fused, X)[0].apart:  # a plain kernel, and a fusion of XLA
        assert compiled.count('custom_call_target="jaxconv_fprop"') == 1
        return
    assert compiled.count('custom_call_target="jaxconv_fused"') == 1
    for line in compiled.splitlines():
        made = line.partition(" = ")[2]
        if made.startswith(f"f32[{N},{H},{H},{K}]"):
            assert re.search(r" (parameter|get-tuple-element|bitcast)\(", made), line


def test_pytrees_constants_and_decoration():
    @jaxconv.fuse
    def function(arrays, *, train, name="x"):
        y = conv(arrays[name]) + arrays["b"]
        return {"y": y if train else jax.nn.relu(y), "name": name, "train": train}

    given = function({"x": X, "b": BIAS}, train=False)
    assert given["name"] == "x" and given["train"] is False
    assert_close(given["y"], jax.nn.relu(conv(X) + BIAS))
    assert function.__name__ == "function"
    assert epilogues(lambda x: function({"x": x, "b": BIAS}, train=False)["y"], X) == ["bias relu"]
    folding = jaxconv.fuse(fold=True)
    assert_close(folding(block)(X), block(X))


def test_a_jitted_function_is_compiled_once():
    traced = []

    @jax.jit
    def function(x):
        traced.append(x)
        return block(x)

    fused = jaxconv.fuse(function)
    fused(X)
    with jax.log_compiles(False):
        before = function._cache_size() if hasattr(function, "_cache_size") else 0
        fused(X + 1)
    assert len(traced) == 1
    assert before == (function._cache_size() if hasattr(function, "_cache_size") else 0)


def test_effects_and_unused_results_stay(capfd):
    def function(x):
        y = block(x)
        jax.debug.print("seen {}", y.shape[0])
        return y

    check(function, X, gives=[BLOCK])
    jax.effects_barrier()
    assert capfd.readouterr().out.count("seen") >= 2


@pytest.mark.parametrize("wrong", [3, None, "name"])
def test_no_function(wrong):
    if wrong is None:
        assert callable(jaxconv.fuse(wrong))
    else:
        with pytest.raises(TypeError, match="fun: expected a function"):
            jaxconv.fuse(wrong)


# --- constants ------------------------------------------------------------------------------------


def test_fold_multiplies_constant_filters():
    def function(x):
        return jax.nn.relu((conv(x) - BIAS) * SCALE + 1.0)

    folded = jax.make_jaxpr(jaxconv.fuse(function, fold=True))(X)
    (call,) = [e for e in folded.eqns if e.primitive.name == "jaxconv_fused"]
    assert call.params["epilogue"].words == ["bias", "relu"]
    assert_close(jaxconv.fuse(function, fold=True)(X), function(X))
    assert_close(jax.jit(jaxconv.fuse(function, fold=True))(X), function(X))
    # A filter that is an argument is not folded into.
    of_arguments = jaxconv.fuse(lambda x, w: conv(x, w) * SCALE, fold=True)
    (call,) = [
        e for e in jax.make_jaxpr(of_arguments)(X, W).eqns if e.primitive.name == "jaxconv_fused"
    ]
    assert call.params["epilogue"].words == ["scale"]


def test_a_target_decides_before_the_device_here(monkeypatch):
    """A program exported for a GPU is fused for it, whatever device is present."""
    monkeypatch.delenv("JAXCONV_TARGET", raising=False)
    with jax.default_device(jax.devices("cpu")[0]):
        assert fuse_convolution.platforms() == ("cpu",)
        monkeypatch.setenv("JAXCONV_TARGET", "sm_90a")
        assert fuse_convolution.platforms() == ("cuda", "cpu")


def test_a_slower_epilogue_pays_where_it_saves_a_pass(monkeypatch):
    """XLA fuses an epilogue into operations that read its result: a call saves no pass there."""
    predicted = {True: (5.0, 12.0), False: (4.0, 8.0)}  # a kernel and XLA, with an epilogue or none

    def selection(with_epilogue: bool) -> native.Selection:
        ours, xla = predicted[with_epilogue]
        return native.Selection("kernel", microseconds=ours, xla_microseconds=xla)

    monkeypatch.setattr(fuse_convolution.Bilinear, "select", lambda *a: (selection(False), None))
    monkeypatch.setattr(fuse_convolution.Fused, "select", lambda *a: (selection(True), None))
    x = X.astype(jnp.bfloat16)

    def biased(x):
        return conv(x) + BIAS.astype(x.dtype)

    assert epilogues(biased, x) == ["bias"]
    assert epilogues(lambda x: conv(jax.nn.relu(biased(x))), x) == ["bias relu"]
    normalised = functools.partial(jax.nn.standardize, axis=-1)
    assert epilogues(lambda x: normalised(biased(x)), x) == []
    assert epilogues(lambda x: biased(x).sum((1, 2)), x) == []
    assert epilogues(lambda x: conv(y := biased(x)) + normalised(y), x)[0] == "bias"
    # The residual of the second call is the first call's result, which is stored anyway.
    assert epilogues(lambda x: biased(x) + biased(2 * x), x) == ["bias", "bias residual"]
    predicted[True] = 4.0, 12.0  # the epilogue costs the kernel nothing
    assert epilogues(lambda x: normalised(biased(x)), x) == ["bias"]


@pytest.mark.parametrize(
    ("residual", "saves"),
    [
        (lambda z: (z, 0.0), True),  # an argument
        (lambda z: (jnp.exp(z), 0.0), False),  # XLA would store it only for the call
        (lambda z: (jnp.exp(z).astype(np.float32), 0.0), False),
        (lambda z: ((e := jnp.exp(z)), conv(e).sum()), True),  # a convolution reads it too
        (lambda z: (conv(z) + BIAS.astype(z.dtype), 0.0), True),  # another call's result
        (lambda z: (jnp.flip(z, 1), 0.0), True),  # not the result of an elementwise operation
    ],
)
def test_a_residual_that_is_computed_for_the_call_saves_no_pass(monkeypatch, residual, saves):
    absorbed: list[bool] = []

    def slower(spec, operands, form, out_dtype, saves_nothing):
        if form.residual:
            absorbed.append(saves_nothing)
        return ""

    monkeypatch.setattr(fuse_convolution, "slower", slower)

    def block(x, z):
        added, other = residual(z)
        y = conv(x)
        total = y.astype(added.dtype) + added
        return total.astype(x.dtype), other

    jax.make_jaxpr(jaxconv.fuse(block))(X.astype(jnp.bfloat16), X.astype(jnp.bfloat16))
    assert absorbed == [not saves]
