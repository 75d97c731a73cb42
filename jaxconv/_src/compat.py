"""Every private or version-dependent JAX import, in one place (JAX 0.9.2 to 0.11.2)."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import re
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import api as _api
from jax._src import checkify as _checkify
from jax._src import compiler as _compiler
from jax._src import config as _config
from jax._src import core as _core
from jax._src import custom_partitioning as _custom_partitioning
from jax._src import dispatch as _dispatch
from jax._src import dtypes as _dtypes
from jax._src import linear_util as _linear_util
from jax._src import sharding_impls as _sharding_impls
from jax._src import source_info_util as _source_info
from jax._src import xla_metadata_lib as _xla_metadata_lib
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import mlir as _mlir
from jax._src.lax import lax as _lax
from jax.experimental import xla_metadata as _xla_metadata
from jax.interpreters.mlir import ir as _ir

# Converts every form of `precision` in jax.lax (None, names, enums, pairs), and the global default,
# to None or a pair of Precision.
canonicalize_precision = _lax.canonicalize_precision

# Checks that lax allows a result dtype for an operand dtype; otherwise a TypeError.
validate_preferred_element_type = _lax._validate_preferred_element_type

# The dtype of a dtype argument under the user's setting for 64-bit types.
canonicalize_dtype = _dtypes.check_and_canonicalize_user_dtype


@functools.cache
def wider_dtype(a: np.dtype, b: np.dtype) -> np.dtype:
    """A dtype that holds the values of both, independent of the user's promotion mode."""
    a, b = np.dtype(a), np.dtype(b)
    if a == b:
        return a
    try:
        with jax.numpy_dtype_promotion("standard"):
            return np.dtype(jnp.promote_types(a, b))
    except _dtypes.TypePromotionError:  # types of 8 bits and fewer have no promotion
        if a.itemsize == b.itemsize and jnp.issubdtype(b, jnp.floating):
            return np.dtype(np.float32)
        return max(b, a, key=lambda dtype: dtype.itemsize)


# Evaluates a primitive outside jit by compiling it separately.
apply_primitive = _dispatch.apply_primitive

# Gives the operands of a primitive the same varying type inside `shard_map` (a replicated filter, a
# sharded batch), as lax does before it binds. Without it, the gradient of the replicated operand
# has the wrong type.
if hasattr(_core, "auto_insert_reshard"):
    match_varying = _core.auto_insert_reshard
else:
    match_varying = _core.standard_insert_pvary  # type: ignore[attr-defined]


def is_traced(value) -> bool:
    """Whether a value is unknown at trace time."""
    return isinstance(value, _core.Tracer)


def is_tracing() -> bool:
    """Whether a function is being traced: by jit, or by a transformation."""
    return not _core.trace_state_clean()


def current_trace() -> weakref.ref:
    """The current trace, which lives as long as its values."""
    return weakref.ref(_core.trace_ctx.trace)


def end_trace(trace: weakref.ref) -> None:
    """Makes values of a finished trace raise UnexpectedTracerError when used."""
    if (alive := trace()) is not None:
        _core.Trace.invalidate(alive)  # JAX itself accepts them, and the lowering then fails


def check_alive(values) -> None:
    """Raises UnexpectedTracerError for a value of a finished trace (``end_trace``)."""
    for value in values:
        if isinstance(value, _core.Tracer) and not value._trace.is_valid():
            raise _core.escaped_tracer_error(value)


def report_nans(primitive) -> None:
    """Makes ``checkify.nan_checks`` test the results of a primitive."""
    _checkify.error_checks[primitive] = functools.partial(_checkify.nan_error_check, primitive)


# Metadata that operations traced in a context keep until they are lowered.
set_xla_metadata = _xla_metadata.set_xla_metadata


def xla_metadata_in_force() -> dict[str, Any]:
    """The metadata of the operation being traced or lowered."""
    return _xla_metadata_lib.current_xla_metadata() or {}


# Continues with the next operation, in a callback of `walk`.
CONTINUE_WALK = _ir.WalkResult.ADVANCE

# Whether every extent of a shape is a number (not a dimension variable of jax.export).
is_constant_shape = _core.is_constant_shape

