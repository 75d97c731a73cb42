"""Builds run_kernels: kernel instances with their plans and launches, compiled for the emulator."""

from __future__ import annotations

import concurrent.futures
import functools
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

EMULATOR = pathlib.Path(__file__).resolve().parent
TESTS = EMULATOR.parent
CC = TESTS.parent / "cc"
sys.path[:0] = [str(TESTS / "support"), str(EMULATOR)]

import kernel_tables  # noqa: E402
import translate  # noqa: E402

INCLUDE = re.compile(r'^\s*#include "([^"]+)"', re.MULTILINE)
FLAGS = ["-std=c++17", "-O1", "-g1", "-ffp-contract=off", "-Wno-unknown-pragmas"]
# nvcc defines this macro, and includes this header in every CUDA source.
CUDA = ["-D__CUDACC__", "-include", "cuda_runtime.h"]
INCLUDES = [f"-I{folder}" for folder in (EMULATOR, CC, TESTS)]
# The generated units and the emulator replace these sources of the CUDA platform.
REPLACED = {CC / "cuda" / name for name in ("registry.cc", "launch_table.cc")}


def compiler() -> str | None:
    return shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")


@functools.cache
def forms() -> dict[str, tuple[str, ...]]:
    """Every instance of the tables: its family, operation, type, variant, header and form."""
    found = {}
    for table in sorted((CC / "cuda").glob("*/kernels.def")):
        text = kernel_tables.DIRECTIVE.sub("", kernel_tables.COMMENT.sub("", table.read_text()))
        for macro, arguments in kernel_tables.CALL.findall(text):
            if macro == "PADDED":
                continue
            ops, types, *rest = (part.strip() for part in arguments.split(",", 4))
            for op in ops.lower().split("_"):
                for dtype in types.lower().split("_"):
                    family = table.parent.name
                    name = f"{op}_{family}_{dtype}_{rest[0]}"
                    if macro == "KERNEL":
                        found[name] = (family, op, dtype, *rest)
                    else:
                        _, _, _, variant, *form = found[name]
                        found[f"{name}_fused"] = (family, op, dtype, f"{variant}_fused", *form)
    return found


def units(names: list[str]) -> dict[str, str]:
    """Translation units for some instances, one for each family, with a registry of only these.

    Other families need not even compile. CMake writes more units; here there are few because most
    of a unit's compile time goes into the standard library's headers.
    """
    known = forms()
    includes, instances = {}, {}
    declarations, kernels, launches, families = [], [], [], set()
    for name in names:
        plain = name.removesuffix("_padded")
        if plain not in known:
            raise SystemExit(f"no kernel instance {name}")
        family, op, dtype, variant, header, form = known[plain]
        families.add(family)
        lines = includes.setdefault(family, ['#include "cuda/common/instances.h"'])
        if (line := f'#include "cuda/{family}/{header}.cuh"') not in lines:
            lines.append(line)
        macro = "JAXCONV_FUSED_INSTANCE" if plain.endswith("_fused") else "JAXCONV_INSTANCE"
        instance = f"{macro}({op}, {family}, {dtype}, {variant}, {form})"
        unit = instances.setdefault(family, [])
        if instance not in unit:
            unit.append(instance)
            declarations.append(f"Status Launch_{plain}(const Plan&, const Operands&, void*);")
            launches.append(f'  if (name == "{plain}") return Launch_{plain};')
        described = plain.removesuffix("_fused")
        kernels.append(
            f"  for (const KernelDesc& kernel : of_{family}) {{\n"
            f'    if (name != "{name}" || kernel.name != std::string_view("{described}")) continue;'
        )
        if name == described:
            kernels.append("    return &kernel;\n  }")
        elif name == plain:
            kernels.append(f'    static const KernelDesc fused = FusedKernel(kernel, "{name}");')
            kernels.append("    return &fused;\n  }")
        else:
            launches.append(f'  if (name == "{name}") return LaunchPadded;')
            kernels.append(f'    static const KernelDesc padded = PaddedKernel(kernel, "{name}");')
            kernels.append("    return &padded;\n  }")
    texts = {
        f"{family}.cu": "\n".join([*includes[family], "namespace jaxconv {", *unit, "}", ""])
        for family, unit in instances.items()
    }
    texts["registry.cc"] = "\n".join(
        [
            '#include "cuda/launch_table.h"',
            '#include "cuda/common/padded_channels.h"',
            '#include "cuda/registry.h"',
            *(f'#include "cuda/{family}/plan.h"' for family in sorted(families)),
            "namespace jaxconv {",
            *declarations,
            "LaunchFunction FindLaunch(std::string_view name) {",
            *launches,
            "  return nullptr;\n}",
            "const KernelDesc* FindKernel(std::string_view name) {",
            *(f"  static const auto of_{name} = {name}::Kernels();" for name in sorted(families)),
            *kernels,
            "  return nullptr;\n}",
            "const std::vector<KernelDesc>& Kernels() {",
            "  static const std::vector<KernelDesc> kernels = {",
            *(f'    *FindKernel("{name}"),' for name in names),
            "  };\n  return kernels;\n}",
            "}",
            "",
        ]
    )
    return texts


