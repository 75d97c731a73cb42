"""Prints a wheel's requirements of a system; fails if some systems do not meet them.

    python -m pip install --group wheels
    python tools/wheel_symbols.py dist/jaxconv-0.1.0-cp312-abi3-manylinux_2_28_x86_64.whl

For each ELF file the table has the libraries that it needs, the newest versions of their symbols,
and the architectures of its GPU code. auditwheel compares the versions with a manylinux platform.
"""

from __future__ import annotations

import io
import pathlib
import re
import struct
import sys
import zipfile
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from elftools.elf.elffile import ELFFile

# Libraries of every system. Not libstdc++: that of RHEL 9 is older than GCC 12 requires.
_SYSTEM = re.compile(r"(lib(c|m|dl|rt|pthread|gcc_s)|ld-linux-x86-64)\.so\.\d+")
# Symbols without versions that the interpreter and oneDNN's package define.
_OUTSIDE_SYMBOL = re.compile("_?Py|dnnl_")
_FATBIN = struct.pack("<I", 0xBA55ED50)
_PTX, _SASS = 1, 2


class Elf(NamedTuple):
    """An ELF file's dynamic symbols and GPU code.

    Attributes:
        needed: names of the libraries that it needs.
        versions: versions of the symbols that it imports from them.
        unversioned: imported symbols without a version.
        defined: exported symbols.
        ptx: architectures of its PTX, such as 80.
        sass: architectures of its machine code.
    """

    needed: list[str]
    versions: set[str]
    unversioned: set[str]
    defined: set[str]
    ptx: set[int]
    sass: set[int]


def read(content: bytes) -> Elf:
    """Reads an ELF file."""
    section = ELFFile(io.BytesIO(content)).get_section_by_name
    needed = [tag.needed for tag in section(".dynamic").iter_tags("DT_NEEDED")]
    versions, unversioned, defined = set(), set(), set()
    if (libraries := section(".gnu.version_r")) is not None:
        versions = {version.name for _, each in libraries.iter_versions() for version in each}
    of_symbols = section(".gnu.version")
    for index, symbol in enumerate(section(".dynsym").iter_symbols()):
        if symbol["st_shndx"] != "SHN_UNDEF":
            defined.add(symbol.name)
        elif symbol["st_info"]["bind"] == "STB_GLOBAL" and (
            # The number of a version, or "VER_NDX_GLOBAL" for none.
            of_symbols is None or isinstance(of_symbols.get_symbol(index)["ndx"], str)
        ):
            unversioned.add(symbol.name)
    fatbin = section(".nv_fatbin")
    gpu = set(gpu_code(fatbin.data())) if fatbin is not None else set()
    ptx, sass = ({sm for kind, sm in gpu if kind == wanted} for wanted in (_PTX, _SASS))
    return Elf(needed, versions, unversioned, defined, ptx, sass)


def gpu_code(fatbin: bytes) -> Iterator[tuple[int, int]]:
    """Yields (1 for PTX or 2 for machine code, architecture) of each entry of .nv_fatbin."""
    start = fatbin.find(_FATBIN)
    while start >= 0:
        header, size = struct.unpack_from("<HQ", fatbin, start + 6)
        entry = start + header
        end = entry + size
        while entry < end:
            kind, header, size = struct.unpack_from("<H2xIQ", fatbin, entry)
            yield kind, struct.unpack_from("<I", fatbin, entry + 28)[0]
            entry += header + size
        start = fatbin.find(_FATBIN, end)


def newest(versions: set[str]) -> list[str]:
    """The newest version of each prefix: GLIBC_2.4, GLIBC_2.28 -> GLIBC_2.28."""
    ordered = sorted(versions, key=lambda text: [int(n) for n in re.findall(r"\d+", text)])
    return sorted({version.partition("_")[0]: version for version in ordered}.values())


def check(files: dict[str, Elf]) -> None:
    """Prints the table; raises if a system may lack something that a file needs."""
    print("| ELF file | needs | newest versions | PTX | machine code |\n|---|---|---|---|---|")
    for name, elf in sorted(files.items()):
        gpu = (", ".join(f"sm_{sm}" for sm in sorted(each)) for each in (elf.ptx, elf.sass))
        cells = (name, ", ".join(elf.needed), ", ".join(newest(elf.versions)), *gpu)
        print(f"| {' | '.join(cells)} |")
    defined = set().union(*(elf.defined for elf in files.values()))
    for name, elf in files.items():
        unknown = [n for n in elf.needed if n not in files and not _SYSTEM.fullmatch(n)]
        # If a symbol's library was not linked, it has no version that would reveal an older glibc.
        unknown += sorted(s for s in elf.unversioned - defined if not _OUTSIDE_SYMBOL.match(s))
        if unknown:
            raise SystemExit(f"{name} needs {', '.join(unknown)}, which systems may lack")
        if elf.sass and not (80 in elf.ptx and {80, 90} <= elf.sass):
            raise SystemExit(f"{name}: expected PTX of sm_80, machine code of sm_80 and sm_90")


def main(wheels: Sequence[str] | None = None) -> int:
    """Checks wheels; returns the exit status."""
    for wheel in wheels if wheels is not None else sys.argv[1:]:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if ".so" in name]
            check({pathlib.PurePath(name).name: read(archive.read(name)) for name in names})
    return 0


if __name__ == "__main__":
    sys.exit(main())
