"""An operand of any public function as an array of numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxconv._src.winograd_filter import PreparedFilter


def array(name: str, value: ArrayLike) -> jax.Array:
    """An operand as an array of numbers.

    Raises:
        TypeError: ``value`` is none, and has no conversion to one.
    """
    if isinstance(value, PreparedFilter):
        raise TypeError(
            f"{name}: expected an array, got a filter prepared for {value.tile}; those are the "
            "argument w of jaxconv.conv"
        )
    if isinstance(value, jax.ShapeDtypeStruct):
        raise TypeError(
            f"{name}: expected an array, got {value!r}, which has no values; jax.eval_shape, "
            "jax.jit(...).lower and jaxconv.explain take such arguments of a function"
        )
    dtype = getattr(value, "dtype", None)
    if dtype == jax.dtypes.float0:
        raise TypeError(
            f"{name}: expected numbers, got dtype float0 in shape {np.shape(value)}: JAX's gradient"
            " with respect to integers"
        )
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError) as error:
        got = f"dtype {dtype}" if isinstance(value, np.ndarray) else repr(value)
        raise TypeError(f"{name}: expected an array of numbers, got {got}: {error}") from error
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        raise TypeError(f"{name}: expected an array of numbers, got dtype {array.dtype}")
    return array
