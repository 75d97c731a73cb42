"""Fits the predictions of a GPU to measured times, and writes cc/cuda/calibration/h200.def.

    python tools/calibrate.py                  # compiles tests/cc/choices_test.cc, half a minute
    python tools/calibrate.py --program build/choices/choices_test

The times are those of lax's convolutions in ``tests/cc/measured_times.tsv``. The program gives the
terms of each problem at the GPU's full rates (``XlaTermsOf`` in cc/cuda/common/xla_cost.h), so the
fit and the library use the same code. The prediction of a row of a class is

    fixed + passes + ((compute / compute share)^p + (memory / memory share)^p)^(1/p)

Every class has its own three parameters; all share the exponent p. The fit minimises the robust sum
of squares of log(predicted / measured), and weighs most the rows in which the fastest kernel
measured is about as fast as lax, because selection depends on these.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
from collections import defaultdict
from collections.abc import Sequence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests" / "support"))

import measured_times
import numpy as np
from scipy.optimize import least_squares
from selection_program import SelectionProgram

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]

CALIBRATION = REPOSITORY / "cc" / "cuda" / "calibration" / "h200.def"
TARGET = "h200"

# Errors below this count by their squares, larger ones by their absolute value. Times repeat within
# 1 %; a process of XLA picks other kernels than the next.
ROBUST = 0.03

# A row weighs half where lax and the fastest kernel differ by this much (in the logarithm), and at
# least LEAST_WEIGHT.
NEAR = 0.3
LEAST_WEIGHT = 0.05

# The exponents p that are tried: the less, the more loads wait for arithmetic.
OVERLAPS = (2.75, 3.0, 3.25, 3.5, 3.75)

# Bounds of the fixed microseconds and of the shares. Launches, the first and the last tile take at
# most some 16 us where short rows were measured (dense wgrad, 23 us). The model's DRAM rate is that
# of a large copy, 0.9 of the peak; loads alone come nearer to the peak.
FIXED_US = (0.1, 16.0)
COMPUTE_SHARE = (1e-4, 1.0)
MEMORY_SHARE = (1e-4, 1 / 0.9)

# Initial values of the three; the fit takes the best of what it finds from each.
STARTS = ((3.0, 0.4, 0.7), (7.0, 0.7, 0.4), (7.0, 0.1, 0.1))

# What is not fitted. The fixed time in classes with less than ROWS rows or without a row shorter
# than SHORT_US, because long rows say nothing about it: it is that of the same class and operations
# with other operands, TF32 first, or UNFITTED_US. The memory share in classes where the ratio of
# compute to memory is the same in all rows up to the factor SPREAD: it is 1.
ROWS = 7
SHORT_US = 60.0
UNFITTED_US = 3.0
SPREAD = 1.5

Name = tuple[str, str, str]  # class, operations, operands


@dataclasses.dataclass
class Rows:
    """The measured rows of a class: terms and times in microseconds."""

    compute: np.ndarray
    memory: np.ndarray
    passes: np.ndarray
    lax: np.ndarray
    weight: np.ndarray

    def predicted(self, parameters: Sequence[float], overlap: float) -> np.ndarray:
        """Microseconds by the rule of ``Combined`` in cc/cuda/common/xla_cost.cc."""
        fixed, compute_share, memory_share = parameters
        compute = (self.compute / compute_share) ** overlap
        memory = (self.memory / memory_share) ** overlap
        return fixed + self.passes + (compute + memory) ** (1 / overlap)


def weight(lax: float, kernels: dict[str, float]) -> float:
    """How much a row counts."""
    if not kernels:
        return LEAST_WEIGHT
    distance = np.log(lax / min(kernels.values())) / NEAR
    return max(LEAST_WEIGHT, 1 / (1 + distance**2))


def read(program: pathlib.Path) -> dict[Name, Rows]:
    """The measured rows with their terms, by class."""
    selection = SelectionProgram(program)
    found: dict[Name, list[tuple[float, ...]]] = defaultdict(list)
    for key, (lax, kernels) in measured_times.read(measured_times.TABLE).items():
        name, terms = selection.xla_terms(key, TARGET)
        if name[0]:
            found[name].append((*terms, lax, weight(lax, kernels)))
    return {name: Rows(*np.array(rows).T) for name, rows in found.items()}


@dataclasses.dataclass
class Fit:
    """Parameters of a class: fixed microseconds, compute share, memory share."""

    parameters: tuple[float, ...]
    cost: float  # the weighted robust sum of squares


def fits_fixed(rows: Rows) -> bool:
    """Whether the rows of a class determine its fixed time."""
    return len(rows.lax) >= ROWS and rows.lax.min() < SHORT_US


def fit(rows: Rows, overlap: float, fixed: float = UNFITTED_US) -> Fit:
    """The parameters of a class by least squares; ``fixed`` where the rows do not determine it."""
    ratio = rows.compute / rows.memory
    free = [fits_fixed(rows), True, ratio.max() > SPREAD * ratio.min()]
    low, high = np.log(np.array([FIXED_US, COMPUTE_SHARE, MEMORY_SHARE]))[free].T
    given = np.log(np.array([fixed, 1.0, 1.0]))

    def parameters(logarithms: np.ndarray) -> np.ndarray:
        every = given.copy()
        every[free] = logarithms
        return np.exp(every)

    def residuals(logarithms: np.ndarray) -> np.ndarray:
        error = np.log(rows.predicted(parameters(logarithms), overlap) / rows.lax)
        robust = 2 * (np.sqrt(1 + (error / ROBUST) ** 2) - 1)
        return np.sqrt(rows.weight * robust)

    starts = np.log(np.array(STARTS))[:, free]
    fits = [
        least_squares(residuals, start, bounds=(low, high), xtol=1e-10, ftol=1e-10)
        for start in starts
    ]
    best = min(fits, key=lambda found: found.cost)
    return Fit(tuple(float(f"{value:.3g}") for value in parameters(best.x)), best.cost)


def fit_all(classes: dict[Name, Rows], overlap: float) -> dict[Name, Fit]:
    """The parameters of all classes."""
    fits = {name: fit(rows, overlap) for name, rows in classes.items() if fits_fixed(rows)}
    for (problem_class, operations, operands), rows in classes.items():
        name = problem_class, operations, operands
        if name not in fits:
            others = ((problem_class, operations, other) for other in ("tf32", "16-bit"))
            related = next((fits[o] for o in others if o in fits and fits_fixed(classes[o])), None)
            fits[name] = fit(rows, overlap, related.parameters[0] if related else UNFITTED_US)
    return fits


def line(name: Name, rows: Rows, found: Fit, overlap: float) -> str:
    """A class's line of the calibration."""
    ratios = rows.predicted(found.parameters, overlap) / rows.lax
    least, median, most = (f"{value:4.2f}" for value in np.quantile(ratios, (0, 0.5, 1)))
    words = [f"{json.dumps(word)}," for word in name]
    numbers = ", ".join(f"{value:6.4g}" for value in found.parameters)
    text = f"XLA({words[0]:23}{words[1]:17}{words[2]:10}{numbers})"
    return f"{text}  // {len(rows.lax):3} {least} {median} {most}"


