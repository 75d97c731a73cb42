"""What lowering decided, kept for whoever asks: ``explain`` and the tests."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxconv._src import compat
from jaxconv._src.library.native import PassPlan, Refusal, Selection
from jaxconv._src.ways import winograd_jax


@dataclasses.dataclass(frozen=True)
class Convolution:
    """One convolution of a lowered program, and what became of it.

    Attributes:
        op: "fprop", "dgrad" or "wgrad", its canonical form.
        operands: dtype and shape of both operands, such as "f32[8,28,28,64]".
        result: dtype and shape of the result.
        platform: "cpu" or "cuda".
        problem: the problem key, or "" where no kernel came into question; it says "krsc"
            where the kernel reads the filter so, as it lies, and ends in the epilogue's terms.
        precision: the demanded precision, "default", "high" or "highest".
        instance: the kernel instance, or None where XLA computes it.
        microseconds: predicted time of the instance or, where XLA is predicted to be faster, of
            the fastest kernel; 0 where no kernel accepts the problem or none is predicted.
        xla_microseconds: predicted time of XLA's own convolution; 0 where unknown.
        workspace_bytes: memory that the kernel needs beside its operands and result.
        flops: multiplications and additions by definition, padding counted.
        bytes: size of all operands and the result.
        refusals: for one left to XLA, each refusing kernel and its reason, or "xla" and both
            predictions where a kernel accepts the problem and XLA is predicted to be faster.
        declined: why the algorithm that ``install`` or ``override`` asks for does not compute it,
            and ``auto`` chose; empty where it does.
        source: file, line and function of the user's code; a model library's where none called it.
        count: how often the program calls it; the body of a loop counts once.
        epilogue: what the kernel computes beside the convolution, as in the problem key, such as
            "scale bias relu".
        apart: of a convolution with an epilogue that no kernel computes with it, each refusing
            kernel and its reason; XLA then computes the epilogue from the float32 result.
        chain_end: of a forward convolution in a function that ``jaxconv.fuse`` gave, why the
            operation behind it, or behind its epilogue, is not part of its call, by the names of
            JAX's primitives; "" elsewhere, and where a call would save no pass over the result.
        module: the named scopes around it, such as the path of Flax's and Haiku's modules,
            "ResNet/Block_2/Conv_0"; "" where there are none.
    """

    op: str
    operands: tuple[str, str]
    result: str
    platform: str
    problem: str
    precision: str
    instance: str | None
    microseconds: float
    xla_microseconds: float
    workspace_bytes: int
    flops: int
    bytes: int
    refusals: tuple[Refusal, ...]
    source: str
    count: int = 1
    declined: tuple[Refusal, ...] = ()
    module: str = ""
    epilogue: str = ""
    apart: tuple[Refusal, ...] = ()
    chain_end: str = ""

    @property
    def rms_error(self) -> float | None:
        """The stated error of an algorithm that is less accurate than the direct convolution.

        Root mean square against float64, over the standard deviation of the result; see
        docs/winograd.md. None for all others.
        """
        return winograd_jax.rms_error(self.instance or "", self.platform, self.precision)


@dataclasses.dataclass(frozen=True)
class Pass:
    """A pass that convolves nothing in a program lowered for CUDA, and what became of it.

    Attributes:
        op: what it computes: "masked_sums", "moments", "normalise_add", "max_pool" or
            "max_pool_gradient".
        array: dtype and shape of its first operand, such as "bf16[256,56,56,64]".
        problem: the key that kernels are asked by.
        instance: the kernel, or None where XLA computes it.
        microseconds: the kernel's predicted time, 0 where there is none.
        refusal: why there is no kernel; "" where there is one.
        source, module, count: as of a ``Convolution``.
    """

    op: str
    array: str
    problem: str
    instance: str | None
    microseconds: float
    refusal: str
    source: str
    module: str
    count: int = 1


# Attributes of the operation that computes a recorded convolution or pass: its index among those.
TAG = "jaxconv.convolution"
PASS_TAG = "jaxconv.pass"

# XLA metadata of a convolution that ``fuse`` saw: why what follows is not part of its call.
CHAIN_END = "jaxconv_chain_end"


class Recording(list[Convolution]):
    """A growing list of convolutions, and the passes; with ``tagged``, their operations say so."""

    def __init__(self, tagged: bool):
        super().__init__()
        self.tagged = tagged
        self.passes: list[Pass] = []


_sinks: contextvars.ContextVar[tuple[Recording, ...]] = contextvars.ContextVar("sinks", default=())


class _Outer(NamedTuple):
    """What an operation that is lowered to others passes on to them."""

    source: str = ""
    module: str = ""
    declined: tuple[Refusal, ...] = ()
    apart: tuple[Refusal, ...] = ()


_NOTHING = _Outer()
_outer: contextvars.ContextVar[_Outer] = contextvars.ContextVar("outer", default=_NOTHING)


@contextlib.contextmanager
def recording(tagged: bool = False) -> Iterator[Recording]:
    """Collects every convolution lowered by this thread meanwhile.

    Args:
        tagged: mark the operations, for a module that is read and not compiled.
    """
    sink = Recording(tagged)
    token = _sinks.set((*_sinks.get(), sink))
    try:
        yield sink
    finally:
        _sinks.reset(token)


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Records nothing meanwhile: what is lowered belongs to a convolution already recorded."""
    token = _sinks.set(())
    try:
        yield
    finally:
        _sinks.reset(token)


