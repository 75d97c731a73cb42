"""Registers the rules that JAX asks of every primitive, but for its derivatives."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jaxconv._src import compat
from jaxconv._src.library import native


def register(
    primitive: Primitive, *, shapes: Callable, batch: Callable, lower: Callable, elsewhere: Callable
) -> None:
    """Makes a primitive known to evaluation, ``vmap``, ``checkify`` and lowering.

    Args:
        primitive: the primitive; its derivatives are registered apart.
        shapes: the abstract evaluation, from the operands' types to the results'.
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
            # ``explain`` lists every use, with its line of the user's code; lowering one costs
            # 0.4 ms, which a reused lowering would save.
            cacheable=False,
        )


def calls_cuda(platform: str, ctx: Any) -> bool:
    """Whether a primitive with a CUDA kernel alone lowers to its call: on one device, by XLA."""
    return (
        platform == "cuda"
        and not isinstance(native.load(platform), native.Refusal)
        and not compat.device_axes(ctx)
    )
