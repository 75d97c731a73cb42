"""Puts times of the bench into ``tests/cc/measured_times.tsv``, the table of measured choices.

    python -m jaxconv.bench --device-time --algorithm native --json rows.json ...
    python tools/measured_times.py rows.json

Times by an H200's device clock replace those of the same problem and kernel; other rows and kernels
remain. The table begins with lines ``# fact: value``, which remain too.
``tests/cc/xla_cost_test.cc`` and ``tools/calibrate.py`` read the table.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import sys
from collections.abc import Iterator, Sequence

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from jaxconv._src.problem.spec import problem_key
from jaxconv.bench.problem import Row

TABLE = pathlib.Path(__file__).parents[1] / "tests" / "cc" / "measured_times.tsv"
GPUS = TABLE.parents[2] / "cc" / "cuda" / "calibration" / "gpus.def"
# Times of more kernels, and of problems that are no layer of the bench; "-": lax was not timed.
CANDIDATES = TABLE.with_name("measured_candidates.tsv")

# Problem key -> (microseconds of lax, if known; microseconds of kernels). A kernel is an instance,
# with "/" and its slices where there are several.
Times = dict[str, tuple[float | None, dict[str, float]]]


def table_of(gpu: str) -> pathlib.Path:
    """The table of a GPU, by the name of its target."""
    return TABLE if gpu == "h200" else TABLE.with_name(f"{TABLE.stem}_{gpu}.tsv")


def expect(gpu: str, device: str, path: pathlib.Path) -> None:
    """Raises ValueError if a file's times are of another GPU than the target."""
    part = re.search(rf'^GPU\("{gpu}",\s*"([^"]*)"', GPUS.read_text(), re.MULTILINE)[1]
    if part not in device:
        raise ValueError(f"{path}: expected times of an {part}, got {device}")


def instance_of(kernel: str) -> str:
    """The instance of a kernel of the table."""
    return kernel.partition("/")[0]


def slices_of(kernel: str) -> int:
    """The slices of a kernel of the table."""
    return int(kernel.partition("/")[2] or 1)


def facts(path: pathlib.Path) -> dict[str, str]:
    """What holds for all times: GPU, driver, version of JAX, commit, command."""
    found = re.findall(r"^# (\w+): (.*)$", path.read_text(), re.MULTILINE)
    return dict(found)


def read(path: pathlib.Path) -> Times:
    """Reads the table."""
    found: Times = {}
    for line in path.read_text().splitlines():
        if line.startswith("#"):
            continue
        key, lax, *kernels = line.split("\t")
        pairs = (kernel.split("=") for kernel in kernels)
        found[key] = None if lax == "-" else float(lax), {name: float(us) for name, us in pairs}
    return found


def write(path: pathlib.Path, times: Times, new: dict[str, str] | None = None) -> None:
    """Writes the table below its facts, each problem's fastest kernel first.

    ``new``: the facts of a table that does not exist yet.
    """
    stated = facts(path) if path.exists() else new or {}
    lines = [f"# {name}: {value}" for name, value in stated.items()]
    for key, (lax, kernels) in times.items():
        ordered = sorted(kernels.items(), key=lambda item: item[1])
        of_lax = "-" if lax is None else f"{lax:.4g}"
        lines.append("\t".join([key, of_lax, *(f"{n}={us:.4g}" for n, us in ordered)]))
    path.write_text("\n".join(lines) + "\n")


def rows(path: pathlib.Path) -> Iterator[Row]:
    """The rows of a bench file that belong into the table.

    Raises:
        ValueError: the file is from another GPU, or has times by the host's clock.
    """
    content = json.loads(path.read_text())
    facts = content["environment"]
    expect("h200", facts["device"], path)
    if facts["clock"] != "the device's":
        raise ValueError(f"{path}: expected --device-time")
    for found in content["rows"]:
        row = Row.from_json(found, facts["platform"])
        lax = row.sides.get("lax")
        plain = not (row.problem.dtype.startswith("int8") or row.problem.variant)
        if plain and not row.wrong and lax is not None and lax.median_s:
            yield row


def add(times: Times, row: Row) -> None:
    """Replaces a problem's times of the same kernels by those of a row."""
    problem = row.problem
    spec = problem.layer.spec(problem.precision)
    types = problem.operand_dtype, problem.out_dtype
    key = problem_key(problem.op, spec, problem.layer.sizes, *types)
    ours, lax = row.sides["jaxconv"], row.sides["lax"]
    kernels = dict(times[key][1]) if key in times else {}
    if row.kernel != "XLA" and ours.median_s:
        kernels = {n: us for n, us in kernels.items() if instance_of(n) != row.kernel}
        slices = f"/{row.slices}" if row.slices > 1 else ""
        kernels[row.kernel + slices] = 1e6 * ours.median_s
    times[key] = 1e6 * lax.median_s, kernels


def main(argv: Sequence[str]) -> int:
    """Reads the named files and writes the table; returns the exit status."""
    parser = argparse.ArgumentParser(prog="measured_times.py", description=__doc__)
    parser.add_argument("files", nargs="+", type=pathlib.Path, metavar="rows.json")
    parser.add_argument("--table", type=pathlib.Path, default=TABLE, help="another table")
    arguments = parser.parse_args(argv)
    times = read(arguments.table) if arguments.table.exists() else {}
    before = len(times)
    try:
        for path in arguments.files:
            for row in rows(path):
                add(times, row)
    except ValueError as error:
        parser.error(str(error))
    write(arguments.table, times)
    print(f"{len(times)} problems, {len(times) - before} of them new: {arguments.table}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
