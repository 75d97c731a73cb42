"""The convolutions whose calls may have an epilogue, in either library's form."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from jaxconv._src import canonical, compat, lax_lowering, lowering
from jaxconv._src.fuse_graph import Graph, is_float
from jaxconv._src.spec import ConvSpec, Op

# Primitives that convolve forward, or may.
NAMES = ("conv_general_dilated", "jaxconv_fprop")


@dataclasses.dataclass(frozen=True)
class Convolution:
    """A forward convolution in a program: its equation, operands and static half."""

    position: int
    x: Any
    w: Any
    spec: ConvSpec

    @property
    def channel_axis(self) -> int:
        return self.spec.axis("y", "k")


def find(graph: Graph, position: int) -> Convolution | str:
    """A convolution that a call with an epilogue computes, or why there is none."""
    eqn = graph.eqns[position]
    x, w = eqn.invars
    shapes = [a.aval.shape for a in (x, w, *eqn.outvars)]
    if not all(compat.is_constant_shape(s) for s in shapes):
        return "symbolic shape"
    if any(0 in s for s in shapes):
        return lowering.EMPTY
    dtypes = [a.aval.dtype for a in (x, w, *eqn.outvars)]
    if not all(is_float(d) for d in dtypes) or dtypes[0] != dtypes[1]:
        return f"no fused kernel for {', '.join(np.dtype(d).name for d in dtypes)}"
    if eqn.primitive.name == "conv_general_dilated":
        spec = _forward(graph, eqn, shapes)
    else:
        spec = eqn.params["spec"]
    if isinstance(spec, str):
        return spec
    if spec.batched:
        return "each example has a filter of its own"
    algorithm = spec.algorithm_of(Op.FPROP)
    if algorithm not in (lowering.AUTO, lowering.NATIVE):
        return f"algorithm={algorithm!r} was asked for"
    return Convolution(position, x, w, spec)


def _forward(graph: Graph, eqn: JaxprEqn, shapes: list[tuple[int, ...]]) -> ConvSpec | str:
    """A convolution of lax as a forward one, or why it is none."""
    with compat.located_at(eqn):
        algorithm = lowering.algorithms_of_lax()
    convolution = lax_lowering.conv_parameters(*([algorithm] if algorithm else []), **eqn.params)
    made = graph.producer(eqn.invars[1])
    backward = made is not None and made.primitive.name == "rev"
    form = canonical.forms(
        convolution,
        *shapes,
        filter_reversed=backward
        and sorted(made.params["dimensions"]) == sorted(convolution.rhs_spec[2:]),
    )[0]
    if form.op is not Op.FPROP or form.batch > 1 or form.pointwise:
        return f"it is computed as {form.op.value}, which has no epilogue"
    if eqn.params.get("out_sharding") is not None:
        return "it has an out_sharding"
    return form.spec
