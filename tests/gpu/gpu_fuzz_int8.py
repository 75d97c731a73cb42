"""The 8-bit problems of ``gpu_fuzz.py``: quantised convolutions with any epilogue terms."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import int8_reference
import numpy as np
from fuzz_problems import Draw
from int8_reference import OUT_DTYPES
from problems import Problem

from jaxconv._src.int8 import int8_primitive
from jaxconv._src.int8.int8_primitive import Int8Spec
from jaxconv._src.library import native
from jaxconv._src.problem.spec import Op, key_of

X_DTYPES = {"s8": np.dtype(np.int8), "u8": np.dtype(np.uint8)}
BLOCK = 32  # the channels of a group are a multiple of this,
FEW = 4  # or, for the input channels of a single group, this


def draw_channels(draw: Draw, p: Problem, most: int) -> Problem:
    """Gives the problem channels and groups that 8-bit operands can have, and no dilation of x.

    ``most`` is the approximate limit of the channels of all groups.
    """
    form = draw.by_share({"dense": 0.6, "groups": 0.25, "few": 0.15})
    groups = draw.one_of(2, 3, 4) if form == "groups" else 1
    blocks = max(1, most // BLOCK // groups)
    c, k = (groups * BLOCK * draw.integer(1, blocks) for _ in range(2))
    return dataclasses.replace(
        p,
        c=FEW if form == "few" else c,
        k=k,
        groups=groups,
        lhs_dilation=(1,) * p.rank,
        batch=None,
    )


def draw_call(draw: Draw, p: Problem) -> tuple[Int8Spec, str]:
    """(a call that computes the problem, dtype of x): plain sums, some terms, all, or a layer.

    A layer has an 8-bit result, a scale and bias for each channel, and perhaps ReLU, as most layers
    of quantised networks have. Kernels with swapped operands take little else.
    """
    blocks = p.rank == 2 and p.groups != p.c  # depthwise convolutions exist only for NHWC
    layout = draw.one_of("nhwc", "nchw32") if blocks else "nhwc"
    x_dtype, out = draw.one_of(*X_DTYPES), draw.one_of(*OUT_DTYPES)
    spec = Int8Spec(conv=p.spec(algorithm="native"), layout=layout, out_dtype=OUT_DTYPES[out])
    kind = draw.by_share({"plain": 0.2, "some": 0.25, "all": 0.25, "layer": 0.3})
    if kind == "plain":
        return spec, x_dtype
    if kind == "layer":
        return dataclasses.replace(
            spec,
            out_dtype=draw.one_of(*X_DTYPES.values()),
            scale="scale",
            bias=True,
            activation=draw.one_of(None, "relu"),
        ), x_dtype
    offset, bias, residual = (kind == "all" or draw.chance(0.5) for _ in range(3))
    zero_point = 0
    if out in X_DTYPES and (kind == "all" or draw.chance(0.5)):
        limits = np.iinfo(X_DTYPES[out])
        zero_point = draw.integer(limits.min, limits.max)
    return dataclasses.replace(
        spec,
        scale=draw.one_of("scale", "image_scale"),
        offset=offset,
        bias=bias,
        residual=residual,
        activation=draw.one_of(*[None] * (kind != "all"), "relu", "relu6"),
        zero_point=zero_point,
    ), x_dtype


def _sizes(p: Problem, spec: Int8Spec):
    """The sizes of the convolution, which do not depend on the layout."""
    plain = dataclasses.replace(spec, layout="nhwc")
    return plain.sizes(p.canonical_shape("x"), (p.k, 0))


def line(p: Problem, spec: Int8Spec, x_dtype: str) -> str:
    """The one-line repro."""
    out = next(name for name, dtype in OUT_DTYPES.items() if dtype == spec.out_dtype)
    words = spec.words("packed", spec.layout)
    return key_of(Op.FPROP, (x_dtype, "s8", out), spec.conv, _sizes(p, spec), words)


def features(p: Problem, spec: Int8Spec) -> list[str]:
    """The features of a problem that the run counts."""
    terms = [name for name in ("offset", "bias", "residual") if getattr(spec, name)]
    return [
        spec.scale or "no scale",
        *terms,
        *([spec.activation] if spec.activation else []),
        *(["zero point"] if spec.zero_point else []),
        *(["4 channels"] if p.c == FEW else []),
        *(["groups"] if p.groups > 1 else []),
        *(["padding cropped"] if any(min(pair) < 0 for pair in p.padding) else []),
    ]


def forced(spec: Int8Spec, algorithm: str) -> Int8Spec:
    """The call with this instance by name."""
    conv = dataclasses.replace(spec.conv, algorithm=(algorithm,) * len(Op))
    return dataclasses.replace(spec, conv=conv)


def is_sparse(p: Problem) -> bool:
    """Whether the operands are so sparse that Winograd rounds nothing."""
    return p.name.startswith("sparse")


def accepting(p: Problem, spec: Int8Spec, x_dtype: str, platform: str) -> list[str]:
    """The algorithms that compute the call: "native" if not left to XLA, and every instance."""
    names = [n for n in native.load(platform).kernels() if n.startswith(f"{Op.FPROP.value}_")]
    names = [n for n in names if is_sparse(p) or "_winograd_int8_" not in n]
    sizes, dtype = _sizes(p, spec), X_DTYPES[x_dtype]
    calls = (int8_primitive.Quantised(forced(spec, n)) for n in names)
    chosen = (call.select(platform, sizes, dtype)[0] for call in calls)
    accepted = [n for n, each in zip(names, chosen, strict=True) if each.instance == n]
    by_itself, _ = int8_primitive.Quantised(spec).select(platform, sizes, dtype)
    return ["native"] * bool(by_itself.instance) + accepted


def arrays(
    p: Problem, spec: Int8Spec, x_dtype: str, seed: object
) -> tuple[list[np.ndarray], np.ndarray]:
    """(operands in the layout of the call, its expected result channels last)."""
    x, w = int8_reference.operands(p, X_DTYPES[x_dtype], seed)
    if is_sparse(p):
        rng = np.random.default_rng(seed)
        x, w = (int8_reference.sparse(rng, array.shape) for array in (x, w))
    given = int8_reference.terms_of(p, spec, seed)
    expected = int8_reference.result_of(spec, int8_reference.sums(p, x, w), given)
    return int8_reference.in_layout(spec, x, w, given), expected


def calls(spec: Int8Spec, algorithms: list[str]) -> Callable:
    """The function of (operands, poison) that computes the call by each of the algorithms."""
    names = ("x", "w", *spec.terms)

    def every(*operands):
        given = dict(zip(names, operands[: len(names)], strict=True))
        return tuple(int8_primitive.bind(forced(spec, a), **given) for a in algorithms)

    return every
