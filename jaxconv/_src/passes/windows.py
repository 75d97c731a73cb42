"""Windows of pooling."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable


@dataclasses.dataclass(frozen=True)
class Windows:
    """How windows lie on an array, by axes.

    Attributes:
        shape: the array's extents.
        sizes: of a window.
        strides: from window to window; along an axis with a single one, the padded extent.
        padding: elements in front and behind, of the lowest value.
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
        """Those of one device, where examples and channels are split into so many parts."""
        n, *spatial, c = self.shape
        return dataclasses.replace(self, shape=(n // parts("n"), *spatial, c // parts("c")))

    @property
    def overlaps(self) -> tuple[int, ...]:
        """How many windows an element may lie in."""
        return tuple(-(-size // s) for size, s in zip(self.sizes, self.strides, strict=True))

    @property
    def weights(self) -> tuple[int, ...]:
        """Of a position in a window, whose product with them is the number of the place."""
        # Of windows extended to whole strides, so that a position is stride * j + a, all a and j.
        extended = [m * s for m, s in zip(self.overlaps, self.strides, strict=True)]
        return tuple(math.prod(extended[axis + 1 :]) for axis in range(len(extended)))

    @property
    def places(self) -> int:
        return math.prod(m * s for m, s in zip(self.overlaps, self.strides, strict=True))

    def place(self, position: Iterable[int]) -> int:
        """The number of a position in a window."""
        return sum(p * w for p, w in zip(position, self.weights, strict=True))
