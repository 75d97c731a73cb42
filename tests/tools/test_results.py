"""The measurements in docs/results, and the text that tools/results.py writes into pages."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import re
import sys

import pytest
from selection_program import SelectionProgram

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"


@pytest.fixture(scope="module")
def results():
    path = sys.path.copy()
    spec = importlib.util.spec_from_file_location("results", REPOSITORY / "tools" / "results.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = path


FILES = [file.name for file in sorted((DOCS / "results").glob("*.csv"))]


@pytest.mark.parametrize("name", FILES)
def test_every_row_names_its_machine_and_command(results, name):
    rows = results.read(name)
    assert rows
    for row in rows:
        assert all(row.get(fact) for fact in results.FACTS), row
        assert None not in row and None not in row.values(), "more or fewer cells than columns"
    assert f"]({name})" in (DOCS / "results" / "README.md").read_text()


def test_tables_of_the_pages_are_those_of_the_files(results):
    shown = []
    for name in results.PAGES:
        text = (DOCS / name).read_text()
        shown += [found[2] for found in results.MARKED.finditer(text)]
        assert text == results.page_with_tables(text), "python tools/results.py"
    assert set(shown) == set(results.TABLES)


def test_every_table_of_the_page_is_made_of_results(results):
    text = (DOCS / "performance.md").read_text()
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert len(tables) == len(list(results.MARKED.finditer(text)))


def test_what_the_pages_say_in_words(results):
    page = (DOCS / "performance.md").read_text()
    rows = results.read("h200_layers.csv")
    measured = [row for row in rows if row["auto_us"]]
    assert f"All {len(rows)} rows have been measured, {len(measured)} of them with" in page
    assert f"without the {len(rows) - len(measured)} rows" in page
    memory = results.read("h200_memory_layers.csv")
    gains = [float(row["lax"]) / float(row["jaxconv"]) for row in memory]
    said = f"the {len(gains)} rows is {results.mean(gains):.1f} times lax's speed, the least "
    assert f"{said}{min(gains):.2f}" in " ".join(page.split())

    readme = (REPOSITORY / "README.md").read_text()
    for mode, title in (("train", "training step"), ("infer", "inference")):
        (line,) = re.findall(rf"^\| H200, {title},.*\| (.*) \|$", readme, re.MULTILINE)
        for said in line.split(", "):
            name, ratio = said.rsplit(" ", 1)
            found = results.network_rows(mode=mode, dtype="bf16", source="bench")
            ms = {r["side"]: float(r["ms"]) for r in found if r["network"].startswith(name)}
            assert f"{ms['lax'] / ms['fused']:.2f}" == ratio, said


def test_what_is_said_of_losses(results):
    """Sentences of when_not.md with the figures of a network."""
    text = " ".join((DOCS / "when_not.md").read_text().split())

    def ms(name: str, side: str, column: str = "ms", **place: str) -> float:
        (row,) = (r for r in results.network_rows(side=side, **place) if r["network"] == name)
        return float(row[column])

    def gains(name: str, **place: str) -> list[str]:
        lax = ms(name, "lax", **place)
        return [f"{lax / ms(name, side, **place):.2f}" for side in ("jaxconv", "fused")]

    float32 = {"dtype": "f32", "mode": "train"}
    install, fuse = gains("ResNet-50", **float32)
    assert f"step of ResNet-50 gains {install} by `install()` and {fuse} with `fuse`" in text
    assert "ResNeXt-50 {} and {}.".format(*gains("ResNeXt-50 32x4d", **float32)) in text

    inference = {"dtype": "bf16", "mode": "infer"}
    saved = {}
    for name in ("EfficientNet-B0", "diffusion U-Net"):
        saved[name] = 100 - 100 * ms(name, "fused", **inference) / ms(name, "jaxconv", **inference)
    assert "shortens them by {:.0f} and {:.0f} %".format(*saved.values()) in text
    sides = ("jaxconv", "torch.compile", "fused")
    alone, theirs, ours = (ms("ConvNeXt-T", side, **inference) for side in sides)
    said = f"takes {alone:g} ms, by PyTorch's `torch.compile` {theirs:g}, with `fuse` {ours:g}"
    assert said in text

    for name, mode, words in (
        ("ResNet-50", "infer", "of ResNet-50's inference"),
        ("MobileNetV2", "train", "of MobileNetV2's training step"),
    ):
        place = {"dtype": "bf16", "mode": mode}
        share = ms(name, "lax", "convolutions_ms", **place) / ms(name, "lax", **place)
        assert f"{100 * share:.0f} % {words}" in text


def test_layers_have_the_measured_times_and_what_auto_takes(results, choices_program):
    made = results.layer_rows(SelectionProgram(choices_program).select)
    assert made == results.parts("h200_layers.csv")[1], "python tools/results.py --layers"


def test_what_is_said_of_models_of_other_libraries(results):
    """Sentences of support.md."""
    text = " ".join((DOCS / "support.md").read_text().split())
    rows = results.read("cpu_third_party.csv")
    tried = [row for row in rows if row["mode"]]
    assert all(row["outcome"] == "right" for row in tried)
    assert f"On a CPU {len({row['model'] for row in tried})} models ran" in text
    assert len(rows) - len(tried) == 2 and "Two could not be tried" in text

    def ratios(mode: str) -> list[str]:
        seconds = {
            side: sum(
                float(r["compile_s"]) for r in tried if (r["mode"], r["side"]) == (mode, side)
            )
            for side in results.SIDES
        }
        return [f"{seconds[side] / seconds['lax']:.2f}" for side in results.SIDES[1:]]

    said = (
        "gradients take {} times lax's time under `override` and {} under `fuse`, outputs {} and {}"
    )
    assert said.format(*ratios("gradient"), *ratios("infer")) in text


ENVIRONMENT = {"device": "NVIDIA H200", "driver": "580.1", "jax": "0.11.2", "commit": "abc"}


def test_networks_are_added(results, tmp_path):
    bench, keras = tmp_path / "bench.json", tmp_path / "keras.json"
    device = {"convolutions": 0.01, "rest": 0.02}
    run = {"network": "resnet50", "mode": "train", "dtype": "bf16", "shape": [256, 224, 224, 3]}
    sides = {side: {"median_s": 0.03, "device": device} for side in ("lax", "jaxconv")}
    content = {"environment": ENVIRONMENT, "command": ["--network", "resnet50"]}
    bench.write_text(json.dumps(content | {"rows": [{**run, **sides, "wrong": False}]}))
    row = {"network": "VGG16", "mode": "infer", "dtype": "f32", "batch": 64, "step_ms": 2.0}
    rows = [{**row, "side": "lax", "device_ms": 1.5}]
    rows.append({**row, "side": "fused", "device_ms": None, "step_ms": None})  # this side failed
    content["environment"] = ENVIRONMENT | {"keras": "3.0"}
    keras.write_text(json.dumps(content | {"rows": rows}))

    before = results.read("h200_networks.csv")
    added = results.network_times(bench) + results.network_times(keras)
    assert [(r["side"], r["ms"], r["convolutions_ms"]) for r in added] == [
        ("lax", "30", "10"),
        ("jaxconv", "30", "10"),
        ("lax", "1.5", ""),
    ]
    assert added[0]["command"] == "python -m jaxconv.bench --network resnet50"
    after = results.with_rows(before, added)
    assert len(after) == len(before) + 1  # the rows of ResNet-50 are replaced
    assert all(list(row) == list(before[0]) for row in after)

    bench.write_text(json.dumps(content | {"environment": {"device": "a CPU"}}))
    with pytest.raises(ValueError, match="no commit, driver, jax"):
        results.network_times(bench)


def test_models_of_other_libraries(results, tmp_path, monkeypatch):
    file = tmp_path / "models.json"
    places = [("keras/A", mode, side) for mode in ("infer", "gradient") for side in results.SIDES]
    names = ("convolutions", "on_kernels", "fused", "compile_s", "difference", "rounding")
    rows = [
        dict(zip(("model", "mode", "side"), place, strict=True), library="keras 3", outcome="right")
        | dict(zip(names, (9, 8, i, 1.25 + i, i * 1e-7, 1e-6), strict=True))
        for i, place in enumerate(places)
    ]
    skipped = {"model": "keras/B", "library": "keras 3", "outcome": "skipped: ImportError: no"}
    rows.append({name: "" if name in ("mode", "side") else None for name in rows[0]} | skipped)
    environment = ENVIRONMENT | {"device": "a CPU, 2 threads"}
    content = {"environment": environment, "rows": rows, "command": ["--json", "models.json"]}
    file.write_text(json.dumps(content))

    monkeypatch.setattr(results, "RESULTS", tmp_path)
    added = results.model_rows(file)
    before = [added[-1] | {"model": "keras/C"}, *({**row, "fused": "none"} for row in added[1:])]
    after = results.with_models(before, added)
    assert after == [before[0], *added]
    results.write("cpu_third_party.csv", [], added)
    read = results.read("cpu_third_party.csv")
    assert read[0]["gpu"] == "none; CPU: a CPU, 2 threads"
    assert read[0]["command"] == "python tools/third_party_models.py --json models.json"
    first, second = results.third_party().splitlines()[2:]
    seconds = "1.2, 2.2, 3.2 | 4.2, 5.2, 6.2"
    differences = "2.0e-07 (1.0e-06) | 5.0e-07 (1.0e-06)"
    assert first == f"| keras 3 | A | 9, 8, 2 | 9, 8, 5 | {differences} | {seconds} |"
    assert second.startswith("| | B | skipped: ImportError: no |")
