"""From a primitive to its kernel: the common path of all convolutions with kernels.

A primitive's static parameters form a ``Call``. The base class contains what primitives share: the
check at trace time, selection, sharding, the custom call, the lowering to XLA if no kernel accepts
the problem, and the record for ``explain``. A subclass adds a primitive's arrays, its problem key
and its definition in JAX operations.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jaxconv._src.call import override_state, record, rules, selection
from jaxconv._src.library import custom_call, native
from jaxconv._src.problem.spec import (
    EXPLICIT_GROWTH,
    ConvSpec,
    Op,
    Sizes,
    dilated_extents,
    explicit_input,
    flops,
)
from jaxconv._src.sharding import partition
from jaxconv._src.sharding.partition import SPATIAL, Part, Split, Tensors

_log = logging.getLogger("jaxconv")

Selected = tuple[native.Selection, str]  # and the problem key, "" if there is none


class Call(partition.Splittable):
    """A convolution primitive with its static parameters; a frozen dataclass of these.

    Attributes:
        op: one of the three operations.
        out_dtype: the dtype of the first result.
        subject: the operation's name in errors.
        demands: the algorithms that every call of this kind accepts.
        fused: whether it has an epilogue, which ``apart`` computes if no kernel does.
    """

    if TYPE_CHECKING:
        op: Op
        out_dtype: np.dtype
    subject: ClassVar[str] = "convolution"
    demands: ClassVar[tuple[str, ...]] = selection.UNCONDITIONAL
    fused: ClassVar[bool] = False

    @property
    def words(self) -> Sequence[str]:
        """The words of the epilogue, as in the problem key, for ``explain``."""
        return ()

    @property
    def even(self) -> bool:
        """Whether devices must compute parts of equal size."""
        return False

    @property
    @abc.abstractmethod
    def primitive(self) -> Primitive:
        """The primitive that has these parameters."""

    @property
    @abc.abstractmethod
    def conv(self) -> ConvSpec:
        """The convolution."""

    @abc.abstractmethod
    def with_conv(self, conv: ConvSpec) -> Call:
        """The same call with another convolution."""

    @property
    def algorithm(self) -> str:
        """The demanded algorithm."""
        return self.conv.algorithm_of(self.op)

    def demanding(self, algorithm: str) -> Call:
        return self.with_conv(dataclasses.replace(self.conv, algorithm=(algorithm,) * 3))

    def sizes(self, lhs_shape: Sequence[int], rhs_shape: Sequence[int]) -> Sizes:
        """The extents of the convolution for operands of these shapes."""
        return self.conv.sizes(self.op, lhs_shape, rhs_shape)

    @abc.abstractmethod
    def tensors(self, *shapes: Sequence[int]) -> Tensors:
        """The operands, with these shapes, and the results.

        The first two operands and the first result are those of the convolution.
        """

    def bind(self, *operands: jax.Array) -> list[jax.Array]:
        """The primitive's results."""
        names = [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]
        found = self.primitive.bind(*operands, **{n: getattr(self, n) for n in names if n != "op"})
        return list(found) if self.primitive.multiple_results else [found]

    def on_device(self, part: Part, *operands: jax.Array) -> list[jax.Array]:
        """One device's results, from operands with all rows that it reads."""
        return [partition.sum_over(each, part.summed) for each in part.compute(*operands)]

    def held(self, tensors: Tensors, given: Sequence) -> Tensors:
        (lhs, *others), results = tensors
        return [lhs.held(given[0], SPATIAL), *others], results

    def choose_split(
        self, tensors: Tensors, mesh: Mapping[str, int], given: Sequence, explicit: bool
    ) -> Split:
        return partition.choose_for(self, tensors, mesh, given, explicit)

    def summed(self, tensors: Tensors) -> list[str]:
        operands, results = tensors
        return partition.contracted(operands, results[0])

    def on_devices(
        self, tensors: Tensors, split: Split, mesh: Mapping[str, int], *operands: jax.Array
    ) -> list[jax.Array]:
        """One device's results, with an exchange of rows and a sum of partial results."""
        part = Part.of(self, tensors, split, mesh)
        lhs, rhs, *terms = operands
        return self.on_device(part, *part.exchanged(lhs, rhs), *terms)

    # --- how it is computed ---

    @abc.abstractmethod
    def select(self, platform: str, sizes: Sizes, dtype: np.dtype) -> Selected:
        """Chooses how to compute the call on one platform, for operands of this dtype.

        Raises:
            ValueError: the platform does not know the demanded algorithm.
        """

    def select_beforehand(self, platform: str, sizes: Sizes, dtype: np.dtype) -> Selected:
        """``select`` for the convolution after its input was dilated and cropped separately."""
        if self.conv.symbolic:
            return native.Selection(None), ""
        explicit = explicit_input(self.conv)
        dilated = math.prod(dilated_extents(self.conv.in_spatial, self.conv.lhs_dilation))
        grown = dilated > EXPLICIT_GROWTH * math.prod(self.conv.in_spatial)
        if explicit == self.conv or grown or self.algorithm not in selection.PREDICTED:
            return native.Selection(None), ""
        sizes = dataclasses.replace(sizes, in_spatial=explicit.in_spatial)
        return self.with_conv(explicit).select(platform, sizes, dtype)

    def beforehand(self, *operands: jax.Array) -> list[jax.Array]:
        """The call with x dilated and cropped by separate operations; for dgrad, dx inversely."""
        call = self.with_conv(explicit_input(self.conv))
        arrays, results = self.tensors(*(operand.shape for operand in operands))
        x = results[0] if self.op is Op.DGRAD else arrays[0]
        config, steps = [(0, 0, 0)] * len(x.shape), [1] * len(x.shape)
        spatial = zip(SPATIAL, self.conv.padding, self.conv.lhs_dilation, strict=False)
        for factor, (lo, hi), dilation in spatial:
            axis = x.axis(factor)
            assert axis is not None, "x has every spatial axis"
            if self.op is Op.DGRAD:
                config[axis], steps[axis] = (-min(lo, 0), -min(hi, 0), 0), dilation
            else:
                config[axis] = (min(lo, 0), min(hi, 0), dilation - 1)
        if self.op is Op.DGRAD:
            dx = call.bind(*operands)[0]
            dx = lax.pad(dx, jnp.zeros((), dx.dtype), config)
            return [lax.slice(dx, (0,) * dx.ndim, dx.shape, steps)]
        padded = lax.pad(operands[0], jnp.zeros((), operands[0].dtype), config)
        return call.bind(padded, *operands[1:])

    def apart(self, *operands: jax.Array) -> list[jax.Array]:
        """The results of a fused call, by a call without epilogue and JAX operations."""
        raise NotImplementedError

    def without_epilogue(self) -> Call | None:
        """The call that ``apart`` computes first."""
        return None

    @abc.abstractmethod
    def definition(self, platform: str | None, in_jax: bool) -> Callable[..., Any]:
        """The convolution in JAX operations; with ``in_jax``, by the demanded algorithm."""

    @property
    def in_64_bits(self) -> bool:
        """Whether the definition needs 64-bit types even if JAX has them disabled."""
        return False

    def in_jax_elsewhere(self, sizes: Sizes, dtype: np.dtype) -> bool:
        """Whether the demanded algorithm is written in JAX, on a platform without kernels.

        Raises:
            ValueError: the algorithm does not accept the problem.
        """
        return False

    # --- its custom call ---

    @property
    @abc.abstractmethod
    def target(self) -> str:
        """Name of the custom call, on every platform."""

    @property
    @abc.abstractmethod
    def names(self) -> tuple[Sequence[str], Sequence[str]]:
        """The names of operands and results in ``cc/ffi/arrays.h``."""

    def layouts(self, chosen: native.Selection) -> Mapping[str, Sequence[int]]:
        """Minor-to-major by name, for arrays that are not row-major."""
        return {}

    def attributes(self) -> Mapping[str, Any]:
        """The attributes that the handler reads in addition to the plan."""
        return {}

    def emit(self, platform: str, ctx, chosen: native.Selection, key: str, operands: Sequence):
        """The custom call on the chosen instance.

        The arrays keep their axis order; a layout constraint makes XLA store them channels-last.
        The workspace is another result of the call, which is dropped here.
        """
        of_operands, of_results = self.names
        results = custom_call.lowered(
            ctx,
            platform,
            self.target,
            dict(zip(of_operands, zip(operands, ctx.avals_in, strict=True), strict=True)),
            dict(zip(of_results, ctx.avals_out, strict=True)) | custom_call.workspace(chosen),
            self.layouts(chosen),
            **custom_call.plan_attributes(chosen, key),
            **self.attributes(),
        )
        return [results[name] for name in of_results]


