"""Fits the predictions of a GPU to measured times, and writes cc/cuda/calibration/h200.def.

    python tools/calibrate.py                  # compiles tests/cc/choices_test.cc, half a minute
    python tools/calibrate.py --program build/choices/choices_test
    python tools/calibrate.py --check          # the errors, and those of layers held out of the fit

The times are those of lax's convolutions and of kernels in ``tests/cc/measured_times.tsv`` and in
``tests/cc/measured_candidates.tsv``. The program gives the terms of each at the GPU's full rates
(``TimeTerms`` in cc/cuda/common/predicted_time.h), so the fit and the library use the same code.
The prediction of a row of a form is

    fixed + launch + longest + exposed * (sum - longest)

of the terms tensor cores, loads and stores divided by the SM share, and DRAM divided by the DRAM
share. Every form has its own three parameters, at most; all have the same exposed share. A first
fit of each form minimises the robust sum of squares of log(predicted / measured), and weighs most
the rows whose alternatives take about as long, because selection depends on these. A second fit of
all forms together adds what selection loses: for each problem the expected log(chosen / best), if
predictions are off by ``UNCERTAIN``.

A plan may choose among tilings by its own predictions. The tool therefore fits, compiles and fits
again until the file remains the same; with ``--program`` it fits once.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests" / "support"))

import measured_times
import numpy as np
from scipy.optimize import least_squares, minimize
from selection_program import SelectionProgram

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]

WINOGRAD = REPOSITORY / "tests" / "cc" / "winograd_measured.tsv"
CALIBRATION = REPOSITORY / "cc" / "cuda" / "calibration" / "h200.def"
TARGET = "h200"

Name = tuple[str, str, str]  # form, operations, operands

# Errors below this count by their squares, larger ones by their absolute value. Times repeat within
# 1 %; a process of XLA picks other kernels than the next.
ROBUST = 0.03

# A row weighs half where the best alternative differs by this much (in the logarithm), and at least
# LEAST_WEIGHT.
NEAR = 0.3
LEAST_WEIGHT = 0.15

# The exposed shares that are tried.
EXPOSED = (0.125, 0.15, 0.175, 0.2, 0.225)

# The second fit. The share of XLA's time is kXlaShare of cc/cuda/select.cc.
UNCERTAIN = 0.03
LOST = 200.0  # what a loss of 100 % counts, beside squares in units of ROBUST
XLA_SHARE = 0.99

# Bounds of the shares and of the fixed microseconds. Launches, the first and the last tile take at
# most some 16 us where short rows were measured (dense wgrad by XLA, 23 us). The model's DRAM rate
# is that of a large copy, 0.9 of the peak; loads alone come nearer to the peak.
SM_SHARE = (1e-4, 1.2)
DRAM_SHARE = (1e-4, 1 / 0.8)
FIXED_US = (0.1, 16.0)

# Initial values of the three; the fit takes the best of what it finds from each.
STARTS = ((0.4, 0.7, 3.0), (0.7, 0.4, 7.0), (0.1, 0.1, 7.0), (0.9, 1.0, 1.0))

# What is not fitted. The fixed time in forms with less than ROWS rows or without a row shorter than
# SHORT_US, because long rows say nothing about it: it is UNFITTED_US, and XLA_US in most classes of
# XLA's convolutions; XLA_FIXED has the others. The DRAM share in forms where the ratio of the SM's
# longest term to DRAM is the same in all rows up to the factor SPREAD: it is 1.
ROWS = 25
SHORT_US = 60.0
UNFITTED_US = 3.0
XLA_US = 12.0
XLA_FIXED = {
    ("xla pointwise", "fprop, dgrad", "16-bit"),
    ("xla pointwise", "wgrad", "16-bit"),
}
SPREAD = 1.5

# Forms that take the parameters of the nearest form until they have OWN_ROWS measured rows.
OWN_ROWS = 16
GATHER, WGRAD = "fprop, dgrad", "wgrad"
NEAREST: dict[Name, Name] = {
    ("igemm_wmma", GATHER, "16-bit"): ("igemm_wmma", WGRAD, "tf32"),
    ("igemm_wmma", WGRAD, "16-bit"): ("igemm_wmma", WGRAD, "tf32"),
    ("igemm_wmma", GATHER, "3xtf32"): ("igemm_wmma", GATHER, "tf32"),
    ("igemm_simt", WGRAD, "fp32"): ("igemm_simt", GATHER, "fp32"),
    ("depthwise", WGRAD, "16-bit"): ("depthwise tma", WGRAD, "16-bit"),
    ("depthwise_int8", GATHER, "8-bit"): ("imma_few_channels", GATHER, "8-bit"),
    ("depthwise walk", GATHER, "16-bit"): ("depthwise pairs", GATHER, "16-bit"),
    ("depthwise walk", GATHER, "fp32"): ("depthwise pairs", GATHER, "16-bit"),
    ("block_diagonal rows", GATHER, "16-bit"): ("block_diagonal runs", GATHER, "16-bit"),
    **{
        (form, operations, operands): (form, operations, "16-bit")
        for form in ("block_diagonal", "block_diagonal runs")
        for operations in (GATHER, WGRAD)
        for operands in ("tf32", "3xtf32")
    },
    ("block_diagonal rows", GATHER, "tf32"): ("block_diagonal runs", GATHER, "16-bit"),
    ("igemm_simt", GATHER, "16-bit"): ("igemm_simt", GATHER, "fp32"),
    ("igemm_simt", WGRAD, "16-bit"): ("igemm_simt", GATHER, "fp32"),
    ("few_channels", "fprop", "3xtf32"): ("few_channels", "fprop", "tf32"),
    ("few_channels", "dgrad", "tf32"): ("few_channels", "dgrad", "16-bit"),
    ("few_channels", "dgrad", "3xtf32"): ("few_channels", "dgrad", "16-bit"),
    ("few_channels", WGRAD, "tf32"): ("few_channels", WGRAD, "16-bit"),
    ("few_channels", WGRAD, "3xtf32"): ("few_channels", WGRAD, "16-bit"),
    ("xla dilated wgrad", WGRAD, "tf32"): ("xla dilated wgrad", WGRAD, "16-bit"),
    ("xla few channels", WGRAD, "16-bit"): ("xla few channels", WGRAD, "tf32"),
    ("xla few channels", "dgrad", "tf32"): ("xla few channels", "dgrad", "16-bit"),
    ("xla dense", WGRAD, "fp32"): ("xla dense", GATHER, "fp32"),
}

OVERLAPPED = 4  # the terms before the launch
DRAM = 3


@dataclasses.dataclass
class Rows:
    """The measured rows of a form: terms and times in microseconds."""

    keys: list[str]
    problem: np.ndarray  # a number: selection chooses among the rows of a problem
    terms: np.ndarray  # row, term: tensor cores, loads, stores, DRAM, launch
    measured: np.ndarray
    weight: np.ndarray
    # Whether auto may choose it: not XLA where its error is larger.
    allowed: np.ndarray | None = None

    def predicted(self, parameters: Sequence[float], exposed: float) -> np.ndarray:
        """Microseconds by the rule of ``PredictedMicroseconds`` in predicted_time.cc."""
        sm_share, dram_share, fixed = parameters
        overlapped = self.terms[:, :OVERLAPPED] / np.array([sm_share] * DRAM + [dram_share])
        longest = overlapped.max(1)
        return fixed + self.terms[:, OVERLAPPED] + longest + exposed * (overlapped.sum(1) - longest)

    def chosen(self, which: np.ndarray) -> Rows:
        """Some of the rows."""
        keys = [key for key, taken in zip(self.keys, which, strict=True) if taken]
        columns = self.problem, self.terms, self.measured, self.weight, self.allowed
        return Rows(keys, *(column[which] for column in columns))


Forms = dict[Name, Rows]


def weight(measured: float, others: Iterable[float]) -> float:
    """How much a row counts, beside the times of the alternatives."""
    least = min(others, default=None)
    if least is None:
        return LEAST_WEIGHT
    distance = np.log(measured / least) / NEAR
    return max(LEAST_WEIGHT, 1 / (1 + distance**2))


def read(program: pathlib.Path) -> Forms:
    """The measured rows with their terms, by form."""
    selection = SelectionProgram(program)
    found: dict[Name, list[tuple]] = defaultdict(list)
    everything = [*measured().items(), *measured_winograd().items()]
    for problem, (key, times) in enumerate(everything):
        xla_allowed = selection.select(key, "native", TARGET)[4] > 0
        for kernel, us in times.items():
            of = kernel
            if kernel != "xla":
                of = f"{measured_times.instance_of(kernel)}/{measured_times.slices_of(kernel)}"
            name, terms = selection.terms(key, of, TARGET)
            others = [time for other, time in times.items() if other != kernel]
            if name[0]:
                allowed = kernel != "xla" or xla_allowed
                row = key, problem, terms, us, weight(us, others), allowed
                found[name].append(row)
    columns = {name: tuple(zip(*rows, strict=True)) for name, rows in found.items()}
    return {
        name: Rows(list(keys), *map(np.array, arrays))
        for name, (keys, *arrays) in sorted(columns.items())
    }


def measured() -> dict[str, dict[str, float]]:
    """Problem key -> "xla" or a kernel -> microseconds, of both tables."""
    times: dict[str, dict[str, float]] = {}
    for table in (measured_times.TABLE, measured_times.CANDIDATES):
        for key, (lax, kernels) in measured_times.read(table).items():
            of_key = times.setdefault(key, {})
            if lax is not None:
                of_key.setdefault("xla", lax)
            for kernel, us in kernels.items():
                of_key.setdefault(kernel, us)
    return times


def measured_winograd() -> dict[str, dict[str, float]]:
    """The same of Winograd's kernels, which auto does not choose."""
    times: dict[str, dict[str, float]] = defaultdict(dict)
    for line in WINOGRAD.read_text().splitlines():
        key, kernel, us = line.split("\t")
        times[key][kernel] = float(us)
    return times


