"""``python -m jaxconv.bench``: this library's kernels beside ``lax.conv`` on this machine."""

from __future__ import annotations

import argparse
import fnmatch
import functools
import importlib.util
import json
import os
import pathlib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxconv._src.spec import Op
from jaxconv.bench import environment, layers, peer, regret, report
from jaxconv.bench.measure import DTYPES, Problem, Row, measure

_CPU_BATCH = 4
_INTERRUPTED = 130  # as a shell reports a program that Ctrl-C ended

_EPILOG = f"""
A layer of your own: --layer {layers.FORM}; for example
--layer 64,56,56,128,128,3,3,2,1,32 is 3x3 of stride 2 with 32 groups. stride, pad and dilation hold
for every axis, pad on both sides.

Every row is checked first, against float32 HIGHEST (integers: exactly). Then each library runs one
program of several independent convolutions with random inputs of their own, in turns. Times are
medians for one convolution; "lax/ours" above 1 means that jaxconv takes less time. GB/s counts
every tensor once. "compile s" is a program of one convolution: trace, lower and compile, jaxconv /
lax; "temp MB" is its memory beside operands and result, jaxconv / lax, and / im2col with --peer
im2col: the textbook's matrix of windows and XLA's matrix product. Exit status: 1 where a result is
wrong, a kernel fails, or nothing could be measured.

--regret times every kernel that takes a problem instead, and shows how much longer the selected one
takes than the best; --algorithm FAMILY compares within one family.
"""


def _layer(text: str) -> tuple[str, layers.Layer]:
    try:
        return text.replace(" ", ""), layers.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected seconds, got {text!r}")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxconv.bench",
        description="Measures jaxconv's kernels beside lax.conv on JAX's default device.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--set", nargs="+", choices=layers.SETS, metavar="SET", help="layer sets (default: all)")
    add("--name", nargs="+", metavar="PATTERN", help="only layers whose name contains a pattern")
    add("--layer", type=_layer, action="append", default=[], help="a layer, see below; repeatable")
    add("--batch", type=_count, help=f"largest batch (default on a CPU: {_CPU_BATCH})")
    ops = [op.value for op in Op]
    add("--op", nargs="+", choices=ops, help="operations (default: all three)")
    add("--dtype", nargs="+", choices=DTYPES, help="operands (default: f32 on a CPU, else bf16)")
    add("--precision", choices=["default", "high", "highest"], help="for f32, of both libraries")
    add("--algorithm", default="auto", help="jaxconv's algorithm: a family or an instance")
    add("--reps", type=_count, default=10, help="least runs of each program (default: 10)")
    add("--seconds", type=_seconds, help="time to spend on each program (default: 0.4, GPU 0.1)")
    add("--seed", type=int, default=0, help="of the random inputs")
    add("--peer", nargs="+", choices=["torch", "im2col"], default=[], help="further columns")
    add("--regret", action="store_true", help="the selected kernel beside all others, see below")
    add("--random", type=_count, default=0, help="so many random dense layers too, from --seed")
    add("--json", metavar="FILE", help="write all results")
    add("--plot", metavar="FILE.png", help="draw the ratios (needs matplotlib)")
    add("--list", action="store_true", help="print the layers and sets, measure nothing")
    return parser


def _list_layers() -> None:
    width = max(map(len, layers.LAYERS))
    for name, layer in layers.LAYERS.items():
        print(f"{name:{width}}  {layer}")
    print()
    for name, layer_set in layers.SETS.items():
        print(f"--set {name:10} {layer_set.about}: {' '.join(layer_set.names)}")


def _problems(arguments: argparse.Namespace, platform: str) -> list[Problem]:
    """Every row to measure, each once, layer by layer."""
    selections = [layers.SETS[name] for name in arguments.set or ()]
    if not selections and not arguments.layer and not arguments.random:
        selections = [layers.SETS["all"]]
    named = [((name, layers.LAYERS[name]), s) for s in selections for name in s.names]
    named += [(entry, None) for entry in arguments.layer]
    drawn = regret.random_layers(arguments.random, arguments.seed)
    named += [(entry, None) for entry in drawn.items()]
    batch = arguments.batch or (_CPU_BATCH if platform == "cpu" else None)
    problems: dict[Problem, None] = {}
    for (name, layer), chosen in named:
        if arguments.name and not any(fnmatch.fnmatch(name, f"*{p}*") for p in arguments.name):
            continue
        # A layer given in numbers keeps its batch unless one is asked for.
        limit = batch if chosen else arguments.batch
        if limit:
            layer = layer.with_batch_at_most(limit)
        usual = (chosen and chosen.dtype) or ("f32" if platform == "cpu" else "bf16")
        precision = arguments.precision or (chosen and chosen.precision) or "default"
        for dtype in arguments.dtype or [usual]:
            for op in Op:
                # Integers have no gradients.
                if (dtype == "int8" and op is not Op.FPROP) or (
                    arguments.op and op.value not in arguments.op
                ):
                    continue
                level = precision if dtype == "f32" else "default"
                problem = Problem(name, layer, op, dtype, level, arguments.algorithm)
                problems[problem] = None
    return list(problems)


