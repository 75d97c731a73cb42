"""With programmatic dependent launch, kernels that start early read no input early.

A convolution lets the next kernel of the stream start while it stores its last tiles, and XLA
launches its own fusions with programmatic dependent launch. If a fusion read its input before the
convolution's stores are visible, the bits would differ from those of separate operations.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# A separate program, because XLA decides at process start whether it records command buffers.
PROGRAM = """
import jax, jax.numpy as jnp, numpy as np, jaxconv

CHAINS, ROUNDS = 32, 32

def convolve(x, w):
    return jaxconv.conv(x, w, padding="SAME", algorithm="native")

def fusion(y, scale):
    return jnp.maximum(y * scale, 0) + 1

@jax.jit
def together(xs, w, scale):
    return [fusion(convolve(x, w), scale) for x in xs]

one, other = jax.jit(convolve), jax.jit(fusion)
wrong = 0
for round in range(ROUNDS):
    key = jax.random.PRNGKey(round)
    # Few tiles and many, so that the last tiles end at different times.
    size, c = [(14, 64), (28, 128), (56, 64), (7, 256)][round % 4]
    xs = [jax.random.normal(jax.random.fold_in(key, i), (4, size, size, c), jnp.bfloat16)
          for i in range(CHAINS)]
    w = jax.random.normal(jax.random.fold_in(key, 99), (3, 3, c, c), jnp.bfloat16)
    scale = jnp.bfloat16(0.5)
    results = together(xs, w, scale)
    for x, result in zip(xs, results):
        y = jax.block_until_ready(one(x, w))
        wrong += not np.array_equal(np.asarray(other(y, scale)), np.asarray(result))
print("chains", CHAINS * ROUNDS, "wrong", wrong)
"""


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["graph", "stream"])
def test_a_fusion_after_a_convolution_waits_for_it(mode):
    flags = os.environ.get("XLA_FLAGS", "")
    if mode == "stream":
        flags += " --xla_gpu_enable_command_buffer="
    environment = {**os.environ, "XLA_FLAGS": flags.strip()}
    command = [sys.executable, "-c", PROGRAM]
    ran = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert ran.stdout.strip() == "chains 1024 wrong 0", ran.stdout + ran.stderr[-4000:]
