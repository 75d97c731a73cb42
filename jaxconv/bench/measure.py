"""Measures one problem: correctness first, then both libraries alternating in one process.

Each library runs the same program: inside one jit, several independent convolutions with random
inputs of their own, so that nothing is served from a cache and the cost of one dispatch is shared.
On a GPU the program is started several times before its results are awaited, as a training loop
does: the time for a sleeping host to wake up, up to a millisecond, is not a convolution's.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxconv
from jaxconv._src import lowering
from jaxconv._src.spec import Op
from jaxconv.bench.environment import kernel_platform
from jaxconv.bench.layers import Layer

Convolution = Callable[..., jax.Array]

DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16, "int8": jnp.int8}

# Largest accepted ||a - b|| / ||b|| against a float32 HIGHEST reference, by (dtype, precision).
# 16-bit results are rounded once, to 2^-9 or 2^-12 relative at worst (and 1 / sqrt(3) of that on
# average), TF32 products are off by 3e-4. A float32 sum over n random terms is off by about
# 1e-8 sqrt(n): 1e-5 in the longest weight gradients, in the reference as well.
_BOUNDS = {
    ("f32", "default"): 1e-3,
    ("f32", "high"): 1e-4,
    ("f32", "highest"): 5e-5,
    ("bf16", None): 4e-3,
    ("f16", None): 5e-4,
    ("int8", None): 0.0,
}

# Bytes of operands and results that one measurement may hold: a part of the smallest usual device.
_MEMORY = {"cpu": 1.5e9, "cuda": 8e9}

# A program this long is repeated only three times, and where a single convolution takes half as
# long, a program holds one.
_LONG_SECONDS = 1.0


# On a GPU a program is started so often in a row that one measurement takes about this long.
_MEASUREMENT_SECONDS = 0.01
_MOST_STARTS = 32

# A program's runs: so many in a row, returning when the last one's results are there.
Program = Callable[[int], Any]


@dataclasses.dataclass(frozen=True)
class Problem:
    """One operation of one layer, at one dtype."""

    name: str
    layer: Layer
    op: Op
    dtype: str
    precision: str = "default"
    algorithm: str = "auto"

    @property
    def operand_dtype(self) -> np.dtype:
        return np.dtype(DTYPES[self.dtype])

    @property
    def out_dtype(self) -> np.dtype:
        return np.dtype(np.int32) if self.dtype == "int8" else self.operand_dtype

    @property
    def nbytes(self) -> int:
        return self.layer.nbytes(self.op, self.operand_dtype, self.out_dtype)

    @property
    def footprint(self) -> int:
        """Bytes of one convolution in a program: two results, as an earlier one may be alive."""
        result = self.layer.size(self.op.roles[2]) * self.out_dtype.itemsize
        return self.nbytes + result

    @property
    def bound(self) -> float:
        """The largest accepted relative error."""
        precision = self.precision if self.dtype == "f32" else None
        return _BOUNDS[self.dtype, precision]

    @property
    def dtype_label(self) -> str:
        return self.dtype if self.precision == "default" else f"{self.dtype} {self.precision}"


@dataclasses.dataclass
class Side:
    """One library on one problem. Times are seconds for one convolution."""

    compile_s: float | None = None  # trace, lower and compile a program of one convolution
    temporary_bytes: int | None = None  # memory of that program beside operands and result
    error: float | None = None  # ||a - b|| / ||b|| against the reference
    median_s: float | None = None
    p20_s: float | None = None
    p80_s: float | None = None
    failure: str | None = None


@dataclasses.dataclass
class Row:
    """The result for one problem."""

    problem: Problem
    platform: str
    kernel: str = "?"  # the instance that ran, or "XLA"
    reason: str = ""  # why XLA's convolution ran
    refused: bool = False  # the demanded algorithm does not take this problem
    copies: int = 0
    repetitions: int = 0
    sides: dict[str, Side] = dataclasses.field(default_factory=dict)

    @property
    def wrong(self) -> bool:
        """True where this library failed, or its result is not the reference's."""
        ours = self.sides["jaxconv"]
        if ours.error is None:
            return not self.refused
        return not ours.error <= self.problem.bound  # also when it is NaN

    def ratio(self, peer: str = "lax") -> float | None:
        """How many times longer ``peer`` takes; None where either was not timed."""
        ours, theirs = self.sides["jaxconv"], self.sides.get(peer)
        if self.wrong or not ours.median_s or theirs is None or not theirs.median_s:
            return None
        return theirs.median_s / ours.median_s

    def rate(self, amount: float) -> float | None:
        """``amount`` per second of this library's median time."""
        seconds = self.sides["jaxconv"].median_s
        return amount / seconds if seconds else None

    def as_json(self) -> dict[str, Any]:
        problem, layer = self.problem, self.problem.layer
        return {
            "layer": problem.name,
            "problem": dataclasses.asdict(layer),
            "op": problem.op.value,
            "dtype": problem.dtype,
            "precision": problem.precision,
            "algorithm": problem.algorithm,
            "kernel": self.kernel,
            "reason": self.reason,
            "wrong": self.wrong,
            "refused": self.refused,
            "error_bound": problem.bound,
            "flop": layer.flops,
            "bytes": problem.nbytes,
            "flop_per_s": self.rate(layer.flops),
            "bytes_per_s": self.rate(problem.nbytes),
            "copies": self.copies,
            "repetitions": self.repetitions,
            "ratio": {peer: self.ratio(peer) for peer in self.sides if peer != "jaxconv"},
            **{name: dataclasses.asdict(side) for name, side in self.sides.items()},
        }


