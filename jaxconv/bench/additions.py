"""What a program may add to the bench of layers. ``tools/bench`` of the repository does."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from jaxconv.bench.options import PROGRAM
from jaxconv.bench.problem import Problem, Row
from jaxconv.bench.program import Program


class Peer(Protocol):
    """A further column of the table: another library's convolution."""

    name: str

    def missing(self, platform: str) -> str | None:
        """Why it cannot be measured on the platform, or None."""

    def about(self) -> dict[str, str]:
        """Versions, by name."""

    def build(self, problem: Problem) -> None:
        """Prepares a row, in another thread, ahead of ``program``."""

    def program(self, problem: Problem, copies: int, platform: str) -> Program:
        """A program of ``copies`` convolutions with separate random operands.

        Raises:
            ValueError: the library has no such convolution.
        """


class Command(Protocol):
    """A module with a command line of its own."""

    def main(self, argv: Sequence[str]) -> int:
        """Does what the command line asks for; returns the exit status."""


@dataclasses.dataclass(frozen=True)
class Additions:
    """What a program adds; everything is optional.

    Attributes:
        program: the name of the program in help texts.
        details: paragraphs of ``--help-all``.
        options: adds options, by an ``add`` of ``options.Parser.section``.
        peers: further columns.
        variants: the rows that replace a problem of a set with variants.
        tables: lines after the rows.
        commands: by the option that asks for them.
    """

    program: str = PROGRAM
    details: str = ""
    options: Callable[[Callable[..., None]], None] = lambda add: None
    peers: Sequence[Peer] = ()
    variants: Callable[[Problem, str, argparse.Namespace], Iterable[Problem]] | None = None
    tables: Callable[[Sequence[Row]], list[str]] = lambda rows: []
    commands: Mapping[str, Command] = dataclasses.field(default_factory=dict)


NOTHING = Additions()
