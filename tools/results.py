"""Reads the measured results in docs/results, and writes the tables of the pages in docs/.

    python tools/results.py                           # the tables of the pages, from docs/results
    python tools/results.py --layers                  # first docs/results/h200_layers.csv
    python tools/results.py --add bench.json net.json # first rows of h200_networks.csv
    python tools/results.py --models models.json      # first rows of cpu_third_party.csv

A table of a page follows a comment, ``<!-- results: NAME -->``, and is replaced. A file of
docs/results is CSV after lines ``# fact: value``; a fact such as ``gpu`` applies to all rows if
there is no column of this name.

``h200_layers.csv`` joins the times of ``tests/cc/measured_times.tsv`` with the selected kernel of
each layer. If that table lacks the kernel, lax's time and the kernels' are those of
``measured_candidates.tsv``. Selection is compiled as a host program, as for
``tools/bench_problems.py``; it needs neither a GPU nor CUDA. ``--add`` takes files of ``python -m
jaxconv.bench --network NAME --json`` and of ``tools/keras_networks.py --json``; rows of the same
network, mode and side are replaced.
``--models`` takes files of ``tools/third_party_models.py --json``; rows of the same model are
replaced.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import pathlib
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [
    str(REPOSITORY / folder) for folder in (".", "tests/support", "tools", "tools/docs")
]

RESULTS = REPOSITORY / "docs" / "results"
PAGES = ("performance.md", "when_not.md", "support.md")
OPS = ("fprop", "dgrad", "wgrad")
FACTS = ("gpu", "driver", "jax", "commit", "command")  # every row or its file has these

Rows = list[dict[str, str]]


def parts(name: str) -> tuple[list[str], Rows]:
    """The comments and the rows of a file of docs/results."""
    lines = (RESULTS / name).read_text().splitlines()
    comments = [line for line in lines if line.startswith("#")]
    return comments, list(csv.DictReader(lines[len(comments) :]))


def read(name: str) -> Rows:
    """The rows of a file of docs/results, each with the facts of the file."""
    comments, rows = parts(name)
    facts = (re.fullmatch(r"# (\w+): (.*)", comment) for comment in comments)
    common = {fact[1]: fact[2] for fact in facts if fact}
    return [common | row for row in rows]


def write(name: str, comments: Sequence[str], rows: Rows) -> None:
    """Writes a file of docs/results."""
    with open(RESULTS / name, "w", newline="") as file:
        file.writelines(f"{comment}\n" for comment in comments)
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


# --- tables of pages ------------------------------------------------------------------------------


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return re.sub(r"(?<=\|)  +(?=\|)", " ", text).replace("| --- ", "|---").replace("--- |", "---|")


def mean(values: Iterable[float]) -> float:
    """The geometric mean."""
    return math.exp(statistics.fmean(map(math.log, values)))


def dense_means() -> str:
    """The dense layers' ratios to the roofline and to lax."""
    rows = read("h200_dense_layers.csv")

    def means(numerator: str, denominator: str) -> list[str]:
        columns = [(numerator.format(op), denominator.format(op)) for op in OPS]
        return [f"{mean(float(r[a]) / float(r[b]) for r in rows):.2f}" for a, b in columns]

    ours = ["time of jaxconv over the roofline", *means("jaxconv_{}", "roofline")]
    theirs = ["time of lax over time of jaxconv", *means("lax_{}", "jaxconv_{}")]
    return markdown(["", *OPS], [ours, theirs])


def layer_sets(dtype: str, precision: str) -> str:
    """The gain of ``auto`` in the layers of each set, and the number of layers left to XLA."""
    rows = [
        r for r in read("h200_layers.csv") if (r["dtype"], r["precision"]) == (dtype, precision)
    ]
    lines = []
    for name in dict.fromkeys(row["set"] for row in rows):
        cells, left = [name], []
        for op in OPS:
            found = [row for row in rows if row["set"] == name and row["operation"] == op]
            gains = [gain(row) for row in found if row["auto"] != "XLA" and row["auto_us"]]
            cells.append(f"{mean(gains):.2f}, {min(gains):.2f}")
            left.append(str(sum(row["auto"] == "XLA" for row in found)))
        lines.append([*cells, ", ".join(left)])
    return markdown(["layers", *OPS, "left to XLA, of fprop, dgrad, wgrad"], lines)


