"""Compiles each C++ test of tests/cc with the sources that its includes lead to, and runs it."""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from cc_programs import CC, TESTS, built

from jaxconv._src.library import native

PROGRAMS = sorted((TESTS / "cc").glob("*_test.cc"))


def test_spills_fail_the_build():
    """The compiler's launcher passes everything on, but fails where ptxas reports a spill."""

    def build(code: str) -> subprocess.CompletedProcess:
        launcher = CC / "cuda" / "fail_on_spills.py"
        command = [sys.executable, str(launcher), sys.executable, "-c", code]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    clean = build("print('ptxas info: 0 bytes spill stores')")
    assert clean.returncode == 0 and "0 bytes" in clean.stderr
    spilled = "ptxas warning : Registers are spilled to local memory in function 'f'"
    assert build(f'import sys; print("{spilled}", file=sys.stderr)').returncode == 1
    assert build("raise SystemExit(3)").returncode == 3


def test_no_portable_source_records_warnings_as_errors():
    """nvcc records the options of ptxas in the PTX, and the driver obeys them on newer GPUs."""
    lines = (CC / "cuda" / "cuda.cmake").read_text().splitlines()
    strict = [i for i, line in enumerate(lines) if "--warning-as-error" in line]
    assert strict and all("jaxconv_cuda_sm90" in lines[i - 1] for i in strict)


def test_there_are_programs():
    names = {program.name for program in PROGRAMS}
    assert names >= {
        "choices_test.cc",
        "conv_problem_test.cc",
        "cpu_select_test.cc",
        "fast_divmod_test.cc",
        "gpu_test.cc",
        "igemm_wgmma_test.cc",
        "implicit_gemm_test.cc",
        "onednn_conv_test.cc",
        "pass_plan_test.cc",
        "plan_cache_test.cc",
        "select_test.cc",
    }


def marks_of(program: pathlib.Path) -> list[pytest.MarkDecorator]:
    """Programs that compile every kernel's plan, or the CPU kernels, are long and start first."""
    return [pytest.mark.long] * (program.stem in ("choices_test", "onednn_conv_test"))


@pytest.mark.parametrize(
    "program", [pytest.param(p, marks=marks_of(p), id=p.stem) for p in PROGRAMS]
)
def test_program(program, tmp_path, objects):
    binary = built(program, objects, tmp_path / program.stem)
    ran = subprocess.run([str(binary)], capture_output=True, text=True, check=False, timeout=300)
    output = (ran.stdout + ran.stderr)[-8000:]
    assert ran.returncode == 0, f"{program.name} returned {ran.returncode}:\n{output}"


# --- the table of choices -------------------------------------------------------------------------


def fields(name: str) -> list[list[str]]:
    lines = (TESTS / "cc" / name).read_text().splitlines()
    return [line.split("\t") for line in lines if not line.startswith("#")]


def other_kernel(lines: list[str]) -> list[str]:
    return [lines[0].replace("/1\t", "/7\t"), *lines[1:]]


def times(factor: float):
    def edit(lines: list[str]) -> list[str]:
        cells = lines[0].split("\t")
        return ["\t".join([*cells[:4], f"{factor * float(cells[4]):.1f}", *cells[5:]]), *lines[1:]]

    return edit


def without_a_problem_that_alone_has_an_instance(lines: list[str]) -> list[str]:
    each = {source for kind, source, *_ in fields("bench_problems.tsv") if kind == "each"}
    by_kernel: dict[str, set[tuple[str, str]]] = {}
    for _, key, algorithm, kernel, _, _, source in fields("choices.tsv"):
        by_kernel.setdefault(kernel.partition("/")[0], set()).add((f"{key}\t{algorithm}", source))
    alone = (problems.pop() for problems in by_kernel.values() if len(problems) == 1)
    problem = next(p for p, source in alone if source not in {*each, "beside"})
    return [line for line in lines if f"\t{problem}\t" not in line]


def with_a_problem_of_no_bench(lines: list[str]) -> list[str]:
    return [*lines, lines[0].replace(" n64 ", " n63 ")]


