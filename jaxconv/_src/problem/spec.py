"""ConvSpec: a convolution's static parameters, and the shape algebra of its operations.

A convolution relates an input x, a filter w and an output y. Each tensor has a *canonical* order of
axes: ``x (batch?, n, *spatial, c)``, ``w (batch?, *spatial, c / groups, k)``, ``y (batch?, n,
*spatial, k)``. Arrays keep the caller's order; ``x_axes[i]`` is the position, in the array, of
canonical axis ``i``. The optional leading ``batch`` axis counts independent convolutions, each with
its own filter.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence

import numpy as np
from jax.core import max_dim

Pairs = tuple[tuple[int, int], ...]

# The largest growth of an input if the zeros of its dilation are stored. Beyond it, XLA computes
# the convolution, and stores no zeros.
EXPLICIT_GROWTH = 64


class Op(enum.Enum):
    """The three operations, closed under transposition: each is linear in both operands."""

    FPROP = "fprop"  # (x, w)  -> y
    DGRAD = "dgrad"  # (dy, w) -> dx
    WGRAD = "wgrad"  # (x, dy) -> dw

    @property
    def roles(self) -> tuple[str, str, str]:
        """The tensors that are the left operand, the right operand and the result."""
        return {"fprop": ("x", "w", "y"), "dgrad": ("y", "w", "x"), "wgrad": ("x", "y", "w")}[
            self.value
        ]


def known(extent: object) -> bool:
    """Whether an extent is a number, not an expression in dimension variables (jax.export)."""
    return isinstance(extent, int | np.integer)


def dilated_extent(extent: int, dilation: int) -> int:
    """Extent of an axis with ``dilation - 1`` zeros between its elements."""
    return 0 if extent == 0 else (extent - 1) * dilation + 1


def dilated_extents(extents: Sequence[int], dilations: Sequence[int]) -> list[int]:
    """``dilated_extent`` of every axis."""
    return [dilated_extent(e, d) for e, d in zip(extents, dilations, strict=True)]


def output_extent(
    extent: int, window: int, stride: int, lhs_dilation: int, dilation: int, lo: int, hi: int
) -> int:
    """Positions of a dilated window in a dilated, padded axis; 0 if it does not fit, as in lax."""
    padded = dilated_extent(extent, lhs_dilation) + lo + hi
    return max_dim((padded - dilated_extent(window, dilation)) // stride + 1, 0)


def check_size(name: str, shape: Sequence[int], dtype: np.dtype) -> None:
    """Refuses an array of a size at which XLA (jaxlib 0.10.2) ends the process.

    Raises:
        ValueError: its size in bytes exceeds 63 bits.
    """
    if all(map(known, shape)):
        size = math.prod(shape) * np.dtype(dtype).itemsize
        if max((size, *shape)) >= 2**63:
            raise ValueError(f"{name}: the shape {tuple(shape)} has {size:.2g} bytes")


def fitting_padding(
    lows: Sequence[int],
    inputs: Sequence[int],
    windows: Sequence[int],
    outputs: Sequence[int],
    *,
    reflected: bool = False,
) -> Pairs:
    """The padding with these low sides for which input + low + high = output + window - 1.

    All extents are dilated: input, filter and, by the stride, output.

    Args:
        lows: low padding of the convolution, or of the one whose data gradient it is.
        inputs, windows, outputs: dilated extents.
        reflected: ``lows`` belong to the other convolution, whose window is the reverse.
    """
    pairs = []
    for lo, i, r, p in zip(lows, inputs, windows, outputs, strict=True):
        lo = r - 1 - lo if reflected else lo
        pairs.append((lo, p + r - 1 - i - lo))
    return tuple(pairs)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Extents of one convolution, independent of its arrays' axis order."""

    batch: int
    n: int
    c: int
    k: int
    in_spatial: tuple[int, ...]
    filter_spatial: tuple[int, ...]
    out_spatial: tuple[int, ...]

    @property
    def empty(self) -> bool:
        """Whether a tensor has no elements; the result is then empty or zero."""
        extents = (self.batch, self.n, self.c, self.k)
        return 0 in extents + self.in_spatial + self.filter_spatial + self.out_spatial