# In source locations and error messages, the user's code is the caller of this package.
_source_info.register_exclusion(os.path.dirname(os.path.dirname(__file__)))


# Libraries between a user's model and jax.lax, by module name.
_FRAMEWORKS = ("equinox", "flax", "haiku", "jaxtyping", "keras", "optax", "qwix")


def user_location(ctx) -> str:
    """File, line and function of the user's code of a lowering context, or "".

    It is the innermost frame outside JAX, this package and the model libraries; without one, a
    frame of a model library.
    """
    found = list(_source_info.user_frames(ctx.traceback))
    if not found:
        return ""
    loaded = (getattr(sys.modules.get(name), "__file__", None) for name in _FRAMEWORKS)
    folders = tuple(os.path.dirname(file) + os.sep for file in loaded if file)
    own = (frame for frame in found if not frame.file_name.startswith(folders))
    frame = next(own, found[0])
    return f"{frame.file_name}:{frame.start_line} ({frame.function_name})"


# Scopes that JAX adds to a name stack: functions and control flow.
_CONSTRUCT = re.compile(
    r"jit\(.*\)|closed_call|while|body|body_pred|cond|branch_\d+_fun|checkpoint|shard_map"
)


def module_path(ctx) -> str:
    """The named scopes of a lowering context, such as Flax modules, or ""."""
    scopes = (e.name for e in ctx.name_stack.stack if isinstance(e, _source_info.Scope))
    names = (name for scope in scopes for name in scope.split("/") if name not in ("", "~"))
    return "/".join(name for name in names if not _CONSTRUCT.fullmatch(name))


def lower_afresh(traced: jax.stages.Traced, **options) -> jax.stages.Lowered:
    """``traced.lower``, even if JAX has cached this lowering of the program.

    The cache's key is the program's identity, so a copy has a separate entry, which is freed with
    the copy.
    """
    traced = copy.copy(traced)
    traced._params = {**traced._params, "jaxpr": traced._params["jaxpr"].replace()}
    traced._lojax = None
    return traced.lower(**options)


def explain_errors(part: str, hint: str) -> None:
    """Adds a hint to XLA compiler errors whose message contains ``part``."""

    def explained(error):
        return type(error)(f"{error}. {hint}") if part in str(error) else None

    _compiler.register_xla_runtime_error_handler(explained)


def set_attribute(value, name: str, number: int) -> None:
    """Marks the operation that made a value of the program being lowered."""
    attribute = _ir.IntegerAttr.get(_ir.IntegerType.get_signless(64), number)
    value.owner.attributes[name] = attribute


def set_global(context, value) -> None:
    """Sets a user context (``jax.make_user_context``) for all threads without their own value."""
    getattr(context, "set_global", context._obj.set_global)(value)  # JAX 0.9 has only the inner one


def rewrite_before_lowering(rewrite) -> None:
    """Applies a function from jaxprs (not closed) to jaxprs before their lowering.

    It receives every program separately: the whole one, and the functions, branches and loop bodies
    in it. JAX has no interface for this; if its lowering function has another name, programs are
    lowered unchanged.
    """
    name = "jaxpr_subcomp"
    original = getattr(_mlir, name, None)
    if original is None:
        return

    @functools.wraps(original)
    def lower(ctx, jaxpr, *args, **kwargs):
        return original(ctx, rewrite(jaxpr), *args, **kwargs)

    setattr(_mlir, name, lower)


def lowering_rule(primitive, platform: str):
    """The lowering rule of a primitive on a platform."""
    entry = _mlir._platform_specific_lowerings[platform].get(primitive)
    return (entry or _mlir._lowerings[primitive]).rule


# --- sharding ---

# Raised by `tiling_partitions` for a tiling that does not fit the mesh.
NOT_A_TILING_OF_THE_MESH = (AssertionError, NotImplementedError, StopIteration, ValueError)


def tiling_partitions(tiling, mesh, rank: int) -> tuple[tuple[str, ...], ...]:
    """The mesh axes over which XLA's tiling (``HloSharding``) splits each array axis."""
    spec = _sharding_impls.parse_flatten_op_sharding(tiling, mesh)[0]
    axes = [(a,) if isinstance(a, str) else tuple(a or ()) for a in spec]
    return (*axes, *((),) * (rank - len(axes)))


