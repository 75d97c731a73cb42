"""From a primitive to a custom call: selection, layouts, workspace; XLA where no kernel fits."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import mlir

from jaxconv._src import (
    compat,
    custom_call,
    exact,
    im2col,
    int8_lax,
    native,
    partition,
    record,
    winograd_jax,
    xla,
)
from jaxconv._src.spec import (
    DTYPE_NAMES,
    EXPLICIT_GROWTH,
    ConvSpec,
    Op,
    Sizes,
    dilated_extents,
    explicit_input,
    flops,
    known,
    problem_key,
)

PLATFORMS = native.PLATFORMS

# The fastest by prediction: of the kernels and XLA's own convolution, and of the kernels alone.
AUTO, NATIVE = "auto", "native"

# Not an algorithm of ours: the caller asks for XLA's own convolution.
XLA = "xla"

# The textbook algorithm.
IM2COL = "im2col"

# Algorithms written in JAX, by name. They compute on every platform what no kernel of their name
# takes. A module has ``OPS``, the operations that the algorithm speaks of (the others are chosen by
# selection); ``refusal``, why it does not take a problem; ``instance`` and ``workspace_bytes`` for
# ``explain``; and ``convolve``.
IN_JAX = {IM2COL: im2col, **dict.fromkeys(winograd_jax.ALGORITHMS, winograd_jax)}

# "auto" with the kernels of Winograd among the candidates, of any tile or of one, whatever their
# error. Name -> the algorithm that is added.
WITH_WINOGRAD = {f"{AUTO}+{name}": name for name in winograd_jax.ALGORITHMS}

# The demands that every convolution can meet.
UNCONDITIONAL = (AUTO, NATIVE, XLA, IM2COL, *WITH_WINOGRAD)

# Said of a convolution that has nothing to compute.
EMPTY = "a tensor has no elements"
CROPPED = "negative padding crops the whole input"

# The algorithms of lax's convolutions for fprop, dgrad and wgrad, None where they stay lax's: a
# global value, and one of each thread. JAX has both in the keys of its caches: nothing compiled
# under one value is reused under another.
override_in_force = jax.make_user_context(None)

# The same for what is traced within an override: JAX keeps XLA metadata of an operation with it,
# from its tracing to its lowering, and gives it to its derivatives. "off" leaves them to lax.
_MARK, _OFF = "jaxconv_override", "off"

_log = logging.getLogger("jaxconv")


def marked(algorithms: tuple[str, str, str] | None):
    """A context in which traced convolutions of lax are to be computed by these algorithms."""
    return compat.set_xla_metadata(**{_MARK: ",".join(algorithms) if algorithms else _OFF})


def algorithms_of_lax() -> tuple[str, str, str] | None:
    """By what the convolution of lax that is being lowered is computed, or None: by lax."""
    mark = compat.xla_metadata_in_force().get(_MARK)
    if mark is None:
        return override_in_force.value
    if mark == _OFF:
        return None
    fprop, dgrad, wgrad = mark.split(",")
    return fprop, dgrad, wgrad


@contextlib.contextmanager
def left_to_lax():
    """A context in which convolutions of lax that are traced and lowered stay lax's."""
    mark = marked(None) if _MARK in compat.xla_metadata_in_force() else contextlib.nullcontext()
    with override_in_force(None), mark:
        yield


def call_target(op: Op) -> str:
    """Name of the custom call, on every platform."""
    return f"jaxconv_{op.value}"


def families() -> dict[str, tuple[str, ...]]:
    """Kernel families by platform, of this build."""
    loaded = {name: native.load(name) for name in PLATFORMS}
    return {
        name: () if isinstance(platform, native.Refusal) else tuple(platform.module.families())
        for name, platform in loaded.items()
    }


def refused(reason: str) -> native.Selection:
    """No kernel comes into question, for a reason of this package's own."""
    return native.Selection(None, refusals=(native.Refusal("jaxconv", reason),))


def applies(algorithm: str, op: Op) -> bool:
    """Whether an algorithm speaks of an operation; if not, selection chooses as for "auto".

    An instance name speaks of one operation only.
    """
    if algorithm in IN_JAX:
        return op in IN_JAX[algorithm].OPS
    prefixes = tuple(f"{other.value}_" for other in Op if other is not op)
    return not algorithm.startswith(prefixes)


