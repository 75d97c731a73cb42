"""A GPU that this machine need not have: XLA compiles programs for its description.

The optimised program shows the kernels that XLA makes and the bytes that they move. XLA measures no
kernels for it, so that it chooses its own convolutions and products by rules, not by their times.
Needs JAX's CUDA plugin (``pip install "jax[cuda13]"``), no driver, and this library's CUDA kernels.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from jaxconv._src.library import native

# The properties by which XLA compiles: its message stream_executor.GpuTargetConfigProto as text.
# Sources: cudaGetDeviceProperties of the GPU, and NVIDIA's data sheet for the bandwidth.
DESCRIPTIONS = {
    "h200": """
        platform_name: "CUDA"
        device_description_str: "NVIDIA H200"
        dnn_version_info { major: 9 minor: 10 patch: 0 }
        gpu_device_info {
          cuda_compute_capability { major: 9 minor: 0 }
          core_count: 132
          fpus_per_core: 128
          clock_rate_ghz: 1.98
          memory_bandwidth: 4800000000000
          l2_cache_size: 52428800
          device_memory_size: 151397597184
          threads_per_warp: 32
          threads_per_block_limit: 1024
          threads_per_core_limit: 2048
          shared_memory_per_block: 49152
          shared_memory_per_block_optin: 232448
          shared_memory_per_core: 233472
          registers_per_block_limit: 65536
          registers_per_core_limit: 65536
          block_dim_limit_x: 2147483647
          block_dim_limit_y: 65535
          block_dim_limit_z: 65535
        }
    """,
}


def described(name: str, count: int = 1) -> list[jax.Device]:
    """Devices to compile for; from now on jaxconv selects kernels for them in this process.

    Args:
        name: a key of ``DESCRIPTIONS``.
        count: the number of GPUs of one host.

    Raises:
        RuntimeError: JAX's CUDA plugin or this library's CUDA kernels are not installed.
    """
    if isinstance(kernels := native.load("cuda"), native.Refusal):
        raise RuntimeError(f"cannot compile for {name}: {kernels.reason}")
    devices = _devices(name, count)
    os.environ["JAXCONV_TARGET"] = name
    return devices


@functools.cache
def _devices(name: str, count: int) -> list[jax.Device]:
    try:
        topology = topologies.get_topology_desc(
            topology_name=name,
            platform="cuda",
            target_config=DESCRIPTIONS[name],
            topology=f"1x1x{count}",
        )
    except NotImplementedError:
        raise RuntimeError(
            f'cannot compile for {name} without JAX\'s CUDA plugin: pip install "jax[cuda13]"'
        ) from None
    return list(topology.devices)


def types_on(device: jax.Device, tree: Any) -> Any:
    """The types of a tree of arrays or types, placed on a described device."""
    sharding = SingleDeviceSharding(device)
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), tree)
