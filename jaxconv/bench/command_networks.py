"""``python -m jaxconv.bench --network``: whole networks, the same source on lax and on jaxconv."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence

import jax

from jaxconv._src.winograd.winograd_filter import LAYOUTS
from jaxconv.bench import environment, options, report_network
from jaxconv.bench.measure_network import DTYPES, MODES, Result, Run, measure, warm_up
from jaxconv.bench.networks import NETWORKS, programs
from jaxconv.bench.networks.blocks import PASSES
from jaxconv.bench.progress import INTERRUPTED, Progress, each

_CPU_BATCH = 4
_STEPS = {"cpu": 3, "cuda": 20}

# Those for which filters can be prepared.
_WINOGRAD = ("winograd", *(f"winograd_{tile}" for tile in LAYOUTS))

_EXAMPLES = """
examples:
  python -m jaxconv.bench --network resnet50 --fuse
  python -m jaxconv.bench --network unet --mode infer --winograd
  python -m jaxconv.bench --network mobilenet_v2 --dtype bf16 --json rows.json
"""

_DETAILS = """
A network is plain JAX on lax's convolutions; no line of it knows of jaxconv. Each step is compiled
twice, once under jaxconv.override(), and both programs are run in turns. Parameters are float32,
activations --dtype. A training step is a step of gradient descent with momentum; its state is
donated and fed back, and the results are awaited once, after --steps steps.

"step ms" is the median over --rounds such runs, with the least and the most. "conv ms" and "rest
ms" are the device's time in a step, from a profiler's trace: kernels of convolutions and matrix
products, and all others, copies of XLA's into other layouts among them. "compile s" is trace, lower
and compile with JAX's caches empty; jaxconv comes first, so that what XLA's autotuner keeps is in
lax's favour, and a network's training comes before its inference, which profits from it. "memory
GB" is the program's: arguments, results and temporaries. "kernels" counts the convolutions on
jaxconv's kernels. "difference" is that of the outputs, in training of the first step's losses. Exit
status: 1 where a program fails or the two libraries do not agree.

--fuse adds a line: the program that jaxconv.fuse makes of the same source, with the elementwise
operations behind convolutions in their calls. Its "difference" and its last column are beside lax.

--winograd adds a line: jaxconv with Winograd where it is predicted faster than the direct kernel,
whatever its error (algorithm "auto+winograd", or with one tile "auto+winograd_f4x4"). Inference has
a second line, "prepared": a filter is transformed beforehand where that makes its convolution
faster. The filters of all sides are then stored in --dtype. The summary has the ratio to the direct
kernels, and the errors of the outputs, ||y - r|| / ||r|| with r in float32 at precision HIGHEST.

