"""Draws the figures of docs/performance.md and the README from the measurements in docs/results.

python tools/figures.py
"""

from __future__ import annotations

import pathlib
import sys

import matplotlib

matplotlib.use("Agg")
import results
from matplotlib import pyplot as plt

FIGURES = pathlib.Path(__file__).resolve().parents[1] / "docs" / "figures"
OPS = ("fprop", "dgrad", "wgrad")
SIDES = {"lax": "#9a9a9a", "jaxconv": "#1f6fb4", "fused": "#0b3d66"}


def layers() -> plt.Figure:
    """Each layer's share of the roofline, for lax and for jaxconv, in three panels."""
    rows = results.read("h200_dense_layers.csv")
    figure, panels = plt.subplots(1, 3, figsize=(11, 6), sharey=True, layout="constrained")
    places = range(len(rows))
    for panel, op in zip(panels, OPS, strict=True):
        for side, shift in (("lax", -0.2), ("jaxconv", 0.2)):
            shares = [100 * float(r["roofline"]) / float(r[f"{side}_{op}"]) for r in rows]
            panel.barh([p + shift for p in places], shares, 0.38, color=SIDES[side], label=side)
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
    """Times of lax, jaxconv and jaxconv.fuse by network, for training and inference."""
    rows = results.read("h200_networks.csv")
    times = {(r["mode"], r["side"], named(r)): float(r["ms"]) for r in rows if r["side"] in SIDES}
    names = list(dict.fromkeys(name for _, _, name in times))
    figure, panels = plt.subplots(1, 2, figsize=(10, 7.5), sharey=True, layout="constrained")
    for panel, mode in zip(panels, results.MODES, strict=True):
        for shift, (side, color) in zip((-0.27, 0, 0.27), SIDES.items(), strict=True):
            found = [(i, times.get((mode, side, name))) for i, name in enumerate(names)]
            places, widths = zip(*[(i + shift, ms) for i, ms in found if ms], strict=True)
            bars = panel.barh(places, widths, 0.26, color=color, label=side)
            labels = [f"{ms:g}" for ms in widths]
            if side != "lax":
                of_lax = [times[mode, "lax", names[i]] for i, ms in found if ms]
                ratios = [lax / ms for lax, ms in zip(of_lax, widths, strict=True)]
                labels = [f"{x}  ({r:.2f}x)" for x, r in zip(labels, ratios, strict=True)]
            panel.bar_label(bars, labels, padding=3, fontsize=7)
        panel.margins(x=0.2, y=0.01)
        panel.set_title(results.MODES[mode], fontsize=10)
        panel.set_xlabel("milliseconds a step")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(names)), names)
    panels[0].invert_yaxis()
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.suptitle(
        "Networks on one H200, in bfloat16 but where float32 is named:\n"
        "lax, the same source on jaxconv, and with fuse",
        fontsize=11,
    )
    return figure


def named(row: dict[str, str]) -> str:
    """The name of a network in the figure."""
    dtype = ", float32" if row["dtype"] == "f32" else ""
    source = "\nkeras.applications" if row["source"] == "keras.applications" else ""
    return f"{row['network']}, {row['batch']}{dtype}{source}"


def main() -> int:
    """Writes the figures beside their data."""
    for name, draw in (("h200_bf16_layers", layers), ("h200_networks", networks)):
        draw().savefig(FIGURES / f"{name}.png", dpi=110, metadata={"Software": None})
    return 0


if __name__ == "__main__":
    sys.exit(main())
