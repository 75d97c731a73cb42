"""Conversion of public functions' operands to arrays of numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike


def array(name: str, value: ArrayLike) -> jax.Array:
    """An operand as an array of numbers.

    Classes of this library whose objects are no arrays have ``instead_of_an_array``, a text that
    says what the object is and where to pass it.

    Raises:
        TypeError: ``value`` is no array and cannot be converted to one.
    """
    if what := getattr(value, "instead_of_an_array", ""):
        raise TypeError(f"{name}: expected an array, got {what}")
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
