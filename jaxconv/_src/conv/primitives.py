"""The primitives conv_fprop, conv_dgrad and conv_wgrad.

Each is bilinear, and transposing one in either operand gives another of the three:

    fprop(x, w)  -> y     transposes to  dgrad(dy, w), wgrad(x, dy)
    dgrad(dy, w) -> dx    transposes to  fprop(dx', w), wgrad(dx', dy)
    wgrad(x, dy) -> dw    transposes to  dgrad(dy, dw'), fprop(x, dw')

so derivatives of any order, forward and reverse, stay inside the family. All three take the same
static parameters: a ``ConvSpec`` and the dtype of the result.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad

from jaxconv._src import compat
from jaxconv._src.call import call
from jaxconv._src.conv.bilinear import PRIMITIVES, Bilinear
from jaxconv._src.problem.spec import ConvSpec, Op, check_size
from jaxconv._src.sharding import explicit_mesh, partition

conv_fprop_p, conv_dgrad_p, conv_wgrad_p = PRIMITIVES.values()


def bind(op: Op, lhs: jax.Array, rhs: jax.Array, spec: ConvSpec, out_dtype: np.dtype) -> jax.Array:
    """Applies ``op`` to operands of any two dtypes of one kind.

    Operands of different widths (a float32 cotangent and a bfloat16 filter) are computed in the
    wider dtype, and the result is rounded once, as in lax.

    Raises:
        ValueError: the algorithm that ``spec`` demands does not accept this problem, or the
            result's size exceeds 64 bits.
    """
    out_shape = spec.shape(op.roles[2], spec.sizes(op, lhs.shape, rhs.shape))
    check_size("result", out_shape, out_dtype)
    common = compat.wider_dtype(lhs.dtype, rhs.dtype)
    lhs, rhs = (a if a.dtype == common else lax.convert_element_type(a, common) for a in (lhs, rhs))
    kernel_dtype = compat.wider_dtype(common, out_dtype)
    call.check(Bilinear(op, spec, np.dtype(kernel_dtype)), lhs.shape, rhs.shape, common)
    lhs, rhs = compat.match_varying(lhs, rhs)
    out = PRIMITIVES[op].bind(lhs, rhs, spec=spec, out_dtype=np.dtype(kernel_dtype))
    return out if kernel_dtype == out_dtype else lax.convert_element_type(out, out_dtype)


def _abstract_eval(op: Op, lhs, rhs, *, spec: ConvSpec, out_dtype: np.dtype):
    shape = spec.shape(op.roles[2], spec.sizes(op, lhs.shape, rhs.shape))
    return partition.result_type(Bilinear(op, spec, out_dtype), shape, lhs, rhs)


# --- differentiation ---

# The arguments of the transposed operation: the cotangent and the other operand, in order.
_LHS_TRANSPOSE = {
    Op.FPROP: lambda ct, w: (Op.DGRAD, ct, w),
    Op.DGRAD: lambda ct, w: (Op.FPROP, ct, w),
    Op.WGRAD: lambda ct, dy: (Op.DGRAD, dy, ct),
}
_RHS_TRANSPOSE = {
    Op.FPROP: lambda ct, x: (Op.WGRAD, x, ct),
    Op.DGRAD: lambda ct, dy: (Op.WGRAD, ct, dy),
    Op.WGRAD: lambda ct, x: (Op.FPROP, x, ct),
}


def _transpose_lhs(op: Op, ct, lhs, rhs, *, spec: ConvSpec, out_dtype: np.dtype):
    out = bind(*_LHS_TRANSPOSE[op](ct, rhs), spec, lhs.aval.dtype)
    return explicit_mesh.like(out, lhs.aval)


def _transpose_rhs(op: Op, ct, lhs, rhs, *, spec: ConvSpec, out_dtype: np.dtype):
    out = bind(*_RHS_TRANSPOSE[op](ct, lhs), spec, rhs.aval.dtype)
    return explicit_mesh.like(out, rhs.aval)


# --- batching ---

# If one operand is mapped, its axis folds into an axis that the result also has: (axis of the lhs,
# axis of the rhs). In channel axes that run group by group, the new axis goes inside each group.
_FOLD = {Op.FPROP: ("n", "k"), Op.DGRAD: ("n", "c"), Op.WGRAD: ("c", "k")}


def _runs_by_group(role: str, name: str) -> bool:
    return name == "k" or (role, name) == ("x", "c")


def goes_inside(array: jax.Array, mapped: int, axis: int, groups: int) -> bool:
    """Whether ``fold`` puts the mapped axis inside the other one instead of outside.

    On an explicit mesh, only the outermost of the merged axes can be split over devices.

    Raises:
        ShardingTypeError: both axes are split, or the mapped one is although groups must be
            outermost.
    """
    outer = explicit_mesh.split_over(array, mapped)
    held = explicit_mesh.split_over(array, axis + (axis >= mapped))
    if outer and (held or groups > 1):
        raise compat.ShardingTypeError(
            f"convolution under vmap: the mapped axis is split over {outer} and cannot be merged "
            f"with an axis {f'split over {held}' if held else f'of {groups} groups'}. Change an "
            "operand's sharding with jax.sharding.reshard, or use shard_map."
        )
    return bool(held) and groups == 1


def fold(array: jax.Array, mapped: int, axis: int, groups: int, inside: bool) -> jax.Array:
    """Merges axis ``mapped`` into ``axis`` (numbered without it), as (groups, mapped, rest).

    With one group and ``inside``, as (rest, mapped).
    """
    array = jnp.moveaxis(array, mapped, 0)
    parts = (groups, array.shape[axis + 1] // groups)
    array = explicit_mesh.split_axis(array, axis + 1, parts)
    array = jnp.moveaxis(array, 0, axis + 1 + inside)
    return explicit_mesh.merge_axes(array, axis, 3)


def unfold(
    array: jax.Array, count: int, axis: int, extent: int, groups: int, inside: bool
) -> tuple[jax.Array, int]:
    """Undoes ``fold`` on an axis of extent ``extent``; also returns the mapped axis' position."""
    rest = extent // groups
    parts = (groups, rest, count) if inside else (groups, count, rest)
    array = explicit_mesh.split_axis(array, axis, parts)
    array = jnp.moveaxis(array, axis + 1 + inside, axis)
    return explicit_mesh.merge_axes(array, axis + 1, 2), axis