def _no_kernel(algorithm: str, spec: ConvSpec, sizes: Sizes, *dtypes: np.dtype) -> str:
    """Why no kernel of any platform comes into question, or ""."""
    if algorithm == XLA:
        return 'algorithm="xla" was asked for'
    if spec.symbolic or not all(map(known, (sizes.batch, sizes.n, sizes.c, sizes.k))):
        return "symbolic shape; kernels are selected for known extents"
    if sizes.empty:
        return EMPTY
    if not 1 <= spec.rank <= 3:
        return f"{spec.rank} spatial axes; kernels take 1 to 3"
    if spec.crops_everything:
        return CROPPED
    unknown = [name for d in dtypes if (name := np.dtype(d).name) not in DTYPE_NAMES]
    return f"no kernel for dtype {unknown[0]}" if unknown else ""


def _lies_as_krsc(spec: ConvSpec, sizes: Sizes) -> bool:
    """True of a filter such as OHWI, or OI11: row by row it is (batch?, k, *spatial, c)."""
    *batch_spatial, c, k = spec.w_axes
    shape = spec.shape("w", sizes)

    def in_order(*axes: int) -> bool:
        extended = [axis for axis in axes if shape[axis] > 1]
        return extended == sorted(extended)

    batch, spatial = batch_spatial[: -spec.rank], batch_spatial[-spec.rank :]
    return in_order(*batch, k, *spatial, c) and not in_order(*spec.w_axes)


def select(
    platform: str,
    op: Op,
    spec: ConvSpec,
    sizes: Sizes,
    operand_dtype: np.dtype,
    out_dtype: np.dtype,
) -> tuple[native.Selection, str]:
    """Chooses how to compute one operation on one platform.

    That is by a kernel instance; where the demanded algorithm is also written in JAX and no kernel
    takes the problem, by that; else by XLA's convolution.

    Returns:
        The selection, and the problem key ("" where a dtype has none, or no kernel is chosen).

    Raises:
        ValueError: the demanded algorithm is not known on this platform.
    """
    algorithm = spec.algorithm_of(op)
    if algorithm not in IN_JAX or not applies(algorithm, op) or sizes.empty:
        return select_kernel(platform, op, spec, sizes, operand_dtype, out_dtype)
    try:
        chosen, key = select_kernel(platform, op, spec, sizes, operand_dtype, out_dtype)
    except ValueError:  # no kernel of this name
        chosen, key = native.Selection(None), ""
    if chosen.instance:
        return chosen, key
    way = IN_JAX[algorithm]
    if reason := way.refusal(op, spec, sizes, operand_dtype):
        refusals = (native.Refusal(algorithm, reason), *chosen.refusals)
        return native.Selection(None, refusals=refusals), key
    name = way.instance(op, spec, operand_dtype)
    memory = way.workspace_bytes(op, spec, sizes, operand_dtype)
    return native.Selection(name, memory, in_jax=True), ""


def select_kernel(
    platform: str,
    op: Op,
    spec: ConvSpec,
    sizes: Sizes,
    operand_dtype: np.dtype,
    out_dtype: np.dtype,
    epilogue: Sequence[str] = (),
) -> tuple[native.Selection, str]:
    """Chooses the kernel instance for one operation on one platform, or XLA's convolution.

    With words of an ``epilogue``, only instances that compute it too are in question. A filter that
    lies as (k, spatial, c) is read so where the chosen instance can, which costs it nothing;
    elsewhere XLA transposes it.

    Returns:
        The selection, and the problem key ("" where a dtype has none).

    Raises:
        ValueError: the demanded algorithm is not known on this platform.
    """
    algorithm = spec.algorithm_of(op)
    if reason := _no_kernel(algorithm, spec, sizes, operand_dtype, out_dtype):
        return refused(reason), ""
    if algorithm in WITH_WINOGRAD:
        problem = (platform, op, spec, sizes, operand_dtype, out_dtype)
        return _select_with_winograd(*problem, epilogue)
    key = problem_key(op, spec, sizes, operand_dtype, out_dtype, epilogue=epilogue)
    if platform == "cuda" and np.dtype(operand_dtype) == np.int8:
        plan = _int8_plan(platform, op, spec, sizes, out_dtype)
        return plan.chosen, plan.key if plan.chosen.instance else key
    kernels = native.load(platform)
    if isinstance(kernels, native.Refusal):
        return native.Selection(None, refusals=(kernels,)), key
    if algorithm == AUTO or not applies(algorithm, op):
        algorithm = native.automatic()
    try:
        chosen = kernels.select(key, algorithm, native.target())
    except ValueError as error:
        if algorithm not in (AUTO, NATIVE):
            raise
        # A problem that JAX accepts and the library does not: its numbers are too large.
        return refused(str(error)), key
    if chosen.instance and op is not Op.WGRAD and _lies_as_krsc(spec, sizes):
        as_it_lies = problem_key(
            op, spec, sizes, operand_dtype, out_dtype, krsc=True, epilogue=epilogue
        )
        again = kernels.select(as_it_lies, chosen.instance, native.target())
        if again.instance:
            return again._replace(krsc=True), as_it_lies
    return chosen, key


