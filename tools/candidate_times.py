"""Measures kernels of problems, also with epilogues, for the tables of measured times.

    python tools/candidate_times.py problems.tsv --json times.json --seconds 200
    python tools/candidate_times.py --add times.json
    python tools/candidate_times.py --add times.json --gpu h100

A line of the first file is a problem key, as ``jaxconv.explain`` shows it, and instances or "xla",
separated by tabs. The first command needs a GPU. It runs programs of several convolutions, as
the bench does, and writes device times after every few problems. The second adds them to
``tests/cc/measured_candidates.tsv``, or with ``--gpu`` to the GPU's own table. Times of the
problems of ``unseen_problems.py`` stay out.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests" / "support"))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import measured_times
import numpy as np
from jax import lax

from jaxconv._src.conv import fused, primitives
from jaxconv._src.problem.epilogue import Epilogue, finish
from jaxconv._src.problem.spec import ConvSpec, Op
from jaxconv.bench import environment, measure, program, trace

DTYPES = {"bf16": jnp.bfloat16, "f16": jnp.float16, "f32": jnp.float32}
L2_BYTES = 50e6
MOST_COPIES = 48
STARTS = 4  # of a program in its trace
COMMAND = "python tools/candidate_times.py problems.tsv --json times.json"  # of a new table


class Problem(NamedTuple):
    """What a key says: the operation, the dtype, the tensors' shapes, the window, the epilogue."""

    op: Op
    dtype: np.dtype
    shapes: dict[str, tuple[int, ...]]
    spec: ConvSpec
    epilogue: Epilogue

    def operands(self) -> list[jax.ShapeDtypeStruct]:
        """The operands of a call: the convolution's, then those of the epilogue."""
        y = self.shapes["y"]
        found = [jax.ShapeDtypeStruct(self.shapes[r], self.dtype) for r in self.op.roles[:2]]
        for term in self.epilogue.terms:
            shape, dtype = (y, self.dtype) if term == "residual" else (y[-1:], jnp.float32)
            found.append(jax.ShapeDtypeStruct(shape, dtype))
        return found

    def copies(self) -> int:
        """How many convolutions a program holds: enough that operands leave the L2 cache."""
        sizes = [math.prod(each.shape) * each.dtype.itemsize for each in self.operands()]
        result = math.prod(self.shapes[self.op.roles[2]]) * self.dtype.itemsize
        return int(np.clip(4 * L2_BYTES / (sum(sizes) + 2 * result), 8, MOST_COPIES))


