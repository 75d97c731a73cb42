"""Under the convolutions of `jax.lax`."""
