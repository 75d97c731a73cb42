"""Sharding rules for Shardy, XLA's partitioner: the array axes that are split alike."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from jax.experimental.custom_partitioning import ArrayMapping, CompoundFactor, SdyShardingRule

if TYPE_CHECKING:
    from jaxconv._src.sharding.partition import Tensor


def _in_order(mappings: Sequence[ArrayMapping]) -> list[str]:
    """The factors of some arrays, in order of first appearance."""
    names = itertools.chain.from_iterable(mappings)
    return list(dict.fromkeys(f for n in names for f in ([n] if isinstance(n, str) else n)))


def rule(
    mappings: Sequence[ArrayMapping],
    operands: int,
    sizes: Mapping[str, int],
    whole: Iterable[str] = (),
    reduced: Iterable[str] = (),
) -> SdyShardingRule:
    """A rule: splits propagate between array axes that share a factor.

    Shardy numbers factors by first appearance, and requires those of one kind in ascending order.

    Args:
        mappings: those of the operands, then of the results.
        operands: the number of operands among them.
        sizes: the sizes of factors that are no axis.
        whole: the factors that cannot be split.
        reduced: the factors over which a sum runs.
    """
    order = _in_order(mappings)
    return SdyShardingRule(
        tuple(mappings[:operands]),
        tuple(mappings[operands:]),
        need_replication_factors=tuple(sorted(set(whole), key=order.index)),
        reduction_factors=tuple(sorted(set(reduced), key=order.index)),
        **cast(Any, sizes),
    )


def rule_of(
    operands: Sequence[Tensor], results: Sequence[Tensor], reduced: Sequence[str]
) -> SdyShardingRule:
    """The rule of a call, from the factors of its arrays.

    Args:
        operands, results: the arrays; axes that stay whole are named after the array.
        reduced: the factors over which a sum runs.
    """
    arrays = (*operands, *results)
    sizes: dict[str, int] = {}
    whole: list[str] = []
    mappings = []
    for array in arrays:
        names: list = []
        for axis, factor in enumerate(array.axes):
            if factor is None:
                whole.append(f"{array.name}{axis}")
                names.append(whole[-1])
            elif factor.together > 1:
                whole.append(factor.inner)
                names.append(CompoundFactor(factor.name, factor.inner))
                sizes |= {
                    factor.name: array.extents()[factor.name],
                    factor.inner: factor.together,
                }
            else:
                names.append(factor.name)
        mappings.append(ArrayMapping(*names))
    for name in itertools.chain.from_iterable(mappings):
        sizes.pop(name, None)  # it then has the size of an axis
    return rule(mappings, len(operands), sizes, whole, reduced)


def with_operand(given: SdyShardingRule, name: str, rank: int) -> SdyShardingRule:
    """The rule of an operation with an additional last operand, which shares no factor.

    Args:
        given: the rule without it.
        name: the name of the operand's factors.
        rank: its number of axes.
    """
    added = ArrayMapping(*(f"{name}{i}" for i in range(rank)))
    return rule(
        [*given.operand_mappings, added, *given.result_mappings],
        len(given.operand_mappings) + 1,
        given.factor_sizes,
        given.need_replication_factors,
        given.reduction_factors,
    )
