"""Which array axes are split alike, in the terms of XLA's partitioner Shardy."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from jax.experimental.custom_partitioning import ArrayMapping, CompoundFactor, SdyShardingRule

from jaxconv._src.spec import ConvSpec


def _in_order(mappings: Sequence[ArrayMapping]) -> list[str]:
    """The factors of some arrays, in the order of their first appearance."""
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

    Shardy numbers factors by their first appearance, and refuses a rule that does not name those of
    one kind in ascending order.

    Args:
        mappings: of the operands and of the results.
        operands: how many of them are operands'.
        sizes: of the factors that are no axis.
        whole: the factors that cannot be split.
        reduced: those that a sum runs over.
    """
    order = _in_order(mappings)
    return SdyShardingRule(
        tuple(mappings[:operands]),
        tuple(mappings[operands:]),
        need_replication_factors=tuple(sorted(set(whole), key=order.index)),
        reduction_factors=tuple(sorted(set(reduced), key=order.index)),
        **cast(Any, sizes),
    )


def convolution_rule(
    spec: ConvSpec, operands: Sequence, results: Sequence, reduced: Sequence[str]
) -> SdyShardingRule:
    """The rule of a convolution, forward or backward, with or without an epilogue.

    Args:
        spec: the convolution.
        operands, results: a name, the shape and the factors of every array; its other axes are
            called by its name.
        reduced: the factors that a sum runs over.
    """
    sizes: dict[str, int] = {}
    mappings = []
    for array, shape, at in (*operands, *results):
        names: list = [f"{array}{i}" for i in range(len(shape))]
        for name, axis in at.items():
            names[axis] = name
            of_one_group = shape[axis] // spec.groups
            if name == "g" and of_one_group > 1:
                inner = "c_of_g" if array == "x" else "k_of_g"
                names[axis] = CompoundFactor("g", inner)
                sizes |= {"g": spec.groups, inner: of_one_group}
        mappings.append(ArrayMapping(*names))
    if any("g" in names for names in mappings):  # its size is then that of an axis
        sizes.pop("g", None)
    split = {name for *_, at in (*operands, *results) for name in at}
    whole = [f for f in _in_order(mappings) if f not in split]
    return rule(mappings, len(operands), sizes, whole, reduced)


def with_operand(given: SdyShardingRule, name: str, rank: int) -> SdyShardingRule:
    """The rule of an operation with one operand more, the last, which shares no factor.

    Args:
        given: the rule without it.
        name: what the operand's factors are called by.
        rank: how many axes it has.
    """
    added = ArrayMapping(*(f"{name}{i}" for i in range(rank)))
    return rule(
        [*given.operand_mappings, added, *given.result_mappings],
        len(given.operand_mappings) + 1,
        given.factor_sizes,
        given.need_replication_factors,
        given.reduction_factors,
    )
