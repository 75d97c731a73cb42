"""Rematerialisation policies for ``jax.checkpoint``, beside ``jax.checkpoint_policies``."""

from __future__ import annotations

from jax import lax

from jaxconv._src.conv.fused import conv_fused_p
from jaxconv._src.conv.primitives import PRIMITIVES
from jaxconv._src.int8.int8_primitive import conv_int8_p
from jaxconv._src.winograd.winograd_prepared import conv_prepared_p

_CONVOLUTIONS = frozenset(
    (
        *PRIMITIVES.values(),
        conv_fused_p,
        conv_int8_p,
        conv_prepared_p,
        lax.conv_general_dilated_p,
    )
)


def convs_saveable(prim, *_, **__) -> bool:
    """Saves the results of convolutions, this library's and lax's, and recomputes the rest.

    ``jax.checkpoint_policies.dots_saveable`` saves only lax's convolutions, so that ours would be
    computed again. To save matrix products too:

        policy = jax.checkpoint_policies.save_from_both_policies(
            jax.checkpoint_policies.dots_saveable, jaxconv.checkpoint_policies.convs_saveable
        )
    """
    return prim in _CONVOLUTIONS
