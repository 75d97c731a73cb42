"""The primitives of what stands around convolutions: normalisation and pooling."""
