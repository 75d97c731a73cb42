"""``python -m jaxconv.doctor``: what works on this machine, what is missing, and what to do.

Lists versions, the FFI API of the build and of the running jaxlib, devices and kernels, then runs
a small convolution and its gradients on every platform against a float64 reference in NumPy.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib.metadata
import importlib.resources
import importlib.util
import itertools
import platform
import sys
import textwrap
from collections.abc import Sequence

import jax
import numpy as np

import jaxconv
from jaxconv._src.call import selection
from jaxconv._src.library import native
from jaxconv._src.problem.spec import Op
from jaxconv.bench import environment
from jaxconv.bench.layers import Layer
from jaxconv.bench.problem import Problem
from jaxconv.bench.program import kernel_of, libraries

_OLDEST_JAX = (0, 9, 2)
_OLDEST_PYTHON = (3, 11)
_CUDA13_DRIVER = 580  # the oldest series
_ONEDNN = "onednn-cpu-gomp"
_MOST_NAMES = 30  # of kernels that are named; more are counted

# Channel counts that every kernel family accepts, and a window that reads padding on all sides.
_LAYER = Layer(2, (8, 8), 32, 64, (3, 3), (1, 1), (1, 1))

_REBUILD = {
    "cpu": "`pip install .` in a checkout of jaxconv; the build brings oneDNN along",
    "cuda": "`pip install .` in a checkout of jaxconv; the build brings nvcc along for drivers of "
    "the 580 series and newer, and takes that of an installed toolkit otherwise, of CUDA 12 for an "
    "older driver",
}
_TITLE = {"cpu": "CPU kernels", "cuda": "CUDA kernels"}


class _Report:
    """Prints marked lines and remembers whether anything is broken."""

    def __init__(self) -> None:
        self.broken: list[str] = []
        self.missing: list[str] = []

    def section(self, title: str) -> None:
        print(f"\n{title}")

    def ok(self, text: str) -> None:
        self._line("ok", text)

    def absent(self, text: str, remedy: str = "") -> None:
        """Reports something that is absent; jaxconv works without it."""
        self.missing.append(text)
        self._line("missing", text, remedy)

    def bad(self, text: str, remedy: str = "") -> None:
        """Reports something that should work and does not."""
        self.broken.append(text)
        self._line("BROKEN", text, remedy)

    def note(self, text: str) -> None:
        self._line("", text)

    def _line(self, mark: str, text: str, remedy: str = "") -> None:
        indent = " " * 12
        print(textwrap.fill(text, 100, initial_indent=f"  {mark:8}  ", subsequent_indent=indent))
        if remedy:
            wrapped = textwrap.fill(
                remedy,
                100,
                initial_indent=f"{indent}-> ",
                subsequent_indent=indent + "   ",
                break_on_hyphens=False,
            )
            print(wrapped)


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


def _versions(report: _Report) -> None:
    report.section("Versions")
    revision = environment.commit()
    report.ok(f"jaxconv {jaxconv.__version__}" + (f" (checkout at {revision})" if revision else ""))
    if sys.version_info < _OLDEST_PYTHON:
        report.bad(
            f"Python {platform.python_version()}", f"jaxconv needs {_dotted(_OLDEST_PYTHON)}"
        )
    else:
        report.ok(f"Python {platform.python_version()} on {platform.platform(terse=True)}")
    text = f"jax {jax.__version__}, jaxlib {environment.version('jaxlib')}"
    if jax.__version_info__ < _OLDEST_JAX:
        report.bad(text, f'update it: `pip install -U "jax>={_dotted(_OLDEST_JAX)}"`')
    else:
        report.ok(text)
    report.ok(f"NumPy {np.__version__}")


def _ffi(report: _Report) -> None:
    report.section("XLA FFI API")
    try:
        running = native.runtime_ffi_version()
    except (OSError, TypeError, ValueError) as error:
        report.bad(f"jaxlib's FFI headers cannot be read: {error}", "reinstall jaxlib")
        return
    report.ok(f"jaxlib runs {_dotted(running)}")
    for name in selection.PLATFORMS:
        kernels = _load(name)
        if isinstance(kernels, native.Platform):
            built = kernels.module.ffi_version()
            report.ok(f"{_TITLE[name]} were built against {_dotted(built)}")


def _devices(report: _Report) -> list[jax.Device]:
    """Prints the devices; returns one of every platform."""
    report.section("Devices")
    try:
        found = list(jax.devices())
    except Exception as error:  # RuntimeError or, where no backend starts, AssertionError
        report.bad(
            f"JAX finds no device: {type(error).__name__} {error}".strip(),
            "JAX_PLATFORMS may name a platform that is not here; unset it",
        )
        return []
    if found[0].platform != "cpu":
        with contextlib.suppress(RuntimeError):  # JAX_PLATFORMS may leave the CPU out
            found += jax.devices("cpu")
    firsts = []
    for name, group in itertools.groupby(found, key=lambda device: device.platform):
        devices = list(group)
        kind = environment.processor() if name == "cpu" else devices[0].device_kind
        report.ok(f"{name}: {len(devices)} device{'s' * (len(devices) > 1)}, {kind}")
        firsts.append(devices[0])
    driver = environment.nvidia_driver()
    if driver:
        version, names = driver
        report.ok(f"NVIDIA driver {version}: {', '.join(sorted(set(names)))}")
        if int(version.split(".")[0]) < _CUDA13_DRIVER:
            report.note(
                f"CUDA 13, with which wheels are built, needs the {_CUDA13_DRIVER} series or "
                "newer; this driver needs kernels built with a toolkit of CUDA 12"
            )
        if all(device.platform != "gpu" for device in firsts):
            extra = "cuda13" if int(version.split(".")[0]) >= _CUDA13_DRIVER else "cuda12"
            report.absent("JAX does not use the GPU", f'`pip install -U "jax[{extra}]"`')
    else:
        report.note("no NVIDIA driver: jaxconv runs on the CPU")
    return firsts


def _configured(name: str) -> str:
    """The record of the build about a platform's kernels, "" if there is none."""
    try:
        text = importlib.resources.files("_jaxconv").joinpath("configure.txt").read_text()
    except (ImportError, OSError):
        return ""
    said = [line for line in text.splitlines() if line.startswith(_TITLE[name])]
    return said[0].partition(": ")[2] if said else ""


