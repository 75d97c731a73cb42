"""Times networks of keras.applications on lax, on jaxconv and under jaxconv.fuse, in one run.

    pip install keras namex optree
    python tools/keras_networks.py --network MobileNetV3Large EfficientNetV2B0 --json keras.json

These networks were not written for this library. Each is compiled three times (lax, ``override``,
``override`` and ``fuse``). The programs run alternately on the same random parameters and images,
and results are compared: outputs in inference, the first step's losses in training, which is
gradient descent with the state donated. "device ms" is the union of the kernels' intervals in a
profiler's trace (on a GPU), "step ms" the median of the host's clock over ``--rounds`` runs of
``--steps`` steps, "fused" the share of forward convolutions whose call computes more than a
convolution.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

os.environ["KERAS_BACKEND"] = "jax"  # Keras reads it when it is imported
sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import jax
import jax.numpy as jnp

import jaxconv
from jaxconv.bench import environment, options, trace
from jaxconv.bench.measure_network import DTYPES

SIDES = ("lax", "jaxconv", "fused")
MODES = ("train", "infer")
POLICIES = {"bf16": "mixed_bfloat16", "f16": "mixed_float16", "f32": "float32"}
CLASSES = 1000
RATE = 1e-3
TRACED = 4  # steps in a profiler's trace


class Usual(NamedTuple):
    """The usual number, extent and largest value of a network's images."""

    batch: int
    extent: int = 224
    largest: float = 1.0


NETWORKS = {
    "MobileNetV3Large": Usual(128, largest=255),
    "EfficientNetV2B0": Usual(128, largest=255),
    "ResNet50V2": Usual(128),
    "DenseNet121": Usual(64),
    "InceptionV3": Usual(64, 299),
    "Xception": Usual(64, 299),
    "ConvNeXtTiny": Usual(64, largest=255),
    "VGG16": Usual(64),
    "NASNetMobile": Usual(64),
}


class State(NamedTuple):
    """The variables that training replaces: those with a gradient, and the others."""

    trainable: list[jax.Array]
    others: list[jax.Array]


@dataclasses.dataclass
class Row:
    """One side of one network and mode. Times are milliseconds of a step."""

    network: str
    mode: str
    side: str
    batch: int
    dtype: str
    compile_s: float | None = None
    step_ms: float | None = None
    device_ms: float | None = None
    fused: str = ""  # fused forward convolutions, as "12/52"
    difference: float | None = None  # relative difference from lax's results
    failure: str = ""
    ratio: float | None = None  # lax's time over this one's; on a GPU of the device's times


def network(name: str, extent: int, classes: int = CLASSES) -> tuple[Any, State]:
    """A network of keras.applications with random parameters."""
    import keras

    keras.utils.set_random_seed(0)
    model = getattr(keras.applications, name)(
        weights=None,
        input_shape=(extent, extent, 3),
        classes=classes,
        classifier_activation=None,
    )
    return model, state_of(model)


def state_of(model: Any) -> State:
    """A model's variables."""
    return State(
        [v.value for v in model.trainable_variables],
        [v.value for v in model.non_trainable_variables],
    )


def steps_of(model: Any) -> dict[str, Callable[..., tuple[State, jax.Array]]]:
    """Functions (state, images, labels) -> (next state, loss or outputs), for both modes."""

    def loss(trainable, others, x, labels):
        y, others = model.stateless_call(trainable, others, x, training=True)
        chances = jax.nn.log_softmax(y.astype(jnp.float32))
        return -jnp.take_along_axis(chances, labels[:, None], 1).mean(), others

    def train(state, x, labels):
        gradient = jax.value_and_grad(loss, has_aux=True)
        (value, others), slopes = gradient(state.trainable, state.others, x, labels)
        moved = [v - RATE * g for v, g in zip(state.trainable, slopes, strict=True)]
        return State(moved, others), value

    def infer(state, x, labels):
        y, _ = model.stateless_call(state.trainable, state.others, x, training=False)
        return state, y.astype(jnp.float32)

    return {"train": train, "infer": infer}


def made(side: str, step: Callable) -> Callable:
    """The function that a side compiles."""
    return jaxconv.fuse(step) if side == "fused" else step


def compiled(
    side: str,
    step: Callable,
    arguments: tuple,
    clock: Callable[[], float] = time.perf_counter,
    **options: Any,
) -> tuple[Any, float]:
    """One side's program, and the seconds in which it was traced, lowered and compiled.

    Args:
        options: of ``jax.jit``.
    """
    jax.clear_caches()
    start = clock()
    with jaxconv.override(side != "lax"):
        program = jax.jit(made(side, step), **options).lower(*arguments).compile()
    return program, clock() - start


def explained(side: str, step: Callable, arguments: tuple) -> Any:
    """What ``explain`` says of one side."""
    with jaxconv.override(side != "lax"):
        return jaxconv.explain(made(side, step), *arguments)


