"""Compiles C++ programs of ``tests/cc`` with the sources that their includes lead to."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys

import pytest

TESTS = pathlib.Path(__file__).resolve().parents[1]
CC = TESTS.parent / "cc"
INCLUDE = re.compile(r'^\s*#include "([^"]+)"', re.MULTILINE)


def sources(program: pathlib.Path) -> list[pathlib.Path]:
    """The program and, transitively, the sources that belong to the project headers included."""
    found, pending = [], [program]
    seen = set()
    while pending:
        file = pending.pop()
        if file in seen:
            continue
        seen.add(file)
        if file.suffix == ".cc":
            found.append(file)
        for name in INCLUDE.findall(file.read_text()):
            for root in (CC, TESTS):
                header = root / name
                if header.exists():
                    beside = header.with_suffix(".cc")
                    pending += [header, beside] if beside.exists() else [header]
    return found


def package_file(package: str, wanted) -> pathlib.Path | None:
    """The first file of an installed package that ``wanted`` accepts."""
    try:
        files = importlib.metadata.files(package) or ()
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((pathlib.Path(f.locate()).resolve() for f in files if wanted(f)), None)


def onednn_flags() -> tuple[list[str], list[str]]:
    """Compiler flags and linker flags of oneDNN; skips if its headers are not installed."""
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


def compiled(compiler: str, flags: list[str], source: pathlib.Path, objects: pathlib.Path):
    """The object file of a source, compiled once for all programs and workers of a session."""
    target = objects / f"{source.relative_to(TESTS.parent).as_posix().replace('/', '_')}.o"
    if target.exists():
        return target
    partial = objects / f"{target.name}.{os.getpid()}"
    command = [compiler, *flags, "-c", str(source), "-o", str(partial)]
    built = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert built.returncode == 0, f"{' '.join(command)}\n{built.stderr[-8000:]}"
    partial.replace(target)
    return target


def cpp_compiler() -> str:
    """The C++ compiler; skips if there is none."""
    found = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if found is None:
        pytest.skip("no C++ compiler: none of c++, g++ and clang++ is on PATH")
    return found


def built(program: pathlib.Path, objects: pathlib.Path, binary: pathlib.Path) -> pathlib.Path:
    """Links the program as ``binary``, from objects in the folder ``objects``."""
    files = sources(program)
    compile_flags, link_flags = [], ["-pthread"]
    if any(file.is_relative_to(CC / "cpu") for file in files):
        if sys.platform != "linux":
            pytest.skip("the CPU kernels are built on Linux only")
        compile_flags, link_flags = onednn_flags()
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-O1", "-I", str(CC), "-I", str(TESTS)]
    compiler = cpp_compiler()
    # Several processes compile the same sources at once: in different orders they meet seldom.
    order = random.sample(files, len(files))
    linked = [str(compiled(compiler, flags + compile_flags, file, objects)) for file in order]
    command = [compiler, *linked, "-o", str(binary), *link_flags]
    made = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert made.returncode == 0, f"{' '.join(command)}\n{made.stderr[-8000:]}"
    return binary


@pytest.fixture(scope="session")
def objects(tmp_path_factory) -> pathlib.Path:
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "objects"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def choices_program(tmp_path_factory, objects) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("choices")
    return built(TESTS / "cc" / "choices_test.cc", objects, folder / "choices_test")
