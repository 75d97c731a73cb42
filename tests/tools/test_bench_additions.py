"""Peers and regret in ``tools/bench``; test_bench_winograd.py tests the variants."""

from __future__ import annotations

import json
import sys
import types

import jax
import peer_cudnn
import pytest
import regret
from bench_additions import main

from jaxconv._src.library import native
from jaxconv._src.problem.spec import Op
from jaxconv.bench import environment, layers
from jaxconv.bench.problem import Problem

INT8_DTYPES = ("int8", "int8_nhwc", "int8_nchw32")


@pytest.mark.parametrize("option", ["--plot=out.png", "--peer=im2col", "--device-time"])
def test_regret_refuses_what_it_does_not_take(option, capsys):
    with pytest.raises(SystemExit) as exited:
        main(["--regret", option])
    name = option.partition("=")[0]
    assert exited.value.code == 2 and f"--regret: takes no {name}" in capsys.readouterr().err


def test_help_names_everything(capsys):
    with pytest.raises(SystemExit):
        main(["--help-all"])
    said = capsys.readouterr().out
    for word in ("python tools/bench", "cudnn-winograd", "--every-variant", "--regret"):
        assert word in said


@pytest.mark.optimized
def test_bench_reports_the_regret_of_selection(tmp_path, capsys, monkeypatch):
    platform = environment.kernel_platform()
    if isinstance(native.load(platform), native.Refusal):
        pytest.skip(f"no kernels for {platform}")
    # Replaces a layer of 1 to 100 GFLOP.
    drawn = {text: layers.parse(text) for text in ("2,9,9,16,8,3,3,1,1",)}
    monkeypatch.setattr(layers, "random_layers", lambda count, *_, **__: drawn)
    out = tmp_path / "regret.json"
    arguments = ["--regret", "--layer", "1,8,8,8,8,3,3,1,1", "--random", "1", "--reps", "2"]
    assert main([*arguments, "--seconds", "0", "--op", "wgrad", "--json", str(out)]) == 0
    said = capsys.readouterr().out
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 2 and "geometric mean" in said and "worst" in said
    for row in rows:
        times = row["seconds"]
        assert row["chosen"] in times and len(times) > 1 and min(times.values()) > 0
        assert times[row["best"]] == min(times.values())
        assert row["regret"] == pytest.approx(times[row["chosen"]] / times[row["best"]] - 1)


def test_bench_knows_the_kernels_of_a_quantised_layer(native_int8_kernels, platform):
    layer = layers.parse("1,6,6,32,32,3,3,1,1")
    for dtype in INT8_DTYPES:
        problem = Problem("small", layer, Op.FPROP, dtype, algorithm="native")
        chosen, names = regret.accepting(problem, platform)
        assert chosen in names and set(names) <= set(native_int8_kernels.kernels())


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="a GPU may have the frontend")
@pytest.mark.parametrize("peer", ["cudnn", "cudnn-winograd"])
def test_bench_says_what_cudnn_needs(capsys, peer):
    with pytest.raises(SystemExit):
        main(["--set", "int8", "--peer", peer])
    assert f"--peer {peer}: cuDNN needs an NVIDIA GPU" in capsys.readouterr().err


def test_bench_builds_cudnns_plans_once_for_both_layouts(monkeypatch):
    """``build`` runs ahead of measurements; the programs of both layouts use what it built."""
    built, measured = [], []

    def of(wanted):
        built.append(wanted)
        return peer_cudnn._Built(f"graph {len(built)}", {}, None)

    def fastest(graph, buffers, handle):
        measured.append((graph, len(buffers)))
        return None, None

    layer = layers.LAYERS["r50_56_3x3"]
    rows = [
        Problem("r50_56_3x3", layer, Op.FPROP, dtype, "default", "auto")
        for dtype in ("int8_nhwc", "int8_nchw32", "int8")
    ]
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    monkeypatch.setattr(peer_cudnn, "_built", of)
    monkeypatch.setattr(peer_cudnn, "_integers", lambda layer, tensors: {})
    monkeypatch.setattr(peer_cudnn, "_fastest", fastest)
    monkeypatch.setattr(peer_cudnn, "_ahead", {})
    monkeypatch.setattr(peer_cudnn, "_asked", set())
    peer_cudnn._program.cache_clear()
    for row in rows[:2]:
        peer_cudnn.build(row)
    programs = [peer_cudnn.program(row, 3) for row in rows]
    peer_cudnn._program.cache_clear()
    assert programs[0] is programs[1] is not programs[2]
    assert measured == [("graph 1", 3), ("graph 2", 3)]
    assert [wanted.fused for wanted in built] == [True, False]
