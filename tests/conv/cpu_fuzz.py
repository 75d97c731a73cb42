"""Runs the random problems of ``test_fuzz`` on the CPU, in any number.

    python tests/conv/cpu_fuzz.py --problems 100000 --seed 7 --record tests/cpu_fuzz.json
    python tests/conv/cpu_fuzz.py --total tests/cpu_fuzz.json

The index determines the form: a call of ``conv_general_dilated`` with its gradients, a call of
``lax`` under ``override``, or a primitive alone. The first two are compared with ``lax`` and with
float64 in NumPy, the last exactly with NumPy. Every problem runs twice. A failure is one line with
its repro, ``python -m pytest tests/conv/test_fuzz.py --seed S --problem I``. ``fuzz_record``
describes segments and the record; a run belongs to this checkout if the hash of the kernels is
equal.

XLA takes nearly all of the time, to compile the copies around the kernels and lax's convolutions.
The flags of ``xla_flags`` make this several times faster and do not change the kernels.
"""

from __future__ import annotations

import collections
import pathlib
import sys
from collections.abc import Sequence

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "support"))

import fuzz_record

FORMS = ("calls", "override", "primitives")
FUZZ = fuzz_record.Fuzz(
    __file__,
    segment=500,
    # One device, not the eight that the tests of sharding use.
    environment=fuzz_record.cpu_environment(),
    own=("kernels",),
)


def work(seed: int, indices: Sequence[int], options) -> dict:
    """Judges the problems of one segment."""
    import jax
    import jax_settings  # noqa: F401
    from fuzz_calls import draw_call
    from fuzz_judge import BEYOND, BEYOND_SHARE, OURS, Side, judge_all, judge_primitives
    from jax import lax

    import jaxconv
    from jaxconv._src.library import native

    kernels = native.load("cpu")
    if isinstance(kernels, native.Refusal):
        raise SystemExit(f"no CPU kernels: {kernels.reason}")
    jax.config.update("jax_disable_most_optimizations", True)  # also on a machine with a GPU
    device, counts, failures = jax.devices("cpu")[0], collections.Counter(), []
    forms = options.forms
    drawn = {form: [i for i in indices if i % len(forms) == at] for at, form in enumerate(forms)}
    sides = {"calls": OURS, "override": Side(lax.conv_general_dilated, jaxconv.override)}
    for form, chosen in drawn.items():
        if form in sides:
            calls = [draw_call(seed, i) for i in chosen]
            complaints, seen = judge_all(sides[form], calls, device)
            counts.update(seen)
        else:
            with jax.default_device(device):
                complaints = judge_primitives(seed, chosen)
        failures += complaints
    normal = counts[BEYOND] + counts["normal results within twice lax's error"]
    if counts[BEYOND] > max(2, BEYOND_SHARE * normal):
        where = f"--seed {seed}, {indices[0]} to {indices[-1]}"
        failures.append(f"{where}: {counts[BEYOND]} {BEYOND}")
    return fuzz_record.found(counts, failures, {form: len(each) for form, each in drawn.items()})


def main() -> int:
    parser = fuzz_record.parser(__doc__)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    options = parser.parse_args()
    return fuzz_record.main(FUZZ, options, work, ("--forms", *options.forms))


if __name__ == "__main__":
    sys.exit(main())
