"""Convolutions in JAX operations: by lax, im2col, exact integers, Winograd."""
