"""Runs JAX's own convolution tests with this library under ``lax``'s convolution.

    python tests/lax/jax_suite.py --source PATH --cases 100

PATH is a checkout of JAX at the tag of the installed release (``git clone --depth 1 --branch
jax-v0.10.2 https://github.com/jax-ml/jax``). The unchanged tests with "Conv" in their names run
after ``jaxconv.install(algorithm="native")``. The last lines count, by dtype, how many of the
lowered convolutions took this library's kernels. Exit status 1: a test fails, or the share is too
small.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import pathlib
import subprocess
import sys

FILES = ("lax_test.py", "lax_autodiff_test.py", "lax_vmap_test.py")
EMPTY = "a tensor has no elements"
COUNTED = ("f32", "bf16", "f16")  # in these dtypes SHARE of the convolutions must take kernels
SHARE = 0.8


class Counter:
    """A pytest plugin that installs the library and records every lowered convolution."""

    def __init__(self):
        self.found: list = []
        self._stack = contextlib.ExitStack()

    def pytest_sessionstart(self):
        import jaxconv
        from jaxconv._src.call import record

        jaxconv.install(algorithm="native")
        self._stack.callback(jaxconv.uninstall)
        self.found = self._stack.enter_context(record.recording())

    def pytest_sessionfinish(self):
        self._stack.close()

    def report(self) -> bool:
        """Prints the counts; returns whether the share is large enough."""
        ours, total = collections.Counter(), collections.Counter()
        reasons = collections.Counter()
        empty = 0
        for c in self.found:
            if any(reason == EMPTY for _, reason in c.refusals):
                empty += 1  # the result is constant, so no kernel runs
                continue
            dtype = c.operands[0].split("[")[0]
            total[dtype] += 1
            ours[dtype] += c.instance is not None
            if c.instance is None and dtype in COUNTED:
                reasons.update(f"{kernel}: {reason}" for kernel, reason in set(c.refusals))
        for dtype in sorted(total):
            print(f"{dtype}: {ours[dtype]} of {total[dtype]} convolutions on our kernels")
        for reason, count in reasons.most_common(12):
            print(f"  {count} x {reason}")
        counted = sum(total[d] for d in COUNTED)
        share = sum(ours[d] for d in COUNTED) / counted if counted else 0.0
        print(f"{empty} convolutions without elements, which compute nothing, are not counted")
        print(f"{', '.join(COUNTED)}: {share:.1%} of {counted}, at least {SHARE:.0%} wanted")
        return share >= SHARE


def run_file(path: str, selection: str) -> int:
    """Runs one of JAX's test files in this process; returns the exit status."""
    import pytest

    counter = Counter()
    options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "-k", selection]
    status = pytest.main([*options, path], plugins=[counter])
    return int(status) or int(not counter.report())


def main() -> int:
    """Runs every file in a separate process, because each reads its configuration when imported."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", required=True, help="a checkout of JAX")
    parser.add_argument("--cases", type=int, default=100, help="generated cases a test")
    parser.add_argument("--select", default="Conv and not Convert", help="pytest's -k expression")
    parser.add_argument("--file", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.file:
        return run_file(options.file, options.select)
    environment = {**os.environ, "JAX_NUM_GENERATED_CASES": str(options.cases)}
    status = 0
    for name in FILES:
        path = pathlib.Path(options.source, "tests", name)
        print(f"== {name}", flush=True)
        command = [sys.executable, __file__, "--source", options.source, "--file", str(path)]
        command += ["--select", options.select]
        status |= subprocess.run(command, env=environment).returncode
    return status


if __name__ == "__main__":
    sys.exit(main())
