"""Winograd's minimal filtering: filters that are transformed once, ahead of the calls.

    prepared = winograd.prepare(w, "f4x4")      # once
    y = jaxconv.conv(x, prepared)               # inside jit; algorithm="winograd_f4x4"

    tile = winograd.faster_tile(x, w)           # by prediction, None where the direct kernel wins

docs/winograd.md describes the algorithm, its errors and when it is faster.
"""

from jaxconv._src.functions.winograd_choice import faster_tile as faster_tile
from jaxconv._src.winograd.winograd_filter import PreparedFilter as PreparedFilter
from jaxconv._src.winograd.winograd_filter import prepare as prepare
