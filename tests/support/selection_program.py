"""Selects CUDA kernels on a machine without CUDA and without a GPU."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

import jax
import kernel_tables
import pytest

from jaxconv._src.library import native


class SelectionProgram(types.ModuleType):
    """A substitute for the module ``_jaxconv.cuda``: a compiled program selects kernels.

    The program is ``tests/cc/choices_test.cc``. Kernels do not run.
    """

    def __init__(self, program: pathlib.Path, arrays: Callable[[], Any] = dict):
        """Starts the program.

        Args:
            program: the path of the compiled program.
            arrays: lists the operands and results of every call, as the CPU's module does.
        """
        super().__init__("_jaxconv.cuda")
        command = [str(program), "--select"]
        pipe = subprocess.PIPE
        self.arrays = arrays
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def ffi_version(self) -> tuple[int, int]:
        """The FFI version of jaxlib."""
        header = pathlib.Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
        found = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", header))
        return int(found["MAJOR"]), int(found["MINOR"])

    def registrations(self) -> dict[str, Any]:
        """No handlers."""
        return {}

    def families(self) -> list[str]:
        """Every family."""
        return sorted({instance.family for instance in kernel_tables.all_instances()})

    def kernels(self) -> list[str]:
        """Every instance."""
        return sorted({instance.name for instance in kernel_tables.all_instances()})

    def build_info(self) -> dict[str, str]:
        """Nothing."""
        return {}

    def pass_kernels(self) -> list[list[str]]:
        """Every kernel of a pass."""
        return [[kernel.name, kernel.family, kernel.op] for kernel in kernel_tables.passes()]

    def _answer(self, *question: str) -> list[str]:
        self.process.stdin.write("\t".join(question) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline().rstrip("\n")
        if not answer or answer.startswith("!"):
            raise ValueError(answer[1:] or f"{self.process.args} ended")
        return answer.split("\t")

    def plan_pass(self, key: str, target: str) -> tuple:
        """The plan of a pass, in the form of ``native.Platform.plan_pass``."""
        kernel, reason, parts, block_rows, microseconds = self._answer(target, key, "pass")
        return kernel, reason, int(parts), int(block_rows), float(microseconds)

    def terms(self, key: str, of: str, target: str) -> tuple[tuple[str, ...], tuple[float, ...]]:
        """The terms of a predicted time, of "xla" or of an instance and its slices.

        Form, operations and operands, which are empty strings if XLA is no candidate or the family
        has no terms; microseconds of tensor cores, loads, stores, DRAM and launch.
        """
        form, operations, operands, *terms = self._answer(target, key, f"terms:{of}")
        return (form, operations, operands), tuple(map(float, terms))

    def select(self, key: str, algorithm: str, target: str) -> tuple:
        """The selected kernel and refusals, in the form of ``native.Platform.select``."""
        instance, workspace, slices, ours, xla, *reasons = self._answer(target, key, algorithm)
        refusals = list(zip(reasons[::2], reasons[1::2], strict=True))
        return instance, int(workspace), int(slices), float(ours), float(xla), refusals


@pytest.fixture(scope="module")
def cuda_selection(choices_program):
    """Replaces the CUDA library's selection and plans for sm_90a; needs no CUDA library."""
    program = SelectionProgram(choices_program, lambda: native.load("cpu").arrays)
    patch = pytest.MonkeyPatch()
    patch.setitem(sys.modules, "_jaxconv.cuda", program)
    patch.setenv("JAXCONV_TARGET", "sm_90a")
    native.load.cache_clear()
    jax.clear_caches()
    yield
    patch.undo()
    native.load.cache_clear()
    jax.clear_caches()
