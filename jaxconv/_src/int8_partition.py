"""How a quantised convolution is split over devices: over images and over output channels.

The algebra of ``partition`` for an operation with an epilogue, which is no sum of parts: the
contracted channels stay whole. Output channels are split where they form one group, in whole blocks
of 32, and only the batch is split where they form several.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import jax
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    CompoundFactor,
    SdyShardingRule,
)
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from jaxconv._src import compat, partition, partitioned_call, shardy
from jaxconv._src.device_layout import Arrangement, DeviceLayout, Partitions, read_shardings
from jaxconv._src.partition import Split

BLOCK = 32  # output channels that stay together

# Of one array axis: "n" (images), "k" (output channels), "k_blocks" (blocks of them), or None.
Factors = tuple[str | None, ...]


def _factor(name: str | None) -> str | None:
    return "k" if name == "k_blocks" else name


def _extents(tensors: Sequence[tuple[Factors, Sequence[int]]]) -> dict[str, int]:
    """Images, and blocks of output channels."""
    found: dict[str, int] = {}
    for factors, shape in tensors:
        for name, extent in zip(factors, shape, strict=True):
            if name is not None:
                found[str(_factor(name))] = extent // BLOCK if name == "k" else extent
    return found


def choose(
    tensors: Sequence[tuple[Factors, Sequence[int]]],
    mesh: Mapping[str, int],
    given: Sequence[Partitions | None],
) -> Split:
    """The mesh axes of both factors, from how operands, and perhaps the result, are split.

    The images come first. Of two tensors that split one factor differently the finer split is
    kept; of equal ones, that of the first tensor.

    Args:
        tensors: factors and shape of every operand and of the result.
        mesh: size of every mesh axis.
        given: ``Partitions`` of the same tensors (None: open).
    """
    extents = _extents(tensors)
    used: set[str] = set()
    chosen: dict[str, tuple[str, ...]] = {}
    for name in ("n", "k"):
        candidates = [
            partition.dividing(
                tuple(itertools.takewhile(lambda a: a not in used, axes)), extents[name], mesh
            )
            for (factors, _), split in zip(tensors, given, strict=True)
            for factor, axes in zip(factors, split or (), strict=False)
            if _factor(factor) == name
        ]
        best = max(candidates, key=lambda axes: math.prod(mesh[a] for a in axes), default=())
        if best:
            chosen[name] = best
            used.update(best)
    return chosen


def _spec(factors: Factors, split: Split):
    return partition.partition_spec(tuple(split.get(_factor(name) or "", ()) for name in factors))


@dataclasses.dataclass(frozen=True)
class _Call:
    """The operation as ``custom_partitioning`` sees it."""

    bind: Callable
    factors: tuple[Factors, ...]  # of the operands and of the result
    devices: Arrangement

    def __call__(self, *operands):
        return self.bind(*operands)

    def _choose(self, infos: Sequence) -> tuple[DeviceLayout, list[NamedSharding]]:
        shardings = [getattr(info, "sharding", None) for info in infos]
        layout, given = read_shardings(self.devices, shardings, [len(info.shape) for info in infos])
        tensors = [(f, info.shape) for f, info in zip(self.factors, infos, strict=True)]
        split = choose(tensors, layout.split.shape, given)
        return layout, [NamedSharding(layout.split, _spec(f, split)) for f in self.factors]

    def partition(self, mesh, operands, result):
        layout, (*given, out) = self._choose([*operands, result])

        def body(*operands):
            # As in ``partition``: XLA calls back in the context of whoever compiles.
            with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
                return self.bind(*compat.match_varying(*operands))

        return layout.whole, body, out, tuple(given)

    def infer(self, mesh, operands, result):
        open_result = jax.ShapeDtypeStruct(result.shape, result.dtype)
        return self._choose([*operands, open_result])[1][-1]

    def rule(self, mesh, operand_types, result_types) -> SdyShardingRule:
        """The factors in Shardy's terms."""
        mappings: list[ArrayMapping] = []
        whole: list[str] = []
        for i, factors in enumerate(self.factors):
            names: list = []
            for axis, name in enumerate(factors):
                if name == "k":
                    names.append(CompoundFactor("k", "k_of_block"))
                    flat = ["k_of_block"]
                else:
                    names.append(_factor(name) or f"t{i}_{axis}")
                    flat = [] if name else names[-1:]
                whole += flat
            mappings.append(ArrayMapping(*names))
        compound = any("k" in factors for factors in self.factors)
        kinds = [*operand_types, *result_types]
        sizes = {}
        if compound:
            blocks = _extents(
                [(f, tuple(t.shape)) for f, t in zip(self.factors, kinds, strict=True)]
            )["k"]
            sizes = {"k": blocks, "k_of_block": BLOCK}
            if any("k_blocks" in factors for factors in self.factors):
                sizes.pop("k")  # it is then the size of an axis
        return shardy.rule(mappings, len(mappings) - 1, sizes, whole)


def result_sharding(
    factors: Sequence[Factors], operands, out_shape, operation: str = "int8 convolution"
) -> NamedSharding | None:
    """The sharding of the result on an explicit mesh; None on any other.

    ``operation`` is what errors call it.

    Raises:
        ShardingTypeError: an operand is split along an axis that stays whole.
    """
    mesh = partition.explicit_mesh(*operands)
    if mesh is None:
        return None
    by_k = any(_factor(name) == "k" for each in factors for name in each)
    can_be = "Batch and output channels" if by_k else "The batch"
    for each, aval in zip(factors, operands, strict=False):
        for axis, (name, axes) in enumerate(
            zip(each, partition.given_partitions(aval), strict=True)
        ):
            if axes and name is None:
                raise compat.ShardingTypeError(
                    f"{operation}: axis {axis} of {partition.described(aval)} cannot be split; "
                    f"change its sharding with jax.sharding.reshard. {can_be} can be split."
                )
    split = _choose_explicit(mesh, factors, operands, out_shape)
    return NamedSharding(mesh, _spec(factors[-1], split))


def _choose_explicit(mesh, factors, operands, out_shape) -> Split:
    shapes = [*(aval.shape for aval in operands), out_shape]
    given = [*map(partition.given_partitions, operands), None]
    return choose(list(zip(factors, shapes, strict=True)), mesh.shape, given)


def _map_explicit(mesh, ctx, bind, factors, operands):
    """Lowers through ``shard_map`` over the explicit axes."""
    split = _choose_explicit(mesh, factors, ctx.avals_in, ctx.avals_out[0].shape)
    *specs, out = (_spec(f, split) for f in factors)
    explicit = {
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Explicit
    }

    def mapped(*operands):
        with jax.sharding.use_abstract_mesh(mesh):
            operands = [
                jax.sharding.reshard(a, NamedSharding(mesh, s))
                for a, s in zip(operands, specs, strict=True)
            ]
            return jax.shard_map(
                bind, in_specs=tuple(specs), out_specs=out, axis_names=explicit, check_vma=False
            )(*operands)

    return mlir.lower_fun(mapped, multiple_results=False)(ctx, *operands)


def lower(ctx, primitive: Primitive, factors: tuple[Factors, ...], operands, **params):
    """Lowers an operation on arrays that are, or may be, split over devices.

    Returns:
        The lowering's results, or None where the arrays are one device's.
    """
    devices = partition.devices_of(ctx)
    if devices is None:
        return None
    mesh, arrangement = devices
    bind = functools.partial(primitive.bind, **params)
    if mesh is not None:
        return _map_explicit(mesh, ctx, bind, factors, operands)
    call = _Call(bind, factors, arrangement)
    return partitioned_call.spread(ctx, call, operands)
