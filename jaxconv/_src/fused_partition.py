"""How a convolution with an epilogue is split over devices: the algebra of ``partition``.

The residual and the results y and pre are split as y is, scale, bias and statistics as its channels
are. Where the epilogue cannot follow a device's own sums, it follows the sums of all devices in
XLA's operations: where the input channels are split, and beside a residual or statistics where a
device computes rows of y that it drops (``halo``). The statistics of the devices' parts are merged.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jaxconv._src import compat, epilogue, halo, partition, partitioned_call, primitives, shardy
from jaxconv._src.device_layout import Arrangement, DeviceLayout, read_shardings
from jaxconv._src.epilogue import Epilogue
from jaxconv._src.partition import Split
from jaxconv._src.spec import ConvSpec, Op

_SPATIAL = ("s0", "s1", "s2")


def _arrays(spec: ConvSpec, form: Epilogue) -> tuple[list[dict[str, int]], list[dict[str, int]]]:
    """The factors of every operand and of every result, and their positions."""
    x, w, y = (partition.factors(spec, role) for role in ("x", "w", "y"))
    channel = "g" if spec.groups > 1 else "k"
    terms = {"scale": {channel: 0}, "bias": {channel: 0}, "residual": y}
    results = [y, *[y] * form.pre, *[{channel: 1}] * form.statistics]
    return [x, w, *(terms[name] for name in form.terms)], results


def _specs(ranks: Sequence[int], factors: Sequence[dict[str, int]], split: Split):
    """How every array is split."""
    found: list[PartitionSpec] = []
    for rank, at in zip(ranks, factors, strict=True):
        axes: list[tuple[str, ...]] = [()] * rank
        for name, axis in at.items():
            axes[axis] = split.get(name, ())
        found.append(partition.partition_spec(tuple(axes)))
    return found


def moments_type(spec: ConvSpec, y: jax.core.ShapedArray, dtype: np.dtype) -> jax.core.ShapedArray:
    """The type of the statistics of a y of this type, with their own dtype."""
    at, axes = spec.axis("y", "k"), tuple(y.sharding.spec)
    split = PartitionSpec(None, axes[at] if at < len(axes) else None)
    return y.update(
        shape=(2, y.shape[at]),
        dtype=dtype,
        weak_type=False,
        sharding=NamedSharding(y.sharding.mesh, split),
    )


def _merged(moments: jax.Array, names: tuple[str, ...], parts: int, count: int) -> jax.Array:
    """The statistics of all devices' parts, of ``count`` elements of a channel each.

    With mean_i and M_i of part i, and averages over the parts, one all-reduce gives

        mean = avg of mean_i,   M / (parts * count) = avg of (mean_i^2 + M_i / count) - mean^2

    in float64. With r = |mean| / deviation, the sums' roundings give M a relative error of at most
    (parts + 4) 2^-53 r^2: 3e-7 for 256 parts and r = 3000. Deviations of the means from the whole
    mean, which need a second all-reduce, are hardly more accurate: each mean_i is rounded to
    float32, which gives M an error of up to 2^-23 r, 4e-4 for r = 3000, where the means differ.
    """
    with jax.enable_x64(True):
        mean, squares = moments.astype(np.float64)
        local = jnp.stack([mean, mean * mean + squares / count])
        mean, square = lax.psum(local, names) / parts
        variance = jnp.maximum(square - mean * mean, 0)
        return jnp.stack([mean, parts * count * variance]).astype(moments.dtype)


def _local(
    primitive: Primitive,
    split: Split,
    mesh: Mapping[str, int],
    *operands,
    spec: ConvSpec,
    form: Epilogue,
    out_dtype,
):
    """One device's part of all results."""
    x, w, *rest = operands
    terms = dict(zip(form.terms, rest, strict=True))
    x_at, y_at = partition.factors(spec, "x"), partition.factors(spec, "y")
    plans: dict[int, halo.Plan] = {}
    devices = {name: halo.Devices(split.get(name, ()), mesh) for name in _SPATIAL}
    for at, name in enumerate(_SPATIAL):
        if (parts := devices[name].count) > 1:
            plan = halo.plan(Op.FPROP, spec, at, parts)
            assert plan is not None, "an axis is split only where there is a plan"
            plans[at] = plan
            x = halo.exchange(x, x_at[name], devices[name], plan)
    groups = spec.groups // math.prod(mesh[axis] for axis in split.get("g", ()))
    local = dataclasses.replace(halo.local_spec(spec, plans), groups=groups)

    def own(result):
        for at, plan in plans.items():
            name = _SPATIAL[at]
            result = halo.own_rows(result, y_at[name], devices[name], plan)
        return result

    summed = tuple(a for n in partition.contracted(Op.FPROP, spec) for a in split.get(n, ()))
    drops = any(local.out_spatial[at] != plan.result for at, plan in plans.items())
    if summed or (drops and (form.residual or form.statistics)):
        wide = epilogue.accumulator_dtype(out_dtype)
        acc = own(primitives.bind(Op.FPROP, x, w, local, wide))
        acc = lax.psum(acc, summed) if summed else acc
        terms = dict(zip(terms, compat.match_varying(*terms.values(), acc), strict=False))
        results = epilogue.finish(acc, terms, spec.axis("y", "k"), form, out_dtype)
    else:
        operands = compat.match_varying(x, w, *terms.values())
        results = primitive.bind(*operands, spec=local, epilogue=form, out_dtype=out_dtype)
        images = 1 + form.pre
        results = [*map(own, results[:images]), *results[images:]]
    if form.statistics:
        names = tuple(a for n in ("n", *_SPATIAL) for a in split.get(n, ()))
        count = results[0].size // results[-1].shape[1]
        if names:
            parts = math.prod(mesh[axis] for axis in names)
            results[-1] = _merged(results[-1], names, parts, count)
    return results


