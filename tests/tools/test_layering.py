"""The layers of the code, from its includes and imports; dependencies have one direction.

core <- cuda/ptx <- cuda/common <- families <- cuda <- ffi <- bindings, core <- cpu <- ffi
"""

from __future__ import annotations

import ast
import pathlib
import re

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
CC = REPOSITORY / "cc"

# A folder of cc/cuda with a table is a family. Families do not include each other.
FAMILIES = {f"cuda/{path.parent.name}" for path in CC.glob("cuda/*/kernels.def")}

# Passes: kernels without a convolution, which the handlers launch themselves.
AROUND = {"cuda/elementwise", "cuda/normalisation", "cuda/pooling"}

# Layer -> the layers whose headers it may include, itself among them.
MAY_INCLUDE = {
    "core": {"core"},
    "cpu": {"core", "cpu"},
    "cuda/ptx": {"core", "cuda/ptx"},
    "cuda/calibration": set(),
    "cuda/common": {"core", "cuda/calibration", "cuda/ptx", "cuda/common"},
    **{own: {"core", "cuda/ptx", "cuda/common", own} for own in FAMILIES | AROUND},
    # The files of cc/cuda itself, which search all families for a choice, a plan or a launch.
    "cuda": {"core", "cuda", "cuda/common", *FAMILIES},
    "ffi": {"core", "cpu", "cuda", "cuda/common", *AROUND, "ffi"},
    # The Python module includes only the interface of a platform.
    "bindings": {"ffi"},
}
# Foreign headers by layer. Every layer may use the C++ standard library.
MAY_USE = {
    "core": set(),
    "cpu": {"dnnl", "intrinsics", "memory advice", "openmp"},
    "cuda/ptx": {"cuda"},
    "cuda/common": {"cuda"},
    **{own: {"cuda"} for own in FAMILIES | AROUND},
    "cuda": set(),
    "ffi": {"xla"},
    "bindings": {"nanobind"},
}
FOREIGN = {
    "memory advice": re.compile(r"sys/mman\.h"),
    "dnnl": re.compile(r"(oneapi/)?dnnl(/.*)?(\.h|\.hpp)|dnnl.*\.(h|hpp)"),
    "intrinsics": re.compile(r"(immintrin|cpuid|x86intrin)\.h"),
    "openmp": re.compile(r"omp\.h"),
    "cuda": re.compile(r"(cuda|cuda_\w+|mma|vector_types|cooperative_groups)(\.h|/.*)?|cuda/.*"),
    "xla": re.compile(r"xla/.*"),
    "nanobind": re.compile(r"nanobind/.*"),
}
# Selection and planning need no CUDA toolkit: all .cc files of cc/cuda, and headers that handlers
# include.
PLAIN = re.compile(r".*\.(h|cc|def)")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)


def layer_of(path: str) -> str | None:
    folder = path.rpartition("/")[0]
    return folder if folder in MAY_INCLUDE else None


def forbidden_includes(path: str, text: str) -> list[str]:
    """Complaints about the includes of one file; ``path`` is relative to cc/."""
    layer = layer_of(path)
    if layer is None:
        return [f"{path}: belongs to no layer"]
    wrong = []
    for bracket, name in INCLUDE.findall(text):
        target = layer_of(name)
        kind = next((k for k, pattern in FOREIGN.items() if pattern.fullmatch(name)), None)
        if target is not None and bracket == '"':
            if target not in MAY_INCLUDE[layer]:
                wrong.append(f"{path}: {layer} must not include {name} of {target}")
            elif (layer == "ffi" or path.endswith(".cc")) and not PLAIN.fullmatch(name):
                wrong.append(f"{path}: plain C++ sees no device code, not {name}")
        elif kind is not None:
            if kind not in MAY_USE[layer] or (kind == "cuda" and path.endswith(".cc")):
                wrong.append(f"{path}: {layer} must not include {name} ({kind})")
        elif not re.fullmatch(r"[a-z_0-9]+", name):  # standard headers have neither '/' nor '.'
            wrong.append(f"{path}: {name} is neither ours nor of the standard library")
    return wrong


CC_FILES = sorted(p for p in CC.rglob("*") if p.suffix in (".h", ".cc", ".cu", ".cuh"))


