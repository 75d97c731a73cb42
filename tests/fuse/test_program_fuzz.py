"""Some random programs, and planted errors that their judge must find."""

from __future__ import annotations

import collections
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import program_fuzz
import program_judge
import pytest
from program_draw import (
    ACTIVATIONS,
    NORMS,
    SQUEEZES,
    SUMS,
    Conv,
    Layer,
    Program,
    arrays,
    draw,
    parts_of,
)
from program_transforms import TRANSFORMS
from spelling_norms import AFFINES, FRAMES, MEANS

import jaxconv

pytestmark = pytest.mark.usefixtures("on_the_cpu")

PROGRAMS = 16


def test_random_programs(seed, native_cpu, record_property):
    """Every CI run draws new programs; a failure prints the seed."""
    counts: collections.Counter[str] = collections.Counter()
    failures = []
    for index in range(PROGRAMS):
        complaints, seen = program_judge.judge(draw(seed, index))
        counts.update(seen)
        failures += [f"--seed {seed} --problem {index}: {c}" for c in complaints]
    record_property("fuzz", json.dumps(counts))
    assert not failures, "python tests/fuse/program_fuzz.py " + "\n".join(failures)
    assert sum(n for name, n in counts.items() if name.startswith("results")) > PROGRAMS


def test_every_step_and_transformation_is_drawn():
    programs = [draw(1, index) for index in range(1000)]
    steps = {name for p in programs for layer in p.layers for name in layer.steps}
    assert steps >= {*ACTIVATIONS, *SQUEEZES, *SUMS, *NORMS, "y @ w"}
    assert {p.transform for p in programs} == set(TRANSFORMS)
    parts = [parts_of(step) for step in steps if step.startswith("norm(")]
    for field, values in (("mean", MEANS), ("affine", AFFINES), ("frame", FRAMES)):
        assert {getattr(each, field) for each in parts} == set(values)
    assert {p.data for p in programs} == {"normal", "integers", "special", "large"}


def test_most_programs_have_something_to_fuse():
    """In most programs a step after a convolution is part of its call."""
    programs = [draw(1, index) for index in range(400)]
    with_steps = [
        any(layer.steps and layer.conv.expansion == 1 for layer in p.layers) for p in programs
    ]
    assert sum(with_steps) >= 0.9 * len(programs)


def test_a_fused_call_is_counted(native_cpu):
    relu = dataclasses.replace(PLAIN, layers=(Layer(Conv(2), ("jax.nn.relu",)),))
    for program, count in ((PLAIN, 0), (relu, 1)):
        _, counts = program_judge.judge(program)
        assert counts[program_judge.FUSED] == count


PLAIN = Program(1, 1, "float32", "integers", "NHWC", (1, 4, 2), (Layer(Conv(2), ()),), "jit")


def complaint(program: Program, mode: str = "fuse inside") -> str:
    found, _ = program_judge.judge(program, (mode,))
    return " ".join(found)


def planted(monkeypatch, change):
    """``fuse``, except that fused functions return ``change`` of their result."""
    fuse = jaxconv.fuse
    monkeypatch.setattr(jaxconv, "fuse", lambda f: lambda *args: change(fuse(f)(*args)))


def test_a_wrong_element_is_seen(monkeypatch):
    assert not complaint(PLAIN)
    planted(monkeypatch, lambda y: y.at[0, 1, 2, 0].add(1))
    assert "not exact" in complaint(PLAIN)


def test_a_lost_nan_is_seen(monkeypatch):
    program = dataclasses.replace(PLAIN, data="special")
    assert not complaint(program)
    planted(monkeypatch, jnp.nan_to_num)
    assert "NaN or Inf elsewhere" in complaint(program)


def test_an_error_beyond_rounding_is_seen(monkeypatch):
    program = dataclasses.replace(PLAIN, data="normal", layers=(Layer(Conv(2), ("jax.nn.silu",)),))
    assert not complaint(program)
    planted(monkeypatch, lambda y: y * (1 + 1e-4))
    assert "lax's error" in complaint(program)


def test_a_wrong_derivative_at_a_tie_is_seen(monkeypatch):
    relu = dataclasses.replace(
        PLAIN, layers=(Layer(Conv(2), ("maximum(y, 0)",)),), transform="grad"
    )
    assert not complaint(relu)

    def at_zero(f):  # makes the derivative of max at 0 zero
        return lambda p, x: jax.nn.relu(program_judge.apply(linear, lambda name, *_: p[name], x))

    linear = dataclasses.replace(PLAIN, layers=(Layer(Conv(2), ()),))
    monkeypatch.setattr(jaxconv, "fuse", at_zero)
    assert "not exact" in complaint(relu)


def test_gradients_that_vanish_in_16_bits_are_seen(monkeypatch):
    steps = ("y + r", "max(y, 0.75 y)")
    layers = (Layer(Conv(8), steps),)
    program = Program(1, 1, "bfloat16", "normal", "NHWC", (2, 6, 8), layers, "grad")
    assert not complaint(program)
    run = program_judge.run

    def vanishing(program, mode, draw=None, calls=None):
        results = run(program, mode, draw, calls)
        if mode.startswith("fuse"):
            for r in results:
                r.flat[::6] = 0
        return results

    monkeypatch.setattr(program_judge, "run", vanishing)
    assert complaint(program)


def test_a_constant_factor_of_an_infinite_operand_has_no_tangent():
    """Zero times infinity is NaN, so a tangent that is zero stays a symbolic one."""
    layers = (Layer(Conv(1, window=1), ("y @ w", "y + bias", "2 sigmoid(2 y) - 1")),)
    program = Program(
        1, 1, "float32", "special", "NHWC", (1, 3, 1), layers, "jvp of jvp", constants=True
    )
    assert np.isinf(arrays(program)[1]).any()
    assert not program_judge.judge(program)[0]


def test_a_program_that_fails_is_shrunk(monkeypatch):
    """Shrinking leaves only the failing step, and the plainest value of everything else."""

    def judge(program, modes):
        steps = [name for layer in program.layers for name in layer.steps]
        return (["fails"] if "jax.nn.relu" in steps else []), collections.Counter()

    monkeypatch.setattr(program_judge, "judge", judge)
    first = Layer(Conv(3, window=2, stride=2), ("y * 2", "jax.nn.relu"), wide=True)
    layers = (first, Layer(Conv(2), ("y + bias", "maximum(y, 0)")))
    program = dataclasses.replace(PLAIN, layers=layers, shape=(2, 5, 4), transform="scan")
    found = program_fuzz.shrunk(program, "fuse inside")
    assert found.layers == (Layer(Conv(1, window=1), ("jax.nn.relu",)),)
    assert found.shape == (1, 3, 1) and found.transform == "jit"
