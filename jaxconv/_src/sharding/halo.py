"""Spatial axes split over devices: the rows that every device reads, and their exchange.

A device computes an even share of the result's rows. The rows of the operand that its windows read
differ from its share of that operand. It receives the missing rows, as many as the window overlaps,
from its neighbours by collective permutes; from several neighbours if their shares are smaller.
Padding is not sent: devices at the edge read zeros. A device receives nothing of an operand that it
holds whole: ``taken`` slices it.

``plan`` computes the rows of all devices with integers only, and ``exchange`` moves them. "Rows"
are positions along the axis of a plan, for any axis.

    fprop   every device computes rows of y; x is exchanged
    dgrad   every device computes rows of dx; dy is exchanged (a convolution too, see ``as_fprop``)
    wgrad   every device sums over its rows of dy; x is exchanged as in fprop

Extents need not be multiples of the number of devices. XLA's shares then all have the rounded-up
size, and rows past the end hold arbitrary values; they are read as zeros.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxconv._src.problem.spec import ConvSpec, Op, as_fprop, dilated_extent, fitting_padding


@dataclasses.dataclass(frozen=True)
class HaloPlan:
    """One operation's split along one spatial axis. A tuple has one entry for every device.

    Attributes:
        share: rows of the exchanged operand on every device.
        extent: rows of that operand that exist and are read.
        first: the first row that the device reads; may lie in the padding.
        count: the number of rows that it reads.
        before, after: the number of these that it lacks before and after its own. Rows on which its
            own result does not depend are not counted; they are read as zeros or as another row.
        skip: rows of the local result before the device's own.
        result: rows of the result on every device (fprop, dgrad), or of dy (wgrad).
        result_extent: the number of these that exist on all devices together.
        in_extent, padding: those of the local convolution, as in ``ConvSpec``.
    """

    share: int
    extent: int
    first: tuple[int, ...]
    count: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    skip: tuple[int, ...]
    result: int
    result_extent: int
    in_extent: int
    padding: tuple[int, int]

    @property
    def parts(self) -> int:
        return len(self.first)

    @property
    def gathers(self) -> bool:
        """Whether one all-gather moves no more than the permutes.

        A device then lacks as many rows as all others have, or needs as many neighbours.
        """
        others = self.parts - 1
        lacks = max(map(sum, zip(self.before, self.after, strict=True)))
        hops = sum(-(-max(side) // self.share) for side in (self.before, self.after))
        return 0 < lacks >= others * self.share or (hops > 2 and hops >= others)


@functools.lru_cache(maxsize=4096)
def plan(op: Op, spec: ConvSpec, axis: int, parts: int, even: bool = False) -> HaloPlan | None:
    """The plan for splitting spatial axis ``axis`` over ``parts`` devices, or None.

    There is none, and the axis stays whole, in three cases: ``even`` is set (types of an explicit
    mesh) and an extent does not divide; in wgrad of a dilated x, the zeros would begin differently
    on each device; every device would read all rows and some would compute nothing.
    """
    conv = as_fprop(op, spec) if op is Op.DGRAD else spec
    extents = (conv.in_spatial[axis], conv.out_spatial[axis])
    if not all(isinstance(e, int) for e in extents):
        return None
    if even and any(e % parts for e in extents):
        return None
    stride, dilation = conv.stride[axis], conv.lhs_dilation[axis]
    window = dilated_extent(conv.filter_spatial[axis], conv.dilation[axis])
    extent, result_extent = extents
    share, result = (-(-e // parts) for e in extents)
    # With a dilated operand, all devices begin at rows whose windows have the same position between
    # the zeros.
    aligned = dilation // math.gcd(dilation, stride)
    own = [p * result for p in range(parts)]
    skip = tuple(row % aligned for row in own)
    if op is Op.WGRAD and any(skip):
        return None
    computed = result + max(skip)
    # From here on to `first`, positions are those of the dilated operand.
    low = conv.padding[axis][0]
    begin = [(row - s) * stride - low for row, s in zip(own, skip, strict=True)]
    span = (computed - 1) * stride + window
    lead = -begin[0] % dilation
    first = tuple((b + lead) // dilation for b in begin)
    count = max(1, (span - 1 - lead) // dilation + 1)
    if op is Op.WGRAD and result_extent < parts * result:
        # Rows that only windows of missing rows of dy read: a NaN there times zero would be NaN.
        last = (result_extent - 1) * stride + window - 1 - low
        extent = max(1, min(extent, last // dilation + 1))
    lacking = []
    for p, row in enumerate(own):
        # Rows that only the windows before and after the device's own read are not sent.
        ends = (row * stride - low, (min(row + result, result_extent) - 1) * stride - low + window)
        lowest, highest = -(-ends[0] // dilation), (ends[1] - 1) // dilation
        lacks = (p * share - max(lowest, 0), min(highest + 1, extent) - (p + 1) * share)
        lacking.append(tuple(max(0, side) if row < result_extent else 0 for side in lacks))
    before, after = zip(*lacking, strict=True)
    in_extent, padding = count, (lead, span - lead - dilated_extent(count, dilation))
    if op is Op.DGRAD:
        lows = [window - 1 - lead]
        in_extent = computed
        ((lo, hi),) = fitting_padding(
            lows,
            [dilated_extent(computed, stride)],
            [window],
            [dilated_extent(count, dilation)],
        )
        # This high padding gives the same extent of dy; cropping would need an operation.
        padding = (lo, max(hi, min(0, hi + dilation - 1)))
    found = HaloPlan(
        share,
        extent,
        first,
        count,
        before,
        after,
        skip,
        result,
        result_extent,
        in_extent,
        padding,
    )
    return None if found.gathers and own[-1] >= result_extent else found


def local_spec(spec: ConvSpec, plans: dict[int, HaloPlan]) -> ConvSpec:
    """The spec of one device's part, for exchanged operands; plans by spatial axis."""
    extents, padding = list(spec.in_spatial), list(spec.padding)
    for axis, found in plans.items():
        extents[axis], padding[axis] = found.in_extent, found.padding
    return dataclasses.replace(spec, in_spatial=tuple(extents), padding=tuple(padding))


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices over which one array axis is split, numbered in the order of the shares.

    Over several mesh axes, ``lax.axis_index`` and ``lax.all_gather`` number devices in the order of
    the given names, ``lax.ppermute`` in the mesh's order. Numbers here and in a ``HaloPlan`` are of
    the first kind.

    Attributes:
        names: the mesh axes, outermost first.
        mesh: size of every mesh axis, in the mesh's order.
    """

    names: tuple[str, ...]
    mesh: Mapping[str, int]

    @property
    def count(self) -> int:
        return math.prod(self.mesh[name] for name in self.names)

    def index(self) -> jax.Array:
        """The device's own number."""
        return lax.axis_index(self.names)

    def own(self, values: Sequence[int]) -> int | jax.Array:
        """The device's entry of a table."""
        if len(set(values)) == 1:
            return values[0]
        return jnp.asarray(values, jnp.int32)[self.index()]

    def gathered(self, array: jax.Array, at: int) -> jax.Array:
        return lax.all_gather(array, self.names, axis=at, tiled=True)

    def permuted(self, array: jax.Array, pairs: Iterable[tuple[int, int]]) -> jax.Array:
        """The array from another device, by pairs of source and target; zeros if none sent one."""
        ordered = tuple(name for name in self.mesh if name in self.names)
        numbers = np.arange(self.count).reshape([self.mesh[name] for name in ordered])
        number = numbers.transpose([ordered.index(name) for name in self.names]).ravel().tolist()
        return lax.ppermute(array, ordered, [(number[a], number[b]) for a, b in pairs])


