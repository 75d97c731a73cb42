"""Records the decisions of lowering for ``explain`` and the tests."""

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
    """One convolution of a lowered program, and how it was lowered.

    Attributes:
        op: "fprop", "dgrad" or "wgrad", its canonical form.
        operands: dtype and shape of both operands, such as "f32[8,28,28,64]".
        result: dtype and shape of the result.
        platform: "cpu" or "cuda".
        problem: the problem key, or "" if there was no candidate; it contains "krsc" if the kernel
            reads a filter stored in that order, and ends with the epilogue's terms.
        precision: the demanded precision, "default", "high" or "highest".
        instance: the kernel instance, or None if XLA computes it.
        microseconds: predicted time of the instance or, if XLA is predicted to be faster, of the
            fastest kernel; 0 if no kernel accepts the problem or there is no prediction.
        xla_microseconds: predicted time of XLA's own convolution; 0 if unknown.
        workspace_bytes: memory that the kernel needs in addition to its operands and result.
        flops: multiplications and additions by definition, padding counted.
        bytes: size of all operands and the result.
        refusals: if XLA computes it, each refusing kernel and its reason; or "xla" and both
            predictions if a kernel accepts the problem but XLA is predicted to be faster.
        declined: why the algorithm of ``install`` or ``override`` does not compute it, and ``auto``
            chose instead; empty if it does.
        source: file, line and function of the user's code, or of a model library if no user code
            called it.
        count: how often the program calls it; the body of a loop counts once.
        epilogue: the epilogue that the kernel computes, as in the problem key, such as "scale bias
            relu".
        apart: for an epilogue that no kernel computes together with the convolution, each refusing
            kernel and its reason; XLA then computes the epilogue from the float32 result.
        chain_end: for a forward convolution in a function from ``jaxconv.fuse``, why the next
            operation after it, or after its epilogue, is not part of its call, in terms of JAX's
            primitives; "" for other convolutions, and if a call would save no pass over the result.
        module: the named scopes around it, such as the path of Flax or Haiku modules,
            "ResNet/Block_2/Conv_0"; "" if there are none.
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

        The rms error against float64, divided by the result's standard deviation; see
        docs/winograd.md. None for other algorithms.
        """
        return winograd_jax.rms_error(self.instance or "", self.platform, self.precision)


@dataclasses.dataclass(frozen=True)
class Pass:
    """A pass without a convolution in a program lowered for CUDA, and how it was lowered.

    Attributes:
        op: its operation: "masked_sums", "activated_sums", "moments", "normalise_add",
            "elementwise", "max_pool" or "max_pool_gradient".
        array: dtype and shape of its first operand, such as "bf16[256,56,56,64]".
        problem: the key by which a kernel is planned.
        instance: the kernel, or None if XLA computes it.
        microseconds: the kernel's predicted time, 0 without a kernel.
        refusal: why there is no kernel; "" if there is one.
        source, module, count: as in ``Convolution``.
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


# An attribute of the operation that computes a recorded convolution or pass: its index in the
# record.
TAG = "jaxconv.convolution"
PASS_TAG = "jaxconv.pass"

# XLA metadata of a convolution that ``fuse`` saw: why the next operation is not part of its call.
CHAIN_END = "jaxconv_chain_end"


class Recording(list[Convolution]):
    """A growing list of convolutions, and the passes; ``tagged`` marks their operations."""

    def __init__(self, tagged: bool):
        super().__init__()
        self.tagged = tagged
        self.passes: list[Pass] = []


_sinks: contextvars.ContextVar[tuple[Recording, ...]] = contextvars.ContextVar("sinks", default=())


class _Outer(NamedTuple):
    """Data of an operation for the record of the convolutions to which it is lowered."""

    source: str = ""
    module: str = ""
    declined: tuple[Refusal, ...] = ()
    apart: tuple[Refusal, ...] = ()


_NOTHING = _Outer()
_outer: contextvars.ContextVar[_Outer] = contextvars.ContextVar("outer", default=_NOTHING)


@contextlib.contextmanager
def recording(tagged: bool = False) -> Iterator[Recording]:
    """Collects every convolution that this thread lowers meanwhile.

    Args:
        tagged: marks the operations, for a module that is read rather than compiled.
    """
    sink = Recording(tagged)
    token = _sinks.set((*_sinks.get(), sink))
    try:
        yield sink
    finally:
        _sinks.reset(token)


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Pauses recording: the lowered operations belong to a convolution already recorded."""
    token = _sinks.set(())
    try:
        yield
    finally:
        _sinks.reset(token)


@contextlib.contextmanager
def located(
    ctx, declined: tuple[Refusal, ...] = (), apart: tuple[Refusal, ...] = ()
) -> Iterator[None]:
    """Attributes the operations lowered meanwhile to the user's code of ``ctx``.

    ``declined`` says why the requested algorithm does not compute it, ``apart`` why no kernel
    computes it together with its epilogue; both apply to the operations inside.
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
    """Whether recording is active."""
    return bool(_sinks.get())


def emit_pass(ctx, key: str, plan: PassPlan, results: Sequence) -> Sequence:
    """Records the lowering of a pass.

    Args:
        ctx: the lowering context, whose first operand is shown.
        key: the key of the pass.
        plan: the kernel, or why there is none.
        results: the results of its lowering.

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
        results: the results of the convolution's lowering.
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
