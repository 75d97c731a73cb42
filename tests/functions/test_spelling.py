"""Arguments as beginners write them work, or the error names the right ones."""

from __future__ import annotations

import functools
import inspect
import pathlib
import pickle
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxconv
from jaxconv import int8
from jaxconv._src.problem import epilogue
from jaxconv.bench import __main__ as bench

X = np.random.default_rng(0).standard_normal((2, 6, 5, 4)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((3, 3, 4, 8)).astype(np.float32)
X8, W8 = X.astype(np.int8), W.astype(np.int8)

PUBLIC = (
    jaxconv.conv,
    jaxconv.conv_general_dilated,
    jaxconv.conv_transpose,
    int8.conv,
    int8.fake_quant_conv,
    int8.pack_filter,
    int8.quantize_conv,
)


# --- names of arguments ---


@pytest.mark.parametrize("function", PUBLIC, ids=lambda f: f.__qualname__)
def test_a_decorated_function_is_itself(function):
    parameters = inspect.signature(function).parameters
    assert not any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    assert pickle.loads(pickle.dumps(function)) is function
    with pytest.raises(TypeError, match=rf"{function.__name__}: no argument 'colour'.* among .*"):
        function(X, colour=1)


@pytest.mark.parametrize("function", PUBLIC, ids=lambda f: f.__qualname__)
def test_names_that_are_meant_exist(function):
    """Names that an error suggests are arguments or functions of this library."""
    known = inspect.getclosurevars(function).nonlocals
    others = inspect.getclosurevars(known["meant"]).nonlocals["others"]
    own = inspect.signature(function).parameters
    for name, other in others.items():
        assert name not in own or other == name, name
        assert other in own or " " in other, other


# --- activations ---


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("ReLU", "relu"),
        ("RELU6", "relu6"),
        ("swish", "silu"),
        ("SiLU", "silu"),
        ("hard-swish", "hard_swish"),
        ("HardSwish", "hard_swish"),
        ("GELU", "gelu"),
        ("gelu_tanh", "gelu_tanh"),
        ("linear", None),
        (("LeakyReLU", 0.1), ("leaky_relu", 0.1)),
        (jax.nn.relu, "relu"),
        (jax.nn.relu6, "relu6"),
        (jax.nn.swish, "silu"),
        (jax.nn.sigmoid, "sigmoid"),
        (jnp.tanh, "tanh"),
        (jax.nn.hard_swish, "hard_swish"),
        (jax.nn.gelu, "gelu_tanh"),
        (functools.partial(jax.nn.gelu, approximate=False), "gelu"),
        (functools.partial(jax.nn.gelu, approximate=True), "gelu_tanh"),
        (jax.nn.leaky_relu, ("leaky_relu", 0.01)),
        (functools.partial(jax.nn.leaky_relu, negative_slope=0.3), ("leaky_relu", 0.3)),
        (jax.nn.identity, None),
    ],
)
def test_an_activation_in_other_words(given, name):
    assert epilogue.parse_activation(given) == epilogue.parse_activation(name)
    if not isinstance(given, str | tuple):  # a function: its values, also at corners
        t = np.array([-4, -3, -1e-3, 0, 2, 3, 5, 6, 7], np.float32)
        expected, derivative = jax.vjp(given, t)
        form = epilogue.Epilogue(False, False, False, *epilogue.parse_activation(given))
        actual, ours = jax.vjp(lambda t: form.activated(t, np.float32), t)
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
        differs = np.abs(ours(np.ones_like(t))[0] - derivative(np.ones_like(t))[0]) > 1e-5
        corners = np.isin(t, {"hard_swish": [-3, 3]}.get(name, []))
        assert not np.any(differs & ~corners)


# --- formats ---


@pytest.mark.parametrize("named", ["NHWC", "nhwc", "channels_last", "Channels_Last", None])
def test_one_set_of_formats(named):
    y = jaxconv.conv(X, W, data_format=named)
    np.testing.assert_array_equal(y, jaxconv.conv(X, W))
    sums = functools.partial(int8.conv, out_dtype=jnp.int32)
    np.testing.assert_array_equal(sums(X8, W8, data_format=named), sums(X8, W8))
    assert int8.pack_filter(W8, data_format=named or "channels_last").layout == "NHWC"


@pytest.mark.parametrize("spatial", [1, 2, 3])
def test_formats_by_rank(spatial):
    last, first = ("NWC", "NHWC", "NDHWC")[spatial - 1], ("NCW", "NCHW", "NCDHW")[spatial - 1]
    x = np.ones((1, *[4] * spatial, 32), np.int8)
    w = np.ones((*[3] * spatial, 32, 32), np.int8)
    y = int8.conv(x, w, 0.01, data_format=last)
    np.testing.assert_array_equal(y, int8.conv(x, w, 0.01))
    moved = int8.conv(np.moveaxis(x, -1, 1), w, 0.01, data_format=first.lower())
    np.testing.assert_array_equal(np.moveaxis(moved, 1, -1), y)
    for other in {"NWC", "NHWC", "NDHWC", "NCHW32"} - {last, *["NCHW32"] * (spatial == 2)}:
        with pytest.raises(ValueError, match="data_format: "):
            int8.conv(x, w, 0.01, data_format=other)


