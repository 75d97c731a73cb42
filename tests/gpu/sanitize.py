"""compute-sanitizer over every device kernel, on a GPU.

    python tests/gpu/sanitize.py racecheck --program build/kernel_check \
        --int8-program build/int8_check --pass-program build/pass_check --processes 4 \
        --record tests/gpu_report.json

``tests/cc/kernel_check.cu`` and ``int8_check.cu`` run the cases of ``test_emulated_kernels.py``:
small problems that reach each device kernel's file. ``pass_check.cu`` runs its own cases, of passes
(kernels without a convolution). CONTRIBUTING.md says how the programs are built. They plan for a
GPU of two SMs, so that a CTA processes several tiles. Each process runs a part of the cases;
processes use the GPUs in turn. Exit status 1: the sanitizer reports anything, or a program fails.
``--record`` adds a summary to the GPU record.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "support"))
sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "emulator"))

import check_programs
import gpu_report
from emulated_cases import CASES, Case

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
SUMMARY = re.compile(r"(?:RACECHECK|ERROR) SUMMARY: (\d+) (?:hazards?|errors?)")
REPORT = re.compile(r"^========= (?!COMPUTE-SANITIZER)", re.MULTILINE)
KERNELS = re.compile(r"^\w+: \d+ problems, (\d+) kernels, (\d+) failures", re.MULTILINE)


class Call(NamedTuple):
    """A check program's arguments, and the least number of kernels that it should run."""

    command: list[str]
    kernels: int


class Outcome(NamedTuple):
    """The findings of one process: the sanitizer's reports, or -1 if there was no summary."""

    kernels: int
    found: int
    output: str


def run(number: int, call: Call, options: argparse.Namespace) -> Outcome:
    """Runs a check program under the sanitizer, as process ``number``."""
    command = ["compute-sanitizer", "--tool", options.tool, *call.command]
    ran = check_programs.run(command, number, options, {**os.environ, "SMS": "2"})
    if ran.status is None:
        return Outcome(0, -1, f"{ran.stdout[-2000:]}\n{ran.stderr}")
    output = ran.stdout + ran.stderr
    summary, kernels = SUMMARY.search(output), KERNELS.search(output)
    count, failures = map(int, kernels.groups()) if kernels else (0, 0)
    complete = summary and count >= call.kernels and not failures
    return Outcome(count, int(summary[1]) if complete else -1, excerpt(output))


def excerpt(output: str, half: int = 2000) -> str:
    """The output from the first report on, which names the conflicting access, and its end."""
    first = REPORT.search(output)
    at = first.start() if first else 0
    if len(output) - at <= 2 * half:
        return output[-2 * half :]
    return f"{output[at : at + half]}\n...\n{output[-half:]}"


def commands(
    cases: Sequence[Case], program: str, int8_program: str, parts: int, folder: pathlib.Path
) -> list[Call]:
    """The programs' calls: parts of the floating-point cases, and single int8 cases."""
    floats = [case for case in cases if not case.eight_bit]
    calls = []
    for part in range(min(parts, len(floats))):
        problems = folder / f"problems{part}.tsv"
        lines = [f"{c.instance}\t{c.key}\t{c.instance}\n" for c in floats[part::parts]]
        problems.write_text("".join(lines))
        calls.append(Call([program, "hash", str(problems), "listed"], len(lines)))
    return calls + [
        Call([int8_program, "check", c.key, c.instance], 1) for c in cases if c.eight_bit
    ]


PASSES = "passes"  # for --select: all of pass_check.cu


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("tool", choices=TOOLS)
    check_programs.add_options(parser, seconds=600)
    add("--int8-program", required=True, help="int8_check")
    add("--processes", type=int, default=4, help="at a time")
    add("--parts", type=int, default=16, help="processes for the kernels of floats")
    add("--select", default="", help=f"only instances whose name contains this; {PASSES}")
    options = parser.parse_args(argv)
    cases = [case for case in CASES if options.select in case.instance]
    passes = []
    if options.select in PASSES:
        passes.append(Call([check_programs.pass_program(parser, options), "check"], 1))
    if not cases and not passes:
        parser.error(f"--select {options.select}: no case's instance contains it")
    start = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as folder,
        ThreadPoolExecutor(options.processes) as pool,
    ):
        calls = passes + commands(
            cases, options.program, options.int8_program, options.parts, pathlib.Path(folder)
        )
        outcomes = list(pool.map(lambda i: run(i, calls[i], options), range(len(calls))))
    failed = [(c, o) for c, o in zip(calls, outcomes, strict=True) if o.found]
    for call, outcome in failed:
        print(f"FAILED {' '.join(call.command)}: {outcome.found} reports\n{outcome.output}")
    summary = {
        "failed": len(failed),
        "reports": sum(max(o.found, 0) for o in outcomes),
        "cases": len(cases) + len(passes),
        "kernels": sum(o.kernels for o in outcomes),
        "seconds": round(time.monotonic() - start),
    }
    print(json.dumps(summary))
    if options.record:
        gpu_report.update(options.record, {}, **{options.tool: summary})
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
