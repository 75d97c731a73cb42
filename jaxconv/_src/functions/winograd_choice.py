"""Chooses the tile to prepare a filter for: that of the fastest predicted kernel."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax import lax

from jaxconv._src.call import selection
from jaxconv._src.conv import bilinear
from jaxconv._src.functions import arguments
from jaxconv._src.functions.arguments import Padding
from jaxconv._src.library import native
from jaxconv._src.problem import layouts
from jaxconv._src.problem.spec import Op
from jaxconv._src.ways import winograd_jax
from jaxconv._src.winograd import winograd_prepared
from jaxconv._src.winograd.winograd_filter import LAYOUTS, PreparedFilter


def faster_tile(
    x: jax.Array | jax.ShapeDtypeStruct,
    w: jax.Array | jax.ShapeDtypeStruct,
    *,
    padding: Padding = "SAME",
    groups: int = 1,
    data_format: str | None = None,
    algorithm: str = "winograd",
) -> str | None:
    """The tile with which a prepared filter is faster than the direct kernel, or None.

        tile = winograd.faster_tile(x, w)
        if tile is None:
            y = jaxconv.conv(x, w)
        else:
            y = jaxconv.conv(x, winograd.prepare(w, tile), algorithm="winograd")

    The times are predicted for the GPU of this process (or $JAXCONV_TARGET), at stride 1, and
    compared with "auto". The filter's transform does not count.

    Args:
        x, w: input and filter as of ``jaxconv.conv``, arrays or their shapes and dtypes.
        padding, groups, data_format: as of ``jaxconv.conv``; no padding by Flax's names.
        algorithm: the candidates, and the later argument of ``jaxconv.conv``: "winograd", every
            tile, or a name such as "winograd_f4x4" (the error of "f6x6" is three times as large).

    Returns:
        A name for ``prepare``; None if no kernel for prepared filters accepts the convolution or is
        predicted faster; always None on a CPU.

    Raises:
        ValueError: algorithm, shapes, padding, groups or format do not fit.
    """
    tiles = [t for t in LAYOUTS if algorithm in ("winograd", f"winograd_{t}")]
    if not tiles:
        names = ", ".join(f"winograd_{tile}" for tile in LAYOUTS)
        raise ValueError(f"algorithm: expected winograd or one of {names}, got {algorithm!r}")
    data_format = layouts.data_format(data_format, w.shape)
    if len(data_format) != x.ndim or x.ndim != w.ndim:
        raise ValueError(
            f"expected {len(data_format)} dimensions, {data_format}; got x {x.shape}, w {w.shape}"
        )
    rank = len(data_format) - 2
    spec = arguments.forward_spec(
        x,
        w,
        lax.conv_dimension_numbers(x.shape, w.shape, layouts.numbers(data_format)),
        padding,
        precision="default",
        algorithm=(selection.AUTO,) * 3,
        stride=(1,) * rank,
        lhs_dilation=(1,) * rank,
        dilation=(1,) * rank,
        groups=groups,
    )
    sizes, dtype = spec.sizes(Op.FPROP, x.shape, w.shape), np.dtype(x.dtype)
    on_gpu = native.target() or jax.default_backend() == "gpu"
    if not on_gpu or w.dtype != dtype or winograd_jax.refusal(Op.FPROP, spec, sizes, dtype):
        return None
    direct, _ = bilinear.select("cuda", Op.FPROP, spec, sizes, dtype, dtype)
    demand = dataclasses.replace(spec, algorithm=(algorithm,) * 3)
    least, best = direct.expected_microseconds, None
    for tile in tiles:
        no_data: Any = None  # not needed here
        made = PreparedFilter(no_data, tile, dtype, sizes.c // groups, sizes.k, groups)
        chosen, _ = winograd_prepared.Prepared(demand, made, dtype).select_kernel("cuda", sizes)
        if chosen.instance and chosen.microseconds < least:
            least, best = chosen.microseconds, tile
    return best
