"""Measures a built-in network: the same source on lax's convolutions and on this library's.

Optional sides are the program fused by ``jaxconv.fuse``; the network with Winograd where it is
predicted faster, in inference also with prepared filters; and in inference the same network,
quantised to int8.

Both programs are compiled, checked against each other, and run alternately, like a user's program:
one step after the other without a wait between them, in training with the state donated and fed
back. On a GPU a trace of further steps divides the device's time.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxconv
from jaxconv._src.call import selection
from jaxconv.bench import trace, winograd_network
from jaxconv.bench.environment import kernel_platform
from jaxconv.bench.measure import first_line
from jaxconv.bench.networks import NETWORKS, programs
from jaxconv.bench.networks.blocks import PASSES

DTYPES = {"bf16": jnp.bfloat16, "f16": jnp.float16, "f32": jnp.float32}
MODES = ("train", "infer")
LIBRARIES = ("lax", "jaxconv")
FUSED = "fused"  # jaxconv's side of what ``fuse`` makes of the program
WINOGRAD = "winograd"  # jaxconv's side with Winograd where it is predicted faster
PREPARED = "prepared"  # the same with filters that were prepared for it
INT8 = "int8"  # jaxconv's side of the quantised network

# Largest accepted ||a - b|| / ||b|| between the libraries. With random parameters lax's results in
# bfloat16 are off by 0.006 to 0.06 from those in float32; without one of its convolutions a network
# is off by about 1.
_BOUND = 0.1

# The same between the quantised network and lax's: int8 rounds each activation by up to half a step
# of 1 / 127 of its largest magnitude. ResNet-50 with random parameters is off by 0.04.
_INT8_BOUND = 0.2

# Images for calibration, drawn with another seed than those that are measured.
_CALIBRATION_BATCH = 32

_ON_REQUEST = (FUSED, WINOGRAD, PREPARED, INT8)

_TRACED_STEPS = 5
_KERNELS_KEPT = 40


@dataclasses.dataclass(frozen=True)
class Run:
    """A network, how it is run, and on what input."""

    name: str
    mode: str  # of MODES
    shape: tuple[int, ...]  # of the input
    dtype: str  # of activations; parameters are float32
    algorithm: str = "auto"
    seed: int = 0
    quantized: bool = False  # whether the quantised network is measured too
    fused: bool = False  # whether the fused program is measured too
    winograd: str = ""  # an algorithm of Winograd's that is measured too, such as "winograd_f4x4"
    batch_norm: str = "centred"  # of PASSES: how the network writes it

    @property
    def libraries(self) -> tuple[str, ...]:
        """The sides, in the order in which they are shown."""
        winograd = [WINOGRAD, PREPARED][: 2 if self.mode == "infer" else 1] if self.winograd else []
        return (*LIBRARIES, *[FUSED] * self.fused, *winograd, *[INT8] * self.quantized)

    @property
    def input(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, DTYPES[self.dtype])


@dataclasses.dataclass
class Side:
    """One library's program. Times are seconds of one step."""

    compile_s: float | None = None  # trace, lower and compile, with JAX's caches empty
    memory_bytes: int | None = None  # arguments, results and temporaries, donated ones once
    median_s: float | None = None
    least_s: float | None = None
    most_s: float | None = None
    device: trace.Split | None = None
    kernels: list[trace.Kernel] = dataclasses.field(default_factory=list)  # of the traced steps
    failure: str | None = None


@dataclasses.dataclass
class Kernels:
    """The convolutions of one step, and by whom they are computed."""

    convolutions: int = 0
    on_kernels: int = 0
    with_epilogue: int = 0
    instances: dict[str, int] = dataclasses.field(default_factory=dict)
    refusals: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Result:
    """Both libraries on one network."""

    run: Run
    platform: str
    steps: int
    traced_steps: int = 0
    sides: dict[str, Side] = dataclasses.field(default_factory=dict)
    difference: float | None = None  # ||a - b|| / ||b|| of outputs, in training of losses
    # In training, of gradients. This is not a test: the gradients of two correct 16-bit programs
    # differ by 0.1 to 1 if batch normalisation has few pixels, because it amplifies rounding.
    gradient_difference: float | None = None
    # For the optional sides: the difference of the outputs (in training the losses) from lax's.
    differences: dict[str, float] = dataclasses.field(default_factory=dict)
    # With Winograd, in inference: the difference of the outputs from those in float32 at HIGHEST.
    errors: dict[str, float] = dataclasses.field(default_factory=dict)
    kernels: dict[str, Kernels] = dataclasses.field(default_factory=dict)  # of sides but lax's

    @property
    def wrong(self) -> bool:
        """True where a library failed, or the two do not agree."""
        if self.difference is None or any(side.failure for side in self.sides.values()):
            return True
        for name, difference in self.differences.items():
            if not difference <= (_INT8_BOUND if name == INT8 else _BOUND):  # also when it is NaN
                return True
        return not self.difference <= _BOUND  # also when it is NaN

    @property
    def ratio(self) -> float | None:
        """How many times longer lax's step takes; None where either was not timed."""
        return self.ratio_of("jaxconv")

    def ratio_of(self, name: str) -> float | None:
        """How many times longer lax's step takes than that of another side."""
        theirs, ours = (self.sides[side].median_s for side in ("lax", name))
        return theirs / ours if theirs and ours and not self.wrong else None

    def as_json(self) -> dict[str, Any]:
        return {
            "network": self.run.name,
            **{k: v for k, v in dataclasses.asdict(self.run).items() if k != "name"},
            "steps": self.steps,
            "traced_steps": self.traced_steps,
            "wrong": self.wrong,
            "difference": self.difference,
            "gradient_difference": self.gradient_difference,
            "errors": self.errors,
            "ratio": self.ratio,
            **dataclasses.asdict(self.kernels.get("jaxconv", Kernels())),
            **{f"{name}_difference": self.differences.get(name) for name in _ON_REQUEST},
            **{
                f"{name}_ratio": self.ratio_of(name) if name in self.run.libraries else None
                for name in _ON_REQUEST
            },
            **{
                f"{name}_kernels": dataclasses.asdict(self.kernels.get(name, Kernels()))
                for name in _ON_REQUEST
            },
            **{name: _side_as_json(side) for name, side in self.sides.items()},
        }


