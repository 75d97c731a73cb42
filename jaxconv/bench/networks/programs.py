"""What is done with a network: its initial state, its inference and one step of its training."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxconv.bench.networks import Network
from jaxconv.bench.networks.blocks import Declared, Pass

# Small enough that no network diverges in a few hundred steps on random examples: a GPU multiplies
# NaNs with less power, and so in less time, than numbers.
_LEARNING_RATE, _MOMENTUM = 1e-3, 0.9


class State(NamedTuple):
    """Everything that a training step reads and replaces, float32; arrays of JAX or NumPy.

    Attributes:
        parameters: in the order in which the network takes them.
        statistics: alternating running means and variances of batch normalisation.
        velocity: of gradient descent with momentum, one array for each parameter.
    """

    parameters: list[jax.Array]
    statistics: list[jax.Array]
    velocity: list[jax.Array]


class Examples(NamedTuple):
    """A batch: inputs, and the labels or values that the outputs should have."""

    x: jax.Array
    target: jax.Array


class Signature(NamedTuple):
    """What a network needs and gives: its parameters, its statistics, its result."""

    parameters: list[Declared]
    statistics: list[jax.ShapeDtypeStruct]
    y: jax.ShapeDtypeStruct


def signature(network: Network, x: jax.ShapeDtypeStruct) -> Signature:
    """The network's signature for an input, found without computing anything."""
    net = Pass()

    def forward(x):
        y = network.forward(net, x)
        return net.statistics, y

    statistics, y = jax.eval_shape(forward, x)
    return Signature(net.declared, statistics, y)


def input_shape(
    network: Network, batch: int | None = None, size: int | None = None
) -> tuple[int, ...]:
    """The shape of the input, the network's usual one by default.

    Args:
        network: the network.
        batch: the number of examples.
        size: the extent of every spatial axis.

    Raises:
        ValueError: the network does not take that size.
    """
    spatial = network.spatial if size is None else (size,) * len(network.spatial)
    if any(extent % network.multiple for extent in spatial):
        raise ValueError(f"a size of {size}: expected a multiple of {network.multiple}")
    return (batch or network.batch, *spatial, network.channels)


def initial_state(network: Network, x: jax.ShapeDtypeStruct, seed: int = 0) -> State:
    """Random parameters for inputs like ``x``, the same for a seed on every platform.

    Returns:
        NumPy arrays: a training step consumes the arrays on the device, so each training brings
        its own.
    """
    declared, statistics, _ = signature(network, x)
    rng = np.random.default_rng(seed)

    def draw(p: Declared) -> np.ndarray:
        value = np.full(p.shape, p.mean, np.float32)
        if p.deviation:
            value += p.deviation * rng.standard_normal(p.shape, np.float32)
        return value

    parameters = [draw(p) for p in declared]
    running = [np.full(s.shape, i % 2, np.float32) for i, s in enumerate(statistics)]
    velocity = [np.zeros_like(p) for p in parameters]
    return State(parameters, running, velocity)


def random_examples(
    network: Network, shape: tuple[int, ...], dtype: jnp.dtype, seed: int = 0
) -> Examples:
    """Random inputs of that shape and dtype, and random labels or values for their outputs."""
    y = signature(network, jax.ShapeDtypeStruct(shape, dtype)).y
    x_key, y_key = jax.random.split(jax.random.key(seed + 1, impl="rbg"))
    if network.regression:
        target = jax.random.normal(y_key, y.shape)
    else:
        target = jax.random.randint(y_key, y.shape[:-1], 0, y.shape[-1])
    return Examples(network.draw(x_key, shape, dtype), target)


def inference(
    network: Network, make_pass: Callable[..., Pass] = Pass
) -> Callable[[State, jax.Array], jax.Array]:
    """(state, x) -> y, float32, by the running statistics; ``make_pass`` is a kind of ``Pass``."""

    def infer(state: State, x: jax.Array) -> jax.Array:
        net = make_pass(state.parameters, state.statistics)
        return network.forward(net, x).astype(jnp.float32)

    return infer


def training_step(
    network: Network, make_pass: Callable[..., Pass] = Pass
) -> Callable[[State, Examples], tuple[State, jax.Array]]:
    """(state, examples) -> (next state, loss): gradient descent with momentum."""

    def step(state: State, examples: Examples) -> tuple[State, jax.Array]:
        def loss(parameters):
            net = make_pass(parameters, state.statistics, train=True)
            y = network.forward(net, examples.x).astype(jnp.float32)
            if network.regression:
                return ((y - examples.target) ** 2).mean(), net.statistics
            chances = jax.nn.log_softmax(y)
            of_target = jnp.take_along_axis(chances, examples.target[..., None], axis=-1)
            return -of_target.mean(), net.statistics

        (value, statistics), gradients = jax.value_and_grad(loss, has_aux=True)(state.parameters)
        velocity = [_MOMENTUM * v + g for v, g in zip(state.velocity, gradients, strict=True)]
        parameters = [
            p - _LEARNING_RATE * v for p, v in zip(state.parameters, velocity, strict=True)
        ]
        return State(parameters, statistics, velocity), value

    return step
