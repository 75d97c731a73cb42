"""Short runs of the programs that may run for hours, and of their failure checks."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import subprocess
import sys
import types

import cpu_fuzz
import fuzz_record
import memory_flat
import numpy as np
import pytest

FUZZ = cpu_fuzz.FUZZ


def test_memory_is_flat_over_repeated_shapes(native_cpu):
    command = [sys.executable, memory_flat.__file__, "--calls", "360", "--period", "60"]
    done = subprocess.run([*command, "--repeat"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["calls"] == 360


@pytest.mark.slow  # takes a quarter of an hour
def test_memory_is_flat_over_changing_shapes(native_cpu):
    command = [sys.executable, memory_flat.__file__, "--calls", "20000"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_leak_is_seen(monkeypatch, capsys):
    leaked = []

    def leak(convolve, rng, gradients):
        leaked.append(np.ones(200_000, np.float64))  # 1.6 MB

    monkeypatch.setattr(memory_flat, "one_program", leak)
    monkeypatch.setattr(sys, "argv", ["memory_flat.py", "--calls", "90", "--period", "10"])
    assert memory_flat.main() == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["growth_mb"] > memory_flat.LIMIT_MB


def options(**changes) -> argparse.Namespace:
    given = dict(problems=3, seconds=float("inf"), processes=1, seed=5, record=None)
    return argparse.Namespace(**(given | changes))


def test_random_problems_are_recorded_once(native_cpu, tmp_path, capsys):
    path = str(tmp_path / "record.json")
    assert fuzz_record.run(FUZZ, options(record=path)) == 0
    with pytest.raises(SystemExit, match="seed 5 is in"):
        fuzz_record.run(FUZZ, options(record=path))
    assert fuzz_record.total(FUZZ, path) == 0
    (run,) = fuzz_record.recorded(path)
    assert run["forms"] == dict.fromkeys(cpu_fuzz.FORMS, 1)
    kernels = run["sources"]["kernels"]
    said = capsys.readouterr().out
    assert f"this checkout's kernels {kernels}: 3 problems in 1 runs, 0 wrong; seeds 5" in said


def test_runs_are_summed_up_by_their_sources(tmp_path, capsys):
    first = dict(seed=1, problems=10, wrong=2)  # without a hash of its sources
    mended = dict(seed=2, problems=7, wrong=0, sources=FUZZ.sources())
    other = dict(seed=3, problems=5, wrong=1, sources={"kernels": "0" * 12, "python": "1" * 12})
    path = tmp_path / "record.json"
    path.write_text(json.dumps([first, other]))
    assert fuzz_record.total(FUZZ, str(path)) == 1  # no run has these sources
    path.write_text(json.dumps([first, mended, other]))
    assert fuzz_record.total(FUZZ, str(path)) == 0
    lines = capsys.readouterr().out.splitlines()[-5:]
    kernels = FUZZ.sources()["kernels"]
    assert lines[0].startswith("kernels not recorded, python not recorded: 10 problems")
    assert lines[3] == "all: 22 problems in 3 runs, 3 wrong; seeds 1, 2, 3"
    assert lines[4] == f"this checkout's kernels {kernels}: 7 problems in 1 runs, 0 wrong; seeds 2"


def test_the_record_counts_what_the_output_names():
    named = {f"lax is wrong: dgrad of --seed 5 --problem {i} (integers): ...": 1 for i in range(3)}
    counts = {"rank 1": 4, "lax is wrong: wgrad of --seed 5 --problem 0: ...": 0} | named
    assert fuzz_record.brief(counts) == {"lax is wrong: dgrad": 3, "rank 1": 4}


def test_a_problem_that_ends_the_process_is_a_failure(monkeypatch, tmp_path):
    path = tmp_path / "record.json"
    pairs = dataclasses.replace(FUZZ, segment=2)
    monkeypatch.setattr(sys, "executable", "false")
    assert fuzz_record.run(pairs, options(record=str(path))) == 1
    (run,) = json.loads(path.read_text())
    named = [f"--seed 5 --problem {i}: exit 1, []" for i in range(3)]
    assert run["wrong"] == 3 and sorted(run["failures"]) == named
    assert fuzz_record.total(pairs, str(path)) == 1


def test_no_segment_begins_that_would_end_late(monkeypatch, tmp_path):
    found = {"counts": {}, "forms": {}, "failures": [], "jax": ""}
    clock = itertools.count(step=10)
    single = dataclasses.replace(FUZZ, segment=1)
    monkeypatch.setattr(fuzz_record, "judged", lambda *arguments: found)
    monkeypatch.setattr(fuzz_record, "time", types.SimpleNamespace(time=lambda: next(clock)))
    path = tmp_path / "record.json"
    assert fuzz_record.run(single, options(problems=9, seconds=100, record=str(path))) == 0
    (run,) = json.loads(path.read_text())
    assert 1 <= run["problems"] < 9