class Tables:
    """Copies of the tables of choices in a separate folder."""

    def __init__(self, program: pathlib.Path, folder: pathlib.Path):
        self.program, self.folder = program, folder
        for name in ("choices.tsv", "never_chosen.tsv", "bench_problems.tsv"):
            shutil.copy(TESTS / "cc" / name, folder)

    def edit(self, name: str, edit) -> None:
        lines = (self.folder / name).read_text().splitlines()
        head = [line for line in lines if line.startswith("#")]
        text = "\n".join([*head, *edit(lines[len(head) :])]) + "\n"
        (self.folder / name).write_text(text)

    def run(self, *arguments: str) -> subprocess.CompletedProcess:
        command = [str(self.program), *arguments, str(self.folder)]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture
def tables(choices_program, tmp_path) -> Tables:
    return Tables(choices_program, tmp_path)


# A table, a change of its lines, and what the program then prints, which is "" if it accepts them.
EDITS = [
    ("choices.tsv", other_kernel, "expected fprop_few_channels_bf16_128x64_chunks/7 in"),
    ("choices.tsv", times(1.2), ""),
    ("choices.tsv", times(1.3), "us and ="),
    ("choices.tsv", times(0.77), "us and ="),
    ("choices.tsv", lambda lines: lines[1:], "choices.tsv lacks a100 fprop"),
    ("choices.tsv", without_a_problem_that_alone_has_an_instance, "choices.tsv lacks a100"),
    ("choices.tsv", with_a_problem_of_no_bench, "of them beside or of the benches"),
    ("never_chosen.tsv", lambda lines: lines[1:], "never_chosen.tsv is"),
    ("never_chosen.tsv", lambda lines: [*lines, "a\tb\tnobody"], "never_chosen.tsv is"),
    ("bench_problems.tsv", lambda lines: lines[1:], "of them beside or of the benches"),
]


@pytest.mark.long
def test_the_table_of_choices_protects(choices_program, tmp_path):
    """One process compares all edited tables: most of its time goes into the choices themselves."""
    folders = [tmp_path / str(i) for i in range(len(EDITS))]
    for folder, (table, edit, _) in zip(folders, EDITS, strict=True):
        folder.mkdir()
        Tables(choices_program, folder).edit(table, edit)
    command = [str(choices_program), *map(str, folders)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 1
    *said, rest = re.split(r"^(/.*): .* (\d+) failures\n", ran.stdout, flags=re.MULTILINE)
    assert said[1::3] == command[1:] and not rest
    for (*_, message), text, failures in zip(EDITS, said[::3], said[2::3], strict=True):
        assert (failures != "0") == bool(message) and message in text, text[-4000:]


@pytest.mark.long
def test_the_tables_of_choices_are_those_that_are_written(tables):
    for edit in (
        without_a_problem_that_alone_has_an_instance,
        with_a_problem_of_no_bench,
        other_kernel,
        times(1.3),
    ):
        tables.edit("choices.tsv", edit)
    tables.edit("never_chosen.tsv", lambda lines: lines[:3])
    assert tables.run("--write").returncode == 0
    for name in ("choices.tsv", "never_chosen.tsv"):
        assert (tables.folder / name).read_text() == (TESTS / "cc" / name).read_text()


def test_selection_answers_line_by_line(choices_program):
    gpu, key, algorithm, choice, *_ = fields("choices.tsv")[0]
    asked = f"{gpu}\t{key}\t{algorithm}\n{gpu}\t{key}\tigemm\nh300\t{key}\tauto\n"
    command = [str(choices_program), "--select"]
    ran = subprocess.run(command, input=asked, capture_output=True, text=True, check=False)
    chosen, unknown, no_gpu = ran.stdout.splitlines()
    instance, _, slices, *_ = chosen.split("\t")
    assert f"{instance}/{slices}" == choice
    assert unknown.startswith("!algorithm: expected") and no_gpu.startswith("!expected GPU, key")


@pytest.mark.long
@pytest.mark.parametrize("networks", [0, pytest.param(100, marks=pytest.mark.slow)])
def test_the_problems_of_the_benches_are_in_their_table(choices_program, networks):
    """``tools/bench_problems.py`` writes the table from the bench's layers and the networks."""
    if isinstance(kernels := native.load("cpu"), native.Refusal):
        pytest.skip(kernels.reason)
    tool = TESTS.parent / "tools" / "bench_problems.py"
    command = [sys.executable, str(tool), "--check", "--program", str(choices_program)]
    command += ["--networks", str(networks)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert ran.returncode == 0, f"run tools/bench_problems.py\n{(ran.stdout + ran.stderr)[-8000:]}"