def sources(roots: list[pathlib.Path]) -> list[pathlib.Path]:
    """The roots and, transitively, the sources that belong to the project headers included."""
    found, pending, seen = [], list(roots), set(REPLACED)
    while pending:
        file = pending.pop()
        if file in seen:
            continue
        seen.add(file)
        if file.suffix in (".cc", ".cu"):
            found.append(file)
        for name in INCLUDE.findall(file.read_text()):
            for folder in (file.parent, EMULATOR, CC, TESTS):
                header = folder / name
                if header.exists():
                    endings = (".cc", ".cu", "_sm90.cu")
                    beside = (header.with_name(header.stem + ending) for ending in endings)
                    pending += [header, *(s for s in beside if s.exists())]
                    break
    return found


def digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:20]


def command(arguments: list[str], text: str | None = None) -> str:
    ran = subprocess.run(arguments, input=text, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        raise RuntimeError(f"{' '.join(arguments)}\n{ran.stderr[:20000]}")
    return ran.stdout


def compiled(source: pathlib.Path, flags: list[str], folder: pathlib.Path) -> pathlib.Path:
    """The object file of a source, recompiled only if its preprocessed text has changed."""
    # A generated unit has the same path in every checkout, but its headers differ.
    record = folder / f"{source.stem}-{digest(str(source), *flags, *INCLUDES)}.json"
    if record.exists():
        target, files = json.loads(record.read_text())
        if files == {file: changed(file) for file in files}:
            return pathlib.Path(target)
    cuda = CUDA if source.suffix == ".cu" else []
    text = command([compiler(), *flags, *INCLUDES, *cuda, "-E", "-x", "c++", str(source)])
    files = {
        *map(str, EMULATOR.glob("*.py")),
        *re.findall(r'^# \d+ "([^<"]+)"', text, re.MULTILINE),
    }
    files = {file: changed(file) for file in files if os.path.isfile(file)}
    if source.suffix == ".cu":
        text = translate.translate(text)
    target = folder / f"{source.stem}-{digest(*flags, text)}.o"
    partial = folder / f"{target.name}.{os.getpid()}"
    if not target.exists():
        translated = folder / f"{partial.name}.ii"
        translated.write_text(text)
        command([compiler(), *flags, "-fpreprocessed", "-c", str(translated), "-o", str(partial)])
        partial.replace(target)
        translated.unlink()
    partial.write_text(json.dumps([str(target), files]))
    partial.replace(record)
    return target


def changed(file: str) -> int:
    """The time of a file's last change; 0 if it does not exist."""
    return os.stat(file).st_mtime_ns if os.path.exists(file) else 0


def build(
    names: list[str],
    folder: pathlib.Path,
    program: pathlib.Path = EMULATOR / "run_kernels.cc",
    sanitize: bool = False,
) -> pathlib.Path:
    """Compiles a program with some instances and returns its path.

    Raises:
        RuntimeError: with the compiler's message.
    """
    folder.mkdir(parents=True, exist_ok=True)
    flags = [*FLAGS]
    if sanitize:
        flags += ["-fsanitize=address,undefined", "-fno-sanitize=vptr", "-fno-omit-frame-pointer"]
    roots = [program, EMULATOR / "emulator.cc"]
    for name, text in units(names).items():
        unit = folder / digest(text) / name
        unit.parent.mkdir(exist_ok=True)
        if not unit.exists():
            unit.write_text(text)
        roots.append(unit)
    if any(name.endswith("_padded") for name in names):
        roots += [CC / "cuda" / name for name in ("launch_padded.cc", "common/pitched_copy.cu")]
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        # Device code takes longest, so it is compiled first.
        files = sorted(sources(roots), key=lambda file: (file.suffix, str(file)), reverse=True)
        objects = list(pool.map(lambda file: compiled(file, flags, folder), files))
    program = folder / f"{program.stem}-{digest(*map(str, objects))}"
    if not program.exists():
        partial = folder / f"{program.name}.{os.getpid()}"
        command([compiler(), *flags, *map(str, objects), "-o", str(partial)])
        partial.replace(program)
    return program
