"""Arguments of the public functions: checked, and every accepted form brought to one."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jaxconv._src import compat
from jaxconv._src.lowering import IN_JAX, UNCONDITIONAL, families
from jaxconv._src.spec import Op, Pairs, dilated_extent

Algorithm = str | Mapping[Literal["fprop", "dgrad", "wgrad"], str]
Padding = str | int | Sequence[int | tuple[int, int]]


def checked_padding(
    x: jax.Array,
    w: jax.Array,
    numbers: Sequence[Sequence[int]],
    padding: Padding,
    names: tuple[str, str, str],
    *,
    stride: tuple[int, ...],
    lhs_dilation: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
    batch_groups: int = 1,
) -> Pairs:
    """Checks what every entry point has in common and gives the padding as pairs.

    Args:
        x, w: the operands.
        numbers: the axes of both, as in ``lax.ConvDimensionNumbers``.
        padding, stride, lhs_dilation, dilation, groups, batch_groups: the window and the groups.
        names: what the caller calls x, w and groups.
    """
    x_name, w_name, groups_name = names
    lhs_spec, rhs_spec, *_ = numbers
    c, c_per_group, k = x.shape[lhs_spec[1]], w.shape[rhs_spec[1]], w.shape[rhs_spec[0]]
    if c % groups or k % groups:
        raise ValueError(
            f"{groups_name}: {groups} does not divide the {c} input channels of {x_name} "
            f"{x.shape} and the {k} output channels of {w_name} {w.shape}"
        )
    if c_per_group != c // groups:
        raise ValueError(
            f"{w_name}: expected {c // groups} input channels per group ({x_name} has {c}, "
            f"{groups_name} is {groups}), got {c_per_group} in shape {w.shape}"
        )
    n = x.shape[lhs_spec[0]]
    if n % batch_groups or k % batch_groups:
        raise ValueError(
            f"batch_group_count: {batch_groups} does not divide the batch {n} of {x_name} and the "
            f"{k} output channels of {w_name}"
        )
    if batch_groups > 1 and groups > 1:
        raise ValueError(
            f"batch_group_count: {batch_groups} together with {groups_name} {groups}; at most one "
            "may exceed 1"
        )
    for name, values in (
        ("stride", stride),
        ("lhs dilation", lhs_dilation),
        ("dilation", dilation),
    ):
        if any(v < 1 for v in values):
            raise ValueError(f"{name}: expected at least 1 on every axis, got {values}")
    in_spatial = tuple(x.shape[a] for a in lhs_spec[2:])
    filter_spatial = tuple(w.shape[a] for a in rhs_spec[2:])
    pairs = padding_pairs(padding, in_spatial, filter_spatial, stride, dilation)
    for extent, ld, (lo, hi) in zip(in_spatial, lhs_dilation, pairs, strict=True):
        dilated = dilated_extent(extent, ld)
        if dilated + lo + hi < 0:
            raise ValueError(f"padding: {(lo, hi)} crops more than {dilated}, all of {x_name}")
    return pairs


def operands(x_name: str, x: ArrayLike, w_name: str, w: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """Both operands as arrays; a TypeError where their dtypes differ."""
    x, w = jnp.asarray(x), jnp.asarray(w)
    if x.dtype != w.dtype:
        raise TypeError(
            f"{w_name}: expected the dtype of {x_name}, {x.dtype.name}, got {w.dtype.name}"
        )
    return x, w


def integer(name: str, value: Any, at_least: int | None = None) -> int:
    """An argument that is one integer of any type, Python's, NumPy's or a concrete array's."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an integer, got {value!r}") from None
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{name}: expected an integer of 64 bits, got {number}")
    if at_least is not None and number < at_least:
        raise ValueError(f"{name}: expected at least {at_least}, got {number}")
    return number