# --- checks while tracing ---


def check(call: Call, lhs_shape: Sequence[int], rhs_shape: Sequence[int], dtype: np.dtype) -> None:
    """Refuses, at trace time, a demanded algorithm that no platform can run.

    The platform is not known yet, so an algorithm passes if one platform accepts it; lowering
    checks again for its platform.

    Raises:
        ValueError: with every kernel's reason, and the algorithms that would work.
    """
    sizes = call.sizes(lhs_shape, rhs_shape)
    if _is_met(call, sizes):
        return
    refusals: list[native.Refusal] = []
    key = ""
    for platform in selection.PLATFORMS:
        try:
            chosen, its_key = call.select(platform, sizes, dtype)
        except ValueError as error:  # not an algorithm of this platform
            refusals.append(native.Refusal(platform, str(error)))
            continue
        if chosen.instance:
            return
        key = key or its_key
        refusals.extend(chosen.refusals)
    if (rest := call.without_epilogue()) is not None:
        check(rest, lhs_shape, rhs_shape, dtype)
        return
    raise _refusal(call, key, sizes, dtype, tuple(dict.fromkeys(refusals)))


def _is_met(call: Call, sizes: Sizes) -> bool:
    """Whether the demanded algorithm needs no check, because it accepts this problem always."""
    demanded = call.algorithm not in call.demands and selection.applies(call.algorithm, call.op)
    return not demanded or sizes.empty