def test_every_include_follows_the_layers():
    assert len(CC_FILES) > 10
    wrong = []
    for path in CC_FILES:
        wrong += forbidden_includes(path.relative_to(CC).as_posix(), path.read_text())
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("path", "include"),
    [
        ("core/a.h", '"cuda/common/b.cuh"'),
        ("core/a.h", "<cuda_runtime.h>"),
        ("core/a.h", '"xla/ffi/api/ffi.h"'),
        ("core/a.h", "<unistd.h>"),
        ("cuda/common/a.cuh", '"cuda/igemm_simt/b.cuh"'),
        ("cuda/common/a.cc", '"cuda/registry.h"'),
        ("cuda/common/a.cc", '"cuda/common/launch.cuh"'),
        ("cuda/common/a.cc", "<cuda_runtime.h>"),
        ("cuda/igemm_simt/a.cuh", '"cuda/igemm_wmma/b.cuh"'),
        ("cuda/igemm_simt/a.cuh", '"cuda/launch_table.h"'),
        ("cuda/igemm_simt/plan.cc", '"cuda/select.h"'),
        ("cuda/igemm_simt/plan.cc", '"cuda/igemm_simt/b.cuh"'),
        ("cuda/igemm_simt/a.cuh", '"ffi/call.h"'),
        ("cuda/igemm_simt/a.cuh", "<cudnn.h>"),
        ("cuda/registry.cc", '"cuda/igemm_simt/b.cuh"'),
        ("cpu/a.cc", '"cuda/common/b.h"'),
        ("cpu/a.cc", '"xla/ffi/api/ffi.h"'),
        ("cpu/a.cc", "<cuda_runtime.h>"),
        ("ffi/a.cc", '"cuda/common/b.cuh"'),
        ("ffi/a.cc", '"cuda/igemm_simt/plan.h"'),
        ("ffi/a.cc", "<cuda_runtime.h>"),
        ("ffi/a.cc", "<nanobind/nanobind.h>"),
        ("bindings/a.cc", '"cpu/b.h"'),
        ("bindings/a.cc", '"xla/ffi/api/ffi.h"'),
        ("elsewhere/a.cc", "<vector>"),
    ],
)
def test_a_forbidden_include_is_found(path, include):
    assert forbidden_includes(path, f"#include {include}\n")


def declared_below(headers: list[str], sources: list[str]) -> list[str]:
    """Sources whose header lies in another folder: a layer must not declare code of another."""
    folders: dict[str, set[str]] = {}
    for path in headers:
        folder, _, name = path.rpartition("/")
        folders.setdefault(name.rpartition(".")[0], set()).add(folder)
    wrong = []
    for path in sources:
        folder, _, name = path.rpartition("/")
        declared = folders.get(name.rpartition(".")[0].removesuffix("_sm90"), {folder})
        if folder not in declared:
            wrong.append(f"{path}: declared in {', '.join(sorted(declared))}")
    return wrong


def test_a_source_stands_beside_its_header():
    names = [path.relative_to(CC).as_posix() for path in CC_FILES]
    headers = [name for name in names if name.endswith(".h")]
    wrong = declared_below(headers, [name for name in names if name.endswith((".cc", ".cu"))])
    assert not wrong, "\n".join(wrong)
    below = declared_below(["cuda/common/registry.h"], ["cuda/registry.cc"])
    assert below == ["cuda/registry.cc: declared in cuda/common"]


# --- Python ---------------------------------------------------------------------------------------

PACKAGE = REPOSITORY / "jaxconv"
PYTHON_FILES = sorted(PACKAGE.rglob("*.py"))


def imports(tree: ast.AST) -> set[str]:
    """Dotted names of all imports: modules, and the names imported from them."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def forbidden_imports(path: str, text: str) -> list[str]:
    """Complaints about the imports of one module; ``path`` is relative to the repository."""
    tree, wrong = ast.parse(text), []
    inner = path.startswith("jaxconv/_src/")
    for name in sorted(imports(tree)):
        if within(name, "jax._src") and path != "jaxconv/_src/compat.py":
            wrong.append(f"{path}: imports {name}; private JAX belongs into _src/compat.py")
        if within(name, "_jaxconv"):
            wrong.append(
                f"{path}: imports {name}; the compiled modules are loaded by _src/library/native.py"
            )
        if inner and within(name, "jaxconv") and not within(name, "jaxconv._src"):
            wrong.append(f"{path}: imports {name}; _src must not look at the public modules")
        if path.startswith("examples/") and within(name, "jaxconv._src"):
            wrong.append(f"{path}: imports {name}; examples use public names")
        if path == "jaxconv/_src/compat.py" and within(name, "jaxconv"):
            wrong.append(f"{path}: imports {name}; compat imports only jax")
    # Loading by name counts as an import.
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and path != "jaxconv/_src/library/native.py":
            loads = ast.unparse(node.func).endswith(("import_module", "__import__"))
            if loads and "_jaxconv" in ast.unparse(node):
                only = "only _src/library/native.py loads the kernels"
                wrong.append(f"{path}: {ast.unparse(node)}; {only}")
    return wrong


# The rooms of _src from the bottom up: compat is a module, the others are packages. A module
# imports from its own room and from those below; rooms on the same floor do not import each other.
FLOORS = (
    ("compat",),
    ("problem",),
    ("library",),
    ("sharding",),
    ("ways",),
    ("call",),
    ("conv", "int8", "winograd"),
    ("functions",),
    ("lax",),
    ("passes",),
    ("fuse",),
    ("report",),
)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def runtime(tree: ast.AST) -> ast.AST:
    """A module without the imports that serve only its annotations."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = [ast.Pass()]
    return tree


