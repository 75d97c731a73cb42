"""Arrays whose axes have factors, and operations on them, which devices may share.

``partition`` has the meaning of factors.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar, NamedTuple

import jax

from jaxconv._src.sharding.device_layout import Partitions

Split = dict[str, tuple[str, ...]]  # mesh axes per factor


class Factor(NamedTuple):
    """The factor of an array axis.

    Attributes:
        name: the factor's name.
        together: the number of adjacent elements of the axis that stay on one device.
        inner: Shardy's name of these; axes with one inner name have equally many.
        whole: whether every device holds the whole axis, although other arrays split the factor.
    """

    name: str
    together: int = 1
    inner: str = ""
    whole: bool = False


@dataclasses.dataclass(frozen=True)
class Tensor:
    """An operand or a result of a call.

    Attributes:
        name: unique within the call; "x", "w" and "y" in the convolution itself.
        shape: the shape of the whole array.
        axes: the factor of every axis, None for one that stays whole.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[Factor | None, ...]

    def axis(self, factor: str) -> int | None:
        """The axis of a factor, or None."""
        names = [each and each.name for each in self.axes]
        return names.index(factor) if factor in names else None

    def extents(self) -> dict[str, int]:
        """The number of parts into which each factor can be split."""
        of_axes = zip(self.axes, self.shape, strict=True)
        return {each.name: extent // each.together for each, extent in of_axes if each}

    def partitions(self, split: Split) -> Partitions:
        """The partition of the array."""
        return tuple(
            split.get(each.name, ()) if each and not each.whole else () for each in self.axes
        )

    def whole(self, axis: int) -> bool:
        """Whether every device holds all of an axis that other arrays may split."""
        factor = self.axes[axis]
        return factor is not None and factor.whole

    def held(self, partitions: Partitions | None, factors: Iterable[str]) -> Tensor:
        """The array whose axes of some factors stay whole if devices already hold them whole.

        Args:
            partitions: the partition of the array before the call; None if it is open.
            factors: the names of the factors.
        """
        if partitions is None:
            return self
        names = set(factors)
        axes = (
            each._replace(whole=True) if each and each.name in names and not split else each
            for each, split in zip(self.axes, partitions, strict=True)
        )
        return dataclasses.replace(self, axes=tuple(axes))


Tensors = tuple[list[Tensor], list[Tensor]]  # operands and results


class Splittable(abc.ABC):
    """An operation whose arrays devices may share: a convolution or a pass.

    It is a frozen dataclass; its ``repr`` shows everything that determines the computation.

    Attributes:
        subject: its name in errors.
    """

    subject: ClassVar[str]

    @abc.abstractmethod
    def tensors(self, *shapes: Sequence[int]) -> Tensors:
        """The operands, with these shapes, and the results."""

    @abc.abstractmethod
    def bind(self, *operands: jax.Array) -> list[jax.Array]:
        """The primitive's results."""

    @abc.abstractmethod
    def held(self, tensors: Tensors, given: Sequence) -> Tensors:
        """The arrays, of which some axes stay whole if devices already hold them whole.

        These are the axes along which a device reads more than its share. From the whole axis it
        takes what it reads; from shares this would need an exchange. Arguments as of
        ``choose_split``.
        """

    @abc.abstractmethod
    def choose_split(
        self, tensors: Tensors, mesh: Mapping[str, int], given: Sequence, explicit: bool
    ) -> Split:
        """The mesh axes of every factor.

        Args:
            tensors: the operands and the results.
            mesh: size of every mesh axis.
            given: ``Partitions`` of these (None: open).
            explicit: whether they come from types.
        """

    @abc.abstractmethod
    def on_devices(
        self, tensors: Tensors, split: Split, mesh: Mapping[str, int], *operands: jax.Array
    ) -> Sequence[jax.Array]:
        """One device's results from its parts of the operands."""

    def summed(self, tensors: Tensors) -> list[str]:
        """The factors of operands that no result has."""
        operands, results = tensors
        names = dict.fromkeys(f.name for each in operands for f in each.axes if f)
        return [name for name in names if all(r.axis(name) is None for r in results)]


def parts_of(axes: Sequence[str], mesh: Mapping[str, int]) -> int:
    return math.prod(mesh[axis] for axis in axes)


def dividing(axes: Sequence[str], extent: int, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The longest prefix of mesh axes over which ``extent`` splits evenly."""
    taken = 1
    for i, axis in enumerate(axes):
        taken *= mesh[axis]
        if extent % taken:
            return tuple(axes[:i])
    return tuple(axes)


def assigned(
    names: Iterable[str],
    asking: Sequence[tuple[Tensor, Partitions]],
    fitting: Callable[[str, tuple[str, ...]], tuple[str, ...]],
    mesh: Mapping[str, int],
) -> Split:
    """The mesh axes of every factor, in the order of ``names``; a mesh axis serves one factor.

    Args:
        names: the names of factors.
        asking: arrays and their partitions; among equally fine splits the first is taken.
        fitting: returns the longest prefix of some mesh axes over which a factor splits.
        mesh: size of every mesh axis.
    """
    used: set[str] = set()
    chosen: Split = {}
    for name in names:
        asked = [
            fitting(name, tuple(itertools.takewhile(lambda a: a not in used, split[at])))
            for each, split in asking
            if (at := each.axis(name)) is not None
        ]
        best = max(asked, key=lambda axes: parts_of(axes, mesh), default=())
        if best:
            chosen[name] = best
            used.update(best)
    return chosen
