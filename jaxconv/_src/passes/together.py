"""The primitive together: its operands, which XLA computes before anything that reads a result.

In XLA's program it is one optimisation barrier. Derivatives and batches are those of the identity,
without a barrier: one behind gradients would keep all of them until the last is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxconv._src import compat

together_p = Primitive("together")
together_p.multiple_results = True


def together(*arrays: jax.Array) -> list[jax.Array]:
    """The arrays, behind a barrier."""
    return together_p.bind(*arrays)


def _barrier(*arrays: jax.Array) -> Sequence[jax.Array]:
    return lax.optimization_barrier(arrays)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    return together_p.bind(*primals), list(tangents)


def _batch(operands: Sequence[Any], axes: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    return together_p.bind(*operands), list(axes)


@together_p.def_abstract_eval
def _types(*avals: Any) -> list[Any]:
    return list(avals)


together_p.def_impl(_barrier)
ad.primitive_jvps[together_p] = _jvp
ad.primitive_transposes[together_p] = lambda cotangents, *_: list(cotangents)
batching.primitive_batchers[together_p] = _batch
compat.report_nans(together_p)
mlir.register_lowering(together_p, mlir.lower_fun(_barrier, multiple_results=True))
