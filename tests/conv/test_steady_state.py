"""Persistent kernels beyond their first tile: at least three tiles a CTA, and split-K slices.

The ring of stages, its phase bits and the order of the consumers carry over from tile to tile.
"""

from __future__ import annotations

import jax
import kernel_tables
import numpy as np
import pytest
from kernel_tables import Instance
from numerics import assert_exact, into_poison
from problems import DTYPES, Problem
from steady_problems import (
    HALO_BOX,
    exact,
    operands_of,
    skip_on_other_devices,
    split_problem,
    steady_problems,
)

from jaxconv._src.conv.bilinear import select
from jaxconv._src.library.custom_call import call_target
from jaxconv._src.problem.spec import Op

INSTANCES = kernel_tables.instances()
PERSISTENT = [
    each for each in INSTANCES if each.family in ("igemm_wgmma", "few_channels", *HALO_BOX)
]


def ids(instances: list[Instance]) -> list[str]:
    return [each.name for each in instances]


def _selection(each: Instance, which: Problem, layout: str):
    op = Op(each.op)
    spec = which.spec(algorithm=each.name, layout=layout)
    shapes = []
    for role in op.roles[:2]:
        extents = which.canonical_shape(role)
        shapes.append(tuple(extents[axis] for axis in np.argsort(which.axes(role, layout))))
    return select("cuda", op, spec, spec.sizes(op, *shapes), *DTYPES[each.dtype])


def _check(each: Instance, which: Problem, actual, repro: str) -> None:
    _, expected = exact(Op(each.op), which)
    assert_exact(actual, expected.astype(DTYPES[each.dtype][1]), f"{each.name}: {repro}")


@pytest.mark.gpu
@pytest.mark.parametrize("each", PERSISTENT, ids=ids(PERSISTENT))
def test_three_tiles_a_cta(each):
    skip_on_other_devices(each)
    op, accepted = Op(each.op), set()
    for which in steady_problems(each):
        for layout in ("last", "krsc"):
            chosen, line = _selection(each, which, layout)
            if chosen.instance is None or (layout == "krsc" and not chosen.krsc):
                continue
            accepted.add(which.name)
            call = which.operation(op, each.dtype, algorithm=each.name, layout=layout)
            actual = into_poison(call, *operands_of(each, which, layout))
            _check(each, which, which.to_canonical(op.roles[2], actual, layout), line)
    assert accepted, f"{each.name} takes none of the problems"


def unsplittable(each: Instance) -> bool:
    """Whether the kernel computes every output in one CTA."""
    if each.family in ("igemm_simt", "few_channels", *HALO_BOX):
        return each.op != "wgrad"
    if each.family in (*kernel_tables.INT8_FAMILIES, "winograd"):
        return True
    return any(form in each.variant for form in ("weight_stationary", "pointwise", "patches"))


SPLIT = [each for each in INSTANCES if not unsplittable(each)]


def _call_with_slices(each: Instance, which: Problem, slices: int, chosen, line: str):
    """The custom call as the lowering makes it, but with ``slices`` slices."""
    op = Op(each.op)
    result = which.canonical_shape(op.roles[2])
    partial = 4 * slices * int(np.prod([*result[:-2], result[-2] + 16, result[-1] + 16]))
    call = jax.ffi.ffi_call(
        call_target(op),
        (
            jax.ShapeDtypeStruct(result, DTYPES[each.dtype][1]),
            jax.ShapeDtypeStruct((chosen.workspace_bytes + partial,), np.uint8),
        ),
    )
    axes = {
        f"{name}_axes": np.asarray(which.axes(role, "last"), np.int64)
        for name, role in zip(("lhs", "rhs", "out"), op.roles, strict=True)
    }
    given = {"instance": each.name, "problem": line, "slices": np.int64(slices)}
    return into_poison(
        lambda lhs, rhs: call(lhs, rhs, **given, **axes)[0], *operands_of(each, which)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("each", SPLIT, ids=ids(SPLIT))
def test_split_k_slices(each):
    """More slices than selection would choose, and CTAs that process several slices."""
    skip_on_other_devices(each)
    which, numbers = split_problem(each)
    chosen, line = _selection(each, which, "last")
    assert chosen.instance == each.name, chosen.refusals
    for slices in numbers:
        try:
            actual = np.asarray(_call_with_slices(each, which, slices, chosen, line))
        except jax.errors.JaxRuntimeError as error:
            if "slices: " not in str(error):
                raise
            continue  # such slices would be too short, or one empty
        _check(each, which, actual, f"{line}, {slices} slices")
        return
    pytest.fail(f"no number of slices is accepted, of {numbers}")
