"""Rules that JAX requires of a primitive, derived from its definition in JAX operations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxconv._src import compat
from jaxconv._src.call import record
from jaxconv._src.library import native
from jaxconv._src.sharding import partition
from jaxconv._src.sharding.split_pass import SplitPass


def batched_as(in_jax: Callable[..., Any]) -> Callable:
    """The batching rule of a primitive with one result or several: ``vmap`` of JAX operations."""

    def batch(operands: Sequence[Any], mapped_axes: Sequence[Any], **parameters: Any) -> Any:
        mapped = jax.vmap(functools.partial(in_jax, **parameters), in_axes=mapped_axes)
        results = mapped(*operands)
        return results, jax.tree.map(lambda _: 0, results)

    return batch


def tangent_of(
    in_jax: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any], **parameters: Any
) -> Any:
    """The tangent of a primitive's results: ``jax.jvp`` of its JAX operations.

    Args:
        in_jax: the primitive in JAX operations.
        primals: the operands.
        tangents: their tangents. A symbolic zero stays one: zero times an infinite operand would be
            NaN.
        parameters: the primitive's parameters.
    """
    moved = [i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero)]

    def differentiable(*operands: jax.Array) -> Any:
        given = dict(enumerate(primals)) | dict(zip(moved, operands, strict=True))
        return in_jax(*given.values(), **parameters)

    return jax.jvp(differentiable, [primals[i] for i in moved], [tangents[i] for i in moved])[1]


def transposed_as(in_jax: Callable[..., Sequence[Any]]) -> Callable:
    """The transpose of a primitive with several results that is linear in some operands."""

    def transpose(cotangents: Sequence[Any], *operands: Any, **parameters: Any) -> list[Any]:
        given = [None if ad.is_undefined_primal(o) else o for o in operands]
        types = [o.aval for o in operands if ad.is_undefined_primal(o)]
        moved = [i for i, c in enumerate(cotangents) if not isinstance(c, ad.Zero)]

        def linear(*others: jax.Array) -> Sequence[Any]:
            rest = iter(others)
            results = in_jax(*(next(rest) if g is None else g for g in given), **parameters)
            return [results[i] for i in moved]

        found = iter(jax.linear_transpose(linear, *types)([cotangents[i] for i in moved]))
        return [next(found) if g is None else None for g in given]

    return transpose


def register(
    primitive: Primitive, *, shapes: Callable, batch: Callable, lower: Callable, elsewhere: Callable
) -> None:
    """Registers a primitive for evaluation, ``vmap``, ``checkify`` and lowering.

    Args:
        primitive: the primitive; its derivatives are registered separately.
        shapes: the abstract evaluation, from operand types to result types.
        batch: the batching rule.
        lower: lowers on a platform with kernels, ``lower(platform, ctx, *operands, **parameters)``.
        elsewhere: lowers on every other platform, ``elsewhere(ctx, *operands, **parameters)``.
    """
    primitive.def_impl(functools.partial(compat.apply_primitive, primitive))
    primitive.def_abstract_eval(shapes)
    batching.primitive_batchers[primitive] = batch
    compat.report_nans(primitive)
    mlir.register_lowering(primitive, elsewhere)
    for platform in native.PLATFORMS:
        mlir.register_lowering(
            primitive,
            functools.partial(lower, platform),
            platform=platform,
            # ``explain`` lists every use with its line of the user's code. This costs 0.4 ms for
            # each lowering that would otherwise be reused.
            cacheable=False,
        )


def planned(key: str) -> native.PassPlan | None:
    """The plan of a pass on CUDA, by its key; None without the kernel library."""
    kernels = native.load("cuda")
    if isinstance(kernels, native.Refusal):
        return None
    return kernels.plan_pass(key, native.target())


def lowered_pass(
    platform: str,
    ctx: Any,
    operands: Sequence[Any],
    key: str | None,
    by_kernel: Callable[[native.PassPlan], Sequence[Any]],
    in_jax: Callable[..., Sequence[Any]],
    call: SplitPass,
) -> Sequence[Any]:
    """Lowers a primitive that has CUDA kernels only: to its custom call, else to JAX operations.

    Args:
        platform, ctx: as for a lowering rule.
        operands: the primitive's operands.
        key: the key of the pass, or None if the call cannot express the primitive.
        by_kernel: emits the call for a plan with a kernel.
        in_jax: lowers to JAX operations.
        call: the primitive's parameters, and the partition of its arrays over devices.
    """
    on_cuda = platform == "cuda"
    plan = planned(key) if on_cuda and key is not None else None
    if key is None or (on_cuda and plan is None):
        return in_jax(ctx, *operands)
    results = None
    if plan is None or plan.kernel is not None:
        with record.paused():  # each device's part belongs to this one pass
            results = partition.lower(ctx, call, operands)
    if results is None:
        if plan is not None and plan.kernel is not None:
            results = by_kernel(plan)
        else:
            results = in_jax(ctx, *operands)
    return results if plan is None else record.emit_pass(ctx, key, plan, results)
