"""sanitize.py judges the output of compute-sanitizer and the check programs."""

from __future__ import annotations

import json
import os

import pytest
import sanitize

SANITIZER = """#!/bin/sh
shift 2
"$@"
echo "========= RACECHECK SUMMARY: {hazards} hazards displayed (0 errors, 0 warnings)"
"""
PROGRAM = """#!/bin/sh
n=$(({kernels}))
echo "$1: 3 problems, $n kernels, {failures} failures"
"""
LINES = '$([ -f "$2" ] && wc -l < "$2" || echo 1)'  # one kernel for each case


@pytest.fixture
def sanitized(tmp_path, monkeypatch, capsys):
    """Runs sanitize.py with a sanitizer and a program that print so; returns (status, summary)."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def run(
        hazards: int = 0, kernels: str = LINES, failures: int = 0, select: str = "imma_wgmma"
    ) -> tuple[int, dict]:
        texts = {
            "compute-sanitizer": SANITIZER.format(hazards=hazards),
            "check": PROGRAM.format(kernels=kernels, failures=failures),
            "pass_check": PROGRAM.format(kernels=kernels, failures=failures),
        }
        for name, text in texts.items():
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
        program = str(tmp_path / "check")
        arguments = ["--program", program, "--int8-program", program, "--select", select]
        arguments += ["--gpus", "0,1"]
        status = sanitize.main(["racecheck", *arguments])
        return status, json.loads(capsys.readouterr().out.splitlines()[-1])

    return run


def test_every_case_runs(sanitized):
    status, summary = sanitized()
    assert status == 0
    assert summary["failed"] == summary["reports"] == 0
    assert summary["kernels"] == summary["cases"] > 0


@pytest.mark.parametrize("fault", [{"hazards": 2}, {"kernels": "0"}, {"failures": 1}])
def test_a_report_or_a_kernel_that_does_not_run_is_a_failure(sanitized, fault):
    status, summary = sanitized(**fault)
    assert status == 1
    assert summary["failed"] == summary["cases"]
    assert summary["reports"] == fault.get("hazards", 0) * summary["cases"]


def test_passes_run(sanitized):
    status, summary = sanitized(select=sanitize.PASSES)
    assert status == 0 and summary["kernels"] == summary["cases"] == 1
    status, summary = sanitized(hazards=1, select=sanitize.PASSES)
    assert status == 1 and summary["reports"] == 1
    _, summary = sanitized(select="")
    assert summary["cases"] == len(sanitize.CASES) + 1


def test_floats_share_processes(tmp_path):
    calls = sanitize.commands(sanitize.CASES, "check", "int8", 4, tmp_path)
    floats = [call for call in calls if call.command[0] == "check"]
    assert len(floats) == 4
    assert sum(call.kernels for call in calls) == len(sanitize.CASES)


def test_the_first_report_is_printed():
    report = "========= Error: Race reported between Write access at kernel+0x10\n"
    before, after = "========= COMPUTE-SANITIZER\n" + "fine\n" * 2000, "and Read\n" * 2000
    output = f"{before}{report}{after}end"
    said = sanitize.excerpt(output)
    assert said.startswith(report)
    assert said.endswith("end")
    assert len(said) < 5000
    assert sanitize.excerpt("all there is") == "all there is"