def _side_as_json(side: Side) -> dict[str, Any]:
    return {
        **{f.name: getattr(side, f.name) for f in dataclasses.fields(side)},
        "device": side.device._asdict() if side.device else None,
        "kernels": [kernel._asdict() for kernel in side.kernels],
    }


@dataclasses.dataclass
class _Program:
    """A compiled step and the state that it is at, or the quantised network's parameters."""

    compiled: jax.stages.Compiled
    state: Any
    examples: programs.Examples
    train: bool

    def __call__(self, steps: int) -> jax.Array:
        """Runs so many steps; returns the last one's loss or output when it is there."""
        for _ in range(steps):
            if self.train:
                self.state, result = self.compiled(self.state, self.examples)
            else:
                result = self.compiled(self.state, self.examples.x)
        return jax.block_until_ready((self.state, result))[1]


def function(run: Run, library: str = "jaxconv") -> Callable:
    """What one step computes, the same on every side but those that change the filters."""
    if library == INT8:
        return NETWORKS[run.name].quantized.forward
    if library == PREPARED:
        make_pass = functools.partial(winograd_network.Pass, run.winograd)
        return programs.inference(NETWORKS[run.name], make_pass)
    make = programs.training_step if run.mode == "train" else programs.inference
    step = make(NETWORKS[run.name], PASSES[run.batch_norm])
    return jaxconv.fuse(step) if library == FUSED else step


def warm_up() -> None:
    """Loads what the first program of a process loads, so that no network's compilation pays it."""
    x, w = jnp.ones((1, 32, 8, 8)), jnp.ones((32, 32, 3, 3))

    def convolve_and_multiply(x, w):
        y = lax.conv(x, w, (1, 1), "SAME")
        return y @ y

    for enabled in (True, False):
        with jaxconv.override(enabled):
            jax.block_until_ready(jax.jit(convolve_and_multiply)(x, w))


def _override(library: str, run: Run):
    if library in (WINOGRAD, PREPARED):
        return jaxconv.override(algorithm=f"auto+{run.winograd}")
    return jaxconv.override(library in ("jaxconv", FUSED), algorithm=run.algorithm)


def _compile(library: str, run: Run, arguments: tuple) -> tuple[jax.stages.Compiled, Side]:
    side = Side()
    donated = 0 if run.mode == "train" else ()
    jax.clear_caches()  # what the other library's program left would be found again
    start = time.perf_counter()
    with _override(library, run):
        step = jax.jit(function(run, library), donate_argnums=donated)
        compiled = step.lower(*arguments).compile()
    side.compile_s = time.perf_counter() - start
    if memory := compiled.memory_analysis():
        side.memory_bytes = (
            memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes
            + memory.temp_size_in_bytes
        )
    return compiled, side


def _kernels(run: Run, library: str, arguments: tuple) -> Kernels:
    """Counts the step's convolutions and the kernels that they take."""
    if kernel_platform() not in selection.PLATFORMS:
        return Kernels()
    with _override(library, run):
        explanation = jaxconv.explain(function(run, library), *arguments)
    instances, refusals = collections.Counter(), collections.Counter()
    for convolution in explanation.convolutions:
        if convolution.instance:
            instances[convolution.instance] += convolution.count
        for kernel, reason in convolution.refusals:
            refusals[f"{kernel}: {reason}"] += convolution.count
    total = sum(c.count for c in explanation.convolutions)
    fused = sum(c.count for c in explanation.convolutions if c.epilogue)
    return Kernels(total, explanation.on_kernels, fused, dict(instances), dict(refusals))


@jax.jit
def _difference(ours: Any, theirs: Any) -> jax.Array:
    """||ours - theirs|| / ||theirs|| over all arrays."""

    def squares(tree: Any) -> jax.Array:
        return sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree))

    difference = jax.tree.map(jnp.subtract, ours, theirs)
    return jnp.sqrt(squares(difference) / squares(theirs))


