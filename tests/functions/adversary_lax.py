"""The cases of ``adversary.py`` for functions with names of ``jax.lax``, and transformations."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from adversary import Answer, Case
from adversary_inputs import DY, NHWC, W, X, draw, in_lax, kind, value, written
from jax import lax

import jaxconv


def general(**options: Any) -> dict[str, Any]:
    return {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": NHWC, **options}


def lax_cases() -> Iterator[Case]:
    """Each parameter in turn is unusual. Expects lax's result where lax has one."""
    both = {
        "window_strides": [(2, 1), [1, 2], np.array([2, 2])],
        "padding": ["VALID", ((1, 2), (0, -1)), [[0, 0], [3, 1]], "same"],
        "lhs_dilation": [None, (1, 1)],
        "rhs_dilation": [(2, 1), np.array([1, 2])],
        "dimension_numbers": [
            lax.conv_dimension_numbers(X.shape, W.shape, NHWC),
            list(NHWC),
        ],
        "preferred_element_type": [None, jnp.float32],
    }
    for name, values in both.items():
        for given in values:
            options = general(**{name: given})
            yield Case(
                f"conv_general_dilated/{name}={written(given)}",
                functools.partial(jaxconv.conv_general_dilated, X, W, **options),
                Answer(functools.partial(lax.conv_general_dilated, X, W, **options)),
            )
    refused = {
        "window_strides": [
            (2, None),
            ((1,), value("window_strides", "2", "(1,)")),
            ((0, 1), value("stride", "at least 1")),
            (None, kind("window_strides", "None")),
            ("11", kind("window_strides", "'11'")),
        ],
        "padding": [
            (((-5, -5), (0, 0)), value("padding", "crops more")),
            ("CIRCULAR", value("padding", "'CIRCULAR'")),
            (None, kind("padding", "None")),
        ],
        "lhs_dilation": [
            ((2, 1), value("padding", "'SAME'", "lhs_dilation", "conv_transpose")),
            ((0, 1), value("lhs dilation", "at least 1")),
            ((1,), value("lhs_dilation", "2")),
            ("11", kind("lhs_dilation", "'11'")),
        ],
        "rhs_dilation": [((1, 0), value("dilation", "at least 1")), (1.5, kind("rhs_dilation"))],
        "dimension_numbers": [
            (None, value("rhs", 'dimension_numbers=("NHWC", "HWIO", "NHWC")')),
            (("NHWC", "HWIO"), value("dimension_numbers")),
            ("NHWC", value("dimension_numbers")),
            (("NHXC", "HWIO", "NHWC"), value("dimension_numbers")),
            (("NHHC", "HWIO", "NHWC"), value("dimension_numbers")),
            (("NWC", "WIO", "NWC"), value("dimension_numbers")),
            (5, value("dimension_numbers")),
            (((0, 1, 2, 3),) * 3, value("dimension_numbers")),
        ],
        "feature_group_count": [
            (3, value("feature_group_count", "3", "4 input")),
            (0, value("feature_group_count", "at least 1")),
            (None, kind("feature_group_count", "None")),
        ],
        "batch_group_count": [
            (4, value("batch_group_count", "4", "batch 2", "6 output")),
            (-2, value("batch_group_count", "at least 1")),
            (1.5, kind("batch_group_count", "1.5")),
        ],
        "out_sharding": [
            ("data", kind("out_sharding", "NamedSharding", "data")),
            (5, kind("out_sharding", "5")),
        ],
        "preferred_element_type": [(jnp.int8, kind("preferred_element_type", "int8"))],
    }
    for name, entries in refused.items():
        for given, expected in entries:
            options = general(**{name: given})
            if expected is None:
                options_of_lax = {**options, name: (given, given)}
                expected = Answer(
                    functools.partial(lax.conv_general_dilated, X, W, **options_of_lax)
                )
            yield Case(
                f"conv_general_dilated/refused {name}={written(given)}",
                functools.partial(jaxconv.conv_general_dilated, X, W, **options),
                expected,
            )
    call = jaxconv.conv_general_dilated
    odd = {
        "other ranks": (lambda: call(X, W[0], (1, 1), "SAME"), value("rhs", "4 dimensions")),
        "other channels": (
            lambda: call(X, draw(3, 2, 5, 6), **general()),
            value("rhs", "lhs has 4", "got 5"),
        ),
        "rank 1": (lambda: call(X[0, 0, 0], W[0, 0, 0], (), "SAME"), value("lhs", "(4,)")),
        "two dtypes": (
            lambda: call(X, W.astype(np.float16), **general()),
            kind("rhs", "float32", "float16", "promotes"),
        ),
        "no spatial axes": (
            lambda: call(X[0, 0], W[0, 0].T, (), "SAME"),
            Answer(lambda: lax.conv_general_dilated(X[0, 0], W[0, 0].T, (), "SAME")),
        ),
        "four spatial axes": (
            lambda: (
                call(
                    draw(1, 2, 3, 3, 3, 3), np.ones((2, 2, 2, 2, 2, 2), "f"), (1,) * 4, "VALID"
                ).shape
            ),
            Answer(lambda: (1, 2, 2, 2, 2, 2)),
        ),
        "a list of lists": (lambda: call(X.tolist(), W.tolist(), **general()), in_lax()),
        "a batch of groups": (
            lambda: call(X, W, **general(batch_group_count=2)),
            Answer(lambda: lax.conv_general_dilated(X, W, **general(batch_group_count=2))),
        ),
        "both groups": (
            lambda: call(X, W[:, :, :2], **general(batch_group_count=2, feature_group_count=2)),
            value("batch_group_count", "feature_group_count"),
        ),
        "general padding, named": (
            lambda: jaxconv.conv_with_general_padding(X, W, (1, 1), "SAME", None, None),
            value("rhs", "dimension_numbers"),
        ),
    }
    for name, (run, expected) in odd.items():
        yield Case(f"conv_general_dilated/{name}", run, expected)


