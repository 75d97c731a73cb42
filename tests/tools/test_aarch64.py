"""The sources compile for aarch64 (GH200), whose wheels have no oneDNN."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sysconfig

import jax
import pytest

CC = pathlib.Path(__file__).resolve().parents[2] / "cc"
COMPILER = "aarch64-linux-gnu-g++"
ROOMS = ("core", "cuda", "ffi", "bindings")
SOURCES = sorted(source for room in ROOMS for source in (CC / room).rglob("*.cc"))
COMMON = (
    *("<algorithm>", "<cmath>", "<functional>", "<map>", "<memory>", "<mutex>", "<optional>"),
    *("<sstream>", "<string>", "<unordered_map>", "<vector>", '"cuda/common/kernel.h"'),
)
# The macros that CMake defines (cc/CMakeLists.txt, cc/cuda/cuda.cmake).
MACROS = {
    "JAXCONV_MODULE": "cuda",
    "JAXCONV_PLATFORM": "CudaPlatform",
    "JAXCONV_VERSION": '"0"',
    "JAXCONV_CUDA_VERSION": '"13.0"',
    "JAXCONV_CUDA_ARCHITECTURES": '"80"',
}


@pytest.mark.long
def test_every_source_compiles_for_aarch64(tmp_path):
    if shutil.which(COMPILER) is None:
        pytest.skip(f"no {COMPILER} on PATH; Debian's package g++-aarch64-linux-gnu has it")
    nanobind = pytest.importorskip("nanobind", reason="nanobind is not installed")
    system = (jax.ffi.include_dir(), nanobind.include_dir(), sysconfig.get_path("include"))
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{CC}"]
    flags += [option for folder in system for option in ("-isystem", folder)]
    flags += [f"-D{name}={value}" for name, value in MACROS.items()]

    def compile_source(*arguments: str) -> None:
        command = [COMPILER, *flags, *arguments]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, f"{arguments}\n{ran.stderr[-4000:]}"

    # Most of a source's time goes into these headers, so they are compiled once for all sources.
    common = tmp_path / "common.h"
    common.write_text("".join(f"#include {header}\n" for header in COMMON))
    compile_source("-x", "c++-header", str(common), "-o", f"{common}.gch")
    assert len(SOURCES) > 40
    for source in SOURCES:
        compile_source("-fsyntax-only", "-include", str(common), str(source))
