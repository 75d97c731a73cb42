"""Device kernels on the host, in tests/emulator: exact results without a GPU.

For the families in ``emulated_cases.WHOLE`` every line of the tables runs, with alternating
operations and types. For other families each file of a device kernel runs, and once more with the
fused epilogue. Each case runs twice: first copies arrive as late as the waits allow, then
immediately and with the threads of a CTA in reverse order.
"""

from __future__ import annotations

import os
import re
import subprocess

import pytest
from emulated import host_build
from emulated_cases import CASES, WHOLE
from kernel_tables import fused_instances, instances


def test_every_device_kernel_is_emulated():
    """Each device kernel's file has a case, also fused; ``WHOLE`` has all operations and types."""
    emulated = {host_build.forms()[c.instance][0::4] for c in CASES}
    missing = {(i.family, i.source) for i in instances()} - emulated
    assert not missing, f"no case in OTHERS runs {missing}"
    missing = {(i.family, i.source) for i in fused_instances()} - {
        host_build.forms()[c.instance][0::4] for c in CASES if c.instance.endswith("_fused")
    }
    assert not missing, f"no case in EPILOGUES runs {missing}"
    for family in WHOLE:
        forms = [host_build.forms()[c.instance] for c in CASES]
        of_family = [(op, dtype) for of, op, dtype, *_ in forms if of == family]
        tables = [i for i in instances() if i.family == family]
        assert {op for op, _ in of_family} == {i.op for i in tables}
        assert {dtype for _, dtype in of_family} == {i.dtype for i in tables}


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.instance}-{c.name}")
def test_a_kernel_in_the_emulator(programs, case):
    program = str(programs[case.eight_bit])
    # The 8-bit program takes a second for each run, mostly to draw random operands.
    for seed in ("1",) if case.eight_bit else ("0", "1"):
        if case.eight_bit:
            command = [program, "check", case.key, case.instance]
        else:
            command = [program, case.instance, case.key, f"seed={seed}", *case.options]
        environment = {**os.environ, "EMULATOR_SEED": seed, "SMS": "2"}
        ran = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=300
        )
        output = (ran.stdout + ran.stderr)[-4000:]
        repro = f"python tests/emulator/run.py {case.instance} '{case.key}' seed={seed}"
        assert ran.returncode == 0, " ".join((repro, *case.options)) + f"\n{output}"


def test_passes_in_the_emulator(programs):
    """Passes are exact in every form, and their bits do not depend on the order of threads."""
    hashes = []
    for mode, seed in (("check", "1"), ("hash", "0"), ("hash", "1")):
        ran = subprocess.run(
            [str(programs["passes"]), mode],
            env={**os.environ, "EMULATOR_SEED": seed},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, f"EMULATOR_SEED={seed} {mode}\n{ran.stdout}{ran.stderr}"
        hashes.append(ran.stdout.splitlines()[:-1])
    assert hashes[0] == [] and len(set(hashes[1])) == len(hashes[1]) > 40
    assert hashes[1] == hashes[2]


def test_every_pass_is_emulated():
    """Every kernel that the FFI handlers launch without an instance has a ``*_cases.cuh``."""
    handlers = (host_build.CC / "ffi" / "cuda_platform.cc").read_text()
    cases = [path.read_text() for path in (host_build.TESTS / "cc").glob("*_cases.cuh")]
    launched = set(re.findall(r"\b(Launch[A-Z]\w*)\(", handlers))
    assert "LaunchMaskedSums" in launched
    missing = {name for name in launched if not any(f"{name}(" in text for text in cases)}
    assert not missing, f"{missing} have no cases: pass_check.cu says how they are added"