def gain(row: dict[str, str]) -> float:
    """The time of lax over the time of the choice of ``auto``."""
    return float(row["lax_us"]) / float(row["auto_us"])


def kind(row: dict[str, str]) -> str:
    """The kind of a layer, by its channels, groups and filter."""
    facts = dict(re.findall(r" ([gcf])(\d[\dx]*)", row["key"]))
    groups, channels = int(facts["g"]), int(facts["c"])
    if groups > 1:
        return "depthwise" if groups == channels else "small groups"
    if channels <= 4:
        return "3 input channels"
    return "1x1" if set(facts["f"].split("x")) == {"1"} else "dense, larger filters"


def kinds_of_layers() -> str:
    """The gain of ``auto`` by kind of layer; layers left to XLA count as 1."""
    rows = [row for row in read("h200_layers.csv") if row["auto_us"]]
    lines = []
    for name in sorted({kind(row) for row in rows}):
        line = [name]
        for place in (("bf16", "default"), ("f32", "default"), ("f32", "highest")):
            found = [r for r in rows if kind(r) == name and (r["dtype"], r["precision"]) == place]
            little = sum(gain(row) < 1.05 for row in found)
            said = f"{mean(map(gain, found)):.2f}, {little} of {len(found)}" if found else ""
            line.append(said or "not measured")
        lines.append(line)
    return markdown(["layers", "bfloat16", "float32", "float32 at HIGHEST"], lines)


def slower_layers() -> str:
    """The layers in which the kernel chosen by ``auto`` is slower than lax."""
    rows = [row for row in read("h200_layers.csv") if row["auto_us"] and gain(row) < 0.97]
    header = ["layer", "problem", "operation", "operands", "lax, us", "jaxconv, us", "ratio"]
    return markdown(
        header,
        [
            [
                row["layer"],
                row["problem"],
                row["operation"],
                row["dtype"] if row["precision"] == "default" else "f32, HIGHEST",
                row["lax_us"],
                row["auto_us"],
                f"{gain(row):.2f}",
            ]
            for row in sorted(rows, key=gain)
        ],
    )


def by_operation(rows: Rows, column: str) -> str:
    """The cells of a layer's three operations; empty if one is missing."""
    found = {row["operation"]: row[column] for row in rows}
    return ", ".join(found.get(op, "") for op in OPS)


def layers_of(rows: Rows) -> Iterator[Rows]:
    """Groups consecutive rows by layer."""
    for name in dict.fromkeys(row["layer"] for row in rows):
        yield [row for row in rows if row["layer"] == name]


def memory_layers() -> str:
    """Layers that are limited by memory bandwidth."""
    header = ["layer", "problem", "bytes at 4.3 TB/s", "jaxconv", "lax"]
    return markdown(
        header,
        [
            [
                rows[0]["layer"],
                rows[0]["problem"],
                rows[0]["bytes_at_4.3_TB/s"],
                by_operation(rows, "jaxconv"),
                by_operation(rows, "lax"),
            ]
            for rows in layers_of(read("h200_memory_layers.csv"))
        ],
    )


def highest_kernels() -> str:
    """float32 at "highest": by FP32 units, and by three TF32 products."""
    lines = []
    for rows in layers_of(read("h200_highest_kernels.csv")):
        found = {r["operation"]: f"{r['fp32_units']}, {r['three_tf32_products']}" for r in rows}
        lines.append([rows[0]["layer"], *(found.get(op, "") for op in OPS)])
    return markdown(["layer", *OPS], lines)


SIDES = ("lax", "jaxconv", "fused")
MODES = {"train": "training", "infer": "inference"}


