"""Translates CUDA into C++ for the emulator.

The input is preprocessed text, in which macros are expanded. Three constructs are not C++ and are
rewritten; everything else is kept line by line:

    asm("mma.sync... {%0, %1}, ..." : "+f"(d[0]) : "r"(a))   calls of the functions in ptx.h
    __shared__ T name[3];  extern __shared__ T name[];         references into the CTA's memory
    kernel<<<grid, threads>>>(arguments)                        emulator::Chevrons
"""

from __future__ import annotations

import ast
import re
import threading

# PTX instruction -> C++ statement. {0}, {1}, ... are its operands, {a}, {b}, ... named groups. An
# address [x + 4] is one operand, x + 4; [map, {c0, c1}] is two.
INSTRUCTIONS = [
    (re.compile(pattern), re.sub(r"\b(?=[A-Z]\w*[(<])", "emulator::ptx::", statement))
    for pattern, statement in (
        (r"mov\.[bsuf](?:16|32|64)", "{0} = {1}"),
        (r"mad\.wide\.s32", "{0} = int64_t(int32_t({1})) * int32_t({2}) + {3}"),
        (r"setp\.eq\.[bsu]32", "{0} = {1} == {2}"),
        (r"setp\.ne\.[bsu]32", "{0} = {1} != {2}"),
        (r"selp\.[bsu]32", "{0} = {3} ? {1} : {2}"),
        (r"bra", "goto {0}"),
        (r"prmt\.b32", "{0} = Prmt({1}, {2}, {3})"),
        (r"add\.f32", "{0} = {1} + {2}"),
        (r"max\.NaN\.f32", "{0} = MaxNan({1}, {2})"),
        (r"min\.NaN\.f32", "{0} = MinNan({1}, {2})"),
        (r"ex2\.approx\.ftz\.f32", "{0} = PowerOf2({1})"),
        (r"rcp\.approx\.ftz\.f32", "{0} = Reciprocal({1})"),
        (
            r"cvt\.pack\.sat\.(?P<a>[su]8)\.s32\.b32",
            "{0} = PackSaturated<{a}::Byte>({1}, {2}, {3})",
        ),
        (r"ld\.shared(?:::cta|::cluster)?(?:\.v[24])?\.[bsuf]32", "LoadShared(List({0}), {1})"),
        (r"st\.shared(?:::cta|::cluster)?(?:\.v[24])?\.[bsuf]32", "StoreShared({0}, List({1}))"),
        (
            r"ldmatrix\.sync\.aligned\.m8n8\.x(?P<a>[124])\.shared(?:::cta)?\.b16",
            "MoveMatrices<{a}, false, false>(List({0}), {1})",
        ),
        (
            r"ldmatrix\.sync\.aligned\.m8n8\.x(?P<a>[124])\.trans\.shared(?:::cta)?\.b16",
            "MoveMatrices<{a}, true, false>(List({0}), {1})",
        ),
        (
            r"stmatrix\.sync\.aligned\.m8n8\.x(?P<a>[124])\.shared(?:::cta)?\.b16",
            "MoveMatrices<{a}, false, true>(List({1}), {0})",
        ),
        (
            r"stmatrix\.sync\.aligned\.m8n8\.x(?P<a>[124])\.trans\.shared(?:::cta)?\.b16",
            "MoveMatrices<{a}, true, true>(List({1}), {0})",
        ),
        (
            r"mma\.sync\.aligned\.m16n8k(?:8|16|32)\.row\.col\.(?:f32|s32)"
            r"\.(?P<a>\w+)\.(?P<b>\w+)\.(?:f32|s32)",
            "Mma<{a}, {b}>({0}, {1}, {2}, {3})",
        ),
        (
            r"cp\.async\.c[ag]\.shared(?:::cta)?\.global(?:\.L2::\d+B)?",
            "CopyAsyncUnless({0}, {1}, {2}, {3})",
        ),
        (r"cp\.async\.commit_group", "CopyAsyncCommit()"),
        (r"cp\.async\.wait_group", "CopyAsyncWait({0})"),
        (r"cp\.async\.wait_all", "CopyAsyncCommit(), CopyAsyncWait(0)"),
        (r"prefetch\.(?:global\.L2|tensormap)", ""),
        (r"mapa\.shared::cluster\.u32", "{0} = MapToRank({1}, {2})"),
        (r"barrier\.cluster\.arrive(?:\.release|\.relaxed)?(?:\.aligned)?", "ClusterArrive()"),
        (r"barrier\.cluster\.wait(?:\.acquire)?(?:\.aligned)?", "ClusterWait()"),
        (r"mbarrier\.init\.shared(?:::cta)?\.b64", "MbarrierInit({0}, {1})"),
        (
            r"mbarrier\.arrive(?:\.release\.(?:cta|cluster))?\.shared(?:::cta|::cluster)?\.b64",
            "MbarrierArrive({1}, 1, 0)",
        ),
        (
            r"mbarrier\.arrive\.expect_tx(?:\.release\.(?:cta|cluster))?"
            r"\.shared(?:::cta|::cluster)?\.b64",
            "MbarrierArrive({1}, 1, {2})",
        ),
        (
            r"mbarrier\.try_wait\.parity(?:\.acquire\.(?:cta|cluster))?\.shared(?:::cta)?\.b64",
            "{0} = TryWait({1}, {2})",
        ),
        (
            r"mbarrier\.test_wait\.parity(?:\.acquire\.(?:cta|cluster))?\.shared(?:::cta)?\.b64",
            "{0} = MbarrierTest({1}, {2})",
        ),
        (r"elect\.sync", "{0} = Elect({1})"),
        (
            r"cp\.async\.bulk\.tensor\.[1-5]d\.shared::cluster\.global(?:\.tile)?"
            r"\.mbarrier::complete_tx::bytes(?:\.multicast::cluster)?",
            "CopyTile({operands})",
        ),
        (
            r"cp\.async\.bulk\.tensor\.[3-5]d\.shared::cluster\.global\.im2col"
            r"\.mbarrier::complete_tx::bytes(?:\.multicast::cluster)?",
            "CopyIm2col({operands})",
        ),
        (r"cp\.async\.bulk\.prefetch\.\S+", ""),
        (
            r"cp\.async\.bulk\.tensor\.[1-5]d\.global\.shared::cta(?:\.tile)?\.bulk_group",
            "StoreTile({operands})",
        ),
        (r"cp\.async\.bulk\.commit_group", "BulkCommit()"),
        (r"cp\.async\.bulk\.wait_group(?:\.read)?", "BulkWait({0})"),
        (
            r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k\d+\.(?:f32|s32)\.(?P<a>\w+)\.(?P<b>\w+)",
            "Wgmma<{a}, {b}>({operands})",
        ),
        (r"wgmma\.fence\.sync\.aligned", ""),
        (r"wgmma\.commit_group\.sync\.aligned", "WarpgroupCommit()"),
        (r"wgmma\.wait_group\.sync\.aligned", "WarpgroupWait({0})"),
        (r"(?:bar|barrier)\.sync", "BarrierSync({0}, {1})"),
        (r"bar\.arrive", "BarrierArrive({0}, {1})"),
        (r"griddepcontrol\.\w+", ""),
        (r"setmaxnreg\.(?:inc|dec)\.sync\.aligned\.u32", ""),
        (r"fence\.\S+", ""),
        (r"membar\.\w+", ""),
    )
]