def _each(
    problems: list[Problem],
    one: Callable[[Problem], Any],
    line_of: Callable[[Any], str],
    header: Iterable[str] = (),
) -> list:
    """Measures every problem and prints its line; stops early on Ctrl-C."""
    progress, found = report.Progress(len(problems)), []
    try:
        for line in header:
            progress.write(line)
        for problem in problems:
            progress.start(f"{problem.name} {problem.op.value} {problem.dtype_label}")
            found.append(one(problem))
            progress.write(line_of(found[-1]))
            progress.advance()
    except KeyboardInterrupt:
        progress.write("interrupted; what was measured so far:")
    finally:
        progress.close()
    return found


def _run(problems: list[Problem], arguments: argparse.Namespace, platform: str) -> list[Row]:
    """Both libraries, and the peers asked for, on every problem."""
    peers = {}
    if "torch" in arguments.peer:
        peers["torch"] = functools.partial(peer.program, platform=platform)
    seconds = arguments.seconds
    if seconds is None:
        seconds = 0.4 if platform == "cpu" else 0.1
    table = report.Table(problems, platform, arguments.peer)
    one = functools.partial(
        measure,
        repetitions=arguments.reps,
        seconds=seconds,
        seed=arguments.seed,
        im2col="im2col" in arguments.peer,
        peers=peers,
    )
    return _each(problems, one, table.row, table.header())


def _run_regret(problems: list[Problem], arguments: argparse.Namespace) -> list[regret.Regret]:
    """Every kernel that takes a problem; problems that none takes are left out."""
    one = functools.partial(
        regret.measure_regret,
        repetitions=arguments.reps,
        seed=arguments.seed,
        threads=environment.threads(),
    )
    found = _each(problems, one, regret.line)
    return [result for result in found if result.seconds]


def _write_json(path: str, facts: dict[str, str], rows: Sequence[Row | regret.Regret], **more):
    content = {"environment": facts, "rows": [row.as_json() for row in rows], **more}
    pathlib.Path(path).write_text(json.dumps(content, indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark.

    Args:
        argv: the command line, without the program's name; ``sys.argv`` by default.

    Returns:
        The exit status: 0, or 1 where a result is wrong, a kernel failed or nothing was measured,
        or 130 where Ctrl-C ended it early.
    """
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.regret and (arguments.peer or arguments.plot):
        parser.error("--regret: compares kernels of this library; it takes no --peer and no --plot")
    if arguments.list:
        _list_layers()
        return 0
    if arguments.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot: matplotlib is not installed (`pip install matplotlib`)")
    for option in ("json", "plot"):
        path = getattr(arguments, option)
        if path and not pathlib.Path(path).resolve().parent.is_dir():
            parser.error(f"--{option}: {path}: the folder does not exist")
    if "torch" in arguments.peer:
        # JAX would reserve most of the GPU's memory before PyTorch gets any.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    platform = environment.kernel_platform()
    if "torch" in arguments.peer and (reason := peer.missing(platform)):
        parser.error(f"--peer torch: {reason}")
    problems = _problems(arguments, platform)
    if not problems:
        parser.error("no layer, operation and dtype fit these options (int8 has fprop only)")

    facts = environment.describe()
    if "torch" in arguments.peer:
        facts["torch"] = peer.about()
    print("\n".join(f"{name}: {value}" for name, value in facts.items()), end="\n\n")
    if arguments.regret:
        regrets = _run_regret(problems, arguments)
        if arguments.json:
            _write_json(arguments.json, facts, regrets)
        print("\n" + regret.summary(regrets))
        return 0 if regrets else 1
    rows = _run(problems, arguments, platform)
    lines = report.summary(rows, arguments.peer)
    if arguments.json:
        ratios = [ratio for row in rows if (ratio := row.ratio()) is not None]
        mean = report.geometric_mean(ratios) or None
        _write_json(arguments.json, facts, rows, command=sys.argv[1:], geometric_mean=mean)
        lines.insert(-1, f"results: {arguments.json}")
    if arguments.plot and rows:
        report.plot(rows, arguments.plot, facts)
        lines.insert(-1, f"plot: {arguments.plot}")
    print("\n" + "\n".join(lines))
    if len(rows) < len(problems):
        return _INTERRUPTED
    measured = any(row.sides["jaxconv"].median_s for row in rows)
    return 0 if measured and not any(row.wrong for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
