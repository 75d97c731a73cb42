"""The tables of the CUDA kernels as tests and CMake read them, without CUDA."""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess
from typing import NamedTuple

import kernel_tables
import pytest

TABLE = """
// op(s), operand type(s), variant, file, the family's own
KERNEL(FPROP_DGRAD, BF16_F16, 256x64x64_swap_ab, swap_ab_sm90, 256, 64, {1, 2})  // KERNEL(X)
KERNEL(WGRAD, F32,
       128x64x32_mma, wgrad_mma_sm90, Tile(128, 64))
PADDED(DGRAD, BF16, 256x64x64_swap_ab)
FUSED(FPROP, F16, 256x64x64_swap_ab)
"""


def test_a_call_stands_for_every_pair_of_operation_and_type():
    names = [instance.name for instance in kernel_tables.parse("igemm_wgmma", TABLE)]
    assert names == [
        "fprop_igemm_wgmma_bf16_256x64x64_swap_ab",
        "fprop_igemm_wgmma_f16_256x64x64_swap_ab",
        "dgrad_igemm_wgmma_bf16_256x64x64_swap_ab",
        "dgrad_igemm_wgmma_f16_256x64x64_swap_ab",
        "wgrad_igemm_wgmma_f32_128x64x32_mma",
        "dgrad_igemm_wgmma_bf16_256x64x64_swap_ab_padded",
        "fprop_igemm_wgmma_f16_256x64x64_swap_ab_fused",
    ]


def test_padded_and_fused_instances_have_the_source_of_the_plain_one():
    found = kernel_tables.parse("igemm_wgmma", TABLE)
    assert [(i.source, i.padded, i.fused) for i in (found[0], *found[4:])] == [
        ("swap_ab_sm90", False, False),
        ("wgrad_mma_sm90", False, False),
        ("swap_ab_sm90", True, False),
        ("swap_ab_sm90", False, True),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("KERNEL(FPROP, F64, 1x1, a)", "cannot read"),
        ("KERNEL(FORWARD, F32, 1x1, a)", "cannot read"),
        ("KERNEL(FPROP, F32, 1 x 1, a)", "cannot read"),
        ("KERNEL(FPROP, F32, 1x1, a) KERNEL(FPROP, BF16_F32, 1x1, a)", "twice"),
        ("PADDED(FPROP, F32, 1x1)", "PADDED without KERNEL"),
        ("FUSED(FPROP, F32, 1x1)", "FUSED without KERNEL"),
        ("KERNELS(FPROP, F32, 1x1, a)", "neither KERNEL, PADDED nor FUSED"),
    ],
)
def test_what_is_no_table_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        kernel_tables.parse("a", text)


def test_the_tables_are_there_and_name_every_instance_once():
    found = kernel_tables.all_instances()
    assert {instance.op for instance in found} == {"fprop", "dgrad", "wgrad"}
    assert {instance.dtype for instance in found} >= {"f32", "bf16", "f16"}
    assert len({instance.name for instance in found}) == len(found)
    sources = {(instance.family, instance.source) for instance in found}
    missing = [s for s in sources if not list((kernel_tables.TABLES / s[0]).glob(f"{s[1]}.cu*"))]
    assert not missing, f"no such device kernels: {missing}"


MEASURED = sorted(pathlib.Path(__file__).parent.glob("*measured*.tsv"))


@pytest.mark.parametrize("table", MEASURED, ids=lambda path: path.stem)
def test_measured_times_are_of_kernels_that_exist(table):
    text = table.read_text()
    named = set(re.findall(r"\b(?:fprop|dgrad|wgrad)_\w+", text))
    assert named <= {instance.name for instance in kernel_tables.all_instances()}


# --- CMake reads the same tables ------------------------------------------------------------------

UNIT = re.compile(
    r'^#include "cuda/\w+/(?P<header>\w+)\.cuh"$'
    r"|^JAXCONV_(?P<macro>(?:FUSED_)?INSTANCE|NOT_COMPILED)\((?P<arguments>.*)\)$",
    re.MULTILINE,
)


class Compiled(NamedTuple):
    """One line of a generated translation unit: an instance that it compiles."""

    macro: str
    op: str
    family: str
    dtype: str
    variant: str
    header: str
    form: str

    @property
    def name(self) -> str:
        return f"{self.op}_{self.family}_{self.dtype}_{self.variant}"

    @property
    def form_of_width(self) -> tuple[str, ...]:
        width = self.dtype.lstrip("bfsu")
        return self.macro, self.op, self.family, width, self.header, self.form


def units(folder, instances: str) -> list[Compiled]:
    """The lines of the translation units that CMake writes."""
    if shutil.which("cmake") is None:
        pytest.skip("cmake is not on PATH")
    repository = kernel_tables.TABLES.parents[1]
    folder.mkdir()
    (folder / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.22)\nproject(units LANGUAGES NONE)\n"
        f'set(PROJECT_SOURCE_DIR "{repository}")\ninclude({kernel_tables.TABLES}/sources.cmake)\n'
    )
    build = folder / "build"
    command = ["cmake", "-S", str(folder), "-B", str(build)]
    command += [f"-DJAXCONV_CUDA_INSTANCES={instances}"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found = []
    for unit in (*build.glob("*/*.cu"), *build.glob("*/*.cc")):
        header = ""
        for line in UNIT.finditer(unit.read_text()):
            if line["header"]:
                header = line["header"]
                assert header.endswith("_sm90") == unit.stem.endswith("_sm90"), unit
            else:
                *name, form = (a.strip() for a in f"{line['arguments']},".split(",", 5)[:5])
                found.append(Compiled(line["macro"], *name, header, form))
    return found


@pytest.fixture(scope="module")
def every(tmp_path_factory) -> list[Compiled]:
    return units(tmp_path_factory.mktemp("units") / "all", "ALL")


def test_cmake_compiles_every_instance_once_with_its_source(every):
    assert {line.macro for line in every} == {"INSTANCE", "FUSED_INSTANCE"}
    named = [i for i in kernel_tables.all_instances() if not i.padded]
    compiled = sorted((line.name, line.header) for line in every)
    assert compiled == sorted((instance.name, instance.source) for instance in named)


def test_each_form_is_compiled_for_each_operation_and_width_of_operands(every, tmp_path):
    some = units(tmp_path / "some", "EACH_FORM")
    compiled = [line.form_of_width for line in some if line.macro != "NOT_COMPILED"]
    assert sorted(compiled) == sorted({line.form_of_width for line in every})
    assert sorted(line.name for line in some) == sorted(line.name for line in every)
