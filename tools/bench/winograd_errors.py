"""``python tools/bench --winograd-errors``: Winograd's errors against float64."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxconv
from jaxconv import int8
from jaxconv._src.int8 import int8_winograd
from jaxconv._src.ways.winograd_jax import TILES
from jaxconv.bench import environment, options
from jaxconv.bench.problem import DTYPES
from jaxconv.bench.progress import INTERRUPTED, Progress, each

_CHANNELS = (64, 256, 1280)
_INT8 = "s8"
_DTYPES = ("f16", "bf16", "f32", _INT8)

# Extents that every tile divides, and the number of output channels: 36,864 results for each row.
_EXTENT, _K = 24, 64

# "auto" may use an algorithm whose error is at most this many times the direct convolution's.
_ALLOWED = 1.1

_EPILOG = f"""
Inputs are as behind a ReLU, max(0, N(0, 1)), and filters N(0, 2 / (9 C)), both exact in the
operands' type. The reference is computed in float64 by NumPy, the direct convolution by lax in
float32 at HIGHEST and rounded once to the operands' type. Errors are relative to the standard
deviation of the reference: "rms" and "max" of the result in the operands' type, "rms f32" of a
float32 result of the same operands. The last column is rms over that of the direct convolution;
of s8 the operands are rounded to int8, by one scale of all inputs and one of each output channel's
filter, the reference is their exact sums, and the last column compares the results' distances from
the convolution of the numbers before they were rounded. "auto" may use at most {_ALLOWED}, where it
is also faster. Winograd is computed as in a program on this machine: by a kernel on a GPU that has
one, else in JAX.
"""


@dataclasses.dataclass(frozen=True)
class Case:
    """One row: a tile, or "direct", for an operand type and a number of input channels."""

    tile: str
    dtype: str
    c: int


@dataclasses.dataclass(frozen=True)
class Errors:
    """The errors of one case, relative to the standard deviation of the reference."""

    case: Case
    rms: float
    largest: float
    rms_of_float32: float
    ratio: float  # rms over that of the direct convolution

    @property
    def allowed(self) -> bool:
        """Whether the accuracy allows "auto" to use it."""
        return self.ratio <= _ALLOWED


def _reference(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The convolution with padding 1 in float64."""
    x = np.pad(x.astype(np.float64), ((0, 0), (1, 1), (1, 1), (0, 0)))
    w = w.astype(np.float64)
    p, q = (extent - 2 for extent in x.shape[1:3])
    return sum(x[:, r : r + p, s : s + q] @ w[r, s] for r in range(3) for s in range(3))


def _drawn(seed: int, c: int) -> tuple[np.ndarray, np.ndarray]:
    """Random inputs and filters in float64."""
    rng = np.random.default_rng([seed, c])
    x = np.maximum(rng.standard_normal((1, _EXTENT, _EXTENT, c)), 0)
    w = rng.standard_normal((3, 3, c, _K)) * (2 / (9 * c)) ** 0.5
    return x, w


