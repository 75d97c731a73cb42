"""What a measurement depends on besides the code: versions, devices, driver, commit."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import pathlib
import platform
import subprocess

import jax

import jaxconv
from jaxconv._src.library import native


def kernel_platform() -> str:
    """The name under which kernels are registered for JAX's default backend: "cpu" or "cuda"."""
    backend = jax.default_backend()
    return "cuda" if backend == "gpu" else backend


def version(distribution: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    """The output of a command, or None if it is absent or fails."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


def nvidia_driver() -> tuple[str, list[str]] | None:
    """The NVIDIA driver's version and its GPUs' names, or None without a driver."""
    text = _output("nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader")
    if not text:
        return None
    entries = [line.partition(", ") for line in text.splitlines()]
    return entries[0][0], [name for _, _, name in entries]


def commit() -> str | None:
    """The commit of this package's checkout, with "+" if it has changes."""
    package = pathlib.Path(jaxconv.__file__).resolve().parent
    top = _output("git", "-C", str(package), "rev-parse", "--show-toplevel")
    if top is None or pathlib.Path(top).resolve() != package.parent:
        return None  # installed, perhaps into an environment inside some other repository
    revision = _output("git", "-C", top, "rev-parse", "--short=12", "HEAD")
    changes = _output("git", "-C", top, "status", "--porcelain", "--untracked-files=no")
    return revision + "+" if revision and changes else revision


def threads() -> int:
    """The number of threads this process may use."""
    available = getattr(os, "sched_getaffinity", None)
    return len(available(0)) if available else os.cpu_count() or 1


def processor() -> str:
    """The processor's model and the number of threads this process may use."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return f"{model}, {threads()} threads"


def describe() -> dict[str, str]:
    """Everything to state beside a measurement on JAX's default device."""
    name = kernel_platform()
    facts = {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "platform": name,
        "device": processor() if name == "cpu" else jax.devices()[0].device_kind,
        "jaxconv": jaxconv.__version__,
        "jax": jax.__version__,
        "jaxlib": version("jaxlib") or "unknown",
        "python": platform.python_version(),
        "system": platform.platform(terse=True),
    }
    if revision := commit():
        facts["commit"] = revision
    if name == "cuda" and (driver := nvidia_driver()):
        facts["driver"] = driver[0]
    kernels = native.load(name) if name in ("cpu", "cuda") else None
    if isinstance(kernels, native.Platform):
        facts |= {f"build {key}": str(value) for key, value in kernels.module.build_info().items()}
    return facts
