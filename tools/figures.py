"""Draws the figures of docs/performance.md and the README from the measurements in docs/figures.

python tools/figures.py
"""

from __future__ import annotations

import csv
import pathlib
import sys

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

FIGURES = pathlib.Path(__file__).resolve().parents[1] / "docs" / "figures"
OPS = ("fprop", "dgrad", "wgrad")
LAX, OURS, FUSED = "#9a9a9a", "#1f6fb4", "#0b3d66"


def read(name: str) -> list[dict[str, str]]:
    """The rows of a table of tab-separated values, without its comments."""
    lines = (FIGURES / name).read_text().splitlines()
    return list(csv.DictReader((x for x in lines if not x.startswith("#")), delimiter="\t"))


def layers() -> plt.Figure:
    """Each layer's share of the roofline, lax's and jaxconv's, in three panels."""
    rows = read("h200_bf16_layers.tsv")
    figure, panels = plt.subplots(1, 3, figsize=(11, 6), sharey=True, layout="constrained")
    places = range(len(rows))
    for panel, op in zip(panels, OPS, strict=True):
        for side, color, shift in (("lax", LAX, -0.2), ("jaxconv", OURS, 0.2)):
            shares = [100 * float(r["roofline"]) / float(r[f"{side}_{op}"]) for r in rows]
            panel.barh([p + shift for p in places], shares, 0.38, color=color, label=side)
        panel.axvline(100, color="black", linewidth=0.8)
        panel.set_title(op)
        panel.set_xlim(0, 150)
        panel.grid(axis="x", alpha=0.3)
        panel.set_axisbelow(True)
    panels[0].set_yticks(places, [row["layer"] for row in rows])
    panels[0].invert_yaxis()
    panels[1].set_xlabel("roofline over time, %")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower right", ncols=2)
    figure.suptitle(
        "Dense layers, bfloat16, H200: device time inside a program, against the roofline"
    )
    return figure


def networks() -> plt.Figure:
    """Time of lax, of jaxconv and of jaxconv.fuse by network, training and inference."""
    rows = read("h200_bf16_networks.tsv")
    figure, panels = plt.subplots(1, 2, figsize=(9, 5), sharey=True, layout="constrained")
    for panel, mode, title in zip(
        panels, ("train", "infer"), ("training", "inference"), strict=True
    ):
        for side, color, shift in (
            ("lax", LAX, -0.27),
            ("jaxconv", OURS, 0),
            ("fused", FUSED, 0.27),
        ):
            measured = [(p, row) for p, row in enumerate(rows) if row[f"{mode}_{side}"]]
            times = [float(row[f"{mode}_{side}"]) for _, row in measured]
            bars = panel.barh(
                [p + shift for p, _ in measured], times, 0.26, color=color, label=side
            )
            labels = [f"{time:g}" for time in times]
            if side != "lax":
                ratios = [
                    float(row[f"{mode}_lax"]) / t
                    for (_, row), t in zip(measured, times, strict=True)
                ]
                labels = [f"{x}  ({r:.2f}x)" for x, r in zip(labels, ratios, strict=True)]
            panel.bar_label(bars, labels, padding=3, fontsize=7)
        panel.margins(x=0.2)
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("milliseconds a step")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(rows)), [row["network"] for row in rows])
    panels[0].invert_yaxis()
    panels[1].legend(loc="lower right", fontsize=9)
    figure.suptitle(
        "Networks in bfloat16 on one H200: lax, the same source on jaxconv, and with fuse",
        fontsize=11,
    )
    return figure


def main() -> int:
    """Writes the figures beside their data."""
    for name, draw in (("h200_bf16_layers", layers), ("h200_bf16_networks", networks)):
        draw().savefig(FIGURES / f"{name}.png", dpi=110, metadata={"Software": None})
    return 0


if __name__ == "__main__":
    sys.exit(main())
