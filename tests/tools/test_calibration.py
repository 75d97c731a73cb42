"""The calibration of predicted times, and how many numbers the predictions have beside it."""

from __future__ import annotations

import importlib
import itertools
import pathlib
import re

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
CC = REPOSITORY / "cc"
PREDICTED_TIME = CC / "cuda" / "common" / "predicted_time.cc"


@pytest.fixture
def calibrate(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "tools"))
    return importlib.import_module("calibrate")


def test_the_calibrations_are_what_the_tool_writes(calibrate, choices_program):
    files = {path.stem for path in (CC / "cuda" / "calibration").glob("*.def")} - {"gpus"}
    assert files == set(calibrate.calibrated()), "each has its table of measured times"
    for gpu in calibrate.calibrated():
        written = calibrate.file_of(gpu).read_text()
        assert calibrate.calibration(choices_program, gpu) == written, "python tools/calibrate.py"
        assert f'#include "cuda/calibration/{gpu}.def"' in PREDICTED_TIME.read_text()


def test_a_form_with_few_rows_fits_less(calibrate):
    import numpy as np

    def rows(count: int, products: np.ndarray) -> object:
        dram = np.linspace(10.0, 20.0, count)
        terms = np.stack([products, 0 * dram, 0 * dram, dram, 0 * dram], axis=1)
        return calibrate.Rows([], None, terms, 5 + products / 0.5 + dram / 0.8, 0 * dram + 1)

    few = calibrate.fit(("few",), rows(6, np.linspace(1.0, 90.0, 6)), 0.2)
    assert few.parameters[2] == calibrate.UNFITTED_US and few.parameters[1] != 1
    proportional = calibrate.fit(("proportional",), rows(30, np.linspace(10.0, 20.0, 30)), 0.2)
    assert proportional.parameters[2] != calibrate.UNFITTED_US and proportional.parameters[1] == 1


def test_chosen_rows_keep_all_columns(calibrate):
    import numpy as np

    rows = calibrate.Rows(["a", "b"], *(np.arange(2) for _ in range(5)))
    chosen = rows.chosen(np.array([False, True]))
    assert chosen.keys == ["b"]
    columns = chosen.problem, chosen.terms, chosen.measured, chosen.weight, chosen.allowed
    assert all(column.tolist() == [1] for column in columns)


def test_a_form_takes_the_parameters_of_the_nearest(calibrate):
    near = calibrate.NEAREST[name := next(iter(calibrate.NEAREST))]
    rows = calibrate.Rows(["a"] * calibrate.OWN_ROWS, None, None, [1.0] * calibrate.OWN_ROWS, None)
    assert calibrate.nearest(name, {}) == near
    assert calibrate.nearest(name, {name: rows}) is None
    # None of them is nearest to a form that has no parameters of its own.
    assert not set(calibrate.NEAREST.values()) & set(calibrate.NEAREST)


def test_the_rule_is_the_librarys(calibrate, choices_program):
    import numpy as np

    exposed = calibrate.exposed_of(calibrate.BASE)
    selection = calibrate.SelectionProgram(choices_program)
    asked = {
        "fprop bf16:bf16:bf16 default b1 n8 g1 c64 k64 i28x28 f3x3 o28x28 s1x1 l1x1 d1x1 p1_1x1_1",
        "wgrad f32:f32:f32 highest b1 n64 g1 c256 k64 i56x56 f1x1 o56x56 s1x1 l1x1 d1x1 p0_0x0_0",
        "dgrad f32:f32:f32 default b1 n64 g64 c64 k64 i56x56 f3x3 o56x56 s1x1 l1x1 d1x1 p1_1x1_1",
    }
    for gpu, key in itertools.product({"a100", *calibrate.calibrated()}, asked):
        own = calibrate.lines_of(gpu) if gpu in calibrate.calibrated() else {}
        lines = calibrate.lines_of(calibrate.BASE) | own
        instance, _, slices, ours, xla, _ = selection.select(key, "native", gpu)
        for of, microseconds in ((f"{instance}/{slices}", ours), ("xla", xla)):
            name, terms = selection.terms(key, of, gpu)
            if name in lines:
                row = calibrate.Rows(
                    [key], None, np.array([terms]), np.array([1.0]), np.array([1.0])
                )
                assert row.predicted(lines[name], exposed)[0] == pytest.approx(microseconds, 1e-3)


# --- a GPU with few times -------------------------------------------------------------------------

FORM, OTHER = ("a", "fprop, dgrad", "16-bit"), ("b", "wgrad", "16-bit")