def _reference(run: Run, state: Any, x: jax.Array) -> jax.Array:
    """The outputs in float32, by lax at precision HIGHEST, with the filters of the run."""
    infer = function(run, "lax")
    wide = state._replace(parameters=[p.astype(jnp.float32) for p in state.parameters])
    # Its time does not count: XLA need not search for the fastest way.
    options = {"xla_gpu_autotune_level": 0} if kernel_platform() == "cuda" else {}
    with jaxconv.override(False), jax.default_matmul_precision("highest"):
        lowered = jax.jit(infer).lower(wide, x.astype(jnp.float32))
        return lowered.compile(compiler_options=options)(wide, x.astype(jnp.float32))


def _calibration_images(run: Run) -> list[jax.Array]:
    """Random inputs with which the quantised network finds its scales."""
    shape = (min(run.shape[0], _CALIBRATION_BATCH), *run.shape[1:])
    network = NETWORKS[run.name]
    return [programs.random_examples(network, shape, run.input.dtype, run.seed + 1).x]


def measure(
    run: Run, *, steps: int = 20, rounds: int = 3, progress: Callable[[str], None] = lambda _: None
) -> Result:
    """Compiles, checks and times a network on JAX's default device.

    Args:
        run: what to measure.
        steps: steps in a row before the results are awaited.
        rounds: how often each library runs so many, in turns.
        progress: called with a word on what is going on.

    Returns:
        The result; failures are recorded in it, not raised.
    """
    network, train = NETWORKS[run.name], run.mode == "train"
    result = Result(run, kernel_platform(), steps)
    state = programs.initial_state(network, run.input, run.seed)
    if not train:
        state = state._replace(velocity=[])
    if not train and run.winograd:
        state = winograd_network.stored(state, run.input.dtype)
    examples = programs.random_examples(network, run.shape, run.input.dtype, run.seed)

    def shapes(state: Any) -> tuple:
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype),
            (state, examples if train else examples.x),
        )

    running: dict[str, _Program] = {}
    first: dict[str, Any] = {}
    # XLA keeps the results of its autotuner within a process. So the second library has an
    # advantage where both leave an operation to XLA; lax gets this advantage.
    for library in reversed(run.libraries):
        try:
            held = state
            if library == INT8:
                progress(f"{library}, calibrating")
                held = network.quantized.parameters(state, _calibration_images(run))
            if library == PREPARED:
                progress(f"{library}, transforming filters")
                held = winograd_network.prepare(network, state, run.input, run.winograd)
            progress(f"{library}, compiling")
            compiled, result.sides[library] = _compile(library, run, shapes(held))
            program = _Program(compiled, jax.device_put(held), examples, train)
            # The first step starts without velocity, so that afterwards the velocity is the
            # gradient.
            output = program(1)
            first[library] = output, jax.tree.map(jnp.copy, program.state.velocity if train else [])
            running[library] = program
        except Exception as error:  # shown in the row, whatever a library or device raises
            result.sides.setdefault(library, Side()).failure = first_line(error)
    if len(running) < len(run.libraries):
        return result
    if not train and run.winograd:
        progress("reference in float32")
        exact = _reference(run, running["lax"].state, examples.x)
        result.errors = {name: float(_difference(y, exact)) for name, (y, _) in first.items()}
        del exact
    for library in [name for name in _ON_REQUEST if name in running]:
        result.differences[library] = float(_difference(first.pop(library)[0], first["lax"][0]))
        result.kernels[library] = _kernels(run, library, shapes(running[library].state))
    outputs, gradients = zip(*(first.pop(library) for library in reversed(LIBRARIES)), strict=True)
    result.difference = float(_difference(*outputs))
    if train:
        result.gradient_difference = float(_difference(*gradients))
    del outputs, gradients
    result.kernels["jaxconv"] = _kernels(run, "jaxconv", shapes(state))
    _time(result, running, rounds, progress)
    return result


def _time(
    result: Result,
    running: dict[str, _Program],
    rounds: int,
    progress: Callable[[str], None],
) -> None:
    """Fills in the times of both programs."""
    times: dict[str, list[float]] = {library: [] for library in running}
    for program in running.values():
        program(2)
    for number in range(rounds):
        for library, program in running.items():
            progress(f"{library}, round {number + 1} of {rounds}")
            start = time.perf_counter()
            last = program(result.steps)
            times[library].append((time.perf_counter() - start) / result.steps)
            if not jnp.isfinite(last).all():
                result.sides[library].failure = "infinities or NaNs, on which times do not count"
    for library, values in times.items():
        side = result.sides[library]
        side.least_s, side.median_s, side.most_s = map(float, np.percentile(values, (0, 50, 100)))
    if result.platform != "cuda":
        return
    result.traced_steps = min(result.steps, _TRACED_STEPS)
    for library, program in running.items():
        progress(f"{library}, tracing")
        events = trace.device_events(functools.partial(program, result.traced_steps))
        computing = trace.Classifier(program.compiled.as_text())
        total, side = trace.split(events, computing), result.sides[library]
        side.device = trace.Split(*(seconds / result.traced_steps for seconds in total))
        side.kernels = trace.largest(events, computing)[:_KERNELS_KEPT]
