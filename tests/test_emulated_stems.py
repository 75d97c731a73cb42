"""The kernels of stems of stride 2 in the emulator: exact, and NaN stays in its windows."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import pytest
from problems import DTYPES, problem

from jaxconv._src.spec import Op

sys.path.insert(0, str(pathlib.Path(__file__).parent / "emulator"))
import host_build

INSTANCES = [
    "fprop_few_channels_bf16_7x7_stride2",
    "fprop_few_channels_f16_3x3_stride2",
    "dgrad_few_channels_bf16_7x7_stride2",
]
# Strips, batches and parts of 64 output channels; paddings of both parities, and one that cuts x.
BATCHED = problem(
    "batched", (18, 24), 7, n=2, c=4, k=56, stride=2, padding=((2, 3), (4, 2)), batch=2
)
STRIPS = problem("strips", (12, 240), 7, n=1, c=3, k=64, stride=2, padding=3)
CASES = [
    (INSTANCES[0], BATCHED),
    (INSTANCES[0], STRIPS),
    (INSTANCES[0], problem("parts", (15, 64), 7, n=1, c=1, k=136, stride=2, padding=3)),
    (INSTANCES[0], problem("cut", (21, 36), 7, c=2, k=64, stride=2, padding=((-2, 0), (-1, -1)))),
    (
        INSTANCES[1],
        problem("3x3", (22, 232), 3, n=1, c=3, k=72, stride=2, padding=((0, 1), (0, 1))),
    ),
    (INSTANCES[0], problem("bands", (28, 232), 7, c=2, stride=2, padding=((0, 1), 0), batch=2)),
    (INSTANCES[1], problem("bands", (28, 232), 3, n=3, c=2, stride=2, padding=((1, 0), (1, 0)))),
    (INSTANCES[2], problem("bands", (28, 232), 7, n=3, c=1, stride=2, k=8, padding=(3, (2, 3)))),
    (INSTANCES[2], BATCHED),
    (INSTANCES[2], STRIPS),
    (INSTANCES[2], problem("cut", (21, 36), 7, c=2, k=64, stride=2, padding=((-2, 0), (-1, -1)))),
]


@pytest.fixture(scope="module")
def program() -> pathlib.Path:
    """run_kernels with INSTANCES."""
    if host_build.compiler() is None:
        pytest.skip("no C++ compiler: none of g++, c++ and clang++ is on PATH")
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        pytest.skip("the emulator switches its threads' stacks in x86-64 assembly for Linux")
    folder = pathlib.Path(tempfile.gettempdir()) / f"jaxconv-emulator-{os.getuid()}"
    return host_build.build(INSTANCES, folder)


def run(program: pathlib.Path, instance: str, key: str, *options: str) -> None:
    command = [str(program), instance, key, *options]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, f"{command}\n{ran.stdout}{ran.stderr}"


@pytest.mark.parametrize("instance, of", CASES, ids=lambda c: c if isinstance(c, str) else c.name)
def test_rows_are_exact(program, instance, of):
    """Bands of rows begin and end anywhere, rings wrap, and threads run in any order."""
    key = of.line(Op(instance[:5]), instance.split("_")[3])
    for seed, sms in ((1, 2), (1, 9), (2, 20)):
        run(program, instance, key, f"seed={seed}", f"sms={sms}")


@pytest.mark.parametrize(
    "instance, size, window, pad",
    [
        ("fprop_few_channels_bf16_7x7_stride2", (20, 24), 7, 3),
        ("fprop_few_channels_f16_3x3_stride2", (20, 24), 3, 1),
        ("dgrad_few_channels_bf16_7x7_stride2", (20, 24), 7, 3),
        ("dgrad_few_channels_bf16_7x7_stride2", (19, 26), 7, 2),
    ],
)
def test_nan_and_infinity_stay_in_their_windows(program, instance, size, window, pad, tmp_path):
    """No pixel beside a window meets a zero of the filter, no infinite weight the padding of dy."""
    fprop, dtype = instance.startswith("fprop"), instance.split("_")[3]
    of = problem("nan", size, window, c=3, k=16, stride=2, padding=pad)
    rng = np.random.default_rng(3)
    x, w, y = (np.zeros(of.canonical_shape(role)) for role in "xwy")
    source, out = (x, y) if fprop else (y, x)
    w[...] = rng.integers(-2, 3, w.shape)
    w[1, 2, 0, 5] = np.inf
    source[...] = rng.integers(1, 3, source.shape)
    source[0, 0, 0, 0], source[-1, -1, -1, -1], source[1, 4, 7, 1] = np.inf, np.nan, np.nan
    given = source.copy()
    for r, s, p, q in np.ndindex(window, window, *y.shape[1:3]):
        h, v = 2 * p + r - pad, 2 * q + s - pad
        inside = 0 <= h < size[0] and 0 <= v < size[1]
        with np.errstate(invalid="ignore"):
            if fprop:
                pixel = given[:, h, v] if inside else np.zeros((2, 3))
                out[:, p, q] += (pixel[:, :, None] * w[r, s]).sum(1)
            elif inside:
                out[:, h, v] += (given[:, p, q, None] * w[r, s]).sum(2)
    (tmp_path / "lhs").write_bytes(given.astype(DTYPES[dtype][0]).tobytes())
    (tmp_path / "rhs").write_bytes(w.astype(DTYPES[dtype][0]).tobytes())
    files = [f"{name}={tmp_path / name}" for name in ("lhs", "rhs", "out")]
    run(program, instance, of.line(Op(instance[:5]), dtype), *files, "sms=3")
    actual = np.frombuffer((tmp_path / "out").read_bytes(), DTYPES[dtype][0]).reshape(out.shape)
    np.testing.assert_array_equal(actual.astype(float), out)
