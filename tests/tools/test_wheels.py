"""The checks of ``tools/wheels.py`` and ``tools/wheel_symbols.py`` on a release's wheels."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pathlib
import subprocess
import sys
import types
import zipfile

import jax
import pytest

from jaxconv import doctor
from jaxconv._src.library import native

TOOLS = pathlib.Path(__file__).resolve().parents[2] / "tools"
ABI3 = "jaxconv-0.1.0-cp312-abi3-manylinux_2_28_x86_64.whl"
CP311 = "jaxconv-0.1.0-cp311-cp311-manylinux_2_28_x86_64.whl"
SHARED = {"_jaxconv/libgomp.so.1": b"1", "_jaxconv/libjaxconv_cpu.so": b"1"}


def module_of(name: str):
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tool():
    return module_of("wheels")


@pytest.fixture(scope="module")
def symbols():
    pytest.importorskip("elftools", reason="no pyelftools: pip install --group wheels")
    return module_of("wheel_symbols")


@pytest.fixture(params=native.PLATFORMS)
def built(request) -> native.Platform:
    """The kernels of a platform, with or without a device that runs them."""
    kernels = native.load(request.param)
    if isinstance(kernels, native.Refusal):
        pytest.skip(kernels.reason)
    return kernels


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
        (
            "jaxconv-0.1.0-cp312-abi3-linux_x86_64.whl",
            {"_jaxconv/cpu.abi3.so": b""},
            "not for manylinux",
        ),
        (ABI3.replace("2_28", "2_35"), {"_jaxconv/cpu.abi3.so": b""}, "not for manylinux_2_28"),
        (ABI3, {"_jaxconv/cpu.cpython-312-x86_64-linux-gnu.so": b""}, r"no module .*abi3\.so"),
        (ABI3, {"_jaxconv/cpu.abi3.so": b"", "jaxconv.libs/libdnnl-1a.so.3": b""}, "oneDNN"),
        (ABI3, {"_jaxconv/cpu.abi3.so": b"", "big": bytes(32_000)}, r"more than 0\.032"),
    ],
)
def test_what_is_no_release_is_refused(tool, tmp_path, monkeypatch, name, entries, message):
    assert tool.LARGEST == 32_000_000
    monkeypatch.setattr(tool, "LARGEST", 32_000)
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


@pytest.mark.parametrize(
    ("release", "built", "refused"),
    [
        (12080, "13.0.88", True),
        (13000, "13.0.88", False),
        (12080, "12.8.93", False),
        (0, "13.0.88", False),
    ],
)
def test_kernels_of_cuda_13_are_left_alone_on_an_older_driver(monkeypatch, release, built, refused):
    monkeypatch.setattr(native, "_driver_release", lambda: release)
    module = types.SimpleNamespace(build_info=lambda: {"cuda": built})
    message = "driver of the 580 series or newer; this one is of CUDA 12.8.*toolkit of CUDA 12"
    with pytest.raises(ImportError, match=message) if refused else contextlib.nullcontext():
        native._check_driver(module)


def test_doctor_names_the_driver_of_cuda_13(capsys, monkeypatch):
    monkeypatch.setattr(doctor.environment, "nvidia_driver", lambda: ("570.124.06", ["H200"]))
    doctor.main([])
    said = capsys.readouterr().out
    assert "CUDA 13, with which wheels are built, needs the 580 series" in said
    if jax.default_backend() == "cpu":
        assert '`pip install -U "jax[cuda12]"`' in said


# --- what the libraries ask of a system -----------------------------------------------------------


def elf(symbols, **fields):
    empty = {"needed": [], **{name: set() for name in symbols.Elf._fields[1:]}}
    return symbols.Elf(**{**empty, **fields})


def test_what_a_release_asks_of_a_system_is_printed(symbols, capsys):
    module = elf(
        symbols,
        needed=["libjaxconv_cuda.so", "libc.so.6"],
        versions={"GLIBC_2.4", "GLIBC_2.28", "GCC_3.0"},
        unversioned={"PyLong_FromLong", "_Py_Dealloc", "_ZN7jaxconv12CudaPlatformEv"},
    )
    needed = ["libgomp.so.1", "ld-linux-x86-64.so.2"]
    library = elf(
        symbols,
        needed=needed,
        unversioned={"dnnl_version"},
        defined={"_ZN7jaxconv12CudaPlatformEv"},
        ptx={80},
        sass={80, 90},
    )
    files = {"cuda.abi3.so": module, "libjaxconv_cuda.so": library, "libgomp.so.1": elf(symbols)}
    symbols.check(files)
    said = capsys.readouterr().out
    assert "| cuda.abi3.so | libjaxconv_cuda.so, libc.so.6 | GCC_3.0, GLIBC_2.28 |  |  |" in said
    assert f"| libjaxconv_cuda.so | {', '.join(needed)} |  | sm_80 | sm_80, sm_90 |" in said


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"needed": ["libstdc++.so.6"]}, "a.so needs libstdc"),
        ({"needed": ["libdnnl.so.3"]}, "a.so needs libdnnl"),
        ({"unversioned": {"arc4random"}}, "a.so needs arc4random"),
        ({"sass": {80, 90}}, "expected PTX of sm_80"),
        ({"sass": {80}, "ptx": {80}}, "machine code of sm_80 and sm_90"),
        ({"sass": {80, 90}, "ptx": {90}}, "expected PTX of sm_80"),
    ],
)
def test_what_a_system_may_lack_is_refused(symbols, fields, message):
    with pytest.raises(SystemExit, match=message):
        symbols.check({"a.so": elf(symbols, **fields)})


def test_the_libraries_of_this_build_are_read(symbols, built):
    module = pathlib.Path(built.module.__file__)
    library = symbols.read((module.parent / f"libjaxconv_{built.name}.so").read_bytes())
    assert "libc.so.6" in library.needed and any("GLIBC_2" in v for v in library.versions)
    function = f"_ZN7jaxconv{len(built.name) + 8}{built.name.capitalize()}PlatformEv"
    assert function in library.defined
    assert function in symbols.read(module.read_bytes()).unversioned
    if built.name == "cuda":
        assert library.ptx == {80} and library.sass == {80, 90}


def test_an_exception_of_the_library_reaches_python(built):
    """An exception passes between the wheel's module and library, which each have a libstdc++.

    The library copies the key into its message; allocating that copy fails.
    """
    code = f"""
import resource, jaxconv
from jaxconv._src.library import native
select = native.load({built.name!r}).module.select
for target in ("nonsense", ""):
    try:
        select("nonsense", "auto", target)
    except ValueError as error:
        print("ValueError", error)
key = "x" * 2**28
in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (in_use + 2**20, resource.RLIM_INFINITY))
try:
    select(key, "auto", "")
except MemoryError as error:
    print("MemoryError", error)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    said = ran.stdout.splitlines()
    assert [line.split()[0] for line in said] == ["ValueError"] * 2 + ["MemoryError"], ran