def _select_with_winograd(
    platform: str, op: Op, spec: ConvSpec, sizes: Sizes, *rest: Any
) -> tuple[native.Selection, str]:
    """``select_kernel`` by "auto", or a kernel of Winograd's where that is predicted faster.

    No kernel of Winograd's has an epilogue; a call with one is chosen by "auto".
    """

    def by(name: str) -> tuple[native.Selection, str]:
        demand = dataclasses.replace(spec, algorithm=(name,) * 3)
        return select_kernel(platform, op, demand, sizes, *rest)

    *_, epilogue = rest
    chosen, key = by(AUTO)
    if epilogue or op not in winograd_jax.OPS:
        return chosen, key
    try:
        winograd, its_key = by(WITH_WINOGRAD[spec.algorithm_of(op)])
    except ValueError:  # no kernel of this name on the platform
        return chosen, key
    if winograd.instance and winograd.microseconds < chosen.expected_microseconds:
        return winograd, its_key
    return chosen, key


def _int8_plan(platform: str, op: Op, spec: ConvSpec, sizes: Sizes, out_dtype: np.dtype):
    if not applies(spec.algorithm_of(op), op) or spec.algorithm_of(op) in WITH_WINOGRAD:
        spec = dataclasses.replace(spec, algorithm=(AUTO, AUTO, AUTO))
    return int8_lax.plan(platform, op, spec, sizes, out_dtype)


def xla_lacks(platform: str, dtype: np.dtype) -> bool:
    """Whether XLA compiles no convolution of these operands: integers on a GPU."""
    return platform == "cuda" and jnp.issubdtype(dtype, jnp.integer)


def reasons(refusals: Sequence[native.Refusal]) -> str:
    return "; ".join(f"{kernel}: {reason}" for kernel, reason in refusals)


def _refuse(algorithm: str, key: str, problem: tuple, refusals: tuple[native.Refusal, ...]):
    """The error for a demanded algorithm that cannot serve: why, and which ones would."""
    op, spec, sizes, operand_dtype, out_dtype = problem
    accepting = [XLA]
    for platform, names in families().items():
        for name in names:
            demand = dataclasses.replace(spec, algorithm=(name,) * 3)
            with contextlib.suppress(ValueError):  # a problem that the library cannot read
                chosen, _ = select(platform, op, demand, sizes, operand_dtype, out_dtype)
                if chosen.instance:
                    accepting.append(f"{name} ({platform})")
    return ValueError(
        f"algorithm {algorithm!r} cannot serve {key or op.value}: {reasons(refusals)}. "
        f"Accepted here: {', '.join(accepting)}."
    )


