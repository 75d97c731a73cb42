"""The partition of passes over arrays of channels, in the algebra of ``partition``.

A pass names the dimensions of its arrays: n, the spatial axes s0, s1 and so on, and last the
channels c. Every dimension may be split evenly; a device that pools gathers the positions of arrays
that it does not hold whole. If n or spatial axes are split, one all-reduce merges the sums over
positions; if channels are split, none is needed.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
from jax import lax
from jax.extend.core import Primitive

from jaxconv._src import compat
from jaxconv._src.sharding import partition
from jaxconv._src.sharding.partition import Factor, Split, Splittable, Tensor, Tensors

# Channels whose bits are a byte (cc/cuda/normalisation/plan.h).
_PACKED = 8


@dataclasses.dataclass(frozen=True)
class Dimensions:
    """The dimensions of a pass's arrays.

    Attributes:
        shape: the shape of the arrays.
        segments: equal segments of the leading axis, each with its own vectors and sums; a segment
            stays on one device. The positions of a single segment may be split.
        packed: whether there is an array of bits over the channels.
    """

    shape: tuple[int, ...]
    segments: int = 1
    packed: bool = False

    @property
    def _n(self) -> Factor:
        if self.segments == 1:
            return Factor("n")
        return Factor("n", self.shape[0] // self.segments, "of_segment")

    @property
    def _c(self) -> Factor | None:
        if not self.packed:
            return Factor("c")
        return None if self.shape[-1] % _PACKED else Factor("c", _PACKED, "of_byte")

    @property
    def _axes(self) -> tuple[Factor | None, ...]:
        spatial = [Factor(f"s{i}") for i in range(len(self.shape) - 2)]
        return (self._n, *spatial, self._c)

    def array(self, name: str, shape: Sequence[int] = ()) -> Tensor:
        """An array; a pooled array has another shape."""
        return Tensor(name, tuple(shape) or self.shape, self._axes)

    def bits(self, name: str) -> Tensor:
        """A bit for each element of an array."""
        channels = -(-self.shape[-1] // _PACKED)
        of_c = self._c and Factor("c")
        return Tensor(name, (*self.shape[:-1], channels), (*self._axes[:-1], of_c))

    def vector(self, name: str, shape: Sequence[int]) -> Tensor:
        """A vector over channels, (C,) or (segments, C)."""
        return Tensor(name, tuple(shape), (*[Factor("n")] * (len(shape) - 1), self._c))

    def sums(self, name: str, count: int) -> Tensor:
        """``count`` vectors that are sums over positions."""
        leading = self.segments > 1
        shape = (*[self.segments] * leading, count, self.shape[-1])
        return Tensor(name, shape, (*[Factor("n")] * leading, None, self._c))


class SplitPass(Splittable):
    """A pass over arrays: a frozen dataclass of its primitive's parameters.

    Attributes:
        pools: whether windows read the spatial axes. A device then gathers all positions, and keeps
            its own part of the results.
    """

    subject = "pass over arrays"
    pools: ClassVar[bool] = False

    @property
    @abc.abstractmethod
    def primitive(self) -> Primitive:
        """The primitive that has these parameters."""

    def bind(self, *operands: jax.Array) -> list[jax.Array]:
        names = [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]
        found = self.primitive.bind(*operands, **{name: getattr(self, name) for name in names})
        return list(found) if self.primitive.multiple_results else [found]

    def on_part(self, parts: Callable[[str], int], *operands: jax.Array) -> list[jax.Array]:
        """The results of a device's arrays if each factor is split into ``parts``."""
        return self.bind(*operands)

    def merged(
        self, result: jax.Array, over: tuple[str, ...], parts: int, elements: int
    ) -> jax.Array:
        """The result over all devices, from each device's result.

        Args:
            result: one device's result.
            over: the mesh axes along which the devices' results are partial.
            parts: their number.
            elements: the elements of one channel that a device has in each segment.
        """
        return partition.sum_over(result, over)

    def held(self, tensors: Tensors, given: Sequence) -> Tensors:
        operands, results = tensors
        names = self._gathered(operands)
        return [a.held(p, names) for a, p in zip(operands, given, strict=False)], results

    def _gathered(self, operands: Sequence[Tensor]) -> list[str]:
        """The factors of which a device gathers the whole axis."""
        return [name for name in operands[0].extents() if self.pools and name not in ("n", "c")]

    def choose_split(
        self, tensors: Tensors, mesh: Mapping[str, int], given: Sequence, explicit: bool
    ) -> Split:
        arrays = [*tensors[0], *tensors[1]]
        asking = [(a, split) for a, split in zip(arrays, given, strict=True) if split is not None]
        asking.sort(key=lambda asked: len(asked[0].shape) < len(arrays[0].shape))

        def fitting(name: str, axes: tuple[str, ...]) -> tuple[str, ...]:
            for array in arrays:  # pooled ones have other extents
                if (extent := array.extents().get(name)) is not None:
                    axes = partition.dividing(axes, extent, mesh)
            return axes

        return partition.assigned(arrays[0].extents(), asking, fitting, mesh)

    def on_devices(
        self, tensors: Tensors, split: Split, mesh: Mapping[str, int], *operands: jax.Array
    ) -> list[jax.Array]:
        def parts(*names: str) -> int:
            return math.prod(mesh[axis] for name in names for axis in split.get(name, ()))

        factors, gathered = tensors[0][0].extents(), self._gathered(tensors[0])
        given = []
        for operand, tensor in zip(operands, tensors[0], strict=True):
            for at, axes in _split_axes(tensor, split, gathered):
                operand = lax.all_gather(operand, axes, axis=at, tiled=True)
            given.append(operand)
        results = self.on_part(parts, *compat.match_varying(*given))
        merged = []
        for result, tensor in zip(results, tensors[1], strict=True):
            lacked = [name for name in factors if tensor.axis(name) is None]
            over = tuple(axis for name in lacked for axis in split.get(name, ()))
            for at, axes in _split_axes(tensor, split, gathered):
                own = result.shape[at] // math.prod(mesh[axis] for axis in axes)
                result = lax.dynamic_slice_in_dim(result, lax.axis_index(axes) * own, own, at)
            if over:
                elements = operands[0].size // (result.size // tensor.shape[-2])
                result = self.merged(result, over, parts(*lacked), elements)
            merged.append(result)
        return merged


def _split_axes(tensor: Tensor, split: Split, names: Sequence[str]) -> list[tuple[int, tuple]]:
    """The split array axes of some factors, and the mesh axes of each."""
    axes_of = tensor.partitions(split)
    positions = map(tensor.axis, names)
    return [(at, axes_of[at]) for at in positions if at is not None and axes_of[at]]


def result_types(call: SplitPass, results: Sequence[Any], *avals: Any) -> list[Any]:
    """The types of results, with their shardings on an explicit mesh."""
    found = partition.result_shardings(call, *avals)
    if found is None:
        return list(results)
    return [r.update(sharding=sharding) for r, sharding in zip(results, found, strict=True)]
