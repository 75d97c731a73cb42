"""Computes dense layers and the operations after them by kernels of pointwise convolutions.

A product of an array's channels with a matrix, whose result one call of ``normalise`` reads, is a
1x1 convolution with an epilogue: bias, scale, shortcut, activation. XLA's products cannot apply
exact GELU, a scale, or a shortcut after the bias, so these need a pass over the product's result.
If the epilogue is predicted to be slower than this pass, a plain convolution replaces the product
of a function that reads its operand several times. After a product XLA computes such a function in
two passes, the first of which stores an intermediate result; after a call it needs one pass, so the
call may take as much longer than the product.

This applies only to calls that are not differentiated. A derivative needs the product's result in
memory and has two more products, which XLA computes faster than convolutions. A differentiated call
therefore becomes the product and ``normalise`` again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn, Var

from jaxconv._src import compat
from jaxconv._src.call import override_state, selection
from jaxconv._src.conv import fused, primitives
from jaxconv._src.fuse import fuse_convolution
from jaxconv._src.fuse.fuse_graph import Graph, is_float, traced, type_of
from jaxconv._src.passes import normalise
from jaxconv._src.passes.normalise import Form
from jaxconv._src.problem import epilogue
from jaxconv._src.problem.epilogue import Epilogue
from jaxconv._src.problem.spec import ConvSpec, Op
from jaxconv._src.sharding import explicit_mesh
from jaxconv._src.ways import xla

# Platforms on which kernels of convolutions are faster than XLA's products and the next pass.
_PLATFORMS = ("cuda",)

# The most axes between the examples and the channels of an array.
_SPATIAL = 3

# Precisions of products, as of convolutions.
_PRECISION: dict[Any, str] = {None: "default"} | {p: name for name, p in xla.PRECISION.items()}

# The terms of an epilogue, by the operands of ``normalise``.
_TERMS = {"scale0": "scale", "offset0": "bias", "shortcut": "residual"}


@dataclasses.dataclass(frozen=True)
class _Dense:
    """A product and the call of ``normalise`` that reads it.

    Attributes:
        product: the equation of the product.
        call: the equation that reads it.
        spec: that of the convolution.
        epilogue: that of the convolution; None if ``normalise`` follows a plain one.
    """

    product: JaxprEqn
    call: JaxprEqn
    spec: ConvSpec
    epilogue: Epilogue | None

    @property
    def form(self) -> Form:
        return self.call.params["form"]

    def equations(self, graph: Graph, position: int) -> list[JaxprEqn]:
        """The convolution that replaces both equations."""
        operands = (*self.product.invars, *self.call.invars[1:])
        return traced(self._computed, operands, self.call.outvars, graph, position)

    def _computed(self, *operands: jax.Array) -> list[jax.Array]:
        @jax.custom_jvp
        def dense(*operands: jax.Array) -> list[jax.Array]:
            return self._by_convolution(*operands)

        def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
            zero = jax.custom_derivatives.SymbolicZero
            varied = [i for i, t in enumerate(tangents) if not isinstance(t, zero)]

            def of_varied(*given: jax.Array) -> list[jax.Array]:
                values = dict(zip(varied, given, strict=True))
                return self._by_product(*(values.get(i, p) for i, p in enumerate(primals)))

            return jax.jvp(of_varied, [primals[i] for i in varied], [tangents[i] for i in varied])

        dense.defjvp(jvp, symbolic_zeros=True)
        return dense(*operands)

    def _by_product(self, x: jax.Array, w: jax.Array, *others: jax.Array) -> list[jax.Array]:
        y = self.product.primitive.bind(x, w, **self.product.params)
        return normalise.normalise(y, *others, form=self.form)

    def _by_convolution(self, x: jax.Array, w: jax.Array, *others: jax.Array) -> list[jax.Array]:
        filters = w.reshape(_filter_shape(self.spec, w.shape))
        if self.epilogue is None:
            y = primitives.bind(Op.FPROP, x, filters, self.spec, x.dtype)
            return normalise.normalise(y, *others, form=self.form)
        named = dict(zip(self.form.names[1:], others, strict=True))
        terms = {_TERMS[name]: array for name, array in named.items()}
        results = fused.bind(
            x, filters, terms, spec=self.spec, epilogue=self.epilogue, out_dtype=self.form.dtype
        )
        return results * self.form.copies


def rewritten(eqns: Sequence[JaxprEqn], outvars: Sequence[Any]) -> list[JaxprEqn]:
    """A program's equations, with convolutions for its dense layers where these are faster.

    The products remain, without uses.
    """
    graph = Graph(eqns, outvars)
    placed: dict[int, list[JaxprEqn]] = {}
    if not set(fuse_convolution.platforms()[:1]) <= set(_PLATFORMS):
        return list(graph.eqns)
    for position, eqn in enumerate(graph.eqns):
        dense = _find(graph, position) if eqn.primitive is normalise.normalise_p else None
        if dense is None:
            continue
        try:
            placed[position] = dense.equations(graph, position)
        except (TypeError, ValueError, compat.ShardingTypeError):
            continue  # types without a convolution: the program's own operations
    return graph.with_replaced(placed)


def _find(graph: Graph, position: int) -> _Dense | None:
    """The dense layer whose last operation is a call of ``normalise``, or None."""
    call = graph.eqns[position]
    form, y = call.params["form"], call.invars[0]
    made = graph.producer(y)
    if made is None or made.primitive.name != "dot_general" or not override_state.may_fuse(made):
        return None
    alone = isinstance(y, Var) and len(graph.uses(y)) == 1 and y not in graph.returned
    spec = _spec(made)
    if not alone or spec is None:
        return None
    x, w = map(type_of, made.invars)
    types = x, jax.ShapeDtypeStruct(_filter_shape(spec, w.shape), w.dtype)
    vectors = call.invars[form.summands :]
    of_channels = all(len(type_of(v).shape) == 1 for v in vectors) and form.dtype == x.dtype
    of_call = _epilogue(form) if of_channels else None
    if of_call is not None:
        absorbed = graph.absorbed(call.outvars[0])
        options = (form.dtype, absorbed)
        if not fuse_convolution.slower(spec, types, of_call, *options, by_kernel=True):
            return _Dense(made, call, spec, of_call)
    act = form.activation
    by_kernel = dataclasses.replace(spec, algorithm=(selection.NATIVE, *spec.algorithm[1:]))
    if act is not None and act.mask is None and fuse_convolution.by_kernel(by_kernel, types):
        return _Dense(made, call, by_kernel, None)
    return None


def _spec(eqn: JaxprEqn) -> ConvSpec | None:
    """A product of channels as a pointwise convolution, or None where it is another product.

    None on an explicit mesh, because the sharding of the result is one of its parameters.
    """
    x, w = map(type_of, eqn.invars)
    (y,) = map(type_of, eqn.outvars)
    spatial = len(x.shape) - 2
    (of_x, of_w), batch = eqn.params["dimension_numbers"]
    if tuple(of_x) != (len(x.shape) - 1,) or len(of_w) != 1 or any(map(len, batch)):
        return None
    if len(w.shape) != 2 or not 1 <= spatial <= _SPATIAL or explicit_mesh.mesh_of(x, w) is not None:
        return None
    if not is_float(x.dtype) or not x.dtype == w.dtype == y.dtype:
        return None
    given = eqn.params["precision"]
    precisions = set(given) if isinstance(given, tuple) else {given}
    precision = _PRECISION.get(precisions.pop())
    if precision is None or precisions:
        return None
    places = (spatial, spatial + 1) if of_w[0] == 0 else (spatial + 1, spatial)
    ones, pads, axes = (1,) * spatial, ((0, 0),) * spatial, tuple(range(spatial + 2))
    return ConvSpec(
        stride=ones,
        padding=pads,
        lhs_dilation=ones,
        dilation=ones,
        groups=1,
        in_spatial=x.shape[1:-1],
        filter_spatial=ones,
        x_axes=axes,
        w_axes=(*range(spatial), *places),
        y_axes=axes,
        precision=precision,
    )


def _filter_shape(spec: ConvSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a matrix as a filter."""
    return (*spec.filter_spatial, *shape)


def _epilogue(form: Form) -> Epilogue | None:
    """The epilogue that is equivalent to a call of ``normalise``, or None."""
    if form.arrays != 1 or form.bits or not set(form.names[1:]) <= _TERMS.keys():
        return None
    name, slope = None, 0.0
    if form.activation is not None:
        if form.activation.activation is None:
            return None
        name, slope = epilogue.parse_activation(form.activation.activation)
    terms = [_TERMS[n] for n in form.names[1:]]
    scale, bias, residual = (term in terms for term in ("scale", "bias", "residual"))
    return Epilogue(scale, bias, residual, name, slope)
