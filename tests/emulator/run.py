"""Runs a kernel instance on the host.

    python tests/emulator/run.py [--sanitize] INSTANCE 'PROBLEM' [seed=N] [slices=N] [sms=N] [float]
        [tolerance=X] [weight=N] [offset=N]

run_kernels.cc explains the arguments. Instances with 8-bit operands run in cc/int8_check.cu, which
takes only ``seed``, ``sms`` and ``mode`` (mode=check or mode=error). ``--sanitize`` adds
AddressSanitizer and UBSan.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tempfile

from host_build import EMULATOR, TESTS, build, forms
from kernel_tables import INT8_FAMILIES


def command(name: str, problem: str, options: list[str], folder: pathlib.Path, sanitize: bool):
    """Builds an instance's program; returns its command line and environment.

    Raises:
        RuntimeError: with the compiler's message.
    """
    families = {instance: of[0] for instance, of in forms().items()}
    if families.get(name) in INT8_FAMILIES:
        values = dict(option.split("=") for option in options)
        environment = {"EMULATOR_SEED": values.get("seed", "0"), "SMS": values.get("sms", "2")}
        program = build([name], folder, TESTS / "cc" / "int8_check.cu", sanitize)
        return [str(program), values.get("mode", "check"), problem, name], environment
    # A filter stored as krsc is read by the instance of the other operation.
    op, _, rest = name.partition("_")
    other = {"fprop": "dgrad", "dgrad": "fprop"}.get(op, op) + "_" + rest
    names = [name, other] if " krsc" in problem and other in families else [name]
    program = build(names, folder, EMULATOR / "run_kernels.cc", sanitize)
    return [str(program), name, problem, *options], {}


def main(arguments: list[str]) -> int:
    sanitize = "--sanitize" in arguments
    arguments = [a for a in arguments if a != "--sanitize"]
    if len(arguments) < 2:
        print(__doc__)
        return 3
    cache = pathlib.Path(tempfile.gettempdir()) / f"jaxconv-emulator-{os.getuid()}"
    try:
        run, environment = command(*arguments[:2], arguments[2:], cache, sanitize)
    except RuntimeError as error:
        print(error)
        return 4
    return subprocess.run(run, env={**os.environ, **environment}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
