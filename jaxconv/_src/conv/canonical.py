"""Canonical forms of a convolution in ``jax.lax``'s form: fprop, dgrad and wgrad.

``lax.conv_general_dilated`` is one operation with many parameters. lax writes the gradients of a
convolution in the same form: batch and channels are swapped, strides become dilations, filters are
reversed. Up to this renaming, every convolution can be written as any of these operations:

    fprop           lhs is x,  rhs is w,           the result is y
    dgrad           lhs is dy, rhs is w, reversed, the result is dx
    wgrad           lhs is x,  rhs is dy,          the result is dw
    wgrad, swapped  lhs is dy, rhs is x,           the result is dw, reversed

All compute the same sums. They differ in which arrays have the kernels' axis order (channels last),
and in which array is dilated by inserted zeros; ``forms`` sorts them by these criteria. Feature
groups and batch groups are groups in one of the forms, and independent convolutions (a batch of
problems) in the others.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxconv._src import compat
from jaxconv._src.conv import primitives
from jaxconv._src.problem.spec import (
    ConvSpec,
    Op,
    Pairs,
    Sizes,
    dilated_extents,
    fitting_padding,
    output_extent,
)
from jaxconv._src.sharding import explicit_mesh


def precision_name(precision: Any) -> str:
    """The higher of the two operands' precisions, because one kernel serves both.

    A ``lax.DotAlgorithmPreset`` applies to matrix products; for a convolution lax treats it as
    None.

    Raises:
        ValueError: not in a form that lax accepts.
    """
    pair = compat.canonicalize_precision(precision)
    if not isinstance(pair, tuple):
        return "default"
    levels: list[Any] = list(pair)
    return max(levels, key=lambda level: level.value).name.lower()


@dataclasses.dataclass(frozen=True)
class LaxConvolution:
    """The parameters of ``lax.conv_general_dilated`` in resolved form."""

    window_strides: tuple[int, ...]
    padding: Pairs
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]
    lhs_spec: tuple[int, ...]  # axes of (batch, feature, *spatial)
    rhs_spec: tuple[int, ...]  # axes of (out feature, in feature, *spatial)
    out_spec: tuple[int, ...]  # axes of (batch, feature, *spatial)
    feature_group_count: int = 1
    batch_group_count: int = 1
    precision: str = "default"
    algorithm: tuple[str, str, str] = ("auto", "auto", "auto")

    @property
    def rank(self) -> int:
        return len(self.window_strides)

    @property
    def exchanged(self) -> bool:
        """Whether batch and features of lhs are swapped, as in a weight gradient."""
        return self.lhs_spec[0] > self.lhs_spec[1]

    def with_window(self) -> LaxConvolution:
        """The same matrix product, of arrays with an additional middle axis of extent 1."""

        def insert(spec):
            return (*(2 * axis for axis in spec), 1)

        return dataclasses.replace(
            self,
            window_strides=(1,),
            padding=((0, 0),),
            lhs_dilation=(1,),
            rhs_dilation=(1,),
            lhs_spec=insert(self.lhs_spec),
            rhs_spec=insert(self.rhs_spec),
            out_spec=insert(self.out_spec),
        )

    def out_shape(self, lhs_shape: Sequence[int], rhs_shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the result, as lax infers it."""
        spatial = (
            output_extent(lhs_shape[i], rhs_shape[r], s, ld, d, lo, hi)
            for i, r, s, ld, d, (lo, hi) in zip(
                self.lhs_spec[2:],
                self.rhs_spec[2:],
                self.window_strides,
                self.lhs_dilation,
                self.rhs_dilation,
                self.padding,
                strict=True,
            )
        )
        n = lhs_shape[self.lhs_spec[0]] // self.batch_group_count
        shape = [0] * len(lhs_shape)
        for axis, extent in zip(
            self.out_spec, (n, rhs_shape[self.rhs_spec[0]], *spatial), strict=True
        ):
            shape[axis] = extent
        return tuple(shape)

    @property
    def group_axes(self) -> tuple[int, int, int]:
        """Axes of lhs, rhs and result that hold the groups, outermost."""
        lhs = self.lhs_spec[0] if self.batch_group_count > 1 else self.lhs_spec[1]
        return lhs, self.rhs_spec[0], self.out_spec[1]


