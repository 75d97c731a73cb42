"""The CUDA programs of tests/cc, compiled with nvcc and run, where there are nvcc and a GPU."""

from __future__ import annotations

import pathlib
import shutil
import subprocess

import pytest

TESTS = pathlib.Path(__file__).parent
CC = TESTS.parent / "cc"
PROGRAMS = sorted((TESTS / "cc").glob("*_test.cu"))


def test_there_are_programs():
    assert {program.name for program in PROGRAMS} >= {"fused_epilogue_test.cu"}


@pytest.mark.gpu
@pytest.mark.parametrize("program", PROGRAMS, ids=[p.stem for p in PROGRAMS])
def test_program(program, tmp_path):
    compiler = shutil.which("nvcc")
    if compiler is None:
        pytest.skip("nvcc is not on PATH")
    binary = tmp_path / program.stem
    command = [
        *(compiler, "-std=c++17", "-O1", "-DNDEBUG", "-arch=native"),
        *("-I", str(CC), str(program), str(CC / "core" / "conv_problem.cc"), "-o", str(binary)),
    ]
    built = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert built.returncode == 0, f"{' '.join(command)}\n{built.stderr[-8000:]}"
    ran = subprocess.run([str(binary)], capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, f"{program.name}:\n{(ran.stdout + ran.stderr)[-8000:]}"
