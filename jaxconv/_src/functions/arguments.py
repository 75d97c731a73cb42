"""Arguments of the public functions: checks, and conversion of all accepted forms to one."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import max_dim
from jax.typing import ArrayLike, DTypeLike

from jaxconv._src import compat
from jaxconv._src.call.selection import IN_JAX, UNCONDITIONAL, families
from jaxconv._src.conv import canonical
from jaxconv._src.problem import layouts
from jaxconv._src.problem.operand import array
from jaxconv._src.problem.spec import ConvSpec, Op, Pairs, dilated_extent, known

Algorithm = str | Mapping[Literal["fprop", "dgrad", "wgrad"], str]
Padding = str | int | Sequence[int | tuple[int, int]]
# As in jax.lax: None, three strings or ConvDimensionNumbers; None, a name, an enum or a pair.
DimensionNumbers = lax.ConvGeneralDilatedDimensionNumbers
PrecisionLike = lax.PrecisionLike
OutSharding = jax.sharding.NamedSharding | jax.sharding.PartitionSpec | None

# Names of the window arguments in other libraries.
OF_WINDOW = {
    **dict.fromkeys(("strides", "window_strides", "step"), "stride"),
    **dict.fromkeys(("dilations", "rhs_dilation", "dilation_rate", "kernel_dilation"), "dilation"),
    **dict.fromkeys(("pad", "pads", "pad_mode"), "padding"),
    **dict.fromkeys(("input", "inputs", "lhs", "features"), "x"),
    **dict.fromkeys(("weight", "weights", "kernel", "filter", "filters", "rhs"), "w"),
    "kernel_size": "the window is that of w",
    "out_channels": "the output channels are those of w",
}
OF_EPILOGUE = {
    **dict.fromkeys(("act", "activation_fn", "nonlinearity"), "activation"),
    **dict.fromkeys(("b", "use_bias"), "bias"),
}


def checked_padding(
    x: jax.Array | jax.ShapeDtypeStruct,
    w: jax.Array | jax.ShapeDtypeStruct,
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
    """Checks the arguments common to all entry points and returns the padding as pairs.

    Args:
        x, w: the operands.
        numbers: the axes of both, as in ``lax.ConvDimensionNumbers``.
        padding, stride, lhs_dilation, dilation, groups, batch_groups: the window and the groups.
        names: the caller's names of x, w and groups.
    """
    x_name, w_name, groups_name = names
    lhs_spec, rhs_spec, *_ = numbers
    c, c_per_group, k = x.shape[lhs_spec[1]], w.shape[rhs_spec[1]], w.shape[rhs_spec[0]]
    if c % groups or k % groups:
        raise ValueError(
            f"{groups_name}: {groups} does not divide the {c} input channels of {x_name} "
            f"{x.shape} and the {k} output channels of {w_name} {w.shape}"
            + layouts.hint(x.shape, w.shape, lhs_spec, rhs_spec, groups, names)
        )
    if c_per_group != c // groups:
        raise ValueError(
            f"{w_name}: expected {c // groups} input channels per group ({x_name} has {c}, "
            f"{groups_name} is {groups}), got {c_per_group} in shape {w.shape}"
            + layouts.hint(x.shape, w.shape, lhs_spec, rhs_spec, groups, names)
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
    for extent, ld, r, d, (lo, hi) in zip(
        in_spatial, lhs_dilation, filter_spatial, dilation, pairs, strict=True
    ):
        dilated = dilated_extent(extent, ld)
        if (
            known(dilated)
            and known(lo)
            and known(hi)
            and max(dilated + lo + hi, dilated_extent(r, d)) >= 2**63
        ):
            raise ValueError(
                f"padding: {(lo, hi)} around {dilated} elements, or the dilation {d} of {r} taps, "
                "is more than 64 bits count"
            )
        if known(dilated) and dilated + lo + hi < 0:
            raise ValueError(f"padding: {(lo, hi)} crops more than {dilated}, all of {x_name}")
    return pairs


def forward_spec(
    x: jax.Array | jax.ShapeDtypeStruct,
    w: jax.Array | jax.ShapeDtypeStruct,
    numbers: lax.ConvDimensionNumbers,
    padding: Padding,
    *,
    precision: str,
    algorithm: tuple[str, str, str],
    **window: Any,
) -> ConvSpec:
    """The forward convolution of x by w, its padding checked, as the primitives take it.

    Args:
        x, w: the operands, or their shapes and dtypes.
        numbers: the axes of x, w and the result.
        padding: in any form that users may pass.
        precision, algorithm: as in ``ConvSpec``.
        window: stride, lhs_dilation, dilation and groups, as in ``ConvSpec``.
    """
    lhs, rhs, out = numbers
    return ConvSpec(
        **window,
        padding=checked_padding(x, w, (lhs, rhs), padding, ("x", "w", "groups"), **window),
        in_spatial=tuple(x.shape[a] for a in lhs[2:]),
        filter_spatial=tuple(w.shape[a] for a in rhs[2:]),
        x_axes=(lhs[0], *lhs[2:], lhs[1]),
        w_axes=(*rhs[2:], rhs[1], rhs[0]),
        y_axes=(out[0], *out[2:], out[1]),
        precision=precision,
        algorithm=algorithm,
    )


def operands(
    x_name: str, x: ArrayLike, w_name: str, w: ArrayLike, *, promote: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Both operands as arrays with one dtype.

    Args:
        x_name, x, w_name, w: the operands, and the caller's names of them.
        promote: converts two dtypes to one by JAX's promotion; otherwise they are a TypeError, as
            in lax.

    Raises:
        TypeError: an operand is no array of numbers, or the dtypes differ; with ``promote``, JAX's
            TypePromotionError if the current promotion mode allows none.
    """
    x, w = array(x_name, x), array(w_name, w)
    if x.dtype != w.dtype and promote:
        common = jnp.promote_types(x.dtype, w.dtype)
        x, w = (a if a.dtype == common else lax.convert_element_type(a, common) for a in (x, w))
    if x.dtype != w.dtype:
        raise TypeError(
            f"{w_name}: expected the dtype of {x_name}, {x.dtype.name}, got {w.dtype.name}; "
            "jaxconv.conv promotes as jax.numpy does"
        )
    return x, w


