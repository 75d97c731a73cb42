"""``python -m jaxconv.bench``: single convolutions, this library's kernels beside ``lax.conv``."""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import functools
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

from jaxconv._src.functions.arguments import algorithms
from jaxconv._src.problem.spec import Op
from jaxconv.bench import (
    compiled,
    environment,
    int8_layers,
    layers,
    network_layers,
    options,
    report,
)
from jaxconv.bench.additions import NOTHING, Additions, Peer
from jaxconv.bench.measure import copies_of, measure
from jaxconv.bench.networks import NETWORKS
from jaxconv.bench.problem import DTYPES, Problem, Row
from jaxconv.bench.program import selection
from jaxconv.bench.progress import INTERRUPTED, Progress, each

_CPU_BATCH = 4

_EXAMPLES = """
examples:
  python -m jaxconv.bench --set resnet50 --op fprop --dtype bf16
  python -m jaxconv.bench --layer 64,56,56,128,128,3,3,2,1,32
  python -m jaxconv.bench --layers-of unet --device-time --json unet.json
  python -m jaxconv.bench --network resnet50 --fuse
"""

_DETAILS = f"""
A layer of your own: --layer {layers.FORM}; for example
--layer 64,56,56,128,128,3,3,2,1,32 is 3x3 of stride 2 with 32 groups. stride, pad and dilation hold
for every axis, pad on both sides.

int8 is lax's: int32 results. int8_nhwc and int8_nchw32 are layers of a quantised network in one
layout or the other: int8 results, with a scale and a bias for each channel, ReLU and rounding in
the convolution, the operands packed before; beside them lax's int32 convolution, where it has one,
and the same in XLA.

Every row is checked first, against float32 HIGHEST (integers: exactly). Then each library runs one
program of several independent convolutions with random inputs of their own, in turns. Times are
medians for one convolution; "lax/ours" above 1 means that jaxconv takes less time. GB/s counts
every tensor once. "compile s" is a program of one convolution: trace, lower and compile, jaxconv /
lax; "temp MB" is its memory beside operands and result, jaxconv / lax, and / im2col with --peer
im2col: the textbook's matrix of windows and XLA's matrix product. Exit status: 1 where a result is
wrong, a kernel fails, or nothing could be measured.

--layers-of takes every distinct convolution of built-in networks, in their usual batches.

--algorithm auto takes XLA's own convolution where it is predicted to be faster than every kernel;
native takes it only where no kernel accepts the problem. Both sides of such a row are the same
program; --only-kernels leaves it out.

--device-time takes times from a profiler's trace of a GPU: for how long kernels run, without the
host's time and the gaps between kernels. The operands of a program are several times as large as
the L2 cache. Each program is traced --reps times (default: 3). A row whose trace lacks the selected
kernel is wrong.

With --algorithm native the summary says what auto would leave to XLA of these rows, and --json has
it row by row: one run shows both what native and what auto is worth.

--compile-jobs N compiles the rows ahead in N threads, what peers need in one more, and then times
them in order, with nothing beside: several times faster on a GPU, where XLA tries kernels as
it compiles. It tries them beside the other threads then, so that its picks can be worse. "compile
s" is left out.

--json writes the file after every row; --resume takes the rows that it has already, and measures
the others: for runs with a time limit, as `timeout -s INT 600 python -m jaxconv.bench ...`. Rows
that were wrong are measured again.
"""


def _layer(text: str) -> tuple[str, layers.Layer]:
    try:
        return text.replace(" ", ""), layers.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def make_parser(additions: Additions = NOTHING) -> options.Parser:
    """The options of layers, and those that are added."""
    parser = options.Parser(
        "Measures jaxconv's kernels beside lax.conv on JAX's default device: single\n"
        "layers; whole networks with --network (see --network --help).",
        _EXAMPLES,
        _DETAILS + additions.details,
        additions.program,
    )
    add = parser.section("layers (default: all)")
    add("--set", nargs="+", choices=layers.SETS, metavar="SET", help="layer sets, see --list")
    add("--layers-of", nargs="+", choices=NETWORKS, metavar="NET", help="a network's layers")
    add("--layer", type=_layer, action="append", default=[], help="a layer in numbers; repeatable")
    add("--name", nargs="+", metavar="GLOB", help="only layers whose name matches")
    add("--random", type=options.count, default=0, rare=True, help="random dense layers to add")
    add("--list", action="store_true", help="print layers, sets and networks, measure nothing")
    add("--batch", type=options.count, help=f"largest batch (default on a CPU: {_CPU_BATCH})")
    ops = [op.value for op in Op]
    add("--op", nargs="+", choices=ops, metavar="OP", help=f"{', '.join(ops)} (default: all)")
    add(
        "--dtype",
        nargs="+",
        choices=DTYPES,
        metavar="DTYPE",
        help=f"{', '.join(DTYPES)} (default: f32 on a CPU, else bf16)",
    )
    levels = ["default", "high", "highest"]
    add(
        "--precision",
        nargs="+",
        choices=levels,
        metavar="LEVEL",
        rare=True,
        help=f"of f32, in both libraries: {', '.join(levels)}",
    )
    add = parser.section("kernels")
    add("--algorithm", default="auto", metavar="NAME", help="auto, native, a family or an instance")
    peers = [*(peer.name for peer in additions.peers), "im2col"]
    add(
        "--peer",
        nargs="+",
        choices=peers,
        default=[],
        metavar="PEER",
        help=f"further columns: {', '.join(peers)}",
    )
    only = "no rows that are left to XLA, see below"
    add("--only-kernels", action="store_true", rare=True, help=only)
    additions.options(add)
    add = parser.section("measurement")
    add("--device-time", action="store_true", help="the device's own time, on GPUs")
    reps = "least runs of each program (default: 10)"
    add("--reps", type=options.count, rare=True, help=reps)
    seconds = "to spend on each program (default: 0.4, GPU 0.1)"
    add("--seconds", type=options.seconds, rare=True, help=seconds)
    jobs = "threads, see below"
    add("--compile-jobs", type=options.count, default=1, metavar="N", rare=True, help=jobs)
    add("--seed", type=int, default=0, rare=True, help="of the random inputs and layers")
    add = parser.section("results and help")
    options.add_outputs(add, "the ratios")
    resume = "take the rows that --json FILE has, see below"
    add("--resume", action="store_true", rare=True, help=resume)
    parser.add_help_to(add)
    return parser