def operation(problem: Problem, convolution: Convolution) -> Convolution:
    """The problem's operation as a function of its two operands.

    Args:
        problem: what to compute.
        convolution: ``lax.conv_general_dilated`` or a function with its signature; gradients are
            taken through it with ``jax.vjp``.

    Returns:
        (x, w) -> y, (dy, w) -> dx or (x, dy) -> dw, all channels-last.
    """
    layer = problem.layer
    axes = "DHW"[3 - layer.rank :]
    convolve = functools.partial(
        convolution,
        window_strides=layer.stride,
        padding=[(p, p) for p in layer.padding],
        rhs_dilation=layer.dilation,
        dimension_numbers=(f"N{axes}C", f"{axes}IO", f"N{axes}C"),
        feature_group_count=layer.groups,
        precision=None if problem.precision == "default" else problem.precision,
        preferred_element_type=problem.out_dtype if problem.dtype == "int8" else None,
    )

    # A gradient of a bilinear function does not depend on the operand it is taken in: only the
    # shape of that operand matters, and jit removes the forward pass.
    def dgrad(dy: jax.Array, w: jax.Array) -> jax.Array:
        x = jnp.zeros(layer.shape("x"), dy.dtype)
        return jax.vjp(lambda x: convolve(x, w), x)[1](dy)[0]

    def wgrad(x: jax.Array, dy: jax.Array) -> jax.Array:
        w = jnp.zeros(layer.shape("w"), x.dtype)
        return jax.vjp(lambda w: convolve(x, w), w)[1](dy)[0]

    return {Op.FPROP: convolve, Op.DGRAD: dgrad, Op.WGRAD: wgrad}[problem.op]


def libraries(problem: Problem, im2col: bool = False) -> dict[str, Convolution]:
    """The convolutions that are compared, this library's first; im2col is the textbook's."""
    ours = jaxconv.conv_general_dilated
    compared = {
        "jaxconv": functools.partial(ours, algorithm=problem.algorithm),
        "lax": lax.conv_general_dilated,
    }
    if im2col:
        compared["im2col"] = functools.partial(ours, algorithm="im2col")
    return compared


def operands(problem: Problem, copies: int, seed: int = 0) -> list[tuple[jax.Array, jax.Array]]:
    """Random operands, drawn on the device: normal, or over the whole range of an integer type."""
    shapes = [problem.layer.shape(role) for role in problem.op.roles[:2]]
    dtype = problem.operand_dtype

    @jax.jit
    def draw(key):
        keys = jax.random.split(key)
        if jnp.issubdtype(dtype, jnp.integer):
            return tuple(
                jax.random.randint(k, shape, -127, 128, dtype)
                for k, shape in zip(keys, shapes, strict=True)
            )
        return tuple(
            jax.random.normal(k, shape, dtype) for k, shape in zip(keys, shapes, strict=True)
        )

    # "rbg" draws several times faster than the default generator.
    return [draw(key) for key in jax.random.split(jax.random.key(seed, impl="rbg"), copies)]