def networks(rows: Rows, *, convolutions: bool) -> str:
    """Milliseconds for a step by network and mode, and lax's time over each."""
    header = ["network, batch", "mode", *SIDES, "lax / jaxconv", "lax / fused"]
    header += ["convolutions, lax / jaxconv"] * convolutions
    lines, last = [], ""
    for place in dict.fromkeys((r["network"], r["batch"], r["mode"]) for r in rows):
        found = {r["side"]: r for r in rows if (r["network"], r["batch"], r["mode"]) == place}
        times = {side: row["ms"] for side, row in found.items()}
        name = ", ".join(place[:2])
        line = ["" if name == last else name, place[2], *(times.get(side, "") for side in SIDES)]
        for side in SIDES[1:]:
            both = "lax" in times and side in times
            line.append(f"{float(times['lax']) / float(times[side]):.2f}" if both else "")
        if convolutions:
            line.append(
                " / ".join(found[side]["convolutions_ms"] for side in SIDES[:2] if side in found)
            )
        lines.append(line)
        last = name
    return markdown(header, lines)


def network_rows(gpu: str = "h200", **facts: str) -> Rows:
    """Rows of networks on a GPU with these facts."""
    rows = read(f"{gpu}_networks.csv")
    return [row for row in rows if all(row[name] == value for name, value in facts.items())]


def compiled() -> str:
    """Times beside torch.compile."""
    lines = []
    for row in network_rows(side="torch.compile"):
        where = {name: row[name] for name in ("network", "batch", "mode", "dtype")}
        sides = {r["side"]: r["ms"] for r in network_rows(**where)}
        times = [sides[side] for side in (*SIDES, "torch.compile")]
        ratio = f"{float(times[3]) / float(times[2]):.2f}"
        lines.append([f"{row['network']}, {row['batch']}", row["mode"], *times, ratio])
    header = ["network, batch", "mode", *SIDES, "torch.compile", "torch.compile / fused"]
    return markdown(header, lines)


def compile_times() -> str:
    """Seconds of compilation."""
    rows = read("h200_compile.csv")
    return markdown(
        ["network", *SIDES], [[row["network"], *(row[side] for side in SIDES)] for row in rows]
    )


def third_party() -> str:
    """Models of other libraries: a line for each, with its outputs and its gradient."""
    header = ["library", "model"]
    for title in ("convolutions, on kernels, fused", "difference (rounding)", "compilation, s"):
        header += [f"{title}: outputs", "gradient"]
    lines, last = [], ""
    rows = read("cpu_third_party.csv")
    for model in dict.fromkeys(row["model"] for row in rows):
        found = [row for row in rows if row["model"] == model]
        modes = [sides_of([r for r in found if r["mode"] == m]) for m in ("infer", "gradient")]
        cells = [cell for pair in zip(*modes, strict=True) for cell in pair]
        if outcomes := [row["outcome"] for row in found if row["outcome"] != "right"]:
            cells[0] = outcomes[0]
        library = found[0]["library"]
        name = model.partition("/")[2]
        lines.append(["" if library == last else library, name, *cells])
        last = library
    return markdown(header, lines)


def sides_of(rows: Rows) -> tuple[str, str, str]:
    """Counts under ``fuse``, the largest difference, and seconds of compilation by side."""
    if not rows:
        return "", "", ""
    counts = [rows[-1][name] for name in ("convolutions", "on_kernels", "fused")]
    difference = max((row["difference"] for row in rows if row["difference"]), key=float)
    seconds = [row["compile_s"] for row in rows]
    return ", ".join(counts), f"{difference} ({rows[0]['rounding']})", ", ".join(seconds)


TABLES: dict[str, Callable[[], str]] = {
    "means of h200_dense_layers": dense_means,
    "h200_layers, bf16": lambda: layer_sets("bf16", "default"),
    "h200_layers, f32": lambda: layer_sets("f32", "default"),
    "h200_layers, f32 at HIGHEST": lambda: layer_sets("f32", "highest"),
    "h200_layers, kinds": kinds_of_layers,
    "h200_layers, slower": slower_layers,
    "h200_memory_layers": memory_layers,
    "h200_highest_kernels": highest_kernels,
    "h200_networks, bf16": lambda: networks(
        network_rows(dtype="bf16", source="bench"), convolutions=True
    ),
    "h200_networks, keras": lambda: networks(
        network_rows(source="keras.applications", dtype="bf16"), convolutions=False
    ),
    "h200_networks, f32": lambda: networks(network_rows(dtype="f32"), convolutions=False),
    "h200_networks, torch.compile": compiled,
    "h100_networks, keras": lambda: networks(
        network_rows("h100", source="keras.applications"), convolutions=False
    ),
    "h100_networks, f32": lambda: networks(network_rows("h100", dtype="f32"), convolutions=False),
    "h200_compile": compile_times,
    "cpu_third_party": third_party,
}
MARKED = re.compile(r"(<!-- results: (.+) -->\n\n)((?:\|.*\n)*)")


