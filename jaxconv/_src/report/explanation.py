"""``Explanation``: the convolutions of a program, as a sequence and as text."""

from __future__ import annotations

import collections
import dataclasses
import textwrap
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

from jaxconv._src.call import record
from jaxconv._src.call.record import Convolution, Pass
from jaxconv._src.problem import table
from jaxconv._src.report.words import in_words, misses


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation:
    """The convolutions of a program: a sequence of ``Convolution`` that prints as a table.

    Attributes:
        convolutions: one entry for each convolution of the lowered program, in its order.
        passes: one entry for each pass without a convolution that CUDA kernels may compute: sums,
            moments, normalisation and pooling found by ``fuse``.
        wide: whether it prints with every column.
    """

    convolutions: tuple[Convolution, ...]
    passes: tuple[Pass, ...] = ()
    wide: bool = False

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
        """Multiplications and additions of all convolutions, by their definition."""
        return sum(c.count * c.flops for c in self.convolutions)

    @property
    def on_kernels(self) -> int:
        """How many convolutions use one of this library's kernels."""
        return sum(c.count for c in self.convolutions if c.instance is not None)

    @property
    def missed(self) -> tuple[Convolution, ...]:
        """Convolutions followed by an operation that a call could compute, but ``fuse`` left out.

        The reason is their ``chain_end``. If they have an epilogue, it ends before that operation.
        """
        return tuple(c for c in self.convolutions if misses(c))

    def __repr__(self) -> str:
        """The text, so that a prompt shows it."""
        return str(self)

    def __str__(self) -> str:
        """``text``, with the width requested from ``explain``."""
        return self.text(wide=self.wide)

    def text(self, *, wide: bool = False) -> str:
        """A summary, a table, and reasons.

        The summary says how many convolutions use a kernel and, for a function from ``fuse``, how
        many compute the operations that follow and why the others do not.

        Convolutions with equal text are one row with a count. "us" and "XLA us" are the predicted
        times of the fastest kernel and of XLA's convolution in microseconds, "-" without a
        prediction. "share" is the share of the row, including its count, in all operations; the
        shares add up to 100 %. A kernel with a larger error than the direct convolution shows it
        (docs/winograd.md), and a kernel with an epilogue shows its terms.

        The reasons, each once with a count and its rows, concern convolutions that XLA computes,
        that the algorithm of ``install`` or ``override`` does not compute, or whose epilogue XLA
        computes; then operations that ``fuse`` left out. Passes without a convolution follow in a
        separate table.

        Args:
            wide: one line per row with every column, instead of at most 100 characters.
        """
        if not self.convolutions:
            return "\n".join(["no convolutions", *_passes(self.passes)])
        rows = _rows(self.convolutions, wide)
        parts = [_summary(self, rows), _table(rows) if wide else _entries(rows)]
        parts += filter(None, [*_reasons(rows, wide), _passes(self.passes)])
        return "\n".join("\n".join(lines) for lines in parts)


# --- rows ---

# The width of the text unless it is ``wide``, and of the numbers at a row's end.
_COLUMNS = 100
_MICROSECONDS, _SHARE = 9, 7

# 100 % in tenths of a per cent.
_WHOLE = 1000


@dataclasses.dataclass(frozen=True)
class _Row:
    """Convolutions with equal text.

    Attributes:
        members: the convolutions.
        share: the share of all operations, in tenths of a per cent; None if unknown.
    """

    members: tuple[Convolution, ...]
    share: int | None

    @property
    def one(self) -> Convolution:
        return self.members[0]

    @property
    def count(self) -> int:
        """How often the program computes one of them."""
        return _total(self.members)

    @property
    def sources(self) -> list[str]:
        """The places in the user's code."""
        return list(dict.fromkeys(map(_source, self.members)))


def _total(convolutions: Iterable[Convolution]) -> int:
    return sum(c.count for c in convolutions)


def _rows(convolutions: Iterable[Convolution], wide: bool) -> list[_Row]:
    groups: dict[Hashable, list[Convolution]] = {}
    for c in convolutions:
        shown = (c.operands, c.op, c.result, c.precision, _kernel(c), *_times(c))
        rest = (c.workspace_bytes, c.flops, c.bytes, c.source, c.module) if wide else ()
        groups.setdefault((shown, rest), []).append(c)
    shares = _shares([sum(c.count * c.flops for c in group) for group in groups.values()])
    return [_Row(tuple(g), share) for g, share in zip(groups.values(), shares, strict=True)]


def _source(c: Convolution) -> str:
    return " ".join(filter(None, (c.module, c.source.rsplit("/", 1)[-1])))


