"""Python's queries of the passes' kernels, and how they are shown. Needs no CUDA library."""

from __future__ import annotations

import itertools
import re

import jax
import jax.numpy as jnp
import kernel_tables
import numpy as np

import jaxconv
from jaxconv._src.call import rules
from jaxconv._src.passes import masked_sums, max_pooling, moments, normalise_add
from jaxconv._src.passes.masked_sums import Sums
from jaxconv._src.passes.max_pooling import Windows
from jaxconv._src.passes.normalise_add import BlockEnd

DTYPES = [np.dtype(d) for d in (jnp.bfloat16, np.float16, np.float32, np.float64, np.int8)]
NONE = (0, 0)


def forms_of_sums():
    told = ["result", "affine", "bits", "none"]
    for gradients, arrays, by in itertools.product((1, 2, 3), (0, 1, 2, 3), told):
        yield Sums(gradients, arrays, by, False, 0.0, None)
        yield Sums(gradients, arrays, by, True, 0.0, None, "silu", segments=2)
        yield Sums(gradients, arrays, by, False, None, None, "silu", segments=2, values=True)
    yield Sums(1, 1, "affine", True, 0.0, None, "softsign")
    yield Sums(2, 2, "affine", True, 0.0, None, "relu6")
    for activation, stores in (("relu6", False), ("relu", True), ("elu", False)):
        yield Sums(1, 1, "affine", stores, None, None, activation, values=True)


def asked():
    """Counts calls of ``accepts``."""
    shapes = [(4, 8), (4, 12), (6, 5, 7, 24), (0, 8), (3, 8), (8,), (1, 2, 2, 2, 2, 2, 2, 8)]
    for shape, dtype in itertools.product(shapes, DTYPES):
        yield from ((masked_sums.accepts, form, shape, dtype) for form in forms_of_sums())
        yield from ((moments.accepts, shape, dtype, segments) for segments in (1, 2, 5))
        for arrays, below in itertools.product((1, 2, 3), (None, 6.0, 0.1)):
            yield normalise_add.accepts, BlockEnd(arrays, below), shape, dtype
    for size, stride, pad, channels in itertools.product(
        (1, 2, 3, 7, 8), (1, 2, 5), (0, 1), (4, 8, 40)
    ):
        padding = (NONE, (pad, pad), (pad, 0), NONE)
        windows = Windows(
            (2, 16, 16, channels), (1, size, size, 1), (1, stride, stride, 1), padding
        )
        yield from ((max_pooling.accepts, windows, dtype) for dtype in DTYPES)
    many = Windows((2**14, 2**10, 2**9, 8), (1, 2, 2, 1), (1, 2, 2, 1), (NONE,) * 4)
    long = Windows((1, 2**30, 8), (1, 2, 1), (1, 2, 1), (NONE,) * 3)
    yield from ((max_pooling.accepts, windows, DTYPES[0]) for windows in (many, long))


def test_without_the_library_the_answers_are_the_plans(cuda_selection, monkeypatch):
    calls = list(asked())
    by_plan = [accepts(*given) for accepts, *given in calls]
    monkeypatch.setattr(rules, "planned", lambda key: None)
    without = [accepts(*given) for accepts, *given in calls]
    wrong = [c for c, a, b in zip(calls, by_plan, without, strict=True) if a != b]
    assert not wrong
    assert 0.05 < np.mean(by_plan) < 0.95


def test_kernels_are_listed(cuda_selection):
    found = {k.name: k for k in jaxconv.kernels("cuda")}
    for each in kernel_tables.passes():
        kernel = found[each.name]
        listed = kernel.op, kernel.family, kernel.dtype, kernel.takes
        assert listed == (each.op, each.family, each.dtype, (each.variant,))


def program(y, g, mean, scale, offset):
    form = Sums(1, 1, "affine", False, 0.0, None)

    def body(total, _):
        (sums,) = masked_sums.masked_sums(g, y, mean, scale, offset, form=form)
        return total + sums, None

    total, _ = jax.lax.scan(body, jnp.zeros((2, y.shape[-1])), length=3)
    return total, moments.moments(y), moments.moments(y[..., :12])


def test_explain_shows_passes(cuda_selection):
    array = jax.ShapeDtypeStruct((8, 32, 32, 24), jnp.bfloat16)
    vector = jax.ShapeDtypeStruct((24,), np.float32)
    found = jaxconv.explain(program, array, array, *[vector] * 3, platform="cuda")
    assert len(found) == 0
    first, second, third = found.passes
    assert (first.op, first.instance) == ("masked_sums", "masked_sums_bf16_affine_g1_y1")
    assert first.problem == "masked_sums bf16 s1 r8192 c24 g1 y1 affine"
    assert first.array == "bf16[8,32,32,24]" and first.microseconds > 1 and not first.refusal
    assert second.instance == "moments_bf16_y1"
    assert third.instance is None and "multiple of 8 channels" in third.refusal
    text = str(found)
    assert re.search(r"count +pass +array +kernel +us", text)
    assert "left to XLA:\n  moments bf16[8,32,32,12]: expected a multiple of 8" in text
    on_cpu = jaxconv.explain(program, array, array, *[vector] * 3, platform="cpu")
    assert on_cpu.passes == () and str(on_cpu) == "no convolutions"
