"""``explain``: which kernel each convolution of a program takes, or why it is left to XLA."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxconv._src import compat
from jaxconv._src.call import record, selection
from jaxconv._src.call.record import Convolution as Convolution
from jaxconv._src.call.record import Pass
from jaxconv._src.lax import lax_lowering
from jaxconv._src.problem import table
from jaxconv._src.report import staging


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation:
    """The convolutions of a program: a sequence of ``Convolution`` that prints as a table.

    Attributes:
        convolutions: one entry for each convolution of the lowered program, in its order.
        passes: one for each pass that convolves nothing and that CUDA kernels may compute: sums,
            moments, normalisation and pooling that ``fuse`` found.
    """

    convolutions: tuple[Convolution, ...]
    passes: tuple[Pass, ...] = ()

    def __len__(self) -> int:
        """Number of entries; how often the program runs each is its ``count``."""
        return len(self.convolutions)

    def __iter__(self) -> Iterator[Convolution]:
        """The entries, in the program's order."""
        return iter(self.convolutions)

    def __getitem__(self, index: int) -> Convolution:
        """One entry."""
        return self.convolutions[index]

    @property
    def flops(self) -> int:
        """Multiplications and additions of all convolutions by definition."""
        return sum(c.count * c.flops for c in self.convolutions)

    @property
    def on_kernels(self) -> int:
        """How many convolutions take one of this library's kernels."""
        return sum(c.count for c in self.convolutions if c.instance is not None)

    def __repr__(self) -> str:
        """The table, so that a prompt shows it."""
        return str(self)

    def __str__(self) -> str:
        """The table, one line for each convolution, and the reasons of those left to XLA.

        Passes that convolve nothing follow in a table of their own.

        A kernel whose error is above the direct convolution's shows it (docs/winograd.md), and one
        that computes an epilogue its terms. Last are the convolutions that the algorithm of
        ``install`` or ``override`` does not compute, and those whose epilogue XLA computes; then,
        of a function that ``fuse`` gave, why chains end where they do.

        "us" and "XLA us" are the predicted times of the fastest kernel and of XLA's convolution in
        microseconds, "-" where there is no prediction. "share" is that of the row, with its count,
        in the operations of all; the shares add up to 100 %.
        """
        total = sum(c.count for c in self.convolutions)
        if not total:
            return "\n".join(["no convolutions", *_passes(self.passes)])
        header = ("count", "op", "operands", "result", "precision", "kernel", "us", "XLA us")
        header += ("workspace MB", "GFLOP", "share", "MB", "source")
        rows = []
        shares = _shares([c.count * c.flops for c in self.convolutions])
        for c, share in zip(self.convolutions, shares, strict=True):
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
                    _percent(share),
                    _scaled(c.bytes, 1e6),
                    _source(c),
                )
            )
        lines = table.lines(header, rows)
        lines.append(f"{self.on_kernels} of {total} convolutions on jaxconv's kernels")
        if None not in shares:
            rows_and_shares = zip(self.convolutions, shares, strict=True)
            ours = sum(s for c, s in rows_and_shares if c.instance is not None and s is not None)
            lines[-1] += f", {_percent(ours)} of {_scaled(self.flops, 1e9)} GFLOP"
        lines += _reasons("left to XLA:", [c.refusals for c in self.convolutions])
        lines += _reasons(
            "not by the algorithm asked for:", [c.declined for c in self.convolutions]
        )
        lines += _reasons("epilogue apart, in XLA:", [c.apart for c in self.convolutions])
        lines += _chain_ends(self.convolutions)
        lines += _passes(self.passes)
        return "\n".join(lines)


# Tenths of a per cent in the whole.
_WHOLE = 1000


