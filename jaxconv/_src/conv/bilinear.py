"""Selection, custom call and definition of the three bilinear operations.

``primitives`` has the rules of these primitives. ``fused`` also selects here: its problem is that
of a forward convolution with additional words at the end of the key.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jaxconv._src.call import record, selection
from jaxconv._src.call.call import Call, Selected
from jaxconv._src.call.selection import AUTO, IN_JAX, WITH_WINOGRAD
from jaxconv._src.library import custom_call, native
from jaxconv._src.problem.spec import DTYPE_NAMES, ConvSpec, Op, Sizes, problem_key
from jaxconv._src.sharding import partition
from jaxconv._src.sharding.partition import Tensor
from jaxconv._src.ways import exact, winograd_jax, xla

PRIMITIVES = {op: Primitive(f"jaxconv_{op.value}") for op in Op}


@dataclasses.dataclass(frozen=True)
class Bilinear(Call):
    """fprop, dgrad or wgrad, with operands of one dtype."""

    op: Op
    spec: ConvSpec
    out_dtype: np.dtype

    @property
    def primitive(self) -> Primitive:
        return PRIMITIVES[self.op]

    @property
    def conv(self) -> ConvSpec:
        return self.spec

    def with_conv(self, conv: ConvSpec) -> Bilinear:
        return dataclasses.replace(self, spec=conv)

    def tensors(self, *shapes: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        *operands, out = self.op.roles
        given = [
            partition.tensor(self.spec, role, s) for role, s in zip(operands, shapes, strict=True)
        ]
        shape = self.spec.shape(out, self.sizes(*shapes))
        return given, [partition.tensor(self.spec, out, shape)]

    def select(self, platform: str, sizes: Sizes, dtype: np.dtype) -> Selected:
        """Selects a kernel, or the demanded algorithm in JAX if no kernel implements it."""
        kernels = functools.partial(
            select_kernel, platform, self.op, self.spec, sizes, dtype, self.out_dtype
        )
        if not self._in_jax or sizes.empty:
            return kernels()
        try:
            chosen, key = kernels()
        except ValueError:  # no kernel of this name
            chosen, key = native.Selection(None), ""
        if chosen.instance:
            return chosen, key
        way, problem = IN_JAX[self.algorithm], (self.op, self.spec, sizes, dtype)
        if reason := way.refusal(*problem):
            refusals = (native.Refusal(self.algorithm, reason), *chosen.refusals)
            return native.Selection(None, refusals=refusals), key
        name = way.instance(self.op, self.spec, dtype)
        return native.Selection(name, way.workspace_bytes(*problem), in_jax=True), ""

    @property
    def _in_jax(self) -> bool:
        return self.algorithm in IN_JAX and selection.applies(self.algorithm, self.op)

    def in_jax_elsewhere(self, sizes: Sizes, dtype: np.dtype) -> bool:
        if not self._in_jax:
            return False
        if reason := IN_JAX[self.algorithm].refusal(self.op, self.spec, sizes, dtype):
            raise ValueError(f"algorithm {self.algorithm!r} cannot serve {self.op.value}: {reason}")
        return True

    def definition(self, platform: str | None, in_jax: bool) -> Callable[..., jax.Array]:
        way: Any = IN_JAX[self.algorithm] if in_jax else xla

        def define(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
            lacks = platform is not None and xla_lacks(platform, lhs.dtype)
            convolve = exact.convolve if lacks and not in_jax else way.convolve
            return convolve(self.op, lhs, rhs, spec=self.spec, out_dtype=self.out_dtype)

        return define

    @property
    def target(self) -> str:
        return custom_call.call_target(self.op)

    @property
    def names(self) -> tuple[Sequence[str], Sequence[str]]:
        return ("lhs", "rhs"), ("out",)

    def layouts(self, chosen: native.Selection) -> Mapping[str, Sequence[int]]:
        names = zip(("lhs", "rhs", "out"), self.op.roles, strict=True)
        return {name: custom_call.layout(self.spec, role, chosen.krsc) for name, role in names}

    def attributes(self) -> Mapping[str, Any]:
        return custom_call.axes_attributes(self.op, self.spec)

    def emit(self, platform: str, ctx, chosen: native.Selection, key: str, operands: Sequence):
        if not chosen.packed:
            return super().emit(platform, ctx, chosen, key, operands)
        sizes = self.sizes(*(aval.shape for aval in ctx.avals_in))
        plan = _int8_plan(platform, self.op, self.spec, sizes, self.out_dtype)
        convolve = selection.INTEGERS[platform].convolve
        through = functools.partial(convolve, plan, self.op, spec=self.spec)
        with record.paused():
            return mlir.lower_fun(through, multiple_results=False)(ctx, *operands)


def select(
    platform: str,
    op: Op,
    spec: ConvSpec,
    sizes: Sizes,
    operand_dtype: np.dtype,
    out_dtype: np.dtype,
) -> Selected:
    """``Bilinear.select`` for an operation on operands of these sizes."""
    return Bilinear(op, spec, np.dtype(out_dtype)).select(platform, sizes, operand_dtype)


def select_kernel(
    platform: str,
    op: Op,
    spec: ConvSpec,
    sizes: Sizes,
    operand_dtype: np.dtype,
    out_dtype: np.dtype,
    epilogue: Sequence[str] = (),
) -> Selected:
    """Chooses the kernel instance for one operation on one platform, or XLA's convolution.

    With words of an ``epilogue``, only instances that also compute it are candidates. If the chosen
    instance can read a filter stored as (k, spatial, c) at no cost, it does; otherwise XLA
    transposes the filter.

    Returns:
        The selection, and the problem key ("" for dtypes without one).

    Raises:
        ValueError: the demanded algorithm is not known on this platform.
    """
    algorithm = spec.algorithm_of(op)
    if algorithm == selection.XLA:
        return selection.refused('algorithm="xla" was asked for'), ""
    if reason := selection.out_of_question(spec, sizes) or _unnamed(operand_dtype, out_dtype):
        return selection.refused(reason), ""
    if algorithm in WITH_WINOGRAD:
        problem = (platform, op, spec, sizes, operand_dtype, out_dtype)
        return _select_with_winograd(*problem, epilogue)
    key = problem_key(op, spec, sizes, operand_dtype, out_dtype, epilogue=epilogue)
    if platform in selection.INTEGERS and np.dtype(operand_dtype) == np.int8:
        plan = _int8_plan(platform, op, spec, sizes, out_dtype)
        return plan.chosen, plan.key if plan.chosen.instance else key
    if not selection.applies(algorithm, op):
        algorithm = AUTO
    chosen = selection.kernel(platform, key, algorithm)
    if chosen.instance and op is not Op.WGRAD and _lies_as_krsc(spec, sizes):
        as_it_lies = problem_key(
            op, spec, sizes, operand_dtype, out_dtype, krsc=True, epilogue=epilogue
        )
        again = selection.kernel(platform, as_it_lies, chosen.instance)
        if again.instance:
            return again._replace(krsc=True), as_it_lies
    return chosen, key


def _unnamed(*dtypes: np.dtype) -> str:
    """Why no kernel accepts operands and a result of these dtypes, or ""."""
    unknown = [name for d in dtypes if (name := np.dtype(d).name) not in DTYPE_NAMES]
    return f"no kernel for dtype {unknown[0]}" if unknown else ""


def _lies_as_krsc(spec: ConvSpec, sizes: Sizes) -> bool:
    """Whether a filter, such as OHWI or OI11, is stored as (batch?, k, *spatial, c)."""
    *batch_spatial, c, k = spec.w_axes
    shape = spec.shape("w", sizes)

    def in_order(*axes: int) -> bool:
        extended = [axis for axis in axes if shape[axis] > 1]
        return extended == sorted(extended)

    batch, spatial = batch_spatial[: -spec.rank], batch_spatial[-spec.rank :]
    return in_order(*batch, k, *spatial, c) and not in_order(*spec.w_axes)


def _select_with_winograd(
    platform: str, op: Op, spec: ConvSpec, sizes: Sizes, *rest: Any
) -> Selected:
    """``select_kernel`` by "auto", or a Winograd kernel if that is predicted faster.

    No Winograd kernel has an epilogue; for calls with one, this is "auto".
    """

    def by(name: str) -> Selected:
        demand = dataclasses.replace(spec, algorithm=(name,) * 3)
        return select_kernel(platform, op, demand, sizes, *rest)

    *_, epilogue = rest
    chosen, key = by(AUTO)
    if epilogue or op not in winograd_jax.OPS:
        return chosen, key
    try:
        winograd, its_key = by(WITH_WINOGRAD[spec.algorithm_of(op)])
    except ValueError:  # no kernel of this name on the platform
        return chosen, key
    if winograd.instance and winograd.microseconds < chosen.expected_microseconds:
        return winograd, its_key
    return chosen, key


def _int8_plan(platform: str, op: Op, spec: ConvSpec, sizes: Sizes, out_dtype: np.dtype):
    algorithm = spec.algorithm_of(op)
    if not selection.applies(algorithm, op) or algorithm in WITH_WINOGRAD:
        spec = dataclasses.replace(spec, algorithm=(AUTO, AUTO, AUTO))
    return selection.INTEGERS[platform].plan(platform, op, spec, sizes, out_dtype)


def xla_lacks(platform: str, dtype: np.dtype) -> bool:
    """Whether XLA cannot compile a convolution of these operands: integers on a GPU."""
    return platform == "cuda" and jnp.issubdtype(dtype, jnp.integer)
