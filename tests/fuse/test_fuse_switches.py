"""Switching ``fuse`` off for a layer, a call or a process; inputs that ``fuse`` refuses."""

from __future__ import annotations

import jax
import pytest
from fused_programs import calls
from gradient_programs import PARAMETERS, X, assert_close, layer, loss

import jaxconv

pytestmark = pytest.mark.usefixtures("on_the_cpu")


def test_a_layer_may_stay_out():
    def step(p, x):
        with jaxconv.override(fuse=False):
            x = layer(p, x)
            with jaxconv.override(fuse=True):
                x = layer(p, x)
        return layer(p, x)

    fused = jaxconv.fuse(step)
    assert calls(fused, PARAMETERS, X) == ["scale bias silu"] * 2
    assert "override(fuse=False)" in str(jaxconv.explain(fused, PARAMETERS, X))
    assert_close(jax.jit(fused)(PARAMETERS, X), jax.jit(step)(PARAMETERS, X))
    differentiated = jax.value_and_grad(lambda p, x: (step(p, x) ** 2).mean())
    assert calls(jaxconv.fuse(differentiated), PARAMETERS, X) == ["scale bias silu pre"] * 2


def test_a_jitted_layer_may_stay_out():
    jitted = jax.jit(layer)

    def step(p, x):
        with jaxconv.override(fuse=False):
            x = jitted(p, x)
        return jitted(p, x)

    assert calls(jaxconv.fuse(step), PARAMETERS, X) == ["scale bias silu"]

    @jaxconv.override(fuse=False)
    def decorated(p, x):
        return layer(p, x)

    assert calls(jaxconv.fuse(decorated), PARAMETERS, X) == []


def test_calls_may_stay_out():
    fused = jax.jit(jaxconv.fuse(layer))
    expected = fused(PARAMETERS, X)

    def count() -> int:
        return len(calls(fused, PARAMETERS, X))

    assert count() == 1
    with jaxconv.override(fuse=False):
        assert count() == 0
        with jaxconv.override(fuse=True):
            assert count() == 1
        assert_close(fused(PARAMETERS, X), expected)
    assert count() == 1


def test_the_algorithms_stay():
    """An override that only sets ``fuse`` does not change the algorithm."""
    assert jaxconv.installed() is None
    with jaxconv.override(fuse=False):
        assert jaxconv.installed() is None
        with jaxconv.override(algorithm="native"), jaxconv.override(fuse=True):
            assert jaxconv.installed()["fprop"] == "native"
    with jaxconv.override(True, fuse=False):
        assert jaxconv.installed()["fprop"] == "auto"
    with jaxconv.override(algorithm="native", fuse=False):
        assert jaxconv.installed()["fprop"] == "native"


def test_the_environment_switches_it_off(monkeypatch):
    fused = jaxconv.fuse(jax.grad(loss))
    monkeypatch.setenv("JAXCONV_FUSE", "0")
    assert not calls(fused, PARAMETERS, X)
    monkeypatch.setenv("JAXCONV_FUSE", "off")
    with pytest.raises(ValueError, match=r"JAXCONV_FUSE.*'0' or '1'.*'off'"):
        fused(PARAMETERS, X)


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((X,), {}, ["fun: expected a function", "f32[2,6,6,4]", "fuse(f)(x), not fuse(f(x))"]),
        (({"y": X},), {}, ["fun: expected a function", "dict"]),
        ((None,), {"fold": "yes"}, ["fold: expected True or False", "'yes'"]),
        ((layer,), {"fold": X}, ["fold: expected True or False", "f32[2,6,6,4]"]),
        ((layer,), {"gradients": None}, ["gradients: expected True or False", "None"]),
        (("layer",), {}, ["fun: expected a function", "'layer'"]),
    ],
)
def test_bad_input(arguments, options, words):
    with pytest.raises(TypeError) as raised:
        jaxconv.fuse(*arguments, **options)
    message = str(raised.value)
    assert all(word in message for word in words)
    assert len(message) < 200 and "\n" not in message


@pytest.mark.parametrize("value", ["no", X, 0])
def test_override_is_given_no_bool(value):
    with pytest.raises(TypeError, match="fuse: expected True or False") as raised:
        jaxconv.override(fuse=value)
    assert len(str(raised.value)) < 100


def test_a_traced_array_is_no_function():
    def step(x):
        with pytest.raises(
            TypeError, match=r"fun: expected a function, got an array, f32\[2,6,6,4"
        ):
            jaxconv.fuse(x)
        return x

    jax.jit(step)(X)