def tiling_devices(tiling) -> tuple[int, ...]:
    """The devices of XLA's tiling, tile by tile."""
    return tuple(map(int, tiling.tile_assignment_devices()))


def _manual_axes(ctx) -> set[str]:
    # JAX 0.9 omits the axes of an outer `shard_map` here; types have them.
    found = set(ctx.module_context.axis_context.manual_axes)
    for aval in ctx.avals_in:
        mesh = aval.sharding.mesh
        types = zip(mesh.axis_names, mesh.axis_types, strict=True)
        found |= {name for name, kind in types if kind == jax.sharding.AxisType.Manual}
    return found


def device_axes(ctx) -> tuple[tuple[int, bool], ...]:
    """The axes of a lowered program's devices: size, and whether manual.

    Empty if XLA's partitioner has nothing to split: on one device, if all axes are manual, and in
    an exported program, which may outlive the partitioner's callback.
    """
    module = ctx.module_context
    axes = module.axis_context
    if module.lowering_parameters.for_export:
        return ()
    if isinstance(axes, _sharding_impls.ShardingContext):
        return () if axes.num_devices == 1 else ((axes.num_devices, False),)
    if isinstance(axes, _sharding_impls.SPMDAxisContext):
        manual = _manual_axes(ctx)
        found = [(size, name in manual) for name, size in axes.mesh.shape.items()]
        return () if all(done or size == 1 for size, done in found) else tuple(found)
    return ()


def split_over_all(ctx) -> tuple[Any, Any]:
    """A value split over all mesh axes that are not manual, one array axis each, and its type."""
    mesh, manual = ctx.module_context.axis_context.mesh, _manual_axes(ctx)
    names = [name for name in mesh.axis_names if name not in manual]
    aval = jax.core.ShapedArray(tuple(mesh.shape[name] for name in names), np.dtype(bool))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*names))

    def made():
        return jax.lax.with_sharding_constraint(jnp.zeros(aval.shape, aval.dtype), sharding)

    (value,) = _mlir.lower_fun(made, multiple_results=False)(ctx.replace(avals_in=[]))
    return value, aval


def placed_context(count: int):
    """A lowering context for automatic sharding over ``count`` devices.

    JAX needs the devices only to wrap XLA's shardings in an object, of which only the sharding is
    used; the program may be for devices outside this process.
    """
    return _sharding_impls.ShardingContext(count, (jax.devices()[0],) * count)


_NAMING = threading.Lock()


def name_partitioner(module_context, result, name: str) -> None:
    """Identifies the callback of a lowered ``custom_partitioning`` by a name, not its address.

    Args:
        module_context: the context of the program being lowered.
        result: a result of the call.
        name: part of the program, and so of its key in JAX's persistent cache. It stands for all
            that decides what the callback answers: calls of one name share one callback, which
            lives as long as one of their programs.
    """
    call = result.owner
    table = _custom_partitioning._sharding_callbacks
    address = _ir.StringAttr(call.attributes["backend_config"]).value
    callback = copy.copy(table[address.encode()])
    # The rest of the context holds the lowered module, which the callback may outlive.
    callback.module_context = types.SimpleNamespace(
        platforms=module_context.platforms, backend=module_context.backend
    )
    with _NAMING:  # the table keeps no value alive
        callback = table.setdefault(name.encode(), callback)
    module_context.add_keepalive(callback)
    call.attributes["backend_config"] = _ir.StringAttr.get(name)


# Raised at trace time for types with incompatible shardings on an explicit mesh.
ShardingTypeError = _core.ShardingTypeError


def canonical_out_sharding(sharding, name: str):
    """An ``out_sharding`` argument as a NamedSharding, checked as lax checks its own."""
    return _sharding_impls.canonicalize_sharding(sharding, name)


# --- differentiation ---

# The functions by which JAX differentiates a user's function: `grad`, `vjp`, `linearize` and
# `jacrev` call the first, `jvp` and `jacfwd` the second, `hessian` both.
_DIFFERENTIATION = ((_ad, "linearize"), (_api, "_jvp"))


