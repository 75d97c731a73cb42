"""Fits the predictions of GPUs to measured times, and writes cc/cuda/calibration/<gpu>.def.

    python tools/calibrate.py                  # compiles tests/cc/choices_test.cc, half a minute
    python tools/calibrate.py --program build/choices/choices_test
    python tools/calibrate.py --gpu h100       # of one GPU

The times are those of lax's convolutions and of kernels: an H200's in
``tests/cc/measured_times.tsv``, ``measured_candidates.tsv`` and ``winograd_measured.tsv``, another
GPU's in ``measured_times_<gpu>.tsv``. The program gives the terms of each at the GPU's full rates
(``TimeTerms`` in cc/cuda/common/predicted_time.h), so the fit and the library use the same code.
The prediction of a row of a form is

    fixed + launch + longest + exposed * (sum - longest)

of the terms tensor cores, loads and stores divided by the SM share, and DRAM divided by the DRAM
share. Every form has its own three parameters, at most; all have the same exposed share. A first
fit of each form minimises the robust sum of squares of log(predicted / measured), and weighs most
the rows whose alternatives take about as long, because selection depends on these. A second fit of
all forms together adds what selection loses: for each problem the expected log(chosen / best), if
predictions are off by ``UNCERTAIN``.

The H200 has many rows. Another GPU has few, and the H200's parameters are a prior of its own: both
fits add the squares of log(parameter / the H200's), in units of ``PRIOR``. What the H200's file
does not fit, the exposed share and the forms without rows remain the H200's. A kernel's form that
has too few rows for a line of the H200's begins with the nearest form's. The line that it gets
serves the H200 too if that has fewer rows of it, and all GPUs without a file.

A plan may choose among tilings by its own predictions. The tool therefore fits, compiles and fits
again until the file remains the same; with ``--program`` it fits once. ``calibration_errors.py``
prints how far predictions are off.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests" / "support"))

import measured_times
import numpy as np
from calibration_file import FOOTER, HEADER, SMALL_FOOTER, SMALL_HEADER, like
from scipy.optimize import least_squares, minimize
from selection_program import SelectionProgram

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]

WINOGRAD = REPOSITORY / "tests" / "cc" / "winograd_measured.tsv"
CALIBRATIONS = REPOSITORY / "cc" / "cuda" / "calibration"
BASE = "h200"  # the GPU with the most times

Name = tuple[str, str, str]  # form, operations, operands
Parameters = tuple[float, ...]  # SM share, DRAM share, fixed microseconds

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

# What a parameter of another GPU may differ from the H200's, in the logarithm, until that counts as
# much as an error of ROBUST in a row of full weight. GPUs of one architecture have the same SMs, so
# their shares of the rates are nearly the same. PRIOR_OF_NEAREST: of a form that the H200's file
# does not have, from those of the nearest form.
PRIOR, PRIOR_OF_NEAREST = 0.06, 0.15
# A form with fewer rows gets no line: the few may be of layers that are unlike others.
LEAST_ROWS = 5

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
OWN_ROWS = 22
GATHER, WGRAD = "fprop, dgrad", "wgrad"
NEAREST: dict[Name, Name] = {
    ("igemm_wmma", GATHER, "16-bit"): ("igemm_wmma", GATHER, "tf32"),
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


def read(program: pathlib.Path, gpu: str = BASE) -> Forms:
    """The measured rows of a GPU with their terms, by form."""
    selection = SelectionProgram(program)
    found: dict[Name, list[tuple]] = defaultdict(list)
    for problem, (key, times) in enumerate(measured(gpu)):
        xla_allowed = selection.select(key, "native", gpu)[4] > 0
        for kernel, us in times.items():
            of = kernel
            if kernel != "xla":
                of = f"{measured_times.instance_of(kernel)}/{measured_times.slices_of(kernel)}"
            name, terms = selection.terms(key, of, gpu)
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


def measured(gpu: str) -> list[tuple[str, dict[str, float]]]:
    """Problem keys, and "xla" or a kernel -> microseconds, of all tables of a GPU.

    Winograd's kernels are apart from the others of a problem, because auto does not choose them.
    """
    tables = [measured_times.table_of(gpu)]
    if gpu == BASE:
        tables.append(measured_times.CANDIDATES)
    times: dict[str, dict[str, float]] = {}
    winograd: dict[str, dict[str, float]] = defaultdict(dict)
    for table in tables:
        for key, (lax, kernels) in measured_times.read(table).items():
            of_key = times.setdefault(key, {})
            if lax is not None:
                of_key.setdefault("xla", lax)
            for kernel, us in kernels.items():
                of = winograd[key] if "_winograd_" in kernel else of_key
                of.setdefault(kernel, us)
    if gpu == BASE:
        for line in WINOGRAD.read_text().splitlines():
            key, kernel, us = line.split("\t")
            winograd[key][kernel] = float(us)
    return [*times.items(), *winograd.items()]


def served(program: pathlib.Path, forms: Forms) -> set[Name]:
    """The kernels' forms with so few rows of the H200 that another GPU's line serves it."""
    found = set()
    for gpu in calibrated()[1:]:
        for name, rows in read(program, gpu).items():
            mine = len(forms[name].measured) if name in forms else 0
            if name in NEAREST and not is_xla(name) and mine < OWN_ROWS:
                found |= {name} if len(rows.measured) >= max(LEAST_ROWS, mine + 1) else set()
    return found


def calibrated() -> list[str]:
    """The GPUs that have measured times; first the one on whose file the others depend."""
    others = measured_times.TABLE.parent.glob(f"{measured_times.TABLE.stem}_*.tsv")
    names = (path.stem.removeprefix(f"{measured_times.TABLE.stem}_") for path in others)
    return [BASE, *sorted(names)]


def file_of(gpu: str) -> pathlib.Path:
    """The calibration of a GPU."""
    return CALIBRATIONS / f"{gpu}.def"


def lines_of(gpu: str) -> dict[Name, Parameters]:
    """The parameters of the forms that have a line in the file of a GPU."""
    found = {}
    for words, numbers in re.findall(r'^FORM\(((?:"[^"]*",\s*)+)(.*?)\)', _text(gpu), re.MULTILINE):
        name = tuple(re.findall(r'"([^"]*)"', words))
        given = [float(number) for number in numbers.split(",")]
        found[name] = tuple(given + [1.0, unfitted(name)][len(given) - 1 :])
    return found


def exposed_of(gpu: str) -> float:
    """The exposed share in the file of a GPU."""
    return float(re.search(r"^EXPOSED\((.*)\)", _text(gpu), re.MULTILINE)[1])


def _text(gpu: str) -> str:
    return file_of(gpu).read_text()


@dataclasses.dataclass(frozen=True)
class Prior:
    """What a fit begins from: the forms and the exposed share of another GPU, or nothing."""

    parameters: Mapping[Name, Parameters] = dataclasses.field(default_factory=dict)
    exposed: float | None = None
    of_nearest: frozenset[Name] = frozenset()  # the forms with the parameters of the nearest form

    def width(self, name: Name) -> float:
        """The unit of the differences of a form's parameters."""
        return PRIOR_OF_NEAREST if name in self.of_nearest else PRIOR


