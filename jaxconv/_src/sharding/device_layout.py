"""The layout of devices, from the shardings that XLA's partitioner passes to a callback."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
from jax.sharding import AbstractMesh, AxisType

from jaxconv._src import compat

Partitions = tuple[tuple[str, ...], ...]  # mesh axes per array axis


def _radices(count: int) -> Iterator[tuple[int, ...]]:
    """Every order of the prime factors of ``count``."""
    if count == 1:
        yield ()
    for p in range(2, count + 1):
        if count % p == 0 and all(p % q for q in range(2, p)):
            for rest in _radices(count // p):
                yield (p, *rest)


@dataclasses.dataclass(frozen=True)
class DeviceLayout:
    """The devices of a program as a mesh whose axes all have prime size.

    The program's own mesh is often unknown at lowering, and XLA may split over a part of one of its
    axes. Only the assignment of parts to devices matters, and every tiling of a mesh is also a
    tiling of the mesh of its axes' prime factors.

    Attributes:
        whole: all devices.
        split: the devices over which XLA splits, in the order of its numbers; the other axes are
            already manual.
    """

    whole: AbstractMesh
    split: AbstractMesh

    def read(self, sharding, rank: int) -> Partitions | None:
        """One of XLA's shardings as mesh axes; None if it is open."""
        if sharding is None:
            return None
        tiling = sharding._to_xla_hlo_sharding(rank)
        return compat.tiling_partitions(tiling, self.split, rank)


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """The arrangement of a program's devices, as far as known at lowering.

    If some mesh axes are manual, XLA passes shardings over the devices along the others, which it
    numbers in the order in which the operation's result is split. These shardings do not
    distinguish two axes of equal size; the sharding of an array split over all of them, in the
    mesh's order, does.

    Attributes:
        axes: size of every mesh axis, and whether it is manual, as in ``compat.device_axes``.
        numbers: XLA's number of each device over which it splits, in the mesh's order; ascending by
            default.
    """

    axes: tuple[tuple[int, bool], ...]
    numbers: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        return math.prod(size for size, _ in self.axes)

    @property
    def all_split(self) -> bool:
        """Whether XLA splits over all axes."""
        return not any(manual for _, manual in self.axes)

    def numbered(self, sharding, rank: int) -> Arrangement:
        """The same with the numbers from XLA's sharding of ``compat.split_over_all``'s array."""
        found = compat.tiling_devices(sharding._to_xla_hlo_sharding(rank))
        return dataclasses.replace(self, numbers=found)

    def layouts(self) -> Iterator[DeviceLayout]:
        """A layout for every order of the axes' prime factors in which the numbers form a mesh."""
        for radices in itertools.product(*(_radices(size) for size, _ in self.axes)):
            named = [
                (f"d{i}_{j}", size, manual)
                for i, (sizes, (_, manual)) in enumerate(zip(radices, self.axes, strict=True))
                for j, size in enumerate(sizes)
            ]
            split = [axis for axis in named if not axis[2]]
            order = self._order([size for _, size, _ in split])
            if order is not None:
                yield DeviceLayout(_mesh(named), _mesh([split[i] for i in order]))

    def _order(self, sizes: Sequence[int]) -> Sequence[int] | None:
        """The axes of these sizes, outermost first by the numbers; None if none fits."""
        if not self.numbers:
            return range(len(sizes))
        numbers = np.reshape(self.numbers, sizes)
        steps = [int(numbers.take(1, axis).flat[0]) for axis in range(len(sizes))]
        order = sorted(range(len(sizes)), key=lambda axis: -steps[axis])
        counted = np.arange(numbers.size).reshape([sizes[axis] for axis in order])
        return order if (numbers.transpose(order) == counted).all() else None


def _mesh(axes: Sequence[tuple[str, int, bool]]) -> AbstractMesh:
    sizes, names = tuple(size for _, size, _ in axes), tuple(name for name, *_ in axes)
    return AbstractMesh(sizes, names, (AxisType.Auto,) * len(axes))


def read_shardings(
    devices: Arrangement, shardings: Sequence, ranks: Sequence[int]
) -> tuple[DeviceLayout, list]:
    """All shardings of one operation over one layout; those of no mesh are replicated."""
    for layout in devices.layouts():
        try:
            return layout, [layout.read(s, r) for s, r in zip(shardings, ranks, strict=True)]
        except compat.NOT_A_TILING_OF_THE_MESH:
            continue
    return layout, [((),) * rank for rank in ranks]
