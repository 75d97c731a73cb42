"""``explain``: which kernel each convolution of a program takes, or why it is left to XLA."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxconv._src import compat, lax_lowering, lowering, record
from jaxconv._src.record import Convolution as Convolution


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The convolutions of a program; prints as a table.

    Attributes:
        convolutions: one entry for each convolution of the lowered program, in its order.
    """

    convolutions: tuple[Convolution, ...]

    @property
    def flops(self) -> int:
        """Multiplications and additions of all convolutions by definition."""
        return sum(c.count * c.flops for c in self.convolutions)

    @property
    def on_kernels(self) -> int:
        """How many convolutions take one of this library's kernels."""
        return sum(c.count for c in self.convolutions if c.instance is not None)

    def __str__(self) -> str:
        """The table, one line for each convolution, and the reasons of those left to XLA.

        A kernel whose error is above the direct convolution's shows it (docs/winograd.md). Last are
        the convolutions that the algorithm of ``install`` or ``override`` does not compute.

        "us" and "XLA us" are the predicted times of the fastest kernel and of XLA's convolution in
        microseconds, "-" where there is no prediction.
        """
        total = sum(c.count for c in self.convolutions)
        if not total:
            return "no convolutions"
        header = ("count", "op", "operands", "result", "precision", "kernel", "us", "XLA us")
        rows = [(*header, "workspace MB", "GFLOP", "MB", "source")]
        for c in self.convolutions:
            rows.append(
                (
                    str(c.count),
                    c.op,
                    ", ".join(c.operands),
                    c.result,
                    c.precision,
                    _kernel(c),
                    _predicted(c.microseconds),
                    _predicted(c.xla_microseconds),
                    f"{c.workspace_bytes / 1e6:.3g}",
                    _scaled(c.flops, 1e9),
                    _scaled(c.bytes, 1e6),
                    c.source.rsplit("/", 1)[-1],
                )
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        lines.insert(1, "  ".join("-" * width for width in widths))
        lines.append(f"{self.on_kernels} of {total} convolutions on jaxconv's kernels")
        if isinstance(self.flops, int) and self.flops:
            ours = sum(c.count * c.flops for c in self.convolutions if c.instance)
            lines[-1] += f", {ours / self.flops:.0%} of {_scaled(self.flops, 1e9)} GFLOP"
        lines += _reasons("left to XLA:", [c.refusals for c in self.convolutions])
        lines += _reasons(
            "not by the algorithm asked for:", [c.declined for c in self.convolutions]
        )
        return "\n".join(lines)


def _reasons(title: str, refusals: Sequence[Sequence[record.Refusal]]) -> list[str]:
    """Each reason once, with the rows that have it."""
    found: dict[record.Refusal, list[int]] = collections.defaultdict(list)
    for number, of_row in enumerate(refusals, 1):
        for refusal in of_row:
            found[refusal].append(number)
    lines = [
        f"  row {', '.join(map(str, rows))}: {kernel}: {reason}"
        for (kernel, reason), rows in found.items()
    ]
    return [title, *lines] if lines else []


def _kernel(c: Convolution) -> str:
    if c.instance is None:
        return "XLA"
    krsc = " (krsc)" if c.problem.endswith(" krsc") else ""
    error = f" (rms error about {c.rms_error:.1e} of std(y))" if c.rms_error else ""
    return c.instance + krsc + error


def _predicted(microseconds: float) -> str:
    return f"{microseconds:.1f}" if microseconds else "-"


def _scaled(number: Any, unit: float) -> str:
    return f"{number / unit:.4g}" if isinstance(number, int) else "symbolic"


def _occurrences(module) -> collections.Counter[int]:
    """How often the program comes by each marked operation of its module; loop bodies count once.

    A lowering is not the program's order: JAX lowers a function once and calls it from many places,
    or copies it into them.
    """
    callees: dict[str, list[str]] = {}
    marked: dict[str, list[int]] = {}
    for function in module.body.operations:
        name = function.attributes["sym_name"].value
        callees[name], marked[name] = [], []

        def visit(operation, name=name):
            if record.TAG in operation.attributes:
                marked[name].append(operation.attributes[record.TAG].value)
            elif operation.name == "func.call":
                callees[name].append(operation.attributes["callee"].value)
            return compat.CONTINUE_WALK

        function.operation.walk(visit)
    counts: collections.Counter[int] = collections.Counter()

    def enter(name: str, times: int) -> None:
        for index in marked[name]:
            counts[index] += times
        for callee, number in collections.Counter(callees[name]).items():
            enter(callee, times * number)

    enter("main", 1)
    return counts


def explain(fun: Callable, *args: Any, platform: str | None = None, **kwargs: Any) -> Explanation:
    """Lists every convolution of ``fun(*args, **kwargs)``: its kernel, or why XLA computes it.

    The program is traced and lowered as ``jax.jit`` would, and not run. Convolutions of ``jax.lax``
    appear too; whether our kernels take them depends on ``install`` or ``override`` being in force
    here.

    Args:
        fun: a function of arrays, jitted or not; what holds for ``jax.jit`` holds for it.
        args, kwargs: its arguments, arrays or ``jax.ShapeDtypeStruct``.
        platform: "cpu" or "cuda", by default where the arguments are. For a platform without a
            device here, set ``JAXCONV_TARGET`` to name one, such as "sm_90a".

    Returns:
        An ``Explanation``; printing it shows a table. With arguments that are sharded over several
        devices the shapes are the whole arrays', and the kernels those they would take.

    Raises:
        ValueError: ``platform`` is another one.
    """
    if platform not in (None, *lowering.PLATFORMS):
        raise ValueError(f"platform: expected 'cpu' or 'cuda', got {platform!r}")
    lax_lowering.register()

    def fresh(*args, **kwargs):  # a new function, of which JAX has nothing cached
        return fun(*args, **kwargs)

    traced = jax.jit(fresh).trace(*args, **kwargs)
    options = {} if platform is None else {"lowering_platforms": (platform,)}
    with record.recording(tagged=True) as found:
        lowered = traced.lower(**options)
    counts = _occurrences(lowered.compiler_ir())
    return Explanation(
        tuple(
            dataclasses.replace(convolution, count=counts[index])
            for index, convolution in enumerate(found)
            if counts[index]
        )
    )
