"""The recorded GPU run has the checkout's sources and is complete, or says why there is none."""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess
import types

import gpu_report
import jax
import pytest

SHOWN = 20  # how many missing tests a complaint names


def without_folder(test_id: str) -> str:
    """A test id with its file's base name, which is unique: files may move between folders."""
    file, separator, rest = test_id.partition("::")
    return file.rpartition("/")[2] + separator + rest


def complaint(report: dict, sources_sha256: str, gpu_tests: set[str]) -> str:
    """The complaint about a report, or ""; ``gpu_tests`` are the ids that it must contain."""
    if report.get("no_run_reason", "").strip():
        return ""
    again = (
        "On a machine with a GPU run python -m pytest -m gpu --record-gpu-report "
        'tests/gpu_report.json, or give the report a "no_run_reason" in words'
    )
    if report.get("sources_sha256") != sources_sha256:
        return (
            "tests/gpu_report.json was recorded on other sources of cc/core, cc/cuda and cc/ffi "
            f"({report.get('sources_sha256')}, these are {sources_sha256}). {again}"
        )
    recorded = gpu_report.outcomes(report)
    failed = [test_id for test_id, (outcome, _) in recorded.items() if outcome == "failed"]
    if failed:
        return f"the recorded GPU run has {len(failed)} failures: {failed[:SHOWN]}"
    for name, summary in report.items():
        if isinstance(summary, dict) and summary.get("failed", 0):
            return f"the recorded {name} has failures: {summary}"
    unexplained = [test_id for test_id, found in recorded.items() if found == ("skipped", "")]
    if unexplained:
        return f"the recorded GPU run skips without a reason: {unexplained[:SHOWN]}"
    if not any(outcome == "passed" for outcome, _ in recorded.values()):
        return "the recorded GPU run has no passed tests"
    names = set(map(without_folder, recorded))
    if missing := sorted(each for each in gpu_tests if without_folder(each) not in names):
        return (
            f"{len(missing)} tests marked gpu are not in tests/gpu_report.json: "
            f"{missing[:SHOWN]}. {again}"
        )
    lacking = [key for key in (*gpu_report.ORIGIN, "date") if not report.get(key)]
    return f"the recorded GPU run lacks {lacking}" if lacking else ""


def test_the_recorded_gpu_run_is_of_these_sources_and_complete(request, record_property):
    """The record must contain every test marked gpu that this session has collected."""
    assert gpu_report.PATH.exists(), f"{gpu_report.PATH} is missing"
    report = json.loads(gpu_report.PATH.read_text())
    if report.get("commit"):
        record_property("gpu report", gpu_report.changed_since(report["commit"]))
    found = complaint(report, gpu_report.sources_sha256(), request.config.gpu_tests)
    assert not found, found


GOOD = {
    "sources_sha256": "a",
    "commit": "c",
    "gpu": "1 x GPU",
    "driver": "1",
    "jax": "1",
    "date": "2000-01-01",
    "tests": {
        "tests/test_a.py": {
            "test_b": {"passed": ["cuda-x", "cuda-y"], "skipped: no nvcc": ["z"]},
            "test_c": {"passed": [""]},
        }
    },
}
IDS = {"tests/a/test_a.py::test_b[cuda-x]", "tests/test_a.py::test_b[z]", "tests/test_a.py::test_c"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, ""),
        ({"sources_sha256": "b"}, "other sources"),
        ({"sources_sha256": "b", "no_run_reason": "no GPU could be had"}, ""),
        ({"sources_sha256": "b", "no_run_reason": " "}, "other sources"),
        ({"tests": {}}, "no passed tests"),
        ({"tests": {"f": {"t": {"failed": ["x"], "passed": ["y"]}}}}, "1 failures.*t.x"),
        ({"tests": {"f": {"t": {"skipped": ["x"], "passed": ["y"]}}}}, "without a reason.*t.x"),
        ({"tests": {"f": {"t": {"passed": ["y"]}}}}, "3 tests.*test_a"),
        ({"fuzz": {"failed": 0}}, ""),
        ({"fuzz": {"failed": 2}}, "fuzz has failures"),
        ({"gpu": ""}, "lacks .*gpu"),
        ({"commit": ""}, "lacks .*commit"),
    ],
)
def test_the_check_itself(change, message):
    found = complaint({**GOOD, **change}, "a", IDS)
    assert bool(found) == bool(message)
    if message:
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(found)


@pytest.fixture
def a_gpu(monkeypatch):
    monkeypatch.setenv("JAXCONV_COMMIT", "c0ffee")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "device_count", lambda platform: 1)
    gpu = types.SimpleNamespace(device_kind="a GPU")
    monkeypatch.setattr(jax, "devices", lambda platform: [gpu])


OUTCOMES = {
    "tests/test_a.py::test_b[cuda-[x]]": ("passed", ""),
    "tests/test_a.py::test_b[z]": ("skipped", "no nvcc: not on PATH"),
    "tests/test_a.py::test_c": ("passed", ""),
}


