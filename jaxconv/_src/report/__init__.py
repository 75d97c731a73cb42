"""Reports on a program's convolutions and on the kernels: `explain`, `kernels`."""
