"""Random problems at scale on a GPU: exact on small integers, every kernel instance by name.

    python tests/gpu/gpu_fuzz.py --seconds 600 --seed 1 --record tests/gpu_report.json

A problem is a function of (seed, index). It has one of four forms:

- an operation as a primitive, computed by ``algorithm="native"`` and by a few random instances of
  those that accept it;
- a quantised convolution, or one with an epilogue, computed in the same way;
- a convolution and its gradients by ``jax.vjp``, of ``lax`` under ``override`` or of this library.

Operands are small integers whose sums stay below 2^24, so every order of summation in float32 gives
the bits of a NumPy reference, rounded once. 8-bit operands have the full range; the roundings of
their epilogue are defined. Each program runs twice, and its result buffers initially contain NaN,
or -1. A worker process that dies or hangs counts as a failure of its current problem, and is
replaced.

A failure is one line that begins with its repro: ``python tests/gpu/gpu_fuzz.py --seed S
--problem I`` runs that problem alone, on all accepting instances. ``--platform cpu`` runs the CPU's
kernels. Processes use the GPUs of ``--gpus``, CUDA_VISIBLE_DEVICES or nvidia-smi in turn.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import json
import math
import os
import pathlib
import queue
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable

# JAX reads this when it starts a backend.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "support"))

import epilogue_reference
import gpu_fuzz_fused
import gpu_fuzz_int8
import gpu_report
import gpus
import jax
import jax.numpy as jnp
import kernel_tables
import numpy as np
from gpu_fuzz_problems import Case, draw_case
from int8_reference import channels_last
from jax import lax
from numerics import excess, integer_operands, poison, reference, tolerance_of
from problems import DTYPES

import jaxconv
from jaxconv._src.call import record
from jaxconv._src.conv import primitives
from jaxconv._src.conv.bilinear import select
from jaxconv._src.library import native
from jaxconv._src.problem.spec import Op

WORKER_ENVIRONMENT = {
    "MALLOC_PERTURB_": "1",  # glibc then fills new memory with 0xfe, as in conftest.py
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}
SILENCE_S = 240  # a worker without output for so long hangs; the start takes 20 s
SHOWN = 100  # failures that are printed and recorded
FORCED = 10  # instances that run by name on a problem
CLEAR_EVERY = 100  # problems between two clearings of JAX's caches
NATIVE = "native"
START = "start of a worker"
POISON_BYTES = 1 << 27  # freed before each run; workspaces, up to 64 MB, reuse it


# --- computing it ---------------------------------------------------------------------------------


def accepting(case: Case, platform: str) -> list[str]:
    """The algorithms that compute the primitive: "native" if not left to XLA, and instances."""
    if case.int8:
        return gpu_fuzz_int8.accepting(case.problem, case.int8, case.dtype, platform)
    if case.fused:
        return gpu_fuzz_fused.accepting(
            case.problem, case.fused, case.dtype, case.precision, case.layout, platform
        )
    p, dtypes = case.problem, (DTYPES[case.dtype][0], case.result_dtype)
    spec = p.spec(precision=case.precision, layout=case.layout)
    shapes = [_array(case, role, np.empty(p.canonical_shape(role))).shape for role in case.op.roles]
    sizes = spec.sizes(case.op, *shapes[:2])
    names = [n for n in native.load(platform).kernels() if n.startswith(f"{case.op.value}_")]
    accepted = []
    for algorithm in (NATIVE, *names):
        forced = dataclasses.replace(spec, algorithm=(algorithm,) * 3)
        chosen = select(platform, case.op, forced, sizes, *dtypes)[0].instance
        if chosen and algorithm in (NATIVE, chosen):
            accepted.append(algorithm)
    return accepted


def _array(case: Case, role: str, canonical: np.ndarray) -> np.ndarray:
    return case.problem.to_layout(role, canonical, case.layout)


def _operands(case: Case) -> tuple[list[np.ndarray], dict[Op, np.ndarray]]:
    """(operands in their layout, expected results in canonical layout)."""
    if case.int8:
        seed = [case.seed, case.index, 1]
        arrays, expected = gpu_fuzz_int8.arrays(case.problem, case.int8, case.dtype, seed)
        return arrays, {case.op: expected}
    dtypes = dict.fromkeys("xwy", DTYPES[case.dtype][0])
    if case.op:
        dtypes[case.op.roles[2]] = case.result_dtype
    canonical = integer_operands(case.problem, case.ops, [case.seed, case.index, 1])
    roles = "xwy" if case.op is None else case.op.roles[:2]
    if case.fused:
        seed = [case.seed, case.index, 2]
        terms = epilogue_reference.exact_terms(case.problem, case.fused, case.dtype, seed)
        sums = reference(Op.FPROP, case.problem, canonical["x"], canonical["w"], dtype=np.float32)
        exact = epilogue_reference.results(case.fused, terms, sums)
        arrays = [_array(case, r, canonical[r]).astype(dtypes[r]) for r in roles]
        arrays += [_array(case, "y", a) if a.ndim > 1 else a for a in terms.values()]
        return arrays, {Op.FPROP: [epilogue_reference.rounded(a, case.result) for a in exact]}
    expected = {
        op: reference(
            op, case.problem, *(canonical[r] for r in op.roles[:2]), dtype=np.float32
        ).astype(dtypes[op.roles[2]])
        for op in case.ops
    }
    return [_array(case, r, canonical[r]).astype(dtypes[r]) for r in roles], expected


def _canonical(case: Case, op: Op, result: np.ndarray) -> np.ndarray:
    if case.int8:
        return channels_last(case.problem, case.int8, result)
    return case.problem.to_canonical(op.roles[2], result, case.layout)


def _convolution(case: Case) -> Callable:
    """(x, w) -> y by lax's function; for a batched problem, mapped over both operands."""
    p = case.problem
    one = dataclasses.replace(p, batch=None)
    x_axes, w_axes, y_axes = (one.axes(role, case.layout) for role in "xwy")
    numbers = lax.ConvDimensionNumbers(
        (x_axes[0], x_axes[-1], *x_axes[1:-1]),
        (w_axes[-1], w_axes[-2], *w_axes[:-2]),
        (y_axes[0], y_axes[-1], *y_axes[1:-1]),
    )
    options = {} if case.under_lax else {"algorithm": NATIVE}
    convolve = functools.partial(
        lax.conv_general_dilated if case.under_lax else jaxconv.conv_general_dilated,
        window_strides=p.stride,
        padding=p.padding,
        lhs_dilation=p.lhs_dilation,
        rhs_dilation=p.dilation,
        dimension_numbers=numbers,
        feature_group_count=p.groups,
        precision=case.precision,
        **options,
    )
    return convolve if p.batch is None else jax.vmap(convolve)


