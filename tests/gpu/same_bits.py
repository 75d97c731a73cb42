"""Whether results are the same bits in several processes, on a GPU.

    python tests/gpu/same_bits.py --program build/kernel_check --pass-program build/pass_check \
        --record tests/gpu_report.json

Every instance of the families depthwise, block_diagonal and few_channels that accepts a layer below
computes it on random data, in three processes at once, so that the relative timing of CTAs differs.
``kernel_check hash`` prints a hash of each result, and ``pass_check hash`` those of passes, the
kernels without a convolution (CONTRIBUTING.md says how the programs are built). Exit status 1: a
hash differs, a process lacks one, or a program fails. ``--families`` takes other families,
``--record`` adds a summary to the GPU record.
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "support"))

import check_programs
import gpu_report
from problems import Problem, problem

from jaxconv._src.problem.spec import Op

FAMILIES = ("depthwise", "block_diagonal", "few_channels")
DTYPES = ("bf16", "f16", "f32")


def _depthwise(name: str, spatial: tuple[int, ...], n: int, c: int, window: int, **rest) -> Problem:
    rest = {"padding": window // 2, **rest}
    return problem(name, spatial, window, n=n, c=c, k=c, groups=c, **rest)


LAYERS = (
    _depthwise("mobile_dw", (14, 14), 64, 512, 3),
    _depthwise("depthwise_3x3_stride2", (56, 56), 64, 192, 3, stride=2),
    _depthwise("convnext_dw", (56, 56), 64, 96, 7),
    _depthwise("depthwise_5x5", (28, 28), 32, 240, 5),
    _depthwise("depthwise_31x31", (56, 56), 16, 128, 31),
    _depthwise("depthwise_1d", (2048,), 8, 512, 4, padding=((3, 0),)),
    _depthwise("depthwise_3d", (8, 28, 28), 4, 64, 3),
    problem("resnext_g32", (56, 56), 3, n=64, c=128, k=128, groups=32, padding=1),
    problem("groups_8", (28, 28), 3, n=64, c=256, k=256, groups=8, padding=1),
    problem("groups_stride2", (28, 28), 3, n=32, c=256, k=256, groups=16, padding=1, stride=2),
    problem("r50_stem", (224, 224), 7, n=64, c=3, k=64, padding=3, stride=2),
    problem("alexnet_stem", (224, 224), 11, n=64, c=3, k=64, padding=2, stride=4),
    problem("vit_patchify", (224, 224), 16, n=64, c=3, k=768, stride=16),
    problem("narrow_output", (128, 128), 3, n=8, c=64, k=1, padding=1),
)


def lines() -> Iterator[str]:
    """The problem file: name, tab, key."""
    for layer in LAYERS:
        for op in Op:
            for dtype in DTYPES:
                precision = "highest" if dtype == "f32" else "default"
                yield f"{layer.name}.{op.value}.{dtype}\t{layer.line(op, dtype, precision)}\n"


def hashes(
    commands: Sequence[Sequence[str]], options: argparse.Namespace, number: int
) -> dict[tuple[str, str], str]:
    """The hash of each (problem and operation, instance), by commands that run one after the other.

    Raises:
        RuntimeError: a program fails, or does not end in time.
    """
    found = {}
    for command in commands:
        ran = check_programs.run(command, number, options)
        if ran.status != 0:
            output = ran.stdout[-2000:] + ran.stderr[-2000:]
            raise RuntimeError(f"{' '.join(command)}: status {ran.status}\n{output}")
        for line in ran.stdout.splitlines():
            if not line.startswith("hash:"):
                name, instance, bits = line.split()
                found[name, instance] = bits
    return found


def differing(runs: Sequence[dict[tuple[str, str], str]]) -> list[str]:
    """One line for each entry that differs between runs or is missing in one."""
    of_all = collections.defaultdict(list)
    for each in runs:
        for result, bits in each.items():
            of_all[result].append(bits)
    return [
        f"{' '.join(result)}: {' '.join(bits)}"
        for result, bits in of_all.items()
        if len(bits) != len(runs) or len(set(bits)) != 1
    ]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    check_programs.add_options(parser, seconds=300)
    parser.add_argument("--families", nargs="+", default=FAMILIES)
    parser.add_argument("--processes", type=int, default=3)
    options = parser.parse_args(argv)
    if options.processes < 2:
        parser.error("--processes: expected 2 at least, to compare")
    pass_program = check_programs.pass_program(parser, options)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.processes) as pool:
        problems = pathlib.Path(folder) / "problems.tsv"
        problems.write_text("".join(lines()))
        families = [f"_{family}_" for family in options.families]
        commands = [options.program, "hash", str(problems), *families], [pass_program, "hash"]
        one = functools.partial(hashes, commands, options)
        try:
            runs = list(pool.map(one, range(options.processes)))
        except RuntimeError as error:
            print(f"FAILED {error}")
            return 1
    failures = differing(runs)
    for failure in failures:
        print(f"FAILED {failure}")
    results = set().union(*runs)
    summary = {
        "failed": len(failures),
        "results": len(results),
        "instances": len({instance for _, instance in results}),
        "processes": options.processes,
        "seconds": round(time.monotonic() - start),
    }
    print(json.dumps(summary))
    if options.record:
        gpu_report.update(options.record, {}, same_bits=summary)
    return 1 if failures or not results else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
