"""Random shardings at scale: programs of one convolution on eight virtual CPU devices.

    python tests/sharding/sharding_fuzz.py --seed 7 --record tests/sharding_fuzz.json
    python tests/sharding/sharding_fuzz.py --total tests/sharding_fuzz.json
    python tests/sharding/sharding_fuzz.py --seed 7 --problem 12

``sharding_cases`` draws the cases, ``sharding_judge`` judges them. A failure is one line with its
repro, the arguments of the third command. ``fuzz_record`` describes segments and the record.
"""

from __future__ import annotations

import collections
import pathlib
import sys
from collections.abc import Sequence

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "support"))

import fuzz_record

FUZZ = fuzz_record.Fuzz(
    __file__,
    segment=50,
    environment=fuzz_record.cpu_environment(devices=8),
)


def work(seed: int, indices: Sequence[int], options) -> dict:
    """Judges the cases of one segment."""
    import jax_settings  # noqa: F401
    from sharding_judge import judge

    counts, failures, forms = collections.Counter(), [], collections.Counter()
    for judgement in judge(seed, indices):
        forms[judgement.case.form] += 1
        counts.update(judgement.counts)
        failures += filter(None, [judgement.failure])
    return fuzz_record.found(counts, failures, forms)


def main() -> int:
    parser = fuzz_record.parser(__doc__, problems=1000)
    parser.add_argument("--lax", type=int, nargs="+", help="print lax's side of these cases")
    options = parser.parse_args()
    if options.lax is not None:
        import jax_settings  # noqa: F401
        from sharding_judge import print_lax

        print_lax(options.seed, options.lax)
        return 0
    return fuzz_record.main(FUZZ, options, work)


if __name__ == "__main__":
    sys.exit(main())
