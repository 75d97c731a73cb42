"""The primitive of 8-bit convolutions, its layouts, and lax's integer convolutions."""