@dataclasses.dataclass(frozen=True)
class ConvSpec:
    """Everything about a convolution except arrays: hashable, a primitive's parameter."""

    stride: tuple[int, ...]
    padding: Pairs
    lhs_dilation: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    in_spatial: tuple[int, ...]
    filter_spatial: tuple[int, ...]
    x_axes: tuple[int, ...]
    w_axes: tuple[int, ...]
    y_axes: tuple[int, ...]
    batched: bool = False
    precision: str = "default"  # "default", "high" or "highest"
    algorithm: tuple[str, str, str] = ("auto", "auto", "auto")  # for fprop, dgrad, wgrad

    @property
    def rank(self) -> int:
        return len(self.stride)

    @property
    def out_spatial(self) -> tuple[int, ...]:
        return tuple(
            output_extent(i, r, s, ld, d, lo, hi)
            for i, r, s, ld, d, (lo, hi) in zip(
                self.in_spatial,
                self.filter_spatial,
                self.stride,
                self.lhs_dilation,
                self.dilation,
                self.padding,
                strict=True,
            )
        )

    @property
    def crops_everything(self) -> bool:
        """Whether negative padding crops the whole input; the results are then zeros."""
        return not self.symbolic and min(explicit_input(self).in_spatial, default=1) < 1

    @property
    def symbolic(self) -> bool:
        """Whether an extent or a padding is an expression in dimension variables."""
        pads = (side for pair in self.padding for side in pair)
        return not all(map(known, (*self.in_spatial, *self.filter_spatial, *pads)))

    @property
    def dilated_spatial(self) -> tuple[list[int], list[int], list[int]]:
        """Spatial extents of x, w and y, dilated as the convolution reads them."""
        return (
            dilated_extents(self.in_spatial, self.lhs_dilation),
            dilated_extents(self.filter_spatial, self.dilation),
            dilated_extents(self.out_spatial, self.stride),
        )

    def axes(self, role: str) -> tuple[int, ...]:
        """Array positions of the canonical axes of tensor ``role`` ("x", "w" or "y")."""
        return {"x": self.x_axes, "w": self.w_axes, "y": self.y_axes}[role]

    def axis(self, role: str, name: str) -> int:
        """Array position of one named axis: "batch", "n", "c" or "k" of tensor ``role``."""
        axes = self.axes(role)
        if name == "batch":
            return axes[0]
        if name == "n":
            return axes[1 if self.batched else 0]
        return axes[-2] if (role, name) == ("w", "c") else axes[-1]

    def algorithm_of(self, op: Op) -> str:
        return self.algorithm[list(Op).index(op)]

    def sizes(self, op: Op, lhs_shape: Sequence[int], rhs_shape: Sequence[int]) -> Sizes:
        """The extents from the operands of ``op``, which must agree."""
        shapes = dict(zip(op.roles, (lhs_shape, rhs_shape), strict=False))

        def extent(role: str, name: str) -> int:
            return shapes[role][self.axis(role, name)]

        first = op.roles[0]
        return Sizes(
            batch=extent(first, "batch") if self.batched else 1,
            n=extent(first, "n"),
            c=extent("x", "c") if "x" in shapes else extent("w", "c") * self.groups,
            k=extent("y", "k") if "y" in shapes else extent("w", "k"),
            in_spatial=self.in_spatial,
            filter_spatial=self.filter_spatial,
            out_spatial=self.out_spatial,
        )

    def shape(self, role: str, sizes: Sizes) -> tuple[int, ...]:
        """Shape of tensor ``role`` in the array's axis order."""
        canonical = {
            "x": (sizes.n, *sizes.in_spatial, sizes.c),
            "w": (*sizes.filter_spatial, sizes.c // self.groups, sizes.k),
            "y": (sizes.n, *sizes.out_spatial, sizes.k),
        }[role]
        if self.batched:
            canonical = (sizes.batch, *canonical)
        shape = [0] * len(canonical)
        for extent, axis in zip(canonical, self.axes(role), strict=True):
            shape[axis] = extent
        return tuple(shape)

    def with_batch(self, x: int | None, w: int | None, y: int | None) -> ConvSpec:
        """The spec of a batched problem with the arrays' batch axis at these positions.

        None, for the result, means that its batch axis comes first.
        """

        def insert(axes: tuple[int, ...], position: int | None) -> tuple[int, ...]:
            at = 0 if position is None else position
            return (at, *(a + (a >= at) for a in axes))

        return dataclasses.replace(
            self,
            batched=True,
            x_axes=insert(self.x_axes, x),
            w_axes=insert(self.w_axes, w),
            y_axes=insert(self.y_axes, y),
        )

    def without_batch(self) -> ConvSpec:
        """The spec of one convolution of a batched problem, without the batch axis."""

        def remove(axes: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(a - (a > axes[0]) for a in axes[1:])

        return dataclasses.replace(
            self,
            batched=False,
            x_axes=remove(self.x_axes),
            w_axes=remove(self.w_axes),
            y_axes=remove(self.y_axes),
        )


def explicit_input(spec: ConvSpec) -> ConvSpec:
    """The same convolution, with an input array that is already dilated and cropped.

    An extent below 1 means that negative padding crops the whole input; the result is zero.
    """
    extents, pairs = [], []
    for extent, dilation, (lo, hi) in zip(
        spec.in_spatial, spec.lhs_dilation, spec.padding, strict=True
    ):
        extents.append(dilated_extent(extent, dilation) + min(lo, 0) + min(hi, 0))
        pairs.append((max(lo, 0), max(hi, 0)))
    return dataclasses.replace(
        spec, in_spatial=tuple(extents), padding=tuple(pairs), lhs_dilation=(1,) * spec.rank
    )


def as_fprop(op: Op, spec: ConvSpec) -> ConvSpec:
    """The forward convolution that computes ``op``, fprop or dgrad; ignore its axis orders.

    dgrad is a convolution of dy with the reversed filter and swapped channels.
    """
    if op is Op.FPROP:
        return spec
    x, window, y = spec.dilated_spatial
    padding = fitting_padding([lo for lo, _ in spec.padding], y, window, x, reflected=True)
    return dataclasses.replace(
        spec,
        in_spatial=spec.out_spatial,
        stride=spec.lhs_dilation,
        lhs_dilation=spec.stride,
        padding=padding,
    )


# Dtypes with a name in problem keys; no kernel accepts others.
DTYPE_NAMES = {
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "int8": "s8",
    "int32": "s32",
}


def flops(spec: ConvSpec, sizes: Sizes) -> int:
    """Multiplications and additions in the definition, padding included."""
    pixels = math.prod(sizes.out_spatial) * math.prod(sizes.filter_spatial)
    return 2 * sizes.batch * sizes.n * pixels * (sizes.c // spec.groups) * sizes.k


def problem_key(
    op: Op,
    spec: ConvSpec,
    sizes: Sizes,
    operand_dtype: np.dtype,
    out_dtype: np.dtype,
    krsc: bool = False,
    epilogue: Sequence[str] = (),
) -> str:
    """The problem key, a line of text that ``cc/core/conv_problem.h`` defines and parses.

    ``krsc``: the filter is stored as (k, spatial, c); ``epilogue``: the words of its terms.

    Raises:
        KeyError: a dtype has no name in problem keys.
    """
    names = dict.fromkeys("xwy", DTYPE_NAMES[np.dtype(operand_dtype).name])
    names[op.roles[2]] = DTYPE_NAMES[np.dtype(out_dtype).name]
    return key_of(op, tuple(names.values()), spec, sizes, [*["krsc"] * krsc, *epilogue])


def key_of(
    op: Op, dtypes: Sequence[str], spec: ConvSpec, sizes: Sizes, words: Sequence[str]
) -> str:
    """A problem key from the names of the dtypes of x, w and y, and the words at its end."""

    def spatial(values: Sequence[object]) -> str:
        return "x".join(map(str, values))

    return " ".join(
        (
            op.value,
            ":".join(dtypes),
            spec.precision,
            f"b{sizes.batch}",
            f"n{sizes.n}",
            f"g{spec.groups}",
            f"c{sizes.c}",
            f"k{sizes.k}",
            f"i{spatial(sizes.in_spatial)}",
            f"f{spatial(sizes.filter_spatial)}",
            f"o{spatial(sizes.out_spatial)}",
            f"s{spatial(spec.stride)}",
            f"l{spatial(spec.lhs_dilation)}",
            f"d{spatial(spec.dilation)}",
            f"p{spatial([f'{lo}_{hi}' for lo, hi in spec.padding])}",
            *words,
        )
    )