def check_algorithm(
    op: Op,
    spec: ConvSpec,
    lhs_shape: tuple[int, ...],
    rhs_shape: tuple[int, ...],
    operand_dtype: np.dtype,
    out_dtype: np.dtype,
) -> None:
    """Refuses, while tracing, a demanded algorithm that no platform could run.

    Which platform the program will run on is not known yet, so an algorithm passes when one of them
    takes it; lowering checks again for its own.

    Raises:
        ValueError: with every kernel's reason, and the algorithms that would serve.
    """
    algorithm = spec.algorithm_of(op)
    sizes = spec.sizes(op, lhs_shape, rhs_shape)
    if algorithm in UNCONDITIONAL or not applies(algorithm, op) or sizes.empty:
        return
    refusals, known, key = [], False, ""
    for platform in PLATFORMS:
        try:
            chosen, key = select(platform, op, spec, sizes, operand_dtype, out_dtype)
        except ValueError as error:  # not an algorithm of this platform
            refusals.append(native.Refusal(platform, str(error)))
            continue
        if chosen.instance:
            return
        known = True
        refusals.extend(chosen.refusals)
    problem = (op, spec, sizes, operand_dtype, out_dtype)
    raise _refuse(algorithm, key if known else "", problem, tuple(dict.fromkeys(refusals)))


def select_explicit(
    platform: str, op: Op, spec: ConvSpec, sizes: Sizes, *dtypes: np.dtype
) -> tuple[native.Selection, str]:
    """``select`` for the same convolution of an input that was dilated and cropped beforehand."""
    if spec.symbolic:
        return native.Selection(None), ""
    explicit = explicit_input(spec)
    dilated = math.prod(dilated_extents(spec.in_spatial, spec.lhs_dilation))
    grown = dilated > EXPLICIT_GROWTH * math.prod(spec.in_spatial)
    predicted = (AUTO, NATIVE, *WITH_WINOGRAD)
    if explicit == spec or grown or spec.algorithm_of(op) not in predicted:
        return native.Selection(None), ""
    sizes = dataclasses.replace(sizes, in_spatial=explicit.in_spatial)
    return select(platform, op, explicit, sizes, *dtypes)


def _with_explicit_input(op: Op, spec: ConvSpec, primitive, out_dtype, lhs, rhs):
    """Dilates and crops x by itself, or undoes both on dx."""
    explicit = explicit_input(spec)
    positions = spec.x_axes[-1 - spec.rank : -1]
    crop = [(min(lo, 0), min(hi, 0)) for lo, hi in spec.padding]
    config = [(0, 0, 0)] * len(spec.x_axes)
    if op is Op.DGRAD:
        dx = primitive.bind(lhs, rhs, spec=explicit, out_dtype=out_dtype)
        steps = [1] * dx.ndim
        for axis, (lo, hi), dilation in zip(positions, crop, spec.lhs_dilation, strict=True):
            config[axis] = (-lo, -hi, 0)
            steps[axis] = dilation
        dx = lax.pad(dx, jnp.zeros((), dx.dtype), config)
        return lax.slice(dx, (0,) * dx.ndim, dx.shape, steps)
    for axis, (lo, hi), dilation in zip(positions, crop, spec.lhs_dilation, strict=True):
        config[axis] = (lo, hi, dilation - 1)
    x = lax.pad(lhs, jnp.zeros((), lhs.dtype), config)
    return primitive.bind(x, rhs, spec=explicit, out_dtype=out_dtype)


def layout(spec: ConvSpec, role: str, krsc: bool = False) -> tuple[int, ...]:
    """Minor-to-major: stores an array in its canonical axis order, a krsc filter as it lies."""
    axes = spec.axes(role)
    return tuple(reversed(range(len(axes)) if krsc and role == "w" else axes))


