"""Writes ``tests/cc/bench_problems.tsv``: every problem that the benches give to CUDA kernels.

    python tools/bench_problems.py && build/choices/choices_test --write

needs no GPU and no CUDA: selection is compiled as a host program (``tests/cc/choices_test.cc``),
which replaces ``_jaxconv.cuda``. The problems, for an H200, are

- the layers of the sets (``jaxconv/bench/layers.py``) and of the networks
  (``jaxconv/bench/networks``): every operation in float16, bfloat16 and float32, and fprop in 8
  bits, in both layouts, with its epilogue;
- the layers of the set "winograd" by every tile, with the filter prepared or not;
- the convolutions of the networks' training steps and inference, as ``override`` and ``fuse`` make
  them, with epilogues and statistics, with Winograd where it is faster, and the convolutions of the
  quantised network.

``tests/cc/choices_test.cc`` describes the lines. ``--check`` compares instead.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests" / "support"))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "bench"))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import cc_programs
import jax
import jax.numpy as jnp
import kernel_tables
import numpy as np
import winograd_variants
from selection_program import SelectionProgram

import jaxconv
from jaxconv._src.fuse import fuse_convolution
from jaxconv._src.library import native
from jaxconv._src.problem.spec import Op, problem_key
from jaxconv._src.ways import winograd_jax
from jaxconv.bench import int8_layers, layers, measure_network, network_layers
from jaxconv.bench.measure_network import FUSED, INT8, WINOGRAD
from jaxconv.bench.networks import NETWORKS, programs
from jaxconv.bench.problem import Problem
from jaxconv.bench.program import libraries

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
TABLE = REPOSITORY / "tests" / "cc" / "bench_problems.tsv"
PROGRAM = REPOSITORY / "tests" / "cc" / "choices_test.cc"

# The pinned operands and precisions of a layer's operations, in the order of the table.
_PINNED = (("bf16", "default"), ("f32", "default"), ("f32", "highest"))
_OTHERS = (("f16", "default"),)

# The algorithm for each side of a network's program in ``python -m jaxconv.bench --network``.
_ALGORITHMS = {"jaxconv": "auto", FUSED: "auto", WINOGRAD: "auto+winograd"}

_KERNELS = frozenset(instance.name for instance in kernel_tables.all_instances())

# The calibration input of the 8-bit network. Its scales are in no problem key.
_CALIBRATION = (1, 64, 64, 3)


class Found(NamedTuple):
    """A problem of the benches, and the algorithm with which it is selected."""

    key: str
    algorithm: str
    source: str
    each: bool = False


def _plain(source: str, layer: layers.Layer, operands: Sequence, each: bool) -> Iterator[Found]:
    for dtype, precision in operands:
        for op in Op:
            problem = Problem("", layer, op, dtype, precision)
            dtypes = problem.operand_dtype, problem.out_dtype
            key = problem_key(op, layer.spec(precision), layer.sizes, *dtypes)
            yield Found(key, "auto", source, each)


def _convolutions(f: Callable, *arguments: Any) -> Iterator[jaxconv.Convolution]:
    """The convolutions of a program that have a problem key."""
    found = jaxconv.explain(f, *arguments, platform="cuda")
    yield from (convolution for convolution in found if convolution.problem)


def _of_library(problem: Problem) -> Iterator[jaxconv.Convolution]:
    """The convolutions of this library's program for a problem, which is traced but not run."""
    library = libraries(problem)["jaxconv"]
    shapes = [problem.layer.shape(role) for role in problem.op.roles[:2]]
    operands = [jax.ShapeDtypeStruct(shape, problem.operand_dtype) for shape in shapes]
    if problem.requantized:
        operands += [jax.ShapeDtypeStruct((problem.layer.k,), np.float32)] * 2
    return _convolutions(library.compute, *jax.eval_shape(library.prepare, *operands))


def _of_int8(name: str, layer: layers.Layer) -> Iterator[Problem]:
    """A layer in 8 bits, in every layout that can hold it."""
    for dtype in layers.SETS["int8"].dtypes:
        if int8_layers.possible(dtype, Op.FPROP, layer):
            yield Problem(name, layer, Op.FPROP, dtype)


def _selected(problem: Problem, each: bool = False) -> Iterator[Found]:
    """The convolutions of this library's program; of a variant, those that a kernel computes."""
    for convolution in _of_library(problem):
        key, instance = convolution.problem, convolution.instance
        if not problem.variant:
            yield Found(key, "auto", problem.name, each)
        elif instance in _KERNELS:  # and not an implementation in JAX
            named = problem.requantized  # with algorithms that name an instance
            yield Found(key, instance if named else problem.algorithm, problem.name)


def of_sets() -> Iterator[Found]:
    """The layers of the sets; each layer's usual batch has lines of its own for every GPU."""
    for layer_set in layers.SETS.values():
        for name, layer in layer_set.layers():
            usual = layer == layers.LAYERS[name]
            yield from _plain(name, layer, _PINNED, usual)
            yield from _plain(name, layer, _OTHERS, False)
    eight_bits = layers.SETS["int8"]
    for name, layer in eight_bits.layers():
        for found in _of_int8(name, layer):
            yield from _selected(found, each=True)
            for variant in winograd_variants.of(found, "cuda"):
                if variant.variant:
                    yield from _selected(variant)
    for layer_set in layers.SETS.values():
        for name, layer in layer_set.layers():
            for found in _of_int8(name, layer):
                yield from _selected(found)
    yield from _by_tiles()


