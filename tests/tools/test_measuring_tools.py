"""The tools that put measured times into tables and compare predictions with them."""

from __future__ import annotations

import importlib
import json
import pathlib

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
KEY = "fprop bf16:bf16:bf16 default b1 n64 g1 c128 k128 i28x28 f3x3 o28x28 s1x1 l1x1 d1x1 p1_1x1_1"


@pytest.fixture(autouse=True)
def tools_are_found(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "tools"))


def content(device, us, slices=None):
    facts = {"device": device, "driver": "580", "jax": "0.11", "commit": "abc"}
    return json.dumps({"environment": facts, "us": us, "slices": slices or {}, "failures": {}})


def test_times_of_another_gpu_get_their_own_table(tmp_path, monkeypatch):
    tool, times = map(importlib.import_module, ("candidate_times", "measured_times"))
    unseen = next(iter(importlib.import_module("unseen_problems").problems()))
    monkeypatch.setattr(times, "TABLE", tmp_path / "measured_times.tsv")
    measured = tmp_path / "times.json"
    us = {KEY: {"xla": 30.0, "fprop_a": 20.0, "fprop_b": 10.0}, unseen: {"fprop_a": 1.0}}
    measured.write_text(content("NVIDIA H100 80GB HBM3", us, {KEY: {"fprop_b": 3}}))
    assert tool.main(["--add", str(measured), "--gpu", "h100"]) == 0
    measured.write_text(content("NVIDIA H100 80GB HBM3", {KEY: {"fprop_b": 12.0}}))
    assert tool.main(["--add", str(measured), "--gpu", "h100"]) == 0
    assert (tmp_path / "measured_times_h100.tsv").read_text().splitlines() == [
        "# gpu: NVIDIA H100 80GB HBM3",
        "# driver: 580",
        "# jax: 0.11",
        "# commit: abc",
        f"# command: {tool.COMMAND}",
        f"{KEY}\t30\tfprop_b=12\tfprop_a=20",
    ]
    measured.write_text(content("NVIDIA H200", us))
    with pytest.raises(ValueError, match="expected times of an H100, got NVIDIA H200"):
        tool.main(["--add", str(measured), "--gpu", "h100"])


def test_the_unseen_problems_are_listed_and_evaluated(tmp_path, capsys):
    tool = importlib.import_module("unseen_problems")
    keys = list(tool.problems())
    dense = [key for key in keys if key.startswith("fprop")][:2]
    instances = [f"fprop_igemm_wgmma_bf16_{i}" for i in "abcde"]
    earlier, later = tmp_path / "old.tsv", tmp_path / "new.tsv"
    predicted = {key: {"xla": 9.6, **dict.fromkeys(instances, 10.0)} for key in dense}
    tool.write(earlier, predicted)
    for each in predicted.values():
        each |= {"xla": 9.8, instances[4]: 9.85}
    tool.write(later, predicted)

    listed = tmp_path / "listed.tsv"
    assert tool.main(["--list", str(listed), "--predictions", str(earlier), str(later)]) == 0
    lines = [line.split("\t") for line in listed.read_text().splitlines()]
    assert [key for key, *_ in lines] == keys
    of = dict((key, candidates) for key, *candidates in lines)
    assert of[dense[0]] == ["xla", *instances[:3], instances[4]]
    assert of[keys[-1]] == ["xla"]

    measured = tmp_path / "times.json"
    us = {"xla": 8.0, instances[0]: 10.0, instances[4]: 10.0}
    measured.write_text(content("NVIDIA H200", {dense[0]: us, KEY: us}))
    files = ["--predictions", f"{earlier}:0.97", str(later)]
    assert tool.main(["--evaluate", str(measured), *files]) == 0
    before, now = capsys.readouterr().out.strip().split("\n\n")
    # The old build leaves the layer to XLA; the new one takes a kernel, which is 25 % slower.
    assert "all: 0.00 % of 1" in before and "below 0.95 of lax: 0; choices" in before
    assert "all: 25.00 % of 1" in now and "below 0.95 of lax: 1; choices not measured: 1" in now
    assert "median abs(log), igemm_wgmma: 0.008 of 2" in now