@pytest.mark.parametrize(
    "call",
    [
        lambda **k: int8.conv(X8, W8, 0.1, **k),
        lambda **k: int8.pack_filter(W8, **k).data,
        lambda **k: int8.quantize_conv(W, x_scale=0.1, **k).w.data,
    ],
)
def test_the_old_name_works_and_warns(call):
    with pytest.warns(DeprecationWarning, match="layout= is called data_format= now") as found:
        old = call(layout="NHWC")
    assert [w.filename for w in found] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(old, call(data_format="NHWC"))
    with pytest.raises(TypeError, match="layout: is 'data_format' now"):
        call(layout="NHWC", data_format="NHWC")


# --- int8 ---


def test_sums_are_int8_where_that_is_said():
    """``lax`` and functions that mirror it wrap sums to int8; ``int8.conv`` does on request."""
    with pytest.raises(ValueError, match="scale: int8 does not hold the sums"):
        int8.conv(X8, W8)
    wide = np.asarray(int8.conv(X8, W8, out_dtype=jnp.int32))
    np.testing.assert_array_equal(int8.conv(X8, W8, out_dtype=np.int8), wide.astype(np.int8))
    general = jaxconv.conv_general_dilated(
        X8, W8, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    assert general.dtype == np.int8 and int8.conv(X8, W8, 0.1).dtype == np.int8
    np.testing.assert_array_equal(general, wide.astype(np.int8))


# --- padding ---


def test_causal_padding_of_quantised_signals():
    x, w = X8[:, 0], W8[0]
    sums = functools.partial(int8.conv, out_dtype=jnp.int32)
    causal = sums(x, w, padding="causal", dilation=2)
    np.testing.assert_array_equal(causal, sums(x, w, padding=[(4, 0)], dilation=2))
    packed = int8.conv(
        int8.pack(np.pad(X8, [(0, 0)] * 3 + [(0, 28)])),
        np.pad(W8, [(0, 0)] * 2 + [(0, 28), (0, 0)]),
        padding="CIRCULAR",
        out_dtype=jnp.int32,
    )
    wrapped = np.pad(X8, ((0, 0), (1, 1), (1, 1), (0, 0)), "wrap")
    np.testing.assert_array_equal(int8.unpack(packed), sums(wrapped, W8, padding="VALID"))


def test_causal_padding_is_flax_s():
    linen = pytest.importorskip("flax.linen")
    layer = linen.Conv(8, (3,), padding="CAUSAL", use_bias=False)
    variables = layer.init(jax.random.key(0), X[:, 0])
    y = jaxconv.conv(X[:, 0], variables["params"]["kernel"], padding="CAUSAL")
    np.testing.assert_allclose(y, layer.apply(variables, X[:, 0]), atol=1e-5)


def test_quantisation_aware_training_continues_its_input():
    f = functools.partial(int8.fake_quant_conv, x_scale=0.05, w_scale=0.05)
    causal = jax.grad(lambda x: f(x, W[0], padding="CAUSAL").sum())(X[:, 0])
    np.testing.assert_allclose(
        causal, jax.grad(lambda x: f(x, W[0], padding=[(2, 0)]).sum())(X[:, 0]), atol=1e-6
    )


# --- the bench's help ---


@pytest.mark.parametrize("command", [[], ["--network"]])
def test_help_fits_a_screen(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")

    def printed(option: str) -> str:
        with pytest.raises(SystemExit) as end:
            bench.main([*command, option])
        assert end.value.code == 0
        return capsys.readouterr().out

    short, everything = printed("--help"), printed("--help-all")
    lines = short.splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 80
    assert "examples:" in short and "--help-all" in short
    assert "--seed" in everything and "--seed" not in short
    assert all(line.split()[0] in everything for line in lines if line.startswith("  --"))
    assert "Exit" in everything and "Exit" not in short


def test_examples_of_the_help_are_accepted():
    from jaxconv.bench import command_layers, command_networks

    for module in command_layers, command_networks:
        for line in module._EXAMPLES.splitlines():
            if "jaxconv.bench" in line:
                _, _, rest = line.partition("jaxconv.bench ")
                of_networks = "--network" in rest
                make = command_networks._parser if of_networks else command_layers.make_parser
                parser = make()
                parser.parse_args(rest.split())


def test_no_call_in_the_repository_has_the_old_name():
    repository = pathlib.Path(__file__).parents[2]
    calls = ("int8.conv(", "pack_filter(", "quantize_conv(")
    for folder in ("docs", "examples", "jaxconv"):
        for path in sorted((repository / folder).rglob("*")):
            if path.suffix in (".py", ".md"):
                found = [line for line in path.read_text().splitlines() if " layout=" in line]
                assert not [line for line in found if any(call in line for call in calls)], path
