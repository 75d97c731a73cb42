"""Convolutions in operations of JAX: by lax, im2col, exact integers, Winograd."""
