"""The build backend: scikit-build-core's, which adds NVIDIA's compiler if it is needed.

PEP 517 frontends (pip, build, uv) install what ``get_requires_for_build_wheel`` returns before they
build. If CUDA kernels are built and there is no nvcc, this includes NVIDIA's pip packages, so a GPU
machine needs no CUDA toolkit. ``cc/cuda/cuda.cmake`` finds nvcc in the same places.

Two settings, each a variable of the environment or ``-C cmake.define.NAME=VALUE``:
    JAXCONV_CUDA    ON, OFF or AUTO, the default: kernels are built where there is an NVIDIA driver
    JAXCONV_NVCC    the nvcc to use; "pip" for NVIDIA's packages even where a toolkit is installed
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping

from scikit_build_core import build as _scikit_build
from scikit_build_core.build import *  # noqa: F403 (the unchanged hooks)

# The oldest release of CUDA 13. A driver compiles only PTX of its own and of older releases, and
# Hopper and newer GPUs run some kernels from PTX: this release loads wherever CUDA 13 does.
_RELEASE = "13.0"
_PACKAGES = (
    "nvidia-cuda-nvcc",  # nvcc, cudafe++, ptxas, fatbinary; asks for the next three, in any version
    "nvidia-nvvm",  # cicc
    "nvidia-cuda-crt",  # nvcc's own headers
    "nvidia-cuda-runtime",  # headers, libcudart_static.a
    "nvidia-cuda-cccl",  # <nv/target>, which cuda_fp16.h includes
)
# The oldest driver of CUDA 13. The packages for CUDA 12 contain ptxas, but no nvcc.
_OLDEST_DRIVER = 580

ConfigSettings = Mapping[str, "str | list[str] | bool"]


def setting(name: str, config_settings: ConfigSettings | None, environ: Mapping[str, str]) -> str:
    """A setting of the build; ``-C`` overrides the environment."""
    for key in (f"cmake.define.{name}", f"skbuild.cmake.define.{name}"):
        value = (config_settings or {}).get(key)
        if value is not None:
            return str(value[-1] if isinstance(value, list) else value)
    return environ.get(name, "")


def driver(environ: Mapping[str, str], root: pathlib.Path) -> int | None:
    """The series of the NVIDIA driver, 0 if unknown; None if there is no driver."""
    text, present = "", (root / "dev/nvidiactl").exists()
    version = root / "proc/driver/nvidia/version"
    if version.exists():
        text, present = version.read_text(), True
    elif smi := shutil.which("nvidia-smi", path=environ.get("PATH", "")):
        command, present = [smi, "--query-gpu=driver_version", "--format=csv,noheader"], True
        with contextlib.suppress(OSError, subprocess.SubprocessError):  # the series stays unknown
            text = f" {subprocess.check_output(command, text=True, timeout=60)} "
    number = re.search(r"\s(\d{3,})\.\d+(\.\d+)?\s", text)
    return int(number[1]) if number else 0 if present else None


def has_nvcc(environ: Mapping[str, str], root: pathlib.Path) -> bool:
    """Whether a toolkit is installed: $CUDACXX, $CUDA_HOME, PATH, or the usual folders."""
    folders = [pathlib.Path(environ["CUDA_HOME"], "bin")] if environ.get("CUDA_HOME") else []
    folders += [root / "usr/local/cuda/bin", root / "usr/local/bin", root / "usr/bin"]
    path = os.pathsep.join([environ.get("PATH", ""), *map(str, folders)])
    return any(shutil.which(c, path=path) for c in (environ.get("CUDACXX"), "nvcc") if c)


def cuda_requirements(
    config_settings: ConfigSettings | None,
    environ: Mapping[str, str] = os.environ,
    root: pathlib.Path = pathlib.Path("/"),
) -> list[str]:
    """NVIDIA's packages that a build on this machine needs, as requirements; often none.

    Args:
        config_settings: the settings of the frontend.
        environ: the environment variables.
        root: the root of the file system.

    Returns:
        Five requirements of one CUDA release. None without a driver unless JAXCONV_CUDA=ON, if nvcc
        is installed unless JAXCONV_NVCC=pip, and if the driver is older than CUDA 13.
    """
    cuda = setting("JAXCONV_CUDA", config_settings, environ) or "AUTO"
    nvcc = setting("JAXCONV_NVCC", config_settings, environ)
    if sys.platform != "linux" or cuda == "OFF":
        return []
    series = driver(environ, root)
    if cuda != "ON" and series is None:
        return []
    if nvcc != "pip":
        if nvcc or has_nvcc(environ, root):
            return []
        if series and series < _OLDEST_DRIVER:
            return []  # cuda.cmake prints the reason
    return [f"{package}=={_RELEASE}.*" for package in _PACKAGES]


def get_requires_for_build_wheel(config_settings: ConfigSettings | None = None) -> list[str]:
    """The requirements of a wheel's build beside ``build-system.requires`` (PEP 517)."""
    requires = _scikit_build.get_requires_for_build_wheel(config_settings)
    return [*requires, *cuda_requirements(config_settings)]


def get_requires_for_build_editable(config_settings: ConfigSettings | None = None) -> list[str]:
    """The requirements of an editable installation beside ``build-system.requires`` (PEP 660)."""
    requires = _scikit_build.get_requires_for_build_editable(config_settings)
    return [*requires, *cuda_requirements(config_settings)]
