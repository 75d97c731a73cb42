"""Dtypes, promotion modes and forms of arguments: the same result as lax, or also an error."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from numerics import assert_exact

import jaxconv

pytestmark = pytest.mark.usefixtures("on_the_cpu")

NHWC = ("NHWC", "HWIO", "NHWC")


def operands(dtype=np.float32, x_shape=(2, 5, 6, 3), w_shape=(3, 2, 3, 4)):
    """Mostly zeros, so that sums of products are exact in 8-bit types, too."""
    rng = np.random.default_rng(0)
    drawn = [rng.integers(0, 2, s) * (rng.random(s) < 0.4) for s in (x_shape, w_shape)]
    return [jnp.asarray(a, dtype) for a in drawn]


def outcome(f, *arguments):
    """The result of the call, or its error."""
    try:
        return f(*arguments)
    except Exception as error:
        return error


def assert_like_lax(actual, expected, note: str):
    """Equal arrays or types; if ``expected`` is an error, an error about the arguments."""
    if isinstance(expected, Exception):
        assert isinstance(actual, TypeError | ValueError), f"{note}: lax raises {expected!r}"
        return
    if isinstance(actual, Exception):
        raise AssertionError(f"{note}: lax does not raise") from actual
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (e.shape, e.dtype), note
        if isinstance(e, jax.Array):
            assert_exact(a, e, note)


# --- dtypes ---------------------------------------------------------------------------------------

FLOATS = ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
OTHERS = ["complex64", "bool", "int8", "uint8", "int32"]
PREFERRED = [None, "float32", "bfloat16", "float8_e5m2", "int32", float, "int64"]


def same(f, **options):
    options = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": NHWC, **options}
    return functools.partial(f, **options)


def lowered(f, *arguments):
    """The result types of a function that is traced and lowered, but not compiled."""
    return jax.jit(f).lower(*arguments).out_info


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")
@pytest.mark.parametrize("dtype", FLOATS + OTHERS)
def test_dtypes_of_operands_and_result(dtype):
    x, w = operands(dtype)
    for preferred in PREFERRED:
        ours = same(jaxconv.conv_general_dilated, preferred_element_type=preferred)
        theirs = same(lax.conv_general_dilated, preferred_element_type=preferred)
        expected = outcome(jax.jit(theirs), x, w)
        assert_like_lax(outcome(jax.jit(ours), x, w), expected, f"{dtype} to {preferred}")


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")
@pytest.mark.parametrize("algorithm", ["auto", "xla", "im2col"])
@pytest.mark.parametrize("dtype", FLOATS + OTHERS)
def test_dtypes_whatever_promotion_is_allowed(dtype, algorithm):
    """lax promotes nothing in a convolution, so the promotion mode does not matter."""
    x, w = operands(dtype)
    for preferred, promotion, x64 in itertools.product(
        PREFERRED, ["standard", "strict"], [False, True]
    ):
        options = {"preferred_element_type": preferred}
        ours = same(jaxconv.conv_general_dilated, algorithm=algorithm, **options)
        theirs = same(lax.conv_general_dilated, **options)
        modes = (jax.numpy_dtype_promotion(promotion), jax.enable_x64(x64))
        with modes[0], modes[1], jax.numpy_rank_promotion("raise"):
            actual, expected = outcome(lowered, ours, x, w), outcome(jax.eval_shape, theirs, x, w)
            assert_like_lax(actual, expected, f"{dtype} to {preferred}, {promotion}, {x64}")


@pytest.mark.parametrize("algorithm", ["auto", "im2col"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_dtypes_of_gradients(dtype, algorithm):
    """Also for a cotangent of another dtype, where lax of JAX 0.9 raises."""

    def with_gradients(conv, x, w):
        y, vjp = jax.vjp(conv, x, w)
        return y, *vjp(y)

    x, w = operands(dtype)
    exact = same(lax.conv_general_dilated, precision="highest")
    for preferred in [None, "float32", "float8_e5m2"][: 2 if x.dtype.itemsize > 1 else 3]:
        conv = same(
            jaxconv.conv_general_dilated, algorithm=algorithm, preferred_element_type=preferred
        )
        with jax.numpy_dtype_promotion("strict"):
            y, dx, dw = jax.jit(with_gradients, static_argnums=0)(conv, x, w)
        expected, vjp = jax.vjp(exact, x.astype(np.float32), w.astype(np.float32))
        expected = expected, *vjp(y.astype(np.float32))
        for a, e, to in zip((y, dx, dw), expected, (preferred or dtype, dtype, dtype), strict=True):
            assert a.dtype == jnp.dtype(to)
            # The sums are exact in float32 and rounded once.
            a, e = (np.asarray(jnp.asarray(t, to), np.float32) for t in (a, e))
            assert_exact(a, e, f"{dtype} to {preferred}")


# --- forms ----------------------------------------------------------------------------------------

NUMBERS = lax.conv_dimension_numbers((2,) * 4, (2,) * 4, NHWC)
PAIRS = [(1, 2), (0, 1)]
PADDINGS = [
    *("SAME", "VALID", "SAME_LOWER", "same", "Same", "valid", "same_lower", "FULL", ""),
    *(PAIRS, tuple(PAIRS), [list(p) for p in PAIRS], np.array(PAIRS), np.array(PAIRS, np.int8)),
    *(tuple(np.array(p) for p in PAIRS), jnp.array(PAIRS), ((-1, 2), (0, -1)), ((0, 0), (0, 0))),
    *(None, [(1, 1)], [(1, 1)] * 3, [(1, 1, 1)] * 2, [(0.5, 1), (0, 0)], np.array(PAIRS) * 0.5),
]
INTEGERS = [
    *((2, 1), [2, 1], np.array([2, 1]), (np.int64(2), np.int8(1)), (1, 1), [1, 1]),
    *((2,), (1, 1, 1), (0, 1), (-1, 1), (1.5, 1), "21"),
]
CALLS = {
    "conv_general_dilated": {
        "padding": PADDINGS,
        "window_strides": INTEGERS,
        "lhs_dilation": [None, *INTEGERS],
        "rhs_dilation": [None, *INTEGERS],
        "feature_group_count": [1, np.int64(1), True, 0, -1, 2],
        "batch_group_count": [1, np.int64(2), 0, -1, 3],
        "dimension_numbers": [
            NHWC,
            list(NHWC),
            NUMBERS,
        ],
        "precision": [
            *(None, "highest", "fastest", "float32", "tensorfloat32", "sharp", 3),
            *(lax.Precision.HIGH, ("default", "high")),
            *((lax.Precision.HIGH,) * 2, lax.DotAlgorithmPreset.F32_F32_F32),
        ],
        "preferred_element_type": ["float32", np.float32, jnp.float32, np.dtype("f4"), "f5", "O"],
    },
    "conv_transpose": {
        "padding": PADDINGS,
        "strides": INTEGERS,
        "rhs_dilation": [None, *INTEGERS],
        "dimension_numbers": [None, NHWC, NUMBERS],
    },
}
BASE = {
    "conv_general_dilated": {
        "window_strides": (1, 1),
        "padding": PAIRS,
        "dimension_numbers": NHWC,
    },
    "conv_transpose": {"strides": (2, 2), "padding": PAIRS},
}
FORMS = [(name, key) for name, keys in CALLS.items() for key in keys]


@pytest.mark.parametrize(("name", "key"), FORMS)
def test_forms_of_arguments(name, key):
    x, w = operands()
    for form in CALLS[name][key]:
        options = {**BASE[name], key: form}
        actual, expected = (
            outcome(functools.partial(getattr(of, name), **options), x, w) for of in (jaxconv, lax)
        )
        assert_like_lax(actual, expected, f"{name} {options}")


@pytest.mark.parametrize("strides", [(2, 2), (1, 1), (1, 3)])
@pytest.mark.parametrize("consistent", [False, True])
def test_padding_of_conv_transpose(strides, consistent):
    """lax takes "SAME" and "VALID" as they are; other names only if no stride dilates."""
    x, w = operands()
    # With use_consistent_padding lax requires tuples of pairs; it interprets other forms
    # differently.
    consistently = [p for p in PADDINGS if isinstance(p, str | None)] + [PAIRS, tuple(PAIRS)]
    for padding in consistently if consistent else PADDINGS:
        options = dict(strides=strides, padding=padding, use_consistent_padding=consistent)
        actual, expected = (
            outcome(functools.partial(f, **options), x, w)
            for f in (jaxconv.conv_transpose, lax.conv_transpose)
        )
        assert_like_lax(actual, expected, f"conv_transpose {options}")
