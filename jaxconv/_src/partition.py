"""How the three operations are split over devices: one algebra, under every way JAX has to shard.

A convolution has the *factors* batch, n, c, k and one for every spatial axis of x and y (s0, s1,
s2); those of the filter are never split. With groups, the channel axes of x and y and the filter's
k run group by group, and only whole groups are split: the factor g stands for all three, and the
filter's c stays whole. Each operation has factors that its result lacks (fprop: c, dgrad: k, wgrad:
n and the spatial ones; no channels in groups). Splitting those needs a sum of the partial results
over devices, and splitting spatial ones an exchange of the rows that windows share (``halo``);
splitting any other one needs no communication.

Three kinds of meshes lead here:

- automatic (``jit`` with shardings): the lowering emits ``custom_partitioning``; XLA's partitioner
  then asks ``_Call.partition`` for the program of one device;
- explicit (axis types ``Explicit``): the types say who holds what, ``result_sharding`` while
  tracing, and ``_map_explicit`` lowers through ``shard_map``;
- manual (``shard_map``): the arrays are one device's already, and nothing is done.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import SdyShardingRule
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jaxconv._src import compat, halo, partitioned_call, shardy
from jaxconv._src.device_layout import Arrangement, DeviceLayout, Partitions, read_shardings
from jaxconv._src.spec import ConvSpec, Op

Split = dict[str, tuple[str, ...]]  # mesh axes per factor

# The axes of each tensor that can be split at all, besides the spatial ones of x and y.
_AXES = {"x": ("batch", "n", "c"), "w": ("batch", "c", "k"), "y": ("batch", "n", "k")}
_SPATIAL = ("s0", "s1", "s2")  # the factors of spatial axes


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
        found |= zip(_SPATIAL, spec.axes(role)[-1 - spec.rank : -1], strict=False)
    return found


def contracted(op: Op, spec: ConvSpec) -> tuple[str, ...]:
    """The factors that are summed over; the channels of one group are none."""
    lhs, rhs, out = (factors(spec, role) for role in op.roles)
    return tuple(name for name in lhs if name in rhs and name not in out)


def _parts(axes: Sequence[str], mesh: Mapping[str, int]) -> int:
    return math.prod(mesh[axis] for axis in axes)


def _extents(op: Op, spec: ConvSpec, lhs_shape, rhs_shape) -> dict[str, int]:
    sizes = spec.sizes(op, lhs_shape, rhs_shape)
    return {"batch": sizes.batch, "n": sizes.n, "g": spec.groups, "c": sizes.c, "k": sizes.k}


def dividing(axes: Sequence[str], extent: int, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The longest prefix of mesh axes over which ``extent`` splits evenly."""
    taken = 1
    for i, axis in enumerate(axes):
        taken *= mesh[axis]
        if extent % taken:
            return tuple(axes[:i])
    return tuple(axes)


def _received(
    op: Op, spec: ConvSpec, extents: Mapping[str, int], mesh: Mapping[str, int], given, split: Split
) -> float:
    """How many elements each device receives, but for rows of neighbours; arguments of ``choose``.

    That is what it lacks of its parts of the operands and of the result as given, and sums. A sum
    over devices costs as much as gathering the result, and that again for its return, but where the
    result is then split over the same axes: XLA scatters it.
    """
    pixels = {"x": spec.in_spatial, "w": spec.filter_spatial, "y": spec.out_spatial}
    total = 0.0
    for role, held in zip(op.roles, given, strict=True):
        wanted = partitions(spec, role, split)
        elements = math.prod(extents[name] for name in _AXES[role]) * math.prod(pixels[role])
        if role == op.roles[2]:
            summed = [axis for name in contracted(op, spec) for axis in split.get(name, ())]
            scattered = set(summed) <= {axis for axes in held or () for axis in axes}
            returned = elements / _parts(sum(wanted, ()), mesh) * (1 if scattered else 2)
            total += returned * (1 - 1 / _parts(summed, mesh))
            held, wanted = wanted, held
        if held is not None and wanted is not None:
            lacked = [a for had, to in zip(held, wanted, strict=True) for a in had if a not in to]
            total += elements / _parts(sum(wanted, ()), mesh) * (1 - 1 / _parts(lacked, mesh))
    return total


