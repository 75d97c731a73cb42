"""The calls that ``jaxconv.fuse`` makes for a spelling, and the operations that no call computes.

A spelling is a ``spellings.Spelling``.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxprs import equations

from jaxconv._src.passes.normalise import Form
from jaxconv.bench import described_gpu, hlo

ORDERS = ("outside", "inside")


def gradient(spelling: Any, order: str, fuse: Callable | None = None, **options) -> Callable:
    """``value_and_grad`` of the loss; ``fuse`` is applied before or after it, or not at all.

    Args:
        spelling: the network.
        order: "outside" is the gradient of the fused loss, "inside" the fused gradient.
        fuse: ``jaxconv.fuse``, or None.
        options: options of ``value_and_grad``; with ``has_aux`` also returns the features.
    """
    loss = spelling.loss_and_features if options.get("has_aux") else spelling.loss
    if fuse is None:
        return jax.value_and_grad(loss, **options)
    if order == "outside":
        return jax.value_and_grad(fuse(loss), **options)
    return fuse(jax.value_and_grad(loss, **options))


@contextlib.contextmanager
def target(name: str) -> Iterator[None]:
    """Lowers programs for this architecture ("": for the devices of this process)."""
    before = os.environ.get("JAXCONV_TARGET")
    os.environ["JAXCONV_TARGET"] = name
    try:
        yield
    finally:
        os.environ.pop("JAXCONV_TARGET")
        if before is not None:
            os.environ["JAXCONV_TARGET"] = before


def _static(value: Any) -> str:
    """A call's static parameter as text; objects that hold programs are named by their type."""
    if value is None or isinstance(value, str | int | float | bool | np.generic):
        return repr(value)
    if isinstance(value, np.dtype | type):
        return np.dtype(value).name if not isinstance(value, type) else value.__name__
    if isinstance(value, tuple | list):
        return "(" + ", ".join(map(_static, value)) + ")"
    if dataclasses.is_dataclass(value):
        fields = [f for f in dataclasses.fields(value) if f.repr]
        said = [
            f"{f.name}={_static(getattr(value, f.name))}"
            for f in fields
            if f.default is dataclasses.MISSING or getattr(value, f.name) != f.default
        ]
        return f"{type(value).__name__}({', '.join(said)})"
    return getattr(value, "name", type(value).__name__)


def signature(eqn: Any) -> str:
    """A call's primitive and static parameters."""
    params = dict(eqn.params)
    form = params.get("form")
    if isinstance(form, Form) and not form.stored:
        # XLA computes such a result where it is read, in whatever dtype.
        params["form"] = dataclasses.replace(form, dtype=eqn.invars[0].aval.dtype)
    said = [f"{name}={_static(value)}" for name, value in sorted(params.items())]
    return f"{eqn.primitive.name}[{', '.join(said)}]"


Calls = collections.Counter


def names(found: Calls[str]) -> Calls[str]:
    """The calls, counted by primitive only."""
    counted: Calls[str] = collections.Counter()
    for said, count in found.items():
        counted[said.partition("[")[0]] += count
    return counted


class Found(NamedTuple):
    """The contents of a program.

    Attributes:
        calls: by primitive and static parameters.
        sums: sums over whole activations that no call computes.
        others: other operations on whole activations, except those that only change shapes.
    """

    calls: Calls[str]
    sums: int
    others: int

    @property
    def left(self) -> str:
        return f"left: {self.sums} sums, {self.others} others"


_SUMS = ("reduce_sum", "reduce", "dot_general", "reduce_window_sum", "psum")
_OF_SHAPE = ("reshape", "broadcast_in_dim", "transpose", "squeeze")


def found(spelling: Any, order: str, fuse: Callable, of_target: str = "") -> Found:
    """The contents of the program that ``fuse`` makes of a spelling's gradient."""
    with target(of_target):
        program = jax.make_jaxpr(gradient(spelling, order, fuse))(*spelling.values())
    of_calls: Calls[str] = collections.Counter()
    sums = others = 0
    for eqn in equations(program):
        name = eqn.primitive.name
        if name.startswith("jaxconv_"):
            of_calls[signature(eqn)] += 1
            continue
        whole = any(a.aval.shape and a.aval.size >= spelling.size for a in eqn.invars)
        inner = any(hasattr(v, "eqns") for v in eqn.params.values())
        if not whole or inner or name == "conv_general_dilated" or name in _OF_SHAPE:
            continue
        if name in _SUMS and all(v.aval.size < spelling.size for v in eqn.outvars):
            sums += 1
        else:
            others += 1
    return Found(of_calls, sums, others)


def lowered_calls(spelling: Any, order: str, fuse: Callable, of_target: str) -> Calls[str]:
    """The custom calls of a spelling's gradient, lowered for CUDA."""
    with target(of_target):
        stage = jax.jit(gradient(spelling, order, fuse)).trace(*spelling.values())
        text = stage.lower(lowering_platforms=("cuda",)).as_text()
    return collections.Counter(re.findall(r"custom_call @(jaxconv_\w+)", text))


# Programs whose bytes are counted have so many times the examples and the extents of the others, so
# that vectors of channels do not count beside activations, and kernels compute the means of
# activations (8 MB in 16 bits; ``fuse_means`` leaves arrays below 4 MB to XLA).
EXAMPLES_FACTOR, EXTENT_FACTOR = 64, 4


def moved_bytes(spelling: Any, order: str, fuse: Callable, gpu: str = "") -> int:
    """Bytes that the kernels of a spelling's gradient move, by XLA's optimised program.

    Compiles the program with larger images than ``values`` has, for JAX's default device or for a
    GPU of ``described_gpu.DESCRIPTIONS``.
    """
    parameters, x = jax.tree.map(jax.typeof, spelling.values())
    positions = [a for a in range(1, 4) if a != spelling.channel_axis]
    extents = list(x.shape)
    extents[0] *= EXAMPLES_FACTOR
    for axis in positions:
        extents[axis] *= EXTENT_FACTOR
    operands = parameters, x.update(shape=tuple(extents))
    if gpu:
        operands = described_gpu.types_on(described_gpu.described(gpu)[0], operands)
    program = jax.jit(gradient(spelling, order, fuse)).lower(*operands).compile()
    return sum(kernel.bytes for kernel in hlo.kernels(hlo.parse(program.as_text())))


def difference(found: Calls[str], expected: Calls[str]) -> str:
    """The missing and surplus calls as text, or ""."""
    more, less = found - expected, expected - found
    said = [f"+{count} {name}" for name, count in sorted(more.items())]
    return ", ".join(said + [f"-{count} {name}" for name, count in sorted(less.items())])


def complaint(actual: Found, expected: Found, forms: bool = True) -> str:
    """How a program's calls differ: with static parameters (``forms``), or by primitive only."""
    both = [each.calls if forms else names(each.calls) for each in (actual, expected)]
    more = actual.sums - expected.sums
    said = [difference(*both), f"{more:+} sums" if more else ""]
    return ", ".join(filter(None, said)).replace("jaxconv_", "")
