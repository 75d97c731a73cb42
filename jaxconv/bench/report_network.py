"""Shows the results of networks: a table with two lines each, a summary and a plot."""

from __future__ import annotations

from collections.abc import Sequence

from jaxconv.bench.measure_network import FUSED, INT8, MODES, PREPARED, WINOGRAD, Result, Run, Side
from jaxconv.bench.report import geometric_mean

_SHOWN_KERNELS, _SHOWN_REASONS = 10, 5
_NAME_WIDTH = 100


def label(run: Run) -> str:
    """Names a network and how it runs."""
    return f"{run.name} {run.mode}"


def _input(run: Run) -> str:
    return f"{'x'.join(map(str, run.shape))} {run.dtype}"


class Table:
    """Two lines per result, in columns whose widths are known before the first measurement."""

    def __init__(self, runs: Sequence[Run]):
        self.columns = [
            ("network", -max([7, *(len(run.name) for run in runs)])),
            ("mode", -5),
            ("input", -max(len(_input(run)) for run in runs)),
            ("library", -8),
            ("step ms", 9),
            ("least-most", 17),
            ("conv ms", 9),
            ("rest ms", 9),
            ("examples/s", 10),
            ("compile s", 9),
            ("memory GB", 9),
            ("kernels", 9),
            ("difference", 10),
            ("lax/ours", 8),
        ]

    def header(self) -> list[str]:
        """The two lines above the first result."""
        rule = ["-" * max(abs(width), len(title)) for title, width in self.columns]
        return [self._line([title for title, _ in self.columns]), self._line(rule)]

    def rows(self, result: Result) -> str:
        """A line for each side; ``-`` for what was not measured."""
        run, lines = result.run, []
        for library in run.libraries:
            named = [run.name, run.mode, _input(run)] if library == "lax" else ["", "", ""]
            cells = [*_cells(result.sides[library], run), *_beside_lax(result, library)]
            lines.append(self._line([*named, library, *cells]))
        return "\n".join(lines)

    def _line(self, cells: Sequence[str]) -> str:
        padded = (
            cell.ljust(-width) if width < 0 else cell.rjust(width)
            for cell, (_, width) in zip(cells, self.columns, strict=True)
        )
        return "  ".join(padded).rstrip()


def _cells(side: Side, run: Run) -> list[str]:
    def number(value: float | None, scale: float, digits: int) -> str:
        return "-" if value is None else f"{value * scale:.{digits}f}"

    spread, rate = "-", None
    if side.median_s:
        spread = f"{side.least_s * 1e3:.2f}-{side.most_s * 1e3:.2f}"
        rate = run.shape[0] / side.median_s
    return [
        "failed" if side.failure else number(side.median_s, 1e3, 2),
        spread,
        number(side.device and side.device.convolutions, 1e3, 2),
        number(side.device and side.device.rest, 1e3, 2),
        number(rate, 1, 1 if rate and rate < 100 else 0),
        number(side.compile_s, 1, 1),
        number(side.memory_bytes, 1e-9, 2),
    ]


def _beside_lax(result: Result, library: str) -> list[str]:
    if library == "lax":
        return ["", "", ""]
    kernels = result.kernels.get(library)
    value = result.difference if library == "jaxconv" else result.differences.get(library)
    difference = "-" if value is None else f"{value:.1e}"
    ratio = result.ratio_of(library)
    return [
        f"{kernels.on_kernels}/{kernels.convolutions}" if kernels else "-",
        f"WRONG {difference}" if result.wrong else difference,
        "-" if ratio is None else f"{ratio:.2f}x",
    ]


def largest_kernels(result: Result) -> str:
    """The ten kernels of each library that take longest, with their share of a step."""
    lines = []
    for library, side in result.sides.items():
        for kernel in side.kernels[:_SHOWN_KERNELS]:
            name = kernel.name
            if len(name) > _NAME_WIDTH:
                name = name[: _NAME_WIDTH - 3] + "..."
            lines.append(
                f"    {library:7} {kernel.seconds / result.traced_steps * 1e3:9.3f} ms  "
                f"{kernel.count / result.traced_steps:6.1f} x  "
                f"{'conv' if kernel.computing else 'rest'}  {name}"
            )
    return "\n".join(lines)


def summary(results: Sequence[Result], platform: str) -> list[str]:
    """The lines below the table; the last are the geometric means of all ratios to lax."""
    lines = []
    if platform != "cuda":
        lines.append(
            f"conv ms and rest ms: not available on this platform, {platform}; they come from the "
            "trace of a GPU"
        )
    for result in results:
        for library, side in result.sides.items():
            if side.failure:
                lines.append(f"{label(result.run)}: {library} failed: {side.failure}")
        for library, kernels in result.kernels.items():
            if not kernels.refusals:
                continue
            left = kernels.convolutions - kernels.on_kernels
            lines.append(
                f"{label(result.run)}: {library}: XLA's convolution in {left} of "
                f"{kernels.convolutions}:"
            )
            reasons = sorted(kernels.refusals.items(), key=lambda item: -item[1])
            lines += [f"    {count} x {reason}" for reason, count in reasons[:_SHOWN_REASONS]]
            if len(reasons) > _SHOWN_REASONS:
                lines.append(f"    and {len(reasons) - _SHOWN_REASONS} more (--json has them)")
    for mode in MODES:
        ratios = [r.ratio for r in results if r.run.mode == mode and r.ratio is not None]
        if ratios:
            lines.append(
                f"{mode}: geometric mean over {len(ratios)} networks: "
                f"{geometric_mean(ratios):.2f}x lax, least {min(ratios):.2f}x"
            )
    for result in results:
        if result.run.fused and (ratio := result.ratio_of(FUSED)):
            ours = result.sides["jaxconv"].median_s / result.sides[FUSED].median_s
            kernels = result.kernels[FUSED]
            lines.append(
                f"{label(result.run)} fused: {ratio:.2f}x lax and {ours:.2f}x jaxconv, "
                f"{kernels.with_epilogue} of {kernels.convolutions} convolutions with an epilogue"
            )
    for result in results:
        for library in (WINOGRAD, PREPARED):
            lines += _winograd(result, library)
        if result.run.quantized and (ratio := result.ratio_of(INT8)):
            ours = result.sides["jaxconv"].median_s / result.sides[INT8].median_s
            lines.append(
                f"{label(result.run)} in int8: {ratio:.2f}x lax and {ours:.2f}x jaxconv in "
                f"{result.run.dtype}"
            )
    return lines or ["nothing was measured"]


