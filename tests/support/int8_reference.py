"""The reference of quantised convolutions: the definition in NumPy, with exact rounding.

Calls neither jaxconv nor lax.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from numerics import reference
from problems import Problem

from jaxconv._src.problem.spec import Op

OUT_DTYPES = {
    "s8": np.dtype(np.int8),
    "u8": np.dtype(np.uint8),
    "s32": np.dtype(np.int32),
    "f32": np.dtype(np.float32),
    "bf16": np.dtype(jnp.bfloat16),
    "f16": np.dtype(np.float16),
}


def padded(count: int) -> int:
    """Stored channels: the next multiple of 32."""
    return math.ceil(count / 32) * 32


def sparse(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """-1, 0 and 1, one in 16 not 0: on these 8-bit Winograd rounds nothing."""
    return (rng.choice([-1, 1], shape) * (rng.random(shape) < 1 / 16)).astype(np.int8)


# --- layouts, element by element ---


def nchw32(x: np.ndarray) -> np.ndarray:
    """(n, h, w, c) -> (n, c / 32, h, w, 32), filled up with zeros; 4 channels stay 4."""
    n, h, w, c = x.shape
    block = 4 if c == 4 else 32
    out = np.zeros((n, math.ceil(c / block), h, w, block), x.dtype)
    for channel in range(c):
        out[:, channel // block, :, :, channel % block] = x[..., channel]
    return out


def nhwc(x: np.ndarray, channels: int) -> np.ndarray:
    """The inverse of ``nchw32``."""
    block = x.shape[-1]
    return np.stack([x[:, c // block, :, :, c % block] for c in range(channels)], axis=-1)


def rows(w: np.ndarray, layout: str) -> np.ndarray:
    """The packed form of a filter (*window, c, k): row k has the kernels' order of reduction."""
    *window, c, k = w.shape
    places = [(*tap, channel) for tap in np.ndindex(*window) for channel in range(c)]
    if layout == "nchw32" and c != 4:
        places.sort(key=lambda at: (at[-1] // 32, at[:-1], at[-1] % 32))
    out = np.zeros((k, padded(len(places))), np.int8)
    for i, at in enumerate(places):
        out[:, i] = w[at]
    return out


# --- arithmetic ---


def sums(problem: Problem, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The int32 sums of x (n, *spatial, c) and w (*window, c / groups, k)."""
    # A tap's products are summed in float32 if that is exact; it takes half the time.
    terms = w.shape[-2] * _largest(x) * _largest(w)
    operands = np.float32 if terms <= 2**24 else np.float64
    exact = reference(Op.FPROP, problem, x, w, dtype=operands, sums=np.float64)
    assert max(exact.max(initial=0), -exact.min(initial=0)) < 2**31
    return exact.astype(np.int32)


def _largest(integers: np.ndarray) -> int:
    return max(int(integers.max(initial=0)), -int(integers.min(initial=0)))


def fma(a, b, c) -> np.ndarray:
    """a * b + c of float32 arrays, rounded once, to nearest even.

    The float64 product of two float32 numbers is exact. Rounding its float64 sum with the third
    number to float32 rounds twice. The result is correct unless that sum lies halfway between two
    float32 numbers or has fewer bits in float32; ``_fma_to_odd`` computes these cases.
    """
    a, b, c = (np.asarray(v, np.float32).astype(np.float64) for v in (a, b, c))
    with np.errstate(all="ignore"):
        total = np.atleast_1d(a * b + c)
        once = total.astype(np.float32)
        small = (np.abs(total) < 2.0**-125) & (total != 0)
    halfway = total.view(np.int64) & (2**29 - 1) == 2**28
    if (doubtful := halfway | small).any():
        numbers = (np.broadcast_to(v, total.shape)[doubtful] for v in (a, b, c))
        once[doubtful] = _fma_to_odd(*numbers)
    return once


def _fma_to_odd(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c of float32 numbers in float64 arrays, rounded to float32 once.

    The float64 sum is rounded to odd: if it is inexact and its last bit is 0, it moves one step
    towards the exact sum. Rounding this to float32 equals rounding the exact sum (Boldo and
    Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
    """
    with np.errstate(all="ignore"):
        product = a * b
        total = product + c
        rest = total - product
        error = (product - (total - rest)) + (c - rest)
        step = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
        last = total.view(np.int64) & 1
        odd = np.where(np.isfinite(total) & (error != 0) & (last == 0), step, total)
        return odd.astype(np.float32)


# Sums to requantise at a time, so that intermediate arrays stay in a cache.
AT_A_TIME = 1 << 15


def requantized(
    acc: np.ndarray,
    out_dtype: np.dtype,
    *,
    scale=None,
    residual=None,
    **rest,
) -> np.ndarray:
    """The epilogue on int32 sums (n, *out, k); scale is (), (k,) or (n, k)."""
    out_dtype = np.dtype(out_dtype)
    if scale is None:
        if out_dtype.kind in "iu":
            return acc.astype(np.int64).astype(out_dtype)  # keeps the low bits
        with np.errstate(over="ignore"):
            return acc.astype(np.float32).astype(out_dtype)
    shape = acc.shape
    n, k, pixels = shape[0], shape[-1], math.prod(shape[1:-1])
    scale = np.broadcast_to(np.asarray(scale, np.float32), (n, k))
    out = np.empty((n, pixels, k), out_dtype)
    acc = acc.reshape(out.shape)
    residual = None if residual is None else np.reshape(residual, out.shape)
    step = max(1, AT_A_TIME // max(1, k))
    for image in range(n):
        for at in range(0, pixels, step):
            part = (image, slice(at, at + step))
            z = None if residual is None else residual[part]
            out[part] = _requantized(acc[part], out_dtype, scale[image], z, **rest)
    return out.reshape(shape)


def _requantized(
    acc: np.ndarray,
    out_dtype: np.dtype,
    scale: np.ndarray,
    residual: np.ndarray | None,
    *,
    offset=None,
    bias=None,
    residual_scale=1.0,
    activation: str | None = None,
    zero_point: int = 0,
) -> np.ndarray:
    """The requantised sums (pixels, k)."""
    if offset is not None:
        acc = (acc.astype(np.int64) + offset).astype(np.int32)
    t = fma(acc.astype(np.float32), scale, np.float32(0) if bias is None else bias)
    if residual is not None:
        t = fma(np.float32(residual_scale), residual.astype(np.float32), t)
    if activation is not None:
        t = np.where(t < 0, np.float32(0), t)
    if activation == "relu6":
        t = np.where(t > 6, np.float32(6), t)
    if out_dtype.kind not in "iu":
        with np.errstate(over="ignore"):
            return t.astype(out_dtype)
    limits = np.iinfo(out_dtype)
    whole = np.where(np.isnan(t), 0, np.rint(t.astype(np.float64)))
    return np.clip(whole + zero_point, limits.min, limits.max).astype(out_dtype)


# --- operands ---


def operands(problem: Problem, x_dtype, seed: object = 0) -> tuple[np.ndarray, np.ndarray]:
    """x and w with the full range of values, -128 and 255 included, channels last."""
    rng = np.random.default_rng(seed)
    limits = np.iinfo(x_dtype)
    x = rng.integers(
        limits.min, limits.max, problem.canonical_shape("x"), endpoint=True, dtype=x_dtype
    )
    w = rng.integers(-128, 127, problem.canonical_shape("w"), endpoint=True, dtype=np.int8)
    return x, w


def terms(problem: Problem, out_dtype, seed: object = 0, *, of_image: bool = False) -> dict:
    """Every term of the epilogue; scales have both signs and are no powers of two.

    Most results are within the range of the type, and some beyond.
    """
    rng = np.random.default_rng(seed)
    out_dtype = np.dtype(out_dtype)
    y = problem.canonical_shape("y")
    spread = 70 * 70 * math.sqrt(problem.reduction(Op.FPROP))  # standard deviation of the sums
    shape = (problem.n, problem.k) if of_image else (problem.k,)
    scale = rng.uniform(0.3, 1.5, shape) * rng.choice([-1, 1], shape) * 60 / spread
    if out_dtype.kind in "iu":
        residual = rng.integers(0, 127, y).astype(out_dtype)
    else:
        residual = (rng.standard_normal(y) * 30).astype(np.float32).astype(out_dtype)
    return dict(
        scale=scale.astype(np.float32),
        bias=(rng.standard_normal(problem.k) * 20).astype(np.float32),
        residual=residual,
        residual_scale=np.float32(rng.uniform(0.2, 0.9)),
    )


# --- calls of kernels, by their Int8Spec ---


def terms_of(p: Problem, spec, seed: object = 0) -> dict:
    """The terms of a call, channels last."""
    if not spec.scale:
        return {}
    every = terms(p, spec.out_dtype, seed, of_image=spec.scale == "image_scale")
    every["offset"] = np.random.default_rng(seed).integers(-9999, 9999, p.k, dtype=np.int32)
    names = {"scale": True, "offset": spec.offset, "bias": spec.bias}
    names |= dict.fromkeys(("residual", "residual_scale"), spec.residual)
    return {name: every[name] for name, has in names.items() if has}


def result_of(spec, acc: np.ndarray, given: dict) -> np.ndarray:
    """The expected result of a call, from its sums and ``terms_of``, channels last."""
    last = dict(activation=spec.activation, zero_point=spec.zero_point)
    return requantized(acc, spec.out_dtype, **last, **given)


def in_layout(spec, x: np.ndarray, w: np.ndarray, given: dict) -> list[np.ndarray]:
    """A call's operands in its order and layout: x, w and ``spec.terms``."""
    blocked = nchw32 if spec.layout == "nchw32" else np.asarray
    given = dict(given)
    if spec.residual:
        given["residual_scale"] = given["residual_scale"].reshape(1)
        given["residual"] = blocked(given["residual"])
    return [blocked(x), rows(w, spec.layout), *(given[name] for name in spec.terms)]


def channels_last(p: Problem, spec, y) -> np.ndarray:
    """A call's result, channels last."""
    return nhwc(np.asarray(y), p.k) if spec.layout == "nchw32" else np.asarray(y)
