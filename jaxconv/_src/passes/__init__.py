"""The primitives around convolutions: normalisation and pooling."""
