"""same_bits.py judges the output of check programs from several processes."""

from __future__ import annotations

import json

import pytest
import same_bits

# Prints a hash for each problem of the file; `third` gives the hash of the third problem.
PROGRAM = """#!/bin/sh
awk -F'\\t' -v third="{third}" '{{
  if (NR == 3 && third == "") next
  print $1, "fprop_some_kernel", NR == 3 ? third : NR
}}' "$2"
echo "hash: $(wc -l < "$2") problems"
exit {status}
"""
PASSES = """#!/bin/sh
echo "shape kernel {bits}"
echo "hash: 1 problems, 1 kernels, 0 failures"
exit {status}
"""


@pytest.fixture
def compared(tmp_path, capsys):
    """Runs same_bits.py with such programs; returns (status, output)."""

    def run(
        third: str = "bits",
        status: int = 0,
        *arguments: str,
        passes: str = PASSES.format(bits="bits", status=0),
    ) -> tuple[int, str]:
        program = tmp_path / "check"
        texts = {"check": PROGRAM.format(third=third, status=status), "pass_check": passes}
        for name, text in texts.items():
            if text:
                (tmp_path / name).write_text(text)
                (tmp_path / name).chmod(0o755)
        returned = same_bits.main(["--program", str(program), *arguments])
        return returned, capsys.readouterr().out

    return run


def test_equal_bits_pass(compared):
    status, printed = compared()
    summary = json.loads(printed.splitlines()[-1])
    assert status == 0
    assert summary["failed"] == 0
    assert summary["processes"] == 3
    assert summary["results"] == len(same_bits.LAYERS) * 3 * len(same_bits.DTYPES) + 1


@pytest.mark.parametrize(
    "arguments", [{"third": "$$"}, {"passes": PASSES.format(bits="$$", status=0)}]
)
def test_bits_that_differ_are_a_failure(compared, arguments):
    # Each process prints its own number, so the hashes differ.
    status, printed = compared(**arguments)
    assert status == 1
    assert json.loads(printed.splitlines()[-1])["failed"] == 1


def test_a_result_that_a_process_lacks_is_a_failure():
    runs = [{("a", "k"): "1", ("b", "k"): "2"}, {("a", "k"): "1"}]
    assert same_bits.differing(runs) == ["b k: 2"]


@pytest.mark.parametrize("arguments", [{"status": 1}, {"passes": PASSES.format(bits=0, status=1)}])
def test_a_program_that_fails_is_a_failure(compared, arguments):
    status, printed = compared(**arguments)
    assert status == 1
    assert "status 1" in printed


def test_without_a_program_nothing_runs(compared):
    with pytest.raises(SystemExit):
        compared(passes="")


def test_one_process_is_refused(compared):
    with pytest.raises(SystemExit):
        compared("bits", 0, "--processes", "1")


def test_keys_are_of_every_operation_and_layer():
    names, keys = zip(*(line.split("\t") for line in same_bits.lines()), strict=True)
    assert len(keys) == len(same_bits.LAYERS) * 3 * len(same_bits.DTYPES)
    assert len(set(names)) == len(set(keys)) == len(keys)