def rows_of(calibrate, parameters, count, exposed=0.2, problem=0):
    """Rows whose times are those of given parameters."""
    import numpy as np

    terms = np.stack([np.linspace(5, 90, count), *np.zeros((2, count)), np.linspace(60, 5, count)])
    terms = np.append(terms, np.full((1, count), 1.7), axis=0).T
    each = np.ones(count)
    problems = np.arange(problem, problem + count)
    rows = calibrate.Rows(["key"] * count, problems, terms, each, each, each > 0)
    rows.measured = rows.predicted(parameters, exposed)
    return rows


def test_few_rows_move_the_prior_as_far_as_they_agree(calibrate):
    import numpy as np

    before, truth = (0.8, 0.9, 3.0), (0.6, 0.72, 3.0)
    prior = calibrate.Prior({FORM: before, OTHER: before}, 0.2)

    def shares(count):
        forms = {FORM: rows_of(calibrate, truth, count)}
        exposed, fits = calibrate.best_fit(forms, prior)
        assert exposed == 0.2 and set(fits) == {FORM}
        assert fits[FORM].parameters[2] == 3.0  # the prior's file does not fit it
        return np.array(fits[FORM].parameters[:2])

    off = [np.abs(np.log(shares(count) / truth[:2])).max() for count in (5, 20, 80)]
    assert off[0] > off[1] > off[2] and off[2] < 0.02
    same = calibrate.best_fit({FORM: rows_of(calibrate, before, 5)}, prior)[1]
    assert same[FORM].parameters == before
    assert shares(calibrate.LEAST_ROWS - 1).tolist() == list(before[:2])


def test_what_has_no_rows_keeps_the_prior(calibrate):
    name, near = next(iter(calibrate.NEAREST.items()))
    before = (0.8, 0.9, 3.0)
    forms = {name: rows_of(calibrate, (0.6, 0.9, 3.0), 30)}
    fits = calibrate.best_fit(forms, calibrate.Prior({near: before, OTHER: before}, 0.2))[1]
    assert {form: found.parameters for form, found in fits.items()} == {near: before}


def test_a_form_without_a_line_begins_with_the_nearest(calibrate):
    name, near = next(iter(calibrate.NEAREST.items()))
    before = (0.8, 0.9, 3.0)
    prior = calibrate.Prior({near: before, name: before}, 0.2, frozenset({name}))
    wide, narrow = (
        calibrate.best_fit({form: rows_of(calibrate, (0.6, 0.9, 3.0), 6)}, prior)[1][form]
        for form in (name, near)
    )
    assert wide.parameters[0] < narrow.parameters[0] < before[0]


def test_a_gpu_with_few_times_gets_a_file(calibrate, choices_program, monkeypatch, tmp_path):
    times = calibrate.measured_times
    table = tmp_path / "measured_times_h100.tsv"
    monkeypatch.setattr(times, "table_of", lambda gpu: table if gpu == "h100" else times.TABLE)
    # Every memory-bound kernel of a few layers takes 1.43 times as long as on an H200.
    rows = dict(list(times.read(times.TABLE).items())[::25])
    slower = {
        key: (lax and 1.43 * lax, {kernel: 1.43 * us for kernel, us in kernels.items()})
        for key, (lax, kernels) in rows.items()
    }
    times.write(table, slower, {"gpu": "NVIDIA H100", "driver": "1", "commit": "abc"})
    text = calibrate.calibration(choices_program, "h100")
    assert "// gpu: NVIDIA H100" in text and "EXPOSED(" not in text and "LIKE(" not in text
    forms = calibrate.read(choices_program, "h100")
    (tmp_path / "h100.def").write_text(text)
    monkeypatch.setattr(calibrate, "CALIBRATIONS", tmp_path)
    found = calibrate.lines_of("h100")
    monkeypatch.undo()
    before = calibrate.prior_of("h100").parameters
    assert set(found) < set(before), "only forms with rows"
    for name, parameters in found.items():
        fitted = calibrate.free_of(name, forms[name], before[name])
        same = [a == b for a, b in zip(parameters, before[name], strict=True)]
        assert all(is_same for is_same, free in zip(same, fitted, strict=True) if not free)


def test_another_gpus_line_serves_forms_with_few_rows(calibrate, choices_program):
    forms = calibrate.read(choices_program)
    served = calibrate.served(choices_program, forms)
    assert served and served < set(calibrate.NEAREST)
    assert served < set(calibrate.lines_of("h100")) - set(calibrate.lines_of(calibrate.BASE))
    text = calibrate.file_of(calibrate.BASE).read_text()
    assert not any(calibrate.like(name, calibrate.NEAREST[name]) in text for name in served)


