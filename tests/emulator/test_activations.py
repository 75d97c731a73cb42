"""Activations and their derivatives on every 16-bit number, infinities and NaN included."""

from __future__ import annotations

import subprocess

import host_build
from emulated import building

ACTIVATION, DERIVATIVE = 1.2e-5, 2e-5  # as activation.cuh and derivative.cuh state


def test_errors_of_every_number():
    with building() as folder:
        program = host_build.build([], folder, host_build.EMULATOR / "activations.cu")
    printed = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout
    lines = [line.split() for line in printed.splitlines()]
    assert len(lines) == 3 * 2 * 5
    for dtype, name, error, *rest in lines:
        most = DERIVATIVE if name.endswith("'") else ACTIVATION
        assert not rest and float(error) <= most, (dtype, name, error, rest)