@dataclasses.dataclass
class Fit:
    """Parameters of a form: SM share, DRAM share, fixed microseconds."""

    parameters: tuple[float, ...]
    cost: float  # the weighted robust sum of squares


def fits_fixed(name: Name, rows: Rows) -> bool:
    """Whether a form has its own fixed time."""
    enough = len(rows.measured) >= ROWS and rows.measured.min() < SHORT_US
    return enough and (not is_xla(name) or name in XLA_FIXED)


def is_xla(name: Name) -> bool:
    """Whether a form is a class of XLA's convolutions."""
    return name[0].startswith("xla")


def unfitted(name: Name) -> float:
    """The fixed time of a form without its own."""
    return XLA_US if is_xla(name) else UNFITTED_US


def free_of(name: Name, rows: Rows) -> list[bool]:
    """Which of the three parameters the rows of a form determine."""
    sm, dram = rows.terms[:, :DRAM].max(1), rows.terms[:, DRAM]
    varies = bool(dram.all()) and (sm / dram).max() > SPREAD * (sm / dram).min()
    return [True, bool(varies), fits_fixed(name, rows)]


def rounded(value: float) -> float:
    """As the file has it."""
    return float(f"{value:.3g}")


def fit(name: Name, rows: Rows, exposed: float) -> Fit:
    """The parameters of a form by least squares."""
    free = free_of(name, rows)
    low, high = np.log(np.array([SM_SHARE, DRAM_SHARE, FIXED_US]))[free].T
    given = np.log(np.array([1.0, 1.0, unfitted(name)]))

    def parameters(logarithms: np.ndarray) -> np.ndarray:
        every = given.copy()
        every[free] = logarithms
        return np.exp(every)

    def residuals(logarithms: np.ndarray) -> np.ndarray:
        error = np.log(rows.predicted(parameters(logarithms), exposed) / rows.measured)
        robust = 2 * (np.sqrt(1 + (error / ROBUST) ** 2) - 1)
        return np.sqrt(rows.weight * robust)

    starts = np.log(np.array(STARTS))[:, free]
    fits = [
        least_squares(residuals, start, bounds=(low, high), xtol=1e-10, ftol=1e-10)
        for start in starts
    ]
    best = min(fits, key=lambda found: found.cost)
    return Fit(tuple(map(rounded, parameters(best.x))), best.cost)


