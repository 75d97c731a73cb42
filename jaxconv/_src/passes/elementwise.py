"""The primitive elementwise: elementwise functions of many small arrays by one kernel.

Custom calls read filters converted to bfloat16, scales and biases, which are computed from a
program's parameters. XLA launches a kernel of about 1.5 us for each. On a single NVIDIA GPU one
kernel computes all of them. On several devices, on other platforms, under vmap and in derivatives
they are JAX operations.

The functions are computed in float32, with explicit steps where the program rounds to 16 bits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from jaxconv._src.call import record, rules
from jaxconv._src.sharding import partition

TARGET = "jaxconv_elementwise"

elementwise_p = Primitive(TARGET)
elementwise_p.multiple_results = True

# The steps of a function, in the order of cc/cuda/elementwise/elementwise.h.
STEPS: dict[str, Callable[..., jax.Array]] = {
    "add": jnp.add,
    "sub": jnp.subtract,
    "mul": jnp.multiply,
    "div": jnp.divide,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "neg": jnp.negative,
    "rsqrt": lax.rsqrt,
    "sqrt": lax.sqrt,
    "float16": lambda a: a.astype(jnp.float16).astype(np.float32),
    "bfloat16": lambda a: a.astype(jnp.bfloat16).astype(np.float32),
}

# The limits of a function and of a call (cc/cuda/elementwise/elementwise.h).
MOST_OPERANDS, MOST_CONSTANTS, MOST_STEPS = 6, 4, 12
MOST_FUNCTIONS, MOST_RESULTS = 32, 256


@dataclasses.dataclass(frozen=True)
class Function:
    """An elementwise function of float32 numbers.

    Its values have consecutive indices: operands, constants, then the result of each step. The last
    value is the result.

    Attributes:
        operands: the number of operands.
        constants: the constants' values.
        steps: for each step a name in ``STEPS``, and the indices of the one or two values it reads.
    """

    operands: int
    constants: tuple[float, ...]
    steps: tuple[tuple[str, tuple[int, ...]], ...]

    def __call__(self, *operands: jax.Array) -> jax.Array:
        values = [o.astype(np.float32) for o in operands]
        values += [jnp.float32(c) for c in self.constants]
        for name, read in self.steps:
            values.append(STEPS[name](*(values[i] for i in read)))
        return values[-1]

    @property
    def code(self) -> list[int]:
        """The function as numbers, for the custom call's attribute ``functions``."""
        bits = np.asarray(self.constants, np.float32).view(np.uint32)
        names = list(STEPS)
        steps = [n for name, read in self.steps for n in (names.index(name), read[0], read[-1])]
        return [self.operands, len(bits), *map(int, bits), len(self.steps), *steps]


@dataclasses.dataclass(frozen=True)
class Result:
    """A result of a call.

    Attributes:
        function: the function that computes it.
        operands: the function's operands, as positions among the call's operands. Each array has
            as many elements as the result, in the same row-major order, or one element.
        shape, dtype: the type of the result.
    """

    function: Function
    operands: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: np.dtype


def elementwise(*operands: jax.Array, results: tuple[Result, ...]) -> list[jax.Array]:
    """The results, each with its ``shape`` and ``dtype``."""
    return elementwise_p.bind(*operands, results=results)


def in_jax(*operands: jax.Array, results: tuple[Result, ...]) -> list[jax.Array]:
    """The same in JAX operations."""
    found = []
    for result in results:
        given = [operands[i] for i in result.operands]
        given = [o.reshape(result.shape if o.size > 1 else ()) for o in given]
        value = result.function(*given).astype(result.dtype)
        found.append(jnp.broadcast_to(value, result.shape))
    return found


def key(operands: Sequence[Any], results: tuple[Result, ...]) -> str:
    """The key of the pass."""
    moved = sum(o.size * o.dtype.itemsize for o in operands)
    moved += sum(math.prod(r.shape) * r.dtype.itemsize for r in results)
    return f"elementwise f32 n{len(results)} b{moved}"


def _abstract_eval(*operands: Any, results: tuple[Result, ...]) -> list[Any]:
    like = operands[0]
    return [like.update(shape=r.shape, dtype=r.dtype, weak_type=False) for r in results]


def _jvp(primals, tangents, *, results: tuple[Result, ...]):
    tangent = rules.tangent_of(in_jax, primals, tangents, results=results)
    return elementwise_p.bind(*primals, results=results), tangent


def _lower(platform: str, ctx, *operands, results: tuple[Result, ...]):
    """Lowers to one custom call on one device, else to JAX operations."""
    asked = key(ctx.avals_in, results)
    plan = rules.planned(asked) if platform == "cuda" else None
    if plan is None or plan.kernel is None or partition.devices_of(ctx) is not None:
        return _lower_in_jax(ctx, *operands, results=results)
    functions = list(dict.fromkeys(r.function for r in results))
    attributes = dict(
        functions=np.asarray([n for f in functions for n in f.code], np.int64),
        results=np.asarray(
            [n for r in results for n in (functions.index(r.function), *r.operands)], np.int64
        ),
    )
    found = jax.ffi.ffi_lowering(TARGET)(ctx, *operands, **attributes)
    return record.emit_pass(ctx, asked, plan, found)


_lower_in_jax = mlir.lower_fun(in_jax, multiple_results=True)

ad.primitive_jvps[elementwise_p] = _jvp
ad.primitive_transposes[elementwise_p] = rules.transposed_as(in_jax)
rules.register(
    elementwise_p,
    shapes=_abstract_eval,
    batch=rules.batched_as(in_jax),
    lower=_lower,
    elsewhere=_lower_in_jax,
)
