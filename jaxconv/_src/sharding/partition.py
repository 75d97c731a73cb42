"""The partition of operations over devices: one algebra for all of JAX's sharding modes.

A convolution has the *factors* batch, n, c, k and one for every spatial axis of x and y (s0, s1,
s2); the filter's spatial axes are never split. With groups, the channel axes of x and y and the
filter's k run group by group, and only whole groups are split: the factor g replaces all three, and
the filter's c stays whole. Every array of a call is a ``Tensor``, which assigns factors to its
axes, and says how many elements of an axis stay together: a group's channels, or a block of 32 in a
layout. Terms of an epilogue are split like the corresponding axes of y.

The result of each operation lacks some factors (fprop: c, dgrad: k, wgrad: n and the spatial ones;
with groups no channels). Splitting these needs a sum of partial results over devices. Splitting
spatial factors needs an exchange of the rows that windows share (``halo``). Splitting any other
factor needs no communication.

A pass over arrays (``split_pass``) assigns factors to its axes; the algebra is the same.

There are three kinds of meshes:

- automatic (``jit`` with shardings): the lowering emits ``custom_partitioning``; XLA's partitioner
  then asks ``_Partitioned`` for the program of one device;
- explicit (axis types ``Explicit``): the types say who holds what, ``result_shardings`` while
  tracing, and ``_map_explicit`` lowers through ``shard_map``;
- manual (``shard_map``): the arrays already belong to one device, so nothing is done.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import SdyShardingRule
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from jaxconv._src import compat
from jaxconv._src.problem.spec import ConvSpec, Op
from jaxconv._src.sharding import explicit_mesh, halo, partitioned_call, shardy
from jaxconv._src.sharding.device_layout import (
    Arrangement,
    DeviceLayout,
    Partitions,
    read_shardings,
)
from jaxconv._src.sharding.explicit_mesh import described, given_partitions, partition_spec
from jaxconv._src.sharding.splittable import (
    Factor,
    Split,
    Splittable,
    Tensor,
    Tensors,
    assigned,
    dividing,
    parts_of,
)

if TYPE_CHECKING:
    from jaxconv._src.call.call import Call

# The axes of each tensor that can be split, in addition to the spatial ones of x and y.
_AXES = {"x": ("batch", "n", "c"), "w": ("batch", "c", "k"), "y": ("batch", "n", "k")}
SPATIAL = ("s0", "s1", "s2")  # the factors of spatial axes

# The names of a factor's axes in errors.
_WORDS = {
    "n": "batch",
    "s0": "spatial axes of x",
    "k": "output channels",
    "g": "whole groups",
    "c": "input channels",
}


def tensor(spec: ConvSpec, role: str, shape: Sequence[int], name: str = "") -> Tensor:
    """An array with the axes of ``role``, by default that tensor itself."""
    axes: list[Factor | None] = [None] * len(shape)
    for factor, axis in factors(spec, role).items():
        axes[axis] = channel(spec, role, shape[axis]) if factor == "g" else Factor(factor)
    return Tensor(name or role, tuple(shape), tuple(axes))


def channel(spec: ConvSpec, role: str, extent: int) -> Factor:
    """The factor of an axis of channels, of x ("x") or of y."""
    if spec.groups == 1:
        return Factor("c" if role == "x" else "k")
    together = extent // spec.groups
    return Factor("g", together, "c_of_g" if role == "x" else "k_of_g")


def factors(spec: ConvSpec, role: str) -> dict[str, int]:
    """The factors of one tensor, and the position of each in the array."""
    found = {}
    for name in _AXES[role]:
        if (name == "batch" and not spec.batched) or (
            spec.groups > 1 and (role, name) == ("w", "c")
        ):
            continue
        grouped = spec.groups > 1 and name in ("c", "k")
        found["g" if grouped else name] = spec.axis(role, name)
    if role != "w":
        found |= zip(SPATIAL, spec.axes(role)[-1 - spec.rank : -1], strict=False)
    return found


def contracted(operands: Sequence[Tensor], result: Tensor) -> list[str]:
    """The factors over which the operation sums, except the channels of one group."""
    lhs, rhs = (tensor.extents() for tensor in operands[:2])
    return [name for name in lhs if name in rhs and result.axis(name) is None]


def _received(
    tensors: Sequence[Tensor], mesh: Mapping[str, int], given: Sequence, split: Split
) -> float:
    """The elements that each device receives, without neighbours' rows; arguments of ``choose``.

    These are the elements that it lacks of its parts of the operands and of the given result, and
    sums. A sum over devices costs as much as gathering the result twice; once if the result is then
    split over the same axes, because XLA scatters it.
    """
    total = 0.0
    for each, held in zip(tensors, given, strict=True):
        wanted, elements = each.partitions(split), math.prod(each.shape)
        if each is tensors[-1]:
            summed = [axis for name in contracted(tensors, each) for axis in split.get(name, ())]
            scattered = set(summed) <= {axis for axes in held or () for axis in axes}
            returned = elements / parts_of(sum(wanted, ()), mesh) * (1 if scattered else 2)
            total += returned * (1 - 1 / parts_of(summed, mesh))
            held, wanted = wanted, held
        if held is not None and wanted is not None:
            lacked = [a for had, to in zip(held, wanted, strict=True) for a in had if a not in to]
            total += elements / parts_of(sum(wanted, ()), mesh) * (1 - 1 / parts_of(lacked, mesh))
    return total


def choose(
    op: Op,
    spec: ConvSpec,
    tensors: Sequence[Tensor],
    mesh: Mapping[str, int],
    given: Sequence,
    even: bool = False,
    terms: Sequence[tuple[Tensor, Partitions]] = (),
) -> Split:
    """The mesh axes of every factor, from the partition of the operands and possibly the result.

    A mesh axis serves one factor. If two factors claim it, batch, n and spatial axes come first
    (activations stay in place, a filter is gathered). Between input and output channels, the choice
    minimises the received elements (``_received``); with a tie, the contracted channels come first.
    If two tensors split one factor differently, the finer split is kept; with a tie, that of x or
    y.

    Args:
        op, spec: the operation.
        tensors: the left operand, the right one and the result.
        mesh: size of every mesh axis.
        given: ``Partitions`` of these (None: open).
        even: whether spatial axes are also split only if their extents divide.
        terms: the terms of an epilogue and their partitions; they come last.
    """
    extents = {name: extent for each in tensors for name, extent in each.extents().items()}

    def fitting(name: str, axes: tuple[str, ...]) -> tuple[str, ...]:
        """The longest prefix of mesh axes over which the factor splits."""
        if name not in SPATIAL:
            return dividing(axes, extents[name], mesh)
        at = SPATIAL.index(name)
        while axes and halo.plan(op, spec, at, parts_of(axes, mesh), even) is None:
            axes = axes[:-1]
        return axes

    asking = [(t, split) for t, split in zip(tensors, given, strict=True) if split is not None]
    asking.sort(key=lambda asked: asked[0].name == "w")
    asking += terms

    def in_order(*channels: str) -> Split:
        names = ("batch", "n", *SPATIAL, "g", *channels)
        return assigned(names, asking, fitting, mesh)

    summed = contracted(tensors, tensors[-1])
    first, second = sorted(("c", "k"), key=lambda name: name not in summed)
    return min(
        (in_order(first, second), in_order(second, first)),
        key=lambda split: _received(tensors, mesh, given, split),
    )


def choose_for(
    call: Call, tensors: Tensors, mesh: Mapping[str, int], given: Sequence, explicit: bool
) -> Split:
    """``choose`` for a call, from the partition of its arrays, as in ``Splittable.choose_split``.

    On explicit meshes the types of all operands decide: lax's type of the result is also split over
    the axes of a term.
    """
    operands, results = tensors
    leading, y = [*operands[:2], results[0]], given[len(operands)]
    if explicit:
        terms = list(zip(operands[2:], given[2 : len(operands)], strict=True))
        return choose(call.op, call.conv, leading, mesh, [*given[:2], None], True, terms)
    if y is None:  # open: like a term of the result's shape, which the result meets
        alike = [i for i, a in enumerate(operands[2:], 2) if a.axes == results[0].axes]
        y = given[alike[0]] if alike else None
    return choose(call.op, call.conv, leading, mesh, [*given[:2], y], call.even)


def sum_over(array: jax.Array, axes: Sequence[str]) -> jax.Array:
    """The sum of all devices' arrays along some mesh axes.

    If other axes are automatic, XLA:CPU (jaxlib 0.10.2) ends the process at a sum in 16 bits.
    """
    if not axes:
        return array
    kinds = set(jax.sharding.get_abstract_mesh().axis_types)
    if array.dtype.itemsize == 2 and kinds > {AxisType.Manual}:
        return lax.psum(array.astype(jnp.float32), tuple(axes)).astype(array.dtype)
    return lax.psum(array, tuple(axes))


def merge_moments(moments: jax.Array, names: tuple[str, ...], parts: int, count: int) -> jax.Array:
    """The statistics over all devices' parts, each of ``count`` elements of a channel.

    With mean_i and M_i of part i, (..., 2, C), and avg over the parts, one all-reduce gives

        mean = avg of mean_i,   M / (parts * count) = avg of (mean_i^2 + M_i / count) - mean^2

    in float64. With r = |mean| / deviation, the sums' roundings give M a relative error of at most
    (parts + 4) 2^-53 r^2: 3e-7 for 256 parts and r = 3000. Using the deviations of the means from
    the total mean would need a second all-reduce and be hardly more accurate: each mean_i is
    rounded to float32, which already gives M an error of up to 2^-23 r, 4e-4 for r = 3000, if the
    means differ. A third row, (..., 3, C), has the rounding error of each mean.
    """
    with jax.enable_x64(True):
        wide = moments.astype(np.float64)
        mean, squares, *rest = (wide[..., i, :] for i in range(moments.shape[-2]))
        mean = sum(rest, mean)
        local = jnp.stack([mean, mean * mean + squares / count])
        mean, square = lax.psum(local, names) / parts
        variance = jnp.maximum(square - mean * mean, 0)
        rest = [mean - mean.astype(moments.dtype)] * len(rest)
        found = jnp.stack([mean, parts * count * variance, *rest], -2)
        return found.astype(moments.dtype)


@dataclasses.dataclass(frozen=True)
class Part:
    """One device's part of a call.

    Attributes:
        call: the whole call.
        operands, results: its arrays.
        split: the mesh axes of each factor.
        mesh: size of every mesh axis.
        plans: the exchange of rows by spatial axis.
    """

    call: Call
    operands: Sequence[Tensor]
    results: Sequence[Tensor]
    split: Split
    mesh: Mapping[str, int]
    plans: dict[int, halo.HaloPlan]

    @classmethod
    def of(cls, call: Call, tensors, split: Split, mesh: Mapping[str, int]) -> Part:
        operands, results = tensors
        plans: dict[int, halo.HaloPlan] = {}
        for at, name in enumerate(SPATIAL):
            if (parts := parts_of(split.get(name, ()), mesh)) > 1:
                plan = halo.plan(call.op, call.conv, at, parts)
                assert plan is not None, "an axis is split only where there is a plan"
                plans[at] = plan
        return cls(call, operands, results, split, mesh, plans)

    @property
    def conv(self) -> ConvSpec:
        """The device's convolution, for operands after the exchange of rows."""
        local = halo.local_spec(self.call.conv, self.plans)
        return dataclasses.replace(local, groups=local.groups // self.parts("g"))

    @property
    def summed(self) -> list[str]:
        """The mesh axes over which the results are partial sums."""
        names = contracted(self.operands, self.results[0])
        return [axis for name in names for axis in self.split.get(name, ())]

    @property
    def computes_more(self) -> bool:
        """Whether the device computes rows of y outside its part."""
        rows = self.conv.out_spatial
        return any(rows[at] != plan.result for at, plan in self.plans.items())

    def parts(self, *names: str) -> int:
        """The number of devices over which some factors are split."""
        return math.prod(parts_of(self.split.get(name, ()), self.mesh) for name in names)

    def _rows(self, array: Tensor):
        """Axis, devices and plan of every split spatial axis."""
        for at, plan in self.plans.items():
            if (axis := array.axis(SPATIAL[at])) is not None:
                yield axis, halo.Devices(self.split[SPATIAL[at]], self.mesh), plan

    def exchanged(self, lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Both operands of the convolution with all rows that the device reads."""
        for axis, devices, plan in self._rows(self.operands[0]):
            take = halo.taken if self.operands[0].whole(axis) else halo.exchange
            lhs = take(lhs, axis, devices, plan)
        for axis, devices, plan in self._rows(self.operands[1]):
            if plan.result_extent < plan.parts * plan.result:
                rhs = halo.existing(rhs, axis, devices, plan.result_extent)
        return lhs, rhs

    def own(self, result: jax.Array, array: Tensor | None = None) -> jax.Array:
        """The device's rows of a result, by default of the first one."""
        if self.call.op is not Op.WGRAD:
            for axis, devices, plan in self._rows(array or self.results[0]):
                result = halo.own_rows(result, axis, devices, plan)
        return result

    def compute(self, *operands: jax.Array) -> list[jax.Array]:
        """The results of the primitive on the device's arrays."""
        call, extents = self.call.with_conv(self.conv), self.conv.out_spatial
        given = list(operands)
        for i, array in enumerate(self.operands[2:], 2):
            for axis, devices, plan in self._rows(array):
                rows = extents[SPATIAL.index(array.axes[axis].name)]
                given[i] = halo.placed_rows(given[i], axis, devices, plan, rows)
        results = call.bind(*compat.match_varying(*given))
        return [self.own(each, t) for each, t in zip(results, self.results, strict=True)]


# --- automatic sharding ---


@dataclasses.dataclass(frozen=True)
class _Partitioned:
    """An operation for ``custom_partitioning``: its static parameters and callbacks."""

    call: Splittable
    shapes: tuple[tuple[int, ...], ...]  # of the operands
    devices: Arrangement

    def __call__(self, *operands):
        return tuple(self.call.bind(*operands))

    def _chosen(self, infos: Sequence) -> tuple[DeviceLayout, Tensors, Split, list[NamedSharding]]:
        """The partition of the call, and the sharding of every operand and result."""
        tensors = self.call.tensors(*self.shapes)
        shardings = [getattr(info, "sharding", None) for info in infos]
        ranks = [len(array.shape) for arrays in tensors for array in arrays]
        layout, given = read_shardings(self.devices, shardings, ranks)
        tensors = self.call.held(tensors, given)
        split = self.call.choose_split(tensors, layout.split.shape, given, False)
        of = [
            NamedSharding(layout.split, partition_spec(array.partitions(split)))
            for arrays in tensors
            for array in arrays
        ]
        return layout, tensors, split, of

    def partition(self, mesh, operands, results):
        """One device's program, and the shardings of its operands and results."""
        layout, tensors, split, shardings = self._chosen([*operands, *results])

        def body(*operands):
            # XLA calls back in the context of the compiling thread. With that thread's explicit
            # mesh the sum would be lowered with a sharding, which its reduction cannot have.
            with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
                return tuple(self.call.on_devices(tensors, split, layout.whole.shape, *operands))

        count = len(operands)
        return layout.whole, body, tuple(shardings[count:]), tuple(shardings[:count])

    def infer(self, mesh, operands, results):
        """The results' shardings, for the partitioner that preceded Shardy."""
        open_results = [jax.ShapeDtypeStruct(r.shape, r.dtype) for r in results]
        return tuple(self._chosen([*operands, *open_results])[-1][len(operands) :])

    def rule(self, mesh, operand_types, result_types) -> SdyShardingRule:
        tensors = self.call.tensors(*self.shapes)
        return shardy.rule_of(*tensors, self.call.summed(tensors))


# --- explicit sharding ---


def _chosen_explicitly(
    call: Splittable, mesh: AbstractMesh, avals: Sequence
) -> tuple[Tensors, Split]:
    tensors = call.tensors(*(aval.shape for aval in avals))
    given = [*map(given_partitions, avals), *[None] * len(tensors[1])]
    tensors = call.held(tensors, given)
    return tensors, call.choose_split(tensors, mesh.shape, given, True)


def _check_explicit(
    call: Call, mesh: AbstractMesh, tensors: Tensors, avals: Sequence, split: Split
) -> None:
    """Refuses shardings that would move an activation, or that are ambiguous.

    Only in the forward direction: the results of gradients are resharded like their operands, so
    any choice gives the same types.
    """
    if call.op is not Op.FPROP:
        return
    operands = tensors[0][:2]
    can_be = dict.fromkeys(f.name for each in operands for f in each.axes if f)
    rows = dict(zip(SPATIAL, call.conv.out_spatial, strict=False))
    for array, aval in zip(operands, avals, strict=False):
        for axis, (factor, wanted) in enumerate(
            zip(array.axes, given_partitions(aval), strict=True)
        ):
            name = factor.name if factor else ""
            if not wanted or split.get(name, ()) == wanted or (array.name, name) == ("w", "c"):
                continue
            parts = parts_of(wanted, mesh.shape)
            if not factor:
                reason = f"axis {axis} of {array.name} cannot be split"
            elif name in SPATIAL and rows[name] % parts:
                reason = (
                    f"axis {axis} of x is split {parts} ways, which does not divide the "
                    f"{rows[name]} positions of the result"
                )
            elif array.extents()[name] % parts:
                whole = "whole groups" if name == "g" else f"blocks of {factor.together}"
                reason = (
                    f"axis {axis} of {array.name} splits into {whole} only, of "
                    f"{array.extents()[name]}"
                )
            else:
                reason = f"axis {axis} of {array.name} conflicts with another axis"
            types = zip(operands, avals, strict=False)
            got = ", ".join(f"{each.name} of type {described(aval)}" for each, aval in types)
            words = [_WORDS[name] for name in _WORDS if name in can_be]
            raise compat.ShardingTypeError(
                f"{call.subject}: {reason}. Got {got}, {call.conv.groups} groups. Change an "
                f"operand's sharding with jax.sharding.reshard; {', '.join(words)} can be split, "
                "each over mesh axes of its own."
            )


def _explicit_split(
    call: Splittable, avals: Sequence
) -> tuple[AbstractMesh, Tensors, Split] | None:
    mesh = explicit_mesh.mesh_of(*avals)
    if mesh is None:
        return None
    for aval in avals:
        if aval.sharding.spec.unreduced or aval.sharding.spec.reduced:
            raise compat.ShardingTypeError(
                f"{call.subject}: expected an operand without unreduced or reduced mesh axes, got "
                f"{described(aval)}; jax.sharding.reshard it first"
            )
    return mesh, *_chosen_explicitly(call, mesh, avals)


def result_shardings(call: Splittable, *avals) -> list[NamedSharding] | None:
    """The shardings of an operation's results on an explicit mesh; None on any other.

    Raises:
        ShardingTypeError: an operand is a partial sum.
    """
    found = _explicit_split(call, avals)
    return None if found is None else _of_results(*found)


def _of_results(mesh: AbstractMesh, tensors: Tensors, split: Split) -> list[NamedSharding]:
    return [NamedSharding(mesh, partition_spec(r.partitions(split))) for r in tensors[1]]


def result_type(call: Call, shape: Sequence[int], *avals) -> Any:
    """The type of a convolution's first result, from those of its operands.

    Raises:
        ShardingTypeError: the operands' shardings do not go together.
    """
    sharding = avals[0].sharding
    if (found := _explicit_split(call, avals)) is not None:
        mesh, tensors, split = found
        _check_explicit(call, mesh, tensors, avals, split)
        sharding = _of_results(*found)[0]
    # Derived from an operand's type, to keep its varying mesh axes (shard_map).
    return avals[0].update(
        shape=tuple(shape),
        dtype=np.dtype(call.out_dtype),
        weak_type=False,
        sharding=sharding,
    )


def devices_of(ctx) -> tuple[AbstractMesh | None, Arrangement] | None:
    """The devices over which the arrays of a lowered operation are, or may be, split.

    Returns:
        The explicit mesh, or None and the known part of another mesh; None alone if the arrays
        belong to one device, or one of them has no elements.
    """
    mesh = explicit_mesh.mesh_of(*ctx.avals_in)
    devices = Arrangement(() if mesh is not None else compat.device_axes(ctx))
    split = devices.axes if mesh is None else mesh.size > 1
    if not split or any(0 in aval.shape for aval in (*ctx.avals_in, *ctx.avals_out)):
        return None
    return mesh, devices


def _map_explicit(mesh: AbstractMesh, call: Splittable, ctx, operands):
    """Lowers through ``shard_map`` over the explicit axes; the types give each device's part."""
    tensors, split = _chosen_explicitly(call, mesh, ctx.avals_in)
    in_specs, out_specs = (
        tuple(partition_spec(each.partitions(split)) for each in arrays) for arrays in tensors
    )

    def local(*operands):
        return tuple(call.on_devices(tensors, split, mesh.shape, *operands))

    def mapped(*operands):
        with jax.sharding.use_abstract_mesh(mesh):
            operands = [
                jax.sharding.reshard(a, NamedSharding(mesh, s))
                for a, s in zip(operands, in_specs, strict=True)
            ]
            return jax.shard_map(
                local,
                in_specs=in_specs,
                out_specs=out_specs,
                axis_names=explicit_mesh.explicit_axes(mesh),
                check_vma=False,
            )(*operands)

    return mlir.lower_fun(mapped, multiple_results=True)(ctx, *operands)


# --- lowering ---


def lower(ctx, call: Splittable, operands: Sequence) -> Any:
    """Lowers an operation on arrays that are, or may be, split over devices.

    Returns:
        The lowering's results, or None if the arrays belong to one device and the operation is
        lowered unchanged.
    """
    devices = devices_of(ctx)
    if devices is None:
        return None
    mesh, arrangement = devices
    if mesh is not None:
        return _map_explicit(mesh, call, ctx, operands)
    shapes = tuple(aval.shape for aval in ctx.avals_in)
    return partitioned_call.spread(ctx, _Partitioned(call, shapes, arrangement), operands)
