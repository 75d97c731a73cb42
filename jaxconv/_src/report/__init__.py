"""What became of a program's convolutions: `explain`, `kernels`."""