def _batch(op: Op, operands, mapped_axes, *, spec: ConvSpec, out_dtype: np.dtype):
    lhs, rhs = operands
    lhs_mapped, rhs_mapped = mapped_axes
    lhs_role, rhs_role, out_role = op.roles
    one_shape = [
        a.shape if at is None else (*a.shape[:at], *a.shape[at + 1 :])
        for a, at in zip(operands, mapped_axes, strict=True)
    ]
    out_shape = spec.shape(out_role, spec.sizes(op, *one_shape))
    if lhs_mapped is not None and rhs_mapped is not None:
        if spec.batched:  # a nested vmap: one batch axis holds both
            places = [
                (array, mapped, spec.axis(role, "batch"))
                for array, mapped, role in zip(operands, mapped_axes, op.roles[:2], strict=True)
            ]
            inside = any([goes_inside(*place, 1) for place in places])
            lhs, rhs = (fold(*place, 1, inside) for place in places)
            out = bind(op, lhs, rhs, spec, out_dtype)
            count = operands[0].shape[lhs_mapped]
            axis = spec.axis(out_role, "batch")
            return unfold(out, count, axis, out_shape[axis], 1, inside)
        positions = {lhs_role: lhs_mapped, rhs_role: rhs_mapped, out_role: None}
        return bind(op, lhs, rhs, spec.with_batch(**positions), out_dtype), 0
    side = 0 if rhs_mapped is None else 1
    role, mapped, name = op.roles[side], mapped_axes[side], _FOLD[op][side]
    count, axis = operands[side].shape[mapped], spec.axis(role, name)
    groups = spec.groups if _runs_by_group(role, name) else 1
    inside = goes_inside(operands[side], mapped, axis, groups)
    folded = fold(operands[side], mapped, axis, groups, inside)
    lhs, rhs = (folded, rhs) if side == 0 else (lhs, folded)
    out = bind(op, lhs, rhs, spec, out_dtype)
    axis = spec.axis(out_role, name)
    groups = spec.groups if _runs_by_group(out_role, name) else 1
    return unfold(out, count, axis, out_shape[axis], groups, inside)


for _op, _primitive in PRIMITIVES.items():
    ad.defbilinear(
        _primitive,
        functools.partial(_transpose_lhs, _op),
        functools.partial(_transpose_rhs, _op),
    )
    call.register(
        _primitive,
        functools.partial(Bilinear, _op),
        shapes=functools.partial(_abstract_eval, _op),
        batch=functools.partial(_batch, _op),
    )
