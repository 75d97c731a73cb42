"""JAX as tests and their programs have it: virtual devices, quick compilation, poisoned memory."""

from __future__ import annotations

import ctypes
import os
import sys

import gpus
import jax
from xla_flags import QUICK_TO_COMPILE

# Read when the first backend starts: eight CPU devices for the sharding tests, and no preallocation
# on a GPU, which tests share with processes that they start.
VIRTUAL_DEVICES = 8
_DEVICES = "--xla_force_host_platform_device_count"
if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
    flags = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}={VIRTUAL_DEVICES}"
    os.environ["XLA_FLAGS"] = flags.strip()

# Compiling what XLA computes around our kernels, and lax's convolutions beside them, takes most of
# the time of the tests on a CPU: half of it less with these flags, a third less of the rest without
# optimisation. On a GPU machine XLA compiles as for users.
UNOPTIMIZED = not os.path.exists("/dev/nvidiactl")
if UNOPTIMIZED and QUICK_TO_COMPILE not in os.environ["XLA_FLAGS"]:
    os.environ["XLA_FLAGS"] += f" {QUICK_TO_COMPILE}"
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

os.environ.setdefault("KERAS_BACKEND", "jax")  # read when Keras is imported

# "auto" leaves nothing to XLA that a kernel accepts: the tests are of the kernels, on shapes that
# are small enough for XLA to be faster. test_choice.py is of the choice.
os.environ["JAXCONV_ALGORITHM"] = "native"

# glibc then fills every new allocation with 0xfe: results and workspaces on the CPU begin as
# garbage (-1.7e38 in float32, NaN in float16), never as zeros that hide an element nobody wrote.
POISON_BYTE = 0xFE
M_PERTURB = -6  # from malloc.h; the fill is the complement of the parameter
POISONED = sys.platform == "linux" and ctypes.CDLL(None).mallopt(M_PERTURB, POISON_BYTE ^ 0xFF) == 1

gpus.spread_workers()  # no test needs several GPUs: several_gpus.py is a program of its own

jax.config.update("jax_default_matmul_precision", None)
jax.config.update("jax_disable_most_optimizations", UNOPTIMIZED)
