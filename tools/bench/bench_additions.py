"""The additions of this repository to the bench of the wheel."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence

import peer_cudnn
import peer_torch
import regret
import winograd_errors
import winograd_variants

from jaxconv.bench import __main__ as bench
from jaxconv.bench.additions import Additions
from jaxconv.bench.problem import Problem, Row

PROGRAM = "python tools/bench"

_DETAILS = """
--peer cudnn is cuDNN's own convolution in NHWC by its graph API, the fastest of its plans: fprop of
int8, with the same epilogue, float16 and bfloat16. --peer cudnn-winograd is the fastest of its
plans of Winograd's, in NCHW, the only layout that these take.

--set winograd has rows for variants of Winograd beside the direct kernel (algorithm native) and
lax, in fprop also with the filter prepared before, and ends with a table by problem and one of all
problems. Variants are the kernels that are predicted fastest, of layers seed_* one of each form
too, or with --every-variant all. "direct/it" above 1 means that a variant takes less time than the
direct kernel.

--regret times every kernel that takes a problem instead, and shows how much longer the selected one
takes than the best; --algorithm FAMILY compares within one family. --winograd-errors measures the
errors of Winograd (see --winograd-errors --help).
"""


def _add_options(add: Callable[..., None]) -> None:
    add("--regret", action="store_true", help="the selected kernel beside all others")
    errors = "errors of Winograd, see --winograd-errors --help"
    add("--winograd-errors", nargs="*", metavar="TILE", help=errors)
    every = "all kernels in --set winograd, see below"
    add("--every-variant", action="store_true", rare=True, help=every)


def _variants(problem: Problem, platform: str, arguments: argparse.Namespace) -> Iterator[Problem]:
    return winograd_variants.of(problem, platform, arguments.every_variant)


def _tables(rows: Sequence[Row]) -> list[str]:
    return [*winograd_variants.summary(rows), *winograd_variants.overview(rows)]


ADDITIONS = Additions(
    program=PROGRAM,
    details=_DETAILS,
    options=_add_options,
    peers=(
        peer_torch.Torch(),
        peer_cudnn.Cudnn("cudnn", winograd=False),
        peer_cudnn.Cudnn("cudnn-winograd", winograd=True),
    ),
    variants=_variants,
    tables=_tables,
    commands={"--regret": regret, "--winograd-errors": winograd_errors},
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the bench; returns the exit status."""
    return bench.main(argv, ADDITIONS)