SPECIAL_REGISTERS = {
    "laneid": "Lane()",
    "tid.x": "Thread()",
    "cluster_ctarank": "ClusterRank()",
    "cluster_nctarank": "ClusterSize()",
    "clusterid.x": "ClusterId()",
}

REGISTER_TYPES = {"pred": "bool", "b16": "uint16_t", "b32": "uint32_t", "u32": "uint32_t"}
REGISTER_TYPES |= {"s32": "int32_t", "f32": "float", "b64": "uint64_t", "u64": "uint64_t"}

# The text between names: white space, and line markers of the preprocessor.
SPACE = re.compile(r"(?:\s|^#[^\n]*\n)*", re.MULTILINE)
# CPython 3.11 counts the recursion depth of all threads' parsers together: too many raise
# SystemError.
PARSER = threading.Lock()
LITERAL = re.compile(r'"(?:[^"\\\n]|\\.)*"')
ASM = re.compile(r"\basm\b(?:\s+volatile\b)?\s*\(")
SHARED = re.compile(
    r"(extern\s+)?\b__shared__\s+(?:alignas\s*\((\d+)\)\s*)?([\w\s:<>,]+?[\s>&*])(\w+)\s*((?:\[[^;]*\])?)\s*;"
)
SEMICOLON = re.compile(r"\s*;")
MARKER = re.compile(r'^# \d+ "([^"\n]*)"(?: [124])*( 3)?', re.MULTILINE)
CHEVRONS = re.compile(r"([\w:]+(?:<[^;{}()]*>)?)\s*<<<(.*?)>>>\s*\(", re.DOTALL)


class UnreadableError(ValueError):
    """This translator does not understand the text."""


def parenthesis(text: str, at: int) -> int:
    """The index after the parenthesis that closes the one before ``at``."""
    depth = 1
    while depth:
        if text[at] == '"':
            at = LITERAL.match(text, at).end()
            continue
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        at += 1
    return at


def split(text: str, separator: str = ",") -> list[str]:
    """Splits ``text`` at separators outside brackets."""
    parts, depth, start = [], 0, 0
    for at, c in enumerate(text):
        depth += (c in "([{") - (c in ")]}")
        if c == separator and depth == 0:
            parts.append(text[start:at])
            start = at + 1
    return [part.strip() for part in [*parts, text[start:]] if part.strip()]


