"""Random problems at scale on the CPU: those of ``test_fuzz``, for as long as one likes.

    python tests/cpu_fuzz.py --problems 100000 --processes 16 --seed 7 --record tests/cpu_fuzz.json
    python tests/cpu_fuzz.py --total tests/cpu_fuzz.json

A problem is a function of (seed, index). The forms take turns by the index: a call of
``conv_general_dilated`` with its gradients, one of ``lax`` under ``override``, a primitive alone;
the first two are judged by ``lax`` and float64 in NumPy, the last by NumPy alone, exactly. Every
problem runs twice. Processes take the indices in segments, each in an interpreter of its own: one
that dies is a failure of its segment. A failure is one line with its repro, ``python -m pytest
tests/test_fuzz.py --seed S --problem I``.

Nearly all of the time is XLA's: it compiles the copies around the kernels, and lax's convolutions.
The flags of ``xla_flags`` make that several times faster and leave the kernels as they are.

The record is a list of runs, each with its commit and the hashes of the sources that decide a
result on the CPU: ``kernels`` (cc/core, cc/cpu, cc/ffi) and ``python`` (jaxconv). A seed that is in
it already is refused, so that no problem counts twice. ``--total`` sums up the runs by sources; its
exit status is that of those on the checkout's own kernels: 0 where there are some, none wrong.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed

import gpu_report
from xla_flags import QUICK_TO_COMPILE

SEGMENT = 500
SHOWN = 40  # failures printed and recorded in full
FORMS = ("calls", "override", "primitives")
KERNELS = ("cc/core", "cc/cpu", "cc/ffi")  # everything that ends up in the CPU library
NOT_RECORDED = {"kernels": "not recorded", "python": "not recorded"}  # of the first runs

# One device, of the eight that the tests of sharding have.
XLA_FLAGS = f"{QUICK_TO_COMPILE} --xla_force_host_platform_device_count=1"


def work(seed: int, begin: int, end: int, forms: tuple[str, ...]) -> None:
    """Judges one segment and prints what it found as JSON, in the last line."""
    import conftest  # noqa: F401 (the tests' settings of JAX)
    import jax
    from fuzz_calls import draw_call
    from jax import lax
    from test_fuzz import BEYOND, BEYOND_SHARE, OURS, Side, judge_all, judge_primitives

    import jaxconv
    from jaxconv._src import native

    kernels = native.load("cpu")
    if isinstance(kernels, native.Refusal):
        raise SystemExit(f"no CPU kernels: {kernels.reason}")
    jax.config.update("jax_disable_most_optimizations", True)  # on a GPU machine too
    device, counts, failures = jax.devices("cpu")[0], collections.Counter(), []
    drawn = {form: range(begin + at, end, len(forms)) for at, form in enumerate(forms)}
    sides = {"calls": OURS, "override": Side(lax.conv_general_dilated, jaxconv.override)}
    for form, indices in drawn.items():
        if form in sides:
            calls = [draw_call(seed, i) for i in indices]
            complaints, seen = judge_all(sides[form], calls, device)
            counts.update(seen)
        else:
            with jax.default_device(device):
                complaints = judge_primitives(seed, indices)
        failures += complaints
    normal = counts[BEYOND] + counts["normal results within twice lax's error"]
    if counts[BEYOND] > max(2, BEYOND_SHARE * normal):
        failures.append(f"--seed {seed}, {begin} to {end - 1}: {counts[BEYOND]} {BEYOND}")
    found = {"counts": counts, "failures": failures, "jax": jax.__version__}
    print(json.dumps(found | {"forms": {form: len(indices) for form, indices in drawn.items()}}))


def judged(seed: int, begin: int, end: int, forms: tuple[str, ...]) -> dict:
    """A segment's findings, from an interpreter of its own."""
    where = f"--seed {seed}, problems {begin} to {end - 1}"
    command = [sys.executable, __file__, "--seed", str(seed), "--segment", str(begin), str(end)]
    flags = f"{os.environ.get('XLA_FLAGS', '')} {XLA_FLAGS}".strip()
    settings = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--forms", *forms], capture_output=True, text=True, env=os.environ | settings
    )
    try:
        found = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        told = done.stderr.strip().splitlines()[-1:]
        failures = [f"{where}: exit {done.returncode}, {told}"]
        return {"counts": {}, "forms": {}, "failures": failures, "jax": ""}
    if done.returncode:
        found["failures"].append(f"{where}: exit {done.returncode}")
    return found