def _slice(array: jax.Array, at: int, start: int | jax.Array, count: int) -> jax.Array:
    if isinstance(start, int):
        return lax.slice_in_dim(array, start, start + count, axis=at)
    return lax.dynamic_slice_in_dim(array, start, count, axis=at)


def existing(array: jax.Array, at: int, devices: Devices, extent: int) -> jax.Array:
    """An array's share with zeros in the rows from ``extent`` on, counted over all devices."""
    row = devices.index() * array.shape[at] + lax.broadcasted_iota(jnp.int32, array.shape, at)
    return jnp.where(row < extent, array, jnp.zeros((), array.dtype))


def _received(
    array: jax.Array, at: int, devices: Devices, lacking: Sequence[int], before: bool
) -> list[jax.Array]:
    """The neighbours' rows on one side, in order; zeros where there is no neighbour."""
    share, pieces = array.shape[at], []
    for distance in range(1, -(-max(lacking) // share) + 1):
        rows = min(share, max(lacking) - (distance - 1) * share)
        start = share - rows if before else 0
        shift = distance if before else -distance
        pairs = [
            (p - shift, p) for p, lacks in enumerate(lacking) if lacks > share * (distance - 1)
        ]
        piece = lax.slice_in_dim(array, start, start + rows, axis=at)
        pieces.append(devices.permuted(piece, pairs))
    return pieces[::-1] if before else pieces


def exchange(array: jax.Array, at: int, devices: Devices, plan: HaloPlan) -> jax.Array:
    """The rows that one device reads, from every device's share.

    Args:
        array: the share.
        at: the split axis of the array.
        devices: the devices over which it is split.
        plan: the operation's plan.
    """
    if plan.extent < plan.parts * plan.share:
        array = existing(array, at, devices, plan.extent)
    if plan.gathers:
        array = devices.gathered(array, at)
        origin = (0,) * plan.parts
    else:
        pieces = [
            *_received(array, at, devices, plan.before, True),
            array,
            *_received(array, at, devices, plan.after, False),
        ]
        array = lax.concatenate(pieces, at) if len(pieces) > 1 else array
        origin = tuple(p * plan.share - max(plan.before) for p in range(plan.parts))
    return _read(array, at, devices, plan, origin)


def taken(array: jax.Array, at: int, devices: Devices, plan: HaloPlan) -> jax.Array:
    """The rows that one device reads, from an operand of which it holds every row."""
    array = lax.slice_in_dim(array, 0, plan.extent, axis=at)
    return _read(array, at, devices, plan, (0,) * plan.parts)


def _read(
    array: jax.Array, at: int, devices: Devices, plan: HaloPlan, origin: Sequence[int]
) -> jax.Array:
    """The rows that one device reads, zeros in the padding.

    Args:
        origin: the first row of ``array`` on every device.
        array, at, devices, plan: those of ``exchange``.
    """
    start = [f - o for f, o in zip(plan.first, origin, strict=True)]
    low = max(0, -min(start))
    high = max(0, max(start) + plan.count - array.shape[at])
    if low or high:
        config = [(0, 0, 0)] * array.ndim
        config[at] = (low, high, 0)
        array = lax.pad(array, jnp.zeros((), array.dtype), config)
    start = devices.own([s + low for s in start])
    return _slice(array, at, start, plan.count)


def own_rows(result: jax.Array, at: int, devices: Devices, plan: HaloPlan) -> jax.Array:
    """One device's share of the result, from all rows that it computed."""
    if result.shape[at] == plan.result:
        return result
    return _slice(result, at, devices.own(plan.skip), plan.result)


def placed_rows(own: jax.Array, at: int, devices: Devices, plan: HaloPlan, rows: int) -> jax.Array:
    """A device's share of a term of the result, padded with zeros to all ``rows`` it computes.

    ``own_rows`` of the sum of term and result then equals the sum of the shares.
    """
    if own.shape[at] == rows:
        return own
    shape = (*own.shape[:at], rows, *own.shape[at + 1 :])
    start = devices.own(plan.skip)
    return lax.dynamic_update_slice_in_dim(jnp.zeros(shape, own.dtype), own, start, at)
