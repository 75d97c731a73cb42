"""Prints how far the predictions of GPUs are off, and what selection loses.

    python tools/calibration_errors.py         # compiles tests/cc/choices_test.cc, half a minute
    python tools/calibration_errors.py --gpu h100 --program build/choices/choices_test

The times are those that ``calibrate.py`` fits. For each form: the median of
abs(log(predicted / measured)) in the fit and of layers held out of it, and with the H200's file
scaled by the GPU's rates. The last line has the mean loss of auto among the measured rows of a
problem: in the fit, and with the H200's file.
"""

from __future__ import annotations

import pathlib
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence

import bench_problems
import numpy as np
from calibrate import (
    BASE,
    NO_PRIOR,
    XLA_SHARE,
    Forms,
    Name,
    Parameters,
    Prior,
    Rows,
    best_fit,
    is_xla,
    nearest,
    options,
    prior_of,
    read,
)


def held_out(forms: Forms, prior: Prior = NO_PRIOR, parts: int = 5) -> dict[Name, np.ndarray]:
    """log(predicted / measured) of every row, by the fit of the layers of the other parts."""
    layers = sorted({layer_of(key) for rows in forms.values() for key in rows.keys})
    part = {layer: i % parts for i, layer in enumerate(layers)}
    errors = {name: np.zeros(len(rows.keys)) for name, rows in forms.items()}
    for i in range(parts):
        out = {
            n: np.array([part[layer_of(k)] == i for k in rows.keys]) for n, rows in forms.items()
        }
        kept = {n: rows.chosen(~out[n]) for n, rows in forms.items() if not out[n].all()}
        exposed, fits = best_fit(kept, prior)
        found = {name: each.parameters for name, each in fits.items()}
        for name, which in out.items():
            rows = forms[name].chosen(which)
            errors[name][which] = errors_of(name, forms, rows, found, exposed, prior)
    return errors


def errors_of(
    name: Name,
    forms: Forms,
    rows: Rows,
    found: Mapping[Name, Parameters],
    exposed: float,
    prior: Prior,
) -> np.ndarray:
    """log(predicted / measured) of rows of a form by the parameters of all; nan without its own."""
    own = nearest(name, forms, prior) or name
    parameters = found.get(own, prior.parameters.get(own))
    if parameters is None:
        return np.full(len(rows.keys), np.nan)
    return np.log(rows.predicted(parameters, exposed) / rows.measured)


def mean_loss(
    forms: Forms, found: Mapping[Name, Parameters], exposed: float, prior: Prior
) -> tuple[float, int]:
    """What auto loses by choosing among the measured rows: a mean, and of how many problems."""
    rows: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for name, of_form in forms.items():
        errors = errors_of(name, forms, of_form, found, exposed, prior)
        score = of_form.measured * np.exp(errors) / (XLA_SHARE if is_xla(name) else 1)
        columns = of_form.problem, score, of_form.measured, of_form.allowed
        for problem, *each, allowed in zip(*columns, strict=True):
            if allowed:
                rows[problem].append(tuple(each))
    several = [each for each in rows.values() if len(each) > 1]
    losses = [min(each)[1] / min(us for _, us in each) - 1 for each in several]
    return float(np.mean(losses)), len(losses)


def layer_of(key: str) -> str:
    """A problem's layer: the key without operation, operands and precision."""
    return key.split(" ", 3)[3]


def check(program: pathlib.Path, gpu: str = BASE) -> str:
    """The table of a GPU."""
    forms, prior = read(program, gpu), prior_of(gpu)
    exposed, fits = best_fit(forms, prior)
    found = {name: each.parameters for name, each in fits.items()}
    unseen = held_out(forms, prior)
    columns = ["in the fit", "held out"] + [f"by {BASE}.def, scaled"] * (gpu != BASE)
    lines = [f"form, operations, operands: rows, median abs(log) {', '.join(columns)}"]
    every: dict[str, list[np.ndarray]] = defaultdict(list)
    for name, rows in forms.items():
        errors = [errors_of(name, forms, rows, found, exposed, prior), unseen[name]]
        if gpu != BASE:
            errors.append(errors_of(name, forms, rows, {}, exposed, prior))
        table = np.abs(errors)
        every["xla" if is_xla(name) else "kernels"].append(table)
        medians = ", ".join(f"{np.nanmedian(each):.3f}" for each in table)
        lines.append(f"{', '.join(name)}: {len(rows.keys)}, {medians}")
    for side, tables in every.items():
        medians = np.nanmedian(np.concatenate(tables, axis=1), axis=1)
        lines.append(f"all of {side}: {', '.join(f'{median:.3f}' for median in medians)}")
    losses = [mean_loss(forms, found, exposed, prior)]
    if gpu != BASE:
        losses.append(mean_loss(forms, {}, exposed, prior))
    means = ", ".join(f"{100 * loss:.2f} %" for loss, _ in losses)
    lines.append(f"mean loss of auto among {losses[0][1]} problems: {means}")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Prints the tables; returns the exit status."""
    chosen = options(argv, "calibration_errors.py", __doc__)
    program = chosen.program or bench_problems.built()
    for gpu in chosen.gpus:
        print(f"{gpu}\n{check(program, gpu)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