def _shares(parts: Sequence[Any]) -> list[int | None]:
    """Each part's share of the sum in tenths of a per cent, rounded so that they add up to 100 %.

    The parts with the largest remainders are rounded up. None for symbolic numbers and for a sum of
    0.
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


def _times(c: Convolution) -> tuple[str, str]:
    """The predicted microseconds of the kernel and of XLA's convolution."""
    ours, xla = (f"{t:.1f}" if t else "-" for t in (c.microseconds, c.xla_microseconds))
    return ours, xla


def _scaled(number: Any, unit: float) -> str:
    return f"{number / unit:.4g}" if isinstance(number, int) else "symbolic"


def _kernel(c: Convolution) -> str:
    if c.instance is None:
        return "XLA"
    krsc = " (krsc)" if "krsc" in c.problem.split() else ""
    error = f" (rms error about {c.rms_error:.1e} of std(y))" if c.rms_error else ""
    epilogue = f" + {c.epilogue}" if c.epilogue else ""
    return c.instance + epilogue + krsc + error


# --- the parts of the text ---


def _summary(explanation: Explanation, rows: Sequence[_Row]) -> list[str]:
    total = _total(explanation)
    line = f"{explanation.on_kernels} of {total} convolutions on jaxconv's kernels"
    if all(row.share is not None for row in rows):
        ours = sum(row.share or 0 for row in rows if row.one.instance is not None)
        line += f", {_percent(ours)} of {_scaled(explanation.flops, 1e9)} GFLOP"
    return [line, *_wrapped(_carried(explanation))]


def _carried(convolutions: Iterable[Convolution]) -> str:
    """How many convolutions compute the operations that follow, and why others do not; or ""."""
    carrying = [c for c in convolutions if _has_epilogue(c)]
    in_part = _total(c for c in carrying if misses(c))
    reasons: collections.Counter[str] = collections.Counter()
    for c in convolutions:
        if misses(c) and not _has_epilogue(c):
            reasons[in_words(c.chain_end)] += c.count
    left = reasons.total()
    total = _total(carrying) + left
    if not total:
        return ""
    words = "convolutions carry what follows them"
    if total == 1:
        words = "convolution carries what follows it"
    line = f"{_total(carrying)} of {total} {words}{f', {in_part} in part' if in_part else ''}"
    if not left:
        return line
    counts = [f"{count} {reason}" for reason, count in reasons.most_common()]
    why = ", ".join(counts) if len(reasons) > 1 else next(iter(reasons))
    return f"{line}; {left} {'does' if left == 1 else 'do'} not: {why}"


def _has_epilogue(c: Convolution) -> bool:
    return bool(c.epilogue or c.apart)


def _table(rows: Sequence[_Row]) -> list[str]:
    """One line for each row, with every column."""
    header = ("row", "count", "op", "operands", "result", "precision", "kernel", "us", "XLA us")
    header += ("workspace MB", "GFLOP", "share", "MB", "source")
    lines = [
        (
            str(number),
            str(row.count),
            row.one.op,
            ", ".join(row.one.operands),
            row.one.result,
            row.one.precision,
            _kernel(row.one),
            *_times(row.one),
            f"{row.one.workspace_bytes / 1e6:.3g}",
            _scaled(row.one.flops, 1e9),
            _percent(row.share),
            _scaled(row.one.bytes, 1e6),
            row.sources[0],
        )
        for number, row in enumerate(rows, 1)
    ]
    return ["", *table.lines(header, lines)]


def _entries(rows: Sequence[_Row]) -> list[str]:
    """Each row in ``_COLUMNS``: the arrays and the numbers, the kernel, and the source."""
    first = max(len("row"), len(str(len(rows))))
    second = max(len("count"), *(len(str(row.count)) for row in rows))
    indent = first + second + 11  # with "fprop", and two spaces after each
    middle = _COLUMNS - indent - 2 * _MICROSECONDS - _SHARE

    def line(number: str, count: str, op: str, arrays: str, *numbers: str) -> str:
        widths = (_MICROSECONDS, _MICROSECONDS, _SHARE)
        right = "".join(n.rjust(w) for n, w in zip(numbers, widths, strict=True))
        left = f"{number:>{first}}  {count:>{second}}  {op:5}  {arrays:{middle}}"
        return (left + right).rstrip()

    lines = ["", line("row", "count", "op", "operands -> result", "us", "XLA us", "share")]
    for number, row in enumerate(rows, 1):
        c = row.one
        arrays = _wrapped(_arrays(c), middle)
        numbers = *_times(c), _percent(row.share)
        lines.append(line(str(number), str(row.count), c.op, arrays[0], *numbers))
        lines += [" " * indent + rest for rest in arrays[1:]]
        precision = "" if c.precision == "default" else f", precision {c.precision}"
        place, others = row.sources[0], len(row.sources) - 1
        place += f" and {others} more" if others else ""
        kernel = _kernel(c) + precision
        together = f"{kernel}  {place}".rstrip()
        below = [together] if len(together) <= _COLUMNS - indent else [kernel, place]
        for text in below:
            lines += [" " * indent + part for part in _wrapped(text, _COLUMNS - indent)]
    return lines


