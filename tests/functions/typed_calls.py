"""Calls as users write them, for the type checker. CI runs mypy on this file; nothing runs it.

A line with ``type: ignore`` must have an error, because mypy reports unused ones.
"""

from __future__ import annotations

from typing import assert_type

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import jaxconv


def convolutions(x: jax.Array, w: np.ndarray, sharding: NamedSharding) -> None:
    assert_type(jaxconv.conv(x, w), jax.Array)
    jaxconv.conv(x, w, stride=2, padding="SAME", dilation=(1, 2), groups=4, data_format="NHWC")
    jaxconv.conv(x, w, padding=1, precision="highest", algorithm={"wgrad": "native"})
    jaxconv.conv(x, w, padding=((1, 2), 3), precision=lax.Precision.HIGH)
    jaxconv.conv(x, w, precision=(lax.Precision.HIGH, lax.Precision.DEFAULT))
    jaxconv.conv(x, w, preferred_element_type="float32")
    jaxconv.conv(x, w, scale=x, bias=w, residual=x, activation="gelu_tanh")
    jaxconv.conv(x, w, activation=("leaky_relu", 0.1))
    jaxconv.conv(x, w, activation=jax.nn.silu)
    assert_type(jaxconv.conv(x, w, bias=w, statistics=True), tuple[jax.Array, jax.Array, jax.Array])
    general = jaxconv.conv_general_dilated
    numbers = lax.conv_dimension_numbers((1, 2, 3, 4), (1, 2, 3, 4), None)
    assert_type(general(x, w, (1, 1), "SAME", None, None, numbers), jax.Array)
    general(x, w, (1, 1), [(1, 1), (0, 2)], dimension_numbers=("NHWC", "HWIO", "NHWC"))
    general(x, w, (1, 1), "SAME", out_sharding=sharding)
    general(x, w, (1, 1), "SAME", out_sharding=PartitionSpec("x"))
    jaxconv.conv_transpose(x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    general(x, w, (1, 1), "SAME", dimension_numbers="NHWC")  # type: ignore[arg-type]
    general(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO"))  # type: ignore[arg-type]
    general(x, w, (1, 1), "SAME", out_sharding="x")  # type: ignore[arg-type]
    jaxconv.conv(x, w, precision=3)  # type: ignore[call-overload]
    jaxconv.conv(x, w, algorithm={"forward": "native"})  # type: ignore[dict-item]
    jaxconv.conv(x, w, strides=2)  # type: ignore[call-overload]
    jaxconv.conv(x, w, activation=0.1)  # type: ignore[call-overload]
    jaxconv.conv(x, w, 2)  # type: ignore[call-overload]


def tables(x: jax.Array, w: jax.Array) -> None:
    explanation = jaxconv.explain(jaxconv.conv, x, w)
    assert_type(explanation, jaxconv.Explanation)
    assert_type(jaxconv.explain(jaxconv.conv, x, w, wide=True).text(wide=False), str)
    assert_type(explanation.missed, tuple[jaxconv.Convolution, ...])
    assert_type(len(explanation), int)
    assert_type(explanation[0].instance, str | None)
    for convolution in explanation:
        assert_type(convolution, jaxconv.Convolution)
    for kernel in jaxconv.kernels("cpu"):
        assert_type(kernel.takes, tuple[str, ...])
    jaxconv.kernels(platform=1)  # type: ignore[arg-type]


def installation() -> None:
    jaxconv.install("native")  # type: ignore[arg-type]
    with jaxconv.install(algorithm="native"):
        assert_type(jaxconv.installed(), dict[str, str] | None)
    with jaxconv.override(False):
        pass
    jaxconv.uninstall()
