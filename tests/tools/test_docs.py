"""Runs the Python blocks of docs/: each is a test; a page's blocks share a namespace, in order."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import pathlib
import re
from typing import Any, NamedTuple

import jax
import pytest

import jaxconv

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"
PAGES = (
    "adopting.md",
    "index.md",
    "tour.md",
    "precision.md",
    "export.md",
    "sharding.md",
    "fusing.md",
    "quantised_inference.md",
    "winograd.md",
)
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# A comment directly above a block: the modules or devices it needs, or that it shows output.
COMMENT = re.compile(r"<!-- (needs: (?P<needs>.+)|(?P<printed>printed)) -->\n\Z")


class Block(NamedTuple):
    file: str
    line: int  # the page's line number of its first line
    language: str
    needs: str
    printed: bool
    text: str


def blocks(file: str) -> list[Block]:
    page = (DOCS / file).read_text()
    found = []
    for fence in FENCE.finditer(page):
        comment = COMMENT.search(page[: fence.start()])
        found.append(
            Block(
                file=file,
                line=page.count("\n", 0, fence.start(2)) + 1,
                language=fence[1],
                needs=(comment and comment["needs"]) or "",
                printed=bool(comment and comment["printed"]),
                text=fence[2],
            )
        )
    return found


pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu",
    reason="the pages are of a machine whose default device is a CPU",
)

BLOCKS = [block for file in PAGES for block in blocks(file)]


def program(file: str) -> list[Block]:
    return [block for block in BLOCKS if block.file == file and block.language == "python"]


def name(block: Block) -> str:
    """For example "line24"; prefixed with the page's name except on the first page."""
    page = "" if block.file == PAGES[0] else block.file.removesuffix(".md") + "-"
    return f"{page}line{block.line}"


def missing(needs: str) -> str:
    """The reason why a block cannot run here, or ""."""
    if not needs:
        return ""
    if devices := re.fullmatch(r"(\d+) devices", needs):
        count = len(jax.devices("cpu"))
        return "" if count >= int(devices[1]) else f"needs {needs}, has {count}"
    try:
        importlib.import_module(needs)
    except ImportError as error:  # not installed, or made for another JAX
        return f"{needs} cannot be imported: {error}"
    return ""


class Reader:
    """Runs one page once, from the top, up to the block that a test asks for."""

    def __init__(self, file: str):
        self.file = file
        self.namespace: dict[str, Any] = {"__name__": file.removesuffix(".md")}
        self.printed: dict[Block, str] = {}
        self.failed: Block | None = None

    def read(self, block: Block) -> None:
        blocks = program(self.file)
        for each in blocks[len(self.printed) : blocks.index(block) + 1]:
            if self.failed:
                pytest.skip(f"the block at line {self.failed.line} failed")
            self.failed = each
            with contextlib.redirect_stdout(io.StringIO()) as out:
                if not missing(each.needs):
                    # Empty lines give the block its line numbers of the page, for tracebacks.
                    source = "\n" * (each.line - 1) + each.text
                    exec(compile(source, DOCS / self.file, "exec"), self.namespace)
            self.printed[each] = out.getvalue()
            self.failed = None


@pytest.fixture(scope="module")
def readers():
    logger = logging.getLogger("jaxconv")
    level = logger.level
    with jax.default_device(jax.devices("cpu")[0]):
        yield {file: Reader(file) for file in PAGES}
    logger.setLevel(level)
    jaxconv.uninstall()


@pytest.mark.parametrize("block", [b for file in PAGES for b in program(file)], ids=name)
def test_block(readers, native_cpu, block):
    if reason := missing(block.needs):
        pytest.skip(reason)
    readers[block.file].read(block)


@pytest.mark.parametrize("shown", [b for b in BLOCKS if b.printed], ids=name)
def test_output_shown_is_what_is_printed(readers, native_cpu, shown):
    """Line numbers, and the kernel that depends on the number of cores, may differ."""
    reader = readers[shown.file]
    printing = max((b for b in program(shown.file) if b.line < shown.line), key=lambda b: b.line)
    reader.read(printing)

    def cells(text: str) -> list[list[str]]:
        text = re.sub(r"\.md:\d+", ".md", text)
        text = re.sub(r"\bwgrad_(onednn|gemm)_f32\b", "wgrad_either_f32", text)
        return [re.split(r" {2,}", line.strip()) for line in text.strip().splitlines()]

    assert cells(reader.printed[printing]) == cells(shown.text)


@pytest.mark.parametrize("file", PAGES)
def test_a_page_leaves_nothing_installed(readers, native_cpu, file):
    readers[file].read(program(file)[-1])
    x, w = jax.ShapeDtypeStruct((1, 2, 8), "float32"), jax.ShapeDtypeStruct((3, 2, 3), "float32")
    explanation = jaxconv.explain(lambda x, w: jax.lax.conv(x, w, (1,), "SAME"), x, w)
    assert explanation.on_kernels == 0
