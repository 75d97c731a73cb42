"""The compiled libraries export no symbols of a libstdc++ that they contain."""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess

import pytest

# Streams, locales and their facets, which the library never instantiates itself.
STANDARD_LIBRARY = re.compile(r"_ZN?K?S[iod]\w|_ZN?K?St(6locale|8ios_base|7num_put|7num_get)")


def exported(library: pathlib.Path) -> list[str]:
    command = ["nm", "-D", "--defined-only", str(library)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [line.split()[-1] for line in listed.splitlines()]


def test_no_copy_of_the_standard_library_is_exported(platform, native_kernels):
    """Two copies in one process share half of their state; streams then fail or crash."""
    if shutil.which("nm") is None:
        pytest.skip("no nm on PATH")
    folder = pathlib.Path(native_kernels.module.__file__).parent
    for library in (folder / f"libjaxconv_{platform}.so", *folder.glob(f"{platform}.*so")):
        names = exported(library)
        assert names, library
        assert not [name for name in names if STANDARD_LIBRARY.match(name)], library


def test_the_check_itself():
    for name in ("_ZNSo9_M_insertImEERSoT_", "_ZNSt6localeC1Ev", "_ZNSt8ios_base4InitC1Ev"):
        assert STANDARD_LIBRARY.match(name)
    for name in ("_ZNSt6vectorIlSaIlEE6insertEv", "PyInit_cpu", "_ZN7jaxconv4PlanC1Ev"):
        assert not STANDARD_LIBRARY.match(name)