def _list() -> None:
    width = max(map(len, layers.LAYERS))
    for name, layer in layers.LAYERS.items():
        print(f"{name:{width}}  {layer}")
    print()
    for name, layer_set in layers.SETS.items():
        print(f"--set {name:10} {layer_set.about}: {' '.join(layer_set.names)}")
    print()
    for name, network in NETWORKS.items():
        print(f"--network {name:16} {network.about}")


def problems_of(
    arguments: argparse.Namespace, platform: str, additions: Additions
) -> list[Problem]:
    """Every row to measure, each once, layer by layer."""
    selections = [layers.SETS[name] for name in arguments.set or ()]
    of_networks = arguments.layers_of or ()
    if not (selections or of_networks or arguments.layer or arguments.random):
        selections = [layers.SETS["all"]]
    named = [(entry, s) for s in selections for entry in s.layers()]
    named += [(entry, None) for entry in arguments.layer]
    drawn = layers.random_layers(arguments.random, arguments.seed)
    named += [(entry, None) for entry in drawn.items()]
    batch = arguments.batch or (_CPU_BATCH if platform == "cpu" else None)
    for network in of_networks:
        found = network_layers.layers_of(network, batch)
        named += [(entry, None) for entry in found.layers.items()]
        if found.left_out:
            print(f"{network}: {found.left_out} transposed or unequally padded layers left out")
    problems: dict[Problem, None] = {}
    for (name, layer), chosen in named:
        if arguments.name and not any(fnmatch.fnmatch(name, f"*{p}*") for p in arguments.name):
            continue
        # A layer given in numbers keeps its batch unless the options name one.
        limit = batch if chosen else arguments.batch
        if limit:
            layer = layer.with_batch_at_most(limit)
        usual = (chosen and chosen.dtypes) or ["f32" if platform == "cpu" else "bf16"]
        precisions = arguments.precision or [(chosen and chosen.precision) or "default"]
        for dtype in arguments.dtype or usual:
            for op in Op:
                ops = arguments.op or (chosen and chosen.ops)
                if (ops and op.value not in ops) or not int8_layers.possible(dtype, op, layer):
                    continue
                for level in precisions if dtype == "f32" else ["default"]:
                    problem = Problem(name, layer, op, dtype, level, arguments.algorithm)
                    varies = additions.variants and chosen and chosen.variants
                    if varies and arguments.algorithm == "auto":
                        problem = dataclasses.replace(problem, algorithm="native")
                        found = additions.variants(problem, platform, arguments)
                        problems |= dict.fromkeys(found)
                    elif not (arguments.only_kernels and _left_to_xla(problem, platform)):
                        problems[problem] = None
    return list(problems)


def _left_to_xla(problem: Problem, platform: str) -> bool:
    return not selection(problem, platform).instance


def label(problem: Problem) -> str:
    variant = f" {problem.algorithm}{' prepared' * problem.prepared}" if problem.variant else ""
    return f"{problem.name} {problem.op.value} {problem.dtype_label}{variant}"