def _shares(parts: Sequence[Any]) -> list[int | None]:
    """Each part's share in the sum in tenths of a per cent, rounded so that they add up to all.

    The parts with the largest remainders are rounded up. None where there is no sum: of symbolic
    numbers, and of nothing but zeros.
    """
    if not all(isinstance(part, int) for part in parts) or not sum(parts):
        return [None] * len(parts)
    whole = sum(parts)
    shares = [part * _WHOLE // whole for part in parts]
    missing = _WHOLE - sum(shares)
    by_remainder = sorted(range(len(parts)), key=lambda i: -(parts[i] * _WHOLE % whole))
    for i in by_remainder[:missing]:
        shares[i] += 1
    return [*shares]


def _percent(share: int | None) -> str:
    return "-" if share is None else f"{share / 10:g}%"


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


def _chain_ends(convolutions: Sequence[Convolution]) -> list[str]:
    """Why ``fuse`` left out what follows, of convolutions alone and of those with an epilogue."""
    lines: list[str] = []
    for title, fused in (("not fused:", False), ("fused, but for what follows:", True)):
        found: dict[str, list[int]] = collections.defaultdict(list)
        for number, c in enumerate(convolutions, 1):
            if c.chain_end and fused == bool(c.epilogue or c.apart):
                found[c.chain_end].append(number)
        if found:
            lines += [title, *(f"  row {', '.join(map(str, n))}: {r}" for r, n in found.items())]
    return lines


def _passes(passes: Sequence[Pass]) -> list[str]:
    """The table of passes, and why XLA computes some."""
    if not passes:
        return []
    header = ("count", "pass", "array", "kernel", "us", "source")
    rows = [
        (str(p.count), p.op, p.array, p.instance or "XLA", _predicted(p.microseconds), _source(p))
        for p in passes
    ]
    lines = ["", *table.lines(header, rows)]
    refused = {f"  {p.op} {p.array}: {p.refusal}": None for p in passes if p.refusal}
    return [*lines, *(["left to XLA:", *refused] if refused else [])]


def _source(row: Convolution | Pass) -> str:
    return " ".join(filter(None, (row.module, row.source.rsplit("/", 1)[-1])))


def _kernel(c: Convolution) -> str:
    if c.instance is None:
        return "XLA"
    krsc = " (krsc)" if "krsc" in c.problem.split() else ""
    error = f" (rms error about {c.rms_error:.1e} of std(y))" if c.rms_error else ""
    epilogue = f" + {c.epilogue}" if c.epilogue else ""
    return c.instance + epilogue + krsc + error


def _predicted(microseconds: float) -> str:
    return f"{microseconds:.1f}" if microseconds else "-"


def _scaled(number: Any, unit: float) -> str:
    return f"{number / unit:.4g}" if isinstance(number, int) else "symbolic"


def _occurrences(module) -> collections.Counter[tuple[str, int]]:
    """How often the program comes by each operation of a tag and index; loop bodies count once.

    A lowering is not the program's order: JAX lowers a function once and calls it from many places,
    or copies it into them.
    """
    callees: dict[str, list[str]] = {}
    marked: dict[str, list[tuple[str, int]]] = {}
    for function in module.body.operations:
        name = function.attributes["sym_name"].value
        callees[name], marked[name] = [], []

        def visit(operation, name=name):
            for tag in (record.TAG, record.PASS_TAG):
                if tag in operation.attributes:
                    marked[name].append((tag, operation.attributes[tag].value))
            if operation.name == "func.call":
                callees[name].append(operation.attributes["callee"].value)
            return compat.CONTINUE_WALK

        function.operation.walk(visit)
    counts: collections.Counter[tuple[str, int]] = collections.Counter()

    def enter(name: str, times: int) -> None:
        for operation in marked[name]:
            counts[operation] += times
        for callee, number in collections.Counter(callees[name]).items():
            enter(callee, times * number)

    enter("main", 1)
    return counts


def explain(fun: Callable, *args: Any, platform: str | None = None, **kwargs: Any) -> Explanation:
    """Lists every convolution of ``fun(*args, **kwargs)``: its kernel, or why XLA computes it.

    The program is traced and lowered as ``jax.jit`` would, and not run. Convolutions of ``jax.lax``
    appear too; whether our kernels take them depends on ``install`` or ``override`` being in force
    here. A convolution whose result is neither returned nor kept in an argument that ``fun``
    changes is not part of the program, as under ``jax.jit``.

    Args:
        fun: a function of arrays: a plain one, or one jitted by ``jax.jit``, ``nnx.jit`` or
            ``eqx.filter_jit``, whose static arguments are static here too.
        args, kwargs: its arguments, as for a call. Arrays may be ``jax.ShapeDtypeStruct``; of a
            plain function, arguments that are no arrays are constants.
        platform: "cpu" or "cuda", by default where the arguments are. For a platform without a
            device here, set ``JAXCONV_TARGET`` to name one, such as "sm_90a".

    Returns:
        An ``Explanation``; printing it shows a table. With arguments that are sharded over several
        devices the shapes are the whole arrays', and the kernels those they would take.

    Raises:
        TypeError: ``fun`` cannot be called.
        ValueError: ``platform`` is another one.
    """
    if platform not in (None, *selection.PLATFORMS):
        raise ValueError(f"platform: expected 'cpu' or 'cuda', got {platform!r}")
    if not callable(fun):
        raise TypeError(f"fun: expected a function and then its arguments, got {fun!r}")
    lax_lowering.register()
    traced = staging.trace(fun, args, kwargs)
    options = {} if platform is None else {"lowering_platforms": (platform,)}
    with record.recording(tagged=True) as found:
        lowered = compat.lower_afresh(traced, **options)
    counts = _occurrences(lowered.compiler_ir())

    def counted(rows: Sequence[Any], tag: str) -> tuple[Any, ...]:
        return tuple(
            dataclasses.replace(row, count=counts[tag, index])
            for index, row in enumerate(rows)
            if counts[tag, index]
        )

    return Explanation(counted(found, record.TAG), counted(found.passes, record.PASS_TAG))