def instances(text: str) -> list[str]:
    """The kernel instances named in a lowered or compiled program, in order of appearance."""
    return re.findall(r'\binstance\\*"?\s*[=:]\s*\\*"([^"\\]+)', text)


def kernel_of(
    problem: Problem, lowered: jax.stages.Lowered, compiled: jax.stages.Compiled, platform: str
) -> tuple[str, str]:
    """The instance that a program of one operation runs; or "XLA", and why."""
    if found := instances(lowered.as_text()) or instances(compiled.as_text()):
        return found[0], ""
    if platform not in lowering.PLATFORMS:
        return "XLA", f"no kernels for the platform {platform}"
    layer = problem.layer
    spec = layer.spec(problem.precision, problem.algorithm)
    try:
        chosen, _ = lowering.select(
            platform, problem.op, spec, layer.sizes, problem.operand_dtype, problem.out_dtype
        )
    except ValueError as error:
        return "XLA", str(error)
    if chosen.instance:
        return "XLA", f"{chosen.instance} was selected, but is not in the compiled program"
    return "XLA", "; ".join(f"{kernel}: {reason}" for kernel, reason in chosen.refusals)


def _reference(problem: Problem, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """The result by lax: float32 at HIGHEST, or for integers float64, which is exact."""
    exact = problem.dtype == "int8"
    wide = dataclasses.replace(problem, dtype="f32", precision="highest")
    with jax.enable_x64(exact):
        dtype = jnp.float64 if exact else jnp.float32
        compute = jax.jit(operation(wide, lax.conv_general_dilated))
        pair = lhs.astype(dtype), rhs.astype(dtype)
        try:
            return jax.block_until_ready(compute(*pair))
        except jax.errors.JaxRuntimeError:  # not every problem runs on every device
            result = compute(*jax.device_put(pair, jax.devices("cpu")[0]))
            return jax.device_put(result, lhs.device)


def relative_error(result: jax.Array, reference: jax.Array) -> float:
    """||result - reference|| / ||reference||, in the dtype of the reference."""
    with jax.enable_x64(reference.dtype == np.float64):
        difference = jnp.linalg.norm((result.astype(reference.dtype) - reference).ravel())
        scale = jnp.linalg.norm(reference.ravel())
        return float(difference) / max(float(scale), np.finfo(np.float32).tiny)


def _copies(problem: Problem, platform: str) -> int:
    """How many independent convolutions one program holds."""
    each = problem.footprint
    if platform == "cpu":
        # Enough that operands leave the cache between uses; no more, since each takes milliseconds.
        wanted = int(np.clip(64e6 / each, 1, 4))
    else:
        # Eight share a dispatch and pass several times through an L2 cache of 50 MB.
        wanted = 8 if 8 * each > 5e8 else 16
    return int(np.clip(_MEMORY.get(platform, 8e9) / each, 1, wanted))


def _first_line(error: BaseException) -> str:
    text = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text.strip()}"


def _check(row: Row, compared: dict[str, Convolution], lhs: jax.Array, rhs: jax.Array) -> float:
    """Compiles one convolution per library and compares the results with the reference.

    Returns:
        The seconds that the slower one's first run took.
    """
    problem, results, longest = row.problem, {}, 0.0
    for name, convolution in compared.items():
        side = row.sides[name] = Side()
        try:
            start = time.perf_counter()
            lowered = jax.jit(operation(problem, convolution)).lower(lhs, rhs)
            compiled = lowered.compile()
            side.compile_s = time.perf_counter() - start
            if memory := compiled.memory_analysis():
                side.temporary_bytes = memory.temp_size_in_bytes
            if name == "jaxconv":
                row.kernel, row.reason = kernel_of(problem, lowered, compiled, row.platform)
            start = time.perf_counter()
            results[name] = jax.block_until_ready(compiled(lhs, rhs))
            longest = max(longest, time.perf_counter() - start)
        except Exception as error:  # shown in the row, whatever a library or device raises
            side.failure = _first_line(error)
            row.refused |= (
                name == "jaxconv" and problem.algorithm != "auto" and isinstance(error, ValueError)
            )
    if not results:
        return longest
    try:
        reference = _reference(problem, lhs, rhs)
        for name, result in results.items():
            row.sides[name].error = relative_error(result, reference)
    except Exception as error:
        row.sides["jaxconv"].failure = f"no reference to compare with: {_first_line(error)}"
    return longest


