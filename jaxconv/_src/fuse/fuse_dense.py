"""Computes dense layers and the operations after them by kernels of pointwise convolutions.

A matrix product over an array's channels, whose result one call of ``normalise`` reads, is a 1x1
convolution with an epilogue: bias, scale, shortcut, activation. XLA's matrix products cannot apply
exact GELU, a scale, or a shortcut after the bias, so these need a pass over the product's result.

If the epilogue is predicted to be slower than this pass, a plain convolution can still be faster
than the product. This concerns activations that read their operand several times. After a product
XLA computes such an activation in two passes, the first of which stores an intermediate result;
after a custom call it needs one pass.

The two products of the derivative stay XLA's, which computes them faster than convolutions. The
derivative of an activation needs the activation's operand in memory. A differentiated call with a
bias and an activation therefore also returns this operand, if that is predicted to be faster than
the product and a pass; other differentiated calls become the product and ``normalise`` again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
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

# The most axes between the examples and the channels of an array.
_SPATIAL = 3

# The precision of a convolution for the precision of a product.
_PRECISION: dict[Any, str] = {None: "default"} | {p: name for name, p in xla.PRECISION.items()}

# The term of an epilogue for each operand of ``normalise``.
_TERMS = {"scale0": "scale", "offset0": "bias", "shortcut": "residual"}


@dataclasses.dataclass(frozen=True)
class _Dense:
    """A product and the call of ``normalise`` that reads it.

    Attributes:
        product: the equation of the product.
        call: the equation that reads it.
        spec: the convolution that replaces the product.
        epilogue: the convolution's epilogue; None if ``normalise`` follows a plain convolution.
        kept: the epilogue of a differentiated call, whose second result is the activation's
            operand; None if a differentiated call becomes the product and ``normalise``.
    """

    product: JaxprEqn
    call: JaxprEqn
    spec: ConvSpec
    epilogue: Epilogue | None
    kept: Epilogue | None = None

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
            given = {i: t for i, t in enumerate(tangents) if not isinstance(t, zero)}
            if self.kept is None:
                return _jvp(self._by_product, primals, given)
            z, operand = self._bound(self.kept, *primals)
            x, w, *biases = primals
            by_parts = {0: lambda dx: self._product(dx, w), 1: lambda dw: self._product(x, dw)}
            parts = [by_parts[i](t) for i, t in given.items() if i in by_parts]
            of_sum = {i - 1: t for i, t in given.items() if i not in by_parts}
            if parts:
                of_sum[0] = functools.reduce(jnp.add, parts)
            # The operand already includes the bias, so the derivative is taken with bias 0.
            at = (operand, *(jnp.zeros_like(bias) for bias in biases))
            _, dz = _jvp(self._normalised, at, of_sum)
            return [z] * self.form.copies, dz

        dense.defjvp(jvp, symbolic_zeros=True)
        return dense(*operands)

    def _product(self, x: jax.Array, w: jax.Array) -> jax.Array:
        return self.product.primitive.bind(x, w, **self.product.params)

    def _normalised(self, *operands: jax.Array) -> list[jax.Array]:
        return normalise.normalise(*operands, form=self.form)

    def _by_product(self, x: jax.Array, w: jax.Array, *others: jax.Array) -> list[jax.Array]:
        return self._normalised(self._product(x, w), *others)

    def _by_convolution(self, x: jax.Array, w: jax.Array, *others: jax.Array) -> list[jax.Array]:
        if self.epilogue is None:
            filters = w.reshape(_filter_shape(self.spec, w.shape))
            y = primitives.bind(Op.FPROP, x, filters, self.spec, x.dtype)
            return self._normalised(y, *others)
        return self._bound(self.epilogue, x, w, *others) * self.form.copies

    def _bound(
        self, form: Epilogue, x: jax.Array, w: jax.Array, *others: jax.Array
    ) -> list[jax.Array]:
        named = dict(zip(self.form.names[1:], others, strict=True))
        terms = {_TERMS[name]: array for name, array in named.items()}
        filters = w.reshape(_filter_shape(self.spec, w.shape))
        return fused.bind(
            x, filters, terms, spec=self.spec, epilogue=form, out_dtype=self.form.dtype
        )


def _jvp(function: Callable[..., Any], primals: Sequence[Any], given: dict[int, Any]) -> Any:
    """``jax.jvp`` of a function whose operands have tangents at some positions only."""
    positions = sorted(given)

    def of_given(*values: jax.Array) -> Any:
        named = dict(zip(positions, values, strict=True))
        return function(*(named.get(i, p) for i, p in enumerate(primals)))

    return jax.jvp(of_given, [primals[i] for i in positions], [given[i] for i in positions])


def rewritten(eqns: Sequence[JaxprEqn], outvars: Sequence[Any]) -> list[JaxprEqn]:
    """A program's equations, with convolutions for its dense layers where these are faster.

    The products remain, without uses.
    """
    graph = Graph(eqns, outvars)
    placed: dict[int, list[JaxprEqn]] = {}
    if not fuse_convolution.for_cuda():
        return graph.eqns
    for position, eqn in enumerate(graph.eqns):
        dense = _find(graph, position) if eqn.primitive is normalise.normalise_p else None
        if dense is None:
            continue
        try:
            placed[position] = dense.equations(graph, position)
        except (TypeError, ValueError, compat.ShardingTypeError):
            continue  # operand types without a convolution: the program's operations stay
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
        z = call.outvars[0]
        readers = len(graph.uses(z)) if graph.absorbed(z) else 0

        def slower(of_call: Epilogue) -> str:
            options = (form.dtype, readers)
            return fuse_convolution.slower(spec, types, of_call, *options, by_kernel=True)

        if not slower(of_call):
            kept = dataclasses.replace(of_call, pre=True)
            keeps = of_call.activation is not None and set(form.names[1:]) <= {"offset0"}
            return _Dense(made, call, spec, of_call, kept if keeps and not slower(kept) else None)
    act = form.activation
    by_kernel = dataclasses.replace(spec, algorithm=(selection.NATIVE, *spec.algorithm[1:]))
    if act is not None and act.mask is None and fuse_convolution.by_kernel(by_kernel, types):
        return _Dense(made, call, by_kernel, None)
    return None


def _spec(eqn: JaxprEqn) -> ConvSpec | None:
    """The pointwise convolution that a product is, or None.

    None on an explicit mesh too: there the product's parameters contain its result's sharding.
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
    """The shape of the filter of a product with a matrix of this shape."""
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