NO_PRIOR = Prior()


def prior_of(gpu: str) -> Prior:
    """What the fit of a GPU begins from."""
    if gpu == BASE:
        return NO_PRIOR
    lines = lines_of(BASE)
    near = {
        name: lines[NEAREST[name]]
        for name in NEAREST
        if name not in lines and NEAREST[name] in lines and not is_xla(name)
    }
    return Prior(lines | near, exposed_of(BASE), frozenset(near))


@dataclasses.dataclass
class Fit:
    """Parameters of a form."""

    parameters: Parameters
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


def free_of(name: Name, rows: Rows | None, prior: Parameters | None = None) -> list[bool]:
    """Which of the three parameters are fitted: those of the prior, or what the rows determine."""
    if prior is not None:
        enough = rows is not None and len(rows.measured) >= LEAST_ROWS
        return [enough, enough and prior[1] != 1, enough and prior[2] != unfitted(name)]
    sm, dram = rows.terms[:, :DRAM].max(1), rows.terms[:, DRAM]
    varies = bool(dram.all()) and (sm / dram).max() > SPREAD * (sm / dram).min()
    return [True, bool(varies), fits_fixed(name, rows)]


def rounded(value: float) -> float:
    """As the file has it."""
    return float(f"{value:.3g}")


def fit(name: Name, rows: Rows, exposed: float, begin: Prior = NO_PRIOR) -> Fit:
    """The parameters of a form by least squares."""
    prior = begin.parameters.get(name)
    free = free_of(name, rows, prior)
    if not any(free):
        return Fit(prior, 0)
    low, high = np.log(np.array([SM_SHARE, DRAM_SHARE, FIXED_US]))[free].T
    given = np.log(np.array([1.0, 1.0, unfitted(name)]))

    def parameters(logarithms: np.ndarray) -> np.ndarray:
        every = given.copy()
        every[free] = logarithms
        return np.exp(every)

    def residuals(logarithms: np.ndarray) -> np.ndarray:
        error = np.log(rows.predicted(parameters(logarithms), exposed) / rows.measured)
        robust = 2 * (np.sqrt(1 + (error / ROBUST) ** 2) - 1)
        moved = [] if prior is None else (logarithms - np.log(prior)[free]) / begin.width(name)
        return np.append(np.sqrt(rows.weight * robust), moved)

    starts = np.log(np.array(STARTS))[:, free]
    if prior is not None:
        starts = np.clip(np.log(prior)[free], low, high)[None]
    fits = [
        least_squares(residuals, start, bounds=(low, high), xtol=1e-10, ftol=1e-10)
        for start in starts
    ]
    best = min(fits, key=lambda found: found.cost)
    return Fit(tuple(map(rounded, parameters(best.x))), best.cost)


