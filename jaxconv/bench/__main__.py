"""``python -m jaxconv.bench``: this library beside lax on this machine, by layers or networks."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import jax

from jaxconv.bench import command_layers, command_networks
from jaxconv.bench.additions import NOTHING, Additions


def main(argv: Sequence[str] | None = None, additions: Additions = NOTHING) -> int:
    """Runs the benchmark.

    Args:
        argv: the command line, without the program's name; ``sys.argv`` by default.
        additions: what the program has besides.

    Returns:
        The exit status: 0; 1 if a result is wrong, a kernel failed or nothing was measured; 130 if
        Ctrl-C ended it early.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    # A program from JAX's cache on disk would hide the time to compile it.
    jax.config.update("jax_enable_compilation_cache", False)
    # By the option that asks for it; without one, single layers are measured.
    for option, command in {"--network": command_networks, **additions.commands}.items():
        if any(a == option or a.startswith(f"{option}=") for a in argv):
            return command.main(argv)
    return command_layers.main(argv, additions)


if __name__ == "__main__":
    sys.exit(main())
