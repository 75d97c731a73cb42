"""Runs the compiled check programs (kernel_check, int8_check, pass_check), on the GPUs in turn.

``sanitize.py`` and ``same_bits.py`` share these functions.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import gpus


class Ran(NamedTuple):
    """The end of a process: its status (None if it was stopped), and its output."""

    status: int | None
    stdout: str
    stderr: str


def add_options(parser: argparse.ArgumentParser, seconds: float) -> None:
    """Adds the options of both programs; ``seconds`` is the default time limit of a process."""
    add = parser.add_argument
    add("--program", required=True, help="kernel_check")
    add("--pass-program", type=pathlib.Path, help="pass_check (default: beside kernel_check)")
    add("--gpus", default=os.environ.get(gpus.VISIBLE), help="for example 0,1")
    add("--seconds", type=float, default=seconds, help="for one process")
    add("--record", type=pathlib.Path, help="the GPU record to add a summary to")


def pass_program(parser: argparse.ArgumentParser, options: argparse.Namespace) -> str:
    """The path of pass_check; exits if there is none."""
    path = options.pass_program or pathlib.Path(options.program).with_name("pass_check")
    if not path.exists():
        parser.error(f"{path}: no such program")
    return str(path)


def run(
    command: Sequence[str],
    number: int,
    options: argparse.Namespace,
    environment: Mapping[str, str] = os.environ,
) -> Ran:
    """Runs process ``number`` on one of the GPUs, with the options' time limit."""
    named = options.gpus.split(",") if options.gpus else []
    try:
        ran = subprocess.run(
            command,
            env={**environment, **gpus.of_process(number, named)},
            capture_output=True,
            text=True,
            check=False,
            timeout=options.seconds,
        )
    except subprocess.TimeoutExpired as late:
        printed = (late.stdout or b"").decode(errors="replace")
        return Ran(None, printed, f"no end after {options.seconds:.0f} s")
    return Ran(ran.returncode, ran.stdout, ran.stderr)