def transpose_cases() -> Iterator[Case]:
    call = jaxconv.conv_transpose
    w = draw(3, 2, 4, 6)
    answered = [
        dict(strides=(2, 2), padding="SAME"),
        dict(strides=(2, 3), padding="VALID"),
        dict(strides=(1, 1), padding="SAME_LOWER"),
        dict(strides=(2, 2), padding=((1, 2), (0, 0))),
        dict(strides=(2, 2), padding=((-1, 2), (0, -1))),
        dict(strides=(3, 1), padding="SAME", rhs_dilation=(2, 1)),
        dict(strides=[2, 1], padding=((1, 0), (1, 1)), use_consistent_padding=True),
        dict(strides=(9, 9), padding="VALID"),
    ]
    for options in answered:
        yield Case(
            f"conv_transpose/{written(options)}",
            functools.partial(call, X, w, **options),
            Answer(functools.partial(lax.conv_transpose, X, w, **options, precision="highest")),
        )
    refused = {
        "a name in lower case": (dict(padding="same"), value("padding", "'same'")),
        "an unknown name": (dict(padding="FULL"), value("padding", "'FULL'")),
        "no padding": (dict(padding=None), kind("padding", "None")),
        "strides of zero": (dict(strides=(0, 1), padding=((0, 0), (0, 0))), value("lhs dilation")),
        "strides of another rank": (dict(strides=(1,)), value("strides", "2", "(1,)")),
        "no strides": (dict(strides=None), kind("strides", "None")),
        "groups of three": (dict(groups=3), value("groups", "3", "4 input channels")),
        "groups of two": (dict(groups=2), value("rhs", "expected 2 input channels", "groups is 2")),
        "groups as text": (dict(groups="2"), kind("groups", "'2'")),
        "an output padding of the stride": (
            dict(output_padding=2),
            value("output_padding", "less than the stride"),
        ),
        "a negative output padding": (dict(output_padding=(0, -1)), value("output_padding")),
        "a fractional output padding": (dict(output_padding=0.5), kind("output_padding", "0.5")),
        "a transposed filter": (
            dict(transpose_kernel=True),
            value("rhs", "expected 4 input channels", "got 6"),
        ),
        "an algorithm of no direction": (
            dict(algorithm={"fprop": "xla", "backward": "xla"}),
            value("algorithm", "backward"),
        ),
    }
    for name, (options, expected) in refused.items():
        options = {"strides": (2, 2), "padding": "SAME", **options}
        yield Case(f"conv_transpose/{name}", functools.partial(call, X, w, **options), expected)
    yield Case(
        "conv_transpose/a vector",
        lambda: call(X[0, 0, 0], w, (2, 2), "SAME"),
        value("dimension_numbers", "1 dimensions"),
    )
    yield Case(
        "conv_transpose/an empty batch",
        lambda: call(X[:0], w, (2, 2), "SAME"),
        Answer(lambda: lax.conv_transpose(X[:0], w, (2, 2), "SAME")),
    )
    patches = functools.partial(
        jaxconv.conv_general_dilated_patches, X, window_strides=(1, 1), dimension_numbers=NHWC
    )
    of_patches = {
        "an empty window": (dict(filter_shape=(0, 1)), value("filter_shape", "at least 1")),
        "a window of another rank": (dict(filter_shape=(2,)), value("filter_shape", "2")),
        "a window in text": (dict(filter_shape="22"), kind("filter_shape", "'22'")),
        "no window": (dict(filter_shape=None), kind("filter_shape", "None")),
        "an unknown padding": (dict(filter_shape=(2, 2), padding="X"), value("padding", "'X'")),
        "a precision": (dict(filter_shape=(2, 2), precision="x"), value("precision", "'x'")),
        "a window wider than x": (
            dict(filter_shape=(9, 9), padding="VALID"),
            Answer(lambda: np.zeros((2, 0, 0, 324), np.float32)),
        ),
    }
    for name, (options, expected) in of_patches.items():
        options = {"padding": "SAME", **options}
        yield Case(f"patches/{name}", functools.partial(patches, **options), expected)
    yield Case(
        "local/a filter of another shape",
        lambda: jaxconv.conv_general_dilated_local(
            X, W, (1, 1), "SAME", (3, 2), dimension_numbers=NHWC
        ),
        value("rhs", "(5, 6, 24, 6)", "(3, 2, 4, 6)"),
    )


