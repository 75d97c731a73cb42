"""Layouts by name, and advice if the channels of two arrays do not fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Channel-last formats pair with filters (*spatial, C / groups, K), channel-first formats with
# (K, C / groups, *spatial), as TensorFlow and PyTorch do. By number of spatial axes.
_LAST = ("NWC", "NHWC", "NDHWC")
_FIRST = ("NCW", "NCHW", "NCDHW")
_BY_NAME = {"CHANNELS_LAST": _LAST, "CHANNELS_FIRST": _FIRST}


def numbers(data_format: str) -> tuple[str, str, str]:
    """lax's ``dimension_numbers`` for a format from ``data_format`` below."""
    spatial = data_format.translate({ord("N"): None, ord("C"): None})
    rhs = f"{spatial}IO" if data_format in _LAST else f"OI{spatial}"
    return data_format, rhs, data_format


def data_format(value: Any, w_shape: tuple[int, ...]) -> str:
    """A ``data_format`` argument in capitals; by default channels last, by the rank of w.

    Raises:
        ValueError: it is not one of the formats, or w has too few or too many axes.
    """
    named = "CHANNELS_LAST" if value is None else str(value).upper()
    if named in _BY_NAME:
        rank = len(w_shape) - 2
        if not 1 <= rank <= 3:
            raise ValueError(f"w: expected 3 to 5 dimensions, got shape {w_shape}")
        return _BY_NAME[named][rank - 1]
    if named not in _LAST + _FIRST:
        raise ValueError(
            f"data_format: expected {', '.join(_LAST + _FIRST)}, 'channels_last' or "
            f"'channels_first', got {value!r}"
        )
    return named


def int8_format(value: Any, rank: int) -> str:
    """A ``data_format`` argument of 8-bit convolutions: "NHWC", "NCHW" or "NCHW32".

    The first two mean channels last and first, for any number of spatial axes.

    Args:
        value: one of the formats of ``data_format`` in any case, or "NCHW32".
        rank: spatial axes.

    Raises:
        ValueError: it is not one of the formats, or has another number of spatial axes.
    """
    named = str(value).upper()
    if named in (_LAST[rank - 1], "CHANNELS_LAST"):
        return "NHWC"
    if named in (_FIRST[rank - 1], "CHANNELS_FIRST"):
        return "NCHW"
    if named == "NCHW32" and rank != 2:
        raise ValueError(f"data_format: NCHW32 has two spatial axes, got {rank}")
    if named != "NCHW32":
        formats = [_LAST[rank - 1], _FIRST[rank - 1], *["NCHW32"] * (rank == 2)]
        raise ValueError(
            f"data_format: expected {', '.join(formats)}, 'channels_last' or 'channels_first' for "
            f"{rank} spatial axes, got {value!r}"
        )
    return named


def from_layout(layout: Any) -> Any:
    """The deprecated ``layout`` argument as a ``data_format``, for any rank."""
    return {"NHWC": "channels_last", "NCHW": "channels_first"}.get(layout, layout)


def hint(
    x_shape: tuple[int, ...],
    w_shape: tuple[int, ...],
    lhs_spec: Sequence[int],
    rhs_spec: Sequence[int],
    groups: int,
    names: tuple[str, str, str],
) -> str:
    """A suggestion for arrays whose channels do not fit; "" if nothing fits.

    Args:
        x_shape, w_shape: shapes of the operands.
        lhs_spec, rhs_spec: their axes, as in ``lax.ConvDimensionNumbers``.
        groups: groups of the channels.
        names: the caller's names of x, w and groups.
    """
    x_name, w_name, _ = names
    rank = len(x_shape) - 2
    if not 1 <= rank <= 3:
        return ""
    channels, (k_axis, c_axis) = x_shape[lhs_spec[1]], rhs_spec[:2]
    if 1 < groups == channels == w_shape[c_axis] and (c_axis, k_axis) == (rank, rank + 1):
        shape = (*w_shape[:rank], 1, channels * w_shape[k_axis])
        return (
            f". {w_name} looks like a depthwise filter (*window, C, multiplier); expected is "
            f"(*window, 1, C * multiplier): {w_name}.reshape({shape})"
        )
    last, first = (0, rank + 1, *range(1, rank + 1)), tuple(range(rank + 2))
    io, oi = (rank + 1, rank, *range(rank)), first
    lhs, rhs = tuple(lhs_spec), tuple(rhs_spec)
    if lhs not in (last, first) or rhs not in (io, oi):
        return ""
    other_lhs, other_rhs = (first if lhs == last else last), (oi if rhs == io else io)
    for as_lhs, as_rhs in ((other_lhs, other_rhs), (other_lhs, rhs), (lhs, other_rhs)):
        c, k = x_shape[as_lhs[1]], w_shape[as_rhs[0]]
        if c != w_shape[as_rhs[1]] * groups or k % groups:
            continue
        spatial = ("W", "HW", "DHW")[rank - 1]
        format_of_x = (_LAST if as_lhs == last else _FIRST)[rank - 1]
        format_of_w = f"{spatial}IO" if as_rhs == io else f"OI{spatial}"
        fits = f". {x_name} in {format_of_x} and {w_name} in {format_of_w} would fit"
        if x_name != "x":
            return f'{fits}: dimension_numbers=("{format_of_x}", "{format_of_w}", "{format_of_x}")'
        if (as_lhs == last) == (as_rhs == io):
            return f'{fits}: data_format="{format_of_x}"'
        if as_rhs == rhs:
            return f"{fits}: transpose x to {(_LAST if lhs == last else _FIRST)[rank - 1]}"
        return f"{fits}: transpose w to {f'{spatial}IO' if rhs == io else f'OI{spatial}'}"
    return ""
