"""Every private or version-dependent JAX import, in one place (JAX 0.9.2 to 0.11.2)."""

from __future__ import annotations

from jax._src import core as _core
from jax._src import dispatch as _dispatch
from jax._src.lax import lax as _lax

# Turns every form of `precision` that jax.lax takes (None, names, enums, pairs), and the global
# default, into None or a pair of Precision.
canonicalize_precision = _lax.canonicalize_precision

# Evaluates a primitive outside jit by compiling it alone.
apply_primitive = _dispatch.apply_primitive

# Gives the operands of one primitive the same varying type inside `shard_map` (a replicated filter
# beside a sharded batch), as lax does before it binds. Without it the gradient of the replicated
# operand has the wrong type.
if hasattr(_core, "auto_insert_reshard"):
    match_varying = _core.auto_insert_reshard
else:
    match_varying = _core.standard_insert_pvary
