"""What the command lines of layers and of networks share: types of arguments, and files."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

PROGRAM = "python -m jaxconv.bench"
_PLOT_FORMATS = (".png", ".pdf", ".svg")


class Parser(argparse.ArgumentParser):
    """Options in sections, of which ``--help`` shows a screen and ``--help-all`` everything."""

    def __init__(self, about: str, examples: str, details: str, program: str = PROGRAM):
        """A parser without options.

        Args:
            about: what the command does.
            examples: command lines, below the options of ``--help``.
            details: what the results mean, below the options of ``--help-all``.
            program: its name.
        """
        super().__init__(
            prog=program,
            usage="%(prog)s [options]",
            description=about,
            epilog=examples,
            formatter_class=_Formatter,
            add_help=False,
        )
        self._details = details
        self._rare: list[tuple[argparse.Action, str]] = []

    def section(self, title: str) -> Callable[..., None]:
        """Begins a section; what it returns adds an option to it.

        That takes the arguments of ``add_argument``, and ``rare=True`` of an option that
        ``--help-all`` alone shows.
        """
        group = self.add_argument_group(title)

        def add(*names: str, rare: bool = False, help: str, **rest: Any) -> None:
            shown = argparse.SUPPRESS if rare else help
            action = group.add_argument(*names, help=shown, **rest)
            if rare:
                self._rare.append((action, help))

        return add

    @staticmethod
    def add_help_to(add: Callable[..., None]) -> None:
        """Adds ``--help`` and ``--help-all`` to a section."""
        add("-h", "--help", action="help", help="this text")
        add("--help-all", action=_HelpAll, nargs=0, help="every option, and what results mean")

    def show_everything(self) -> None:
        """Makes the help that of ``--help-all``."""
        for action, text in self._rare:
            action.help = text
        self.epilog = f"{self.epilog}\n{self._details}"


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=30)


class _HelpAll(argparse.Action):
    def __call__(self, parser, *_: Any) -> None:
        parser.show_everything()
        parser.print_help()
        parser.exit()


def count(text: str) -> int:
    """The type of an option that is a whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return value


def seconds(text: str) -> float:
    """The type of an option that is a time."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected seconds, got {text!r}")
    return value


def add_outputs(add: Callable[..., Any], plot: str) -> None:
    """Adds ``--json`` and ``--plot``.

    Args:
        add: a parser's ``add_argument``, or what ``Parser.section`` returns.
        plot: what is drawn.
    """
    add("--json", metavar="FILE", help="write all results")
    add("--plot", metavar="FILE.png", help=f"draw {plot} (needs matplotlib)")


def check_outputs(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Ends the program with an error, before anything is measured, where a file cannot be written.

    Args:
        parser: reports the error.
        arguments: with the values of ``add_outputs``.
    """
    for option in ("json", "plot"):
        path = getattr(arguments, option)
        if path and not pathlib.Path(path).resolve().parent.is_dir():
            parser.error(f"--{option}: {path}: the folder does not exist")
        if path and pathlib.Path(path).is_dir():
            parser.error(f"--{option}: {path}: is a folder")
    if arguments.plot and pathlib.Path(arguments.plot).suffix.lower() not in _PLOT_FORMATS:
        parser.error(f"--plot: {arguments.plot}: expected a name in {', '.join(_PLOT_FORMATS)}")
    if arguments.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot: matplotlib is not installed (`pip install matplotlib`)")


def write_json(path: str, content: dict[str, Any]) -> None:
    """Writes results to a file, which always is either the old or the new one."""
    text = json.dumps(content, indent=1) + "\n"
    target = pathlib.Path(path)
    if target.exists() and not target.is_file():  # a pipe or a terminal
        target.write_text(text)
        return
    written = target.with_name(f".{target.name}.{os.getpid()}")
    written.write_text(text)
    written.replace(target)