def nearest(name: Name, forms: Forms) -> Name | None:
    """The form whose parameters a form takes, if it has too few rows for its own."""
    few = name not in forms or len(forms[name].measured) < OWN_ROWS
    return NEAREST.get(name) if few else None


def fit_all(forms: Forms, exposed: float) -> dict[Name, Fit]:
    """The parameters of all forms that have their own."""
    forms = {name: rows for name, rows in forms.items() if not nearest(name, forms)}
    return {name: fit(name, rows, exposed) for name, rows in forms.items()}


def first_fit(forms: Forms) -> tuple[float, dict[Name, Fit]]:
    """The exposed share with the least cost, and the parameters of all forms."""
    fits = {exposed: fit_all(forms, exposed) for exposed in EXPOSED}
    exposed = min(EXPOSED, key=lambda each: sum(found.cost for found in fits[each].values()))
    return exposed, fits[exposed]


class Choices:
    """All rows of the forms together, and what selection among the rows of a problem loses."""

    def __init__(self, forms: Forms, names: Sequence[Name]):
        """``names``: the forms with parameters, in the order of the logarithms."""
        own = [nearest(name, forms) or name for name in forms]
        rows = list(forms.values())
        self.form = np.repeat([names.index(name) for name in own], [len(r.keys) for r in rows])
        self.problem, self.terms, self.measured, self.weight, self.allowed = (
            np.concatenate([getattr(each, field) for each in rows])
            for field in ("problem", "terms", "measured", "weight", "allowed")
        )
        self.count = int(self.problem.max()) + 1
        best = np.full(self.count, np.inf)
        np.minimum.at(best, self.problem[self.allowed], self.measured[self.allowed])
        self.loss = np.where(self.allowed, np.log(self.measured / best[self.problem]), 0.0)
        xla = np.repeat([is_xla(name) for name in forms], [len(r.keys) for r in rows])
        self.advantage = np.where(xla, -np.log(XLA_SHARE), 0.0)

    def cost(self, logarithms: np.ndarray) -> tuple[float, np.ndarray]:
        """What the second fit minimises, and its gradient.

        Args:
            logarithms: of the parameters of each form, form by form, and of the exposed share.
        """
        parameters, exposed = np.exp(logarithms[:-1].reshape(-1, 3)), np.exp(logarithms[-1])
        shares = np.repeat(parameters[:, :2], (DRAM, 1), axis=1)[self.form]
        overlapped = self.terms[:, :OVERLAPPED] / shares
        longest = overlapped.argmax(1)
        part = np.full_like(overlapped, exposed)
        np.put_along_axis(part, longest[:, None], 1.0, axis=1)
        fixed = parameters[self.form, 2]
        predicted = fixed + self.terms[:, OVERLAPPED] + (part * overlapped).sum(1)
        error = np.log(predicted / self.measured)
        root = np.sqrt(1 + (error / ROBUST) ** 2)
        # The probability that a row is chosen, if errors of the logarithms have the size UNCERTAIN.
        score = np.where(self.allowed, -(np.log(predicted) + self.advantage) / UNCERTAIN, -np.inf)
        most = np.full(self.count, -np.inf)
        np.maximum.at(most, self.problem, score)
        chance = np.exp(score - most[self.problem])
        chance /= np.bincount(self.problem, chance, self.count)[self.problem]
        lost = np.bincount(self.problem, chance * self.loss, self.count)
        cost = 2 * np.sum(self.weight * (root - 1)) + LOST * lost.sum()
        # The derivatives by the logarithm of the prediction, then by the parameters.
        slope = 2 * self.weight * error / (ROBUST**2 * root)
        slope -= LOST / UNCERTAIN * chance * (self.loss - lost[self.problem])
        slope /= predicted
        by_sm = -slope * (part * overlapped)[:, :DRAM].sum(1)
        by_dram = -slope * (part * overlapped)[:, DRAM]
        others = overlapped.sum(1) - overlapped.max(1)
        gradient = np.stack(
            [np.bincount(self.form, by, len(parameters)) for by in (by_sm, by_dram, slope * fixed)],
            1,
        )
        return cost, np.append(gradient.ravel(), np.sum(slope * others * exposed))