def _built(name: str) -> bool:
    try:
        return importlib.util.find_spec(f"_jaxconv.{name}") is not None
    except ModuleNotFoundError:  # no package _jaxconv
        return False


def _load(name: str) -> native.Platform | native.Refusal:
    """``native.load``; every failure of a damaged library becomes a refusal."""
    try:
        return native.load(name)
    except Exception as error:
        return native.Refusal(f"jaxconv[{name}]", f"{type(error).__name__}: {error}")


def _onednn_exists_here() -> bool:
    return sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")


def _kernels(report: _Report, name: str) -> None:
    report.section(_TITLE[name])
    if not _built(name):
        said = _configured(name)
        if said:
            text = f"configure said: {said}"
        elif importlib.util.find_spec("_jaxconv") is None:
            text = "not built: jaxconv is imported from a folder, without its compiled part"
        else:
            text = "not built"
        if name == "cuda" and environment.nvidia_driver() is None:
            # Nothing to repair: there is no GPU for them.
            report.note(f"{text}; not needed without an NVIDIA GPU")
        elif name == "cpu" and not _onednn_exists_here():
            report.note(f"{text}; oneDNN comes for Linux on x86-64 only, XLA's convolution serves")
        else:
            report.absent(f"{text}; XLA's own convolution serves instead", _REBUILD[name])
        return
    kernels = _load(name)
    if isinstance(kernels, native.Refusal):
        remedy = f"rebuild: {_REBUILD[name]}"
        if name == "cpu" and environment.version(_ONEDNN) is None:
            remedy = f"`pip install {_ONEDNN}`, the library that the CPU kernels run on"
        report.bad(f"built, but they do not load: {kernels.reason}", remedy)
        return
    module = kernels.module
    instances, families = kernels.kernels(), list(module.families())
    report.ok(f"{len(instances)} kernel instances; families: {', '.join(families) or 'none'}")
    for op in Op:
        start = op.value + "_"
        own = [i.removeprefix(start) for i in instances if i.startswith(start)]
        if len(own) > _MOST_NAMES:
            of_family = collections.Counter(
                max((f for f in families if name.startswith(f + "_")), key=len) for name in own
            )
            own = [f"{family} {count}" for family, count in of_family.items()]
        if own:
            report.note(f"{op.value}: {', '.join(own)}")
    if len(instances) > _MOST_NAMES:
        report.note("`print(jaxconv.kernels())` lists them")
    info = module.build_info()
    report.ok("build: " + ", ".join(f"{key} {value}" for key, value in info.items()))
    if info.get("version", jaxconv.__version__) != jaxconv.__version__:
        report.bad(
            f"the compiled part is {info['version']}, the Python part {jaxconv.__version__}",
            "reinstall both: `pip install --force-reinstall --no-deps .`",
        )


