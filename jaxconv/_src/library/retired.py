"""Kernel instances that former versions had: their names are in programs that these exported."""

from __future__ import annotations

from typing import NamedTuple


class Retired(NamedTuple):
    """What became of an instance.

    Attributes:
        since: the first version without it.
        instead: what serves its problems.
    """

    since: str
    instead: str


# By name. Whoever deletes an instance of a version that was published enters it here.
RETIRED: dict[str, Retired] = {}


def advice(instance: str) -> str:
    """What to do about a program that names an instance that this version lacks."""
    what = "The program was exported by another version of jaxconv"
    if instance in RETIRED:
        since, instead = RETIRED[instance]
        what += f"; since {since} {instead} takes the place of this kernel"
    return f"{what}. Run it with the version that exported it, or export it again with this one."
