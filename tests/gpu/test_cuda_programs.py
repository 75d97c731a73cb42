"""Compiles the CUDA programs of tests/cc with nvcc and runs them, if there are nvcc and a GPU.

Programs named ``_sm90_test`` are compiled for sm_90a and return 77 on any other GPU.
"""

from __future__ import annotations

import shutil
import subprocess

import pytest
from cc_programs import CC, TESTS, sources
from worker_order import long_first

PROGRAMS = sorted((TESTS / "cc").glob("*_test.cu"))

SKIPPED = 77


def test_there_are_programs():
    names = {program.name for program in PROGRAMS}
    assert names >= {"fused_igemm_wmma_test.cu", "fused_gather_sm90_test.cu"}


@pytest.mark.parametrize("workers", [2, 3, 4, 16])
@pytest.mark.parametrize(("count", "longs"), [(1, {0}), (3, {1, 2}), (40, {17, 18}), (16, {3, 9})])
def test_long_tests_begin_at_once(count, longs, workers):
    order = long_first(list(range(count)), [i in longs for i in range(count)], workers)
    assert sorted(order) == list(range(count))
    at, begins = 0, []
    for worker in range(workers):  # the parts that xdist gives to each worker
        begins += order[at : at + 1]
        at += (count - at) // (workers - worker)
    assert count < workers or longs <= set(begins)


@pytest.mark.gpu
@pytest.mark.long
@pytest.mark.parametrize("program", PROGRAMS, ids=[p.stem for p in PROGRAMS])
def test_program(program, tmp_path):
    compiler = shutil.which("nvcc")
    if compiler is None:
        pytest.skip("nvcc is not on PATH")
    sm90 = program.stem.endswith("_sm90_test")
    architecture = "-gencode=arch=compute_90a,code=sm_90a" if sm90 else "-arch=native"
    endings = (".cc", ".cu", "_sm90.cu") if sm90 else (".cc", ".cu")
    binary = tmp_path / program.stem
    command = [
        # Compiles units, and the functions of a unit, in parallel on all cores.
        *(compiler, "-std=c++17", "-O1", "-DNDEBUG", "-t", "0", "-split-compile=0", architecture),
        *("-I", str(CC), "-I", str(TESTS)),
        *map(str, sources(program, endings)),
        *("-o", str(binary)),
    ]
    built = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert built.returncode == 0, f"{' '.join(command)}\n{built.stderr[-8000:]}"
    ran = subprocess.run([str(binary)], capture_output=True, text=True, check=False, timeout=300)
    output = (ran.stdout + ran.stderr)[-8000:]
    if ran.returncode == SKIPPED:
        pytest.skip(output.strip())
    assert ran.returncode == 0, f"{program.name}:\n{output}"
