"""Shared by the fuzzes that run for hours: segments in fresh interpreters, and the record of runs.

A problem is a function of (seed, index). A fuzz consists of a program with the arguments of
``parser``, a function ``work`` that judges the problems with some indices, and a ``Fuzz``:

    def work(seed, indices, options) -> dict: ...  # what ``found`` makes

    options = fuzz_record.parser(__doc__).parse_args()
    sys.exit(fuzz_record.main(FUZZ, options, work))

Processes work on segments of indices, each in a separate interpreter (the program with
``--segment``). If an interpreter dies, its segment is judged again in halves, down to the problem
that ends the process. A failure is one line that starts with its repro.

The record is a list of runs, each with its commit and the hashes of the sources that determine
results: ``kernels`` and ``python``. A recorded seed is refused, so that no problem counts twice.
``--total`` sums the runs by sources. Its exit status is 0 if there are runs on the checkout's own
sources and none of these has a failure.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

import gpu_report
from xla_flags import QUICK_TO_COMPILE

SHOWN = 40  # failures printed and recorded in full
NOT_RECORDED = {"kernels": "not recorded", "python": "not recorded"}  # of runs without hashes
CPU_KERNELS = ("cc/core", "cc/cpu", "cc/ffi")  # everything that ends up in the CPU library

Work = Callable[[int, Sequence[int], argparse.Namespace], dict]


@dataclasses.dataclass(frozen=True)
class Fuzz:
    """The properties of a fuzz that its segments and its record depend on.

    Attributes:
        program: the path of its program.
        segment: the number of problems for one interpreter.
        environment: variables of a segment. ``XLA_FLAGS`` are appended to existing ones.
        kernels: folders of C++ sources that decide a result.
        own: the hashes that must equal the checkout's for ``total`` to count a run as the
            checkout's own.
    """

    program: str
    segment: int
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    kernels: tuple[str, ...] = CPU_KERNELS
    own: tuple[str, ...] = ("kernels", "python")

    def sources(self) -> dict[str, str]:
        """Short hashes of the sources that determine results."""
        hashes = {
            "kernels": gpu_report.sources_sha256(folders=self.kernels),
            "python": gpu_report.sources_sha256(folders=("jaxconv",), names="*.py"),
        }
        return {name: value[:12] for name, value in hashes.items()}


def cpu_environment(devices: int = 1) -> dict[str, str]:
    """Variables for so many CPU devices, and for programs that compile quickly."""
    flags = f"{QUICK_TO_COMPILE} --xla_force_host_platform_device_count={devices}"
    return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "OPENBLAS_NUM_THREADS": "1"}


def found(counts: Mapping[str, int], failures: Iterable[str], forms: Mapping[str, int]) -> dict:
    """A segment's findings: any counts, failures, and the number of problems of each form."""
    import jax

    return {
        "counts": dict(counts),
        "failures": list(failures),
        "forms": dict(forms),
        "jax": jax.__version__,
    }


def parser(description: str, problems: int = 10_000) -> argparse.ArgumentParser:
    """A parser with the arguments of all fuzzes; a program adds its own."""
    made = argparse.ArgumentParser(description=description.splitlines()[0])
    made.add_argument("--problems", type=int, default=problems)
    made.add_argument("--problem", type=int, help="judge this one alone")
    made.add_argument(
        "--seconds",
        type=float,
        default=float("inf"),
        help="begin no segment that would end later, by the longest so far",
    )
    made.add_argument("--processes", type=int, default=2)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--record", metavar="PATH", help="add the run to this file")
    made.add_argument("--total", metavar="PATH", help="sum up a record by sources, run nothing")
    made.add_argument("--segment", type=int, nargs=2, help=argparse.SUPPRESS)
    return made


def main(fuzz: Fuzz, options, work: Work, arguments: Sequence[str] = ()) -> int:
    """Does what the options ask for; ``arguments`` are passed to the program's segments."""
    if options.total:
        return total(fuzz, options.total)
    if options.segment:
        print(json.dumps(work(options.seed, range(*options.segment), options)))
        return 0
    if options.problem is not None:
        one = judged(
            fuzz, options.seed, options.problem, options.problem + 1, arguments, stderr=None
        )
        for failure in one["failures"]:
            print(f"FAILED {failure}")
        say(one["counts"])
        return int(bool(one["failures"]))
    return run(fuzz, options, arguments)