def _run(
    problems: list[Problem],
    arguments: argparse.Namespace,
    platform: str,
    asked: Sequence[Peer],
    keep: Callable[[Row], None],
) -> list[Row]:
    """Both libraries, and the requested peers, on every problem; ``keep`` gets each row."""
    peers = {peer.name: functools.partial(peer.program, platform=platform) for peer in asked}
    seconds = arguments.seconds
    if seconds is None:
        seconds = 0.4 if platform == "cpu" else 0.1
    table = report.Table(problems, platform, arguments.peer)
    im2col = "im2col" in arguments.peer

    twins: dict[Problem, compiled.Ahead] = {}

    def start(pool: Executor, problem: Problem) -> compiled.Ahead:
        copies = copies_of(problem, platform, arguments.device_time)
        built = [] if problem.variant else [builder.submit(each.build, problem) for each in asked]
        either = dataclasses.replace(problem, dtype="int8") if problem.requantized else None
        ahead = compiled.Ahead(pool, problem, platform, copies, im2col, built, twins.get(either))
        if either:
            twins.clear()  # the layouts of a layer follow each other
            twins[either] = ahead
        return ahead

    def one(item: tuple[Problem, compiled.Ahead | None]) -> Row:
        row = measure(
            item[0],
            repetitions=arguments.reps,
            seconds=seconds,
            seed=arguments.seed,
            device_time=arguments.device_time,
            im2col=im2col,
            peers=peers,
            ahead=item[1],
        )
        keep(row)
        return row

    with (
        ThreadPoolExecutor(1) as builder,
        compiled.Pipeline(arguments.compile_jobs, start) as pipeline,
    ):
        return each(
            Progress(len(problems)),
            pipeline.rows(problems),
            lambda item: label(item[0]),
            one,
            table.row,
            table.header(),
        )


def _measured(arguments: argparse.Namespace, facts: dict[str, str], platform: str) -> list[Row]:
    """The rows that the file of --json already contains.

    Raises:
        ValueError: the file is not from the bench, or from another machine or build.
    """
    if not os.path.exists(arguments.json):
        return []
    with open(arguments.json) as file:
        try:
            found = json.load(file)
            before = found["environment"]
            rows = [Row.from_json(row, platform) for row in found["rows"]]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"holds no rows of this bench ({error!r})") from error
    names = sorted((facts.keys() | before.keys()) - {"date"})
    if other := [name for name in names if facts.get(name) != before.get(name)]:
        now = ", ".join(f"{name} {before.get(name)}, now {facts.get(name)}" for name in other)
        raise ValueError(f"was measured elsewhere: {now}")
    return [row for row in rows if not row.wrong]


def check(
    parser: argparse.ArgumentParser,
    arguments: argparse.Namespace,
    platform: str,
    asked: Sequence[Peer] = (),
) -> None:
    """Ends the program with an error if options contradict each other or lack something."""
    try:
        algorithms(arguments.algorithm)
    except ValueError as error:
        parser.error(f"--{error}")
    if arguments.device_time and arguments.seconds is not None:
        parser.error("--device-time: takes --reps traces; it takes no --seconds")
    if arguments.device_time and platform != "cuda":
        parser.error(f"--device-time: needs a GPU, and JAX's default backend is {platform}")
    options.check_outputs(parser, arguments)
    if arguments.resume and not arguments.json:
        parser.error("--resume: needs --json FILE")
    for peer in asked:
        if reason := peer.missing(platform):
            parser.error(f"--peer {peer.name}: {reason}")


def _write(path: str, content: dict[str, Any], rows: Sequence[Row]) -> None:
    ratios = [ratio for row in rows if (ratio := row.ratio()) is not None]
    content["rows"] = [row.as_json() for row in rows]
    content["geometric_mean"] = report.geometric_mean(ratios) or None
    options.write_json(path, content)


def main(argv: Sequence[str], additions: Additions = NOTHING) -> int:
    """Measures what the command line asks for; returns the exit status."""
    parser = make_parser(additions)
    arguments = parser.parse_args(argv)
    if arguments.list:
        _list()
        return 0
    asked = [peer for peer in additions.peers if peer.name in arguments.peer]
    if asked:  # JAX would reserve most of the GPU's memory before they get any
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    platform = environment.kernel_platform()
    check(parser, arguments, platform, asked)
    problems = problems_of(arguments, platform, additions)
    if not problems:
        parser.error("no layer, operation and dtype fit these options (int8 has fprop only)")

    facts = environment.describe()
    facts["clock"] = "the device's" if arguments.device_time else "the host's"
    for peer in asked:
        facts |= peer.about()
    print("\n".join(f"{name}: {value}" for name, value in facts.items()), end="\n\n")
    content = {"environment": facts, "command": list(argv)}
    rows: list[Row] = []
    if arguments.resume:
        try:
            rows = _measured(arguments, facts, platform)
        except ValueError as error:
            parser.error(f"--resume: {arguments.json}: {error}")
        done = {row.problem for row in rows}
        print(f"{len(rows)} rows are measured already", end="\n\n")
        problems = [problem for problem in problems if problem not in done]

    def keep(row: Row) -> None:
        rows.append(row)
        if arguments.json:
            _write(arguments.json, content, rows)

    interrupted = len(_run(problems, arguments, platform, asked, keep)) < len(problems)
    if tables := additions.tables(rows):
        print("\n".join(tables))
    lines = report.summary(rows, arguments.peer)
    if arguments.json:
        _write(arguments.json, content, rows)
        lines.insert(-1, f"results: {arguments.json}")
    if arguments.plot and rows:
        report.plot(rows, arguments.plot, facts)
        lines.insert(-1, f"plot: {arguments.plot}")
    print("\n" + "\n".join(lines))
    if interrupted:
        return INTERRUPTED
    measured = any(row.sides["jaxconv"].median_s for row in rows)
    return 0 if measured and not any(row.wrong for row in rows) else 1
