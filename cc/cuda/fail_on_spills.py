"""Runs a compiler, given as the arguments, and fails where ptxas reports spilled registers.

ptxas could fail by itself (--warning-as-error), but nvcc records ptxas' options in the PTX of the
library, and the driver that compiles the PTX for a newer GPU obeys them: a spill there, which costs
a little time, would keep the kernel from loading.
"""

import subprocess
import sys

REPORT = b"Registers are spilled to local memory"


def main() -> int:
    """Returns the compiler's status, or 1."""
    run = subprocess.run(
        sys.argv[1:], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    sys.stderr.buffer.write(run.stdout)
    return run.returncode or int(REPORT in run.stdout)


if __name__ == "__main__":
    sys.exit(main())
