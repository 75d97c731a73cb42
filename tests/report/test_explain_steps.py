"""``explain`` of training steps as users write them: jitted, static, stateful, with libraries."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxconv

X = np.ones((2, 8, 8, 4), np.float32)
W = np.ones((3, 3, 4, 4), np.float32)
STEP = ["dgrad", "fprop", "fprop", "wgrad", "wgrad"]  # the operations of two layers


@pytest.fixture(autouse=True)
def on_cpu(native_cpu):
    with jax.default_device(jax.devices("cpu")[0]), jaxconv.override():
        yield


def ops(explanation) -> list[str]:
    assert all(c.instance for c in explanation), str(explanation)
    return sorted(c.op for c in explanation for _ in range(c.count))


def nnx_step():
    """A step that changes model and optimizer in place; returns it with its arguments."""
    nnx = pytest.importorskip("flax.nnx")
    optax = pytest.importorskip("optax")

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Conv(4, 4, (3, 3), rngs=rngs)
            self.norm = nnx.BatchNorm(4, rngs=rngs)
            self.second = nnx.Conv(4, 4, (3, 3), rngs=rngs)

        def __call__(self, x):
            x = nnx.relu(self.norm(self.first(x)))
            return self.second(x)

    def step(model, optimizer, x):
        gradients = nnx.grad(lambda model: jnp.sum(model(x) ** 2))(model)
        optimizer.update(model, gradients)

    model = Net(nnx.Rngs(0))
    return nnx, step, model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)


# Ways to call a step that returns nothing, because its results are in the model.
CALLS = {
    "jitted": lambda nnx, step, m, o: (nnx.jit(step), m, o, X),
    "plain": lambda nnx, step, m, o: (step, m, o, X),
    "partial": lambda nnx, step, m, o: (functools.partial(nnx.jit(step), m, o), X),
    "cached_partial": lambda nnx, step, m, o: (nnx.cached_partial(nnx.jit(step), m, o), X),
    "inside another": lambda nnx, step, m, o: (lambda m, o, x: nnx.jit(step)(m, o, x), m, o, X),
    "captured": lambda nnx, step, m, o: (lambda x: nnx.jit(step)(m, o, x), X),
}


@pytest.mark.parametrize("how", CALLS)
def test_nnx_steps_have_their_backward_pass(how):
    nnx, step, model, optimizer = nnx_step()
    before = jax.tree.map(np.asarray, nnx.state(model))
    fun, *arguments = CALLS[how](nnx, step, model, optimizer)
    explanation = jaxconv.explain(fun, *arguments)
    assert ops(explanation) == STEP
    assert "5 of 5" in str(explanation) and "100%" in str(explanation)
    # Nothing has run, and no tracer is left in the model.
    jax.tree.map(np.testing.assert_array_equal, before, nnx.state(model))
    assert ops(jaxconv.explain(fun, *arguments)) == STEP, "a second time"


def test_nnx_steps_before_and_after_they_ran():
    nnx, step, model, optimizer = nnx_step()
    jitted = nnx.jit(step)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), X)
    assert ops(jaxconv.explain(jitted, model, optimizer, shapes)) == STEP
    jitted(model, optimizer, X)
    assert ops(jaxconv.explain(jitted, model, optimizer, X)) == STEP


def test_a_module_is_a_function():
    _, _, model, _ = nnx_step()
    assert ops(jaxconv.explain(model, X)) == ["fprop", "fprop"]


def test_layers_of_nnx_are_told_apart_by_the_lines_of_the_model():
    nnx, step, model, optimizer = nnx_step()
    found = jaxconv.explain(nnx.jit(step), model, optimizer, X)
    assert all("test_explain_steps.py" in c.source and "Net.__call__" in c.source for c in found)
    assert len({c.source for c in found}) == 2
    by_line = {c.source: sorted(o.op for o in found if o.source == c.source) for c in found}
    assert sorted(by_line.values()) == [["dgrad", "fprop", "wgrad"], ["fprop", "wgrad"]]


@pytest.mark.parametrize("where", ["argnums", "argnames", "method"])
def test_static_arguments_of_jitted_functions(where):
    def repeated(x, w, times):
        for _ in range(times):
            x = jaxconv.conv(x, w)
        return x

    class Net:
        @functools.partial(jax.jit, static_argnums=(0, 3))
        def apply(self, x, w, times):
            return repeated(x, w, times)

    if where == "argnums":
        explanation = jaxconv.explain(jax.jit(repeated, static_argnums=2), X, W, 3)
    elif where == "argnames":
        jitted = jax.jit(repeated, static_argnames="times")
        explanation = jaxconv.explain(jitted, X, W, times=3)
    else:
        explanation = jaxconv.explain(Net().apply, X, W, 3)
    assert ops(explanation) == ["fprop"] * 3


def test_other_arguments_of_plain_functions_are_constants():
    def strided(x, w, stride, mode, activation):
        return activation(jaxconv.conv(x, w, stride=stride, padding=mode))

    (c,) = jaxconv.explain(strided, X, W, 2, "VALID", jnp.tanh)
    assert c.result == "f32[2,3,3,4]"


def test_filter_jit():
    eqx = pytest.importorskip("equinox")
    keys = jax.random.split(jax.random.key(0))
    model = eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(4, 4, 3, key=keys[0]),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.Conv2d(4, 4, 3, key=keys[1]),
        ]
    )

    @eqx.filter_jit
    def step(model, x, times: int):
        def loss(model):
            return sum(jnp.mean(jax.vmap(model)(x) ** 2) for _ in range(times))

        value, gradients = eqx.filter_value_and_grad(loss)(model)
        return eqx.apply_updates(model, gradients), value

    explanation = jaxconv.explain(step, model, X.transpose(0, 3, 1, 2), 1)
    assert ops(explanation) == STEP
    assert {c.module for c in explanation} == {"eqx.nn.Sequential/eqx.nn.Conv"}
    assert ops(jaxconv.explain(step, model, X.transpose(0, 3, 1, 2), 2)) == sorted(STEP * 2)


def test_paths_of_linen_modules():
    linen = pytest.importorskip("flax.linen")

    class Block(linen.Module):
        @linen.compact
        def __call__(self, x):
            return jnp.tanh(linen.Conv(4, (3, 3), name="inner")(x))

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Conv(4, (1, 1))(Block()(x))

    net = Net()
    parameters = net.init(jax.random.key(0), X)

    @jax.jit
    def gradients(parameters):
        return jax.grad(lambda p: jnp.sum(net.apply(p, X) ** 2))(parameters)

    found = jaxconv.explain(gradients, parameters)
    paths = [c.module for c in found]
    assert sorted(set(paths)) == ["Net/Block_0/inner", "Net/Conv_0"]
    assert [c.op for c in found if c.module == "Net/Conv_0"] == ["fprop", "wgrad", "dgrad"]
    assert "Net/Block_0/inner test_explain_steps.py:" in str(found)


def test_named_scopes_without_the_constructs_around_them():
    """JAX does not record scopes around a loop's body or a jitted function."""

    def layer(x):
        with jax.named_scope("inner"):
            return jaxconv.conv(x, W)

    def program(x):
        with jax.named_scope("outer"):
            x = layer(x)
        return lax.scan(lambda y, _: (layer(y), None), x, length=2)[0]

    found = jaxconv.explain(jax.jit(jax.grad(lambda x: jnp.sum(program(x) ** 2))), X)
    assert {(c.op, c.module) for c in found} == {
        ("fprop", "outer/inner"),
        ("dgrad", "outer/inner"),
        ("fprop", "inner"),
        ("dgrad", "inner"),
    }
    assert jaxconv.explain(jaxconv.conv, X, W)[0].module == ""