def page_with_tables(text: str) -> str:
    """A page's text with its tables written anew."""

    def made(found: re.Match[str]) -> str:
        return f"{found[1]}{TABLES[found[2]]()}\n" + "\n" * (not found[3])

    return MARKED.sub(made, text)


# --- files of docs/results ------------------------------------------------------------------------

SETS = {
    "mobilenet_v2": "MobileNetV2, 256 images",
    "resnext50": "ResNeXt-50, 128 images",
    "convnext_t": "ConvNeXt-T, 128 images",
}
REFERENCE = "the 22 reference layers"


def layer_rows(select: Callable[[str, str, str], Sequence]) -> Rows:
    """The measured layers, with the choices of selection.

    Args:
        select: (problem key, algorithm, target) -> (instance's name or "", ...).
    """
    import hooks
    import measured_times

    from jaxconv._src.problem.spec import Op, problem_key
    from jaxconv.bench import layers, network_layers
    from jaxconv.bench.problem import Problem

    named = {name: (REFERENCE, layers.LAYERS[name]) for name in layers.SETS["all"].names}
    for network, words in SETS.items():
        found = network_layers.layers_of(network).layers
        named |= {name: (words, layer) for name, layer in found.items()}
    times = measured_times.read(measured_times.TABLE)
    candidates = measured_times.read(measured_times.CANDIDATES)

    def by_instance(measured: measured_times.Times, key: str) -> tuple[float, dict[str, float]]:
        lax, sliced = measured.get(key, (None, {}))
        return lax or 0.0, {measured_times.instance_of(name): us for name, us in sliced.items()}

    rows = []
    for dtype, precision in (("bf16", "default"), ("f32", "default"), ("f32", "highest")):
        for name, (words, layer) in named.items():
            for op in Op:
                problem = Problem("", layer, op, dtype, precision)
                dtypes = problem.operand_dtype, problem.out_dtype
                key = problem_key(op, layer.spec(precision), layer.sizes, *dtypes)
                if key not in times:
                    continue
                lax, kernels = by_instance(times, key)
                taken = select(key, "auto", "h200")[0] or "XLA"
                if taken not in ("XLA", *kernels):
                    of_candidates = by_instance(candidates, key)
                    if of_candidates[0] and taken in of_candidates[1]:
                        lax, kernels = of_candidates
                best = min(kernels, key=kernels.__getitem__, default="")
                row = dict(set=words, layer=name, operation=op.value, dtype=dtype)
                row |= dict(precision=precision, problem=hooks._layer(key)[3])
                row |= dict(lax_us=f"{lax:.4g}", auto=taken)
                auto = lax if taken == "XLA" else kernels.get(taken)
                row |= dict(auto_us=f"{auto:.4g}" if auto else "", fastest=best)
                rows.append(row | dict(fastest_us=f"{kernels[best]:.4g}" if best else "", key=key))
    return rows