def best_fit(forms: Forms) -> tuple[float, dict[Name, Fit]]:
    """The exposed share and the parameters of all forms, by both fits."""
    exposed, fits = first_fit(forms)
    names = list(fits)
    choices = Choices(forms, names)
    start = np.log(np.append(np.concatenate([fits[n].parameters for n in names]), exposed))
    bounds = [each for n in names for each in limits(n, forms[n], fits[n].parameters)]
    bounds.append(tuple(np.log([EXPOSED[0], EXPOSED[-1]])))
    found = minimize(
        choices.cost,
        start,
        jac=True,
        bounds=bounds,
        method="L-BFGS-B",
        options={"maxiter": 3000, "maxfun": 10000, "ftol": 1e-10, "gtol": 1e-4},
    )
    *values, exposed = (rounded(value) for value in np.exp(found.x))
    each = zip(*[iter(values)] * 3, strict=True)
    return exposed, {n: Fit(v, fits[n].cost) for n, v in zip(names, each, strict=True)}


def limits(name: Name, rows: Rows, first: Sequence[float]) -> list[tuple[float, float]]:
    """Bounds of the logarithms of a form's parameters; those that are not fitted stay."""
    free = free_of(name, rows)
    ends = (SM_SHARE, DRAM_SHARE, FIXED_US)
    given = [end if may else (v, v) for may, end, v in zip(free, ends, first, strict=True)]
    return [(float(np.log(low)), float(np.log(high))) for low, high in given]


