"""The lowering rule of ``jax.lax``'s convolution to this library's kernels.

JAX has one primitive for all its convolutions, so a rule for it serves models of every library, and
lax's batching and differentiation stay unchanged. The rule determines the canonical form of their
result: from the parameters (``canonical``), and from the operations that produced the operands,
which distinguish a ``vmap`` batch of problems from feature groups, and reversed filters from
others.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jax import lax
from jax.interpreters import mlir

from jaxconv._src import compat
from jaxconv._src.call import override_state, record, selection
from jaxconv._src.conv import bilinear, canonical
from jaxconv._src.conv.bilinear import Bilinear
from jaxconv._src.lax import fold_padding
from jaxconv._src.library.native import Refusal, Selection
from jaxconv._src.problem.spec import Op, dilated_extents
from jaxconv._src.problem.spec import flops as flops_of
from jaxconv._src.sharding import explicit_mesh, partition

_log = logging.getLogger("jaxconv")


def conv_parameters(
    algorithm: tuple[str, str, str] = (selection.AUTO, selection.AUTO, selection.AUTO),
    *,
    window_strides,
    padding,
    lhs_dilation,
    rhs_dilation,
    dimension_numbers,
    feature_group_count,
    batch_group_count,
    precision,
    **_,
) -> canonical.LaxConvolution:
    """``LaxConvolution`` from the parameters of ``lax.conv_general_dilated_p``."""
    return canonical.LaxConvolution(
        window_strides=tuple(window_strides),
        padding=tuple((int(lo), int(hi)) for lo, hi in padding),
        lhs_dilation=tuple(lhs_dilation),
        rhs_dilation=tuple(rhs_dilation),
        lhs_spec=tuple(dimension_numbers.lhs_spec),
        rhs_spec=tuple(dimension_numbers.rhs_spec),
        out_spec=tuple(dimension_numbers.out_spec),
        feature_group_count=feature_group_count,
        batch_group_count=batch_group_count,
        precision=canonical.precision_name(precision),
        algorithm=algorithm,
    )


# --- what made an operand ---


def _producer(value):
    """The operation that made ``value``, or None for an argument of the function."""
    owner = value.owner
    return owner if hasattr(owner, "operands") else None


def _merged(value, axis: int) -> list[int]:
    """Extents of the axes that reshapes merged into ``axis`` from outside, outermost first."""
    found = []
    while (op := _producer(value)) is not None:
        if op.name == "stablehlo.transpose":
            axis = list(op.attributes["permutation"])[axis]
        elif op.name == "stablehlo.reshape":
            before, after = op.operands[0].type.shape, value.type.shape
            outside = math.prod(after[:axis])
            at = next((i for i in range(len(before)) if math.prod(before[:i]) == outside), None)
            if at is None:
                break
            while at < len(before) and before[at] == 1 != after[axis]:
                at += 1
            if at == len(before):
                break
            if before[at] == after[axis]:
                axis = at
            elif at + 1 < len(before) and before[at] * before[at + 1] == after[axis]:
                found.append(before[at])
                axis = at + 1
            else:
                break
        elif op.name not in ("stablehlo.convert", "stablehlo.reverse"):
            break
        value = op.operands[0]
    return found


def _independent(conv: canonical.LaxConvolution, lhs, rhs) -> int:
    """The number of groups that ``vmap`` made: both operands merged the same axes."""
    groups = conv.feature_group_count * conv.batch_group_count
    if groups == 1:
        return 1
    lhs_axis, rhs_axis, _ = conv.group_axes
    count = 1
    for a, b in zip(_merged(lhs, lhs_axis), _merged(rhs, rhs_axis), strict=False):
        if a != b or groups % (count * a):
            break
        count *= a
    return count


def _unreversed(value, axes: tuple[int, ...]):
    """The array of which ``value`` is the reverse along exactly these axes, or None."""
    op = _producer(value)
    if op is None or op.name != "stablehlo.reverse":
        return None
    return op.operands[0] if sorted(op.attributes["dimensions"]) == sorted(axes) else None


# --- the rule ---


def outside(shapes: Sequence[Sequence], window_strides: Sequence[int] = ()) -> str:
    """Why a convolution of arrays of these shapes has no canonical form, or ""."""
    if not all(compat.is_constant_shape(s) for s in shapes):
        return "symbolic shape; kernels are selected for known extents"
    if any(0 in s for s in shapes):
        return selection.EMPTY
    if any(stride < 1 for stride in window_strides):
        return f"strides {tuple(window_strides)}, which XLA refuses"
    return ""


class _Choice(NamedTuple):
    """The chosen implementation of a convolution.

    Attributes:
        form: its canonical form, with the algorithm that computes it.
        chosen: the selection. It has no instance if XLA's convolution is predicted to be faster, or
            if no kernel accepts any form; the form is then the first one.
        key: the problem key.
        declined: why the requested algorithm does not compute it; empty if it does.
    """

    form: canonical.CanonicalForm
    chosen: Selection
    key: str
    declined: tuple[Refusal, ...] = ()


def _cropped_wrongly(platform: str, conv: canonical.LaxConvolution, lhs_shape: Sequence[int]):
    """Whether XLA's convolution reads outside the input because of negative padding.

    XLA:CPU (jaxlib 0.9.2 to 0.11.2) gives wrong results for negative padding with a stride, and on
    an axis that is padded on its other side. If it crops everything, no platform is trusted.
    """
    if platform == "cpu" and any(side < 0 for pair in conv.padding for side in pair):
        return True
    extents = dilated_extents([lhs_shape[a] for a in conv.lhs_spec[2:]], conv.lhs_dilation)
    return any(
        extent + min(lo, 0) + min(hi, 0) < 1
        for extent, (lo, hi) in zip(extents, conv.padding, strict=True)
    )


def _choose(platform: str, forms: Sequence[canonical.CanonicalForm], *dtypes: np.dtype) -> _Choice:
    """The first form that the demanded algorithm accepts; if there is none, ``auto`` chooses.

    The demand is that of the first form's operation, because that form is preferred.
    """
    demand, declined = forms[0].spec.algorithm_of(forms[0].op), ()
    if not selection.applies(demand, forms[0].op):
        demand = selection.AUTO
    if demand not in selection.UNCONDITIONAL:
        try:
            for form in _demanding(demand, forms):
                chosen, key = bilinear.select(platform, form.op, form.spec, form.sizes, *dtypes)
                if chosen.instance is not None:
                    return _Choice(form, chosen, key)
                declined = declined or chosen.refusals
        except ValueError as error:  # not an algorithm of this platform
            declined = (Refusal(demand, str(error)),)
        demand = selection.AUTO
    return _first_accepted(platform, _demanding(demand, forms), *dtypes)._replace(declined=declined)


def _demanding(
    algorithm: str, forms: Sequence[canonical.CanonicalForm]
) -> list[canonical.CanonicalForm]:
    """The forms to which an algorithm applies, with the demand for it."""
    return [
        dataclasses.replace(
            form, spec=dataclasses.replace(form.spec, algorithm=(algorithm, algorithm, algorithm))
        )
        for form in forms
        if selection.applies(algorithm, form.op)
    ]


def _first_accepted(
    platform: str,
    forms: Sequence[canonical.CanonicalForm],
    dtype: np.dtype,
    out_dtype: np.dtype,
) -> _Choice:
    """The first form that a kernel accepts, if necessary with a dilated and cropped copy of x."""
    refused: _Choice | None = None
    for select in Bilinear.select, Bilinear.select_beforehand:
        for form in forms:
            call = Bilinear(form.op, form.spec, out_dtype)
            chosen, key = select(call, platform, form.sizes, dtype)
            found = _Choice(form, chosen, key)
            if chosen.instance is not None or chosen.xla_is_faster:
                return found
            refused = refused or found
    assert refused is not None, "a convolution has a form"
    return refused


def lower(platform: str, original, ctx, lhs, rhs, **params):
    """Lowers a lax convolution: through our primitives, or by ``original``, lax's own rule."""
    (lhs_aval, rhs_aval), (out_aval,) = ctx.avals_in, ctx.avals_out
    is_complex = np.issubdtype(out_aval.dtype, np.complexfloating)
    algorithm = override_state.algorithms_of_lax()
    if is_complex or not (algorithm or record.wanted()):
        return original(ctx, lhs, rhs, **params)  # lax makes three real ones

    def leave(chosen: Selection, form: canonical.CanonicalForm | None = None, key: str = ""):
        """Leaves the convolution to lax, and records why."""
        op = form.op.value if form else Op.FPROP.value
        if algorithm:
            reasons = selection.reasons(chosen.refusals)
            _log.info("%s (lax's) on %s goes to XLA: %s", op, platform, reasons)
        if form:
            precision, flops = form.spec.precision, flops_of(form.spec, form.sizes)
        else:
            taps = math.prod(rhs_aval.shape[a] for a in params["dimension_numbers"].rhs_spec[1:])
            precision, flops = "default", 2 * out_aval.size * taps
        results = original(ctx, lhs, rhs, **params)
        return record.emit(ctx, op, key, precision, platform, flops, chosen, results)

    shapes = [a.shape for a in (*ctx.avals_in, *ctx.avals_out)]
    if reason := outside(shapes, params["window_strides"]):
        return leave(selection.refused(reason))
    conv = conv_parameters(*([algorithm] if algorithm else []), **params)
    given_filter = _unreversed(rhs, conv.rhs_spec[2:])
    forms = canonical.forms(
        conv,
        lhs_aval.shape,
        rhs_aval.shape,
        out_aval.shape,
        batch=_independent(conv, lhs, rhs),
        filter_reversed=given_filter is not None,
    )
    if not algorithm:
        reason = "a lax convolution, and neither jaxconv.install() nor override() is in force"
        return leave(selection.refused(reason), forms[0])
    if partition.devices_of(ctx) is not None:
        # The operand with the smaller window counts as the filter, which is not split along its
        # window: the form of a weight gradient would gather arrays that a forward pass leaves in
        # place.
        forms.sort(key=lambda form: math.prod(form.spec.filter_spatial))
    elif not conv.exchanged:
        # A weight gradient also multiplies elements of both operands by zeros of the padding. Since
        # 0 * Inf is NaN, an Inf in the image would reach every element of the result.
        forms = [form for form in forms if form.op is not Op.WGRAD]
    refused: tuple = ()
    while forms:
        form, chosen, key, declined = _choose(platform, forms, lhs_aval.dtype, out_aval.dtype)
        if declined:
            _log.info("%s on %s: %s", form.op.value, platform, selection.reasons(declined))
        to_xla = chosen.instance is None and not bilinear.xla_lacks(platform, lhs_aval.dtype)
        if to_xla and not _cropped_wrongly(platform, conv, lhs_aval.shape):
            with record.located(ctx, declined):
                return leave(chosen, form, key)
        take_filter = form.op is Op.DGRAD and given_filter is not None
        apply = functools.partial(_apply, form, out_aval=out_aval, filter_reversed=take_filter)
        try:
            with record.located(ctx, declined):
                return mlir.lower_fun(apply, multiple_results=False)(
                    ctx, lhs, given_filter if take_filter else rhs
                )
        except compat.ShardingTypeError as error:
            # lax's rules for explicit meshes allow filters that are split along their window, which
            # a forward pass does not. XLA's partitioning of these can give wrong results, so
            # another form of the same convolution is tried first.
            refused = refused or (selection.refused(str(error)), form, key)
            forms = [f for f in forms if (f.op, f.swapped) != (form.op, form.swapped)]
    return leave(*refused)


def _apply(form: canonical.CanonicalForm, lhs, rhs, *, out_aval, filter_reversed: bool):
    out = form.apply(lhs, rhs, out_aval.dtype, filter_reversed=filter_reversed)
    return explicit_mesh.like(out, out_aval)


_registering = threading.Lock()
_registered: set[str] = set()


def register() -> None:
    """Installs the rule permanently; it reads ``algorithms_of_lax`` each time it is used.

    So does the preceding ``fold_padding``.
    """
    with _registering:
        if not _registered:
            compat.rewrite_before_lowering(fold_padding.before_lowering)
        for platform in set(selection.PLATFORMS) - _registered:
            original = compat.lowering_rule(lax.conv_general_dilated_p, platform)
            mlir.register_lowering(
                lax.conv_general_dilated_p,
                functools.partial(lower, platform, original),
                platform=platform,
                # A cached lowering sees arguments instead of the operations that made the operands.
                cacheable=False,
            )
            _registered.add(platform)
