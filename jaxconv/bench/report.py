"""Shows the results of layers: a table that grows row by row, a summary and a plot."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from jaxconv._src.problem.spec import Op
from jaxconv.bench.problem import Problem, Row

_REASON_WIDTH = 300

# Ratios to lax that deserve a line: of rows that auto computes, and of those it leaves to XLA.
_SLOWER, _FASTER = 0.95, 1.05


class Table:
    """One line per row, in columns whose widths are known before the first measurement."""

    def __init__(self, problems: Sequence[Problem], platform: str, peers: Iterable[str] = ()):
        self.peers = tuple(peers)
        # Units in which usual layers have a few digits.
        self.rate_unit, self.rate_scale = ("GF/s", 1e9) if platform == "cpu" else ("TF/s", 1e12)
        name = max([5, *(len(p.name) for p in problems)])
        text = max([7, *(len(str(p.layer)) for p in problems)])
        dtype = max([5, *(len(p.dtype_label) for p in problems)])
        self.columns = [
            ("layer", -name),
            ("problem", -text),
            ("op", -5),
            ("dtype", -dtype),
            ("jaxconv us", 11),
            ("p20-p80", 17),
            ("lax us", 11),
            ("p20-p80", 17),
            *((f"{peer} us", 11) for peer in self.peers),
            ("lax/ours", 8),
            *((f"{peer}/ours", 10) for peer in self.peers),
            (self.rate_unit, 7),
            ("GB/s", 7),
            ("error", 7),
            ("compile s", 11),
            ("temp MB", 17 if "im2col" in self.peers else 11),
            ("kernel", -1),
        ]

    def header(self) -> list[str]:
        """The two lines above the first row."""
        return [self._line([title for title, _ in self.columns]), self._line(self._rule())]

    def row(self, row: Row) -> str:
        """One line of results; ``-`` for what was not measured."""
        problem, ours, lax = row.problem, row.sides["jaxconv"], row.sides.get("lax")
        peers = [row.sides.get(peer) for peer in self.peers]
        flop_rate, byte_rate = row.rate(problem.layer.flops), row.rate(problem.nbytes)
        measured = [ours, lax, *([row.sides.get("im2col")] if "im2col" in self.peers else [])]
        memory = [side.temporary_bytes if side else None for side in measured]
        compile_times = [side.compile_s if side else None for side in (ours, lax)]
        ratios = [row.ratio(peer) for peer in ("lax", *self.peers)]
        kernel = row.kernel + " prepared" * problem.prepared
        if row.wrong:
            kernel = f"WRONG {kernel}" if ours.error is not None else "FAILED"
        elif row.refused:
            kernel = "refused"
        return self._line(
            [
                problem.name,
                str(problem.layer),
                problem.op.value,
                problem.dtype_label,
                *_times(ours),
                *_times(lax),
                *(_times(peer)[0] for peer in peers),
                *("-" if ratio is None else f"{ratio:.2f}x" for ratio in ratios),
                "-" if flop_rate is None else f"{flop_rate / self.rate_scale:.1f}",
                "-" if byte_rate is None else f"{byte_rate / 1e9:.1f}",
                _error(row),
                "/".join("-" if t is None else f"{t:.2f}" for t in compile_times),
                "/".join("-" if m is None else f"{m / 1e6:.3g}" for m in memory),
                kernel,
            ]
        )

    def _rule(self) -> list[str]:
        return ["-" * max(abs(width), len(title)) for title, width in self.columns]

    def _line(self, cells: Sequence[str]) -> str:
        padded = (
            cell.ljust(-width) if width < 0 else cell.rjust(width)
            for cell, (_, width) in zip(cells, self.columns, strict=True)
        )
        return "  ".join(padded).rstrip()


def _times(side) -> tuple[str, str]:
    if side is None or side.median_s is None:
        return ("failed" if side is not None and side.failure else "-"), "-"
    return f"{side.median_s * 1e6:.1f}", f"{side.p20_s * 1e6:.1f}-{side.p80_s * 1e6:.1f}"


def _error(row: Row) -> str:
    error = row.sides["jaxconv"].error
    if error is None:
        return "-"
    return "exact" if error == 0 and row.problem.bound == 0 else f"{error:.1e}"


def geometric_mean(ratios: Sequence[float]) -> float:
    """The geometric mean; 0 for no values."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else 0.0


def _ratios(rows: Iterable[Row], peer: str) -> list[float]:
    return [ratio for row in rows if (ratio := row.ratio(peer)) is not None]


def _notes(rows: Sequence[Row]) -> Iterator[str]:
    """What deserves a sentence: refusals, failures and wrong results, equal ones together."""
    reasons: dict[str, list[Row]] = {}
    for row in rows:
        if row.kernel == "XLA" and not row.refused:
            reasons.setdefault(row.reason, []).append(row)
    for reason, group in reasons.items():
        shown = reason if len(reason) <= _REASON_WIDTH else reason[:_REASON_WIDTH] + " ..."
        yield f"XLA's convolution ran in {len(group)} of {len(rows)} rows: {shown}"
    for row in rows:
        problem = row.problem
        label = f"{problem.name} {problem.op.value} {problem.dtype_label}"
        ours = row.sides["jaxconv"]
        if ours.error is not None and not ours.error <= problem.bound:
            yield f"WRONG {label}: error {ours.error:.2e}, accepted {problem.bound:.0e}"
        for name, side in row.sides.items():
            if side.failure:
                verb = "refused" if row.refused and name == "jaxconv" else "failed"
                yield f"{label}: {name} {verb}: {side.failure}"


