"""examples/cluster.py in two CPU processes, compared with one process."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import sys
import time

import jax
import pytest

import jaxconv

STEPS, BATCH = 12, 64


@pytest.fixture(scope="module")
def example():
    for package in ("flax", "optax", "sklearn"):
        pytest.importorskip(package, reason=f"the example needs {package}")
    path = pathlib.Path(__file__).resolve().parents[2] / "examples" / "cluster.py"
    spec = importlib.util.spec_from_file_location("cluster_example", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_two_processes_train_as_one(example, native_cpu, monkeypatch):
    """Two devices of one process give the same bits; one device sums in another order."""
    quick = jax.config.read("jax_disable_most_optimizations")
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", str(int(quick)))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    first, second = example.run_group(2, STEPS, BATCH, seconds=120)
    assert first == second

    devices = jax.devices("cpu")
    with jax.default_device(devices[0]), jaxconv.override():
        alone = example.train(devices[:1], STEPS, BATCH)
        together = example.train(devices[:2], STEPS, BATCH)
    assert first == together
    assert alone.calls == first.calls == {"fused": 3, "dgrad": 2, "wgrad": 3}
    assert not alone.collectives and set(first.collectives) == {"all-reduce"}
    assert not example.differences([first, second], alone)
    assert first.losses[-1] < 0.8 * first.losses[0]

    monkeypatch.setattr(jaxconv, "fuse", lambda function: function)
    with jax.default_device(devices[0]), jaxconv.override(False):
        lax = example.train(devices[:2], STEPS, BATCH)
    assert not lax.calls and first.collectives["all-reduce"] <= lax.collectives["all-reduce"]


def test_differences_are_told(example):
    def run(loss: float, parameters: str = "0"):
        return example.Run([1.0, loss], "", parameters, {}, {})

    assert not example.differences([run(0.5), run(0.5)], run(0.5 + 1e-7))
    (other,) = example.differences([run(0.5, "0"), run(0.5, "1")], run(0.5))
    assert other.startswith("parameters: not the same")
    (off,) = example.differences([run(0.5), run(float("nan"))], run(0.5))
    assert "process 1" in off


@pytest.mark.parametrize(
    "second, seconds, reason",
    [
        ("sys.exit('no port')", 60, "a process failed(.|\n)*no port"),
        ("time.sleep(60)", 1, "not done"),
    ],
    ids=["failure", "late"],
)
def test_no_process_is_left(example, tmp_path, second, seconds, reason):
    """If a process fails or the time is over, the process that waits for it is ended."""
    alive = tmp_path / "alive"
    alive.touch()
    waits = f"while True: open({str(alive)!r}, 'a').write('.'); time.sleep(0.05)"
    ready = f"while not os.path.getsize({str(alive)!r}): time.sleep(0.05)"
    programs = (waits, f"{ready}\n{second}")
    commands = [[sys.executable, "-c", f"import os, sys, time\n{p}"] for p in programs]
    with pytest.raises(RuntimeError, match=reason):
        example.run_processes(commands, seconds)
    written = alive.stat().st_size
    time.sleep(0.3)
    assert alive.stat().st_size == written