def test_what_a_run_writes_passes_the_check(tmp_path, a_gpu):
    path = tmp_path / "report.json"
    gpu_report.update(path, OUTCOMES)
    report = json.loads(path.read_text())
    assert gpu_report.outcomes(report) == OUTCOMES
    assert (report["passed"], report["failed"], report["skipped"]) == (2, 0, 1)
    assert not complaint(report, gpu_report.sources_sha256(), set(OUTCOMES))
    assert max(map(len, path.read_text().splitlines())) <= 100
    gpu_report.update(path, {"tests/test_a.py::test_c": ("failed", "")}, gpu_count=2)
    gpu_report.update(path, {}, fuzz={"failed": 0})
    assert json.loads(path.read_text())[gpu_report.GPUS] == 2
    assert "1 failures" in complaint(json.loads(path.read_text()), gpu_report.sources_sha256(), IDS)


def test_parts_of_a_run_add_up_in_any_order(tmp_path, a_gpu):
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    items = list(OUTCOMES.items())
    gpu_report.update(one, dict(items[:1]), fuzz={"failed": 0, "results": 3})
    gpu_report.update(one, dict(items[1:]))
    gpu_report.update(one, {}, memcheck={"failed": 0})
    gpu_report.update(two, {}, memcheck={"failed": 0})
    gpu_report.update(two, dict(reversed(items)))
    gpu_report.update(two, {}, fuzz={"failed": 0, "results": 3})
    assert one.read_bytes() == two.read_bytes()
    with pytest.raises(ValueError, match="expected a number"):
        gpu_report.update(one, {}, racecheck={"errors": 0})


def test_the_slowest_tests_are_kept_over_the_parts_of_a_run(tmp_path, a_gpu):
    path = tmp_path / "report.json"
    gpu_report.update(path, OUTCOMES, {f"a{i}": i for i in range(30)})
    gpu_report.update(path, {}, {"b": 25.2, "a3": 100})
    report = json.loads(path.read_text())
    slowest = list(report["slowest_seconds"].items())
    assert slowest[:4] == [("a3", 100), ("a29", 29), ("a28", 28), ("a27", 27)]
    assert ("b", 25) in slowest and len(slowest) == gpu_report.SLOWEST_COUNT
    assert not complaint(report, gpu_report.sources_sha256(), set(OUTCOMES))


def test_a_run_on_another_commit_begins_anew(tmp_path, a_gpu, monkeypatch):
    path = tmp_path / "report.json"
    gpu_report.update(path, OUTCOMES, fuzz={"failed": 0})
    monkeypatch.setenv("JAXCONV_COMMIT", "another")
    gpu_report.update(path, {"tests/test_d.py::test_e": ("passed", "")})
    report = json.loads(path.read_text())
    assert list(gpu_report.outcomes(report)) == ["tests/test_d.py::test_e"]
    assert "fuzz" not in report


def test_without_a_gpu_there_is_no_report(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    with pytest.raises(RuntimeError, match="no GPU here"):
        gpu_report.update(tmp_path / "report.json", OUTCOMES)


def test_changes_since_a_commit_are_listed(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    monkeypatch.setattr(gpu_report, "REPOSITORY", tmp_path)
    monkeypatch.setattr(gpu_report, "PATH", tmp_path / "tests" / "gpu_report.json")
    git("init", "-q")
    for name in ("jaxconv/a.py", "tests/b.py", "tests/gpu_report.json", "docs/c.md"):
        path = pathlib.Path(tmp_path, name)
        path.parent.mkdir(exist_ok=True)
        path.write_text("before")
    git("add", ".")
    git("commit", "-q", "-m", "before")
    recorded = git("rev-parse", "HEAD")
    assert gpu_report.changed_since(recorded).endswith(" nothing")
    for name in ("tests/b.py", "tests/gpu_report.json", "docs/c.md"):
        pathlib.Path(tmp_path, name).write_text("after")
    git("commit", "-q", "-a", "-m", "after")
    assert gpu_report.changed_since(recorded).splitlines()[1:] == ["  tests/b.py"]
    assert "does not have the recorded commit" in gpu_report.changed_since("0" * 40)


def test_the_hash_sees_every_source_and_every_token(tmp_path):
    for folder in gpu_report.HASHED:
        shutil.copytree(gpu_report.REPOSITORY / folder, tmp_path / folder)
    before = gpu_report.sources_sha256(tmp_path)
    assert before == gpu_report.sources_sha256()
    victim = sorted((tmp_path / "cc/core").iterdir())[0]
    data = victim.read_bytes()
    for ignored in (b"\n", b"// words", b"  /* more\n words */ "):
        victim.write_bytes(data + ignored)
        assert gpu_report.sources_sha256(tmp_path) == before
    for counted in (b";", b'"// a string"', b'" "', b"int x;  // words"):
        victim.write_bytes(data + counted)
        assert gpu_report.sources_sha256(tmp_path) != before
    victim.write_bytes(data)
    assert gpu_report.sources_sha256(tmp_path) == before
    victim.rename(victim.with_name("renamed"))
    assert gpu_report.sources_sha256(tmp_path) != before
