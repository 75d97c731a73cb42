"""Windows of pooling."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxconv._src.problem.spec import DTYPE_NAMES


@dataclasses.dataclass(frozen=True)
class Windows:
    """The windows of pooling on an array, by axis.

    Attributes:
        shape: the array's extents.
        sizes: the extents of a window.
        strides: from window to window; along an axis with a single window, the padded extent.
        padding: the numbers of elements before and after the array, filled with -inf.
    """

    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """The extents of the pooled array."""
        axes = zip(self.shape, self.sizes, self.strides, self.padding, strict=True)
        return tuple((n + sum(pad) - size) // step + 1 for n, size, step, pad in axes)

    def of_part(self, parts: Callable[[str], int]) -> Windows:
        """The windows of one device if examples and channels are split into ``parts``."""
        n, *spatial, c = self.shape
        return dataclasses.replace(self, shape=(n // parts("n"), *spatial, c // parts("c")))

    @property
    def overlaps(self) -> tuple[int, ...]:
        """The most windows that contain an element, along each axis."""
        return tuple(-(-size // s) for size, s in zip(self.sizes, self.strides, strict=True))

    @property
    def weights(self) -> tuple[int, ...]:
        """The weights whose dot product with a position in a window is its place."""
        # Row-major weights for window extents rounded up to a multiple of the stride.
        extended = [m * s for m, s in zip(self.overlaps, self.strides, strict=True)]
        return tuple(math.prod(extended[axis + 1 :]) for axis in range(len(extended)))

    @property
    def places(self) -> int:
        return math.prod(m * s for m, s in zip(self.overlaps, self.strides, strict=True))

    def place(self, position: Iterable[int]) -> int:
        """The place of a position in a window."""
        return sum(p * w for p, w in zip(position, self.weights, strict=True))

    def key(self, name: str, dtype: np.dtype, words: Iterable[str]) -> str | None:
        """The key of a pass over arrays of this type, or None if no call expresses it."""
        shape, spatial = self.shape, slice(1, -1)
        short = DTYPE_NAMES.get(dtype.name) if jnp.issubdtype(dtype, jnp.floating) else None
        extents = all(isinstance(n, int) and n > 0 for n in shape) and 3 <= len(shape) <= 5
        if short is None or not extents:
            return None
        for axis in (0, len(shape) - 1):
            if (self.sizes[axis], self.strides[axis], self.padding[axis]) != (1, 1, (0, 0)):
                return None
        if min(itertools.chain.from_iterable(self.padding)) < 0:
            return None
        low = [pad for pad, _ in self.padding]
        by_axis = {"i": shape, "f": self.sizes, "o": self.counts, "s": self.strides, "p": low}
        axes = [letter + "x".join(map(str, each[spatial])) for letter, each in by_axis.items()]
        return " ".join([name, short, f"b{shape[0]}", f"c{shape[-1]}", *axes, *words])

    def attributes(self) -> dict[str, Any]:
        """The attributes of a custom call, by spatial axis."""
        low = [pad for pad, _ in self.padding]
        named = {"sizes": self.sizes, "strides": self.strides, "padding": low}
        return {name: np.asarray(each[1:-1], np.int64) for name, each in named.items()}
