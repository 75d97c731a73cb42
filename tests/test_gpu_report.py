"""The recorded GPU run belongs to these sources, or says in words why there was none."""

from __future__ import annotations

import json
import shutil
import types

import gpu_report
import jax
import pytest


def complaint(report: dict, sources_sha256: str) -> str:
    """What is wrong with a report, "" for nothing."""
    if report.get("no_run_reason", "").strip():
        return ""
    if report.get("sources_sha256") != sources_sha256:
        return (
            "tests/gpu_report.json was recorded on other sources of cc/core, cc/cuda and cc/ffi "
            f"({report.get('sources_sha256')}, these are {sources_sha256}). On a machine with a "
            "GPU run python -m pytest -m gpu --record-gpu-report tests/gpu_report.json, or give "
            'the report a "no_run_reason" in words'
        )
    if report.get("failed") != 0:
        return f"the recorded GPU run has {report.get('failed')} failures"
    if not report.get("passed") or len(report.get("tests", [])) < report["passed"]:
        return "the recorded GPU run has no passed tests, or does not name them"
    missing = [key for key in ("gpu", "driver", "jax", "date") if not report.get(key)]
    return f"the recorded GPU run lacks {missing}" if missing else ""


def test_the_recorded_gpu_run_is_of_these_sources():
    assert gpu_report.PATH.exists(), f"{gpu_report.PATH} is missing"
    report = json.loads(gpu_report.PATH.read_text())
    found = complaint(report, gpu_report.sources_sha256())
    assert not found, found


GOOD = {
    "sources_sha256": "a",
    "gpu": "1 x GPU",
    "driver": "1",
    "jax": "1",
    "date": "2000-01-01",
    "passed": 1,
    "failed": 0,
    "skipped": 0,
    "tests": ["t"],
}


@pytest.mark.parametrize(
    ("change", "accepted"),
    [
        ({}, True),
        ({"sources_sha256": "b"}, False),
        ({"sources_sha256": "b", "no_run_reason": "no GPU could be had"}, True),
        ({"sources_sha256": "b", "no_run_reason": " "}, False),
        ({"failed": 1}, False),
        ({"passed": 0}, False),
        ({"tests": []}, False),
        ({"gpu": ""}, False),
    ],
)
def test_the_check_itself(change, accepted):
    assert (not complaint({**GOOD, **change}, "a")) == accepted


def test_what_a_run_writes_passes_the_check(tmp_path, monkeypatch):
    outcomes = {"test_a[cuda]": "passed", "test_b[cuda]": "passed", "test_c": "skipped"}
    path = tmp_path / "report.json"
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    with pytest.raises(RuntimeError, match="no GPU test passed here"):
        gpu_report.write(path, outcomes)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "device_count", lambda platform: 1)
    gpu = types.SimpleNamespace(device_kind="a GPU")
    monkeypatch.setattr(jax, "devices", lambda platform: [gpu])
    with pytest.raises(RuntimeError, match="no GPU test passed here"):
        gpu_report.write(path, dict.fromkeys(outcomes, "skipped"))
    gpu_report.write(path, outcomes)
    report = json.loads(path.read_text())
    assert (report["passed"], report["failed"], report["skipped"]) == (2, 0, 1)
    assert not complaint(report, gpu_report.sources_sha256())
    gpu_report.write(path, {**outcomes, "test_d": "failed"})
    assert "1 failures" in complaint(json.loads(path.read_text()), gpu_report.sources_sha256())


def test_the_hash_sees_every_source_and_every_byte(tmp_path):
    for folder in gpu_report.HASHED:
        shutil.copytree(gpu_report.REPOSITORY / folder, tmp_path / folder)
    before = gpu_report.sources_sha256(tmp_path)
    assert before == gpu_report.sources_sha256()
    victim = sorted((tmp_path / "cc/core").iterdir())[0]
    data = victim.read_bytes()
    victim.write_bytes(data + b"\n")
    assert gpu_report.sources_sha256(tmp_path) != before
    victim.write_bytes(data)
    assert gpu_report.sources_sha256(tmp_path) == before
    victim.rename(victim.with_name("renamed"))
    assert gpu_report.sources_sha256(tmp_path) != before
