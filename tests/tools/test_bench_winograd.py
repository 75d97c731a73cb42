"""The bench's rows for Winograd: the layer set "winograd", and networks."""

from __future__ import annotations

import json
import re

import pytest
import winograd_variants
from bench_additions import main

from jaxconv import winograd
from jaxconv._src.conv import bilinear
from jaxconv._src.library import native
from jaxconv._src.problem.spec import Op
from jaxconv._src.ways import winograd_jax
from jaxconv.bench import __main__ as bench
from jaxconv.bench import layers, networks, prepared_filters
from jaxconv.bench.problem import Problem


def test_bench_measures_every_variant_of_winograd(tmp_path, capsys, monkeypatch, native_cpu):
    """The rows of the set "winograd" (one layer, made smaller), and the table by problem."""
    monkeypatch.setitem(layers.LAYERS, "seed_224", layers.parse("1,8,8,8,8,3,3,1,1"))
    tiles = {name: winograd_jax.TILES[name] for name in ("f2x2", "f4x3")}
    monkeypatch.setattr(winograd_jax, "TILES", tiles)
    out = tmp_path / "rows.json"
    arguments = ["--set", "winograd", "--name", "seed_224", "--dtype", "bf16", "--reps", "1"]
    peer = ["--peer", "im2col"]
    assert main([*arguments, *peer, "--seconds", "0", "--json", str(out)]) == 0
    said = capsys.readouterr().out
    rows = json.loads(out.read_text())["rows"]
    direct, *variants = rows
    assert direct["algorithm"] == "native" and "_winograd_" not in direct["kernel"]
    assert re.search(r"\n  im2col  +[\d.]+  +[\d.]+x  +[\d.]+x  +\S+  +-  +-\n", said)
    assert direct["lax"]["median_s"] > 0
    for tile in ("2x2", "4x3"):
        of_tile = [row for row in variants if f"_bf16_{tile}_" in row["kernel"]]
        assert {row["prepared"] for row in of_tile} == {False, True}
    for row in rows:
        assert not row["wrong"] and row["op"] == "fprop" and row["jaxconv"]["median_s"] > 0
        # The fastest variant comes first, with its ratios to the direct kernel and to lax.
        name = re.escape(row["kernel"]) + (" prepared" if row["prepared"] else "")
        assert re.search(rf"^  {name} +[\d.]+ +[\d.]+x +[\d.]+x ", said, re.MULTILINE), name
    # One line has the direct kernel, lax, the peer, and the fastest variants with their names.
    (line,) = re.findall(r"^seed_224 1x8x8 8->8 3x3 fprop bf16 .*", said, re.MULTILINE)
    fastest = {
        prepared: min(
            (row for row in variants if row["prepared"] is prepared),
            key=lambda row: row["jaxconv"]["median_s"],
        )
        for prepared in (False, True)
    }
    least = min(direct[side]["median_s"] for side in ("jaxconv", "lax", "im2col"))
    ratio = least / fastest[False]["jaxconv"]["median_s"]
    assert f" {direct['lax']['median_s'] * 1e6:.1f} " in line and f" {ratio:.2f}x " in line
    names = [row["kernel"].split("_winograd_")[1] for row in fastest.values()]
    assert line.endswith(f"  {', '.join(names)}")

    (name,) = (n for n, s in layers.SETS.items() if s.variants)
    drawn = list(layers.SETS[name].layers())
    assert {layer.n for n, layer in drawn if n == "sdxl_64"} == {4, 8, 32}
    assert {layer.n for n, layer in drawn if n == "seed_960"} == {1}