def lower(op: Op, platform: str, ctx, lhs, rhs, *, spec: ConvSpec, out_dtype: np.dtype):
    """Lowers to one custom call on the chosen instance, or to XLA's convolution, saying why.

    The arrays keep their axis order: the kernels' channels-last storage is asked of XLA as a layout
    constraint. The workspace is a second result of the call, dropped here.
    """
    lhs_aval, rhs_aval = ctx.avals_in
    sizes = spec.sizes(op, lhs_aval.shape, rhs_aval.shape)
    problem = (op, spec, sizes, lhs_aval.dtype, out_dtype)
    chosen, key = select(platform, *problem)
    recorded = functools.partial(
        record.emit, ctx, op.value, key, spec.precision, platform, flops(spec, sizes)
    )
    with record.paused():  # the parts on every device are this one convolution
        split = partition.lower(op, ctx, lhs, rhs, spec=spec, out_dtype=out_dtype)
    if split is not None:
        return recorded(chosen, split)
    if chosen.packed:
        plan = _int8_plan(platform, op, spec, sizes, out_dtype)
        through = functools.partial(int8_lax.convolve, plan, op, spec=spec)
        with record.paused():
            results = mlir.lower_fun(through, multiple_results=False)(ctx, lhs, rhs)
        return recorded(chosen, results)
    if chosen.instance is None:
        if not chosen.xla_is_faster:
            beforehand, _ = select_explicit(platform, *problem)
            if beforehand.instance is not None:
                through = functools.partial(
                    _with_explicit_input, op, spec, ctx.primitive, out_dtype
                )
                with record.located(ctx):
                    return mlir.lower_fun(through, multiple_results=False)(ctx, lhs, rhs)
            if beforehand.xla_is_faster:
                chosen = beforehand
        algorithm = spec.algorithm_of(op)
        if algorithm not in UNCONDITIONAL and applies(algorithm, op) and not sizes.empty:
            raise _refuse(algorithm, key, problem, chosen.refusals)
        _log.info("%s on %s goes to XLA: %s", key or op.value, platform, reasons(chosen.refusals))
        way = exact if xla_lacks(platform, lhs_aval.dtype) else None
        results = lower_to_xla(op, ctx, lhs, rhs, spec=spec, out_dtype=out_dtype, way=way)
        return recorded(chosen, results)
    _log.debug("%s on %s: %s", key, platform, chosen.instance)
    if chosen.in_jax:
        way = IN_JAX[spec.algorithm_of(op)]
        results = lower_to_xla(op, ctx, lhs, rhs, spec=spec, out_dtype=out_dtype, way=way)
        return recorded(chosen, results)
    names = dict(zip(("lhs", "rhs", "out"), op.roles, strict=True))
    results = custom_call.lowered(
        ctx,
        platform,
        call_target(op),
        {"lhs": (lhs, lhs_aval), "rhs": (rhs, rhs_aval)},
        {"out": ctx.avals_out[0]} | custom_call.workspace(chosen),
        {name: layout(spec, role, chosen.krsc) for name, role in names.items()},
        **custom_call.plan_attributes(chosen, key),
        **axes_attributes(op, spec),
    )
    return recorded(chosen, [results["out"]])


def axes_attributes(op: Op, spec: ConvSpec) -> dict[str, np.ndarray]:
    """Where the canonical axes of a call's operands and result are."""
    names = ("lhs_axes", "rhs_axes", "out_axes")
    axes = [np.asarray(spec.axes(role), np.int64) for role in op.roles]
    return dict(zip(names, axes, strict=True))


def lower_without_kernels(op: Op, ctx, lhs, rhs, *, spec: ConvSpec, out_dtype: np.dtype):
    """Lowers on a platform for which no kernel is built: by an algorithm in JAX, or to XLA's own.

    Raises:
        ValueError: the demanded algorithm does not take the problem.
    """
    algorithm = spec.algorithm_of(op)
    way = IN_JAX.get(algorithm) if applies(algorithm, op) else None
    if way is not None:
        sizes = spec.sizes(op, *(aval.shape for aval in ctx.avals_in))
        if reason := way.refusal(op, spec, sizes, ctx.avals_in[0].dtype):
            raise ValueError(f"algorithm {algorithm!r} cannot serve {op.value}: {reason}")
    return lower_to_xla(op, ctx, lhs, rhs, spec=spec, out_dtype=out_dtype, way=way)


def lower_to_xla(op: Op, ctx, lhs, rhs, *, spec: ConvSpec, out_dtype: np.dtype, way=None):
    """Lowers to operations of XLA's, by default its own convolution.

    ``way`` is a module with another function ``convolve`` for it.
    """
    convolve = functools.partial((way or xla).convolve, op, spec=spec, out_dtype=out_dtype)
    # XLA's partitioner comes here in a thread of its own, without the caller's `enable_x64`.
    known = jax.dtypes.canonicalize_dtype(out_dtype) == out_dtype
    wide = contextlib.nullcontext() if known else jax.enable_x64(True)
    with left_to_lax(), record.paused(), wide:
        return mlir.lower_fun(convolve, multiple_results=False)(ctx, lhs, rhs)