@dataclasses.dataclass(frozen=True)
class CanonicalForm:
    """One operation of our primitives that computes a ``LaxConvolution``."""

    op: Op
    spec: ConvSpec
    sizes: Sizes
    swapped: bool = False  # the lax rhs is the primitive's left operand
    batch: int = 1  # groups taken as independent convolutions
    group_axes: tuple[int, int, int] = (0, 0, 0)  # where lhs, rhs and result hold them
    reversed_axes: tuple[int, ...] = ()  # spatial axes to reverse: of w (dgrad) or of dw (swapped)
    pointwise: bool = False  # no spatial axes: computed with one of extent 1, the middle axis

    @property
    def in_order(self) -> bool:
        """Whether the three arrays have the kernels' axis order."""
        axes = (self.spec.x_axes, self.spec.w_axes, self.spec.y_axes)
        return all(tuple(a) == tuple(range(len(a))) for a in axes)

    def apply(
        self, lhs: jax.Array, rhs: jax.Array, out_dtype: np.dtype, *, filter_reversed: bool = False
    ) -> jax.Array:
        """Computes the convolution.

        Args:
            lhs, rhs: operands in lax's form.
            out_dtype: dtype of the result.
            filter_reversed: rhs is w, of which the lax convolution would read the reverse (dgrad).
        """
        if self.pointwise:
            lhs, rhs = jnp.expand_dims(lhs, 1), jnp.expand_dims(rhs, 1)
        if self.op is Op.DGRAD and self.reversed_axes and not filter_reversed:
            rhs = lax.rev(rhs, self.reversed_axes)
        if self.batch > 1:
            lhs, rhs = (
                explicit_mesh.move_groups(a, axis, None, self.batch)
                for a, axis in zip((lhs, rhs), self.group_axes, strict=False)
            )
        if self.op is Op.DGRAD:
            c, k = self.spec.axis("w", "c"), self.spec.axis("w", "k")
            rhs = explicit_mesh.move_groups(rhs, c, k, self.spec.groups)
        operands = (rhs, lhs) if self.swapped else (lhs, rhs)
        out = primitives.bind(self.op, *operands, self.spec, out_dtype)
        if self.batch > 1:
            axis = self.group_axes[2]
            out = explicit_mesh.merge_axes(jnp.moveaxis(out, 0, axis), axis, 2)
        if self.swapped and self.reversed_axes:
            out = lax.rev(out, self.reversed_axes)
        return lax.squeeze(out, (1,)) if self.pointwise else out


class _Array(NamedTuple):
    """One of lax's arrays, and the positions of two axes in its spec."""

    name: str
    first: int
    last: int


class _Parts(NamedTuple):
    """The roles of lax's arrays and steps in an operation."""

    x: _Array  # n first, c last
    w: _Array  # c first, k last
    y: _Array  # n first, k last
    stride: str
    lhs_dilation: str
    dilation: str


# By operation, and whether it is swapped.
_PARTS = {
    (Op.FPROP, False): _Parts(
        x=_Array("lhs", 0, 1),
        w=_Array("rhs", 1, 0),
        y=_Array("out", 0, 1),
        stride="window_strides",
        lhs_dilation="lhs_dilation",
        dilation="rhs_dilation",
    ),
    (Op.DGRAD, False): _Parts(
        x=_Array("out", 0, 1),
        w=_Array("rhs", 0, 1),
        y=_Array("lhs", 0, 1),
        stride="lhs_dilation",
        lhs_dilation="window_strides",
        dilation="rhs_dilation",
    ),
    (Op.WGRAD, False): _Parts(
        x=_Array("lhs", 1, 0),
        w=_Array("out", 0, 1),
        y=_Array("rhs", 1, 0),
        stride="rhs_dilation",
        lhs_dilation="lhs_dilation",
        dilation="window_strides",
    ),
    (Op.WGRAD, True): _Parts(
        x=_Array("rhs", 1, 0),
        w=_Array("out", 1, 0),
        y=_Array("lhs", 1, 0),
        stride="lhs_dilation",
        lhs_dilation="rhs_dilation",
        dilation="window_strides",
    ),
}


def _window(
    conv: LaxConvolution, op: Op, swapped: bool, spatial: dict[str, tuple[int, ...]]
) -> dict[str, Any]:
    """The fields of the operation's ``ConvSpec`` that describe its window and axes.

    Args:
        conv: the convolution.
        op, swapped: the form.
        spatial: the spatial extents of lhs, rhs and out.
    """
    parts = _PARTS[op, swapped]
    specs = {"lhs": conv.lhs_spec, "rhs": conv.rhs_spec, "out": conv.out_spec}
    (x, y), w = (specs[parts.x.name], specs[parts.y.name]), specs[parts.w.name]
    stride, lhs_dilation, dilation = (getattr(conv, name) for name in parts[3:])
    in_spatial, filter_spatial = spatial[parts.x.name], spatial[parts.w.name]
    padding = conv.padding
    if op is not Op.FPROP:
        padding = fitting_padding(
            [lo for lo, _ in padding],
            dilated_extents(in_spatial, lhs_dilation),
            dilated_extents(filter_spatial, dilation),
            dilated_extents(spatial[parts.y.name], stride),
            reflected=op is Op.DGRAD or swapped,
        )
    return dict(
        stride=stride,
        padding=padding,
        lhs_dilation=lhs_dilation,
        dilation=dilation,
        in_spatial=in_spatial,
        filter_spatial=filter_spatial,
        x_axes=(x[parts.x.first], *x[2:], x[parts.x.last]),
        w_axes=(*w[2:], w[parts.w.first], w[parts.w.last]),
        y_axes=(y[parts.y.first], *y[2:], y[parts.y.last]),
    )


