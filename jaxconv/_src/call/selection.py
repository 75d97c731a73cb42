"""Selection of kernels: the parts common to all primitives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxconv._src.library import native
from jaxconv._src.problem.spec import ConvSpec, Op, Sizes, known
from jaxconv._src.ways import im2col, winograd_jax

PLATFORMS = native.PLATFORMS

# The fastest by prediction: of the kernels and XLA's own convolution, and of the kernels alone.
AUTO, NATIVE = "auto", "native"

# Not an algorithm of this library: the caller requests XLA's own convolution.
XLA = "xla"

# The textbook algorithm.
IM2COL = "im2col"

# Algorithms written in JAX, by name. On every platform they compute problems that no kernel of this
# name accepts. A module has ``OPS``, the operations to which the algorithm applies (selection
# chooses for the others); ``refusal``, why it does not accept a problem; ``instance`` and
# ``workspace_bytes`` for ``explain``; and ``convolve``.
IN_JAX = {IM2COL: im2col, **dict.fromkeys(winograd_jax.ALGORITHMS, winograd_jax)}

# "auto" with Winograd kernels of any tile, or of one tile, as additional candidates, regardless of
# their error. Maps the name to the added algorithm.
WITH_WINOGRAD = {f"{AUTO}+{name}": name for name in winograd_jax.ALGORITHMS}

# The algorithms that choose by prediction, and those that accept every convolution.
PREDICTED = (AUTO, NATIVE, *WITH_WINOGRAD)
UNCONDITIONAL = (*PREDICTED, XLA, IM2COL)

# For platforms whose int8 kernels belong to another primitive: the module whose ``plan`` and
# ``convolve`` convert the int8 operands of any convolution for them.
INTEGERS: dict[str, Any] = {}

# The reason for convolutions without anything to compute.
EMPTY = "a tensor has no elements"
CROPPED = "negative padding crops the whole input"


def families() -> dict[str, tuple[str, ...]]:
    """The kernel families of this build, by platform."""
    loaded = {name: native.load(name) for name in PLATFORMS}
    return {
        name: () if isinstance(platform, native.Refusal) else tuple(platform.module.families())
        for name, platform in loaded.items()
    }


def refused(reason: str) -> native.Selection:
    """A selection without a kernel, for a reason of this package."""
    return native.Selection(None, refusals=(native.Refusal("jaxconv", reason),))


def reasons(refusals: Sequence[native.Refusal]) -> str:
    return "; ".join(f"{kernel}: {reason}" for kernel, reason in refusals)


def applies(algorithm: str, op: Op) -> bool:
    """Whether an algorithm applies to an operation; if not, selection chooses as for "auto".

    An instance name applies to one operation only.
    """
    if algorithm in IN_JAX:
        return op in IN_JAX[algorithm].OPS
    prefixes = tuple(f"{other.value}_" for other in Op if other is not op)
    return not algorithm.startswith(prefixes)


def out_of_question(conv: ConvSpec, sizes: Sizes) -> str:
    """Why no kernel of any platform comes into question for a convolution, or ""."""
    if conv.symbolic or not all(map(known, (sizes.batch, sizes.n, sizes.c, sizes.k))):
        return "symbolic shape; kernels are selected for known extents"
    if sizes.empty:
        return EMPTY
    if not 1 <= conv.rank <= 3:
        return f"{conv.rank} spatial axes; kernels take 1 to 3"
    return CROPPED if conv.crops_everything else ""


def kernel(platform: str, key: str, algorithm: str) -> native.Selection:
    """The kernel instance for a problem key, or why there is none.

    Raises:
        ValueError: the demanded algorithm is not known on this platform.
    """
    kernels = native.load(platform)
    if isinstance(kernels, native.Refusal):
        return native.Selection(None, refusals=(kernels,))
    if algorithm == AUTO:
        algorithm = native.automatic()
    try:
        return kernels.select(key, algorithm, native.target())
    except ValueError as error:
        if algorithm not in (AUTO, NATIVE):
            raise
        # A problem that JAX accepts but the library does not, because its numbers are too large.
        return refused(str(error))
