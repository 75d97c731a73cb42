"""XLA's optimised programs as text: their instructions, and the bytes that their kernels move.

``compiled.as_text()`` of a GPU program has one instruction of the entry computation for each kernel
(fusion, custom call or copy), those in command buffers are in the computation of a ``call``.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator
from typing import NamedTuple

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+)[ (].*\{$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_TARGET = re.compile(r'custom_call_target="([^"]+)"')
_CALLED = re.compile(r"(?:calls|to_apply)=%?([\w.\-]+)")
_COMMENT = re.compile(r"/\*.*?\*/")

# Custom calls of convolutions and products: ours, and those of other libraries.
_COMPUTING = re.compile(
    r"jaxconv_(fprop|dgrad|wgrad|fused|int8|prepared)"
    r"|__cudnn\$conv|__cublas\$|__onednn\$(conv|matmul)"
)


class Instruction(NamedTuple):
    """One instruction: ``target`` is a custom call's, ``called`` the computation of a fusion."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    target: str
    called: str

    @property
    def computes(self) -> bool:
        """Whether it is a custom call of a convolution or a product."""
        return bool(_COMPUTING.match(self.target))


class Program(NamedTuple):
    """The instructions of every computation by its name, and the name of the entry."""

    computations: dict[str, list[Instruction]]
    entry: str


def parse(text: str) -> Program:
    """Reads a program."""
    computations: dict[str, list[Instruction]] = {}
    name = entry = ""
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            name = match[2]
            computations[name] = []
            entry = name if match[1] else entry
        elif name and (match := _INSTRUCTION.match(line)):
            computations[name].append(_instruction(match[1], _COMMENT.sub("", match[2])))
    return Program(computations, entry)


def _instruction(name: str, text: str) -> Instruction:
    end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    opcode = _OPCODE.match(text, end)
    if opcode is None:
        return Instruction(name, text[:end], "", (), "", "")
    close = _closing(text, opcode.end() - 1)
    operands = [o.split()[-1].lstrip("%") for o in _split(text[opcode.end() : close]) if o.strip()]
    target, called = _TARGET.search(text, close), _CALLED.search(text, close)
    return Instruction(
        name,
        text[:end],
        opcode[1],
        tuple(operands),
        target[1] if target else "",
        called[1] if called else "",
    )


def _closing(text: str, start: int) -> int:
    """The place of the parenthesis that closes the one at ``start``."""
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if depth == 0:
            return place
    return len(text)


def _split(text: str) -> Iterator[str]:
    """The parts between commas outside brackets."""
    depth = start = 0
    for place, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            yield text[start:place]
            start = place + 1
    yield text[start:]


# --- bytes ---

_BITS = {"pred": 8, "s4": 4, "u4": 4, "bf16": 16}
_ARRAY = re.compile(r"\b(pred|bf16|[suf]\d+)(?:e\d+m\d+\w*)?\[([\d,]*)\]")

# Instructions that move nothing, or the second half of one that is counted at its start.
_FREE = ("parameter", "get-tuple-element", "tuple", "bitcast", "constant", "after-all")
_CONTROL = ("call", "async-start")

_SMALL = 1_000_000  # bytes below which a kernel takes as long as its launch


class Kernel(NamedTuple):
    """The bytes that one kernel moves: each operand counts once, workspaces of libraries do not.

    ``kind`` is the target of a custom call, also of one within a fusion, or a fusion's contents.
    ``computing``: whether it is a convolution or a matrix product.
    """

    name: str
    kind: str
    type: str
    read: int
    written: int
    computing: bool

    @property
    def bytes(self) -> int:
        return self.read + self.written

    @property
    def category(self) -> str:
        """The kind; XLA's own small kernels have a separate category."""
        called = self.kind.startswith(("jaxconv_", "__"))
        small = self.bytes < _SMALL and not called and not self.computing
        return f"{self.kind}, below 1 MB" if small else self.kind


def array_bytes(type_: str) -> list[int]:
    """Bytes of each array in a type."""
    sizes = []
    for dtype, dimensions in _ARRAY.findall(type_):
        count = 1
        for extent in filter(None, dimensions.split(",")):
            count *= int(extent)
        bits = _BITS.get(dtype) or int(dtype[1:])
        sizes.append(-(-count * bits // 8))
    return sizes


def kernels(program: Program, computation: str = "") -> Iterator[Kernel]:
    """The kernels of the entry computation, or of another one, and of those that it calls."""
    instructions = program.computations[computation or program.entry]
    types = {each.name: each.type for each in instructions}
    for each in instructions:
        if each.opcode in _FREE or each.opcode.endswith("-done"):
            continue
        if each.opcode in _CONTROL and each.called in program.computations:
            yield from kernels(program, each.called)
            continue
        read = sum(sum(array_bytes(types[o])) for o in dict.fromkeys(each.operands) if o in types)
        sizes = array_bytes(each.type)
        of_library = each.target.startswith("__")
        written = sizes[0] if of_library and sizes else sum(sizes)
        kind, computing = _kind(program, each)
        yield Kernel(each.name, kind, each.type, read, written, computing)


def _kind(program: Program, instruction: Instruction) -> tuple[str, bool]:
    if instruction.target:
        return instruction.target, instruction.computes
    if instruction.opcode != "fusion":
        return instruction.opcode, instruction.opcode in ("convolution", "dot")
    called = program.computations[instruction.called]
    if call := next((each for each in called if each.target), None):
        return call.target, call.computes  # fused with slices of its operands or results
    inside = {each.opcode for each in called}
    if inside & {"convolution", "dot"}:
        return "fusion: product", True
    words = {"scatter": "scatter", "reduce-window": "window", "reduce": "sums"}
    word = next((word for opcode, word in words.items() if opcode in inside), "elementwise")
    return f"fusion: {word}" + (", pad" if "pad" in inside else ""), False


class Total(NamedTuple):
    """The kernels of one category: how many, and their bytes."""

    count: int
    bytes: int


def totals(found: list[Kernel]) -> dict[str, Total]:
    """Sums of kernels by category, the largest first."""
    counts, moved = collections.Counter(), collections.Counter()
    for kernel in found:
        counts[kernel.category] += 1
        moved[kernel.category] += kernel.bytes
    return {name: Total(counts[name], bytes_) for name, bytes_ in moved.most_common()}


def outside(found: list[Kernel]) -> int:
    """Bytes moved by kernels that are neither convolutions nor products."""
    return sum(kernel.bytes for kernel in found if not kernel.computing)
