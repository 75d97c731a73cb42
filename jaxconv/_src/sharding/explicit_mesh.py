"""Arrays on explicit meshes, whose types include their partition over devices."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jaxconv._src import compat
from jaxconv._src.sharding.device_layout import Partitions


def mesh_of(*avals) -> AbstractMesh | None:
    """The mesh of some types if it has explicit axes, for which a sharding is part of the type.

    Raises:
        ShardingTypeError: the types have different meshes.
    """
    meshes = {aval.sharding.mesh for aval in avals if not aval.sharding.mesh.empty}
    meshes = {mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types}
    if len(meshes) > 1:
        raise compat.ShardingTypeError(
            f"convolution: expected operands on one mesh, got {', '.join(map(str, meshes))}"
        )
    return meshes.pop() if meshes else None


def explicit_axes(mesh: AbstractMesh) -> set[str]:
    """The mesh axes along which a sharding is part of the type."""
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name for name, kind in types if kind == AxisType.Explicit}


def partition_spec(partitions: Partitions) -> PartitionSpec:
    return PartitionSpec(
        *(axes if len(axes) > 1 else (axes[0] if axes else None) for axes in partitions)
    )


def given_partitions(aval) -> Partitions:
    """The partition in the type of an array."""
    spec = tuple(aval.sharding.spec)
    axes = [(a,) if isinstance(a, str) else tuple(a or ()) for a in spec]
    return (*axes, *((),) * (len(aval.shape) - len(axes)))


def described(aval) -> str:
    return aval.str_short(short_dtypes=True)


def like(array: jax.Array, aval) -> jax.Array:
    """``array`` with the sharding that the type ``aval`` has on an explicit mesh."""
    if mesh_of(aval) is None or jax.typeof(array).sharding == aval.sharding:
        return array
    return jax.sharding.reshard(array, aval.sharding)


def with_out_sharding(array: jax.Array, out_sharding) -> jax.Array:
    """A result with the sharding that the caller demands by lax's ``out_sharding``.

    Raises:
        TypeError, ValueError: as in lax, for a sharding that names no explicit mesh axes.
    """
    sharding = compat.canonical_out_sharding(out_sharding, "conv_general_dilated")
    if sharding is None or AxisType.Explicit not in sharding.mesh.axis_types:
        return array
    return jax.sharding.reshard(array, sharding)


def split_over(array: jax.Array, axis: int) -> tuple[str, ...]:
    """The explicit mesh axes that split one axis of an array."""
    aval = jax.typeof(array)
    return () if mesh_of(aval) is None else given_partitions(aval)[axis]


def _reshape(array: jax.Array, shape: Sequence[int], given: Sequence) -> jax.Array:
    if not any(given):  # JAX then finds the result's sharding itself
        return array.reshape(shape)
    mesh = mesh_of(jax.typeof(array))
    assert mesh is not None, "only an explicit mesh splits axes"
    sharding = NamedSharding(mesh, partition_spec(tuple(given)))
    return lax.reshape(array, shape, out_sharding=sharding)


def _dividing(array: jax.Array, axes: tuple[str, ...], extent: int) -> tuple[str, ...]:
    """The longest prefix of some mesh axes that splits an extent into equal parts."""
    sizes = jax.typeof(array).sharding.mesh.shape
    while extent % math.prod(sizes[axis] for axis in axes):
        axes = axes[:-1]
    return axes


def split_axis(array: jax.Array, axis: int, parts: Sequence[int]) -> jax.Array:
    """Splits one axis of an array; the outermost part keeps the mesh axes that divide it."""
    given = [split_over(array, i) for i in range(array.ndim)]
    outermost = next((i for i, part in enumerate(parts) if part > 1), 0)
    kept = _dividing(array, given[axis], parts[outermost])
    inner = [kept if i == outermost else () for i in range(len(parts))]
    if kept != given[axis]:
        whole = partition_spec((*given[:axis], kept, *given[axis + 1 :]))
        array = jax.sharding.reshard(array, jax.typeof(array).sharding.update(spec=whole))
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

    If ``target`` is None, they become a separate first axis.
    """
    if groups == 1 and target is not None:
        return array
    array = split_axis(array, source, (groups, array.shape[source] // groups))
    array = jnp.moveaxis(array, source, 0)
    if target is None:
        return array
    return merge_axes(jnp.moveaxis(array, 0, target), target, 2)
