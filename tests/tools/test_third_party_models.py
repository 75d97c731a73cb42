"""Models of other libraries on lax, on jaxconv and under fuse (tools/third_party_models.py)."""

from __future__ import annotations

import importlib
import json
import pathlib

import numpy as np
import pytest
from jax import lax

import jaxconv

pytestmark = pytest.mark.usefixtures("on_the_cpu")
TOOLS = pathlib.Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    monkeypatch.syspath_prepend(TOOLS)
    return importlib.import_module("third_party_models")


def test_a_model_of_haiku(tool, monkeypatch, tmp_path, capsys):
    pytest.importorskip("haiku")
    file = tmp_path / "models.json"
    small = {"strides": (1,), "channels": (16,)}
    models = {
        "haiku/small": lambda: tool.haiku("MobileNetV1", 16, **small),
        "haiku/of no such name": lambda: tool.haiku("NoSuchNet", 16),
        "no such library/model": lambda: pytest.fail("a library that is absent is not tried"),
    }
    monkeypatch.setattr(tool, "MODELS", models)
    assert tool.main(["--list"]) == 0
    assert "not installed" in capsys.readouterr().out
    assert tool.main(["--json", str(file)]) == 0
    *rows, no_model, no_library = json.loads(file.read_text())["rows"]
    assert [row["outcome"] for row in rows] == ["right"] * 6
    places = [(row["mode"], row["side"]) for row in rows]
    assert places == [(mode, side) for mode in tool.MODES for side in tool.SIDES]
    counts = [(row["convolutions"], row["on_kernels"], row["fused"]) for row in rows]
    # A first layer, a depthwise and a pointwise one; the images have no gradient.
    assert counts[:2] == [(3, 0, 0), (3, 3, 0)] and counts[2][:2] == (3, 3) and counts[2][2] > 0
    assert [count[:2] for count in counts[3:]] == [(8, 0), (8, 8), (8, 8)]
    assert no_model["outcome"].startswith("skipped: AttributeError: ")
    assert no_library["outcome"] == "skipped: ImportError: no such library is not installed"


def convolution(x, w):
    return lax.conv(x, w, (1, 1), "SAME")


def wrong(x, w):
    """Another function under ``override``."""
    return convolution(x, w) * (1.001 if jaxconv.installed() else 1)


def refusing(x, w):
    if jaxconv.installed():
        raise ValueError("not here\nand more")
    return convolution(x, w)


def test_a_side_that_differs_or_raises(tool, monkeypatch):
    x, w = np.ones((1, 2, 4, 4), np.float32), np.ones((2, 2, 3, 3), np.float32)

    def outcomes(function):
        rows = tool.judged("a model", "infer", function, (x, w))
        assert [row.failed for row in rows] == [row.outcome != "right" for row in rows]
        return [row.outcome for row in rows]

    assert outcomes(convolution) == ["right"] * 3
    lax_side, *others = outcomes(wrong)
    assert lax_side == "right"
    assert all(outcome.startswith("differs by 1e-03, bound ") for outcome in others)
    assert outcomes(refusing) == ["right"] + ["ValueError: not here"] * 2

    network = tool.Network(w, (), (x,), lambda w, state, x: refusing(x, w))
    monkeypatch.setattr(tool, "MODELS", {"keras/refusing": lambda: network})
    assert tool.main(["--mode", "infer"]) == 1


def test_one_wrong_array_of_many_is_seen(tool):
    """A wrong sign in an array whose norm is 1e-3 of the largest; a result that is not finite."""
    theirs = [np.ones(4), np.full(4, 1e-3)]
    assert tool.difference(theirs, theirs) == 0
    assert tool.difference([theirs[0], -theirs[1]], theirs) == pytest.approx(2)
    assert np.isnan(tool.difference([theirs[0], np.full(4, np.nan)], theirs))