def imports_above(room: str, text: str) -> list[str]:
    """The imports of a room's module from other rooms on its floor, or from floors above."""
    rooms = {
        n.split(".")[2] for n in imports(runtime(ast.parse(text))) if within(n, "jaxconv._src")
    }
    return sorted(r for r in rooms - {room} if FLOOR[r] >= FLOOR[room])


def test_every_import_follows_the_layers():
    wrong = []
    for path in [*PYTHON_FILES, *sorted((REPOSITORY / "examples").rglob("*.py"))]:
        wrong += forbidden_imports(path.relative_to(REPOSITORY).as_posix(), path.read_text())
    assert not wrong, "\n".join(wrong)


def test_rooms_import_those_below():
    inner = PACKAGE / "_src"
    rooms = {p.stem for p in inner.iterdir() if p.is_dir() or p.suffix == ".py"}
    assert rooms - {"__init__", "__pycache__"} == FLOOR.keys()
    wrong = []
    for path in sorted(inner.rglob("*.py")):
        room, *_ = path.relative_to(inner).with_suffix("").parts
        if room != "__init__":
            above = imports_above(room, path.read_text())
            wrong += [f"{path.relative_to(REPOSITORY)} imports {other}" for other in above]
    assert not wrong, "\n".join(wrong)


def test_an_import_from_above_is_found():
    assert imports_above("sharding", "from jaxconv._src.call import record") == ["call"]
    assert imports_above("int8", "from jaxconv._src.conv.fused import Fused") == ["conv"]
    assert not imports_above("fuse", "from jaxconv._src.fuse import fuse_graph")
    assert not imports_above(
        "sharding",
        """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from jaxconv._src.call.call import Call
""",
    )


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("jaxconv/doctor.py", "from jax._src import core"),
        ("jaxconv/doctor.py", "import _jaxconv.cpu"),
        ("jaxconv/doctor.py", "import importlib\nimportlib.import_module('_jaxconv.cpu')"),
        ("jaxconv/_src/ways/xla.py", "from jaxconv import conv"),
        ("jaxconv/_src/compat.py", "from jaxconv._src.problem import spec"),
        ("examples/train.py", "from jaxconv._src.conv import primitives"),
    ],
)
def test_a_forbidden_import_is_found(path, text):
    assert forbidden_imports(path, text)


# --- names ----------------------------------------------------------------------------------------

# Words without content, or that become wrong with the next change.
BANNED = {"fast", "optimized", "new", "v2", "helper", "helpers", "misc", "utils", "util"}
# Names given from outside: an established term, and C++ library functions.
GIVEN = {"FastDivmod", "fast_divmod"}
COMMENT_OR_STRING = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"', re.DOTALL)


def words(name: str) -> set[str]:
    """Splits a name: newValue_v2 -> {new, value, v2}."""
    split = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name)
    return {word.lower() for word in re.split(r"[_\W]+", split) if word}


def banned_in(name: str) -> bool:
    return name not in GIVEN and bool(words(name) & BANNED)


def cc_names(text: str) -> set[str]:
    """Identifiers of a C++ file without its comments, strings and preprocessor lines."""
    text = re.sub(r"^\s*#.*$", "", COMMENT_OR_STRING.sub("", text), flags=re.MULTILINE)
    return {name for name in re.findall(r"[A-Za-z_]\w+", text) if name != "new"}


