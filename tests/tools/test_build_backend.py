"""When a build requires NVIDIA's pip packages, on simulated machines in a temporary folder."""

from __future__ import annotations

import pathlib
import sys
import tomllib

import pytest

pytest.importorskip("scikit_build_core", reason="the build backend wraps scikit-build-core's")

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
# Imports the backend as a build frontend does.
sys.path.insert(0, str(REPOSITORY / PYPROJECT["build-system"]["backend-path"][0]))
import jaxconv_build as backend  # noqa: E402

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="NVIDIA's packages are for Linux")

PACKAGES = [
    "nvidia-cuda-nvcc==13.0.*",
    "nvidia-nvvm==13.0.*",
    "nvidia-cuda-crt==13.0.*",
    "nvidia-cuda-runtime==13.0.*",
    "nvidia-cuda-cccl==13.0.*",
]
NVRM = {
    "580": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 07:16:50 2025\n",
    "590": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  590.44.01  Release Build\n",
    "570": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.124.06  Wed Feb 26 2025\n",
}


class Machine:
    """A simulated file system below ``root`` and the environment of a build on it."""

    def __init__(self, root: pathlib.Path):
        self.root, self.environ = root, {"PATH": str(root / "bin")}

    def file(self, path: str, text: str = "") -> pathlib.Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def program(self, path: str, text: str = "#!/bin/sh\n") -> pathlib.Path:
        file = self.file(path, text)
        file.chmod(0o755)
        return file

    def requires(self, **config_settings) -> list[str]:
        settings = {f"cmake.define.{name}": value for name, value in config_settings.items()}
        return backend.cuda_requirements(settings, self.environ, self.root)


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_nothing_is_asked_for_without_a_driver(machine):
    assert machine.requires() == []
    assert backend.cuda_requirements(None, machine.environ, machine.root) == []


@pytest.mark.parametrize("value", ["ON", ["OFF", "ON"]])
def test_cuda_on_asks_for_the_compiler_without_a_driver(machine, value):
    assert machine.requires(JAXCONV_CUDA=value) == PACKAGES


def test_the_environment_sets_it_and_the_command_line_comes_first(machine):
    machine.environ["JAXCONV_CUDA"] = "ON"
    assert machine.requires() == PACKAGES
    assert machine.requires(JAXCONV_CUDA="OFF") == []


@pytest.mark.parametrize("release", ["580", "590"])
def test_a_driver_asks_for_the_release_whose_ptx_it_loads(machine, release):
    machine.file("proc/driver/nvidia/version", NVRM[release])
    assert machine.requires() == PACKAGES
    assert machine.requires(JAXCONV_CUDA="OFF") == []


def test_a_driver_older_than_cuda_13_asks_for_nothing(machine):
    machine.file("proc/driver/nvidia/version", NVRM["570"])
    assert machine.requires() == machine.requires(JAXCONV_CUDA="ON") == []
    assert machine.requires(JAXCONV_NVCC="pip") == PACKAGES  # for another machine


@pytest.mark.parametrize(
    ("printed", "expected"), [("580.95.05", PACKAGES), ("565.57.01", []), ("", PACKAGES)]
)
def test_the_driver_is_asked_by_nvidia_smi(machine, printed, expected):
    machine.program("bin/nvidia-smi", f"#!/bin/sh\necho {printed}\n")
    assert machine.requires() == expected


def test_a_failing_nvidia_smi_counts_as_a_driver(machine):
    machine.program("bin/nvidia-smi", "#!/bin/sh\necho 'NVIDIA-SMI has failed' 570.1.1\nexit 9\n")
    assert machine.requires() == PACKAGES


def test_a_device_without_a_version_counts_as_a_driver(machine):
    machine.file("dev/nvidiactl")
    assert machine.requires() == PACKAGES


@pytest.mark.parametrize("place", ["bin/nvcc", "usr/local/cuda/bin/nvcc", "cuda-12/bin/nvcc"])
def test_an_installed_nvcc_is_enough(machine, place):
    machine.file("proc/driver/nvidia/version", NVRM["580"])
    machine.environ["CUDA_HOME"] = str(machine.root / "cuda-12")
    assert machine.requires() == PACKAGES
    nvcc = machine.program(place)
    assert machine.requires() == machine.requires(JAXCONV_CUDA="ON") == []
    assert machine.requires(JAXCONV_NVCC="pip") == PACKAGES
    nvcc.chmod(0o644)  # not executable
    assert machine.requires() == PACKAGES


def test_a_compiler_given_by_its_path_is_enough(machine):
    machine.environ["CUDACXX"] = str(machine.program("opt/nvcc"))
    assert machine.requires(JAXCONV_CUDA="ON") == []
    machine.environ["CUDACXX"] = str(machine.root / "nothing")
    assert machine.requires(JAXCONV_CUDA="ON") == PACKAGES
    assert machine.requires(JAXCONV_CUDA="ON", JAXCONV_NVCC="/opt/nvcc") == []


@pytest.mark.parametrize("hook", ["wheel", "editable"])
def test_the_hooks_add_to_what_scikit_build_core_asks_for(hook, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.delenv("JAXCONV_CUDA", raising=False)
    monkeypatch.delenv("JAXCONV_NVCC", raising=False)
    requires = getattr(backend, f"get_requires_for_build_{hook}")
    plain = requires({"cmake.define.JAXCONV_CUDA": "OFF"})
    settings = {"cmake.define.JAXCONV_CUDA": "ON", "cmake.define.JAXCONV_NVCC": "pip"}
    assert requires(settings) == plain + PACKAGES


def test_every_other_hook_is_scikit_build_cores():
    from scikit_build_core import build

    assert PYPROJECT["build-system"]["build-backend"] == backend.__name__
    own = {"get_requires_for_build_wheel", "get_requires_for_build_editable"}
    for name in set(build.__all__) - own:
        assert getattr(backend, name) is getattr(build, name), name
