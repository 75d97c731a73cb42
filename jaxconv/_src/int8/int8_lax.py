"""Convolutions of int8 operands in lax's form, on the kernels of ``conv_int8_p``.

The program packs the filter by XLA transposes. A dilated or cropped input is copied, a data
gradient becomes a forward convolution with the reversed filter, and independent convolutions with
separate filters run one after the other. Channel counts that no kernel accepts are padded with
zeros to multiples of 32.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxconv._src.int8.int8_layout import (
    FEW,
    crop_axis,
    pack_rows,
    pad_axis,
    padded_channels,
)
from jaxconv._src.int8.int8_primitive import Int8Spec, Quantised, bind, canonical_conv
from jaxconv._src.library import native
from jaxconv._src.problem.spec import (
    EXPLICIT_GROWTH,
    ConvSpec,
    Op,
    Sizes,
    as_fprop,
    dilated_extents,
    explicit_input,
)
from jaxconv._src.ways import winograd_jax


@dataclasses.dataclass(frozen=True)
class PackedPlan:
    """The plan of one int8 convolution, or why no kernel computes it.

    Attributes:
        chosen: the selection for one of the independent convolutions.
        key: its problem key.
        spec: the call's spec.
        crop: the negative padding and the dilation of the input, by spatial axis.
        c, k: channels of the call, over all groups.
    """

    chosen: native.Selection
    key: str = ""
    spec: Int8Spec | None = None
    crop: tuple[tuple[int, int, int], ...] = ()
    c: int = 0
    k: int = 0


def _refused(reason: str) -> PackedPlan:
    refusal = native.Refusal("jaxconv", reason)
    return PackedPlan(native.Selection(None, refusals=(refusal,)))


@functools.lru_cache(maxsize=1024)
def _plan(
    platform: str, target: str, automatic: str, op: Op, spec: ConvSpec, sizes: Sizes, out: np.dtype
) -> PackedPlan:
    if spec.algorithm_of(op) in winograd_jax.ALGORITHMS:
        return _refused("Winograd of integers is not exact; jaxconv.int8.conv takes it")
    if op is Op.WGRAD:
        return _refused("no kernel computes weight gradients of integers")
    forward = as_fprop(op, spec)
    explicit = explicit_input(forward)
    dilated = math.prod(dilated_extents(forward.in_spatial, forward.lhs_dilation))
    if dilated > EXPLICIT_GROWTH * math.prod(forward.in_spatial):
        return _refused(
            f"an input dilated by {'x'.join(map(str, forward.lhs_dilation))} is more than "
            f"{EXPLICIT_GROWTH} times as large"
        )
    if min(explicit.in_spatial) < 1:
        return _refused("negative padding crops the whole input")
    crop = tuple(
        (min(lo, 0), min(hi, 0), dilation - 1)
        for (lo, hi), dilation in zip(forward.padding, forward.lhs_dilation, strict=True)
    )
    call = Int8Spec(
        conv=canonical_conv(
            stride=explicit.stride,
            padding=explicit.padding,
            dilation=explicit.dilation,
            groups=explicit.groups,
            in_spatial=explicit.in_spatial,
            window=explicit.filter_spatial,
            algorithm=spec.algorithm_of(op),
        ),
        layout="nhwc",
        out_dtype=out,
    )
    c, k = (sizes.c, sizes.k) if op is Op.FPROP else (sizes.k, sizes.c)
    forms = [(c, k, spec.groups)]
    if spec.groups == 1:
        stored = FEW if c <= FEW else padded_channels(c)
        forms += [(stored, k, 1), (stored, padded_channels(k), 1)]
    elif spec.groups == c == k:  # depthwise: a channel of zeros is a separate group
        forms.append((padded_channels(c),) * 3)
    plan: PackedPlan | None = None
    for c, k, groups in dict.fromkeys(forms):
        one = Sizes(
            1, sizes.n, c, k, call.conv.in_spatial, call.conv.filter_spatial, call.conv.out_spatial
        )
        grouped = dataclasses.replace(call, conv=dataclasses.replace(call.conv, groups=groups))
        chosen, key = Quantised(grouped).select(platform, one, np.dtype(np.int8))
        found = PackedPlan(
            chosen._replace(packed=chosen.instance is not None), key, grouped, crop, c, k
        )
        if chosen.instance is not None:
            return found
        plan = plan or found
    assert plan is not None, "there is a choice of channels"
    return plan


def plan(platform: str, op: Op, spec: ConvSpec, sizes: Sizes, out_dtype: np.dtype) -> PackedPlan:
    """The kernel for a convolution of int8 operands on a platform, and the form of its call.

    Raises:
        ValueError: the platform does not know the demanded algorithm.
    """
    # The environment's settings are part of the key.
    environment = native.target(), native.automatic()
    return _plan(platform, *environment, op, spec, sizes, np.dtype(out_dtype))


def convolve(
    plan: PackedPlan, op: Op, lhs: jax.Array, rhs: jax.Array, *, spec: ConvSpec
) -> jax.Array:
    """Computes ``op`` on int8 operands by ``plan``; operands and result as in the primitive."""
    lhs_role, rhs_role, out_role = op.roles
    x = lax.transpose(lhs, spec.axes(lhs_role))
    w = lax.transpose(rhs, spec.axes(rhs_role))

    def one(operands):
        return _convolve(plan, op, *operands, spec.groups)

    y = lax.map(one, (x, w)) if spec.batched else one((x, w))
    return lax.transpose(y, np.argsort(spec.axes(out_role)))


def _convolve(plan: PackedPlan, op: Op, x: jax.Array, w: jax.Array, groups: int) -> jax.Array:
    """One convolution: x (n, *spatial, c), w (*window, c / groups, k), for ``op``."""
    rank = w.ndim - 2
    if any(cut != (0, 0, 0) for cut in plan.crop):
        x = lax.pad(x, jnp.int8(0), [(0, 0, 0), *plan.crop, (0, 0, 0)])
    if op is Op.FPROP:
        k = w.shape[-1]
        w = jnp.moveaxis(w, -1, 0)
    else:
        # A transposed filter is contracted over the output channels of each group.
        *window, c_per_group, k_of_all = w.shape
        k = c_per_group * groups
        w = lax.rev(w, tuple(range(rank)))
        w = w.reshape(*window, c_per_group, groups, k_of_all // groups)
        w = lax.transpose(w, (rank + 1, rank, *range(rank), rank + 2))
        w = w.reshape(k, *window, k_of_all // groups)
    assert plan.spec is not None, "a plan with an instance has a call"
    x = pad_axis(x, rank + 1, plan.c)
    w = pad_axis(pad_axis(w, rank + 1, plan.c // plan.spec.conv.groups), 0, plan.k)
    return crop_axis(bind(plan.spec, x, pack_rows(w, "nhwc")), rank + 1, k)
