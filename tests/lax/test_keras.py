"""Keras with the JAX backend: the recipe in docs/fusing.md for fit, evaluate and predict."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import jaxconv
from jaxconv._src.call import record

STEPS = ("train_step", "test_step", "predict_step")
RNG = np.random.default_rng(0)
X = RNG.standard_normal((32, 8, 8, 3)).astype(np.float32)
LABELS = RNG.integers(0, 4, 32)


@pytest.fixture
def keras():
    with jax.default_device(jax.devices("cpu")[0]):
        try:
            import keras
        except ImportError as error:  # also raised if Keras has no JAX backend
            pytest.skip(f"keras cannot be imported: {error}")
        if keras.backend.backend() != "jax":
            pytest.skip(f"Keras's backend is {keras.backend.backend()}")
        yield keras


def compiled(keras, kind=None, **options):
    keras.utils.set_random_seed(0)
    layers = keras.layers
    image = keras.Input((8, 8, 3))
    x = layers.Conv2D(8, 3, padding="same", use_bias=False)(image)
    x = layers.ReLU()(layers.BatchNormalization()(x))
    x = layers.Add()([x, layers.Conv2D(8, 3, padding="same", activation="silu")(x)])
    x = layers.Dropout(0.1)(x)
    logits = layers.Dense(4)(layers.GlobalAveragePooling2D()(x))
    model = (kind or keras.Model)(image, logits)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"], **options)
    return model


def run(model):
    """The losses, the predictions, and the epilogues of forward convolutions, in order."""
    with record.recording() as convolutions:
        history = model.fit(
            X,
            LABELS,
            batch_size=16,
            epochs=2,
            shuffle=False,
            validation_data=(X, LABELS),
            verbose=0,
        )
        predictions = model.predict(X, verbose=0)
    calls = [c.epilogue for c in convolutions if c.op == "fprop"]
    return history.history, predictions, calls


def assert_same(actual, expected) -> None:
    for name, values in expected[0].items():
        np.testing.assert_allclose(actual[0][name], values, rtol=1e-3, err_msg=name)
    np.testing.assert_allclose(actual[1], expected[1], atol=2e-3)


@pytest.mark.parametrize("options", [{}, {"steps_per_execution": 2}, {"run_eagerly": True}])
def test_fit(keras, native_cpu, options):
    expected = run(compiled(keras))
    model = compiled(keras, **options)
    for name in STEPS:
        setattr(model, name, jaxconv.fuse(getattr(model, name)))
    actual = run(model)
    assert_same(actual, expected)
    assert "bias silu pre" in actual[2]
    if not options:  # two convolutions in each of three programs
        assert actual[2][2:] == ["scale bias relu", "bias silu"] * 2


def test_a_subclass(keras, native_cpu):
    class Fused(keras.Model):
        def train_step(self, state, data):
            return jaxconv.fuse(super().train_step)(state, data)

    actual = run(compiled(keras, Fused))
    assert_same(actual, run(compiled(keras)))
    assert "bias silu pre" in actual[2]


def test_a_fused_model_is_saved(keras, tmp_path):
    model = compiled(keras)
    model.train_step = jaxconv.fuse(model.train_step)
    model.fit(X, LABELS, batch_size=16, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded.predict(X, verbose=0), model.predict(X, verbose=0), atol=1e-5)