def _winograd(result: Result, library: str) -> list[str]:
    """The lines on one of the sides with Winograd, if it was timed: beside the direct kernels."""
    if library not in result.run.libraries or not (ratio := result.ratio_of(library)):
        return []
    direct, side = result.sides["jaxconv"], result.sides[library]
    kernels = result.kernels[library]
    taken = sum(n for name, n in kernels.instances.items() if "_winograd_" in name)
    alone = ""
    if direct.device and side.device and side.device.convolutions:
        alone = f" ({direct.device.convolutions / side.device.convolutions:.2f}x in convolutions)"
    what = "filters prepared for Winograd" if library == PREPARED else "Winograd"
    lines = [
        f"{label(result.run)} with {what} in {taken} of {kernels.convolutions} convolutions: "
        f"{ratio:.2f}x lax and {direct.median_s / side.median_s:.2f}x the direct kernels{alone}"
    ]
    if library in result.errors:
        errors = {"Winograd": library, "direct kernels": "jaxconv", "lax": "lax"}
        said = ", ".join(f"{of} {result.errors[name]:.2e}" for of, name in errors.items())
        lines.append(f"    error of the output: {said}")
    return lines


def _parts(side: Side) -> list[tuple[str, float, str]]:
    """A step's parts as (name, seconds, colour)."""
    if side.device is None:
        return [("step", side.median_s, "#3465a4")]
    convolutions, rest = side.device
    return [
        ("convolutions and matrix products", convolutions, "#3465a4"),
        ("all other kernels", rest, "#a9c4e4"),
        ("no kernel running", max(0.0, side.median_s - convolutions - rest), "0.9"),
    ]


def plot(results: Sequence[Result], path: str, environment: dict[str, str]) -> None:
    """Draws both libraries' time of a step, lax's being 1, one panel per mode; saves the figure.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    timed = [result for result in results if result.ratio is not None]
    modes = [mode for mode in MODES if any(r.run.mode == mode for r in timed)]
    most = max([1.0, *(1 / result.ratio for result in timed)])
    groups = {mode: [r for r in timed if r.run.mode == mode] for mode in modes}
    most_rows = max(map(len, groups.values()), default=1)
    figure = Figure(figsize=(1.5 + 5 * max(1, len(modes)), 1.9 + 0.62 * most_rows))
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, max(1, len(modes)), squeeze=False)[0]
    drawn: dict[str, object] = {}
    for mode, axes in zip(modes, panels, strict=True):
        for position, result in enumerate(groups[mode]):
            unit = result.sides["lax"].median_s
            libraries = result.run.libraries
            height = 0.72 / len(libraries)
            for place, library in enumerate(libraries):
                offset = (place - (len(libraries) - 1) / 2) * 1.1 * height
                left, side = 0.0, result.sides[library]
                for name, seconds, color in _parts(side):
                    drawn[name] = axes.barh(
                        position + offset,
                        seconds / unit,
                        left=left,
                        height=height,
                        color=color,
                        zorder=2,
                    )
                    left += seconds / unit
                text = f" {library} {side.median_s * 1e3:.3g} ms"
                if library != "lax":
                    text += f", {result.ratio_of(library):.2f}x"
                axes.text(max(left, 1.0), position + offset, text, va="center", fontsize=7)
        axes.set_yticks(
            range(len(groups[mode])),
            [f"{r.run.name}\n{_input(r.run)}" for r in groups[mode]],
            fontsize=7,
        )
        axes.set_ylim(len(groups[mode]) - 0.45, -0.55)
        axes.set_xlim(0, 1.55 * most)
        axes.axvline(1.0, color="0.15", linewidth=0.8, zorder=3)
        axes.grid(axis="x", color="0.9", zorder=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.tick_params(axis="x", labelsize=8)
        mean = geometric_mean([r.ratio for r in groups[mode]])
        axes.set_title(f"{mode}: {mean:.2f}x", fontsize=10)
        axes.set_xlabel("time of a step / time of lax's step", fontsize=8)
    figure.suptitle(
        f"jaxconv {environment['jaxconv']} beside lax (jax {environment['jax']}), whole networks\n"
        f"{environment['device']}",
        fontsize=10,
    )
    figure.legend(drawn.values(), drawn.keys(), loc="lower center", ncols=3, fontsize=8)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, dpi=160)
