"""The partition of a call over devices, on every kind of mesh."""
