"""The cases of ``adversary.py`` for the terms of an epilogue."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from adversary import Answer, Case
from adversary_inputs import DY, W, X, draw, in_lax, kind, value

import jaxconv

VECTOR = np.float32([1, -2, 0.5, 4, 0, 3])
SHAPE = ("(2, 5, 6, 6)",)

REFUSED: dict[str, tuple[dict[str, Any], Any]] = {
    "a short scale": (dict(scale=VECTOR[:4]), value("scale", "(6,)", "(4,)")),
    "a scale for each input channel": (dict(scale=np.ones(4)), value("scale", "(6,)", "(4,)")),
    "a number as scale": (dict(scale=2.0), value("scale", "(6,)", "()")),
    "a scale of rank 4": (dict(scale=VECTOR[None, None, None]), value("scale", "(1, 1, 1, 6)")),
    "an empty bias": (dict(bias=VECTOR[:0]), value("bias", "(6,)", "(0,)")),
    "a bias of integers": (dict(bias=np.ones(6, int)), kind("bias", "floating-point", "int")),
    "a bias of booleans": (dict(bias=np.ones(6, bool)), kind("bias", "floating-point", "bool")),
    "a complex bias": (dict(bias=np.ones(6, complex)), kind("bias", "floating-point", "complex")),
    "text as bias": (dict(bias="abc"), kind("bias", "array of numbers", "abc")),
    "a ragged scale": (dict(scale=[[1.0], [1.0, 2.0]]), kind("scale", "array of numbers")),
    "a residual like x": (dict(residual=X), value("residual", *SHAPE, "(2, 5, 6, 4)")),
    "a residual that would broadcast": (dict(residual=DY[:1]), value("residual", *SHAPE, "(1,")),
    "a residual without images": (dict(residual=DY[0]), value("residual", *SHAPE, "(5, 6, 6)")),
    "a residual of float16": (
        dict(residual=DY.astype(np.float16)),
        value("residual", "float32", "float16"),
    ),
    "a residual of x's dtype beside another result": (
        dict(residual=DY.astype(np.float16), x=X.astype(np.float16), w=W.astype(np.float16))
        | dict(preferred_element_type=np.float32),
        value("residual", "float32", "float16"),
    ),
    "an unknown activation": (dict(activation="mish"), value("activation", "silu", "'mish'")),
    "a function as activation": (dict(activation=jnp.sin), value("activation", "sin", "fuse")),
    "a function like one of them": (
        dict(activation=jax.nn.softplus),
        value("the function softplus is none of relu", "jaxconv.fuse"),
    ),
    "a partial function": (
        dict(activation=functools.partial(jax.nn.relu, 3)),
        value("the function partial"),
    ),
    "a partial gelu of another axis": (
        dict(activation=functools.partial(jax.nn.gelu, approximate=True, axis=1)),
        value("the function gelu"),
    ),
    "a nameless function": (dict(activation=lambda y: y), value("the function <lambda>")),
    "an empty activation": (dict(activation=""), value("activation", "''")),
    "a number as activation": (dict(activation=1), value("activation", "1")),
    "leaky_relu without a slope": (
        dict(activation="leaky_relu"),
        value("slope", "('leaky_relu', 0.01)"),
    ),
    "relu with a slope": (dict(activation=("relu", 0.1)), value("activation", "'relu', 0.1")),
    "three entries": (dict(activation=("leaky_relu", 0.1, 2)), value("activation")),
    "an infinite slope": (dict(activation=("leaky_relu", np.inf)), value("finite slope", "inf")),
    "a slope beyond float32": (dict(activation=("leaky_relu", 1e39)), value("finite slope")),
    "a slope of no number": (dict(activation=("leaky_relu", np.nan)), value("finite slope")),
    "text as slope": (dict(activation=("leaky_relu", "a")), kind("slope", "number", "'a'")),
    "no slope": (dict(activation=("leaky_relu", None)), value("slope")),
    "a bias of int8 operands": (
        dict(bias=VECTOR, x=X.astype(np.int8), w=W.astype(np.int8)),
        kind("bias", "floating-point", "int8", "jaxconv.int8.conv"),
    ),
    "an activation of complex operands": (
        dict(activation="relu", x=X.astype(np.complex64), w=W.astype(np.complex64)),
        kind("activation", "floating-point", "complex64"),
    ),
}


def plus(bias: Any, **options: Any) -> Answer:
    """Expects the convolution of lax plus ``bias``."""
    return Answer(lambda: in_lax(**options).reference() + np.asarray(bias, np.float32))


ANSWERED: dict[str, tuple[dict[str, Any], Answer]] = {
    "a list as bias": (dict(bias=VECTOR.tolist()), plus(VECTOR)),
    "a bias of float64": (dict(bias=VECTOR.astype(np.float64)), plus(VECTOR)),
    "a bias of float16": (dict(bias=VECTOR.astype(np.float16)), plus(VECTOR)),
    "a strided bias": (dict(bias=np.repeat(VECTOR, 2)[::2]), plus(VECTOR)),
    "a residual as a list": (dict(residual=DY.tolist()), plus(DY)),
    "a residual that is x": (
        dict(residual=X, w=draw(1, 1, 4, 4) * 0, x=X),
        Answer(lambda: jnp.asarray(X)),
    ),
    "an infinite scale of zeros": (
        dict(scale=np.full(6, np.inf, np.float32), x=X * 0),
        Answer(lambda: jnp.full(DY.shape, jnp.nan)),
    ),
    "a scale of zero": (dict(scale=VECTOR * 0, bias=VECTOR), plus(VECTOR, x=X * 0)),
    "a negative slope of leaky_relu": (
        dict(activation=("leaky_relu", -1)),
        Answer(lambda: jnp.abs(in_lax().reference())),
    ),
    "an activation in capitals": (
        dict(activation="ReLU"),
        Answer(lambda: jnp.maximum(in_lax().reference(), 0)),
    ),
    "a function of jax.nn as activation": (
        dict(activation=jax.nn.relu6),
        Answer(lambda: jnp.clip(in_lax().reference(), 0, 6)),
    ),
    "another name of an activation": (
        dict(activation="swish"),
        Answer(lambda: jaxconv.conv(X, W, activation="silu")),
    ),
    "no activation by name": (dict(activation="linear"), in_lax()),
    "a slope of zero": (
        dict(activation=("leaky_relu", np.float64(0))),
        Answer(lambda: jnp.maximum(in_lax().reference(), 0)),
    ),
    "no images": (dict(x=X[:0], bias=VECTOR, activation="silu"), Answer(lambda: DY[:0])),
    "no input channels": (
        dict(x=X[..., :0], w=W[:, :, :0], bias=VECTOR),
        Answer(lambda: jnp.broadcast_to(VECTOR, DY.shape)),
    ),
    "no output channels": (
        dict(w=W[..., :0], bias=VECTOR[:0], activation="relu"),
        Answer(lambda: DY[..., :0]),
    ),
}


def epilogue_cases() -> Iterator[Case]:
    for name, (options, expected) in {**REFUSED, **ANSWERED}.items():
        given = {"x": X, "w": W, **options}
        yield Case(f"epilogue/{name}", lambda given=given: jaxconv.conv(**given), expected)
    transpose = dict(lhs=X, rhs=draw(3, 2, 4, 6), strides=(1, 1), padding="SAME")
    for name in ("a short scale", "a residual that would broadcast", "an unknown activation"):
        options, expected = REFUSED[name]
        given = {**transpose, **options}
        yield Case(
            f"epilogue/conv_transpose: {name}",
            lambda given=given: jaxconv.conv_transpose(**given),
            expected,
        )
    yield Case(
        "epilogue/a traced slope",
        lambda: jax.jit(lambda s: jaxconv.conv(X, W, activation=("leaky_relu", s)))(0.1),
        kind("slope", "number"),
    )
    yield Case(
        "epilogue/a bias of each example",
        lambda: jax.vmap(lambda b: jaxconv.conv(X, W, bias=b))(VECTOR[None]),
        Answer(lambda: in_lax().reference()[None] + VECTOR),
    )