def python_names(text: str) -> set[str]:
    """Names that a Python file defines: functions, classes, parameters, variables."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def test_names_say_something():
    wrong = []
    folders = [REPOSITORY / name for name in ("cc", "jaxconv", "tests", "examples")]
    for path in sorted(p for folder in folders for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(REPOSITORY).as_posix()
        if "__pycache__" in name:
            continue
        stem = path.name.split(".")[0].removesuffix("_test")
        wrong += [f"{name}: file name"] * banned_in(stem)
        if path.suffix == ".py":
            wrong += [
                f"{name}: {n}" for n in sorted(python_names(path.read_text())) if banned_in(n)
            ]
        elif path.suffix in (".h", ".cc", ".cu", ".cuh"):
            wrong += [f"{name}: {n}" for n in sorted(cc_names(path.read_text())) if banned_in(n)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", ["fast_path", "ConvV2", "newLayout", "misc", "StringUtils"])
def test_a_banned_name_is_found(name):
    assert banned_in(name)
    assert name in cc_names(f"int {name} = 0;  // {name}") and name in python_names(f"{name} = 0")
    assert name not in cc_names(f'// {name}\nconst char* a = "{name}";')


def shared_classes(texts: dict[str, str]) -> list[str]:
    """Names of classes that several modules define."""
    modules: dict[str, list[str]] = {}
    for path, text in texts.items():
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef):
                modules.setdefault(node.name.lstrip("_"), []).append(path)
    return [f"{name}: {', '.join(where)}" for name, where in modules.items() if len(where) > 1]


def test_a_class_name_means_one_thing():
    texts = {
        path.relative_to(REPOSITORY).as_posix(): path.read_text()
        for path in sorted((PACKAGE / "_src").rglob("*.py"))
        if FLOOR.get(path.parent.name, 0) < FLOOR["fuse"]
    }
    assert len(texts) > 40
    wrong = shared_classes(texts)
    assert not wrong, "\n".join(wrong)
    assert shared_classes({"a.py": "class Call: ...", "b.py": "class _Call: ..."})


# Folders that tests of any folder may import from.
SHARED_BY_TESTS = ("support", "emulator")


def wrong_imports_of_tests(texts: dict[str, str]) -> list[str]:
    """Imports of test modules, or from another folder's modules; ``texts`` by path below tests/."""
    paths = list(map(pathlib.PurePosixPath, texts))
    folders = {path.stem: path.parent.name for path in paths if path.parent.name}
    wrong = []
    for path in paths:
        for node in ast.walk(ast.parse(texts[str(path)])):
            modules = []
            if isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            elif isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            for name in (module.split(".")[0] for module in modules):
                known = folders.get(name)
                if name.startswith("test_") and known is not None:
                    wrong.append(f"{path}: imports the test {name}")
                elif known not in (None, path.parent.name, *SHARED_BY_TESTS):
                    wrong.append(f"{path}: imports {name} of {known}")
    return wrong


def test_tests_import_what_they_share_and_no_test():
    """Files have unique names, because pytest puts every folder of tests on the path."""
    paths = sorted((REPOSITORY / "tests").rglob("*.py"))
    texts = {p.relative_to(REPOSITORY / "tests").as_posix(): p.read_text() for p in paths}
    names = [path.name for path in paths if path.name != "conftest.py"]
    assert not [n for n in texts if "/" not in n and n != "conftest.py"], "they need a folder"
    assert len(texts) > 150 and not {name for name in names if names.count(name) > 1}
    wrong = wrong_imports_of_tests(texts)
    assert not wrong, "\n".join(wrong)
    found = wrong_imports_of_tests(
        {
            "a/test_x.py": "import y\nimport z, numpy",
            "b/y.py": "def f():\n    from test_x import g",
            "support/z.py": "",
            "conftest.py": "from z import w",
        }
    )
    assert found == ["a/test_x.py: imports y of b", "b/y.py: imports the test test_x"]


def test_files_can_be_read_at_one_sitting():
    """A file has at most 600 lines; device code at most 450."""
    found = [
        path
        for name in ("cc", "jaxconv", "tests", "tools", "examples")
        for path in (REPOSITORY / name).rglob("*")
        if path.suffix in (".py", ".h", ".cc", ".cu", ".cuh") and "__pycache__" not in path.parts
    ]
    lengths = {path: len(path.read_text().splitlines()) for path in found}
    assert lengths
    most = {path: 450 if path.suffix == ".cuh" else 600 for path in lengths}
    wrong = [f"{p.relative_to(REPOSITORY)}: {n}" for p, n in lengths.items() if n > most[p]]
    assert not wrong, "\n".join(wrong)
