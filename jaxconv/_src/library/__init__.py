"""The compiled kernels, and the custom calls that run them."""
