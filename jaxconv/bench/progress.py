"""Shows how far a long measurement is, and ends it early on Ctrl-C."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

INTERRUPTED = 130  # the exit status: as a shell reports a program that Ctrl-C ended

T = TypeVar("T")
R = TypeVar("R")


class Progress:
    """A progress bar on standard error: tqdm's where it is installed, else a counter.

    Where standard error is no terminal, each row has a line of its own there when it starts.
    """

    def __init__(self, total: int):
        self.total, self.done, self.bar = total, 0, None
        self.started = time.monotonic()
        self.shown = sys.stderr.isatty()
        if self.shown and importlib.util.find_spec("tqdm"):
            import tqdm

            self.bar = tqdm.tqdm(total=total, file=sys.stderr, leave=False, unit="row")

    def start(self, label: str) -> None:
        """Names what is being measured."""
        if self.bar is not None:
            self.bar.set_postfix_str(label)
            return
        text = f"[{self.done + 1}/{self.total}] {label}"
        if self.shown:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
            return
        if self.done:
            elapsed = time.monotonic() - self.started
            left = elapsed / self.done * (self.total - self.done)
            text += f" ({elapsed:.0f} s, about {left:.0f} s left)"
        print(text, file=sys.stderr, flush=True)

    def write(self, line: str) -> None:
        """Prints a line above the bar."""
        if self.bar is not None:
            self.bar.clear()
        elif self.shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        print(line, flush=True)

    def advance(self) -> None:
        """Counts one row as done."""
        self.done += 1
        if self.bar is not None:
            self.bar.update()

    def close(self) -> None:
        """Removes the bar."""
        if self.bar is not None:
            self.bar.close()
        elif self.shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def each(
    progress: Progress,
    items: Iterable[T],
    label: Callable[[T], str],
    one: Callable[[T], R],
    lines: Callable[[R], str],
    header: Iterable[str] = (),
) -> list[R]:
    """Measures every item and prints what was found; stops early on Ctrl-C.

    Args:
        progress: is closed at the end.
        items: what to measure.
        label: names an item while it is measured.
        one: measures it.
        lines: the text to print for its result.
        header: lines to print above the first.

    Returns:
        The results, fewer than items where Ctrl-C was pressed.
    """
    found = []
    try:
        for line in header:
            progress.write(line)
        for item in items:
            progress.start(label(item))
            found.append(one(item))
            progress.write(lines(found[-1]))
            progress.advance()
    except KeyboardInterrupt:
        progress.write("interrupted; what was measured so far:")
    finally:
        progress.close()
    return found