def replace_differentiated(replaced: Callable[[Callable], Callable]) -> None:
    """Makes JAX differentiate ``replaced(function)`` instead of each function.

    Args:
        replaced: called in the thread and trace of the differentiation. Its argument may be called
            any number of times, with positional arguments.

    Raises:
        AttributeError: this version of JAX differentiates elsewhere; nothing has changed.
    """

    def within(original: Callable) -> Callable:
        @functools.wraps(original)
        def differentiating(function: Any, *args: Any, **kwargs: Any) -> Any:
            if hasattr(function, "call_wrapped"):  # JAX 0.9
                function = _replaced_wrapped(function, replaced)
            else:
                function = replaced(function)
            return original(function, *args, **kwargs)

        return differentiating

    originals = [getattr(module, name) for module, name in _DIFFERENTIATION]
    for (module, name), original in zip(_DIFFERENTIATION, originals, strict=True):
        setattr(module, name, within(original))


def _replaced_wrapped(function: Any, replaced: Callable[[Callable], Callable]) -> Any:
    """The same for a ``WrappedFun``, which stores the trees of its results, once."""

    def call(*args: Any) -> Any:
        for store in function.stores:
            if store is not None:
                store.reset()
        return function.call_wrapped(*args)

    other = replaced(call)
    if other is call:
        return function
    return _linear_util.wrap_init(other, debug_info=function.debug_info)


# --- programs (jaxprs) ---


def open_jaxpr(jaxpr):
    """The equations of a jaxpr that may be closed over constants."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def with_jaxpr(closed, jaxpr):
    """A jaxpr closed like ``closed``, with the equations of another one."""
    return closed.replace(jaxpr=jaxpr) if hasattr(closed, "jaxpr") else jaxpr


# A variable of a program with a given type.
variable = _core.gensym()


def located_at(eqn):
    """A context in which traced operations get the source location and context of ``eqn``."""
    stack = contextlib.ExitStack()
    source = eqn.source_info
    stack.enter_context(_source_info.user_context(source.traceback, name_stack=source.name_stack))
    stack.enter_context(eqn.ctx.manager)
    return stack


def varying(*avals):
    """A context in which arrays of these types keep their varying mesh axes (shard_map)."""
    stack = contextlib.ExitStack()
    for aval in avals:
        kind = getattr(aval, "mat", aval)
        if getattr(kind, "varying", None) or getattr(kind, "vma", None):
            mesh = aval.sharding.mesh
            axes = [(name, mesh.shape[name]) for name in mesh.manual_axes]
            stack.enter_context(_core.extend_axis_env_nd(axes))
            stack.enter_context(_config._check_vma(True))
            break
    return stack


def transposed(eqn):
    """Whether an equation comes from JAX's transpose of a program, as in a gradient."""
    stack = eqn.source_info.name_stack.stack
    return any(isinstance(e, _source_info.Transform) and e.name == "transpose" for e in stack)


def within(outer, eqn):
    """An equation of a function called by ``outer``, as an equation of the caller."""
    names = outer.source_info.name_stack + eqn.source_info.name_stack
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=names))


def annotated(eqn, **metadata: str):
    """An equation with XLA metadata, which its lowering can read."""
    with eqn.ctx.manager, _xla_metadata.set_xla_metadata(**metadata):
        return _core.new_jaxpr_eqn(
            eqn.invars, eqn.outvars, eqn.primitive, eqn.params, eqn.effects, eqn.source_info
        )


def metadata(eqn) -> dict[str, Any]:
    """The XLA metadata of an equation."""
    return eqn.ctx.xla_metadata or {}


def inlinable(eqn) -> bool:
    """Whether a jitted function's call has no options beyond its computation."""
    params = eqn.params
    unspecified = all(
        isinstance(s, _sharding_impls.UnspecifiedValue)
        for s in (*params["in_shardings"], *params["out_shardings"])
    )
    laid_out = any(x is not None for x in (*params["in_layouts"], *params["out_layouts"]))
    donated = any(params["donated_invars"])
    return unspecified and not (laid_out or donated or params.get("compiler_options_kvs"))


# Runs a program: a closed one, or equations and constants separately.
eval_jaxpr = jax.core.eval_jaxpr


def same_type(a, b) -> bool:
    """Whether two arrays have one type, including shardings and varying mesh axes."""
    return _core.typematch(a, b)