# --- transformations ------------------------------------------------------------------------------


def transformation_cases() -> Iterator[Case]:
    ours = functools.partial(jaxconv.conv, padding="SAME")
    theirs = functools.partial(
        lax.conv_general_dilated,
        window_strides=(1, 1),
        padding="SAME",
        dimension_numbers=NHWC,
        precision="highest",
    )
    x8, w8 = X.astype(np.int8), W.astype(np.int8)

    def loss(conv, x, w):
        return jnp.sum(conv(x, w) * DY)

    def both(name: str, f: Callable[[Callable], Any]) -> Case:
        return Case(f"transformed/{name}", lambda: f(ours), Answer(lambda: f(theirs)))

    x, w = jnp.asarray(X), jnp.asarray(W)
    yield both("grad in x", lambda c: jax.jit(jax.grad(functools.partial(loss, c)))(x, w))
    yield both("grad in w", lambda c: jax.jit(jax.grad(functools.partial(loss, c), 1))(x, w))
    yield both("jvp", lambda c: jax.jit(lambda: jax.jvp(c, (x, w), (w_like(x), w_like(w))))())
    yield both(
        "vmap of both", lambda c: jax.jit(jax.vmap(c))(jnp.stack([x, -x]), jnp.stack([w, w]))
    )
    yield both("vmap of w", lambda c: jax.jit(jax.vmap(c, (None, 3), 2))(x, w[:, :, :, None]))
    yield both("vmap of none", lambda c: jax.vmap(c, (0, None))(x[:0, None], w))
    yield both(
        "checkpoint", lambda c: jax.jit(jax.grad(jax.checkpoint(functools.partial(loss, c))))(x, w)
    )
    yield both("scan", lambda c: lax.scan(lambda a, _: (c(a, w[..., :4]), None), x, None, 2)[0])
    yield both(
        "cond", lambda c: jax.jit(lambda p: lax.cond(p, lambda: c(x, w), lambda: c(-x, w)))(False)
    )
    yield both("map", lambda c: lax.map(lambda a: c(a, w), x[:, None]))
    yield both("eval_shape", lambda c: jax.eval_shape(c, x, w).shape)
    yield both(
        "linear_transpose", lambda c: jax.linear_transpose(lambda a: c(a, w), x)(jnp.asarray(DY))
    )
    yield both("donated", lambda c: jax.jit(c, donate_argnums=0)(jnp.array(X), w))
    yield both("make_jaxpr", lambda c: jax.make_jaxpr(c)(x, w).out_avals[0].shape)
    yield both("debug_nans", lambda c: with_nan_checks(c, x, w))
    for name, f in {
        "grad of integers": lambda c: jax.grad(lambda a: jnp.sum(c(a, w8)).astype(float))(x8),
        "hessian of integers": lambda c: jax.hessian(lambda a: jnp.sum(c(a, w8)).astype(float))(x8),
    }.items():
        yield Case(f"transformed/{name}", functools.partial(f, ours), kind("real", "int8"))
    yield Case(
        "transformed/grad of integers allowed",
        lambda: jax.grad(lambda a: jnp.sum(ours(a, w8)).astype(float), allow_int=True)(x8).dtype,
        Answer(lambda: np.dtype(jax.dtypes.float0)),
    )
    yield Case(
        "transformed/jvp with float0",
        lambda: jax.jvp(lambda a: ours(a, w8), (x8,), (np.zeros(x8.shape, jax.dtypes.float0),))[0],
        Answer(lambda: theirs(x8, w8)),
    )
    yield Case(
        "transformed/vmap over axes of two sizes",
        lambda: jax.vmap(ours)(jnp.stack([x] * 3), jnp.stack([w] * 2)),
        value("vmap", "inconsistent sizes"),
    )
    yield Case(
        "transformed/a gradient's algorithm that refuses",
        lambda: jax.grad(
            lambda a: jnp.sum(jaxconv.conv(a, w, algorithm={"dgrad": "winograd"})),
        )(x),
        value("winograd", "dgrad"),
    )
    for algorithm, dtype in itertools.product(("im2col", "xla"), ("float16", "int8", "complex64")):
        yield Case(
            f"transformed/{algorithm} of {dtype}",
            lambda a=algorithm, d=dtype: ours(X.astype(d), W.astype(d), algorithm=a),
            Answer(lambda d=dtype: theirs(X.astype(d), W.astype(d))),
        )


def w_like(a: jax.Array) -> jax.Array:
    return jnp.arange(a.size, dtype=a.dtype).reshape(a.shape) % 3


def with_nan_checks(conv: Callable, x: jax.Array, w: jax.Array) -> jax.Array:
    with jax.debug_nans(True):
        return conv(x, w)