def test_errors_are_of_the_fit_and_of_the_prior(calibrate):
    import numpy as np

    errors = importlib.import_module("calibration_errors")
    prior = calibrate.Prior({FORM: (0.8, 0.9, 3.0), OTHER: (0.5, 0.9, 3.0)}, 0.2)
    forms = {FORM: rows_of(calibrate, (0.6, 0.9, 3.0), 12)}
    exposed, fits = calibrate.best_fit(forms, prior)
    found = {name: each.parameters for name, each in fits.items()}
    off = [
        np.abs(errors.errors_of(FORM, forms, forms[FORM], each, exposed, prior)).mean()
        for each in (found, {})
    ]
    assert off[0] < 0.02 < 0.1 < off[1]
    # A second kernel of the same problems, which the prior believes to be slower than it is.
    forms[OTHER] = rows_of(calibrate, (0.7, 0.9, 3.0), 12)
    loss, problems = errors.mean_loss(forms, {}, exposed, prior)
    assert problems == 12 and 0.05 < loss < 0.2
    found = {name: each.parameters for name, each in calibrate.best_fit(forms, prior)[1].items()}
    assert errors.mean_loss(forms, found, exposed, prior) == (0, 12)


def test_no_fit_sees_the_unseen_problems(calibrate):
    unseen = importlib.import_module("unseen_problems").problems()
    assert len(unseen) == 150
    for gpu in calibrate.calibrated():
        assert not {key for key, _ in calibrate.measured(gpu)} & set(unseen)


# Numbers of the calibration; and literals that reach a double in the sources that plan and predict,
# fractions alone and with integers. All may only fall.
MOST_PARAMETERS = 150
MOST_FRACTIONS = 38
MOST_LITERALS = 72

NUMBER = re.compile(r"(?<![\w.])\d[\d']*(?:\.\d*)?(?:e[+-]?\d+)?(?![\w.])")
# 0, 1, 2, and units.
EXEMPT = {0, 1, 2, 1e3, 1e6}


def literals(text: str) -> list[str]:
    """The literals of a C++ source that reach a double, but those that are exempt.

    All fractions, and the integers of every statement that names a double.
    """
    code = re.sub(r'//.*|"[^"\n]*"|^\s*#.*', "", text, flags=re.MULTILINE)
    found = []
    for statement in re.split("[;{}]", code):
        numbers = NUMBER.findall(statement)
        if not re.search(r"\bdouble\b", statement):
            numbers = [number for number in numbers if is_fraction(number)]
        found += [n for n in numbers if float(n.replace("'", "")) not in EXEMPT]
    return found


def is_fraction(number: str) -> bool:
    """Whether it is spelled as a floating-point literal."""
    return bool(re.search("[.e]", number))


def test_literals_are_found():
    text = """
    #include "cuda/calibration/h200.def"
    constexpr double kShare = 0.83, kUs = 1.0;  // 3.99 of 4.8 TB/s
    constexpr int64_t kRate = 140'000, kHalf = kRate / 2;
    us += 3e-1 * x32 / 1e3 + tile[16];
    const double bytes = 4 * static_cast<double>(elements);
    """
    assert literals(text) == ["0.83", "3e-1", "4"]


def test_predictions_get_no_more_numbers():
    sources = [p for p in sorted((CC / "cuda").rglob("*")) if p.suffix in (".cc", ".h")]
    counts = {p.relative_to(CC).as_posix(): literals(p.read_text()) for p in sources}
    found = list(itertools.chain.from_iterable(counts.values()))
    most = sorted(((len(n), name) for name, n in counts.items() if n), reverse=True)
    advice = f"derive or fit them (tools/calibrate.py), or name a rate in common/rates.h: {most}"
    assert sum(map(is_fraction, found)) <= MOST_FRACTIONS, advice
    assert len(found) <= MOST_LITERALS, advice


def test_no_calibration_gets_more_parameters(calibrate):
    begins = ("EXPOSED", "UNFITTED_US", "XLA_US", "FORM")
    for gpu in calibrate.calibrated():
        lines = [x for x in calibrate.file_of(gpu).read_text().splitlines() if x.startswith(begins)]
        numbers = [NUMBER.findall(re.sub(r'//.*|"[^"]*"', "", line)) for line in lines]
        assert all(len(found) <= 3 for found in numbers)
        assert sum(map(len, numbers)) <= MOST_PARAMETERS
