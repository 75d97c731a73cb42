"""Derivatives of ``int8.conv``; errors of its handler. See also ``adversary.py``."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from handler_errors import assert_refused
from int8_reference import OUT_DTYPES
from problems import INT8_BY_NAME

from jaxconv import int8
from jaxconv._src.int8 import int8_primitive
from jaxconv._src.int8.int8_primitive import TARGET, Int8Spec

X = np.zeros((2, 6, 5, 64), np.int8)
W = np.zeros((3, 3, 64, 32), np.int8)
S = np.ones(32, np.float32)


# --- derivatives ----------------------------------------------------------------------------------


@pytest.mark.parametrize("argument", [0, 1, 2])
def test_a_derivative_is_refused_and_names_fake_quant_conv(argument):
    def loss(scale, bias, residual_scale):
        residual = jnp.ones((2, 6, 5, 32), jnp.float32)
        y = int8.conv(
            X, W, scale, bias, residual, residual_scale=residual_scale, out_dtype=jnp.float32
        )
        return jnp.sum(y)

    for differentiate in (jax.grad, jax.jacfwd):
        with pytest.raises(TypeError, match=r"fake_quant_conv"):
            differentiate(loss, argument)(S, S, 1.0)


def test_stop_gradient_is_heard():
    def loss(scale):
        stopped = jax.lax.stop_gradient(scale)
        return jnp.sum(int8.conv(X, W, stopped, out_dtype=jnp.float32)) + jnp.sum(scale)

    np.testing.assert_array_equal(jax.grad(loss)(S), np.ones(32))


# --- the handler ----------------------------------------------------------------------------------

P = INT8_BY_NAME["int8"]


def key_of(platform, **changes) -> tuple[str, Int8Spec, tuple]:
    spec = Int8Spec(
        conv=P.spec(),
        layout="nhwc",
        out_dtype=np.dtype(np.int8),
        scale="scale",
        bias=True,
        residual=True,
        **changes,
    )
    sizes = spec.sizes(P.canonical_shape("x"), (P.k, 0))
    chosen, key = int8_primitive.Quantised(spec).select(platform, sizes, np.dtype(np.int8))
    return key, spec, chosen


def call_handler(platform, **changes):
    """Calls the handler as the lowering does, with ``changes`` to its arguments."""
    key, _, chosen = key_of(platform)
    assert chosen.instance
    terms = 9 * P.c
    w = (P.k, 3, 3, P.c) if platform == "cpu" else (P.k, terms)
    y = P.canonical_shape("y")
    given = dict(
        x=np.zeros(P.canonical_shape("x"), np.int8),
        w=np.zeros(w, np.int8),
        scale=np.ones(P.k, np.float32),
        offset=np.zeros(0, np.float32),
        bias=np.ones(P.k, np.float32),
        residual=np.zeros(y, np.int8),
        residual_scale=np.ones(1, np.float32),
        out=jax.ShapeDtypeStruct(y, np.int8),
        workspace=jax.ShapeDtypeStruct((chosen.workspace_bytes,), np.uint8),
        instance=chosen.instance,
        problem=key,
        slices=np.int64(chosen.slices),
    )
    given.update(changes)
    results = given.pop("out"), given.pop("workspace")
    attributes = {n: given.pop(n) for n in ("instance", "problem", "slices") if n in given}
    call = jax.ffi.ffi_call(TARGET, results)
    run = jax.jit(lambda *operands: call(*operands, **attributes))
    return jax.block_until_ready(run(*given.values()))[0]


ZEROS = np.zeros
MISMATCHES = {
    "x of another shape": (dict(x=ZEROS((2, 14, 13, 32), np.int8)), "x: expected shape"),
    "x of another dtype": (dict(x=ZEROS((2, 14, 14, 32), np.uint8)), "x: expected dtype s8"),
    "w of another shape": (dict(w=ZEROS((64, 3, 3), np.int8)), "w: expected shape"),
    "w of another dtype": (dict(w=ZEROS((64, 288), np.float32)), "w: expected dtype s8"),
    "scale too short": (dict(scale=ZEROS(63, np.float32)), "scale: expected shape"),
    "scale of another dtype": (dict(scale=ZEROS(64, np.int32)), "scale: expected dtype f32"),
    "no scale": (dict(scale=ZEROS(0, np.float32)), "scale: expected shape"),
    "an offset that is not in the problem": (
        dict(offset=ZEROS(64, np.int32)),
        "offset: expected no elements",
    ),
    "bias too long": (dict(bias=ZEROS(65, np.float32)), "bias: expected shape"),
    "residual of another shape": (
        dict(residual=ZEROS((2, 14, 14, 32), np.int8)),
        "residual: expected shape",
    ),
    "residual of another dtype": (
        dict(residual=ZEROS((2, 14, 14, 64), np.float32)),
        "residual: expected dtype s8",
    ),
    "no residual_scale": (dict(residual_scale=ZEROS(0, np.float32)), "residual_scale"),
    "result of another shape": (
        dict(out=jax.ShapeDtypeStruct((2, 14, 14, 32), np.int8)),
        "y: expected shape",
    ),
    "result of another dtype": (
        dict(out=jax.ShapeDtypeStruct((2, 14, 14, 64), np.int32)),
        "y: expected dtype s8",
    ),
    "no slices": (dict(slices=np.int64(0)), "slices: expected at least 1"),
    "unknown instance": (dict(instance="fprop_nothing_s8"), "fprop_nothing_s8"),
    "unreadable problem": (dict(problem="quantise this"), "problem"),
}


def test_the_handler_accepts_what_the_lowering_sends(platform, native_int8_kernels):
    assert call_handler(platform).shape == P.canonical_shape("y")


@pytest.mark.parametrize("name", MISMATCHES)
def test_a_handler_given_wrong_buffers_or_attributes_returns_an_error(
    platform, native_int8_kernels, name
):
    changes, words = MISMATCHES[name]
    assert_refused(lambda: call_handler(platform, **changes), words)


def test_a_workspace_that_is_too_small_is_refused(platform, native_kernels):
    *_, chosen = key_of(platform)
    if not chosen.workspace_bytes:
        return
    small = jax.ShapeDtypeStruct((chosen.workspace_bytes - 1,), np.uint8)
    if platform == "cpu":  # the CPU's handler allocates its own
        call_handler(platform, workspace=small)
        return
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"INVALID_ARGUMENT.*workspace"):
        call_handler(platform, workspace=small)


def test_the_plain_handler_takes_no_epilogue(platform, native_int8_kernels):
    key, _, chosen = key_of(platform)
    shapes = [P.canonical_shape(role) for role in "xwy"]
    call = jax.ffi.ffi_call(
        "jaxconv_fprop",
        (
            jax.ShapeDtypeStruct(shapes[2], np.int8),
            jax.ShapeDtypeStruct((chosen.workspace_bytes,), np.uint8),
        ),
    )
    axes = {f"{n}_axes": np.arange(4) for n in ("lhs", "rhs", "out")}
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"INVALID_ARGUMENT.*epilogue"):
        jax.block_until_ready(
            jax.jit(
                lambda x, w: call(
                    x, w, instance=chosen.instance, problem=key, slices=np.int64(1), **axes
                )
            )(*(np.zeros(s, np.int8) for s in shapes[:2]))
        )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("bias", "a scale beside"),
        ("scale gelu", "expected relu or relu6"),
        ("scale z128", "zero point of s8, -128 to 127, got 128"),
        ("scale bias scale", "unexpected 'scale'"),
    ],
)
def test_selection_refuses_what_it_cannot_read(platform, native_kernels, words, message):
    key, *_ = key_of(platform)
    key = key[: key.index(" scale")]
    with pytest.raises(ValueError, match=message):
        native_kernels.module.select(f"{key} {words}", "auto", "")


def test_the_dtypes_are_those_of_the_reference():
    from jaxconv._src.int8.int8_layout import OUT_DTYPES as ACCEPTED

    assert set(ACCEPTED) == set(OUT_DTYPES.values())
