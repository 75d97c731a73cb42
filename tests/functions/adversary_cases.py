"""The cases of ``adversary.py`` by public function and unusual input."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from adversary import Answer, Case, Refused
from adversary_apart import apart_cases
from adversary_epilogue import epilogue_cases
from adversary_inputs import NHWC, W, X, draw, in_lax, kind, value, written
from adversary_int8 import int8_cases
from adversary_lax import lax_cases, transformation_cases, transpose_cases
from adversary_tools import tool_cases
from jax import lax

import jaxconv

# --- operands of conv -----------------------------------------------------------------------------


class Convertible:
    """An object that converts itself to an array, as arrays of other libraries do."""

    def __jax_array__(self):
        return jnp.asarray(X)


def masked(a: np.ndarray) -> np.ndarray:
    return np.ma.masked_array(a, mask=a > 1)


def deleted() -> jax.Array:
    array = jnp.array(X)
    array.delete()
    return array


def leaked() -> jax.core.Tracer:
    held = []
    jax.jit(lambda x: held.append(x))(jnp.asarray(X))
    return held[0]


def strided(a: np.ndarray) -> np.ndarray:
    """The same numbers, but not contiguous in memory."""
    out = np.zeros([2 * n for n in a.shape], a.dtype)[tuple(slice(None, None, -2) for _ in a.shape)]
    out[...] = a
    return out


def unaligned(a: np.ndarray) -> np.ndarray:
    raw = np.zeros(a.nbytes + 1, np.uint8)[1:].view(a.dtype).reshape(a.shape)
    raw[...] = a
    return raw


def read_only(a: np.ndarray) -> np.ndarray:
    a = a.copy()
    a.flags.writeable = False
    return a


OPERANDS: dict[str, tuple[Any, Any]] = {
    "None": (None, kind("x", "array of numbers", "None")),
    "text": ("abc", kind("x", "array of numbers", "abc")),
    "bytes": (b"abc", kind("x", "array of numbers")),
    "a dict": ({}, kind("x", "array of numbers", "{}")),
    "a set": ({1.0}, kind("x", "array of numbers")),
    "a generator": ((i for i in range(3)), kind("x", "array of numbers")),
    "a function": (draw, kind("x", "array of numbers")),
    "a ragged list": ([[1.0], [1.0, 2.0]], kind("x", "array of numbers")),
    "a list of arrays of two shapes": ([X, X[1:]], kind("x", "array of numbers")),
    "objects": (np.full(X.shape, None), kind("x", "array of numbers", "object")),
    "texts": (np.full(X.shape, "a"), kind("x", "array of numbers", "<U1")),
    "dates": (np.zeros(X.shape, "datetime64[s]"), kind("x", "array of numbers", "datetime64")),
    "records": (np.zeros(X.shape, [("a", "f4")]), kind("x", "array of numbers")),
    "float0": (np.zeros(X.shape, jax.dtypes.float0), kind("x", "float0", "(2, 5, 6, 4)")),
    "a shape": (jax.ShapeDtypeStruct(X.shape, X.dtype), kind("x", "ShapeDtypeStruct", "explain")),
    "keys": (lambda: jax.random.split(jax.random.key(0), X.shape), kind("x", "key<fry>")),
    "a packed array": (
        lambda: jaxconv.int8.pack(X.astype(np.int8)),
        kind("x", "array of numbers", "Packed"),
    ),
    "a deleted array": (deleted, Refused(RuntimeError, ("deleted",))),
    "a leaked tracer": (leaked, Refused(jax.errors.UnexpectedTracerError, ("leak",))),
    "a number": (1.0, value("x", "4 dimensions", "()")),
    "a vector": (X[0, 0, 0], value("x", "4 dimensions", "(4,)")),
    "a matrix": (X[0, 0], value("x", "4 dimensions", "or 3", "(6, 4)")),
    "five axes": (X[None], value("x", "4 dimensions", "(1, 2, 5, 6, 4)")),
    "nothing": ([], value("x", "4 dimensions", "(0,)")),
    "too many channels": (draw(2, 5, 6, 5), value("w", "expected 5 input channels", "got 4")),
    "no channels": (draw(2, 5, 6, 0), value("w", "expected 0 input channels", "got 4")),
    "channels first": (X.transpose(0, 3, 1, 2), value("w", "x in NCHW", "transpose x to NHWC")),
    "no batch axis": (X[0], Answer(lambda: in_lax().reference()[0])),
    "an empty batch": (X[:0], in_lax(X[:0])),
    "no rows": (X[:, :0], in_lax(X[:, :0])),
    "a list": (X.tolist(), in_lax()),
    "a list of arrays": (list(X), in_lax()),
    "a convertible object": (Convertible(), in_lax()),
    "Fortran's order": (np.asfortranarray(X), in_lax()),
    "a view backwards": (strided(X), in_lax()),
    "an unaligned view": (unaligned(X), in_lax()),
    "a broadcast view": (
        np.broadcast_to(X[:1], X.shape),
        in_lax(np.broadcast_to(X[:1], X.shape)),
    ),
    "a read-only array": (read_only(X), in_lax()),
    "another device": (lambda: jax.device_put(X, jax.devices("cpu")[-1]), in_lax()),
    "float64 without x64": (X.astype(np.float64), in_lax()),
    "big-endian numbers": (X.astype(">f4"), kind("x", "array of numbers", ">f4")),
    "int64 without x64": (X.astype(np.int64), in_lax()),
    "bool": (X > 0, in_lax((X > 0).astype(np.float32))),
    "uint16": (abs(X).astype(np.uint16), in_lax(abs(X))),
    "complex64": (X * np.complex64(1j), in_lax(X * np.complex64(1j), W.astype(np.complex64))),
    "float16": (X.astype(np.float16), in_lax()),
    "float8": (
        lambda: jnp.asarray(X, "float8_e4m3fn"),
        value("float8_e4m3fn", "float32", "promotion"),
    ),
    "int4": (lambda: jnp.asarray(X, "int4"), value("int4", "float32", "promotion")),
    "masked": (masked(X), kind("x", "array of numbers", "masked")),
    "infinities": (np.full_like(X, np.inf), in_lax(np.full_like(X, np.inf), padding="VALID")),
    "longdouble": (X.astype(np.longdouble), kind("x", "array of numbers", "float128")),
}
# These run without padding: in padding, NaN and Inf may differ (docs/precision.md).
VALID = {"infinities"}


def operand_cases() -> Iterator[Case]:
    for name, (x, expected) in OPERANDS.items():

        def run(x=x, name=name):
            given = x() if callable(x) and x is not draw else x
            return jaxconv.conv(given, W, padding="VALID" if name in VALID else "SAME")

        yield Case(f"conv/x: {name}", run, expected)
    filters = {
        "None": (None, kind("w", "array of numbers")),
        "a shape": (jax.ShapeDtypeStruct(W.shape, W.dtype), kind("w", "ShapeDtypeStruct")),
        "a packed filter": (
            lambda: jaxconv.int8.pack_filter(W.astype(np.int8)),
            kind("w", "array of numbers", "PackedFilter"),
        ),
        "a vector": (W[0, 0, 0], value("w", "3 to 5 dimensions", "(6,)")),
        "six axes": (W[None, None], value("w", "3 to 5 dimensions", "(1, 1, 3, 2, 4, 6)")),
        "one axis less": (W[0], value("x", "3 dimensions", "(2, 5, 6, 4)")),
        "too few channels": (W[:, :, :3], value("w", "expected 4 input channels", "got 3")),
        "output channels first": (W.transpose(3, 2, 0, 1), value("w", "transpose w to HWIO")),
        "no output channels": (W[..., :0], in_lax(w=W[..., :0])),
        "no taps": (W[:0], Answer(lambda: np.zeros((2, 6, 6, 6), np.float32))),  # XLA raises
        "wider than x": (draw(9, 9, 4, 2), None),
        "bfloat16": (lambda: jnp.asarray(W, jnp.bfloat16), in_lax()),
        "float8": (lambda: jnp.asarray(W, "float8_e5m2"), value("float8_e5m2", "promotion")),
        "int8": (W.astype(np.int8), in_lax()),
    }
    for name, (w, expected) in filters.items():

        def run(w=w):
            return jaxconv.conv(X, w() if callable(w) else w)

        yield Case(f"conv/w: {name}", run, expected or in_lax(w=w))
    for dtype in ("float64", "complex128", "int64", "uint64", "int16", "uint8"):

        def run(of, dtype=dtype):
            with jax.enable_x64(True):
                return of(jnp.asarray(abs(X), dtype), jnp.asarray(abs(W), dtype))

        theirs = functools.partial(
            lax.conv_general_dilated, window_strides=(1, 1), padding="SAME", dimension_numbers=NHWC
        )
        yield Case(
            f"conv/both {dtype} with x64",
            functools.partial(run, jaxconv.conv),
            Answer(functools.partial(run, theirs)),
        )


# --- parameters of conv ---------------------------------------------------------------------------

PARAMETERS: dict[str, list[tuple[Any, Any]]] = {
    "stride": [
        (2, in_lax(stride=(2, 2))),
        ((2, 3), in_lax(stride=(2, 3))),
        ([1, 2], in_lax(stride=(1, 2))),
        (np.int64(2), in_lax(stride=(2, 2))),
        (np.array([2, 1]), in_lax(stride=(2, 1))),
        (jnp.array(2), in_lax(stride=(2, 2))),
        (True, in_lax()),
        (100, in_lax(stride=(100, 100))),
        (0, value("stride", "at least 1", "(0, 0)")),
        ((1, -1), value("stride", "at least 1", "(1, -1)")),
        ((), value("stride", "one number or 2", "()")),
        ((1, 1, 1), value("stride", "one number or 2")),
        (((1, 1),), kind("stride", "integer", "(1, 1)")),
        (1.0, kind("stride", "integer", "1.0")),
        (np.nan, kind("stride", "integer", "nan")),
        ("1", kind("stride", "integers", "'1'")),
        (None, kind("stride", "integer", "None")),
        ({1, 2}, kind("stride", "{1, 2}")),
        ({"h": 1, "w": 2}, kind("stride", "integer")),
        (2**63, value("stride", "64 bits")),
        (-(2**70), value("stride", "64 bits")),
        (slice(1), kind("stride", "integer", "slice")),
    ],
    "dilation": [
        (2, in_lax(rhs_dilation=(2, 2))),
        ((1, 3), in_lax(rhs_dilation=(1, 3))),
        (50, in_lax(rhs_dilation=(50, 50))),
        (0, value("dilation", "at least 1")),
        (-1, value("dilation", "at least 1")),
        ((1, 2, 3), value("dilation", "one number or 2")),
        ("2", kind("dilation", "integers")),
        (1.5, kind("dilation", "integer", "1.5")),
        (None, kind("dilation", "integer", "None")),
        (2**63, value("dilation", "64 bits")),
    ],
    "padding": [
        ("SAME", in_lax()),
        ("same", in_lax()),
        ("Valid", in_lax(padding="VALID")),
        ("SAME_LOWER", in_lax(padding="SAME_LOWER")),
        (0, in_lax(padding="VALID")),
        (1, in_lax(padding=((1, 1), (1, 1)))),
        ((1, 0), in_lax(padding=((1, 1), (0, 0)))),
        (((2, 0), 1), in_lax(padding=((2, 0), (1, 1)))),
        ([[1, 2], [3, 4]], in_lax(padding=((1, 2), (3, 4)))),
        (np.array([[1, 2], [3, 4]]), in_lax(padding=((1, 2), (3, 4)))),
        (np.int8(2), in_lax(padding=((2, 2), (2, 2)))),
        (-1, in_lax(padding=((-1, -1), (-1, -1)))),
        (((-2, 3), (4, -1)), in_lax(padding=((-2, 3), (4, -1)))),
        (
            ((-5, 3), (0, 1)),
            Answer(lambda: np.zeros((2, 1, 6, 6), np.float32)),
        ),  # XLA:CPU reads outside x
        (20, in_lax(padding=((20, 20), (20, 20)))),
        (-3, value("padding", "(-3, -3)", "crops more than 5")),
        ("CAUSAL", value("padding", "one spatial axis")),
        ("FULL", value("padding", "'SAME'", "'FULL'")),
        ("", value("padding", "'SAME'", "''")),
        (b"SAME", kind("padding", "integer", "b'SAME'")),
        (None, kind("padding", "None")),
        (0.5, kind("padding", "0.5")),
        (np.nan, kind("padding", "nan")),
        ([(1, 1)], value("padding", "2 entries", "[(1, 1)]")),
        ((1, 2, 3), value("padding", "2 entries")),
        ([(1, 1, 1), (0, 0)], value("padding", "pair", "(1, 1, 1)")),
        ([("SAME",), (0, 0)], value("padding", "pair")),
        (["SAME", "VALID"], kind("padding", "integer", "'SAME'")),
        ([(0.5, 1), (0, 0)], kind("padding", "0.5")),
        ({"SAME": 1, "VALID": 2}, kind("padding", "{'SAME': 1, 'VALID': 2}")),
        (2**63, value("padding", "64 bits")),
    ],
    "groups": [
        (True, in_lax()),
        (np.int32(1), in_lax()),
        (2, value("w", "expected 2 input channels", "groups is 2", "got 4")),
        (3, value("groups", "3", "4 input channels")),
        (4, value("groups", "does not divide", "w.reshape((3, 2, 1, 24))")),
        (0, value("groups", "at least 1", "0")),
        (-1, value("groups", "at least 1")),
        (2**62, value("groups", "does not divide")),
        (2**64, value("groups", "64 bits")),
        (1.0, kind("groups", "integer", "1.0")),
        ("1", kind("groups", "integer", "'1'")),
        (None, kind("groups", "integer", "None")),
        ((1, 1), kind("groups", "integer")),
    ],
    "data_format": [
        ("NHWC", in_lax()),
        ("nHwC", in_lax()),
        ("channels_last", in_lax()),
        ("channels_first", value("w", 'data_format="NHWC"')),
        ("NCHW", value("w", 'data_format="NHWC"')),
        ("NWC", value("w", "3 dimensions", "NWC")),
        ("NDHWC", value("w", "5 dimensions", "NDHWC")),
        ("NHCW", value("data_format", "'NHCW'", "channels_last")),
        ("", value("data_format", "''")),
        (3, value("data_format", "got 3")),
        (NHWC, value("data_format", "'HWIO'")),
        ([], value("data_format", "[]")),
        (b"NHWC", value("data_format", "b'NHWC'")),
    ],
    "precision": [
        (None, in_lax()),
        ("highest", in_lax()),
        ("tensorfloat32", in_lax()),
        (lax.Precision.HIGH, in_lax()),
        (("default", "high"), in_lax()),
        (lax.DotAlgorithmPreset.F32_F32_F32, in_lax()),
        ("sharp", value("precision", "'sharp'")),
        (3, value("precision", "3")),
        (("high",), value("precision", "('high',)")),
        (["high", "high"], in_lax()),
        (jnp.float32, value("precision", "float32")),
        ({}, value("precision", "{}")),
    ],
    "algorithm": [
        ("native", in_lax()),
        ("xla", in_lax()),
        ("im2col", in_lax()),
        ("onednn", in_lax()),
        ({}, in_lax()),
        ({"wgrad": "xla"}, in_lax()),
        ("", value("algorithm", "''", "'auto'")),
        ("cudnn", value("algorithm", "'cudnn'", "'native'")),
        ("fprop_onednn_f64", value("algorithm", "fprop_onednn_f64")),
        ("AUTO", value("algorithm", "'AUTO'")),
        ("winograd", value("algorithm", "winograd", "3x3")),
        ("depthwise", value("algorithm", "depthwise", "xla")),
        ("igemm_wgmma", value("igemm_wgmma")),
        ({"backward": "xla"}, value("algorithm", "fprop, dgrad, wgrad", "backward")),
        ({1: "xla", "a": "b"}, value("algorithm", "fprop, dgrad, wgrad", "[1, 'a']")),
        ({"fprop": None}, kind("algorithm", "'fprop'", "None")),
        ({"dgrad": ["xla"]}, kind("algorithm", "'dgrad'", "['xla']")),
        ({"fprop": "no such"}, value("algorithm", "'no such'")),
        (None, kind("algorithm", "None")),
        (7, kind("algorithm", "7")),
        (("auto", "auto", "auto"), kind("algorithm", "string or a mapping")),
        (b"auto", kind("algorithm", "b'auto'")),
    ],
    "preferred_element_type": [
        (None, in_lax()),
        ("float32", in_lax()),
        (float, in_lax()),
        (np.dtype("f4"), in_lax()),
        ("complex64", kind("preferred_element_type", "complex64", "float32")),
        ("float16", kind("preferred_element_type", "float16", "float32")),
        (jnp.bfloat16, kind("preferred_element_type", "bfloat16", "float32")),
        (np.int32, kind("preferred_element_type", "int32", "float32")),
        ("f5", kind("preferred_element_type", "f5")),
        ("O", kind("preferred_element_type", "O")),
        (3, kind("preferred_element_type", "3")),
        (X, kind("preferred_element_type")),
        (bool, kind("preferred_element_type", "bool")),
    ],
}


def parameter_cases() -> Iterator[Case]:
    for name, entries in PARAMETERS.items():
        for given, expected in entries:
            yield Case(
                f"conv/{name}={written(given)}",
                lambda name=name, given=given: jaxconv.conv(X, W, **{name: given}),
                expected,
            )
    odd = {
        "a positional stride": (lambda: jaxconv.conv(X, W, 2), kind("stride=", "3 arguments")),
        "an unknown keyword": (lambda: jaxconv.conv(X, W, q=2), kind("'q'", "groups", "padding")),
        "a misspelled keyword": (lambda: jaxconv.conv(X, W, paddding=2), kind("'padding' is one")),
        "no keyword": (lambda: jaxconv.conv(X, W, preferred_dtype=1), kind("'preferred_dtype'")),
        "no filter": (lambda: jaxconv.conv(X), kind("'w'")),
    }
    for name, own in {
        "strides": "'stride'",
        "window_strides": "'stride'",
        "rhs_dilation": "'dilation'",
        "dilations": "'dilation'",
        "dilation_rate": "'dilation'",
        "feature_group_count": "'groups'",
        "layout": "'data_format'",
        "dimension_numbers": "conv_general_dilated",
        "lhs_dilation": "conv_transpose",
        "kernel_size": "window",
        "out_dtype": "'preferred_element_type'",
        "weight": "'w'",
    }.items():
        run = lambda name=name: jaxconv.conv(X, W, **{name: 2})  # noqa: E731
        odd[name] = (run, kind(f"'{name}'", own))
    odd |= {
        "stride of lax's": (
            lambda: jaxconv.conv_general_dilated(X, W, stride=(1, 1), padding="SAME"),
            kind("conv_general_dilated", "'window_strides'"),
        ),
        "bias of lax's": (
            lambda: jaxconv.conv_general_dilated(X, W, (1, 1), "SAME", bias=1),
            kind("'bias'", "jaxconv.conv"),
        ),
        "CAUSAL of lax's": (
            lambda: jaxconv.conv_general_dilated(X, W, (1, 1), "CAUSAL", dimension_numbers=NHWC),
            value("padding", "jaxconv.conv"),
        ),
        "stride of conv_transpose": (
            lambda: jaxconv.conv_transpose(X, W, stride=(1, 1), padding="SAME"),
            kind("conv_transpose", "'strides'"),
        ),
        "CIRCULAR of no rows": (
            lambda: jaxconv.conv(X[:, :0], W, padding="CIRCULAR"),
            value("padding", "'CIRCULAR'", "axis 1"),
        ),
        "REFLECT of one row": (
            lambda: jaxconv.conv(X[:, :1], W, padding="REFLECT"),
            value("padding", "'REFLECT'", "2 or more", "axis 1"),
        ),
        "CIRCULAR of one row": (
            lambda: jaxconv.conv(X[:, :1], W, padding="CIRCULAR"),
            Answer(
                lambda: jaxconv.conv(
                    np.pad(X[:, :1], ((0, 0), (1, 1), (0, 1), (0, 0)), "wrap"), W, padding=0
                )
            ),
        ),
        "a traced stride": (
            lambda: jax.jit(lambda s: jaxconv.conv(X, W, stride=s))(2),
            kind("stride", "integer", "Tracer"),
        ),
        "a traced padding": (
            lambda: jax.jit(lambda p: jaxconv.conv(X, W, padding=[(p, p), (0, 0)]))(2),
            kind("padding", "integer", "Tracer"),
        ),
        "an operand of a jitted call that is text": (
            lambda: jax.jit(jaxconv.conv)("a", W),
            kind("type <class 'str'>"),
        ),
        "both operands transposed": (
            lambda: jaxconv.conv(X.transpose(0, 3, 1, 2), W.transpose(3, 2, 0, 1)),
            value("w", 'data_format="NCHW"'),
        ),
        "a transposed filter": (
            lambda: jaxconv.conv(X.transpose(0, 3, 1, 2), W, data_format="channels_first"),
            value("x in NCHW", "transpose w to OIHW"),
        ),
        "a depthwise filter of another convention": (
            lambda: jaxconv.conv(X, draw(3, 2, 4, 1), groups=4),
            value("groups", "depthwise", "w.reshape((3, 2, 1, 4))"),
        ),
        "groups that do not divide the output channels": (
            lambda: jaxconv.conv(X, draw(3, 2, 1, 6), groups=4),
            value("groups", "4", "6 output"),
        ),
        "a batched pair of groups": (
            lambda: jax.vmap(lambda x, w: jaxconv.conv(x, w, groups=2))(X[None], W[None]),
            value("w", "expected 2 input channels"),
        ),
    }
    for name, (run, expected) in odd.items():
        yield Case(f"conv/{name}", run, expected)


def all_cases() -> list[Case]:
    return [
        *operand_cases(),
        *parameter_cases(),
        *lax_cases(),
        *transpose_cases(),
        *epilogue_cases(),
        *transformation_cases(),
        *int8_cases(),
        *tool_cases(),
        *apart_cases(),
    ]