def _under_auto(rows: Sequence[Row]) -> Iterator[str]:
    """What auto makes of rows that were measured by algorithm native, and of which it is known."""
    known = [row for row in rows if row.left_to_xla is not None and row.ratio() is not None]
    if not known:
        return

    def named(group: list[Row]) -> str:
        labels = (f"{r.problem.name} {r.problem.op.value} {r.problem.dtype_label}" for r in group)
        ratios = (f"{row.ratio():.2f}x" for row in group)
        return f"{len(group)}: " + ", ".join(map(" ".join, zip(labels, ratios, strict=True)))

    left = [row for row in known if row.left_to_xla]
    yield f"algorithm auto leaves {len(left)} of {len(known)} rows to XLA"
    if slower := [row for row in known if not row.left_to_xla and row.ratio() < _SLOWER]:
        yield f"under auto below {_SLOWER}x lax, {named(slower)}"
    if faster := [row for row in left if row.ratio() > _FASTER]:
        yield f"left to XLA though native is above {_FASTER}x lax, {named(faster)}"


def summary(rows: Sequence[Row], peers: Iterable[str] = ()) -> list[str]:
    """The lines below the table; the last is the geometric mean of all ratios to lax."""
    lines = [*_notes(rows), *_under_auto(rows)]
    for op in Op:
        group = _ratios((row for row in rows if row.problem.op is op), "lax")
        if 1 < len(group) < len(_ratios(rows, "lax")):
            lines.append(
                f"{op.value}: geometric mean over {len(group)} rows: "
                f"{geometric_mean(group):.2f}x lax, least {min(group):.2f}x"
            )
    labels = dict.fromkeys(row.problem.dtype_label for row in rows)
    for label in labels if len(labels) > 1 else ():
        for peer in ("lax", *peers):
            group = _ratios((row for row in rows if row.problem.dtype_label == label), peer)
            if group:
                lines.append(
                    f"{label}: geometric mean over {len(group)} rows: "
                    f"{geometric_mean(group):.2f}x {peer}, least {min(group):.2f}x"
                )
    for peer in peers:
        group = _ratios(rows, peer)
        mean = f"{geometric_mean(group):.2f}x {peer}" if group else "no row has both times"
        lines.append(f"geometric mean over {len(group)} rows: {mean}")
    group = _ratios(rows, "lax")
    mean = f"{geometric_mean(group):.2f}x lax" if group else "no row has both times"
    lines.append(f"geometric mean over {len(group)} rows: {mean}")
    return lines


def _bar(axes, position: int, row: Row | None, color: str) -> None:
    """Draws a row's ratio to lax: right of 1 takes less time than lax, left of it more."""
    ratio = None if row is None else row.ratio()
    if ratio is None:
        wrong = row is not None and row.wrong
        text, color = (" wrong", "#c00000") if wrong else (" not measured", "0.5")
        axes.text(1.0, position, text, va="center", fontsize=7, color=color)
        return
    axes.barh(
        position,
        ratio - 1.0,
        left=1.0,
        height=0.72,
        color="0.72" if row.kernel == "XLA" else color,
        zorder=2,
    )
    axes.annotate(
        f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.0f}x",
        (max(ratio, 1.0), position),
        xytext=(3, 0),
        textcoords="offset points",
        va="center",
        fontsize=7,
    )


def plot(rows: Sequence[Row], path: str, environment: dict[str, str]) -> None:
    """Draws the ratio to lax of every row, one panel per operation, and saves the figure.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    several_dtypes = len({row.problem.dtype_label for row in rows}) > 1

    rows = [row for row in rows if not row.problem.variant]

    def label(row: Row) -> str:
        suffix = f"  {row.problem.dtype_label}" if several_dtypes else ""
        return f"{row.problem.name}{suffix}"

    ops = [op for op in Op if any(row.problem.op is op for row in rows)]
    names = list(dict.fromkeys(label(row) for row in rows))
    ratios = _ratios(rows, "lax")
    low, high = min([1.0, *ratios]), max([1.0, *ratios])

    figure = Figure(figsize=(3.1 + 3.1 * len(ops), 2.0 + 0.27 * len(names)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(ops), sharey=True, squeeze=False)[0]
    colors = {Op.FPROP: "#3465a4", Op.DGRAD: "#4e9a5b", Op.WGRAD: "#c17d11"}
    for op, axes in zip(ops, panels, strict=True):
        group = {label(row): row for row in rows if row.problem.op is op}
        for position, name in enumerate(names):
            _bar(axes, position, group.get(name), colors[op])
        if high / low > 10:
            axes.set_xscale("log")
            axes.set_xlim(low / 1.3, high * (high / low) ** 0.3)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.xaxis.set_minor_formatter("")
        else:
            axes.set_xlim(max(0.0, low - 0.12 * (high - low) - 0.05), high + 0.3 * (high - low))
        axes.axvline(1.0, color="0.15", linewidth=1.0, zorder=3)
        axes.grid(axis="x", color="0.9", zorder=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.set_title(
            f"{op.value}: {geometric_mean(_ratios(group.values(), 'lax')):.2f}x", fontsize=10
        )
        axes.set_xlabel("time of lax / time of jaxconv", fontsize=8)
        axes.tick_params(labelsize=8)
    panels[0].set_yticks(range(len(names)), names)
    panels[0].set_ylim(len(names) - 0.4, -0.6)
    dtypes = ", ".join(dict.fromkeys(row.problem.dtype_label for row in rows))
    grey = "; grey: no kernel, XLA's own" if any(row.kernel == "XLA" for row in rows) else ""
    figure.suptitle(
        f"jaxconv {environment['jaxconv']} beside lax (jax {environment['jax']}), {dtypes}\n"
        f"{environment['device']}\n(right of 1: jaxconv takes less time{grey})",
        fontsize=10,
    )
    figure.savefig(path, dpi=160)
