"""Random problems at scale on the CPU: those of ``test_fuzz``, for as long as one likes.

    python tests/cpu_fuzz.py --problems 10000 --processes 2 --seed 7 --record tests/cpu_fuzz.json
    python tests/cpu_fuzz.py --total tests/cpu_fuzz.json

A problem is a function of (seed, index). By its index it is a call of ``conv_general_dilated`` with
its gradients, one of ``lax`` under ``override``, or a primitive alone; the first two are judged by
``lax`` and float64 in NumPy, the last by NumPy alone, exactly. Every problem runs twice. Processes
take the indices in segments, each in an interpreter of its own: one that dies is a failure of its
segment. A failure is one line with its repro, ``python -m pytest tests/test_fuzz.py --seed S
--problem I``.

The record is a list of runs; a seed that is in it already is refused, so that no problem counts
twice.
"""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

SEGMENT = 250
SHOWN = 40  # failures printed and recorded in full


def work(seed: int, begin: int, end: int) -> None:
    """Judges one segment and prints what it found as JSON, in the last line."""
    import conftest  # noqa: F401 (the tests' settings of JAX)
    import jax
    from fuzz_calls import draw_call
    from jax import lax
    from test_fuzz import BEYOND, BEYOND_SHARE, OURS, Side, judge_all, judge_primitive

    import jaxconv
    from jaxconv._src import native

    kernels = native.load("cpu")
    if isinstance(kernels, native.Refusal):
        raise SystemExit(f"no CPU kernels: {kernels.reason}")
    device, counts, failures = jax.devices("cpu")[0], collections.Counter(), []
    overridden = Side(lax.conv_general_dilated, jaxconv.override)
    for form, side in enumerate((OURS, overridden)):
        calls = [draw_call(seed, i) for i in range(begin, end) if i % 3 == form]
        complaints, seen = judge_all(side, calls, device)
        failures += complaints
        counts.update(seen)
    primitives = [i for i in range(begin, end) if i % 3 == 2]
    with jax.default_device(device):
        for i in primitives:
            failures += judge_primitive(seed, i)
    counts["primitives, exact"] += len(primitives)
    normal = counts[BEYOND] + counts["normal results within twice lax's error"]
    if counts[BEYOND] > max(2, BEYOND_SHARE * normal):
        failures.append(f"--seed {seed}, {begin} to {end - 1}: {counts[BEYOND]} {BEYOND}")
    print(json.dumps({"counts": counts, "failures": failures, "jax": jax.__version__}))


def judged(seed: int, begin: int, end: int) -> dict:
    """A segment's findings, from an interpreter of its own."""
    where = f"--seed {seed}, problems {begin} to {end - 1}"
    command = [sys.executable, __file__, "--seed", str(seed), "--segment", str(begin), str(end)]
    done = subprocess.run(command, capture_output=True, text=True)
    try:
        found = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        told = done.stderr.strip().splitlines()[-1:]
        return {"counts": {}, "failures": [f"{where}: exit {done.returncode}, {told}"], "jax": ""}
    if done.returncode:
        found["failures"].append(f"{where}: exit {done.returncode}")
    return found


def run(options) -> int:
    """Judges all segments; True in the exit status where something is wrong."""
    runs = recorded(options.record)
    if options.seed in [each["seed"] for each in runs]:
        raise SystemExit(f"seed {options.seed} is in {options.record} already")
    began, shown = time.time(), 0.0
    until = began + options.seconds
    counts, failures, problems, version = collections.Counter(), [], 0, ""
    segments = [
        (at, min(at + SEGMENT, options.problems)) for at in range(0, options.problems, SEGMENT)
    ]

    def one(segment):
        return segment, judged(options.seed, *segment) if time.time() < until else None

    with ThreadPoolExecutor(options.processes) as pool:
        for (begin, end), found in pool.map(one, segments):
            if found is None:
                continue
            problems += end - begin
            counts.update(found["counts"])
            version = found["jax"] or version
            for failure in found["failures"]:
                print(f"FAILED {failure}", flush=True)
            failures += found["failures"]
            if time.time() - shown > 60:
                shown = time.time()
                print(f"{shown - began:6.0f} s, {problems} problems", flush=True)
            result = {
                "seed": options.seed,
                "problems": problems,
                "wrong": len(failures),
                "seconds": round(time.time() - began),
                "processes": options.processes,
                "jax": version,
                "failures": failures[:SHOWN],
                "counts": dict(sorted(counts.items())),
            }
            if options.record:  # also of a run that is ended early
                text = json.dumps([*runs, result], indent=1)
                pathlib.Path(options.record).write_text(text + "\n")
    for name, count in sorted(counts.items()):
        print(f"{count:8} {name}")
    print(f"{problems} problems in {time.time() - began:.0f} s, {len(failures)} wrong")
    return int(bool(failures) or not problems)


def recorded(path: str | None) -> list[dict]:
    found = pathlib.Path(path or "")
    return json.loads(found.read_text()) if path and found.exists() else []


def total(path: str) -> int:
    """Prints what the recorded runs sum up to."""
    runs = recorded(path)
    problems, wrong = (sum(each[name] for each in runs) for name in ("problems", "wrong"))
    seeds = ", ".join(str(each["seed"]) for each in runs)
    print(f"{problems} problems in {len(runs)} runs, {wrong} wrong; seeds {seeds}")
    return int(bool(wrong) or not problems)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin none later")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", metavar="PATH", help="add the run to this file")
    parser.add_argument("--total", metavar="PATH", help="sum up a record, and run nothing")
    parser.add_argument("--segment", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.total:
        return total(options.total)
    if options.segment:
        work(options.seed, *options.segment)
        return 0
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