def failure(error: Exception) -> str:
    """An exception in some words."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:90]}"


def fused_share(step: Callable, side: str, arguments: tuple) -> str:
    """How many of the forward convolutions have an epilogue in their call, as text."""
    if side == "lax":
        return ""
    found = [c for c in explained(side, step, arguments) if c.op == "fprop"]
    return f"{sum(c.count for c in found if c.epilogue)}/{sum(c.count for c in found)}"


@dataclasses.dataclass
class Program:
    """A compiled step, its current state, and its other operands."""

    compiled: Any
    state: State
    rest: tuple

    def __call__(self, count: int) -> jax.Array:
        """Runs ``count`` steps, waits, and returns the last result."""
        for _ in range(count):
            self.state, result = self.compiled(self.state, *self.rest)
        return jax.block_until_ready((self.state, result))[1]


def relative(a: jax.Array, b: jax.Array) -> float:
    """||a - b|| / ||b||."""
    return float(jnp.linalg.norm((a - b).ravel()) / jnp.linalg.norm(b.ravel()))


def measured(name: str, mode: str, step: Callable, state: State, rest: tuple, chosen) -> list[Row]:
    """Measures all sides of one network and mode; failures are recorded in the rows."""
    batch = len(rest[0])
    rows = {side: Row(name, mode, side, batch, chosen.dtype) for side in chosen.sides}
    programs: dict[str, Program] = {}
    first: dict[str, jax.Array] = {}
    # XLA keeps its autotuning results in the process, so the last side gets them for free.
    for side in reversed(chosen.sides):
        row = rows[side]
        try:
            program, row.compile_s = compiled(side, step, (state, *rest), donate_argnums=0)
            row.fused = fused_share(step, side, (state, *rest))
            programs[side] = Program(program, jax.tree.map(jnp.copy, state), rest)
            first[side] = programs[side](1)
        except Exception as error:  # the row shows any error of a library
            row.failure = failure(error)
    for side in [s for s in programs if "lax" in first]:
        rows[side].difference = relative(first[side], first["lax"])
    times: dict[str, list[float]] = {side: [] for side in programs}
    for program in programs.values():
        program(2)
    for _ in range(chosen.rounds):
        for side, program in programs.items():
            start = time.perf_counter()
            program(chosen.steps)
            times[side].append((time.perf_counter() - start) / chosen.steps * 1e3)
    for side, program in programs.items():
        row = rows[side]
        row.step_ms = statistics.median(times[side])
        if environment.kernel_platform() == "cuda":
            events = trace.device_events(functools.partial(program, TRACED))
            row.device_ms = trace.union_seconds(events) / TRACED * 1e3
    theirs = rows.get("lax", Row(name, mode, "lax", batch, chosen.dtype))
    for row in rows.values():
        for field in ("device_ms", "step_ms"):
            ours, of_lax = getattr(row, field), getattr(theirs, field)
            if row.ratio is None and ours and of_lax:
                row.ratio = of_lax / ours
    return list(rows.values())


def line(row: Row) -> str:
    """A row of the table as text."""

    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    cells = [
        f"{row.network:17s} {row.mode:5s} {row.side:7s}",
        f"{number(row.device_ms, '.2f'):>9s} {number(row.step_ms, '.2f'):>9s}",
        f"{number(row.ratio, '.2f'):>6s} {number(row.compile_s, '.1f'):>9s} {row.fused:>8s}",
        f"{number(row.difference, '.1e'):>10s}  {row.failure}",
    ]
    return " ".join(cells).rstrip()


HEADER = (
    f"{'network':17s} {'mode':5s} {'side':7s} {'device ms':>9s} {'step ms':>9s} {'ratio':>6s} "
    f"{'compile s':>9s} {'fused':>8s} {'difference':>10s}"
)


def report(
    facts: dict[str, Any],
    header: str,
    line: Callable[[Any], str],
    groups: Iterable[Sequence[Any]],
    path: str | None,
    command: Sequence[str],
) -> list[Any]:
    """Prints rows group by group, and writes all so far to ``path``; returns them."""
    print("\n".join(f"{name}: {value}" for name, value in facts.items()) + "\n\n" + header)
    rows: list[Any] = []
    for group in groups:
        print("\n".join(map(line, group)), flush=True)
        rows += group
        if path:
            content = {"environment": facts, "rows": [dataclasses.asdict(r) for r in rows]}
            options.write_json(path, content | {"command": list(command)})
    return rows


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    names = ", ".join(NETWORKS)
    add("--network", nargs="+", choices=NETWORKS, metavar="NAME", help=f"of {names} (default: all)")
    add("--mode", nargs="+", choices=MODES, default=MODES)
    add("--sides", nargs="+", choices=SIDES, default=SIDES)
    add("--batch", type=options.count, help="examples (default: 64 or 128)")
    add("--size", type=options.count, help="extent of the images (default: usual)")
    add("--dtype", choices=POLICIES, default="bf16", help="Keras's policy (default: bf16)")
    add("--steps", type=options.count, default=10)
    add("--rounds", type=options.count, default=3)
    add("--json", metavar="FILE", help="write all results")
    return parser


def main(argv: Sequence[str]) -> int:
    """Prints a table with a row for each network, mode and side; returns 1 if one fails."""
    chosen = _parser().parse_args(argv)
    try:
        import keras
    except ImportError as error:
        print(f"{error}; the networks need: pip install keras namex optree")
        return 1
    keras.mixed_precision.set_dtype_policy(POLICIES[chosen.dtype])
    facts = environment.describe() | {"keras": keras.__version__}
    rows = report(facts, HEADER, line, measured_all(chosen), chosen.json, argv)
    return int(any(row.failure for row in rows))


def measured_all(chosen) -> Iterator[list[Row]]:
    """The rows of every network and mode that the command line asks for."""
    for name in chosen.network or NETWORKS:
        usual = NETWORKS[name]
        batch, extent = chosen.batch or usual.batch, chosen.size or usual.extent
        model, state = network(name, extent)
        images, labels = jax.random.split(jax.random.key(0))
        x = jax.random.uniform(images, (batch, extent, extent, 3), maxval=usual.largest)
        x = x.astype(DTYPES[chosen.dtype])
        rest = x, jax.random.randint(labels, (batch,), 0, CLASSES)
        for mode, step in steps_of(model).items():
            if mode in chosen.mode:
                yield measured(name, mode, step, state, rest, chosen)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
