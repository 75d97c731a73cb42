"""Builds the emulator's programs for tests, and runs them on operands from files."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import host_build
import numpy as np
import pytest


@contextlib.contextmanager
def building() -> Iterator[pathlib.Path]:
    """Yields the folder that programs are built in; skips where the emulator does not run.

    One process builds at a time; the others wait, and then find the objects.
    """
    if host_build.compiler() is None:
        pytest.skip("no C++ compiler: none of g++, c++ and clang++ is on PATH")
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        pytest.skip(f"the emulator runs on Linux x86-64, not {sys.platform} {os.uname().machine}")
    folder = pathlib.Path(tempfile.gettempdir()) / f"jaxconv-emulator-{os.getuid()}"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


def run(program: pathlib.Path, instance: str, key: str, *options: str) -> None:
    """Runs an instance on a problem; fails if the program does."""
    command = [str(program), instance, key, *options]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, f"{command}\n{ran.stdout}{ran.stderr}"


def computed(
    program: pathlib.Path,
    instance: str,
    key: str,
    lhs: np.ndarray,
    rhs: np.ndarray,
    dtype: np.dtype | type,
    folder: pathlib.Path,
    *options: str,
) -> np.ndarray:
    """Runs an instance on two operands; returns the result's elements as a vector.

    Args:
        program: a program that ``host_build.build`` made.
        instance, key: the kernel and the problem.
        lhs, rhs: the operands, of the problem's types and shapes.
        dtype: the type of the result.
        folder: an empty folder for the arrays' files.
        options: further arguments of the program.
    """
    files = {name: folder / name for name in ("lhs", "rhs", "out")}
    files["lhs"].write_bytes(lhs.tobytes())
    files["rhs"].write_bytes(rhs.tobytes())
    run(program, instance, key, *(f"{name}={path}" for name, path in files.items()), *options)
    return np.frombuffer(files["out"].read_bytes(), dtype)