def per_axis(name: str, value: int | Sequence[int], rank: int) -> tuple[int, ...]:
    """An argument that is one integer, or one for each spatial axis."""
    if isinstance(value, (str, bytes)):
        raise TypeError(f"{name}: expected integers, got {value!r}")
    if not isinstance(value, Sequence) and np.ndim(value) == 0:
        return (integer(name, value),) * rank
    values = tuple(integer(name, v) for v in value)
    if len(values) != rank:
        raise ValueError(f"{name}: expected one number or {rank}, got {values}")
    return values


def padding_pairs(
    padding: Padding,
    in_spatial: tuple[int, ...],
    filter_spatial: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
) -> Pairs:
    """Every form of padding as pairs (low, high), one per spatial axis."""
    rank = len(in_spatial)
    if isinstance(padding, str):
        name = padding.upper()
        if name == "VALID":
            return ((0, 0),) * rank
        if name not in ("SAME", "SAME_LOWER"):
            raise ValueError(
                "padding: expected 'SAME', 'SAME_LOWER', 'VALID', a number or pairs, "
                f"got {padding!r}"
            )
        pairs = []
        for i, r, s, d in zip(in_spatial, filter_spatial, stride, dilation, strict=True):
            # ceil(i / s) outputs; an odd rest goes to the high side, for SAME_LOWER to the low one
            reach = (r - 1) * d + 1 if r else 0
            total = max(0, (-(-i // s) - 1) * s + reach - i)
            less, more = total // 2, total - total // 2
            pairs.append((less, more) if name == "SAME" else (more, less))
        return tuple(pairs)
    if not isinstance(padding, Sequence) and np.ndim(padding) == 0:
        padding = (integer("padding", padding),) * rank
    entries = list(padding)
    if len(entries) != rank:
        raise ValueError(f"padding: expected {rank} entries, one per axis, got {padding!r}")
    pairs = []
    for entry in entries:
        if np.ndim(entry) == 0:
            entry = (entry, entry)
        if len(entry) != 2:
            raise ValueError(f"padding: expected a pair (low, high), got {entry!r}")
        pairs.append((integer("padding", entry[0]), integer("padding", entry[1])))
    return tuple(pairs)


def result_dtype(operand: np.dtype, preferred: DTypeLike | None) -> np.dtype:
    """The dtype of the result: what lax allows, which is to widen, and integers to floats."""
    if preferred is None:
        return np.dtype(operand)
    try:
        result = compat.canonicalize_dtype(preferred, "preferred_element_type")
    except TypeError as error:
        raise TypeError(f"preferred_element_type: {error}") from error
    try:
        compat.validate_preferred_element_type(operand, result)
    except TypeError as error:
        raise TypeError(
            f"preferred_element_type: {result.name} for operands of {operand.name}: {error}"
        ) from error
    return np.dtype(result)


def algorithms(algorithm: Algorithm) -> tuple[str, str, str]:
    """The demand for each direction, its names checked against this build."""
    directions = [op.value for op in Op]
    if isinstance(algorithm, str):
        chosen = dict.fromkeys(directions, algorithm)
    elif isinstance(algorithm, Mapping):
        unknown = set(algorithm) - set(directions)
        if unknown:
            raise ValueError(
                f"algorithm: expected the keys {', '.join(directions)}, got {sorted(unknown)}"
            )
        chosen = {**dict.fromkeys(directions, "auto"), **algorithm}
    else:
        raise TypeError(f"algorithm: expected a string or a mapping, got {algorithm!r}")
    for name in chosen.values():
        if not isinstance(name, str):
            raise TypeError(f"algorithm: expected names, got {name!r}")
        if name in UNCONDITIONAL or name in IN_JAX:
            continue
        known = {family for names in families().values() for family in names}
        if not any(family == name or f"_{family}_" in name for family in known):
            raise ValueError(
                f"algorithm: {name!r} is not in this build; expected "
                f"{', '.join(map(repr, dict.fromkeys((*UNCONDITIONAL, *IN_JAX))))}, "
                f"{', '.join(sorted(known)) or '(no kernels built)'} or an instance name"
            )
    return tuple(chosen[d] for d in directions)