def network_times(path: pathlib.Path) -> Rows:
    """The rows of a file of the bench or of tools/keras_networks.py.

    Raises:
        ValueError: the file is not from a GPU, or lacks a fact.
    """
    content: dict[str, Any] = json.loads(path.read_text())
    environment = content["environment"]
    if missing := {"device", "driver", "jax", "commit"} - set(environment):
        raise ValueError(f"{path}: no {', '.join(sorted(missing))}; expected a checkout and a GPU")
    keras = "keras" in environment
    program = "tools/keras_networks.py" if keras else "-m jaxconv.bench"
    facts = {name: environment[name] for name in ("driver", "jax", "commit")}
    facts["command"] = " ".join(["python", program, *content["command"]])
    rows: Rows = []
    for found in content["rows"]:
        if keras:
            measured = {found["side"]: (found["device_ms"] or found["step_ms"], None)}
        else:
            measured = {
                side: (1e3 * times["median_s"], 1e3 * times["device"]["convolutions"])
                for side in SIDES
                if (times := found.get(side)) and times["device"] and not found["wrong"]
            }
        for side, (ms, convolutions) in measured.items():
            row = dict(
                network=NAMES.get(found["network"], found["network"]),
                source="keras.applications" if keras else "bench",
                batch=str(found["batch"] if keras else found["shape"][0]),
                dtype=found["dtype"],
                mode=found["mode"],
                side=side,
                ms=f"{ms:.4g}" if ms else "",
                convolutions_ms=f"{convolutions:.3g}" if convolutions else "",
                gpu=environment["device"],
            )
            rows += [row | facts] * bool(ms)
    return rows


def model_rows(path: pathlib.Path) -> Rows:
    """The rows of a file of tools/third_party_models.py."""
    content: dict[str, Any] = json.loads(path.read_text())
    environment = content["environment"]
    facts = {"gpu": f"none; CPU: {environment['device']}", "driver": "none"}
    facts |= {name: environment[name] for name in ("jax", "commit")}
    facts["command"] = " ".join(["python tools/third_party_models.py", *content["command"]])
    forms = {"compile_s": ".1f", "difference": ".1e", "rounding": ".1e"}

    def cell(name: str, value: Any) -> str:
        return "" if value is None else format(value, forms.get(name, ""))

    return [{name: cell(name, row[name]) for name in row} | facts for row in content["rows"]]


def with_models(rows: Rows, added: Rows) -> Rows:
    """The rows with others in the place of those of the same models."""
    models = {row["model"]: [r for r in rows if r["model"] == row["model"]] for row in rows}
    models |= {row["model"]: [r for r in added if r["model"] == row["model"]] for row in added}
    return [row for found in models.values() for row in found]


NAMES = {
    "resnet50": "ResNet-50",
    "resnext50": "ResNeXt-50 32x4d",
    "convnext_t": "ConvNeXt-T",
    "mobilenet_v2": "MobileNetV2",
    "efficientnet_b0": "EfficientNet-B0",
    "unet": "diffusion U-Net",
    "unet3d": "3-D U-Net",
    "wavenet": "WaveNet",
    "MobileNetV3Large": "MobileNetV3-Large",
    "EfficientNetV2B0": "EfficientNetV2-B0",
}


def with_rows(rows: Rows, added: Rows) -> Rows:
    """Adds rows, which replace those of the same network, mode and side."""
    places = ("network", "source", "batch", "dtype", "mode", "side")
    found = {tuple(row[name] for name in places): row for row in rows}
    for row in added:
        found[tuple(row[name] for name in places)] = row
    return list(found.values())


def main(argv: Sequence[str]) -> int:
    """Writes the requested results, and the tables of the pages; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", action="store_true", help="write h200_layers.csv")
    parser.add_argument("--program", type=pathlib.Path, help="choices_test, if it is compiled")
    parser.add_argument("--add", nargs="+", default=(), type=pathlib.Path, metavar="FILE.json")
    parser.add_argument("--models", nargs="+", default=(), type=pathlib.Path, metavar="FILE.json")
    chosen = parser.parse_args(argv)
    for path in chosen.models:
        comments, rows = parts("cpu_third_party.csv")
        write("cpu_third_party.csv", comments, with_models(rows, model_rows(path)))
    if chosen.layers:
        import bench_problems
        from selection_program import SelectionProgram

        program = SelectionProgram(chosen.program or bench_problems.built())
        rows = layer_rows(program.select)
        write("h200_layers.csv", parts("h200_layers.csv")[0], rows)
    for path in chosen.add:
        comments, rows = parts("h200_networks.csv")
        write("h200_networks.csv", comments, with_rows(rows, network_times(path)))
    for name in PAGES:
        page = REPOSITORY / "docs" / name
        page.write_text(page_with_tables(page.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
