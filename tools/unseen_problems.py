"""Compares predictions with times of problems that no fit has seen.

    python tools/unseen_problems.py --predict build/choices/choices_test new.tsv --gpu h100
    python tools/unseen_problems.py --list candidates.tsv --predictions old.tsv new.tsv
    python tools/candidate_times.py candidates.tsv --json unseen.json
    python tools/unseen_problems.py --evaluate unseen.json --predictions old.tsv:0.97 new.tsv

The first command writes the predictions of a build for a GPU, XLA's included, for 150 problems
drawn with one seed: dense, pointwise, grouped and depthwise layers and layers of few channels, in
every operand type and operation. The second lists XLA's convolution and every kernel that one of
the files ranks among its first three; the third needs the GPU and measures them. The last prints,
for each file, the mean loss of auto against the best measured candidate, and for each family the
median of abs(log(predicted / measured)). A number behind a file is the share of a kernel's
prediction below which XLA gets a layer, if the build had another one (kXlaShare in
cc/cuda/select.cc).

No times of these problems may enter a table of measured times.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import sys
from collections import defaultdict
from collections.abc import Sequence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests" / "support"))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import numpy as np

from jaxconv._src.problem.spec import Op, problem_key
from jaxconv.bench import layers
from jaxconv.bench.problem import Problem

SEED = 20261124
COUNTS = {"dense": 60, "pointwise": 30, "depthwise": 20, "grouped": 20, "few channels": 20}
TYPES = (("bf16", "default"), ("f16", "default"), ("f32", "default"), ("f32", "highest"))
FIRST = 3  # candidates of each file
XLA_SHARE = 0.99  # kXlaShare in cc/cuda/select.cc

MOST_FLOP, LEAST_FLOP, MOST_BYTES = 6e10, 1e8, 6e8

FAMILY = re.compile(r"^[a-z]+_(\w+?)_(?:bf16|f16|f32)_")  # of an instance

# Problem key -> candidate ("xla" or an instance) -> predicted microseconds.
Predictions = dict[str, dict[str, float]]


def _layer(rng: np.random.Generator, kind: str) -> layers.Layer:
    def between(low: float, high: float) -> int:
        return int(np.exp(rng.uniform(np.log(low), np.log(high))))

    n, extent = 2 ** int(rng.integers(0, 9)), between(7, 128)
    c, k = (8 * between(2, 128) for _ in range(2))
    window, stride, groups = int(rng.choice([3, 3, 3, 5])), int(rng.choice([1, 1, 2])), 1
    if kind == "pointwise":
        window = 1
    elif kind == "depthwise":
        window, c = int(rng.choice([3, 3, 5, 7])), 8 * between(4, 128)
        groups, k = c, c
    elif kind == "grouped":
        groups, window = int(rng.choice([8, 16, 32])), 3
        c = k = groups * int(rng.choice([4, 8, 16, 32]))
    elif kind == "few channels":
        extent, c, k = 8 * between(8, 32), 3, 8 * between(2, 12)
        window, stride = ((3, 2), (7, 2), (4, 4), (3, 1))[rng.integers(4)]
    pad = 0 if window == stride else (window - 1) // 2
    numbers = [n, extent, extent, c, k, window, window, stride, pad, groups]
    return layers.parse(",".join(map(str, numbers)))


def problems() -> dict[str, tuple[str, Problem]]:
    """Problem key -> (kind, problem), drawn with one seed."""
    rng = np.random.default_rng(SEED)
    found: dict[str, tuple[str, Problem]] = {}
    for kind, count in COUNTS.items():
        drawn = 0
        while drawn < count:
            layer = _layer(rng, kind)
            dtype, precision = TYPES[rng.integers(len(TYPES))]
            problem = Problem(kind, layer, list(Op)[rng.integers(3)], dtype, precision)
            if min(layer.out_spatial) < 1 or problem.nbytes > MOST_BYTES:
                continue
            if not LEAST_FLOP <= layer.flops <= MOST_FLOP:
                continue
            spec, types = layer.spec(precision), (problem.operand_dtype, problem.out_dtype)
            key = problem_key(problem.op, spec, layer.sizes, *types)
            drawn += key not in found
            found.setdefault(key, (kind, problem))
    return found


def predict(choices_test: pathlib.Path, gpu: str) -> Predictions:
    """The predictions of a build for all problems on a GPU."""
    import kernel_tables
    from selection_program import SelectionProgram

    selection = SelectionProgram(choices_test)
    found: Predictions = {}
    for key, (_, problem) in problems().items():
        of_key = found[key] = {}
        for instance in kernel_tables.all_instances():
            mine = instance.op == problem.op.value and instance.dtype == problem.dtype
            exact = "3xtf32" not in instance.name or problem.precision != "default"
            plain = not instance.name.endswith(("_padded", "_fused"))
            if mine and exact and plain and not instance.family.startswith("winograd"):
                name, _, _, ours, *_ = selection.select(key, instance.name, gpu)
                if name:
                    of_key[name] = ours
        xla = selection.select(key, "native", gpu)[4]
        if xla > 0:
            of_key["xla"] = xla
    return found


def read(path: pathlib.Path) -> Predictions:
    """The predictions that ``write`` has written."""
    found: Predictions = defaultdict(dict)
    for line in path.read_text().splitlines():
        key, candidate, us = line.split("\t")
        found[key][candidate] = float(us)
    return found


def write(path: pathlib.Path, predictions: Predictions) -> None:
    """Writes predictions, a line each."""
    lines = [f"{k}\t{c}\t{us:.5g}" for k, of_key in predictions.items() for c, us in of_key.items()]
    path.write_text("\n".join(lines) + "\n")


def candidates(key: str, files: Sequence[Predictions]) -> list[str]:
    """XLA, and the kernels among the first three of a file."""
    found = ["xla"]
    for predictions in files:
        kernels = {c: us for c, us in predictions[key].items() if c != "xla"}
        found += sorted(kernels, key=kernels.__getitem__)[:FIRST]
    return list(dict.fromkeys(found))


def evaluate(measured: Predictions, predictions: Predictions, share: float) -> str:
    """Mean loss of auto and median errors, by kind and by operands.

    Args:
        measured: times; other problems than the drawn ones do not count.
        predictions: what is compared with them.
        share: of a kernel's prediction, below which XLA gets a layer.
    """
    loss: dict[str, list[float]] = defaultdict(list)
    errors: dict[str, list[float]] = defaultdict(list)
    below, unknown = 0, 0
    for key, (kind, _) in problems().items():
        times, predicted = measured.get(key, {}), predictions[key]
        operands = " ".join(key.split()[1:3]).split(":")[0] + " " + key.split()[2]
        for candidate, us in times.items():
            if candidate in predicted:
                error = abs(np.log(predicted[candidate] / us))
                errors["xla" if candidate == "xla" else "all kernels"].append(error)
                if candidate != "xla":
                    errors[FAMILY.search(candidate)[1]].append(error)
        kernels = {c: us for c, us in predicted.items() if c != "xla"}
        if not kernels:
            continue
        best = min(kernels, key=kernels.__getitem__)
        left = predicted.get("xla", np.inf) < share * kernels[best]
        chosen = "xla" if left else best
        if chosen not in times:
            unknown += 1
            continue
        allowed = {c: us for c, us in times.items() if c != "xla" or "xla" in predicted}
        lost = times[chosen] / min(allowed.values()) - 1
        below += "xla" in allowed and times["xla"] < 0.95 * times[chosen]
        for group in ("all", kind, operands):
            loss[group].append(lost)
    lines = [f"{group}: {100 * np.mean(v):.2f} % of {len(v)}" for group, v in loss.items()]
    lines += [
        f"median abs(log), {side}: {np.median(v):.3f} of {len(v)}" for side, v in errors.items()
    ]
    return "\n".join([*lines, f"below 0.95 of lax: {below}; choices not measured: {unknown}"])


def main(argv: Sequence[str]) -> int:
    """Does what the command line asks for; returns the exit status."""
    parser = argparse.ArgumentParser(prog="unseen_problems.py", description=__doc__)
    path = pathlib.Path
    parser.add_argument("--predict", nargs=2, type=path, metavar=("choices_test", "FILE.tsv"))
    parser.add_argument("--gpu", default="h200", help="of --predict; default: h200")
    parser.add_argument("--list", type=path, metavar="CANDIDATES.tsv")
    parser.add_argument("--evaluate", nargs="+", type=path, metavar="TIMES.json")
    parser.add_argument("--predictions", nargs="+", default=[], metavar="FILE.tsv[:SHARE]")
    arguments = parser.parse_args(argv)
    if arguments.predict:
        write(arguments.predict[1], predict(arguments.predict[0], arguments.gpu))
    shares = dict(given.partition(":")[::2] for given in arguments.predictions)
    files = {name: read(path(name)) for name in shares}
    if arguments.list:
        lines = ["\t".join([key, *candidates(key, [*files.values()])]) for key in problems()]
        arguments.list.write_text("\n".join(lines) + "\n")
    if arguments.evaluate:
        measured: Predictions = {}
        for file in arguments.evaluate:
            measured |= json.loads(file.read_text())["us"]
        for name, share in shares.items():
            text = evaluate(measured, files[name], float(share or XLA_SHARE))
            print(f"{name}\n{text}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