def operand(text: str) -> str:
    """A PTX operand as C++."""
    if text.startswith("{"):
        return f"emulator::ptx::List({', '.join(operand(part) for part in split(text[1:-1]))})"
    if text.startswith("["):
        return ", ".join(operand(part) for part in split(text[1:-1]))
    if "|" in text:
        return operand(text.split("|")[1])  # the predicate of _|predicate
    if text.startswith("%%"):
        return f"emulator::{SPECIAL_REGISTERS[text[2:]]}"
    text = re.sub(r"%(\d+)", r"operand_\1", text)
    return re.sub(r"\b0x[0-9a-fA-F]+\b", r"\g<0>u", text)


def instruction(text: str, suffix: str) -> str:
    """Translates one PTX instruction, with its predicate or label, into a C++ statement."""
    if label := re.match(r"(\w+):(?!:)\s*", text):
        return f"{label[1]}_{suffix}: {instruction(text[label.end() :], suffix)}"
    if predicate := re.match(r"@(!?)(\w+)\s+", text):
        return f"if ({predicate[1]}{predicate[2]}) {instruction(text[predicate.end() :], suffix)}"
    if register := re.match(r"\.reg\s+\.(\w+)\s+(.*)", text, re.DOTALL):
        names = ", ".join(f"{name} = 0" for name in split(register[2]))
        return f"{REGISTER_TYPES[register[1]]} {names};"
    if not text:
        return ";"
    name, _, rest = text.partition(" ")
    operands = split(rest)
    if name == "bra":
        operands = [f"{operands[0]}_{suffix}"]
    # An address with coordinates becomes two operands.
    operands = [part for text in operands for part in split(operand(text))]
    for pattern, statement in INSTRUCTIONS:
        if found := pattern.fullmatch(name):
            groups = {
                k: v if v.isdigit() else f"emulator::ptx::{v}" for k, v in found.groupdict().items()
            }
            return statement.format(*operands, operands=", ".join(operands), **groups) + ";"
    return f'emulator::Fail("PTX that is not emulated: {name}");'


def assembly(text: str, suffix: str) -> str:
    """Translates the text between the parentheses of an asm statement into a C++ block."""
    at, code = 0, ""
    while literal := LITERAL.match(text, at := SPACE.match(text, at).end()):
        with PARSER:
            code += ast.literal_eval(literal[0])
        at = literal.end()
    lines, sections = [], 0
    count = 0
    while at < len(text) and text[at] == ":":
        at = SPACE.match(text, at + 1).end()
        sections += 1
        while literal := LITERAL.match(text, at):
            at = SPACE.match(text, literal.end()).end()
            if at < len(text) and text[at] == "(":
                end = parenthesis(text, at + 1)
                expression = text[at:end]
                if sections == 1:
                    lines.append(f"auto& operand_{count} = {expression};")
                else:
                    kind = literal[0].strip('"')
                    lines.append(
                        f"auto operand_{count} = emulator::ptx::Input<'{kind}'>({expression});"
                    )
                count += 1
                at = SPACE.match(text, end).end()
            if at < len(text) and text[at] == ",":
                at = SPACE.match(text, at + 1).end()
    if at != len(text):
        raise UnreadableError(f"asm({text})")
    code = re.sub(r"\s+", " ", code).strip()
    if code.startswith("{") and code.endswith("}") and ";" in code:
        code = code[1:-1].strip()
    lines += [instruction(part, suffix) for part in split(code, ";")]
    return "{ " + " ".join(lines) + " }"


def shared_variable(found: re.Match) -> str:
    """Translates the declaration of a variable in shared memory into a reference."""
    extern, alignment, kind, name, extents = found.groups()
    kind = kind.strip()
    if extern:
        return f"{kind}* const {name} = reinterpret_cast<{kind}*>(emulator::DynamicShared());"
    return (
        f"using {name}_type = {kind}{extents}; static const char {name}_declaration = 0; "
        f"{name}_type& {name} = *static_cast<{name}_type*>(emulator::StaticShared("
        f"&{name}_declaration, sizeof({name}_type), "
        f"{alignment or f'alignof({name}_type)'}));"
    )


def translate(text: str) -> str:
    """Translates preprocessed CUDA into C++; line numbers stay. System headers are copied."""
    markers = list(MARKER.finditer(text))
    # The markers of a system header's macro name the file that uses it, too; that file stays own.
    own = {found[1] for found in markers if not found[2]}
    parts, start, translated = [], 0, True
    for found in [*markers, None]:
        if found is not None and (found[1] in own) == translated:
            continue
        end = len(text) if found is None else found.start()
        parts.append(translate_own(text[start:end]) if translated else text[start:end])
        start, translated = end, not translated
    return "".join(parts)


def translate_own(text: str) -> str:
    """Translates text without system headers."""
    parts, at = [], 0
    for number, found in enumerate(ASM.finditer(text)):
        end = parenthesis(text, found.end())
        block = assembly(text[found.end() : end - 1], str(number))
        parts += [text[at : found.start()], block, "\n" * text.count("\n", found.start(), end)]
        at = SEMICOLON.match(text, end).end()
    text = "".join([*parts, text[at:]])
    text = SHARED.sub(shared_variable, text)
    return CHEVRONS.sub(r"emulator::Chevrons(\1, \2)(", text)
