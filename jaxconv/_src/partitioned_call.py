"""Lowers an operation on an automatic mesh to a call that XLA's partitioner hands back.

The program then says of the operation what it is, and not how one device computes its part: the
partitioner asks for that by a callback while it compiles. JAX's persistent compilation cache, whose
key is the program's text, tells callbacks apart by their address, so that no other process would
find the program. Here the text has the callback's *identity*, all that decides what it answers, and
the callback is called by a hash of that.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.xla_metadata import set_xla_metadata
from jax.interpreters import mlir

from jaxconv._src import compat, native


def _identity(call: Any, platforms: Sequence[str], settings: tuple[str, str]) -> str:
    """All that decides the program of one device, but for shapes and shardings, as text.

    Those are told to the callback and part of the program, as is the sharding rule. ``repr`` of a
    call shows every field: primitive, window, algorithm, epilogue, dtypes, axes of devices.
    """
    return "; ".join(
        (
            repr(call),
            *(f"{platform}: {native.described(platform)}" for platform in platforms),
            f"algorithm {settings[0]!r}, target {settings[1]!r}",
            f"code {native.code_digest()}",
            f"jax {jax.__version__}, float is {jax.dtypes.canonicalize_dtype(float)}",
        )
    )


def spread(ctx, call: Any, operands: Sequence, multiple_results: bool = False):
    """Lowers to a call that XLA's partitioner hands back to ``call.partition``.

    Args:
        ctx: the lowering context.
        call: the operation on whole arrays, a frozen dataclass with the mesh ``axes`` of
            ``compat.device_axes`` and the callbacks ``partition``, ``infer`` and ``rule`` of
            ``custom_partitioning``, which its fields decide.
        operands: the values.
        multiple_results: whether the operation has several results.
    """
    module = ctx.module_context
    platforms, settings = ctx.platforms or module.platforms, native.settings()
    identity = _identity(call, platforms, settings)

    def partition(mesh, arguments, results):
        if native.settings() != settings:
            raise ValueError(
                "JAXCONV_ALGORITHM and JAXCONV_TARGET: expected in compilation the values of "
                f"lowering, {settings}, got {native.settings()}"
            )
        return call.partition(mesh, arguments, results)

    split = custom_partitioning(call)
    split.def_partition(
        partition,
        infer_sharding_from_operands=call.infer,
        sharding_rule=call.rule,
        decode_shardings=False,
    )

    def identified(*operands):
        # Users may have JAX leave the names of callbacks out of its keys
        # (jax_remove_custom_partitioning_ptr_from_cache_key). The metadata stay.
        with set_xla_metadata(jaxconv=identity):
            return split(*operands)

    context = compat.placed_context(math.prod(size for size, _ in call.axes))
    placed = ctx.replace(module_context=module.replace(axis_context=context))
    results = mlir.lower_fun(identified, multiple_results=multiple_results)(placed, *operands)
    name = f"jaxconv_{hashlib.sha256(identity.encode()).hexdigest()}"
    compat.name_partitioner(module, results[0], name)
    return results