def _refusal(
    call: Call, key: str, sizes: Sizes, dtype: np.dtype, refusals: Sequence[native.Refusal]
) -> ValueError:
    """The error for a demanded algorithm that cannot be used: why, and the alternatives."""
    accepting = [selection.XLA]
    for platform, families in selection.families().items():
        for name in families:
            with contextlib.suppress(ValueError):  # the library may not be able to read the problem
                chosen, _ = call.demanding(name).select(platform, sizes, dtype)
                if chosen.instance:
                    accepting.append(f"{name} ({platform})")
    return ValueError(
        f"algorithm {call.algorithm!r} cannot serve {key or call.subject}: "
        f"{selection.reasons(refusals)}. Accepted here: {', '.join(accepting)}."
    )


# --- lowering ---


def lower(kind: Callable[..., Call], platform: str, ctx, *operands, **parameters):
    """Lowers to a custom call on the chosen instance, or to XLA operations, and records why.

    Raises:
        ValueError: the demanded algorithm does not accept the problem on this platform.
    """
    call = kind(**parameters)
    lhs, rhs = ctx.avals_in[:2]
    sizes = call.sizes(lhs.shape, rhs.shape)
    chosen, key = call.select(platform, sizes, lhs.dtype)
    named = key or call.op.value
    if call.fused and chosen.instance is None:
        why = selection.reasons(chosen.refusals)
        _log.info("epilogue of %s on %s goes to XLA: %s", named, platform, why)
        with record.located(ctx, apart=chosen.refusals):
            return mlir.lower_fun(call.apart, multiple_results=True)(ctx, *operands)
    recorded = functools.partial(
        record.emit,
        ctx,
        call.op.value,
        key,
        call.conv.precision,
        platform,
        flops(call.conv, sizes),
        epilogue=" ".join(call.words),
    )
    with record.paused():  # each device's part belongs to this one convolution
        split = partition.lower(ctx, call, operands)
    if split is not None:
        return recorded(chosen, split)
    if chosen.instance is None and not chosen.xla_is_faster:
        before, _ = call.select_beforehand(platform, sizes, lhs.dtype)
        if before.instance is not None:
            with record.located(ctx):
                return mlir.lower_fun(call.beforehand, multiple_results=True)(ctx, *operands)
        if before.xla_is_faster:
            chosen = before
    if chosen.instance is None:
        if not _is_met(call, sizes):
            raise _refusal(call, key, sizes, lhs.dtype, chosen.refusals)
        why = selection.reasons(chosen.refusals)
        _log.info("%s on %s goes to XLA: %s", named, platform, why)
    else:
        _log.debug("%s on %s: %s", named, platform, chosen.instance)
    if chosen.instance is None or chosen.in_jax:
        results = _lower_definition(call, ctx, operands, platform, chosen.in_jax)
    else:
        results = call.emit(platform, ctx, chosen, key, operands)
    return recorded(chosen, results)


def lower_elsewhere(kind: Callable[..., Call], ctx, *operands, **parameters):
    """Lowers on a platform without kernels.

    Raises:
        ValueError: the demanded algorithm, written in JAX, does not accept the problem.
    """
    call = kind(**parameters)
    if call.fused:
        return mlir.lower_fun(call.apart, multiple_results=True)(ctx, *operands)
    sizes = call.sizes(*(aval.shape for aval in ctx.avals_in[:2]))
    in_jax = call.in_jax_elsewhere(sizes, ctx.avals_in[0].dtype)
    return _lower_definition(call, ctx, operands, None, in_jax)


def _lower_definition(call: Call, ctx, operands, platform: str | None, in_jax: bool):
    """Lowers to JAX operations, whose convolutions stay lax's."""
    define = call.definition(platform, in_jax)
    # XLA's partitioner calls this in another thread, without the caller's `enable_x64`.
    known = jax.dtypes.canonicalize_dtype(call.out_dtype) == call.out_dtype
    wide = jax.enable_x64(True) if call.in_64_bits or not known else contextlib.nullcontext()
    with override_state.left_to_lax(), record.paused(), wide:
        return mlir.lower_fun(define, multiple_results=False)(ctx, *operands)


def register(
    primitive: Primitive, kind: Callable[..., Call], *, shapes: Callable, batch: Callable
) -> None:
    """``rules.register`` for a primitive whose parameters form a call of this kind."""
    rules.register(
        primitive,
        shapes=shapes,
        batch=batch,
        lower=functools.partial(lower, kind),
        elsewhere=functools.partial(lower_elsewhere, kind),
    )