def choose(
    op: Op,
    spec: ConvSpec,
    extents: Mapping[str, int],
    mesh: Mapping[str, int],
    given: Sequence,
    even: bool = False,
) -> Split:
    """The mesh axes of every factor, from how the operands, and perhaps the result, are split.

    A mesh axis serves one factor. Where two ask for it, batch, n and spatial axes come first (the
    activations stay where they are, a filter is gathered). Between input and output channels the
    devices receive as little as possible (``_received``); of equal ones, the contracted channels
    come first. Of two tensors that split one factor differently, the finer split is kept; of equal
    ones, that of x or y.

    Args:
        op, spec: the operation.
        extents: extent of every factor but the spatial ones.
        mesh: size of every mesh axis.
        given: ``Partitions`` of the left operand, the right one and the result (None: open).
        even: whether spatial axes, too, are only split where their extents divide.
    """

    def fitting(name: str, axes: Sequence[str], used: set[str]) -> tuple[str, ...]:
        """The longest prefix of free mesh axes over which the factor splits."""
        axes = tuple(itertools.takewhile(lambda a: a not in used, axes))
        if name not in _SPATIAL:
            return dividing(axes, extents[name], mesh)
        at = _SPATIAL.index(name)
        while axes and halo.plan(op, spec, at, _parts(axes, mesh), even) is None:
            axes = axes[:-1]
        return axes

    tensors = [
        (role, factors(spec, role), split)
        for role, split in zip(op.roles, given, strict=True)
        if split is not None
    ]
    tensors.sort(key=lambda tensor: tensor[0] == "w")

    def in_order(*channels: str) -> Split:
        used: set[str] = set()
        chosen: Split = {}
        for name in ("batch", "n", *_SPATIAL, "g", *channels):
            asked = [fitting(name, split[at[name]], used) for _, at, split in tensors if name in at]
            best = max(asked, key=lambda axes: _parts(axes, mesh), default=())
            if best:
                chosen[name] = best
                used.update(best)
        return chosen

    first, second = sorted(("c", "k"), key=lambda name: name not in contracted(op, spec))
    return min(
        (in_order(first, second), in_order(second, first)),
        key=lambda split: _received(op, spec, extents, mesh, given, split),
    )


def partitions(spec: ConvSpec, role: str, split: Split) -> Partitions:
    """How the array of one tensor is split."""
    axes: list[tuple[str, ...]] = [()] * len(spec.axes(role))
    for name, at in factors(spec, role).items():
        axes[at] = split.get(name, ())
    return tuple(axes)


def partition_spec(partitions: Partitions) -> PartitionSpec:
    return PartitionSpec(
        *(axes if len(axes) > 1 else (axes[0] if axes else None) for axes in partitions)
    )


def _local(primitive, op: Op, split: Split, mesh: Mapping[str, int], lhs, rhs, *, spec, out_dtype):
    """One device's part: rows exchanged, the operation on local arrays, partial results summed."""
    summed = [axis for name in contracted(op, spec) for axis in split.get(name, ())]
    lhs_at, rhs_at, out_at = (factors(spec, role) for role in op.roles)
    plans: dict[int, halo.Plan] = {}
    devices = {name: halo.Devices(split.get(name, ()), mesh) for name in _SPATIAL}
    for at, name in enumerate(_SPATIAL):
        if (parts := devices[name].count) == 1:
            continue
        plan = halo.plan(op, spec, at, parts)
        assert plan is not None, "an axis is split only where there is a plan"
        plans[at] = plan
        lhs = halo.exchange(lhs, lhs_at[name], devices[name], plan)
        if op is Op.WGRAD and plan.result_extent < parts * plan.result:
            rhs = halo.existing(rhs, rhs_at[name], devices[name], plan.result_extent)
    groups = spec.groups // _parts(split.get("g", ()), mesh)
    local = dataclasses.replace(halo.local_spec(spec, plans), groups=groups)
    out = primitive.bind(*compat.match_varying(lhs, rhs), spec=local, out_dtype=out_dtype)
    if op is not Op.WGRAD:
        for at, plan in plans.items():
            name = _SPATIAL[at]
            out = halo.own_rows(out, out_at[name], devices[name], plan)
    return sum_over(out, summed) if summed else out