def judged(
    fuzz: Fuzz, seed: int, begin: int, end: int, arguments: Sequence[str] = (), **options
) -> dict:
    """A segment's findings, judged by a separate interpreter."""
    where = f"--seed {seed} --problem {begin}"
    command = [sys.executable, fuzz.program, "--seed", str(seed), "--segment", str(begin), str(end)]
    settings = dict(fuzz.environment)
    if flags := settings.get("XLA_FLAGS"):
        settings["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    done = subprocess.run([*command, *arguments], text=True, env=os.environ | settings, **pipes)
    try:
        seen = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        middle = (begin + end) // 2
        if begin < middle:
            halves = ((begin, middle), (middle, end))
            return _sum(judged(fuzz, seed, *half, arguments, **options) for half in halves)
        told = (done.stderr or "").strip().splitlines()[-1:]
        failures = [f"{where}: exit {done.returncode}, {told}"]
        return {"counts": {}, "forms": {}, "failures": failures, "jax": ""}
    if done.returncode:
        seen["failures"].append(f"{where} and what follows: exit {done.returncode}")
    return seen


def _sum(parts: Iterable[dict]) -> dict:
    """The combined findings of several segments."""
    whole: dict = {"counts": {}, "forms": {}, "failures": [], "jax": ""}
    for part in parts:
        for name in ("counts", "forms"):
            whole[name] = dict(collections.Counter(whole[name]) + collections.Counter(part[name]))
        whole["failures"] += part["failures"]
        whole["jax"] = part["jax"] or whole["jax"]
    return whole


def commit() -> str:
    try:
        return gpu_report.commit()
    except RuntimeError:  # an archive of the sources; their hashes identify them
        return "not recorded"


def run(fuzz: Fuzz, options, arguments: Sequence[str] = ()) -> int:
    """Judges all segments; returns 1 if there is a failure."""
    runs = recorded(options.record)
    if options.seed in [each["seed"] for each in runs]:
        raise SystemExit(f"seed {options.seed} is in {options.record} already")
    began, shown, longest = time.time(), 0.0, 0.0
    until = began + options.seconds
    origin = {"sources": fuzz.sources(), "commit": commit()}
    counts, forms, failures, version = collections.Counter(), collections.Counter(), [], ""
    problems, size = 0, fuzz.segment
    segments = [(at, min(at + size, options.problems)) for at in range(0, options.problems, size)]

    def one(segment):
        nonlocal longest
        start = time.time()
        if start + longest > until:
            return segment, None
        seen = judged(fuzz, options.seed, *segment, arguments)
        longest = max(longest, time.time() - start)
        return segment, seen

    with ThreadPoolExecutor(options.processes) as pool:
        for future in as_completed([pool.submit(one, segment) for segment in segments]):
            (begin, end), seen = future.result()
            if seen is None:
                continue
            problems += end - begin
            counts.update(seen["counts"])
            forms.update(seen["forms"])
            version = seen["jax"] or version
            for failure in seen["failures"]:
                print(f"FAILED {failure}", flush=True)
            failures += seen["failures"]
            if time.time() - shown > 60:
                shown = time.time()
                print(f"{shown - began:6.0f} s, {problems} problems", flush=True)
            result = {
                "seed": options.seed,
                **origin,
                "problems": problems,
                "forms": dict(forms),
                "wrong": len(failures),
                "seconds": round(time.time() - began),
                "processes": options.processes,
                "jax": version,
                "failures": failures[:SHOWN],
                "counts": brief(counts),
            }
            if options.record:  # also if the run is interrupted
                text = json.dumps([*runs, result], indent=1)
                pathlib.Path(options.record).write_text(text + "\n")
    say(counts)
    print(f"{problems} problems in {time.time() - began:.0f} s, {len(failures)} wrong")
    return int(bool(failures) or not problems)


def say(counts: Mapping[str, int]) -> None:
    for name, count in sorted(counts.items()):
        print(f"{count:8} {name}")


def brief(counts: Mapping[str, int]) -> dict[str, int]:
    """The counts, sorted; those that name single problems are summed up in one number."""
    summed: collections.Counter[str] = collections.Counter()
    for name, count in counts.items():
        summed[name.partition(" of --seed ")[0]] += count
    return {name: count for name, count in sorted(summed.items()) if count}


def recorded(path: str | None) -> list[dict]:
    file = pathlib.Path(path or "")
    return json.loads(file.read_text()) if path and file.exists() else []


def total(fuzz: Fuzz, path: str) -> int:
    """Prints the sums over all recorded runs, and over those with the same sources."""

    def summed(what: str, runs: list[dict]) -> tuple[int, int]:
        problems, wrong = (sum(each[name] for each in runs) for name in ("problems", "wrong"))
        seeds = ", ".join(str(each["seed"]) for each in runs) or "none"
        print(f"{what}: {problems} problems in {len(runs)} runs, {wrong} wrong; seeds {seeds}")
        return problems, wrong

    runs, sources = recorded(path), fuzz.sources()
    groups = collections.defaultdict(list)
    for each in runs:
        groups[tuple(each.get("sources", NOT_RECORDED).values())].append(each)
    for (kernels, python), each in groups.items():
        summed(f"kernels {kernels}, python {python}", each)
    summed("all", runs)
    own = {name: sources[name] for name in fuzz.own}
    same = [each for each in runs if own.items() <= each.get("sources", {}).items()]
    named = ", ".join(f"{name} {value}" for name, value in own.items())
    problems, wrong = summed(f"this checkout's {named}", same)
    return int(bool(wrong) or not problems)