def _rounded_to_int8(array: np.ndarray, axes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """(int8, scale): the largest magnitude along the axes becomes 127."""
    scale = np.max(np.abs(array), axis=axes) / 127
    return np.rint(array / scale).astype(np.int8), scale


def _in_int8(x: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """int8 x and w, and the scale of their sums for each output channel."""
    x, x_scale = _rounded_to_int8(x, (0, 1, 2, 3))
    w, w_scale = _rounded_to_int8(w, (0, 1, 2))
    return x, w, x_scale * w_scale


def int8_operands(c: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The measured int8 x (n, h, w, c) and w (3, 3, c, k), and the exact sums with padding 1."""
    x, w, _ = _in_int8(*_drawn(seed, c))
    return x, w, _reference(x, w)


class Measurement:
    """Measures errors; draws the operands of each type and number of channels once."""

    def __init__(self, seed: int):
        self.seed = seed
        self.made: dict[tuple[str, int], tuple] = {}

    def _operands(self, dtype: str, c: int) -> tuple:
        """x, w, the reference, and the direct convolution's rms error and result in float32."""
        if (dtype, c) not in self.made:
            x, w = (jnp.asarray(a.astype(DTYPES[dtype])) for a in _drawn(self.seed, c))
            exact = _reference(np.asarray(x), np.asarray(w))
            direct = lax.conv_general_dilated(
                x.astype(jnp.float32),
                w.astype(jnp.float32),
                (1, 1),
                "SAME",
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
                precision="highest",
            )
            self.made = {(dtype, c): (x, w, exact, direct)}
        return self.made[dtype, c]

    def _of_int8(self, case: Case) -> Errors:
        before = _drawn(self.seed, case.c)
        x, w, scale = _in_int8(*before)
        real, exact = _reference(*before), _reference(x, w)
        y: Any = exact
        if case.tile != "direct":
            y = int8.conv(x, w, out_dtype=jnp.int32, algorithm=f"winograd_{case.tile}")
        y = np.asarray(y).astype(np.float64)
        deviation = (y - exact) / exact.std()
        ratio = np.std(y * scale - real) / np.std(exact * scale - real)
        rms = float(np.sqrt(np.mean(deviation**2)))
        return Errors(case, rms, float(np.abs(deviation).max()), rms, float(ratio))

    def __call__(self, case: Case) -> Errors:
        if case.dtype == _INT8:
            return self._of_int8(case)
        x, w, exact, direct = self._operands(case.dtype, case.c)

        def of(y: jax.Array) -> tuple[float, float]:
            deviation = (np.asarray(y).astype(np.float64) - exact) / exact.std()
            return float(np.sqrt(np.mean(deviation**2))), float(np.abs(deviation).max())

        wide = direct
        if case.tile != "direct":
            algorithm = f"winograd_{case.tile}"
            wide = jaxconv.conv(x, w, algorithm=algorithm, preferred_element_type=jnp.float32)
        rms, largest = of(wide.astype(x.dtype))
        ratio = rms / of(direct.astype(x.dtype))[0]
        return Errors(case, rms, largest, of(wide)[0], ratio)


_HEADER = ("operands", "C", "tile", "rms", "max", "rms f32", "rms / direct")
_WIDTHS = (8, 5, 6, 8, 8, 8, 12)


def _line(cells: Sequence[str]) -> str:
    left = (True, False, True, False, False, False, False)
    padded = (
        cell.ljust(width) if of_left else cell.rjust(width)
        for cell, width, of_left in zip(cells, _WIDTHS, left, strict=True)
    )
    return "  ".join(padded).rstrip()


def _row(errors: Errors) -> str:
    case = errors.case
    numbers = (errors.rms, errors.largest, errors.rms_of_float32)
    return _line(
        (case.dtype, str(case.c), case.tile, *(f"{n:.2e}" for n in numbers), f"{errors.ratio:.2f}")
    )


def plot(found: Sequence[Errors], path: str, facts: dict[str, str]) -> None:
    """Draws rms errors by channels, a panel for each operand type, and saves the figure.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    dtypes = list(dict.fromkeys(errors.case.dtype for errors in found))
    figure = Figure(figsize=(1.2 + 2.9 * len(dtypes), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(dtypes), squeeze=False)[0]
    colors = {"direct": "0.45", "f2x2": "#4e9a5b", "f4x4": "#3465a4"}
    colors |= {"f2x3": "#75507b", "f4x3": "#c17d11"}
    for dtype, axes in zip(dtypes, panels, strict=True):
        rows = [errors for errors in found if errors.case.dtype == dtype]
        for tile in dict.fromkeys(errors.case.tile for errors in rows):
            of_tile = [errors for errors in rows if errors.case.tile == tile]
            channels = [errors.case.c for errors in of_tile]
            style = dict(color=colors.get(tile, "#a03030"), label=tile, markersize=4)
            axes.plot(channels, [e.rms for e in of_tile], "o-", linewidth=1.4, **style)
            style.pop("label")
            axes.plot(channels, [e.largest for e in of_tile], "^:", linewidth=0.8, **style)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(list(dict.fromkeys(errors.case.c for errors in rows)))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_minor_formatter("")
        axes.set_title(dtype, fontsize=10)
        axes.set_xlabel("input channels C", fontsize=8)
        axes.grid(color="0.9", zorder=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    panels[0].set_ylabel("error / std(y)", fontsize=8)
    panels[-1].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    figure.suptitle(
        f"Errors against float64: rms (solid), largest (dotted); jaxconv {facts['jaxconv']}, "
        f"{facts['platform']}",
        fontsize=10,
    )
    figure.savefig(path, dpi=150)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python tools/bench",
        description="Measures the errors of Winograd convolutions against float64.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    tiles = list(TILES)
    add("--winograd-errors", nargs="*", choices=tiles, metavar="TILE", help=f"of {tiles}; all")
    add("--dtype", nargs="+", choices=_DTYPES, default=_DTYPES, help="operands (default: all)")
    add("--channels", nargs="+", type=options.count, default=_CHANNELS, help="default: 64 256 1280")
    add("--seed", type=int, default=0, help="of the random inputs")
    options.add_outputs(parser.add_argument, "the errors by channels")
    return parser


def main(argv: Sequence[str]) -> int:
    """Measures what the command line asks for; returns the exit status."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    options.check_outputs(parser, arguments)
    tiles = arguments.winograd_errors or list(TILES)
    cases = [
        Case(tile, dtype, c)
        for dtype in arguments.dtype
        for c in arguments.channels
        for tile in ("direct", *tiles)
        if dtype != _INT8 or tile == "direct" or f"winograd_{tile}" in int8_winograd.ALGORITHMS
    ]
    facts = environment.describe()
    print("\n".join(f"{name}: {value}" for name, value in facts.items()), end="\n\n")
    header = [_line(_HEADER), _line(["-" * width for width in _WIDTHS])]
    found = each(
        Progress(len(cases)),
        cases,
        lambda case: f"{case.tile} {case.dtype} {case.c}",
        Measurement(arguments.seed),
        _row,
        header,
    )
    _write(found, arguments, facts, argv)
    return INTERRUPTED if len(found) < len(cases) else 0


def _write(
    found: Sequence[Errors],
    arguments: argparse.Namespace,
    facts: dict[str, Any],
    argv: Sequence[str],
) -> None:
    """Writes the results into files, and prints a summary."""
    if arguments.json:
        rows = [dataclasses.asdict(errors) for errors in found]
        options.write_json(
            arguments.json, {"environment": facts, "command": list(argv), "rows": rows}
        )
        print(f"\nresults: {arguments.json}")
    if arguments.plot and found:
        plot(found, arguments.plot, facts)
        print(f"\nplot: {arguments.plot}")
    winograd = [errors for errors in found if errors.case.tile != "direct"]
    kinds = dict.fromkeys((e.case.dtype, e.case.tile) for e in winograd)
    within = [
        f"{tile} in {dtype}"
        for dtype, tile in kinds
        if all(e.allowed for e in winograd if (e.case.dtype, e.case.tile) == (dtype, tile))
    ]
    print(f"\nrms at most {_ALLOWED} times the direct convolution's: {', '.join(within) or 'none'}")