def _onednn(report: _Report) -> None:
    report.section("oneDNN")
    kernels, installed = _load("cpu"), environment.version(_ONEDNN)
    if isinstance(kernels, native.Platform):
        used = kernels.module.build_info().get("onednn", "yes")
        report.ok(f"in use: {used}" + (f"; package {_ONEDNN} {installed}" if installed else ""))
    elif installed:
        report.note(f"package {_ONEDNN} {installed} is installed; see CPU kernels why it is unused")
    elif _onednn_exists_here():
        report.absent(f"the package {_ONEDNN} is not installed", f"`pip install {_ONEDNN}`")
    else:
        report.note("comes for Linux on x86-64 only")


def _reference(op: Op, lhs: np.ndarray, rhs: np.ndarray) -> np.ndarray:
    """The operation on ``_LAYER`` in float64, tap by tap, for stride 1 and padding 1."""
    layer = _LAYER
    p, q = layer.out_spatial
    pad = [(0, 0), (1, 1), (1, 1), (0, 0)]
    taps = list(itertools.product(*map(range, layer.window)))
    if op is Op.FPROP:
        x = np.pad(lhs, pad)
        return sum(x[:, r : r + p, s : s + q] @ rhs[r, s] for r, s in taps)
    if op is Op.DGRAD:
        dx = np.pad(np.zeros(layer.shape("x")), pad)
        for r, s in taps:
            dx[:, r : r + p, s : s + q] += lhs @ rhs[r, s].T
        return dx[:, 1:-1, 1:-1]
    x = np.pad(lhs, pad)
    dw = [np.einsum("npqc,npqk->ck", x[:, r : r + p, s : s + q], rhs) for r, s in taps]
    return np.reshape(dw, layer.shape("w"))


def _try(report: _Report, device: jax.Device, problem: Problem) -> None:
    """Runs one operation on one device and compares it with the reference."""
    rng = np.random.default_rng(0)
    label = f"{problem.op.value} {problem.dtype_label}"
    name = "cuda" if device.platform == "gpu" else device.platform
    try:
        operands = [
            jax.device_put(
                rng.standard_normal(_LAYER.shape(role)).astype(problem.operand_dtype), device
            )
            for role in problem.op.roles[:2]
        ]
        lowered = jax.jit(libraries(problem)["jaxconv"].compute).lower(*operands)
        compiled = lowered.compile()
        result = np.asarray(compiled(*operands), np.float64)
        kernel, reason = kernel_of(problem, lowered, compiled, name)
    except Exception as error:  # whatever goes wrong is the finding
        first = (str(error).splitlines() or [""])[0]
        report.bad(f"{label}: {type(error).__name__}: {first}")
        return
    expected = _reference(problem.op, *(np.asarray(a, np.float64) for a in operands))
    distance = np.linalg.norm(result - expected) / np.linalg.norm(expected)
    text = f"{label}: {kernel}, relative error {distance:.1e}"
    if not distance <= problem.bound:
        report.bad(
            f"{text}, accepted {problem.bound:.0e}",
            "please report this with the output of this command",
        )
        return
    report.ok(text)
    if kernel == "XLA" and isinstance(_load(name), native.Platform):
        report.note(f"why no kernel ran: {reason}")


def _convolutions(report: _Report, devices: Sequence[jax.Device]) -> None:
    for device in devices:
        report.section(f"A convolution and its gradients on {device.platform}")
        for dtype, precision in (("f32", "highest"), ("bf16", "default"), ("int8", "default")):
            for op in (Op.FPROP,) if dtype == "int8" else Op:
                # A kernel if there is one, even if XLA's convolution is faster.
                _try(report, device, Problem("doctor", _LAYER, op, dtype, precision, "native"))


def main(argv: Sequence[str] | None = None) -> int:
    """Examines the installation and prints the findings.

    Args:
        argv: the command line, without the program's name; ``sys.argv`` by default.

    Returns:
        0 when convolutions work, even if only through XLA's own; 1 when something is broken: a
        wrong result, or a library that is present but does not load.
    """
    argparse.ArgumentParser(
        prog="python -m jaxconv.doctor",
        description="Says what works on this machine, what is missing, and what to do about it. "
        "Exit status: 0 when convolutions work, 1 when something is broken.",
    ).parse_args(argv)
    report = _Report()
    _versions(report)
    _ffi(report)
    devices = _devices(report)
    for name in selection.PLATFORMS:
        _kernels(report, name)
    _onednn(report)
    _convolutions(report, devices)
    print()
    if report.broken:
        print(f"{len(report.broken)} broken; see the lines marked BROKEN.")
        return 1
    missing = f" {len(report.missing)} missing; see above what to do." if report.missing else ""
    print(f"Convolutions work on {', '.join(device.platform for device in devices)}.{missing}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