@pytest.mark.parametrize(("layer", "every"), [("unet_64", False), ("seed_224", False), ("a", True)])
def test_bench_takes_the_variants_that_are_predicted_fastest(monkeypatch, layer, every):
    forms = ("2x2_elementwise_8x16", "4x4_chunked_128x128x64", "4x4_four_stage_64x64x64")
    names = [f"fprop_winograd_f16_{form}" for form in forms]
    names += [f"fprop_winograd_f16_4x4_four_stage_{i}" for i in range(4)]

    def select(platform, op, spec, sizes, *dtypes):
        name = spec.algorithm_of(op)
        return native.Selection(name, microseconds=9.0 - names.index(name)), ""

    kernels = object.__new__(native.Platform)
    monkeypatch.setattr(kernels, "kernels", lambda: names, raising=False)
    monkeypatch.setattr(native, "load", lambda platform: kernels)
    monkeypatch.setattr(bilinear, "select", select)
    prepared = lambda problem, platform: native.Selection(  # noqa: E731
        problem.algorithm, microseconds=1.0 + names.index(problem.algorithm)
    )
    monkeypatch.setattr(prepared_filters, "selection", prepared)
    monkeypatch.setattr(winograd_jax, "TILES", {"f4x4": winograd_jax.TILES["f4x4"]})
    problem = Problem(layer, layers.LAYERS["unet_64"], Op.FPROP, "f16", algorithm="native")
    direct, *found = winograd_variants.of(problem, "cuda", every)
    assert direct == problem
    fastest = names if every else names[5:]
    if layer == "seed_224":
        fastest = names[:2] + fastest
    assert [p.algorithm for p in found if not p.prepared] == fastest
    assert [p.algorithm for p in found if p.prepared] == (names if every else names[:1])


def test_a_variant_that_is_wrong_is_found():
    layer = layers.parse("1,8,8,8,8,3,3,1,1")
    direct = Problem("a", layer, Op.FPROP, "bf16", algorithm="native")
    f4x4 = Problem("a", layer, Op.FPROP, "bf16", algorithm="winograd_f4x4", variant=True)
    f6x6 = Problem("a", layer, Op.FPROP, "bf16", algorithm="winograd_f6x6", variant=True)
    assert direct.bound <= f4x4.bound < f6x6.bound < 0.02


def test_bench_measures_a_network_with_winograd(tmp_path, capsys, monkeypatch):
    """Beside direct kernels, also with prepared filters, and with the errors of all outputs."""
    monkeypatch.setattr(networks.unet, "CHANNELS", (32,))
    monkeypatch.setattr(networks.unet, "BLOCKS", 1)

    def tile(x, w, **_):
        """Pretends that a prediction chose the tile; a CPU computes the form in JAX."""
        return "f4x4" if w.shape[:3] == (3, 3, 64) else None

    monkeypatch.setattr(winograd, "faster_tile", tile)
    out = tmp_path / "unet.json"
    arguments = ["--network", "unet", "--mode", "infer", "--winograd", "winograd_f4x4"]
    arguments += ["--size", "8", "--batch", "1", "--steps", "1", "--rounds", "1", "--dtype", "f16"]
    assert bench.main([*arguments, "--json", str(out)]) == 0
    said = capsys.readouterr().out
    (row,) = json.loads(out.read_text())["rows"]
    instances = row["prepared_kernels"]["instances"].items()
    count = sum(n for name, n in instances if "_winograd_f16_4x4" in name)
    assert 0 < count < row["convolutions"] == row["winograd_kernels"]["convolutions"]
    pattern = (
        rf"prepared for Winograd in {count} of {row['convolutions']} convolutions: [\d.]+x lax"
    )
    assert re.search(pattern + r" and [\d.]+x the direct kernels", said), said
    errors = row["errors"]
    assert set(errors) == {"lax", "jaxconv", "winograd", "prepared"}
    assert 1e-5 < errors["jaxconv"] < 3e-3 and 1e-5 < errors["lax"] < 3e-3, errors
    assert 1.2 * errors["jaxconv"] < errors["prepared"] < 2e-2, errors
    assert "error of the output: Winograd " in said
    with pytest.raises(SystemExit):
        bench.main(["--network", "resnet50", "--mode", "infer", "--int8", "--winograd"])