def nearest(name: Name, forms: Forms, prior: Prior = NO_PRIOR) -> Name | None:
    """The form whose parameters a form takes, if it has too few rows for its own."""
    rows = len(forms[name].measured) if name in forms else 0
    if not prior.parameters:
        few = rows < OWN_ROWS
    elif name in prior.of_nearest:
        few = rows < LEAST_ROWS
    else:
        few = name not in prior.parameters
    return NEAREST.get(name) if few else None


def fit_all(forms: Forms, exposed: float, prior: Prior = NO_PRIOR) -> dict[Name, Fit]:
    """The parameters of all forms that have their own."""
    fits = {}
    for name in sorted({nearest(name, forms, prior) or name for name in forms}):
        before = prior.parameters.get(name)
        if name in forms:
            fits[name] = fit(name, forms[name], exposed, prior)
        elif before is not None:  # only forms that take its parameters have rows
            fits[name] = Fit(before, 0)
    return fits


def first_fit(forms: Forms, prior: Prior = NO_PRIOR) -> tuple[float, dict[Name, Fit]]:
    """The exposed share with the least cost, and the parameters of all forms."""
    shares = EXPOSED if prior.exposed is None else (prior.exposed,)
    fits = {exposed: fit_all(forms, exposed, prior) for exposed in shares}
    exposed = min(shares, key=lambda each: sum(found.cost for found in fits[each].values()))
    return exposed, fits[exposed]


class Choices:
    """All rows of the forms together, and what selection among the rows of a problem loses."""

    def __init__(self, forms: Forms, names: Sequence[Name], prior: Prior = NO_PRIOR):
        """``names``: the forms with parameters, in the order of the logarithms."""
        own = [nearest(name, forms, prior) or name for name in forms]
        weights = [name in prior.parameters and prior.width(name) ** -2 for name in names]
        before = [prior.parameters.get(name, (1.0, 1.0, 1.0)) for name in names]
        self.prior = np.log(before)
        self.prior_weight = np.array(weights, float)[:, None]
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
        moved = logarithms[:-1].reshape(-1, 3) - self.prior
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
        cost += np.sum(self.prior_weight * moved**2)
        gradient += 2 * self.prior_weight * moved
        return cost, np.append(gradient.ravel(), np.sum(slope * others * exposed))


