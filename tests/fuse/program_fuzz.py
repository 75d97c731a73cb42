"""Random programs of convolutions, under ``override`` and ``fuse``, against lax.

    python tests/fuse/program_fuzz.py --problems 1000 --seed 7 --record tests/program_fuzz.json
    python tests/fuse/program_fuzz.py --seed 7 --problem 12
    python tests/fuse/program_fuzz.py --total tests/program_fuzz.json

``program_draw`` draws a program of (seed, index), ``program_judge`` judges it. A failure is one
line that begins with its repro; ``--problem`` shrinks a failing program while it fails in the same
mode. Segments and the record are those of ``fuzz_record``. ``--gpu`` runs the programs on a GPU;
every float32 convolution asks for precision HIGHEST.
"""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import sys
from collections.abc import Iterator, Sequence

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "support"))

import fuzz_record

GPU = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "OPENBLAS_NUM_THREADS": "1"}


def fuzz(gpu: bool) -> fuzz_record.Fuzz:
    if gpu:
        kernels = ("cc/core", "cc/cuda", "cc/ffi")
        return fuzz_record.Fuzz(__file__, segment=8, environment=GPU, kernels=kernels)
    return fuzz_record.Fuzz(__file__, segment=50, environment=fuzz_record.cpu_environment())


def work(seed: int, indices: Sequence[int], options) -> dict:
    """Judges the programs of one segment."""
    import jax
    import jax_settings  # noqa: F401
    from program_draw import draw
    from program_judge import FUSED, judge

    if not options.gpu:
        jax.config.update("jax_disable_most_optimizations", True)  # on a GPU machine too
    counts: collections.Counter[str] = collections.Counter()
    failures = []
    for index in indices:
        program = draw(seed, index)
        complaints, seen = judge(program)
        counts.update(seen)
        repro = f"--seed {seed} --problem {index}"
        failures += [f"{repro}: {each}, {program}" for each in complaints]
        if complaints and options.problem is not None:
            found = shrunk(program, complaints[0].partition(":")[0])
            failures += [f"{repro} shrunk: {judge(found)[0][0]}, {found}"]
        if len(counts) and index % 20 == 19:
            jax.clear_caches()
    fused = counts.pop(FUSED, 0)
    return fuzz_record.found(counts, failures, {"programs": len(indices), FUSED: fused})


def shrunk(program, mode: str):
    """A smaller program that fails in the same mode, and from which no part can be removed."""
    from program_judge import judge

    def fails(candidate) -> bool:
        try:
            return bool(judge(candidate, (mode,))[0])
        except Exception:  # not a program: an empty shape, or groups that do not divide
            return False

    smaller = True
    while smaller:
        smaller = next(filter(fails, reductions(program)), None)
        program = smaller or program
    return program


def reductions(program) -> Iterator:
    """Programs with one part less than ``program``."""
    layers = program.layers
    for at in range(len(layers) - 1, -1, -1):
        if len(layers) > 1:
            yield dataclasses.replace(program, layers=layers[:at] + layers[at + 1 :])
    for at, layer in enumerate(layers):
        changed = [
            dataclasses.replace(layer, steps=layer.steps[:i] + layer.steps[i + 1 :])
            for i in range(len(layer.steps))
        ]
        changed += [dataclasses.replace(layer, wide=False)] * layer.wide
        for name, value in (
            ("window", 1),
            ("stride", 1),
            ("dilation", 1),
            ("groups", 1),
            ("k", 1),
            ("expansion", 1),
        ):
            if getattr(layer.conv, name) != value:
                conv = dataclasses.replace(layer.conv, **{name: value})
                changed.append(dataclasses.replace(layer, conv=conv))
        for each in changed:
            yield dataclasses.replace(program, layers=(*layers[:at], each, *layers[at + 1 :]))
    n, extent, c = program.shape
    for shape in ((1, extent, c), (n, 3, c), (n, extent, 1)):
        if shape != program.shape:
            yield dataclasses.replace(program, shape=shape)
    # Values are listed from the plainest on, so no reduction is undone.
    for name, values in (
        ("constants", (False, True)),
        ("target", ("",)),
        ("transform", ("jit", "grad")),
        ("layout", ("NHWC",)),
        ("dtype", ("float32",)),
        ("data", ("integers", "normal")),
    ):
        now = getattr(program, name)
        plainer = values[: values.index(now)] if now in values else values
        for value in plainer:
            yield dataclasses.replace(program, **{name: value})


def main() -> int:
    parser = fuzz_record.parser(__doc__, problems=1000)
    parser.add_argument("--gpu", action="store_true", help="on a GPU")
    options = parser.parse_args()
    arguments = ["--gpu"] * options.gpu
    if options.problem is not None:
        arguments += ["--problem", str(options.problem)]
    return fuzz_record.main(fuzz(options.gpu), options, work, arguments)


if __name__ == "__main__":
    sys.exit(main())
