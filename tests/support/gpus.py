"""Distributes test processes over GPUs; each process sees one. Imports no JAX."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The GPUs that CUDA_VISIBLE_DEVICES names, or the indices of all that nvidia-smi lists."""
    if VISIBLE in environment:
        return [name.strip() for name in environment[VISIBLE].split(",") if name.strip()]
    if not os.path.exists("/dev/nvidiactl") or not shutil.which("nvidia-smi"):
        return []
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return listed.stdout.split() if listed.returncode == 0 else []


def of_process(number: int, gpus: list[str]) -> dict[str, str]:
    """Variables for the environment of process ``number``, to be set before its JAX starts."""
    return {VISIBLE: gpus[number % len(gpus)]} if gpus else {}


def spread_workers(environment: dict[str, str] = os.environ) -> None:
    """Assigns one of several GPUs to a pytest-xdist worker ("gw3"); changes nothing elsewhere."""
    worker = environment.get("PYTEST_XDIST_WORKER", "")
    if worker.startswith("gw") and len(found := visible(environment)) > 1:
        environment.update(of_process(int(worker[2:]), found))
