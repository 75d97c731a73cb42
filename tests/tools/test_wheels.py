"""What ``tools/wheels.py`` lets pass as a wheel of a release."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import sys
import zipfile

import pytest

from jaxconv._src.library import native

TOOL = pathlib.Path(__file__).resolve().parents[2] / "tools" / "wheels.py"
ABI3 = "jaxconv-0.1.0-cp312-abi3-manylinux_2_34_x86_64.whl"
CP311 = "jaxconv-0.1.0-cp311-cp311-manylinux_2_34_x86_64.whl"
SHARED = {"_jaxconv/libgomp.so.1": b"1", "_jaxconv/libjaxconv_cpu.so": b"1"}


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("wheels", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def wheel(folder: pathlib.Path, name: str, entries: dict[str, bytes]) -> pathlib.Path:
    path = folder / name
    with zipfile.ZipFile(path, "w") as archive:
        for entry, content in entries.items():
            archive.writestr(entry, content)
    return path


@pytest.mark.parametrize(
    ("name", "module"),
    [(ABI3, "_jaxconv/cpu.abi3.so"), (CP311, "_jaxconv/cpu.cpython-311-x86_64-linux-gnu.so")],
)
def test_a_wheel_of_a_release_passes_and_its_size_is_said(tool, tmp_path, capsys, name, module):
    tool.inspect(wheel(tmp_path, name, {**SHARED, module: bytes(10)}), ["cpu"])
    assert f"{name}: 0.0 MB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "entries", "message"),
    [
        ("jaxconv-0.1.0-cp312-abi3-linux_x86_64.whl", {"_jaxconv/cpu.abi3.so": b""}, "manylinux"),
        (ABI3, {"_jaxconv/cpu.cpython-312-x86_64-linux-gnu.so": b""}, r"no module .*abi3\.so"),
        (ABI3, {"_jaxconv/cpu.abi3.so": b"", "jaxconv.libs/libdnnl-1a.so.3": b""}, "oneDNN"),
        (ABI3, {"_jaxconv/cpu.abi3.so": b"", "big": bytes(60_000)}, r"more than 0\.06"),
    ],
)
def test_what_is_no_release_is_refused(tool, tmp_path, monkeypatch, name, entries, message):
    assert tool.LARGEST == 60_000_000
    monkeypatch.setattr(tool, "LARGEST", 60_000)
    with pytest.raises(SystemExit, match=message):
        tool.inspect(wheel(tmp_path, name, {**SHARED, **entries}), ["cpu"])


def test_a_wheel_without_the_openmp_runtime_is_refused(tool, tmp_path):
    entries = {"_jaxconv/cpu.abi3.so": b"", "_jaxconv/libjaxconv_cpu.so": b""}
    with pytest.raises(SystemExit, match=r"holds no _jaxconv/libgomp\.so\.1"):
        tool.inspect(wheel(tmp_path, ABI3, entries), ["cpu"])


def test_a_wheel_without_the_cuda_kernels_is_refused_where_they_are_asked_for(tool, tmp_path):
    entries = {**SHARED, "_jaxconv/cpu.abi3.so": b""}
    with pytest.raises(SystemExit, match=r"holds no _jaxconv/libjaxconv_cuda\.so"):
        tool.inspect(wheel(tmp_path, ABI3, entries), ["cpu", "cuda"])
    entries |= {"_jaxconv/libjaxconv_cuda.so": b""}
    with pytest.raises(SystemExit, match=r"no module _jaxconv/cuda\."):
        tool.inspect(wheel(tmp_path, ABI3, entries), ["cpu", "cuda"])


def test_pip_decides_which_interpreter_takes_a_wheel(tool, tmp_path):
    mine = f"cp{sys.version_info.major}{sys.version_info.minor}"
    name = f"jaxconv-0.1.0-{mine}-{mine}-manylinux_2_17_x86_64.manylinux2014_x86_64.whl"
    if sys.platform == "linux" and os.uname().machine == "x86_64":
        assert tool.takes(sys.executable, tmp_path / name)
    assert not tool.takes(sys.executable, tmp_path / name.replace(mine, "cp27"))


def test_a_failing_command_ends_it(tool, tmp_path, capsys):
    assert tool.run(sys.executable, "-c", "print(6 * 7)") == "42\n"
    with pytest.raises(SystemExit, match="3"):
        tool.run(sys.executable, "-c", "raise SystemExit(3)")


@pytest.mark.parametrize("installed", [True, False])
def test_a_wheels_openmp_runtime_is_for_machines_without_one(monkeypatch, tmp_path, installed):
    (tmp_path / "libgomp.so.1").touch()
    opened = []

    def open_library(name, mode):
        if name == "libgomp.so.1" and not installed:
            raise OSError("libgomp.so.1: cannot open shared object file")
        opened.append(name)

    monkeypatch.setattr(native.importlib.resources, "files", lambda package: tmp_path)
    monkeypatch.setattr(native.ctypes, "CDLL", open_library)
    native._load_openmp()
    assert opened == (["libgomp.so.1"] if installed else [str(tmp_path / "libgomp.so.1")])