def sum_over(array: jax.Array, axes: Sequence[str]) -> jax.Array:
    """The sum of all devices' arrays along some mesh axes.

    Where other axes are automatic, XLA:CPU (jaxlib 0.10.2) ends the process over a sum in 16 bits.
    """
    kinds = set(jax.sharding.get_abstract_mesh().axis_types)
    if array.dtype.itemsize == 2 and kinds > {AxisType.Manual}:
        return lax.psum(array.astype(jnp.float32), tuple(axes)).astype(array.dtype)
    return lax.psum(array, tuple(axes))


# --- automatic sharding ---


@dataclasses.dataclass(frozen=True)
class _Call:
    """One operation as ``custom_partitioning`` sees it: its static half, and its callbacks."""

    primitive: Primitive
    op: Op
    spec: ConvSpec
    out_dtype: object
    devices: Arrangement

    def __call__(self, lhs, rhs):
        return self.primitive.bind(lhs, rhs, spec=self.spec, out_dtype=self.out_dtype)

    def _choose(self, infos: Sequence) -> tuple[DeviceLayout, Split]:
        shardings = [getattr(info, "sharding", None) for info in infos]
        layout, given = read_shardings(self.devices, shardings, [len(info.shape) for info in infos])
        extents = _extents(self.op, self.spec, infos[0].shape, infos[1].shape)
        return layout, choose(self.op, self.spec, extents, layout.split.shape, given)

    def _shardings(self, layout: DeviceLayout, split: Split) -> list[NamedSharding]:
        return [
            NamedSharding(layout.split, partition_spec(partitions(self.spec, role, split)))
            for role in self.op.roles
        ]

    def partition(self, mesh, arguments, result):
        """One device's program, and the shardings of operands and result that it works with."""
        layout, split = self._choose([*arguments, result])
        *operands, out = self._shardings(layout, split)

        def body(lhs, rhs):
            # XLA calls back in the context of whoever compiles. On that one's explicit mesh the
            # sum would be lowered with a sharding, which its reduction cannot have.
            with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
                return _local(
                    self.primitive,
                    self.op,
                    split,
                    layout.whole.shape,
                    lhs,
                    rhs,
                    spec=self.spec,
                    out_dtype=self.out_dtype,
                )

        return layout.whole, body, out, tuple(operands)

    def infer(self, mesh, arguments, result):
        """The result's sharding, for the partitioner that preceded Shardy."""
        open_result = jax.ShapeDtypeStruct(result.shape, result.dtype)
        return self._shardings(*self._choose([*arguments, open_result]))[2]

    def rule(self, mesh, operand_types, result_types) -> SdyShardingRule:
        arrays = [
            (role, kind.shape, factors(self.spec, role))
            for role, kind in zip(self.op.roles, (*operand_types, *result_types), strict=True)
        ]
        summed = contracted(self.op, self.spec)
        return shardy.convolution_rule(self.spec, arrays[:-1], arrays[-1:], summed)


# --- explicit sharding ---


def explicit_mesh(*avals) -> AbstractMesh | None:
    """The mesh of some types if it has explicit axes, along which a sharding is part of the type.

    Raises:
        ShardingTypeError: the types are of different meshes.
    """
    meshes = {aval.sharding.mesh for aval in avals if not aval.sharding.mesh.empty}
    meshes = {mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types}
    if len(meshes) > 1:
        raise compat.ShardingTypeError(
            f"convolution: expected operands on one mesh, got {', '.join(map(str, meshes))}"
        )
    return meshes.pop() if meshes else None


def given_partitions(aval) -> Partitions:
    """How a type says that its array is split."""
    spec = tuple(aval.sharding.spec)
    axes = [(a,) if isinstance(a, str) else tuple(a or ()) for a in spec]
    return (*axes, *((),) * (len(aval.shape) - len(axes)))


def _choose_explicit(op: Op, spec: ConvSpec, mesh: AbstractMesh, lhs, rhs) -> Split:
    extents = _extents(op, spec, lhs.shape, rhs.shape)
    given = [given_partitions(lhs), given_partitions(rhs), None]
    return choose(op, spec, extents, mesh.shape, given, even=True)


