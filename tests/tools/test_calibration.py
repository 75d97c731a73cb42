"""The calibration of predicted times, and how many numbers the predictions have beside it."""

from __future__ import annotations

import importlib
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


def test_a_class_with_few_rows_fits_less(calibrate):
    import numpy as np

    def rows(count: int, compute: np.ndarray) -> object:
        memory = np.linspace(10.0, 20.0, count)
        lax = 5 + compute / 0.5 + memory / 0.8
        return calibrate.Rows(compute, memory, 0 * memory, lax, 0 * memory + 1)

    few = calibrate.fit(rows(6, np.linspace(1.0, 90.0, 6)), 3.25)
    assert few.parameters[0] == calibrate.UNFITTED_US and few.parameters[2] != 1
    proportional = calibrate.fit(rows(20, np.linspace(10.0, 20.0, 20)), 3.25)
    assert proportional.parameters[0] != calibrate.UNFITTED_US and proportional.parameters[2] == 1


# Numbers of the calibration, and floating-point literals of the sources that plan and predict, by
# file of cc/cuda. Both may only fall.
MOST_PARAMETERS = 103
MOST_LITERALS = {
    "block_diagonal/plan.cc": 9,
    "block_diagonal/rows_plan.cc": 2,
    "block_diagonal/runs_plan.cc": 8,
    "common/gpu.cc": 20,
    "common/halo_box.cc": 1,
    "common/merge_moments.cc": 1,
    "common/padded_channels.cc": 2,
    "common/pass.cc": 1,
    "common/xla_cost.cc": 4,
    "depthwise/hankel_plan.cc": 4,
    "depthwise/pairs_plan.cc": 5,
    "depthwise/plan.cc": 17,
    "depthwise/toeplitz_plan.cc": 5,
    "depthwise/toeplitz_wgmma_plan.cc": 2,
    "depthwise/walk_plan.cc": 5,
    "depthwise_int8/plan.cc": 3,
    "few_channels/cost.cc": 15,
    "few_channels/plan.cc": 2,
    "few_channels/rows_plan.cc": 3,
    "igemm_simt/plan.cc": 5,
    "igemm_wgmma/cost.cc": 39,
    "igemm_wgmma/plan.cc": 15,
    "igemm_wmma/cost.cc": 8,
    "igemm_wmma/plan.cc": 3,
    "imma_few_channels/plan.cc": 4,
    "imma_nchw32/plan.cc": 8,
    "imma_wgmma/plan.cc": 24,
    "normalisation/plan.cc": 1,
    "select.cc": 3,
    "winograd/form_plan.cc": 7,
    "winograd/four_stage_plan.cc": 3,
    "winograd/fused_row_plan.cc": 2,
    "winograd/pkf_plan.cc": 2,
    "winograd/products_plan.cc": 2,
    "winograd_int8/plan.cc": 7,
}
# All literals of the file that predicts XLA's time.
MOST_IN_XLA_COST = 19

NUMBER = re.compile(r"(?<![\w.])\d[\d']*(?:\.\d*)?(?:e[+-]?\d+)?(?![\w.])")
# 0, 1, 2, and units.
EXEMPT = {0, 1, 2, 1e3, 1e6}


def literals(text: str) -> list[str]:
    """The decimal literals of a C++ source but those that are exempt."""
    code = re.sub(r'//.*|"[^"\n]*"|^\s*#.*', "", text, flags=re.MULTILINE)
    found = NUMBER.findall(code)
    return [number for number in found if float(number.replace("'", "")) not in EXEMPT]


def test_literals_are_found():
    text = """
    #include "cuda/calibration/h200.def"
    constexpr double kShare = 0.83, kUs = 1.0;  // 3.99 of 4.8 TB/s
    constexpr int64_t kRate = 140'000, kHalf = kRate / 2;
    us += 3e-1 * x32 / 1e3 + tile[16];
    """
    assert literals(text) == ["0.83", "140'000", "3e-1", "16"]


def test_predictions_get_no_more_numbers():
    counts = {}
    for source in sorted((CC / "cuda").rglob("*.cc")):
        found = [number for number in literals(source.read_text()) if re.search(r"[.e]", number)]
        if found:
            counts[source.relative_to(CC / "cuda").as_posix()] = len(found)
    grown = {name: n for name, n in counts.items() if n > MOST_LITERALS.get(name, 0)}
    assert not grown, "derive or fit them (tools/calibrate.py), or give them a name and a source"
    assert len(literals((CC / "cuda" / "common" / "xla_cost.cc").read_text())) <= MOST_IN_XLA_COST


def test_the_calibration_gets_no_more_parameters(calibrate):
    lines = [x for x in calibrate.CALIBRATION.read_text().splitlines() if x.startswith("XLA")]
    numbers = [NUMBER.findall(re.sub(r'//.*|"[^"]*"', "", line)) for line in lines]
    assert all(len(found) <= 3 for found in numbers)
    assert sum(map(len, numbers)) <= MOST_PARAMETERS
