"""Winograd's kernels in the emulator: prepared filters, and operands of extreme magnitudes."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from emulated import computed, host_build
from emulated_cases import ASSUMING, CASES, READERS
from numerics import error, reference
from problems import DTYPES, problem

import jaxconv
from jaxconv import winograd
from jaxconv._src.problem.spec import Op
from jaxconv._src.winograd import winograd_filter

FORMS = host_build.forms()


@pytest.mark.parametrize("instance", READERS)
def test_a_kernel_reads_prepared_filters(programs, instance, tmp_path):
    """Kernels read the vector that ``jaxconv.winograd.prepare`` makes."""
    dtype, tile = instance.split("_")[2:4]
    x, w = (np.random.default_rng(5).standard_normal(s) for s in ((1, 6, 5, 128), (3, 3, 64, 128)))
    x, w = x.astype(DTYPES[dtype][0]), w.astype(DTYPES[dtype][0])
    prepared = winograd.prepare(w, f"f{tile}", groups=2)
    key = (
        f"fprop {dtype}:f16:f32 default b1 n1 g2 c128 k128 i6x5 f3x3 o6x5 s1x1 l1x1 d1x1 p1_1x1_1 "
        f"{winograd_filter.LAYOUTS[prepared.tile]}"
    )
    data = np.asarray(prepared.data)
    actual = computed(programs[False], instance, key, x, data, np.float32, tmp_path)
    actual = actual.reshape(1, 6, 5, 128)
    with jax.default_device(jax.devices("cpu")[0]):
        expected = jaxconv.conv(x, prepared, groups=2, preferred_element_type=np.float32)
    # Both use the same U, but round V at different places: fused_row computes V in float16.
    assert error(actual, np.asarray(expected, np.float64)) < 3e-3


# One instance for each output transform of family winograd, and one for float32's scales.
SCALED = {
    FORMS[c.instance][4] + "_f32" * ("_f32_" in c.instance): c.instance
    for c in CASES
    if c.instance.startswith(("fprop_winograd_bf16_", "fprop_winograd_f32_"))
}


@pytest.mark.parametrize("instance", SCALED.values())
def test_operands_far_apart(programs, instance, tmp_path):
    """Scales of 2^-111 and 2^122, which overflow float32 if they are undone in the wrong order."""
    p = problem("far_apart", (6, 5), 3, n=1, c=16, k=16, padding=1)
    x, w = (np.random.default_rng(7).uniform(-1, 1, p.canonical_shape(role)) for role in "xw")
    dtype = FORMS[instance][2]
    x, w = (a.astype(DTYPES[dtype][0]) for a in (x * 2.0**124, w * 2.0**-109))
    key = p.line(Op.FPROP, dtype).replace("bf16:bf16:bf16", "bf16:bf16:f32")
    expected = reference(Op.FPROP, p, x.astype(np.float64), w.astype(np.float64))
    actual = computed(programs[False], instance, key, x, w, np.float32, tmp_path)
    actual = actual.reshape(expected.shape)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=0.02 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("of_x", "of_w"),
    [
        (2.0**9, 2.0**-7),  # the transform of x runs again
        (2.0**9 - 2, 2.0**5 - 0.125),  # the largest for which it does not
        (2.0**-3, 2.0**-7),  # the smallest for which it does not
        (2.0**13, 2.0**10),  # V and U would overflow with the assumed scales
        (2.0**-20, 2.0**-24),  # V and U would vanish
    ],
)
def test_magnitudes_beside_the_assumed(programs, of_x, of_w, tmp_path):
    """Transforms use constant scales, and run again with measured ones if these do not suit."""
    p = problem("magnitudes", (9, 14), 3, n=2, c=80, k=96, padding=1, groups=2)
    x, w = (np.random.default_rng(8).uniform(-1, 1, p.canonical_shape(role)) for role in "xw")
    x.flat[7] = w.flat[9] = 1
    x, w = (np.asarray(a, DTYPES["bf16"][0]) for a in (x * of_x, w * of_w))
    key = p.line(Op.FPROP, "bf16").replace("bf16:bf16:bf16", "bf16:bf16:f32")
    expected = reference(Op.FPROP, p, x.astype(np.float64), w.astype(np.float64))
    actual = computed(programs[False], ASSUMING, key, x, w, np.float32, tmp_path)
    actual = actual.reshape(expected.shape)
    assert error(actual, expected) < 3e-3