def line(name: Name, rows: Rows, found: Fit, exposed: float) -> str:
    """A form's line of the calibration; without the last parameters that are the default."""
    ratios = rows.predicted(found.parameters, exposed) / rows.measured
    least, median, most = (f"{value:4.2f}" for value in np.quantile(ratios, (0, 0.5, 1)))
    numbers = list(found.parameters)
    if numbers[2] == unfitted(name):
        numbers = numbers[: 1 if numbers[1] == 1 else 2]
    words = [f"{json.dumps(word)}," for word in name]
    text = f"FORM({words[0]:26}{words[1]:17}{words[2]:11}"
    text += ", ".join(f"{value:6.4g}" for value in numbers) + ")"
    return f"{text:81}  // {len(rows.measured):3} {least} {median} {most}"


def like(name: Name, near: Name) -> str:
    """The line of a form that takes another's parameters."""
    words = ", ".join(json.dumps(word) for word in (*name, *near))
    return f"LIKE({words})"


HEADER = """\
// Calibration of predicted times, written by "python tools/calibrate.py" from the times in
// tests/cc/measured_times.tsv; never edited. A GPU without a file takes this one, scaled by its
// own rates. The times:
//
{facts}
//
// EXPOSED(share of the terms beside the longest that nothing hides)
// UNFITTED_US(fixed us of forms without their own), XLA_US(the same of XLA's convolutions)
// FORM(form, operations, operands, share of the SM's rates, share of the DRAM rate, fixed us)
//   // measured rows; least, median and greatest predicted / measured
// LIKE(form, operations, operands; the same of the form whose parameters it takes, because it has
//   less than {own_rows} measured rows)
//
// Not fitted: fixed in forms with less than {rows} rows or none shorter than {short:g} us, and in
// most classes of XLA's convolutions; DRAM share 1 in forms with the same ratio of FLOPs to bytes
// in all rows. Left out: the default, and shares of 1 before it.
#ifndef EXPOSED
#define EXPOSED(...)
#endif
#ifndef UNFITTED_US
#define UNFITTED_US(...)
#endif
#ifndef XLA_US
#define XLA_US(...)
#endif
#ifndef FORM
#define FORM(...)
#endif
#ifndef LIKE
#define LIKE(...)
#endif
"""

