"""The calibration of predicted times, and how many numbers the predictions have beside it."""

from __future__ import annotations

import importlib
import itertools
import pathlib
import re

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
CC = REPOSITORY / "cc"


@pytest.fixture
def calibrate(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "tools"))
    return importlib.import_module("calibrate")


def test_the_calibration_is_what_the_tool_writes(calibrate, choices_program):
    written = calibrate.CALIBRATION.read_text()
    assert calibrate.calibration(choices_program) == written, "python tools/calibrate.py"


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
    rows = calibrate.Rows(["a"] * 20, None, None, [1.0] * 20, None)
    assert calibrate.nearest(name, {}) == near
    assert calibrate.nearest(name, {name: rows}) is None
    # None of them is nearest to a form that has no parameters of its own.
    assert not set(calibrate.NEAREST.values()) & set(calibrate.NEAREST)


def lines_of(calibrate) -> dict[tuple[str, ...], tuple[float, ...]]:
    """Form, operations and operands -> their parameters, as the library reads the file."""
    text = calibrate.CALIBRATION.read_text()
    found = {}
    for line in re.findall(r"^FORM\((.*?)\)", text, re.MULTILINE):
        numbers = tuple(float(n) for n in NUMBER.findall(re.sub(r'"[^"]*"', "", line)))
        name = tuple(re.findall(r'"([^"]*)"', line))
        defaults = (1.0, calibrate.unfitted(name))[len(numbers) - 3 :] if len(numbers) < 3 else ()
        found[name] = numbers + defaults
    for like in re.findall(r"^LIKE\((.*?)\)", text, re.MULTILINE):
        words = re.findall(r'"([^"]*)"', like)
        found[tuple(words[:3])] = found[tuple(words[3:])]
    return found


def test_the_rule_is_the_librarys(calibrate, choices_program):
    import numpy as np

    exposed = float(re.search(r"^EXPOSED\((.*)\)", calibrate.CALIBRATION.read_text(), re.M)[1])
    lines = lines_of(calibrate)
    selection = calibrate.SelectionProgram(choices_program)
    asked = {
        "fprop bf16:bf16:bf16 default b1 n8 g1 c64 k64 i28x28 f3x3 o28x28 s1x1 l1x1 d1x1 p1_1x1_1",
        "wgrad f32:f32:f32 highest b1 n64 g1 c256 k64 i56x56 f1x1 o56x56 s1x1 l1x1 d1x1 p0_0x0_0",
        "dgrad f32:f32:f32 default b1 n64 g64 c64 k64 i56x56 f3x3 o56x56 s1x1 l1x1 d1x1 p1_1x1_1",
    }
    for key in asked:
        instance, _, slices, ours, xla, _ = selection.select(key, "native", calibrate.TARGET)
        for of, microseconds in ((f"{instance}/{slices}", ours), ("xla", xla)):
            name, terms = selection.terms(key, of, calibrate.TARGET)
            if name[0]:
                row = calibrate.Rows(
                    [key], None, np.array([terms]), np.array([1.0]), np.array([1.0])
                )
                assert row.predicted(lines[name], exposed)[0] == pytest.approx(microseconds, 1e-3)


# Numbers of the calibration; and literals that reach a double in the sources that plan and predict,
# fractions alone and with integers. All may only fall.
MOST_PARAMETERS = 149
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


def test_the_calibration_gets_no_more_parameters(calibrate):
    begins = ("EXPOSED", "UNFITTED_US", "XLA_US", "FORM")
    lines = [x for x in calibrate.CALIBRATION.read_text().splitlines() if x.startswith(begins)]
    numbers = [NUMBER.findall(re.sub(r'//.*|"[^"]*"', "", line)) for line in lines]
    assert all(len(found) <= 3 for found in numbers)
    assert sum(map(len, numbers)) <= MOST_PARAMETERS
