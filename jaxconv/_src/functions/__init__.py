"""The public functions: they check their arguments and bind the primitives."""
