"""The C++ tests of tests/cc: each compiled with the sources that its includes lead to, and run."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

TESTS = pathlib.Path(__file__).parent
CC = TESTS.parent / "cc"
PROGRAMS = sorted((TESTS / "cc").glob("*_test.cc"))
INCLUDE = re.compile(r'^\s*#include "([^"]+)"', re.MULTILINE)


def test_spills_fail_the_build():
    """The compiler's launcher passes everything on, but fails where ptxas reports a spill."""

    def build(code: str) -> subprocess.CompletedProcess:
        launcher = CC / "cuda" / "fail_on_spills.py"
        command = [sys.executable, str(launcher), sys.executable, "-c", code]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    clean = build("print('ptxas info: 0 bytes spill stores')")
    assert clean.returncode == 0 and "0 bytes" in clean.stderr
    spilled = "ptxas warning : Registers are spilled to local memory in function 'f'"
    assert build(f'import sys; print("{spilled}", file=sys.stderr)').returncode == 1
    assert build("raise SystemExit(3)").returncode == 3


def test_no_portable_source_records_warnings_as_errors():
    """nvcc records the options of ptxas in the PTX, and the driver obeys them on newer GPUs."""
    lines = (CC / "cuda" / "cuda.cmake").read_text().splitlines()
    strict = [i for i, line in enumerate(lines) if "--warning-as-error" in line]
    assert strict and all("jaxconv_cuda_sm90" in lines[i - 1] for i in strict)


def sources(program: pathlib.Path, endings: tuple[str, ...] = (".cc",)) -> list[pathlib.Path]:
    """The program and, transitively, the sources beside every header of ours that it includes."""
    found, pending = [], [program]
    seen = set()
    while pending:
        file = pending.pop()
        if file in seen:
            continue
        seen.add(file)
        if file.name.endswith(endings):
            found.append(file)
        for name in INCLUDE.findall(file.read_text()):
            for root in (CC, TESTS):
                header = root / name
                if header.exists():
                    # The registry is declared in cuda/common and defined above the families.
                    folders = header.parents[:2]
                    beside = (f / f"{header.stem}{e}" for f in folders for e in endings)
                    pending += [header, *(s for s in beside if s.exists())]
    return found


def package_file(package: str, wanted) -> pathlib.Path | None:
    """The first file of an installed package that ``wanted`` accepts."""
    try:
        files = importlib.metadata.files(package) or ()
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((pathlib.Path(f.locate()).resolve() for f in files if wanted(f)), None)


def onednn_flags() -> tuple[list[str], list[str]]:
    """Compiler flags and linker flags of oneDNN; skips where its headers are not installed."""
    header = package_file(
        "onednn-devel-cpu-gomp", lambda f: f.name == "dnnl.h" and f.parent.name == "include"
    )
    library = package_file("onednn-cpu-gomp", lambda f: f.name.startswith("libdnnl.so."))
    if header is None or library is None:
        pytest.skip("the packages onednn-devel-cpu-gomp and onednn-cpu-gomp are not both installed")
    return (
        ["-isystem", str(header.parent), "-fopenmp"],
        [str(library), f"-Wl,-rpath,{library.parent}", "-fopenmp", "-pthread"],
    )


def test_there_are_programs():
    names = {program.name for program in PROGRAMS}
    assert names >= {
        "choices_test.cc",
        "conv_problem_test.cc",
        "cpu_select_test.cc",
        "fast_divmod_test.cc",
        "gpu_test.cc",
        "igemm_wgmma_test.cc",
        "implicit_gemm_test.cc",
        "onednn_conv_test.cc",
        "plan_cache_test.cc",
        "select_test.cc",
    }


def compiled(compiler: str, flags: list[str], source: pathlib.Path, objects: pathlib.Path):
    """The object file of a source, made once for all programs (and workers) of a session."""
    target = objects / f"{source.relative_to(TESTS.parent).as_posix().replace('/', '_')}.o"
    if target.exists():
        return target
    partial = objects / f"{target.name}.{os.getpid()}"
    command = [compiler, *flags, "-c", str(source), "-o", str(partial)]
    built = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert built.returncode == 0, f"{' '.join(command)}\n{built.stderr[-8000:]}"
    partial.replace(target)
    return target


@pytest.fixture(scope="session")
def objects(tmp_path_factory) -> pathlib.Path:
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "objects"
    folder.mkdir(exist_ok=True)
    return folder


def marks_of(program: pathlib.Path) -> list[pytest.MarkDecorator]:
    """Those that compile every kernel's plan, and the CPU's kernels, begin at once."""
    return [pytest.mark.long] * (program.stem in ("choices_test", "onednn_conv_test"))


@pytest.mark.parametrize(
    "program", [pytest.param(p, marks=marks_of(p), id=p.stem) for p in PROGRAMS]
)
def test_program(program, tmp_path, objects):
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler: none of c++, g++ and clang++ is on PATH")
    files = sources(program)
    compile_flags, link_flags = [], ["-pthread"]
    if any(file.is_relative_to(CC / "cpu") for file in files):
        if sys.platform != "linux":
            pytest.skip("the CPU kernels are built on Linux only")
        compile_flags, link_flags = onednn_flags()
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-O1", "-I", str(CC), "-I", str(TESTS)]
    linked = [str(compiled(compiler, flags + compile_flags, file, objects)) for file in files]
    binary = tmp_path / program.stem
    command = [compiler, *linked, "-o", str(binary), *link_flags]
    built = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert built.returncode == 0, f"{' '.join(command)}\n{built.stderr[-8000:]}"
    ran = subprocess.run([str(binary)], capture_output=True, text=True, check=False, timeout=300)
    output = (ran.stdout + ran.stderr)[-8000:]
    assert ran.returncode == 0, f"{program.name} returned {ran.returncode}:\n{output}"