FOOTER = """\
#undef LIKE
#undef FORM
#undef XLA_US
#undef UNFITTED_US
#undef EXPOSED
"""


def calibration(program: pathlib.Path) -> str:
    """The text of the file."""
    forms = read(program)
    exposed, fits = best_fit(forms)
    facts = measured_times.facts(measured_times.TABLE)
    text = HEADER.format(
        facts="\n".join(f"// {name}: {value}" for name, value in facts.items()),
        rows=ROWS,
        own_rows=OWN_ROWS,
        short=SHORT_US,
    )
    text += f"EXPOSED({exposed:g})\nUNFITTED_US({UNFITTED_US:g})\nXLA_US({XLA_US:g})"
    lines = [line(name, forms[name], found, exposed) for name, found in sorted(fits.items())]
    likes = [like(name, near) for name in NEAREST if (near := nearest(name, forms))]
    return "\n".join([text, *lines, *likes, FOOTER])


def held_out(forms: Forms, parts: int = 5) -> dict[Name, np.ndarray]:
    """log(predicted / measured) of every row, by the fit of the layers of the other parts."""
    layers = sorted({layer_of(key) for rows in forms.values() for key in rows.keys})
    part = {layer: i % parts for i, layer in enumerate(layers)}
    errors = {name: np.zeros(len(rows.keys)) for name, rows in forms.items()}
    for i in range(parts):
        out = {
            n: np.array([part[layer_of(k)] == i for k in rows.keys]) for n, rows in forms.items()
        }
        kept = {n: rows.chosen(~out[n]) for n, rows in forms.items() if not out[n].all()}
        exposed, fits = best_fit(kept)
        for name, which in out.items():
            own = nearest(name, forms) or name
            if which.any() and own in fits:
                rows = forms[name].chosen(which)
                ratio = rows.predicted(fits[own].parameters, exposed) / rows.measured
                errors[name][which] = np.log(ratio)
            else:
                errors[name][which] = np.nan
    return errors


def layer_of(key: str) -> str:
    """A problem's layer: the key without operation, operands and precision."""
    return key.split(" ", 3)[3]


def check(program: pathlib.Path) -> str:
    """A table of the median errors of each form, in the fit and held out."""
    forms = read(program)
    exposed, fits = best_fit(forms)
    unseen = held_out(forms)
    lines = ["form, operations, operands: rows, median abs(log) in the fit, held out"]
    every: dict[str, list[np.ndarray]] = defaultdict(list)
    for name, rows in forms.items():
        parameters = fits[nearest(name, forms) or name].parameters
        ratio = rows.predicted(parameters, exposed) / rows.measured
        pair = np.abs(np.log(ratio)), np.abs(unseen[name])
        every["xla" if is_xla(name) else "kernels"].append(np.array(pair))
        medians = ", ".join(f"{np.nanmedian(each):.3f}" for each in pair)
        lines.append(f"{', '.join(name)}: {len(rows.keys)}, {medians}")
    for side, pairs in every.items():
        medians = np.nanmedian(np.concatenate(pairs, axis=1), axis=1)
        lines.append(f"all of {side}: {', '.join(f'{median:.3f}' for median in medians)}")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Writes the file; returns the exit status."""
    parser = argparse.ArgumentParser(prog="calibrate.py", description=__doc__)
    parser.add_argument("--program", type=pathlib.Path, help="choices_test, if it is compiled")
    parser.add_argument("--check", action="store_true", help="print errors, write nothing")
    chosen = parser.parse_args(argv)
    import bench_problems

    program = chosen.program or bench_problems.built()
    if chosen.check:
        print(check(program))
        return 0
    while (text := calibration(program)) != CALIBRATION.read_text():
        CALIBRATION.write_text(text)
        if chosen.program:
            break
        program = bench_problems.built()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