HEADER = """\
// Calibration of predicted times, written by "python tools/calibrate.py" from the times in
// tests/cc/measured_times.tsv; never edited. A GPU without a file takes this one, scaled by its
// own rates. The times:
//
{facts}
//
// XLA_OVERLAP(exponent p of the rule that combines the terms)
// XLA(class, operations, operands, fixed us, share of the compute rate, share of the DRAM rate)
//   // measured rows; least, median and greatest predicted / measured
//
// Not fitted: fixed in classes with less than {rows} rows or none shorter than {short:g} us, where
// it is that of the class with other operands or {fixed:g} us; DRAM share 1 in classes with the
// same ratio of FLOPs to bytes in all rows.
#ifndef XLA_OVERLAP
#define XLA_OVERLAP(...)
#endif
#ifndef XLA
#define XLA(...)
#endif
"""

FOOTER = """\
#undef XLA
#undef XLA_OVERLAP
"""


def calibration(program: pathlib.Path) -> str:
    """The text of the file."""
    classes = dict(sorted(read(program).items()))
    fits = {p: fit_all(classes, p) for p in OVERLAPS}
    overlap = min(OVERLAPS, key=lambda p: sum(found.cost for found in fits[p].values()))
    facts = measured_times.facts(measured_times.TABLE)
    text = HEADER.format(
        facts="\n".join(f"// {name}: {value}" for name, value in facts.items()),
        rows=ROWS,
        short=SHORT_US,
        fixed=UNFITTED_US,
    )
    lines = [line(name, rows, fits[overlap][name], overlap) for name, rows in classes.items()]
    return "\n".join([f"{text}XLA_OVERLAP({overlap:g})", *lines, FOOTER])


def main(argv: Sequence[str]) -> int:
    """Writes the file; returns the exit status."""
    parser = argparse.ArgumentParser(prog="calibrate.py", description=__doc__)
    parser.add_argument("--program", type=pathlib.Path, help="choices_test, if it is compiled")
    chosen = parser.parse_args(argv)
    program = chosen.program
    if program is None:
        import bench_problems

        program = bench_problems.built()
    CALIBRATION.write_text(calibration(program))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
