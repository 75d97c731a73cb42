"""The cases of ``adversary.py`` for quantised convolutions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from adversary import Answer, Case, Refused
from adversary_inputs import NHWC, kind, value
from jax import lax

from jaxconv import int8

RNG = np.random.default_rng(1)
X, W = (RNG.integers(-3, 4, s).astype(np.int8) for s in ((2, 5, 6, 64), (3, 3, 64, 32)))
X4, W4 = X[..., :4].copy(), W[:, :, :4].copy()
XF, WF = X4.astype(np.float32), W4.astype(np.float32)
Y = np.zeros((2, 5, 6, 32), np.int8)  # has the result's shape
SCALE = np.linspace(0.01, 0.02, 32, dtype=np.float32)


def sums(x: Any, w: Any, padding: Any = "SAME") -> np.ndarray:
    """The exact sums, computed by lax in int32."""
    options = dict(dimension_numbers=NHWC, preferred_element_type=jnp.int32)
    x, w = jnp.asarray(x, jnp.int32), jnp.asarray(w, jnp.int32)
    return lax.conv_general_dilated(x, w, (1, 1), padding, **options)


def int8_cases() -> Iterator[Case]:
    def call(x: Any = X, w: Any = W, scale: Any = SCALE, **options: Any) -> Callable[[], Any]:
        return lambda: int8.conv(
            x() if callable(x) else x, w() if callable(w) else w, scale, **options
        )

    packed = lambda: int8.pack(X)  # noqa: E731
    packed_filter = lambda: int8.pack_filter(W, data_format="NHWC")  # noqa: E731
    blocked = lambda: int8.pack_filter(W)  # noqa: E731
    cases: dict[str, tuple[Callable[[], Any], Any]] = {
        "x: float32": (call(X.astype(np.float32)), kind("x", "int8 or uint8", "float32")),
        "x: None": (call(None), kind("x", "None")),
        "x: text": (call("abc"), kind("x", "abc")),
        "x: a filter": (call(packed_filter), kind("x", "PackedFilter")),
        "x: a vector": (call(X[0, 0, 0]), value("x", "(64,)")),
        "x: a shape": (call(jax.ShapeDtypeStruct(X.shape, X.dtype)), kind("x", "ShapeDtypeStruct")),
        "w: float32": (call(w=W.astype(np.float32)), kind("w", "int8", "float32")),
        "w: uint8": (call(w=W.astype(np.uint8)), kind("w", "int8", "uint8")),
        "w: images": (call(w=packed), kind("w", "Packed")),
        "w: None": (call(w=None), kind("w", "None")),
        "w: of other channels": (call(w=W[:, :, :32]), value("w")),
        "w: packed for NHWC": (call(packed, packed_filter), value("w", "NCHW32")),
        "scale: of another length": (call(scale=SCALE[:5]), value("scale", "(5,)")),
        "scale: a matrix of another batch": (
            call(scale=np.ones((3, 32), "f")),
            value("scale", "(3, 32)"),
        ),
        "scale: NaN": (call(scale=np.nan), value("scale", "finite")),
        "scale: infinite": (call(scale=SCALE * np.inf), value("scale", "finite")),
        "scale: text": (call(scale="1"), kind("scale", "'1'")),
        "scale: complex": (call(scale=1j), kind("scale", "complex")),
        "bias: without a scale": (call(scale=None, bias=SCALE), value("bias", "scale")),
        "bias: a scalar": (call(bias=1.0), value("bias", "()")),
        "bias: NaN": (call(bias=SCALE * np.nan), value("bias", "finite")),
        "residual: of another shape": (call(residual=X), value("residual", "(2, 5, 6, 64)")),
        "residual: of another dtype": (
            call(residual=np.zeros((2, 5, 6, 32), np.float32)),
            kind("residual", "int8", "float32"),
        ),
        "activation: gelu": (call(activation="gelu"), value("activation", "'gelu'")),
        "activation: a function": (call(activation=jnp.sin), value("activation", "sin", "fuse")),
        "activation: of jax.nn": (
            call(activation=jax.nn.relu),
            Answer(lambda: int8.conv(X, W, SCALE, activation="relu")),
        ),
        "activation: in capitals": (
            call(activation="ReLU6"),
            Answer(lambda: int8.conv(X, W, SCALE, activation="relu6")),
        ),
        "strides": (call(strides=2), kind("strides", "'stride'")),
        "groups": (call(groups=2), kind("groups", "pack_filter")),
        "preferred_element_type": (call(preferred_element_type=np.int32), kind("'out_dtype'")),
        "no scale": (call(scale=None), value("scale", "out_dtype=jnp.int32")),
        "no scale, and int8": (
            call(scale=None, out_dtype=np.int8),
            Answer(lambda: np.asarray(sums(X, W)).astype(np.int8)),
        ),
        "out_dtype: int16": (call(out_dtype=np.int16), kind("out_dtype", "int16")),
        "out_dtype: nonsense": (call(out_dtype="f5"), kind("out_dtype", "f5")),
        "data_format: of three axes": (
            call(data_format="NDHWC"),
            value("data_format", "2 spatial"),
        ),
        "data_format: 3": (call(data_format=3), value("data_format", "3")),
        "data_format: in small letters": (
            lambda: int8.unpack(int8.conv(X, W, SCALE, data_format="nchw32")),
            Answer(lambda: int8.conv(X, W, SCALE)),
        ),
        "data_format: channels_first": (
            lambda: int8.conv(X.transpose(0, 3, 1, 2), W, SCALE, data_format="channels_first"),
            Answer(lambda: jnp.moveaxis(int8.conv(X, W, SCALE), -1, 1)),
        ),
        "layout": (call(layout="NHWC"), Answer(lambda: int8.conv(X, W, SCALE))),
        "layout: beside data_format": (
            call(layout="NHWC", data_format="NHWC"),
            kind("layout", "data_format"),
        ),
        "data_format: CHWN": (call(data_format="CHWN"), value("data_format", "'CHWN'")),
        "zero_point: 128": (
            call(zero_point=128),
            value("zero_point", "-128 to 127, a value of int8, got 128"),
        ),
        "zero_point: 0.5": (call(zero_point=0.5), kind("zero_point", "0.5")),
        "zero_point: an array": (call(zero_point=np.zeros(3, int)), kind("zero_point")),
        "out_zero_point: of floats": (
            call(out_dtype=np.float32, out_zero_point=3),
            value("out_zero_point"),
        ),
        "stride: 0": (call(stride=0), value("stride", "at least 1")),
        "padding: CIRCULAR": (
            call(scale=None, out_dtype=np.int32, padding="CIRCULAR"),
            Answer(lambda: sums(np.pad(X, ((0, 0), (1, 1), (1, 1), (0, 0)), "wrap"), W, "VALID")),
        ),
        "padding: CAUSAL": (call(padding="CAUSAL"), value("padding", "one spatial axis")),
        "padding: FULL": (call(padding="FULL"), value("padding", "'CAUSAL'", "'FULL'")),
        "padding: crops all": (call(padding=-9), value("padding", "crops more than 5")),
        "algorithm: None": (call(algorithm=None), kind("algorithm", "None")),
        "algorithm: imma_wgmma": (call(algorithm="imma_wgmma"), value("imma_wgmma")),
        "grad": (
            lambda: jax.grad(lambda s: jnp.sum(int8.conv(X, W, s, out_dtype=jnp.float32)))(SCALE),
            Refused((TypeError, NotImplementedError), ("fake_quant_conv",)),
        ),
        "sums": (call(scale=None, out_dtype=np.int32), Answer(lambda: sums(X, W))),
        "sums of packed images": (
            lambda: int8.unpack(
                int8.conv(packed(), int8.pack_filter(W, data_format="NCHW32"), out_dtype=np.int32)
            ),
            Answer(lambda: sums(X, W)),
        ),
        "an empty batch": (
            call(X[:0], scale=None, out_dtype=np.int32),
            Answer(lambda: np.zeros((0, 5, 6, 32), np.int32)),
        ),
        "a list": (call(X4.tolist(), W4, None), kind("x", "int8 or uint8", "int32")),
        "pack: float32": (lambda: int8.pack(X.astype("f")), kind("x", "float32")),
        "pack: a vector": (lambda: int8.pack(X[0, 0, 0]), value("x", "4 dimensions")),
        "pack: no channels": (lambda: int8.pack(X[..., :0]), value("x", "channel")),
        "pack: an unknown format": (lambda: int8.pack(X, "CHWN"), value("data_format", "'CHWN'")),
        "pack: a value of 300": (lambda: int8.pack(X, value=300), value("value", "300")),
        "unpack: an array": (lambda: int8.unpack(X), kind("packed", "Packed")),
        "unpack: of data with an axis less": (
            lambda: int8.unpack(int8.Packed(jnp.asarray(X), 64)),
            value("data", "(2, 5, 6, 64)"),
        ),
        "pack and unpack": (lambda: int8.unpack(int8.pack(X)), Answer(lambda: X)),
        "pack_filter: float32": (lambda: int8.pack_filter(W.astype("f")), kind("w", "float32")),
        "pack_filter: groups of 3": (lambda: int8.pack_filter(W, groups=3), value("groups", "3")),
        "pack_filter: no taps": (lambda: int8.pack_filter(W[:0]), value("w", "empty")),
        "x: packed float32": (
            lambda: int8.conv(int8.Packed(packed().data.astype(np.float32), 64), blocked(), SCALE),
            kind("x.data", "int8 or uint8", "float32"),
        ),
        "x: packed with the data of other channels": (
            lambda: int8.conv(int8.Packed(packed().data, 20), blocked(), SCALE),
            value("x.data", "expected shape"),
        ),
        "x: not packed, beside a filter for NCHW32": (
            call(w=blocked),
            value("w", "packed for NCHW32", "x is an array", "pack x with jaxconv.int8.pack"),
        ),
        "x: of fewer channels than the packed filter": (
            lambda: int8.conv(int8.pack(X[..., :40]), blocked(), SCALE),
            value("w", "packed for 64 input channels in 1 groups", "x has 40"),
        ),
        "x: of fewer axes than the packed filter": (
            call(X[:, 0], packed_filter),
            value("w", "packed for windows (3, 3)", "x has 1 spatial"),
        ),
        "w: one axis less": (call(w=W[0]), value("w", "expected 4 dimensions")),
        "w: channels that do not divide": (
            call(w=np.zeros((3, 3, 40, 32), np.int8)),
            value("w", "divide the 64 of x", "got 40"),
        ),
        "w: narrow groups": (
            call(w=np.zeros((3, 3, 16, 64), np.int8), scale=np.ones(64, "f")),
            value("multiples of 32", "16 and 16"),
        ),
        "w: with the data of another window": (
            lambda: int8.conv(packed(), dataclasses.replace(blocked(), window=(5, 5)), SCALE),
            value("w.data", "(32, 1600)", "(32, 576)"),
        ),
        "scale: of padded length": (
            call(w=W[..., :20]),
            value("scale", "(20,)", "got shape (32,)"),
        ),
        "scale: of three dimensions": (call(scale=SCALE.reshape(1, 1, 32)), value("scale")),
        "scale: NaN on a device": (
            call(scale=jnp.asarray(SCALE * np.nan)),
            value("scale", "expected finite"),
        ),
        "bias: of another length": (call(bias=SCALE[:5]), value("bias", "expected (32,)")),
        "residual_scale: a vector": (
            call(residual=Y, residual_scale=SCALE),
            value("residual_scale", "expected a scalar"),
        ),
        "residual_scale: NaN": (
            call(residual=Y, residual_scale=np.nan),
            value("residual_scale", "expected finite"),
        ),
        "residual: not packed": (
            lambda: int8.conv(packed(), blocked(), SCALE, residual=Y),
            kind("residual", "expected a Packed", "int8.pack"),
        ),
        "residual: packed, of an array": (
            lambda: int8.conv(X, W, SCALE, residual=packed()),
            kind("residual", "got a Packed"),
        ),
        "activation: without a scale": (
            call(scale=None, activation="relu"),
            value("activation", "needs a scale"),
        ),
        "data_format: NCHW32 of one axis": (
            call(X[:, 0], W[0], data_format="NCHW32"),
            value("NCHW32 has two spatial axes"),
        ),
        "out_dtype: float64": (call(out_dtype=np.float64), kind("out_dtype", "float64")),
        "out_zero_point: beyond the result": (
            call(out_dtype=np.uint8, out_zero_point=-1),
            value("out_zero_point", "expected 0 to 255"),
        ),
        "out_zero_point: without a scale": (
            call(scale=None, out_zero_point=3),
            value("out_zero_point", "needs a scale"),
        ),
        "stride: of three axes": (call(stride=(1, 1, 1)), value("stride")),
        "dilation: 0": (call(dilation=0), value("dilation")),
        "algorithm: fastest": (call(algorithm="fastest"), value("algorithm")),
        "algorithm: gemm": (call(algorithm="gemm"), value("algorithm 'gemm' cannot serve")),
        "a traced scale": (
            lambda: jax.jit(lambda s: int8.conv(X, W, s))(SCALE),
            Answer(lambda: int8.conv(X, W, SCALE)),
        ),
        "quantize: int16": (
            lambda: int8.quantize(SCALE, 1.0, dtype=np.int16),
            kind("dtype", "int16"),
        ),
        "quantize: a scale of 0": (lambda: int8.quantize(SCALE, 0.0), value("scale", "positive")),
        "quantize: NaN": (
            lambda: int8.quantize(np.float32(np.nan), 1.0),
            Answer(lambda: np.zeros((), np.int8)),
        ),
        "quantize_weight: a vector": (lambda: int8.quantize_weight(SCALE), value("w", "(32,)")),
        "fold_batch_norm: of another length": (
            lambda: int8.fold_batch_norm(np.ones((3, 3, 4, 8), "f"), SCALE, SCALE, SCALE, SCALE),
            value("gamma", "(8,)", "(32,)"),
        ),
        "fake_quant_conv: int8": (
            lambda: int8.fake_quant_conv(X, W, 1.0),
            kind("x", "int8"),
        ),
        "calibrate: no batches": (lambda: int8.calibrate(lambda x: {"x": x}, []), value("batches")),
        "pack_filter: data_format: HWIO": (
            lambda: int8.pack_filter(W, data_format="HWIO"),
            value("data_format", "'HWIO'"),
        ),
        "quantize_conv: data_format: 1-D": (
            lambda: int8.quantize_conv(np.ones((3, 3, 4, 8), "f"), x_scale=1.0, data_format="NWC"),
            value("data_format", "'NWC'"),
        ),
        "fake_quant_conv: padding: CAUSAL": (
            lambda: int8.fake_quant_conv(XF[:, 0], WF[0], 1.0, 1.0, padding="CAUSAL"),
            Answer(
                lambda: int8.fake_quant_conv(XF[:, 0], WF[0], 1.0, 1.0, padding=[(2, 0)]),
            ),
        ),
        "fake_quant_conv: strides": (
            lambda: int8.fake_quant_conv(XF, WF, strides=2),
            kind("strides", "'stride'"),
        ),
    }

    def calibrated(percentile: Any) -> Callable[[], Any]:
        return lambda: int8.calibrate(lambda x: x, [XF], percentile=percentile)

    for percentile in (0.999, 0.5, 1, 0, -3, 10, 49.9, 100.5, np.nan):
        words = "percentile: expected per cent, from 50 to 100", f"{percentile}"
        meant = ["percentile=99.9"] * (percentile == 0.999)
        cases[f"calibrate: {percentile} per cent"] = calibrated(percentile), value(*words, *meant)
    for given in ("99", True, [99]):
        cases[f"calibrate: {given!r}"] = calibrated(given), kind("percentile: expected a number")
    for name, (run, expected) in cases.items():
        yield Case(f"int8/{name}", run, expected)
