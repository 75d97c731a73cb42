"""The emulator's programs as tests build them, and what they compute of operands in files."""

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
    """The folder that programs are built in; skips where the emulator does not run.

    While one process builds, others wait, and find the objects made.
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
    """Runs an instance on a problem; fails where the program does."""
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
    """What an instance computes of two operands: the result's elements in one row.

    Args:
        program: of ``host_build.build``.
        instance, key: the kernel and the problem.
        lhs, rhs: the operands, of the problem's types and shapes.
        dtype: the result's.
        folder: an empty one, for the arrays' files.
        options: further arguments of the program.
    """
    files = {name: folder / name for name in ("lhs", "rhs", "out")}
    files["lhs"].write_bytes(lhs.tobytes())
    files["rhs"].write_bytes(rhs.tobytes())
    run(program, instance, key, *(f"{name}={path}" for name, path in files.items()), *options)
    return np.frombuffer(files["out"].read_bytes(), dtype)
