"""What a GPU does during a call, from ``jax.profiler``: each kernel's name, start and duration.

The profiler (CUPTI) sees every kernel and copy on the device with its own clock, so neither the
host's time nor the wait for it is counted. Overlapping kernels count once: times are lengths of
unions of intervals.
"""

from __future__ import annotations

import pathlib
import re
import tempfile
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax

from jaxconv.bench import hlo


class Event(NamedTuple):
    """One kernel, copy or fill on a device. Times are nanoseconds on the device's clock.

    ``hlo_op`` is the instruction of the compiled program that launched it, "" where unknown.
    """

    name: str
    start: float
    duration: float
    hlo_op: str = ""

    @property
    def end(self) -> float:
        return self.start + self.duration


def device_events(run: Callable[[], object]) -> list[Event]:
    """Everything that GPUs execute during ``run()``, which waits for its results; by start.

    Empty if JAX has no GPU.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # the host's functions are not looked at and slow the host down
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        paths = pathlib.Path(folder).rglob("*.xplane.pb")
        profiles = [jax.profiler.ProfileData.from_file(str(path)) for path in paths]
        return sorted((e for p in profiles for e in read(p)), key=lambda e: (e.start, e.end))


def read(profile: jax.profiler.ProfileData) -> Iterable[Event]:
    """The events of all streams of all GPUs in a profile."""
    for plane in profile.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            # Other lines, where there are any, sum the streams up.
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                op = next((str(v) for k, v in event.stats if k == "hlo_op"), "")
                yield Event(event.name, event.start_ns, event.duration_ns, op)


def union_seconds(events: Iterable[Event]) -> float:
    """The seconds during which at least one of the events was active."""
    total = end = 0.0
    for event in sorted(events, key=lambda e: e.start):
        total += max(0.0, event.end - max(event.start, end))
        end = max(end, event.end)
    return total * 1e-9


# --- which events compute convolutions ------------------------------------------------------------

# These contain other instructions, so they do not tell what a kernel computes.
_CONTROL = {"call", "while", "conditional", "async-start"}

# Kernels of jaxconv, cuDNN, cuBLAS, CUTLASS and Triton's matrix products. "conv" as in cudnn's
# conv2d, and not as in XLA's loop_convert_fusion.
_COMPUTING_KERNEL = re.compile(
    r"(fprop|dgrad|wgrad)_[a-z]+|jaxconv|cudnn|cutlass|cublas|xmma|nvjet|implicit|winograd"
    r"|conv(?!ert)|gemm|splitk|nchwtonhwc|nhwctonchw|fft",
    re.IGNORECASE,
)
# jaxconv's kernels for operations that XLA computes in other libraries' programs: batch norm, max
# pooling.
_OTHER_KERNEL = re.compile("SumMasked|SumMoments|NormaliseAndAdd|PoolMaxima|GatherGradient")


class Classifier:
    """Finds the kernels of convolutions and matrix products among those of a program.

    The instruction of the program decides; it is found by the event's ``hlo_op``, or by the
    kernel's name, which XLA derives from the instruction's. If neither leads to an instruction (a
    library's kernel inside a command buffer), the kernel's name decides. All others count as the
    rest.

    Args:
        text: of the compiled program, ``compiled.as_text()``.
    """

    def __init__(self, text: str):
        self.instructions = _computing(text)
        self._by_kernel = {_kernel_name(n): value for n, value in self.instructions.items()}

    def __call__(self, event: Event) -> bool:
        """Whether the event is part of a convolution or a matrix product."""
        for table, name in ((self.instructions, event.hlo_op), (self._by_kernel, event.name)):
            if name in table:
                return table[name]
        if _OTHER_KERNEL.search(event.name):
            return False
        return bool(_COMPUTING_KERNEL.search(event.name))


def _kernel_name(instruction: str) -> str:
    return re.sub(r"[.\-]", "_", instruction)


def _computing(text: str) -> dict[str, bool]:
    """Instruction -> whether it is a convolution or a matrix product, fused ones included.

    Instructions of control flow are left out.
    """
    program = hlo.parse(text)
    instructions = {i.name: i for each in program.computations.values() for i in each}

    def computes(name: str) -> bool:
        instruction = instructions[name]
        if instruction.opcode == "fusion":
            members = program.computations.get(instruction.called, ())
            return any(computes(member.name) for member in members)
        return instruction.opcode in ("convolution", "dot") or instruction.computes

    return {name: computes(name) for name, i in instructions.items() if i.opcode not in _CONTROL}


class Split(NamedTuple):
    """Seconds of device time: convolutions and matrix products, and everything else."""

    convolutions: float
    rest: float


def split(events: Iterable[Event], computing: Callable[[Event], bool]) -> Split:
    """Device time in two parts; where kernels of both overlap, it counts as the convolutions'."""
    events = list(events)
    convolutions = union_seconds(e for e in events if computing(e))
    return Split(convolutions, union_seconds(events) - convolutions)


class Kernel(NamedTuple):
    """All events of one name: how many, their seconds in sum, and whether they are convolutions."""

    name: str
    count: int
    seconds: float
    computing: bool


def largest(events: Iterable[Event], computing: Callable[[Event], bool]) -> list[Kernel]:
    """The kernels of a trace, the one that takes longest in sum first."""
    groups: dict[tuple[str, bool], list[float]] = {}
    for event in events:
        groups.setdefault((event.name, computing(event)), []).append(event.duration)
    kernels = [Kernel(n, len(d), sum(d) * 1e-9, c) for (n, c), d in groups.items()]
    return sorted(kernels, key=lambda kernel: -kernel.seconds)