def _arrays(c: Convolution) -> str:
    """Operands and result; a dtype is shown if it differs from the previous one."""
    shown, last = [], ""
    for array in (*c.operands, c.result):
        dtype, bracket, shape = array.partition("[")
        shown.append(bracket + shape if dtype == last else array)
        last = dtype
    return f"{shown[0]}, {shown[1]} -> {shown[2]}"


def _wrapped(text: str, width: int = _COLUMNS) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False, subsequent_indent="  ")


def _reasons(rows: Sequence[_Row], wide: bool) -> Iterator[list[str]]:
    """Sections of reasons: kernels, the requested algorithm, epilogues, ``fuse``."""

    def of_fuse(fused: bool) -> Callable[[Convolution], list[record.Refusal]]:
        def reasons(c: Convolution) -> list[record.Refusal]:
            missed = misses(c) and fused == _has_epilogue(c)
            return [record.Refusal("", in_words(c.chain_end))] if missed else []

        return reasons

    yield _section("left to XLA:", rows, lambda c: c.refusals, wide)
    yield _section("not by the algorithm asked for:", rows, lambda c: c.declined, wide)
    yield _section("epilogue apart, in XLA:", rows, lambda c: c.apart, wide)
    yield _section("not fused:", rows, of_fuse(False), wide)
    yield _section("fused, but for what follows:", rows, of_fuse(True), wide)


# The number of kernels named for one reason, in text that is not wide.
_NAMED = 2


def _section(
    title: str,
    rows: Sequence[_Row],
    refusals: Callable[[Convolution], Sequence[record.Refusal]],
    wide: bool,
) -> list[str]:
    """Each reason once, after the number of its convolutions, with its kernels."""
    found: dict[record.Refusal, dict[int, int]] = {}  # for each refusal, its count by row
    for number, row in enumerate(rows, 1):
        for c in row.members:
            for refusal in dict.fromkeys(refusals(c)):
                of_rows = found.setdefault(refusal, {})
                of_rows[number] = of_rows.get(number, 0) + c.count
    kernels_of: dict[tuple[str, tuple[tuple[int, int], ...]], list[str]] = {}
    for (kernel, reason), of_rows in found.items():
        kernels_of.setdefault((reason, tuple(of_rows.items())), []).append(kernel)
    lines = ["", title] if found else []
    by_count = sorted(kernels_of.items(), key=lambda item: -sum(n for _, n in item[0][1]))
    for (reason, counts), kernels in by_count:
        numbers = [number for number, _ in counts]
        named = kernels if wide or len(kernels) <= _NAMED + 1 else kernels[:_NAMED]
        others = f" and {len(kernels) - len(named)} more" if len(named) < len(kernels) else ""
        subject = f"{', '.join(named)}{others}: " if kernels != [""] else ""
        where = f"row {numbers[0]}" if len(numbers) == 1 else f"rows {_ranges(numbers)}"
        count = sum(count for _, count in counts)
        first, *rest = _wrapped(f"{subject}{reason} ({where})", _COLUMNS - 8)
        lines += [f"{count:6}  {first}", *(" " * 8 + part for part in rest)]
    return lines


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers, with consecutive ones as a range."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _passes(passes: Sequence[Pass]) -> list[str]:
    """The table of passes, and why XLA computes some. Passes with equal text are one row."""
    if not passes:
        return []
    counts: collections.Counter[tuple[str, ...]] = collections.Counter()
    for p in passes:
        time = f"{p.microseconds:.1f}" if p.microseconds else "-"
        counts[p.op, p.array, p.instance or "XLA", time] += p.count
    rows = [(str(count), *row) for row, count in counts.items()]
    lines = ["", *table.lines(("count", "pass", "array", "kernel", "us"), rows)]
    refused = {f"  {p.op} {p.array}: {p.refusal}": None for p in passes if p.refusal}
    return [*lines, *(["left to XLA:", *refused] if refused else [])]