def best_fit(forms: Forms, prior: Prior = NO_PRIOR) -> tuple[float, dict[Name, Fit]]:
    """The exposed share and the parameters of all forms, by both fits."""
    exposed, fits = first_fit(forms, prior)
    names = list(fits)
    choices = Choices(forms, names, prior)
    start = np.log(np.append(np.concatenate([fits[n].parameters for n in names]), exposed))
    bounds = [each for n in names for each in limits(n, forms.get(n), fits[n].parameters, prior)]
    shares = (EXPOSED[0], EXPOSED[-1]) if prior.exposed is None else (prior.exposed,) * 2
    bounds.append(tuple(np.log(shares)))
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


def limits(
    name: Name, rows: Rows | None, first: Parameters, prior: Prior
) -> list[tuple[float, float]]:
    """Bounds of the logarithms of a form's parameters; those that are not fitted stay."""
    free = free_of(name, rows, prior.parameters.get(name))
    ends = (SM_SHARE, DRAM_SHARE, FIXED_US)
    given = [end if may else (v, v) for may, end, v in zip(free, ends, first, strict=True)]
    return [(float(np.log(low)), float(np.log(high))) for low, high in given]


def line(name: Name, rows: Rows | None, found: Fit, exposed: float) -> str:
    """A form's line of the calibration; without the last parameters that are the default."""
    numbers = list(found.parameters)
    if numbers[2] == unfitted(name):
        numbers = numbers[: 1 if numbers[1] == 1 else 2]
    words = [f"{json.dumps(word)}," for word in name]
    text = f"FORM({words[0]:26}{words[1]:17}{words[2]:11}"
    text += ", ".join(f"{value:6.4g}" for value in numbers) + ")"
    if rows is None:
        return f"{text:81}  //   0"
    ratios = rows.predicted(found.parameters, exposed) / rows.measured
    least, median, most = (f"{value:4.2f}" for value in np.quantile(ratios, (0, 0.5, 1)))
    return f"{text:81}  // {len(rows.measured):3} {least} {median} {most}"


def calibration(program: pathlib.Path, gpu: str = BASE) -> str:
    """The text of the file of a GPU."""
    forms, prior = read(program, gpu), prior_of(gpu)
    elsewhere = served(program, forms) if gpu == BASE else set()
    forms = {name: rows for name, rows in forms.items() if name not in elsewhere}
    exposed, fits = best_fit(forms, prior)
    table = measured_times.table_of(gpu)
    facts = "\n".join(f"// {name}: {value}" for name, value in measured_times.facts(table).items())
    if gpu != BASE:
        fits = {n: f for n, f in fits.items() if any(free_of(n, forms.get(n), f.parameters))}
    lines = [line(name, forms.get(name), found, exposed) for name, found in sorted(fits.items())]
    if gpu != BASE:
        text = SMALL_HEADER.format(facts=facts, table=table.name, base=BASE, least_rows=LEAST_ROWS)
        return "\n".join([text.rstrip("\n"), *lines, SMALL_FOOTER])
    text = HEADER.format(facts=facts, rows=ROWS, own_rows=OWN_ROWS, short=SHORT_US)
    text += f"EXPOSED({exposed:g})\nUNFITTED_US({UNFITTED_US:g})\nXLA_US({XLA_US:g})"
    likes = [
        like(name, near)
        for name in NEAREST
        if name not in elsewhere and (near := nearest(name, forms))
    ]
    return "\n".join([text, *lines, *likes, FOOTER])


def options(argv: Sequence[str], name: str, description: str | None) -> argparse.Namespace:
    """The options of a tool for calibrations: ``gpus``, and ``program`` if it is compiled."""
    parser = argparse.ArgumentParser(prog=name, description=description)
    parser.add_argument("--gpu", choices=calibrated(), help="of this GPU; default: of all")
    parser.add_argument("--program", type=pathlib.Path, help="choices_test, if it is compiled")
    chosen = parser.parse_args(argv)
    chosen.gpus = [chosen.gpu] if chosen.gpu else calibrated()
    return chosen


def main(argv: Sequence[str]) -> int:
    """Writes the files; returns the exit status."""
    import bench_problems

    chosen = options(argv, "calibrate.py", __doc__)
    program = chosen.program or bench_problems.built()
    for gpu in chosen.gpus:
        file = file_of(gpu)
        while (text := calibration(program, gpu)) != (file.read_text() if file.exists() else ""):
            file.write_text(text)
            if chosen.program:
                break
            program = bench_problems.built()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