def _check_explicit(op: Op, spec: ConvSpec, mesh: AbstractMesh, lhs, rhs, split: Split) -> None:
    """Refuses what would move an activation, or what has two meanings.

    Only in the forward direction: the gradients' results are brought to their operands' shardings,
    so there any choice gives the same types.
    """
    if op is not Op.FPROP:
        return
    rows = dict(zip(_SPATIAL, spec.out_spatial, strict=False))
    for role, aval in zip(op.roles, (lhs, rhs), strict=False):
        given, at = given_partitions(aval), factors(spec, role)
        names = {axis: name for name, axis in at.items()}
        for axis, wanted in enumerate(given):
            name = names.get(axis)
            got = split.get(name, ()) if name else ()
            if not wanted or got == wanted or (role, name) == ("w", "c"):
                continue
            parts = _parts(wanted, mesh.shape)
            if name is None:
                reason = f"axis {axis} of {role} cannot be split"
            elif name == "g" and spec.groups % parts:
                reason = f"axis {axis} of {role} splits into whole groups only, of {spec.groups}"
            elif name in _SPATIAL and rows[name] % parts:
                reason = (
                    f"axis {axis} of x is split {parts} ways, which does not divide the "
                    f"{rows[name]} positions of the result"
                )
            else:
                reason = f"axis {axis} of {role} conflicts with another axis"
            raise compat.ShardingTypeError(
                f"convolution: {reason}. Got x of type {described(lhs)}, w of type "
                f"{described(rhs)}, {spec.groups} groups. Change an operand's sharding with "
                "jax.sharding.reshard; batch, spatial axes of x, output channels, whole groups and "
                "input channels can be split, each over mesh axes of its own."
            )


def described(aval) -> str:
    return aval.str_short(short_dtypes=True)


def result_sharding(op: Op, spec: ConvSpec, lhs, rhs) -> NamedSharding | None:
    """The sharding of an operation's result on an explicit mesh; None on any other.

    Raises:
        ShardingTypeError: the operands' shardings do not go together.
    """
    mesh = explicit_mesh(lhs, rhs)
    if mesh is None:
        return None
    for aval in (lhs, rhs):
        if aval.sharding.spec.unreduced or aval.sharding.spec.reduced:
            raise compat.ShardingTypeError(
                f"convolution: expected an operand without unreduced or reduced mesh axes, got "
                f"{described(aval)}; jax.sharding.reshard it first"
            )
    split = _choose_explicit(op, spec, mesh, lhs, rhs)
    _check_explicit(op, spec, mesh, lhs, rhs, split)
    return NamedSharding(mesh, partition_spec(partitions(spec, op.roles[2], split)))


def devices_of(ctx) -> tuple[AbstractMesh | None, Arrangement] | None:
    """What the arrays of an operation that is lowered are, or may be, split over.

    Returns:
        The explicit mesh, or None and what is known of any other; None alone where the arrays are
        one device's, or one of them has no elements.
    """
    mesh = explicit_mesh(*ctx.avals_in)
    devices = Arrangement(() if mesh is not None else compat.device_axes(ctx))
    split = devices.axes if mesh is None else mesh.size > 1
    if not split or any(0 in aval.shape for aval in (*ctx.avals_in, *ctx.avals_out)):
        return None
    return mesh, devices


def like(array: jax.Array, aval) -> jax.Array:
    """``array`` with the sharding that the type ``aval`` has on an explicit mesh."""
    if explicit_mesh(aval) is None or jax.typeof(array).sharding == aval.sharding:
        return array
    return jax.sharding.reshard(array, aval.sharding)


def with_out_sharding(array: jax.Array, out_sharding) -> jax.Array:
    """A result with the sharding that the caller demands by the ``out_sharding`` of lax.

    Raises:
        TypeError, ValueError: as lax does, for one that names no explicit mesh axes.
    """
    sharding = compat.canonical_out_sharding(out_sharding, "conv_general_dilated")
    if sharding is None or AxisType.Explicit not in sharding.mesh.axis_types:
        return array
    return jax.sharding.reshard(array, sharding)