--int8 adds a line to inference: the network quantised by jaxconv.int8, calibrated on other
random inputs. It takes the same float input and gives float32. Its "difference" is that of its
outputs from lax's, its last column lax's time over its own.
"""


def _parser() -> options.Parser:
    parser = options.Parser(
        "Measures networks on lax's convolutions and on jaxconv's.",
        _EXAMPLES,
        _DETAILS,
    )
    add = parser.section("networks")
    names = ", ".join(NETWORKS)
    add("--network", nargs="*", choices=NETWORKS, metavar="NAME", help=f"of {names} (default: all)")
    modes = f"{' or '.join(MODES)} (default: both)"
    add("--mode", nargs="+", choices=MODES, default=MODES, metavar="MODE", help=modes)
    add("--batch", type=options.count, help=f"examples (default: usual, on a CPU {_CPU_BATCH})")
    add("--size", type=options.count, help="extent of every spatial axis (default: usual)")
    dtypes = f"of activations: {', '.join(DTYPES)} (default: f32 on a CPU, else bf16)"
    add("--dtype", choices=DTYPES, metavar="DTYPE", help=dtypes)
    add = parser.section("programs")
    add("--fuse", action="store_true", help="the program that jaxconv.fuse makes of it too")
    add("--int8", action="store_true", help="inference of the quantised network too")
    add(
        "--winograd",
        nargs="?",
        const="winograd",
        default="",
        choices=_WINOGRAD,
        metavar="ALGORITHM",
        help=f"with Winograd too; of {', '.join(_WINOGRAD)}",
    )
    add(
        "--batch-norm",
        choices=PASSES,
        default="centred",
        metavar="FORM",
        help="(x - mean) * scale + offset (centred, the default), or x * scale + (offset - mean * "
        "scale) (product)",
    )
    algorithms = "of jaxconv.override: auto or native"
    add("--algorithm", choices=["auto", "native"], default="auto", metavar="NAME", help=algorithms)
    add = parser.section("measurement")
    add("--steps", type=options.count, rare=True, help="steps in a row (default: 20, on a CPU 3)")
    rounds = "runs of so many steps (default: 3)"
    add("--rounds", type=options.count, default=3, rare=True, help=rounds)
    add("--seed", type=int, default=0, rare=True, help="of parameters and examples")
    add("--verbose", action="store_true", help="list each program's ten largest kernels")
    add = parser.section("results and help")
    options.add_outputs(add, "both libraries' time of a step")
    parser.add_help_to(add)
    return parser


def _runs(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> list[Run]:
    """Everything to measure, network by network."""
    on_cpu = environment.kernel_platform() == "cpu"
    dtype = arguments.dtype or ("f32" if on_cpu else "bf16")
    runs = []
    quantized = [name for name, network in NETWORKS.items() if network.quantized]
    names = arguments.network or (quantized if arguments.int8 else NETWORKS)
    if arguments.int8 and ("infer" not in arguments.mode or set(names) - set(quantized)):
        parser.error(f"--int8: inference only, and of {', '.join(quantized)} only")
    if arguments.winograd and arguments.batch_norm != "centred":
        parser.error("--batch-norm: not beside --winograd, whose passes are its own")
    if arguments.int8 and arguments.winograd:
        parser.error("--winograd: not beside --int8, whose filters are stored in float32")
    for name in dict.fromkeys(names):
        network = NETWORKS[name]
        batch = arguments.batch or (min(_CPU_BATCH, network.batch) if on_cpu else network.batch)
        try:
            shape = programs.input_shape(network, batch, arguments.size)
        except ValueError as error:
            parser.error(f"--size: {name}: {error}")
        for mode in MODES:
            if mode in arguments.mode:
                int8 = arguments.int8 and mode == "infer"
                options = arguments.algorithm, arguments.seed, int8, arguments.fuse
                options += (arguments.winograd, arguments.batch_norm)
                runs.append(Run(name, mode, shape, dtype, *options))
    return runs


def main(argv: Sequence[str]) -> int:
    """Measures what the command line asks for; returns the exit status."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    options.check_outputs(parser, arguments)
    runs = _runs(parser, arguments)
    platform = environment.kernel_platform()
    steps = arguments.steps or _STEPS.get(platform, 20)

    facts = environment.describe()
    print("\n".join(f"{name}: {value}" for name, value in facts.items()), end="\n\n")
    table, progress = report_network.Table(runs), Progress(len(runs))
    warm_up()

    measured: list[Result] = []

    def save() -> None:
        if arguments.json:
            rows = [result.as_json() for result in measured]
            content = {"environment": facts, "command": list(argv), "rows": rows}
            options.write_json(arguments.json, content)

    def one(run: Run) -> Result:
        note = functools.partial(_note, progress, run)
        measured.append(measure(run, steps=steps, rounds=arguments.rounds, progress=note))
        save()  # a later network may take the process with it
        return measured[-1]

    def lines(result: Result) -> str:
        kernels = report_network.largest_kernels(result) if arguments.verbose else ""
        return "\n".join(filter(None, (table.rows(result), kernels)))

    results = each(progress, runs, report_network.label, one, lines, table.header())
    said = report_network.summary(results, platform)
    memory = jax.devices()[0].memory_stats() or {}
    if peak := memory.get("peak_bytes_in_use"):
        facts["peak device memory of this process"] = f"{peak / 1e9:.2f} GB"
        said.insert(0, f"peak device memory of this process: {peak / 1e9:.2f} GB")
    save()
    if arguments.json:
        said.append(f"results: {arguments.json}")
    if arguments.plot and any(result.ratio for result in results):
        report_network.plot(results, arguments.plot, facts)
        said.append(f"plot: {arguments.plot}")
    print("\n" + "\n".join(said))
    if len(results) < len(runs):
        return INTERRUPTED
    return 1 if any(result.wrong for result in results) else 0


def _note(progress: Progress, run: Run, word: str) -> None:
    progress.start(f"{report_network.label(run)}: {word}")
