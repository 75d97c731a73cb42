"""The tables and pages that tools/docs/hooks.py adds to the site, without mkdocs."""

from __future__ import annotations

import html
import importlib.util
import pathlib
import re
import types

import kernel_tables
import pytest

import jaxconv
from jaxconv.bench import layers

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("hooks", REPOSITORY / "tools/docs/hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cells(table: str) -> list[list[str]]:
    body = table.partition("<tbody>")[2]
    rows = re.findall(r"<tr>(.*?)</tr>", body)
    return [[html.unescape(cell) for cell in re.findall(r"<td>(.*?)</td>", row)] for row in rows]


def test_every_instance_has_a_row(hooks):
    rows = cells(hooks.instances_table())
    assert [row[0] for row in rows] == [i.name for i in kernel_tables.all_instances()]
    for name, op, family, dtype, gpu in rows:
        assert name.startswith(f"{op}_{family}_{dtype}_") and gpu in ("sm_90", "sm_80+")


def test_every_choice_for_a_layer_of_the_sets_has_a_row_with_the_layer_in_words(hooks):
    rows = cells(hooks.choices_table())
    listed = [choice for choice in hooks.choices() if choice.algorithm == "auto"]
    of_sets = [choice for choice in listed if choice.source in layers.LAYERS]
    assert {row[0] for row in rows} == {choice.source for choice in of_sets}
    gpus = [gpu for row in rows for gpu in row[7].split()]
    assert len(gpus) == len(of_sets) and set(gpus) == {choice.gpu for choice in listed}
    stem = "N64 224x224 3->64 7x7 stride 2x2"
    assert rows[0][:5] == ["r50_stem", "fprop", "bf16", "default", stem]
    assert rows[0][6:9] == ["", "a100 l40s rtx4090", "1"]
    layer = "dgrad s8:s8:s32 default b2 n1 g4 c8 k8 i9 f3 o9 s1 l2 d3 p1_1 packed nchw32"
    words = "N1 9 8->8 3 dilation 3 input dilation 2 groups 4 batched 2 packed nchw32"
    assert hooks._layer(layer) == ("dgrad", "s8", "default", words)


def test_the_page_of_choices_stays_short(hooks):
    """A browser shows tables of about a thousand rows at once."""
    assert 500 < len(cells(hooks.choices_table())) < 1300


def test_the_classes_of_layers_count_every_choice(hooks):
    lines = hooks.classes_table().splitlines()
    header, rows = lines[0], lines[2:]
    assert header == "| operands | precision | layer | h200 | h100 | rtx4090 | l40s | a100 |"
    choices = [choice for choice in hooks.choices() if choice.algorithm == "auto"]
    cells = " ".join(row.split("|", 4)[4] for row in rows)
    assert sum(map(int, re.findall(r" (\d+)(?=,| \|)", cells))) == len(choices)
    left = sum(choice.automatic == "xla" for choice in choices)
    assert sum(map(int, re.findall(r"XLA (\d+)", cells))) == left


def test_the_table_of_forms_names_those_that_auto_never_takes(hooks):
    rows = [re.findall(r"[^|]+", line) for line in hooks.forms_table().splitlines()[2:]]
    found = [[cell.strip().strip("`") for cell in row] for row in rows]
    assert sum(int(row[2]) for row in found) == len(kernel_tables.all_instances())
    never = [line[:2] for line in hooks._table("never_chosen.tsv")]
    assert [row[:2] for row in found if row[3] == "never"] == never
    asked = [line[:2] for line in hooks._table("never_chosen.tsv") if line[2] == "on request"]
    assert [row[:2] for row in found if row[4]] == asked


def test_every_public_name_is_in_the_reference(hooks):
    listed = set(re.findall(r"^::: jaxconv\.(\S+)$", hooks.public_names(), re.MULTILINE))
    public = {name for name in vars(jaxconv) if not name.startswith("_") and name not in ("bench",)}
    for name in public:
        value = getattr(jaxconv, name)
        if not isinstance(value, types.ModuleType):
            assert name in listed, name
    assert {"conv", "explain", "int8.conv", "export.register"} <= listed
    for name in listed:
        value = jaxconv
        for part in name.split("."):
            value = getattr(value, part)
        assert value.__doc__, name


def page(file: str) -> types.SimpleNamespace:
    return types.SimpleNamespace(file=types.SimpleNamespace(abs_src_path=str(DOCS / file)))


def test_pages_get_what_they_ask_for(hooks):
    asked = set()
    for file in DOCS.rglob("*.md"):
        name = file.relative_to(DOCS).as_posix()
        text = file.read_text()
        made = hooks.on_page_markdown(text, page=page(name), config=None, files=None)
        for marker in hooks.MADE:
            if f"<!-- {marker} -->" in text:
                asked.add(marker)
                assert f"<!-- {marker} -->" not in made
        assert "](../cc" not in made
    assert asked == set(hooks.MADE)


def test_pages_that_the_navigation_does_not_name_are_added(hooks, tmp_path):
    for name in ("index.md", "kernels.md", "new.md", "notes/a.md", "notes/b.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    nav = ["index.md", {"How it works": [{"Kernels": "kernels.md"}, {"Measurements": []}]}]
    nav = hooks.on_config({"docs_dir": str(tmp_path), "nav": nav})["nav"]
    measurements = {"Measurements": ["notes/a.md", "notes/b.md"]}
    assert nav[1]["How it works"] == [{"Kernels": "kernels.md"}, "new.md", measurements]


def test_a_link_to_a_source_that_is_not_there_fails(hooks):
    def made(text: str) -> str:
        return hooks.on_page_markdown(text, page=page("kernels.md"), config=None, files=None)

    assert made("[`a`](../cc/CMakeLists.txt) [b](export.md)") == "`a` [b](export.md)"
    with pytest.raises(ValueError, match=r"no such file: \.\./cc/nothing\.h"):
        made("[a](../cc/nothing.h)")


def test_prose_has_at_most_120_columns():
    fenced = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
    pages = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *DOCS.rglob("*.md")]
    for file in pages:
        text = fenced.sub("", file.read_text())
        prose = [x for x in text.splitlines() if not x.lstrip().startswith("|") and x[:4] != "    "]
        assert [x for x in prose if len(x) > 120] == [], file.name
