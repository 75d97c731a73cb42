"""Inference of a built-in network with filters that were prepared for Winograd."""

from __future__ import annotations

import jax
import numpy as np

import jaxconv
from jaxconv import winograd
from jaxconv.bench.networks import Network, blocks, programs


class Pass(blocks.Pass):
    """A pass whose parameters may be prepared filters, for an algorithm of Winograd's."""

    def __init__(self, algorithm: str, *parameters: list):
        super().__init__(*parameters)
        self.algorithm = algorithm

    def convolve(self, x: jax.Array, w: jax.Array | winograd.PreparedFilter, **window) -> jax.Array:
        """The convolution of a layer, by Winograd where its filter is prepared for that."""
        if not isinstance(w, winograd.PreparedFilter):
            return super().convolve(x, w, **window)
        padding, groups = window["padding"], window["feature_group_count"]
        return jaxconv.conv(x, w, padding=padding, groups=groups, algorithm=self.algorithm)


class _Choosing(blocks.Pass):
    """Notes the tile for which a filter is best prepared, by the filter's place in the list."""

    def __init__(self, algorithm: str):
        super().__init__()
        self.algorithm, self.chosen = algorithm, dict[int, tuple[str, int]]()

    def convolve(self, x: jax.Array, w: jax.Array, **window) -> jax.Array:
        alone = (1,) * (x.ndim - 2)
        if window["window_strides"] == window["rhs_dilation"] == alone:
            padding, groups = window["padding"], window["feature_group_count"]
            stored = jax.ShapeDtypeStruct(w.shape, x.dtype)
            tile = winograd.faster_tile(
                x, stored, padding=padding, groups=groups, algorithm=self.algorithm
            )
            if tile is not None:
                self.chosen[len(self.declared) - 1] = tile, groups
        return super().convolve(x, w, **window)


def stored(state: programs.State, dtype: np.dtype) -> programs.State:
    """The state with its filters in the dtype of activations, as inference stores them."""
    parameters = [np.asarray(p, dtype) if p.ndim >= 3 else p for p in state.parameters]
    return state._replace(parameters=parameters)


def prepare(
    network: Network, state: programs.State, x: jax.ShapeDtypeStruct, algorithm: str
) -> programs.State:
    """The state with those filters transformed whose convolutions are predicted faster by that.

    Args:
        network: the network.
        state: its state; filters in the dtype of x.
        x: shape and dtype of the input.
        algorithm: "winograd", or with the only tile that is in question, "winograd_f4x4".
    """
    choosing = _Choosing(algorithm)
    jax.eval_shape(lambda x: network.forward(choosing, x), x)
    parameters: list = list(state.parameters)
    transform = jax.jit(winograd.prepare, static_argnums=1, static_argnames="groups")
    for place, (tile, groups) in choosing.chosen.items():
        parameters[place] = transform(parameters[place], tile, groups=groups)
    return state._replace(parameters=parameters)
