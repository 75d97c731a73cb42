"""The layers of a built-in network: every distinct convolution of its forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxconv.bench.layers import Layer
from jaxconv.bench.networks import NETWORKS, programs


class NetworkLayers(NamedTuple):
    """The convolutions of a network.

    Attributes:
        layers: by name, "resnext50/1" and so on, in the order in which they first run.
        left_out: how many convolutions a ``Layer`` cannot describe: transposed ones and those with
            unequal padding on both sides.
    """

    layers: dict[str, Layer]
    left_out: int


def layers_of(name: str, batch: int | None = None) -> NetworkLayers:
    """The distinct convolutions of a network's forward pass, at its usual size of input.

    Args:
        name: of ``NETWORKS``.
        batch: the number of examples, the network's usual one by default.
    """
    network = NETWORKS[name]
    x = jax.ShapeDtypeStruct(programs.input_shape(network, batch), jnp.float32)
    signature = programs.signature(network, x)
    parameters = [jax.ShapeDtypeStruct(p.shape, jnp.float32) for p in signature.parameters]
    state = programs.State(parameters, signature.statistics, [])
    traced = jax.make_jaxpr(programs.inference(network))(state, x)
    found = list(map(_layer, _convolutions(traced.jaxpr)))
    distinct = dict.fromkeys(layer for layer in found if layer)
    layers = {f"{name}/{i}": layer for i, layer in enumerate(distinct, 1)}
    return NetworkLayers(layers, found.count(None))


def _convolutions(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        if eqn.primitive is jax.lax.conv_general_dilated_p:
            yield eqn
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                yield from _convolutions(getattr(inner, "jaxpr", inner))


def _is_jaxpr(value: Any) -> bool:
    return hasattr(getattr(value, "jaxpr", value), "eqns")


def _layer(eqn: Any) -> Layer | None:
    """The convolution as a ``Layer``, or None where that cannot say it.

    Which axis is which does not matter: a layer is measured channels-last.
    """
    p = eqn.params
    if p["batch_group_count"] > 1 or set(p["lhs_dilation"]) != {1}:
        return None
    if any(low != high for low, high in p["padding"]):
        return None
    x, w = (invar.aval.shape for invar in eqn.invars)
    x_axes, w_axes, _ = p["dimension_numbers"]
    n, c, *spatial = (x[axis] for axis in x_axes)
    k, _, *window = (w[axis] for axis in w_axes)
    return Layer(
        n,
        tuple(spatial),
        c,
        k,
        tuple(window),
        tuple(p["window_strides"]),
        tuple(low for low, _ in p["padding"]),
        p["feature_group_count"],
        tuple(p["rhs_dilation"]),
    )
