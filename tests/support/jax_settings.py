"""JAX settings of tests and their programs: virtual devices, quick compilation, poisoned memory."""

from __future__ import annotations

import ctypes
import os
import sys

import gpus
import jax
from xla_flags import QUICK_TO_COMPILE

# JAX reads these when the first backend starts: eight CPU devices for the sharding tests, and no
# preallocation on a GPU, which tests share with processes that they start.
VIRTUAL_DEVICES = 8
_DEVICES = "--xla_force_host_platform_device_count"
if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
    flags = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}={VIRTUAL_DEVICES}"
    os.environ["XLA_FLAGS"] = flags.strip()

# On a CPU most of the tests' time goes into compiling XLA's operations around the kernels, and
# lax's convolutions. The flags halve it, and without optimisation a third of the rest is saved. On
# a machine with a GPU, XLA compiles as for users.
UNOPTIMIZED = not os.path.exists("/dev/nvidiactl")
if UNOPTIMIZED and QUICK_TO_COMPILE not in os.environ["XLA_FLAGS"]:
    os.environ["XLA_FLAGS"] += f" {QUICK_TO_COMPILE}"
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

os.environ.setdefault("KERAS_BACKEND", "jax")  # read when Keras is imported

# "auto" leaves nothing to XLA that a kernel accepts. Tests check kernels, on shapes so small that
# XLA is often faster. test_choice.py tests the choice.
os.environ["JAXCONV_ALGORITHM"] = "native"

# glibc fills every new allocation with 0xfe: results and workspaces on the CPU begin as garbage
# (-1.7e38 in float32, NaN in float16), not as zeros that hide missing stores.
POISON_BYTE = 0xFE
M_PERTURB = -6  # from malloc.h; the fill is the complement of the parameter
POISONED = sys.platform == "linux" and ctypes.CDLL(None).mallopt(M_PERTURB, POISON_BYTE ^ 0xFF) == 1

gpus.spread_workers()  # no test needs several GPUs; several_gpus.py is a separate program

jax.config.update("jax_default_matmul_precision", None)
jax.config.update("jax_disable_most_optimizations", UNOPTIMIZED)