@contextlib.contextmanager
def located(
    ctx, declined: tuple[Refusal, ...] = (), apart: tuple[Refusal, ...] = ()
) -> Iterator[None]:
    """What is lowered meanwhile stems from the user's code that ``ctx`` points at.

    ``declined`` says why it is not computed by the algorithm asked for, ``apart`` why not together
    with its epilogue; both hold inside too.
    """
    if not _sinks.get():
        yield
        return
    outer = _outer.get()
    where = compat.user_location(ctx), compat.module_path(ctx)
    token = _outer.set(_Outer(*where, declined or outer.declined, apart or outer.apart))
    try:
        yield
    finally:
        _outer.reset(token)


def wanted() -> bool:
    """True while somebody records."""
    return bool(_sinks.get())


def emit_pass(ctx, key: str, plan: PassPlan, results: Sequence) -> Sequence:
    """Records the lowering of a pass.

    Args:
        ctx: the lowering context, whose first operand is shown.
        key: of the pass.
        plan: the kernel, or why there is none.
        results: what it was lowered to.

    Returns:
        ``results``.
    """
    if not wanted():
        return results
    found = Pass(
        op=key.split()[0],
        array=ctx.avals_in[0].str_short(short_dtypes=True),
        problem=key,
        instance=plan.kernel,
        microseconds=plan.microseconds,
        refusal=plan.reason,
        source=_outer.get().source or compat.user_location(ctx),
        module=_outer.get().module or compat.module_path(ctx),
    )
    for sink in _sinks.get():
        if sink.tagged:
            compat.set_attribute(results[0], PASS_TAG, len(sink.passes))
        sink.passes.append(found)
    return results


def emit(
    ctx,
    op: str,
    problem: str,
    precision: str,
    platform: str,
    flops: int,
    chosen: Selection,
    results: Sequence,
    epilogue: str = "",
) -> Sequence:
    """Records the lowering of one convolution.

    Args:
        ctx: the lowering context, whose avals are the convolution's.
        op, problem, precision, platform, flops: as in ``Convolution``.
        chosen: the kernel, or why there is none.
        results: what the convolution was lowered to.
        epilogue: as in ``Convolution``.

    Returns:
        ``results``.
    """
    if not wanted():
        return results
    outer = _outer.get()
    source, module = outer.source, outer.module
    if not source:
        source, module = compat.user_location(ctx), compat.module_path(ctx)
    arrays = [*ctx.avals_in, *ctx.avals_out]
    named = (ctx.avals_in[0], ctx.avals_in[1], ctx.avals_out[0])
    lhs, rhs, out = (aval.str_short(short_dtypes=True) for aval in named)
    convolution = Convolution(
        op=op,
        operands=(lhs, rhs),
        result=out,
        platform=platform,
        problem=problem,
        precision=precision,
        instance=chosen.instance,
        microseconds=chosen.microseconds,
        xla_microseconds=chosen.xla_microseconds,
        workspace_bytes=chosen.workspace_bytes,
        flops=flops,
        bytes=sum(a.size * a.dtype.itemsize for a in arrays),
        refusals=() if chosen.instance else chosen.refusals,
        source=source,
        declined=outer.declined,
        module=module,
        epilogue=epilogue,
        apart=outer.apart,
        chain_end=compat.xla_metadata_in_force().get(CHAIN_END, "") if op == "fprop" else "",
    )
    for sink in _sinks.get():
        if sink.tagged:
            compat.set_attribute(results[0], TAG, len(sink))
        sink.append(convolution)
    return results
