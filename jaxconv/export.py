"""``jax.export`` with this library's kernels: what to pass, and what to call before loading."""

from __future__ import annotations

import re

import jax

from jaxconv._src import compat
from jaxconv._src.call import selection
from jaxconv._src.conv import fused
from jaxconv._src.int8 import int8_primitive
from jaxconv._src.library import custom_call, native, retired
from jaxconv._src.passes import (
    activated_sums,
    elementwise,
    masked_sums,
    max_pool_gradient,
    max_pooling,
    moments,
    normalise,
    normalise_add,
)
from jaxconv._src.problem.spec import Op


def disabled_checks() -> list[jax.export.DisabledSafetyCheck]:
    """The safety checks to switch off, so that a program may hold custom calls of this library.

        exported = jax.export.export(f, disabled_checks=jaxconv.export.disabled_checks())(x)

    JAX refuses custom calls that are not on its list of compatible calls. Ours contain the kernel's
    name and the problem as text. A process that loads the program needs this version of the
    library, or a newer one that still has the kernel; otherwise the call fails with an error that
    names it.
    """
    names = [
        *(custom_call.call_target(op) for op in Op),
        fused.TARGET,
        int8_primitive.TARGET,
        activated_sums.TARGET,
        elementwise.TARGET,
        masked_sums.TARGET,
        max_pooling.TARGET,
        max_pool_gradient.TARGET,
        moments.TARGET,
        normalise.TARGET,
        normalise_add.TARGET,
    ]
    return [jax.export.DisabledSafetyCheck.custom_call(name) for name in names]


def register() -> dict[str, str]:
    """Makes the kernels known to XLA, for a process that only deserialises programs.

    Tracing a convolution registers the kernels; a program loaded by ``jax.export.deserialize``
    traces none.

    Returns:
        For each platform, "" or why its kernels cannot be used in this process.
    """
    loaded = {platform: native.load(platform) for platform in selection.PLATFORMS}
    return {
        platform: kernels.reason if isinstance(kernels, native.Refusal) else ""
        for platform, kernels in loaded.items()
    }


def missing_kernels(exported: jax.export.Exported) -> dict[str, str]:
    """The kernels that a program names and this installation lacks, each with advice.

    Args:
        exported: by this or another version of jaxconv.

    Returns:
        Empty if the program can run. Otherwise advice for each missing kernel, or for the platform
        whose kernels cannot be used in this process at all.
    """
    named = set(re.findall(r'instance = "(\w+)"', exported.mlir_module()))
    found, known = {}, set()
    for platform in set(exported.platforms) & set(selection.PLATFORMS) if named else ():
        kernels = native.load(platform)
        if isinstance(kernels, native.Refusal):
            found[platform] = kernels.reason
            return found
        known |= set(kernels.kernels())
    return {name: retired.advice(name) for name in sorted(named - known)}


compat.explain_errors(
    "No FFI handler registered for jaxconv_",
    "Call jaxconv.register() before the program runs; it makes the kernels known, or returns why "
    "they cannot be used in this process.",
)