def sources() -> dict[str, str]:
    """Short hashes of what decides a result on the CPU."""
    hashes = {
        "kernels": gpu_report.sources_sha256(folders=KERNELS),
        "python": gpu_report.sources_sha256(folders=("jaxconv",), names="*.py"),
    }
    return {name: value[:12] for name, value in hashes.items()}


def commit() -> str:
    try:
        return gpu_report.commit()
    except RuntimeError:  # an archive of the sources; their hashes identify them
        return "not recorded"


def run(options) -> int:
    """Judges all segments; True in the exit status where something is wrong."""
    runs = recorded(options.record)
    if options.seed in [each["seed"] for each in runs]:
        raise SystemExit(f"seed {options.seed} is in {options.record} already")
    began, shown, longest = time.time(), 0.0, 0.0
    until = began + options.seconds
    origin = {"sources": sources(), "commit": commit()}
    counts, forms, failures, version = collections.Counter(), collections.Counter(), [], ""
    problems = 0
    segments = [
        (at, min(at + SEGMENT, options.problems)) for at in range(0, options.problems, SEGMENT)
    ]

    def one(segment):
        nonlocal longest
        start = time.time()
        if start + longest > until:
            return segment, None
        found = judged(options.seed, *segment, options.forms)
        longest = max(longest, time.time() - start)
        return segment, found

    with ThreadPoolExecutor(options.processes) as pool:
        for future in as_completed([pool.submit(one, segment) for segment in segments]):
            (begin, end), found = future.result()
            if found is None:
                continue
            problems += end - begin
            counts.update(found["counts"])
            forms.update(found["forms"])
            version = found["jax"] or version
            for failure in found["failures"]:
                print(f"FAILED {failure}", flush=True)
            failures += found["failures"]
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
            if options.record:  # also of a run that is ended early
                text = json.dumps([*runs, result], indent=1)
                pathlib.Path(options.record).write_text(text + "\n")
    for name, count in sorted(counts.items()):
        print(f"{count:8} {name}")
    print(f"{problems} problems in {time.time() - began:.0f} s, {len(failures)} wrong")
    return int(bool(failures) or not problems)


def brief(counts: Mapping[str, int]) -> dict[str, int]:
    """The counts, sorted, with one number an operation for the problems that the output names."""
    summed: collections.Counter[str] = collections.Counter()
    for name, count in counts.items():
        summed[name.partition(" of --seed ")[0]] += count
    return {name: count for name, count in sorted(summed.items()) if count}


def recorded(path: str | None) -> list[dict]:
    found = pathlib.Path(path or "")
    return json.loads(found.read_text()) if path and found.exists() else []


def total(path: str) -> int:
    """Prints what the recorded runs sum up to, in all and by the sources that they ran on."""

    def say(what: str, runs: list[dict]) -> tuple[int, int]:
        problems, wrong = (sum(each[name] for each in runs) for name in ("problems", "wrong"))
        seeds = ", ".join(str(each["seed"]) for each in runs) or "none"
        print(f"{what}: {problems} problems in {len(runs)} runs, {wrong} wrong; seeds {seeds}")
        return problems, wrong

    runs, own = recorded(path), sources()
    groups = collections.defaultdict(list)
    for each in runs:
        groups[tuple(each.get("sources", NOT_RECORDED).values())].append(each)
    for (kernels, python), each in groups.items():
        say(f"kernels {kernels}, python {python}", each)
    say("all", runs)
    same = [each for each in runs if each.get("sources", {}).get("kernels") == own["kernels"]]
    problems, wrong = say(f"this checkout's kernels, {own['kernels']}", same)
    return int(bool(wrong) or not problems)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=int, default=10_000)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    parser.add_argument(
        "--seconds",
        type=float,
        default=float("inf"),
        help="begin no segment that would end later, by the longest so far",
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", metavar="PATH", help="add the run to this file")
    parser.add_argument("--total", metavar="PATH", help="sum up a record by sources, run nothing")
    parser.add_argument("--segment", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.total:
        return total(options.total)
    if options.segment:
        work(options.seed, *options.segment, options.forms)
        return 0
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
