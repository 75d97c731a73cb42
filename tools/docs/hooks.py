"""mkdocs hooks for docs/: tables that are generated from the sources, and the API's names.

A page requests a table by a comment on its own line:

    <!-- kernels.def -->    every CUDA instance, from cc/cuda/*/kernels.def
    <!-- choices.tsv -->    the kernels that selection chooses for layers of the benches on several
                            GPUs, from tests/cc/choices.tsv
    <!-- classes of choices.tsv -->   how often each family is chosen, by class of layer
    <!-- forms of choices.tsv -->     how many instances of each device kernel are chosen
    <!-- public names -->   the documentation of every public name of jaxconv
"""

from __future__ import annotations

import ast
import collections
import html
import pathlib
import re
import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "tests" / "support"))
import kernel_tables  # noqa: E402

_OUTWARDS = re.compile(r"\[([^\]]+)\]\((\.\./[^)#]+)\)")
_INSTANCES = {i.name: i for i in kernel_tables.all_instances()}


def searchable(header: Sequence[str], rows: Iterable[Sequence[str]], hint: str) -> str:
    """An HTML table with a field that filters its rows (docs/assets/search_table.js)."""

    def row(cells: Iterable[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

    body = "\n".join(row(cells, "td") for cells in rows)
    return (
        f'<div class="searchable" data-search-exclude data-hint="{html.escape(hint)}">\n<table>\n'
        f"<thead>{row(header, 'th')}</thead>\n<tbody>\n{body}\n</tbody>\n</table>\n</div>"
    )


def instances_table() -> str:
    """A table with one row for each instance."""
    rows = [
        (i.name, i.op, i.family, i.dtype, "sm_90" if i.source.endswith("_sm90") else "sm_80+")
        for i in kernel_tables.all_instances()
    ]
    if not rows:
        raise ValueError("no kernel tables in cc/cuda")
    return searchable(
        ("instance", "operation", "family", "operands", "GPU"),
        rows,
        "for example: wgrad bf16 sm_80+",
    )


def _layer(key: str) -> tuple[str, ...]:
    """Splits a problem key: operation, operands, precision, and the layer in words."""
    op, dtypes, precision, *facts = key.split()
    fact = {m[1]: m[2] for m in map(re.compile(r"([a-z])(-?\d.*)").match, facts) if m}
    layer = f"N{fact['n']} {fact['i']} {fact['c']}->{fact['k']} {fact['f']}"
    for letter, word in (("s", "stride"), ("d", "dilation"), ("l", "input dilation")):
        if set(fact[letter].split("x")) != {"1"}:
            layer += f" {word} {fact[letter]}"
    if fact["g"] != "1":
        layer += f" groups {fact['g']}"
    if fact["b"] != "1":
        layer += f" batched {fact['b']}"
    extra = [f for f in facts if not re.match(r"[bngckifosldp]-?\d", f)]
    return op, dtypes.split(":")[0], precision, " ".join([layer, *extra])


class Choice(NamedTuple):
    """A line of tests/cc/choices.tsv; choices_test.cc describes it."""

    gpu: str
    key: str
    algorithm: str
    kernel: str  # "none" if no instance takes the problem
    slices: str
    microseconds: str
    automatic: str
    source: str

    @property
    def taken(self) -> str:
        """The kernel that "auto" takes, or XLA."""
        return self.kernel if self.automatic == "=" else "XLA"


def _table(name: str) -> list[list[str]]:
    lines = (REPOSITORY / "tests/cc" / name).read_text().splitlines()
    return [line.split("\t") for line in lines if not line.startswith("#")]


def choices() -> list[Choice]:
    """Every line of the table of choices."""
    found = []
    for gpu, key, algorithm, choice, *rest in _table("choices.tsv"):
        kernel, _, slices = choice.partition("/")
        found.append(Choice(gpu, key, algorithm, kernel, slices, *rest))
    return found


def choices_table() -> str:
    """One row for each layer and chosen kernel, with the GPUs on which it is chosen."""
    sources = {source for lines, source, *_ in _table("bench_problems.tsv") if lines == "each"}
    rows: dict[tuple[str, ...], list[Choice]] = {}
    for choice in choices():
        if choice.source in sources and choice.algorithm == "auto":
            left = "XLA" if choice.taken == "XLA" else ""
            place = choice.source, *_layer(choice.key), choice.kernel, left
            rows.setdefault(place, []).append(choice)

    def joined(values: Iterable[str]) -> str:
        each = list(values)
        return " ".join(each if len(set(each)) > 1 else each[:1])

    header = ("layer", "operation", "operands", "precision", "problem", "kernel", "auto")
    header += ("GPUs", "slices", "predicted us")
    body = [
        (
            *place,
            " ".join(c.gpu for c in found),
            joined(c.slices for c in found),
            joined(c.microseconds for c in found),
        )
        for place, found in rows.items()
    ]
    return searchable(header, body, "for example: r50_56 fprop bf16 h200")


def forms_table() -> str:
    """One row for each device kernel: how many of its instances have a line in choices.tsv."""
    forms: dict[tuple[str, str], set[str]] = {}
    for instance in _INSTANCES.values():
        forms.setdefault((instance.family, instance.source), set()).add(instance.name)
    found = [choice for choice in choices() if choice.kernel != "none"]
    automatic = {c.kernel for c in found if c.automatic == "=" and c.source != "beside"}
    requested = {c.kernel for c in found if c.automatic == "-"}
    lines = [
        "| family | device kernel | instances | taken by `auto` | on request |",
        "|---" * 5 + "|",
    ]
    for (family, source), names in sorted(forms.items()):
        taken = len(names & automatic) or "never"
        asked = len(names & requested) or ""
        lines.append(f"| `{family}` | `{source}` | {len(names)} | {taken} | {asked} |")
    return "\n".join(lines)


def _class(facts: dict[str, str]) -> str:
    """The class of a layer by its groups and channels."""
    groups, c, k = (int(facts[letter]) for letter in "gck")
    if groups > 1:
        return "depthwise" if groups == c else "groups"
    if c <= 4:
        return "up to 4 input channels"
    return "other channel counts" if c % 8 or k % 8 else "channels in multiples of 8"


def classes_table() -> str:
    """The families that "auto" chooses, counted over choices.tsv by operands and class."""
    counts: dict[tuple, dict[str, collections.Counter]] = {}
    for choice in choices():
        if choice.algorithm != "auto":
            continue
        _, dtypes, precision, *facts = choice.key.split()
        taken = choice.taken if choice.taken == "XLA" else f"`{_INSTANCES[choice.taken].family}`"
        row = dtypes.split(":")[0], precision, _class({fact[0]: fact[1:] for fact in facts[:6]})
        counts.setdefault(row, {}).setdefault(choice.gpu, collections.Counter())[taken] += 1
    gpus = list(dict.fromkeys(choice.gpu for choice in choices()))[::-1]
    header = ["operands", "precision", "layer", *gpus]
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for row in sorted(counts):
        cells = [
            ", ".join(f"{taken} {n}" for taken, n in counts[row][gpu].most_common()) for gpu in gpus
        ]
        lines.append("| " + " | ".join([*row, *cells]) + " |")
    return "\n".join(lines)


def _reexported(file: pathlib.Path) -> list[str]:
    """The names that a module re-exports: those of __all__ or, without it, ``import a as a``."""
    names = []
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return list(ast.literal_eval(node.value))
        if isinstance(node, ast.ImportFrom):
            names += [alias.name for alias in node.names if alias.asname == alias.name]
        elif isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            names.append(node.name)
    return names


def public_names() -> str:
    """Directives of mkdocstrings: functions and classes of jaxconv, then those of its modules."""
    package = REPOSITORY / "jaxconv"
    names = [n for n in _reexported(package / "__init__.py") if not n.startswith("_")]
    modules = [n for n in names if (package / f"{n}.py").exists()]
    text = ["## jaxconv", *(f"::: jaxconv.{name}" for name in names if name not in modules)]
    for module in modules:
        file = package / f"{module}.py"
        text += [f"## jaxconv.{module}", (ast.get_docstring(ast.parse(file.read_text())) or "")]
        text += [f"::: jaxconv.{module}.{name}" for name in _reexported(file)]
    return "\n\n".join(text)


MADE = {
    "kernels.def": instances_table,
    "choices.tsv": choices_table,
    "classes of choices.tsv": classes_table,
    "forms of choices.tsv": forms_table,
    "public names": public_names,
}


def _named(nav: object) -> set[str]:
    """The pages that a part of the navigation names."""
    if isinstance(nav, str):
        return {nav}
    parts = nav.values() if isinstance(nav, dict) else nav
    return set().union(*map(_named, parts))


def on_config(config):
    """mkdocs' hook: adds the pages that mkdocs.yml does not name to the navigation."""
    docs = pathlib.Path(config["docs_dir"])
    pages = sorted(page.relative_to(docs).as_posix() for page in docs.rglob("*.md"))
    missing = [page for page in pages if page not in _named(config["nav"])]
    inside = next(part["How it works"] for part in config["nav"] if "How it works" in part)
    notes = next(part["Measurements"] for part in inside if "Measurements" in part)
    notes += [page for page in missing if page.startswith("notes/")]
    inside[-1:-1] = [page for page in missing if not page.startswith("notes/")]
    return config


def _outwards(match: re.Match, page: pathlib.Path) -> str:
    """Replaces a link to a file outside docs/, which the site does not have, by its text."""
    target = (page.parent / match[2]).resolve()
    if not target.exists():
        raise ValueError(f"{page}: no such file: {match[2]}")
    return match[1]


def on_page_markdown(markdown: str, *, page, config, files) -> str:
    """mkdocs' hook: replaces the comments of a page by the tables that they request."""
    source = pathlib.Path(page.file.abs_src_path)
    markdown = _OUTWARDS.sub(lambda match: _outwards(match, source), markdown)
    for name, make in MADE.items():
        marker = f"<!-- {name} -->"
        if marker in markdown:
            markdown = markdown.replace(marker, make())
    return markdown
