"""Every kernel that computes statistics of its result: beyond the first tile, and run twice.

The problems are those of ``steady_problems``: three tiles for each CTA, tails along both axes.
"""

from __future__ import annotations

import jax
import kernel_tables
import numpy as np
import pytest
from kernel_tables import Instance
from numerics import assert_exact, into_poison
from problems import DTYPES, Problem
from steady_problems import exact, gather_problems, operands_of, skip_on_other_devices

import jaxconv
from jaxconv._src.conv.fused import Fused, bind
from jaxconv._src.problem.epilogue import Epilogue
from jaxconv._src.problem.spec import Op

FORM = Epilogue(statistics=True)
FUSED = [
    each
    for each in kernel_tables.fused_instances()
    if each.family == "igemm_wgmma" and each.dtype != "f32"
]


def forms_them(each: Instance) -> bool:
    """Whether the kernel should compute statistics: ``HasStatistics`` of igemm_wgmma's plan."""
    if "swap_ab" in each.variant:
        return True
    form = "pingpong" in each.variant or "pointwise" in each.variant
    return form and "filter_row" not in each.variant


def chosen_for(each: Instance, which: Problem):
    spec = which.spec(algorithm=each.name)
    shapes = [which.canonical_shape(role) for role in "xw"]
    sizes = spec.sizes(Op.FPROP, *shapes)
    return Fused(spec, FORM, DTYPES[each.dtype][1]).select("cuda", sizes, DTYPES[each.dtype][0])


def test_some_kernels_form_them():
    assert len({each.variant for each in FUSED if forms_them(each)}) >= 11


@pytest.mark.gpu
@pytest.mark.parametrize("each", FUSED, ids=[each.name for each in FUSED])
def test_three_tiles_a_cta(each):
    """Exact results, statistics close to float64, and the same bits in a second run."""
    skip_on_other_devices(each)
    accepted = 0
    for which in gather_problems(each):
        if which.batch is not None:
            continue
        chosen, line = chosen_for(each, which)
        if chosen.instance is None:
            if not forms_them(each):
                assert any("no statistics" in r.reason for r in chosen.refusals), line
            continue
        assert forms_them(each), f"{each.name}: {line}"
        accepted += 1
        spec = which.spec(algorithm=each.name)

        def call(x, w, spec=spec):
            return bind(x, w, {}, spec=spec, epilogue=FORM, out_dtype=DTYPES[each.dtype][1])

        operands = operands_of(each, which)
        y, statistics = into_poison(call, *operands)
        repro = f"{each.name}: {line}"
        expected = exact(Op.FPROP, which)[1].astype(DTYPES[each.dtype][1])
        assert_exact(y, expected, repro)
        rows = expected.astype(np.float64).reshape(-1, which.k)
        mean = rows.mean(0)
        squares = ((rows - mean) ** 2).sum(0)
        deviation = np.sqrt(squares / len(rows))
        found = np.asarray(statistics)
        assert (np.abs(found[0] - mean) <= 1e-6 * (np.abs(mean) + deviation)).all(), repro
        assert (np.abs(found[1] - squares) <= 1e-6 * squares).all(), repro
        again = into_poison(call, *operands)[1]
        assert np.asarray(again).tobytes() == found.tobytes(), repro
    assert bool(accepted) == forms_them(each), f"{each.name} took {accepted} problems"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("ratio", [0, 1, 3, 10, 100, 1000])
def test_a_large_mean_costs_no_digits(dtype, ratio):
    """A channel of ones adds a mean: y = (x, mean) . (w, 1), with a standard deviation of 7.5."""
    rng = np.random.default_rng(0)
    mean = 7.5 * ratio
    x = np.concatenate(
        [rng.standard_normal((8, 28, 28, 56)), np.full((8, 28, 28, 8), mean / 8)], -1
    )
    w = np.concatenate([rng.standard_normal((1, 1, 56, 128)), np.ones((1, 1, 8, 128))], 2)
    x, w = (a.astype(DTYPES[dtype][0]) for a in (x, w))

    def counted(x, w):
        return jaxconv.conv(x, w, statistics=True, algorithm="native")

    with jax.default_device(jax.devices("gpu")[0]):
        y, found, variance = jax.jit(counted)(x, w)
        explained = jaxconv.explain(counted, x, w)
    assert [c.epilogue for c in explained] == ["statistics"]
    exact = np.asarray(y).astype(np.float64).reshape(-1, 128)
    np.testing.assert_allclose(found, exact.mean(0), rtol=1e-6, atol=1e-6 * exact.std())
    np.testing.assert_allclose(variance, exact.var(0), rtol=2**-17)