def form(
    conv: LaxConvolution,
    op: Op,
    lhs_shape: Sequence[int],
    rhs_shape: Sequence[int],
    out_shape: Sequence[int],
    *,
    batch: int = 1,
    swapped: bool = False,
) -> CanonicalForm:
    """The canonical form of ``conv`` with this operation; no tensor may be empty.

    Args:
        conv: the convolution.
        op: the operation.
        lhs_shape, rhs_shape, out_shape: the arrays' shapes, in their own axis order.
        batch: the number of groups to treat as independent convolutions; all of them if ``op``
            cannot have the rest as its groups.
        swapped: for wgrad, lhs is dy and rhs is x.
    """
    if pointwise := conv.rank == 0:
        conv = conv.with_window()
        lhs_shape, rhs_shape, out_shape = (
            (s[0], 1, s[1]) for s in (lhs_shape, rhs_shape, out_shape)
        )
    features, batches = conv.feature_group_count, conv.batch_group_count
    foreign = batches if op is not Op.WGRAD else features
    if swapped:
        batch = features * batches
    elif foreign > 1:
        batch = foreign
    groups = features * batches // batch
    lhs, rhs, out = conv.lhs_spec, conv.rhs_spec, conv.out_spec
    spatial = {
        "lhs": tuple(lhs_shape[a] for a in lhs[2:]),
        "rhs": tuple(rhs_shape[a] for a in rhs[2:]),
        "out": tuple(out_shape[a] for a in out[2:]),
    }
    spec = ConvSpec(
        **_window(conv, op, swapped, spatial),
        groups=groups,
        precision=conv.precision,
        algorithm=conv.algorithm,
    )
    outer, inner, rest = rhs_shape[rhs[0]] // batch, rhs_shape[rhs[1]] * groups, out_shape[out[0]]
    if swapped:
        n, c, k = inner, outer, rest
    else:
        n, c, k = {
            Op.FPROP: (rest, inner, outer),
            Op.DGRAD: (rest, outer, inner),
            Op.WGRAD: (rhs_shape[rhs[1]], rest * groups, outer),
        }[op]
    sizes = Sizes(batch, n, c, k, spec.in_spatial, spec.filter_spatial, spec.out_spatial)
    reversed_axes = ()
    if op is Op.DGRAD or swapped:
        window_axes = (rhs if op is Op.DGRAD else out)[2:]
        extents = zip(window_axes, spec.filter_spatial, strict=True)
        reversed_axes = tuple(axis for axis, extent in extents if extent > 1)
    if batch > 1:
        spec = spec.with_batch(x=0, w=0, y=0)
    return CanonicalForm(op, spec, sizes, swapped, batch, conv.group_axes, reversed_axes, pointwise)


def forms(
    conv: LaxConvolution,
    lhs_shape: Sequence[int],
    rhs_shape: Sequence[int],
    out_shape: Sequence[int],
    *,
    batch: int = 1,
    filter_reversed: bool = False,
) -> list[CanonicalForm]:
    """Every canonical form of ``conv``, the preferred one first.

    The criteria, in order of importance: x is not dilated; the arrays have the kernels' axis order;
    the form is the likely meaning of a program in another layout: batch before channels is a
    forward pass (dgrad if the filter is reversed), otherwise it is wgrad.

    Args:
        conv: the convolution.
        lhs_shape, rhs_shape, out_shape: the arrays' shapes, none of them empty.
        batch: groups known to be independent convolutions (made by ``vmap``).
        filter_reversed: rhs is known to be a reversed array.
    """
    shapes = (lhs_shape, rhs_shape, out_shape)
    passes = [form(conv, op, *shapes, batch=batch) for op in (Op.FPROP, Op.DGRAD)]
    if filter_reversed:
        passes.reverse()
    wgrads = [form(conv, Op.WGRAD, *shapes, batch=batch, swapped=s) for s in (False, True)]

    def unnatural(form: CanonicalForm) -> tuple[bool, bool]:
        one = form
        if form.batch > 1:
            one = dataclasses.replace(form, spec=form.spec.without_batch())
        return math.prod(form.spec.lhs_dilation) > 1, not one.in_order

    return sorted([*wgrads, *passes] if conv.exchanged else [*passes, *wgrads], key=unnatural)