def _choose(spec: ConvSpec, form: Epilogue, mesh, x_shape, w_shape, given, even: bool) -> Split:
    sizes = spec.sizes(Op.FPROP, x_shape, w_shape)
    extents = {"batch": 1, "n": sizes.n, "g": spec.groups, "c": sizes.c, "k": sizes.k}
    # The parts of merged statistics have equal counts.
    return partition.choose(Op.FPROP, spec, extents, mesh, given, even or form.statistics)


@dataclasses.dataclass(frozen=True)
class _Call:
    """The operation as ``custom_partitioning`` sees it: its static half, and its callbacks."""

    primitive: Primitive
    spec: ConvSpec
    form: Epilogue
    out_dtype: object
    devices: Arrangement

    def __call__(self, *operands):
        return tuple(
            self.primitive.bind(
                *operands, spec=self.spec, epilogue=self.form, out_dtype=self.out_dtype
            )
        )

    def _chosen(self, operands: Sequence, results: Sequence) -> tuple[DeviceLayout, Split, list]:
        infos = [*operands, *results]
        ranks = [len(info.shape) for info in infos]
        shardings = [getattr(info, "sharding", None) for info in infos]
        layout, given = read_shardings(self.devices, shardings, ranks)
        y = given[len(operands)]
        if y is None and self.form.residual:
            y = given[len(operands) - 1]
        shapes = operands[0].shape, operands[1].shape
        mesh = layout.split.shape
        split = _choose(self.spec, self.form, mesh, *shapes, [given[0], given[1], y], False)
        of_operands, of_results = _arrays(self.spec, self.form)
        specs = _specs(ranks, [*of_operands, *of_results], split)
        return layout, split, [NamedSharding(layout.split, s) for s in specs]

    def partition(self, mesh, operands, results):
        """One device's program, and the shardings of operands and results that it works with."""
        layout, split, shardings = self._chosen(operands, results)

        def body(*operands):
            # As in ``partition``: XLA calls back in the context of whoever compiles.
            with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
                return tuple(
                    _local(
                        self.primitive,
                        split,
                        layout.whole.shape,
                        *operands,
                        spec=self.spec,
                        form=self.form,
                        out_dtype=self.out_dtype,
                    )
                )

        count = len(operands)
        return layout.whole, body, tuple(shardings[count:]), tuple(shardings[:count])

    def infer(self, mesh, operands, results):
        """The results' shardings, for the partitioner that preceded Shardy."""
        open_results = [jax.ShapeDtypeStruct(r.shape, r.dtype) for r in results]
        return tuple(self._chosen(operands, open_results)[2][len(operands) :])

    def rule(self, mesh, operand_types, result_types):
        names = (["x", "w", *self.form.terms], ["y", "pre", "statistics"])
        arrays = [
            [
                (name, tuple(kind.shape), at)
                for name, kind, at in zip(called, kinds, factors, strict=False)
            ]
            for called, kinds, factors in zip(
                names,
                (operand_types, result_types),
                _arrays(self.spec, self.form),
                strict=True,
            )
        ]
        summed = partition.contracted(Op.FPROP, self.spec)
        return shardy.convolution_rule(self.spec, *arrays, summed)


def _map_explicit(mesh: AbstractMesh, ctx, primitive, operands, *, spec, form, out_dtype):
    """Lowers through ``shard_map`` over the explicit axes: the types say what each device holds."""
    x, w = ctx.avals_in[:2]
    given = [partition.given_partitions(x), partition.given_partitions(w), None]
    split = _choose(spec, form, mesh.shape, x.shape, w.shape, given, True)
    of_operands, of_results = _arrays(spec, form)
    in_specs = _specs([a.ndim for a in ctx.avals_in], of_operands, split)
    out_specs = _specs([a.ndim for a in ctx.avals_out], of_results, split)
    explicit = {
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Explicit
    }

    def local(*operands):
        return tuple(
            _local(
                primitive, split, mesh.shape, *operands, spec=spec, form=form, out_dtype=out_dtype
            )
        )

    def mapped(*operands):
        with jax.sharding.use_abstract_mesh(mesh):
            operands = [
                jax.sharding.reshard(a, NamedSharding(mesh, s))
                for a, s in zip(operands, in_specs, strict=True)
            ]
            return jax.shard_map(
                local,
                in_specs=tuple(in_specs),
                out_specs=tuple(out_specs),
                axis_names=explicit,
                check_vma=False,
            )(*operands)

    return mlir.lower_fun(mapped, multiple_results=True)(ctx, *operands)


def lower(ctx, primitive: Primitive, operands, *, spec: ConvSpec, form: Epilogue, out_dtype):
    """Lowers an operation on arrays that are, or may be, split over devices.

    Returns:
        The lowering's results, or None where the arrays are one device's.
    """
    devices = partition.devices_of(ctx)
    if devices is None:
        return None
    mesh, arrangement = devices
    static = dict(spec=spec, form=form, out_dtype=out_dtype)
    if mesh is not None:
        return _map_explicit(mesh, ctx, primitive, operands, **static)
    call = _Call(primitive, spec, form, out_dtype, arrangement)
    return partitioned_call.spread(ctx, call, operands, multiple_results=True)
