"""Lowers an operation on an automatic mesh to a call that XLA's partitioner passes back.

The program then describes the operation, not how one device computes its part: the partitioner
requests that by a callback while it compiles. JAX's persistent compilation cache uses the program's
text as key and identifies callbacks by address, so no other process would find the program. Here
the text contains the callback's *identity*, everything that determines its answer, and the
callback's name is a hash of it.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import SdyShardingRule, custom_partitioning
from jax.experimental.xla_metadata import set_xla_metadata
from jax.interpreters import mlir

from jaxconv._src import compat
from jaxconv._src.library import native
from jaxconv._src.sharding import shardy


def _identity(call: Any, platforms: Sequence[str], settings: tuple[str, str]) -> str:
    """Everything that determines one device's program, except shapes and shardings, as text.

    Shapes and shardings are arguments of the callback and part of the program, and so is the
    sharding rule. ``repr`` of a call shows every field: primitive, window, algorithm, epilogue,
    dtypes, device axes.
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


@dataclasses.dataclass(frozen=True)
class _Numbered:
    """A call among manual mesh axes, with an additional operand split over all other axes.

    The operand's sharding shows how XLA numbers the devices along these (``Arrangement``).
    """

    call: Any

    def __call__(self, *operands):
        return self.call(*operands[:-1])

    def _among(self, operands: Sequence):
        *operands, numbers = operands
        devices = self.call.devices.numbered(numbers.sharding, len(numbers.shape))
        return dataclasses.replace(self.call, devices=devices), operands, numbers.sharding

    def partition(self, mesh, operands, results):
        call, operands, held = self._among(operands)
        whole, body, out, given = call.partition(mesh, operands, results)
        return whole, lambda *local: body(*local[:-1]), out, (*given, held)

    def infer(self, mesh, operands, results):
        call, operands, _ = self._among(operands)
        return call.infer(mesh, operands, results)

    def rule(self, mesh, operand_types, result_types) -> SdyShardingRule:
        *operand_types, numbers = operand_types
        rule = self.call.rule(mesh, operand_types, result_types)
        return shardy.with_operand(rule, "numbers", len(numbers.shape))


def spread(ctx, call: Any, operands: Sequence):
    """Lowers to a call that XLA's partitioner passes back to ``call.partition``.

    Args:
        ctx: the lowering context.
        call: the operation on whole arrays, which returns a tuple of results; a frozen dataclass
            with its ``devices`` (``device_layout.Arrangement``) and the callbacks ``partition``,
            ``infer`` and ``rule`` of ``custom_partitioning``, determined by its fields.
        operands: the values.
    """
    module = ctx.module_context
    platforms, settings = ctx.platforms or module.platforms, native.settings()
    identity = _identity(call, platforms, settings)
    numbers = () if call.devices.all_split else (compat.split_over_all(ctx),)
    called = _Numbered(call) if numbers else call

    def partition(mesh, arguments, results):
        if native.settings() != settings:
            raise ValueError(
                "JAXCONV_ALGORITHM and JAXCONV_TARGET: expected in compilation the values of "
                f"lowering, {settings}, got {native.settings()}"
            )
        return called.partition(mesh, arguments, results)

    split = custom_partitioning(called)
    split.def_partition(
        partition,
        infer_sharding_from_operands=called.infer,
        sharding_rule=called.rule,
        decode_shardings=False,
    )

    def identified(*operands):
        # JAX may be configured to omit callback names from its keys
        # (jax_remove_custom_partitioning_ptr_from_cache_key); the metadata stays.
        with set_xla_metadata(jaxconv=identity):
            return split(*operands)

    placed = ctx.replace(
        module_context=module.replace(axis_context=compat.placed_context(call.devices.count)),
        avals_in=[*ctx.avals_in, *(aval for _, aval in numbers)],
    )
    operands = (*operands, *(value for value, _ in numbers))
    results = mlir.lower_fun(identified, multiple_results=True)(placed, *operands)
    name = f"jaxconv_{hashlib.sha256(identity.encode()).hexdigest()}"
    compat.name_partitioner(module, results[0], name)
    return results