def _by_tiles() -> Iterator[Found]:
    """The layers of the set "winograd" by each tile; in fprop also with prepared filters."""
    chosen = layers.SETS["winograd"]
    for name, layer in chosen.layers():
        for dtype in chosen.dtypes:
            for algorithm in winograd_jax.ALGORITHMS:
                for prepared in (False, True):
                    problem = Problem(
                        name, layer, Op.FPROP, dtype, "default", algorithm, True, prepared
                    )
                    with contextlib.suppress(ValueError):  # this tile has no prepared filter
                        yield from _selected(problem)


def of_network(name: str) -> Iterator[Found]:
    """A network's layers, and the convolutions of its programs, with its usual batch."""
    network = NETWORKS[name]
    for layer in network_layers.layers_of(name).layers.values():
        yield from _plain(name, layer, (*_PINNED, *_OTHERS), False)
        for problem in _of_int8(name, layer):
            yield from _selected(problem)
    for dtype in measure_network.DTYPES:
        for mode in measure_network.MODES:
            shape = programs.input_shape(network)
            run = measure_network.Run(name, mode, shape, dtype, fused=True, winograd="winograd")
            arguments = _arguments(run)
            for side, algorithm in _ALGORITHMS.items():
                with jaxconv.override(algorithm=algorithm):
                    step = measure_network.function(run, side)
                    for convolution in _convolutions(step, *arguments):
                        by_winograd = "_winograd_" in (convolution.instance or "")
                        asked = "winograd" if by_winograd else "auto"
                        yield Found(convolution.problem, asked, f"{name} {mode}")
    if network.quantized:
        run = measure_network.Run(name, "infer", programs.input_shape(network), "bf16")
        images = jnp.ones(_CALIBRATION)
        state = programs.initial_state(network, images)
        parameters = network.quantized.parameters(state, [images])
        for convolution in _convolutions(
            measure_network.function(run, INT8), parameters, run.input
        ):
            yield Found(convolution.problem, "auto", f"{name} int8")


def _arguments(run: measure_network.Run) -> tuple:
    """The shapes of a step's arguments."""
    network, train = NETWORKS[run.name], run.mode == "train"
    signature = programs.signature(network, run.input)
    parameters = [jax.ShapeDtypeStruct(p.shape, jnp.float32) for p in signature.parameters]
    velocity = parameters if train else []
    state = programs.State(parameters, signature.statistics, velocity)
    examples = jax.eval_shape(lambda: programs.random_examples(network, run.shape, run.input.dtype))
    return state, examples if train else examples.x


def lines(problems: Iterator[Found]) -> list[str]:
    """The table's lines; problems that differ only in operation and operands share one."""
    known: set[tuple[str, str]] = set()
    groups: dict[tuple, dict[str, list[str]]] = {}
    for found in problems:
        if (found.key, found.algorithm) in known:
            continue
        known.add((found.key, found.algorithm))
        op, dtypes, precision, rest = found.key.split(" ", 3)
        place = "each" if found.each else "first", found.source, found.algorithm, rest
        groups.setdefault(place, {}).setdefault(op, []).append(f"{dtypes} {precision}")
    made = []
    for (each, source, algorithm, rest), by_op in groups.items():
        alike: dict[str, list[str]] = {}
        for op, operands in by_op.items():
            alike.setdefault(",".join(operands), []).append(op)
        for operands, ops in alike.items():
            made.append("\t".join([each, source, algorithm, ",".join(ops), operands, rest]))
    return made


def built() -> pathlib.Path:
    """Compiles the selection program, which takes half a minute; returns its path."""
    program = REPOSITORY / "build" / "choices" / PROGRAM.stem
    program.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as objects:
        return cc_programs.built(PROGRAM, pathlib.Path(objects), program)


def main(argv: Sequence[str]) -> int:
    """Writes or compares the table; returns the exit status."""
    parser = argparse.ArgumentParser(prog="bench_problems.py", description=__doc__)
    parser.add_argument("--program", type=pathlib.Path, help="choices_test, if it is compiled")
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument(
        "--networks", type=int, default=len(NETWORKS), help="with --check: only so many"
    )
    arguments = parser.parse_args(argv)
    if arguments.networks != len(NETWORKS) and not arguments.check:
        parser.error("--networks: the table has all of them")
    jax.config.update("jax_platforms", "cpu")
    os.environ |= {"JAXCONV_TARGET": "h200", "JAXCONV_ALGORITHM": "auto"}
    # Makes ``fuse`` rewrite for CUDA, although the process has no GPU.
    fuse_convolution.platforms = lambda: ("cuda",)
    sys.modules["_jaxconv.cuda"] = SelectionProgram(
        arguments.program or built(), lambda: native.load("cpu").arrays
    )
    kernels = native.load("cuda")
    if isinstance(kernels, native.Refusal):
        parser.error(kernels.reason)

    def problems() -> Iterator[Found]:
        yield from of_sets()
        for name in list(NETWORKS)[: arguments.networks]:
            yield from of_network(name)

    made = lines(problems())
    if not arguments.check:
        TABLE.write_text("\n".join(made) + "\n")
        print(f"{len(made)} lines: {TABLE}")
        return 0
    compared = TABLE.read_text().splitlines()
    if arguments.networks < len(NETWORKS):
        compared = compared[: len(made)]
    for line in sorted(set(made) ^ set(compared)):
        print(f"{'only the benches have' if line in made else 'only the table has'}: {line}")
    return int(made != compared)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