def test_haiku_modules():
    hk = pytest.importorskip("haiku")
    net = hk.transform(lambda x: hk.Sequential([hk.Conv2D(4, 3), jnp.tanh, hk.Conv2D(4, 3)])(x))
    parameters = net.init(jax.random.key(0), X)
    found = jaxconv.explain(net.apply, parameters, None, X)
    assert [c.module.split("/")[-1] for c in found] == ["conv2_d", "conv2_d_1"]
    assert all("test_explain_steps.py" in c.source for c in found)


def test_objects_that_keep_their_state():
    class Trainer:
        def __init__(self):
            self.w = jnp.asarray(W)
            self.update = jax.jit(jax.grad(lambda w, x: jnp.sum(jaxconv.conv(x, w) ** 2)))

        def step(self, x):
            self.w = self.w - self.update(self.w, x)

    trainer = Trainer()
    assert ops(jaxconv.explain(trainer.step, X)) == ["fprop", "wgrad"]
    assert isinstance(trainer.w, jax.Array) and not isinstance(trainer.w, jax.core.Tracer)


def test_results_of_classes_that_are_no_pytrees():
    @dataclasses.dataclass
    class Output:
        logits: jax.Array

    explanation = jaxconv.explain(lambda x, w: Output(jaxconv.conv(x, w)), X, W)
    assert ops(explanation) == ["fprop"]


def test_what_nobody_uses_is_not_part_of_the_program():
    def half(x, w):
        jaxconv.conv(x, w, stride=2)
        return jaxconv.conv(x, w)

    (c,) = jaxconv.explain(half, X, W)
    assert c.result == "f32[2,8,8,4]"


@pytest.mark.parametrize("counts", [(1,), (1, 1, 1), (3, 3, 1), (1, 998, 1), (1, 10_000, 3)])
def test_shares_add_up(counts):
    def program(x, w):
        one = jax.jit(lambda x: jaxconv.conv(x, w))
        for _ in range(3):
            x = one(x)
        return x

    (c,) = jaxconv.explain(program, X, W)
    rows = tuple(
        dataclasses.replace(c, count=n, instance=c.instance if i else None, source=f"line {i}")
        for i, n in enumerate(counts)
    )
    text = jaxconv.Explanation(rows).text(wide=True)
    shares = [float(found) for found in re.findall(r" ([\d.]+)%.* line \d", text)]
    assert sum(shares) == pytest.approx(100) and len(shares) == len(counts)
    for share, n in zip(shares, counts, strict=True):
        assert share == pytest.approx(100 * n / sum(counts), abs=0.1)
    total = float(text.split("kernels, ")[1].split("%")[0])
    assert total == pytest.approx(sum(shares[1:]))


def test_what_is_no_function_is_refused():
    with pytest.raises(TypeError, match="fun: expected a function"):
        jaxconv.explain(X, W)
