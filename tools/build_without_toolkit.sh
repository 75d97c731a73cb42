#!/usr/bin/env bash
# Builds a wheel with the CUDA kernels as on a machine without a CUDA toolkit, by NVIDIA's pip packages:
# in a mount namespace of its own, where the toolkit of this machine is hidden. Linux, root.
#
#     tools/build_without_toolkit.sh [folder for the wheel]
set -euo pipefail
cd "$(dirname "$0")/.."
export JAXCONV_CUDA=ON
unset CUDA_HOME CUDACXX JAXCONV_NVCC
exec unshare --mount bash -euo pipefail -c '
  for folder in $(find /usr/local -maxdepth 1 -type d -name "cuda-*"); do
    mount -t tmpfs hidden "$folder"
  done
  for nvcc in $(type -aP nvcc || true); do
    mount --bind /dev/null "$nvcc"
  done
  if nvcc --version 2>/dev/null; then
    echo "nvcc is still there"
    exit 1
  fi
  python3 -m pip wheel . --verbose --no-deps --wheel-dir "$1"
  unzip -p "$1"/jaxconv-*.whl _jaxconv/configure.txt
' build "${1:-build/without_toolkit}"
