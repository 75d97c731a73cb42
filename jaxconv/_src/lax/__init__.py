"""The lowering of `jax.lax`'s convolutions."""