def split_over(array: jax.Array, axis: int) -> tuple[str, ...]:
    """The explicit mesh axes that split one axis of an array."""
    aval = jax.typeof(array)
    return () if explicit_mesh(aval) is None else given_partitions(aval)[axis]


def _reshape(array: jax.Array, shape: Sequence[int], given: Sequence) -> jax.Array:
    if not any(given):  # JAX then finds the result's sharding itself
        return array.reshape(shape)
    mesh = explicit_mesh(jax.typeof(array))
    assert mesh is not None, "only an explicit mesh splits axes"
    sharding = NamedSharding(mesh, partition_spec(tuple(given)))
    return lax.reshape(array, shape, out_sharding=sharding)


def split_axis(array: jax.Array, axis: int, parts: Sequence[int]) -> jax.Array:
    """Splits one axis of an array; its outermost part above 1 keeps its mesh axes."""
    given = [split_over(array, i) for i in range(array.ndim)]
    outermost = next((i for i, part in enumerate(parts) if part > 1), 0)
    inner = [given[axis] if i == outermost else () for i in range(len(parts))]
    shape = (*array.shape[:axis], *parts, *array.shape[axis + 1 :])
    return _reshape(array, shape, (*given[:axis], *inner, *given[axis + 1 :]))


def merge_axes(array: jax.Array, axis: int, count: int) -> jax.Array:
    """Merges ``count`` axes of an array from ``axis`` on; only the outermost may be split."""
    given = [split_over(array, i) for i in range(array.ndim)]
    merged = next(filter(None, given[axis : axis + count]), ())
    extent = math.prod(array.shape[axis : axis + count])
    shape = (*array.shape[:axis], extent, *array.shape[axis + count :])
    return _reshape(array, shape, (*given[:axis], merged, *given[axis + count :]))


def move_groups(array: jax.Array, source: int, target: int | None, groups: int) -> jax.Array:
    """Moves the outer ``groups`` of one axis to the outside of another, ``target``.

    Where that is None, they become an axis of their own, the first.
    """
    if groups == 1 and target is not None:
        return array
    array = split_axis(array, source, (groups, array.shape[source] // groups))
    array = jnp.moveaxis(array, source, 0)
    if target is None:
        return array
    return merge_axes(jnp.moveaxis(array, 0, target), target, 2)


def _map_explicit(mesh: AbstractMesh, primitive, op: Op, ctx, lhs, rhs, *, spec, out_dtype):
    """Lowers through ``shard_map`` over the explicit axes: the types say what each device holds."""
    split = _choose_explicit(op, spec, mesh, *ctx.avals_in)
    *operands, out = (partition_spec(partitions(spec, role, split)) for role in op.roles)
    explicit = {
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Explicit
    }
    local = functools.partial(
        _local, primitive, op, split, mesh.shape, spec=spec, out_dtype=out_dtype
    )

    def mapped(lhs, rhs):
        with jax.sharding.use_abstract_mesh(mesh):
            lhs, rhs = (
                jax.sharding.reshard(a, NamedSharding(mesh, s))
                for a, s in zip((lhs, rhs), operands, strict=True)
            )
            return jax.shard_map(
                local, in_specs=tuple(operands), out_specs=out, axis_names=explicit, check_vma=False
            )(lhs, rhs)

    return mlir.lower_fun(mapped, multiple_results=False)(ctx, lhs, rhs)


# --- lowering ---


def lower(op: Op, ctx, lhs, rhs, *, spec: ConvSpec, out_dtype):
    """Lowers an operation on arrays that are, or may be, split over devices.

    Returns:
        The lowering's results, or None where the arrays are one device's and the operation is to
        be lowered as it stands.
    """
    devices = devices_of(ctx)
    if devices is None:
        return None
    mesh, arrangement = devices
    if mesh is not None:
        return _map_explicit(mesh, ctx.primitive, op, ctx, lhs, rhs, spec=spec, out_dtype=out_dtype)
    call = _Call(ctx.primitive, op, spec, out_dtype, arrangement)
    return partitioned_call.spread(ctx, call, (lhs, rhs))