def integer(name: str, value: Any, at_least: int | None = None) -> int:
    """An argument that is one integer: Python's, NumPy's or a concrete array's."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an integer, got {value!r}") from None
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{name}: expected an integer of 64 bits, got {number}")
    if at_least is not None and number < at_least:
        raise ValueError(f"{name}: expected at least {at_least}, got {number}")
    return number


def described(value: Any) -> str:
    """The text for an argument of a wrong type in an error message, without array contents."""
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return f"an array, {jax.typeof(value).str_short(short_dtypes=True)}"
    leaves = jax.tree.leaves(value, is_leaf=lambda leaf: leaf is None)
    if all(isinstance(leaf, bool | int | float | str | type | None) for leaf in leaves):
        return repr(value)
    return f"an object of type {type(value).__name__}"


def _is_one(value: Any) -> bool:
    """Whether an argument is a single value rather than a sequence or an array."""
    return isinstance(value, str | bytes) or not (
        isinstance(value, Sequence) or bool(getattr(value, "ndim", 0))
    )


def per_axis(name: str, value: int | Sequence[int], rank: int) -> tuple[int, ...]:
    """An argument that is one integer, or one for each spatial axis."""
    if isinstance(value, (str, bytes)):
        raise TypeError(f"{name}: expected integers, got {value!r}")
    if _is_one(value):
        return (integer(name, value),) * rank
    several: Any = value
    values = tuple(integer(name, v) for v in several)
    if len(values) != rank:
        raise ValueError(f"{name}: expected one number or {rank}, got {values}")
    return values


# The modes of ``jax.numpy.pad`` for these paddings.
_CONTINUATIONS = {"CIRCULAR": "wrap", "REFLECT": "reflect"}

# The padding names of ``jax.lax``, and those that Flax adds.
_OF_LAX = ("SAME", "SAME_LOWER", "VALID")
_OF_FLAX = ("CAUSAL", *_CONTINUATIONS)


def continued(
    x: jax.Array,
    spatial: Sequence[int],
    padding: Padding,
    filter_spatial: Sequence[int],
    dilation: Sequence[int],
) -> tuple[jax.Array, Padding]:
    """Replaces the padding names that Flax adds to lax's; may pad the input.

    The padding is that of ``flax.linen.Conv``: for a dilated filter of extent r, (r - 1) // 2
    elements on the low side and r // 2 on the high side, for any stride.

    Args:
        x: the input.
        spatial: its spatial axes.
        padding: as the caller gave it.
        filter_spatial, dilation: the extents of the filter, and the step between its taps.
    """
    name = padding.upper() if isinstance(padding, str) else ""
    if name and name not in (*_OF_LAX, *_OF_FLAX):
        expected = ", ".join(map(repr, (*_OF_LAX, *_OF_FLAX)))
        raise ValueError(f"padding: expected {expected}, a number or pairs, got {padding!r}")
    reach = [max(dilated_extent(r, d), 1) for r, d in zip(filter_spatial, dilation, strict=True)]
    if name == "CAUSAL":
        if len(reach) != 1:
            raise ValueError(
                f"padding: 'CAUSAL' is for one spatial axis, got {len(reach)}; give pairs (low, "
                "high) to say which axis is time"
            )
        return x, [(reach[0] - 1, 0)]
    if name not in _CONTINUATIONS:
        return x, padding
    pads = [(0, 0)] * x.ndim
    for axis, r in zip(spatial, reach, strict=True):
        least = 1 if r == 1 or name == "CIRCULAR" else 2
        if known(x.shape[axis]) and x.shape[axis] < least:
            raise ValueError(
                f"padding: {name!r} needs an extent of {least} or more on every spatial axis, x has"
                f" {x.shape[axis]} on axis {axis}"
            )
        pads[axis] = ((r - 1) // 2, r // 2)
    if name == "CIRCULAR":  # `jnp.pad` would divide the padding by a symbolic extent
        for axis, (lo, hi) in enumerate(pads):
            extent = x.shape[axis]
            if not known(extent) and (lo or hi):
                parts = [(extent - lo, extent), (0, extent), (0, hi)]
                x = jnp.concatenate([lax.slice_in_dim(x, *p, axis=axis) for p in parts], axis)
                pads[axis] = (0, 0)
    return jnp.pad(x, pads, mode=_CONTINUATIONS[name]), "VALID"


def no_padding_by_name(padding: Padding, lhs_dilation: tuple[int, ...]) -> None:
    """Refuses padding names together with a dilated input, as lax does."""
    if isinstance(padding, str) and any(d > 1 for d in lhs_dilation):
        raise ValueError(
            f"padding: {padding!r} has no meaning where lhs_dilation is {lhs_dilation}; give pairs "
            "(low, high), or use conv_transpose"
        )


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
        if name not in _OF_LAX:
            hint = f"; jaxconv.conv knows {name!r}" if name in _OF_FLAX else ""
            expected = ", ".join(map(repr, _OF_LAX))
            raise ValueError(
                f"padding: expected {expected}, a number or pairs, got {padding!r}{hint}"
            )
        pairs = []
        for i, r, s, d in zip(in_spatial, filter_spatial, stride, dilation, strict=True):
            # ceil(i / s) outputs; an odd remainder goes to the high side, for SAME_LOWER to the low
            # side
            reach = (r - 1) * d + 1 if r else 0
            total = max_dim((-(-i // s) - 1) * s + reach - i, 0)
            less, more = total // 2, total - total // 2
            pairs.append((less, more) if name == "SAME" else (more, less))
        return tuple(pairs)
    if _is_one(padding):
        padding = (integer("padding", padding),) * rank
    entries: list[Any] = list(cast(Sequence[Any], padding))
    if len(entries) != rank:
        raise ValueError(f"padding: expected {rank} entries, one per axis, got {padding!r}")
    pairs = []
    for entry in entries:
        if _is_one(entry):
            entry = (entry, entry)
        if len(entry) != 2:
            raise ValueError(f"padding: expected a pair (low, high), got {entry!r}")
        pairs.append((integer("padding", entry[0]), integer("padding", entry[1])))
    return tuple(pairs)


def transposed_padding(
    padding: str | Sequence[tuple[int, int]],
    window: tuple[int, ...],
    strides: tuple[int, ...],
    dilation: tuple[int, ...],
    consistent: bool,
) -> str | Sequence[tuple[int, int]]:
    """The padding of the dilated input, from ``conv_transpose``'s argument.

    Raises:
        ValueError: a name without a meaning for transposed convolutions.
    """
    reach = [(r - 1) * d + 1 for r, d in zip(window, dilation, strict=True)]
    if isinstance(padding, str):
        if padding in ("SAME", "VALID"):
            pads = []
            for r, s in zip(reach, strides, strict=True):
                if padding == "VALID":
                    total, low = r + s - 2 + max(r - s, 0), r - 1
                else:
                    total = r + s - 2
                    low = r - 1 if s > r - 1 else -(-total // 2)
                pads.append((low, total - low))
            return pads
        if consistent or any(s != 1 for s in strides):
            raise ValueError(f"padding: expected 'SAME', 'VALID' or pairs, got {padding!r}")
        return padding
    if not consistent:
        return padding
    none = (0,) * len(strides)
    pairs = padding_pairs(padding, none, none, strides, dilation)
    return [(r - 1 - lo, r - 1 - hi) for r, (lo, hi) in zip(reach, pairs, strict=True)]


def output_padding(
    value: int | Sequence[int], strides: tuple[int, ...], dilation: tuple[int, ...]
) -> tuple[int, ...]:
    """Additional outputs on the high side of every axis.

    Raises:
        ValueError: a number is not less than the axis' stride or dilation.
    """
    extra = per_axis("output_padding", value, len(strides))
    for e, s, d in zip(extra, strides, dilation, strict=True):
        if not 0 <= e < max(s, d, 1):
            raise ValueError(
                "output_padding: expected less than the stride or the dilation of its axis, "
                f"got {extra} with strides {strides} and rhs_dilation {dilation}"
            )
    return extra


def result_dtype(operand: np.dtype, preferred: DTypeLike | None) -> np.dtype:
    """The dtype of the result; as in lax it may be wider, or float for integers."""
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


def precision(value: PrecisionLike) -> str:
    """The name of a precision in any form that lax accepts."""
    try:
        return canonical.precision_name(value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"precision: got {value!r}. {error}") from error


def algorithms(algorithm: Algorithm) -> tuple[str, str, str]:
    """The algorithm of each direction, checked against the names of this build."""
    directions = [op.value for op in Op]
    if isinstance(algorithm, str):
        chosen = dict.fromkeys(directions, algorithm)
    elif isinstance(algorithm, Mapping):
        unknown = [key for key in algorithm if key not in directions]
        if unknown:
            raise ValueError(f"algorithm: expected the keys {', '.join(directions)}, got {unknown}")
        chosen = dict.fromkeys(directions, "auto")
        chosen.update({str(direction): name for direction, name in algorithm.items()})
    else:
        raise TypeError(f"algorithm: expected a string or a mapping, got {algorithm!r}")
    for direction, name in chosen.items():
        if not isinstance(name, str):
            raise TypeError(
                f"algorithm: expected the name of an algorithm for {direction!r}, such as 'auto', "
                f"got {name!r}"
            )
        if name in UNCONDITIONAL or name in IN_JAX:
            continue
        known = {family for names in families().values() for family in names}
        if not any(family == name or f"_{family}_" in name for family in known):
            raise ValueError(
                f"algorithm: {name!r} is not in this build; expected "
                f"{', '.join(map(repr, dict.fromkeys((*UNCONDITIONAL, *IN_JAX))))}, "
                f"{', '.join(sorted(known)) or '(no kernels built)'} or an instance name"
            )
    fprop, dgrad, wgrad = (chosen[direction] for direction in directions)
    return fprop, dgrad, wgrad
