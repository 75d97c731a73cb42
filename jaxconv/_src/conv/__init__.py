"""The primitives of floating-point convolutions, and the canonical forms of lax's."""