def _programs(case: Case, algorithms: list[str]) -> tuple[list[str], Callable]:
    """The labels of all results, and the function of (operands, poison) that computes them."""
    if case.op is None:
        convolution = _convolution(case)

        def with_gradients(x, w, dy, *poison):
            y, vjp = jax.vjp(convolution, x, w)
            dx, dw = vjp(dy)
            return y, dx, dw

        return [op.value for op in Op], with_gradients
    if case.int8:
        return algorithms, gpu_fuzz_int8.calls(case.int8, algorithms)
    if case.fused:
        return algorithms, gpu_fuzz_fused.calls(
            case.problem, case.fused, case.dtype, case.precision, case.layout, algorithms
        )

    def primitive(lhs, rhs, *poison):
        return tuple(
            primitives.bind(
                case.op,
                lhs,
                rhs,
                case.problem.spec(algorithm=a, precision=case.precision, layout=case.layout),
                case.result_dtype,
            )
            for a in algorithms
        )

    return algorithms, primitive


def _poison(shapes: list, platform: str) -> list[jax.Array]:
    """Arrays to donate for the results. On a GPU, NaN first fills memory that is freed again."""
    if platform == "cuda":
        jnp.full(POISON_BYTES // 4, jnp.nan, jnp.float32).block_until_ready().delete()
    return jax.device_put(poison(shapes))


def least_run(
    case: Case, accepted: list[str], ran: collections.Counter[str], forced: int | None
) -> list[str]:
    """The ``forced`` least-run instances (None: all), and "native" if it is accepted.

    Among instances that ``ran`` counts equally the choice is random, so that workers differ.
    """
    names = [name for name in accepted if name != NATIVE]
    order = np.random.default_rng([case.seed, case.index, 3]).permutation(len(names))
    least = sorted((names[i] for i in order), key=lambda name: ran[name])[:forced]
    return [NATIVE] * (NATIVE in accepted) + least


def judge(
    case: Case, platform: str, forced: int | None, ran: collections.Counter[str]
) -> tuple[dict[str, int], list[str]]:
    """Judges one problem: (counts, complaints).

    Runs the ``forced`` instances that ``ran`` counts least often (None: all).
    """
    counts: collections.Counter[str] = collections.Counter()
    algorithms = least_run(case, accepting(case, platform), ran, forced) if case.op else []
    if case.op and not algorithms:
        counts["problems left to XLA"] += 1
        return counts, []
    ran.update(algorithms)
    arrays, expected = _operands(case)
    labels, function = _programs(case, algorithms)
    scope = jaxconv.override(algorithm=NATIVE) if case.under_lax else contextlib.nullcontext()
    shapes = jax.eval_shape(function, *arrays)
    jitted = jax.jit(
        function,
        donate_argnums=range(len(arrays), len(arrays) + len(shapes)),
        keep_unused=True,
    )
    with scope, record.recording() as convolutions:
        program = jitted.trace(*arrays, *shapes).lower().compile()
    chosen = [c.instance for c in sorted(convolutions, key=_order(case))]
    if len(chosen) != len(labels):
        return counts, [f"{case}: expected {len(labels)} convolutions, lowered {chosen}"]
    if None in chosen:  # XLA's convolutions need not be exact
        counts["problems left to XLA"] += 1
        return counts, []
    runs = [
        [np.asarray(out) for out in program(*arrays, *_poison(shapes, platform))] for _ in range(2)
    ]
    complaints = []
    each = len(shapes) // len(labels)  # number of results for each label
    for at, (once, twice) in enumerate(zip(*runs, strict=True)):
        label, instance = labels[at // each], chosen[at // each]
        op = case.op or Op(label)
        right = expected[op][at % each] if case.fused else expected[op]
        counts["results"] += 1
        counts[f"op {op.value}"] += 1
        counts[f"instance {instance}"] += 1
        repro = f"{case}: {label} by {instance}"
        if not np.array_equal(once.view(np.uint8), twice.view(np.uint8)):
            complaints.append(f"{repro}: two runs differ")
        wrong = excess(_canonical(case, op, once), right, tolerance_of(instance), repro)
        complaints.append(wrong.replace("\n ", ""))
    size = sum(math.prod(s.shape) * s.dtype.itemsize for s in shapes)
    counts["poisoned results"] = len(shapes) * (
        program.memory_analysis().alias_size_in_bytes == size
    )
    counts["problems"] += 1
    counts["large problems"] += case.problem.name.endswith("large")
    counts[f"dtype {case.dtype} {case.precision}"] += len(labels)
    counts[f"rank {case.problem.rank}"] += len(labels)
    counts[f"layout {case.layout}"] += len(labels)
    counts["form fused"] += len(labels) * (case.fused is not None)
    counts["form vjp"] += len(labels) * (case.op is None)
    p = case.problem
    grouped = "depthwise" if p.groups == p.c > 1 else "grouped" if p.groups > 1 else "of one group"
    counts[f"groups {grouped}"] += len(labels)
    if case.int8:
        counts["form int8"] += len(labels)
        counts[f"int8 to {case.result}"] += len(labels)
        for feature in gpu_fuzz_int8.features(case.problem, case.int8):
            counts[f"int8 with {feature}"] += len(labels)
    return counts, [complaint for complaint in complaints if complaint]


def _order(case: Case) -> Callable:
    """A sort key: the order of results in ``_programs``. Gradients are recorded in any order."""
    return lambda c: 0 if case.op else [op.value for op in Op].index(c.op)


# --- a worker -------------------------------------------------------------------------------------


def failed(case: Case, error: Exception) -> tuple[dict[str, int], list[str]]:
    """The counts and complaints for a problem whose computation raised ``error``.

    Workers share a GPU's memory, so large problems of several workers may not fit. Such an error is
    not a failure of a kernel.
    """
    if "RESOURCE_EXHAUSTED: Out of memory" in str(error):
        return {"problems that did not fit the memory left": 1}, []
    trace = " ".join("".join(traceback.format_exception(error)).split())
    return {}, [f"{case}: {trace[-600:]}"]


def work(options: argparse.Namespace) -> int:
    """Runs problems until the time is over; writes a JSON line before and after each."""
    say = functools.partial(print, flush=True)
    device = jax.devices({"cuda": "gpu", "cpu": "cpu"}[options.platform])[0]
    index, ran = options.start, collections.Counter()
    with jax.default_device(device):
        while time.time() < options.until:
            case = draw_case(options.seed, index, options.platform)
            say(json.dumps({"begin": index, "case": str(case)}))
            try:
                counts, complaints = judge(case, options.platform, FORCED, ran)
            except Exception as error:
                counts, complaints = failed(case, error)
            say(json.dumps({"counts": counts, "complaints": complaints}))
            if complaints:
                jnp.zeros(1).block_until_ready()  # raises if the GPU is lost: the process ends
            index += options.step
            if index // options.step % CLEAR_EVERY == 0:
                jax.clear_caches()
    return 0


def reproduce(options: argparse.Namespace) -> int:
    """Runs one problem on every instance."""
    case = draw_case(options.seed, options.problem, options.platform)
    print(case)
    with jax.default_device(jax.devices({"cuda": "gpu", "cpu": "cpu"}[options.platform])[0]):
        counts, complaints = judge(case, options.platform, None, collections.Counter())
    print(*(f"{count:6} {name}" for name, count in counts.items()), *complaints, sep="\n")
    return int(bool(complaints))


# --- the workers' supervisor ----------------------------------------------------------------------


class Worker:
    """A process that runs every ``step``-th problem; it is replaced if it ends early."""

    def __init__(self, options: argparse.Namespace, start: int, until: float, events: queue.Queue):
        self.options, self.until, self.events = options, until, events
        self.gpu = gpus.of_process(start, options.gpus)
        self.spawn(start)

    def spawn(self, start: int) -> None:
        o = self.options
        arguments = {
            "seed": o.seed,
            "platform": o.platform,
            "start": start,
            "step": o.processes,
            "until": self.until,
        }
        command = [sys.executable, __file__]
        command += [text for key, value in arguments.items() for text in (f"--{key}", str(value))]
        environment = {**os.environ, **WORKER_ENVIRONMENT, **self.gpu}
        environment["JAX_PLATFORMS"] = {"cuda": "cuda,cpu", "cpu": "cpu"}[o.platform]
        of_a_gpu = -(-o.processes // max(1, len(o.gpus)))
        environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{0.9 / of_a_gpu:.3f}"
        self.index, self.case, self.heard = start, START, time.time()
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the process)
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=self.errors, text=True
        )
        threading.Thread(target=self._read, args=(self.process,), daemon=True).start()

    def _read(self, process: subprocess.Popen) -> None:
        for line in process.stdout:
            self.events.put((self, line))
        process.wait()
        self.events.put((self, process))

    def death(self) -> str:
        """How the process ended, and the end of its last output."""
        self.errors.seek(0)
        said = " ".join(self.errors.read().split())
        return f"{self.case}: worker ended with {self.process.returncode}: {said[-600:]}"


def supervise(options: argparse.Namespace) -> int:
    if options.record:
        gpu_report.commit()  # raises now rather than after the run
    began, events = time.time(), queue.Queue()
    until = began + options.seconds
    workers = [Worker(options, i, until, events) for i in range(options.processes)]
    running, counts, failures = len(workers), collections.Counter(), []
    shown = began
    while running:
        try:
            worker, event = events.get(timeout=5)
        except queue.Empty:
            worker = None
        now = time.time()
        found = []
        if worker is None:
            pass
        elif isinstance(event, str):
            worker.heard = now
            try:
                told = json.loads(event)
            except ValueError:  # output of a library
                continue
            if "begin" in told:
                worker.index, worker.case = told["begin"], told["case"]
            else:
                counts.update(told["counts"])
                found = told["complaints"]
                worker.case = "" if found else "between two problems"
        elif event is worker.process:
            if event.returncode and worker.case:  # otherwise the failure is already reported
                found = [worker.death()]
            if now < until and worker.case != START and len(failures) < 10 * SHOWN:
                worker.spawn(worker.index + options.processes)
            else:
                running -= 1
        for each in workers:
            if each.process.poll() is None and now - each.heard > SILENCE_S:
                each.process.kill()
        failures += found
        for failure in found[: max(0, SHOWN - len(failures) + len(found))]:
            print(f"FAILED {failure}", flush=True)
        if now - shown > 30:
            shown = now
            print(f"{now - began:5.0f} s, {counts['results']} results", flush=True)
    return report(options, counts, failures, time.time() - began)


def report(options, counts: collections.Counter, failures: list[str], seconds: float) -> int:
    """Prints the counts, and the instances that never ran; adds both to the GPU report."""
    ran = {n.removeprefix("instance "): c for n, c in counts.items() if n.startswith("instance ")}
    for name, count in sorted(counts.items()):
        print(f"{count:8} {name}")
    known = (
        [each.name for each in kernel_tables.all_instances()] if options.platform == "cuda" else []
    )
    missing = sorted(set(known) - set(ran))
    print(f"{len(missing)} instances never ran:", *missing)
    print(f"{counts['results']} results in {seconds:.0f} s, {len(failures)} failures")
    if options.record:
        summary = {
            "failed": len(failures),
            "results": counts["results"],
            "problems": counts["problems"],
            "int8_results": counts["form int8"],
            "fused_results": counts["form fused"],
            "poisoned_results": counts["poisoned results"],
            "seconds": round(seconds),
            "processes": options.processes,
            "gpus": max(1, len(options.gpus)),
            "seed": options.seed,
            "instances": len(ran),
            "fewest_results_of_an_instance": min(ran.values(), default=0),
            "instances_never_run": missing,
            "problems_left_to_xla": counts["problems left to XLA"],
        }
        if failures:
            summary["failures"] = failures[:SHOWN]
        gpu_report.update(options.record, {}, fuzz=summary)
    return int(bool(failures) or not counts["results"])


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument(
        "--gpus",
        type=lambda text: [name.strip() for name in text.split(",") if name.strip()],
        metavar="0,1",
        help="the GPUs that processes take in turn; all that are visible",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--problem", type=int, help="this problem alone, on every instance")
    parser.add_argument("--platform", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--record", metavar="PATH", help="add a summary to this GPU report")
    parser.add_argument("--start", type=int, help=argparse.SUPPRESS)  # a worker's first problem
    parser.add_argument("--step", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    if options.gpus is None:
        options.gpus = gpus.visible() if options.platform == "cuda" else []
    return options


def main() -> int:
    options = arguments()
    if options.problem is not None:
        return reproduce(options)
    return supervise(options) if options.start is None else work(options)


if __name__ == "__main__":
    sys.exit(main())