def program(problem: Problem, convolution: Convolution, pairs: Sequence) -> Program:
    """All pairs through one compiled program."""
    # A jitted function inside is lowered once and called for every pair.
    one = jax.jit(operation(problem, convolution))
    compiled = jax.jit(lambda pairs: [one(*pair) for pair in pairs]).lower(pairs).compile()

    def run(starts: int):
        for _ in range(starts):
            results = compiled(pairs)
        return jax.block_until_ready(results)

    return run


def elapsed(run: Program, starts: int = 1) -> float:
    """Seconds for one run of a program, of so many in a row."""
    start = time.perf_counter()
    run(starts)
    return (time.perf_counter() - start) / starts


def starts_of(platform: str, seconds: float) -> int:
    """How often a program that takes ``seconds`` is started before its results are awaited."""
    if platform == "cpu":  # the host computes: nothing runs ahead of it
        return 1
    return int(np.clip(_MEASUREMENT_SECONDS / seconds, 1, _MOST_STARTS))


def measure(
    problem: Problem,
    *,
    repetitions: int = 10,
    seconds: float = 0.4,
    seed: int = 0,
    im2col: bool = False,
    peers: dict[str, Callable[[Problem, int], Program]] | None = None,
) -> Row:
    """Checks and times one problem on JAX's default device.

    Args:
        problem: what to measure.
        repetitions: least number of runs of each library (three where a run takes over a second).
        seconds: time to spend on each library, within 100 runs.
        seed: of the random operands.
        im2col: measure ``algorithm="im2col"`` too.
        peers: further libraries: name -> function of the problem and the number of convolutions in
            a program that returns the program.

    Returns:
        The row; failures are recorded in it, not raised.
    """
    platform = kernel_platform()
    row = Row(problem, platform, copies=_copies(problem, platform))
    try:
        pairs = operands(problem, row.copies, seed)
    except Exception as error:
        row.sides["jaxconv"] = Side(failure=f"operands: {_first_line(error)}")
        return row
    compared = libraries(problem, im2col)
    longest = _check(row, compared, *pairs[0])
    if row.wrong or row.refused:
        return row
    if longest > _LONG_SECONDS / 2:
        row.copies = 1
        pairs = pairs[:1]

    programs: dict[str, Program] = {}
    makers = {
        name: functools.partial(program, problem, convolution, pairs)
        for name, convolution in compared.items()
        if not row.sides[name].failure
    }
    for name, peer in (peers or {}).items():
        row.sides[name] = Side()
        makers[name] = functools.partial(peer, problem, row.copies)
    lengths = {}
    for name, make in makers.items():
        try:
            run = make()
            length = elapsed(run)  # the first run is a warm-up, and may load code
            lengths[name] = length if length > _LONG_SECONDS else elapsed(run)
            programs[name] = run
        except Exception as error:
            row.sides[name].failure = _first_line(error)

    if not programs:
        return row
    starts = {name: starts_of(platform, length) for name, length in lengths.items()}
    if max(lengths.values()) > _LONG_SECONDS:
        row.repetitions = 3
    else:
        each = sum(length * starts[name] for name, length in lengths.items())
        affordable = int(seconds * len(lengths) / each)
        row.repetitions = max(repetitions, min(affordable, 100))
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(row.repetitions):
        for name, run in programs.items():
            times[name].append(elapsed(run, starts[name]) / row.copies)
    for name, values in times.items():
        side = row.sides[name]
        side.p20_s, side.median_s, side.p80_s = map(float, np.percentile(values, (20, 50, 80)))
    return row