def parse(key: str) -> Problem:
    """Reads a key of floating-point operands in one batch, channels-last."""
    op, dtypes, precision, *sizes = key.split()
    numbers = {word[0]: word[1:] for word in sizes[:11]}

    def extents(name: str) -> tuple[int, ...]:
        return tuple(map(int, numbers[name].split("x")))

    n, groups, c, k = (int(numbers[name]) for name in "ngck")
    pads = tuple(tuple(map(int, pair.split("_"))) for pair in sizes[11][1:].split("x"))
    window = extents("f")
    axes = tuple(range(len(window) + 2))
    strides = extents("s"), pads, extents("l"), extents("d")
    spec = ConvSpec(*strides, groups, extents("i"), window, axes, axes, axes, False, precision)
    words = [word for word in sizes[12:] if word != "krsc"]
    flags = {w: w in words for w in ("scale", "bias", "residual", "pre", "statistics")}
    name, _, slope = next((w for w in words if w not in flags), "").partition(":")
    slopes = {"slope": float.fromhex(slope)} if slope else {}
    shapes = {
        "x": (n, *extents("i"), c),
        "w": (*window, c // groups, k),
        "y": (n, *extents("o"), k),
    }
    epilogue = Epilogue(**flags, activation=name or None, **slopes)
    return Problem(Op(op), np.dtype(DTYPES[dtypes.split(":")[0]]), shapes, spec, epilogue)


def ours(problem: Problem, instance: str) -> Callable[..., Any]:
    """The call that demands an instance."""
    spec = dataclasses.replace(problem.spec, algorithm=(instance,) * 3)
    if problem.epilogue.plain:
        return lambda lhs, rhs: primitives.bind(problem.op, lhs, rhs, spec, problem.dtype)
    static: dict[str, Any] = dict(spec=spec, epilogue=problem.epilogue, out_dtype=problem.dtype)
    names = problem.epilogue.terms
    return lambda x, w, *terms: fused.bind(x, w, dict(zip(names, terms, strict=True)), **static)


def xla(problem: Problem) -> Callable[..., Any]:
    """XLA's convolution, and its operations for the epilogue."""
    spec, plain = problem.spec, problem.epilogue.plain
    axes = "DHW"[3 - spec.rank :]
    convolve = functools.partial(
        lax.conv_general_dilated,
        window_strides=spec.stride,
        padding=spec.padding,
        lhs_dilation=spec.lhs_dilation,
        rhs_dilation=spec.dilation,
        dimension_numbers=(f"N{axes}C", f"{axes}IO", f"N{axes}C"),
        feature_group_count=spec.groups,
        precision=None if spec.precision == "default" else spec.precision,
        preferred_element_type=None if plain else jnp.float32,
    )

    def with_epilogue(x: jax.Array, w: jax.Array, *terms: jax.Array) -> Any:
        given = dict(zip(problem.epilogue.terms, terms, strict=True))
        return finish(convolve(x, w), given, spec.rank + 1, problem.epilogue, problem.dtype)

    def dgrad(dy: jax.Array, w: jax.Array) -> jax.Array:
        x = jnp.zeros(problem.shapes["x"], dy.dtype)
        return jax.vjp(lambda x: convolve(x, w), x)[1](dy)[0]

    def wgrad(x: jax.Array, dy: jax.Array) -> jax.Array:
        w = jnp.zeros(problem.shapes["w"], x.dtype)
        return jax.vjp(lambda w: convolve(x, w), w)[1](dy)[0]

    fprop = convolve if plain else with_epilogue
    return {Op.FPROP: fprop, Op.DGRAD: dgrad, Op.WGRAD: wgrad}[problem.op]


def compiled(key: str, candidate: str) -> tuple[Callable[..., Any], int]:
    """A program of several convolutions by a candidate, and the slices of its kernel."""
    problem = parse(key)
    one = jax.jit(xla(problem) if candidate == "xla" else ours(problem, candidate))
    several = jax.jit(lambda sets: [one(*operands) for operands in sets])
    lowered = several.lower([problem.operands()] * problem.copies())
    if candidate != "xla" and candidate not in lowered.as_text():
        raise ValueError("another kernel was lowered")
    return lowered.compile(), program.slices_of(lowered)


def draw(problem: Problem) -> list[list[jax.Array]]:
    """Normal operands of all convolutions of a program."""
    keys = jax.random.split(jax.random.key(0, impl="rbg"), len(problem.operands()))
    pairs = zip(keys, problem.operands(), strict=True)
    first = [jax.random.normal(key, each.shape, each.dtype) for key, each in pairs]
    return [first, *([jnp.copy(a) for a in first] for _ in range(problem.copies() - 1))]


def microseconds(run: Callable[..., Any], sets: list[list[jax.Array]]) -> float:
    """The device time of one convolution."""
    jax.block_until_ready(run(sets))

    def several() -> None:
        for _ in range(STARTS):
            results = run(sets)
        jax.block_until_ready(results)

    return 1e6 * trace.union_seconds(trace.device_events(several)) / STARTS / len(sets)


def measure_all(tasks: Sequence[Sequence[str]], seconds: float, jobs: int, path: pathlib.Path):
    """Compiles several problems ahead in threads, measures them, and writes the file."""
    start, size = time.perf_counter(), 3 * jobs
    content: dict[str, Any] = {"environment": environment.describe()}
    content |= {"us": {}, "slices": {}, "failures": {}}
    with ThreadPoolExecutor(jobs) as pool:
        for at in range(0, len(tasks), size):
            batch = tasks[at : at + size]
            pairs = [(key, candidate) for key, *candidates in batch for candidate in candidates]
            futures = {pair: pool.submit(compiled, *pair) for pair in pairs}
            for future in futures.values():  # nothing compiles beside a measurement
                future.exception()
            for key, *candidates in batch:
                if time.perf_counter() - start > seconds:
                    return
                sets = draw(parse(key))
                for candidate in candidates:
                    try:
                        run, slices = futures.pop((key, candidate)).result()
                        content["us"].setdefault(key, {})[candidate] = microseconds(run, sets)
                        if slices > 1:
                            content["slices"].setdefault(key, {})[candidate] = slices
                    except Exception as error:
                        content["failures"][f"{key} {candidate}"] = measure.first_line(error)
            path.write_text(json.dumps(content, indent=1))


def add(paths: Sequence[pathlib.Path], gpu: str) -> None:
    """Puts the times of files into the table of a GPU."""
    import unseen_problems

    table = measured_times.CANDIDATES if gpu == "h200" else measured_times.table_of(gpu)
    times = measured_times.read(table) if table.exists() else {}
    unseen = unseen_problems.problems()
    for path in paths:
        content = json.loads(path.read_text())
        measured = content["environment"]
        measured_times.expect(gpu, measured["device"], path)
        for key, us in content["us"].items():
            if key in unseen:
                continue
            of_xla, kernels = times.get(key, (None, {}))
            for candidate, value in us.items():
                if candidate == "xla":
                    of_xla = value
                    continue
                slices = content["slices"].get(key, {}).get(candidate, 1)
                same = [name for name in kernels if measured_times.instance_of(name) == candidate]
                for name in same:
                    del kernels[name]
                kernels[candidate + (f"/{slices}" if slices > 1 else "")] = value
            times[key] = of_xla, kernels
    facts = {"gpu": measured["device"], "driver": measured["driver"], "jax": measured["jax"]}
    facts |= {"commit": measured["commit"], "command": COMMAND}
    measured_times.write(table, times, facts)


def main(argv: Sequence[str]) -> int:
    """Does what the command line asks for; returns the exit status."""
    parser = argparse.ArgumentParser(prog="candidate_times.py", description=__doc__)
    parser.add_argument("problems", nargs="?", type=pathlib.Path, metavar="PROBLEMS.tsv")
    parser.add_argument("--json", type=pathlib.Path, default=pathlib.Path("times.json"))
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--compile-jobs", type=int, default=8)
    parser.add_argument("--add", nargs="+", type=pathlib.Path, metavar="TIMES.json")
    parser.add_argument("--gpu", default="h200", help="whose table, for --add; default: h200")
    arguments = parser.parse_args(argv)
    if arguments.problems:
        tasks = [line.split("\t") for line in arguments.problems.read_text().splitlines()]
        measure_all(tasks, arguments.seconds, arguments.compile_jobs, arguments.json)
    if arguments.add:
        add(arguments.add, arguments.gpu)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
