"""What the command lines of layers and of networks share: types of arguments, and files."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pathlib
from typing import Any

_PLOT_FORMATS = (".png", ".pdf", ".svg")


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


def add_outputs(parser: argparse.ArgumentParser, plot: str) -> None:
    """Adds ``--json`` and ``--plot``; ``plot`` says what is drawn."""
    parser.add_argument("--json", metavar="FILE", help="write all results")
    parser.add_argument("--plot", metavar="FILE.png", help=f"draw {plot} (needs matplotlib)")


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
