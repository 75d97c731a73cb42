"""Custom calls, by the names of their arrays.

``cc/ffi/arrays.h`` declares the operands and results of every call, in order. The kernel library
lists their names, and calls are emitted by name: an omitted array cannot shift the others, and an
unknown name is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray
from jax.interpreters import mlir

from jaxconv._src.library import native
from jaxconv._src.problem.spec import ConvSpec, Op

# The type of an omitted operand or result: an array without elements.
_ABSENT = ShapedArray((0,), np.float32)

# The call's result that holds the memory of a plan, an array of bytes.
WORKSPACE = "workspace"


def call_target(op: Op) -> str:
    """Name of the custom call, on every platform."""
    return f"jaxconv_{op.value}"


def plan_attributes(chosen: native.Selection, key: str) -> dict[str, Any]:
    """The attributes of a convolution's call that identify its plan."""
    return dict(instance=chosen.instance, problem=key, slices=np.int64(chosen.slices))


def axes_attributes(op: Op, spec: ConvSpec) -> dict[str, np.ndarray]:
    """The positions of the canonical axes in a call's operands and result."""
    names = ("lhs_axes", "rhs_axes", "out_axes")
    axes = [np.asarray(spec.axes(role), np.int64) for role in op.roles]
    return dict(zip(names, axes, strict=True))


def layout(spec: ConvSpec, role: str, krsc: bool = False) -> tuple[int, ...]:
    """The minor-to-major layout that stores an array in canonical order, or a filter as krsc."""
    axes = spec.axes(role)
    return tuple(reversed(range(len(axes)) if krsc and role == "w" else axes))


def workspace(chosen: native.Selection) -> dict[str, ShapedArray]:
    """The result that provides a call's workspace."""
    return {WORKSPACE: ShapedArray((chosen.workspace_bytes,), np.uint8)}


def lowered(
    ctx: Any,
    platform: str,
    target: str,
    operands: Mapping[str, tuple[Any, Any]],
    results: Mapping[str, Any],
    layouts: Mapping[str, Sequence[int]] | None = None,
    **attributes: Any,
) -> dict[str, Any]:
    """One custom call, in a lowering rule.

    Args:
        ctx: the lowering context.
        platform: "cpu" or "cuda".
        target: the call's name.
        operands: value and type by name.
        results: type by name.
        layouts: minor-to-major by name; row-major by default.
        attributes: the handler's other attributes.

    Returns:
        The results' values by name.
    """
    named = _names(platform, target)
    absent = None
    if len(operands) < len(named[0]):
        absent = mlir.ir_constant(np.zeros(_ABSENT.shape, _ABSENT.dtype)), _ABSENT
    values, avals = zip(*_in_order(target, named[0], operands, absent), strict=True)
    of_results = _in_order(target, named[1], results, _ABSENT)

    def in_order(names: Sequence[str], avals: Sequence[Any]) -> list[Sequence[int]]:
        row_major = [tuple(reversed(range(len(aval.shape)))) for aval in avals]
        return [
            (layouts or {}).get(name, plain) for name, plain in zip(names, row_major, strict=True)
        ]

    call = jax.ffi.ffi_lowering(
        target,
        operand_layouts=in_order(named[0], avals),
        result_layouts=in_order(named[1], of_results),
    )
    found = call(ctx.replace(avals_in=avals, avals_out=of_results), *values, **attributes)
    return dict(zip(named[1], found, strict=True))


def called(
    platform: str,
    target: str,
    operands: Mapping[str, jax.Array],
    results: Mapping[str, Any],
    **attributes: Any,
) -> dict[str, jax.Array]:
    """The same in a traced function, for row-major arrays."""
    named = _names(platform, target)
    absent = np.zeros(_ABSENT.shape, _ABSENT.dtype)
    types = [
        jax.ShapeDtypeStruct(t.shape, t.dtype)
        for t in _in_order(target, named[1], results, _ABSENT)
    ]
    call = jax.ffi.ffi_call(target, types)
    found = call(*_in_order(target, named[0], operands, absent), **attributes)
    return dict(zip(named[1], found, strict=True))


def _names(platform: str, target: str) -> tuple[Sequence[str], Sequence[str]]:
    """The names of a call's operands and results, in order."""
    kernels = native.load(platform)
    assert not isinstance(kernels, native.Refusal), "a call is emitted where there are kernels"
    return kernels.arrays[target]


def _in_order(target: str, names: Sequence[str], given: Mapping[str, Any], absent: Any) -> list:
    unknown = given.keys() - set(names)
    if unknown:
        raise ValueError(f"{target}: it has {', '.join(names)}, not {', '.join(sorted(unknown))}")
    return [given.get(name, absent) for name in names]
