"""Unusual inputs of every public function: a clear error, or the result of lax or NumPy.

As a script it prints a table, and exits with status 1 if a case fails:

    python tests/functions/adversary.py [PATTERN]

``test_adversary.py`` runs the same cases. Cases that could end the process run in a separate one.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fnmatch
import functools
import io
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

if __name__ == "__main__":  # as conftest.py does for the tests
    os.environ.setdefault("JAXCONV_ALGORITHM", "native")
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    os.environ["XLA_FLAGS"] = flags.strip()

import jax
import numpy as np

# These functions refuse while JAX traces: nothing is compiled or run.
WHILE_TRACING = ("conv/", "conv_general_dilated/", "conv_transpose/", "epilogue/", "int8/")

# The time limit in seconds for all cases of a process.
LIMIT = 240


@dataclasses.dataclass(frozen=True)
class Refused:
    """Expects an error of a type, with certain words in its message."""

    error: type[Exception] | tuple[type[Exception], ...]
    words: tuple[str, ...]

    def judge(self, run: Callable[[], Any]) -> str:
        """The reason why the outcome is not the expected one, or ""."""
        try:
            found = materialize(run())
        except BaseException as error:
            if not isinstance(error, self.error):
                return f"{type(error).__name__}: {error}"
            message = str(error)
            missing = [word for word in self.words if word not in message]
            return f"{missing} not in {type(error).__name__}: {message}" if missing else ""
        return f"no error, but {shown(found)}"


@dataclasses.dataclass(frozen=True)
class Answer:
    """Expects the result of ``reference``: shapes, dtypes and all numbers."""

    reference: Callable[[], Any]

    def judge(self, run: Callable[[], Any]) -> str:
        """The reason why the outcome is not the expected one, or ""."""
        try:
            expected = materialize(self.reference())
        except Exception as error:
            return f"the reference raises {type(error).__name__}: {error}"
        try:
            found = materialize(run())
        except BaseException as error:
            return f"{type(error).__name__}: {error}"
        if len(found) != len(expected):
            return f"expected {len(expected)} values, got {len(found)}"
        for f, e in zip(found, expected, strict=True):
            if type(f) is not type(e) or (isinstance(e, np.ndarray) and f.dtype != e.dtype):
                return f"expected {shown([e])}, got {shown([f])}"
            if not isinstance(e, np.ndarray):
                if f != e:
                    return f"expected {e!r}, got {f!r}"
            elif f.shape != e.shape:
                return f"expected {shown([e])}, got {shown([f])}"
            elif not np.array_equal(f, e, equal_nan=e.dtype.kind in "fc"):
                at = tuple(np.argwhere(f != e)[0])
                return f"expected {e[at]} at {at}, got {f[at]}"
        return ""


@dataclasses.dataclass(frozen=True)
class Case:
    """One unusual input and its expected outcome.

    Attributes:
        name: "function/what is unusual".
        run: makes the call.
        expected: its outcome.
        apart: whether the call could end the process.
    """

    name: str
    run: Callable[[], Any]
    expected: Refused | Answer
    apart: bool = False

    def judge(self) -> str:
        """The reason why the outcome is not the expected one, or ""."""
        quiet = contextlib.redirect_stdout(io.StringIO())
        with warnings.catch_warnings(), quiet, jax.default_device(jax.devices("cpu")[0]):
            warnings.simplefilter("ignore")
            run = self.run
            error = getattr(self.expected, "error", None)
            if error in (TypeError, ValueError) and self.name.startswith(WHILE_TRACING):
                run = functools.partial(jax.eval_shape, run)
            return self.expected.judge(run)


def materialize(tree: Any) -> list[Any]:
    """The leaves of a result: arrays are computed and converted to NumPy, other objects stay.

    Arrays of dtypes that NumPy lacks are converted to float32.
    """
    leaves = []
    # In jaxlib 0.10.2, a NumPy view of an array whose computation failed ends the process.
    jax.block_until_ready(tree)
    for leaf in jax.tree.leaves(tree, is_leaf=lambda x: x is None):
        if isinstance(leaf, jax.Array | np.ndarray):
            leaf = np.asarray(leaf)
            if leaf.dtype.kind == "V":
                leaf = leaf.astype(np.float32)
        leaves.append(leaf)
    return leaves


def shown(leaves: list[Any]) -> str:
    return ", ".join(
        f"{x.dtype}{list(x.shape)}" if isinstance(x, np.ndarray) else repr(x)[:60] for x in leaves
    )


def in_processes(cases: list[Case]) -> Iterator[tuple[Case, str]]:
    """Judges cases in a separate process. If a case ends it, a new process runs the rest."""
    todo = list(cases)
    while todo:
        command = [sys.executable, os.path.abspath(__file__), "--apart", *(c.name for c in todo)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
            try:
                out, err = child.communicate(timeout=LIMIT)
            except subprocess.TimeoutExpired:
                child.kill()
                out, err = child.communicate()
        verdicts = [json.loads(line) for line in out.decode().splitlines()]
        for verdict in verdicts:
            yield todo.pop(0), verdict
        if todo:
            tail = err.decode(errors="replace").strip()[-600:]
            yield todo.pop(0), f"ABORT: the process ended with {child.returncode}: {tail}"


def cases() -> list[Case]:
    import adversary_cases  # it imports this module

    found = adversary_cases.all_cases()
    names = [case.name for case in found]
    assert len(set(names)) == len(names), [n for n in names if names.count(n) > 1]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pattern", nargs="?", default="*", help="of the names of the cases")
    parser.add_argument("--apart", nargs="+", metavar="NAME", help="these, each a line of JSON")
    arguments = parser.parse_args()
    jax.config.update("jax_disable_most_optimizations", True)
    if arguments.apart:
        by_name = {case.name: case for case in cases()}
        for name in arguments.apart:
            print(json.dumps(by_name[name].judge()), flush=True)
        return 0
    chosen = [case for case in cases() if fnmatch.fnmatch(case.name, arguments.pattern)]
    width = max((len(case.name) for case in chosen), default=0)
    counts = {"error": 0, "answer": 0, "fails": 0, "aborts": 0}

    def tell(case: Case, verdict: str) -> None:
        kind = "error" if isinstance(case.expected, Refused) else "answer"
        if verdict:
            kind = "aborts" if verdict.startswith("ABORT") else "fails"
        counts[kind] += 1
        print(f"{case.name:{width}}  {kind:6}  {verdict}".rstrip(), flush=True)

    for case in chosen:
        if not case.apart:
            tell(case, case.judge())
    for case, verdict in in_processes([case for case in chosen if case.apart]):
        tell(case, verdict)
    print(f"{len(chosen)} cases: " + ", ".join(f"{n} {kind}" for kind, n in counts.items()))
    return 1 if counts["fails"] or counts["aborts"] else 0


if __name__ == "__main__":
    sys.modules["adversary"] = sys.modules["__main__"]
    sys.exit(main())
